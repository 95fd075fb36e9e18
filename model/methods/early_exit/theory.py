"""Early exit in closed form: a token leaves the model at the first layer with enough confidence [Schuster2022], or at a fixed one.

After each layer from `first` on, a measure of confidence is compared with a threshold that may fall with the position; a token that
reaches it leaves. `hazards` are the probabilities h_1, ..., h_L that a token which has run a layer leaves after it, along the last
axis; after layer L all tokens leave, at any h_L. A later token that goes deeper attends to keys and values of skipped layers. They
are projected from the state at the exit, for each token immediately (`propagation`). A batch runs until its last token leaves.

Times are in the cost's unit. The method is lossy; no formula gives the effect on the output.

[Schuster2022] T. Schuster et al. Confident Adaptive Language Modeling. NeurIPS 2022, arXiv:2207.07061.
[t5x] google-research/t5x, t5x/contrib/calm; its threshold decays differently from the paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.interpret.account import Account, Work
from model.methods.claim_bounds import ClaimTerms, Limit, layers_bound
from model.methods.early_exit import finite_early_exit
from model.methods.early_exit.algorithm import FORMS as FORMS
from model.methods.early_exit.algorithm import MEASURES as MEASURES
from model.methods.early_exit.algorithm import Parameters
from model.methods.early_exit.algorithm import decayed_threshold as decayed_threshold
from model.methods.early_exit.finite_early_exit import work_of_laws as work_of_laws
from model.methods.early_exit.finite_early_exit import work_of_lengths as work_of_lengths
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]



# --- The decision -----------------------------------------------------------------------------------------------------


def exits(confidences: ArrayLike, thresholds: ArrayLike, *, first: int = 1, strict: bool = False) -> Integers:
    """Exit layer of each token: the first from `first` on whose confidence is at least the threshold, or the last.

    `confidences` has shape (..., layers), `thresholds` shape (...). [t5x] exits at equality; with `strict` equality is not enough.

    >>> exits([[0.2, 0.9, 0.3, 1.0], [0.9, 0.1, 0.2, 0.4]], [0.9, 0.95]).tolist()
    [2, 4]
    """
    seen = checks.array("confidences", confidences, 0, 1)
    if not seen.shape or not seen.shape[-1]:
        raise checks.ParameterError(f"confidences must have a number for each layer, got {checks.shown(confidences)}")
    layers = seen.shape[-1]
    checks.whole("first", first, 1, layers, "layers")
    needed = checks.array("thresholds", thresholds, 0, 1)[..., None]
    sure = seen > needed if strict else seen >= needed
    sure[..., : first - 1] = False
    sure[..., -1] = True
    return np.asarray(sure.argmax(axis=-1) + 1)


# --- Depths -----------------------------------------------------------------------------------------------------------


def exit_pmf(hazards: ArrayLike) -> Floats:
    """Probabilities to leave after layer 1, 2, ..., L.

    >>> exit_pmf([0.2, 0.3, 0.5, 1]).round(2).tolist()
    [0.2, 0.24, 0.28, 0.28]
    """
    arriving = _arriving(hazards)
    return np.asarray(arriving - np.concatenate([arriving[..., 1:], np.zeros_like(arriving[..., :1])], axis=-1))


def expected_layers(hazards: ArrayLike, batch: int = 1) -> Floats:
    """Expected layers of a token: the sum over i < L of (1 - h_1) ... (1 - h_i) [layers].

    With a `batch` of independent tokens, layers of the last one: the sum of 1 - (1 - (1 - h_1) ... (1 - h_i))^batch.

    >>> round(float(expected_layers([0.2, 0.3, 0.5, 1])), 2), round(float(expected_layers([0.2, 0.3, 0.5, 1], batch=8)), 2)
    (2.64, 3.93)
    """
    checks.whole("batch", batch, 1)
    return np.asarray((1 - (1 - _arriving(hazards)) ** batch).sum(axis=-1))


# --- A decoding -------------------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """Prediction for `tokens` tokens of every sequence, or `lengths` of each; plain decoding is that of the same batches.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.methods.early_exit.algorithm import Parameters
    >>> from model.methods.early_exit.finite_early_exit import Depths
    >>> law = Depths(exit_pmf([0.2, 0.3, 0.5, 1]))
    >>> float(predict(Parameters(4), 100, law, UnitCost(4)).latency.round(9))
    264.0
    """
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points."""
    for group in points.groups().groups:
        group.check_tokens()
    return predict_by_decoding(
        _predict_together, points, finite_early_exit.prices_of_each, together="always",
        by_position=finite_early_exit.prices_by_position,
    )  # fmt: skip


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    if points.lengths is not None:
        by_position = np.array([law is not None and law.by_position for law in points.laws])[points.law]
        apart = by_position | (points.parameters.fill == "backfill")
        if apart.any():
            return points.one_length_each(_predict_together, apart)
    mean, variance = finite_early_exit.moments_of_points(points)
    one = np.ones(mean.size)
    plain = points.plain_times()
    return Prediction(mean, variance, mean, one, one * points.parameters.units, plain)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every step at its slowest exit, and every layer with the most expensive backfill."""
    time = finite_early_exit.slowest(parameters, tokens, cost)
    return time, time


def operations(parameters: Parameters, cost: StepCosts, rounds: Any, account: Account) -> float:
    """Arithmetic of the layers run, in units of one token in the whole model; without heads and propagated rows."""
    return account.layer_passes / parameters.layers


def work(parameters: Parameters, tokens: int, law: Any) -> Work:
    """Expected work of the passes of all batches."""
    return work_of_laws(parameters, tokens, [law]).at(0)


# --- Time -------------------------------------------------------------------------------------------------------------


def expected_time(
    hazards: ArrayLike, *, measure: str, head: float, check: float = 0.0, propagation: float = 0.0, first: int = 1
) -> Floats:
    """Expected time of a token: layers, checks, projection onto the vocabulary, and propagation [layer-times].

    Layers from `first` on are checked, except the last. `softmax` projects onto the vocabulary (`head`) at each check; the last
    check of a token is its final projection. `state` compares two states (`check`). `propagation` is the time of keys and values
    per skipped layer.

    >>> [round(float(expected_time([0.2, 0.3, 0.5, 1], measure=name, head=2.0, propagation=0.1)), 3) for name in MEASURES]
    [8.056, 4.776]
    """
    checks.one_of("measure", measure, MEASURES)
    for name, value in (("head", head), ("check", check), ("propagation", propagation)):
        checks.number(name, value, 0)
    arriving = _arriving(hazards)
    layers = arriving.shape[-1]
    checks.whole("first", first, 1, layers, "layers")
    if np.any(arriving[..., first - 1] != 1):
        raise checks.ParameterError(f"hazards must be 0 at the layers before first={first}, where tokens cannot leave")
    deep = arriving.sum(axis=-1)
    checked = arriving[..., first - 1 : layers - 1].sum(axis=-1)
    # The last check of `softmax` is the token's projection, except for tokens that run all layers.
    through = arriving[..., -1]
    projections = checked + through if measure == "softmax" else np.ones_like(deep)
    compared = checked if measure == "state" else np.zeros_like(deep)
    return np.asarray(deep + head * projections + check * compared + propagation * (layers - deep))


def _arriving(hazards: ArrayLike) -> Floats:
    """Probabilities to reach layer 1, 2, ..., L."""
    rates = checks.array("hazards", hazards, 0, 1)
    if not rates.shape or not rates.shape[-1]:
        raise checks.ParameterError(f"hazards must have a probability for each layer, got {checks.shown(hazards)}")
    stays = np.cumprod(1 - rates[..., :-1], axis=-1)
    return np.asarray(np.concatenate([np.ones_like(rates[..., :1]), stays], axis=-1))


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Layers of the model over mean layers of a token, or over the exit layer of all tokens: the larger, if both are stated."""
    return layers_bound(terms, max(("mean_layers", "exit_layer"), key=terms.best))
