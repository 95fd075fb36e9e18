"""Speed-up and work of each choice of a run, relative to plain decoding: operations, weights read and arithmetic intensity.

Like Figure 8 of [Kim2023], for any method, from a table of results.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import MaxNLocator

from figures.common import point_names
from figures.common.style import GREY, INK, NAMES, VIEWS, canvas, require_columns, series_styles, styled
from model.base import checks
from model.methods import registry

WORDS = {
    "speedup": "speed-up",
    "flops": "FLOPs per token",
    "weights": "weights read",
    "intensity": "arithmetic intensity",
}
"""Quantities drawn, relative to plain decoding, with their titles."""
_OF = {"flops": "flops_per_token", "weights": "weight_bytes_per_token", "intensity": "arithmetic_intensity"}
MOST_POINTS = 16
_MAIN = {name: point_names.WORDS[name] for name in (*point_names.MAIN[1:], "mean_exit_layer")}
"""Columns always in a choice's name; the others are used only where choices of a method differ in them."""
_MORE = {
    name: (point_names.WORDS | {"occupancy": "{:.0%} occupied"})[name] for name in (
        "form", "variant", "placement", "measure", "fill", "sequences", "batching", "occupancy", "fallback_threshold",
        "rollback_threshold", "max_draft_length", "warm_up", "power", "cost_ratio", "data_set", "units", "tokens",
    )
}  # fmt: skip
_SIDE, _WIDE, _BAR, _HEAD, _FOOT = 4.1, 2.45, 0.34, 1.45, 0.55  # [inches]


def relative(rows: pl.DataFrame) -> pl.DataFrame:
    """Add flops, weights and intensity relative to plain decoding, where they are known.

    >>> rows = pl.DataFrame({"flops_per_token": [6.0], "plain_flops_per_token": [4.0]})
    >>> relative(rows)["flops"].to_list()
    [1.5]
    """
    known = [name for name, of in _OF.items() if of in rows.columns and f"plain_{of}" in rows.columns]
    return rows.with_columns(**{name: pl.col(_OF[name]) / pl.col(f"plain_{_OF[name]}") for name in known})


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a bar per point of a table of results, in a panel per known quantity of `WORDS`, from the point's most exact view.

    A cross shows the last view, with the interval of its speed-up. Bars of lossy methods (`exact` false) are hatched.
    """
    optional = ("exact", "speedup_low", "speedup_high", "outcomes_source", *_MAIN, *_MORE)
    table = require_columns(rows, "the figure of choices", ("point", "view", "method", "speedup"), optional)
    for view in table["view"].unique().sort():
        checks.one_of("view", view, VIEWS)
    table = relative(table).drop_nulls(["speedup"])
    table = require_columns(table, "the figure of choices (with values of speedup)", ())
    if (count := table["point"].n_unique()) > MOST_POINTS:
        raise checks.ParameterError(f"the figure of choices has room for at most {MOST_POINTS} points, got {count}; choose some")
    order = pl.col("view").replace_strict({view: index for index, view in enumerate(VIEWS)}, return_dtype=pl.Int8)
    table = table.sort("point", order, maintain_order=True)
    names = [name for name in WORDS if name in table.columns and table[name].count()]
    methods = [name for name in table["method"].unique(maintain_order=True) if name != registry.PLAIN]
    colours = {registry.PLAIN: GREY}
    colours |= {name: style.colour for name, style in zip(methods, series_styles(len(methods)), strict=True)}
    with styled():
        width = _SIDE + _WIDE * max(len(names), 2)
        height = _HEAD + _BAR * max(count, 3) + _FOOT
        figure, only = canvas(width, height, (0, 0, 1, 1))
        only.remove()
        for column, name in enumerate(names):
            box = ((_SIDE + _WIDE * column) / width, _FOOT / height, (_WIDE - 0.3) / width, 1 - (_HEAD + _FOOT) / height)
            axes = figure.add_axes(box)
            _bars(axes, table, name, colours)
            axes.set_title(WORDS[name], fontsize=10.5)
            axes.set_yticks(range(count), _labels(table) if not column else [""] * count, fontsize=8.5)
        _heading(figure, table, width, height)
    return figure


def _bars(axes: Axes, table: pl.DataFrame, name: str, colours: dict[str, str]) -> None:
    axes.grid(True, axis="x")
    known = table.drop_nulls([name])
    positions = {point: position for position, point in enumerate(table["point"].unique(maintain_order=True))}
    first = known.unique("point", keep="first", maintain_order=True)
    last = known.unique("point", keep="last", maintain_order=True).filter(pl.col("view") != "formula")
    for row in first.iter_rows(named=True):
        lossy = row["exact"] is False
        axes.barh(
            positions[row["point"]], row[name], 0.7, color=colours[row["method"]], edgecolor="white", linewidth=0,
            hatch="////" if lossy else "", label=row["method"],
        )  # fmt: skip
    at = [positions[point] for point in last["point"]]
    axes.plot(last[name], at, linestyle="none", marker="x", markersize=5, color=INK, label="last")
    if name == "speedup":
        whole = last.drop_nulls(["speedup_low", "speedup_high"])
        at = [positions[point] for point in whole["point"]]
        axes.hlines(at, whole["speedup_low"], whole["speedup_high"], colors=INK, linewidth=1.2, label="interval")
    top = max(*known[name], 1.0)
    for row in first.iter_rows(named=True):
        seen = [row[name], *last.filter(point=row["point"])[name]]
        if name == "speedup":
            seen += last.filter(point=row["point"])["speedup_high"].drop_nulls().to_list()
        text = axes.annotate(
            f"{row[name]:#.3g}", (max(seen), positions[row["point"]]), (5, 0), textcoords="offset points", va="center", fontsize=8,
            zorder=4,
        )  # fmt: skip
        text.set_path_effects([withStroke(linewidth=2.5, foreground="#ffffff")])
    axes.axvline(1, color=INK, linewidth=1.0, linestyle=(0, (1.2, 1.2)), zorder=2.5, label="plain decoding")
    axes.set_xlim(0, 1.25 * top)
    axes.set_ylim(len(positions) - 0.5, -0.5)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.set_xlabel("relative to plain decoding")
    axes.tick_params(axis="y", length=0)


def _labels(table: pl.DataFrame) -> list[str]:
    once = table.unique("point", keep="first", maintain_order=True)
    several = once["method"].n_unique() > 1
    labels = []
    for row in once.iter_rows(named=True):
        own = once.filter(method=row["method"])
        batches = own.filter(pl.col("sequences") > 1)  # for one sequence all kinds of batching are the same
        keys = {key: form for key, form in _MORE.items() if (batches if key == "batching" else own)[key].n_unique() > 1} | _MAIN
        words = [form.format(row[key]) for key, form in keys.items() if row[key] is not None and not _plain(key, row)]
        labels.append(", ".join([registry.label(row["method"])] * (several or not words) + words))
    return labels


def _plain(key: str, row: dict[str, Any]) -> bool:
    """Return whether a value is the default and needs no label: a batch of one sequence, or full occupancy."""
    alone = key in ("sequences", "batching") and row["sequences"] == 1
    return alone or (key == "occupancy" and row[key] == 1)


def _heading(figure: Figure, table: pl.DataFrame, width: float, height: float) -> None:
    left = 0.2 / width
    title = "Speed-up of each choice, and its compute and memory traffic"
    figure.text(left, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="center")
    method = [registry.label(name) for name in table["method"].unique(maintain_order=True)]
    sources = "; ".join(dict.fromkeys(str(source) for source in table["outcomes_source"].drop_nulls()))
    subtitle = [method[0] if len(method) == 1 else "", f"rates {sources}" if sources else "", "times and shapes: see [cost]"]
    tokens = table["tokens"].drop_nulls().unique().to_list()
    subtitle += [f"{tokens[0]} tokens"] if len(tokens) == 1 else []
    figure.text(left, 1 - 0.54 / height, "; ".join(text for text in subtitle if text), fontsize=9.5, color=GREY, va="center")
    views = [view for view in VIEWS if view in set(table["view"])]
    exact, lossy = _kinds(table)
    handles: list[Patch | Line2D] = []
    if lossy:
        handles += [Patch(facecolor=GREY, label="exact: output equals the target's")] if exact else []
        other = "lossy: output differs from the target's"
        handles.append(Patch(facecolor=GREY, hatch="////", edgecolor="white", linewidth=0, label=other))
    handles.append(Line2D([], [], color=INK, linewidth=1.0, linestyle=(0, (1.2, 1.2)), label="plain decoding"))
    if views[-1] != "formula":
        shown = f"bars: {NAMES[views[0]]}; crosses: {NAMES[views[-1]]}, 95 %" if len(views) > 1 else NAMES[views[-1]]
        handles.append(Line2D([], [], linestyle="none", marker="x", markersize=5, color=INK, label=shown))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(left, 1 - 0.68 / height), ncols=2, borderaxespad=0,
        borderpad=0,
    )  # fmt: skip


def _kinds(table: pl.DataFrame) -> tuple[bool, bool]:
    """Return whether there are exact methods, and whether there are lossy ones."""
    lossy = [value is False for value in table["exact"]]
    return not all(lossy), any(lossy)
