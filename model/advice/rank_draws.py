"""What is known of the ranks of the target's token among a draft's candidates, as draws of rates by depth and rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from model.advice.acceptance_draws import DRAWS, MOST_POSITIONS, AcceptanceDraws
from model.base import checks
from model.base.checks import ParameterError
from model.outcomes import random_streams

RankTable = tuple[tuple[float, ...], ...]
"""Rates by depth, and by rank."""
MOST_RANKS = 64
"""Largest number of candidates at a depth."""


@dataclass(frozen=True)
class RankDraws:
    """Rank rates.

    Parameters
    ----------
    point
        Rates that are most likely: `point[i][r]` that the target's token at depth i + 1 is candidate r + 1, if the tokens before
        are right.
    draws
        Draws of what is known of them; one or more tables.
    text
        The rates as printed text.
    limit
        Depth up to which they are known; None: any.
    """

    point: RankTable
    draws: tuple[RankTable, ...]
    text: str
    limit: int | None = None

    def of_first(self, source: str) -> AcceptanceDraws:
        """Acceptance of a chain of first candidates, which each rate of rank 1 is by definition.

        >>> of_rates([[0.6, 0.2], [0.5]]).of_first("--rank-rates").point.tolist()
        [0.6, 0.5]
        """
        point, draws = np.array([row[0] for row in self.point]), np.array([[row[0] for row in table] for table in self.draws])
        return AcceptanceDraws(point, draws, "assumed", source, f"first candidates of {self.text}", self.limit)


def of_rates(rates: Sequence[Sequence[float]], drafts: int | None = None, *, seed: int = 0) -> RankDraws:
    """Rank rates with the sampling error of the number of drafts that they were counted in; None: without error.

    A single row of rates holds at every depth. At depth i those drafts count that are right down to it; the rates of a depth have
    the Dirichlet distribution of their counts, with 1/2 added to each.

    >>> found = of_rates([[0.6, 0.2]], drafts=400)
    >>> len(found.point), len(found.draws), bool(abs(np.mean([table[3][0] for table in found.draws]) - 0.6) < 0.01)
    (64, 256, True)
    """
    if not rates or len(rates) > MOST_POSITIONS:
        raise ParameterError(f"rank_rates must have 1 to {MOST_POSITIONS} depths, got {len(rates)}")
    for depth, row in enumerate(rates):
        values = checks.array(f"rank_rates[{depth}]", row, 0, 1)
        if not 1 <= values.size <= MOST_RANKS:
            raise ParameterError(f"rank_rates[{depth}] must have 1 to {MOST_RANKS} rates, one for each rank, got {values.size}")
        if values.sum() > 1 + 1e-9:
            raise ParameterError(
                f"rank_rates[{depth}] must sum to at most 1, got {values.sum():g}: ranks exclude each other; give the probability"
                " of each rank, not of all up to it"
            )
    point: RankTable = tuple(tuple(float(each) for each in row) for row in rates)
    tables: list[RankTable] = [point]
    if drafts is not None:
        checks.whole("rank_drafts", drafts, 1, checks.MAX_TOKENS)
        tables = _drawn(point, drafts, seed)
    one = len(point) == 1
    shown = " / ".join(", ".join(f"{each:.3g}" for each in row[:6]) + (", ..." if len(row) > 6 else "") for row in point[:3])
    text = shown + (" / ..." if len(point) > 3 else "") + (" by rank, at every depth" if one else " by rank, at depth 1 / 2 / ...")
    if one:
        point, tables = point * MOST_POSITIONS, [table * MOST_POSITIONS for table in tables]
    return RankDraws(point, tuple(tables), text, None if one else len(point))


def _drawn(point: RankTable, drafts: int, seed: int) -> list[RankTable]:
    random, reached = random_streams.stream(seed, "rank rates", 0), float(drafts)
    columns = []
    for row in point:
        rest = max(1 - sum(row), 0.0)
        found = random.dirichlet(np.array([*row, rest]) * reached + 0.5, size=DRAWS)[:, :-1]
        columns.append([tuple(each) for each in found.tolist()])
        reached *= sum(row)
    return [tuple(column[at] for column in columns) for at in range(DRAWS)]
