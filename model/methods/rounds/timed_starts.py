"""Time of decodings whose rounds are independent but are priced by their start position: means and mean squares.

The time of a decoding is the sum over start positions s of 1(a round starts at s) t(s), where t may depend on how many tokens the
round before accepted, since the first draft pass of a round may read them. So the mean is a sum of probability x time, and the mean
square that of probability x t(s) (t(s) + 2 E[time before s | a round starts at s]).

Where a round starts, and after which, is as likely for every number of tokens that is larger, because only the last round of a
decoding can accept all of a draft that is cut. So decodings of several lengths share their sums up to the last K positions of each,
whose drafts are cut (`RoundCells`).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.methods.prediction import distinct_pairs, linear, pair_blocks
from model.methods.rounds.prices_of_rounds import RoundCells
from model.outcomes import round_counts
from model.outcomes.outcome_laws import Floats

_TOGETHER = 500
"""Pairs of laws and prices that are computed together, so that their arrays stay in the cache of a processor."""
_POINTS = 2000
"""Points whose last rounds are computed together."""
Index = NDArray[np.intp]


class KnownStarts:
    """Probabilities that rounds start at each position, kept for the laws that were asked for last.

    Those at the first positions do not depend on the number of positions, so that decodings of several lengths share them.
    """

    def __init__(self) -> None:
        self._laws: tuple[int, tuple[int, ...], bytes] | None = None
        self._mass: Floats = np.zeros((0, 0))

    def masses(self, longest: int, tokens: int, survival: Floats) -> Floats:
        """Probability of a start at each position, shape (tokens, laws); drafts have `longest` tokens.

        >>> known = KnownStarts()
        >>> [known.masses(1, tokens, np.array([[0.5]]))[:, 0].tolist() for tokens in (2, 3)]
        [[1.0, 0.5], [1.0, 0.5, 0.75]]
        """
        laws = longest, survival.shape, survival.tobytes()
        if laws != self._laws:
            self._laws, self._mass = laws, np.zeros((0, 0))
        if len(self._mass) < tokens:
            size = max(tokens, 2 * len(self._mass))  # rising lengths are asked for one after another
            self._mass = round_counts.start_masses(round_counts.chain_ends(longest, size, survival))
        return self._mass[:tokens]


class RoundStarts(NamedTuple):
    """Where rounds start under several laws, and by what the round before accepted.

    Parameters
    ----------
    cells
        Rounds that are priced.
    chance
        Probability that a round accepts 0, 1, ..., K tokens, shape (K + 1, laws); beyond the last token it ends the decoding.
    mass
        Probability that a round starts at each position, shape (tokens, laws).
    kinds
        Slices of accepted tokens after which rounds take the same time; the first round is of the first kind.
    by_kind
        Probability that a round starts after one of each kind, shape (kinds, tokens, laws).
    """

    cells: RoundCells
    chance: Floats
    mass: Floats
    kinds: tuple[slice, ...]
    by_kind: Floats

    @classmethod
    def of(
        cls, longest: int, tokens: ArrayLike, survival: Floats, *, cut: bool = True, by_accepted: bool = False,
        known: KnownStarts | None = None,
    ) -> RoundStarts:  # fmt: skip
        """Starts under laws by their `survival`, shape (laws, K); see `round_starts.survival_of`.

        `tokens` is the length of all decodings, or several lengths as of `RoundCells`. The kinds are not all tokens accepted and
        all of at least one, or `by_accepted` each number of accepted tokens. `known` has the starts of other lengths.

        >>> found = RoundStarts.of(1, 3, np.array([[0.5]]))
        >>> found.mass[:, 0].tolist(), found.by_kind[:, :, 0].tolist()
        ([1.0, 0.5, 0.75], [[1.0, 0.5, 0.25], [0.0, 0.0, 0.5]])
        """
        cells = RoundCells.of(longest, tokens, cut)
        most = int(cells.lengths[-1])
        chance = round_counts.chain_ends(longest, longest + 1, survival)[0].chance  # of a round that is not cut
        mass = (known or KnownStarts()).masses(longest, most, survival)
        bounds = [*range(longest + 2)] if by_accepted else [0, *([longest] if longest else []), longest + 1]
        kinds = tuple(slice(*each) for each in itertools.pairwise(bounds))
        by_kind = np.zeros((len(kinds), *mass.shape))
        by_kind[0, 0] = 1.0
        for kind, accepted in ((kind, each) for kind, every in enumerate(kinds) for each in range(every.start, every.stop)):
            by_kind[kind, accepted + 1 :] += chance[accepted] * mass[: max(most - accepted - 1, 0)]
        return cls(cells, chance, mass, kinds, by_kind)

    def times(self, prices: Floats, reading: Floats | None) -> Floats:
        """Times of rounds by kind and cell, of shape (costs, kinds, cells), from those of `RoundPrices.by_start`.

        Those after a completely accepted draft are of the last kind. `reading`, of shape (costs, cells, K + 1), is added.
        """
        if reading is None:
            return prices[:, : len(self.kinds)]
        times = np.repeat(prices[:, :1], len(self.kinds), axis=1)
        times[:, -1] = prices[:, min(len(self.kinds) - 1, 1)]
        return times + np.swapaxes(reading, 1, 2)

    def counts(self, law: Index, length: Index) -> tuple[Floats, Index]:
        """Mean numbers of rounds that draft 0, 1, ..., K tokens under distinct pairs of laws and lengths, and each pair's index.

        The numbers have shape (K + 1, distinct pairs).
        """
        laws, lengths, index = self._decodings(law, length)
        found, drafted = np.zeros((len(self.chance), laws.size)), self.cells.drafted[: self.cells.whole]
        for count in np.unique(drafted).tolist():
            here = np.flatnonzero(drafted == count)
            until = np.clip(self.cells.until[lengths] - here[0], 0, here.size)
            found[count] = _sums_until(self.mass[here[0] : here[-1] + 1], laws, until)
        if self.cells.last:
            found[: self.cells.last] += self._last_masses(laws, lengths).sum(axis=0)[::-1]
        return found, index

    def mean(self, times: Floats, law: Index, price: Index, length: Index | None = None) -> Floats:
        """Mean time of pairs of laws and prices, each of its length; `times` has shape (costs, kinds, cells)."""
        cells, which = self.cells, np.zeros_like(law) if length is None else length
        if cells.lengths.size == 1:
            return linear(self.by_kind.reshape(-1, self.mass.shape[1]), times.reshape(len(times), -1), law, price)
        found, until = np.empty(law.size), cells.until[which]
        for block in pair_blocks(law, price, _TOGETHER):
            whole = self.by_kind[:, : cells.whole, block.law]
            spent = np.einsum("ktp,pkt->tp", whole, times[block.price, :, : cells.whole])
            found[block.points] = _sums_until(spent, block.pair, until[block.points])
        if not cells.last:
            return found
        laws, lengths, decoding = self._decodings(law, which)
        mass, time = self._last_masses(laws, lengths), np.moveaxis(cells.of_last(times), -1, 1)
        events = mass.shape[0] * mass.shape[1]
        priced = price * cells.lengths.size + which
        return found + linear(mass.reshape(events, -1), time.reshape(-1, events), decoding, priced)

    def square(self, times: Floats, law: Index, price: Index, length: Index | None = None) -> Floats:
        """Mean square of the time of pairs of laws and prices, as of `mean`."""
        cells, which = self.cells, np.zeros_like(law) if length is None else length
        found = np.empty(law.size)
        for block in pair_blocks(law, price, _TOGETHER):
            until, square = self._first_rounds(times, block.law, block.price)
            found[block.points] = _sums_until(square, block.pair, cells.until[which[block.points]])
            for begin in range(0, block.points.size if cells.last else 0, _POINTS):
                some = slice(begin, begin + _POINTS)
                points = block.points[some]
                found[points] += self._last_rounds(times, law[points], price[points], which[points], until, block.pair[some])
        return found

    def _decodings(self, law: Index, length: Index) -> tuple[Index, Index, Index]:
        """Distinct pairs of laws and lengths, and the index of each pair; all laws if there is one length."""
        if self.cells.lengths.size == 1:
            laws = np.arange(self.mass.shape[1])
            return laws, np.zeros_like(laws), law
        return distinct_pairs(law, length)

    def _last_masses(self, law: Index, length: Index) -> Floats:
        """Probability of a round's start at the last positions of decodings; shape (kinds, last, decodings)."""
        start = self.cells.last_starts[:, length]
        return np.where(start >= 0, self.by_kind[:, np.maximum(start, 0), law], 0.0)

    def _first_rounds(self, times: Floats, law: Index, price: Index) -> tuple[Floats, Floats]:
        """Mean time until the end of the round from each position, and the terms of the mean square, of pairs.

        Both are of the first cells only. The former is times the probability of a start there, has shape (K + 1 + positions,
        pairs), and is 0 before the first position. The latter has shape (positions, pairs).
        """
        laws, prices = (each[:1] if (each == each[0]).all() else each for each in (law, price))
        size, whole = len(self.chance), self.cells.whole
        chance = np.ascontiguousarray(self.chance[::-1, laws])  # the earliest start of the round before is first
        time = np.ascontiguousarray(np.moveaxis(times[prices, :, :whole], 0, -1))  # (kinds, positions, pairs)
        spent = self.by_kind[:, :whole, laws] * time
        of_round = spent.sum(axis=0)
        until = np.zeros((size + whole, of_round.shape[1]))
        before = np.zeros_like(of_round)  # mean time until the start of a round
        if laws.size == 1 < whole:
            until[size:] = round_counts.followed(of_round, chance[::-1, 0])
            np.subtract(until[size:], of_round, out=before)
        else:
            for start in range(whole):
                np.einsum("ap,ap->p", chance, until[start : start + size], out=before[start])
                np.add(before[start], of_round[start], out=until[start + size])
        return until, self._squares(time, spent, before, chance, [until[start : start + whole] for start in range(size)])

    def _last_rounds(
        self, times: Floats, law: Index, price: Index, length: Index, until: Floats, pair: Index
    ) -> Floats:
        """Terms of the mean square of the last rounds of points, from what precedes them (`_first_rounds`) in each pair."""
        cells, size = self.cells, len(self.chance)
        chance, found = self.chance[::-1, law], np.zeros(law.size)
        time = np.moveaxis(cells.of_last(times)[price, :, :, length], 0, -1)  # (kinds, last, points)
        spent = self._last_masses(law, length) * time
        rows = np.empty((size + cells.last, law.size))
        rows[:size] = until[cells.until[length] + np.arange(size)[:, None], pair]
        for place in range(cells.last):
            own = rows[place : place + size]
            before = np.einsum("ap,ap->p", chance, own)
            found += self._squares(time[:, place], spent[:, place], before, chance, own)
            rows[size + place] = before + spent[:, place].sum(axis=0)
        return found

    def _squares(self, time: Floats, spent: Floats, before: Floats, chance: Floats, rows: Sequence[Floats] | Floats) -> Floats:
        """Terms of the mean square: time x (probability x time + 2 mean time before), by kind.

        `rows` has the mean time until the end of the round K + 1, ..., 1 positions before, which lead to the start with
        probabilities `chance`. All kinds but the first are of one number of accepted tokens.
        """
        found = np.einsum("k...,k...->...", time, spent)
        found += 2 * time[0] * before
        for kind, accepted in enumerate(self.kinds[1:], 1):
            row = len(chance) - 1 - accepted.start
            found += 2 * (time[kind] - time[0]) * chance[row] * rows[row]
        return np.asarray(found)


def _sums_until(values: Floats, column: Index, until: NDArray[np.int64]) -> Floats:
    """Sums of the first `until` rows of columns of `values`.

    >>> _sums_until(np.array([[1.0, 2.0], [4.0, 8.0]]), np.array([0, 1, 1]), np.array([1, 2, 0])).tolist()
    [1.0, 10.0, 0.0]
    """
    if (until == len(values)).all():
        return np.asarray(values.sum(axis=0)[column])
    sums = np.concatenate([np.zeros((1, values.shape[1])), np.cumsum(values, axis=0)])
    return np.asarray(sums[until, column])
