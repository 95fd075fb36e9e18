"""Style of all figures: colours that the colour-blind can distinguish, a second cue besides colour, and checks of the rows."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import matplotlib
import polars as pl
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.transforms import Bbox

from figures.common.caption import SUBJECT
from model.base.checks import ParameterError

_OKABE_ITO = matplotlib.color_sequences["okabe_ito"]
# Without black, used for text and the events view, and without yellow, which is invisible on white.
COLOURS = tuple(to_hex(_OKABE_ITO[index]) for index in (5, 6, 3, 7, 1, 2))
Marker = str | tuple[int, Literal[0, 1, 2], int]
"""A marker of matplotlib: its name, or (points, 0 for a polygon or 1 for a star, angle)."""
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "p", "<", ">", "*", "h")
MORE_MARKERS: tuple[Marker, ...] = (*MARKERS, "d", "8", (4, 1, 0), (6, 1, 0), (3, 1, 0), (8, 1, 0))
"""Markers where every method has its own."""
# Dashes as lengths of line and gap [line widths].
LINES: tuple[tuple[float, tuple[float, ...]], ...] = (
    (0, ()), (0, (4, 1.6)), (0, (6, 2, 1, 2)), (0, (1, 1.6)), (0, (10, 2)), (0, (5, 1, 1, 1, 1, 1))
)  # fmt: skip
INK, GREY, PALE = "#000000", "#595959", "#c8c8c8"

DENSITY = 150
"""Dots per inch of a PNG file."""

VIEWS = ("formula", "paths", "events")
NAMES = {"formula": "formula", "paths": "simulated: paths", "events": "simulated: events"}

_RULES: dict[Any, Any] = {
    "font.size": 10.0,
    "axes.titlesize": 12.0,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "grid.color": "#e4e4e4",
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "legend.title_fontsize": 9.0,
    "hatch.linewidth": 0.6,
    # Letters are not fitted to the pixels of a PNG file: they are as wide as in the SVG file, and drawn in half the time.
    "text.hinting": "none",
    "svg.hashsalt": "decodesim",
    "svg.fonttype": "path",
}


class SeriesStyle(NamedTuple):
    """Colour, marker and line that distinguish one series."""

    colour: str
    marker: Marker
    line: tuple[float, tuple[float, ...]]


_DEFAULTS: dict[Any, Any] = {name: value for name, value in dict.items(matplotlib.rcParamsDefault) if name != "backend"}


@contextmanager
def styled() -> Iterator[None]:
    """Draw with these settings only: the user's matplotlibrc has no effect, and the settings end with the block."""
    with matplotlib.rc_context():
        # As `matplotlib.rcdefaults` does, which reads 30 files of styles to know that of these settings only the backend stays.
        dict.update(matplotlib.rcParams, _DEFAULTS)
        matplotlib.rcParams.update(_RULES)
        yield


def canvas(width: float, height: float, box: tuple[float, float, float, float]) -> tuple[Figure, Axes]:
    """Return a figure [inches] with one pair of axes in `box` (left, bottom, width, height as shares of the figure)."""
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    return figure, figure.add_axes(box)


def panels_in_row(count: int, height: float, bottom: float, top: float, gap: float) -> tuple[Figure, list[Axes]]:
    """Return a figure of `count` panels in a row, between `bottom` and `top` (shares of its height), `gap` [inches] after each."""
    left, panel = 0.8, {1: 5.6, 2: 4.2}.get(count, 3.2)
    width = left + count * (panel + gap)
    figure = Figure(figsize=(width, height))
    FigureCanvasAgg(figure)
    boxes = [((left + index * (panel + gap)) / width, bottom, panel / width, top - bottom) for index in range(count)]
    return figure, [figure.add_axes(box) for box in boxes]


def page(figure: Figure) -> Bbox:
    """Return the page that a figure needs [inches]: its size, extended where labels reach beyond it.

    It is measured at the density of the PNG file, which then finds the same words measured.
    """
    density = figure.dpi
    figure.set_dpi(DENSITY)
    try:
        return Bbox.union([Bbox.from_bounds(0, 0, *figure.get_size_inches()), figure.get_tightbbox()])
    finally:
        figure.set_dpi(density)


def with_subject_line(figure: Figure, about: str) -> Figure:
    """Return the figure with a small line at its top that names its subject; unchanged for an empty line."""
    if about:
        width, height = figure.get_size_inches()
        titles = [text for text in figure.texts if float(text.get_fontsize()) >= 12]  # the line is aligned with the title
        left = titles[0].get_position()[0] if titles else 0.1 / width
        size = min(8.0, 8.0 * (1 - left) * width / (0.065 * len(about)))
        figure.text(left, 1 - 0.09 / height, about, fontsize=size, color=GREY, va="center", gid=SUBJECT)
    return figure


def series_styles(count: int) -> list[SeriesStyle]:
    """Return one style per series. More series than colours get a ramp from dark to light, which stays ordered in grey."""
    if count <= len(COLOURS):
        colours = list(COLOURS[:count])
    else:
        colours = [to_hex(colormaps["cividis"](0.85 * index / (count - 1))) for index in range(count)]
    return [
        SeriesStyle(colour, MARKERS[index % len(MARKERS)], LINES[index % len(LINES)]) for index, colour in enumerate(colours)
    ]


def category_styles(count: int) -> list[SeriesStyle]:
    """Return one style per series for many unordered series: each marker once, colours in turn."""
    return [SeriesStyle(COLOURS[index % len(COLOURS)], MORE_MARKERS[index], LINES[index % len(LINES)]) for index in range(count)]


def points(colour: str) -> dict[str, tuple[float, str, str]]:
    """Size, face and edge of each view's points: they nest, so agreement looks like a target."""
    return {"formula": (9.5, "none", colour), "paths": (6.0, colour, colour), "events": (3.0, INK, INK)}


def view_handles(views: Collection[str], colour: str = GREY, scale: float = 1.0) -> list[Line2D]:
    """Legend entries of the points of these views."""
    return [
        Line2D([], [], linestyle="none", marker="o", markersize=scale * size, markerfacecolor=face, markeredgecolor=edge,
               label=NAMES[view])
        for view, (size, face, edge) in points(colour).items()
        if view in views
    ]  # fmt: skip


def require_columns(rows: pl.DataFrame, what: str, needed: Sequence[str], optional: Sequence[str] = ()) -> pl.DataFrame:
    """Return the rows, with absent optional columns as null; refuse an empty table and a missing needed column."""
    if not rows.height:
        raise ParameterError(f"{what} needs at least one row, got none; take rows of a finished run")
    if missing := [name for name in needed if name not in rows.columns]:
        raise ParameterError(f"{what} needs the columns {', '.join(needed)}, got none called {', '.join(missing)}")
    absent = [pl.lit(None).alias(name) for name in dict.fromkeys(optional) if name not in rows.columns]
    return rows.with_columns(absent)
