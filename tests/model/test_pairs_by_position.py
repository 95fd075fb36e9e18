"""Many laws at many costs with times by position: each pair is predicted as alone, in blocks of any size."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.costs.layer_times import UnitCost
from model.costs.many_costs import UnitCosts, joined
from model.costs.many_seconds import VariedSeconds
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import WithEngineOverhead
from model.methods import prediction, registry, stages
from model.methods.bild import algorithm as bild
from model.methods.bild import finite_bild
from model.methods.bild.threshold_decisions import Independent
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.ngram import lookup_rounds
from model.methods.ppd import algorithm as ppd
from model.methods.prediction import ChoiceGroup, GroupedChoices, PredictionPoints
from model.methods.rounds.prices_of_rounds import drafted_by_start
from model.methods.rounds.round_starts import starts_by_accepted
from model.methods.self_speculative import algorithm as self_speculative
from model.methods.self_speculative import theory as self_speculative_theory
from model.methods.tree import algorithm as tree
from model.methods.tree import tree_rounds
from model.outcomes import round_counts
from model.outcomes.lookup_laws import Lookups
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, Replay
from model.outcomes.rank_laws import RankRates
from tests.support.position_costs import GrowingContext
from tests.support.tiers import examples

LAYERS, TOKENS = 32, 9
MODELS = {"target": GrowingContext(preset("llama-3.1-8b"), error=0.1), "draft": GrowingContext(preset("llama-3.2-1b"), 0.2)}
RATES = [Iid(0.25), Iid(0.75), Iid(1.0)]
RANKS = [RankRates([[[first, second]] * 3]) for first, second in ((0.5, 0.25), (0.75, 0.125), (0.0, 1.0))]


class Decodings(NamedTuple):
    """Parameters of a method, and its laws."""

    method: str
    parameters: dict[str, Any]
    laws: list[Any]


CASES = {
    "autoregressive": Decodings("autoregressive", {}, [None]),
    "bild": Decodings("bild", {"max_draft_length": 3}, Independent.each([0.25, 0.5, 0.0], [0.5, 0.125, 0.25])),
    "bild, code": Decodings(
        "bild", {"max_draft_length": 3, "variant": "code", "placement": "separate"}, Independent.each([0.25, 0.5], [0.5, 0.125]),
    ),
    "bild, rates by position": Decodings("bild", {"max_draft_length": 3}, [Independent([0.25, 0.5] * 6, [0.5, 0.125] * 6)]),
    "early exit": Decodings("early_exit", {"exit_layer": 8}, [None]),
    "early exit, hazards": Decodings(
        "early_exit", {"measure": "state"}, [Depths(np.full(LAYERS, 1 / LAYERS)), Depths(np.eye(LAYERS)[3])],
    ),
    "ngram": Decodings("ngram", {"draft_length": 4}, [Lookups.of_rates(0.5, rate, 4) for rate in (0.0, 0.5, 0.75)]),
    "ngram, in stretches": Decodings("ngram", {"draft_length": 4}, [Lookups.of_rates((0.25, 0.75), 0.5, 4)]),
    "ngram, kept full": Decodings("ngram", {"draft_length": 4, "sequences": 2}, [Lookups.of_rates(0.5, 0.5, 4)]),
    "ppd": Decodings("ppd", {"exit_layer": 20, "candidates": 2}, [*RATES, Markov(0.5, 0.5), ByPosition([0.5, 0.25] * 6)]),
    "ppd, flat": Decodings("ppd", {"exit_layer": 8, "candidates": 2, "form": "flat"}, [*RATES, Replay([[True, False] * 6])]),
    "ppd, eager": Decodings("ppd", {"exit_layer": 20, "candidates": 2, "form": "eager"}, RATES),
    "self-speculative": Decodings("self_speculative", {"exit_layer": 8, "draft_length": 3}, RATES),
    "skipdecode": Decodings("skipdecode", {"min_layers": 8, "max_layers": 20, "prompt": 3, "sequence_length": 50}, [None]),
    "draft heads": Decodings("speculative", {"draft_length": 3, "drafter": "heads"}, RATES),
    "tree": Decodings("tree", {"shape": "full", "draft_depth": 3, "width": 2}, RANKS),
    "tree of a batch that is kept full": Decodings(
        "tree", {"shape": "full", "draft_depth": 2, "width": 2, "sequences": 2, "placement": "separate"}, RANKS,
    ),
    "tree, drafted anew": Decodings(
        "tree", {"shape": "eagle-2", "draft_depth": 3, "width": 2, "nodes": 4, "rank_rates": ((0.5, 0.25),) * 3}, RANKS,
    ),
    "tree by heads": Decodings("tree", {"shape": "full", "draft_depth": 2, "width": 2, "drafter": "heads"}, RANKS),
}  # fmt: skip


@contextmanager
def blocks_of(size: int, most_pairs: int) -> Iterator[None]:
    """Evaluate about this number of pairs together, and all pairs if they are at most so often the points."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (
            (prediction, "_CELLS"), (tree_rounds, "_MANY_PAIRS"), (tree_rounds, "_PAIRS"),
            (tree_rounds, "_FEW_LAWS"), (round_counts, "_POSITIONS"), (lookup_rounds, "_CELLS"), (lookup_rounds, "_PAIRS"),
            (stages, "_COLUMNS"), (stages, "_CHANCES"), (finite_bild, "_COUNTS"), (finite_bild, "_FEW_LAWS"),
        ):  # fmt: skip
            patch.setattr(module, name, size)
        patch.setattr(prediction, "_LARGEST_PRODUCT", most_pairs)
        yield


@st.composite
def costs_in_seconds(draw: st.DrawFn) -> VariedSeconds:
    size = draw(st.integers(1, 6))
    first = PassSeconds({role: WithEngineOverhead(model, 0.0) for role, model in MODELS.items()}, 2, link=0.125, promotion=0.25)
    numbers: dict[str, Any] = {"prompt": np.array(draw(st.lists(st.integers(0, 9), min_size=size, max_size=size)))}
    if draw(st.booleans()):
        numbers["link"] = np.array(draw(st.lists(st.sampled_from([0.0, 0.5, 9.0]), min_size=size, max_size=size)))
    steps = {"target": np.array(draw(st.lists(st.sampled_from([0.0, 0.5]), min_size=size, max_size=size)))}
    found = VariedSeconds(first, size, numbers, steps if draw(st.booleans()) else {})
    return found.of(found.first.uncertainty_ends()[0]) if draw(st.booleans()) else found


@pytest.mark.parametrize("name", CASES)
@given(data=st.data())
@settings(max_examples=examples(6, 100), deadline=None)
def test_pairs_of_laws_and_costs_are_predicted_as_alone(name: str, data: st.DataObject) -> None:
    """Of those of which only means are asked all but the variance."""
    case, costs = CASES[name], data.draw(costs_in_seconds())
    method = registry.method(case.method)
    depth = {"draft_layers": 16} if "draft" in method.kind.ROLES else {}
    kind: Any = method.kind
    parameters = kind(layers=LAYERS, **depth, **case.parameters)
    places = st.tuples(st.integers(0, len(costs) - 1), st.integers(0, len(case.laws) - 1))
    choice, law = np.array(data.draw(st.lists(places, min_size=1, max_size=12)), dtype=np.intp).T
    means = np.array(data.draw(st.lists(st.booleans(), min_size=law.size, max_size=law.size)))
    groups: GroupedChoices[Any] = GroupedChoices([ChoiceGroup(parameters, TOKENS, costs)])
    with blocks_of(data.draw(st.sampled_from([1, 2, 100_000])), data.draw(st.sampled_from([0, 4]))):
        found = method.predict_points(PredictionPoints(groups, case.laws, choice, law, means))
    for place, (which, of) in enumerate(zip(choice.tolist(), law.tolist(), strict=True)):
        alone = method.predict(parameters, TOKENS, case.laws[of], costs[which])
        for column, values in vars(alone).items():
            if values is None or (column == "latency_variance" and means[place]):
                continue
            scale = float(alone.latency) ** 2 if column == "latency_variance" else abs(float(values))
            ours = float(getattr(found, column)[place])
            assert np.isnan(ours) == np.isnan(values), column
            assert np.isnan(ours) or abs(ours - float(values)) <= 1e-13 * scale, column


@given(
    st.lists(st.floats(-1, 1), min_size=1, max_size=40), st.lists(st.floats(0, 0.25), min_size=1, max_size=4),
    st.sampled_from([1, 3, 64]),
)  # fmt: skip
def test_values_that_follow_are_those_of_a_recursion(values: list[float], chance: list[float], positions: int) -> None:
    expected: list[float] = []
    for value in values:
        expected.append(value + sum(likely * before for likely, before in zip(chance, expected[::-1], strict=False)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_counts, "_POSITIONS", positions)
        found = round_counts.followed(np.array([values, values]).T, np.array(chance))
    np.testing.assert_allclose(found, np.array([expected, expected]).T, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("tokens", [1, 2, 3, 4, 9])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_starts_by_accepted_are_those_of_rates_by_position(length: int, tokens: int) -> None:
    rates = [0.25, 0.75, 1.0]
    found = starts_by_accepted(length, tokens, [Iid(rate) for rate in rates])
    expected = [starts_by_accepted(length, tokens, [ByPosition([rate] * tokens)])[0] for rate in rates]
    np.testing.assert_allclose(found, expected, atol=1e-15)


@pytest.mark.parametrize("variant", ["paper", "code"])
@pytest.mark.parametrize("tokens", [1, 2, 4, 5, 12])
def test_segments_of_constant_rates_are_those_of_rates_by_position(tokens: int, variant: str) -> None:
    parameters = bild.Parameters(layers=4, max_draft_length=3, variant=variant)
    constant, listed = Independent(0.25, 0.5), Independent([0.25] * tokens, [0.5] * tokens)
    for by_position in (False, True):
        one, other = (finite_bild.counts_of(parameters, tokens, [law], by_position=by_position) for law in (constant, listed))
        for ours, theirs in zip(one, other, strict=True):
            np.testing.assert_allclose(ours, theirs, atol=1e-15)


@pytest.mark.parametrize("form", ["literal", "flat", "eager", "nested"])
@given(costs=costs_in_seconds(), late=st.sampled_from([8, 4, 0]), tokens=st.integers(1, 4))
@settings(deadline=None, max_examples=examples(15, 100))
def test_demands_of_several_costs_are_those_of_each(form: str, costs: VariedSeconds, late: int, tokens: int) -> None:
    """Of forms with a barrier; none are known of the others."""
    exit_layer = LAYERS - (3 if form == "flat" else 1) * late
    parameters = ppd.Parameters(LAYERS, exit_layer, 2, form=form)
    found: Any = parameters.demands(joined(costs), tokens)
    if form in ("eager", "nested"):
        assert found is None
        return
    assert found is not None
    for place, cost in enumerate(costs):
        one = parameters.demand(cost, tokens)
        assert (found.units[place], found.transfers[place]) == (one.units, one.transfers)


@given(costs_in_seconds())
@settings(deadline=None, max_examples=examples(15, 100))
def test_functions_of_costs_are_evaluated_once_where_these_are_alike(costs: VariedSeconds) -> None:
    def of_link(cost: PassSeconds) -> bool:
        return bool(cost.link)

    def of_models(cost: PassSeconds) -> float:
        return cost.hardware_models["target"].shape.layers

    values, index = costs.distinct(of_link) or ([], [])
    assert [values[place] for place in index] == [bool(cost.link) for cost in costs]
    assert (costs.distinct(of_models) is None) == bool(costs.steps)  # the models pay different overheads
    assert costs.distinct(lambda cost: cost.prompt + 1) is None


def test_passes_over_other_layers_share_times_of_a_layer() -> None:
    """Also those of subsets of costs, and those without overheads."""
    asked: list[int] = []

    class Counted(GrowingContext):
        def layer(self, width: Any, context: Any, batch: Any = 1, *, busy: int = 0) -> Any:
            asked.append(np.size(context))
            return super().layer(width, context, batch, busy=busy)

    first = PassSeconds({"target": WithEngineOverhead(Counted(MODELS["target"].shape), 0.5)})
    costs = VariedSeconds(first, 3, {"prompt": np.array([0, 4, 9])})
    for each in (costs, costs.passes_only(), costs.at(np.array([2, 0]))):
        cost = joined(each)
        for shape in (ppd.Parameters(LAYERS, 20, 2).sub_process(layers) for layers in (8, 12, LAYERS)):
            cost.times(shape, np.arange(4))
        cost.plain_times(np.arange(4))
    assert len(asked) == 1


def test_costs_with_layers_of_different_times_are_not_plain() -> None:
    uneven = UnitCost(2, layer_times=(0.5, 1.5))
    assert [cost.plain for cost in (joined([UnitCost(2)] * 2), joined([uneven] * 2), UnitCosts([uneven]))] == [True, False, False]


SECONDS = PassSeconds(MODELS, 3)


def test_transfers_of_trees_take_no_unit() -> None:
    parameters = tree.Parameters(LAYERS, "full", 2, 2, placement="separate", draft_layers=16)
    usual, moved = (tree_rounds.prices(parameters, replace(SECONDS, link=link), TOKENS) for link in (0.0, 0.5))
    np.testing.assert_array_equal(moved.busy, usual.time)
    drafting = usual.levels > 0
    np.testing.assert_allclose(moved.time - usual.time, np.where(drafting, 1.0, 0.0)[:, None] * np.ones(2), atol=1e-12)


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("length", [0, 1, 3])
def test_prices_by_start_are_those_of_the_drafts_from_there(length: int, reuse: bool) -> None:
    parameters = self_speculative.Parameters(LAYERS, 8, length, reuse)
    found = self_speculative_theory._prices_by_start(parameters, SECONDS, TOKENS)
    every = self_speculative_theory.round_prices(parameters, SECONDS, tokens=TOKENS)
    expected = every.by_start(drafted_by_start(length, TOKENS, parameters.cut))
    for ours, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-13)


def test_plain_decoding_takes_a_certain_time() -> None:
    kind: Any = registry.parameters("autoregressive")
    found = registry.method("autoregressive").predict(kind(layers=LAYERS), TOKENS, None, SECONDS)
    assert float(found.latency_variance) == 0
    assert float(found.latency) == pytest.approx(SECONDS.plain_time(TOKENS))
