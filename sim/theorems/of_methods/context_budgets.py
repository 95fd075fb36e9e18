"""Theorems on drafts with a context budget: exactness of the text, agreement of the views, and where larger batches are better.

An example of a decoding has `draft_length`, `context_budget` and outcomes by position, `accept`; its times are those of a roofline
with `prompt` cached positions of each of `sequences` sequences. One of the formulas has times of passes `target` and `draft` in
whole units, (fixed, token, position), and `draft_length`, `accepted`, `context`, `budget` and `sequences`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from model.architectures.published_shapes import preset
from model.costs.pass_seconds import PassSeconds
from model.hardware.devices import device
from model.hardware.roofline import Roofline
from model.interpret import interpreter
from model.interpret.simulated_answers import EARLY_LAYERS, DraftOutcomes, World
from model.methods.long_context import AffinePass, LongContextRounds
from model.methods.self_speculative import algorithm
from model.methods.self_speculative import paths as sampler
from model.methods.self_speculative import theory as self_speculative
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import theory as with_draft_model
from model.steps import Forward, Steps
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import (
    PROMPT,
    drafted,
    models,
    pairs,
    repeated_outcomes,
    rounds,
    stop_tokens,
    target_law,
)
from sim.theorems.output_law import distance, greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, chances, integers, law, paths, rates, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("self_speculative")
LAYERS = 4
_MAGICDEC = "Section 3 of R. Sadhukhan et al., ICLR 2025, arXiv:2408.11049"


# --- Examples ---


def _decodings() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({
        "accept": st.lists(st.booleans(), min_size=1, max_size=7), "draft_length": integers(0, 4),
        "prompt": st.sampled_from((0, 1, 60, 4000)), "hidden": integers(0, 5000), "sequences": st.sampled_from((1, 2, 32)),
    }).map(_with_budget)  # fmt: skip


def _with_budget(x: Example) -> Example:
    """Choose a budget between 1 and the context."""
    hidden = x["hidden"]
    return {name: value for name, value in x.items() if name != "hidden"} | {
        "context_budget": max(x["prompt"] + len(x["accept"]) - hidden, 1)
    }


def _all_outcomes() -> SearchStrategy[Example]:
    tokens = st.builds(lambda x, count, rate: {**x, "accept": [False] * count, "acceptance_rate": rate},
                       _decodings(), integers(1, 5), rates())  # fmt: skip
    return tokens.map(lambda x: {**x, "context_budget": min(x["context_budget"], x["prompt"] + len(x["accept"]))})


def _models(sampled: bool) -> SearchStrategy[Example]:
    return pairs(4, 3, context_budget=integers(1, 6)).map(lambda x: {**x, "sampled": sampled})


def _rounds(own: bool = False, **fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    passes = st.tuples(integers(0, 8), integers(0, 8), integers(0, 3)).map(list)
    given = st.fixed_dictionaries({
        "target": st.tuples(integers(1, 8), integers(0, 8), integers(1, 3)).map(list), "draft": passes,
        "draft_length": integers(1, 5), "accepted": rates(), "context": integers(1, 40), "budget": integers(1, 40),
        "sequences": integers(1, 9), **fields,
    })  # fmt: skip
    return given.map(lambda x: {**x, "budget": min(x["budget"], x["context"])} | ({"draft": x["target"]} if own else {}))


# --- 58: exactness of the text ---


@theorem("58a", "With drafts by all layers over a context budget the sampled text has exactly the target's distribution.",
         source="the verification reads the whole context", given=lambda: _models(sampled=True))
def right_law(x: Example) -> None:
    want, found = target_law(x), _law_of_text(x)
    if found != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(found, want)}")


@theorem("58b", "With them the greedy text is that of the target.", source="the verification reads the whole context",
         given=lambda: _models(sampled=False))
def right_text(x: Example) -> None:
    equal("generated text", [*_law_of_text(x)], [greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))])


@theorem("58c", "The text has the target's distribution also if the verification reads only the budget.",
         source="false: it is then another model", given=lambda: _models(sampled=True), expect="fails")
def verified_within_the_budget(x: Example) -> None:
    equal("distribution of the text", _law_of_text(x, limited=True), target_law(x))


# --- 58: agreement of the views, in seconds ---


@theorem("58d", "Events and paths agree to rounding on every path, and the counter makes the same passes.", source="no contention",
         given=_decodings)
def events_are_paths(x: Example) -> None:
    run, n = play(x), len(x["accept"])
    tally = sampler.walk(parameters_of(x), n, cost(x), repeated_outcomes(x["accept"][: n - 1]))
    equal("latency", float(tally.time[0]), run.latency, CLOSE)
    equal("rounds and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))
    equal("passes", run.account.totals(), interpreter.count(steps(x), world(x), n).account.totals())
    equal("text", run.tokens, [*range(1, n + 1)])


@theorem("58e", "The formula gives the mean and variance of the time, and the mean work.", source="enumeration of all outcomes",
         given=_all_outcomes)
def moments_over_all_outcomes(x: Example) -> None:
    n, accepted = len(x["accept"]), law({"match_rate": x["acceptance_rate"]})
    outcomes = paths(n - 1)
    mass = chances(accepted, outcomes).tolist()
    runs = [play({**x, "accept": [*row, False]}) for row in outcomes.T.tolist()]

    def mean(values: list[float]) -> float:
        return math.fsum(chance * value for chance, value in zip(mass, values, strict=True))

    found = self_speculative.predict(parameters_of(x), n, accepted, cost(x))
    time = mean([run.latency for run in runs])
    equal("latency", float(found.latency), time, CLOSE)
    square = float(found.latency_variance) + time**2
    equal("mean square of the latency", square, mean([run.latency**2 for run in runs]), CLOSE)
    work = self_speculative.work(replace(parameters_of(x), sequences=1), n, accepted)
    assert work is not None
    alone = [play({**x, "sequences": 1, "accept": [*row, False]}).account.totals() for row in outcomes.T.tolist()]
    for name, value in work.by_model["target"]._asdict().items():
        equal(name, float(value), mean([float(getattr(each.by_model["target"], name)) for each in alone]), CLOSE)


@theorem("58f", "A budget of a draft model beyond the context changes no time, and a smaller one never makes a decoding slower.",
         source="a draft pass reads min(context, budget) positions", given=_decodings)
def no_slower_within_a_budget(x: Example) -> None:
    n, accepted = len(x["accept"]), law({"match_rate": 0.5})
    beyond = x["prompt"] + n + x["draft_length"] + 1
    times = [
        float(with_draft_model.predict(
            speculative.Parameters(LAYERS, x["draft_length"], sequences=x["sequences"], context_budget=budget),
            n, accepted, cost(x),
        ).latency)
        for budget in (None, beyond, x["context_budget"], max(x["context_budget"] // 2, 1))
    ]  # fmt: skip
    equal("latency with a budget beyond the context", times[1], times[0])
    at_most("latency with a budget", times[2], times[1], CLOSE)
    at_most("latency with half of it", times[3], times[2], CLOSE)


# --- 58: larger batches and longer contexts ---


@theorem("58g", "A larger batch has a larger speed-up exactly if F_d (a + c k) > F (a_d + b k_d + a), at any draft length and"
         " acceptance.", source=f"ratio of affine functions; {_MAGICDEC}", given=_rounds)
def rising_batches(x: Example) -> None:
    found = formula(x)
    smaller, larger = (float(found.speedup(count)) for count in (x["sequences"], 2 * x["sequences"]))
    equal("a larger batch is better", larger > smaller * (1 + CLOSE), found.rises_with_batch)


@theorem("58h", "If a model drafts for itself, a larger batch has a larger speed-up exactly if reading the hidden part of a"
         " sequence takes longer than computing a token.", source="58g with equal passes", given=lambda: _rounds(own=True))
def rising_batches_of_one_model(x: Example) -> None:
    _, token, position = x["target"]
    smaller, larger = (float(formula(x).speedup(count)) for count in (x["sequences"], 2 * x["sequences"]))
    equal("a larger batch is better", larger > smaller * (1 + CLOSE), position * (x["context"] - x["budget"]) > token)


@theorem("58i", "A larger batch always has a larger speed-up.", source="false: at short contexts computing tokens takes longer",
         given=lambda: _rounds(own=True), expect="fails")
def always_rising_batches(x: Example) -> None:
    smaller, larger = (float(formula(x).speedup(count)) for count in (x["sequences"], 2 * x["sequences"]))
    if not larger > smaller:
        raise AssertionError(f"speed-up {smaller} of {x['sequences']} sequences and {larger} of twice as many")


@theorem("58j", "Without a budget no larger batch has a larger speed-up, for a draft model that takes the same share of each part"
         " of a pass.", source="58g with a_d = s a, k_d = s k and F_d = s F", given=lambda: _rounds(share=integers(1, 8)))
def never_rising_without_a_budget(x: Example) -> None:
    share = [part * x["share"] / 8 for part in x["target"]]
    found = formula({**x, "draft": share, "budget": None})
    smaller, larger = (float(found.speedup(count)) for count in (x["sequences"], 2 * x["sequences"]))
    at_most("speed-up of twice as many sequences", larger, smaller, CLOSE)


@theorem("58k", "Ever larger batches tend to the speed-up of what each sequence adds to the passes, and lie between it and that of"
         " the smaller batch.", source="ratio of affine functions", given=_rounds)
def limit_of_batches(x: Example) -> None:
    found = formula(x)
    far, small, large = (float(found.speedup(count)) for count in (2.0**60, x["sequences"], 2 * x["sequences"]))
    equal("speed-up of very many sequences", far, found.limit, 1e-9)
    at_most("the smaller of both ends", min(small, found.limit), large, CLOSE)
    at_most("a speed-up between both", large, max(small, found.limit), CLOSE)


@theorem("58l", "With a budget the speed-up never falls with the context, and tends to the tokens per round.",
         source="drafts and further tokens do not depend on the context", given=_rounds)
def rising_contexts(x: Example) -> None:
    found = formula(x)
    longer = formula({**x, "context": 2 * x["context"]})
    at_most("speed-up at the shorter context", float(found.speedup(x["sequences"])), float(longer.speedup(x["sequences"])), CLOSE)
    far = formula({**x, "context": 2**50})
    equal("speed-up at a very long context", float(far.speedup(x["sequences"])), found.tokens_per_round, 1e-9)


@theorem("58m", "Without a budget the speed-up never falls with the context.",
         source="false: drafts that read all of it become slower too", given=_rounds, expect="fails")
def rising_contexts_without_a_budget(x: Example) -> None:
    shorter, longer = (formula({**x, "budget": None, "context": times * x["context"]}) for times in (1, 2))
    at_most("speed-up at the shorter context", float(shorter.speedup(x["sequences"])), float(longer.speedup(x["sequences"])), CLOSE)


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example's decoding: a model that drafts for itself with all layers."""
    return algorithm.Parameters(
        LAYERS, LAYERS, x["draft_length"], False, sampled=x.get("sampled", False), sequences=x.get("sequences", 1),
        batching="lockstep", context_budget=x["context_budget"],
    )  # fmt: skip


@functools.lru_cache(maxsize=16)
def _roofline(role: str) -> Roofline:
    shape = replace(preset("llama-2-7b" if role == "target" else "llama-3.2-1b"), layers=LAYERS if role == "target" else 1)
    return Roofline.on_device(shape, device("a100"))


def cost(x: Example) -> PassSeconds:
    """Return the costs of an example's decoding, in seconds on an A100; all sequences are at the same position."""
    return PassSeconds({role: _roofline(role) for role in ("target", "draft")}, prompt=x["prompt"], batch=x["sequences"])


def steps(x: Example) -> Steps:
    """Return the steps of an example's decoding."""
    return algorithm.decode(parameters_of(x), PROMPT, len(x["accept"]) if "accept" in x else x["tokens"], stop_tokens(x))


def world(x: Example) -> World:
    """Return the simulated answers of the model in an example's decoding."""
    known = survivors({"draft_length": x["draft_length"], "accept": x["accept"]})
    return World(1, LAYERS, drafts={EARLY_LAYERS: DraftOutcomes("target", known)})


def play(x: Example) -> Run:
    """Simulate an example's decoding."""
    return simulate(steps(x), len(x["accept"]), Cluster(1), cost(x), world(x))


def formula(x: Example) -> LongContextRounds:
    """Return the closed form of an example."""
    tokens = 1 + x["accepted"] * x["draft_length"]
    target, draft = (AffinePass(*x[name]) for name in ("target", "draft"))
    return LongContextRounds(target, draft, x["draft_length"], tokens, x["context"], x["budget"])


def _law_of_text(x: Example, limited: bool = False) -> Any:
    named = {"target": models(x)["target"], EARLY_LAYERS: models(x)["draft"]}
    return law_of_text(lambda: _limited(steps(x), x["context_budget"]) if limited else steps(x), named, PROMPT, x["tokens"], LAYERS)


def _limited(made: Steps, budget: int) -> Steps:
    """The same steps, all of whose passes have the budget."""
    answer: Any = None
    while True:
        try:
            step = made.send(answer)
        except StopIteration:
            return
        answer = yield step._replace(context_budget=budget) if isinstance(step, Forward) else step


THEOREMS = theorem.all()
