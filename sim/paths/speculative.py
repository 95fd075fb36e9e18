"""Speculative decoding, path by path: the place of each position in its draft follows from the outcomes before it."""

from __future__ import annotations

from collections.abc import Iterator

from model.acceptance import Outcomes
from model.algorithms.speculative import Parameters
from model.coins import BLOCK
from model.latency import UnitCost
from model.rounds import Tally, fixed, round_prices

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Iterator[Outcomes]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions."""
    prices = round_prices(cost, parameters.draft_length, apart=parameters.placement == "apart")
    return fixed(parameters.draft_length, tokens, outcomes, prices, BLOCK)
