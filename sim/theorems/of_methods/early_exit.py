"""Theorems on early exit, 30 and 28: thresholds, exit depths, filled cache rows, batches that wait for their deepest token.

An example has `depths`, the layers that each token of each sequence needs, `measure`, `first_check`, `fill` and `batch`; or
`hazards`, exit probabilities by layer in twentieths, over all outcomes. Costs are in quarters.
"""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from model.interpret import interpreter
from model.interpret.simulated_answers import Lossy
from model.methods.early_exit import algorithm as early_exit
from model.methods.early_exit import paths as sampler
from model.methods.early_exit import theory as formulas
from model.methods.early_exit.finite_early_exit import Depths
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import digits
from sim.theorems.pipelined_examples import CLOSE, in_quarters, integers, quarters
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


theorem = TheoremCollection("early_exit")


# --- Examples ---


@drawn
def _exits(draw: DrawFn, /, most: int = 3, *, ragged: bool = False, alike: bool = False, **more: Any) -> Example:
    layers, tokens, count = draw(integers(1, 5)), draw(integers(1, 5)), draw(integers(1, most))
    rows = [[1 + deep for deep in digits(draw, tokens, layers - 1)] for _ in range(1 if alike else count)]
    fill = draw(st.sampled_from(early_exit.FILLS))
    batch = 1 if fill == "backfill" else draw(integers(1, 3)) if ragged else count
    lengths = [tokens, *(1 + length for length in digits(draw, draw(integers(0, 3)), tokens - 1))]
    example = {
        "layers": layers, "depths": rows, "measure": draw(st.sampled_from(formulas.MEASURES)), "first_check": draw(integers(1, 3)),
        "fill": fill, "batch": batch, "lengths": lengths if ragged or fill == "backfill" else None, "cost": draw(quarters()),
    }  # fmt: skip
    return example | {name: draw(strategy) for name, strategy in more.items()}


def _one_batch(**more: Any) -> SearchStrategy[Example]:

    return _exits(**more).map(lambda x: {**x, "fill": "propagate", "batch": len(x["depths"]), "lengths": None})


@drawn
def _hazards(draw: DrawFn) -> Example:
    layers = draw(integers(1, 3))
    fill, first = draw(st.sampled_from(early_exit.FILLS)), draw(integers(1, layers))
    chances = [0 if layer + 1 < first else draw(integers(0, 20)) for layer in range(layers - 1)]
    return {
        "layers": layers, "hazards": chances, "tokens": draw(integers(1, 3)), "measure": draw(st.sampled_from(formulas.MEASURES)),
        "first_check": first, "fill": fill, "batch": 1 if fill == "backfill" else draw(integers(1, 2)), "cost": draw(quarters()),
    }  # fmt: skip


def _thresholds() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({
        "threshold": integers(0, 20), "longest": integers(1, 12), "temperature": integers(0, 40),
        "form": st.sampled_from(formulas.FORMS),
    })  # fmt: skip


def _confidences() -> SearchStrategy[Example]:
    rows = st.lists(st.lists(integers(0, 8), min_size=4, max_size=4), min_size=1, max_size=4)
    return st.fixed_dictionaries({"confidences": rows, "thresholds": st.lists(integers(0, 8), min_size=2, max_size=2)})


# --- 30: thresholds and exit depths ---


@theorem("30h", "Both thresholds fall with the position; that of the released code from lambda to no less than .9 lambda.",
         source="[Schuster2022]; t5x", given=_thresholds)
def thresholds_fall(x: Example) -> None:
    level, longest = x["threshold"] / 20, x["longest"]
    given = np.arange(longest + 1), longest, x["temperature"] / 4
    falling = formulas.decayed_threshold(level, *given, form=x["form"])
    for sooner, later in pairwise(falling.tolist()):
        at_most("threshold of a later token", later, sooner, CLOSE)
    low, high = (0.9 * level, level) if x["form"] == "code" else (0.9 * level, min(0.9 * level + 0.1, 1.0))
    at_most("least threshold", low, float(falling.min()), CLOSE)
    at_most("largest threshold", float(falling.max()), high, CLOSE)


@theorem("30i", "The paper's and the code's thresholds are equal at lambda = 1.", source="algebra", given=_thresholds)
def forms_meet_at_one(x: Example) -> None:
    given = np.arange(x["longest"] + 1), x["longest"], x["temperature"] / 4
    paper, code = (formulas.decayed_threshold(1.0, *given, form=form) for form in formulas.FORMS)
    for one, other in zip(paper.tolist(), code.tolist(), strict=True):
        equal("threshold at lambda = 1, in both forms", one, other, CLOSE)


@theorem("30j", "The paper's and the code's thresholds are equal.",
         source="false: the paper adds .1 exp(-tau t / N), the code lambda times that",
         given=_thresholds, expect="fails")
def forms_are_the_same(x: Example) -> None:
    given = np.arange(x["longest"] + 1), x["longest"], x["temperature"] / 4
    paper, code = (formulas.decayed_threshold(x["threshold"] / 20, *given, form=form) for form in formulas.FORMS)
    equal("largest difference of both thresholds", float(np.abs(paper - code).max()), 0.0)


@theorem("30k", "On replayed confidences no token exits earlier at a higher threshold.", source="fewer layers exceed it",
         given=_confidences)
def higher_threshold_is_no_earlier(x: Example) -> None:
    confidences = np.array(x["confidences"]) / 8
    low, high = (formulas.exits(confidences, np.full(len(confidences), level / 8)) for level in sorted(x["thresholds"]))
    equal("tokens that exit earlier at the higher threshold", int((high < low).sum()), 0)


@theorem("30l", "If no token exits early and checks are free, the time is that of plain decoding.",
         source="all layers, one head", given=_exits)
def never_sure_is_the_plain_model(x: Example) -> None:
    depths = [[x["layers"]] * len(row) for row in x["depths"]]
    x = {**x, "depths": depths, "cost": {**x["cost"], "early_head": 0, "state_check": 0}, "batch": 1, "lengths": None}
    one = {**x, "depths": depths[:1]}
    run = play(one)
    equal("latency", run.latency, _longest(one) * in_quarters(one).target_pass)
    equal("text", run.tokens, [*range(1, len(run.tokens) + 1)])


@theorem("30m", "One more layer for a token never makes a decoding faster, if filling in a row costs no more than its layer.",
         source="one more layer, one row less", given=lambda: _exits(text=integers(0, 2), place=integers(0, 4)).map(_one_head))
def deeper_is_slower(x: Example) -> None:
    text, place = x["text"] % len(x["depths"]), x["place"] % len(x["depths"][0])
    deeper = [list(row) for row in x["depths"]]
    deeper[text][place] = min(deeper[text][place] + 1, x["layers"])
    at_most("latency with the earlier exit", play(x).latency, play({**x, "depths": deeper}).latency)


@theorem("30n", "A batch is never faster than any of its sequences alone.", source="the deepest token decides",
         given=lambda: _one_batch().map(_one_head))
def batches_wait(x: Example) -> None:
    together = play({**x, "batch": len(x["depths"]), "lengths": None}).latency
    for row in x["depths"]:
        alone = play({**x, "depths": [row], "batch": 1, "lengths": None}).latency
        at_most("latency of one sequence alone", alone, together)


@theorem("30o", "If a pass costs the same for any number of tokens, filling in rows on demand is never slower than at once.",
         source="rows that are never needed are never computed", given=_exits)
def later_is_cheaper(x: Example) -> None:
    alone = {**x, "batch": 1, "lengths": None, "depths": x["depths"][:1]}
    at_once, later = (play({**alone, "fill": fill}).latency for fill in ("propagate", "backfill"))
    at_most("latency of filling in on demand", later, at_once)


@theorem("30p", "The formula gives the mean of the latency over all outcomes, and its variance except for backfill.",
         source="columns are independent",
         given=_hazards)
def mean_over_all_outcomes(x: Example) -> None:
    law = Depths(formulas.exit_pmf(np.array([*x["hazards"], 20]) / 20))
    layers, n, batch = x["layers"], x["tokens"], x["batch"]
    given = {**x, "lengths": None}
    prediction = formulas.predict(parameters_of({**given, "depths": [[1] * n] * batch}), n, law, in_quarters(x))
    pmf = law.pmf.tolist()
    mean = square = 0.0
    for depths in itertools.product(range(1, layers + 1), repeat=n * batch):
        chance = math.prod(pmf[depth - 1] for depth in depths)
        if chance:
            run = play({**given, "depths": [list(depths[sequence::batch]) for sequence in range(batch)]})
            mean, square = mean + chance * run.latency, square + chance * run.latency**2
    equal("mean latency", float(prediction.latency), mean, CLOSE)
    if x["fill"] == "propagate":
        equal("mean square of the latency", float(prediction.latency_variance) + mean**2, square, 1e-11)


# --- 28: agreement of the views, conservation of work ---


@theorem("28a", "Events and paths agree exactly on every path, for single sequences and batches of unequal lengths.",
         source="same algorithm",
         given=lambda: _exits(ragged=True))
def events_are_paths(x: Example) -> None:
    run = play(x)
    rows = np.array(_all_depths(x), dtype=np.uint16).T.reshape(-1, 1)
    tiles = (np.repeat(rows[start : start + 3], BLOCK, axis=1) for start in range(0, len(rows), 3))
    time, busy = sampler.walk(parameters_of(x), _longest(x), in_quarters(x), tiles)
    equal("latency", float(time[0]), run.latency)
    equal("compute", float(busy[0]), run.busy)


@theorem("28b", "Counter, events and formula agree on passes, layers, computed and filled-in rows, and heads.",
         source="conservation of work", given=lambda: _exits(ragged=True, alike=True))
def work_is_the_closed_form(x: Example) -> None:
    n, parameters = _longest(x), parameters_of(x)
    run = interpreter.count(early_exit.decode(parameters, [0], n), _world(x), parameters.total_tokens(n))
    counted = run.account.totals().by_model["target"]
    law = Depths(np.eye(x["layers"])[[depth - 1 for depth in x["depths"][0]]])
    for name, got, expected in zip(counted._fields, counted, formulas.work(parameters, n, law).by_model["target"], strict=True):
        equal(name, float(got), expected, CLOSE)
    equal("passes of the simulator", play(x).account.totals().by_model["target"], counted)


# --- Playing an example ---


def parameters_of(x: Example) -> early_exit.Parameters:
    """Return the parameters of an example's decoding."""
    lengths = x.get("lengths")
    return early_exit.Parameters(
        x["layers"], x["measure"], min(x["first_check"], x["layers"]), fill=x["fill"], sequences=x["batch"], batching="static",
        lengths=None if lengths is None else tuple(lengths),
    )  # fmt: skip


def play(x: Example) -> Run:
    """Simulate an example's decoding."""
    n, parameters = _longest(x), parameters_of(x)
    return simulate(early_exit.decode(parameters, [0], n), parameters.total_tokens(n), Cluster(1), in_quarters(x), _world(x))


def _world(x: Example) -> Lossy:
    return Lossy(1, x["layers"], depths=_all_depths(x))


def _all_depths(x: Example) -> list[list[int]]:
    rows: list[list[int]] = x["depths"]
    sequences = len(x["lengths"]) if x.get("lengths") else x["batch"]
    return [rows[sequence % len(rows)] for sequence in range(sequences)]


def _longest(x: Example) -> int:
    return max(x["lengths"]) if x.get("lengths") else len(x["depths"][0])


def _one_head(x: Example) -> Example:
    """Give all heads the same cost, as with a single projection."""
    return {**x, "cost": {**x["cost"], "early_head": x["cost"]["final_head"]}}


THEOREMS = theorem.all()
