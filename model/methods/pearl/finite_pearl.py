"""PEARL for a finite number of tokens: costs of each round, and exact moments by a forward recursion over starts of rounds.

A round that starts after s of l tokens is in pre-verify, with no token waiting, or in post-verify, with min(gamma - 1, l - 1 - s)
waiting; this includes the end, where drafts are cut to what remains. The token before a round was rejected in pre-verify and
accepted in post-verify. So position and phase determine the law of the next round, if each outcome depends only on the one before.

A round ends in one of three ways: a waiting token is rejected, the first token drafted in the round is rejected, or all are
accepted. If it waits for its whole draft, its time is the same in all three; if rejections stop drafts, they end it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods.concurrent.concurrent_laws import chains_of
from model.methods.rounds.prices_of_rounds import draft_times, verify_times
from model.methods.rounds.round_moments import Moments, mixed
from model.outcomes.outcome_laws import Chain, Floats

PRE, POST = PHASES = range(2)
WAITING_REJECTED, FIRST_REJECTED, KEPT = ENDS = range(3)
"""Ways in which a round ends. A round that drafts nothing, such as the last one, takes the same time in all of them."""
Counts = NDArray[np.int64]


class RoundTables(NamedTuple):
    """Tokens and costs of a round by phase and start position.

    Counts have shape (2, tokens); costs also depend on how the round ends, shape (3, 2, tokens), or (3, costs, 2, tokens) if they
    are of several costs.
    """

    waiting: Counts
    """Waiting drafted tokens that the target's pass reads and verifies."""
    drafted: Counts
    """Tokens drafted in the round, unless a rejection stops the draft."""
    time: Floats
    busy: Floats
    operations: Floats
    """Arithmetic, in units of one token in a pass of the target; a stopped draft pass counts in full."""
    passes: Counts
    """Draft passes that begin."""

    def of(self, cost: int) -> RoundTables:
        """The tables at one of several costs."""
        time, busy, operations = (each[:, cost] for each in (self.time, self.busy, self.operations))
        return RoundTables(self.waiting, self.drafted, time, busy, operations, self.passes[:, cost])


def round_tables(draft_length: int, tokens: int, cost: StepCosts, *, lockstep: bool = True) -> RoundTables:
    """Tabulate the rounds of a decoding at a cost, or at each of several.

    Without `lockstep`, a rejection stops the draft in progress.

    The target's pass is priced at the position where its round starts, the first draft pass at the position of the last waiting
    token. Each draft pass reads one token: the draft model's cache has all rows before it.

    The draft model begins one link time after the round. If a rejection ends the round, the order to stop arrives one link time
    after that. So the draft model works as long as the round takes, or until all is drafted.

    >>> from model.costs.layer_times import UnitCost
    >>> cost = UnitCost(10, cost_ratio=0.75, link=1.0)
    >>> tables = round_tables(2, 4, cost)
    >>> tables.waiting.tolist(), tables.drafted.tolist()
    ([[0, 0, 0, 0], [1, 1, 1, 0]], [[2, 2, 1, 0], [2, 1, 0, 0]])
    >>> tables.time[KEPT].tolist()  # gamma c = 1.5 passes + 2 links; with one drafted token the target is as slow
    [[17.0, 17.0, 10.0, 10.0], [17.0, 10.0, 10.0, 10.0]]
    >>> stopped = round_tables(2, 4, cost, lockstep=False)  # the second draft pass is stopped 10 after the start of the first
    >>> stopped.time[:, POST, 0].tolist(), stopped.busy[:, POST, 0].tolist()
    ([10.0, 10.0, 17.0], [20.0, 20.0, 25.0])
    """
    waiting, drafted, verify, drafts = _parts(draft_length, tokens, cost)
    links, draft = np.where(drafted > 0, 2 * _for_rounds(cost.link), 0.0), drafts(drafted)
    whole = np.maximum(verify, draft + links)
    if lockstep:
        time, worked, passes = (np.broadcast_to(each, (len(ENDS), *whole.shape)) for each in (whole, draft, drafted))
    else:
        time = np.stack([verify, np.maximum(verify, drafts(np.minimum(drafted, 1)) + links), whole])
        worked = np.minimum(draft, time)
        # A pass that would begin exactly at the stop is counted. In the simulator the second pass belongs to another process, which
        # may be stopped before it begins if the passes of both models take exactly the same time.
        begun = ((place < drafted) & (drafts(place) <= time * (1 + _ROUNDING)) for place in range(draft_length))
        passes = sum(begun, np.zeros(time.shape, dtype=np.int64))
    ratio, devices = _for_rounds(cost.operations("draft")), _for_rounds(cost.draft_devices)
    operations = np.asarray(1.0 + waiting + np.where(passes > 0, passes * ratio, 0.0), dtype=np.float64)
    return RoundTables(waiting, drafted, time, verify + worked * devices, operations, np.asarray(passes))


def _for_rounds(number: Any) -> Floats:
    """A number of a cost, or of each of several, with axes of phases and positions."""
    return np.asarray(number, dtype=np.float64)[..., None, None]


def stopped_drafts(draft_length: int, tokens: int, cost: StepCosts) -> tuple[bool, bool]:
    """Tell whether a rejection may stop a draft midway, and whether two transfers may then overlap.

    >>> from model.costs.layer_times import UnitCost
    >>> [stopped_drafts(4, 9, UnitCost(10, cost_ratio=ratio, link=0.5)) for ratio in (0.125, 0.25, 0.5)]
    [(False, False), (False, True), (True, True)]
    """
    waiting, drafted, verify, drafts = _parts(draft_length, tokens, cost)
    link, first, whole = cost.link, drafts(np.minimum(drafted, 1)), drafts(drafted)
    at_first = np.maximum(verify, first + 2 * link)
    rejections = [(verify, (waiting > 0) & (drafted > 0)), (at_first, drafted > 0)]
    midway = any(bool(np.any(may & (end < whole * (1 - _ROUNDING)))) for end, may in rejections)
    # Transfers: the order to draft, the first token, the others, and the next order, which leaves as the round ends.
    overlapping = [(drafted > 1) & (whole - first < link * (1 - _ROUNDING))]
    for end, may in rejections:
        for sent in (0 * first, first + link, whole + link):
            overlapping.append(may & (sent <= (end + link) * (1 + _ROUNDING)) & (end * (1 + _ROUNDING) < sent + link))
    return midway, link > 0 and any(bool(np.any(overlap)) for overlap in overlapping)


def _parts(draft_length: int, tokens: int, cost: StepCosts) -> tuple[Counts, Counts, Floats, Callable[[Any], Floats]]:
    """Return waiting tokens, drafted tokens and time of the target's pass by phase and start position, shape (2, tokens).

    Times of several costs have a first axis of them. The last item is a function from numbers of draft passes to their time.
    """
    start = np.arange(tokens)
    left = tokens - 1 - start
    waiting = np.stack([np.zeros_like(left), np.minimum(draft_length - 1, left)])
    drafted = np.minimum(draft_length, left - waiting)
    drafts = draft_times(cost, draft_length, tokens)

    def taken(passes: Any) -> Floats:
        return np.asarray(drafts[..., start + waiting, passes])

    return waiting, drafted, verify_times(cost, draft_length, tokens)[..., start, waiting], taken


_ROUNDING = 1e-9
"""Relative error within which two times count as equal."""


def rounds_by_end(tables: RoundTables, law: Chain) -> Floats:
    """Probability that a round in each phase starts at each position and ends in each way, shape (3, 2, tokens).

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import ByPosition
    >>> rounds_by_end(round_tables(2, 4, UnitCost(1, cost_ratio=1)), ByPosition([1, 1, 0, 1])).sum(axis=0).tolist()
    [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    """
    mass, _, rejecting = (each[..., 0] for each in _forward([tables], [law]))
    return np.stack([mass * rejecting[WAITING_REJECTED], mass * rejecting[FIRST_REJECTED], mass * (1 - rejecting.sum(axis=0))])


def moments(draft_length: int, tokens: int, law: Any, cost: StepCosts) -> Moments:
    """Return the exact moments if rounds wait for their drafts; `drafted` counts the tokens that the target verifies.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> exact = moments(4, 200, Iid(0.8), UnitCost(1, cost_ratio=0.2))
    >>> round(200 / exact.time, 3), round(200 / exact.rounds, 3)
    (2.104, 2.104)
    """
    return moments_of_tables([round_tables(draft_length, tokens, cost)], [law])[0]


def moments_of_tables(tables: Sequence[RoundTables], laws: Sequence[Any]) -> list[Moments]:
    """Return the moments of decodings of one number of tokens, computed together; a law of records gives the mixture of these."""
    chains = [chains_of(law, "PEARL") for law in laws]
    wanted = [(table, chain) for table, components in zip(tables, chains, strict=True) for chain in components]
    waiting = tables[0].waiting
    size = max(_MOST_CELLS // (waiting.size * (int(waiting.max()) + 1)), 1)
    results: list[Moments] = []
    for start in range(0, len(wanted), size):
        results += _moments_of_chains(*zip(*wanted[start : start + size], strict=True))
    in_order = iter(results)
    parts = [[next(in_order) for _ in components] for components in chains]
    return [part[0] if len(part) == 1 else mixed(part) for part in parts]


_MOST_CELLS = 300_000
"""Bound on positions x window x decodings of an array computed together: about two megabytes per array."""


def _moments_of_chains(tables: Sequence[RoundTables], laws: Sequence[Chain]) -> list[Moments]:
    mass, first, rejecting = _forward(tables, laws)
    spent, busy, operations = (_side_by_side([getattr(each, name) for each in tables]) for name in ("time", "busy", "operations"))
    waiting = _side_by_side([each.waiting for each in tables])

    def expected(by_end: Floats) -> Floats:
        """Mean over the ways in which a round ends; exactly their value where all are equal."""
        mean: Floats = by_end[KEPT].copy()
        for end in (WAITING_REJECTED, FIRST_REJECTED):
            mean += rejecting[end] * (by_end[end] - by_end[KEPT])
        return mean

    time = expected(spent)
    mean = (mass * time).sum(axis=(0, 1))
    square = (time * (2 * first + time * mass) + mass * expected((spent - time) ** 2)).sum(axis=(0, 1))
    totals = ((mass * each).sum(axis=(0, 1)) for each in (expected(busy), expected(operations), np.ones_like(mass), waiting))
    columns = mean, np.maximum(square - mean**2, 0.0), *totals
    return [Moments(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _side_by_side(arrays: Sequence[NDArray[Any]]) -> Floats:
    """Stack arrays whose last axis is the position along a new last axis; shorter ones are padded with zeros."""
    stacked = np.zeros((*arrays[0].shape[:-1], max(array.shape[-1] for array in arrays), len(arrays)))
    for index, array in enumerate(arrays):
        stacked[..., : array.shape[-1], index] = array
    return stacked


def _forward(tables: Sequence[RoundTables], laws: Sequence[Chain]) -> tuple[Floats, Floats, Floats]:
    """Return probabilities and mean times of starts of rounds, and probabilities of both kinds of rejection.

    The first is the probability that a round starts at each position in each phase; the second is the expectation of the time until
    then on these paths; both have shape (2, tokens, decodings). The third is the probability that such a round ends with a
    rejection, shape (2, 2, tokens, decodings), whose first axis is the kind of rejection.
    """
    tokens = np.array([each.waiting.shape[1] for each in tables])
    time, waiting = _side_by_side([each.time for each in tables]), _side_by_side([each.waiting for each in tables]).astype(np.int64)
    last, decoding, most = int(tokens.max()), np.arange(len(tables)), int(waiting.max()) + 1
    chances = _side_by_side([np.array(law.probabilities(count)) for law, count in zip(laws, tokens.tolist(), strict=True)])
    # A round verifies all waiting tokens, and the first token drafted in the round unless the sequence ends there.
    position, place = np.arange(last)[:, None, None], np.arange(most)[:, None]
    inside = (place <= waiting[:, :, None]) & (position < tokens - 1)
    kept = np.where(inside, chances[:, np.minimum(position + place, last - 1), decoding], 1.0)
    reached = np.cumprod(kept, axis=2)
    before = np.concatenate([np.ones_like(reached[:, :, :1]), reached[:, :, :-1]], axis=2)
    ends, whole = np.where(inside, before * (1 - kept), 0.0), reached[:, :, -1] * (position[:, 0] < tokens - 1)
    first_drafted = place == waiting[:, :, None]  # the first token drafted in the round
    took = np.where(first_drafted, time[FIRST_REJECTED, :, :, None], time[WAITING_REJECTED, :, :, None])
    starts = np.zeros((2, 2, last + most, len(tables)))  # mass and first moment of the time; phase; position; decoding
    starts[0, PRE, 0] = 1.0
    for start in range(last - 1):
        mass, first = starts[:, :, start]
        rejecting, later = ends[:, start], slice(start + 1, start + 1 + most)
        starts[0, PRE, later] += (mass[:, None] * rejecting).sum(axis=0)
        starts[1, PRE, later] += ((first[:, None] + mass[:, None] * took[:, start]) * rejecting).sum(axis=0)
        for phase in PHASES:
            spent = np.stack([mass[phase], first[phase] + mass[phase] * time[KEPT, phase, start]])
            starts[:, POST, start + 1 + waiting[phase, start], decoding] += spent * whole[phase, start]
    started = np.where(np.arange(last)[:, None] < tokens, starts[:, :, :last], 0.0)  # no rounds after the end
    ending = np.stack([np.where(first_drafted, 0.0, ends).sum(axis=2), np.where(first_drafted, ends, 0.0).sum(axis=2)])
    return started[0], started[1], ending
