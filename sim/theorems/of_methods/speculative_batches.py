"""Theorems on speculative decoding in batches, 32: static batches, whose sequences wait for each other, and continuous ones.

An example has `sequences`, lists of the number of accepted tokens of a draft that starts at each position, `batch`, `draft_length`
and the other fields of a single decoding (`pipelined_examples`); or `lengths` and `rate`, in twentieths, over all outcomes. In a
continuous batch, finished sequences are replaced at once; each of `sequences` is decoded with passes priced over `batch` sequences.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike

from model.costs.layer_times import UnitCost
from model.costs.step_costs import Floats, PassShape
from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, World, batch_world
from model.methods.draft_model import PLACEMENTS
from model.methods.method_parameters import BATCHING
from model.methods.rounds.round_laws import ReplayRounds
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import paths as sampler
from model.methods.speculative import theory as formulas
from model.outcomes.outcome_laws import Iid
from model.outcomes.random_streams import BLOCK
from model.steps import Forward
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems import pipelined_examples
from sim.theorems.drafting_examples import digits, drafting
from sim.theorems.pipelined_examples import CLOSE, integers, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_MOST = 3  # largest draft length


theorem = TheoremCollection("speculative")


# --- Examples ---


@drawn
def _batches(draw: DrawFn, costs: str = "whole", flat: bool = False) -> Example:
    """Draw batches of a few sequences; if `flat`, a pass costs the same for any number of tokens."""
    x = draw(drafting(tokens=1, most=_MOST, costs=costs))
    if "cost" in x and "verify_cost" in x["cost"]:
        del x["cost"]["verify_cost"]
    x["sequences"] = [digits(draw, draw(st.integers(1, 5)), _MOST) for _ in range(draw(st.integers(1, 3)))]
    x["batch"] = draw(st.integers(1, 3))
    if not flat and draw(st.booleans()):
        times = itertools.accumulate(digits(draw, 3 * (_MOST + 1) - 1, 4), initial=4)
        x["cost"] = x.get("cost", {}) | {"verify_cost": [[width, time] for width, time in enumerate(times, start=1)]}
    return {name: value for name, value in x.items() if name not in ("accept", "survive")}


def _all_outcomes() -> SearchStrategy[Example]:
    lengths = st.lists(integers(1, 3), min_size=2, max_size=3)
    return st.fixed_dictionaries({
        "draft_length": integers(0, 2), "batch": integers(1, 3), "lengths": lengths, "rate": integers(0, 20),
        "placement": st.sampled_from(PLACEMENTS), "cost": st.fixed_dictionaries({"link": integers(0, 2)}),
    })  # fmt: skip


@drawn
def _full(draw: DrawFn) -> Example:
    """Draw a sequence of a continuous batch of two or three, with an acceptance rate."""
    times = itertools.accumulate(digits(draw, 3 * (_MOST + 1) - 1, 4), initial=4)
    cost = {"verify_cost": [[width, time] for width, time in enumerate(times, start=1)], "cost_ratio": draw(integers(0, 4)) / 4}
    return {
        "draft_length": draw(integers(0, _MOST)), "batch": draw(integers(2, 3)), "tokens": draw(integers(1, 6)),
        "rate": draw(integers(0, 20)), "placement": draw(st.sampled_from(PLACEMENTS)),
        "cost": cost | {"link": draw(integers(0, 2))},
    }  # fmt: skip


@drawn
def _against_static(draw: DrawFn) -> Example:
    """Draw the sequences of one static batch, and the fixed time and time per sequence of a pass."""
    most = draw(st.integers(1, 5))
    sequences = [[draw(integers(0, _MOST)) for _ in range(most)] for _ in range(draw(st.integers(1, 3)))]
    return {
        "sequences": sequences, "batch": len(sequences), "draft_length": draw(integers(0, _MOST)), "fixed": draw(integers(1, 4)),
        "each": draw(integers(0, 3)),
    }  # fmt: skip


@theorem("32a", "Events and paths agree exactly on every path, in batches of unequal sequences.", source="same algorithm",
         given=_batches)
def events_are_paths(x: Example) -> None:
    run, parameters = play(x), parameters_of(x)
    draws = [iter([np.zeros((len(counts), BLOCK))]) for counts in x["sequences"]]
    laws = [ReplayRounds([survivors({**x, "survive": counts})]) for counts in x["sequences"]]
    outcomes = [law.drafts(tiles) for law, tiles in zip(laws, draws, strict=True)]
    given = outcomes if parameters.decoded_sequences > 1 else outcomes[0]
    tally = sampler.walk(parameters, max(parameters.lengths or ()), pipelined_examples.cost(x), given)
    equal("latency", float(tally.time[0]), run.latency)
    equal("compute", float(tally.busy[0]), run.busy)
    equal("rounds of sequences", float(tally.rounds[0]), float(run.rounds.total()))
    equal("drafted tokens", float(tally.drafted[0]), float(sum(count * times for (_, count), times in run.rounds.items())))


@theorem("32b", "A sequence of a batch has the same rounds as alone.", source="outcomes of sequences are independent",
         given=_batches)
def sequences_have_the_same_rounds_alone(x: Example) -> None:
    work = _counted(x)
    for number, counts in enumerate(x["sequences"]):
        commits = [commit._replace(sequence=None) for commit in work.committed if commit.sequence in (number, None)]
        equal(f"commits of sequence {number}", commits, _counted({**x, "sequences": [counts]}).committed)


@theorem("32d", "If a pass costs the same for any number of tokens, a batch takes no longer than its sequences in turn.",
         source="a round takes no longer than the rounds of its sequences in turn", given=lambda: _batches(flat=True))
def together_is_no_slower(x: Example) -> None:
    in_turn = play({**x, "batch": 1}).latency
    at_most("latency of a batch", play({**x, "batch": len(x["sequences"])}).latency, in_turn)


@theorem("32c", "A batch is never faster than any of its sequences alone.",
         source="a round drafts the longest draft of its sequences",
         given=_batches)
def no_faster_than_the_slowest(x: Example) -> None:
    batch = play({**x, "batch": len(x["sequences"])}).latency
    at_most("latency of one sequence alone", max(_alone(x)), batch)


@theorem("32e", "If width costs nothing, a batch takes as long as its slowest sequence.",
         source="false: each round drafts as much as any of its sequences needs, not only the slowest one",
         given=lambda: _batches("plain", flat=True), expect="fails")
def as_fast_as_the_slowest(x: Example) -> None:
    equal("latency", play({**x, "batch": len(x["sequences"])}).latency, max(_alone(x)))


@theorem("32f", "The formula gives mean latency, compute, rounds, drafts and heads over all outcomes.",
         source="number of independent sequences left after r rounds", given=_all_outcomes)
def mean_over_all_outcomes(x: Example) -> None:
    rate, lengths = x["rate"] / 20, x["lengths"]
    mean = np.zeros(5)
    for outcomes in itertools.product(*(itertools.product((0, 1), repeat=length - 1) for length in lengths)):
        chance = math.prod(rate if kept else 1 - rate for row in outcomes for kept in row)
        if chance:
            run = play({**x, "sequences": [survivors({**x, "accept": [*row, 0]}) for row in outcomes]})
            drafted = sum(count * times for (_, count), times in run.rounds.items())
            values = run.latency, run.busy, run.rounds.total(), drafted, run.account.heads
            mean += chance * np.array(values)
    parameters = parameters_of({**x, "sequences": [[0] * length for length in lengths]})
    predicted = formulas.predict(parameters, max(lengths), Iid(rate), pipelined_examples.cost(x))
    closed = formulas.work(parameters, max(lengths), Iid(rate))
    heads = sum(each.heads for each in closed.by_model.values()) if closed is not None else math.nan
    names = "mean latency", "mean compute", "mean rounds", "mean drafted tokens", "mean heads"
    formula_means = predicted.latency, predicted.busy, predicted.rounds, predicted.drafted, heads
    for name, got, want in zip(names, formula_means, mean, strict=True):
        equal(name, float(got if got is not None else math.nan), float(want), CLOSE)


# --- Continuous batches ---


@theorem("32g", "Events and paths agree exactly on every path of a sequence in a continuous batch.",
         source="same algorithm", given=_batches)
def events_are_paths_of_a_continuous_batch(x: Example) -> None:
    parameters, cost = _continuous(x), _full_cost(x)
    for counts in x["sequences"]:
        run, law = _played(x, counts, parameters, cost), ReplayRounds([survivors({**x, "survive": counts})])
        tally = sampler.walk(parameters, len(counts), cost, law.drafts(iter([np.zeros((len(counts), BLOCK))])))
        equal("latency", float(tally.time[0]), run.latency)
        equal("compute", float(tally.busy[0]), run.busy)
        equal("rounds", float(tally.rounds[0]), float(run.rounds.total()))
        equal("drafted tokens", float(tally.drafted[0]), float(run.rounds.total() * parameters.draft_length))


@theorem("32h", "The formulas give the moments and the work of a sequence in a continuous batch over all outcomes.",
         source="renewal theory; drafts are not cut", given=_full)
def mean_of_a_continuous_batch(x: Example) -> None:
    parameters, cost, n, rate = _continuous(x), _full_cost(x), x["tokens"], x["rate"] / 20
    moments = np.zeros(7)
    for outcomes in itertools.product((0, 1), repeat=n - 1):
        run = _played(x, survivors({**x, "accept": [*outcomes, 0]}), parameters, cost)
        drafted = sum(count * times for (_, count), times in run.rounds.items())
        values = run.latency, run.latency**2, run.busy, run.rounds.total(), drafted, run.account.heads, run.account.layer_passes
        moments += math.prod(rate if kept else 1 - rate for kept in outcomes) * np.array(values)
    predicted, closed = formulas.predict(parameters, n, Iid(rate), cost), formulas.work(parameters, n, Iid(rate))
    assert closed is not None
    heads, layers = (sum(getattr(each, name) for each in closed.by_model.values()) for name in ("heads", "layer_passes"))
    second = predicted.latency_variance + predicted.latency**2
    names = ("latency", "square of the latency", "compute", "rounds", "drafted tokens", "heads", "layers of tokens")
    expected = predicted.latency, second, predicted.busy, predicted.rounds, predicted.drafted, heads, layers
    for name, got, want in zip(names, expected, moments, strict=True):
        equal(f"mean {name}", float(math.nan if got is None else got), float(want), CLOSE)


@theorem("32i", "In a continuous batch the speed-up of l tokens is at most E[N] T(1) / (T(gamma + 1) + T_d), and at least"
         " l / (l + gamma) times that.", source="Theorem 3.8 and Wald's identity", given=_full)
def long_sequences_of_a_continuous_batch(x: Example) -> None:
    """By Wald's identity the rounds of l tokens generate between l and l + gamma tokens, with mean E[N] per round."""
    parameters, cost, n, rate = _continuous(x), replace(_full_cost(x), link=0.0), x["tokens"], x["rate"] / 20
    gamma = parameters.draft_length
    predicted = formulas.predict(parameters, n, Iid(rate), cost)
    speed = float(predicted.plain_latency / predicted.latency)
    single, wide = (pipelined_examples.cost(x).slowdown(max(x["batch"], 2) * width) for width in (1, gamma + 1))
    endless = (
        float(formulas.expected_tokens(rate, gamma))
        * single
        / (gamma * float(pipelined_examples.cost(x).draft_times()) * single + wide)
    )
    at_most("speed-up", speed, endless, CLOSE)
    at_most("long-run speed-up, less dropped tokens", endless * n / (n + gamma), speed, CLOSE)


@theorem("32j", "In a continuous batch a sequence has the same rounds as in lockstep, and takes no less time.",
         source="last drafts are not cut", given=_batches)
def no_faster_than_lockstep(x: Example) -> None:
    """Passes over more tokens take no less time, and in lockstep the last drafts are cut."""
    parameters, cost = _continuous(x), _full_cost(x)
    lockstep = replace(parameters, batching="lockstep")
    for counts in x["sequences"]:
        cut, whole = (_played(x, counts, each, cost) for each in (lockstep, parameters))
        at_most("latency", cut.latency, whole.latency)
        equal("rounds", cut.rounds.total(), whole.rounds.total())


@theorem("32k", "If a pass over n sequences takes a + b n and drafts are free, a continuous batch is no slower than a static one.",
         source="a pass over fewer sequences takes no less time per sequence", given=_against_static)
def continuous_is_no_slower_than_static(x: Example) -> None:
    """Drafts are free, and a pass over n sequences takes a + b n for any number of tokens per sequence."""
    cost = _FixedAndEach(parameters_of(x).layers, cost_ratio=0.0, each=x["each"] / (x["fixed"] + x["each"]))
    _static_against_continuous(x, cost, 1 + (len(x["sequences"]) - 1) * cost.each)


@dataclass(frozen=True)
class _FixedAndEach(UnitCost):
    """Unit costs whose passes take a factor 1 + `each` (n - 1) longer over n sequences, for any number of tokens."""

    each: float = 0.0

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        return super().times(shape, at) * (1 + (np.asarray(shape.sequences) - 1) * self.each)

    def forward(self, step: Forward) -> float:
        return super().forward(step) * (1 + (step.batch_size - 1) * self.each)



@theorem("32l", "A continuous batch is no slower than a static one, for any draft costs.",
         source="false: at its end a static batch drafts less", given=_against_static, expect="fails")
def continuous_is_no_slower_for_any_draft_costs(x: Example) -> None:
    _static_against_continuous(x, UnitCost(parameters_of(x).layers, cost_ratio=0.25), 1.0)


def _static_against_continuous(x: Example, cost: UnitCost, slower: float) -> None:
    """Compare a static batch with the mean time of a sequence in a continuous one, whose passes take `slower` times as long."""
    static = _run({**x, "batch": len(x["sequences"])}, cost).latency
    full = UnitCost(cost.layers, layer_times=(slower,) * cost.layers, cost_ratio=cost.cost_ratio)
    parameters = replace(_continuous(x), sequences=max(len(x["sequences"]), 2))
    times = [_played(x, counts, parameters, full).latency for counts in x["sequences"]]
    at_most("mean time of a sequence in a continuous batch", sum(times) / len(times), static, CLOSE)


@theorem("32m", "A single sequence takes the same time in every kind of batching.", source="there is no other sequence to wait for",
         given=_batches)
def single_sequence_is_the_same_in_all(x: Example) -> None:
    counts, cost = x["sequences"][0], pipelined_examples.cost(x)
    runs = [_played(x, counts, replace(_continuous(x), sequences=1, batching=each), cost) for each in BATCHING]
    alone = pipelined_examples.play({**x, "survive": counts})
    for run in runs:
        equal("latency", run.latency, alone.latency)
        equal("compute", run.busy, alone.busy)
        equal("commits", run.commits, alone.commits)


# --- Playing an example ---


def _continuous(x: Example) -> speculative.Parameters:
    """Return the parameters of a continuous batch of at least two sequences."""
    names = ("layers", "draft_length", "sampled", "placement", "draft_layers")
    given = {"layers": 1} | {name: x[name] for name in names if name in x}
    return speculative.Parameters(**given, sequences=max(x["batch"], 2))


def _full_cost(x: Example) -> UnitCost:
    return pipelined_examples.cost(x).of_batch(max(x["batch"], 2), _width(x))


def _width(x: Example) -> int:
    return int(x["draft_length"]) + 1


def _played(x: Example, counts: Sequence[int], parameters: speculative.Parameters, cost: UnitCost) -> Run:
    """Simulate one sequence, given the number of accepted tokens of a draft at each position."""
    answers = World(1, parameters.layers, drafts={"draft": DraftOutcomes("target", survivors({**x, "survive": counts}))})
    return simulate(speculative.decode(parameters, [0], len(counts)), len(counts), Cluster(parameters.units), cost, answers)


def parameters_of(x: Example) -> speculative.Parameters:
    """Return the parameters of an example's decoding."""
    names = ("layers", "draft_length", "sampled", "placement", "draft_layers")
    given = {"layers": 1} | {name: x[name] for name in names if name in x}
    return speculative.Parameters(**given, sequences=x["batch"], batching="static", lengths=tuple(map(len, x["sequences"])))


def play(x: Example) -> Run:
    """Simulate all batches."""
    return _run(x, pipelined_examples.cost(x))


def _run(x: Example, cost: UnitCost) -> Run:
    parameters = parameters_of(x)
    n = max(map(len, x["sequences"]))
    steps, cluster = speculative.decode(parameters, [0], n), Cluster(parameters.units)
    return simulate(steps, parameters.total_tokens(n), cluster, cost, _world(x))


def _world(x: Example) -> World:
    accepted = [survivors({**x, "survive": counts}) for counts in x["sequences"]]
    return batch_world([World(1, x.get("layers", 1), drafts={"draft": DraftOutcomes("target", counts)}) for counts in accepted])


def _counted(x: Example) -> interpreter.CountedWork:
    parameters, n = parameters_of(x), max(map(len, x["sequences"]))
    return interpreter.count(speculative.decode(parameters, [0], n), _world(x), parameters.total_tokens(n))


def _alone(x: Example) -> Sequence[float]:
    return [play({**x, "sequences": [counts], "batch": 1}).latency for counts in x["sequences"]]


THEOREMS = theorem.all()
