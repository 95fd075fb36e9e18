"""Pytest plugin that records the lines and the duration of every test: pytest -p tests.mutation.coverage_map

`MAP_OF` in the environment names the output folder. Each process writes a file of lines (in the format of coverage, with a context
per test) and a file of durations (JSON). Lines run during imports have no context.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import coverage
import pytest

PACKAGES = ("model", "sim", "calibrate", "figures")


class _Recorder:
    def __init__(self, folder: Path, process: str) -> None:
        self.durations: dict[str, float] = defaultdict(float)
        self.written = folder / f"durations-{process}.json"
        root = Path(__file__).parents[2]
        self.lines = coverage.Coverage(
            data_file=str(folder / f"lines-{process}"), include=[f"{root}/{name}/*" for name in PACKAGES], config_file=False
        )
        self.lines.start()

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.lines.switch_context(item.nodeid)
        yield
        self.lines.switch_context("")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.durations[report.nodeid] += report.duration
        if report.failed:
            self.durations[report.nodeid] = float("inf")

    def pytest_sessionfinish(self) -> None:
        self.lines.stop()
        self.lines.save()
        kept = {name: seconds for name, seconds in self.durations.items() if seconds < float("inf")}  # no failed tests
        self.written.write_text(json.dumps(kept), encoding="utf-8")


def pytest_configure(config: pytest.Config) -> None:
    """Register the recorder in the processes that run tests: the workers of pytest-xdist, or the only process."""
    process = os.environ.get("PYTEST_XDIST_WORKER", "")
    if process or not getattr(config.option, "numprocesses", None):
        config.pluginmanager.register(_Recorder(Path(os.environ["MAP_OF"]), process or "main"))
