"""What each method gains and what it costs: speed-up against the units it holds, keeps busy, and the compute that a token takes."""

from __future__ import annotations

from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.baseline import ONE, over_one_device
from figures.labels import drawn, place
from figures.style import GREY, INK, VIEWS, Look, canvas, demand, house, looks
from model import checks

AXES = {
    "held_units": "compute units held",
    "mean_units": "compute units busy on average",
    "compute_per_token": "unit-time per token  [plain decoding's]",
}
_Y = "speedup"
_PLAIN, _SPLIT = "autoregressive", "tensor parallelism"
_LABELS = {
    "acceptance_rate": "α = {:.3g}", "draft_length": "γ = {}", "match_rate": "p = {:.3g}", "candidates": "k = {}",
    "fallback_rate": "f = {:.3g}", "rollback_rate": "r = {:.3g}", "max_layers": "{} layers at first", "min_layers": "{} at last",
    "mean_exit_layer": "{:.3g} layers in the mean", "exit_layer": "exit layer {}", "sequences": "batch of {}", "batching": "{}",
    "tokens": "{} tokens",
}  # fmt: skip
_IF_SWEPT = ("batching", "tokens")
_MOST_LABELS = 16
_WORDS = {
    "ppd": "Predictive Pipelined Decoding", "speculative": "speculative decoding", "bild": "Big Little Decoder",
    "skipdecode": "SkipDecode", "early_exit": "early exit",
}  # fmt: skip


def draw(rows: pl.DataFrame) -> Figure:
    """Three panels, one for each price in `AXES`; one colour and marker for each method, plain decoding a star at (1, 1).

    `rows` is a results table of several methods. The last view of a point is drawn: events know of waiting, formulas do not.
    Where `exact` says that a method writes another text than the target, its marks are hollow.
    """
    bounds = [f"{metric}_{end}" for metric in (_Y, *AXES) for end in ("low", "high")]
    told = ("exact", "ways", *bounds, "speedup_over_one_device", "speedup_over_one_device_low", "speedup_over_one_device_high")
    table = demand(rows, "the figure of methods", ("point", "view", "method", _Y, *AXES), told)
    # Plain decoding on several devices, each with its share of every layer, is another choice than on one.
    split = (pl.col("method") == _PLAIN) & (pl.col("ways") > 1).fill_null(False)
    table = table.with_columns(pl.when(split).then(pl.lit(_SPLIT)).otherwise("method").alias("method"))
    for view in table["view"].unique().sort():
        checks.one_of("view", view, VIEWS)
    order = pl.col("view").replace_strict({view: index for index, view in enumerate(VIEWS)}, return_dtype=pl.Int8)
    table = table.drop_nulls([_Y]).sort("point", order).unique("point", keep="last", maintain_order=True)
    table, baseline = over_one_device(table)
    if baseline != ONE:  # in units of as many devices as layers are split over, of which plain decoding has one
        each = pl.col("ways").fill_null(1)
        names = [name for name in table.columns if name == "held_units" or name.startswith("mean_units")]
        table = table.with_columns(pl.col(name) / each for name in names).filter(pl.col("method") != _SPLIT)
    table = demand(table, "the figure of methods (with values of speedup)", ())
    methods = [name for name in table["method"].unique(maintain_order=True) if name != _PLAIN]
    styles = dict(zip(methods, looks(len(methods)), strict=True))
    with house():
        figure, only = canvas(12.2, 5.0, (0, 0, 1, 1))
        only.remove()
        figure.subplots_adjust(left=0.055, right=0.985, bottom=0.115, top=0.775, wspace=0.1)
        first = figure.add_subplot(1, 3, 1)
        panels = [first, *(figure.add_subplot(1, 3, index, sharey=first) for index in (2, 3))]
        for axes, x in zip(panels, AXES, strict=True):
            _panel(axes, table, x, styles)
            axes.tick_params(labelleft=axes is first)
        first.set_ylabel(f"speed-up over {baseline}" if table["ways"].count() else "speed-up over plain decoding")
        figure.text(0.055, 0.945, "What each method gains, and at what price", fontsize=13, weight="bold", va="center")
        lines = [line for line in drawn(first) if len(line) == 1]  # a text may cross the lines of what is even
        left_out = place(first, _labels(table), lines)
        told = "each point is one choice of a method's parameters; up is faster, left is cheaper"
        told += "; hollow: another text than the target's (lossy)" if _lossy(table) else ""
        told += f"; labels left out for want of room: {left_out}" if left_out else ""
        figure.text(0.055, 0.892, told, fontsize=9.5, color=GREY, va="center")
        _legend(figure, styles, _lossy(table))
    return figure


def _lossy(table: pl.DataFrame) -> set[str]:
    """The methods that write another text than the target."""
    return set(table.filter(pl.col("exact").eq_missing(False))["method"])


def _panel(axes: Axes, table: pl.DataFrame, x: str, styles: dict[str, Look]) -> None:
    axes.grid(True)
    axes.axhline(1, color=INK, linewidth=1.0, zorder=1.5, label="plain speed")
    axes.plot([1], [1], linestyle="none", marker="*", markersize=13, color=INK, zorder=2.5, label="plain decoding")
    lossy = _lossy(table)
    for method, look in styles.items():
        rows = table.filter(pl.col("method") == method).drop_nulls([x])
        for whole, lines, across in (
            (rows.drop_nulls([f"{_Y}_low", f"{_Y}_high"]), axes.vlines, False),
            (rows.drop_nulls([f"{x}_low", f"{x}_high"]), axes.hlines, True),
        ):
            metric, other = (x, _Y) if across else (_Y, x)
            lines(whole[other], whole[f"{metric}_low"], whole[f"{metric}_high"], colors=look.colour, linewidth=1.2, label=metric)
        axes.plot(
            rows[x], rows[_Y], linestyle="none", markersize=7, zorder=3, label=method, **_mark(look, hollow=method in lossy)
        )
    axes.margins(0.08)
    axes.autoscale_view()
    left, right = axes.get_xlim()
    axes.set_xlim(min(left, 0.9), max(right, 1.3))
    if x != "compute_per_token":
        _fair(axes)
    else:
        axes.axvline(1, color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), label="plain compute")
    axes.set_xlabel(AXES[x])


def _mark(look: Look, *, hollow: bool) -> dict[str, Any]:
    if hollow:
        return {"marker": look.marker, "color": look.colour, "markerfacecolor": "#ffffff", "markeredgewidth": 1.7}
    return {"marker": look.marker, "color": look.colour, "markeredgecolor": "white", "markeredgewidth": 0.6}


def _fair(axes: Axes) -> None:
    """As many times faster as there are units: as many plain decodings side by side give the same tokens in the same time."""
    (left, right), (low, high) = axes.get_xlim(), axes.get_ylim()
    end = min(right, high)
    axes.plot([1, end], [1, end], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1.5, label="fair")
    axes.set_xlim(left, right)
    axes.set_ylim(low, high)


def _labels(table: pl.DataFrame) -> list[tuple[float, float, str]]:
    """What tells a point from the others of its method, while there are few."""
    if table.height > _MOST_LABELS:
        return []
    keys = [key for key in _LABELS if key in table.columns and (key not in _IF_SWEPT or table[key].n_unique() > 1)]
    texts = []
    for row in table.filter(pl.col("method") != _PLAIN).iter_rows(named=True):
        alone = {"sequences": 1, "batching": row["batching"]} if row.get("sequences") == 1 else {}
        plain = alone | ({} if row["exact"] is False else {"exit_layer": row.get("exit_layer")})  # goes without saying
        words = [_LABELS[key].format(row[key]) for key in keys if row[key] not in (None, plain.get(key))]
        texts.append((row["held_units"], row[_Y], ", ".join(words)))
    return [text for text in texts if text[2] and text[0] is not None]


def _legend(figure: Figure, styles: dict[str, Look], lossy: set[str]) -> None:
    handles = [Line2D([], [], linestyle="none", marker="*", markersize=12, color=INK, label="plain decoding")]
    handles += [
        Line2D([], [], linestyle="none", markersize=7, label=_named(method, lossy), **_mark(look, hollow=method in lossy))
        for method, look in styles.items()
    ]
    even = "as many tokens per unit-time as plain decoding"
    handles.append(Line2D([], [], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), label=even))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.055, 0.865), ncols=4, borderaxespad=0, borderpad=0, handlelength=1.6,
        columnspacing=1.5,
    )  # fmt: skip


def _named(method: str, lossy: set[str]) -> str:
    return _WORDS.get(method, method) + (" (lossy)" if method in lossy else "")
