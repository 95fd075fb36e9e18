"""The simulator relative to SimPy itself, and to programs written directly in SimPy for one scenario."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import simpy

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import World
from model.methods.ppd import algorithm as ppd
from sim.engine import events, passes_alone
from sim.engine.simulated_clock import SimulatedClock
from tests.bench.measure import Benchmark, rate

LAYERS, EXIT_LAYER, CANDIDATES, MATCH_RATE = 40, 20, 3, 0.6837

CHOICE = ppd.Parameters(LAYERS, EXIT_LAYER, CANDIDATES)
CLUSTER, COST = events.Cluster(CHOICE.units), UnitCost(LAYERS)

Matches = Sequence[bool]
Body = Generator[simpy.Event, Any, None]


def ours(matches: Matches, *, per_layer: bool = False) -> float:
    """Makespan in our simulator."""
    tokens = len(matches)
    steps, world = ppd.decode(CHOICE, [0], tokens), World(1, LAYERS, matches)
    return events.simulate(steps, tokens, CLUSTER, COST, world, per_layer=per_layer).latency


def minimal(matches: Matches) -> float:
    """Makespan in the shortest program: only time and concurrency, without units, tokens and cache."""
    env = simpy.Environment()

    def sub() -> Body:
        yield env.timeout(LAYERS - EXIT_LAYER)

    def main() -> Body:
        depth = 0
        for match in matches:
            yield env.timeout(EXIT_LAYER - depth)
            subs = [env.process(sub()) for _ in range(CANDIDATES)]
            yield env.timeout(LAYERS - EXIT_LAYER)
            yield env.all_of(subs)
            depth = LAYERS - EXIT_LAYER if match else 0

    env.run(env.process(main()))
    return env.now


def with_units(matches: Matches) -> float:
    """Makespan in the same program on k+1 units, requested for each pass; still without tokens and cache."""
    env = simpy.Environment()
    units = [simpy.Resource(env) for _ in range(CANDIDATES + 1)]

    def forward(unit: int, layers: int) -> Body:
        with units[unit].request() as held:
            yield held
            yield env.timeout(layers)

    def main() -> Body:
        depth = 0
        for match in matches:
            yield from forward(0, EXIT_LAYER - depth)
            subs = [env.process(forward(unit, LAYERS - EXIT_LAYER)) for unit in range(1, CANDIDATES + 1)]
            yield from forward(0, LAYERS - EXIT_LAYER)
            yield env.all_of(subs)
            depth = LAYERS - EXIT_LAYER if match else 0

    env.run(env.process(main()))
    return env.now


def bare(events: int) -> None:
    """Process `events` events of minimal cost: one process that only waits."""
    env = simpy.Environment()

    def wait() -> Body:
        while True:
            yield env.timeout(1)

    env.process(wait())
    for _ in range(events):
        env.step()


def counted(do: Callable[[], object]) -> int:
    """Number of SimPy events of any kind in our simulator."""
    steps = 0

    class Counting(SimulatedClock):
        def step(self) -> None:
            nonlocal steps
            steps += 1
            super().step()

    with mock.patch.object(passes_alone, "SimulatedClock", Counting):
        do()
    return steps


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Vicuna-13B's default scenario: exit at half of 40 layers, three candidates, 128 tokens."""
    sequences, tokens, waits = (2, 8, 100) if tiny else (20, 128, 200_000)
    uniforms = np.random.default_rng(1).random((sequences, tokens))
    many = (uniforms < MATCH_RATE).tolist()

    def per_layer() -> None:
        for matches in many:
            ours(matches, per_layer=True)

    count = counted(per_layer)

    def sequence_rate(decode: Callable[[Matches], float]) -> Callable[[], float]:
        return lambda: rate(sequences, lambda: [decode(matches) for matches in many])

    per_pass = sequence_rate(ours)
    return [
        Benchmark(
            "events-layer", "events/s", lambda: rate(count, per_layer), lambda: rate(waits, lambda: bare(waits)),
            "SimPy's timeouts, an event per layer", 0.5,
        ),
        Benchmark(
            "events-pass", "sequences/s", per_pass, sequence_rate(lambda matches: ours(matches, per_layer=True)),
            "ours with an event per layer", 4,
        ),
        Benchmark(
            "events-by-hand-minimal", "sequences/s", per_pass, sequence_rate(minimal),
            "SimPy by hand, without units and tokens", 0.5,
        ),
        Benchmark(
            "events-by-hand-units", "sequences/s", per_pass, sequence_rate(with_units),
            "SimPy by hand, k+1 resources", 0.5,
        ),
    ]  # fmt: skip
