"""Theorems on adaptive draft lengths: a bound for every policy, and agreement of all views.

An example has a `policy`, its `options`, the longest draft, and either the outcome at each output position (`accept`), or an
acceptance rate, over all outcomes.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.adaptive import paths as sampler
from model.methods.adaptive import theory as formulas
from model.methods.adaptive.algorithm import OPTIONS, Parameters, decode
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import PROMPT, accepted, model, pairs, repeated_outcomes, rounds, stop_tokens
from sim.theorems.output_law import distance, law_of_model, law_of_text
from sim.theorems.pipelined_examples import CLOSE, chances, integers, paths, rates, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_RATIO = 0.5
_COUNT_BASED = ("gradient", "optimum", "heuristic")
"""Policies that use only counts of drafted and accepted tokens."""


theorem = TheoremCollection("adaptive")


# --- Examples ---


@drawn
def _policies(draw: DrawFn, more: dict[str, SearchStrategy[Any]], policies: tuple[str, ...] = _COUNT_BASED) -> Example:
    name, longest = draw(st.sampled_from(policies)), draw(integers(1, 5))
    options: dict[str, Any] = {}
    if "draft_length" in OPTIONS[name]:
        options["draft_length"] = draw(integers(1, longest))
    if "estimator" in OPTIONS[name]:
        options["estimator"] = draw(st.sampled_from(("tested", "drafted")))
    if name == "confidence":
        options["confidence_threshold"] = draw(integers(1, 4)) / 4
    return {"policy": name, "longest": longest, "options": options} | {key: draw(value) for key, value in more.items()}


def _decodings(tokens: int = 20) -> SearchStrategy[Example]:
    return _policies({"accept": st.lists(st.sampled_from([True, True, False]), min_size=1, max_size=tokens)})


def _turning() -> SearchStrategy[Example]:
    """Draw acceptances followed by rejections: one more acceptance lengthens drafts where nothing is accepted."""
    def outcomes(numbers: tuple[int, int]) -> Example:
        good, bad = numbers
        return {"accept": [True] * good + [False] * bad, "at": good}

    rule = _policies({}, ("heuristic",))
    return st.tuples(rule, st.tuples(integers(0, 6), integers(5, 14)).map(outcomes)).map(
        lambda both: {**both[0], "longest": 5, **both[1]}
    )


def _rated() -> SearchStrategy[Example]:
    return _policies({"tokens": integers(1, 7), "rate": rates()})


def _models() -> SearchStrategy[Example]:
    policies = _policies({}, tuple(OPTIONS))
    return st.tuples(pairs(), policies).map(lambda both: {**both[0], **both[1], "longest": min(both[1]["longest"], 3)}).map(_within)


def _within(x: Example) -> Example:
    options = {name: min(value, x["longest"]) if name == "draft_length" else value for name, value in x["options"].items()}
    return {**{name: value for name, value in x.items() if name != "draft_length"}, "options": options}


@theorem("1", "Events and paths agree exactly on every path, for every policy.", source="same policy", given=_decodings)
def events_are_paths(x: Example) -> None:
    run, n = play(x), len(x["accept"])
    tally = sampler.walk(parameters_of(x), n, _COST, repeated_outcomes(x["accept"][:-1]))
    equal("latency", float(tally.time[0]), run.latency)
    equal("rounds", int(tally.rounds[0]), rounds(run))


@theorem("4", "Accepted tokens and rounds add up to l, no draft exceeds the longest, and the text is that of the target.",
         source="a round gives one more token than it accepts", given=_decodings)
def accepted_and_rounds(x: Example) -> None:
    run = play(x)
    equal("accepted tokens and rounds", accepted(run) + rounds(run), len(x["accept"]))
    equal("text", run.tokens, [*range(1, len(x["accept"]) + 1)])
    at_most("tokens of a draft", max(count for _, count in run.rounds), parameters_of(x).longest_draft)


@theorem("10a", "The mean time of every policy is at least 1 + (1 - alpha + c alpha) (l - 1) passes of the target.",
         source="[Leviathan2023], 3.5: the oracle", given=_rated)
def no_policy_beats_the_oracle(x: Example) -> None:
    n, alpha = x["tokens"], x["rate"]
    outcomes = paths(n - 1)
    runs = [play(x, accept=[*row, False]).latency for row in outcomes.T.tolist()]
    mean = float(chances(Iid(alpha), outcomes) @ np.array(runs))
    # The last token is never a drafted one: it always takes a pass.
    bound = 1 + (n - 1) / float(speculative.oracle_speedup(alpha, _RATIO))
    at_most("least mean time of any policy", bound, mean, CLOSE)


@theorem("10b", "The formula of the +2/-1 rule gives the mean and variance of the time over all outcomes.",
         source="recursion over position and draft length",
         given=_rated)
def heuristic_in_the_mean(x: Example) -> None:
    n, alpha = x["tokens"], x["rate"]
    x = {**x, "policy": "heuristic", "options": {name: value for name, value in x["options"].items() if name == "draft_length"}}
    outcomes = paths(n - 1)
    times = np.array([play(x, accept=[*row, False]).latency for row in outcomes.T.tolist()])
    mass = chances(Iid(alpha), outcomes)
    prediction = formulas.predict(parameters_of(x), n, Iid(alpha), _COST)
    mean = math.fsum(mass * times)
    equal("mean latency", float(prediction.latency), mean, CLOSE)
    equal("mean square of the latency", float(prediction.latency_variance) + mean**2, math.fsum(mass * times**2), CLOSE)


@theorem("14", "The sampled text has exactly the target's distribution, whether drafts end by length or by confidence.",
         source="the decision to draft precedes the draw of a token", given=_models)
def right_law(x: Example) -> None:
    parameters = parameters_of({**x, "options": x["options"], "sampled": True})
    models = {role: model(x[role]) for role in ("target", "draft")}
    law = law_of_text(lambda: decode(parameters, PROMPT, x["tokens"], stop_tokens(x)), models, PROMPT, x["tokens"])
    want = law_of_model(models["target"], PROMPT, x["tokens"], x.get("stop"))
    if law != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(law, want)}")


@theorem("29", "An acceptance in place of a rejection never makes an adaptive decoding longer.",
         source="false: the policy may then draft more where nothing is accepted", given=_turning, expect="fails")
def acceptance_never_costs(x: Example) -> None:
    at = x["at"] % len(x["accept"])
    better = [*x["accept"][:at], True, *x["accept"][at + 1 :]]
    at_most("latency with one more acceptance", play(x, accept=better).latency, play(x).latency)


# --- Playing an example ---

_COST = UnitCost(1, cost_ratio=_RATIO)


def parameters_of(x: Example) -> Parameters:
    """Return the parameters of an example's decoding."""
    given = Parameters(1, x["policy"], x["longest"], sampled=x.get("sampled", False), **x["options"])
    return given.with_costs(_COST)


def play(x: Example, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`."""
    x = {**x, **changes}
    n, parameters = len(x["accept"]), parameters_of(x)
    draft = DraftOutcomes("target", survivors({"draft_length": n, "accept": x["accept"]}))
    return simulate(decode(parameters, [0], n), n, Cluster(1), _COST, World(1, 1, drafts={"draft": draft}))


THEOREMS = theorem.all()
