"""Predictive Pipelined Decoding in closed form: Theorem 4.1 of [Yang2024] and extensions.

Every function broadcasts over numpy arrays. Times are in layer-times [layers], compute in layer-times summed over busy units
[layer-units]. Output positions count from 1. A match at position j lets the process of position j + 1 start early, so the match at
the last position has no effect.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.steady_prices import SteadyPrices
from model.costs.step_costs import PassShape, StepCosts
from model.interpret.account import Totals, Work
from model.methods.claim_bounds import ClaimTerms, Limit
from model.methods.formula_check import ComparedRuns, FormulaPoint
from model.methods.ppd.algorithm import Parameters, main_process
from model.methods.prediction import DecodingPoints, MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.stages import Stage, moments_of_pairs
from model.outcomes.outcome_laws import Iid, Law, Markov, constant_rates

Floats = NDArray[np.float64]


# --- Theorem 4.1 ------------------------------------------------------------------------------------------------------


def expected_latency(layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike) -> Floats:
    """Expected time to generate `tokens` tokens: E[T] = d l - (d - d') (l - 1) p [layers].

    Theorem 4.1 of [Yang2024], for exit_layer >= layers/2. Below that it is the latency of the nested form, in which sub-processes
    predict too (its compute: `nested_compute`, `nested_units`); the flat form on k+1 units has `flat_latency`.

    >>> round(float(expected_latency(40, 20, 128, 0.6837)), 3)
    3383.402
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    rate = checks.array("match_rate", match_rate, 0, 1)
    # In place, so that a large grid of match rates needs no second array of its size.
    out = np.asarray(rate * ((d - exit_at) * (1 - n)))
    return np.add(out, d * n, out=out)


def expected_compute(
    layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike, candidates: ArrayLike
) -> Floats:
    """Expected busy unit-time: E[C] = E[T] + k (d - d') l [layer-units].

    Theorem 4.1 of [Yang2024], with the last token's sub-processes; valid for exit_layer >= layers/2 only.

    >>> round(float(expected_compute(40, 20, 128, 0.6837, 3)), 3)
    11063.402
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    _upper_half(d, exit_at, "Theorem 4.1's compute")
    k = checks.whole_array("candidates", candidates, 1)
    return expected_latency(d, exit_at, n, match_rate) + k * (d - exit_at) * n


def expected_runs(tokens: ArrayLike, match_rate: ArrayLike) -> Floats:
    """Expected number of runs (maximal stretches of tokens joined by matches): E[N] = l - (l - 1) p.

    From the proof of Theorem 4.1 of [Yang2024]: N - 1 is binomial with l - 1 trials of probability 1 - p.

    >>> float(expected_runs(128, 0.5))
    64.5
    """
    n = checks.whole_array("tokens", tokens, 1)
    return np.asarray(n - (n - 1) * checks.array("match_rate", match_rate, 0, 1))


def latency_variance(layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike) -> Floats:
    """Var T = (d - d')^2 (l - 1) p (1 - p) [layers^2]; from the distribution of N in the proof of Theorem 4.1.

    >>> float(latency_variance(40, 20, 128, 0.5))
    12700.0
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    return np.asarray((d - exit_at) ** 2 * Iid(match_rate, name="match_rate").variance(n - 1))


def latency_pmf(layers: int, exit_layer: int, tokens: int, match_rate: float) -> tuple[Floats, Floats]:
    """Distribution of T: values in increasing order [layers], and their probabilities.

    T = d l - (d - d') B with B ~ Bin(l - 1, p), from the proof of Theorem 4.1 of [Yang2024]. With exit_layer = layers T is always
    d l.

    >>> values, probabilities = latency_pmf(40, 20, 3, 0.5)
    >>> values.tolist(), probabilities.round(12).tolist()
    ([80.0, 100.0, 120.0], [0.25, 0.5, 0.25])
    """
    return _law_of_latency(layers, exit_layer, tokens, Iid(match_rate, name="match_rate"))


def relative_latency(match_rate: ArrayLike) -> Floats:
    """Latency per token relative to plain decoding, for exit_layer = layers/2 and many tokens: 1 - p/2.

    Eq. 3 of [Yang2024] over d.

    >>> round(float(relative_latency(0.7415)), 3), round(float(relative_latency(0.2163)), 3)
    (0.629, 0.892)
    """
    return np.asarray(1 - checks.array("match_rate", match_rate, 0, 1) / 2)


def mean_busy_units(match_rate: ArrayLike, candidates: ArrayLike) -> Floats:
    """Mean busy units, for exit_layer = layers/2 and many tokens: (k + 2 - p) / (2 - p).

    Eq. 5 of [Yang2024]: the limit of E[C] / E[T], and of E[C / T]. For a finite number of tokens the two differ
    (`expected_compute` over `expected_latency`, and `expected_units_ratio`). Candidates that are batched on one unit count as
    k = 1: (3 - p) / (2 - p) for any number of them, if a multi-token pass takes as long as a single-token pass.

    >>> tuple(round(float(mean_busy_units(*each)), 3) for each in ((0.7415, 5), (0.2163, 1), (0.6837, 3)))
    (4.973, 1.561, 3.279)
    """
    p, k = checks.array("match_rate", match_rate, 0, 1), checks.whole_array("candidates", candidates, 1)
    return np.asarray((k + 2 - p) / (2 - p))


def compute_per_token(match_rate: ArrayLike, candidates: ArrayLike) -> Floats:
    """Compute per token in units of d, for exit_layer = layers/2 and many tokens: (2 + k - p) / 2. Eq. 6 of [Yang2024].

    >>> float(compute_per_token(0.5, 3))
    2.25
    """
    p, k = checks.array("match_rate", match_rate, 0, 1), checks.whole_array("candidates", candidates, 1)
    return np.asarray((2 + k - p) / 2)


def expected_units_ratio(
    layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike, candidates: ArrayLike
) -> Floats:
    """E[C / T], the expected average number of busy units of one decoding: 1 + k (d - d') l E[1 / T].

    Not the ratio of the expectations, which is smaller (Jensen); equal at l = 1, p = 0, p = 1 and exit_layer = layers.

    >>> round(float(expected_units_ratio(40, 20, 16, 0.6837, 3)), 4)
    3.2226
    >>> round(float(expected_compute(40, 20, 16, 0.6837, 3) / expected_latency(40, 20, 16, 0.6837)), 4)
    3.2075
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    _upper_half(d, exit_at, "Theorem 4.1's compute")
    k = checks.whole_array("candidates", candidates, 1)
    p = checks.array("match_rate", match_rate, 0, 1)
    return np.asarray(1 + k * (d - exit_at) * n * _of_distinct(_mean_inverse_time, d, exit_at, n, p))


def _mean_inverse_time(d: Floats, exit_at: Floats, n: Floats, p: Floats) -> Floats:
    """E[1 / T] of arrays of one shape (points,)."""
    mass = _of_distinct(_binomial, n - 1, p)
    saved = (d - exit_at)[..., None] * np.arange(mass.shape[-1])
    # Columns beyond the number of tokens have zero mass; their time must only be nonzero.
    return np.asarray((mass / np.maximum((d * n)[..., None] - saved, 1.0)).sum(axis=-1))


# --- Other laws of the matches ----------------------------------------------------------------------------------------


def position_latency(layers: ArrayLike, exit_layer: ArrayLike, match_rates: ArrayLike) -> tuple[Floats, Floats]:
    """Mean and variance of T [layers, layers^2] if position j matches with probability `match_rates[j]`, independently.

    One rate per token; the last has no effect. E[T] = d l - (d - d') sum p_j; Var T = (d - d')^2 sum p_j (1 - p_j), over
    j < l. For exit_layer >= layers/2, or the nested form.

    >>> mean, variance = position_latency(40, 20, [0.1, 0.9, 0.5])
    >>> float(mean), round(float(variance), 9)
    (100.0, 72.0)
    """
    rates = checks.array("match_rates", match_rates, 0, 1)
    if not rates.shape or not rates.shape[-1]:
        raise checks.ParameterError(f"match_rates must be a list with a rate for each token, got {match_rates!r}")
    d, exit_at, n = _shape(layers, exit_layer, rates.shape[-1])
    saved = rates[..., :-1]
    return (
        np.asarray(d * n - (d - exit_at) * saved.sum(axis=-1)),
        np.asarray((d - exit_at) ** 2 * (saved * (1 - saved)).sum(axis=-1)),
    )


def markov_latency(
    layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike, correlation: ArrayLike
) -> tuple[Floats, Floats]:
    """Mean and variance of T [layers, layers^2] if matches are a stationary Markov chain with correlation rho between neighbours.

    The mean is that of independent matches; the variance grows with rho (`model.outcomes.outcome_laws.Markov`). For exit_layer >=
    layers/2, or the nested form; in the flat form the mean changes too (`flat_latency`).
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    spread = Markov(match_rate, correlation, name="match_rate").variance(n - 1)
    return expected_latency(d, exit_at, n, match_rate), np.asarray((d - exit_at) ** 2 * spread)


# --- Overheads that the theorem omits: heads, dispatch, links, promotion -------------------------------------------------


def literal_gaps(
    layers: ArrayLike,
    exit_layer: ArrayLike,
    *,
    early_head: ArrayLike = 0.0,
    dispatch: ArrayLike = 0.0,
    link: ArrayLike = 0.0,
    final_head: ArrayLike = 0.0,
    promotion: ArrayLike = 0.0,
) -> tuple[Floats, Floats]:
    """Time between two tokens of Algorithm 2 with its barrier, after a miss and after a match [layers].

    The main process and the sub-processes wait for each other: after a miss d + e + s + max(e_f, b); after a match d - d' less,
    plus the promotion. All overheads are in layer-times. For exit_layer >= layers/2; at exit_layer = layers the early head is the
    final head.

    >>> [float(gap) for gap in literal_gaps(40, 20, early_head=0.5, dispatch=0.5, link=2, final_head=0.5, promotion=1)]
    [43.0, 24.0]
    """
    d, exit_at, _ = _shape(layers, exit_layer, 1)
    _upper_half(d, exit_at, "the barrier of Algorithm 2")
    e, s, b, f, m = _overheads(early_head, dispatch, link, final_head, promotion)
    after_miss = d + e + s + np.maximum(f, b)
    return np.asarray(after_miss), np.asarray(after_miss - (d - exit_at) + m)


def eager_gaps(
    layers: ArrayLike,
    exit_layer: ArrayLike,
    *,
    early_head: ArrayLike = 0.0,
    dispatch: ArrayLike = 0.0,
    link: ArrayLike = 0.0,
    final_head: ArrayLike = 0.0,
    promotion: ArrayLike = 0.0,
) -> tuple[Floats, Floats]:
    """Time between two tokens of the eager form, after a miss and after a match [layers].

    Sub-processes run on towards their exit layer, and after a miss there is no wait: after a miss d + e + s + e_f; after a match
    min(d', d - d' + e_f - b) less (the progress of the right sub-process), plus the promotion. The progress is negative if the link
    is so slow that the right sub-process has not started when its token is known; the main process waits for it.

    >>> [round(float(gap), 2) for gap in eager_gaps(32, 24, early_head=2.41, final_head=2.41)]
    [36.82, 26.41]
    """
    d, exit_at, _ = _shape(layers, exit_layer, 1)
    _upper_half(d, exit_at, "the eager timeline")
    e, s, b, f, m = _overheads(early_head, dispatch, link, final_head, promotion)
    after_miss = d + e + s + f
    return np.asarray(after_miss), np.asarray(after_miss - np.minimum(exit_at, d - exit_at + f - b) + m)


def latency_of_gaps(after_miss: ArrayLike, after_match: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike) -> Floats:
    """E[T] = G0 + (l - 1) (p G1 + (1 - p) G0) for the gaps G0 after a miss and G1 after a match, in the unit of the gaps.

    >>> round(float(latency_of_gaps(*eager_gaps(32, 24, early_head=2.41, final_head=2.41), 128, 0.6)))
    3920
    """
    miss, match = checks.array("after_miss", after_miss), checks.array("after_match", after_match)
    n, p = checks.whole_array("tokens", tokens, 1), checks.array("match_rate", match_rate, 0, 1)
    return np.asarray(miss * n - (n - 1) * p * (miss - match))


# --- Nested: exit layers below d/2, sub-processes predict too -----------------------------------------------------------


def nested_waste(layers: ArrayLike, exit_layer: ArrayLike, candidates: ArrayLike) -> Floats:
    """Unit-time of one wrong sub-process and all its descendants until they are stopped [layer-units].

    W = sum over i of k^i (d - (i + 1) d')^+: its i-th generation starts i d' later and is stopped at the same time. d - d' for
    exit_layer >= layers/2.
    """
    d, exit_at, _ = _shape(layers, exit_layer, 1)
    k = checks.whole_array("candidates", candidates, 1)
    nested_units(d, exit_at, k)  # refuses trees whose size would overflow
    total = np.zeros(np.broadcast_shapes(d.shape, exit_at.shape, k.shape))
    for generation in range(int(np.max(np.ceil(d / exit_at))) - 1):
        rest = d - (generation + 1) * exit_at
        # Powers of missing generations are not computed: they might overflow.
        total = total + k ** np.where(rest > 0, generation, 0) * np.maximum(rest, 0)
    return total


def nested_compute(
    layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike, candidates: ArrayLike
) -> Floats:
    """Expected busy unit-time of the nested form, any exit layer: d l + (k l - (l - 1) p) W [layer-units].

    W is `nested_waste`. The latency is `expected_latency`. Processes for positions after the last token are counted, as in the
    paper.

    >>> round(float(nested_compute(40, 10, 64, 0.23, 3))), float(nested_compute(40, 20, 128, 0.5, 3))
    (34512, 11530.0)
    >>> float(expected_compute(40, 20, 128, 0.5, 3))
    11530.0
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    p, k = checks.array("match_rate", match_rate, 0, 1), checks.whole_array("candidates", candidates, 1)
    return np.asarray(d * n + (k * n - (n - 1) * p) * nested_waste(d, exit_at, k))


def nested_units(layers: ArrayLike, exit_layer: ArrayLike, candidates: ArrayLike) -> Floats:
    """Peak number of units of the nested form: sum of k^i for i below ceil(d / d'). k + 1 for layers/2 <= exit_layer < layers.

    >>> float(nested_units(12, 4, 2))
    7.0
    """
    d, exit_at, _ = _shape(layers, exit_layer, 1)
    k = checks.whole_array("candidates", candidates, 1)
    generations = np.ceil(d / exit_at)
    with np.errstate(over="ignore"):
        units = np.asarray(sum(np.where(i < generations, k**i, 0.0) for i in range(int(np.max(generations)))))
    if np.any(units > checks.MAX_UNITS):
        raise checks.ParameterError(
            f"nested needs up to {units.max():g} units, more than {checks.MAX_UNITS}; take fewer candidates or a later exit_layer"
        )
    return units


# --- Flat: any exit layer on k+1 units ----------------------------------------------------------------------------------


def flat_latency(layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike) -> Floats:
    """Expected time of the flat form with independent matches, any exit layer on k+1 units [layers].

    A promoted process that is past the exit layer predicts from its current layer, so below layers/2 the depths of prediction
    alternate between d' and d - d' along a run: E[T] = d l - p [A (d - d') + (l - 1 - A) d'], where A = (l - 1)/(1 + p)
    + p (1 - (-p)^(l - 1))/(1 + p)^2 is the expected number of positions that predict at d'. The match rate is assumed equal at both
    depths. For exit_layer >= layers/2 it is Theorem 4.1. For other laws of matches see `stages`.

    >>> round(float(flat_latency(40, 10, 128, 0.5)))
    3636
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    p = checks.array("match_rate", match_rate, 0, 1)
    early = _early_predictions(n - 1, p)
    below = d * n - p * (early * (d - exit_at) + (n - 1 - early) * exit_at)
    return np.asarray(np.where(2 * exit_at >= d, expected_latency(d, exit_at, n, p), below))


def flat_compute(
    layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike, match_rate: ArrayLike, candidates: ArrayLike
) -> Floats:
    """Expected busy unit-time of the flat form with independent matches: E[T] + k [A (d - d') + (l - A) d'] [layer-units].

    A is the expected number of the l positions that predict at the exit layer (see `flat_latency`); each token's sub-processes
    run from its prediction to its verification. For exit_layer >= layers/2 it is Theorem 4.1.

    >>> float(flat_compute(40, 20, 128, 0.5, 3)) == float(expected_compute(40, 20, 128, 0.5, 3))
    True
    """
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    p, k = checks.array("match_rate", match_rate, 0, 1), checks.whole_array("candidates", candidates, 1)
    early = _early_predictions(n, p)
    run = np.where(2 * exit_at >= d, n * (d - exit_at), early * (d - exit_at) + (n - early) * exit_at)
    return np.asarray(flat_latency(d, exit_at, n, p) + k * run)


# --- Any law, any cost: stages -----------------------------------------------------------------------------------------


def stages(parameters: Parameters, cost: StepCosts, tokens: int) -> tuple[Stage, ...]:
    """Stages of a form of Predictive Pipelined Decoding, with enough units [the cost's unit].

    Time and unit-time of a decoding are sums over its tokens, for any law of matches. Values are numbers, or arrays of shape
    (tokens,) if times depend on the position; the first token is always in the first stage. The nested form has stages only without
    overheads.

    >>> from model.costs.layer_times import UnitCost
    >>> for stage in stages(Parameters(40, 10, 3, form="flat"), UnitCost(40), 128):
    ...     print(stage)
    Stage(time=40.0, busy=130.0, on_match=1)
    Stage(time=10.0, busy=40.0, on_match=2)
    Stage(time=30.0, busy=120.0, on_match=1)
    """
    d, exit_at, k = parameters.layers, parameters.exit_layer, parameters.candidates
    if cost.layers != d:
        raise checks.ParameterError(f"cost must be that of a model of layers={d}, got one of {cost.layers}")
    if parameters.form == "nested":
        return _nested_stages(d, exit_at, k, cost)
    passes = _StagePasses(parameters, cost, tokens)
    if parameters.form == "eager":
        return _eager_stages(passes)
    first = _barrier_stage(passes, 0, exit_at, promoted=False, on_match=1)
    late = d - exit_at
    if late <= exit_at:
        return first, _barrier_stage(passes, late, exit_at, promoted=True, on_match=1)
    return (
        first,
        _barrier_stage(passes, late, late, promoted=True, on_match=2),
        _barrier_stage(passes, exit_at, exit_at, promoted=True, on_match=1),
    )


class _StagePasses(NamedTuple):
    """Pass times of each token; the passes of successive tokens are one position apart."""

    parameters: Parameters
    cost: StepCosts
    tokens: int

    def main(self, first: int, last: int) -> Floats:
        """Time of the main process through layers [first, last) and a head."""
        return self._times(main_process(first, last), 0)

    def sub(self, layers: int) -> Floats:
        """Time of a sub-process, which decodes the next token, through its first `layers` layers."""
        return self._times(self.parameters.sub_process(layers), 1)

    def _times(self, shape: PassShape, ahead: int) -> Floats:
        return self.cost.times(shape, 0 if self.cost.uniform else np.arange(ahead, ahead + self.tokens))

    def each(self, number: Any) -> Any:
        """A number of the cost, or of each of several, with an axis of tokens if times depend on the position."""
        return number if self.cost.uniform else np.asarray(number)[..., None]

    def stage(self, time: Floats, busy: Floats, on_match: int) -> Stage:
        """Stage of numbers, or of arrays if times depend on the position, or for several costs."""
        single = self.cost.uniform and not np.ndim(time)
        return Stage(float(time), float(busy), on_match) if single else Stage(time, busy, on_match)


def _barrier_stage(passes: _StagePasses, depth: int, gap: int, *, promoted: bool, on_match: int) -> Stage:
    """Stage of Algorithm 2 that begins at layer `depth` and predicts at layer `gap`, with its barrier."""
    cost, subs, layers = passes.cost, passes.parameters.sub_processes, passes.parameters.layers
    before = passes.main(depth, gap) + passes.each(cost.dispatching(subs))
    rest, run = passes.main(gap, layers), passes.sub(layers - gap)
    time = before + np.maximum(rest, passes.each(cost.link) + run)
    return passes.stage(time + (passes.each(cost.promotion) if promoted else 0.0), before + rest + subs * run, on_match)


def _eager_stages(passes: _StagePasses) -> tuple[Stage, ...]:
    cost, subs, exit_at = passes.cost, passes.parameters.sub_processes, passes.parameters.exit_layer
    alone, head = passes.main(0, exit_at), passes.main(exit_at, exit_at)
    rest, whole = passes.main(exit_at, passes.parameters.layers), passes.sub(exit_at)
    after_head = passes.each(cost.dispatching(subs)) + rest
    # Progress of a sub-process when its token is known; negative if it has yet to start: the main process waits for it.
    ahead = np.minimum(whole, rest - passes.each(cost.link))
    run = np.maximum(ahead, 0.0)
    # The rest of it runs as part of the next token.
    waited, left = (
        each if cost.uniform else np.concatenate([np.zeros_like(each[..., :1]), each[..., :-1]], axis=-1)
        for each in (whole - ahead, whole - run)
    )
    return (
        passes.stage(alone + after_head, alone + after_head + subs * run, 1),
        passes.stage(waited + passes.each(cost.promotion) + head + after_head, left + head + after_head + subs * run, 1),
    )


def _nested_stages(d: int, exit_at: int, k: int, cost: StepCosts) -> tuple[Stage, ...]:
    if not cost.plain:
        why = "overheads or uneven layers in [cost]; leave them out, or" if cost.uniform else "times by position;"
        raise checks.ParameterError(f"form 'nested' has no closed form with {why} ask for views = ['events'] alone")
    waste = float(nested_waste(d, exit_at, k))
    return Stage(float(d), d + k * waste, 1), Stage(float(exit_at), d + (k - 1) * waste, 1)


def predict(parameters: Parameters, tokens: int, law: Law, cost: StepCosts) -> Prediction:
    """Prediction for a decoding on as many units as the method reserves.

    The closed forms for the papers' plain cost and independent matches; otherwise the stages are summed over the law. E[busy /
    latency] is nan if the number of matches does not determine both (the flat form below layers/2, and times by position), unless
    the law is a record.
    """
    checks.whole("tokens", tokens, 1)
    one = np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([MethodChoice(parameters, int(tokens), cost)], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; points with closed forms are computed together by form."""
    iid = np.array([isinstance(law, Iid) for law in points.laws])[points.law]
    form = np.where(iid, points.of_choices(lambda each: _FORMS.index(_closed(each))), 0).astype(np.intp)
    parts: list[tuple[NDArray[np.intp], Prediction]] = []
    for number in np.unique(form).tolist():
        where = np.flatnonzero(form == number)
        of, name = points.at(where), _FORMS[number]
        parts.append((where, _of_form(name, of) if name else _summed(of)))
    order = np.argsort(np.concatenate([where for where, _ in parts]))
    return Prediction.joined([found for _, found in parts]).at(order)


_FORMS = "", "literal", "flat", "nested"
"""Results of `_closed`."""


def _closed(choice: MethodChoice[Parameters]) -> str:
    """Form whose closed forms hold for a choice with independent matches; empty if there are none."""
    parameters, _, cost = choice
    if not cost.plain:
        return ""
    layers = parameters.layers
    if parameters.batched and cost.times(parameters.sub_process(layers)) != layers:  # multi-token passes take longer
        return ""
    if parameters.form == "nested" or (parameters.form == "flat" and 2 * parameters.exit_layer < parameters.layers):
        return str(parameters.form)
    return "literal"


def _of_form(form: str, points: PredictionPoints[Parameters]) -> Prediction:
    layers = points.of_choices(lambda each: each.parameters.layers)
    exit_layer = points.of_choices(lambda each: each.parameters.exit_layer)
    candidates = points.of_choices(lambda each: 1 if each.parameters.batched else each.parameters.candidates)
    tokens = points.groups().lengths[points.choice].astype(np.float64)
    rate = points.of_laws(lambda law: float(law.rate) if isinstance(law, Iid) else float("nan"))  # laws of other points
    closed = _closed_form(form, layers, exit_layer, candidates, tokens, rate)
    lacking = np.flatnonzero(np.isnan(closed.latency_variance) | np.isnan(closed.units_ratio))
    if not 0 < lacking.size <= _MOST_SUMMED:
        return closed
    summed = _summed(points.at(lacking))  # points without a closed form
    variance, ratio = closed.latency_variance.copy(), closed.units_ratio.copy()
    variance[lacking], ratio[lacking] = summed.latency_variance, summed.units_ratio
    return replace(closed, latency_variance=variance, units_ratio=ratio)


def _summed(points: PredictionPoints[Parameters]) -> Prediction:
    """Prediction from stages summed over the law; passes are priced at all costs together."""
    return predict_by_decoding(_summed_together, points, lambda parameters: 6, together="always")


def _summed_together(points: DecodingPoints[Parameters]) -> Prediction:
    """`_summed` at points that share parameters and tokens."""
    parameters, tokens, cost, size = points.parameters, points.tokens, points.cost, int(points.price.max()) + 1
    extent = size if cost.uniform else (size, tokens)
    steps = tuple(
        Stage(np.broadcast_to(time, extent), np.broadcast_to(busy, extent), on_match)
        for time, busy, on_match in stages(parameters, cost, tokens)
    )
    lengths = tokens if points.lengths is None else points.lengths
    latency, variance, busy, ratio = moments_of_pairs(steps, lengths, points.laws, points.law, points.price, points.means)
    return Prediction(latency, variance, busy, ratio, np.full(latency.size, float(parameters.units)), points.plain_times())


def steady_state(parameters: Parameters, laws: Sequence[Any], prices: SteadyPrices) -> Floats:
    """Time per token in the long run [s], without links and dispatches, of the forms with a barrier; shape (laws, cells).

    The times of `stages`, weighted by the share of tokens in each: 1 - p after a miss; if the last stages alternate after matches,
    p / (1 + p) and p^2 / (1 + p).

    >>> flat = SteadyPrices(lambda width: np.full((1, 1), 40.0), np.zeros((1, 1)))
    >>> steady_state(Parameters(40, 20, 3), [Iid(0.5)], flat).tolist()
    [[30.0]]
    """
    if parameters.form in ("eager", "nested"):
        raise checks.ParameterError(
            f"form must be 'literal' or 'flat' for a time per token in the long run, got {parameters.form!r}; predict a number of"
            " tokens instead"
        )
    rate, layers, exit_at = constant_rates(laws, Parameters.SHORT_LABEL), parameters.layers, parameters.exit_layer
    width = parameters.candidates if parameters.batched else 1

    def stage(depth: int, gap: int) -> Floats:
        before = prices.part((gap - depth) / layers, begins=not depth) if gap > depth else 0.0
        rest = prices.part((layers - gap) / layers, begins=False)
        return np.asarray(before + np.maximum(rest, prices.part((layers - gap) / layers, begins=True, width=width)))

    late = layers - exit_at
    total = (1 - rate) * stage(0, exit_at)
    if late <= exit_at:
        return np.asarray(total + rate * stage(late, exit_at) + prices.waiting)
    return np.asarray(total + rate / (1 + rate) * (stage(late, late) + rate * stage(exit_at, exit_at)) + prices.waiting)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every token in the slowest stage.

    >>> from model.costs.layer_times import UnitCost
    >>> slowest(Parameters(40, 20, 3), 10, UnitCost(40))
    (400.0, 1000.0)
    """
    steps = stages(parameters, cost, tokens)
    if cost.uniform:
        return tokens * max(float(step.time) for step in steps), tokens * max(float(step.busy) for step in steps)
    # The first token is always decoded in the first stage.
    time, busy = (np.array(each)[:, 1:].max(axis=0).sum() + each[0][0] for each in list(zip(*steps, strict=True))[:2])
    return float(time), float(busy)


def work(parameters: Parameters, tokens: int, law: Law) -> Work | None:
    """Expected work of the passes of a decoding; None for forms that stop processes or start them one after another.

    Per token the main process runs all layers, or after a match those from d - d-bar on; k candidates run d - d-bar layers at the
    next position, in k passes or, if batched, in one. Two heads per token.

    >>> found = work(Parameters(40, 20, 3), 10, Iid(0.5))
    >>> float(found.by_model["target"].layer_passes), float(expected_compute(40, 20, 10, 0.5, 3)), found.adopted_rows
    (910.0, 910.0, 90.0)
    """
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[Law]) -> Work | None:
    """`work` under each of several laws, as arrays of shape (laws,).

    >>> work_of_laws(Parameters(40, 20, 3), 10, [Iid(0.5), Iid(1.0)]).by_model["target"].layer_passes.tolist()
    [910.0, 820.0]
    """
    found = work_of_lengths(parameters, np.array([tokens]), laws)
    return None if found is None else found.at((slice(None), 0))


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[Law]) -> Work | None:
    """`work` of several numbers of tokens, which rise, as arrays of shape (laws, lengths).

    >>> work_of_lengths(Parameters(40, 20, 3), np.array([1, 10]), [Iid(0.5)]).by_model["target"].layer_passes.tolist()
    [[100.0, 910.0]]
    """
    if parameters.form not in ("literal", "flat") or 2 * parameters.exit_layer < parameters.layers:
        return None
    tokens, ahead = int(lengths[-1]), parameters.layers - parameters.exit_layer
    places, begins = np.arange(tokens), np.concatenate([[0], lengths[:-1]])

    def until(each: Any) -> Any:
        """Sums of the values of the first tokens, up to each length."""
        return np.add.reduceat(each, begins, axis=-1).cumsum(axis=-1)

    expected = np.stack([law.mean(places) for law in laws])  # matches of the first 0, 1, ... tokens, (laws, tokens)
    main: Any = parameters.layers - ahead * np.diff(expected, prepend=0.0)
    candidates = parameters.candidates
    # Passes of sub-processes per token, and tokens per pass.
    others, wide = (1, candidates) if parameters.batched else (candidates, 1)
    layers, seen = until(main), until(main * (places + 1.0))
    matches: Any = expected[:, lengths - 1]
    attended = seen + candidates * ahead * until(places + 2.0)
    read = seen + others * ahead * until(places + 1.0 + wide)
    runs, computed = layers + others * ahead * lengths, layers + candidates * ahead * lengths
    steps: Any = np.broadcast_to(lengths.astype(np.float64), layers.shape)
    found = Totals((2 + others) * steps, runs, computed, attended, read, head_runs=2 * steps, heads=2 * steps)
    return Work({"target": found}, matches, ahead * matches)


def distribution(parameters: Parameters, tokens: int, law: Law, cost: StepCosts) -> tuple[Floats, Floats] | None:
    """Distribution of the latency: values in increasing order and their probabilities.

    None if the number of matches does not determine the latency: in the flat form below layers/2, and with times by position.

    >>> from model.costs.layer_times import UnitCost
    >>> values, probabilities = distribution(Parameters(40, 20, 1), 3, Iid(0.5), UnitCost(40))
    >>> values.tolist(), probabilities.round(12).tolist()
    ([80.0, 100.0, 120.0], [0.25, 0.5, 0.25])
    """
    steps = stages(parameters, cost, tokens)
    if len(steps) != 2 or not cost.uniform:
        return None
    miss, match = steps
    times = np.asarray(tokens * miss.time - np.arange(tokens) * (miss.time - match.time), dtype=np.float64)
    # If a match saves nothing, all values are equal.
    values, which = np.unique(times, return_inverse=True)
    return values, np.asarray(np.bincount(which, weights=law.pmf(tokens - 1)), dtype=np.float64)


def _closed_form(form: str, layers: Floats, exit_layer: Floats, candidates: Floats, tokens: Floats, rate: Floats) -> Prediction:
    """Closed forms over arrays; nan where there is none."""
    d, exit_at, n = _shape(layers, exit_layer, tokens)
    k = checks.whole_array("candidates", candidates, 1)
    unknown, units = np.full_like(rate, np.nan), k + 1
    if form == "nested":
        latency, busy = expected_latency(d, exit_at, n, rate), nested_compute(d, exit_at, n, rate, k)
        variance, ratio, units = latency_variance(d, exit_at, n, rate), unknown, nested_units(d, exit_at, k)
        return Prediction(latency, variance, busy, ratio, units, d * n)
    if form == "flat":
        return Prediction(flat_latency(d, exit_at, n, rate), unknown, flat_compute(d, exit_at, n, rate, k), unknown, units, d * n)
    latency, busy = expected_latency(d, exit_at, n, rate), expected_compute(d, exit_at, n, rate, k)
    variance, ratio = latency_variance(d, exit_at, n, rate), unknown
    if latency.size * float(n.max()) <= _MOST_TERMS:
        ratio = expected_units_ratio(d, exit_at, n, rate, k)
    return Prediction(latency, variance, busy, ratio, units, d * n)


_MOST_TERMS = 20_000_000
"""Largest number of terms for which E[C / T] is computed on a grid: it is a sum over the number of matches at every point."""
_MOST_SUMMED = 2_000
"""Largest number of points for which values without a closed form are computed."""


# --- Helpers ---------------------------------------------------------------------------------------------------------


def _shape(layers: ArrayLike, exit_layer: ArrayLike, tokens: ArrayLike) -> tuple[Floats, Floats, Floats]:
    d = checks.whole_array("layers", layers, 1)
    exit_at = checks.whole_array("exit_layer", exit_layer, 1)
    if np.any(exit_at > d):
        bad = tuple(np.argwhere(exit_at > d)[0])
        top, value = (np.broadcast_to(a, np.broadcast_shapes(d.shape, exit_at.shape))[bad] for a in (d, exit_at))
        raise checks.ParameterError(f"exit_layer must be between 1 and layers={top:g}, got {value:g}")
    return d, exit_at, checks.whole_array("tokens", tokens, 1)


def _early_predictions(positions: Floats, p: Floats) -> Floats:
    """Expected number of the first `positions` of a flat decoding that predict at the exit layer, not at layers - exit_layer."""
    return np.asarray(positions / (1 + p) + p * (1 - (-p) ** positions) / (1 + p) ** 2)


def _upper_half(d: ArrayLike, exit_at: ArrayLike, what: str) -> None:
    bad = 2 * np.asarray(exit_at) < np.asarray(d)
    if np.any(bad):
        first = tuple(np.argwhere(bad)[0])
        top, value = (np.broadcast_to(a, bad.shape)[first] for a in (d, exit_at))
        raise checks.ParameterError(
            f"exit_layer must be at least layers/2={top / 2:g} for {what}, got {value:g}; below it there are two forms,"
            " nested (nested_compute: sub-processes predict too) and flat (flat_latency: k+1 units)"
        )


def _overheads(*values: ArrayLike) -> list[Floats]:
    names = ("early_head", "dispatch", "link", "final_head", "promotion")
    return [checks.array(name, value, 0) for name, value in zip(names, values, strict=True)]


def _law_of_latency(layers: int, exit_layer: int, tokens: int, law: Law) -> tuple[Floats, Floats]:
    d, exit_at, n = (int(value) for value in _shape(layers, exit_layer, tokens))
    if exit_at == d:
        return np.array([float(d * n)]), np.array([1.0])
    mass = law.pmf(n - 1)
    return d * n - (d - exit_at) * np.arange(n - 1, -1, -1.0), mass[::-1]


def _of_distinct(function: Callable[..., Floats], *arguments: Floats) -> Floats:
    """A function of arrays, evaluated once for equal arguments; it takes arrays of shape (points,) and may add axes at the end."""
    extent = np.broadcast_shapes(*(each.shape for each in arguments))
    flat = [np.broadcast_to(each, extent).reshape(-1) for each in arguments]
    key = np.zeros(flat[0].size, dtype=np.intp)
    for each in flat:
        values, index = np.unique(each, return_inverse=True)
        _, first, key = np.unique(key * values.size + index, return_index=True, return_inverse=True)
    found = function(*(each[first] for each in flat))[key]
    return found.reshape(extent + found.shape[1:])


def _binomial(trials: Floats, p: Floats) -> Floats:
    """Binomial probabilities of 0, 1, ..., max(trials) along a new last axis, of arrays of shape (points,).

    Exact at p = 0 and p = 1.
    """
    from scipy.special import gammaln

    n, count = trials.astype(np.intp)[:, None], np.arange(int(trials.max()) + 1)
    rest = np.maximum(n - count, 0)
    factorials = gammaln(count + 1.0)  # logarithms, as are all of these
    match = np.log(p, out=np.full_like(p, _LOG_OF_0), where=p > 0)[:, None]
    miss = np.log1p(-p, out=np.full_like(p, _LOG_OF_0), where=p < 1)[:, None]
    log = factorials[n] - factorials - factorials[rest] + match * count + miss * rest
    return np.asarray(np.where(count <= n, np.exp(log), 0.0))


_LOG_OF_0 = -1e5
"""Its exponential, and that of its multiples, is 0; its product with 0 is 0."""


# --- Real runs -------------------------------------------------------------------------------------------------------


def paper_formula(runs: ComparedRuns) -> FormulaPoint | None:
    """Theorem 4.1 of [Yang2024], which assumes that early heads, dispatch and promotion take no time."""
    layers, early = runs.settings["layers"], runs.settings["exit_layer"]
    if runs.settings["form"] != "nested" and 2 * early < layers:
        return None  # outside the theorem
    (decoding,) = runs.decodings
    # The last token's match has no effect; the first token is not timed.
    matches = [commit.kind == "match" for commit in decoding.commits[:-1]]
    tokens, rate = len(matches) + 1, float(np.mean(matches))
    whole, first = (float(expected_latency(layers, early, count, rate)) for count in (tokens, 1))
    about = "Theorem 4.1, with the matches of each decoding (measured)"
    return FormulaPoint(rate, layers * (tokens - 1) / (whole - first), "match rate p of the decoding (measured)", about)


# --- Claims -----------------------------------------------------------------------------------------------------------


def claim_bound(terms: ClaimTerms) -> Limit:
    """Largest speed-up for many tokens: 1 / (1 - (1 - d'/d) p), from Theorem 4.1 of [Yang2024]; it needs no independence.

    Layers take equal times. Without an exit layer it is that of the first layer, which the nested form allows.

    >>> round(claim_bound(ClaimTerms({"match_rate": 0.6837, "layers": 40, "exit_layer": 20})).value, 3)
    1.519
    """
    rate, layers, exit_at = terms.best("match_rate"), terms.best("layers"), terms.best("exit_layer")
    saved = max(1 - exit_at / layers, 0.0)
    value = float(np.inf if rate * saved >= 1 else 1 / (1 - rate * saved))
    return Limit(value, f"speed-up <= 1 / (1 - (1 - d'/d) p) = 1 / (1 - {saved:.4g} x {rate:.4g}) = {value:.4g}")
