"""The theorems on Big Little Decoder, 18 and 19, with those of every method, 28 and 29.

An example has `max_draft_length`, a `variant` or an `exit_layer`, and what becomes of the small model's token at each output
position, `decisions`: 0 stays, 1 it is unsure, 2 taken back; or the rates, in twentieths, for all luck. Costs are in quarters.
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
from model.steps import Read
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems import pipelined_examples
from sim.theorems.drafting_examples import PROMPT, accepted, digits, drafted, model, rounds
from sim.theorems.output_law import law_of_text, likeliest_text
from sim.theorems.pipelined_examples import CLOSE, rates, whole
from sim.theorems.theorem import Collected, Example, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


theorem = Collected("bild")


# --- What they are tried on ---


@drawn
def _forms(draw: DrawFn, forms: tuple[str, ...]) -> Example:
    """A variant of two models, or the early-exit form."""
    quarters = whole(0, 6).map(lambda number: number / 4)
    name = draw(st.sampled_from(forms))
    early = name == "early"
    return {
        "variant": "paper" if early else name, "exit_layer": draw(whole(1, 3)) if early else None,
        "placement": "colocated" if early else draw(st.sampled_from(PLACEMENTS)), "cost_ratio": draw(quarters),
        "link": draw(whole(0, 2)) / 4, "max_draft_length": draw(whole(1, 4)), "head": draw(whole(0, 2)),
    }  # fmt: skip


@drawn
def _decodings(draw: DrawFn, /, forms: tuple[str, ...] = ("paper", "code", "early"), curve: bool = False, **more: Any) -> Example:
    example = {"decisions": digits(draw, draw(whole(1, 8)), 2), **draw(_forms(forms))}
    if curve and draw(st.booleans()):
        example["verify_cost"] = digits(draw, 4, 3)
    return example | {name: draw(strategy) for name, strategy in more.items()}


@drawn
def _rated(draw: DrawFn, tokens: int, forms: tuple[str, ...] = ("paper", "code"), most: int = 3) -> Example:

    example = {**draw(_forms(forms)), "fallback_rate": draw(rates()), "rollback_rate": draw(rates())}
    return example | {"max_draft_length": draw(whole(1, most)), "tokens": draw(whole(1, tokens))}


def _intensities(variant: str) -> SearchStrategy[Example]:
    some = whole(1, 20).map(lambda twentieths: twentieths / 20)
    return st.fixed_dictionaries({
        "fallback_rate": rates(), "rollback_rate": rates(), "max_draft_length": whole(1, 20), "operations_ratio": some,
        "memory_ratio": some, "variant": st.just(variant),
    })  # fmt: skip


@drawn
def _records(draw: DrawFn, /, **more: Any) -> Example:

    tokens = draw(whole(1, 8))
    example = {**draw(_forms(("paper",))), "distances": digits(draw, tokens, 7), "confidences": digits(draw, tokens, 8)}
    return example | {name: draw(strategy) for name, strategy in more.items()}


@drawn
def _models(draw: DrawFn) -> Example:
    words = draw(whole(2, 3))
    example: Example = {role: [digits(draw, words, 3, least=1) for _ in range(draw(st.sampled_from((1, 3))))]
                        for role in ("target", "draft")}  # fmt: skip
    return example | {
        "max_draft_length": draw(whole(1, 4)), "variant": draw(st.sampled_from(bild.VARIANTS)), "tokens": draw(whole(1, 7)),
        "fallback_threshold": draw(rates()), "rollback_threshold": draw(whole(0, 8)) / 4,
    }  # fmt: skip


def _thresholds(most: int) -> SearchStrategy[list[int]]:
    return st.lists(whole(0, most), min_size=2, max_size=2)


# --- 18: tokens and time ---


@theorem("18b", "Mean latency, compute, segments and drafted tokens are those over all luck, in every form.",
         source="where a segment starts depends on decisions before it alone", given=lambda: _rated(5, ("paper", "code", "early")))
def mean_over_all_luck(x: Example) -> None:
    n = x["tokens"]
    prediction = formulas.predict(choice(x), n, Independent(x["fallback_rate"], x["rollback_rate"]), cost(x))
    every = [*_all_runs(x, n)]
    for what in ("latency", "busy"):
        mean = math.fsum(chance * getattr(run, what) for chance, run in every)
        equal(f"mean {what}", float(getattr(prediction, what)), mean, CLOSE)
    for what, count in (("rounds", rounds), ("drafted", drafted)):
        mean = math.fsum(chance * count(run) for chance, run in every)
        equal(f"mean {what}", float(np.asarray(getattr(prediction, what))), mean, CLOSE)


@theorem("18a", "Mean segments of l tokens are the rounds of speculative decoding with alpha = (1 - f)(1 - r) and gamma = G.",
         source="[Kim2023], Algorithm 1; [Leviathan2023], Eq. 1", given=lambda: _rated(5, ("paper", "early")))
def segments_of_eq_1(x: Example) -> None:
    stays = (1 - x["fallback_rate"]) * (1 - x["rollback_rate"])
    mean = math.fsum(chance * rounds(run) for chance, run in _all_runs(x, x["tokens"]))
    equal("mean segments", float(speculative.target_runs(x["tokens"], stays, x["max_draft_length"])), mean, CLOSE)


@theorem("18c", "A segment has the mean tokens, runs of the small model and inputs of the large one, and the chance of a rollback.",
         source="[Kim2023], Section 3", given=lambda: _rated(1, most=2))
def one_segment(x: Example) -> None:
    """The first segment of a decoding that goes on beyond it, all luck of it."""
    f, r, most = x["fallback_rate"], x["rollback_rate"], x["max_draft_length"]
    tokens, smalls, back, wide = [], [], [], []
    for chance, run in _all_runs(x, most + 3):
        kinds = [kind for _, kind, _ in run.commits]
        segment = 1 + (kinds[1] == "again")
        tokens.append(chance * sum(count for *_, count in run.commits[:segment]))
        passes = [row for row in run.intervals if row.what == "forward"]
        first = next(index for index, row in enumerate(passes) if row.role == "target")
        smalls.append(chance * first)  # the small model's runs before it
        wide.append(chance * passes[first].width)
        back.append(chance * (kinds[0] == "rollback"))
    equal("tokens of a segment", float(formulas.expected_tokens(f, r, most, variant=x["variant"])), math.fsum(tokens), CLOSE)
    equal("runs of the small model", float(formulas.small_runs(f, most)), math.fsum(smalls), CLOSE)
    equal("tokens that the large model reads", float(formulas.large_inputs(f, most)), math.fsum(wide), CLOSE)
    equal("chance of a rollback", float(formulas.rollback_probability(f, r, most)), math.fsum(back), CLOSE)


@theorem("18d", "A small model that is never unsure (f = 0) is speculative decoding with gamma = G, token for token, time for"
         " time.", source="a fixed window", given=lambda: _decodings(("paper",)))
def sure_is_a_fixed_window(x: Example) -> None:
    decisions = [decision * (decision == UNLIKELY) for decision in x["decisions"]]
    run = play(x, decisions=decisions)
    other = pipelined_examples.play({
        "layers": 4, "draft_length": x["max_draft_length"], "accept": [not decision for decision in decisions],
        "placement": x["placement"], "cost": {"cost_ratio": x["cost_ratio"], "link": x["link"], "final_head": x["head"]},
    })  # fmt: skip
    equal("times and numbers of tokens", [(time, count) for time, _, count in run.commits],
          [(time, count) for time, _, count in other.commits])  # fmt: skip


@theorem("18e", "One that always is (f = 1) costs a run for each token but the last: speed 1 / (1 + c).",
         source="Algorithm 1: it runs before it is asked", given=lambda: _decodings(("paper", "code")))
def never_sure_is_a_wasted_run(x: Example) -> None:
    n = len(x["decisions"])
    run = play(x, decisions=[UNSURE] * n, placement="colocated")
    one = cost(x).target_pass
    equal("latency", run.latency, n * one + (n - 1) * one * x["cost_ratio"])
    equal("its limit", float(formulas.speedup(1, 0, x["max_draft_length"], x["cost_ratio"])), 1 / (1 + x["cost_ratio"]), CLOSE)


@theorem("18f", "A rollback threshold of infinity takes nothing back.", source="[Kim2023], Eq. 3", given=_records)
def nothing_taken_back(x: Example) -> None:
    record = Decisions([0.5] * len(x["distances"]), x["distances"], [False] * len(x["distances"]), "assumed: an example")
    decisions = record.decided(0.0, float("inf")).tolist()
    run = play({**x, "variant": "paper"}, decisions=decisions)
    equal("commits of a rollback", [kind for _, kind, _ in run.commits if kind == "rollback"], [])


@theorem("18g", "A rollback threshold of 0 takes back what the large model would not have written: the text is its own.",
         source="[Kim2023], Eq. 3: a cross-entropy of 0 is certainty", given=_models)
def on_disagreement(x: Example) -> None:
    """Nothing stays that the large model would not have written: the text is its own."""
    text, own = _texts({**x, "rollback_threshold": 0.0})
    equal("text", text, own)


@theorem("18h", "Any threshold does.", source="false: what is likely enough stays", given=_models, expect="fails")
def at_any_threshold(x: Example) -> None:
    text, own = _texts(x)
    equal("text", text, own)


@theorem("18i", "Never unsure and with nothing taken back, a window is the small model's own text.", source="a fixed window",
         given=_models)
def nothing_but_the_small_models_own(x: Example) -> None:
    """Never unsure, and nothing taken back: a window of the small model's tokens, and one of the large model's."""
    x = {**x, "fallback_threshold": 0.0, "rollback_threshold": float("inf"), "tokens": 1 + x["max_draft_length"]}
    text, _ = _texts(x)
    small = likeliest_text(model(x["draft"]), PROMPT, x["max_draft_length"])
    equal("text of a window", text[:-1], small)


@theorem("18j", "A token is not written where the small model is less sure than its threshold, and taken back above the other one.",
         source="[Kim2023], Eqs. 2 and 3: both are strict",
         given=lambda: _records(fallback_threshold=whole(0, 8), rollback_threshold=whole(0, 7)))
def thresholds_decide(x: Example) -> None:
    """The algorithm on numbers, with its thresholds, is the algorithm on what a record says of them; ties included."""
    fallback, rollback = x["fallback_threshold"] / 8, x["rollback_threshold"]
    sure, wrong = [value / 8 for value in x["confidences"]], [False] * len(x["distances"])
    record, paper = Decisions(sure, x["distances"], wrong, "assumed: an example"), {**x, "variant": "paper"}
    for threshold in (rollback, float("inf")):
        parameters = replace(choice(paper), fallback_threshold=fallback, rollback_threshold=threshold)
        decisions, n = record.decided(fallback, threshold).tolist(), len(x["distances"])
        steps = bild.decode(parameters, [0], n)
        run = simulate(steps, n, Cluster(parameters.units), cost(x), _Measured(record.confidence, record.distance))
        equal(f"commits at {fallback:g} and {threshold:g}", run.commits, play(paper, decisions=decisions).commits)


# --- 19: the released code, and intensity ---


@theorem("19a", "The released code gives as many tokens and large runs a segment more as there are rollbacks.",
         source="after a rollback it runs the large model again", given=lambda: _rated(1, most=2))
def code_gives_more_by_rollbacks(x: Example) -> None:
    given = x["fallback_rate"], x["rollback_rate"], x["max_draft_length"]
    more = formulas.expected_tokens(*given, variant="code") - formulas.expected_tokens(*given)
    equal("tokens of a segment more", float(more), float(formulas.rollback_probability(*given)), 1e-9)
    each = {name: [*_all_runs({**x, "variant": name}, x["max_draft_length"] + 3)] for name in bild.VARIANTS}
    found = {
        name: math.fsum(chance * (1 + (run.commits[1][1] == "again")) for chance, run in runs) for name, runs in each.items()
    }
    equal("large runs of a segment more", found["code"] - found["paper"], float(formulas.rollback_probability(*given)), 1e-9)


@theorem("19b", "Arithmetic intensity does not depend on the rollback rate in Algorithm 1.", source="[Kim2023], Figure 8",
         given=lambda: _intensities("paper"))
@theorem("19c", "Nor in the released code.", source="false: the pass behind a rollback is j + 2 tokens wide",
         given=lambda: _intensities("code"), expect="fails")
def intensity_knows_no_rollbacks(x: Example) -> None:
    given = x["fallback_rate"], np.array([0.0, x["rollback_rate"]]), x["max_draft_length"], x["operations_ratio"], x["memory_ratio"]
    none, some = formulas.intensity_factor(*given, variant=x["variant"])
    equal("intensity with rollbacks", float(some), float(none), CLOSE)


# --- 28: conservation, and agreement of the views ---


@theorem("28a", "Simulator and paths agree on every path, exactly, in every form, together and apart.", source="one algorithm",
         given=lambda: _decodings(curve=True))
def events_are_paths(x: Example) -> None:
    run, n = play(x), len(x["decisions"])
    row = np.array(x["decisions"][:-1], dtype=np.uint8)
    tiles = (np.repeat(row[start : start + 3, None], BLOCK, axis=1) for start in range(0, len(row), 3))
    tally = sampler.walk(choice(x), n, cost(x), tiles)
    equal("latency", float(tally.time[0]), run.latency)
    equal("compute", float(tally.busy[0]), run.busy)
    equal("segments and drafted tokens", (float(tally.rounds[0]), float(tally.drafted[0])), (rounds(run), drafted(run)))
    lengths = [sum(times for (kept, _), times in run.rounds.items() if kept == length) for length in range(len(tally.accepted))]
    equal("accepted tokens", (tally.accepted / BLOCK).tolist(), lengths)
    if x["exit_layer"] is None:
        counted = formulas.operations(choice(x), cost(x), run.rounds, run.account)
        equal("operations", float(tally.operations[0]), counted, CLOSE)


@theorem("28b", "Passes, layers, rows read and written, heads of both models are the closed form's, by counter and by clock.",
         source="conservation of work", given=_decodings)
def work_is_the_closed_form(x: Example) -> None:
    n, decisions = len(x["decisions"]), np.array(x["decisions"])
    found = interpreter.count(bild.decode(choice(x), [0], n), _world(x), n).account.totals()
    want = formulas.work(choice(x), n, Independent(decisions == UNSURE, decisions == UNLIKELY))
    assert want is not None
    equal("models at work", sorted(found.of), sorted(want.of))
    for role, totals in found.of.items():
        for name, got, sum_ in zip(totals._fields, totals, want.of[role], strict=True):
            equal(f"{name} of the {role} model", float(got), sum_, CLOSE)
    equal("passes by the clock", play(x).account.totals(), found)


@theorem("28c", "Accepted tokens and runs of the large model add up to l.", source="each gives one token more", given=_decodings)
def tokens_and_segments(x: Example) -> None:
    run = play(x)
    equal("tokens", accepted(run) + rounds(run), len(x["decisions"]))
    equal("text", run.tokens, [*range(1, len(x["decisions"]) + 1)])


# --- 29: luck by position, and thresholds ---


@theorem("29a", "A token that stays in place of one taken back, or of one not written, never makes more segments.",
         source="the next start is monotone in the start and in the luck", given=lambda: _decodings(("paper",), at=whole(0, 7)))
def one_rollback_less(x: Example) -> None:
    at = x["at"] % len(x["decisions"])
    stays = [*x["decisions"][:at], 0, *x["decisions"][at + 1 :]]
    at_most("segments with one token more that stays", rounds(play(x, decisions=stays)), rounds(play(x)))


@theorem("29b", "On a replayed record a higher rollback threshold never makes more segments.", source="fewer are taken back",
         given=lambda: _records(rollback_thresholds=_thresholds(7)))
def higher_rollback_threshold(x: Example) -> None:
    low, high = (_replayed(x, rollback=threshold) for threshold in sorted(x["rollback_thresholds"]))
    at_most("segments at the higher rollback threshold", rounds(high), rounds(low))


@theorem("29c", "On a record of which nothing is taken back, a lower fallback threshold never takes more segments, nor longer.",
         source="a run that gives a token costs what a wasted one does", given=lambda: _records(fallback_thresholds=_thresholds(8)))
def lower_fallback_threshold(x: Example) -> None:
    low, high = (_replayed(x, fallback=threshold) for threshold in sorted(x["fallback_thresholds"]))
    at_most("segments at the lower fallback threshold, nothing taken back", rounds(low), rounds(high))
    at_most("latency at the lower fallback threshold, nothing taken back", low.latency, high.latency)


@theorem("29d", "Nor is it ever slower where some are taken back.", source="false: what is written behind them is in vain",
         given=lambda: _records(fallback_thresholds=_thresholds(8)), expect="fails")
def lower_fallback_threshold_is_no_slower(x: Example) -> None:
    low, high = (_replayed(x, fallback=threshold, rollback=2.0) for threshold in sorted(x["fallback_thresholds"]))
    at_most("latency at the lower fallback threshold", low.latency, high.latency)


# --- Playing an example ---


def choice(x: Example) -> bild.Parameters:
    """The parameters of an example's decoding."""
    if x.get("exit_layer") is not None:
        return bild.Parameters(4, x["max_draft_length"], exit_layer=x["exit_layer"])
    return bild.Parameters(
        4, x["max_draft_length"], variant=x.get("variant", "paper"), placement=x.get("placement", "colocated"), draft_layers=2
    )


def cost(x: Example) -> UnitCost:
    """Ratios and times in quarters, so that they add up exactly."""
    curve = x.get("verify_cost")
    return UnitCost(
        4, cost_ratio=x.get("cost_ratio", 0.25), operations_ratio=0.5, link=x.get("link", 0.0), early_head=x.get("head", 0.0),
        final_head=x.get("head", 0.0), verify_cost=curve and tuple(enumerate(itertools.accumulate(curve, initial=4), 1)),
    )  # fmt: skip


def play(x: Example, **changes: Any) -> Run:
    """Simulate an example's decoding, with some of its fields changed."""
    x = {**x, **changes}
    n, parameters = len(x["decisions"]), choice(x)
    return simulate(bild.decode(parameters, [0], n), n, Cluster(parameters.units), cost(x), _world(x), record=True)


class _Measured(Lossy):
    """Answers with a record's numbers; the small model writes what the large one does, so that thresholds alone decide."""

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


def _texts(x: Example) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """What two models put out together, and the large one alone; each model reads what has been put out, or it is an error."""
    parameters = bild.Parameters(1, x["max_draft_length"], x["fallback_threshold"], x["rollback_threshold"], x["variant"])
    models = {role: model(x[role]) for role in ("target", "draft")}
    law = law_of_text(lambda: bild.decode(parameters, PROMPT, x["tokens"]), models, PROMPT, x["tokens"])
    (text,) = law
    return text, likeliest_text(models["target"], PROMPT, x["tokens"])


THEOREMS = theorem.all()
