"""Rounds of drafts by lookups: the walk of many replications at once, and its exact moments.

A round that starts at output position s drafts as many tokens as its lookup finds, at most as many as remain (in a batch that is
kept full, tokens after the end are dropped instead). Its cost depends on this number, which is known before the pass. The next
round starts after the accepted tokens and the target's own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.rounds.prices_of_rounds import RoundPrices
from model.methods.rounds.round_moments import Moments, mean_of
from model.methods.rounds.round_walks import Tally
from model.outcomes.lookup_laws import Integers, LookupLaw, Lookups, ReplayedLookups, outcomes_after

Floats = NDArray[np.float64]


def walk(tokens: int, tiles: Iterator[Integers], prices: RoundPrices, replications: int, *, cut: bool = True) -> Tally:
    """Walk rounds position by position, from tiles of packed outcomes (`model.outcomes.lookup_laws`).

    Drafting takes no unit, so unit-time equals time.

    >>> law = ReplayedLookups([[2, 0, 0, 2, 2]], [[1, 0, 0, 2, 0]])  # one of two is accepted, then nothing is found
    >>> flat = np.array([1.0, 1.1, 1.2])
    >>> tally = walk(5, law.sample(iter([np.zeros((5, 1))])), RoundPrices(flat, flat, 1 + np.arange(3.0)), 1)
    >>> tally.rounds.tolist(), tally.drafted.tolist(), tally.accepted.tolist(), tally.time.round(12).tolist()
    ([3.0], [3.0], [1, 2, 0], [3.3])
    """
    start, accepted_before = np.zeros(replications, dtype=np.int64), np.zeros(replications, dtype=np.bool_)
    longest = len(prices.operations) - 1
    none = longest + 1  # the number of drafted tokens where no round starts: tables have a 0 there
    worked, each = np.append(prices.operations, 0.0), np.append(np.arange(none), 0)
    time, operations, rounds, drafted_in_all = np.zeros((4, replications))
    counts = np.zeros(none + 1, dtype=np.int64)
    position = 0
    for tile in tiles:
        rows = tile[: tokens - position]
        drafts, kept = np.full((2, *rows.shape), none, dtype=np.int64)
        for place, row in enumerate(rows, position):
            starting, remaining = start == place, tokens - 1 - place
            drafted, accepted = outcomes_after(accepted_before, row)
            if remaining < longest:
                accepted = np.minimum(accepted, remaining)
                drafted = np.minimum(drafted, remaining) if cut else drafted
            np.copyto(drafts[place - position], drafted, where=starting)
            np.copyto(kept[place - position], accepted, where=starting)
            np.copyto(start, accepted + (place + 1), where=starting)
            np.copyto(accepted_before, accepted > 0, where=starting)
        time += _prices_at(prices.time, position, drafts).sum(axis=0)
        operations += worked[drafts].sum(axis=0)
        rounds += (drafts < none).sum(axis=0)
        drafted_in_all += each[drafts].sum(axis=0)
        counts += np.bincount(kept.ravel(), minlength=none + 1)
        position += len(rows)
    return Tally(time, time, operations, rounds, drafted_in_all, counts[:none])


def _prices_at(prices: Floats, position: int, drafts: Integers) -> Floats:
    """Prices of rounds from this position on, by drafted tokens; 0 where the number is beyond the last price."""
    own = prices[None] if prices.ndim == 1 else prices[0, position : position + len(drafts)]
    table = np.concatenate([own, np.zeros((len(own), 1))], axis=1)
    return np.asarray(table[0][drafts] if prices.ndim == 1 else np.take_along_axis(table, drafts, axis=1))


class Visits(NamedTuple):
    """Rounds by start position and outcome of their lookup, under several laws."""

    drafted: Integers
    """Shape (positions, outcomes), as all laws have the same outcomes."""
    mass: Floats
    """Probability that a round with this outcome starts at the position; shape (positions, outcomes, laws)."""
    first: Floats
    """Mean time until then, times that probability, of the same shape."""


def visits(tokens: int, laws: Sequence[Lookups], times: Floats, *, cut: bool = True) -> Visits:
    """Rounds that start at each position, by a forward recursion, under laws with the same outcomes.

    `times` is by start position, drafted tokens and law.

    >>> found = visits(3, [Lookups.of_rates(0.5, 1.0, 2)], np.ones((3, 3, 1)))
    >>> found.mass.sum(axis=(1, 2)).tolist()  # the second position is the start of a round only after no match
    [1.0, 0.5, 0.25]
    """
    drafted, accepted, _ = laws[0].cells
    chance = np.stack([law.cells.chance for law in laws], axis=-1)  # (outcome before, outcomes, laws)
    remaining = np.arange(tokens - 1, -1, -1)[:, None]
    counts = np.minimum(drafted, remaining) if cut else np.broadcast_to(drafted, (tokens, len(drafted)))
    found = np.zeros((2, tokens, len(drafted), len(laws)))
    longest = int(accepted.max())
    ends = (accepted == np.arange(longest + 1)[:, None]).astype(np.float64)  # more than what remains ends the decoding, too
    # Probability and time, by position and whether the round before accepted tokens.
    ahead = np.zeros((2, tokens + longest + 1, 2, len(laws)))
    ahead[0, 0, 0] = 1.0
    for start in range(tokens):
        mass, first = found[:, start] = np.einsum("qbl,bol->qol", ahead[:, start], chance)
        spent = ends @ np.stack([mass, first + mass * times[start, counts[start]]])
        ahead[:, start + 1, 0] += spent[:, 0]
        ahead[:, start + 2 : start + 2 + longest, 1] += spent[:, 1:]
    return Visits(counts, found[0], found[1])


_CELLS = 300_000
"""Numbers in arrays by position, outcome and pair: a few MB."""


def moments_of_pairs(
    tokens: int, laws: Sequence[LookupLaw], prices: RoundPrices, law: NDArray[np.intp], price: NDArray[np.intp], *, cut: bool = True
) -> Moments:
    """Moments of `walk` for pairs of laws and prices, the latter those of several costs; arrays of shape (pairs,).

    Over records these are the moments of equally likely ones.
    """
    found = np.empty((len(Moments._fields), law.size))
    groups: dict[tuple[bytes, bytes], dict[int, Lookups]] = {}
    for number, each in enumerate(laws):
        if isinstance(each, Lookups):
            groups.setdefault((each.cells.drafted.tobytes(), each.cells.accepted.tobytes()), {})[number] = each
            continue
        for index in np.flatnonzero(law == number).tolist():
            found[:, index] = _of_records(tokens, each, prices.of(int(price[index])), cut=cut)
    for known in groups.values():
        own = np.flatnonzero(np.isin(law, [*known]))
        outcomes = len(next(iter(known.values())).cells.drafted)
        for at in range(0, own.size, size := max(_CELLS // (tokens * outcomes), 1)):
            part = own[at : at + size]
            found[:, part] = _of_lookups(tokens, [known[number] for number in law[part].tolist()], prices, price[part], cut=cut)
    return Moments(*found)


def _of_lookups(tokens: int, laws: Sequence[Lookups], prices: RoundPrices, price: NDArray[np.intp], *, cut: bool) -> Floats:
    """Rows of `Moments` of pairs of laws and prices, one after another."""
    each = (prices.time if prices.uniform else prices.time[:, 0])[price]  # (pairs, longest + 1) or (pairs, tokens, longest + 1)
    times = np.moveaxis(np.broadcast_to(each[:, None] if prices.uniform else each, (price.size, tokens, each.shape[-1])), 0, -1)
    drafted, mass, first = visits(tokens, laws, times, cut=cut)
    spent = times[np.arange(tokens)[:, None], drafted]
    mean, square = (mass * spent).sum(axis=(0, 1)), (spent * (2 * first + spent * mass)).sum(axis=(0, 1))
    worked = np.einsum("sol,los->l", mass, prices.operations[price][:, drafted].swapaxes(1, 2))
    rounds, tokens_drafted = mass.sum(axis=(0, 1)), np.einsum("sol,so->l", mass, drafted)
    return np.stack([mean, np.maximum(square - mean**2, 0.0), mean, worked, rounds, tokens_drafted])


def _of_records(tokens: int, law: LookupLaw, prices: RoundPrices, *, cut: bool) -> Moments:
    if not isinstance(law, ReplayedLookups):
        raise checks.ParameterError("this law of lookups has no closed form; ask for views = ['paths']")
    count = len(law.drafted)
    draws = np.broadcast_to((np.arange(count) + 0.5) / count, (tokens, count))
    return mean_of(walk(tokens, law.sample(iter([draws])), prices, count, cut=cut))


def moments(tokens: int, law: LookupLaw, prices: RoundPrices, *, cut: bool = True) -> Moments:
    """`moments_of_pairs` of one law and one price.

    >>> flat = np.ones(4)
    >>> round(moments(128, Lookups.of_rates(0.5, 0.5, 3), RoundPrices(flat, flat, flat)).rounds, 3)  # 128 / 1.4375 is 89.043
    89.376
    """
    one = np.zeros(1, dtype=np.intp)
    found = moments_of_pairs(tokens, [law], RoundPrices(*(each[None] for each in prices)), one, one, cut=cut)
    return Moments(*(float(each[0]) for each in found))
