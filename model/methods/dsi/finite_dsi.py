"""DSI for a finite number of tokens: costs of each speculation, and exact moments by a forward recursion over restarts.

A speculation lasts from a restart to the next rejection, or to the end. Between restarts nothing is random, so its costs depend
only on its start, after s of l tokens, and on the place j of the rejected token among those that it decodes; j = l - s is the end.
With c(n) the time of n draft passes, w_i the time of pass i of the target, b_i = min(i L, l - s - 1) the last drafted token that
it reads, V replicas and link time x, the times since the restart are

    sent_i      = max(c(b_i), processed_(i-V)),
    returned_i  = sent_i + x + w_i + x,
    decided_i   = max(processed_(i-1), returned_i)          for a rejection among the tokens b_(i-1) + 2 to b_i, and the end,
    processed_i = max(decided_i, c(b_i + 1))                for a rejection of token b_i + 1, and if all are accepted,

with processed_i = 0 for i < 0. A pass whose tokens are sent before the rejection works until the order to stop arrives, a link time
after it. With free links, a pass that the deciding token completes begins as well, and is stopped at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import PassShape, StepCosts
from model.interpret.account import attended_within
from model.methods.concurrent.concurrent_laws import chains_of
from model.methods.concurrent.concurrent_work import ModelPasses
from model.methods.dsi.algorithm import Parameters
from model.methods.rounds.prices_of_rounds import draft_times
from model.methods.rounds.round_moments import Moments, mixed
from model.outcomes.outcome_laws import Chain, Floats
from model.steps import LayerSpan

INSIDE, AFTER = range(2)
"""Places of the rejected token: among those that the deciding pass reads, or the one after them. The end counts as inside."""
Counts = NDArray[np.int64]


class SpeculationTables(NamedTuple):
    """Costs of a speculation by its start, the pass that ends it, and the place of the rejected token in that pass.

    Costs have shape (tokens, passes, 2), counts (tokens, passes).
    """

    lookahead: int
    time: Floats
    busy: Floats
    operations: Floats
    """Arithmetic, in units of one token in a pass of the target; a stopped pass counts in full."""
    waiting: Counts
    """Drafted tokens that pass i verifies, without the token after them."""

    @property
    def tokens(self) -> int:
        """Number of tokens to decode."""
        return len(self.time)

    def ended_by(self, start: Any, length: Any) -> tuple[Counts, Counts]:
        """Pass that ends a speculation of `length` tokens, and the place of its last token in that pass.

        >>> from model.costs.layer_times import UnitCost
        >>> tables = speculation_tables(2, 3, 9, UnitCost(1, cost_ratio=0.25))
        >>> [each.tolist() for each in tables.ended_by(0, np.array([1, 2, 3, 4, 9]))]
        [[0, 1, 1, 2, 4], [1, 0, 1, 0, 0]]
        """
        number, _, place = _ended_by(self.lookahead, self.tokens, start, length)
        return number, place


def _ended_by(lookahead: int, tokens: int, start: Any, length: Any) -> tuple[Counts, Any, Counts]:
    """Pass that ends a speculation of `length` tokens, its start, and the place of its last token in that pass."""
    length = np.asarray(length)
    number = -(-(length - 1) // lookahead)
    after = (length == number * lookahead + 1) & (start + length < tokens)
    return number, start, np.where(after, AFTER, INSIDE)


def speculation_tables(lookahead: int, verifiers: int, tokens: int, cost: StepCosts) -> SpeculationTables:
    """Tabulate the speculations of a decoding at these costs.

    Each draft pass reads one token, at its position. A pass of the target is priced at its width and position: one of the first V
    passes after a restart reads all drafted tokens so far and the token before them, a later one those since the pass V before it.

    >>> from model.costs.layer_times import UnitCost
    >>> tables = speculation_tables(2, 1, 6, UnitCost(4, cost_ratio=0.25, link=0.5))
    >>> tables.time[0].tolist()  # rejections of tokens 2 and 3, 4 and 5 are found by passes 1 and 2; one replica makes them in turn
    [[5.0, 5.0], [10.0, 10.0], [15.0, 15.0], [20.0, 20.0]]
    """
    passes = _passes(lookahead, verifiers, tokens, cost)
    per_draft, weight = cost.operations("draft"), cost.draft_devices
    exists, time, wide, work = passes.exists, passes.time, np.where(passes.exists, passes.wide, 0), passes.work
    done = np.cumsum(work, axis=0)[:, :, None]
    read = np.cumsum(wide, axis=0)[:, :, None].astype(np.float64)
    busy = done + weight * np.minimum(time, passes.drafted)
    operations = np.broadcast_to(read, time.shape).copy()
    for ahead, begun, running in passes.in_flight(verifiers):
        worked = np.clip(time[:-ahead] - np.where(running, begun, np.inf), 0.0, work[ahead:, :, None])
        busy[:-ahead] += worked
        operations[:-ahead] += np.where(running, wide[ahead:, :, None], 0)
    begun_drafts = passes.begun_drafts()
    operations += np.where(begun_drafts > 0, begun_drafts * per_draft, 0.0)
    verified = np.where(exists & (np.arange(len(exists))[:, None] > 0), passes.heads - 1, 0)
    by_start = [np.ascontiguousarray(each.transpose(1, 0, 2)) for each in (time, busy, operations)]
    return SpeculationTables(lookahead, by_start[0], by_start[1], by_start[2], verified.T)


class _SpeculationPasses(NamedTuple):
    """Passes of speculations that nothing ends, by number and start; shape (passes, starts) unless stated otherwise."""

    exists: NDArray[np.bool_]
    first: Counts
    """Tokens that the replica has read since the restart: the first token of the pass, 0 for the one before the drafted ones."""
    wide: Counts
    heads: Counts
    work: Floats
    """Time of the pass; 0 where it does not exist."""
    sent: Floats
    """When its tokens are sent; infinite where it does not exist."""
    time: Floats
    """Time of the rejection that the pass finds, by its place; shape (passes, starts, 2)."""
    drafts: Floats
    """Time of 0, 1, ... draft passes from each start on; shape (starts, tokens + 1)."""
    draft_first: NDArray[np.bool_]
    """True where a draft pass ends exactly when the result of the deciding pass arrives, and began before that was sent: the next
    one then begins before the rejection. Shape of `time`."""

    @property
    def drafted(self) -> Floats:
        """Time of all draft passes of a speculation that nothing ends; shape (1, starts, 1)."""
        tokens = self.exists.shape[1]
        return np.asarray(self.drafts[np.arange(tokens), tokens - 1 - np.arange(tokens)][None, :, None])

    def in_flight(self, verifiers: int) -> Iterator[tuple[int, Floats, NDArray[np.bool_]]]:
        """Yield passes that have begun when a speculation ends, by how many passes they are ahead of the one that ends it.

        Each item: the number of passes ahead, when they begin, and whether they have begun when each pass ends a speculation.
        """
        for ahead in range(1, min(verifiers, len(self.exists))):
            begun = self.sent[ahead:, :, None]
            running = begun <= self.time[:-ahead] * (1 + _ROUNDING)  # with those that are sent exactly at the rejection
            if not running.any():
                return
            yield ahead, begun, running

    def begun_drafts(self) -> Counts:
        """Draft passes that have begun when a speculation ends; shape of `time`.

        One that would begin exactly at the rejection is not counted, as its process is stopped before it begins, except after
        `draft_first`.
        """
        tokens = self.exists.shape[1]
        before = np.stack([_begun(self.drafts[s, : tokens - 1 - s], self.time[:, s]) for s in range(tokens)], axis=1)
        return np.asarray(np.minimum(before + self.draft_first, (tokens - 1 - np.arange(tokens))[:, None]))


def _passes(lookahead: int, verifiers: int, tokens: int, cost: StepCosts) -> _SpeculationPasses:
    """Times of the passes of speculations that nothing ends."""
    start = np.arange(tokens)
    limit = tokens - 1 - start  # drafted tokens of a speculation that nothing ends
    count = -(-(tokens - 1) // lookahead) + 1
    drafts, link = draft_times(cost, tokens, tokens), cost.link
    number = np.arange(count)[:, None]
    last = np.minimum(number * lookahead, limit)  # shape (passes, starts)
    exists = np.concatenate([np.ones_like(last[:1], dtype=np.bool_), last[1:] > last[:-1]])
    first = np.zeros_like(last)
    first[verifiers:] = last[:-verifiers] + 1
    wide = last + 1 - first
    heads = np.where(number > 0, last - np.roll(last, 1, axis=0), 1)
    work = np.where(exists, _pass_times(cost, np.where(exists, wide, 1), np.where(exists, heads, 1), start + first), 0.0)
    drafted, following = drafts[start, last], drafts[start, np.minimum(last + 1, limit)]
    sent, decided, processed, returned = np.zeros((4, count, tokens))
    for index in range(count):
        sent[index] = drafted[index] if index < verifiers else np.maximum(drafted[index], processed[index - verifiers])
        decided[index] = returned[index] = sent[index] + link + work[index] + link
        if index:
            np.maximum(decided[index], processed[index - 1], out=decided[index])
        processed[index] = np.maximum(decided[index], following[index])
    time = np.stack([decided, processed], axis=2)  # shape (passes, starts, place)
    last_draft = np.stack([_ending_at(drafts[s, : limit[s] + 1], time[:, s]) for s in range(tokens)], axis=1)
    arrives_then = returned[:, :, None] >= time * (1 - _ROUNDING)
    draft_first = arrives_then & (last_draft > link * (1 + _ROUNDING)) & (link > 0)
    return _SpeculationPasses(exists, first, wide, heads, work, np.where(exists, sent, np.inf), time, drafts, draft_first)


def _begun(begins: Floats, time: Floats) -> Counts:
    """Number of draft passes that begin before each time."""
    return np.searchsorted(begins, time * (1 - _ROUNDING), side="left")


def _ending_at(ends: Floats, time: Floats) -> Floats:
    """Time that the draft pass takes which ends at each time; 0 where none does.

    >>> _ending_at(np.array([0.0, 2.0, 4.0]), np.array([1.0, 4.0, 5.0])).tolist()
    [0.0, 2.0, 0.0]
    """
    if len(ends) == 1:
        return np.zeros(time.shape)
    index = np.clip(np.searchsorted(ends, time * (1 - _ROUNDING), side="left"), 1, len(ends) - 1)
    return np.where(np.abs(ends[index] - time) <= _ROUNDING * time, ends[index] - ends[index - 1], 0.0)


def _pass_times(cost: StepCosts, wide: Counts, heads: Counts, at: Counts) -> Floats:
    """Times of passes of the target by width, logits and position; equal shapes."""
    span, layers = int(heads.max()) + 1, LayerSpan(0, cost.layers)
    kind = (wide * span + heads).ravel()
    kinds = np.flatnonzero(np.bincount(kind))
    shapes = [PassShape(layers, width=each // span, heads=each % span) for each in kinds.tolist()]
    if cost.uniform:
        by_kind = np.zeros(int(kinds[-1]) + 1)
        by_kind[kinds] = [float(cost.times(shape)) for shape in shapes]
        return np.asarray(by_kind[kind].reshape(wide.shape))
    found, positions = np.empty(kind.shape), at.ravel()
    order = np.argsort(kind, kind="stable")
    for shape, part in zip(shapes, np.split(order, np.searchsorted(kind[order], kinds[1:])), strict=True):
        found[part] = cost.times(shape, positions[part])
    return found.reshape(wide.shape)


_ROUNDING = 1e-9
"""Relative error within which two times count as equal."""


def moments(lookahead: int, verifiers: int, tokens: int, law: Any, cost: StepCosts) -> Moments:
    """Return the exact moments of a decoding; `drafted` counts the drafted tokens that passes verify, not those after a rejection.

    A law of records gives the mixture of its records.
    """
    tables = speculation_tables(lookahead, verifiers, tokens, cost)
    parts = [_moments_of_chain(tables, chain) for chain in chains_of(law, "DSI")]
    return parts[0] if len(parts) == 1 else mixed(parts)


def _moments_of_chain(tables: SpeculationTables, law: Chain) -> Moments:
    """Forward recursion over restarts: probability and mean time of a restart at each position, and the law of the next one.

    The token before a restart was rejected, so the chain is after a failure there.
    """
    square, busy, operations, rounds, drafted = 0.0, 0.0, 0.0, 0.0, 0.0
    verified, spent = np.cumsum(tables.waiting, axis=1), np.zeros(tables.tokens + 1)
    for start, chance, ends in _restarts(law, tables.tokens):
        number, place = tables.ended_by(start, np.arange(1, len(ends) + 1))
        where = start, number, place
        time = tables.time[where]
        weights = chance * ends
        gained = spent[start] * ends
        spent[start + 1 :] += gained + weights * time
        square += float((time * (2 * gained + weights * time)).sum())
        busy += float(weights @ tables.busy[where])
        operations += float(weights @ tables.operations[where])
        rounds += float(weights @ (number + 1.0))
        drafted += float(weights @ verified[start, number])
    mean = float(spent[-1])
    return Moments(mean, max(square - mean**2, 0.0), busy, operations, rounds, drafted)


def _restarts(law: Chain, tokens: int) -> Iterator[tuple[int, float, Floats]]:
    """Yield the positions where speculations start, their probabilities, and those of 1, 2, ... tokens until they end.

    The last number of tokens is the end of the sequence.
    """
    after_failure, after_success = (np.asarray(each, dtype=np.float64) for each in law.probabilities(tokens))
    mass = np.zeros(tokens + 1)
    mass[0] = 1.0
    for start in range(tokens):
        chance = float(mass[start])
        if not chance:
            continue
        kept = np.concatenate([after_failure[start : start + 1], after_success[start + 1 : tokens - 1]])[: tokens - start - 1]
        reached = np.concatenate([[1.0], np.cumprod(kept)])
        ends = reached * np.concatenate([1 - kept, [1.0]])
        mass[start + 1 :] += chance * ends
        yield start, chance, ends


def work_of_chains(
    parameters: Parameters, tokens: int, cost: StepCosts, laws: Sequence[Chain]
) -> tuple[ModelPasses, ModelPasses]:
    """Return the expected passes of target and draft model under each law, shape (laws,).

    W(s, i, place) is the probability that a speculation starts after s tokens and is ended by its pass i at this place. Pass i of
    start s is then processed with probability sum of W(s, i', place) over i' >= i, and is stopped with that of the i' < i whose
    rejection is later than `sent_i`. Both count in full, as an interrupted pass does.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> target, draft = work_of_chains(Parameters(1, 2, 3), 200, UnitCost(1, cost_ratio=0.25), [Iid(0.8), Iid(1.0)])
    >>> target.passes.round(3).tolist(), draft.passes.round(3).tolist()  # without rejections nothing is made in vain
    ([208.464, 101.0], [334.484, 199.0])
    """
    ahead, verifiers, start = parameters.lookahead, parameters.verifiers, np.arange(tokens)
    passes = _passes(ahead, verifiers, tokens, parameters.draft_costs(cost))
    at, wide = start + passes.first, passes.wide
    each = np.ones_like(wide), wide, at * wide + wide * (wide + 1) / 2, at + wide, passes.heads
    drafts = passes.begun_drafts()
    seen = attended_within(start[None, :, None], drafts, parameters.context_budget)
    found = np.zeros((7, len(laws)))
    for index, law in enumerate(laws):
        ended = np.zeros_like(passes.time)
        for begin, chance, ends in _restarts(law, tokens):
            np.add.at(ended, _ended_by(ahead, tokens, begin, np.arange(1, len(ends) + 1)), chance * ends)
        begun = np.cumsum(ended.sum(axis=2)[::-1], axis=0)[::-1].copy()
        for number, _, running in passes.in_flight(verifiers):
            begun[number:] += (ended[:-number] * running).sum(axis=2)
        begun *= passes.exists
        found[:5, index] = [float((begun * values).sum()) for values in each]
        found[5:, index] = float((ended * drafts).sum()), float((ended * seen).sum())
    return ModelPasses(*found[:5]), ModelPasses.single(*found[5:])
