"""Rounds of drafts by lookups: the walk of many replications at once, and its exact moments.

A round that starts at output position s drafts as many tokens as its lookup finds, at most as many as remain (in a batch that is
kept full, tokens after the end are dropped instead). Its cost depends on this number, which is known before the pass. The next
round starts after the accepted tokens and the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.rounds import Moments, RoundPrices, Tally, mean_of
from model.outcomes.lookup_laws import Integers, LookupLaw, Lookups, ReplayedLookups, outcomes_after

Floats = NDArray[np.float64]


def walk(tokens: int, tiles: Iterator[Integers], prices: RoundPrices, replications: int, *, cut: bool = True) -> Tally:
    """Walk rounds position by position, from tiles of packed outcomes (`model.outcomes.lookup_laws`).

    >>> law = ReplayedLookups([[2, 0, 0, 2, 2]], [[1, 0, 0, 2, 0]])  # one of two is accepted, then nothing is found
    >>> flat = np.array([1.0, 1.1, 1.2])
    >>> tally = walk(5, law.sample(iter([np.zeros((5, 1))])), RoundPrices(flat, flat, 1 + np.arange(3.0)), 1)
    >>> tally.rounds.tolist(), tally.drafted.tolist(), tally.accepted.tolist(), tally.time.round(12).tolist()
    ([3.0], [3.0], [1, 2, 0], [3.3])
    """
    start, accepted_before = np.zeros(replications, dtype=np.int64), np.zeros(replications, dtype=np.bool_)
    time, busy, operations, rounds, drafted_in_all = np.zeros((5, replications))
    counts = np.zeros(len(prices.operations), dtype=np.int64)
    position = 0
    for tile in tiles:
        for row in tile[: tokens - position]:
            which = np.flatnonzero(start == position)
            remaining = tokens - 1 - position
            drafted, accepted = outcomes_after(accepted_before[which], row[which])
            accepted = np.minimum(accepted, remaining)
            if cut:
                drafted = np.minimum(drafted, remaining)
            took, held = prices.time, prices.busy
            if not prices.uniform:
                took, held = took[0, position], held[0, position]
            time[which] += took[drafted]
            busy[which] += held[drafted]
            operations[which] += prices.operations[drafted]
            rounds[which] += 1
            drafted_in_all[which] += drafted
            counts += np.bincount(accepted, minlength=len(counts))
            accepted_before[which] = accepted > 0
            start[which] = position + 1 + accepted
            position += 1
    return Tally(time, busy, operations, rounds, drafted_in_all, counts)


class Visits(NamedTuple):
    """Rounds by start position and outcome of their lookup; all of shape (positions, outcomes)."""

    drafted: Integers
    mass: Floats
    """Probability that a round with this outcome starts at the position."""
    first: Floats
    """Mean time until then, times that probability."""


def visits(tokens: int, law: Lookups, times: Floats, *, cut: bool = True) -> Visits:
    """Rounds that start at each position, by a forward recursion; `times` by start position and drafted tokens.

    >>> found = visits(3, Lookups.of_rates(0.5, 1.0, 2), np.ones((3, 3)))
    >>> found.mass.sum(axis=1).tolist()  # the second position is the start of a round only after no match
    [1.0, 0.5, 0.25]
    """
    drafted, accepted, chance = law.cells
    remaining = np.arange(tokens - 1, -1, -1)[:, None]
    counts = np.minimum(drafted, remaining) if cut else np.broadcast_to(drafted, (tokens, len(drafted)))
    kept = np.minimum(accepted, remaining)
    spent = np.take_along_axis(times, counts, axis=1)
    found = np.zeros((2, tokens, len(drafted)))
    ahead = np.zeros((2, tokens + 1, 2))  # probability and time, by position and whether the round before accepted tokens
    ahead[0, 0, 0] = 1.0
    for start in range(tokens):
        mass, first = found[:, start] = ahead[:, start] @ chance
        ends = start + 1 + kept[start], (kept[start] > 0).astype(np.intp)
        np.add.at(ahead[0], ends, mass)
        np.add.at(ahead[1], ends, first + mass * spent[start])
    return Visits(counts, found[0], found[1])


def moments(tokens: int, law: LookupLaw, prices: RoundPrices, *, cut: bool = True) -> Moments:
    """Exact moments of `walk`; over records, the moments of equally likely ones.

    >>> flat = np.ones(4)
    >>> round(moments(128, Lookups.of_rates(0.5, 0.5, 3), RoundPrices(flat, flat, flat)).rounds, 3)  # 128 / 1.4375 is 89.043
    89.376
    """
    if isinstance(law, ReplayedLookups):
        count = len(law.drafted)
        draws = np.broadcast_to((np.arange(count) + 0.5) / count, (tokens, count))
        return mean_of(walk(tokens, law.sample(iter([draws])), prices, count, cut=cut))
    if not isinstance(law, Lookups):
        raise checks.ParameterError("this law of lookups has no closed form; ask for views = ['paths']")
    shape = tokens, len(prices.operations)
    time, busy = (np.broadcast_to(each, shape) if prices.uniform else each[0] for each in (prices.time, prices.busy))
    drafted, mass, first = visits(tokens, law, time, cut=cut)
    spent = np.take_along_axis(time, drafted, axis=1)
    mean, square = float((mass * spent).sum()), float((spent * (2 * first + spent * mass)).sum())
    held = float((mass * np.take_along_axis(busy, drafted, axis=1)).sum())
    worked = float((mass * prices.operations[drafted]).sum())
    return Moments(mean, max(square - mean**2, 0.0), held, worked, float(mass.sum()), float((mass * drafted).sum()))
