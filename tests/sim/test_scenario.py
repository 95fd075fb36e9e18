"""Scenarios and their grids: loading, overrides, numbering of points, and checks before a run."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import sim
from model.base.checks import ParameterError
from model.base.table_records import parse_value
from model.logs import position_log
from sim.runs.shard_plan import ShardPlan
from sim.runs.sweep import resolve
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid, parse_axis


def tables(**sections: Any) -> scenario_file.Tables:
    """A small scenario, with sections replaced."""
    base = {
        "scenario": {"name": "small", "tokens": 8, "replications": 16},
        "method": [{"name": "ppd", "layers": 4, "exit_layer": 2, "candidates": 1}],
        "outcomes": {"kind": "iid", "match_rate": 0.5},
    }
    return {**base, **sections}


# --- loading -----------------------------------------------------------------------------------------------------------


def test_default_scenario_is_used_without_a_name() -> None:
    assert scenario_file.load() == scenario_file.load(scenario_file.DEFAULT)


def test_file_hides_a_bundled_scenario_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / scenario_file.DEFAULT).write_text('[scenario]\nname = "mine"\n')
    assert scenario_file.load(scenario_file.DEFAULT)["scenario"]["name"] == "mine"
    assert scenario_file.load()["scenario"]["name"] == scenario_file.DEFAULT


def test_given_tables_are_not_changed() -> None:
    given = tables(sweep={"method.candidates": [1, 2]})
    before = tables(sweep={"method.candidates": [1, 2]})
    changed = resolve(given, set={"method.candidates": 3, "cost.link": 1}, sweep={"scenario.tokens": [1]}, seed=5)
    Grid(given).case(1)
    assert given == before
    assert changed["method"][0]["candidates"] == 3
    assert changed["sweep"] == {"scenario.tokens": [1]}
    assert changed["cost"] == {"link": 1}


@pytest.mark.parametrize("name", scenario_file.names())
def test_bundled_scenarios_load_at_every_point(name: str) -> None:
    grid = Grid(scenario_file.load(name))
    own = scenario_file.load(name)["scenario"]
    assert own["name"] == name
    for point in range(grid.points):
        assert grid.case(point).settings.tokens == own["tokens"]


# --- overriding --------------------------------------------------------------------------------------------------------


def test_parameter_is_set_in_every_method() -> None:
    methods = [{"name": "ppd", "layers": 4, "exit_layer": 2, "candidates": 1}, {"name": "autoregressive", "layers": 4}]
    changed = resolve(tables(method=methods), set={"method.layers": 3})
    assert [method["layers"] for method in changed["method"]] == [3, 3]
    with pytest.raises(ParameterError, match="autoregressive takes no candidates"):
        resolve(tables(method=methods), set={"method.candidates": 3})


def test_replications_apply_to_paths_and_events() -> None:
    changed = resolve(tables(), replications=7)
    assert ShardPlan(Grid(changed)).replications == {"formula": 1, "paths": 7, "events": 7}


def test_python_accepts_one_view_and_any_sequence_as_axis() -> None:
    assert resolve(tables(), views="formula")["scenario"]["views"] == ["formula"]
    for axis in ((1, 2, 3), range(1, 4), np.arange(1, 4)):
        assert resolve(tables(), sweep={"method.candidates": axis})["sweep"] == {"method.candidates": [1, 2, 3]}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("0.25", 0.25), ("true", True), ("literal", "literal"), ('"3"', "3"), ("", ""), ("[1, [2]]", [1, [2]]),
        ("2024-01-01x", "2024-01-01x"), ("9" * 5000, "9" * 5000), ("[" * 3000, "[" * 3000),
    ],
    ids=lambda value: str(value)[:12],
)  # fmt: skip
def test_values_of_the_command_line(text: str, value: Any) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize(
    ("text", "axis"),
    [
        ("3", [3]), ("1, 3", [1, 3]), ("[1, 3]", [1, 3]), ("", []), ("a:b:c", ["a:b:c"]), ("squad,wmt", ["squad", "wmt"]),
        ("0:1:3", {"from": 0, "to": 1, "count": 3}),
    ],
)  # fmt: skip
def test_axes_of_the_command_line(text: str, axis: Any) -> None:
    assert parse_axis(text) == axis


def test_fingerprint_covers_what_determines_the_results() -> None:
    same = scenario_file.fingerprint(resolve(tables(), set={"outcomes.match_rate": 0.5}))
    assert same == scenario_file.fingerprint(resolve(tables()))
    for change in ({"outcomes.match_rate": 0.4}, {"scenario.seed": 1}, {"cost.link": 1}, {"cluster.units": 1}):
        assert scenario_file.fingerprint(resolve(tables(), set=change)) != same


REPLAYED = """
scenario = { name = "played", tokens = 8, views = ["formula"] }
method = { name = "ppd", layers = 12, exit_layer = 6, candidates = 1 }
outcomes = { match = { kind = "replay", log = "some.json", head = "common" } }
sweep = { "outcomes.match.log" = ["some.json", "family"] }
"""


def test_log_is_relative_to_the_scenario_and_hashed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = position_log.bundled()

    def write(texts: pl.Expr) -> None:
        kept = whole.table.filter(texts)
        position_log.save(position_log.PositionLog(kept, whole.header), tmp_path / "there" / "some.json")

    write(pl.col("prompt") < 3)
    (tmp_path / "there" / "played.toml").write_text(REPLAYED)
    monkeypatch.chdir(tmp_path)
    swept = sim.run("there/played.toml")
    assert swept["outcomes.match.log"].to_list() == ["there/some.json", "family"]
    assert swept["match_rate"].n_unique() == 2
    (tmp_path / "there" / "played.toml").write_text(REPLAYED.partition("sweep")[0])
    first = sim.run("there/played.toml", out="run")
    sim.run("there/played.toml", out="run", resume=True)
    write(pl.col("prompt") >= 3)
    with pytest.raises(ParameterError, match="holds the run of another scenario"):
        sim.run("there/played.toml", out="run", resume=True)
    other = sim.run("there/played.toml", out="other")
    assert other["match_rate"].item() != first["match_rate"].item() == swept["match_rate"][0]


# --- the grid ----------------------------------------------------------------------------------------------------------


def test_points_are_methods_times_axes_last_axis_fastest() -> None:
    methods = [{"name": "ppd", "layers": 4, "exit_layer": 2, "candidates": 1}, {"name": "autoregressive", "layers": 4}]
    grid = Grid(tables(method=methods, sweep={"scenario.tokens": [3, 5, 7], "method.layers": [3, 4]}))
    cases = [grid.case(point) for point in range(grid.points)]
    found = [(case.method, case.settings.tokens, case.parameters.layers) for case in cases]
    assert found == [*itertools.product(["ppd", "autoregressive"], [3, 5, 7], [3, 4])]
    assert grid.values(3) == {"scenario.tokens": 5, "method.layers": 4}


def test_range_includes_both_ends_and_keeps_integers() -> None:
    grid = Grid(tables(sweep={"scenario.tokens": {"from": 2, "to": 8, "count": 4}}))
    assert [grid.case(point).settings.tokens for point in range(4)] == [2, 4, 6, 8]
    assert all(isinstance(value, int) for value in grid.axes[0].values)
    rates = Grid(tables(sweep={"outcomes.match_rate": {"from": 0, "to": 0.7, "count": 8}})).axes[0].values
    assert rates[7] == 0.7
    assert rates[0] == 0
    one = Grid(tables(sweep={"outcomes.match_rate": {"from": 0.25, "to": 1, "count": 1}})).axes[0].values
    assert len(one) == 1


@pytest.mark.parametrize("tokens", [[8], [*range(1, 601)]], ids=["small", "large"])
def test_value_invalid_in_all_combinations_is_refused(tokens: list[int]) -> None:
    wrong_in_places = {"method.form": ["literal", "flat"], "method.exit_layer": [1, 2], "scenario.tokens": tokens}
    grid = Grid(tables(sweep=wrong_in_places))
    with pytest.raises(ParameterError, match="at least layers/2"):
        grid.case(0)
    with pytest.raises(ParameterError, match="between 1 and layers=4, got 5"):
        Grid(tables(sweep={**wrong_in_places, "method.exit_layer": [1, 2, 5]}))
    with pytest.raises(ParameterError, match="at least layers/2"):
        Grid(tables(sweep={"method.exit_layer": [1, 2], "scenario.tokens": tokens}))


def test_a_long_axis_is_checked_at_its_extremes() -> None:
    for bad in (1.5, -0.5, float("nan"), "half"):
        rates = [*np.linspace(0, 1, 600).tolist(), bad, 0.5]
        with pytest.raises(ParameterError, match="match_rate must be"):
            Grid(tables(sweep={"outcomes.match_rate": rates}))


def test_billion_points_are_not_listed() -> None:
    axes = {"outcomes.match_rate": {"from": 0, "to": 1, "count": 10**6}, "scenario.tokens": {"from": 1, "to": 1000, "count": 1000}}
    grid = Grid(tables(sweep=axes))
    assert grid.points == 10**9
    assert grid.values(10**9 - 1) == {"outcomes.match_rate": 1, "scenario.tokens": 1000}
    plan = ShardPlan(grid)
    assert plan.count() > 10**6


def test_shards_cover_every_piece_once() -> None:
    plan = ShardPlan(Grid(resolve(tables(sweep={"scenario.tokens": [4, 8]}), replications=9000)))
    shards = plan.shards()
    assert len(shards) == plan.count()
    for view in plan.views:
        work = [piece for shard in shards if shard.view == view for piece in plan.work(shard)]
        replications = plan.replications[view]
        for point in range(2):
            stretches = [(start, stop) for own, start, stop in work if own == point]
            assert [number for start, stop in stretches for number in range(start, stop)] == [*range(replications)]
