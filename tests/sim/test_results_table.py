"""Statistics of the results table: coverage of intervals, and closed forms equal in arrays and point by point."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from polars.testing import assert_frame_equal
from scipy import stats

from model.interpret.account import FlopsAndBytes
from model.outcomes.intervals import half_width, wilson
from sim.runs import results_table, sweep
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes import acceptance_outcomes, match_outcomes
from sim.views import evaluation, formula_view, metrics
from sim.views.metrics import Sums

COVERED = ("latency_layers", "busy_layers", "mean_busy_units", "mean_busy_units_per_run", "speedup")


def tables(**outcomes: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "small", "tokens": 32, "replications": 200, "views": ["formula"]},
        "method": [{"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3}],
        "outcomes": {"kind": "iid", "match_rate": 0.6, **outcomes},
    }


def test_sampling_intervals_cover_the_formula() -> None:
    # 800 samples of 200: 95 % are covered. Five binomial tests at 1e-6 each: a false alarm in 5e-6 of all seeds; the seed is fixed.
    case, samples, size = Grid(tables()).case(0), 800, 200
    formula, covered = formula_view.formula_row(case), dict.fromkeys(COVERED, 0)
    # Theorem 4.1 for matches drawn here: time 40 l - 20 B, and busy time longer by k (d - d') l.
    latency = 40.0 * 32 - 20.0 * np.random.default_rng(7).binomial(31, 0.6, (samples, size))
    for sample in latency:
        row = results_table.sampled_row(Sums.of(sample, sample + 3 * 20 * 32), case, None, "paths")
        for name in COVERED:
            covered[name] += row[f"{name}_low"] <= formula[name] <= row[f"{name}_high"]
    for name, count in covered.items():
        assert stats.binomtest(count, samples, 0.95).pvalue > 1e-6, (name, count)


def test_interval_of_mean_busy_units_matches_a_bootstrap() -> None:
    rng = np.random.default_rng(3)
    latency = rng.gamma(20, 50, 2000)
    busy = 2 * latency + rng.normal(0, 200, 2000) + 900
    _, wide, _ = Sums.of(latency, busy).sampled(1280, 32)
    chosen = rng.integers(0, 2000, (4000, 2000))
    spread = (busy[chosen].sum(axis=1) / latency[chosen].sum(axis=1)).std()
    # With 4000 resamples the deviation has an error of about 1.1 %: 6 % is more than five sigma.
    assert wide["mean_busy_units"] == pytest.approx(1.961 * spread, rel=0.06)


@pytest.mark.parametrize("size", [2, 3, 10])
def test_intervals_of_few_replications_are_student_s(size: int) -> None:
    rng = np.random.default_rng(size)
    latency = rng.gamma(20, 50, size)
    busy = latency * rng.uniform(1, 3, size)
    _, wide, spread = Sums.of(latency, busy).sampled(1280, 32)
    assert spread == pytest.approx(latency.std(ddof=1), rel=1e-9)
    samples = {"latency_layers": latency, "busy_layers": busy, "mean_busy_units_per_run": busy / latency}
    for name, sample in samples.items():
        interval = stats.t.interval(0.95, size - 1, sample.mean(), stats.sem(sample))
        assert wide[name] == pytest.approx((interval[1] - interval[0]) / 2, rel=1e-9), name
    # The delta method: mean_busy_units is a ratio of means.
    residual = busy - busy.mean() / latency.mean() * latency
    assert wide["mean_busy_units"] == pytest.approx(stats.t.ppf(0.975, size - 1) * stats.sem(residual) / latency.mean(), rel=1e-9)
    assert wide["tpot_layers"] == pytest.approx(wide["latency_layers"] / 32)
    assert wide["relative_latency"] == pytest.approx(wide["latency_layers"] / 1280)
    assert wide["compute_per_token"] == pytest.approx(wide["busy_layers"] / 1280)
    assert Sums.of(latency, busy).sampled(1280, 32, tensor_parallel=4)[1]["compute_per_token"] == pytest.approx(
        wide["busy_layers"] / 5120
    )


@pytest.mark.parametrize("value", [0.1, 1280.0, 1 / 3])
def test_deterministic_point_has_no_width(value: float) -> None:
    latency = np.full(1000, 32 * value)
    _, wide, spread = Sums.of(latency, latency * 2.7).sampled(32 * value, 32)
    assert spread == 0
    assert set(wide.values()) == {0.0}


def test_one_replication_has_no_interval(tmp_path: Any) -> None:
    row = sweep.run(tables(), views=["paths", "events"], replications=1, out=tmp_path / "run").frame()
    for name in metrics.ESTIMATES:
        assert row[name].null_count() == 0
        assert row[f"{name}_low"].null_count() == row[f"{name}_high"].null_count() == 2, name


def test_estimates_of_whole_numbers_are_floats() -> None:
    found = metrics.estimates(640, 1920, 3, 1280, 32, tensor_parallel=2)
    assert {name: float(value) for name, value in found.items()} == {
        "latency_layers": 640, "tpot_layers": 20, "speedup": 2, "relative_latency": 0.5, "busy_layers": 1920,
        "compute_per_token": 0.75, "mean_busy_units": 3, "mean_busy_units_per_run": 3,
    }  # fmt: skip
    assert metrics.estimates(640, 1920, 3, 1280, 32)["compute_per_token"] == 1.5  # on one device
    each = metrics.per_round(10, 4, 12, 15)
    assert {name: float(value) for name, value in each.items()} == {
        "tokens_per_round": 2.5, "draft_acceptance_rate": 0.5, "operations_per_token": 1.5,
    }  # fmt: skip
    assert {value.dtype for value in (*found.values(), *each.values())} == {np.dtype(np.float64)}


def test_decodings_without_time_have_a_ratio() -> None:
    sums = Sums.of(np.array([0.0, 0.5, 2.0]), np.array([0.0, 1.0, 6.0]))
    assert (sums.count, sums.latency, sums.busy, sums.ratio, sums.ratio_square) == (3, 2.5, 7.0, 5.0, 13.0)
    assert (sums.latency_square, sums.busy_square, sums.product) == (4.25, 37.0, 12.5)


def test_sequences_share_only_reads_of_weights() -> None:
    bill = FlopsAndBytes(*(float(3 * 2**number) for number in range(len(FlopsAndBytes._fields))))
    alone, shared = metrics.work_per_token(bill, 3), metrics.work_per_token(bill, 3, 4)
    assert [alone[name] for name in metrics.WORK] == [2.0**number for number in range(len(FlopsAndBytes._fields))]
    differing = {name: alone[name] / shared[name] for name in metrics.WORK if alone[name] != shared[name]}
    assert differing == {"weight_bytes_per_token": 4}
    assert shared["arithmetic_intensity"] == bill._replace(weight_bytes=bill.weight_bytes / 4).intensity > bill.intensity


def test_two_records_have_an_interval_and_one_has_none() -> None:
    """Student's interval between records, around the rate at each position and within [0, 1]."""
    records = ((True, False, True, False), (True, True, True, False))
    found = match_outcomes.RecordedMatches(records=records).outcome(None, 4)
    shares = [0.5, 0.75]
    assert found.rate == pytest.approx(0.625)
    half = stats.t.ppf(0.975, 1) * stats.sem(shares)
    low, high = (np.clip([1 + shift, 0.5 + shift, 1 + shift, shift], 0, 1).mean() for shift in (-half, half))
    assert (found.rate_low, found.rate_high, found.trials) == (pytest.approx(low), pytest.approx(high), 8)
    assert float(found.low.mean(4)) / 4 == pytest.approx(low)
    assert float(found.high.mean(4)) / 4 == pytest.approx(high)
    for single in (records[:1], 2 * records[:1]):
        alike = match_outcomes.RecordedMatches(records=single).outcome(None, 4)
        assert (alike.rate, alike.low, alike.rate_low, alike.trials) == (0.5, None, None, None)


@pytest.mark.parametrize("record", [match_outcomes.CorrelatedMatches, acceptance_outcomes.CorrelatedAcceptance])
def test_correlated_trials_count_for_fewer(record: Any) -> None:
    """The variance of a mean of neighbours with correlation rho tends to (1 + rho) / (1 - rho) times that of independent ones."""
    for rho, factor in ((0.5, 3.0), (0.0, 1.0), (-0.5, 1 / 3)):
        found = record(0.5, rho, trials=3000).outcome(None, 4)
        low, high = wilson(0.5, 3000 / factor)
        assert (found.rate_low, found.rate_high) == (pytest.approx(float(low)), pytest.approx(float(high)))
        assert (float(found.low.rate), float(found.high.rate), found.trials) == (found.rate_low, found.rate_high, 3000)


def test_input_intervals_are_the_formula_at_wilson_bounds() -> None:
    low, high = wilson(0.6, 500)
    row = formula_view.formula_row(Grid(tables(trials=500)).case(0))
    for rate in np.linspace(float(low), float(high), 7):
        inside = formula_view.formula_row(Grid(tables(match_rate=float(rate))).case(0))
        for name in metrics.ESTIMATES:
            assert row[f"{name}_input_low"] * (1 - 1e-12) <= inside[name] <= row[f"{name}_input_high"] * (1 + 1e-12), name


@pytest.mark.parametrize(("count", "trials"), [(0, 5), (5, 5), (3, 7), (684, 1000)])
def test_wilson_is_scipys(count: int, trials: int) -> None:
    theirs = stats.binomtest(count, trials).proportion_ci(0.95, method="wilson")
    assert [float(each) for each in wilson(count / trials, trials)] == pytest.approx([theirs.low, theirs.high], abs=1e-14)
    # Rounding of the ends must not exclude the rate: error bars have no negative length.
    rates = np.arange(trials + 1) / trials
    low, high = wilson(rates, trials)
    assert np.all((low >= 0) & (low <= rates) & (rates <= high) & (high <= 1))


@pytest.mark.parametrize("count", [2, 3, 10, 4096])
def test_half_width_is_students(count: int) -> None:
    assert float(half_width(1.7, count)) == pytest.approx(stats.t.ppf(0.975, count - 1) * 1.7 / count**0.5, rel=1e-12)


def same_within(found: pl.DataFrame, expected: pl.DataFrame, error: float) -> None:
    """The same columns of the same types in any order, floats within an error; polars has renamed its own tolerance arguments."""
    assert dict(found.schema) == dict(expected.schema)
    for name in expected.columns:
        ours, theirs = found[name], expected[name]
        assert ours.is_null().equals(theirs.is_null()), name
        if theirs.dtype.is_float():
            np.testing.assert_allclose(ours.to_numpy(), theirs.to_numpy(), rtol=error, atol=error, err_msg=name)
        else:
            assert ours.equals(theirs), name


@pytest.mark.parametrize("outcome", [{}, {"trials": 700}])
@pytest.mark.parametrize("cluster", [{}, {"units": 3}, {"links": "shared"}, {"stop": "pass"}])
@pytest.mark.parametrize("form", ["literal", "eager"])
def test_vectorised_rows_equal_rows_by_point(outcome: dict[str, Any], cluster: dict[str, Any], form: str) -> None:
    scenario = tables(**outcome) | {"cluster": cluster}
    scenario["method"][0]["form"] = form
    scenario["sweep"] = {
        "outcomes.match_rate": [0, 0.3, 1], "scenario.tokens": [1, 2, 64], "method.candidates": [1, 3],
        "method.exit_layer": [20, 40],
    }  # fmt: skip
    grid = Grid(scenario)
    whole = formula_view.frame(grid, 5, grid.points)
    each = pl.concat([formula_view.frame(grid, point, point + 1) for point in range(5, grid.points)], how="diagonal_relaxed")
    one_by_one = results_table.table(each)
    same_within(results_table.table(whole), one_by_one, 1e-13)
    if "units" in cluster:  # k = 3 wants four while other layers follow the exit
        waiting = (pl.col("candidates") == 3) & ((pl.col("exit_layer") < 40) | (pl.lit(form) == "eager"))
        assert one_by_one.filter(pl.col("contended"))["speedup"].null_count() == one_by_one.filter(pl.col("contended")).height > 0
        assert one_by_one.filter(pl.col("contended")).height <= one_by_one.filter(waiting).height


def test_shards_of_a_point_are_merged_exactly() -> None:
    grid = Grid(tables())
    pieces = [evaluation.paths_row(grid.case(0), 0, stop) | {"point": 0, "view": "paths"} for stop in (100, 200, 4096)]
    for piece in pieces:
        piece["latency"] += 0.1  # so that the order of a plain sum would show
    forward, backward = (results_table.finish(grid, pl.DataFrame(part)) for part in (pieces, pieces[::-1]))
    assert_frame_equal(forward[0], backward[0], check_exact=True)
    for name, rows in forward[1].items():
        assert_frame_equal(rows, backward[1][name], check_exact=True)
    drawn = np.repeat(*(np.concatenate([piece[name] for piece in pieces]) for name in ("values", "counts")))
    values, counts = np.unique(drawn, return_counts=True)
    found = forward[1]["distribution"].select("latency_layers", "probability").rows()
    assert found == [*zip(values.tolist(), (counts / counts.sum()).tolist(), strict=True)]


def test_operations_equal_busy_time_with_layers_only() -> None:
    """With overheads the busy time has more than operations, so there is no value."""
    plain = formula_view.formula_row(Grid(tables()).case(0))
    assert plain["operations_per_token"] == plain["compute_per_token"] > 1
    found = formula_view.formula_row(Grid(tables() | {"cost": {"early_head": 0.5}}).case(0))
    assert "operations_per_token" not in found


@pytest.mark.parametrize("few", [1, 2, 3])
def test_distributions_are_kept_for_few_points(few: int, tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results_table, "FEW_POINTS", few)
    given = tables() | {"sweep": {"outcomes.match_rate": [0.2, 0.8]}}
    for views_ in (["paths"], ["formula", "paths"]):
        folder = tmp_path / "-".join(views_)
        sweep.run(given, views=views_, out=folder, jobs=1)
        assert (folder / "distribution.parquet").exists() == (few >= 2)
    if few >= 2:
        kept = pl.read_parquet(tmp_path / "formula-paths" / "distribution.parquet")
        for rows in kept.partition_by("point", "view"):
            assert rows["probability"].sum() == pytest.approx(1)
        assert kept.select("point", "view").n_unique() == 4


def test_shared_link_does_not_change_reserved_units() -> None:
    """If a shared link and not the number of units makes processes wait, a larger cluster does not reserve more units."""
    scenario = tables() | {"cluster": {"units": 10, "links": "shared"}, "cost": {"link": 1.0}}
    case = Grid(scenario).case(0)
    assert case.contended
    assert case.reserved_units == case.parameters.units < 10
    assert Grid(scenario | {"cluster": {"units": 2, "links": "shared"}}).case(0).reserved_units == 2
