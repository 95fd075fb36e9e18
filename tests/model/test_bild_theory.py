"""Big Little Decoder in closed form: enumeration of segments in exact fractions, published numbers, limits and properties."""

import itertools
from collections.abc import Iterator
from fractions import Fraction
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.methods.bild import theory as bild
from model.methods.speculative import theory as sd
from tests.support.exact import RATES, close, near

T5 = 25.2 / 402.7
"""Weights of T5-small's decoder over T5-large's, [Kim2023] Table 2."""
CURVE = [(1, 8.0), (2, 9.0), (4, 10.0), (8, 16.0), (16, 20.0)]
DRAFTS = st.integers(1, 12)
VARIANTS = pytest.mark.parametrize("variant", bild.VARIANTS)


class Segment(NamedTuple):
    small: int
    inputs: int
    tokens: int
    rolled_back: bool
    extra: int


def segments(fallback: Fraction, rollback: Fraction, most: int) -> Iterator[tuple[Segment, Fraction]]:
    """All segments with their probabilities: the small model's decisions one by one, then the large model's."""
    for written in range(most + 1):
        chance = (1 - fallback) ** written * (fallback if written < most else 1)
        runs = written + 1 if written < most else most  # the last pass finds it unsure
        for kept in range(written + 1):
            taken_back = kept < written
            draws = (1 - rollback) ** kept * (rollback if taken_back else 1)
            yield Segment(runs, written + 1, kept + 1, taken_back, kept + 2 if taken_back else 0), chance * draws


def mean(of: Any, fallback: Fraction, rollback: Fraction, most: int) -> Fraction:
    return sum((chance * of(segment) for segment, chance in segments(fallback, rollback, most)), Fraction(0))


@given(RATES, RATES, DRAFTS)
def test_a_segment_by_enumeration(fallback: float, rollback: float, most: int) -> None:
    exact = Fraction(fallback), Fraction(rollback), most
    assert mean(lambda _: 1, *exact) == 1
    choice = fallback, rollback, most
    again = mean(lambda each: each.rolled_back, *exact)
    assert close(bild.rollback_probability(*choice), again)
    assert close(bild.expected_tokens(*choice), mean(lambda each: each.tokens, *exact))
    assert close(bild.expected_tokens(*choice, variant="code"), mean(lambda each: each.tokens + each.rolled_back, *exact))
    assert close(bild.small_runs(fallback, most), mean(lambda each: each.small, *exact))
    assert close(bild.large_inputs(fallback, most), mean(lambda each: each.inputs, *exact))
    assert close(bild.extra_large_inputs(*choice), mean(lambda each: each.extra, *exact), 1e-12)


@VARIANTS
@given(RATES, RATES, DRAFTS, st.floats(0, 2), st.floats(0, 1))
def test_ratios_over_many_segments(variant: str, fallback: float, rollback: float, most: int, ratio: float, memory: float) -> None:
    exact, choice = (Fraction(fallback), Fraction(rollback), most), (fallback, rollback, most)
    code = variant == "code"
    tokens = mean(lambda each: each.tokens + code * each.rolled_back, *exact)
    runs = mean(lambda each: 1 + code * each.rolled_back, *exact)
    small = mean(lambda each: each.small, *exact)
    inputs = mean(lambda each: each.inputs + code * each.extra, *exact)
    operations, weights = inputs + Fraction(ratio) * small, runs + Fraction(memory) * small
    assert close(bild.speedup(*choice, ratio, variant=variant), tokens / (runs + Fraction(ratio) * small), 1e-12)
    assert close(bild.operations_factor(*choice, ratio, variant=variant), operations / tokens, 1e-12)
    assert close(bild.memory_factor(*choice, memory, variant=variant), weights / tokens, 1e-12)
    assert close(bild.intensity_factor(*choice, ratio, memory, variant=variant), operations / weights, 1e-12)


@VARIANTS
@given(RATES, RATES, st.integers(1, 15), st.floats(0, 2))
@example(0.1, 0.2, 15, 0.5)  # the widest pass is the largest measured one
def test_a_measured_verification_by_enumeration(variant: str, fallback: float, rollback: float, most: int, ratio: float) -> None:
    exact, code = (Fraction(fallback), Fraction(rollback), most), variant == "code"
    times = [Fraction(float(time)) / 8 for time in np.interp(np.arange(17), *zip(*CURVE, strict=True))]
    time = mean(lambda each: times[each.inputs] + (code and each.rolled_back and times[each.extra]), *exact)
    tokens = mean(lambda each: each.tokens + code * each.rolled_back, *exact)
    small = mean(lambda each: each.small, *exact)
    found = bild.speedup(fallback, rollback, most, ratio, variant=variant, verify_cost=CURVE)
    assert close(found, tokens / (time + Fraction(ratio) * small), 1e-12)


# --- Property 18: limits -----------------------------------------------------------------------------------------------


@given(RATES, RATES, DRAFTS, st.floats(0, 2))
def test_limits_are_speculative_and_plain_decoding(fallback: float, rollback: float, most: int, ratio: float) -> None:
    alpha = (1 - fallback) * (1 - rollback)
    assert near(bild.expected_tokens(fallback, rollback, most), sd.expected_tokens(alpha, most))
    # Never unsure: a draft of fixed length.
    assert near(bild.speedup(0, rollback, most, ratio), sd.speedup(1 - rollback, most, ratio))
    assert near(bild.speedup(0, rollback, most, 0.1, verify_cost=CURVE), sd.speedup(1 - rollback, most, 0.1, verify_cost=CURVE))
    # Always unsure: the large model alone, and a pass of the small one per token.
    assert near(bild.speedup(1, rollback, most, ratio), 1 / (1 + ratio))
    assert float(bild.small_runs(1, most)) == float(bild.large_inputs(1, most)) == 1


@given(RATES, DRAFTS)
def test_without_rollbacks_the_variants_are_equal(fallback: float, most: int) -> None:
    for form, more in ((bild.speedup, [0.3]), (bild.operations_factor, [0.3]), (bild.memory_factor, [0.3])):
        assert float(form(fallback, 0, most, *more)) == float(form(fallback, 0, most, *more, variant="code"))
    assert float(bild.extra_large_inputs(fallback, 0, most)) == float(bild.rollback_probability(fallback, 0, most)) == 0


@given(RATES, RATES, DRAFTS)
def test_variants_differ_by_the_rollbacks(fallback: float, rollback: float, most: int) -> None:
    """Property 19: in tokens, and in passes of the large model."""
    again = float(bild.rollback_probability(fallback, rollback, most))
    tokens = bild.expected_tokens(fallback, rollback, most, variant="code") - bild.expected_tokens(fallback, rollback, most)
    assert float(tokens) == pytest.approx(again, abs=1e-12)
    runs = [float(bild.memory_factor(fallback, rollback, most, 0, variant=name)) for name in bild.VARIANTS]
    counts = [float(bild.expected_tokens(fallback, rollback, most, variant=name)) for name in bild.VARIANTS]
    assert runs[1] * counts[1] - runs[0] * counts[0] == pytest.approx(again, abs=1e-12)


@given(RATES, RATES, st.floats(0, 1), DRAFTS)
def test_more_fallbacks_or_rollbacks_give_fewer_tokens(fallback: float, one: float, other: float, most: int) -> None:
    low, high = sorted((one, other))
    for first, second in (((fallback, low), (fallback, high)), ((low, fallback), (high, fallback))):
        assert bild.expected_tokens(*second, most) <= bild.expected_tokens(*first, most) * (1 + 1e-14)
    assert bild.expected_tokens(fallback, low, most) <= bild.expected_tokens(fallback, low, most + 1) * (1 + 1e-14)
    assert bild.small_runs(high, most) <= bild.small_runs(low, most) * (1 + 1e-14)


@given(RATES, RATES, RATES, DRAFTS)
def test_intensity_of_variant_paper_is_independent_of_rollbacks(fallback: float, one: float, other: float, most: int) -> None:
    first, second = (bild.intensity_factor(fallback, rate, most, T5, T5) for rate in (one, other))
    assert near(first, second, rtol=1e-12)


# --- Published numbers --------------------------------------------------------------------------------------------------


def test_figure_8_implies_the_fallback_rate() -> None:
    """An intensity of 5 needs f = .110; then memory operations are .212 to .220, and arithmetic is 'slightly higher'."""
    grid = np.arange(1, 1000) / 1000
    found = grid[np.abs(bild.intensity_factor(grid, 0, 10, T5, T5) - 5).argmin()]
    assert round(float(found), 3) == 0.110
    assert [round(float(bild.memory_factor(0.110, rate, 10, T5)), 3) for rate in (0, 0.01)] == [0.212, 0.220]
    assert [round(float(bild.operations_factor(0.110, rate, 10, T5)), 2) for rate in (0, 0.01)] == [1.06, 1.10]


def test_the_pass_after_a_rollback_decides_the_intensity_of_variant_code() -> None:
    again = [float(bild.rollback_probability(0.11, rate, 10)) for rate in (0, 0.01, 0.02)]
    narrow = [(bild.large_inputs(0.11, 10) + more + T5 * bild.small_runs(0.11, 10)) / (1 + more + T5 * bild.small_runs(0.11, 10))
              for more in again]  # fmt: skip
    assert [round(float(value), 2) for value in narrow] == [5.0, 4.85, 4.72]
    wide = [float(bild.intensity_factor(0.11, rate, 10, T5, T5, variant="code")) for rate in (0, 0.01, 0.02)]
    assert wide == sorted(wide)
    assert round(float(bild.extra_large_inputs(0.11, 0.01, 10)), 3) == 0.295


def test_a_speedup_implies_the_cost_ratio() -> None:
    """1.85x needs c = .386 to .408, unlike the ratio of layers (6 of 24) or of weights."""
    needed = [float(bild.effective_cost_ratio(1.85, 0.11, rate, 10)) for rate in (0.01, 0)]
    assert [round(value, 3) for value in needed] == [0.386, 0.408]
    for rate, c in zip((0.01, 0), needed, strict=True):
        assert near(bild.speedup(0.11, rate, 10, c), 1.85)
    layers = [float(bild.speedup(0.11, rate, 10, 6 / 24)) for rate in (0.01, 0)]
    weights = [float(bild.speedup(0.11, rate, 10, T5)) for rate in (0.01, 0)]
    assert (round(layers[0], 2), round(layers[1], 2)) == (2.47, 2.56)
    assert (round(weights[0], 1), round(weights[1], 1)) == (4.5, 4.7)


@VARIANTS
@given(RATES, RATES, DRAFTS, st.floats(0, 3))
def test_effective_cost_ratio_inverts_the_speedup(variant: str, fallback: float, rollback: float, most: int, ratio: float) -> None:
    speed = bild.speedup(fallback, rollback, most, ratio, variant=variant)
    found = float(bild.effective_cost_ratio(speed * (1 - 1e-12), fallback, rollback, most, variant=variant))
    assert found == pytest.approx(ratio, abs=1e-8)
    assert float(bild.effective_cost_ratio(1, 1, rollback, most, variant=variant)) == 0  # nothing to spare, but enough
    most_of_all = bild.speedup(fallback, rollback, most, 0, variant=variant)
    assert np.isnan(bild.effective_cost_ratio(most_of_all * 1.001, fallback, rollback, most, variant=variant))


# --- Arguments ----------------------------------------------------------------------------------------------------------


BAD: list[tuple[Any, str]] = [
    (lambda: bild.speedup(0.1, 0.1, 10, 0.2, variant="papr"), "unknown variant 'papr'; did you mean paper"),
    (lambda: bild.speedup(0.1, 0.1, 10, 0.2, verify_cost=[(1, 1.0), (10, 2.0)]), "width must be at most 10, .* got 11"),
    (lambda: bild.effective_cost_ratio(0, 0.1, 0.1, 10), "speed must be above 0, got 0"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Any, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()


def test_variants_broadcast() -> None:
    for variant, curve in itertools.product(bild.VARIANTS, (None, CURVE)):
        grid = bild.speedup([0.1, 0.3], [[0.0], [0.2]], 10, 0.2, variant=variant, verify_cost=curve)
        for (row, rollback), (column, fallback) in itertools.product(enumerate((0.0, 0.2)), enumerate((0.1, 0.3))):
            assert near(grid[row, column], bild.speedup(fallback, rollback, 10, 0.2, variant=variant, verify_cost=curve))


@VARIANTS
def test_empty_arrays_are_accepted(variant: str) -> None:
    """They need no measured pass either."""
    for curve in (None, [(1, 8.0)]):
        assert bild.speedup(0.1, [], np.zeros((3, 0)), 0.2, variant=variant, verify_cost=curve).shape == (3, 0)
    assert bild.extra_large_inputs([], 0.1, []).shape == (0,)
