"""Expected rounds of static batches, by the sequences left and the tokens drafted, for several laws at once.

Sequences are independent. In each round, the probability that n sequences are left, none beyond a position and none with room for
more than m drafted tokens, is a product over sequences; for equal sequences it is a term of a binomial law. Its differences are the
probabilities of the longest position and of the largest room, which determine the price of a round. Summed over rounds they are
expected numbers of rounds, which hold for all costs.

Most terms are 0 within rounding: as long as no sequence can have ended all are left, when most have ended few are left, and the
longest of several sequences is not far from the mean. The axis of laws is the first one.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.batching import MOST_ALIKE
from model.methods.rounds.starts_by_round import NEVER, ROUNDS, RoundsLaw, RoundStretch, stretches
from model.outcomes.outcome_laws import Floats

_TOGETHER = 500_000
"""Numbers in products over sequences that are computed together: a few MB."""
_MOST_LAWS = 48
"""Largest number of laws that are evaluated together: more have fewer terms in common that are 0."""
_KEPT = 100_000
"""Largest size of a cached result, in numbers."""


class ExpectedRounds(NamedTuple):
    """Expected rounds of a batch under several laws.

    Parameters
    ----------
    counts
        Of `by_room`: by the sequences left and the tokens drafted per sequence, shape (laws, sequences + 1, K + 1). Of `by_place`:
        shape (laws, 2, sequences + 1, cells), where index 1 of the second axis is for rounds after one in which any sequence
        accepted its whole draft, and the cells are positions of the longest sequence, with the tokens drafted (`cells_of`).
    sequences
        Rounds, summed over the sequences that take part in them; shape (laws,).
    drafted
        Drafted tokens that the sequences can use, in all; shape (laws,).
    """

    counts: Floats
    sequences: Floats
    drafted: Floats


def by_room(laws: Sequence[RoundsLaw], draft_length: int, lengths: Sequence[int]) -> ExpectedRounds:
    """Expected rounds of a batch of sequences of these lengths, by the sequences left and the tokens drafted per sequence.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = by_room([Iid(0.5)], 1, (3, 3))
    >>> found.counts[0].tolist(), found.sequences.tolist()  # both have a first round; in the second, any can draft a token
    ([[0.0, 0.0], [0.375, 0.0], [0.3125, 1.75]], [4.5])
    """
    return _joined(laws_in_blocks(laws, draft_length, lengths, placed=False))


def by_place(laws: Sequence[RoundsLaw], draft_length: int, lengths: Sequence[int]) -> ExpectedRounds:
    """Expected rounds of a batch of sequences of these lengths, also by the position of the longest sequence.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = by_place([Iid(0.5)], 1, (3,))
    >>> found.counts[0, :, 1].tolist(), cells_of(1, (3,)).tolist()  # the third position is reached in three ways
    ([[1.0, 0.0, 0.5, 0.25, 0.0], [0.0, 0.0, 0.0, 0.5, 0.0]], [[0, 1, 1, 2, 2], [1, 0, 1, 0, 1]])
    """
    return _joined(laws_in_blocks(laws, draft_length, lengths, placed=True))


def _joined(parts: Iterator[tuple[slice, ExpectedRounds]]) -> ExpectedRounds:
    return ExpectedRounds(*(np.concatenate(column) for column in zip(*(part for _, part in parts), strict=True)))


def cells_of(draft_length: int, lengths: Sequence[int]) -> NDArray[np.int64]:
    """Position of the longest sequence, and drafted tokens, of each cell of `by_place`; shape (2, cells).

    Below the position from which the shortest sequence cannot use a whole draft, all rounds draft `draft_length` tokens.
    """
    low = _first_cut(draft_length, lengths)
    late = np.arange(low, max(lengths))
    positions = np.concatenate([np.arange(low), np.repeat(late, draft_length + 1)])
    return np.stack([positions, np.concatenate([np.full(low, draft_length), np.tile(np.arange(draft_length + 1), late.size)])])


def _first_cut(draft_length: int, lengths: Sequence[int]) -> int:
    return max(min(lengths) - 1 - draft_length, 0)


def laws_in_blocks(
    laws: Sequence[RoundsLaw], draft_length: int, lengths: Sequence[int], *, placed: bool
) -> Iterator[tuple[slice, ExpectedRounds]]:
    """`by_place`, or `by_room`, of a few laws after another with their places among all laws, so that little is in memory."""
    lengths = tuple(sorted(lengths))
    cells = 2 * cells_of(draft_length, lengths).shape[1] if placed else draft_length + 1
    for part in _blocks(len(laws), lengths, ROUNDS * cells if placed else max(lengths) * cells):
        some = tuple(laws[part])
        small = len(some) * (len(lengths) + 1) * cells <= _KEPT
        yield part, (_kept if small else _rounds)(some, draft_length, lengths, placed)


def _rounds(laws: tuple[RoundsLaw, ...], draft_length: int, lengths: tuple[int, ...], placed: bool) -> ExpectedRounds:
    return (_by_place if placed else _by_room)(laws, draft_length, lengths)


_kept = lru_cache(maxsize=32)(_rounds)
"""The same rounds are priced several times: with the costs, without overheads, and at the ends of their uncertainty."""


def _blocks(laws: int, lengths: tuple[int, ...], numbers: int) -> Iterator[slice]:
    """Places of laws that are evaluated together, each with about as many numbers for each group of equal sequences."""
    size = min(max(_TOGETHER // (numbers * (1 if lengths[0] == lengths[-1] else len(lengths) + 1)), 1), _MOST_LAWS)
    return (slice(at, at + size) for at in range(0, laws, size))


class BatchWork(NamedTuple):
    """Expected totals over the rounds of a batch, by law; arrays of shape (laws,)."""

    rounds: Floats
    drafts: Floats
    """Tokens drafted per sequence."""
    verified: Floats
    """Verified tokens of all sequences that are left."""
    drafted: Floats
    """Drafted tokens of all sequences that are left, with those that they cannot use."""


def work_of(laws: Sequence[RoundsLaw], draft_length: int, lengths: Sequence[int]) -> BatchWork:
    """Expected totals over the rounds of a batch of sequences of these lengths, without the distribution of those left.

    >>> from model.outcomes.outcome_laws import Iid
    >>> [each.tolist() for each in work_of([Iid(0.5)], 1, (3, 3))]  # as follows from `by_room`
    [[2.4375], [1.75], [8.0], [3.5]]
    """
    alike, found = Counter(sorted(lengths)), []
    for part in _blocks(len(laws), tuple(alike), max(lengths) * (draft_length + 1)):
        rooms = _sequences(tuple(laws[part]), draft_length, tuple(alike)).rooms
        within: Any = 1.0
        all_ended: Any = 1.0
        left: Any = 0.0
        for room, count in zip(rooms, alike.values(), strict=True):
            alone, ended = _up_to_room(room), np.maximum(1 - room[..., :1], 0.0)
            # Probability that it has ended or has no more room than 0, 1, ...; given this for all, how many are left.
            allowed = alone + ended
            left = left + count * np.divide(alone, allowed, out=np.zeros_like(alone), where=allowed > 0)
            within, all_ended = within * raised(allowed, count), all_ended * raised(ended, count)
        drafting = np.arange(draft_length + 1.0)
        rounds, sequences = (np.diff(each, axis=-1, prepend=0.0).sum(axis=1) for each in (within - all_ended, left * within))
        own = rounds.sum(axis=1), rounds @ drafting, sequences @ (drafting + 1), sequences @ drafting
        found.append(own)
    return BatchWork(*(np.concatenate(column) for column in zip(*found, strict=True)))


class _Sequences:
    """Sequences of some lengths under some laws; what is kept of their rounds is small, and holds for all numbers of sequences."""

    def __init__(self, laws: tuple[RoundsLaw, ...], draft_length: int, lengths: tuple[int, ...]) -> None:
        self._laws, self._draft_length, self._lengths = laws, draft_length, lengths
        # A sequence can use m tokens in a round that starts m positions before the last one, or earlier.
        self._starts = [length - 1 - np.arange(draft_length + 1) for length in lengths]
        self._rooms: list[Floats] | None = None

    def stretches(self, kinds: int = 2) -> Iterator[tuple[RoundStretch, list[Floats]]]:
        """Stretches of rounds, with `rooms` of each."""
        found = []
        for stretch in stretches(self._laws, self._draft_length, max(self._lengths), kinds=kinds):
            found.append([stretch.at(starts)[:, -1] for starts in self._starts])
            yield stretch, found[-1]
        self._rooms = [np.concatenate(rooms, axis=1) for rooms in zip(*found, strict=True)]

    @property
    def rooms(self) -> list[Floats]:
        """Probability that a sequence of each length has a round and can use at least 0, 1, ... drafted tokens in it.

        Arrays of shape (laws, rounds, draft_length + 1).
        """
        if self._rooms is None:
            for _ in self.stretches(kinds=1):
                pass
        assert self._rooms is not None
        return self._rooms


_sequences = lru_cache(maxsize=64)(_Sequences)


def _up_to_room(room: Floats) -> Floats:
    """Probability that a sequence has a round and can use at most 0, 1, ... drafted tokens, from `_Sequences.rooms`."""
    found = np.repeat(room[..., :1], room.shape[-1], axis=-1)
    found[..., :-1] = np.maximum(found[..., :-1] - room[..., 1:], 0.0)
    return found


def _of_each(rooms: Sequence[Floats], counts: Iterable[int]) -> tuple[Floats, Floats]:
    """Rounds and drafted tokens of all sequences, of which there are several of each length."""
    total = np.sum([count * room.sum(axis=1) for count, room in zip(counts, rooms, strict=True)], axis=0)
    return total[:, 0], total[:, 1:].sum(axis=1)


def _by_room(laws: tuple[RoundsLaw, ...], draft_length: int, lengths: tuple[int, ...]) -> ExpectedRounds:
    alike = Counter(lengths)
    rooms = _sequences(laws, draft_length, tuple(alike)).rooms
    fewest, found = remaining([
        AlikeSequences(count, room[..., 0], _up_to_room(room)[:, None]) for room, count in zip(rooms, alike.values(), strict=True)
    ])  # fmt: skip
    counts = np.zeros((len(laws), len(lengths) + 1, draft_length + 1))
    counts[:, fewest : fewest + len(found)] = np.diff(found[:, :, 0], axis=-1, prepend=0.0).swapaxes(0, 1)
    return ExpectedRounds(counts, *_of_each(rooms, alike.values()))


def _by_place(laws: tuple[RoundsLaw, ...], draft_length: int, lengths: tuple[int, ...]) -> ExpectedRounds:
    alike, tokens, cut = Counter(lengths), max(lengths), _first_cut(draft_length, lengths)
    end = tokens + (tokens - cut) * draft_length
    sums = np.zeros((len(lengths) + 1, len(laws), 2, end))
    sequences = _sequences(laws, draft_length, tuple(alike))
    for stretch, rooms in sequences.stretches():
        cells = slice(min(stretch.low, cut), stretch.stop if stretch.stop <= cut else end)  # before `cut` drafts are whole
        groups = [
            AlikeSequences(count, room[..., 0], _up_to_place(stretch, draft_length, length, cut, cells, tokens))
            for room, (length, count) in zip(rooms, alike.items(), strict=True)
        ]
        fewest, found = remaining(groups)
        numbers = slice(fewest, fewest + len(found))
        sums[numbers, ..., cells] += found
        if cells.stop < tokens:
            sums[numbers, ..., cells.stop : tokens] += found[..., -1:]
    return ExpectedRounds(_of_cells(np.moveaxis(sums, 0, 2), draft_length, cut, tokens), *_of_each(sequences.rooms, alike.values()))


def by_place_of_sizes(laws: Sequence[RoundsLaw], draft_length: int, sizes: tuple[int, ...], tokens: int) -> list[ExpectedRounds]:
    """`by_place` of batches of each of these sizes, which rise to at most `MOST_ALIKE`, of sequences of `tokens` tokens.

    Powers of probabilities of one sequence are those of batches of any size.

    >>> from model.outcomes.outcome_laws import Iid
    >>> [each.sequences.tolist() for each in by_place_of_sizes([Iid(0.5)], 1, (2, 4), 3)]
    [[4.5], [9.0]]
    """
    cut = _first_cut(draft_length, (tokens,))
    end = tokens + (tokens - cut) * draft_length
    sums = np.zeros((sizes[-1] + 1, len(laws), 2, len(sizes), end))
    sequences = _sequences(tuple(laws), draft_length, (tokens,))
    for stretch, (room,) in sequences.stretches():
        cells = slice(min(stretch.low, cut), stretch.stop if stretch.stop <= cut else end)
        alone = _up_to_place(stretch, draft_length, tokens, cut, cells, tokens)
        weights, likely = weights_of_sizes(room[..., 0], sizes)
        numbers = np.flatnonzero(likely.any(axis=1))
        fewest = max(int(numbers[0]), 1)
        power = raised(alone, fewest)
        for number in range(fewest, int(numbers[-1]) + 1):
            if number > fewest:
                power = np.multiply(power, alone, out=None if power is alone else power)
            of = np.flatnonzero(likely[number])
            if not of.size:
                continue
            some = slice(int(of[0]), int(of[-1]) + 1)
            found = weights[number, :, None, some] @ power
            sums[number, :, :, some, cells] += found
            if cells.stop < tokens:
                sums[number, :, :, some, cells.stop : tokens] += found[..., -1:]
    each = (np.moveaxis(sums[: size + 1, :, :, index], 0, 2) for index, size in enumerate(sizes))
    return [
        ExpectedRounds(_of_cells(own, draft_length, cut, tokens), *_of_each(sequences.rooms, [size]))
        for own, size in zip(each, sizes, strict=True)
    ]


def weights_of_sizes(left: Floats, sizes: tuple[int, ...]) -> tuple[Floats, NDArray[np.bool_]]:
    """Of each number n of sequences left and each size: in how many ways the others have ended, times the probability of each.

    `left` is the probability that a sequence has not ended, shape (laws, rounds). Also where that is not 0 within rounding. Arrays
    of shape (largest size + 1, laws, sizes, rounds) and (largest size + 1, sizes).
    """
    gone, here = np.swapaxes(all_powers(np.stack([np.maximum(1 - left, 0.0), left]), sizes[-1]), 0, 1)
    ended = np.array(sizes) - np.arange(sizes[-1] + 1)[:, None]
    weights = (_ways(sizes)[..., None, None] * gone[np.maximum(ended, 0)]).swapaxes(1, 2)
    return weights, (weights * here[:, :, None]).max(axis=(1, 3)) >= NEVER


@lru_cache(maxsize=8)
def _ways(sizes: tuple[int, ...]) -> Floats:
    """Ways to choose n of each number of sequences, 0 of fewer; shape (largest size + 1, sizes)."""
    return np.array([[math.comb(size, number) for size in sizes] for number in range(sizes[-1] + 1)], dtype=np.float64)


class AlikeSequences(NamedTuple):
    """Equal sequences in several rounds.

    Parameters
    ----------
    size
        Their number.
    left
        Probability that one has not ended, shape (laws, rounds).
    alone
        Probability that one has not ended and is not beyond a cell, shape (laws, kinds, rounds, cells).
    """

    size: int
    left: Floats
    alone: Floats


def remaining(groups: Sequence[AlikeSequences]) -> tuple[int, Floats]:
    """Expected rounds in which n sequences are left, none of them beyond a cell, summed over rounds.

    The smallest n above 0 whose rounds are not 0 within rounding, and an array of shape (numbers from n on, laws, kinds, cells).
    """
    each = [group._replace(size=size) for group in groups for size in _parts(group.size)]
    fewest, weights, powers = _powers(each[0])
    if len(each) == 1:
        found = np.empty((len(weights), *each[0].alone.shape[:2], 1, each[0].alone.shape[-1]))
        for weight, power, out in zip(weights, powers, found, strict=True):
            np.matmul(weight, power, out=out)
        found = found[..., 0, :]
    else:
        several = [weight.swapaxes(-1, -2) * power for weight, power in zip(weights, powers, strict=True)]
        for group in each[1:]:
            least, weights, powers = _powers(group)
            fewest += least
            several = _convolved(several, weights, powers)
        found = np.stack([chance.sum(axis=2) for chance in several])
    return (fewest, found) if fewest else (1, found[1:])


def _parts(count: int) -> list[int]:
    """Split `count` sequences into groups of at most `MOST_ALIKE`."""
    return [MOST_ALIKE] * (count // MOST_ALIKE) + [count % MOST_ALIKE] * (count % MOST_ALIKE > 0)


def _powers(group: AlikeSequences) -> tuple[int, Floats, Iterator[Floats]]:
    """Two factors, for each number n of its sequences, whose product is the probability that n are left and none beyond a cell.

    The smallest n whose probability is not 0 within rounding, and the factors from there on: an array of shape (numbers, laws, 1,
    1, rounds), and arrays of the shape of `alone`, each of which is changed in place to the next one.
    """
    size, left, alone = group
    gone, here = np.swapaxes(all_powers(np.stack([np.maximum(1 - left, 0.0), left]), size), 0, 1)
    weights = binomials(size) * gone[::-1]
    likely = np.flatnonzero((weights * here).max(axis=(1, 2)) >= NEVER)
    fewest, most = int(likely[0]), int(likely[-1])

    def powers() -> Iterator[Floats]:
        power = raised(alone, fewest)
        yield power
        for _ in range(fewest, most):
            power = np.multiply(power, alone, out=None if power is alone else power)
            yield power

    return fewest, weights[fewest : most + 1, :, None, None], powers()


@lru_cache(maxsize=8)
def binomials(count: int) -> Floats:
    """Binomial coefficients, shape (count + 1, 1, 1)."""
    return np.array([math.comb(count, number) for number in range(count + 1)], dtype=np.float64)[:, None, None]


def all_powers(values: Floats, most: int) -> Floats:
    """Powers 0, 1, ..., `most`, along a new first axis."""
    found = np.ones((most + 1, *values.shape))
    found[1:] = values
    return np.cumprod(found, axis=0, out=found)


def raised(values: Floats, exponent: int) -> Floats:
    """A whole power, by squaring: faster than by logarithms. The first one is the array itself."""
    if exponent < 2:
        return values if exponent else np.ones_like(values)
    half = raised(values, exponent // 2)
    found = half * half
    return np.multiply(found, values, out=found) if exponent % 2 else found


def _convolved(found: Sequence[Floats], weights: Floats, powers: Iterator[Floats]) -> list[Floats]:
    """Probabilities of numbers of remaining sequences, with those of another group; arrays of the shape of the groups' `alone`."""
    sums: list[Any] = [0.0] * (len(found) + len(weights) - 1)
    for number, (weight, power) in enumerate(zip(weights, powers, strict=True)):
        there = weight.swapaxes(-1, -2) * power
        for already, chance in enumerate(found, number):
            sums[already] = sums[already] + chance * there
    return sums


def _up_to_place(stretch: RoundStretch, draft_length: int, length: int, cut: int, cells: slice, tokens: int) -> Floats:
    """Probability that a sequence has a round that starts at most at a position, alone and with limited room.

    Shape (laws, 2, rounds, cells); of all cells only those of the slice, and no round starts before them.
    """
    if cells.stop <= cut:
        return stretch.until
    if (cells.start, tokens, length) == (stretch.low, stretch.stop, tokens):
        until = stretch.until
    else:
        until = stretch.at(np.minimum(np.arange(cells.start, tokens), length - 1))
    # Rounds with room for at most 0, 1, ... tokens start at one of the last positions.
    before, places = stretch.at(length - 2 - np.arange(draft_length)), tokens - cells.start
    found = np.empty((*until.shape[:3], places + cells.stop - tokens))
    found[..., :places] = until
    within = found[..., places:].reshape(*until.shape[:3], tokens - cut, draft_length)
    np.subtract(until[..., cut - cells.start :, None], before[..., None, :], out=within)
    np.maximum(within, 0.0, out=within)
    return found


def _of_cells(sums: Floats, draft_length: int, cut: int, tokens: int) -> Floats:
    """Expected rounds by the cells of `cells_of`, from those with none beyond a position, alone and with limited room.

    Shape (laws, 2, sequences + 1, cells).
    """
    early = np.diff(sums[..., :cut], axis=-1, prepend=0.0)
    room = sums[..., tokens:].reshape(*sums.shape[:3], tokens - cut, draft_length)
    late = np.concatenate([room, sums[..., cut:tokens, None]], axis=-1)
    late[..., 1:, :] -= late[..., :-1, :].copy()
    if cut:  # all rounds that start earlier draft whole drafts
        late[..., 0, draft_length] -= sums[..., cut - 1]
    late[..., 1:] -= late[..., :-1].copy()
    chances = np.concatenate([early, late.reshape(*sums.shape[:3], (tokens - cut) * (draft_length + 1))], axis=-1)
    chances[:, 1] -= chances[:, 0]
    return chances
