"""DSI on given outcomes: each rejection ends a speculation, whose costs are known from its start and its number of tokens."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from model.costs.step_costs import StepCosts
from model.methods.dsi.algorithm import Parameters
from model.methods.dsi.finite_dsi import speculation_tables
from model.methods.rounds.round_walks import Tally
from model.outcomes.outcome_laws import Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The outcome of the last position has no effect: the last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Outcomes]) -> Tally:
    """Return the tally of a block of replications, from the outcomes of the first `tokens` - 1 positions."""
    tables = speculation_tables(parameters.lookahead, parameters.verifiers, tokens, parameters.draft_costs(cost))
    verified = np.cumsum(tables.waiting, axis=1)
    start, everyone = np.zeros(BLOCK, dtype=np.int64), np.arange(BLOCK)
    time, busy, operations, rounds, offered = np.zeros((5, BLOCK))
    counts = np.zeros(parameters.lookahead + 1, dtype=np.int64)
    for position in range(tokens):
        length = position + 1 - start
        kept = next(outcomes)(np.minimum(length - 1, 255).astype(np.uint8)) if position < tokens - 1 else np.zeros(BLOCK, np.bool_)
        which = everyone[~kept]
        begun, count = start[which], length[which]
        number, place = tables.ended_by(begun, count)
        where = begun, number, place
        for total, table in ((time, tables.time), (busy, tables.busy), (operations, tables.operations)):
            total[which] += table[where]
        rounds[which] += number + 1
        offered[which] += verified[begun, number]
        # Each pass before the last accepts all its tokens; the last accepts those before the rejected one.
        full = np.maximum(number - 1, 0)
        counts[0] += np.count_nonzero(number)  # the first pass of a speculation that goes on has no waiting token
        counts[parameters.lookahead - 1] += int(full.sum())
        counts += np.bincount(count - 1 - np.where(number > 0, full * parameters.lookahead + 1, 0), minlength=len(counts))
        start[which] = position + 1
    return Tally(time, busy, operations, rounds, offered, counts[: parameters.lookahead])
