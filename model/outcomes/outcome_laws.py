"""Probability laws of outcomes: is the prediction at an output position correct?

A `Law` combines the distribution of the number of successes, its mean and variance, and the sampler, so that theory and simulation
cannot drift apart. Drafts of several tokens may instead follow a law of rounds (`model.methods.rounds`), which gives the number of
tokens that survive if a draft starts at a position. Both kinds are sampled with random numbers indexed by output position
(`model.outcomes.random_streams`). The parameter `name` of a law is the name of its rate in error messages.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Outcomes = Callable[[NDArray[np.uint8]], Bools]
"""Maps the index of a position in its draft (from 0; one per replication) to acceptance (one per replication)."""


class Law(ABC):
    """Law of successes and failures at output positions 1, 2, 3, ..."""

    @abstractmethod
    def mean(self, positions: ArrayLike) -> Floats:
        """Expected number of successes among the first `positions` positions."""

    @abstractmethod
    def variance(self, positions: ArrayLike) -> Floats:
        """Variance of the number of successes among the first `positions` positions."""

    @abstractmethod
    def pmf(self, positions: int) -> Floats:
        """Probabilities of 0, 1, ..., `positions` successes among the first `positions` positions; shape (positions + 1,)."""

    def pmfs(self, positions: Sequence[int]) -> Iterator[Floats]:
        """Yield `pmf` of each of these numbers of positions, which rise."""
        return map(self.pmf, positions)

    @abstractmethod
    def sample(self, draws: Iterator[Floats]) -> Iterator[Bools]:
        """Yield tiles of outcomes, shape (positions in the tile, replications), from tiles of uniform random numbers `draws`.

        Tiles may share one buffer.
        """

    def drafts(self, draws: Iterator[Floats]) -> Iterator[Outcomes]:
        """Yield the acceptances at each position; in a `Law` they do not depend on the start of the draft."""
        for tile in self.sample(draws):
            for row in tile:
                yield _always(row)

    def survivors(self, draws: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """Accepted tokens of a draft of `longest` tokens that starts at each position; shape (positions, replications)."""
        counts = np.concatenate([tile.astype(np.int64) for tile in self.sample(draws)])
        for here, after in zip(counts[-2::-1], counts[:0:-1], strict=True):
            here *= np.minimum(after + 1, longest)
        return counts * (longest > 0)


def _always(row: Bools) -> Outcomes:
    return lambda _: row


class Chain(Law):
    """Law in which the success probability at position j depends on j and on the outcome at j - 1."""

    @abstractmethod
    def probabilities(self, positions: int) -> tuple[Floats, Floats]:
        """Success probabilities at each position (after a failure, after a success), each of shape (positions,).

        Both entries of the first position are its unconditional probability.
        """

    def draft_probabilities(self, positions: int, longest: int) -> tuple[Floats, Floats]:
        """`probabilities` for each index in a draft of at most `longest` tokens, and for the token after it.

        Each array has the shape (positions, longest + 1).
        """
        after_failure, after_success = self.probabilities(positions)
        shape = positions, longest + 1
        return np.broadcast_to(after_failure[:, None], shape), np.broadcast_to(after_success[:, None], shape)

    def pmf(self, positions: int) -> Floats:
        return next(self.pmfs([positions]))

    def pmfs(self, positions: Sequence[int]) -> Iterator[Floats]:
        """Yield `pmf` of each of these numbers of positions, which rise, from one recursion to the last.

        >>> [mass.tolist() for mass in ByPosition([0.5, 0.25]).pmfs([0, 1, 2])]
        [[1.0], [0.5, 0.5], [0.375, 0.5, 0.125]]
        """
        after_failure, after_success = self.probabilities(positions[-1])
        # mass[s, n]: probability of n successes so far with last outcome s.
        mass, begin = np.zeros((2, positions[-1] + 1)), 0
        mass[0, 0] = 1.0
        for end in positions:
            for low, high in zip(after_failure[begin:end], after_success[begin:end], strict=True):
                success = mass[0] * low + mass[1] * high
                mass[0] = mass[0] * (1 - low) + mass[1] * (1 - high)
                mass[1, 0], mass[1, 1:] = 0.0, success[:-1]
            begin = end
            yield np.asarray(mass[:, : end + 1].sum(axis=0))


class Iid(Chain):
    """Independent successes with the same probability `rate` at every position: the assumption of the papers.

    `rate` may be an array; mean and variance then broadcast, but `pmf` and `sample` fail.

    >>> float(Iid(0.6837).mean(127)), Iid(0.5).pmf(2).round(12).tolist()
    (86.8299, [0.25, 0.5, 0.25])
    """

    def __init__(self, rate: ArrayLike, *, name: str = "rate") -> None:
        self.rate = checks.array(name, rate, 0, 1)

    @classmethod
    def each(cls, rates: ArrayLike) -> list[Self]:
        """A law for each of these rates, which are checked together.

        >>> [law.mean(4).tolist() for law in Iid.each([0.25, 0.5])]
        [1.0, 2.0]
        """
        valid = checks.array("rate", rates, 0, 1)
        laws = [object.__new__(cls) for _ in range(valid.size)]
        for law, rate in zip(laws, valid, strict=True):
            law.rate = np.asarray(rate)
        return laws

    def mean(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.asarray(positions) * self.rate)

    def variance(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.asarray(positions) * self.rate * (1 - self.rate))

    def probabilities(self, positions: int) -> tuple[Floats, Floats]:
        rates = np.full(positions, float(self.rate))
        return rates, rates

    def pmf(self, positions: int) -> Floats:
        # Ratios of neighbours from the most likely number outwards, then divided by their sum: each probability has a relative
        # error of about `positions` roundings, and scipy.stats, half a second to import, is not needed.
        p, mode = float(self.rate), min(int((positions + 1) * float(self.rate)), positions)
        count = np.arange(positions + 1)
        weights = np.ones(positions + 1)
        with np.errstate(under="ignore"):
            above = count[mode:-1]
            weights[mode + 1 :] = np.cumprod((positions - above) / (above + 1) * (p / (1 - p) if p < 1 else 0.0))
            below = count[1 : mode + 1][::-1]
            weights[:mode] = np.cumprod(below / (positions - below + 1) * ((1 - p) / p if p > 0 else 0.0))[::-1]
            return np.asarray(weights / weights.sum())

    pmfs = Law.pmfs

    def sample(self, draws: Iterator[Floats]) -> Iterator[Bools]:
        rate, buffer = float(self.rate), None
        for tile in draws:
            if buffer is None:
                buffer = np.empty(tile.shape, dtype=np.bool_)
            yield np.less(tile, rate, out=buffer[: len(tile)])


def constant_rates(laws: Sequence[object], label: str) -> Floats:
    """Return the rates of independent outcomes, shape (laws, 1): all that matters far from the beginning and the end of a decoding.

    >>> constant_rates([Iid(0.5), Iid(0.8)], "PEARL").tolist()
    [[0.5], [0.8]]
    """
    rates = []
    for law in laws:
        if not isinstance(law, Iid):
            raise checks.ParameterError(
                f"the law of outcomes for {label} must be of one rate at every position (kind 'iid') for its time per token in"
                f" the long run, got {type(law).__name__}; predict a number of tokens instead"
            )
        rates.append([float(law.rate)])
    return np.array(rates)


class ByPosition(Chain):
    """Independent successes with probability `rates[j]` at position j.

    >>> ByPosition([0.5, 0.1]).pmf(2).round(4).tolist()
    [0.45, 0.5, 0.05]
    """

    def __init__(self, rates: ArrayLike, *, name: str = "rates") -> None:
        self.rates, self.name = checks.array(name, rates, 0, 1), name
        if self.rates.ndim != 1 or not self.rates.size:
            raise checks.ParameterError(f"{name} must be a list of rates, one for each output position, got {rates!r}")

    def mean(self, positions: ArrayLike) -> Floats:
        return self._sums(self.rates, positions)

    def variance(self, positions: ArrayLike) -> Floats:
        return self._sums(self.rates * (1 - self.rates), positions)

    def probabilities(self, positions: int) -> tuple[Floats, Floats]:
        self._cover(positions)
        return self.rates[:positions], self.rates[:positions]

    def sample(self, draws: Iterator[Floats]) -> Iterator[Bools]:
        start = 0
        for tile in draws:
            self._cover(start + len(tile))
            yield tile < self.rates[start : start + len(tile), None]
            start += len(tile)

    def _sums(self, values: Floats, positions: ArrayLike) -> Floats:
        self._cover(int(np.max(positions)))
        return np.asarray(np.concatenate([[0.0], np.cumsum(values)])[np.asarray(positions, dtype=np.intp)])

    def _cover(self, positions: int) -> None:
        if positions > len(self.rates):
            raise checks.ParameterError(
                f"{self.name} must have one rate for each of {positions} output positions, got {len(self.rates)};"
                " give more rates or fewer tokens"
            )


class Markov(Chain):
    """Stationary two-state Markov chain over output positions: success probability `rate` and lag-1 correlation `correlation`.

    The success probability is p + rho (1 - p) after a success and p (1 - rho) after a failure. Both must lie in [0, 1], so
    rho >= -min(p / (1 - p), (1 - p) / p).

    >>> float(Markov(0.5, 0.0).variance(127)) == float(Iid(0.5).variance(127))
    True
    """

    def __init__(self, rate: ArrayLike, correlation: ArrayLike, *, name: str = "rate") -> None:
        self.rate = checks.array(name, rate, 0, 1)
        self.correlation = checks.array("correlation", correlation, -1, 1)
        self.after_failure = self.rate * (1 - self.correlation)
        self.after_success = self.rate + self.correlation * (1 - self.rate)
        # The bound itself is allowed, despite rounding.
        if np.any(self.after_failure > 1 + 1e-12) or np.any(self.after_success < -1e-12):
            raise checks.ParameterError(
                f"correlation must be at least -min(p/(1-p), (1-p)/p) of {name} p={rate!r}, got {correlation!r}"
            )
        self.after_failure, self.after_success = np.minimum(self.after_failure, 1.0), np.maximum(self.after_success, 0.0)

    def mean(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.asarray(positions) * self.rate)

    def variance(self, positions: ArrayLike) -> Floats:
        """p(1-p) [n (1+rho)/(1-rho) - 2 rho (1-rho^n)/(1-rho)^2]; in the limit rho -> 1, p(1-p) n^2: all positions agree."""
        n, rho = np.asarray(positions, dtype=np.float64), self.correlation
        gap = 1 - rho
        # Near rho = 1 the two terms cancel; there the sum n + 2 sum (n - j) rho^j is expanded in 1 - rho.
        near = n * gap < 1e-3
        far = np.where(near, 1.0, gap)
        spread = n * (1 + rho) / far - 2 * rho * (1 - rho**n) / far**2
        cube = n * (n * n - 1)
        close = n * n - gap * cube / 3 + gap**2 * cube * (n - 2) / 12
        return np.asarray(self.rate * (1 - self.rate) * np.where(near, close, spread))

    def probabilities(self, positions: int) -> tuple[Floats, Floats]:
        after_failure = np.full(positions, float(self.after_failure))
        after_success = np.full(positions, float(self.after_success))
        after_failure[:1] = after_success[:1] = float(self.rate)
        return after_failure, after_success

    def sample(self, draws: Iterator[Floats]) -> Iterator[Bools]:
        rate, low, high = float(self.rate), float(self.after_failure), float(self.after_success)
        last: Bools | None = None
        for tile in draws:
            outcomes = np.empty(tile.shape, dtype=np.bool_)
            for draw, outcome in zip(tile, outcomes, strict=True):
                np.less(draw, rate if last is None else np.where(last, high, low), out=outcome)
                last = outcome
            yield outcomes


class Replay(Law):
    """Recorded sequences of outcomes; a replication is one of them, drawn uniformly with its first random number.

    `records` has shape (sequences, positions).

    >>> Replay([[True, True], [False, True]]).pmf(2).tolist()
    [0.0, 0.5, 0.5]
    """

    def __init__(self, records: Sequence[Sequence[bool]] | Bools) -> None:
        lengths = {len(record) for record in records}
        if len(lengths) != 1 or 0 in lengths:
            raise checks.ParameterError(
                f"records must be sequences of one common length of at least 1, got lengths {sorted(lengths)}"
            )
        values = np.asarray(records)
        if values.dtype != np.bool_ and not np.isin(values, (0, 1)).all():
            raise checks.ParameterError(f"records must hold true and false (or 1 and 0) only, got {values.dtype} values")
        self.records: Bools = values.astype(np.bool_)

    def mean(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.vectorize(lambda n: self._counts(n).mean(), otypes=[np.float64])(positions))

    def variance(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.vectorize(lambda n: self._counts(n).var(), otypes=[np.float64])(positions))

    def pmf(self, positions: int) -> Floats:
        return np.bincount(self._counts(positions), minlength=positions + 1) / len(self.records)

    def sample(self, draws: Iterator[Floats]) -> Iterator[Bools]:
        chosen, start = None, 0
        for tile in draws:
            if chosen is None:
                chosen = (tile[0] * len(self.records)).astype(np.intp)
            self._cover(start + len(tile))
            yield self.records[chosen, start : start + len(tile)].T
            start += len(tile)

    def first(self, positions: int) -> Bools:
        """Records at the first `positions` positions, shape (sequences, positions)."""
        self._cover(positions)
        return self.records[:, :positions]

    def _counts(self, positions: int) -> NDArray[np.int64]:
        return np.asarray(self.first(positions).sum(axis=1))

    def _cover(self, positions: int) -> None:
        if positions > self.records.shape[1]:
            raise checks.ParameterError(
                f"records must cover {positions} output positions, got {self.records.shape[1]};"
                " give longer records or fewer tokens"
            )


class RecordedProbabilities(Law):
    """Recorded success probabilities: a replication draws one of the records uniformly, then independent outcomes by position.

    `records` has shape (sequences, positions). Logs of sampled drafts give such records: the probability, given the emitted token,
    that a drafted token is accepted at a position.

    >>> RecordedProbabilities([[1.0, 0.5], [0.0, 0.5]]).pmf(2).tolist()
    [0.25, 0.5, 0.25]
    """

    def __init__(self, records: ArrayLike) -> None:
        self.records = checks.array("records", records, 0, 1)
        if self.records.ndim != 2 or not self.records.size:
            raise checks.ParameterError("records must be lists of probabilities, all of one length of at least 1")

    @property
    def chains(self) -> list[ByPosition]:
        """One law per record, all equally likely."""
        return [ByPosition(record) for record in self.records]

    def mean(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.vectorize(lambda n: self.first(n).sum(axis=1).mean(), otypes=[np.float64])(positions))

    def variance(self, positions: ArrayLike) -> Floats:
        """Variance within records, whose positions are independent, plus variance between records."""
        return np.asarray(np.vectorize(self._variance, otypes=[np.float64])(positions))

    def _variance(self, positions: int) -> float:
        chances = self.first(positions)
        return float((chances * (1 - chances)).sum(axis=1).mean() + chances.sum(axis=1).var())

    def pmf(self, positions: int) -> Floats:
        if not positions:
            return np.ones(1)
        laws = [ByPosition(record).pmf(positions) for record in self.first(positions)]
        return np.asarray(np.mean(laws, axis=0))

    def sample(self, draws: Iterator[Floats]) -> Iterator[Bools]:
        chosen, start = None, 0
        for tile in draws:
            draw = tile
            if chosen is None:
                # The record's index and the remainder within its share of [0, 1) are independent and uniform.
                chosen = (tile[0] * len(self.records)).astype(np.intp)
                draw = np.concatenate([tile[:1] * len(self.records) - chosen, tile[1:]])
            self.first(start + len(tile))
            yield draw < self.records[chosen, start : start + len(tile)].T
            start += len(tile)

    def first(self, positions: int) -> Floats:
        """Records at the first `positions` positions, shape (sequences, positions)."""
        if positions > self.records.shape[1]:
            raise checks.ParameterError(
                f"records must cover {positions} output positions, got {self.records.shape[1]}; give longer records or fewer tokens"
            )
        return np.asarray(self.records[:, :positions])


class TwoClass:
    """Low confidence of a draft model in a drafted token, with different probabilities for accepted and rejected tokens.

    Confidence is low with probability `low_if_accepted` for a token that would be accepted and `low_if_rejected` otherwise; tokens
    after a rejected token are rejected. One random number per position decides both cases.

    >>> [tile.tolist() for tile in TwoClass(0.1, 0.6).sample(iter([np.array([[0.05, 0.3, 0.7]])]))]
    [[[3, 1, 0]]]
    """

    def __init__(self, low_if_accepted: float, low_if_rejected: float) -> None:
        checks.number("low_if_accepted", low_if_accepted, 0, 1)
        checks.number("low_if_rejected", low_if_rejected, 0, 1)
        self.low_if_accepted, self.low_if_rejected = float(low_if_accepted), float(low_if_rejected)

    def sample(self, draws: Iterator[Floats]) -> Iterator[NDArray[np.uint8]]:
        """Yield tiles of codes: 1 if confidence is low in a rejected token, plus 2 if it is low in an accepted token."""
        for tile in draws:
            yield (tile < self.low_if_rejected) + np.uint8(2) * (tile < self.low_if_accepted)
