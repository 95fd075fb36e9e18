"""Policies for adaptive draft lengths: they observe the drafted and accepted tokens of each round, as a real decoder does.

A policy controls many decodings at once, or a single one as an array of one. Both must decide identically to the last bit. Numpy's
logarithm and exponential may round single values and arrays differently, so the C library's are used, value by value.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Strawberries] Team 28. Fast Inference from Transformers via Speculative Decoding. Project slides ("with adaptive gamma").
[transformers] huggingface/transformers, src/transformers/generation/candidate_generator.py.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]

ESTIMATORS = ("tested", "drafted")
"""Denominator of the estimate: tested tokens, which estimate alpha, or drafted tokens, which give a biased estimate."""
RISE = 2
"""Increase of the draft length in [transformers] after a completely accepted draft; after other rounds it falls by one."""


# --- Theorem 3.8 along the draft length -----------------------------------------------------------------------------


def gradient(acceptance_rate: ArrayLike, draft_length: ArrayLike, cost_ratio: ArrayLike) -> Floats:
    """dS/dgamma of Theorem 3.8 of [Leviathan2023] at a real draft length, exact at alpha = 0 and 1 [speed-up per token].

    S' = (a (-ln alpha)/(1 - alpha) (gamma c + 1) - c (1 - a)/(1 - alpha)) / (gamma c + 1)^2 with a = alpha^(gamma+1). It may be
    positive at gamma = 0 although no whole draft length helps: it is positive there if c < -alpha ln(alpha) / (1 - alpha), a weaker
    condition than c < alpha.

    >>> [round(float(gradient(rate, 2, 0.1)), 6) for rate in (0, 0.7, 1)]
    [-0.069444, 0.187749, 0.625]
    """
    rate = checks.array("acceptance_rate", acceptance_rate, 0, 1)
    length = checks.array("draft_length", draft_length, 0)
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    inside = (rate > 0) & (rate < 1)
    safe = np.where(inside, rate, 0.5)
    log, gap = _each(math.log, safe), 1 - safe
    power = (length + 1) * log
    time = length * ratio + 1
    # At alpha = 0 and 1: -alpha^(gamma+1) ln(alpha) / (1 - alpha) is 0 and 1, the tokens of a round are 1 and gamma + 1.
    slope = np.where(inside, _each(math.exp, power) * (-log / gap), rate)
    tokens = np.where(inside, -_each(math.expm1, power) / gap, 1 + rate * length)
    return np.asarray((slope * time - ratio * tokens) / time**2)


def _each(function: Callable[[float], float], values: Floats) -> Floats:
    return np.array([function(value) for value in values.ravel().tolist()]).reshape(values.shape)


def thresholds(cost_ratio: float, longest: int) -> Floats:
    """Acceptance rates above which gamma + 1 drafted tokens are faster than gamma, for gamma = 0, ..., longest - 1.

    S(gamma + 1) > S(gamma) in Theorem 3.8 of [Leviathan2023] is alpha^-1 + ... + alpha^-(gamma+1) < gamma + 1/c. It holds above a
    threshold, which is c for gamma = 0 (Corollary 3.9) and rises with gamma. So the best draft length is the number of thresholds
    below alpha.

    >>> thresholds(0.1, 3).round(4).tolist()
    [0.1, 0.3504, 0.533]
    """
    checks.number("cost_ratio", cost_ratio, 0)
    checks.whole("longest", longest, 0)
    length = np.arange(float(longest))
    low, high = np.zeros(longest), np.ones(longest)  # for c > 1 a threshold above 1 becomes 1, with the same effect
    for _ in range(64):
        middle = (low + high) / 2
        pays = _one_more_pays(middle, length, cost_ratio)
        low, high = np.where(pays, low, middle), np.where(pays, middle, high)
    return np.asarray(low)


def _one_more_pays(rate: Floats, length: Floats, ratio: float) -> NDArray[np.bool_]:
    """Test alpha^(gamma+1) (gamma c + 1) > c (1 + alpha + ... + alpha^gamma)."""
    return np.asarray(rate ** (length + 1) * (length * ratio + 1) * (1 - rate) > ratio * (1 - rate ** (length + 1)))


# --- Policies -------------------------------------------------------------------------------------------------------


class Policy(ABC):
    """Draft lengths of the next rounds of many decodings."""

    def __init__(self, first: int, count: int) -> None:
        self.length: Integers = np.full(count, first, dtype=np.int64)

    @abstractmethod
    def learn(self, which: Indices, accepted: Integers, drafted: Integers) -> None:
        """Update the lengths after a round of each of the decodings `which`."""


class Constant(Policy):
    """Constant draft length; the decoder itself may stop drafts earlier."""

    def learn(self, which: Indices, accepted: Integers, drafted: Integers) -> None:
        pass


class Heuristic(Policy):
    """The schedule "heuristic" of [transformers]: two more if all drafted tokens were accepted, else one less, but at least one.

    >>> policy = Heuristic(3, longest=4, count=2)
    >>> policy.learn(np.array([0, 1]), np.array([3, 0]), np.array([3, 3]))
    >>> policy.length.tolist()
    [4, 2]
    """

    def __init__(self, first: int, longest: int, count: int) -> None:
        super().__init__(first, count)
        self.longest = longest

    def learn(self, which: Indices, accepted: Integers, drafted: Integers) -> None:
        length = self.length[which]
        risen, fallen = np.minimum(length + RISE, self.longest), np.maximum(length - 1, 1)
        self.length[which] = np.where(accepted == drafted, risen, fallen)


class CumulativeMean(Policy):
    """Base of policies that use the cumulative mean (prior_accepted + accepted) / (prior_tested + tested).

    A round tests min(accepted + 1, drafted) tokens: those after the first rejection are not tested. The estimator "drafted" counts
    all drafted tokens instead.
    """

    def __init__(
        self, first: int, bounds: tuple[int, int], ratio: float, estimator: str, prior: tuple[float, float], count: int
    ) -> None:
        super().__init__(first, count)
        self.shortest, self.longest = bounds
        self.ratio = ratio
        self.estimator = estimator
        self.accepted, self.tested = np.full(count, float(prior[0])), np.full(count, float(prior[1]))
        self.thresholds = thresholds(ratio, self.longest)

    def estimate(self, which: Indices) -> Floats:
        """Current estimates of alpha of these decodings."""
        return np.asarray(self.accepted[which] / self.tested[which])

    def learn(self, which: Indices, accepted: Integers, drafted: Integers) -> None:
        self.accepted[which] += accepted
        self.tested[which] += drafted if self.estimator == "drafted" else np.minimum(accepted + 1, drafted)
        self.length[which] = self.next_lengths(which)

    @abstractmethod
    def next_lengths(self, which: Indices) -> Integers:
        """Next draft lengths of these decodings."""


class Optimum(CumulativeMean):
    """The best whole draft length for the current estimate.

    >>> policy = Optimum(5, bounds=(1, 20), ratio=0.1, estimator="tested", prior=(1, 2), count=1)
    >>> policy.learn(np.array([0]), np.array([5]), np.array([5]))  # 6 of 7: the best for a rate of .857 is 7 drafts
    >>> policy.length.tolist()
    [7]
    """

    def next_lengths(self, which: Indices) -> Integers:
        best = np.searchsorted(self.thresholds, self.estimate(which), side="left")
        return np.asarray(np.clip(best, self.shortest, self.longest), dtype=np.int64)


class MeasuredOptimum(CumulativeMean):
    """As `Optimum`, with measured verification times: `widths[g]` is the time of a pass over g + 1 tokens.

    All lengths are compared, because a measured curve may have several local optima; ties go to the shortest.

    >>> times = np.array([1, 1, 1, 2])
    >>> policy = MeasuredOptimum(5, bounds=(1, 3), ratio=0.1, estimator="tested", prior=(1, 2), widths=times, count=1)
    >>> policy.learn(np.array([0]), np.array([5]), np.array([5]))  # 7 drafts at equal times; the third doubles the time
    >>> policy.length.tolist()
    [2]
    """

    def __init__(
        self, first: int, bounds: tuple[int, int], ratio: float, estimator: str, prior: tuple[float, float], widths: ArrayLike,
        count: int,
    ) -> None:  # fmt: skip
        super().__init__(first, bounds, ratio, estimator, prior, count)
        self.times = (np.asarray(widths) + ratio * np.arange(self.longest + 1))[self.shortest :]

    def next_lengths(self, which: Indices) -> Integers:
        rate = self.estimate(which)
        # Sequential products and sums, so that one decoding and many give the same bits.
        power, tokens, speeds = np.ones_like(rate), np.ones_like(rate), []
        for length in range(self.longest + 1):
            if length >= self.shortest:
                speeds.append(tokens / self.times[length - self.shortest])
            power = power * rate
            tokens = tokens + power
        return np.asarray(np.argmax(speeds, axis=0) + self.shortest, dtype=np.int64)


class Gradient(CumulativeMean):
    """Gradient ascent on Theorem 3.8 with the current estimate of alpha, one step per round: the method of [Strawberries].

    gamma is a real number; the draft length is the better of the whole numbers below and above it.
    """

    def __init__(
        self, first: int, bounds: tuple[int, int], ratio: float, estimator: str, prior: tuple[float, float], step: float, count: int
    ) -> None:
        super().__init__(first, bounds, ratio, estimator, prior, count)
        self.step = step
        self.place = np.full(count, float(first))

    def next_lengths(self, which: Indices) -> Integers:
        estimate, place = self.estimate(which), self.place[which]
        climbed = np.clip(place + self.step * gradient(estimate, place, self.ratio), self.shortest, self.longest)
        self.place[which] = climbed
        below = np.floor(climbed).astype(np.int64)
        between = climbed > below
        # A whole gamma is used as it is; at the longest length there is no threshold.
        more = estimate > self.thresholds[np.where(between, below, 0)]
        return np.asarray(below + (between & more))
