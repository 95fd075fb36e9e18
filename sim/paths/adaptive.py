"""Speculative decoding with a draft length that changes, path by path: rounds whose lengths the policy sets for each path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
from numpy.typing import NDArray

from model.acceptance import Outcomes
from model.algorithms.adaptive import Parameters
from model.coins import BLOCK
from model.latency import UnitCost
from model.rounds import Tally, round_prices, varying

LAST_MATTERS = False
"""The last token is never a drafted one."""

Played = Iterator[Outcomes] | Mapping[str, Iterator[Outcomes] | Iterator[NDArray[np.uint8]]]


def walk(parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Played) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions."""
    prices = round_prices(cost, parameters.longest, apart=parameters.placement == "apart")
    accepts, doubts = outcomes, None
    if isinstance(outcomes, Mapping):
        accepts = outcomes["accept"]
        tiles = [np.array(tile, dtype=np.uint8) for tile in outcomes["confidence"]]
        doubts = np.concatenate(tiles) if tiles else np.zeros((0, BLOCK), dtype=np.uint8)
    return varying(parameters.started(BLOCK), tokens, accepts, prices, doubts)  # type: ignore[arg-type]
