"""Start-up time of the command line, relative to importing the libraries that it needs."""

from __future__ import annotations

import importlib
import tempfile
from pathlib import Path

from tests.bench.measure import Benchmark, wall


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """The help, and the default run. Neither has a smaller size, so `tiny` has no effect."""
    missing = _missing()
    return [
        Benchmark(
            "cli-help", "s", lambda: wall(["-m", "sim", "--help"]), lambda: wall(["-c", "import typer"]),
            "import typer", 3, at_most=True, missing=missing,
        ),
        Benchmark(
            "cli-run", "s", _default_run, lambda: 2 * wall(["-c", "import polars, matplotlib.pyplot"]) + 3,
            "2 (polars + pyplot) + 3 s", 1, at_most=True, missing=missing,
        ),
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
