"""Terms of step laws: experts read, acceptance lengths, and seconds of steps, by exact limits and monotone laws."""

from __future__ import annotations

import math
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.engines import step_terms
from model.engines.step_terms import PRIORS, RoutedExperts, StepShape
from model.methods.speculative import theory

SHARES = st.floats(0.001, 0.999)
TOKENS = st.integers(1, 300)


def test_experts_read_by_independent_tokens_equal_enumeration() -> None:
    # Two tokens, each with 2 of 4 experts: all 36 pairs of choices.
    choices = [{*pair} for pair in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))]
    mean = Fraction(sum(len(one | other) for one, other in product(choices, choices)), 36 * 4)
    assert float(step_terms.expert_share_read(RoutedExperts(4, 2), 2, 0, 0.0, 0.0)) == pytest.approx(float(mean), abs=1e-9)


@given(TOKENS, st.integers(0, 8), SHARES, SHARES)
def test_experts_read_are_at_least_those_of_one_token_and_at_most_all(
    number: int, drafted: int, correlation: float, skew: float
) -> None:
    experts = RoutedExperts(64, 6)
    found = float(step_terms.expert_share_read(experts, number, drafted, correlation, skew))
    assert 6 / 64 * (1 - 1e-9) <= found <= min(1.0, number * (drafted + 1) * 6 / 64) * (1 + 1e-9)


@given(TOKENS, st.integers(1, 8), SHARES, SHARES, SHARES)
def test_experts_read_grow_with_tokens_and_fall_with_dependence(
    number: int, drafted: int, correlation: float, skew: float, more: float
) -> None:
    def read(number: int, drafted: int, correlation: float, skew: float) -> float:
        return float(step_terms.expert_share_read(RoutedExperts(128, 8), number, drafted, correlation, skew))

    found = read(number, drafted, correlation, skew)
    slack = 1e-9
    assert read(number + 1, drafted, correlation, skew) >= found - slack
    assert read(number, drafted + 1, correlation, skew) >= found - slack
    assert read(number, drafted, correlation + (1 - correlation) * more, skew) <= found + slack
    assert read(number, drafted, correlation, skew + (1 - skew) * more) <= found + slack


def test_fully_correlated_drafts_read_the_experts_of_plain_decoding() -> None:
    plain, drafted = (step_terms.expert_share_read(RoutedExperts(128, 8), 16, length, 1.0, 0.05) for length in (0, 5))
    assert float(plain) == pytest.approx(float(drafted))


def test_skew_of_popularity_is_its_relative_variance() -> None:
    # Two tokens read 2 p - E[p^2] with E[p^2] = p^2 + skew p (1 - p): the intra-class correlation of a beta distribution.
    share, skew = 8 / 128, 0.07
    expected = 2 * share - (share**2 + skew * share * (1 - share))
    assert float(step_terms.expert_share_read(RoutedExperts(128, 8), 2, 0, 0.0, skew)) == pytest.approx(expected)


@given(st.floats(0.01, 0.99), st.integers(0, 12))
def test_acceptance_length_of_a_constant_rate_is_that_of_the_theory(rate: float, length: int) -> None:
    found = float(step_terms.acceptance_length(rate, 0.0, length))
    assert found == pytest.approx(float(theory.expected_tokens(rate, length)) if length else 1.0)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_length_by_position_is_one_plus_the_survival_of_each_position(rates: list[float]) -> None:
    lengths = step_terms.length_by_position(rates, np.arange(len(rates) + 1))
    assert lengths[0] == 1
    np.testing.assert_allclose(np.diff(lengths), np.cumprod(rates), atol=1e-12)


def test_length_beyond_the_given_rates_is_refused() -> None:
    with pytest.raises(
        ParameterError, match="draft_length must be at most 2, the number of acceptance rates by draft position, got 3"
    ):
        step_terms.length_by_position([0.8, 0.7], [1, 3])


def _shape(number: float, drafted: float) -> StepShape:
    one = np.ones(1)
    return StepShape(number * one, drafted * one, drafted * one, 1000 * one)


COEFFICIENTS = st.fixed_dictionaries({
    name: st.floats(1e-6, 1e-2) for name in ("weights", "experts", "step", "sequence", "token", "draft_pass", "round")
} | {"ridge_tokens": st.floats(50, 500), "expert_correlation": SHARES, "expert_skew": SHARES, "kv_position": st.floats(0, 1e-7)})


@given(COEFFICIENTS, st.integers(1, 512), st.integers(0, 8))
def test_a_step_takes_longer_with_more_sequences_and_longer_drafts(of: dict[str, float], number: int, drafted: int) -> None:
    table = {name: np.array([value]) for name, value in of.items()}
    experts = RoutedExperts(64, 4)

    def seconds(number: int, drafted: int) -> float:
        return float(step_terms.step_seconds(table, _shape(number, drafted), experts)[0])

    assert seconds(number + 1, drafted) > seconds(number, drafted)
    assert seconds(number, drafted + 1) > seconds(number, drafted)
    # Twice the sequences in one step take less than two steps: nothing in the law is worse than linear.
    assert seconds(2 * number, drafted) <= 2 * seconds(number, drafted) * (1 + 1e-9)


def _seconds(of: dict[str, float], number: float, drafted: float, experts: RoutedExperts | None = None) -> float:
    table = {"draft_pass": 0.0} | of
    arrays = {name: np.array([value]) for name, value in table.items()}
    return float(step_terms.step_seconds(arrays, _shape(number, drafted), experts)[0])


def test_terms_count_sequences_tokens_passes_and_positions() -> None:
    base = {"weights": 0.0, "ridge_tokens": 1.0}
    assert _seconds(base | {"sequence": 1.0}, 5, 2) == 5
    assert _seconds(base | {"token": 1.0}, 5, 2) == 15
    assert _seconds(base | {"kv_position": 1.0}, 5, 2) == 5000  # contexts of 1000 positions
    assert _seconds(base | {"draft_pass": 1.0}, 5, 2) == 2
    assert [_seconds(base | {"round": 1.0}, 5, drafted) for drafted in (0, 1, 3)] == [0, 1, 1]
    assert _seconds(base | {"step": 1.0}, 5, 2) == 1


def test_arithmetic_is_of_the_active_weights_only() -> None:
    of = {"weights": 1.0, "experts": 4.0, "ridge_tokens": 10.0, "expert_correlation": 0.0, "expert_skew": 0.0}
    # Far beyond the ridge only the arithmetic counts: 1 + 4 x 2 / 8 = 2 per 10 tokens; far below it, the weights and experts read.
    assert _seconds(of, 10_000, 0, RoutedExperts(8, 2)) == pytest.approx(2 * 1000, rel=1e-3)
    assert _seconds(of | {"ridge_tokens": 1e6}, 1, 0, RoutedExperts(8, 2)) == pytest.approx(1 + 4 * 2 / 8)


def test_trend_raises_the_logit_of_each_further_position() -> None:
    rate, trend = 0.6, 0.5
    second = 1 / (1 + math.exp(-(math.log(rate / (1 - rate)) + trend)))
    assert float(step_terms.acceptance_length(rate, trend, 2)) == pytest.approx(1 + rate + rate * second)


def test_a_step_is_not_faster_than_its_memory_allows() -> None:
    at = StepShape(np.ones(1), np.zeros(1), np.zeros(1), np.zeros(1), bound=np.array([0.02]))
    of = {name: np.array([1e-3]) for name in ("weights", "step", "draft_pass")} | {"ridge_tokens": np.array([300.0])}
    assert step_terms.step_seconds(of, at, None).tolist() == [0.02]


def test_every_prior_says_what_it_is_and_why() -> None:
    for name, prior in PRIORS.items():
        assert prior.meaning, name
        assert prior.why, name
        assert prior.sd > 0, name
        assert prior.unit in ("s", "-", "tokens"), name
        assert math.isfinite(prior.median), name
