"""The map over all methods shows the rows that it is drawn from."""

from __future__ import annotations

from typing import Any

import pytest
from matplotlib.patches import Rectangle

import figures
from figures.of_load import method_cells
from model.base.checks import ParameterError


def row(
    batch: int, context: int, label: str | None, speedup: float | None = None, gpu_ms: float | None = None, **more: bool
) -> Any:
    marks = {"fastest": False, "tied": False, "least_gpu_time": False} | more
    return {"batch": batch, "context": context, "fits": label is not None, "label": label, "speedup": speedup,
            "gpu_ms_per_token": gpu_ms, **marks}  # fmt: skip


ROWS = [
    row(1, 1024, "plain decoding", 1.0, 8.0), row(1, 1024, "trees", 1.5, 5.25, fastest=True, least_gpu_time=True),
    row(8, 1024, "plain decoding", 1.0, 1.5, least_gpu_time=True), row(8, 1024, "PEARL", 1.25, 2.5, fastest=True),
    row(8, 1024, "trees", 1.2, 1.75, tied=True), row(1, 8192, "trees", 1.75, 6.5, fastest=True, least_gpu_time=True),
    row(8, 8192, None),
]  # fmt: skip


def drawn() -> Any:
    return method_cells.draw(method_cells.cells_of(ROWS), title="llama on h100")


def labels_of(axes: Any) -> dict[tuple[int, int], list[str]]:
    found: dict[tuple[int, int], list[str]] = {}
    for each in axes.texts:
        x, y = each.get_position()
        found.setdefault((round(x), round(y)), []).append(each.get_text())
    return found


def squares(axes: Any) -> dict[tuple[int, int], Rectangle]:
    return {(round(each.get_x() + 0.48), round(each.get_y() + 0.46)): each for each in axes.patches}


def test_cells_hold_both_winners() -> None:
    cells = method_cells.cells_of(ROWS)
    assert [(each.batch, each.context, each.tied) for each in cells] == [
        (1, 1024, False), (8, 1024, True), (1, 8192, False), (8, 8192, False)
    ]  # fmt: skip
    assert cells[1].fastest == ("PEARL", 1.25, 2.5)
    assert cells[1].cheapest == ("plain decoding", 1.0, 1.5)
    assert cells[3].fastest is cells[3].cheapest is None


def test_numbers_and_colours_are_those_of_the_rows() -> None:
    left, right = drawn().axes
    assert labels_of(left) == {(0, 0): ["1.50×", "5.25"], (1, 0): ["1.25×", "2.5"], (0, 1): ["1.75×", "6.5"]}
    assert labels_of(right) == {(0, 0): ["5.25", "1.50×"], (1, 0): ["1.5", "1.00×"], (0, 1): ["6.5", "1.75×"]}
    for axes in (left, right):
        faces = {at: each.get_facecolor() for at, each in squares(axes).items()}
        assert faces[0, 0] == faces[0, 1]  # trees
        assert len({*faces.values()}) == 3
        assert faces[1, 1] == (1, 1, 1, 1)  # does not fit
        assert [each.get_text() for each in axes.get_xticklabels()] == ["1", "8"]
        assert [each.get_text() for each in axes.get_yticklabels()] == ["1,024", "8,192"]
    assert squares(left)[1, 0].get_facecolor() != squares(right)[1, 0].get_facecolor()


def test_ties_alone_are_hatched_and_the_legend_names_what_is_drawn() -> None:
    figure = drawn()
    left, right = figure.axes
    assert {at for at, each in squares(left).items() if each.get_hatch()} == {(1, 0)}
    assert not any(each.get_hatch() for each in squares(right).values())
    (legend,) = figure.legends
    named = [each.get_text() for each in legend.get_texts()]
    assert named == ["trees", "PEARL", "plain decoding", "another is within its interval", "the memory does not hold them"]
    alone = method_cells.draw(method_cells.cells_of(ROWS[:2]), title="t")
    assert [each.get_text() for each in alone.legends[0].get_texts()] == ["trees"]


@pytest.mark.parametrize(("changed", "message"), [
    ({"batch": 0}, "table.batch"), ({"context": "x"}, "table.context"), ({"speedup": float("nan")}, "table.speedup"),
    ({"gpu_ms_per_token": -1.0}, "table.gpu_ms_per_token"),
])  # fmt: skip
def test_rows_with_wrong_values_are_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        method_cells.cells_of([ROWS[1] | changed])


def test_too_many_cells_are_refused_and_the_same_rows_give_the_same_figure() -> None:
    many = [row(batch, context, "trees", 1.0, 1.0, fastest=True) for batch in range(1, 22) for context in range(1, 22)]
    with pytest.raises(ParameterError, match="cells must be between 1 and 400"):
        method_cells.draw(method_cells.cells_of(many), title="t")
    assert figures.svg(drawn()) == figures.svg(drawn())
