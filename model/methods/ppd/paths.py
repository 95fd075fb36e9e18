"""Predictive Pipelined Decoding, vectorised over replications: the matches before a token determine its stage."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods.ppd.algorithm import Parameters
from model.methods.ppd.theory import stages
from model.methods.stages import sums
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The match of the last token has no effect, so it is not drawn."""


def walk(
    parameters: Parameters, tokens: int, cost: StepCosts, matches: Iterator[NDArray[np.bool_]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,), from the matches of the first tokens - 1 positions."""
    return sums(stages(parameters, cost, tokens), matches, tokens, BLOCK)
