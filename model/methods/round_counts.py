"""Counts of draft-and-verify rounds by their drafted tokens, where rounds are independent: means and second moments.

If the times of rounds do not depend on their position, the time of a decoding is N . t, with the numbers N_k of rounds that draft k
tokens and their times t_k. Its mean is E[N] . t, and its mean square t . E[N N'] t, so that one pass over the positions serves all
prices.

All rounds but the last draft K tokens, as long as more than K tokens remain. The pass goes from the first position on, and keeps
the probability that a round starts at a position, and the mean and the mean square of the number of rounds until then. Where at
most K tokens remain, the rest follows from tables that depend on the remaining tokens only.
"""

from __future__ import annotations

from collections.abc import Iterator
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
    size = max(_TOGETHER // (tokens + draft_length + 1), 1)
    parts = [_counted(draft_length, tokens, reached[:, at : at + size]) for at in range(0, reached.shape[1], size)]
    return RoundCounts(*(np.concatenate(each) for each in zip(*parts, strict=True)))


def _counted(longest: int, tokens: int, reached: Floats) -> RoundCounts:
    laws, last = reached.shape[1], min(longest, tokens)
    ends = _endings(longest, reached)
    # By position and moment: probability of a start there, and with it the mean and the mean square of the rounds before.
    state = np.zeros((tokens + longest + 1, 3, laws))
    state[0, 0] = 1.0
    for start in range(tokens - last):
        mass, first, square = state[start]
        after = np.stack([mass, first + mass, square + 2 * first + mass])
        state[start + 1 : start + 2 + longest] += ends[:, None] * after
    # The rest by remaining tokens, `last` of them first; nothing is left at position `tokens`.
    mass, first, square = (state[tokens - last : tokens + 1, moment][::-1] for moment in range(3))
    own, cross = _endgame(longest, last, reached)
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


def _endgame(longest: int, last: int, reached: Floats) -> tuple[Floats, Floats]:
    """Moments of the numbers of rounds from 0, 1, ..., `last` remaining tokens on, each round with one draft less than remain.

    Shapes (last + 1, longest + 1, laws) and (last + 1, longest + 1, longest + 1, laws).
    """
    laws = reached.shape[1]
    mean = np.zeros((last + 1, longest + 1, laws))
    square = np.zeros((last + 1, longest + 1, longest + 1, laws))
    for remaining in range(1, last + 1):
        drafted = remaining - 1
        ends = _endings(drafted, reached)
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
    return mean, np.maximum(np.einsum("pk,pkj,pj->p", prices, counts.square, prices, optimize=True) - mean**2, 0.0)


class RoundTimes(NamedTuple):
    """Times of rounds, by start position and number of accepted tokens, of several prices.

    Arrays of shape (tokens, K + 1, prices); a time includes what the accepted tokens add to the round that follows.
    """

    time: Floats
    busy: Floats


def start_masses(draft_length: int, tokens: int, survival: Floats) -> Floats:
    """Probability that a round starts at each position, shape (tokens, laws); `survival` has shape (laws, K).

    >>> start_masses(1, 4, np.array([[0.5]]))[:, 0].tolist()
    [1.0, 0.5, 0.75, 0.625]
    """
    reached = survival.T
    state = np.zeros((tokens + draft_length + 1, reached.shape[1]))
    state[0] = 1.0
    for start, ends in enumerate(_endings_from(draft_length, tokens, reached)):
        state[start + 1 : start + 1 + len(ends)] += ends * state[start]
    return state[:tokens]


def _endings_from(longest: int, tokens: int, reached: Floats) -> Iterator[Floats]:
    """`_endings` of a round that starts at position 0, 1, ...: at most one token less than remain is tested."""
    whole = _endings(longest, reached)
    for start in range(tokens):
        yield whole if tokens - 1 - start >= longest else _endings(tokens - 1 - start, reached)


def timed(
    survival: Floats, times: RoundTimes, law: NDArray[np.intp], price: NDArray[np.intp]
) -> tuple[Floats, Floats, Floats]:
    """Mean and variance of the time, and mean unit-time, of pairs of laws and prices; arrays of shape (pairs,).

    One recursion over the start positions: with the tokens that a round accepts, its time is added to the time until the position
    that follows.

    >>> price = np.array([[2.0, 2.0], [2.0, 2.0], [1.0, 1.0]])[..., None]  # rounds that draft nothing take 1
    >>> mean, variance, _ = timed(np.array([[0.5]]), RoundTimes(price, price), *np.zeros((2, 1), dtype=np.intp))
    >>> mean.tolist(), variance.tolist()
    ([3.75], [0.6875])
    """
    tokens, longest = times.time.shape[0], times.time.shape[1] - 1
    found = np.empty((3, law.size))
    size = max(_TOGETHER // (4 * (longest + 1)), 1)
    mass = start_masses(longest, tokens, survival)
    for at in range(0, law.size, size):
        part = slice(at, at + size)
        found[:, part] = _timed(survival.T[:, law[part]], mass[:, law[part]], times, price[part])
    return found[0], np.maximum(found[1] - found[0] ** 2, 0.0), found[2]


def _timed(reached: Floats, mass: Floats, times: RoundTimes, price: NDArray[np.intp]) -> tuple[Floats, Floats, Floats]:
    tokens, longest = times.time.shape[0], times.time.shape[1] - 1
    until = np.zeros((tokens + longest + 1, 2, price.size))  # mean and mean square of the time until a start, with its probability
    busy = np.zeros(price.size)
    alike = np.array_equal(times.time, times.busy)
    for start, ends in enumerate(_endings_from(longest, tokens, reached)):
        count = len(ends)
        time = np.take(times.time[start, :count], price, axis=1)
        mean, square = until[start]
        spent = time * mass[start]
        ahead = until[start + 1 : start + 1 + count]
        ahead[:, 0] += ends * (mean + spent)
        ahead[:, 1] += ends * (square + time * (2 * mean + spent))
        if not alike:
            busy += (ends * np.take(times.busy[start, :count], price, axis=1)).sum(axis=0) * mass[start]
    mean, square = until[tokens]
    return mean, square, mean if alike else busy
