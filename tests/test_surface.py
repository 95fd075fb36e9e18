"""Surfaces of measured times: what was measured comes back, what lies between is between, efficiency is held beyond."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model import checks
from model.surface import NONE, Estimate, Surface, neighbours, residuals

AXES = st.lists(st.integers(1, 5000), min_size=1, max_size=5, unique=True)
TIMES = st.floats(1e-5, 10.0)  # well above the nanosecond that stands for nothing


@st.composite
def tables(draw):
    """A full grid of widths and contexts in any order, with any times."""
    widths, contexts = draw(AXES), draw(AXES)
    points = draw(st.permutations([(width, context) for width in widths for context in contexts]))
    times = draw(st.lists(TIMES, min_size=len(points), max_size=len(points)))
    return np.array(points, dtype=float), np.array(times)


def surface(points, times, **more):
    """A surface over widths and contexts."""
    return Surface({"width": points[:, 0], "context": points[:, 1]}, times, **more)


@given(tables())
def test_measured_points_come_back_to_the_last_bit(table):
    points, times = table
    found = surface(points, times, spread=0.01)(points[:, 0], points[:, 1])
    assert found.seconds.tolist() == times.tolist()
    assert found.error.tolist() == [0.01] * times.size


@given(tables(), st.floats(0, 1), st.floats(0, 1))
def test_between_points_is_between_the_corners_of_their_cell(table, across, along):
    points, times = table
    grid = surface(points, times)
    where, corners = [], []
    for axis, part in zip(grid.axes, (across, along), strict=True):
        low = min(int(part * (axis.size - 1)), max(axis.size - 2, 0))
        high = min(low + 1, axis.size - 1)
        where.append(axis[low] + (axis[high] - axis[low]) * part)
        corners.append((low, high))
    cell = grid.times[np.ix_(*corners)]
    found = float(grid(*where).seconds)
    assert cell.min() * (1 - 1e-9) <= found <= cell.max() * (1 + 1e-9)


@given(tables(), st.floats(1e-3, 1e3), st.integers(1, 6000), st.integers(0, 6000))
def test_the_unit_of_time_does_not_matter(table, factor, width, context):
    points, times = table
    one, other = surface(points, times)(width, context), surface(points, times * factor)(width, context)
    assert float(other.seconds) == pytest.approx(factor * float(one.seconds), rel=1e-9)
    assert float(other.error) == pytest.approx(float(one.error), rel=1e-6, abs=1e-9)


@given(st.floats(-2, 2), st.lists(st.integers(1, 4000), min_size=3, max_size=8, unique=True), st.floats(0, 1))
def test_powers_of_an_axis_are_exact_and_leaving_a_point_out_shows_no_error(power, widths, part):
    width = np.sort(np.array(widths, dtype=float))
    grid = Surface({"width": width}, 1e3 * width**power)
    at = width[0] + part * (width[-1] - width[0])
    assert float(grid(at).seconds) == pytest.approx(1e3 * at**power, rel=1e-9)
    assert grid.error == pytest.approx(0, abs=1e-9)


@given(tables(), st.integers(1, 20_000), st.integers(1, 20_000))
def test_beyond_the_grid_the_efficiency_is_held_and_not_the_time(table, width, context):
    points, times = table

    def bound(width, context):
        return 1e-6 * np.asarray(width) * (1 + np.asarray(context))

    grid = surface(points, times, bound=bound)
    within = [float(np.clip(value, axis[0], axis[-1])) for value, axis in zip((width, context), grid.axes, strict=True)]
    here, edge = grid(width, context), grid(*within)
    floor = times.min()
    efficiency = [(bound(*at) + floor) / float(found.seconds) for at, found in (((width, context), here), (within, edge))]
    assert efficiency[0] == pytest.approx(efficiency[1], rel=1e-9)
    outside = [width, context] != within
    assert (float(here.error) > float(edge.error)) == outside


@given(tables(), st.data())
def test_arrays_and_single_points_are_the_same_and_rows_may_come_in_any_order(table, data):
    points, times = table
    grid = surface(points, times)
    width, context = (np.array(data.draw(st.lists(st.integers(1, 6000), min_size=4, max_size=4))) for _ in range(2))
    together = grid(width, context[:, None]).seconds
    assert together.shape == (4, 4)
    order = data.draw(st.permutations(range(len(times))))
    shuffled = surface(points[list(order)], times[list(order)])
    for row, column in np.ndindex(4, 4):
        assert float(shuffled(width[column], context[row]).seconds) == together[row, column]


def test_a_point_that_lacks_keeps_the_efficiency_of_its_neighbour():
    points = np.array([[1, 100], [1, 200], [2, 100]], dtype=float)
    times = np.array([1.0, 2.0, 1.5])

    def bound(width, context):
        return np.asarray(width) * np.asarray(context) / 100.0

    grid = surface(points, times, bound=bound, error=0.07)
    found = grid(2, 200)
    # Along its own line: from (2, 100), whose efficiency is (2 + 1) / 1.5.
    assert float(found.seconds) == pytest.approx((4 + 1) / 2)
    assert float(found.error) == 0.07
    assert float(grid(2, 100).seconds) == 1.5


def test_a_time_rounded_to_nothing_comes_back_as_nothing():
    grid = Surface({"tokens": [1, 2, 4]}, [0.0, 1e-6, 2e-6])
    assert float(grid(1).seconds) == 0
    assert 0 < float(grid(1.5).seconds) < 1e-6


@given(st.lists(TIMES, min_size=3, max_size=7))
def test_leaving_one_out_is_what_a_surface_without_it_says(times):
    width = 2.0 ** np.arange(len(times))
    (errors,) = Surface({"width": width}, times).left_out()
    assert np.isnan(errors[[0, -1]]).all()
    for middle in range(1, len(times) - 1):
        keep = np.arange(len(times)) != middle
        without = Surface({"width": width[keep]}, np.array(times)[keep])
        assert errors[middle] == pytest.approx(float(without(width[middle]).seconds) / times[middle] - 1, rel=1e-9, abs=1e-12)


def test_dips_are_named_with_their_share():
    grid = surface(np.array([[1, 8], [2, 8], [4, 8]], dtype=float), np.array([1.0, 0.8, 0.9]))
    assert grid.dips("width") == [((2.0, 8.0), pytest.approx(0.2))]
    assert grid.dips("width", tolerance=0.3) == []
    assert grid.dips("context") == []


@pytest.mark.parametrize(
    ("axes", "times", "message"),
    [
        ({"width": [1, 2]}, [1.0], "width must have one value for each of 1 times, got 2"),
        ({"width": []}, [], "width must have one value for each of 0 times, got 0"),
        ({"width": [1, 1]}, [1.0, 2.0], "each point of width must be there once, got 2 rows of 1 points"),
        ({"width": [1, -2]}, [1.0, 2.0], "width[1] must be at least 0, got -2.0"),
        ({"width": [1, 2]}, [1.0, -2.0], "seconds[1] must be at least 0, got -2.0"),
    ],
)
def test_what_is_no_grid_is_refused(axes, times, message):
    with pytest.raises(checks.ParameterError) as caught:
        Surface(axes, times)
    assert str(caught.value) == message


@given(st.lists(st.tuples(TIMES, st.floats(0, 1)), min_size=1, max_size=5))
def test_errors_of_a_sum_are_weighed_by_time_and_never_above_the_worst(parts):
    total = NONE
    for seconds, error in parts:
        total = total + Estimate(np.asarray(seconds), np.asarray(error))
    assert float(total.seconds) == pytest.approx(sum(seconds for seconds, _ in parts))
    assert float(total.seconds * total.error) == pytest.approx(sum(seconds * error for seconds, error in parts))
    assert float(total.error) <= max(error for _, error in parts) + 1e-12
    twice = total.repeated(2)
    assert (float(twice.seconds), float(twice.error)) == (2 * float(total.seconds), float(total.error))


def test_nothing_has_no_error():
    assert float((NONE + NONE).error) == 0
    with pytest.raises(TypeError):
        NONE + 1  # type: ignore[operator]


@given(st.integers(0, 2**32))
def test_residuals_and_neighbours_say_what_loops_say(seed):
    rng = np.random.default_rng(seed)
    logs = rng.normal(size=(3, 4, 6))
    logs[rng.random(logs.shape) < 0.2] = np.nan
    scaled = np.sort(rng.random(6)).cumsum()
    found = residuals(logs, scaled)
    for place in np.ndindex(3, 4):
        there = [index for index in range(6) if not np.isnan(logs[place][index])]
        for index in range(6):
            if index not in there[1:-1]:
                assert np.isnan(found[place][index])
                continue
            before, after = there[there.index(index) - 1], there[there.index(index) + 1]
            said = np.interp(scaled[index], scaled[[before, after]], logs[place][[before, after]])
            assert found[place][index] == pytest.approx(logs[place][index] - said)
    offsets = [(0, 1), (0, -1), (1, 0), (-2, 3)]
    medians = neighbours(found, offsets)
    for i, j, m in np.ndindex(found.shape):
        inside = [(i + a, j + b) for a, b in offsets if 0 <= i + a < 3 and 0 <= j + b < 4]
        known = [found[x, y, m] for x, y in inside if not np.isnan(found[x, y, m])]
        assert medians[i, j, m] == pytest.approx(np.median(known), nan_ok=True) if known else np.isnan(medians[i, j, m])
