"""Means of decodings with tree drafts where times depend on the position, from the expected number of passes at each position.

Sums over positions need no price of every round from every position (`model.methods.tree.tree_rounds`).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import PassShape
from model.methods.prediction import DecodingPoints
from model.methods.rounds.round_moments import Moments
from model.methods.tree import tree_rounds
from model.methods.tree.algorithm import Parameters
from model.methods.tree.tree_rounds import RoundTimes

Floats = NDArray[np.float64]


def moments(points: DecodingPoints[Parameters]) -> tuple[Moments, NDArray[np.bool_]]:
    """Moments of `tree_rounds.walk` without the variance, which is nan; and whether unit-time equals time, by cost.

    Points have one number of tokens, and laws with as many classes each.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.costs.many_costs import joined
    >>> from model.outcomes.rank_laws import RankRates
    >>> one, law = np.zeros(1, dtype=np.intp), RankRates([[[0.79]] * 3])
    >>> choice = Parameters(10, "chain", 3)
    >>> found, alike = moments(DecodingPoints(choice, 128, [law], joined([UnitCost(10, cost_ratio=0.0)]), one, one))
    >>> found.rounds.round(3).tolist(), found.time.round(2).tolist(), alike.tolist()  # 44.446 rounds as of `tree_rounds.moments`
    ([44.446], [444.46], [True])
    """
    parameters, tokens, law, price = points.parameters, points.tokens, points.law, points.price
    rounds = RoundTimes(parameters, points.cost)
    levels = tree_rounds.levels_of(parameters, tokens)
    mass = tree_rounds.starts_of_laws(parameters, tokens, points.laws)
    starts, counts = mass.sum(axis=1), np.unique(levels).tolist()
    number = np.stack([starts[levels == each].sum(axis=0) for each in counts])  # (levels, laws)
    drafted = np.array([tree_rounds.passes_of(parameters, each).drafted for each in counts]) @ number
    read = np.array([tree_rounds.read_of(parameters, each) for each in counts]) @ number
    some = replace(points, cost=rounds.cost)
    verify = some.time_of([(rounds.verification(each), starts * (levels == each)[:, None]) for each in counts])
    drafting = number[[each > 0 for each in counts]].sum(axis=0)
    time, busy, alike = verify, verify, np.ones(len(rounds.share), dtype=np.bool_)
    if drafting.any():  # under all laws, since the first round does
        draft = some.time_of(list(_draft_passes(rounds, levels, mass).items()))
        time = draft + verify + rounds.link[price, 0] * drafting[law]
        busy, alike = draft * rounds.share[price] + verify, (rounds.share == 1) & (rounds.link[:, 0] == 0)
    worked = (starts.sum(axis=0) + drafted)[law] + read[law] * points.operations("draft")
    return Moments(time, np.full(law.size, np.nan), busy, worked, starts.sum(axis=0)[law], drafted[law]), alike


def _draft_passes(rounds: RoundTimes, levels: NDArray[np.int64], mass: Floats) -> dict[PassShape, Floats]:
    """Expected number of the draft's passes at each position, shape (positions, laws), by their shape.

    Rounds start with the probabilities `mass`, of shape (tokens, 1 + most unread, laws), and draft `levels` from each position.
    """
    parameters = rounds.parameters
    size = len(mass) if parameters.cut else len(mass) + parameters.levels  # where no draft is cut passes go beyond the last token
    found: dict[PassShape, Floats] = {}

    def add(shape: PassShape, which: NDArray[np.bool_], number: Floats, after: int) -> None:
        """Passes of some rounds, this number of positions after the round's."""
        at = np.flatnonzero(which)
        at = at[at + after >= 0]
        found.setdefault(shape, np.zeros((size, mass.shape[2])))[at + after] += number[at]

    firsts = [(each, levels == each) for each in np.unique(levels).tolist() if each]
    for more in range(mass.shape[1]):
        for count, which in firsts if parameters.drafts_in_one_pass else [(1, levels > 0)]:
            add(rounds.first_pass(count, more), which, mass[:, more], -more)
    starts = mass.sum(axis=1)
    for level, width in enumerate(tree_rounds.passes_of(parameters, int(levels[0])).widths, 1):
        add(rounds.further_pass(width), levels > level, starts, level)
    return found
