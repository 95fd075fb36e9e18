"""Position-dependent costs of hierarchical decoding: formula, paths and events agree."""

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
from model.methods.hierarchical import theory
from model.methods.hierarchical.algorithm import READINGS, Parameters, decode
from model.methods.hierarchical.paths import walk
from model.methods.rounds.round_laws import ReplayRounds
from model.outcomes.outcome_laws import ByPosition, Chain, Iid, Markov, Replay
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import BUDGETS, growing
from tests.support.tiers import examples

LAYERS = 3
RATES = np.array([0.9, 0.2, 0.7, 1.0, 0.4, 0.8, 0.5, 0.6])


def choice(reading: str, gamma: int, inner: int = 1, **more: Any) -> Parameters:
    return Parameters(LAYERS, gamma, reading, inner if reading == "recursive" else None, **more)


def survivors(accepted: tuple[bool, ...]) -> list[int]:
    return [next((place for place, hit in enumerate(accepted[at:]) if not hit), len(accepted) - at) for at in range(len(accepted))]


def played(parameters: Parameters, tokens: int, cost: PassSeconds, large: list[int], kept: tuple[bool, ...]) -> Run:
    """Simulate a decoding, given the accepted tokens of a draft from each position and the medium model's acceptances."""
    drafts = {"medium": DraftOutcomes("target", [*large, 0]), "draft": DraftOutcomes("medium", survivors((*kept, False)))}
    return simulate(decode(parameters, [0], tokens), tokens, Cluster(parameters.units), cost, World(1, LAYERS, drafts=drafts))


def walked(parameters: Parameters, tokens: int, cost: PassSeconds, paths: Any) -> tuple[Any, Any]:
    """Times and unit-times of outcomes (accepted, kept), a block at a time."""
    times, held = [], []
    for first in range(0, len(paths), BLOCK):
        rows = paths[first : first + BLOCK]
        full = np.concatenate([rows, np.zeros((BLOCK - len(rows), 2, tokens - 1), dtype=np.bool_)]).transpose(1, 2, 0)
        given_: Any = {
            name: iter([lambda place, row=row: row for row in each])
            for name, each in zip(("accept", "medium_accept"), full, strict=True)
        }
        tally = walk(parameters, tokens, cost, given_)
        times.append(tally.time[: len(rows)])
        held.append(tally.busy[: len(rows)])
    return np.concatenate(times), np.concatenate(held)


def chance_of(law: Chain, paths: Any) -> Any:
    """Probability of each row of outcomes."""
    low, high = law.probabilities(paths.shape[1])
    before = np.concatenate([np.zeros((len(paths), 1), dtype=np.bool_), paths[:, :-1]], axis=1)
    rates = np.where(before, high, low)
    return np.where(paths, rates, 1 - rates).prod(axis=1)


def law_of(kind: str) -> Chain:
    return {"iid": Iid(0.7), "position": ByPosition(RATES), "markov": Markov(0.6, 0.4)}[kind]


def costs() -> st.SearchStrategy[PassSeconds]:
    return st.builds(
        lambda draft, medium, prompt, batch, link, devices: growing(
            LAYERS, draft=draft, medium=medium, prompt=prompt, batch=batch, link=link, draft_devices=devices,
            others_position=None if batch < 3 else 4.5,
        ),
        st.floats(0.02, 0.3), st.floats(0.2, 0.9), st.integers(0, 30), st.integers(1, 4), st.sampled_from((0.0, 0.4)),
        st.sampled_from((1.0, 0.5)),
    )  # fmt: skip


choices = st.builds(
    lambda reading, gamma, inner, placement, small, medium: choice(
        reading, gamma, inner, placement=placement, sequences=4, batching="lockstep", context_budget=small,
        medium_context_budget=medium,
    ),
    st.sampled_from(READINGS), st.integers(1, 5), st.integers(0, 4), st.sampled_from(("colocated", "separate")), BUDGETS, BUDGETS,
)  # fmt: skip
KINDS = st.sampled_from(("iid", "position", "markov"))
ALL_DIFFER = growing(LAYERS, draft=0.2, medium=0.6, prompt=7, batch=3, link=0.4, draft_devices=0.5, others_position=4.5)


@given(choices, costs(), st.integers(1, 24), st.integers(0, 10**6), st.sampled_from((0.5, 0.8, 1.0)), st.sampled_from((0.5, 0.9)))
@example(choice("recursive", 5, 1, placement="separate"), ALL_DIFFER, 18, 1, 0.8, 0.8)  # after fully accepted inner drafts
@example(choice("bonus", 2), growing(LAYERS, draft=1e-9, medium=1e-9), 24, 1, 0.0, 0.5)  # close to the bound of `slowest`
@settings(max_examples=examples(40, 500), deadline=None)
def test_paths_equal_the_simulator(
    parameters: Parameters, cost: PassSeconds, tokens: int, seed: int, large: float, medium: float
) -> None:
    random_draws = np.random.default_rng(seed).random((4, 2, tokens - 1)) < np.array([large, medium])[:, None]
    runs = [played(parameters, tokens, cost, survivors(tuple(a)), tuple(b)) for a, b in random_draws.tolist()]
    times, held = walked(parameters, tokens, cost, random_draws)
    np.testing.assert_allclose(times, [run.latency for run in runs], rtol=1e-12)
    np.testing.assert_allclose(held, [run.busy for run in runs], rtol=1e-12)
    slowest, busiest = theory.slowest(parameters, tokens, cost)
    assert max(times) <= slowest * (1 + 1e-12)
    assert max(held) <= busiest * (1 + 1e-12)


def check_formula(parameters: Parameters, tokens: int, cost: PassSeconds, laws: Any, times: Any, held: Any, chance: Any) -> None:
    found = theory.predict(parameters, tokens, laws, cost)
    mean = float(chance @ times)
    assert chance.sum() == pytest.approx(1, rel=1e-12)
    assert float(found.latency) == pytest.approx(mean, rel=1e-12)
    assert float(found.busy) == pytest.approx(float(chance @ held), rel=1e-12)
    assert float(found.plain_latency) == pytest.approx(float(cost.plain_times(np.arange(tokens)).sum()), rel=1e-12)
    if parameters.reading == "recursive":
        assert np.isnan(found.latency_variance)
    else:
        assert float(found.latency_variance) == pytest.approx(float(chance @ (times - mean) ** 2), rel=1e-9, abs=1e-9)


@given(choices, costs(), st.integers(1, 4), KINDS, KINDS)
@settings(max_examples=examples(15, 200), deadline=None)
def test_formula_is_the_mean_over_all_simulated_outcomes(
    parameters: Parameters, cost: PassSeconds, tokens: int, large: str, medium: str
) -> None:
    rows = [*itertools.product((False, True), repeat=tokens - 1)]
    pairs = [*itertools.product(rows, rows)]
    runs = [played(parameters, tokens, cost, survivors(one), other) for one, other in pairs]
    accept, kept = law_of(large), law_of(medium)
    paths = np.array(pairs, dtype=np.bool_).reshape(len(pairs), 2, tokens - 1)
    chance = chance_of(accept, paths[:, 0]) * chance_of(kept, paths[:, 1])
    times, held = (np.array([getattr(run, name) for run in runs]) for name in ("latency", "busy"))
    check_formula(parameters, tokens, cost, {"accept": accept, "medium_accept": kept}, times, held, chance)


@given(choices, KINDS, KINDS)
@example(choice("recursive", 3, 1), "markov", "markov")
@example(choice("recursive", 5, 1), "iid", "markov")
@example(choice("recursive", 3, 2, placement="separate"), "iid", "position")
@example(choice("recursive", 4, 4), "position", "markov")
@example(choice("bonus", 3), "markov", "markov")
@example(choice("literal", 3), "iid", "position")
@settings(max_examples=examples(5, 60), deadline=None)
def test_formula_is_the_mean_over_all_walked_outcomes(parameters: Parameters, large: str, medium: str) -> None:
    """For several rounds with long drafts; their paths equal the simulator's by the tests above."""
    tokens = 8
    rows = [*itertools.product((False, True), repeat=tokens - 1)]
    paths = np.array([*itertools.product(rows, rows)], dtype=np.bool_)
    accept, kept = law_of(large), law_of(medium)
    chance = chance_of(accept, paths[:, 0]) * chance_of(kept, paths[:, 1])
    times, held = walked(parameters, tokens, ALL_DIFFER, paths)
    check_formula(parameters, tokens, ALL_DIFFER, {"accept": accept, "medium_accept": kept}, times, held, chance)


@pytest.mark.parametrize("reading", READINGS)
def test_records_are_replayed_once_each(reading: str) -> None:
    tokens, parameters = 8, choice(reading, 3, 2, placement="separate")
    kept = np.array([[1, 1, 0, 1, 1, 1, 1, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 0, 1, 0]]) > 0
    lengths = np.array([[2, 0, 1, 3, 0, 1, 0, 0], [4, 1, 2, 0, 3, 2, 1, 0], [3, 3, 3, 3, 3, 3, 3, 3]])
    pairs = [*itertools.product(lengths.tolist(), kept.tolist())]
    runs = [played(parameters, tokens, ALL_DIFFER, one, tuple(other)) for one, other in pairs]
    times, held = (np.array([getattr(run, name) for run in runs]) for name in ("latency", "busy"))
    chance = np.full(len(pairs), 1 / len(pairs))
    laws = {"accept": ReplayRounds(lengths), "medium_accept": Replay(kept)}
    check_formula(parameters, tokens, ALL_DIFFER, laws, times, held, chance)


@pytest.mark.parametrize("reading", READINGS)
def test_uniform_seconds_equal_layer_times(reading: str) -> None:
    """Results in seconds are those in layer-times, multiplied by the seconds per layer."""
    shape = growing(LAYERS).hardware_models["target"].shape
    of = {"target": UniformLayers(shape, 0.002), "draft": UniformLayers(shape, 0.0002), "medium": UniformLayers(shape, 0.001)}
    seconds, layers = PassSeconds(of, prompt=7, link=0.001), UnitCost(LAYERS, cost_ratio=0.1, medium_cost_ratio=0.5, link=0.5)
    for placement, kinds in itertools.product(("colocated", "separate"), (("iid", "markov"), ("markov", "iid"))):
        laws = dict(zip(("accept", "medium_accept"), map(law_of, kinds), strict=True))
        one, other = (theory.predict(choice(reading, 3, 2, placement=placement), 30, laws, cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        want = 0.002**2 * float(other.latency_variance)
        assert float(one.latency_variance) == pytest.approx(want, rel=1e-9, abs=1e-15, nan_ok=True)
