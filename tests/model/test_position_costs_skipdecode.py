"""Position-dependent costs of SkipDecode: simulator, paths and formula give the same number."""

from dataclasses import replace
from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.transformer import preset
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import StepCosts
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import Lossy
from model.methods.skipdecode import algorithm as skipdecode
from model.methods.skipdecode import paths, theory
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.exact import near
from tests.support.position_costs import growing


@st.composite
def choices(draw: st.DrawFn) -> tuple[skipdecode.Parameters, int]:
    """Random schedule and batching, and a number of tokens."""
    layers, room = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    most = draw(st.integers(1, layers))
    least = draw(st.integers(1, most))
    tokens, static = draw(st.integers(1, room)), draw(st.booleans())
    batch: dict[str, Any] = {"sequences": draw(st.integers(1, 3)), "batching": "static" if static else "lockstep"}
    if static:
        more = st.lists(st.integers(1, tokens), max_size=5).map(lambda rest: (*rest, tokens))
        batch["lengths"] = draw(st.none() | more)
    rounding, power = draw(st.sampled_from([*skipdecode.ROUNDINGS])), draw(st.sampled_from([0.5, 1.0, 2.0]))
    bounds = layers, least, most, 3, 3 + room, draw(st.integers(0, least)), rounding, power
    return skipdecode.Parameters(*bounds, **batch), tokens


def views(parameters: skipdecode.Parameters, tokens: int, cost: StepCosts) -> list[float]:
    """Latency by paths and by formula, equal to the unit-time."""
    time, busy = paths.walk(parameters, tokens, cost, iter(()))
    found = theory.predict(parameters, tokens, None, cost)
    assert theory.slowest(parameters, tokens, cost) == (found.latency, found.busy) == (found.busy, found.latency)
    assert {*time} == {*busy}
    return [float(time[-1]), float(found.latency)]


@given(choices(), st.integers(0, 40))
@settings(max_examples=150)
def test_simulator_paths_and_formula_are_equal(chosen: tuple[skipdecode.Parameters, int], prompt: int) -> None:
    parameters, tokens = chosen
    cost = growing(parameters.layers, prompt=prompt, batch=parameters.full_batch)
    steps, outputs = skipdecode.decode(parameters, [0], tokens), parameters.total_tokens(tokens)
    run = simulate(steps, outputs, Cluster(1), cost, Lossy(1, parameters.layers))
    assert near([run.busy, *views(parameters, tokens, cost)], run.latency, rtol=1e-12)


@given(choices(), st.integers(0, 9))
@settings(max_examples=40)
def test_uniform_seconds_equal_layer_times(chosen: tuple[skipdecode.Parameters, int], prompt: int) -> None:
    parameters, tokens = chosen
    shape = replace(preset("llama-2-13b"), layers=parameters.layers)
    seconds = PassSeconds({"target": UniformLayers(shape, 0.25)}, prompt=prompt, batch=parameters.full_batch)
    assert near(views(parameters, tokens, seconds), np.array(views(parameters, tokens, UnitCost(parameters.layers))) * 0.25)


def test_a_later_token_with_equal_layers_takes_longer() -> None:
    parameters = skipdecode.Parameters(4, 4, 4, 3, 9)
    times = [views(parameters, tokens, growing(4, prompt=3))[0] for tokens in (1, 2, 3)]
    assert times[2] - times[1] > times[1] - times[0] > times[0]
