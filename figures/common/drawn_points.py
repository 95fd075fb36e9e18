"""Points of a run that its figures show: all of a small run; of a large one a part of its grid, evenly spaced on each axis."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.base import bounded_files

UNDRAWN = ("busy_", "reserved_layers", "reserved_s", "latency_sd_", "time_")
"""Beginnings of columns that no figure of a run draws; they are not read."""
MOST_GRID_POINTS = 10**12
"""Points of a grid at most; more are not from this program."""


def read(table: pl.LazyFrame, folder: Path, most: int, first: int) -> pl.DataFrame:
    """Read the rows of at most `most` points of a run, and only the columns that figures draw.

    The grid is taken from the scenario in the run's metadata. Of a run without it, or of few points, the first rows are read, at
    most `first`. Memory does not grow with the table: it is filtered while it is read.
    """
    table = table.select(name for name in table.collect_schema().names() if not name.startswith(UNDRAWN))
    shape = grid_shape(folder)
    total, fewest = math.prod(shape), shape[0] * math.prod(min(size, 2) for size in shape[1:])
    if total <= most or fewest > most or table.select(pl.len()).collect().item() <= most:
        return table.head(first).collect()
    points = evenly_spaced(shape, most)
    # The bounds are compared with the statistics of row groups, so that groups without a drawn point are skipped.
    wanted = pl.col("point").is_between(int(points[0]), int(points[-1])) & pl.col("point").is_in(pl.Series(points).implode())
    return table.filter(wanted).collect(engine="streaming")


def note(rows: pl.DataFrame, folder: Path, most: int) -> str:
    """Number of points that are drawn of a run of more than `most`; empty where all are drawn."""
    total, drawn = math.prod(grid_shape(folder)), rows["point"].n_unique()
    return f"{drawn:,} of {total:,} points" if drawn <= most < total else ""


def grid_shape(folder: Path) -> tuple[int, ...]:
    """Number of methods, and of values on each axis, of a run's scenario; (0,) where there is no readable metadata."""
    try:
        shape = shape_of(bounded_files.json_of(bounded_files.read_text(folder / "metadata.json"))["scenario"])
    except (OSError, ArithmeticError, ValueError, KeyError, TypeError, AttributeError):  # not written by this program
        return (0,)
    return shape if min(shape) > 0 and math.prod(shape) <= MOST_GRID_POINTS else (0,)


def shape_of(tables: Mapping[str, Any]) -> tuple[int, ...]:
    """Number of methods, and of values on each axis, of a scenario's tables.

    >>> shape_of({"method": {"name": "ppd"}, "sweep": {"a": [1, 2], "b": {"from": 0, "to": 1, "count": 5}}})
    (1, 2, 5)
    """
    methods, axes = tables.get("method", []), tables.get("sweep", {}).values()
    sizes = (int(values["count"]) if isinstance(values, Mapping) else len(values) for values in axes)
    return (max(1, len(methods)) if isinstance(methods, list) else 1, *sizes)


def evenly_spaced(shape: Sequence[int], most: int) -> NDArray[np.int64]:
    """Numbers of at most `most` points of a grid: all methods, and on each axis as many values as fit, its ends among them.

    Every axis keeps two values, even if more points than `most` result.

    >>> evenly_spaced((1, 9), 3).tolist(), evenly_spaced((2, 3), 100).tolist()
    ([0, 4, 8], [0, 1, 2, 3, 4, 5])
    """
    methods, *axes = shape
    fewest, fits = 2, max([2, *axes])
    while fewest < fits:  # the largest number of values per axis, by bisection
        middle = (fewest + fits + 1) // 2
        if methods * math.prod(min(size, middle) for size in axes) <= most:
            fewest = middle
        else:
            fits = middle - 1
    kept = [np.unique(np.rint(np.linspace(0, size - 1, min(size, fewest))).astype(np.int64)) for size in axes]
    where = np.meshgrid(np.arange(methods), *kept, indexing="ij")
    return np.ravel_multi_index([each.ravel() for each in where], tuple(shape)).astype(np.int64)
