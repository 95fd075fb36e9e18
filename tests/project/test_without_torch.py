"""Without the extra `torch` every command on real models says in a line what to install, and the others run."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app as calibrate
from calibrate.commands.common_options import LIBRARIES
from sim.commands.sim_app import app as sim

TEXT = ["--prompt", "x", "--device", "cpu"]
COMMANDS = {
    "decode": ["decode", "speculative", "--model", "family", "--set", "draft_length=2", *TEXT],
    "log": ["log", "--target", "family:target", "-o", "OUT/log.json"],
    "run": ["run", "speculative", "--model", "family", "--set", "draft_length=2", "-o", "OUT/runs.json"],
    "forced run": ["run", "autoregressive", "--model", "llama-68m", "--forced", "none", "-o", "OUT/runs.json"],
    "quality": ["quality", "early_exit", "--model", "family:target", "--set", "exit_layer=4", "-o", "OUT/rows.csv"],
    "replace": ["replace", "-o", "OUT/rows.csv"],
    "loss": ["loss", "-o", "OUT/rows.csv"],
    "heads": ["heads", "--model", "family:target", "-o", "OUT/heads.safetensors"],
    "align": ["align", "--target", "family:target", "--draft", "family:draft", "-o", "OUT/aligned"],
    "train": ["train", "-o", "OUT/model", "--quick"],
    "layers": ["layers", "--model", "llama-68m", "--quick", "-o", "OUT/profiles"],
    "links": ["links", "--quick", "-o", "OUT/profiles"],
}


def hide(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Libraries as if they were not installed."""

    class Missing:
        @staticmethod
        def find_spec(name: str, *_: Any) -> None:
            if name.partition(".")[0] in names:
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    for each in [*sys.modules]:
        if each.partition(".")[0] in names:
            monkeypatch.delitem(sys.modules, each)
    monkeypatch.setattr(sys, "meta_path", [Missing, *sys.meta_path])


@pytest.mark.parametrize(("command", "missing"), [
    *[(command, LIBRARIES) for command in COMMANDS], ("decode", ("torch",)), ("train", ("transformers",)),
])  # fmt: skip
def test_a_command_on_real_models_says_what_to_install(
    command: str, missing: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide(monkeypatch, *missing)
    done = CliRunner().invoke(calibrate, [each.replace("OUT", str(tmp_path)) for each in COMMANDS[command]])
    assert (done.exit_code, done.stdout) == (2, ""), (done.output, done.exception)
    [line] = done.stderr.splitlines()
    assert line.startswith("error: this command works with real models and needs ")
    assert any(f"needs {name}, which is not installed: pip install 'decodesim[torch]'" in line for name in missing)
    assert not [*tmp_path.iterdir()]


def test_a_library_that_cannot_be_used_is_said_so_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "tokenizers").mkdir()
    (tmp_path / "tokenizers" / "__init__.py").write_text("raise ImportError('libmagic.so is not there', name='tokenizers')")
    for each in [*sys.modules]:
        if each.partition(".")[0] == "tokenizers":
            monkeypatch.delitem(sys.modules, each)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "calibrate.family.make_model", raising=False)
    done = CliRunner().invoke(calibrate, ["train", "-o", str(tmp_path / "model"), "--quick"])
    assert done.exit_code == 2
    assert "needs tokenizers, which cannot be used: libmagic.so is not there" in done.stderr


def test_the_other_commands_need_none_of_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hide(monkeypatch, *LIBRARIES)
    run = ["run", "--set", "scenario.tokens=4", "--view", "formula", "--no-figures", "-q", "-o", str(tmp_path / "run")]
    for app, arguments in ((sim, run), (calibrate, ["rates", "family", "--json"]), (sim, ["ls", "profiles"])):
        done = CliRunner().invoke(app, arguments)
        assert done.exit_code == 0, (arguments, done.output, done.exception)
