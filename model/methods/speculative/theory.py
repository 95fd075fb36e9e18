"""Speculative decoding in closed form: [Leviathan2023], and what its theorems leave out.

A draft model proposes `draft_length` tokens (gamma), the target model tests them in one pass and gives one token more: its own
choice at the first rejected position, or a bonus token. Every tested token is accepted with chance `acceptance_rate` (alpha),
independently; other laws are in `model/methods/speculative/dependent_acceptance.py`, batches in
`model/methods/speculative/batch_break_even.py`. Every function broadcasts over numpy arrays. Times are in passes of the target
model over one token, so `cost_ratio` (c) is the time of a draft pass over that of such a pass. A verification costs 1 as in the
paper, or what a measured curve says (`verify_cost`, a `model.costs.width_curve.WidthCurve` or its pairs).

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import StepCosts
from model.costs.width_curve import CurveLike, as_curve
from model.interpret.account import Account, Totals, Work
from model.methods.formula_check import ComparedRuns, FormulaPoint
from model.methods.prediction import MethodChoice, Prediction, PredictionPoints
from model.methods.rounds import (
    AcceptanceLaw,
    Moments,
    RoundChoice,
    Rounds,
    moments_of_many,
    operations_of,
    round_prices,
    slowest_of,
    starts,
)
from model.methods.speculative import engine_dialects, static_batches
from model.methods.speculative.algorithm import Parameters
from model.outcomes.outcome_laws import Chain

Floats = NDArray[np.float64]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: AcceptanceLaw, cost: StepCosts) -> Prediction:
    """Exactly `tokens` tokens, truncated drafts and the law's memory included; times in the unit of the costs.

    On one unit a decoding is busy as long as it takes; on two, all but the links' time. Of static batches it is the time of all of
    them (`model.methods.speculative.static_batches`), and plain decoding is that of the same batches. In a batch that is kept full
    no draft is cut: with R sequences, at the prices of R (`UnitCost.of_batch`), l tokens of one take as many rounds as R(l) says,
    each of the same time, so that the speed-up is l T(R, 1) / (R(l) (T(R, gamma + 1) + T_d)); for many tokens R(l) is l / E[N].

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> found = predict(Parameters(40, draft_length=7), 128, Iid(0.85), UnitCost(40, cost_ratio=0.117))
    >>> round(float(found.plain_latency / found.latency), 3)
    2.648
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints) -> Prediction:
    """`predict` at many points; sequences that are alone, or of batches that are kept full, are computed together."""
    prices = []
    for parameters, tokens, cost in points.choices:
        parameters.check_tokens(tokens)
        prices.append(round_prices(cost, parameters.draft_length, tokens=tokens, separate=parameters.placement == "separate"))
    chosen, laws, index = points.pairs()
    pairs = [(*points.choices[choice], points.laws[law]) for choice, law in zip(chosen.tolist(), laws.tolist(), strict=True)]
    rounds = {
        number: RoundChoice(parameters.draft_length, tokens, law, prices[chosen[number]], parameters.cut)
        for number, (parameters, tokens, _, law) in enumerate(pairs) if parameters.decoded_sequences == 1
    }  # fmt: skip
    known = dict(zip(rounds, moments_of_many([*rounds.values()]), strict=True))
    found = [
        known[number] if number in known else static_batches.expected(parameters, tokens, law, cost)
        for number, (parameters, tokens, cost, law) in enumerate(pairs)
    ]
    of_rounds = Moments(*(np.array(column)[index] for column in zip(*found, strict=True)))
    ratio = np.array([1.0 if np.array_equal(each.time, each.busy) else np.nan for each in prices])[points.choice]
    units = points.of_choices(lambda each: each.parameters.units)
    plain = points.of_choices(lambda each: each.parameters.plain_time(each.tokens, each.cost))
    times = of_rounds.time, of_rounds.variance, of_rounds.busy, ratio, units, plain
    return Prediction(*times, of_rounds.rounds, of_rounds.drafted, of_rounds.operations)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Time and unit-time that no decoding exceeds: a round puts out one token, of a batch one of each text that is left."""
    separate = parameters.placement == "separate"
    if parameters.decoded_sequences == 1:
        return slowest_of(tokens, round_prices(cost, parameters.draft_length, tokens=tokens, separate=separate))
    price = static_batches.prices(
        cost, parameters.draft_length, parameters.concurrent_sequences, tokens=tokens, separate=separate
    )
    rounds = parameters.steps_of(tokens)
    return rounds * float(price.time.max()), rounds * float(price.busy.max())


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """The arithmetic of rounds that had (accepted, drafted) tokens, in tokens of the target.

    In a batch that drafts for all of its texts, of all tokens that the `account` has a projection of.
    """
    if parameters.decoded_sequences == 1:
        return operations_of(rounds, round_prices(cost, parameters.draft_length))
    drafted = account.of("draft").heads
    return account.of("target").heads + (drafted * cost.operations("draft") if drafted else 0.0)


def straggler_loss(parameters: Parameters, cost: StepCosts, rounds: float, time: float, tokens: int) -> float | None:
    """Share of the time of static batches that is lost by waiting (`model.methods.speculative.static_batches`); None of other
    batches."""
    return None if parameters.concurrent_sequences == 1 else static_batches.straggler_loss(parameters, cost, rounds, time, tokens)


def work(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Work | None:
    """What the passes of both models come to, in the mean; None under laws of records.

    A round of the target goes over its drafted tokens and one more. The draft model goes over one token for each that it drafts,
    and behind a draft that was kept as a whole over one more, the last that it drafted.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = work(Parameters(40, draft_length=3, draft_layers=2), 128, Iid(0.79)).of
    >>> round(found["target"].passes, 3), round(found["target"].layer_runs / 40, 3), round(found["draft"].passes, 3)
    (44.446, 44.446, 131.273)
    """
    if parameters.decoded_sequences > 1:
        return static_batches.work(parameters, tokens, law)
    if not isinstance(law, Chain | Rounds):
        return None
    mass, after_whole = starts(parameters.draft_length, tokens, law)
    place = np.arange(tokens)
    most = parameters.draft_length
    count = np.minimum(most, tokens - 1 - place) if parameters.cut else np.full(tokens, most)
    width = count + 1
    attended = place * width + width * (width + 1) / 2
    target = _totals(parameters.layers, mass, width, attended, place + width)
    again = after_whole * (count > 0)
    reading = place * count + count * (count + 1) / 2
    draft = Totals(
        passes=float(mass @ count), layer_runs=float(mass @ count) * parameters.draft_layers,
        layer_passes=float(mass @ count + again.sum()) * parameters.draft_layers,
        attended=float(mass @ reading + again @ place) * parameters.draft_layers,
        rows_read=float(mass @ reading) * parameters.draft_layers, head_runs=float(mass @ count), heads=float(mass @ count),
    )  # fmt: skip
    return Work({"target": target, "draft": draft} if draft.passes else {"target": target})


def _totals(layers: int, mass: Floats, width: Floats, attended: Floats, read: Floats) -> Totals:
    """Passes of such widths, each with a chance; all positions are projected."""
    runs = float(mass.sum())
    tokens = float(mass @ width)
    seen, rows = float(mass @ attended), float(mass @ read)
    return Totals(runs, layers * runs, layers * tokens, layers * seen, layers * rows, head_runs=runs, heads=tokens)


# --- One round: Eq. 1 and its law -----------------------------------------------------------------------------------


def expected_tokens(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected tokens of a round, the bonus token included: E[N] = (1 - alpha^(gamma+1)) / (1 - alpha) [tokens].

    Eq. 1 of [Leviathan2023]. gamma + 1 at alpha = 1, which is its limit.

    >>> round(float(expected_tokens(0.79, 3)), 3), float(expected_tokens(1, 7))
    (2.907, 8.0)
    """
    return sum_of_powers(_rate(acceptance_rate), _length(draft_length) + 1)


def tokens_pmf(acceptance_rate: float, draft_length: int) -> Floats:
    """The chances that a round gives 1, 2, ..., gamma + 1 tokens; for one acceptance rate and one draft length.

    A geometric law cut at gamma + 1, Section 3.1 of [Leviathan2023]: alpha^(j-1) (1 - alpha), and alpha^gamma for the last.

    >>> tokens_pmf(0.5, 3).tolist()
    [0.5, 0.25, 0.125, 0.125]
    """
    rate, gamma = _one(acceptance_rate, draft_length)
    chances = np.asarray(rate ** np.arange(gamma + 1.0))
    chances[:-1] *= 1 - rate
    return chances


def tokens_variance(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Var N of the tokens of a round [tokens^2], from the law in Section 3.1 of [Leviathan2023].

    The accepted tokens are a sum of indicators "at least j are", whose covariance is alpha^max(i,j) (1 - alpha^min(i,j)). Added up
    in this form every term is positive, so nothing cancels near alpha = 1, where the variance vanishes.

    >>> float(tokens_variance(0.5, 1)), float(tokens_variance(1, 5))
    (0.25, 0.0)
    """
    rate, gamma = _rate(acceptance_rate), _length(draft_length)
    checks.array("draft_length", gamma, 0, checks.MAX_TOKENS)  # it is a sum of so many terms
    total = np.zeros(np.broadcast_shapes(rate.shape, gamma.shape))
    power, misses = np.ones_like(rate), np.zeros_like(rate)
    below = np.zeros_like(rate)  # sum over i < j of (1 - alpha^i)
    for j in range(1, _largest(gamma) + 1):
        misses = misses * rate + (1 - rate)  # 1 - alpha^j
        power = power * rate
        if not power.any():
            break
        total += np.where(j <= gamma, power * (misses + 2 * below), 0.0)
        below = below + misses
    return total


# --- Speed: Theorems 3.8 and 3.11, the best draft length, the bound -------------------------------------------------


def speedup(
    acceptance_rate: ArrayLike, draft_length: ArrayLike, cost_ratio: ArrayLike, *, verify_cost: CurveLike | None = None
) -> Floats:
    """Speed over plain decoding, for many tokens: S = (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1)).

    Theorem 3.8 of [Leviathan2023]. With `verify_cost` the 1 of the last factor is t(gamma + 1) / t(1). `finite_speedup` is for a
    given number of tokens.

    >>> round(float(speedup(0.79, 3, 0.75 / 6.39)), 4)
    2.1501
    >>> round(float(speedup(0.79, 3, 0.75 / 6.39, verify_cost=[(1, 20.0), (4, 22.0)])), 4)
    2.002
    """
    rate, gamma, ratio = _rate(acceptance_rate), _length(draft_length), _ratio(cost_ratio)
    out = _with_shape_of(sum_of_powers(rate, gamma + 1), ratio)
    return np.divide(out, gamma * ratio + _verification(verify_cost, gamma), out=out)


def operations_factor(acceptance_rate: ArrayLike, draft_length: ArrayLike, operations_ratio: ArrayLike) -> Floats:
    """Arithmetic operations over those of plain decoding: (1 - alpha) (gamma c^ + gamma + 1) / (1 - alpha^(gamma+1)).

    Theorem 3.11 of [Leviathan2023]; `operations_ratio` (c^) is the draft's operations for a token over the target's. Never below 1:
    tokens that are thrown away were computed too.

    >>> round(float(operations_factor(0.8, 5, 0.05)), 3), float(operations_factor(1, 5, 0))
    (1.694, 1.0)
    """
    rate, gamma = _rate(acceptance_rate), _length(draft_length)
    ratio = checks.array("operations_ratio", operations_ratio, 0)
    return np.asarray((gamma * ratio + gamma + 1) / sum_of_powers(rate, gamma + 1))


def oracle_speedup(acceptance_rate: ArrayLike, cost_ratio: ArrayLike) -> Floats:
    """The bound on any policy that drafts, then verifies, one after the other: 1 / (1 - alpha + c alpha), and 1 for c > 1.

    I rounds give T tokens, of which T - I were drafted, and E[T - I] <= alpha E[T]; the time is at least I + c (T - I) =
    c T + (1 - c) I, which for c <= 1 is at least (1 - alpha + c alpha) T in the mean. It is what Section 3.5 of [Leviathan2023]
    calls an oracle for gamma, with the price of its drafts. Infinite for a free draft that is always right.

    >>> round(float(oracle_speedup(0.79, 0.75 / 6.39)), 3), float(oracle_speedup(0.9, 2.0))
    (3.303, 1.0)
    """
    rate, ratio = _rate(acceptance_rate), np.minimum(_ratio(cost_ratio), 1.0)
    with np.errstate(divide="ignore"):
        return np.asarray(1 / ((1 - rate) + ratio * rate))


def optimal_draft_length(
    acceptance_rate: ArrayLike,
    cost_ratio: ArrayLike,
    *,
    verify_cost: CurveLike | None = None,
    longest: int | None = None,
) -> NDArray[np.int64]:
    """The whole draft length with the largest `speedup`, the smaller of two that are equal; Section 3.5 of [Leviathan2023].

    Where the derivative of Theorem 3.8 in gamma vanishes, w = gamma L + A with L = -ln alpha and A = 1 + L (1 - c) / c solves
    w - ln w = A, so gamma + 1 = ln(w) / L. The whole optimum is its floor or its ceiling, since S rises up to it and falls after.
    `longest` is the longest draft allowed. With `verify_cost` all lengths up to it (or to the end of the curve) are tried.

    >>> [int(optimal_draft_length(*at)) for at in ((0.79, 0.75 / 6.39), (0.3, 0.4))], int(optimal_draft_length(0.9, 0, longest=8))
    ([5, 0], 8)
    """
    rate, ratio = np.broadcast_arrays(_rate(acceptance_rate), _ratio(cost_ratio))
    if longest is not None:
        checks.whole("longest", longest, 0)
    if verify_cost is not None:
        curve = as_curve(verify_cost)
        last = curve.last - 1 if longest is None else longest
        return best_draft_length(lambda gamma: speedup(rate, gamma, ratio, verify_cost=curve), last)[0]
    # A longer draft is always better if it is free, or never wrong and cheaper than a pass.
    endless = ((ratio == 0) & (rate > 0)) | ((rate == 1) & (ratio < 1))
    if longest is None and endless.any():
        first = tuple(np.argwhere(endless)[0])
        raise checks.ParameterError(
            f"longest must be given for cost_ratio={ratio[first]:g} and acceptance_rate={rate[first]:g}, where no draft length is"
            " the best: a longer one is always better; set longest to the longest draft allowed"
        )
    inside = (ratio > 0) & (ratio < 1) & (rate > 0) & (rate < 1)
    gamma = np.maximum(np.floor(_best_real_length(np.where(inside, rate, 0.5), np.where(inside, ratio, 0.5))), 0.0)
    gamma = np.where(inside, gamma + _one_more_pays(rate, gamma, ratio), 0.0)
    if longest is not None:
        gamma = np.where(endless, longest, np.minimum(gamma, longest))
    return gamma.astype(np.int64)


def _best_real_length(rate: Floats, ratio: Floats) -> Floats:
    """gamma = ln(w) / L - 1 for w - ln w = A; in v = w - 1 and delta = A - 1, v - log1p(v) = delta, which keeps its digits."""
    decay = -np.log(rate)
    # Below 1e-300 the ratio no longer moves any speed-up, and its inverse would run over.
    delta = decay * (1 - ratio) / np.maximum(ratio, 1e-300)
    # exp(s) >= 1 + s + s^2/2 puts this start above the root; the left side is convex, so Newton's steps come down to it.
    v = np.asarray(delta + np.sqrt(2 * delta))
    for _ in range(8):
        v = np.maximum(v - (v - np.log1p(v) - delta) * (1 + v) / v, 1e-300)
    return np.asarray(np.log1p(v) / decay - 1)


def _one_more_pays(rate: Floats, gamma: Floats, ratio: Floats) -> NDArray[np.bool_]:
    """Whether S(gamma + 1) > S(gamma): alpha^(gamma+1) (gamma c + 1) > c E[N], Theorem 3.8 with both denominators cleared.

    The left side less the right falls by (1 - alpha) alpha^(gamma+1) ((gamma + 1) c + 1) a step: once no more pays, none ever does.
    """
    # In this form no rounding makes a draft pay where alpha = c, when S(1) = S(0).
    return np.asarray(rate ** (gamma + 1) * (gamma * ratio + 1) > ratio * (1 + rate * sum_of_powers(rate, gamma)))


def best_draft_length(speed: Callable[[int], Floats], longest: int) -> tuple[NDArray[np.int64], Floats]:
    """The draft length of 0..longest with the largest `speed(gamma)`, the smaller of equals, and that speed.

    >>> [float(best) for best in best_draft_length(lambda gamma: speedup(0.8, gamma, 0.1), 4)] == [4.0, float(speedup(0.8, 4, 0.1))]
    True
    """
    best = speed(0)
    which = np.zeros(best.shape, dtype=np.int64)
    for gamma in range(1, longest + 1):
        this = speed(gamma)
        which = np.where(this > best, gamma, which)
        best = np.maximum(this, best)
    return np.asarray(which), np.asarray(best)


# --- A given number of tokens ---------------------------------------------------------------------------------------
#
# With G = gamma + 1 and mu = E[N], the generating function f of N has 1 - f(z) = (1 - z) (1 - (alpha z)^G) / (1 - alpha z), so a
# round starts after m tokens with chance
#     u_m = (1 - alpha) S(q) + alpha^m [G divides m],   q = floor((m - 1) / G),   S(q) = 1 + a + ... + a^q,   a = alpha^G,
# and R(l) = u_0 + ... + u_(l-1) rounds are expected. With l - 1 = q G + r, 0 <= r < G, the sum is
#     R(l) = sum_{i<=q} a^i (1 + (1 - alpha) ((q - i) G + r)) = S(q) (1 + (1 - alpha) r) + (G / mu) (q + 1 - S(q)),
# because (1 - a) / (1 - alpha) = mu. S(q) = (1 + alpha + ... + alpha^((q+1)G-1)) / mu needs no power of a power. q + 1 - S(q)
# cancels where a is near 1, but then it is small beside S(q): the error stays that of the larger term.


def target_runs(tokens: ArrayLike, acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected passes of the target model until `tokens` tokens are out: R(l), exact for every l.

    Renewal theory on the law in Section 3.1 of [Leviathan2023] (above). More than l / E[N], since the last round is cut short. A
    draft that is cut short at the end changes nothing: a round that reaches the end does so either way.

    >>> round(float(target_runs(128, 0.79, 3)), 3), round(128 / float(expected_tokens(0.79, 3)), 3)
    (44.446, 44.030)
    """
    n, rate, gamma = _tokens(tokens), _rate(acceptance_rate), _length(draft_length)
    return _runs(n, rate, gamma + 1)


def draft_runs(tokens: ArrayLike, acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected passes of the draft model until `tokens` tokens are out: D(l) = R(l - 1) + ... + R(l - gamma), R = 0 below 1.

    The last drafts are cut short: a round that starts with m tokens out drafts min(gamma, l - m - 1), as the target gives the last
    token itself.

    >>> float(draft_runs(1, 0.5, 7)), round(float(draft_runs(128, 0.79, 3)), 3)
    (0.0, 131.273)
    """
    n, rate, gamma = _tokens(tokens), _rate(acceptance_rate), _length(draft_length)
    width = gamma + 1
    mu = sum_of_powers(rate, width)
    q, r = np.floor_divide(n - 1, width), np.mod(n - 1, width)
    # The lengths l - 1, ..., l - gamma: r of them in block q of R, with remainders 0..r-1, and gamma - r in the block before, with
    # remainders r+1..gamma. In a block R is linear in the remainder. There is no block before the first.
    here = _block_sum(rate, width, mu, q, r, r * (r - 1) / 2)
    before = _block_sum(rate, width, mu, np.maximum(q - 1, 0.0), gamma - r, (gamma - r) * (gamma + r + 1) / 2)
    return np.asarray(here + np.where(q >= 1, before, 0.0))


def renewal_density(tokens: int, acceptance_rate: float, draft_length: int) -> Floats:
    """The chances u_0, ..., u_(l-1) that a round starts when 0, ..., l - 1 tokens are out; they add up to R(l).

    >>> renewal_density(4, 0.5, 1).tolist()
    [1.0, 0.5, 0.75, 0.625]
    """
    checks.whole("tokens", tokens, 1)
    rate, gamma = _one(acceptance_rate, draft_length)
    return _density(np.arange(float(tokens)), np.asarray(rate), np.asarray(gamma + 1.0))


def finite_speedup(
    tokens: ArrayLike,
    acceptance_rate: ArrayLike,
    draft_length: ArrayLike,
    cost_ratio: ArrayLike,
    *,
    verify_cost: CurveLike | None = None,
) -> Floats:
    """Speed over plain decoding for `tokens` tokens: l / (R + c D), the ratio of the expected times.

    With `verify_cost` a round that is cut short is verified at its own width. Not always below `speedup`: where gamma is too long,
    cutting the last draft short helps.

    >>> [round(float(finite_speedup(n, 0.85, 7, 0.117)), 3) for n in (8, 128)], round(float(speedup(0.85, 7, 0.117)), 3)
    ([2.47, 2.648], 2.666)
    """
    n, rate, gamma, ratio = _tokens(tokens), _rate(acceptance_rate), _length(draft_length), _ratio(cost_ratio)
    drafting = ratio * draft_runs(n, rate, gamma)
    if verify_cost is None:
        return np.asarray(n / (target_runs(n, rate, gamma) + drafting))
    curve = as_curve(verify_cost)
    whole = n - gamma  # rounds that start before this many tokens are out are not cut short
    verifying = np.where(whole >= 1, _runs(np.maximum(whole, 1.0), rate, gamma + 1), 0.0) * curve.relative(gamma + 1)
    for left in range(1, _largest(gamma) + 1):
        starts = (left <= gamma) & (left <= n)
        chance = _density(np.maximum(n - left, 0.0), rate, gamma + 1)
        verifying = verifying + np.where(starts, chance, 0.0) * curve.relative(left)
    return np.asarray(n / (verifying + drafting))


def _runs(n: Floats, rate: Floats, width: Floats) -> Floats:
    q, r = np.floor_divide(n - 1, width), np.mod(n - 1, width)
    return _block_sum(rate, width, sum_of_powers(rate, width), q, np.asarray(1.0), r)


def _block_sum(rate: Floats, width: Floats, mu: Floats, q: Floats, count: Floats, remainders: Floats) -> Floats:
    """The sum of R over `count` lengths of block q whose remainders add up to `remainders`."""
    series = sum_of_powers(rate, (q + 1) * width) / mu
    return np.asarray(series * (count + (1 - rate) * remainders) + count * (width / mu) * (q + 1 - series))


def _density(m: Floats, rate: Floats, width: Floats) -> Floats:
    q = np.floor_divide(np.maximum(m, 1.0) - 1, width)
    inner = (1 - rate) * sum_of_powers(rate, (q + 1) * width) / sum_of_powers(rate, width)
    return np.asarray(np.where(m == 0, 1.0, inner + np.where(np.mod(m, width) == 0, rate**m, 0.0)))


# --- Acceptance from distributions ----------------------------------------------------------------------------------


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> Floats:
    """The chance that a token drawn from the draft's q is accepted by the target's p: sum of min(p, q), over the last axis.

    Lemma 3.3 and Theorem 3.5 of [Leviathan2023]: one less their total variation distance; its mean over contexts is alpha
    (Corollary 3.6).

    >>> round(float(acceptance_rate([0.5, 0.5], [0.8, 0.2])), 12)
    0.7
    """
    return _overlap(*_distributions(p, q))


def lenient_acceptance_rate(p: ArrayLike, q: ArrayLike, lenience: float) -> Floats:
    """The same where q is multiplied by `lenience` l before it is compared with p: sum of min(p / l, q).

    Appendix A.5 of [Leviathan2023], 0 < l <= 1 (the paper's l = 0 would accept whatever is drafted). l = 1 is exact decoding; below
    it no token is more than 1/l times as likely as the target says. Falls as l grows.

    >>> round(float(lenient_acceptance_rate([0.5, 0.5], [0.8, 0.2], 0.8)), 12)
    0.825
    """
    first, second = _distributions(p, q)
    checks.number("lenience", lenience, 0, 1)
    if lenience == 0:
        raise checks.ParameterError("lenience must be above 0 and at most 1, got 0; 1 is exact decoding")
    return _overlap(first / lenience, second)


def _overlap(p: Floats, q: Floats) -> Floats:
    # Rows that add up to one within rounding may overlap by a little more than one.
    return np.asarray(np.minimum(np.minimum(p, q).sum(axis=-1), 1.0))


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[Floats, Floats]:
    first, second = checks.distributions("p", p), checks.distributions("q", q)
    if first.shape != second.shape:
        raise checks.ParameterError(
            f"q must have the shape of p, {list(first.shape)}, got {list(second.shape)}; both must be over one vocabulary"
        )
    return first, second


# --- What logs and engines print ------------------------------------------------------------------------------------


def drafted_from_acceptance(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Accepted over drafted tokens: (alpha + alpha^2 + ... + alpha^gamma) / gamma, from Eq. 1 of [Leviathan2023].

    Below alpha, and further below the longer the draft, since what follows a rejection was drafted but not tested.

    >>> round(float(drafted_from_acceptance(0.8, 3)), 4)
    0.6507
    """
    rate, gamma = _rate(acceptance_rate), _length(draft_length, 1)
    return np.asarray(rate * (sum_of_powers(rate, gamma) / gamma))


def acceptance_from_drafted(rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """alpha from accepted over drafted tokens, the inverse of `drafted_from_acceptance`.

    >>> round(float(acceptance_from_drafted(0.79, 3)), 3)
    0.887
    """
    share, gamma = checks.array("rate", rate, 0, 1), _length(draft_length, 1)
    return _rate_of_accepted(share * gamma, gamma)


def acceptance_from_length(mean_acceptance_length: ArrayLike, draft_length: ArrayLike) -> Floats:
    """alpha from the mean tokens of a round, the bonus token counted; the inverse of Eq. 1 of [Leviathan2023].

    >>> float(acceptance_from_length(1.75, 2)), float(acceptance_from_length(4, 3))
    (0.5, 1.0)
    """
    length, gamma = checks.array("mean_acceptance_length", mean_acceptance_length, 1), _length(draft_length, 1)
    if np.any(length > gamma + 1):
        first = tuple(np.argwhere(length > gamma + 1)[0])
        got, most = (np.broadcast_to(a, np.broadcast_shapes(length.shape, gamma.shape))[first] for a in (length, gamma + 1))
        raise checks.ParameterError(
            f"mean_acceptance_length must be between 1 and draft_length+1={most:g}, got {got:g}; it counts the bonus token"
        )
    return _rate_of_accepted(length - 1, gamma)


ENGINES = ("alpha", *engine_dialects.DIALECTS)
"""Whose figures `reported_acceptance` reads; "alpha" is the theory's own."""


def reported_acceptance(
    engine: str,
    draft_length: ArrayLike,
    *,
    rate: ArrayLike | None = None,
    length: ArrayLike | None = None,
    field: str | None = None,
) -> Floats:
    """alpha from what an engine prints: its `rate` (a fraction, not a percentage), its `length`, or both, which must then agree.

    In D rounds of K = `draft_length` drafted tokens a were accepted (`model.methods.speculative.engine_dialects`). `field` says
    which figure is meant where an engine has several; without it the first of each.

    alpha: the rate is alpha, accepted over tested tokens; there is no length.
    vllm: rate "draft acceptance rate" = a / (D K), or field "system-efficiency" of V0; length = 1 + a / D (add 1 to V1's before
    2025-05).
    sglang: length = 1 + a / D. Its "accept rate" must be named: field "drafts" = a / (D K), from 2026-04; "with-bonus" =
    (a + D) / (D (K + 1)), 2025-10 to 2026-04; "before-2025-10" cannot be converted.
    trtllm: length = 1 + a / D as printed, or field "forced" for the variable that forces acceptance, a / D; rate = a / (D K).
    transformers: rate = a / (D K); length = tokens of a streamed chunk, matches + 1.
    llama.cpp: length = 1 + a / D; rate "draft acceptance" is over the tokens really drafted, so that it bounds the length.
    mlx-lm: rate = share of tokens with from_draft = a / (a + D); there is no length.

    >>> [round(float(reported_acceptance(e, 3, length=2.952)), 6) for e in ("vllm", "trtllm")]
    [0.8, 0.8]
    >>> round(float(reported_acceptance("vllm", 3, rate=1.952 / 3)), 6)
    0.8

    Printed lines, of vLLM, SGLang on 2025-10-22, llama.cpp:

    >>> round(float(reported_acceptance("vllm", 5, rate=0.827, length=5.14)), 4)
    0.9377
    >>> round(float(reported_acceptance("sglang", 3, rate=0.49, length=1.95, field="with-bonus")), 4)
    0.5266
    >>> round(float(reported_acceptance("llama.cpp", 3, rate=0.64479, length=2.92)), 4)
    0.7929
    >>> reported_acceptance("vllm", 5, rate=0.827, length=4.14)
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: rate=0.827 and length=4.14 of vllm do not agree at draft_length=5: that rate ...
    """
    checks.one_of("engine", engine, (*ENGINES, *engine_dialects.ALIASES))
    if engine != "alpha":
        read = engine_dialects.read(engine, draft_length, rate=rate, length=length, field=field)
        return _rate_of_accepted(read.accepted, _length(draft_length, 1))
    for name, value in (("length", length), ("field", field)):
        if value is not None:
            raise checks.ParameterError(f"{name} must be left out for engine 'alpha', got one; name the engine that printed it")
    if rate is None:
        raise checks.ParameterError("rate must be given for engine 'alpha', got none")
    return _rate(rate, "rate").copy()


def _rate_of_accepted(accepted: Floats, gamma: Floats) -> Floats:
    """Solve alpha + ... + alpha^gamma = accepted. Newton from above: the left side is convex and rises, so no step overshoots."""
    # The mean of the powers is at least alpha^((gamma+1)/2), their geometric mean, and their sum at least alpha: both bound alpha.
    rate = np.minimum(np.minimum((accepted / gamma) ** (2 / (gamma + 1)), accepted), 1.0)
    for _ in range(100):
        series = sum_of_powers(rate, gamma)
        step = np.maximum((rate * series - accepted) / _slope(rate, gamma, series), 0.0)
        rate = np.asarray(rate - step)
        if not np.any(step > 2e-16 * rate):
            break
    return rate


def _slope(rate: Floats, gamma: Floats, series: Floats) -> Floats:
    """The derivative of alpha + ... + alpha^gamma; near alpha = 1 its upper bound, which only makes a step shorter."""
    gap = 1 - rate
    near = gap < 1e-7
    inner = (series - gamma * rate**gamma) / np.where(near, 1.0, gap)
    return np.asarray(np.where(near, gamma * (gamma + 1) / 2, inner))


# --- Helpers --------------------------------------------------------------------------------------------------------


def sum_of_powers(rate: Floats, terms: Floats) -> Floats:
    """1 + x + ... + x^(n-1) = (1 - x^n) / (1 - x) for x in [0, 1], exact at 0 and 1, for one term, and to the last digits between.

    >>> float(sum_of_powers(np.asarray(0.5), np.asarray(3.0)))
    1.75
    """
    # In place: a large grid of rates needs two arrays of its size. x - 1 is exact where it matters, near x = 1.
    gap = np.asarray(rate - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = _with_shape_of(np.asarray(np.log(rate)), terms)
        out *= terms
        np.expm1(out, out=out)
        out /= gap
    # At x = 1 the sum is its terms. None is 0, also for x = 0, and one is 1: a round without a draft gives just one token.
    np.copyto(out, terms, where=(gap == 0) | (terms <= 1))
    return out


def _with_shape_of(values: Floats, other: Floats) -> Floats:
    """`values` itself, to be written to, or a copy of the shape that both broadcast to."""
    shape = np.broadcast_shapes(values.shape, other.shape)
    return values if values.shape == shape else np.array(np.broadcast_to(values, shape))


def _verification(verify_cost: CurveLike | None, gamma: Floats) -> Floats:
    return np.asarray(1.0) if verify_cost is None else as_curve(verify_cost).relative(gamma + 1)


def _rate(values: ArrayLike, name: str = "acceptance_rate") -> Floats:
    return checks.array(name, values, 0, 1)


def _length(values: ArrayLike, low: int = 0) -> Floats:
    return checks.whole_array("draft_length", values, low)


def _ratio(values: ArrayLike) -> Floats:
    return checks.array("cost_ratio", values, 0)


def _tokens(values: ArrayLike) -> Floats:
    return checks.whole_array("tokens", values, 1)


def _one(acceptance_rate: float, draft_length: int) -> tuple[float, int]:
    checks.number("acceptance_rate", acceptance_rate, 0, 1)
    checks.whole("draft_length", draft_length, 0, checks.MAX_TOKENS)
    return float(acceptance_rate), int(draft_length)


def _largest(gamma: Floats) -> int:
    return int(gamma.max()) if gamma.size else 0


# --- Real runs -------------------------------------------------------------------------------------------------------


def paper_formula(runs: ComparedRuns) -> FormulaPoint | None:
    """Theorem 3.8 of [Leviathan2023], in which a pass over gamma + 1 tokens takes as long as over one."""
    if not runs.drafting.tested:
        return None
    length, ratio = runs.settings["draft_length"], runs.pass_ratio("draft")
    about = (
        "Theorem 3.8, with the accepted share of tested tokens counted at each length (measured)"
        f" and c = {ratio:.2f}, single passes over one token (measured, of the profiles)"
    )
    speed = float(speedup(runs.drafting.acceptance_rate, length, ratio))
    return FormulaPoint(length, speed, "draft length γ", about)
