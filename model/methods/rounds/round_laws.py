"""Laws of rounds: number of accepted tokens of a draft, by the position where it starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.outcomes.outcome_laws import Bools, Floats, Law, Outcomes

Bytes = NDArray[np.uint8]

class Rounds:
    """Independent rounds: at least j drafted tokens are accepted with probability `survival[j - 1]`.

    Covers rates by position in the draft (survival is their cumulative product), one rate drawn for each round (survival is its
    moments), and a histogram of accepted lengths. One random draw per round, at its first position.

    >>> law = Rounds.by_draft_position([0.8, 0.5])
    >>> law.survival.tolist()
    [0.8, 0.4]
    """

    def __init__(self, survival: ArrayLike) -> None:
        self.survival = checks.array("survival", survival, 0, 1)
        if self.survival.ndim != 1 or np.any(np.diff(self.survival) > 0):
            given = checks.shown(self.survival.tolist())
            raise checks.ParameterError(f"survival must be a list of non-increasing probabilities, got {given}")

    @classmethod
    def by_draft_position(cls, acceptance_rates: ArrayLike) -> Rounds:
        """Law in which the j-th drafted token is accepted with probability `acceptance_rates[j - 1]` if those before it were."""
        return cls(np.cumprod(checks.array("acceptance_rates", acceptance_rates, 0, 1)))

    @classmethod
    def each(cls, acceptance_rates: Floats) -> list[Rounds]:
        """`by_draft_position` for each of several lists of rates in [0, 1], shape (laws, positions).

        >>> [law.survival.tolist() for law in Rounds.each(np.array([[0.5, 0.5], [1.0, 0.0]]))]
        [[0.5, 0.25], [1.0, 0.0]]
        """
        survival = np.cumprod(acceptance_rates, axis=1)
        laws = [object.__new__(cls) for _ in survival]
        for law, own in zip(laws, survival, strict=True):
            law.survival = own
        return laws

    @classmethod
    def shared_rate(cls, acceptance_rate: float, concentration: float, longest: int) -> Rounds:
        """Law in which the rate of each round is drawn from a Beta distribution of this mean with a + b = `concentration`.

        E[B^j] is the product of (a + i)/(a + b + i) over i below j.

        >>> Rounds.shared_rate(0.8, 10, 2).survival.round(4).tolist()  # Beta(8, 2)
        [0.8, 0.6545]
        """
        checks.number("acceptance_rate", acceptance_rate, 0, 1)
        checks.number("concentration", concentration, 0)
        i = np.arange(longest)
        if concentration == 0:  # all or nothing
            return cls.by_draft_position(np.where(i == 0, acceptance_rate, 1.0))
        return cls.by_draft_position((acceptance_rate * concentration + i) / (concentration + i))

    def survivors(self, draws: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """Accepted tokens, at most `longest`, of a draft that starts at each position; shape (positions, replications)."""
        return np.concatenate([self._lengths(tile, longest) for tile in draws])

    def drafts(self, draws: Iterator[Floats]) -> Iterator[Outcomes]:
        """Acceptance of drafted tokens, position by position."""
        return _by_rounds(row for tile in draws for row in self._lengths(tile, len(self.survival)))

    def draft_probabilities(self, positions: int, longest: int) -> tuple[Floats, Floats]:
        """Acceptance probabilities by output position and position in the draft, after a rejection and after an acceptance.

        Both arrays are equal; shape (positions, longest + 1).
        """
        known = np.concatenate([[1.0], self.first(longest)])
        rates = np.zeros(longest + 1)  # the position after the draft is never tested
        np.divide(known[1:], known[:-1], out=rates[:longest], where=known[:-1] > 0)
        chances = np.broadcast_to(rates, (positions, longest + 1))
        return chances, chances

    def first(self, longest: int) -> Floats:
        """Survival of the first `longest` drafted tokens; raises ParameterError if it is not known for all of them."""
        self._cover(longest)
        return self.survival[:longest]

    def _lengths(self, tile: Floats, longest: int) -> NDArray[np.int64]:
        # Number of survival probabilities above the draw.
        return np.asarray(np.searchsorted(-self.survival[:longest], -tile, side="left"))

    def _cover(self, longest: int) -> None:
        if longest > len(self.survival):
            raise checks.ParameterError(
                f"acceptance must be known for each of draft_length={longest} positions in a draft, got {len(self.survival)}"
            )


class MixedRounds:
    """Sequences of several levels of difficulty: a sequence has level i with probability `weights[i]`, in all its rounds.

    Within a sequence rounds are independent (`levels`). Over all sequences the conditional rates never fall with the position in
    the draft, if those of each level do not: survivors are easier sequences. Rounds of one sequence are not independent.

    Parameters
    ----------
    levels
        Law of the rounds of each level.
    weights
        Share of sequences of each level; divided by their sum.

    >>> law = MixedRounds([Rounds.by_draft_position([0.9] * 3), Rounds.by_draft_position([0.5] * 3)], [1, 1])
    >>> law.conditional_rates().round(3).tolist()
    [0.7, 0.757, 0.806]
    >>> law.survivors(iter([np.array([[0.2, 0.7], [0.2, 0.2]])]), longest=3).tolist()  # the first: easy, with a draw of 0.4
    [[3, 1], [3, 2]]
    """

    def __init__(self, levels: Sequence[Rounds], weights: ArrayLike) -> None:
        self.levels = tuple(levels)
        given = checks.array("weights", weights, 0)
        if given.shape != (len(self.levels),) or not self.levels or not given.sum() > 0:
            raise checks.ParameterError(
                f"weights must have one share for each of {len(self.levels)} levels, not all 0, got {checks.shown(given.tolist())}"
            )
        if len({each.survival.size for each in self.levels}) > 1:
            sizes = [each.survival.size for each in self.levels]
            raise checks.ParameterError(f"levels must have rates for the same positions in a draft, got {sizes}")
        self.weights: tuple[float, ...] = tuple((given / given.sum()).tolist())

    @property
    def survival(self) -> Floats:
        """Probability, over all sequences, that at least 1, 2, ... tokens of a sequence's first draft are accepted."""
        return np.asarray(np.array(self.weights) @ np.array([each.survival for each in self.levels]))

    def conditional_rates(self) -> Floats:
        """Probability that the j-th token of a first draft is accepted if those before it were; 0 after a certain rejection."""
        known = np.concatenate([[1.0], self.survival])
        rates = np.zeros(known.size - 1)
        np.divide(known[1:], known[:-1], out=rates, where=known[:-1] > 0)
        return rates

    def survivors(self, draws: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """Accepted tokens, at most `longest`, of a draft that starts at each position; shape (positions, replications)."""
        return np.concatenate([self._lengths(level, tile, longest) for level, tile in self._levels(draws)])

    def drafts(self, draws: Iterator[Floats]) -> Iterator[Outcomes]:
        """Acceptance of drafted tokens, position by position."""
        most = self.levels[0].survival.size
        return _by_rounds(row for level, tile in self._levels(draws) for row in self._lengths(level, tile, most))

    def _levels(self, draws: Iterator[Floats]) -> Iterator[tuple[NDArray[np.intp], Floats]]:
        """Level of each replication, chosen by its first draw, and the draws of each tile: the rest of the first one's is used."""
        ends = np.cumsum(self.weights)
        ends[-1] = 1.0
        begins = np.concatenate([[0.0], ends[:-1]])
        level: NDArray[np.intp] | None = None
        for tile in draws:
            if level is None:
                level = np.searchsorted(ends, tile[0], side="right")
                tile = tile.copy()
                tile[0] = np.minimum((tile[0] - begins[level]) / (ends - begins)[level], np.nextafter(1.0, 0.0))
            yield level, tile

    def _lengths(self, level: NDArray[np.intp], tile: Floats, longest: int) -> NDArray[np.int64]:
        # Number of survival probabilities above the draw, as of one level.
        found = np.zeros(tile.shape, dtype=np.uint16)
        for chances in np.array([each.survival[:longest] for each in self.levels]).T:
            found += tile < chances[level]
        return found.astype(np.int64)


class ReplayRounds:
    """Recorded rounds: in record i, `records[i, j]` tokens are accepted of a draft that starts at position j.

    A replication is one of the records, chosen uniformly by its first random draw.

    >>> law = ReplayRounds([[2, 0, 1], [3, 2, 1]])
    >>> law.survivors(iter([np.array([[0.2, 0.7], [0.0, 0.0]])]), longest=2).tolist()
    [[2, 2], [0, 2]]
    """

    def __init__(self, records: ArrayLike) -> None:
        values = checks.whole_array("records", records, 0)
        if values.ndim != 2 or not values.size:
            raise checks.ParameterError("records must be lists of accepted lengths, all of one length of at least 1")
        self.records = values.astype(np.int64)

    @property
    def count(self) -> int:
        """Number of equally likely records."""
        return len(self.records)

    def survivors(self, draws: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """Accepted tokens, at most `longest`, of a draft that starts at each position; shape (positions, replications)."""
        return np.asarray(np.minimum(np.array(list(self._rows(draws))), longest))

    def drafts(self, draws: Iterator[Floats]) -> Iterator[Outcomes]:
        """Acceptance of drafted tokens, position by position."""
        return _by_rounds(self._rows(draws))

    def _rows(self, draws: Iterator[Floats]) -> Iterator[NDArray[np.int64]]:
        chosen, position = None, 0
        for tile in draws:
            if chosen is None:
                chosen = (tile[0] * len(self.records)).astype(np.intp)
            for _ in tile:
                if position == self.records.shape[1]:
                    raise checks.ParameterError(f"records must cover more than {position} output positions; take fewer tokens")
                yield self.records[chosen, position]
                position += 1


def _by_rounds(lengths: Iterable[NDArray[np.int64]]) -> Iterator[Outcomes]:
    """Outcomes from accepted lengths by start position: each replication keeps the length of its current round."""
    current: NDArray[np.int64] | None = None
    for here in lengths:

        def outcome(phase: Bytes, here: NDArray[np.int64] = here) -> Bools:
            nonlocal current
            current = here if current is None else np.where(phase == 0, here, current)
            return np.asarray(phase < current)

        yield outcome


class ReplayLog(ReplayRounds):
    """A replayed log: its sequences in cyclic order, each round cut at the end of its sequence.

    A replication begins with a sequence that is chosen uniformly by its first random draw. A decoding of as many tokens as the log
    has repeats exactly the log's rounds.

    >>> law = ReplayLog([[2, 0], [1, 9, 0]])  # accepted lengths are cut: no draft goes beyond its sequence
    >>> law.survivors(iter([np.array([[0.2, 0.7]] * 5)]), longest=3).tolist()
    [[1, 1], [0, 1], [1, 0], [1, 1], [0, 0]]
    """

    def __init__(self, sequences: Sequence[ArrayLike]) -> None:
        held = [checks.whole_array(f"sequences[{index}]", each, 0) for index, each in enumerate(sequences)]
        if not held or not all(each.ndim == 1 and each.size for each in held):
            raise checks.ParameterError("sequences must be lists of accepted lengths, each of at least one")
        remaining = [np.arange(each.size - 1, -1, -1) for each in held]
        self.line = np.concatenate([np.minimum(each, most) for each, most in zip(held, remaining, strict=True)]).astype(np.int64)
        self.begins = np.cumsum([0, *(each.size for each in held[:-1])])

    @property
    def count(self) -> int:
        """Number of equally likely first sequences."""
        return len(self.begins)

    @cached_property
    def records(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Complete cycle from each sequence on; shape (sequences, positions of the log)."""
        return np.stack([np.roll(self.line, -begin) for begin in self.begins])

    def _rows(self, draws: Iterator[Floats]) -> Iterator[NDArray[np.int64]]:
        at: NDArray[np.intp] | None = None
        for tile in draws:
            if at is None:
                at = self.begins[(tile[0] * self.count).astype(np.intp)]
            for _ in tile:
                yield self.line[at]
                at = (at + 1) % self.line.size


RoundLaw = Rounds | MixedRounds | ReplayRounds
AcceptanceLaw = Law | RoundLaw
