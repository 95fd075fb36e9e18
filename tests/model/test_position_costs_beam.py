"""Position-dependent costs of speculative beam search: formula, paths and events agree."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import StepCosts
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.beam import paths, theory
from model.methods.beam.algorithm import Parameters, decode
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.rounds.round_laws import Rounds
from model.outcomes.outcome_laws import ByPosition, Iid, Markov, Replay
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import RandomCosts, growing
from tests.support.tiers import examples

LAYERS, DRAFT_LAYERS = 4, 2
FORMS = (("exact", "batched"), ("per-beam", "batched"), ("per-beam", "sequential"), ("per-beam", "parallel"))
LAWS: dict[str, Any] = {
    "iid": Iid(0.6), "position": ByPosition([0.9, 0.2, 0.6, 0.8, 0.5, 0.7, 0.4]), "markov": Markov(0.6, 0.3),
    "replay": Replay([[True, False, True, True, True, False, True], [True, True, True, False, True, True, False]]),
}  # fmt: skip


def choice(form: tuple[str, str], beams: int, gamma: int, wider: int = 0) -> Parameters:
    """A beam search; in the exact rule its draft has `wider` more hypotheses."""
    rule, arrangement = form
    wide = beams + wider if rule == "exact" else None
    return Parameters(LAYERS, gamma, beams, rule, wide, arrangement, draft_layers=DRAFT_LAYERS)


def simulated(parameters: Parameters, tokens: int, cost: StepCosts, accepted: tuple[bool, ...], **more: Any) -> Run:
    """Simulate a decoding with the given outcome of the drafted step at each position."""
    survivors = [next((place for place, hit in enumerate(accepted[at:]) if not hit), 0) for at in range(len(accepted))]
    world = World(1, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)})
    return simulate(decode(parameters, [0], tokens), tokens, Cluster(parameters.units), cost, world, **more)


choices = st.builds(choice, st.sampled_from(FORMS), st.integers(1, 3), st.integers(0, 4), st.integers(0, 2))
_LINKS, _STARTING, _DEVICES = (st.sampled_from((0.0, value)) for value in (0.4, 0.3, 0.5))
_SCATTERED = st.builds(
    lambda seed, link, dispatch, devices: RandomCosts(LAYERS, seed, link=link, dispatch=dispatch, draft_devices=1 - devices),
    st.integers(0, 99), _LINKS, _STARTING, _DEVICES,
)  # fmt: skip
_GROWING = st.builds(
    lambda draft, prompt, batch, link, dispatch, devices: growing(
        LAYERS, draft=draft, smaller_layers=DRAFT_LAYERS, prompt=prompt, batch=batch, link=link, dispatch=dispatch,
        dispatch_per_process=dispatch / 2, draft_devices=1 - devices,
    ),
    st.floats(0.02, 0.8), st.integers(0, 30), st.integers(1, 3), _LINKS, _STARTING, _DEVICES,
)  # fmt: skip
ALL_DIFFER = RandomCosts(LAYERS, 3, link=0.4, dispatch=0.3, draft_devices=0.5)


def chance_of(law: Any, path: tuple[bool, ...]) -> float:
    """Probability of these outcomes."""
    if isinstance(law, Replay):
        return float(np.mean([tuple(record[: len(path)]) == path for record in law.records.astype(bool).tolist()]))
    low, high = law.probabilities(max(len(path), 1))
    before = (False, *path)
    rates = [high[place] if before[place] else low[place] for place in range(len(path))]
    return math.prod(float(rate if hit else 1 - rate) for rate, hit in zip(rates, path, strict=True))


def walked(parameters: Parameters, tokens: int, cost: StepCosts, every: list[tuple[bool, ...]]) -> Any:
    """The vectorised walk for these outcomes; at most a block of them."""
    block = np.zeros((tokens - 1, BLOCK), dtype=np.bool_)
    block[:, : len(every)] = np.array(every, dtype=np.bool_).reshape(len(every), tokens - 1).T
    return paths.walk(parameters, tokens, cost, iter([lambda _, row=row: row for row in block]))


@given(choices, _SCATTERED | _GROWING, st.integers(1, 6), st.sampled_from([*LAWS]))
@example(choice(FORMS[0], 2, 2, 1), ALL_DIFFER, 6, "markov")
@example(choice(FORMS[0], 1, 2, 2), ALL_DIFFER, 6, "iid")
@example(choice(FORMS[1], 2, 1), ALL_DIFFER, 6, "position")
@example(choice(FORMS[2], 2, 2), ALL_DIFFER, 6, "replay")
@example(choice(FORMS[3], 3, 2), ALL_DIFFER, 6, "iid")
@settings(max_examples=examples(25, 300), deadline=None)
def test_all_views_agree_at_position_dependent_costs(parameters: Parameters, cost: StepCosts, tokens: int, kind: str) -> None:
    """All outcomes are simulated: paths agree for each, the formula with mean and variance over all."""
    law, every = LAWS[kind], [*itertools.product((False, True), repeat=tokens - 1)]
    runs = [simulated(parameters, tokens, cost, (*each, False)) for each in every]
    times, held = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    tally = walked(parameters, tokens, cost, every)
    np.testing.assert_allclose(tally.time[: len(every)], times, rtol=1e-12)
    np.testing.assert_allclose(tally.busy[: len(every)], held, rtol=1e-12)
    chance = np.array([chance_of(law, each) for each in every])
    found = theory.predict(parameters, tokens, law, cost)
    assert float(found.latency) == pytest.approx(float(chance @ times), rel=1e-12)
    assert float(found.busy) == pytest.approx(float(chance @ held), rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(float(chance @ (times - chance @ times) ** 2), abs=1e-9)
    assert float(found.plain_latency) == pytest.approx(float(cost.plain_times(np.arange(tokens)).sum()), rel=1e-12)
    assert np.isnan(found.units_ratio) or np.allclose(held, float(found.units_ratio) * times, rtol=1e-12)
    slowest, busiest = theory.slowest(parameters, tokens, cost)
    assert times.max() <= slowest * (1 + 1e-12)
    assert held.max() <= busiest * (1 + 1e-12)


@pytest.mark.parametrize("form", FORMS)
def test_long_decodings_have_the_same_rounds_in_events(form: tuple[str, str]) -> None:
    """Also layer by layer; the formula of a law of rounds equals that of the same law by position."""
    tokens, parameters = 60, choice(form, 2, 3, 1)
    cost = growing(LAYERS, draft=0.3, smaller_layers=DRAFT_LAYERS, prompt=5, link=0.2, dispatch=0.1, draft_devices=0.25)
    rng = np.random.default_rng(1)
    every = [tuple((rng.random(tokens - 1) < rate).tolist()) for rate in (0.3, 0.6, 0.8, 0.95, 1.0)]
    tally = walked(parameters, tokens, cost, every)
    for index, accepted in enumerate(every):
        for per_layer in (False, True):
            run = simulated(parameters, tokens, cost, (*accepted, False), per_layer=per_layer)
            assert (float(tally.time[index]), float(tally.busy[index])) == pytest.approx((run.latency, run.busy), rel=1e-12)
    one, other = (theory.predict(parameters, tokens, law, cost) for law in (Rounds.by_draft_position([0.7] * 3), Iid(0.7)))
    for name in ("latency", "latency_variance", "busy"):
        assert float(getattr(one, name)) == pytest.approx(float(getattr(other, name)), rel=1e-9)


def test_busy_units_are_constant_if_only_passes_take_time() -> None:
    """One unit per hypothesis, or one for all; if starting takes time too, some rounds are busier than others."""
    for form, units in zip(FORMS, (1, 1, 1, 3), strict=True):
        free, starting = RandomCosts(LAYERS), RandomCosts(LAYERS, dispatch=0.3, link=0.4)
        assert float(theory.predict(choice(form, 3, 2), 9, Iid(0.6), free).units_ratio) == pytest.approx(units, rel=1e-12)
        other = float(theory.predict(choice(form, 3, 2), 9, Iid(0.6), starting).units_ratio)
        assert np.isnan(other) if units > 1 else other == 1


@pytest.mark.parametrize("form", FORMS)
def test_uniform_seconds_equal_layer_times(form: tuple[str, str]) -> None:
    """Results in seconds are those in layer-times, multiplied by the seconds per layer."""
    target, draft = (UniformLayers(growing(depth).hardware_models["target"].shape, 0.002) for depth in (LAYERS, DRAFT_LAYERS))
    more = {"draft_devices": 0.5, "dispatch_law": "tree"}
    seconds = PassSeconds({"target": target, "draft": draft}, prompt=7, link=0.003, dispatch=0.001, **more)  # type: ignore[arg-type]
    layers = UnitCost(LAYERS, cost_ratio=DRAFT_LAYERS / LAYERS, link=1.5, dispatch=0.5, **more)  # type: ignore[arg-type]
    for beams, gamma, wider in ((1, 3, 0), (2, 3, 2), (3, 0, 1), (3, 1, 0)):
        one, other = (theory.predict(choice(form, beams, gamma, wider), 50, Iid(0.7), cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency"):
            assert float(getattr(one, name)) == pytest.approx(0.002 * float(getattr(other, name)), rel=1e-12)
        rounding = 8 * np.finfo(float).eps * float(one.latency) ** 2  # a variance is a difference of mean squares
        assert float(one.latency_variance) == pytest.approx(0.002**2 * float(other.latency_variance), rel=1e-9, abs=rounding)
        slow, slower = (theory.slowest(choice(form, beams, gamma, wider), 50, cost) for cost in (seconds, layers))
        assert slow == pytest.approx(tuple(0.002 * each for each in slower), rel=1e-12)


BEAMS = {
    "exact": Parameters(4, 3, 2, draft_beams=4), "no drafts": Parameters(4, 0, 2),
    **{
        arrangement: Parameters(4, 3, 2, rule="per-beam", arrangement=arrangement)
        for arrangement in ("batched", "sequential", "parallel")
    },
}  # fmt: skip


@pytest.mark.parametrize("name", BEAMS)
@pytest.mark.parametrize("in_seconds", [False, True])
def test_costs_laws_and_lengths_together_are_those_of_each(name: str, in_seconds: bool) -> None:
    """Also of records."""
    numbers = [(0.25, 0.0, 1.0, 0.0), (0.4, 0.5, 0.5, 1.0), (0.9, 0.0, 1.0, 0.5)]
    costs: list[StepCosts] = [
        growing(4, draft=draft, smaller_layers=2, link=link, dispatch=start, prompt=int(9 * link), draft_devices=devices)
        if in_seconds else
        UnitCost(4, cost_ratio=draft, link=link, dispatch=start, draft_devices=devices, verify_cost=((1, 1.0), (40, 3.0)))
        for draft, link, devices, start in numbers
    ]  # fmt: skip
    laws: list[Any] = [Iid(0.3), Markov(0.6, 0.3), Iid(1.0), Replay(np.random.default_rng(3).random((4, 9)) < 0.7)]
    choices = [MethodChoice(BEAMS[name], tokens, cost) for tokens in (1, 4, 9) for cost in costs]
    choice, law = (each.ravel() for each in np.indices((len(choices), len(laws))))
    together = theory.predict_points(PredictionPoints(choices, laws, choice, law))
    for index, (chosen, which) in enumerate(zip(choice.tolist(), law.tolist(), strict=True)):
        alone = theory.predict(BEAMS[name], choices[chosen].tokens, laws[which], choices[chosen].cost)
        for each, values in vars(alone).items():
            least = 1e-13 * float(alone.latency) ** 2 if each == "latency_variance" else 0.0
            np.testing.assert_allclose(getattr(together, each)[index], values, rtol=1e-12, atol=least, err_msg=each)
