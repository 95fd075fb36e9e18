"""Expected rounds of static batches, by the sequences left and the tokens drafted, for several laws at once.

Sequences are independent. In each round, the probability that n sequences are left, none beyond a position and none with room for
more than m drafted tokens, is a product over sequences; for equal sequences it is a term of a binomial law. Its differences are the
probabilities of the longest position and of the largest room, which determine the price of a round. Summed over rounds they are
expected numbers of rounds, which hold for all costs.

The axis of laws is the first one, so that the longest axis is contiguous.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.rounds.round_laws import Rounds
from model.methods.rounds.round_starts import RoundSteps, survival_of
from model.outcomes.outcome_laws import Chain

Floats = NDArray[np.float64]
RoundsLaw = Chain | Rounds

_TABLE = 500_000
"""Numbers in a table of start positions that is computed for several laws together."""
_TOGETHER = 500_000
"""Numbers in products over sequences that are computed together: a few MB, divided into stretches."""
_KEPT = 32_000
"""Largest size of a cached result, in numbers."""
_NEVER = 1e-25
"""Probability of a round that changes no sum over rounds, whose first one is certain, beyond rounding."""
_MOST_ALIKE = 500
"""Largest group of equal sequences; larger ones overflow binomial coefficients."""
_STRETCHES = 4
"""Parts into which rounds are divided: the r-th round starts at position r - 1 at the earliest, so later parts have fewer cells."""


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


class PlacesOfRounds(NamedTuple):
    """Probabilities that a sequence has an r-th round and where it starts; arrays of shape (rounds, laws, positions).

    `after_full_draft` is the part of `mass` that follows a completely accepted draft. Rounds that are less likely than `_NEVER`
    under all laws are left out.
    """

    mass: Floats
    after_full_draft: Floats


def places_of_rounds(laws: Sequence[RoundsLaw], draft_length: int, tokens: int) -> PlacesOfRounds:
    """Where the rounds of a sequence of `tokens` tokens start; up to any earlier position also those of a shorter sequence.

    >>> from model.outcomes.outcome_laws import Iid
    >>> places_of_rounds([Iid(0.5)], 1, 3).mass[:, 0].tolist()
    [[1.0, 0.0, 0.0], [0.0, 0.5, 0.5], [0.0, 0.0, 0.25]]
    """
    mass = _starts_by_round(laws, draft_length, tokens)
    if mass is None:
        return _places_of_dependent(laws, draft_length, tokens)
    mass = np.ascontiguousarray(mass)
    after = np.zeros_like(mass)
    if draft_length:
        ends = survival_of(laws, draft_length)
        assert ends is not None
        after[1:, :, draft_length + 1 :] = mass[:-1, :, : -draft_length - 1] * ends[:, -1:]
    return PlacesOfRounds(mass, after)


def _starts_by_round(laws: Sequence[RoundsLaw], draft_length: int, tokens: int) -> Floats | None:
    """Probability that each round of a sequence starts at each position, shape (rounds, laws, positions).

    None if outcomes depend on each other or on the position.
    """
    known = survival_of(laws, draft_length)
    if known is None:
        return None
    # The last drafts are cut, which does not matter before the end: what they accept ends the sequence.
    bounds = np.zeros((draft_length + 2, len(laws)))
    bounds[0], bounds[1:-1] = 1.0, known.T
    ends = (bounds[:-1] - bounds[1:])[::-1]  # the round before that starts first is first
    state = np.zeros((draft_length + 1 + tokens, tokens, len(laws)))  # by position, after those before the first one, and round
    state[draft_length + 1, 0] = 1.0
    for at in range(1, tokens):
        first = -(-at // (draft_length + 1))  # as many rounds are before, and at most `at`
        before = state[at : at + draft_length + 1, first - 1 : at]
        np.einsum("al,arl->rl", ends, before, out=state[at + draft_length + 1, first : at + 1])
    mass = state[draft_length + 1 :]
    rounds = int(np.flatnonzero(mass.sum(axis=0).max(axis=-1) >= _NEVER)[-1]) + 1
    return mass[:, :rounds].transpose(1, 2, 0)


def _places_of_dependent(laws: Sequence[RoundsLaw], draft_length: int, tokens: int) -> PlacesOfRounds:
    """`places_of_rounds` where outcomes depend on each other or on the position."""
    steps = RoundSteps([(draft_length, tokens, law) for law in laws])
    ends, goes_on = (None if each is None else np.moveaxis(each, -1, 0) for each in (steps.ends, steps.goes_on))
    assert ends is not None
    mass, after = np.zeros((2, tokens, len(laws), tokens))
    state = np.zeros((len(laws), tokens, 2))  # by position and the outcome before it
    state[:, 0, 0] = 1.0
    for number in range(tokens):
        mass[number] = state.sum(axis=2)
        following = np.zeros_like(state)
        for accepted in range(min(draft_length + 1, tokens - 1)):
            for outcome, chance in enumerate((ends,) if goes_on is None else (ends, goes_on)):
                here = state[:, : -accepted - 1, : ends.shape[2]]
                more = np.einsum("lsb,lsb->ls", here, chance[:, : -accepted - 1, :, accepted])
                following[:, accepted + 1 :, outcome] += more
                if draft_length and accepted == draft_length and number + 1 < tokens:
                    after[number + 1, :, accepted + 1 :] += more
        state = following
    return PlacesOfRounds(mass, after)


def by_room(laws: Sequence[RoundsLaw], draft_length: int, lengths: Sequence[int]) -> ExpectedRounds:
    """Expected rounds of a batch of sequences of these lengths, by the sequences left and the tokens drafted per sequence.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = by_room([Iid(0.5)], 1, (3, 3))
    >>> found.counts[0].tolist(), found.sequences.tolist()  # both have a first round; in the second, any can draft a token
    ([[0.0, 0.0], [0.375, 0.0], [0.3125, 1.75]], [4.5])
    """
    return _in_blocks(laws, draft_length, tuple(sorted(lengths)), placed=False)


def by_place(laws: Sequence[RoundsLaw], draft_length: int, lengths: Sequence[int]) -> ExpectedRounds:
    """Expected rounds of a batch of sequences of these lengths, also by the position of the longest sequence.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = by_place([Iid(0.5)], 1, (3,))
    >>> found.counts[0, :, 1].tolist(), cells_of(1, (3,)).tolist()  # the third position is reached in three ways
    ([[1.0, 0.0, 0.5, 0.25, 0.0], [0.0, 0.0, 0.0, 0.5, 0.0]], [[0, 1, 1, 2, 2], [1, 0, 1, 0, 1]])
    """
    return _in_blocks(laws, draft_length, tuple(sorted(lengths)), placed=True)


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


def _in_blocks(laws: Sequence[RoundsLaw], draft_length: int, lengths: tuple[int, ...], *, placed: bool) -> ExpectedRounds:
    tokens = max(lengths)
    each = (len(lengths) + 1) * (2 * cells_of(draft_length, lengths).shape[1] if placed else draft_length + 1)
    size = max(min(_TABLE // tokens**2, _KEPT // each), 1)
    parts = [tuple(laws[at : at + size]) for at in range(0, len(laws), size)]
    found = [(_kept if each <= _KEPT else _rounds)(part, draft_length, lengths, placed) for part in parts]
    return found[0] if len(found) == 1 else ExpectedRounds(*(np.concatenate(column) for column in zip(*found, strict=True)))


def _rounds(laws: tuple[RoundsLaw, ...], draft_length: int, lengths: tuple[int, ...], placed: bool) -> ExpectedRounds:
    alike, places = Counter(lengths), None
    if placed:
        places = places_of_rounds(laws, draft_length, max(lengths))
        rooms = {length: room_chances(places.mass, draft_length, length) for length in alike}
    else:
        rooms = _rooms(laws, draft_length, tuple(alike))
    count = [of * rooms[length].sum(axis=1) for length, of in alike.items()]
    sequences = np.sum([each.sum(axis=1) for each in count], axis=0)
    drafted = np.sum([each @ np.arange(draft_length + 1.0) for each in count], axis=0)
    ended = {length: np.maximum(1 - room.sum(axis=2), 0.0) for length, room in rooms.items()}
    if places is not None:
        return ExpectedRounds(_placed(places, ended, draft_length, lengths), sequences, drafted)
    groups = [(ended[length], np.cumsum(rooms[length], axis=2), of) for length, of in alike.items()]
    return ExpectedRounds(np.diff(remaining(groups), axis=-1, prepend=0.0), sequences, drafted)


@lru_cache(maxsize=64)  # the same for all numbers of sequences
def _rooms(laws: tuple[RoundsLaw, ...], draft_length: int, lengths: tuple[int, ...]) -> dict[int, Floats]:
    """`room_chances` of sequences of each length."""
    mass = _starts_by_round(laws, draft_length, max(lengths))
    if mass is None:
        mass = _places_of_dependent(laws, draft_length, max(lengths)).mass
    return {length: room_chances(mass, draft_length, length) for length in lengths}


_kept = lru_cache(maxsize=128)(_rounds)
"""The same rounds are priced several times: with the costs, without overheads, and at the ends of their uncertainty."""


def room_chances(mass: Floats, draft_length: int, length: int) -> Floats:
    """Probability that a sequence of `length` tokens has an r-th round and can use m drafted tokens in it.

    `mass` is that of `PlacesOfRounds`; shape (laws, rounds, draft_length + 1).

    >>> from model.outcomes.outcome_laws import Iid
    >>> mass = places_of_rounds([Iid(0.5)], 1, 3).mass
    >>> room_chances(mass, 1, 3)[0].tolist()  # its second round has two tokens left, or one
    [[0.0, 1.0], [0.5, 0.5], [0.25, 0.0]]
    """
    rounds, laws, _ = mass.shape
    found = np.zeros((laws, rounds, draft_length + 1))
    for room in range(min(draft_length, length)):
        found[..., room] = mass[..., length - 1 - room].T
    found[..., draft_length] = mass[..., : max(length - draft_length, 0)].sum(axis=-1).T
    return found


Group = tuple[Floats, Floats, int]
"""Probability that a sequence has ended, shape (laws, rounds); cumulative probabilities of the places of one that has not, of shape
(laws, ..., rounds, cells); and the number of sequences that are alike."""


def remaining(groups: Sequence[Group]) -> Floats:
    """Expected rounds in which n sequences are left, none of them beyond a cell, summed over rounds; 0 for n = 0.

    Shape (laws, ..., sequences + 1, cells).
    """
    each = [(ended, alone, size) for ended, alone, count in groups for size in _parts(count)]
    if len(each) == 1:
        found = [np.matmul(weight, power) for weight, power in _powers(*each[0])]
    else:
        found = [every.sum(axis=-2, keepdims=True) for every in _of_groups(each)]
    found[0] = np.zeros_like(found[0])
    return np.concatenate(found, axis=-2)


def _parts(count: int) -> list[int]:
    """Split `count` sequences into groups of at most `_MOST_ALIKE`."""
    return [_MOST_ALIKE] * (count // _MOST_ALIKE) + [count % _MOST_ALIKE] * (count % _MOST_ALIKE > 0)


def _powers(ended: Floats, alone: Floats, count: int) -> Iterator[tuple[Floats, Floats]]:
    """Two factors, for each number n of equal sequences, whose product is the probability that n are left and none beyond a cell.

    The first has shape (laws, ..., 1, rounds), the second that of `alone`; the second is changed in place by the next one.
    """
    gone = [np.ones_like(ended)]
    for _ in range(count):
        gone.append(gone[-1] * ended)
    axes = (slice(None), *(None,) * (alone.ndim - 2), slice(None))
    power = np.ones_like(alone)
    for number in range(count + 1):
        yield (math.comb(count, number) * gone[count - number])[axes], power
        if number < count:
            power *= alone


def _of_groups(groups: Sequence[Group]) -> list[Floats]:
    """Probability of each number of remaining sequences of several groups; arrays of the shape of the groups' cells."""
    found: list[Any] = [1.0]
    for group in groups:
        more = [np.swapaxes(weight, -1, -2) * power for weight, power in _powers(*group)]
        sums: list[Any] = [0.0] * (len(found) + len(more) - 1)
        for (i, here), (j, there) in itertools.product(enumerate(found), enumerate(more)):
            sums[i + j] = sums[i + j] + here * there
        found = sums
    return found


def _placed(places: PlacesOfRounds, ended: dict[int, Floats], draft_length: int, lengths: tuple[int, ...]) -> Floats:
    """Expected rounds by the cells of `cells_of`; shape (laws, 2, sequences + 1, cells)."""
    rounds, laws, tokens = places.mass.shape
    low, alike = _first_cut(draft_length, lengths), Counter(lengths)
    late = (tokens - low) * draft_length
    numbers = 2 * rounds * (tokens + late) * (1 if len(alike) == 1 else len(lengths) + 1)
    size = max(_TOGETHER // numbers, 1)
    # "None beyond a position", then "none beyond a position and none with more than this room".
    sums = np.zeros((laws, 2, len(lengths) + 1, tokens + late))
    begins = np.unique(np.linspace(0, rounds, _STRETCHES + 1).astype(int)).tolist()
    # Rounds of a stretch start at one of its positions, or so rarely elsewhere that nothing changes.
    likely = places.mass.max(axis=1) >= _NEVER / tokens
    lasts = [int(np.flatnonzero(likely[begin:end].any(axis=0))[-1]) for begin, end in itertools.pairwise(begins)]
    for first in range(0, laws, size):
        part = slice(first, first + size)
        mass, after = (np.swapaxes(each[:, part], 0, 1) for each in places)
        for (begin, end), last in zip(itertools.pairwise(begins), lasts, strict=True):
            cells = slice(min(begin, low), last + 1 if last < low else tokens + late)  # before `low` all rounds have whole drafts
            each = [(length, ended[length][part, begin:end], count) for length, count in alike.items()]
            own = [(gone, _until(mass[:, begin:end], after[:, begin:end], draft_length, length, low, cells), count)
                   for length, gone, count in each]  # fmt: skip
            found = remaining(own)
            sums[part, ..., cells] += found
            sums[part, ..., cells.stop : tokens] += found[..., -1:]
    early = np.diff(sums[..., :low], axis=-1, prepend=0.0)
    cut = sums[..., tokens:].reshape(*sums.shape[:3], tokens - low, draft_length)
    ends = np.concatenate([cut, sums[..., low:tokens, None]], axis=-1)
    before = np.zeros_like(ends[..., :1, :])
    if low:  # all rounds that start earlier draft whole drafts
        before[..., 0, draft_length] = sums[..., low - 1]
    ends = np.diff(ends, axis=-2, prepend=before)
    ends = np.diff(ends, axis=-1, prepend=0.0).reshape(*sums.shape[:3], -1)
    chances = np.concatenate([early, ends], axis=-1)
    chances[:, 1] -= chances[:, 0]
    return chances


def _until(mass: Floats, after: Floats, draft_length: int, length: int, low: int, cells: slice) -> Floats:
    """Probability that a sequence has an r-th round that starts at most at a position, alone and with limited room.

    `mass` and `after` have shape (laws, rounds, positions). Shape (laws, 2, rounds, cells); index 0 of the second axis is without
    completely accepted drafts before, index 1 with any. Of all `cells` only those of the slice; no round starts before them.
    """
    laws, rounds, tokens = mass.shape
    positions = slice(cells.start, min(cells.stop, tokens))
    found = np.empty((laws, 2, rounds, cells.stop - cells.start))
    until = found[..., : positions.stop - positions.start]
    np.subtract(mass[..., positions], after[..., positions], out=until[:, 0])
    np.maximum(until[:, 0], 0.0, out=until[:, 0])
    until[:, 1] = mass[..., positions]
    until[..., max(length - positions.start, 0) :] = 0.0
    np.cumsum(until, axis=-1, out=until)
    if cells.stop > tokens:
        first = np.maximum(length - 1 - np.arange(draft_length), 0)  # first position with room for at most 0, 1, ... tokens
        before = np.where(first > positions.start, until[..., np.maximum(first - 1 - positions.start, 0)], 0.0)
        within = found[..., tokens - positions.start :].reshape(*found.shape[:3], tokens - low, draft_length)
        np.subtract(until[..., low - positions.start :, None], before[..., None, :], out=within)
        np.maximum(within, 0.0, out=within)
    return found
