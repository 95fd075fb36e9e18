"""Laws of ranks by output position: which of the draft's likeliest tokens there is the target's token.

Rank r means that the target's token is the r-th likeliest of the draft, 0 that it is none of the ranks that the law knows. In
greedy decoding the drafted token is the likeliest, so that rank 1 is its acceptance, and a rejected token has rank 2, 3, ... or 0.
Ranks are given that all tokens before are right, and are independent by position. One random number decides the rank of a
position: the lower it is, the likelier the token, so that a law with higher rates never has a worse rank.

Ranks of trees (`model.outcomes.rank_laws`) are drawn for a draft, by the position where it starts and by depth. Here a position has
one rank wherever rounds begin, so that methods whose rounds begin at different positions have the same outcomes. With equal rates
at every depth a round of either law accepts as many tokens with the same probability.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]
Ranks = NDArray[np.uint16]
"""Ranks, shape (positions, replications)."""
MAX_RANK = 1000
"""Largest rank that a law knows."""


class PositionRanks(ABC):
    """Law of ranks by output position."""

    @abstractmethod
    def sample(self, draws: Iterator[Floats]) -> Iterator[Ranks]:
        """Yield tiles of ranks from tiles of uniform random numbers."""

    @abstractmethod
    def tables(self, positions: int) -> list[Floats]:
        """Equally likely tables of the probabilities of ranks 1, 2, ... at each position, each of shape (positions, ranks)."""


class PositionRankRates(PositionRanks):
    """Independent ranks with the same probabilities `rates` of ranks 1, 2, ... at every position; with the rest the rank is 0.

    >>> law = PositionRankRates([0.5, 0.25])
    >>> next(law.sample(iter([np.array([[0.1, 0.5, 0.75]])]))).tolist()
    [[1, 2, 0]]
    """

    def __init__(self, rates: ArrayLike, *, name: str = "rank_rates") -> None:
        self.rates = checks.array(name, rates, 0, 1)
        if self.rates.ndim != 1 or not 1 <= self.rates.size <= MAX_RANK or self.rates.sum() > 1 + 1e-9:
            raise checks.ParameterError(
                f"{name} must be 1 to {MAX_RANK} probabilities of ranks 1, 2, ... that sum to at most 1, got"
                f" {checks.shown(self.rates.tolist())}"
            )

    @classmethod
    def power_law(cls, acceptance_rate: float, exponent: float, ranks: int) -> PositionRankRates:
        """Law in which the token is none of the first F with probability (1 - `acceptance_rate`) F^-`exponent`, for F >= 1.

        >>> PositionRankRates.power_law(0.75, 1.0, 4).rates.round(4).tolist()
        [0.75, 0.125, 0.0417, 0.0208]
        """
        checks.number("acceptance_rate", acceptance_rate, 0, 1)
        checks.number("exponent", exponent, 0)
        missed = (1 - acceptance_rate) * np.arange(1.0, ranks + 1) ** -exponent
        return cls(np.append(acceptance_rate, missed[:-1] - missed[1:]))

    def sample(self, draws: Iterator[Floats]) -> Iterator[Ranks]:
        """Yield tiles of ranks."""
        until = np.cumsum(self.rates)
        names = np.append(np.arange(1, until.size + 1), 0).astype(np.uint16)
        for tile in draws:
            yield names[np.searchsorted(until, tile, side="right")]

    def tables(self, positions: int) -> list[Floats]:
        """The only table."""
        return [np.broadcast_to(self.rates, (positions, self.rates.size))]


class RecordedPositionRanks(PositionRanks):
    """Recorded ranks; a replication is one of the records, drawn uniformly with its first random number.

    `records` has shape (records, positions); 0: none of the ranks that were recorded.

    >>> RecordedPositionRanks([[1, 2]]).tables(2)[0].tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """

    def __init__(self, records: ArrayLike | Sequence[Sequence[int]]) -> None:
        values = checks.whole_array("records", records, 0)
        if values.ndim != 2 or not values.size or values.max() > MAX_RANK:
            raise checks.ParameterError(f"records must be lists of ranks from 0 to {MAX_RANK}, all of one length of at least 1")
        self.records = values.astype(np.uint16)

    def sample(self, draws: Iterator[Floats]) -> Iterator[Ranks]:
        """Yield tiles of ranks: those of the chosen records."""
        chosen, start = None, 0
        for tile in draws:
            if chosen is None:
                chosen = (tile[0] * len(self.records)).astype(np.intp)
            self._cover(start + len(tile))
            yield self.records[chosen, start : start + len(tile)].T
            start += len(tile)

    def tables(self, positions: int) -> list[Floats]:
        """One table for each record, with probabilities 0 and 1."""
        self._cover(positions)
        known = np.arange(1, int(self.records.max(initial=1)) + 1)
        return [(record[:positions, None] == known).astype(np.float64) for record in self.records]

    def _cover(self, positions: int) -> None:
        if positions > self.records.shape[1]:
            raise checks.ParameterError(
                f"records must cover {positions} output positions, got {self.records.shape[1]}; give longer records or fewer tokens"
            )
