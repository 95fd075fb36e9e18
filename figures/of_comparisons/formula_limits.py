"""Limits of the formulas, one figure per claim: the formula, the simulation with a profile, and the measurement."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator

from figures.common.style import COLOURS, GREY, INK, LINES, MARKERS, canvas, require_columns, styled
from model.base.checks import ParameterError
from model.logs.prediction_error import PROFILES, times_from

MOST_SERIES = 6
"""Each series has three lines, and only its marker distinguishes it."""
TITLES = {
    "verify": "Does a draft cost what Theorem 3.8 says?",
    "ppd": "Does early prediction save what Theorem 4.1 says?",
    "skipdecode": "Does skipping layers save as much time as work?",
    "bild": "Is Big Little Decoder as fast as its ratio of layers predicts?",
    "bus": "Are two processes as fast as one?",
}
"""Questions of the claims, in the order of the figures; other claims follow under their names."""
QUANTITIES = ("formula", "simulated", "measured")
_NAMES = {"formula": "the formula", "simulated": "simulated with the profile (predicted)", "measured": "measured, ± its noise"}
_BY_LAW = "simulated with the step law (predicted)"
_COLOURS = {"formula": COLOURS[1], "simulated": COLOURS[0], "measured": INK}
_LINES: dict[str, Any] = {"formula": LINES[1], "simulated": LINES[0], "measured": "none"}
_NEEDED = ("claim", "x", "formula", "simulated", "measured", "noise", "x_name", "y_name")


def figure_index(claim: str) -> int:
    """Index of a claim's figure."""
    known = [*TITLES]
    return known.index(claim) if claim in known else len(known)


def draw(rows: pl.DataFrame) -> Figure:
    """Draw the rows of one claim: formula and simulation as lines, the measurement as points with its noise.

    `rows` are those of `sim.comparison.formula_validity`: claim, x, formula, simulated, measured, noise (relative), x_name, y_name;
    optionally series, which distinguishes rows of the same x, about, the inputs of the formula, and step_law, the law that gave the
    simulation its times instead of profiles. Each series has its marker.
    """
    table = require_columns(rows, "the figure of a formula's limits", _NEEDED, ("series", "about", "step_law"))
    claims = list(dict.fromkeys(table["claim"]))
    if len(claims) > 1:
        raise ParameterError(f"the figure of a formula's limits needs rows of one claim, got {', '.join(claims)}; draw each alone")
    table = table.with_columns(pl.col("series").cast(pl.String).fill_null("")).sort("x", maintain_order=True)
    names = list(dict.fromkeys(table["series"]))
    if len(names) > MOST_SERIES:
        raise ParameterError(f"there is room for at most {MOST_SERIES} series of a claim, got {len(names)}; draw fewer")
    with styled():
        below = 0.22 * -(-(len(QUANTITIES) + len(list(filter(None, names)))) // _columns(names))  # of the legend [inches]
        height = 5.3 + below
        figure, axes = canvas(8.0, height, (0.1, (0.75 + below) / height, 0.87, 3.35 / height))
        for number, name in enumerate(names):
            _series(axes, table.filter(pl.col("series") == name), name, MARKERS[number])
        _frame(axes, table)
        figure.text(0.1, 1 - 0.3 / height, TITLES.get(claims[0], claims[0]), fontsize=13, weight="bold", va="center")
        figure.text(0.1, 1 - 0.5 / height, subtitle(table), fontsize=9.5, color=GREY, va="top", linespacing=1.4)
        _legend(figure, names, _NAMES if times_from(table) == PROFILES else _NAMES | {"simulated": _BY_LAW})
    return figure


def limit_series(rows: pl.DataFrame) -> pl.DataFrame:
    """Keep an even selection of the series where there are too many; `about` then says so.

    >>> rows = pl.DataFrame({"series": [f"k={k}" for k in range(11)], "about": "measured"})
    >>> limit_series(rows)["series"].to_list(), limit_series(rows)["about"][0]
    (['k=0', 'k=2', 'k=4', 'k=6', 'k=8', 'k=10'], 'measured; 6 of 11 series drawn')
    """
    names = list(dict.fromkeys(rows["series"]))
    if len(names) <= MOST_SERIES:
        return rows
    chosen = [names[index] for index in np.linspace(0, len(names) - 1, MOST_SERIES).round().astype(int)]
    said = pl.col("about") + f"; {MOST_SERIES} of {len(names)} series drawn"
    return rows.filter(pl.col("series").is_in(chosen)).with_columns(said.alias("about"))


def subtitle(rows: pl.DataFrame) -> str:
    """Median errors of the formula and of the simulation, as printed under the title.

    >>> found = pl.DataFrame({"formula": [2.0, 3.0], "simulated": [1.0, None], "measured": [1.0, 2.0], "about": None})
    >>> subtitle(found)
    'median error: formula 75.0 %, simulation 0.0 %'
    """
    said = []
    for name, word in (("formula", "formula"), ("simulated", "simulation")):
        own = rows.drop_nulls([name, "measured"])
        if own.height:
            errors = np.abs(own[name].to_numpy().astype(float) / own["measured"].to_numpy().astype(float) - 1)
            said.append(f"{word} {100 * np.median(errors):.1f} %")
    about = [str(each) for each in dict.fromkeys(rows["about"].drop_nulls()) if each]
    return "\n".join([f"median error: {', '.join(said) or 'unknown'}", *([fill(about[0], 105)] if about else [])])


def _series(axes: Axes, rows: pl.DataFrame, name: str, marker: str) -> None:
    end = f" {name}" if name else ""
    for quantity in QUANTITIES:
        own = rows.drop_nulls([quantity])
        if not own.height:
            continue
        colour, measured = _COLOURS[quantity], quantity == "measured"
        if measured:
            off = own["noise"].fill_null(0.0) * own[quantity]
            axes.vlines(own["x"], own[quantity] - off, own[quantity] + off, colors=colour, linewidth=1.4, label=f"noise{end}")
        axes.plot(
            own["x"], own[quantity], color=colour, linestyle=_LINES[quantity], linewidth=1.6, marker=marker,
            markersize=7 if measured else 5, markerfacecolor=colour if measured else "white", markeredgecolor=colour,
            zorder=4 if measured else 3, label=f"{quantity}{end}",
        )  # fmt: skip


def _frame(axes: Axes, table: pl.DataFrame) -> None:
    axes.grid(True)
    y_name = str(table["y_name"][0])
    axes.set_xlabel(str(table["x_name"][0]))
    axes.set_ylabel(y_name)
    xs = table["x"].to_numpy()
    if np.all(xs == np.round(xs)):
        axes.xaxis.set_major_locator(MaxNLocator(nbins=12, integer=True))
    if y_name.startswith("speed-up"):
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        axes.axhline(1.0, color=GREY, linewidth=0.8, linestyle=LINES[3], zorder=1.5, label="plain")
    axes.margins(0.06, 0.1)


def _legend(figure: Figure, names: list[str], quantities: Mapping[str, str]) -> None:
    handles = []
    for each in QUANTITIES:
        colour, face = _COLOURS[each], _COLOURS[each] if each == "measured" else "white"
        style = {"linestyle": _LINES[each], "linewidth": 1.6, "marker": MARKERS[0], "markersize": 6, "markerfacecolor": face}
        handles.append(Line2D([], [], color=colour, label=quantities[each], **style))
    handles += [
        Line2D([], [], color=GREY, linestyle="none", marker=marker, markersize=6, label=name)
        for name, marker in zip(names, MARKERS, strict=False)
        if name
    ]
    place: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0.1, 0.1 / figure.get_figheight()), "borderaxespad": 0}
    figure.legend(handles=handles, ncols=_columns(names), columnspacing=1.8, **place)


def _columns(names: list[str]) -> int:
    """Number of columns of the legend: fewer where names are long."""
    longest = max(map(len, names))
    return 3 if longest <= 24 else 2 if longest <= 48 else 1
