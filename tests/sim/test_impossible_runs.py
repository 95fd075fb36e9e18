"""Impossible measured runs: loading them gives one line with the row and the column."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from model.base.checks import ParameterError
from model.hardware import profile_files
from model.logs import measured_runs
from sim.commands.sim_app import app
from tests.support.comparisons import profiles, record_decoding, synthetic_runs


@functools.lru_cache(maxsize=1)
def honest() -> measured_runs.MeasuredRuns:
    """A plain decoding, one with drafts and one over two units, three repeats each."""
    made = [
        record_decoding("autoregressive", 6, {}), record_decoding("speculative", 6, {"acceptance_rate": 0.7}, draft_length=2),
        record_decoding("ppd", 6, {"match_rate": 0.6}, exit_layer=8, candidates=1),
    ]  # fmt: skip
    return synthetic_runs(made, profiles(head=2e-3, wake=1e-3, scheduling=1e-4), units=[1, 1, 2])


def put(folder: Path, about: Callable[[dict[str, Any]], dict[str, Any]] | None = None, table: pl.DataFrame | None = None) -> Path:
    """The valid runs with one change, saved with their profiles; checksums are correct."""
    found = honest()
    named = {role: profile_files.save(each, folder).name for role, each in profiles(head=2e-3, wake=1e-3, scheduling=1e-4).items()}
    own = measured_runs.MeasuredRuns(
        found.log, found.table, dict(found.about) | {"profiles": {role: named[role] for role in found.log.models}}
    )
    path = measured_runs.save(own, folder / "own.json")
    said = json.loads(path.read_text())
    if about is not None:
        said["about"] = about(said["about"])
    if table is not None:
        data = path.with_suffix(".parquet")
        table.write_parquet(data)
        said |= {"sha256": hashlib.sha256(data.read_bytes()).hexdigest(), "rows": table.height}
    path.write_text(json.dumps(said))
    return path


def refused(path: Path) -> str:
    done = CliRunner().invoke(app, ["compare", str(path)])
    assert (done.exit_code, done.stdout) == (2, ""), done.output
    [line] = done.stderr.splitlines()
    return line


def test_valid_runs_are_compared(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["compare", str(put(tmp_path)), "--json"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["files"][0]["runs"]) == 3


def cell(row: int, column: str, value: Any) -> pl.DataFrame:
    """The table with one cell changed, by a row counted from 0."""
    table = honest().table
    values = table[column].to_list()
    values[row] = value(values[row]) if callable(value) else value
    return table.with_columns(pl.Series(column, values, dtype=table[column].dtype))


IMPOSSIBLE = [
    ((0, "seconds", math.nan), "row 1, column seconds: must be above 0, got nan"),
    ((4, "seconds", -1.0), "row 5, column seconds: must be above 0, got -1.0"),
    ((4, "seconds", 0.0), "row 5, column seconds"),
    ((4, "seconds", math.inf), "row 5, column seconds"),
    ((4, "seconds", None), "row 5, column seconds: must be a finite number, got null"),
    ((7, "seconds", lambda held: held / 3), "row 8, column s"),
    ((1, "read_s", -1e-3), "row 2, column read_s: must be at least 0, got -0.001"),
    ((1, "waited", -1.0), "row 2, column waited: must be between 0 and 1, got -1.0"),
    ((1, "waited", 1.5), "row 2, column waited"),
    ((1, "load", -0.5), "row 2, column load"),
    ((1, "load", math.inf), "row 2, column load"),
    ((2, "units", 0), "row 3, column units: must be at least 1, got 0"),
    ((1, "units", 2), "row 2, column units: must be 1, as decoding 0 had in row 1, got 2"),
    ((2, "repeat", -1), "row 3, column repeat: must be at least 0, got -1"),
    ((2, "repeat", 1), "row 3, column repeat: decoding 0 was timed for repeat 1 in row 2 already"),
    ((2, "decoding", 3), "row 3, column decoding: must be 0 to 2, got 3"),
    ((2, "decoding", -1), "row 3, column decoding"),
    ((2, "run_order", -1), "row 3, column run_order"),
    ((3, "pass_s", [0.1, 0.1]), "row 4, column pass_s: must be 3 numbers"),
    ((3, "pass_s", [0.0, -0.1, 0.0]), "row 4, column pass_s: must be at least 0, got -0.1"),
    ((3, "pass_s", [0.0, math.nan, 0.0]), "row 4, column pass_s"),
    ((3, "pass_s", [9.0, 0.0, 0.0]), "row 4, column pass_s: must be with read_s at most the run's seconds, got 9."),
    ((3, "pass_s", [0.0, None, 0.0]), "row 4, column pass_s: must be lists of numbers, got a list with null"),
    ((3, "commit_s", None), "row 4, column commit_s: must be a list, got null"),
    ((3, "commit_s", []), "row 4, column commit_s: must be as many times as the decoding has commits, got 0"),
    ((0, "commit_s", lambda held: held[:-1]), "row 1, column commit_s: must be as many times"),
    ((0, "commit_s", lambda held: [-1.0, *held[1:]]), "row 1, column commit_s: must be at least 0, got -1.0"),
    ((0, "commit_s", lambda held: [held[1], held[0], *held[2:]]), "row 1, column commit_s: must be no earlier than the"),
    ((0, "commit_s", lambda held: [*held[:-1], math.nan]), "row 1, column commit_s"),
    ((0, "commit_s", lambda held: [*held[:-1], 2 * held[-1]]), "row 1, column seconds: must be no less than its last commit"),
    ((0, "commit_s", lambda held: [1.005 * held[-1]] * len(held)), "row 1, column seconds: must be more than its first commit"),
    ((7, "spans", lambda held: [held[0] | {"start": -1.0}, *held[1:]]), "row 8, column spans: spans must begin at 0 or later"),
    ((7, "spans", lambda held: [held[0] | {"end": math.nan}, *held[1:]]), "row 8, column spans"),
    ((7, "spans", lambda held: [held[0] | {"end": 99.0}, *held[1:]]), "row 8, column spans"),
    ((7, "spans", lambda held: [held[0] | {"unit": 2}, *held[1:]]), "row 8, column spans: spans must be on units that the run has"),
    ((7, "spans", lambda held: [held[0] | {"unit": None}, *held[1:]]), "spans: row"),
]


@pytest.mark.parametrize("number", range(len(IMPOSSIBLE)))
def test_impossible_measurement_is_refused_by_row_and_column(number: int, tmp_path: Path) -> None:
    change, words = IMPOSSIBLE[number]
    said = refused(put(tmp_path, table=cell(*change)))
    assert f"own.json: {words}" in said


def test_duplicate_rows_and_other_tables_are_refused(tmp_path: Path) -> None:
    table = honest().table
    doubled = pl.concat([table, table])
    assert "row 10, column repeat: decoding 0 was timed for repeat 0 in row 1 already" in refused(put(tmp_path, table=doubled))
    for name in ("seconds", "commit_s", "decoding", "spans", "waited"):
        words = table.with_columns(pl.Series(name, ["x"] * table.height))
        assert f"column {name} must hold" in refused(put(tmp_path, table=words))
    nothing = table.with_columns(pl.Series("units", [None] * table.height))
    assert "row 1, column units: must be a whole number, got null" in refused(put(tmp_path, table=nothing))
    assert "at least one row" in refused(put(tmp_path, table=table.clear()))


OTHERWISE: tuple[Any, ...] = (None, 3, "x", [], ["x"], {"x": 3}, True, [None], {"target": None}, {"target": {}}, [{"a": 1}], 1e400)


@pytest.mark.parametrize("key", [*measured_runs.RunsDescription.__annotations__])
def test_any_value_is_accepted_or_refused_in_one_line(key: str, tmp_path: Path) -> None:
    """Every key with a value of every type gives numbers, or one line of error."""
    path = put(tmp_path)
    said = json.loads(path.read_text())
    for value in OTHERWISE:
        path.write_text(json.dumps(said | {"about": said["about"] | {key: value}}))
        done = CliRunner().invoke(app, ["compare", str(path), "--json"])
        assert done.exit_code in (0, 2), (key, value, done.exception)
        assert done.exit_code == 0 or len(done.stderr.splitlines()) == 1, (key, value, done.stderr)
        assert done.exit_code == 2 or not isinstance(done.exception, Exception)
    if key not in ("unit_kind", "mode", "devices"):
        without = put(tmp_path, lambda about: {each: value for each, value in about.items() if each != key})
        assert f"about.{key} is missing" in refused(without)


def test_file_imports_no_code(tmp_path: Path) -> None:
    path = put(tmp_path)
    reads = tmp_path / "own.reads.json"
    said = json.loads(reads.read_text())
    said["decodings"][0]["method"] = "this.module"
    reads.write_text(json.dumps(said))
    own = json.loads(path.read_text())
    path.write_text(json.dumps(own | {"reads_sha256": hashlib.sha256(reads.read_bytes()).hexdigest()}))
    assert "own.json: decoding 0: method 'this.module' is not one of the project's" in refused(path)
    with pytest.raises(ParameterError, match=r"add --methods this\.module"):
        measured_runs.load(path)
