"""Everything that a figure shows, as plain data: where its points, lines, bars and error bars stand, and all its words.

Figures are asserted by this data, never by pixels: what stands where, under which name, on which axis with which unit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from itertools import combinations
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from matplotlib import color_sequences
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.collections import Collection, LineCollection, PathCollection, PolyCollection, QuadMesh
from matplotlib.colors import to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.markers import MarkerStyle
from matplotlib.patches import Patch, Rectangle
from matplotlib.path import Path
from matplotlib.text import Annotation, Text
from matplotlib.transforms import Bbox

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
    marks: list[tuple[str, str, Any, str]]
    """Of each line its label, its marker, its line style and its colour."""
    segments: list[tuple[str, list[tuple[Point, Point]]]]
    """Error bars, and other lines between two points."""
    bars: list[tuple[str, list[Box]]]
    """Left, bottom, width, height."""
    bands: list[tuple[str, list[Point]]]
    """The corners of filled areas."""
    texts: list[str]
    ticks: tuple[list[str], list[str]]
    grid: str
    """The axes that have grid lines: "x", "y", "xy" or ""."""

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
    stale = figure.stale
    panels = []
    for axes in figure.axes:
        lines, marks = [], []
        for line in axes.lines:
            x, y = (np.asarray(values, dtype=float).tolist() for values in line.get_data())
            lines.append((str(line.get_label()), [*zip(x, y, strict=True)]))
            shade: Any = line.get_markeredgecolor() if line.get_linestyle() in ("None", "") else line.get_color()
            marks.append((str(line.get_label()), str(line.get_marker()), line.get_linestyle(), to_hex(shade)))
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
            "".join(name for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)) if any(
                each.get_visible() for each in axis.get_gridlines())),
        ))  # fmt: skip
    figure.stale = stale  # only looked at, though matplotlib takes it for changed
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()) is not None)]
    said = [(each.get_title().get_text(), [text.get_text() for text in each.get_texts()]) for each in legends]
    return Shown(panels, [text.get_text() for text in figure.texts], said)


def laid_out(figure: Figure) -> Figure:
    """The same figure with each of its texts in its position: once for all that ask, and without rendering it."""
    if figure.stale:
        figure.draw_without_rendering()
    return figure


def words(figure: Figure) -> list[tuple[Text, Bbox]]:
    """All words that are seen, those of legends included, and where they lie [pixels]: those of arrows without the arrow."""
    laid_out(figure)
    parts: list[Text] = [*figure.texts]
    for legend in legends(figure):
        parts += [legend.get_title(), *legend.get_texts()]
    for axes in figure.axes:
        parts += [*axes.texts, axes.xaxis.label, axes.yaxis.label, axes.title, axes._left_title]  # type: ignore[attr-defined]
        for axis, low, high in ((axes.xaxis, *axes.get_xlim()), (axes.yaxis, *axes.get_ylim())) if axes.axison else ():
            inside = [tick for tick in axis.get_major_ticks() if min(low, high) <= tick.get_loc() <= max(low, high)]
            parts += [tick.label1 for tick in inside if tick.label1.get_visible()]
    return [(part, Text.get_window_extent(part)) for part in parts if part.get_text().strip() and part.get_visible()]


def legends(figure: Figure) -> list[Legend]:
    """Those of the figure and those of its axes."""
    return [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()) is not None)]


def stroke(artist: Any) -> str:
    """How a line, an area or a group of either is drawn: colours, marker, widths, what lies over what, its label, its numbers."""
    if isinstance(artist, Line2D):
        marker = str(artist.get_marker())
        pen = artist.get_linestyle() not in ("None", "")
        start, dashes = artist._dash_pattern  # type: ignore[attr-defined]  # the style of all that has a pattern is "--"
        dash = "/".join(f"{each:.2g}" for each in dashes or ()) + f" from {start:g}" * bool(start)
        parts = [to_hex(artist.get_color()), f"{artist.get_linestyle()}{dash} {artist.get_linewidth():.2g}"] if pen else []
        if marker not in ("None", ""):
            parts += [f"{marker} {artist.get_markersize():.2g}", to_hex(artist.get_markeredgecolor())]
            parts += [to_hex(fill) if (fill := artist.get_markerfacecolor()) != "none" else "hollow"]
            parts += [f"every {every}" for every in [artist.get_markevery()] if every not in (None, 1, [1])]
        parts += [artist.get_drawstyle()] * (artist.get_drawstyle() != "default")
    elif isinstance(artist, AxesImage):
        parts = ["image", str(artist.get_interpolation()), str(artist.origin), "{:g} to {:g}".format(*artist.get_clim())]
        parts += [to_hex(each) for each in artist.cmap(artist.norm(np.unique(artist.get_array())))[:4]]
    elif isinstance(artist, Patch):
        fill = to_hex(artist.get_facecolor()) if artist.get_facecolor()[3] else "hollow"
        parts = [type(artist).__name__, fill, to_hex(artist.get_edgecolor()), f"{artist.get_linewidth():.2g}"]
        parts += [artist.get_hatch() or ""]
    else:
        colours = [np.asarray(each, dtype=float).reshape(-1, 4) for each in (artist.get_facecolor(), artist.get_edgecolor())]
        shades = {to_hex(each) for each in np.unique(np.concatenate(colours), axis=0)}
        parts = [type(artist).__name__, *(sorted(shades) if len(shades) < 4 else ["many colours"]), artist.get_hatch() or ""]
    alpha = artist.get_alpha()
    parts += [] if alpha is None else [f"alpha {float(np.mean(alpha)):.2g}"]
    parts += [] if artist.get_clip_on() or artist.axes is None else ["not clipped"]
    label = str(artist.get_label()).replace("\n", " ")
    parts += [f"at {artist.get_zorder():g}", f"'{label}'" * (not label.startswith("_") and label != ""), numbers(artist)]
    return " ".join(filter(None, parts))


def numbers(artist: Any) -> str:
    """An artist's data, to four digits: few of them all, of many where they reach, how many they are, and two means of them."""
    if artist.axes is None:
        return ""
    if isinstance(artist, Line2D):
        known = {"x": artist.get_xdata(), "y": artist.get_ydata()}
    elif isinstance(artist, QuadMesh):
        known = {"x": np.asarray(artist.get_coordinates())[0, :, 0], "y": np.asarray(artist.get_coordinates())[:, 0, 1],
                 "values": np.ma.filled(np.ma.asarray(artist.get_array(), dtype=float), np.nan).ravel()}  # fmt: skip
    elif isinstance(artist, PathCollection):
        known = dict(zip("xy", np.asarray(artist.get_offsets()).T, strict=True)) | {"sizes": artist.get_sizes()}
    elif isinstance(artist, Collection):
        corners = [np.asarray(path.vertices) for path in artist.get_paths()]
        known = dict(zip("xy", np.concatenate([*corners, np.empty((0, 2))]).T, strict=True))
    elif isinstance(artist, Rectangle):
        known = dict(zip("xy", artist.get_bbox().get_points().T, strict=True))
    elif isinstance(artist, AxesImage):
        known = {"values": np.ma.filled(np.ma.asarray(artist.get_array(), dtype=float), np.nan).ravel()}
    else:
        return ""
    return " ".join(f"{name} {_digest(np.asarray(each, dtype=float))}" for name, each in known.items() if len(each))


def _digest(values: Any) -> str:
    """Numbers in their order: the second mean gives later ones more weight."""
    finite = values[np.isfinite(values)]
    if values.size <= 3 or not finite.size:
        return " ".join(map(digits, values))
    if np.ptp(finite) == 0:
        return f"{digits(finite[0])} ({values.size})"
    means = finite.mean(), np.average(finite, weights=np.flatnonzero(np.isfinite(values)) + 1)
    return f"{digits(finite.min())} to {digits(finite.max())} ({values.size}: {digits(means[0])} {digits(means[1])})"


def digits(value: float) -> str:
    """Four of them; what is 0 but for rounding is 0."""
    return f"{value if abs(value) > 1e-9 else 0.0:.4g}"


def lettering(text: Text) -> str:
    """How words are written where it is not in black from left to right: colour, weight, angle, and what ties them to a point."""
    parts = [to_hex(text.get_color())] * (to_hex(text.get_color()) != "#000000")
    parts += [str(text.get_weight())] * (text.get_weight() not in ("normal", 400))
    parts += [f"{text.get_rotation():g}°"] * bool(text.get_rotation())
    spacing = text._linespacing  # type: ignore[attr-defined]
    parts += [f"lines {spacing}"] * ("\n" in text.get_text() and spacing != "normal")
    if text.axes is not None:
        parts += ["clipped"] * text.get_clip_on()
    if (box := text.get_bbox_patch()) is not None:
        parts += ["on", to_hex(box.get_facecolor())]
    for halo in text.get_path_effects():
        parts += ["halo", *(f"{each:g}" if isinstance(each, int | float) else str(each) for each in halo._gc.values())]
    if isinstance(text, Annotation):
        parts += [f"clip {text.get_annotation_clip()}"] * (text.get_annotation_clip() is not None)
        if text.arrow_patch is not None:
            parts += ["tied", to_hex(text.arrow_patch.get_edgecolor()), f"{text.arrow_patch.get_linewidth():g}"]
    return " ".join(parts)


def _siblings(axes: Axes) -> list[str]:
    groups = {"x": axes.get_shared_x_axes(), "y": axes.get_shared_y_axes()}
    return [f"{name} of {len(group.get_siblings(axes))}" for name, group in groups.items() if len(group.get_siblings(axes)) > 1]


class Layout(NamedTuple):
    """Where things stand on the page, in hundredths of it, and how they are drawn."""

    size: list[float]
    """Width and height [inches]."""
    boxes: list[list[Any]]
    """Of each pair of axes: left, bottom, right, top, and of how many it shares a scale, across and up, where it does."""
    limits: list[list[float]]
    """Of each pair of axes: left, right, bottom, top, as shares of a decade where the scale is a logarithm."""
    legends: list[list[float]]
    words: list[list[Any]]
    """Each with how it is written, its left, bottom, right and top, and the size of its letters."""
    strokes: list[list[str]]
    """Of each pair of axes and of each legend what is drawn, in turn."""

    @classmethod
    def of(cls, figure: Figure) -> Layout:
        """The layout of a figure."""
        placed = words(figure)
        page = figure.bbox

        def share(box: Bbox) -> list[float]:
            found = [(box.x0 - page.x0) / page.width, (box.y0 - page.y0) / page.height,
                     (box.x1 - page.x0) / page.width, (box.y1 - page.y0) / page.height]  # fmt: skip
            return [round(100 * float(each), 1) for each in found]

        def scaled(low: float, high: float, scale: str) -> list[float]:
            ends = np.log10([low, high]) if scale == "log" else np.array([low, high])
            return [float(f"{each:.3g}") for each in ends]

        drawn = [[*axes.lines, *axes.patches, *axes.collections, *axes.images] for axes in figure.axes]
        drawn += [[handle for handle in each.legend_handles if handle is not None] for each in legends(figure)]
        return cls(
            [round(float(each), 2) for each in figure.get_size_inches()],
            [[*share(axes.get_window_extent()), *_siblings(axes)] for axes in figure.axes],
            [scaled(*axes.get_xlim(), axes.get_xscale()) + scaled(*axes.get_ylim(), axes.get_yscale()) for axes in figure.axes],
            [share(each.get_window_extent()) for each in legends(figure)],
            [[part.get_text(), lettering(part), *share(box), round(float(part.get_fontsize()), 1)] for part, box in placed],
            [[*map(stroke, each)] for each in drawn],
        )


def misplaced(figure: Figure) -> list[str]:
    """What is wrong with where words are: off the page, over each other, over axes that they are not of, or a note that begins
    neither where the title does nor where its axes do."""
    placed, page, found = words(figure), figure.bbox, []
    for part, box in placed:
        if box.x0 < page.x0 - 0.5 or box.x1 > page.x1 + 0.5 or box.y0 < page.y0 - 0.5 or box.y1 > page.y1 + 0.5:
            found.append(f"off the page: {part.get_text()}")
    for (one, here), (other, there) in combinations(placed, 2):
        if min(here.x1, there.x1) - max(here.x0, there.x0) > 1.5 and min(here.y1, there.y1) - max(here.y0, there.y0) > 1.5:
            found.append(f"over each other: {one.get_text()} and {other.get_text()}")
    beside = [(part.get_text(), box) for part, box in placed if part in figure.texts]
    beside += [(f"legend {each.get_title().get_text()}", each.get_window_extent()) for each in legends(figure)]
    found += [f"over axes: {text}" for text, box in beside for axes in figure.axes if box.overlaps(axes.bbox)]
    found += [
        f"over other axes: {part.get_text()}" for part, box in placed for axes in figure.axes
        if part.axes not in (None, axes) and box.overlaps(axes.bbox)
    ]  # fmt: skip
    notes = [part for part in figure.texts if part.get_fontsize() >= 9 and not part.get_rotation()]
    begin = {round(part.get_position()[0], 6) for part in notes}
    ends = {round(axes.get_position().x0, 6) for axes in figure.axes}
    titles = {round(part.get_position()[0], 6) for part in figure.texts if part.get_fontsize() >= 12}
    figure.stale = False  # laid out, and only looked at since, though matplotlib takes it for changed
    return found + [f"begins at {x}, the title at {sorted(titles)}" for x in begin if x not in ends | titles]


class Signs(NamedTuple):
    """By what a reader tells one series from another: colours but for greys, markers, and hatches by their characters."""

    colours: set[str]
    markers: set[str]
    hatches: set[str]

    @classmethod
    def of(cls, artists: Iterable[Artist]) -> Signs:
        """The signs of lines, areas and groups of either; strokes that stand for other lines are no markers."""
        colours: list[Any] = []
        markers, hatches = set(), set()
        for each in artists:
            if isinstance(each, Line2D):
                marker = str(each.get_marker())
                colours += [each.get_color()] * (each.get_linestyle() not in ("None", ""))
                if marker not in ("None", ""):
                    colours += [each.get_markeredgecolor()] + [each.get_markerfacecolor()] * (marker in Line2D.filled_markers)
                    markers |= {marker} - {"|", "_"}
            elif isinstance(each, Patch):
                colours.append(each.get_facecolor())
                hatches |= set(each.get_hatch() or "")
            elif isinstance(each, Collection):
                values = each.get_array()
                both: list[Any] = [*each.get_facecolor(), *each.get_edgecolor()]
                colours += both if values is None else [*each.cmap(each.norm(np.unique(values)))]
                hatches |= set(each.get_hatch() or "")
                markers |= {_marker(path) for path in each.get_paths()} if isinstance(each, PathCollection) else set()
        chosen = {to_hex(colour) for colour in colours if str(colour) != "none"}
        return cls({colour for colour in chosen if np.ptp(to_rgb(colour)) > 0.02}, markers, hatches)


@cache
def _marks() -> dict[bytes, str]:
    """Markers by their outlines."""
    styles = {marker: MarkerStyle(marker) for marker in Line2D.filled_markers if isinstance(marker, str)}
    return {_outline(style.get_path().transformed(style.get_transform())): marker for marker, style in styles.items()}


def _outline(path: Path) -> bytes:
    return np.asarray(path.vertices).round(6).tobytes()


def _marker(path: Path) -> str:
    """The marker of a scatter, "?" for one of its own."""
    return _marks().get(_outline(path), "?")


def unexplained(figure: Figure) -> list[str]:
    """Signs of legends that nothing in the axes has, and colours that nobody chose."""
    drawn = Signs.of(artist for axes in figure.axes for artist in [*axes.lines, *axes.patches, *axes.collections])
    found = [f"matplotlib's own colour: {colour}" for colour in drawn.colours & {*map(to_hex, color_sequences["tab10"])}]
    for legend in legends(figure):
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            for said, there in zip(Signs.of([handle] if handle is not None else []), drawn, strict=True):
                found += [f"{text.get_text()}: {each} is not drawn" for each in said - there]
    return found


def misnamed(figure: Figure) -> list[str]:
    """Names to the right of axes, in colour, that are not tied to the end of a line of that colour."""
    found = []
    laid_out(figure)
    for axes in figure.axes:
        frame = axes.get_window_extent()
        ends: list[tuple[str, float]] = []
        for line in axes.lines:
            x, y = (np.asarray(values, dtype=float) for values in line.get_data())
            known = np.flatnonzero(np.isfinite(x) & np.isfinite(y))
            if known.size and line.get_transform() == axes.transData:
                last = known[np.argmax(x[known])]
                height = float(np.clip(axes.transData.transform((x[last], y[last]))[1], frame.y0, frame.y1))
                ends += [(colour, height) for colour in Signs.of([line]).colours]
        for text in axes.texts:
            if isinstance(text, Annotation) and text.xycoords == "axes fraction" and text.xy[0] == 1:
                at, colour = frame.y0 + text.xy[1] * frame.height, to_hex(text.get_color())
                chromatic = np.ptp(to_rgb(colour)) > 0.02
                found += [text.get_text()] * bool(chromatic and not any(one == colour and abs(end - at) < 0.5 for one, end in ends))
    return found


def clipped(figure: Figure) -> list[str]:
    """Marks that lie beyond the limits of their axes."""
    found = []
    for axes in figure.axes:
        limits = (sorted(axes.get_xlim()), sorted(axes.get_ylim()))
        for line in axes.lines:
            if str(line.get_marker()) not in ("None", "") and line.get_transform() == axes.transData:
                for values, (low, high) in zip(line.get_data(), limits, strict=True):
                    seen = np.asarray(values, dtype=float)
                    found += [str(line.get_label())] * bool((seen < low).any() or (seen > high).any())
    return found


def by_label(panel: Panel) -> dict[str, list[Point]]:
    """The lines of a panel by their labels, which must differ."""
    assert len({label for label, _ in panel.lines}) == len(panel.lines), "two lines have one label"
    return dict(panel.lines)


def odd_dashes(figure: Figure) -> list[str]:
    """Lines, in axes and legends, whose pattern does not begin with a whole dash."""
    every = [line for axes in figure.axes for line in axes.lines]
    every += [handle for each in legends(figure) for handle in each.legend_handles if isinstance(handle, Line2D)]
    return [str(each.get_label()) for each in every if each._dash_pattern[0]]  # type: ignore[attr-defined]
