"""PEARL in scenarios: answers of the bundled one, refused settings, and cases that only the events view covers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from sim.commands.sim_app import app
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid
from sim.views import formula_view
from tests.project.test_bad_input import one_line, refused

BASE = (
    '[scenario]\nname = "small"\ntokens = 6\nreplications = 16\n\n[[method]]\nname = "pearl"\nlayers = 8\ndraft_length = 3\n\n'
    "[cost]\ncost_ratio = 0.1\n\n[outcomes]\n"
)
IID = 'kind = "iid"\nacceptance_rate = 0.7\n'
PLACES = "must be by output position with method pearl"
LAWS = [
    'kind = "by-draft-position"\nacceptance_rates = [0.5, 0.5, 0.5, 0.5, 0.5]\n',
    'kind = "shared-rate"\nacceptance_rate = 0.5\nconcentration = 3\n',
    'kind = "rounds"\nlengths = [[1, 2, 3, 1, 1, 1]]\n',
]
SET = [
    ("method.draft_length=0", "draft_length must be between 1 and 125", "got 0"),
    ("method.draft_length=126", "draft_length must be between 1 and 125", "got 126"),
    ("method.placement=colocated", "placement must be 'separate'", "choose method 'speculative'"),
    ("method.placement=near", "unknown placement 'near'"),
    ("method.draft_stop=now", "unknown draft_stop 'now'", "known: rejection, round"),
    ("method.sampled=yes", "sampled must be true or false", "got 'yes'"),
    ("method.draft_lenght=3", "takes no draft_lenght", "did you mean draft_length?"),
    ("method.sequences=4", "batching must be 'lockstep' with sequences=4"),
    ("cost.cost_ratio=-0.1", "cost_ratio must be between 0 and", "got -0.1"),
    ("cost.link=-1", "link", "got -1"),
    ("cost.promotion=1", "promotion", "used by no method"),
    ("cost.verify_cost=[[1, 1.0], [2, 1.2]]", "verify_cost must reach width 3", "got 2"),
]


@pytest.mark.parametrize(("setting", "words"), [(first, rest) for first, *rest in SET], ids=[first for first, *_ in SET])
def test_bad_settings_are_refused(setting: str, words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = ["run", "s.toml", "--no-figures", "--set", setting]
    message = one_line(refused(tmp_path, monkeypatch, asked, {"s.toml": BASE + IID}))
    assert all(each in message for each in words), message


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.split('"')[1])
def test_laws_by_draft_position_are_refused(law: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert PLACES in one_line(refused(tmp_path, monkeypatch, ["run", "s.toml"], {"s.toml": BASE + law}))


def test_on_one_unit_only_events_have_values(tmp_path: Path) -> None:
    """Both models share the one unit: a round takes the drafts plus the pass."""
    small, out = tmp_path / "small.toml", tmp_path / "out"
    small.write_text(BASE + IID)
    more = ["--set", "cluster.units=1", "--set", "outcomes.acceptance_rate=1.0", "--no-figures", "--out", str(out)]
    done = CliRunner().invoke(app, ["run", str(small), *more])
    assert done.exit_code == 0, done.stderr
    rows = {row["view"]: row for row in pl.read_parquet(out / "results.parquet").iter_rows(named=True)}
    assert rows["formula"]["latency_layers"] is None
    # Rounds of 1, 3 and 2 tokens that draft 3, 2 and 0 tokens.
    assert rows["events"]["latency_layers"] == pytest.approx(3 * 8 + 5 * 0.8)


def test_overlapping_transfers_on_shared_link_only_events_have_values(tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(BASE + IID)
    more = ["--set", "cluster.links=shared", "--set", "cost.link=3.0", "--no-figures"]
    for stop, known in (("round", True), ("rejection", False)):
        out = tmp_path / stop
        done = CliRunner().invoke(app, ["run", str(small), *more, "--set", f"method.draft_stop={stop}", "--out", str(out)])
        assert done.exit_code == 0, done.stderr
        rows = {row["view"]: row for row in pl.read_parquet(out / "results.parquet").iter_rows(named=True)}
        assert (rows["formula"]["latency_layers"] is not None) is known
        assert rows["events"]["latency_layers"] is not None


def rows() -> pl.DataFrame:
    grid = Grid(scenario_file.load("pearl"))
    return formula_view.frame(grid, 0, grid.points)


def test_bundled_scenario_answers_its_question() -> None:
    """Drafts that fit into a pass take no extra time: PEARL is faster with expensive drafts, drafting first with cheap ones."""
    found = rows()
    keys = ["method", "draft_length", "acceptance_rate", "cost_ratio"]
    speed: dict[Any, float] = {}
    stopped: dict[Any, float] = {}
    for row in found.iter_rows(named=True):
        (stopped if row["draft_stop"] == "rejection" else speed)[tuple(row[key] for key in keys)] = row["speedup"]
    for rate in (0.6, 0.8, 0.95):
        assert speed["pearl", 4, rate, 0.05] == speed["pearl", 4, rate, 0.125]
        for length in (4, 8):
            assert speed["pearl", 4, rate, 0.25] > speed["speculative", length, rate, 0.25]
        assert max(speed["speculative", length, rate, 0.05] for length in (4, 8)) > speed["pearl", 8, rate, 0.05]
        # Drafts that take two passes: the second is not hidden.
        assert speed["pearl", 8, rate, 0.25] < speed["pearl", 8, rate, 0.125] / 1.8
        # A draft with its links arrives before the pass ends, slightly later, or a pass later.
        assert stopped["pearl", 8, rate, 0.05] == speed["pearl", 8, rate, 0.05]
        assert 1 < stopped["pearl", 8, rate, 0.125] / speed["pearl", 8, rate, 0.125] < 1.05
        assert stopped["pearl", 8, rate, 0.25] > speed["pearl", 8, rate, 0.25] * (1.05 if rate > 0.9 else 1.2)


def test_pearl_is_listed_with_its_keys() -> None:
    done = CliRunner().invoke(app, ["ls", "methods", "pearl", "--json"])
    assert done.exit_code == 0
    text = json.loads(done.stdout)["pearl"]
    assert "cost_ratio  required" in text
    assert "pre-verify" in text
    assert "link" in text
