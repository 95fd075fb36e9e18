"""Offers save time and nothing else: a decoding is the same, to the last bit, if all of them are declined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import ArrayLike

from model.costs.layer_times import UnitCost
from model.costs.step_costs import Floats, PassShape, StepCosts
from model.interpret.interpreter import Cache, count
from model.interpret.simulated_answers import STAYS, UNLIKELY, UNSURE, DraftOutcomes, Lossy, World
from model.methods.autoregressive import algorithm as autoregressive
from model.methods.bild import algorithm as bild
from model.methods.hierarchical import algorithm as hierarchical
from model.methods.ngram import algorithm as ngram
from model.methods.pearl import algorithm as pearl
from model.methods.ppd import algorithm as ppd
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.speculative import algorithm as speculative
from model.outcomes.lookup_laws import packed
from model.steps import (
    Batch,
    CacheError,
    Commit,
    DraftChain,
    DraftedChain,
    DraftedRound,
    DraftRounds,
    EarlyRounds,
    Fork,
    Forward,
    Join,
    LayerSpan,
    NextTokens,
    Offer,
    Read,
    ReadEach,
    Steps,
    declining,
)
from sim.engine.cluster import STOPS, Cluster
from sim.engine.events import Run, simulate
from sim.engine.simulated_clock import SimulatedClock
from tests.support.comparisons import observed
from tests.support.position_costs import growing
from tests.support.tiers import examples

LAYERS, TOKENS = 6, 24
BELOW, ABOVE, WHOLE = LayerSpan(0, 2), LayerSpan(2, LAYERS), LayerSpan(0, LAYERS)


@dataclass(frozen=True)
class SlowReads(UnitCost):
    """Costs with reads that take time."""

    reads_take_time = True

    def reading(self, step: Read) -> float:
        return 0.25


@dataclass(frozen=True)
class EngineSteps(UnitCost):
    """Costs in which a part of each pass from the first layer on is the overhead of an engine step."""

    steps_take_time = True

    def overhead_of(self, step: Forward) -> float:
        return 0.0 if step.layers.first else 0.3


class Other(World):
    """Answers of another rule."""

    def read(self, step: Read) -> Any:
        return 0


class OtherLossy(Lossy):
    """The same for methods whose output may differ from the target's."""

    def read(self, step: Read) -> Any:
        return 0


COSTS: dict[str, StepCosts] = {
    "uniform": UnitCost(LAYERS, cost_ratio=0.1, medium_cost_ratio=0.3, draft_devices=0.5),
    "slow reads": SlowReads(LAYERS, cost_ratio=0.1, medium_cost_ratio=0.3),
    "by position": growing(LAYERS, draft=0.1, medium=0.3, draft_devices=0.5),
}
CHOICES: dict[str, tuple[Any, Any]] = {
    "speculative": (speculative, speculative.Parameters(LAYERS, 4)),
    "speculative, budget": (speculative, speculative.Parameters(LAYERS, 4, context_budget=3)),
    "speculative, separate": (speculative, speculative.Parameters(LAYERS, 4, placement="separate")),
    "speculative, uncut": (speculative, speculative.Parameters(LAYERS, 4, sequences=2, batching="continuous")),
    "literal": (hierarchical, hierarchical.Parameters(LAYERS, 4, reading="literal")),
    "bonus": (hierarchical, hierarchical.Parameters(LAYERS, 3, reading="bonus")),
    "recursive": (hierarchical, hierarchical.Parameters(LAYERS, 4, reading="recursive", inner_draft_length=2)),
    "pearl": (pearl, pearl.Parameters(LAYERS, 3)),
    "ppd": (ppd, ppd.Parameters(LAYERS, 3, 3)),
    "ppd, late exit": (ppd, ppd.Parameters(LAYERS, 4, 2, form="literal")),
    "ppd, early exit": (ppd, ppd.Parameters(LAYERS, 2, 4, form="flat")),
    "ppd, batched": (ppd, ppd.Parameters(LAYERS, 3, 3, batched=True)),
    "ppd, one candidate": (ppd, ppd.Parameters(LAYERS, 5, 1)),
    "ppd, eager": (ppd, ppd.Parameters(LAYERS, 3, 3, form="eager")),
    "ppd, eager, late exit": (ppd, ppd.Parameters(LAYERS, 4, 3, form="eager")),
    "ppd, eager, batched": (ppd, ppd.Parameters(LAYERS, 5, 2, form="eager", batched=True)),
    "ppd, nested": (ppd, ppd.Parameters(LAYERS, 3, 2, form="nested")),
    "plain": (autoregressive, autoregressive.Parameters(LAYERS)),
    "plain, sampled": (autoregressive, autoregressive.Parameters(LAYERS, sampled=True)),
    "skipdecode": (skipdecode, skipdecode.Parameters(LAYERS, 2, 5, 1, 30, warm_up=1)),
    "skipdecode, no gaps": (skipdecode, skipdecode.Parameters(LAYERS, LAYERS, LAYERS, 1, 30)),
    "skipdecode, batch": (skipdecode, skipdecode.Parameters(LAYERS, 2, 5, 1, 30, sequences=2, batching="static")),
    "speculative, heads": (speculative, speculative.Parameters(LAYERS, 5, drafter="heads")),
    "speculative, heads uncut": (
        speculative, speculative.Parameters(LAYERS, 3, drafter="heads", sequences=2, batching="continuous"),
    ),
    "speculative, parallel": (speculative, speculative.Parameters(LAYERS, 5, drafter="parallel")),
    "ngram": (ngram, ngram.Parameters(LAYERS, 4)),
    "ngram, uncut": (ngram, ngram.Parameters(LAYERS, 4, sequences=2, batching="continuous")),
    "ngram, sampled": (ngram, ngram.Parameters(LAYERS, 4, sampled=True)),
    "bild": (bild, bild.Parameters(LAYERS, 5)),
    "bild, separate": (bild, bild.Parameters(LAYERS, 5, placement="separate")),
    "bild, never sure": (bild, bild.Parameters(LAYERS, 5, fallback_threshold=0.0, rollback_threshold=2.5)),
    "bild, never back": (bild, bild.Parameters(LAYERS, 5, rollback_threshold=float("inf"))),
    "bild as in its code": (bild, bild.Parameters(LAYERS, 5, variant="code")),
}  # fmt: skip
DRAWS = st.lists(st.integers(0, 5), min_size=2 * TOKENS, max_size=2 * TOKENS)
DOUBTS = st.lists(st.integers(0, 3), min_size=TOKENS, max_size=TOKENS)


def world(case: str, draws: Sequence[int]) -> World:
    if case.startswith("bild"):
        return Lossy(1, LAYERS, [(STAYS, STAYS, STAYS, STAYS, UNSURE, UNLIKELY)[each] for each in draws[:TOKENS]])
    if case.startswith("skipdecode"):
        return Lossy(1, LAYERS)
    if case.startswith("ngram"):  # other drafts after a round that accepted some
        right = np.minimum(draws, 4)
        each = packed(right[:TOKENS], right[:TOKENS] // 2, np.maximum(right[:TOKENS], right[TOKENS:]), right[TOKENS:])
        return World(1, LAYERS, lookups=each.tolist())
    if case.startswith("ppd"):
        return World(1, LAYERS, [each % (1 + CHOICES[case][1].candidates) for each in draws[:TOKENS]])
    if CHOICES[case][0] is hierarchical:
        both = {"medium": DraftOutcomes("target", draws[:TOKENS]), "draft": DraftOutcomes("medium", draws[TOKENS:])}
        return World(1, LAYERS, drafts=both)
    return World(1, LAYERS, drafts={"draft": DraftOutcomes("target", draws[:TOKENS])})


def decoded(case: str, draws: Sequence[int], cost: StepCosts, declined: bool, **how: Any) -> Run:
    module, choice = CHOICES[case]
    steps = module.decode(choice, [0], TOKENS)
    return simulate(declining(steps) if declined else steps, TOKENS, Cluster(choice.units), cost, world(case, draws), **how)


@pytest.mark.parametrize("cost", COSTS)
@pytest.mark.parametrize("case", CHOICES)
@given(DRAWS)
@settings(max_examples=examples(12, 200), deadline=None)
def test_declined_offers_change_nothing(case: str, cost: str, draws: list[int]) -> None:
    assert decoded(case, draws, COSTS[cost], declined=False) == decoded(case, draws, COSTS[cost], declined=True)


@pytest.mark.parametrize("tokens", [1, 5, TOKENS])
@pytest.mark.parametrize("case", ["plain", "skipdecode", "skipdecode, no gaps", "speculative", "bild", "ppd", "ppd, eager"])
def test_a_decoding_that_is_cut_short_ends_at_the_token_that_was_wanted(case: str, tokens: int) -> None:
    """The algorithm would decode more than the run asks for."""
    module, choice = CHOICES[case]
    runs = [
        simulate(steps, tokens, Cluster(choice.units), COSTS["uniform"], world(case, [0] * 2 * TOKENS))
        for steps in (module.decode(choice, [0], TOKENS), declining(module.decode(choice, [0], TOKENS)))
    ]
    assert runs[0] == runs[1]
    assert len(runs[0].tokens) >= tokens > sum(count for _, _, count in runs[0].commits[:-1])


@pytest.mark.parametrize("cost", ["uniform", "by position"])
@pytest.mark.parametrize("prompt", [1, 4])
@pytest.mark.parametrize("case", [
    "speculative", "speculative, uncut", "bild", "bild, never sure", "speculative, separate", "speculative, heads",
    "speculative, heads uncut", "ngram", "ngram, uncut",
])  # fmt: skip
def test_rounds_after_a_prompt(case: str, prompt: int, cost: str) -> None:
    """Both models read the prompt first. The offer is accepted on one unit: the engine answers none of the reads."""
    module, choice = CHOICES[case]
    for seed in range(6):
        draws = np.random.default_rng(seed).integers(0, 6, 2 * TOKENS).tolist()
        runs = []
        for decline in (False, True):
            answers = world(case, draws)
            answers.prompt = prompt
            steps = module.decode(choice, [*range(prompt)], TOKENS)
            runs.append(simulate(declining(steps) if decline else steps, TOKENS, Cluster(choice.units), COSTS[cost], answers))
        assert runs[0] == runs[1]
        if choice.units > 1:
            continue
        asked = mock.Mock(side_effect=AssertionError("a read was answered by itself"))
        with mock.patch.object(type(answers), "read_each", asked), mock.patch.object(type(answers), "chain", asked):
            answers.prompt = prompt
            assert simulate(module.decode(choice, [*range(prompt)], TOKENS), TOKENS, Cluster(1), COSTS[cost], answers) == runs[0]


@given(DRAWS, st.integers(0, 6), st.booleans(), st.integers(1, TOKENS), st.integers(0, 3))
def test_rounds_answer_as_their_reads_do(draws: list[int], length: int, cut: bool, tokens: int, unknown: int) -> None:
    """Also where outcomes are known of fewer positions than are drafted, and at any draft length."""
    batching = {} if cut else {"sequences": 2, "batching": "continuous"}
    choice = speculative.Parameters(LAYERS, length, **batching)
    answers = World(1, LAYERS, drafts={"draft": DraftOutcomes("target", draws[: max(tokens - unknown, 0)])})
    first, verify = Forward("draft", (0,), 0, LayerSpan(0, 1), heads=1), Forward("target", (0,), 0, WHOLE, heads=1)
    found = answers.draft_rounds(DraftRounds(first, verify, length, tokens, cut, ("", "", "")))
    seen, _ = driven(declining(speculative.decode(choice, [0], tokens)), answers, tokens)
    assert found == [DraftedRound(step.drafted, len(step.tokens) - 1) for step in seen if isinstance(step, Commit)]


@given(DRAWS, st.integers(1, 6), st.sampled_from([0.0, 0.5, 1.0]), st.integers(1, TOKENS))
def test_rounds_of_a_small_model_answer_as_their_reads_do(draws: list[int], length: int, threshold: float, tokens: int) -> None:
    choice = bild.Parameters(LAYERS, length, fallback_threshold=threshold)
    answers = world("bild", draws)
    first, verify = Forward("draft", (0,), 0, LayerSpan(0, 1), heads=1), Forward("target", (0,), 0, WHOLE, heads=1)
    step = DraftRounds(first, verify, length, tokens, True, ("", "", ""), threshold, 1.0)
    found = answers.draft_rounds(step)
    seen, _ = driven(declining(bild.decode(choice, [0], tokens)), answers, tokens)
    commits = [each for each in seen if isinstance(each, Commit)]
    assert found is not None
    assert [each[:2] for each in found] == [(each.drafted, len(each.tokens) - 1) for each in commits]
    unsure = [each.kind == "fallback" for each in commits if each.kind != "rollback"]
    assert [each.unsure for each, commit in zip(found, commits, strict=True) if commit.kind != "rollback"] == unsure
    for more in ({"distance": float("inf")}, {"confidence": None}, {"tokens": TOKENS + 2}):  # there no decisions are known
        assert answers.draft_rounds(step._replace(**more)) is None


def test_other_rounds_are_declined() -> None:
    """Those of wrong tokens, other models, budgets, batches or early layers, with thresholds, or with answers of another rule."""

    first, verify = Forward("draft", (2, 3), 2, LayerSpan(0, 1), heads=1), Forward("target", (3,), 3, WHOLE, heads=1)
    step = DraftRounds(first, verify, 2, 5, True, ("", "", ""))
    outcomes = {"draft": DraftOutcomes("target", [1] * 9), "other": DraftOutcomes("draft", [1] * 9)}
    answers, lossy = World(1, LAYERS, drafts=outcomes), Lossy(1, LAYERS, [STAYS] * 9)
    unsure = step._replace(confidence=0.5, distance=1.0)
    assert answers.draft_rounds(step) == [DraftedRound(2, 1), DraftedRound(2, 1), DraftedRound(0, 0)]
    assert lossy.draft_rounds(unsure) == [DraftedRound(2, 2), DraftedRound(1, 1)]
    assert answers.draft_rounds(unsure) is lossy.draft_rounds(step) is Lossy(1, LAYERS).draft_rounds(unsure) is None
    assert Other(1, LAYERS, drafts=outcomes).draft_rounds(step) is OtherLossy(1, LAYERS, [STAYS] * 9).draft_rounds(unsure) is None
    one = Batch.uniform((0,), 3, heads=1)
    wrong = [
        *(step._replace(verify=verify._replace(**more)) for more in (
            {"tokens": (-3,)}, {"at": 4}, {"role": "draft"}, {"batch": one}, {"context_budget": 2},
            {"layers": LayerSpan(0, 2)}, {"layers": LayerSpan(0, LAYERS, ((1, 2),))},
        )),
        *(step._replace(first=first._replace(**more)) for more in (
            {"tokens": (2, -3)}, {"at": 1}, {"role": "target"}, {"batch": one},
        )),
    ]  # fmt: skip
    for each in wrong:
        assert answers.draft_rounds(each) is lossy.draft_rounds(each._replace(confidence=0.5, distance=1.0)) is None
    for more in ({"role": "other"}, {"role": "unknown"}, {"state": first}):
        assert answers.draft_rounds(step._replace(first=first._replace(**more))) is None


@pytest.mark.parametrize("stop", [(1,), (7,), (TOKENS,), (99,)])
@pytest.mark.parametrize("case", ["plain", "skipdecode", "speculative", "bild", "ppd", "ppd, eager"])
def test_tokens_end_at_a_stop_token(case: str, stop: tuple[int, ...]) -> None:
    module, choice = CHOICES[case]
    wanted = min(stop[0], TOKENS)
    runs = []
    for steps in (module.decode(choice, [0], TOKENS, stop=stop), declining(module.decode(choice, [0], TOKENS, stop=stop))):
        if wanted < TOKENS:  # the algorithm ends, although more tokens are wanted
            with pytest.raises(RuntimeError, match="came to a halt"):
                simulate(steps, TOKENS, Cluster(choice.units), COSTS["uniform"], world(case, [0] * 2 * TOKENS))
            continue
        runs.append(simulate(steps, TOKENS, Cluster(choice.units), COSTS["uniform"], world(case, [0] * 2 * TOKENS)))
    assert runs[:1] == runs[1:]
    steps = module.decode(choice, [0], TOKENS, stop=stop)
    assert count(steps, world(case, [0] * 2 * TOKENS), TOKENS).tokens == [*range(1, wanted + 1)]


def tokens_and_others(others: bool) -> Steps:
    """Tokens one after another while another process runs or not, and a pass after the last one."""
    if others:
        yield Fork((Forward("target", (7,), 0, WHOLE),), (1,))
    first = Forward("target", (0,), 0, WHOLE, heads=1)
    if (yield NextTokens(first, (WHOLE,) * 3, "token")) is None:
        for at in range(3):
            yield Commit("token", ((yield Read("next", (yield first._replace(tokens=(at,), at=at)))),))
    yield Commit("token", ((yield Read("next", (yield first._replace(tokens=(3,), at=3)))),))


@pytest.mark.parametrize("others", [False, True])
@pytest.mark.parametrize("tokens", [1, 2, 3, 4])
def test_tokens_with_other_processes_and_before_further_passes(others: bool, tokens: int) -> None:
    runs = [
        simulate(steps, tokens, Cluster(2), UnitCost(LAYERS), World(1, LAYERS))
        for steps in (tokens_and_others(others), declining(tokens_and_others(others)))
    ]
    assert runs[0] == runs[1]
    assert runs[0].latency == LAYERS * tokens


def test_next_tokens_are_those_of_reads() -> None:
    """Where reads answer otherwise (early layers, wrong tokens, budgets, other rules) nothing is answered together."""

    whole = Forward("target", (4,), 4, WHOLE, heads=1)
    step, gaps = NextTokens(whole, (WHOLE,) * 3, "token"), LayerSpan(0, LAYERS, ((1, 3),))
    assert [*(World(1, LAYERS).next_tokens(step) or ())] == [5, 6, 7]
    assert World(1, LAYERS).next_tokens(step._replace(read="sample")) == World(1, LAYERS).next_tokens(step)
    assert [*(Lossy(1, LAYERS).next_tokens(step._replace(layers=(gaps, gaps))) or ())] == [5, 6]
    wrong = (
        step._replace(first=whole._replace(tokens=(-4,))), step._replace(first=whole._replace(role="draft")),
        step._replace(first=whole._replace(context_budget=2)), step._replace(first=whole._replace(tree=(-1,))),
        step._replace(first=whole._replace(batch=Batch.uniform((0,), 4, heads=1))),
    )  # fmt: skip
    for each in wrong:
        assert World(1, LAYERS).next_tokens(each) is Lossy(1, LAYERS).next_tokens(each) is None
    for layers in (gaps, LayerSpan(0, LAYERS - 1)):
        assert World(1, LAYERS).next_tokens(step._replace(layers=(WHOLE, layers, WHOLE))) is None
    assert Other(1, LAYERS).next_tokens(step) is OtherLossy(1, LAYERS).next_tokens(step) is None
    assert Lossy(1, LAYERS, [STAYS] * 9).next_tokens(step) is None


@given(
    st.integers(0, 3), st.integers(1, 5), st.sampled_from([WHOLE, LayerSpan(0, 2), LayerSpan(0, LAYERS, ((1, 3),))]), st.booleans()
)
def test_many_passes_leave_the_rows_of_each(before: int, passes: int, span: LayerSpan, tree: bool) -> None:
    """With and without skipped layers, also after passes through all layers, and over several hypotheses."""
    one, all_ = Cache(), Cache()
    for cache in (one, all_):
        if before:
            cache.write(Forward("target", tuple(range(before)), 0, WHOLE))
        if tree:
            cache.write(Forward("target", (before, -7), before, WHOLE, tree=(-1, -1)))
    step = Forward("target", (before,), before, span, heads=1)
    for number in range(passes):
        one.write(step._replace(tokens=(before + number,), at=before + number))
    all_.write(step, passes)
    assert (one.rows, one.breadths) == (all_.rows, all_.breadths)


AHEAD = [case for case in CHOICES if case.startswith("ppd") and case != "ppd, nested"]
EARLY = EarlyRounds(Forward("target", (3,), 3, BELOW, heads=1), LAYERS, 2, (1, 2), 4, True, ("match", "miss"))


@pytest.mark.parametrize("fewer", [0, 1, -1])
@pytest.mark.parametrize("more", [
    {}, {"link": 0.5}, {"dispatch": 0.25}, {"promotion": 0.5}, {"early_head": 0.3, "final_head": 0.1},
    {"layer_times": (0.3, 0.1, 0.7, 1.1, 0.2, 0.9)}, {"layer_times": (1.0, 0.0, 1.0, 0.0, 0.0, 0.0)},
    {"verify_cost": ((1, 1.0), (3, 1.7))},
])  # fmt: skip
@pytest.mark.parametrize("case", AHEAD)
def test_rounds_ahead_take_as_long_as_their_passes(case: str, more: dict[str, Any], fewer: int) -> None:
    """Where sub-processes wait, travel or never begin, and where layers of unequal times let them end before the main process."""
    module, choice = CHOICES[case]
    units = max(choice.units - fewer, 1)
    for seed, stop in enumerate(STOPS):
        draws = np.random.default_rng(seed).integers(0, 6, 2 * TOKENS).tolist()
        runs = [
            simulate(steps, TOKENS, Cluster(units, stop=stop), UnitCost(LAYERS, **more), world(case, draws))
            for steps in (module.decode(choice, [0], TOKENS), declining(module.decode(choice, [0], TOKENS)))
        ]
        assert runs[0] == runs[1]


@pytest.mark.parametrize("case", AHEAD)
def test_times_of_rounds_ahead_are_summed_in_the_order_of_their_passes(case: str) -> None:
    """Sums of times without overheads are rounded in that order, also where passes end together."""
    draws, cost = [0, 1, 2, 3, 4, 5] * (TOKENS // 3), EngineSteps(LAYERS)
    one, other = (decoded(case, draws, cost, declined=declined) for declined in (False, True))
    assert one == other
    assert one.target_time < one.busy


@pytest.mark.parametrize("cost", ["uniform", "by position"])
@pytest.mark.parametrize("prompt", [1, 4])
@pytest.mark.parametrize("case", AHEAD)
def test_rounds_ahead_make_no_event(case: str, prompt: int, cost: str) -> None:
    """With a unit for each process; also after a prompt, which the target reads first."""
    module, choice = CHOICES[case]
    answers = world(case, [0, 1, 2, 3, 4, 5] * 8)
    answers.prompt = prompt
    runs = []
    for decline in (True, False):
        steps = module.decode(choice, [*range(prompt)], TOKENS)
        begun = mock.Mock(wraps=SimulatedClock.call_together)
        with mock.patch.object(SimulatedClock, "call_together", lambda *given, begun=begun: begun(*given)):
            runs.append(
                simulate(declining(steps) if decline else steps, TOKENS, Cluster(choice.units), COSTS[cost], answers)
            )
        assert begun.called == decline
    assert runs[0] == runs[1]


@given(DRAWS, st.integers(1, 4), st.integers(1, TOKENS), st.integers(0, 3))
def test_matches_of_rounds_are_those_of_their_reads(draws: list[int], candidates: int, tokens: int, unknown: int) -> None:
    """Also where outcomes are known of fewer positions than are decoded."""
    choice = ppd.Parameters(LAYERS, 3, candidates)
    answers = World(1, LAYERS, [each % (1 + candidates) for each in draws[: max(tokens - unknown, 0)]])
    first = Forward("target", (0,), 0, LayerSpan(0, 3), heads=1)
    found = answers.early_matches(EarlyRounds(first, LAYERS, candidates, range(candidates), tokens, True, ("match", "miss")))
    kinds = count(declining(ppd.decode(choice, [0], tokens)), answers, tokens).commits
    assert found == [kind == "match" for kind in kinds]


def test_other_rounds_ahead_are_declined() -> None:
    """Those after wrong tokens, of other models, batches or fewer layers, with an impossible outcome, or of another rule."""
    ranks = [0, 0, 0, 1, 2, 0, 2]
    answers, first = World(1, LAYERS, ranks), EARLY.first
    assert answers.early_matches(EARLY) == [True, True, False, True]
    wrong = [
        *(EARLY._replace(first=first._replace(**more)) for more in (
            {"tokens": (-3,)}, {"tokens": (2, 3)}, {"at": 4}, {"role": "draft"}, {"batch": Batch.uniform((0,), 3, heads=1)},
            {"context_budget": 2}, {"layers": LayerSpan(0, 3, ((1, 2),))},
        )),
        EARLY._replace(layers=LAYERS - 1), EARLY._replace(candidates=1),
    ]  # fmt: skip
    assert [answers.early_matches(each) for each in wrong] == [None] * len(wrong)
    assert Other(1, LAYERS, ranks).early_matches(EARLY) is None


def ahead_on_units(units: tuple[int, ...]) -> Steps:
    """Rounds whose sub-processes would run on units of a wrong kind: the main process's, one twice, or none of the cluster."""
    first = Forward("target", (0,), 0, BELOW, heads=1, unit=0)
    answer = yield EARLY._replace(first=first, candidates=len(units), units=units, tokens=1)
    yield Commit("token", (1 if answer is None else 2,))


@pytest.mark.parametrize(("units", "accepted"), [
    ((0, 1), False), ((1, 1), False), ((1, 7), False), ((-1, 1), False), ((1, 2), True), ((2, 1), True),
])  # fmt: skip
def test_rounds_ahead_need_a_unit_for_each_process(units: tuple[int, ...], accepted: bool) -> None:
    run = simulate(ahead_on_units(units), 1, Cluster(3), UnitCost(LAYERS), World(1, LAYERS, [1]))
    assert (run.commits[0][1] == "match") == accepted


def ahead_of_a_sub_process(unit: int | None) -> Steps:
    """A sub-process begins rounds, alone or not."""

    def sub() -> Steps:
        yield Forward("target", (0,), 0, BELOW)
        answer = yield EARLY._replace(first=Forward("target", (0,), 0, BELOW, heads=1), units=(2, 3), tokens=1)
        assert (answer is None) == (unit is not None)
        yield from () if answer else [Commit("sub", (1,))]

    yield Forward("target", (0,), 0, WHOLE)
    tasks = yield Fork((sub(),), (1,))
    if unit is not None:
        yield Forward("target", (1,), 1, WHOLE, unit=unit)
    yield Join(tuple(tasks))


@pytest.mark.parametrize("unit", [0, None])
def test_rounds_ahead_are_declined_while_another_process_runs(unit: int | None) -> None:
    run = simulate(ahead_of_a_sub_process(unit), 1, Cluster(4), UnitCost(LAYERS), World(1, LAYERS, [1]))
    assert [kind for _, kind, _ in run.commits] == (["match"] if unit is None else ["sub"])


def test_a_gap_is_an_error_also_of_rounds_ahead() -> None:
    def steps() -> Steps:
        yield EARLY

    with pytest.raises(CacheError, match="at position 3"):
        simulate(steps(), 4, Cluster(3), UnitCost(LAYERS), World(1, LAYERS))


class EveryField(StepCosts):
    """A pass takes another time for every value of every field of its shape, and at every position."""

    layers, uniform = LAYERS, False

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        budget = 0 if shape.context_budget is None else 1 + shape.context_budget
        fields = shape.layers.last, shape.role == "target", *shape[2:-1], budget
        return np.asarray(at) + sum(float(np.asarray(value)) * 64.0**power for power, value in enumerate(fields, 1))


class Warming(EveryField):
    """The time of a pass depends on the number of passes before it."""

    made = 0

    def forward(self, step: Forward) -> float:
        self.made += 1
        return 1 / self.made


def alike_passes() -> Steps:
    """Passes that differ in what their times by position depend on."""
    out = yield Forward("target", (0,), 0, WHOLE, heads=1)
    for budget in (None, 2, 3):
        yield Forward("draft", (0,), 0, WHOLE, heads=1, context_budget=budget)
    yield Forward("target", (1, -2), 1, WHOLE, heads=2)
    yield Forward("target", (1, -2), 1, WHOLE, heads=2, tree=(-1, -1))
    one = yield Forward("target", (1,), 1, BELOW)
    two = yield Forward("target", (2,), 2, BELOW)
    yield Forward("target", (1, 2), 1, ABOVE, (one, two), 1)
    both = yield Forward("target", (1, 2), 1, BELOW)
    yield Forward("target", (1, 2), 1, ABOVE, both, 1)
    yield Forward("target", (0,), 1, WHOLE, batch=Batch.uniform((0,), 1))
    yield Forward("target", (1,), 1, WHOLE, batch=Batch.uniform((1,), 1))
    for heads in ((2, 0), (1, 1)):
        batch = Batch((0, 1), (1, 1), (2, 2), heads)
        yield Forward("target", (1, 2, 1, 2), 1, WHOLE, heads=2, batch=batch)
    yield Commit("token", ((yield Read("next", out)),))


def test_times_from_tables_are_those_of_each_pass() -> None:
    cost, seen = EveryField(), []
    with mock.patch.object(SimulatedClock, "go_on", lambda clock, seconds: seen.append(seconds) or seconds):
        simulate(alike_passes(), 1, Cluster(1), cost, World(1, LAYERS))
    passes: list[Forward] = []

    steps = observed(alike_passes(), lambda step: passes.extend([step] if isinstance(step, Forward) else []))
    simulate(steps, 1, Cluster(1), cost, World(1, LAYERS))
    assert seen == [cost.forward(step) for step in passes]
    assert len({*seen}) == len(seen) - 1  # both numbered sequences are alike


@pytest.mark.parametrize("case", CHOICES)
def test_times_that_decodings_share_are_those_of_their_own_costs(case: str) -> None:
    """Also after decodings with other costs, or with a copy of them without overheads."""
    draws = [0, 1, 2, 3, 4, 5] * (TOKENS // 3)
    options: list[dict[str, Any]] = [{}, {"final_head": 0.25}, {"verify_cost": ((1, 1.0), (9, 3.0))}, {"dispatch": 0.5}]

    def costs() -> list[UnitCost]:
        each = [UnitCost(LAYERS, cost_ratio=0.1, medium_cost_ratio=0.3, draft_devices=0.5, **more) for more in options]
        return [cost for one in each for cost in (one, one.passes_only())]

    shared, runs = costs(), []
    for cost in shared:
        decoded(case, draws, cost, declined=True)
    for cost, alone in zip((*shared, *reversed(shared)), (*costs(), *reversed(costs())), strict=True):
        runs.append(decoded(case, draws, cost, declined=True))
        assert runs[-1] == decoded(case, draws, alone, declined=True)
    assert len({run.latency for run in runs}) > 1


@pytest.mark.parametrize("case", ["speculative", "bild", "plain", "recursive", "ppd", "ppd, eager"])
def test_times_that_depend_on_earlier_passes_come_from_no_table(case: str) -> None:
    draws = [0, 1, 2, 3, 4, 5] * (TOKENS // 3)
    one, other = (decoded(case, draws, Warming(), declined=declined) for declined in (False, True))
    assert one == other
    assert one.busy < one.passes


@pytest.mark.parametrize("how", [{"record": True}, {"per_layer": True}])
@pytest.mark.parametrize("case", ["speculative", "bild", "recursive", "ppd"])
def test_declined_offers_change_no_record(case: str, how: dict[str, bool]) -> None:
    draws = [0, 1, 2, 3, 4, 5] * (TOKENS // 3)
    one, other = (decoded(case, draws, COSTS["uniform"], declined=declined, **how) for declined in (False, True))
    assert one == other
    assert one.intervals or not how.get("record")


def driven(steps: Steps, answers: World, tokens: int) -> tuple[list[Any], int]:
    """Passes and commits of a decoding by one process, and the number of offers that were accepted."""
    written: list[int] = []
    answers.written = written
    seen: list[Any] = []
    accepted, answer = 0, None
    while len(written) < tokens:
        step = steps.send(answer)
        answer = None
        if isinstance(step, Offer):
            asked = {DraftChain: answers.chain, ReadEach: answers.read_each}.get(type(step))  # tokens and forks are declined
            answer = None if asked is None else asked(step)  # type: ignore[operator]
            accepted += answer is not None
            if isinstance(answer, DraftedChain):
                first = step.first
                inputs = [first.tokens, *[(token,) for token in answer.tokens]]
                seen += inputs[: len(answer.tokens) + answer.unsure]
        elif isinstance(step, Forward):
            seen.append(step.tokens)
            answer = step
        elif isinstance(step, Read):
            answer = answers.read(step)
        elif isinstance(step, Commit):
            seen.append(step)
            written += step.tokens
        else:
            answer = step.longest  # a draft limit
    return seen, accepted


@pytest.mark.parametrize("case", ["speculative", "literal", "bonus", "recursive", "bild", "bild as in its code"])
@given(DRAWS)
@settings(max_examples=examples(25, 500), deadline=None)
def test_passes_and_commits_do_not_depend_on_offers(case: str, draws: list[int]) -> None:
    module, choice = CHOICES[case]
    taken, accepted = driven(module.decode(choice, [0], TOKENS), world(case, draws), TOKENS)
    refused, none = driven(declining(module.decode(choice, [0], TOKENS)), world(case, draws), TOKENS)
    assert taken == refused
    assert accepted > 0 == none


@given(DRAWS, st.integers(0, TOKENS - 1), st.integers(1, 6), st.integers(1, 3), DOUBTS)
def test_a_chain_answers_as_its_reads_do(draws: list[int], start: int, length: int, words: int, doubts: list[int]) -> None:
    answers = World(1, LAYERS, drafts={"draft": DraftOutcomes("target", draws[:TOKENS])}, doubts=doubts)
    answers.written = range(1, start + 1)
    tokens = tuple(range(max(0, start + 1 - words), start + 1))
    span = LayerSpan(0, 1)
    first = Forward("draft", tokens, start + 1 - len(tokens), span, heads=1)
    wrong = first._replace(tokens=(*tokens[:-1], -7))
    assert answers.chain(DraftChain(wrong, length)) is None
    for confidence in (None, 0.0, 0.5) if start + length <= TOKENS else (None,):
        found = answers.chain(DraftChain(first, length, confidence))
        drafted: list[int] = []
        out, unsure = first, False
        while len(drafted) < length:
            token = answers.read(Read("next", out))
            assert isinstance(token, int)
            if confidence is not None and answers.read(Read("confidence", out, token=token)) < confidence:
                unsure = True
                break
            drafted.append(token)
            out = Forward("draft", (token,), out.at + len(out.tokens), span, heads=1)
        assert found == DraftedChain(drafted, unsure)


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.integers(0, 5))
def test_reads_together_answer_as_one_by_one(right: list[bool], at: int) -> None:
    tokens = tuple(position if good else -position - 7 for position, good in enumerate(right, at))
    out = Forward("target", tokens, at, LayerSpan(0, LAYERS), heads=len(tokens))
    for answers, kind in ((World(1, LAYERS), "next"), (Lossy(1, LAYERS, [STAYS] * 20), "distance")):
        for first in range(-len(tokens), 0):
            after = tuple(out.at + len(tokens) + first + index + (index % 2) for index in range(-first))
            each = ReadEach(kind, out, first, -first, after)  # type: ignore[arg-type]
            alone = [answers.read(Read(kind, out, first + index, token=after[index])) for index in range(-first)]  # type: ignore[arg-type]
            assert answers.read_each(each) == alone


def test_other_answers_decline() -> None:
    first = Forward("draft", (0,), 0, LayerSpan(0, 1), heads=1)
    whole = Forward("target", (0,), 0, LayerSpan(0, LAYERS), heads=1)
    outcomes = {"draft": DraftOutcomes("target", [1])}
    assert World(1, LAYERS, drafts=outcomes).chain(DraftChain(first, 1)) == DraftedChain([1])
    assert World(1, LAYERS, drafts=outcomes).chain(DraftChain(first, 1, read="sample")) is None  # probabilities are read later
    assert Other(1, LAYERS, drafts=outcomes).chain(DraftChain(first, 1)) is None
    assert World(1, LAYERS).read_each(ReadEach("next", whole, -1, 1)) == [1]
    assert Other(1, LAYERS).read_each(ReadEach("next", whole, -1, 1)) is None
    assert World(1, LAYERS).read_each(ReadEach("next", whole._replace(layers=LayerSpan(0, 2)), -1, 1)) is None
