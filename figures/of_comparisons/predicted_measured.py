"""Predicted against measured wall time of every decoding, predicted from profiles, or by a step law, alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from numpy.typing import NDArray

from figures.common.style import GREY, INK, LINES, MORE_MARKERS, PALE, SeriesStyle, canvas, category_styles, require_columns, styled
from model.base.checks import ParameterError
from model.logs.prediction_error import BAND, PROFILES, choices, floor, times_from
from model.methods import registry

Floats = NDArray[np.float64]

MOST_METHODS = len(MORE_MARKERS)
NEEDED = ("method", "settings", "predicted_s", "measured_s", "error", "noise")


def draw(table: pl.DataFrame) -> Figure:
    """Draw a point per row of `sim compare`: above, predicted against measured time; below, the error.

    Times are from the first token to the last [ms]. On the solid line both are equal; the band is ±5 %; the dotted lines show the
    error that the noise of the measurements alone explains, 1.5 times its median. Hollow points are runs that other work on the
    machine disturbed.
    """
    rows = require_columns(table, "the figure of predicted against measured", NEEDED, ("disturbed", "mismatch", "step_law"))
    rows = rows.with_columns(pl.col("disturbed").cast(pl.Boolean).fill_null(value=False))
    if not (rows["predicted_s"].min() > 0 and rows["measured_s"].min() > 0):  # type: ignore[operator]
        raise ParameterError("predicted_s and measured_s must be above 0 in every row; leave out decodings with a single commit")
    methods = list(dict.fromkeys(rows["method"]))
    if len(methods) > MOST_METHODS:
        raise ParameterError(f"there is room for at most {MOST_METHODS} methods, got {len(methods)}; draw fewer")
    styles = dict(zip(methods, category_styles(len(methods)), strict=True))
    allowed = floor(rows["noise"].to_numpy())
    with styled():
        figure, axes = canvas(8.4, 7.6, (0.095, 0.31, 0.64, 0.565))
        below = figure.add_axes((0.095, 0.08, 0.64, 0.175))
        ends = _ends(rows)
        _bands(axes, ends, ends, allowed)
        _bands(below, ends, np.zeros(2), allowed)
        for (method, hollow), own in rows.group_by("method", "disturbed", maintain_order=True):
            style = styles[str(method)]
            _points(axes, own["measured_s"], 1e3 * own["predicted_s"], str(method), style, hollow=bool(hollow))
            _points(below, own["measured_s"], 100 * own["error"], str(method), style, hollow=bool(hollow))
        _frame(axes, below, ends, times_from(rows))
        figure.text(0.095, 0.96, "Does the simulator predict real wall time?", fontsize=13, weight="bold", va="center")
        figure.text(0.095, 0.92, subtitle(rows), fontsize=9.5, color=GREY, va="center")
        _legend(figure, rows, styles, allowed)
    return figure


def subtitle(rows: pl.DataFrame) -> str:
    """Median error and share of decodings within the band, as printed under the title.

    >>> subtitle(pl.DataFrame({"error": [0.01, -0.04, 0.08], "settings": ["a", "b", "b"], "method": "ppd", "mismatch": ""}))
    'median error 4.0 %; 67 % of 3 decodings (2 settings) are within 5 %'
    """
    errors = np.abs(rows["error"].to_numpy())
    settings = choices(rows)
    said = f"median error {100 * np.median(errors):.1f} %; {100 * np.mean(errors <= BAND):.0f} % of {rows.height} decodings"
    said += f" ({settings} setting{'s' if settings > 1 else ''}) are within {100 * BAND:g} %"
    if times_from(rows) != PROFILES:
        return f"{said}; {times_from(rows)}"
    return said + ("; a profile of ANOTHER machine" if rows["mismatch"].cast(pl.String).fill_null("").ne("").any() else "")


def _ends(rows: pl.DataFrame) -> Floats:
    """Limits slightly beyond all points, the same for both axes, shape (2,) [ms]."""
    values = 1e3 * rows.select("predicted_s", "measured_s").to_numpy()
    return np.array([values.min() / 1.2, values.max() * 1.2])


def _bands(axes: Axes, x: Floats, middle: Floats, allowed: float) -> None:
    """Draw the band and the noise around equality, of times [ms] or of errors [%]."""
    half = np.where(middle > 0, middle, 100.0)
    axes.fill_between(x, middle - BAND * half, middle + BAND * half, color=PALE, alpha=0.7, linewidth=0, zorder=1, label="band")
    axes.plot(x, middle, color=INK, linewidth=1.0, zorder=1.6, label="equal")
    for side in (-allowed, allowed):
        axes.plot(x, middle + side * half, color=GREY, linewidth=1.1, linestyle=LINES[3], zorder=1.5, label="noise")


def _points(axes: Axes, measured: pl.Series, y: pl.Series, method: str, style: SeriesStyle, *, hollow: bool) -> None:
    axes.plot(
        1e3 * measured, y, linestyle="none", marker=style.marker, markersize=5.5, zorder=3, color=style.colour,
        markerfacecolor="none" if hollow else style.colour, markeredgecolor=style.colour if hollow else "white",
        markeredgewidth=1.1 if hollow else 0.5, label=f"{method} disturbed" if hollow else method,
    )  # fmt: skip


def _frame(axes: Axes, below: Axes, ends: Floats, source: str) -> None:
    axes.set_yscale("log")
    axes.set_ylim(*ends)
    for each in (axes, below):
        each.grid(True)
        each.set_xscale("log")
        each.set_xlim(*ends)
    wide = ends[1] / ends[0] > 30
    for axis in (axes.xaxis, axes.yaxis, below.xaxis):
        axis.set_major_locator(LogLocator(subs=(1, 2, 5) if wide else (1, 1.5, 2, 3, 4, 5, 7)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())
    axes.tick_params(labelbottom=False)
    below.set_ylabel("error [%]")
    below.set_xlabel("measured time from first to last token: median of the repeats [ms]")
    axes.set_ylabel(f"predicted time, {'from profiles' if source == PROFILES else 'by a step law'} alone [ms]")


def _legend(figure: Figure, rows: pl.DataFrame, styles: dict[str, SeriesStyle], allowed: float) -> None:
    dot: dict[str, Any] = {"linestyle": "none", "markersize": 7}
    handles: list[Line2D | Patch] = []
    for method, style in styles.items():
        name = registry.label(method, short=True)
        handles.append(Line2D([], [], marker=style.marker, color=style.colour, markeredgecolor="white", label=name, **dot))
    if rows["disturbed"].any():
        name = "hollow: disturbed by\nother work"
        handles.append(Line2D([], [], marker="o", markerfacecolor="none", color=GREY, label=name, **dot))
    handles += [
        Line2D([], [], color=INK, linewidth=1.0, label="predicted = measured"),
        Patch(color=PALE, alpha=0.7, label=f"within {100 * BAND:g} %"),
        Line2D([], [], color=GREY, linewidth=1.1, linestyle=LINES[3], label=f"1.5 × noise of the\nrepeats: {100 * allowed:.1f} %"),
    ]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.745, 0.88), borderaxespad=0, handlelength=2.2)
