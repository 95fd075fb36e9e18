"""DSI in closed form: the draft model never waits, and replicas of the target verify concurrently [Timor2024].

`predict` is exact for a finite number of tokens, replicas and link time, at any costs and under any law of single positions
(`model.methods.dsi.finite_dsi`). The equations are for many tokens with i.i.d. acceptances, where a pass takes the same time for
any number of tokens; times are in passes of the target.

The paper proves that DSI is never slower than plain decoding, and in expectation never slower than speculative decoding, with as
many replicas as are needed and without communication. `speedup` has both: where a result takes two link times more than its pass,
each rejection costs them, and with fewer than `needed_verifiers` replicas passes wait.

[Timor2024] N. Timor et al. Distributed Speculative Inference (DSI): Speculation Parallelism for Provably Faster Lossless Language
Model Inference. ICLR 2025, arXiv:2405.14105.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.steady_prices import SteadyPrices
from model.costs.step_costs import StepCosts
from model.interpret.account import Account, Work
from model.methods.claim_bounds import ClaimTerms, Limit
from model.methods.concurrent.concurrent_laws import chains_of, moments_of_points, positions_of
from model.methods.concurrent.concurrent_work import expected_work
from model.methods.dsi.algorithm import Parameters
from model.methods.dsi.finite_dsi import moments, moments_of_pairs, speculation_tables, work_of_chains
from model.methods.prediction import DecodingPoints, Prediction, PredictionPoints, predict_by_decoding
from model.outcomes.outcome_laws import constant_rates

Floats = NDArray[np.float64]


# --- A finite decoding ---------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """Predict the decoding of exactly `tokens` tokens, times in the unit of the costs.

    Unit-time sums the draft model's unit, which works from each restart to the rejection, and all passes of the target, those that
    a rejection stops included. `drafted` counts the tokens that processed passes verify.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> found = predict(Parameters(40, 1, 10), 40, Iid(0.5), UnitCost(40, cost_ratio=0.25))
    >>> round(float(found.latency) / 40, 6), float(expected_latency(0.5, 0.25, 40))
    (25.375, 25.375)
    >>> [round(float(predict(Parameters(40, 2, verifiers), 200, Iid(0.8), UnitCost(40, cost_ratio=0.1)).latency) / 40, 2)
    ...  for verifiers in (1, 2, 5)]
    [129.44, 79.14, 58.49]
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    count = int(np.asarray(tokens))
    parameters.check_tokens(count)
    found = moments(parameters.lookahead, parameters.verifiers, count, law, parameters.draft_costs(cost))
    latency, variance, busy, operations, rounds, drafted = (np.asarray(value, dtype=np.float64) for value in found)
    units, plain = np.asarray(float(parameters.units)), np.asarray(parameters.plain_time(count, cost))
    return Prediction(latency, variance, busy, np.asarray(np.nan), units, plain, rounds, drafted, operations)


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; speculations are tabulated for all costs together."""
    for group in points.groups().groups:
        group.check_tokens()
    return predict_by_decoding(_predict_together, points, lambda parameters: _NUMBERS_OF_A_START)


_NUMBERS_OF_A_START = 32
"""Numbers by position of one cost, so that some tens of costs are tabulated together."""


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points of one number of tokens."""
    parameters = points.parameters
    cost = parameters.draft_costs(points.cost)
    tables = speculation_tables(parameters.lookahead, parameters.verifiers, points.tokens, cost)
    found = moments_of_points(points, Parameters.SHORT_LABEL, partial(moments_of_pairs, tables))
    units, unknown = np.full(points.law.size, float(parameters.units)), np.full(points.law.size, np.nan)
    times = found.time, found.variance, found.busy, unknown, units, points.plain_times()
    return Prediction(*times, found.rounds, found.drafted, found.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every token takes as long as in the slowest speculation, by tokens."""
    tables = speculation_tables(parameters.lookahead, parameters.verifiers, tokens, parameters.draft_costs(cost))
    time = busy = 0.0
    for start in range(tokens):
        length = np.arange(1, tokens - start + 1)
        where = start, *tables.ended_by(start, length)
        time = max(time, float((tables.time[where] / length).max()))
        busy = max(busy, float((tables.busy[where] / length).max()))
    return tokens * time, tokens * busy


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of all tokens that both models read, in tokens of the target; stopped passes count in full."""
    drafted = account.of("draft").layer_passes / parameters.draft_layers
    read = account.of("target").layer_passes / parameters.layers
    return read + (drafted * cost.operations("draft") if drafted else 0.0)


def timed_work(parameters: Parameters, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work:
    """Mean work of the passes of both models under each law, shape (laws,): `model.methods.dsi.finite_dsi.work_of_chains`.

    It depends on the times of passes and links, which decide how many passes are in flight, and how many tokens are drafted, when a
    rejection stops them. It is exact for any number of replicas and any link time, as `predict` is. Passes that begin exactly at a
    rejection are counted as the simulator counts them, except where two unrelated passes of equal duration end at that time.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> found = timed_work(Parameters(40, 2, 3, draft_layers=2), 200, [Iid(0.8)], UnitCost(40, cost_ratio=0.25)).at(0).by_model
    >>> round(found["target"].passes, 3), round(found["draft"].passes, 3)
    (208.464, 334.484)
    """
    return timed_work_of_costs(parameters, tokens, laws, cost)


def timed_work_of_costs(parameters: Parameters, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work:
    """`timed_work` at several joined costs, shape (costs, laws)."""
    parameters.check_tokens(tokens)
    chains = [chains_of(law, Parameters.SHORT_LABEL) for law in laws]
    passes_of = partial(work_of_chains, parameters, tokens, cost)
    return expected_work(parameters.layers, parameters.draft_layers, chains, passes_of)


# --- Many tokens ----------------------------------------------------------------------------------------------------


def needed_verifiers(lookahead: ArrayLike, cost_ratio: ArrayLike, link: ArrayLike = 0.0) -> Floats:
    """Replicas with which no pass waits: ceil((1 + 2 x) / (L c)), with x = `link` in passes of the target; at least one.

    Without links the number of [Timor2024], Section 3.1. It holds for passes that start every L drafted tokens. The last pass of a
    decoding, over the tokens left, starts sooner: for it one replica more is needed.

    >>> needed_verifiers([1, 5, 10], 0.1).tolist(), float(needed_verifiers(5, 0.1, link=0.25))
    ([10.0, 2.0, 1.0], 3.0)
    """
    step = checks.whole_array("lookahead", lookahead, 1) * checks.array("cost_ratio", cost_ratio, 1e-9)
    return np.asarray(np.maximum(np.ceil((1 + 2 * checks.array("link", link, 0)) / step * (1 - _ROUNDING)), 1.0))


def expected_latency(acceptance_rate: ArrayLike, cost_ratio: ArrayLike, tokens: ArrayLike) -> Floats:
    """Mean latency of l tokens at lookahead 1: c alpha (l - 1) + (1 - alpha) (l - 1) + 1 [passes of the target].

    With enough replicas and free links, and c at most 1: an accepted token takes a draft pass, a rejected one a pass of the target.
    Predictive Pipelined Decoding in its nested form has the same latency, with p = alpha and d'/d = c.

    >>> float(expected_latency(0.8, 0.1, 64)), float(expected_latency(1, 0.25, 5))
    (18.64, 2.0)
    """
    rate, ratio = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.array("cost_ratio", cost_ratio, 0, 1)
    later = checks.whole_array("tokens", tokens, 1) - 1
    return np.asarray(later * (ratio * rate + (1 - rate)) + 1)


def speedup(
    acceptance_rate: ArrayLike, lookahead: ArrayLike, verifiers: ArrayLike, cost_ratio: ArrayLike, link: ArrayLike = 0.0
) -> Floats:
    """Speed-up over plain decoding for many tokens [-], with x = `link` in passes of the target and c at most 1 + 2 x.

    A speculation of pass numbers 0, 1, ... is ended by a later one than i with probability alpha^(i L + 1). With b = alpha^L, V
    replicas and w = 1 + 2 x it takes w + alpha L c / (1 - b) + alpha max(w - V L c, 0) b^(V-1) / (1 - b^V) on average, and
    gives 1 / (1 - alpha) tokens. At alpha = 1 the speed-up is 1 / max(c, w / (V L)).

    >>> speedup(0.8, [1, 2, 5, 10], 10, 0.1).round(3).tolist()
    [3.571, 3.462, 3.135, 2.637]
    >>> speedup(0.8, 5, [1, 2, 3], 0.1).round(3).tolist(), float(speedup(1, 5, 2, 0.1))
    ([2.283, 3.135, 3.135], 10.0)
    >>> round(float(speedup(0.8, 5, 3, 0.1, 0.25)), 3)
    2.387
    """
    rate, ratio = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.array("cost_ratio", cost_ratio, 0)
    ahead, count = checks.whole_array("lookahead", lookahead, 1), checks.whole_array("verifiers", verifiers, 1)
    whole = 1 + 2 * checks.array("link", link, 0)
    _not_slower(ratio, whole)
    step = ahead * ratio
    certain = rate == 1
    alpha = np.where(certain, 0.5, rate)
    beta = alpha**ahead
    waiting = np.maximum(whole - count * step, 0.0)
    time = whole + alpha * step / (1 - beta) + alpha * waiting * beta ** (count - 1) / (1 - beta**count)
    per_token = np.where(certain, np.maximum(ratio, whole / (count * ahead)), (1 - alpha) * time)
    with np.errstate(divide="ignore"):
        return np.asarray(1 / per_token)


def steady_state(parameters: Parameters, laws: Sequence[Any], prices: SteadyPrices) -> Floats:
    """Time per token in the long run [s], without links, where passes take longer with their width; shape (laws, cells).

    The times of `model.methods.dsi.finite_dsi` for a speculation that nothing ends: pass i reads i L + 1 tokens if its replica has
    read nothing before, else V L. A rejection at token j ends it with probability alpha^(j-1) (1 - alpha), after 1 / (1 - alpha)
    tokens on average. After `_MOST_PASSES` passes their times continue as a line.

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = SteadyPrices(lambda width: np.ones((1, 1)), np.full((1, 1), 0.1))
    >>> [round(1 / float(steady_state(Parameters(40, 5, verifiers), [Iid(0.8)], flat)[0, 0]), 3) for verifiers in (1, 2, 3)]
    [2.283, 3.135, 3.135]
    """
    rate, draft = constant_rates(laws, "DSI"), prices.draft
    ahead, replicas = parameters.lookahead, parameters.verifiers
    passes = min(positions_of(rate, _MOST_PASSES * ahead) // ahead + 2 * replicas + 2, _MOST_PASSES)
    decided, processed = np.zeros((2, passes, *prices.shape))
    for index in range(passes):
        read = index * ahead
        sent = draft * read
        if index >= replicas:
            sent = np.maximum(sent, processed[index - replicas])
        decided[index] = sent + prices.verify(read + 1 if index < replicas else replicas * ahead)
        if index:
            np.maximum(decided[index], processed[index - 1], out=decided[index])
        processed[index] = np.maximum(decided[index], draft * (read + 1))
    number = np.arange(passes)[:, None, None]
    # Token i L + 1 is decided on as pass i is processed; the L - 1 tokens before it, which pass i reads, as it returns.
    at_end = rate ** (number * ahead)
    inside = np.where(number > 0, rate ** np.maximum((number - 1) * ahead + 1, 0) - at_end, 0.0)
    known = (inside * decided + (1 - rate) * at_end * processed).sum(axis=0)
    half = (passes - 1) // 2 // replicas * replicas or 1
    slope = (processed[-1] - processed[-1 - half]) / (half * ahead)
    beyond = rate ** ((passes - 1) * ahead + 1)
    return np.asarray((1 - rate) * (known + beyond * processed[-1]) + beyond * slope + prices.waiting)


_MOST_PASSES = 256
"""Passes of a speculation whose times are computed one by one."""


def break_even_link(
    acceptance_rate: ArrayLike, lookahead: ArrayLike, verifiers: ArrayLike, cost_ratio: ArrayLike, against: ArrayLike = 1.0
) -> Floats:
    """Link time at which `speedup` falls to `against` [passes of the target]; nan if it is lower without links, or alpha is 1.

    The mean time of a speculation is linear in the link time, and rises more steeply once passes wait for replicas.

    >>> link = float(break_even_link(0.8, 5, 3, 0.1))
    >>> round(link, 3), round(float(speedup(0.8, 5, 3, 0.1, link)), 9)
    (1.584, 1.0)
    """
    rate, ratio = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.array("cost_ratio", cost_ratio, 0, 1)
    ahead, count = checks.whole_array("lookahead", lookahead, 1), checks.whole_array("verifiers", verifiers, 1)
    wanted = checks.array("against", against, 0)
    step, beta = ahead * ratio, rate**ahead
    with np.errstate(divide="ignore", invalid="ignore"):
        weight = rate * beta ** (count - 1) / (1 - beta**count)
        left = 1 / ((1 - rate) * wanted) - rate * step / (1 - beta)  # w + weight max(w - V L c, 0)
        whole = np.where(left <= count * step, left, (left + weight * count * step) / (1 + weight))
        return np.asarray(np.where((whole >= 1) & (rate < 1), (whole - 1) / 2, np.nan))


def _not_slower(ratio: Floats, whole: Floats) -> None:
    """Refuse draft passes that take longer than a pass of the target with its links: decisions then wait for drafted tokens."""
    if np.any(ratio > whole):
        raise checks.ParameterError(
            f"cost_ratio must be at most 1 + 2 link={float(np.max(whole)):g}, got {float(np.max(ratio)):g}: decisions would wait"
            " for the draft model; use predict, which includes this"
        )


_ROUNDING = 1e-12
"""Relative error within which a ratio counts as a whole number."""


def claim_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up with any number of replicas: min(1/(1 - alpha), 1/c), at least 1.

    Each rejection takes a pass of the target, and each token a pass of the draft model or of the target.

    >>> claim_bound(ClaimTerms({"acceptance_rate": 0.75, "cost_ratio": 0.1})).value
    4.0
    """
    rate, ratio = terms.best("acceptance_rate"), terms.cost_ratio
    limits = (np.inf if rate == 1 else 1 / (1 - rate), 1 / ratio if ratio else np.inf)
    value = float(max(min(limits), 1.0))
    return Limit(value, f"speed-up <= min(1 / (1 - a), 1 / c) = {value:.4g}")
