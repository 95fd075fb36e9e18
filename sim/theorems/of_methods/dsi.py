"""Theorems on DSI: exactness of the text, agreement of all views, and its claim that it is never slower than both rivals.

An example of the formulas has an acceptance rate, a lookahead, a number of replicas, a cost ratio and a link time; one of a
decoding has the fields of `drafting_examples`, with the lookahead as `draft_length`, and `verifiers`.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.dsi import algorithm
from model.methods.dsi import paths as sampler
from model.methods.dsi import theory as dsi
from model.methods.speculative import theory as speculative
from model.outcomes.outcome_laws import Iid
from model.steps import Steps
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems import pipelined_examples
from sim.theorems.drafting_examples import (
    PROMPT,
    all_decodings,
    drafted,
    drafting,
    equal_work,
    models,
    pairs,
    repeated_outcomes,
    rounds,
    short_decodings,
    stop_tokens,
    target_law,
    untied,
)
from sim.theorems.of_methods.pearl import in_turn
from sim.theorems.output_law import distance, greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, cost, integers, law, rounding, size, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("dsi")
MANY_PASSES = 400
"""Passes of a speculation that are enumerated: later ones have a probability below 1e-8 at the rates drawn here."""


# --- Examples ---


def _laws(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    some = {"acceptance_rate": integers(0, 19).map(lambda twentieths: twentieths / 20), "lookahead": integers(1, 6),
            "verifiers": integers(1, 5), "cost_ratio": integers(1, 8).map(lambda eighths: eighths / 8),
            "link": integers(0, 8).map(lambda quarters: quarters / 4)}  # fmt: skip
    return st.fixed_dictionaries({**some, **fields})


def _decodings(costs: str = "plain", *, cluster: bool = False, wide: bool = True, **fields: Any) -> SearchStrategy[Example]:
    """Draw decodings; without `wide`, passes take the same time for any number of tokens."""
    return drafting(9, 4, costs=costs, **({"verifiers": integers(1, 5)} | fields)).map(lambda x: _adapted(x, wide)).flatmap(
        lambda x: _clusters(x) if cluster else st.just(x)
    )


def _clusters(x: Example) -> SearchStrategy[Example]:
    from sim.engine.cluster import LINKS, STOPS

    some = {"units": integers(1, x["verifiers"] + 2), "links": st.sampled_from(LINKS), "stop": st.sampled_from(STOPS)}
    return st.fixed_dictionaries(some).map(lambda cluster: {**x, "cluster": cluster})


def _adapted(x: Example, wide: bool = True) -> Example:
    """Draw a lookahead of at least 1, no placement, and times of passes up to the widest one, which grow by 1 per token."""
    found = {name: value for name, value in x.items() if name != "placement"} | {"draft_length": max(x["draft_length"], 1)}
    if "cost" in found:
        given = dict(found["cost"])
        curve = given.pop("verify_cost", None)
        if curve and wide:
            width, time = curve[-1]
            given["verify_cost"] = [*curve, [width + WIDEST, time + WIDEST]]
        found["cost"] = given
    return found


WIDEST = 20
"""Widest pass of the decodings drawn here: replicas times lookahead."""


def _free_links(x: Example) -> Example:
    return {**x, "cost": {name: value for name, value in x.get("cost", {}).items() if name != "link"}}


def _with_needed(x: Example, more: int = 0) -> Example:
    """Reserve the number of replicas that passes need which start every L drafted tokens."""
    prices = cost(x)
    ratio, link = float(prices.draft_times()) / prices.target_pass, prices.link / prices.target_pass
    needed = dsi.needed_verifiers(x["draft_length"], ratio, link) if ratio else size(x)
    return {**x, "verifiers": min(int(needed) + more, size(x))}


def _with_enough(x: Example) -> Example:
    """Reserve one replica more: at the end of the sequence, the last pass starts before L further tokens are drafted."""
    return _with_needed(x, more=1)


def _quick(x: Example) -> bool:
    """True if drafting `lookahead` tokens takes no longer than a pass."""
    prices = cost(x)
    return bool(x["draft_length"] * float(prices.draft_times()) <= prices.target_pass)


def _ideal(**fields: Any) -> SearchStrategy[Example]:
    """Draw what the paper assumes: free links, quick drafts, and passes that take the same time for any number of tokens."""
    return _decodings("whole", wide=False, **fields).map(_free_links).filter(_quick)


def _of_models(sampled: bool) -> SearchStrategy[Example]:
    return pairs(4, 3, verifiers=integers(1, 3)).map(lambda x: _adapted({**x, "sampled": sampled}))


def _all_outcomes() -> SearchStrategy[Example]:
    known = short_decodings(6, 3, costs="tenths", law="any").filter(lambda x: "survival" not in x["law"]).map(_adapted)
    return st.builds(lambda x, verifiers: {**x, "verifiers": verifiers}, known, integers(1, 4))


def _pipelines() -> SearchStrategy[Example]:
    """Draw outcomes of both methods, and an exit layer."""
    def with_exit(layers: int) -> SearchStrategy[Example]:
        outcomes = st.lists(st.booleans(), min_size=1, max_size=7)
        return st.fixed_dictionaries({"layers": st.just(layers), "exit_layer": integers(1, layers), "outcomes": outcomes})

    return integers(1, 6).flatmap(with_exit)


def _depths() -> SearchStrategy[Example]:
    """Draw decodings with the depths of both models, the draft model no deeper than the target."""
    return _decodings(layers=integers(1, 5), draft_layers=integers(1, 5)).filter(lambda x: x["draft_layers"] <= x["layers"])


# --- 14: exactness of the text ---


@theorem("14a", "The sampled text has exactly the target's distribution.", source="[Timor2024]: lossless",
         given=lambda: _of_models(sampled=True))
def right_law(x: Example) -> None:
    want = target_law(x)
    found = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    if found != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(found, want)}")


@theorem("14b", "The greedy text is that of the target.", source="[Timor2024]: lossless", given=lambda: _of_models(sampled=False))
def right_text(x: Example) -> None:
    found = law_of_text(lambda: in_turn(steps(x)), models(x), PROMPT, x["tokens"])
    equal("generated text", [*found], [greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))])


# --- 20: closed forms ---


@theorem("20a", "With lookahead 1, enough replicas and free links, l tokens take c alpha (l - 1) + (1 - alpha) (l - 1) + 1 passes.",
         source="an accepted token takes a draft pass, another one a pass of the target",
         given=lambda: _laws(tokens=integers(1, 30)))
def at_lookahead_one(x: Example) -> None:
    alpha, c, n = x["acceptance_rate"], x["cost_ratio"], x["tokens"]
    parameters = algorithm.Parameters(1, 1, int(dsi.needed_verifiers(1, c)))
    found = dsi.predict(parameters, n, Iid(alpha), UnitCost(1, cost_ratio=c))
    equal("latency", float(found.latency), float(dsi.expected_latency(alpha, c, n)), CLOSE)


@theorem("20b", "The speed-up for many tokens is that of the mean speculation, with its passes queueing for replicas one by one.",
         source="renewal at rejections", given=_laws)
def mean_speculation(x: Example) -> None:
    alpha, ahead, count, c, link = (x[name] for name in ("acceptance_rate", "lookahead", "verifiers", "cost_ratio", "link"))
    free = [0.0] * count  # time at which each replica has returned its result
    mean, reached = 0.0, 1.0
    for number in range(MANY_PASSES):
        first = min(range(count), key=free.__getitem__)
        free[first] = returned = max(number * ahead * c, free[first]) + link + 1 + link
        # This pass finds the rejection if all tokens that earlier passes verify are accepted, and one of its own is not.
        goes_on = reached * alpha ** (ahead if number else 1)
        mean += (reached - goes_on) * returned
        reached = goes_on
    equal("time per token", 1 / float(dsi.speedup(alpha, ahead, count, c, link)), (1 - alpha) * mean, 1e-6)


@theorem("20c", "The formula gives the mean and variance of the time, and mean GPU-time, rounds and drafted tokens.",
         source="a chain over restarts", given=_all_outcomes)
def moments_over_all_outcomes(x: Example) -> None:
    mass, runs = all_decodings(x, play)
    prediction = dsi.predict(parameters_of(x), x["tokens"], law(x["law"]), cost(x))

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


@theorem("20e", "The formula gives the mean work of both models: passes, tokens, and positions attended to and read, with what is"
         " made in vain.", source="a chain over restarts", given=lambda: _all_outcomes().map(untied))
def work_over_all_outcomes(x: Example) -> None:
    work = dsi.timed_work(parameters_of(x), x["tokens"], [law(x["law"])], cost(x))
    assert work is not None
    equal_work(work.at(0), *all_decodings(x, play), CLOSE)


@theorem("20d", "At lookahead 1, with enough replicas and free links, DSI takes as long on every path as Predictive Pipelined"
         " Decoding in its nested form with an early exit at the layer c d.", source="both start the next token after c d layers",
         given=_pipelines)
def as_nested_pipelines(x: Example) -> None:
    layers, exit_layer, outcomes = x["layers"], x["exit_layer"], x["outcomes"]
    given = {"draft_length": 1, "verifiers": len(outcomes), "layers": layers, "cost": {"cost_ratio": exit_layer / layers}}
    pipelined = {"form": "nested", "layers": layers, "exit_layer": exit_layer, "candidates": 1, "matches": outcomes}
    nested = pipelined_examples.play(pipelined)
    equal("latency", play({**given, "accept": outcomes}).latency, nested.latency, CLOSE)


# --- 21: finite replicas and links ---


@theorem("21a", "With ceil((t + 2 x) / (L t_draft)) + 1 replicas, t the time of a pass and x the link time, no pass waits: further"
         " replicas change no token time.", source="passes start every L drafted tokens, but for the last one",
         given=lambda: _decodings("whole", wide=False).map(_with_enough))
@theorem("21b", "With ceil(t / (L t_draft)) replicas and free links no pass waits: further replicas change no token time.",
         source="[Timor2024], Section 3.1; false: the last pass, over the tokens left, starts sooner than after L drafted tokens",
         given=lambda: _ideal().map(_with_needed), expect="fails")
def more_replicas_change_nothing(x: Example) -> None:
    more = play(x, verifiers=x["verifiers"] + 1)
    equal("number of tokens at each commit", [count for *_, count in more.commits], [count for *_, count in play(x).commits])
    for one, other in zip(more.commits, play(x).commits, strict=True):
        equal("time of a commit", one[0], other[0], 1e-12)


@theorem("21c", "If passes take the same time for any number of tokens, a further replica never makes a decoding slower.",
         source="each pass is sent no later", given=lambda: _decodings("whole", wide=False))
@theorem("21d", "A further replica never makes a decoding slower.",
         source="false: it reads more tokens per pass, those that the others read", given=lambda: _decodings("whole"),
         expect="fails")
def more_replicas_are_not_slower(x: Example) -> None:
    at_most("latency", play(x, verifiers=x["verifiers"] + 1).latency, play(x).latency, 1e-12)


@theorem("21e", "With enough replicas a link adds two link times per speculation, on every path.",
         source="only the deciding pass's way and its result's are waited for",
         given=lambda: _decodings("whole", wide=False).filter(lambda x: cost(x).link > 0 and _no_wait(x)).map(_with_enough))
def links_add_two_per_speculation(x: Example) -> None:
    accept = x["accept"][:-1]
    speculations = 1 + sum(not kept for kept in accept)
    free = play(_free_links(x)).latency
    equal("latency", play(x).latency, free + 2 * cost(x).link * speculations, 1e-12)


def _no_wait(x: Example) -> bool:
    """True if a draft pass takes no longer than one of the target, so that no decision waits for a drafted token."""
    return float(cost(x).draft_times()) <= cost(x).target_pass


@theorem("21f", "At most as many units are busy as there are replicas, and the draft model's.",
         source="a unit makes one pass at a time",
         given=lambda: _decodings("tenths"))
def units_are_not_exceeded(x: Example) -> None:
    run = play(x, record=True, cluster={"units": x["verifiers"] + 3})
    at_most("busy units", run.peak_units, x["verifiers"] + 1)
    used = {row.unit for row in run.intervals if row.unit >= 0 and row.role == "target"}
    at_most("last unit of the target", max(used), x["verifiers"])
    at_most("first unit of the target", 1, min(used))


# --- 22: never slower than both rivals ---


@theorem("22a", "With free links, and drafts of L tokens that take no longer than a pass, DSI is never slower than plain decoding,"
         " on any path and with any number of replicas.", source="[Timor2024], Theorem 1, there with enough replicas", given=_ideal)
@theorem("22b", "DSI is never slower than plain decoding.", source="false: each rejection waits for two links",
         given=lambda: _decodings("whole", wide=False).filter(_quick), expect="fails")
@theorem("22c", "With free links DSI is never slower than plain decoding.",
         source="false: if drafts of L tokens take longer than a pass, its tokens wait for them",
         given=lambda: _decodings("whole", wide=False).map(_free_links), expect="fails")
@theorem("22d", "With free links and quick drafts, DSI is never slower than plain decoding if passes over more tokens take longer.",
         source="false: the pass that finds a rejection has also read the rejected tokens",
         given=lambda: _decodings("whole").map(_free_links).filter(_quick), expect="fails")
def never_slower_than_plain(x: Example) -> None:
    at_most("latency", play(x).latency, size(x) * cost(x).target_pass, rounding(x))


@theorem("22e", "With free links, quick drafts and enough replicas, DSI with lookahead L is never slower than speculative decoding"
         " with drafts of L tokens, on any path.", source="[Timor2024], Theorem 2, there in expectation",
         given=lambda: _ideal().map(_with_enough))
@theorem("22f", "With free links, quick drafts and ceil(t / (L t_draft)) replicas, DSI with lookahead L is never slower than"
         " speculative decoding with drafts of L tokens, on any path.", source="false: 21b, at the end of the sequence",
         given=lambda: _ideal().map(_with_needed), expect="fails")
@theorem("22g", "With free links and quick drafts, DSI with lookahead L is never slower than speculative decoding with drafts of L"
         " tokens.", source="false: with too few replicas its passes wait", given=_ideal, expect="fails")
@theorem("22h", "With enough replicas, DSI with lookahead L is never slower than speculative decoding with drafts of L tokens on"
         " one unit.", source="false: each rejection waits for two links",
         given=lambda: _decodings("whole", wide=False).filter(_quick).map(_with_enough), expect="fails")
def never_slower_than_speculative(x: Example) -> None:
    alone = {name: value for name, value in _free_links(x).items() if name not in ("verifiers", "cluster")}
    at_most("latency", play(x).latency, pipelined_examples.play(alone).latency, rounding(x))


@theorem("22i", "For many tokens, with free links, quick drafts and enough replicas, DSI is never slower than speculative decoding"
         " with drafts of at least L tokens.", source="both times are linear in c, so c = 0 and c = 1 / L decide",
         given=lambda: _expected(above=True))
@theorem("22j", "For many tokens, with free links, quick drafts and enough replicas, DSI is never slower than speculative decoding"
         " with drafts of any length.", source="false: shorter drafts are verified sooner", given=lambda: _expected(above=False),
         expect="fails")
def faster_in_expectation(x: Example) -> None:
    alpha, ahead, c = x["acceptance_rate"], x["lookahead"], x["cost_ratio"]
    ours = float(dsi.speedup(alpha, ahead, int(dsi.needed_verifiers(ahead, c)), c))
    at_most("speed-up of speculative decoding", float(speculative.speedup(alpha, x["draft_length"], c)), ours, CLOSE)


def _expected(*, above: bool) -> SearchStrategy[Example]:
    """Draw L tokens that take one to four quarters of a pass to draft, and drafts of another length, or of at least L tokens."""
    some = {"acceptance_rate": integers(0, 19).map(lambda twentieths: twentieths / 20), "lookahead": integers(1, 16),
            "quarters": integers(1, 4), "more": integers(0, 15)}  # fmt: skip
    return st.fixed_dictionaries(some).map(lambda x: {
        "acceptance_rate": x["acceptance_rate"], "lookahead": x["lookahead"], "cost_ratio": x["quarters"] / 4 / x["lookahead"],
        "draft_length": x["lookahead"] + x["more"] if above else 1 + x["more"],
    })  # fmt: skip


# --- 28: agreement of the views ---


@theorem("28a", "Busy time is the sum of the intervals on units; nothing ever waits for a unit.", source="conservation",
         given=lambda: _decodings("tenths"))
def busy_time(x: Example) -> None:
    run = play(x, record=True)
    held = sum(row.end - row.start for row in run.intervals if row.unit >= 0)
    equal("busy time", run.busy, held, 1e-12)
    at_most("busy time", run.busy, parameters_of(x).units * run.latency, 1e-12)
    at_most("waited", run.waiting_time, 1e-9)
    equal("passes of the draft model not on the first unit",
          sum(row.role == "draft" and row.unit != 0 for row in run.intervals if row.unit >= 0), 0)  # fmt: skip


@theorem("28d", "Events and paths agree exactly on every path, with costs in quarters of a pass of the target.",
         source="no contention", given=lambda: _decodings("whole"))
@theorem("28e", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: _decodings("tenths"))
def events_are_paths(x: Example) -> None:
    run, n = play(x), size(x)
    tally = sampler.walk(parameters_of(x), n, cost(x), repeated_outcomes(x["accept"][: n - 1]))
    within = 1e-12 if rounding(x) else 0.0
    equal("latency", float(tally.time[0]), run.latency, within)
    equal("compute", float(tally.busy[0]), run.busy, within)
    equal("rounds and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))


@theorem("28h", "Events and counter generate the text of plain decoding, with the same rounds, on any cluster.",
         source="exactness", given=lambda: _decodings("tenths", cluster=True))
def plain_text(x: Example) -> None:
    run, n = play(x), size(x)
    work = interpreter.count(steps(x), world(x), n)
    equal("text", run.tokens, [*range(1, n + 1)])
    equal("text of the counter", work.tokens, run.tokens)
    equal("rounds", run.rounds, work.rounds)


@theorem("28i", "If every layer of both models takes the same time, events and counter make the same passes, with those that are"
         " stopped.",
         source="the counter's clock", given=_depths)
def same_passes(x: Example) -> None:
    run = play({**x, "cost": {"cost_ratio": x["draft_layers"] / x["layers"]}})
    equal("passes", run.account.totals(), interpreter.count(steps(x), world(x), size(x)).account.totals())


# --- 29: outcomes by position ---


@theorem("29a", "With quick drafts, and passes that take the same time for any number of tokens, an acceptance in place of a"
         " rejection never takes longer.", source="the passes of the next speculation have begun before it",
         given=lambda: _decodings("whole", wide=False, at=integers(0, 39)).filter(_quick))
@theorem("29b", "An acceptance in place of a rejection never takes longer.",
         source="false: the next token may wait for drafts of L tokens", given=lambda: _decodings("whole", at=integers(0, 39)),
         expect="fails")
def acceptance_takes_no_longer(x: Example) -> None:
    at = x["at"] % size(x)
    better = [*x["accept"][:at], True, *x["accept"][at + 1 :]]
    at_most("latency with one more acceptance", play(x, accept=better).latency, play(x).latency, 1e-12)


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example's decoding."""
    names = ("layers", "sampled", "draft_layers", "verifiers")
    table = {"layers": 1, "lookahead": x["draft_length"]} | {name: x[name] for name in names if name in x}
    return algorithm.Parameters(**table)


def steps(x: Example) -> Steps:
    """Return the steps of an example's decoding."""
    return algorithm.decode(parameters_of(x), PROMPT, size(x) if "accept" in x else x["tokens"], stop_tokens(x))


def world(x: Example) -> World:
    """Return the simulated answers of the models in an example's decoding."""
    known = survivors({"draft_length": parameters_of(x).most_unverified, "accept": x["accept"]})
    return World(1, parameters_of(x).layers, drafts={"draft": DraftOutcomes("target", known)})


def play(x: Example, *, record: bool = False, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`."""
    x = {**x, **changes}
    cluster = Cluster(**x["cluster"]) if "cluster" in x else Cluster(parameters_of(x).units)
    return simulate(steps(x), size(x), cluster, cost(x), world(x), record=record)


THEOREMS = theorem.all()
