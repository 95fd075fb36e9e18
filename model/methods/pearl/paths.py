"""PEARL on given outcomes: the outcome of each position decides where its round ends and in which phase the next one starts."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from model.costs.step_costs import StepCosts
from model.methods.pearl.algorithm import Parameters
from model.methods.pearl.finite_pearl import FIRST_REJECTED, KEPT, PRE, WAITING_REJECTED, round_tables
from model.methods.rounds.round_walks import Tally
from model.outcomes.outcome_laws import Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The outcome of the last position has no effect: the last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Outcomes]) -> Tally:
    """Return the tally of a block of replications, from the outcomes of the first `tokens` - 1 positions."""
    tables = round_tables(parameters.draft_length, tokens, parameters.draft_costs(cost), lockstep=parameters.lockstep)
    start, phase = np.zeros((2, BLOCK), dtype=np.int64)
    time, busy, operations, offered = np.zeros((4, BLOCK))
    counts = np.zeros(parameters.draft_length, dtype=np.int64)
    rounds, everyone = np.zeros(BLOCK), np.arange(BLOCK)
    for position in range(tokens):
        place = position - start
        last = place == tables.waiting[phase, start]
        kept = next(outcomes)(place.astype(np.uint8)) if position < tokens - 1 else np.zeros(BLOCK, dtype=np.bool_)
        which = everyone[last | ~kept]
        at = phase[which], start[which]
        end = np.where(kept[which], KEPT, np.where(last[which], FIRST_REJECTED, WAITING_REJECTED))
        for total, table in ((time, tables.time), (busy, tables.busy), (operations, tables.operations)):
            total[which] += table[end, *at]
        offered[which] += tables.waiting[at]
        rounds[which] += 1
        counts += np.bincount(place[which], minlength=len(counts))
        phase[which] = np.where(kept[which], 1 - PRE, PRE)
        start[which] = position + 1
    return Tally(time, busy, operations, rounds, offered, counts)
