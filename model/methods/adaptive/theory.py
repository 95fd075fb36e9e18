"""Adaptive draft lengths in closed form; the policies are in `model/methods/adaptive/draft_length_policies.py`.

Acceptances are independent with rate `acceptance_rate` (alpha) unless a law is given. gamma is the draft length, c the
`cost_ratio`; times are in passes of the target model unless stated otherwise.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[transformers] huggingface/transformers, src/transformers/generation/candidate_generator.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.interpret.account import Account, Work, of_passes
from model.methods.adaptive.algorithm import Parameters
from model.methods.adaptive.draft_length_policies import RISE, Heuristic, thresholds
from model.methods.claim_bounds import selective_bound
from model.methods.prediction import Prediction
from model.methods.rounds.prices_of_rounds import RoundPrices, operations_of, round_prices, slowest_of
from model.methods.rounds.round_laws import AcceptanceLaw, ReplayRounds, Rounds
from model.methods.rounds.round_moments import Moments, draws_of_records, mean_of, mixed
from model.methods.rounds.round_walks import longest_skipped, varying
from model.methods.speculative.dependent_acceptance import expected_tokens_random_length
from model.methods.speculative.theory import drafted_from_acceptance, optimal_draft_length, oracle_speedup, speedup
from model.outcomes.outcome_laws import Chain, RecordedProbabilities, Replay, TwoClass

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Law = AcceptanceLaw | Mapping[str, AcceptanceLaw | TwoClass]

NO_MOMENTS = Moments(*[float("nan")] * 6)


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
    count = int(np.asarray(tokens))
    accept, doubt = (law["accept"], law["confidence"]) if isinstance(law, Mapping) else (law, None)
    found, prices = NO_MOMENTS, None
    if parameters.policy == "heuristic" and not isinstance(accept, TwoClass):
        prices = prices_of(parameters, cost, count)
        found = heuristic_moments(parameters.first, parameters.longest_draft, count, accept, prices)
    elif isinstance(doubt, TwoClass) and isinstance(accept, Chain | Rounds):
        prices = prices_of(parameters, cost, count)
        found = confidence_moments(parameters.longest_draft, count, accept, doubt, prices)
    ratio = 1.0 if prices is not None and np.array_equal(prices.time, prices.busy) else float("nan")
    plain = parameters.plain_time(count, cost)
    known = not np.isnan(found.rounds)
    values = found.time, found.variance, found.busy, ratio if known else float("nan"), parameters.units, plain
    rounds = (found.rounds, found.drafted, found.operations) if known else ()
    return Prediction(*(np.asarray(value, dtype=np.float64) for value in (*values, *rounds)))


def slowest(parameters: Parameters, tokens: int, cost: StepCosts) -> tuple[float, float]:
    """Upper bounds of time and unit-time, for any draft lengths."""
    time, busy = slowest_of(tokens, prices_of(parameters, cost, tokens))
    more = tokens * longest_skipped(parameters.draft_costs(cost), tokens) if parameters.may_skip and not cost.uniform else 0.0
    return time + more, busy + more * cost.draft_devices


def work(parameters: Parameters, tokens: int, law: Law) -> Work | None:
    """Expected work of the passes of both models; nan for totals that depend on positions, None where `predict` is nan."""
    found = predict(parameters, tokens, law, UnitCost(1, cost_ratio=1.0))  # counts do not depend on costs
    if found.rounds is None:
        return None
    rounds, drafted = float(found.rounds), float(np.asarray(found.drafted))
    both = {"target": of_passes(parameters.layers, rounds, rounds + drafted, heads=rounds + drafted)}
    return Work(both | ({"draft": of_passes(parameters.draft_layers, drafted, heads=drafted)} if drafted else {}))


def operations(parameters: Parameters, cost: StepCosts, rounds: Mapping[tuple[int, int], int], account: Account) -> float:
    """Arithmetic of rounds counted by (accepted, drafted) tokens, in units of one token in the target; `account` is unused."""
    return operations_of(rounds, round_prices(cost, parameters.longest_draft))


def heuristic_moments(first: int, longest: int, tokens: int, law: AcceptanceLaw, prices: RoundPrices) -> Moments:
    """Exact moments of `round_walks.varying` with the heuristic of [transformers], from the draft length `first` on.

    Forward recursion over (start position of a round, draft length, outcome before it); if times depend on the position, also over
    whether the draft before was completely accepted.

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = np.ones(4)
    >>> heuristic_moments(1, 3, 4, Iid(1.0), RoundPrices(flat, flat, flat)).rounds  # rounds of 1 and 3 drafts, the second cut to 1
    2.0
    """
    if isinstance(law, Replay | ReplayRounds):
        return _of_records(first, longest, tokens, law, prices)
    if isinstance(law, RecordedProbabilities):
        return mixed([heuristic_moments(first, longest, tokens, chain, prices) for chain in law.chains])
    if not isinstance(law, Chain | Rounds):
        raise checks.ParameterError("this law of outcomes has no closed form for drafts; ask for views = ['paths']")
    low, high = law.draft_probabilities(tokens, longest)
    lengths = np.arange(1, longest + 1)
    risen = np.minimum(lengths + RISE, longest) - 1
    # Axes: quantity (probability, first and second moment of the time so far, unit-time, arithmetic, rounds, drafted tokens),
    # distance of the next start, draft length, outcome before, draft before completely accepted (if that matters).
    kinds = 1 if prices.uniform else 2
    ahead = np.zeros((7, longest + 1, longest, 2, kinds))
    ahead[0, 0, first - 1, 0, 0] = 1.0
    for start in range(tokens):
        count = np.minimum(lengths, tokens - 1 - start)
        most = int(count[-1])
        spent = _spent(ahead[:, 0], prices.of_starts(start, count), count).sum(axis=-1)
        ahead = np.concatenate([ahead[:, 1:], np.zeros((7, 1, longest, 2, kinds))], axis=1)
        places = np.arange(most)
        for before in (0, 1):
            rates = high[start + places, places].copy()
            if most and not before:
                rates[0] = low[start, 0]
            survival = np.concatenate([[1.0], np.cumprod(rates)])
            ends = np.where(places[:, None] < count, (survival[:-1] * (1 - rates))[:, None], 0.0)
            rejected = spent[:, None, :, before] * ends
            ahead[:, :most, :-1, 0, 0] += rejected[:, :, 1:]
            ahead[:, :most, 0, 0, 0] += rejected[:, :, 0]
            following = high[start + count, count]  # wrong only at the last position, after which no round starts
            whole = spent[:, :, before] * survival[count]
            for outcome, chance in ((0, 1 - following), (1, following)):
                where: Any = slice(None), count, risen, outcome, -1
                np.add.at(ahead, where, whole * chance)
    _, mean, square, *rest = ahead[:, 0].sum(axis=(1, 2, 3)).tolist()
    return Moments(mean, max(square - mean**2, 0.0), *rest)


def _spent(now: Floats, prices: RoundPrices, drafted: Integers) -> Floats:
    """Moments after the cost of the rounds that start here; axes: moment, draft length, outcome, kind before."""
    mass, first = now[0], now[1]
    time, busy = (price.T[:, None] for price in (prices.time, prices.busy))
    operations, count = (each[:, None, None] for each in (prices.operations, drafted))
    added = [0 * mass, time * mass, 2 * time * first + time**2 * mass, busy * mass, operations * mass, mass, count * mass]
    return np.asarray(now + np.array(added))


def _of_records(first: int, longest: int, tokens: int, law: Replay | ReplayRounds, prices: RoundPrices) -> Moments:
    choice = draws_of_records(law, tokens)
    return mean_of(varying(Heuristic(first, longest, choice.shape[1]), tokens, law.drafts(iter([choice])), prices))


def confidence_moments(longest: int, tokens: int, law: Chain | Rounds, doubt: TwoClass, prices: RoundPrices) -> Moments:
    """Exact means of `round_walks.varying` with doubts; the variance is nan.

    A draft ends after an accepted token with probability `doubt.low_if_accepted`. After a token that will be rejected it continues
    until the draft model is unsure, with probability `doubt.low_if_rejected` per token, or until `longest` tokens.

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = np.ones(4)
    >>> confidence_moments(3, 9, Iid(1.0), TwoClass(1, 0), RoundPrices(flat, flat, flat)).rounds  # one drafted token per round
    5.0
    """
    low, high = law.draft_probabilities(tokens, longest)
    kinds = 1 if prices.uniform else 2
    starts = np.zeros((tokens + 1, 2, kinds))  # axes: start, outcome before, draft before completely accepted
    starts[0, 0, 0] = 1.0
    total = np.zeros(5)
    for start in range(tokens):
        count = min(longest, tokens - 1 - start)
        drafted, places = np.arange(count + 1), np.arange(count)
        here = prices.of_starts(start, drafted)
        same = here.operations, np.ones(count + 1), drafted
        charges = np.array([[here.time[kind], here.busy[kind], *same] for kind in range(kinds)])
        wasted = _after_rejection(charges[..., 1:], doubt.low_if_rejected)
        ended = np.where(places < count - 1, doubt.low_if_accepted, 1.0)
        following = high[start + 1 + places, places + 1]
        for before in (0, 1):
            mass = starts[start, before]
            if not count:
                total += mass @ charges[..., 0]
                continue
            rates = high[start + places, places].copy()
            if not before:
                rates[0] = low[start, 0]
            # Probability of a draft up to each position, all accepted before it; shape (kinds, positions).
            reached = mass[:, None] * np.concatenate([[1.0], np.cumprod(rates * (1 - doubt.low_if_accepted))[:-1]])
            rejected, ends = reached * (1 - rates), reached * (rates * ended)
            total += np.einsum("kp,kcp->c", rejected, wasted) + np.einsum("kp,kcp->c", ends, charges[..., 1:])
            starts[start + 1 : start + 1 + count, 0, 0] += rejected.sum(axis=0)
            # After the target's bonus token, whose position has an outcome before the next round's first.
            whole = ends.sum(axis=0)
            starts[start + 2 : start + 2 + count, 0, -1] += whole * (1 - following)
            starts[start + 2 : start + 2 + count, 1, -1] += whole * following
    return Moments(float(total[0]), float("nan"), *total[1:].tolist())


def _after_rejection(charges: Floats, unsure: float) -> Floats:
    """Expected charge of a draft by the position of its first rejected token; `charges` are by drafted tokens, from 1."""
    expected = charges.copy()
    for place in range(charges.shape[-1] - 2, -1, -1):
        expected[..., place] = unsure * charges[..., place] + (1 - unsure) * expected[..., place + 1]
    return expected


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
