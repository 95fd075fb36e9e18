"""Theorems on self-speculative decoding: when an exit pays, what reused states save, agreement of all views, exactness of the text.

An example of the formulas has an acceptance rate, a draft length, layers and an exit layer; one of a decoding has the fields of
`drafting_examples`, `exit_layer`, `reuse` and, where states are not reused, `skipped_layers` and `first_skipped`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.simulated_answers import EARLY_LAYERS, DraftOutcomes, World
from model.methods.self_speculative import algorithm
from model.methods.self_speculative import paths as sampler
from model.methods.self_speculative import theory as self_speculative
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from model.steps import Steps
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import (
    PROMPT,
    drafted,
    drafting,
    models,
    pairs,
    repeated_outcomes,
    rounds,
    short_decodings,
    stop_tokens,
    target_law,
)
from sim.theorems.output_law import distance, greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, chances, integers, law, paths, rates, rounding, size, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("self_speculative")
_DEPTHS = (2, 3, 4, 6)


# --- Examples ---


def _laws(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    shares = st.builds(
        lambda layers, part: {"layers": layers, "exit_layer": 1 + part % (layers - 1)}, integers(2, 12), integers(0, 60)
    )
    given = st.fixed_dictionaries({"acceptance_rate": rates(), "draft_length": integers(1, 8), **fields})
    return st.builds(lambda x, share: x | share, given, shares)


def _widths() -> SearchStrategy[Example]:
    """Draw costs of passes over up to nine tokens, in quarters of a plain pass, which never fall."""
    steps = st.lists(integers(0, 3), min_size=8, max_size=8)
    return _laws(verify_cost=steps.map(lambda more: [[1 + at, 1 + sum(more[:at]) / 4] for at in range(9)]))


def _decodings(costs: str = "plain", **fields: Any) -> SearchStrategy[Example]:
    more = {
        "depth": st.sampled_from(_DEPTHS), "part": integers(0, 5), "reuse": st.booleans(), "early_head": integers(0, 4),
        "skip": integers(0, 8),
    }  # fmt: skip
    return drafting(9, 4, **(more | fields)).map(lambda x: _with_layers(x, costs))


def _all_outcomes() -> SearchStrategy[Example]:
    known = short_decodings(6, 3, law="any").filter(lambda x: "survival" not in x["law"])
    given = st.builds(
        lambda x, depth, part, reuse, skip, early_head: {
            **x, "depth": depth, "part": part, "reuse": reuse, "skip": skip, "early_head": early_head,
        },
        known, st.sampled_from(_DEPTHS), integers(0, 5), st.booleans(), integers(0, 8), integers(0, 4),
    )  # fmt: skip
    return given.map(lambda x: _with_layers(x, "tenths"))


def _models(sampled: bool) -> SearchStrategy[Example]:
    given = pairs(4, 3, depth=st.sampled_from(_DEPTHS), part=integers(0, 5), reuse=st.booleans(), skip=integers(0, 8))
    return given.map(lambda x: _with_layers({**x, "sampled": sampled}, "plain"))


def _with_layers(x: Example, costs: str) -> Example:
    """Choose the layers and their times: equal, or unequal in whole numbers or in tenths; passes over more tokens take longer."""
    layers, unit = x["depth"], 10 if costs == "tenths" else 4
    chosen = ("placement", "draft_layers", "cost", "depth", "part", "early_head", "skip")
    kept = {name: value for name, value in x.items() if name not in chosen}
    of: dict[str, Any] = {}
    if costs != "plain":
        of = {"layer_times": [1 + (layer * x["part"]) % 3 / (unit if costs == "tenths" else 1) for layer in range(layers)],
              "early_head": float(x["early_head"]), "verify_cost": [[1, 1.0], [2, 1.25], [6, 2.25]]}  # fmt: skip
        if costs == "tenths":
            of["verify_cost"] = [[1, 1.0], [2, 1.1], [6, 1.7]]
    return kept | {"layers": layers, **_drafting_layers(x, layers), "cost": of}


def _drafting_layers(x: Example, layers: int) -> Example:
    """Choose the exit and, where states are not reused, skipped layers: also such that the model's own head drafts."""
    exit_layer, skip = 1 + x["part"] % (layers - 1), x["skip"]
    if x["reuse"] or not skip:
        return {"exit_layer": exit_layer}
    exit_layer += skip % 2
    count = min(1 + skip // 3, exit_layer - 1)
    if not count:
        return {"exit_layer": min(exit_layer, layers - 1)}
    return {"exit_layer": exit_layer, "skipped_layers": count, "first_skipped": skip % (exit_layer - count + 1)}


# --- 14: exactness of the text ---


@theorem("14a", "The sampled text has exactly the target's distribution.",
         source="drafted tokens are tested as in speculative decoding", given=lambda: _models(sampled=True))
def right_law(x: Example) -> None:
    want, law = target_law(x), _law_of_text(x)
    if law != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(law, want)}")


@theorem("14b", "The greedy text is that of the target.", source="[Elhoushi2024]", given=lambda: _models(sampled=False))
def right_text(x: Example) -> None:
    equal("generated text", [*_law_of_text(x)], [greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))])


@theorem("14c", "The text of the exit head alone has the target's distribution.", source="false: it must be verified",
         given=lambda: _models(sampled=True), expect="fails")
def draft_law(x: Example) -> None:
    equal("distribution of the text", _law_of_text({**x, "target": x["draft"]}), target_law(x))


# --- 20: when an exit pays ---


@theorem("20a", "Where passes take the same time for any number of tokens, the speed-up is that of a draft model that takes the"
         " share of the first layers, with reused states and without.", source="gamma e + L layer-times in both", given=_laws)
def as_a_draft_model(x: Example) -> None:
    share = x["exit_layer"] / x["layers"]
    of_model = float(speculative.speedup(x["acceptance_rate"], x["draft_length"], share))
    for reuse in (True, False):
        found = float(self_speculative.speedup(x["acceptance_rate"], x["draft_length"], share, reuse=reuse))
        equal(f"speed-up with reuse = {reuse}", found, of_model, CLOSE)


@theorem("20b", "There an exit is faster than plain decoding at some draft length exactly if its acceptance rate exceeds the"
         " share of its layers.", source="Corollary 3.9 of [Leviathan2023] with c = e / L", given=_laws)
def an_exit_pays(x: Example) -> None:
    share = x["exit_layer"] / x["layers"]
    faster = any(float(self_speculative.speedup(x["acceptance_rate"], length, share)) > 1 + CLOSE for length in range(1, 60))
    equal("pays", faster, bool(self_speculative.ever_pays(x["acceptance_rate"], share)))


@theorem("20c", "An exit that is accepted more often than the share of its layers is faster, also where passes over more tokens"
         " take longer.",
         source="false: verifying takes longer", given=_widths, expect="fails")
def an_exit_always_pays(x: Example) -> None:
    share = x["exit_layer"] / x["layers"]
    if self_speculative.ever_pays(x["acceptance_rate"], share):
        speeds = [
            float(self_speculative.speedup(x["acceptance_rate"], length, share, verify_cost=_curve(x))) for length in range(1, 9)
        ]
        at_most("plain decoding", 1.0, max(speeds))


@theorem("20d", "Reused states save s (v(gamma + 1) - 1) of a plain pass in every round: never a loss.",
         source="the two verifications", given=_widths)
def what_reuse_saves(x: Example) -> None:
    share, length = x["exit_layer"] / x["layers"], x["draft_length"]
    again, reused = (
        float(self_speculative.round_time(length, share, reuse=reuse, verify_cost=_curve(x))) for reuse in (False, True)
    )
    wide = dict(_curve(x))[length + 1]
    equal("saved", again - reused, share * (wide - 1), CLOSE)
    at_most("time with reuse", reused, again, CLOSE)


@theorem("20e", "Reused states save time also where passes take the same time for any number of tokens.",
         source="false: the last drafted token goes through the first layers alone", given=_laws, expect="fails")
def reuse_always_saves(x: Example) -> None:
    share = x["exit_layer"] / x["layers"]
    again, reused = (float(self_speculative.round_time(x["draft_length"], share, reuse=reuse)) for reuse in (False, True))
    if not reused < again - CLOSE:
        raise AssertionError(f"a round takes {reused} with reuse and {again} without")


@theorem("20f", "The best exit is the fastest of all exit layers and draft lengths.", source="enumeration", given=_laws)
def best_of_all(x: Example) -> None:
    by_layer = [(x["acceptance_rate"] * (layer + 1) / x["layers"]) ** 0.5 for layer in range(x["layers"] - 1)]
    found = self_speculative.best_exit(by_layer, x["layers"], longest=8)
    speeds = [
        float(self_speculative.speedup(rate, length, (layer + 1) / x["layers"]))
        for layer, rate in enumerate(by_layer) for length in range(9)
    ]  # fmt: skip
    equal("speed-up", found.speedup, max(speeds), CLOSE)
    own = float(self_speculative.speedup(by_layer[found.exit_layer - 1], found.draft_length, found.exit_layer / x["layers"]))
    equal("speed-up of the exit that is named", own, found.speedup, CLOSE)


@theorem("20g", "The formula gives the mean and variance of the time, and mean rounds and drafted tokens.",
         source="enumeration of all outcomes", given=_all_outcomes)
def moments_over_all_outcomes(x: Example) -> None:
    outcomes = paths(x["tokens"] - 1)
    mass = chances(law(x["law"]), outcomes).tolist()
    runs = [play({**x, "accept": [*row, False]}) for row in outcomes.T.tolist()]
    prediction = self_speculative.predict(parameters_of(x), x["tokens"], law(x["law"]), cost(x))

    def mean(values: list[float]) -> float:
        return math.fsum(chance * value for chance, value in zip(mass, values, strict=True))

    time = mean([run.latency for run in runs])
    equal("latency", float(prediction.latency), time, CLOSE)
    square = float(prediction.latency_variance) + time**2
    equal("mean square of the latency", square, mean([run.latency**2 for run in runs]), CLOSE)
    equal("compute", float(prediction.busy), mean([run.busy for run in runs]), CLOSE)
    for what, value, of in (("rounds", prediction.rounds, rounds), ("drafted tokens", prediction.drafted, drafted)):
        assert value is not None
        equal(what, float(value), mean([of(run) for run in runs]), CLOSE)
    counted = self_speculative.work(parameters_of(x), x["tokens"], law(x["law"]))
    assert counted is not None
    for name, value in counted.by_model["target"]._asdict().items():
        of_runs = mean([float(getattr(run.account.totals().by_model["target"], name)) for run in runs])
        equal(name, float(value), of_runs, CLOSE)


@theorem("20h", "For many tokens the speed-up tends to the formula of one round.", source="renewal", given=_laws)
def many_tokens(x: Example) -> None:
    alpha, gamma, n, layers = x["acceptance_rate"], x["draft_length"], 400, x["layers"]
    parameters = algorithm.Parameters(layers, x["exit_layer"], gamma)
    prediction = self_speculative.predict(parameters, n, Iid(alpha), UnitCost(layers))
    per_round = float(speculative.expected_tokens(alpha, gamma))
    limit = float(self_speculative.speedup(alpha, gamma, x["exit_layer"] / layers))
    found = float(prediction.plain_latency / prediction.latency)
    at_most("difference to the limit", abs(found / limit - 1), 2 * (gamma + per_round + 1) / n)


@theorem("20i", "With an early head, or where passes over more tokens take longer, no round is faster than the gamma passes of the"
         " drafting layers and one of all layers.",
         source="20a with costs that are not negative", given=lambda: _decodings("whole"))
def rounds_are_no_shorter(x: Example) -> None:
    run, given = play(x), parameters_of(x)
    plain = float(cost(x).plain_times())
    early = float(sum(sum(x["cost"]["layer_times"][first:last]) for first, last in given.early.ranges))
    least = sum(count * (plain + number * early) for (_, number), count in run.rounds.items())
    at_most("time of the rounds without heads and widths", least, run.latency, rounding(x))


# --- 28: agreement of the views ---


@theorem("28d", "Events and paths agree exactly on every path, with costs in quarters of a layer.", source="no contention",
         given=lambda: _decodings("whole"))
@theorem("28e", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: _decodings("tenths"))
def events_are_paths(x: Example) -> None:
    run, n = play(x), size(x)
    tally = sampler.walk(parameters_of(x), n, cost(x), repeated_outcomes(x["accept"][: n - 1]))
    equal("latency", float(tally.time[0]), run.latency, CLOSE)
    equal("compute", float(tally.busy[0]), run.busy, CLOSE)
    equal("rounds and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))


@theorem("28h", "Events and counter generate the text of plain decoding, with equal passes.", source="exactness",
         given=lambda: _decodings("tenths"))
def plain_text(x: Example) -> None:
    run, n = play(x), size(x)
    work = interpreter.count(steps(x), world(x), n)
    equal("text", run.tokens, [*range(1, n + 1)])
    equal("text of the counter", work.tokens, run.tokens)
    equal("passes", run.account.totals(), work.account.totals())
    equal("rounds", run.rounds, work.rounds)


@theorem("20j", "Where layers take equal times, it does not matter for the time which layers a draft skips.",
         source="as many layers are run", given=_decodings)
def any_layers_skipped(x: Example) -> None:
    given, run = parameters_of(x), play(x)
    if given.skipped_layers:
        for first in range(given.exit_layer - given.skipped_layers + 1):
            equal(f"latency with layers from {first} on skipped", play({**x, "first_skipped": first}).latency, run.latency, CLOSE)


@theorem("20k", "It never matters for the time which layers a draft skips.", source="false: layers take different times",
         given=lambda: _decodings("whole", reuse=st.just(False), skip=integers(1, 8)), expect="fails")
def any_unequal_layers_skipped(x: Example) -> None:
    any_layers_skipped(x)


@theorem("28k", "With reused states a round of gamma drafted tokens runs gamma + 1 tokens through every layer; without, gamma of"
         " them twice through the drafting layers.", source="keys and values of the first layers are kept", given=_decodings)
def layers_of_rounds(x: Example) -> None:
    run, given = play(x), parameters_of(x)
    target = run.account.totals().by_model["target"]
    early = given.drafting_layers
    expected = 0
    for (_, number), count in run.rounds.items():
        passed = number + 1 if given.reuse or not number else 2 * number + 1
        expected += count * (passed * early + (number + 1) * (given.layers - early))
    equal("layers run by tokens", target.layer_passes, expected)


@theorem("28l", "One event per pass and one event per layer give the same run, to rounding.", source="layers run in turn",
         given=lambda: _decodings("tenths"))
def layer_by_layer(x: Example) -> None:
    whole, each = play(x), play(x, per_layer=True)
    equal("latency", each.latency, whole.latency, CLOSE)
    equal("tokens", each.tokens, whole.tokens)


# --- 29: outcomes by position ---


@theorem("29a", "An acceptance in place of a rejection never increases the rounds.",
         source="the start of the next round is monotone in every outcome", given=lambda: _decodings(at=integers(0, 39)))
def acceptance_in_place_of_a_rejection(x: Example) -> None:
    at = x["at"] % size(x)
    better = {**x, "accept": [*x["accept"][:at], True, *x["accept"][at + 1 :]]}
    at_most("rounds with one more acceptance", rounds(play(better)), rounds(play(x)))


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example's decoding."""
    chosen = {name: x[name] for name in ("skipped_layers", "first_skipped", "sampled") if name in x}
    return algorithm.Parameters(x["layers"], x["exit_layer"], x["draft_length"], x["reuse"], **chosen)


def cost(x: Example) -> UnitCost:
    """Return the cost model of an example."""
    given = dict(x["cost"])
    if "layer_times" in given:
        given["layer_times"] = tuple(given["layer_times"])
        given["verify_cost"] = tuple((width, time) for width, time in given["verify_cost"])
    return UnitCost(x["layers"], **given)


def steps(x: Example) -> Steps:
    """Return the steps of an example's decoding."""
    return algorithm.decode(parameters_of(x), PROMPT, size(x) if "accept" in x else x["tokens"], stop_tokens(x))


def world(x: Example) -> World:
    """Return the simulated answers of the model in an example's decoding."""
    known = survivors({"draft_length": x["draft_length"], "accept": x["accept"]})
    return World(1, x["layers"], drafts={EARLY_LAYERS: DraftOutcomes("target", known)})


def play(x: Example, *, per_layer: bool = False) -> Run:
    """Simulate an example's decoding."""
    return simulate(steps(x), size(x), Cluster(1), cost(x), world(x), per_layer=per_layer)


def _law_of_text(x: Example) -> Any:
    named = {"target": models(x)["target"], EARLY_LAYERS: models(x)["draft"]}
    return law_of_text(lambda: steps(x), named, PROMPT, x["tokens"], x["layers"])


def _curve(x: Example) -> list[tuple[int, float]]:
    return [(int(width), float(time)) for width, time in x["verify_cost"]]


THEOREMS = theorem.all()
