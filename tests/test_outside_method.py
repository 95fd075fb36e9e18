"""A method that is not part of the project: one module, named by its dotted path, in all three views."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

import sim
from model.methods import algorithm

MODULE = '''
"""Redundant decoding: every pass is run on several units at once, and they are compared. Nothing is gained but trust."""
from dataclasses import dataclass

import numpy as np

from model import checks
from model.coins import BLOCK
from model.prediction import Prediction
from model.steps import Commit, Fork, Forward, Join, Read


@dataclass(frozen=True)
class Parameters:
    layers: int
    copies: int

    OUTCOMES = ()
    EXACT = True

    def __post_init__(self):
        checks.whole("layers", self.layers, 1)
        checks.whole("copies", self.copies, 1, 100)

    @property
    def units(self):
        return self.copies


def decode(parameters, prompt, tokens):
    token, at = prompt[-1], len(prompt) - 1
    for _ in range(tokens):
        step = Forward("target", (token,), at, 0, parameters.layers, heads=1)
        checkers = yield Fork((step,) * (parameters.copies - 1), tuple(range(1, parameters.copies)))
        out = yield step
        yield Join(checkers)
        token, at = (yield Read("next", out)), at + 1
        yield Commit("token", (token,))


def predict(parameters, tokens, law, cost):
    time = np.asarray(tokens * (cost.span(0, parameters.layers) + cost.final_head), dtype=float)
    units = np.asarray(float(parameters.copies))
    return Prediction(time, 0 * time, units * time, units, units, time)


def walk(parameters, tokens, cost, outcomes):
    time = np.full(BLOCK, tokens * (cost.span(0, parameters.layers) + cost.final_head))
    return time, parameters.copies * time
'''


@pytest.fixture
def redundant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "outside_package").mkdir()
    (tmp_path / "outside_package" / "__init__.py").touch()
    (tmp_path / "outside_package" / "redundant.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.syspath_prepend(str(tmp_path))
    return "outside_package.redundant"


def test_a_method_from_outside_runs_in_all_views_and_is_checked_like_our_own(redundant: str) -> None:
    scenario = {
        "scenario": {"name": "outside", "tokens": 5, "replications": 3},
        "method": [{"name": redundant, "layers": 12, "copies": 3}],
        "cost": {"final_head": 0.5},
    }
    table = sim.run(scenario)
    assert table["view"].to_list() == ["formula", "paths", "events"]
    assert table["latency_layers"].to_list() == [62.5] * 3
    assert table["mean_units"].to_list() == [3.0] * 3
    assert table["paths_difference"].drop_nulls().to_list() == [0.0]

    with pytest.raises(ValueError, match="copies must be between 1 and 100, got 0"):
        sim.run(scenario, set={"method.copies": 0})


def test_it_mixes_with_our_own_methods_in_one_scenario(redundant: str) -> None:
    table = sim.run(
        {
            "scenario": {"name": "mixed", "tokens": 4, "replications": 2, "views": ["events"]},
            "method": [{"name": "autoregressive", "layers": 8}, {"name": redundant, "layers": 8, "copies": 2}],
        }
    )
    assert table["method"].to_list() == ["autoregressive", redundant]
    assert table["speedup"].to_list() == [1.0, 1.0]
    assert table["busy_layers"].to_list() == [32.0, 64.0]


def test_costs_of_a_method_from_outside(redundant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that declares no COSTS is taken to look at all, one that does at those."""
    scenario = {
        "scenario": {"name": "outside", "tokens": 5, "replications": 2, "views": ["events"]},
        "method": [{"name": redundant, "layers": 12, "copies": 2}], "cost": {"dispatch": 0.5, "promotion": 0.5},
    }  # fmt: skip
    assert sim.run(scenario)["latency_layers"].to_list() == [62.5]
    with pytest.raises(ValueError, match=r"cost\.cost_ratio is used by no method that it is given for; leave it out$"):
        sim.run({**scenario, "cost": {"cost_ratio": 0.1}})
    monkeypatch.setattr(algorithm(redundant).Parameters, "COSTS", ("dispatch",), raising=False)
    with pytest.raises(ValueError, match=r"cost\.promotion is used by no method that it is given for; leave it out$"):
        sim.run(scenario)
    assert sim.run({**scenario, "cost": {"dispatch": 0.5}})["latency_layers"].to_list() == [62.5]
