"""Position-dependent costs of early exit: paths and formula agree with the simulator."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures.published_shapes import preset
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds, share_of_rows
from model.costs.step_costs import StepCosts
from model.hardware.cost_models import UniformLayers
from model.hardware.profile_costs import ProfileCosts
from model.interpret.simulated_answers import Lossy
from model.methods.early_exit import algorithm as early_exit
from model.methods.early_exit import finite_early_exit, paths, theory
from model.methods.early_exit.finite_early_exit import Depths, decodings
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.comparisons import profile
from tests.support.exact import near
from tests.support.position_costs import RandomCosts, early_exit_moments, growing
from tests.support.tiers import examples


@st.composite
def choices(draw: st.DrawFn, layers: int = 5, tokens: int = 6, sequences: int = 4) -> tuple[early_exit.Parameters, int]:
    """Random measure, fill, first check and batching, or a fixed exit layer; and a number of tokens."""
    deep, count = draw(st.integers(1, layers)), draw(st.integers(1, tokens))
    fill = draw(st.sampled_from(early_exit.FILLS))
    static = draw(st.booleans())
    most = 1 if static and fill == "backfill" else 3
    batch: dict[str, Any] = {"sequences": draw(st.integers(1, most)), "batching": "static" if static else "lockstep"}
    if static:
        more = st.lists(st.integers(1, count), max_size=sequences - 1).map(lambda rest: (*rest, count))
        batch["lengths"] = draw(st.none() | more)
    if draw(st.sampled_from([False, False, False, True])):
        return early_exit.Parameters(deep, exit_layer=draw(st.integers(1, deep)), **batch), count
    measure = draw(st.sampled_from(early_exit.MEASURES))
    return early_exit.Parameters(deep, measure, draw(st.integers(1, deep)), fill=fill, **batch), count


@st.composite
def costs(draw: st.DrawFn, parameters: early_exit.Parameters) -> PassSeconds:
    check = draw(st.sampled_from([0.0, 0.3]))
    return growing(parameters.layers, prompt=draw(st.integers(0, 40)), batch=parameters.full_batch, state_check=check)


def clock(parameters: early_exit.Parameters, depths: list[list[int]], tokens: int, cost: StepCosts) -> float:
    """Simulated latency, equal to the busy time."""
    steps, outputs = early_exit.decode(parameters, [0], tokens), parameters.total_tokens(tokens)
    run = simulate(steps, outputs, Cluster(1), cost, Lossy(1, parameters.layers, depths=depths))
    assert run.busy == pytest.approx(run.latency, rel=1e-12)
    return run.latency


def tiles(tables: np.ndarray[Any, Any]) -> Iterator[Any]:
    """Tiles of three rows from depths of shape (replications, sequences, tokens)."""
    rows = tables.transpose(2, 1, 0).reshape(-1, len(tables)).astype(np.uint16)
    return (rows[start : start + 3] for start in range(0, len(rows), 3))


@given(choices(), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=150)
def test_paths_equal_the_simulator(chosen: tuple[early_exit.Parameters, int], data: st.DataObject, seed: int) -> None:
    """And none takes longer than the upper bound."""
    parameters, tokens = chosen
    cost = data.draw(costs(parameters))
    shape = 4, parameters.decoded_sequences, tokens
    depths = np.random.default_rng(seed).integers(1, parameters.layers + 1, shape)
    found = decodings(parameters, tokens, tiles(depths), cost, len(depths))
    want = [clock(parameters, each.tolist(), tokens, cost) for each in depths]
    assert near(found, want, rtol=1e-12)
    assert max(want) <= theory.slowest(parameters, tokens, cost)[0] * (1 + 1e-12)


@given(choices(layers=3, tokens=3, sequences=2), st.booleans(), st.data())
@settings(max_examples=40)
def test_moments_equal_enumeration_of_all_outcomes(
    chosen: tuple[early_exit.Parameters, int], by_place: bool, data: st.DataObject
) -> None:
    """For at most four tokens in total, timed by the simulator; for backfill only the mean."""
    parameters, tokens = chosen
    sequences, layers, fixed = parameters.decoded_sequences, parameters.layers, parameters.exit_layer is not None
    if sequences * tokens > 4:
        tokens = 4 // sequences
        parameters = parameters.shortened(tokens)
    cost = data.draw(costs(parameters))
    weights = st.lists(st.integers(0, 3), min_size=layers, max_size=layers).filter(any)
    rows = np.array(data.draw(st.lists(weights, min_size=tokens, max_size=tokens) if by_place else weights), dtype=float)
    law = Depths(rows / rows.sum(axis=-1, keepdims=True), sequences)
    pmf = np.broadcast_to(law.pmf, (tokens, layers))
    mean = square = 0.0
    for depths in itertools.product(range(1, layers + 1), repeat=0 if fixed else sequences * tokens):
        table = [list(depths[start : start + tokens]) for start in range(0, len(depths), tokens)]
        chance = math.prod(float(pmf[place, depth - 1]) for each in table for place, depth in enumerate(each))
        if chance:
            time = clock(parameters, table, tokens, cost)
            mean, square = mean + chance * time, square + chance * time * time
    prediction = theory.predict(parameters, tokens, None if fixed else law, cost)
    found = float(prediction.latency), float(prediction.latency_variance)
    assert prediction.busy == prediction.latency
    assert near(found[0], mean, rtol=1e-12)
    if parameters.fill == "propagate":
        assert near(found[1] + found[0] ** 2, square, rtol=1e-12)
    else:
        assert math.isnan(found[1])


@given(choices(), st.data(), st.integers(0, 2**32 - 1))
@settings(max_examples=40)
def test_uniform_seconds_equal_layer_times(
    chosen: tuple[early_exit.Parameters, int], data: st.DataObject, seed: int
) -> None:
    parameters, tokens = chosen
    shape = replace(preset("llama-2-13b"), layers=parameters.layers)
    seconds = PassSeconds({"target": UniformLayers(shape, 0.25)}, prompt=data.draw(st.integers(0, 9)), state_check=0.05)
    unit = UnitCost(parameters.layers, propagation=share_of_rows(shape), state_check=0.2)
    random = np.random.default_rng(seed)
    law = Depths(random.dirichlet(np.ones(parameters.layers), tokens), parameters.decoded_sequences)
    one, other = (early_exit_moments(parameters, tokens, law, cost) for cost in (seconds, unit))
    assert near(one[0], other[0] * 0.25, rtol=1e-12)
    assert np.allclose(one[1], other[1] * 0.25**2, rtol=1e-11, atol=1e-13, equal_nan=True)
    depths = random.integers(1, parameters.layers + 1, (3, parameters.decoded_sequences, tokens))
    found = [decodings(parameters, tokens, tiles(depths), cost, len(depths)) for cost in (seconds, unit)]
    assert near(found[0], found[1] * 0.25, rtol=1e-12)
    bounds = [theory.slowest(parameters, tokens, cost)[0] for cost in (seconds, unit)]
    assert near(bounds[0], bounds[1] * 0.25, rtol=1e-12)


def test_a_later_token_of_equal_depth_takes_longer() -> None:
    cost, parameters = growing(4, prompt=3), early_exit.Parameters(4, fill="backfill")
    times = [clock(parameters, [[4] * tokens], tokens, cost) for tokens in (1, 2, 3)]
    assert times[2] - times[1] > times[1] - times[0] > times[0]
    time, busy = paths.walk(parameters, 3, cost, iter([np.full((3, 4096), 4, dtype=np.uint16)]))
    assert near(time[0], times[2])
    assert np.array_equal(time, busy)


def test_sequences_of_unequal_lengths_fill_rows_separately() -> None:
    parameters = early_exit.Parameters(2, fill="backfill", batching="static", lengths=(3, 1, 2))
    cost, early, mean = growing(2, prompt=5), 0.3, 0.0
    for depths in itertools.product((1, 2), repeat=6):
        table = [[*depths[:3]], [*depths[3:4], 2, 2], [*depths[4:], 2]]
        mean += math.prod((1 - early, early)[depth == 1] for depth in depths) * clock(parameters, table, 3, cost)
    assert near(early_exit_moments(parameters, 3, Depths([early, 1 - early]), cost)[0], mean, rtol=1e-12)


@pytest.mark.parametrize("cost", [growing(3, prompt=2), UnitCost(3, early_head=0.5)], ids=["seconds", "layer-times"])
def test_columns_can_be_priced_in_parts(cost: StepCosts, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = early_exit.Parameters(3, sequences=2, batching="static", lengths=(5, 3, 4))
    law = Depths([[0.2, 0.3, 0.5], [0.1, 0.0, 0.9]] * 3, 3)
    whole = early_exit_moments(parameters, 5, law, cost), theory.slowest(parameters, 5, cost)
    monkeypatch.setattr(finite_early_exit, "_PART", 11)  # two columns per part
    assert near([*early_exit_moments(parameters, 5, law, cost), *theory.slowest(parameters, 5, cost)], [*whole[0], *whole[1]])


@given(st.data(), st.booleans(), st.integers(0, 3))
@settings(max_examples=examples(60, 600), deadline=None)
def test_moments_are_those_of_the_prices_of_depths(data: st.DataObject, by_position: bool, seed: int) -> None:
    """Also at times that no two passes share, and of laws that never leave at some depths."""
    parameters, tokens = data.draw(choices().filter(lambda choice: choice[0].fill == "propagate"))
    random = RandomCosts(parameters.layers, seed)
    cost: StepCosts = data.draw(st.sampled_from([random, growing(parameters.layers, prompt=seed, state_check=0.3)]))
    drawn = np.random.default_rng(seed).random((tokens, 5)) * np.array([1.0, 0.0, 3.0, 0.5, 0.0])
    drawn = drawn[:, : parameters.layers]
    drawn[:, : parameters.first_check - 1] = 0.0
    drawn[:, -1] += 0.25
    if parameters.exit_layer is not None:
        drawn = np.eye(parameters.layers)[[parameters.exit_layer - 1] * tokens]
    pmf = drawn / drawn.sum(axis=1, keepdims=True)
    law = Depths(pmf if by_position else pmf[0], parameters.decoded_sequences)
    mean = variance = 0.0
    for batch, position in itertools.product(parameters.batches(tokens), range(tokens)):
        width = sum(length > position for length in batch.values())
        if width:
            times = finite_early_exit.times_by_depth(parameters, cost, width, position)
            chance = np.diff(np.cumsum(pmf[position if by_position else 0]) ** width, prepend=0.0)
            mean += float(chance @ times)
            variance += float(chance @ (times - chance @ times) ** 2)
    found = early_exit_moments(parameters, tokens, law, cost)
    assert near(found[0], mean, rtol=1e-12)
    assert found[1] == pytest.approx(variance, rel=1e-9, abs=1e-12 * mean**2)


def test_probabilities_that_are_a_rounding_above_one_have_a_variance() -> None:
    """The last depth has then less than no probability."""
    cost, parameters = growing(3, prompt=2), early_exit.Parameters(3)
    exact, rounded = (early_exit_moments(parameters, 6, Depths([0.5, rest, 0.0]), cost) for rest in (0.5, 0.5 + 5e-10))
    assert rounded == pytest.approx(exact, rel=1e-8)


@pytest.mark.parametrize("measure", early_exit.MEASURES)
def test_depths_that_take_the_same_time_have_no_variance(measure: str) -> None:
    """Keys and values of a skipped layer take the time of a layer: there is no remainder of a variance."""
    cost = PassSeconds({"target": ProfileCosts(profile("target", layer=1e-3, kv_rows=1e-3))}, prompt=10)
    parameters = early_exit.Parameters(cost.layers, measure)
    mean, variance = early_exit_moments(parameters, 20, Depths(np.full(cost.layers, 1 / cost.layers)), cost)
    assert near(mean, 20 * cost.layers * 1e-3)
    assert variance <= 1e-28 * mean**2


def test_upper_bound_includes_expensive_backfill() -> None:
    """Two tokens exit after layer 1 of 3, one runs all; rows cost more than layers, multi-token passes even more."""
    parameters = early_exit.Parameters(3, fill="backfill")
    cost = UnitCost(3, propagation=9.0, verify_cost=((1, 1.0), (2, 3.0)))
    assert clock(parameters, [[1, 1, 3]], 3, cost) == 1 + 1 + 3 + 2 * 27
    assert theory.slowest(parameters, 3, cost)[0] == 3 * 3 + 3 * (9 + 27)


@pytest.mark.parametrize("measure", early_exit.MEASURES)
@pytest.mark.parametrize("fill", early_exit.FILLS)
def test_a_profile_with_separate_early_heads_and_rows(measure: str, fill: str) -> None:
    known = profile("target", wider=0.05, further=0.4, head=7e-4, early_head=3e-4, kv_rows=2e-4, step=1e-3, embedding=1e-4)
    cost = PassSeconds({"target": ProfileCosts(known)}, prompt=10, state_check=1e-4)
    parameters = early_exit.Parameters(cost.layers, measure, 2, fill=fill)
    depths = np.random.default_rng(5).integers(1, cost.layers + 1, (2, 1, 20))
    want = [clock(parameters, each.tolist(), 20, cost) for each in depths]
    assert near(decodings(parameters, 20, tiles(depths), cost, 2), want, rtol=1e-12)
