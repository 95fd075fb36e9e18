"""Errors of the simulator by method: the signed error of every measured decoding, and the bound that noise allows."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from figures.common.style import COLOURS, GREY, INK, PALE, canvas, require_columns, styled
from model.logs.prediction_error import PROFILES, by_method, times_from
from model.methods import registry

_POINT = COLOURS[0]
_HALF = 0.36  # of a row's height; rows are 1 apart
_COLUMNS = (1.17, 1.285, 1.42)  # to the right of the axes, where these end
_NEEDED = ("method", "settings", "error", "noise")


def draw(table: pl.DataFrame) -> Figure:
    """Draw one row per method: its errors as a strip of points, their median, and the bound for the median absolute error.

    `table` is written by `sim compare`. The bound is the larger of 5 % and 1.5 times the median noise
    (`model.logs.prediction_error`). Columns at the right print the median absolute error and whether the method keeps its bound
    (nine of ten errors within twice the bound).
    """
    rows = require_columns(table, "the figure of errors by method", _NEEDED)
    found = by_method(rows)
    with styled():
        height = 1.75 + 0.42 * max(len(found), 3)
        figure, axes = canvas(9.6, height, (0.19, 0.95 / height, 0.565, 1 - 1.8 / height))
        for level, each in enumerate(found):
            _strip(axes, level, each, rows.filter(pl.col("method") == each["method"])["error"].to_numpy())
        _frame(axes, found, float(np.abs(rows["error"].to_numpy()).max()))
        held = sum(each["held"] for each in found)
        title = "How far off is the simulator, method by method?"
        figure.text(0.02, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center")
        source = times_from(rows)
        said = f"{held} of {len(found)} methods keep their bound; {rows.height} measured decodings, "
        said += "predicted from profiles alone" if source == PROFILES else source
        figure.text(0.02, 1 - 0.57 / height, said, fontsize=9.5, color=GREY, va="center")
        _legend(figure, height)
    return figure


def _strip(axes: Axes, level: int, each: dict[str, Any], errors: NDArray[np.float64]) -> None:
    """Draw the errors of a method, shifted vertically in turn so that no point hides another."""
    bound = 100 * each["bound"]
    span = Rectangle((-bound, level - _HALF - 0.06), 2 * bound, 2 * _HALF + 0.12, color=PALE, alpha=0.7, linewidth=0, zorder=1)
    span.set_label(f"bound {each['method']}")
    axes.add_patch(span)
    spread = (np.arange(len(errors)) % 7 - 3) / 3 if len(errors) > 1 else np.zeros(1)
    axes.plot(
        100 * errors, level + 0.75 * _HALF * spread, linestyle="none", marker="o", markersize=4, color=_POINT, alpha=0.75,
        markeredgewidth=0, zorder=3, label=each["method"],
    )  # fmt: skip
    middle = 100 * each["bias"]
    axes.plot([middle] * 2, [level - _HALF, level + _HALF], color=INK, linewidth=2.2, zorder=4, label=f"median {each['method']}")
    words = f"{100 * each['median_error']:.1f} %", f"{bound:.1f} %", "kept" if each["held"] else "MISSED"
    for x, text, weight in zip(_COLUMNS, words, ("bold", "normal", "normal"), strict=True):
        axes.text(x, level, text, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=9.5, weight=weight)


def _frame(axes: Axes, found: list[dict[str, Any]], largest: float) -> None:
    axes.grid(True, axis="x")
    axes.axvline(0, color=INK, linewidth=0.8, zorder=2, label="no error")
    names = [registry.label(each["method"], short=True) for each in found]
    axes.set_yticks(range(len(found)), [f"{name} ({each['runs']})" for name, each in zip(names, found, strict=True)])
    axes.set_ylim(len(found) - 0.45, -0.55)
    reach = 108 * max(largest, *(each["bound"] for each in found))
    axes.set_xlim(-reach, reach)
    axes.set_xlabel("predicted / measured time − 1 [%] (negative: predicted too fast)")
    for x, words in zip(_COLUMNS, ("median |error|", "bound", "kept?"), strict=True):
        axes.text(x, -0.72, words, transform=axes.get_yaxis_transform(), ha="right", va="center", fontsize=8.5, color=GREY)


def _legend(figure: Figure, height: float) -> None:
    handles: list[Any] = [
        Line2D([], [], linestyle="none", marker="o", markersize=5, color=_POINT, label="one decoding (median of its repeats)"),
        Line2D([], [], linestyle="none", marker="|", markersize=11, markeredgewidth=2.2, color=INK, label="median over decodings"),
        Patch(color=PALE, alpha=0.7, label="bound: 5 %, or 1.5 × noise if larger"),
    ]
    figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(0.02, 0.09 / height), ncols=3, borderaxespad=0,
                  columnspacing=1.6, handlelength=1.6)  # fmt: skip
