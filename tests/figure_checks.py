"""Everything that a figure shows, as plain data: where its points, lines, bars and error bars stand, and all its words.

Figures are asserted by this data, never by pixels: what stands where, under which name, on which axis with which unit.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from matplotlib.collections import LineCollection, PolyCollection, QuadMesh
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

import sim

Point = tuple[float, float]
Box = tuple[float, float, float, float]


@cache
def formula(scenario: str) -> pl.DataFrame:
    """The rows of the closed forms of an embedded scenario: worked out once for all figures of it."""
    return sim.run(scenario, views=["formula"])


class Panel(NamedTuple):
    """One pair of axes. Lines, segments and bars by the label of their artist, in the order in which they were drawn."""

    title: str
    x: str
    y: str
    scales: tuple[str, str]
    lines: list[tuple[str, list[Point]]]
    marks: list[tuple[str, str, Any]]
    """Of each line its label, its marker and its line style."""
    segments: list[tuple[str, list[tuple[Point, Point]]]]
    """Error bars, and other lines between two points."""
    bars: list[tuple[str, list[Box]]]
    """Left, bottom, width, height."""
    bands: list[tuple[str, list[Point]]]
    """The corners of filled areas."""
    texts: list[str]
    ticks: tuple[list[str], list[str]]

    def line(self, label: str) -> list[Point]:
        """The points of the one line of this label."""
        (found,) = (points for name, points in self.lines if name == label)
        return found

    def ends(self, label: str) -> list[tuple[Point, Point]]:
        """The error bars of this label."""
        return [each for name, pairs in self.segments if name == label for each in pairs]


class Shown(NamedTuple):
    """A whole figure."""

    panels: list[Panel]
    texts: list[str]
    """Titles and notes beside the axes."""
    legends: list[tuple[str, list[str]]]
    """Of each its title and its entries."""

    @property
    def words(self) -> str:
        """All of it that is words."""
        parts = [*self.texts]
        for title, entries in self.legends:
            parts += [title, *entries]
        for each in self.panels:
            parts += [each.title, each.x, each.y, *each.texts, *each.ticks[0], *each.ticks[1]]
        return "\n".join(parts)


def shown(figure: Figure) -> Shown:
    """The data of a figure."""
    panels = []
    for axes in figure.axes:
        lines, marks = [], []
        for line in axes.lines:
            x, y = (np.asarray(values, dtype=float).tolist() for values in line.get_data())
            lines.append((str(line.get_label()), [*zip(x, y, strict=True)]))
            marks.append((str(line.get_label()), str(line.get_marker()), line.get_linestyle()))
        segments, bands = [], []
        for each in axes.collections:
            if isinstance(each, LineCollection):
                pairs = [tuple(map(tuple, segment[[0, -1]].tolist())) for segment in each.get_segments()]
                segments.append((str(each.get_label()), pairs))
            elif isinstance(each, PolyCollection) and not isinstance(each, QuadMesh):
                corners = [tuple(corner) for path in each.get_paths() for corner in np.asarray(path.vertices).tolist()]
                bands.append((str(each.get_label()), corners))
        bars: list[tuple[str, list[Box]]] = []
        for group in axes.containers:
            boxes = [(bar.get_x(), bar.get_y(), bar.get_width(), bar.get_height()) for bar in group if isinstance(bar, Rectangle)]
            bars.append((str(group.get_label()), boxes))
        title = axes.get_title(loc="left") or axes.get_title()
        ticks = [tick.get_text() for tick in axes.get_xticklabels()], [tick.get_text() for tick in axes.get_yticklabels()]
        panels.append(Panel(
            title, axes.get_xlabel(), axes.get_ylabel(), (axes.get_xscale(), axes.get_yscale()), lines, marks, segments, bars,
            bands, [text.get_text() for text in axes.texts], ticks,
        ))  # fmt: skip
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()) is not None)]
    said = [(each.get_title().get_text(), [text.get_text() for text in each.get_texts()]) for each in legends]
    return Shown(panels, [text.get_text() for text in figure.texts], said)


def laid_out(figure: Figure) -> Figure:
    """The same figure with each of its texts in its position: once for all that ask, and without rendering it."""
    if figure.stale:
        figure.draw_without_rendering()
    return figure


def beyond(figure: Figure) -> list[str]:
    """The words that do not lie on the figure's page, those of legends included; ticks beyond the limits of axes are not shown."""
    laid_out(figure)
    page = figure.bbox
    parts: list[Text] = [*figure.texts]
    for legend in [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()) is not None)]:
        parts += [legend.get_title(), *legend.get_texts()]
    for axes in figure.axes:
        parts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title]  # type: ignore[attr-defined]
        for axis, low, high in ((axes.xaxis, *axes.get_xlim()), (axes.yaxis, *axes.get_ylim())):
            inside = [tick for tick in axis.get_major_ticks() if min(low, high) <= tick.get_loc() <= max(low, high)]
            parts += [tick.label1 for tick in inside if tick.label1.get_visible()]
    found = []
    for part in parts:
        box = part.get_window_extent()
        off = box.x0 < page.x0 - 0.5 or box.x1 > page.x1 + 0.5 or box.y0 < page.y0 - 0.5 or box.y1 > page.y1 + 0.5
        found += [part.get_text()] * bool(part.get_text() and part.get_visible() and off)
    return found


def by_label(panel: Panel) -> dict[str, list[Point]]:
    """The lines of a panel by their labels, which must differ."""
    assert len({label for label, _ in panel.lines}) == len(panel.lines), "two lines have one label"
    return dict(panel.lines)
