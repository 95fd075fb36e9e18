"""Theorems on hierarchical speculative decoding, 16 and 17: three models, in every reading of the sentence in [Deck].

An example has a `reading`, `draft_length` and `inner_draft_length`, and either outcomes at each output position (`accept`: the
large model accepts the medium model's token, `medium_accept`: the medium model accepts the small model's), or both rates, over all
outcomes.

[Deck] N. Tulsian, V. Goyal, R. Aggarwal. Speculative decoding (slides), "Hierarchical speculative decoding".
[CSDrafting2023] Z. Chen et al. Cascade Speculative Drafting for Even Faster LLM Inference. arXiv:2312.11462.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.hierarchical import paths as sampler
from model.methods.hierarchical import theory as formulas
from model.methods.hierarchical.algorithm import READINGS, Parameters, decode
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import PROMPT, accepted, digits, model, repeated_outcomes, rounds
from sim.theorems.output_law import TextLaw, distance, greedy_text, law_of_model, law_of_text
from sim.theorems.pipelined_examples import CLOSE, chances, integers, paths, rates, survivors
from sim.theorems.theorem import Example, TheoremCollection, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

_LOSSLESS = READINGS[1:]


theorem = TheoremCollection("hierarchical")


# --- Examples ---


def _shapes(most: int = 4, readings: tuple[str, ...] = READINGS) -> dict[str, SearchStrategy[Any]]:
    quarters = integers(0, 4).map(lambda number: number / 4)
    return {
        "reading": st.sampled_from(readings), "draft_length": integers(1, most), "inner_draft_length": integers(0, 3),
        "cost_ratio": quarters, "medium_cost_ratio": quarters,
    }  # fmt: skip


@drawn
def _decodings(draw: DrawFn) -> Example:
    tokens = draw(integers(1, 9))
    example: Example = {name: [bool(bit) for bit in digits(draw, tokens, 1)] for name in _RATES}
    example |= {"placement": draw(st.sampled_from(("colocated", "separate"))), "link": draw(integers(0, 2)) / 4}
    return example | {name: draw(strategy) for name, strategy in _shapes().items()}


def _rated(most: int = 2, tokens: int = 0) -> SearchStrategy[Example]:
    more = {"tokens": integers(1, tokens)} if tokens else {}
    return st.fixed_dictionaries({**_shapes(most), "accept": rates(), "medium_accept": rates(), **more})


@drawn
def _models(draw: DrawFn, readings: tuple[str, ...], sampled: bool) -> Example:
    example: Example = {role: [digits(draw, 2, 3, least=1) for _ in range(draw(st.sampled_from((1, 3))))]
                        for role in ("target", "medium", "draft")}  # fmt: skip
    example |= {name: draw(strategy) for name, strategy in _shapes(2, readings).items()}
    return example | {"tokens": draw(integers(1, 3)), "sampled": sampled}


# --- 16: time and compute ---


@theorem("16a", "Events and paths agree exactly on every path, in every reading, colocated and separate.", source="same algorithm",
         given=_decodings)
def events_are_paths(x: Example) -> None:
    run, n = play(x), len(x["accept"])
    given = {name: repeated_outcomes(x[name][:-1]) for name in ("accept", "medium_accept")}
    tally = sampler.walk(parameters_of(x), n, cost(x), given)
    equal("latency", float(tally.time[0]), run.latency)
    equal("compute", float(tally.busy[0]), run.busy)
    equal("rounds", int(tally.rounds[0]), rounds(run))


@theorem("16b", "Accepted tokens and rounds add up to l, and the text is that of the large model.", source="a round gives one more",
         given=_decodings)
def accepted_and_rounds(x: Example) -> None:
    run = play(x)
    equal("accepted tokens and rounds", accepted(run) + rounds(run), len(x["accept"]))
    equal("text", run.tokens, [*range(1, len(x["accept"]) + 1)])


@theorem("16c", "The formula gives the mean latency, compute and rounds over all outcomes.", source="[Deck], for a finite l",
         given=lambda: _rated(tokens=4))
def mean_over_all_outcomes(x: Example) -> None:
    n = x["tokens"]
    prediction = formulas.predict(parameters_of(x), n, {name: Iid(x[name]) for name in _RATES}, cost(x))
    every = [(chance, run) for chance, run in _all_runs(x, n)]
    for what in ("latency", "busy"):
        mean = math.fsum(chance * getattr(run, what) for chance, run in every)
        equal(f"mean {what}", float(getattr(prediction, what)), mean, CLOSE)
    equal("mean rounds", float(np.asarray(prediction.rounds)), math.fsum(chance * rounds(run) for chance, run in every), CLOSE)


@theorem("16d", "The formulas of each reading give the mean tokens and the mean cost of a round.",
         source="[Deck], in four readings",
         given=_rated)
def one_round(x: Example) -> None:
    """Enumerate all outcomes of the first round of a longer decoding."""
    parameters = parameters_of(x)
    # Longer than a round, so that no draft is cut.
    every = [(chance, run.commits[0]) for chance, run in _all_runs(x, parameters.longest_draft + 2)]
    gamma, reading = x["draft_length"], x["reading"]
    tokens = formulas.tokens_per_round(x["accept"], x["medium_accept"], gamma, reading=reading)
    equal("mean tokens of a round", float(tokens), math.fsum(chance * count for chance, (_, _, count) in every), CLOSE)
    round_cost = formulas.cost_per_round(
        x["medium_accept"], gamma, x["cost_ratio"], x["medium_cost_ratio"], reading=reading,
        inner_draft_length=parameters.inner_draft_length,
    )  # fmt: skip
    equal("mean cost of a round", float(round_cost), math.fsum(chance * time for chance, (time, *_) in every), CLOSE)


@theorem("16e", "With a free small model that is always accepted a round costs 1 + c_M with reuse, and"
         " 1 + c_M ceil(gamma / (inner + 1)) in the recursion.",
         source="limits of the cost of a round", given=lambda: _rated(8))
def limits(x: Example) -> None:
    gamma, medium, inner = x["draft_length"], x["medium_cost_ratio"], x["inner_draft_length"]
    reuse = formulas.cost_per_round(1, gamma, 0, medium, reading="reuse")
    equal("cost with a free small model that is always accepted", float(reuse), 1 + medium, CLOSE)
    inside = formulas.cost_per_round(1, gamma, 0, medium, reading="recursive", inner_draft_length=inner)
    equal("cost in the recursion", float(inside), 1 + medium * math.ceil(gamma / (inner + 1)), CLOSE)


@theorem("16f", "Literally read, three models beat two if and only if the medium one accepts more than 1 + gamma c_S / c_M tokens.",
         source="the costs of a round compared", given=lambda: _rated(8).map(_with_medium))
def break_even(x: Example) -> None:
    gamma, small, medium, rate = x["draft_length"], x["cost_ratio"], x["medium_cost_ratio"], x["accept"]
    three = float(formulas.speedup(rate, x["medium_accept"], gamma, small, medium))
    two = float(speculative.speedup(rate, gamma, medium))
    kept = float(speculative.expected_tokens(x["medium_accept"], gamma)) - 1
    needed = float(formulas.breakeven_accepted(gamma, small, medium))
    if abs(kept - needed) > 1e-9:
        equal("whether three models beat large and medium", three > two, kept > needed)


# --- 16: distribution of the text ---


@theorem("16g", "The greedy text is that of the large model in every reading.", source="token by token",
         given=lambda: _models(READINGS, False))
@theorem("16h", "The sampled text has exactly the large model's distribution in every reading except the literal one.",
         source="accepted and residual tokens together have the medium model's distribution",
         given=lambda: _models(_LOSSLESS, True))
@theorem("16i", "In the literal reading the sampled text has the large model's distribution.",
         source="false: rejected tokens are drawn again, so the tokens do not have the distribution they are tested with",
         given=lambda: _models(("literal",), True), expect="fails")
def right_law(x: Example) -> None:
    law, want = _text_law(x), _target_law(x)
    if law != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(law, want)}")


# --- 17: vertical cascades ---


@theorem("17", "The speed-up of a vertical cascade with one draft and no inner drafts is that of Theorem 3.8 with gamma = 1.",
         source="[CSDrafting2023]",
         given=_rated)
def cascade(x: Example) -> None:
    alpha, c = x["accept"], x["medium_cost_ratio"]
    speed = formulas.cascade_speedup(alpha, x["medium_accept"], 1, 0, x["cost_ratio"], c)
    equal("speed of a cascade of one draft", float(speed), float(speculative.speedup(alpha, 1, c)), CLOSE)


# --- Playing an example ---


def parameters_of(x: Example) -> Parameters:
    """Return the parameters of an example's decoding."""
    inner = x["inner_draft_length"] if x["reading"] == "recursive" else None
    return Parameters(1, x["draft_length"], x["reading"], inner, x.get("sampled", False), placement=x.get("placement", "colocated"))


def cost(x: Example) -> UnitCost:
    """Return costs with ratios in quarters, so that sums of times are exact."""
    return UnitCost(1, cost_ratio=x["cost_ratio"], medium_cost_ratio=x["medium_cost_ratio"], link=x.get("link", 0.0))


def play(x: Example, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`."""
    x = {**x, **changes}
    n, parameters = len(x["accept"]), parameters_of(x)
    lengths = {name: survivors({"draft_length": n, "accept": x[name]}) for name in _RATES}
    world = World(1, 1, drafts={role: DraftOutcomes(of, lengths[name]) for role, (of, name) in parameters.IMITATES.items()})
    return simulate(decode(parameters, [0], n), n, Cluster(parameters.units), cost(x), world)


def _all_runs(x: Example, tokens: int) -> Iterator[tuple[float, Run]]:
    outcomes = paths(tokens - 1)
    large, medium = (chances(Iid(x[name]), outcomes).tolist() for name in _RATES)
    lists = [[*row, False] for row in outcomes.T.tolist()]
    for chance, accept in zip(large, lists, strict=True):
        for other, medium_accept in zip(medium, lists, strict=True):
            if chance * other:
                yield chance * other, play(x, accept=accept, medium_accept=medium_accept)


def _text_law(x: Example) -> TextLaw:
    models = {role: model(x[role]) for role in ("target", "medium", "draft")}
    return law_of_text(lambda: decode(parameters_of(x), PROMPT, x["tokens"]), models, PROMPT, x["tokens"])


def _target_law(x: Example) -> TextLaw:
    if x["sampled"]:
        return law_of_model(model(x["target"]), PROMPT, x["tokens"])
    return {greedy_text(model(x["target"]), PROMPT, x["tokens"]): Fraction(1)}


_RATES = ("accept", "medium_accept")


def _with_medium(x: Example) -> Example:
    return {**x, "medium_cost_ratio": x["medium_cost_ratio"] or 0.25}


THEOREMS = theorem.all()
