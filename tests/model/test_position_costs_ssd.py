"""SSD with costs that depend on the position: formula, paths and events price each pass at its position."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import RankedPositions
from model.methods.prediction import MethodChoice, PredictionPoints, predict_separately
from model.methods.ssd import paths, theory
from model.methods.ssd.algorithm import BACKUPS, DRAFT, NONE, Parameters, decode
from model.outcomes.position_ranks import PositionRankRates, PositionRanks, RecordedPositionRanks
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import BUDGETS, growing
from tests.support.tiers import examples

LAYERS = 4
LAWS: dict[str, PositionRanks] = {
    "rates": PositionRankRates([0.5, 0.2, 0.15]), "certain": PositionRankRates([0.7, 0.3, 0.0]),
    "records": RecordedPositionRanks([[1, 2, 1, 0, 3, 1], [1, 1, 1, 1, 2, 3]]),
}  # fmt: skip
SHAPES = st.sampled_from([(1, (1, 1)), (1, (2, 1)), (2, (2, 1, 2)), (3, (2, 2, 1, 1)), (3, (1, 1, 2, 2))])


def simulated(parameters: Parameters, tokens: int, cost: PassSeconds, ranks: tuple[int, ...]) -> Run:
    world = RankedPositions(1, LAYERS, ranks)
    return simulate(decode(parameters, [0], tokens), tokens, Cluster(parameters.units), cost, world)


def chance_of(law: PositionRanks, path: tuple[int, ...]) -> float:
    tables = law.tables(max(len(path), 1))
    every = [np.column_stack([1 - table.sum(axis=1), table]) for table in tables]
    return float(np.mean([math.prod(float(each[place, rank]) for place, rank in enumerate(path)) for each in every]))


costs = st.builds(
    lambda draft, prompt, link, devices: growing(LAYERS, draft=draft, prompt=prompt, link=link, draft_devices=devices),
    st.floats(0.02, 5), st.integers(0, 30), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
)  # fmt: skip


@given(costs, st.integers(1, 6), SHAPES, st.sampled_from([*LAWS]), st.sampled_from(BACKUPS), BUDGETS)
@settings(max_examples=examples(30), deadline=None)
def test_all_views_price_each_pass_at_its_position(
    cost: PassSeconds, tokens: int, shape: tuple[int, tuple[int, ...]], kind: str, backup: str, budget: int | None
) -> None:
    """Paths agree with the simulator on every path; the formula gives the mean and variance over all of them."""
    parameters, law = Parameters(LAYERS, *shape, backup, sampled=tokens % 2 == 0, context_budget=budget), LAWS[kind]
    every = [path for path in itertools.product(range(4), repeat=tokens - 1) if chance_of(law, path) > 0]
    runs = [simulated(parameters, tokens, cost, (*each, 0)) for each in every]
    times, held = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    block = np.zeros((tokens - 1, BLOCK), dtype=np.uint16)
    block[:, : len(every)] = np.array(every, dtype=np.uint16).reshape(len(every), tokens - 1).T
    tally = paths.walk(parameters, tokens, cost, iter([block]))
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


@pytest.mark.parametrize("backup", BACKUPS)
def test_paths_agree_with_simulator_on_long_decoding(backup: str) -> None:
    """The preparation is longer than the target's pass in some rounds, shorter in others."""
    cost, tokens = growing(LAYERS, draft=0.3, link=0.2, draft_devices=0.25), 60
    parameters, rng = Parameters(LAYERS, 3, (3, 1, 2, 2), backup), np.random.default_rng(1)
    block = rng.integers(0, 5, (tokens - 1, BLOCK)).astype(np.uint16)
    block[rng.random(block.shape) < np.linspace(0, 1, BLOCK)] = 1
    tally = paths.walk(parameters, tokens, cost, iter([block]))
    for index in range(0, BLOCK, BLOCK // 5):
        run = simulated(parameters, tokens, cost, (*block[:, index].tolist(), 0))
        assert (float(tally.time[index]), float(tally.busy[index])) == pytest.approx((run.latency, run.busy), rel=1e-12)


def test_predict_points_equals_single_predictions() -> None:
    """Uniform and position-dependent costs, several lengths and fan-outs."""
    laws = [*LAWS.values()]
    prices = (growing(LAYERS, draft=0.4, link=0.3), growing(LAYERS, draft=1.2, prompt=9), UnitCost(LAYERS, cost_ratio=0.25))
    choices = [
        MethodChoice(Parameters(LAYERS, gamma, fan_out, backup), tokens, cost)
        for gamma, fan_out, backup in ((1, 1, DRAFT), (3, (2, 1, 1, 2), DRAFT), (3, 2, NONE)) for tokens in (1, 4, 6)
        for cost in prices
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
    layers, law = UnitCost(LAYERS, cost_ratio=1 / LAYERS, link=1.5, draft_devices=0.5), LAWS["rates"]
    for gamma in (1, 2, 5):
        one, other = (theory.predict(Parameters(LAYERS, gamma, 2), 50, law, cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        assert float(one.latency_variance) == pytest.approx(0.002**2 * float(other.latency_variance), rel=1e-9, abs=1e-15)
