"""Expected rounds of static batches of equal sequences, for several numbers of tokens and several laws at once.

Where a round starts does not depend on when its sequence ends, except that the last drafts are cut. So the rounds of the longest
sequence serve all lengths: in each of them, the number of sequences of a length that are left is binomial, and the probability that
none of n is beyond a position is a power of that for one. Only rounds that start near the end of a length are evaluated for it:
before, all its sequences are left. `model.methods.rounds.rounds_of_batches` has the rounds of one batch, also of unequal
sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.rounds.rounds_of_batches import all_powers, binomials, raised, weights_of_sizes
from model.methods.rounds.starts_by_round import NEVER, ROUNDS, RoundsLaw, RoundStretch, stretches
from model.outcomes.outcome_laws import Floats

Lengths = NDArray[np.int64]

_TOGETHER = 2_000_000
"""Numbers in an array of expected rounds: 16 MB."""
_KEPT = 250_000
"""Largest size of a cached result, in numbers."""
_NEAR = 100_000
"""Numbers in an array of powers: less than a MB, which a processor keeps near."""


class RoundsByLength(NamedTuple):
    """Expected rounds of a batch, for some of the laws and of the lengths.

    Parameters
    ----------
    laws, lengths
        Places among all laws and lengths.
    early
        Rounds with whole drafts, which cannot end a sequence: by the sequences left and the position of the longest sequence, shape
        (laws, lengths, 2, sequences + 1, positions). Index 1 of the third axis is for rounds after one in which any sequence
        accepted its whole draft. None if positions are not asked for: then these rounds are among the `late` ones.
    late
        The other rounds, by the sequences left, the position of the longest sequence, which is one of the last draft_length + 1,
        and the tokens drafted per sequence: shape (laws, lengths, 2, sequences + 1, draft_length + 1, draft_length + 1). Without
        positions (laws, lengths, sequences + 1, draft_length + 1).
    sequences
        Rounds, summed over the sequences that take part in them; shape (laws, lengths).
    drafted
        Drafted tokens that the sequences can use, in all; shape (laws, lengths).
    """

    laws: slice
    lengths: slice
    early: Floats | None
    late: Floats
    sequences: Floats
    drafted: Floats

    @property
    def by_room(self) -> Floats:
        """Rounds by the sequences left and the tokens drafted per sequence, shape (laws, lengths, sequences + 1, draft_length + 1).

        >>> from model.outcomes.outcome_laws import Iid
        >>> of = [Iid(0.5)], 1, 2, np.array([2, 3])
        >>> [[each.by_room[0, 1].tolist() for each in rounds_of_lengths(*of, placed=placed)] for placed in (False, True)]
        [[[[0.0, 0.0], [0.375, 0.0], [0.3125, 1.75]]], [[[0.0, 0.0], [0.375, 0.0], [0.3125, 1.75]]]]
        """
        if self.early is None:
            return self.late
        found = self.late.sum(axis=(2, 4))
        found[..., -1] += self.early.sum(axis=(2, 4))
        return np.asarray(found)


def rounds_of_lengths(
    laws: Sequence[RoundsLaw], draft_length: int, sequences: int, lengths: Lengths, *, placed: bool
) -> Iterator[RoundsByLength]:
    """Expected rounds of batches of equal sequences of each length; lengths rise. By position where `placed`.

    At most `model.methods.batching.MOST_ALIKE` sequences. Rounds come by blocks of laws and lengths, so that little is in memory.

    >>> from model.outcomes.outcome_laws import Iid
    >>> [found] = rounds_of_lengths([Iid(0.5)], 1, 1, np.array([1, 3]), placed=True)
    >>> found.early[0, :, :, 1].tolist()  # a single token is not drafted; the first of three positions has a whole draft
    [[[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]], [[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]]]
    >>> found.late[0, 1, :, 1].tolist()  # the second position has one, too, the third has none
    [[[0.0, 0.5], [0.25, 0.0]], [[0.0, 0.0], [0.5, 0.0]]]
    """
    rooms = draft_length + 1
    cells = 2 * (sequences + 1) * (int(lengths[-1]) + rooms**2) if placed else (sequences + 1) * rooms
    size = max(_TOGETHER // cells, 1)
    together = max(size // lengths.size, 1)
    for first, start in itertools.product(range(0, len(laws), together), range(0, lengths.size, size)):
        part, some = slice(first, min(first + together, len(laws))), slice(start, min(start + size, lengths.size))
        numbers = cells * (part.stop - part.start) * (some.stop - some.start)
        rounds = _kept if numbers <= _KEPT else _rounds
        yield RoundsByLength(part, some, *rounds(tuple(laws[part]), draft_length, sequences, tuple(lengths[some].tolist()), placed))


def _rounds(
    laws: tuple[RoundsLaw, ...], draft_length: int, sequences: int, lengths: tuple[int, ...], placed: bool
) -> tuple[Floats | None, Floats, Floats, Floats]:
    """`early`, `late`, `sequences` and `drafted` of `RoundsByLength`."""
    rounds = [*stretches(laws, draft_length, lengths[-1], kinds=2 if placed else 1)]
    of = _Batches(draft_length, sequences, np.array(lengths), len(laws))
    return *(of.by_place(rounds) if placed else (None, of.by_room(rounds))), *of.totals(rounds)


_kept = lru_cache(maxsize=32)(_rounds)
"""The same rounds are priced at several blocks of costs."""


class PricesByLength(NamedTuple):
    """Prices of rounds at a few costs, by the sequences left.

    The axis of size 2 is that of `RoundsByLength`: index 1 is for rounds after one in which any sequence accepted its whole draft.

    Parameters
    ----------
    whole
        Of rounds with whole drafts, by the position of the longest sequence; shape (costs, 2, sequences + 1, positions).
    last
        Of rounds at the last draft_length + 1 positions of each length, by the tokens drafted per sequence; shape (costs, 2,
        sequences + 1, lengths, draft_length + 1, draft_length + 1).
    """

    whole: Floats
    last: Floats


def totals_of_lengths(
    laws: Sequence[RoundsLaw], draft_length: int, sizes: tuple[int, ...], lengths: Lengths, prices: PricesByLength
) -> Floats:
    """Expected total of the prices of all rounds of batches of each size and length; both rise.

    Shape (sizes, laws, lengths, costs). At most `model.methods.batching.MOST_ALIKE` sequences. Sums over positions are made before
    those over rounds, which takes less than to find the expected rounds by position, where costs are few.

    >>> from model.outcomes.outcome_laws import Iid
    >>> ones = PricesByLength(np.ones((1, 2, 3, 3)), np.ones((1, 2, 3, 2, 2, 2)))
    >>> totals_of_lengths([Iid(0.5)], 1, (1, 2), np.array([2, 3]), ones)[:, 0, :, 0].tolist()  # rounds, as of `RoundsByLength`
    [[1.5, 2.25], [1.75, 2.4375]]
    """
    together, rooms = max(_NEAR // (2 * ROUNDS * min(int(lengths[-1]), ROUNDS * (draft_length + 1))), 1), draft_length + 1
    # Rounds of the first kind are counted among all rounds, at the price of the second: they add the difference of both prices.
    whole, last = (np.stack([each[:, 0] - each[:, 1], each[:, 1]], axis=1) for each in prices)
    # Rounds with some room at a place are those with at most this room up to there, without those with less or before.
    last[..., :-1] -= last[..., 1:].copy()
    steps = np.zeros((*last.shape[:4], rooms + 1, rooms))
    steps[..., 1:, :] = last
    steps[..., :-1, :] -= last
    found = []
    for first in range(0, len(laws), together):
        some = tuple(laws[first : first + together])
        of = _Batches(draft_length, sizes[-1], lengths, len(some))
        found.append(of.totals_of_prices(stretches(some, draft_length, int(lengths[-1]), kinds=2), sizes, whole, steps))
    return np.concatenate(found, axis=1)


class _Batches:
    """Batches of equal sequences of several lengths, under some laws."""

    def __init__(self, draft_length: int, sequences: int, lengths: Lengths, laws: int) -> None:
        self._room, self._sequences, self._lengths, self._laws = draft_length, sequences, lengths, laws
        self._cut = np.maximum(lengths - 1 - draft_length, 0)  # from here on drafts are cut
        self._shape = laws, lengths.size

    def by_place(self, rounds: Sequence[RoundStretch]) -> tuple[Floats, Floats]:
        """`early` and `late` of `RoundsByLength`."""
        rooms, positions = self._room + 1, np.arange(int(self._lengths[-1]))
        early = np.zeros((self._sequences + 1, *self._shape, 2, positions.size))
        # Up to a position, and with room for at most 0, 1, ... tokens; the first position is the last one of whole drafts.
        late = np.zeros((self._sequences + 1, *self._shape, 2, rooms + 1, rooms))
        places = self._lengths[:, None] - 1 - rooms + np.arange(rooms + 1)
        for stretch in rounds:
            near, before_end = self._near(stretch)
            here = slice(stretch.low, min(stretch.stop, positions.size))
            if before_end.start < before_end.stop:
                _add_starts(early[-1, :, before_end, :, here], (stretch.until**self._sequences).sum(axis=2)[:, None])
            if near.start == near.stop:
                continue
            until = np.ascontiguousarray(stretch.until.swapaxes(1, 2))  # (laws, rounds, 2, positions)
            # (laws, rounds, lengths, 2, places, draft_length + 1)
            alone = np.ascontiguousarray(np.moveaxis(self._alone(stretch, near, places[near]), 1, 3))
            parts, weights = self._left(stretch, near, max(until[0].size, alone[0].size))
            powers = zip(parts, _powers(until, parts), _powers(alone, parts), strict=True)
            for numbers, each, of_alone in powers:
                ways = weights[numbers]
                found = ways.swapaxes(-1, -2) @ each.reshape(*each.shape[:3], -1)
                found = found.reshape(*found.shape[:-1], *until.shape[2:])  # (numbers, laws, lengths, 2, positions)
                _add_starts(early[numbers, :, near, :, here], found[..., : here.stop - here.start])
                late[numbers, :, near] += np.einsum("nlra,nlrakpm->nlakpm", ways, of_alone)
        early *= positions < self._cut[:, None, None]
        late = np.diff(np.diff(late, axis=-2), axis=-1, prepend=0.0)
        for found in (early, late):
            found[:, :, :, 1] -= found[:, :, :, 0]
        return np.moveaxis(early, 0, 3), np.moveaxis(late, 0, 3)

    def totals_of_prices(
        self, rounds: Iterable[RoundStretch], sizes: tuple[int, ...], whole: Floats, last: Floats
    ) -> Floats:  # fmt: skip
        """`totals_of_lengths` of some laws; `last` has prices of rounds that start at a place or before it (`_steps`)."""
        rooms, costs = self._room + 1, len(whole)
        found = np.zeros((len(sizes), *self._shape, costs))
        places = self._lengths[:, None] - 1 - rooms + np.arange(rooms + 1)
        by_number = last.transpose(2, 3, 1, 4, 5, 0).reshape(last.shape[2], self._lengths.size, -1, costs)
        for stretch in rounds:
            near, before_end = self._near(stretch)
            here = np.arange(stretch.low, min(stretch.stop, int(self._lengths[-1])))
            until = np.ascontiguousarray(stretch.until[..., : here.size].swapaxes(1, 2))  # (laws, rounds, 2, positions)
            price = whole[..., here]  # (costs, 2, numbers, positions)
            if before_end.start < before_end.stop:
                steps = _steps(price)
                for index, power in enumerate(_powers_of(until, sizes)):
                    of_size = power.sum(axis=1).reshape(self._laws, -1) @ steps[:, :, sizes[index]].reshape(costs, -1).T
                    found[index, :, before_end] += of_size[:, None]
            if near.start == near.stop:
                continue
            # (lengths, laws x rounds, places)
            alone = self._alone(stretch, near, places[near]).transpose(3, 0, 2, 1, 4, 5)
            alone = alone.reshape(len(alone), self._laws * until.shape[1], -1)
            left = stretch.at(self._lengths[near] - 1)[:, -1]
            weights, likely = weights_of_sizes(left.reshape(self._laws, -1), sizes)
            weights = weights.reshape(*weights.shape[:3], *left.shape[1:])  # (numbers, laws, sizes, rounds, lengths)
            uncut = here < self._cut[near, None]
            numbers = np.flatnonzero(likely.any(axis=1))
            numbers = numbers[numbers > 0].tolist()
            for number, each, of_alone in zip(numbers, _powers_of(until, numbers), _powers_of(alone, numbers), strict=True):
                of = np.flatnonzero(likely[number])
                some = slice(int(of[0]), int(of[-1]) + 1)
                steps = _steps(price[:, :, number, None] * uncut).transpose(1, 3, 2, 0)  # (2, positions, lengths, costs)
                total = each.reshape(self._laws * until.shape[1], -1) @ steps.reshape(2 * here.size, -1)
                total = total.reshape(*left.shape, costs)
                late = of_alone @ by_number[number, near]  # (lengths, laws x rounds, costs)
                total += np.moveaxis(late, 0, 1).reshape(total.shape)
                found[some, :, near] += np.einsum("lnra,lrac->nlac", weights[number, :, some], total)
        return found

    def by_room(self, rounds: Sequence[RoundStretch]) -> Floats:
        """`late` of `RoundsByLength` without positions."""
        found = np.zeros((self._sequences + 1, *self._shape, self._room + 1))
        for stretch in rounds:
            near, before_end = self._near(stretch)
            found[-1, :, before_end, -1] += stretch.until.shape[2]  # they are certain there
            if near.start == near.stop:
                continue
            alone = self._alone(stretch, near, self._lengths[near, None] - 1)[:, 0, ..., 0, :]
            parts, weights = self._left(stretch, near, alone[0].size)
            for numbers, each in zip(parts, _powers(alone, parts), strict=True):
                found[numbers, :, near] += np.einsum("nlra,nlram->nlam", weights[numbers], each)
        return np.moveaxis(np.diff(found, axis=-1, prepend=0.0), 0, 2)

    def totals(self, rounds: Sequence[RoundStretch]) -> tuple[Floats, Floats]:
        """`sequences` and `drafted` of `RoundsByLength`."""
        until = np.zeros((self._laws, int(self._lengths[-1])))
        for stretch in rounds:
            each = stretch.until[:, -1].sum(axis=1)
            until[:, stretch.low : stretch.stop] += each[:, : until.shape[1] - stretch.low]
            until[:, stretch.stop :] += each[:, -1:]
        starts = self._lengths[:, None] - 1 - np.arange(self._room + 1)
        of_room = np.where(starts >= 0, until[:, np.maximum(starts, 0)], 0.0)
        return self._sequences * of_room[..., 0], self._sequences * of_room[..., 1:].sum(axis=-1)

    def _near(self, stretch: RoundStretch) -> tuple[slice, slice]:
        """Lengths whose sequences may end in these rounds, and longer ones, all of whose sequences have these rounds."""
        reached = int(np.searchsorted(self._lengths - 1, stretch.low))
        beyond = int(np.searchsorted(self._cut, stretch.stop))
        return slice(reached, beyond), slice(beyond, self._lengths.size)

    def _alone(self, stretch: RoundStretch, near: slice, places: Lengths) -> Floats:
        """Probability that a sequence of a length has a round, at most at a place and with limited room.

        `places` have shape (lengths, places). Shape (laws, kinds, rounds, lengths, places, draft_length + 1).
        """
        until = stretch.at(places)[..., None]
        ends = stretch.at(self._lengths[near, None] - 2 - np.arange(self._room))[..., None, :]
        return np.concatenate([np.maximum(until - ends, 0.0), until], axis=-1)

    def _left(self, stretch: RoundStretch, near: slice, size: int) -> tuple[list[slice], Floats]:
        """How many sequences may be left, above 0, and the weight of each number of them.

        A weight is the number of ways to choose the sequences that have ended, times the probability that these have; shape
        (sequences + 1, laws, rounds, lengths). Numbers come in ranges, which are short if arrays with `size` values for each number
        and law would be large.
        """
        left = stretch.at(self._lengths[near] - 1)[:, -1]
        gone, here = np.swapaxes(all_powers(np.stack([np.maximum(1 - left, 0.0), left]), self._sequences), 0, 1)
        weights = binomials(self._sequences)[..., None] * gone[::-1]
        likely = np.flatnonzero((weights * here).max(axis=(1, 2, 3)) >= NEVER)
        first, stop, few = max(int(likely[0]), 1), int(likely[-1]) + 1, max(_NEAR // (size * self._laws), 1)
        return [slice(at, min(at + few, stop)) for at in range(first, stop, few)], weights


def _powers(values: Floats, parts: Sequence[slice]) -> Iterator[Floats]:
    """Powers of the values with rising exponents, stretch by stretch, along a new first axis."""
    power: Floats | None = None
    for part in parts:
        found = np.empty((part.stop - part.start, *values.shape))
        for out in found:
            if power is None:
                out[...] = raised(values, part.start)
            else:
                np.multiply(power, values, out=out)
            power = out
        yield found


def _powers_of(values: Floats, exponents: Sequence[int]) -> Iterator[Floats]:
    """Powers of the values, each of which is changed in place to the next one; exponents rise, from 1 on."""
    power, before = np.ones_like(values), 0
    for exponent in exponents:
        power *= raised(values, exponent - before)
        before = exponent
        yield power


def _steps(prices: Floats) -> Floats:
    """Prices of rounds that start at a position or before it, from those of rounds that start at it."""
    found = prices.copy()
    found[..., :-1] -= prices[..., 1:]
    return found


def _add_starts(found: Floats, until: Floats) -> None:
    """Add what is at each position, given what is there or before it."""
    found[..., 0] += until[..., 0]
    found[..., 1:] += until[..., 1:] - until[..., :-1]
