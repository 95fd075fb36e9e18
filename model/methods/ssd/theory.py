"""SSD in closed form: prepared drafts hide the time of drafting after a hit [Kumar2026].

`predict` is exact for a finite number of tokens, under any law of ranks that is independent by position
(`model.methods.ssd.finite_ssd`). `round_time` and `speedup` are its limit for many tokens.

The paper's walltime (in passes of the target) is (p E_hit + (1 - p) E_miss) / (p max(1, T_p) + (1 - p)(1 + T_b)):
p is the share of rounds that begin with a hit, E the tokens of a round, T_p the time of a preparation and T_b of the backup. With
drafts just in time E_hit = E_miss. Here a miss also waits for the preparation, as in the paper's engine, which adds
(1 - p) max(0, T_p - 1) to the denominator: the formulas agree where T_p <= 1, and only there.

[Kumar2026] T. Kumar, T. Dao, A. May. Speculative Speculative Decoding. arXiv:2603.03251.
"""

from __future__ import annotations

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
from model.methods.claim_bounds import ClaimTerms, Limit, drafting_bound
from model.methods.concurrent.concurrent_work import expected_work
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
from model.methods.ssd.algorithm import DRAFT, Parameters
from model.methods.ssd.fan_out import hit_probability
from model.methods.ssd.finite_ssd import expected_passes, moments_of_pairs, rank_tables, round_tables
from model.outcomes.position_ranks import PositionRankRates

Floats = NDArray[np.float64]


# --- A finite decoding ---------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: Any, cost: StepCosts) -> Prediction:
    """Predict the decoding of exactly `tokens` tokens, times in the unit of the costs; cut drafts at the end are included.

    A round takes the longer of the target's pass and link + preparation + link; a miss adds link + drafts + link if it drafts
    just in time. The preparation is a pass of the draft model over the whole draft and K passes over all branches. Unit-time sums
    both units.

    >>> from model.costs.layer_times import UnitCost
    >>> law, cost = PositionRankRates.power_law(0.8, 0.5, 5), UnitCost(40, cost_ratio=0.1)
    >>> prediction = predict(Parameters(40, 4, 4), 2000, law, cost)
    >>> round(float(prediction.plain_latency / prediction.latency), 3), round(speedup(Parameters(40, 4, 4), law, 0.1), 3)
    (2.993, 2.996)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; rounds are tabulated together for all costs."""
    return predict_by_decoding(_predict_together, points, lambda parameters: _CELLS_OF_A_START)


_CELLS_OF_A_START = 24
"""Numbers by position of one cost: four tables by the end and the state of the round, three of misses, and times of passes."""


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points of one number of tokens."""
    parameters, tokens = points.parameters, points.tokens
    law, price, pair = distinct_pairs(points.law, points.price)
    moments = Moments(*(each[pair] for each in moments_of_pairs(parameters, tokens, points.cost, points.laws, law, price)))
    ratio, units = np.full(points.law.size, 1.0 if tokens == 1 else np.nan), np.full(points.law.size, float(parameters.units))
    times = moments.time, moments.variance, moments.busy, ratio, units, points.plain_times()
    return Prediction(*times, moments.rounds, moments.drafted, moments.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every round generates only one token, after a miss."""
    tables = round_tables(parameters, tokens, cost)
    pairs = (tables.time, tables.missed_time), (tables.busy, tables.missed_busy)
    time, busy = (tokens * float(rounds.max() + missed.max()) for rounds, missed in pairs)
    return time, busy


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of all tokens that both models read, in tokens of the target; every token has a projection onto the vocabulary."""
    drafted = account.of("draft").heads
    return account.of("target").heads + (drafted * cost.operations("draft") if drafted else 0.0)


def timed_work(parameters: Parameters, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work:
    """Mean work of the passes of both models under each law, shape (laws,): `model.methods.ssd.finite_ssd.expected_passes`.

    Only the last preparation depends on times: the end of the sequence stops it.

    >>> from model.costs.layer_times import UnitCost
    >>> law, cost = PositionRankRates.power_law(0.8, 0.5, 5), UnitCost(40, cost_ratio=0.1)
    >>> found = timed_work(Parameters(40, 4, 4, draft_layers=2), 200, [law], cost).at(0).by_model
    >>> round(found["target"].passes, 3), round(found["draft"].passes, 3), round(found["draft"].heads, 3)
    (59.96, 370.343, 5037.182)
    """
    return timed_work_of_costs(parameters, tokens, laws, many_costs.joined([cost])).at(0)


def timed_work_of_costs(parameters: Parameters, tokens: int, laws: Sequence[Any], cost: StepCosts) -> Work:
    """`timed_work` at several joined costs, shape (costs, laws)."""
    tables, passes_of = [rank_tables(law, tokens) for law in laws], partial(expected_passes, parameters, tokens, cost)
    return expected_work(parameters.layers, parameters.draft_layers, tables, passes_of)


# --- Rounds in the long run -----------------------------------------------------------------------------------------


def expected_tokens(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Mean tokens per round with drafts just in time: 1 + a + ... + a^K, as in speculative decoding, for any hit rate [tokens].

    >>> float(expected_tokens(0.5, 2))
    1.75
    """
    rate, length = checks.array("acceptance_rate", acceptance_rate, 0, 1), checks.whole_array("draft_length", draft_length, 1)
    return np.asarray(sum_of_powers(rate, length + 1))


def preparation_time(draft_length: int, cost_ratio: float, link: float = 0.0) -> float:
    """Time of a preparation with its links [passes of the target]: (K + 1) c + 2 L, if passes take the same for any width.

    >>> preparation_time(4, 0.125, 0.0625)
    0.75
    """
    checks.whole("draft_length", draft_length, 1)
    checks.number("cost_ratio", cost_ratio, 0)
    checks.number("link", link, 0)
    return (draft_length + 1) * cost_ratio + 2 * link


def round_time(hit_rate: ArrayLike, draft_length: int, cost_ratio: float, link: float = 0.0) -> Floats:
    """Mean time of a round with drafts just in time [passes of the target]: max(1, (K + 1) c + 2 L) + (1 - p) (K c + 2 L).

    p is the probability that a round begins with a prepared draft. `link` is in passes of the target.

    >>> float(round_time(1.0, 4, 0.125)), float(round_time(0.0, 4, 0.125))
    (1.0, 1.5)
    """
    missed = 1 - checks.array("hit_rate", hit_rate, 0, 1)
    backup = draft_length * cost_ratio + 2 * link
    return np.asarray(max(1.0, preparation_time(draft_length, cost_ratio, link)) + missed * backup)


def speedup(parameters: Parameters, law: PositionRankRates, cost_ratio: float, link: float = 0.0) -> float:
    """Speed-up over plain decoding for many tokens [-]; passes take the same for any width.

    Without drafts just in time rounds with and without a draft alternate: a round without one yields one token, and after it the
    outcome has been prepared with probability h_0, the probability of ranks 1 to F_K. The share of rounds that begin with a draft
    is h_0 / (1 - h + h_0), where h is the hit probability of a whole draft.

    >>> speedup(Parameters(1, 4, 1), PositionRankRates([1.0]), 0.125)
    5.0
    >>> speedup(Parameters(1, 4, 1, backup="none"), PositionRankRates([0.0, 1.0]), 0.1)
    1.0
    """
    alpha, longest = float(law.rates[0]), parameters.draft_length
    hit = hit_probability(law, parameters.fan_outs)
    tokens = float(expected_tokens(alpha, longest))
    if parameters.backup == DRAFT:
        return tokens / float(round_time(hit, longest, cost_ratio, link))
    share = _drafted_share(parameters, law)
    return (share * tokens + 1 - share) / max(1.0, preparation_time(longest, cost_ratio, link))


def _drafted_share(parameters: Parameters, law: PositionRankRates) -> float:
    """Share of rounds that verify a draft, of many tokens."""
    if parameters.backup == DRAFT:
        return 1.0
    after_empty = float(law.rates[: parameters.fan_outs[-1]].sum())
    return after_empty / (1 - hit_probability(law, parameters.fan_outs) + after_empty) if after_empty else 0.0


def steady_state(parameters: Parameters, laws: Sequence[Any], prices: SteadyPrices) -> Floats:
    """Time per token in the long run [s], without links, where the target's passes take longer with their width; (laws, cells).

    The rounds of `speedup`, each at its own price: a pass over K + 1 tokens, or over one where no draft was there, and K passes of
    the draft over all branches. Several running sequences, with independent outcomes, share their rounds: all of them wait for
    drafts just in time if any of them missed.

    >>> flat = SteadyPrices(lambda width: np.ones((1, 1)), np.full((1, 1), 0.15))
    >>> law = PositionRankRates.power_law(0.8, 0.5, 5)
    >>> print((1 / steady_state(Parameters(40, 4, 4), [law], flat)).round(3), round(speedup(Parameters(40, 4, 4), law, 0.15), 3))
    [[2.842]] 2.842
    """
    longest = parameters.draft_length
    for law in laws:
        if not isinstance(law, PositionRankRates):
            raise checks.ParameterError(
                f"ranks must be as likely at every position for the time per token of {Parameters.SHORT_LABEL} in the long run, got"
                f" a law that is not, {type(law).__name__}; predict a number of tokens instead"
            )
    alpha = np.array([[float(law.rates[0])] for law in laws])
    share = np.array([[_drafted_share(parameters, law)] for law in laws])
    hit = np.array([[hit_probability(law, parameters.fan_outs)] for law in laws])
    preparation = prices.draft + longest * prices.branched(parameters.branches)
    drafted, empty = (np.maximum(prices.verify(width), preparation) for width in (longest + 1, 1))
    if parameters.backup == DRAFT:
        drafted = drafted + (1 - hit**prices.sequences) * longest * prices.draft
    tokens = share * expected_tokens(alpha, longest) + 1 - share
    return np.asarray((share * drafted + (1 - share) * empty) / tokens + prices.waiting)


def paper_speedup(hit_rate: float, tokens: float, tokens_missed: float, primary: float, backup: float) -> float:
    """Walltime speed-up of the paper, in which a miss does not wait for the preparation [-]; times in passes of the target.

    >>> paper_speedup(1.0, 3.0, 3.0, 0.5, 0.5), paper_speedup(0.0, 3.0, 3.0, 0.5, 0.5)
    (3.0, 2.0)
    """
    checks.number("hit_rate", hit_rate, 0, 1)
    time = hit_rate * max(1.0, primary) + (1 - hit_rate) * (1 + backup)
    return (hit_rate * tokens + (1 - hit_rate) * tokens_missed) / time


def largest_gain(draft_length: int) -> float:
    """Largest speed-up over drafting in turn on the same two units, without transfers [-]: 1 + K / (K + 1), at c = 1 / (K + 1).

    (1 + K c) / max(1, (K + 1) c) with hits only: below 2 for every draft length, as a preparation takes one draft pass more than
    the draft that it hides.

    >>> largest_gain(4)
    1.8
    """
    checks.whole("draft_length", draft_length, 1)
    return 1 + draft_length / (draft_length + 1)


def break_even_hit_rate(draft_length: int, cost_ratio: float, link: float = 0.0) -> float:
    """Hit rate from which SSD with drafts just in time is at least as fast as drafting in turn on the same two units [-].

    Drafting in turn takes 1 + K c + 2 L for the same tokens. So p must be at least (max(1, (K + 1) c + 2 L) - 1) / (K c + 2 L):
    none where the preparation fits into the target's pass. It is at most 1 if c <= 1, so that there always is a hit rate that
    pays.

    >>> break_even_hit_rate(4, 0.125), round(break_even_hit_rate(4, 0.25), 3)
    (0.0, 0.25)
    """
    in_turn = draft_length * cost_ratio + 2 * link
    longer = max(1.0, preparation_time(draft_length, cost_ratio, link)) - 1
    return longer / in_turn if in_turn else 0.0


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up for any dependence between outcomes, and any fan-out: (1 + a t) / max(v(1 + t), c (1 + t)), at least 1.

    As `model.methods.claim_bounds.drafting_bound`, with t tested tokens per round, but each round takes only the longer of the
    target's pass and of 1 + t draft passes: the prepared drafts take as many as tokens are tested, and one reads the draft.

    >>> claim_bound(ClaimTerms({"draft_length": 3})).value, claim_bound(ClaimTerms({"draft_length": 9, "cost_ratio": 0.4})).value
    (4.0, 2.5)
    >>> round(claim_bound(ClaimTerms({"acceptance_rate": 0.8, "cost_ratio": 0.3})).value, 3)  # t = 1 / c - 1
    2.867
    """
    ratio = terms.cost_ratio
    values = {name: value for name, value in terms.values.items() if name != "cost_ratio"}

    def longer(width: float) -> float:
        return max(terms.verify(width), ratio * width)

    found = drafting_bound(ClaimTerms(values, longer) if ratio else ClaimTerms(values, terms.verify))
    return found if found.value >= 1 else Limit(1.0, f"speed-up <= 1, as a draft pass takes {ratio:.4g} passes of the target")


def claim_formula(terms: ClaimTerms) -> Limit:
    """`speedup` with hits only, (1 + a + ... + a^K) / max(1, (K + 1) c), where acceptance rate and draft length are stated; else
    the bound.

    >>> round(claim_formula(ClaimTerms({"acceptance_rate": 0.8, "draft_length": 4, "cost_ratio": 0.25})).value, 3)
    2.689
    """
    rate, length = terms.stated("acceptance_rate"), terms.stated("draft_length")
    if rate is None or length is None or length < 1:
        return claim_bound(terms)
    time = max(1.0, preparation_time(int(length), terms.cost_ratio))
    value = float(expected_tokens(rate, int(length))) / time
    at = f"a = {rate:.4g}, K = {length:g}, c = {terms.cost_ratio:.4g}"
    return Limit(value, f"speed-up of independent acceptances and of hits only at {at}: {value:.4g}")
