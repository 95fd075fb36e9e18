"""PEARL in closed form: drafting and verifying concurrently, on separate units [Liu2024].

A round waits for both models: it takes the longer of a draft of gamma tokens and a pass of the target. While the target verifies
the first token of a new draft, the rest is drafted (pre-verify). If that token is accepted, whole drafts are verified while the
next ones are drafted (post-verify), until a token is rejected. With `draft_stop` "rejection" a round that rejects does not wait for
its draft: it takes the target's pass, or the first draft pass if that token decides and arrives later. `predict` is exact for a
finite number of tokens, under any law of single positions (`model.methods.pearl.finite_pearl`). The equations are its limit for
many tokens with i.i.d. acceptances.

[Liu2024] T. Liu et al. PEARL: Parallel Speculative Decoding with Adaptive Draft Length. arXiv:2408.11850.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.steady_prices import SteadyPrices
from model.costs.step_costs import StepCosts
from model.interpret.account import Account, Work, attended_within
from model.methods.claim_bounds import ClaimTerms, Limit
from model.methods.concurrent.concurrent_claims import claim_bound
from model.methods.concurrent.concurrent_laws import chains_of
from model.methods.concurrent.concurrent_work import ModelPasses, expected_work
from model.methods.pearl.algorithm import DRAFT_STOPS, ROUND, Parameters
from model.methods.pearl.finite_pearl import RoundTables, moments_of_tables, round_tables, rounds_by_end
from model.methods.prediction import (
    DecodingPoints,
    MethodChoice,
    Prediction,
    PredictionPoints,
    distinct_pairs,
    predict_by_decoding,
)
from model.methods.rounds.round_moments import Moments
from model.methods.speculative.theory import sum_of_powers
from model.outcomes.outcome_laws import Chain, constant_rates

__all__ = [
    "claim_bound", "claim_formula", "expected_tokens", "operations", "predict", "predict_points", "slowest", "speedup",
    "steady_state", "timed_work", "work", "work_of_laws",
]  # fmt: skip

Floats = NDArray[np.float64]


# --- A finite decoding ---------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """Predict the decoding of exactly `tokens` tokens, times in the unit of the costs; cut drafts at the end are included.

    A round takes the longer of the target's pass and link + drafts + link; unit-time sums both units. If rejections stop drafts, a
    round that rejects a waiting token takes the target's pass; one that rejects the first drafted token takes the longer of the
    target's pass and link + one draft pass + link; the draft model works until the round ends or all is drafted. `drafted` counts
    the tokens that the target's passes read and verify, not those dropped unread. Tokens per round tend to `expected_tokens` as
    `tokens` grows.

    >>> from model.outcomes.outcome_laws import Iid
    >>> predictions = [predict(Parameters(40, 4), 200, Iid(rate), UnitCost(40, cost_ratio=0.2)) for rate in (0.5, 0.8, 1.0)]
    >>> [round(float(prediction.plain_latency / prediction.latency), 3) for prediction in predictions]
    [1.301, 2.104, 3.922]
    >>> [round(float(speedup(rate, 4, 0.2)), 3) for rate in (0.5, 0.8, 1.0)]
    [1.304, 2.123, 4.0]
    >>> slow, law = UnitCost(40, cost_ratio=0.5), Iid(0.5)  # four draft passes take two of the target
    >>> lockstep, stopped = (predict(Parameters(40, 4, draft_stop=when), 200, law, slow) for when in ("round", "rejection"))
    >>> round(float(lockstep.latency / 40), 3), round(float(stopped.latency / 40), 3)
    (304.041, 206.358)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; rounds are tabulated together for all costs."""
    return predict_by_decoding(_predict_together, points, lambda parameters: 2 * parameters.draft_length + _CELLS_OF_A_START)


_CELLS_OF_A_START = 30
"""Numbers in `RoundTables` of one cost and position: five arrays, by the end and the phase of the round."""


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points of one number of tokens."""
    parameters, cost = points.parameters, points.cost
    tables = _tables(parameters, points.tokens, cost)
    law, price, pair = distinct_pairs(points.law, points.price)
    each = [tables.of(number) for number in range(int(points.price.max()) + 1)]
    found = moments_of_tables([each[number] for number in price.tolist()], [points.laws[number] for number in law.tolist()])
    moments = Moments(*(np.array(column)[pair] for column in zip(*found, strict=True)))
    alike = np.broadcast_to((tables.time == tables.busy).all(axis=(0, 2, 3)), len(each))
    ratio, units = np.where(alike, 1.0, np.nan)[points.price], np.full(points.law.size, float(parameters.units))
    times = moments.time, moments.variance, moments.busy, ratio, units, points.plain_times()
    return Prediction(*times, moments.rounds, moments.drafted, moments.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every round generates only one token."""
    tables = _tables(parameters, tokens, cost)
    return tokens * float(tables.time.max()), tokens * float(tables.busy.max())


def _tables(parameters: Parameters, tokens: int, cost: StepCosts) -> RoundTables:
    return round_tables(parameters.draft_length, tokens, parameters.draft_costs(cost), lockstep=parameters.lockstep)


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of all tokens that both models read, in tokens of the target; every token has a projection onto the vocabulary."""
    drafted = account.of("draft").heads
    return account.of("target").heads + (drafted * cost.operations("draft") if drafted else 0.0)


def work(parameters: Parameters, tokens: int, law: Any) -> Work | None:
    """Mean work of the passes of both models.

    None under laws of records, and if rejections stop drafts: `timed_work` has these. The target reads the last token of the
    sequence and the waiting ones after it; the draft model reads one token per pass.

    >>> from model.outcomes.outcome_laws import Iid
    >>> totals = work(Parameters(40, 4, draft_layers=2), 200, Iid(0.8)).by_model
    >>> round(totals["target"].passes, 3), round(totals["draft"].passes, 3)
    (95.061, 372.284)
    """
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[Any]) -> Work | None:
    """`work` under each of several laws, as arrays of shape (laws,); None if it is not known under one of them."""
    if not parameters.lockstep or not all(isinstance(law, Chain) for law in laws):
        return None
    return timed_work(parameters, tokens, laws, UnitCost(1, cost_ratio=0.0))


def timed_work(parameters: Parameters, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work:
    """Mean work of the passes of both models under each law, shape (laws,), at costs that decide how many draft passes begin.

    If rejections stop drafts, a round makes the draft passes that begin until the order to stop arrives; the last of them counts in
    full. Else costs have no effect.

    >>> from model.outcomes.outcome_laws import Iid
    >>> slow = UnitCost(40, cost_ratio=0.5)
    >>> for stop in DRAFT_STOPS:
    ...     found = timed_work(Parameters(40, 4, draft_stop=stop), 200, [Iid(0.5)], slow).at(0).by_model
    ...     print(round(found["target"].passes, 3), round(found["draft"].passes, 3))
    153.762 604.182
    153.762 506.749
    """
    tables = _tables(parameters, tokens, cost)
    position, width = np.arange(tokens), tables.waiting + 1
    read = np.ones_like(width), width, position * width + width * (width + 1) / 2, position + width
    seen = attended_within(position + tables.waiting, tables.passes, parameters.context_budget)

    def passes_of(chains: list[Any]) -> tuple[ModelPasses, ModelPasses]:
        rounds = np.stack([rounds_by_end(tables, chain) for chain in chains])  # shape (chains, ends, phases, starts)
        made = [(rounds * each).sum(axis=(1, 2, 3)) for each in (*read, tables.passes, seen)]
        passes, tokens_read, attended, cached, drafts, by_drafts = made
        return ModelPasses(passes, tokens_read, attended, cached, tokens_read), ModelPasses.single(drafts, by_drafts)

    return expected_work(parameters.layers, parameters.draft_layers, [chains_of(law, "PEARL") for law in laws], passes_of)


# --- Rounds in the long run -----------------------------------------------------------------------------------------


def expected_tokens(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Mean tokens per round in the long run: (1 - alpha^gamma) / ((1 - alpha) (1 + alpha - alpha^gamma)) [tokens].

    A pre-verify round gives one token; a post-verify round gives 1 + alpha + ... + alpha^(gamma-1). The ratio of post-verify to
    pre-verify rounds is alpha / (1 - alpha^gamma). The mean is gamma at alpha = 1 and 1 at alpha = 0.

    >>> float(expected_tokens(1, 5)), float(expected_tokens(0, 5)), round(float(expected_tokens(0.8, 5)), 3)
    (5.0, 1.0, 2.284)
    """
    rate, gamma = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.whole_array("draft_length", draft_length, 1)
    return np.asarray(sum_of_powers(rate, gamma) / (1 + rate - rate**gamma))


def speedup(
    acceptance_rate: ArrayLike, draft_length: ArrayLike, cost_ratio: ArrayLike, draft_stop: str = ROUND
) -> Floats:
    """Speed-up over plain decoding for many tokens [-]: `expected_tokens` / max(gamma c, 1); gamma / max(gamma c, 1) at alpha = 1.

    If rejections stop drafts, the divisor is the mean time of a round in passes of the target: with b = alpha^(gamma-1) and
    v = (1 - alpha) max(c, 1) + alpha max(gamma c, 1), a pre-verify round takes v, a post-verify round 1 - b + b v.

    >>> float(speedup(1, 5, 0.2)), float(speedup(1, 5, 0.4)), round(float(speedup(0.8, 5, 0.1)), 3)
    (5.0, 2.5, 2.284)
    >>> [round(float(speedup(0.5, 4, 0.5, when)), 3) for when in ("round", "rejection")]
    [0.652, 0.968]
    """
    checks.one_of("draft_stop", draft_stop, DRAFT_STOPS)
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    gamma = checks.whole_array("draft_length", draft_length, 1)
    tokens, whole = expected_tokens(acceptance_rate, gamma), np.maximum(gamma * ratio, 1.0)
    if draft_stop == ROUND:
        return np.asarray(tokens / whole)
    rate = checks.array("acceptance_rate", acceptance_rate, 0, 1)
    decided_first = (1 - rate) * np.maximum(ratio, 1.0) + rate * whole  # passes of a round that decides on its first drafted token
    to_it, post = rate ** (gamma - 1), rate / (1 + rate - rate**gamma)
    return np.asarray(tokens / ((1 - post) * decided_first + post * (1 - to_it + to_it * decided_first)))


def steady_state(parameters: Parameters, laws: Sequence[Any], prices: SteadyPrices) -> Floats:
    """Time per token in the long run [s], without links, where passes take longer with their width; shape (laws, cells).

    The rounds of `speedup`, each at its own price: a pass over one token in pre-verify, over gamma tokens in post-verify.

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = SteadyPrices(lambda width: np.ones((1, 1)), np.full((1, 1), 0.2))
    >>> print((1 / steady_state(Parameters(40, 4), [Iid(0.8)], flat)).round(3), speedup(0.8, 4, 0.2).round(3))
    [[2.123]] 2.123
    """
    rate, gamma = constant_rates(laws, Parameters.LABEL), parameters.draft_length
    first, whole = prices.draft, gamma * prices.draft
    post = rate / (1 + rate - rate**gamma)  # share of post-verify rounds

    def deciding_on_first(verify: Floats) -> Floats:
        """A round that decides on its first drafted token: if that is rejected, it need not wait for the rest of the draft."""
        alone = np.maximum(verify, whole if parameters.lockstep else first)
        return np.asarray((1 - rate) * alone + rate * np.maximum(verify, whole))

    single, several = prices.verify(1), prices.verify(gamma)
    to_it = rate ** (gamma - 1)
    rejecting = np.maximum(several, whole) if parameters.lockstep else several  # a waiting token is rejected
    rounds = (1 - post) * deciding_on_first(single) + post * ((1 - to_it) * rejecting + to_it * deciding_on_first(several))
    return np.asarray(rounds / expected_tokens(rate, gamma) + prices.waiting)


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_formula(terms: ClaimTerms) -> Limit:
    """`speedup` where acceptance rate and draft length are stated, and rejections end rounds; else the bound.

    >>> round(claim_formula(ClaimTerms({"acceptance_rate": 0.8, "draft_length": 5, "cost_ratio": 0.1})).value, 3)
    2.284
    """
    rate, gamma = terms.stated("acceptance_rate"), terms.stated("draft_length")
    if rate is None or gamma is None or gamma < 1:
        return claim_bound(terms)
    value = max(float(speedup(rate, gamma, terms.cost_ratio, stop)) for stop in DRAFT_STOPS)
    at = f"a = {rate:.4g}, K = {gamma:g}, c = {terms.cost_ratio:.4g}"
    return Limit(value, f"speed-up of independent acceptances at {at}: {value:.4g}")
