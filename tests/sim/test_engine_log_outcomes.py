"""Outcomes of kind `engine-log`: a record of an engine's log gives the same law as its rates typed in."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from model.logs import acceptance_record
from model.logs.acceptance_record import AcceptanceRecord, LogSource, with_intervals
from model.methods.speculative.theory import reported_acceptance
from model.outcomes.intervals import wilson
from sim.commands.sim_app import app
from sim.scenarios.grid import Grid
from tests.sim.test_speculative_scenario import METHOD, tables

COUNTS = (119, 107, 102)
MADE = with_intervals(
    AcceptanceRecord(
        "vllm", ("vllm-v1-log",), (LogSource("server.log", 1),), draft_length=3, drafts=124, drafted=372, accepted=sum(COUNTS),
        mean_acceptance_length=1 + sum(COUNTS) / 124, survival=tuple(count / 124 for count in COUNTS),
    )
)
RATES = [119 / 124, 107 / 119, 102 / 107]
SMALL = {"name": "small", "tokens": 24, "replications": 512, "seed": 1}


def law(where: Path, record: AcceptanceRecord = MADE) -> dict[str, Any]:
    """Table of outcomes that names the record's file."""
    path = where / "mine.json"
    path.write_text(acceptance_record.dumps(record))
    return {"kind": "engine-log", "file": str(path)}


@pytest.mark.parametrize("draft_length", [1, 2, 3])
def test_a_record_is_its_rates_by_draft_position(draft_length: int, tmp_path: Path) -> None:
    method = [{**METHOD, "draft_length": draft_length}]
    found = sim.run(tables(outcomes=law(tmp_path), method=method, scenario=SMALL))
    typed = sim.run(tables(outcomes={"kind": "by-draft-position", "acceptance_rates": RATES}, method=method, scenario=SMALL))
    for column in ("latency_layers", "speedup", "tokens_per_round"):
        assert found[column].to_list() == pytest.approx(typed[column].to_list(), rel=1e-12)


def test_inputs_have_the_interval_of_the_counts(tmp_path: Path) -> None:
    outcome = Grid(tables(outcomes=law(tmp_path))).case(0).outcome
    assert outcome is not None
    low, high = (float(end) for end in wilson(119 / 124, 124))
    assert (outcome.rate, outcome.trials) == (119 / 124, 124)
    assert (outcome.rate_low, outcome.rate_high) == pytest.approx((low, high))
    assert outcome.source == "measured: vllm, mine.json"
    assert outcome.note == "engine-log: 124 drafts of 3 in vllm, acceptance by draft position"
    worst, best = (sum(each.survival) for each in (outcome.low, outcome.high))
    assert worst < sum(COUNTS) / 124 < best
    without = Grid(tables(outcomes=law(tmp_path, with_intervals(replace(MADE, drafts=None))))).case(0).outcome
    assert without is not None


@pytest.mark.parametrize("drafts", [None, 124])
def test_a_length_alone_is_a_constant_rate(drafts: int | None, tmp_path: Path) -> None:
    bare = replace(MADE, survival=None, survival_low=None, survival_high=None, conditional_rates=None, drafts=drafts)
    assert bare.mean_acceptance_length is not None
    outcome = Grid(tables(outcomes=law(tmp_path, bare))).case(0).outcome
    assert outcome is not None
    alpha = float(reported_acceptance("vllm", 3, length=bare.mean_acceptance_length))
    assert outcome.rate == alpha
    assert sum(alpha**j for j in range(4)) == pytest.approx(bare.mean_acceptance_length)
    tested = None if drafts is None else round(sum(COUNTS) / alpha)
    assert outcome.trials == tested
    assert (outcome.rate_low is None) == (drafts is None)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, r"draft_length must be at most 3, that of the drafts in mine\.json, got 4"),
        ({"draft_length": None}, r"at most 3"), ({"survival": (0.5,)}, r"at most 3"),
        ({"draft_length": None, "survival": None}, "has no draft length"),
        ({"draft_length": 5, "survival": None, "mean_acceptance_length": None}, "has no acceptance length"),
    ],
)  # fmt: skip
def test_what_a_record_does_not_give_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    none = dict.fromkeys(("survival_low", "survival_high", "conditional_rates"))
    record = with_intervals(replace(MADE, **(none | change)))  # type: ignore[arg-type]
    with pytest.raises(ParameterError, match=message):
        Grid(tables(outcomes=law(tmp_path, record), method=[{**METHOD, "draft_length": 4}])).case(0)


def test_a_record_is_found_next_to_its_scenario(tmp_path: Path) -> None:
    table = law(tmp_path)
    (tmp_path / "s.toml").write_text(
        'scenario = { name = "x", tokens = 8, views = ["formula"] }\ncost = { cost_ratio = 0.1 }\n'
        'method = { name = "speculative", layers = 8, draft_length = 2 }\noutcomes = { kind = "engine-log", file = "mine.json" }\n'
    )
    done = CliRunner().invoke(app, ["run", str(tmp_path / "s.toml"), "--no-figures", "-q", "-o", str(tmp_path / "run")])
    assert done.exit_code == 0, done.output
    assert "engine-log: 124 drafts of 3 in vllm, acceptance by draft position" in done.stdout
    Path(table["file"]).write_text(json.dumps({"kind": "profile"}))
    done = CliRunner().invoke(app, ["run", str(tmp_path / "s.toml"), "--no-figures", "-q", "-o", str(tmp_path / "again")])
    assert done.exit_code == 2
    assert "mine.json' cannot be read: it is not an acceptance record" in done.stderr
    assert len(done.stderr.splitlines()) == 1
