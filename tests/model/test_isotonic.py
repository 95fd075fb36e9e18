"""Isotonic regression of times: properties for any input."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.hardware import isotonic, profile
from model.hardware.profile import Profile, Source

TIMES = st.floats(1e-3, 1e3)


def least_over_rises(values: np.ndarray) -> float:
    """Least sum of absolute errors of any monotonic line; one of the best lines uses only the given values."""
    levels = np.unique(values)
    cost = np.zeros(levels.size)
    for value in values:
        cost = np.minimum.accumulate(cost) + np.abs(levels - value)
    return float(cost.min())


@given(st.lists(TIMES, min_size=1, max_size=9))
def test_no_monotonic_line_is_nearer(times: list[float]) -> None:
    values = np.array(times)
    found = isotonic.isotonic_line(values)
    assert (np.diff(found) >= 0).all()
    assert np.abs(found - values).sum() == pytest.approx(least_over_rises(values), rel=1e-9, abs=1e-12)
    assert isotonic.isotonic_line(found).tolist() == found.tolist()


def test_an_outlier_moves_alone() -> None:
    found = isotonic.isotonic_line(np.array([1.0, 2.0, 90.0, 3.0, 4.0, 5.0]))
    assert found.max() <= 5
    assert found[:2].tolist() == [1, 2]


@given(st.integers(0, 2**32), st.floats(0, 0.5))
def test_a_grid_becomes_monotonic_and_monotonic_grids_stay(seed: int, lacking: float) -> None:
    rng = np.random.default_rng(seed)
    shape = tuple(rng.integers(1, 5, 3))
    values = np.where(rng.random(shape) < lacking, np.nan, rng.exponential(size=shape))
    found = isotonic.isotonic_grid(values)
    assert (np.isnan(found) == np.isnan(values)).all()
    known = [*zip(*np.nonzero(~np.isnan(values)), strict=True)]
    for one, other in product(known, known):
        if all(a <= b for a, b in zip(one, other, strict=True)):
            assert found[one] <= found[other]
    again = isotonic.isotonic_grid(found)
    assert again[~np.isnan(again)] == pytest.approx(found[~np.isnan(found)], rel=1e-12)
    if known:
        assert np.nanmin(values) <= np.nanmin(found)
        assert np.nanmax(found) <= np.nanmax(values)


def made(rows: list[dict[str, object]]) -> Profile:
    return Profile(
        name="made-up", device="made-up", model="", dtype="bfloat16", engine="", mode="cuda-graph", kind="model",
        provenance="measured", date="", bandwidth=1e12, rate=1e14, cache_bytes=0.0, table=profile.table_of(rows),
        sources=(Source("a test", "none"),),
    )  # fmt: skip


@given(st.lists(st.tuples(TIMES, st.floats(0, 0.5), st.floats(0, 0.5)), min_size=1, max_size=8))
def test_quartiles_of_a_moved_time_include_the_measured_values(rows: list[tuple[float, float, float]]) -> None:
    """Low and high of a moved time include the measured value and its quartiles, symmetrically."""
    table = [
        {
            "part": "dense",
            "tokens": at,
            "tensor_parallel": 2,
            "time_s": time,
            "low_s": time * (1 - low),
            "high_s": time * (1 + high),
        }
        for at, (time, low, high) in enumerate(rows, start=1)
    ]
    before = made([*table, {"part": "dense", "tokens": 1, "tensor_parallel": 4, "time_s": 1.0}])
    after = isotonic.isotonic_profile(before)
    ours, theirs = (each.rows("dense", 2) for each in (after, before))
    assert (np.diff(ours["time_s"].to_numpy()) >= 0).all()
    time, low, high = (ours[name].to_numpy() for name in profile.TIMES)
    was, was_low, was_high = (theirs[name].to_numpy() for name in profile.TIMES)
    moved, bit = time != was, 1e-12 * (time + was)
    assert (low <= was_low + bit).all()
    assert (was_high <= high + bit).all()
    assert (high - time + bit >= np.abs(time - was)).all()
    assert after.rows("dense", 4).equals(before.rows("dense", 4))
    assert bool(after.notes) == bool(moved.any())
    assert isotonic.isotonic_profile(after).notes == after.notes


def test_parts_without_a_monotonic_axis_are_unchanged() -> None:
    """The gap after the last pass is not an amount of work."""
    rows = [{"part": "dense", "tokens": 1, "time_s": 1.0}]
    rows += [{"part": "after_gap", "gap": gap, "time_s": time} for gap, time in ((-5, 3.0), (0, 2.0), (9, 1.0))]
    before = made(rows)
    assert isotonic.isotonic_profile(before).table.equals(before.table)
    assert replace(before, notes=()).notes == isotonic.isotonic_profile(before).notes
