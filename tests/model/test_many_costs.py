"""Several costs as one, and points of lossy methods that are evaluated together: equal to each cost and each point alone."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.many_costs import joined
from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.methods import prediction
from model.methods.bild import finite_bild
from model.methods.bild import theory as bild
from model.methods.bild.algorithm import Parameters as BildParameters
from model.methods.bild.threshold_decisions import Independent, RecordedDecisions
from model.methods.early_exit import finite_early_exit
from model.methods.early_exit import theory as early_exit
from model.methods.early_exit.algorithm import Parameters as EarlyExitParameters
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.prediction import MethodChoice, Prediction, PredictionPoints
from model.methods.skipdecode import theory as skipdecode
from model.methods.skipdecode.algorithm import Parameters as SkipDecodeParameters
from model.steps import LayerSpan
from tests.support.exact import assert_work_of_each
from tests.support.position_costs import growing
from tests.support.tiers import examples

LAYERS = 4
TIMES = st.floats(0, 3)


@st.composite
def unit_costs(draw: st.DrawFn) -> UnitCost:
    times = draw(st.none() | st.lists(st.floats(0.1, 2), min_size=LAYERS, max_size=LAYERS).map(tuple))
    curve = draw(st.sampled_from([None, ((1, 1.0), (64, 3.0)), ((1, 2.0), (3, 3.0), (64, 9.0))]))
    names = ("early_head", "final_head", "link", "propagation", "state_check", "draft_devices", "cost_ratio")
    return UnitCost(
        LAYERS, layer_times=times, verify_cost=curve, operations_ratio=draw(st.sampled_from([None, 0.25])),
        **{name: draw(TIMES) for name in names},
    )  # fmt: skip


def position_costs() -> st.SearchStrategy[StepCosts]:
    return st.builds(
        lambda draft, prompt, link, devices: growing(LAYERS, draft=draft, prompt=prompt, link=link, draft_devices=devices),
        st.floats(0.02, 0.8), st.integers(0, 30), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
    )  # fmt: skip


SHAPES = (
    PassShape(LayerSpan(0, LAYERS), heads=1), PassShape(LayerSpan(1, 3), width=2), PassShape(LayerSpan(2, 2), heads=1),
    PassShape(LayerSpan(0, LAYERS, gaps=((1, 2),)), width=np.array([1, 3]), heads=1, joins=True),
    PassShape(LayerSpan(1, LAYERS, kv_only=True), sequences=2),
    PassShape(LayerSpan(0, 1), compared=True, sequences=np.array([1, 2])), PassShape(ALL_LAYERS, "draft", heads=1),
)  # fmt: skip


@given(st.lists(unit_costs(), min_size=1, max_size=4) | st.lists(position_costs(), min_size=1, max_size=3), st.sampled_from(SHAPES))
def test_joined_costs_are_those_of_each(costs: list[StepCosts], shape: PassShape) -> None:
    cost = joined(costs)
    for at in (0, 3, np.array([[0], [2], [5]])):
        np.testing.assert_allclose(cost.times(shape, at), [each.times(shape, at) for each in costs], rtol=1e-13)
    np.testing.assert_allclose(cost.plain_time(5), [each.plain_time(5) for each in costs], rtol=1e-13)
    np.testing.assert_allclose(cost.operations("draft"), [each.operations("draft") for each in costs])
    np.testing.assert_array_equal(cost.link, [each.link for each in costs])
    np.testing.assert_array_equal(cost.draft_devices, [each.draft_devices for each in costs])


def test_a_missing_ratio_is_named() -> None:
    with pytest.raises(ParameterError, match="cost_ratio is required"):
        joined([UnitCost(LAYERS, cost_ratio=0.5), UnitCost(LAYERS)]).draft_times()


# --- Points together ---


@st.composite
def bild_choices(draw: st.DrawFn) -> tuple[Any, int]:
    more: dict[str, Any] = draw(st.sampled_from([{}, {"placement": "separate"}, {"variant": "code"}, {"exit_layer": 3}]))
    return BildParameters(LAYERS, draw(st.integers(1, 5)), **more), draw(st.integers(1, 20))


@st.composite
def exit_choices(draw: st.DrawFn) -> tuple[Any, int]:
    tokens, measure = draw(st.integers(1, 9)), draw(st.sampled_from(("softmax", "state")))
    unequal = {"batching": "static", "lengths": (tokens, max(tokens - 2, 1), 1)}
    fixed: list[dict[str, Any]] = [{"exit_layer": 3}, {"exit_layer": 1} | unequal | {"sequences": 2}]
    free: list[dict[str, Any]] = [
        {}, {"fill": "backfill"}, {"first_check": 2}, {"sequences": 3, "batching": "static"}, unequal | {"sequences": 2},
        unequal | {"fill": "backfill"},
    ]  # fmt: skip
    more = draw(st.sampled_from(fixed + [{"measure": measure} | each for each in free]))
    return EarlyExitParameters(LAYERS, **more), tokens


@st.composite
def skip_choices(draw: st.DrawFn) -> tuple[Any, int]:
    tokens = draw(st.integers(1, 9))
    more: dict[str, Any] = draw(
        st.sampled_from([{}, {"decay_prompt": True}, {"batching": "static", "sequences": 2, "lengths": (tokens, 1, tokens)}])
    )
    return SkipDecodeParameters(LAYERS, draw(st.integers(1, 2)), draw(st.integers(3, 4)), 5, 20, **more), tokens


RATES = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
DECISION_LAWS = (
    st.builds(Independent, RATES, RATES)
    | st.builds(Independent, *[st.lists(RATES, min_size=20, max_size=20)] * 2)
    | st.lists(st.lists(st.integers(0, 2), min_size=20, max_size=20), min_size=1, max_size=3).map(RecordedDecisions)
)
SHARES = st.lists(st.integers(0, 3), min_size=LAYERS, max_size=LAYERS).map(lambda each: (np.array(each) + 0.25) / (sum(each) + 1))
ENDS = st.sampled_from([*np.eye(LAYERS)])
EXIT_LAWS = (SHARES | ENDS).map(Depths) | st.lists(SHARES, min_size=9, max_size=9).map(Depths)
METHODS: tuple[tuple[Any, Any, Any], ...] = (
    (bild, bild_choices(), DECISION_LAWS), (early_exit, exit_choices(), EXIT_LAWS), (skipdecode, skip_choices(), st.none()),
)  # fmt: skip


@st.composite
def points_of(draw: st.DrawFn) -> tuple[Callable[[PredictionPoints[Any]], Prediction], PredictionPoints[Any]]:
    """Points in any order, of several parameters, each with several costs of both kinds; not all pairs of costs and laws."""
    theory, decodings, laws = draw(st.sampled_from(METHODS))
    choices = []
    for parameters, tokens in draw(st.lists(decodings, min_size=1, max_size=2)):
        for cost in draw(st.lists(unit_costs() | position_costs(), min_size=1, max_size=4)):
            choices.append(MethodChoice(parameters, tokens, cost))
    known = draw(st.lists(laws, min_size=1, max_size=4))
    pairs = st.tuples(st.integers(0, len(choices) - 1), st.integers(0, len(known) - 1))
    choice, law = np.array(draw(st.lists(pairs, min_size=1, max_size=12)), dtype=np.intp).T
    return theory.predict_points, PredictionPoints(choices, known, choice, law)


@given(points_of(), st.sampled_from(["usual", "blocks", "pairs"]))
@settings(max_examples=examples(100, 1000), deadline=None)
def test_points_together_equal_each_alone(
    drawn: tuple[Callable[[PredictionPoints[Any]], Prediction], PredictionPoints[Any]], how: str
) -> None:
    """Also if few numbers are evaluated together, and whether all pairs of laws and costs are or those that are asked for."""
    predict, points = drawn
    alone = [predict(points.at(np.array([index]))) for index in range(points.law.size)]
    with pytest.MonkeyPatch.context() as patch:
        if how == "pairs":
            patch.setattr(prediction, "_LARGEST_PRODUCT", 0)
        elif how == "blocks":
            for module, name, value in (
                (prediction, "_CELLS", 40), (finite_bild, "_COUNTS", 1), (finite_early_exit, "_CELLS", 8),
                (finite_early_exit, "_PART", 11),
            ):  # fmt: skip
                patch.setattr(module, name, value)
        together = predict(points)
    for index, one in enumerate(alone):
        for name, value in vars(one).items():
            all_values = getattr(together, name)
            assert (value is None) == (all_values is None)
            if value is not None:
                np.testing.assert_allclose(all_values[index], value[0], rtol=1e-12, atol=1e-20, err_msg=name)


@pytest.mark.parametrize("cells", [1, 40, 90])
def test_costs_in_blocks_have_the_times_of_all_together(cells: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Points in an order other than that of their costs, of two sets of parameters."""
    costs = [UnitCost(LAYERS, cost_ratio=0.1 * each) for each in range(1, 8)]
    choices = [MethodChoice(BildParameters(LAYERS, longest), 9, cost) for cost in costs for longest in (2, 3)]
    order = np.random.default_rng(0).permutation(2 * len(choices)) % len(choices)
    points = PredictionPoints(choices, [Independent(0.5, 0.1), Independent(0.25, 0.2)], order, np.arange(order.size) % 2)
    together = bild.predict_points(points)
    monkeypatch.setattr(prediction, "_CELLS", cells)
    in_blocks = bild.predict_points(points)
    for name in ("latency", "busy", "plain_latency", "rounds"):
        np.testing.assert_allclose(getattr(in_blocks, name), getattr(together, name), rtol=1e-13, err_msg=name)
    assert np.unique(together.latency).size >= len(choices)  # so that points in another order differ


def test_unknown_operations_matter_only_where_the_small_model_runs() -> None:
    """A single token is the large model's; of two, the small model drafts the first."""
    costs = [UnitCost(LAYERS, cost_ratio=0.5), UnitCost(LAYERS, cost_ratio=0.5, operations_ratio=0.25)]
    choices = [MethodChoice(BildParameters(LAYERS, 1), tokens, cost) for tokens in (1, 2) for cost in costs]
    found = bild.predict_points(PredictionPoints(choices, [Independent(0.0, 0.0)], np.arange(4), np.zeros(4, dtype=np.intp)))
    assert found.operations is not None
    np.testing.assert_array_equal(found.operations, [1, 1, np.nan, 2.25])


@given(st.lists(DECISION_LAWS, min_size=1, max_size=4), bild_choices(), st.lists(EXIT_LAWS, min_size=1, max_size=4), exit_choices())
@settings(deadline=None)
def test_work_under_many_laws_is_that_of_each(
    decisions: list[Any], small: tuple[Any, int], depths: list[Any], early: tuple[Any, int]
) -> None:
    laws = [law for law in decisions if isinstance(law, Independent)] or [Independent(0.5, 0.5)]
    for theory, chosen, of in ((bild, small, laws), (early_exit, early, depths)):
        assert_work_of_each(theory, chosen, of, rtol=1e-12, atol=1e-14)
    assert bild.work_of_laws(*small, [RecordedDecisions([[0] * 20])]) is None
