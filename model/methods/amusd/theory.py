"""AMUSD in closed form: the draft model never stops, and the target verifies what has arrived [McDanel2024].

The paper has no formula. Between two rejections nothing is random, and a rejection drops what was drafted after it: the decoding
renews itself there. `predict` is exact for a finite number of tokens, under any law of single positions
(`model.methods.amusd.finite_amusd`), except for `draft_stop` "pass" with `min_waiting` 0, where the pass in progress at a rejection
matters for longer.

The equations are for many tokens with i.i.d. acceptances. With times in passes of the target, c a draft pass, L a transfer, m
`min_waiting` and gamma `draft_length`:

* No draft outruns its draft model, and each rejection takes a pass, its messages and the wait for m tokens: `rate_bound`.
* With free and instant drafts (c = 0, L = 0) and no bound on them, the first pass after a rejection still reads only m tokens, and
  the second all others: `free_drafts`. AMUSD stays below 1 / (1 - alpha), which speculative decoding reaches with long free drafts.

[McDanel2024] B. McDanel. AMUSD: Asynchronous Multi-Device Speculative Decoding for LLM Acceleration. arXiv:2410.17375.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs import many_costs
from model.costs.steady_prices import SteadyPrices
from model.costs.step_costs import StepCosts
from model.interpret.account import Account, Work
from model.methods.amusd.algorithm import PASS, REJECTION, WAITING, Parameters
from model.methods.amusd.draft_clock import ConcurrentTimes, ConstantTimes
from model.methods.amusd.finite_amusd import draft_times, has_closed_form, moments_of_pairs, work_of_chains
from model.methods.amusd.long_run import decision_times
from model.methods.claim_bounds import ClaimTerms, Limit
from model.methods.concurrent.concurrent_claims import claim_bound
from model.methods.concurrent.concurrent_laws import chains_of, moments_of_points, positions_of
from model.methods.concurrent.concurrent_work import expected_work
from model.methods.draft_model import MAX_DRAFT
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.rounds.round_moments import Moments
from model.outcomes.outcome_laws import constant_rates

__all__ = [
    "claim_bound", "claim_formula", "free_drafts", "operations", "predict", "predict_points", "rate_bound", "slowest", "speedup",
    "steady_state", "timed_work", "timed_work_of_costs",
]  # fmt: skip

Floats = NDArray[np.float64]


# --- A finite decoding ---------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """Predict the decoding of exactly `tokens` tokens, times in the unit of the costs.

    Unit-time sums both units, with draft passes over rejected tokens. `drafted` counts the tokens that the target's passes read.
    Values are nan with `draft_stop` "pass" and `min_waiting` 0.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> cost = UnitCost(40, cost_ratio=0.2)
    >>> predictions = [predict(Parameters(40, 16), 200, Iid(rate), cost) for rate in (0.5, 0.8, 1.0)]
    >>> [round(float(prediction.plain_latency / prediction.latency), 3) for prediction in predictions]
    [1.157, 2.053, 4.831]
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; drafts are walked together for all costs."""
    return predict_by_decoding(_predict_together, points, lambda parameters: _CELLS_OF_A_START)


_CELLS_OF_A_START = 24
"""Numbers by position of one cost, so that some tens of costs are walked together; their starts are in blocks of their own."""


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points of one number of tokens."""
    parameters, tokens = points.parameters, points.tokens
    if tokens > 1 and not has_closed_form(parameters):
        moments = Moments(*np.full((len(Moments._fields), points.law.size), np.nan))
    else:
        moments = moments_of_points(
            points, Parameters.LABEL,
            lambda chains, law, price, _: moments_of_pairs(parameters, tokens, points.cost, chains, law, price),
        )  # fmt: skip
    ratio, units = np.full(points.law.size, 1.0 if tokens == 1 else np.nan), np.full(points.law.size, float(parameters.units))
    times = moments.time, moments.variance, moments.busy, ratio, units, points.plain_times()
    return Prediction(*times, moments.rounds, moments.drafted, moments.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: each token takes a pass and two waits for drafted tokens.

    Within a round trip and `draft_length` + 1 draft passes after any message the tokens that it allows have arrived.
    """
    prices = ConcurrentTimes.of(parameters, tokens, cost)
    wait = 2 * float(prices.link.max()) + (parameters.draft_length + 1) * float(prices.draft.max())
    round_ = float(prices.verify.max()) + 2 * wait
    return tokens * round_, tokens * round_ * (1 + cost.draft_devices)


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of all tokens that both models read, in tokens of the target; every token has a projection onto the vocabulary."""
    drafted = account.of("draft").heads
    return account.of("target").heads + (drafted * cost.operations("draft") if drafted else 0.0)


def timed_work(parameters: Parameters, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work | None:
    """Mean work of the passes of both models under each law, shape (laws,): `model.methods.amusd.finite_amusd.work_of_chains`.

    It depends on the times of passes and links, which decide how many drafted tokens a pass of the target reads, and how many draft
    passes continue a rejected token. It is exact wherever `predict` is; None with `draft_stop` "pass" and `min_waiting` 0, where
    the delay by the pass in progress at a rejection lasts longer than the next draft.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> found = timed_work(Parameters(40, 8, draft_layers=2), 200, [Iid(0.8)], UnitCost(40, cost_ratio=0.2)).at(0).by_model
    >>> round(found["target"].passes, 3), round(found["draft"].passes, 3)
    (73.989, 430.259)
    """
    found = timed_work_of_costs(parameters, tokens, laws, many_costs.joined([cost]))
    return None if found is None else found.at(0)


def timed_work_of_costs(parameters: Parameters, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work | None:
    """`timed_work` at several joined costs, shape (costs, laws)."""
    if tokens > 1 and not has_closed_form(parameters):
        return None
    chains = [chains_of(law, Parameters.LABEL) for law in laws]
    passes_of = partial(work_of_chains, parameters, tokens, cost)
    return expected_work(parameters.layers, parameters.draft_layers, chains, passes_of)


# --- Drafts in the long run -----------------------------------------------------------------------------------------


def speedup(
    acceptance_rate: float, draft_length: int, cost_ratio: float, *, link: float = 0.0, min_waiting: int = WAITING,
    draft_stop: str = PASS,
) -> float:  # fmt: skip
    """Speed-up over plain decoding for many tokens [-]: tokens over time of a draft between two rejections.

    1 / (1 - alpha) tokens, in a mean time that is summed over the position of the rejection until its probability is below
    rounding. The acceptance rate must be below 1, as a draft without rejection has no end.

    Parameters
    ----------
    acceptance_rate, draft_length, min_waiting, draft_stop
        alpha, and the parameters of the method.
    cost_ratio, link
        Times of a draft pass and of a transfer [passes of the target]; a pass takes the same for any number of tokens.

    >>> [round(speedup(0.8, length, 0.2), 3) for length in (3, 4, 8, 16)]
    [1.743, 1.88, 2.142, 2.099]
    >>> round(speedup(0.8, 16, 0.2, min_waiting=0, draft_stop="rejection"), 3), round(speedup(0.8, 16, 0.2, link=1.0), 3)
    (2.207, 1.181)
    """
    alpha = float(checks.array("acceptance_rate", acceptance_rate, 0, _MOST_ACCEPTED))
    checks.number("cost_ratio", cost_ratio, 0)
    checks.number("link", link, 0)
    parameters = Parameters(1, draft_length, min_waiting=min_waiting, draft_stop=draft_stop)
    if not has_closed_form(parameters):
        raise checks.ParameterError(
            f"min_waiting must be at least 1 with draft_stop='{PASS}', got 0: there is no closed form; set draft_stop='{REJECTION}'"
        )
    positions = 2 if alpha == 0 else 2 + math.ceil(math.log(_NEGLIGIBLE) / math.log(alpha))
    time = np.array(decision_times(parameters, positions, cost_ratio, link))
    chance = (1 - alpha) * alpha ** np.arange(positions)
    return float(1 / (1 - alpha) / (chance @ time))


def steady_state(parameters: Parameters, laws: Sequence[Any], prices: SteadyPrices) -> Floats:
    """Time per token in the long run [s], without links, where passes take longer with their width; shape (laws, cells).

    `speedup` for all draws and cells at once: 1 - alpha times the mean time of a draft between two rejections. Times of drafts of
    more than `_MOST_POSITIONS` tokens continue as a line. nan where drafts cannot be treated one by one.

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = SteadyPrices(lambda width: np.ones((1, 1)), np.full((1, 1), 0.2))
    >>> round(1 / float(steady_state(Parameters(1, 8), [Iid(0.8)], flat)[0, 0]), 3), round(speedup(0.8, 8, 0.2), 3)
    (2.142, 2.142)
    """
    rate, gamma = constant_rates(laws, Parameters.LABEL), parameters.draft_length
    if not has_closed_form(parameters):
        return np.full(prices.shape, np.nan)
    every = np.broadcast_to(rate, prices.shape).ravel()
    verify, draft = prices.widths(gamma).reshape(-1, gamma), prices.draft.ravel()
    positions = max(positions_of(rate, _MOST_POSITIONS), 2 * gamma + 2)
    found, together = np.empty(every.size), max(_MOST_TIMES // positions, 1)
    for first in range(0, every.size, together):
        part = slice(first, first + together)
        times = draft_times(parameters, ConstantTimes(verify[part], draft[part], positions + gamma + 1), positions)
        alpha = every[part, None]
        known = ((1 - alpha) * alpha ** np.arange(positions) * times).sum(axis=1)
        last = times[:, positions // 2 :]
        place = np.arange(last.shape[1]) - (last.shape[1] - 1) / 2
        slope = last @ place / (place @ place)  # of least squares: times rise in steps
        alpha = alpha[:, 0]
        found[part] = (1 - alpha) * (known + alpha**positions * times[:, -1]) + alpha**positions * slope
    return np.asarray(found.reshape(prices.shape) + prices.waiting)


_MOST_POSITIONS, _MOST_TIMES = 1024, 200_000
"""Tokens of a draft whose times are computed one by one, and times that are computed together."""
_MOST_ACCEPTED, _MOST_SOLVED, _NEGLIGIBLE = 0.999, 0.99, 1e-18
"""Largest acceptance rate of `speedup`, and of claims; probability of later positions that is left out."""


def rate_bound(
    acceptance_rate: ArrayLike, draft_length: ArrayLike, cost_ratio: ArrayLike, link: ArrayLike = 0.0,
    min_waiting: ArrayLike = WAITING,
) -> Floats:  # fmt: skip
    """Upper bound of `speedup` [-]: 1 / max(c, 1 / gamma, (1 - alpha) R), R the time of a rejection.

    Each token is drafted, in sequence with the others; a pass decides on at most gamma tokens; and after each rejection a message,
    max(m, 1) draft passes and a transfer precede the end of a pass or of its wait: R = 1 + 2 L + m c if m > 0, else
    max(1, 2 L + c).

    >>> float(rate_bound(0.8, 16, 0.2)), float(rate_bound(0.8, 4, 0.1)), float(rate_bound(1, 16, 0.125))
    (3.571428571428572, 4.0, 8.0)
    """
    alpha, gamma = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.whole_array("draft_length", draft_length, 1)
    c, transfer = checks.array("cost_ratio", cost_ratio, 0), checks.array("link", link, 0)
    least = checks.whole_array("min_waiting", min_waiting, 0)
    after = np.where(least > 0, 1 + 2 * transfer + least * c, np.maximum(1.0, 2 * transfer + c))
    return np.asarray(1 / np.maximum(np.maximum(c, 1 / gamma), (1 - alpha) * after))


def free_drafts(acceptance_rate: ArrayLike, min_waiting: ArrayLike = WAITING) -> Floats:
    """Speed-up with instant drafts of any length [-]: 1 / ((1 - alpha) (1 + alpha^(m + 1))); infinite at alpha = 1.

    The first pass after a rejection reads the m tokens that the target has waited for and decides on one more; the second reads all
    others. With m = 0 it is the limit of PEARL.

    >>> free_drafts(0.8, [0, 1, 2, 8]).round(3).tolist()
    [2.778, 3.049, 3.307, 4.408]
    """
    alpha, least = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.whole_array("min_waiting", min_waiting, 0)
    with np.errstate(divide="ignore"):
        return np.asarray(1 / ((1 - alpha) * (1 + alpha ** (least + 1.0))))


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_formula(terms: ClaimTerms) -> Limit:
    """Largest `speedup` over `min_waiting`, with drafts that stop at rejections.

    Without an acceptance rate, and above one of 0.99, where it takes long, it is the bound. A claim without a draft length has the
    longest.

    >>> round(claim_formula(ClaimTerms({"acceptance_rate": 0.8, "cost_ratio": 0.2})).value, 3)
    2.26
    """
    rate, gamma = terms.stated("acceptance_rate"), terms.stated("draft_length")
    length = MAX_DRAFT if gamma is None else int(gamma)
    if rate is None or rate > _MOST_SOLVED or not 1 <= length <= MAX_DRAFT:
        return claim_bound(terms)
    waits = range(min(length, WAITING + 1))
    value = max(speedup(rate, length, terms.cost_ratio, min_waiting=least, draft_stop=REJECTION) for least in waits)
    at = f"a = {rate:.4g}, c = {terms.cost_ratio:.4g}"
    return Limit(value, f"speed-up of independent acceptances at {at}: {value:.4g}")
