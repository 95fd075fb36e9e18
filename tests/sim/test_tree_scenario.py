"""Scenarios of tree drafts: kinds of ranks, agreement of the views, what the bundled scenario shows, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from model.logs import position_log
from model.methods.tree import ranks_from_logs, theory
from model.methods.tree.algorithm import Parameters
from model.outcomes.rank_laws import RankRates
from sim.commands.sim_app import app
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes import rank_outcomes

ROW = [0.6, 0.2, 0.05]
RATES: dict[str, Any] = {"kind": "by-depth", "rank_rates": ROW}
CLASSES: dict[str, Any] = {"kind": "classes", "rank_rates": [[0.8, 0.1], [0.4, 0.3]], "weights": [1, 2]}


def scenario(outcomes: dict[str, Any], cost: dict[str, Any] | None = None, **method: Any) -> dict[str, Any]:
    return {
        "scenario": {"name": "trees", "tokens": 40, "replications": 4096, "event_replications": 8},
        "method": [{"name": "tree", "layers": 32, "shape": "full", "draft_depth": 2, "width": 2} | method],
        "outcomes": outcomes, "cost": cost or {"cost_ratio": 0.1},
    }  # fmt: skip


def views(document: dict[str, Any]) -> list[dict[str, Any]]:
    rows = sim.run(document).rows(named=True)
    return sorted(rows, key=lambda row: ("formula", "paths", "events").index(row["view"]))


@pytest.mark.parametrize("outcomes", [RATES, CLASSES, CLASSES | {"by_sequence": True}], ids=["by depth", "classes", "sequences"])
@pytest.mark.parametrize("drafter", ["model", "heads", "parallel"])
def test_views_agree(outcomes: dict[str, Any], drafter: str) -> None:
    """Paths within five standard errors of the mean: a false alarm in a million runs. Events are compared with paths by the run."""
    formula, paths, _ = views(scenario(outcomes, drafter=drafter, sequences=2))
    apart = abs(paths["latency_layers"] - formula["latency_layers"])
    assert apart <= 5 * formula["latency_sd_layers"] / 4096**0.5
    assert paths["latency_sd_layers"] == pytest.approx(formula["latency_sd_layers"], rel=0.08)


def test_a_tree_by_confidence_follows_the_class_of_the_draft() -> None:
    """With the confidences of two classes the tree accepts more than the same tree at their mean confidences."""
    method = {"shape": "eagle-2", "draft_depth": 3, "width": 2, "nodes": 4}
    mean = [(0.8 + 2 * 0.4) / 3, (0.1 + 2 * 0.3) / 3]
    own, blind = (
        views(scenario(CLASSES, **method, rank_rates=rates))[0]["tokens_per_round"]
        for rates in ([[0.8, 0.1], [0.4, 0.3]], [mean, mean])
    )
    assert own > blind


def test_rates_of_a_row_hold_at_all_depths() -> None:
    method = Parameters(32, "full", 2, 2)
    row = rank_outcomes.RanksByDepth(tuple(ROW)).outcome(method, 10).law
    table = rank_outcomes.RanksByDepth((tuple(ROW), tuple(ROW))).outcome(method, 10).law
    assert isinstance(row, RankRates)
    assert isinstance(table, RankRates)
    assert [[each.tolist() for each in law.rates[0]] for law in (row, table)] == [[[0.6, 0.2]] * 2] * 2


def test_interval_of_measured_rates() -> None:
    found = rank_outcomes.RanksByDepth(tuple(ROW), trials=200, source="measured").outcome(Parameters(32, "full", 2, 2), 10)
    assert found.rate_low < 0.6 < found.rate_high
    assert found.low.rates[0][0][0] == pytest.approx(found.rate_low)
    assert found.high.rates[0][0].sum() <= 1 + 1e-12


def test_recorded_ranks_are_replayed(tmp_path: Path) -> None:
    """A record of ranks is replayed by every view; longer records than needed are cut, shorter ones left out."""
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps({"ranks": [[[1, 2]] * 40, [[0, 0]] * 41, [[1, 1]] * 3]}), encoding="utf-8")
    formula, paths, _ = views(scenario({"kind": "replay", "file": str(file)}))
    assert formula["first_rank_rate"] == pytest.approx(0.5)
    # 14 rounds of three tokens but for the last, or 40 of one.
    assert formula["tokens_per_round"] == pytest.approx(40 / ((14 + 40) / 2))
    assert paths["tokens_per_round"] == pytest.approx(formula["tokens_per_round"], rel=0.05)


def test_position_logs_are_records_of_ranks(tmp_path: Path) -> None:
    """A draft that starts at a position has the ranks of the positions after it, along the target's own tokens."""
    log = position_log.bundled()
    ranks = np.where(log.table["draft_token"] == log.table["token"], 1, 1 + np.arange(log.table.height) % 4)
    table = log.table.with_columns(pl.Series("draft_rank", ranks.astype(np.int32)))
    where = position_log.save(position_log.PositionLog(table, log.header), tmp_path / "log.json")
    own = [ranks_from_logs.windows(each, 2) for each in log.by_sequence(ranks)]
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps({"ranks": [each.tolist() for each in own]}), encoding="utf-8")
    found = [views(scenario({"kind": "replay", "file": str(each)})) for each in (where, file)]
    for ours, theirs in zip(*found, strict=True):
        assert ours["tokens_per_round"] == theirs["tokens_per_round"]
        assert ours["first_rank_rate"] == theirs["first_rank_rate"]


def test_position_logs_without_ranks_are_refused(tmp_path: Path) -> None:
    log = position_log.bundled()
    assert not log.ranked, "the bundled log is of an earlier version"
    where = position_log.save(log, tmp_path / "log.json")
    with pytest.raises(ParameterError, match=r"log\.json': this log has no column draft_rank, the ranks among the draft's tokens"):
        sim.run(scenario({"kind": "replay", "file": str(where)}))
    bare = position_log.PositionLog(log.table.drop(*position_log.DRAFT), {**log.header, "draft": None})
    where = position_log.save(bare, tmp_path / "bare.json")
    with pytest.raises(ParameterError, match="this log was made without a draft; make one with --draft"):
        sim.run(scenario({"kind": "replay", "file": str(where)}))


@pytest.mark.parametrize(("content", "message"), [
    ({"acceptance": []}, "key ranks is missing in"),
    ([[1]], "key ranks is missing in"),
    ({"ranks": []}, "ranks of .* must be a list of sequences"),
    ({"ranks": [[1, 2]]}, r"ranks\[0\] of .* must be a list of the ranks by depth"),
    ({"ranks": [[[1], [1, 2]]]}, r"must have the same depths at each position, at most 64, got \[1, 2\]"),
    ({"ranks": [[[1, -1]]]}, r"ranks\[0\]\[0\]\[1\] of .* must be between 0 and 65535, got -1"),
    ({"ranks": [[[1, 0.5]]]}, r"ranks\[0\]\[0\]\[1\] of .* must be a whole number"),
    ({"ranks": [[[1, 1]] * 8]}, "tokens must be at most 8, the longest sequence of"),
    ({"ranks": [[[1]] * 40]}, "must be known for each of 2 depths of the tree, got 1; draft less deep"),
])  # fmt: skip
def test_impossible_records(tmp_path: Path, content: Any, message: str) -> None:
    file = tmp_path / "ranks.json"
    file.write_text(json.dumps(content), encoding="utf-8")
    with pytest.raises(ParameterError, match=message):
        sim.run(scenario({"kind": "replay", "file": str(file)}))


@pytest.mark.parametrize(("outcomes", "method", "message"), [
    ({"kind": "by-depth"}, {}, "outcomes.rank_rates is required"),
    ({"kind": "iid", "acceptance_rate": 0.6}, {}, "unknown outcomes.kind 'iid'; known: by-depth, classes, replay"),
    (RATES | {"rank_rates": [0.6]}, {}, r"rank_rates\[0\] must have a rate for each of 2 ranks, got 1"),
    (RATES | {"rank_rates": [[0.6, 0.1]]}, {}, "rank_rates must have the rates of all ranks for each of 2 depths, got 1"),
    (RATES | {"rank_rates": [0.7, 0.5]}, {}, r"rank_rates\[0\] must sum to at most 1, got 1.2"),
    (RATES | {"rank_rates": 0.7}, {}, "rank_rates must be a list"),
    (CLASSES | {"weights": [1]}, {}, "weights must be a list of 2 shares"),
    (CLASSES | {"weights": [0, 0]}, {}, "weights must not all be 0"),
    (CLASSES, {"shape": "eagle-2", "nodes": 3, "rank_rates": [0.6, 0.2]}, "rank_rates must have a table for each of 2 classes"),
    (RATES, {"shape": "eagle-2", "nodes": 3}, "rank_rates must have a table for each of 1 classes"),
    (RATES, {"shape": "eagle-2", "nodes": 3, "rank_rates": [0.2, 0.6]}, "in the order of its confidence"),
    (RATES, {"shape": "listed", "draft_depth": None, "width": None, "parents": [-1, 1]}, "that is a cycle"),
])  # fmt: skip
def test_impossible_scenarios(outcomes: dict[str, Any], method: dict[str, Any], message: str) -> None:
    document = scenario(outcomes)
    document["method"][0] = {name: value for name, value in (document["method"][0] | method).items() if value is not None}
    with pytest.raises(ParameterError, match=message):
        sim.run(document)


def test_bad_input_of_a_command_is_one_line(tmp_path: Path) -> None:
    """Exit code 2, and nothing is written."""
    out = tmp_path / "out"
    for change, said in (
        ("method.parents=[-1, 3]", "parents must be left out with shape='chain'"),
        ("outcomes.rank_rates=[0.9, 0.9]", "must sum to at most 1, got 1.8"),
        ("outcomes.rank_rates=0.9", "rank_rates must be a list"),
    ):
        done = CliRunner().invoke(app, ["run", "tree", "--set", change, "--out", str(out)])
        assert done.exit_code == 2
        assert said in done.stderr
        assert len(done.stderr.splitlines()) == 1
        assert not out.exists()


def test_bundled_scenario_shows_where_the_wide_tree_loses() -> None:
    """One sequence: the published tree is faster than the chain. 32 sequences: it is slower than the chain and than plain decoding.
    Of Sequoia's trees the one made for a batch is the fastest there, and faster than the chain."""
    rows = sim.run("tree", views=["formula"]).rows(named=True)

    def speed(sequences: int, shape: str, nodes: int | None = None) -> float:
        own = [row for row in rows if (row["sequences"], row["shape"]) == (sequences, shape) and nodes in (None, row["nodes"])]
        assert len(own) == 1
        return float(own[0]["speedup"])

    assert speed(1, "eagle-2") > speed(1, "chain") > 1
    assert speed(32, "chain") > 1 > speed(32, "eagle-2")
    made = {1: 63, 8: 19, 32: 7}
    for sequences, nodes in made.items():
        speeds = {each: speed(sequences, "sequoia", each) for each in made.values()}
        assert max(speeds, key=lambda each: speeds[each]) == nodes
        assert speeds[nodes] > speed(sequences, "chain")
        assert speeds[63] >= speed(sequences, "eagle-2") * 0.999  # it accepts no fewer tokens, in passes of the same sizes


def test_trees_of_the_bundled_scenario_are_the_best_for_their_batches() -> None:
    """`best_tree` at the costs of each batch finds the nodes and depth that the scenario has."""
    grid = Grid(scenario_file.load("tree"))
    rates = scenario_file.load("tree")["outcomes"]["rank_rates"]
    for point, (nodes, depth) in enumerate([(63, 5), (19, 4), (7, 3)]):
        case = grid.case(point)
        tree = theory.best_tree([rates] * 5, 32, case.cost, nodes=63, depth=5, at=64).tree
        assert tree is not None
        assert (tree.nodes, tree.depth) == (nodes, depth)
