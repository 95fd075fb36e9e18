"""Measured times of a pass of the target model: by width, and by batch, width and context.

A verification of gamma drafted tokens is a pass of width gamma + 1. The papers assume that it takes as long as a pass over one
token; on a real device it takes a little longer, and in large batches much longer. Times may be in any unit. They are interpolated
linearly between measured points; outside of these an error is raised.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]


class WidthCurve:
    """Time of a pass by its width, from pairs (width, time) or a mapping; the first width must be 1.

    Measured points are returned exactly. A table whose times fall with the width is used as it is, with a warning: real tables do.
    `quiet` suppresses the warning, for tables that the user has not written.

    >>> curve = WidthCurve([(1, 1.0), (2, 1.02), (8, 1.3)])
    >>> float(curve(2)), round(float(curve(5)), 12), curve.last, curve.monotone
    (1.02, 1.16, 8, True)
    """

    def __init__(self, pairs: Iterable[tuple[int, float]] | Mapping[int, float], *, quiet: bool = False) -> None:
        rows: object = pairs
        try:
            rows = list(pairs.items() if isinstance(pairs, Mapping) else pairs)
            table = np.asarray(rows, dtype=np.float64)
        except (TypeError, ValueError, OverflowError):
            table = np.empty(0)
        if table.ndim != 2 or table.shape[1] != 2:
            raise checks.ParameterError(f"verify_cost must be pairs of a width and a time, got {checks.shown(rows)}")
        self.widths = _axis("verify_cost widths", table[:, 0], 1)
        if self.widths[0] != 1:
            raise checks.ParameterError(
                f"verify_cost must start at width 1, got {self.widths[0]:g}; costs are relative to width 1: measure it"
            )
        self.times = _times("verify_cost", table[:, 1])
        self.last = int(self.widths[-1])
        self.monotone = bool(np.all(np.diff(self.times) >= 0))
        if not self.monotone and not quiet:
            where = int(np.argmax(np.diff(self.times) < 0)) + 1
            warnings.warn(
                f"verify_cost should not fall with the width, got {self.times[where]:g} at width {self.widths[where]:g} after"
                f" {self.times[where - 1]:g}; it is used as it is",
                stacklevel=2,
            )

    def __call__(self, width: ArrayLike) -> Floats:
        """Time of a pass of this width, in the unit of the table."""
        wide = checks.array("width", width, 1)
        if np.any(wide > self.last):
            raise checks.ParameterError(
                f"width must be at most {self.last}, the last width of verify_cost, got {wide.max():g};"
                " measure wider passes or draft less"
            )
        return np.asarray(np.interp(wide, self.widths, self.times))

    def relative(self, width: ArrayLike) -> Floats:
        """Time of a pass of this width relative to a pass over one token [-]."""
        return np.asarray(self(width) / self.times[0])


CurveLike = WidthCurve | Iterable[tuple[int, float]] | Mapping[int, float]
"""Types that `verify_cost` accepts."""


def as_curve(verify_cost: CurveLike) -> WidthCurve:
    """Return the curve itself, or a curve of the pairs without a warning: it was given when the pairs were read."""
    return verify_cost if isinstance(verify_cost, WidthCurve) else WidthCurve(verify_cost, quiet=True)


class PassTimes:
    """Time of a pass by batch, width and context: `times[i, j, k]` at `batches[i]`, `widths[j]` and `contexts[k]`.

    Interpolation is multilinear between the points; outside of them an error is raised. An axis may have a single point. A draft
    model needs only width 1.

    >>> times = PassTimes([1, 8], [1, 4], [1024], [[[10.0], [10.5]], [[11.0], [13.0]]])
    >>> float(times(8, 4, 1024)), float(times(4.5, 1, 1024))
    (13.0, 10.5)
    """

    def __init__(self, batches: ArrayLike, widths: ArrayLike, contexts: ArrayLike, times: ArrayLike) -> None:
        self.batches = _axis("batches", batches, 1)
        self.widths = _axis("widths", widths, 1)
        self.contexts = _axis("contexts", contexts, 0)
        if self.widths[0] != 1:
            raise checks.ParameterError(f"widths must start at 1, got {self.widths[0]:g}; measure a pass over one token")
        self.times = _times("times", times)
        shape = (self.batches.size, self.widths.size, self.contexts.size)
        if self.times.shape != shape:
            raise checks.ParameterError(
                f"times must have the shape {list(shape)} of batches, widths and contexts, got {list(self.times.shape)}"
            )

    def __call__(self, batch: ArrayLike, width: ArrayLike, context: ArrayLike) -> Floats:
        """Time of a pass of this batch, width and context, in the unit of the table."""
        cells = [
            _cell("batch", batch, self.batches),
            _cell("width", width, self.widths),
            _cell("context", context, self.contexts),
        ]
        total: Floats = np.zeros(np.broadcast_shapes(*(low.shape for low, _ in cells)))
        for corner in np.ndindex(2, 2, 2):
            weight: Floats = np.asarray(1.0)
            index = []
            for (low, part), up, size in zip(cells, corner, self.times.shape, strict=True):
                weight = np.asarray(weight * (part if up else 1 - part))
                index.append(np.minimum(low + up, size - 1))
            # Corners of weight 0 add 0, so that measured points are returned exactly.
            total = total + weight * self.times[tuple(np.broadcast_arrays(*index))]
        return total


def _cell(name: str, values: ArrayLike, axis: Floats) -> tuple[NDArray[np.int64], Floats]:
    """Index of the axis point at or below each value, and the fraction of the way to the next point."""
    result = checks.array(name, values)
    bad = (result < axis[0]) | (result > axis[-1])
    if bad.any():
        first = tuple(np.argwhere(bad)[0])
        bound = f"between {axis[0]:g} and {axis[-1]:g}" if axis.size > 1 else f"{axis[0]:g}"
        raise checks.ParameterError(f"{name} must be {bound}, the measured range, got {result[first]:g}; measure it too")
    low = np.asarray(np.searchsorted(axis, result, side="right") - 1, dtype=np.int64)
    step = np.append(np.diff(axis), 1.0)
    return low, np.asarray((result - axis[low]) / step[low])


def _axis(name: str, values: ArrayLike, low: int) -> Floats:
    axis = checks.whole_array(name, values, low)
    if axis.ndim != 1 or not axis.size:
        raise checks.ParameterError(f"{name} must be a list of at least one number, got {checks.shown(values)}")
    if np.any(np.diff(axis) <= 0):
        where = int(np.argmax(np.diff(axis) <= 0)) + 1
        raise checks.ParameterError(f"{name} must increase, got {axis[where]:g} after {axis[where - 1]:g}; sort, no duplicates")
    return axis.copy()


def _times(name: str, values: ArrayLike) -> Floats:
    times = checks.array(name, values, 0)
    if np.any(times == 0):
        raise checks.ParameterError(f"{name} must hold times above 0, got 0.0; leave out points that were not measured")
    return times.copy()
