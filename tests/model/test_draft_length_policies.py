"""Policies of draft lengths: by hand, at their limits, and over many tokens."""

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.methods.adaptive import theory as adaptive
from model.methods.adaptive.algorithm import Parameters
from model.methods.adaptive.draft_length_policies import (
    Constant,
    Gradient,
    Heuristic,
    MeasuredOptimum,
    Optimum,
    Policy,
    gradient,
    thresholds,
)
from model.methods.rounds.prices_of_rounds import RoundPrices, round_prices
from model.methods.rounds.round_walks import fixed, varying
from model.methods.speculative.dependent_acceptance import expected_tokens_random_length
from model.methods.speculative.theory import expected_tokens, optimal_draft_length, speedup
from model.outcomes.outcome_laws import Iid, TwoClass
from tests.support.adaptive_lengths import ONLINE_POLICIES, outcomes_of_rows, parameters_of, round_speed

# --- Policies -----------------------------------------------------------------------------------------------------------


def lengths(policy: Policy, rounds: list[tuple[int, int]]) -> list[int]:
    """Draft lengths after each of these rounds (accepted, drafted)."""
    found = []
    for accepted, drafted in rounds:
        policy.learn(np.array([0]), np.array([accepted]), np.array([drafted]))
        found.append(int(policy.length[0]))
    return found


def test_heuristic_by_hand() -> None:
    assert lengths(Heuristic(1, 6, 1), [(1, 1), (3, 3), (5, 5), (6, 6), (5, 6), (0, 5), (3, 4)]) == [3, 5, 6, 6, 5, 4, 3]
    assert lengths(Heuristic(2, 6, 1), [(0, 2), (0, 1), (0, 1), (1, 1)]) == [1, 1, 1, 3]


def test_estimates_by_hand() -> None:
    rounds = [(2, 5), (5, 5), (0, 5)]
    for estimator, tried in (("tested", [2 + 3, 2 + 8, 2 + 9]), ("drafted", [7, 12, 17])):
        policy = Optimum(5, (1, 20), 0.1, estimator, (1.0, 2.0), 1)
        for (accepted, drafted), good, all_ in zip(rounds, (3, 8, 8), tried, strict=True):
            policy.learn(np.array([0]), np.array([accepted]), np.array([drafted]))
            assert policy.estimate(np.array([0])).tolist() == [good / all_]
            assert policy.length.tolist() == [max(int(optimal_draft_length(good / all_, 0.1)), 1)]


@given(st.lists(st.integers(1, 8), min_size=7, max_size=7), st.integers(0, 2), st.integers(0, 20), st.integers(0, 9))
def test_measured_policy_takes_the_best_length_for_the_estimate(
    steps: list[int], shortest: int, accepted: int, rejected: int
) -> None:
    widths = np.concatenate([[1.0], np.array(steps) / 4])  # not monotone, like measured tables
    policy = MeasuredOptimum(3, (shortest, 7), 0.125, "tested", (1.0, 2.0), widths, 1)
    for drafts in [*[(1, 1)] * accepted, *[(0, 1)] * rejected]:
        policy.learn(np.array([0]), np.array([drafts[0]]), np.array([drafts[1]]))
    rate = Fraction(1 + accepted, 2 + accepted + rejected)
    assume(accepted + rejected > 0)
    speeds = [sum(rate**j for j in range(g + 1)) / (Fraction(widths[g]) + Fraction(g, 8)) for g in range(8)]
    chosen = int(policy.length[0])
    assert chosen >= shortest
    assert speeds[chosen] >= max(speeds[shortest:]) * (1 - Fraction(1, 10**14))


def test_measured_policy_treats_decodings_separately() -> None:
    many = MeasuredOptimum(3, (0, 7), 0.125, "tested", (1.0, 2.0), np.linspace(1.0, 2.0, 8), 3)
    rounds = [(0, 5), (3, 3), (5, 5)]
    many.learn(np.arange(3), *(np.array(column) for column in zip(*rounds, strict=True)))
    for index, each in enumerate(rounds):
        single = MeasuredOptimum(3, (0, 7), 0.125, "tested", (1.0, 2.0), np.linspace(1.0, 2.0, 8), 1)
        assert lengths(single, [each]) == [many.length[index]]
    assert len(set(many.length.tolist())) > 1


def test_optimum_uses_the_verify_cost_of_the_scenario() -> None:
    steep = UnitCost(4, cost_ratio=0.1, verify_cost=((1, 1.0), (2, 1.1), (3, 5.0), (40, 50.0)))
    told = parameters_of("optimum", max_draft_length=30, believed_cost_ratio=None).with_costs(steep)
    policy, free = told.initial_policy(1), parameters_of("optimum", max_draft_length=30, believed_cost_ratio=0.1).initial_policy(1)
    assert isinstance(policy, MeasuredOptimum)
    for each in (policy, free):
        each.learn(np.array([0]), np.array([9]), np.array([9]))
    assert (policy.length.tolist(), free.length.tolist()) == ([1], [int(optimal_draft_length(10 / 11, 0.1))])
    other = parameters_of("optimum", believed_cost_ratio=0.3, believed_verify_cost=((1, 1.0), (30, 1.0)))
    assert other.with_costs(steep) is other
    assert parameters_of("gradient", believed_cost_ratio=0.3).with_costs(steep).believed_verify_cost is None
    for policy_name in ("gradient", "heuristic", "confidence"):
        with pytest.raises(ParameterError, match="believed_verify_cost is not used by policy"):
            parameters_of(policy_name, believed_verify_cost=((1, 1.0), (30, 1.0)))
    with pytest.raises(ParameterError, match="must reach width 21, that of max_draft_length=20, got 20"):
        parameters_of("optimum", max_draft_length=20, believed_verify_cost=((1, 1.0), (20, 1.0)))


@given(st.floats(0, 1), st.floats(1e-3, 1.2), st.integers(1, 40))
def test_thresholds_give_the_best_whole_length(rate: float, ratio: float, longest: int) -> None:
    found = thresholds(ratio, longest)
    assert np.all(np.diff(found) >= 0)
    assert found[0] == pytest.approx(min(ratio, 1), abs=1e-15)
    near = np.abs(found - rate) < 1e-9
    best = int(np.searchsorted(found, rate))
    speeds = [float(speedup(rate, gamma, ratio)) for gamma in range(longest + 1)]
    if not near.any():
        assert best == int(np.argmax(np.round(speeds, 14)))
    assert speeds[best] == pytest.approx(max(speeds), rel=1e-8)


def test_free_drafts_are_longest_and_expensive_ones_empty() -> None:
    assert thresholds(0, 5).tolist() == [0] * 5
    assert thresholds(1.5, 3).tolist() == [1, 1, 1]
    with pytest.raises(ParameterError, match="longest must be at least 0, got -1"):
        thresholds(0.1, -1)
    with pytest.raises(ParameterError, match="cost_ratio must be"):
        thresholds(-0.1, 1)


@given(st.floats(0.02, 0.98), st.floats(0, 20), st.floats(0, 2))
def test_gradient_is_the_derivative_of_the_speedup(rate: float, length: float, ratio: float) -> None:
    def speed(gamma: float) -> float:
        return float((1 - rate ** (gamma + 1)) / ((1 - rate) * (gamma * ratio + 1)))

    step = 1e-5
    difference = (speed(length + step) - speed(length - step)) / (2 * step)
    assert float(gradient(rate, length, ratio)) == pytest.approx(difference, abs=1e-7)


@given(st.floats(0, 20), st.floats(0, 2))
def test_gradient_approaches_its_limits(length: float, ratio: float) -> None:
    assert float(gradient(1, length, ratio)) == pytest.approx((1 - ratio) / (length * ratio + 1) ** 2, abs=1e-15)
    assert float(gradient(1 - 1e-12, length, ratio)) == pytest.approx(float(gradient(1, length, ratio)), abs=1e-9)
    assert float(gradient(0, length, ratio)) == pytest.approx(-ratio / (length * ratio + 1) ** 2, abs=1e-15)
    if length >= 0.05:
        assert float(gradient(1e-300, length, ratio)) == pytest.approx(float(gradient(0, length, ratio)), abs=1e-9)


def test_limits_of_the_gradient_hold_for_any_length() -> None:
    found = gradient([0, 1], 1e4, 0.1)
    assert found.tolist() == pytest.approx([-0.1 / 1001**2, 0.9 / 1001**2], rel=1e-12)


HEURISTIC = parameters_of("heuristic")
LENGTHS = [0.0, 0.5, 0.5]


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda: gradient(1.1, 2, 0.1), "acceptance_rate must be between 0 and 1, got 1.1"),
        (lambda: gradient(-0.1, 2, 0.1), "acceptance_rate must be between 0 and 1, got -0.1"),
        (lambda: gradient(0.5, -0.5, 0.1), "draft_length must be at least 0, got -0.5"),
        (lambda: gradient(0.5, 2, -0.1), "cost_ratio must be at least 0, got -0.1"),
        (lambda: thresholds(-0.1, 2), "cost_ratio must be at least 0, got -0.1"),
        (lambda: adaptive.heuristic_lengths(1.1, 2), "acceptance_rate must be between 0 and 1, got 1.1"),
        (lambda: adaptive.heuristic_lengths(-0.1, 2), "acceptance_rate must be between 0 and 1, got -0.1"),
        (lambda: adaptive.heuristic_lengths(0.5, 0), "longest must be at least 1, got 0"),
        (lambda: adaptive.speedup_of_lengths(0.5, LENGTHS, -0.1), "cost_ratio must be at least 0, got -0.1"),
        (lambda: adaptive.speedup_of_lengths(0.5, [0.5, 0.4], 0.1), "length_pmf must sum to 1, got 0.9"),
        (lambda: adaptive.biased_lengths(1.1, 0.1, 2), "acceptance_rate must be between 0 and 1, got 1.1"),
        (lambda: adaptive.biased_lengths(-0.1, 0.1, 2), "acceptance_rate must be between 0 and 1, got -0.1"),
        (lambda: adaptive.biased_lengths(0.5, 0.1, 0), "longest must be at least 1, got 0"),
        (lambda: adaptive.predict(HEURISTIC, 0, Iid(0.5), UnitCost(4)), "tokens must be between 1 and 1000000, got 0"),
        (lambda: adaptive.predict(HEURISTIC, 10**6 + 1, Iid(0.5), UnitCost(4)), "tokens must be between 1 and 1000000"),
    ],
)
def test_invalid_arguments_of_the_closed_forms_are_refused(ask: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError) as found:
        ask()
    assert message in str(found.value)


def test_limits_of_the_ranges_are_accepted() -> None:
    assert adaptive.heuristic_lengths(0, 1).tolist() == [0, 1]
    assert adaptive.biased_lengths(0, 0, 1).tolist() == adaptive.biased_lengths(1, 0, 1).tolist() == [0, 1]
    assert adaptive.biased_lengths(1, 0, 4).tolist() == [0, 0, 0, 0, 1]
    assert adaptive.biased_lengths(0, 0, 4).tolist() == [0, 1, 0, 0, 0]
    assert float(adaptive.speedup_of_lengths(0.5, LENGTHS, 0)) == (1.5 + 1.75) / 2
    assert thresholds(0.1, 0).tolist() == []
    assert float(gradient(0.5, 0, 0)) == pytest.approx(math.log(2))
    Parameters(4, "gradient", 250, draft_length=250, min_draft_length=250, step=0.0, believed_cost_ratio=0.0)
    Parameters(4, "gradient", 1, prior_accepted=0.0, prior_tested=0.5)
    Parameters(4, "optimum", 1, prior_accepted=2.0)
    Parameters(4, "confidence", confidence_threshold=1.0)


def test_the_gradient_may_be_positive_although_no_whole_draft_helps() -> None:
    rate = 0.5
    edge = -rate * math.log(rate) / (1 - rate)
    assert float(gradient(rate, 0, edge - 1e-6)) > 0 > float(gradient(rate, 0, edge + 1e-6))
    assert int(optimal_draft_length(rate, edge - 1e-6)) == 0
    shape = gradient(np.array([[0.2], [0.4]]), np.array([1, 2, 3]), 0.1)
    assert shape.shape == (2, 3)
    assert shape[1, 2] == float(gradient(0.4, 3, 0.1))


def test_gradient_ascent_by_hand() -> None:
    policy = Gradient(5, (1, 20), 0.2, "tested", (1.0, 2.0), 10.0, 1)
    expected = 5 + 10 * float(gradient(1 / 3, 5, 0.2))
    assert 4 < expected < 5
    assert lengths(policy, [(0, 5)]) == [4 if round_speed(1 / 3, 4) > round_speed(1 / 3, 5) else 5]
    assert policy.place[0] == expected
    still = Gradient(5, (1, 20), 0.2, "tested", (1.0, 2.0), 0.0, 1)
    assert lengths(still, [(0, 5), (5, 5)]) == [5, 5]
    # Between 2 and 3 it drafts 3 if alpha is above the threshold of a third token.
    for accepted, chosen in ((2, 3), (0, 2)):
        between = Gradient(2, (1, 20), 0.2, "tested", (30.0, 60.0), 0.0, 1)
        between.place[0] = 2.5
        between.accepted[0] = 55.0 if accepted else 20.0
        assert lengths(between, [(accepted, 2)]) == [chosen]
    up = Gradient(5, (1, 6), 0.01, "tested", (99.0, 100.0), 1e9, 1)
    assert lengths(up, [(5, 5), (6, 6)]) == [6, 6]
    down = Gradient(5, (0, 6), 0.9, "tested", (1.0, 100.0), 1e9, 1)
    assert lengths(down, [(0, 5), (0, 0)]) == [0, 0]


def test_policies_without_choice_are_fixed_drafts() -> None:
    rng = np.random.default_rng(3)
    accept = rng.random((30, 50)) < 0.7
    prices = round_prices(UnitCost(1, cost_ratio=0.25, operations_ratio=0.5), 4)
    whole = fixed(4, 31, outcomes_of_rows(accept), prices, 50)
    optimum = Optimum(4, (4, 4), 0.2, "tested", (1.0, 2.0), 50)
    ascent = Gradient(4, (4, 4), 0.2, "drafted", (1.0, 2.0), 9.0, 50)
    for policy in (Constant(4, 50), optimum, ascent):
        found = varying(policy, 31, outcomes_of_rows(accept), prices)
        for one, other in zip(whole, found, strict=True):
            assert one.tolist() == other.tolist()


# --- Many tokens --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("longest", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("rate", [0.0, 0.3, 0.7, 0.97, 1 - 1e-13, 1.0])
def test_lengths_of_the_heuristic_are_stationary(rate: float, longest: int) -> None:
    shares = adaptive.heuristic_lengths(rate, longest)
    after = np.zeros(longest + 1)
    for gamma in range(1, longest + 1):
        after[min(gamma + 2, longest)] += shares[gamma] * rate**gamma
        after[max(gamma - 1, 1)] += shares[gamma] * (1 - rate**gamma)
    assert after.tolist() == pytest.approx(shares.tolist(), abs=1e-13)
    assert float(shares.sum()) == pytest.approx(1)
    assert shares[0] == 0
    if rate == 1:
        assert shares[longest] == 1


def test_lengths_of_the_heuristic_broadcast() -> None:
    rates = np.array([[0.2, 1.0], [0.5, 0.9]])
    shares = adaptive.heuristic_lengths(rates, 9)
    for where in np.ndindex(2, 2):
        assert shares[where].tolist() == adaptive.heuristic_lengths(rates[where], 9).tolist()


def test_loss_of_the_heuristic() -> None:
    """Compared with the best fixed length at c = .1; 1.8907 instead of 1.981 at alpha = .7."""
    losses = []
    for rate in (0.5, 0.7, 0.8, 0.9):
        own = float(adaptive.speedup_of_lengths(rate, adaptive.heuristic_lengths(rate, 60), 0.1))
        best = float(speedup(rate, optimal_draft_length(rate, 0.1), 0.1))
        losses.append(100 * (1 - own / best))
        if rate == 0.7:
            assert (round(own, 4), round(best, 3)) == (1.8907, 1.981)
    assert 2.45 < min(losses) < max(losses) < 4.55


@pytest.mark.parametrize("rate", [0.3, 0.7, 0.9])
def test_long_decodings_approach_the_stationary_distribution(rate: float) -> None:
    """The increase per token equals the long-run cost per token."""
    prices = round_prices(UnitCost(1, cost_ratio=0.1), 9)
    long, longer = (adaptive.heuristic_moments(5, 9, tokens, Iid(rate), prices).time for tokens in (600, 601))
    speed = adaptive.speedup_of_lengths(rate, adaptive.heuristic_lengths(rate, 9), 0.1)
    assert 1 / (longer - long) == pytest.approx(float(speed), rel=1e-6)


@pytest.mark.parametrize("low", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("rate", [0.0, 0.6, 0.95])
def test_an_uninformative_stop_is_a_random_length(low: float, rate: float) -> None:
    """E[N] = (1 - alpha E alpha^D)/(1 - alpha) and E[D], exactly; also in sampled rounds."""
    flat = np.ones(8)
    law, doubt = Iid(rate), TwoClass(low, low)
    long, longer = (adaptive.confidence_moments(7, tokens, law, doubt, RoundPrices(flat, flat, flat)) for tokens in (500, 501))
    shares = np.array([0, *(low * (1 - low) ** place for place in range(6)), (1 - low) ** 6])
    assert float(shares.sum()) == pytest.approx(1)
    tokens = float(expected_tokens_random_length(rate, shares))
    if rate < 1:
        power = float((shares * rate ** np.arange(8.0)).sum())
        assert tokens == pytest.approx((1 - rate * power) / (1 - rate))
    assert 1 / (longer.rounds - long.rounds) == pytest.approx(tokens, rel=1e-6)
    assert longer.drafted - long.drafted == pytest.approx(float(shares @ np.arange(8)) / tokens, rel=1e-5)


def test_informative_stops_are_better_than_uninformative_ones() -> None:
    prices = round_prices(UnitCost(1, cost_ratio=0.2), 9)
    times = [adaptive.confidence_moments(9, 100, Iid(0.7), TwoClass(*low), prices).time for low in ((0, 1), (0.1, 0.6), (0.3, 0.3))]
    assert times == sorted(times)


@pytest.mark.parametrize(
    ("rate", "ratio", "own", "best", "loss"),
    [(0.88, 0.117, 4, 8, 8.9), (0.88, 0.0555, 5, 11, 13.9), (0.95, 0.117, 6, 14, 12.9), (0.95, 0.0555, 8, 20, 18.1)],
)
def test_the_biased_estimate_settles_at_a_shorter_draft(rate: float, ratio: float, own: int, best: int, loss: float) -> None:
    shares = adaptive.biased_lengths(rate, ratio, 30)
    assert (shares[own], float(shares.sum()), int(optimal_draft_length(rate, ratio))) == (1, 1, best)
    speed = float(adaptive.speedup_of_lengths(rate, shares, ratio))
    assert round(100 * (1 - speed / float(speedup(rate, best, ratio))), 1) == loss


@given(st.floats(0.05, 1), st.floats(0.01, 1.1), st.integers(1, 12))
def test_the_biased_estimate_is_a_fixed_point(rate: float, ratio: float, longest: int) -> None:
    shares = adaptive.biased_lengths(rate, ratio, longest)
    used = np.flatnonzero(shares).tolist()
    accepted = sum(shares[gamma] * (float(expected_tokens(rate, gamma)) - 1) for gamma in used)
    estimate = accepted / sum(shares[gamma] * gamma for gamma in used)
    assert float(shares.sum()) == pytest.approx(1)
    assert shares[0] == 0
    edges = thresholds(ratio, longest)
    if len(used) == 1:  # best for its own estimate
        gamma = used[0]
        assert gamma == 1 or estimate > edges[gamma - 1] - 1e-12
        assert gamma == longest or estimate <= edges[gamma] + 1e-12
    else:  # at this estimate the two lengths are equally good
        assert used[1] == used[0] + 1
        assert estimate == pytest.approx(edges[used[0]], abs=1e-12)


@pytest.mark.parametrize(("estimator", "expected"), [("tested", 8), ("drafted", 4)])
def test_policies_converge_to_the_predicted_lengths(estimator: str, expected: int) -> None:
    """At alpha = .88, c = .117: every path of a long decoding ends within one token of it."""
    accept = np.random.default_rng(5).random((6000, 12)) < 0.88
    prices = round_prices(UnitCost(1, cost_ratio=0.117), 30)
    for policy in ONLINE_POLICIES:
        parameters = Parameters(1, policy, 30, believed_cost_ratio=0.117, estimator=estimator)
        running = parameters.initial_policy(12)
        varying(running, 6001, outcomes_of_rows(accept), prices)
        assert np.abs(running.length - expected).max() <= 1


def test_a_rate_at_the_threshold_is_shared_by_two_lengths() -> None:
    shares = adaptive.biased_lengths(0.8, 0.2, 20)
    assert np.count_nonzero(adaptive.biased_lengths(0.8, 0.05, 1)) == 1
    found = [np.count_nonzero(adaptive.biased_lengths(rate, 0.1, 20)) for rate in np.linspace(0.3, 0.95, 60)]
    assert {*found} == {1, 2}
    assert float(shares.sum()) == 1
