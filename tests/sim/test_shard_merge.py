"""Merge of shards by blocks of points: the size of a block and the shards that share points do not affect a byte."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from sim.runs import results_table, shard_merge, shard_plan, sweep
from sim.runs.shard_plan import ShardPlan
from sim.scenarios.grid import Grid
from sim.views import agreement

REPLICATIONS = 10_000
"""More than a block of random numbers, so that a point of the view paths has several pieces."""
TABLES: dict[str, Any] = {
    "scenario": {"name": "blocks", "tokens": 6, "replications": REPLICATIONS, "event_replications": 24},
    "method": [{"name": "speculative", "layers": 8, "draft_length": 2}, {"name": "pearl", "layers": 8, "draft_length": 2}],
    "outcomes": {"kind": "iid", "acceptance_rate": 0.8, "source": "assumed"},
    "cost": {"cost_ratio": 0.25},
    "sweep": {"method.draft_length": [1, 2, 3], "cluster.units": [1, 2]},
}
"""Two methods with columns of their own. PEARL waits on one unit, so that it has no value in some views there."""


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few pieces in a shard, so that points are in several shards and shards have several points; no table of distributions."""
    monkeypatch.setattr(results_table, "FEW_POINTS", 0)
    monkeypatch.setattr(shard_plan, "SHARD_SECONDS", 0.002)
    monkeypatch.setattr(shard_plan, "VECTORISED_POINTS", 5)


VIEWS = ("formula", "paths", "events")


def merged_by(block: int, out: Path, monkeypatch: pytest.MonkeyPatch, views: Sequence[str] = VIEWS) -> dict[str, bytes]:
    """Files of a run whose shards are kept and merged again by blocks of this size."""
    monkeypatch.setattr(shard_merge, "BLOCK_POINTS", block)
    sweep.run(TABLES, out=out, jobs=1, resume=True, views=views)
    assert not [*(out / "shards").glob(".*")]
    return {path.name: path.read_bytes() for path in out.iterdir() if path.is_file() and path.name != "metadata.json"}


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("views", [VIEWS, ("paths", "events"), ("events",)], ids=" ".join)
def test_size_of_a_block_does_not_affect_a_byte(views: Sequence[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the formula, the order of columns is that of the simulated rows: of all of one view before the other's."""
    out = tmp_path / "run"
    plan = ShardPlan(Grid(TABLES))
    spans = [plan.points(shard) for shard in plan.shards() if shard.view != "formula"]
    assert any(first == other[0] for (first, _), other in itertools.pairwise(spans))  # a point in two shards
    whole = merged_by(1000, out, monkeypatch, views)
    for block in (1, 2, 3, 5, 7):
        assert merged_by(block, out, monkeypatch, views) == whole, block
    table = pl.read_parquet(out / "results.parquet")
    assert table.select("point", "view").rows() == [*itertools.product(range(12), views)]
    counted = table.drop_nulls("replications").group_by("view").agg(pl.col("replications").unique())
    assert dict(counted.rows()) == {view: [24 if view == "events" else REPLICATIONS] for view in views if view != "formula"}


@pytest.mark.usefixtures("small_pieces")
def test_failed_points_are_dropped_in_every_block(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate = sweep.evaluation.evaluate

    def failing(grid: Grid, view: str, pieces: list[tuple[int, int, int]]) -> Any:
        rows, failures = evaluate(grid, view, [piece for piece in pieces if (piece[0], piece[1]) != (3, 4096)])
        broken = [{"point": 3, "view": view, "error": "made"} for point, first, _ in pieces if (point, first) == (3, 4096)]
        return rows, [*failures, *broken]

    monkeypatch.setattr(sweep.evaluation, "evaluate", failing)
    out = tmp_path / "run"
    whole = merged_by(1000, out, monkeypatch)
    assert all(merged_by(block, out, monkeypatch) == whole for block in (1, 4))
    assert [(each["point"], each["view"]) for each in json.loads((out / "failed.json").read_text())] == [(3, "paths")]
    table = pl.read_parquet(out / "results.parquet")
    assert table.filter(point=3)["view"].to_list() == ["formula", "events"]
    assert table.height == 3 * 12 - 1


@pytest.mark.usefixtures("small_pieces")
def test_points_of_a_shard_are_those_of_its_pieces() -> None:
    plan = ShardPlan(Grid(TABLES))
    for shard in plan.shards():
        points = {point for point, *_ in plan.work(shard)}
        assert {*range(*plan.points(shard))} == points


@pytest.mark.parametrize(("times", "found"), [(0.5, 0), (1.0, 0), (2.0, 1)])
def test_paths_and_events_differ_beyond_rounding(times: float, found: int) -> None:
    worst = json.dumps({"quantity": "latency_layers", "replication": 5, "events": 1.0, "paths": 1.0})
    relative = [0.0, times * agreement.ROUNDING, None]
    part = pl.DataFrame({"paths_relative": relative, "paths_worst": [None, worst, None]})
    assert len([*agreement.paths_against_events(7, part)]) == found
