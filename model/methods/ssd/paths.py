"""SSD on given outcomes: the rank at the position where a round ends decides whether the next draft has been prepared."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from model.costs.step_costs import StepCosts
from model.methods.rounds.round_walks import Tally
from model.methods.ssd.algorithm import Parameters
from model.methods.ssd.finite_ssd import DRAFTED, EMPTY, round_tables
from model.outcomes.position_ranks import Ranks
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The outcome of the last position has no effect: the last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Ranks]) -> Tally:
    """Return the tally of a block of replications, from the ranks at the first `tokens` - 1 positions."""
    tables = round_tables(parameters, tokens, cost)
    fan_outs = np.array(parameters.fan_outs)
    first = EMPTY if tables.backup_drafts == 0 else DRAFTED
    start, state, everyone = np.zeros(BLOCK, dtype=np.int64), np.full(BLOCK, first), np.arange(BLOCK)
    missing = tables.missed_time, tables.missed_busy, tables.missed_operations
    time, busy, operations = (np.full(BLOCK, each[0]) for each in missing)
    offered, rounds = np.zeros((2, BLOCK))
    counts = np.zeros(parameters.draft_length + 1, dtype=np.int64)
    rows = (row for tile in outcomes for row in tile)
    for position in range(tokens):
        place, drafted = position - start, tables.drafted[state, start]
        last = position == tokens - 1
        rank = np.zeros(BLOCK, dtype=np.int64) if last else next(rows).astype(np.int64)
        which = everyone[(place == drafted) | (rank != 1)]
        at, accepted, whole = (state[which], start[which]), place[which], place[which] == drafted[which]
        end = int(last)
        for total, table in ((time, tables.time), (busy, tables.busy), (operations, tables.operations)):
            total[which] += table[end, *at]
        offered[which] += drafted[which]
        rounds[which] += 1
        counts += np.bincount(accepted, minlength=len(counts))
        start[which] = position + 1
        if position < tokens - 2:  # the next round may read drafted tokens
            prepared = np.where(whole, fan_outs[-1], fan_outs[np.minimum(accepted, parameters.draft_length)] + 1)
            missed = which[(rank[which] == 0) | (rank[which] > prepared)]
            state[which] = DRAFTED
            state[missed] = first
            for total, table in zip((time, busy, operations), missing, strict=True):
                total[missed] += table[position + 1]
    return Tally(time, busy, operations, rounds, offered, counts)
