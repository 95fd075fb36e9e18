"""Theorems on tree drafts, 45 and 46: trees, speed. Examples are described in `tree_examples`.

Symbols: n nodes, D depth, w width, G tokens of a round, v time of the verification in plain steps, c time of a draft pass.

[Chen2024] Z. Chen et al. Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding. arXiv:2402.12374.
[Li2024b] Y. Li et al. EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees. arXiv:2406.16858.
"""

from __future__ import annotations

import itertools
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.methods.speculative import algorithm as speculative
from model.methods.tree import algorithm, draft_trees, theory
from model.methods.tree.draft_trees import DraftTree
from sim.theorems.drafting_examples import digits, rounds
from sim.theorems.pipelined_examples import CLOSE, integers, rates
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st
from sim.theorems.tree_examples import all_ranks, law_of, parameters_of, play, rank_rates, rated, short_decodings

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

theorem = TheoremCollection("tree")


# --- 45: trees ---


@cache
def _all_trees(nodes: int, depth: int, width: int) -> tuple[DraftTree, ...]:
    """All trees of 1 to `nodes` nodes, at most this deep, with at most `width` children of a node."""
    found: list[tuple[int, ...]] = [(-1,)]
    for parents in found:
        if len(parents) < nodes:
            found += [(*parents, parent) for parent in range(parents[-1], len(parents))]
    trees = [DraftTree(parents) for parents in found]
    return tuple(tree for tree in trees if tree.depth <= depth and tree.width <= width)


@theorem("45a", "G is 1 plus the sum over all nodes of the rates on their paths: the mean tokens of a round, by enumeration.",
         source="[Chen2024], Section 3.1", given=lambda: short_decodings("plain"))
def tokens_are_sum_over_nodes(x: Example) -> None:
    tree = parameters_of(x).trees[0]
    one = {**x, "tokens": 2}
    lengths: dict[int, float] = {}
    for chance, example in all_ranks(one):
        path, node = [row[0] for row in example["ranks"]], draft_trees.ROOT
        count = 0
        for rank in path:
            children = tree.children.get(node, ())
            if not 0 < rank <= len(children):
                break
            node, count = children[rank - 1], count + 1
        lengths[count] = lengths.get(count, 0.0) + chance
    mean = sum(chance * (1 + count) for count, chance in lengths.items())
    equal("G", theory.expected_tokens(tree, x["rates"]), mean, CLOSE)
    for place, survival in enumerate(tree.survival(x["rates"]).tolist(), 1):
        want = sum(chance for count, chance in lengths.items() if count >= place)
        at_most(f"error of P(accepted >= {place})", abs(survival - want), CLOSE)


@theorem("45b", "Dynamic programming finds the tree with most accepted tokens of all trees of n nodes, depth D and width w.",
         source="[Chen2024], Proposition 3.4", given=lambda: rated(3, 3, nodes=integers(1, 5), depth=integers(1, 3)))
def optimum_of_all_trees(x: Example) -> None:
    trees = draft_trees.OptimalTrees(x["rates"], x["nodes"], x["depth"])
    best = max(tree.accepted_tokens(x["rates"]) for tree in _all_trees(x["nodes"], x["depth"], 3))
    own = trees.tree(x["nodes"])
    at_most("nodes", own.nodes, x["nodes"])
    at_most("depth", own.depth, x["depth"])
    at_most("best of all trees", best, own.accepted_tokens(x["rates"]), CLOSE)
    equal("accepted tokens", float(trees.accepted[x["nodes"]]), own.accepted_tokens(x["rates"]), CLOSE)


@theorem("45c", "With rates that do not rise with the rank, the best trees consist of the likeliest nodes: each further node gains"
         " no more than the one before, and a deeper limit never accepts less.",
         source="a node is no likelier than its parent and its elder siblings",
         given=lambda: rated(3, 3, True, nodes=integers(1, 12)))
def gains_do_not_rise(x: Example) -> None:
    by_depth = [draft_trees.OptimalTrees(x["rates"], x["nodes"], depth).accepted for depth in (1, 2, 3)]
    for accepted_tokens in by_depth:
        gains = np.diff(accepted_tokens).tolist()
        for before, after in itertools.pairwise(gains):
            at_most("gain of a node", after, before, 1e-9)
    for shallow, deep in itertools.pairwise(by_depth):
        at_most("accepted tokens", float(shallow[-1]), float(deep[-1]), CLOSE)


@theorem("45d", "With any rates, each further node of the best trees gains no more than the one before.",
         source="false: a likely second candidate needs a first one", given=lambda: rated(1, 3, nodes=st.just(3)), expect="fails")
def gains_never_rise(x: Example) -> None:
    gains = np.diff(draft_trees.OptimalTrees(x["rates"], x["nodes"], 1).accepted).tolist()
    for before, after in itertools.pairwise(gains):
        at_most("gain of a node", after, before, 1e-9)


def _read_in_limits(tree: DraftTree, width: int) -> bool:
    """True if the draft reads at most `width` nodes of each depth."""
    return max(tree.draft_widths, default=0) <= width


@theorem("45e", "Growth by confidence finds the best of all trees whose draft reads at most w nodes per depth, each with at most w"
         " children, with rates that do not rise with the rank.",
         source="[Li2024b], Section 4: it reads the likeliest nodes",
         given=lambda: rated(3, 2, True, nodes=integers(1, 6)))
def growth_is_best_in_its_limits(x: Example) -> None:
    own = draft_trees.confident(x["rates"], x["nodes"], 3, 2)
    trees = [tree for tree in _all_trees(x["nodes"], 3, 2) if _read_in_limits(tree, 2)]
    best = max(tree.accepted_tokens(x["rates"]) for tree in trees)
    equal("accepted tokens", own.accepted_tokens(x["rates"]), best, CLOSE)


@theorem("45f", "Growth by confidence never accepts more than the best tree of as many nodes, depth and children.",
         source="the best tree is the best of all", given=lambda: rated(3, 2, True, nodes=integers(1, 12)))
def growth_is_no_better(x: Example) -> None:
    own = draft_trees.confident(x["rates"], x["nodes"], 3, 2)
    best = draft_trees.OptimalTrees(x["rates"], x["nodes"], 3, 2).accepted[-1]
    at_most("accepted tokens", own.accepted_tokens(x["rates"]), float(best), CLOSE)


@theorem("45g", "Growth by confidence accepts as many tokens as the best tree of as many nodes, depth and children.",
         source="false: it reads at most w nodes per depth", given=lambda: rated(3, 2, True, nodes=integers(8, 12)),
         expect="fails")
def growth_is_optimal(x: Example) -> None:
    own = draft_trees.confident(x["rates"], x["nodes"], 3, 2)
    best = draft_trees.OptimalTrees(x["rates"], x["nodes"], 3, 2).accepted[-1]
    equal("accepted tokens", own.accepted_tokens(x["rates"]), float(best), CLOSE)


@theorem("45h", "If classes of drafts have their own rates, growth by the class's confidence accepts no fewer tokens than any tree"
         " in the same limits, on average over the classes.",
         source="the mean of the largest is at least the largest mean",
         given=lambda: st.lists(rated(3, 2, True), min_size=2, max_size=3).map(lambda each: {"classes": each}))
def confidence_is_worth(x: Example) -> None:
    tables = [each["rates"] for each in x["classes"]]
    own = sum(draft_trees.confident(table, 4, 3, 2).accepted_tokens(table) for table in tables)
    for tree in _all_trees(4, 3, 2):
        if _read_in_limits(tree, 2):
            at_most("accepted tokens of one tree", sum(tree.accepted_tokens(table) for table in tables), own, CLOSE)


@theorem("45i", "A tree that contains another never takes more rounds on average.",
         source="rounds are independent: each accepts no fewer tokens in law",
         given=lambda: rated(2, 2, parent=integers(-1, 1), tokens=integers(1, 9)))
def larger_tree_takes_fewer_rounds(x: Example) -> None:
    small, large = (_rounds_of(x, parents) for parents in _nested(x["parent"]))
    at_most("mean rounds of the larger tree", large, small, CLOSE)


@theorem("45j", "A tree that contains another never takes more rounds, on any path.",
         source="false: it may begin a round where the draft fails", expect="fails",
         given=lambda: st.lists(st.lists(integers(0, 1), min_size=9, max_size=9), min_size=3, max_size=3).map(lambda ranks: {
             "drafter": speculative.MODEL, "ranks": ranks}))
def larger_tree_takes_fewer_rounds_on_paths(x: Example) -> None:
    small, large = (rounds(play({**x, "parents": [*range(-1, depth - 1)]})) for depth in (2, 3))
    at_most("rounds of the larger tree", large, small)


def _nested(parent: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a tree and one with a further node."""
    return (-1, -1), (-1, -1, parent) if parent >= 0 else (-1, -1, 0)


def _rounds_of(x: Example, parents: tuple[int, ...]) -> float:
    parameters = algorithm.Parameters(1, "listed", parents=parents)
    return float(np.asarray(theory.predict(parameters, x["tokens"], law_of(x), UnitCost(1, cost_ratio=0.25)).rounds))


# --- 46: speed ---


@drawn
def _priced(draw: DrawFn, /, **fields: SearchStrategy[Any]) -> Example:
    """Draw rank rates, the time of a draft pass, and the times of wider passes of the target."""
    steps = digits(draw, 4, 6)
    return {
        "rates": [sorted(row, reverse=True) for row in rank_rates(draw, 3)], "cost_ratio": draw(st.integers(0, 10)) / 20,
        "verify_cost": [[width, 10 + time] for width, time in enumerate(itertools.accumulate(steps, initial=0), 1)],
    } | {name: draw(strategy) for name, strategy in fields.items()}  # fmt: skip


def _price(x: Example) -> UnitCost:
    return UnitCost(1, cost_ratio=x["cost_ratio"], verify_cost=tuple((width, time) for width, time in x["verify_cost"]))


@theorem("46a", "The best tree for a batch is the best of all trees of at most n nodes, and plain decoding.",
         source="[Chen2024], Section 3.3", given=_priced)
def best_tree_is_best(x: Example) -> None:
    found = theory.best_tree(x["rates"], 1, _price(x), nodes=4, depth=3, width=2)
    curve = dict(x["verify_cost"])
    speeds = [
        float(theory.speedup(tree, x["rates"], x["cost_ratio"], verify_factor=curve[tree.nodes + 1] / 10))
        for tree in _all_trees(4, 3, 2)
    ]
    equal("best speed-up", found.speedup, max(1.0, *speeds), CLOSE)
    if found.tree is not None:
        own = theory.speedup(found.tree, x["rates"], x["cost_ratio"], verify_factor=curve[found.tree.nodes + 1] / 10)
        equal("speed-up of the tree", float(own), found.speedup, CLOSE)


@theorem("46b", "Where a pass takes the same time for any number of tokens, a further node of the best trees never makes decoding"
         " slower.", source="G does not fall", given=lambda: rated(3, 2, True, cost_ratio=rates()))
def free_width_takes_large_trees(x: Example) -> None:
    found = theory.best_trees(x["rates"], 1, UnitCost(1, cost_ratio=x["cost_ratio"]), nodes=6, depth=3)
    for small, large in itertools.pairwise(found):
        at_most("speed-up of the smaller tree", small.speedup, large.speedup, CLOSE)
    full = draft_trees.OptimalTrees(x["rates"], 6, 3).accepted[-1]
    at_most("speed-up of the deepest tree", (1 + float(full)) / (1 + 3 * x["cost_ratio"]), found[-1].speedup, CLOSE)


@theorem("46c", "A larger tree of the best is never slower.", source="false: verifying takes longer", given=_priced, expect="fails")
def larger_is_faster(x: Example) -> None:
    trees, curve = draft_trees.OptimalTrees(x["rates"], 4, 1, 2), dict(x["verify_cost"])
    speeds = [
        float(theory.speedup(tree, x["rates"], x["cost_ratio"], verify_factor=curve[tree.nodes + 1] / 10))
        for tree in (trees.tree(1), trees.tree(2))
    ]
    at_most("speed-up of the smaller tree", speeds[0], speeds[1], CLOSE)


@theorem("46d", "The speed-up of l tokens tends to G / (v + D c) as l grows.", source="renewal theory",
         given=lambda: _priced(parents=st.sampled_from([[-1], [-1, -1], [-1, 0], [-1, -1, 0], [-1, -1, 0, 1]])))
def tends_to_limit(x: Example) -> None:
    tree, many = DraftTree(tuple(x["parents"])), 1000
    parameters = algorithm.Parameters(1, "listed", parents=tree.parents)
    found = theory.predict(parameters, many, law_of(x), _price(x))
    factor = dict(x["verify_cost"])[tree.nodes + 1] / 10
    limit = float(theory.speedup(tree, x["rates"], x["cost_ratio"], verify_factor=factor))
    equal("speed-up of 1000 tokens", float(found.plain_latency / found.latency), limit, 4 * (tree.depth + 1) ** 2 / many)


@theorem("46e", "A tree is faster than the chain of its first candidates exactly if it gains a larger share of G than of the"
         " round's time.", source="S = G / (v + D c)", given=_priced)
def tree_against_chain(x: Example) -> None:
    tree, chain = DraftTree((-1, -1, 0, 1)), draft_trees.chain(2)
    curve, c = dict(x["verify_cost"]), x["cost_ratio"]
    tokens = [theory.expected_tokens(each, x["rates"]) for each in (tree, chain)]
    times = [curve[each.nodes + 1] / 10 + 2 * c for each in (tree, chain)]
    speeds = [_long_run(each, x) for each in (tree, chain)]
    if abs(tokens[0] * times[1] - tokens[1] * times[0]) > 1e-9:
        equal("tree is faster", speeds[0] > speeds[1], tokens[0] / tokens[1] > times[0] / times[1])


def _long_run(tree: DraftTree, x: Example) -> float:
    """Tokens per time of endless decoding, by the time per token between two lengths in a batch that is kept full."""
    parameters = algorithm.Parameters(1, "listed", parents=tree.parents, sequences=2)
    short, long = (float(theory.predict(parameters, tokens, law_of(x), _price(x)).latency) for tokens in (400, 900))
    return 500 / (long - short)


THEOREMS = theorem.all()
