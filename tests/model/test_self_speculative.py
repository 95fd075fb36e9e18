"""Self-speculative decoding: formulas against fractions, prices by position against their definition, claims, and refusals."""

import itertools
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.architectures import published_shapes
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.costs.step_costs import PassShape
from model.hardware import devices
from model.hardware.cost_models import WithEngineOverhead
from model.hardware.roofline import Roofline
from model.methods.claim_bounds import ClaimTerms
from model.methods.self_speculative import theory
from model.methods.self_speculative.algorithm import Parameters, decode
from model.methods.worlds import world_of
from model.outcomes.outcome_laws import Iid, Markov
from sim.engine.cluster import Cluster
from sim.engine.events import simulate
from tests.support.exact import RATES, close

CURVE = ((1, 1.0), (4, 1.75), (9, 3.0))
LAYERS = st.integers(2, 12)


@given(RATES, st.integers(1, 8), LAYERS, st.integers(0, 50), st.booleans())
def test_speedup_is_tokens_over_the_layers_of_a_round(rate: float, gamma: int, layers: int, part: int, reuse: bool) -> None:
    exit_layer, alpha = 1 + part % (layers - 1), Fraction(rate)
    tokens = sum((alpha**count for count in range(gamma + 1)), Fraction(0))
    wide = Fraction(str(float(np.interp(gamma + 1, *zip(*CURVE, strict=True)))))
    early, late = Fraction(exit_layer, layers), Fraction(layers - exit_layer, layers)
    time = gamma * early + (early + late * wide if reuse else wide)
    assert close(theory.speedup(rate, gamma, exit_layer / layers, reuse=reuse, verify_cost=CURVE), tokens / time)


@given(st.lists(RATES, min_size=1, max_size=7), st.booleans())
def test_best_exit_is_the_largest_of_all(rates: list[float], reuse: bool) -> None:
    layers = len(rates) + 1
    found = theory.best_exit(rates, layers, longest=6, reuse=reuse, verify_cost=CURVE)
    every = {
        (layer, length): float(theory.speedup(rates[layer - 1], length, layer / layers, reuse=reuse, verify_cost=CURVE))
        for layer, length in itertools.product(range(1, layers), range(7))
    }
    assert found.speedup == pytest.approx(max(every.values()))
    assert every[found.exit_layer, found.draft_length] == pytest.approx(found.speedup)
    assert found.speedup >= 1


def costs() -> PassSeconds:
    shape = published_shapes.named_shape("llama-2-7b")
    return PassSeconds({"target": Roofline.on_device(shape, devices.device("a100"))}, prompt=100)


@pytest.mark.parametrize(
    "given_",
    [Parameters(32, 10, 3), Parameters(32, 10, 3, False), Parameters(32, 32, 3, False, context_budget=102)],
)
def test_prices_by_position_are_those_of_the_passes(given_: Parameters) -> None:
    cost, budget = costs(), given_.context_budget
    found = theory.round_prices(given_, cost, tokens=6).time[0]
    for start, drafted in itertools.product(range(6), range(1, 4)):
        draft = PassShape(given_.early, heads=1, within_step=True, context_budget=budget)
        passes = [(draft, start + place) for place in range(drafted)]
        if given_.reuse:
            passes.append((PassShape(given_.early, within_step=True), start + drafted))
            passes.append((PassShape(given_.late, width=drafted + 1, heads=drafted + 1, joins=True), start))
        else:
            passes.append((PassShape(given_.whole, width=drafted + 1, heads=drafted + 1), start))
        assert found[start, drafted] == pytest.approx(float(sum(cost.times(shape, at) for shape, at in passes)), rel=1e-12)
    assert found[:, 0] == pytest.approx([float(cost.plain_times(start)) for start in range(6)])


@pytest.mark.parametrize(
    "given_",
    [
        Parameters(32, 10, 3), Parameters(32, 10, 3, False), Parameters(32, 32, 3, False, skipped_layers=14),
        Parameters(32, 32, 3, False, context_budget=50),
    ],
)
def test_a_round_pays_the_overhead_of_one_engine_step(given_: Parameters) -> None:
    kernels, tokens = costs(), 6
    engine = PassSeconds({"target": WithEngineOverhead(kernels.hardware("target"), 0.007)}, prompt=100)
    bare, whole = (theory.round_prices(given_, cost, tokens=tokens).time for cost in (kernels, engine))
    assert whole - bare == pytest.approx(np.full(bare.shape, 0.007), rel=1e-9)
    accepted = {"accept": [[3] * tokens]}
    runs = [
        simulate(decode(given_, [0], tokens), tokens, Cluster(1), cost, world_of(given_, 1, accepted)) for cost in (kernels, engine)
    ]
    assert runs[1].latency - runs[0].latency == pytest.approx(0.007 * 2, rel=1e-9)  # four tokens, and two


def test_a_draft_that_skips_layers_is_a_draft_model_of_the_layers_that_it_runs() -> None:
    given_, law = Parameters(32, 32, 4, reuse=False, skipped_layers=12), Iid(0.8)
    speed = theory.predict(given_, 4000, law, UnitCost(32))
    assert float(speed.plain_latency / speed.latency) == pytest.approx(float(theory.speedup(0.8, 4, 20 / 32)), rel=1e-3)
    assert (given_.early.size, given_.reads_early) == (20, False)


@settings(max_examples=10, deadline=None)
@given(
    st.lists(st.booleans(), min_size=2, max_size=9), st.integers(0, 4), st.sampled_from((True, False)) | st.integers(1, 120)
)
def test_events_on_hardware_are_the_sum_of_the_rounds(accept: list[bool], gamma: int, how: bool | int) -> None:
    given_ = Parameters(32, 10, gamma, how) if isinstance(how, bool) else Parameters(32, 32, gamma, False, context_budget=how)
    cost, tokens = costs(), len(accept)
    survivors = [min(len([*itertools.takewhile(bool, accept[at:])]), gamma) for at in range(tokens)]
    run = simulate(decode(given_, [0], tokens), tokens, Cluster(1), cost, world_of(given_, 1, {"accept": [survivors]}))
    prices, start, total = theory.round_prices(given_, cost, tokens=tokens).time[0], 0, 0.0
    while start < tokens:
        drafted = min(gamma, tokens - 1 - start)
        total += prices[start, drafted]
        start += min(survivors[start], drafted) + 1
    assert run.latency == pytest.approx(total, rel=1e-12)


def test_a_later_exit_of_equal_acceptance_is_slower_and_a_better_one_faster() -> None:
    speeds = theory.speedup(0.7, 4, np.arange(1, 32) / 32)
    assert np.all(np.diff(speeds) < 0)
    assert np.all(np.diff(theory.speedup(np.linspace(0, 1, 20), 4, 0.25)) > 0)


def test_variance_of_dependent_outcomes_is_larger() -> None:
    given_, cost = Parameters(8, 2, 3), UnitCost(8)
    independent, alike = (theory.predict(given_, 200, law, cost) for law in (Iid(0.7), Markov(0.7, 0.5)))
    assert float(alike.latency_variance) > float(independent.latency_variance) > 0


@given(RATES, st.integers(1, 8), st.integers(1, 31))
def test_no_formula_exceeds_the_bound_of_claims(rate: float, gamma: int, exit_layer: int) -> None:
    terms = ClaimTerms({"acceptance_rate": rate, "draft_length": gamma, "layers": 32, "exit_layer": exit_layer})
    speed = float(theory.speedup(rate, gamma, exit_layer / 32))
    # The bound holds for any rule of draft lengths up to gamma, so it is at least plain decoding.
    assert max(speed, 1.0) <= theory.claim_bound(terms).value * (1 + 1e-9)
    assert theory.claim_formula(terms).value == pytest.approx(speed)


@given(RATES, st.integers(1, 8), st.integers(1, 31))
def test_claims_know_that_the_first_layers_are_not_repeated(rate: float, gamma: int, exit_layer: int) -> None:
    def wide(width: float) -> float:
        return float(np.interp(width, *zip(*CURVE, strict=True)))

    terms = ClaimTerms({"acceptance_rate": rate, "draft_length": gamma, "cost_ratio": exit_layer / 32}, wide)
    speed = float(theory.speedup(rate, gamma, exit_layer / 32, verify_cost=CURVE))
    assert theory.claim_formula(terms).value == pytest.approx(speed)
    assert speed <= theory.claim_bound(terms).value * (1 + 1e-9) or speed < 1


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"exit_layer": 0}, "exit_layer must be between 1 and layers - 1=31, got 0"),
        ({"exit_layer": 32}, "exit_layer must be between 1 and layers - 1=31, got 32"),
        ({"exit_layer": 33, "skipped_layers": 4, "reuse": False}, "exit_layer must be between 1 and layers=32, got 33"),
        ({"skipped_layers": 8, "reuse": False}, "skipped_layers must be between 0 and exit_layer - 1=7, got 8"),
        ({"skipped_layers": 4}, "reuse must be false with skipped_layers=4"), ({"first_skipped": 2}, "needs skipped_layers"),
        ({"skipped_layers": 4, "reuse": False, "first_skipped": 5}, "between 0 and exit_layer - skipped_layers=4, got 5"),
        ({"draft_length": -1}, "draft_length must be between 0 and 250, got -1"),
        ({"layers": 1}, "layers must be between 2"), ({"reuse": "no"}, "reuse must be true or false, got 'no'"),
        ({"sequences": 4, "batching": "static"}, "batching must be 'continuous' or 'lockstep' with sequences=4, got 'static'"),
    ],
)  # fmt: skip
def test_bad_parameters_are_refused(changed: dict[str, object], words: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Parameters(**({"layers": 32, "exit_layer": 8, "draft_length": 4} | changed))  # type: ignore[arg-type]
    assert words in str(caught.value)


def test_rates_of_too_many_layers_are_refused() -> None:
    with pytest.raises(ParameterError, match="acceptance_by_layer must have 1 to layers - 1 = 3 rates, got shape"):
        theory.best_exit([0.5] * 4, 4)
