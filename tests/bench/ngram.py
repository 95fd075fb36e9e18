"""N-gram drafts relative to three limits: drawing the random numbers, SimPy by hand, ten million tokens per second."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

import numpy as np
import simpy

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.methods.ngram import paths
from model.methods.ngram.algorithm import Parameters, decode
from model.methods.rounds import round_walks
from model.outcomes import random_streams
from model.outcomes.lookup_laws import Lookups, draft_of
from sim.engine import events
from sim.engine.cluster import Cluster
from tests.bench.measure import Benchmark, rate

LAYERS, DRAFT_LENGTH = 40, 5
CHOICE, LAW = Parameters(LAYERS, DRAFT_LENGTH), Lookups.of_rates([0.3, 0.6], 0.6, DRAFT_LENGTH)
COST = UnitCost(LAYERS, verify_cost=((1, 1.0), (DRAFT_LENGTH + 1, 1.25)))
TIMES = [float(COST.verify_times(width)) for width in range(1, DRAFT_LENGTH + 2)]

Words = Sequence[int]


def ours(words: Words) -> float:
    """Makespan in our simulator, one event per pass."""
    tokens = len(words)
    world = World(1, LAYERS, lookups=words)
    return events.simulate(decode(CHOICE, [0], tokens), tokens, Cluster(1), COST, world).latency


def by_hand(words: Words) -> float:
    """Makespan in a short program, which requests the unit for each pass; without tokens and cache."""
    env, tokens = simpy.Environment(), len(words)
    unit = simpy.Resource(env)

    def decoder() -> Generator[simpy.Event, Any, None]:
        at, before = 0, False
        while at < tokens:
            drafted, accepted = draft_of(words[at], before)
            with unit.request() as held:
                yield held
                yield env.timeout(TIMES[min(drafted, tokens - at - 1)])
            before = accepted > 0
            at += min(accepted, tokens - at - 1) + 1

    env.run(env.process(decoder()))
    return env.now


def walk(tokens: int, block: int) -> round_walks.Tally:
    """Simulate one block of sequences."""
    return paths.walk(CHOICE, tokens, COST, LAW.sample(random_streams.tiles(0, "lookup", block, tokens)))


def draw(tokens: int, block: int) -> None:
    """Draw the same random numbers and discard them."""
    for _ in random_streams.tiles(0, "lookup", block, tokens):
        pass


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Draft length 5, two rates of matches, 128 tokens."""
    sequences, tokens, blocks = (2, 8, 1) if tiny else (40, 128, 10)
    tiles = LAW.sample(random_streams.tiles(0, "lookup", 0, tokens))
    words = np.concatenate([tile.copy() for tile in tiles])[:, :sequences].T.tolist()

    def decodings(decode_one: Callable[[Words], float]) -> Callable[[], float]:
        return lambda: rate(sequences, lambda: [decode_one(each) for each in words])

    def tokens_of(do: Callable[[int], object]) -> Callable[[], float]:
        return lambda: rate(blocks * random_streams.BLOCK * tokens, lambda: [do(block) for block in range(blocks)])

    walked = tokens_of(lambda block: walk(tokens, block))
    return [
        Benchmark("ngram-events", "sequences/s", decodings(ours), decodings(by_hand), "SimPy by hand, one resource", 0.5),
        Benchmark("ngram-paths", "tokens/s", walked, tokens_of(lambda block: draw(tokens, block)),
                  "drawing the random numbers", 0.05),
        Benchmark("ngram-paths-rate", "tokens/s", walked, lambda: 1e7, "10 million tokens per second", 1),
    ]  # fmt: skip
