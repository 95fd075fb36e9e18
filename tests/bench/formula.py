"""Theorem 4.1 over an array of match rates, relative to the bare numpy expression without checks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from functools import cache, partial

import numpy as np
from numpy.typing import NDArray

from model.methods.ppd.theory import expected_compute, expected_latency
from tests.bench.measure import Benchmark, rate

Floats = NDArray[np.float64]
Formula = Callable[[Floats], Floats]

D, E, N, K = 40, 20, 128, 3


def latency(p: Floats) -> Floats:
    """Our function."""
    return expected_latency(D, E, N, p)


def bare_latency(p: Floats) -> Floats:
    """The bare expression."""
    return D * N - (D - E) * (N - 1) * p


def compute(p: Floats) -> Floats:
    """Our function."""
    return expected_compute(D, E, N, p, K)


def bare_compute(p: Floats) -> Floats:
    """The bare expression."""
    return D * N - (D - E) * (N - 1) * p + K * (D - E) * N


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Speed and memory of latency and compute."""
    size, times = (1_000, 1) if tiny else (10_000_000, 3)

    def speed(formula: Formula) -> float:
        p = _rates(size)
        formula(p)  # warm-up: the first allocation of memory is slow

        def again() -> None:
            for _ in range(times):
                formula(p)

        return rate(times * size, again)

    def against_numpy(name: str, formula: Formula, bare: Formula) -> Benchmark:
        return Benchmark(name, "elements/s", lambda: speed(formula), lambda: speed(bare), "the numpy expression", 0.5)

    def memory(name: str, formula: Formula) -> Benchmark:
        return Benchmark(
            name, "MB", lambda: _peak(partial(formula, _rates(size))), lambda: size * 8 / 1e6, "the output", 3,
            at_most=True, once=True,
        )  # fmt: skip

    return [
        against_numpy("formula-latency", latency, bare_latency),
        against_numpy("formula-compute", compute, bare_compute),
        memory("formula-latency-memory", latency),
        memory("formula-compute-memory", compute),
    ]


@cache
def _rates(size: int) -> Floats:
    return np.random.default_rng(1).random(size)


def _peak(do: Callable[[], object]) -> float:
    """Peak of newly allocated memory [MB]."""
    tracemalloc.start()
    do()
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak / 1e6
