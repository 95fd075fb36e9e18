"""Policies of draft length: the rules of engines, and optima by search."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.serving import decodings, draft_policies
from model.serving.draft_policies import Adaptive, AdmittedBySurvival, BatchSchedule, Goodput, Oracle, Static, StepView
from sim.theorems.served_examples import LinearPrices

MODEL = decodings.MODEL


def view(count: int, ahead: Any = None) -> StepView:
    return StepView(count, 0, 100 * count, np.arange(count), None if ahead is None else np.array(ahead))


def told(policy: Any, drafted: Any, accepted: Any) -> None:
    policy.learn(np.arange(len(drafted)), np.array(drafted), np.array(accepted))


@given(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 5)), min_size=1, max_size=6), st.integers(1, 60))
def test_a_schedule_has_the_length_of_its_range(spans: list[tuple[int, int]], sequences: int) -> None:
    ranges, first = [], 1
    for span, length in spans:
        ranges.append([first, first + span - 1, length])
        first += span
    expected = next((length for low, high, length in ranges if low <= sequences <= high), ranges[-1][2])
    policy = BatchSchedule(ranges)
    assert (policy.limits(view(sequences)), policy.longest) == (expected, max(length for _, _, length in ranges))


@pytest.mark.parametrize(("ranges", "message"), [
    ([[1, 4, 3], [6, 8, 0]], "range 2 of a schedule must begin at 5, got 6: it leaves a gap"),
    ([[1, 4, 3], [4, 8, 0]], "range 2 of a schedule must begin at 5, got 4: it overlaps the range before it"),
    ([[2, 4, 3]], "range 1 of a schedule must begin at 1, got 2: it leaves a gap"), ([[1, 4]], "range 1 of a schedule must be"),
    ([], "a schedule must be a list of ranges"), ([[1, 0, 3]], "last of range 1 must be at least 1"),
    ([[1, 4, -1]], "K of range 1 must be between 0"), ("1,4,3", "a schedule must be a list of ranges"),
])  # fmt: skip
def test_impossible_schedules_are_refused(ranges: Any, message: str) -> None:
    with pytest.raises(ParameterError) as refused:
        BatchSchedule(ranges)
    assert message in str(refused.value)


def test_the_adaptive_rule_moves_as_the_engine_says() -> None:
    """SGLang: nothing before 10 batches, then every 5; up above length - .5, down at the candidate below - .75."""
    policy = Adaptive({1: [1, 3, 5]})
    lengths = []
    for _ in range(40):
        lengths.append(policy.limits(view(1)))
        told(policy, [lengths[-1]], [0])
    # 3 drafted, none accepted: at batch 15 to 1, where it stays, as there is none below.
    assert lengths == [3] * 15 + [1] * 25
    policy = Adaptive({1: [1, 3, 5]})
    for _ in range(30):
        told(policy, [3], [2])
    assert policy.limits(view(1)) == 3  # 2 > 1 - .75, and not above 3 - .5
    policy = Adaptive({1: [0, 2]})
    assert policy.limits(view(1)) == 0
    for _ in range(15):
        told(policy, [0], [0])
    assert policy.limits(view(1)) == 2  # nothing is seen at 0: the next one is tried


def test_the_adaptive_rule_keeps_a_state_for_each_slot() -> None:
    policy = Adaptive({1: [1, 3], 4: [0, 1]})
    for _ in range(20):
        told(policy, [1] * 2, [1] * 2)
    assert [policy.limits(view(count)) for count in (1, 3, 4, 100)] == [3, 3, 0, 0]


@given(rate=st.floats(0.05, 0.95), sequences=st.integers(1, 40), token=st.floats(0, 0.2), drafting=st.floats(0, 0.5))
def test_goodput_takes_the_best_length_of_its_estimate(rate: float, sequences: int, token: float, drafting: float) -> None:
    prices = LinearPrices(step=1.0, token=token, drafting=drafting)
    policy = Goodput(5, prices, MODEL, prior=(1000 * rate, 1000))
    speeds = [
        sequences * sum(rate**each for each in range(length + 1))
        / draft_policies.step_seconds(prices, sequences, 100 * sequences, length, MODEL)
        for length in range(6)
    ]  # fmt: skip
    assert speeds[policy.limits(view(sequences))] == pytest.approx(max(speeds), rel=1e-9)


def test_goodput_forgets_what_is_long_ago() -> None:
    """Counts of a step weigh F times as much after the next: of the steps before the last n, F^n of their tokens is left."""
    policy, weight, steps = Goodput(4, LinearPrices(), MODEL), Goodput.FORGET, 600
    for _ in range(5000):
        told(policy, [1], [1])
    assert policy.rate == pytest.approx(1.0, abs=1e-3)
    for _ in range(steps):
        told(policy, [1], [0])
    assert policy.rate == pytest.approx(weight**steps, rel=1e-3)
    assert policy.rate < 0.06


def test_goodput_learns_the_rate_of_tested_tokens() -> None:
    """3 drafted, 1 accepted: 2 tested. The estimate tends to accepted over tested."""
    policy = Goodput(3, LinearPrices(), MODEL)
    for _ in range(3000):
        told(policy, [3, 0], [1, 0])
    assert policy.rate == pytest.approx(0.5, abs=1e-3)


@given(st.lists(st.floats(0.1, 0.95), min_size=1, max_size=4), st.integers(1, 6), st.floats(0.02, 0.3))
def test_admission_by_survival_is_the_best_of_all_numbers(rates: list[float], count: int, token: float) -> None:
    """Where time grows linearly with tokens, no other number of admitted tokens is faster."""
    prices = LinearPrices(step=1.0, token=token, drafting=0.0)
    policy = AdmittedBySurvival(rates, prices, MODEL, 8)
    slots = sorted((float(np.prod(rates[: each + 1])) for each in range(len(rates)) for _ in range(count)), reverse=True)
    speeds = [(count + sum(slots[:number])) / (1 + token * (count + number)) for number in range(len(slots) + 1)]
    chosen = policy.limits(view(count))
    assert speeds[int(chosen.sum())] == pytest.approx(max(speeds), rel=1e-9)
    assert chosen.max() - chosen.min() <= 1  # all sequences are alike


def test_sequences_that_accept_more_are_admitted_more() -> None:
    policy = AdmittedBySurvival([0.6] * 4, LinearPrices(step=1.0, token=0.15, drafting=0.0), MODEL, 8)
    for _ in range(40):
        told(policy, [4, 4], [4, 0])
    first, second = policy.limits(view(2)).tolist()
    assert first > second
    policy.forget(0)
    again, second = policy.limits(view(2)).tolist()
    assert second <= again < first


@given(st.lists(st.integers(0, 4), min_size=1, max_size=5), st.floats(0, 0.4), st.floats(0, 0.4))
def test_the_oracle_drafts_nothing_in_vain(ahead: list[int], token: float, drafting: float) -> None:
    prices = LinearPrices(step=1.0, token=token, drafting=drafting)
    chosen = Oracle(4, prices, MODEL).limits(view(len(ahead), ahead))
    assert (chosen <= ahead).all()

    def speed(lengths: Any) -> float:
        total, deepest = int(lengths.sum()), int(lengths.max())
        return (len(ahead) + total) / (1 + token * (len(ahead) + total) + drafting * deepest)

    assert speed(chosen) == pytest.approx(max(speed(np.minimum(ahead, most)) for most in range(5)), rel=1e-9)


@pytest.mark.parametrize("slots", [{}, {1: []}, {0: [1]}, {1: [3, 1]}, {1: [-1]}])
def test_impossible_slots_are_refused(slots: Any) -> None:
    with pytest.raises(ParameterError):
        Adaptive(slots)
    with pytest.raises(ParameterError):
        Static(-1)
