"""A method that is not part of the project: one module, named by its dotted path, in all three views."""

from __future__ import annotations

import importlib
import sys
import textwrap
from pathlib import Path

import pytest
from joblib.externals.loky import get_reusable_executor
from typer.testing import CliRunner

import sim
from calibrate.commands.calibrate_app import app as calibrate_app
from calibrate.measured_runs import run_plan
from model.base.checks import ParameterError
from model.methods import registry
from model.methods.registry import allow_modules
from sim.commands.sim_app import app
from sim.runs import sweep
from sim.scenarios import scenario_file

MODULE = '''
"""Redundant decoding: every pass is run on several units at once, and they are compared. Nothing is gained but trust."""
from dataclasses import dataclass

import numpy as np

from model.base import checks
from model.outcomes.random_streams import BLOCK
from model.methods.method_parameters import MethodParameters
from model.methods.prediction import Prediction
from model.steps import Commit, Fork, Forward, Join, LayerSpan, Read


@dataclass(frozen=True)
class Parameters(MethodParameters):
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
        step = Forward("target", (token,), at, LayerSpan(0, parameters.layers), heads=1)
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
    for name in [each for each in sys.modules if each.startswith("outside_package")]:
        monkeypatch.delitem(sys.modules, name)  # of another test's folder
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
    table = sim.run(scenario, methods=[redundant])
    assert table["view"].to_list() == ["formula", "paths", "events"]
    assert table["latency_layers"].to_list() == [62.5] * 3
    assert table["mean_busy_units"].to_list() == [3.0] * 3
    assert table["paths_difference"].drop_nulls().to_list() == [0.0]

    with pytest.raises(ValueError, match="copies must be between 1 and 100, got 0"):
        sim.run(scenario, set={"method.copies": 0}, methods=[redundant])


def test_it_mixes_with_our_own_methods_in_one_scenario(redundant: str) -> None:
    table = sim.run(
        {
            "scenario": {"name": "mixed", "tokens": 4, "replications": 2, "views": ["events"]},
            "method": [{"name": "autoregressive", "layers": 8}, {"name": redundant, "layers": 8, "copies": 2}],
        },
        methods=(redundant,),
    )
    assert table["method"].to_list() == ["autoregressive", redundant]
    assert table["speedup"].to_list() == [1.0, 1.0]
    assert table["busy_layers"].to_list() == [32.0, 64.0]


# --- A file imports nothing: what may be imported stands on the command line, or is an argument. ---

SCENARIO = """
[scenario]
name = "outside"
tokens = 4
replications = 2
[[method]]
name = "{name}"
layers = 8
{more}
"""


def written(folder: Path, name: str, more: str = "copies = 2") -> str:
    path = folder / "outside.toml"
    path.write_text(SCENARIO.format(name=name, more=more))
    return str(path)


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, [*arguments])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    [line] = done.stderr.splitlines()
    return line


@pytest.mark.parametrize("command", [("run",), ("lint",), ("trace",), ("run", "--dry-run")])
def test_a_scenario_imports_nothing_by_itself(redundant: str, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "outside_package" / "marking.py").write_text(f"open({str(tmp_path / 'mark')!r}, 'w')")
    said = refused(command[0], written(tmp_path, "outside_package.marking"), *command[1:])
    assert "'outside_package.marking' is not one of the project's" in said
    assert "add --methods outside_package.marking" in said
    # Another module that is allowed does not allow this one.
    also = refused(command[0], written(tmp_path, "outside_package.marking"), *command[1:], "--methods", redundant)
    assert "add --methods outside_package.marking" in also
    assert not (tmp_path / "mark").exists()
    assert "outside_package.marking" not in sys.modules


def test_workers_and_a_resumed_run_have_what_the_command_line_allows(redundant: str, tmp_path: Path) -> None:
    file, out = written(tmp_path, redundant), str(tmp_path / "out")
    arguments = ["run", file, "--sweep", "method.copies=1,2,3", "-o", out, "--no-figures", "-q"]
    # Workers of earlier runs in this process would not look where the module is; those of a command of its own are new.
    get_reusable_executor().shutdown(wait=True)
    done = CliRunner().invoke(app, [*arguments, "--methods", redundant, "-j", "2"])
    assert done.exit_code == 0, done.output
    first = (tmp_path / "out" / "results.parquet").read_bytes()
    assert "add --methods" in refused(*arguments, "--resume")
    assert CliRunner().invoke(app, [*arguments, "--methods", redundant, "--resume"]).exit_code == 0
    assert (tmp_path / "out" / "results.parquet").read_bytes() == first


def test_a_worker_has_the_allowance_of_its_parent_alone(redundant: str, tmp_path: Path) -> None:
    tables = sweep.resolve(written(tmp_path, redundant))
    shard = sweep.Shard("formula", 0, 1)
    with allow_modules([redundant]):
        mark = scenario_file.fingerprint(tables)
    assert sweep.compute(shard, tables, mark, (redundant,))
    with pytest.raises(ParameterError, match="add --methods"):
        sweep.compute(shard, tables, mark)


def test_an_allowed_method_is_listed_and_is_in_the_schema(redundant: str) -> None:
    def called(*arguments: str) -> str:
        done = CliRunner().invoke(app, [*arguments])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert redundant not in called("ls", "methods") + called("schema")
    assert redundant in called("ls", "methods", "--methods", redundant)
    assert "Redundant decoding" in called("ls", "methods", redundant, "--methods", redundant)
    assert f'"const": "{redundant}"' in called("schema", "--methods", redundant)


def test_a_plan_of_real_runs_imports_nothing_either(redundant: str, tmp_path: Path) -> None:
    plan = tmp_path / "plan.toml"
    plan.write_text(f'[[method]]\nname = "{redundant}"\ncopies = 2\n')
    done = CliRunner().invoke(calibrate_app, ["run", "--plan", str(plan), "-o", str(tmp_path / "runs.json")])
    assert done.exit_code == 2
    assert f"add --methods {redundant}" in done.stderr
    with registry.allow_modules([redundant]):
        assert run_plan.read(plan).choices[0].settings == {"copies": 2}


BROKEN = {
    "raise KeyError('x')": "KeyError: 'x'",
    "def f(:": "SyntaxError",
    "raise SystemExit(7)": "SystemExit: 7",
    "import sys\nsys.exit()": "SystemExit",
    "def f(): f()\nf()": "RecursionError",
    "import nowhere_at_all": "No module named 'nowhere_at_all'",
    "raise ValueError('one\\ntwo')": "ValueError: one; known",
    "": "a module without Parameters",
    "Parameters = 3": "must have a dataclass Parameters derived from model.methods.method_parameters.MethodParameters, got 3",
    "class Parameters: pass": "must have a dataclass Parameters",
    MODULE.replace("    OUTCOMES = ()\n", ""): "must define OUTCOMES",
    MODULE.replace("    EXACT = True\n", ""): "must define EXACT",
    MODULE.replace("def decode(", "def decoded("): "must have a function decode",
    MODULE.replace("def predict(", "def predicted("): "must have a function predict",
    MODULE.replace("def walk(", "def walked("): "must have a function walk",
    MODULE.replace("    EXACT = True\n", "    EXACT = True\n    def with_costs(self, cost):\n        return self\n"):
        "must override with_costs and decides_by_costs together",
    MODULE.replace("    EXACT = True\n", "    EXACT = True\n    decides_by_costs = True\n"):
        "must override with_costs and decides_by_costs together",
}


@pytest.mark.parametrize("number", range(len(BROKEN)))
def test_a_module_that_is_broken_is_refused_in_one_line(redundant: str, tmp_path: Path, number: int) -> None:
    code, words = [*BROKEN.items()][number]
    name = f"outside_package.broken{number}"
    (tmp_path / "outside_package" / f"broken{number}.py").write_text(code)
    importlib.invalidate_caches()
    assert words in refused("run", written(tmp_path, name), "--methods", name)


def test_only_dotted_paths_are_names_of_modules() -> None:
    with pytest.raises(ParameterError, match="dotted path of a module"):
        sim.run(views=["formula"], methods=["ppd"])


def test_costs_of_a_method_from_outside(redundant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that declares no COSTS is taken to look at all, one that does at those."""
    scenario = {
        "scenario": {"name": "outside", "tokens": 5, "replications": 2, "views": ["events"]},
        "method": [{"name": redundant, "layers": 12, "copies": 2}], "cost": {"early_head": 0.5, "promotion": 0.5},
    }  # fmt: skip
    assert sim.run(scenario, methods=[redundant])["latency_layers"].to_list() == [60.0]
    with pytest.raises(ValueError, match=r"cost\.cost_ratio is used by no method that it is given for; leave it out$"):
        sim.run({**scenario, "cost": {"cost_ratio": 0.1}}, methods=[redundant])
    with registry.allow_modules([redundant]):
        monkeypatch.setattr(registry.algorithm(redundant).Parameters, "COSTS", ("early_head",), raising=False)
    with pytest.raises(ValueError, match=r"cost\.promotion is used by no method that it is given for; leave it out$"):
        sim.run(scenario, methods=[redundant])
    assert sim.run({**scenario, "cost": {"early_head": 0.5}}, methods=[redundant])["latency_layers"].to_list() == [60.0]


def test_reports_name_the_module_of_a_method(redundant: str, tmp_path: Path) -> None:
    """The refusal and the command that reproduces the run name the module."""
    scenario = {
        "scenario": {"name": "outside", "tokens": 5, "views": ["formula"]},
        "method": [{"name": redundant, "layers": 12, "copies": 3}],
    }
    sim.run(scenario, out=tmp_path / "run", methods=[redundant])
    refused = CliRunner().invoke(app, ["report", str(tmp_path / "run")])
    assert refused.exit_code == 2
    assert refused.stderr.endswith(f"add --methods {redundant}, with which it was run\n")
    done = CliRunner().invoke(app, ["report", str(tmp_path / "run"), "--methods", redundant, "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    assert f"sim run scenario.toml --methods {redundant}" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert sim.report(tmp_path / "run", methods=[redundant]).verdict
