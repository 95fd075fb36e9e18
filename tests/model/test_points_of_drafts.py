"""Points of static batches and of trees that are evaluated together: equal to each point alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import StepCosts
from model.hardware.devices import device
from model.hardware.roofline import Roofline
from model.methods.adaptive import adaptive_rounds, heuristic_rounds
from model.methods.adaptive import theory as adaptive
from model.methods.adaptive.algorithm import Parameters as AdaptiveParameters
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.rounds import rounds_of_batches, starts_by_round
from model.methods.rounds.round_laws import Rounds
from model.methods.self_speculative import theory as self_speculative
from model.methods.self_speculative.algorithm import Parameters as SelfParameters
from model.methods.speculative import theory as speculative
from model.methods.speculative.algorithm import Parameters as SpeculativeParameters
from model.methods.tree import theory as tree
from model.methods.tree.algorithm import Parameters as TreeParameters
from model.outcomes.outcome_laws import Iid, Markov, RecordedProbabilities, Replay, TwoClass
from model.outcomes.rank_laws import RankRates
from tests.model.test_many_costs import LAYERS, position_costs, unit_costs
from tests.support.exact import assert_work_of_each
from tests.support.position_costs import growing
from tests.support.tiers import examples

RATES = st.floats(0, 1) | st.sampled_from([0.0, 1.0])
ACCEPTANCES = (
    RATES.map(Iid)
    | st.tuples(st.floats(0.1, 0.9), st.floats(0, 0.8)).map(lambda each: Markov(*each))
    | st.lists(RATES, min_size=4, max_size=4).map(Rounds.by_draft_position)
)
TABLES = st.lists(st.tuples(st.floats(0, 0.6), st.floats(0, 0.4)), min_size=3, max_size=3)
RANKS = st.tuples(TABLES, TABLES, st.floats(0.1, 0.9)).map(lambda each: RankRates(each[:2], [each[2], 1 - each[2]]))


@st.composite
def static_choices(draw: st.DrawFn) -> tuple[Any, int]:
    lengths = draw(st.none() | st.lists(st.integers(1, 9), min_size=1, max_size=4).map(tuple))
    tokens = draw(st.integers(1, 9)) if lengths is None else max(lengths)
    parameters = SpeculativeParameters(
        LAYERS, draw(st.integers(0, 4)), batching="static", sequences=draw(st.integers(1, 4)), lengths=lengths,
        placement=draw(st.sampled_from(["colocated", "separate"])), context_budget=draw(st.sampled_from([None, 2])),
    )  # fmt: skip
    return parameters, tokens


@st.composite
def tree_choices(draw: st.DrawFn) -> tuple[Any, int]:
    more: dict[str, Any] = draw(
        st.sampled_from([{}, {"drafter": "heads"}, {"sequences": 2}, {"placement": "separate"}, {"context_budget": 2}])
    )
    return TreeParameters(LAYERS, "full", draw(st.integers(1, 3)), 2, **more), draw(st.integers(1, 9))


@st.composite
def adaptive_choices(draw: st.DrawFn) -> tuple[Any, int]:
    policy, longest = draw(st.sampled_from(["heuristic", "heuristic", "confidence", "gradient"])), draw(st.integers(1, 4))
    first = {"draft_length": draw(st.integers(1, longest))} if policy == "heuristic" else {}
    placement = draw(st.sampled_from(["colocated", "separate"]))
    return AdaptiveParameters(LAYERS, policy, max_draft_length=longest, placement=placement, **first), draw(st.integers(1, 9))


RECORDS = st.lists(st.lists(RATES, min_size=9, max_size=9), min_size=1, max_size=3)
DOUBTS = st.tuples(RATES, RATES).map(lambda each: TwoClass(min(each), max(each)))
ADAPTIVE_LAWS = st.builds(
    lambda accept, confidence: {"accept": accept, "confidence": confidence},
    ACCEPTANCES | RECORDS.map(RecordedProbabilities) | RECORDS.map(lambda rows: Replay(np.array(rows) > 0.5)), DOUBTS,
)  # fmt: skip
THEORIES: dict[str, Any] = {
    "batches": (speculative, static_choices(), ACCEPTANCES), "trees": (tree, tree_choices(), RANKS),
    "adaptive": (adaptive, adaptive_choices(), ADAPTIVE_LAWS),
}  # fmt: skip


@given(st.data(), st.sampled_from([*THEORIES]), st.booleans())
@settings(max_examples=examples(60, 600), deadline=None)
def test_points_of_drafts_together_equal_each_alone(data: st.DataObject, kind: str, blocks: bool) -> None:
    """Also if few laws are evaluated together, and few rounds."""
    theory, decodings, laws = THEORIES[kind]
    choices = [
        MethodChoice(*chosen, cost)
        for chosen in data.draw(st.lists(decodings, min_size=1, max_size=2))
        for cost in data.draw(st.lists(unit_costs() | position_costs(), min_size=1, max_size=3))
    ]
    known = data.draw(st.lists(laws, min_size=1, max_size=4))
    pairs = st.tuples(st.integers(0, len(choices) - 1), st.integers(0, len(known) - 1))
    choice, law = np.array(data.draw(st.lists(pairs, min_size=1, max_size=8)), dtype=np.intp).T
    points = PredictionPoints(choices, known, choice, law)
    alone = [theory.predict_points(points.at(np.array([index]))) for index in range(law.size)]
    with pytest.MonkeyPatch.context() as patch:
        if blocks:
            for module, name, value in (
                (rounds_of_batches, "_TOGETHER", 1), (rounds_of_batches, "_KEPT", 0), (starts_by_round, "ROUNDS", 3),
                (adaptive_rounds, "CELLS", 40), (adaptive_rounds, "DECODINGS", 2), (heuristic_rounds, "CELLS", 40),
            ):  # fmt: skip
                patch.setattr(module, name, value)
        together = theory.predict_points(points)
    for index, one in enumerate(alone):
        for name, value in vars(one).items():
            # The variance of a certain time is 0 within roundings of the squared time.
            least = 8 * np.finfo(float).eps * one.latency[0] ** 2 if name == "latency_variance" else 0.0
            found = getattr(together, name)
            if value is None:  # a value that other points have is nan here
                assert found is None or np.isnan(found[index])
            else:
                np.testing.assert_allclose(found[index], value[0], rtol=1e-11, atol=max(1e-13, least), err_msg=name)


LAWS_OF_ADAPTIVE_DRAFTS: dict[str, Any] = {
    "independent": lambda each: Iid(0.1 * (each + 1)), "dependent": lambda each: Markov(0.2 + 0.08 * each, 0.1 * each),
    "records": lambda each: Replay(np.random.default_rng(each).random((2, 12)) < 0.6),
    "probabilities": lambda each: RecordedProbabilities(np.random.default_rng(each).random((2, 12)).tolist()),
}  # fmt: skip


@pytest.mark.parametrize(("laws", "costs"), [(2, 12), (9, 3)], ids=["products of counts", "times of pairs"])
@pytest.mark.parametrize("kind", [*LAWS_OF_ADAPTIVE_DRAFTS])
@pytest.mark.parametrize("seconds", [False, True])
@pytest.mark.parametrize(("lengths", "cells"), [([12], 80), ([9, 12, 3], 80), ([9, 12, 3], 1200)])
def test_adaptive_drafts_of_many_pairs(
    monkeypatch: pytest.MonkeyPatch, laws: int, costs: int, kind: str, seconds: bool, lengths: list[int], cells: int
) -> None:  # fmt: skip
    """More costs than numbers of drafted tokens, whose products are then counted; and pairs of which few are computed together."""
    monkeypatch.setattr(heuristic_rounds, "CELLS", cells)
    parameters = AdaptiveParameters(LAYERS, "heuristic", max_draft_length=4, draft_length=2)
    known = [LAWS_OF_ADAPTIVE_DRAFTS[kind](each) for each in range(laws)]
    of = [
        growing(LAYERS, draft=0.3, prompt=3 * each) if seconds else UnitCost(LAYERS, cost_ratio=0.05 * (each + 1))
        for each in range(costs)
    ]
    choice, law = (each.ravel() for each in np.indices((costs * len(lengths), laws)))
    means = np.arange(choice.size) % 4 == 1
    choices = [MethodChoice(parameters, tokens, cost) for cost in of for tokens in lengths]
    found = adaptive.predict_points(PredictionPoints(choices, known, choice, law, means))
    for index in range(0, choice.size, 5):
        _, tokens, cost = choices[choice[index]]
        one = adaptive.predict(parameters, tokens, known[law[index]], cost)
        for name, value in vars(one).items():
            if name != "latency_variance" or not means[index]:
                np.testing.assert_allclose(getattr(found, name)[index], value, rtol=1e-11, err_msg=name)


def test_adaptive_drafts_of_known_and_unknown_laws() -> None:
    """Drafts that end at a doubt have no closed form for records, but for other laws of the same points."""
    parameters = AdaptiveParameters(LAYERS, "confidence", max_draft_length=4)
    cost = UnitCost(LAYERS, cost_ratio=0.1, operations_ratio=0.1)
    laws: list[Any] = [{"accept": accept, "confidence": TwoClass(0.1, 0.6)} for accept in (Replay([[True] * 12]), Iid(0.7))]
    law, one = np.array([0, 1, 0]), np.zeros(3, dtype=np.intp)
    found = adaptive.predict_points(PredictionPoints([MethodChoice(parameters, 12, cost)], laws, one, law))
    for values in (found.latency, found.busy, found.units_ratio, found.rounds, found.drafted, found.operations):
        assert values is not None
        assert np.isnan(values).tolist() == [True, False, True]
    assert found.latency[1] == adaptive.predict(parameters, 12, laws[1], cost).latency
    assert adaptive.work_of_laws(parameters, 12, laws) is None


@pytest.mark.parametrize("cost", [UnitCost(LAYERS, cost_ratio=0.25), growing(LAYERS, draft=0.3, prompt=3, draft_devices=0.5)])
def test_static_batches_of_many_laws_are_those_of_each(cost: StepCosts) -> None:
    """More laws than are evaluated together, in any order, at several points each, and of two batches."""
    parameters = SpeculativeParameters(LAYERS, 2, batching="static", sequences=3, lengths=(9, 9, 9, 5, 9))
    laws = [Iid(rate / 100) for rate in range(101)]
    assert len(laws) > 2 * rounds_of_batches._MOST_LAWS
    law = np.array([7 * number % 101 for number in range(150)], dtype=np.intp)
    points = PredictionPoints([MethodChoice(parameters, 9, cost)], laws, np.zeros_like(law), law)
    found = speculative.predict_points(points)
    for index in range(0, 150, 7):
        one = speculative.predict(parameters, 9, laws[law[index]], cost)
        for name, value in vars(one).items():
            np.testing.assert_allclose(getattr(found, name)[index], value, rtol=1e-12, err_msg=name)


@given(st.lists(ACCEPTANCES, min_size=1, max_size=4), static_choices(), st.lists(RANKS, min_size=1, max_size=4), tree_choices())
@settings(deadline=None, max_examples=40)
def test_work_of_drafts_under_many_laws_is_that_of_each(
    acceptances: list[Any], batch: tuple[Any, int], ranks: list[Any], drafted: tuple[Any, int]
) -> None:
    own = SelfParameters(LAYERS, 1, 2), batch[1]
    for theory, chosen, laws in ((speculative, batch, acceptances), (self_speculative, own, acceptances), (tree, drafted, ranks)):
        assert_work_of_each(theory, chosen, laws, rtol=1e-11, atol=1e-13)


def test_equal_batches_take_the_sum_of_their_totals() -> None:
    one, two = (SpeculativeParameters(LAYERS, 2, batching="static", sequences=2, lengths=(5, 5) * count) for count in (1, 2))
    cost = UnitCost(LAYERS, cost_ratio=0.25, operations_ratio=0.5)
    found = [speculative.predict(each, 5, Iid(0.6), cost) for each in (one, two)]
    for name in ("latency", "busy", "operations", "rounds", "drafted"):
        np.testing.assert_allclose(getattr(found[1], name), 2 * getattr(found[0], name), rtol=1e-13)


def test_a_context_budget_shortens_static_batches_on_hardware() -> None:
    draft = Roofline.on_device(preset("llama-3.2-1b"), device("h100"))
    cost = PassSeconds({"target": draft, "draft": draft}, prompt=32_000)
    whole, less = (
        SpeculativeParameters(16, 2, batching="static", sequences=4, context_budget=budget) for budget in (None, 512)
    )
    shorter = speculative.predict(less, 6, Iid(0.6), cost).latency
    assert shorter < 0.9 * speculative.predict(whole, 6, Iid(0.6), cost).latency
    np.testing.assert_allclose(shorter, speculative.predict(whole, 6, Iid(0.6), cost.within_budgets({"draft": 512})).latency)
