"""Speculative beam search, path by path: a step of the search takes the place of a token, and rounds have their own prices."""

from __future__ import annotations

from collections.abc import Iterator

from model.acceptance import Outcomes
from model.algorithms.beam import Parameters
from model.beam import beam_round_prices
from model.coins import BLOCK
from model.latency import UnitCost
from model.rounds import Tally, fixed

LAST_MATTERS = False
"""The last step is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Iterator[Outcomes]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 steps."""
    return fixed(parameters.draft_length, tokens, outcomes, beam_round_prices(parameters, cost), BLOCK)
