"""Laws of ranks: which of the draft's candidates is the target's token, by depth of a draft that starts at an output position.

Rank r means that the target's token is candidate number r of the draft, 0 that it is none of them. The rank at depth i + 1 matters
only if the tokens before it are right, and its probabilities `rates[i]` are given that. A draft may belong to one of several
classes of confidence, each with its own rates.

One random number, that of the position where a draft starts, decides its class and all its ranks: the ranks of a path are an
interval of [0, 1), of which the first candidates have the lowest part. With one candidate at each depth this is the law of rounds
by position in the draft (`model.methods.rounds.round_laws.Rounds`), draw by draw.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]
Ranks = NDArray[np.uint16]
"""Outcomes of drafts, shape (positions, 1 + depth, replications): the class of confidence, then the rank at each depth."""

_ROWS = 4
"""Positions whose ranks are drawn together: their numbers stay in the processor's cache."""


class RankLaw(ABC):
    """Law of ranks."""

    @property
    @abstractmethod
    def depth(self) -> int:
        """Largest depth whose ranks are known."""

    @property
    @abstractmethod
    def classes(self) -> int:
        """Number of classes of confidence."""

    @abstractmethod
    def sample(self, draws: Iterator[Floats]) -> Iterator[Ranks]:
        """Yield tiles of outcomes from tiles of uniform random numbers; tiles may share one buffer."""


class RankRates(RankLaw):
    """Independent drafts with rank rates; with several classes, each draft or each sequence belongs to one of them.

    Parameters
    ----------
    rates
        For each class the probability of rank 1, 2, ... at depth 1, 2, ...; all classes have the same depth.
    weights
        Share of each class; divided by their sum. Default: equal shares.
    by_sequence
        True if a sequence belongs to a class, with all its drafts: easy and hard ones. Else each draft has its own.

    >>> law = RankRates([[[0.6, 0.2], [0.5]]])
    >>> tile = next(law.sample(iter([np.array([[0.0, 0.29, 0.3, 0.7, 0.9]])])))
    >>> tile[0, 1:].tolist()  # both right with .6 * .5, then the first one, then the second candidate, whose next is right, ...
    [[1, 1, 1, 2, 0], [1, 1, 0, 0, 0]]
    """

    def __init__(
        self, rates: Sequence[Sequence[ArrayLike]], weights: ArrayLike | None = None, *, by_sequence: bool = False
    ) -> None:
        self.rates = tuple([
            tuple([checks.array(f"rates[{each}][{depth}]", row, 0, 1) for depth, row in enumerate(table)])
            for each, table in enumerate(rates)
        ])  # fmt: skip
        if not self.rates or not self.rates[0] or len({len(table) for table in self.rates}) > 1:
            raise checks.ParameterError(
                f"rates must be tables of one depth of at least 1 for each class, got depths {[len(table) for table in self.rates]}"
            )
        for each, table in enumerate(self.rates):
            for depth, row in enumerate(table):
                if row.ndim != 1 or not row.size or row.sum() > 1 + 1e-9:
                    raise checks.ParameterError(
                        f"rates[{each}][{depth}] must be a list of rates that sum to at most 1, got {checks.shown(row.tolist())}"
                    )
        given = np.ones(len(self.rates)) if weights is None else checks.array("weights", weights, 0)
        if given.shape != (len(self.rates),) or not given.sum() > 0:
            raise checks.ParameterError(
                f"weights must have one share for each of {len(self.rates)} classes, not all 0, got {checks.shown(given.tolist())}"
            )
        self.weights: tuple[float, ...] = tuple((given / given.sum()).tolist())
        self.by_sequence = by_sequence
        self._key = [[row.tobytes() for row in table] for table in self.rates], self.weights, by_sequence
        self._hash = hash((self.rates[0][0].tobytes(), self.weights, by_sequence))

    def __eq__(self, other: object) -> bool:
        """True for a law of the same rates and weights: what is kept of one is that of the other."""
        return isinstance(other, RankRates) and self._key == other._key

    def __hash__(self) -> int:
        return self._hash

    @property
    def depth(self) -> int:
        """Largest depth whose ranks are known."""
        return len(self.rates[0])

    @property
    def classes(self) -> int:
        """Number of classes of confidence."""
        return len(self.rates)

    @property
    def ranks(self) -> int:
        """Largest rank."""
        return max(row.size for table in self.rates for row in table)

    def of_class(self, index: int) -> RankRates:
        """Law of the drafts of one class."""
        return RankRates([self.rates[index]])

    def sample(self, draws: Iterator[Floats]) -> Iterator[Ranks]:
        """Yield tiles of outcomes from tiles of uniform random numbers."""
        ends = np.cumsum(self.weights)
        ends[-1] = 1.0
        begins = np.concatenate([[0.0], ends[:-1]])
        buffer: Ranks | None = None
        own: NDArray[np.intp] | None = None
        for tile in draws:
            if buffer is None:
                buffer = np.empty((tile.shape[0], 1 + self.depth, tile.shape[1]), dtype=np.uint16)
            if self.by_sequence and own is None:
                own = np.searchsorted(ends, tile[0], side="right")
                tile = tile.copy()
                tile[0] = np.minimum((tile[0] - begins[own]) / (ends - begins)[own], np.nextafter(1.0, 0.0))
            for first in range(0, len(tile), _ROWS):
                rows = tile[first : first + _ROWS]
                self._draw(rows, buffer[first : first + len(rows)], begins, ends, own)
            yield buffer[: len(tile)]

    def _draw(self, tile: Floats, into: Ranks, begins: Floats, ends: Floats, own: NDArray[np.intp] | None) -> None:
        """Fill in the outcomes of a few positions."""
        draw = tile.reshape(-1)
        if self.classes == 1:
            into[:, 0] = 0
            into[:, 1:] = self._ranks(self.rates[0], draw, np.zeros(1), np.ones(1)).reshape(self.depth, *tile.shape).swapaxes(0, 1)
            return
        which = np.searchsorted(ends, tile, side="right") if own is None else np.broadcast_to(own, tile.shape)
        into[:, 0] = which
        found = np.empty((self.depth, draw.size), dtype=np.uint16)
        for each, table in enumerate(self.rates):
            mine = np.flatnonzero(which.reshape(-1) == each)
            low, size = (0.0, 1.0) if own is not None else (begins[each], ends[each] - begins[each])
            found[:, mine] = self._ranks(table, draw[mine], np.array([low]), np.array([size]))
        into[:, 1:] = found.reshape(self.depth, *tile.shape).swapaxes(0, 1)

    def _ranks(self, table: Sequence[Floats], draw: Floats, low: Floats, size: Floats) -> Ranks:
        """Ranks by depth of drafts whose draws are in [low, low + size); shape (depth, draws)."""
        found = np.zeros((len(table), draw.size), dtype=np.uint16)
        alive: NDArray[np.intp] | None = None
        for depth, row in enumerate(table):
            edges = np.concatenate([[0.0], np.cumsum(row), [np.inf]])
            rank = np.searchsorted(edges[1:-1], (draw - low) / size, side="right")
            begin, end = low + size * edges[rank], low + size * edges[rank + 1]
            wrong = (draw < begin) | (draw >= end)
            if wrong.any():  # the quotient was rounded across a bound
                where = np.flatnonzero(wrong)
                starts, sizes = (each if each.size == 1 else each[where] for each in (low, size))
                rank[where] = sum((draw[where] >= starts + sizes * bound).astype(np.intp) for bound in edges[1:-1])
                begin[where] = starts + sizes * edges[rank[where]]
            right = np.flatnonzero(rank < row.size)
            alive = right if alive is None else alive[right]
            rank = rank[right]
            found[depth, alive] = rank + 1
            if not right.size:
                break
            draw, low = draw[right], begin[right]
            size = (size if size.size == 1 else size[right]) * row[rank]
        return found


class ReplayedRanks(RankLaw):
    """Recorded ranks by output position: in record i, `records[i, d, j]` is the rank at depth d + 1 of a draft that starts at j.

    A replication is one of the records, chosen uniformly by its first random draw. All drafts are of one class.

    >>> law = ReplayedRanks([[[2, 0, 1], [1, 1, 0]]])
    >>> next(law.sample(iter([np.zeros((2, 1))])))[:, :, 0].tolist()  # class, rank at depth 1, rank at depth 2
    [[0, 2, 1], [0, 0, 1]]
    """

    def __init__(self, records: ArrayLike) -> None:
        values = checks.whole_array("records", records, 0)
        if values.ndim != 3 or not values.size or values.max() > np.iinfo(np.uint16).max:
            raise checks.ParameterError("records must be lists of ranks by depth and position, all of one length of at least 1")
        self.records = values.astype(np.uint16)

    @property
    def depth(self) -> int:
        """Largest depth whose ranks are known."""
        return int(self.records.shape[1])

    @property
    def classes(self) -> int:
        """Number of classes of confidence."""
        return 1

    def sample(self, draws: Iterator[Floats]) -> Iterator[Ranks]:
        """Yield tiles of outcomes: those of the chosen records."""
        chosen, start = None, 0
        for tile in draws:
            if chosen is None:
                chosen = (tile[0] * len(self.records)).astype(np.intp)
            end = start + len(tile)
            if end > self.records.shape[2]:
                raise checks.ParameterError(
                    f"records must cover {end} output positions, got {self.records.shape[2]}; give longer records or fewer tokens"
                )
            found = np.zeros((len(tile), 1 + self.depth, tile.shape[1]), dtype=np.uint16)
            found[:, 1:] = self.records[chosen][:, :, start:end].transpose(2, 1, 0)
            yield found
            start = end
