"""Tree drafts of a server's requests, as arrays of outcomes: the twin of their generators (`model.methods.tree`).

A tree drafts in levels, and the policy allows a number of tokens: as many levels are drafted as have no more nodes. All nodes take
a position of the cache and of the verification; those that are not accepted give it back. The outcome of a draft is the node where
it ends (0: the root), as `model.methods.tree.tree_rounds.Endings` numbers them; a draft of fewer levels ends there or above.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from model.methods.tree.algorithm import Parameters
from model.methods.tree.tree_rounds import Endings
from model.outcomes.rank_laws import RankLaw
from model.serving.decodings import Arrays, Drafter
from model.serving.request_outcomes import RequestOutcomes
from model.serving.server import Sequences, StepDrafts

Integers = NDArray[np.int64]


class ServedTree:
    """A tree of fixed shape, as a server drafts it.

    >>> tree = ServedTree(Parameters(1, "full", 2, 2))
    >>> tree.sizes.tolist(), tree.reads, tree.levels(np.array([0, 1, 2, 5, 6])).tolist(), tree.ranks(5)
    ([0, 2, 6], (1, 2), [0, 0, 1, 1, 2], [2, 1])
    """

    def __init__(self, parameters: Parameters) -> None:
        (self.tree,) = parameters.trees
        self.endings = Endings(self.tree, reads_states=parameters.reads_states)
        self.sizes: Integers = np.array(parameters.sizes, dtype=np.int64)
        """Nodes of a draft, by its levels."""
        self.reads: tuple[int, ...] = (1,) if parameters.drafts_in_one_pass else (1, *self.tree.draft_widths)
        """Tokens of a sequence in each pass of the draft."""

    @cached_property
    def accepted(self) -> Integers:
        """Accepted tokens of a draft, by the node where it ends."""
        return self.endings.accepted

    def levels(self, limits: Integers) -> Integers:
        """Levels of drafts with at most `limits` tokens."""
        return np.asarray(np.searchsorted(self.sizes, limits, side="right") - 1)

    def ranks(self, ending: int) -> list[int]:
        """Ranks of the target's tokens by depth, of a draft that ends at this node: 0 after it."""
        found, node = list[int](), ending - 1
        while node >= 0:
            found.append(self.tree.ranks[node])
            node = self.tree.parents[node]
        return [*found[::-1], *[0] * (self.tree.depth - len(found))]


class TreeOutcomes:
    """Law of the nodes where drafts end, from a law of ranks; drawn as accepted tokens are (`RequestOutcomes`)."""

    def __init__(self, tree: ServedTree, law: RankLaw) -> None:
        self.tree, self.law = tree, law

    def survivors(self, draws: Iterator[NDArray[np.float64]], longest: int) -> Integers:
        """Nodes where drafts from each position end, shape (positions, replications); `longest` has no effect."""
        return np.concatenate([self.tree.endings.of_ranks(tile[:, 1:]) for tile in self.law.sample(draws)])


class TreeArrays(Arrays):
    """Decodings with tree drafts, whose outcomes are nodes."""

    def __init__(self, outcomes: RequestOutcomes, most: int, tree: ServedTree, drafter: Drafter) -> None:
        super().__init__(outcomes, most, drafter)
        self.tree = tree

    def draft(self, each: Sequences, limits: Integers) -> StepDrafts:
        """See `model.serving.server.Decodings`; a pass of the draft over several nodes of a sequence counts each of them."""
        if not each.rows.size:
            return StepDrafts(limits, [])
        tree, levels = self.tree, self.tree.levels(limits)
        self._kept = np.minimum(tree.accepted[self._table[each.rows, each.done]], levels)
        passes = []
        for number, tokens in enumerate(tree.reads):
            count = limits.size if not number and self.drafter.keeps_up else int(np.count_nonzero(levels > number))
            if count:
                passes.append(count * tokens)
        return self._by_the_draft(tree.sizes[levels], passes)

    def ahead(self, each: Sequences, longest: int) -> Integers:
        """See `model.serving.server.Decodings`."""
        return np.minimum(self.tree.accepted[self._table[each.rows, each.done]], longest)
