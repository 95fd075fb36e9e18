"""Rounds of one tree that draft different numbers of levels are counted and priced together: each is as it is alone."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.methods.tree import draft_trees, theory, tree_rounds
from model.methods.tree.algorithm import Parameters
from model.methods.tree.tree_rounds import RoundTimes
from model.outcomes import round_counts
from model.outcomes.rank_laws import RankRates
from tests.support.position_costs import growing
from tests.support.tiers import examples

LAYERS = 3
CONFIDENCES = (((0.6, 0.2),) * 4, ((0.4, 0.3),) * 4)
CHOICES: dict[str, dict[str, Any]] = {
    "full": {"shape": "full", "draft_depth": 4, "width": 2},
    "uneven": {"shape": "listed", "parents": (-1, -1, 0, 1, 1, 2, 3, 5)},
    "chain": {"shape": "chain", "draft_depth": 4},
    "separate": {"shape": "full", "draft_depth": 3, "width": 2, "placement": "separate"},
    "heads": {"shape": "listed", "parents": (-1, -1, 0, 1, 1, 2, 3, 5), "drafter": "heads"},
    "parallel": {"shape": "full", "draft_depth": 4, "width": 2, "drafter": "parallel"},
    "confidence": {"shape": "eagle-2", "draft_depth": 4, "width": 2, "nodes": 5, "rank_rates": CONFIDENCES},
}
LAWS = [
    RankRates([[[rate, 0.2]] * 4, [[0.3, 0.1], [0.0, 0.5], [0.9, 0.1], [0.2, 0.2]]], [weight, 1 - weight])
    for rate in (0.0, 0.5, 0.8) for weight in (0.3, 0.9, 1.0)
]  # fmt: skip


@pytest.mark.parametrize("name", CHOICES)
def test_rounds_of_several_levels_end_as_each_alone(name: str) -> None:
    choice = Parameters(LAYERS, **CHOICES[name])
    every = range(choice.levels + 1)
    for laws in (LAWS[:2], LAWS):
        together = tree_rounds.ends_of_levels(choice, laws, every)
        for levels in every:
            (ends, unread), (one, unread_of_one) = together[levels], tree_rounds.ends_of_levels(choice, laws, [levels])[levels]
            assert ends.accepted.tolist() == one.accepted.tolist()
            assert unread.tolist() == unread_of_one.tolist()
            np.testing.assert_allclose(ends.chance, one.chance, atol=1e-15)
            np.testing.assert_allclose(ends.chance.sum(axis=0), 1.0)


@pytest.mark.parametrize("name", CHOICES)
def test_rounds_of_several_levels_are_priced_as_each_alone(name: str) -> None:
    choice, tokens = Parameters(LAYERS, **CHOICES[name]), 12
    cost = growing(LAYERS, draft=0.3, link=0.4, draft_devices=0.5)
    rounds, levels = RoundTimes(choice, cost), tree_rounds.levels_of(choice, tokens)
    shape = 1 + tree_rounds.most_unread(choice), tokens
    time, busy, time_alone, busy_alone = np.zeros((4, *shape))
    rounds.put(levels, np.arange(tokens), time, busy)
    for at in range(tokens):
        rounds.put(levels[at : at + 1], np.array([at]), time_alone[:, at : at + 1], busy_alone[:, at : at + 1])
    np.testing.assert_array_equal(time, time_alone)
    np.testing.assert_array_equal(busy, busy_alone)


@pytest.mark.parametrize("name", CHOICES)
def test_work_of_rounds_of_several_levels_is_that_of_each_alone(name: str) -> None:
    choice, tokens = Parameters(LAYERS, **CHOICES[name]), 12
    levels = tree_rounds.levels_of(choice, tokens)
    together = theory._work_of_rounds(choice, levels, np.arange(tokens))
    each = [theory._work_of_rounds(choice, levels[at : at + 1], np.array([at])) for at in range(tokens)]
    np.testing.assert_array_equal(together, np.concatenate(each, axis=-1))


@pytest.mark.parametrize("name", CHOICES)
def test_rounds_of_many_laws_start_where_those_of_each_law_do(name: str) -> None:
    choice = Parameters(LAYERS, **CHOICES[name])
    assert len(LAWS) > tree_rounds._FEW_LAWS
    for tokens in (1, 2, 5, 150):
        together = tree_rounds.starts_of_laws(choice, tokens, LAWS)
        each = np.concatenate([tree_rounds.starts_of_laws(choice, tokens, [law]) for law in LAWS], axis=2)
        np.testing.assert_allclose(together, each, atol=1e-14)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=70), st.integers(1, 200))
@settings(max_examples=examples(40), deadline=None)
def test_values_that_follow_one_another_obey_their_recursion(weights: list[float], size: int) -> None:
    chance = np.array(weights) / max(sum(weights), 1.0)
    values = np.random.default_rng(size).random((size, 2))
    found = round_counts.followed(values, chance)
    for at in range(size):
        before = found[max(at - len(chance), 0) : at][::-1]
        np.testing.assert_allclose(found[at], values[at] + chance[: len(before)] @ before, rtol=1e-10)


@given(
    st.lists(st.lists(st.floats(0, 0.3), min_size=1, max_size=3), min_size=1, max_size=4), st.integers(1, 140),
    st.sampled_from((None, 1, 2)),
)  # fmt: skip
@settings(max_examples=examples(30), deadline=None)
def test_an_optimal_tree_is_the_same_among_those_of_more_nodes(rates: list[list[float]], nodes: int, width: int | None) -> None:
    alone = draft_trees.OptimalTrees(rates, nodes, len(rates), width).tree(nodes)
    assert draft_trees.optimal(rates, nodes, len(rates), width) == alone


@pytest.mark.parametrize("nodes", [-5, 0, draft_trees.MAX_NODES + 1])
def test_a_number_of_nodes_out_of_range_is_named(nodes: int) -> None:
    with pytest.raises(ValueError, match=f"nodes must be .* got {nodes}"):
        draft_trees.optimal([[0.5]], nodes, 1)


def test_rates_of_every_depth_are_checked() -> None:
    with pytest.raises(ValueError, match=r"rank_rates\[1\] must sum to at most 1"):
        Parameters(LAYERS, "sequoia", draft_depth=2, nodes=4, rank_rates=((0.6, 0.3), (0.8, 0.3)))


def test_one_row_of_rates_for_all_depths_is_still_checked() -> None:
    with pytest.raises(ValueError, match=r"rank_rates\[0\] must sum to at most 1"):
        Parameters(LAYERS, "sequoia", draft_depth=3, nodes=4, rank_rates=(0.8, 0.3))
