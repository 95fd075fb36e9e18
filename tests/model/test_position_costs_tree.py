"""Position-dependent costs of tree drafts: formula, paths and events agree; the least work of the draft is priced."""

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.pass_seconds import PassSeconds
from model.interpret.simulated_answers import Ranked
from model.methods import prediction
from model.methods.prediction import MethodChoice, PredictionPoints
from model.methods.tree import theory, tree_rounds
from model.methods.tree.algorithm import Parameters, decode
from model.outcomes.rank_laws import RankRates, ReplayedRanks
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from tests.support.position_costs import BUDGETS, growing
from tests.support.tiers import examples

LAYERS = 3
RATES = ((0.5, 0.2), (0.4, 0.3))
PATHS = ((0, 0), (1, 0), (2, 0), (1, 1), (1, 2), (2, 1), (2, 2))
"""Ranks of a draft at both depths; after 0 they have no effect."""


def chance_of(path: tuple[int, ...]) -> float:
    rates = [RATES[depth][rank - 1] for depth, rank in enumerate(path) if rank]
    rest = 1 - sum(RATES[len(rates)]) if len(rates) < len(path) else 1.0
    return math.prod(rates) * rest


def costs() -> st.SearchStrategy[PassSeconds]:
    return st.builds(
        lambda draft, prompt, batch, link, devices: growing(
            LAYERS, draft=draft, prompt=prompt, batch=batch, link=link, draft_devices=devices
        ),
        st.floats(0.02, 0.8), st.integers(0, 30), st.integers(1, 4), st.sampled_from((0.0, 0.4)), st.sampled_from((1.0, 0.5)),
    )  # fmt: skip


TREES: tuple[dict[str, Any], ...] = (
    {"shape": "listed", "parents": (-1, -1, 0)}, {"shape": "listed", "parents": (-1, -1, 1, 1)},
    {"shape": "full", "draft_depth": 1, "width": 2},
    {"shape": "eagle-2", "draft_depth": 2, "width": 2, "nodes": 3, "rank_rates": ((0.5, 0.2),)},
)  # fmt: skip
choices = st.builds(
    lambda tree, batching, drafting, budget: Parameters(
        LAYERS, **tree, sequences=1 if batching is None else 4, batching=batching or "continuous", drafter=drafting[0],
        placement=drafting[1], context_budget=budget if drafting[0] == "model" else None,
    ),
    st.sampled_from(TREES), st.sampled_from((None, "continuous", "lockstep")),
    st.sampled_from((("model", "colocated"), ("model", "separate"), ("heads", "colocated"))), BUDGETS,
) | st.builds(lambda tree: Parameters(LAYERS, **tree, drafter="parallel"), st.sampled_from(TREES[:3]))  # fmt: skip


def played(choice: Parameters, tokens: int, cost: PassSeconds, ranks: list[list[int]]) -> Run:
    world = Ranked(1, LAYERS, [[0] * tokens, *ranks], choice.draft_confidences)
    return simulate(decode(choice, [0], tokens), tokens, Cluster(choice.units), cost, world)


@given(choices, costs(), st.integers(1, 4))
@settings(max_examples=examples(25), deadline=None)
def test_all_views_agree_at_position_dependent_costs(choice: Parameters, cost: PassSeconds, tokens: int) -> None:
    """All outcomes are simulated: paths agree for each, the formula with mean and variance over all."""
    every = [*itertools.product(PATHS, repeat=tokens - 1)]
    records = [[[path[depth] for path in each] + [0] for depth in range(2)] for each in every]
    runs = [played(choice, tokens, cost, ranks) for ranks in records]
    price = tree_rounds.prices(choice, cost, tokens)
    draws = np.broadcast_to((np.arange(len(every)) + 0.5) / len(every), (tokens, len(every)))
    tally = tree_rounds.walk(choice, tokens, ReplayedRanks(records).sample(iter([draws])), price, len(every))
    time, busy = np.array([run.latency for run in runs]), np.array([run.busy for run in runs])
    np.testing.assert_allclose(tally.time, time, rtol=1e-12)
    np.testing.assert_allclose(tally.busy, busy, rtol=1e-12)
    chance = np.array([math.prod(map(chance_of, each)) for each in every])
    assert chance.sum() == pytest.approx(1)
    found = theory.predict(choice, tokens, RankRates([RATES]), cost)
    mean = float(chance @ time)
    np.testing.assert_allclose(found.latency, mean, rtol=1e-12)
    np.testing.assert_allclose(found.busy, chance @ busy, rtol=1e-12)
    np.testing.assert_allclose(found.latency_variance, chance @ time**2 - mean**2, rtol=1e-9, atol=1e-12 * mean**2)


@given(
    st.lists(costs(), min_size=1, max_size=3), choices, st.integers(1, 4) | st.integers(1, 9),
    st.lists(st.integers(0, 2), max_size=2), st.data(),
)  # fmt: skip
@settings(max_examples=examples(200), deadline=None)
def test_means_alone_are_those_of_the_moments(
    priced: list[PassSeconds], choice: Parameters, tokens: int, whole: list[int], data: st.DataObject
) -> None:
    """All but the variance, also where it is asked at some points or costs only, and with few costs at a time."""
    laws, two = [RankRates([RATES])], (RATES, ((0.9, 0.05), (0.2, 0.2)))
    if choice.shape != "eagle-2":
        laws = data.draw(st.sampled_from((
            [*laws, RankRates([two[1]])], [*laws, RankRates(two, [0.3, 0.7])],
            [RankRates(two, [0.3, 0.7]), RankRates(two, [0.3, 0.7], by_sequence=True)],
        )))  # fmt: skip
    size = data.draw(st.sampled_from((1, 20, 200_000)))
    of, law = (each.ravel() for each in np.meshgrid(np.arange(len(priced)), np.arange(len(laws))))
    means = ~np.isin(of, whole) | (law == data.draw(st.integers(0, 3)))
    points = PredictionPoints([MethodChoice(choice, tokens, each) for each in priced], laws, of, law)
    expected = theory.predict_points(points)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prediction, "_CELLS", size)
        found = theory.predict_points(replace(points, means=means))
    for name, values in vars(expected).items():
        asked = ~means if name == "latency_variance" else np.ones_like(means)
        least = 1e-12 * np.max(expected.latency) ** 2 if name == "latency_variance" else 0.0
        np.testing.assert_allclose(np.asarray(getattr(found, name))[asked], values[asked], rtol=1e-12, atol=least, err_msg=name)


def test_means_alone_need_the_time_of_the_draft() -> None:
    one, choice = np.zeros(1, dtype=np.intp), MethodChoice(Parameters(LAYERS, "full", 2, 2), 2, growing(LAYERS))
    with pytest.raises(ParameterError, match="the draft has none"):
        theory.predict_points(PredictionPoints([choice], [RankRates([RATES])], one, one, one == 0))


def test_draft_reads_leaves_only_where_they_were_accepted() -> None:
    """After an accepted node without children the first pass of the draft reads one token more, and only then."""
    choice = Parameters(LAYERS, "listed", parents=(-1, -1, 0))
    cost = growing(LAYERS, draft=0.3)
    leaf, inner = (played(choice, 4, cost, [[rank, 0, 0, 0], [0, 0, 0, 0]]) for rank in (2, 1))
    read = [run.account.of("draft").layer_passes for run in (leaf, inner)]
    assert read[0] == read[1] + 1


@pytest.mark.parametrize("drafter", ["model", "heads"])
def test_continuous_batches_never_cut_a_tree(drafter: str) -> None:
    choice = Parameters(LAYERS, "full", 2, 2, sequences=4, drafter=drafter)
    run = played(choice, 3, growing(LAYERS, draft=0.3, batch=4), [[0, 1, 1], [0, 1, 1]])
    assert {drafted for _, drafted in run.rounds} == {6}


def test_best_tree_shrinks_with_the_batch() -> None:
    """At costs of a batch the best tree has no more nodes, and it is the best of all depths and sizes."""
    rates = [[0.6, 0.15, 0.05]] * 4
    sizes = []
    for batch in (1, 2, 4, 8):
        found = theory.best_tree(rates, LAYERS, growing(LAYERS, draft=0.05, batch=batch), nodes=16, depth=4)
        sizes.append(0 if found.tree is None else found.tree.nodes)
        assert found.speedup >= 1
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] > sizes[-1]


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 6)), min_size=2, max_size=5))
def test_points_together_equal_each_alone(asked: list[tuple[int, int, int]]) -> None:
    """Laws with one class, with several by draft or by sequence, and records; costs in layer-times by the width of a pass."""
    one, other = ((0.5, 0.2), (0.6, 0.1)), ((0.9, 0.05), (0.2, 0.2))
    laws = [
        RankRates([one]), RankRates([one, other], [0.3, 0.7]), RankRates([one, other], [0.3, 0.7], by_sequence=True),
        RankRates([other]),
    ]  # fmt: skip
    kinds = [Parameters(8, "full", 2, 2), Parameters(8, "listed", parents=(-1, -1, 0)),
             Parameters(8, "full", 2, 2, drafter="heads"), Parameters(8, "chain", 2, sequences=3)]  # fmt: skip
    choices = [
        MethodChoice(
            kinds[kind], tokens, UnitCost(8, cost_ratio=tokens / 9, operations_ratio=0.2, verify_cost=((1, 1.0), (40, 3.0)))
        )
        for _, kind, tokens in asked
    ]
    of = np.arange(len(asked))
    found = theory.predict_points(PredictionPoints(choices, laws, of, np.array([law for law, _, _ in asked])))
    for at, (law, _, tokens) in enumerate(asked):
        alone = theory.predict(choices[at].parameters, tokens, laws[law], choices[at].cost)
        for name in ("latency", "latency_variance", "busy", "rounds", "drafted", "operations", "plain_latency"):
            together = float(np.asarray(getattr(found, name))[at])
            assert together == pytest.approx(float(getattr(alone, name)), rel=1e-9, abs=1e-9), name
