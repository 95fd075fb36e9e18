"""Big Little Decoder in closed form [Kim2023]: a small model drafts until it is unsure, a large model verifies.

In a segment the small model drafts n tokens: before each token it runs, and with probability `fallback_rate` (f) it is unsure and
falls back; it also stops at `max_draft_length` tokens (G, Section 7.1.2). The large model reads them in one pass, rolls back from
the first token that it finds too unlikely (each with probability `rollback_rate` (r), independently), and emits a token itself. A
token is drafted and accepted with probability s = (1 - f)(1 - r), so a segment gives the tokens of a speculative round with
alpha = s and gamma = G. The pass that ends in a fallback gives no token, also in Algorithm 1 (line 3 runs the small model, line 4
tests its confidence).

Two variants: `paper` is Algorithm 1; `code` is the authors' released code: after a rollback the large model runs once more, over
the j accepted tokens, the corrected one and one more, and emits another token. In `code` a rollback also requires that the two
models disagree about the most likely token; r includes this condition.

Functions broadcast over numpy arrays. The unit of time is a single-token pass of the large model; `cost_ratio` (c) is the time of a
pass of the small model, and `verify_cost` the time of a pass of the large model by its width (`model.costs.width_curve`).

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.costs.width_curve import CurveLike, as_curve
from model.interpret.account import Account, Work
from model.methods.bild.algorithm import UNSURE, Parameters
from model.methods.bild.algorithm import VARIANTS as VARIANTS
from model.methods.bild.finite_bild import moments_of_points
from model.methods.bild.finite_bild import work_of_laws as work_of_laws
from model.methods.bild.finite_bild import work_of_lengths as work_of_lengths
from model.methods.bild.segment_prices import busy_throughout, prices
from model.methods.bild.threshold_decisions import DecisionLaw, Decisions, Independent, RecordedDecisions
from model.methods.claim_bounds import MOST_TESTED, ClaimTerms, Limit
from model.methods.formula_check import ComparedRuns, FormulaPoint
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.speculative.theory import sum_of_powers

if TYPE_CHECKING:
    from model.logs.recorded_decoding import Decoding

Floats = NDArray[np.float64]

# --- A decoding -------------------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: DecisionLaw, cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` tokens, with cut last drafts; times in the costs' unit.

    The variance is nan except for recorded decisions.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.methods.bild.threshold_decisions import Independent
    >>> found = predict(Parameters(24), 1000, Independent(0.11, 0.01), UnitCost(24, cost_ratio=0.25))
    >>> round(float(found.plain_latency / found.latency), 2), round(float(speedup(0.11, 0.01, 10, 0.25)), 2)
    (2.46, 2.47)
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; passes are counted once for all costs."""
    replayed = any(isinstance(law, RecordedDecisions) for law in points.laws)

    def prices_of_each(parameters: Parameters, several: bool = True) -> int:
        return 2 * parameters.largest_pass if several or replayed else 1

    return predict_by_decoding(_predict_together, points, prices_of_each, together="always", by_position=prices_of_each)


def _predict_together(points: DecodingPoints[Parameters]) -> Prediction:
    if points.lengths is not None:
        apart = np.array([not (isinstance(law, Independent) and law.constant) for law in points.laws])[points.law]
        if apart.any():
            return points.one_length_each(_predict_together, apart)
    if points.parameters.exit_layer is None:
        points.cost.require("draft")
    found = moments_of_points(points)
    ratio = np.where(busy_throughout(points.parameters, points.cost, points.tokens), 1.0, np.nan)[points.price]
    units = np.full(points.law.size, float(points.parameters.units))
    plain = points.plain_times()
    return Prediction(found.time, found.variance, found.busy, ratio, units, plain, found.rounds, found.drafted, found.operations)


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of a run, in units of one token in the large model; a pass of the small model counts as one token."""
    large = account.of("target").layer_passes / parameters.layers
    small = account.passes_of["draft"]
    return large + (small * cost.operations("draft") if small else 0.0)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every segment emits one token and has the additional pass of a rollback."""
    price = prices(parameters, cost, tokens)
    again = float(np.nanmax(price.rollback_pass[0], initial=0.0))
    time, busy = (0.0, 0.0) if price.reread is None else price.reread.max(axis=1).tolist()
    return tokens * (float(price.segment[0].max()) + again + time), tokens * (float(price.segment[1].max()) + again + busy)


def work(parameters: Parameters, tokens: int, law: DecisionLaw) -> Work | None:
    """Expected work of the passes of both models; None for records."""
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


# --- A segment: tokens and passes -------------------------------------------------------------------------------------


def expected_tokens(
    fallback_rate: ArrayLike, rollback_rate: ArrayLike, max_draft_length: ArrayLike, *, variant: str = "paper"
) -> Floats:
    """Expected tokens of a segment: 1 + s + ... + s^G, s = (1 - f)(1 - r); plus P(rollback) in the variant `code` [tokens].

    Eq. 1 of Leviathan et al. with alpha = s and gamma = G.

    >>> round(float(expected_tokens(0.11, 0.01, 10)), 3), float(expected_tokens(0, 0, 10)), float(expected_tokens(1, 0, 10))
    (6.321, 11.0, 1.0)
    """
    fallback, rollback, most = _rates(fallback_rate, rollback_rate, max_draft_length)
    tokens = sum_of_powers(np.asarray((1 - fallback) * (1 - rollback)), most + 1)
    return np.asarray(tokens + _extra(fallback, rollback, most, variant))


def small_runs(fallback_rate: ArrayLike, max_draft_length: ArrayLike) -> Floats:
    """Expected passes of the small model in a segment: E min(n + 1, G) = (1 - (1 - f)^G) / f, G at f = 0 [passes].

    >>> float(small_runs(0.5, 2)), float(small_runs(0, 10)), float(small_runs(1, 10))
    (1.5, 10.0, 1.0)
    """
    fallback, most = _rate("fallback_rate", fallback_rate), _draft(max_draft_length)
    return sum_of_powers(np.asarray(1 - fallback), most)


def large_inputs(fallback_rate: ArrayLike, max_draft_length: ArrayLike) -> Floats:
    """Expected tokens that the large model reads in a segment: 1 + E[n] = 1 + (1 - f) + ... + (1 - f)^G [tokens].

    The tokens drafted since its last pass, and its own last token. The variant `code` adds `extra_large_inputs`.

    >>> float(large_inputs(0.5, 2)), float(large_inputs(1, 10))
    (1.75, 1.0)
    """
    fallback, most = _rate("fallback_rate", fallback_rate), _draft(max_draft_length)
    return sum_of_powers(np.asarray(1 - fallback), most + 1)


def extra_large_inputs(fallback_rate: ArrayLike, rollback_rate: ArrayLike, max_draft_length: ArrayLike) -> Floats:
    """Additional tokens that the variant `code` reads: j + 2 after a rollback that keeps j tokens, sum over j < G [tokens].

    >>> round(float(extra_large_inputs(0.11, 0.01, 10)), 3)
    0.295
    """
    fallback, rollback, most = _rates(fallback_rate, rollback_rate, max_draft_length)
    return _sum(fallback, rollback, most, lambda j: np.asarray(j + 2.0))


def rollback_probability(fallback_rate: ArrayLike, rollback_rate: ArrayLike, max_draft_length: ArrayLike) -> Floats:
    """Probability that a segment ends in a rollback: r (1 - f) (1 + s + ... + s^(G-1)).

    The first rolled-back token is the (j+1)-th with probability (1 - f)^(j+1) (1 - r)^j r.

    >>> round(float(rollback_probability(0.11, 0.01, 10)), 4), float(rollback_probability(0.3, 0, 10))
    (0.0537, 0.0)
    """
    fallback, rollback, most = _rates(fallback_rate, rollback_rate, max_draft_length)
    return _rollback(fallback, rollback, most)


# --- A record of decisions -------------------------------------------------------------------------------------------


def agreement(
    record: Decisions,
    fallback_threshold: ArrayLike,
    rollback_threshold: ArrayLike,
    max_draft_length: int,
    *,
    variant: str = "paper",
) -> Floats:
    """Share of generated tokens that are the large model's own choice: all of its own tokens, and some of the small model's.

    >>> record = Decisions([0.9, 0.9], [0.1, 3.0], [True, False], "assumed: by hand")
    >>> [float(value) for value in agreement(record, 0.0, [2.0, 9.0], 1)]  # the wrong token is rolled back, or accepted
    [1.0, 0.75]
    """
    found = record.rates(fallback_threshold, rollback_threshold, variant=variant)
    rates = found.fallback_rate, np.nan_to_num(found.rollback_rate)
    tokens = expected_tokens(*rates, max_draft_length, variant=variant)
    own = expected_tokens(*rates, max_draft_length) - 1
    return np.asarray((tokens - own + own * np.nan_to_num(found.agreement_kept)) / tokens)


# --- Many segments: speed, arithmetic, memory -------------------------------------------------------------------------


def speedup(
    fallback_rate: ArrayLike,
    rollback_rate: ArrayLike,
    max_draft_length: ArrayLike,
    cost_ratio: ArrayLike,
    *,
    variant: str = "paper",
    verify_cost: CurveLike | None = None,
) -> Floats:
    """Speed-up over the large model alone, for many tokens: E[tokens] / (1 + c (1 - (1 - f)^G) / f).

    With `verify_cost` the 1 is E[t(n + 1)] / t(1). In the variant `code` a rollback takes one more pass of the large model.
    f = 0 is a draft of fixed length, Theorem 3.8 of Leviathan et al. with gamma = G and alpha = 1 - r; f = 1 gives 1 / (1 + c).

    >>> round(float(speedup(0.11, 0.01, 10, 6 / 24)), 2), round(float(speedup(1, 0, 10, 0.25)), 2)
    (2.47, 0.8)
    """
    fallback, rollback, most = _rates(fallback_rate, rollback_rate, max_draft_length)
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    tokens = expected_tokens(fallback, rollback, most, variant=variant)
    return np.asarray(tokens / (ratio * small_runs(fallback, most) + _verification(fallback, rollback, most, variant, verify_cost)))


def effective_cost_ratio(
    speed: ArrayLike, fallback_rate: ArrayLike, rollback_rate: ArrayLike, max_draft_length: ArrayLike, *, variant: str = "paper"
) -> Floats:
    """Cost ratio c at which `speedup` equals `speed`: (E[tokens] / S - large runs) f / (1 - (1 - f)^G); nan if no c >= 0 does.

    The rates of the paper's Figure 8 and its 1.85x give .386 to .408, while the ratio of layers is 6/24 = .25.

    >>> [round(float(effective_cost_ratio(1.85, 0.11, r, 10)), 3) for r in (0.01, 0.0)]
    [0.386, 0.408]
    """
    wanted = checks.array("speed", speed, 0)
    if np.any(wanted == 0):
        raise checks.ParameterError("speed must be above 0, got 0.0; it is a speed-up over the large model alone")
    fallback, rollback, most = _rates(fallback_rate, rollback_rate, max_draft_length)
    spare = expected_tokens(fallback, rollback, most, variant=variant) / wanted - 1 - _extra(fallback, rollback, most, variant)
    return np.asarray(np.where(spare >= 0, spare, np.nan) / small_runs(fallback, most))


def operations_factor(
    fallback_rate: ArrayLike,
    rollback_rate: ArrayLike,
    max_draft_length: ArrayLike,
    operations_ratio: ArrayLike,
    *,
    variant: str = "paper",
) -> Floats:
    """Arithmetic relative to the large model alone: (E[inputs] + c^ E[small runs]) / E[tokens]; FLOPs in Figure 8 of [Kim2023].

    `operations_ratio` (c^) is the arithmetic per token of the small model over that of the large one: 25.2M / 402.7M for T5 by the
    number of weights, without embeddings and heads (Table 2).

    >>> [round(float(operations_factor(0.11, r, 10, 25.2 / 402.7)), 2) for r in (0.0, 0.01)]
    [1.06, 1.1]
    """
    fallback, rollback, most = _rates(fallback_rate, rollback_rate, max_draft_length)
    ratio = checks.array("operations_ratio", operations_ratio, 0)
    inputs = large_inputs(fallback, most)
    if _is_code(variant):
        inputs = inputs + extra_large_inputs(fallback, rollback, most)
    return np.asarray((inputs + ratio * small_runs(fallback, most)) / expected_tokens(fallback, rollback, most, variant=variant))


def memory_factor(
    fallback_rate: ArrayLike,
    rollback_rate: ArrayLike,
    max_draft_length: ArrayLike,
    memory_ratio: ArrayLike,
    *,
    variant: str = "paper",
) -> Floats:
    """Weights read relative to the large model alone: (large runs + m E[small runs]) / E[tokens]; MOPs in Figure 8.

    `memory_ratio` (m) is the weights of the small model over those of the large one. A pass of any width reads them once.

    >>> [round(float(memory_factor(0.11, r, 10, 25.2 / 402.7)), 3) for r in (0.0, 0.01)]
    [0.212, 0.22]
    """
    fallback, rollback, most = _rates(fallback_rate, rollback_rate, max_draft_length)
    ratio = checks.array("memory_ratio", memory_ratio, 0)
    runs = 1 + _extra(fallback, rollback, most, variant) + ratio * small_runs(fallback, most)
    return np.asarray(runs / expected_tokens(fallback, rollback, most, variant=variant))


def intensity_factor(
    fallback_rate: ArrayLike,
    rollback_rate: ArrayLike,
    max_draft_length: ArrayLike,
    operations_ratio: ArrayLike,
    memory_ratio: ArrayLike,
    *,
    variant: str = "paper",
) -> Floats:
    """Arithmetic intensity relative to the large model alone: `operations_factor` / `memory_factor`; Figure 8's intensity.

    In the variant `paper` it does not depend on the rollback rate: tokens cancel. In `code` it does, because the pass after a
    rollback reads j + 2 tokens: with rare rollbacks and long drafts the intensity rises slightly. If that pass is counted with the
    single token that it emits, the intensity falls, to 4.85 and 4.72 here.

    >>> phi = 25.2 / 402.7
    >>> [[round(float(intensity_factor(0.11, r, 10, phi, phi, variant=v)), 2) for r in (0, 0.01, 0.02)] for v in VARIANTS]
    [[5.0, 5.0, 5.0], [5.0, 5.02, 5.03]]
    """
    choice = fallback_rate, rollback_rate, max_draft_length
    operations = operations_factor(*choice, operations_ratio, variant=variant)
    return np.asarray(operations / memory_factor(*choice, memory_ratio, variant=variant))


# --- Helpers ----------------------------------------------------------------------------------------------------------


def _rates(fallback_rate: ArrayLike, rollback_rate: ArrayLike, max_draft_length: ArrayLike) -> tuple[Floats, Floats, Floats]:
    return _rate("fallback_rate", fallback_rate), _rate("rollback_rate", rollback_rate), _draft(max_draft_length)


def _rate(name: str, values: ArrayLike) -> Floats:
    return checks.array(name, values, 0, 1)


def _draft(values: ArrayLike) -> Floats:
    return checks.whole_array("max_draft_length", values, 1)


def _is_code(variant: str) -> bool:
    checks.one_of("variant", variant, VARIANTS)
    return variant == "code"


def _extra(fallback: Floats, rollback: Floats, most: Floats, variant: str) -> Floats:
    """Expected additional passes of the large model after rollbacks, equal to the additional tokens."""
    return _rollback(fallback, rollback, most) if _is_code(variant) else np.asarray(0.0)


def _rollback(fallback: Floats, rollback: Floats, most: Floats) -> Floats:
    survive = np.asarray((1 - fallback) * (1 - rollback))
    return np.asarray(rollback * (1 - fallback) * sum_of_powers(survive, most))


def _sum(fallback: Floats, rollback: Floats, most: Floats, weight: Callable[[int], Floats]) -> Floats:
    """Sum over j < G of weight(j) times the probability that a rollback keeps j tokens."""
    total = np.zeros(np.broadcast_shapes(fallback.shape, rollback.shape, most.shape))
    chance = np.asarray((1 - fallback) * rollback)
    for j in range(_largest(most)):
        total = total + np.where(j < most, chance, 0.0) * weight(j)
        chance = np.asarray(chance * (1 - fallback) * (1 - rollback))
    return np.asarray(total)


def _verification(fallback: Floats, rollback: Floats, most: Floats, variant: str, verify_cost: CurveLike | None) -> Floats:
    """Expected time of the large model's passes in a segment, in single-token passes."""
    if verify_cost is None:
        return np.asarray(1 + _extra(fallback, rollback, most, variant))
    curve = as_curve(verify_cost)
    total = np.zeros(np.broadcast_shapes(fallback.shape, most.shape))
    written = np.ones_like(fallback)  # probability that the small model drafts at least j tokens
    for j in range(_largest(most) + 1):
        ends = np.where(j < most, written * fallback, np.where(j == most, written, 0.0))
        total = total + ends * curve.relative(j + 1)
        written = np.asarray(written * (1 - fallback))
    if _is_code(variant):
        total = total + _sum(fallback, rollback, most, lambda j: curve.relative(j + 2))
    return np.asarray(total)


def _largest(most: Floats) -> int:
    return int(most.max()) if most.size else 0


# --- Real runs -------------------------------------------------------------------------------------------------------


def paper_formula(runs: ComparedRuns) -> FormulaPoint | None:
    """Speed-up if a pass of the small model costs its share of layers, as [Kim2023] compares models."""
    choice = runs.settings
    fallback, rollback = counted_rates(runs.decodings)
    if choice["exit_layer"] is not None or np.isnan(fallback):
        return None
    ratio = choice["draft_layers"] / choice["layers"]
    speed = float(speedup(fallback, rollback, choice["max_draft_length"], ratio, variant=choice["variant"]))
    given = f"rates counted at each choice (measured), c = {choice['draft_layers']}/{choice['layers']}, the ratio of layers"
    threshold = choice["fallback_threshold"]
    x, name = (fallback, "fallback rate (measured)") if threshold is None else (threshold, "fallback threshold")
    return FormulaPoint(x, speed, name, f"the formula: {given}")


def counted_rates(decodings: Iterable[Decoding]) -> tuple[float, float]:
    """Fallback rate and rollback rate counted in real decodings.

    Unsure reads over all confidence reads (nan without any), and rollbacks over all distance reads (0 without any).
    """
    asked: Counter[str] = Counter()
    unsure = back = 0
    for decoding in decodings:
        threshold = decoding.settings["fallback_threshold"]
        low = UNSURE if threshold is None else threshold
        asked.update(read.question.kind for read in decoding.reads)
        unsure += sum(read.answer < low for read in decoding.reads if read.question.kind == "confidence")
        back += sum(commit.kind == "rollback" for commit in decoding.commits)
    fallback = unsure / asked["confidence"] if asked["confidence"] else float("nan")
    return fallback, back / asked["distance"] if asked["distance"] else 0.0


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up for any dependence between decisions: (1 + (1 - f)(1 - r) u) / (1 + c u), at the best u <= min(G, 1/f).

    A segment runs the small model u times on average, and at most one of these runs falls back: f u <= 1.

    >>> round(claim_bound(ClaimTerms({"fallback_rate": 0.11, "rollback_rate": 0.01, "draft_length": 10})).value, 2)
    9.01
    """
    fallback, rollback = terms.best("fallback_rate"), terms.best("rollback_rate")
    most = min(terms.best("draft_length"), 1 / fallback if fallback else np.inf)
    kept, ratio = (1 - fallback) * (1 - rollback), terms.cost_ratio
    if np.isinf(most) and not ratio:
        return Limit(np.inf, "speed-up <= 1 + u without a limit: neither the fallback rate nor the draft length is stated")
    runs = min(float(most), MOST_TESTED) if kept > ratio else 0.0
    value = (1 + kept * runs) / (1 + ratio * runs)
    numbers = f"(1 + {kept:.4g} x {runs:.4g}) / (1 + {ratio:.4g} x {runs:.4g})"
    return Limit(value, f"speed-up <= (1 + (1 - f)(1 - r) u) / (1 + c u) = {numbers} = {value:.4g}, u <= min(G, 1/f)")


def claim_formula(terms: ClaimTerms) -> Limit:
    """`speedup` where both rates and the draft length are stated; else the bound.

    >>> at = ClaimTerms({"fallback_rate": 0.11, "rollback_rate": 0.01, "draft_length": 10, "cost_ratio": 0.25})
    >>> round(claim_formula(at).value, 2)
    2.47
    """
    fallback, rollback, most = (terms.stated(name) for name in ("fallback_rate", "rollback_rate", "draft_length"))
    if fallback is None or rollback is None or not most:
        return claim_bound(terms)
    value = float(speedup(fallback, rollback, most, terms.cost_ratio))
    at = f"f = {fallback:.4g}, r = {rollback:.4g}, G = {most:g}, c = {terms.cost_ratio:.4g}"
    return Limit(value, f"speed-up of independent decisions at {at}: {value:.4g}")
