"""Position-dependent costs of Predictive Pipelined Decoding: formula, paths and events agree."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import StepCosts
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import World
from model.methods.ppd import paths, theory
from model.methods.ppd.algorithm import Parameters, decode
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.stages import moments, sums
from model.outcomes.outcome_laws import ByPosition, Chain, Iid, Law, Markov, RecordedProbabilities, Replay
from model.outcomes.random_streams import BLOCK, tiles
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.position_costs import RandomCosts, growing
from tests.support.tiers import examples

Floats = NDArray[np.float64]
FIELDS = ("latency", "latency_variance", "busy", "units_ratio", "units", "plain_latency")


@st.composite
def choices(draw: Any) -> Parameters:
    form = draw(st.sampled_from(("literal", "eager", "flat")))
    layers = draw(st.integers(1, 6))
    exit_layer = draw(st.integers(1 if form == "flat" else -(-layers // 2), layers))
    return Parameters(layers, exit_layer, draw(st.integers(1, 3)), form, batched=draw(st.booleans()))


_LINKS, _PROMOTIONS = st.sampled_from((0.0, 0.3, 2.5, 9.0)), st.sampled_from((0.0, 0.7))


def on_hardware(layers: int) -> st.SearchStrategy[StepCosts]:
    """Passes that take longer with every cached position, single or in a batch."""
    return st.builds(
        lambda prompt, batch, link, promotion, each, law: growing(
            layers, prompt=prompt, batch=batch, others_position=7.5 if batch == 3 else None, link=link, promotion=promotion,
            dispatch=each, dispatch_per_process=each / 2, dispatch_law=law,
        ),
        st.integers(0, 20), st.integers(1, 3), _LINKS, _PROMOTIONS, st.sampled_from((0.0, 0.4)),
        st.sampled_from(("linear", "tree")),
    )  # fmt: skip


def scattered(layers: int) -> st.SearchStrategy[StepCosts]:
    """A separate time for each shape of a pass at each position: heads, widths, trees and spans are distinguished."""
    return st.builds(RandomCosts, st.just(layers), st.integers(0, 99), _LINKS, _PROMOTIONS, st.sampled_from((0.0, 0.4)))


@st.composite
def points(draw: Any) -> tuple[Parameters, int, StepCosts]:
    choice = draw(choices())
    return choice, draw(st.integers(1, 5)), draw(st.one_of(on_hardware(choice.layers), scattered(choice.layers)))


def laws(tokens: int) -> list[Law]:
    rng = np.random.default_rng(tokens)
    few = max(tokens - 1, 1)
    return [
        Iid(0.6), Iid(1.0), ByPosition(np.linspace(0.1, 0.9, few)), Markov(0.6, 0.3), Markov(0.5, -1.0),
        Replay(rng.random((3, few)) < 0.6), RecordedProbabilities(rng.random((3, few))),
    ]  # fmt: skip


def every(tokens: int) -> NDArray[np.bool_]:
    """All outcomes of the positions whose outcome matters; shape (sequences, positions)."""
    return np.array([*itertools.product((False, True), repeat=tokens - 1)], dtype=np.bool_).reshape(2 ** (tokens - 1), tokens - 1)


def chances(law: Law, outcomes: NDArray[np.bool_]) -> Floats:
    """Probability of each sequence of outcomes."""
    if isinstance(law, Replay):
        return np.array([np.mean([np.array_equal(each[: row.size], row) for each in law.records]) for row in outcomes])
    if isinstance(law, RecordedProbabilities):
        return np.asarray(np.mean([chances(each, outcomes) for each in law.chains], axis=0))
    assert isinstance(law, Chain)
    low, high = law.probabilities(outcomes.shape[1])
    found = np.ones(len(outcomes))
    for number, row in enumerate(outcomes):
        for place, hit in enumerate(row):
            rate = (high if place and row[place - 1] else low)[place]
            found[number] *= rate if hit else 1 - rate
    return found


def played(choice: Parameters, tokens: int, cost: StepCosts) -> tuple[Floats, Floats]:
    """Simulated latency and unit-time for all outcomes; the last outcome, which has no effect, and the rank are random."""
    rng = np.random.default_rng(0)
    found = []
    for row in every(tokens):
        matches = np.append(row, rng.random() < 0.5) * rng.integers(1, choice.candidates + 1, tokens)
        run = simulate(decode(choice, [0], tokens), tokens, Cluster(choice.units), cost, World(1, choice.layers, matches.tolist()))
        found.append((run.latency, run.busy))
    time, busy = np.array(found).T
    return time, busy


@given(points())
@settings(max_examples=examples(60), deadline=None)
def test_all_views_agree_at_position_dependent_costs(point: tuple[Parameters, int, StepCosts]) -> None:
    """All outcomes are simulated: paths agree for each, the formula with mean and variance over all."""
    choice, tokens, cost = point
    time, busy = played(choice, tokens, cost)
    steps, rows = theory.stages(choice, cost, tokens), every(tokens).T
    for cut in range(min(tokens, 2)):
        walked = sums(steps, np.split(rows, [cut]), tokens, rows.shape[1])
        np.testing.assert_allclose(walked, (time, busy), rtol=1e-12)
    for law in laws(tokens):
        found, mass = theory.predict(choice, tokens, law, cost), chances(law, every(tokens))
        assert float(found.latency) == pytest.approx(mass @ time, rel=1e-12)
        assert float(found.busy) == pytest.approx(mass @ busy, rel=1e-12)
        assert float(found.latency_variance) == pytest.approx(mass @ (time - mass @ time) ** 2, rel=1e-9, abs=1e-12)
        assert float(found.plain_latency) == pytest.approx(float(cost.plain_times(np.arange(tokens)).sum()), rel=1e-12)
        if isinstance(law, Replay):
            assert float(found.units_ratio) == pytest.approx(mass @ (busy / time), rel=1e-12)
        else:
            assert np.isnan(found.units_ratio)
        assert theory.distribution(choice, tokens, law, cost) is None
    slowest = theory.slowest(choice, tokens, cost)
    assert time.max() <= slowest[0] * (1 + 1e-12)
    assert busy.max() <= slowest[1] * (1 + 1e-12)


@given(points())
@settings(max_examples=examples(20), deadline=None)
def test_stages_do_not_depend_on_later_tokens(point: tuple[Parameters, int, StepCosts]) -> None:
    """Stages for fewer tokens are the first entries of those for more."""
    choice, tokens, cost = point
    for few, many in zip(theory.stages(choice, cost, tokens), theory.stages(choice, cost, tokens + 3), strict=True):
        assert (np.shape(few.time), np.shape(many.busy), few.on_match) == ((tokens,), (tokens + 3,), many.on_match)
        np.testing.assert_array_equal(few[:2], [many.time[:tokens], many.busy[:tokens]])  # type: ignore[index]


def test_predictions_of_points_equal_single_predictions() -> None:
    """Uniform and other costs, forms, numbers of tokens and laws, in mixed order."""
    costs = [growing(8, link=0.3), growing(8, prompt=40), UnitCost(8), UnitCost(8, link=0.5)]
    grid = itertools.product([("literal", 4), ("eager", 5), ("flat", 3)], (1, 5), costs)
    each = [MethodChoice(Parameters(8, exit_at, 2, form), tokens, cost) for (form, exit_at), tokens, cost in grid]
    some = [law for law in laws(5) if isinstance(law, Chain | RecordedProbabilities)] + [Replay([[True, False, True, True]])]
    chosen, law = (index.reshape(-1) for index in np.indices((len(each), len(some))))
    order = np.random.default_rng(1).permutation(chosen.size)
    together = PredictionPoints(each, some, chosen[order], law[order])
    many = theory.predict_points(together)
    for place, (at, of) in enumerate(zip(together.choice, together.law, strict=True)):
        choice, tokens, cost = each[at]
        one = theory.predict(choice, tokens, some[of], cost)
        for field in FIELDS:
            got, want = getattr(many, field)[place], float(getattr(one, field))
            assert got == pytest.approx(want, nan_ok=True, rel=1e-11, abs=1e-11), (choice, tokens, some[of], field)


@pytest.mark.parametrize("form", ["literal", "eager", "flat", "eager batched"])
def test_uniform_seconds_equal_layer_times(form: str) -> None:
    """Results in seconds are those in layer-times, multiplied by the seconds per layer; with overheads too."""
    form, _, batched = form.partition(" ")
    shape, scale, more = growing(8).hardware_models["target"].shape, 0.002, {"link": 1.5, "dispatch": 0.5, "promotion": 0.25}
    for extra, exit_at in itertools.product(({}, more), (4, 5, 8) if form != "flat" else (1, 3, 5)):
        seconds = PassSeconds({"target": UniformLayers(shape, scale)}, **{name: value * scale for name, value in extra.items()})
        layers, choice = UnitCost(8, **extra), Parameters(8, exit_at, 3, form, batched=bool(batched))
        for law in laws(20):
            one, other = (theory.predict(choice, 20, law, cost) for cost in (seconds, layers))
            assert float(one.latency) == pytest.approx(scale * float(other.latency), rel=1e-12)
            assert float(one.busy) == pytest.approx(scale * float(other.busy), rel=1e-12)
            assert float(one.plain_latency) == pytest.approx(scale * float(other.plain_latency), rel=1e-12)
            assert float(one.latency_variance) == pytest.approx(scale**2 * float(other.latency_variance), rel=1e-9, abs=1e-18)
        # By position it is clear that no match precedes the first token.
        bounds = [np.array(theory.slowest(choice, 20, cost)) for cost in (seconds, layers)]
        assert (bounds[0] <= scale * bounds[1] * (1 + 1e-12)).all()
        assert (bounds[0] >= scale * bounds[1] * (1 - 1 / 20)).all()
        assert choice.demand(seconds, 20) == choice.demand(layers, 20)
        walked = [paths.walk(choice, 20, cost, Iid(0.6).sample(tiles(3, "match", 0, 19))) for cost in (seconds, layers)]
        np.testing.assert_allclose(walked[0], scale * np.array(walked[1]), rtol=1e-12)


@pytest.mark.parametrize("form", ["eager", "flat"])
def test_paths_agree_with_the_formula(form: str) -> None:
    """Over several tiles, within five standard errors: a false alarm in two million."""
    choice, tokens, cost = Parameters(8, 3 if form == "flat" else 5, 2, form), 80, growing(8, link=0.5)
    law = Markov(0.6, 0.3)
    time, busy = paths.walk(choice, tokens, cost, law.sample(tiles(1, "match", 0, tokens - 1)))
    found = theory.predict(choice, tokens, law, cost)
    assert abs(time.mean() - float(found.latency)) < 5 * np.sqrt(float(found.latency_variance) / BLOCK)
    assert time.var() == pytest.approx(float(found.latency_variance), rel=5 * np.sqrt(3 / BLOCK))
    assert abs(busy.mean() - float(found.busy)) < 5 * busy.std() / np.sqrt(BLOCK)


def test_a_small_variance_keeps_its_digits() -> None:
    """Times that hardly depend on the matches: the variance equals that without the common part of the time."""
    choice, tokens = Parameters(8, 4, 2), 40
    steps = theory.stages(choice, growing(8), tokens)
    plain = moments(steps, tokens, Markov(0.6, 0.3))
    shifted = moments(tuple(stage._replace(time=stage.time + 1e5) for stage in steps), tokens, Markov(0.6, 0.3))
    assert shifted[1] == pytest.approx(plain[1], rel=1e-8)
    assert plain[1] > 0


def test_nested_form_has_no_stages_with_times_by_position() -> None:
    for cost in (growing(8), RandomCosts(8)):
        with pytest.raises(ParameterError, match=r"form 'nested' has no closed form with times by position; .*\['events'\] alone"):
            theory.predict(Parameters(8, 3, 2, form="nested"), 4, Iid(0.5), cost)


class Unsteady(UnitCost):
    """Layer-times that are marked as not uniform."""

    uniform = False


_QUARTERS = st.integers(0, 12).map(lambda number: number / 4)
_NAMES = ("early_head", "final_head", "dispatch", "dispatch_per_process", "link", "promotion")


@given(
    st.one_of(choices(), st.builds(lambda e, k: Parameters(6, e, k, "nested"), st.integers(2, 6), st.integers(1, 3))),
    st.dictionaries(st.sampled_from(_NAMES), _QUARTERS),
    st.integers(1, 5),
)
@settings(max_examples=examples(60), deadline=None)
def test_times_by_position_equal_uniform_times(
    choice: Parameters, overheads: dict[str, float], tokens: int
) -> None:
    one, other = UnitCost(choice.layers, **overheads), Unsteady(choice.layers, **overheads)
    assert choice.demand(one, tokens) == choice.demand(other, tokens)
    if choice.form == "nested":
        return
    for law in laws(tokens):
        here, there = (theory.predict(choice, tokens, law, cost) for cost in (one, other))
        for field in set(FIELDS) - {"units_ratio"}:
            assert float(getattr(here, field)) == pytest.approx(float(getattr(there, field)), rel=1e-11, abs=1e-10), field
