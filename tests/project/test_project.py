"""The house itself: what lies where, what may import what, and that the tools have nothing to say."""

import ast
import json
import subprocess
import sys
from collections import Counter, defaultdict
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

REQUIRED = {
    ".ci",
    ".gitignore",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "calibrate",
    "constraints.txt",
    "figures",
    "model",
    "pyproject.toml",
    "sim",
    "tests",
}
ALLOWED = REQUIRED | {"notebooks"}

# What a user must not wait for before `sim --help` answers.
HEAVY = ("joblib", "matplotlib", "numpy", "polars", "pydantic", "scipy", "simpy", "torch", "transformers")


def run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    "command",
    [
        pytest.param((sys.executable, "-m", "ruff", "check"), id="ruff"),
        pytest.param((sys.executable, "-m", "mypy"), id="mypy"),
        # import-linter has no `python -m`; its script is next to the interpreter.
        pytest.param((str(Path(sys.executable).with_name("lint-imports")),), id="import contracts"),
    ],
)
def test_tools_have_nothing_to_say(command: tuple[str, ...]) -> None:
    done = run(*command)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_command_line_imports_nothing_heavy() -> None:
    probe = f"import sim.commands.sim_app, sys, json; print(json.dumps([name for name in {HEAVY!r} if name in sys.modules]))"
    done = run(sys.executable, "-c", probe)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == [], "import these where they are used, not at the top of a module"


def test_top_level_holds_what_it_should() -> None:
    listed = run("git", "ls-files")
    if listed.returncode != 0:
        pytest.skip("not a git checkout, so there is no list of what belongs to the project")
    found = {name.split("/")[0] for name in listed.stdout.splitlines()}
    assert found - ALLOWED == set(), "files that have no place at the top level"
    assert REQUIRED - found == set(), "missing at the top level"


def test_no_two_files_have_one_name() -> None:
    """But for the three of a method, whose folder says which."""
    of_a_method = {"algorithm", "theory", "paths"}
    names = Counter(
        path.stem
        for package in ("model", "sim", "calibrate", "figures")
        for path in (ROOT / package).rglob("*.py")
        if not path.stem.startswith("__") and not (path.stem in of_a_method and path.parent.parent.name == "methods")
    )
    assert [name for name, count in names.items() if count > 1 or name in of_a_method] == []


def test_no_two_modules_have_a_class_of_one_name() -> None:
    """But for `Parameters`, which every method has."""
    places = defaultdict(set)
    for package in ("model", "sim", "calibrate", "figures"):
        for path in (ROOT / package).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.ClassDef):
                    places[node.name].add(str(path.relative_to(ROOT)))
    assert {name: sorted(found) for name, found in places.items() if len(found) > 1 and name != "Parameters"} == {}


def test_no_folder_is_too_large_to_look_through() -> None:
    """About a dozen files each; what has more is two nouns. But theorems on methods grow with the methods, as their folders do."""
    modules = Counter(
        str(path.parent.relative_to(ROOT))
        for package in ("model", "sim", "calibrate", "figures")
        for path in (ROOT / package).rglob("*.py")
        if path.stem != "__init__" and path.parent.name != "of_methods"
    )
    assert {folder: count for folder, count in modules.items() if count > 13} == {}
