"""Files that would be read for ever, or unpack to more than the memory, and names that no system has: one line, at once."""

from __future__ import annotations

import ast
import gzip
import hashlib
import io
import json
import os
import shutil
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app as calibrate
from model.architectures import published_shapes, shape_configs
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.logs import position_log
from sim.commands.sim_app import app as sim
from tests.support.foreign_tables import TABLES
from tests.support.fuzzing import READERS, TRUSTED_READERS

ROOT = Path(__file__).resolve().parents[2]
SCENARIO = '[scenario]\nname = "x"\ntokens = 8\n[[method]]\nname = "autoregressive"\nlayers = 32\n'
EARLY = SCENARIO.replace("autoregressive", "ppd") + "exit_layer = 16\ncandidates = 1\n"
MATCH = EARLY + '[outcomes]\nkind = "measured"\nfile = "x.json"\n'


def refused(app: Any, *arguments: str | Path) -> str:
    done = CliRunner().invoke(app, [*map(str, arguments)])
    assert (done.exit_code, done.stdout) == (2, ""), (done.output, done.exception)
    [line] = done.stderr.splitlines()
    assert line.startswith("error: ")
    assert len(line) < 700
    return line


def put(path: Path, kind: str) -> None:
    """Something at a path that is no file, or none to be read."""
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.mkdir()


@pytest.mark.skipif(sys.platform == "win32", reason="has no such files")
@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_regular_file_is_not_waited_for(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("s.toml").write_text(SCENARIO + '[cost]\nkind = "profile"\nprofile = "x.json"\n')
    Path("m.toml").write_text(MATCH)
    for name in ("x.toml", "x.json", "config.json", "x.txt", "x.jsonl"):
        put(Path(name), kind)
    Path("run").mkdir()
    put(Path("run/results.parquet"), kind)
    Path("own").mkdir()
    put(Path("own/metadata.json"), kind)
    shutil.copytree(TABLES / "vidur", "vidur")
    Path("vidur/mlp.csv").unlink()
    put(Path("vidur/mlp.csv"), kind)
    for app, *arguments in (
        (sim, "lint", "x.toml"), (sim, "run", "s.toml"), (sim, "lint", "m.toml"), (sim, "compare", "x.json"), (sim, "plot", "run"),
        (sim, "ls", "profiles", "x.json"), (sim, "run", "-o", "own"), (calibrate, "rates", "x.json"),
        (calibrate, "rates", "x.jsonl", "--drafter", "eagle"), (calibrate, "run", "--plan", "x.toml", "-o", "runs.json"),
        (calibrate, "import", "vidur", "vidur", "--model", "llama-2-7b", "--gpu", "a100", "-o", "out"),
        (calibrate, "layers", "--model", "config.json", "-o", "out", "--quick"),
    ):  # fmt: skip
        refused(app, *arguments)


def test_table_next_to_its_json_is_a_regular_file(tmp_path: Path) -> None:
    log = position_log.bundled()
    path = position_log.save(log, tmp_path / "log.json")
    path.with_suffix(".parquet").unlink()
    os.mkfifo(path.with_suffix(".parquet"))
    assert "log.parquet must be a regular file, got a pipe" in refused(calibrate, "rates", path)


def test_a_table_that_unpacks_to_more_than_the_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its rows, and by one row's elements; with less memory than there is, so that the tables are made in no time."""
    monkeypatch.setattr(bounded_files, "MOST_VALUES", 2_000_000)
    log = position_log.bundled()
    path = position_log.save(log, tmp_path / "log.json")
    said = json.loads(path.read_text())
    for frame in (pl.DataFrame({"text": pl.zeros(bounded_files.MOST_VALUES + 1, dtype=pl.UInt8, eager=True)}),
                  pl.DataFrame({"text": [pl.zeros(bounded_files.MOST_VALUES + 1, dtype=pl.UInt8, eager=True)]})):  # fmt: skip
        content = io.BytesIO()
        frame.write_parquet(content)
        assert len(content.getvalue()) < 10**5
        path.with_suffix(".parquet").write_bytes(content.getvalue())
        path.write_text(json.dumps(said | {"sha256": hashlib.sha256(content.getvalue()).hexdigest()}))
        assert "a table must have at most 2,000,000 values" in refused(calibrate, "rates", path)


def test_compressed_tables_of_text_are_refused_unread(tmp_path: Path) -> None:
    shutil.copytree(TABLES / "vidur", tmp_path / "vidur")
    path = tmp_path / "vidur" / "mlp.csv"
    path.write_bytes(gzip.compress(path.read_bytes() + b"\n" * 10**7))
    arguments = ("import", "vidur", tmp_path / "vidur", "--model", "llama-2-7b", "--gpu", "a100", "-o", tmp_path / "out")
    assert "mlp.csv: it is compressed; unpack it first" in refused(calibrate, *arguments)


def test_files_have_a_largest_size(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    with path.open("wb") as file:
        file.truncate(bounded_files.MOST_TOML + 1)
    assert "s.toml must have at most 4,194,304 bytes, got 4,194,305" in refused(sim, "lint", path)
    path.write_bytes(b"1234")
    with pytest.raises(ParameterError, match="at most 3 bytes, got 4"):
        bounded_files.read_bytes(path, 3)


@pytest.mark.parametrize("footer", [b"", b"PAR1", b"\xff" * 40 + b"PAR1", b"\x1c" * 200 + (200).to_bytes(4, "little") + b"PAR1"])
def test_a_damaged_footer_is_refused(footer: bytes) -> None:
    with pytest.raises(ParameterError, match="cannot be read as Parquet"):
        bounded_files.read_parquet(b"PAR1" + footer)


CONFIGS = [
    ({"num_hidden_layers": 10**9}, "num_hidden_layers must be between 1 and 1000, got 1000000000"),
    ({"num_hidden_layers": 10**5}, "num_hidden_layers must be between 1 and 1000"),
    ({"vocab_size": 10**12}, "vocab_size must be between 1 and 16777216"),
    ({"hidden_size": 2**40}, "hidden_size must be between"),
    ({"intermediate_size": -3}, "intermediate_size must be between"),
    ({"num_attention_heads": 0}, "num_attention_heads must be between"),
    ({"rms_norm_eps": float("nan")}, "NaN is not JSON"),
    ({"rope_theta": float("nan")}, "NaN is not JSON"),
    ({"rope_theta": 0}, "rope_theta must be above 0"),
    ({"rope_parameters": {"rope_theta": -1.0}}, "rope_theta must be between 0"),
    ({"rms_norm_eps": 1e3}, "rms_norm_eps must be between 0 and 0.1"),
    ({"num_hidden_layers": 13}, "num_hidden_layers of model model must match its weights, which have 12 layers, got 13"),
    ({"vocab_size": 10**7}, "vocab_size=10000000 of model model asks for more than its weights hold"),
    ({"hidden_size": 10**6}, "of model model asks for more than its weights hold"),
]


@pytest.mark.parametrize("number", range(len(CONFIGS)))
def test_a_configuration_is_looked_at_before_a_model_is_built(number: int, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    change, words = CONFIGS[number]
    from calibrate.family import model_directory

    folder = tmp_path / "model"
    shutil.copytree(model_directory.bundled("target"), folder)
    said = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(said | change))
    arguments = ("decode", "autoregressive", "--model", folder, "--prompt", "x", "--tokens", "2", "--device", "cpu")
    assert words in refused(calibrate, *arguments)


def test_configurations_in_use_are_within_the_bounds() -> None:
    for shape in published_shapes.PRESETS.values():
        shape_configs.check_config({"num_hidden_layers": shape.layers, "hidden_size": shape.hidden, "vocab_size": shape.vocabulary,
                                  "rope_theta": 5e5, "rms_norm_eps": 1e-6, "layer_norm_epsilon": 1e-5})  # fmt: skip


# --- names and types ---


def test_a_name_that_no_system_has_is_one_line(tmp_path: Path) -> None:
    long = "x" * 300
    (tmp_path / "s.toml").write_text(SCENARIO + f'[cost]\nkind = "profile"\nprofile = "{long}.json"\n')
    assert refused(sim, "run", tmp_path / "s.toml").endswith(f"cost: profile: {long}.json: it cannot be read: File name too long")
    assert "File name too long" in refused(sim, "plot", tmp_path / long)
    name = f"{long}.json"
    for arguments in (("lint", long), ("compare", name), ("run", "-o", tmp_path / long), ("ls", "profiles", name)):
        refused(sim, *arguments)
    for command in (("rates", name), ("run", "--plan", long, "-o", "x.json"), ("layers", "--model", name, "-o", "x")):
        refused(calibrate, *command)


@pytest.mark.parametrize(("key", "value"), [
    ("draft", "x"), ("draft", {"name": 3}), ("target", []), ("heads", 3), ("prompts", "x"), ("sampling", []), ("versions", None),
    ("seed", "x"), ("date", 3), ("target", {"name": "x", "checksum": "", "layers": 0}), ("rows", "x"), ("columns", []),
])  # fmt: skip
def test_a_log_says_what_it_says_in_the_types_that_it_has(key: str, value: Any, tmp_path: Path) -> None:
    path = position_log.save(position_log.bundled(), tmp_path / "log.json")
    path.write_text(json.dumps(json.loads(path.read_text()) | {key: value}))
    assert f"log.json: {key}" in refused(calibrate, "rates", path)


@pytest.mark.parametrize("frame", [
    pl.DataFrame({"a": [1]}), pl.DataFrame({"point": ["x"], "view": ["formula"], "method": ["ppd"]}),
    pl.DataFrame({"point": [0], "view": ["formula"], "method": ["ppd"]}),
    pl.DataFrame({"point": [[0]], "view": ["x"], "method": ["x"]}),
    pl.DataFrame({"point": [0], "view": ["paths"], "method": ["ppd"], "exit_layer": [3], "latency_layers": [float("nan")]}),
    pl.DataFrame({"point": [], "view": [], "method": []}, schema={"point": pl.Int64, "view": pl.String, "method": pl.String}),
])  # fmt: skip
def test_foreign_table_is_no_run(frame: pl.DataFrame, tmp_path: Path) -> None:
    frame.write_parquet(tmp_path / "results.parquet")
    done = CliRunner().invoke(sim, ["plot", str(tmp_path)])
    assert done.exit_code == 0 or refused(sim, "plot", tmp_path)


def test_a_disk_that_is_full_is_said_to_be(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: Path, *_: object) -> int:
        raise OSError(28, "No space left on device", str(self))

    monkeypatch.setattr(Path, "write_bytes", full)
    arguments = ["run", "--set", "scenario.tokens=4", "--no-figures", "-q", "-j", "1", "-o", str(tmp_path / "run")]
    done = CliRunner().invoke(sim, arguments)
    assert done.exit_code == 1
    [line] = done.stderr.splitlines()
    assert "No space left on device" in line
    assert "resume with the same command and --resume" in line


def test_shown_is_short() -> None:
    assert len(checks.shown("x" * 10**5)) < 100


# --- every reader ---

_READS = (
    "read_bytes", "read_text", "read_page", "text_lines", "read_csv", "csv_rows", "read_parquet", "scan_parquet", "safe_open",
    "open", "from_pretrained",
)  # fmt: skip


def readers() -> set[str]:
    """Functions of the project that read files, but for the ones that all others read by: the file's name and the function's."""
    found = set()
    for package in ("model", "sim", "calibrate", "figures"):
        for path in sorted((ROOT / package).rglob("*.py")):
            if path == ROOT / "model" / "base" / "bounded_files.py":
                continue
            stem = path.parent.name if path.stem == "__init__" else path.stem
            for function in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(function, ast.FunctionDef):
                    calls = [each for each in ast.walk(function) if isinstance(each, ast.Call)]
                    names = [(getattr(call.func, "attr", getattr(call.func, "id", "")), call.args) for call in calls]
                    modes = [ast.unparse(args[0]) if args else "" for name, args in names if name in _READS]
                    found |= {f"{stem}.{function.name}"} if any(mode not in ("'a'", "'w'") for mode in modes) else set()
    return found


def test_each_function_that_reads_a_file_has_a_fuzz_test() -> None:
    assert readers() == {*READERS} | TRUSTED_READERS
    fuzzed = (ROOT / "tests" / "project" / f"test_fuzzed_{name}.py" for name in ("files", "models"))
    text = "".join(path.read_text(encoding="utf-8") for path in fuzzed)
    for test in {*READERS.values()}:
        assert f"def test_{test}(" in text, test
