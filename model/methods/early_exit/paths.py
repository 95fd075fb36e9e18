"""Early exit, vectorised over replications: the deepest sequence of a batch determines the time of a step."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods.early_exit.algorithm import Parameters
from model.methods.early_exit.finite_early_exit import Depth, decodings
from model.outcomes.random_streams import BLOCK


def walk(
    parameters: Parameters, tokens: int, cost: StepCosts, depths: Iterator[Depth]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,), from the depths of all sequences at each position."""
    time = decodings(parameters, tokens, depths, cost, BLOCK)
    return time, time
