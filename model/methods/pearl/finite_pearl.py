"""PEARL for exactly so many tokens: what each round takes, and its moments, forward over where rounds start.

A round that starts with s of l tokens out is in pre-verify, with none that wait, or in post-verify, with min(gamma - 1, l - 1 - s):
so near the end too, where drafts are cut to what remains. What stands before a round is a rejected token in pre-verify and a kept
one in post-verify, so that position and phase are all that the next round depends on, under any law whose outcomes depend on the
one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.rounds import Moments, drafts_from, mixed, verify_from
from model.outcomes.outcome_laws import ByPosition, Chain, Floats, Replay, ReplayChances

PRE, POST = PHASES = range(2)
Counts = NDArray[np.int64]


class RoundTables(NamedTuple):
    """Of a round in each phase that starts at each position, shape (2, tokens): what waits, what is drafted, what it takes."""

    waiting: Counts
    """Drafted tokens that the target reads and verifies: those on offer."""
    drafted: Counts
    time: Floats
    busy: Floats
    operations: Floats
    """Arithmetic, in that of a token in a pass of the target."""


def round_tables(draft_length: int, tokens: int, cost: StepCosts) -> RoundTables:
    """The rounds of decoding so many tokens at these costs.

    The target's pass stands at the position where its round starts, the draft model's first pass at that of the last token that
    waits. Each is over one token: behind what was rejected, and behind what was kept, the draft model lacks no other.

    >>> from model.costs.layer_times import UnitCost
    >>> found = round_tables(2, 4, UnitCost(10, cost_ratio=0.75, link=1.0))
    >>> found.waiting.tolist(), found.drafted.tolist()
    ([[0, 0, 0, 0], [1, 1, 1, 0]], [[2, 2, 1, 0], [2, 1, 0, 0]])
    >>> found.time.tolist()  # gamma c = 1.5 passes and the link there and back; with one drafted the target is as slow
    [[17.0, 17.0, 10.0, 10.0], [17.0, 10.0, 10.0, 10.0]]
    """
    start = np.arange(tokens)
    left = tokens - 1 - start
    waiting = np.stack([np.zeros_like(left), np.minimum(draft_length - 1, left)])
    drafted = np.minimum(draft_length, left - waiting)
    verify = verify_from(cost, draft_length, tokens)[start, waiting]
    draft = drafts_from(cost, draft_length, tokens)[start + waiting, drafted]
    time = np.maximum(verify, draft + np.where(drafted > 0, 2 * cost.link, 0.0))
    operations = 1.0 + waiting + np.where(drafted > 0, drafted * cost.operations("draft"), 0.0)
    return RoundTables(waiting, drafted, time, verify + draft * cost.draft_devices, operations)


def round_starts(tables: RoundTables, law: Chain) -> Floats:
    """The chance that a round in each phase starts at each position, shape (2, tokens).

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import ByPosition
    >>> round_starts(round_tables(2, 4, UnitCost(1, cost_ratio=1)), ByPosition([1, 1, 0, 1])).tolist()
    [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    """
    return _forward([tables], [law])[0][..., 0]


class FiniteChoice(NamedTuple):
    """A decoding whose moments are asked for."""

    draft_length: int
    tokens: int
    law: Any
    cost: StepCosts


def moments(draft_length: int, tokens: int, law: Any, cost: StepCosts) -> Moments:
    """The moments of a decoding, exactly; `drafted` are the tokens that were on offer.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> found = moments(4, 200, Iid(0.8), UnitCost(1, cost_ratio=0.2))
    >>> round(200 / found.time, 3), round(200 / found.rounds, 3)
    (2.104, 2.104)
    """
    return moments_of_many([FiniteChoice(draft_length, tokens, law, cost)])[0]


def moments_of_many(choices: Sequence[FiniteChoice]) -> list[Moments]:
    """The moments of many decodings, computed side by side; of records each by itself, and then their mixture."""
    chains = [_chains(each.law) for each in choices]
    tables = [round_tables(each.draft_length, each.tokens, each.cost) for each in choices]
    wanted = [(table, chain) for table, own in zip(tables, chains, strict=True) for chain in own]
    wanted_in_turn = sorted(range(len(wanted)), key=lambda index: wanted[index][0].time.shape[1])
    found: dict[int, Moments] = {}
    while wanted_in_turn:
        longest = wanted[wanted_in_turn[-1]][0]
        size = max(_MOST_CELLS // (longest.waiting.size * (int(longest.waiting.max()) + 1)), 1)
        wanted_in_turn, part = wanted_in_turn[:-size], wanted_in_turn[-size:]
        found |= zip(part, _moments_of_chains(*zip(*(wanted[index] for index in part), strict=True)), strict=True)
    each = iter(found[index] for index in range(len(wanted)))
    parts = [[next(each) for _ in own] for own in chains]
    return [own[0] if len(own) == 1 else mixed(own) for own in parts]


_MOST_CELLS = 300_000
"""Positions times places in a window times decodings that are computed together: about two megabytes an array."""


def _chains(law: Any) -> list[Chain]:
    """A recorded sequence is a chain whose chances are 0 and 1."""
    if isinstance(law, Replay):
        return [ByPosition(record) for record in law.records.astype(np.float64)]
    if isinstance(law, ReplayChances):
        return list(law.chains)
    if isinstance(law, Chain):
        return [law]
    raise checks.ParameterError(
        "this law of acceptances has no closed form for drafts that go on behind what is verified; choose one by output"
        " position, such as kind 'iid', 'markov', 'by-position' or 'replay'"
    )


def _moments_of_chains(tables: Sequence[RoundTables], laws: Sequence[Chain]) -> list[Moments]:
    mass, first = _forward(tables, laws)
    time, busy, operations, waiting = (
        _side_by_side([getattr(each, name) for each in tables]) for name in ("time", "busy", "operations", "waiting")
    )
    mean, square = ((mass * time).sum(axis=(0, 1)), (time * (2 * first + time * mass)).sum(axis=(0, 1)))
    totals = ((mass * each).sum(axis=(0, 1)) for each in (busy, operations, np.ones_like(mass), waiting))
    columns = mean, np.maximum(square - mean**2, 0.0), *totals
    return [Moments(*values) for values in zip(*(column.tolist() for column in columns), strict=True)]


def _side_by_side(arrays: Sequence[NDArray[Any]]) -> Floats:
    """Arrays whose last axis is the position along a new last axis; behind the end of a shorter one there are zeros."""
    found = np.zeros((*arrays[0].shape[:-1], max(each.shape[-1] for each in arrays), len(arrays)))
    for index, each in enumerate(arrays):
        found[..., : each.shape[-1], index] = each
    return found


def _forward(tables: Sequence[RoundTables], laws: Sequence[Chain]) -> tuple[Floats, Floats]:
    """The chance that a round starts at each position in each phase, and the mean time until then on these paths.

    Shapes (2, tokens, decodings).
    """
    tokens = np.array([each.time.shape[1] for each in tables])
    time, waiting = _side_by_side([each.time for each in tables]), _side_by_side([each.waiting for each in tables]).astype(np.int64)
    last, decoding, most = int(tokens.max()), np.arange(len(tables)), int(waiting.max()) + 1
    chances = _side_by_side([np.array(law.chances(count)) for law, count in zip(laws, tokens.tolist(), strict=True)])
    # In each phase a round verifies all that wait, and the first that is drafted meanwhile, unless the text ends there.
    position, place = np.arange(last)[:, None, None], np.arange(most)[:, None]
    inside = (place <= waiting[:, :, None]) & (position < tokens - 1)
    kept = np.where(inside, chances[:, np.minimum(position + place, last - 1), decoding], 1.0)
    reached = np.cumprod(kept, axis=2)
    before = np.concatenate([np.ones_like(reached[:, :, :1]), reached[:, :, :-1]], axis=2)
    ends, whole = np.where(inside, before * (1 - kept), 0.0), reached[:, :, -1] * (position[:, 0] < tokens - 1)
    found = np.zeros((2, 2, last + most, len(tables)))  # mass and first moment of the time; phase; position; decoding
    found[0, PRE, 0] = 1.0
    for start in range(last - 1):
        spent = found[:, :, start].copy()
        spent[1] += spent[0] * time[:, start]
        found[:, PRE, start + 1 : start + 1 + most] += np.einsum("mpn,pkn->mkn", spent, ends[:, start])
        for phase in PHASES:
            found[:, POST, start + 1 + waiting[phase, start], decoding] += spent[:, phase] * whole[phase, start]
    started = np.where(np.arange(last)[:, None] < tokens, found[:, :, :last], 0.0)  # behind its end a decoding has no rounds
    return started[0], started[1]
