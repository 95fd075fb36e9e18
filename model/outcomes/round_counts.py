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
from typing import NamedTuple

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
    reached = np.atleast_2d(np.asarray(survival, dtype=np.float64)).T  # (K, laws): the axis of laws is last while computing
    return counts_of_ends(tokens, [_endings(drafted, reached) for drafted in range(draft_length + 1)])


def counts_of_ends(tokens: int, ends: Sequence[Floats]) -> RoundCounts:
    """`counts_of` where the probabilities to accept 0, 1, ..., k of k drafted tokens are given, for k = 0, 1, ..., K.

    Each has shape (k + 1, laws). A tree that is drafted anew for fewer levels has other probabilities than one that is cut.

    >>> counts_of_ends(3, [np.ones((1, 1)), np.array([[0.5], [0.5]])]).mean.tolist()
    [[0.75, 1.5]]
    """
    laws = ends[0].shape[1]
    if laws <= _FEW_LAWS:  # methods whose parameters differ ask for the same counts
        return _kept_counts(tokens, laws, tuple([np.ascontiguousarray(each).tobytes() for each in ends]))
    size = max(_TOGETHER // (tokens + len(ends)), 1)
    parts = [_counted(tokens, [each[:, at : at + size] for each in ends]) for at in range(0, laws, size)]
    return RoundCounts(*(np.concatenate(each) for each in zip(*parts, strict=True)))


@lru_cache(maxsize=256)
def _kept_counts(tokens: int, laws: int, ends: tuple[bytes, ...]) -> RoundCounts:
    found = _counted(tokens, [np.frombuffer(each).reshape(-1, laws) for each in ends])
    for each in found:
        each.flags.writeable = False
    return found


_FEW_LAWS = 8
"""Number of laws up to which their counts are kept."""
_ONE_MORE = np.array([[1.0, 0.0, 0.0], [1.0, 1.0, 0.0], [1.0, 2.0, 1.0]])
"""Probability, mean and mean square of a count, to those of the count plus one."""


def _counted(tokens: int, ends_of: Sequence[Floats]) -> RoundCounts:
    longest, laws = len(ends_of) - 1, ends_of[0].shape[1]
    last, ends = min(longest, tokens), ends_of[-1]
    # By position and moment: probability of a start there, and with it the mean and the mean square of the rounds before.
    state = np.zeros((tokens + longest + 1, 3, laws))
    state[0, 0] = 1.0
    for start in range(tokens - last):
        state[start + 1 : start + 2 + longest] += ends[:, None] * (_ONE_MORE @ state[start])
    # The rest by remaining tokens, `last` of them first; nothing is left at position `tokens`.
    mass, first, square = (state[tokens - last : tokens + 1, moment][::-1] for moment in range(3))
    own, cross = _endgame(last, ends_of)
    mean, both = np.zeros((longest + 1, laws)), np.zeros((longest + 1, longest + 1, laws))
    mean[:-1] = np.einsum("rl,rkl->kl", mass, own[:, :-1])
    mean[-1] = first.sum(axis=0)
    both[:-1, :-1] = np.einsum("rl,rkjl->kjl", mass, cross[:, :-1, :-1])
    both[-1, :-1] = both[:-1, -1] = np.einsum("rl,rkl->kl", first, own[:, :-1])
    both[-1, -1] = square.sum(axis=0)
    return RoundCounts(mean.T, both.transpose(2, 0, 1))


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


class RoundEnds(NamedTuple):
    """How rounds end: accepted tokens in rising order, shape (endings,), and their probabilities, shape (endings, laws).

    Several endings may accept the same number of tokens.
    """

    accepted: NDArray[np.int64]
    chance: Floats


class RoundTimes(NamedTuple):
    """Times of rounds with several prices: for each start position an array of shape (endings, prices).

    A time includes what the ending adds to the round that follows.
    """

    time: Sequence[Floats]
    busy: Sequence[Floats]


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
    """Probability that a round starts at each position, shape (tokens, laws).

    >>> start_masses(chain_ends(1, 4, np.array([[0.5]])))[:, 0].tolist()
    [1.0, 0.5, 0.75, 0.625]
    """
    tokens, laws = len(ends), ends[0].chance.shape[1]
    state = np.zeros((tokens + 1 + max(int(each.accepted[-1]) for each in ends), laws))
    state[0] = 1.0
    for start, each in enumerate(ends):
        _add(state, start, each.accepted, each.chance * state[start])
    return state[:tokens]


def _add(state: Floats, start: int, accepted: NDArray[np.int64], more: Floats) -> None:
    """Add values by ending, first axis of `more`, to the positions where the next rounds start."""
    if len(accepted) == accepted[-1] + 1:  # each number of tokens once
        state[start + 1 : start + 1 + len(accepted)] += more
        return
    first = np.flatnonzero(np.diff(accepted, prepend=-1))
    state[start + 1 + accepted[first]] += np.add.reduceat(more, first, axis=0)


def timed(
    ends: Sequence[RoundEnds], times: RoundTimes, law: NDArray[np.intp], price: NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """Mean and variance of the time, and mean unit-time, of pairs of laws and prices; arrays of shape (pairs,).

    One recursion over the start positions: with the tokens that a round accepts, its time is added to the time until the position
    that follows.

    Parameters
    ----------
    ends, times
        Endings and times of rounds by their start position; one entry for each token.
    law, price
        Index of each pair's law and prices, the last axes of `ends` and `times`.

    >>> two, one = np.full((2, 1), 2.0), np.ones((1, 1))  # rounds that draft nothing take 1
    >>> mean, variance, _ = timed(
    ...     chain_ends(1, 3, np.array([[0.5]])), RoundTimes([two, two, one], [two, two, one]), *np.zeros((2, 1), dtype=np.intp))
    >>> mean.tolist(), variance.tolist()
    ([3.75], [0.6875])
    """
    found = np.empty((3, law.size))
    size = max(_TOGETHER // (4 * max(len(each.accepted) for each in ends)), 1)
    mass = start_masses(ends)
    pairs = () if times.time is times.busy else zip(times.time, times.busy, strict=True)
    alike = all(one is other or np.array_equal(one, other) for one, other in pairs)
    for at in range(0, law.size, size):
        part = slice(at, at + size)
        found[:, part] = _timed(ends, mass[:, law[part]], times, law[part], price[part], alike=alike)
    return found[0], np.maximum(found[1] - found[0] ** 2, 0.0), found[2]


def _timed(
    ends: Sequence[RoundEnds], mass: Floats, times: RoundTimes, law: NDArray[np.intp], price: NDArray[np.intp], *, alike: bool
) -> tuple[Floats, Floats, Floats]:
    tokens = len(ends)
    # Mean and mean square of the time until a start, with its probability.
    means, squares = np.zeros((2, tokens + 1 + max(int(each.accepted[-1]) for each in ends), price.size))
    busy, last, chance = np.zeros(price.size), None, np.zeros(0)
    for start, each in enumerate(ends):
        if each is not last:
            last, chance = each, np.take(each.chance, law, axis=1)
        time = np.take(times.time[start], price, axis=1)
        mean, spent = means[start], time * mass[start]
        _add(means, start, each.accepted, chance * (mean + spent))
        _add(squares, start, each.accepted, chance * (squares[start] + time * (2 * mean + spent)))
        if not alike:
            busy += (chance * np.take(times.busy[start], price, axis=1)).sum(axis=0) * mass[start]
    mean, square = (each[tokens:].sum(axis=0) for each in (means, squares))
    return mean, square, mean if alike else busy
