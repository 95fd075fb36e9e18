"""Distribution of the latency of a point: simulated latencies against the theory's probabilities."""

from __future__ import annotations

import textwrap
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from numpy.typing import NDArray

from figures.common import point_names
from figures.common.style import COLOURS, GREY, INK, NAMES, VIEWS, canvas, require_columns, styled
from model.base import checks
from model.base.checks import ParameterError

Floats = NDArray[np.float64]

_MOST_POINTS = 12
MOST_BARS = 80
"""Number of distinct latencies above which each bar is a range: single ones would be too thin to see."""
_NEGLIGIBLE = 1e-4  # of the greatest probability; the axis ends where all are smaller


def with_point_names(rows: pl.DataFrame, results: pl.DataFrame) -> pl.DataFrame:
    """Add a `name` for each point and, where all latencies are known in seconds, `latency_ms` [ms]."""
    points = results.join(rows.select("point").unique(), "point", how="semi", maintain_order="left")
    common = {row["point"]: ", ".join(_words(row)) for row in point_names.one_row_per_point(points).iter_rows(named=True)}
    found = rows.with_columns(name=pl.col("point").replace_strict(common, default="", return_dtype=pl.String))
    if "latency_s" in found.columns and found["latency_s"].null_count() == 0:
        found = found.with_columns(latency_ms=1e3 * pl.col("latency_s"))
    return found


def _words(row: dict[str, Any]) -> list[str]:
    wanted = [
        name
        for name in point_names.WORDS
        if name in point_names.SETTINGS or name in point_names.MAIN or name in ("sequences", "batching")
    ]
    return [
        point_names.method(row),
        *point_names.words(row, [*wanted, *(name for name in row if "." in name and name not in point_names.WORDS)]),
    ]


def draw(rows: pl.DataFrame) -> Figure:
    """Draw relative frequencies of simulated latencies (`paths` as bars, `events` as crosses) and the pmf (`formula`, circles).

    `rows` has point, view, latency_layers and probability: one row per point, view and value. Each point has a panel. With more
    than `MOST_BARS` latencies, and none of a formula, each bar is a range. With `latency_ms` the axis is in milliseconds;
    `name` is the title of a point's panel (see `with_point_names`).
    """
    unit = "ms" if "latency_ms" in rows.columns else "layer-times"
    rows = rows.with_columns(latency_layers="latency_ms") if unit == "ms" else rows
    table = require_columns(rows, "the distribution", ("point", "view", "latency_layers", "probability"), ("name",))
    for view in table["view"].unique().sort():
        checks.one_of("view", view, VIEWS)
    points = table["point"].unique(maintain_order=True).to_list()
    if len(points) > _MOST_POINTS:
        raise ParameterError(f"the distribution has room for at most {_MOST_POINTS} points, got {len(points)}; choose some of them")
    across = 1 if len(points) == 1 else 2 if len(points) <= 4 else 3
    down = -(-len(points) // across)
    with styled():
        width, height = max(7.0, 4.0 * across), max(4.4, 2.9 * down + 0.8)
        figure, only = canvas(width, height, (0.12, 0.14, 0.84, 0.62))
        panels = [only]
        if len(points) > 1:
            only.remove()
            sides = {"left": 0.8 / width, "right": 0.98, "bottom": 0.6 / height, "top": 1 - 1.05 / height}
            figure.subplots_adjust(**sides, wspace=0.28, hspace=0.75)
            panels = [figure.add_subplot(down, across, index + 1) for index in range(len(points))]
        for index, (axes, point) in enumerate(zip(panels, points, strict=True)):
            _panel(axes, table.filter(pl.col("point").eq_missing(point)))
            name = table.filter(pl.col("point").eq_missing(point))["name"][0] or f"point {point}"
            axes.set_title(textwrap.fill(name, round(15 * width * axes.get_position().width)), fontsize=9, color=GREY)
            axes.set_ylabel("probability")
            if index >= len(points) - across:
                axes.set_xlabel(f"latency  [{unit}]")
        left = panels[0].get_position().x0
        figure.text(left, 1 - 0.28 / height, "Distribution of the latency of a decoding", fontsize=13, weight="bold", va="center")
        every = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        corner = (left, 1 - 0.42 / height)
        figure.legend(every.values(), every.keys(), loc="upper left", bbox_to_anchor=corner, ncols=3, borderaxespad=0)
    return figure


def _panel(axes: Axes, rows: pl.DataFrame) -> None:
    rows = _in_ranges(rows)
    values = np.unique(rows["latency_layers"].to_numpy())
    step = float(np.diff(values).min()) if len(values) > 1 else 1.0
    axes.grid(True, axis="y")
    parts = {view: rows.filter(pl.col("view") == view).sort("latency_layers") for view in VIEWS}
    times = {view: part["latency_layers"].to_numpy() for view, part in parts.items() if part.height}
    shares = {view: parts[view]["probability"].to_numpy() for view in times}
    # Circles without a line between them: there are no values in between.
    styles = {
        "formula": {"marker": "o", "markersize": 7, "color": COLOURS[1], "markerfacecolor": "none", "markeredgewidth": 1.5},
        "events": {"marker": "x", "markersize": 5, "color": INK},
    }
    for view, style in styles.items():
        if view in times:
            axes.plot(times[view], shares[view], linestyle="none", label=NAMES[view], **style)  # type: ignore[arg-type]
    if "paths" in times:
        axes.add_collection(_bars(times["paths"], shares["paths"], 0.8 * step))
    top = float(rows["probability"].max())  # type: ignore[arg-type]
    seen = rows.filter(pl.col("probability") > _NEGLIGIBLE * top)["latency_layers"].to_numpy()
    if len(seen):
        axes.set_xlim(seen.min() - 1.5 * step, seen.max() + 1.5 * step)
    axes.set_ylim(0, 1.08 * top if top > 0 else 1)


def _bars(middles: Floats, heights: Floats, width: float) -> PolyCollection:
    """Bars on the axis: as one artist they are drawn in a tenth of the time of one for each bar."""
    left, ground = middles - width / 2, np.zeros_like(heights)
    corners = np.stack([(left, ground), (left + width, ground), (left + width, heights), (left, heights)])
    return PolyCollection(
        [*corners.transpose(2, 0, 1)], facecolors=COLOURS[5], edgecolors=INK, linewidths=0.4, joinstyle="miter",
        label=NAMES["paths"],
    )  # fmt: skip


def _ranges(rows: pl.DataFrame) -> bool:
    """Return whether bars are ranges of latencies."""
    return rows["latency_layers"].n_unique() > MOST_BARS and "formula" not in rows["view"]


def _in_ranges(rows: pl.DataFrame) -> pl.DataFrame:
    """Sum probabilities over ranges of equal width, at their midpoints, where single latencies are too many to see."""
    values = rows["latency_layers"]
    if not _ranges(rows):
        return rows
    low, high = (float(end) for end in (values.min(), values.max()))  # type: ignore[arg-type]
    width = (high - low) / MOST_BARS
    index = ((pl.col("latency_layers") - low) / width).floor().clip(0, MOST_BARS - 1)
    ranges = rows.with_columns(latency_layers=low + (index + 0.5) * width)
    return ranges.group_by("view", "latency_layers", maintain_order=True).agg(pl.col("probability").sum())
