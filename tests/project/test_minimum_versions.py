"""The versions that pyproject.toml declares as the least: all of them together, in an environment of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = (
    "ppd-figures-3-and-4", "speculative-deck", "bild", "beam-deck", "early-exit", "skipdecode", "hardware-compare",
    "compare-lossy",
)  # fmt: skip
TESTS = (
    "tests/sim/test_scenario.py", "tests/sim/test_results_table.py", "tests/calibrate/test_importers.py",
    "tests/sim/test_impossible_runs.py",
    "tests/project/test_outside_method.py", "tests/sim/test_speculative_scenario.py", "tests/figures/test_figures_speculative.py",
    "tests/sim/test_sweep.py",
)  # fmt: skip


def least(requirements: list[str]) -> dict[str, str]:
    """The least version of each requirement that says one, as `pip` is asked for it."""
    found = {}
    for each in requirements:
        said = re.fullmatch(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])?>=([0-9.]+)", each)
        assert said is not None, f"{each} must say its least version, NAME>=VERSION"
        found[said[1]] = said[2]
    return found


def declared() -> tuple[dict[str, str], dict[str, str]]:
    """Of the project, and of its tests."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return least(project["dependencies"]), least(project["optional-dependencies"]["test"])


def test_every_dependency_says_its_least_version() -> None:
    own, of_tests = declared()
    assert {"polars", "numpy", "joblib"} <= {*own}
    assert "pytest" in of_tests


@pytest.mark.slow
def test_the_declared_versions_work(tmp_path: Path) -> None:
    """Scenarios run and the core of the quick tests passes; without torch, which the core does not need."""
    own, of_tests = declared()
    where = tmp_path / "env"
    subprocess.run([sys.executable, "-m", "venv", str(where)], check=True)
    python = str(where / "bin" / "python")
    wanted = [f"{name}=={version}" for name, version in {**own, "pytest": of_tests["pytest"]}.items()]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", *wanted]
    done = subprocess.run(pip, capture_output=True, text=True)
    if "No matching distribution" in done.stderr or "onnect" in done.stderr:
        pytest.skip(f"the package index does not have them: {done.stderr.splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONHOME", "VIRTUAL_ENV")}
    environment["PYTHONPATH"] = str(ROOT)

    def called(*arguments: str) -> None:
        done = subprocess.run([python, *arguments], cwd=tmp_path, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, f"{arguments}: {done.stdout[-3000:]}{done.stderr[-3000:]}"

    for name in SCENARIOS:
        called("-m", "sim", "run", name, "--replications", "16", "-j", "2", "-q", "-o", str(tmp_path / name))
    quick = ["-q", "-p", "no:cacheprovider", "-c", str(ROOT / "pyproject.toml"), f"--rootdir={ROOT}", "-o", "addopts=-m 'not slow'"]
    called("-m", "pytest", *quick, *[str(ROOT / each) for each in TESTS])
