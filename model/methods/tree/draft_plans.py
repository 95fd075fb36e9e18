"""Plans of draft trees of a fixed shape: what is read and run at each depth. Made once for a shape, followed in every round."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from model.methods.tree.draft_trees import ROOT, DraftTree


class LevelPlan(NamedTuple):
    """Reads of the candidates at one depth, and the pass of the draft over those of them that have children."""

    reads: tuple[tuple[int, int], ...]
    """Offset in the output of the pass before, and number of candidates, of each of its nodes."""
    nodes: tuple[int, ...]
    """Nodes of the pass; none at the last depth."""
    parents: tuple[int, ...]
    """Index of each one's parent in the pass before; 0 where that is the root."""
    tree: tuple[int, ...]
    """`Forward.tree` of the pass."""


class DraftPlan(NamedTuple):
    """How a tree is drafted by one pass for each depth, over the nodes that have children."""

    tree: DraftTree
    levels: tuple[LevelPlan, ...]
    offsets: tuple[int, ...]
    """Offset of each node in the output that it is read from."""
    places: tuple[int | None, ...]
    """Index of each node in the pass that reads it; None without children."""

    def read_at(self, level: int) -> tuple[int, ...]:
        """Nodes whose children are read after `level` passes over nodes."""
        return self.levels[level - 1].nodes if level else (ROOT,)


@lru_cache(maxsize=1024)
def draft_plan(tree: DraftTree) -> DraftPlan:
    """Plan of a tree.

    >>> plan = draft_plan(DraftTree((-1, -1, 0, 1, 1)))
    >>> plan.levels[0]
    LevelPlan(reads=((-1, 2),), nodes=(0, 1), parents=(0, 0), tree=(-1, -1))
    >>> plan.levels[1], plan.offsets, plan.places
    (LevelPlan(reads=((-2, 1), (-1, 2)), nodes=(), parents=(), tree=()), (-1, -1, -2, -1, -1), (0, 1, None, None, None))
    """
    levels, places, offsets = list[LevelPlan](), {ROOT: 0}, dict[int, int]()
    read: tuple[int, ...] = (ROOT,)
    while read:
        reads = []
        for offset, node in enumerate(read, -len(read)):
            reads.append((offset, len(tree.children[node])))
            offsets |= dict.fromkeys(tree.children[node], offset)
        nodes = tuple(child for node in read for child in tree.children[node] if child in tree.children)
        parents = tuple(places[tree.parents[node]] for node in nodes)
        places |= {node: place for place, node in enumerate(nodes)}
        levels.append(LevelPlan(tuple(reads), nodes, parents, tuple(-1 - parent for parent in parents)))
        read = nodes
    of_nodes = range(tree.nodes)
    return DraftPlan(tree, tuple(levels), tuple(map(offsets.__getitem__, of_nodes)), tuple(map(places.get, of_nodes)))
