"""Plain decoding in closed form: every token runs all layers and the final head."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.interpret.account import Work
from model.methods.autoregressive.algorithm import Parameters
from model.methods.claim_bounds import ClaimTerms, Limit
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.outcomes.outcome_laws import Law


def predict(parameters: Parameters, tokens: ArrayLike, law: Law | None, cost: StepCosts) -> Prediction:
    """Latency without variance; busy time equals latency, since one unit works throughout; `law` is unused.

    >>> from model.costs.layer_times import UnitCost
    >>> float(predict(Parameters(40), 128, None, UnitCost(40)).latency)
    5120.0
    """
    choice, one = MethodChoice(parameters, int(checks.whole_array("tokens", tokens, 1)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; passes are priced at all costs together."""
    return predict_by_decoding(_predict_together, points, lambda parameters: 1, together="always")


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    latency = points.plain_times()
    one = np.ones_like(latency)
    return Prediction(latency, 0 * one, latency, one, one, latency)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time, equal to their constant values."""
    return (parameters.plain_time(tokens, cost),) * 2


def work(parameters: Parameters, tokens: int, law: Law | None) -> Work:
    """Work of the passes of a decoding; `law` is unused.

    >>> work(Parameters(40), 10, None).by_model["target"].layer_passes, work(Parameters(40), 10, None).by_model["target"].rows_read
    (400.0, 2200.0)
    """
    return parameters.plain_work(tokens)


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[Law | None]) -> Work:
    """`work` of several numbers of tokens, which rise; shape (laws, lengths).

    >>> work_of_lengths(Parameters(40), np.array([1, 10]), [None]).by_model["target"].rows_read.tolist()
    [[40.0, 2200.0]]
    """
    return parameters.plain_work(np.broadcast_to(lengths, (len(laws), lengths.size)))


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Plain decoding is as fast as plain decoding."""
    return Limit(1.0, "speed-up = 1: plain decoding is the baseline")
