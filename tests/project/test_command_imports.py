"""Libraries that each command imports: those that it uses, and no other. Imports are most of the time of a short command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from model.methods import registry
from tests.bench import cli
from tests.project.test_every_command import APPS, commands

ROOT = Path(__file__).parents[2]
HEAVY = (
    "hypothesis", "jinja2", "joblib", "matplotlib", "numpy", "pandas", "polars", "scipy", "scipy.optimize", "scipy.stats", "simpy",
    "tokenizers", "torch", "transformers",
)  # fmt: skip

PROBE = f"""
import importlib, json, sys
app = importlib.import_module(f"{{sys.argv[1]}}.commands.{{sys.argv[1]}}_app").app
for arguments in json.loads(sys.argv[2]):
    try:
        app(arguments, standalone_mode=False)
    except SystemExit as end:
        if end.code:
            sys.exit(f"{{arguments}} ended with {{end.code}}")
print("\\n" + json.dumps([name for name in {HEAVY!r} if name in sys.modules]))
"""

ADVICE = ("--model", "llama-3.1-8b", "--gpu", "h100", "--draft", "eagle3", "--acceptance", "0.7")
LAW = ("--engine-law", "sglang-qwen3-235b-a22b")
EXPLAINED = ("--mean-acceptance-length", "2.4", "--draft-length", "3", "--plain-tpot", "8ms", "--tpot", "6.2ms", *ADVICE[:6])
SHORT_RUN = ("run", "--replications", "2")
NUMBERS, TABLES = {"numpy", "scipy"}, {"numpy", "scipy", "polars"}

ALLOWED = {
    ("sim", "env"): {"numpy"},
    ("sim", "ls"): NUMBERS,
    ("sim", "ls", "scenarios"): NUMBERS,
    ("sim", "ls", "laws"): NUMBERS,
    ("sim", "schema", "scenarios"): NUMBERS,
    ("sim", "lint", "ppd-overheads"): TABLES,  # it resolves the scenario as a run does
    ("sim", "audit"): {"numpy"},
    ("sim", "advise", *ADVICE): TABLES | {"scipy.optimize"},  # a profile is a table; the law is fitted
    ("sim", "advise", *LAW, "--batch", "1,8", "--json"): NUMBERS | {"scipy.optimize"},
    ("sim", "explain", *EXPLAINED): TABLES | {"scipy.optimize"},
    ("sim", "serve", *LAW, "--concurrency", "1", "--policy", "off", "--requests", "20", "--replications", "1"): NUMBERS,
    ("sim", *SHORT_RUN, "--view", "formula", "--no-figures"): TABLES,
    ("sim", *SHORT_RUN, "--view", "paths", "--no-figures"): TABLES,
    ("sim", *SHORT_RUN, "--view", "events", "--no-figures"): TABLES | {"simpy"},
    ("sim", *SHORT_RUN, "--view", "events"): TABLES | {"simpy", "matplotlib"},
    ("sim", "trace", "--tokens", "4"): TABLES | {"simpy"},
}
"""Libraries that a command may import, by its arguments. Extras of real models (torch) are used by `calibrate` alone."""


def imported(name: str, cwd: Path, *calls: tuple[str, ...]) -> set[str]:
    """Libraries of `HEAVY` that a program has imported after these calls, in a process of its own."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", PROBE, name, json.dumps(calls)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return set(json.loads(done.stdout.splitlines()[-1]))


@pytest.mark.parametrize("name", APPS)
def test_no_help_imports_a_heavy_library(name: str, tmp_path: Path) -> None:
    calls = [(*verbs, "--help") for verbs, _ in commands(name)]
    assert len(calls) > 10
    assert imported(name, tmp_path, *calls) == set()


def alike() -> dict[str, list[tuple[str, ...]]]:
    """Commands that may import the same libraries. Together they import no other if and only if none does: one process shows it."""
    found: dict[str, list[tuple[str, ...]]] = {}
    for (_, *arguments), allowed in ALLOWED.items():
        found.setdefault(" ".join(sorted(allowed)), []).append(tuple(arguments))
    return found


@pytest.mark.parametrize(("allowed", "calls"), alike().items())
def test_commands_import_what_they_use(allowed: str, calls: list[tuple[str, ...]], tmp_path: Path) -> None:
    found = imported("sim", tmp_path, *calls)
    assert found <= {*allowed.split()}, "import these where they are used, not at the top of a module"


def test_plot_and_report_import_what_they_use(tmp_path: Path) -> None:
    """They read a finished run: nothing is simulated."""
    imported("sim", tmp_path, (*SHORT_RUN, "--view", "formula", "--no-figures", "-o", "done"))
    assert imported("sim", tmp_path, ("plot", "done")) <= {"numpy", "polars", "matplotlib"}
    assert imported("sim", tmp_path, ("report", "done")) <= TABLES | {"jinja2"}


def of_sim(*arguments: str) -> str:
    """Code that runs `sim` with these arguments."""
    return f"sys.argv = ['sim', *{arguments!r}]; from sim.commands.sim_app import main; main()"


def modules(code: str, cwd: Path) -> set[str]:
    """Modules that are imported in a new process that runs this code."""
    command = [sys.executable, "-c", f"import atexit, sys; atexit.register(lambda: print(*sys.modules)); {code}"]
    return set(subprocess.check_output(command, cwd=cwd, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)}).split())


def test_default_run_imports_what_it_uses(tmp_path: Path) -> None:
    """The libraries of its limit in the benchmark, and of ours the code of its method and of its kind of outcome alone."""
    run = modules(of_sim("run"), tmp_path)
    assert modules(cli.LIBRARIES[1], tmp_path) <= run
    methods = {name.split(".")[2] for name in run if name.startswith("model.methods.")}
    assert methods & {*registry.names()} == {"ppd"}
    assert {name for name in run if name.startswith("sim.scenarios.outcomes.") and name.endswith("_outcomes")} == {
        "sim.scenarios.outcomes.match_outcomes"
    }
    # Costs in layer-times need no hardware: only whether a name is that of a device is looked up.
    assert {name for name in run if name.startswith(("model.engines", "model.hardware", "sim.scenarios.hardware"))} == {
        "model.hardware", "model.hardware.devices"
    }
    assert "model.costs.pass_seconds" not in run
    assert "matplotlib.style" not in run, "it reads 30 files of styles"


@pytest.mark.parametrize("arguments", [("run", "--dry-run", "--set", "scenario.tokens=4"), ("advise", *ADVICE), ("ls", "methods")])
def test_words_of_a_command_line_need_no_validator(arguments: tuple[str, ...], tmp_path: Path) -> None:
    """typer makes validators with pydantic, whose import takes a tenth of a second."""
    assert "pydantic" not in modules(of_sim(*arguments), tmp_path)


@pytest.mark.parametrize(("given", "threads"), [({}, "1"), ({"OPENBLAS_NUM_THREADS": "3"}, "3")])
def test_sim_multiplies_matrices_in_one_thread_unless_told_otherwise(given: dict[str, str], threads: str) -> None:
    """It is said before numpy is imported, which reads it once."""
    code = (
        "import os, sys; sys.argv = ['sim', '--version']; from sim.commands import sim_app\n"
        "try:\n    sim_app.main()\nfinally:\n    print(os.environ['OPENBLAS_NUM_THREADS'], 'numpy' in sys.modules)"
    )
    environment = {name: value for name, value in os.environ.items() if name != "OPENBLAS_NUM_THREADS"} | given
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, cwd=ROOT, check=False)
    assert done.stdout.splitlines()[-1] == f"{threads} False", done.stderr
