"""Speed-up of drafting in a batch, relative to plain decoding of the same batch, over the batch size."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, NAMES, VIEWS, SeriesStyle, panels_in_row, points, require_columns, series_styles, styled
from model.base import checks
from model.methods.method_parameters import BATCHING_DESCRIPTIONS

MOST_PANELS = 4
MOST_LENGTHS = 6
_NEEDED = ("sequences", "batching", "draft_length", "acceptance_rate", "view", "speedup")
_APART = ("sequences", "draft_length", "acceptance_rate", "view")
"""Columns that distinguish points."""


def fits(rows: pl.DataFrame) -> bool:
    """Return whether batches of several sizes draft here, and nothing else distinguishes the rows."""
    if any(name not in rows.columns for name in _NEEDED):
        return False
    own = of_run(rows)
    few = own["acceptance_rate"].n_unique() <= MOST_PANELS and own["draft_length"].n_unique() <= MOST_LENGTHS
    one_way = own["batching"].n_unique() == 1
    return own["sequences"].n_unique() > 1 and few and one_way and own.select(_APART).n_unique() == own.height


def of_run(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows that draft in batches."""
    return rows.drop_nulls(list(_NEEDED))


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a panel per acceptance rate, with a line per draft length through the points of the most exact view.

    `rows` is a results table: sequences, batching (the same for all), draft_length, acceptance_rate, view, speedup and, for sampled
    views, its interval.
    """
    table = require_columns(rows, "the figure of batches", _NEEDED, ("speedup_low", "speedup_high"))
    for view in table["view"].unique().sort():
        checks.one_of("view", view, VIEWS)
    for name, most in (("acceptance_rate", MOST_PANELS), ("draft_length", MOST_LENGTHS)):
        checks.whole(f"values of {name}", table[name].n_unique(), 1, most)
    for batching in table["batching"].unique().sort():
        checks.one_of("batching", batching, BATCHING_DESCRIPTIONS)
    checks.whole("values of batching", table["batching"].n_unique(), 1, 1)
    rates, lengths = (sorted(table[name].unique()) for name in ("acceptance_rate", "draft_length"))
    styles = dict(zip(lengths, series_styles(len(lengths)), strict=True))
    views = [view for view in VIEWS if view in table["view"]]
    with styled():
        height = 4.9
        figure, axes = panels_in_row(len(rates), height, 0.13, 1 - 1.25 / height, 0.75)
        low, high = _heights(table)
        for one, rate in zip(axes, rates, strict=True):
            own = table.filter(pl.col("acceptance_rate") == rate)
            _frame(one, sorted(table["sequences"].unique()), (low, high))
            ends = []
            for (length,), part in own.sort("draft_length", "sequences").group_by("draft_length", maintain_order=True):
                ends.append((_line(one, part, styles[length], views), f"γ = {length}", styles[length].colour))
            label_at_right(one, ends)
            one.set_title(f"acceptance rate α = {rate:.3g}", fontsize=10.5)
            one.tick_params(labelleft=one is axes[0])
        axes[0].set_ylabel("speed-up over plain decoding of the same batch")
        left = axes[0].get_position().x0
        figure.text(left, 1 - 0.3 / height, "Does drafting still pay in a batch?", fontsize=13, weight="bold", va="center")
        figure.text(left, 1 - 0.57 / height, BATCHING_DESCRIPTIONS[table["batching"][0]], fontsize=9.5, color=GREY, va="center")
        handles = [Line2D([], [], label=NAMES[view], marker="o", **_mark(view, GREY)) for view in views]
        figure.legend(
            handles=handles, loc="center left", bbox_to_anchor=(left, 1 - 0.83 / height), ncols=3, borderaxespad=0, borderpad=0
        )
    return figure


def _mark(view: str, colour: str) -> dict[str, Any]:
    size, face, edge = points(colour)[view]
    return {"linestyle": "none", "markersize": size, "markerfacecolor": face, "markeredgecolor": edge}


def _line(axes: Axes, own: pl.DataFrame, style: SeriesStyle, views: list[str]) -> float:
    """Draw one draft length, and return the last speed-up of its line."""
    first = own.filter(pl.col("view") == next(view for view in views if view in own["view"]))
    axes.plot(first["sequences"], first["speedup"], color=style.colour, linewidth=1.4, linestyle=style.line)
    for view in views:
        part = own.filter(pl.col("view") == view)
        axes.plot(part["sequences"], part["speedup"], marker=style.marker, **_mark(view, style.colour))
        bounds = part.drop_nulls(["speedup_low", "speedup_high"])
        axes.vlines(bounds["sequences"], bounds["speedup_low"], bounds["speedup_high"], color=style.colour, linewidth=1.2)
    return float(first["speedup"][-1])


def _heights(table: pl.DataFrame) -> tuple[float, float]:
    names = "speedup", "speedup_low", "speedup_high"
    every = np.concatenate([np.ones(1), *(table[name].drop_nulls().to_numpy() for name in names)])
    low, high = float(every.min()), float(every.max())
    room = 0.06 * (high - low) or 0.1
    return low - room, high + room


def _frame(axes: Axes, batches: list[int], heights: tuple[float, float]) -> None:
    axes.grid(True)
    axes.axhline(1.0, color=INK, linewidth=1.2)
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 1.2, batches[-1] * 1.2)
    axes.xaxis.set_major_locator(FixedLocator(batches))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(*heights)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel("batch size [sequences]")
