"""PEARL with costs that depend on the position: formula, paths and events price each pass at its position."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.pearl import paths, theory
from model.methods.pearl.algorithm import DRAFT_STOPS, REJECTION, ROUND, Parameters, decode
from model.methods.prediction import MethodChoice, PredictionPoints, predict_separately
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, Replay
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import BUDGETS, growing
from tests.support.tiers import examples

LAYERS = 4
LAWS: dict[str, Any] = {
    "iid": Iid(0.6), "position": ByPosition([0.9, 0.2, 0.6, 0.8, 0.5, 0.7, 0.4]), "markov": Markov(0.6, 0.3),
    "replay": Replay([[True, False, True, True, True, False, True], [True, True, True, False, True, True, False]]),
}  # fmt: skip


def simulated(parameters: Parameters, tokens: int, cost: PassSeconds, accepted: tuple[bool, ...]) -> Run:
    survivors = [next((place for place, hit in enumerate(accepted[at:]) if not hit), 0) for at in range(len(accepted))]
    world = World(1, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})
    return simulate(decode(parameters, [0], tokens), tokens, Cluster(parameters.units), cost, world)


costs = st.builds(
    lambda draft, prompt, link, devices: growing(LAYERS, draft=draft, prompt=prompt, link=link, draft_devices=devices),
    st.floats(0.02, 3), st.integers(0, 30), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
)  # fmt: skip


def chance_of(law: Any, path: tuple[bool, ...]) -> float:
    if isinstance(law, Replay):
        return float(np.mean([tuple(record[: len(path)]) == path for record in law.records.astype(bool).tolist()]))
    low, high = law.probabilities(max(len(path), 1))
    before = (False, *path)
    rates = [high[place] if before[place] else low[place] for place in range(len(path))]
    return math.prod(float(rate if hit else 1 - rate) for rate, hit in zip(rates, path, strict=True))


@given(costs, st.integers(1, 6), st.integers(1, 4), st.sampled_from([*LAWS]), st.sampled_from(DRAFT_STOPS), BUDGETS)
@settings(max_examples=examples(40), deadline=None)
def test_all_views_price_each_pass_at_its_position(
    cost: PassSeconds, tokens: int, gamma: int, kind: str, stop: str, budget: int | None
) -> None:
    """Paths agree with the simulator on every path; the formula gives the mean and variance over all of them."""
    parameters, law = Parameters(LAYERS, gamma, sampled=gamma % 2 == 0, draft_stop=stop, context_budget=budget), LAWS[kind]
    every = [*itertools.product((False, True), repeat=tokens - 1)]
    runs = [simulated(parameters, tokens, cost, (*each, False)) for each in every]
    times, held = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    block = np.zeros((tokens - 1, BLOCK), dtype=np.bool_)
    block[:, : len(every)] = np.array(every, dtype=np.bool_).reshape(len(every), tokens - 1).T
    tally = paths.walk(parameters, tokens, cost, iter([lambda _, row=row: row for row in block]))
    np.testing.assert_allclose(tally.time[: len(every)], times, rtol=1e-12)
    np.testing.assert_allclose(tally.busy[: len(every)], held, rtol=1e-12)
    work = np.array([theory.operations(parameters, cost, run.rounds, run.account) for run in runs])
    np.testing.assert_allclose(tally.operations[: len(every)], work, rtol=1e-12)
    chance = np.array([chance_of(law, each) for each in every])
    found = theory.predict(parameters, tokens, law, cost)
    assert float(found.latency) == pytest.approx(float(chance @ times), rel=1e-12)
    assert float(found.busy) == pytest.approx(float(chance @ held), rel=1e-12)
    assert found.operations is not None
    assert float(found.operations) == pytest.approx(float(chance @ work), rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(float(chance @ times**2 - (chance @ times) ** 2), abs=1e-9)
    slowest, busiest = theory.slowest(parameters, tokens, cost)
    assert times.max() <= slowest * (1 + 1e-12)
    assert held.max() <= busiest * (1 + 1e-12)


@pytest.mark.parametrize("stop", DRAFT_STOPS)
def test_paths_agree_with_simulator_on_long_decoding(stop: str) -> None:
    """The draft model is slower than the target in some rounds, faster in others."""
    cost, tokens, parameters = growing(LAYERS, draft=0.55, link=0.2, draft_devices=0.25), 60, Parameters(LAYERS, 3, draft_stop=stop)
    rng = np.random.default_rng(1)
    block = rng.random((tokens - 1, BLOCK)) < np.linspace(0.2, 1, BLOCK)
    tally = paths.walk(parameters, tokens, cost, iter([lambda _, row=row: row for row in block]))
    for index in range(0, BLOCK, BLOCK // 5):
        run = simulated(parameters, tokens, cost, (*block[:, index].tolist(), False))
        assert (float(tally.time[index]), float(tally.busy[index])) == pytest.approx((run.latency, run.busy), rel=1e-12)


def test_demand_is_that_of_drafts_within_their_budget() -> None:
    """Drafts of the whole context outlast the target's pass, so that a rejection stops them midway; shorter ones do not."""
    cost = growing(LAYERS, draft=2.0, prompt=400, link=0.01)
    limited, whole = (Parameters(LAYERS, 2, draft_stop=REJECTION, context_budget=budget) for budget in (1, None))
    assert limited.demand(cost, 9) == whole.demand(cost.within_budgets({"draft": 1}), 9)
    assert (limited.demand(cost, 9).stopped, whole.demand(cost, 9).stopped) == (None, "anywhere")


def test_predict_points_equals_single_predictions() -> None:
    """Uniform and position-dependent costs, several lengths and drafts."""
    laws = [Iid(0.7), LAWS["replay"], LAWS["markov"]]
    prices = (growing(LAYERS, draft=0.4, link=0.3), growing(LAYERS, draft=1.2, prompt=9), UnitCost(LAYERS, cost_ratio=0.25))
    choices = [
        MethodChoice(Parameters(LAYERS, gamma, draft_stop=stop), tokens, cost)
        for gamma, stop in ((1, ROUND), (3, ROUND), (3, REJECTION)) for tokens in (1, 4, 7) for cost in prices
    ]  # fmt: skip
    choice, law = (each.reshape(-1) for each in np.indices((len(choices), len(laws))))
    together = theory.predict_points(PredictionPoints(choices, laws, choice, law))
    alone = predict_separately(theory.predict, PredictionPoints(choices, laws, choice, law))
    for name in ("latency", "latency_variance", "busy", "units_ratio", "plain_latency", "rounds", "drafted", "operations"):
        assert getattr(together, name) == pytest.approx(getattr(alone, name), rel=1e-12, abs=1e-9, nan_ok=True), name


def test_constant_costs_in_seconds_equal_layer_times() -> None:
    """Times in seconds equal layer-times multiplied by the seconds of a layer."""
    target, draft = (UniformLayers(growing(depth).hardware_models["target"].shape, 0.002) for depth in (LAYERS, 1))
    seconds = PassSeconds({"target": target, "draft": draft}, prompt=7, link=0.003, draft_devices=0.5)
    layers = UnitCost(LAYERS, cost_ratio=1 / LAYERS, link=1.5, draft_devices=0.5)
    for gamma in (1, 2, 5):
        one, other = (theory.predict(Parameters(LAYERS, gamma), 50, Iid(0.7), cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        assert float(one.latency_variance) == pytest.approx(0.002**2 * float(other.latency_variance), rel=1e-9, abs=1e-15)
