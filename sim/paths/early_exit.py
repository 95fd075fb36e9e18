"""Early exit, path by path: a column takes what its deepest text takes."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.algorithms.early_exit import Parameters
from model.coins import BLOCK
from model.early_exit_lengths import Depth, decodings
from model.latency import UnitCost


def walk(
    parameters: Parameters, tokens: int, cost: UnitCost, depths: Iterator[Depth]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,), from the depths of all texts at each place."""
    time = decodings(parameters, tokens, depths, cost, BLOCK)
    return time, time
