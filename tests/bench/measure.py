"""A benchmark is two measurements of one kind, ours and a limit, and a bound on their ratio.

The two are taken in turn, in one process, as often as asked, and their ratio is formed each time: a machine that is busy with
other things slows both. No figure stands alone.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent.parent


@dataclass(frozen=True)
class Benchmark:
    """Ours over the limit has to be at least `target`; or with `at_most`, at most."""

    name: str
    unit: str
    ours: Callable[[], float]
    limit: Callable[[], float]
    against: str
    """What the limit is, in words."""
    target: float
    at_most: bool = False
    once: bool = False
    """A figure without chance, such as a peak of memory, is taken once."""
    missing: str = ""
    """Why it cannot be measured here."""


@dataclass(frozen=True)
class Result:
    """What was measured, one value of each per repeat; none where the benchmark could not run."""

    benchmark: Benchmark
    ours: Sequence[float]
    limit: Sequence[float]

    @property
    def ratios(self) -> list[float]:
        """Ours over the limit, repeat by repeat."""
        return [ours / limit for ours, limit in zip(self.ours, self.limit, strict=True)]

    @property
    def met(self) -> bool | None:
        """Whether the median ratio keeps to the target."""
        if not self.ours:
            return None
        ratio, target = median(self.ratios), self.benchmark.target
        return ratio <= target if self.benchmark.at_most else ratio >= target


def compare(benchmarks: Sequence[Benchmark], repeats: int) -> list[Result]:
    """Measure every benchmark once, then all of them again, and so on; which side goes first alternates."""
    taken: list[tuple[list[float], list[float]]] = [([], []) for _ in benchmarks]
    for repeat in range(repeats):
        for benchmark, (ours, limit) in zip(benchmarks, taken, strict=True):
            if benchmark.missing or (benchmark.once and repeat):
                continue
            sides = [(ours, benchmark.ours), (limit, benchmark.limit)]
            for values, side in sides if repeat % 2 == 0 else sides[::-1]:
                values.append(side())
    return [Result(benchmark, *values) for benchmark, values in zip(benchmarks, taken, strict=True)]


def rate(work: float, do: Callable[[], object]) -> float:
    """Units of work per second of this process's own time, which leaves out the turns that other programs had."""
    start = time.process_time()
    do()
    # The clock may not tick during work of a test's size.
    return work / max(time.process_time() - start, 1e-9)


def wall(command: Sequence[str], cwd: Path = ROOT) -> float:
    """Seconds that a fresh Python takes for a command, which may use all processors."""
    start = time.perf_counter()
    python(command, cwd)
    return time.perf_counter() - start


def peak_rss(code: str) -> float:
    """Greatest resident memory of a fresh Python that runs `code` [MB]."""
    # A process is charged with what its parent held when it was started, so a small one stands in between.
    between = (
        "import resource, subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], check=True);"
        " print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)"
    )
    unit = 1 if sys.platform == "darwin" else 1024  # bytes there, KiB elsewhere
    return float(python(["-c", between, code])) * unit / 1e6


def python(arguments: Sequence[str], cwd: Path = ROOT) -> str:
    """Standard output of a fresh Python that finds this project wherever it runs."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"python {' '.join(arguments)} failed: {done.stderr or done.stdout}")
    return done.stdout
