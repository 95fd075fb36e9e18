"""Files of a user that are named like packages of the project are named in one line, and not met by a riddle."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import sim

ROOT = Path(__file__).parents[2]
WORDS = "decodesim needs its own package 'model', but Python finds"


def python(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("package", ["sim", "calibrate"])
def test_model_file_in_working_folder_is_named(package: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("x = 1\n")
    command = python(tmp_path, "-m", package, "--help")
    assert command.returncode == 2
    assert command.stderr.startswith(f"error: {WORDS} {(tmp_path / 'model.py').resolve()} instead; rename that")
    assert "Traceback" not in command.stderr
    imported = python(tmp_path, "-c", f"import {package}")
    assert imported.returncode == 1
    assert WORDS in imported.stderr.splitlines()[-1]
    assert python(tmp_path, "-P", "-m", package, "--help").returncode == 0


def test_folder_named_like_a_package_does_no_harm(tmp_path: Path) -> None:
    (tmp_path / "figures").mkdir()
    assert python(tmp_path, "-m", "sim", "--help").returncode == 0


def test_sim_offers_what_its_documentation_names() -> None:
    assert {*dir(sim)} == {*sim.__all__, "__version__"}
    assert all(hasattr(sim, name) for name in sim.__all__)
    with pytest.raises(AttributeError, match=r"module 'sim' has no attribute 'nothing'; it has advise, audit, comparison, "):
        _ = sim.nothing
