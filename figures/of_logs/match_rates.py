"""How often is the target's token among the k early candidates of a layer? By layer, and by output position, of a decision log.

What Tables 2 and 6 to 8 of [Yang2024] print: of the model's own head (N), and of heads that were trained for their layers (Y).

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

from figures.common.style import COLOURS, GREY, LINES, MARKERS, Look, canvas, demand, house, looks, side_by_side
from model.base import checks
from model.logs import position_log
from model.logs.position_log import PositionLog
from model.methods.speculative import rates_from_logs

HEADS = {"common": "N", "trained": "Y"}
_WORDS = {"common": "N: the model's own head", "trained": "Y: a head trained for the layer"}
_SHORT = {"common": "N: the model's own", "trained": "Y: trained for it"}
MOST_CANDIDATES, MOST_LAYERS, BINS = 4, 5, 8
_NEEDED = ("layer", "head", "k", "match_rate", "low", "high", "trials")
_BAND = 0.16


# --- Rows ---------------------------------------------------------------------------------------------------------------


def heads_of(log: PositionLog) -> list[str]:
    """The heads that a log has read with."""
    return [head for head in HEADS if head == "common" or log.table["rank_trained"].to_numpy().any()]


def _layers(log: PositionLog, head: str) -> list[int]:
    held = log.table[f"rank_{head}"].to_numpy()[0]
    return [layer for layer in range(1, log.layers) if held[layer - 1]]


def by_layer(log: PositionLog, candidates: Sequence[int]) -> pl.DataFrame:
    """A row for each head, layer and k: the match rate with Wilson's interval of 95 %, as if positions were independent trials."""
    rows = []
    for head in heads_of(log):
        for layer in _layers(log, head):
            for count in candidates:
                checks.whole("candidates", count, 1)
                found = rates_from_logs.rates(int((log.ranks(layer, head) <= count).sum()), log.table.height)
                rows.append((layer, head, count, *map(float, found[:3]), int(found.trials)))
    return pl.DataFrame(rows, schema=list(_NEEDED), orient="row")


def by_position(log: PositionLog, candidates: Sequence[int], layers: Sequence[int], head: str, bins: int = BINS) -> pl.DataFrame:
    """The same by ranges of output positions, from `first` to `last`, both included and counted from 1."""
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


def told(log: PositionLog) -> str:
    """What a log is of, in the words that stand in a figure."""
    drawn = "greedy" if log.said.get("sampling") is None else "drawn"
    name = log.said["target"]["name"]
    return f"{name}, {log.layers} layers: {len(log.starts) - 1} {drawn} texts, {log.table.height} positions (measured)"


# --- By layer -----------------------------------------------------------------------------------------------------------


def draw(log: PositionLog, candidates: Sequence[int] = (1, 3, 5)) -> Figure:
    """Match rates of all layers but the last: a line for each k and head, with a band of Wilson's interval of 95 %."""
    return draw_rows(by_layer(log, candidates), told(log))


def draw_rows(rows: pl.DataFrame, about: str) -> Figure:
    """The same of rows as `by_layer` makes them; `about` says what was measured."""
    table = demand(rows, "the figure of match rates", _NEEDED)
    counts = table["k"].unique().sort().to_list()
    if len(counts) > MOST_CANDIDATES:
        raise checks.ParameterError(f"candidates must be at most {MOST_CANDIDATES} different ones, got {len(counts)}")
    heads = [head for head in HEADS if head in table["head"]]
    with house():
        figure, axes = canvas(9.0, 5.4, (0.085, 0.1, 0.7, 0.74))
        for index, count in enumerate(counts):
            for head in heads:
                _line(axes, table.filter(k=count, head=head), "layer", _look(index, head), f"k={count} {HEADS[head]}", head)
        axes.set_xlabel("early prediction after layer")
        last = int(table["layer"].max())  # type: ignore[arg-type]
        axes.set_xticks(range(1, last + 1, 1 + last // 20))
        _frame(axes)
        axes.set_ylabel("match rate  [share of positions]")
        title = "How often is the target's token among k early candidates?"
        figure.text(0.085, 0.95, title, fontsize=13, weight="bold", va="center")
        told = "bands: 95 % (Wilson), as if positions were independent; those of a sequence are not"
        figure.text(0.085, 0.905, f"{about};\n{told}", fontsize=9, color=GREY, va="top", linespacing=1.3)
        handles = [
            Line2D([], [], color=COLOURS[index], linewidth=1.8, marker=MARKERS[index], label=f"k = {count}")
            for index, count in reversed([*enumerate(counts)])
        ]
        first = figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.8, 0.84), borderaxespad=0, title="candidates",
                              alignment="left")  # fmt: skip
        figure.add_artist(first)
        handles = [
            Line2D([], [], color=GREY, linewidth=1.6, linestyle=_look(0, head).line, marker="o", label=_SHORT[head],
                   markerfacecolor="white" if head == "common" else GREY)
            for head in reversed(heads)
        ]  # fmt: skip
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.8, 0.52), borderaxespad=0, title="head of the layer",
                      alignment="left")  # fmt: skip
    return figure


def _look(index: int, head: str) -> Look:
    return Look(COLOURS[index], MARKERS[index], LINES[1] if head == "common" else LINES[0])


def _line(axes: Axes, own: pl.DataFrame, x: str, look: Look, label: str, head: str) -> None:
    part = own.sort(x)
    axes.fill_between(part[x], part["low"], part["high"], color=look.colour, alpha=_BAND, linewidth=0, label=f"{label} band")
    axes.plot(
        part[x], part["match_rate"], color=look.colour, linestyle=look.line, linewidth=1.6, marker=look.marker, markersize=5.5,
        markerfacecolor="white" if head == "common" else look.colour, label=label,
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
    """A panel for each k: match rates over the output position, a line for each layer (some spread over the depth where not given).

    Does a rate hold throughout a text? Theorem 4.1 takes one for all positions.
    """
    chosen = heads_of(log)[-1] if head is None else head
    checks.one_of("head", chosen, position_log.HEADS)
    if not 1 <= len(candidates) <= MOST_CANDIDATES:
        raise checks.ParameterError(f"candidates must be 1 to {MOST_CANDIDATES} different ones, got {len(candidates)}")
    known = _layers(log, chosen)
    picked = sorted({known[int(place)] for place in np.linspace(0, len(known) - 1, 4)}) if layers is None else [*layers]
    if not 1 <= len(picked) <= MOST_LAYERS:
        raise checks.ParameterError(f"layers must be 1 to {MOST_LAYERS}, got {len(picked)}")
    table = by_position(log, candidates, picked, chosen, bins).with_columns(middle=(pl.col("first") + pl.col("last")) / 2)
    with house():
        figure, panels = side_by_side(len(candidates), 4.6, 0.13, 0.78, 0.35)
        for axes, count in zip(panels, candidates, strict=True):
            for layer, look in zip(picked, looks(len(picked)), strict=True):
                _line(axes, table.filter(k=count, layer=layer), "middle", look, f"layer {layer}", "trained")
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
        figure.text(left, 0.885, f"{told(log)};\n{_WORDS[chosen]}; bands: 95 % (Wilson)", fontsize=9, color=GREY, va="center")
        handles = [
            Line2D([], [], color=look.colour, linestyle=look.line, marker=look.marker, markersize=5.5, label=f"{layer}")
            for layer, look in reversed([*zip(picked, looks(len(picked)), strict=True)])
        ]
        right = panels[-1].get_position().x1 + 0.15 / figure.get_figwidth()
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(right, 0.78), borderaxespad=0, title="after layer",
                      alignment="left")  # fmt: skip
    return figure
