"""The theorems on speculative decoding of batches, 32: static ones, whose sequences wait for each other, and full ones.

An example has `texts`, for each how many drafted tokens survive if a draft starts at each position, `batch` and `draft_length`, and
what else a decoding of one text has (`draws`); or `lengths` and `rate`, in twentieths, for all luck. Of a batch that is kept full
each of `texts` is a sequence, and passes are priced over `batch` of them.
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
from model.interpret.simulated_answers import DraftOutcomes, World, together
from model.methods.draft_model import PLACEMENTS
from model.methods.method_parameters import BATCHING
from model.methods.rounds import ReplayRounds
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
from sim.theorems.pipelined_examples import CLOSE, survivors, whole
from sim.theorems.theorem import Collected, Example, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_MOST = 3  # drafted tokens


theorem = Collected("speculative")


# --- What they are tried on ---


@drawn
def _texts(draw: DrawFn, costs: str = "whole", narrow: bool = False) -> Example:
    """Batches of a few texts; `narrow`, a pass costs the same however wide."""
    x = draw(drafting(tokens=1, most=_MOST, costs=costs))
    if "cost" in x and "verify_cost" in x["cost"]:
        del x["cost"]["verify_cost"]
    x["texts"] = [digits(draw, draw(st.integers(1, 5)), _MOST) for _ in range(draw(st.integers(1, 3)))]
    x["batch"] = draw(st.integers(1, 3))
    if not narrow and draw(st.booleans()):
        times = itertools.accumulate(digits(draw, 3 * (_MOST + 1) - 1, 4), initial=4)
        x["cost"] = x.get("cost", {}) | {"verify_cost": [[width, time] for width, time in enumerate(times, start=1)]}
    return {name: value for name, value in x.items() if name not in ("accept", "survive")}


def _luck() -> SearchStrategy[Example]:
    lengths = st.lists(whole(1, 3), min_size=2, max_size=3)
    return st.fixed_dictionaries({
        "draft_length": whole(0, 2), "batch": whole(1, 3), "lengths": lengths, "rate": whole(0, 20),
        "placement": st.sampled_from(PLACEMENTS), "cost": st.fixed_dictionaries({"link": whole(0, 2)}),
    })  # fmt: skip


@drawn
def _full(draw: DrawFn) -> Example:
    """A sequence of a full batch of two or three, by its rate."""
    times = itertools.accumulate(digits(draw, 3 * (_MOST + 1) - 1, 4), initial=4)
    cost = {"verify_cost": [[width, time] for width, time in enumerate(times, start=1)], "cost_ratio": draw(whole(0, 4)) / 4}
    return {
        "draft_length": draw(whole(0, _MOST)), "batch": draw(whole(2, 3)), "tokens": draw(whole(1, 6)),
        "rate": draw(whole(0, 20)), "placement": draw(st.sampled_from(PLACEMENTS)),
        "cost": cost | {"link": draw(whole(0, 2))},
    }  # fmt: skip


@drawn
def _against_static(draw: DrawFn) -> Example:
    """Texts of one static batch; the time of a pass that does not hang on its sequences, and that of each."""
    most = draw(st.integers(1, 5))
    texts = [[draw(whole(0, _MOST)) for _ in range(most)] for _ in range(draw(st.integers(1, 3)))]
    return {
        "texts": texts, "batch": len(texts), "draft_length": draw(whole(0, _MOST)), "fixed": draw(whole(1, 4)),
        "each": draw(whole(0, 3)),
    }  # fmt: skip


@theorem("32a", "Simulator and paths agree on every path, exactly, in batches of unequal texts.", source="one algorithm",
         given=_texts)
def events_are_paths(x: Example) -> None:
    run, parameters = play(x), choice(x)
    coins = [iter([np.zeros((len(own), BLOCK))]) for own in x["texts"]]
    laws = [ReplayRounds([survivors({**x, "survive": own})]) for own in x["texts"]]
    outcomes = [law.drafts(tiles) for law, tiles in zip(laws, coins, strict=True)]
    given = outcomes if parameters.decoded_sequences > 1 else outcomes[0]
    tally = sampler.walk(parameters, max(parameters.lengths or ()), pipelined_examples.cost(x), given)
    equal("latency", float(tally.time[0]), run.latency)
    equal("compute", float(tally.busy[0]), run.busy)
    equal("rounds of texts", float(tally.rounds[0]), float(run.rounds.total()))
    equal("drafted tokens", float(tally.drafted[0]), float(sum(count * times for (_, count), times in run.rounds.items())))


@theorem("32b", "A text of a batch has the rounds that it has alone.", source="luck is each text's own", given=_texts)
def texts_are_what_they_are_alone(x: Example) -> None:
    found = _counted(x)
    for number, own in enumerate(x["texts"]):
        mine = [each._replace(sequence=None) for each in found.committed if each.sequence in (number, None)]
        equal(f"commits of text {number}", mine, _counted({**x, "texts": [own]}).committed)


@theorem("32d", "Texts decoded together take no longer than one after the other, where a pass costs the same however wide.",
         source="a round takes at most those of its texts", given=lambda: _texts(narrow=True))
def together_is_no_slower(x: Example) -> None:
    """Where a pass takes the same however wide."""
    behind = play({**x, "batch": 1}).latency
    at_most("latency of a batch", play({**x, "batch": len(x["texts"])}).latency, behind)


@theorem("32c", "A batch is never faster than any of its texts alone.", source="a round drafts for the text that can use the most",
         given=_texts)
def no_faster_than_the_slowest(x: Example) -> None:
    batch = play({**x, "batch": len(x["texts"])}).latency
    at_most("latency of one text alone", max(_alone(x)), batch)


@theorem("32e", "Where width costs nothing a batch takes as long as the slowest of its texts.",
         source="false: each round drafts as much as any of its texts can use, not always the slowest one",
         given=lambda: _texts("plain", narrow=True), expect="fails")
def as_fast_as_the_slowest(x: Example) -> None:
    equal("latency", play({**x, "batch": len(x["texts"])}).latency, max(_alone(x)))


@theorem("32f", "Means of the latency, compute, rounds, drafts and heads are those over all luck.",
         source="of independent texts so many are left after r rounds", given=_luck)
def mean_over_all_luck(x: Example) -> None:
    rate, lengths = x["rate"] / 20, x["lengths"]
    mean = np.zeros(5)
    for luck in itertools.product(*(itertools.product((0, 1), repeat=length - 1) for length in lengths)):
        chance = math.prod(rate if right else 1 - rate for own in luck for right in own)
        if chance:
            run = play({**x, "texts": [survivors({**x, "accept": [*own, 0]}) for own in luck]})
            drafted = sum(count * times for (_, count), times in run.rounds.items())
            values = run.latency, run.busy, run.rounds.total(), drafted, run.account.heads
            mean += chance * np.array(values)
    parameters = choice({**x, "texts": [[0] * length for length in lengths]})
    found = formulas.predict(parameters, max(lengths), Iid(rate), pipelined_examples.cost(x))
    closed = formulas.work(parameters, max(lengths), Iid(rate))
    heads = sum(each.heads for each in closed.of.values()) if closed is not None else math.nan
    names = "mean latency", "mean compute", "mean rounds", "mean drafted tokens", "mean heads"
    for name, got, want in zip(names, (found.latency, found.busy, found.rounds, found.drafted, heads), mean, strict=True):
        equal(name, float(got if got is not None else math.nan), float(want), CLOSE)


# --- Batches that are kept full ---


@theorem("32g", "Simulator and paths agree on every path of a sequence in a batch that is kept full, exactly.",
         source="one algorithm", given=_texts)
def events_are_paths_of_a_full_batch(x: Example) -> None:
    parameters, cost = _of_full(x), _full_cost(x)
    for own in x["texts"]:
        run, law = _played(x, own, parameters, cost), ReplayRounds([survivors({**x, "survive": own})])
        tally = sampler.walk(parameters, len(own), cost, law.drafts(iter([np.zeros((len(own), BLOCK))])))
        equal("latency", float(tally.time[0]), run.latency)
        equal("compute", float(tally.busy[0]), run.busy)
        equal("rounds", float(tally.rounds[0]), float(run.rounds.total()))
        equal("drafted tokens", float(tally.drafted[0]), float(run.rounds.total() * parameters.draft_length))


@theorem("32h", "Moments of a sequence in a batch that is kept full are those over all luck, its work too.",
         source="renewal theory; drafts are not cut", given=_full)
def mean_of_a_full_batch_over_all_luck(x: Example) -> None:
    parameters, cost, n, rate = _of_full(x), _full_cost(x), x["tokens"], x["rate"] / 20
    moments = np.zeros(7)
    for luck in itertools.product((0, 1), repeat=n - 1):
        run = _played(x, survivors({**x, "accept": [*luck, 0]}), parameters, cost)
        drafted = sum(count * times for (_, count), times in run.rounds.items())
        values = run.latency, run.latency**2, run.busy, run.rounds.total(), drafted, run.account.heads, run.account.layer_passes
        moments += math.prod(rate if right else 1 - rate for right in luck) * np.array(values)
    found, closed = formulas.predict(parameters, n, Iid(rate), cost), formulas.work(parameters, n, Iid(rate))
    assert closed is not None
    heads, layers = (sum(getattr(each, name) for each in closed.of.values()) for name in ("heads", "layer_passes"))
    second = found.latency_variance + found.latency**2
    names = ("latency", "square of the latency", "compute", "rounds", "drafted tokens", "heads", "layers of tokens")
    known = found.latency, second, found.busy, found.rounds, found.drafted, heads, layers
    for name, got, want in zip(names, known, moments, strict=True):
        equal(f"mean {name}", float(math.nan if got is None else got), float(want), CLOSE)


@theorem("32i", "The speed-up of l tokens in a batch that is kept full is from l / (l + gamma) to 1 times E[N] T(1) / (T(gamma"
         " + 1) + T_d).", source="Theorem 3.8 and Wald's identity", given=_full)
def long_sequences_of_a_full_batch(x: Example) -> None:
    """Wald's identity: the rounds of l tokens give between l and l + gamma tokens, E[N] each in the mean."""
    parameters, cost, n, rate = _of_full(x), replace(_full_cost(x), link=0.0), x["tokens"], x["rate"] / 20
    gamma = parameters.draft_length
    found = formulas.predict(parameters, n, Iid(rate), cost)
    speed = float(found.plain_latency / found.latency)
    single, wide = (pipelined_examples.cost(x).slowdown(max(x["batch"], 2) * width) for width in (1, gamma + 1))
    endless = (
        float(formulas.expected_tokens(rate, gamma))
        * single
        / (gamma * float(pipelined_examples.cost(x).draft_times()) * single + wide)
    )
    at_most("speed-up", speed, endless, CLOSE)
    at_most("that of endless sequences, less the tokens that are dropped", endless * n / (n + gamma), speed, CLOSE)


@theorem("32j", "In a batch that is kept full a sequence has the rounds that it has in lockstep, and takes no less time.",
         source="its last drafts are not cut", given=_texts)
def no_faster_than_lockstep(x: Example) -> None:
    """Where a wider pass takes no less: in lockstep the last drafts are cut."""
    parameters, cost = _of_full(x), _full_cost(x)
    lockstep = replace(parameters, batching="lockstep")
    for own in x["texts"]:
        cut, whole = (_played(x, own, each, cost) for each in (lockstep, parameters))
        at_most("latency", cut.latency, whole.latency)
        equal("rounds", cut.rounds.total(), whole.rounds.total())


@theorem("32k", "A batch that is kept full is no slower than a static one, where a pass over n sequences takes a + b n and"
         " drafts are free.", source="a pass over fewer sequences takes no less for each", given=_against_static)
def kept_full_is_no_slower_than_static(x: Example) -> None:
    """Where drafts are free and a pass takes a + b n over n sequences, whatever its width."""
    cost = _FixedAndEach(choice(x).layers, cost_ratio=0.0, each=x["each"] / (x["fixed"] + x["each"]))
    _static_against_full(x, cost, 1 + (len(x["texts"]) - 1) * cost.each)


@dataclass(frozen=True)
class _FixedAndEach(UnitCost):
    """Passes that take `each` longer for every sequence but one, whatever their width."""

    each: float = 0.0

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        return super().times(shape, at) * (1 + (np.asarray(shape.sequences) - 1) * self.each)

    def forward(self, step: Forward) -> float:
        return super().forward(step) * (1 + (step.batch_size - 1) * self.each)



@theorem("32l", "A batch that is kept full is no slower than a static one, whatever a draft costs.",
         source="false: at its end a static batch drafts less", given=_against_static, expect="fails")
def kept_full_is_no_slower_whatever_it_costs(x: Example) -> None:
    _static_against_full(x, UnitCost(choice(x).layers, cost_ratio=0.25), 1.0)


def _static_against_full(x: Example, cost: UnitCost, slower: float) -> None:
    """Time of a static batch of all texts, and in the mean what they take in a full one, whose passes are `slower` than of one."""
    static = _run({**x, "batch": len(x["texts"])}, cost).latency
    full = UnitCost(cost.layers, layer_times=(slower,) * cost.layers, cost_ratio=cost.cost_ratio)
    parameters = replace(_of_full(x), sequences=max(len(x["texts"]), 2))
    times = [_played(x, own, parameters, full).latency for own in x["texts"]]
    at_most("time of a sequence of a full batch, in the mean", sum(times) / len(times), static, CLOSE)


@theorem("32m", "One sequence alone is the same in every way of batching.", source="there is nobody to wait for, or to draft for",
         given=_texts)
def one_sequence_is_the_same_in_all(x: Example) -> None:
    own, cost = x["texts"][0], pipelined_examples.cost(x)
    runs = [_played(x, own, replace(_of_full(x), sequences=1, batching=each), cost) for each in BATCHING]
    alone = pipelined_examples.play({**x, "survive": own})
    for run in runs:
        equal("latency", run.latency, alone.latency)
        equal("compute", run.busy, alone.busy)
        equal("commits", run.commits, alone.commits)


# --- Playing an example ---


def _of_full(x: Example) -> speculative.Parameters:
    """The parameters of a batch that is kept full: at least two sequences."""
    names = ("layers", "draft_length", "sampled", "placement", "draft_layers")
    given = {"layers": 1} | {name: x[name] for name in names if name in x}
    return speculative.Parameters(**given, sequences=max(x["batch"], 2))


def _full_cost(x: Example) -> UnitCost:
    return pipelined_examples.cost(x).of_batch(max(x["batch"], 2), _width(x))


def _width(x: Example) -> int:
    return int(x["draft_length"]) + 1


def _played(x: Example, own: Sequence[int], parameters: speculative.Parameters, cost: UnitCost) -> Run:
    """One sequence of which so many drafted tokens survive."""
    answers = World(1, parameters.layers, drafts={"draft": DraftOutcomes("target", survivors({**x, "survive": own}))})
    return simulate(speculative.decode(parameters, [0], len(own)), len(own), Cluster(parameters.units), cost, answers)


def choice(x: Example) -> speculative.Parameters:
    """The parameters of an example's decoding."""
    names = ("layers", "draft_length", "sampled", "placement", "draft_layers")
    given = {"layers": 1} | {name: x[name] for name in names if name in x}
    return speculative.Parameters(**given, sequences=x["batch"], batching="static", lengths=tuple(map(len, x["texts"])))


def play(x: Example) -> Run:
    """Simulate all batches."""
    return _run(x, pipelined_examples.cost(x))


def _run(x: Example, cost: UnitCost) -> Run:
    parameters = choice(x)
    n = max(map(len, x["texts"]))
    steps, cluster = speculative.decode(parameters, [0], n), Cluster(parameters.units)
    return simulate(steps, parameters.outputs_of(n), cluster, cost, _world(x))


def _world(x: Example) -> World:
    each = [survivors({**x, "survive": own}) for own in x["texts"]]
    return together([World(1, x.get("layers", 1), drafts={"draft": DraftOutcomes("target", own)}) for own in each])


def _counted(x: Example) -> interpreter.CountedWork:
    parameters, n = choice(x), max(map(len, x["texts"]))
    return interpreter.count(speculative.decode(parameters, [0], n), _world(x), parameters.outputs_of(n))


def _alone(x: Example) -> Sequence[float]:
    return [play({**x, "texts": [own], "batch": 1}).latency for own in x["texts"]]


THEOREMS = theorem.all()
