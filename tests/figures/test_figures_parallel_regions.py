"""Map of parallel drafts against chains: what is drawn is the theory's, and text fits."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from figures.of_theory import parallel_regions
from model.base.checks import ParameterError
from model.methods.speculative import theory
from tests.figures.test_figures_speculative import inside
from tests.figures.test_figures_tradeoff import lines, words


@settings(max_examples=20, deadline=None)
@given(st.floats(0.05, 1), st.floats(0, 1), st.floats(0, 0.5), st.integers(1, 9))
def test_ratio_is_that_of_the_best_lengths_of_both(rate: float, share: float, cost: float, longest: int) -> None:
    loss = share * rate
    lengths = np.arange(1, longest + 1)
    chain = max(1.0, float(theory.speedup(rate, lengths, cost).max()))
    parallel = theory.expected_tokens(max(rate - loss, 0.0), lengths) / (1 + cost)
    found = parallel_regions.ratios(rate, np.array([loss]), np.array([cost]), longest)
    assert found[0, 0] == pytest.approx(max(1.0, float(parallel.max())) / chain, rel=1e-9)


@pytest.mark.parametrize("rates", [(0.8,), (0.7, 0.8), (0.6, 0.8, 0.9), (0.3, 0.5, 0.7, 0.95)])
def test_line_of_equal_speed_divides_the_map(rates: tuple[float, ...]) -> None:
    figure = parallel_regions.draw(rates)
    assert len(figure.axes) == len(rates)
    for axes, rate in zip(figure.axes, rates, strict=True):
        line = lines(axes)["equally fast"]
        for cost, loss in np.column_stack(line.get_data())[20:140:30]:
            above, below = parallel_regions.ratios(rate, np.array([loss + 0.01, loss - 0.01]), np.array([cost]), 7)[:, 0]
            assert below > 1 > above or loss < 0.01 or loss > rate - 0.01 or above == below == 1
    assert inside(figure)
    assert "One pass for all drafted tokens" in words(figure)


def test_too_many_maps_and_bad_costs_are_refused() -> None:
    with pytest.raises(ParameterError, match="number of acceptance_rates must be between 1 and 4, got 5"):
        parallel_regions.draw([0.5] * 5)
    with pytest.raises(ParameterError, match="most_cost"):
        parallel_regions.draw(most_cost=0)
