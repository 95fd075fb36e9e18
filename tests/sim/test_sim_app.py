"""The command on valid input, and its outputs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import fields
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from polars.testing import assert_frame_equal
from typer.testing import CliRunner

import sim
from model.methods import registry
from sim.commands.sim_app import app, guarded
from sim.scenarios import cases, outcomes_section, scenario_file
from sim.scenarios.hardware_cost import HardwareCost
from sim.scenarios.json_schema import of_scenarios
from sim.serving import served_files
from tests.support.schema_refs import inline_references

ROOT = Path(__file__).resolve().parents[2]

SMALL = """[scenario]
name = "small"
tokens = 8
replications = 16

[[method]]
name = "ppd"
layers = 4
exit_layer = 2
candidates = 1

[outcomes]
kind = "iid"
match_rate = 0.5
"""
PLAIN = '\n[[method]]\nname = "autoregressive"\nlayers = 4\n'


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with only a small scenario."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "s.toml").write_text(SMALL)
    return tmp_path


def call(*arguments: str) -> str:
    """Stdout of a command that must succeed and print nothing on stderr."""
    done = CliRunner().invoke(app, [*arguments])
    assert done.exit_code == 0, (done.output, done.exception)
    assert done.stderr == ""
    return done.stdout


def run(*arguments: str) -> dict[str, Any]:
    """JSON document of a run without figures."""
    found: dict[str, Any] = json.loads(call("run", *arguments, "--no-figures", "--json"))
    return found


def column(document: dict[str, Any], name: str) -> list[Any]:
    return [row[name] for row in document["results"]]


def test_a_single_method_table_is_a_list_of_one(folder: Path) -> None:
    (folder / "single.toml").write_text(SMALL.replace("[[method]]", "[method]"))
    assert run("single.toml")["results"] == run("s.toml")["results"]


def test_parameter_shared_by_several_methods(folder: Path) -> None:
    (folder / "two.toml").write_text(SMALL + PLAIN)
    found = run("two.toml", "--set", "method.layers=3", "--view", "formula")
    assert column(found, "method") == ["ppd", "autoregressive"]
    assert column(found, "layers") == [3, 3]
    assert found["results"][1]["speedup"] == 1


def test_plain_decoding_needs_no_outcomes(folder: Path) -> None:
    (folder / "plain.toml").write_text('[scenario]\nname = "plain"\ntokens = 8\nreplications = 4\n' + PLAIN)
    assert column(run("plain.toml"), "latency_layers") == [32, 32, 32]


def test_views_replications_and_seed(folder: Path) -> None:
    found = run("s.toml", "--view", "formula, events", "--replications", "5", "--seed", "7")
    assert column(found, "view") == ["formula", "events"]
    assert column(found, "replications") == [None, 5]
    again = run("s.toml", "--view", "events", "--set", "scenario.replications=5", "--set", "scenario.seed=7")
    assert again["results"][0]["latency_layers"] == found["results"][1]["latency_layers"]


def test_axes_of_the_command_line(folder: Path) -> None:
    rates = column(run("s.toml", "--view", "formula", "--sweep", "outcomes.match_rate=0:1:11"), "match_rate")
    assert rates == pytest.approx([n / 10 for n in range(11)])
    assert rates[0] == 0
    assert rates[-1] == 1
    for text in ("1,3,5", "[1, 3, 5]", "1:5:3"):
        assert column(run("s.toml", "--view", "formula", "--sweep", f"method.candidates={text}"), "candidates") == [1, 3, 5]


def test_an_axis_of_lists(folder: Path) -> None:
    found = run("s.toml", "--view", "formula", "--sweep", "cost.layer_times=[[1, 1, 1, 1], [2, 1, 1, 1]]")
    assert column(found, "cost.layer_times") == ["[1, 1, 1, 1]", "[2, 1, 1, 1]"]
    assert "[2, 1, 1, 1]" in (Path(found["out"]) / "results.csv").read_text()


def test_later_setting_wins_and_set_value_is_not_swept(folder: Path) -> None:
    formula = ("--view", "formula")
    assert column(run("s.toml", *formula, "--set", "scenario.tokens=3", "--set", "scenario.tokens=5"), "tokens") == [5]
    (folder / "axis.toml").write_text(SMALL + '[sweep]\n"scenario.tokens" = [2, 4]\n')
    assert column(run("axis.toml", *formula), "tokens") == [2, 4]
    assert column(run("axis.toml", *formula, "--set", "scenario.tokens=5"), "tokens") == [5]
    assert column(run("axis.toml", *formula, "--sweep", "scenario.tokens=6,7"), "tokens") == [6, 7]
    # An axis has precedence over a value, in any order of the options.
    both = ("--set", "scenario.tokens=5", "--sweep", "scenario.tokens=6,7")
    assert column(run("axis.toml", *formula, *both), "tokens") == [6, 7]
    assert column(run("axis.toml", *formula, *both[2:], *both[:2]), "tokens") == [6, 7]


def test_json_output_is_one_document_with_paths(folder: Path) -> None:
    found = run("s.toml", "-o", "out")
    assert found["scenario"] == "small"
    assert found["failed"] == []
    assert not found["truncated"]
    table = pl.read_parquet(folder / found["out"] / "results.parquet")
    assert found["rows"] == table.height == len(found["results"]) == 3
    assert json.loads((folder / "out" / "metadata.json").read_text())["complete"]


def test_report_shows_every_view_and_the_directory(folder: Path) -> None:
    shown = call("run", "s.toml", "--no-figures", "-o", "out [1]")
    for part in ("small", "formula", "paths", "events", "speed-up", "match rates: assumed", "out [1]/results.parquet"):
        assert part in shown


def test_brackets_in_a_description_are_printed(folder: Path) -> None:
    about = "[/x] and [red] are no markup"
    assert about in call("run", "s.toml", "--no-figures", "--view", "formula", "--set", f'scenario.description="{about}"')


@pytest.mark.parametrize("more", [[], ["--json"]], ids=["text", "json"])
def test_a_dry_run_writes_nothing(folder: Path, more: list[str]) -> None:
    shown = call("run", "s.toml", "--dry-run", "--sweep", "outcomes.match_rate=0:1:1000000000", *more)
    assert "1000000000" in shown
    assert [path.name for path in folder.iterdir()] == ["s.toml"]
    if more:
        assert json.loads(shown)["points"] == 10**9


def test_dry_run_prints_the_size_of_the_run(folder: Path) -> None:
    words = ["s.toml", "--sweep", "outcomes.match_rate=0.1:0.9:5", "--sweep", "method.candidates=1,2", "--replications", "128"]
    facts = json.loads(call("run", *words, "--view", "formula,paths", "--dry-run", "--json"))
    assert {name: facts[name] for name in ("points", "axes", "views", "decodings")} == {
        "points": 10, "axes": {"outcomes.match_rate": 5, "method.candidates": 2}, "views": ["formula", "paths"],
        "decodings": {"paths": 1_280},
    }  # fmt: skip
    assert facts["shards"] == 2
    shown = call("run", *words, "--view", "formula,paths", "--dry-run").splitlines()
    assert [line[:20].strip() for line in shown[:-1]] == [name.replace("_", " ") for name in facts]
    assert [line[21:] for line in shown[:4]] == [
        "10", "outcomes.match_rate 5, method.candidates 2", "formula, paths", "paths 1,280"
    ]  # fmt: skip
    assert shown[-1] == "nothing was run, nothing was written"


def test_lint_counts_failing_points_and_warns_of_contention(folder: Path) -> None:
    (folder / "wrong.toml").write_text(SMALL + '[sweep]\n"method.form" = ["flat", "literal"]\n"method.exit_layer" = [2, 1]\n')
    done = CliRunner().invoke(app, ["lint", "wrong.toml"])
    assert done.exit_code == 1
    [wrong, last] = done.stdout.splitlines()
    assert wrong.startswith("point 3 {'method.form': 'literal', 'method.exit_layer': 1} would fail: ")
    assert last.startswith("wrong.toml: 1 points would fail; 4 points in formula, paths, events; about ")
    (folder / "waits.toml").write_text(SMALL + "[cluster]\nunits = 1\n" + '[sweep]\n"outcomes.match_rate" = [0.4, 0.5]\n')
    warning, last = call("lint", "waits.toml").splitlines()
    assert warning.startswith("warning: formula and paths have no value where passes may wait for a unit or link; ")
    assert last.startswith("waits.toml: 2 points in formula, paths, events; about ")
    (folder / "events.toml").write_text(SMALL.replace("[[m", 'views = ["events"]\n[[m', 1) + "[cluster]\nunits = 1\n")
    assert "warning" not in call("lint", "events.toml")


@pytest.mark.parametrize(("error", "said"), [
    (OSError(28, "No space left on device", "a/b"), "No space left on device (a/b)"),
    (OSError(28, "No space left on device"), "No space left on device"),
    (OSError("odd"), "odd"),
    (OSError(36, "File name too long", "x" * 300), f"File name too long ({'x' * 200})"),
])  # fmt: skip
def test_system_error_is_one_line(error: OSError, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as stopped:
        guarded(command)()
    assert stopped.value.code == 2
    assert capsys.readouterr() == ("", f"error: {said}\n")


def test_a_scenario_with_spaces_in_its_path_and_a_byte_order_mark(folder: Path) -> None:
    place = folder / "my scenarios"
    place.mkdir()
    (place / "a small one.toml").write_text("\ufeff" + SMALL.replace("\n", "\r\n"), encoding="utf-8", newline="")
    assert run("my scenarios/a small one.toml")["results"] == run("s.toml")["results"]


def test_resume_computes_nothing_twice(folder: Path) -> None:
    # In a directory with brackets in its name, which must not be taken for a pattern.
    first = run("s.toml", "-o", "out [1]")
    assert first["shards"]["computed"] == 3
    again = run("s.toml", "-o", "out [1]", "--resume")
    assert again["shards"] == {"computed": 0, "resumed": first["shards"]["computed"]}
    assert again["results"] == first["results"]


def test_python_interface_gives_the_same_table(folder: Path) -> None:
    run("s.toml", "-o", "out", "--set", "method.candidates=2", "--sweep", "outcomes.match_rate=0.2,0.8", "--seed", "3")
    table = sim.run("s.toml", set={"method.candidates": 2}, sweep={"outcomes.match_rate": (0.2, 0.8)}, seed=3)
    assert_frame_equal(table, pl.read_parquet("out/results.parquet"), check_exact=True)
    assert sorted(path.name for path in folder.iterdir()) == ["out", "s.toml"]


def test_lists_and_environment(folder: Path) -> None:
    assert set(json.loads(call("ls", "methods", "--json"))) == set(registry.names())
    assert set(json.loads(call("ls", "--json"))) == {*scenario_file.names(), *served_files.names()}
    assert "ppd-table-2" in call("ls", "published")
    versions = json.loads(call("env", "--json"))
    assert "python" in versions
    assert all(version == versions[name] for name in ("numpy", "polars", "typer") for version in [metadata.version(name)])
    assert list(folder.iterdir()) == [folder / "s.toml"]


@pytest.mark.parametrize("name", [*scenario_file.names(), *served_files.names()])
def test_bundled_scenarios_pass_lint(name: str, folder: Path) -> None:
    assert "would fail" not in call("lint", name)


# --- the schema --------------------------------------------------------------------------------------------------------


@cache
def schema_of_scenarios() -> dict[str, Any]:
    """The schema; no test changes it."""
    return inline_references(of_scenarios())


def fits(value: Any, schema: dict[str, Any]) -> bool:
    """Validate against the part of JSON Schema that the schema of scenarios uses."""
    kinds: dict[str, Any] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "boolean": bool}
    if "anyOf" in schema and not any(fits(value, each) for each in schema["anyOf"]):
        return False
    if ("const" in schema and value != schema["const"]) or ("enum" in schema and value not in schema["enum"]):
        return False
    kind = schema.get("type")
    if kind == "null":
        return value is None
    if kind is not None and (not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "boolean")):
        return False
    if isinstance(value, dict):
        known, rest = schema.get("properties", {}), schema.get("additionalProperties", True)
        return set(schema.get("required", ())) <= set(value) and all(
            fits(each, known[key]) if key in known else rest is not False and (rest is True or fits(each, rest))
            for key, each in value.items()
        )
    if isinstance(value, list):
        return len(value) >= schema.get("minItems", 0) and all(fits(each, schema.get("items", {})) for each in value)
    return not isinstance(value, int | float) or value >= schema.get("minimum", value)


def test_schema_accepts_valid_scenarios() -> None:
    printed = call("schema")
    assert len(printed) < 200_000  # what editors load
    schema = inline_references(json.loads(printed))
    default = scenario_file.load()
    one_point = {**default, "sweep": {"outcomes.match_rate": {"from": 0.25, "to": 1, "count": 1}}}
    for tables in (*map(scenario_file.load, scenario_file.names()), {**default, "method": default["method"][0]}, one_point):
        assert fits(tables, schema)


@pytest.mark.parametrize(
    ("section", "key", "value", "message"),
    [
        ("scenario", "tokns", 3, "unknown key scenario.tokns"),
        ("scenario", "tokens", "3", "tokens must be a whole number, got '3'"),
        ("method", "exit_layer", 20.5, "exit_layer must be a whole number, got 20.5"),
        ("method", "name", "pdd", "unknown method 'pdd'"),
        ("scenario", "notes", ["deck-table-3"], "unknown note 'deck-table-3'"),
        ("scenario", "views", ["formulas"], "unknown view 'formulas'"),
        ("outcomes", "kind", "idd", "unknown .*'idd'"),
        ("outcomes", "match_rate", 0.5, "match_rate"),  # of another kind of outcomes
        ("cost", "early_heads", 1, "early_heads"),
        ("cluster", "units", True, "units must be a whole number, got True"),
        ("sweep", "method.candidates", 3, "method.candidates"),
        ("sweep", "method.candidates", [], "method.candidates"),
        ("sweep", "method.candidates", {"from": 1, "to": 3, "count": 0}, "method.candidates.count must be between 1"),
        ("plots", "x", 1, r"unknown section \[plots\]"),
    ],
)
def test_schema_refuses_invalid_scenarios(section: str, key: str, value: Any, message: str) -> None:
    tables = scenario_file.load()
    table = tables["method"][0] if section == "method" else tables.setdefault(section, {})
    table[key] = value
    assert not fits(tables, schema_of_scenarios())
    from model.base.checks import ParameterError
    from sim.scenarios.grid import Grid

    with pytest.raises(ParameterError, match=message):
        Grid(tables)


def test_schema_has_the_keys_of_the_dataclasses() -> None:
    sections = schema_of_scenarios()["properties"]
    assert set(sections) == set(scenario_file.SECTIONS)
    for name, kind in (("scenario", cases.Settings), ("cluster", cases.Machine)):
        assert set(sections[name]["properties"]) == {field.name for field in fields(kind)}
    kinds = [set(table["properties"]) for table in sections["cost"]["anyOf"]]
    assert kinds == [{field.name for field in fields(kind)} for kind in (cases.Cost, HardwareCost)]
    [by_name] = [each for each in sections["outcomes"]["anyOf"] if "properties" in each]
    assert set(by_name["properties"]) == set(outcomes_section.LAWS)
    for outcome, kinds in outcomes_section.LAWS.items():
        laws = {law["properties"]["kind"]["const"]: law for law in by_name["properties"][outcome]["anyOf"]}
        assert set(laws) == set(kinds)
        for name, law in kinds.items():
            assert set(laws[name]["properties"]) == {"kind", *(field.name for field in fields(law))}
            assert any(laws[name] in each.get("anyOf", ()) for each in sections["outcomes"]["anyOf"])
    tables = {method["properties"]["name"]["const"]: method for method in sections["method"]["anyOf"][0]["anyOf"]}
    assert set(tables) == set(registry.names())
    for name, method in tables.items():
        kind = registry.algorithm(name).Parameters
        own = {"name", "outcomes", "cost", *getattr(kind, "ALIASES", ()), *(field.name for field in fields(kind))}
        assert set(method["properties"]) == own


# --- in a process of its own -------------------------------------------------------------------------------------------


def in_a_process(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_from_another_directory_with_stdout_to_a_pipe(folder: Path) -> None:
    elsewhere = folder / "elsewhere"
    elsewhere.mkdir()
    done = in_a_process("-m", "sim", "run", "../s.toml", "--no-figures", "--json", cwd=elsewhere)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    found = json.loads(done.stdout)
    assert (elsewhere / found["out"] / "results.parquet").exists()
    assert [path.name for path in elsewhere.iterdir()] == ["runs"]


def test_closed_pipe_is_no_error(folder: Path) -> None:
    # More than a pipe buffer, so that the command still writes when its reader has ended.
    run = "run s.toml --view formula --sweep outcomes.match_rate=0:1:1000 --no-figures --json"
    command = f"{sys.executable} -m sim {run} | head -n 1; exit ${{PIPESTATUS[0]}}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0
    assert done.stdout == "{\n"
    assert done.stderr == ""


def test_importing_the_command_is_light(folder: Path) -> None:
    heavy = ("torch", "matplotlib", "scipy", "numpy", "polars", "pydantic", "simpy", "joblib", "rich")
    probe = f"import sim.commands.sim_app, sys; print([name for name in {heavy!r} if name in sys.modules])"
    done = in_a_process("-c", probe, cwd=folder)
    loaded = set(eval(done.stdout))
    # Typer itself may import rich and pydantic; the project's modules must not import more.
    own = set(eval(in_a_process("-c", probe.replace("sim.commands.sim_app", "typer"), cwd=folder).stdout))
    assert loaded <= own
