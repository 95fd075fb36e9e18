"""Speculative decoding in closed form: the theorems of [Leviathan2023] and extensions.

A draft model proposes `draft_length` tokens (gamma). The target model verifies them in one pass and emits one token more: its own
choice at the first rejected position, or a bonus token. Every tested token is accepted with probability `acceptance_rate` (alpha),
independently; other laws are in `model/methods/speculative/dependent_acceptance.py`, batches in
`model/methods/speculative/batch_break_even.py`. Every function broadcasts over numpy arrays. The unit of time is a single-token
pass of the target; `cost_ratio` (c) is the time of a draft pass in this unit. A verification costs 1 as in the paper, or follows a
measured curve (`verify_cost`, a `model.costs.width_curve.WidthCurve` or its pairs).

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.steady_prices import SteadyPrices
from model.costs.step_costs import StepCosts
from model.costs.width_curve import CurveLike, as_curve
from model.interpret.account import Account, Totals, Work, attended_within
from model.methods.claim_bounds import MOST_TESTED, ClaimTerms, Limit, accepted_length, drafting_bound, passes_per_draft_token
from model.methods.formula_check import ComparedRuns, FormulaPoint
from model.methods.prediction import MethodChoice, Prediction, PredictionPoints, predict_by_decoding
from model.methods.rounds.prices_of_rounds import RoundCells, operations_of, round_prices, slowest_of
from model.methods.rounds.round_laws import AcceptanceLaw, Rounds
from model.methods.rounds.round_moments import predict_rounds
from model.methods.rounds.round_starts import starts_by_accepted, starts_of_laws
from model.methods.speculative import engine_dialects, static_batches
from model.methods.speculative.algorithm import Parameters
from model.methods.speculative.batch_sizes import families
from model.methods.speculative.drafter_prices import prices_of
from model.outcomes.outcome_laws import Chain, Iid

Floats = NDArray[np.float64]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def predict(parameters: Parameters, tokens: ArrayLike, law: AcceptanceLaw, cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` tokens, with cut last drafts and dependent outcomes; times in the unit of the costs.

    Busy time equals latency on one unit; on two units it lacks the time of the links. For static batches the latency is the total
    of all batches (`model.methods.speculative.static_batches`), and so is that of plain decoding. In continuous batching no draft
    is cut: with B sequences, at the prices of B (`UnitCost.of_batch`), l tokens of a sequence take R(l) rounds of equal time, so
    the speed-up is l T(B, 1) / (R(l) (T(B, gamma + 1) + T_d)); for many tokens R(l) is l / E[N].

    >>> from model.costs.layer_times import UnitCost
    >>> from model.outcomes.outcome_laws import Iid
    >>> found = predict(Parameters(40, draft_length=7), 128, Iid(0.85), UnitCost(40, cost_ratio=0.117))
    >>> round(float(found.plain_latency / found.latency), 3)
    2.648
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points, which are computed together for all laws and costs."""
    for group in points.groups().groups:
        group.check_tokens()
    batched = points.of_choices(lambda each: each.parameters.decoded_sequences) > 1
    several = points.of_choices(lambda each: each.parameters.concurrent_sequences) > 1
    parts = (~batched, _of_one_sequence), (batched & ~several, _of_one_after_another), (batched & several, _of_static_batches)
    index = [(np.flatnonzero(mine), of) for mine, of in parts if mine.any()]
    found = [of(points.at(mine)) for mine, of in index]
    return Prediction.joined(found).at(np.argsort(np.concatenate([mine for mine, _ in index])))


def _of_one_sequence(points: PredictionPoints[Parameters]) -> Prediction:
    """Prediction at points of one sequence, or of one of a batch that is kept full."""

    def kinds(parameters: Parameters) -> int:
        return parameters.draft_length + 2 if parameters.reads_states else 2

    return predict_rounds(points, prices_of, lambda of: of.operations("draft"), kinds)


def _of_one_after_another(points: PredictionPoints[Parameters]) -> Prediction:
    """Prediction at points of several sequences, one at a time."""
    return predict_by_decoding(static_batches.one_after_another, points, static_batches.prices_of_each)


def _of_static_batches(points: PredictionPoints[Parameters]) -> Prediction:
    """Prediction at points of static batches of several sequences."""
    found, index = [], []
    for mine, family in families(points):
        found.append(
            predict_by_decoding(
                partial(static_batches.predict_decodings, family=family), points.at(mine), static_batches.prices_of_each,
                together="always", last=lambda parameters: parameters.draft_length + 1, by_position=family.prices_of_each,
            )
        )  # fmt: skip
        index.append(mine)
    return Prediction.joined(found).at(np.argsort(np.concatenate(index)))


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time: every round emits a single token, in a batch one per remaining sequence."""
    if parameters.decoded_sequences == 1:
        alone, reading = prices_of(parameters, tokens, cost)
        time, busy = slowest_of(tokens, alone)
        if reading is not None:
            time, busy = (each + tokens * float(more.max()) for each, more in zip((time, busy), reading, strict=True))
        return time, busy
    price = static_batches.prices(
        parameters.draft_costs(cost), parameters.draft_length, parameters.concurrent_sequences, tokens=tokens,
        separate=parameters.placement == "separate",
    )
    rounds = parameters.plain_steps(tokens)
    return rounds * float(price.time.max()), rounds * float(price.busy.max())


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of a run, in units of one token in the target.

    Of a single sequence from its rounds, counted by (accepted, drafted) tokens; of static batches from the `account`'s logits.
    """
    if parameters.decoded_sequences == 1:
        return operations_of(rounds, round_prices(cost, parameters.draft_length))
    drafted = account.of("draft").heads
    return account.of("target").heads + (drafted * cost.operations("draft") if drafted else 0.0)


def straggler_loss(
    parameters: Parameters, cost: StepCosts, rounds: Any, time: Any, tokens: Any, price: NDArray[np.intp] | None = None
) -> Any:  # fmt: skip
    """Share of the time of static batches that is lost by waiting, of one cost or of each of several; None for other batches.

    See `model.methods.speculative.static_batches`.
    """
    if parameters.concurrent_sequences == 1:
        return None
    return static_batches.straggler_loss(parameters, cost, rounds, time, tokens, price)


def work(parameters: Parameters, tokens: int, law: AcceptanceLaw) -> Work | None:
    """Expected work of the passes of both models; None for laws of records.

    A pass of the target covers the drafted tokens and one more. The draft model reads one token per drafted token; after a
    completely accepted draft it also reads the last drafted token. Draft heads read all accepted tokens again in the first pass of
    a round, and parallel drafts make no other pass.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = work(Parameters(40, draft_length=3, draft_layers=2), 128, Iid(0.79)).by_model
    >>> round(found["target"].passes, 3), round(found["target"].layer_runs / 40, 3), round(found["draft"].passes, 3)
    (44.446, 44.446, 131.273)
    """
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[AcceptanceLaw]) -> Work | None:
    """`work` under each of several laws, as arrays of shape (laws,); None if one of them is of records."""
    if parameters.decoded_sequences > 1:
        return static_batches.work_of_laws(parameters, tokens, laws)
    found = work_of_lengths(parameters, np.array([tokens]), laws)
    return None if found is None else found.at((slice(None), 0))


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[AcceptanceLaw]) -> Work | None:
    """`work` of several numbers of tokens, which rise, as arrays of shape (laws, lengths); of one sequence or of equal ones.

    >>> found = work_of_lengths(Parameters(40, draft_length=1), np.array([1, 3]), [Iid(0.5), Iid(1.0)])
    >>> found.by_model["target"].passes.tolist(), found.by_model["draft"].passes.tolist()
    ([[1.0, 2.25], [1.0, 2.0]], [[0.0, 1.5], [0.0, 1.0]])
    """
    if parameters.decoded_sequences > 1:
        return static_batches.work_of_lengths(parameters, lengths, laws)
    known = [law for law in laws if isinstance(law, Chain | Rounds)]
    if len(known) < len(laws):
        return None
    most, tokens = parameters.draft_length, int(lengths[-1])
    cells, place = RoundCells.of(most, lengths, parameters.cut), np.arange(tokens)
    mass, after_whole = starts_of_laws(most, tokens, known)  # (tokens, laws)
    start, count = cells.start, cells.drafted
    drafts, width = count > 0, count + 1
    held = np.minimum(start, np.inf if parameters.context_budget is None else parameters.context_budget)
    reading = attended_within(start, count, parameters.context_budget)
    of_round = np.ones(start.size), width, start * width + width * (width + 1) / 2, start + width
    more = count, reading, drafts, np.where(drafts, start + count, 0)
    sums: Any = cells.sums(mass, *of_round, *more)
    runs, verified, seen, rows, drafted, read, passes, last_rows = sums
    layers, deep = parameters.layers, parameters.draft_layers
    target = Totals(runs, layers * runs, layers * verified, layers * seen, layers * rows, head_runs=runs, heads=verified)
    if parameters.reads_states:
        after, accepted = starts_by_accepted(most, tokens, known), np.arange(most + 1)
        # Accepted tokens that are read again are at the positions before the start of the round; each sees those up to itself.
        before = accepted * place[:, None] - accepted * (accepted - 1) / 2
        again, attended_again = (cells.sums(each.T, drafts)[0] for each in (after @ accepted, (after * before).sum(axis=2)))
        rows_again = np.zeros_like(again)
    else:
        # The first pass also reads the token before: its two tokens see one and two positions more than are held before them.
        ahead = np.minimum(start - 1, held)
        of_read = drafts, drafts * (2 * ahead + 2 - held), drafts * (ahead + 1 - held)
        again, attended_again, rows_again = cells.sums(after_whole, *of_read)
    if not parameters.drafts_in_one_pass:
        passes, last_rows = drafted, read + rows_again
    draft = Totals(
        passes=passes, layer_runs=passes * deep, layer_passes=(drafted + again) * deep, attended=(read + attended_again) * deep,
        rows_read=last_rows * deep, head_runs=passes, heads=drafted,
    )  # fmt: skip
    return Work({"target": target, "draft": draft} if passes.any() else {"target": target})


# --- One round: Eq. 1 and its law -----------------------------------------------------------------------------------


def expected_tokens(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected tokens of a round, including the bonus token: E[N] = (1 - alpha^(gamma+1)) / (1 - alpha) [tokens].

    Eq. 1 of [Leviathan2023]. gamma + 1 at alpha = 1, which is its limit.

    >>> round(float(expected_tokens(0.79, 3)), 3), float(expected_tokens(1, 7))
    (2.907, 8.0)
    """
    return sum_of_powers(_rate(acceptance_rate), _length(draft_length) + 1)


def tokens_pmf(acceptance_rate: float, draft_length: int) -> Floats:
    """Probabilities that a round gives 1, 2, ..., gamma + 1 tokens; for one acceptance rate and one draft length.

    Truncated geometric distribution, Section 3.1 of [Leviathan2023]: alpha^(j-1) (1 - alpha), and alpha^gamma for the last.

    >>> tokens_pmf(0.5, 3).tolist()
    [0.5, 0.25, 0.125, 0.125]
    """
    rate, gamma = _one(acceptance_rate, draft_length)
    chances = np.asarray(rate ** np.arange(gamma + 1.0))
    chances[:-1] *= 1 - rate
    return chances


def tokens_variance(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Var N of the tokens of a round [tokens^2], from the distribution in Section 3.1 of [Leviathan2023].

    The accepted length is a sum of indicators "at least j accepted", with covariances alpha^max(i,j) (1 - alpha^min(i,j)). All
    terms of this sum are positive, so nothing cancels near alpha = 1, where the variance vanishes.

    >>> float(tokens_variance(0.5, 1)), float(tokens_variance(1, 5))
    (0.25, 0.0)
    """
    rate, gamma = _rate(acceptance_rate), _length(draft_length)
    checks.array("draft_length", gamma, 0, checks.MAX_TOKENS)  # number of terms of the sum
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
    """Speed-up over plain decoding, for many tokens: S = (1 - alpha^(gamma+1)) / ((1 - alpha) (gamma c + 1)).

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
    """Operations relative to plain decoding: (1 - alpha) (gamma c^ + gamma + 1) / (1 - alpha^(gamma+1)).

    Theorem 3.11 of [Leviathan2023]; `operations_ratio` (c^) is the draft's operations per token over the target's. Never below 1,
    because rejected tokens are computed too.

    >>> round(float(operations_factor(0.8, 5, 0.05)), 3), float(operations_factor(1, 5, 0))
    (1.694, 1.0)
    """
    rate, gamma = _rate(acceptance_rate), _length(draft_length)
    ratio = checks.array("operations_ratio", operations_ratio, 0)
    return np.asarray((gamma * ratio + gamma + 1) / sum_of_powers(rate, gamma + 1))


def oracle_speedup(acceptance_rate: ArrayLike, cost_ratio: ArrayLike) -> Floats:
    """Upper bound for all policies that alternate drafting and verification: 1 / (1 - alpha + c alpha), and 1 for c > 1.

    I rounds give T tokens, of which T - I were drafted, and E[T - I] <= alpha E[T]. The time is at least I + c (T - I) =
    c T + (1 - c) I, which for c <= 1 is at least (1 - alpha + c alpha) T in expectation. Section 3.5 of [Leviathan2023] calls this
    an oracle for gamma; here its drafts have a cost. Infinite for a free draft that is always right.

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
    """Whole draft length with the largest `speedup`, the smaller in a tie; Section 3.5 of [Leviathan2023].

    At the zero of the derivative of Theorem 3.8 in gamma, w = gamma L + A with L = -ln alpha and A = 1 + L (1 - c) / c solves
    w - ln w = A, so gamma + 1 = ln(w) / L. The whole optimum is its floor or ceiling, since S rises up to it and falls after.
    `longest` is the longest draft allowed. With `verify_cost` all lengths up to it (or to the end of the curve) are compared.

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
    # A longer draft is always better if it is free, or always right and cheaper than a pass of the target.
    endless = ((ratio == 0) & (rate > 0)) | ((rate == 1) & (ratio < 1))
    if longest is None and endless.any():
        first = tuple(np.argwhere(endless)[0])
        raise checks.ParameterError(
            f"longest must be given for cost_ratio={ratio[first]:g} and acceptance_rate={rate[first]:g}, where a longer draft is"
            " always better; set longest to the longest draft allowed"
        )
    inside = (ratio > 0) & (ratio < 1) & (rate > 0) & (rate < 1)
    gamma = np.maximum(np.floor(_best_real_length(np.where(inside, rate, 0.5), np.where(inside, ratio, 0.5))), 0.0)
    gamma = np.where(inside, gamma + _one_more_pays(rate, gamma, ratio), 0.0)
    if longest is not None:
        gamma = np.where(endless, longest, np.minimum(gamma, longest))
    return gamma.astype(np.int64)


def _best_real_length(rate: Floats, ratio: Floats) -> Floats:
    """Solve w - ln w = A for gamma = ln(w) / L - 1; in v = w - 1 and delta = A - 1, v - log1p(v) = delta, without cancellation."""
    decay = -np.log(rate)
    # Below 1e-300 the ratio has no effect on the speed-up, and its inverse would overflow.
    delta = decay * (1 - ratio) / np.maximum(ratio, 1e-300)
    # By exp(s) >= 1 + s + s^2/2 this start is above the root; the left side is convex, so Newton's steps descend to it.
    v = np.asarray(delta + np.sqrt(2 * delta))
    for _ in range(8):
        v = np.maximum(v - (v - np.log1p(v) - delta) * (1 + v) / v, 1e-300)
    return np.asarray(np.log1p(v) / decay - 1)


def _one_more_pays(rate: Floats, gamma: Floats, ratio: Floats) -> NDArray[np.bool_]:
    """Test S(gamma + 1) > S(gamma), which is alpha^(gamma+1) (gamma c + 1) > c E[N], Theorem 3.8 without denominators.

    The left side minus the right falls by (1 - alpha) alpha^(gamma+1) ((gamma + 1) c + 1) per step, so S has a single maximum.
    """
    # In this form rounding cannot favour a draft at alpha = c, where S(1) = S(0).
    return np.asarray(rate ** (gamma + 1) * (gamma * ratio + 1) > ratio * (1 + rate * sum_of_powers(rate, gamma)))


def best_draft_length(speed: Callable[[int], Floats], longest: int) -> tuple[NDArray[np.int64], Floats]:
    """Draft length in 0..longest with the largest `speed(gamma)`, the smallest in a tie, and that speed.

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


def steady_state(parameters: Parameters, laws: Sequence[AcceptanceLaw], prices: SteadyPrices) -> Floats:
    """Time per token in the long run [s], without links: (T(gamma + 1) + gamma T_d) / E[N]; shape (laws, cells).

    E[N] is 1 plus the probabilities that at least 1, 2, ..., gamma tokens are accepted, of independent acceptances or rounds. A
    parallel draft makes one pass.

    >>> flat = SteadyPrices(lambda width: np.ones((1, 1)), np.full((1, 1), 0.1))
    >>> print((1 / steady_state(Parameters(40, 3), [Iid(0.79)], flat)).round(4), speedup(0.79, 3, 0.1).round(4))
    [[2.2363]] 2.2363
    """
    gamma = parameters.draft_length
    tokens = np.array([[1.0 + float(_survival(law, gamma).sum())] for law in laws])
    passes = min(gamma, 1) if parameters.drafts_in_one_pass else gamma
    return np.asarray((prices.verify(gamma + 1) + passes * prices.draft) / tokens + prices.waiting)


def _survival(law: AcceptanceLaw, draft_length: int) -> Floats:
    """Probability that at least 1, 2, ... drafted tokens are accepted."""
    if isinstance(law, Iid):
        return np.asarray(float(law.rate) ** np.arange(1.0, draft_length + 1))
    if isinstance(law, Rounds) and len(law.survival) >= draft_length:
        return law.survival[:draft_length]
    raise checks.ParameterError(
        f"acceptances must be independent, or known for each of draft_length={draft_length} positions in a draft, for a time per"
        " token in the long run; predict a number of tokens instead"
    )


# --- A given number of tokens ---------------------------------------------------------------------------------------
#
# With G = gamma + 1 and mu = E[N], the generating function f of N has 1 - f(z) = (1 - z) (1 - (alpha z)^G) / (1 - alpha z), so a
# round starts after m tokens with probability
#     u_m = (1 - alpha) S(q) + alpha^m [G divides m],   q = floor((m - 1) / G),   S(q) = 1 + a + ... + a^q,   a = alpha^G,
# and R(l) = u_0 + ... + u_(l-1) rounds are expected. With l - 1 = q G + r, 0 <= r < G, the sum is
#     R(l) = sum_{i<=q} a^i (1 + (1 - alpha) ((q - i) G + r)) = S(q) (1 + (1 - alpha) r) + (G / mu) (q + 1 - S(q)),
# because (1 - a) / (1 - alpha) = mu. S(q) = (1 + alpha + ... + alpha^((q+1)G-1)) / mu avoids powers of powers. q + 1 - S(q)
# cancels for a near 1, but is then small compared with S(q): the error is that of the larger term.


def target_runs(tokens: ArrayLike, acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected passes of the target model until `tokens` tokens are emitted: R(l), exact for every l.

    Renewal theory with the distribution in Section 3.1 of [Leviathan2023] (above). More than l / E[N], because tokens of the last
    round after the end are lost. Cutting the last draft has no effect: a round reaches the end with or without it.

    >>> round(float(target_runs(128, 0.79, 3)), 3), round(128 / float(expected_tokens(0.79, 3)), 3)
    (44.446, 44.030)
    """
    n, rate, gamma = _tokens(tokens), _rate(acceptance_rate), _length(draft_length)
    return _runs(n, rate, gamma + 1)


def draft_runs(tokens: ArrayLike, acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Expected passes of the draft model until `tokens` tokens are emitted: D(l) = R(l - 1) + ... + R(l - gamma), R = 0 below 1.

    The last drafts are cut: a round that starts after m tokens drafts min(gamma, l - m - 1), because the target emits the last
    token.

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
    """Probabilities u_0, ..., u_(l-1) that a round starts after 0, ..., l - 1 tokens; their sum is R(l).

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
    """Speed-up over plain decoding for `tokens` tokens: l / (R + c D), the ratio of the expected times.

    With `verify_cost` a cut round is verified at its smaller width. Not always below `speedup`: if gamma is too long, cutting the
    last draft helps.

    >>> [round(float(finite_speedup(n, 0.85, 7, 0.117)), 3) for n in (8, 128)], round(float(speedup(0.85, 7, 0.117)), 3)
    ([2.47, 2.648], 2.666)
    """
    n, rate, gamma, ratio = _tokens(tokens), _rate(acceptance_rate), _length(draft_length), _ratio(cost_ratio)
    drafting = ratio * draft_runs(n, rate, gamma)
    if verify_cost is None:
        return np.asarray(n / (target_runs(n, rate, gamma) + drafting))
    curve = as_curve(verify_cost)
    whole = n - gamma  # rounds that start after fewer tokens are not cut
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
    """Sum of R over `count` lengths of block q whose remainders have the sum `remainders`."""
    series = sum_of_powers(rate, (q + 1) * width) / mu
    return np.asarray(series * (count + (1 - rate) * remainders) + count * (width / mu) * (q + 1 - series))


def _density(m: Floats, rate: Floats, width: Floats) -> Floats:
    q = np.floor_divide(np.maximum(m, 1.0) - 1, width)
    inner = (1 - rate) * sum_of_powers(rate, (q + 1) * width) / sum_of_powers(rate, width)
    return np.asarray(np.where(m == 0, 1.0, inner + np.where(np.mod(m, width) == 0, rate**m, 0.0)))


# --- Acceptance from distributions ----------------------------------------------------------------------------------


def acceptance_rate(p: ArrayLike, q: ArrayLike) -> Floats:
    """Probability that a token sampled from the draft's q is accepted by the target's p: sum of min(p, q), over the last axis.

    Lemma 3.3 and Theorem 3.5 of [Leviathan2023]: 1 minus the total variation distance; its mean over contexts is alpha (Corollary
    3.6).

    >>> round(float(acceptance_rate([0.5, 0.5], [0.8, 0.2])), 12)
    0.7
    """
    return _overlap(*_distributions(p, q))


def lenient_acceptance_rate(p: ArrayLike, q: ArrayLike, lenience: float) -> Floats:
    """Acceptance rate if q is multiplied by the lenience l before the comparison with p: sum of min(p / l, q).

    Appendix A.5 of [Leviathan2023], 0 < l <= 1 (the paper's l = 0 would accept every draft). l = 1 is exact decoding; below it the
    probability of a token is at most 1/l times the target's. Decreases in l.

    >>> round(float(lenient_acceptance_rate([0.5, 0.5], [0.8, 0.2], 0.8)), 12)
    0.825
    """
    first, second = _distributions(p, q)
    checks.number("lenience", lenience, 0, 1)
    if lenience == 0:
        raise checks.ParameterError("lenience must be above 0 and at most 1, got 0; 1 is exact decoding")
    return _overlap(first / lenience, second)


def _overlap(p: Floats, q: Floats) -> Floats:
    # The overlap of rows that sum to 1 within rounding may exceed 1 slightly.
    return np.asarray(np.minimum(np.minimum(p, q).sum(axis=-1), 1.0))


def _distributions(p: ArrayLike, q: ArrayLike) -> tuple[Floats, Floats]:
    first, second = checks.distributions("p", p), checks.distributions("q", q)
    if first.shape != second.shape:
        raise checks.ParameterError(
            f"q must have the shape of p, {list(first.shape)}, got {list(second.shape)}; both must be over one vocabulary"
        )
    return first, second


# --- Acceptance rates from figures of logs and engines --------------------------------------------------------------


def drafted_from_acceptance(acceptance_rate: ArrayLike, draft_length: ArrayLike) -> Floats:
    """Accepted over drafted tokens: (alpha + alpha^2 + ... + alpha^gamma) / gamma, from Eq. 1 of [Leviathan2023].

    At most alpha, and smaller for longer drafts, because tokens after a rejection are drafted but not tested.

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
    """alpha from the mean tokens of a round, including the bonus token; the inverse of Eq. 1 of [Leviathan2023].

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
"""Sources of figures that `reported_acceptance` converts; "alpha" is the theory's rate itself."""


def reported_acceptance(
    engine: str,
    draft_length: ArrayLike,
    *,
    rate: ArrayLike | None = None,
    length: ArrayLike | None = None,
    field: str | None = None,
) -> Floats:
    """alpha from figures that an engine prints: its `rate` (a fraction, not a percentage), its `length`, or both, if they agree.

    Notation: D rounds of K = `draft_length` drafted tokens have a accepted tokens in total (see
    `model.methods.speculative.engine_dialects`). `field` selects the figure if an engine prints several; by default the first.

    alpha: the rate is alpha, accepted over tested tokens; there is no length.
    vllm: rate "draft acceptance rate" = a / (D K), or field "system-efficiency" of V0; length = 1 + a / D (add 1 to V1's before
    2025-05).
    sglang: length = 1 + a / D. Its "accept rate" must be named: field "drafts" = a / (D K), from 2026-04; "with-bonus" =
    (a + D) / (D (K + 1)), 2025-10 to 2026-04; "before-2025-10" cannot be converted.
    trtllm: length = 1 + a / D as printed, or field "forced" for the variable that forces acceptance, a / D; rate = a / (D K).
    transformers: rate = a / (D K); length = tokens of a streamed chunk, matches + 1.
    llama.cpp: length = 1 + a / D; rate "draft acceptance" is over the tokens that were drafted (drafts may be shorter than K), so
    it only bounds the length.
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
            raise checks.ParameterError(f"{name} must be left out for engine 'alpha'; name the engine that printed it")
    if rate is None:
        raise checks.ParameterError("rate must be given for engine 'alpha', got none")
    return _rate(rate, "rate").copy()


def _rate_of_accepted(accepted: Floats, gamma: Floats) -> Floats:
    """Solve alpha + ... + alpha^gamma = accepted by Newton's method from above; the left side is convex, so no step overshoots."""
    # Upper bounds of alpha: the mean of the powers is at least their geometric mean alpha^((gamma+1)/2), their sum at least alpha.
    rate = np.minimum(np.minimum((accepted / gamma) ** (2 / (gamma + 1)), accepted), 1.0)
    for _ in range(100):
        series = sum_of_powers(rate, gamma)
        step = np.maximum((rate * series - accepted) / _slope(rate, gamma, series), 0.0)
        rate = np.asarray(rate - step)
        if not np.any(step > 2e-16 * rate):
            break
    return rate


def _slope(rate: Floats, gamma: Floats, series: Floats) -> Floats:
    """Derivative of alpha + ... + alpha^gamma; near alpha = 1 an upper bound, which makes a Newton step shorter."""
    gap = 1 - rate
    near = gap < 1e-7
    inner = (series - gamma * rate**gamma) / np.where(near, 1.0, gap)
    return np.asarray(np.where(near, gamma * (gamma + 1) / 2, inner))


# --- Helpers --------------------------------------------------------------------------------------------------------


def sum_of_powers(rate: Floats, terms: Floats) -> Floats:
    """1 + x + ... + x^(n-1) = (1 - x^n) / (1 - x) for x in [0, 1]; exact at x = 0, x = 1 and n = 1, else to the last digits.

    >>> float(sum_of_powers(np.asarray(0.5), np.asarray(3.0)))
    1.75
    """
    # In place, so that a large grid of rates needs only two arrays of its size. x - 1 is exact near x = 1.
    gap = np.asarray(rate - 1)
    with np.errstate(divide="ignore", invalid="ignore"):
        out = _with_shape_of(np.asarray(np.log(rate)), terms)
        out *= terms
        np.expm1(out, out=out)
        out /= gap
    # At x = 1 the sum is n. It is also n for n = 0 and n = 1, for every x.
    np.copyto(out, terms, where=(gap == 0) | (terms <= 1))
    return out


def _with_shape_of(values: Floats, other: Floats) -> Floats:
    """`values` itself, or a writable copy of the shape that both broadcast to."""
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
    """Theorem 3.8 of [Leviathan2023], which assumes that a pass over gamma + 1 tokens takes as long as a single-token pass."""
    if not runs.drafting.tested:
        return None
    length, ratio = runs.settings["draft_length"], runs.pass_ratio("draft")
    about = (
        "Theorem 3.8, with the accepted share of tested tokens counted at each length (measured)"
        f" and c = {ratio:.2f}, single passes over one token ({runs.times})"
    )
    speed = float(speedup(runs.drafting.acceptance_rate, length, ratio))
    return FormulaPoint(length, speed, "draft length γ", about)


# --- Claims -----------------------------------------------------------------------------------------------------------

claim_bound = drafting_bound
_CLAIMED_LENGTHS = np.unique(np.round(np.concatenate([np.arange(251.0), np.geomspace(251, MOST_TESTED, 100)])))
"""Draft lengths that are tried for a claim without one."""


def claim_formula(terms: ClaimTerms) -> Limit:
    """Theorem 3.8 of [Leviathan2023] with the terms of a claim; without a draft length, at the best one.

    >>> round(claim_formula(ClaimTerms({"acceptance_rate": 0.55, "draft_length": 7, "cost_ratio": 0.117})).value, 2)
    1.21
    >>> round(claim_formula(ClaimTerms({"acceptance_rate": 0.8})).value, 6)  # 1/(1 - alpha)
    5.0
    """
    longest, rate = terms.best("draft_length"), terms.best("acceptance_rate")
    length = accepted_length(terms, longest)
    if np.isfinite(longest):
        lengths = np.array([longest])
    elif length is not None:
        lengths = np.array([np.ceil(length - 1 - 1e-9)])
    elif terms.flat and not terms.cost_ratio:
        bound = drafting_bound(terms)
        return Limit(bound.value, f"E[N] <= 1 / (1 - a) = {bound.value:.4g} tokens per round")
    else:
        lengths = _CLAIMED_LENGTHS
    tokens = expected_tokens(rate, lengths) if length is None else np.minimum(length, lengths + 1)
    cost = terms.cost_ratio * np.array([passes_per_draft_token(terms, each) * each for each in lengths])
    times = np.array([terms.verify(1 + each) for each in lengths]) + cost
    best = int(np.argmax(tokens / times))
    value = float(tokens[best] / times[best])
    at = "" if length is not None else f" at a = {rate:.4g}, K = {lengths[best]:g} with independent acceptances"
    work = f"({times[best] - cost[best]:.4g} + {cost[best]:.4g})"
    return Limit(value, f"tokens per round over verification and drafts{at}: {tokens[best]:.4g} / {work} = {value:.4g}")
