"""Labels next to points and at the ends of curves: no overlaps, inside the axes, tied to their points, omitted ones counted."""

from __future__ import annotations

from itertools import combinations, pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.axes import Axes
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from figures.common import label_placement
from figures.common.style import canvas

spots = st.tuples(st.floats(0.02, 0.98), st.floats(0.02, 0.98))


def axes_of(dpi: float = 100.0) -> Axes:
    figure, axes = canvas(6, 4, (0.1, 0.1, 0.6, 0.8))
    figure.set_dpi(dpi)
    axes.set_xlim(0, 1)
    axes.set_ylim(0, 1)
    return axes


def boxes(axes: Axes) -> list[Bbox]:
    axes.figure.canvas.draw()
    return [Text.get_window_extent(each) for each in axes.texts]


@given(st.lists(spots, min_size=1, max_size=12), st.lists(spots, min_size=2, max_size=3), st.sampled_from([60.0, 100.0, 200.0]))
@settings(max_examples=10)
def test_labels_of_points_are_clear_and_inside_or_counted(
    points: list[tuple[float, float]], line: list[tuple[float, float]], dpi: float
) -> None:
    axes = axes_of(dpi)
    labels = [(x, y, f"point {index}") for index, (x, y) in enumerate(points)]
    left_out = label_placement.label_points(axes, labels, [np.array(line)])
    assert len(axes.texts) + left_out == len(points)
    found, frame = boxes(axes), axes.get_window_extent()
    along = np.vstack([np.linspace(one, other, 400) for one, other in pairwise(line)])
    seen = axes.transData.transform(np.vstack([along, points]))
    for box in found:
        assert frame.x0 - 1 <= box.x0 <= box.x1 <= frame.x1 + 1
        assert frame.y0 - 1 <= box.y0 <= box.y1 <= frame.y1 + 1
        # Curves are sampled every four pixels, with a margin of one pixel: an overlap is at most a corner's width.
        inside = (seen[:, 0] > box.x0 + 2) & (seen[:, 0] < box.x1 - 2) & (seen[:, 1] > box.y0 + 2) & (seen[:, 1] < box.y1 - 2)
        assert not inside.any()
    assert not any(Bbox.intersection(one, other) and one.padded(-0.5).overlaps(other) for one, other in combinations(found, 2))


@pytest.mark.parametrize("dpi", [72.0, 150.0])
def test_a_lone_label_is_at_the_right_and_tied_only_if_far(dpi: float) -> None:
    axes = axes_of(dpi)
    assert label_placement.label_points(axes, [(0.5, 0.5, "alone")], []) == 0
    [text], [box] = axes.texts, boxes(axes)
    at = axes.transData.transform((0.5, 0.5))
    assert 0 < box.x0 - at[0] < label_placement._LEADER
    assert abs((box.y0 + box.y1) / 2 - at[1]) < label_placement._LEADER
    assert text.arrow_patch is None  # type: ignore[attr-defined]
    # A fence around the point leaves room only farther away, and a line leads there.
    fenced = axes_of(dpi)
    fence = np.array([(x, y) for x in range(-24, 25, 4) for y in range(-24, 25, 4) if (x, y) != (0, 0)])
    around = fenced.transData.inverted().transform(fenced.transData.transform((0.5, 0.5)) + fence)
    assert label_placement.label_points(fenced, [(0.5, 0.5, "alone")], [each[None] for each in around]) == 0
    [text], [box] = fenced.texts, boxes(fenced)
    offset = max(box.x0 - at[0], at[0] - box.x1), (box.y0 + box.y1) / 2 - at[1]
    assert np.hypot(*offset) > label_placement._LEADER  # the fence leaves no nearer position
    assert text.arrow_patch is not None  # type: ignore[attr-defined]


def test_a_label_is_seen_if_its_point_is_in_the_axes() -> None:
    axes = axes_of()
    axes.set_xlim(0.2, 1)
    label_placement.label_points(axes, [(0.5, 0.5, "in"), (0.19, 0.5, "beyond")], [])
    label_placement.label_curve_ends(axes, [(np.array([0.1, 0.9]), np.array([0.2, 0.8]))])
    seen = {text.get_text(): text._check_xy(None) for text in axes.texts}  # type: ignore[attr-defined]
    assert seen == {"in": True, "beyond": False, "p = 0": False, "p = 1": True}


def test_labels_without_room_are_counted() -> None:
    axes = axes_of()
    grid = [np.array([(0, y), (1, y)]) for y in np.linspace(0, 1, 60)]
    assert label_placement.label_points(axes, [(0.5, 0.5, "one"), (0.2, 0.2, "two")], grid) == 2
    assert not axes.texts
    assert label_placement.label_points(axes, [], grid) == 0


@given(st.lists(st.floats(0, 1), min_size=1, max_size=10))
@settings(max_examples=8)
def test_crowded_names_are_moved_apart_and_others_stay(heights: list[float]) -> None:
    axes = axes_of()
    assert label_placement.label_at_right(axes, [(y, "curve", "#000000") for y in heights]) == 0
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
    left_out = label_placement.label_at_right(axes, curves)
    assert len(axes.texts) + left_out == count
    assert (left_out == 0) == (count <= label_placement._MOST_NAMES)
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
    if count in (1, 5):  # no crowding: each at the height of its end
        assert middles == pytest.approx(named, abs=1.5)
    if left_out:  # the lowest and the highest are among those that are named
        assert {named[0], named[-1]} == {min(ends.values()), max(ends.values())}


def test_ends_of_the_match_rate_are_marked_unless_they_crowd() -> None:
    axes = axes_of()
    far, near = (np.array([0.1, 0.9]), np.array([0.2, 0.8])), (np.array([0.11, 0.5]), np.array([0.2, 0.2]))
    marks = label_placement.label_curve_ends(axes, [far, near])
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


def test_drawn_returns_lines_and_single_points() -> None:
    axes = axes_of()
    axes.plot([0, 1, 2], [3, 4, 5])
    axes.plot([6, 7], [8, 9], linestyle="none", marker="o")
    assert [each.tolist() for each in label_placement.drawn_lines(axes)] == [[[0, 3], [1, 4], [2, 5]], [[6, 8]], [[7, 9]]]


# --- To the pixel -------------------------------------------------------------------------------------------------------

OFFSETS = [
    (10, 0), (10, 10), (10, -10), (18, 0), (18, 18), (18, -18), (30, 0), (30, 28), (30, -28), (48, 0), (60, 20)
]  # fmt: skip


def of_pixels(dpi: float = 100.0) -> Axes:
    """Axes whose data units are pixels from their lower left corner, 360 across and 320 up."""
    axes = axes_of(dpi)
    frame = axes.get_window_extent()
    axes.set_xlim(0, frame.width)
    axes.set_ylim(0, frame.height)
    return axes


def size(text: str) -> tuple[float, float]:
    axes = of_pixels()
    box = axes.annotate(text, (100, 100), fontsize=8.5, va="center").get_window_extent()
    return box.width, box.height


def first_clear(
    at: tuple[float, float], extent: tuple[float, float], points: list[tuple[float, float]], taken: list[Bbox]
) -> tuple[float, float, str, Bbox] | None:
    """Offset, edge and box of the first clear position of a label inside the axes, trying right before left."""
    width, height = extent
    for reach, rise in OFFSETS:
        for side in (1, -1):
            left = at[0] + side * reach - (width if side < 0 else 0)
            low, high = at[1] + rise - height / 2, at[1] + rise + height / 2
            box = Bbox.from_extents(left - 2, low, left + width + 2, high)
            clear = not any(box.x0 < x < box.x1 and low - 1 < y < high + 1 for x, y in points)
            clear &= not any(box.x0 < each.x1 and each.x0 < box.x1 and box.y0 < each.y1 and each.y0 < box.y1 for each in taken)
            if clear and box.x0 >= 0 and box.x1 <= 360 and box.y0 >= 0 and box.y1 <= 320:
                return side * reach, rise, "left" if side > 0 else "right", box
    return None


def test_labels_take_the_first_clear_position() -> None:
    rng = np.random.default_rng(7)
    extents = {text: size(text) for text in ("a", "some words", "two\nlines")}
    for crowd in (0, 10, 40, 120):
        for _ in range(5):
            axes = of_pixels()
            at = [(*where, text) for where, text in zip(rng.uniform(0, (360, 320), (9, 2)).tolist(), 3 * [*extents], strict=True)]
            others = rng.uniform(0, (360, 320), (crowd, 2)).tolist()
            left_out = label_placement.label_points(axes, at, [np.array([each]) for each in others])
            points, taken = [*others, *((x, y) for x, y, _ in at)], list[Bbox]()
            expected: list[Any] = []
            for x, y, text in at:
                if (found := first_clear((x, y), extents[text], points, taken)) is not None:
                    expected.append((text, (x, y), *found[:3]))
                    taken.append(found[3])
            drawn = [
                (text.get_text(), text.xy, *(value / 0.72 for value in text.get_position()), text.get_ha())  # type: ignore[attr-defined]
                for text in axes.texts
            ]
            assert [each[:2] + each[4:] for each in drawn] == [each[:2] + each[4:] for each in expected]
            assert np.array([each[2:4] for each in drawn]) == pytest.approx(np.array([each[2:4] for each in expected]))
            assert left_out == 9 - len(expected)
            for text, (*_, dx, dy, _) in zip(axes.texts, expected, strict=True):
                leader = {"arrowstyle": "-", "color": "#595959", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 4}
                assert text.arrowprops == (leader if dx**2 + dy**2 > 400 else None)  # type: ignore[attr-defined]
                assert (text.get_fontsize(), text.get_va()) == (8.5, "center")


def test_each_position_is_used_if_all_others_are_blocked() -> None:
    rng, (width, height) = np.random.default_rng(3), size("words")
    for reach, rise in OFFSETS:
        for side in (1, -1):
            left = 180 + side * reach - (width if side < 0 else 0)
            inside = Bbox.from_extents(left - 3, 160 + rise - height / 2 - 2, left + width + 3, 160 + rise + height / 2 + 2)
            cloud = [each for each in rng.uniform((60, 100), (300, 220), (1500, 2)) if not inside.contains(*each)]
            axes = of_pixels()
            assert label_placement.label_points(axes, [(180, 160, "words")], [each[None] for each in cloud]) == 0
            assert (axes.texts[0].get_position(), axes.texts[0].get_ha()) == (
                pytest.approx((0.72 * side * reach, 0.72 * rise)), "left" if side > 0 else "right"
            )  # fmt: skip


def test_touching_obstacles_do_not_block_a_position() -> None:
    """Test an obstacle on each edge and slightly inside of it, and the frame on an edge and slightly inside."""
    width, height = size("words")
    x, y = 128.0, 128.0
    edges = [(x + 8, y), (x + 10 + width + 2, y), (x + 20, y - height / 2 - 1), (x + 20, y + height / 2 + 1)]
    inward = [(0.01, 0), (-0.01, 0), (0, 0.01), (0, -0.01)]
    for (across, up), (dx, dy) in zip(edges, inward, strict=True):
        for step, moved in ((0, False), (1, True)):
            axes = of_pixels()
            assert label_placement.label_points(axes, [(x, y, "words")], [np.array([(across + step * dx, up + step * dy)])]) == 0
            assert (axes.texts[0].get_position() != pytest.approx((7.2, 0))) == moved, (across, up, step)
    # At the right if the whole label is inside, else at the left.
    for beyond, side in ((0.0, "left"), (0.01, "right")):
        axes = of_pixels()
        label_placement.label_points(axes, [(360 - width - 12 + beyond, y, "words")], [])
        assert axes.texts[0].get_ha() == side
    for beyond, rise in ((0.0, 0), (0.01, 7.2)):
        axes = of_pixels()
        label_placement.label_points(axes, [(x, height / 2 - beyond, "words")], [])
        assert axes.texts[0].get_position()[1] == pytest.approx(rise)
    # A label that touches another's box, and one that overlaps it.
    for above, moved in ((height, False), (height - 0.01, True)):
        axes = of_pixels()
        label_placement.label_points(axes, [(x, y, "words"), (x, y + above, "words")], [])
        assert (axes.texts[1].get_position()[1] != pytest.approx(0)) == moved or axes.texts[1].get_ha() == "right" * moved
    assert label_placement.label_points(of_pixels(), [(x, y, "words")], [], size=120) == 1


def test_lines_are_sampled_about_every_four_pixels() -> None:
    axes = of_pixels()
    corner = axes.transData.transform((0, 0))
    for line, count in (([(0, 0), (40, 0)], 12), ([(0, 0), (30, 40), (30, 41)], 14), ([(0, 0), (0, 1e6)], 5000)):
        found = label_placement._pixels(axes, np.array(line, dtype=float)) - corner
        assert len(found) == count
        assert (found[0].tolist(), found[-1].tolist()) == (pytest.approx([*line[0]]), pytest.approx([*line[-1]]))
        steps = np.hypot(*np.diff(found, axis=0).T)
        assert steps[:9] == pytest.approx([steps[0]] * 9)
    assert (label_placement._pixels(axes, np.array([(3.0, 4.0)])) - corner).tolist() == [pytest.approx([3, 4])]


@pytest.mark.parametrize("dpi", [100.0, 180.0])
def test_crowded_names_are_one_line_apart_at_the_top_and_the_bottom(dpi: float) -> None:
    gap = 1.25 * 8.5 * dpi / 72
    for y, sign in ((0.0, 1), (1.0, -1), (7.0, -1), (-7.0, 1)):
        axes = axes_of(dpi)
        assert label_placement.label_at_right(axes, [(y, f"{index}", "#123456") for index in range(3)]) == 0
        assert [text.get_text() for text in axes.texts] == ["0", "1", "2"]
        rises = [text.get_position()[1] * dpi / 72 for text in axes.texts]
        assert rises == pytest.approx([0, gap, 2 * gap] if sign > 0 else [-2 * gap, -gap, 0], abs=1e-6)
        for text in axes.texts:
            assert text.xy == (1.0, max(0.0, min(1.0, y)))  # type: ignore[attr-defined]
            assert text.get_position()[0] == 14
            assert (text.xycoords, text.anncoords) == ("axes fraction", "offset points")  # type: ignore[attr-defined]
            assert (text.get_fontsize(), text.get_va(), text.get_annotation_clip()) == (8.5, "center", False)  # type: ignore[attr-defined]
            assert text.arrowprops == {  # type: ignore[attr-defined]
                "arrowstyle": "-", "color": "#123456", "linewidth": 0.6, "shrinkA": 0, "shrinkB": 0, "relpos": (0, 0.5),
            }  # fmt: skip
    # If there is not room for all names, an even selection is drawn, at least one.
    low = axes_of(dpi)
    low.set_position((0.1, 0.1, 0.6, (3.5 * gap) / (4 * dpi)))
    assert label_placement.label_at_right(low, [(index / 10, f"{index}", "#123456") for index in range(9)]) == 6
    assert [text.get_text() for text in low.texts] == ["0", "4", "8"]
    flat = axes_of(dpi)
    flat.set_position((0.1, 0.1, 0.6, 0.01))
    assert label_placement.label_at_right(flat, [(0.5, "one", "#123456"), (0.6, "two", "#123456")]) == 1


def test_ends_of_curves_are_marked_unless_another_mark_is_near() -> None:
    """Marks within 36 pixels horizontally and 14 vertically are near."""
    for across, up, marked in ((36, 0, False), (36.5, 0, True), (0, 14, False), (0, 14.5, True), (36, 14, False), (-37, 3, True)):
        axes = of_pixels()
        marks = label_placement.label_curve_ends(
            axes, [(np.array([x, x]), np.array([y, y + 100])) for x, y in ((100, 80), (100 + across, 80 + up))]
        )
        assert [text.get_text() for text in axes.texts] == ["p = 0", "p = 1"] * (1 + marked)
        assert [text.get_position() for text in axes.texts] == [(0, 7), (0, -11)] * (1 + marked)
        assert {(text.get_fontsize(), text.get_ha(), text.get_color()) for text in axes.texts} == {(8.0, "center", "#595959")}
        expected = [[(x - 13, y), (x + 13, y)] for x, y in ((100, 89.8), (100, 164.6))]
        assert np.array(marks[:2]) == pytest.approx(np.array(expected))
