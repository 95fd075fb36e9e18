"""Measurement of benchmarks: each has two measurements of the same kind, ours and a limit, and a bound on their ratio.

Both are taken in turn, in one process, and the ratio is formed in each repeat: other load on the machine slows both. No absolute
number is reported alone.
"""

from __future__ import annotations

import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles

import numpy as np

FEWEST = 3
"""Repeats of a benchmark whose time is spent: as many as have quartiles."""

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Benchmark:
    """The ratio of ours to the limit must be at least `target`, or with `at_most` at most."""

    name: str
    unit: str
    ours: Callable[[], float]
    limit: Callable[[], float]
    against: str
    """Description of the limit."""
    target: float | None
    """Bound on the ratio; None: the ratio is only reported."""
    at_most: bool = False
    once: bool = False
    """A deterministic measurement, such as peak memory, is taken once."""
    missing: str = ""
    """Reason why it cannot be measured here."""


@dataclass(frozen=True)
class Result:
    """Measured values, one per repeat; empty if the benchmark could not run."""

    benchmark: Benchmark
    ours: Sequence[float]
    limit: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """Ratio of ours to the limit, per repeat."""
        return [ours / limit for ours, limit in zip(self.ours, self.limit, strict=True)]

    @property
    def quartiles(self) -> tuple[float, float]:
        """Lower and upper quartile of the ratios; a single ratio is both."""
        ratios = self.ratios
        lower, _, upper = quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
        return lower, upper

    @property
    def met(self) -> bool | None:
        """Return whether the median ratio meets the target; None without measurements or target."""
        target = self.benchmark.target
        if not self.ours or target is None:
            return None
        ratio = median(self.ratios)
        return ratio <= target if self.benchmark.at_most else ratio >= target


def compare(
    benchmarks: Sequence[Benchmark], repeats: int, seconds: float = math.inf, clock: Callable[[], float] = time.perf_counter
) -> list[Result]:
    """Measure all benchmarks `repeats` times in turn; the order of the two sides alternates.

    One that has taken `seconds` and has `FEWEST` repeats is not measured again.
    """
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in benchmarks]
    spent = [0.0] * len(benchmarks)
    for repeat in range(repeats):
        for number, (benchmark, (ours, limit)) in enumerate(zip(benchmarks, taken, strict=True)):
            if benchmark.missing or (benchmark.once and repeat) or (repeat >= FEWEST and spent[number] > seconds):
                continue
            start = clock()
            sides = [(ours, benchmark.ours), (limit, benchmark.limit)]
            for values, side in sides if repeat % 2 == 0 else sides[::-1]:
                values.append(side())
            spent[number] += clock() - start
    return [Result(benchmark, *values) for benchmark, values in zip(benchmarks, taken, strict=True)]


def rate(work: float, do: Callable[[], object]) -> float:
    """Units of work per second of this process's CPU time, which excludes other programs."""
    start = time.process_time()
    do()
    # The clock may not advance during a tiny workload.
    return work / max(time.process_time() - start, 1e-9)


def copies(numbers: int) -> Callable[[], float]:
    """Measurement of the memory bandwidth: float64 numbers per second that numpy copies, from an array of this size to another."""

    def measure() -> float:
        source = np.zeros(numbers)
        target = np.ones(numbers)  # written, so that its pages exist
        source += 1
        return rate(numbers, lambda: np.copyto(target, source))

    return measure


def wall(command: Sequence[str], cwd: Path = ROOT) -> float:
    """Wall time of a command in a new Python process [s]."""
    start = time.perf_counter()
    python(command, cwd)
    return time.perf_counter() - start


def peak_rss(code: str) -> float:
    """Peak resident memory of a new Python process that runs `code` [MB]."""
    # A process inherits the peak of its parent at the fork, so a small process is put in between.
    between = (
        "import resource, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True);"
        " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return float(python(["-c", between, code])) * unit / 1e6


def python(arguments: Sequence[str], cwd: Path = ROOT) -> str:
    """Standard output of a new Python process with this project on its path. As for users, bytecode is kept between processes."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "PYTHONDONTWRITEBYTECODE": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed: {done.stderr or done.stdout}")
    return done.stdout
