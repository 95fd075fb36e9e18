"""Plans of draft trees of a fixed shape: what is read and run at each depth. Made once for a shape, followed in every round."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from model.methods.tree.draft_trees import ROOT, DraftTree
from model.steps import TreeLevel


class DraftPlan(NamedTuple):
    """How a tree is drafted by one pass for each depth, over the nodes that have children."""

    tree: DraftTree
    levels: tuple[TreeLevel, ...]
    offsets: tuple[int, ...]
    """Offset of each node in the output that it is read from."""
    places: tuple[int | None, ...]
    """Index of each node in the pass that reads it; None without children."""

    def read_at(self, level: int) -> tuple[int, ...]:
        """Nodes whose children are read after `level` passes over nodes."""
        return self.levels[level - 1].nodes if level else (ROOT,)


@lru_cache(maxsize=1024)
def draft_plan(tree: DraftTree, several_hypotheses: bool) -> DraftPlan:
    """Plan of a tree, whose passes follow several hypotheses or only one, as those of a chain do.

    >>> plan = draft_plan(DraftTree((-1, -1, 0, 1, 1)), True)
    >>> plan.levels[0]
    TreeLevel(reads=((-1, 2),), nodes=(0, 1), parents=(0, 0), tree=(-1, -1))
    >>> plan.levels[1], plan.offsets, plan.places
    (TreeLevel(reads=((-2, 1), (-1, 2)), nodes=(), parents=(), tree=()), (-1, -1, -2, -1, -1), (0, 1, None, None, None))
    """
    levels, places, offsets = list[TreeLevel](), {ROOT: 0}, dict[int, int]()
    read: tuple[int, ...] = (ROOT,)
    while read:
        reads = []
        for offset, node in enumerate(read, -len(read)):
            reads.append((offset, len(tree.children[node])))
            offsets |= dict.fromkeys(tree.children[node], offset)
        nodes = tuple(child for node in read for child in tree.children[node] if child in tree.children)
        parents = tuple(places[tree.parents[node]] for node in nodes)
        places |= {node: place for place, node in enumerate(nodes)}
        follows = tuple(-1 - parent for parent in parents) if several_hypotheses else ()
        levels.append(TreeLevel(tuple(reads), nodes, parents, follows))
        read = nodes
    of_nodes = range(tree.nodes)
    return DraftPlan(tree, tuple(levels), tuple(map(offsets.__getitem__, of_nodes)), tuple(map(places.get, of_nodes)))
