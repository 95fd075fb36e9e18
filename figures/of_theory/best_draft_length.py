"""Map of the best draft length and its speed-up, over acceptance rate and cost ratio.

Theorem 3.8 of [Leviathan2023], for many tokens and a verification in one pass.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import itertools

import numpy as np
import polars as pl
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import BoundaryNorm, ListedColormap, to_hex
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, NullFormatter
from numpy.typing import NDArray

from figures.common.label_placement import label_at_right, label_points
from figures.common.style import GREY, INK, canvas, require_columns, styled
from model.methods.speculative import theory as speculative

Floats = NDArray[np.float64]

EDGES = (0, 1, 2, 3, 4, 5, 7, 10, 15, 25)
"""Edges of the colours: draft lengths 0, 1, 2, 3, 4, 5-6, 7-9, 10-14, 15-24, and 25 or more."""
SPEEDS = (1.1, 1.5, 2.0, 3.0, 5.0, 10.0)
_LOW, _HIGH = 0.005, 1.0


def draw(rows: pl.DataFrame | None = None) -> Figure:
    """Draw the best draft length for many tokens as colours, and its speed-up as contour lines.

    Where the acceptance rate is at most the cost ratio, plain decoding is fastest. `rows`, if given, has acceptance_rate and
    cost_ratio, optionally name: each row is marked.
    """
    rates = np.linspace(0.002, 0.998, 500)
    ratios = np.geomspace(_LOW, _HIGH, 500)
    needed = "acceptance_rate", "cost_ratio"
    marked = None if rows is None else require_columns(rows, "the map of draft lengths", needed, ("name",))
    with styled():
        figure, axes = canvas(8.6, 6.0, (0.09, 0.105, 0.74, 0.745))
        _limits(axes)
        lengths = speculative.optimal_draft_length(rates, ratios[:, None])
        speeds = speculative.speedup(rates, lengths, ratios[:, None])
        _regions(axes, rates, ratios, lengths, speeds)
        _speeds(axes, rates, ratios, speeds)
        if marked is not None:
            _points(axes, marked)
        figure.text(0.09, 0.955, "Best draft length, and its speed-up", fontsize=13, weight="bold", va="center")
        subtitle = "colours: best draft length γ; lines: speed-up over plain decoding (Theorem 3.8, many tokens)"
        figure.text(0.09, 0.905, subtitle, fontsize=9.5, color=GREY, va="center")
    return figure


def _limits(axes: Axes) -> None:
    axes.set_xlim(0, 1)
    axes.set_yscale("log")
    axes.set_ylim(_LOW, _HIGH)
    axes.set_yticks([0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1])
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.set_xlabel("acceptance rate α per tested token")
    axes.set_ylabel("cost ratio c (draft pass / target pass)")


def _regions(axes: Axes, rates: Floats, ratios: Floats, lengths: NDArray[np.int64], speeds: Floats) -> None:
    ramp = [to_hex(colormaps["cividis"](0.98 - 0.68 * index / (len(EDGES) - 2))) for index in range(len(EDGES) - 1)]
    norm = BoundaryNorm([*EDGES, 10**9], len(EDGES))
    colours = ListedColormap(["#ececec", *ramp])
    axes.pcolormesh(rates, ratios, lengths, cmap=colours, norm=norm, shading="nearest", rasterized=True, label="best length")
    even = np.geomspace(_LOW, _HIGH, 200)
    axes.plot(even, even, color=INK, linewidth=1.4, label="break-even")
    axes.text(0.25, 0.62, "plain decoding is fastest: α ≤ c", fontsize=10.5, color=INK, ha="center", va="center")
    faster = np.searchsorted(SPEEDS, speeds)
    for low, high in zip(EDGES[1:], [*EDGES[2:], None], strict=True):
        inside = (lengths >= low) & (lengths < (high or np.inf))
        name = f"{low}" if high == low + 1 else f"{low}–{high - 1}" if high else f"{low} +"
        _name(axes, rates, ratios, np.where(inside, faster, -1), f"γ = {name}" if low == 1 else name)


def _name(axes: Axes, rates: Floats, ratios: Floats, fields: NDArray[np.int64], name: str) -> None:
    """Name a region where it is widest, between its ends (a field of -1) and the contour lines."""
    best, at = 0, (0, 0)
    for row in np.flatnonzero((ratios > 0.0075) & (ratios < 0.3))[::8]:
        ends = np.flatnonzero(np.diff(fields[row], prepend=-1, append=-1)).tolist()
        for left, right in itertools.pairwise(ends):
            if fields[row, left] >= 0 and right - left > best:
                best, at = right - left, ((left + right) // 2, int(row))
    if best:
        text = axes.text(rates[at[0]], ratios[at[1]], name, fontsize=9, ha="center", va="center", color=INK, zorder=4)
        text.set_path_effects([withStroke(linewidth=2.5, foreground="#ffffff")])


def _speeds(axes: Axes, rates: Floats, ratios: Floats, speeds: Floats) -> None:
    # A light rim, so that a line is seen on every colour.
    for colour, width in (("#ffffff", 2.8), (INK, 1.1)):
        axes.contour(rates, ratios, speeds, levels=SPEEDS, colors=colour, linewidths=width)
    # Along the right edge the speed falls as the cost of drafts grows.
    edge = np.interp(np.negative(SPEEDS), -speeds[:, -1], ratios)
    label_at_right(axes, [(float(ratio), f"{speed:g}×", INK) for ratio, speed in zip(edge, SPEEDS, strict=True)], size=9)


def _points(axes: Axes, rows: pl.DataFrame) -> None:
    axes.plot(
        rows["acceptance_rate"], rows["cost_ratio"], linestyle="none", marker="o", markersize=8, markerfacecolor="#d55e00",
        markeredgecolor="white", markeredgewidth=1.4, zorder=5, label="points",
    )  # fmt: skip
    labels = [(rate, ratio, name) for rate, ratio, name in rows.select("acceptance_rate", "cost_ratio", "name").rows() if name]
    before = len(axes.texts)
    label_points(axes, labels, [np.array([(rate, ratio)]) for rate, ratio, _ in labels], size=9)
    for text in axes.texts[before:]:
        text.set_path_effects([withStroke(linewidth=2.5, foreground="#ffffff")])
