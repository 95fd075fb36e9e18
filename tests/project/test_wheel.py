"""An installed wheel works away from the sources: all data files are in it."""

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("model", "sim", "calibrate", "figures")
RESULTS = ("results.parquet", "results.csv", "summary.json")
FIGURES = 2


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an unpacked wheel."""
    # Built from a copy: setuptools leaves a build/ next to the sources, and files since deleted would come back from it.
    source = tmp_path_factory.mktemp("source")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, source / package, ignore=shutil.ignore_patterns("__pycache__"))
    wheels, target = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    build = f"from setuptools import build_meta; build_meta.build_wheel({str(wheels)!r})"
    done = subprocess.run([sys.executable, "-c", build], cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as content:  # all is pure Python: to install it is to unpack it
        content.extractall(target)
    return target


def python(installed: Path, cwd: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python in `cwd` with the installed packages ahead of everything else, an editable install included."""
    environment = os.environ | {"PYTHONPATH": str(installed), "NO_COLOR": "1"}
    command = [sys.executable, *arguments]
    return subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)


def test_every_file_of_the_packages_is_installed(installed: Path) -> None:
    files = {
        path.relative_to(ROOT)
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and not path.name.startswith(".")
    }
    missing = sorted(str(path) for path in files if not (installed / path).is_file())
    assert missing == [], "package data of [tool.setuptools] in pyproject.toml does not cover these"


def test_the_installed_packages_are_the_ones_imported(installed: Path, tmp_path: Path) -> None:
    names = ", ".join(PACKAGES)
    done = python(installed, tmp_path, "-c", f"import {names}; print(*(each.__file__ for each in ({names})), sep='\\n')")
    assert done.returncode == 0, done.stderr
    places = done.stdout.splitlines()
    assert len(places) == len(PACKAGES)
    assert all(Path(place).is_relative_to(installed) for place in places)


@pytest.mark.slow  # that every file is installed is in the quick tier
def test_the_default_scenario_runs_from_the_wheel(installed: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = python(installed, tmp_path, "-m", "sim", "run", "--view", "formula", "-o", str(out))
    assert done.returncode == 0, done.stdout + done.stderr
    missing = [name for name in RESULTS if not (out / name).is_file()]
    assert missing == [], f"of the run's files; there are {sorted(path.name for path in out.iterdir())}"
    drawn = [path for path in (out / "figures").glob("*.png") if path.stat().st_size > 0]
    assert len(drawn) >= FIGURES
