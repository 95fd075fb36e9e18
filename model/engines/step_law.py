"""Step laws: seconds of an engine's step, its throughput and time per token, with intervals, from coefficients that were fitted.

A law holds the coefficients of `model.engines.step_terms` that fit its cells best (the maximum of their posterior density), and
draws from the posterior, whose predictions give intervals. It predicts in the unit that it was fitted in: tables of throughput
contain the time that the engine spends on prompts, tables of step times do not.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from scipy import special

from model.base import bounded_files, checks, strict_json, typed_values, whole_files
from model.base.checks import ParameterError
from model.engines import cells as cell_tables
from model.engines import kernel_times, step_terms
from model.engines.cells import Cells, Floats
from model.engines.kernel_times import KernelSource
from model.engines.step_terms import PRIORS, RoutedExperts, StepShape

SCHEMA_VERSION = 1
SHARE = 0.8
"""Probability of the intervals."""
DEGREES = 4
"""Degrees of freedom of the distribution of errors: Student's t, so that one bad cell does not decide."""
EXTRAPOLATION = 0.03
"""Relative error (standard deviation) added per doubling of the running sequences, or of the tokens per sequence, beyond the cells,
on top of what the draws say: the form of the law itself is known there only from its priors."""
MEDIAN_OF_SD = 0.674
"""Median of the absolute value of a normal variable, over its standard deviation [-]."""
MOST_BYTES = 2**24
_NODES = special.stdtrit(DEGREES, (np.arange(20) + 0.5) / 20)


class Predictions(NamedTuple):
    """Predicted values, in the unit of the cells, with their interval; arrays of shape (cells,)."""

    values: Floats
    low: Floats
    high: Floats
    beyond: Floats
    """Doublings by which a cell is beyond the fitted ones; 0 within them."""


@dataclass(frozen=True, eq=False)
class StepLaw:
    """Step law of one engine, model, GPU and draft.

    Parameters
    ----------
    name, unit
        Name, and unit of the cells that it was fitted to (`model.engines.cells.UNITS`).
    coefficients
        Coefficients by name, in seconds, tokens or as pure numbers: `model.engines.step_terms.PRIORS`.
    draws
        Draws of the coefficients, and of `noise`, from the posterior; arrays of shape (draws,).
    experts, kernels
        Experts of the model, and source of the kernels' seconds; None: none.
    acceptance
        Conditional acceptance rates by draft position, if they were given; else empty.
    cells
        The cells that the law was fitted to; None for a law of priors only.
    left_out
        Relative errors of the prediction of each cell by a law fitted to the others.
    facts
        Engine, model, GPU, source and notes, as text.
    engine
        Engine whose priors were used; None: the priors of all engines.
    model, tensor_parallel
        Without kernels: shape of the model (`sim ls shapes`), and devices that it was split over; None: not known.
    """

    name: str
    unit: str
    coefficients: Mapping[str, float]
    draws: Mapping[str, Floats]
    experts: RoutedExperts | None = None
    kernels: KernelSource | None = None
    acceptance: tuple[float, ...] = ()
    cells: Cells | None = None
    left_out: tuple[float, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)
    engine: str | None = None
    model: str | None = None
    tensor_parallel: int | None = None

    @property
    def shape_name(self) -> str | None:
        """Shape of the model: that of the kernels, or the one stated; None: not known."""
        return self.model if self.kernels is None else self.kernels.model

    @property
    def devices(self) -> int | None:
        """Devices that the model is split over; None: not known."""
        return self.tensor_parallel if self.kernels is None else self.kernels.tensor_parallel

    def drawn(self, index: int) -> StepLaw:
        """Law with the coefficients of one draw, taken as known: what the engine would be if that draw were right."""
        kept = {name: float(each[index % each.size]) for name, each in self.draws.items()}
        coefficients = {name: kept[name] for name in self.coefficients}
        return replace(self, coefficients=coefficients, draws={name: np.array([value]) for name, value in kept.items()})

    # --- Predictions ---

    def predict(self, cells: Cells, *, over: Cells | None = None) -> Predictions:
        """Predict cells in the unit of the law, with intervals of probability `SHARE` that include the error of a measurement.

        With `over`, the values of `cells` divided by those of `over`, cell by cell.
        """
        value = self._log_values(cells, self._point)
        values = self._log_values(cells, self.draws)
        beyond = self.beyond(cells.sequences, cells.draft_length)
        if over is not None:
            value, values = value - self._log_values(over, self._point), values - self._log_values(over, self.draws)
            beyond = np.maximum(beyond, self.beyond(over.sequences, over.draft_length))
        noise = np.sqrt(self.draws["noise"][:, None] ** 2 / cells.weight + (EXTRAPOLATION * beyond) ** 2)
        spread = values[:, None, :] + noise[:, None, :] * _NODES[None, :, None]
        low, high = np.quantile(spread.reshape(-1, cells.size), [(1 - SHARE) / 2, (1 + SHARE) / 2], axis=0, method="hazen")
        point = value[0]
        return Predictions(np.exp(point), np.exp(np.minimum(low, point)), np.exp(np.maximum(high, point)), beyond)

    def draws_of(self, cells: Cells) -> Floats:
        """Draws of the predicted values, without errors of measurement; shape (draws, cells)."""
        return np.exp(self._log_values(cells, self.draws))

    def step_seconds(self, cells: Cells) -> tuple[Floats, Floats]:
        """Seconds of a step, of shape (cells,), and their draws, of shape (draws, cells), without errors of measurement and
        without prompts [s]."""
        shape = kernel_times.step_shape(self.kernels, cells.sequences, cells.draft_length, cells.draft_passes, cells.context)
        point, draws = (
            step_terms.step_seconds({name: each[:, None] for name, each in of.items()}, shape, self.experts) + 0 * cells.sequences
            for of in (self._point, self.draws)
        )
        return np.asarray(point[0]), np.asarray(draws)

    def prompt_seconds(self, sequences: ArrayLike) -> tuple[Floats, Floats]:
        """Seconds that go to prompts per output token of a sequence, of the shape of `sequences`, and their draws, of shape
        (draws, *shape); 0 in laws of steps [s]."""
        served = cell_tables.served(self.unit, sequences)
        point, draws = (
            np.multiply.outer(of.get("prompt", 0 * of["draft_pass"]), served)
            for of in (self._point, self.draws)
        )
        return point[0], draws

    @cached_property
    def _point(self) -> Mapping[str, Floats]:
        return {name: np.array([value]) for name, value in self.coefficients.items()}

    def _log_values(self, cells: Cells, coefficients: Mapping[str, Floats]) -> Floats:
        """Logarithms of the values in the unit of the law; shape (draws, cells)."""
        shape = kernel_times.step_shape(self.kernels, cells.sequences, cells.draft_length, cells.draft_passes, cells.context)
        columns = {name: each[:, None] for name, each in coefficients.items()}
        seconds = step_terms.step_seconds(columns, shape, self.experts)
        length = self.acceptance_lengths(cells, coefficients) if self.unit != "step_ms" else np.ones(1)
        seconds = seconds + length * step_terms.prompt_seconds(columns, cell_tables.served(self.unit, cells.sequences))
        return np.log(cell_tables.to_unit(self.unit, seconds, cells.sequences, length))

    def acceptance_lengths(self, cells: Cells, coefficients: Mapping[str, Floats] | None = None) -> Floats:
        """Tokens per step and sequence: the cells' own, else those of the rates given, else those of the rates fitted [-]."""
        of = self._point if coefficients is None else coefficients
        given = np.where(cells.draft_length == 0, 1.0, cells.mean_acceptance_length)
        missing = np.isnan(given)
        if not missing.any():
            return given[None]
        if self.acceptance:
            return np.where(
                missing, step_terms.length_by_position(self.acceptance, np.where(missing, cells.draft_length, 0)), given
            )[None]
        if "acceptance_rate" not in of:
            raise ParameterError(
                f"row {int(np.argmax(missing)) + 1}: mean_acceptance_length is required, because law {self.name} was fitted without"
                " acceptance; give it, or fit the law with --acceptance"
            )
        rate, trend = of["acceptance_rate"], of.get("acceptance_trend", np.zeros(1))
        lengths = np.unique(cells.draft_length)
        fitted = step_terms.acceptance_length(rate[:, None], trend[:, None], lengths[None])
        return np.where(missing, fitted[:, np.searchsorted(lengths, cells.draft_length)], given)

    def beyond(self, sequences: ArrayLike, draft_length: ArrayLike) -> Floats:
        """Doublings in running sequences, or in tokens per sequence, beyond the fitted cells; 0 within them [-]."""
        number, width = np.broadcast_arrays(np.asarray(sequences), np.asarray(draft_length) + 1)
        found = np.zeros(number.shape)
        if self.cells is None:
            return found
        for fitted, asked in ((self.cells.sequences, number), (self.cells.draft_length + 1, width)):
            over = np.log2(asked / fitted.max()), np.log2(fitted.min() / asked)
            found = np.maximum(found, np.maximum(np.maximum(*over), 0.0))
        return found

    # --- Passes, for simulations ---

    def pass_seconds(self, sequences: ArrayLike, width: ArrayLike, context: ArrayLike) -> tuple[Floats, Floats]:
        """Seconds of the target's pass over `width` tokens per sequence with everything else of a step but the draft passes, and
        their relative error (a median) [s], [-]."""
        number, tokens, where = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (sequences, width, context)))
        shape = kernel_times.step_shape(self.kernels, number.ravel(), tokens.ravel() - 1, 0 * number.ravel(), where.ravel())

        def seconds(coefficients: Mapping[str, Floats], shape: StepShape) -> Floats:
            return step_terms.target_seconds(coefficients, shape, self.experts)

        found, error = self._with_error(seconds, shape, number.shape)
        return found, np.hypot(error, MEDIAN_OF_SD * EXTRAPOLATION * self.beyond(number, tokens - 1))

    def draft_seconds(self, sequences: ArrayLike, context: ArrayLike) -> tuple[Floats, Floats]:
        """Seconds of one pass of the draft, and their relative error (a median) [s], [-]."""
        number, where = np.broadcast_arrays(*(np.asarray(each, dtype=np.float64) for each in (sequences, context)))
        zero = 0 * number.ravel()
        shape = kernel_times.step_shape(self.kernels, number.ravel(), zero, zero, where.ravel())
        return self._with_error(step_terms.draft_seconds, shape, number.shape)

    def _with_error(
        self, seconds: Callable[[Mapping[str, Floats], StepShape], Floats], shape: StepShape, extent: tuple[int, ...]
    ) -> tuple[Floats, Floats]:
        point, draws = (
            seconds({name: each[:, None] for name, each in of.items()}, shape) + 0 * shape.sequences
            for of in (self._point, self.draws)
        )
        return point[0].reshape(extent), (MEDIAN_OF_SD * np.std(np.log(draws), axis=0)).reshape(extent)


# --- Files ---

_KEYS = {
    "kind": str, "schema_version": int, "name": str, "unit": str, "coefficients": dict[str, float],
    "draws": dict[str, list[float]], "experts": dict[str, int] | None, "kernels": dict[str, Any] | None, "acceptance": list[float],
    "cells": list[dict[str, float | None]] | None, "left_out": list[float], "facts": dict[str, str],
    "engine": str | None, "model": str | None, "tensor_parallel": int | None,
}  # fmt: skip
_MAY_LACK = {"model": None, "tensor_parallel": None}
"""Keys that laws of earlier versions do not have, with what their absence means."""

_NAMES_OF_KERNELS = tuple(each.name for each in fields(KernelSource))
_LATER_NAMES = {"weights": None, "draft_context_budget": None}
"""Keys of kernels that were added later, with the values of files without them."""


def write(law: StepLaw, path: Path) -> Path:
    """Write a law as JSON, completely or not at all."""
    return whole_files.write_text(path, text(law))


def text(law: StepLaw) -> str:
    """Law as JSON text."""
    found = {
        "kind": "step-law", "schema_version": SCHEMA_VERSION, "name": law.name, "unit": law.unit, "facts": dict(law.facts),
        "engine": law.engine, "model": law.model, "tensor_parallel": law.tensor_parallel,
        "coefficients": {name: _digits(value, 8) for name, value in law.coefficients.items()},
        "experts": None if law.experts is None else {"number": law.experts.number, "active": law.experts.active},
        "kernels": None if law.kernels is None else _kernels(law.kernels), "acceptance": list(law.acceptance),
        "cells": None if law.cells is None else cell_tables.rows(law.cells),
        "left_out": [_digits(each, 4) for each in law.left_out],
        "draws": {name: [_digits(value, 5) for value in each] for name, each in law.draws.items()},
    }  # fmt: skip
    # One line per list of draws: the file is for reading too.
    lines = [
        f"{strict_json.dumps(key)}: {strict_json.dumps(value)}" for key, value in found.items() if key not in ("draws", "cells")
    ]
    listed = [strict_json.dumps(row) for row in found["cells"] or ()]  # type: ignore[attr-defined]
    lines.append('"cells": ' + ("null" if law.cells is None else "[\n  " + ",\n  ".join(listed) + "\n ]"))
    drawn = [f"{strict_json.dumps(name)}: {strict_json.dumps(each)}" for name, each in found["draws"].items()]  # type: ignore[attr-defined]
    lines.append('"draws": {\n  ' + ",\n  ".join(drawn) + "\n }")
    return "{\n " + ",\n ".join(lines) + "\n}\n"


def _kernels(source: KernelSource) -> dict[str, Any]:
    """Names of kernels, without later ones that have the values of files without them."""
    return {name: value for name, value in vars(source).items() if name not in _LATER_NAMES or value != _LATER_NAMES[name]}


def _digits(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def load(where: str | Path) -> StepLaw:
    """Load a bundled law by name, or a law by the path of its JSON file. Raises ParameterError in one line."""
    path = Path(where)
    if path.suffix != ".json" and os.sep not in str(where):
        if str(where) not in names():
            raise ParameterError(f"{checks.unknown('engine law', str(where), names())}; or give the path of a law's .json")
        path = Path(str(_bundled() / f"{where}.json"))
    return _loaded(path, bounded_files.stamp(path))


def names() -> tuple[str, ...]:
    """Names of the bundled laws."""
    return tuple(sorted(each.name.removesuffix(".json") for each in _bundled().iterdir() if each.name.endswith(".json")))


def _bundled() -> Traversable:
    return resources.files("model") / "engines" / "laws"


@functools.lru_cache(maxsize=32)
def _loaded(path: Path, _: tuple[int, int] | None) -> StepLaw:
    try:
        return _read(bounded_files.json_of(bounded_files.read_text(path, MOST_BYTES)))
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None
    except OSError as error:
        raise ParameterError(f"step law {str(path)!r} cannot be read: {error.strerror or error}; `sim ls laws` has names") from None
    except ValueError:
        raise ParameterError(f"{path.name} must be JSON, and is not; `calibrate engine fit` writes laws") from None


def _read(found: Any) -> StepLaw:
    if not isinstance(found, dict) or found.get("kind") != "step-law":
        raise ParameterError("it is not an engine law (kind must be 'step-law'); `calibrate engine fit` makes one")
    if found.get("schema_version") != SCHEMA_VERSION:
        raise ParameterError(
            f"schema_version must be {SCHEMA_VERSION}, got {checks.shown(found.get('schema_version'))}; fit it again"
        )
    found = {**_MAY_LACK, **found}
    for key, kind in _KEYS.items():
        if key not in found:
            raise ParameterError(f"{key} is missing")
        typed_values.check(found[key], kind, key)
    if unknown := [key for key in found if key not in _KEYS]:
        raise ParameterError(f"unknown key {checks.shown(unknown[0])}; {checks.nearest(unknown[0], _KEYS)}")
    checks.one_of("unit", found["unit"], cell_tables.UNITS)
    draws = {name: np.array(each, dtype=np.float64) for name, each in found["draws"].items()}
    if {*draws} != {*found["coefficients"], "noise"} or len({each.size for each in draws.values()}) != 1:
        raise ParameterError("draws must have one list for each coefficient and one for noise, all of one length")
    for part, values in (("coefficients", found["coefficients"]), ("draws", draws)):
        for name, each in values.items():
            checks.one_of("coefficient", name, PRIORS)
            low = -math.inf if name in step_terms.PLAIN else step_terms.LEAST if name in step_terms.TARGET else 0.0
            checks.array(f"{part}.{name}", each, low, 1.0 if name in step_terms.LOGITS else 1e9)
    rows = found["cells"]
    experts, kernels = found["experts"], found["kernels"]
    law = StepLaw(
        found["name"], found["unit"], found["coefficients"], draws,
        None if experts is None else RoutedExperts(**_exact(experts, "experts", ("number", "active"))),
        None if kernels is None else KernelSource(**_exact(_LATER_NAMES | kernels, "kernels", _NAMES_OF_KERNELS)),
        tuple(found["acceptance"]), None if rows is None else cell_tables.of_rows(found["unit"], rows), tuple(found["left_out"]),
        found["facts"], found["engine"], found["model"], found["tensor_parallel"],
    )  # fmt: skip
    if len(law.left_out) not in (0, 0 if law.cells is None else law.cells.size):
        raise ParameterError(f"left_out must have one error for each cell, or be empty; got {len(law.left_out)}")
    if law.tensor_parallel is not None:
        checks.whole("tensor_parallel", law.tensor_parallel, 1, 1024)
    for name in _required(law):
        if name not in law.coefficients:
            raise ParameterError(f"coefficients must have {name}, got {', '.join(law.coefficients) or 'none'}")
    return law


def _required(law: StepLaw) -> tuple[str, ...]:
    target = ("kernels",) if law.kernels is not None else ("weights", "ridge_tokens")
    return (*target, "draft_pass", *(("experts", "expert_skew", "expert_correlation") if law.experts is not None else ()))


def _exact(table: Mapping[str, Any], where: str, keys: tuple[str, ...]) -> dict[str, Any]:
    if {*table} != {*keys}:
        raise ParameterError(f"{where} must have the keys {', '.join(keys)}, got {', '.join(table) or 'none'}")
    return dict(table)
