"""`calibrate engine prior` and `bundle`: laws of priors from the command line, and the bundled laws written anew."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from model.engines import engine_priors, law_tables, step_law
from model.engines.cells import Cells
from model.engines.step_law import StepLaw

BASE = {"--engine": "vllm", "--model": "llama-3.1-8b", "--gpu": "h100"}
OTHERS = {
    "--engine": "sglang", "--model": "llama-2-7b", "--gpu": "a100", "--unit": "output_tokens_per_s", "--tensor-parallel": "2",
    "--dtype": "float8", "--draft": "llama-3.2-1b", "--kernels": "roofline", "--acceptance": "0.8,0.7,0.6", "--seed": "1",
    "--weights": "int4",
}  # fmt: skip
"""Another value of every option that decides what the law is."""


def run(*arguments: str) -> str:
    done = CliRunner().invoke(app, ["engine", *arguments])
    assert (done.exit_code, done.stderr) == (0, ""), done.output
    return done.stdout


def prior(folder: Path, **changed: str) -> StepLaw:
    options = BASE | {f"--{key.replace('_', '-')}": value for key, value in changed.items()}
    run("prior", *(word for pair in options.items() for word in pair), "-o", str(folder / "guess"))
    return step_law.load(folder / "guess.json")


def test_law_of_priors_is_written_and_described(tmp_path: Path) -> None:
    arguments = [word for pair in BASE.items() for word in pair]
    printed = run("prior", *arguments, "--out", str(tmp_path / "guess"))
    assert "step law of priors, without cells" in printed
    assert "priors in seconds of vllm: step (3 sources of vllm)" in printed
    assert printed.splitlines()[-1] == str(tmp_path / "guess.json")
    law = step_law.load(tmp_path / "guess.json")
    assert (law.name, law.unit, law.engine, law.cells, law.left_out) == ("guess", "tpot_ms", "vllm", None, ())
    assert law.facts["model"] == "llama-3.1-8b"
    document = json.loads(run("prior", *arguments, "--json", "-o", str(tmp_path / "guess")))
    assert document["file"] == str(tmp_path / "guess.json")
    assert document["range"] is None
    assert {row["from"] for row in document["coefficients"]} == {"prior"}


@pytest.mark.parametrize("option", OTHERS)
def test_every_option_changes_the_law(option: str, tmp_path: Path) -> None:
    """Predictions of the same steps differ; but for --unit, which they are in, and --seed, of the intervals alone."""
    needs = {"kernels": "roofline"} if option in ("--dtype", "--weights") else {}
    before, after = prior(tmp_path, **needs), prior(tmp_path, **needs, **{option[2:].replace("-", "_"): OTHERS[option]})
    if option == "--unit":
        assert (before.unit, after.unit) == ("tpot_ms", "output_tokens_per_s")
        return
    first, second = (law.predict(Cells.of(law.unit, [8.0], [3.0])) for law in (before, after))
    if option == "--seed":
        assert first.values == second.values
        assert first.high != second.high
        return
    assert not np.allclose(first.values, second.values, rtol=1e-3)


def test_named_engine_gives_fits_its_priors(tmp_path: Path) -> None:
    """`fit --engine`: with kernels, a name that begins with a known engine chooses its priors; any other is only kept."""
    cells = tmp_path / "cells.csv"
    cells.write_text("sequences,draft_length,step_ms\n1,0,7.4\n")
    laws = {}
    for engine in ("vLLM 0.10.1", "mine 1"):
        arguments = ("--model", "llama-3.1-8b", "--gpu", "h100", "--engine", engine, "-o", str(tmp_path / "law"))
        run("fit", str(cells), *arguments)
        laws[engine] = step_law.load(tmp_path / "law.json")
        assert laws[engine].facts["engine"] == engine
    assert [law.engine for law in laws.values()] == ["vllm", None]
    own, general = (law.coefficients["draft_pass"] for law in laws.values())  # not determined by this cell
    assert own == pytest.approx(engine_priors.priors("vllm")["draft_pass"].median, rel=0.05)
    assert general < own / 2
    run("fit", str(cells), "--engine", "vllm", "-o", str(tmp_path / "law"))
    assert step_law.load(tmp_path / "law.json").engine is None  # no kernels, so no scale


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"--engine": "vlm"}, "unknown engine 'vlm'; did you mean vllm?"),
        ({"--unit": "ms"}, "unknown unit 'ms'"),
        ({"--gpu": "h1000"}, "unknown device 'h1000'; did you mean h100?"),
        (
            {"--model": "deepseek-r1"},
            "weights (673.2 GB) and cache (0.1 GB) must be at most the 85.9 GB of h100, got 673.2 GB; take",
        ),
        ({"--model": "llama-3.1-70b"}, "a larger tensor_parallel, weights in fewer bits (weights), or another device"),
        ({"--dtype": "int4"}, "dtype is the type of activations and cannot be 'int4'; use weights = 'int4' for the weights"),
        ({"--weights": "int4-g7"}, "weights must have groups of a power of two from 8 to 16384, such as int4-g64, got int4-g7"),
        ({"--weights": "in4"}, "unknown weights 'in4'; did you mean int4"),
        ({"--weights": "int4", "--kernels": "profile"}, "h100-llama-3.1-8b has no times of weights in int4; use --kernels"),
        (
            {"--draft": "eagle3:llama-3.1-70b"},
            "draft must be a head of llama-3.1-8b, got eagle3:llama-3.1-70b: layers are 80, not 32",
        ),
        ({"--acceptance": "high"}, "--acceptance must be"),
        ({"-o": ".."}, "out must name a file"),
    ],
)
def test_mistakes_are_answered_in_one_line(changed: dict[str, str], message: str, tmp_path: Path) -> None:
    options = BASE | {"-o": str(tmp_path / "guess")} | changed
    done = CliRunner().invoke(app, ["engine", "prior", *(word for pair in options.items() for word in pair)])
    assert (done.exit_code, done.stdout) == (2, "")
    assert done.stderr.startswith("error: ")
    assert message in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert not [*tmp_path.iterdir()]


def test_bundle_writes_all_laws_into_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(law_tables, "fitted", step_law.load)
    assert run("bundle", "--out", str(tmp_path)).split() == [str(tmp_path / f"{name}.json") for name in step_law.names()]
    monkeypatch.setattr(law_tables, "write", lambda folder: [Path(str(folder))])
    assert run("bundle") == "None\n"  # the package's own folder
