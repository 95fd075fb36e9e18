"""Speculative decoding in closed form: exact fractions, enumeration, recursions, published numbers, limits and errors."""

import itertools
import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.width_curve import as_curve
from model.methods.speculative import dependent_acceptance as laws
from model.methods.speculative import theory as sd
from model.methods.speculative.algorithm import Parameters
from model.outcomes.outcome_laws import Iid
from tests.support.exact import LENGTHS, RATES, close, mean, near, pmf, recursion

RATIOS = st.floats(0, 2)
EDGES = [0.0, 1e-300, 1e-12, 0.05, 0.3, 0.55, 0.79, 0.9, 0.999, 1 - 1e-6, 1 - 1e-9, 1 - 1e-12, 1 - 2**-53, 1.0]
CURVE = [(1, 10.0), (2, 10.5), (4, 11.0), (9, 17.0), (16, 40.0)]


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """Numpy warns of 0/0; limits must not be computed that way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# --- References: fractions and recursions, independent of the closed forms -------------------------------------------


def paths(alpha: Fraction, positions: int) -> Iterator[tuple[tuple[bool, ...], Fraction]]:
    for coins in itertools.product((False, True), repeat=positions):
        yield coins, alpha ** sum(coins) * (1 - alpha) ** (positions - sum(coins))


def yields(coins: tuple[bool, ...]) -> list[int]:
    """Tokens of a round with an endless draft from each position: the accepted tokens from there, and one more."""
    return [next((n for n, coin in enumerate(coins[start:]) if not coin), len(coins) - start) + 1 for start in range(len(coins))]


def exact_speed(alpha: Fraction, gamma: int, c: Fraction) -> Fraction:
    return mean(alpha, gamma) / (gamma * c + 1)


# --- Published numbers -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("alpha", "gamma", "c", "speed", "bound"),
    [
        (0.79, 3, 0.75 / 6.39, 2.1501, 2.907),
        (0.55, 7, 0.75 / 6.39, 1.2097, 2.204),
        (0.48, 3, 12.02 / 216.62, 1.5611, 1.821),
        (0.33, 7, 12.02 / 216.62, 1.0748, 1.492),
    ],
)
def test_theorem_3_8_at_the_published_settings(alpha: float, gamma: int, c: float, speed: float, bound: float) -> None:
    assert round(float(sd.speedup(alpha, gamma, c)), 4) == speed
    assert round(float(sd.speedup(alpha, gamma, 0)), 3) == bound
    assert close(sd.speedup(alpha, gamma, c), exact_speed(Fraction(alpha), gamma, Fraction(c)))


def test_finite_lengths_at_the_published_settings() -> None:
    assert round(float(sd.target_runs(128, 0.79, 3)), 3) == 44.446
    assert round(128 / float(sd.expected_tokens(0.79, 3)), 3) == 44.030
    assert round(float(sd.target_runs(16, 0.55, 7)), 3) == 7.785
    assert round(float(sd.finite_speedup(8, 0.85, 7, 0.117)), 2) == 2.47
    assert round(float(sd.finite_speedup(128, 0.85, 7, 0.117)), 3) == 2.648
    assert round(float(sd.speedup(0.85, 7, 0.117)), 3) == 2.666
    # Among the first gamma + 1 tokens a round starts after each rejected token: R(m) = 1 + (m - 1) (1 - alpha).
    first = [1 + (m - 1) * (1 - Fraction(0.85)) for m in range(1, 9)]
    rounds, drafts = first[-1], sum(first[:-1])
    assert close(sd.target_runs(8, 0.85, 7), rounds)
    assert close(sd.finite_speedup(8, 0.85, 7, 0.117), 8 / (rounds + Fraction(0.117) * drafts))


def test_gain_of_an_oracle_over_the_best_fixed_length() -> None:
    """Section 3.5 of [Leviathan2023] says up to about 60 %; the supremum is e / (e - 1), for c to 0 and then alpha to 1."""

    def gain(alpha: float, c: float) -> float:
        return float(sd.oracle_speedup(alpha, c) / sd.speedup(alpha, sd.optimal_draft_length(alpha, c), c))

    assert round(gain(0.95, 0.05), 3) == 1.554
    gains = [gain(1 - 1e-6**part, 1e-6) for part in (0.2, 0.4, 0.5, 0.6)]
    assert all(each < np.e / (np.e - 1) for each in gains)
    assert abs(gain(1 - 1e-4, 1e-9) - 1) < np.e / (np.e - 1) - 1


# --- One round -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", EDGES)
@pytest.mark.parametrize("gamma", [0, 1, 2, 7, 60])
def test_eq_1_and_its_variance_to_the_last_digits(alpha: float, gamma: int) -> None:
    a, chances = Fraction(alpha), pmf(Fraction(alpha), gamma)
    first = sum((n * chance for n, chance in enumerate(chances, 1)), Fraction(0))
    second = sum((n * n * chance for n, chance in enumerate(chances, 1)), Fraction(0))
    assert first == mean(a, gamma)
    assert close(sd.expected_tokens(alpha, gamma), first)
    assert close(sd.tokens_variance(alpha, gamma), second - first**2)
    assert all(close(got, exact) for got, exact in zip(sd.tokens_pmf(alpha, gamma), chances, strict=True))


@given(RATES, LENGTHS, st.floats(0, 1))
def test_distribution_of_a_round_and_its_generating_function(alpha: float, gamma: int, z: float) -> None:
    mass, values = sd.tokens_pmf(alpha, gamma), np.arange(1.0, gamma + 2)
    assert abs(mass.sum() - 1) < 1e-14
    assert near(mass @ values, sd.expected_tokens(alpha, gamma), rtol=1e-13)
    # f(z) = 1 + (z - 1) (1 - (alpha z)^G) / (1 - alpha z)
    series = sum((alpha * z) ** j for j in range(gamma + 1))
    assert near(mass @ z**values, 1 + (z - 1) * series, rtol=0, atol=1e-14)


@given(RATES)
def test_a_round_without_a_draft_gives_exactly_one_token(alpha: float) -> None:
    """Without rounding: a speed-up of exactly 1 is the reference of comparisons."""
    assert float(sd.expected_tokens(alpha, 0)) == 1
    assert float(sd.speedup(alpha, 0, 0.3)) == 1
    assert float(sd.operations_factor(alpha, 0, 0.3)) == 1
    assert float(sd.tokens_variance(alpha, 0)) == 0
    assert sd.tokens_pmf(alpha, 0).tolist() == [1]
    assert close(sd.target_runs(9, alpha, 0), Fraction(9))
    assert float(sd.draft_runs(9, alpha, 0)) == 0
    assert float(sd.drafted_from_acceptance(alpha, 1)) == alpha


@given(RATES, LENGTHS)
def test_more_acceptance_or_longer_drafts_give_more_tokens(alpha: float, gamma: int) -> None:
    value = float(sd.expected_tokens(alpha, gamma))
    assert 1 <= value <= gamma + 1
    assert value <= float(sd.expected_tokens(alpha, gamma + 1)) * (1 + 1e-15)
    assert value <= float(sd.expected_tokens(min(1, alpha + 0.01), gamma)) * (1 + 1e-15)


# --- Theorems 3.8 and 3.11 -------------------------------------------------------------------------------------------


@given(RATES, LENGTHS, RATIOS)
def test_speedup_and_operations_equal_the_theorems(alpha: float, gamma: int, c: float) -> None:
    a, ratio = Fraction(alpha), Fraction(c)
    assert close(sd.speedup(alpha, gamma, c), exact_speed(a, gamma, ratio))
    operations = sd.operations_factor(alpha, gamma, c)
    assert close(operations, (gamma * ratio + gamma + 1) / mean(a, gamma))
    assert operations >= 1 - 1e-15


@given(LENGTHS, RATIOS)
def test_limits_of_the_speedup(gamma: int, c: float) -> None:
    assert float(sd.speedup(1, gamma, c)) == (gamma + 1) / (gamma * c + 1)
    assert float(sd.speedup(0, gamma, c)) == 1 / (gamma * c + 1)
    assert float(sd.speedup(0.7, 0, c)) == 1
    assert near(sd.speedup(1 - 1e-13, gamma, c), sd.speedup(1, gamma, c), rtol=1e-11)


BOTH = st.tuples(st.floats(0, 1), st.floats(0, 1)) | st.floats(1e-9, 1 - 1e-9).flatmap(
    lambda c: st.sampled_from([(c, c), (np.nextafter(c, 1), c), (np.nextafter(c, 0), c)])
)
"""Acceptance rate and cost ratio, also equal or adjacent values."""


@given(BOTH)
def test_some_draft_is_faster_exactly_if_alpha_exceeds_c(both: tuple[float, float]) -> None:
    """Corollary 3.9 with its converse, and its smallest gain, (1 + alpha) / (1 + c)."""
    alpha, c = map(float, both)
    best = int(sd.optimal_draft_length(alpha, c, longest=64))
    speed = exact_speed(Fraction(alpha), best, Fraction(c))
    assert (best >= 1) == (alpha > c)
    assert (speed > 1) == (alpha > c)
    if alpha > c:
        assert speed >= (1 + Fraction(alpha)) / (1 + Fraction(c)) * (1 - Fraction(1, 10**13))


@given(st.floats(0.001, 0.97), st.floats(0.005, 1.2))
def test_closed_form_optimum_is_the_best_of_all_lengths(alpha: float, c: float) -> None:
    a, ratio = Fraction(alpha).limit_denominator(10**4), Fraction(c).limit_denominator(10**4)
    speeds = [exact_speed(a, gamma, ratio) for gamma in range(80)]
    rises = [after > before for before, after in itertools.pairwise(speeds)]
    assert rises == sorted(rises, reverse=True)  # first up, then down: a single maximum
    best = int(sd.optimal_draft_length(float(a), float(ratio)))
    assert close(speeds[best], max(speeds), 1e-14)
    # Speeds that differ by more than rounding have a unique best length.
    runner_up = max(speed for gamma, speed in enumerate(speeds) if gamma != best)
    assert speeds[best] > runner_up * (1 - Fraction(1, 10**13))


def test_optimum_on_grids_and_near_its_limits() -> None:
    alpha, c = np.linspace(0.01, 0.99, 99), np.linspace(0.01, 1.1, 110)[:, None]
    every = np.arange(400)[:, None, None]
    speeds = sd.speedup(alpha, every, c)
    best = sd.optimal_draft_length(alpha, c)
    assert best.dtype == np.int64
    chosen = np.take_along_axis(speeds, best[None], axis=0)[0]
    assert np.all(chosen >= speeds.max(axis=0) * (1 - 1e-14))
    # A limit below the optimum is itself the best length, because the speed-up rises up to the optimum. At alpha = c, S(1) = S(0)
    # = 1 up to rounding, so the speeds are compared.
    capped = sd.optimal_draft_length(alpha, c, longest=5)
    assert np.array_equal(capped, np.minimum(best, 5))
    assert np.all(np.take_along_axis(speeds, capped[None], axis=0)[0] >= speeds[:6].max(axis=0) * (1 - 1e-14))
    for rate, ratio in ((1 - 1e-9, 1e-6), (1 - 1e-6, 0.9), (1e-300, 1e-301), (0.5, 1e-290), (1 - 2**-53, 0.5)):
        gamma = int(sd.optimal_draft_length(rate, ratio))
        around = [float(sd.speedup(rate, max(near, 0), ratio)) for near in range(gamma - 3, gamma + 4)]
        assert float(sd.speedup(rate, gamma, ratio)) >= max(around) * (1 - 1e-14)
        assert float(sd.speedup(rate, gamma, ratio)) >= float(sd.speedup(rate, 2 * gamma + 1, ratio)) * (1 - 1e-14)


def test_ties_go_to_the_shorter_length() -> None:
    for rate in (0.25, 0.5, 0.75, 0.3):
        assert int(sd.optimal_draft_length(rate, rate)) == 0  # S(1) = (1 + alpha) / (1 + c) = 1 = S(0)
    assert int(sd.optimal_draft_length(0, 0)) == 0
    assert int(sd.optimal_draft_length(1, 1)) == 0
    flat = [(1, 1.0), (2, 1.5), (3, 1.75)]
    assert [float(sd.speedup(0.5, gamma, 0, verify_cost=flat)) for gamma in range(3)] == [1, 1, 1]
    assert int(sd.optimal_draft_length(0.5, 0, verify_cost=flat)) == 0


@given(RATES, LENGTHS, st.floats(0, 2))
def test_no_fixed_length_exceeds_the_oracle_bound(alpha: float, gamma: int, c: float) -> None:
    a, ratio = Fraction(alpha), min(Fraction(c), Fraction(1))
    bound = sd.oracle_speedup(alpha, c)
    if alpha < 1 or c > 0:
        assert close(bound, 1 / (1 - a + ratio * a))
    assert sd.speedup(alpha, gamma, c) <= bound * (1 + 1e-14)


def test_cases_that_reach_the_oracle_bound() -> None:
    assert float(sd.oracle_speedup(0.8, 1)) == float(sd.speedup(0.8, 0, 1)) == 1
    assert near(sd.oracle_speedup(0.8, 0), sd.speedup(0.8, 500, 0), rtol=1e-14)
    assert float(sd.oracle_speedup(1, 0)) == np.inf


def test_an_adaptive_policy_stays_below_the_oracle() -> None:
    """A policy that knows all outcomes drafts exactly the accepted tokens and reaches the bound, by enumeration."""
    alpha, c, positions = Fraction(4, 5), Fraction(1, 10), 10
    total = Fraction(0)
    for coins, chance in paths(alpha, positions):
        rounds = positions - sum(coins)  # a round ends at each rejection; all drafts are accepted
        total += chance * (rounds + c * sum(coins))
    assert close(sd.oracle_speedup(float(alpha), float(c)), positions / total, 1e-14)


# --- A given number of tokens ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("alpha", EDGES)
@pytest.mark.parametrize("gamma", [0, 1, 3, 7])
def test_finite_lengths_equal_the_recursion(alpha: float, gamma: int) -> None:
    a, c = Fraction(alpha), Fraction(1, 8)
    curve = {width: Fraction(float(as_curve(CURVE).relative(width))) for width in range(1, 9)}
    for n in (1, 2, gamma, gamma + 1, gamma + 2, 3 * gamma + 2, 25):
        if n < 1:
            continue
        runs, drafts = recursion(a, gamma, n, lambda _: Fraction(1)), recursion(a, gamma, n, Fraction)
        assert close(sd.target_runs(n, alpha, gamma), runs)
        assert close(sd.draft_runs(n, alpha, gamma), drafts)
        assert close(sd.finite_speedup(n, alpha, gamma, float(c)), n / (runs + c * drafts))
        priced = recursion(a, gamma, n, lambda drafted: c * drafted + curve[drafted + 1])
        assert close(sd.finite_speedup(n, alpha, gamma, float(c), verify_cost=CURVE), n / priced)
        assert near(sd.renewal_density(n, alpha, gamma).sum(), float(runs), rtol=1e-13)


@pytest.mark.parametrize("gamma", [0, 1, 2, 3, 9])
def test_every_path_of_a_short_decoding(gamma: int) -> None:
    """Accepted tokens and rounds sum to the tokens on every path, without overshoot; means are R and D, also of a replayed log."""
    alpha, n = Fraction(3, 5), 8
    rounds, drafts, replayed, uncut = Fraction(0), Fraction(0), Fraction(0), Fraction(0)
    starts = [Fraction(0)] * n
    for coins, chance in paths(alpha, n):
        at = accepted = count = 0
        while at < n:
            drafted = min(gamma, n - at - 1)
            matches = next((j for j in range(drafted) if not coins[at + j]), drafted)
            starts[at] += chance
            drafts += chance * drafted
            at, accepted, count = at + matches + 1, accepted + matches, count + 1
        assert at == accepted + count == n
        rounds += chance * count
        # Uncut drafts run past the end, which does not change the number of rounds.
        long = tuple(coins) + (True,) * gamma
        at = 0
        while at < n:
            at += next((j for j in range(gamma) if not long[at + j]), gamma) + 1
            uncut += chance
        replayed += chance * laws.tokens_of_rounds(yields(coins), gamma)[0]
    assert rounds == replayed == uncut
    assert close(sd.target_runs(n, 0.6, gamma), rounds, 1e-12)
    assert close(sd.draft_runs(n, 0.6, gamma), drafts, 1e-12)
    assert near(sd.renewal_density(n, 0.6, gamma), [float(u) for u in starts], rtol=1e-13)


@given(RATES, LENGTHS, st.integers(1, 300), st.integers(1, 300))
def test_bounds_of_the_target_runs(alpha: float, gamma: int, n: int, m: int) -> None:
    runs, slack = float(sd.target_runs(n, alpha, gamma)), 1 + 1e-13
    assert -(-n // (gamma + 1)) <= runs * slack
    assert runs <= n * slack
    assert n / float(sd.expected_tokens(alpha, gamma)) <= runs * slack
    assert float(sd.target_runs(n + m, alpha, gamma)) <= (runs + float(sd.target_runs(m, alpha, gamma))) * slack
    assert runs <= float(sd.target_runs(n + 1, alpha, gamma)) * slack
    assert float(sd.target_runs(n, alpha, gamma + 1)) <= runs * slack
    assert float(sd.target_runs(n, min(1, alpha + 0.01), gamma)) <= runs * slack
    assert float(sd.draft_runs(n, alpha, gamma)) <= gamma * runs * slack
    before = sum(float(sd.target_runs(n - j, alpha, gamma)) for j in range(1, gamma + 1) if n > j)
    assert near(sd.draft_runs(n, alpha, gamma), before, rtol=1e-13, atol=0)


@pytest.mark.parametrize(("alpha", "gamma"), [(0.1, 2), (0.55, 7), (0.79, 3), (0.95, 4)])
def test_long_decodings_approach_their_asymptote(alpha: float, gamma: int) -> None:
    mu, var = float(sd.expected_tokens(alpha, gamma)), float(sd.tokens_variance(alpha, gamma))
    excess = (var + mu * mu - mu) / (2 * mu * mu)
    assert abs(float(sd.target_runs(5000, alpha, gamma)) - 5000 / mu - excess) < 1e-9
    gap = [abs(float(sd.finite_speedup(n, alpha, gamma, 0.1) / sd.speedup(alpha, gamma, 0.1)) - 1) for n in (100, 10**4, 10**6)]
    assert gap[0] > gap[1] > gap[2]
    assert gap[2] < 1e-5


@pytest.mark.parametrize("alpha", [0.3, 0.999, 1 - 1e-9, 1 - 1e-12])
def test_a_million_tokens_lose_no_digits(alpha: float) -> None:
    """Compared with the sum over blocks, R = sum of a^i (1 + (1 - alpha) (l - 1 - i G)), all positive terms in longer floats."""
    n, gamma = 10**6, 7
    a, blocks = np.longdouble(alpha), np.arange((n - 1) // (gamma + 1) + 1, dtype=np.longdouble)
    terms = np.exp(blocks * (gamma + 1) * np.log(a)) * (1 + (1 - a) * (n - 1 - blocks * (gamma + 1)))
    assert near(sd.target_runs(n, alpha, gamma), float(terms.sum()), rtol=1e-13)
    assert near(sd.draft_runs(n, alpha, gamma), sd.target_runs(np.arange(n - gamma, n), alpha, gamma).sum(), rtol=1e-13)


def test_a_finite_decoding_may_be_faster_than_a_long_one() -> None:
    """S(l) <= max(1, S) does not hold: if the draft is too long for its cost, cutting it helps.

    For two tokens the first round drafts one: R = 2 - alpha, D = 1. At alpha = 1/2, c = 3/10 it takes 1.8, so S(2) = 10/9.
    """
    assert close(sd.finite_speedup(2, 0.5, 7, 0.3), 2 / (Fraction(3, 2) + Fraction(0.3)))
    assert float(sd.speedup(0.5, 7, 0.3)) < 1 < float(sd.finite_speedup(2, 0.5, 7, 0.3))
    # Also if drafting is faster in the long run: 2 / 1.95 and 1.11 / 1.1.
    assert 1 < float(sd.speedup(0.1, 2, 0.05)) < float(sd.finite_speedup(2, 0.1, 2, 0.05))


# --- A measured verify cost ------------------------------------------------------------------------------------------


def test_a_flat_curve_is_the_papers_cost_and_a_rising_one_costs_more() -> None:
    flat = [(width, 3.0) for width in range(1, 14)]
    alpha, gamma = np.linspace(0, 1, 11), np.arange(13)[:, None]
    assert np.array_equal(sd.speedup(alpha, gamma, 0.1, verify_cost=flat), sd.speedup(alpha, gamma, 0.1))
    assert near(
        sd.finite_speedup(50, alpha, gamma, 0.1, verify_cost=flat), sd.finite_speedup(50, alpha, gamma, 0.1), rtol=1e-13
    )
    assert np.all(sd.speedup(alpha, gamma[1:], 0.1, verify_cost=CURVE) < sd.speedup(alpha, gamma[1:], 0.1))
    best = sd.optimal_draft_length(alpha, 0.1, verify_cost=CURVE)
    every = sd.speedup(alpha, np.arange(16)[:, None], 0.1, verify_cost=CURVE)
    assert np.array_equal(best, every.argmax(axis=0))
    assert np.array_equal(sd.optimal_draft_length(alpha, 0.1, verify_cost=CURVE, longest=2), every[:3].argmax(axis=0))
    assert np.all(best <= np.minimum(sd.optimal_draft_length(alpha, 0.1, longest=15), 15))


def test_the_whole_curve_is_searched() -> None:
    """If passes of any width cost the same, the longest draft of the curve is the best."""
    assert int(sd.optimal_draft_length(0.9, 0.0, verify_cost=[(1, 1.0), (5, 1.0)])) == 4
    assert int(sd.optimal_draft_length(0.9, 0.0, verify_cost=[(1, 1.0)])) == 0


def test_widths_beyond_the_curve_are_refused() -> None:
    with pytest.raises(ParameterError, match=r"width must be at most 16, .* got 18"):
        sd.speedup(0.5, 17, 0.1, verify_cost=CURVE)
    with pytest.raises(ParameterError, match="width must be at most 16"):
        sd.optimal_draft_length(0.5, 0.1, verify_cost=CURVE, longest=16)


# --- Acceptance from distributions -----------------------------------------------------------------------------------


WEIGHTS = st.floats(0.001, 1)


@given(st.lists(st.tuples(WEIGHTS, WEIGHTS), min_size=1, max_size=6), st.floats(0.05, 1), st.floats(0.05, 1))
def test_acceptance_is_one_minus_total_variation(weights: list[tuple[float, float]], low: float, high: float) -> None:
    p, q = (np.array(column) / sum(column) for column in zip(*weights, strict=True))
    beta = float(sd.acceptance_rate(p, q))
    assert near(beta, 1 - np.abs(p - q).sum() / 2, rtol=1e-13)
    assert p @ q <= beta + 1e-12  # matching a sampled target token is less likely than acceptance
    # One step: q accepted with min(1, p/q), otherwise norm of (p - q)+, gives p; the residual has weight 1 - beta.
    out = q * np.minimum(1, p / q) + np.maximum(p - q, 0)
    assert near(out, p, rtol=1e-13)
    assert near(np.maximum(p - q, 0).sum(), 1 - beta, rtol=0, atol=1e-13)
    # Lenience: the drafted token is accepted with min(1, p / (l q)).
    low, high = min(low, high), max(low, high)
    lenient = float(sd.lenient_acceptance_rate(p, q, low))
    assert near(lenient, q @ np.minimum(1, p / (low * q)), rtol=1e-13)
    assert beta - 1e-12 <= float(sd.lenient_acceptance_rate(p, q, high)) <= lenient + 1e-12
    assert float(sd.lenient_acceptance_rate(p, q, 1)) == beta


def test_acceptance_of_many_contexts_at_once() -> None:
    p = np.random.default_rng(1).dirichlet(np.ones(5), size=(3, 4))
    q = np.random.default_rng(2).dirichlet(np.ones(5), size=(3, 4))
    rows = [[float(sd.acceptance_rate(p[i, j], q[i, j])) for j in range(4)] for i in range(3)]
    assert near(sd.acceptance_rate(p, q), rows, rtol=1e-15)
    assert float(sd.acceptance_rate([0.2, 0.8], [0.2, 0.8])) == 1
    assert float(sd.acceptance_rate([1, 0], [0, 1])) == 0


# --- Acceptance rates from figures of logs and engines ---------------------------------------------------------------


@given(RATES, st.integers(1, 40))
def test_the_inverses_recover_the_rate(alpha: float, gamma: int) -> None:
    share, length = sd.drafted_from_acceptance(alpha, gamma), sd.expected_tokens(alpha, gamma)
    assert close(share, sum((Fraction(alpha) ** j for j in range(1, gamma + 1)), Fraction(0)) / gamma)
    assert close(sd.acceptance_from_drafted(share, gamma), Fraction(alpha), 1e-12)
    assert near(sd.acceptance_from_length(length, gamma), alpha, rtol=0, atol=1e-14)


@given(st.floats(0, 1), st.sampled_from([1, 2, 3, 7, 8, 63, 1000]))
def test_inverse_and_forward_conversion_agree(share: float, gamma: int) -> None:
    alpha = float(sd.acceptance_from_drafted(share, gamma))
    assert 0 <= alpha <= 1
    # alpha is a float: its last digit changes the share by gamma times that amount.
    assert near(sd.drafted_from_acceptance(alpha, gamma), share, rtol=4e-16 * (gamma + 4), atol=0)


def test_inverses_are_exact_at_the_ends_and_broadcast() -> None:
    gamma = np.array([1, 2, 7, 100])
    assert sd.acceptance_from_drafted([[0], [1]], gamma).tolist() == [[0] * 4, [1] * 4]
    assert sd.acceptance_from_length(1, gamma).tolist() == [0] * 4
    assert sd.acceptance_from_length(gamma + 1, gamma).tolist() == [1] * 4
    assert sd.acceptance_from_drafted(0.37, 1) == 0.37
    assert sd.acceptance_from_drafted([], 3).shape == (0,)


@given(st.floats(0.01, 0.99), st.integers(1, 20))
def test_accepted_over_drafted_is_below_alpha_and_falls_with_length(alpha: float, gamma: int) -> None:
    assert float(sd.drafted_from_acceptance(alpha, gamma)) <= alpha
    assert float(sd.drafted_from_acceptance(alpha, gamma + 1)) < float(sd.drafted_from_acceptance(alpha, gamma))


def simulated(alpha: float, gamma: int, rounds: int) -> tuple[int, int]:
    """Accepted and tested tokens of simulated rounds."""
    coins = np.random.default_rng(7).random((rounds, gamma)) < alpha
    accepted = np.logical_and.accumulate(coins, axis=1).sum(axis=1)
    return int(accepted.sum()), int(np.minimum(accepted + 1, gamma).sum())


@pytest.mark.parametrize(("alpha", "gamma"), [(0.8, 3), (0.55, 7), (0.9, 1)])
def test_all_engines_give_the_same_rate_of_a_run(alpha: float, gamma: int) -> None:
    rounds = 200_000
    accepted, tested = simulated(alpha, gamma, rounds)
    share, emitted = accepted / (gamma * rounds), accepted + rounds
    printed: list[tuple[str, dict[str, Any]]] = [
        ("vllm", {"rate": share}), ("vllm", {"length": emitted / rounds}),
        ("vllm", {"rate": emitted / (rounds * (gamma + 1)), "field": "system-efficiency"}),
        ("sglang", {"rate": share, "field": "drafts"}), ("sglang", {"length": emitted / rounds}),
        ("sglang", {"rate": emitted / (rounds * (gamma + 1)), "field": "with-bonus"}),
        ("trtllm", {"rate": share}), ("trtllm", {"length": emitted / rounds}),
        ("trtllm", {"length": accepted / rounds, "field": "forced"}),
        ("transformers", {"rate": share}), ("transformers", {"length": emitted / rounds}),
        ("llama.cpp", {"rate": share}), ("llama.cpp", {"length": emitted / rounds}),
        ("mlx-lm", {"rate": accepted / emitted}), ("mlx", {"rate": accepted / emitted}),
    ]  # fmt: skip
    assert {engine for engine, _ in printed} >= {*sd.ENGINES} - {"alpha"}
    found = [sd.reported_acceptance(engine, gamma, **figure) for engine, figure in printed]
    assert np.ptp(found) < 1e-13
    error = np.sqrt(alpha * (1 - alpha) / tested)
    assert abs(float(found[0]) - alpha) < 5 * error
    # Accepted over tested is alpha itself; accepted over drafted is not.
    assert abs(float(sd.reported_acceptance("alpha", gamma, rate=accepted / tested)) - alpha) < 5 * error
    if gamma > 1:
        assert accepted / (gamma * rounds) < alpha - 50 * error


PRINTED = [
    ("vllm", 5, {"rate": 0.827, "length": 5.14}), ("vllm", 3, {"rate": 0.601, "length": 2.80}),
    ("vllm", 3, {"rate": 0.388, "length": 2.16}), ("vllm", 3, {"rate": 0.7347, "length": 3.20}),
    ("vllm", 4, {"rate": 0.510, "length": 2.55, "field": "system-efficiency"}),
    ("sglang", 3, {"rate": 0.49, "length": 1.95, "field": "with-bonus"}),
    ("sglang", 5, {"rate": 0.2930232558139535, "length": 2.4651162790697674, "field": "drafts"}),
    ("llama.cpp", 3, {"rate": 0.64479, "length": 2.92}),
]  # fmt: skip
"""Rates and lengths of lines that engines printed."""


@pytest.mark.parametrize(("engine", "gamma", "figures"), PRINTED)
def test_printed_rates_and_lengths_agree_and_the_length_is_used(engine: str, gamma: int, figures: dict[str, Any]) -> None:
    alpha = float(sd.reported_acceptance(engine, gamma, **figures))
    assert near(sum(alpha**j for j in range(gamma + 1)), figures["length"], rtol=1e-9)
    # More than the rounding of both figures, in either direction, or another draft length is refused.
    for other in ({"length": figures["length"] - 0.3}, {"length": figures["length"] + 0.3}, {"rate": figures["rate"] * 0.8}):
        if engine == "llama.cpp" and other.get("length", 9) < figures["length"]:
            continue  # drafts may be shorter than asked, so the length may be smaller
        if 1 <= other.get("length", 1) <= gamma + 1:
            with pytest.raises(ParameterError, match=r"do not agree at draft_length=.*means a length of .*a rate of .*rounding"):
                sd.reported_acceptance(engine, gamma, **{**figures, **other})
    with pytest.raises(ParameterError, match=r"do not agree at draft_length=|must be between"):
        sd.reported_acceptance(engine, gamma * 2, **figures)


@given(st.integers(1, 400), st.integers(1, 8), st.data())
def test_figures_rounded_as_printed_agree(rounds: int, gamma: int, data: st.DataObject) -> None:
    """Any counts, rounded to the engine's digits: per cent with one, a length with two."""
    accepted = data.draw(st.integers(0, gamma * rounds))
    rate, length = round(accepted / (gamma * rounds), 3), round(1 + accepted / rounds, 2)
    alpha = float(sd.reported_acceptance("vllm", gamma, rate=rate, length=length))
    assert near(alpha, float(sd.acceptance_from_length(length, gamma)), rtol=1e-12)


def test_llama_cpp_drafts_shorter_than_draft_length() -> None:
    """Its rate is over actually drafted tokens: with a length it gives their mean, and K must be the nearest whole number."""
    drafted = [2.51, 2.9, 3.0]
    for each in drafted:
        sd.reported_acceptance("llama.cpp", 3, rate=0.5, length=round(1 + 0.5 * each, 4))
    for each in (2.39, 3.06):
        with pytest.raises(ParameterError, match="do not agree"):
            sd.reported_acceptance("llama.cpp", 3, rate=0.5, length=1 + 0.5 * each)
    with pytest.raises(ParameterError, match=r"drafts of 2\.9 tokens on average would print both"):
        sd.reported_acceptance("vllm", 3, rate=0.5, length=2.45001)


# --- Shapes, cost, errors --------------------------------------------------------------------------------------------


def test_busy_units_of_a_prediction() -> None:
    cost = UnitCost(4, cost_ratio=0.25, link=2.0)
    for placement, cost_, units in (
        ("colocated", cost, 1.0),
        ("separate", replace(cost, link=0.0), 1.0),
        ("separate", cost, np.nan),
    ):
        found = sd.predict(Parameters(4, 3, placement=placement), 9, Iid(0.5), cost_)
        assert np.array_equal(found.units_ratio, units, equal_nan=True)
        assert float(found.plain_latency) == 9 * 4
        assert {value.dtype for value in vars(found).values()} == {np.dtype(np.float64)}
    for tokens in (0, 1_000_001):
        with pytest.raises(ParameterError, match=f"^tokens must be between 1 and 1000000, got {tokens}$"):
            sd.predict(Parameters(4, 3), tokens, Iid(0.5), cost)
    assert float(sd.predict(Parameters(4, 3), 1, Iid(0.5), cost).latency) == 4


def test_operations_of_rounds_count_tokens_in_both_models() -> None:
    cost = UnitCost(4, cost_ratio=0.25, operations_ratio=0.5)
    assert sd.operations(Parameters(4, 3), cost, {(1, 3): 2, (0, 3): 1, (1, 1): 4, (0, 0): 1}, {}) == 3 * 5.5 + 4 * 2.5 + 1


def test_functions_broadcast() -> None:
    alpha, gamma, c = np.linspace(0, 1, 3), np.arange(4)[:, None], np.array([0.1, 0.2])[:, None, None]
    for grid in (
        sd.speedup(alpha, gamma, c),
        sd.operations_factor(alpha, gamma, c),
        sd.finite_speedup(9, alpha, gamma, c),
        sd.finite_speedup(9, alpha, gamma, c, verify_cost=CURVE),
    ):
        assert grid.shape == (2, 4, 3)
        assert grid.dtype == np.float64
    assert np.array_equal(sd.speedup(alpha, gamma, c)[1, 2], [sd.speedup(a, 2, 0.2) for a in alpha])
    assert sd.target_runs([5, 6], [[0.5], [0.6]], 3).shape == (2, 2)
    assert sd.draft_runs(5, 0.5, [0, 1, 2]).shape == (3,)
    assert sd.tokens_variance(alpha, gamma).shape == (4, 3)
    assert sd.optimal_draft_length(alpha, c, longest=4).shape == (2, 1, 3)
    for curve in (None, CURVE):
        assert sd.optimal_draft_length(alpha, c, longest=4, verify_cost=curve).dtype == np.int64
    for scalar in (sd.expected_tokens(0.5, 3), sd.speedup(0.5, 3, 0.1), sd.target_runs(9, 0.5, 3), sd.oracle_speedup(0.5, 0.1)):
        assert isinstance(scalar, np.ndarray)
        assert scalar.shape == ()


def test_arguments_are_not_modified() -> None:
    rate, gamma = np.array([0.0, 0.5, 1.0]), np.array([1.0, 2.0, 3.0])
    sd.speedup(rate, gamma, 0.1)
    sd.finite_speedup(5, rate, gamma, 0.1, verify_cost=CURVE)
    sd.reported_acceptance("alpha", 3, rate=rate)[0] = 9
    sd.acceptance_from_drafted(rate, gamma)
    assert rate.tolist() == [0, 0.5, 1]
    assert gamma.tolist() == [1, 2, 3]


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: sd.tokens_variance(0.7, 1e308), r"draft_length must be between 0 and 1000000, got 1e\+308"),
    (lambda: sd.tokens_pmf(0.7, 10**9), "draft_length must be between 0 and 1000000, got 1000000000"),
    (lambda: sd.tokens_pmf(0.7, 10**400), "draft_length must be between 0 and 1000000, got a whole number of about 401 digits"),
    (lambda: sd.expected_tokens(1.2, 3), r"acceptance_rate must be between 0 and 1, got 1\.2"),
    (lambda: sd.expected_tokens([0.5, -0.1], 3), r"acceptance_rate\[1\] must be between 0 and 1, got -0\.1"),
    (lambda: sd.expected_tokens(np.nan, 3), "acceptance_rate must be between 0 and 1, got nan"),
    (lambda: sd.expected_tokens(0.5, -1), r"draft_length must be at least 0, got -1"),
    (lambda: sd.expected_tokens(0.5, 2.5), r"draft_length must be a whole number, got 2\.5"),
    (lambda: sd.tokens_pmf(0.5, 1.5), r"draft_length must be a whole number, got 1\.5"),  # type: ignore[arg-type]
    (lambda: sd.tokens_pmf(1.5, 1), "acceptance_rate must be between 0 and 1"),
    (lambda: sd.speedup(0.5, 3, -0.1), r"cost_ratio must be at least 0, got -0\.1"),
    (lambda: sd.speedup(0.5, 3, np.nan), "cost_ratio must be at least 0, got nan"),
    (lambda: sd.operations_factor(0.5, 3, -1), "operations_ratio must be at least 0"),
    (lambda: sd.optimal_draft_length([0.0, 0.5, 0.6], 0), r"longest must be given for cost_ratio=0 and acceptance_rate=0\.5"),
    (lambda: sd.optimal_draft_length(1, 0.3), r"longest must be given for cost_ratio=0\.3 and acceptance_rate=1"),
    (lambda: sd.optimal_draft_length(0.5, 0.3, longest=-1), "longest must be at least 0, got -1"),
    (lambda: sd.target_runs(0, 0.5, 3), "tokens must be at least 1, got 0"),
    (lambda: sd.draft_runs(2.5, 0.5, 3), "tokens must be a whole number"),
    (lambda: sd.renewal_density(0, 0.5, 3), "tokens must be at least 1"),
    (lambda: sd.acceptance_rate([0.5, 0.5], [1.0]), r"q must have the shape of p, \[2\], got \[1\]"),
    (lambda: sd.acceptance_rate([[0.5, 0.5]] * 3 + [[0.5, 0.43]], [[0.5, 0.5]] * 4), r"p\[3\] must sum to 1, got 0\.93"),
    (lambda: sd.acceptance_rate([0.5, 0.5], [1.5, -0.5]), r"q\[1\] must be at least 0, got -0\.5"),
    (lambda: sd.acceptance_rate(0.5, 0.5), "p must be a list of probabilities"),
    (lambda: sd.lenient_acceptance_rate([1.0], [1.0], 0), "lenience must be above 0"),
    (lambda: sd.lenient_acceptance_rate([1.0], [1.0], 1.5), "lenience must be between 0 and 1"),
    (lambda: sd.acceptance_from_drafted(0.5, 0), "draft_length must be at least 1"),
    (lambda: sd.acceptance_from_drafted(1.5, 3), "rate must be between 0 and 1"),
    (lambda: sd.acceptance_from_length(4.5, 3), r"mean_acceptance_length must be between 1 and draft_length\+1=4, got 4\.5"),
    (lambda: sd.acceptance_from_length(0.5, 3), "mean_acceptance_length must be at least 1"),
    (lambda: sd.drafted_from_acceptance(0.5, 0), "draft_length must be at least 1"),
    (lambda: sd.reported_acceptance("vlm", 3, rate=0.5), "unknown engine 'vlm'; did you mean vllm"),
    (lambda: sd.reported_acceptance("vllm", 3), "rate or length must be given, or both, got none"),
    (lambda: sd.reported_acceptance("alpha", 3), "rate must be given for engine 'alpha', got none"),
    (lambda: sd.reported_acceptance("alpha", 3, rate=0.5, field="drafts"), "field must be left out for engine 'alpha'"),
    (
        lambda: sd.reported_acceptance("vllm", 3, rate=0.5, length=2),
        "rate=0.5 and length=2 of vllm .* a length of 2.5, that length a rate of 0.3333",
    ),
    (
        lambda: sd.reported_acceptance("sglang", 3, rate=0.5),
        "field is required .*'drafts', .*'with-bonus', .*'before-2025-10', .* give the length$",
    ),
    (lambda: sd.reported_acceptance("sglang", 3, rate=0.5, length=2.5), "field is required .* give the length alone$"),
    (lambda: sd.reported_acceptance("sglang", 3, rate=1.2, field="before-2025-10"), "cannot be converted; give the length$"),
    (lambda: sd.reported_acceptance("sglang", 3, rate=0.2, field="with-bonus"), r"rate must be between 0\.25 and 1, got 0\.2"),
    (
        lambda: sd.reported_acceptance("sglang", 3, rate=0.5, field="bonus"),
        "unknown field of sglang 'bonus'; did you mean with-bonus",
    ),
    (
        lambda: sd.reported_acceptance("trtllm", 3, rate=0.5, field="forced"),
        "field 'forced' is a length of trtllm; give the length",
    ),
    (lambda: sd.reported_acceptance("mlx-lm", 3, length=2), "length must be left out for engine 'mlx-lm'"),
    (lambda: sd.reported_acceptance("mlx-lm", 3, rate=0.8), r"rate must be between 0 and 0\.75, got 0\.8"),
    (lambda: sd.reported_acceptance("alpha", 3, length=2), "length must be left out for engine 'alpha'"),
    (lambda: sd.acceptance_from_length([3.5, 4.0, 9.0, 10.0], 3), r"^mean_acceptance_length must be between .*=4, got 9; "),
    (lambda: sd.reported_acceptance("alpha", 3, rate=1.5), r"^rate must be between 0 and 1, got 1\.5"),
    (lambda: sd.reported_acceptance("vllm", 3, rate=79), "rate must be between 0 and 1, got 79"),
    (lambda: sd.reported_acceptance("trtllm", 3, length=4.5), "length must be between 1 and 4"),
    (lambda: sd.reported_acceptance("trtllm", 3, length=3.5, field="forced"), "length must be between 0 and 3"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()


def test_a_length_above_draft_length_plus_one_is_refused_at_any_index() -> None:
    with pytest.raises(ParameterError, match=r"mean_acceptance_length.* 9"):
        sd.acceptance_from_length([2.0, 9.0], 3)
    with pytest.raises(ParameterError, match=r"mean_acceptance_length.* 4\.5"):
        sd.acceptance_from_length([4.0, 4.5], [4, 3])
    assert float(sd.acceptance_from_length(4.0, 3)) == 1.0


def test_equal_distributions_accept_everything_despite_rounding() -> None:
    for row in np.random.default_rng(0).integers(1, 20, (300, 4)):
        law = row / row.sum()
        assert float(sd.acceptance_rate(law, law)) <= 1.0
    above = [law for law in (row / row.sum() for row in np.random.default_rng(0).integers(1, 20, (300, 4))) if law.sum() > 1]
    assert above  # for these the plain sum of minima exceeds 1


def test_impossible_figures_are_refused_for_all_engines() -> None:
    for engine in ("vllm", "sglang", "trtllm", "transformers", "llama.cpp"):
        with pytest.raises(ParameterError, match=r"draft_length must be at least 1, got 0"):
            sd.reported_acceptance(engine, 0, rate=0.5, field="drafts" if engine == "sglang" else None)
        with pytest.raises(ParameterError, match=r"draft_length must be at least 1, got 0"):
            sd.reported_acceptance(engine, 0, length=1.0)
    found = sd.reported_acceptance("trtllm", [3, 5], length=[4.0, 6.0])
    assert found.tolist() == [1.0, 1.0]
    with pytest.raises(ParameterError, match="length must be between 1 and 4, got 6"):
        sd.reported_acceptance("trtllm", [3, 5], length=6.0)
