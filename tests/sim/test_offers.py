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
    Adopt,
    Batch,
    CacheError,
    Commit,
    DraftChain,
    DraftedChain,
    DraftedRound,
    DraftRounds,
    Fork,
    ForkJoin,
    Forward,
    Join,
    LayerSpan,
    NextTokens,
    Offer,
    Read,
    ReadEach,
    Steps,
    Stop,
    declining,
)
from sim.engine.cluster import Cluster
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
@pytest.mark.parametrize("case", ["plain", "skipdecode", "skipdecode, no gaps", "speculative", "bild"])
def test_a_decoding_that_is_cut_short_ends_at_the_token_that_was_wanted(case: str, tokens: int) -> None:
    """The algorithm would decode more than the run asks for."""
    module, choice = CHOICES[case]
    runs = [
        simulate(steps, tokens, Cluster(1), COSTS["uniform"], world(case, [0] * 2 * TOKENS))
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
@pytest.mark.parametrize("case", ["plain", "skipdecode", "speculative", "bild"])
def test_tokens_end_at_a_stop_token(case: str, stop: tuple[int, ...]) -> None:
    module, choice = CHOICES[case]
    wanted = min(stop[0], TOKENS)
    runs = []
    for steps in (module.decode(choice, [0], TOKENS, stop=stop), declining(module.decode(choice, [0], TOKENS, stop=stop))):
        if wanted < TOKENS:  # the algorithm ends, although more tokens are wanted
            with pytest.raises(RuntimeError, match="came to a halt"):
                simulate(steps, TOKENS, Cluster(1), COSTS["uniform"], world(case, [0] * 2 * TOKENS))
            continue
        runs.append(simulate(steps, TOKENS, Cluster(1), COSTS["uniform"], world(case, [0] * 2 * TOKENS)))
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


@pytest.mark.parametrize("units", [1, 2, 3])
@pytest.mark.parametrize("more", [{}, {"link": 0.5}, {"dispatch": 0.25}, {"promotion": 0.5}])
@pytest.mark.parametrize("case", ["ppd", "ppd, late exit", "ppd, early exit"])
def test_sub_processes_that_wait_or_travel_are_not_begun_together(case: str, more: dict[str, float], units: int) -> None:
    """With fewer units than sub-processes, links or dispatches the offer is declined where the result would differ."""
    module, choice = CHOICES[case]
    for seed in range(4):
        draws = np.random.default_rng(seed).integers(0, 6, 2 * TOKENS).tolist()
        runs = [
            simulate(steps, TOKENS, Cluster(units), UnitCost(LAYERS, **more), world(case, draws))
            for steps in (module.decode(choice, [0], TOKENS), declining(module.decode(choice, [0], TOKENS)))
        ]
        assert runs[0] == runs[1]


def forked(
    tokens: tuple[int, ...], units: tuple[int, ...], meanwhile: Forward, role: str = "target", below: LayerSpan = BELOW
) -> Steps:
    """Sub-processes of one pass each and a pass meanwhile, by the offer or by the steps that it stands for."""
    at = meanwhile.at + 1
    both = yield ForkJoin(role, tokens, at, below, units, meanwhile)
    if both is not None:
        out, task = both
        return out, (task,)
    tasks = yield Fork(tuple([Forward(role, (token,), at, below) for token in tokens]), units)
    out = yield meanwhile
    yield Join(tasks)
    return out, tuple(tasks)


def adopting(index: int) -> Steps:
    """Adopts one of three, and reads its output."""
    out = yield Forward("target", (0,), 0, BELOW, None, 1)
    _, tasks = yield from forked((3, 1, 2), (1, 2, 3), Forward("target", (0,), 0, ABOVE, out, 1))
    out = yield Adopt(tasks[index], 1, 2) if len(tasks) > 1 else Adopt(tasks[0], 1, 2, index)
    out = yield Forward("target", out.tokens, 1, ABOVE, out, 1)
    yield Commit("token", ((yield Read("next", out)),))


def of_lengths(layers: int) -> Steps:
    """The sub-processes end before the pass meanwhile, with it, or after it; then passes go on."""
    out = yield Forward("target", (0,), 0, BELOW, None, 1)
    meanwhile = Forward("target", (0,), 0, LayerSpan(2, 2 + layers), out, 1)
    out, _ = yield from forked((1, 2, 3), (1, 2, 3), meanwhile)
    yield Forward("target", (0,), 0, LayerSpan(2 + layers, LAYERS), out, 1)
    yield Forward("target", (5,), 1, WHOLE, None, 1)
    yield Commit("token", (1,))


def on_units(units: tuple[int, ...]) -> Steps:
    """Units of a wrong kind: that of the pass meanwhile, one twice, or none of the cluster."""
    out = yield Forward("target", (0,), 0, BELOW, None, 1, unit=0)
    yield from forked((1,) * len(units), units, Forward("target", (0,), 0, ABOVE, out, 1))
    yield Commit("token", (1,))


def of_a_draft(layers: int) -> Steps:
    """Sub-processes of another model, whose unit-time has another weight."""
    draft = LayerSpan(0, layers)
    yield Forward("draft", (0,), 0, draft)
    yield from forked((1, 2), (1, 2), Forward("target", (0,), 0, WHOLE, None, 1), "draft", draft)
    yield Commit("token", (1,))


def of_a_sub_process(unit: int | None) -> Steps:
    """A sub-process starts them, alone or not, and is stopped or joined."""

    def sub() -> Steps:
        yield Forward("target", (4,), 1, BELOW)
        yield from forked((1, 2), (1, 2) if unit is None else (2, 3), Forward("target", (4,), 1, ABOVE, None, 1))

    yield Forward("target", (0,), 0, WHOLE, None, 1)
    for stopped in (True, False):
        tasks = yield Fork((sub(),), (unit,))
        if stopped:
            yield Forward("target", (5,), 1, LayerSpan(0, 3), None, 1)
            yield Stop(tuple(tasks))
        else:
            yield Join(tuple(tasks))
    yield Commit("token", (1,))


def with_others(unit: int | None) -> Steps:
    """Others run on one of their units, or are about to start on any."""
    out = yield Forward("target", (0,), 0, BELOW, None, 1)
    others = yield Fork((Forward("target", (7,), 1, BELOW), Forward("target", (8,), 1, BELOW)), (unit, unit))
    if unit is not None:
        out = yield Forward("target", (0,), 0, LayerSpan(2, 3), out, 1)
    yield from forked((1, 2), (1, 2), Forward("target", (0,), 0, LayerSpan(out.layers.last, LAYERS), out, 1))
    yield Join(others)
    yield Commit("token", (1,))


@pytest.mark.parametrize("cost", [*COSTS, "dispatch", "link"])
@pytest.mark.parametrize(("algorithm", "choice"), [
    *((adopting, index) for index in range(3)), *((of_lengths, layers) for layers in (1, 2, 3)),
    *((of_a_draft, layers) for layers in (0, 1)), *((of_a_sub_process, unit) for unit in (1, None)),
    *((with_others, unit) for unit in (1, 2, 3, None)), *((on_units, units) for units in ((0, 1), (1, 1), (1, 7), (-1, 1), (1, 2))),
])  # fmt: skip
@pytest.mark.parametrize("units", [3, 4, 6])
def test_sub_processes_made_with_a_pass_are_as_separate_ones(algorithm: Any, choice: Any, units: int, cost: str) -> None:
    more = {key: UnitCost(LAYERS, cost_ratio=0.1, **{key: 0.5}) for key in ("dispatch", "link")}
    runs = [
        simulate(steps, 1, Cluster(units), {**COSTS, **more}[cost], World(1, LAYERS, [1, 2]))
        for steps in (algorithm(choice), declining(algorithm(choice)))
    ]
    assert runs[0] == runs[1]
    assert runs[0].peak_units > 1


def test_a_gap_is_an_error_also_of_sub_processes_made_with_a_pass() -> None:
    with pytest.raises(CacheError, match="at position 1"):
        simulate(of_a_draft_that_has_read_nothing(), 1, Cluster(3), UnitCost(LAYERS, cost_ratio=0.1), World(1, LAYERS))


def of_a_draft_that_has_read_nothing() -> Steps:
    """Sub-processes at position 1 of a model without rows."""
    yield from forked((1, 2), (1, 2), Forward("target", (0,), 0, WHOLE, None, 1), "draft", LayerSpan(0, 1))
    yield Commit("token", (1,))


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


@pytest.mark.parametrize("case", ["speculative", "bild", "plain", "recursive"])
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
    assert Other(1, LAYERS, drafts=outcomes).chain(DraftChain(first, 1)) is None
    assert World(1, LAYERS).read_each(ReadEach("next", whole, -1, 1)) == [1]
    assert Other(1, LAYERS).read_each(ReadEach("next", whole, -1, 1)) is None
    assert World(1, LAYERS).read_each(ReadEach("next", whole._replace(layers=LayerSpan(0, 2)), -1, 1)) is None
