"""SSD in scenarios: the answers of the bundled one, refused settings, ranks from records and logs, and waiting."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model.methods.ssd import theory as ssd
from sim.commands.sim_app import app
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid
from sim.views import formula_view
from tests.project.test_bad_input import one_line, refused

BASE = (
    '[scenario]\nname = "small"\ntokens = 6\nreplications = 16\n\n[[method]]\nname = "ssd"\nlayers = 8\ndraft_length = 2\n'
    "fan_out = 2\n\n[cost]\ncost_ratio = 0.1\n\n[outcomes.position_rank]\n"
)
RATES = 'kind = "ranks"\nrank_rates = [0.6, 0.2, 0.1]\n'
SET = [
    ("method.fan_out=0", "fan_out must be between 1 and 999", "got 0"),
    ("method.fan_out=[1, 2]", "fan_out must have draft_length + 1 = 3 numbers", "got 2"),
    ("method.fan_out=[1, 0, 2]", "fan_out[1] must be between 1 and 999", "got 0"),
    ("method.fan_out=3", "rank_rates must have a rate for each of 4 ranks that the fan-out uses, got 3", "lower fan_out"),
    ("method.draft_length=0", "draft_length must be between 1 and 250", "got 0"),
    ("method.backup=wait", "unknown backup 'wait'", "draft, none"),
    ("method.placement=colocated", "placement must be 'separate'", "choose method 'speculative'"),
    ("method.fanout=3", "takes no fanout", "did you mean fan_out?"),
    ("method.sequences=4", "batching must be 'lockstep' with sequences=4"),
    ("outcomes.position_rank.kind=iid", "unknown outcomes.position_rank.kind 'iid'", "power-law, ranks, replay"),
    ("outcomes.position_rank.rank_rates=[0.6, 0.5, 0]", "sum to at most 1"),
    ("outcomes.position_rank.rank_rates=[]", "rank_rates must be a list of probabilities"),
    ("cost.verify_cost=[[1, 1.0], [2, 1.2]]", "verify_cost must reach width 6", "got 2"),
]


@pytest.mark.parametrize(("setting", "words"), [(first, rest) for first, *rest in SET], ids=[first for first, *_ in SET])
def test_bad_settings_are_refused(setting: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arguments = ["run", "s.toml", "--no-figures", "--set", setting]
    message = one_line(refused(tmp_path, monkeypatch, arguments, {"s.toml": BASE + RATES}))
    assert all(each in message for each in words), message


@pytest.mark.parametrize(("content", "words"), [
    ({"matches": [[True]]}, "key ranks is missing"), ({"ranks": []}, "ranks of 'r.json' must be a list of sequences"),
    ({"ranks": [[[1], [2]]]}, "tokens must be at most 2, the longest sequence of 'r.json', got 6; decode fewer"),
    ({"ranks": [[[1], [-2]]]}, "ranks[0][1][0] of 'r.json' must be"),
])  # fmt: skip
def test_bad_records_are_refused(content: Any, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {"s.toml": BASE + 'kind = "replay"\nfile = "r.json"\n', "r.json": json.dumps(content)}
    assert words in one_line(refused(tmp_path, monkeypatch, ["run", "s.toml", "--no-figures"], files))


def test_views_agree_on_a_record(tmp_path: Path) -> None:
    """Two records: the mean over them is exact, and paths and events draw one of the two."""
    ranks = [[[1, 3], [2, 1], [1, 0], [0, 1], [1, 1], [1, 1]], [[1], [1], [4], [3], [1], [2]]]
    (tmp_path / "r.json").write_text(json.dumps({"ranks": ranks}))
    path = tmp_path / "s.toml"
    path.write_text(BASE + 'kind = "replay"\nfile = "r.json"\n')
    rows = {row["view"]: row for row in sim.run(str(path)).to_dicts()}
    assert rows["formula"]["acceptance_rate"] == pytest.approx(7 / 12)
    assert rows["formula"]["candidates_rate"] == pytest.approx(10 / 12)  # the ranks 0 and 4 are beyond the fan-out
    for view in ("paths", "events"):
        assert rows[view]["speedup_low"] <= rows["formula"]["speedup"] * (1 + 1e-9)
        assert rows["formula"]["speedup"] <= rows[view]["speedup_high"] * (1 + 1e-9)


@pytest.mark.parametrize(("setting", "waits"), [("cluster.units=2", False), ("cluster.units=1", True)])
def test_only_events_have_values_where_processes_wait(setting: str, waits: bool, tmp_path: Path) -> None:
    small, out = tmp_path / "small.toml", tmp_path / "out"
    small.write_text(BASE + RATES)
    done = CliRunner().invoke(app, ["run", str(small), "--set", setting, "--no-figures", "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    rows = {row["view"]: row for row in pl.read_parquet(out / "results.parquet").iter_rows(named=True)}
    assert (rows["formula"]["latency_layers"] is None) is waits
    assert rows["events"]["latency_layers"] is not None


def test_bundled_scenario_answers_its_question() -> None:
    """Prepared drafts pay where the preparation fits into a pass; beyond that large fan-outs pay, and the gain stays below 2."""
    grid = Grid(scenario_file.load("ssd"))
    speed: dict[Any, float] = {}
    for row in formula_view.frame(grid, 0, grid.points).iter_rows(named=True):
        which = (row["method"], row["fan_out"], row["backup"])
        speed[*which, row["cost_ratio"]] = row["speedup"]
    for ratio in (0.05, 0.15, 0.25):
        rival = speed["speculative", None, None, ratio]
        one, four, best, none = (
            speed["ssd", fan_out, backup, ratio]
            for fan_out, backup in (("1", "draft"), ("4", "draft"), ("[6, 4, 3, 3, 4]", "draft"), ("4", "none"))
        )
        assert rival < one < four < best < ssd.largest_gain(4) * rival  # more outcomes prepared, for 20 branches in all at most
        assert (none > best) == (ratio > 0.2)  # a draft just in time costs more than the tokens that it saves
        assert none > speed["pearl", None, None, ratio]
