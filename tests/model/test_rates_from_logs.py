"""Rates from logs of rounds: estimates compared with enumeration, and tests of independence: their level and power.

Seeds are fixed. Each random check states the probability with which a correct program would have failed it.
"""

import itertools
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from model.base.checks import ParameterError
from model.methods.speculative import dependent_acceptance as laws
from model.methods.speculative import rates_from_logs
from model.methods.speculative import theory as sd
from model.outcomes.intervals import wilson
from tests.support.exact import close, mean, near, recursion

LOGS = st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=25), min_size=1, max_size=4)
LENGTHS = st.integers(1, 6)


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """Numpy warns of 0/0; limits must not be computed that way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def log_of(outcomes: Sequence[bool]) -> list[int]:
    """Log with these first-token outcomes: a round ends with the first rejection, or after the end."""
    lengths, run = [], 1
    for outcome in reversed(outcomes):
        run = run + 1 if outcome else 1
        lengths.append(run)
    return lengths[::-1]


def drawn(rng: np.random.Generator, alpha: float, requests: int, positions: int) -> list[list[int]]:
    return [log_of(row) for row in (rng.random((requests, positions)) < alpha).tolist()]


def chain(rng: np.random.Generator, alpha: float, correlation: float, positions: int) -> list[bool]:
    """A stationary Markov chain of outcomes."""
    outcomes = [bool(rng.random() < alpha)]
    for chance in rng.random(positions - 1):
        outcomes.append(bool(chance < alpha + correlation * ((1 if outcomes[-1] else 0) - alpha)))
    return outcomes


def walked(logs: list[list[int]], gamma: int) -> list[tuple[int, int, int, int]]:
    """Request, start, drafted and accepted tokens of all rounds, token by token."""
    found = []
    for request, log in enumerate(logs):
        out = 0
        while out < len(log):
            start, accepted, drafted = out, 0, 0
            for place in range(gamma):
                if out + place + 1 < len(log):
                    drafted += 1
                    accepted += log[start] > place + 1
            found.append((request, start, drafted, accepted))
            out += accepted + 1
    return found


# --- Rounds and estimates -------------------------------------------------------------------------------------------


@given(LOGS, LENGTHS)
def test_rounds_token_by_token(logs: list[list[int]], gamma: int) -> None:
    played = rates_from_logs.replay(logs, gamma)
    expected = walked(logs, gamma)
    assert [*zip(*(each.tolist() for each in played[1:]), strict=True)] == expected
    for request, log in enumerate(logs):
        assert np.count_nonzero(played.request == request) == laws.tokens_of_rounds(log, gamma)[0]
    assert played.accepted.sum() + played.start.size == sum(map(len, logs))  # one more token per round
    tested = [min(accepted + 1, drafted) for *_, drafted, accepted in expected]
    assert played.tested.tolist() == tested
    of_requests = [
        [sum(value for (request, *_), value in zip(expected, values, strict=True) if request == each) for each in range(len(logs))]
        for values in ([row[3] for row in expected], tested)
    ]
    assert [each.tolist() for each in played.of_requests()] == of_requests


@given(LOGS, LENGTHS, st.lists(st.integers(0, 30), min_size=2, max_size=5, unique=True).map(sorted))
def test_counts_by_draft_and_output_position_sum_to_all_tested(logs: list[list[int]], gamma: int, edges: list[int]) -> None:
    played = rates_from_logs.replay(logs, gamma)
    trials = [
        (place, start + place, place < accepted)
        for _, start, drafted, accepted in walked(logs, gamma)
        for place in range(min(accepted + 1, drafted))
    ]
    by_place = rates_from_logs.by_draft_position(played)
    by_position = rates_from_logs.by_output_position(played, edges)
    bins = [[kept for _, position, kept in trials if low <= position < high] for low, high in itertools.pairwise(edges)]
    places = [[kept for place, _, kept in trials if place == each] for each in range(gamma)]
    for found, expected in ((by_place, places), (by_position, bins)):
        assert found.trials.tolist() == [*map(len, expected)]
        shares = [sum(each) / len(each) if each else math.nan for each in expected]
        assert found.rate.tolist() == pytest.approx(shares, nan_ok=True)
    pooled = rates_from_logs.accepted_of_tested(played)
    assert int(pooled.trials) == len(trials)
    if trials:
        assert near(pooled.rate, sum(kept for *_, kept in trials) / len(trials))
    assert near(rates_from_logs.accepted_of_positions(logs).trials, sum(len(log) - 1 for log in logs))


@pytest.mark.parametrize("gamma", [1, 2, 3, 5])
@pytest.mark.parametrize("alpha", [Fraction(1, 3), Fraction(4, 5)])
def test_estimates_equal_enumeration_of_all_outcomes(alpha: Fraction, gamma: int) -> None:
    """Accepted - alpha tested has mean exactly zero with any cut at the end; accepted over drafted is lower."""
    positions = 7
    accepted = tested = drafted = first = Fraction(0)
    for outcomes in itertools.product((False, True), repeat=positions):
        chance = alpha ** sum(outcomes) * (1 - alpha) ** (positions - sum(outcomes))
        log = log_of(outcomes)
        played = rates_from_logs.replay([log], gamma)
        accepted += chance * int(played.accepted.sum())
        tested += chance * int(played.tested.sum())
        drafted += chance * int(played.drafted.sum())
        first += chance * Fraction(int(sum(each.sum() for each in rates_from_logs.first_token_outcomes([log]))), positions - 1)
    assert accepted == alpha * tested
    assert first == alpha
    assert (accepted == alpha * drafted) if gamma == 1 else (accepted < alpha * drafted)
    # The theory's expected passes for this number of tokens equal the mean replayed rounds.
    assert accepted == positions - recursion(alpha, gamma, positions, lambda _: Fraction(1))
    assert drafted == recursion(alpha, gamma, positions, Fraction)
    assert close(sd.draft_runs(positions, float(alpha), gamma), drafted)


@pytest.mark.parametrize("gamma", [2, 5])
def test_accepted_over_drafted_of_whole_drafts_is_equation_1(gamma: int) -> None:
    """Rounds in the proportions of the distribution, none of them cut: (1/gamma) times the sum of alpha^j."""
    alpha = Fraction(1, 2)
    chances = [alpha**n * (1 - alpha) for n in range(gamma)] + [alpha**gamma]
    log = [length for n, chance in enumerate(chances) for _ in range(int(chance * 2**gamma)) for length in range(n + 1, 0, -1)]
    played = rates_from_logs.replay([[*log, *[1] * gamma]], gamma)
    whole = played._replace(**{name: getattr(played, name)[: 2**gamma] for name in ("request", "start", "drafted", "accepted")})
    assert (whole.drafted == gamma).all()
    assert close(rates_from_logs.accepted_of_drafted(whole).rate, (mean(alpha, gamma) - 1) / gamma)
    assert close(rates_from_logs.accepted_of_tested(whole).rate, alpha)
    # So the printed figure gives alpha.
    assert near(sd.acceptance_from_drafted(float(rates_from_logs.accepted_of_drafted(whole).rate), gamma), 0.5, rtol=1e-9)


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=5))
def test_intervals_are_wilsons(counts: list[tuple[int, int]]) -> None:
    successes, trials = zip(*((min(pair), max(pair)) for pair in counts), strict=True)
    found = rates_from_logs.rates(successes, trials)
    for index, (kept, tried) in enumerate(zip(successes, trials, strict=True)):
        if not tried:
            assert all(math.isnan(each[index]) for each in found[:3])
            continue
        assert [found.low[index], found.high[index]] == [float(end) for end in wilson(kept / tried, tried)]
        assert found.low[index] - 1e-12 <= found.rate[index] <= found.high[index] + 1e-12


def test_interval_over_requests_accounts_for_dependent_trials() -> None:
    """With rates 0 or 1 per request 40 requests are 40 trials, not 4,000. Equal requests have zero width."""
    successes, trials = [100] * 20 + [0] * 20, [100] * 40
    low, high = rates_from_logs.ratio_interval(successes, trials)
    # Student's interval of the mean of 40 values 0 or 1.
    half = float(stats.t.ppf(0.975, 39)) * math.sqrt(40 * 0.25 / 39 / 40)
    assert near([low, high], [0.5 - half, 0.5 + half])
    found = rates_from_logs.rates(sum(successes), sum(trials))
    assert high - low > 8 * float(found.high - found.low)
    assert rates_from_logs.ratio_interval([5, 10], [10, 20]) == (0.5, 0.5)
    assert all(
        math.isnan(end) for end in (*rates_from_logs.ratio_interval([5], [10]), *rates_from_logs.ratio_interval([0, 0], [0, 0]))
    )


def covered(intervals: Iterator[tuple[float, float]], truth: float) -> int:
    return sum(low <= truth <= high for low, high in intervals)


def test_interval_over_requests_has_its_coverage() -> None:
    """400 sets of 40 requests with separate rates: at least 360 intervals cover the mean; fails by chance with probability 1e-5."""
    rng = np.random.default_rng(8)

    def intervals() -> Iterator[tuple[float, float]]:
        for _ in range(400):
            trials = rng.integers(20, 60, 40)
            yield rates_from_logs.ratio_interval(rng.binomial(trials, rng.beta(7, 3, 40)), trials)

    assert 360 <= covered(intervals(), 0.7) <= 398


# --- Tests of independence ------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.booleans(), max_size=12), min_size=1, max_size=4).filter(any), st.integers(1, 4))
def test_correlation_pair_by_pair(sequences: list[list[bool]], lag: int) -> None:
    found = rates_from_logs.lag_correlation(sequences, lag)
    every = [outcome for each in sequences for outcome in each]
    share = Fraction(sum(every), len(every))
    products = [(each[i] - share) * (each[i + lag] - share) for each in sequences for i in range(len(each) - lag)]
    assert found.pairs == len(products)
    if not products or share in (0, 1):
        assert math.isnan(found.correlation)
        assert math.isnan(found.p_value)
        return
    exact = sum(products, Fraction(0)) / len(products) / (share * (1 - share))
    assert near(found.correlation, float(exact), rtol=1e-9, atol=1e-12)
    assert near(found.standard_error, 1 / math.sqrt(len(products)))


def test_standard_error_of_the_correlation_is_exact_for_a_known_rate() -> None:
    """Over all outcomes the sum of products has mean 0 and variance pairs (alpha (1 - alpha))^2, hence 1 / sqrt(pairs)."""
    alpha, positions = Fraction(2, 3), 6
    first = second = Fraction(0)
    for outcomes in itertools.product((0, 1), repeat=positions):
        chance = alpha ** sum(outcomes) * (1 - alpha) ** (positions - sum(outcomes))
        total = sum(((here - alpha) * (there - alpha) for here, there in itertools.pairwise(outcomes)), Fraction(0))
        first += chance * total
        second += chance * total**2
    assert first == 0
    spread = alpha * (1 - alpha)
    assert near(math.sqrt(second) / (positions - 1) / spread, rates_from_logs.lag_correlation([[0, 1] * 3]).standard_error)


@pytest.mark.parametrize(("ones", "zeros"), [(1, 1), (3, 2), (4, 4), (1, 5)])
def test_runs_equal_enumeration_of_all_orders(ones: int, zeros: int) -> None:
    orders = sorted(set(itertools.permutations([1] * ones + [0] * zeros)))
    counts = [sum(1 for _ in itertools.groupby(order)) for order in orders]
    middle = Fraction(sum(counts), len(counts))
    variance = Fraction(sum(count**2 for count in counts), len(counts)) - middle**2
    for order, count in zip(orders, counts, strict=True):
        found = rates_from_logs.runs_test([order])
        assert found.runs == count
        assert near(found.expected, float(middle))
        assert near(found.deviation, math.sqrt(variance), atol=1e-9)
    # Requests are independent: means and variances add up; a request of one kind adds only its single run.
    both = rates_from_logs.runs_test([orders[0], orders[-1], [1, 1, 1], []])
    assert near(both.expected, 2 * float(middle) + 1)
    assert near(both.deviation, math.sqrt(2 * variance), atol=1e-9)


def test_equal_outcomes_have_no_p_value() -> None:
    found = rates_from_logs.runs_test([[1] * 10, [0] * 3])
    assert (found.runs, found.expected, found.deviation) == (2, 2.0, 0.0)
    assert math.isnan(found.z)
    assert math.isnan(found.p_value)


TESTS: dict[str, Callable[[list[list[int]]], float]] = {
    "correlation": lambda logs: rates_from_logs.lag_correlation(rates_from_logs.first_token_outcomes(logs)).p_value,
    "lag 2": lambda logs: rates_from_logs.lag_correlation(rates_from_logs.first_token_outcomes(logs), 2).p_value,
    "runs": lambda logs: rates_from_logs.runs_test(rates_from_logs.first_token_outcomes(logs)).p_value,
    "geometric": lambda logs: rates_from_logs.geometric_test(rates_from_logs.replay(logs, 4)).p_value,
    "geometric, long drafts": lambda logs: rates_from_logs.geometric_test(rates_from_logs.replay(logs, 12)).p_value,
}


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("alpha", [0.35, 0.8])
def test_level_of_the_tests_of_independence(name: str, alpha: float) -> None:
    """Of 400 logs 6 to 38 are rejected. Binomial(400, 0.05) is outside with probability 3e-4, over the ten cases 3e-3."""
    rng = np.random.default_rng(17)
    refused = sum(TESTS[name](drawn(rng, alpha, 5, 120)) < 0.05 for _ in range(400))
    assert 6 <= refused <= 38
    assert stats.binom.cdf(5, 400, 0.05) + stats.binom.sf(38, 400, 0.05) < 3e-4


@pytest.mark.parametrize("name", TESTS)
@pytest.mark.parametrize("correlation", [0.4, -0.4])
def test_tests_of_independence_detect_a_chain(name: str, correlation: float) -> None:
    """6,000 outcomes at rate .6: z is 31 at lag 1 and 12 at lag 2; the weakest test, accepted lengths, still has p = 1e-6."""
    rng = np.random.default_rng(18)
    logs = [log_of(chain(rng, 0.6, correlation, 300)) for _ in range(20)]
    assert TESTS[name](logs) < 1e-6


def test_signs() -> None:
    """Clustered outcomes have positive correlation and few runs; alternating outcomes the opposite."""
    rng = np.random.default_rng(19)
    for correlation in (0.3, -0.3):
        outcomes = [chain(rng, 0.6, correlation, 400) for _ in range(10)]
        found = rates_from_logs.lag_correlation(outcomes)
        assert abs(found.correlation - correlation) < 5 * found.standard_error
        assert abs(rates_from_logs.lag_correlation(outcomes, 2).correlation - correlation**2) < 5 * found.standard_error
        assert rates_from_logs.runs_test(outcomes).z * correlation < -3


def test_easy_and_hard_requests_show_in_correlation_but_not_in_runs() -> None:
    """Independent outcomes within requests of rate .3 or .9: neighbours share the request's rate, their order is random.

    Of 100 logs the runs test may reject at most 15: Binomial(100, 0.05) is above with probability 4e-5.
    """
    rng = np.random.default_rng(20)
    by_mean = by_order = 0
    for _ in range(100):
        logs = [log_of(row) for row in (rng.random((12, 80)) < np.tile([[0.3], [0.9]], (6, 1))).tolist()]
        by_mean += TESTS["correlation"](logs) < 0.001
        by_order += TESTS["runs"](logs) < 0.05
    assert by_mean == 100
    assert by_order <= 15


@given(st.lists(st.integers(0, 4), min_size=1, max_size=120), LENGTHS)
def test_chi_square_cell_by_cell(survivors: list[int], gamma: int) -> None:
    """The number of cells is the largest at which all expect five rounds; the statistic is Pearson's sum over them."""
    log = [length for n in survivors for length in range(min(n, gamma) + 1, 0, -1)] + [1] * gamma
    played = rates_from_logs.replay([log], gamma)
    whole = [accepted for *_, drafted, accepted in walked([log], gamma) if drafted == gamma]
    found = rates_from_logs.geometric_test(played)

    def cells(longest: int) -> tuple[list[int], list[Fraction]]:
        cut = [min(n, longest) for n in whole]
        tested = sum(min(n + 1, longest) for n in cut)
        alpha = Fraction(sum(cut), tested)
        chances = [alpha**n * (1 - alpha) for n in range(longest)] + [alpha**longest]
        return [cut.count(n) for n in range(longest + 1)], [len(cut) * chance for chance in chances]

    fit = [longest for longest in range(1, gamma + 1) if whole and min(cells(longest)[1]) >= 5]
    if not fit or max(fit) == 1:
        assert found.degrees == 0
        assert math.isnan(found.p_value)
        return
    counts, expected = cells(max(fit))
    statistic = sum(((count - each) ** 2 / each for count, each in zip(counts, expected, strict=True)), Fraction(0))
    assert found.counts.tolist() == counts
    assert near(found.expected, [float(each) for each in expected], rtol=1e-9)
    assert found.degrees == len(counts) - 2
    assert near(found.statistic, float(statistic), rtol=1e-9, atol=1e-9)
    assert near(found.p_value, float(stats.chi2.sf(float(statistic), found.degrees)), rtol=1e-6, atol=1e-12)


def test_rounds_in_the_exact_proportions_fit() -> None:
    chances = [16, 8, 4, 2, 1, 1]
    log = [length for n, count in enumerate(chances) for _ in range(5 * count) for length in range(n + 1, 0, -1)]
    found = rates_from_logs.geometric_test(rates_from_logs.replay([[*log, *[1] * 5]], 5))
    assert found.degrees == 4
    # The five ones at the end add one whole round.
    assert found.statistic < 0.05
    assert found.p_value > 0.999


# --- What it does to a speed-up -------------------------------------------------------------------------------------


@given(LOGS.filter(lambda logs: max(map(len, logs)) > 1), LENGTHS, st.sampled_from([0.0, 0.1, 0.5]))
def test_predicted_and_observed(logs: list[list[int]], gamma: int, cost_ratio: float) -> None:
    (row,) = rates_from_logs.dependence(logs, [gamma], cost_ratio, 3, np.random.default_rng(0))
    outcomes = [length > 1 for log in logs for length in log[:-1]]
    alpha = Fraction(sum(outcomes), len(outcomes))
    prices: tuple[Callable[[int], Fraction], ...] = (lambda _: Fraction(1), Fraction)
    passes, drafts = (sum((recursion(alpha, gamma, len(log), price) for log in logs), Fraction(0)) for price in prices)
    expected = walked(logs, gamma)
    rounds, drafted, tokens = len(expected), sum(row[2] for row in expected), sum(map(len, logs))
    assert near(row.acceptance_rate, float(alpha))
    assert near(row.expected_tokens, float(tokens / passes), rtol=1e-9)
    assert near(row.observed_tokens, tokens / rounds)
    assert near(row.error, float(rounds / passes - 1), rtol=1e-9, atol=1e-12)
    assert near(row.expected_speedup, float(tokens / (passes + Fraction(cost_ratio) * drafts)), rtol=1e-9)
    assert near(row.observed_speedup, tokens / (rounds + cost_ratio * drafted))
    assert math.isnan(row.low) == (len(logs) == 1)


def test_iid_outcomes_are_predicted_without_error() -> None:
    """Of 150 logs of 40 requests the interval covers 0 in 128 to 149: Binomial(150, 0.95) is outside with probability 6e-4.

    Percentile intervals of 40 requests are slightly too narrow.
    """
    rng = np.random.default_rng(21)
    rows = [rates_from_logs.dependence(drawn(rng, 0.7, 40, 50), [4], 0.1, 200, rng)[0] for _ in range(150)]
    assert 128 <= covered(((row.low, row.high) for row in rows), 0.0) <= 149
    errors = np.array([row.error for row in rows])
    assert abs(errors.mean()) < 4 * errors.std() / math.sqrt(150) + 1e-3


@pytest.mark.parametrize("correlation", [0.4, -0.3])
def test_error_of_the_iid_prediction_for_a_markov_chain(correlation: float) -> None:
    """Observed tokens follow `expected_tokens_markov`, predicted tokens Eq. 1: too many for positive correlation."""
    rng = np.random.default_rng(22)
    logs = [log_of(chain(rng, 0.7, correlation, 1000)) for _ in range(30)]
    for row in rates_from_logs.dependence(logs, [1, 4], 0.1, 200, rng):
        chained = laws.expected_tokens_markov(0.7, correlation, row.draft_length)
        truth = float(sd.expected_tokens(0.7, row.draft_length) / chained) - 1
        assert row.error * correlation > 0
        assert row.low - 0.01 < truth < row.high + 0.01
        assert not row.low <= 0 <= row.high
        assert (row.expected_speedup > row.observed_speedup) == (correlation > 0)


def test_same_seed_same_interval() -> None:
    logs = drawn(np.random.default_rng(23), 0.7, 10, 30)
    once, again, other = (rates_from_logs.dependence(logs, [2, 3], 0.1, 50, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert once == again
    assert [row.low for row in once] != [row.low for row in other]
    assert [row.error for row in once] == [row.error for row in other]  # only the interval is random


def test_interval_is_a_bootstrap_over_requests() -> None:
    """Each resample of requests has its own error; the interval covers 95 % of these errors."""
    logs = drawn(np.random.default_rng(24), 0.7, 4, 20) + drawn(np.random.default_rng(25), 0.4, 3, 12)
    (row,) = rates_from_logs.dependence(logs, [3], 0.1, 40, np.random.default_rng(2))
    errors = []
    for often in np.random.default_rng(2).multinomial(7, [1 / 7] * 7, size=40):
        again = [log for log, count in zip(logs, often, strict=True) for _ in range(count)]
        errors.append(rates_from_logs.dependence(again, [3], 0.1, 1, np.random.default_rng(0))[0].error)
    assert near([row.low, row.high], np.quantile(errors, [0.025, 0.975]), rtol=1e-9)


# --- Which mean -----------------------------------------------------------------------------------------------------


@given(st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=12), min_size=1, max_size=8), st.integers(1, 4))
def test_means_over_rounds_and_sequences_are_plain_sums(logs: list[list[int]], gamma: int) -> None:
    found = rates_from_logs.means(rates_from_logs.replay(logs, gamma))
    rounds = [laws.tokens_of_rounds(log, gamma)[0] for log in logs]
    assert found.rounds == sum(rounds)
    assert near(found.over_rounds, sum(map(len, logs)) / sum(rounds), rtol=1e-12)
    assert near(found.over_sequences, np.mean([len(log) / count for log, count in zip(logs, rounds, strict=True)]), rtol=1e-12)
    for count in range(1, len(logs) + 1):  # no smaller set of sequences has half of the rounds
        most = max(sum(part) for part in itertools.combinations(rounds, count))
        assert (2 * most >= sum(rounds)) == (count >= found.sequences_with_half)
    assert found.sequences == len(logs)
    assert found.few_dominate == (found.sequences_with_half <= len(logs) / 4)


def test_coverage_of_the_intervals_of_both_means() -> None:
    """Random sequences with three rates: each 95 % interval covers its mean in 360 to 397 of 400."""
    rng, covered = np.random.default_rng(11), np.zeros(2)
    pool = [rates_from_logs.replay([log], 3) for rate in (0.4, 0.6, 0.8) for log in drawn(rng, rate, 20, 30)]
    rounds = np.array([each.accepted.size for each in pool])
    tokens = np.array([int((each.accepted + 1).sum()) for each in pool])
    truth = tokens.sum() / rounds.sum(), float((tokens / rounds).mean())
    for _ in range(400):
        parts = [pool[index] for index in rng.integers(0, len(pool), 60)]
        request = np.repeat(np.arange(60), [part.accepted.size for part in parts])
        found = rates_from_logs.means(rates_from_logs.ReplayedRounds(3, request, *(
            np.concatenate([getattr(part, name) for part in parts]) for name in ("start", "drafted", "accepted")
        )))  # fmt: skip
        ends = (found.rounds_low, found.rounds_high), (found.sequences_low, found.sequences_high)
        covered += [low <= mean <= high for (low, high), mean in zip(ends, truth, strict=True)]
    assert np.all((covered >= 360) & (covered <= 397)), covered


# --- A public log ---------------------------------------------------------------------------------------------------

DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data")) / "acceptance"
FILES = sorted(DATA.glob("*.jsonl"))


@pytest.mark.skipif(not FILES, reason="no acceptance logs: DECODESIM_DATA names the folder that holds acceptance/*.jsonl")
def test_real_acceptances_are_dependent() -> None:
    """Every test detects it, for both drafters; the i.i.d. prediction is too high at every draft length."""
    rows = [json.loads(line) for file in FILES for line in file.read_text().splitlines()]
    for drafter in ("eagle", "ngram"):
        logs: list[list[int]] = [row[f"acc_{drafter}"]["acc_len"] for row in rows]
        outcomes: list[NDArray[np.bool_]] = rates_from_logs.first_token_outcomes(logs)
        assert rates_from_logs.lag_correlation(outcomes).correlation > 0.05
        assert rates_from_logs.runs_test(outcomes).z < -10
        assert rates_from_logs.geometric_test(rates_from_logs.replay(logs, 3)).p_value < 1e-6
        found = rates_from_logs.dependence(logs, [1, 2, 3, 5, 7], 0.1, 200, np.random.default_rng(1))
        assert all(row.low > 0 for row in found)
        if drafter == "eagle":  # the error grows with the draft length, because the draft reads the target's features
            assert all(after.error > before.error for before, after in itertools.pairwise(found))
            # Rounds of seven accept less often than fresh drafts; the mean over positions does not show it.
            late = rates_from_logs.accepted_of_tested(rates_from_logs.replay(logs, 7))
            assert float(late.high) < float(rates_from_logs.accepted_of_positions(logs).low)
        played = rates_from_logs.replay(logs, 7)
        low, high = rates_from_logs.ratio_interval(*played.of_requests())
        pooled = rates_from_logs.accepted_of_tested(played)
        assert high - low > float(pooled.high - pooled.low)  # requests differ


@pytest.mark.skipif(not FILES, reason="no acceptance logs: DECODESIM_DATA names the folder that holds acceptance/*.jsonl")
def test_guide_quotes_the_errors_of_its_log() -> None:
    page = Path(__file__).parents[2] / "notebooks" / "validation.md"
    said = page.read_text(encoding="utf-8").partition("* Acceptance is not independent.")[2]
    [file] = [each for each in FILES if "gsm8k" in each.name]
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    heads = said.partition("of an n-gram drafter by")
    for drafter, sentence in (("eagle", heads[0]), ("ngram", heads[2].partition(";")[0])):
        logs = [row[f"acc_{drafter}"]["acc_len"] for row in rows]
        printed = re.findall(r"([\d.]+) % \((\d)", sentence)
        assert [int(gamma) for _, gamma in printed] == [2, 3, 5, 7]
        found = rates_from_logs.dependence(logs, [2, 3, 5, 7], 0.1, 1, np.random.default_rng(0))
        assert [percent for percent, _ in printed] == [f"{100 * row.error:.1f}" for row in found]


# --- Errors ---------------------------------------------------------------------------------------------------------

RNG = np.random.default_rng(0)
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: rates_from_logs.rates([3], [2]), r"^successes must be at most the trials, got \[3\] of \[2\]"),
    (lambda: rates_from_logs.rates([-1], [2]), r"^successes\[0\] must be at least 0, got -1"),
    (lambda: rates_from_logs.rates([0.5], [2]), r"^successes\[0\] must be a whole number, got 0\.5"),
    (lambda: rates_from_logs.ratio_interval([1, 2], [3]), "^successes and trials must be lists of the same length"),
    (lambda: rates_from_logs.ratio_interval(1, 3), "^successes and trials must be lists of the same length"),
    (lambda: rates_from_logs.ratio_interval([4, 2], [3, 3]), "^successes and trials must be lists .* successes at most trials"),
    (lambda: rates_from_logs.replay([], 3), r"^logs must be lists of whole numbers of at least 1, .*, got \[\]"),
    (lambda: rates_from_logs.replay([[1], []], 3), r"^logs must be lists .*; logs\[1\] is \[\]"),
    (lambda: rates_from_logs.replay([3, 2], 3), r"^logs must be lists .*; logs\[0\] is 3"),
    (lambda: rates_from_logs.replay([[2, 0]], 3), r"^logs\[0\]\[1\] must be at least 1, got 0"),
    (lambda: rates_from_logs.replay([[2, 1.5]], 3), r"^logs\[0\]\[1\] must be a whole number, got 1\.5"),
    (lambda: rates_from_logs.replay([[2]], 0), "^draft_length must be at least 1, got 0"),
    (
        lambda: rates_from_logs.by_output_position(rates_from_logs.replay([[2]], 1), [3]),
        r"^edges must be at least two increasing whole numbers, got",
    ),
    (
        lambda: rates_from_logs.by_output_position(rates_from_logs.replay([[2]], 1), [3, 3]),
        r"^edges must be at least two increasing whole numbers",
    ),
    (lambda: rates_from_logs.lag_correlation([[1, 0]], 0), "^lag must be at least 1, got 0"),
    (
        lambda: rates_from_logs.lag_correlation([[1, 0.5]]),
        r"^sequences\[0\] must be a list of outcomes, each 0 or 1, got \[1, 0\.5\]",
    ),
    (lambda: rates_from_logs.runs_test([[1, 2]]), r"^sequences\[0\]\[1\] must be between 0 and 1, got 2"),
    (lambda: rates_from_logs.runs_test([[]]), "^sequences must have at least one outcome, got none"),
    (lambda: rates_from_logs.dependence([[2, 1]], [], 0.1, 10, RNG), "^draft_lengths must have at least one length"),
    (lambda: rates_from_logs.dependence([[2, 1]], [0], 0.1, 10, RNG), "^draft_length must be at least 1, got 0"),
    (lambda: rates_from_logs.dependence([[2, 1]], [1], -0.1, 10, RNG), r"^cost_ratio must be at least 0, got -0\.1"),
    (lambda: rates_from_logs.dependence([[2, 1]], [1], 0.1, 0, RNG), "^replications must be at least 1, got 0"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()
