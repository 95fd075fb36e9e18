"""Decision records of two models, and the rates that follow for the thresholds of Big Little Decoder [Kim2023].

A decision record has, for each token that the small model proposes, its largest probability (`confidence`) and the large model's
cross-entropy of the token (`distance` [nats]): Sections 3.3 and 3.4 of [Kim2023]. The small model falls back if its confidence is
below `fallback_threshold`; a drafted token is rolled back if its distance is above `rollback_threshold`. So one record gives the
rates for every pair of thresholds. This ignores that thresholds change the generated text, and so the later records.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.interpret.simulated_answers import UNLIKELY, UNSURE
from model.methods.bild.algorithm import VARIANTS

Floats = NDArray[np.float64]
Digits = NDArray[np.uint8]

COLUMNS = ("confidence", "distance", "agrees")


class ThresholdRates(NamedTuple):
    """Rates at given thresholds: arrays of the thresholds' shape; nan where no token is kept."""

    fallback_rate: Floats
    rollback_rate: Floats
    agreement_kept: Floats
    """Share of the accepted tokens of the small model that the large model would have generated itself."""


@dataclass(frozen=True, eq=False)
class Decisions:
    """A decision record: values for each token, and their source.

    `agrees`: the token is also the large model's most likely token. `source` begins with `measured` or `assumed` and describes the
    origin.

    >>> record = Decisions([0.9, 0.4, 0.8, 0.7], [0.1, 3.0, 2.5, 0.2], [True, False, False, True], "assumed: by hand")
    >>> [round(float(value), 3) for value in record.rates(0.5, 2.0)]  # one of four falls back, one of three is rolled back
    [0.25, 0.333, 1.0]
    """

    confidence: Any
    distance: Any
    agrees: Any
    source: str

    def __post_init__(self) -> None:
        found = {
            "confidence": _column("confidence", self.confidence, 0, 1),
            "distance": _column("distance", self.distance, 0, np.inf),
            "agrees": _column("agrees", self.agrees, 0, 1),
        }
        sizes = {name: values.size for name, values in found.items()}
        if len(set(sizes.values())) > 1 or not sizes["confidence"]:
            listed = ", ".join(f"{name} {size}" for name, size in sizes.items())
            name, size = min(sizes.items(), key=lambda item: item[1])
            raise checks.ParameterError(
                f"columns must have one value for each token, at least one, got {listed}; {name} has none in row {size + 1}"
            )
        halves = np.flatnonzero((found["agrees"] != 0) & (found["agrees"] != 1))
        if halves.size:
            raise checks.ParameterError(f"agrees must be true or false, got {found['agrees'][halves[0]]:g} in row {halves[0] + 1}")
        for name, values in found.items():
            object.__setattr__(self, name, values.astype(np.bool_) if name == "agrees" else values)

    @classmethod
    def of_columns(cls, columns: Mapping[str, ArrayLike], source: str) -> Decisions:
        """Build a record from a table's columns; raise ParameterError for missing or unknown columns."""
        missing = [name for name in COLUMNS if name not in columns]
        if missing:
            raise checks.ParameterError(
                f"column {missing[0]} is missing; a decision record has {', '.join(COLUMNS)}, got {checks.shown([*columns])}"
            )
        unknown = [name for name in columns if name not in COLUMNS]
        if unknown:
            raise checks.unknown("column", unknown[0], COLUMNS)
        return cls(**columns, source=source)

    def rates(self, fallback_threshold: ArrayLike, rollback_threshold: ArrayLike, *, variant: str = "paper") -> ThresholdRates:
        """Rates at these thresholds; in the variant `code` a rollback also requires that the models disagree."""
        checks.one_of("variant", variant, VARIANTS)
        low = checks.array("fallback_threshold", fallback_threshold, 0)
        # A threshold of infinity is equivalent to the largest finite number.
        high = checks.array("rollback_threshold", np.minimum(rollback_threshold, np.finfo(np.float64).max), 0)
        low, high = np.broadcast_arrays(low, high)
        found = np.array([self._rates(*pair, variant) for pair in zip(low.ravel(), high.ravel(), strict=True)]).reshape(low.size, 3)
        return ThresholdRates(*(column.reshape(low.shape) for column in found.T))

    def _rates(self, low: float, high: float, variant: str) -> tuple[float, float, float]:
        written = self.confidence >= low
        back = written & (self.distance > high)
        if variant == "code":
            back &= ~self.agrees
        stays = written & ~back
        share = np.count_nonzero
        nan = float("nan")
        return (
            1 - share(written) / written.size,
            share(back) / share(written) if written.any() else nan,
            share(stays & self.agrees) / share(stays) if stays.any() else nan,
        )

    def decided(self, fallback_threshold: float, rollback_threshold: float, *, variant: str = "paper") -> Digits:
        """Decision for each token at these thresholds: 0, 1 or 2 as in `model.interpret.simulated_answers`.

        >>> record = Decisions([0.9, 0.4, 0.8], [0.1, 3.0, 2.5], [True, False, False], "assumed: by hand")
        >>> record.decided(0.5, 2.0).tolist()
        [0, 1, 2]
        """
        checks.one_of("variant", variant, VARIANTS)
        unsure = self.confidence < fallback_threshold
        back = self.distance > rollback_threshold
        if variant == "code":
            back = back & ~self.agrees
        return np.asarray(np.where(unsure, UNSURE, np.where(back, UNLIKELY, 0)), dtype=np.uint8)


class Independent:
    """Independent decisions: at each output position a fallback with probability f, a rollback with probability (1 - f) r.

    One uniform draw per position: below f a fallback, up to f + (1 - f) r a rollback, above it the token is accepted.
    `fallback_rate` and `rollback_rate` are numbers, or lists with one value per position.

    >>> [tile.tolist() for tile in Independent(0.2, 0.5).sample(iter([np.array([[0.1, 0.5, 0.7]])]))]
    [[[1, 2, 0]]]
    """

    def __init__(self, fallback_rate: ArrayLike, rollback_rate: ArrayLike) -> None:
        self.fallback_rate = checks.array("fallback_rate", fallback_rate, 0, 1)
        self.rollback_rate = checks.array("rollback_rate", rollback_rate, 0, 1)
        for name, rates in (("fallback_rate", self.fallback_rate), ("rollback_rate", self.rollback_rate)):
            if rates.ndim > 1 or not rates.size:
                raise checks.ParameterError(f"{name} must be a number or a list of numbers, got {checks.shown(rates.tolist())}")

    @classmethod
    def each(cls, fallback_rates: ArrayLike, rollback_rates: ArrayLike) -> list[Self]:
        """Decisions with the same rates at every position, for each pair of rates; the rates are checked together.

        >>> [law.probabilities(1)[1].tolist() for law in Independent.each([0.2, 0.3], [0.5, 0.25])]
        [[0.5], [0.25]]
        """
        fallback = checks.array("fallback_rate", fallback_rates, 0, 1)
        rollback = checks.array("rollback_rate", rollback_rates, 0, 1)
        laws = [object.__new__(cls) for _ in range(fallback.size)]
        for law, one, other in zip(laws, fallback, rollback, strict=True):
            law.fallback_rate, law.rollback_rate = np.asarray(one), np.asarray(other)
        return laws

    @property
    def constant(self) -> bool:
        """True if all positions have the same rates."""
        return not self.fallback_rate.ndim and not self.rollback_rate.ndim

    def probabilities(self, positions: int) -> tuple[Floats, Floats]:
        """f and r at each position, each of shape (positions,)."""
        return self._first("fallback_rate", positions), self._first("rollback_rate", positions)

    def sample(self, draws: Iterator[Floats]) -> Iterator[Digits]:
        """Tiles of decisions, as in `model.interpret.simulated_answers`, from tiles of uniform draws."""
        start = 0
        for tile in draws:
            fallback, rollback = (rates[start:, None] for rates in self.probabilities(start + len(tile)))
            start += len(tile)
            unsure = tile < fallback
            back = ~unsure & (tile < fallback + (1 - fallback) * rollback)
            yield np.uint8(UNSURE) * unsure + np.uint8(UNLIKELY) * back

    def _first(self, name: str, positions: int) -> Floats:
        rates: Floats = getattr(self, name)
        if rates.ndim and len(rates) < positions:
            raise checks.ParameterError(
                f"{name} must have one rate for each of {positions} output positions, got {len(rates)}; give more or fewer tokens"
            )
        return np.asarray(np.broadcast_to(rates[:positions] if rates.ndim else rates, positions))


class RecordedDecisions:
    """Recorded decisions; a replication is one of the records, chosen uniformly by its first random draw.

    `records` has shape (sequences, positions) and holds 0, 1 and 2 as in `model.interpret.simulated_answers`.
    """

    def __init__(self, records: ArrayLike) -> None:
        values = checks.whole_array("records", checks.array("records", records, 0, 2), 0)
        if values.ndim != 2 or not values.size:
            raise checks.ParameterError("records must be lists of decisions, all of one length of at least 1")
        self.records: Digits = values.astype(np.uint8)

    def sample(self, draws: Iterator[Floats]) -> Iterator[Digits]:
        """Tiles of decisions from tiles of uniform draws."""
        chosen, start = None, 0
        for tile in draws:
            if chosen is None:
                chosen = (tile[0] * len(self.records)).astype(np.intp)
            self.cover(start + len(tile))
            yield self.records[chosen, start : start + len(tile)].T
            start += len(tile)

    def cover(self, positions: int) -> None:
        """Raise ParameterError for more positions than the records have."""
        if positions > self.records.shape[1]:
            raise checks.ParameterError(
                f"records must cover {positions} output positions, got {self.records.shape[1]}; give longer records or fewer tokens"
            )


DecisionLaw = Independent | RecordedDecisions


def synthetic(count: int, draws: ArrayLike, *, sureness: float = 3.0) -> Decisions:
    """An assumed record of a perfectly calibrated small model; `draws` are uniform, shape (3, count).

    Its confidence is c = u^(1/sureness), which is Beta(sureness, 1); it agrees with the large model with probability c. The large
    model's probability of the token is 1 - (1 - c) v if it agrees and (1 - c) v if not, v uniform. For figures and tests without
    measured records.

    >>> record = synthetic(2, [[0.5, 0.01], [0.5, 0.5], [0.5, 0.5]])
    >>> record.confidence.round(3).tolist(), record.agrees.tolist(), record.distance.round(3).tolist()
    ([0.794, 0.215], [True, False], [0.109, 0.936])
    """
    checks.whole("count", count, 1)
    checks.number("sureness", sureness, 0)
    uniform = checks.array("draws", draws, 0, 1)
    if uniform.shape != (3, count):
        raise checks.ParameterError(f"draws must have the shape [3, {count}], got {list(uniform.shape)}")
    confidence = uniform[0] ** (1 / sureness) if sureness else np.zeros(count)
    agrees = uniform[1] < confidence
    rest = (1 - confidence) * uniform[2]
    likely = np.maximum(np.where(agrees, 1 - rest, rest), np.finfo(np.float64).tiny)
    return Decisions(confidence, -np.log(likely), agrees, "assumed: a small model that knows how often it is right")


def _column(name: str, values: ArrayLike, low: float, high: float) -> Floats:
    if isinstance(values, list | tuple):
        for row, value in enumerate(values, start=1):
            # Strings are refused although some convert to numbers; booleans only where they are valid answers.
            if not isinstance(value, int | float | np.number | np.bool_) or (isinstance(value, bool) and name != "agrees"):
                raise checks.ParameterError(f"{name} must be a list of numbers, got {checks.shown(value)} in row {row}")
    try:
        column = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise checks.ParameterError(f"{name} must be a list of numbers, got {checks.shown(values)}") from None
    if column.ndim != 1:
        raise checks.ParameterError(f"{name} must be a list of numbers, got {checks.shown(values)}")
    bad = np.flatnonzero(~((column >= low) & (column <= high) & np.isfinite(column)))
    if bad.size:
        bound = f"between {low:g} and {high:g}" if np.isfinite(high) else f"finite and at least {low:g}"
        raise checks.ParameterError(f"{name} must be {bound}, got {column[bad[0]]:g} in row {bad[0] + 1}")
    return column.copy()
