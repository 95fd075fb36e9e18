"""Theorems on speculative decoding, 1 to 12: rounds, drafted tokens and speed, on every path and in the mean.

The formulas of `model.methods.speculative.theory` are compared with the simulator and with sums in fractions. gamma = draft length,
G = gamma + 1, alpha = acceptance rate, c = cost ratio, l = tokens, N = tokens per round, mu = E[N], R(l) and D(l) = mean rounds and
drafted tokens of l tokens, u_m = probability that a round starts after m tokens, S = speed-up. Distributions and logs are in
`speculative_laws`, views, units and links in `speculative_views`.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from fractions import Fraction
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import dependent_acceptance as laws
from model.methods.speculative import theory as formulas
from sim.theorems.drafting_examples import (
    accepted,
    all_runs,
    drafted,
    drafting,
    law_of,
    mean,
    rounds,
    short_decodings,
    starts,
    walk_paths,
)
from sim.theorems.pipelined_examples import CLOSE, cost, count_work, integers, parameters_of, play, rates, size, survivors
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_MANY = 80  # tokens after which the start of a sequence no longer matters
_LONGEST = 120  # bound on the best draft length of all drawn points


theorem = TheoremCollection("speculative")
_EQ_1 = "[Leviathan2023], Eq. 1"


# --- Examples ---


def _points(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    given = {"tokens": integers(1, 40), "draft_length": integers(0, 8), "acceptance_rate": rates(), "cost_ratio": rates()}
    return st.fixed_dictionaries(given | fields)


def _uncertain() -> SearchStrategy[Example]:
    return _points().filter(lambda x: x["acceptance_rate"] < 1)


def _priced() -> SearchStrategy[Example]:
    """Draw points with a finite best draft length: a draft pass costs at least .05 and at most 1.2 passes of the target."""
    costs = st.integers(1, 24).map(lambda twentieths: twentieths / 20)
    return st.fixed_dictionaries({"acceptance_rate": rates().filter(lambda rate: rate < 1), "cost_ratio": costs})


def _curves() -> SearchStrategy[Example]:
    steps = st.lists(st.integers(0, 4), max_size=6)
    return st.fixed_dictionaries({"acceptance_rate": rates(), "cost_ratio": rates(), "steps": steps})


def _mixtures() -> SearchStrategy[Example]:
    weights = st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)
    return st.fixed_dictionaries({"weights": weights, "law": st.fixed_dictionaries({"match_rate": rates()})})


def _rates_by_draft_position() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"acceptance_rates": st.lists(rates(), min_size=1, max_size=3)})


def _betas() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"a": integers(1, 9), "b": integers(1, 9), "draft_length": integers(0, 3)})


def _chains() -> SearchStrategy[Example]:
    return st.fixed_dictionaries(
        {
            "draft_length": integers(0, 3),
            "match_rate": integers(8, 16).map(lambda twentieths: twentieths / 20),
            "correlation": integers(-1, 3).map(lambda fifths: fifths / 5),
        }
    )


# --- 1: mean rounds and drafted tokens ---


@theorem("1a", "The mean number of rounds over all outcomes is R(l).", source="renewal theory", given=short_decodings)
def rounds_in_the_mean(x: Example) -> None:
    n, gamma, alpha = _few(x)
    equal("mean rounds", mean(x, n, rounds), float(formulas.target_runs(n, alpha, gamma)), CLOSE)


@theorem("1b", "The mean number of drafted tokens over all outcomes is D(l).", source="renewal theory", given=short_decodings)
def drafted_in_the_mean(x: Example) -> None:
    n, gamma, alpha = _few(x)
    equal("mean drafted tokens", mean(x, n, drafted), float(formulas.draft_runs(n, alpha, gamma)), CLOSE)


@theorem("1c", "A round starts after m tokens with probability u_m.", source="renewal theory", given=short_decodings)
def starts_in_the_mean(x: Example) -> None:
    n, gamma, alpha = _few(x)
    density = formulas.renewal_density(n, alpha, gamma)
    for out in range(n):
        chance = mean(x, n, lambda run, out=out: out in starts(run))  # type: ignore[misc]
        equal(f"probability that a round starts after {out} tokens", float(density[out]), chance, CLOSE)


@theorem("1d", "R(l) satisfies its recursion and is the sum of u_m; D(l) is the sum of u_m min(gamma, l - m - 1).",
         source="renewal theory", given=_points)
def recursion(x: Example) -> None:
    n, gamma, alpha = _point(x)
    exact = _rounds(n, Fraction(x["acceptance_rate"]).limit_denominator(100), gamma)
    equal("R", float(formulas.target_runs(n, alpha, gamma)), float(exact[n]), CLOSE)
    density = formulas.renewal_density(n, alpha, gamma)
    equal("sum of the probabilities of starts", math.fsum(density), float(exact[n]), CLOSE)
    drafts = math.fsum(chance * min(gamma, n - out - 1) for out, chance in enumerate(density.tolist()))
    equal("D", float(formulas.draft_runs(n, alpha, gamma)), drafts, CLOSE)


@theorem("1e", "For any law and cost the formula gives the mean and variance of the latency, mean compute, rounds and drafts.",
         source="forward recursion over starts of rounds", given=lambda: short_decodings(costs="tenths", law="any"))
def prediction(x: Example) -> None:
    n = x["tokens"]
    predicted = formulas.predict(parameters_of(x), n, law_of(x), cost(x))
    runs = list(all_runs(x, n))

    def average(values: list[float]) -> float:
        return math.fsum(chance * value for (chance, _), value in zip(runs, values, strict=True))

    times = [run.latency for _, run in runs]
    time = average(times)
    equal("mean latency", float(predicted.latency), time, CLOSE)
    equal("mean compute", float(predicted.busy), average([run.busy for _, run in runs]), CLOSE)
    counts = predicted.rounds, predicted.drafted
    for what, got, of in zip(("mean rounds", "mean drafted tokens"), counts, (rounds, drafted), strict=True):
        equal(what, float(np.asarray(got)), average([of(run) for _, run in runs]), CLOSE)
    variance = average([(value - time) ** 2 for value in times])
    at_most("error of the variance", abs(float(predicted.latency_variance) - variance), CLOSE * time**2)
    equal("latency of plain decoding", float(predicted.plain_latency), n * cost(x).target_pass, CLOSE)
    if parameters_of(x).placement == "colocated":
        equal("units in use", float(predicted.units_ratio), 1.0)


# --- 2 and 3: bounds and the limit ---


@theorem("2a", "R(l) is at least ceil(l / (gamma + 1)) and l / mu, and at most l.", source="Wald", given=_points)
def bounds_of_rounds(x: Example) -> None:
    n, gamma, alpha = _point(x)
    runs = float(formulas.target_runs(n, alpha, gamma))
    at_most("least rounds", -(-n // (gamma + 1)), runs, CLOSE)
    at_most("rounds", runs, n, CLOSE)
    at_most("tokens over tokens per round", n / float(formulas.expected_tokens(alpha, gamma)), runs, CLOSE)


@theorem("2b", "R is subadditive: R(l + m) <= R(l) + R(m).",
         source="a division adds a start", given=lambda: _points(more_tokens=integers(1, 40)))
def subadditive(x: Example) -> None:
    n, gamma, alpha = _point(x)
    more = x["more_tokens"]
    together, one, other = (float(formulas.target_runs(tokens, alpha, gamma)) for tokens in (n + more, n, more))
    at_most("rounds of l + m tokens", together, one + other, CLOSE)


@theorem("2c", "R(l) does not rise with alpha and gamma, and does not fall with l.", source="coupling",
         given=lambda: _points(other_rate=rates()))
def monotone_rounds(x: Example) -> None:
    n, gamma, alpha = _point(x)
    runs = float(formulas.target_runs(n, alpha, gamma))
    at_most("rounds at a higher rate", float(formulas.target_runs(n, max(alpha, x["other_rate"]), gamma)), runs, CLOSE)
    at_most("rounds with a longer draft", float(formulas.target_runs(n, alpha, gamma + 1)), runs, CLOSE)
    at_most("rounds with one token less", runs, float(formulas.target_runs(n + 1, alpha, gamma)), CLOSE)


@theorem("2d", "The speed-up of l tokens is at most the larger of 1 and S.",
         source="false: if gamma is too long for c, cutting the last draft saves time", given=_points, expect="fails")
def finite_below_infinite(x: Example) -> None:
    n, gamma, alpha = _point(x)
    finite = float(formulas.finite_speedup(n, alpha, gamma, x["cost_ratio"]))
    at_most("speed-up of l tokens", finite, max(1.0, float(formulas.speedup(alpha, gamma, x["cost_ratio"]))), CLOSE)


@theorem("3", "R(l) - l / mu differs from (E[N^2] - mu) / (2 mu^2) by at most alpha^l / (1 - alpha).",
         source="renewal theory: u_m differs from 1 / mu by at most alpha^m", given=_uncertain)
def limit_of_rounds(x: Example) -> None:
    n, gamma, alpha = _point(x)
    mu = float(formulas.expected_tokens(alpha, gamma))
    square = float(formulas.tokens_variance(alpha, gamma)) + mu**2
    limit = (square - mu) / (2 * mu**2)
    error = abs(float(formulas.target_runs(n, alpha, gamma)) - n / mu - limit)
    at_most("distance from the limit", error, alpha**n / (1 - alpha) + 1e-12 * n)


# --- 4 and 5: on every path ---


@theorem("4a", "Accepted tokens and rounds add up to l, on every path and in all views.",
         source="a round gives one more token than it accepts", given=lambda: drafting(outcomes="survive", costs="whole"))
def accepted_and_rounds(x: Example) -> None:
    n, gamma = size(x), x["draft_length"]
    run, work, tally = play(x), count_work(x), walk_paths(x)
    equal("tokens of the simulator and of the counter", (len(run.tokens), len(work.tokens)), (n, n))
    equal("accepted tokens and rounds", accepted(run) + rounds(run), n)
    equal("rounds by length, of the counter", sorted(work.rounds.items()), sorted(run.rounds.items()))
    equal("drafted tokens of the counter and of the paths", (drafted(work), tally.drafted[0]), (drafted(run), drafted(run)))
    equal("rounds of the paths", tally.rounds.tolist(), [rounds(run)] * len(tally.rounds))
    lengths = [sum(times for (count, _), times in run.rounds.items() if count == length) for length in range(gamma + 1)]
    equal("rounds of the paths by accepted tokens", tally.accepted.tolist(), [len(tally.rounds) * times for times in lengths])


@theorem("4b", "A round that starts after m tokens drafts min(gamma, l - m - 1) tokens, so no round goes beyond the end.",
         source="the target gives the last token", given=lambda: drafting(outcomes="survive"))
def draft_is_cut(x: Example) -> None:
    n, gamma = size(x), x["draft_length"]
    run = play(x)
    lengths = [min(gamma, n - out - 1) for out in starts(run)]
    equal("drafted tokens", drafted(run), sum(lengths))
    equal("longest and shortest draft", _extremes(count for _, count in run.rounds), _extremes(lengths))
    for count, length in run.rounds:
        at_most("accepted tokens of a round", count, length)


@theorem("5", "Cutting drafts at the end adds no round and does not increase drafted tokens.",
         source="a round that reaches the end reaches it with either draft", given=lambda: drafting(outcomes="survive"))
def cut_drafts_cost_no_round(x: Example) -> None:
    """Compare starts of rounds with those of whole drafts, which may go beyond the end."""
    n, gamma = size(x), x["draft_length"]
    lengths, whole_drafts, out = survivors(x), [], 0
    while out < n:
        whole_drafts.append(out)
        out += min(lengths[out], gamma) + 1
    equal("starts of rounds", starts(play(x)), whole_drafts)
    at_most("drafted tokens", drafted(play(x)), gamma * len(whole_drafts))


# --- 6 and 7: distribution of the tokens per round ---


@theorem("6a", "P(N = j) = alpha^(j-1) (1 - alpha) for j <= gamma, and P(N = gamma + 1) = alpha^gamma.",
         source="[Leviathan2023], Section 3.1", given=short_decodings)
def law_of_a_round(x: Example) -> None:
    gamma, alpha = x["draft_length"], _rate(x)
    chances = formulas.tokens_pmf(alpha, gamma)
    equal("number of probabilities", len(chances), gamma + 1)
    for tokens in range(1, gamma + 2):
        chance = mean(x, gamma + 1, lambda run, tokens=tokens: run.commits[0][2] == tokens)  # type: ignore[misc]
        equal(f"probability of {tokens} tokens", float(chances[tokens - 1]), chance, CLOSE)


@theorem("6b", "The distribution of N sums to 1, and has the mean of Eq. 1 and the variance of `tokens_variance`.", source=_EQ_1,
         given=_points)
def moments_of_a_round(x: Example) -> None:
    gamma, alpha = x["draft_length"], x["acceptance_rate"]
    chances, tokens = formulas.tokens_pmf(alpha, gamma), np.arange(1, gamma + 2)
    equal("sum of the probabilities", math.fsum(chances), 1.0, CLOSE)
    mu = math.fsum(chances * tokens)
    equal("mean", float(formulas.expected_tokens(alpha, gamma)), mu, CLOSE)
    variance = math.fsum(chances * (tokens - mu) ** 2)
    at_most("error of the variance", abs(float(formulas.tokens_variance(alpha, gamma)) - variance), CLOSE * mu**2)


@theorem("6c", "E[z^N] = 1 + (z - 1) (1 - (alpha z)^G) / (1 - alpha z).", source="geometric sums",
         given=lambda: _points(z=rates()).filter(lambda x: x["acceptance_rate"] * x["z"] < 1))
def generating_function(x: Example) -> None:
    gamma, z = x["draft_length"], Fraction(x["z"]).limit_denominator(100)
    alpha = Fraction(x["acceptance_rate"]).limit_denominator(100)
    value = math.fsum(formulas.tokens_pmf(x["acceptance_rate"], gamma) * float(z) ** np.arange(1, gamma + 2))
    want = 1 + (z - 1) * (1 - (alpha * z) ** (gamma + 1)) / (1 - alpha * z)
    at_most("error of E[z^N]", abs(value - float(want)), CLOSE)


@theorem("7a", "For a random draft length D, E[N] = (1 - alpha E[alpha^D]) / (1 - alpha), at most Eq. 1 at ceil(E[D]).",
         source=_EQ_1, given=_mixtures)
def random_length(x: Example) -> None:
    alpha, weights = _rate(x), x["weights"]
    mass = [weight / sum(weights) for weight in weights]
    first = math.fsum(
        chance * mean({**x, "draft_length": length}, len(mass), lambda run: run.commits[0][2])
        for length, chance in enumerate(mass)
    )
    tokens = float(laws.expected_tokens_random_length(alpha, mass))
    equal("mean tokens of a round", tokens, first, CLOSE)
    if alpha < 1:
        closed = (1 - alpha * math.fsum(chance * alpha**length for length, chance in enumerate(mass))) / (1 - alpha)
        equal("closed form", tokens, closed, 1e-10)
    ceiling = math.ceil(math.fsum(chance * length for length, chance in enumerate(mass)) - 1e-9)
    at_most("mean tokens", tokens, float(formulas.expected_tokens(alpha, ceiling)), CLOSE)


@theorem("7b", "With acceptance rates by position in the draft, E[N] = 1 + alpha_1 + alpha_1 alpha_2 + ...", source=_EQ_1,
         given=_rates_by_draft_position)
def rates_by_draft_position(x: Example) -> None:
    chances = x["acceptance_rates"]
    survival = np.cumprod(chances).tolist()
    first = _first_round(len(chances), survival)
    equal("mean tokens of a round", float(laws.expected_tokens_by_draft_position(chances)), first, CLOSE)


@theorem("7c", "With a rate B ~ Beta(a, b) drawn per round, E[N] = 1 + E[B] + E[B^2] + ..., at least Eq. 1 at E[B].",
         source="Jensen", given=_betas)
def shared_rate(x: Example) -> None:
    a, b, gamma = x["a"], x["b"], x["draft_length"]
    survival = Rounds.shared_rate(a / (a + b), a + b, gamma).survival.tolist()
    first = _first_round(gamma, survival)
    tokens = float(laws.expected_tokens_shared_rate(laws.beta_moments(a, b, gamma)))
    equal("mean tokens of a round", tokens, first, CLOSE)
    at_most("Eq. 1 at the mean rate", float(formulas.expected_tokens(a / (a + b), gamma)), tokens, CLOSE)


@theorem("7d", "If acceptances form a Markov chain, by position or by test, the formula gives E[N]; positive correlation reduces"
         " it.", source="[Leviathan2023], Eq. 1, from both states", given=_chains)
def chained(x: Example) -> None:
    gamma, p, rho = x["draft_length"], x["match_rate"], x["correlation"]
    for chain in ("output", "tested"):
        mean_rounds = _chained_rounds(2 * _MANY, gamma, p, rho, every=chain == "output")
        tokens = float(laws.expected_tokens_markov(p, rho, gamma, chain))
        equal(f"tokens of a round, {chain}", tokens, _MANY / (mean_rounds[2 * _MANY] - mean_rounds[_MANY]), 1e-4)
        if rho >= 0:
            at_most("tokens of a round of a chain", tokens, float(formulas.expected_tokens(p, gamma)), CLOSE)


@theorem("7e", "On a log of accepted lengths by position the simulator has the rounds of `tokens_of_rounds`.",
         source="the next round starts where a round ends", given=lambda: drafting(12, outcomes="survive"))
def logged(x: Example) -> None:
    run = play(x)
    count, per_round = laws.tokens_of_rounds([survive + 1 for survive in x["survive"]], x["draft_length"])
    equal("rounds and tokens of a round", (count, per_round), (rounds(run), size(x) / rounds(run)))


# --- 8 to 12: speed ---


@theorem("8a", "S rises with gamma up to the best draft length and falls after it.", source="[Leviathan2023], Theorem 3.8",
         given=_priced)
def single_maximum(x: Example) -> None:
    alpha, c = x["acceptance_rate"], x["cost_ratio"]
    speeds = _speeds(alpha, c)
    best = int(np.argmax(speeds >= speeds.max() * (1 - CLOSE)))
    at_most("largest fall before the maximum", 0.0, float(np.diff(speeds[: best + 1]).min(initial=0.0)) + 1e-12)
    at_most("largest rise after the maximum", float(np.diff(speeds[best:]).max(initial=0.0)), 1e-12)
    at_most("best draft length", best, _LONGEST - 1)  # else the maximum is out of range


@theorem("8b", "The best draft length differs by at most 1 from the zero of the derivative of S, and no other length is better.",
         source="[Leviathan2023], Section 3.5", given=_priced)
def best_length(x: Example) -> None:
    alpha, c = x["acceptance_rate"], x["cost_ratio"]
    speeds, best = _speeds(alpha, c), int(formulas.optimal_draft_length(alpha, c))
    equal("best speed-up", float(speeds[best]), float(speeds.max()), CLOSE)
    if 0 < alpha < 1 and 0 < c < 1:
        decay = -math.log(alpha)
        level = 1 + decay * (1 - c) / c
        w = level + 2 * math.sqrt(level)
        for _ in range(200):
            w = level + math.log(w)
        real = max((w - level) / decay - 1, 0.0)
        at_most("distance from the real-valued optimum", abs(best - real), 1.0, 1e-9)


@theorem("8c", "With measured costs of widths, or a longest draft, no allowed draft length is better than the best one.",
         source="[Leviathan2023], Section 3.5", given=_curves)
def best_length_by_cost(x: Example) -> None:
    alpha, c, times = x["acceptance_rate"], x["cost_ratio"], list(accumulate(x["steps"], initial=4))
    curve, flat = list(enumerate(times, start=1)), [times[0]] * len(times)
    for given, prices in (({}, flat), ({"verify_cost": curve}, times)):
        speeds = [
            math.fsum(alpha**power for power in range(gamma + 1)) / (gamma * c + price / times[0])
            for gamma, price in enumerate(prices)
        ]
        for longest in range(len(times)):
            best = int(formulas.optimal_draft_length(alpha, c, longest=longest, **given))
            at_most("best draft length", best, longest)
            equal(f"best speed-up up to {longest}", speeds[best], max(speeds[: longest + 1]), CLOSE)
            speed = float(formulas.speedup(alpha, best, c, **given))
            equal("speed-up", speed, speeds[best], CLOSE)
    whole = int(formulas.optimal_draft_length(alpha, c, verify_cost=curve))
    equal("best speed-up of the curve", speeds[whole], max(speeds), CLOSE)


@theorem("9", "If alpha > c some draft length gives a speed-up of at least (1 + alpha) / (1 + c); otherwise none gives one.",
         source="[Leviathan2023], Corollary 3.9, and its converse", given=_priced)
def drafting_pays(x: Example) -> None:
    alpha, c = x["acceptance_rate"], x["cost_ratio"]
    best = float(_speeds(alpha, c)[1:].max())
    if alpha > c:
        at_most("gain of one drafted token", (1 + alpha) / (1 + c), best, CLOSE)
        at_most("no gain", 1.0, (1 + alpha) / (1 + c))
    else:
        at_most("best speed-up", best, 1.0, CLOSE)
    equal("best draft length is positive", int(formulas.optimal_draft_length(alpha, c, longest=_LONGEST)) > 0, alpha > c)


@theorem("10a", "S and S(l) are at most 1 / (1 - alpha + c alpha); free drafts (c = 0) reach it as gamma grows.",
         source="no policy accepts more than a share alpha of its drafted tokens", given=_points)
def oracle(x: Example) -> None:
    n, gamma, alpha = _point(x)
    c = x["cost_ratio"]
    bound, speed = float(formulas.oracle_speedup(alpha, c)), float(formulas.speedup(alpha, gamma, c))
    at_most("speed-up", speed, bound, CLOSE)
    at_most("speed-up of l tokens", float(formulas.finite_speedup(n, alpha, gamma, c)), bound, CLOSE)
    at_most("bound", bound, 1 / (1 - alpha) if alpha < 1 else math.inf, CLOSE)
    if alpha < 1:
        reached = float(formulas.speedup(alpha, gamma, 0.0)) / float(formulas.oracle_speedup(alpha, 0.0))
        equal("share of the bound that free drafts reach", reached, 1 - alpha ** (gamma + 1), 1e-10)
    equal("bound for a draft pass as expensive as a pass of the target", float(formulas.oracle_speedup(alpha, 1.0)), 1.0, CLOSE)


@theorem("10b", "The mean time of l tokens is at least (1 - alpha + c alpha) l passes of the target.", source="10a",
         given=lambda: short_decodings().flatmap(_with_ratio))
def oracle_on_the_simulator(x: Example) -> None:
    n, _, alpha = _few(x)
    c = x["cost_ratio"]
    given = {**x, "cost": {"cost_ratio": c}}
    time = mean(given, n, lambda run: run.latency)
    at_most("tokens over mean time", n, time * float(formulas.oracle_speedup(alpha, c)), CLOSE)


@theorem("11a", "Operations are (gamma c^ + gamma + 1) / mu times those of plain decoding, and never less.",
         source="[Leviathan2023], Theorem 3.11", given=_points)
def operations(x: Example) -> None:
    gamma, alpha, c = x["draft_length"], x["acceptance_rate"], x["cost_ratio"]
    factor = float(formulas.operations_factor(alpha, gamma, c))
    at_most("operations of plain decoding", 1.0, factor, CLOSE)
    mu = math.fsum(alpha**power for power in range(gamma + 1))
    equal("operations", factor, (gamma * c + gamma + 1) / mu, CLOSE)


@theorem("11b", "The target processes one position per drafted token and per round, never fewer than the generated tokens.",
         source="[Leviathan2023], Theorem 3.11", given=lambda: drafting(outcomes="survive", costs="whole"))
def operations_on_every_path(x: Example) -> None:
    work, layers = count_work(x), parameters_of(x).layers
    # The draft model also reads generated tokens: two after a fully accepted draft.
    target_layers = (rounds(work) + drafted(work)) * layers
    at_most("layers run by the target for the tokens", size(x) * layers, target_layers)
    equal("passes of the target", work.passes_of["target"], rounds(work))
    equal("passes of the draft model", work.passes_of["draft"], drafted(work))
    equal("passes", work.passes, rounds(work) + drafted(work))
    equal("positions with a projection", work.heads, rounds(work) + 2 * drafted(work))


@theorem("12a", "S is 1 / (gamma c + 1) at alpha = 0, (gamma + 1) / (gamma c + 1) at alpha = 1, and 1 without drafts.",
         source="[Leviathan2023], Theorem 3.8",
         given=_points)
def limits(x: Example) -> None:
    gamma, c = x["draft_length"], x["cost_ratio"]
    certain, nearly = (float(formulas.speedup(alpha, gamma, c)) for alpha in (1.0, 1 - 1e-12))
    equal("speed-up if all tokens are accepted", certain, (gamma + 1) / (gamma * c + 1), CLOSE)
    equal("speed-up if nearly all tokens are accepted", nearly, certain, 1e-9)
    equal("speed-up if no token is accepted", float(formulas.speedup(0.0, gamma, c)), 1 / (gamma * c + 1), CLOSE)
    equal("speed-up without drafts", float(formulas.speedup(x["acceptance_rate"], 0, c)), 1.0, CLOSE)


@theorem("12c", "With measured costs of widths, S(l) equals l passes of the target over the mean time of all outcomes.",
         source="a cut round has a narrower pass", given=lambda: short_decodings(costs="whole"))
def measured_widths(x: Example) -> None:
    n, gamma, alpha = _few(x)
    given = {**x, "placement": "colocated"}
    time = mean(given, n, lambda run: run.latency)
    prices = cost(given)
    assert prices.cost_ratio is not None
    speed = float(formulas.finite_speedup(n, alpha, gamma, prices.cost_ratio, verify_cost=prices.verify_cost))
    equal("speed-up of l tokens", speed, n * prices.target_pass / time, CLOSE)


@theorem("12d", "The formulas give the same values for arrays of draft lengths as for single ones.", source="broadcasting",
         given=lambda: _points(other_length=integers(0, 12)))
def point_by_point(x: Example) -> None:
    n, gamma, alpha = _point(x)
    c, more = x["cost_ratio"], x["other_length"]
    curve = [(width, 1 + width / 8) for width in range(1, 20)]
    formula: list[tuple[str, Callable[[Any], Any]]] = [
        ("E[N]", lambda length: formulas.expected_tokens(alpha, length)),
        ("Var N", lambda length: formulas.tokens_variance(alpha, length)),
        ("S", lambda length: formulas.speedup(alpha, length, c, verify_cost=curve)),
        ("R", lambda length: formulas.target_runs(n, alpha, length)),
        ("D", lambda length: formulas.draft_runs(n, alpha, length)),
        ("S(l)", lambda length: formulas.finite_speedup(n, alpha, length, c, verify_cost=curve)),
    ]
    for what, of in formula:
        equal(what, of(np.array([gamma, more])).tolist(), [float(of(gamma)), float(of(more))])


@theorem("12b", "S(l) = l / (R + c D), and tends to S as l grows.", source="renewal theory", given=_points)
def finite_becomes_infinite(x: Example) -> None:
    n, gamma, alpha = _point(x)
    c = x["cost_ratio"]
    exact = _rounds(n, Fraction(x["acceptance_rate"]).limit_denominator(100), gamma)
    drafts = sum(exact[max(n - gamma, 0) : n])
    finite = n / float(exact[n] + drafts * Fraction(c).limit_denominator(100))
    equal("speed-up of l tokens", float(formulas.finite_speedup(n, alpha, gamma, c)), finite, CLOSE)
    many = 10**6
    endless = float(formulas.speedup(alpha, gamma, c))
    equal("speed-up of 10^6 tokens", float(formulas.finite_speedup(many, alpha, gamma, c)), endless, 4 * (gamma + 1) ** 2 / many)


# --- Helpers ---


def _few(x: Example) -> tuple[int, int, float]:
    return x["tokens"], x["draft_length"], _rate(x)


def _rate(x: Example) -> float:
    return float(x["law"]["match_rate"])


def _point(x: Example) -> tuple[int, int, float]:
    return x["tokens"], x["draft_length"], x["acceptance_rate"]


def _first_round(gamma: int, survival: list[float]) -> float:
    """Simulate the mean tokens of the first round; outcomes at later positions have no effect on it."""
    ends = [*survival[:gamma], 0.0]
    chances = [sooner - later for sooner, later in pairwise([1.0, *ends])]
    runs = [play({"draft_length": gamma, "survive": [length] + [0] * gamma}) for length in range(gamma + 1)]
    return math.fsum(chance * run.commits[0][2] for chance, run in zip(chances, runs, strict=True))


def _chained_rounds(tokens: int, gamma: int, p: float, rho: float, *, every: bool) -> list[float]:
    """Return the mean rounds of 0, 1, ... tokens after an accepted one.

    The chain has a state for `every` position, or only for tested ones.
    """
    success = p * (1 - rho), p + rho * (1 - p)  # after a rejection, after an acceptance
    means = [[0.0, 0.0]]
    for left in range(1, tokens + 1):
        count, row = min(gamma, left - 1), []
        for before in (0, 1):
            total, reach, last = 1.0, 1.0, before
            for kept in range(count):
                total += reach * (1 - success[last]) * means[left - kept - 1][0]
                reach, last = reach * success[last], 1
            ahead = means[left - count - 1]
            total += reach * (success[last] * ahead[1] + (1 - success[last]) * ahead[0] if every else ahead[last])
            row.append(total)
        means.append(row)
    return [row[1] for row in means]


def _extremes(values: Iterable[int]) -> tuple[int, int]:
    numbers = list(values)
    return min(numbers), max(numbers)


def _rounds(tokens: int, alpha: Fraction, gamma: int) -> list[Fraction]:
    """Return R(0), ..., R(tokens) from their recursion: one round, and the mean rounds of the remaining tokens."""
    chances = [alpha ** (j - 1) * (1 - alpha) for j in range(1, gamma + 1)] + [alpha**gamma]
    means = [Fraction(0)]
    for left in range(1, tokens + 1):
        means.append(sum((chance * means[left - j] for j, chance in enumerate(chances[:left], start=1)), Fraction(1)))
    return means


def _speeds(alpha: float, c: float) -> formulas.Floats:
    return formulas.speedup(alpha, np.arange(_LONGEST), c)


def _with_ratio(example: Example) -> SearchStrategy[Example]:
    return rates().map(lambda ratio: {**example, "cost_ratio": ratio})


THEOREMS = theorem.all()
