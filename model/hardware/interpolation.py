"""Measured times over a grid, and what lies between the points and beyond them.

Between measured points times are interpolated in the logarithms of time and axes: a time that is a power of its axis between two
points comes out right. Beyond them the efficiency is held, never the time: a bound from arithmetic says how it goes on.
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

NOTHING = 1e-9
"""What stands in a logarithm for a time that was rounded to nothing [s]."""
PIECE = 1 << 15
"""Points that are looked up at a time."""
UNKNOWN = 0.2
"""Relative error added for each factor e beyond the grid: about what tables miss that are cut at 64 or 512 tokens
(`calibrate report`)."""


class Estimate(NamedTuple):
    """Seconds, and how far off they may be: a relative error, about as likely to be passed as not (a median)."""

    seconds: Floats
    error: Floats

    def __add__(self, other: object) -> Estimate:
        """Times one after the other. What is wrong with one is taken to be wrong with the other: errors add up."""
        if not isinstance(other, Estimate):
            return NotImplemented
        seconds = self.seconds + other.seconds
        wrong = self.seconds * self.error + other.seconds * other.error
        with np.errstate(invalid="ignore"):
            return Estimate(seconds, np.where(seconds > 0, wrong / seconds, 0.0))

    def repeated(self, factor: ArrayLike) -> Estimate:
        """The same so many times over."""
        seconds = np.asarray(self.seconds * np.asarray(factor))
        return Estimate(seconds, np.broadcast_to(self.error, seconds.shape))


NONE = Estimate(np.asarray(0.0), np.asarray(0.0))
"""No time at all."""


class Surface:
    """Times at points of a grid, for any point.

    Parameters
    ----------
    axes
        The coordinates of the rows by name, each of shape (rows,). A grid may lack points: what is known on their line stands in.
    seconds
        Time of each row, shape (rows,) [s].
    spread
        Half the range of each row's repeats over its time, shape (rows,) or one number [-].
    error
        Relative error between the points, as leaving one out shows it; estimated here where left out [-].
    bound
        Least time at a point by arithmetic, from its coordinates in the order of the axes [s]; without it times are held beyond
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
        places, self.axes = [], []
        for name, values in axes.items():
            column = checks.array(name, values, 0)
            if column.shape != times.shape or not times.size:
                raise checks.ParameterError(f"{name} must have one value for each of {times.size} times, got {column.size}")
            points, place = np.unique(column, return_inverse=True)
            self.axes.append(points)
            places.append(place.ravel())
        shape = tuple(points.size for points in self.axes)
        self.times: Floats = np.full(shape, np.nan)
        self.spread: Floats = np.zeros(shape)
        self.times[tuple(places)] = times
        self.spread[tuple(places)] = np.broadcast_to(spread, times.shape)
        self.known = ~np.isnan(self.times)
        if self.known.sum() != times.size:
            points_ = f"{times.size} rows of {self.known.sum()} points"
            raise checks.ParameterError(f"each point of {', '.join(self.names)} must be there once, got {points_}")
        self._bound = bound
        self._floor = float(times.min())
        self._scaled = [_scaled(name, points) for name, points in zip(self.names, self.axes, strict=True)]
        self._logs = self._filled()
        # Flat, and with a point behind the last of each axis: lookups then need no case of their own.
        self._inverse = {
            name: np.append(1 / np.diff(scaled), 0.0) for name, scaled in zip(self.names, self._scaled, strict=True)
        }
        self._logs_flat, self._times, self._spread = self._logs.ravel(), np.nan_to_num(self.times).ravel(), self.spread.ravel()
        self._known, self._spreads = self.known.ravel(), bool(self.spread.any())
        self.error = self._left_out() if error is None else error
        self._looked_up: dict[tuple[ArrayLike, ...], Estimate] = {}
        """Single points that were asked for: a simulated decoding asks for the same few thousands of times."""

    def _filled(self) -> Floats:
        """Logarithms of the times; a point that was not measured keeps the efficiency of its neighbour."""
        logs = np.log(np.maximum(self.times, NOTHING))
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
        """The same, where no measured time falls along an axis none between them either: held between those on both sides."""
        measured = np.where(self.known, logs, np.nan)
        least, most = measured, measured
        for axis in range(logs.ndim):
            least, most = _running(np.fmax, least, axis), np.flip(_running(np.fmin, np.flip(most, axis), axis), axis)
        if (least[self.known] > logs[self.known]).any():
            return logs
        found = np.fmin(np.fmax(logs, least), most)
        for axis in range(logs.ndim):
            found = _running(np.maximum, found, axis)
        return found

    def _bounds(self, *point: Floats) -> Floats:
        """The bound, on top of the shortest time that was seen: what launching takes, however little there is to do."""
        if self._bound is None:
            return np.ones(np.broadcast_shapes(*(np.shape(each) for each in point)))
        return np.asarray(self._bound(*point) + max(self._floor, NOTHING))

    @cached_property
    def _slowness(self) -> float:
        """Time over its bound where that is largest among what was measured, the last such point [-]."""
        bounds = np.broadcast_to(self._bounds(*np.meshgrid(*self.axes, indexing="ij")), self.times.shape)
        most = bounds.size - 1 - np.argmax(np.where(self.known, bounds, -np.inf).ravel()[::-1])
        return float(self._times[most] / bounds.ravel()[most])

    def __call__(self, *point: ArrayLike) -> Estimate:
        """Time at a point, coordinates in the order of the axes; they may be arrays of any shapes that go together."""
        if not all(type(value) is int for value in point):
            return self._estimate(point)
        found = self._looked_up.get(point)
        if found is None:
            if len(self._looked_up) >= PIECE:
                self._looked_up.clear()
            found = self._looked_up[point] = self._estimate(point)
        return found

    def _estimate(self, point: tuple[ArrayLike, ...]) -> Estimate:
        asked = [checks.array(name, value, 0) for name, value in zip(self.names, point, strict=True)]
        shape = np.broadcast_shapes(*(value.shape for value in asked))
        if int(np.prod(shape)) <= PIECE:
            seconds, error = self._at(asked)
            return Estimate(np.broadcast_to(seconds, shape), np.broadcast_to(error, shape))
        flat = [np.broadcast_to(value, shape).ravel() if value.size > 1 else value for value in asked]
        seconds, error = np.empty(int(np.prod(shape))), np.empty(int(np.prod(shape)))
        for start in range(0, seconds.size, PIECE):  # what is worked on stays in the processor's cache
            own = slice(start, start + PIECE)
            seconds[own], error[own] = self._at([value[own] if value.size > 1 else value for value in flat])
        return Estimate(seconds.reshape(shape), error.reshape(shape))

    def _at(self, asked: list[Floats]) -> tuple[Floats, Floats]:
        """Seconds and errors at points that are known to be numbers."""
        inside = [np.clip(value, points[0], points[-1]) for value, points in zip(asked, self.axes, strict=True)]
        base: NDArray[np.intp] = np.zeros((), dtype=np.intp)
        exact: NDArray[np.bool_] = np.ones((), dtype=np.bool_)
        parts: list[tuple[int, Floats]] = []
        steps = [1, *accumulate((points.size for points in self.axes[:0:-1]), operator.mul)][::-1]
        for name, value, points, scaled, step in zip(self.names, inside, self.axes, self._scaled, steps, strict=True):
            if points.size == 1:
                continue
            low = points.searchsorted(value, side="right") - 1
            here = points[low] == value
            # Behind the last point nothing follows: there the part is nothing, and its neighbour the point itself.
            part = (_scaled(name, value) - scaled[low]) * self._inverse[name][low]
            parts.append((step, np.where(here, 0.0, part)))
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
            # Beyond the first points by the efficiency there; beyond the last ones what is added takes that of the most work that
            # was measured: a short pass is all launch, and says nothing of how fast more is done.
            within_last = [np.minimum(value, points[-1]) for value, points in zip(asked, self.axes, strict=True)]
            reached = self._bounds(*within_last)
            added = self._bounds(*asked) - reached
            seconds = seconds * (reached / self._bounds(*inside)) + self._slowness * added
            error = error + UNKNOWN * far
        return np.asarray(seconds), np.asarray(error)

    def _blend(self, base: NDArray[np.intp], parts: list[tuple[int, Floats]], depth: int) -> Floats:
        """Logarithms between the corners of a cell, one axis after another."""
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
        """The median relative error at the inner points of every line, each predicted from its neighbours there; 0 without any."""
        together = np.concatenate([np.abs(each[~np.isnan(each)]) for each in self.left_out()])
        return float(np.median(together)) if together.size else 0.0

    def left_out(self) -> list[Floats]:
        """Relative error of what each point's two neighbours on an axis say of it: for each axis an array of the grid's shape.

        It is nan at ends, where a neighbour lacks, and on axes of fewer than three points.
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
        """Points at which the time falls along an axis by more than a share of it, with that share: real tables have some."""
        index = self.names.index(axis)
        times = np.moveaxis(self.times, index, -1)
        fall = 1 - times[..., 1:] / np.where(times[..., :-1] > 0, times[..., :-1], np.nan)  # from nothing there is no fall
        found = []
        for place in np.argwhere(fall > tolerance):
            *others, last = (int(each) for each in place)
            coordinates = [*others]
            coordinates.insert(index, last + 1)
            where = tuple(float(points[each]) for points, each in zip(self.axes, coordinates, strict=True))
            found.append((where, float(fall[tuple(place)])))
        return found


def _running(larger: np.ufunc, values: Floats, axis: int) -> Floats:
    """The largest, or smallest, value so far along an axis."""
    return np.asarray(larger.accumulate(values, axis=axis))


def _scaled(name: str, values: Floats) -> Floats:
    """An axis as it is interpolated on: its logarithm; contexts begin at nothing, so theirs counts the token itself."""
    return np.log1p(values) if name == "context" else np.log(np.maximum(values, NOTHING))


def residuals(logs: Floats, scaled: Floats) -> Floats:
    """What each point's two known neighbours along the last axis miss of it, in logarithms: nan at ends and holes.

    `logs` has a line for each shape, with holes as nan; `scaled` is the axis.
    """
    result = np.full_like(logs, np.nan)
    for place in np.ndindex(*logs.shape[:-1]):
        line = logs[place]
        there = np.flatnonzero(~np.isnan(line))
        before, here, after = there[:-2], there[1:-1], there[2:]
        part = (scaled[here] - scaled[before]) / (scaled[after] - scaled[before])
        result[place][here] = line[here] - ((1 - part) * line[before] + part * line[after])
    return result


def parallelograms(logs: Floats, near: Sequence[tuple[int, ...]], along: Sequence[int]) -> Floats:
    """What others say of each value of an array, itself unseen: the median of the parallelograms that lack it alone.

    A line `near` steps away has a value where this one lacks it, and both have values `along` steps further on the last axis: the
    missing corner is near + own - both. That is exact where logarithms are one function of the line plus one of the last axis,
    steps of any size included [Ibarria2003, the rule in two dimensions]. Where two lines part company on the way, a median of many
    does not follow the few that do [Tukey1977, chapter 11, who fits such tables by medians].

    Parameters
    ----------
    logs
        An array over the axes of the lines and, last, the axis along them; nan where nothing is known.
    near
        Steps along the leading axes to the lines that are asked.
    along
        Steps along the last axis.

    Returns
    -------
    Of the shape of `logs`; nan where no parallelogram has its three other corners, and everywhere if none is asked for.

    [Ibarria2003] L. Ibarria, P. Lindstrom, J. Rossignac, A. Szymczak: Out-of-core compression and decompression of large
    n-dimensional scalar fields. Computer Graphics Forum 22(3), 2003.
    [Tukey1977] J. W. Tukey: Exploratory Data Analysis. Addison-Wesley, 1977.

    >>> parallelograms(np.array([[1.0, 5.0, 2.0], [2.0, 6.0, 9.0]]), [(1,)], [-1])[0]
    array([nan,  5.,  8.])
    """
    said = [
        _moved(logs, (*step, 0)) + _moved(logs, (*(0 for _ in step), further)) - _moved(logs, (*step, further))
        for step in near for further in along
    ]  # fmt: skip
    if not said:
        return np.full_like(logs, np.nan)
    together = np.stack(said)
    nobody = np.isnan(together).all(axis=0)
    return np.where(nobody, np.nan, np.nanmedian(np.where(nobody, 0.0, together), axis=0))


def _moved(values: Floats, steps: tuple[int, ...]) -> Floats:
    """An array of what lies so many steps away from each place; nan beyond the ends."""
    wide = np.pad(values, [(abs(step), abs(step)) for step in steps], constant_values=np.nan)
    return wide[tuple(slice(abs(step) + step, abs(step) + step + size) for step, size in zip(steps, values.shape, strict=True))]
