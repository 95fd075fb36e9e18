"""Surfaces of measured times: exact at measured points, bounded between them, constant efficiency beyond them."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base import checks
from model.hardware.interpolation import NONE, PIECE, Estimate, Surface, parallelograms, residuals

AXES = st.lists(st.integers(1, 5000), min_size=1, max_size=5, unique=True)
TIMES = st.floats(1e-5, 10.0)  # well above the nanosecond that replaces zero


@st.composite
def tables(draw):
    """A complete grid of widths and contexts in any order, with any times."""
    widths, contexts = draw(AXES), draw(AXES)
    points = draw(st.permutations([(width, context) for width in widths for context in contexts]))
    times = draw(st.lists(TIMES, min_size=len(points), max_size=len(points)))
    return np.array(points, dtype=float), np.array(times)


def surface(points, times, **more):
    """A surface over widths and contexts."""
    return Surface({"width": points[:, 0], "context": points[:, 1]}, times, **more)


@given(tables())
def test_measured_points_are_returned_exactly(table):
    points, times = table
    found = surface(points, times, spread=0.01)(points[:, 0], points[:, 1])
    assert found.seconds.tolist() == times.tolist()
    assert found.error.tolist() == [0.01] * times.size


@given(tables(), st.floats(0, 1), st.floats(0, 1))
def test_interpolated_times_lie_between_the_corners_of_their_cell(table, across, along):
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
def test_powers_of_an_axis_are_exact_with_zero_leave_one_out_error(power, widths, part):
    width = np.sort(np.array(widths, dtype=float))
    grid = Surface({"width": width}, 1e3 * width**power)
    at = width[0] + part * (width[-1] - width[0])
    assert float(grid(at).seconds) == pytest.approx(1e3 * at**power, rel=1e-9)
    assert grid.error == pytest.approx(0, abs=1e-9)


@given(tables(), st.integers(1, 20_000), st.integers(1, 20_000))
def test_beyond_the_grid_the_efficiency_is_constant(table, width, context):
    """Below the grid that of the nearest point; above it, added work has that of the largest measured point."""
    points, times = table

    def bound(width, context):
        return 1e-6 * np.asarray(width) * (1 + np.asarray(context))

    grid = surface(points, times, bound=bound)
    within = [float(np.clip(value, axis[0], axis[-1])) for value, axis in zip((width, context), grid.axes, strict=True)]
    here, edge = grid(width, context), grid(*within)
    least = bound(points[:, 0], points[:, 1]) + times.min()
    most = max(range(times.size), key=lambda row: (least[row], *points[row]))
    reached = [min(value, axis[-1]) for value, axis in zip((width, context), grid.axes, strict=True)]
    before = float(edge.seconds) * (bound(*reached) + times.min()) / (bound(*within) + times.min())
    added = (bound(width, context) - bound(*reached)) * times[most] / least[most]
    assert float(here.seconds) == pytest.approx(before + added, rel=1e-9)
    outside = [width, context] != within
    assert (float(here.error) > float(edge.error)) == outside


@given(st.integers(0, 2**32))
def test_a_monotonic_table_gives_a_monotonic_surface(seed):
    """Between its points, at missing points, and beyond the last, with a bound of bytes and operations."""
    rng = np.random.default_rng(seed)
    axes = np.unique(rng.integers(1, 200, 5)).astype(float), np.unique(rng.integers(0, 2000, 5)).astype(float)
    shape = tuple(axis.size for axis in axes)
    times = 1e-6 + np.cumsum(np.cumsum(rng.exponential(1e-6, shape) * (rng.random(shape) < 0.5), 0), 1)
    there = rng.random(shape) < 0.6
    there.flat[rng.integers(there.size)] = True
    width, context = (each[there] for each in np.meshgrid(*axes, indexing="ij"))

    def bound(width, context):
        return np.maximum(1e-9 * (width + context), 1e-11 * width * (context + width / 2))

    grid = Surface({"width": width, "context": context}, times[there], bound=bound, error=0.0)
    wide, deep = np.meshgrid(np.geomspace(grid.axes[0][0], 1000, 23), grid.axes[1][0] + np.geomspace(1e-9, 9000, 29), indexing="ij")
    found = grid(wide, deep).seconds
    for axis in (0, 1):
        assert (np.diff(found, axis=axis) >= -1e-9 * found.max()).all()


@given(tables(), st.data())
def test_arrays_equal_single_points_in_any_row_order(table, data):
    points, times = table
    grid = surface(points, times)
    width, context = (np.array(data.draw(st.lists(st.integers(1, 6000), min_size=4, max_size=4))) for _ in range(2))
    together = grid(width, context[:, None]).seconds
    assert together.shape == (4, 4)
    order = data.draw(st.permutations(range(len(times))))
    shuffled = surface(points[list(order)], times[list(order)])
    for row, column in np.ndindex(4, 4):
        assert float(shuffled(width[column], context[row]).seconds) == together[row, column]


def test_a_missing_point_takes_the_efficiency_of_its_neighbour():
    points = np.array([[1, 100], [1, 200], [2, 100]], dtype=float)
    times = np.array([1.0, 2.0, 1.5])

    def bound(width, context):
        return np.asarray(width) * np.asarray(context) / 100.0

    grid = surface(points, times, bound=bound, error=0.07)
    found = grid(2, 200)
    # Along the same line: from (2, 100), whose efficiency is (2 + 1) / 1.5.
    assert float(found.seconds) == pytest.approx((4 + 1) / 2)
    assert float(found.error) == 0.07
    assert float(grid(2, 100).seconds) == 1.5


@given(st.integers(0, 2**32))
def test_missing_points_take_the_efficiency_before_or_else_after_them(seed):
    """Along the last axis first, then along the axis before it, until every point has one; also if measured times fall."""
    rng = np.random.default_rng(seed)
    widths, contexts = np.array([1.0, 2, 3, 7]), np.array([0.0, 5, 9, 30, 80])
    there = rng.random((4, 5)) < 0.4
    there[0, 0] = there[3, 4] = True
    times = np.where(there, rng.uniform(1, 2, (4, 5)), np.nan)
    times[0, 0], times[3, 4] = 2.0, 1.0

    def bound(width, context):
        return np.asarray(width) * (1.0 + np.asarray(context))

    least = bound(widths[:, None], contexts) + np.nanmin(times)
    ratio = times / least

    def filled(line):
        known = np.flatnonzero(~np.isnan(line))
        if not known.size:
            return line
        return np.array([line[max((each for each in known if each <= place), default=known[0])] for place in range(line.size)])

    ratio = np.array([filled(line) for line in ratio])
    ratio = np.array([filled(line) for line in ratio.T]).T
    rows, columns = np.nonzero(there)
    points = np.stack([widths[rows], contexts[columns]], axis=1)
    grid = surface(points, times[there], bound=bound, error=0.07)
    asked = np.ix_([width in points[:, 0] for width in widths], [context in points[:, 1] for context in contexts])
    found = grid(widths[asked[0]], contexts[asked[1]])
    assert found.seconds == pytest.approx((ratio * least)[asked], rel=1e-9)
    assert (found.error == np.where(there[asked], 0, 0.07)).all()


def test_a_time_rounded_to_zero_stays_zero():
    grid = Surface({"tokens": [1, 2, 4]}, [0.0, 1e-6, 2e-6])
    assert float(grid(1).seconds) == 0
    assert 0 < float(grid(1.5).seconds) < 1e-6
    # In logarithms it is replaced by a nanosecond, also in the bound.
    assert float(grid(2**0.5).seconds) == pytest.approx((1e-9 * 1e-6) ** 0.5)
    nothing = Surface({"tokens": [1, 2]}, [0.0, 0.0], bound=lambda tokens: np.asarray(tokens) * 1e-9)
    assert float(nothing(1.5).seconds) == pytest.approx(1e-9)
    kept = Surface({"width": [1, 1, 2], "context": [0, 1, 0]}, [0.0] * 3, bound=lambda width, context: width * context * 3e-9)
    assert float(kept(2, 1).seconds) == pytest.approx(1e-9 * (6 + 1) / 1)


@given(st.floats(-2, 2), st.integers(0, 4000))
def test_powers_of_context_plus_one_are_exact(power, context):
    """Contexts start at 0: a token attends to the cached positions and itself."""
    grid = Surface({"context": [0, 4000]}, [1.0, 4001.0**power])
    assert float(grid(context).seconds) == pytest.approx((1.0 + context) ** power, rel=1e-9)


@given(st.tuples(*[st.floats(-2, 2)] * 4), st.tuples(st.floats(2, 9), st.floats(0, 80), st.floats(1, 500), st.floats(3, 6)))
def test_a_product_of_powers_of_many_axes_is_exact(powers, point):
    axes = {"width": [2, 3, 9], "context": [0, 5, 30, 80], "batch": [1, 500], "heads": [3, 4, 5, 5.5, 6]}

    def time(width, context, batch, heads):
        return np.prod([each**power for each, power in zip((width, 1 + context, batch, heads), powers, strict=True)], axis=0)

    rows = [each.ravel().astype(float) for each in np.meshgrid(*axes.values(), indexing="ij")]
    grid = Surface(dict(zip(axes, rows, strict=True)), 1e3 * time(*rows))
    assert (grid(*rows).seconds == 1e3 * time(*rows)).all()
    assert float(grid(*point).seconds) == pytest.approx(1e3 * time(*point), rel=1e-9)
    assert float(grid(*point).error) == pytest.approx(0, abs=1e-9)


def test_each_factor_e_beyond_the_grid_adds_20_percent_error():
    points = np.array([[2, 0], [2, 9], [4, 0], [4, 9]], dtype=float)
    grid = surface(points, np.array([1.0, 2, 3, 4]), error=0.05)
    for width, context, beyond in (
        (4 * np.e, 9, 1), (4, 10 * np.e - 1, 1), (2 / np.e, 0, 1), (4 * np.e**2, 10 * np.e - 1, 3), (2 / np.e, 10 * np.e - 1, 2),
    ):  # fmt: skip
        edge = float(grid(np.clip(width, 2, 4), np.clip(context, 0, 9)).error)
        assert float(grid(width, context).error) == pytest.approx(edge + 0.2 * beyond)
    # Some points of an array may lie beyond the grid.
    assert grid(np.array([3, 4 * np.e]), 5).error == pytest.approx(np.array([0.05, 0.25]))


def test_without_a_bound_times_are_constant_beyond_the_grid():
    grid = surface(np.array([[2, 0], [2, 9], [4, 0], [4, 9]], dtype=float), np.array([1.0, 2, 3, 5]))
    assert float(grid(100, 1000).seconds) == 5
    assert grid([1, 100], [[0], [1000]]).seconds.tolist() == [[1, 3], [2, 5]]
    # A missing point has the time of its neighbour.
    assert float(surface(np.array([[1, 0], [1, 1], [2, 0]], dtype=float), np.array([1.0, 2, 3]))(2, 1).seconds) == pytest.approx(3)


def test_arrays_of_any_size_equal_their_points():
    grid = surface(np.array([[1, 0], [1, 900], [8, 0], [8, 900]], dtype=float), np.array([1.0, 2, 3, 5]), spread=[0, 0.1, 0.2, 0.3])
    width = np.linspace(0.5, 10, 300)
    for shape in ((1 << 15) // 8, (1 << 15) // 8 + 1, 40_000):
        many = np.resize(width, (shape, 8))
        together = grid(many, 30)
        assert together.seconds.shape == together.error.shape == (shape, 8)
        one = grid(width, 30)
        assert (together.seconds == np.resize(one.seconds, (shape, 8))).all()
        assert (together.error == np.resize(one.error, (shape, 8))).all()
    # Rows and columns, one of which is short.
    both, transposed = grid([1, 3], np.arange(20_000)[:, None]), grid(np.resize(width, 20_000), [[5], [90]])
    assert both.seconds[123].tolist() == grid([1, 3], 123).seconds.tolist()
    assert both.seconds[19_999].tolist() == grid([1, 3], 19_999).seconds.tolist()
    assert (transposed.seconds[1, 600:900] == grid(width, 90).seconds).all()


def test_coordinates_must_be_non_negative_numbers():
    grid = Surface({"width": [1, 2]}, [1.0, 2.0])
    with pytest.raises(checks.ParameterError, match=r"^width must be at least 0, got -0\.5$"):
        grid(-0.5)
    with pytest.raises(ValueError, match="zip"):
        grid(1, 2)


def test_errors_are_at_least_the_spread_of_repeats():
    width = [1, 2, 4]
    grid = Surface({"width": width}, [1.0, 1.1, 1.3], spread=[0.5, 0.0, 0.3], error=0.05)
    assert grid(width).error.tolist() == [0.5, 0.0, 0.3]
    # Between points the spread is that of the lower point, unless the interpolation error is larger.
    assert grid([1.5, 3]).error.tolist() == [0.5, 0.05]
    without = Surface({"width": width}, [1.0, 1.1, 1.3])
    assert without.spread.tolist() == without(width).error.tolist() == [0, 0, 0]


@given(st.lists(TIMES, min_size=3, max_size=7))
def test_leave_one_out_equals_a_surface_without_the_point(times):
    width = 2.0 ** np.arange(len(times))
    (errors,) = Surface({"width": width}, times).left_out()
    assert np.isnan(errors[[0, -1]]).all()
    for middle in range(1, len(times) - 1):
        keep = np.arange(len(times)) != middle
        without = Surface({"width": width[keep]}, np.array(times)[keep])
        assert errors[middle] == pytest.approx(float(without(width[middle]).seconds) / times[middle] - 1, rel=1e-9, abs=1e-12)


@given(st.lists(TIMES, min_size=9, max_size=9), st.integers(0, 8))
def test_the_default_error_is_the_median_leave_one_out_error(times, lacks):
    points = np.array([(width, context) for width in (1, 4, 9) for context in (0, 3, 8)], dtype=float)
    keep = np.arange(9) != lacks
    grid = surface(points[keep], np.array(times)[keep])
    across, along = grid.left_out()
    whole = across.shape == along.shape == (3, 3)
    assert whole
    shown = []
    for line in range(3):
        for errors, place, neighbours_ in (
            (across, (1, line), [(0, line), (2, line)]),
            (along, (line, 1), [(line, 0), (line, 2)]),
        ):
            involved = [place, *neighbours_]
            assert np.isnan(errors[place]) == (divmod(lacks, 3) in involved)
            shown.append(errors[place])
    assert np.isnan(across).sum() + np.isnan(along).sum() == 18 - np.isfinite(shown).sum()
    assert grid.error == pytest.approx(np.nanmedian(np.abs(shown)))
    assert Surface({"width": [1, 2]}, [1.0, 2.0]).error == 0


def test_dips_have_coordinates_and_share():
    grid = surface(np.array([[1, 8], [2, 8], [4, 8]], dtype=float), np.array([1.0, 0.8, 0.9]))
    assert grid.dips("width") == [((2.0, 8.0), pytest.approx(0.2))]
    assert grid.dips("width", tolerance=0.3) == []
    assert grid.dips("context") == []


def test_dips_are_falls_between_adjacent_points():
    times = np.array([[4.0, 2.0, 2.0], [5.0, 6.0, 0.0], [0.0, 3.0, 1.0]])
    points = np.array([(width, context) for width in (1, 2, 4) for context in (0, 8, 9)], dtype=float)
    grid = surface(points, times.ravel())
    assert grid.dips("context") == [((1.0, 8.0), 0.5), ((2.0, 9.0), 1.0), ((4.0, 9.0), pytest.approx(2 / 3))]
    assert grid.dips("context", tolerance=0.5) == [((2.0, 9.0), 1.0), ((4.0, 9.0), pytest.approx(2 / 3))]
    assert sorted(grid.dips("width")) == [((2.0, 9.0), 1.0), ((4.0, 0.0), 1.0), ((4.0, 8.0), 0.5)]
    assert Surface({"tokens": [1, 2]}, [2.0, 1.5]).dips("tokens") == [((2.0,), 0.25)]
    deep = Surface({"width": [1, 1, 2, 2], "context": [3] * 4, "batch": [4, 5, 4, 5]}, [1.0, 3, 0.5, 3])
    assert deep.dips("width") == [((2.0, 3.0, 4.0), 0.5)]
    # Missing points and times of zero have no falls.
    assert surface(points[[0, 2, 3, 4]], np.array([4.0, 3, 2, 1])).dips("context") == [((2.0, 8.0), 0.5)]


@pytest.mark.parametrize(
    ("axes", "times", "message"),
    [
        ({"width": [1, 2]}, [1.0], "width must have one value for each of 1 times, got 2"),
        ({"width": []}, [], "width must have one value for each of 0 times, got 0"),
        ({"width": [1, 1]}, [1.0, 2.0], "each point of width must occur once, got 2 rows of 1 points"),
        ({"width": [1, -2]}, [1.0, 2.0], "width[1] must be at least 0, got -2.0"),
        ({"width": [1, 2]}, [1.0, -2.0], "seconds[1] must be at least 0, got -2.0"),
    ],
)
def test_bad_grids_are_refused(axes, times, message):
    with pytest.raises(checks.ParameterError) as caught:
        Surface(axes, times)
    assert str(caught.value) == message


@given(st.lists(st.tuples(TIMES, st.floats(0, 1)), min_size=1, max_size=5))
def test_the_error_of_a_sum_is_weighted_by_time(parts):
    total = NONE
    for seconds, error in parts:
        total = total + Estimate(np.asarray(seconds), np.asarray(error))
    assert float(total.seconds) == pytest.approx(sum(seconds for seconds, _ in parts))
    assert float(total.seconds * total.error) == pytest.approx(sum(seconds * error for seconds, error in parts))
    assert float(total.error) <= max(error for _, error in parts) + 1e-12
    twice = total.repeated(2)
    assert (float(twice.seconds), float(twice.error)) == (2 * float(total.seconds), float(total.error))


def test_zero_seconds_have_zero_error():
    assert (float(NONE.seconds), float(NONE.error)) == (0, 0)
    assert float((NONE + NONE).error) == 0
    with pytest.raises(TypeError, match="unsupported operand"):
        NONE + 1  # type: ignore[operator]


@given(st.integers(0, 2**32))
def test_residuals_and_parallelograms_equal_explicit_loops(seed):
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
    assert np.isnan(parallelograms(logs, [(3, 0), (0, -4), (5, 1)], [1])).all()
    assert np.isnan(parallelograms(logs, [], [1])).all()
    assert np.isnan(parallelograms(logs, [(0, 1)], [])).all()
    near, along = [(0, 1), (0, -1), (1, 0), (-2, 3), (1, 5), (-6, 1)], [1, -1, -2, 6]
    said = parallelograms(logs, near, along)
    for i, j, m in np.ndindex(logs.shape):
        corners = [(i + a, j + b, m + c) for (a, b), c in product(near, along)]
        inside = [(x, y, z) for x, y, z in corners if 0 <= x < 3 and 0 <= y < 4 and 0 <= z < 6]
        known = [logs[x, y, m] + logs[i, j, z] - logs[x, y, z] for x, y, z in inside]
        expected = np.median([each for each in known if not np.isnan(each)] or [np.nan])
        assert said[i, j, m] == pytest.approx(expected, nan_ok=True)


@given(tables(), st.integers(0, 2**32), st.floats(0.3, 2.7))
@settings(deadline=None)
def test_many_whole_coordinates_are_looked_up_as_any_others(table, seed, stretch):
    points, times = table
    rng = np.random.default_rng(seed)
    # More points than a block has, inside and outside the grid, whose contexts need not be whole numbers.
    at = rng.integers(0, 6000, (2, PIECE + 100))
    at[:, : len(points)] = points.T
    bounded = surface(points * [1, stretch], times, bound=lambda width, context: width + context)
    for grid in (surface(points, times, spread=0.01), bounded):
        found, one_by_one = grid(*at), grid(*at.astype(np.float64))
        assert found.seconds.tolist() == one_by_one.seconds.tolist()
        assert found.error.tolist() == one_by_one.error.tolist()
        few = slice(0, 50)
        assert found.seconds[few].tolist() == grid(*at[:, few]).seconds.tolist()
