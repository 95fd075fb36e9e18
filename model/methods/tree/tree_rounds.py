"""Rounds of tree drafts: their prices, the walk of many replications at once, and its moments.

A round that starts at output position s drafts the tree of min(D, l - 1 - s) levels, where l is the number of tokens; in a batch
that is kept full all D levels, and tokens after l are dropped. The ranks of the target's tokens from s on
(`model.outcomes.rank_laws`) lead from the root to the node where the round ends. The first draft pass of the next round reads what
the draft has not read, so its time depends on that node: one token more than usual after a node that the draft has not read, and
with a draft that reads the target's states, one more for each accepted token.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.methods.prediction import linear
from model.methods.rounds.round_moments import Moments, mean_of, mixed
from model.methods.rounds.round_walks import Tally
from model.methods.tree.algorithm import EAGLE_2, Parameters
from model.methods.tree.draft_trees import ROOT, DraftTree, require_rates
from model.outcomes import round_counts
from model.outcomes.rank_laws import RankLaw, RankRates, Ranks, ReplayedRanks
from model.outcomes.round_counts import PricesOfRounds, RoundEnds
from model.steps import LayerSpan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


# --- Prices -------------------------------------------------------------------------------------------------------------


class TreePasses(NamedTuple):
    """Passes of a round that drafts some levels of a tree."""

    drafted: int
    """Nodes, which are verified together with the text's last token."""
    widths: tuple[int, ...]
    """Tokens of the draft's passes after the first; none with a parallel draft."""


def passes_of(parameters: Parameters, levels: int) -> TreePasses:
    """Passes of a round that drafts `levels` levels; they do not depend on the class of confidence.

    >>> [passes_of(Parameters(8, "full", 2, 2), levels) for levels in (0, 1, 2)]
    [TreePasses(drafted=0, widths=()), TreePasses(drafted=2, widths=()), TreePasses(drafted=6, widths=(2,))]
    """
    if not levels:
        return TreePasses(0, ())
    if parameters.shape == EAGLE_2:
        width = parameters.width or 0
        return TreePasses(parameters.sizes[levels], (width,) * (levels - 1))
    tree = parameters.trees[0].cut(levels)
    return TreePasses(tree.nodes, () if parameters.drafts_in_one_pass else tree.draft_widths)


def read_of(parameters: Parameters, levels: int) -> int:
    """Tokens that the draft reads in a round that drafts `levels` levels, without those that it reads again."""
    if not levels:
        return 0
    return levels if parameters.drafts_in_one_pass else 1 + sum(passes_of(parameters, levels).widths)


class TreePrices(NamedTuple):
    """Prices of rounds by their start position, for decodings of a number of tokens.

    Positions with the same prices share a row: all that draft as many levels, unless costs depend on the position. Of several costs
    (`model.costs.many_costs`) times and arithmetic have a leading axis of costs.
    """

    time: Floats
    """Shape (rows, 1 + most unread): by the tokens that the first draft pass reads besides the text's last one."""
    busy: Floats
    """Unit-time, of the same shape."""
    operations: Floats
    """Arithmetic, in units of one token in a pass of the target; shape (rows,)."""
    drafted: Floats
    """Nodes; shape (rows,)."""
    row: NDArray[np.intp]
    """Row of each position; shape (tokens,)."""
    levels: Integers
    """Drafted levels; shape (tokens,)."""

    def of(self, cost: int) -> TreePrices:
        """Prices at one of several costs."""
        return self._replace(time=self.time[cost], busy=self.busy[cost], operations=self.operations[cost])


def levels_of(parameters: Parameters, tokens: int) -> Integers:
    """Levels that a round drafts from each position."""
    most = parameters.levels
    return np.minimum(most, np.arange(tokens - 1, -1, -1)) if parameters.cut else np.full(tokens, most)


def prices(parameters: Parameters, cost: StepCosts, tokens: int) -> TreePrices:
    """Prices of the rounds of a decoding of `tokens` tokens.

    With models on separate units a round that drafts uses the link twice. In a round of levels D with w_1, w_2, ... nodes that the
    draft reads, it makes passes over 1, w_1, ..., w_(D-1) tokens, and the target one over all nodes and the text's last token.

    >>> from model.costs.layer_times import UnitCost
    >>> found = prices(Parameters(10, "full", 2, 2), UnitCost(10, cost_ratio=0.1, operations_ratio=0.5), 4)
    >>> found.levels.tolist(), found.row.tolist()  # the last rounds are cut
    ([2, 2, 1, 0], [2, 2, 1, 0])
    >>> found.time[:, 0].tolist(), found.drafted.tolist(), found.operations.tolist()
    ([10.0, 11.0, 12.0], [0.0, 2.0, 6.0], [1.0, 3.5, 8.5])
    """
    levels, rounds = levels_of(parameters, tokens), RoundTimes(parameters, cost)
    counts, row = np.unique(levels, return_inverse=True)
    # Positions to price: without prices by position the last one with each number of levels.
    start = np.searchsorted(-levels, -counts, side="right") - 1 if cost.uniform else np.arange(tokens)
    row = row if cost.uniform else start
    ratio = np.asarray(rounds.cost.operations("draft"))  # shape () or (costs,)
    shape = 1 + most_unread(parameters), *ratio.shape, start.size  # the axis of unread tokens is the last one of the result
    time = np.zeros(shape)
    busy = time if rounds.alike else np.zeros(shape)
    operations, drafted = np.ones((*ratio.shape, start.size)), np.zeros(start.size)
    for count, here in _stretches(levels[start]):
        if count:
            drafted[here] = passes_of(parameters, count).drafted
            operations[..., here] += drafted[here] + read_of(parameters, count) * ratio[..., None]
    falling = slice(None, None, -1 if cost.uniform else 1)
    rounds.put(levels[start][falling], start[falling], time[..., falling], busy[..., falling])
    by_unread = [np.moveaxis(each, 0, -1) for each in (time, busy)]
    return TreePrices(by_unread[0], by_unread[0] if busy is time else by_unread[1], operations, drafted, row, levels)


class RoundTimes:
    """Times of rounds at a cost, or at each of several."""

    def __init__(self, parameters: Parameters, cost: StepCosts) -> None:
        self.parameters, self.cost = parameters, parameters.draft_costs(cost)
        link, self.share = np.broadcast_arrays(self.cost.link, self.cost.draft_devices)  # shape () or (costs,)
        self.link = 2 * link[..., None] * (parameters.placement == "separate")
        self.alike = bool(np.all(self.share == 1) and not np.any(self.link))
        """True if unit-time equals time."""

    def put(self, levels: Integers, at: Integers, time: Floats, busy: Floats) -> None:
        """Set time and unit-time of rounds that draft these numbers of levels, which fall, from these positions, which rise.

        Shape (1 + most unread, ..., positions), by the tokens that the first draft pass reads besides the text's last one; the same
        array if `alike`. The draft's passes after the first are over the same numbers of tokens as those of rounds that
        draft further, so that each pass is priced once for all of them.
        """
        verify, stretches = np.empty(time.shape[1:]), _stretches(levels)
        for count, here in stretches:
            verify[..., here] = self.cost.times(self.verification(count), at[here])
        drafting = int(np.count_nonzero(levels))
        time[..., drafting:] = busy[..., drafting:] = verify[..., drafting:]
        if not drafting:
            return
        self.cost.require("draft")
        time, busy, verify, at = time[..., :drafting], busy[..., :drafting], verify[..., :drafting], at[:drafting]
        first = [each for each in stretches if each[0]] if self.parameters.drafts_in_one_pass else [(1, slice(0, drafting))]

        def first_pass(more: int, begin: int) -> Floats:
            """Time of the first pass, which reads this number of tokens more, of all but the first rounds."""
            if len(first) == 1:
                return self.cost.times(self.first_pass(first[0][0], more), at[begin:] - more)
            found = np.empty(verify[..., begin:].shape)
            for count, here in first:
                own = slice(max(here.start, begin), max(here.stop, begin))
                found[..., own.start - begin : own.stop - begin] = self.cost.times(self.first_pass(count, more), at[own] - more)
            return found

        time[0] = alone = first_pass(0, 0)
        for level, width in enumerate(passes_of(self.parameters, int(levels[0])).widths, 1):
            deeper = int(np.count_nonzero(levels > level))
            time[0, ..., :deeper] += self.cost.times(self.further_pass(width), at[:deeper] + level)
        for more in range(1, len(time)):
            begin = int(np.searchsorted(at, more))  # the round before began at position 0 or later
            time[more] = time[0]
            time[more, ..., begin:] += first_pass(more, begin) - alone[..., begin:]
        if not self.alike:
            np.add(time * self.share[..., None], verify, out=busy)
        time += verify + self.link

    def verification(self, levels: int) -> PassShape:
        """Pass of the target over all nodes of a round and the text's last token."""
        size = passes_of(self.parameters, levels).drafted + 1
        return PassShape(LayerSpan(0, self.parameters.layers), width=size, heads=size, tree=self.parameters.several_hypotheses)

    def first_pass(self, levels: int, more: int) -> PassShape:
        """The draft's first pass of a round, which reads this number of tokens before the text's last one."""
        one_pass = self.parameters.drafts_in_one_pass
        heads, tree = levels if one_pass else 1, self.parameters.several_hypotheses and not one_pass
        return PassShape(ALL_LAYERS, "draft", heads + more, heads=heads, tree=tree)

    def further_pass(self, width: int) -> PassShape:
        """A later pass of the draft over this number of nodes."""
        return PassShape(ALL_LAYERS, "draft", width, heads=width, tree=self.parameters.several_hypotheses)


def _stretches(levels: Integers) -> list[tuple[int, slice]]:
    """Equal numbers that follow each other, and where they are.

    >>> _stretches(np.array([2, 2, 1, 0]))
    [(2, slice(0, 2, None)), (1, slice(2, 3, None)), (0, slice(3, 4, None))]
    """
    bounds = [0, *(np.flatnonzero(np.diff(levels)) + 1).tolist(), levels.size]
    return [(int(levels[start]), slice(start, stop)) for start, stop in itertools.pairwise(bounds)]


def most_unread(parameters: Parameters) -> int:
    """Largest number of tokens that the first draft pass of a round reads besides the text's last one."""
    return parameters.levels if parameters.reads_states else 1


# --- Where rounds end ---------------------------------------------------------------------------------------------------


class Endings:
    """Where the rounds of a tree end: the accepted tokens of each node, and the tokens that the draft has not read there.

    Number 0 stands for the root, 1 + i for node i.
    """

    def __init__(self, tree: DraftTree, *, reads_states: bool) -> None:
        self.tree = tree
        self.accepted = np.array([0, *tree.depths], dtype=np.int64)
        if reads_states:
            self.unread = self.accepted
        else:
            passed = tree.passed
            self.unread = np.array([0, *[int(node not in passed) for node in range(tree.nodes)]], dtype=np.int64)

    @cached_property
    def following(self) -> NDArray[np.intp]:
        """Next state by state and rank, flat with `tree.width` + 2 columns; states from the number of nodes + 1 on have ended."""
        size, columns = self.tree.nodes + 1, self.tree.width + 2
        found = np.repeat(np.arange(2 * size)[:, None], columns, axis=1)
        found[:size] += size  # no child with this rank: the round ends here
        for parent, children in self.tree.children.items():
            for rank, child in enumerate(children, 1):
                found[parent - ROOT, rank] = child + 1
        return found.reshape(-1)

    def of_ranks(self, ranks: Ranks) -> NDArray[np.intp]:
        """Number of the node where rounds end, by their ranks; shape (..., depth, replications) without the axis of depths."""
        columns, size = self.tree.width + 2, self.tree.nodes + 1
        shape = ranks.shape[:-2] + ranks.shape[-1:]
        state = np.zeros(shape, dtype=np.intp)
        for depth in range(min(self.tree.depth, ranks.shape[-2])):
            state *= columns
            state += np.minimum(ranks[..., depth, :], columns - 1)
            state = self.following[state]
        return state % size

    def reached(self, tables: Sequence[Sequence[Floats]]) -> Floats:
        """Probability that each node is accepted, with tables of rank rates of one class; shape (tables, nodes + 1)."""
        widths = self.tree.widest_by_depth
        for table in tables:
            if len(table) < len(widths) or any(row.size < width for row, width in zip(table, widths, strict=False)):
                require_rates("rates", [row.tolist() for row in table], len(widths), widths)
        return self.tree.reached([np.stack([table[depth][:width] for table in tables]) for depth, width in enumerate(widths)])

    def ends_among(self, reached: Floats) -> Floats:
        """Probability that a round ends at each node, from `reached` and in its shape."""
        ends, parents = reached.copy(), np.array(self.tree.parents) - ROOT
        first = np.flatnonzero(np.diff(parents, prepend=-1))  # nodes with the same parent follow each other
        ends[:, parents[first]] -= np.add.reduceat(reached[:, 1:], first, axis=1)
        return np.maximum(ends, 0.0)


@lru_cache(maxsize=4096)
def _endings_of(tree: DraftTree, reads_states: bool) -> Endings:
    return Endings(tree, reads_states=reads_states)


class _Trees:
    """Endings of the trees of a method, by class and drafted levels."""

    def __init__(self, parameters: Parameters) -> None:
        self.parameters = parameters
        self.known: dict[tuple[int, int], Endings] = {}

    def of(self, index: int, levels: int) -> Endings:
        """Endings in a class, with at least one level; classes differ only if the tree depends on them."""
        key = (index if self.parameters.shape == EAGLE_2 else 0, levels)
        if key not in self.known:
            self.known[key] = _endings_of(self.parameters.tree_of_class(*key), self.parameters.reads_states)
        return self.known[key]

    def endings(self, outcomes: Ranks, levels: int) -> tuple[Integers, Integers]:
        """Accepted and unread tokens of rounds with these outcomes, shape (positions, replications)."""
        ranks = outcomes[:, 1:]
        if self.parameters.shape != EAGLE_2:
            own = self.of(0, levels)
            ends = own.of_ranks(ranks)
            return own.accepted[ends], own.unread[ends]
        accepted, unread = np.zeros((2, len(outcomes), outcomes.shape[-1]), dtype=np.int64)
        for index in np.unique(outcomes[:, 0]).tolist():
            own, mine = self.of(index, levels), outcomes[:, 0] == index
            ends = own.of_ranks(ranks)[mine]
            accepted[mine], unread[mine] = own.accepted[ends], own.unread[ends]
        return accepted, unread


@lru_cache(maxsize=64)  # the same for all laws and costs
def _trees_of(parameters: Parameters) -> _Trees:
    return _Trees(parameters)


# --- Many replications at once ------------------------------------------------------------------------------------------


def walk(parameters: Parameters, tokens: int, outcomes: Iterator[Ranks], price: TreePrices, replications: int) -> Tally:
    """Walk rounds position by position, from tiles of ranks.

    >>> from model.costs.layer_times import UnitCost
    >>> choice = Parameters(10, "full", 2, 2)
    >>> ranks = np.array([[0, 2, 1], [0, 0, 0], [0, 0, 0], [0, 1, 0], [0, 0, 0]], dtype=np.uint16)[:, :, None]
    >>> tally = walk(choice, 5, iter([ranks]), prices(choice, UnitCost(10, cost_ratio=0.1), 5), 1)
    >>> tally.rounds.tolist(), tally.drafted.tolist(), tally.accepted.tolist(), tally.time.round(12).tolist()
    ([2.0], [8.0], [0, 1, 1], [23.0])
    """
    trees, most = _Trees(parameters), price.time.shape[1]
    start, unread_before = np.zeros((2, replications), dtype=np.int64)
    time, busy, rounds, drafted, operations = np.zeros((5, replications))
    counts = np.zeros(parameters.levels + 2, dtype=np.int64)
    tables = [np.append(each, np.zeros((len(each), 1)), axis=1) for each in (price.time, price.busy)]
    position = 0
    for tile in outcomes:
        rows = tile[: tokens - position]
        accepted, unread = _endings(trees, rows, price.levels[position : position + len(rows)])
        remaining = tokens - 1 - position
        read = np.full(accepted.shape, most)  # what the first draft pass reads besides the last token; `most` where no round starts
        kept = np.full(accepted.shape, len(counts) - 1)
        for row in range(len(rows)):
            starting = start == position + row
            own = np.minimum(accepted[row], remaining - row) if remaining - row < parameters.levels else accepted[row]
            np.copyto(read[row], unread_before, where=starting)
            np.copyto(kept[row], own, where=starting)
            np.copyto(start, own + (position + row + 1), where=starting)
            np.copyto(unread_before, unread[row], where=starting)
        own_rows = price.row[position : position + len(rows)]
        for total, table in zip((time, busy), tables, strict=True):
            total += np.take_along_axis(table[own_rows], read, axis=1).sum(axis=0)
        starts = (read < most).astype(np.float64)
        rounds += starts.sum(axis=0)
        drafted += price.drafted[own_rows] @ starts
        operations += price.operations[own_rows] @ starts
        counts += np.bincount(kept.ravel(), minlength=len(counts))
        position += len(rows)
    return Tally(time, busy, operations, rounds, drafted, counts[:-1])


def _endings(trees: _Trees, outcomes: Ranks, levels: Integers) -> tuple[Integers, Integers]:
    """Accepted and unread tokens of rounds that draft these numbers of levels; shape (positions, replications)."""
    whole = int(np.count_nonzero(levels == levels[0])) if levels[0] else 0
    parts = [trees.endings(outcomes[:whole], int(levels[0]))] if whole else []
    for row in range(whole, len(outcomes)):
        count, one = int(levels[row]), outcomes[row : row + 1]
        none = np.zeros((1, outcomes.shape[-1]), dtype=np.int64)
        parts.append(trees.endings(one, count) if count else (none, none))
    return np.concatenate([part[0] for part in parts]), np.concatenate([part[1] for part in parts])


# --- Expectations -------------------------------------------------------------------------------------------------------


class RoundEndings(NamedTuple):
    """The possible endings of a round: accepted tokens, tokens that the draft has not read, and their probability."""

    accepted: Integers
    unread: Integers
    chance: Floats


def cells(parameters: Parameters, law: RankRates, levels: int) -> RoundEndings:
    """Endings of a round that drafts this number of levels, over all classes.

    >>> found = cells(Parameters(10, "full", 2, 2), RankRates([[[0.6, 0.2], [0.5]]]), 2)
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: rates[1] must have a rate for each of 2 ranks, got 1; give more, or draft fewer candidates
    >>> found = cells(Parameters(10, "full", 2, 2), RankRates([[[0.6, 0.2], [0.5, 0.1]]]), 2)
    >>> found.accepted.tolist(), found.unread.tolist(), found.chance.round(12).tolist()
    ([0, 1, 2], [0, 0, 1], [0.2, 0.32, 0.48])
    """
    ends, unread = ends_of_levels(parameters, [law], [levels])[levels]
    return RoundEndings(ends.accepted, unread, ends.chance[:, 0])


def ends_of_levels(
    parameters: Parameters, laws: Sequence[RankRates], levels: Sequence[int], weights: Floats | None = None
) -> dict[int, tuple[RoundEnds, Integers]]:
    """Endings of rounds that draft these numbers of levels, which rise, under each law, and the tokens that the draft has not read.

    Laws have as many classes each. `weights` of the classes, shape (laws, classes), replace those of the laws.
    """
    if weights is None and len(laws) <= _FEW_LAWS:
        return _kept_ends(parameters, tuple(laws), tuple(levels))
    weights = np.array([law.weights for law in laws]) if weights is None else weights
    if parameters.shape != EAGLE_2:
        return _ends_of_parts(parameters, laws, levels, weights)
    # A tree by confidence is no part of one that grows further.
    return {each: _ends_of_parts(parameters, laws, [each], weights)[each] for each in levels}


def _ends_of_parts(
    parameters: Parameters, laws: Sequence[RankRates], levels: Sequence[int], weights: Floats
) -> dict[int, tuple[RoundEnds, Integers]]:  # fmt: skip
    """`ends_of_levels` where the smaller trees are the first levels of the largest.

    A round that drafts fewer levels ends where one with the largest tree ends, or at the last level that it drafts if that is
    reached.
    """
    deepest, trees, most = levels[-1], _trees_of(parameters), most_unread(parameters) + 1
    chance, possible = np.zeros((len(laws), (deepest + 1) * most)), np.zeros((deepest + 1) * most, dtype=np.bool_)
    reaching = np.zeros((len(laws), deepest + 1))  # each depth
    for index, weight in enumerate(weights.T if deepest else ()):
        own = trees.of(index, deepest)
        reached = own.reached([law.rates[index] for law in laws])
        used, place = np.unique(own.accepted * most + own.unread, return_inverse=True)
        chance[:, used] += weight[:, None] * (own.ends_among(reached) @ np.eye(used.size)[place])
        possible[used] = True
        if len(levels) > 1:
            reaching += weight[:, None] * np.add.reduceat(reached, [0, *(1 + first for first in own.tree.nodes_to[:-1])], axis=1)
    found: dict[int, tuple[RoundEnds, Integers]] = {}
    kinds = np.flatnonzero(possible)
    for each in levels:
        if not each:
            found[each] = RoundEnds(np.zeros(1, dtype=np.int64), np.ones((1, len(laws)))), np.zeros(1, dtype=np.int64)
        elif each == deepest:
            found[each] = RoundEnds(kinds // most, chance[:, kinds].T), kinds % most
        else:
            before, unread = kinds[: np.searchsorted(kinds, each * most)], each if parameters.reads_states else 1
            chances = np.append(chance[:, before], reaching[:, each : each + 1], axis=1).T
            found[each] = RoundEnds(np.append(before // most, each), chances), np.append(before % most, unread)
    return found


@lru_cache(maxsize=1024)
def _kept_ends(
    parameters: Parameters, laws: tuple[RankRates, ...], levels: tuple[int, ...]
) -> dict[int, tuple[RoundEnds, Integers]]:  # fmt: skip
    found = ends_of_levels(parameters, laws, levels, np.array([law.weights for law in laws]))
    for ends, unread in found.values():
        for values in (*ends, unread):
            values.flags.writeable = False
    return found


def moments_of_pairs(
    parameters: Parameters, tokens: int, laws: Sequence[RankRates], prices_of_costs: TreePrices, law: NDArray[np.intp],
    price: NDArray[np.intp], lengths: Integers | None = None, means: NDArray[np.bool_] | None = None,
) -> Moments:  # fmt: skip
    """`moments` with independent rounds, of pairs of laws and prices; arrays of shape (pairs,).

    Laws have as many classes each, and prices a leading axis of costs. Rounds are counted once for all prices; where times depend
    on more than the drafted levels, the variance takes a recursion for each pair, and may be nan where only `means` are asked.
    `lengths` are the tokens of each pair if they differ; then times depend on the levels only, and prices are those of the largest,
    `tokens` (else `model.methods.tree.tree_lengths`).
    """
    known = ends_of_levels(parameters, laws, np.unique(prices_of_costs.levels).tolist())
    if by_levels_only(prices_of_costs):
        every = np.array([tokens]) if lengths is None else lengths
        return _of_counts(parameters, tokens, known, prices_of_costs, law, price, every)
    ends = [known[count] for count in prices_of_costs.levels.tolist()]
    mass = _masses(parameters, ends) if len(laws) > _FEW_LAWS else starts_of_laws(parameters, tokens, laws)
    rounds = mass.sum(axis=1)
    time, busy, operations = (by_position(each, prices_of_costs.row) for each in prices_of_costs[:3])

    def mean_of_sum(values: Floats) -> Floats:
        return np.asarray(sum(linear(mass[:, unread], values[..., unread], law, price) for unread in range(mass.shape[1])))

    mean = mean_of_sum(time)
    spent = mean if prices_of_costs.busy is prices_of_costs.time else mean_of_sum(busy)
    drafted = prices_of_costs.drafted[prices_of_costs.row] @ rounds
    variance, asked = np.full(law.size, np.nan), np.arange(law.size) if means is None else np.flatnonzero(~means)
    variance[asked] = np.maximum(_squares(ends, mass, time, law[asked], price[asked]) - mean[asked] ** 2, 0.0)
    return Moments(mean, variance, spent, linear(rounds, operations, law, price), rounds.sum(axis=0)[law], drafted[law])


def by_position(values: Floats, row: NDArray[np.intp]) -> Floats:
    """Prices by row as prices by position; axes (costs, positions, ...)."""
    return values if np.array_equal(row, np.arange(values.shape[1])) else values[:, row]


def _masses(parameters: Parameters, ends: Sequence[tuple[RoundEnds, Integers]]) -> Floats:
    """Probability that a round starts at each position, by the tokens that the draft has not read; shape (tokens, unread, laws).

    `ends` are the endings of rounds from each position.
    """
    tokens, laws = len(ends), ends[0][0].chance.shape[1]
    total = np.zeros((tokens + 1 + parameters.levels, laws))
    ahead = np.zeros((len(total), 1 + most_unread(parameters), laws))
    total[0] = ahead[0, 0] = 1.0
    for here, each, unread in _alike(ends):
        if here.stop == here.start + 1:
            likely = each.chance * total[here]
            np.add.at(total, here.stop + each.accepted, likely)
            ahead[here.stop + each.accepted, unread] += likely
            continue
        chance = np.zeros((int(each.accepted[-1]) + 1, laws))
        np.add.at(chance, each.accepted, each.chance)
        if laws <= _FEW_LAWS:
            for law, own in enumerate(chance.T):
                total[here, law] = round_counts.followed(total[here, law, None], own)[:, 0]
            for accepted, likely in enumerate(chance):  # of rounds that lead past these positions
                begin = max(here.stop - 1 - accepted, here.start)
                total[begin + 1 + accepted : here.stop + 1 + accepted] += likely * total[begin : here.stop]
        else:
            for start in range(here.start, here.stop):
                total[start + 1 : start + 1 + len(chance)] += chance * total[start]
        for accepted, left, likely in zip(each.accepted.tolist(), unread.tolist(), each.chance, strict=True):
            ahead[here.start + 1 + accepted : here.stop + 1 + accepted, left] += likely * total[here]
    return ahead[:tokens]


def _alike(ends: Sequence[tuple[RoundEnds, Integers]]) -> Iterator[tuple[slice, RoundEnds, Integers]]:
    """Stretches of positions from which rounds end alike."""
    at = 0
    while at < len(ends):
        each, unread = ends[at]
        size = next((place for place, other in enumerate(ends[at:]) if other[0] is not each), len(ends) - at)
        yield slice(at, at + size), each, unread
        at += size


def _squares(
    ends: Sequence[tuple[RoundEnds, Integers]], mass: Floats, times: Floats, law: NDArray[np.intp], price: NDArray[np.intp]
) -> Floats:
    """Mean square of the time of pairs of laws and times, the latter of shape (costs, positions, unread tokens).

    With the tokens that a round accepts, its time is added to the time until the position that follows.
    """
    found, by_start = np.empty(law.size), np.moveaxis(times, 0, -1)
    by_law = np.argsort(law, kind="stable")
    for mine in np.split(by_law, np.flatnonzero(np.diff(law[by_law])) + 1):
        if mine.size >= _MANY_PAIRS:  # the rest together
            found[mine] = _squares_of_law(ends, mass, by_start, law[mine[:1]], price[mine])
    few = np.flatnonzero(np.bincount(law, minlength=mass.shape[2])[law] < _MANY_PAIRS)
    by_start = np.ascontiguousarray(by_start) if few.size else by_start
    for at in range(0, few.size, _PAIRS):
        part = few[at : at + _PAIRS]
        found[part] = _squares_of_pairs(ends, mass, by_start, law[part], price[part])
    return found


_MANY_PAIRS = 20
"""Pairs of one law from which many positions are taken at once."""
_PAIRS = 1000
"""Pairs whose arrays of a position stay in the cache of a processor."""


def _squares_of_pairs(
    ends: Sequence[tuple[RoundEnds, Integers]], mass: Floats, times: Floats, law: NDArray[np.intp], price: NDArray[np.intp]
) -> Floats:
    """`_squares`, position by position; `times` has the axis of costs last."""
    most = max(int(each.accepted[-1]) for each, _ in ends)
    until = np.zeros((len(ends) + 1 + most, mass.shape[1], law.size))  # times the probability of a start
    found, last, chance = np.zeros(law.size), None, np.zeros(0)
    for start, (each, unread) in enumerate(ends):
        if each is not last:
            last, chance = each, each.chance.take(law, axis=1)
        time = times[start].take(price, axis=1)
        before, more = until[start], mass[start].take(law, axis=1) * time
        found += (time * (2 * before + more)).sum(axis=0)
        until[start + 1 + each.accepted, unread] += chance * (before + more).sum(axis=0)
    return found


def _squares_of_law(
    ends: Sequence[tuple[RoundEnds, Integers]], mass: Floats, times: Floats, law: NDArray[np.intp], price: NDArray[np.intp]
) -> Floats:
    """`_squares` of one law: rounds that end alike are taken together, from many positions.

    The time until a position is multiplied by that of the round there where it is known, and only kept from one stretch of
    positions to the next.
    """
    time, starts = np.ascontiguousarray(times[..., price]), mass[..., law[0]]
    found = np.einsum("tu,tup,tup->p", starts, time, time)
    passed = np.einsum("tu,tup->tp", starts, time)  # what the rounds before add, with the time of the round
    until: dict[int, Floats] = defaultdict(lambda: np.zeros(time.shape[1:]))  # times the probability of a start
    for own, each, unread in _alike(ends):
        for start in [at for at in until if at < own.stop]:
            before = until.pop(start)
            found += 2 * (time[start] * before).sum(axis=0)
            passed[start] += before.sum(axis=0)
        chances = each.chance[:, law[0]]
        spent = passed[own]
        if len(spent) > 1:
            chance = np.zeros(int(each.accepted[-1]) + 1)
            np.add.at(chance, each.accepted, chances)
            spent = round_counts.followed(spent, chance)
        for accepted, left, likely in zip(each.accepted.tolist(), unread.tolist(), chances.tolist(), strict=True):
            begin, inside = own.start + 1 + accepted, max(len(spent) - 1 - accepted, 0)
            if inside:
                found += 2 * likely * np.einsum("tp,tp->p", time[begin : begin + inside, left], spent[:inside])
            for start in range(begin + inside, min(begin + len(spent), len(ends))):
                until[start][left] += likely * spent[start - begin]
    return np.asarray(found)


def by_levels_only(prices_of_costs: TreePrices) -> bool:
    """True if times of rounds, at each of several costs, depend on the drafted levels only."""
    alike = _first_with_levels(prices_of_costs)
    of_first_and_all = itertools.product((slice(1), slice(None)), prices_of_costs[:2])  # the first cost mostly shows it
    return all(bool((each[some, alike, :1] == each[some]).all()) for some, each in of_first_and_all)


def _first_with_levels(price: TreePrices) -> NDArray[np.intp]:
    """For each row of prices that of the first position that drafts as many levels."""
    position = np.unique(price.row, return_index=True)[1]
    _, first, place = np.unique(price.levels, return_index=True, return_inverse=True)
    return np.asarray(price.row[first][place[position]])


def _of_counts(
    parameters: Parameters, tokens: int, known: Mapping[int, tuple[RoundEnds, Integers]], prices_of_costs: TreePrices,
    law: NDArray[np.intp], price: NDArray[np.intp], lengths: Integers,
) -> Moments:  # fmt: skip
    """`moments_of_pairs` where times depend on the drafted levels only; `known` has the endings by drafted levels."""
    most, taken = parameters.levels, levels_of(parameters, tokens)
    laws = known[int(taken[0])][0].chance.shape[1]
    ends = []
    for remaining in range(most + 1):  # at most what remains is accepted, also of trees that are not cut
        of = known.get(remaining if parameters.cut else most, (None, None))[0]
        chance = np.zeros((remaining + 1, laws))
        if of is not None:
            np.add.at(chance, np.minimum(of.accepted, remaining), of.chance)
        ends.append(chance)
    # Rounds that begin with 0, 1, ... further tokens to come are at these positions; with more than `most`, at the first one.
    where = prices_of_costs.row[np.maximum(tokens - 1 - np.arange(most + 1), 0)]
    time, busy = (each[:, where, 0] for each in prices_of_costs[:2])
    by_remaining = PricesOfRounds(time, busy, prices_of_costs.operations[:, where], prices_of_costs.drafted[where])
    distinct, length = np.unique(np.broadcast_to(lengths, law.size), return_inverse=True)
    return Moments(*round_counts.moments_of_pairs(distinct, ends, by_remaining, law, length, price))


def starts_of_laws(parameters: Parameters, tokens: int, laws: Sequence[RankRates], weights: Floats | None = None) -> Floats:
    """Probability that a round starts at each position, by the tokens that the draft has not read; see `ends_of_levels`.

    Shape (tokens, 1 + most unread, laws).
    """
    if weights is None and len(laws) <= _FEW_LAWS and tokens <= _FEW_TOKENS:
        return _kept_starts(parameters, tokens, tuple(laws))
    return _starts(parameters, tokens, laws, weights)


def _starts(parameters: Parameters, tokens: int, laws: Sequence[RankRates], weights: Floats | None) -> Floats:
    levels = levels_of(parameters, tokens)
    known = ends_of_levels(parameters, laws, np.unique(levels).tolist(), weights)
    return _masses(parameters, [known[count] for count in levels.tolist()])


@lru_cache(maxsize=256)
def _kept_starts(parameters: Parameters, tokens: int, laws: tuple[RankRates, ...]) -> Floats:
    found = _starts(parameters, tokens, laws, None)
    found.flags.writeable = False
    return found


_FEW_LAWS = 8
"""Number of laws up to which the ends and the starts of rounds are kept: many costs ask for the same ones."""
_FEW_TOKENS = 2000
"""Tokens up to which the starts are kept."""


def moments(parameters: Parameters, tokens: int, law: RankLaw, price: TreePrices) -> Moments:
    """Exact moments of `walk`; over records, the moments of equally likely ones.

    >>> from model.costs.layer_times import UnitCost
    >>> choice = Parameters(10, "chain", 3)
    >>> flat = prices(choice, UnitCost(10, cost_ratio=0.0), 128)
    >>> round(moments(choice, 128, RankRates([[[0.79]] * 3]), flat).rounds, 3)  # 128 / 2.907 is 44.030
    44.446
    """
    if isinstance(law, ReplayedRanks):
        count = len(law.records)
        draws = np.broadcast_to((np.arange(count) + 0.5) / count, (tokens, count))
        return mean_of(walk(parameters, tokens, law.sample(iter([draws])), price, count))
    if not isinstance(law, RankRates):
        raise checks.ParameterError("this law of ranks has no closed form; ask for views = ['paths']")
    if law.by_sequence and law.classes > 1:
        parts = [_of_class(parameters, index, tokens, law, price) for index in range(law.classes)]
        return mixed(parts, law.weights)
    return _independent(parameters, tokens, law, price)


def _of_class(parameters: Parameters, index: int, tokens: int, law: RankRates, price: TreePrices) -> Moments:
    weights = np.zeros(law.classes)
    weights[index] = 1.0
    return _independent(parameters, tokens, RankRates(law.rates, weights), price)


def _independent(parameters: Parameters, tokens: int, law: RankRates, price: TreePrices) -> Moments:
    """Moments with independent rounds."""
    one = np.zeros(1, dtype=np.intp)
    each_cost = price._replace(time=price.time[None], busy=price.busy[None], operations=price.operations[None])
    return Moments(*(float(each[0]) for each in moments_of_pairs(parameters, tokens, [law], each_cost, one, one)))
