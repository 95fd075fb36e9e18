"""Early exit in closed form: a token leaves the model at the first layer that is sure of it [Schuster2022], or at a fixed one.

Behind each layer from `first` on a measure of confidence is compared with a threshold that may fall with the position; a token that
passes leaves. `hazards` are the chances h_1, ..., h_L that a token which has come to a layer leaves behind it, along the last axis;
behind layer L all do, whatever h_L says. What is skipped is owed: a later token that goes deeper attends to keys and values which
were not computed. They are projected from the state at the exit, for each token at once (`propagation`). A batch goes on until its
last token leaves.

Times are in the cost's unit. Lossy: what it does to the text no formula says.

[Schuster2022] T. Schuster et al. Confident Adaptive Language Modeling. NeurIPS 2022, arXiv:2207.07061.
[t5x] google-research/t5x, t5x/contrib/calm, which decays its threshold in another way than the paper.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.interpret.account import Account, Work
from model.methods.early_exit import finite_early_exit
from model.methods.early_exit.algorithm import FORMS as FORMS
from model.methods.early_exit.algorithm import MEASURES as MEASURES
from model.methods.early_exit.algorithm import Parameters
from model.methods.early_exit.algorithm import decayed_threshold as decayed_threshold
from model.methods.prediction import Prediction

Floats = NDArray[np.float64]
Whole = NDArray[np.int64]



# --- The decision -----------------------------------------------------------------------------------------------------


def exits(confidences: ArrayLike, thresholds: ArrayLike, *, first: int = 1, strict: bool = False) -> Whole:
    """The layer that each token leaves at: the first from `first` on whose confidence is at least its threshold, or the last.

    `confidences` has shape (..., layers), `thresholds` that without the last axis. [t5x] leaves at equality; with `strict` not.

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
    """The chances to leave behind layer 1, 2, ..., L.

    >>> exit_pmf([0.2, 0.3, 0.5, 1]).round(2).tolist()
    [0.2, 0.24, 0.28, 0.28]
    """
    arriving = _arriving(hazards)
    return np.asarray(arriving - np.concatenate([arriving[..., 1:], np.zeros_like(arriving[..., :1])], axis=-1))


def expected_layers(hazards: ArrayLike, batch: int = 1) -> Floats:
    """Layers of a token, in the mean: the sum over i < L of (1 - h_1) ... (1 - h_i) [layers].

    With a `batch` that of the token that leaves last: sum of 1 - (1 - (1 - h_1) ... (1 - h_i))^batch, if they are independent.

    >>> round(float(expected_layers([0.2, 0.3, 0.5, 1])), 2), round(float(expected_layers([0.2, 0.3, 0.5, 1], batch=8)), 2)
    (2.64, 3.93)
    """
    checks.whole("batch", batch, 1)
    return np.asarray((1 - (1 - _arriving(hazards)) ** batch).sum(axis=-1))


# --- A decoding -------------------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """`tokens` tokens of every text, or as many as `lengths` says; plain decoding is that of the same batches.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.methods.early_exit.algorithm import Parameters
    >>> from model.methods.early_exit.finite_early_exit import Depths
    >>> law = Depths(exit_pmf([0.2, 0.3, 0.5, 1]))
    >>> float(predict(Parameters(4), 100, law, UnitCost(4)).latency.round(9))
    264.0
    """
    n = int(np.asarray(tokens))
    parameters.check_tokens(n)
    mean, variance = finite_early_exit.moments(parameters, n, law, cost)
    values = mean, variance, mean, 1.0, parameters.units, parameters.plain_time(n, cost)
    return Prediction(*(np.asarray(value, dtype=np.float64) for value in values))


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Time and unit-time that no decoding exceeds: the slowest column at every step, and of each layer the most expensive rows."""
    time = finite_early_exit.slowest(parameters, tokens, cost)
    return time, time


def operations(parameters: Parameters, cost: StepCosts, rounds: Any, account: Account) -> float:
    """The arithmetic of the layers run, in that of a token in the whole model; heads, and rows filled in, left out."""
    return account.layer_passes / parameters.layers


def work(parameters: Parameters, tokens: int, law: Any) -> Work:
    """What the passes of all batches come to, in the mean."""
    return finite_early_exit.work(parameters, tokens, law)


# --- Time -------------------------------------------------------------------------------------------------------------


def expected_time(
    hazards: ArrayLike, *, measure: str, head: float, check: float = 0.0, propagation: float = 0.0, first: int = 1
) -> Floats:
    """Time of a token in the mean: its layers, checks behind them, a projection onto the vocabulary, what is owed [layer-times].

    Layers from `first` on are checked, but for the last, behind which all leave. `softmax` projects onto the vocabulary (`head`) at
    each check; the one that lets a token go is its own projection. `state` compares two states (`check`). `propagation` is the
    keys and values of a skipped layer.

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
        raise checks.ParameterError(f"hazards must be 0 at the layers before first={first}, which no token leaves at")
    deep = arriving.sum(axis=-1)
    checked = arriving[..., first - 1 : layers - 1].sum(axis=-1)
    # Of the checks of `softmax` one is the token's own, but for those that go through all layers.
    through = arriving[..., -1]
    projections = checked + through if measure == "softmax" else np.ones_like(deep)
    compared = checked if measure == "state" else np.zeros_like(deep)
    return np.asarray(deep + head * projections + check * compared + propagation * (layers - deep))


def _arriving(hazards: ArrayLike) -> Floats:
    """The chances to come to layer 1, 2, ..., L."""
    rates = checks.array("hazards", hazards, 0, 1)
    if not rates.shape or not rates.shape[-1]:
        raise checks.ParameterError(f"hazards must have a chance for each layer, got {checks.shown(hazards)}")
    stays = np.cumprod(1 - rates[..., :-1], axis=-1)
    return np.asarray(np.concatenate([np.ones_like(rates[..., :1]), stays], axis=-1))
