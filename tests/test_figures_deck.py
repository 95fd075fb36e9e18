"""The figure of the deck, by its artists: bars, marks and words against the rows that it is given."""

import itertools
from typing import Any

import matplotlib
import polars as pl
import pytest
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from figures import deck
from model.checks import ParameterError
from model.published import deck_report
from tests.figure_checks import laid_out, shown


@pytest.fixture(scope="module")
def rows() -> list[dict[str, Any]]:
    return deck_report.rows()


def bars(figure: Figure, label: str) -> list[tuple[float, float]]:
    """Where the bars of this kind begin and end, from the top down."""
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


def test_every_bar_ends_at_its_bound_and_every_mark_at_the_printed_speed_up(rows: list[dict[str, Any]]) -> None:
    figure = deck.draw(rows)
    adaptive = [row["draft_length"] is None for row in rows]
    stated = [row["oracle_bound"] if free else row["theorem"] for row, free in zip(rows, adaptive, strict=True)]
    reread = [row["reread_oracle"] if free else row["reread_speedup"] for row, free in zip(rows, adaptive, strict=True)]
    for label, ends in (("stated", stated), ("free", [row["free_bound"] for row in rows]), ("reread", reread)):
        drawn = bars(figure, label)
        assert [left for left, _ in drawn] == [1.0] * len(rows)
        assert [right for _, right in drawn] == pytest.approx(ends)
    assert [place for place, *_ in marks(figure)] == [row["speedup"] for row in rows]


def test_impossible_rows_are_told_by_marker_colour_and_word(rows: list[dict[str, Any]]) -> None:
    figure = deck.draw(rows)
    kinds = {wrong: {mark[1:] for mark, row in zip(marks(figure), rows, strict=True) if row["impossible_if_free"] == wrong}
             for wrong in (True, False)}  # fmt: skip
    (cross, red), (diamond, black) = (next(iter(kinds[wrong])) for wrong in (True, False))
    assert len(kinds[True]) == len(kinds[False]) == 1
    assert cross != diamond
    assert red != black
    said = [text.split(":")[0] for text in words(figure) if ": impossible" in text]
    assert said == [f"{row['speedup']:g}" for row in rows if row["impossible_if_free"]]
    assert f"{len(said)} of the deck's {len(rows)} speed-ups are impossible" in " ".join(words(figure))


def test_a_mark_stands_beyond_the_pale_bar_where_it_is_impossible_and_only_there(rows: list[dict[str, Any]]) -> None:
    figure = deck.draw(rows)
    beyond = [place > end for (place, *_), (_, end) in zip(marks(figure), bars(figure, "free"), strict=True)]
    assert beyond == [marker == "X" for _, marker, _ in marks(figure)]
    assert True in beyond
    assert False in beyond


def test_a_diamond_lies_between_what_the_cost_of_drafting_allows_and_what_free_drafting_does(rows: list[dict[str, Any]]) -> None:
    figure = deck.draw(rows)
    between = [
        stated < place <= free
        for (place, *_), (_, stated), (_, free) in zip(marks(figure), bars(figure, "stated"), bars(figure, "free"), strict=True)
    ]
    assert between == [marker == "D" for _, marker, _ in marks(figure)]
    assert True in between


def test_possible_rows_change_the_headline_and_the_marks(rows: list[dict[str, Any]]) -> None:
    honest = [row | {"speedup": 0.9 * row["theorem"], "impossible_if_free": False} for row in rows]
    figure = deck.draw(honest)
    assert {marker for _, marker, _ in marks(figure)} == {"o"}
    assert figure.legends[0].get_texts()[0].get_text() == "printed, and possible"
    assert "0 of the deck's 6" in " ".join(words(figure))
    assert "10 % below Theorem 3.8" in " ".join(words(figure))


def test_the_numbers_in_words_are_those_of_the_rows(rows: list[dict[str, Any]]) -> None:
    text = " ".join(words(deck.draw(rows)))
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
        figure = laid_out(deck.draw(part))
        boxes = [text.get_window_extent() for text in (*figure.axes[0].texts, *figure.texts)]
        boxes.append(figure.legends[0].get_window_extent())
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        whole = figure.bbox
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1 for box in boxes)
        left, right = figure.axes[0].get_xlim()
        assert all(left <= place <= right for place, *_ in marks(figure))


def test_a_table_and_a_list_give_the_same_figure(rows: list[dict[str, Any]]) -> None:
    assert shown(deck.draw(rows)) == shown(deck.draw(pl.DataFrame(rows, infer_schema_length=None)))


def test_rows_that_cannot_be_drawn_are_refused(rows: list[dict[str, Any]]) -> None:
    with pytest.raises(ParameterError, match="the figure of the deck needs at least one row"):
        deck.draw([])
    with pytest.raises(ParameterError, match="none called free_bound"):
        deck.draw([{key: value for key, value in row.items() if key != "free_bound"} for row in rows])
