"""`calibrate import` and `calibrate bundle`: profiles equal those of the functions; errors are one line and write nothing."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from calibrate.importers import imported_tables
from model.hardware import profile_files
from tests.support.foreign_tables import MLP, READERS, arguments, copy_tables, from_vidur, swap


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return copy_tables(tmp_path)


def test_groups_without_a_command_show_their_help() -> None:
    for words in ([], ["import"], ["fit"]):
        done = CliRunner().invoke(app, words)
        asked = CliRunner().invoke(app, [*words, "-h"])
        assert asked.exit_code == 0
        assert asked.stdout == CliRunner().invoke(app, [*words, "--help"]).stdout
        assert done.output.strip() == asked.output.strip()
        assert "Usage: " in asked.stdout


@pytest.mark.parametrize("source", READERS)
def test_the_command_writes_the_profile_of_the_function(source: str, folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    more = ["-o", str(out), "--name", "mine", "--commit", "abc123"]
    done = CliRunner().invoke(app, [*arguments(folder)[source], *more])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "mine.json: measured" in done.stdout
    assert "covers " in done.stdout
    assert done.stderr == ""
    made = profile_files.load(out / "mine.json")
    whole = READERS[source](folder).table
    assert made.table.height == whole.filter(pl.col("part").is_in(made.parts)).height
    assert {each.commit for each in made.sources} == {"abc123"}
    assert sorted(each.name for each in out.iterdir()) == ["mine.json", "mine.parquet"]


def test_tables_of_vidur_may_be_in_other_folders(folder: Path, tmp_path: Path) -> None:
    """With the options for all tables in other folders, the profile is that of the whole folder."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    whole = from_vidur(folder)
    given = []
    for option, name in (("--attention", "attention.csv"), ("--overheads", "cpu_overheads.csv"), ("--network", "network")):
        shutil.move(folder / "vidur" / name, elsewhere / name)
        given += [option, str(elsewhere / name)]
    for more in (given, given[2:4], given[4:]):
        out = tmp_path / "-".join(more[::2])
        done = CliRunner().invoke(app, [*arguments(folder)["vidur"], *more, "-o", str(out)])
        assert done.exit_code == 0, done.output
        made = profile_files.load(out / "a100-llama-2-7b.json")
        assert ({*made.parts} == {*whole.parts}) == (more == given)
        assert ("step" in made.parts) == ("--overheads" in more)
        assert ("send" in made.parts) == ("--network" in more)
        assert made.table.equals(whole.table.filter(pl.col("part").is_in(made.parts)).select(made.table.columns))


def test_the_command_composes_a_model(folder: Path, tmp_path: Path) -> None:
    more = ["--model", "llama-3.1-8b", "--tensor-parallel", "1,2", "-o", str(tmp_path / "out")]
    done = CliRunner().invoke(app, [*arguments(folder)["aiconfigurator"], *more])
    assert done.exit_code == 0, (done.output, done.exception)
    made = profile_files.load(tmp_path / "out" / "h100-llama-3.1-8b.json")
    assert (made.provenance, made.tensor_parallel) == ("composed", (1, 2))


@pytest.mark.parametrize(
    ("source", "change", "message"),
    [
        ("vidur", ["--model", "llama-9"], "unknown model 'llama-9'; did you mean llama-"),
        ("llmservingsim", ["--model", "llama-9"], "unknown model 'llama-9'; did you mean llama-"),
        ("vidur", ["--gpu", "a1000"], "unknown device 'a1000'; did you mean a100?"),
        ("vidur", ["--unit", "h"], "unknown unit 'h'"),
        ("vidur", ["--attention", "nowhere.csv"], "nowhere.csv: there is no such file"),
        ("vidur", ["--network", "nowhere"], "nowhere: neither send_recv.csv nor all_reduce.csv"),
        ("vidur", ["--name", "../mine"], "name must be of letters, digits, dots"),
        ("aiconfigurator", ["--engine", "vllm/2.0"], "engine of gemm must be one of trtllm/9.9, vllm/1.0, got vllm/2.0"),
        ("aiconfigurator", ["--model", "t5-small"], "encoder_layers must be 0, got 6"),
        ("aiconfigurator", ["--model", "llama-3.1-8b", "--tensor-parallel", "two"], "tensor_parallel must be comma-separated"),
        ("aiconfigurator", ["--model", "llama-3.1-8b", "--tensor-parallel", "1, two"], "tensor_parallel must be comma-separated"),
        ("aiconfigurator", ["--model", "llama-3.1-8b", "--tensor-parallel", "3"], "tensor_parallel must divide heads=32, got 3"),
        ("aiconfigurator", ["--model", "opt-1.3b"], "head_dim must be one of 128"),
    ],
)
def test_user_errors_are_one_line_with_exit_code_2_and_write_nothing(
    source: str, change: list[str], message: str, folder: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    done = CliRunner().invoke(app, [*arguments(folder)[source], *change, "-o", str(out)])
    assert done.exit_code == 2, (done.output, done.exception)
    assert message in done.stderr
    assert done.stderr.startswith("error: ")
    assert len(done.stderr.splitlines()) == 1
    assert not out.exists() or not [*out.iterdir()]


def test_an_invalid_table_writes_nothing(folder: Path, tmp_path: Path) -> None:
    swap("0.0015,0.110", "0.0015,0.005")(folder / MLP)
    out = tmp_path / "out"
    done = CliRunner().invoke(app, [*arguments(folder)["vidur"], "-o", str(out)])
    assert done.exit_code == 2
    assert "row 1, column time_stats.mlp_up_proj.median" in done.stderr
    assert not out.exists()


def test_an_output_folder_that_is_a_file_is_refused(folder: Path, tmp_path: Path) -> None:
    taken = tmp_path / "taken"
    taken.write_text("")
    done = CliRunner().invoke(app, [*arguments(folder)["vidur"], "-o", str(taken)])
    assert done.exit_code == 2, (done.output, done.exception)
    assert "taken" in done.stderr


def test_bundle_needs_the_list_of_sources(folder: Path) -> None:
    done = CliRunner().invoke(app, ["bundle", str(folder)])
    assert done.exit_code == 2
    assert "SOURCES.md: there is no such file" in done.stderr


def test_help_has_an_example_of_each_command_and_loads_nothing_heavy() -> None:
    for command in ("vidur", "aiconfigurator", "llmservingsim"):
        done = CliRunner().invoke(app, ["import", command, "--help"])
        assert f"calibrate import {command} " in done.stdout
    heavy = ("numpy", "polars", "scipy", "torch", "transformers")
    probe = f"import calibrate.commands.calibrate_app, sys; print([name for name in {heavy!r} if name in sys.modules])"
    found = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    assert found.stdout.strip() == "[]", "import these where they are used"


def test_rows_of_a_source_keep_their_numbers_in_the_file(folder: Path) -> None:
    table = imported_tables.read(folder / "vidur/attention.csv", ["is_prefill"], root=folder)
    assert table.where(table.words("is_prefill", ("true", "false")) == "true").numbers.tolist() == [4, 5]
