"""DSI in scenarios: the answers of the bundled one, refused settings, and cases that only the events view covers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from sim.commands.sim_app import app
from sim.runs.trace import record
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid
from sim.views import formula_view
from tests.project.test_bad_input import one_line, refused
from tests.sim.test_pearl_scenario import IID, LAWS

BASE = (
    '[scenario]\nname = "small"\ntokens = 6\nreplications = 16\n\n[[method]]\nname = "dsi"\nlayers = 8\nlookahead = 2\n'
    "verifiers = 2\n\n[cost]\ncost_ratio = 0.1\n\n[outcomes]\n"
)
SET = [
    ("method.lookahead=0", "lookahead must be between 1 and 250", "got 0"),
    ("method.verifiers=0", "verifiers must be between 1 and 99999", "got 0"),
    ("method.verifiers=two", "verifiers", "got 'two'"),
    ("method.placement=colocated", "placement must be 'separate'", "choose method 'speculative'"),
    ("method.sampled=yes", "sampled must be true or false", "got 'yes'"),
    ("method.verifier=3", "takes no verifier", "did you mean verifiers?"),
    ("method.sequences=4", "batching must be 'lockstep' with sequences=4"),
    ("scenario.tokens=4000", "tokens with method dsi must be between 1 and 2048", "got 4000"),
    ("cost.link=-1", "link", "got -1"),
    ("cost.promotion=1", "promotion", "used by no method"),
    ("cost.verify_cost=[[1, 1.0], [2, 1.2]]", "verify_cost must reach width 4", "got 2"),
]


@pytest.mark.parametrize(("setting", "words"), [(first, rest) for first, *rest in SET], ids=[first for first, *_ in SET])
def test_bad_settings_are_refused(setting: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml", "--no-figures", "--set", setting], {"s.toml": BASE + IID}))
    assert all(each in message for each in words), message


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.split('"')[1])
def test_laws_by_draft_position_are_refused(law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    message = one_line(refused(tmp_path, monkeypatch, ["run", "s.toml"], {"s.toml": BASE + law}))
    assert "must be by output position with method dsi" in message


@pytest.mark.parametrize(("setting", "waits"), [("cluster.units=3", False), ("cluster.units=2", True), ("cluster.stop=pass", True)])
def test_only_events_have_values_where_processes_wait(setting: str, waits: bool, tmp_path: Path) -> None:
    small, out = tmp_path / "small.toml", tmp_path / "out"
    small.write_text(BASE + IID)
    done = CliRunner().invoke(app, ["run", str(small), "--set", setting, "--no-figures", "--out", str(out)])
    assert done.exit_code == 0, done.stderr
    rows = {row["view"]: row for row in pl.read_parquet(out / "results.parquet").iter_rows(named=True)}
    assert (rows["formula"]["latency_layers"] is None) is waits
    assert rows["events"]["latency_layers"] is not None


def test_bundled_scenario_answers_its_question() -> None:
    """Where the claim holds, and from which link time and with how few replicas it fails."""
    grid = Grid(scenario_file.load("dsi"))
    speed: dict[Any, float] = {}
    for row in formula_view.frame(grid, 0, grid.points).iter_rows(named=True):
        which = (row["lookahead"], row["verifiers"]) if row["method"] == "dsi" else "speculative"
        speed[which, row["acceptance_rate"], row["cost.link"]] = row["speedup"]
    for rate in (0.6, 0.8, 0.95):
        rival = speed["speculative", rate, 0.0]
        assert speed[(5, 2), rate, 0.0] > rival  # as many replicas as the paper asks for, and no links
        assert speed[(1, 10), rate, 0.0] > speed[(5, 2), rate, 0.0]
        assert speed[(1, 1), rate, 0.0] == pytest.approx(1)  # a pass per token, as in plain decoding
        assert (speed[(5, 1), rate, 0.0] < rival) == (rate < 0.9)  # one replica, half of what is needed
        # Links of a quarter of a pass: slower than speculative decoding at the usual rates; of a whole pass: slower than plain.
        assert (speed[(5, 2), rate, 10.0] < rival) == (rate < 0.9)
        assert (speed[(5, 4), rate, 40.0] < 1) == (rate < 0.7)


def test_trace_shows_passes_of_several_replicas_at_once() -> None:
    run = record("dsi", point=40, tokens=24, replication=1)
    target = [row for row in run.intervals if row.role == "target" and row.unit > 0]
    assert {row.unit for row in target} == {1, 2}
    assert {row.unit for row in run.intervals if row.role == "draft" and row.unit >= 0} == {0}
    assert any(one.start < other.end and other.start < one.end for one in target for other in target if one.unit < other.unit)
    assert any(row.fate == "cancelled" for row in target)


def test_dsi_is_listed_with_its_keys() -> None:
    done = CliRunner().invoke(app, ["ls", "methods", "dsi", "--json"])
    assert done.exit_code == 0
    text = json.loads(done.stdout)["dsi"]
    assert "cost_ratio  required" in text
    assert "replicas" in text
    assert "link" in text
