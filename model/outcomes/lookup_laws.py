"""Laws of lookups in a text: how many tokens a lookup drafts, and how many of them are accepted, by output position.

A lookup finds a match or none, so that the number of drafted tokens is random, and known before the pass that verifies them. Longer
matches draft more and survive longer: a law gives the probability of each kind of match, the tokens that it drafts, and the
probability that at least j of them are accepted. A text repeats itself in stretches: the probabilities may differ for a lookup
after a round that accepted a drafted token. The first lookup counts as after a round that accepted none.

A lookup is random by output position (`model.outcomes.random_streams`): only those positions at which a round begins are used.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from functools import cached_property
from operator import attrgetter
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
_BITS = 10
MOST = (1 << _BITS) - 1
"""Largest number of drafted tokens."""


class LookupDraft(NamedTuple):
    """Drafted tokens of a lookup, and how many of them are accepted."""

    drafted: int
    accepted: int


def draft_of(number: int, accepted: bool) -> tuple[int, int]:
    """Drafted and accepted tokens of one packed outcome, where the round before accepted drafted tokens or none.

    >>> draft_of(LookupOutcome(LookupDraft(4, 1), LookupDraft(5, 3)).packed, True)
    (5, 3)
    """
    own = number if accepted else number >> 2 * _BITS
    return own >> _BITS & MOST, own & MOST


class LookupOutcome(NamedTuple):
    """Outcomes of a lookup at a position: after a round that accepted no drafted token, and after one that accepted some.

    They are drawn with one random number, and held as one whole number, which arrays of outcomes hold too.
    """

    usual: LookupDraft
    repeating: LookupDraft

    @property
    def packed(self) -> int:
        """The outcomes as one whole number."""
        return int(packed(*self.usual, *self.repeating))


def packed(*parts: ArrayLike) -> Integers:
    """Four arrays of drafted and accepted tokens, the usual ones first, as one array of whole numbers."""
    found = np.zeros((), dtype=np.int64)
    for part in parts:
        found = found << _BITS | np.asarray(part, dtype=np.int64)
    return np.asarray(found)


def outcomes_after(accepted: NDArray[np.bool_], numbers: Integers) -> tuple[Integers, Integers]:
    """Drafted and accepted tokens of packed outcomes, where the round before `accepted` drafted tokens or none."""
    own = numbers >> np.where(accepted, 0, 2 * _BITS)
    return own >> _BITS & MOST, own & MOST


class LookupCells(NamedTuple):
    """The possible outcomes of a lookup: drafted and accepted tokens, and their probabilities; all but `chance` have one axis."""

    drafted: Integers
    accepted: Integers
    chance: Floats
    """Shape (2, cells): after a round that accepted no drafted token, and after one that accepted some."""


class LookupLaw(ABC):
    """Law of lookups."""

    @abstractmethod
    def sample(self, draws: Iterator[Floats]) -> Iterator[Integers]:
        """Yield tiles of packed outcomes, shape (positions, replications), from tiles of uniform random numbers."""


class Lookups(LookupLaw):
    """Independent lookups, except that they may depend on whether the round before accepted a drafted token.

    Parameters
    ----------
    chances
        Probability of each kind of match, shape (kinds,), or (2, kinds) with index 1 after a round that accepted drafted tokens.
        With the rest of the probability there is no match.
    drafted
        Tokens that each kind drafts, at least 1.
    survival
        For each kind, the probabilities that at least 1, 2, ..., `drafted` of them are accepted.

    >>> law = Lookups([0.5], [2], [[0.8, 0.4]])
    >>> law.cells.drafted.tolist(), law.cells.accepted.tolist(), law.cells.chance[0].round(3).tolist()
    ([2, 2, 2, 0], [2, 1, 0, 0], [0.2, 0.2, 0.1, 0.5])
    """

    def __init__(self, chances: ArrayLike, drafted: Sequence[int], survival: Sequence[ArrayLike]) -> None:
        given = checks.array("chances", chances, 0, 1)
        self.chances = np.atleast_2d(given)
        if self.chances.shape not in ((1, len(drafted)), (2, len(drafted))) or len(survival) != len(drafted):
            raise checks.ParameterError(
                f"chances, drafted and survival must have one entry for each kind of match, got {self.chances.shape[-1]},"
                f" {len(drafted)} and {len(survival)}"
            )
        if (self.chances.sum(axis=1) > 1 + 1e-9).any():
            raise checks.ParameterError(f"chances must sum to at most 1, got {self.chances.sum(axis=1).max():g}")
        self.drafted = [int(each) for each in _counts("drafted", drafted, 1)]
        self.survival = [checks.array(f"survival[{index}]", each, 0, 1) for index, each in enumerate(survival)]
        for index, (count, each) in enumerate(zip(self.drafted, self.survival, strict=True)):
            if each.shape != (count,) or np.any(np.diff(each) > 0):
                raise checks.ParameterError(
                    f"survival[{index}] must be {count} non-increasing probabilities, one for each drafted token, got"
                    f" {checks.shown(each.tolist())}"
                )

    @classmethod
    def of_rates(cls, hit_rate: ArrayLike, acceptance_rate: float, drafted: int) -> Lookups:
        """Law in which every match drafts as many tokens, each accepted with one rate if those before it were.

        `hit_rate` is the probability of a match, or two of them: after a round without accepted tokens, and after one with some.

        >>> Lookups.of_rates(0.5, 0.5, 2).cells.chance[0].tolist()  # 2, 1, 0 accepted tokens, no match
        [0.125, 0.125, 0.25, 0.5]
        """
        chances = checks.array("hit_rate", hit_rate, 0, 1)
        checks.number("acceptance_rate", acceptance_rate, 0, 1)
        return cls(chances[..., None], [drafted], [acceptance_rate ** np.arange(1.0, drafted + 1)])

    @classmethod
    def each(cls, hit_rates: Floats, acceptance_rates: Floats, drafted: int) -> list[Lookups]:
        """`of_rates` for each pair of these rates in [0, 1], of shape (laws,), with its cells; computed together.

        >>> [law.cells.chance[0].tolist() for law in Lookups.each(np.array([0.5, 1.0]), np.array([0.5, 0.0]), 1)]
        [[0.25, 0.25, 0.5], [0.0, 1.0, 0.0]]
        """
        survival = acceptance_rates[:, None] ** np.arange(1.0, drafted + 1)
        ends = np.pad(survival, ((0, 0), (1, 0)), constant_values=1.0) - np.pad(survival, ((0, 0), (0, 1)))
        mass = np.concatenate([hit_rates[:, None] * ends[:, ::-1], 1 - hit_rates[:, None]], axis=1)
        cells = LookupCells(
            np.append(np.full(drafted + 1, drafted), 0), np.append(np.arange(drafted, -1, -1), 0),
            np.broadcast_to(mass[:, None], (len(mass), 2, drafted + 2)),
        )  # fmt: skip
        table = _LookupTable(hit_rates[:, None, None], drafted, survival, cells)
        return [_LookupsOfTable(table, row) for row in range(len(mass))]

    @property
    def outcomes(self) -> tuple[bytes, bytes]:
        """The numbers of tokens of the cells, to compare them with those of other laws."""
        return self.cells.drafted.tobytes(), self.cells.accepted.tobytes()

    @property
    def alike(self) -> bool:
        """True if lookups do not depend on the round before."""
        return len(self.chances) == 1 or np.array_equal(*self.chances)

    @cached_property
    def cells(self) -> LookupCells:
        """The possible outcomes, those with more accepted tokens first."""
        found: dict[tuple[int, int], Floats] = {(0, 0): 1 - self.chances.sum(axis=1).clip(0, 1)}
        for chance, drafted, survival in zip(self.chances.T, self.drafted, self.survival, strict=True):
            ends = np.append(1.0, survival) - np.append(survival, 0.0)
            for accepted, share in enumerate(ends.tolist()):
                found[accepted, drafted] = found.get((accepted, drafted), 0.0) + chance * share
        order = sorted(found, reverse=True)
        accepted, counts = np.array(order, dtype=np.int64).T
        mass = np.stack([found[each] for each in order], axis=1)
        return LookupCells(counts, accepted, np.broadcast_to(mass, (2, len(order))))

    def sample(self, draws: Iterator[Floats]) -> Iterator[Integers]:
        """Yield tiles of packed outcomes.

        The smaller the random number, the more tokens are accepted: a higher rate of acceptance can only turn rejections into
        acceptances (common random numbers).
        """
        drafted, accepted, chance = self.cells
        until = np.cumsum(chance, axis=1)[:, :-1]
        if self.alike:
            each = packed(drafted, accepted, drafted, accepted)
            for tile in draws:
                yield each[np.searchsorted(until[0], tile, side="right")]
            return
        usual, repeating = packed(drafted, accepted, 0, 0), packed(drafted, accepted)
        for tile in draws:
            first, second = (np.searchsorted(ends, tile, side="right") for ends in until)
            yield usual[first] | repeating[second]


class _LookupTable:
    """Laws of `Lookups.each`: chances and survival by law, and cells whose probabilities have a first axis of laws."""

    def __init__(self, chances: Floats, drafted: int, survival: Floats, cells: LookupCells) -> None:
        self.chances, self.drafted, self.survival, self.cells = chances, drafted, survival, cells
        self.outcomes = cells.drafted.tobytes(), cells.accepted.tobytes()


class _LookupsOfTable(Lookups):
    """One of the laws of a table, whose parts are made when they are read: thousands of laws are made in a few milliseconds."""

    def __init__(self, table: _LookupTable, row: int) -> None:
        self.table, self.row = table, row

    def __getattr__(self, name: str) -> Any:
        """Make what the law has of the table."""
        if name not in ("chances", "drafted", "survival"):
            raise AttributeError(name)
        self.chances, self.drafted, self.survival = (
            self.table.chances[self.row], [self.table.drafted], [self.table.survival[self.row]],
        )  # fmt: skip
        return self.__dict__[name]

    @property
    def alike(self) -> bool:
        """True: hit rates do not depend on the round before."""
        return True

    @property
    def outcomes(self) -> tuple[bytes, bytes]:
        """The numbers of tokens of the cells."""
        return self.table.outcomes

    @cached_property
    def cells(self) -> LookupCells:
        """The possible outcomes, those with more accepted tokens first."""
        return self.table.cells._replace(chance=self.table.cells.chance[self.row])


def chances_of(laws: Sequence[Lookups], before: int) -> Floats:
    """Probabilities of the cells after the first one, or both, of the outcomes before, of laws with the same outcomes.

    The shape is (laws, outcomes before, cells).

    >>> chances_of(Lookups.each(np.array([0.5, 1.0]), np.array([0.5, 0.0]), 1), 1).tolist()
    [[[0.25, 0.25, 0.5]], [[0.0, 1.0, 0.0]]]
    """
    table = _table_of(laws)
    if table is None:
        return np.array([law.cells.chance[:before] for law in laws])
    return np.asarray(table.cells.chance[list(map(_ROW, laws)), :before])


def same_outcomes(laws: Sequence[LookupLaw]) -> list[NDArray[np.intp]]:
    """Indices of the laws of one lookup after another, those with the same outcomes together.

    >>> laws = [*Lookups.each(np.array([0.5, 1.0]), np.array([0.5, 0.0]), 1), Lookups.of_rates(0.2, 0.3, 2)]
    >>> [each.tolist() for each in same_outcomes(laws)], [each.tolist() for each in same_outcomes(laws[:2])]
    ([[0, 1], [2]], [[0, 1]])
    """
    if _table_of(laws) is not None:
        return [np.arange(len(laws))]
    groups: dict[tuple[bytes, bytes], list[int]] = {}
    for number, law in enumerate(laws):
        if isinstance(law, Lookups):
            groups.setdefault(law.outcomes, []).append(number)
    return [np.array(each) for each in groups.values()]


def all_alike(laws: Sequence[Lookups]) -> bool:
    """True if the lookups of no law depend on the round before."""
    return _table_of(laws) is not None or all(law.alike for law in laws)


def _table_of(laws: Sequence[LookupLaw]) -> _LookupTable | None:
    """Table that all laws are of; None if there is none."""
    if set(map(type, laws)) != {_LookupsOfTable}:
        return None
    tables = set(map(_TABLE, laws))
    return tables.pop() if len(tables) == 1 else None


_ROW, _TABLE = attrgetter("row"), attrgetter("table")


class ReplayedLookups(LookupLaw):
    """Recorded lookups by output position; a replication is one of the records, drawn uniformly with its first random number.

    `drafted` and `accepted` have shape (records, positions). What a lookup finds depends on the text before it alone, so that a
    record replays every decoding of its text exactly.
    """

    def __init__(self, drafted: ArrayLike, accepted: ArrayLike) -> None:
        self.drafted, self.accepted = _counts("drafted", drafted), _counts("accepted", accepted)
        if self.drafted.ndim != 2 or not self.drafted.size or self.drafted.shape != self.accepted.shape:
            raise checks.ParameterError("drafted and accepted must be lists of lists of numbers, all of one length of at least 1")
        if (self.accepted > self.drafted).any():
            raise checks.ParameterError("accepted must be at most drafted, of every lookup")

    def sample(self, draws: Iterator[Floats]) -> Iterator[Integers]:
        """Yield tiles of packed outcomes: those of the chosen records."""
        records = packed(self.drafted, self.accepted, self.drafted, self.accepted)
        chosen, start = None, 0
        for tile in draws:
            if chosen is None:
                chosen = (tile[0] * len(records)).astype(np.intp)
            if start + len(tile) > records.shape[1]:
                raise checks.ParameterError(
                    f"records must cover {start + len(tile)} output positions, got {records.shape[1]}; give longer records or fewer"
                    " tokens"
                )
            yield records[chosen, start : start + len(tile)].T
            start += len(tile)


def _counts(name: str, values: ArrayLike, low: int = 0) -> Integers:
    checks.array(name, values, low, MOST)
    return checks.whole_array(name, values, low).astype(np.int64)
