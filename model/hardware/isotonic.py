"""Isotonic regression of measured tables: times that never fall along their axes.

More tokens, sequences or bytes are never less work. Where the times of a table fall, noise exceeds the step or the kernel changes;
an engine could pad to the larger pass. Blocks of falling neighbours take their median, as in isotonic regression with absolute
errors [Robertson1988], so that a single outlier moves and its neighbours do not.

[Robertson1988] T. Robertson, F. T. Wright, R. L. Dykstra: Order Restricted Statistical Inference. Wiley, 1988, chapter 1.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from model.hardware.interpolation import SMALLEST_TIME
from model.hardware.profile import AXES, TIMES, Profile

if TYPE_CHECKING:
    import polars as pl

Floats = NDArray[np.float64]
PARTS = ("layer", "dense", "attention", "head", "embedding", "step", "kv_rows", "all_reduce", "send")
"""Parts whose time never falls with more work."""


def isotonic_line(values: Floats) -> Floats:
    """Isotonic regression of one line with absolute errors; values of shape (points,), nan at missing points.

    >>> isotonic_line(np.array([1.0, 5.0, 2.0, 3.0, 9.0]))
    array([1., 3., 3., 3., 9.])
    """
    known = np.flatnonzero(~np.isnan(values))
    if (values[known][1:] >= values[known][:-1]).all():
        return values.copy()
    blocks: list[list[float]] = []
    middles: list[float] = []
    for each in values[known]:
        block, middle = [float(each)], float(each)
        while middles and middles[-1] > middle:
            block = blocks.pop() + block
            middles.pop()
            middle = float(np.median(block))
        blocks.append(block)
        middles.append(middle)
    result = values.copy()
    result[known] = np.repeat(middles, [len(block) for block in blocks])
    return result


def isotonic_grid(values: Floats) -> Floats:
    """Isotonic regression along every axis of a grid, one axis after another; nan at missing points.

    On a complete grid, regression along an axis preserves the order along the others. With missing points it may not; then each
    value becomes the middle between the largest value that must not exceed it and the smallest that it must not exceed.

    >>> isotonic_grid(np.array([[1.0, 4.0], [3.0, 2.0]]))
    array([[1., 3.],
           [3., 3.]])
    """
    result = values.copy()
    for axis in range(values.ndim):
        # Lines that fall nowhere are as they were: most of them.
        lines = np.moveaxis(result, axis, -1)
        for place in np.argwhere((np.fmax.accumulate(lines, axis=-1) > lines).any(axis=-1)):
            lines[tuple(place)] = isotonic_line(lines[tuple(place)])
    least, most = result, result
    for axis in range(values.ndim):
        least = np.fmax.accumulate(least, axis=axis)
        most = np.flip(np.fmin.accumulate(np.flip(most, axis), axis=axis), axis)
    return np.where(np.isnan(values), np.nan, least + (most - least) / 2)


def isotonic_profile(measured: Profile) -> Profile:
    """Return the profile with times that never fall along an axis of a part.

    The quartiles of a moved time are widened symmetrically to include the measured values.
    """
    import polars as pl

    table = measured.table.with_row_index("row")
    ordered = table["part"].is_in([*PARTS])
    settled = [_settled(rows) for _, rows in table.filter(ordered).group_by("part", "tensor_parallel", "busy", maintain_order=True)]
    found = pl.concat([table.filter(~ordered), *settled]).sort("row").drop("row")
    notes = []
    for part in measured.parts:
        own = measured.table["part"] == part
        before, after = (each.filter(own)["time_s"].cast(pl.Float64).to_numpy() for each in (measured.table, found))
        moved = np.abs(after / np.maximum(before, SMALLEST_TIME) - 1)[before != after]
        if moved.size:
            notes.append(
                f"{part}: {moved.size} of {before.size} times adjusted so that none falls with more work, by {np.median(moved):.1%}"
                f" in the median and up to {moved.max():.0%}; low and high include the measured values"
            )
    return replace(measured, table=found, notes=(*measured.notes, *notes))


def _settled(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows of one part and one tensor parallel size with monotonic times."""
    import polars as pl

    indices, sizes = [], []
    for axis in AXES[rows["part"][0]]:
        points, index = np.unique(rows[axis].to_numpy(), return_inverse=True)
        indices.append(index.reshape(-1))
        sizes.append(points.size)
    time, low, high = (rows[name].cast(pl.Float64).to_numpy() for name in TIMES)
    values: Floats = np.full(sizes, np.nan)
    values[tuple(indices)] = time
    found = isotonic_grid(values)[tuple(indices)]
    moved = found != time
    half = np.maximum(np.maximum(found - np.minimum(low, time), np.maximum(high, time) - found), 0.0)
    new = {
        "time_s": found,
        "low_s": np.where(moved, np.maximum(found - half, 0.0), low),
        "high_s": np.where(moved, found + half, high),
    }
    return rows.with_columns(pl.Series(name, each).cast(rows.schema[name]) for name, each in new.items())
