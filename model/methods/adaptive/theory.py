"""Adaptive draft lengths in closed form; the policies are in `model/methods/adaptive/draft_length_policies.py`.

Acceptances are independent with rate `acceptance_rate` (alpha) unless a law is given. gamma is the draft length, c the
`cost_ratio`; times are in passes of the target model unless stated otherwise.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[transformers] huggingface/transformers, src/transformers/generation/candidate_generator.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.interpret.account import Account, Work, of_passes
from model.methods.adaptive.adaptive_rounds import PolicyLaws, PolicyRounds, RoundsOfPoints
from model.methods.adaptive.algorithm import Parameters
from model.methods.adaptive.draft_length_policies import Heuristic, thresholds
from model.methods.claim_bounds import selective_bound
from model.methods.prediction import (
    ChoiceGroup,
    DecodingPoints,
    GroupedChoices,
    MethodChoice,
    Prediction,
    PredictionPoints,
    linear,
    predict_by_decoding,
)
from model.methods.rounds.prices_of_rounds import RoundPrices, operations_of, round_prices, slowest_of
from model.methods.rounds.round_laws import AcceptanceLaw, ReplayRounds, Rounds
from model.methods.rounds.round_moments import Moments, draws_of_records, mean_of, mixed, units_alike
from model.methods.rounds.round_walks import longest_skipped, varying
from model.methods.speculative.dependent_acceptance import expected_tokens_random_length
from model.methods.speculative.theory import drafted_from_acceptance, optimal_draft_length, oracle_speedup, speedup
from model.outcomes.outcome_laws import Chain, RecordedProbabilities, Replay, TwoClass
from model.steps import LayerSpan

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]
Law = AcceptanceLaw | Mapping[str, AcceptanceLaw | TwoClass]


# --- A decoding as a whole ------------------------------------------------------------------------------------------


def prices_of(parameters: Parameters, cost: StepCosts, tokens: int) -> RoundPrices:
    """Prices of rounds by their drafted tokens."""
    separate = parameters.placement == "separate"
    return round_prices(parameters.draft_costs(cost), parameters.longest_draft, tokens=tokens, separate=separate)


def predict(parameters: Parameters, tokens: ArrayLike, law: Law, cost: StepCosts) -> Prediction:
    """Exact prediction for `tokens` tokens, with cut last drafts and dependent outcomes; times in the unit of the costs.

    Dynamic programming over the position and the policy's state: the draft length for `heuristic`, none for `confidence` (its
    variance is nan, because drafts that continue after a rejection share random draws with the next round). The states of
    `gradient` and `optimum` are growing counts; for them all values are nan.

    >>> from model.outcomes.outcome_laws import Iid
    >>> found = predict(Parameters(40, "heuristic", draft_length=5), 128, Iid(0.7), UnitCost(40, cost_ratio=0.1))
    >>> round(float(found.plain_latency / found.latency), 3)  # 1.891 for many tokens
    1.886
    """
    checks.whole("tokens", tokens, 1, checks.MAX_TOKENS)
    choice, one = MethodChoice(parameters, int(np.asarray(tokens)), cost), np.zeros(1, dtype=np.intp)
    return predict_points(PredictionPoints([choice], [law], one, one)).single()


def predict_points(points: PredictionPoints[Parameters]) -> Prediction:
    """`predict` at many points; rounds are counted once for all costs, and decodings of several lengths together."""
    rounds = functools.cache(PolicyRounds)  # of each parameters, for all blocks of costs
    return predict_by_decoding(
        lambda some: _predict_together(some, rounds), points,
        _prices_of_a_start,
        together="always",
        by_position=lambda parameters, several: 1 if parameters.policy == "confidence" else _prices_of_a_start(parameters),
    )


def _prices_of_a_start(parameters: Parameters) -> int:
    """Prices of rounds that start at a position: by their drafted tokens, and by the ending of the round before."""
    return 2 * parameters.largest_pass if has_closed_form(parameters) else 1


def has_closed_form(parameters: Parameters) -> bool:
    """True if rounds can be counted under some laws: the policy does not depend on all rounds before."""
    return parameters.policy in ("heuristic", "confidence")


def _predict_together(points: DecodingPoints[Parameters], rounds: Callable[[int | None, int], PolicyRounds]) -> Prediction:
    """Prediction at points of one number of tokens, or of several."""
    parameters, cost, size = points.parameters, points.cost, points.law.size
    known = np.array([_is_known(parameters, law) for law in points.laws])[points.law]
    units, plain = np.full(size, float(parameters.units)), points.plain_times()
    if not known.any():
        nothing = np.full(size, np.nan)
        return Prediction(nothing, nothing, nothing, nothing, units, plain)
    first, index = parameters.first if parameters.policy == "heuristic" else None, np.flatnonzero(known)
    some, values = points.at(index), np.full((len(Moments._fields), size), np.nan)
    if first is None and not cost.uniform:
        values[:, index] = _means_of_passes(some, rounds(first, parameters.longest_draft))
        alike = _of_costs(cost, cost.draft_devices) == 1
        if parameters.placement == "separate":
            alike &= _of_costs(cost, cost.link) == 0
    else:
        prices = prices_of(parameters, cost, points.tokens)
        alike = units_alike(prices)
        lengths, length = some.of_lengths()
        pairs = some.law, some.price, lengths, length, some.means
        values[:, index] = _moments(rounds(first, parameters.longest_draft), some.laws, prices, *pairs)
    found = Moments(*values)
    operations = found.rounds + found.drafted + np.where(found.drafted > 0, found.drafted * points.operations("draft"), 0.0)
    times = found.time, found.variance, found.busy, np.where(known & alike[points.price], 1.0, np.nan), units, plain
    return Prediction(*times, found.rounds, found.drafted, operations)


def _of_costs(cost: StepCosts, number: Any) -> Floats:
    """A number of each of several costs, shape (costs,)."""
    return np.broadcast_to(np.asarray(number, dtype=np.float64), len(cost.plain_times()))


def _means_of_passes(points: DecodingPoints[Parameters], rounds: PolicyRounds) -> Floats:
    """Rows of `Moments` of drafts that end at a doubt, from expected passes by position; variance and operations are nan.

    Passes are as in `round_prices`. Sums over positions need no price of every round at every position.
    """
    points = replace(points, cost=points.parameters.draft_costs(points.cost))
    found, (lengths, length) = np.full((len(Moments._fields), points.law.size), np.nan), points.of_lengths()
    for part in rounds.of_points(_policy_laws(points.laws), lengths, points.law, length, by_position=True):
        assert part.by_position is not None
        decodings = range(part.drafted.shape[1])
        some = replace(points, law=part.decoding, price=points.price[part.points], laws=decodings, lengths=None)
        found[:, part.points] = _means_of_counts(some, rounds.longest, part.by_position)
    return found


def _means_of_counts(points: DecodingPoints[Parameters], longest: int, counts: Floats) -> Floats:
    """`_means_of_passes` with the expected rounds under each of the points' laws."""
    parameters, cost, price, law, tokens = points.parameters, points.cost, points.price, points.law, counts.shape[1]
    starts = counts.sum(axis=0)  # (starts, drafted tokens, laws)
    more = np.cumsum(starts[:, :0:-1], axis=1)[:, ::-1]  # that draft at least 1, 2, ... tokens
    again = counts[1, :, 1:].sum(axis=1)  # whose first draft pass also reads the token before
    single, wide = counts[0, :, 1:].sum(axis=1), np.zeros_like(again)
    for place in range(1, longest):
        single[place:] += more[: max(tokens - place, 0), place]
    wide[:-1] = again[1:]
    draft = points.time_of(
        [(PassShape(ALL_LAYERS, "draft", width, heads=1), number) for width, number in ((1, single), (2, wide))]
    )  # fmt: skip
    target = LayerSpan(0, cost.layers)
    verify = points.time_of(
        [(PassShape(target, width=drafted + 1, heads=drafted + 1), starts[:, drafted]) for drafted in range(longest + 1)]
    )  # fmt: skip
    time, busy = draft + verify, draft * _of_costs(cost, cost.draft_devices)[price] + verify
    if parameters.placement == "separate":
        time = time + 2 * _of_costs(cost, cost.link)[price] * more[:, 0].sum(axis=0)[law]
    unknown = np.full(law.size, np.nan)
    return np.stack([time, unknown, busy, unknown, starts.sum(axis=(0, 1))[law], more.sum(axis=(0, 1))[law]])


def _policy_laws(laws: Sequence[Law]) -> PolicyLaws:
    """Laws of acceptance and, if there are any, of the draft's confidence."""
    doubts = [_doubt_of(each) for each in laws]
    return PolicyLaws([_accepted(each) for each in laws], [] if None in doubts else doubts)


def _is_known(parameters: Parameters, law: Law) -> bool:
    """True if the moments of a decoding under this law are known."""
    if parameters.policy == "heuristic":
        return not isinstance(_accepted(law), TwoClass)
    return has_closed_form(parameters) and isinstance(_accepted(law), Chain | Rounds) and isinstance(_doubt_of(law), TwoClass)


def _accepted(law: Law) -> Any:
    """Law of acceptance."""
    return law["accept"] if isinstance(law, Mapping) else law


def _doubt_of(law: Law) -> Any:
    """Law of the draft's confidence; None without one."""
    return law["confidence"] if isinstance(law, Mapping) else None


def heuristic_moments(first: int, longest: int, tokens: int, law: AcceptanceLaw, prices: RoundPrices) -> Moments:
    """Exact moments of `round_walks.varying` with the heuristic of [transformers], from the draft length `first` on.

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = np.ones(4)
    >>> heuristic_moments(1, 3, 4, Iid(1.0), RoundPrices(flat, flat, flat)).rounds  # rounds of 1 and 3 drafts, the second cut to 1
    2.0
    """
    return _moments_of_one(first, longest, tokens, law, prices)


def confidence_moments(longest: int, tokens: int, law: Chain | Rounds, doubt: TwoClass, prices: RoundPrices) -> Moments:
    """Exact means of `round_walks.varying` with doubts; the variance is nan.

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = np.ones(4)
    >>> confidence_moments(3, 9, Iid(1.0), TwoClass(1, 0), RoundPrices(flat, flat, flat)).rounds  # one drafted token per round
    5.0
    """
    return _moments_of_one(None, longest, tokens, {"accept": law, "confidence": doubt}, prices)


def _moments_of_one(first: int | None, longest: int, tokens: int, law: Law, prices: RoundPrices) -> Moments:
    one, of_costs = np.zeros(1, dtype=np.intp), RoundPrices(*(each[None, ..., : longest + 1] for each in prices))
    return Moments(*_moments(PolicyRounds(first, longest), [law], of_costs, one, one, np.array([tokens]), one)[:, 0].tolist())


def _moments(
    rounds: PolicyRounds, laws: Sequence[Law], prices: RoundPrices, law: Indices, price: Indices, lengths: Integers,
    length: Indices, means: NDArray[np.bool_] | None = None,
) -> Floats:  # fmt: skip
    """Rows of `Moments` of decodings, each of one of several laws, costs and lengths, which rise."""
    found = np.empty((len(Moments._fields), law.size))
    accepted = [_accepted(each) for each in laws]
    kind = np.array([_kind_of(each) for each in accepted])[law]
    for number in np.unique(law[kind == _MIXTURE]).tolist():  # the parts of each as laws
        mine, chains = np.flatnonzero(law == number), accepted[number].chains
        part, place = np.repeat(np.arange(len(chains)), mine.size), np.tile(mine, len(chains))
        own = None if means is None else means[place]
        each = _moments(rounds, chains, prices, part, price[place], lengths, length[place], own)
        parts = each.reshape(len(found), len(chains), mine.size).swapaxes(0, 1)
        found[:, mine] = mixed([Moments(*values) for values in parts])
    for pair in np.flatnonzero(kind == _RECORDS).tolist():
        found[:, pair] = _of_records(rounds, int(lengths[length[pair]]), accepted[law[pair]], prices.of(int(price[pair])))
    counted = np.flatnonzero(kind == _COUNTED)
    if counted.size:
        used, which = np.unique(law[counted], return_inverse=True)
        asked = np.ones(counted.size, dtype=np.bool_) if means is None else ~means[counted]
        of = _policy_laws([laws[each] for each in used.tolist()])
        found[:, counted] = _of_counts(rounds, of, prices, which, price[counted], lengths, length[counted], asked)
    return found


_COUNTED, _RECORDS, _MIXTURE = range(3)
"""Kinds of laws: rounds are counted; each record is decoded; a mixture of laws of the first kind."""


def _kind_of(law: Any) -> int:
    if isinstance(law, Chain | Rounds):
        return _COUNTED
    if isinstance(law, Replay | ReplayRounds):
        return _RECORDS
    if isinstance(law, RecordedProbabilities):
        return _MIXTURE
    raise checks.ParameterError("this law of outcomes has no closed form for drafts; ask for views = ['paths']")


def _of_counts(
    rounds: PolicyRounds, laws: PolicyLaws, prices: RoundPrices, law: Indices, price: Indices, lengths: Integers, length: Indices,
    asked: NDArray[np.bool_],
) -> Floats:  # fmt: skip
    """Rows of `Moments` from the expected rounds; variances where they are `asked`."""
    found = np.full((len(Moments._fields), law.size), np.nan)
    for part in rounds.of_points(laws, lengths, law, length, by_position=not prices.uniform):
        drafted, of, costs = part.drafted, part.decoding, price[part.points]
        mean = busy = _total(part, prices.time, costs)
        if prices.busy is not prices.time:
            busy = _total(part, prices.busy, costs)
        number = (np.arange(rounds.longest + 1) @ drafted)[of]
        operations = linear(drafted, prices.operations, of, costs)
        found[:, part.points] = mean, np.full(of.size, np.nan), busy, operations, drafted.sum(axis=0)[of], number
    index = np.flatnonzero(asked)
    if index.size:
        square = rounds.squares(laws, prices, law[index], price[index], lengths, length[index])
        found[1, index] = np.maximum(square - found[0, index] ** 2, 0.0)
    return found


def _total(part: RoundsOfPoints, each: Floats, price: Indices) -> Floats:
    """Expected total over the rounds of points, with the value of each at several costs."""
    if part.by_position is None:
        return linear(part.drafted, each, part.decoding, price)
    counts = part.by_position
    return linear(counts.reshape(-1, counts.shape[-1]), each[:, :, : counts.shape[1]].reshape(len(each), -1), part.decoding, price)


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time, for any draft lengths."""
    time, busy = slowest_of(tokens, prices_of(parameters, cost, tokens))
    more = tokens * longest_skipped(parameters.draft_costs(cost), tokens) if parameters.may_skip and not cost.uniform else 0.0
    return time + more, busy + more * cost.draft_devices


def work(parameters: Parameters, tokens: int, law: Law) -> Work | None:
    """Expected work of the passes of both models; nan for totals that depend on positions, None where `predict` is nan."""
    found = work_of_laws(parameters, tokens, [law])
    return None if found is None else found.at(0)


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[Law]) -> Work | None:
    """`work` under each of several laws, as arrays of shape (laws,); None if `predict` is nan under one of them."""
    found = work_of_lengths(parameters, np.array([tokens]), laws)
    return None if found is None else found.at((slice(None), 0))


def work_of_lengths(parameters: Parameters, lengths: Integers, laws: Sequence[Law]) -> Work | None:
    """`work_of_laws` of several numbers of tokens, which rise, as arrays of shape (laws, lengths).

    >>> from model.outcomes.outcome_laws import Iid
    >>> parameters = Parameters(40, "heuristic", draft_length=1)
    >>> found = work_of_lengths(parameters, np.array([1, 4]), [Iid(1.0)]).by_model["target"]
    >>> found.passes.tolist()  # all accepted: rounds of one draft, and of the rest
    [[1.0, 2.0]]
    """
    if not all(_is_known(parameters, law) for law in laws):
        return None
    law, length = (each.ravel() for each in np.indices((len(laws), lengths.size)))
    group = ChoiceGroup(parameters, lengths, [UnitCost(1, cost_ratio=1.0)] * lengths.size)  # counts do not depend on costs
    found = predict_points(PredictionPoints(GroupedChoices([group]), laws, length, law, np.ones(law.size, dtype=np.bool_)))
    shape = len(laws), lengths.size
    rounds: Any = np.reshape(np.asarray(found.rounds), shape)
    drafted: Any = np.reshape(np.asarray(found.drafted), shape)
    both = {"target": of_passes(parameters.layers, rounds, rounds + drafted, heads=rounds + drafted)}
    return Work(both | ({"draft": of_passes(parameters.draft_layers, drafted, heads=drafted)} if drafted.any() else {}))


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of rounds counted by (accepted, drafted) tokens, in units of one token in the target; `account` is unused."""
    return operations_of(rounds, round_prices(cost, parameters.longest_draft))


def _of_records(rounds: PolicyRounds, tokens: int, law: Replay | ReplayRounds, prices: RoundPrices) -> Moments:
    choice = draws_of_records(law, tokens)
    policy = Heuristic(rounds.first or rounds.longest, rounds.longest, choice.shape[1])
    return mean_of(varying(policy, tokens, law.drafts(iter([choice])), prices))


# --- Many tokens: stationary distributions of the draft length ------------------------------------------------------


def heuristic_lengths(acceptance_rate: ArrayLike, longest: int) -> Floats:
    """Long-run share of rounds that draft 0, 1, ..., `longest` tokens, with the schedule "heuristic" of [transformers].

    gamma becomes min(gamma + 2, longest) with probability alpha^gamma, otherwise max(gamma - 1, 1). It falls by single steps, so
    the flows across the gap above gamma balance: pi(gamma + 1) (1 - alpha^(gamma+1)) = pi(gamma) alpha^gamma + pi(gamma - 1)
    alpha^(gamma-1). Derived here; shares are along a new last axis.

    >>> heuristic_lengths(0.5, 3).round(4).tolist()  # pi(2) = 2/3 pi(1), pi(3) = 16/21 pi(1)
    [0.0, 0.4118, 0.2745, 0.3137]
    """
    rate = checks.array("acceptance_rate", acceptance_rate, 0, 1)
    checks.whole("longest", longest, 1)
    # At rate 1 the length is always the longest, set at the end; 0.5 is a placeholder.
    sure = rate == 1
    safe = np.where(sure, 0.5, rate)
    shares = np.zeros((*rate.shape, longest + 1))
    shares[..., 1] = 1.0
    for gamma in range(1, longest):
        up = shares[..., gamma] * safe**gamma + shares[..., gamma - 1] * safe ** (gamma - 1)
        shares[..., gamma + 1] = up / (1 - safe ** (gamma + 1))
        shares /= shares.max(axis=-1, keepdims=True)  # avoids overflow near 1
    shares /= shares.sum(axis=-1, keepdims=True)
    shares[sure] = np.arange(longest + 1) == longest
    return np.asarray(shares)


def speedup_of_lengths(acceptance_rate: ArrayLike, length_pmf: ArrayLike, cost_ratio: ArrayLike) -> Floats:
    """Speed-up over plain decoding for many tokens, if rounds draft 0, 1, ... tokens with these shares: E[N] / (1 + c E[gamma]).

    Theorem 3.8 of [Leviathan2023] for random gamma. The length of a round must not depend on its own acceptances.

    >>> float(speedup_of_lengths(0.7, heuristic_lengths(0.7, 50), 0.1).round(4))  # the best single length, 4, gives 1.981
    1.8907
    """
    ratio = checks.array("cost_ratio", cost_ratio, 0)
    mass = checks.distributions("length_pmf", length_pmf)
    mean = (mass * np.arange(mass.shape[-1])).sum(axis=-1)
    return np.asarray(expected_tokens_random_length(acceptance_rate, mass) / (1 + ratio * mean))


def biased_lengths(acceptance_rate: float, cost_ratio: float, longest: int) -> Floats:
    """Long-run share of rounds that draft 0, 1, ..., `longest` tokens if accepted/drafted is used as the estimate of alpha.

    At draft length gamma the estimate is h(gamma) = (alpha + ... + alpha^gamma)/gamma, which falls with gamma, and so does the best
    length for it. So either one gamma >= 1 is the best for its own h, or the policy alternates between two neighbours, each of
    which favours the other; the cumulative mean then settles at their threshold, which determines their shares. Derived here; at
    alpha = .88, c = .117 it drafts 4 tokens although 8 are best, and is 8.9 % slower.

    >>> import numpy as np
    >>> lengths = biased_lengths(0.88, 0.117, 20)
    >>> int(lengths.argmax()), round(1 - float(speedup_of_lengths(0.88, lengths, 0.117) / speedup(0.88, 8, 0.117)), 3)
    (4, 0.089)
    """
    checks.number("acceptance_rate", acceptance_rate, 0, 1)
    checks.whole("longest", longest, 1)
    wanted = thresholds(cost_ratio, longest)
    shares = np.zeros(longest + 1)
    for gamma in range(1, longest):
        # wanted[gamma] is the rate above which gamma + 1 is better.
        here, longer = (float(drafted_from_acceptance(acceptance_rate, length)) for length in (gamma, gamma + 1))
        if here <= wanted[gamma]:
            shares[gamma] = 1.0
            return shares
        if longer <= wanted[gamma]:
            # The drift gamma (h - threshold) of rounds of gamma balances that of rounds of gamma + 1.
            gain, loss = gamma * (here - wanted[gamma]), (gamma + 1) * (wanted[gamma] - longer)
            shares[gamma], shares[gamma + 1] = loss / (gain + loss), gain / (gain + loss)
            return shares
    shares[longest] = 1.0
    return shares


def oracle_gain(acceptance_rate: ArrayLike, cost_ratio: ArrayLike) -> Floats:
    """Upper bound of all policies relative to the best fixed draft length: `oracle_speedup` over the best `speedup`.

    Section 3.5 of [Leviathan2023] says "up to ~60%". For each c the gain is largest at some alpha near 1; the maximum rises to
    e/(e - 1) = 1.582 as c approaches 0.

    >>> round(float(oracle_gain(0.965, 0.05)), 3)
    1.565
    """
    best = optimal_draft_length(acceptance_rate, cost_ratio)
    return np.asarray(oracle_speedup(acceptance_rate, cost_ratio) / speedup(acceptance_rate, best, cost_ratio))


# --- Claims -----------------------------------------------------------------------------------------------------------

claim_bound = selective_bound
