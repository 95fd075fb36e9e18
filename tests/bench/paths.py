"""The vectorised paths relative to drawing their random numbers, and to the memory bandwidth."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.methods.ppd import paths as ppd
from model.methods.ppd.algorithm import Parameters
from model.outcomes import random_streams
from model.outcomes.outcome_laws import Iid
from tests.bench.measure import Benchmark, copies, peak_rss, rate

LITERAL, FLAT = Parameters(40, 20, 3), Parameters(40, 10, 3, form="flat")
COST, LAW = UnitCost(40), Iid(0.6837)


def walk(choice: Parameters, tokens: int, block: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Simulate one block of sequences; return times and unit-times."""
    return ppd.walk(choice, tokens, COST, LAW.sample(random_streams.tiles(0, "match", block, tokens - 1)))


def draw(tokens: int, block: int) -> None:
    """Draw the same random numbers and discard them."""
    for _ in random_streams.tiles(0, "match", block, tokens - 1):
        pass


def stream(choice: Parameters, tokens: int, sequences: int) -> NDArray[np.float64]:
    """Means of T, C, T^2, C^2, TC and C/T over at least `sequences` sequences, block by block."""
    blocks = -(-sequences // random_streams.BLOCK)
    total = np.zeros(6)
    for block in range(blocks):
        time, busy = walk(choice, tokens, block)
        total += [time.sum(), busy.sum(), time @ time, busy @ busy, time @ busy, (busy / time).sum()]
    return total / (blocks * random_streams.BLOCK)


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """The default scenario's two-stage walk and the flat form's three-stage one."""
    tokens, blocks, sequences = (4, 1, 10_000) if tiny else (128, 40, 10_000_000)

    def each(do: Callable[[int], object]) -> float:
        return rate(blocks * random_streams.BLOCK, lambda: [do(block) for block in range(blocks)])

    def against_draws(name: str, choice: Parameters) -> Benchmark:
        return Benchmark(
            name, "sequences/s", lambda: each(lambda block: walk(choice, tokens, block)),
            lambda: each(lambda block: draw(tokens, block)), "drawing the random numbers", 0.4,
        )  # fmt: skip

    size = tokens * random_streams.BLOCK

    def copied() -> float:
        return copies(size * min(blocks, 8))() / tokens

    code = f"from tests.bench.paths import LITERAL, stream; stream(LITERAL, {tokens}, {sequences})"
    return [
        against_draws("paths-literal", LITERAL),
        against_draws("paths-flat", FLAT),
        Benchmark(
            "paths-bandwidth", "sequences/s", lambda: each(lambda block: walk(LITERAL, tokens, block)), copied,
            "copying their random numbers in memory", None,
        ),
        Benchmark(
            "paths-memory", "MB", lambda: peak_rss(code), lambda: 200.0, f"200 MB for {sequences:,} sequences", 1,
            at_most=True, once=True,
        ),
    ]  # fmt: skip
