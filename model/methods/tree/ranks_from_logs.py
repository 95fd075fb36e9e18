"""Rates by rank and depth from logs: how often the target's token is the draft's first, second, ... candidate.

A draft that starts at an output position offers candidates for the next token (depth 1), for the one after the accepted candidate
(depth 2), and so on, and ends where the target's token is none of them. The rate of rank r at depth i is the probability that the
target's token is candidate r, given that the draft came that far. Decodings count the drafts that they made: their commits hold
the ranks and the numbers of candidates. A position log counts drafts of the draft model that start at every position.

Where drafts had different numbers of candidates at a depth, the rate of a rank is estimated from those that had this candidate
[Kaplan1958]: the probability that the candidates before it are wrong, times the share of the tested ones that are right. So the
rates of a depth sum to at most 1.

[Kaplan1958] E. L. Kaplan, P. Meier. Nonparametric Estimation from Incomplete Observations. JASA 53(282), 1958.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.methods.speculative.rates_from_logs import EstimatedRates
from model.methods.tree.draft_trees import MAX_DEPTH, MAX_WIDTH
from model.outcomes.intervals import wilson
from model.steps import Commit

Integers = NDArray[np.int64]
DECIMALS = 4
"""Decimals of the rates that a scenario takes. They are rounded down, so that their sums stay at most 1."""


class RankCounts(NamedTuple):
    """Counted drafts, arrays of shape (depths, ranks)."""

    offered: Integers
    """Drafts that came to this depth and had a candidate of this rank there."""
    tested: Integers
    """Those of them whose candidates before it were wrong."""
    right: Integers
    """Those whose candidate of this rank is the target's token."""

    @property
    def rates(self) -> EstimatedRates:
        """Rates with Wilson's 95 % interval for independent drafts; nan where no draft had the candidate.

        >>> counted([[(1, 2), (2, 2), (0, 2), (1, 1), (0, 1)]]).rates.rate.round(12).tolist()  # 1 of 2 tested second candidates
        [[0.4, 0.3]]
        """
        share = self.right / np.maximum(self.tested, 1)
        wrong = np.cumprod(1 - share, axis=1)
        before = np.concatenate([np.ones((len(share), 1)), wrong[:, :-1]], axis=1)
        rate = np.where(self.offered > 0, share * before, np.nan)
        low, high = (np.asarray(end) for end in wilson(np.nan_to_num(rate), np.maximum(self.offered, 1)))
        low, high = (np.where(self.offered > 0, end, np.nan) for end in (low, high))
        return EstimatedRates(rate, low, high, self.offered)

    @property
    def complete(self) -> bool:
        """True if some draft came to every depth."""
        return bool((self.offered[:, 0] > 0).all())

    @property
    def rank_rates(self) -> list[list[float]]:
        """Rates by depth and rank as a scenario takes them, without candidates that no draft had.

        >>> counted([[(1, 2), (2, 2), (0, 2)], [(1, 1), (0, 1)]]).rank_rates
        [[0.3333, 0.3333], [0.5]]
        """
        found = np.floor(self.rates.rate * 10**DECIMALS + 1e-9) / 10**DECIMALS
        return [row[: int((tried > 0).sum())].tolist() for row, tried in zip(found, self.offered, strict=True)]


def counted(by_depth: Sequence[Iterable[tuple[int, int]]]) -> RankCounts:
    """Count drafts from their ranks and numbers of candidates at each depth."""
    pairs = [np.array([*each], dtype=np.int64).reshape(-1, 2) for each in by_depth]
    width = max((int(each[:, 1].max()) for each in pairs if len(each)), default=0)
    if not width:
        raise ParameterError("records must have at least one draft with candidates, got none")
    rank = np.arange(1, width + 1)
    offered, tested, right = np.zeros((3, len(pairs), width), dtype=np.int64)
    for depth, each in enumerate(pairs):
        own, candidates = each[:, :1], each[:, 1:]
        has = candidates >= rank
        offered[depth] = has.sum(axis=0)
        tested[depth] = (has & ((own == 0) | (own >= rank))).sum(axis=0)
        right[depth] = (own == rank).sum(axis=0)
    return RankCounts(offered, tested, right)


def of_commits(commits: Iterable[Commit]) -> RankCounts:
    """Counts of the drafts that decodings made. Refuses commits without ranks.

    >>> commit = Commit("round", (5, 6), 4, ranks=(2, 0), candidates=(3, 1))
    >>> of_commits([commit, Commit("round", (7,), 3, ranks=(0,), candidates=(3,))]).rank_rates
    [[0.0, 0.5, 0.0], [0.0]]
    """
    rounds = [commit for commit in commits if commit.drafted]
    if any(not commit.ranks for commit in rounds):
        raise ParameterError(
            "commits must hold the ranks of their tokens among the draft's candidates, and this record has none; decode with method"
            " tree, and log it again"
        )
    return counted([*_by_depth(zip(each.ranks, each.candidates, strict=True) for each in rounds)])


def _by_depth(drafts: Iterable[Iterable[tuple[int, int]]]) -> Iterator[list[tuple[int, int]]]:
    """Ranks and numbers of candidates at each depth, over drafts that had candidates there."""
    found: list[list[tuple[int, int]]] = []
    for draft in drafts:
        for depth, (rank, candidates) in enumerate(draft):
            if candidates:
                if depth == len(found):
                    found.append([])
                found[depth].append((rank, candidates))
    yield from found


def windows(ranks: ArrayLike, depth: int) -> Integers:
    """Ranks at depths 1 to `depth` of drafts that start at each position, shape (positions, depth); 0 after the end.

    `ranks` are those of one sequence by output position: a draft model reads the target's own tokens at every depth.

    >>> windows([1, 3, 2], 2).tolist()
    [[1, 3], [3, 2], [2, 0]]
    """
    own = checks.whole_array("ranks", ranks, 0).astype(np.int64)
    checks.whole("depth", depth, 1, MAX_DEPTH)
    padded = np.concatenate([own, np.zeros(depth, np.int64)])
    return np.stack([padded[at : at + own.size] for at in range(depth)], axis=1)


def of_positions(records: Sequence[ArrayLike], depth: int, width: int) -> RankCounts:
    """Counts of drafts of `width` candidates that start at every position of these sequences, by output position.

    >>> of_positions([[1, 3, 2]], 2, 2).rank_rates  # the second draft ends at depth 1: 3 is none of two candidates
    [[0.3333, 0.3333], [0.0, 0.0]]
    """
    checks.whole("width", width, 1, MAX_WIDTH)
    found: list[list[tuple[int, int]]] = [[] for _ in range(depth)]
    for record in records:
        rows = windows(record, depth)
        alive = np.ones(len(rows), dtype=np.bool_)
        for at in range(depth):
            alive[len(rows) - at :] = False  # the sequence has no such position
            own = np.where(rows[:, at] <= width, rows[:, at], 0)
            found[at] += [(rank, width) for rank in own[alive].tolist()]
            alive &= own > 0
    return counted(found)
