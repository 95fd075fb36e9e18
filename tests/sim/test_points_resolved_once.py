"""Points of a grid share their parts: each equals a scenario of that point alone, and each part is resolved once."""

from __future__ import annotations

import copy
from typing import Any

import polars as pl
import pytest

import sim
from sim.runs import results_table
from sim.scenarios import cases, scenario_file
from sim.scenarios.grid import Grid
from sim.views import formula_view

DOUBT = {"kind": "two-class", "low_if_accepted": 0.1, "low_if_rejected": 0.6}
GRIDS: dict[str, dict[str, Any]] = {
    "rates of a table by position, exit layer and tokens": {
        "scenario": {"name": "x", "tokens": 6},
        "method": [{"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 1}],
        "outcomes": {"kind": "published", "by_position": True, "data_set": "squad", "head": "final"},
        "sweep": {"scenario.tokens": [6, 16], "method.candidates": [1, 3], "method.exit_layer": [20, 30]},
    },
    "which outcomes are asked for, by the policy": {
        "scenario": {"name": "x", "tokens": 12},
        "method": [{"name": "adaptive", "layers": 8, "policy": "confidence"}],
        "outcomes": {"accept": {"kind": "iid", "acceptance_rate": 0.7}, "confidence": DOUBT},
        "cost": {"cost_ratio": 0.1},
        "sweep": {"method.draft_layers": [1, 2], "outcomes.accept.acceptance_rate": [0.4, 0.8]},
    },
    "records that cover all tokens": {
        "scenario": {"name": "x", "tokens": 3},
        "method": [{"name": "speculative", "layers": 8, "draft_length": 2}],
        "outcomes": {"kind": "replay", "source": "measured", "records": [
            [True, True, False, True, True], [True, False, False, True, False],
        ]},
        "cost": {"cost_ratio": 0.1},
        "sweep": {"scenario.tokens": [2, 3, 5], "method.draft_length": [1, 2], "cost.cost_ratio": [0.1, 0.2]},
    },
    "laws of two kinds, and several methods": {
        "scenario": {"name": "x", "tokens": 9},
        "method": [
            {"name": "speculative", "layers": 8, "draft_length": 2, "outcomes": {"kind": "iid", "acceptance_rate": 0.5}},
            {"name": "ppd", "layers": 8, "exit_layer": 4, "candidates": 1, "outcomes": {"kind": "iid", "match_rate": 0.5}},
        ],
        "cost": {"cost_ratio": 0.1},
        "sweep": {"scenario.tokens": [2, 9], "method.layers": [7, 8]},
    },
    "an axis of costs that is called as a parameter of the method is": {
        "scenario": {"name": "x", "tokens": 4},
        "method": [{
            "name": "skipdecode", "layers": 32, "min_layers": 8, "max_layers": 32, "prompt": 100, "sequence_length": 110,
        }],
        "cost": {"kind": "roofline", "device": "h100", "shape": "llama-2-7b", "prompt": 100},
        "sweep": {"cost.prompt": [100, 200], "method.prompt": [90, 100]},
    },
    "work and operations of early exit, by law and costs": {
        "scenario": {"name": "x", "tokens": 5},
        "method": [{"name": "early_exit", "layers": 24, "first_check": 20}],
        "outcomes": {"kind": "hazards", "hazards": [0.0] * 24},
        "cost": {"shape": "opt-1.3b", "propagation": 0.1},
        "sweep": {
            "method.fill": ["propagate", "backfill"], "cost.final_head": [0.0, 1.5],
            "outcomes.hazards": [[0.0] * 19 + each for each in ([0.1, 0.5, 0.0, 0.2, 1.0], [0.9, 0.0, 0.3, 0.4, 1.0])],
        },
    },
    "work and operations of BiLD, by law, draft length and costs": {
        "scenario": {"name": "x", "tokens": 12},
        "method": [{"name": "bild", "layers": 24, "draft_layers": 6, "placement": "separate"}],
        "outcomes": {"kind": "rates", "fallback_rate": 0.2, "rollback_rate": 0.1, "trials": 50},
        "cost": {"cost_ratio": 0.25, "operations_ratio": 0.2, "link": 2.0, "shape": "t5-large", "draft_shape": "t5-small"},
        "sweep": {
            "method.max_draft_length": [2, 9], "outcomes.fallback_rate": [0.0, 0.3], "cost.cost_ratio": [0.1, 0.4],
            "method.variant": ["paper", "code"],
        },
    },
    "operations of methods that count layers and of one whose busy time counts": {
        "scenario": {"name": "x", "tokens": 6},
        "method": [
            {"name": "skipdecode", "layers": 8, "min_layers": 2, "max_layers": 6, "prompt": 4, "sequence_length": 10},
            {"name": "early_exit", "layers": 8, "exit_layer": 5}, {"name": "autoregressive", "layers": 8},
        ],
        "sweep": {"cost.final_head": [0.0, 0.5], "method.layers": [8, 9], "scenario.tokens": [3, 6]},
    },
}  # fmt: skip


def alone(grid: Grid, point: int) -> dict[str, Any]:
    """The tables of one point, without a sweep and with only its method."""
    tables = copy.deepcopy(grid.base)
    for path, value in grid.values(point).items():
        scenario_file.apply(tables, path, value)
    tables["method"] = [tables["method"][grid.indices(point)[0]]]
    if "cost" in tables and tables["method"][0]["name"] == "ppd":
        del tables["cost"]
    return tables


@pytest.mark.parametrize("name", GRIDS)
def test_points_equal_single_point_scenarios(name: str) -> None:
    grid = Grid(GRIDS[name])
    rows = results_table.table(formula_view.frame(grid, 0, grid.points)).sort("point")
    assert rows["point"].to_list() == [*range(grid.points)]
    for point in range(grid.points):
        one = results_table.table(formula_view.frame(Grid(alone(grid, point)), 0, 1))
        got = rows.filter(point=point)
        shared = [column for column in one.columns if column != "point"]
        for column in shared:
            ours, theirs = got[column][0], one[column][0]
            assert ours == (pytest.approx(theirs, rel=1e-12) if isinstance(theirs, float) else theirs), (point, column)


@pytest.mark.parametrize("name", GRIDS)
def test_choices_and_outcomes_are_resolved_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over all views each distinct part is resolved once, not once per point, view or shard."""
    choices, outcomes = cases.resolve_but_outcomes, cases.resolve_outcomes
    counts = {"choices": 0, "outcomes": 0}

    def counted(key: str, right: Any) -> Any:
        def resolve(*args: Any) -> Any:
            counts[key] += 1
            return right(*args)

        return resolve

    monkeypatch.setattr(cases, "resolve_but_outcomes", counted("choices", choices))
    monkeypatch.setattr(cases, "resolve_outcomes", counted("outcomes", outcomes))
    grid = Grid(GRIDS[name], check=False)
    laws = [path for path in GRIDS[name]["sweep"] if path.startswith("outcomes.")]
    values = 1
    for path in laws:
        values *= len(GRIDS[name]["sweep"][path])
    sim.run(GRIDS[name], replications=8)
    assert counts["choices"] == grid.points / values
    assert counts["outcomes"] <= grid.points


def test_constant_law_is_shared_by_all_points(monkeypatch: pytest.MonkeyPatch) -> None:
    right, made = cases.resolve_outcomes, []

    def resolve(*args: Any) -> Any:
        made.append(right(*args))
        return made[-1]

    monkeypatch.setattr(cases, "resolve_outcomes", resolve)
    tables = GRIDS["records that cover all tokens"] | {"outcomes": {"kind": "iid", "acceptance_rate": 0.5}}
    found = sim.run(tables, views=["formula"])
    assert (found.height, len(made)) == (12, 1)
    assert isinstance(found, pl.DataFrame)


def test_cost_axis_with_the_name_of_a_parameter_has_a_column() -> None:
    found = sim.run(GRIDS["an axis of costs that is called as a parameter of the method is"], views=["formula"])
    assert found["cost.prompt"].to_list() == [100, 100, 200, 200]
    assert found["prompt"].to_list() == [90, 100, 90, 100]
