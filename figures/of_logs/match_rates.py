"""Match rates of a decision log: how often the target's token is among the k early candidates, by layer and by output position.

Like Tables 2 and 6 to 8 of [Yang2024]: with the model's own head (N), and with heads trained for their layers (Y).

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from figures.common.style import (
    COLOURS,
    GREY,
    LINES,
    MARKERS,
    SeriesStyle,
    canvas,
    panels_in_row,
    require_columns,
    series_styles,
    styled,
)
from model.base import checks
from model.logs import position_log
from model.logs.position_log import PositionLog
from model.methods.speculative import rates_from_logs

HEADS = {"common": "N", "trained": "Y"}
_WORDS = {"common": "N: the model's own head", "trained": "Y: a head trained for the layer"}
_SHORT = {"common": "N: the model's head", "trained": "Y: trained"}
MOST_CANDIDATES, MOST_LAYERS, BINS = 4, 5, 8
_NEEDED = ("layer", "head", "k", "match_rate", "low", "high", "trials")
_BAND = 0.16


# --- Rows ---------------------------------------------------------------------------------------------------------------


def heads_of(log: PositionLog) -> list[str]:
    """Heads with which a log reads early predictions."""
    return [head for head in HEADS if head == "common" or log.table["rank_trained"].to_numpy().any()]


def _layers(log: PositionLog, head: str) -> list[int]:
    held = log.table[f"rank_{head}"].to_numpy()[0]
    return [layer for layer in range(1, log.layers) if held[layer - 1]]


def by_layer(log: PositionLog, candidates: Sequence[int]) -> pl.DataFrame:
    """One row per head, layer and k: the match rate with Wilson's interval of 95 %, with positions as independent trials."""
    rows = []
    for head in heads_of(log):
        for layer in _layers(log, head):
            for count in candidates:
                checks.whole("candidates", count, 1)
                found = rates_from_logs.rates(int((log.ranks(layer, head) <= count).sum()), log.table.height)
                rows.append((layer, head, count, *map(float, found[:3]), int(found.trials)))
    return pl.DataFrame(rows, schema=list(_NEEDED), orient="row")


def by_position(log: PositionLog, candidates: Sequence[int], layers: Sequence[int], head: str, bins: int = BINS) -> pl.DataFrame:
    """Match rates by range of output positions, `first` to `last`, inclusive, counted from 1."""
    checks.whole("bins", bins, 1)
    position = log.table["position"].to_numpy()
    edges = np.unique(np.linspace(0, position.max() + 1, bins + 1).astype(int))
    rows = []
    for count in candidates:
        for layer in layers:
            kept = log.ranks(layer, head) <= count
            for low, high in pairwise(edges.tolist()):
                part = (position >= low) & (position < high)
                found = rates_from_logs.rates(int(kept[part].sum()), int(part.sum()))
                rows.append((layer, head, count, *map(float, found[:3]), int(found.trials), low + 1, high))
    return pl.DataFrame(rows, schema=[*_NEEDED, "first", "last"], orient="row")


def subtitle(log: PositionLog) -> str:
    """Describe a log in one line: model, sequences, positions."""
    drawn = "greedy" if log.header.get("sampling") is None else "sampled"
    name = log.header["target"]["name"]
    return f"{name}, {log.layers} layers: {len(log.starts) - 1} {drawn} sequences, {log.table.height} positions (measured)"


# --- By layer -----------------------------------------------------------------------------------------------------------


def draw(log: PositionLog, candidates: Sequence[int] = (1, 3, 5)) -> Figure:
    """Draw match rates of all layers but the last: a line per k and head, with Wilson's band of 95 %."""
    return draw_rows(by_layer(log, candidates), subtitle(log))


def draw_rows(rows: pl.DataFrame, about: str) -> Figure:
    """Draw rows of `by_layer`; `about` names the measured data."""
    table = require_columns(rows, "the figure of match rates", _NEEDED)
    counts = table["k"].unique().sort().to_list()
    if len(counts) > MOST_CANDIDATES:
        raise checks.ParameterError(f"candidates must be at most {MOST_CANDIDATES} different ones, got {len(counts)}")
    heads = [head for head in HEADS if head in table["head"]]
    with styled():
        figure, axes = canvas(9.0, 5.4, (0.085, 0.1, 0.7, 0.74))
        for index, count in enumerate(counts):
            for head in heads:
                _line(axes, table.filter(k=count, head=head), "layer", _style(index, head), f"k={count} {HEADS[head]}", head)
        axes.set_xlabel("early prediction after layer")
        last = int(table["layer"].max())  # type: ignore[arg-type]
        axes.set_xticks(range(1, last + 1, 1 + last // 20))
        _frame(axes)
        axes.set_ylabel("match rate  [share of positions]")
        title = "How often is the target's token among k early candidates?"
        figure.text(0.085, 0.95, title, fontsize=13, weight="bold", va="center")
        note = "bands: 95 % (Wilson), with positions as independent trials (within a sequence they are not)"
        figure.text(0.085, 0.905, f"{about};\n{note}", fontsize=9, color=GREY, va="top", linespacing=1.3)
        handles = [
            Line2D([], [], color=COLOURS[index], linewidth=1.8, marker=MARKERS[index], label=f"k = {count}")
            for index, count in reversed([*enumerate(counts)])
        ]
        first = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.8, 0.84), borderaxespad=0, title="candidates",
                              alignment="left")  # fmt: skip
        figure.add_artist(first)
        handles = [
            Line2D([], [], color=GREY, linewidth=1.6, linestyle=_style(0, head).line, marker="o", label=_SHORT[head],
                   markerfacecolor="white" if head == "common" else GREY)
            for head in reversed(heads)
        ]  # fmt: skip
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.8, 0.52), borderaxespad=0, title="head of the layer",
                      alignment="left")  # fmt: skip
    return figure


def _style(index: int, head: str) -> SeriesStyle:
    return SeriesStyle(COLOURS[index], MARKERS[index], LINES[1] if head == "common" else LINES[0])


def _line(axes: Axes, own: pl.DataFrame, x: str, style: SeriesStyle, label: str, head: str) -> None:
    part = own.sort(x)
    axes.fill_between(part[x], part["low"], part["high"], color=style.colour, alpha=_BAND, linewidth=0, label=f"{label} band")
    axes.plot(
        part[x], part["match_rate"], color=style.colour, linestyle=style.line, linewidth=1.6, marker=style.marker, markersize=5.5,
        markerfacecolor="white" if head == "common" else style.colour, label=label,
    )  # fmt: skip


def _frame(axes: Axes) -> None:
    axes.grid(True)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))


# --- By output position -------------------------------------------------------------------------------------------------


def draw_by_position(
    log: PositionLog, candidates: Sequence[int] = (1, 3), layers: Sequence[int] | None = None, head: str | None = None,
    bins: int = BINS,
) -> Figure:
    """Draw a panel per k: match rates over the output position, a line per layer (by default a few, spread over the depth).

    Theorem 4.1 assumes one rate for all positions; the figure tests that.
    """
    chosen = heads_of(log)[-1] if head is None else head
    checks.one_of("head", chosen, position_log.HEADS)
    if not 1 <= len(candidates) <= MOST_CANDIDATES:
        raise checks.ParameterError(f"candidates must be 1 to {MOST_CANDIDATES} different ones, got {len(candidates)}")
    known = _layers(log, chosen)
    picked = sorted({known[int(index)] for index in np.linspace(0, len(known) - 1, 4)}) if layers is None else [*layers]
    if not 1 <= len(picked) <= MOST_LAYERS:
        raise checks.ParameterError(f"layers must be 1 to {MOST_LAYERS}, got {len(picked)}")
    table = by_position(log, candidates, picked, chosen, bins).with_columns(middle=(pl.col("first") + pl.col("last")) / 2)
    with styled():
        figure, panels = panels_in_row(len(candidates), 4.6, 0.13, 0.78, 0.35)
        for axes, count in zip(panels, candidates, strict=True):
            for layer, style in zip(picked, series_styles(len(picked)), strict=True):
                _line(axes, table.filter(k=count, layer=layer), "middle", style, f"layer {layer}", "trained")
            _frame(axes)
            axes.set_title(f"k = {count}", fontsize=10.5)
            axes.set_xlabel("output position")
        panels[0].set_ylabel("match rate  [share of positions]")
        for axes in panels[1:]:
            axes.set_yticklabels([])
        wide = figure.get_figwidth()
        figure.set_figwidth(wide + 1.2)  # for the legend
        for axes in panels:
            box = axes.get_position()
            axes.set_position((box.x0 * wide / (wide + 1.2), box.y0, box.width * wide / (wide + 1.2), box.height))
        left = panels[0].get_position().x0
        figure.text(left, 0.945, "Does the match rate hold throughout the sequence?", fontsize=13, weight="bold", va="center")
        figure.text(left, 0.885, f"{subtitle(log)};\n{_WORDS[chosen]}; bands: 95 % (Wilson)", fontsize=9, color=GREY, va="center")
        handles = [
            Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=5.5, label=f"{layer}")
            for layer, style in reversed([*zip(picked, series_styles(len(picked)), strict=True)])
        ]
        right = panels[-1].get_position().x1 + 0.15 / figure.get_figwidth()
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(right, 0.78), borderaxespad=0, title="after layer",
                      alignment="left")  # fmt: skip
    return figure
