"""Plain decoding: every path is the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.methods.autoregressive.algorithm import Parameters
from model.outcomes.random_streams import BLOCK


def walk(
    parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Iterator[NDArray[np.bool_]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,); `outcomes` are not looked at."""
    time = np.full(BLOCK, tokens * (cost.span(0, parameters.layers) + cost.final_head))
    return time, time
