"""SSD for a finite number of tokens: costs of each round, and exact moments by recursions over starts of rounds.

A round that starts after s of l tokens verifies min(K, l - 1 - s) drafted tokens, or none after a miss without a draft just in
time. So position and state (`DRAFTED`, `EMPTY`) determine the law of the next round, if ranks are independent by position. A
draft just in time is charged to the round that follows the miss. With drafts just in time all rounds are those of speculative
decoding with the same outcomes; only their times differ.

How many rounds start where depends on the law alone, and is found once for all costs by a forward recursion. The mean of the time
that is left at a start depends on both, by a backward recursion. The variance is that of what each round adds to what is left
after it, summed over rounds.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.interpret.account import attended_within
from model.methods.concurrent.concurrent_work import ModelPasses
from model.methods.prediction import linear
from model.methods.rounds.prices_of_rounds import sums_between, times_of_cells
from model.methods.rounds.round_moments import Moments
from model.methods.ssd.algorithm import DRAFT, Parameters
from model.outcomes.position_ranks import PositionRanks

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
Index = NDArray[np.intp]
DRAFTED, EMPTY = range(2)
"""States of a round: it verifies drafted tokens (as many as there is room for), or none because none were drafted."""
_ROUNDING = 1e-9
"""Relative error within which two times count as equal."""
_MOST_CELLS = 500_000
"""Bound on entries of a table that is computed at once: four megabytes."""
_OF_A_PAIR = 12
"""Numbers by position of a pair of a law and a cost while its moments are computed."""


class PreparedRoundTables(NamedTuple):
    """Costs of rounds. Shapes: `drafted` (states, tokens), costs of rounds (2, states, tokens), of misses (tokens,).

    Index 1 of the first axis of costs is for the round that ends the sequence, which does not wait for prepared drafts; where no
    round can end it, the costs are those of index 0. At several costs, costs of rounds have the shape (2, costs, states, tokens),
    and of misses (costs, tokens).
    """

    drafted: Counts
    """Drafted tokens that the target verifies."""
    backup_drafts: int
    """Tokens that are drafted after a miss, if there is room: K or 0."""
    time: Floats
    busy: Floats
    operations: Floats
    """Arithmetic, in units of one token in a pass of the target; a pass that the end of the sequence stops counts in full."""
    missed_time: Floats
    """Additional time of a round that follows a miss, by its start."""
    missed_busy: Floats
    missed_operations: Floats


def round_tables(parameters: Parameters, tokens: int, cost: StepCosts) -> PreparedRoundTables:
    """Tabulate the rounds of a decoding at a cost, or at each of several joined ones.

    The target's pass and the first pass of a preparation are priced at the position where the round starts, a pass over branches at
    that of its longest branch, and a draft just in time at the start of the round that follows.

    >>> from model.costs.layer_times import UnitCost
    >>> tables = round_tables(Parameters(10, 2, 1), 5, UnitCost(10, cost_ratio=0.5, link=1.0))
    >>> tables.drafted.tolist()
    [[2, 2, 2, 1, 0], [0, 0, 0, 0, 0]]
    >>> tables.time[0, DRAFTED].tolist()  # preparation: three, three and two draft passes; two links
    [17.0, 17.0, 12.0, 10.0, 10.0]
    >>> tables.missed_time.tolist()
    [12.0, 12.0, 12.0, 7.0, 0.0]
    """
    cost, start = parameters.draft_costs(cost), np.arange(tokens)
    link, devices, ratio = (
        np.asarray(each, dtype=np.float64)[..., None] for each in (cost.link, cost.draft_devices, cost.operations("draft"))
    )
    plan = _Preparations.of(parameters, tokens)
    passes = plan.times(cost)
    preparing, [read] = plan.totals(passes), plan.totals(plan.counts.of_tokens())
    verify = _verify_times(plan.drafted, cost)
    whole = np.maximum(verify, preparing + np.where(plan.branched > 0, 2 * link[..., None], 0.0))
    own = 1.0 + plan.drafted
    operations = own + _priced(read, ratio[..., None])
    time, held, operations = (np.stack([each, each]) for each in (whole, preparing, operations))
    if plan.ending.size:
        last = (..., DRAFTED, plan.ending)
        stop = _stop(verify[last], link)
        time[1][last], held[1][last] = verify[last], np.minimum(preparing[last], stop)
        [begun] = plan.begun(passes, plan.counts.of_tokens(), stop)
        operations[1][last] = own[last] + _priced(begun, ratio)
    backup = parameters.draft_length if parameters.backup == DRAFT else 0
    just_in_time = np.minimum(backup, tokens - 1 - start)
    drafts = sums_between(cost.draft_times(start), start, just_in_time)
    missed = np.where(just_in_time > 0, drafts + 2 * link, 0.0)
    spent = np.broadcast_to(_priced(just_in_time, ratio), missed.shape)
    busy = verify + held * devices[..., None]
    return PreparedRoundTables(plan.drafted, backup, time, busy, operations, missed, drafts * devices, spent)


def _priced(count: NDArray[Any], price: Floats) -> Floats:
    """Count x price; 0 for none, also at a price that is not known."""
    return np.where(count > 0, count * price, 0.0)


def _stop(verify: Floats, link: Floats) -> Floats:
    """When the end of the sequence stops a preparation, counted from its start: the order takes as long as that to prepare."""
    return np.maximum(verify - link, 0.0)


def _verify_times(drafted: Counts, cost: StepCosts) -> Floats:
    """Time of the target's pass by state and start, shape (..., states, tokens)."""
    start = np.arange(drafted.shape[1])
    return np.stack([times_of_cells(cost.verify_times, each + 1, start) for each in drafted], axis=-2)


class _PassCounts(NamedTuple):
    """Numbers of the passes of preparations, as of `_Preparations`; each of shape (values, states, tokens)."""

    first: Floats
    """Of the pass over the draft, by the start of the round: passes, tokens, positions that these attend to, and positions read."""
    branches: Floats
    """Of a pass over branches, by its place; of each branch it reads as many positions as of the longest."""

    def of_tokens(self) -> _PassCounts:
        """Tokens only."""
        return _PassCounts(self.first[1:2], self.branches[1:2])


class _Preparations(NamedTuple):
    """Passes of the preparations of all rounds.

    A preparation is a pass over the draft and up to K passes over branches, which grow by a token in each. The place of such a pass
    is the position at which the branch without accepted tokens is in it: the n-th pass of a round is at the place n after its
    start. Branches end before the last position of the sequence, so that those of a pass depend on its place alone.
    """

    drafted: Counts
    """Drafted tokens that the target verifies, shape (states, tokens)."""
    branched: Counts
    """Passes over branches by the start of the round, in both states; shape (tokens,). Without any there is no preparation."""
    farthest: Counts
    """Accepted tokens of the longest branch by place, shape (states, tokens); -1 where there is no pass."""
    counts: _PassCounts

    @classmethod
    def of(cls, parameters: Parameters, tokens: int) -> _Preparations:
        """The same for all costs."""
        start, longest, fan_outs = np.arange(tokens), parameters.draft_length, parameters.fan_outs
        held = np.inf if parameters.context_budget is None else parameters.context_budget
        room = tokens - 1 - start
        drafted, branched = np.stack([np.minimum(longest, room), np.zeros_like(room)]), np.clip(room - 1, 0, longest)
        width, hidden = drafted + 1, np.maximum(start - held, 0.0)
        first = np.stack([
            np.ones(width.shape), width, start * width + width * (width + 1) / 2 - hidden * width, start + width - hidden
        ])  # fmt: skip
        farthest, branches = np.empty_like(drafted), np.zeros((4, *drafted.shape))
        for state, numbers in ((DRAFTED, fan_outs), (EMPTY, fan_outs[-1:])):
            farthest[state] = np.minimum(len(numbers) - 1, room - 1)
            for accepted, number in enumerate(numbers):
                there = farthest[state] >= accepted
                branches[1, state] += number * there
                branches[2, state] += number * there * (np.minimum(start + accepted, held) + 1.0)
            branches[3, state] = branches[1, state] * (np.minimum(start + farthest[state], held) + 1.0)
        branches[0] = farthest >= 0
        return cls(drafted, branched, farthest, _PassCounts(first * (branched > 0), branches))

    @property
    def ending(self) -> Counts:
        """Starts of rounds that may end the sequence during a preparation; all of these verify drafted tokens."""
        tokens, longest = self.branched.size, int(self.drafted.max())
        return np.arange(max(tokens - 1 - longest, 0), max(tokens - 2, 0))

    def times(self, cost: StepCosts) -> _PassCounts:
        """Times of the passes at costs of drafts, in place of numbers; shape (..., states, tokens), 0 where there is none."""

        def over_draft(width: int, at: Counts) -> Floats:
            return cost.draft_times(at, width=width, heads=width)

        def over_branches(sequences: int, at: Counts) -> Floats:
            return cost.draft_times(at, sequences=sequences)

        rounds, places = (np.flatnonzero(each > 0) for each in (self.branched, self.counts.branches[0, DRAFTED]))
        found = np.zeros((2, *np.shape(cost.link), *self.drafted.shape))
        for state in (DRAFTED, EMPTY) if rounds.size else ():
            found[0][..., state, rounds] = times_of_cells(over_draft, self.drafted[state, rounds] + 1, rounds)
            sequences = self.counts.branches[1, state, places].astype(np.int64)
            found[1][..., state, places] = times_of_cells(over_branches, sequences, places + self.farthest[state, places])
        return _PassCounts(*found)

    def totals(self, values: _PassCounts) -> Floats:
        """Sums over all passes of a preparation by state and start of the round, shape (..., states, tokens)."""
        return values.first + sums_between(values.branches, np.arange(self.branched.size) + 1, self.branched)

    def begun(self, times: _PassCounts, counts: _PassCounts, stop: Floats) -> Floats:
        """Sums of numbers over the passes that begin before the end of the sequence stops a preparation, by `ending` start.

        `stop` is the time until then, shape (..., ending starts); the result has the shape (values, ..., ending starts).
        """
        start, several = self.ending, (slice(None), *(None,) * (stop.ndim - 1))
        found, began = np.zeros((len(counts.first), *stop.shape)), np.zeros(stop.shape)
        for depth in range(int(self.branched[start[0]]) + 1):
            here = slice(int(np.count_nonzero(self.branched[start] >= depth)))  # later rounds have fewer passes
            spent, numbers = (each[1 if depth else 0] for each in (times, counts))
            at = DRAFTED, start[here] + depth
            found[..., here] += numbers[:, *at][several] * _has_begun(began[..., here], stop[..., here])
            began[..., here] += spent[..., *at]
        return found


def _has_begun(began: Floats, stop: Floats) -> NDArray[np.bool_]:
    """True where a pass of the draft model begins before it is stopped."""
    return np.asarray(began < stop * (1 - _ROUNDING))


# --- Laws ------------------------------------------------------------------------------------------------------------


def rank_tables(law: Any, tokens: int) -> list[Floats]:
    """Equally likely tables of the probabilities of ranks by position, shape (tokens, ranks)."""
    if not isinstance(law, PositionRanks):
        raise checks.ParameterError("SSD needs a law of ranks by output position; choose kind 'ranks', 'power-law' or 'replay'")
    return law.tables(tokens)


HIT, MISSED = range(2)
"""Ends of a round: the next draft has been prepared, or not. After a hit there may be nothing to draft."""


def round_ends(parameters: Parameters, rates: Sequence[Floats], drafted: Counts) -> Floats:
    """Probabilities of the ends of rounds, shape (starts, accepted tokens, `HIT` or `MISSED`, laws).

    `rates` has the probabilities of ranks by position of each law, shape (tokens, ranks), and `drafted` the drafted tokens by
    start, which never rise. Entries with more accepted than drafted tokens are 0.

    >>> ends = round_ends(Parameters(1, 2, 1), [np.array([[0.5, 0.25]] * 9)], np.minimum(2, np.arange(9)[::-1]))
    >>> ends[0, :, HIT, 0].tolist(), ends[0, :, MISSED, 0].tolist()
    ([0.25, 0.125, 0.125], [0.25, 0.125, 0.125])
    """
    fan_outs, tokens, most = parameters.fan_outs, drafted.size, int(drafted[0])
    first = np.stack([each[:, 0] for each in rates], axis=-1)
    whole = np.stack([each[:, : fan_outs[-1]].sum(axis=1) for each in rates], axis=-1)
    rejected = {
        count: np.stack([each[:, 1 : count + 1].sum(axis=1) for each in rates], axis=-1) for count in {*fan_outs[:most]}
    }
    found, reached = np.zeros((tokens, most + 1, 2, len(rates))), np.ones_like(first)
    for accepted in range(most + 1):
        here = slice(int(np.count_nonzero(drafted >= accepted)))
        at = slice(accepted, accepted + here.stop)
        all_kept = (drafted[here] == accepted)[:, None]
        ending = np.where(all_kept, 1.0, 1 - first[at])
        prepared = np.where(all_kept, whole[at], 0.0 if accepted == most else rejected[fan_outs[accepted]][at])
        prepared[max(tokens - 2 - accepted, 0) :] = ending[max(tokens - 2 - accepted, 0) :]  # nothing is left to draft
        found[here, accepted, HIT] = reached[here] * prepared
        found[here, accepted, MISSED] = reached[here] * np.maximum(ending - prepared, 0.0)
        reached[here] *= first[at]
    return found


class _State(NamedTuple):
    """Rounds of one state, under several laws."""

    ends: Floats
    """See `round_ends`."""
    mass: Floats
    """Probability that a round starts at each position, shape (tokens, laws)."""
    ending: Floats
    """Probability that such a round ends the sequence, shape (tokens, laws)."""


class _Rounds(NamedTuple):
    """Rounds of decodings under several laws."""

    states: list[_State]
    """The states that occur: `DRAFTED`, and without drafts just in time also `EMPTY`."""
    missed: Floats
    """Probability that a round starts at each position after a miss, shape (tokens, laws). The first one does."""

    @classmethod
    def of(cls, parameters: Parameters, drafted: Counts, rates: Sequence[Floats]) -> _Rounds:
        """By a forward recursion over starts."""
        tokens, alike = drafted.shape[1], parameters.backup == DRAFT
        ends = [round_ends(parameters, rates, each) for each in drafted[: 1 if alike else 2]]
        starts = np.zeros((tokens + ends[0].shape[1], 2, len(rates)))
        starts[0, MISSED] = 1.0
        for start in range(tokens):
            mass = starts[start].sum(axis=0) if alike else starts[start, HIT]
            starts[start + 1 : start + 1 + ends[0].shape[1]] += ends[0][start] * mass
            if not alike:
                starts[start + 1] += ends[1][start, 0] * starts[start, MISSED]
        masses = [starts[:tokens].sum(axis=1)] if alike else [starts[:tokens, HIT], starts[:tokens, MISSED]]
        last = [_ending(each, own) for each, own in zip(ends, drafted, strict=False)]
        return cls([_State(*each) for each in zip(ends, masses, last, strict=True)], starts[:tokens, MISSED])

    def shares(self) -> Floats:
        """Probability of rounds that another one follows, and of those that end the sequence; shape (2, states, tokens, laws)."""
        found = np.zeros((2, 2, *self.missed.shape))
        for state, (_, mass, ending) in enumerate(self.states):
            found[:, state] = mass * (1 - ending), mass * ending
        return found


def _ending(ends: Floats, drafted: Counts) -> Floats:
    """Probability that a round ends the sequence, shape (tokens, laws)."""
    found, tokens = np.zeros((drafted.size, ends.shape[-1])), drafted.size
    last = np.flatnonzero(np.arange(tokens) + drafted == tokens - 1)
    found[last] = ends[last, drafted[last]].sum(axis=1)
    return found


def _blocks(parameters: Parameters, drafted: Counts, tables: Sequence[Floats]) -> Iterator[tuple[slice, _Rounds]]:
    """Rounds under some of the laws at a time."""
    size = max(_MOST_CELLS // (2 * drafted.shape[1] * (int(drafted.max()) + 1)), 1)
    for first in range(0, len(tables), size):
        part = slice(first, first + size)
        yield part, _Rounds.of(parameters, drafted, tables[part])


# --- Moments ---------------------------------------------------------------------------------------------------------


def moments_of_pairs(
    parameters: Parameters, tokens: int, cost: StepCosts, laws: Sequence[PositionRanks], law: Index, price: Index
) -> Moments:
    """Exact moments of a decoding for pairs of a law and a cost, arrays of shape (pairs,).

    `law` and `price` are the index of each pair's law and of its cost, which is one of those joined in `cost`. A law of records
    gives the mixture of its records.

    >>> from model.costs.many_costs import joined
    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.position_ranks import PositionRankRates
    >>> costs, first = joined([UnitCost(1, cost_ratio=ratio) for ratio in (0.1, 0.3)]), np.zeros(2, dtype=np.intp)
    >>> exact = moments_of_pairs(Parameters(1, 4, 2), 200, costs, [PositionRankRates([0.8, 0.1])], first, np.arange(2))
    >>> (200 / exact.time).round(3).tolist(), (200 / exact.rounds).round(3).tolist()
    ([2.932, 1.754], [3.336, 3.336])
    """
    each = [rank_tables(own, tokens) for own in laws]
    sizes = np.array([len(parts) for parts in each])
    own = sizes[law]
    begins, first = np.cumsum(sizes) - sizes, np.cumsum(own) - own
    part = np.repeat(begins[law] - first, own) + np.arange(own.sum())
    rounds = _PricedRounds.of(round_tables(parameters, tokens, cost))
    found = _moments_of_parts(parameters, rounds, [table for parts in each for table in parts], part, np.repeat(price, own))
    if own.size == part.size:
        return Moments(*found)
    mean = np.add.reduceat(found, first, axis=1) / own
    spread = np.add.reduceat((found[0] - np.repeat(mean[0], own)) ** 2, first) / own
    return Moments(*mean)._replace(variance=mean[1] + spread)


class _PricedRounds(NamedTuple):
    """`PreparedRoundTables` of several costs, with costs along the last axis."""

    drafted: Counts
    time: Floats
    """Shape (2, states, tokens, costs)."""
    missed_time: Floats
    """Shape (tokens, costs)."""
    sums: tuple[Floats, Floats]
    """Unit-time and arithmetic of rounds and then of misses, as `_events`; each of shape (costs, events)."""

    @classmethod
    def of(cls, tables: PreparedRoundTables) -> _PricedRounds:
        """From tables of joined costs."""
        pairs = (tables.busy, tables.missed_busy), (tables.operations, tables.missed_operations)
        busy, operations = (
            np.concatenate([np.moveaxis(rounds, 1, 0).reshape(len(missed), -1), missed], axis=1) for rounds, missed in pairs
        )
        time = np.ascontiguousarray(np.moveaxis(tables.time, 1, -1))
        return cls(tables.drafted, time, np.ascontiguousarray(tables.missed_time.T), (busy, operations))


def _moments_of_parts(
    parameters: Parameters, priced: _PricedRounds, tables: Sequence[Floats], law: Index, price: Index
) -> Floats:
    """Moments of pairs of a table of rates and a cost, shape (moments, pairs)."""
    found = np.empty((len(Moments._fields), law.size))
    order = np.argsort(law, kind="stable")
    tokens = priced.drafted.shape[1]
    size = max(_MOST_CELLS // (_OF_A_PAIR * tokens), 1)
    for part, rounds in _blocks(parameters, priced.drafted, tables):
        shares = rounds.shares()
        events = np.concatenate([shares.reshape(-1, shares.shape[-1]), rounds.missed])
        mass = shares.sum(axis=0)
        counts = mass.sum(axis=(0, 1)), (mass * priced.drafted[..., None]).sum(axis=(0, 1))
        first, last = np.searchsorted(law[order], [part.start, part.stop]).tolist()
        for begin in range(first, last, size):
            mine = order[begin : min(begin + size, last)]
            own, at = law[mine] - part.start, price[mine]
            found[:2, mine] = _times_of_pairs(rounds, priced, own, at)
            found[2:4, mine] = [linear(events, each, own, at) for each in priced.sums]
            found[4:, mine] = [each[own] for each in counts]
    return found


def _times_of_pairs(rounds: _Rounds, priced: _PricedRounds, law: Index, price: Index) -> tuple[Floats, Floats]:
    """Mean and variance of the time, each of shape (pairs,).

    The time that is left at a start has a mean, and each round changes what it and the rest take by chance around this mean. These
    changes are uncorrelated, so that the variance is the sum of their mean squares; it is 0 if nothing is random.
    """
    # One law, or one cost, is broadcast in place of a copy for each pair.
    of_law: Any = law if rounds.missed.shape[1] > 1 else slice(None)
    of_cost: Any = price if priced.missed_time.shape[1] > 1 else slice(None)
    time, missed = priced.time[..., of_cost], priced.missed_time[:, of_cost]
    tokens, window = missed.shape[0], rounds.states[0].ends.shape[1]
    left = np.zeros((tokens + window, 2, law.size))  # mean time from a start after a hit and after a miss on; position; pair
    means = []
    for state, each in enumerate(rounds.states):
        ending, whole = each.ending[:, of_law], each.ends.sum(axis=(1, 2))[:, of_law]
        means.append(np.broadcast_to(time[0, state] * (whole - ending) + time[1, state] * ending, (tokens, law.size)).copy())
    for start in range(tokens - 1, -1, -1):
        for mean, each in zip(means, rounds.states, strict=True):
            later = left[start + 1 : start + 1 + each.ends.shape[1]]
            mean[start] += (each.ends[start][..., of_law] * later).sum(axis=(0, 1))
        left[start, HIT] = means[DRAFTED][start]
        left[start, MISSED] = means[-1][start] + missed[start]
    variance = np.zeros(law.size)
    for state, (mean, each) in enumerate(zip(means, rounds.states, strict=True)):
        for accepted in range(each.ends.shape[1]):
            change = left[accepted + 1 : accepted + 1 + tokens] + time[0, state][:, None]
            last = tokens - 1 - accepted
            change[last] = time[1, state, last]
            change -= mean[:, None]
            chance = each.ends[:, accepted] * each.mass[:, None]
            variance += (chance[..., of_law] * change**2).sum(axis=(0, 1))
    return left[0, MISSED], variance


# --- Work ------------------------------------------------------------------------------------------------------------


def expected_passes(
    parameters: Parameters, tokens: int, cost: StepCosts, tables_of_rates: Sequence[Floats]
) -> tuple[ModelPasses, ModelPasses]:
    """Return the expected passes of target and draft model for each table of rates.

    Arrays of shape (tables,), or (costs, tables) of several joined costs. Each round makes a pass of the target and all passes of
    its preparation, whose branches for other outcomes are drafted in vain. The round that ends the sequence makes the passes of the
    preparation that begin before the order to stop arrives, which depends on times. A miss adds the passes of a draft just in time.

    >>> from model.costs.layer_times import UnitCost
    >>> rates = [np.array([[rate, 0.1]] * 40) for rate in (0.5, 0.9)]
    >>> target, draft = expected_passes(Parameters(10, 2, 1), 40, UnitCost(10, cost_ratio=0.25), rates)
    >>> target.passes.round(3).tolist(), draft.passes.round(3).tolist(), draft.tokens.round(3).tolist()
    ([23.184, 15.108], [98.582, 46.911], [226.255, 130.143])
    """
    cost, plan, start = parameters.draft_costs(cost), _Preparations.of(parameters, tokens), np.arange(tokens)
    width = plan.drafted + 1
    verified = np.stack([np.ones(width.shape), width, start * width + width * (width + 1) / 2, start + width])
    prepared = plan.totals(plan.counts)  # passes, tokens, attended, read; state; start
    drafts = np.minimum(parameters.draft_length if parameters.backup == DRAFT else 0, tokens - 1 - start)
    seen = attended_within(start, drafts, parameters.context_budget)
    just_in_time = np.stack([drafts, drafts, seen, seen])
    ending = plan.ending
    stopped = np.zeros((4, *np.shape(cost.link), ending.size))
    if ending.size:
        verify = times_of_cells(cost.verify_times, plan.drafted[DRAFTED, ending] + 1, ending)
        stopped = plan.begun(plan.times(cost), plan.counts, _stop(verify, np.asarray(cost.link)[..., None]))
    found = np.zeros((2, 4, *np.shape(cost.link), len(tables_of_rates)))
    several = (slice(None), *(None,) * np.ndim(cost.link))
    for part, rounds in _blocks(parameters, plan.drafted, tables_of_rates):
        followed, last = rounds.shares()
        of_all = np.einsum("vst,stl->vl", verified, followed + last)
        of_drafts = np.einsum("vst,stl->vl", prepared, followed) + np.einsum("vt,tl->vl", just_in_time, rounds.missed)
        found[0][..., part], found[1][..., part] = of_all[several], of_drafts[several]
        found[1][..., part] += np.einsum("v...t,tl->v...l", stopped, last[DRAFTED, ending])
    target, draft = found
    return ModelPasses(*target[[0, 1, 2, 3, 1]]), ModelPasses(*draft[[0, 1, 2, 3, 1]])  # every token has logits
