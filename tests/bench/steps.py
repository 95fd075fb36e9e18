"""The simulator by method, relative to SimPy processes written by hand and to bare loops, and by kind of step.

The processes by hand make the same timeouts as the simulated decodings, without units, tokens and cache. A bare loop adds the same
times without SimPy: it is the least that any program takes. What the simulator does for each kind of step is in `KINDS`.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Sequence
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import simpy

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.hardware import profile_files
from model.hardware.profile_costs import ProfileCosts
from model.interpret.simulated_answers import UNLIKELY, UNSURE, DraftOutcomes, World
from model.methods.speculative.algorithm import Parameters, decode
from model.outcomes import random_streams
from model.steps import Adopt, Commit, Fork, Forward, Join, LayerSpan, Read, Steps
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.bench import events, lossy, speculative
from tests.bench.measure import Benchmark, rate

Body = Generator[simpy.Event, Any, None]
Times = Generator[float, Any, None]


# --- Times of the passes of a decoding, one after another ----------------------------------------------------------------


def speculative_times(survivors: Sequence[int]) -> Times:
    """Times of the passes of a speculative decoding."""
    at, tokens, draft_time = 0, len(survivors), speculative.COST_RATIO * speculative.LAYERS
    while at < tokens:
        drafted = min(speculative.DRAFT_LENGTH, tokens - at - 1)
        for _ in range(drafted):
            yield draft_time
        yield speculative.LAYERS
        at += min(survivors[at], drafted) + 1


def bild_times(decisions: Sequence[int]) -> Times:
    """Times of the passes of Big Little Decoder."""
    at, tokens, draft_time = 0, len(decisions), lossy.COST_RATIO * lossy.LAYERS
    while at < tokens:
        room, written, unsure = min(lossy.DRAFT, tokens - at - 1), 0, False
        while written < room and not unsure:
            yield draft_time
            unsure = decisions[at + written] == UNSURE
            written += not unsure
        yield lossy.LAYERS
        kept = 0
        while kept < written and decisions[at + kept] != UNLIKELY:
            kept += 1
        at += kept + 1


@cache
def on_hardware() -> PassSeconds:
    """Times on a GPU, with the first layers of the target as the draft."""
    profile = ProfileCosts(profile_files.load("h100-llama-3.1-8b"))
    return PassSeconds({"target": profile, "draft": profile}, prompt=512)


def speculative_on_hardware(survivors: Sequence[int]) -> float:
    """Makespan of speculative decoding in our simulator, with passes that take longer at each position."""
    choice, tokens = Parameters(32, speculative.DRAFT_LENGTH, draft_layers=4), len(survivors)
    world = World(1, choice.layers, drafts={"draft": DraftOutcomes("target", survivors)})
    return simulate(decode(choice, [0], tokens), tokens, Cluster(1), on_hardware(), world).latency


def skipdecode_times(tokens: int) -> Times:
    """Times of the passes of SkipDecode."""
    for position in range(tokens):
        yield int(16 - 8 * position / 128 + 0.5)


def ppd_times(matches: Sequence[bool]) -> Times:
    """Times of the main process's passes of Predictive Pipelined Decoding."""
    depth, rest = 0, events.LAYERS - events.EXIT_LAYER
    for match in matches:
        yield events.EXIT_LAYER - depth
        yield rest
        depth = rest if match else 0


def by_hand(times: Iterable[float]) -> float:
    """Makespan of a SimPy process that waits for these times."""
    env = simpy.Environment()

    def decoder() -> Body:
        for seconds in times:
            yield env.timeout(seconds)

    env.run(env.process(decoder()))
    return env.now


def bare_loop(times: Iterable[float]) -> float:
    """Sum of these times, added one by one."""
    now = 0.0
    for seconds in times:
        now += seconds
    return now


# --- Kinds of steps ------------------------------------------------------------------------------------------------------


class KindOfStep(NamedTuple):
    """An algorithm that yields one kind of step, with the steps that it needs, a number of times; and where it runs."""

    decode: Callable[[int], Steps]
    units: int = 1
    cost: UnitCost = UnitCost(events.LAYERS, cost_ratio=speculative.COST_RATIO)


SPAN = LayerSpan(0, events.LAYERS)
END = Commit("token", (0,))


def _passes(role: str, count: int) -> Steps:
    for at in range(count):
        yield Forward(role, (at,), at, SPAN, heads=1, unit=0)
    yield END


def _skipping(count: int) -> Steps:
    span = LayerSpan(0, events.LAYERS, gaps=((1, events.EXIT_LAYER),))
    for at in range(count):
        yield Forward("target", (at,), at, span, heads=1, unit=0)
    yield END


def _reads(count: int) -> Steps:
    out = yield Forward("target", (0,), 0, SPAN, heads=1, unit=0)
    for _ in range(count):
        yield Read("next", out)
    yield END


def _commits(count: int) -> Steps:
    for _ in range(count):
        yield Commit("token", (0,), 0)


def _moves(count: int) -> Steps:
    for at in range(count):
        yield Forward("target", (at,), at, SPAN, heads=1, unit=at % 2)
    yield END


def _forks(count: int) -> Steps:
    for _ in range(count):
        yield Join((yield Fork((Forward("target", (0,), 0, SPAN),), (1,))))
    yield END


def _adoptions(count: int) -> Steps:
    for at in range(count):
        tasks = yield Fork((Forward("target", (at,), at, SPAN),), (1,))
        yield Join(tasks)
        yield Forward("target", (at,), at, SPAN)
        yield Adopt(tasks[0], at, events.LAYERS)
    yield END


KINDS = {
    "target-pass": KindOfStep(lambda count: _passes("target", count)),
    "draft-pass": KindOfStep(lambda count: _passes("draft", count)),
    "pass-with-gaps": KindOfStep(_skipping),
    "read": KindOfStep(_reads),
    "commit": KindOfStep(_commits),
    "transfer-and-pass": KindOfStep(_moves, 2, UnitCost(events.LAYERS, link=1.0)),
    "fork-and-join": KindOfStep(_forks, 2),
    "fork-join-pass-adopt": KindOfStep(_adoptions, 2),
}


def of_kind(kind: KindOfStep, count: int) -> float:
    """Makespan of an algorithm of one kind of step."""
    tokens = count if kind.decode is _commits else 1
    return simulate(kind.decode(count), tokens, Cluster(kind.units), kind.cost, World(1, events.LAYERS)).latency


def speculative_world(survivors: Sequence[int]) -> World:
    """Simulated answers with these outcomes of the draft model."""
    return World(1, speculative.LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})


class Pair(NamedTuple):
    """A method's decoding in the simulator, and the times of its passes."""

    ours: Callable[[Any], float]
    times: Callable[[Any], Iterable[float]]
    by_hand: Callable[[Any], float]
    inputs: Sequence[Any]


def pairs(sequences: int, tokens: int) -> dict[str, Pair]:
    """The four methods, with outcomes of `sequences` sequences each."""
    uniforms = np.random.default_rng(1).random((sequences, tokens))
    survivors = speculative.LAW.survivors(random_streams.tiles(0, "accept", 0, tokens), speculative.DRAFT_LENGTH)
    decisions = np.concatenate([*lossy.LAW.sample(random_streams.tiles(0, "decision", 0, tokens))])
    rows: Sequence[Any] = survivors[:, :sequences].T.tolist(), decisions[:, :sequences].T.tolist()
    return {
        "ppd": Pair(events.ours, ppd_times, events.minimal, (uniforms < events.MATCH_RATE).tolist()),
        "speculative": Pair(speculative.ours, speculative_times, lambda each: by_hand(speculative_times(each)), rows[0]),
        "bild": Pair(lossy.ours, bild_times, lambda each: by_hand(bild_times(each)), rows[1]),
        "skipdecode": Pair(lossy.skipping, skipdecode_times, lambda each: by_hand(skipdecode_times(each)), [tokens] * sequences),
    }


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """128 tokens, as in the other benchmarks of each method; 5000 steps of each kind.

    A decoding takes some 150 us: of only a few, most of the time would be that of code and data that no cache holds yet.
    """
    sequences, tokens, steps = (2, 8, 20) if tiny else (200, 128, 5000)
    found: list[Benchmark] = []

    def all_of(decode: Callable[[Any], float], inputs: Sequence[Any]) -> Callable[[], float]:
        return lambda: rate(len(inputs), lambda: [decode(each) for each in inputs])

    for name, pair in pairs(sequences, tokens).items():
        ours = all_of(pair.ours, pair.inputs)
        found += [
            Benchmark(f"steps-of-{name}-by-hand", "sequences/s", ours, all_of(pair.by_hand, pair.inputs),
                      "SimPy by hand, without units and tokens", 0.6),
            Benchmark(f"steps-of-{name}-bare", "sequences/s", ours,
                      all_of(lambda each, times=pair.times: bare_loop(times(each)), pair.inputs),  # type: ignore[misc]
                      "a loop that adds the times", None),
        ]  # fmt: skip
    rows = pairs(sequences, tokens)["speculative"].inputs
    found.append(
        Benchmark("steps-of-speculative-on-hardware", "sequences/s", all_of(speculative_on_hardware, rows),
                  all_of(speculative.ours, rows), "ours in layer-times", None)
    )  # fmt: skip
    for name, kind in KINDS.items():
        found.append(
            Benchmark(f"steps-{name}", "steps/s", lambda kind=kind: rate(steps, lambda: of_kind(kind, steps)),  # type: ignore[misc]
                      lambda: rate(steps, lambda: events.bare(steps)), "SimPy's timeouts", None)
        )  # fmt: skip
    return found
