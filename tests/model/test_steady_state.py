"""Times per token in the long run: the limit of the predictions for a number of tokens, for all draws and cells together."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.steady_prices import SteadyPrices
from model.costs.step_costs import PassShape
from model.engines import law_costs, step_law
from model.methods import registry
from model.methods.amusd.algorithm import Parameters as Amusd
from model.methods.dsi.algorithm import Parameters as Dsi
from model.methods.pearl.algorithm import Parameters as Pearl
from model.methods.ppd.algorithm import Parameters as Ppd
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import block_verification
from model.methods.speculative.algorithm import Parameters as Speculative
from model.methods.tree.algorithm import Parameters as Tree
from model.outcomes.outcome_laws import ByPosition, Iid
from model.outcomes.rank_laws import RankRates
from model.steps import LayerSpan

CURVE = ((1, 1.0), (2, 1.08), (4, 1.2), (8, 1.5), (64, 5.0))
"""Passes take longer with their width."""
RANKS = ((0.6, 0.2, 0.05), (0.5, 0.2, 0.1), (0.5, 0.1, 0.1))
CHAINS: list[tuple[str, Any]] = [
    ("amusd", Amusd(8, 4)), ("amusd", Amusd(8, 3, draft_stop="rejection", min_waiting=0)), ("amusd", Amusd(8, 8, min_waiting=1)),
    ("pearl", Pearl(8, 4)), ("pearl", Pearl(8, 5, draft_stop="rejection")), ("pearl", Pearl(8, 1)),
    ("dsi", Dsi(8, 1, 3)), ("dsi", Dsi(8, 4, 2)), ("dsi", Dsi(8, 5, 1)),
    ("speculative", Speculative(8, 3)), ("speculative", Speculative(8, 0)),
    ("ppd", Ppd(8, 4, 2)), ("ppd", Ppd(8, 6, 3, batched=True)), ("ppd", Ppd(8, 2, 3, form="flat")),
]  # fmt: skip


def cost_of(ratio: float) -> UnitCost:
    return UnitCost(8, cost_ratio=ratio, verify_cost=CURVE)


def prices_of(*ratios: float, draws: int = 1, waiting: float = 0.0) -> SteadyPrices:
    """Prices of cells with these cost ratios, the same in all draws."""
    shape = draws, len(ratios)
    costs = [cost_of(ratio) for ratio in ratios]
    draft = np.array([float(each.draft_times()) for each in costs])

    def seconds(width: int) -> np.ndarray[Any, Any]:
        return np.broadcast_to([float(each.verify_times(width)) for each in costs], shape)

    return SteadyPrices(seconds, np.broadcast_to(draft, shape), waiting=waiting)


def steady(name: str, parameters: Any, laws: list[Any], prices: SteadyPrices) -> np.ndarray[Any, Any]:
    of = registry.method(name).steady_state
    assert of is not None
    return np.asarray(of(parameters, laws, prices))


def increment(name: str, parameters: Any, law: Any, cost: UnitCost, tokens: int = 240) -> float:
    """Time of a token far from the beginning and the end: beyond both, the prediction is a line in the number of tokens."""
    first, last = (float(registry.method(name).predict(parameters, each, law, cost).latency) for each in (tokens, 2 * tokens))
    return (last - first) / tokens


@pytest.mark.parametrize("ratio", [0.05, 0.13, 0.31, 0.7, 1.2])
@pytest.mark.parametrize(("name", "parameters"), CHAINS)
def test_it_is_the_slope_of_the_prediction(name: str, parameters: Any, ratio: float) -> None:
    for alpha in (0.0, 0.3, 0.8):
        found = steady(name, parameters, [Iid(alpha)], prices_of(ratio))
        assert found[0, 0] == pytest.approx(increment(name, parameters, Iid(alpha), cost_of(ratio)), rel=1e-7)


@pytest.mark.parametrize(("name", "parameters", "time"), [
    ("amusd", Amusd(8, 8, min_waiting=1), 8 * 0.31), ("pearl", Pearl(8, 4), 8 * 0.31), ("dsi", Dsi(8, 4, 3), 8 * 0.31),
    ("speculative", Speculative(8, 3), 8 * (1.2 + 3 * 0.31) / 4),
])  # fmt: skip
def test_drafts_that_are_always_right_go_as_fast_as_drafting_or_rounds(name: str, parameters: Any, time: float) -> None:
    """Drafts that continue during verification: the draft model is the bottleneck at this ratio."""
    assert steady(name, parameters, [Iid(1.0)], prices_of(0.31))[0, 0] == pytest.approx(time, rel=1e-3)


@pytest.mark.parametrize("drafter", ["model", "heads", "parallel"])
def test_trees_of_every_drafter(drafter: str) -> None:
    law = RankRates([RANKS])
    for parameters in (Tree(8, "full", 2, 3, drafter=drafter), Tree(8, "sequoia", 3, nodes=6, rank_rates=RANKS, drafter=drafter)):
        found = steady("tree", parameters, [law], prices_of(0.1))[0, 0]
        assert found == pytest.approx(increment("tree", parameters, law, cost_of(0.1)), rel=1e-7)


def test_trees_of_classes_have_the_mean_of_the_classes_and_sequences_of_classes_no_such_time() -> None:
    easy, hard = [[[0.9, 0.05]] * 2, [[0.4, 0.2]] * 2]
    mixed, parameters = RankRates([easy, hard], [1, 3]), Tree(8, "full", 2, 2)
    found = steady("tree", parameters, [mixed], prices_of(0.1))[0, 0]
    assert found == pytest.approx(increment("tree", parameters, mixed, cost_of(0.1)), rel=1e-7)
    with pytest.raises(ParameterError, match="rates that hold for every draft"):
        steady("tree", parameters, [RankRates([easy, hard], by_sequence=True)], prices_of(0.1))


def test_block_verification_lies_between_its_bounds() -> None:
    """All that an acceptance rate tells of block verification are bounds; the distributions give a value between them."""
    p, q, length = [0.5, 0.3, 0.2], [0.2, 0.5, 0.3], 4
    block = block_verification.survival(p, q, length)
    alpha = float(np.minimum(p, q).sum())
    times = [
        steady("speculative", Speculative(8, length, sampled=True, verification=how), [Rounds(each)], prices_of(0.1))[0, 0]
        for how, each in (("token", alpha ** np.arange(1.0, length + 1)), ("block", block), ("block", np.full(length, alpha)))
    ]
    assert times[0] > times[1] > times[2]
    assert times[1] == pytest.approx(8 * (1.2 + (1.5 - 1.2) / 4 + length * 0.1) / (1 + block.sum()))


@given(rates=st.lists(st.floats(0, 1), min_size=2, max_size=3), ratios=st.lists(st.floats(0.02, 2), min_size=2, max_size=3))
def test_draws_and_cells_together_are_each_alone(rates: list[float], ratios: list[float]) -> None:
    for name, parameters in CHAINS[::3]:
        together = steady(name, parameters, [Iid(each) for each in rates], prices_of(*ratios, draws=len(rates)))
        for row, column in ((0, 0), (len(rates) - 1, len(ratios) - 1)):
            alone = steady(name, parameters, [Iid(rates[row])], prices_of(ratios[column]))[0, 0]
            # The number of positions that are summed one by one depends on the largest rate of all draws.
            assert together[row, column] == pytest.approx(alone, rel=2e-3 if rates[row] > 0.98 else 1e-6)


def test_work_for_others_is_added_once_per_token() -> None:
    for name, parameters in CHAINS:
        with_, without = (steady(name, parameters, [Iid(0.6)], prices_of(0.2, waiting=each))[0, 0] for each in (0.25, 0.0))
        assert with_ == pytest.approx(without + 0.25)


@pytest.mark.parametrize("name", ["amusd", "pearl", "dsi", "ppd", "speculative"])
def test_laws_by_output_position_are_refused(name: str) -> None:
    parameters = next(each for known, each in CHAINS if known == name)
    with pytest.raises(ParameterError, match="predict a number of tokens instead"):
        steady(name, parameters, [ByPosition([0.5] * 9)], prices_of(0.2))


def test_prices_of_a_law_are_those_of_its_cells_draw_by_draw() -> None:
    law = step_law.load("vllm-llama-3.1-8b-eagle3-h100")
    batches, contexts = np.array([1.0, 8, 64]), np.array([1000.0, 1000, 4000])
    likely = law_costs.steady_prices(law, batches, contexts)
    assert likely.verify(4)[0] == pytest.approx(law.pass_seconds(batches, 4, contexts)[0])
    assert likely.draft[0] == pytest.approx(law.draft_seconds(batches, contexts)[0])
    assert likely.branched(5)[0] == pytest.approx(law.draft_seconds(5 * batches, contexts)[0])
    assert np.asarray(likely.sequences).tolist() == batches.tolist()
    drawn = law_costs.steady_prices(law, batches, contexts, draws=5)
    for draw in range(5):
        alone = law_costs.steady_prices(law.drawn(draw), batches, contexts)
        assert drawn.verify(3)[draw] == pytest.approx(alone.verify(3)[0])
        assert drawn.draft[draw] == pytest.approx(alone.draft[0])
    cost = PassSeconds({"target": law_costs.LawTarget(law, preset("llama-3.1-8b"))}, batch=8, prompt=1000)
    for share, begins in ((0.25, True), (0.5, False)):
        first = 0 if begins else 16
        part_of = cost.times(PassShape(LayerSpan(first, first + round(32 * share))))
        assert likely.part(share, begins=begins)[0, 1] == pytest.approx(float(part_of))
    part = drawn.at([2, 0])
    assert part.verify(2).tolist() == drawn.verify(2)[:, [2, 0]].tolist()
    assert part.widths(3).shape == (5, 2, 3)


@pytest.mark.parametrize("form", ["eager", "nested"])
def test_forms_of_ppd_without_a_barrier_have_no_such_time(form: str) -> None:
    with pytest.raises(ParameterError, match="form must be 'literal' or 'flat'"):
        steady("ppd", Ppd(8, 4, 2, form=form), [Iid(0.5)], prices_of(0.2))
