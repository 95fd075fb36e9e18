"""Big Little Decoder and SkipDecode relative to SimPy by hand, and to drawing the random numbers."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any

import numpy as np
import simpy

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import UNLIKELY, UNSURE, Lossy
from model.methods.bild import algorithm as bild
from model.methods.bild import paths
from model.methods.bild.threshold_decisions import Digits, Independent
from model.methods.rounds import round_walks
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.skipdecode import paths as skip_paths
from model.outcomes import random_streams
from sim.engine import events
from sim.engine.cluster import Cluster
from tests.bench.measure import Benchmark, rate

LAYERS, DRAFT, COST_RATIO = 24, 10, 0.25
CHOICE, COST, LAW = bild.Parameters(LAYERS, DRAFT), UnitCost(LAYERS, cost_ratio=COST_RATIO), Independent(0.11, 0.01)
SKIPPING, EVEN = skipdecode.Parameters(LAYERS, 8, 16, 60, 188), UnitCost(LAYERS)

Decisions = Sequence[int]
Body = Generator[simpy.Event, Any, None]


def ours(decisions: Decisions) -> float:
    """Makespan of Big Little Decoder in our simulator."""
    tokens = len(decisions)
    return events.simulate(bild.decode(CHOICE, [0], tokens), tokens, Cluster(1), COST, Lossy(1, LAYERS, decisions)).latency


def by_hand(decisions: Decisions) -> float:
    """Makespan in a SimPy program that requests the unit for every pass; without tokens and cache."""
    env, tokens = simpy.Environment(), len(decisions)
    unit = simpy.Resource(env)

    def decoder() -> Body:
        at = 0
        while at < tokens:
            room, written, unsure = min(DRAFT, tokens - at - 1), 0, False
            while written < room and not unsure:
                yield from _held(env, unit, COST_RATIO * LAYERS)
                unsure = decisions[at + written] == UNSURE
                written += not unsure
            yield from _held(env, unit, LAYERS)
            kept = 0
            while kept < written and decisions[at + kept] != UNLIKELY:
                kept += 1
            at += kept + 1

    env.run(env.process(decoder()))
    return env.now


def skipping(tokens: int) -> float:
    """Makespan of SkipDecode in our simulator."""
    return events.simulate(skipdecode.decode(SKIPPING, [0], tokens), tokens, Cluster(1), EVEN, Lossy(1, LAYERS)).latency


def skipping_by_hand(tokens: int) -> float:
    """Makespan in a SimPy program that requests the unit for every pass."""
    env = simpy.Environment()
    unit = simpy.Resource(env)

    def decoder() -> Body:
        for position in range(tokens):
            yield from _held(env, unit, int(16 - 8 * position / 128 + 0.5))

    env.run(env.process(decoder()))
    return env.now


def _held(env: simpy.Environment, unit: simpy.Resource, seconds: float) -> Body:
    with unit.request() as held:
        yield held
        yield env.timeout(seconds)


def _tiles(tokens: int, block: int) -> Iterator[Digits]:
    return LAW.sample(random_streams.tiles(0, "decision", block, tokens - 1))


def walk(tokens: int, block: int) -> round_walks.Tally:
    """Simulate one block of sequences."""
    return paths.walk(CHOICE, tokens, COST, _tiles(tokens, block))


def draw(tokens: int, block: int) -> None:
    """Draw the same random numbers and discard them."""
    for _ in random_streams.tiles(0, "decision", block, tokens - 1):
        pass


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Rates that give the paper's arithmetic intensity, 128 tokens."""
    sequences, tokens, blocks = (2, 8, 1) if tiny else (40, 128, 20)
    decisions = np.concatenate([*_tiles(tokens + 1, 0)])[:, :sequences].T.tolist()

    def decodings(decode_one: Callable[[Decisions], float]) -> Callable[[], float]:
        return lambda: rate(sequences, lambda: [decode_one(each) for each in decisions])

    def repeat(decode_one: Callable[[int], float]) -> Callable[[], float]:
        return lambda: rate(sequences, lambda: [decode_one(tokens) for _ in range(sequences)])

    def tokens_of(do: Callable[[int], object]) -> Callable[[], float]:
        return lambda: rate(blocks * random_streams.BLOCK * tokens, lambda: [do(block) for block in range(blocks)])

    walked = tokens_of(lambda block: walk(tokens, block))
    skipped = tokens_of(lambda block: skip_paths.walk(SKIPPING, tokens, EVEN, iter(())))
    return [
        Benchmark("bild-events", "sequences/s", decodings(ours), decodings(by_hand), "SimPy by hand, one resource", 0.5),
        Benchmark("bild-paths", "tokens/s", walked, lambda: 1e7, "10 million tokens per second", 1),
        Benchmark("bild-paths-draws", "tokens/s", walked, tokens_of(lambda block: draw(tokens, block)), "random numbers", 0.1),
        Benchmark("skipdecode-events", "sequences/s", repeat(skipping), repeat(skipping_by_hand), "SimPy, one resource", 0.5),
        Benchmark("skipdecode-paths", "tokens/s", skipped, lambda: 1e7, "10 million tokens per second", 1),
    ]  # fmt: skip
