"""Figure of an engine's cells: drawn values are those of the law and of the cells."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.of_hardware import engine_predictions
from model.base.checks import ParameterError
from model.engines.cells import Cells
from model.engines.step_law import StepLaw
from tests.figures.test_figures_tradeoff import lines
from tests.support.figure_checks import shown

COEFFICIENTS = {
    "weights": 8e-3, "ridge_tokens": 250.0, "step": 1e-3, "sequence": 2e-5, "token": 1e-5, "draft_pass": 5e-4, "round": 2e-4,
    "acceptance_rate": 0.75, "acceptance_trend": 0.0,
}  # fmt: skip
GRID = np.array([(batch, length) for length in (0, 2, 4) for batch in (1, 8, 64)], dtype=np.float64).T


def _law() -> StepLaw:
    """A law with made-up draws around its coefficients, fitted to the cells of batch 1 and 64 without a draft."""
    random = np.random.default_rng(1)
    draws = {name: value * np.exp(0.02 * random.standard_normal(16)) for name, value in COEFFICIENTS.items()}
    draws |= {"acceptance_trend": np.zeros(16), "noise": np.full(16, 0.02)}
    fitted = Cells.of("output_tokens_per_s", [1, 64], [0, 0], [1, 1])
    return StepLaw("mine", "output_tokens_per_s", COEFFICIENTS, draws, cells=fitted)


LAW = _law()
_EMPTY = Cells.of("output_tokens_per_s", *GRID)
_FACTORS = np.array([1.0, 1.01, 1.0, 0.98, 1.03, np.nan, 0.97, 1.0, 1.04])
CELLS = replace(_EMPTY, values=LAW.predict(_EMPTY).values * _FACTORS)
"""Cells whose measured values are known shares of the predictions; one of them was not measured."""


def drawn() -> Figure:
    return engine_predictions.draw(LAW, CELLS)


def ys(line: Line2D) -> list[float]:
    return np.asarray(line.get_ydata()).tolist()


def test_lines_are_predictions_over_those_of_the_shortest_draft() -> None:
    left, _ = drawn().axes
    values = LAW.predict(_EMPTY).values.reshape(3, 3)
    for row, length in enumerate((0, 2, 4)):
        assert ys(lines(left)[f"law {length}"]) == pytest.approx(values[row] / values[0])
    assert left.get_ylabel() == "throughput, over the law at K = 0"


def test_points_are_measured_values_and_filled_where_fitted() -> None:
    left, right = drawn().axes
    values = LAW.predict(_EMPTY).values.reshape(3, 3)
    own, other = lines(left)["fitted 0"], lines(left)["predicted 0"]
    assert ys(own) == pytest.approx([1.0, 1.0])
    assert ys(other) == pytest.approx([1.01])
    faces = [to_hex(line.get_markerfacecolor()) for line in (other, own)]  # type: ignore[arg-type]
    assert faces == ["#ffffff", to_hex(own.get_markeredgecolor())]
    assert not ys(lines(left)["fitted 4"])
    assert ys(lines(left)["predicted 4"]) == pytest.approx(np.array([0.97, 1.0, 1.04]) * values[2] / values[0])
    # Next to each other at each batch, in the right panel.
    assert ys(lines(right)["predicted 2"]) == pytest.approx([0.98, 1.03])
    at = [np.asarray(lines(right)[f"predicted {length}"].get_xdata())[-1] for length in (0, 4)]
    assert at[0] < 8 < 64 < at[1] < 128


def test_intervals_contain_the_predictions() -> None:
    panels = shown(drawn()).panels
    values, low, high, _ = LAW.predict(_EMPTY)
    corners = dict(panels[0].bands)["off 4"]
    edges = sorted({round(y, 9) for _, y in corners})
    base = values[:3]
    assert edges[0] == pytest.approx((low[6:] / base).min())
    assert edges[-1] == pytest.approx((high[6:] / base).max())
    bars = dict(panels[1].segments)["off 2"]
    measured = slice(3, 5)  # the third cell of this draft length was not measured
    assert [one[1] for one, _ in bars] == pytest.approx(low[measured] / values[measured])
    assert [two[1] for _, two in bars] == pytest.approx(high[measured] / values[measured])


def test_errors_in_the_subtitle_are_of_cells_that_were_not_fitted() -> None:
    said = shown(drawn()).texts
    # |1 / factor - 1| of six cells: 1.0, 2.0, 2.9, 3.1, 0, 3.8 %.
    assert "mine: fitted to 2 cells; 6 others predicted, median error 2.5 %, worst 3.8 %" in said
    assert "mine: fitted to 2 cells" in shown(engine_predictions.draw(LAW, CELLS[:3:2])).texts
    priors = replace(LAW, cells=None)
    assert not engine_predictions.fitted(priors, CELLS).any()
    assert any(text.startswith("mine: fitted to 0 cells; 8 others") for text in shown(engine_predictions.draw(priors, CELLS)).texts)


def test_impossible_cells_are_refused() -> None:
    with pytest.raises(ParameterError, match="cells must be in the unit of law mine, output_tokens_per_s, got tpot_ms"):
        engine_predictions.draw(LAW, Cells.of("tpot_ms", [1], [0], [5.0]))
    with pytest.raises(ParameterError, match="at least one cell must have a measured value, got none"):
        engine_predictions.draw(LAW, _EMPTY)
    many = Cells.of("output_tokens_per_s", 1, np.arange(7), np.ones(7))
    with pytest.raises(ParameterError, match="values of draft_length must be between 1 and 6, got 7"):
        engine_predictions.draw(LAW, many)
