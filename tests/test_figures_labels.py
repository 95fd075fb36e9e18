"""Words beside points and at the ends of curves: clear of everything, inside the axes, tied to what they name; none lost unsaid."""

from __future__ import annotations

from itertools import combinations, pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from figures import labels
from figures.style import canvas

places = st.tuples(st.floats(0.02, 0.98), st.floats(0.02, 0.98))


def axes_of(dpi: float = 100.0) -> Axes:
    figure, axes = canvas(6, 4, (0.1, 0.1, 0.6, 0.8))
    figure.set_dpi(dpi)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return axes


def boxes(axes: Axes) -> list[Bbox]:
    axes.figure.canvas.draw()
    return [Text.get_window_extent(each) for each in axes.texts]


@given(st.lists(places, min_size=1, max_size=12), st.lists(places, min_size=2, max_size=3), st.sampled_from([60.0, 100.0, 200.0]))
@settings(max_examples=25)
def test_words_beside_points_are_clear_and_inside_or_counted(
    points: list[tuple[float, float]], line: list[tuple[float, float]], dpi: float
) -> None:
    axes = axes_of(dpi)
    left_out = labels.place(axes, [(x, y, f"point {index}") for index, (x, y) in enumerate(points)], [np.array(line)])
    assert len(axes.texts) + left_out == len(points)
    found, frame = boxes(axes), axes.get_window_extent()
    along = np.vstack([np.linspace(one, other, 400) for one, other in pairwise(line)])
    seen = axes.transData.transform(np.vstack([along, points]))
    for box in found:
        assert frame.x0 - 1 <= box.x0 <= box.x1 <= frame.x1 + 1
        assert frame.y0 - 1 <= box.y0 <= box.y1 <= frame.y1 + 1
        # A curve is looked at every four pixels, and a pixel is kept above and below: none comes more than a corner's width inside.
        inside = (seen[:, 0] > box.x0 + 2) & (seen[:, 0] < box.x1 - 2) & (seen[:, 1] > box.y0 + 2) & (seen[:, 1] < box.y1 - 2)
        assert not inside.any()
    assert not any(Bbox.intersection(one, other) and one.padded(-0.5).overlaps(other) for one, other in combinations(found, 2))


@pytest.mark.parametrize("dpi", [72.0, 150.0])
def test_a_lone_point_is_named_at_once_to_its_right_and_tied_to_it_only_from_afar(dpi: float) -> None:
    axes = axes_of(dpi)
    assert labels.place(axes, [(0.5, 0.5, "alone")], []) == 0
    [text], [box] = axes.texts, boxes(axes)
    at = axes.transData.transform((0.5, 0.5))
    assert 0 < box.x0 - at[0] < labels._LEADER
    assert abs((box.y0 + box.y1) / 2 - at[1]) < labels._LEADER
    assert text.arrow_patch is None  # type: ignore[attr-defined]
    # A fence around the point leaves room farther away alone, and a line leads there.
    fenced = axes_of(dpi)
    fence = np.array([(x, y) for x in range(-24, 25, 4) for y in range(-24, 25, 4) if (x, y) != (0, 0)])
    around = fenced.transData.inverted().transform(fenced.transData.transform((0.5, 0.5)) + fence)
    assert labels.place(fenced, [(0.5, 0.5, "alone")], [each[None] for each in around]) == 0
    [text], [box] = fenced.texts, boxes(fenced)
    beside = max(box.x0 - at[0], at[0] - box.x1), (box.y0 + box.y1) / 2 - at[1]
    assert np.hypot(*beside) > labels._LEADER  # the fence leaves no room that is nearer
    assert text.arrow_patch is not None  # type: ignore[attr-defined]


def test_where_there_is_no_room_words_are_counted() -> None:
    axes = axes_of()
    grid = [np.array([(0, y), (1, y)]) for y in np.linspace(0, 1, 60)]
    assert labels.place(axes, [(0.5, 0.5, "one"), (0.2, 0.2, "two")], grid) == 2
    assert not axes.texts
    assert labels.place(axes, [], grid) == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
@settings(max_examples=20)
def test_names_of_ends_that_crowd_are_moved_apart_and_others_stay(heights: list[float]) -> None:
    axes = axes_of()
    assert labels.at_right(axes, [(y, "curve", "#000000") for y in heights]) == 0
    found, frame = boxes(axes), axes.get_window_extent()
    ends = [axes.transData.transform((1, y))[1] for y in sorted(heights)]
    middles, height = [(box.y0 + box.y1) / 2 for box in found], max(box.height for box in found)
    assert all(later - earlier >= height for earlier, later in pairwise(middles))
    assert max(middles) <= frame.y1 + 1.5
    if all(later - earlier >= 1.5 * height for earlier, later in pairwise(ends)):
        assert middles == pytest.approx(ends, abs=1.5)


@pytest.mark.parametrize("count", [1, 5, 12, 30])
def test_curves_are_named_at_their_ends_in_order_and_in_their_colours(count: int) -> None:
    axes = axes_of()
    curves = [((7 * index % count) / count, f"curve {index}", f"#0000{index:02x}") for index in range(count)]
    left_out = labels.at_right(axes, curves)
    assert len(axes.texts) + left_out == count
    assert (left_out == 0) == (count <= labels._MOST_NAMES)
    frame, found = axes.get_window_extent(), boxes(axes)
    colours = {text: colour for _, text, colour in curves}
    ends = {text: axes.transData.transform((1, y))[1] for y, text, _ in curves}
    for text, box in zip(axes.texts, found, strict=True):
        assert text.get_color() == text.arrowprops["color"] == colours[text.get_text()]  # type: ignore[attr-defined]
        assert box.x0 > frame.x1
        assert text.xy == pytest.approx((1.0, (ends[text.get_text()] - frame.y0) / frame.height))  # type: ignore[attr-defined]
    middles = [(box.y0 + box.y1) / 2 for box in found]
    named = [ends[text.get_text()] for text in axes.texts]
    assert middles == sorted(middles)
    assert named == sorted(named)
    assert not any(one.overlaps(other) for one, other in combinations(found, 2))
    if count in (1, 5):  # room enough: each at the height of its end
        assert middles == pytest.approx(named, abs=1.5)
    if left_out:  # the lowest and the highest are among those that are named
        assert {named[0], named[-1]} == {min(ends.values()), max(ends.values())}


def test_ends_of_the_match_rate_are_marked_unless_they_crowd() -> None:
    axes = axes_of()
    far, near = (np.array([0.1, 0.9]), np.array([0.2, 0.8])), (np.array([0.11, 0.5]), np.array([0.2, 0.2]))
    marks = labels.ends(axes, [far, near])
    assert [(text.get_text(), text.xy) for text in axes.texts] == [  # type: ignore[attr-defined]
        ("p = 0", (0.1, 0.2)), ("p = 1", (0.9, 0.8)), ("p = 1", (0.5, 0.2)),
    ]  # fmt: skip
    offsets = [text.get_position()[1] for text in axes.texts]
    assert offsets[0] > 0 > offsets[1]
    assert len(marks) == 3
    for mark, box in zip(marks, boxes(axes), strict=True):
        pixels = axes.transData.transform(mark)
        assert box.padded(2).contains(*pixels.mean(axis=0))
        assert np.ptp(pixels[:, 1]) == pytest.approx(0, abs=1e-6)


def test_what_is_drawn_is_lines_and_single_points() -> None:
    axes = axes_of()
    axes.plot([0, 1, 2], [3, 4, 5])
    axes.plot([6, 7], [8, 9], linestyle="none", marker="o")
    assert [each.tolist() for each in labels.drawn(axes)] == [[[0, 3], [1, 4], [2, 5]], [[6, 8]], [[7, 9]]]
