"""Speculative decoding with dependent acceptances: enumeration, recorded logs, limits and errors."""

import itertools
import json
import os
import warnings
from collections.abc import Callable, Iterator
from fractions import Fraction
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.methods.speculative import dependent_acceptance as laws
from model.methods.speculative import theory as sd
from model.methods.speculative.rates_from_logs import dependence
from model.outcomes.outcome_laws import Markov
from tests.support.exact import LENGTHS, RATES, close, mean, near, recursion


@pytest.fixture(autouse=True)
def no_warning() -> Iterator[None]:
    """Numpy warns of 0/0; limits must not be computed that way."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


def stationary_mean(p: float, rho: float, gamma: int, tested: bool) -> float:
    """Tokens per round of a Markov chain, from the paths of a round and the stationary law of its last outcome."""
    law = Markov(p, rho)
    up = {False: float(law.after_failure), True: float(law.after_success)}

    def round_from(last: bool) -> tuple[float, float]:
        """Expected tokens, and the probability that the last outcome of the round is an acceptance."""
        tokens = success = 0.0
        for outcomes in itertools.product((False, True), repeat=gamma + 1):
            chance, before = 1.0, last
            for coin in outcomes:
                chance *= up[before] if coin else 1 - up[before]
                before = coin
            matches = next((j for j in range(gamma) if not outcomes[j]), gamma)
            used = outcomes[: min(matches + 1, gamma if tested else gamma + 1)]
            tokens += chance * (matches + 1)
            success += chance * (used[-1] if used else last)
        return tokens, success

    (after_miss, miss_up), (after_match, match_up) = round_from(False), round_from(True)
    share = miss_up / (1 - match_up + miss_up)
    return share * after_match + (1 - share) * after_miss


@pytest.mark.parametrize(("p", "rho"), [(0.8, 0.4), (0.8, -0.2), (0.5, -0.9), (0.3, 0.95), (0.6, 0.0)])
@pytest.mark.parametrize("gamma", [1, 2, 4])
def test_both_chains_equal_the_stationary_law_of_their_rounds(p: float, rho: float, gamma: int) -> None:
    for chain, tested in (("output", False), ("tested", True)):
        value = float(laws.expected_tokens_markov(p, rho, gamma, chain))  # type: ignore[arg-type]
        assert near(value, stationary_mean(p, rho, gamma, tested), rtol=1e-12)
        if gamma > 1 or chain == "output":
            assert np.sign(round(float(sd.expected_tokens(p, gamma)) - value, 12)) == np.sign(rho)


def markov(chain: str, p: float, rho: float, gamma: int) -> float:
    return float(laws.expected_tokens_markov(p, rho, gamma, chain))  # type: ignore[arg-type]


def test_limits_of_the_markov_chain() -> None:
    assert round(float(laws.expected_tokens_markov(0.8, 0.4, 4)), 4) == 3.1065
    assert round(float(laws.expected_tokens_markov(0.8, 0.4, 4, "tested")), 4) == 3.2013
    for chain in ("output", "tested"):
        at = partial(markov, chain)
        assert near(at(0.7, 0, 5), sd.expected_tokens(0.7, 5), rtol=1e-15)
        assert [at(p, 0.3, gamma) for p, gamma in ((0, 4), (1, 4), (0.5, 0))] == [1, 5, 1]
        assert near(at(0.7, 1, 4), at(0.7, 1 - 1e-12, 4), rtol=1e-10)
        assert at(1, 1, 4) == 5
        assert np.isfinite(at(0.5, -1, 1))
    # Every round starts in one of two frozen states, so tokens per round is the harmonic mean, here of 5 and 1.
    assert near(laws.expected_tokens_markov(0.7, 1, 4), 1 / (0.7 / 5 + 0.3 / 1), rtol=1e-15)


@given(st.lists(st.floats(0, 1), max_size=7))
def test_rates_by_draft_position(rates: list[float]) -> None:
    exact = 1 + sum(np.prod(rates[:j]) for j in range(1, len(rates) + 1))
    assert near(laws.expected_tokens_by_draft_position(rates), exact, rtol=1e-14)
    falling = laws.expected_tokens_by_draft_position(sorted(rates, reverse=True))
    rising = laws.expected_tokens_by_draft_position(sorted(rates))
    equal = sd.expected_tokens(min(1.0, float(np.mean(rates))) if rates else 0.5, len(rates))
    assert rising <= equal * (1 + 1e-14)
    assert equal <= falling * (1 + 1e-14)


@given(RATES, LENGTHS)
def test_equal_rates_by_position_are_eq_1(alpha: float, gamma: int) -> None:
    assert near(laws.expected_tokens_by_draft_position([alpha] * gamma), sd.expected_tokens(alpha, gamma), rtol=1e-13)


@given(st.floats(0.05, 50), st.floats(0.05, 50), LENGTHS)
def test_a_shared_rate_gives_at_least_the_iid_tokens(a: float, b: float, gamma: int) -> None:
    moments = laws.beta_moments(a, b, gamma)
    value = float(laws.expected_tokens_shared_rate(moments))
    assert value >= float(sd.expected_tokens(a / (a + b), gamma)) * (1 - 1e-13)
    # A constant rate is the i.i.d. case.
    assert near(laws.expected_tokens_shared_rate(0.6 ** np.arange(1, gamma + 1)), sd.expected_tokens(0.6, gamma), rtol=1e-13)


def test_beta_moments_are_those_of_the_density() -> None:
    nodes, weights = np.polynomial.legendre.leggauss(60)
    x, w = (nodes + 1) / 2, weights / 2
    density = x**7 * (1 - x) / (w @ (x**7 * (1 - x)))
    exact = [w @ (density * x**j) for j in range(1, 6)]
    assert near(laws.beta_moments(8, 2, 5), exact, rtol=1e-13)
    assert round(float(1 + sum(exact)), 3) == 3.857
    grid = laws.beta_moments([[8.0], [1.0]], [2.0, 5.0, 0.5], 5)
    assert grid.shape == (2, 3, 5)
    assert grid[0, 0].tolist() == laws.beta_moments(8, 2, 5).tolist()
    assert grid[1, 2].tolist() == laws.beta_moments(1, 0.5, 5).tolist()
    value = laws.expected_tokens_shared_rate(laws.beta_moments(8, 2, 5))
    assert near(w @ (density * sd.expected_tokens(x, 5)), value, rtol=1e-13)


@given(RATES, st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
def test_a_random_draft_length(alpha: float, weights: list[int]) -> None:
    mass = np.array(weights) / sum(weights)
    exact = sum((Fraction(w, sum(weights)) * mean(Fraction(alpha), d) for d, w in enumerate(weights)), Fraction(0))
    assert close(laws.expected_tokens_random_length(alpha, mass), exact)
    if alpha < 1 - 1e-6:  # the formula of the theory, which is 0/0 at alpha = 1
        form = (1 - alpha * (mass @ alpha ** np.arange(len(mass)))) / (1 - alpha)
        assert near(form, laws.expected_tokens_random_length(alpha, mass), rtol=1e-8)


def test_a_constant_draft_length_is_eq_1() -> None:
    grid = np.linspace(0, 1, 21)
    assert near(laws.expected_tokens_random_length(grid, np.eye(7)[6]), sd.expected_tokens(grid, 6), rtol=1e-15)


def test_rounds_of_a_log_by_hand() -> None:
    log = [3, 1, 5, 2, 1, 1, 4, 2]
    # Starts with gamma 1: 0, 2, 4, 5, 6; with gamma 9: 0, 3, 5, 6; the last round is cut at the end.
    assert laws.tokens_of_rounds(log, 1) == (5, 8 / 5)
    assert laws.tokens_of_rounds(log, 9) == (4, 2.0)
    assert laws.tokens_of_rounds(log, 0) == (8, 1.0)
    assert laws.tokens_of_rounds(log, 9, tokens=3) == (1, 3.0)


def iid_error(logs: list[list[int]], gamma: int) -> float:
    (row,) = dependence(logs, [gamma], 0.0, 1, np.random.default_rng(0))
    return row.error


def test_iid_error_is_noise_for_iid_outcomes_and_large_for_a_fading_draft() -> None:
    outcomes = tuple((np.random.default_rng(3).random(50_000) < 0.7).tolist())
    matches = yields_of_long(outcomes)
    for gamma in (1, 3, 7):
        assert abs(iid_error([matches], gamma)) < 0.01
        parts = iid_error([matches[:20_000], matches[20_000:]], gamma)
        assert parts == pytest.approx(iid_error([matches], gamma), abs=1e-3)
    # The first token is right with probability 0.7, later ones never: no error at gamma = 1, large errors for longer drafts.
    fading = np.where(outcomes, 2, 1)
    assert abs(iid_error([fading.tolist()], 1)) < 0.01
    wrong = iid_error([fading.tolist()], 5)
    assert wrong == pytest.approx(float(sd.expected_tokens(0.7, 5)) / 1.7 - 1, abs=0.02)


def yields_of_long(outcomes: tuple[bool, ...]) -> list[int]:
    out, left = [], 0
    for coin in reversed(outcomes):
        left = left + 1 if coin else 0
        out.append(left + 1)
    return out[::-1]


@given(st.lists(st.integers(1, 5), min_size=1, max_size=14), st.integers(1, 4))
def test_the_iid_error_equals_a_plain_walk(log: list[int], gamma: int) -> None:
    """Alpha is the share of positions, except the last, whose first drafted token is right; rounds come from the recursion."""
    outcomes = [length > 1 for length in log[:-1]]
    expected = recursion(Fraction(sum(outcomes), max(len(outcomes), 1)), gamma, len(log), lambda _: Fraction(1))
    rounds = laws.tokens_of_rounds(log, gamma)[0]
    assert near(1 + iid_error([log], gamma), float(rounds / expected), rtol=1e-12)


DATA = Path(os.environ.get("DECODESIM_DATA", Path(__file__).parents[3] / "shared" / "data")) / "acceptance"
LOGS = sorted(DATA.glob("*.jsonl"))


def acceptance_logs(name: str) -> list[list[int]]:
    return [json.loads(line)[name]["acc_len"] for file in LOGS for line in file.read_text().splitlines()]


def first_token_error(logs: list[list[int]], gamma: int) -> float:
    """Relative error of tokens per round if first-token outcomes are used for all tokens of a draft."""
    outcomes = [yields_of_long(tuple(length > 1 for length in log)) for log in logs]
    real, walked = (sum(laws.tokens_of_rounds(log, gamma)[0] for log in each) for each in (logs, outcomes))
    return real / walked - 1


@pytest.mark.skipif(not LOGS, reason="no acceptance logs: DECODESIM_DATA names the folder that holds acceptance/*.jsonl")
def test_first_token_outcomes_overstate_a_draft_that_reads_target_features() -> None:
    """EAGLE is right less often late in a draft, so the first token of a new draft overstates the next token of a running one."""
    logs = acceptance_logs("acc_eagle")
    outcomes, iid = ([error(logs, gamma) for gamma in range(1, 9)] for error in (first_token_error, iid_error))
    assert outcomes[0] == 0  # with drafts of one token all tokens are first tokens
    for errors in (outcomes, iid):
        assert all(after > before for before, after in itertools.pairwise(errors))
    # Positions directly after an accepted token are never first tokens of rounds; alpha over all positions is even higher.
    assert all(0 < one < other < one + 0.05 for one, other in zip(outcomes[1:], iid[1:], strict=True))
    fit = float(sd.acceptance_from_length(sum(map(len, logs)) / sum(laws.tokens_of_rounds(log, 7)[0] for log in logs), 7))
    # An alpha fitted to real rounds of seven tokens is right for seven (by construction) and too small for one.
    assert float(sd.expected_tokens(fit, 1)) < sum(map(len, logs)) / sum(laws.tokens_of_rounds(log, 1)[0] for log in logs) * 0.98


@pytest.mark.skipif(not LOGS, reason="no acceptance logs: DECODESIM_DATA names the folder that holds acceptance/*.jsonl")
def test_first_token_outcomes_are_right_for_a_draft_that_copies() -> None:
    """An n-gram draft copies the same tokens from a start one position later: the length falls by one, except for ties."""
    logs = acceptance_logs("acc_ngram")
    steps = [after - before for log in logs for before, after in itertools.pairwise(log) if before > 1]
    assert sum(step != -1 for step in steps) < 0.005 * len(steps)
    assert all(abs(first_token_error(logs, gamma)) < 2e-4 for gamma in range(1, 9))
    # They are still dependent: matches cluster, and long drafts accept whole clusters. The error is small, as there are few.
    errors = [iid_error(logs, gamma) for gamma in range(1, 9)]
    assert all(0.05 > before > after > 0 for before, after in itertools.pairwise(errors))


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: laws.expected_tokens_by_draft_position(0.5), "acceptance_rates must be a list"),
    (lambda: laws.expected_tokens_shared_rate(0.5), "moments must be a list"),
    (lambda: laws.expected_tokens_shared_rate([0.5, 0.6]), "moments must not increase"),
    (lambda: laws.expected_tokens_shared_rate([0.5, 0.1]), r"moments must be at least E\[B\]\^j"),
    (lambda: laws.expected_tokens_shared_rate([0.5, -0.1]), r"^moments\[1\] must be between 0 and 1, got -0\.1"),
    (lambda: laws.expected_tokens_shared_rate([1.5, 0.5]), r"^moments\[0\] must be between 0 and 1, got 1\.5"),
    (lambda: laws.expected_tokens_shared_rate([[0.9, 0.85], [0.5, 0.51]]), "^moments must not increase"),
    (lambda: laws.expected_tokens_shared_rate([[0.9, 0.85], [0.5, 0.24]]), r"^moments must be at least E\[B\]\^j"),
    (lambda: laws.beta_moments(0, 1, 3), "^a must be above 0"),
    (lambda: laws.beta_moments(1, [2, 0], 3), "^b must be above 0"),
    (lambda: laws.beta_moments(-0.5, 1, 3), r"^a must be at least 0, got -0\.5"),
    (lambda: laws.beta_moments(1, -0.5, 3), r"^b must be at least 0, got -0\.5"),
    (lambda: laws.expected_tokens_random_length(-0.1, [0.5, 0.5]), r"^acceptance_rate must be between 0 and 1, got -0\.1"),
    (lambda: laws.expected_tokens_random_length(1.1, [0.5, 0.5]), r"^acceptance_rate must be between 0 and 1, got 1\.1"),
    (lambda: laws.expected_tokens_markov(0.8, -0.9, 3), "correlation must be at least"),
    (lambda: laws.expected_tokens_markov(0.8, 0.1, 3, "draft"), "unknown chain 'draft'"),  # type: ignore[arg-type]
    (lambda: laws.expected_tokens_random_length(0.5, [0.5, 0.4]), r"length_pmf must sum to 1, got 0\.9"),
    (lambda: laws.tokens_of_rounds([1, 0], 3), r"lengths\[1\] must be at least 1, got 0"),
    (lambda: laws.tokens_of_rounds([], 3), "lengths must be a list"),
    (lambda: laws.tokens_of_rounds([1, 2], 3, tokens=3), "tokens must be between 1 and the length of the log=2, got 3"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()
