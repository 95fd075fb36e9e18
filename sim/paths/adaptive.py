"""Speculative decoding with a draft length that changes, path by path: rounds whose lengths the policy sets for each path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from model.acceptance import Outcomes
from model.algorithms.adaptive import Parameters
from model.coins import BLOCK
from model.latency import UnitCost
from model.rounds import Tally, round_prices, varying

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Iterator[Outcomes] | Mapping[str, Any]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions."""
    prices = round_prices(cost, parameters.longest, apart=parameters.placement == "apart")
    if not isinstance(outcomes, Mapping):
        return varying(parameters.started(BLOCK), tokens, outcomes, prices)
    doubts = np.concatenate([np.zeros((0, BLOCK), dtype=np.uint8), *outcomes["confidence"]])
    return varying(parameters.started(BLOCK), tokens, outcomes["accept"], prices, doubts)
