"""Speculative decoding of batches, from measured pass times."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.width_curve import PassTimes
from model.methods.speculative import theory as sd
from model.methods.speculative.batch_break_even import batched_speedup, largest_batch
from tests.support.exact import near

BATCHES, WIDTHS, CONTEXTS = np.array([1, 8, 64]), np.array([1, 2, 4, 9]), np.array([0, 4096])


def roofline(read: float, compute: float) -> PassTimes:
    """Pass time as the maximum of reading weights and caches, and of computing all tokens."""
    batch, width, context = np.meshgrid(BATCHES, WIDTHS, CONTEXTS, indexing="ij")
    return PassTimes(BATCHES, WIDTHS, CONTEXTS, np.maximum(read + 1e-4 * batch * context, compute * batch * width))


TARGET = roofline(10.0, 0.15)
DRAFT = PassTimes(BATCHES, [1], CONTEXTS, np.full((3, 1, 2), 1.0))


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("gamma", [0, 1, 3, 8])
def test_speedup_is_expected_tokens_over_time(batch: int, gamma: int) -> None:
    alpha = Fraction(4, 5)
    tokens = sum(alpha**j for j in range(gamma + 1))
    wide, narrow = (Fraction(max(10.0, 0.15 * batch * width)) for width in (gamma + 1, 1))
    exact = tokens * narrow / (gamma * Fraction(3, 4) + wide)
    draft = PassTimes(BATCHES, [1], CONTEXTS, np.full((3, 1, 2), 0.75))
    assert near(batched_speedup(0.8, gamma, TARGET, draft, batch, 0), float(exact), rtol=1e-14)


@given(st.floats(0, 1), st.integers(0, 8), st.floats(1, 64), st.floats(0, 4096))
def test_one_batch_equals_the_speedup_with_its_verify_cost(alpha: float, gamma: int, batch: float, context: float) -> None:
    curve = [(int(width), float(TARGET(batch, width, context))) for width in WIDTHS]
    ratio = float(DRAFT(batch, 1, context)) / curve[0][1]
    single = sd.speedup(alpha, gamma, ratio, verify_cost=curve)
    assert near(batched_speedup(alpha, gamma, TARGET, DRAFT, batch, context), single, rtol=1e-12)


def test_flat_times_give_theorem_3_8_for_every_batch() -> None:
    flat = PassTimes(BATCHES, WIDTHS, CONTEXTS, np.full((3, 4, 2), 8.0))
    alpha, gamma = np.linspace(0, 1, 5), np.arange(9)[:, None]
    for batch in BATCHES:
        assert near(batched_speedup(alpha, gamma, flat, DRAFT, batch, 7), sd.speedup(alpha, gamma, 1 / 8), rtol=1e-14)


def test_no_draft_is_plain_decoding_and_functions_broadcast() -> None:
    alpha, batch = np.linspace(0, 1, 4), BATCHES[:, None]
    assert batched_speedup(alpha, 0, TARGET, DRAFT, batch, 100).tolist() == [[1.0] * 4] * 3
    assert batched_speedup(alpha, 3, TARGET, DRAFT, batch, 100).shape == (3, 4)


def test_a_compute_bound_batch_gains_less() -> None:
    speeds = batched_speedup(0.8, 3, TARGET, DRAFT, [1, 8, 64], 0)
    assert speeds[0] == speeds[1]  # both batches are bound by reading the weights, at either width
    assert speeds[2] < 1 < speeds[1]


@pytest.mark.parametrize("alpha", [0.05, 0.3, 0.8, 0.99, 1.0])
@pytest.mark.parametrize("context", [0, 4096])
def test_largest_batch_ends_the_unbroken_range_of_faster_batches(alpha: float, context: float) -> None:
    gain = largest_batch(alpha, TARGET, DRAFT, context)
    every = {
        int(batch): [float(batched_speedup(alpha, gamma, TARGET, DRAFT, batch, context)) for gamma in range(9)] for batch in BATCHES
    }
    assert gain.batches == tuple(every)
    for batch, length, speed in zip(gain.batches, gain.draft_lengths, gain.speedups, strict=True):
        assert speed == pytest.approx(max(every[batch]), rel=1e-14)
        assert every[batch][length] == pytest.approx(speed, rel=1e-14)
        assert all(shorter < speed for shorter in every[batch][:length])
    row = [max(every[int(batch)]) > 1 for batch in BATCHES]
    expected = 0
    for batch, pays in zip(BATCHES, row, strict=True):
        if not pays:
            break
        expected = int(batch)
    assert gain.largest == expected


def test_limits_of_the_largest_batch() -> None:
    assert largest_batch(0.0, TARGET, DRAFT, 0).largest == 0  # nothing is accepted
    assert largest_batch(0.0, TARGET, DRAFT, 0).draft_lengths == (0, 0, 0)
    assert largest_batch(0.9, TARGET, DRAFT, 0).largest == 8
    flat = PassTimes(BATCHES, WIDTHS, CONTEXTS, np.full((3, 4, 2), 8.0))
    assert largest_batch(0.9, flat, DRAFT, 0).largest == 64  # multi-token passes cost nothing more at any batch


def test_a_faster_batch_after_a_slower_one_is_not_reached() -> None:
    target = PassTimes([1, 8, 64], [1, 4], [0], [[[10.0], [10.0]], [[10.0], [100.0]], [[10.0], [10.0]]])
    gain = largest_batch(0.8, target, PassTimes([1, 64], [1], [0], [[[1.0]], [[1.0]]]), 0)
    assert [speed > 1 for speed in gain.speedups] == [True, False, True]
    assert gain.largest == 1
    first = PassTimes([1, 8], [1, 4], [0], [[[10.0], [100.0]], [[10.0], [10.0]]])
    assert largest_batch(0.8, first, PassTimes([1, 8], [1], [0], [[[1.0]], [[1.0]]]), 0).largest == 0


def test_unmeasured_sizes_are_refused() -> None:
    with pytest.raises(ParameterError, match="width must be between 1 and 9, the measured range, got 10"):
        batched_speedup(0.8, 9, TARGET, DRAFT, 1, 0)
    with pytest.raises(ParameterError, match="batch must be between 1 and 64, the measured range, got 65"):
        batched_speedup(0.8, 3, TARGET, DRAFT, 65, 0)
    for length in (-1, 1.5):
        with pytest.raises(ParameterError, match=f"draft_length must be .*, got {length}"):
            batched_speedup(0.8, length, TARGET, DRAFT, 1, 0)
    with pytest.raises(ParameterError, match="context must be between 0 and 4096"):
        largest_batch(0.8, TARGET, DRAFT, 5000)
    with pytest.raises(ParameterError, match=r"acceptance_rate must be between 0 and 1, got 1\.5"):
        largest_batch(1.5, TARGET, DRAFT, 0)
    with pytest.raises(ParameterError, match=r"acceptance_rate must be a number, got \[0\.5, 0\.6\]"):
        largest_batch([0.5, 0.6], TARGET, DRAFT, 0)  # type: ignore[arg-type]
    small = PassTimes([1, 8], [1], [0], [[[1.0]], [[1.0]]])
    with pytest.raises(ParameterError, match="batch must be between 1 and 8"):
        largest_batch(0.8, TARGET, small, 0)
