"""SSD for a finite number of tokens: costs of each round, and exact moments by a forward recursion over starts of rounds.

A round that starts after s of l tokens verifies min(K, l - 1 - s) drafted tokens, or none after a miss without a draft just in
time. So position and state (`DRAFTED`, `EMPTY`) determine the law of the next round, if ranks are independent by position. A
draft just in time is charged to the round that follows the miss. With drafts just in time all rounds are those of speculative
decoding with the same outcomes; only their times differ.
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
from model.methods.rounds.prices_of_rounds import draft_times, verify_times
from model.methods.rounds.round_moments import Moments, mixed
from model.methods.ssd.algorithm import DRAFT, Parameters
from model.outcomes.position_ranks import PositionRanks

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]
DRAFTED, EMPTY = range(2)
"""States of a round: it verifies drafted tokens (as many as there is room for), or none because none were drafted."""
_ROUNDING = 1e-9
"""Relative error within which two times count as equal."""


class PreparedRoundTables(NamedTuple):
    """Costs of rounds. Shapes: `drafted` (states, tokens), costs of rounds (2, states, tokens), of misses (tokens,).

    Index 1 of the first axis of costs is for the round that ends the sequence, which does not wait for prepared drafts.
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
    """Tabulate the rounds of a decoding at these costs.

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
    cost, longest, start = parameters.draft_costs(cost), parameters.draft_length, np.arange(tokens)
    room = tokens - 1 - start
    drafted = np.stack([np.minimum(longest, room), np.zeros_like(room)])
    verify = verify_times(cost, longest + 1, tokens)[start, drafted]
    shape = drafted.shape
    preparing, until_last = np.zeros(shape), np.zeros(shape)
    operations = np.broadcast_to(1.0 + drafted, (2, *shape)).copy()
    prepares = np.zeros(shape, dtype=np.bool_)
    for where, passes in _preparations(parameters, drafted, cost):
        prepares[where] = True
        stop = np.maximum(verify[where] - cost.link, 0.0)  # the end of the sequence stops the preparation
        began: Floats = np.zeros(len(where[1]))
        for each in passes:
            operations[0][where] += each.tokens * cost.operations("draft")
            operations[1][where] += np.where(_has_begun(began, stop), each.tokens * cost.operations("draft"), 0.0)
            began = began + each.time
        preparing[where], until_last[where] = began, np.minimum(began, stop)
    links = np.where(prepares, 2 * cost.link, 0.0)
    time = np.stack([np.maximum(verify, preparing + links), verify])
    busy = verify + np.stack([preparing, until_last]) * cost.draft_devices
    backup = longest if parameters.backup == DRAFT else 0
    just_in_time = np.minimum(backup, room)
    drafts = np.asarray(draft_times(cost, longest, tokens)[start, just_in_time])
    missed = np.where(just_in_time > 0, drafts + 2 * cost.link, 0.0)
    spent = np.where(just_in_time > 0, just_in_time * cost.operations("draft"), 0.0)
    return PreparedRoundTables(drafted, backup, time, busy, operations, missed, drafts * cost.draft_devices, spent)


class _PreparationPass(NamedTuple):
    """One pass of a preparation, in several rounds."""

    time: Floats
    tokens: int
    attended: Floats
    """Positions that its tokens attend to."""
    read: Floats
    """Positions that it reads; of each branch as many as of the longest."""


def _has_begun(began: Floats, stop: Floats) -> NDArray[np.bool_]:
    """True where a pass of the draft model begins before it is stopped."""
    return np.asarray(began < stop * (1 - _ROUNDING))


def _preparations(
    parameters: Parameters, drafted: Counts, cost: StepCosts
) -> Iterator[tuple[tuple[Counts, Counts], list[_PreparationPass]]]:
    """Yield states and starts of rounds with equal preparations, and the passes of those, in order; `cost` is that of drafts."""
    tokens, held = drafted.shape[1], np.inf if parameters.context_budget is None else parameters.context_budget
    groups: dict[tuple[int, tuple[_Level, ...]], list[tuple[int, int]]] = {}
    for state in (DRAFTED, EMPTY):
        for position in range(tokens):
            count = int(drafted[state, position])
            plan = parameters.branch_plan(count, tokens - position)
            groups.setdefault((count, tuple(_levels(plan))), []).append((state, position))
    for (count, levels), members in groups.items():
        if not levels:
            continue
        states, at = np.array(members).T
        width = count + 1
        hidden = np.maximum(at - held, 0.0)
        seen, read = at * width + width * (width + 1) / 2 - hidden * width, at + width - hidden
        passes = [_PreparationPass(cost.draft_times(at, width=width, heads=width), width, seen, read)]
        for depth, level in enumerate(levels, start=1):
            branches, farthest = sum(number for _, number in level), level[-1][0]
            seen = sum(number * (np.minimum(at + accepted + depth, held) + 1.0) for accepted, number in level)
            read = branches * (np.minimum(at + farthest + depth, held) + 1.0)
            passes.append(_PreparationPass(cost.draft_times(at + farthest + depth, sequences=branches), branches, seen, read))
        yield (states, at), passes


_Level = tuple[tuple[int, int], ...]
"""Accepted tokens and number of the branches of one pass over branches."""


def _levels(plan: Sequence[tuple[int, int]]) -> list[_Level]:
    """Branches of each pass over branches.

    >>> _levels([(3, 2), (2, 1), (0, 0)])
    [((0, 3), (1, 2)), ((0, 3),)]
    """
    longest = max(length for _, length in plan)
    return [
        tuple([(accepted, number) for accepted, (number, length) in enumerate(plan) if depth < length]) for depth in range(longest)
    ]


class Ends(NamedTuple):
    """Probabilities of the ends of a round that starts at a position, by the number of accepted tokens; shape (accepted,)."""

    hit: Floats
    """The next draft has been prepared. Includes the ends after which nothing is drafted."""
    missed: Floats


def round_ends(parameters: Parameters, rates: Floats, start: int, drafted: int) -> Ends:
    """Probabilities of the ends of a round, from probabilities of ranks by position, shape (tokens, ranks).

    >>> ends = round_ends(Parameters(1, 2, 1), np.array([[0.5, 0.25]] * 9), 0, 2)
    >>> ends.hit.tolist(), ends.missed.tolist()
    ([0.25, 0.125, 0.125], [0.25, 0.125, 0.125])
    """
    tokens, fan_outs = len(rates), parameters.fan_outs
    hit, missed, reached = np.zeros(drafted + 1), np.zeros(drafted + 1), 1.0
    for accepted in range(drafted + 1):
        position, whole = start + accepted, accepted == drafted
        own = rates[position]
        ending = 1.0 if whole else 1 - own[0]
        found = float(own[: fan_outs[-1]].sum()) if whole else float(own[1 : fan_outs[accepted] + 1].sum())
        if position >= tokens - 2:
            found = ending
        hit[accepted], missed[accepted] = reached * found, reached * max(ending - found, 0.0)
        reached *= own[0]
    return Ends(hit, missed)


def rank_tables(law: Any, tokens: int) -> list[Floats]:
    """Equally likely tables of the probabilities of ranks by position, shape (tokens, ranks)."""
    if not isinstance(law, PositionRanks):
        raise checks.ParameterError("SSD needs a law of ranks by output position; choose kind 'ranks', 'power-law' or 'replay'")
    return law.tables(tokens)


def moments(parameters: Parameters, tokens: int, law: PositionRanks, cost: StepCosts) -> Moments:
    """Return the exact moments of a decoding; a law of records gives the mixture of its records."""
    known = rank_tables(law, tokens)
    tables = round_tables(parameters, tokens, cost)
    parts = [_moments(parameters, tables, rates) for rates in known]
    return parts[0] if len(parts) == 1 else mixed(parts)


def round_starts(parameters: Parameters, tables: PreparedRoundTables, rates: Floats) -> Floats:
    """Probability that a round starts at each position in each state, after a hit and after a miss; shape (2, states, tokens)."""
    return _forward(parameters, tables, rates)[0]


def _moments(parameters: Parameters, tables: PreparedRoundTables, rates: Floats) -> Moments:
    starts, first, second = _forward(parameters, tables, rates)
    shares, mass = _shares(tables, starts, rates), starts.sum(axis=0)
    busy, operations = (float((shares * table).sum()) for table in (tables.busy, tables.operations))
    after_miss = starts[1].sum(axis=0)
    busy += float((after_miss * tables.missed_busy).sum())
    operations += float((after_miss * tables.missed_operations).sum())
    return Moments(first, max(second - first**2, 0.0), busy, operations, float(mass.sum()), float((mass * tables.drafted).sum()))


def _shares(tables: PreparedRoundTables, starts: Floats, rates: Floats) -> Floats:
    """Probability of rounds that another one follows, and of rounds that end the sequence; shape (2, states, tokens)."""
    mass = starts.sum(axis=0)
    ending = np.zeros_like(mass)
    tokens = mass.shape[1]
    for state in (DRAFTED, EMPTY):
        for start in range(tokens):
            drafted = int(tables.drafted[state, start])
            if mass[state, start] and start + drafted == tokens - 1:
                ending[state, start] = np.prod(rates[start : start + drafted, 0])
    return np.stack([mass * (1 - ending), mass * ending])


def expected_passes(
    parameters: Parameters, tokens: int, cost: StepCosts, tables_of_rates: Sequence[Floats]
) -> tuple[ModelPasses, ModelPasses]:
    """Return the expected passes of target and draft model for each table of rates, shape (tables,).

    Each round makes a pass of the target and all passes of its preparation, whose branches for other outcomes are drafted in vain.
    The round that ends the sequence makes the passes of the preparation that begin before the order to stop arrives, which depends
    on times. A miss adds the passes of a draft just in time.

    >>> from model.costs.layer_times import UnitCost
    >>> rates = [np.array([[rate, 0.1]] * 40) for rate in (0.5, 0.9)]
    >>> target, draft = expected_passes(Parameters(10, 2, 1), 40, UnitCost(10, cost_ratio=0.25), rates)
    >>> target.passes.round(3).tolist(), draft.passes.round(3).tolist(), draft.tokens.round(3).tolist()
    ([23.184, 15.108], [98.582, 46.911], [226.255, 130.143])
    """
    rounds = round_tables(parameters, tokens, cost)
    position, shape = np.arange(tokens), rounds.drafted.shape
    width = rounds.drafted + 1
    target = np.ones(shape), width, position * width + width * (width + 1) / 2, position + width
    prepared = np.zeros((4, 2, *shape))  # passes, tokens, attended, read; whether the sequence ends; state; start
    verify = rounds.time[1]
    for where, passes in _preparations(parameters, rounds.drafted, parameters.draft_costs(cost)):
        stop, began = np.maximum(verify[where] - cost.link, 0.0), np.zeros(len(where[1]))
        for each in passes:
            begun = np.stack([np.ones_like(began), _has_begun(began, stop)])
            for table, value in zip(prepared, (1, each.tokens, each.attended, each.read), strict=True):
                table[:, *where] += begun * value
            began = began + each.time
    drafts = np.minimum(rounds.backup_drafts, tokens - 1 - position)
    seen = attended_within(position, drafts, parameters.context_budget)
    missed = drafts, drafts, seen, seen
    found = np.zeros((8, len(tables_of_rates)))
    for index, rates in enumerate(tables_of_rates):
        starts = round_starts(parameters, rounds, rates)
        shares, after_miss = _shares(rounds, starts, rates), starts[1].sum(axis=0)
        found[:4, index] = [float((starts.sum(axis=0) * values).sum()) for values in target]
        found[4:, index] = [
            float((shares * values).sum() + after_miss @ more) for values, more in zip(prepared, missed, strict=True)
        ]
    return ModelPasses(*found[[0, 1, 2, 3, 1]]), ModelPasses(*found[[4, 5, 6, 7, 5]])  # every token has logits


def _forward(parameters: Parameters, tables: PreparedRoundTables, rates: Floats) -> tuple[Floats, float, float]:
    """Return the probabilities of starts as `round_starts`, and the mean and mean square of the time."""
    tokens = tables.drafted.shape[1]
    empty = EMPTY if tables.backup_drafts == 0 else DRAFTED
    starts = np.zeros((2, 2, tokens))  # after a hit, after a miss; state; position
    sums = np.zeros((2, 2, tokens))  # first and second moment of the time until the start; state; position
    starts[1, empty, 0] = 1.0
    sums[:, empty, 0] = tables.missed_time[0], tables.missed_time[0] ** 2
    mean = square = 0.0
    for start in range(tokens):
        for state in (DRAFTED, EMPTY):
            mass = float(starts[:, state, start].sum())
            if not mass:
                continue
            one, two = sums[:, state, start].tolist()
            drafted = int(tables.drafted[state, start])
            ends = round_ends(parameters, rates, start, drafted)
            for accepted in range(drafted + 1):
                following = start + accepted + 1
                last = following == tokens
                spent = float(tables.time[int(last), state, start])
                for missed, chance in enumerate((ends.hit[accepted], ends.missed[accepted])):
                    if not chance:
                        continue
                    if last:
                        mean += chance * (one + mass * spent)
                        square += chance * (two + 2 * spent * one + spent**2 * mass)
                        continue
                    more = spent + (float(tables.missed_time[following]) if missed else 0.0)
                    to = empty if missed else DRAFTED
                    starts[missed, to, following] += chance * mass
                    sums[0, to, following] += chance * (one + mass * more)
                    sums[1, to, following] += chance * (two + 2 * more * one + more**2 * mass)
    return starts, mean, square
