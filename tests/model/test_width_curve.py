"""Measured times of a pass, by width, and by batch, width and context."""

import itertools
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.width_curve import PassTimes, WidthCurve, as_curve
from tests.support.exact import near

CURVE = WidthCurve([(1, 10.0), (2, 10.3), (5, 11.2), (9, 17.0)])
TIMES = PassTimes([1, 8, 32], [1, 4, 16], [0, 1024], np.random.default_rng(5).uniform(1, 2, (3, 3, 2)))


# --- By width --------------------------------------------------------------------------------------------------------


@given(st.lists(st.floats(0.1, 1e6), min_size=1, max_size=6).map(sorted), st.data())
def test_curve_is_exact_at_its_points_and_linear_between(times: list[float], data: st.DataObject) -> None:
    gaps = data.draw(st.lists(st.integers(1, 50), min_size=len(times) - 1, max_size=len(times) - 1))
    widths = [1, *(1 + np.cumsum(gaps, dtype=int)).tolist()]
    curve = WidthCurve(zip(widths, times, strict=True))
    assert curve(widths).tolist() == times
    assert curve.last == widths[-1]
    for (left, low), (right, high) in itertools.pairwise(zip(widths, times, strict=True)):
        width = left + data.draw(st.floats(0, 1)) * (right - left)  # rounded first: on a steep line the last digit matters
        assert near(curve(width), low + (width - left) / (right - left) * (high - low), rtol=1e-12)


def test_curves_from_pairs_and_mappings_are_equal() -> None:
    pairs = [(1, 2.0), (3, 3.0)]
    for made in (WidthCurve(pairs), WidthCurve(dict(pairs)), WidthCurve(iter(pairs)), as_curve(pairs)):
        assert made(np.array([[1, 2], [3, 3]])).tolist() == [[2, 2.5], [3, 3]]
        assert made.relative(2).shape == ()
        assert made.relative([1, 2, 3]).tolist() == [1, 1.25, 1.5]
    assert as_curve(CURVE) is CURVE


def test_relative_costs_have_no_unit() -> None:
    seconds = WidthCurve([(width, time / 1000) for width, time in zip([1, 2, 5, 9], CURVE.times, strict=True)])
    wide = np.linspace(1, 9, 33)
    assert near(seconds.relative(wide), CURVE.relative(wide), rtol=1e-14)
    assert float(CURVE.relative(1)) == 1


def test_falling_times_are_used_with_one_warning() -> None:
    with pytest.warns(UserWarning, match="got 0.9 at width 2 after 1; it is used as it is") as caught:
        curve = WidthCurve([(1, 1.0), (2, 0.9), (4, 1.2), (8, 1.1)])
    assert len(caught) == 1  # for two dips
    assert caught[0].filename == __file__
    assert not curve.monotone
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # no further warning when it is used
        assert curve([1, 2, 3, 4, 8]) == pytest.approx([1, 0.9, 1.05, 1.2, 1.1], rel=1e-15)
        assert WidthCurve([(1, 1.0), (2, 1.0)]).monotone  # flat is no dip
    with pytest.warns(UserWarning, match="got 9.75 at width 4 after 10.25;"):  # after a flat stretch and a small rise
        assert not WidthCurve([(1, 10.0), (2, 10.0), (3, 10.25), (4, 9.75)]).monotone


# --- By batch, width and context -------------------------------------------------------------------------------------


def test_pass_times_are_exact_at_their_points() -> None:
    batch, width, context = np.meshgrid(TIMES.batches, TIMES.widths, TIMES.contexts, indexing="ij")
    assert np.array_equal(TIMES(batch, width, context), TIMES.times)


@given(st.lists(st.floats(0, 3), min_size=8, max_size=8), st.floats(1, 32), st.floats(1, 16), st.floats(0, 1024))
def test_multilinear_times_are_reproduced_everywhere(parts: list[float], batch: float, width: float, context: float) -> None:
    """The interpolation is exact for a + b x + c y + d z + e x y + ... + h x y z on any grid."""

    def law(x: Any, y: Any, z: Any) -> Any:
        terms = [x**i * y**j * (z / 1024) ** k for i, j, k in itertools.product((0, 1), repeat=3)]
        return 0.5 + sum(part * term for part, term in zip(parts, terms, strict=True))

    grid = np.meshgrid(TIMES.batches, TIMES.widths, TIMES.contexts, indexing="ij")
    made = PassTimes(TIMES.batches, TIMES.widths, TIMES.contexts, law(*grid))
    assert near(made(batch, width, context), law(batch, width, context), rtol=1e-12)


@given(st.floats(1, 32), st.floats(1, 16), st.floats(0, 1024))
def test_interpolated_times_lie_between_the_measured(batch: float, width: float, context: float) -> None:
    axes = ((TIMES.batches, batch), (TIMES.widths, width), (TIMES.contexts, context))
    cells = [axis[np.searchsorted(axis[:-1], at, side="right") - 1 :][:2] for axis, at in axes]
    corners = [float(TIMES(*corner)) for corner in itertools.product(*cells)]
    assert min(corners) * (1 - 1e-14) <= float(TIMES(batch, width, context)) <= max(corners) * (1 + 1e-14)


def test_pass_times_broadcast_and_an_axis_may_have_one_point() -> None:
    one = PassTimes([4], [1], [512], [[[3.0]]])
    assert one(4, 1, 512).shape == ()
    assert one([4, 4], [[1], [1], [1]], 512).tolist() == [[3, 3]] * 3
    assert TIMES(np.array([1, 8])[:, None], [1, 2, 16], 100).shape == (2, 3)
    for point, message in (((5, 1, 512), "batch must be 4, .* got 5"), ((4, 2, 512), "width must be 1, .* got 2"),
                           ((4, 1, 511), "context must be 512, .* got 511; measure it too")):  # fmt: skip
        with pytest.raises(ParameterError, match=message):
            one(*point)


def test_pass_times_copy_their_input() -> None:
    batches, widths, contexts, times = (np.array(values) for values in ([1.0, 8.0], [1.0], [0.0], [[[2.0]], [[3.0]]]))
    table = PassTimes(batches, widths, contexts, times)
    for array in (batches, widths, contexts, times):
        array += 1
    assert table([1, 8], 1, 0).tolist() == [2, 3]


def test_pass_times_with_one_batch_and_context_are_a_width_curve() -> None:
    widths, times = [1, 2, 5, 9], CURVE.times
    table = PassTimes([1], widths, [0], times[None, :, None])
    wide = np.linspace(1, 9, 17)
    assert near(table(1, wide, 0), CURVE(wide), rtol=1e-15)


# --- Invalid tables and points -------------------------------------------------------------------------------------------------


ONES = [[[1.0], [1.0]], [[1.0], [1.0]]]
BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: WidthCurve([(2, 1.0), (3, 1.0)]), "verify_cost must start at width 1, got 2; .* measure it"),
    (lambda: WidthCurve([(1, 1.0), (4, 1.0), (3, 1.0)]), "verify_cost widths must increase, got 3 after 4"),
    (lambda: WidthCurve([(1, 1.0), (2, 1.0), (5, 1.0), (5, 1.0), (4, 1.0)]), "verify_cost widths must increase, got 5 after 5"),
    (lambda: WidthCurve([(1, 1.0), (1, 1.0)]), "verify_cost widths must increase, got 1 after 1"),
    (lambda: WidthCurve([(1, 1.0), (2.5, 1.0)]), r"verify_cost widths\[1\] must be a whole number, got 2\.5"),  # type: ignore[list-item]
    (lambda: WidthCurve([(0, 1.0), (1, 1.0)]), r"verify_cost widths\[0\] must be at least 1, got 0"),
    (lambda: WidthCurve([(1, 0.0)]), "verify_cost must hold times above 0"),
    (lambda: WidthCurve([(1, 1.0), (2, -1.0)]), r"verify_cost\[1\] must be at least 0, got -1"),
    (lambda: WidthCurve([(1, float("nan"))]), r"verify_cost\[0\] must be at least 0, got nan"),
    (lambda: WidthCurve([(1, 1.0), (2, float("inf"))]), r"verify_cost\[1\] must be .*got inf"),
    (lambda: WidthCurve([]), "verify_cost must be pairs of a width and a time"),
    (lambda: WidthCurve([(1, 1.0, 1.0)]), "verify_cost must be pairs"),  # type: ignore[list-item]
    (lambda: WidthCurve([(1, "fast")]), "verify_cost must be pairs"),  # type: ignore[list-item]
    (lambda: WidthCurve([(1, 1.0), (2,)]), "verify_cost must be pairs"),  # type: ignore[list-item]
    (lambda: CURVE(10), "width must be at most 9, the last width of verify_cost, got 10; measure wider passes or draft less"),
    (lambda: CURVE([2, 9.001]), r"width must be at most 9, the last width of verify_cost, got 9\.001"),
    (lambda: CURVE.relative(0), "width must be at least 1, got 0"),
    (lambda: PassTimes([1, 8], [2, 4], [0], ONES), "widths must start at 1, got 2; measure a pass over one token"),
    (lambda: PassTimes([8, 1], [1, 4], [0], ONES), "batches must increase, got 1 after 8"),
    (lambda: PassTimes([1, 8], [1, 4], [], ONES), "contexts must be a list of at least one number"),
    (lambda: PassTimes(1, [1, 4], [0], ONES), "batches must be a list of at least one number, got 1"),
    (lambda: PassTimes([0, 8], [1, 4], [0], ONES), r"batches\[0\] must be at least 1, got 0"),
    (lambda: PassTimes([1, 8], [1, 4], [-1], ONES), r"contexts\[0\] must be at least 0, got -1"),
    (lambda: PassTimes([1, 8], [0, 4], [0], ONES), r"^widths\[0\] must be at least 1, got 0"),
    (lambda: PassTimes([1, 8], [1], [0], ONES), r"times must have the shape \[2, 1, 1\] .*, got \[2, 2, 1\]"),
    (lambda: PassTimes([1, 8], [1, 4], [0], [[[1.0], [0.0]], [[1.0], [1.0]]]), "times must hold times above 0"),
    (lambda: PassTimes([1, 8], [1, 4], [0], [[[1.0], [-2.0]], [[1.0], [1.0]]]), r"times\[0, 1, 0\] must be at least 0, got -2"),
    (lambda: PassTimes([1, 8], [1, 4], [0], [[[1.0], [1.0]], [[1.0]]]), "times must be numbers"),
    (lambda: TIMES(33, 1, 0), "batch must be between 1 and 32, the measured range, got 33; measure it too"),
    (lambda: TIMES(0.5, 1, 0), r"batch must be between 1 and 32, the measured range, got 0\.5"),
    (lambda: TIMES(1, [4, 17, 18], 0), "width must be between 1 and 16, the measured range, got 17"),
    (lambda: TIMES(1, 1, 2048), "context must be between 0 and 1024, the measured range, got 2048"),
    (lambda: TIMES(1, 1, float("nan")), "context must be .*got nan"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_tables_and_points_outside_are_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        call()
