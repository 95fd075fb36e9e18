"""Context budgets of drafts: what a pass reads, its price and its work, and which budgets are refused."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import PassShape
from model.hardware import cost_models, devices
from model.hardware.roofline import Roofline
from model.interpret.account import attended_within, context_of
from model.interpret.interpreter import Cache, count
from model.methods.long_context import AffinePass, LongContextRounds
from model.methods.self_speculative import algorithm as self_drafting
from model.methods.self_speculative import theory as self_theory
from model.methods.speculative import theory
from model.methods.speculative.algorithm import Parameters, decode
from model.methods.tree import algorithm as trees
from model.methods.tree import theory as tree_theory
from model.methods.worlds import world_of
from model.outcomes.outcome_laws import ByPosition
from model.outcomes.rank_laws import RankRates
from model.steps import ATTENTION_SINKS, Batch, CacheError, Forward, LayerSpan, visible_positions
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.position_costs import growing

SPAN = LayerSpan(0, 4)
BUDGETS = st.integers(1, 30)


@given(st.integers(0, 60), BUDGETS)
def test_visible_positions_are_the_first_few_and_the_latest(cached: int, budget: int) -> None:
    sinks, window = visible_positions(cached, budget)
    both = [*sinks, *window]
    assert both == sorted({*both})
    assert len(both) == min(cached, budget)
    assert not both or both[-1] == cached - 1
    if budget > ATTENTION_SINKS and cached > budget:
        assert [*sinks] == [*range(ATTENTION_SINKS)]
    assert visible_positions(cached, None) == (range(0), range(cached))


@given(st.integers(0, 20), st.integers(1, 4), st.none() | BUDGETS)
def test_a_pass_reads_its_visible_positions_and_its_own_tokens(at: int, width: int, budget: int | None) -> None:
    step = Forward("draft", (7,) * width, at, SPAN, heads=1, context_budget=budget)
    cached = sum(len(each) for each in visible_positions(at, budget))
    assert context_of(step) == (sum(cached + 1 + index for index in range(width)), cached + width)


@given(st.lists(st.tuples(st.integers(0, 20), st.integers(1, 4)), min_size=1, max_size=4), BUDGETS)
def test_each_sequence_of_a_batch_has_the_budget(entries: list[tuple[int, int]], budget: int) -> None:
    positions, widths = zip(*entries, strict=True)
    batch = Batch(tuple(range(len(entries))), positions, widths, (0,) * len(entries))
    step = Forward("draft", (7,) * sum(widths), min(positions), SPAN, batch=batch, context_budget=budget)
    attended, read = context_of(step)
    each = [context_of(step.part(index)) for index in range(len(entries))]
    assert attended == sum(one for one, _ in each)
    assert read >= sum(one for _, one in each)
    if len({*positions}) == len({*widths}) == 1:
        assert read == sum(one for _, one in each)


@given(st.integers(0, 20), st.integers(0, 8), BUDGETS)
def test_attended_positions_are_the_sum_over_the_passes(start: int, passes: int, budget: int) -> None:
    assert float(attended_within(start, passes, budget)) == sum(min(start + each, budget) + 1 for each in range(passes))


@given(st.lists(st.booleans(), min_size=1, max_size=7), st.integers(0, 4), st.integers(1, 9))
@settings(deadline=None)
def test_counted_work_is_the_predicted_one(accept: list[bool], gamma: int, budget: int) -> None:
    """For outcomes that are certain, the expected work is the counted one; of a draft model, and of a model that drafts itself."""
    tokens, law = len(accept), ByPosition(np.array(accept, float))
    survivors = [min(len([*itertools.takewhile(bool, accept[at:])]), gamma) for at in range(tokens)]
    model = Parameters(4, gamma, draft_layers=2, context_budget=budget)
    own = self_drafting.Parameters(4, 4, gamma, False, context_budget=budget)
    for parameters, steps, work in (
        (model, decode(model, [0], tokens), theory.work(model, tokens, law)),
        (own, self_drafting.decode(own, [0], tokens), self_theory.work(own, tokens, law)),
    ):
        counted = count(steps, world_of(parameters, 1, {"accept": [survivors]}), tokens).account.totals()
        assert work is not None
        assert counted.by_model.keys() == work.by_model.keys()
        for role, totals in counted.by_model.items():
            np.testing.assert_allclose(work.by_model[role], totals, rtol=1e-12)


@given(st.sampled_from([(1, 2), (2, 1), (2, 2), (1, 0), (0, 0)]), st.integers(1, 9), st.integers(1, 12))
@settings(deadline=None)
def test_counted_work_of_trees_is_the_predicted_one(ranks: tuple[int, int], tokens: int, budget: int) -> None:
    """The same ranks in every round: an accepted node is read by the draft already, or at the start of the next round."""
    own = trees.Parameters(4, "full", 2, 2, draft_layers=2, context_budget=budget)
    outcomes = {"rank": [[0] * tokens, *([rank] * tokens for rank in ranks)]}
    counted = count(trees.decode(own, [0], tokens), world_of(own, 1, outcomes), tokens).account.totals()
    work = tree_theory.work(own, tokens, RankRates([[[float(rank == each) for each in (1, 2)] for rank in ranks]]))
    assert work is not None
    assert counted.by_model.keys() == work.by_model.keys()
    for role, totals in counted.by_model.items():
        np.testing.assert_allclose(work.by_model[role], totals, rtol=1e-12)


def test_a_budget_beyond_the_context_changes_nothing() -> None:
    tokens, prompt, cost = 12, 30, growing(4, draft=0.3, prompt=30, batch=3, others_position=6.0)
    law = ByPosition(np.linspace(0.2, 0.9, tokens))
    whole, limited = (
        theory.predict(Parameters(4, 3, sequences=3, context_budget=budget), tokens, law, cost)
        for budget in (None, prompt + tokens + 3)
    )
    assert float(whole.latency) == float(limited.latency)
    shorter = theory.predict(Parameters(4, 3, sequences=3, context_budget=prompt), tokens, law, cost)
    assert float(shorter.latency) < float(whole.latency)
    assert float(shorter.plain_latency) == float(whole.plain_latency)


@given(st.integers(1, 200), st.integers(1, 199), st.integers(0, 40))
@settings(max_examples=30, deadline=None)
def test_a_smaller_budget_is_never_slower(budget: int, less: int, at: int) -> None:
    cost = growing(4, draft=0.3, prompt=100, batch=2, others_position=20.0)
    fewer = max(budget - less, 1)
    times = [float(cost.within_budgets({"draft": most}).draft_times(at)) for most in (fewer, budget)]
    assert times[0] <= times[1] <= float(cost.draft_times(at))


@given(st.integers(0, 30), st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_the_price_of_a_pass_within_its_budget_is_that_of_a_shorter_context(at: int, budget: int) -> None:
    """With all sequences at one position, a pass that reads b positions costs as a pass of a text of b positions."""
    cost, step = growing(4, draft=0.3, prompt=20), Forward("draft", (7,), at, LayerSpan(0, 1), heads=1, context_budget=budget)
    short = growing(4, draft=0.3, prompt=0)
    want = float(short.times(PassShape(LayerSpan(0, 1), "draft", heads=1), min(20 + at, budget)))
    assert cost.forward(step) == pytest.approx(want, rel=1e-12)
    assert sum(cost.layer_times_of(step)) == pytest.approx(want, rel=1e-12)


def test_the_budget_holds_for_the_other_sequences_of_the_batch_too() -> None:
    """Budgets up to the prompt: a pass reads as much at every position, of all sequences. Beyond it, the others are cut as well."""
    far, near = (growing(4, draft=0.3, prompt=100, batch=3, others_position=others) for others in (60.0, 0.0))
    for budget in (1, 40, 100):
        times = {float(each.within_budgets({"draft": budget}).draft_times(at)) for each in (far, near) for at in (0, 7, 50)}
        assert len(times) == 1
        assert float(far.context(7, budget)) == budget
    assert float(far.context(7, 130)) == pytest.approx((107 + 130 + 130) / 3)


def test_a_draft_keeps_only_its_budget_in_memory() -> None:
    target, small = preset("llama-3.1-8b"), preset("llama-3.2-1b")
    sizes = {
        budget: cost_models.memory(target, 80e9, context=8000, batch=4, also=(small,), draft_budget=budget)
        for budget in (None, 512, 9000)
    }
    assert sizes[None] == sizes[9000]
    assert sizes[None].cache - sizes[512].cache == (8000 - 512) * 4 * small.cache_bytes(small.layers)
    assert sizes[None].weights == sizes[512].weights
    alone = cost_models.memory(target, 80e9, context=8000, batch=4, draft_budget=512)
    assert alone == cost_models.memory(target, 80e9, context=8000, batch=4)  # it verifies with all positions
    medium = preset("llama-3.2-3b")
    both = cost_models.memory(target, 80e9, context=8000, batch=4, also=(medium, small), draft_budget=(4000, 512))
    assert both.cache - alone.cache == 4 * (4000 * medium.cache_bytes(medium.layers) + 512 * small.cache_bytes(small.layers))


def test_time_of_a_draft_pass_does_not_grow_with_the_context() -> None:
    cost = Roofline.on_device(preset("llama-3.1-8b"), devices.device("a100"), tensor_parallel=8)
    times = {}
    for prompt in (8000, 32000, 100000):
        found = PassSeconds({"target": cost}, prompt=prompt, batch=32)
        times[prompt] = float(found.times(PassShape(LayerSpan(0, 32), heads=1, context_budget=256))), float(found.plain_times())
    drafts, plain = zip(*times.values(), strict=True)
    assert len({*drafts}) == 1
    assert plain[0] < plain[1] < plain[2]
    assert drafts[0] < plain[0]


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Parameters(4, 3, context_budget=0), "context_budget must be between 1 and 1000000, got 0"),
        (lambda: Parameters(4, 3, context_budget=-5), "context_budget must be between 1 and 1000000, got -5"),
        (lambda: Parameters(4, 3, context_budget=2.5), "context_budget must be a whole number"),  # type: ignore[arg-type]
        (lambda: Parameters(4, 3, drafter="heads", context_budget=8), "context_budget must be left out with drafter='heads'"),
        (lambda: Parameters(4, 3, context_budget=80).check_context(64), "context_budget must be at most 64, .* got 80"),
        (lambda: self_drafting.Parameters(4, 4, 3, False), "exit_layer must be between 1 and layers - 1=3, got 4"),
        (lambda: self_drafting.Parameters(4, 2, 3, context_budget=8), "reuse must be false with context_budget=8"),
        (lambda: self_drafting.Parameters(4, 5, 3, False, context_budget=8), "exit_layer must be between 1 and layers=4, got 5"),
    ],
)
def test_impossible_budgets_are_refused(make: object, words: str) -> None:
    with pytest.raises(ParameterError, match=words):
        make()  # type: ignore[operator]


def test_rows_of_a_pass_with_a_budget_must_be_replaced_before_a_pass_without_one() -> None:
    cache = Cache()
    cache.write(Forward("target", (0, 1, 2), 0, SPAN))
    cache.write(Forward("target", (3,), 3, SPAN, context_budget=2))
    cache.write(Forward("target", (4,), 4, SPAN, context_budget=2))
    for held in (cache, cache.copy()):
        with pytest.raises(CacheError, match="whole context at position 4, but rows from 3 on come from passes with a context"):
            held.write(Forward("target", (4,), 4, SPAN))
        held.write(Forward("target", (3, 4), 3, SPAN))
        held.write(Forward("target", (5,), 5, SPAN))


def test_overhead_of_a_round_is_that_of_one_engine_step_also_where_its_draft_is_a_pass_of_all_layers() -> None:
    """Without drafts a round is a plain pass of the same layers and width as a draft; only it pays the overhead."""
    shape = replace(preset("llama-2-7b"), layers=4)
    kernels = Roofline.on_device(shape, devices.device("a100"))
    cost = PassSeconds({"target": cost_models.WithEngineOverhead(kernels, 0.001)}, prompt=4000)
    given_ = self_drafting.Parameters(4, 4, 1, False, context_budget=100)
    run = simulate(self_drafting.decode(given_, [0], 3), 3, Cluster(1), cost, world_of(given_, 1, {"accept": [[1, 0, 0]]}))
    assert [*run.rounds.elements()] == [(1, 1), (0, 0)]
    assert run.latency - run.target_time == pytest.approx(2 * 0.001)


def test_closed_form_of_large_batches_is_that_of_its_passes() -> None:
    """Eq. 1 of MagicDec by hand: F = 1, a = 2, k = 3; gamma 2, context 10, budget 4; one sequence."""
    own = AffinePass(1, 2, 3)
    rounds = LongContextRounds(own, own, 2, 2.5, 10, 4)
    assert float(rounds.speedup(1)) == pytest.approx(2.5 * 33 / (2 * (1 + 2 + 12) + 1 + 6 + 30))
    assert rounds.limit == pytest.approx(2.5 * 32 / (2 * 14 + 36))
    assert rounds.rises_with_batch
    with pytest.raises(ParameterError, match="context_budget must be between 1 and context=10, got 11"):
        LongContextRounds(own, own, 2, 2.5, 10, 11)
    with pytest.raises(ParameterError, match="tokens_per_round must be between 1 and 3, got"):
        LongContextRounds(own, own, 2, 3.5, 10, 4)


def test_events_count_the_positions_that_passes_read() -> None:
    given_ = self_drafting.Parameters(4, 4, 3, False, context_budget=2)
    cost, tokens = PassSeconds({"target": growing(4).hardware("target")}, prompt=10), 9
    outcomes = {"accept": [[2, 0, 3, 1, 0, 0, 0, 0, 0]]}
    run = simulate(self_drafting.decode(given_, [0], tokens), tokens, Cluster(1), cost, world_of(given_, 1, outcomes))
    work = count(self_drafting.decode(given_, [0], tokens), world_of(given_, 1, outcomes), tokens)
    assert run.account.totals() == work.account.totals()
