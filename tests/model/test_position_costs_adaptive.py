"""Position-dependent costs of adaptive draft lengths: formula, paths and events agree."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import UniformLayers
from model.interpret.simulated_answers import DraftOutcomes, World
from model.methods.adaptive import paths, theory
from model.methods.adaptive.adaptive_rounds import PolicyLaws, PolicyRounds
from model.methods.adaptive.algorithm import Parameters, decode
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.rounds.prices_of_rounds import round_prices
from model.methods.rounds.round_walks import Tally, longest_skipped
from model.outcomes.outcome_laws import ByPosition, Chain, Floats, Iid, Markov, TwoClass
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.adaptive_lengths import ONLINE_POLICIES, POLICIES, Bools, Whole, parameters_of
from tests.support.position_costs import BUDGETS, growing
from tests.support.tiers import examples

LAYERS = 4


def costs(placement: str) -> st.SearchStrategy[PassSeconds]:
    return st.builds(
        lambda draft, prompt, batch, link, devices: growing(
            LAYERS, draft=draft, prompt=prompt, batch=batch, link=link, draft_devices=devices,
            others_position=None if batch < 3 else 4.5,
        ),
        st.floats(0.02, 0.8), st.integers(0, 30), st.integers(1, 4),
        st.sampled_from((0.0, 0.4) if placement == "separate" else (0.0,)), st.sampled_from((1.0, 0.5)),
    )  # fmt: skip


def simulated(parameters: Parameters, tokens: int, cost: PassSeconds, accepted: Any, doubts: Any) -> Run:
    survivors = [next((place for place, hit in enumerate(accepted[at:]) if not hit), 0) for at in range(len(accepted))]
    world = World(1, LAYERS, drafts={"draft": DraftOutcomes("target", survivors)}, doubts=[*doubts, 0])
    return simulate(decode(parameters, [0], tokens), tokens, Cluster(parameters.units), cost, world)


def walked(parameters: Parameters, tokens: int, cost: PassSeconds, rows: Bools, doubts: Whole) -> Tally:
    """The vectorised walk over a block whose first replications have these outcomes; shape (tokens - 1, replications)."""
    size = rows.shape[1]
    block = np.zeros((len(rows), BLOCK), dtype=np.bool_)
    block[:, :size] = rows
    outcomes: Any = iter([lambda _, row=row: row for row in block])
    if parameters.policy == "confidence":
        unsure = np.zeros((len(rows), BLOCK), dtype=np.uint8)
        unsure[:, :size] = doubts
        outcomes = {"accept": outcomes, "confidence": iter([unsure])}
    tally = paths.walk(parameters, tokens, cost, outcomes)
    return tally._replace(time=tally.time[:size], busy=tally.busy[:size])


@given(st.data())
@settings(max_examples=examples(40), deadline=None)
def test_events_equal_paths_at_position_dependent_costs(data: st.DataObject) -> None:
    policy, placement = data.draw(st.sampled_from(POLICIES)), data.draw(st.sampled_from(("colocated", "separate")))
    more: dict[str, Any] = {"context_budget": data.draw(BUDGETS)}
    if policy in ONLINE_POLICIES:
        more["min_draft_length"] = data.draw(st.integers(0, 1))
        more["draft_length"] = data.draw(st.integers(more["min_draft_length"], 6))
    cost = data.draw(costs(placement))
    parameters = parameters_of(policy, placement=placement, sampled=data.draw(st.booleans()), **more)
    if policy in ONLINE_POLICIES:
        parameters = replace(parameters, believed_cost_ratio=data.draw(st.floats(0.05, 0.7)))
    if data.draw(st.booleans()):
        parameters = parameters.with_costs(cost)
    tokens = data.draw(st.integers(1, 25))
    rng = np.random.default_rng(data.draw(st.integers(0, 999)))
    rows = rng.random((tokens - 1, 5)) < data.draw(st.sampled_from((0.1, 0.5, 0.9)))
    doubts = rng.choice(4, size=(tokens - 1, 5), p=(0.6, 0.2, 0.1, 0.1)).astype(np.uint8)
    tally = walked(parameters, tokens, cost, rows, doubts)
    slowest, busiest = theory.slowest(parameters, tokens, cost)
    for index in range(5):
        run = simulated(parameters, tokens, cost, [*rows[:, index].tolist(), False], doubts[:, index].tolist())
        assert (float(tally.time[index]), float(tally.busy[index])) == pytest.approx((run.latency, run.busy), rel=1e-12)
        assert run.latency <= slowest * (1 + 1e-12)
        assert run.busy <= busiest * (1 + 1e-12)


@pytest.mark.parametrize("budget", [None, 5])
def test_the_draft_model_reads_skipped_tokens(budget: int | None) -> None:
    """Drafting stops and starts again: the next draft pass covers all tokens of the rounds between."""
    cost, tokens = growing(LAYERS, draft=0.3, draft_devices=0.5), 30
    how: dict[str, Any] = {"min_draft_length": 0, "draft_length": 1, "believed_cost_ratio": 0.2, "context_budget": budget}
    parameters = parameters_of("gradient", **how)
    accepted = [*(np.random.default_rng(4).random(tokens - 1) < 0.3).tolist(), False]
    run = simulated(parameters, tokens, cost, accepted, [0] * tokens)
    widths = [kind.width for kind in run.account.passes_by_kind if kind.role == "draft"]
    assert max(widths) == 7
    priced = parameters.draft_costs(cost)
    more = [
        float(priced.draft_times(at - unread, width=unread + 1) - priced.draft_times(at - 1, width=2))
        for at in range(tokens) for unread in range(2, at + 1)
    ]  # fmt: skip
    assert longest_skipped(priced, tokens) == pytest.approx(max(more), rel=1e-12)
    prices = round_prices(priced, parameters.longest_draft, tokens=tokens)
    assert theory.slowest(parameters, tokens, cost)[0] == pytest.approx(tokens * (prices.time.max() + max(more)), rel=1e-12)
    tally = walked(parameters, tokens, cost, np.array([accepted[:-1]]).T, np.zeros((tokens - 1, 1), dtype=np.uint8))
    assert (float(tally.time[0]), float(tally.busy[0])) == pytest.approx((run.latency, run.busy), rel=1e-12)


def chance_of(law: Chain, path: tuple[bool, ...]) -> float:
    low, high = law.probabilities(max(len(path), 1))
    before = (False, *path)
    rates = [high[place] if before[place] else low[place] for place in range(len(path))]
    return math.prod(float(rate if hit else 1 - rate) for rate, hit in zip(rates, path, strict=True))


LAWS: dict[str, Any] = {"iid": Iid(0.6), "position": ByPosition([0.9, 0.2, 0.6, 0.8, 0.5, 0.7]), "markov": Markov(0.6, 0.3)}


@given(st.data(), st.sampled_from(("colocated", "separate")), st.integers(1, 6), st.integers(1, 4), st.sampled_from([*LAWS]))
@settings(max_examples=examples(15), deadline=None)
def test_formula_of_the_heuristic_is_the_mean_over_all_outcomes(
    data: st.DataObject, placement: str, tokens: int, longest: int, law: str
) -> None:
    cost, first = data.draw(costs(placement)), data.draw(st.integers(1, longest))
    parameters = parameters_of("heuristic", placement=placement, max_draft_length=longest, draft_length=first)
    parameters = replace(parameters, context_budget=data.draw(BUDGETS))
    every = [*itertools.product((False, True), repeat=tokens - 1)]
    runs = [simulated(parameters, tokens, cost, (*each, False), [0] * tokens) for each in every]
    chance = np.array([chance_of(LAWS[law], each) for each in every])
    time, busy = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    found = theory.predict(parameters, tokens, LAWS[law], cost)
    assert float(found.latency) == pytest.approx(float(chance @ time), rel=1e-12)
    assert float(found.busy) == pytest.approx(float(chance @ busy), rel=1e-12)
    assert float(found.latency_variance) == pytest.approx(float(chance @ time**2 - (chance @ time) ** 2), abs=1e-9)


@given(st.data(), st.sampled_from(("colocated", "separate")), st.integers(1, 4), st.integers(1, 4), st.sampled_from([*LAWS]))
@settings(max_examples=examples(8), deadline=None)
def test_formula_of_confidence_stops_is_the_mean_over_all_outcomes(
    data: st.DataObject, placement: str, tokens: int, longest: int, law: str
) -> None:
    cost, low, high = data.draw(costs(placement)), 0.2, 0.7
    parameters = parameters_of("confidence", placement=placement, max_draft_length=longest, context_budget=data.draw(BUDGETS))
    chances = {0: 1 - high, 1: high - low, 3: low}  # never unsure, unsure of wrong tokens, always unsure
    mean, held = 0.0, 0.0
    for path in itertools.product((False, True), repeat=tokens - 1):
        for doubts in itertools.product(chances, repeat=tokens - 1):
            run = simulated(parameters, tokens, cost, (*path, False), doubts)
            chance = chance_of(LAWS[law], path) * math.prod(chances[each] for each in doubts)
            mean, held = mean + chance * run.latency, held + chance * run.busy
    found = theory.predict(parameters, tokens, {"accept": LAWS[law], "confidence": TwoClass(low, high)}, cost)
    assert (float(found.latency), float(found.busy)) == pytest.approx((mean, held), rel=1e-12)


@given(st.data(), st.sampled_from(("colocated", "separate")), st.integers(1, 6), st.integers(1, 5))
@settings(max_examples=examples(30), deadline=None)
def test_expected_passes_of_confidence_stops_cost_as_much_as_their_rounds(
    data: st.DataObject, placement: str, tokens: int, longest: int
) -> None:
    """Sums over passes of several laws at several costs are those over rounds of each, whose prices are made one by one."""
    given_costs = [data.draw(costs(placement)) for _ in range(2)]
    parameters = parameters_of("confidence", placement=placement, max_draft_length=longest, context_budget=data.draw(BUDGETS))
    laws = [{"accept": law, "confidence": TwoClass(0.2, 0.7)} for law in LAWS.values()]
    laws.append({"accept": Iid(0.5), "confidence": TwoClass(0.0, 0.4)})
    law, price = (each.ravel() for each in np.indices((len(laws), 2)))
    choices = [MethodChoice(parameters, tokens, cost) for cost in given_costs]
    found = theory.predict_points(PredictionPoints(choices, laws, price, law))
    for point, (of_law, cost) in enumerate(zip(law.tolist(), [given_costs[each] for each in price], strict=True)):
        prices = theory.prices_of(parameters, cost, tokens)
        own = laws[of_law]
        wanted = theory.confidence_moments(longest, tokens, own["accept"], own["confidence"], prices)  # type: ignore[arg-type]
        each = found.at(np.array([point]))
        values = [each.latency, each.busy, each.operations, each.rounds, each.drafted]
        assert [float(value[0]) for value in values if value is not None] == pytest.approx(
            [wanted.time, wanted.busy, wanted.operations, wanted.rounds, wanted.drafted], rel=1e-12, nan_ok=True
        )
        alike = (prices.time == prices.busy).all()
        assert np.array_equal(each.units_ratio, [1.0 if alike else np.nan], equal_nan=True)


def _counts(rounds: PolicyRounds, laws: PolicyLaws, tokens: int) -> Floats:
    every = np.arange(len(laws.accepted))
    (found,) = rounds.of_points(laws, np.array([tokens]), every, np.zeros_like(every), by_position=True)
    (summed,) = rounds.of_points(laws, np.array([tokens]), every, np.zeros_like(every), by_position=False)
    assert np.array_equal(found.points, every)
    assert found.by_position is not None
    counts = found.by_position[..., found.decoding]
    assert np.allclose(summed.drafted[:, summed.decoding], counts.sum(axis=(0, 1)), rtol=1e-12, atol=1e-15)
    return counts


def test_rounds_of_a_policy_are_kept_for_the_same_laws_only() -> None:
    laws, doubts = [Iid(0.3), Iid(0.9), Iid(0.5)], [TwoClass(0.2, 0.7), TwoClass(0.1, 0.4), TwoClass(0.3, 0.6)]
    rounds = PolicyRounds(None, 3)
    for tokens, which in ((6, [0, 1]), (6, [0, 1]), (6, [0, 2]), (6, [0]), (6, [0, 2, 1]), (5, [0, 2, 1])):
        found = _counts(rounds, PolicyLaws([laws[each] for each in which], [doubts[each] for each in which]), tokens)
        assert found.shape == (2, tokens, 4, len(which))
        for place, each in enumerate(which):
            alone = _counts(PolicyRounds(None, 3), PolicyLaws(laws[each : each + 1], doubts[each : each + 1]), tokens)
            assert np.allclose(found[..., place], alone[..., 0], rtol=1e-13, atol=0)


def test_uniform_seconds_equal_layer_times() -> None:
    """Results in seconds are those in layer-times, multiplied by the seconds per layer; policies assume the same costs."""
    shape, draft = growing(LAYERS).hardware_models["target"].shape, growing(1).hardware_models["target"].shape
    of = {"target": UniformLayers(shape, 0.002), "draft": UniformLayers(draft, 0.002)}
    seconds, layers = PassSeconds(of, prompt=7), UnitCost(LAYERS, cost_ratio=1 / LAYERS)
    for policy in POLICIES:
        parameters = Parameters(LAYERS, policy)
        assert parameters.with_costs(seconds) == parameters.with_costs(layers)
    law = {"accept": Iid(0.7), "confidence": TwoClass(0.2, 0.7)}
    for policy, own in (("heuristic", law["accept"]), ("confidence", law)):
        one, other = (theory.predict(Parameters(LAYERS, policy), 50, own, cost) for cost in (seconds, layers))
        for name in ("latency", "busy", "plain_latency", "rounds", "drafted"):
            scale = 0.002 if name in ("latency", "busy", "plain_latency") else 1.0
            assert float(getattr(one, name)) == pytest.approx(scale * float(getattr(other, name)), rel=1e-12)


def test_policies_assume_costs_at_mid_context() -> None:
    cost = growing(LAYERS, draft=0.1, middle=40)
    parameters = Parameters(LAYERS, "optimum", max_draft_length=5).with_costs(cost)
    curve, ratio = parameters.believed_verify_cost, parameters.believed_cost_ratio
    assert curve is not None
    assert ratio is not None
    assert [width for width, _ in curve] == [1, 2, 3, 4, 5, 6]
    for width, time in curve:
        assert time == pytest.approx(float(cost.verify_times(width, 40) / cost.plain_times(40)), rel=1e-14)
    assert ratio == pytest.approx(float(cost.draft_times(40) / cost.plain_times(40)), rel=1e-14)
    assert Parameters(LAYERS, "gradient").with_costs(cost).believed_verify_cost is None
    within = Parameters(LAYERS, "gradient", context_budget=9).with_costs(cost).believed_cost_ratio
    assert within == pytest.approx(float(cost.draft_times(9) / cost.plain_times(40)), rel=1e-14)
    given = replace(parameters, believed_cost_ratio=0.5)
    assert given.with_costs(growing(LAYERS, draft=0.7)) == given
