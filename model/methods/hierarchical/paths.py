"""Hierarchical decoding, path by path: the small model's outcomes say what a round costs, the large model's where it ends."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.methods.hierarchical.algorithm import Parameters
from model.methods.hierarchical.finite_hierarchical import prices
from model.methods.rounds import Tally
from model.outcomes.outcome_laws import Bools, Outcomes
from model.outcomes.random_streams import BLOCK

Counts = NDArray[np.int64]

LAST_MATTERS = False
"""The last token is never a drafted one."""


class Offer(NamedTuple):
    """What it takes to offer tokens to the large model, in each replication: passes, moves between units, and the tokens."""

    drafts: Counts
    mediums: Counts
    moves: Counts
    offered: Counts


def walk(parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Mapping[str, Iterator[Outcomes]]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions."""
    price = prices(parameters, cost)
    accept, medium_accept = outcomes["accept"], outcomes["medium_accept"]
    offer = _recursively if parameters.reading == "recursive" else _at_once
    time, busy, operations, rounds, drafted = np.zeros((5, BLOCK))
    reached = np.zeros(parameters.longest_draft + 1, dtype=np.int64)  # positions whose place in the draft is 0, 1, 2, ...
    phase, limit = np.zeros(BLOCK, dtype=np.uint8), np.zeros(BLOCK, dtype=np.int64)
    anywhere = phase.copy()  # the medium model's outcomes do not depend on the place in a draft
    ahead: deque[Bools] = deque()
    for position in range(tokens):
        room = tokens - 1 - position
        count = min(parameters.draft_length, room)
        while len(ahead) < count:
            ahead.append(next(medium_accept)(anywhere).copy())
        starting = phase == 0
        found = offer(parameters, list(ahead), room)
        taken, work, arithmetic = price.work(found.drafts, found.mediums, found.offered)
        busy += starting * work
        time += starting * (taken + found.moves * price.link)
        operations += starting * arithmetic
        rounds += starting
        drafted += starting * found.offered
        np.copyto(limit, found.offered, where=starting)
        reached += np.bincount(phase, minlength=len(reached))
        if not room:
            break
        going_on = (phase < limit) & next(accept)(phase)
        phase = ((phase + 1) * going_on).astype(np.uint8)
        ahead.popleft()
    return Tally(time, busy, operations, rounds, drafted, reached - np.append(reached[1:], 0))


def _at_once(parameters: Parameters, coins: Sequence[Bools], room: int) -> Offer:
    count = len(coins)
    kept = np.zeros(BLOCK, dtype=np.int64)
    for row in reversed(coins):
        kept = (kept + 1) * row
    none = np.zeros_like(kept)
    if not count:
        return Offer(none, none, none, none)
    missing = count - kept
    if parameters.reading != "literal":
        missing = np.maximum(missing - 1, 0)
    offered = none + count
    if parameters.reading == "bonus" and room > count:
        offered += kept == count
    return Offer(none + count, 1 + missing, none + 3, offered)


def _recursively(parameters: Parameters, coins: Sequence[Bools], room: int) -> Offer:
    assert parameters.inner_draft_length is not None
    count = len(coins)
    phase, limit, drafts, mediums, drafted = np.zeros((5, BLOCK), dtype=np.int64)
    for index, row in enumerate(coins):
        starting = phase == 0
        length = min(parameters.inner_draft_length, count - 1 - index)
        drafts += starting * length
        mediums += starting
        drafted += starting & (length > 0)
        np.copyto(limit, length, where=starting)
        phase = (phase + 1) * ((phase < limit) & row)
    # To the small model and on to the medium, again and again; where nothing is drafted, straight to the medium; and back.
    moves = (2 * drafted + (drafted == 0) + 1) * (count > 0)
    return Offer(drafts, mediums, moves, np.full(BLOCK, count))
