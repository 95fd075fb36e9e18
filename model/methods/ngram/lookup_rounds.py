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


class LookupRounds(NamedTuple):
    """Rounds of a decoding by the tokens that their lookup finds; positions that are priced alike share a row."""

    row: NDArray[np.intp]
    """Row of each start position; shape (positions,)."""
    found: Integers
    """Distinct numbers of tokens that a lookup finds, rising; shape (kinds,)."""
    drafted: Integers
    """Tokens that are drafted and paid for; shape (rows, kinds)."""


def rounds_of(tokens: int, law: Lookups, *, cut: bool = True, by_position: bool = False) -> LookupRounds:
    """Rounds of a decoding of `tokens` tokens, in a row for each position or for all with the same drafted tokens.

    >>> rounds_of(4, Lookups.of_rates(0.5, 0.5, 2)).row.tolist(), rounds_of(4, Lookups.of_rates(0.5, 0.5, 2)).drafted.tolist()
    ([2, 2, 1, 0], [[0, 0], [0, 1], [0, 2]])
    """
    found = np.unique(law.cells.drafted)
    remaining = np.arange(tokens - 1, -1, -1)
    most = np.minimum(remaining, found[-1]) if cut else np.full(tokens, found[-1])
    levels, row = np.unique(most, return_inverse=True)
    if by_position:
        levels, row = most, np.arange(tokens)
    return LookupRounds(row, found, np.minimum(found, levels[:, None]))


class Visits(NamedTuple):
    """Rounds by the tokens that their lookup finds, under several laws; summed over the positions of a row."""

    mass: Floats
    """Probability that such a round starts; shape (rows, kinds, laws)."""
    first: Floats
    """Mean time until then, times that probability, of the same shape."""


def visits(rounds: LookupRounds, laws: Sequence[Lookups], times: Floats) -> Visits:
    """Rounds that start at each position, by a forward recursion, under laws with the same outcomes.

    `times` is by row, kind of round and law.

    >>> law = Lookups.of_rates(0.5, 1.0, 2)
    >>> visits(rounds_of(3, law, by_position=True), [law], np.ones((3, 2, 1))).mass.sum(axis=(1, 2)).tolist()
    [1.0, 0.5, 0.25]
    """
    alike = all(law.alike for law in laws)  # the outcome of the round before has no effect
    drafted, accepted, _ = laws[0].cells
    tokens, longest, before = rounds.row.size, int(accepted.max()), 1 if alike else 2
    cells = np.array([law.cells.chance[:before] for law in laws]).transpose(1, 2, 0)  # (outcome before, outcomes, laws)
    # By kind: outcomes with 0, 1, ... accepted tokens. More than what remains end the decoding, too.
    chance = np.zeros((rounds.found.size, before, longest + 1, len(laws)))
    for kind, count in enumerate(rounds.found.tolist()):
        here = drafted == count
        chance[kind][:, accepted[here]] = cells[:, here]
    share = chance.sum(axis=2)
    ends = [each[:, : min(longest, count) + 1] for each, count in zip(chance, rounds.found.tolist(), strict=True)]
    mass, first = np.zeros((2, *rounds.drafted.shape, len(laws)))
    # Probability and time, by outcome of the round before and position.
    ahead = np.zeros((2, before, tokens + longest + 1, len(laws)))
    ahead[0, 0, 0] = 1.0
    for start, row in enumerate(rounds.row.tolist()):
        reached, until = ahead[:, :, start]
        following = ahead[:, :, start + 1 : start + 2 + longest]
        mass[row] += (share * reached).sum(axis=1)
        first[row] += (share * until).sum(axis=1)
        for end, time in zip(ends, times[row], strict=True):
            for after, values in zip(following, (reached, until + reached * time), strict=True):
                spent = (end * values[:, None]).sum(axis=0) if before > 1 else end[0] * values[0]
                after[0, : len(spent) if alike else 1] += spent[: len(spent) if alike else 1]
                after[before - 1, 1 : 1 if alike else len(spent)] += spent[1 : 1 if alike else len(spent)]
    return Visits(mass, first)


_CELLS = 1_000_000
"""Numbers in arrays by position and pair: a few MB."""


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
        for at in range(0, own.size, size := max(_CELLS // tokens, 1)):
            part = own[at : at + size]
            found[:, part] = _of_lookups(tokens, [known[number] for number in law[part].tolist()], prices, price[part], cut=cut)
    return Moments(*found)


def _of_lookups(tokens: int, laws: Sequence[Lookups], prices: RoundPrices, price: NDArray[np.intp], *, cut: bool) -> Floats:
    """Rows of `Moments` of pairs of laws and prices, one after another."""
    rounds = rounds_of(tokens, laws[0], cut=cut, by_position=not prices.uniform)
    time = prices.time[:, rounds.drafted] if prices.uniform else prices.time[:, 0, rounds.row[:, None], rounds.drafted]
    spent = np.ascontiguousarray(np.moveaxis(time[price], 0, -1))  # (rows, kinds, pairs)
    mass, first = visits(rounds, laws, spent)
    mean, square = (mass * spent).sum(axis=(0, 1)), (spent * (2 * first + spent * mass)).sum(axis=(0, 1))
    worked = np.einsum("rkp,prk->p", mass, prices.operations[:, rounds.drafted][price])
    drafted = np.einsum("rkp,rk->p", mass, rounds.drafted)
    return np.stack([mean, np.maximum(square - mean**2, 0.0), mean, worked, mass.sum(axis=(0, 1)), drafted])


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
