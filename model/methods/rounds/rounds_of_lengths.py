"""Expected rounds of static batches of equal sequences, for several numbers of tokens and several laws at once.

Where a round starts does not depend on when its sequence ends, except that the last drafts are cut. So the rounds of the longest
sequence serve all lengths: in each of them, the number of sequences of a length that are left is binomial, and the probability that
none of n is beyond a position is a power of that for one. Only rounds that start near the end of a length are evaluated for it:
before, all its sequences are left. `model.methods.rounds.rounds_of_batches` has the rounds of one batch, also of unequal
sequences.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.rounds.rounds_of_batches import all_powers, binomials, raised
from model.methods.rounds.starts_by_round import NEVER, RoundsLaw, RoundStretch, stretches
from model.outcomes.outcome_laws import Floats

Lengths = NDArray[np.int64]

_TOGETHER = 2_000_000
"""Numbers in an array of expected rounds: 16 MB."""
_KEPT = 500_000
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


_kept = lru_cache(maxsize=8)(_rounds)
"""The same rounds are priced at several blocks of costs."""


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


def _add_starts(found: Floats, until: Floats) -> None:
    """Add what is at each position, given what is there or before it."""
    found[..., 0] += until[..., 0]
    found[..., 1:] += until[..., 1:] - until[..., :-1]
