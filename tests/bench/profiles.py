"""Profiles of hardware relative to numpy's interpolation, and to reading their files."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from time import perf_counter

import numpy as np

from model.hardware import profile, profile_files
from model.hardware.cost_models import pass_time
from model.hardware.interpolation import Surface
from model.hardware.profile_costs import ProfileCosts
from tests.bench.measure import Benchmark

NAME = "rtx-4090-llama-3.1-8b"
LARGEST = "h100-operations"
"""The bundled profile with the most rows, and so the most to check."""


def _points(count: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Random widths, contexts and batches, inside and outside the measured range."""
    rng = np.random.default_rng(1)
    return rng.integers(1, 33, count), rng.integers(16, 8192, count), rng.integers(1, 65, count)


def grid() -> Surface:
    """Times on a full grid of three axes."""
    axes = ([1, 2, 4, 8, 16, 32], [16, 64, 256, 1024, 4096, 16384], [1, 4, 16, 64])
    width, context, batch = (each.ravel() for each in np.meshgrid(*axes, indexing="ij"))
    return Surface({"width": width, "context": context, "batch": batch}, 1e-4 * (1 + 0.01 * width + 1e-6 * context * batch))


def _bare(points: Sequence[np.ndarray]) -> None:
    at = np.array([16.0, 64, 256, 1024, 4096, 16384])
    np.interp(points[1], at, np.sqrt(at))


def _read(name: str) -> None:
    """Read both files with the libraries only: without checks, without a profile."""
    import polars as pl

    path = Path(profile.__file__).parent.parent / "profiles" / f"{name}.json"
    json.loads(path.read_bytes())
    pl.read_parquet(path.with_suffix(".parquet"))


def _repeated(call: Callable[[], object], times: int = 1) -> Callable[[], float]:
    def run() -> float:
        start = perf_counter()
        for _ in range(times):
            call()
        return 1e3 * (perf_counter() - start) / times

    return run


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Lookups of a million points, and loading a bundled profile."""
    points = _points(100 if tiny else 1_000_000)
    surface, cost = grid(), ProfileCosts(profile_files.load(NAME))
    loads = 2 if tiny else 50

    def against_numpy(name: str, call: Callable[[], object]) -> Benchmark:
        return Benchmark(
            name, "ms", _repeated(call), _repeated(lambda: _bare(points)), "numpy.interp of the same points", 30, at_most=True
        )

    def loading(name: str, of: str) -> Benchmark:
        return Benchmark(
            name, "ms", _repeated(lambda: profile_files.load(of), loads), _repeated(lambda: _read(of), loads),
            "json and polars reading its files", 5, at_most=True,
        )  # fmt: skip

    return [
        against_numpy("profile-lookup", lambda: surface(*points)),
        against_numpy("profile-pass", lambda: pass_time(cost, *points)),
        loading("profile-load", NAME),
        loading("profile-load-largest", LARGEST),
    ]
