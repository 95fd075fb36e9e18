"""Speed-up of advised draft lengths by the number of running sequences, with intervals and the switch-off batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, canvas, series_styles, styled
from model.base import checks

Floats = NDArray[np.float64]
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
