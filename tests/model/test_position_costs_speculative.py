"""Position-dependent costs of speculative and plain decoding: formula, paths and events agree."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.autoregressive import paths as plain_paths
from model.methods.autoregressive import theory as plain_theory
from model.methods.autoregressive.algorithm import Parameters as Plain
from model.methods.autoregressive.algorithm import decode as decode_plainly
from model.methods.rounds import round_walks
from model.methods.speculative import theory
from model.methods.speculative.algorithm import Parameters, decode
from model.methods.speculative.drafter_prices import prices_of
from model.outcomes.outcome_laws import ByPosition, Iid, Markov
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import GrowingContext, growing
from tests.support.tiers import examples

LAYERS = 3


def played(choice: Parameters, tokens: int, cost: PassSeconds, accepted: tuple[bool, ...]) -> Run:
    """Simulate a decoding with the given outcome of the drafted token at each position."""
    survivors = [next((place for place, hit in enumerate(accepted[at:]) if not hit), 0) for at in range(len(accepted))]
    world = World(1, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})
    return simulate(decode(choice, [0], tokens), tokens, Cluster(choice.units), cost, world)


def costs() -> st.SearchStrategy[PassSeconds]:
    return st.builds(
        lambda draft, prompt, batch, link, devices: growing(
            LAYERS, draft=draft, prompt=prompt, batch=batch, link=link, draft_devices=devices,
            others_position=None if batch < 3 else 4.5,
        ),
        st.floats(0.02, 0.8), st.integers(0, 30), st.integers(1, 4), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
    )  # fmt: skip


choices = st.builds(
    lambda gamma, batching, drafting, budget: Parameters(
        LAYERS, gamma, sequences=1 if batching is None else 4, batching=batching or "continuous", drafter=drafting[0],
        placement=drafting[1], context_budget=budget if drafting[0] == "model" else None,
    ),
    st.integers(0, 4), st.sampled_from((None, "continuous", "lockstep")),
    st.sampled_from((("model", "colocated"), ("model", "separate"), ("heads", "colocated"), ("parallel", "colocated"))),
    st.none() | st.integers(1, 40),
)  # fmt: skip


@given(choices, costs(), st.integers(1, 6), st.sampled_from(("iid", "position", "markov")))
@settings(max_examples=examples(40), deadline=None)
def test_all_views_agree_at_position_dependent_costs(choice: Parameters, cost: PassSeconds, tokens: int, kind: str) -> None:
    """All outcomes are simulated: paths agree for each, the formula with mean and variance over all."""
    law = {"iid": Iid(0.6), "position": ByPosition(np.linspace(0.2, 0.9, tokens)), "markov": Markov(0.6, 0.3)}[kind]
    every = [*itertools.product((False, True), repeat=tokens - 1)]
    runs = [played(choice, tokens, cost, (*each, False)) for each in every]
    rows = np.array(every, dtype=np.bool_).reshape(len(every), tokens - 1).T
    prices, reading = prices_of(choice, tokens, cost)
    outcomes = iter([_by_row(row) for row in rows])
    tally = round_walks.fixed(choice.draft_length, tokens, outcomes, prices, len(every), cut=choice.cut, reading=reading)
    np.testing.assert_allclose(tally.time, [run.latency for run in runs], rtol=1e-12)
    np.testing.assert_allclose(tally.busy, [run.busy for run in runs], rtol=1e-12)
    low, high = (np.asarray(each) for each in law.probabilities(tokens - 1)) if tokens > 1 else (np.empty(0), np.empty(0))
    chance = np.ones(len(every))
    for number, path in enumerate(every):
        before = False
        for place, hit in enumerate(path):
            rate = (high if before else low)[place]
            chance[number] *= rate if hit else 1 - rate
            before = hit
    found = theory.predict(choice, tokens, law, cost)
    times, held = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    assert float(found.latency) == pytest.approx(float(chance @ times), rel=1e-12)
    assert float(found.busy) == pytest.approx(float(chance @ held), rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(float(chance @ times**2 - (chance @ times) ** 2), abs=1e-9)
    slowest, busiest = theory.slowest(choice, tokens, cost)
    assert times.max() <= slowest * (1 + 1e-12)
    assert held.max() <= busiest * (1 + 1e-12)
    plain = simulate(decode_plainly(Plain(LAYERS), [0], tokens), tokens, Cluster(1), cost, World(1, LAYERS))
    assert float(found.plain_latency) == pytest.approx(plain.latency, rel=1e-12)


def _by_row(row: Any) -> Any:
    return lambda place: row


@pytest.mark.parametrize("drafting", [("model", "separate"), ("heads", "colocated"), ("parallel", "colocated")])
def test_long_decodings_agree_on_every_path(drafting: tuple[str, str]) -> None:
    """Paths count positions in tiles of 32; what a round accepted at the end of a tile matters in the next."""
    tokens, rng = 100, np.random.default_rng(1)
    cost = growing(LAYERS, draft=0.3, link=0.1)
    for gamma in (2, 5):
        choice = Parameters(LAYERS, gamma, drafter=drafting[0], placement=drafting[1])
        rows = rng.random((tokens - 1, 6)) < 0.8
        runs = [played(choice, tokens, cost, (*row.tolist(), False)) for row in rows.T]
        prices, reading = prices_of(choice, tokens, cost)
        tally = round_walks.fixed(gamma, tokens, iter([_by_row(row) for row in rows]), prices, 6, reading=reading)
        np.testing.assert_allclose(tally.time, [run.latency for run in runs], rtol=1e-12)
        np.testing.assert_allclose(tally.busy, [run.busy for run in runs], rtol=1e-12)


@pytest.mark.parametrize("drafter", ["heads", "parallel"])
def test_slowest_decoding_has_the_widest_first_pass_in_every_round(drafter: str) -> None:
    choice, cost = Parameters(LAYERS, 3, drafter=drafter), growing(LAYERS, draft=0.8)
    prices, reading = prices_of(choice, 20, cost)
    assert reading is not None
    slowest, busiest = theory.slowest(choice, 20, cost)
    assert slowest >= 20 * (prices.time[0] + reading.time.max(axis=1)).max()
    assert busiest >= 20 * (prices.busy[0] + reading.busy.max(axis=1)).max()


@given(costs(), st.integers(1, 9))
@settings(max_examples=examples(10), deadline=None)
def test_plain_decoding_is_one_pass_per_position(cost: PassSeconds, tokens: int) -> None:
    run = simulate(decode_plainly(Plain(LAYERS), [0], tokens), tokens, Cluster(1), cost, World(1, LAYERS))
    walked = plain_paths.walk(Plain(LAYERS), tokens, cost, iter(()))[0][0]
    formula = plain_theory.predict(Plain(LAYERS), tokens, None, cost).latency
    for time in (formula, walked, plain_theory.slowest(Plain(LAYERS), tokens, cost)[0]):
        assert float(time) == pytest.approx(run.latency, rel=1e-12)


def test_uniform_seconds_equal_layer_times() -> None:
    """Results in seconds are those in layer-times, multiplied by the seconds per layer."""
    shape = growing(LAYERS).hardware_models["target"].shape
    draft = GrowingContext(shape).shape
    seconds = PassSeconds({"target": UniformLayers(shape, 0.002), "draft": UniformLayers(draft, 0.0005)}, prompt=7)
    layers = UnitCost(LAYERS, cost_ratio=0.25)
    for choice in (Parameters(LAYERS, 3), Parameters(LAYERS, 3, sequences=4), Parameters(LAYERS, 0)):
        one, other = (theory.predict(choice, 50, Iid(0.7), cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        assert float(one.latency_variance) == pytest.approx(0.002**2 * float(other.latency_variance), rel=1e-9, abs=1e-15)
