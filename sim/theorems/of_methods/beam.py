"""Theorems on speculative beam search: arrangements of one algorithm, and their costs.

An example has a `rule`, an `arrangement`, `beams`, `draft_length`, and either the outcome at each output position (`accept`), or an
acceptance rate, over all outcomes. Progress is that of the best hypothesis.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.beam import paths as sampler
from model.methods.beam import theory as formulas
from model.methods.beam.algorithm import Parameters, decode
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import digits, repeated_outcomes
from sim.theorems.pipelined_examples import CLOSE, chances, integers, paths, rates, survivors
from sim.theorems.theorem import Example, TheoremCollection, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

_FORMS = (("per-beam", "sequential"), ("per-beam", "parallel"), ("per-beam", "batched"), ("exact", "batched"))


theorem = TheoremCollection("beam")


# --- Examples ---


@drawn
def _decodings(draw: DrawFn, tokens: int = 0) -> Example:
    """Draw decodings with given outcomes, or with a rate and at most `tokens` tokens."""
    rule, arrangement = draw(st.sampled_from(_FORMS))
    example: Example = {
        "rule": rule, "arrangement": arrangement, "beams": draw(integers(1, 3)), "draft_length": draw(integers(0, 3)),
        "cost_ratio": draw(integers(0, 4)) / 4, "link": draw(integers(0, 2)) / 4,
    }  # fmt: skip
    if tokens:
        return example | {"tokens": draw(integers(1, tokens)), "rate": draw(rates())}
    return example | {"accept": [bool(bit) for bit in digits(draw, draw(integers(1, 9)), 1)]}


@theorem("1", "Events and paths agree exactly on every path, for both rules and all arrangements.", source="same algorithm",
         given=_decodings)
def events_are_paths(x: Example) -> None:
    run, n = play(x), len(x["accept"])
    tally = sampler.walk(parameters_of(x), n, cost(x), repeated_outcomes(x["accept"][:-1]))
    equal("latency", float(tally.time[0]), run.latency)
    equal("compute", float(tally.busy[0]), run.busy)


@theorem("2", "The formula gives the mean latency and compute over all outcomes.", source="all rounds cost the same",
         given=lambda: _decodings(5))
def mean_over_all_outcomes(x: Example) -> None:
    n = x["tokens"]
    outcomes = paths(n - 1)
    runs = [play(x, accept=[*row, False]) for row in outcomes.T.tolist()]
    mass, prediction = chances(Iid(x["rate"]), outcomes), formulas.predict(parameters_of(x), n, Iid(x["rate"]), cost(x))
    for what in ("latency", "busy"):
        mean = math.fsum(mass * np.array([getattr(run, what) for run in runs]))
        equal(f"mean {what}", float(getattr(prediction, what)), mean, CLOSE)


@theorem("3", "k hypotheses in sequence take k times as long as one; on k units they take as long as one.",
         source="timing of the slides [Deck], S / k", given=_decodings)
def one_after_another(x: Example) -> None:
    form = {"rule": "per-beam", "link": 0.0}
    alone = play({**x, **form, "arrangement": "sequential", "beams": 1})
    queued, at_once = (play({**x, **form, "arrangement": arrangement}) for arrangement in ("sequential", "parallel"))
    equal("time of hypotheses in sequence", queued.latency, x["beams"] * alone.latency)
    equal("time of hypotheses in parallel", at_once.latency, alone.latency)


@theorem("4", "With the per-beam rule in sequence the speed-up is that of Theorem 3.8 divided by k.",
         source="timing of the slides [Deck], S / k",
         given=lambda: _decodings(5))
def speed_over_beams(x: Example) -> None:
    rate, gamma, beams, c = x["rate"], x["draft_length"], x["beams"], x["cost_ratio"]
    speed = formulas.speedup(rate, gamma, c, beams, rule="per-beam", arrangement="sequential")
    equal("speed of sequential beams", float(speed), float(speculative.speedup(rate, gamma, c)) / beams, CLOSE)


@theorem("5", "One more hypothesis in sequence costs no time.", source="false: each hypothesis has separate passes",
         given=_decodings,
         expect="fails")
def one_more_hypothesis(x: Example) -> None:
    form = {"rule": "per-beam", "arrangement": "sequential", "link": 0.0}
    one, more = (play({**x, **form, "beams": x["beams"] + extra}).latency for extra in (0, 1))
    equal("time with one more hypothesis", more, one)


# --- Playing an example ---


def parameters_of(x: Example) -> Parameters:
    """Return the parameters of an example's decoding."""
    return Parameters(1, x["draft_length"], x["beams"], x["rule"], arrangement=x["arrangement"])


def cost(x: Example) -> UnitCost:
    """Return costs with ratios in quarters, so that sums of times are exact."""
    return UnitCost(1, cost_ratio=x["cost_ratio"], link=x["link"])


def play(x: Example, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`."""
    x = {**x, **changes}
    n, parameters = len(x["accept"]), parameters_of(x)
    world = World(1, 1, drafts={"draft": DraftOutcomes("target", survivors({"draft_length": n, "accept": x["accept"]}))})
    return simulate(decode(parameters, [0], n), n, Cluster(parameters.units), cost(x), world)


THEOREMS = theorem.all()
