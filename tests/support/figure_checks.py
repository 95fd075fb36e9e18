"""Contents of a figure as plain data: positions of its points, lines, bars and error bars, and all its words.

Tests compare this data, never pixels: positions, labels, axes and units.
"""

from __future__ import annotations

import pathlib
import re
from collections.abc import Iterable
from functools import cache
from html import unescape
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
    """Rows of the closed forms of a built-in scenario, cached for all its figures."""
    return sim.run(scenario, views=["formula"])


class Panel(NamedTuple):
    """One pair of axes, with its lines, segments and bars by label, in drawing order."""

    title: str
    x: str
    y: str
    scales: tuple[str, str]
    lines: list[tuple[str, list[Point]]]
    marks: list[tuple[str, str, Any, str]]
    """Label, marker, line style and colour of each line."""
    segments: list[tuple[str, list[tuple[Point, Point]]]]
    """Error bars, and other lines between two points."""
    bars: list[tuple[str, list[Box]]]
    """Left, bottom, width, height."""
    bands: list[tuple[str, list[Point]]]
    """Corners of filled areas."""
    texts: list[str]
    ticks: tuple[list[str], list[str]]
    grid: str
    """Axes with grid lines: "x", "y", "xy" or ""."""

    def line(self, label: str) -> list[Point]:
        """Points of the only line with this label."""
        (found,) = (points for name, points in self.lines if name == label)
        return found

    def ends(self, label: str) -> list[tuple[Point, Point]]:
        """Error bars with this label."""
        return [each for name, pairs in self.segments if name == label for each in pairs]


class Shown(NamedTuple):
    """A whole figure."""

    panels: list[Panel]
    texts: list[str]
    """Titles and notes outside the axes."""
    legends: list[tuple[str, list[str]]]
    """Title and entries of each legend."""

    @property
    def words(self) -> str:
        """All words of the figure."""
        parts = [*self.texts]
        for title, entries in self.legends:
            parts += [title, *entries]
        for each in self.panels:
            parts += [each.title, each.x, each.y, *each.texts, *each.ticks[0], *each.ticks[1]]
        return "\n".join(parts)


def shown(figure: Figure) -> Shown:
    """Return the contents of a figure as data."""
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
    figure.stale = stale  # reading it makes matplotlib consider it changed
    legends = [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()) is not None)]
    said = [(each.get_title().get_text(), [text.get_text() for text in each.get_texts()]) for each in legends]
    return Shown(panels, [text.get_text() for text in figure.texts], said)


def boxes(axes: Axes) -> list[Box]:
    """Left, bottom, width and height of the bars that are drawn as one artist."""
    paths = [path for each in axes.collections if isinstance(each, PolyCollection) for path in each.get_paths()]
    assert all(len(path.vertices) == 5 for path in paths)
    return [path.get_extents().bounds for path in paths]


def laid_out(figure: Figure) -> Figure:
    """Lay out a figure without rendering it, unless that was done already."""
    if figure.stale:
        figure.draw_without_rendering()
    return figure


def words(figure: Figure) -> list[tuple[Text, Bbox]]:
    """All visible words, including legends, with their extents [pixels], without arrows."""
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
    """Legends of the figure and of its axes."""
    return [*figure.legends, *(legend for axes in figure.axes if (legend := axes.get_legend()) is not None)]


def stroke(artist: Any) -> str:
    """Describe how an artist is drawn: colours, marker, widths, drawing order, label, numbers."""
    if isinstance(artist, Line2D):
        marker = str(artist.get_marker())
        pen = artist.get_linestyle() not in ("None", "")
        start, dashes = artist._dash_pattern  # type: ignore[attr-defined]  # every line with a pattern reports the style "--"
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
    """Data of an artist, to four digits: all values if few, else range, count and two means."""
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
    """Digest of an ordered array: the second mean weights later values more."""
    finite = values[np.isfinite(values)]
    if values.size <= 3 or not finite.size:
        return " ".join(map(digits, values))
    if np.ptp(finite) == 0:
        return f"{digits(finite[0])} ({values.size})"
    means = finite.mean(), np.average(finite, weights=np.flatnonzero(np.isfinite(values)) + 1)
    return f"{digits(finite.min())} to {digits(finite.max())} ({values.size}: {digits(means[0])} {digits(means[1])})"


def digits(value: float) -> str:
    """Format to four digits; values below 1e-9 are 0."""
    return f"{value if abs(value) > 1e-9 else 0.0:.4g}"


def lettering(text: Text) -> str:
    """Describe the style of a text where it is not the default: colour, weight, angle, box, halo, leader line."""
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
    """Positions of all artists, in hundredths of the page, and their styles."""

    size: list[float]
    """Width and height [inches]."""
    boxes: list[list[Any]]
    """Left, bottom, right and top of each pair of axes, and the number of axes that share a scale with it."""
    limits: list[list[float]]
    """Left, right, bottom and top limit of each pair of axes, in decades for a log scale."""
    legends: list[list[float]]
    words: list[list[Any]]
    """Each text with its style, left, bottom, right, top and font size."""
    strokes: list[list[str]]
    """Styles of the artists of each pair of axes and of each legend, in order."""

    @classmethod
    def of(cls, figure: Figure) -> Layout:
        """Return the layout of a figure."""
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
    """List misplaced words: off the page, over each other, over axes that they do not belong to; and notes that begin neither
    at the title nor at their axes."""
    placed, page, found = words(figure), figure.bbox, []
    for part, box in placed:
        if box.x0 < page.x0 - 0.5 or box.x1 > page.x1 + 0.5 or box.y0 < page.y0 - 0.5 or box.y1 > page.y1 + 0.5:
            found.append(f"off the page: {part.get_text()}")
    for (one, here), (other, there) in combinations(placed, 2):
        if min(here.x1, there.x1) - max(here.x0, there.x0) > 1.5 and min(here.y1, there.y1) - max(here.y0, there.y0) > 1.5:
            found.append(f"over each other: {one.get_text()} and {other.get_text()}")
    outside = [(part.get_text(), box) for part, box in placed if part in figure.texts]
    outside += [(f"legend {each.get_title().get_text()}", each.get_window_extent()) for each in legends(figure)]
    found += [f"over axes: {text}" for text, box in outside for axes in figure.axes if box.overlaps(axes.bbox)]
    found += [
        f"over other axes: {part.get_text()}" for part, box in placed for axes in figure.axes
        if part.axes not in (None, axes) and box.overlaps(axes.bbox)
    ]  # fmt: skip
    notes = [part for part in figure.texts if part.get_fontsize() >= 9 and not part.get_rotation()]
    begin = {round(part.get_position()[0], 6) for part in notes}
    ends = {round(axes.get_position().x0, 6) for axes in figure.axes}
    titles = {round(part.get_position()[0], 6) for part in figure.texts if part.get_fontsize() >= 12}
    figure.stale = False  # only read since its layout, although matplotlib considers it changed
    return found + [f"begins at {x}, the title at {sorted(titles)}" for x in begin if x not in ends | titles]


class SeriesSigns(NamedTuple):
    """Signs that distinguish series: colours except greys, markers, and characters of hatches."""

    colours: set[str]
    markers: set[str]
    hatches: set[str]

    @classmethod
    def of(cls, artists: Iterable[Artist]) -> SeriesSigns:
        """Return the signs of artists; the markers "|" and "_", drawn as strokes, are not counted."""
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
    """Markers by outline."""
    styles = {marker: MarkerStyle(marker) for marker in Line2D.filled_markers if isinstance(marker, str)}
    return {_outline(style.get_path().transformed(style.get_transform())): marker for marker, style in styles.items()}


def _outline(path: Path) -> bytes:
    return np.asarray(path.vertices).round(6).tobytes()


def _marker(path: Path) -> str:
    """Marker of a scatter plot, "?" if it is not a standard one."""
    return _marks().get(_outline(path), "?")


def unmatched_legend_signs(figure: Figure) -> list[str]:
    """List signs in legends that no artist has, and default colours of matplotlib."""
    drawn = SeriesSigns.of(artist for axes in figure.axes for artist in [*axes.lines, *axes.patches, *axes.collections])
    found = [f"matplotlib's own colour: {colour}" for colour in drawn.colours & {*map(to_hex, color_sequences["tab10"])}]
    for legend in legends(figure):
        for handle, text in zip(legend.legend_handles, legend.get_texts(), strict=True):
            for shown_signs, there in zip(SeriesSigns.of([handle] if handle is not None else []), drawn, strict=True):
                found += [f"{text.get_text()}: {each} is not drawn" for each in shown_signs - there]
    return found


def untied_names(figure: Figure) -> list[str]:
    """List coloured names at the right of axes that are not tied to the end of a line of that colour."""
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
                ends += [(colour, height) for colour in SeriesSigns.of([line]).colours]
        for text in axes.texts:
            if isinstance(text, Annotation) and text.xycoords == "axes fraction" and text.xy[0] == 1:
                at, colour = frame.y0 + text.xy[1] * frame.height, to_hex(text.get_color())
                chromatic = np.ptp(to_rgb(colour)) > 0.02
                found += [text.get_text()] * bool(chromatic and not any(one == colour and abs(end - at) < 0.5 for one, end in ends))
    return found


def clipped(figure: Figure) -> list[str]:
    """List marks beyond the limits of their axes."""
    found = []
    for axes in figure.axes:
        limits = (sorted(axes.get_xlim()), sorted(axes.get_ylim()))
        for line in axes.lines:
            if str(line.get_marker()) not in ("None", "") and line.get_transform() == axes.transData:
                for values, (low, high) in zip(line.get_data(), limits, strict=True):
                    seen = np.asarray(values, dtype=float)
                    found += [str(line.get_label())] * bool((seen < low).any() or (seen > high).any())
    return found


def lines_by_label(panel: Panel) -> dict[str, list[Point]]:
    """Lines of a panel by label; labels must differ."""
    assert len({label for label, _ in panel.lines}) == len(panel.lines), "two lines have one label"
    return dict(panel.lines)


def odd_dashes(figure: Figure) -> list[str]:
    """List lines, in axes and legends, whose pattern does not begin with a whole dash."""
    every = [line for axes in figure.axes for line in axes.lines]
    every += [handle for each in legends(figure) for handle in each.legend_handles if isinstance(handle, Line2D)]
    return [str(each.get_label()) for each in every if each._dash_pattern[0]]  # type: ignore[attr-defined]


def svg_words(path: pathlib.Path) -> list[str]:
    """Words of an SVG figure, from the comments that name their glyphs."""
    return [unescape(each.strip()) for each in re.findall(r"<!--(.*?)-->", path.read_text(encoding="utf-8"), re.DOTALL)]
