"""Figure of the slides' speed-ups: bars, marks and labels against the rows."""

import itertools
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures.of_papers import slides_speedups
from model.base.checks import ParameterError
from model.published import deck_analysis
from tests.support.figure_checks import laid_out, shown


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return deck_analysis.rows()


def bars(figure: Figure, label: str) -> list[tuple[float, float]]:
    """Ends of the bars of this kind, from the top down."""
    found = []
    for container in figure.axes[0].containers:
        if container.get_label() == label:
            (bar,) = container.get_children()
            assert isinstance(bar, Rectangle)
            found.append((bar.get_y(), bar.get_x(), bar.get_x() + bar.get_width()))
    return [(left, right) for _, left, right in sorted(found)]


def marks(figure: Figure) -> list[tuple[float, str, str]]:
    """Speed-up, marker and colour of every printed number, from the top down."""
    drawn = [line for line in figure.axes[0].lines if line.get_label() == "printed"]
    drawn.sort(key=lambda line: float(line.get_ydata()[0]))  # type: ignore[index, arg-type]
    return [(float(line.get_xdata()[0]), str(line.get_marker()), str(line.get_color())) for line in drawn]  # type: ignore[index, arg-type]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_bars_end_at_their_bounds_and_marks_at_the_printed_speed_ups(rows: list[dict[str, Any]]) -> None:
    figure = slides_speedups.draw(rows)
    adaptive = [row["draft_length"] is None for row in rows]
    stated = [row["oracle_bound"] if free else row["theorem"] for row, free in zip(rows, adaptive, strict=True)]
    reread = [row["reread_oracle"] if free else row["reread_speedup"] for row, free in zip(rows, adaptive, strict=True)]
    for label, ends in (("stated", stated), ("free", [row["free_bound"] for row in rows]), ("reread", reread)):
        drawn = bars(figure, label)
        assert [left for left, _ in drawn] == [1.0] * len(rows)
        assert [right for _, right in drawn] == pytest.approx(ends)
    assert [speed for speed, *_ in marks(figure)] == [row["speedup"] for row in rows]


def test_impossible_rows_differ_by_marker_colour_and_word(rows: list[dict[str, Any]]) -> None:
    figure = slides_speedups.draw(rows)
    kinds = {wrong: {mark[1:] for mark, row in zip(marks(figure), rows, strict=True) if row["impossible_if_free"] == wrong}
             for wrong in (True, False)}  # fmt: skip
    (cross, red), (diamond, black) = (next(iter(kinds[wrong])) for wrong in (True, False))
    assert len(kinds[True]) == len(kinds[False]) == 1
    assert cross != diamond
    assert red != black
    said = [text.split(":")[0] for text in words(figure) if ": impossible" in text]
    assert said == [f"{row['speedup']:g}" for row in rows if row["impossible_if_free"]]
    assert f"{len(said)} of the slides' {len(rows)} speed-ups are impossible" in " ".join(words(figure))


def test_impossible_marks_and_only_they_lie_beyond_the_pale_bar(rows: list[dict[str, Any]]) -> None:
    figure = slides_speedups.draw(rows)
    beyond = [speed > end for (speed, *_), (_, end) in zip(marks(figure), bars(figure, "free"), strict=True)]
    assert beyond == [marker == "X" for _, marker, _ in marks(figure)]
    assert True in beyond
    assert False in beyond


def test_diamonds_lie_between_the_bounds_with_and_without_drafting_cost(rows: list[dict[str, Any]]) -> None:
    figure = slides_speedups.draw(rows)
    between = [
        stated < speed <= free
        for (speed, *_), (_, stated), (_, free) in zip(marks(figure), bars(figure, "stated"), bars(figure, "free"), strict=True)
    ]
    assert between == [marker == "D" for _, marker, _ in marks(figure)]
    assert True in between


def test_possible_rows_change_the_headline_and_the_marks(rows: list[dict[str, Any]]) -> None:
    honest = [row | {"speedup": 0.9 * row["theorem"], "impossible_if_free": False} for row in rows]
    figure = slides_speedups.draw(honest)
    assert {marker for _, marker, _ in marks(figure)} == {"o"}
    assert figure.legends[0].get_texts()[0].get_text() == "printed, possible"
    assert "0 of the slides' 6" in " ".join(words(figure))
    assert "10 % below Theorem 3.8" in " ".join(words(figure))


def test_printed_numbers_are_those_of_the_rows(rows: list[dict[str, Any]]) -> None:
    text = " ".join(words(slides_speedups.draw(rows)))
    for row in rows:
        printed, free = row["speedup"], row["free_bound"]
        if row["impossible_if_free"]:
            assert f"{printed:g}: impossible, {100 * (printed - free) / free:.0f} % too much" in text
        if row["draft_length"] is None:
            assert f"(γ = {row['reread_length']} assumed), at most {row['reread_oracle']:.2f}" in text
        else:
            off = f"{100 * row['reread_excess']:+.1f} %".replace("-", "\N{MINUS SIGN}")
            assert f"gives {row['reread_speedup']:.2f}, off by {off}" in text


def test_nothing_is_cut_off_and_no_text_covers_another(rows: list[dict[str, Any]]) -> None:
    for part in (rows, rows[:4], rows[4:], rows[:1]):
        figure = laid_out(slides_speedups.draw(part))
        boxes = [text.get_window_extent() for text in (*figure.axes[0].texts, *figure.texts)]
        boxes.append(figure.legends[0].get_window_extent())
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        whole = figure.bbox
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1 for box in boxes)
        left, right = figure.axes[0].get_xlim()
        assert all(left <= speed <= right for speed, *_ in marks(figure))


def test_a_table_and_a_list_give_the_same_figure(rows: list[dict[str, Any]]) -> None:
    assert shown(slides_speedups.draw(rows)) == shown(slides_speedups.draw(pl.DataFrame(rows, infer_schema_length=None)))


def test_rows_that_cannot_be_drawn_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ParameterError, match="the figure of the slides needs at least one row"):
        slides_speedups.draw([])
    with pytest.raises(ParameterError, match="none called free_bound"):
        slides_speedups.draw([{key: value for key, value in row.items() if key != "free_bound"} for row in rows])


def test_slides_by_hand() -> None:
    """One row of each kind; fixed lengths above, the adaptive one below, for any order of the rows."""
    shared = {"draft_length": 4, "acceptance_rate": 0.5, "oracle_bound": 9.0, "reread_oracle": 9.0, "reread_rate": 0.625,
              "reread_length": 4, "impossible_if_free": False}  # fmt: skip
    made = [
        shared | {"source": "deck, adaptive, long", "draft_length": None, "acceptance_rate": 0.75, "speedup": 1.5, "theorem": 9.0,
                  "free_bound": 1.75, "oracle_bound": 1.5, "reread_speedup": 9.0, "reread_oracle": 1.25},
        shared | {"source": "deck, gamma 4", "speedup": 2.5, "theorem": 1.6, "free_bound": 2.0, "impossible_if_free": True,
                  "reread_speedup": 2.5},
        shared | {"source": "deck, gamma 5", "speedup": 1.5, "theorem": 1.2, "free_bound": 2.0, "reread_speedup": 1.6},
    ]  # fmt: skip
    figure = slides_speedups.draw(made)
    drawn = shown(figure)
    assert drawn.texts == [
        "1 of the slides' 3 speed-ups are impossible at their acceptance rate α, even with free drafting",
    ]  # fmt: skip
    assert drawn.legends == [("", [
        "printed, impossible", "printed, needs cheaper drafting", "printed, possible", "bound at the printed α and cost",
        "… with free drafting", "bound if α means accepted / drafted (re-read)",
    ])]  # fmt: skip
    [panel] = drawn.panels
    assert (panel.x, panel.y, panel.ticks[1], panel.grid) == ("speed-up over plain decoding  (1: no gain)", "", [], "x")
    wanted = [
        ("Table 2, draft length γ: bars are Theorem 3.8; marks should be at a bar's end", 1.015, -0.05),
        ("γ = 4\nα = 0.5", -0.02, 0.72), ("2.5: impossible, 25 % too much", 1.02, 0.72 - 0.17),
        ("re-read: α = 0.62 gives 2.50, off by +0.0 %", 1.02, 0.72 + 0.17),
        ("γ = 5\nα = 0.5", -0.02, 1.72), ("1.5: 25 % above Theorem 3.8", 1.02, 1.72 - 0.17),
        ("re-read: α = 0.62 gives 1.60, off by \N{MINUS SIGN}6.2 %", 1.02, 1.72 + 0.17),
        ("Adaptive draft length: bars are the oracle bound; marks should be within a bar", 1.015, 2.72 - 0.05),
        ("adaptive, long\nα = 0.75", -0.02, 3.44), ("1.5: 0 % below the oracle bound", 1.02, 3.44 - 0.17),
        ("re-read: α = 0.62 (γ = 4 assumed), at most 1.25", 1.02, 3.44 + 0.17),
    ]
    found = figure.axes[0].texts
    assert [text.get_text() for text in found] == [text for text, *_ in wanted]
    for text, (said, x, y) in zip(found, wanted, strict=True):
        assert text.get_position() == pytest.approx((x, y)), said
    assert [text.get_text() for text in found if text.get_style() == "italic"] == [wanted[0][0], wanted[7][0]]
    ends = {name: [boxes[0] for label, boxes in panel.bars if label == name] for name in ("free", "stated", "reread")}
    levels = (0.72, 1.72, 3.44)
    for name, lengths, side in (
        ("free", (1.0, 1.0, 0.75), -0.17), ("stated", (0.6, 0.2, 0.5), -0.17), ("reread", (1.5, 0.6, 0.25), 0.17),
    ):  # fmt: skip
        assert np.array(ends[name]) == pytest.approx(np.array(
            [(1, level + side - 0.15, long, 0.3) for level, long in zip(levels, lengths, strict=True)]))  # fmt: skip
    printed = [points for label, points in panel.lines if label == "printed line"]
    assert np.array(printed) == pytest.approx(np.array([[(speed, level - 0.36), (speed, level + 0.36)] for speed, level in zip(
        (2.5, 1.5, 1.5), levels, strict=True)]))  # fmt: skip
    axes = figure.axes[0]
    assert axes.get_ylim() == pytest.approx((4.44 - 0.45, -0.3))
    assert axes.get_xlim() == (1, pytest.approx(2.5 + 0.03 * 1.5, abs=0.02))
    assert [marker for _, marker, _ in marks(figure)] == ["X", "D", "o"]
    assert figure.get_figheight() == pytest.approx(1.75 + 0.66 * 3 + 0.5 * 2)
    assert axes.spines["left"].get_linewidth() == 1.6
    assert slides_speedups.draw(made[:1]).get_figheight() == pytest.approx(1.75 + 0.66 + 0.5)
    assert shown(slides_speedups.draw(made[:1])).panels[0].texts[0].startswith("Adaptive")
