"""What the theory of a method is asked, and what it says: the records of every method's `predict` and `predict_points`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts

Floats = NDArray[np.float64]


class MethodChoice(NamedTuple):
    """What a theory is asked about but for the law of outcomes."""

    parameters: Any
    """Of the method's own class."""
    tokens: int
    cost: StepCosts


@dataclass(frozen=True)
class PredictionPoints:
    """Many points at which a theory is asked together: each is one of `choices` under one of `laws`.

    Parameters
    ----------
    choices, laws
        Each once. A law is as `predict` takes it: of a method with several kinds of outcomes, laws by their names.
    choice, law
        Their index at each point.
    """

    choices: Sequence[MethodChoice]
    laws: Sequence[Any]
    choice: NDArray[np.intp]
    law: NDArray[np.intp]

    def at(self, index: NDArray[np.intp]) -> PredictionPoints:
        """Some of the points, in this order."""
        return PredictionPoints(self.choices, self.laws, self.choice[index], self.law[index])

    def of_choices(self, value: Callable[[MethodChoice], float]) -> Floats:
        """A number of each point's choice."""
        return np.array([value(each) for each in self.choices], dtype=np.float64)[self.choice]

    def of_laws(self, value: Callable[[Any], float]) -> Floats:
        """A number of each point's law."""
        return np.array([value(each) for each in self.laws], dtype=np.float64)[self.law]

    def pairs(self) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
        """Indices of the choices and laws that meet, each pair once, and which pair each point is."""
        both, index = np.unique(np.stack([self.choice, self.law]), axis=1, return_inverse=True)
        return both[0], both[1], index.reshape(-1)


@dataclass(frozen=True)
class Prediction:
    """Expectations over the law of outcomes, each an array of the points' shape; nan where the theory has no value.

    Times are in the cost model's unit, compute in that unit summed over busy compute units.
    """

    latency: Floats
    latency_variance: Floats
    busy: Floats
    units_ratio: Floats
    """E[busy / latency]; not the ratio of the two expectations."""
    units: Floats
    """Compute units reserved throughout."""
    plain_latency: Floats
    """Of plain decoding of the same tokens."""
    rounds: Floats | None = None
    """Rounds of drafting and verifying, of methods that have them."""
    drafted: Floats | None = None
    """Tokens drafted in them."""
    operations: Floats | None = None
    """Arithmetic, in that of a token in a pass of the target."""

    def at(self, index: NDArray[np.intp]) -> Prediction:
        """The prediction at some of the points, in this order."""
        values: list[Any] = [None if values is None else np.asarray(values)[index] for values in self._values()]
        return Prediction(*values)

    def single(self) -> Prediction:
        """The prediction of one point, of arrays that have it alone; arrays without an axis."""
        values: list[Any] = [None if values is None else np.asarray(values)[0] for values in self._values()]
        return Prediction(*(None if value is None else np.asarray(value) for value in values))  # type: ignore[arg-type]

    def _values(self) -> list[Floats | None]:
        return [getattr(self, field.name) for field in fields(self)]

    @staticmethod
    def joined(parts: Sequence[Prediction]) -> Prediction:
        """Predictions of several arrays of points as one of all of them."""
        columns = zip(*(part._values() for part in parts), strict=True)
        values: list[Any] = [None if each[0] is None else np.concatenate(each) for each in columns]
        return Prediction(*values)

    @staticmethod
    def stacked(each: Sequence[Prediction]) -> Prediction:
        """Predictions of single points as one of all of them."""
        columns = zip(*(one._values() for one in each), strict=True)
        return Prediction(*(_column(values) for values in columns))


def _column(values: Sequence[Floats | None]) -> Any:
    known = [float("nan") if value is None else float(value) for value in values]
    return None if all(value is None for value in values) else np.array(known)


def by_outcome(of: Mapping[str, Any]) -> Any:
    """What theory and paths are given of each outcome: of a method with one kind just that, with several all by name."""
    return of if len(of) > 1 else next(iter(of.values()), None)


def one_by_one(predict: Callable[..., Prediction], points: PredictionPoints) -> Prediction:
    """The prediction of all points by a theory that takes one at a time; those that are alike are asked for once."""
    chosen, laws, index = points.pairs()
    each = []
    for choice, law in zip(chosen.tolist(), laws.tolist(), strict=True):
        parameters, tokens, cost = points.choices[choice]
        each.append(predict(parameters, tokens, points.laws[law], cost))
    return Prediction.stacked(each).at(index)
