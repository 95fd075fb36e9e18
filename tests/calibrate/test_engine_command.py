"""`calibrate engine`: fit, predict, next and commands, as a user calls them; bad input is one line with exit code 2."""

from __future__ import annotations

import json
import os
import shlex
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from calibrate.commands.calibrate_app import app
from model.base.checks import ParameterError
from model.engines import benchmark_commands, cells, step_law
from model.engines.benchmark_commands import REQUESTS_PER_SEQUENCE
from model.engines.kernel_times import KernelSource
from model.engines.step_terms import RoutedExperts
from tests.support.engine_outputs import Steps, vllm_bench_json

SIX = """sequences,draft_length,mean_acceptance_length,tpot_ms,gpu
1,0,,10.05,h100
8,0,,10.4,h100
64,0,,13.2,h100
1,3,2.53,4.53,h100
8,3,2.53,5.1,h100
64,3,2.53,9.63,h100
"""
OTHERS = "sequences,draft_length,mean_acceptance_length,tpot_ms\n4,0,,10.2\n4,3,2.53,\n256,3,2.53,\n"


def called(*words: str) -> Result:
    return CliRunner().invoke(app, ["engine", *words])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("engine")
    (made / "six.csv").write_text(SIX)
    (made / "others.csv").write_text(OTHERS)
    (made / "steps.csv").write_text("sequences,draft_length,step_ms\n1,0,10\n2,3,11\n")
    done = called("fit", str(made / "six.csv"), "-o", str(made / "mine"), "--engine", "vllm 0.9")
    assert done.exit_code == 0, done.output
    (made / "fit.txt").write_text(done.output)
    return made


def test_fit_prints_coefficients_errors_and_what_is_not_known(folder: Path) -> None:
    text = (folder / "fit.txt").read_text()
    for part in (
        "step law fitted to 6 cells",
        "draft_pass",
        "not determined by the cells (priors):",
        "each cell predicted from the others",
        "each cell, and its error if it is predicted from the others:",
        "no cell to spare: the width of the intervals comes from the prior",
        "cells: 1 to 64 sequences, draft length 0 to 3",
        "note: column gpu is not used",
    ):
        assert part in text
    law = step_law.load(str(folder / "mine.json"))
    assert law.facts == {"engine": "vllm 0.9"}
    assert law.unit == "tpot_ms"


def test_fit_as_json_has_every_coefficient_with_its_interval(folder: Path) -> None:
    done = called("fit", str(folder / "six.csv"), "-o", str(folder / "again.json"), "--json", "--seed", "1")
    found = json.loads(done.stdout)
    assert {row["term"] for row in found["coefficients"]} >= {
        "weights",
        "step",
        "sequence",
        "draft_pass",
        "acceptance_rate",
        "noise",
    }
    assert all(row["low"] <= row["value"] <= row["high"] for row in found["coefficients"])
    assert len(found["left_out_errors"]) == 6
    assert found["range"] == {"sequences": [1.0, 64.0], "draft_length": [0, 3]}
    assert Path(found["file"]).is_file()
    assert found["unused_columns"] == ["gpu"]
    # Another seed: the same coefficients, other draws.
    one, other = (step_law.load(str(folder / f"{name}.json")) for name in ("mine", "again"))
    assert one.coefficients == other.coefficients
    assert one.draws["step"].tolist() != other.draws["step"].tolist()


def test_predict_has_a_row_for_each_cell_with_its_interval(folder: Path) -> None:
    done = called("predict", str(folder / "mine.json"), str(folder / "others.csv"), "--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["unit"] == "tpot_ms"
    rows = found["rows"]
    assert [(row["sequences"], row["draft_length"]) for row in rows] == [(4, 0), (4, 3), (256, 3)]
    for row in rows:
        assert row["low"] <= row["predicted"] <= row["high"]
    assert rows[0]["error"] == pytest.approx(rows[0]["predicted"] / 10.2 - 1)
    assert rows[1]["error"] is None
    assert rows[2]["beyond"] == 2
    assert any("beyond the fitted ones" in note for note in found["notes"])
    text = called("predict", str(folder / "mine.json"), str(folder / "others.csv")).output
    assert "1 cell with a measured value: median error" in text


def test_prefill_share_matters_only_between_units(folder: Path) -> None:
    path = folder / "rates.csv"
    path.write_text("sequences,draft_length,output_tokens_per_s\n8,0,\n")
    plain, less = (
        json.loads(called("predict", str(folder / "mine.json"), str(path), "--json", *words).stdout)["rows"][0]["predicted"]
        for words in (("--prefill-share", "0"), ("--prefill-share", "0.2"))
    )
    assert less == pytest.approx(0.8 * plain)


def test_next_names_a_cell_and_why(folder: Path) -> None:
    done = called("next", str(folder / "six.csv"), "--batch", "1,8,64", "--draft-length", "0,1,3,5")
    assert done.exit_code == 0, done.output
    assert "best draft length now, by running sequences:" in done.output
    assert "measure next: " in done.output
    found = json.loads(called("next", str(folder / "mine.json"), "--batch", "1,8,64", "--draft-length", "0,1,3,5", "--json").stdout)
    assert [choice["sequences"] for choice in found["choices"]] == [1, 8, 64]
    assert len(found["candidates"]) == 12
    assert found["candidates"][0]["loss"] <= found["expected_loss"]


def test_acceptance_by_position_fills_empty_lengths(folder: Path) -> None:
    path = folder / "without.csv"
    path.write_text("\n".join(",".join(line.split(",")[:2] + line.split(",")[3:4]) for line in SIX.splitlines()))
    done = called("fit", str(path), "-o", str(folder / "rates"), "--acceptance", "0.8,0.7,0.6")
    assert done.exit_code == 0, done.output
    law = step_law.load(str(folder / "rates.json"))
    assert law.acceptance == (0.8, 0.7, 0.6)
    assert law.acceptance_lengths(cells.Cells.of("tpot_ms", [1], [3])).tolist() == [[pytest.approx(1 + 0.8 + 0.56 + 0.336)]]


def test_kernels_of_a_model_give_the_shape(folder: Path) -> None:
    done = called(
        "fit", str(folder / "six.csv"), "-o", str(folder / "k"), "--model", "llama-3.1-8b", "--gpu", "h100", "--kernels", "roofline"
    )
    assert done.exit_code == 0, done.output
    law = step_law.load(str(folder / "k.json"))
    assert law.kernels is not None
    assert law.kernels.source == "roofline"
    assert "kernels" in law.coefficients
    assert "weights" not in law.coefficients


MODEL = [
    "--model",
    "llama-3.1-8b",
    "--gpu",
    "h100",
    "--tensor-parallel",
    "2",
    "--dtype",
    "float16",
    "--draft",
    "llama-68m",
    "--kernels",
    "roofline",
    "--weights",
    "int4-g64",
]
SOURCE = KernelSource("llama-3.1-8b", "h100", 2, "float16", "llama-68m", "roofline", "int4-g64")


def test_law_without_kernels_keeps_its_model_and_devices(folder: Path) -> None:
    words = ("fit", f"{folder}/six.csv", "-o", f"{folder}/kept", "--model", "qwen3-30b-a3b", "--tensor-parallel", "2", "--json")
    assert called(*words).exit_code == 0
    law = step_law.load(folder / "kept.json")
    assert (law.shape_name, law.devices, law.experts) == ("qwen3-30b-a3b", 2, RoutedExperts(128, 8))
    assert called("fit", f"{folder}/six.csv", "-o", f"{folder}/dense", "--model", "llama-3.1-8b").exit_code == 0
    dense = step_law.load(folder / "dense.json")
    assert (dense.shape_name, dense.devices, dense.experts, dense.kernels) == ("llama-3.1-8b", 1, None, None)


@pytest.mark.parametrize("words", [("fit", "{}/six.csv", "-o", "x"), ("next", "{}/six.csv")], ids=["fit", "next"])
def test_options_reach_the_fit(words: tuple[str, ...], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[dict[str, Any]] = []

    def fit(*_: object, **how: Any) -> None:
        calls.append(how)
        raise ParameterError("enough")

    monkeypatch.setattr("model.engines.law_fit.fit", fit)
    start = tuple(word.format(folder) for word in words)
    called(*start, *MODEL, "--acceptance", "0.8,0.7", "--seed", "7")
    called(*start, "--experts", "64", "--active-experts", "6")
    first, second = calls
    assert first["kernels"] == SOURCE
    assert (first["experts"], first["acceptance"], first["seed"]) == (None, (0.8, 0.7), 7)
    assert (second["kernels"], second["experts"], second["acceptance"], second["seed"]) == (None, RoutedExperts(64, 6), (), 0)


def test_options_of_commands_are_in_the_script() -> None:
    done = called(
        *[
            "commands",
            "--model",
            "org/model",
            "--batch",
            "2,5",
            "--draft-length",
            "4",
            "--engine",
            "sglang",
            "--draft",
            "org/draft",
            "--method",
            "mtp",
        ],
        *["--acceptance-length", "2.25", "--prompt", "333", "--tokens", "77"],
    )
    assert done.exit_code == 0, done.output
    for part in (
        "--model-path org/model",
        "--max-concurrency 2",
        "--max-concurrency 5",
        "--speculative-num-steps 4",
        "--speculative-num-draft-tokens 5",
        "NEXTN",
        "org/draft",
        "SGLANG_SIMULATE_ACC_LEN=2.25",
        "--random-input-len 333",
        "--random-output-len 77",
    ):
        assert part in done.output


BAD = [
    (("fit", "{}/six.csv", "-o", "x", "--experts", "8"), "--experts needs --active-experts too"),
    (
        ("fit", "{}/six.csv", "-o", "x", "--experts", "8", "--active-experts", "9"),
        "active_experts must be between 1 and experts=8, got 9",
    ),
    (("fit", "{}/six.csv", "-o", "x", "--gpu", "h100"), "--gpu needs --model"),
    (("fit", "{}/six.csv", "-o", "x", "--draft", "llama-68m"), "--draft needs --model and --gpu"),
    (("fit", "{}/six.csv", "-o", "x", "--model", "llama-3.1-9b", "--gpu", "h100"), "did you mean llama-3.1-8b"),
    (("fit", "{}/six.csv", "-o", "x", "--model", "llama-3.1-8b", "--gpu", "h101"), "h100"),
    (("fit", "{}/six.csv", "-o", "x", "--acceptance", "high"), "--acceptance must be conditional rates by draft position"),
    (("fit", "{}/six.csv", "-o", "x", "--acceptance", "1.2"), "acceptance[0] must be between 0 and 1"),
    (("fit", "{}/none.csv", "-o", "x"), "none.csv"),
    (("predict", "{}/six.csv", "{}/six.csv"), "six.csv must be JSON"),
    (("predict", "nothing", "{}/six.csv"), "unknown engine law 'nothing'"),
    (("predict", "{}/mine.json", "{}/others.csv", "--prefill-share", "1"), "prefill_share must be between 0 and 0.99"),
    (("next", "{}/six.csv", "--batch", "one"), "batch must be comma-separated whole numbers"),
    (("next", "{}/mine.json", "--experts", "8", "--active-experts", "2"), "--experts is for cells, and mine.json is a law"),
    (("commands", "--model", "m", "--draft-length", "3"), "--draft is required for method 'eagle3' and draft length 3"),
    (("commands", "--model", "m", "--engine", "vlm", "--draft-length", "0"), "did you mean vllm"),
    (("commands", "--model", "m", "--draft", "d", "--acceptance-length", "9"), "acceptance_length must be between 1 and 4"),
    (("fit", "{}/six.csv", "-o", "x", "--seed", "-1"), "seed must be at least 0, got -1"),
    (("next", "{}/six.csv", "--seed", "-1"), "seed must be at least 0, got -1"),
    (("prior", "--model", "llama-3.1-8b", "--gpu", "h100", "-o", "x", "--seed", "-1"), "seed must be at least 0, got -1"),
    (("next", "{}/six.csv", "--batch", "0"), "batch must be between 1 and 1000000, got 0"),
    (("next", "{}/six.csv", "--draft-length", "-1"), "draft_length must be between 0 and 1024, got -1"),
    (("next", "{}", "--batch", "1"), "it is a folder, and must be a file"),
    (("next", "{}/steps.csv", "--batch", "1"), "steps says no acceptance for draft_length 1; add a drafted cell with"),
    (("commands", "--model", " ", "--draft-length", "0"), "model must be a name as vllm takes it, got ' '"),
    (("commands", "--model", "m", "--draft-length", "0", "--batch", "1,1"), "batch must be different numbers, got [1, 1]"),
]  # fmt: skip


@pytest.mark.parametrize(("words", "message"), BAD, ids=[message[:35] for _, message in BAD])
def test_bad_input_is_one_line(words: tuple[str, ...], message: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    done = called(*(word.format(folder) for word in words))
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1
    assert not (folder / "x.json").exists()


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_commands_measure_every_cell_with_pinned_acceptance(engine: str) -> None:
    batches, lengths = (1, 4), (0, 3)
    script = list(benchmark_commands.lines(engine, "org/model", batches, lengths, draft="org/draft", acceptance_length=2.5))
    commands = [line for line in script if not line.startswith(("#", "calibrate "))]
    assert len(commands) == len(lengths) * (1 + len(batches))
    for line in commands:
        assert shlex.join(shlex.split(line)) == line  # nothing that a shell would change
    benchmarks = [line for line in commands if "bench" in line]
    assert all(
        f"--num-prompts {REQUESTS_PER_SEQUENCE * number}" in line for line, number in zip(benchmarks, batches * 2, strict=True)
    )
    drafted = [line for line in commands if "bench" not in line][1]
    assert ("synthetic" if engine == "vllm" else "SGLANG_SIMULATE_ACC_LEN=2.5") in drafted
    if engine == "vllm":
        settings = json.loads(shlex.split(drafted)[-1])
        assert settings["num_speculative_tokens"] == 3
        assert settings["synthetic_acceptance_length"] == 2.5


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_commands_lead_from_results_to_a_law_and_its_predictions(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each printed line is run as it is, with results in the engine's form where its servers would write them."""
    monkeypatch.chdir(tmp_path)
    printed = called("commands", "--engine", engine, "--model", "m", "--draft", "d", "--batch", "1,8,64", "--draft-length", "0,3")
    assert printed.exit_code == 0, printed.output
    commands = [shlex.split(line) for line in printed.output.splitlines() if not line.startswith("#")]
    measured = {(int(row[0]), int(row[1])): float(row[3]) for row in (line.split(",") for line in SIX.splitlines()[1:])}
    length = 0
    for words in commands:
        if words[0] == "calibrate":
            break
        if "bench" not in " ".join(words):
            length = 0 if "spec" not in " ".join(words) else 3
            continue
        name, batch = words[-1], int(words[words.index("--max-concurrency") + 1])
        result = vllm_bench_json(Steps(3, (0, 1, 2, 3, 2, 1, 2, 2, 1, 3)), measured[batch, length], batch) | {
            "completed": 8 * batch
        }
        if engine == "sglang" or not length:
            result = {key: value for key, value in result.items() if not key.startswith("spec_decode")}
        if engine == "sglang":
            result |= {"backend": "sglang", "mean_e2e_latency_ms": 9.0, "accept_length": 2.7 if length else None}
        (tmp_path / name).write_text(json.dumps(result))
    imports, fit = (words[1:] for words in commands[-2:])
    done = CliRunner().invoke(app, imports)
    assert done.exit_code == 0, done.output
    table = cells.read_csv(tmp_path / f"{engine}-measured.cells.csv").cells
    assert {(n, k): value for n, k, value in zip(table.sequences, table.draft_length, table.values, strict=True)} == measured
    assert table.mean_acceptance_length.tolist() == [1.0] * 3 + [2.7] * 3
    done = CliRunner().invoke(app, fit)
    assert done.exit_code == 0, done.output
    table_path, record = f"{engine}-measured.cells.csv", tmp_path / f"{engine}-measured.json"
    before = record.read_bytes()
    done = called("fit", table_path, "-o", f"{engine}-measured")  # a law does not replace the record, nor the record a law
    assert (done.exit_code, record.read_bytes()) == (2, before)
    assert f"{engine}-measured.json is there and is of kind acceptance-record: choose another NAME" in done.stderr
    done = CliRunner().invoke(app, [*imports[:-1], f"{engine}-law"])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1)
    assert f"{engine}-law.json is there and is of kind step-law" in done.stderr
    assert CliRunner().invoke(app, imports).exit_code == 0
    done = called("predict", f"{engine}-law.json", f"{engine}-measured.cells.csv", "--json")
    rows = json.loads(done.stdout)["rows"]
    assert max(abs(row["error"]) for row in rows) < 0.05
    assert called("next", f"{engine}-measured.cells.csv").exit_code == 0


def test_excerpts_of_logs_lead_to_a_law(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each excerpt of the shared data is imported; those with speeds are fitted and predicted."""
    where = Path(os.environ.get("DECODESIM_DATA", "")) / "engine" / "logs"
    if not where.is_dir():
        pytest.skip("DECODESIM_DATA is not set")
    monkeypatch.chdir(tmp_path)
    fitted = []
    for path in sorted(where.glob("*.txt")):
        more = ["--draft-length", "3"] if path.stem == "sglang" else []
        done = CliRunner().invoke(app, ["import", "engine-log", str(path), "-o", path.stem, *more])
        assert done.exit_code == 0, done.output
        table = Path(f"{path.stem}.cells.csv")
        assert table.is_file() != ("no cells: " in done.output)
        if table.is_file():
            done = called("fit", str(table), "-o", f"{path.stem}-law")
            assert done.exit_code == 0, done.output
            rows = json.loads(called("predict", f"{path.stem}-law.json", str(table), "--json").stdout)["rows"]
            assert all(row["low"] <= row["predicted"] <= row["high"] for row in rows)
            fitted.append(path.stem)
    assert fitted == ["sglang"]
