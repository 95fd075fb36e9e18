"""Counts of draft-and-verify rounds by their drafted tokens, where rounds are independent: means and second moments.

If the times of rounds do not depend on their position, the time of a decoding is N . t, with the numbers N_k of rounds that draft k
tokens and their times t_k. Its mean is E[N] . t, and its mean square t . E[N N'] t, so that one pass over the positions serves all
prices.

All rounds but the last draft K tokens, as long as more than K tokens remain. The pass goes from the first position on, and keeps
the probability that a round starts at a position, and the mean and the mean square of the number of rounds until then. Where at
most K tokens remain, the rest follows from tables that depend on the remaining tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
_TOGETHER = 60_000
"""Cells (positions x laws) of a block that stays in the cache of a processor."""


class RoundCounts(NamedTuple):
    """Moments of the numbers of rounds that draft 0, 1, ..., K tokens, for several laws.

    `mean` has shape (laws, K + 1), `square` is E[N N'], of shape (laws, K + 1, K + 1).
    """

    mean: Floats
    square: Floats


def counts_of(draft_length: int, tokens: int, survival: ArrayLike) -> RoundCounts:
    """Moments of the numbers of rounds of decodings of `tokens` tokens, whose last drafts are cut to the remaining tokens.

    Parameters
    ----------
    draft_length, tokens
        Drafted tokens of a round, K, and tokens of the decoding.
    survival
        Probability that at least 1, 2, ..., K drafted tokens are accepted; shape (laws, K).

    >>> found = counts_of(1, 3, [[0.5]])  # (1, 1) rounds with probability .5, (0, 2) and (1, 2) with .25 each
    >>> found.mean.tolist(), found.square[0].tolist()
    ([[0.75, 1.5]], [[0.75, 1.0], [1.0, 2.5]])
    """
    return counts_of_lengths(np.array([tokens]), cut_ends(draft_length, survival))


def cut_ends(draft_length: int, survival: ArrayLike) -> list[Floats]:
    """Endings of drafts that are cut to 0, 1, ..., K tokens, as `counts_of_lengths` takes them, from `survival` (`counts_of`)."""
    reached = np.atleast_2d(np.asarray(survival, dtype=np.float64)).T  # (K, laws): the axis of laws is last while computing
    return [_endings(drafted, reached) for drafted in range(draft_length + 1)]


def counts_of_lengths(lengths: NDArray[np.int64], ends: Sequence[Floats]) -> RoundCounts:
    """Counts of decodings of each of several lengths under each law, the laws of the first length first.

    One pass to the longest serves all, since the lengths differ in their last K + 1 positions only.

    Parameters
    ----------
    lengths
        Tokens, distinct and rising; shape (lengths,).
    ends
        Probabilities to accept 0, 1, ..., k of k drafted tokens, for k = 0, 1, ..., K, each of shape (k + 1, laws). A tree that is
        drafted anew for fewer levels has other probabilities than one that is cut.

    >>> counts_of_lengths(np.array([2, 3]), [np.ones((1, 1)), np.array([[0.5], [0.5]])]).mean.tolist()
    [[0.5, 1.0], [0.75, 1.5]]
    """
    laws = ends[0].shape[1]
    if laws <= _FEW_LAWS:  # methods whose parameters differ ask for the same counts
        return _kept_counts(lengths.tobytes(), laws, tuple([np.ascontiguousarray(each).tobytes() for each in ends]))
    size = max(_TOGETHER // (int(lengths[-1]) + len(ends)), 1)
    parts = [_counted(lengths, [each[:, at : at + size] for each in ends]) for at in range(0, laws, size)]
    return RoundCounts(*(_joined(each) for each in zip(*parts, strict=True)))


def _joined(parts: Sequence[Floats]) -> Floats:
    """Counts by length of several blocks of laws, as one with an axis of lengths and laws."""
    whole = np.concatenate(parts, axis=1)
    return whole.reshape(-1, *whole.shape[2:])


@lru_cache(maxsize=256)
def _kept_counts(lengths: bytes, laws: int, ends: tuple[bytes, ...]) -> RoundCounts:
    each = _counted(np.frombuffer(lengths, dtype=np.int64), [np.frombuffer(each).reshape(-1, laws) for each in ends])
    found = RoundCounts(*(_joined([values]) for values in each))
    for values in found:
        values.flags.writeable = False
    return found


_FEW_LAWS = 8
"""Number of laws up to which their counts are kept."""
_ONE_MORE = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 2.0, 1.0]])
"""Probability, mean and mean square of a count, to those of the count plus one."""


def _counted(lengths: NDArray[np.int64], ends_of: Sequence[Floats]) -> tuple[Floats, Floats]:
    """`RoundCounts` with axes of lengths and of laws."""
    longest, laws = len(ends_of) - 1, ends_of[0].shape[1]
    most, ends = int(np.minimum(lengths, longest).max()), ends_of[-1]
    mass, first, square = np.moveaxis(_windows(lengths, longest, most, ends), (-2, -1), (0, 1))  # (laws, lengths, remaining) each
    own, cross = (np.moveaxis(each, -1, 0) for each in _endgame(most, ends_of))  # (laws, remaining, ...)
    mean, both = np.zeros((laws, lengths.size, longest + 1)), np.zeros((laws, lengths.size, longest + 1, longest + 1))
    mean[..., :-1] = mass @ own[..., :-1]
    mean[..., -1] = first.sum(axis=-1)
    both[..., :-1, :-1] = (mass @ cross[..., :-1, :-1].reshape(laws, most + 1, -1)).reshape(laws, lengths.size, longest, longest)
    both[..., -1, :-1] = both[..., :-1, -1] = first @ own[..., :-1]
    both[..., -1, -1] = square.sum(axis=-1)
    return mean.swapaxes(0, 1), both.swapaxes(0, 1)


def _windows(lengths: NDArray[np.int64], longest: int, most: int, ends: Floats) -> Floats:
    """State of decodings of each length when at most `longest` tokens remain, by remaining tokens 0, 1, ..., `most`.

    Probability of a round's start there, and with it the mean and the mean square of the number of rounds before, all with
    `longest` drafted tokens, which end with probabilities `ends`. Shape (lengths, most + 1, 3, laws).
    """
    laws, last = ends.shape[1], np.minimum(lengths, longest)
    found = np.zeros((lengths.size, most + 1, 3, laws))
    state = np.zeros((int(lengths[-1]) + longest + 1, 3, laws))
    state[0, 0] = 1.0
    at = 0
    for number, (begin, window) in enumerate(zip((lengths - last).tolist(), last.tolist(), strict=True)):
        for start in range(at, begin):
            state[start + 1 : start + 2 + longest] += ends[:, None] * (_ONE_MORE @ state[start])
        at = begin
        found[number, : window + 1] = state[begin : begin + window + 1][::-1]
    return found


def _endings(drafted: int, reached: Floats) -> Floats:
    """Probability that a round with this number of drafted tokens accepts 0, 1, ... of them; shape (drafted + 1, laws)."""
    bounds = np.concatenate([np.ones((1, reached.shape[1])), reached[:drafted], np.zeros((1, reached.shape[1]))])
    return np.asarray(bounds[:-1] - bounds[1:])


def _endgame(last: int, ends_of: Sequence[Floats]) -> tuple[Floats, Floats]:
    """Moments of the numbers of rounds from 0, 1, ..., `last` remaining tokens on, each round with one draft less than remain.

    Shapes (last + 1, longest + 1, laws) and (last + 1, longest + 1, longest + 1, laws).
    """
    longest, laws = len(ends_of) - 1, ends_of[0].shape[1]
    mean = np.zeros((last + 1, longest + 1, laws))
    square = np.zeros((last + 1, longest + 1, longest + 1, laws))
    for remaining in range(1, last + 1):
        drafted = remaining - 1
        ends = ends_of[drafted]
        following = np.einsum("al,akl->kl", ends, mean[remaining - 1 :: -1])
        mean[remaining] = following
        mean[remaining, drafted] += 1
        square[remaining] = np.einsum("al,akjl->kjl", ends, square[remaining - 1 :: -1])
        square[remaining, drafted] += following
        square[remaining, :, drafted] += following
        square[remaining, drafted, drafted] += 1
    return mean, square


def priced(counts: RoundCounts, prices: Floats) -> tuple[Floats, Floats]:
    """Mean and variance of the time of each pair of counts and prices, both of shape (pairs, ...).

    >>> mean, variance = priced(counts_of(1, 3, [[0.5]]), np.array([[2.0, 3.0]]))
    >>> mean.tolist(), variance.tolist()
    ([6.0], [1.5])
    """
    mean = np.einsum("pk,pk->p", counts.mean, prices)
    square = np.einsum("pj,pj->p", np.einsum("pk,pkj->pj", prices, counts.square), prices)
    return mean, np.maximum(square - mean**2, 0.0)


class PricesOfRounds(NamedTuple):
    """Time, unit-time and arithmetic of rounds at several costs, and their drafted tokens, by what they draft (`RoundCounts`).

    The first three have shape (costs, K + 1), the last (K + 1,).
    """

    time: Floats
    busy: Floats
    operations: Floats
    drafted: NDArray[Any]


def moments_of_pairs(
    lengths: NDArray[np.int64], ends: Sequence[Floats], prices: PricesOfRounds,
    law: NDArray[np.intp], length: NDArray[np.intp], price: NDArray[np.intp],
) -> Floats:  # fmt: skip
    """Mean and variance of the time, and means of unit-time, arithmetic, rounds and drafted tokens; shape (6, pairs).

    Parameters
    ----------
    lengths, ends
        As of `counts_of_lengths`.
    law, length, price
        Index of each pair's law, length and prices; shape (pairs,).
    """
    found = np.empty((6, law.size))
    laws, kinds = ends[0].shape[1], len(ends)
    size = max(_MOST_COUNTS // (laws * kinds**2), 1)
    for begin in range(0, lengths.size, size):
        counts = counts_of_lengths(lengths[begin : begin + size], ends)
        mine = np.flatnonzero((length >= begin) & (length < begin + size)) if lengths.size > size else np.arange(law.size)
        for at in range(0, mine.size, _PAIRS):
            part = mine[at : at + _PAIRS]
            own = RoundCounts(*(each[(length[part] - begin) * laws + law[part]] for each in counts))
            mean, variance = priced(own, prices.time[price[part]])
            spent = (np.einsum("pk,pk->p", own.mean, each[price[part]]) for each in (prices.busy, prices.operations))
            found[:, part] = mean, variance, *spent, own.mean.sum(axis=1), own.mean @ prices.drafted
    return found


_MOST_COUNTS = 500_000
"""Second moments of counts that are computed together: a few MB."""
_PAIRS = 20_000
"""Pairs that are priced together."""


class RoundEnds(NamedTuple):
    """How rounds end: accepted tokens in rising order, shape (endings,), and their probabilities, shape (endings, laws).

    Several endings may accept the same number of tokens.
    """

    accepted: NDArray[np.int64]
    chance: Floats


def chain_ends(draft_length: int, tokens: int, survival: Floats) -> list[RoundEnds]:
    """Endings of rounds from position 0, 1, ... on: at most one token less than remain is tested.

    `survival` has shape (laws, K): probability that at least 1, 2, ... drafted tokens are accepted.

    >>> [each.chance[:, 0].tolist() for each in chain_ends(1, 3, np.array([[0.25]]))]
    [[0.75, 0.25], [0.75, 0.25], [1.0]]
    """
    cut = [_endings(drafted, survival.T) for drafted in range(draft_length + 1)]
    by_drafted = [RoundEnds(np.arange(len(chance)), chance) for chance in cut]
    return [by_drafted[min(draft_length, tokens - 1 - start)] for start in range(tokens)]


def start_masses(ends: Sequence[RoundEnds]) -> Floats:
    """Probability that a round starts at each position, shape (tokens, laws); each ending is another number of accepted tokens.

    >>> start_masses(chain_ends(1, 4, np.array([[0.5]])))[:, 0].tolist()
    [1.0, 0.5, 0.75, 0.625]
    """
    tokens, laws = len(ends), ends[0].chance.shape[1]
    state = np.zeros((tokens + max(len(each.accepted) for each in ends), laws))
    state[0] = 1.0
    for start, each in enumerate(ends):
        state[start + 1 : start + 1 + len(each.accepted)] += each.chance * state[start]
    return state[:tokens]


def followed(values: Floats, chance: Floats) -> Floats:
    """Values of rounds by their start position, with those of all rounds before that lead there.

    The round that follows one from a position starts 1, 2, ... positions later with these probabilities: v(s) = values(s) +
    chance(0) v(s - 1) + chance(1) v(s - 2) + ..., for each column of `values`, shape (positions, columns). Many positions at once
    are a product with the matrix that solves this for them.

    >>> followed(np.array([[1.0], [0.0], [0.0]]), np.array([0.5, 0.25])).tolist()
    [[1.0], [0.5], [0.5]]
    """
    if len(values) == 1:
        return values.copy()
    most, size = len(chance), min(_POSITIONS, len(values))
    alone = np.zeros(2 * size)  # of a value of 1 at the first position, after as many zeros
    alone[size : 2 * size] = _followed_alone(chance, size)
    apart = np.arange(size)[:, None] - np.arange(size)
    solved = alone[size + apart]
    found = np.concatenate([np.zeros((most, values.shape[1])), values])
    for at in range(most, len(found), size):
        part = found[at : at + size]
        for steps, likely in enumerate(chance.tolist(), 1):  # of the rounds before these
            part[:steps] += likely * found[at - steps : at][: len(part)]
        part[:] = solved[: len(part), : len(part)] @ part
    return found[most:]


def _followed_alone(chance: Floats, size: int) -> Floats:
    """`followed` of a value of 1 at the first of `size` positions; twice as many positions are known after each step.

    >>> _followed_alone(np.array([0.5, 0.25]), 4).tolist()
    [1.0, 0.5, 0.5, 0.375]
    """
    known = np.ones(1)
    while len(known) < size:
        count = len(known)
        next_ones = np.zeros(count)
        of_known = np.convolve(chance, known)[count - 1 : 2 * count - 1]
        next_ones[: len(of_known)] = of_known
        known = np.concatenate([known, np.convolve(known, next_ones)[:count]])
    return known[:size]


_POSITIONS = 64
"""Positions that are taken at once."""
