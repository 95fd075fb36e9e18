"""Measured times on a grid, with interpolation between the points and extrapolation beyond them.

Between measured points the logarithm of time is interpolated linearly in the logarithms of the axes, which is exact for powers.
Beyond the grid the efficiency is held constant, not the time: times grow in proportion to a lower bound from arithmetic.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks

Floats = NDArray[np.float64]
Bound = Callable[..., Floats]

SMALLEST_TIME = 1e-9
"""Smallest time inside a logarithm, for times that were rounded to 0 [s]."""
PIECE = 1 << 15
"""Points per block of a lookup."""
MOST_WHOLE = 1 << 17
"""Largest end of an axis whose whole numbers are looked up in a table."""
EXTRAPOLATION_ERROR = 0.2
"""Relative error added per factor e beyond the grid: about the error of tables that are cut at 64 or 512 tokens
(`calibrate report`)."""


class Estimate(NamedTuple):
    """Seconds with their relative error, a median: the true error is larger or smaller with about equal probability."""

    seconds: Floats
    error: Floats

    def __add__(self, other: object) -> Estimate:
        """Sum of times. Errors are taken as fully correlated, so that absolute errors add up."""
        if not isinstance(other, Estimate):
            return NotImplemented
        if self is NONE or other is NONE:
            return other if self is NONE else self
        seconds = self.seconds + other.seconds
        absolute = self.seconds * self.error + other.seconds * other.error
        with np.errstate(invalid="ignore"):
            return Estimate(seconds, np.where(seconds > 0, absolute / seconds, 0.0))

    def repeated(self, factor: ArrayLike) -> Estimate:
        """Multiply the time by a factor, at the same relative error."""
        seconds = np.asarray(self.seconds * np.asarray(factor))
        return Estimate(seconds, np.broadcast_to(self.error, seconds.shape))


NONE = Estimate(np.asarray(0.0), np.asarray(0.0))
"""Zero seconds."""


class Surface:
    """Interpolated times over a grid of measured points.

    Parameters
    ----------
    axes
        Coordinates of the rows by name, each of shape (rows,). Missing grid points are filled from neighbours on their line.
    seconds
        Time of each row, shape (rows,) [s].
    spread
        Half the range of each row's repeats over its time, shape (rows,) or one number [-].
    error
        Relative error between the points [-]. Default: the median leave-one-out error.
    bound
        Lower bound of the time at a point, from its coordinates in the order of the axes [s]. Without it times are constant beyond
        the grid.

    >>> surface = Surface({"width": [1, 2, 8], "context": [128, 128, 128]}, [1.0, 1.0, 2.0])
    >>> float(surface(2, 128).seconds), round(float(surface(4, 128).seconds), 4)
    (1.0, 1.4142)
    """

    def __init__(
        self,
        axes: Mapping[str, ArrayLike],
        seconds: ArrayLike,
        *,
        spread: ArrayLike = 0.0,
        error: float | None = None,
        bound: Bound | None = None,
    ) -> None:
        self.names = tuple(axes)
        times = checks.array("seconds", seconds, 0)
        indices, self.axes = [], []
        for name, values in axes.items():
            column = checks.array(name, values, 0)
            if column.shape != times.shape or not times.size:
                raise checks.ParameterError(f"{name} must have one value for each of {times.size} times, got {column.size}")
            points, index = np.unique(column, return_inverse=True)
            self.axes.append(points)
            indices.append(index.ravel())
        shape = tuple(points.size for points in self.axes)
        self.times: Floats = np.full(shape, np.nan)
        self.spread: Floats = np.zeros(shape)
        self.times[tuple(indices)] = times
        self.spread[tuple(indices)] = np.broadcast_to(spread, times.shape)
        self.known = ~np.isnan(self.times)
        if self.known.sum() != times.size:
            points_ = f"{times.size} rows of {self.known.sum()} points"
            raise checks.ParameterError(f"each point of {', '.join(self.names)} must occur once, got {points_}")
        self._bound = bound
        self._floor = float(times.min())
        self._scaled = [_scaled(name, points) for name, points in zip(self.names, self.axes, strict=True)]
        self._logs = self._filled()
        # Flat, with a point after the last of each axis, so that lookups there need no special case.
        self._inverse = {
            name: np.append(1 / np.diff(scaled), 0.0) for name, scaled in zip(self.names, self._scaled, strict=True)
        }
        self._logs_flat, self._times, self._spread = self._logs.ravel(), np.nan_to_num(self.times).ravel(), self.spread.ravel()
        self._known, self._spreads = self.known.ravel(), bool(self.spread.any())
        self.error = self._left_out() if error is None else error
        self._looked_up: dict[tuple[ArrayLike, ...], Estimate] = {}
        """Cache of single points: a simulated decoding looks up the same few points thousands of times."""

    def _filled(self) -> Floats:
        """Logarithms of the times; points without a measurement take the efficiency of their neighbour."""
        logs = np.log(np.maximum(self.times, SMALLEST_TIME))
        if self.known.all():
            return logs
        bounds = np.log(self._bounds(*np.meshgrid(*self.axes, indexing="ij")))
        rest = logs - bounds
        for axis in reversed(range(rest.ndim)):
            for step in (1, -1):
                lines = np.moveaxis(rest, axis, 0)[::step]
                for before, line in pairwise(lines):
                    np.copyto(line, before, where=np.isnan(line))
        return self._ordered(rest + bounds)

    def _ordered(self, logs: Floats) -> Floats:
        """Clip filled points between measured ones, if the measured times are monotonic along all axes."""
        measured = np.where(self.known, logs, np.nan)
        least, most = measured, measured
        for axis in range(logs.ndim):
            least, most = _running(np.fmax, least, axis), np.flip(_running(np.fmin, np.flip(most, axis), axis), axis)
        if (least[self.known] > logs[self.known]).any():
            return logs
        clipped = np.fmin(np.fmax(logs, least), most)
        for axis in range(logs.ndim):
            clipped = _running(np.maximum, clipped, axis)
        return clipped

    def _bounds(self, *point: Floats) -> Floats:
        """Lower bound plus the shortest measured time, which stands for the launch [s]."""
        if self._bound is None:
            return np.ones(np.broadcast_shapes(*(np.shape(each) for each in point)))
        return np.asarray(self._bound(*point) + max(self._floor, SMALLEST_TIME))

    @cached_property
    def _slowness(self) -> float:
        """Time over its bound at the measured point with the largest bound, the last such point [-]."""
        bounds = np.broadcast_to(self._bounds(*np.meshgrid(*self.axes, indexing="ij")), self.times.shape)
        most = bounds.size - 1 - np.argmax(np.where(self.known, bounds, -np.inf).ravel()[::-1])
        return float(self._times[most] / bounds.ravel()[most])

    def __call__(self, *point: ArrayLike) -> Estimate:
        """Time at a point; coordinates in the order of the axes, numbers or arrays that broadcast."""
        if not all(isinstance(value, int | np.integer) for value in point):
            return self._estimate(point)
        found = self._looked_up.get(point)  # numpy's integers are equal to Python's, and so are their hashes
        if found is None:
            if len(self._looked_up) >= PIECE:
                self._looked_up.clear()
            found = self._looked_up[point] = self._estimate(point)
        return found

    def _estimate(self, point: tuple[ArrayLike, ...]) -> Estimate:
        asked = [checks.array(name, value, 0) for name, value in zip(self.names, point, strict=True)]
        shape = np.broadcast_shapes(*(value.shape for value in asked))
        whole = [np.asarray(value).dtype.kind in "iu" for value in point]
        if int(np.prod(shape)) <= PIECE:
            seconds, error = self._at(asked)
            return Estimate(np.broadcast_to(seconds, shape), np.broadcast_to(error, shape))
        flat = [np.broadcast_to(value, shape).ravel() if value.size > 1 else value for value in asked]
        seconds, error = np.empty(int(np.prod(shape))), np.empty(int(np.prod(shape)))
        for start in range(0, seconds.size, PIECE):  # blocks fit into the processor's cache
            own = slice(start, start + PIECE)
            seconds[own], error[own] = self._at([value[own] if value.size > 1 else value for value in flat], whole)
        return Estimate(seconds.reshape(shape), error.reshape(shape))

    def _at(self, asked: list[Floats], whole: Sequence[bool] = ()) -> tuple[Floats, Floats]:
        """Seconds and errors at checked points; `whole` says on which axes all coordinates are whole numbers."""
        inside = [np.clip(value, points[0], points[-1]) for value, points in zip(asked, self.axes, strict=True)]
        base: NDArray[np.intp] = np.zeros((), dtype=np.intp)
        exact: NDArray[np.bool_] = np.ones((), dtype=np.bool_)
        parts: list[tuple[int, Floats]] = []
        steps = [1, *accumulate((points.size for points in self.axes[:0:-1]), operator.mul)][::-1]
        for axis, (value, points, step) in enumerate(zip(inside, self.axes, steps, strict=True)):
            if points.size == 1:
                continue
            cells = self._cells_of_whole[axis] if whole and whole[axis] else None
            if cells is None:
                low, part, here = self._cells(axis, value)
            else:
                at = value.astype(np.intp)
                low, part, here = cells[0].take(at), cells[1].take(at), cells[2].take(at)
            parts.append((step, part))
            base, exact = base + low * step, exact & here
        result = self._blend(base, parts, 0)
        seconds = np.exp(result)
        known = exact & self._known.take(base)
        seconds = np.where(known, self._times.take(base), seconds)
        error = np.where(known, 0.0, self.error)
        if self._spreads:
            error = np.maximum(error, self._spread.take(base))
        if any(np.any(value != within) for value, within in zip(asked, inside, strict=True)):
            far = sum(
                np.abs(_scaled(name, value) - _scaled(name, within))
                for name, value, within in zip(self.names, asked, inside, strict=True)
            )
            # Below the grid the efficiency of its edge holds. Above it, added work has the efficiency of the largest measured
            # point: a short pass is mostly launch time and does not show the speed of more work.
            within_last = [np.minimum(value, points[-1]) for value, points in zip(asked, self.axes, strict=True)]
            reached = self._bounds(*within_last)
            added = self._bounds(*asked) - reached
            seconds = seconds * (reached / self._bounds(*inside)) + self._slowness * added
            error = error + EXTRAPOLATION_ERROR * far
        return np.asarray(seconds), np.asarray(error)

    def _cells(self, axis: int, value: Floats) -> tuple[NDArray[np.intp], Floats, NDArray[np.bool_]]:
        """On an axis: the last grid point up to a value, the part of the way to the next, and whether the value is that point."""
        name, points = self.names[axis], self.axes[axis]
        low = points.searchsorted(value, side="right") - 1
        here = points[low] == value
        # After the last point there is no neighbour: there the fraction is 0.
        part = (_scaled(name, value) - self._scaled[axis][low]) * self._inverse[name][low]
        return low, np.where(here, 0.0, part), here

    @cached_property
    def _cells_of_whole(self) -> list[tuple[NDArray[np.intp], Floats, NDArray[np.bool_]] | None]:
        """`_cells` of the whole numbers from 0 to the end of each axis; None if it does not begin and end with whole numbers."""
        return [
            self._cells(axis, np.arange(points[-1] + 1).clip(points[0]))
            if points[-1] <= MOST_WHOLE and points[0].is_integer() and points[-1].is_integer() else None
            for axis, points in enumerate(self.axes)
        ]  # fmt: skip

    def _blend(self, base: NDArray[np.intp], parts: list[tuple[int, Floats]], depth: int) -> Floats:
        """Interpolate logarithms between the corners of a cell, one axis after another."""
        if depth == len(parts):
            return self._logs_flat.take(base, mode="clip")
        step, part = parts[depth]
        low = self._blend(base, parts, depth + 1)
        high = self._blend(base + step, parts, depth + 1)
        high -= low
        high *= part
        high += low
        return high

    def _left_out(self) -> float:
        """Median absolute leave-one-out error over the inner points of all lines; 0 without any."""
        errors = np.concatenate([np.abs(each[~np.isnan(each)]) for each in self.left_out()])
        return float(np.median(errors)) if errors.size else 0.0

    def left_out(self) -> list[Floats]:
        """Relative error of each point as predicted from its two neighbours on an axis: per axis an array of the grid's shape.

        Values are nan at the ends, next to missing points, and on axes of fewer than three points.
        """
        found = []
        logs = np.where(self.known, self._logs, np.nan)
        for axis, scaled in enumerate(self._scaled):
            result = np.full(self.times.shape, np.nan)
            lines, out = np.moveaxis(logs, axis, 0), np.moveaxis(result, axis, 0)
            for middle in range(1, scaled.size - 1):
                part = (scaled[middle] - scaled[middle - 1]) / (scaled[middle + 1] - scaled[middle - 1])
                out[middle] = np.expm1((1 - part) * lines[middle - 1] + part * lines[middle + 1] - lines[middle])
            found.append(result)
        return found

    def dips(self, axis: str, tolerance: float = 0.0) -> list[tuple[tuple[float, ...], float]]:
        """Points where the time falls along an axis by more than the share `tolerance`, with that share; real tables have some."""
        index = self.names.index(axis)
        times = np.moveaxis(self.times, index, -1)
        fall = 1 - times[..., 1:] / np.where(times[..., :-1] > 0, times[..., :-1], np.nan)  # a time of 0 cannot fall
        found = []
        for index_ in np.argwhere(fall > tolerance):
            *others, last = (int(each) for each in index_)
            coordinates = [*others]
            coordinates.insert(index, last + 1)
            where = tuple(float(points[each]) for points, each in zip(self.axes, coordinates, strict=True))
            found.append((where, float(fall[tuple(index_)])))
        return found


def _running(larger: np.ufunc, values: Floats, axis: int) -> Floats:
    """The largest, or smallest, value so far along an axis."""
    return np.asarray(larger.accumulate(values, axis=axis))


def _scaled(name: str, values: Floats) -> Floats:
    """Coordinates used for interpolation: logarithms, log(1 + context) for contexts, which start at 0."""
    return np.log1p(values) if name == "context" else np.log(np.maximum(values, SMALLEST_TIME))


def residuals(logs: Floats, scaled: Floats) -> Floats:
    """Each point minus its interpolation from its two known neighbours along the last axis, in logarithms.

    `logs` has one line per shape, with nan at missing points; `scaled` is the last axis. The result is nan at ends and missing
    points.
    """
    result = np.full_like(logs, np.nan)
    for index in np.ndindex(*logs.shape[:-1]):
        line = logs[index]
        there = np.flatnonzero(~np.isnan(line))
        before, here, after = there[:-2], there[1:-1], there[2:]
        part = (scaled[here] - scaled[before]) / (scaled[after] - scaled[before])
        result[index][here] = line[here] - ((1 - part) * line[before] + part * line[after])
    return result


def parallelograms(logs: Floats, near: Sequence[tuple[int, ...]], along: Sequence[int]) -> Floats:
    """Predict each value of an array from the others: the median over parallelograms of which it is the fourth corner.

    The other corners are the value at the same coordinate of a line `near` steps away, and the values of both lines `along` steps
    away on the last axis: prediction = near value + own further value - near further value. It is exact if logarithms are a
    function of the line plus a function of the last axis, with steps of any size [Ibarria2003, the rule in two dimensions]. The
    median ignores the few lines that behave differently [Tukey1977, chapter 11, fits such tables by medians].

    Parameters
    ----------
    logs
        Values over the axes of the lines and, last, the axis along them; nan where unknown.
    near
        Steps along the leading axes to neighbouring lines.
    along
        Steps along the last axis.

    Returns
    -------
    Predictions in the shape of `logs`; nan where no parallelogram has its three other corners, and everywhere if `near` or `along`
    is empty.

    [Ibarria2003] L. Ibarria, P. Lindstrom, J. Rossignac, A. Szymczak: Out-of-core compression and decompression of large
    n-dimensional scalar fields. Computer Graphics Forum 22(3), 2003.
    [Tukey1977] J. W. Tukey: Exploratory Data Analysis. Addison-Wesley, 1977.

    >>> parallelograms(np.array([[1.0, 5.0, 2.0], [2.0, 6.0, 9.0]]), [(1,)], [-1])[0]
    array([nan,  5.,  8.])
    """
    predictions = [
        _moved(logs, (*step, 0)) + _moved(logs, (*(0 for _ in step), further)) - _moved(logs, (*step, further))
        for step in near for further in along
    ]  # fmt: skip
    if not predictions:
        return np.full_like(logs, np.nan)
    stacked = np.stack(predictions)
    unknown = np.isnan(stacked).all(axis=0)
    return np.where(unknown, np.nan, np.nanmedian(np.where(unknown, 0.0, stacked), axis=0))


def _moved(values: Floats, steps: tuple[int, ...]) -> Floats:
    """Return the array shifted by `steps`, with nan beyond the ends."""
    padded = np.pad(values, [(abs(step), abs(step)) for step in steps], constant_values=np.nan)
    return padded[tuple(slice(abs(step) + step, abs(step) + step + size) for step, size in zip(steps, values.shape, strict=True))]
