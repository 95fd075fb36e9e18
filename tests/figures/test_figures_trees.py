"""Figure of tree sizes: tokens per pass and speed-ups are those of the theory, and the best tree of each batch is marked."""

from __future__ import annotations

from typing import Any

import pytest

from figures.of_theory import tree_sizes
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.methods.tree import theory
from model.methods.tree.draft_trees import chain, optimal
from tests.figures.test_figures_speculative import inside, xy
from tests.figures.test_figures_tradeoff import lines, words

NODES = 24


def test_curves_are_those_of_the_theory() -> None:
    rates, costs, source = tree_sizes.example()
    figure = tree_sizes.draw(rates, costs, layers=1, nodes=NODES, source=source)
    left, right = (lines(axes) for axes in figure.axes)
    sizes, tokens = xy(left["best tree"])
    assert [*sizes] == [*range(NODES + 1)]
    assert tokens[1:] == pytest.approx([theory.expected_tokens(optimal(rates, size, 5), rates) for size in range(1, NODES + 1)])
    lengths, firsts = xy(left["chain"])
    assert [*lengths] == [*range(6)]
    assert firsts[1:] == pytest.approx([theory.expected_tokens(chain(length), rates) for length in range(1, 6)])
    best = {}
    for batch, cost in costs.items():
        at, speeds = xy(right[f"batch {batch}"])
        assert [*at] == [*range(NODES + 1)]
        assert speeds[0] == 1
        expected = theory.best_tree(rates, 1, cost, nodes=NODES, depth=5)
        (nodes,), (speed,) = xy(right[f"best {batch}"])
        assert speed == pytest.approx(expected.speedup)
        assert speed == max(speeds)
        assert nodes == (0 if expected.tree is None else expected.tree.nodes)
        # Any tree of this size and depth is at most as fast.
        tree = optimal(rates, 6, 3)
        plain = float(cost.plain_times(0))
        assert theory.expected_tokens(tree, rates) * plain / theory.round_time(tree, 1, cost) <= speeds[6] + 1e-12
        best[batch] = nodes
        assert f"batch {batch}: {nodes:g} nodes" in words(figure)
    assert best[1] > best[8] > best[32] >= 1, "the example does not tell batches apart"
    assert "assumed" in words(figure)
    assert inside(figure)


def test_a_batch_without_a_draft_that_pays_is_labelled() -> None:
    cost = UnitCost(1, cost_ratio=0.5, verify_cost=((1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)))
    figure = tree_sizes.draw([[0.4]], {64: cost}, layers=1, nodes=3, source="assumed")
    assert "batch 64: no draft" in words(figure)
    _, speeds = xy(lines(figure.axes[1])["batch 64"])
    assert speeds[1] == pytest.approx(1.4 / 2.5)
    assert [*map(str, speeds[2:])] == ["nan"] * 2, "a tree of one candidate and depth 1 has one node"


@pytest.mark.parametrize(("change", "error"), [
    ({"costs": {}}, "costs must be those of 1 to 6 batches, got 0"), ({"nodes": 0}, "nodes must be between 1 and 4096, got 0"),
    ({"rates": [[0.9, 0.2]]}, "must sum to at most 1"), ({"rates": []}, "rates must"),
])  # fmt: skip
def test_impossible_figures_are_refused(change: dict[str, Any], error: str) -> None:
    rates, costs, source = tree_sizes.example()
    with pytest.raises(ParameterError, match=error):
        tree_sizes.draw(**{"rates": rates, "costs": costs, "layers": 1, "nodes": 4, "source": source, **change})
