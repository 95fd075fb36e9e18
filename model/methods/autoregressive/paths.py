"""Plain decoding: all replications are equal."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import PassShape, StepCosts
from model.methods.autoregressive.algorithm import Parameters
from model.outcomes.random_streams import BLOCK
from model.steps import LayerSpan


def walk(
    parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[NDArray[np.bool_]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,); `outcomes` are unused."""
    one = cost.times(PassShape(LayerSpan(0, parameters.layers), heads=1), np.arange(tokens))
    time = np.full(BLOCK, float(one.sum()))
    return time, time
