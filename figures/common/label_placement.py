"""Labels next to points: each is placed where it covers no point, line or other label, or is left out."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, cast

import numpy as np
from matplotlib.axes import Axes
from matplotlib.transforms import BboxBase
from numpy.typing import NDArray

from figures.common.style import GREY

Floats = NDArray[np.float64]

# Candidate positions of a label: offset of its anchor from the point [pixels at 100 dpi], and the edge of the label at the anchor.
_PLACES = [
    (reach * side, rise, "left" if side > 0 else "right")
    for reach, rise in ((10, 0), (10, 10), (10, -10), (18, 0), (18, 18), (18, -18), (30, 0), (30, 28), (30, -28), (48, 0), (60, 20))
    for side in (1, -1)
]
_MOST_NAMES = 12  # next to a pair of axes: more are not readable
_LEADER = 20  # [pixels] a label farther away than this is tied to its point by a line


def label_points(axes: Axes, labels: Sequence[tuple[float, float, str]], lines: Sequence[Floats], size: float = 8.5) -> int:
    """Write each (x, y, text) next to its point, clear of `lines` (arrays of shape (n, 2)); return the number of omitted labels.

    Set the axes' limits first: overlaps are computed in pixels.
    """
    if not labels:
        return 0
    points = [np.array([(x, y)]) for x, y, _ in labels]
    obstacles = np.vstack([_pixels(axes, line) for line in [*lines, *points]])
    frame = axes.get_window_extent()
    extents = _extents(axes, {text for *_, text in labels}, size)
    taken: list[tuple[float, float, float, float]] = []
    left_out = 0
    for x, y, text in labels:
        at = axes.transData.transform((x, y))
        width, height = extents[text]
        for dx, dy, edge in _PLACES:
            low = at[0] + dx - (0 if edge == "left" else width)
            box = (low - 2, at[1] + dy - height / 2, low + width + 2, at[1] + dy + height / 2)
            inside = box[0] >= frame.x0 and box[2] <= frame.x1 and box[1] >= frame.y0 and box[3] <= frame.y1
            if inside and not _covers(box, obstacles) and not any(_meet(box, other) for other in taken):
                break
        else:
            left_out += 1
            continue
        leader = {"arrowstyle": "-", "color": GREY, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
        scale = 72 / axes.figure.dpi  # to points, for a file may be saved at any density
        axes.annotate(
            text, (x, y), (dx * scale, dy * scale), textcoords="offset points", ha=edge, va="center", fontsize=size,
            arrowprops=leader if np.hypot(dx, dy) > _LEADER else None, annotation_clip=_clip(frame, at),
        )  # fmt: skip
        taken.append(box)
    return left_out


def _clip(frame: BboxBase, at: Floats) -> bool | None:
    """Return whether a label is left out where its point is beyond the axes: None, but False for a point that is in them.

    With None, matplotlib looks whether it is in each time that it measures or draws the label.
    """
    return False if frame.contains(*at) else None


def _extents(axes: Axes, texts: Collection[str], size: float) -> dict[str, tuple[float, float]]:
    """Width and height of each text [pixels]."""
    found = {}
    measure = axes.text(0, 0, "", fontsize=size)
    for text in texts:
        measure.set_text(text)
        found[text] = measure.get_window_extent().size
    measure.remove()
    return found


def drawn_lines(axes: Axes) -> list[Floats]:
    """Return the lines on the axes, which labels must not cover; a point is a line with one corner."""
    lines = []
    for line in axes.lines:
        corners = np.column_stack(cast(Any, line.get_data()))
        lines += [corners] if line.get_linestyle() != "None" else list(corners[:, None])
    return lines


def label_curve_ends(axes: Axes, curves: Sequence[tuple[Floats, Floats]]) -> list[Floats]:
    """Label the ends of each curve `p = 0` and `p = 1`, except where labels crowd; return their extents, like `drawn_lines`."""
    marks: list[Floats] = []
    frame = axes.get_window_extent()
    for xs, ys in curves:
        for index, rate, above in ((0, 0, 7), (-1, 1, -11)):
            end = (xs[index], ys[index])
            at = axes.transData.transform(end)
            middle = np.add(at, (0, 1.4 * above))
            if all(abs(middle[0] - x) > 36 or abs(middle[1] - y) > 14 for x, y in marks):
                axes.annotate(
                    f"p = {rate}", end, (0, above), textcoords="offset points", ha="center", fontsize=8, color=GREY,
                    annotation_clip=_clip(frame, at),
                )  # fmt: skip
                marks.append(middle)
    half = np.array([(-13, 0), (13, 0)])
    return [axes.transData.inverted().transform(mark + half) for mark in marks]


def label_at_right(axes: Axes, curves: Sequence[tuple[float, str, str]], size: float = 8.5) -> int:
    """Name each curve (y of its end, text, colour) to the right of the axes; return the number of curves without a name.

    Crowded names are moved apart, and a line ties each to its curve. Where there is not room for all, an even selection is named.
    Set the axes' limits first.
    """
    frame = axes.get_window_extent()
    figure = cast(Any, axes.figure)
    height = 1.25 * size * figure.dpi / 72
    room = min(max(int(frame.height / height), 1), _MOST_NAMES)
    named = sorted(curves, key=lambda curve: curve[0])
    if len(named) > room:
        named = [named[index] for index in np.linspace(0, len(named) - 1, room).round().astype(int)]
    ends = [float(np.clip(axes.transData.transform((axes.get_xlim()[1], y))[1], frame.y0, frame.y1)) for y, *_ in named]
    for end, middle, (_, text, colour) in zip(ends, _apart(ends, height, frame.y1), named, strict=True):
        leader = {"arrowstyle": "-", "color": colour, "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0}
        axes.annotate(
            text, (1.0, (end - frame.y0) / frame.height), (14, (middle - end) * 72 / figure.dpi), xycoords="axes fraction",
            textcoords="offset points", va="center", fontsize=size, color=colour, annotation_clip=False,
            arrowprops=leader | {"relpos": (0, 0.5)},
        )  # fmt: skip
    return len(curves) - len(named)


def _apart(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Spread rising heights by at least `gap`: first push up from below, then push down where they pass the top."""
    moved: list[float] = []
    for height in heights:
        moved.append(max(height, moved[-1] + gap) if moved else height)
    limit = top
    for index in reversed(range(len(moved))):
        moved[index] = min(moved[index], limit)
        limit = moved[index] - gap
    return moved


def _pixels(axes: Axes, line: Floats) -> Floats:
    """Points along a line [pixels], at most about 4 pixels apart."""
    corners = axes.transData.transform(line)
    if len(corners) < 2:
        return np.asarray(corners)
    steps = np.hypot(*np.diff(corners, axis=0).T)
    along = np.concatenate([[0.0], np.cumsum(steps)])
    fine = np.linspace(0, along[-1], min(int(along[-1] / 4) + 2, 5000))
    return np.column_stack([np.interp(fine, along, corners[:, 0]), np.interp(fine, along, corners[:, 1])])


def _covers(box: tuple[float, float, float, float], points: Floats) -> bool:
    inside = (points[:, 0] > box[0]) & (points[:, 0] < box[2]) & (points[:, 1] > box[1] - 1) & (points[:, 1] < box[3] + 1)
    return bool(inside.any())


def _meet(one: tuple[float, float, float, float], other: tuple[float, float, float, float]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
