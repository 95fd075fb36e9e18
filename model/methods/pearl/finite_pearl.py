"""PEARL for exactly so many tokens: what each round takes, and its moments, forward over where rounds start.

A round that starts with s of l tokens out is in pre-verify, with none that wait, or in post-verify, with min(gamma - 1, l - 1 - s):
so near the end too, where drafts are cut to what remains. What stands before a round is a rejected token in pre-verify and a kept
one in post-verify, so that position and phase are all that the next round depends on, under any law whose outcomes depend on the
one before.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.methods.rounds import Moments, mixed
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


def round_tables(draft_length: int, tokens: int, cost: UnitCost) -> RoundTables:
    """The rounds of decoding so many tokens at these costs.

    >>> found = round_tables(2, 4, UnitCost(10, cost_ratio=0.75, link=1.0))
    >>> found.waiting.tolist(), found.drafted.tolist()
    ([[0, 0, 0, 0], [1, 1, 1, 0]], [[2, 2, 1, 0], [2, 1, 0, 0]])
    >>> found.time.tolist()  # gamma c = 1.5 passes and the link there and back; with one drafted the target is as slow
    [[17.0, 17.0, 10.0, 10.0], [17.0, 10.0, 10.0, 10.0]]
    """
    left = tokens - 1 - np.arange(tokens)
    waiting = np.stack([np.zeros_like(left), np.minimum(draft_length - 1, left)])
    drafted = np.minimum(draft_length, left - waiting)
    verify = cost.target_pass * cost.slowdowns(np.arange(1, draft_length + 1), 1)[waiting]
    draft = drafted * (cost.required("draft") * cost.draft_slowdown(1))
    time = np.maximum(verify, draft + np.where(drafted > 0, 2 * cost.link, 0.0))
    operations = 1.0 + waiting + np.where(drafted > 0, drafted * cost.operations("draft"), 0.0)
    return RoundTables(waiting, drafted, time, verify + draft * cost.draft_devices, operations)


def round_starts(tables: RoundTables, law: Chain) -> Floats:
    """The chance that a round in each phase starts at each position, shape (2, tokens).

    >>> from model.outcomes.outcome_laws import ByPosition
    >>> round_starts(round_tables(2, 4, UnitCost(1, cost_ratio=1)), ByPosition([1, 1, 0, 1])).tolist()
    [[1.0, 0.0, 0.0, 1.0], [0.0, 1.0, 0.0, 0.0]]
    """
    return _forward(tables, law)[0]


def moments(draft_length: int, tokens: int, law: Any, cost: UnitCost) -> Moments:
    """The moments of a decoding, exactly; `drafted` are the tokens that were on offer.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = moments(4, 200, Iid(0.8), UnitCost(1, cost_ratio=0.2))
    >>> round(200 / found.time, 3), round(200 / found.rounds, 3)
    (2.104, 2.104)
    """
    if isinstance(law, Replay):
        chains: list[Chain] = [ByPosition(record) for record in law.records.astype(np.float64)]
    elif isinstance(law, ReplayChances):
        chains = list(law.chains)
    elif isinstance(law, Chain):
        chains = [law]
    else:
        raise checks.ParameterError(
            "this law of acceptances has no closed form for drafts that go on behind what is verified; choose one by output"
            " position, such as kind 'iid', 'markov', 'by-position' or 'replay'"
        )
    tables = round_tables(draft_length, tokens, cost)
    found = [_moments_of_chain(tables, chain) for chain in chains]
    return found[0] if len(found) == 1 else mixed(found)


def _moments_of_chain(tables: RoundTables, law: Chain) -> Moments:
    mass, first = _forward(tables, law)
    time = tables.time
    mean, square = float((mass * time).sum()), float((time * (2 * first + time * mass)).sum())
    totals = (float((mass * each).sum()) for each in (tables.busy, tables.operations, np.ones_like(mass), tables.waiting))
    return Moments(mean, max(square - mean**2, 0.0), *totals)


def _forward(tables: RoundTables, law: Chain) -> tuple[Floats, Floats]:
    """The chance that a round starts at each position in each phase, and the mean time until then on these paths."""
    tokens = tables.time.shape[1]
    after_failure, after_success = law.chances(tokens)
    found = np.zeros((2, 2, tokens + 1))  # mass and first moment of the time; phase; position
    found[0, PRE, 0] = 1.0
    for start in range(tokens - 1):
        spent = found[:, :, start].copy()
        spent[1] += spent[0] * tables.time[:, start]
        for phase, chances in ((PRE, after_failure), (POST, after_success)):
            if not spent[0, phase]:
                continue
            # All that wait are verified, and the first that is drafted meanwhile, unless the text ends there.
            width = int(tables.waiting[phase, start]) + 1
            kept = chances[start : start + width]
            reached = np.append(1.0, np.cumprod(kept))
            found[:, PRE, start + 1 : start + 1 + width] += spent[:, phase, None] * (reached[:-1] * (1 - kept))
            found[:, POST, start + width] += spent[:, phase] * reached[-1]
    return found[0, :, :tokens], found[1, :, :tokens]
