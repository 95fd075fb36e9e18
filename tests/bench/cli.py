"""Time of whole commands in a new process, relative to importing the libraries that they need."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

from tests.bench.measure import Benchmark, wall

LIBRARIES = ["-c", "import typer, polars, scipy.special, simpy, matplotlib.figure, matplotlib.backends.backend_svg, rich.table"]
"""Imports of libraries that the default run uses, and of no other."""
ADVISE = ["-m", "sim", "advise", "--model", "llama-3.1-8b", "--gpu", "h100", "--draft", "eagle3", "--acceptance", "0.7"]


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """The help, the default run and advice. None has a smaller size, so `tiny` has no effect."""
    missing = _missing()
    return [
        Benchmark(
            "cli-help", "s", lambda: wall(["-m", "sim", "--help"]), lambda: wall(["-c", "import typer"]),
            "import typer", 3, at_most=True, missing=missing,
        ),
        Benchmark(
            "cli-run", "s", _default_run, lambda: wall(LIBRARIES) + 1.5, "importing its libraries + 1.5 s", 1, at_most=True,
            missing=missing,
        ),
        Benchmark("cli-advise", "s", lambda: wall(ADVISE), lambda: 3.0, "3 s", 1, at_most=True, missing=missing),
    ]  # fmt: skip


def _default_run() -> float:
    with tempfile.TemporaryDirectory() as folder:
        return wall(["-m", "sim", "run"], cwd=Path(folder))


def _missing() -> str:
    try:
        importlib.import_module("sim.commands.sim_app")
    except ImportError as error:
        return f"not available: {error}"
    return ""
