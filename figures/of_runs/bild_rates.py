"""Speed-up and work of Big Little Decoder over its fallback rate: speed, operations, weights read and arithmetic intensity.

All values are from a run's rows; only the ratios to plain decoding are computed here.
"""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from figures.common.style import GREY, INK, VIEWS, SeriesStyle, canvas, points, require_columns, series_styles, styled, view_handles
from figures.of_runs.operations_and_bytes import WORDS, relative
from model.base import checks

MOST_CHOICES, MOST_RATES = 4, 6
_NEEDED = ("method", "view", "fallback_rate", "rollback_rate", "speedup")
_BOUNDS = ("speedup_low", "speedup_high")
_CHOICES = {
    "variant": "variant {}", "exit_layer": "exit layer {}", "placement": "small model {}",
    "max_draft_length": "drafts of at most {}",
    "layers": "{} layers", "draft_layers": "small model of {} layers", "cost_ratio": "c = {:.3g}", "tokens": "{} tokens",
}  # fmt: skip
"""Columns that distinguish choices, besides the rates."""
_SIDE, _WIDE, _HIGH, _HEAD, _FOOT = 0.75, 3.05, 2.55, 1.15, 0.3  # [inches]


def of_run(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the rows for this figure: Big Little Decoder with given rates, without thresholds."""
    if any(name not in rows.columns for name in _NEEDED):
        return rows.clear()
    own = rows.filter(method="bild").drop_nulls(["fallback_rate", "rollback_rate", "speedup"])
    return own.filter(pl.col("fallback_threshold").is_null()) if "fallback_threshold" in own.columns else own


def fits(rows: pl.DataFrame) -> bool:
    """Return whether fallback rates were swept in these rows (of `of_run`), and all fit into the figure."""
    if not rows.height or rows["fallback_rate"].n_unique() < 2:
        return False
    return len(_choices(rows)) <= MOST_CHOICES and rows["rollback_rate"].n_unique() <= MOST_RATES


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a row of panels per choice of the method, with a line per rollback rate through the most exact view.

    `rows` is a table of results, filtered by `of_run`. Simulated points lie over the formula, the speed-up with its interval. Where
    the shapes of the models are known, further panels show the work relative to plain decoding.
    """
    table = require_columns(rows, "the figure of rates", _NEEDED, (*_BOUNDS, "outcomes_source", *_CHOICES))
    for view in table["view"].unique().sort():
        checks.one_of("view", view, VIEWS)
    table = relative(table.sort("point", maintain_order=True) if "point" in table.columns else table)
    parts = _choices(table)
    if len(parts) > MOST_CHOICES:
        raise checks.ParameterError(f"rows must be of at most {MOST_CHOICES} choices, got {len(parts)}")
    rates = table["rollback_rate"].unique().sort().to_list()
    if len(rates) > MOST_RATES:
        raise checks.ParameterError(f"rows must have at most {MOST_RATES} rollback rates, got {len(rates)}")
    styles = dict(zip(rates, series_styles(len(rates)), strict=True))
    names = [name for name in WORDS if name in table.columns and table[name].count()]
    with styled():
        width, height = _SIDE + _WIDE * max(len(names), 3), _HEAD + _HIGH * len(parts) + _FOOT
        figure, only = canvas(width, height, (0, 0, 1, 1))
        only.remove()
        for column, name in enumerate(names):
            first: Axes | None = None
            for index, part in enumerate(parts):
                left, bottom = _SIDE + _WIDE * column, _FOOT + _HIGH * (len(parts) - 1 - index) + 0.3
                box = (left / width, bottom / height, (_WIDE - 0.75) / width, (_HIGH - 0.8) / height)
                axes = figure.add_axes(box, sharey=first)
                first = first or axes
                _panel(axes, part, name, styles)
                if not index:
                    axes.set_title(WORDS[name], fontsize=10.5, pad=22)
                if index == len(parts) - 1:
                    axes.set_xlabel("fallback rate  [% of drafted tokens]")
                axes.set_ylabel("relative to plain decoding", fontsize=8.5)
                if not column:
                    axes.text(0, 1.04, _panel_name(part), transform=axes.transAxes, fontsize=9, color=GREY)
            assert first is not None
            first.set_ylim(0, 1.08 * max(*table[name].drop_nulls(), 1.0))
        _heading(figure, table, styles, height)
    return figure


def _choices(table: pl.DataFrame) -> list[pl.DataFrame]:
    return table.partition_by([name for name in _CHOICES if name in table.columns], maintain_order=True)


def _panel_name(part: pl.DataFrame) -> str:
    row = part.row(0, named=True)
    keys = ("exit_layer",) if row["exit_layer"] is not None else ("variant", "draft_layers", "cost_ratio", "placement")
    words = [_CHOICES[key].format(row[key]) for key in (*keys, "max_draft_length") if row[key] not in (None, "colocated")]
    return ", ".join(words)


def _panel(axes: Axes, part: pl.DataFrame, name: str, styles: dict[float, SeriesStyle]) -> None:
    axes.grid(True)
    axes.axhline(1, color=INK, linewidth=1.0, linestyle=(0, (1.2, 1.2)), zorder=1.5, label="plain decoding")
    for rate, style in styles.items():
        own = part.filter(rollback_rate=rate).drop_nulls([name]).sort("fallback_rate")
        views = [view for view in VIEWS if view in set(own["view"])]
        if views:
            curve = own.filter(view=views[0])
            axes.plot(
                curve["fallback_rate"], curve[name], color=style.colour, linestyle=style.line, linewidth=1.3,
                label=f"rollback {rate:g}",
            )  # fmt: skip
        if name == "speedup":
            whole = own.drop_nulls([*_BOUNDS])
            low, high = (whole[bound] for bound in _BOUNDS)
            axes.vlines(whole["fallback_rate"], low, high, colors=style.colour, linewidth=1.2, label="interval")
        for view, (size, face, edge) in points(style.colour).items():
            seen = own.filter(view=view)
            if seen.height:
                axes.plot(
                    seen["fallback_rate"], seen[name], linestyle="none", marker=style.marker, markersize=0.8 * size,
                    markerfacecolor=face, markeredgecolor=edge, markeredgewidth=1.2 if view == "formula" else 0.0, zorder=3,
                    label=f"{view} {rate:g}",
                )  # fmt: skip
    axes.xaxis.set_major_formatter(PercentFormatter(1.0, symbol=""))
    axes.margins(0.06)


def _heading(figure: Figure, table: pl.DataFrame, styles: dict[float, SeriesStyle], height: float) -> None:
    title = "Big Little Decoder: speed-up and work by fallback and rollback rate"
    left = _SIDE / figure.get_figwidth()
    figure.text(left, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="center")
    origins = "; ".join(dict.fromkeys(str(source) for source in table["outcomes_source"].drop_nulls()))
    tokens = " or ".join(str(count) for count in table["tokens"].drop_nulls().unique().sort())
    parts = [f"rates {origins}" if origins else "", "times and shapes: see [cost]", f"{tokens} tokens" if tokens else ""]
    parts.append("all relative to plain decoding; lines join points")
    figure.text(left, 1 - 0.52 / height, "; ".join(part for part in parts if part), fontsize=9.5, color=GREY, va="center")
    handles = [
        Line2D(
            [], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=5,
            label=f"rollback {100 * rate:.3g} %",
        )
        for rate, style in styles.items()
    ]
    handles += view_handles(set(table["view"]), scale=0.8)
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(left, 1 - 0.78 / height), ncols=len(handles), borderaxespad=0,
        borderpad=0, columnspacing=1.5, handlelength=2.4,
    )  # fmt: skip
