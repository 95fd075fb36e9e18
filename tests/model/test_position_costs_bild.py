"""Position-dependent costs of Big Little Decoder: formula, paths and events agree."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import Lossy
from model.methods.bild import theory
from model.methods.bild.algorithm import Parameters, decode
from model.methods.bild.finite_bild import segments
from model.methods.bild.segment_prices import prices
from model.methods.bild.threshold_decisions import Independent, RecordedDecisions
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import GrowingContext, growing
from tests.support.tiers import examples

LAYERS = 4
FORMS = ("paper", "code", "separate", "separate code", "early")
DECISIONS = (0, 1, 2)


def choice(form: str, longest: int, sequences: int = 1) -> Parameters:
    batch: dict[str, Any] = {"sequences": sequences, "batching": "lockstep"}
    if form == "early":
        return Parameters(LAYERS, longest, exit_layer=3, **batch)
    placement = "separate" if form.startswith("separate") else "colocated"
    return Parameters(LAYERS, longest, variant="code" if form.endswith("code") else "paper", placement=placement, **batch)


def played(parameters: Parameters, tokens: int, cost: PassSeconds, decisions: tuple[int, ...]) -> Run:
    """Simulate a decoding with these decisions, on units and links."""
    steps = decode(parameters, [0], tokens)
    return simulate(steps, tokens, Cluster(parameters.units), cost, Lossy(1, LAYERS, [*decisions, 0]))


def costs() -> st.SearchStrategy[PassSeconds]:
    return st.builds(
        lambda draft, prompt, batch, link, devices: growing(
            LAYERS, draft=draft, prompt=prompt, batch=batch, link=link, draft_devices=devices,
            others_position=None if batch < 3 else 4.5,
        ),
        st.floats(0.02, 0.8), st.integers(0, 30), st.integers(1, 4), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
    )  # fmt: skip


ALL_DIFFER = growing(LAYERS, draft=0.3, prompt=7, batch=3, link=0.4, draft_devices=0.5, others_position=4.5)


@given(st.sampled_from(FORMS), st.integers(1, 4), costs(), st.integers(1, 5), st.lists(st.integers(0, 4), min_size=8, max_size=8))
@example("paper", 1, ALL_DIFFER, 5, [1, 2, 1, 3, 2, 1, 1, 2])
@example("separate code", 3, ALL_DIFFER, 5, [1, 2, 1, 3, 2, 1, 1, 2])
@example("early", 2, ALL_DIFFER, 5, [1, 2, 1, 3, 2, 1, 1, 2])
@settings(max_examples=examples(30, 300), deadline=None)
def test_all_views_agree_at_position_dependent_costs(
    form: str, longest: int, cost: PassSeconds, tokens: int, quarters: list[int]
) -> None:
    """All decisions are simulated: paths agree for each, the formula with the means over all."""
    parameters = choice(form, longest)
    every = [*itertools.product(DECISIONS, repeat=tokens - 1)]
    runs = [played(parameters, tokens, cost, each) for each in every]
    times, held = (np.array([getattr(run, name) for run in runs]) for name in ("latency", "busy"))
    rows = np.array(every, dtype=np.uint8).reshape(len(every), tokens - 1)
    tally = segments(parameters, tokens, iter([rows.T]), prices(parameters, cost, tokens), len(every))
    np.testing.assert_allclose(tally.time, times, rtol=1e-12)
    np.testing.assert_allclose(tally.busy, held, rtol=1e-12)
    f, r = (np.array(quarters[which : 2 * (tokens - 1) : 2]) / 4 for which in (0, 1))
    chance = np.ones(len(every))
    for place in range(tokens - 1):
        of_each = np.array([(1 - f[place]) * (1 - r[place]), f[place], (1 - f[place]) * r[place]])
        chance *= of_each[rows[:, place]]
    given_ = Independent(f, r) if tokens > 1 else Independent(0.5, 0.5)
    found = theory.predict(parameters, tokens, given_, cost)
    assert float(found.latency) == pytest.approx(float(chance @ times), rel=1e-12)
    assert float(found.busy) == pytest.approx(float(chance @ held), rel=1e-12)
    assert np.isnan(found.latency_variance)
    assert float(found.plain_latency) == pytest.approx(float(cost.plain_times(np.arange(tokens)).sum()), rel=1e-12)
    assert np.isnan(found.units_ratio) or np.allclose(times, held, rtol=1e-12)
    slowest, busiest = theory.slowest(parameters, tokens, cost)
    assert times.max() <= slowest * (1 + 1e-12)
    assert held.max() <= busiest * (1 + 1e-12)
    if tokens > 1:
        recorded = theory.predict(parameters, tokens, RecordedDecisions(rows), cost)
        assert float(recorded.latency) == pytest.approx(times.mean(), rel=1e-12)
        assert float(recorded.latency_variance) == pytest.approx(times.var(), abs=1e-9)


@pytest.mark.parametrize("form", FORMS)
def test_long_paths_equal_the_simulator(form: str) -> None:
    """Across tiles, with drafts of several lengths one after another."""
    parameters, tokens, random_draws = choice(form, 4), 80, np.random.default_rng(3)
    decisions = random_draws.choice(3, size=(6, tokens - 1), p=[0.75, 0.1, 0.15]).astype(np.uint8)
    tiles = (decisions[:, start : start + 7].T for start in range(0, tokens - 1, 7))
    tally = segments(parameters, tokens, tiles, prices(parameters, ALL_DIFFER, tokens), len(decisions))
    runs = [played(parameters, tokens, ALL_DIFFER, tuple(row.tolist())) for row in decisions]
    np.testing.assert_allclose(tally.time, [run.latency for run in runs], rtol=1e-12)
    np.testing.assert_allclose(tally.busy, [run.busy for run in runs], rtol=1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_uniform_seconds_equal_layer_times(form: str) -> None:
    """Results in seconds are those in layer-times, multiplied by the seconds per layer."""
    shape = growing(LAYERS).hardware_models["target"].shape
    draft = GrowingContext(shape).shape
    seconds = PassSeconds({"target": UniformLayers(shape, 0.002), "draft": UniformLayers(draft, 0.0005)}, prompt=7, link=0.001)
    layers = UnitCost(LAYERS, cost_ratio=0.25, link=0.5)
    for sequences, law in itertools.product((1, 4), (Independent(0.2, 0.1), RecordedDecisions([[0, 1, 2] * 13, [0] * 39]))):
        one, other = (theory.predict(choice(form, 3, sequences), 40, law, cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        want = 0.002**2 * float(other.latency_variance)
        assert float(one.latency_variance) == pytest.approx(want, rel=1e-9, abs=1e-15, nan_ok=True)
