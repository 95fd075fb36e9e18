"""Speed-up of advised draft lengths by the number of running sequences, with intervals and the switch-off batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, canvas, series_styles, styled
from model.base import checks

Floats = NDArray[np.float64]
DRAFTS = "speculative"
"""Method of the rows of a table of advice that are drawn."""
LIMITS = {"batch": (1, 1e6), "speedup": (1e-6, 1e6), "speedup_low": (1e-6, 1e6), "speedup_high": (1e-6, 1e6)}
"""Columns that are drawn, with their bounds."""
MOST_CURVES = 6
"""More could not be distinguished."""


@dataclass(frozen=True, eq=False)
class SpeedupCurve:
    """Speed-up by the number of running sequences; arrays of shape (batches,)."""

    label: str
    sequences: Floats
    speedups: Floats
    low: Floats
    high: Floats


def of_table(rows: Sequence[Mapping[str, Any]], *, title: str, switch_off: float | None = None) -> Figure:
    """Draw the draft lengths that are advised somewhere, from rows of the table of advice; without any, the shortest one.

    Rows of advice that was written without the mark `advised` have those that are best.
    """
    several = len({row["acceptance"] for row in rows}) > 1
    curves = []
    for acceptance in dict.fromkeys(row["acceptance"] for row in rows):
        own = [row for row in rows if row["acceptance"] == acceptance and row["method"] == DRAFTS]
        advised = {row["draft_length"] for row in own if row.get("advised", row["best"])}
        for length in sorted(advised or {min(row["draft_length"] for row in own)}):
            points = [row for row in own if row["draft_length"] == length]
            columns = ([_number(name, row[name]) for row in points] for name in LIMITS)
            label = f"K = {length}" + (f", acceptance {acceptance}" if several else "")
            curves.append(SpeedupCurve(label, *(np.array(column) for column in columns)))
    return draw(curves[:MOST_CURVES], title=title, switch_off=switch_off)


def _number(name: str, value: Any) -> float:
    checks.number(f"table.{name}", value, *LIMITS[name])
    return float(value)


def draw(curves: Sequence[SpeedupCurve], *, title: str, switch_off: float | None = None) -> Figure:
    """Draw a line with an 80 % band for each draft length; a dashed line marks the batch above which drafts do not pay."""
    checks.whole("curves", len(curves), 1, MOST_CURVES)
    with styled():
        figure, axes = canvas(8.6, 4.8, (0.085, 0.125, 0.77, 0.7))
        axes.set_xscale("log", base=2)
        numbers = np.unique(np.concatenate([each.sequences for each in curves]))
        axes.axhline(1.0, color=INK, linewidth=1.0)
        ends = []
        for curve, style in zip(curves, series_styles(len(curves)), strict=True):
            axes.fill_between(curve.sequences, curve.low, curve.high, color=style.colour, alpha=0.13, linewidth=0)
            axes.plot(curve.sequences, curve.speedups, color=style.colour, linestyle=style.line, marker=style.marker, markersize=5)
            ends.append((float(curve.speedups[-1]), curve.label, style.colour))
        last, mark = float(numbers[-1]), None
        if switch_off is not None and numbers[0] < switch_off <= 2 * numbers[-1]:
            last, mark = max(last, 1.1 * switch_off), switch_off
        axes.set_xlim(float(numbers[0]) / 1.15, last * 1.08 if last > 1 else 2.0)
        axes.xaxis.set_major_locator(FixedLocator(numbers.tolist()))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.set_ylim(0, 1.08 * max(float(np.max(each.high)) for each in curves))
        axes.grid(axis="y")
        if mark is not None:
            axes.axvline(mark, color=GREY, linewidth=1.2, linestyle=(0, (4, 2)))
            axes.text(mark, 0.04, "break-even ", rotation=90, color=GREY, fontsize=9, ha="right", va="bottom")
        axes.set_xlabel("running sequences")
        axes.set_ylabel("speed-up over plain decoding")
        label_at_right(axes, ends)
        figure.text(0.085, 0.935, f"Does drafting pay? {title}", fontsize=13, weight="bold", va="center")
        about = "lines: most likely; bands: 80 % interval of what would be measured; over plain decoding on the same devices"
        figure.text(0.085, 0.875, about, fontsize=9.5, color=GREY, va="center")
    return figure
