"""Theorems on Big Little Decoder, 18 and 19, and those of every method, 28 and 29.

An example has `max_draft_length`, a `variant` or an `exit_layer`, and either `decisions` on the small model's token at each output
position (0 accepted, 1 small model unsure, 2 rolled back), or their rates in twentieths, over all outcomes. Costs are in quarters.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.simulated_answers import UNLIKELY, UNSURE, Lossy
from model.methods.bild import algorithm as bild
from model.methods.bild import paths as sampler
from model.methods.bild import theory as formulas
from model.methods.bild.threshold_decisions import Decisions, Independent
from model.methods.draft_model import PLACEMENTS
from model.methods.speculative import theory as speculative
from model.outcomes.random_streams import BLOCK
from model.steps import Read, declining
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems import pipelined_examples
from sim.theorems.drafting_examples import PROMPT, accepted, digits, drafted, model, rounds
from sim.theorems.output_law import greedy_text, law_of_text
from sim.theorems.pipelined_examples import CLOSE, integers, rates
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


theorem = TheoremCollection("bild")


# --- Examples ---


@drawn
def _forms(draw: DrawFn, forms: tuple[str, ...]) -> Example:
    """Draw a variant of two models, or the early-exit form."""
    quarters = integers(0, 6).map(lambda number: number / 4)
    name = draw(st.sampled_from(forms))
    early = name == "early"
    return {
        "variant": "paper" if early else name, "exit_layer": draw(integers(1, 3)) if early else None,
        "placement": "colocated" if early else draw(st.sampled_from(PLACEMENTS)), "cost_ratio": draw(quarters),
        "link": draw(integers(0, 2)) / 4, "max_draft_length": draw(integers(1, 4)), "head": draw(integers(0, 2)),
    }  # fmt: skip


@drawn
def _decodings(draw: DrawFn, /, forms: tuple[str, ...] = ("paper", "code", "early"), curve: bool = False, **more: Any) -> Example:
    example = {"decisions": digits(draw, draw(integers(1, 8)), 2), **draw(_forms(forms))}
    if curve and draw(st.booleans()):
        example["verify_cost"] = digits(draw, 4, 3)
    return example | {name: draw(strategy) for name, strategy in more.items()}


@drawn
def _rated(draw: DrawFn, tokens: int, forms: tuple[str, ...] = ("paper", "code"), most: int = 3) -> Example:

    example = {**draw(_forms(forms)), "fallback_rate": draw(rates()), "rollback_rate": draw(rates())}
    return example | {"max_draft_length": draw(integers(1, most)), "tokens": draw(integers(1, tokens))}


def _intensities(variant: str) -> SearchStrategy[Example]:
    some = integers(1, 20).map(lambda twentieths: twentieths / 20)
    return st.fixed_dictionaries({
        "fallback_rate": rates(), "rollback_rate": rates(), "max_draft_length": integers(1, 20), "operations_ratio": some,
        "memory_ratio": some, "variant": st.just(variant),
    })  # fmt: skip


@drawn
def _records(draw: DrawFn, /, **more: Any) -> Example:

    tokens = draw(integers(1, 8))
    example = {**draw(_forms(("paper",))), "distances": digits(draw, tokens, 7), "confidences": digits(draw, tokens, 8)}
    return example | {name: draw(strategy) for name, strategy in more.items()}


@drawn
def _models(draw: DrawFn) -> Example:
    words = draw(integers(2, 3))
    example: Example = {role: [digits(draw, words, 3, least=1) for _ in range(draw(st.sampled_from((1, 3))))]
                        for role in ("target", "draft")}  # fmt: skip
    return example | {
        "max_draft_length": draw(integers(1, 4)), "variant": draw(st.sampled_from(bild.VARIANTS)), "tokens": draw(integers(1, 7)),
        "fallback_threshold": draw(rates()), "rollback_threshold": draw(integers(0, 8)) / 4,
    }  # fmt: skip


def _thresholds(most: int) -> SearchStrategy[list[int]]:
    return st.lists(integers(0, most), min_size=2, max_size=2)


# --- 18: tokens and time ---


@theorem("18b", "In every form the formula gives the mean latency, compute, segments and drafted tokens over all outcomes.",
         source="the start of a segment depends only on earlier decisions", given=lambda: _rated(5, ("paper", "code", "early")))
def mean_over_all_outcomes(x: Example) -> None:
    n = x["tokens"]
    prediction = formulas.predict(parameters_of(x), n, Independent(x["fallback_rate"], x["rollback_rate"]), cost(x))
    every = [*_all_runs(x, n)]
    for what in ("latency", "busy"):
        mean = math.fsum(chance * getattr(run, what) for chance, run in every)
        equal(f"mean {what}", float(getattr(prediction, what)), mean, CLOSE)
    for what, count in (("rounds", rounds), ("drafted", drafted)):
        mean = math.fsum(chance * count(run) for chance, run in every)
        equal(f"mean {what}", float(np.asarray(getattr(prediction, what))), mean, CLOSE)


@theorem("18a", "The mean segments of l tokens equal the rounds of speculative decoding with alpha = (1 - f)(1 - r), gamma = G.",
         source="[Kim2023], Algorithm 1; [Leviathan2023], Eq. 1", given=lambda: _rated(5, ("paper", "early")))
def segments_of_eq_1(x: Example) -> None:
    stays = (1 - x["fallback_rate"]) * (1 - x["rollback_rate"])
    mean = math.fsum(chance * rounds(run) for chance, run in _all_runs(x, x["tokens"]))
    equal("mean segments", float(speculative.target_runs(x["tokens"], stays, x["max_draft_length"])), mean, CLOSE)


@theorem("18c", "The formulas give a segment's mean tokens, small-model runs, large-model inputs and rollback probability.",
         source="[Kim2023], Section 3", given=lambda: _rated(1, most=2))
def one_segment(x: Example) -> None:
    """Enumerate all outcomes of the first segment of a longer decoding."""
    f, r, most = x["fallback_rate"], x["rollback_rate"], x["max_draft_length"]
    tokens, small_runs, rollbacks, widths = [], [], [], []
    for chance, run in _all_runs(x, most + 3):
        kinds = [kind for _, kind, _ in run.commits]
        segment = 1 + (kinds[1] == "again")
        tokens.append(chance * sum(count for *_, count in run.commits[:segment]))
        passes = [row for row in run.intervals if row.what == "forward"]
        first = next(index for index, row in enumerate(passes) if row.role == "target")
        small_runs.append(chance * first)  # passes before the first of the large model
        widths.append(chance * passes[first].width)
        rollbacks.append(chance * (kinds[0] == "rollback"))
    equal("tokens of a segment", float(formulas.expected_tokens(f, r, most, variant=x["variant"])), math.fsum(tokens), CLOSE)
    equal("runs of the small model", float(formulas.small_runs(f, most)), math.fsum(small_runs), CLOSE)
    equal("tokens that the large model reads", float(formulas.large_inputs(f, most)), math.fsum(widths), CLOSE)
    equal("probability of a rollback", float(formulas.rollback_probability(f, r, most)), math.fsum(rollbacks), CLOSE)


@theorem("18d", "With a small model that is never unsure (f = 0), tokens and times are those of speculative decoding with"
         " gamma = G.", source="fixed window", given=lambda: _decodings(("paper",)))
def sure_is_a_fixed_window(x: Example) -> None:
    decisions = [decision * (decision == UNLIKELY) for decision in x["decisions"]]
    run = play(x, decisions=decisions)
    other = pipelined_examples.play({
        "layers": 4, "draft_length": x["max_draft_length"], "accept": [not decision for decision in decisions],
        "placement": x["placement"], "cost": {"cost_ratio": x["cost_ratio"], "link": x["link"], "final_head": x["head"]},
    })  # fmt: skip
    equal("times and numbers of tokens", [(time, count) for time, _, count in run.commits],
          [(time, count) for time, _, count in other.commits])  # fmt: skip


@theorem("18e", "A small model that is always unsure (f = 1) costs one run per token except the last: speed 1 / (1 + c).",
         source="Algorithm 1: it runs before its confidence is known", given=lambda: _decodings(("paper", "code")))
def always_unsure_wastes_a_run(x: Example) -> None:
    n = len(x["decisions"])
    run = play(x, decisions=[UNSURE] * n, placement="colocated")
    one = cost(x).target_pass
    equal("latency", run.latency, n * one + (n - 1) * one * x["cost_ratio"])
    equal("long-run speed", float(formulas.speedup(1, 0, x["max_draft_length"], x["cost_ratio"])), 1 / (1 + x["cost_ratio"]), CLOSE)


@theorem("18f", "A rollback threshold of infinity causes no rollback.", source="[Kim2023], Eq. 3", given=_records)
def no_rollback(x: Example) -> None:
    record = Decisions([0.5] * len(x["distances"]), x["distances"], [False] * len(x["distances"]), "assumed: an example")
    decisions = record.decided(0.0, float("inf")).tolist()
    run = play({**x, "variant": "paper"}, decisions=decisions)
    equal("commits of a rollback", [kind for _, kind, _ in run.commits if kind == "rollback"], [])


@theorem("18g", "With a rollback threshold of 0 the text is that of the large model.",
         source="[Kim2023], Eq. 3: only a token that the large model would generate has cross-entropy 0", given=_models)
def on_disagreement(x: Example) -> None:
    text, want = _both_texts({**x, "rollback_threshold": 0.0})
    equal("text", text, want)


@theorem("18h", "With any rollback threshold the text is that of the large model.", source="false: likely tokens are kept",
         given=_models, expect="fails")
def at_any_threshold(x: Example) -> None:
    text, want = _both_texts(x)
    equal("text", text, want)


@theorem("18i", "Without fallbacks and rollbacks a window is the small model's text.", source="fixed window",
         given=_models)
def window_of_the_small_model(x: Example) -> None:
    """Decode one window of the small model and one token of the large model."""
    x = {**x, "fallback_threshold": 0.0, "rollback_threshold": float("inf"), "tokens": 1 + x["max_draft_length"]}
    text, _ = _both_texts(x)
    small = greedy_text(model(x["draft"]), PROMPT, x["max_draft_length"])
    equal("text of a window", text[:-1], small)


@theorem("18j", "A token falls back below the confidence threshold, and is rolled back above the distance threshold.",
         source="[Kim2023], Eqs. 2 and 3: both are strict",
         given=lambda: _records(fallback_threshold=integers(0, 8), rollback_threshold=integers(0, 7)))
def thresholds_decide(x: Example) -> None:
    """Compare the algorithm on numbers and thresholds with its run on recorded decisions, ties included."""
    fallback, rollback = x["fallback_threshold"] / 8, x["rollback_threshold"]
    sure, wrong = [value / 8 for value in x["confidences"]], [False] * len(x["distances"])
    record, paper = Decisions(sure, x["distances"], wrong, "assumed: an example"), {**x, "variant": "paper"}
    for threshold in (rollback, float("inf")):
        parameters = replace(parameters_of(paper), fallback_threshold=fallback, rollback_threshold=threshold)
        decisions, n = record.decided(fallback, threshold).tolist(), len(x["distances"])
        steps = bild.decode(parameters, [0], n)
        run = simulate(steps, n, Cluster(parameters.units), cost(x), _Measured(record.confidence, record.distance))
        equal(f"commits at {fallback:g} and {threshold:g}", run.commits, play(paper, decisions=decisions).commits)


# --- 19: the released code, and intensity ---


@theorem("19a", "Per rollback the released code has one token and one large run more than Algorithm 1.",
         source="after a rollback it runs the large model again", given=lambda: _rated(1, most=2))
def code_gives_more_by_rollbacks(x: Example) -> None:
    given = x["fallback_rate"], x["rollback_rate"], x["max_draft_length"]
    more = formulas.expected_tokens(*given, variant="code") - formulas.expected_tokens(*given)
    equal("extra tokens per segment", float(more), float(formulas.rollback_probability(*given)), 1e-9)
    every = {name: [*_all_runs({**x, "variant": name}, x["max_draft_length"] + 3)] for name in bild.VARIANTS}
    large_runs = {
        name: math.fsum(chance * (1 + (run.commits[1][1] == "again")) for chance, run in runs) for name, runs in every.items()
    }
    extra = large_runs["code"] - large_runs["paper"]
    equal("extra large runs per segment", extra, float(formulas.rollback_probability(*given)), 1e-9)


@theorem("19b", "In Algorithm 1 the arithmetic intensity does not depend on the rollback rate.", source="[Kim2023], Figure 8",
         given=lambda: _intensities("paper"))
@theorem("19c", "In the released code the arithmetic intensity does not depend on the rollback rate.",
         source="false: the pass after a rollback has j + 2 tokens",
         given=lambda: _intensities("code"), expect="fails")
def intensity_knows_no_rollbacks(x: Example) -> None:
    given = x["fallback_rate"], np.array([0.0, x["rollback_rate"]]), x["max_draft_length"], x["operations_ratio"], x["memory_ratio"]
    none, some = formulas.intensity_factor(*given, variant=x["variant"])
    equal("intensity with rollbacks", float(some), float(none), CLOSE)


# --- 28: conservation, and agreement of the views ---


@theorem("28a", "Events and paths agree exactly on every path, in every form, colocated and separate.", source="same algorithm",
         given=lambda: _decodings(curve=True))
def events_are_paths(x: Example) -> None:
    run, n = play(x), len(x["decisions"])
    row = np.array(x["decisions"][:-1], dtype=np.uint8)
    tiles = (np.repeat(row[start : start + 3, None], BLOCK, axis=1) for start in range(0, len(row), 3))
    tally = sampler.walk(parameters_of(x), n, cost(x), tiles)
    equal("latency", float(tally.time[0]), run.latency)
    equal("compute", float(tally.busy[0]), run.busy)
    equal("segments and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))
    lengths = [sum(times for (kept, _), times in run.rounds.items() if kept == length) for length in range(len(tally.accepted))]
    equal("accepted tokens", (tally.accepted / BLOCK).tolist(), lengths)
    if x["exit_layer"] is None:
        counted = formulas.operations(parameters_of(x), cost(x), run.rounds, run.account)
        equal("operations", float(tally.operations[0]), counted, CLOSE)


@theorem("28b", "Counter, events and formula agree on passes, layers, rows read and written, and heads of both models.",
         source="conservation of work", given=_decodings)
def work_is_the_closed_form(x: Example) -> None:
    n, decisions = len(x["decisions"]), np.array(x["decisions"])
    counted = interpreter.count(bild.decode(parameters_of(x), [0], n), _world(x), n).account.totals()
    want = formulas.work(parameters_of(x), n, Independent(decisions == UNSURE, decisions == UNLIKELY))
    assert want is not None
    equal("models at work", sorted(counted.by_model), sorted(want.by_model))
    for role, totals in counted.by_model.items():
        for name, got, sum_ in zip(totals._fields, totals, want.by_model[role], strict=True):
            equal(f"{name} of the {role} model", float(got), sum_, CLOSE)
    equal("passes of the simulator", play(x).account.totals(), counted)


@theorem("28c", "Accepted tokens and runs of the large model add up to l.", source="each run gives one token", given=_decodings)
def tokens_and_segments(x: Example) -> None:
    run = play(x)
    equal("tokens", accepted(run) + rounds(run), len(x["decisions"]))
    equal("text", run.tokens, [*range(1, len(x["decisions"]) + 1)])


# --- 29: outcomes by position, and thresholds ---


@theorem("28n", "Steps that are answered together give the same run as each by itself.", source="they stand for the other steps",
         given=lambda: _decodings(("paper", "code")))
def offers_change_nothing(x: Example) -> None:
    n, parameters = len(x["decisions"]), parameters_of(x)
    together, alone = (
        simulate(steps, n, Cluster(parameters.units), cost(x), _world(x))
        for steps in (bild.decode(parameters, [0], n), declining(bild.decode(parameters, [0], n)))
    )
    pipelined_examples.same_run(together, alone)


@theorem("29a", "Accepting a token in place of a rollback or a fallback never increases the segments.",
         source="the next start is monotone in the start and in the outcomes",
         given=lambda: _decodings(("paper",), at=integers(0, 7)))
def one_rollback_less(x: Example) -> None:
    at = x["at"] % len(x["decisions"])
    stays = [*x["decisions"][:at], 0, *x["decisions"][at + 1 :]]
    at_most("segments with one more accepted token", rounds(play(x, decisions=stays)), rounds(play(x)))


@theorem("29b", "On a replayed record a higher rollback threshold never increases the segments.", source="fewer rollbacks",
         given=lambda: _records(rollback_thresholds=_thresholds(7)))
def higher_rollback_threshold(x: Example) -> None:
    low, high = (_replayed(x, rollback=threshold) for threshold in sorted(x["rollback_thresholds"]))
    at_most("segments at the higher rollback threshold", rounds(high), rounds(low))


@theorem("29c", "On a record without rollbacks, a lower fallback threshold never increases the segments or the latency.",
         source="a run that gives a token costs as much as a wasted one",
         given=lambda: _records(fallback_thresholds=_thresholds(8)))
def lower_fallback_threshold(x: Example) -> None:
    low, high = (_replayed(x, fallback=threshold) for threshold in sorted(x["fallback_thresholds"]))
    at_most("segments at the lower fallback threshold, without rollbacks", rounds(low), rounds(high))
    at_most("latency at the lower fallback threshold, without rollbacks", low.latency, high.latency)


@theorem("29d", "On a record with rollbacks, a lower fallback threshold is never slower.",
         source="false: tokens drafted after a rolled-back one are wasted",
         given=lambda: _records(fallback_thresholds=_thresholds(8)), expect="fails")
def lower_fallback_threshold_is_no_slower(x: Example) -> None:
    low, high = (_replayed(x, fallback=threshold, rollback=2.0) for threshold in sorted(x["fallback_thresholds"]))
    at_most("latency at the lower fallback threshold", low.latency, high.latency)


# --- Playing an example ---


def parameters_of(x: Example) -> bild.Parameters:
    """Return the parameters of an example's decoding."""
    if x.get("exit_layer") is not None:
        return bild.Parameters(4, x["max_draft_length"], exit_layer=x["exit_layer"])
    return bild.Parameters(
        4, x["max_draft_length"], variant=x.get("variant", "paper"), placement=x.get("placement", "colocated"), draft_layers=2
    )


def cost(x: Example) -> UnitCost:
    """Return costs in quarters, so that sums of times are exact."""
    curve = x.get("verify_cost")
    return UnitCost(
        4, cost_ratio=x.get("cost_ratio", 0.25), operations_ratio=0.5, link=x.get("link", 0.0), early_head=x.get("head", 0.0),
        final_head=x.get("head", 0.0), verify_cost=curve and tuple(enumerate(itertools.accumulate(curve, initial=4), 1)),
    )  # fmt: skip


def play(x: Example, **changes: Any) -> Run:
    """Simulate an example's decoding, with fields replaced by `changes`."""
    x = {**x, **changes}
    n, parameters = len(x["decisions"]), parameters_of(x)
    return simulate(bild.decode(parameters, [0], n), n, Cluster(parameters.units), cost(x), _world(x), record=True)


class _Measured(Lossy):
    """Answers with recorded numbers; both models generate the same tokens, so that only thresholds decide."""

    def __init__(self, confidence: Sequence[float], distance: Sequence[float]) -> None:
        super().__init__(1, 4, [0] * len(distance))
        self.numbers = {"confidence": confidence, "distance": distance}

    def read(self, step: Read) -> Any:
        if step.kind in self.numbers:
            assert step.token is not None
            return float(self.numbers[step.kind][step.token - self.prompt])
        return super().read(step)


def _world(x: Example) -> Lossy:
    return Lossy(1, 4, x["decisions"])


def _replayed(x: Example, fallback: float = 0.0, rollback: float = 20.0) -> Run:
    wrong = [False] * len(x["distances"])
    record = Decisions([value / 8 for value in x["confidences"]], x["distances"], wrong, "assumed: an example")
    return play(x, decisions=record.decided(fallback / 8, rollback).tolist())


def _all_runs(x: Example, tokens: int) -> Iterator[tuple[float, Run]]:
    f, r = x["fallback_rate"], x["rollback_rate"]
    mass = ((1 - f) * (1 - r), f, (1 - f) * r)
    for decisions in itertools.product(range(3), repeat=tokens - 1):
        chance = math.prod(mass[decision] for decision in decisions)
        if chance:
            yield chance, play(x, decisions=[*decisions, 0])


def _both_texts(x: Example) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the text that both models generate together, and that of the large model alone."""
    parameters = bild.Parameters(1, x["max_draft_length"], x["fallback_threshold"], x["rollback_threshold"], x["variant"])
    models = {role: model(x[role]) for role in ("target", "draft")}
    law = law_of_text(lambda: bild.decode(parameters, PROMPT, x["tokens"]), models, PROMPT, x["tokens"])
    (text,) = law
    return text, greedy_text(models["target"], PROMPT, x["tokens"])


THEOREMS = theorem.all()
