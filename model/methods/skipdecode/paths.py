"""SkipDecode, pass by pass: which layers each position runs, and how many sequences still run them; every path is the same.

It shares the schedule of budgets with the algorithm, and nothing else: layers are added one by one, where the formula subtracts
ranges.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from model.costs.layer_times import UnitCost
from model.methods.skipdecode.algorithm import Parameters, schedule
from model.outcomes.random_streams import BLOCK


def walk(
    parameters: Parameters, tokens: int, cost: UnitCost, outcomes: Iterator[NDArray[np.bool_]]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Time and unit-time, each of shape (BLOCK,); `outcomes` are not looked at."""
    parameters.check_tokens(tokens)
    layers, batch = parameters.layers, parameters.sequences
    layer_times = np.ones(layers) if cost.layer_times is None else np.array(cost.layer_times)
    lengths = np.array([tokens] * parameters.decoded_sequences if parameters.lengths is None else parameters.lengths)
    budgets = schedule(parameters, tokens)
    times = {budget: float(layer_times[_run(parameters, budget)].sum()) + cost.final_head for budget in {*budgets}}
    total = 0.0
    for start in range(0, len(lengths), batch):
        together = lengths[start : start + batch]
        for position in range(together.max()):
            total += cost.step + times[budgets[position]] * cost.layers_slowdown(int((together > position).sum()))
    time = np.full(BLOCK, total)
    return time, time


def _run(parameters: Parameters, budget: int) -> NDArray[np.bool_]:
    """Whether each layer is run on a token with this budget: the first `warm_up`, and the topmost of the rest."""
    layer = np.arange(parameters.layers)
    return np.asarray((layer < parameters.warm_up) | (layer >= parameters.layers - (budget - parameters.warm_up)))
