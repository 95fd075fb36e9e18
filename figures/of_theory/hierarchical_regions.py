"""Regions where a third, medium model pays: hierarchical decoding against its pairs of models, over its two acceptance rates.

[Deck] N. Tulsian, V. Goyal, R. Aggarwal. Speculative decoding (slides), "Hierarchical speculative decoding".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from figures.common.label_placement import label_points
from figures.common.style import COLOURS, GREY, INK, canvas, require_columns, styled
from model.base import checks
from model.methods.hierarchical import theory as hierarchical
from model.methods.speculative import theory as speculative

Floats = NDArray[np.float64]

READINGS = {
    "literal": "literal: the medium model repeats a token",
    "reuse": "reuse: its checking pass gives a token",
    "bonus": "bonus: also one after a whole draft",
}
"""Readings drawn, with the title of each column; `recursive` has one more parameter."""
REGIONS = {
    "nothing": ("plain decoding is fastest", "#e3e3e3", "plain decoding\nis fastest"),
    "neither": ("three models are slower than either pair", "#f6d9c4", "both pairs\nare faster"),
    "medium": ("three models beat large + medium, lose to large + small", "#b9d9ee", "large +\nsmall\nis faster"),
    "small": ("three models beat large + small, lose to large + medium", "#d9c6e6", "large +\nmedium\nis faster"),
    "both": ("three models beat both pairs", COLOURS[2], "three\nwin"),
}
"""Legend label, colour and label inside each region, in the order of the numbers of `region`."""
_COSTS = ("cost_ratio", "medium_cost_ratio", "draft_length")
_CELLS = 300
_LETTER = 0.0105  # half of a letter's width, as a share of the map's
MOST_COSTS = 3
"""Most choices of costs in one figure."""


def example() -> pl.DataFrame:
    """Costs and rates of the slides' speed-ups, and cheap models with assumed costs.

    The slides do not time their medium model: half a pass of the large one is assumed, and a draft length of 3.

    >>> example().filter(reading="literal")["medium_acceptance_rate"].round(3).to_list()
    [0.972]
    """
    from model.published import deck_analysis, deck_tables

    costs = {"cost_ratio": deck_analysis.cost_ratio("ende"), "medium_cost_ratio": 0.5, "draft_length": deck_tables.DRAFT_LENGTH}
    rows: list[dict[str, Any]] = []
    for reading in deck_analysis.READINGS:
        large, medium = deck_analysis.hierarchy_rates(costs["medium_cost_ratio"], reading)
        rows.append({**costs, "reading": reading, "acceptance_rate": large, "medium_acceptance_rate": medium, "name": "slides"})
    rows.append({"cost_ratio": 0.02, "medium_cost_ratio": 0.2, "draft_length": 3})
    return pl.DataFrame(rows, infer_schema_length=None)


def region(
    acceptance_rate: Floats, medium_acceptance_rate: Floats, costs: Mapping[str, Any], reading: str
) -> NDArray[np.int64]:
    """Index of the region of `REGIONS` at these rates; all three schemes have the same draft length.

    Assumed: the large model accepts the small one's tokens with the product of the two rates a1 and a2, the probability that both
    models accept. Total variations only bound this rate, between a1 + a2 - 1 and 1 - |a1 - a2|.

    >>> costs = {"cost_ratio": 0.02, "medium_cost_ratio": 0.2, "draft_length": 3}
    >>> [list(REGIONS)[region(np.array(rate), np.array(0.9), costs, "reuse")] for rate in (0.05, 0.5, 0.9)]
    ['nothing', 'medium', 'medium']
    >>> list(REGIONS)[region(np.array(0.9), np.array(0.5), costs, "reuse")]
    'both'
    """
    gamma, small, medium = costs["draft_length"], costs["cost_ratio"], costs["medium_cost_ratio"]
    three = hierarchical.speedup(acceptance_rate, medium_acceptance_rate, gamma, small, medium, reading=reading)
    with_medium = speculative.speedup(acceptance_rate, gamma, medium)
    with_small = speculative.speedup(acceptance_rate * medium_acceptance_rate, gamma, small)
    beats = 1 + (three > with_medium) + 2 * (three > with_small)
    pays = np.maximum(np.maximum(three, with_medium), with_small) > 1
    return np.asarray(np.where(pays, beats, 0), dtype=np.int64)


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a row of maps per choice of costs, with a column per reading of the scheme.

    `rows` has cost_ratio, medium_cost_ratio and draft_length, optionally points: acceptance_rate, medium_acceptance_rate, the
    reading in which they are marked (all, if null) and a name.
    """
    table = require_columns(
        rows, "the figure of hierarchies", _COSTS, ("acceptance_rate", "medium_acceptance_rate", "reading", "name")
    ).drop_nulls(_COSTS)
    table = require_columns(table, "the figure of hierarchies (with costs)", ())
    for reading in table["reading"].drop_nulls().unique().sort():
        checks.one_of("reading", reading, READINGS)
    parts = table.partition_by(_COSTS, maintain_order=True)
    if len(parts) > MOST_COSTS:
        raise checks.ParameterError(f"rows must be of at most {MOST_COSTS} choices of costs, got {len(parts)}")
    with styled():
        height = 1.24 + 3.95 * len(parts)
        figure, only = canvas(11.6, height, (0, 0, 1, 1))
        only.remove()
        for index, part in enumerate(parts):
            bottom = 0.62 + 3.95 * (len(parts) - 1 - index)
            figure.text(0.065, (bottom + 3.22) / height, _costs(part), fontsize=10.5, weight="bold", va="center")
            for column, (reading, words) in enumerate(READINGS.items()):
                axes = figure.add_axes((0.065 + 0.31 * column, bottom / height, 0.285, 2.8 / height))
                _map(axes, part, reading)
                axes.set_title(words, fontsize=9.5)
                axes.tick_params(labelleft=not column)
                if not column:
                    axes.set_ylabel("P(large accepts the medium model's token)")
        title = "When does a medium model between the large and the small one pay?"
        figure.text(0.065, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="center")
        subtitle = (
            "many tokens, each check in one pass;"
            " assumed: the large model accepts the small model's tokens with the product of the two rates"
        )
        figure.text(0.065, 1 - 0.54 / height, subtitle, fontsize=9.5, color=GREY, va="center")
        _legend(figure, height)
    return figure


def _costs(part: pl.DataFrame) -> str:
    row = part.row(0, named=True)
    names = part["name"].drop_nulls().unique(maintain_order=True).to_list()
    costs = f"small model's pass {row['cost_ratio']:.3g}, medium model's {row['medium_cost_ratio']:.3g} of the large model's"
    return f"{costs};  γ = {row['draft_length']:g}" + (f";  point: {', '.join(names)}" if names else "")


def _map(axes: Axes, part: pl.DataFrame, reading: str) -> None:
    costs = part.row(0, named=True)
    rates = (np.arange(_CELLS) + 0.5) / _CELLS
    found = region(rates[:, None], rates, costs, reading)
    colours = ListedColormap([colour for _, colour, _ in REGIONS.values()])
    axes.pcolormesh(
        rates, rates, found, cmap=colours, vmin=-0.5, vmax=len(REGIONS) - 0.5, shading="nearest", rasterized=True, label="regions"
    )
    for index in range(len(REGIONS)):
        if np.any(found == index) and not np.all(found == index):
            axes.contour(rates, rates, found == index, levels=[0.5], colors="white", linewidths=0.8)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    axes.set_xlabel("P(medium accepts the small model's token)")
    own = part.filter(pl.col("reading").is_null() | (pl.col("reading") == reading))
    own = own.drop_nulls(["acceptance_rate", "medium_acceptance_rate"])
    if own.height:
        axes.plot(
            own["medium_acceptance_rate"], own["acceptance_rate"], linestyle="none", marker="o", markersize=8, color="#d55e00",
            markeredgecolor="white", markeredgewidth=1.4, zorder=5, clip_on=False, label="points",
        )  # fmt: skip
    at = own.select("medium_acceptance_rate", "acceptance_rate", "name").rows()
    for x, y, _ in at:  # keep the regions' labels away from points and their names
        found = np.where((np.abs(rates - x) < 0.2) & (np.abs(rates[:, None] - y) < 0.1), -1, found)
    _names(axes, rates, found)
    before = len(axes.texts)
    label_points(axes, [(x, y, name) for x, y, name in at if name], [], size=9)
    for text in axes.texts[before:]:
        text.set_path_effects([withStroke(linewidth=2.5, foreground="#ffffff")])


def _names(axes: Axes, rates: Floats, found: NDArray[np.int64]) -> None:
    """Label each region where it has the most room, if the label fits."""
    for index, (_, _, name) in enumerate(REGIONS.values()):
        room = _room(found == index)
        row, column = np.unravel_index(int(room.argmax()), room.shape)
        if room[row, column] < _LETTER * max(len(line) for line in name.split("\n")) * _CELLS**2:
            continue
        axes.text(
            rates[column], rates[row], name, fontsize=9, ha="center", va="center", color=INK, zorder=4, linespacing=1.05
        ).set_path_effects([withStroke(linewidth=2.5, foreground="#ffffff")])


def _room(inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Distance of each cell to its region's end, in 1/_CELLS of a cell; vertical distances count double: labels are wide."""
    across = np.minimum(_run(inside), _run(inside[:, ::-1])[:, ::-1])
    along = np.minimum(_run(inside.T), _run(inside.T[:, ::-1])[:, ::-1]).T
    room: NDArray[np.int64] = np.minimum(across, 2 * along)
    # Ties go to the cell with more room on the longer side.
    return np.where(room > 0, _CELLS * room + across + along, 0)


def _run(inside: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Number of consecutive cells of the region in a row, up to and including each cell."""
    count = np.zeros(inside.shape, dtype=np.int64)
    count[:, 0] = inside[:, 0]
    for column in range(1, inside.shape[1]):
        count[:, column] = np.where(inside[:, column], count[:, column - 1] + 1, 0)
    return count


def _legend(figure: Figure, height: float) -> None:
    handles = [Patch(facecolor=colour, label=words) for words, colour, _ in REGIONS.values()]
    figure.legend(
        handles=handles[::-1], loc="upper left", bbox_to_anchor=(0.062, 1 - 0.7 / height), ncols=3, borderaxespad=0, borderpad=0,
        columnspacing=1.5,
    )  # fmt: skip
