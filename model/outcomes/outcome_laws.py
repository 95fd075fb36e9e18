"""Laws of outcomes: was the prediction right?

Most are laws of output positions: a `Law` holds the distribution of the number of successes, its mean and variance, and the
sampler, together, so that theory and simulation cannot drift apart. Drafts of several tokens may follow another kind, a law of
rounds (`model.methods.rounds`): how many tokens survive if a draft starts here. Both tell a draft how many of its tokens survive,
and are played with coins indexed by output position (`model.outcomes.random_streams`). A law does not know what its rate is a rate
of: whoever builds one may say by `name` what messages shall call it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Outcomes = Callable[[NDArray[np.uint8]], Bools]
"""Which of many replications accept the drafted token at a position, given its place in its draft (from 0), in each of them."""


class Law(ABC):
    """Successes and failures by output position 1, 2, 3, ..."""

    @abstractmethod
    def mean(self, positions: ArrayLike) -> Floats:
        """Expected number of successes among the first `positions` positions."""

    @abstractmethod
    def variance(self, positions: ArrayLike) -> Floats:
        """Variance of that number."""

    @abstractmethod
    def pmf(self, positions: int) -> Floats:
        """Probabilities of 0, 1, ..., `positions` successes among the first `positions`; shape (positions + 1,)."""

    @abstractmethod
    def sample(self, coins: Iterator[Floats]) -> Iterator[Bools]:
        """Tiles of outcomes, shape (positions in the tile, replications), from tiles of coins. The buffer may be used again."""


    def drafts(self, coins: Iterator[Floats]) -> Iterator[Outcomes]:
        """For each position, which drafted tokens are accepted there: here whatever their place in the draft."""
        for tile in self.sample(coins):
            for row in tile:
                yield _always(row)

    def survivors(self, coins: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """How many of at most `longest` tokens survive if a draft starts at each position; shape (positions, replications)."""
        found = np.concatenate([tile.astype(np.int64) for tile in self.sample(coins)])
        for here, after in zip(found[-2::-1], found[:0:-1], strict=True):
            here *= np.minimum(after + 1, longest)
        return found * (longest > 0)


def _always(row: Bools) -> Outcomes:
    return lambda _: row


class Chain(Law):
    """A law in which position j succeeds with a chance that depends on j and on whether j - 1 succeeded."""

    @abstractmethod
    def chances(self, positions: int) -> tuple[Floats, Floats]:
        """Chance of a success at each position after a failure and after a success, each of shape (positions,).

        The first position has nothing before it; both of its entries are its plain chance.
        """

    def draft_chances(self, positions: int, longest: int) -> tuple[Floats, Floats]:
        """As `chances`, for each place in a draft of at most `longest` and the one behind it: shape (positions, longest + 1)."""
        after_failure, after_success = self.chances(positions)
        shape = positions, longest + 1
        return np.broadcast_to(after_failure[:, None], shape), np.broadcast_to(after_success[:, None], shape)

    def pmf(self, positions: int) -> Floats:
        after_failure, after_success = self.chances(positions)
        # mass[s, n]: the chance of n successes so far, the last outcome being s.
        mass = np.zeros((2, positions + 1))
        mass[0, 0] = 1.0
        for low, high in zip(after_failure, after_success, strict=True):
            success = mass[0] * low + mass[1] * high
            mass[0] = mass[0] * (1 - low) + mass[1] * (1 - high)
            mass[1, 0], mass[1, 1:] = 0.0, success[:-1]
        return np.asarray(mass.sum(axis=0))


class Iid(Chain):
    """Every position succeeds with the same chance, independently: the assumption of the papers.

    `rate` may be an array; mean and variance then broadcast, and pmf and sampler are refused.

    >>> float(Iid(0.6837).mean(127)), Iid(0.5).pmf(2).round(12).tolist()
    (86.8299, [0.25, 0.5, 0.25])
    """

    def __init__(self, rate: ArrayLike, *, name: str = "rate") -> None:
        self.rate = checks.array(name, rate, 0, 1)

    def mean(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.asarray(positions) * self.rate)

    def variance(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.asarray(positions) * self.rate * (1 - self.rate))

    def chances(self, positions: int) -> tuple[Floats, Floats]:
        rates = np.full(positions, float(self.rate))
        return rates, rates

    def pmf(self, positions: int) -> Floats:
        from scipy.stats import binom  # costs a second to import, and only distributions need it

        return np.asarray(binom.pmf(np.arange(positions + 1), positions, float(self.rate)))

    def sample(self, coins: Iterator[Floats]) -> Iterator[Bools]:
        rate, buffer = float(self.rate), None
        for tile in coins:
            if buffer is None:
                buffer = np.empty(tile.shape, dtype=np.bool_)
            yield np.less(tile, rate, out=buffer[: len(tile)])


class ByPosition(Chain):
    """Position j succeeds with chance `rates[j]`, independently of the others.

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

    def chances(self, positions: int) -> tuple[Floats, Floats]:
        self._cover(positions)
        return self.rates[:positions], self.rates[:positions]

    def sample(self, coins: Iterator[Floats]) -> Iterator[Bools]:
        start = 0
        for tile in coins:
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
    """A stationary two-state chain over output positions: chance `rate`, correlation between neighbours `correlation`.

    After a success the next succeeds with chance p + rho (1 - p), after a failure with p (1 - rho). Both must lie in [0, 1], so
    rho >= -min(p / (1 - p), (1 - p) / p).

    >>> float(Markov(0.5, 0.0).variance(127)) == float(Iid(0.5).variance(127))
    True
    """

    def __init__(self, rate: ArrayLike, correlation: ArrayLike, *, name: str = "rate") -> None:
        self.rate = checks.array(name, rate, 0, 1)
        self.correlation = checks.array("correlation", correlation, -1, 1)
        self.after_failure = self.rate * (1 - self.correlation)
        self.after_success = self.rate + self.correlation * (1 - self.rate)
        # The bound itself is allowed, whichever way its rounding falls.
        if np.any(self.after_failure > 1 + 1e-12) or np.any(self.after_success < -1e-12):
            raise checks.ParameterError(
                f"correlation must be at least -min(p/(1-p), (1-p)/p) of {name} p={rate!r}, got {correlation!r}"
            )
        self.after_failure, self.after_success = np.minimum(self.after_failure, 1.0), np.maximum(self.after_success, 0.0)

    def mean(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.asarray(positions) * self.rate)

    def variance(self, positions: ArrayLike) -> Floats:
        """p(1-p) [n (1+rho)/(1-rho) - 2 rho (1-rho^n)/(1-rho)^2]; as rho goes to 1, p(1-p) n^2: all positions agree."""
        n, rho = np.asarray(positions, dtype=np.float64), self.correlation
        gap = 1 - rho
        # Near rho = 1 the two terms cancel; there the sum n + 2 sum (n - j) rho^j is expanded in the gap.
        near = n * gap < 1e-3
        far = np.where(near, 1.0, gap)
        spread = n * (1 + rho) / far - 2 * rho * (1 - rho**n) / far**2
        cube = n * (n * n - 1)
        close = n * n - gap * cube / 3 + gap**2 * cube * (n - 2) / 12
        return np.asarray(self.rate * (1 - self.rate) * np.where(near, close, spread))

    def chances(self, positions: int) -> tuple[Floats, Floats]:
        after_failure = np.full(positions, float(self.after_failure))
        after_success = np.full(positions, float(self.after_success))
        after_failure[:1] = after_success[:1] = float(self.rate)
        return after_failure, after_success

    def sample(self, coins: Iterator[Floats]) -> Iterator[Bools]:
        rate, low, high = float(self.rate), float(self.after_failure), float(self.after_success)
        last: Bools | None = None
        for tile in coins:
            outcomes = np.empty(tile.shape, dtype=np.bool_)
            for coin, outcome in zip(tile, outcomes, strict=True):
                np.less(coin, rate if last is None else np.where(last, high, low), out=outcome)
                last = outcome
            yield outcomes


class Replay(Law):
    """Recorded sequences of outcomes; a replication is one of them, drawn with equal chances by its first coin.

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

    def sample(self, coins: Iterator[Floats]) -> Iterator[Bools]:
        chosen, start = None, 0
        for tile in coins:
            if chosen is None:
                chosen = (tile[0] * len(self.records)).astype(np.intp)
            self._cover(start + len(tile))
            yield self.records[chosen, start : start + len(tile)].T
            start += len(tile)

    def first(self, positions: int) -> Bools:
        """The records of the first `positions` positions, shape (sequences, positions)."""
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


class ReplayChances(Law):
    """Recorded chances: a replication is one of the records, drawn by its first coin, with an independent coin for each position.

    `records` has shape (sequences, positions). It is what a log knows of drawn drafts: given the token that is put out, the chance
    that a drafted one was accepted there.

    >>> ReplayChances([[1.0, 0.5], [0.0, 0.5]]).pmf(2).tolist()
    [0.25, 0.5, 0.25]
    """

    def __init__(self, records: ArrayLike) -> None:
        self.records = checks.array("records", records, 0, 1)
        if self.records.ndim != 2 or not self.records.size:
            raise checks.ParameterError("records must be lists of chances, all of one length of at least 1")

    @property
    def chains(self) -> list[ByPosition]:
        """A record each, all equally likely."""
        return [ByPosition(record) for record in self.records]

    def mean(self, positions: ArrayLike) -> Floats:
        return np.asarray(np.vectorize(lambda n: self.first(n).sum(axis=1).mean(), otypes=[np.float64])(positions))

    def variance(self, positions: ArrayLike) -> Floats:
        """Within records, where positions are independent, and between them."""
        return np.asarray(np.vectorize(self._variance, otypes=[np.float64])(positions))

    def _variance(self, positions: int) -> float:
        chances = self.first(positions)
        return float((chances * (1 - chances)).sum(axis=1).mean() + chances.sum(axis=1).var())

    def pmf(self, positions: int) -> Floats:
        if not positions:
            return np.ones(1)
        laws = [ByPosition(record).pmf(positions) for record in self.first(positions)]
        return np.asarray(np.mean(laws, axis=0))

    def sample(self, coins: Iterator[Floats]) -> Iterator[Bools]:
        chosen, start = None, 0
        for tile in coins:
            coin = tile
            if chosen is None:
                # Which record it is and where in its share of the coin are independent, and both uniform.
                chosen = (tile[0] * len(self.records)).astype(np.intp)
                coin = np.concatenate([tile[:1] * len(self.records) - chosen, tile[1:]])
            self.first(start + len(tile))
            yield coin < self.records[chosen, start : start + len(tile)].T
            start += len(tile)

    def first(self, positions: int) -> Floats:
        """The records of the first `positions` positions, shape (sequences, positions)."""
        if positions > self.records.shape[1]:
            raise checks.ParameterError(
                f"records must cover {positions} output positions, got {self.records.shape[1]}; give longer records or fewer tokens"
            )
        return np.asarray(self.records[:, :positions])


class TwoClass:
    """How often a draft is unsure of a token: with chance `low_if_accepted` if it would be accepted, `low_if_rejected` if not.

    A token that follows a rejected one counts as rejected. One coin a position decides both, whichever is asked about.

    >>> [tile.tolist() for tile in TwoClass(0.1, 0.6).sample(iter([np.array([[0.05, 0.3, 0.7]])]))]
    [[[3, 1, 0]]]
    """

    def __init__(self, low_if_accepted: float, low_if_rejected: float) -> None:
        checks.number("low_if_accepted", low_if_accepted, 0, 1)
        checks.number("low_if_rejected", low_if_rejected, 0, 1)
        self.low_if_accepted, self.low_if_rejected = float(low_if_accepted), float(low_if_rejected)

    def sample(self, coins: Iterator[Floats]) -> Iterator[NDArray[np.uint8]]:
        """Tiles of doubts: 1 if the draft is unsure of the token if that is rejected, plus 2 if it is if that is accepted."""
        for tile in coins:
            yield (tile < self.low_if_rejected) + np.uint8(2) * (tile < self.low_if_accepted)
