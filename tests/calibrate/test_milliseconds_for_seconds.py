"""Times in milliseconds that are read as seconds are refused by a bound from the device, in all inputs."""

from __future__ import annotations

import dataclasses
import shutil
from pathlib import Path

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app as calibrate
from model.base.checks import ParameterError
from model.hardware import profile_files
from model.hardware.physical_limits import LAUNCHES, longest_time
from model.hardware.profile import TIMES
from model.logs import measured_runs
from sim.commands.sim_app import app
from sim.comparison import run_comparison
from tests.support.comparisons import profiles, record_decoding, synthetic_runs
from tests.support.foreign_tables import TABLES


def refused(arguments: list[str | Path], of: object = app) -> str:
    done = CliRunner().invoke(of, [*map(str, arguments)])  # type: ignore[arg-type]
    assert (done.exit_code, done.stdout) == (2, ""), (done.output, done.exception)
    [line] = done.stderr.splitlines()
    return line


def slower(name: str, factor: float, folder: Path, part: str | None = None) -> Path:
    """A bundled profile, or a part of it, with its times multiplied."""
    found = profile_files.load(name)
    chosen = pl.lit(True) if part is None else pl.col("part") == part
    table = found.table.with_columns(pl.when(chosen).then(pl.col(each) * factor).otherwise(pl.col(each)) for each in TIMES)
    return profile_files.save(dataclasses.replace(found, name="mine", table=table), folder)


@pytest.mark.parametrize("name", ["a100-llama-2-7b", "h100-operations", "cpu-llama-68m"])
def test_a_profile_whose_times_are_a_thousand_times_too_long_is_refused(name: str, tmp_path: Path) -> None:
    said = refused(["ls", "profiles", slower(name, 1000, tmp_path)])
    assert "mine.json: " in said
    assert "is too long" in said
    assert "check the unit" in said
    assert "a hundredth of its peaks" in said


@pytest.mark.parametrize(("name", "part"), [
    ("a100-llama-2-7b", "dense"), ("a100-llama-2-7b", "attention"), ("a100-llama-2-7b", "head"), ("cpu-llama-68m", "layer"),
    ("h100-operations", "gemm"), ("h100-operations", "decode"),
])  # fmt: skip
def test_each_part_is_checked(name: str, part: str, tmp_path: Path) -> None:
    assert f"mine.json: {part} at " in refused(["ls", "profiles", slower(name, 1000, tmp_path, part)])


@pytest.mark.parametrize("name", ["a100-llama-2-7b", "cpu-llama-68m"])
def test_a_machine_ten_times_slower_is_accepted(name: str, tmp_path: Path) -> None:
    assert profile_files.load(slower(name, 10, tmp_path)).table.height


def test_a_run_refuses_such_a_profile(tmp_path: Path) -> None:
    path = slower("h100-llama-2-7b", 1000, tmp_path)
    tables = '[scenario]\nname = "x"\ntokens = 8\n[[method]]\nname = "autoregressive"\nlayers = 32\n[cost]\nkind = "profile"\n'
    (tmp_path / "x.toml").write_text(f'{tables}profile = "mine.json"\n')
    assert path.name in (said := refused(["run", tmp_path / "x.toml", "-o", tmp_path / "out"]))
    assert "is too long" in said


SPOILED = {
    "vidur": (["vidur", "vidur", "--model", "llama-2-7b", "--gpu", "a100", "--unit", "s"], "mlp.csv: row 1, column"),
    "aiconfigurator": (
        ["aiconfigurator", "aiconfigurator", "--gpu", "h100", "--engine", "vllm/1.0", "--unit", "s"],
        "gemm_perf.parquet: row 2, column",
    ),
}  # fmt: skip


@pytest.mark.parametrize("source", SPOILED)
def test_importers_refuse_milliseconds_labelled_as_seconds(source: str, tmp_path: Path) -> None:
    copy = tmp_path / "tables"
    shutil.copytree(TABLES, copy)
    for path in (copy / "aiconfigurator").rglob("*.csv"):
        pl.read_csv(path).write_parquet(path.with_suffix(".parquet"))
    (kind, folder, *more), words = SPOILED[source]
    said = refused(["import", kind, copy / folder, *more, "-o", tmp_path / "out"], calibrate)
    assert words in said
    assert "is too long" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("column", "value"), [
    ("time_stats.emb.median", 1e300), ("num_tokens", 1e300), ("time_stats.add.std", 1e9),
])  # fmt: skip
def test_huge_times_and_counts_are_refused(column: str, value: float, tmp_path: Path) -> None:
    copy = tmp_path / "imp[1]*"  # glob characters may occur in names
    shutil.copytree(TABLES / "vidur", copy)
    table = pl.read_csv((copy / "mlp.csv").read_bytes())
    spoiled = pl.when(pl.int_range(pl.len()) == 1).then(value).otherwise(pl.col(column))
    table.with_columns(spoiled.alias(column)).write_csv(copy / "mlp.csv")
    said = refused(["import", "vidur", copy, "--model", "llama-2-7b", "--gpu", "a100", "-o", tmp_path / "out"], calibrate)
    assert f"mlp.csv: row 2, column {column}: must be at most" in said


def test_a_folder_name_with_glob_characters_is_read(tmp_path: Path) -> None:
    copy = tmp_path / "imp[1]*?"
    shutil.copytree(TABLES / "vidur", copy)
    arguments = ["import", "vidur", copy, "--model", "llama-2-7b", "--gpu", "a100", "-o", tmp_path / "out"]
    done = CliRunner().invoke(calibrate, [*map(str, arguments)])
    assert done.exit_code == 0, done.output


def test_measured_runs_a_thousand_times_too_long_are_refused_by_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = profiles(head=2e-3)
    drafting = record_decoding("speculative", 6, {"acceptance_rate": 0.7}, draft_length=2)
    found = synthetic_runs([record_decoding("autoregressive", 6, {}), drafting], clock)
    for each in clock.values():
        profile_files.save(each, tmp_path)
    named = {role: f"{each.name}.json" for role, each in clock.items() if role in found.log.models}
    about = dict(found.about) | {"profiles": named}
    for factor, row in ((1.0, 0), (1000.0, 4)):
        slow = pl.when(pl.int_range(pl.len()) >= row - 1).then(factor).otherwise(1.0)
        table = found.table.with_columns(pl.col(name) * slow for name in ("seconds", "commit_s", "pass_s", "read_s"))
        path = measured_runs.save(measured_runs.MeasuredRuns(found.log, table, about), tmp_path / "own.json")
        if factor == 1:
            assert CliRunner().invoke(app, ["compare", str(path), "--json"]).exit_code == 0
        else:
            assert f"row {row}, column seconds: must be at most" in refused(["compare", path])
    taken = found.table["seconds"].to_list()
    slowest = {number: max(taken[at] for at, each in enumerate(found.table["decoding"]) if each == number) for number in (0, 1)}
    late = next(at for at, each in enumerate(taken, 1) if each == slowest[1])
    for most, said in ((slowest[1], None), (np.nextafter(slowest[1], 0), slowest[1])):
        bounds = {id(timed.decoding): {0: slowest[0], 1: most}[number] for number, timed in found.timed.items()}
        monkeypatch.setattr("model.hardware.physical_limits.longest_run", lambda decoding, *_, bounds=bounds: bounds[id(decoding)])
        if said is None:
            assert run_comparison.compare(found, clock).height == 2
        else:
            with pytest.raises(ParameterError) as error:
                run_comparison.compare(found, clock)
            assert str(error.value) == (
                f"row {late}, column seconds: must be at most {most:.3g}, a hundredth of the device's peaks and 0.0001 s"
                f" an operation, got {said:.4g}; check the unit"
            )


def test_the_upper_bound_of_times_by_hand() -> None:
    assert float(longest_time(2e9, 0, 1e12, 1e15)) == pytest.approx(0.2 + 1e-4)
    assert float(longest_time(0, 1e12, 1e12, 1e15, LAUNCHES["layer"])) == pytest.approx(0.1 + 5e-3)
