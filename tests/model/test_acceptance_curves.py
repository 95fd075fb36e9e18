"""Acceptance by draft position from curves of mean acceptance lengths: recovered from generated ones, and the best law of any."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.engines import acceptance_curves
from model.methods.speculative.theory import expected_tokens

survivals = st.lists(st.floats(0.05, 1.0), min_size=1, max_size=8).map(lambda each: np.cumprod(each))


@st.composite
def curves(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    """Survival, some of its draft lengths, the longest always among them, and their mean acceptance lengths."""
    survival = draw(survivals)
    lengths = np.array(sorted({*draw(st.sets(st.integers(1, survival.size), max_size=8)), survival.size}))
    return survival, lengths, 1 + np.cumsum(survival)[lengths - 1]


@given(curves())
def test_law_of_an_exact_curve_has_no_error(curve: tuple[Any, Any, Any]) -> None:
    survival, lengths, measured = curve
    law = acceptance_curves.fit(lengths, measured)
    assert np.abs(law.errors).max() < 1e-7
    assert law.survival.shape == survival.shape
    if lengths.size == survival.size:  # nothing is left open
        assert law.survival == pytest.approx(survival, abs=1e-6)
        assert np.cumprod(law.conditional_rates) == pytest.approx(survival, abs=1e-6)
    assert acceptance_curves.falls(lengths, measured) == ()


@given(curves(), st.floats(0.0, 0.2), st.randoms(use_true_random=False))
def test_error_of_the_law_is_at_most_that_of_the_curve(curve: tuple[Any, Any, Any], noise: float, random: Any) -> None:
    """The law that the curve was made from is one of those to choose from, so the best one is at least as good."""
    _, lengths, exact = curve
    measured = np.clip(exact * (1 + noise * np.array([random.uniform(-1, 1) for _ in lengths])), 1.0, lengths + 1.0)
    law = acceptance_curves.fit(lengths, measured)
    assert np.abs(law.errors).max() <= np.abs(exact / measured - 1).max() + 1e-6
    assert np.all(np.diff(law.survival) <= 0)
    assert np.all((law.survival >= 0) & (law.survival <= 1))
    assert np.all((law.conditional_rates >= 0) & (law.conditional_rates <= 1))
    assert law.predicted == pytest.approx(1 + np.cumsum(law.survival)[lengths - 1])


@given(st.tuples(*[st.floats(1.0, 2.0), st.floats(1.0, 3.0), st.floats(1.0, 4.0)]))
def test_no_law_on_a_grid_is_better(measured: tuple[float, float, float]) -> None:
    law = acceptance_curves.fit([1, 2, 3], measured)
    steps = np.linspace(0, 1, 12)
    others = [1 + np.cumsum(each) for each in itertools.combinations_with_replacement(steps[::-1], 3)]
    best = min(np.abs(other / np.array(measured) - 1).max() for other in others)
    assert np.abs(law.errors).max() <= best + 1e-7


@given(st.floats(0.0, 0.95), st.integers(1, 12))
def test_constant_rate_inverts_its_length(rate: float, draft_length: int) -> None:
    length = float(expected_tokens(rate, draft_length))
    assert acceptance_curves.constant_rate(draft_length, length) == pytest.approx(rate, abs=1e-6)
    if rate > 0:
        every = np.arange(1, draft_length + 1)
        assert acceptance_curves.constant_lengths(rate, every) == pytest.approx(expected_tokens(rate, every))


def test_constant_curve_is_also_a_law_by_position() -> None:
    law = acceptance_curves.fit([4, 2, 1], expected_tokens(0.8, np.array([4, 2, 1])))
    assert law.draft_lengths.tolist() == [1, 2, 4]  # sorted
    assert law.conditional_rates[:2] == pytest.approx([0.8, 0.8])
    # Positions 3 and 4 are known together alone: the smoothest survival puts them on a line with the second.
    assert law.survival[2:].sum() == pytest.approx(0.8**3 + 0.8**4)
    assert np.diff(law.survival[1:], n=2) == pytest.approx(0, abs=1e-7)


def test_falling_curves_are_named_and_missed() -> None:
    assert acceptance_curves.falls([1, 2, 4, 5, 6], [1.8, 1.7, 2.0, 1.9, 1.9]) == ((1, 2), (4, 5))
    law = acceptance_curves.fit([1, 2], [1.8, 1.7])
    # The best length of both is between them: (1.8 - x) / 1.8 = (x - 1.7) / 1.7.
    assert law.predicted == pytest.approx([1.8 * (1 - 0.1 / 3.5)] * 2)


def test_rates_after_an_unreached_position_are_zero() -> None:
    assert acceptance_curves.fit([1, 2, 3], [1.5, 1.5, 1.5]).conditional_rates == pytest.approx([0.5, 0.0, 0.0])


@pytest.mark.parametrize(
    ("lengths", "measured", "said"),
    [
        ([1, 2], [1.5], r"lists of the same length, got shapes \(2,\) and \(1,\)"),
        ([], [], "lists of the same length"),
        ([1, 1], [1.5, 1.6], "draft_length must be given once each, got 1 twice"),
        ([0, 1], [1.0, 1.6], r"draft_length\[0\] must be at least 1, got 0"),
        ([1, 200], [1.5, 3.0], "draft_length must be at most 128, got 200"),
        ([1, 2], [2.1, 2.2], r"at most draft_length \+ 1 = 2 \(the bonus token counted\), got 2.1"),
        ([1, 2], [0.9, 2.2], "mean_acceptance_length"),
        ([1, 2], [float("nan"), 2.2], "mean_acceptance_length"),
    ],
)
def test_impossible_curves_are_refused(lengths: list[int], measured: list[float], said: str) -> None:
    for of in (acceptance_curves.fit, acceptance_curves.falls):
        with pytest.raises(ParameterError, match=said):
            of(lengths, measured)


def test_impossible_lengths_of_a_constant_rate_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"mean_acceptance_length must be between 1 and 4, got 4\.5"):
        acceptance_curves.constant_rate(3, 4.5)
    with pytest.raises(ParameterError, match="draft_length must be"):
        acceptance_curves.constant_rate(0, 1.0)
