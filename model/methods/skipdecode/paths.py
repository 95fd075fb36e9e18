"""SkipDecode, pass by pass: layers and sequences of each step; all replications are equal.

It shares only the schedule of layer budgets with the algorithm; the layers of a pass are computed independently.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import PassShape, StepCosts
from model.methods.skipdecode.algorithm import Parameters, schedule
from model.outcomes.random_streams import BLOCK
from model.steps import LayerSpan


def walk(
    parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[NDArray[np.bool_]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,); `outcomes` are unused."""
    parameters.check_tokens(tokens)
    batch = parameters.sequences
    lengths = np.array([tokens] * parameters.decoded_sequences if parameters.lengths is None else parameters.lengths)
    budgets = schedule(parameters, tokens)
    spans = {budget: _span(_run(parameters, budget)) for budget in {*budgets}}
    known: dict[tuple[int, int], float] = {}
    total = 0.0
    for start in range(0, len(lengths), batch):
        together = lengths[start : start + batch]
        for position in range(together.max()):
            pass_ = budgets[position], int((together > position).sum())
            if pass_ not in known or not cost.uniform:
                known[pass_] = float(cost.times(PassShape(spans[pass_[0]], sequences=pass_[1], heads=1), position))
            total += known[pass_]
    time = np.full(BLOCK, total)
    return time, time


def _span(run: NDArray[np.bool_]) -> LayerSpan:
    """Span of the layers that are run; the others are gaps."""
    edges = np.flatnonzero(np.diff(~run, prepend=False, append=False)).tolist()
    return LayerSpan(0, len(run), tuple(zip(edges[::2], edges[1::2], strict=True)))


def _run(parameters: Parameters, budget: int) -> NDArray[np.bool_]:
    """Mask of the layers that run with this budget: the first `warm_up`, and the topmost of the rest."""
    layer = np.arange(parameters.layers)
    return np.asarray((layer < parameters.warm_up) | (layer >= parameters.layers - (budget - parameters.warm_up)))
