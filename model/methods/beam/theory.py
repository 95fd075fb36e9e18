"""Speculative decoding for beam search in closed form: Appendix A.4 of [Leviathan2023], and the rule of the slides.

A beam search keeps the k best hypotheses (`beams`), and every step adds a token to each. In a round the draft model makes gamma
steps (`draft_length`), and the target verifies them in one pass. Both rules of `model.methods.beam.algorithm` advance by the
accepted steps and one more. A tested step is accepted with probability `acceptance_rate` (alpha), which means different events:

* `exact`: the target's k best hypotheses are among the draft's u (`draft_beams`), given that the steps before were accepted. It is
  lower than the rate of single tokens, and rises with u.
* `per-beam`: the drafted token of the winning hypothesis is its most likely one. Assumption: all hypotheses
  begin their rounds together at the same cost, and the progress of a round is that of the winning hypothesis.

The unit of time is a single-token pass of the target; c = `cost_ratio` is the time of a pass of the draft model over any number of
hypotheses. t, the time of a pass of the target by its width, is `verify_cost`; without it t = 1. By `arrangement`:

=====================  ============================================  ===============================
rule, arrangement      a round of gamma drafted steps                a step of a plain beam search
=====================  ============================================  ===============================
exact                  gamma c + t(k + u gamma)                      t(k)
per-beam, batched      gamma c + t(k (gamma + 1))                    t(k)
per-beam, sequential   k (gamma c + t(gamma + 1))                    k
per-beam, parallel     gamma c + t(gamma + 1), on k units            1, on k units
=====================  ============================================  ===============================

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.step_costs import PassShape, StepCosts
from model.costs.width_curve import CurveLike, as_curve
from model.interpret.account import Account, Work, of_passes
from model.methods.beam.algorithm import Parameters
from model.methods.claim_bounds import drafting_bound
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.rounds.prices_of_rounds import RoundPrices, operations_of, slowest_of, sums_from, times_by_width
from model.methods.rounds.round_laws import AcceptanceLaw
from model.methods.rounds.round_moments import moments_of_pairs
from model.methods.speculative.theory import claim_formula as speculative_formula
from model.methods.speculative.theory import expected_tokens
from model.steps import LayerSpan

Floats = NDArray[np.float64]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: AcceptanceLaw, cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` steps, with cut last drafts and dependent outcomes; times in the unit of the costs.

    Plain decoding is greedy decoding of one sequence, as for every method.

    >>> from model.outcomes.outcome_laws import Iid
    >>> choice = Parameters(40, draft_length=3, beams=3, rule="per-beam", arrangement="sequential")
    >>> found = predict(choice, 128, Iid(0.79), UnitCost(40, cost_ratio=0.75 / 6.39))
    >>> round(float(found.plain_latency / found.latency), 3)  # .717 for many tokens
    0.713
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points, which are computed together for all laws and costs."""
    for group in points.groups().groups:
        group.check_tokens()
    return predict_by_decoding(_predict_together, points, lambda parameters: 2 * (parameters.draft_length + 1), together="uniform")


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    """Prediction at points of one number of tokens, or of several where times do not depend on the position."""
    parameters, (lengths, length) = points.parameters, points.of_lengths()
    prices = beam_round_prices(parameters, points.cost, points.tokens)
    asked = points.laws, prices, None, points.law, points.price, points.means, length
    found = moments_of_pairs(parameters.draft_length, lengths, True, *asked)
    ratio, units = _constant_ratio(prices.time, prices.busy)[points.price], np.full(points.law.size, float(parameters.units))
    times = found.time, found.variance, found.busy, ratio, units, points.plain_times()
    return Prediction(*times, found.rounds, found.drafted, found.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time."""
    return slowest_of(tokens, beam_round_prices(parameters, cost, tokens))


def work(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Work:
    """Expected work of the passes of both models; totals that depend on positions, and numbers of heads, are nan.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = work(Parameters(40, draft_length=3, beams=4), 128, Iid(0.79)).by_model  # one pass for all beams
    >>> round(found["target"].passes, 3), round(found["draft"].passes, 3)
    (44.446, 131.273)
    """
    found = predict(parameters, tokens, law, UnitCost(1, cost_ratio=0.0, operations_ratio=0.0))
    assert found.rounds is not None and found.drafted is not None and found.operations is not None  # noqa: PT018
    apart = 1 if parameters.arrangement == "batched" else parameters.beams
    rounds, drafted = apart * float(found.rounds), apart * float(found.drafted)
    both = {"target": of_passes(parameters.layers, rounds, float(found.operations))}
    return Work(both | ({"draft": of_passes(parameters.draft_layers, drafted)} if drafted else {}))


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of rounds counted by (accepted, drafted) steps, in units of one token in the target; `account` is unused."""
    return operations_of(rounds, beam_round_prices(parameters, cost))


def _constant_ratio(time: Floats, busy: Floats) -> Floats:
    """Busy units by cost, if they are the same in rounds of every length; else nan."""
    units = (busy / time).reshape(len(time), -1)
    return np.where(np.ptp(units, axis=1) < 1e-12, units[:, 0], np.nan)


def beam_round_prices(parameters: Parameters, cost: StepCosts, tokens: int = 1) -> RoundPrices:
    """Prices of rounds with 0, 1, ..., `draft_length` drafted steps, as in the table above, in the unit of the costs.

    If times depend on the position, for rounds that start at each of `tokens` positions. Of several costs, as one
    (`model.costs.many_costs`), with a leading axis of costs. Separate sub-processes take the dispatch,
    and on other units also the link. Arithmetic counts tokens: for rule `per-beam` k (gamma + 1) in the target and k gamma in the
    draft model; for rule `exact` k + u gamma, and k + u (gamma - 1), because a draft starts from k hypotheses.

    >>> cost = UnitCost(40, cost_ratio=0.1, link=2.0, operations_ratio=0.5)
    >>> for arrangement in ("sequential", "parallel", "batched"):
    ...     choice = Parameters(40, draft_length=1, beams=3, rule="per-beam", arrangement=arrangement)
    ...     print([prices.tolist() for prices in beam_round_prices(choice, cost)])
    [[120.0, 132.0], [120.0, 132.0], [3.0, 7.5]]
    [[42.0, 46.0], [120.0, 132.0], [3.0, 7.5]]
    [[40.0, 44.0], [40.0, 44.0], [3.0, 7.5]]
    """
    beams, drafted = parameters.beams, np.arange(parameters.draft_length + 1.0)
    read = beams + parameters.draft_width * (drafted - 1)  # by the draft model, if it drafts
    axes = (..., *(None,) * (1 if cost.uniform else 3))  # of a number of each cost
    ratio = np.asarray(cost.operations("draft"))[..., None]
    operations = np.asarray(beams + parameters.draft_width * drafted + np.where(drafted > 0, read * ratio, 0.0))
    drafting, verifying = _drafting(parameters, cost, tokens), _verifying(parameters, cost, tokens)
    if not cost.uniform:
        verifying = verifying[..., None, :, :]
    alone, held = drafting + verifying, drafting * np.asarray(cost.draft_devices)[axes] + verifying
    if parameters.arrangement == "batched":
        return RoundPrices(alone, held, operations)
    starting = np.asarray(cost.dispatching(beams))[axes]
    busy = starting + beams * held
    if parameters.arrangement == "sequential":
        return RoundPrices(starting + beams * alone, busy, operations)
    return RoundPrices(starting + np.asarray(cost.link)[axes] * (beams > 1) + alone, busy, operations)


def _verifying(parameters: Parameters, cost: StepCosts, tokens: int) -> Floats:
    """Time of the pass of the target in a round with 0, 1, ... drafted steps, from each position on.

    Shape (..., tokens, steps), or (..., steps) of uniform costs.
    """
    form = parameters.beams, parameters.draft_width, parameters.rule, parameters.arrangement
    widths, whole = pass_width(np.arange(parameters.draft_length + 1), *form), LayerSpan(0, cost.layers)
    tree = parameters.several_hypotheses
    return times_by_width(cost, lambda width: PassShape(whole, width=width, heads=width, tree=tree), widths, tokens)


def _drafting(parameters: Parameters, cost: StepCosts, tokens: int) -> Floats:
    """Time of 0, 1, ... draft steps from each position on; shape (..., 2, tokens, steps), or (..., steps) for uniform costs.

    The first step is a pass over the beams, later steps over the draft's hypotheses. Index 1 of the axis of two is after a
    completely accepted draft: then the first step also reads the token before, which all beams share and the draft model has not
    read.
    """
    cost.require("draft")
    together = parameters.arrangement == "batched"
    beams, wide = (parameters.beams, parameters.draft_width) if together else (1, 1)
    layers = LayerSpan(0, parameters.draft_layers)

    def times(width: int, heads: int, at: ArrayLike) -> Floats:
        return cost.times(PassShape(layers, "draft", width, heads=heads, tree=parameters.several_hypotheses), at)

    drafted, start = np.arange(parameters.draft_length + 1), np.arange(tokens)
    if cost.uniform:
        return np.asarray(drafted * np.asarray(times(beams, beams, 0))[..., None])
    first = times(beams, beams, start)
    after_whole = np.concatenate([first[..., :1], times(beams + 1, beams, start[:-1])], axis=-1)
    none = np.zeros((*first.shape[:-1], parameters.draft_length))  # after the last position
    later = np.concatenate([times(wide, wide, start[1:]), none], axis=-1)
    rest = sums_from(later, parameters.draft_length, tokens)[..., np.maximum(drafted - 1, 0)]
    return np.where(drafted > 0, np.stack([first, after_whole], axis=-2)[..., None] + rest[..., None, :, :], 0.0)


# --- A round ----------------------------------------------------------------------------------------------------------


def expected_steps(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected steps of a round: (1 - alpha^(gamma+1)) / (1 - alpha), Eq. 1 of [Leviathan2023] [steps].

    As for tokens in speculative decoding, because both rules accept drafted steps up to the first rejected one.

    >>> round(float(expected_steps(0.79, 3)), 3)
    2.907
    """
    return expected_tokens(acceptance_rate, draft_length)


def pass_width(drafted: ArrayLike, beams: int, draft_beams: int, rule: str, arrangement: str) -> NDArray[np.int64]:
    """Tokens of a pass of the target after `drafted` steps.

    k + u gamma for the exact rule (Appendix A.4 of [Leviathan2023]); gamma + 1 per hypothesis for rule `per-beam`.

    >>> [int(pass_width(3, 2, 5, *form)) for form in (("exact", "batched"), ("per-beam", "batched"), ("per-beam", "parallel"))]
    [17, 8, 4]
    """
    steps = checks.whole_array("drafted", drafted, 0).astype(np.int64)
    if rule == "exact":
        return np.asarray(beams + draft_beams * steps)
    return np.asarray((steps + 1) * (beams if arrangement == "batched" else 1))


# --- Speed for many tokens --------------------------------------------------------------------------------------------


def speedup(
    acceptance_rate: ArrayLike,
    draft_length: ArrayLike,
    cost_ratio: ArrayLike,
    beams: int,
    *,
    rule: str = "exact",
    arrangement: str = "batched",
    draft_beams: int | None = None,
    verify_cost: CurveLike | None = None,
) -> Floats:
    """Speed-up over greedy decoding of one sequence, for many tokens: expected steps of a round over its time in the table above.

    For rule `per-beam` with `sequential` rounds it is Theorem 3.8 of [Leviathan2023] divided by k. For beam widths 3 and 5 the
    slides report .79 and .45, with acceptance rates of .79 and .75; the draft length is not stated and assumed as 3, and c as
    0.75 / 6.39. Interpreted as accepted over drafted tokens, these rates give .831 and .481.

    >>> deck = [(3, 0.79), (5, 0.75)]
    >>> [round(float(speedup(a, 3, 0.75 / 6.39, k, rule="per-beam", arrangement="sequential")), 3) for k, a in deck]
    [0.717, 0.404]
    >>> from model.methods.speculative.theory import acceptance_from_drafted
    >>> rates = [(k, acceptance_from_drafted(share, 3)) for k, share in deck]
    >>> [round(float(speedup(a, 3, 0.75 / 6.39, k, rule="per-beam", arrangement="sequential")), 3) for k, a in rates]
    [0.831, 0.481]
    """
    gamma = checks.whole_array("draft_length", draft_length, 0)
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    wide = _check(beams, rule, arrangement, draft_beams)
    verifying = _relative(verify_cost, pass_width(gamma, beams, wide, rule, arrangement))
    turns = beams if arrangement == "sequential" else 1
    return np.asarray(expected_steps(acceptance_rate, gamma) / (turns * (gamma * ratio + verifying)))


def _relative(verify_cost: CurveLike | None, width: NDArray[np.int64]) -> Floats:
    return np.ones(width.shape) if verify_cost is None else as_curve(verify_cost).relative(width)


def _check(beams: int, rule: str, arrangement: str, draft_beams: int | None) -> int:
    """Check the values as `Parameters` does; return u."""
    return Parameters(1, 0, beams, rule, draft_beams, arrangement).draft_width


# --- Claims -----------------------------------------------------------------------------------------------------------

claim_bound = drafting_bound
claim_formula = speculative_formula
