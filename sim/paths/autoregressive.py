"""Plain decoding: every path is the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.algorithms.autoregressive import Parameters
from model.coins import BLOCK
from model.latency import UnitCost


def walk(
    parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Iterator[NDArray[np.bool_]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,); `outcomes` are not looked at."""
    time = np.full(BLOCK, tokens * (cost.span(0, parameters.layers) + cost.final_head))
    return time, time
