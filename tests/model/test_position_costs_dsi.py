"""DSI with costs that depend on position and width: formula, paths and events price each pass at its own."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.dsi import paths, theory
from model.methods.dsi.algorithm import Parameters, decode
from model.outcomes.outcome_laws import Iid
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.model.test_position_costs_pearl import LAWS, LAYERS, chance_of
from tests.support.position_costs import BUDGETS, growing
from tests.support.tiers import examples


def simulated(parameters: Parameters, tokens: int, cost: PassSeconds, accepted: tuple[bool, ...]) -> Run:
    survivors = [next((place for place, hit in enumerate(accepted[at:]) if not hit), 0) for at in range(len(accepted))]
    world = World(1, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})
    return simulate(decode(parameters, [0], tokens), tokens, Cluster(parameters.units), cost, world)


costs = st.builds(
    lambda draft, prompt, link, devices: growing(LAYERS, draft=draft, prompt=prompt, link=link, draft_devices=devices),
    st.floats(0.02, 3), st.integers(0, 30), st.sampled_from((0.0, 0.4, 5.0)), st.sampled_from((1.0, 0.5)),
)  # fmt: skip


@given(costs, st.integers(1, 6), st.integers(1, 4), st.integers(1, 4), st.sampled_from([*LAWS]), BUDGETS)
@example(growing(LAYERS, draft=3.0, link=0.0), 3, 1, 2, "iid", None)  # a draft slower than the target, with free links
@settings(max_examples=examples(40), deadline=None)
def test_all_views_price_each_pass_at_its_position(
    cost: PassSeconds, tokens: int, lookahead: int, verifiers: int, kind: str, budget: int | None
) -> None:
    """Paths agree with the simulator on every path; the formula gives the mean and variance over all of them."""
    parameters = Parameters(LAYERS, lookahead, verifiers, sampled=verifiers % 2 == 0, context_budget=budget)
    law = LAWS[kind]
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


@pytest.mark.parametrize("verifiers", [1, 2, 5])
def test_paths_agree_with_simulator_on_long_decoding(verifiers: int) -> None:
    cost, tokens, parameters = growing(LAYERS, draft=0.3, link=0.2, draft_devices=0.25), 60, Parameters(LAYERS, 3, verifiers)
    rng = np.random.default_rng(1)
    block = rng.random((tokens - 1, BLOCK)) < np.linspace(0.2, 1, BLOCK)
    tally = paths.walk(parameters, tokens, cost, iter([lambda _, row=row: row for row in block]))
    for index in range(0, BLOCK, BLOCK // 5):
        run = simulated(parameters, tokens, cost, (*block[:, index].tolist(), False))
        assert (float(tally.time[index]), float(tally.busy[index])) == pytest.approx((run.latency, run.busy), rel=1e-12)


def test_constant_costs_in_seconds_equal_layer_times() -> None:
    """Times in seconds equal layer-times multiplied by the seconds of a layer."""
    target, draft = (UniformLayers(growing(depth).hardware_models["target"].shape, 0.002) for depth in (LAYERS, 1))
    seconds = PassSeconds({"target": target, "draft": draft}, prompt=7, link=0.003, draft_devices=0.5)
    layers = UnitCost(LAYERS, cost_ratio=1 / LAYERS, link=1.5, draft_devices=0.5)
    for ahead, verifiers in ((1, 4), (2, 1), (5, 2)):
        one, other = (theory.predict(Parameters(LAYERS, ahead, verifiers), 50, Iid(0.7), cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        assert float(one.latency_variance) == pytest.approx(0.002**2 * float(other.latency_variance), rel=1e-9, abs=1e-15)


def test_widest_pass_reads_the_tokens_of_all_replicas() -> None:
    """A replica reads the tokens of the passes since its own last one."""
    parameters = Parameters(LAYERS, 2, 3)
    run: Any = simulated(parameters, 40, growing(LAYERS, draft=0.02), (*[True] * 39, False))
    widths = {kind.width for kind in run.account.passes_by_kind if kind.role == "target"}
    assert max(widths) == parameters.largest_pass == 6
