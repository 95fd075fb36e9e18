"""Theorem 4.1 against the measurements of its paper: the cost that it leaves out, and the limits of four measured times."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import minimize_scalar

from calibrate.fits import ppd_overheads
from calibrate.fits.ppd_overheads import OVERHEADS, fit
from model import published
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.methods.ppd.algorithm import Parameters, decode
from model.methods.ppd.theory import predict
from model.outcomes.outcome_laws import Iid
from model.published import ppd_table_3_fit
from model.published.ppd_table_3_fit import LAYERS, PER_PROCESS, TOKENS
from sim.engine import events
from sim.engine.cluster import Cluster

RUNS = ppd_table_3_fit.runs()


def test_runs_agree_with_the_table_and_its_tokens() -> None:
    rows = [row for row in published.table("ppd-table-3").rows if row["method"] == "ppd"]
    assert [run.latency_s for run in RUNS] == [row["latency_s"] for row in rows]
    assert [run.match_rate for run in RUNS] == pytest.approx([row["match_percent"] / 100 for row in rows])
    for row in rows:  # the table prints tokens per second too
        assert row["throughput_tokens_per_s"] * row["latency_s"] == pytest.approx(TOKENS, abs=0.02)
    for run in RUNS:  # plain decoding takes the measured time
        assert TOKENS * LAYERS * run.seconds_per_layer == pytest.approx(run.plain_s)


def test_the_error_of_the_theorem_follows_its_equation() -> None:
    """T0 (1 - p/2 (l - 1)/l), for the middle layer."""
    errors = [run.error(UnitCost(LAYERS)) for run in RUNS]
    for run, error in zip(RUNS, errors, strict=True):
        ideal = run.plain_s * (1 - run.match_rate / 2 * (TOKENS - 1) / TOKENS)
        assert error == pytest.approx(ideal / run.latency_s - 1)
    assert np.round(np.multiply(100, errors), 1).tolist() == [-6.9, -13.8, -7.4, -16.3]


@pytest.mark.parametrize("name", OVERHEADS)
def test_each_overhead_adds_its_formula_to_the_theorem(name: str) -> None:
    """Each overhead, a formula in k, p and the plain time, equals the cost options in `model.methods.ppd.theory`."""
    added = {
        "none": lambda run: 0.0,
        "linear": lambda run, b: TOKENS * b * (run.candidates + 1),
        "tree": lambda run, b: TOKENS * b * math.log2(run.candidates + 1),
        "fixed and linear": lambda run, a, b: TOKENS * (a + b * run.candidates),
        "candidates": lambda run, b: TOKENS * b * run.candidates,
        "candidates and match": lambda run, b, mu: TOKENS * b * run.candidates + (TOKENS - 1) * run.match_rate * mu,
        "relative": lambda run, b: b * (run.candidates + 1) * run.plain_s,
        "constant": lambda run, a: TOKENS * a,
    }[name]
    overhead = OVERHEADS[name]
    values = (3e-3, 7e-3)[: len(overhead.unknowns)]
    for run in RUNS:
        found = run.predicted_s(overhead.cost(values, run.seconds_per_layer)) - run.predicted_s(UnitCost(LAYERS))
        assert found == pytest.approx(added(run, *values), abs=1e-9)


@pytest.mark.parametrize("name", [name for name in OVERHEADS if name != "none"])
def test_a_fit_is_the_least_sum_of_squares(name: str) -> None:
    best = fit(OVERHEADS[name], RUNS)

    def squares(values: tuple[float, ...]) -> float:
        moved = ppd_overheads.Fit(best.overhead, values, RUNS)
        return sum((error * run.latency_s) ** 2 for error, run in zip(moved.errors(RUNS), RUNS, strict=True))

    least = squares(best.values)
    for index in range(len(best.values)):
        for step in (-1e-5, 1e-5):
            moved = tuple(value + step * (place == index) for place, value in enumerate(best.values))
            assert squares(moved) > least


@pytest.mark.parametrize("on", ["cnn_dm", "squad", "both"])
@pytest.mark.parametrize("law", PER_PROCESS)
def test_scenario_defaults_are_the_fitted_values(on: str, law: str) -> None:
    searched = fit(PER_PROCESS[law], ppd_table_3_fit.runs(on)).values[0]
    assert ppd_table_3_fit.fitted_seconds(on, law) == pytest.approx(searched, rel=1e-6)

    def squares(b: float) -> float:
        costs = [(run, PER_PROCESS[law].cost((b,), run.seconds_per_layer)) for run in ppd_table_3_fit.runs(on)]
        return sum((run.error(cost) * run.latency_s) ** 2 for run, cost in costs)

    by_itself = minimize_scalar(squares, bounds=(0, 0.05), method="bounded", options={"xatol": 1e-9}).x
    assert ppd_table_3_fit.fitted_seconds(on, law) == pytest.approx(by_itself, rel=1e-4)


def test_negative_costs_are_excluded() -> None:
    """Measured times below the theorem's would need a negative cost; the smallest cost is 0."""
    quick = [replace(run, latency_s=0.5 * run.latency_s) for run in RUNS]
    assert fit(OVERHEADS["linear"], quick).values[0] == pytest.approx(0, abs=1e-6)
    # Predicting at the last layer saves nothing, and the measured times are shorter.
    assert ppd_table_3_fit.fitted_seconds("both", exit_layer=LAYERS) == 0


def test_one_cost_per_process_predicts_the_held_out_data_set() -> None:
    unseen = [error for errors in ppd_overheads.held_out(OVERHEADS["linear"]).values() for error in errors]
    assert max(map(abs, unseen)) < 0.012
    assert [row["error"] for row in ppd_table_3_fit.rows()] == pytest.approx(unseen[2:] + unseen[:2])
    assert ppd_overheads.leave_one_out(OVERHEADS["linear"]) <= 0.006
    # Other overheads with one unknown are worse, and a second unknown does not help.
    others = {name: ppd_overheads.leave_one_out(each) for name, each in OVERHEADS.items() if name not in PER_PROCESS}
    assert min(others.values()) > ppd_overheads.leave_one_out(OVERHEADS["linear"])
    assert min(others, key=lambda name: others[name]) == "fixed and linear"


def test_seven_candidates_distinguish_linear_from_tree() -> None:
    """For 1 and 3 candidates k + 1 is 2 and 4, and log2(k + 1) is 1 and 2; for 7 they are 8 and 3."""
    linear, tree = (fit(PER_PROCESS[law], RUNS) for law in ("linear", "tree"))
    assert linear.errors(RUNS) == pytest.approx(tree.errors(RUNS), abs=1e-7)
    assert tree.values[0] == pytest.approx(2 * linear.values[0], rel=1e-6)
    for k in (1, 3):
        assert ppd_table_3_fit.per_token_s(k, "linear") == pytest.approx(ppd_table_3_fit.per_token_s(k, "tree"))
    apart = [1e3 * ppd_table_3_fit.per_token_s(7, law) for law in ("linear", "tree")]
    assert apart == pytest.approx([1e3 * 8 * linear.values[0], 1e3 * 3 * tree.values[0]], rel=1e-6)
    assert np.round(apart, 1).tolist() == [35.2, 26.4]


def test_on_squad_two_more_candidates_break_even() -> None:
    """The tie in the paper, predicted with a cost fitted on the other data set."""
    one, three = ppd_table_3_fit.runs("squad")
    saved = one.predicted_s(UnitCost(LAYERS)) - three.predicted_s(UnitCost(LAYERS))
    assert saved == pytest.approx(three.plain_s / 2 * (three.match_rate - one.match_rate) * (TOKENS - 1) / TOKENS)
    eaten = TOKENS * 2 * ppd_table_3_fit.fitted_seconds("cnn_dm")
    assert 0.9 < eaten / saved < 1.1
    assert three.latency_s == pytest.approx(one.latency_s, abs=2e-3)


def test_the_best_overhead_depends_on_the_assumed_layer() -> None:
    """The paper does not state the exit layer: at a later one, b k explains the table better than b (k + 1)."""
    assert ppd_overheads.leave_one_out(OVERHEADS["linear"]) < ppd_overheads.leave_one_out(OVERHEADS["candidates"])
    assert ppd_overheads.leave_one_out(OVERHEADS["linear"], 24) > ppd_overheads.leave_one_out(OVERHEADS["candidates"], 24)


@pytest.mark.parametrize("matches", [[True] * 8, [False] * 8, [True, False, False, True, True, False, True, False]])
def test_table_3_cannot_distinguish_busy_units_from_a_slow_link(matches: list[bool]) -> None:
    """Any part of b (k + 1) may be link time: formula and events agree on the time, and units are less busy."""
    parameters, b = Parameters(LAYERS, 20, 3), 1.5
    parts = [UnitCost(LAYERS, dispatch=b - share, dispatch_per_process=b, link=share) for share in (0.0, 0.5, 1.5)]
    rate = sum(matches[:-1]) / 7  # the mean of the record: times are sums over its matches
    played = [events.simulate(decode(parameters, [0], 8), 8, Cluster(4), cost, World(1, LAYERS, [int(m) for m in matches]))
              for cost in parts]  # fmt: skip
    said = [predict(parameters, 8, Iid(rate), cost) for cost in parts]
    for run, prediction in zip(played, said, strict=True):
        assert run.latency == pytest.approx(float(prediction.latency))
        assert run.busy == pytest.approx(float(prediction.busy))
        assert run.latency == pytest.approx(played[0].latency)
    assert played[0].busy > played[1].busy > played[2].busy


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (lambda: fit(OVERHEADS["linear"], []), ["runs must be at least one", "got none"]),
        (lambda: fit(OVERHEADS["fixed and linear"], RUNS[:1]), ["apart", "k = 1", "add runs"]),
        (lambda: fit(OVERHEADS["fixed and linear"], RUNS[1::2]), ["apart", "k = 3, 3", "fewer unknowns"]),
        (lambda: ppd_table_3_fit.runs("wmt"), ["unknown data_set 'wmt'", "cnn_dm"]),
        (lambda: ppd_table_3_fit.fitted_seconds("wmt"), ["unknown data_set 'wmt'", "both"]),
        (lambda: ppd_table_3_fit.fitted_seconds("squad", "star"), ["unknown dispatch_law 'star'", "tree"]),
        (lambda: ppd_table_3_fit.seconds_per_layer("both"), ["unknown data_set 'both'", "squad"]),
        (lambda: ppd_table_3_fit.per_token_s(0), ["candidates must be", "got 0"]),
        (lambda: OVERHEADS["linear"].cost((), 1.0), ["must be 1", "got 0"]),
    ],
)
def test_bad_input_of_fits_is_refused(wrong: object, words: list[str]) -> None:
    with pytest.raises(ParameterError) as error:
        wrong()  # type: ignore[operator]
    assert all(word in str(error.value) for word in words), str(error.value)
