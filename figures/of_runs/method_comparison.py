"""Speed-up of each method against its price: reserved units, busy units, and GPU-time per token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.common import point_names
from figures.common.speedup_baseline import ONE, over_one_device
from figures.common.style import GREY, INK, MARKERS, VIEWS, SeriesStyle, category_styles, require_columns, series_styles, styled
from model.base import checks
from model.methods import registry

AXES = {
    "reserved_units": "units reserved",
    "mean_busy_units": "mean busy units",
    "compute_per_token": "GPU-time per token, relative to plain decoding",
}
_Y = "speedup"
MOST_SETTINGS = 6
"""Number of swept settings (rates, costs) that fit: each has a row of panels."""
MOST_CHOICES = len(MARKERS)
_SIDE, _WIDE, _HIGH, _GAP, _HEAD, _FOOT = 0.75, 3.3, 2.9, 0.35, 1.0, 0.6  # [inches]
_BETWEEN = 0.75  # [inches] between rows


@dataclass(frozen=True)
class _Table:
    """Rows of the figure: baseline; one row per point, named by its choice; rows by setting; settings that all points share."""

    baseline: str
    rows: pl.DataFrame
    settings: list[tuple[str, pl.DataFrame]]
    choices: list[str]
    common: list[str]


def fits(rows: pl.DataFrame) -> bool:
    """Return whether a run has several methods, and room for all of its settings and choices."""
    if not all(name in rows.columns for name in ("point", "view", "method", _Y, *AXES)) or rows["method"].n_unique() < 2:
        return False
    table = _table(rows)
    return table.rows.height > 0 and len(table.settings) <= MOST_SETTINGS and len(table.choices) <= MOST_CHOICES


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a row of panels per swept setting, with a panel per price of `AXES` that differs between points.

    Each choice of a method has a colour and marker; plain decoding is a star at (1, 1). `rows` is a results table of several
    methods. The last view of a point is drawn: only `events` includes waiting. Marks are hollow for lossy methods (`exact` false).
    """
    require_columns(rows, "the figure of methods", ("point", "view", "method", _Y, *AXES))
    for view in rows["view"].unique().sort():
        checks.one_of("view", view, VIEWS)
    table = _table(rows)
    require_columns(table.rows, "the figure of methods (with values of speedup)", ())
    checks.whole("settings of the figure of methods", len(table.settings), 1, MOST_SETTINGS)
    checks.whole("choices of the figure of methods", len(table.choices), 1, MOST_CHOICES)
    styles_of = series_styles if len(table.choices) <= 6 else category_styles
    styles = dict(zip(table.choices, styles_of(len(table.choices)), strict=True))
    prices = [x for x in AXES if not np.allclose([value for value in table.rows[x] if value is not None], 1)] or [[*AXES][-1]]
    with styled():
        figure, panels, side = _panels(len(prices), len(table.settings), table.choices)
        lossy = {*table.rows.filter(pl.col("exact").eq_missing(False))["choice"]}
        for index, (name, part) in enumerate(table.settings):
            for axes, x in zip(panels[index], prices, strict=True):
                _panel(axes, part, x, styles, lossy)
                if index == len(table.settings) - 1 or len(prices) == 1:
                    axes.set_xlabel(AXES[x])
            panels[index][0].set_title(name, fontsize=10)
            panels[index][0].set_ylabel(f"speed-up over {table.baseline}")
        width, height = figure.get_size_inches()
        title = "Speed-up of each method, and its price"
        figure.text(_SIDE / width, 1 - 0.34 / height, title, fontsize=13, weight="bold", va="center")
        subtitle = ["up is faster, left is cheaper", *table.common]
        subtitle += ["hollow: lossy (output differs from the target's)"] if lossy else []
        figure.text(_SIDE / width, 1 - 0.6 / height, "; ".join(subtitle), fontsize=9.5, color=GREY, va="center")
        _legend(figure, styles, lossy, (1 - side / width, 1 - _HEAD / height))
    return figure


def _table(rows: pl.DataFrame) -> _Table:
    bounds = [f"{metric}_{end}" for metric in (_Y, *AXES) for end in ("low", "high")]
    over_one = [f"speedup_over_one_device{end}" for end in ("", "_low", "_high")]
    table = require_columns(rows, "the figure of methods", (), ("exact", *bounds, *over_one))
    order = pl.col("view").replace_strict({view: index for index, view in enumerate(VIEWS)}, return_dtype=pl.Int8)
    table = table.drop_nulls([_Y]).sort("point", order).unique("point", keep="last", maintain_order=True)
    table, baseline = over_one_device(table)
    split = (pl.col("tensor_parallel") if "tensor_parallel" in table.columns else pl.lit(1)).fill_null(1)
    if baseline != ONE:  # a unit is then the group of devices over which layers are split; plain decoding has one such unit
        names = [name for name in table.columns if name == "reserved_units" or name.startswith("mean_busy_units")]
        table = table.with_columns(pl.col(name) / split for name in names).filter(pl.col("method") != registry.PLAIN)
    table = table.filter((pl.col("method") != registry.PLAIN) | (split > 1))  # plain decoding on one unit is the star
    over = baseline if "tensor_parallel" in table.columns and table["tensor_parallel"].count() else "plain decoding"
    keys = [name for name in point_names.distinguishing(table) if name in point_names.CHOICES]
    # Swept columns vary where the choice is the same.
    group = ["method", *keys]
    others = [name for name in point_names.distinguishing(table) if name not in keys]
    counts = table.group_by(group).agg(pl.col(name).drop_nulls().n_unique() for name in others)
    swept = [name for name in others if (counts[name] > 1).any()]
    own = [name for name in others if name not in swept]
    main = [name for name in point_names.MAIN if name in table.columns and name not in swept and table[name].n_unique() > 1]
    said = [*dict.fromkeys([*(name for name in point_names.WORDS if name in {*keys, *own, *main}), *keys, *own])]
    named = [", ".join([point_names.method(row), *point_names.words(row, said)]) for row in table.to_dicts()]
    table = table.with_columns(choice=pl.Series(named, dtype=pl.String))
    whole = table.select(swept).drop_nulls().unique(maintain_order=True) if swept else pl.DataFrame()
    settings = [("", table)]
    if whole.height:
        settings = []
        for values in whole.iter_rows(named=True):
            here = pl.all_horizontal(pl.col(name).is_null() | (pl.col(name) == value) for name, value in values.items())
            settings.append((", ".join(point_names.words(values, swept)), table.filter(here)))
    same = [name for name in ("tokens", "layers", "acceptance_rate", "cost_ratio") if name in table.columns]
    return _Table(over, table, settings, table["choice"].unique(maintain_order=True).to_list(), point_names.common(table, same))


def _panels(across: int, settings: int, choices: Sequence[str]) -> tuple[Figure, list[list[Axes]], float]:
    """Return the figure, a row of panels per setting (single panels stand three in a row), and the legend's width [inches]."""
    columns = (2 if settings == 4 else min(settings, 3)) if across == 1 else across
    down = -(-settings // columns) if across == 1 else settings
    side = 0.75 + 0.072 * max(len("same tokens per GPU-time"), *map(len, choices))
    width = _SIDE + columns * (_WIDE + _GAP) + side
    height = max(_HEAD + down * _HIGH + (down - 1) * _BETWEEN + _FOOT, _HEAD + 0.2 * (len(choices) + 4))
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    found: list[Axes] = []
    for index in range(across * settings):
        row, column = divmod(index, columns)
        box = (_SIDE + column * (_WIDE + _GAP), height - _HEAD - row * (_HIGH + _BETWEEN) - _HIGH, _WIDE, _HIGH)
        shared: dict[str, Any] = {"sharey": found[0]} if found else {}
        axes = figure.add_axes((box[0] / width, box[1] / height, box[2] / width, box[3] / height), **shared)
        axes.tick_params(labelleft=column == 0)
        found.append(axes)
    return figure, [found[row * across : (row + 1) * across] for row in range(settings)], side


def _panel(axes: Axes, table: pl.DataFrame, x: str, styles: dict[str, SeriesStyle], lossy: set[str]) -> None:
    axes.grid(True)
    axes.axhline(1, color=INK, linewidth=1.0, zorder=1.5, label="plain speed")
    axes.plot([1], [1], linestyle="none", marker="*", markersize=13, color=INK, zorder=2.5, label="plain decoding")
    for choice, style in styles.items():
        rows = table.filter(pl.col("choice") == choice).drop_nulls([x])
        for whole, lines, across in (
            (rows.drop_nulls([f"{_Y}_low", f"{_Y}_high"]), axes.vlines, False),
            (rows.drop_nulls([f"{x}_low", f"{x}_high"]), axes.hlines, True),
        ):
            metric, other = (x, _Y) if across else (_Y, x)
            lines(whole[other], whole[f"{metric}_low"], whole[f"{metric}_high"], colors=style.colour, linewidth=1.2, label=metric)
        axes.plot(
            rows[x], rows[_Y], linestyle="none", markersize=7, zorder=3, label=choice, **_mark(style, hollow=choice in lossy)
        )
    axes.margins(0.08)
    axes.autoscale_view()
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, 0.9), max(right, 1.3))
    if x != "compute_per_token":
        _fair(axes)
    else:
        axes.axvline(1, color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), label="plain compute")


def _mark(style: SeriesStyle, *, hollow: bool) -> dict[str, Any]:
    if hollow:
        return {"marker": style.marker, "color": style.colour, "markerfacecolor": "#ffffff", "markeredgewidth": 1.7}
    return {"marker": style.marker, "color": style.colour, "markeredgecolor": "white", "markeredgewidth": 0.6}


def _fair(axes: Axes) -> None:
    """Draw the line on which speed-up equals units: parallel plain decodings give the same throughput there."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    end = min(right, high)
    axes.plot([1, end], [1, end], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1.5, label="fair")
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)


def _legend(figure: Figure, styles: dict[str, SeriesStyle], lossy: set[str], corner: tuple[float, float]) -> None:
    handles = [Line2D([], [], linestyle="none", marker="*", markersize=12, color=INK, label="plain decoding")]
    handles += [
        Line2D([], [], linestyle="none", markersize=7, label=choice + (" (lossy)" if choice in lossy else ""),
               **_mark(style, hollow=choice in lossy))
        for choice, style in styles.items()
    ]  # fmt: skip
    even = "same tokens per GPU-time\nas plain decoding"
    handles.append(Line2D([], [], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), label=even))
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=corner, borderaxespad=0, borderpad=0, handlelength=1.6)
