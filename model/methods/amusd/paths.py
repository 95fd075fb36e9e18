"""AMUSD on given outcomes: the outcome of each position says whether the drafted token there is right, hence where drafts end."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from model.costs.step_costs import StepCosts
from model.methods.amusd.algorithm import Parameters
from model.methods.amusd.draft_clock import ConcurrentTimes, DraftClock
from model.methods.rounds.round_walks import Tally
from model.outcomes.outcome_laws import Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The outcome of the last position has no effect: the last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Outcomes]) -> Tally:
    """Return the tally of a block of replications, from the outcomes of the first `tokens` - 1 positions."""
    start = np.zeros(BLOCK, dtype=np.int64)
    prices = ConcurrentTimes.of(parameters, tokens, cost)
    clock, ahead = DraftClock(parameters, prices, start), _accepted_ahead(tokens, outcomes)
    rounds, offered, verifying = np.zeros((3, BLOCK))
    counts = np.zeros(parameters.draft_length, dtype=np.int64)
    which = np.arange(BLOCK)
    while len(which):
        found = clock.next_round(which)
        kept = np.minimum(ahead[found.start, which], found.waiting + 1)
        clock.decide(which, found, kept)
        rounds[which] += 1
        offered[which] += found.waiting
        verifying[which] += prices.passes(which, found.start, found.waiting)
        counts += np.bincount(np.minimum(kept, found.waiting), minlength=len(counts))
        which = which[clock.start[which] < tokens]
    # Every position but the last is drafted once as a continuation of the right text.
    busy = verifying + (prices.draft[0, : tokens - 1].sum() + clock.stale) * cost.draft_devices
    passes = tokens - 1 + clock.stale_passes
    operations = rounds + offered + (passes * cost.operations("draft") if tokens > 1 else 0.0)
    return Tally(clock.free, busy, operations, rounds, offered, counts)


def _accepted_ahead(tokens: int, outcomes: Iterator[Outcomes]) -> np.ndarray[tuple[int, int], np.dtype[np.int64]]:
    """Number of right drafted tokens from each position on, before the last; shape (tokens, replications)."""
    nowhere = np.zeros(BLOCK, dtype=np.uint8)
    kept = [next(outcomes)(nowhere).copy() for _ in range(tokens - 1)]  # a law may use the array again for the next position
    ahead = np.zeros((tokens, BLOCK), dtype=np.int64)
    for position in range(tokens - 2, -1, -1):
        ahead[position] = np.where(kept[position], ahead[position + 1] + 1, 0)
    return ahead
