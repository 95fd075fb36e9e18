"""Tree drafts in closed form.

A node of the tree is right with the product of the rank rates on its path, and a round emits G tokens: 1 plus the sum of these
probabilities over all nodes. In a batch of b sequences a round takes T(b, n + 1) for the pass over n nodes and the text's last
token, and D passes of the draft, where plain decoding takes T(b, 1) for one token. For many tokens the speed-up is

    S = G T(b, 1) / (T(b, n + 1) + D T_d).

More nodes raise G by ever less (the best n nodes are those with the largest probabilities), and T(b, n + 1) by a full token for
each sequence once the batch has used up the arithmetic that memory leaves idle. So the best tree is large in a small batch and
becomes a short chain, or nothing, in a large one.

[Chen2024] Z. Chen et al. Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding. arXiv:2402.12374.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.steady_prices import SteadyPrices
from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.interpret.account import Account, Totals, Work
from model.methods.claim_bounds import ClaimTerms, Limit, drafting_bound
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.rounds.round_moments import Moments, prediction_of, units_alike
from model.methods.tree import tree_lengths, tree_means, tree_rounds
from model.methods.tree.algorithm import Parameters
from model.methods.tree.draft_trees import DraftTree, OptimalTrees
from model.methods.tree.tree_lengths import TreeDecodings
from model.outcomes.rank_laws import RankLaw, RankRates
from model.steps import LayerSpan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: RankLaw, cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` tokens, with cut last trees; times in the unit of the costs.

    In continuous batching no tree is cut: with B sequences, at the prices of B (`UnitCost.of_batch`), a sequence takes R(l) rounds.

    >>> from model.costs.layer_times import UnitCost
    >>> rates = ((0.6, 0.2), (0.6, 0.2))
    >>> choice = Parameters(32, "full", 2, 2)
    >>> found = predict(choice, 512, RankRates([rates]), UnitCost(32, cost_ratio=0.05))
    >>> round(float(found.plain_latency / found.latency), 3), round(float(speedup(choice.trees[0], rates, 0.05)), 3)
    (2.214, 2.218)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; those of one tree and number of tokens are computed together for all laws and costs."""
    return predict_by_decoding(_predict_decodings, points, _prices_of_each, together="always", means_apart=True)


def _prices_of_each(parameters: Parameters) -> int:
    """Prices of a cost, at each position if they depend on it."""
    return 1 + tree_rounds.most_unread(parameters)


def _predict_decodings(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points that share parameters, and tokens unless all rounds are independent."""
    parameters, tokens, which = points.parameters, points.tokens, points.price
    independent = np.array([isinstance(law, RankRates) and not (law.by_sequence and law.classes > 1) for law in points.laws])
    if points.lengths is not None:
        # Short decodings draft no whole tree, so that units may count differently.
        apart = (points.lengths <= parameters.levels) | ~independent[points.law]
        if apart.any():
            return points.one_length_each(_predict_decodings, apart)
    elif _means_are_enough(points) and independent.all():
        return prediction_of(points, *tree_means.moments(points))
    price = tree_rounds.prices(parameters, points.cost, tokens)
    by_length = points.lengths is not None and not (points.cost.uniform and tree_rounds.by_levels_only(price))
    classes = np.array([law.classes if known else -1 for law, known in zip(points.laws, independent, strict=True)])[points.law]
    found = np.empty((len(Moments._fields), which.size))
    for number in np.flatnonzero(classes < 0).tolist():
        found[:, number] = tree_rounds.moments(parameters, tokens, points.laws[points.law[number]], price.of(int(which[number])))
    for count in np.unique(classes[classes > 0]).tolist():
        own = np.flatnonzero(classes == count)
        part = points.at(own)
        if by_length:
            found[:, own] = tree_lengths.moments(part, price)
            continue
        pairs = part.laws, price, part.law, part.price, part.lengths, part.means
        found[:, own] = tree_rounds.moments_of_pairs(parameters, tokens, *pairs)
    return prediction_of(points, Moments(*found), units_alike(price))


def _means_are_enough(points: DecodingPoints[Parameters]) -> bool:
    """True if only means are asked, of times that depend on the position, under laws with as many classes each."""
    if points.means is None or not points.means.all() or points.cost.uniform:
        return False
    return len({law.classes if isinstance(law, RankRates) else 0 for law in points.laws}) == 1


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every round emits a single token, and the draft reads as much as it may."""
    price = tree_rounds.prices(parameters, cost, tokens)
    return tokens * float(price.time.max()), tokens * float(price.busy.max())


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of a run, in units of one token in the target: a logit for each token that a model reads for the first time."""
    drafted = account.of("draft").heads
    if not drafted:
        return float(account.of("target").heads)
    return account.of("target").heads + cost.operations("draft") * drafted


def work(parameters: Parameters, tokens: int, law: RankLaw) -> Work | None:
    """Expected work of the passes of both models; None for laws of records.

    >>> found = work(Parameters(32, "full", 2, 2), 128, RankRates([((0.6, 0.2), (0.6, 0.2))])).by_model
    >>> round(found["target"].passes, 3), round(found["target"].heads / found["target"].passes, 2)  # up to 7 tokens in a pass
    (52.808, 6.92)
    """
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[RankLaw]) -> Work | None:
    """`work` under each of several laws, as arrays of shape (laws,); None if one is of records, or has other classes."""
    found = work_of_lengths(parameters, np.array([tokens]), laws)
    return None if found is None else found.at((slice(None), 0))


def work_of_lengths(parameters: Parameters, lengths: Integers, laws: Sequence[RankLaw]) -> Work | None:
    """`work_of_laws` of several numbers of tokens, which rise, as arrays of shape (laws, lengths).

    >>> laws = [RankRates([((0.6, 0.2), (0.6, 0.2))])]
    >>> work_of_lengths(Parameters(32, "full", 2, 2), np.array([1, 128]), laws).by_model["target"].passes.round(3).tolist()
    [[1.0, 52.808]]
    """
    known = [law for law in laws if isinstance(law, RankRates)]
    if len(known) < len(laws) or len({(law.classes, law.by_sequence) for law in known}) > 1:
        return None
    size = max(_DECODINGS // lengths.size, 1)
    parts = [_work_sums(parameters, lengths, known[at : at + size]) for at in range(0, len(known), size)]
    target, draft = np.split(np.concatenate(parts, axis=1), 2)
    models = {"target": _totals(parameters.layers, target)}
    return Work(models | ({"draft": _totals(parameters.draft_layers, draft)} if draft[0].any() else {}))


_DECODINGS = 10_000
"""Decodings whose work is counted together."""


def _work_sums(parameters: Parameters, lengths: Integers, laws: Sequence[RankRates]) -> Floats:
    """Sums of the counts of `_work_of_rounds`, with the depths of the nodes; shape (10, laws, lengths)."""
    if not laws[0].by_sequence:
        return _work_of_classes(parameters, lengths, laws, None)
    weights = np.array([each.weights for each in laws])
    of_each = [_work_of_classes(parameters, lengths, laws, np.broadcast_to(one, weights.shape)) for one in np.eye(weights.shape[1])]
    return np.asarray(np.einsum("lc,cvln->vln", weights, np.stack(of_each)))


def _work_of_classes(parameters: Parameters, lengths: Integers, laws: Sequence[RankRates], weights: Floats | None) -> Floats:
    """`_work_sums` where each round has a class with probabilities `weights`, of shape (laws, classes), or those of the laws."""
    law = np.repeat(np.arange(len(laws)), lengths.size)
    decodings = TreeDecodings.of(parameters, np.tile(lengths, len(laws)), laws, law, weights)
    cut = np.array(decodings.cut, dtype=np.int64)
    levels = np.concatenate([np.full(lengths[-1], parameters.levels), np.repeat(cut, lengths.size)])
    at = np.concatenate([np.arange(lengths[-1]), (lengths - 1 - cut[:, None]).ravel()])
    whole, last = np.split(_work_of_rounds(parameters, levels, at), [lengths[-1]], axis=-1)
    last = last.reshape(*last.shape[:2], cut.size, lengths.size).swapaxes(1, 2)
    found = decodings.means(whole, last)
    weights = np.array([each.weights for each in laws]) if weights is None else weights
    # Positions of the nodes: their depths after the text's last token.
    depths = np.stack([_sum_of_depths(parameters, weights, levels) for levels in decodings.levels])
    found[2] += np.einsum("kln,kl->ln", decodings.rounds().reshape(len(depths), len(laws), -1), depths)
    return found


def _work_of_rounds(parameters: Parameters, levels: Integers, at: Integers) -> Floats:
    """Passes, tokens, positions attended to, positions read and heads of rounds from these positions, of target and draft.

    `levels` of the rounds fall. Shape (10, 1 + most unread, positions), by the tokens that the draft has not read; without the
    depths of the nodes, which the target attends to.
    """
    passes = [tree_rounds.passes_of(parameters, each) for each in range(int(levels[0]) + 1)]
    unread = np.arange(tree_rounds.most_unread(parameters) + 1)[:, None]
    found = np.zeros((10, unread.size, at.size))
    most = np.inf if parameters.context_budget is None else parameters.context_budget

    def add(rows: Floats, *counts: Any) -> None:
        for row, each in zip(rows, counts, strict=True):
            row += each

    size = np.array([each.drafted + 1 for each in passes])[levels]
    add(found[:5], 1, size, at * size + size, at + size, size)
    drafting = int(np.count_nonzero(levels))
    first = levels[:drafting] if parameters.drafts_in_one_pass else 1
    size, begin = first + unread, np.minimum(at[:drafting] - unread, most)  # cached positions that the first pass reads
    add(found[5:, :, :drafting], 1, size, begin * size + size * (size + 1) / 2, begin + size, first)
    for level, width in enumerate(passes[-1].widths, 1):
        deeper = int(np.count_nonzero(levels > level))
        cached = np.minimum(at[:deeper] + level, most)
        add(found[5:, :, :deeper], 1, width, (cached + 1) * width, cached + width, width)
    return found


def _sum_of_depths(parameters: Parameters, weights: Floats, levels: int) -> Floats:
    """Mean over the classes, with these weights, of the sum of the depths of all nodes, by law."""
    if not levels:
        return np.zeros(len(weights))
    depths = [float(sum(parameters.tree_of_class(index, levels).depths)) for index in range(weights.shape[1])]
    return np.asarray(weights @ np.array(depths))


def _totals(layers: int, counts: Floats) -> Totals:
    passes: Any
    tokens: Any
    attended: Any
    rows: Any
    heads: Any
    passes, tokens, attended, rows, heads = counts
    return Totals(passes, layers * passes, layers * tokens, layers * attended, layers * rows, head_runs=passes, heads=heads)


# --- One round ------------------------------------------------------------------------------------------------------


def expected_tokens(tree: DraftTree, rates: Sequence[Sequence[float]]) -> float:
    """Expected tokens of a round, the target's own included: G = 1 + sum over nodes of the rates on their paths [tokens].

    Section 3.1 of [Chen2024]. With a chain of equal rates it is Eq. 1 of [Leviathan2023].

    >>> from model.methods.tree.draft_trees import chain
    >>> round(expected_tokens(chain(3), [[0.79]] * 3), 3)
    2.907
    """
    return 1 + tree.accepted_tokens(rates)


def speedup(
    tree: DraftTree, rates: Sequence[Sequence[float]], cost_ratio: ArrayLike, *, verify_factor: ArrayLike = 1.0
) -> Floats:
    """Speed-up over plain decoding, for many tokens: G / (v + D c) [-].

    Parameters
    ----------
    tree, rates
        The tree, and the rank rates of the text.
    cost_ratio
        Time of a draft pass, of any width, relative to a plain step of the target; a parallel draft makes one pass, for which it is
        to be divided by D.
    verify_factor
        T(b, n + 1) / T(b, 1): time of the verification relative to a plain step.

    >>> from model.methods.tree.draft_trees import full
    >>> float(speedup(full(2, 1), [[0.6, 0.2]], 0.1, verify_factor=1.1))  # 1.8 / 1.2
    1.5
    """
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    verify = checks.array("verify_factor", verify_factor, 0)
    depth = tree.depth if tree.read_widths is None else len(tree.read_widths) + 1
    return np.asarray(expected_tokens(tree, rates) / (verify + depth * ratio))


def steady_state(parameters: Parameters, laws: Sequence[RankLaw], prices: SteadyPrices) -> Floats:
    """Time per token in the long run [s], without links: (T(b, n + 1) + D T_d) / G; shape (laws, cells).

    G of laws with classes is the mean over the classes of drafts. It has no such form where each sequence has a class.

    >>> flat = SteadyPrices(lambda width: np.full((1, 1), 1.1 if width > 1 else 1.0), np.full((1, 1), 0.1))
    >>> steady_state(Parameters(32, "full", 1, 2), [RankRates([[[0.6, 0.2]]])], flat).round(12).tolist()  # 1.2 / 1.8
    [[0.666666666667]]
    """
    tokens = np.array([[_tokens_of(parameters, law)] for law in laws])
    passes = tree_rounds.passes_of(parameters, parameters.levels)
    drafts = 1 if parameters.drafts_in_one_pass else 1 + len(passes.widths)
    return np.asarray((prices.verify(passes.drafted + 1) + drafts * prices.draft) / tokens + prices.waiting)


def _tokens_of(parameters: Parameters, law: RankLaw) -> float:
    """Expected tokens of a round."""
    if not isinstance(law, RankRates) or (law.by_sequence and law.classes > 1):
        raise checks.ParameterError(
            "ranks must have rates that hold for every draft for a time per token in the long run; predict a number of tokens"
            " instead"
        )
    found = 0.0
    for index, (weight, table) in enumerate(zip(law.weights, law.rates, strict=True)):
        rates = [row.tolist() for row in table]
        found += weight * expected_tokens(parameters.tree_of_class(index, parameters.levels), rates)
    return found


# --- Claims ---------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Bound of drafting in turn (`model.methods.claim_bounds.drafting_bound`) with drafts that take no time.

    A tree verifies no fewer tokens than the chain of its accepted nodes, so that its passes take no less time.

    >>> claim_bound(ClaimTerms({"mean_acceptance_length": 4.5}, draft=0.5)).value
    4.5
    """
    return drafting_bound(replace(terms, draft=0.0))


# --- The best tree for a batch ----------------------------------------------------------------------------------------


class TreeSpeed(NamedTuple):
    """A tree, and its speed-up over plain decoding; without a tree plain decoding is fastest."""

    tree: DraftTree | None
    speedup: float


def round_time(tree: DraftTree, layers: int, cost: StepCosts, *, at: int = 0, parallel: bool = False) -> float:
    """Time of a round at this position: T(b, n + 1) + D T_d, each draft pass at its width; in the unit of the costs.

    The draft has read the text but its last token.
    """
    several, size = not tree.is_chain, tree.nodes + 1
    verify = float(cost.times(PassShape(LayerSpan(0, layers), width=size, heads=size, tree=several), at))
    if parallel:
        return verify + float(cost.draft_times(at, width=tree.depth, heads=tree.depth))
    cost.require("draft")
    widths = (1, *tree.draft_widths)
    shapes = [PassShape(ALL_LAYERS, "draft", width, heads=width, tree=several) for width in widths]
    return verify + sum(float(cost.times(shape, at + level)) for level, shape in enumerate(shapes))


def best_trees(
    rates: Sequence[Sequence[float]], layers: int, cost: StepCosts, *, nodes: int, depth: int, width: int | None = None,
    at: int = 0, parallel: bool = False,
) -> list[TreeSpeed]:  # fmt: skip
    """Best tree for each largest number of nodes 0, 1, ..., `nodes`, of any depth up to `depth`, at these costs.

    Section 3.3 of [Chen2024]: for each depth the tree with most accepted tokens, then the depth and the number of nodes with the
    largest speed-up. `cost` is that of the whole batch (`UnitCost.of_batch`, or hardware costs with their number of sequences), and
    a round starts at position `at`.

    >>> from model.costs.layer_times import UnitCost
    >>> cost = UnitCost(32, cost_ratio=0.05, verify_cost=((1, 1.0), (8, 1.1), (64, 6.0)))
    >>> found = best_trees([[0.6, 0.2, 0.1]] * 4, 32, cost, nodes=16, depth=4)
    >>> found[16].tree.nodes, round(found[16].speedup, 3), found[4].tree.parents
    (7, 2.173, (-1, -1, 0, 1))
    """
    found = tree_speeds(rates, layers, cost, nodes=nodes, depth=depth, width=width, at=at, parallel=parallel)
    best: Iterator[TreeSpeed] = accumulate(found, lambda one, other: one if one.speedup >= other.speedup else other)
    return [*best]


def tree_speeds(
    rates: Sequence[Sequence[float]], layers: int, cost: StepCosts, *, nodes: int, depth: int, width: int | None = None,
    at: int = 0, parallel: bool = False,
) -> list[TreeSpeed]:  # fmt: skip
    """Fastest tree of exactly 0, 1, ..., `nodes` nodes, of any depth up to `depth`; see `best_trees`.

    Where no tree within the depth and width has that number of nodes, there is none, and the speed-up is 0.

    >>> from model.costs.layer_times import UnitCost
    >>> cost = UnitCost(32, cost_ratio=0.05, verify_cost=((1, 1.0), (8, 1.1), (64, 6.0)))
    >>> [round(each.speedup, 3) for each in tree_speeds([[0.6, 0.2, 0.1]] * 4, 32, cost, nodes=9, depth=4)[6:]]
    [2.117, 2.173, 2.084, 2.007]
    """
    plain = float(cost.plain_times(at))
    by_depth = [OptimalTrees(rates, nodes, levels, width) for levels in range(1, depth + 1)] if nodes else []
    speeds = [TreeSpeed(None, 1.0)]
    for count in range(1, nodes + 1):
        found = TreeSpeed(None, 0.0)
        for trees in by_depth:
            tree = trees.tree(count)
            if tree.nodes == count:
                gain = (1 + float(trees.accepted[count])) * plain / round_time(tree, layers, cost, at=at, parallel=parallel)
                found = max(found, TreeSpeed(tree, gain), key=lambda each: each.speedup)
        speeds.append(found)
    return speeds


def best_tree(
    rates: Sequence[Sequence[float]], layers: int, cost: StepCosts, *, nodes: int, depth: int, width: int | None = None,
    at: int = 0, parallel: bool = False,
) -> TreeSpeed:  # fmt: skip
    """Best tree of at most `nodes` nodes; see `best_trees`.

    >>> from model.costs.layer_times import UnitCost
    >>> cost = UnitCost(32, cost_ratio=0.05, verify_cost=((1, 1.0), (2, 2.0), (64, 64.0)))  # arithmetic limits every pass
    >>> best_tree([[0.6, 0.2]] * 4, 32, cost, nodes=8, depth=4)
    TreeSpeed(tree=None, speedup=1.0)
    """
    return best_trees(rates, layers, cost, nodes=nodes, depth=depth, width=width, at=at, parallel=parallel)[-1]
