"""Provenance of results: sources of rates and times, reserved units, and views that model waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats

import sim
from model import published
from sim.runs import sweep
from sim.scenarios.grid import Grid
from sim.scenarios.scenario_file import cost_source

MEASURED = {"kind": "iid", "match_rate": 0.55, "trials": 5000, "source": "measured"}


def tables(**changes: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "provenance", "tokens": 8, "replications": 4},
        "method": [{"name": "ppd", "layers": 8, "exit_layer": 4, "candidates": 2}],
        "outcomes": dict(MEASURED),
        **changes,
    }


def test_overridden_measured_rate_is_assumed() -> None:
    own = sim.run(tables(), views=["formula"])
    assert own["outcomes_source"].to_list() == ["measured"]
    assert own["match_rate_trials"].to_list() == [5000]
    for change in ({"set": {"outcomes.match_rate": 0.4}}, {"sweep": {"outcomes.match_rate": [0.4]}}):
        other = sim.run(tables(), views=["formula"], **change)
        assert other["outcomes_source"].to_list() == ["assumed"]
        assert other["match_rate"].to_list() == [0.4]
        assert "speedup_input_low" not in other.columns or other["speedup_input_low"].null_count() == 1
    with_source = {"outcomes.match_rate": 0.4, "outcomes.trials": 10, "outcomes.source": "measured"}
    told = sim.run(tables(), views=["formula"], set=with_source)
    assert told["outcomes_source"].to_list() == ["measured"]
    assert told["match_rate_trials"].to_list() == [10]


def test_seed_option_replaces_a_swept_seed() -> None:
    asked = sweep.resolve(tables(sweep={"scenario.seed": [1, 2]}), seed=5)
    assert Grid(asked).points == 1
    assert Grid(asked).case(0).settings.seed == 5


def test_source_of_times_is_reported(tmp_path: Path) -> None:
    assert cost_source(tables()) == "assumed: every layer of the target takes one layer-time; nothing else takes time"
    uneven = tables(cost={"layer_times": [1.0] * 7 + [3.0], "final_head": 0.5})
    assert "layer_times, final_head" in cost_source(uneven)
    sim.run(uneven, views=["formula"], out=tmp_path / "run")
    assert json.loads((tmp_path / "run" / "metadata.json").read_text())["cost"] == cost_source(uneven)


def test_columns_in_seconds_scale_layer_times() -> None:
    row = sim.run(tables(cost={"seconds_per_layer": 0.002})).to_dicts()[1]
    assert row["latency_s"] == pytest.approx(row["latency_layers"] * 0.002)
    assert row["tpot_ms"] == pytest.approx(row["latency_s"] * 1e3 / 8)
    assert row["tpot_ms_low"] == pytest.approx(row["tpot_layers_low"] * 2)


def test_own_costs_and_outcomes_are_used_by_vectorised_formulas() -> None:
    plain = {"name": "ppd", "layers": 8, "exit_layer": 4, "candidates": 1}
    for own in ({"cost": {"final_head": 4.0, "dispatch": 2.0}}, {"outcomes": {"kind": "iid", "match_rate": 1.0}}):
        axis = {"method.candidates": [1, 2]} if "outcomes" in own else {"outcomes.match_rate": [0.0, 1.0]}
        asked = tables(method=[plain | own], outcomes={"kind": "iid", "match_rate": 0.0}, sweep=axis)
        found = sim.run(asked, views=["formula", "paths"])
        by_view = [found.filter(view=view)["latency_layers"].to_list() for view in ("formula", "paths")]
        assert by_view[0] == pytest.approx(by_view[1])


def test_nested_tree_grown_by_overheads_is_contended() -> None:
    method = [{"name": "ppd", "layers": 10, "exit_layer": 5, "candidates": 3, "form": "nested"}]
    held = {}
    for units in (4, 40):  # four generations of processes are alive at once, 1 + 3 + 9 + 27
        run = sim.run(tables(method=method, cost={"final_head": 8.0}, cluster={"units": units}), views=["events"])
        assert run["contended"].to_list() == [units < 40]
        held[units] = run.select("latency_layers", "reserved_units", "mean_busy_units").row(0)
    assert held[40][0] < held[4][0]  # with four units it waited
    assert held[40][1] >= held[40][2]  # only reserved units can be busy
    plain = sim.run(tables(method=method), views=["events"])
    assert plain["contended"].to_list() == [False]


def test_only_invalid_points_fail() -> None:
    method = [{"name": "ppd", "layers": 8, "exit_layer": 4, "candidates": 1, "form": "nested"}]
    for rates in (3, 300):  # point by point, and as arrays
        change = {
            "method.exit_layer": [1, 4], "method.candidates": [1, 9],
            "outcomes.match_rate": {"from": 0.1, "to": 0.9, "count": rates},
        }  # fmt: skip
        run = sim.run(tables(method=method, outcomes={"kind": "iid", "match_rate": 0.5}, sweep=change), views=["formula"])
        assert set(run.select("exit_layer", "candidates").iter_rows()) == {(1, 1), (4, 1), (4, 9)}
        assert run.height == 3 * rates


def test_reserved_units_are_at_most_those_of_the_cluster() -> None:
    run = sim.run(tables(cluster={"units": 1}))
    assert dict(run.select("view", "reserved_units").iter_rows()) == {"formula": 1.0, "paths": 1.0, "events": 1.0}


@pytest.mark.parametrize(
    "outcomes",
    [
        {"kind": "markov", "match_rate": 0.5, "correlation": 0.3, "trials": 1000},
        {"kind": "published", "data_set": "squad", "head": "trained", "by_position": True},
        {"kind": "replay", "records": [[True, False] * 4, [True] * 5 + [False] * 3, [False, False, True, True] * 2]},
    ],
)
def test_laws_with_known_counts_have_an_input_interval(outcomes: dict[str, Any]) -> None:
    method = [{"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3}]
    run = sim.run(tables(method=method, outcomes=outcomes))
    for low, value, high in run.select("speedup_input_low", "speedup", "speedup_input_high").iter_rows():
        assert low < value < high


def test_interval_of_records_is_that_of_their_mean_rate() -> None:
    """Student's interval between records: positions within a record are not trials. Equal records, or a single one, give none."""
    records = [[True] * 6 + [False] * 2, [True, False] * 4, [True] * 2 + [False] * 6, [False, True] * 4]
    outcome = Grid(tables(outcomes={"kind": "replay", "records": records})).case(0).outcome
    assert outcome is not None
    low, high = stats.t.interval(0.95, 3, np.mean(records), stats.sem(np.mean(records, axis=1)))
    # Positions are shifted together, and none beyond 0 or 1.
    by_position, half = np.mean(records, axis=0), (high - low) / 2
    assert outcome.rate_low == pytest.approx(np.clip(by_position - half, 0, 1).mean())
    assert outcome.rate_high == pytest.approx(np.clip(by_position + half, 0, 1).mean())
    for alike in ([[True, False] * 4], [[True, False] * 4] * 3):
        case = Grid(tables(outcomes={"kind": "replay", "records": alike})).case(0)
        assert case.outcome is not None
        assert case.outcome.low is None


def test_published_table_with_bins_needs_by_position() -> None:
    """Each position has the rate of its bin, or all have the printed total; the key is required, and the results differ."""
    law = {"kind": "published", "table": "ppd-table-6", "data_set": "squad", "head": "trained"}
    method = {"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3}

    def run(**more: object) -> float:
        table = sim.run(tables(outcomes=law | more, method=[method], scenario={"name": "s", "tokens": 16}), views=["formula"])
        return float(table["latency_layers"][0])

    with pytest.raises(ValueError, match=r"by_position is required by ppd-table-6, .*: true gives .*, false .* the printed total"):
        run()
    rates, _ = published.match_rates_by_position(data_set="squad", layer=20, candidates=3, head="trained", tokens=16)
    total = published.match_rate("ppd-table-6", data_set="squad", layer=20, candidates=3, head="trained").rate
    # Theorem 4.1: each of the 15 tokens after the first takes d - d', or d where its early prediction was wrong.
    assert run(by_position=True) == pytest.approx(40 + 20 * 15 + 20 * (1 - rates[:15]).sum(), abs=1e-9)
    assert run(by_position=False) == pytest.approx(40 + 20 * 15 + 20 * 15 * (1 - total), abs=1e-9)
