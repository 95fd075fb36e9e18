"""Draft trees: listed, chains, full trees, optimal trees (Sequoia), and trees that grow by confidence (EAGLE-2).

The root is the last token of the text. Node i follows node `parents[i]`, or the root if that is -1. Nodes are in breadth-first
order, so that the numbers of their parents never fall. The first child of a node is the draft's first candidate there, the second
child its second: the rank of a node is its place among its siblings, from 1.

A rank rate is the probability that the target's token has this rank among the draft's candidates, given that the text before it
is right: `rates[i][r]` for rank r + 1 at depth i + 1. A node is right with the product of the rates on its path, and the expected
number of accepted tokens is the sum of these products over all nodes: F(T) in Section 3.1 of [Chen2024].

[Chen2024] Z. Chen et al. Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding. arXiv:2402.12374.
[Li2024b] Y. Li et al. EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees. arXiv:2406.16858.
"""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks

Floats = NDArray[np.float64]
Rates = tuple[tuple[float, ...], ...]
"""Rank rates: a row for each depth, a column for each rank."""

MAX_NODES = 4096
"""Largest number of nodes of a tree."""
MAX_DEPTH = 64
"""Largest depth of a tree."""
MAX_WIDTH = 256
"""Largest number of children of a node."""
ROOT = -1
"""Number of the root as a parent."""


@dataclass(frozen=True)
class DraftTree:
    """A draft tree.

    Parameters
    ----------
    parents
        Parent of each node, in breadth-first order.
    read
        Numbers of the nodes that the draft reads, in order; None: the nodes with children. A tree by confidence is drafted further
        than it is verified, so that nodes without children are read too.
    read_widths
        Nodes that the draft reads at depth 1, 2, ..., also those that are not verified; None: the nodes with children.

    >>> tree = DraftTree((-1, -1, 0, 0, 1))
    >>> tree.depths, tree.ranks, tree.widths
    ((1, 1, 2, 2, 2), (1, 2, 1, 2, 1), (2, 3))
    """

    parents: tuple[int, ...]
    read: tuple[int, ...] | None = None
    read_widths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        given: Any = self.parents
        if not isinstance(given, tuple) or not 1 <= len(given) <= MAX_NODES:
            raise checks.ParameterError(
                f"parents must be a list of the parents of 1 to {MAX_NODES} nodes, got {checks.shown(given)}"
            )
        last = ROOT
        for index, parent in enumerate(given):
            if isinstance(parent, bool) or not isinstance(parent, int):
                raise checks.ParameterError(f"parents[{index}] must be a whole number, got {checks.shown(parent)}")
            if not ROOT <= parent < index:
                cycle = "is a cycle" if index <= parent < len(given) else "is no node"
                raise checks.ParameterError(
                    f"parents[{index}] must be between -1 (the root) and {index - 1}, got {parent}: that {cycle}; list each node"
                    " after its parent"
                )
            if parent < last:
                raise checks.ParameterError(
                    f"parents[{index}] must be at least parents[{index - 1}]={last}, got {parent}: nodes are in breadth-first"
                    " order; list the children of node 0, then those of node 1, and so on"
                )
            last = parent
        if self.depth > MAX_DEPTH:
            raise checks.ParameterError(f"the depth of parents must be at most {MAX_DEPTH}, got {self.depth}")
        if self.width > MAX_WIDTH:
            raise checks.ParameterError(f"a node of parents must have at most {MAX_WIDTH} children, got {self.width}")

    @property
    def nodes(self) -> int:
        """Number of nodes, without the root."""
        return len(self.parents)

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of each node; those of the root's children is 1."""
        found: list[int] = []
        for parent in self.parents:
            found.append(1 if parent == ROOT else found[parent] + 1)
        return tuple(found)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of each node among its siblings, from 1."""
        found: list[int] = []
        for index, parent in enumerate(self.parents):
            found.append(found[-1] + 1 if index and self.parents[index - 1] == parent else 1)
        return tuple(found)

    @cached_property
    def children(self) -> dict[int, tuple[int, ...]]:
        """Children of each node that has some, the root's under `ROOT`."""
        found: dict[int, list[int]] = {}
        for index, parent in enumerate(self.parents):
            found.setdefault(parent, []).append(index)
        return {parent: tuple(each) for parent, each in found.items()}

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Index of each node among those of its depth."""
        return tuple(node - self.nodes_to[depth - 1] for node, depth in enumerate(self.depths))

    @cached_property
    def parents_in_pass(self) -> tuple[int, ...]:
        """Index of the parent of each node in a pass over the root and all nodes."""
        return tuple(parent - ROOT for parent in self.parents)

    @property
    def depth(self) -> int:
        """Depth of the deepest node."""
        return self.depths[-1]

    @property
    def width(self) -> int:
        """Largest number of children of a node."""
        return max(self.ranks)

    @property
    def is_chain(self) -> bool:
        """True if no node has two children."""
        return self.depth == self.nodes

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Number of nodes at depth 1, 2, ..."""
        return tuple(np.bincount(self.depths)[1:].tolist())

    @cached_property
    def nodes_to(self) -> tuple[int, ...]:
        """Number of nodes of the tree cut at depth 0, 1, ..."""
        return tuple(np.cumsum([0, *self.widths]).tolist())

    @cached_property
    def passed(self) -> frozenset[int]:
        """Nodes that the draft reads, in passes after the first one of a round."""
        return frozenset(parent for parent in self.children if parent != ROOT) if self.read is None else frozenset(self.read)

    @cached_property
    def draft_widths(self) -> tuple[int, ...]:
        """Tokens of the draft's passes after the first of a round: nodes that it reads at depth 1, 2, ..."""
        if self.read_widths is not None:
            return self.read_widths
        counts = np.bincount([self.depths[node] for node in self.passed], minlength=self.depth + 1)
        return tuple(counts[1 : self.depth].tolist())

    def cut(self, depth: int) -> DraftTree:
        """Tree without the nodes below a depth of at least 1.

        >>> DraftTree((-1, -1, 0)).cut(1).parents
        (-1, -1)
        """
        return self if depth >= self.depth else _with_parents(self.parents[: self.nodes_to[depth]])

    def limited(self, most: Mapping[int, int]) -> DraftTree:
        """Tree in which these nodes, `ROOT` for the root, have at most this number of children.

        >>> DraftTree((-1, -1, 0, 1)).limited({ROOT: 1}).parents
        (-1, 0)
        """
        number, parents = {ROOT: ROOT}, list[int]()
        for node, (parent, rank) in enumerate(zip(self.parents, self.ranks, strict=True)):
            if parent in number and rank <= most.get(parent, rank):
                number[node] = len(parents)
                parents.append(number[parent])
        return DraftTree(tuple(parents))

    def chances(self, rates: Sequence[Sequence[float]]) -> Floats:
        """Probability that each node is right, with these rank rates.

        >>> DraftTree((-1, -1, 0)).chances([[0.6, 0.2], [0.5]]).tolist()
        [0.6, 0.2, 0.3]
        """
        require_rates("rates", rates, self.depth, self.widest_by_depth)
        return self.reached([np.array(row) for row in rates])[1:]

    def reached(self, rates: Sequence[Floats]) -> Floats:
        """Probability that the root (1) and each node are right; rates by depth are arrays (..., ranks), so is the result.

        >>> DraftTree((-1, -1, 0)).reached([np.array([[0.6, 0.2], [0.4, 0.1]]), np.array([[0.5], [1.0]])]).tolist()
        [[1.0, 0.6, 0.2, 0.3], [1.0, 0.4, 0.1, 0.4]]
        """
        found = np.ones((*rates[0].shape[:-1], 1 + self.nodes))
        parents, ranks = np.array(self.parents) - ROOT, np.array(self.ranks) - 1
        for begin, end, row in zip(self.nodes_to, self.nodes_to[1:], rates, strict=False):
            found[..., 1 + begin : 1 + end] = found[..., parents[begin:end]] * row[..., ranks[begin:end]]
        return found

    @cached_property
    def widest_by_depth(self) -> tuple[int, ...]:
        """Largest rank at depth 1, 2, ..."""
        found = [0] * self.depth
        for depth, rank in zip(self.depths, self.ranks, strict=True):
            found[depth - 1] = max(found[depth - 1], rank)
        return tuple(found)

    def survival(self, rates: Sequence[Sequence[float]]) -> Floats:
        """Probability that at least 1, 2, ... tokens of a draft are accepted.

        >>> DraftTree((-1, -1, 0)).survival([[0.6, 0.2], [0.5]]).round(12).tolist()
        [0.8, 0.3]
        """
        return np.asarray(np.bincount(np.array(self.depths) - 1, weights=self.chances(rates)), dtype=np.float64)

    def accepted_tokens(self, rates: Sequence[Sequence[float]]) -> float:
        """Expected accepted tokens of a round, without the target's own token.

        >>> round(DraftTree((-1, -1, 0)).accepted_tokens([[0.6, 0.2], [0.5]]), 12)
        1.1
        """
        return float(self.chances(rates).sum())


@functools.lru_cache(maxsize=4096)  # trees of a sweep have the same first levels, and each is cut in every round near the end
def _with_parents(parents: tuple[int, ...]) -> DraftTree:
    return DraftTree(parents)


def by_depth(rates: Any, depth: int) -> Any:
    """Rank rates by depth; a single row of rates holds at every depth. Anything else is returned unchanged.

    >>> by_depth((0.6, 0.2), 2)
    ((0.6, 0.2), (0.6, 0.2))
    """
    one = isinstance(rates, tuple | list) and rates and not any(isinstance(each, tuple | list) for each in rates)
    return (rates,) * max(depth, 1) if one else rates


def require_rates(name: str, rates: Any, depth: int = 1, widths: Sequence[int] = ()) -> None:
    """Raise `ParameterError` unless these are rank rates, for at least this depth and number of ranks at each depth.

    >>> require_rates("rates", ((0.8, 0.3),))
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: rates[0] must sum to at most 1, got 1.1: ranks exclude each other; ...
    """
    if not isinstance(rates, tuple | list) or not rates:
        raise checks.ParameterError(
            f"{name} must be a list with the rates of all ranks for each depth of the tree, got {checks.shown(rates)}"
        )
    if len(rates) < depth:
        raise checks.ParameterError(
            f"{name} must have the rates of all ranks for each of {depth} depths, got {len(rates)}; give more, or draft less deep"
        )
    for index, row in enumerate(rates):
        if index and row is rates[index - 1]:  # one row for several depths
            continue
        if not isinstance(row, tuple | list) or not 1 <= len(row) <= MAX_WIDTH:
            raise checks.ParameterError(
                f"{name}[{index}] must be a list of the rates of 1 to {MAX_WIDTH} ranks, got {checks.shown(row)}"
            )
        for rank, rate in enumerate(row):
            checks.number(f"{name}[{index}][{rank}]", rate, 0, 1)
        if sum(row) > 1 + 1e-9:
            raise checks.ParameterError(
                f"{name}[{index}] must sum to at most 1, got {sum(row):g}: ranks exclude each other; give the probability of each"
            )
    for index, width in enumerate(widths):
        if len(rates[index]) < width:
            raise checks.ParameterError(
                f"{name}[{index}] must have a rate for each of {width} ranks, got {len(rates[index])}; give more, or draft fewer"
                " candidates"
            )


# --- Shapes -------------------------------------------------------------------------------------------------------------


def chain(depth: int) -> DraftTree:
    """Chain of `depth` nodes: the draft of speculative decoding.

    >>> chain(3).parents
    (-1, 0, 1)
    """
    return DraftTree(tuple(range(-1, depth - 1)))


def full(width: int, depth: int) -> DraftTree:
    """Tree in which every node above `depth` has `width` children.

    >>> full(2, 2).parents
    (-1, -1, 0, 0, 1, 1)
    """
    size = sum(width**level for level in range(1, depth + 1))
    if size > MAX_NODES:
        raise checks.ParameterError(
            f"a full tree must have at most {MAX_NODES} nodes, got {size} with width={width} and depth={depth}; draft fewer"
        )
    return DraftTree(tuple(node // width - 1 for node in range(size)))


def of_paths(paths: Sequence[tuple[int, ...]]) -> DraftTree:
    """Tree with these nodes, each as the ranks on its path from the root; their order does not matter.

    >>> of_paths([(1, 1), (2,), (1,)]).parents
    (-1, -1, 0)
    """
    ordered = sorted(paths, key=lambda path: (len(path), path))
    number = {path: index for index, path in enumerate(ordered)} | {(): ROOT}
    return DraftTree(tuple(number[path[:-1]] for path in ordered))


def paths_of(tree: DraftTree) -> list[tuple[int, ...]]:
    """Ranks on the path from the root to each node.

    >>> paths_of(DraftTree((-1, -1, 0)))
    [(1,), (2,), (1, 1)]
    """
    found: list[tuple[int, ...]] = []
    for parent, rank in zip(tree.parents, tree.ranks, strict=True):
        found.append((*(() if parent == ROOT else found[parent]), rank))
    return found


class OptimalTrees:
    """Trees with the largest expected number of accepted tokens, for each number of nodes up to `nodes`, by dynamic programming.

    Section 3.1 and Algorithm 1 of [Chen2024], with rates that may depend on the depth. Ranks are used in order: a second child
    needs a first one, also where the second is likelier. Nodes that are never right are left out.

    Parameters
    ----------
    rates
        Rank rates, for at least `depth` depths.
    nodes, depth, width
        Largest number of nodes, depth, and number of children of a node (default: all ranks that have rates).

    >>> trees = OptimalTrees([[0.6, 0.3], [0.6, 0.3]], nodes=3, depth=2)
    >>> trees.accepted.round(12).tolist(), trees.tree(3).parents  # 0.6, + 0.36, + 0.3
    ([0.0, 0.6, 0.96, 1.26], (-1, -1, 0))
    """

    def __init__(self, rates: Sequence[Sequence[float]], nodes: int, depth: int, width: int | None = None) -> None:
        require_rates("rates", rates, depth)
        checks.whole("nodes", nodes, 1, MAX_NODES)
        checks.whole("depth", depth, 1, MAX_DEPTH)
        self.ranks = [len(row) if width is None else min(len(row), width) for row in rates[:depth]]
        sizes = np.arange(nodes + 1)
        remaining = sizes[:, None] - sizes
        # rest[m]: most accepted tokens below a right node at `level` with m nodes, if only ranks from `rank` on may be used.
        self._share: list[list[NDArray[np.intp]]] = [[] for _ in range(depth)]
        below = np.zeros(nodes + 1)
        for level in reversed(range(depth)):
            child = np.concatenate([[0.0], 1.0 + below[:-1]])  # value of a right child whose subtree has m nodes
            rest = np.zeros(nodes + 1)
            for rank in reversed(range(self.ranks[level])):
                values = np.where(remaining >= 0, rates[level][rank] * child + rest[np.maximum(remaining, 0)], -1.0)
                values[:, 0] = 0.0  # without this child there is no later one
                # The smallest subtree in a tie, up to rounding: nodes without value are left out.
                chosen = (values > values.max(axis=1, keepdims=True) - 1e-15).argmax(axis=1)
                self._share[level].insert(0, chosen)
                rest = values[sizes, chosen]
            below = rest
        self.accepted: Floats = below
        """Expected accepted tokens, by the number of nodes; the first entry is 0."""

    def tree(self, nodes: int) -> DraftTree:
        """The tree of at most this number of nodes; a single node where none is ever right."""
        paths: list[tuple[int, ...]] = []
        waiting: list[tuple[tuple[int, ...], int]] = [((), nodes)]
        while waiting:
            path, size = waiting.pop()
            for rank in range(self.ranks[len(path)] if len(path) < len(self.ranks) else 0):
                own = int(self._share[len(path)][rank][size])
                if not own:
                    break
                paths.append((*path, rank + 1))
                waiting.append((paths[-1], own - 1))
                size -= own
        return of_paths(paths or [(1,)])


def optimal(rates: Sequence[Sequence[float]], nodes: int, depth: int, width: int | None = None) -> DraftTree:
    """Tree of at most `nodes` nodes with the largest expected number of accepted tokens; see `OptimalTrees`.

    >>> optimal([[0.6, 0.3], [0.6, 0.3]], nodes=4, depth=2).parents  # .6 + .36 + .3 + .3 * .6
    (-1, -1, 0, 1)
    """
    require_rates("rates", rates, depth)
    checks.whole("nodes", nodes, 1, MAX_NODES)
    return _optimal(tuple(tuple(map(float, row)) for row in rates[:depth]), nodes, depth, width)


@functools.lru_cache(maxsize=1024)  # points of a sweep share trees
def _optimal(rates: tuple[tuple[float, ...], ...], nodes: int, depth: int, width: int | None) -> DraftTree:
    return _optimal_trees(rates, -(-nodes // _NODES) * _NODES, depth, width).tree(nodes)


@functools.lru_cache(maxsize=64)  # each has the trees of fewer nodes too
def _optimal_trees(rates: tuple[tuple[float, ...], ...], nodes: int, depth: int, width: int | None) -> OptimalTrees:
    return OptimalTrees(rates, nodes, depth, width)


_NODES = 64
"""Optimal trees of up to this number of nodes, or a multiple of it, are computed together; divides `MAX_NODES`."""


def require_falling(name: str, rates: Sequence[Sequence[float]]) -> None:
    """Raise `ParameterError` if a rate rises with the rank: candidates are in the order of the draft's confidence."""
    for depth, row in enumerate(rates):
        for rank in range(1, len(row)):
            if row[rank] > row[rank - 1]:
                raise checks.ParameterError(
                    f"{name}[{depth}][{rank}] must be at most {name}[{depth}][{rank - 1}]={row[rank - 1]:g}, got {row[rank]:g}: the"
                    " draft's candidates are in the order of its confidence; sort them"
                )


def confident(rates: Sequence[Sequence[float]], nodes: int, depth: int, width: int) -> DraftTree:
    """Tree that grows by confidence, where the draft's confidences are these rates: Section 4 of [Li2024b].

    At each depth the draft reads the `width` likeliest nodes (the product of the confidences on their paths), each of which gets
    `width` children; then the `nodes` likeliest of all nodes are verified. Of equally likely nodes, the ones nearer to the root and
    then those found first are taken.

    >>> confident([[0.6, 0.3], [0.6, 0.3]], nodes=3, depth=2, width=2).parents
    (-1, -1, 0)
    """
    require_rates("rates", rates, depth, (width,) * depth)
    require_falling("rates", rates)
    level: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    found: list[tuple[float, tuple[int, ...]]] = []
    read: list[list[tuple[int, ...]]] = []
    for row in rates[:depth]:
        confidences = [log_of(rate) for rate in row[:width]]
        grown = [(score + more, (*path, rank)) for score, path in level for rank, more in enumerate(confidences, 1)]
        found += grown
        level = likeliest(grown, width)
        read.append([path for _, path in level])
    tree = of_paths([path for _, path in likeliest(found, nodes)])
    number = {path: index for index, path in enumerate(paths_of(tree))}
    kept = sorted(number[path] for each in read[:-1] for path in each if path in number)
    return DraftTree(tree.parents, tuple(kept), tuple(len(each) for each in read[:-1]))


def log_of(rate: float) -> float:
    """Logarithm of a rate; minus infinity of 0."""
    return math.log(rate) if rate else -math.inf


def likeliest(scored: Sequence[tuple[float, Any]], count: int) -> list[tuple[float, Any]]:
    """The `count` entries with the largest first values, in their order; of equal ones the first.

    >>> likeliest([(0.2, "a"), (0.5, "b"), (0.2, "c")], 2)
    [(0.2, 'a'), (0.5, 'b')]
    """
    best = heapq.nsmallest(count, range(len(scored)), key=lambda index: (-scored[index][0], index))
    return [scored[index] for index in sorted(best)]
