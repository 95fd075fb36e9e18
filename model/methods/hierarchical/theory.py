"""Hierarchical speculative decoding in closed form: a small model drafts for a medium one, which drafts for the large one.

Tokens and cost of a round, with a1 = `medium_acceptance_rate` (of the small model's tokens by the medium one), a2 =
`acceptance_rate` (of the medium model's tokens by the large one), gamma = `draft_length`, c = `cost_ratio` and m =
`medium_cost_ratio` (pass times of the small and the medium model relative to the large), E[n] = a1 + ... + a1^gamma, E2 =
(1 - a2^(gamma+1)) / (1 - a2):

    reading      tokens                     cost in passes of the large model
    literal      E2                         1 + gamma c + m (1 + gamma - E[n])
    reuse        E2                         1 + gamma c + m (gamma - E[n] + a1^gamma)
    bonus        E2 + (a1 a2)^gamma a2      as reuse
    recursive    E2                         1 + m R(gamma) + c D(gamma), R and D of a1 and the inner draft length

The readings are those of `model.methods.hierarchical.algorithm`; R and D are `model.methods.speculative.theory.target_runs` and
`draft_runs`. All tokens are independent. In the simulations outcomes belong to output positions, and those of the small model are
used again after a token that the large model rejects. This changes no mean, because earlier outcomes alone decide whether a round
starts at a position. `predict` has the variance, and laws with dependent outcomes. For sampled `literal`, a2 is the acceptance rate
of the tokens that are actually offered, which do not have the medium model's distribution. Every function broadcasts over numpy
arrays.

[Deck] N. Tulsian, V. Goyal, R. Aggarwal. Speculative decoding (slides), "Hierarchical speculative decoding".
[Chen2024] Z. Chen et al. Cascade Speculative Drafting for Even Faster LLM Inference. NeurIPS 2024, arXiv:2312.11462.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.costs.width_curve import CurveLike, as_curve
from model.interpret.account import Account, Work, of_passes
from model.methods.claim_bounds import ClaimTerms, Limit, drafting_bound
from model.methods.hierarchical import finite_hierarchical
from model.methods.hierarchical.algorithm import READINGS, Parameters
from model.methods.prediction import (
    DecodingPoints,
    MethodChoice,
    Prediction,
    PredictionPoints,
    distinct_pairs,
    predict_by_decoding,
)
from model.methods.rounds.round_moments import Moments
from model.methods.speculative.theory import draft_runs, expected_tokens, sum_of_powers, target_runs

Floats = NDArray[np.float64]


# --- A decoding as a whole --------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, laws: dict[str, Any], cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` tokens, with cut last drafts, reused and dependent outcomes; times in the costs' unit.

    `laws` has the laws of `accept` and `medium_accept`. The variance is nan in the reading `recursive`.

    >>> from model.outcomes.outcome_laws import Iid
    >>> choice, unit = Parameters(40, draft_length=3), UnitCost(40, cost_ratio=0.117, medium_cost_ratio=0.5)
    >>> found = predict(choice, 128, {"accept": Iid(0.771), "medium_accept": Iid(0.972)}, unit)
    >>> round(float(found.plain_latency / found.latency), 3), round(float(speedup(0.771, 0.972, 3, 0.117, 0.5)), 3)
    (1.455, 1.46)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [laws], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; several laws and costs are followed together."""
    for group in points.groups().groups:
        group.check_tokens()
    return predict_by_decoding(_predict_together, points, lambda parameters: 6 * (parameters.longest_draft + 1))


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points of one number of tokens."""
    parameters, cost, tokens = points.parameters, points.cost, points.tokens
    law, price, pair = distinct_pairs(points.law, points.price)
    prices = finite_hierarchical.prices(parameters, cost, tokens)
    moments = finite_hierarchical.moments_of_pairs(parameters, tokens, points.laws, prices, law, price)
    found = Moments(*(each[pair] for each in moments))
    alike = (np.asarray(cost.draft_devices) == 1) & (prices.link == 0)
    ratio, units = np.where(alike, 1.0, np.nan)[points.price], np.full(points.law.size, float(parameters.units))
    times = found.time, found.variance, found.busy, ratio, units, points.plain_times()
    return Prediction(*times, found.rounds, found.drafted, found.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: more passes of the smaller models, and more moves, than any round has."""
    price = finite_hierarchical.prices(parameters, cost, tokens)
    mediums = parameters.longest_draft + 2
    drafts = mediums * max(parameters.draft_length, parameters.inner_draft_length or 0)
    small = float(price.small[:, 1].max() + price.late_small.max())
    medium = float(max(price.medium[:, 1].max(), price.medium_verify.max()) + price.late_verify.max())
    smaller, verify = drafts * small + mediums * medium, float(price.verify.max())
    return tokens * (smaller + verify + 2 * (drafts + mediums + 1) * price.link), tokens * (smaller * price.share + verify)


def work(parameters: Parameters, tokens: int, laws: dict[str, Any]) -> Work:
    """Expected work of the passes of the three models; totals that depend on positions and widths are nan.

    The passes of a model are the increase of the time if each of its passes takes one unit of time more.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = work(Parameters(40, draft_length=3), 128, {"accept": Iid(0.79), "medium_accept": Iid(0.9)}).by_model
    >>> round(found["target"].passes, 3), round(found["draft"].passes, 3)
    (44.446, 131.273)
    """
    return work_of_laws(parameters, tokens, [laws]).at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[dict[str, Any]]) -> Work:
    """`work` under each of several laws, as arrays of shape (laws,)."""
    costs = [UnitCost(1, cost_ratio=small, medium_cost_ratio=medium) for small, medium in ((0, 0), (1, 0), (0, 1))]
    choice, law = (each.ravel() for each in np.indices((len(costs), len(laws))))
    choices = [MethodChoice(parameters, tokens, cost) for cost in costs]
    predicted = predict_points(PredictionPoints(choices, laws, choice, law, np.ones(law.size, dtype=np.bool_)))
    assert predicted.rounds is not None and predicted.drafted is not None  # noqa: PT018
    rounds, offered = predicted.rounds[: len(laws)], predicted.drafted[: len(laws)]
    unpaid, small, medium = predicted.busy.reshape(len(costs), len(laws))
    passes = {"medium": medium - unpaid, "draft": small - unpaid}
    depths = {"medium": parameters.medium_layers, "draft": parameters.draft_layers}
    found = {"target": of_passes(parameters.layers, rounds, rounds + offered, heads=rounds + offered)}
    return Work(found | {role: of_passes(depths[role], each) for role, each in passes.items() if each.any()})


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of rounds counted by (accepted, offered) tokens, in units of one token in the large model.

    A pass of the large model covers the offered tokens and one more; a pass of the medium model covers the tokens that the small
    model has drafted since its last pass, and one more.
    """
    large = sum(count * (offered + 1) for (_, offered), count in rounds.items())
    small, medium = (account.passes_of[role] for role in ("draft", "medium"))
    return large + small * cost.operations("draft") + (small + medium) * cost.operations("medium")


# --- One round --------------------------------------------------------------------------------------------------------


def tokens_per_round(
    acceptance_rate: ArrayLike, medium_acceptance_rate: ArrayLike, draft_length: ArrayLike, *, reading: str = "literal"
) -> Floats:
    """Expected tokens of a round: E2 = (1 - a2^(gamma+1)) / (1 - a2), plus (a1 a2)^gamma a2 in the reading `bonus` [tokens].

    Eq. 1 of Leviathan et al. at the rate of the medium model. The bonus token counts if the medium model accepts the small model's
    whole draft, and the large model accepts all of it and the bonus token.

    >>> float(tokens_per_round(0.5, 1.0, 2)), float(tokens_per_round(0.5, 1.0, 2, reading="bonus"))
    (1.75, 1.875)
    """
    checks.one_of("reading", reading, READINGS)
    rate, medium, gamma = _rate(acceptance_rate), _rate(medium_acceptance_rate, "medium_acceptance_rate"), _length(draft_length)
    tokens = expected_tokens(rate, gamma)
    if reading == "bonus":
        return np.asarray(tokens + medium**gamma * rate ** (gamma + 1))
    return np.array(np.broadcast_to(tokens, np.broadcast_shapes(tokens.shape, medium.shape)))


def medium_passes(
    medium_acceptance_rate: ArrayLike,
    draft_length: ArrayLike,
    *,
    reading: str = "literal",
    inner_draft_length: ArrayLike | None = None,
) -> Floats:
    """Expected passes of the medium model in a round, as in the table above [passes].

    In `recursive`, R(gamma) of a decoding of gamma tokens by drafts of `inner_draft_length`.

    >>> [float(medium_passes(0.5, 2, reading=name)) for name in ("literal", "reuse", "bonus")]
    [2.25, 1.5, 1.5]
    >>> float(medium_passes(1.0, 7, reading="recursive", inner_draft_length=3))
    2.0
    """
    inner = _inner(reading, inner_draft_length)
    rate, gamma = _rate(medium_acceptance_rate, "medium_acceptance_rate"), _length(draft_length)
    if inner is not None:
        return target_runs(gamma, rate, inner)
    kept = rate * sum_of_powers(rate, gamma)
    if reading == "literal":
        return np.asarray(1 + gamma - kept)
    # gamma - E[n] + a1^gamma, written as 1 + expected missing tokens among gamma - 1.
    return np.asarray(1 + (gamma - 1) - rate * sum_of_powers(rate, gamma - 1))


def small_passes(
    medium_acceptance_rate: ArrayLike,
    draft_length: ArrayLike,
    *,
    reading: str = "literal",
    inner_draft_length: ArrayLike | None = None,
) -> Floats:
    """Expected passes of the small model in a round: gamma, or in the reading `recursive` D(gamma) of the inner drafts [passes].

    >>> float(small_passes(0.5, 3)), float(small_passes(1.0, 7, reading="recursive", inner_draft_length=3))
    (3.0, 5.0)
    """
    inner = _inner(reading, inner_draft_length)
    rate, gamma = _rate(medium_acceptance_rate, "medium_acceptance_rate"), _length(draft_length)
    if inner is not None:
        return draft_runs(gamma, rate, inner)
    return np.array(np.broadcast_to(gamma, np.broadcast_shapes(gamma.shape, rate.shape)))


def cost_per_round(
    medium_acceptance_rate: ArrayLike,
    draft_length: ArrayLike,
    cost_ratio: ArrayLike,
    medium_cost_ratio: ArrayLike,
    *,
    reading: str = "literal",
    inner_draft_length: ArrayLike | None = None,
    verify_cost: CurveLike | None = None,
) -> Floats:
    """Expected time of a round, as in the table above [single-token passes of the large model].

    With `verify_cost` its 1 is t(gamma + 1) / t(1), and with a bonus token t(gamma + 2) / t(1). The time of the medium model's
    passes does not depend on their width.

    >>> round(float(cost_per_round(0.944, 3, 0.117, 0.5, reading="reuse")), 3)
    1.934
    >>> float(cost_per_round(1.0, 3, 0.0, 0.5, reading="reuse"))  # a perfect and free small model: one medium pass
    1.5
    """
    small, medium = checks.array("cost_ratio", cost_ratio, 0), checks.array("medium_cost_ratio", medium_cost_ratio, 0)
    drafting = small * small_passes(medium_acceptance_rate, draft_length, reading=reading, inner_draft_length=inner_draft_length)
    passes = medium_passes(medium_acceptance_rate, draft_length, reading=reading, inner_draft_length=inner_draft_length)
    verifying = _verification(_rate(medium_acceptance_rate), _length(draft_length), reading, verify_cost)
    return np.asarray(verifying + drafting + medium * passes)


def speedup(
    acceptance_rate: ArrayLike,
    medium_acceptance_rate: ArrayLike,
    draft_length: ArrayLike,
    cost_ratio: ArrayLike,
    medium_cost_ratio: ArrayLike,
    *,
    reading: str = "literal",
    inner_draft_length: ArrayLike | None = None,
    verify_cost: CurveLike | None = None,
) -> Floats:
    """Speed-up over plain decoding, for many tokens: expected tokens over expected cost of a round.

    >>> round(float(speedup(0.771, 0.972, 3, 0.117, 0.5)), 2)  # the hierarchy of the slides, with fitted rates
    1.46
    """
    tokens = tokens_per_round(acceptance_rate, medium_acceptance_rate, draft_length, reading=reading)
    cost = cost_per_round(
        medium_acceptance_rate, draft_length, cost_ratio, medium_cost_ratio,
        reading=reading, inner_draft_length=inner_draft_length, verify_cost=verify_cost,
    )  # fmt: skip
    return np.asarray(tokens / cost)


# --- Break-even -------------------------------------------------------------------------------------------------------


def breakeven_accepted(draft_length: ArrayLike, cost_ratio: ArrayLike, medium_cost_ratio: ArrayLike) -> Floats:
    """Break-even of the expected tokens E[n] that the medium model accepts, in the reading `literal`: 1 + gamma c / m [tokens].

    Above it the hierarchy is faster than speculative decoding with the large and the medium model at the same draft length, because
    1 + gamma c + m (1 + gamma - E[n]) < 1 + gamma m. In `reuse` E[n] + 1 - a1^gamma must exceed this value.

    >>> round(float(breakeven_accepted(3, 0.117, 0.5)), 2)
    1.7
    """
    gamma, small, medium = _length(draft_length), checks.array("cost_ratio", cost_ratio, 0), _medium_ratio(medium_cost_ratio)
    return np.asarray(1 + gamma * small / medium)


# --- Another hierarchy ------------------------------------------------------------------------------------------------


def cascade_speedup(
    acceptance_rate: ArrayLike,
    medium_acceptance_rate: ArrayLike,
    inner_rounds: ArrayLike,
    inner_draft_length: ArrayLike,
    cost_ratio: ArrayLike,
    medium_cost_ratio: ArrayLike,
) -> Floats:
    """Speed-up of a vertical cascade with n = `inner_rounds`: (1 - a2 phi(a2)^n) / ((1 - a2) (1 + n m + n k c)).

    The expected walltime improvement factor of a vertical cascade in [Chen2024]: the medium model makes n speculative rounds with
    inner drafts of k = `inner_draft_length`, and offers all their tokens. phi(x) = 1 - (1 - x) (1 + a1 x + ... + (a1 x)^k) is the
    generating function of the tokens of a round. With n = 1, k = 0 it is Theorem 3.8 of Leviathan et al. with gamma = 1.

    >>> round(float(cascade_speedup(0.8, 0.6, 1, 0, 0.1, 0.3)), 6), round(1.8 / 1.3, 6)
    (1.384615, 1.384615)
    >>> round(float(cascade_speedup(1.0, 1.0, 2, 3, 0.0, 0.5)), 6)  # 2 rounds of 4 tokens, and one more
    4.5
    """
    rate, medium = _rate(acceptance_rate), _rate(medium_acceptance_rate, "medium_acceptance_rate")
    n = checks.whole_array("inner_rounds", inner_rounds, 0)
    k = checks.whole_array("inner_draft_length", inner_draft_length, 0)
    small, ratio = checks.array("cost_ratio", cost_ratio, 0), checks.array("medium_cost_ratio", medium_cost_ratio, 0)
    # As sums of powers, which avoid cancellation near a2 = 1: 1 - phi^n = (1 - phi) (1 + phi + ... + phi^(n-1)).
    series = sum_of_powers(medium * rate, k + 1)
    phi = np.asarray(1 - (1 - rate) * series)
    return np.asarray((1 + rate * series * sum_of_powers(phi, n)) / (1 + n * ratio + n * k * small))


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _rate(values: ArrayLike, name: str = "acceptance_rate") -> Floats:
    return checks.array(name, values, 0, 1)


def _length(values: ArrayLike) -> Floats:
    return checks.whole_array("draft_length", values, 1)


def _medium_ratio(values: ArrayLike) -> Floats:
    ratio = checks.array("medium_cost_ratio", values, 0)
    if np.any(ratio == 0):
        raise checks.ParameterError("medium_cost_ratio must be above 0, got 0; a free medium model has no break-even")
    return ratio


def _inner(reading: str, inner_draft_length: ArrayLike | None) -> Floats | None:
    checks.one_of("reading", reading, READINGS)
    if reading != "recursive":
        if inner_draft_length is not None:
            raise checks.ParameterError(
                f"inner_draft_length must be left out for reading {reading!r}, got {checks.shown(inner_draft_length)};"
                " only 'recursive' has inner drafts"
            )
        return None
    if inner_draft_length is None:
        raise checks.ParameterError("inner_draft_length must be given for reading 'recursive', got none")
    return checks.whole_array("inner_draft_length", inner_draft_length, 0)


def _verification(medium: Floats, gamma: Floats, reading: str, verify_cost: CurveLike | None) -> Floats:
    if verify_cost is None:
        return np.asarray(1.0)
    curve = as_curve(verify_cost)
    if reading != "bonus":
        return curve.relative(gamma + 1)
    longer = medium**gamma
    return np.asarray((1 - longer) * curve.relative(gamma + 1) + longer * curve.relative(gamma + 2))


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up if drafts are free: tokens that the large model accepts per round, of at most `draft_length` + 1 offered.

    >>> claim_bound(ClaimTerms({"draft_length": 3})).value  # the reading `bonus` offers four tokens
    5.0
    """
    length = terms.stated("draft_length")
    return drafting_bound(terms.free() if length is None else terms.free().having(draft_length=length + 1))
