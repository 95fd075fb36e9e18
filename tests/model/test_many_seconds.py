"""Costs in seconds that differ in single numbers, as one: equal to each cost alone; and what functions of costs depend on."""

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.costs import many_seconds, watched_costs
from model.costs.layer_times import UnitCost
from model.costs.many_costs import OneAfterAnother, VariedCosts, joined, joined_groups
from model.costs.many_seconds import VariedSeconds, errors_of
from model.costs.pass_seconds import ContextTable, PassSeconds
from model.costs.step_costs import ALL_LAYERS, PassShape
from model.hardware import devices
from model.hardware.cost_models import WithEngineOverhead
from model.hardware.interpolation import Estimate
from model.hardware.roofline import Roofline
from model.steps import LayerSpan
from tests.support.position_costs import GrowingContext
from tests.support.tiers import examples

ROLES = {"target": "llama-3.1-8b", "draft": "llama-3.2-1b"}
MODELS = {role: Roofline.on_device(preset(name), devices.device("h100")) for role, name in ROLES.items()}
LAYERS = MODELS["target"].shape.layers
SECONDS = st.sampled_from([0.0, 0.001, 0.25])
SHAPES = (
    PassShape(LayerSpan(0, LAYERS), heads=1), PassShape(LayerSpan(0, LAYERS), width=3, heads=3),
    PassShape(ALL_LAYERS, "draft", heads=1),
    PassShape(LayerSpan(2, LAYERS), compared=True), PassShape(LayerSpan(1, 3), width=np.array([1, 4]), sequences=2, joins=True),
    PassShape(LayerSpan(0, LAYERS), width=np.array([[1], [4]]), sequences=np.array([1, 2, 8]), within_step=True),
    PassShape(ALL_LAYERS, "draft", heads=1, context_budget=40),
)  # fmt: skip


PLACES: tuple[Any, ...] = (
    5, np.array([0, 1, 70]), np.array([4, 5, 6]), np.array([4, 6, 5, 7]), np.array([8]), np.array([[3, 0], [1, 2]]),
    np.zeros(0, dtype=np.intp), 2.5,
)  # fmt: skip
WEIGHTS = np.array([[0.5]]), np.linspace(0.0, 2.0, 30)[:, None], np.linspace([0.0, 1.0, 5.0], [1.0, 1.0, 0.0], 70)


@st.composite
def varied(draw: st.DrawFn) -> VariedSeconds:
    size = draw(st.integers(1, 4))
    batch, others = draw(st.sampled_from([(1, None), (4, 3.5), (4, None)]))
    served = {role: WithEngineOverhead(model, draw(SECONDS)) for role, model in MODELS.items()}
    end = draw(st.sampled_from([0.0, 1.0, -1.0]))
    first = PassSeconds(served, 7, batch, others, middle=3, link=0.001, uncertainty_end=end)
    names = ("prompt", "link", "promotion", "dispatch", "state_check", "middle", *["others_position"] * (others is not None))
    chosen = draw(st.lists(st.sampled_from(names), unique=True))
    numbers: dict[str, Any] = {name: np.array(draw(st.lists(SECONDS, min_size=size, max_size=size))) for name in chosen}
    if "prompt" in chosen:
        prompts = st.integers(0, 60) | st.sampled_from([1000, 200_000])
        numbers["prompt"] = np.array(draw(st.lists(prompts, min_size=size, max_size=size)))
    if "middle" in chosen:
        numbers["middle"] = np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))
    if "others_position" in chosen:
        numbers["others_position"] = np.array(draw(st.lists(st.integers(0, 90), min_size=size, max_size=size))) / 2
    roles = draw(st.lists(st.sampled_from([*ROLES]), unique=True))
    steps = {role: np.array(draw(st.lists(SECONDS, min_size=size, max_size=size))) for role in roles}
    return VariedSeconds(first, size, numbers, steps)


@given(varied(), st.sampled_from(["usual", "passes", "budget", "some", "some within a budget"]))
@settings(deadline=None, max_examples=examples(25, 300))
def test_costs_as_one_are_those_of_each(costs: VariedSeconds, how: str) -> None:
    each = [*costs]
    if how == "passes":
        costs, each = costs.passes_only(), [one.passes_only() for one in each]
    elif how.startswith("some"):
        costs, each = costs.at(np.arange(len(costs))[::-2]), each[::-2]
    cost = joined(costs)
    if how.endswith("budget"):
        cost, each = cost.within_budgets({"draft": 20}), [one.within_budgets({"draft": 20}) for one in each]
    for shape in SHAPES:
        single = not np.ndim(shape.width) and not np.ndim(shape.sequences)
        for at in PLACES if single else (5, np.array([[[0]], [[70]]])):
            np.testing.assert_allclose(cost.times(shape, at), [one.times(shape, at) for one in each], rtol=1e-13)
        values = [shape, SHAPES[0]], lambda times: np.stack([times[0] * times[1], times.sum(axis=0), times[1]])
        for weights in (WEIGHTS[0], WEIGHTS[1]) if single else ():
            expected = [one.summed_values(*values, weights[:, 0]) for one in each]
            np.testing.assert_allclose(cost.summed_values(*values, weights[:, 0]), expected, rtol=1e-13)
        for weights in WEIGHTS if single else ():
            expected = [one.times(shape, np.arange(len(weights))) @ weights for one in each]
            np.testing.assert_allclose(cost.summed_times(shape, weights), expected, rtol=1e-13)
    np.testing.assert_allclose(cost.plain_time(9), [one.plain_time(9) for one in each], rtol=1e-13)
    for of in (lambda one: one.operations("draft"), lambda one: one.ratio("draft"), lambda one: one.link):
        np.testing.assert_allclose(of(cost), [of(one) for one in each], rtol=1e-13)
    for name in ("promotion", "draft_devices", "state_check", "dispatch"):
        np.testing.assert_array_equal(getattr(cost, name), [getattr(one, name) for one in each])


@given(varied(), st.data())
@settings(deadline=None, max_examples=examples(10, 100))
def test_costs_after_some_positions_begin_there(costs: VariedSeconds, data: st.DataObject) -> None:
    """A pass at the first position after these is that at this position before; the other sequences stay where they are."""
    after = np.array(data.draw(st.lists(st.integers(0, 30), min_size=len(costs), max_size=len(costs))))
    found, whole = costs.after(after).joined(), costs.joined()
    for shape in SHAPES[:4]:
        times = whole.times(shape, np.arange(34))
        for more in (0, 3):
            np.testing.assert_allclose(found.times(shape, more), times[np.arange(len(costs)), after + more], rtol=1e-13)


@given(varied(), st.data())
@settings(deadline=None, max_examples=examples(10, 100))
def test_times_at_a_position_of_each_cost_are_the_same_to_the_last_bit(costs: VariedSeconds, data: st.DataObject) -> None:
    """Tests of equal times are then those of single costs."""
    at = np.array(data.draw(st.lists(st.integers(0, 90), min_size=len(costs), max_size=len(costs))))
    cost = costs.joined()
    for shape in (SHAPES[0], SHAPES[1], SHAPES[2], SHAPES[6]):
        alone = [float(one.times(shape, here)) for one, here in zip(costs, at.tolist(), strict=True)]
        assert cost.times_at_each(shape, at).tolist() == alone
        assert cost.times_at_each(shape, 7).tolist() == [float(one.times(shape, 7)) for one in costs]


@pytest.mark.parametrize("first_of_all", [True, False])
def test_blocks_of_costs_within_a_budget_price_each_context_once(first_of_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also at an end of the uncertainty: all blocks take their times from the tables of all costs."""
    costs = VariedSeconds(PassSeconds(MODELS), 40, {"prompt": np.arange(40)})
    shape, priced = PassShape(ALL_LAYERS, "draft", heads=1), []
    right = PassSeconds.estimated
    monkeypatch.setattr(PassSeconds, "estimated", lambda self, *args: priced.append(args) or right(self, *args))
    blocks = [costs[start : start + 10] for start in range(0, 40, 10)]
    for each in [costs, *blocks] if first_of_all else blocks:
        each.joined().within_budgets({"draft": 20}).times(shape, np.arange(9))
    assert len(priced) == 1


def test_long_contexts_of_batches_are_priced_alike(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times that are too many for a table are computed; others of the batch have whole and half positions."""
    first = PassSeconds(MODELS, 7, 4, 3.5)
    numbers = {"prompt": np.array([0, 5, 60, 60]), "others_position": np.array([0.0, 0.5, 8.5, 9.0])}
    at, shape = np.arange(9), SHAPES[1]
    expected = VariedSeconds(first, 4, numbers).joined().times(shape, at)
    monkeypatch.setattr(many_seconds, "_MOST_TABULATED", 10)
    np.testing.assert_allclose(VariedSeconds(first, 4, numbers).joined().times(shape, at), expected, rtol=1e-14)
    monkeypatch.undo()
    monkeypatch.setattr(many_seconds, "_FEW_TIMES", 1)  # views of windows
    np.testing.assert_array_equal(VariedSeconds(first, 4, numbers).joined().times(shape, at), expected)


@given(varied())
@settings(deadline=None, max_examples=examples(10, 100))
def test_error_of_plain_decoding_is_that_of_each(costs: VariedSeconds) -> None:
    at = np.arange(6)
    found = errors_of(costs, 6)
    for one, error in zip(costs, found.tolist(), strict=True):
        errors, times = np.broadcast_to(one.plain_error(at), 6), one.plain_times(at)
        assert error == pytest.approx(float((errors * times).sum() / times.sum()), rel=1e-12)


def test_single_costs_are_the_first_with_their_numbers() -> None:
    served = {role: WithEngineOverhead(model, 0.5) for role, model in MODELS.items()}
    costs = VariedSeconds(PassSeconds(served, link=1.0), 2, {"prompt": np.array([3, 4])}, {"draft": np.array([0.0, 0.25])})
    assert [one.prompt for one in costs] == [3, 4] == [one.prompt for one in costs[:2]]
    assert [one.hardware_models["draft"].step_s for one in costs] == [0.0, 0.25]  # type: ignore[attr-defined]
    assert {one.hardware_models["target"].step_s for one in costs} == {0.5}  # type: ignore[attr-defined]
    assert (costs[-1].prompt, len(costs[1:])) == (4, 1)
    with pytest.raises(IndexError):
        costs[2]


def test_groups_of_all_kinds_follow_one_another() -> None:
    served = {role: WithEngineOverhead(model, 0.0) for role, model in MODELS.items()}
    one = PassSeconds(served, prompt=5, link=0.5)
    prompts = VariedSeconds(one, 2, {"prompt": np.array([3, 4])})
    found = joined_groups([[one], prompts, [replace(one, prompt=9)], [one]])
    assert isinstance(found, OneAfterAnother)
    expected = [one, *prompts, replace(one, prompt=9), one]
    for budgets in ({}, {"draft": 4}):
        alone = [each.within_budgets(budgets) for each in expected]
        cost, drafts = found.within_budgets(budgets), PassShape(ALL_LAYERS, "draft", heads=1)
        np.testing.assert_allclose(cost.draft_times([0, 9]), [each.draft_times([0, 9]) for each in alone])
        for weights in WEIGHTS:
            sums = [each.summed_times(drafts, weights) for each in alone]
            np.testing.assert_allclose(cost.summed_times(drafts, weights), sums, rtol=1e-13)
            squares = [each.summed_values([drafts], np.square, weights[:, 0]) for each in alone]
            np.testing.assert_allclose(cost.summed_values([drafts], np.square, weights[:, 0]), squares, rtol=1e-13)
    np.testing.assert_allclose(found.operations("draft"), [each.operations("draft") for each in expected])
    assert found.link.tolist() == [0.5] * 5  # type: ignore[attr-defined]
    assert found.has_model("draft")
    assert not found.has_model("medium")


def test_groups_of_unit_costs_follow_one_another() -> None:
    ratios = VariedCosts(UnitCost(4, final_head=1.0, dispatch=0.5), {"cost_ratio": np.array([0.25, 0.5])})
    uneven = UnitCost(4, cost_ratio=1.0, layer_times=(1.0, 2.0, 3.0, 4.0), verify_cost=((1, 1.0), (2, 3.0)), dispatch_law="tree")
    uneven = replace(uneven, dispatch_per_process=2.0)
    expected = [uneven, *ratios, uneven]
    found = joined_groups([[uneven], ratios, [uneven]])
    whole = PassShape(ALL_LAYERS, "draft", heads=1)
    for shape in (PassShape(LayerSpan(1, 3), width=2), PassShape(LayerSpan(0, 4), heads=1), whole):
        np.testing.assert_allclose(found.times(shape), [each.times(shape) for each in expected])
    np.testing.assert_allclose(found.dispatching(3), [each.dispatching(3) for each in expected])
    assert joined_groups([[], ratios]).draft_times().tolist() == [1.25, 2.5]


@pytest.mark.parametrize("stepped", [False, True])
def test_costs_that_share_times_keep_their_overheads(stepped: bool) -> None:
    """Costs of the same kernels differ in steps, state checks, verification and budgets, but look up times in the same tables."""
    layers: dict[Any, Any] = {}
    tables: dict[Any, ContextTable] = {}
    kinds: list[Any] = [
        lambda cost: cost, lambda cost: cost.passes_only(), lambda cost: cost.uncertainty_ends()[0],
        lambda cost: cost.uncertainty_ends()[1], lambda cost: cost.within_budgets({"draft": 20}),
    ]  # fmt: skip
    for step, check, verification, of in itertools.product((0.0, 0.25), (0.0, 0.5), (0.0, 0.002), kinds):
        served = {role: WithEngineOverhead(model, step) for role, model in MODELS.items()}
        first = PassSeconds(served, 2, state_check=check, verification=verification)
        first.share_times(layers, tables)
        steps = {"draft": np.array([0.0, step, 1.0])} if stepped else {}
        costs = VariedSeconds(of(first), 3, {"prompt": np.array([2, 50, 9])}, steps)
        cost = joined(costs)
        for shape in (*SHAPES[:4], SHAPES[-1]._replace(context_budget=None)):
            each = [replace(one, prompt=one.prompt) for one in costs]  # with tables of their own
            np.testing.assert_allclose(cost.times(shape, [0, 1, 30]), [one.times(shape, [0, 1, 30]) for one in each], rtol=1e-13)


def unsure(end: float) -> PassSeconds:
    """Costs with large errors, at an end of them."""
    shape, scales = preset("llama-2-13b"), {"target": 1.0, "draft": 0.1}
    models = {role: WithEngineOverhead(GrowingContext(shape, scale, 0.7), 0.5) for role, scale in scales.items()}
    return PassSeconds(models, 3, uncertainty_end=end)


@pytest.mark.parametrize("end", [1.0, -1.0])
@pytest.mark.parametrize("roles", [(), ("draft",), ("target",), ("draft", "target")])
def test_sums_of_times_with_large_errors(end: float, roles: tuple[str, ...]) -> None:
    """Overheads, which have no error, change the errors of passes of the draft."""
    steps = {role: each for role, each in (("target", np.array([0.0, 4.0])), ("draft", np.array([0.25, 0.0]))) if role in roles}
    numbers: dict[str, Any] = {"prompt": np.array([3, 20])}
    costs = VariedSeconds(unsure(end), 2, numbers, steps)
    cost, wide = joined(costs), PassShape(LayerSpan(0, 1), width=2)
    for shape, weights in itertools.product((PassShape(ALL_LAYERS, "draft", heads=1), wide, wide._replace(width=1)), WEIGHTS):
        times = np.array([one.times(shape, np.arange(len(weights))) for one in costs])
        np.testing.assert_allclose(cost.summed_times(shape, weights), times @ weights, rtol=1e-13, atol=1e-15)
        squares = (times**2 @ weights[:, 0])[:, None]
        np.testing.assert_allclose(cost.summed_values([shape], np.square, weights[:, 0]), squares, rtol=1e-13, atol=1e-15)


@pytest.mark.parametrize("end", [1.0, -1.0])
def test_times_with_large_errors_are_not_negative(end: float) -> None:
    """Also of passes that are asked for before those at later positions, and before plain decoding."""
    first = unsure(end)
    steps = {"target": np.array([0.0, 4.0]), "draft": np.array([0.25, 0.0])}
    numbers: dict[str, Any]
    for numbers, roles in itertools.product(({}, {"prompt": np.array([3, 20])}), ({}, steps, {"draft": steps["draft"]})):
        costs = VariedSeconds(first, 2, numbers, roles)
        cost, each = joined(costs), [*costs]
        for at in ([0, 1], [2, 70], [4, 5, 6]):
            for width in (1, 2):
                found = cost.draft_times(np.array(at), width=width)
                np.testing.assert_allclose(found, [one.draft_times(at, width=width) for one in each], rtol=1e-13, atol=1e-15)
        assert found.min() >= 0
        assert (found == 0).any() == (end < 0)


def test_errors_of_very_long_prompts_are_those_of_each() -> None:
    first = PassSeconds({"target": WithEngineOverhead(Roofline.on_device(preset("llama-3.1-8b"), devices.device("h100")), 0.001)})
    costs = VariedSeconds(first, 3, {"prompt": np.array([10, 200_000, 300_000])})
    alone = [errors_of(costs[place : place + 1], 5)[0] for place in range(3)]
    assert first.plain_times([0, 1]).size == 2  # the first cost's own times are by position
    assert errors_of(costs, 5) == pytest.approx(alone, rel=1e-12)
    for one, error in zip(costs, alone, strict=True):
        times = one.plain_times(np.arange(5))
        assert error == pytest.approx(float(one.plain_error(np.arange(5)) @ times / times.sum()), rel=1e-12)


def test_times_of_several_costs_are_looked_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts overlap, and ends of the uncertainty and other blocks of costs need the same times."""
    asked: list[float] = []
    right = Roofline.layer

    def layer(model: Any, width: Any, context: Any, *args: Any, **more: Any) -> Estimate:
        asked.extend(np.ravel(context).tolist())
        return right(model, width, context, *args, **more)

    monkeypatch.setattr(Roofline, "layer", layer)
    first = PassSeconds({role: WithEngineOverhead(model, 0.0) for role, model in MODELS.items()})
    prompts = VariedSeconds(first, 40, {"prompt": np.arange(40)})
    for costs in (prompts, prompts[20:], prompts.of(first.uncertainty_ends()[0])):
        assert costs.joined().plain_times(np.arange(30)).shape == (len(costs), 30)
    assert len(asked) == len({*asked}) < 40 + 30 + 40
    asked.clear()
    kept_full = replace(first, batch=3, others_position=1.5)  # of which all contexts are multiples of a third
    batches = VariedSeconds(kept_full, 40, {"others_position": np.arange(40) / 2})
    assert batches.joined().plain_times(np.arange(30)).shape == (40, 30)
    assert len(asked) == len({*asked}) < 40 + 30 + 20


def test_sums_over_positions_of_many_prompts(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several blocks, in any order, with equal prompts; the times at each position of each cost are not made."""
    first = PassSeconds({role: WithEngineOverhead(model, 0.0) for role, model in MODELS.items()})
    costs = VariedSeconds(first, 5, {"prompt": np.array([900, 3, 70, 3, 4])}, {"target": np.array([0.0, 1.0, 2.0, 4.0, 8.0])})
    expected = [each.times(SHAPES[1], np.arange(70)) @ WEIGHTS[2] for each in costs]
    cost = costs.joined()
    monkeypatch.setattr(many_seconds, "_WINDOWS", 2 * 70)
    monkeypatch.setattr(type(cost), "times", None)
    np.testing.assert_allclose(cost.summed_times(SHAPES[1], WEIGHTS[2]), expected, rtol=1e-13)


def test_each_context_is_looked_up_once() -> None:
    asked: list[int] = []

    def look_up(context: Any) -> Estimate:
        asked.extend(context.tolist())
        return Estimate(2.0 * context, np.asarray(0.5))

    table = ContextTable()
    for where in ([0, 3, 5], [5], [3, 40]):
        found = table.with_times_at(np.array(where), look_up)
        assert (found.seconds[where].tolist(), np.unique(found.error[where]).tolist()) == ((2.0 * np.array(where)).tolist(), [0.5])
    assert asked == [0, 3, 5, 40]


# --- What functions of costs depend on ---


def test_what_tests_for_zero_is_evaluated_once_for_all_with_the_same_zeros() -> None:
    made: list[tuple[float, float]] = []

    def overheads(cost: UnitCost) -> bool:
        made.append((bool(cost.link), bool(cost.dispatch)))
        return cost.has_overheads(2)

    numbers = {"link": np.array([0.0, 2.0, 3.0, 0.0]), "dispatch": np.array([1.0, 0.0, 0.0, 0.0])}
    found = watched_costs.distinct(UnitCost(4), numbers, overheads)
    assert found is not None
    assert [found[0][place] for place in found[1].tolist()] == [True, True, True, False]
    assert len(made) == 4  # with the first values, and for three patterns of zeros


@pytest.mark.parametrize("value", [
    lambda cost: cost.link, lambda cost: (cost.link, 1), lambda cost: {"link": cost.link}, lambda cost: cost.link > 1,
    lambda cost: cost.link == 2, lambda cost: float(cost.link), lambda cost: 1 + cost.link, lambda cost: -cost.link,
    lambda cost: np.asarray(cost.link) + 1, lambda cost: np.maximum(cost.link, 1), lambda cost: f"{cost.link:g}",
    lambda cost: max(cost.link, 1), lambda cost: {cost.link}, lambda cost: replace(cost, final_head=1.0),
    lambda cost: cost.link.real,
    lambda cost: round(cost.link), lambda cost: sum([cost.link]),
])  # fmt: skip
def test_what_uses_a_number_otherwise_is_evaluated_for_each(value: Any) -> None:
    assert watched_costs.distinct(UnitCost(4), {"link": np.array([1.0, 2.0])}, value) is None
    assert watched_costs.tested_alone(UnitCost(4), {"link": 2.0}, value) is None


def test_nothing_that_was_computed_from_a_number_is_kept() -> None:
    cost = UnitCost(4, final_head=1.0)
    assert cost.target_pass == 5.0
    assert watched_costs.tested_alone(cost, {"final_head": 1.0}, lambda cost: cost.target_pass) is None
    served = PassSeconds({"target": WithEngineOverhead(MODELS["target"], 0.0)}, prompt=3)
    assert served.plain_times([0, 1]).size == 2
    assert watched_costs.tested_alone(served, {"prompt": True}, lambda cost: cost.plain_times([0, 1])) is None
    assert watched_costs.tested_alone(served, {"prompt": True}, lambda cost: cost.batch) == 1


@given(varied(), varied(), st.lists(st.tuples(st.sampled_from(SHAPES), st.sampled_from(PLACES)), max_size=8))
@settings(max_examples=examples(40), deadline=None)
def test_times_of_several_parts_are_kept_for_each_pass(one: VariedSeconds, other: VariedSeconds, asked: list[Any]) -> None:
    """Also after others were asked for, at fewer or at more positions."""
    whole = joined_groups([one, other])
    for shape, places in asked:
        at = 5 if np.ndim(shape.width) else places
        expected = np.concatenate([each.joined().times(shape, at) for each in (one, other)])
        np.testing.assert_array_equal(whole.times(shape, at), expected)


def test_parts_price_no_more_contexts_together_than_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables for contexts that no pass has would double at the end of those that some have."""
    asked: list[int] = []
    right = ContextTable.with_times_at

    def noted(self: ContextTable, context: Any, look_up: Any) -> Estimate:
        asked.append(int(context.max()))
        return right(self, context, look_up)

    monkeypatch.setattr(ContextTable, "with_times_at", noted)
    most = []
    for together in (True, False):
        parts = [VariedSeconds(PassSeconds(MODELS), 2, {"prompt": np.array([7, 900])}) for _ in range(2)]
        times = [joined_groups(parts)] if together else [each.joined() for each in parts]
        for each in times:
            each.times(SHAPES[0], np.arange(50))
        most.append(max(asked))
        asked.clear()
    assert most[0] == most[1]


@given(varied(), st.integers(0, LAYERS), st.integers(0, LAYERS), st.integers(0, 1), st.booleans(), st.booleans())
@settings(max_examples=examples(60), deadline=None)
def test_passes_that_are_alike_take_the_same_time(
    costs: VariedSeconds, one: int, other: int, heads: int, compared: bool, kv_only: bool
) -> None:
    shape = PassShape(LayerSpan(min(one, other), max(one, other), kv_only=kv_only), heads=heads, compared=compared)
    assert UnitCost(LAYERS).alike(shape) == shape  # its layers may take unequal times
    whole = joined_groups([costs, costs.passes_only()])
    for cost in (costs[0], costs.joined(), whole, joined([costs[0], costs[0].passes_only()])):
        np.testing.assert_array_equal(cost.times(cost.alike(shape), np.arange(4)), cost.times(shape, np.arange(4)))
        repeated, count = cost.as_repeated(shape)
        assert count == (max(one, other) - min(one, other) if (kv_only and one != other and not heads and not compared) else 1)
        np.testing.assert_allclose(count * cost.times(repeated, np.arange(4)), cost.times(shape, np.arange(4)), rtol=1e-13)
