"""Speculative decoding relative to four limits: drawing the random numbers, SimPy by hand, bare numpy, one evaluation of Eq. 1."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import simpy
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.rounds import round_walks
from model.methods.speculative import paths
from model.methods.speculative import theory as speculative
from model.methods.speculative.algorithm import Parameters, decode
from model.outcomes import random_streams
from model.outcomes.outcome_laws import Iid
from sim.engine import events
from sim.engine.cluster import Cluster
from tests.bench.measure import Benchmark, rate

LAYERS, DRAFT_LENGTH, ACCEPTANCE_RATE, COST_RATIO = 40, 4, 0.8, 0.1
CHOICE, COST, LAW = Parameters(LAYERS, DRAFT_LENGTH), UnitCost(LAYERS, cost_ratio=COST_RATIO), Iid(ACCEPTANCE_RATE)
HEADS = replace(CHOICE, drafter="heads")

Survivors = Sequence[int]
Body = Generator[simpy.Event, Any, None]


def ours(survivors: Survivors, choice: Parameters = CHOICE) -> float:
    """Makespan in our simulator, one event per pass."""
    tokens, world = len(survivors), World(1, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})
    return events.simulate(decode(choice, [0], tokens), tokens, Cluster(1), COST, world).latency


def of_heads(survivors: Survivors) -> float:
    """Makespan with draft heads, whose passes read states."""
    return ours(survivors, HEADS)


def minimal(survivors: Survivors) -> float:
    """Makespan in the shortest program, one event per pass; without unit, tokens and cache."""
    env, tokens = simpy.Environment(), len(survivors)

    def decoder() -> Body:
        at = 0
        while at < tokens:
            drafted = min(DRAFT_LENGTH, tokens - at - 1)
            for _ in range(drafted):
                yield env.timeout(COST_RATIO * LAYERS)
            yield env.timeout(LAYERS)
            at += min(survivors[at], drafted) + 1

    env.run(env.process(decoder()))
    return env.now


def with_a_unit(survivors: Survivors) -> float:
    """Makespan in the same program, which requests the unit for each pass; still without tokens and cache."""
    env, tokens = simpy.Environment(), len(survivors)
    unit = simpy.Resource(env)

    def run(seconds: float) -> Body:
        with unit.request() as held:
            yield held
            yield env.timeout(seconds)

    def decoder() -> Body:
        at = 0
        while at < tokens:
            drafted = min(DRAFT_LENGTH, tokens - at - 1)
            for _ in range(drafted):
                yield from run(COST_RATIO * LAYERS)
            yield from run(LAYERS)
            at += min(survivors[at], drafted) + 1

    env.run(env.process(decoder()))
    return env.now


def walk(tokens: int, block: int, choice: Parameters = CHOICE) -> round_walks.Tally:
    """Simulate one block of sequences."""
    return paths.walk(choice, tokens, COST, LAW.drafts(random_streams.tiles(0, "accept", block, tokens - 1)))


def draw(tokens: int, block: int) -> None:
    """Draw the same random numbers and discard them."""
    for _ in random_streams.tiles(0, "accept", block, tokens - 1):
        pass


def bare_speedup(alpha: NDArray[np.float64]) -> NDArray[np.float64]:
    """The bare expression of Theorem 3.8."""
    return np.asarray((1 - alpha ** (DRAFT_LENGTH + 1)) / ((1 - alpha) * (DRAFT_LENGTH * COST_RATIO + 1)))


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Draft length 4, acceptance rate 0.8, 128 tokens; the formula over arrays of 4 MB, whose memory is used again."""
    sequences, tokens, blocks, points, lengths = (2, 8, 1, 1000, 16) if tiny else (40, 128, 40, 500_000, 4096)
    survivors = LAW.survivors(random_streams.tiles(0, "accept", 0, tokens), DRAFT_LENGTH)[:, :sequences].T.tolist()
    alpha, n = np.linspace(0.01, 0.99, points), np.arange(1, lengths + 1)

    def decodings(decode_one: Callable[[Survivors], float]) -> Callable[[], float]:
        return lambda: rate(sequences, lambda: [decode_one(each) for each in survivors])

    def tokens_of(do: Callable[[int], object]) -> Callable[[], float]:
        return lambda: rate(blocks * random_streams.BLOCK * tokens, lambda: [do(block) for block in range(blocks)])

    def many(do: Callable[[], object], times: int, each: int = 1) -> Callable[[], float]:
        return lambda: rate(times * each, lambda: [do() for _ in range(times)])

    walked = tokens_of(lambda block: walk(tokens, block))
    return [
        Benchmark("speculative-events-minimal", "sequences/s", decodings(ours), decodings(minimal),
                  "SimPy by hand, without unit and tokens", 0.5),
        Benchmark("speculative-events-unit", "sequences/s", decodings(ours), decodings(with_a_unit),
                  "SimPy by hand, one resource", 0.5),
        Benchmark("speculative-heads-events", "sequences/s", decodings(of_heads), decodings(minimal),
                  "SimPy by hand, without unit and tokens", 0.5),
        Benchmark("speculative-heads-events-unit", "sequences/s", decodings(of_heads), decodings(with_a_unit),
                  "SimPy by hand, one resource", 0.5),
        Benchmark("speculative-heads-paths-rate", "tokens/s", tokens_of(lambda block: walk(tokens, block, HEADS)), lambda: 1e7,
                  "10 million tokens per second", 1),
        Benchmark("speculative-paths", "tokens/s", walked, tokens_of(lambda block: draw(tokens, block)),
                  "drawing the random numbers", 0.3),
        Benchmark("speculative-paths-rate", "tokens/s", walked, lambda: 1e7, "10 million tokens per second", 1),
        Benchmark("speculative-formula", "points/s",
                  many(lambda: speculative.speedup(alpha, DRAFT_LENGTH, COST_RATIO), 20, points),
                  many(lambda: bare_speedup(alpha), 20, points), "the bare expression in numpy", 0.5),
        Benchmark("speculative-target-runs", "calls/s", many(lambda: speculative.target_runs(n, ACCEPTANCE_RATE, DRAFT_LENGTH), 20),
                  many(lambda: speculative.expected_tokens(np.full(lengths, ACCEPTANCE_RATE), DRAFT_LENGTH), 20),
                  "Eq. 1 over the same array", 0.02),
    ]  # fmt: skip
