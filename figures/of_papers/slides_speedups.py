"""Printed speed-ups of the slides against the bounds at their own acceptance rates: shows which rows are impossible."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from figures.common.style import COLOURS, GREY, INK, canvas, require_columns, styled

_NEEDED = (
    "source", "draft_length", "acceptance_rate", "speedup", "theorem", "free_bound", "oracle_bound", "impossible_if_free",
    "reread_rate", "reread_length", "reread_speedup", "reread_oracle",
)  # fmt: skip
_STATED, _FREE, _WRONG, _REREAD = COLOURS[0], "#b9d9ee", COLOURS[1], COLOURS[2]
_THICK, _GAP = 0.3, 0.17  # of a bar; between the middle of a row and that of each of its two bars
# Marker, its size, its colour, and its legend label.
_MARKS = {
    "impossible": ("X", 9.0, _WRONG, "printed, impossible"),
    "too fast": ("D", 7.0, INK, "printed, needs cheaper drafting"),
    "possible": ("o", 7.0, INK, "printed, possible"),
}
_HEADS = {
    False: "Table 2, draft length γ: bars are Theorem 3.8; marks should be at a bar's end",
    True: "Adaptive draft length: bars are the oracle bound; marks should be within a bar",
}


def draw(rows: pl.DataFrame | Sequence[Mapping[str, Any]]) -> Figure:
    """Draw printed speed-ups over bars of the theory's bounds, one row per row of the slides.

    A cross is a speed-up that is impossible even with free drafting, a diamond one too fast for the slides' cost of drafting.

    `rows` are those of `model.published.deck_analysis.rows`. The upper bar uses the stated acceptance rate, with the slides' cost
    of drafting and, paler, with free drafting; the lower bar interprets the rate as accepted over drafted tokens.
    """
    table = require_columns(pl.DataFrame(rows, infer_schema_length=None), "the figure of the slides", _NEEDED)
    groups = [(adaptive, table.filter(pl.col("draft_length").is_null() == adaptive)) for adaptive in (False, True)]
    groups = [(adaptive, part) for adaptive, part in groups if part.height]
    with styled():
        height = 1.75 + 0.66 * table.height + 0.5 * len(groups)
        figure, axes = canvas(11.0, height, (0.125, 0.55 / height, 0.55, 1 - 1.7 / height))
        axes.grid(True, axis="x")
        level = 0.0
        for adaptive, part in groups:
            axes.text(1.015, level - 0.05, _HEADS[adaptive], fontsize=9, color=INK, va="center", style="italic")
            level += 0.72
            for row in part.iter_rows(named=True):
                _row(axes, row, level)
                level += 1
        _frame(axes, level)
        figure.text(0.02, 1 - 0.3 / height, _headline(table), fontsize=13, weight="bold", va="center")
        _legend(figure, table, height)
    return figure


def _row(axes: Axes, row: Mapping[str, Any], level: float) -> None:
    adaptive, printed, stated = row["draft_length"] is None, row["speedup"], _stated(row)
    reread = row["reread_oracle"] if adaptive else row["reread_speedup"]
    top, bottom = level - _GAP, level + _GAP
    axes.barh(top, row["free_bound"] - 1, _THICK, left=1, color=_FREE, edgecolor=_STATED, linewidth=0.6, hatch="////", label="free")
    axes.barh(top, stated - 1, _THICK, left=1, color=_STATED, label="stated")
    axes.barh(bottom, reread - 1, _THICK, left=1, color="none", edgecolor=_REREAD, linewidth=1.4, label="reread")
    marker, size, colour, _ = _MARKS[_kind(row)]
    axes.plot([printed, printed], [top - 0.19, bottom + 0.19], color=colour, linewidth=1.6, zorder=3, label="printed line")
    axes.plot(
        [printed], [top], linestyle="none", marker=marker, markersize=size, color=colour,
        markeredgecolor="white", markeredgewidth=0.8, zorder=4, label="printed",
    )  # fmt: skip
    name = row["source"].split(", ", 1)[1].replace("gamma", "γ =")
    side = axes.get_yaxis_transform()
    axes.text(-0.02, level, f"{name}\nα = {row['acceptance_rate']:g}", transform=side, ha="right", va="center", fontsize=9.5)
    axes.text(1.02, top, _verdict(row, stated), transform=side, va="center", fontsize=9.5, color=colour, weight="bold")
    axes.text(1.02, bottom, _rereading(row, reread), transform=side, va="center", fontsize=8.5, color=GREY)


def _stated(row: Mapping[str, Any]) -> float:
    """Bound of the speed-up at the stated acceptance rate and the slides' cost of drafting."""
    return float(row["oracle_bound"] if row["draft_length"] is None else row["theorem"])


def _kind(row: Mapping[str, Any]) -> str:
    if row["impossible_if_free"]:
        return "impossible"
    return "too fast" if row["speedup"] > _stated(row) else "possible"


def _verdict(row: Mapping[str, Any], stated: float) -> str:
    printed, free = row["speedup"], row["free_bound"]
    if row["impossible_if_free"]:
        return f"{printed:g}: impossible, {100 * (printed / free - 1):.0f} % too much"
    bound = "the oracle bound" if row["draft_length"] is None else "Theorem 3.8"
    off = 100 * (printed / stated - 1)
    return f"{printed:g}: {abs(off):.0f} % {'above' if off > 0 else 'below'} {bound}"


def _rereading(row: Mapping[str, Any], reread: float) -> str:
    if row["draft_length"] is None:
        return f"re-read: α = {row['reread_rate']:.2f} (γ = {row['reread_length']} assumed), at most {reread:.2f}"
    off = 100 * (row["speedup"] / reread - 1)
    sign = "+" if off >= 0 else "−"
    return f"re-read: α = {row['reread_rate']:.2f} gives {reread:.2f}, off by {sign}{abs(off):.1f} %"


def _headline(table: pl.DataFrame) -> str:
    wrong = table.filter("impossible_if_free").height
    return f"{wrong} of the slides' {table.height} speed-ups are impossible at their acceptance rate α, even with free drafting"


def _frame(axes: Axes, end: float) -> None:
    axes.margins(x=0.03)
    axes.autoscale_view()
    axes.set_xlim(left=1)
    axes.set_ylim(end - 0.45, -0.3)
    axes.set_yticks([])
    axes.spines["left"].set_linewidth(1.6)
    axes.set_xlabel("speed-up over plain decoding  (1: no gain)")


def _legend(figure: Figure, table: pl.DataFrame, height: float) -> None:
    kinds = {_kind(row) for row in table.iter_rows(named=True)}
    marks = [mark for kind, mark in _MARKS.items() if kind in kinds]
    handles: list[Any] = [
        Line2D([], [], linestyle="none", marker=marker, markersize=size, color=colour, label=label)
        for marker, size, colour, label in marks
    ]
    handles += [
        Patch(facecolor=_STATED, label="bound at the printed α and cost"),
        Patch(facecolor=_FREE, edgecolor=_STATED, linewidth=0.6, hatch="////", label="… with free drafting"),
        Patch(facecolor="none", edgecolor=_REREAD, linewidth=1.4, label="bound if α means accepted / drafted (re-read)"),
    ]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.015, 1 - 0.48 / height), ncols=3, borderaxespad=0)
