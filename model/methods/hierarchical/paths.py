"""Hierarchical decoding, vectorised: outcomes of the small model set the cost of a round, those of the large model its end."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from model.costs.step_costs import StepCosts
from model.methods.hierarchical.algorithm import Parameters
from model.methods.hierarchical.finite_hierarchical import OuterRounds, PassPrices, longest_inner, prices, round_prices
from model.methods.rounds.round_walks import Tally
from model.outcomes.outcome_laws import Bools, Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Mapping[str, Iterator[Outcomes]]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions."""
    price = prices(parameters, cost, tokens)
    accept, medium_accept = outcomes["accept"], outcomes["medium_accept"]
    offer = _recursively if parameters.reading == "recursive" else _at_once
    time, busy, operations, rounds, drafted = np.zeros((5, BLOCK))
    longest = parameters.longest_draft
    reached = np.zeros(longest + 1, dtype=np.int64)  # output positions at position 0, 1, 2, ... of a draft
    phase, limit = np.zeros(BLOCK, dtype=np.uint8), np.zeros(BLOCK, dtype=np.int64)
    # Positions of a round that the small model has read, and has not read when the next starts; 1 after a fully accepted draft.
    read, unread, after_whole = np.zeros((3, BLOCK), dtype=np.int64)
    anywhere = phase.copy()  # the medium model's outcomes do not depend on the position in a draft
    ahead: deque[Bools] = deque()
    for position in range(tokens):
        room = tokens - 1 - position
        count = min(parameters.draft_length, room)
        while len(ahead) < count:
            ahead.append(next(medium_accept)(anywhere).copy())
        starting = phase == 0
        found = offer(parameters, price, position, list(ahead), room)
        time += starting * found.time
        busy += starting * found.busy
        operations += starting * found.operations
        rounds += starting
        drafted += starting * found.offered
        np.copyto(limit, found.offered, where=starting)
        if not price.uniform:
            more = starting * (price.late_small[position, unread] + price.late_verify[position] * after_whole)
            time += more
            busy += more * price.share
            np.copyto(read, found.read, where=starting)
            unread = np.clip(phase + 1 - read, 0, longest)
            after_whole = 1 * (phase == limit)
        reached += np.bincount(phase, minlength=len(reached))
        if not room:
            break
        going_on = (phase < limit) & next(accept)(phase)
        phase = ((phase + 1) * going_on).astype(np.uint8)
        ahead.popleft()
    return Tally(time, busy, operations, rounds, drafted, reached - np.append(reached[1:], 0))


def _at_once(parameters: Parameters, price: PassPrices, start: int, outcomes: Sequence[Bools], room: int) -> OuterRounds:
    kept = np.zeros(BLOCK, dtype=np.int64)
    for row in reversed(outcomes):
        kept = (kept + 1) * row
    return round_prices(parameters, price, start, room).of(kept)


def _recursively(parameters: Parameters, price: PassPrices, start: int, outcomes: Sequence[Bools], room: int) -> OuterRounds:
    count, most = len(outcomes), longest_inner(parameters)
    time, operations, drafted = np.zeros((3, BLOCK))
    phase, limit = np.zeros((2, BLOCK), dtype=np.int64)
    starting = unread = last = np.zeros(BLOCK, dtype=np.bool_)
    for index, row in enumerate(outcomes):
        at, length = price.row(start + index), min(most, count - 1 - index)
        starting, last = phase == 0, unread
        time += starting * (price.small[at, length] + price.medium_verify[at, length])
        operations += starting * (length * price.draft_operations + (length + 1) * price.medium_operations)
        if length:
            time += starting * unread * price.late_small[at, 1]
            drafted += starting
        np.copyto(limit, length, where=starting)
        unread = (phase == limit) & (limit > 0)  # the last token of a fully accepted inner draft
        phase = (phase + 1) * ((phase < limit) & row)
    # Moves: to the small model and on to the medium for each inner draft; without inner drafts only to the medium; and back.
    moves = (2 * drafted + (drafted == 0) + 1) * (count > 0)
    verify = price.verify[price.row(start), count]
    read = np.maximum(count - 1 - (starting & last), 0)
    offered = np.full(BLOCK, count)
    return OuterRounds(
        time + verify + moves * price.link, time * price.share + verify, operations + count + 1, offered, read
    )
