"""AMUSD for a finite number of tokens: exact moments by a recursion over the positions where drafts begin.

A draft that begins after s of l tokens continues until its first wrong token, at position r. Between, nothing is random: the
rounds of a draft that is never rejected are walked once for each s, and give the time of the decision on each r. A rejection drops
what was drafted after it, so s determines the law of what follows, if each outcome depends only on the one before.

One thing outlives a rejection: with `draft_stop` "pass" the pass in progress, which delays the next draft. If the target waits for
drafted tokens before each pass (`min_waiting` of 1 or more), the delay shifts all of the next draft, and adds to its time. Without
that wait the target's pass and the delayed draft overlap in a way that depends on earlier drafts: there is no closed form here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.interpret.account import attended_within
from model.methods.amusd.algorithm import Parameters
from model.methods.amusd.draft_clock import ConcurrentTimes, ConstantTimes, DraftClock
from model.methods.concurrent.concurrent_work import ModelPasses
from model.methods.rounds.round_moments import Moments
from model.outcomes.outcome_laws import Chain, Floats


class DraftTables(NamedTuple):
    """What drafts add to the totals, by the number s of tokens before a draft and the position r of its first wrong token.

    Shape (costs, starts, tokens); column `tokens` - 1 is for a draft without a wrong token: it ends with the sequence. Entries with
    r < s are 0.
    """

    time: Floats
    """From the order to draft to the decision on r; with the delay of the next draft by the pass in progress."""
    busy: Floats
    operations: Floats
    rounds: Floats
    drafted: Floats


def has_closed_form(parameters: Parameters) -> bool:
    """True if drafts can be treated one by one."""
    return parameters.stops_passes or parameters.min_waiting > 0


def draft_tables(parameters: Parameters, tokens: int, cost: StepCosts, starts: Sequence[int]) -> DraftTables:
    """Walk a draft without wrong tokens from each of these positions on, and tabulate what it adds if r is its first wrong one.

    At a cost, or at each of several joined ones.

    >>> from model.costs.layer_times import UnitCost
    >>> tables = draft_tables(Parameters(10, 4), 5, UnitCost(10, cost_ratio=0.2, link=1.0), [0])
    >>> tables.time[0, 0].tolist()  # two tokens arrive after 1 + 4 + 1; the pass that reads them decides on the third too
    [16.0, 16.0, 16.0, 26.0, 26.0]
    """
    prices, start = _prices_at(parameters, tokens, cost, starts)
    walked, of = _walk(parameters, prices, start), prices.cost
    # Positions s to r are drafted, but for the last of the sequence.
    until = np.zeros((len(prices.draft), tokens + 1))
    until[:, 1:-1] = np.cumsum(prices.draft[:, : tokens - 1], axis=1)
    until[:, -1] = prices.draft[:, : tokens - 1].sum(axis=1)
    right = np.maximum(until[:, walked.last][of] - until[of, start][:, None], 0.0)
    ratio = np.broadcast_to(cost.operations("draft") if tokens > 1 else 0.0, len(prices.draft))[of, None]
    devices = np.broadcast_to(cost.draft_devices, len(prices.draft))[of, None]
    busy = walked.verifying + (walked.stale + right) * devices
    operations = walked.rounds + walked.drafted + (walked.passes + walked.right) * ratio
    columns = walked.time + walked.shift, busy, operations, walked.rounds, walked.drafted
    filled = walked.filled
    return DraftTables(*(np.where(filled, each, 0.0).reshape(len(prices.draft), -1, tokens) for each in columns))


def _prices_at(
    parameters: Parameters, tokens: int, cost: StepCosts, starts: Sequence[int] | NDArray[np.int64]
) -> tuple[ConcurrentTimes, NDArray[np.int64]]:  # fmt: skip
    """Times of drafts that begin at each of these positions, at each of the costs, and their positions; shape (costs x starts,)."""
    costs, begin = np.size(cost.link), np.asarray(starts)
    which = np.repeat(np.arange(costs), begin.size)
    return ConcurrentTimes.of(parameters, tokens, cost, which), np.tile(begin, costs)


class _WalkedDrafts(NamedTuple):
    """Drafts up to the decision on their first wrong token, as `DraftTables`; entries with r < s are not filled."""

    start: NDArray[np.int64]
    time: Floats
    shift: Floats
    """Delay of the next draft by the pass in progress."""
    stale: Floats
    """Time of the draft passes that continue the wrong token."""
    passes: Floats
    """Number of these passes."""
    rounds: Floats
    drafted: Floats
    verifying: Floats
    """Time of the target's passes."""
    attended: Floats
    """Positions that the tokens of the target's passes attend to."""
    read: Floats
    """Positions that the target's passes read."""

    @property
    def filled(self) -> NDArray[np.bool_]:
        """True where r >= s."""
        return self.start[:, None] <= np.arange(self.time.shape[1])

    @property
    def last(self) -> NDArray[np.int64]:
        """End of the positions that are drafted as continuations of the right text, by r."""
        tokens = self.time.shape[1]
        return np.asarray(np.minimum(np.arange(tokens) + 1, tokens - 1))

    @property
    def right(self) -> NDArray[np.int64]:
        """Draft passes that continue the right text: one for each position from s to r, except the last of the sequence."""
        return np.asarray(np.maximum(self.last[None] - self.start[:, None], 0))


def _walk(parameters: Parameters, prices: ConcurrentTimes, start: NDArray[np.int64]) -> _WalkedDrafts:
    """Walk a draft without wrong tokens from each of these positions on."""
    tokens, clock = prices.tokens, DraftClock(parameters, prices, start)
    time, shift, stale, passes, rounds, drafted, verifying, attended, read = np.zeros((9, len(start), tokens))
    sums = np.zeros((5, len(start)))  # of the target's passes so far: number, waiting tokens, time, attended and read positions
    which = np.arange(len(start))
    while len(which):
        found = clock.next_round(which)
        at, width = found.start, found.waiting + 1
        sums[:, which] += np.stack([
            np.ones(len(which)), found.waiting, prices.passes(which, at, found.waiting), at * width + width * (width + 1) / 2,
            at + width,
        ])  # fmt: skip
        # Waiting tokens and the one after them, up to the end.
        counts = np.minimum(width, tokens - at)
        each = np.repeat(np.arange(len(which)), counts)
        place = np.arange(each.size) - np.repeat(np.cumsum(counts) - counts, counts)
        rows, wrong = which[each], at[each] + place
        decided = np.where(place < found.waiting[each], found.passed[each], found.decided[each])
        time[rows, wrong] = decided
        for table, values in zip((rounds, drafted, verifying, attended, read), sums[:, rows], strict=True):
            table[rows, wrong] = values
        wasted = wrong + 1 < tokens - 1  # else nothing is left to draft, and no message is sent
        arrives = prices.sent(rows, decided)
        count, work, end = clock.after(rows, wrong + 1, found.allowed[each], arrives)
        passes[rows, wrong], stale[rows, wrong] = count * wasted, work * wasted
        shift[rows, wrong] = np.where(wasted, end - arrives, 0.0)
        clock.decide(which, found, width)
        which = which[clock.start[which] < tokens]
    return _WalkedDrafts(start, time, shift, stale, passes, rounds, drafted, verifying, attended, read)


def draft_times(parameters: Parameters, prices: ConstantTimes, positions: int) -> Floats:
    """Time of a draft that begins the decoding, by the position of its first wrong token, 0 to `positions` - 1, with the delay of
    the next draft; shape (decodings, positions). The decoding must be longer by more than `draft_length`.

    >>> flat = ConstantTimes(np.ones((1, 4)), np.full(1, 0.2), 11)
    >>> draft_times(Parameters(1, 4), flat, 5).round(12).tolist()  # as the first row of `draft_tables` for one long decoding
    [[1.4, 1.4, 1.4, 2.6, 2.6]]
    """
    count = len(prices.draft)
    clock, which = DraftClock(parameters, prices, np.zeros(count, dtype=np.int64)), np.arange(count)
    found_times = np.zeros((count, positions))
    while len(which):
        found = clock.next_round(which)
        for place in range(int(found.waiting.max()) + 1):
            here = (place <= found.waiting) & (found.start + place < positions)
            rows, wrong = which[here], found.start[here] + place
            decided = np.where(place < found.waiting, found.passed, found.decided)[here]
            found_times[rows, wrong] = clock.after(rows, wrong + 1, found.allowed[here], decided)[2]
        clock.decide(which, found, found.waiting + 1)
        which = which[clock.start[which] < positions]
    return found_times


def moments_of_pairs(
    parameters: Parameters, tokens: int, cost: StepCosts, laws: Sequence[Chain], law: NDArray[np.intp], price: NDArray[np.intp]
) -> Moments:  # fmt: skip
    """Moments of a decoding for pairs of a law and a cost, by a recursion from the last position to the first; shape (pairs,).

    `law` and `price` are the index of each pair's law and of its cost, which is one of those in `cost`.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> one = np.zeros(1, dtype=np.intp)
    >>> exact = moments_of_pairs(Parameters(1, 8), 200, UnitCost(1, cost_ratio=0.2), [Iid(0.8)], one, one)
    >>> (200 / exact.time).round(3).tolist(), (200 / exact.rounds).round(3).tolist()
    ([2.127], [2.703])
    """
    after_failure, after_success = (np.stack(each) for each in zip(*(law.probabilities(tokens) for law in laws), strict=True))
    means, square = np.zeros((len(DraftTables._fields), law.size, tokens + 1)), np.zeros((law.size, tokens + 1))
    together, alone = max(_MOST_CELLS // (tokens * np.size(cost.link)), 1), np.size(cost.link) == 1
    for first in range((tokens - 1) // together * together, -1, -together):
        starts = range(first, min(first + together, tokens))
        parts = np.stack(draft_tables(parameters, tokens, cost, starts))
        for start in reversed(starts):
            chance = _first_wrong(after_failure, after_success, start)[law]
            added, later = parts[:, :, start - first, start:], means[:, :, start + 1 :]
            added = added if alone else added[:, price]
            means[:, :, start] = ((added + later) * chance).sum(axis=2)
            squares = added[0] ** 2 + 2 * added[0] * later[0] + square[:, start + 1 :]
            square[:, start] = (chance * squares).sum(axis=1)
    time, *rest = means[:, :, 0]
    return Moments(time, np.maximum(square[:, 0] - time**2, 0.0), *rest)


def work_of_chains(
    parameters: Parameters, tokens: int, cost: StepCosts, laws: Sequence[Chain]
) -> tuple[ModelPasses, ModelPasses]:
    """Return the expected passes of target and draft model under each law, by a recursion over starts of drafts.

    Arrays of shape (laws,), or (costs, laws) of several joined costs. A draft begins after s tokens with probability m(s). It makes
    the passes that `draft_tables` counts until its first wrong token r, whose probability the law gives, and the next draft begins
    after r + 1 tokens. Draft passes over rejected tokens are those that begin until the rollback message arrives; one that the
    message stops counts in full.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> target, draft = work_of_chains(Parameters(1, 8), 200, UnitCost(1, cost_ratio=0.2), [Iid(0.8), Iid(1.0)])
    >>> target.passes.round(3).tolist(), draft.passes.round(3).tolist()  # without rejections, each token but one once
    ([73.989, 46.0], [430.259, 199.0])
    """
    after_failure, after_success = (np.stack(each) for each in zip(*(law.probabilities(tokens) for law in laws), strict=True))
    budget, costs = parameters.context_budget, np.size(cost.link)
    mass = np.zeros((len(laws), tokens + 1))
    mass[:, 0] = 1.0
    totals = np.zeros((6, costs, len(laws)))
    together = max(_MOST_CELLS // (tokens * costs), 1)
    for first in range(0, tokens, together):
        prices, begins = _prices_at(parameters, tokens, cost, range(first, min(first + together, tokens)))
        walked = _walk(parameters, prices, begins)
        of_right, of_wrong = attended_within(begins[:, None], walked.right, budget), np.arange(tokens) + 1
        seen = of_right + attended_within(of_wrong, walked.passes, budget)
        # Of the target: passes, tokens, positions attended to and read. Of the draft model: passes, positions attended to and read.
        added = walked.rounds, walked.rounds + walked.drafted, walked.attended, walked.read, walked.passes + walked.right, seen
        filled = walked.filled
        tables = np.stack([np.where(filled, each, 0.0) for each in added]).reshape(6, costs, -1, tokens)
        for place in range(tables.shape[2]):
            start = first + place
            weights = mass[:, start, None] * _first_wrong(after_failure, after_success, start)
            mass[:, start + 1 :] += weights
            totals += tables[:, :, place, start:] @ weights.T
    of_several = np.ndim(cost.link) > 0
    passes, read_tokens, attended, read, drafts, seen_by_drafts = totals if of_several else totals[:, 0]
    return ModelPasses(passes, read_tokens, attended, read, read_tokens), ModelPasses.single(drafts, seen_by_drafts)


def _first_wrong(after_failure: Floats, after_success: Floats, start: int) -> Floats:
    """Probability of the position of the first wrong token of a draft that begins at `start`; shape (laws, positions from there).

    The last position stands for a draft without a wrong token, as the last token is the target's own.
    """
    kept = after_success[:, start:].copy()
    kept[:, 0] = after_failure[:, start]
    kept[:, -1] = 0.0
    reached = np.concatenate([np.ones_like(kept[:, :1]), np.cumprod(kept[:, :-1], axis=1)], axis=1)
    return np.asarray(reached * (1 - kept))


_MOST_CELLS = 500_000
"""Bound on entries of a table that is computed at once: four megabytes."""
