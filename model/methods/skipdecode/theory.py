"""SkipDecode in closed form: the number of layers of a generated token falls with its position [DelCorro2023].

The prompt runs all layers. The token at position i, counted from 0, runs (1 - t) max + t min layers, with
t = (i - prompt) / (sequence_length - prompt) and `sequence_length` the longest sequence including its prompt (Section 2.3). All
sequences of a batch run the same layers at a position: the first `warm_up` ones and then the topmost (Section 2.4). The schedule
never rises, so every layer that a token runs has the keys and values of all tokens before it, without recomputation.

The "speed-up" of the paper is a ratio of layers, `layer_speedup`. The speed-up in time is smaller, because other parts, such as the
projection onto the vocabulary, are not skipped. The method is lossy; no formula gives the effect on the output.

[DelCorro2023] L. Del Corro et al. SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference.
arXiv:2307.02628.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import PassShape, StepCosts
from model.interpret.account import Account, Totals, Work
from model.methods.claim_bounds import ClaimTerms, Limit, layers_bound
from model.methods.formula_check import ComparedRuns, FormulaPoint
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.skipdecode.algorithm import ROUNDINGS as ROUNDINGS
from model.methods.skipdecode.algorithm import Parameters, schedule, skipped
from model.methods.skipdecode.algorithm import exit_layers as exit_layers
from model.steps import LayerSpan

Floats = NDArray[np.float64]



# --- The schedule -----------------------------------------------------------------------------------------------------


def mean_layers(
    min_layers: int,
    max_layers: int,
    prompt: int,
    sequence_length: int,
    generated: int,
    rounding: str | None = None,
    *,
    power: float = 1.0,
) -> float:
    """Mean of `exit_layers`: max - (max - min) (n - 1) / (2 (sequence_length - prompt)) for the linear schedule [layers].

    For the whole schedule, n = sequence_length - prompt, it is (max + min) / 2 plus half a step.

    >>> mean_layers(8, 16, 60, 160, 100), round(mean_layers(8, 16, 60, 160, 34, "half-up"), 1)
    (12.04, 14.7)
    """
    layers = exit_layers(min_layers, max_layers, prompt, sequence_length, generated, rounding=rounding, power=power)
    if rounding is None and power == 1:
        return max_layers - (max_layers - min_layers) * (generated - 1) / (2 * (sequence_length - prompt))
    return float(layers.mean())


def generated_of_mean(
    mean: float,
    min_layers: int,
    max_layers: int,
    prompt: int,
    sequence_length: int,
    *,
    rounding: str | None = None,
    within: float = 0.05,
) -> tuple[int, ...]:
    """Response lengths whose mean layers agree with a printed `mean`, to `within` (half a unit of its last digit).

    >>> generated_of_mean(14.7, 8, 16, 60, 160, rounding="half-up")
    (34, 35)
    """
    checks.number("mean", mean, 0)
    checks.number("within", within, 0)
    layers = exit_layers(min_layers, max_layers, prompt, sequence_length, sequence_length - prompt, rounding=rounding)
    means = np.cumsum(layers) / np.arange(1.0, len(layers) + 1)
    return tuple(int(n) + 1 for n in np.flatnonzero(np.abs(means - mean) <= within * (1 + 1e-9)))


def spans(budget: int, warm_up: int, layers: int) -> tuple[tuple[int, int], ...]:
    """Layers that a token with this budget runs, as half-open ranges: the first `warm_up`, then the topmost.

    >>> spans(8, 1, 24), spans(24, 1, 24), spans(1, 1, 24)
    (((0, 1), (17, 24)), ((0, 24),), ((0, 1),))
    """
    checks.whole("layers", layers, 1, checks.MAX_LAYERS)
    checks.whole("budget", budget, 1, layers, "layers")
    checks.whole("warm_up", warm_up, 0, budget, "budget")
    top = layers - (budget - warm_up)
    if top <= warm_up:
        return ((0, layers),)
    return tuple((first, last) for first, last in ((0, warm_up), (top, layers)) if first < last)


# --- A decoding -------------------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """Prediction for `tokens` tokens of every sequence, or `lengths` of each; deterministic, `law` is unused.

    Plain decoding is that of the same batches. Times are in the cost's unit.

    >>> from model.methods.skipdecode.algorithm import Parameters
    >>> from model.costs.layer_times import UnitCost
    >>> found = predict(Parameters(24, 8, 16, 60, 160), 100, None, UnitCost(24))
    >>> float(found.latency), round(float(found.plain_latency / found.latency), 3)
    (1204.0, 1.993)
    """
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; the passes of a schedule are priced at all costs together."""
    return predict_by_decoding(_predict_together, points, lambda parameters: parameters.largest_pass, together="always")


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    parameters, tokens, cost = points.parameters, points.tokens, points.cost
    if points.lengths is None:
        time = _time(parameters, tokens, cost)[points.price]
    else:
        time = _times_until(parameters, tokens, cost)[points.price, points.lengths - 1]
    one = np.ones(time.size)
    return Prediction(time, np.zeros(time.size), time, one, one * parameters.units, points.plain_times())


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time, equal to their constant values."""
    time = float(_time(parameters, tokens, cost))
    return time, time


def _time(parameters: Parameters, tokens: int, cost: StepCosts) -> Any:
    """Time of all batches, of several costs an array. Passes of equal budget are priced together."""
    parameters.check_tokens(tokens)
    places, widths = parameters.columns(tokens)
    budgets = np.array(schedule(parameters, tokens))[places]
    at = np.zeros_like(places) if cost.uniform else places
    sizes = parameters.layers + 1, tokens, int(widths.max()) + 1
    passes, counts = np.unique(np.ravel_multi_index((budgets, at, widths), sizes), return_counts=True)
    budgets, at, widths = np.unravel_index(passes, sizes)
    span = {budget: LayerSpan(0, parameters.layers, skipped(parameters, budget)) for budget in dict.fromkeys(budgets.tolist())}
    single = widths[0] == widths[-1] and (widths == widths[0]).all()
    width = int(widths[0])
    if single and cost.uniform:  # costs keep times of passes of a single width
        each = [cost.times(PassShape(layers, sequences=width, heads=1)) for layers in span.values()]
        return np.stack(each, axis=-1) @ counts
    time: Any = 0.0
    for budget, layers in span.items():
        part = budgets == budget
        shape = PassShape(layers, sequences=width if single else widths[part], heads=1)
        time = time + cost.times(shape, at[part]) @ counts[part]
    return time


def _times_until(parameters: Parameters, tokens: int, cost: StepCosts) -> Floats:
    """Time of a single sequence of 1, 2, ..., `tokens` tokens, at several costs; shape (costs, tokens).

    The layers of a token do not depend on the tokens after it.
    """
    parameters.check_tokens(tokens)
    budgets, which = np.unique(schedule(parameters, tokens), return_inverse=True)
    shapes = [PassShape(LayerSpan(0, parameters.layers, skipped(parameters, budget)), heads=1) for budget in budgets.tolist()]
    if cost.uniform:
        each = np.stack([cost.times(shape) for shape in shapes], axis=-1)
        return np.asarray(each @ (which == np.arange(budgets.size)[:, None]).cumsum(axis=1))
    places = [np.flatnonzero(which == number) for number in range(budgets.size)]
    times = np.concatenate([cost.times(shape, at) for shape, at in zip(shapes, places, strict=True)], axis=-1)
    return np.cumsum(times[..., np.argsort(np.concatenate(places))], axis=-1)


def operations(parameters: Parameters, cost: StepCosts, rounds: Any, account: Account) -> float:
    """Arithmetic of the passes, in units of one token in the whole model; without heads."""
    return account.layer_passes / parameters.layers


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[Any]) -> Work:
    """`work`, the same for all laws."""
    return work(parameters, tokens, None)


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[Any]) -> Work:
    """`work` of a single sequence of several lengths, which rise; shape (laws, lengths).

    The layers of a token do not depend on the tokens after it.

    >>> work_of_lengths(Parameters(24, 8, 16, 60, 160), np.array([50, 100]), [None]).by_model["target"].layer_passes.tolist()
    [[702.0, 1204.0]]
    """
    shape = len(laws), lengths.size

    def until(each: Floats) -> Any:
        return np.broadcast_to(each.cumsum()[lengths - 1], shape)

    return Work({"target": _totals(parameters, int(lengths[-1]), until)})


def work(parameters: Parameters, tokens: int, law: Any) -> Work:
    """Work of the passes of all batches; `law` is unused.

    >>> from model.methods.skipdecode.algorithm import Parameters
    >>> work(Parameters(24, 8, 16, 60, 160), 100, None).by_model["target"].layer_passes
    1204.0
    """
    return Work({"target": _totals(parameters, tokens, lambda each: float(each.sum()))})


def _totals(parameters: Parameters, tokens: int, total: Callable[[Floats], Any]) -> Totals:
    """Totals over the passes of all batches; `total` gives the sum of a value of each pass, or the sums of the first 1, 2, ..."""
    places, widths = parameters.columns(tokens)
    layers = np.array(schedule(parameters, tokens), dtype=np.float64)[places]
    passes, attended = total(np.ones(places.size)), total(layers * (widths * (places + 1)))
    found = Totals(passes, total(layers), total(layers * widths), attended, attended)
    return found._replace(head_runs=passes, heads=total(widths.astype(np.float64)))


# --- Speed ------------------------------------------------------------------------------------------------------------


def layer_speedup(layers: ArrayLike, mean: ArrayLike) -> Floats:
    """The paper's speed-up: layers of the whole model over mean layers of a generated token [-].

    >>> round(float(layer_speedup(24, 14.7)), 2)  # Table 4, E2E, labelled 2x
    1.63
    """
    whole, mean_ = checks.array("layers", layers, 0), checks.array("mean", mean, 0)
    _refuse_nothing("mean", mean_)
    return np.asarray(whole / mean_)


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _refuse_nothing(name: str, values: Floats) -> None:
    if np.any(values == 0):
        raise checks.ParameterError(f"{name} must be above 0, got 0.0; a token runs at least one layer")


# --- Real runs -------------------------------------------------------------------------------------------------------


def paper_formula(runs: ComparedRuns) -> FormulaPoint:
    """Time relative to plain decoding, if time is proportional to the layers of a token."""
    share = runs.layers_per_token() / runs.settings["layers"]
    about = "the formula: layers of a token over all layers (counted)"
    return FormulaPoint(runs.settings["min_layers"], share, "least layers of a token", about)


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """`layer_speedup`: layers of the model over mean layers of a token."""
    return layers_bound(terms, "mean_layers")
