"""Theorems on context budgets of draft models, for every method that has one: agreement of the views, and exactness of the text.

An example has `method`, a name in `DRAFTING`, `draft_length`, and outcomes by position: `accept`, whether the drafted token is the
target's, and `medium_accept`, whether the small model's is that of the medium one. Times are those of a roofline with `prompt`
cached positions; draft passes read at most `context_budget` of them (of the medium model `medium_context_budget`), None: all.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from model.architectures.published_shapes import preset
from model.costs.pass_seconds import PassSeconds
from model.hardware.devices import device
from model.hardware.roofline import Roofline
from model.interpret import interpreter
from model.methods import registry
from model.methods.method_parameters import MethodParameters
from model.methods.worlds import world_of
from model.outcomes.outcome_laws import ByPosition
from model.outcomes.position_ranks import RecordedPositionRanks
from model.outcomes.random_streams import BLOCK
from model.outcomes.rank_laws import ReplayedRanks
from model.steps import Steps
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import PROMPT, model, pairs, repeated_outcomes, stop_tokens, target_law
from sim.theorems.of_methods import amusd, pearl, ssd
from sim.theorems.output_law import TextLaw, distance, greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, integers, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("self_speculative")
LAYERS = 4
_BUDGETS = "context_budget", "medium_context_budget"


class BudgetedMethod(NamedTuple):
    """A method with a draft model, with parameters for a draft length."""

    method: str
    table: Callable[[int], Mapping[str, Any]]
    """Parameters by the draft length."""
    one_process: Callable[[Steps], Steps] = lambda steps: steps
    """Steps in one process, for interpreters without sub-processes."""


DRAFTING = MappingProxyType({
    "speculative": BudgetedMethod("speculative", lambda longest: {"draft_length": longest}),
    "two units": BudgetedMethod("speculative", lambda longest: {"draft_length": longest, "placement": "separate"}),
    "adaptive": BudgetedMethod("adaptive", lambda longest: {"policy": "heuristic", "max_draft_length": longest, "draft_length": 1}),
    "literal": BudgetedMethod("hierarchical", lambda longest: {"draft_length": longest, "reading": "literal"}),
    "bonus": BudgetedMethod("hierarchical", lambda longest: {"draft_length": longest, "reading": "bonus"}),
    "recursive": BudgetedMethod(
        "hierarchical", lambda longest: {"draft_length": longest, "reading": "recursive", "inner_draft_length": 1}
    ),
    "pearl": BudgetedMethod("pearl", lambda longest: {"draft_length": longest}, pearl.in_turn),
    "pearl, stopped": BudgetedMethod("pearl", lambda longest: {"draft_length": longest, "draft_stop": "rejection"}, pearl.in_turn),
    "amusd": BudgetedMethod(
        "amusd", lambda longest: {"draft_length": longest + 1, "min_waiting": 1},
        lambda steps: amusd.by_arrivals(steps, itertools.cycle((True, False))),
    ),
    "dsi": BudgetedMethod("dsi", lambda longest: {"lookahead": longest, "verifiers": 2}, pearl.in_turn),
    "ssd": BudgetedMethod("ssd", lambda longest: {"draft_length": longest, "fan_out": 1}, ssd.in_turn),
    "ssd, no backup": BudgetedMethod("ssd", lambda longest: {"draft_length": longest, "fan_out": 2, "backup": "none"}, ssd.in_turn),
    "tree": BudgetedMethod("tree", lambda longest: {"shape": "full", "draft_depth": min(longest, 2), "width": 2}),
})  # fmt: skip
WITHOUT_ANOMALY = tuple(name for name in DRAFTING if name != "amusd")
"""Methods whose rounds take sums and maxima of the times of passes, which decide on nothing else."""
UNTIMED = ("speculative", "two units", "adaptive", "literal", "bonus", "recursive", "pearl", "tree")
"""Methods whose passes do not depend on times."""
THREE_MODELS = tuple(name for name, each in DRAFTING.items() if each.method == "hierarchical")


# --- Examples ---


def _decodings(names: tuple[str, ...] = tuple(DRAFTING), **fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    bits = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=7)
    return st.fixed_dictionaries({
        "method": st.sampled_from(names), "bits": bits, "draft_length": integers(1, 4), "slow": st.booleans(),
        "deep": st.booleans(), "prompt": st.sampled_from((0, 1, 60, 4000)),
        "hidden": st.tuples(integers(0, 5000), integers(0, 5000)), **fields,
    }).map(_with_budgets)  # fmt: skip


def _with_budgets(x: Example) -> Example:
    """Split outcomes by model, and choose budgets between 1 and the context."""
    x = dict(x)
    bits, hidden = x.pop("bits"), x.pop("hidden")
    x["accept"], x["medium_accept"] = ([bool(each[index]) for each in bits] for index in (0, 1))
    return x | {name: max(x["prompt"] + len(bits) - less, 1) for name, less in zip(_BUDGETS, hidden, strict=True)}


def _models(sampled: bool) -> SearchStrategy[Example]:
    """Draw small models; few tokens and words in sampling, as every outcome of every draft is enumerated."""
    budgets: dict[str, Any] = {name: integers(1, 3) for name in _BUDGETS}
    some = pairs(3, 2, 2 if sampled else 3, method=st.sampled_from([*DRAFTING]), **budgets)
    return some.filter(lambda x: not sampled or x["method"] != "literal").map(
        lambda x: {**x, "sampled": sampled, "draft_length": max(x["draft_length"], 1), "medium": [*reversed(x["draft"])]}
    )


# --- 58: agreement of the views ---


@theorem("58n", "Within budgets events, paths and formula agree in every method with a draft model, in time and in work.",
         source="outcomes that are certain; every pass is priced at the positions that it reads", given=_decodings)
def views_agree(x: Example) -> None:
    run, n, parameters = play(x), len(x["accept"]), parameters_of(x)
    found = predicted(x)
    tally = walked(x)
    equal("latency of events", run.latency, float(found.latency), CLOSE)
    equal("latency of paths", float(tally.time[0]), run.latency, CLOSE)
    equal("unit-time of events", run.busy, float(found.busy), CLOSE)
    equal("unit-time of paths", float(tally.busy[0]), run.busy, CLOSE)
    equal("text", run.tokens, [*range(1, n + 1)])
    if x["method"] in UNTIMED:
        counted = interpreter.count(steps(x), world_of(parameters, 1, outcomes(x)), n).account.totals()
        equal("passes", run.account.totals(), counted)
    known = _method(x).expected_work(parameters, n, certain(x), cost(x))
    for role, totals in {} if known is None else known.by_model.items():
        for name, value in totals._asdict().items():
            if not math.isnan(value):
                equal(f"{name} of the {role}", float(value), float(getattr(run.account.totals().by_model[role], name)), CLOSE)


@theorem("58o", "A budget as long as the context changes no time in any view, to the last bit.",
         source="a pass reads min(context, budget) positions", given=_decodings)
def whole_context(x: Example) -> None:
    context = x["prompt"] + len(x["accept"])
    all_read, limited = ({**x, **dict.fromkeys(_BUDGETS, budget)} for budget in (None, context))
    equal("latency of events", play(limited).latency, play(all_read).latency)
    equal("latency of paths", float(walked(limited).time[0]), float(walked(all_read).time[0]))
    equal("latency of the formula", float(predicted(limited).latency), float(predicted(all_read).latency))


@theorem("58p", "A smaller budget never makes a decoding slower, where rounds take sums and maxima of the times of passes.",
         source="a draft pass is never slower, and no outcome changes", given=lambda: _decodings(WITHOUT_ANOMALY))
def no_slower_within_less(x: Example) -> None:
    less = {name: max(x[name] // 2, 1) for name in _BUDGETS}
    whole = predicted({**x, **dict.fromkeys(_BUDGETS)})
    limited, smaller = predicted(x), predicted({**x, **less})
    at_most("latency with a budget", float(limited.latency), float(whole.latency), CLOSE)
    at_most("latency with half of it", float(smaller.latency), float(limited.latency), CLOSE)
    equal("plain decoding", float(smaller.plain_latency), float(whole.plain_latency))


@theorem("58q", "A smaller budget never makes a decoding slower in AMUSD either.",
         source="false: a draft pass that begins just before a rejection delays the next draft", expect="fails",
         given=lambda: _decodings(("amusd",), deep=st.just(True), prompt=st.just(4000)))
def no_slower_in_amusd(x: Example) -> None:
    less = {**x, "context_budget": max(5 * x["context_budget"] // 6, 1)}
    at_most("latency with five sixths of a budget", float(predicted(less).latency), float(predicted(x).latency), CLOSE)


# --- 58: exactness of the text ---


@theorem("58r", "In every method that samples exactly drafts that see only a budget keep the target's distribution.",
         source="a token is tested against the distribution from which it was drawn", given=lambda: _models(sampled=True))
def right_law(x: Example) -> None:
    want, found = target_law(x), _law_of_text(x)
    if found != want:
        raise AssertionError(f"total variation distance to the target's distribution: {distance(found, want)}")


@theorem("58s", "In every method the greedy text is that of the target.", source="the verification reads the whole context",
         given=lambda: _models(sampled=False))
def right_text(x: Example) -> None:
    equal("generated text", [*_law_of_text(x)], [greedy_text(model(x["target"]), PROMPT, x["tokens"], x.get("stop"))])


# --- Playing an example ---


def parameters_of(x: Example) -> Any:
    """Return the parameters of an example's decoding."""
    drafting = DRAFTING[x["method"]]
    budgets = {name: x[name] for name in (_BUDGETS if x["method"] in THREE_MODELS else _BUDGETS[:1]) if x[name] is not None}
    table = {"layers": LAYERS, "sampled": x.get("sampled", False), **drafting.table(x["draft_length"]), **budgets}
    table["draft_layers"] = LAYERS if x.get("deep") else 1
    return _method(x).kind(**table)


@functools.lru_cache(maxsize=16)
def _roofline(shape: str, layers: int) -> Roofline:
    return Roofline.on_device(replace(preset(shape), layers=layers), device("a100"))


def cost(x: Example) -> PassSeconds:
    """Return the costs of an example's decoding, in seconds on an A100, with a batch of 32.

    With a `deep` draft model, whose passes over a long context take longer than the target's, and with `slow` links.
    """
    draft = _roofline("llama-2-13b", LAYERS) if x["deep"] else _roofline("llama-2-7b", 1)
    models = {"target": _roofline("llama-2-7b", LAYERS), "medium": _roofline("llama-2-13b", 1), "draft": draft}
    return PassSeconds(models, prompt=x["prompt"], batch=32, link=1e-4 if x["slow"] else 0.0)


def steps(x: Example) -> Steps:
    """Return the steps of an example's decoding."""
    return _method(x).decode(parameters_of(x), PROMPT, len(x["accept"]) if "accept" in x else x["tokens"], stop_tokens(x))


def outcomes(x: Example) -> dict[str, Any]:
    """Return the outcomes of an example's decoding by kind, in the form of `model.methods.worlds.world_of`."""
    parameters: MethodParameters = parameters_of(x)
    ranks = [1 if accepted else 2 * other for accepted, other in zip(x["accept"], x["medium_accept"], strict=True)]
    if "rank" in parameters.OUTCOMES:
        return {"rank": [[0] * len(ranks), *_by_depth(ranks, len(parameters.ranks_by_depth))]}
    if "position_rank" in parameters.OUTCOMES:
        return {"position_rank": ranks}
    most = max(parameters.most_unverified, len(ranks))
    return {name: [survivors({"draft_length": most, "accept": [*x[name][:-1], False]})] for name in _kinds(x)}


def _by_depth(ranks: list[int], depths: int) -> list[list[int]]:
    """Ranks at each depth of a draft that starts at each position: those of the positions after it."""
    return [[*ranks[depth:], *[0] * min(depth, len(ranks))] for depth in range(depths)]


def _kinds(x: Example) -> tuple[str, ...]:
    return ("accept", "medium_accept") if x["method"] in THREE_MODELS else ("accept",)


def certain(x: Example) -> Any:
    """Return the law, or laws by name, in which an example's outcomes are certain."""
    known = outcomes(x)
    if "rank" in known:
        return ReplayedRanks([known["rank"][1:]])
    if "position_rank" in known:
        return RecordedPositionRanks([known["position_rank"]])
    laws = {name: ByPosition(np.array(x[name], dtype=np.float64)) for name in _kinds(x)}
    return laws if len(laws) > 1 else laws["accept"]


def predicted(x: Example) -> Any:
    """Return the closed form of an example's decoding, for its outcomes."""
    return _method(x).predict(parameters_of(x), len(x["accept"]), certain(x), cost(x))


def walked(x: Example) -> Any:
    """Walk the same decoding in every replication of the vectorised paths."""
    known, n = outcomes(x), len(x["accept"])
    if "rank" in known:
        given: Any = ReplayedRanks([known["rank"][1:]]).sample(iter([np.zeros((n, BLOCK))]))
    elif "position_rank" in known:
        given = iter([np.repeat(np.array(known["position_rank"][: n - 1], dtype=np.uint16)[:, None], BLOCK, axis=1)])
    else:
        rows: dict[str, Iterator[Any]] = {name: repeated_outcomes(x[name][: n - 1]) for name in _kinds(x)}
        given = rows if len(rows) > 1 else rows["accept"]
    return _method(x).walk(parameters_of(x), n, cost(x), given)


def play(x: Example) -> Run:
    """Simulate an example's decoding."""
    parameters = parameters_of(x)
    return simulate(
        steps(x), len(x["accept"]), Cluster(parameters.units), cost(x), world_of(parameters, 1, outcomes(x))
    )


def _method(x: Example) -> registry.Method:
    return registry.method(DRAFTING[x["method"]].method)


def _law_of_text(x: Example) -> TextLaw:
    models = {role: model(x[role]) for role in ("target", "medium", "draft")}
    return law_of_text(lambda: DRAFTING[x["method"]].one_process(steps(x)), models, PROMPT, x["tokens"])


THEOREMS = theorem.all()
