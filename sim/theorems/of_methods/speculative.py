"""The theorems on speculative decoding, 1 to 12: rounds, drafted tokens and speed, on every path and in the mean.

The formulas of `model.methods.speculative.theory` are asked of the simulator, and of sums in fractions. gamma = draft length, G =
gamma + 1, alpha = acceptance rate, c = cost ratio, l = tokens, N = tokens of a round, mu = E[N], R and D = mean rounds and drafted
tokens of l tokens, S = speed-up. Distributions and what is counted are in `speculative_laws`, units and links in
`speculative_engine`.

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

from model.methods.rounds import Rounds
from model.methods.speculative import dependent_acceptance as laws
from model.methods.speculative import theory as formulas
from sim.theorems.drafting_examples import accepted, all_runs, drafted, drafting, few, law_of, mean, rounds, starts, walked
from sim.theorems.pipelined_examples import CLOSE, choice, cost, counted, play, rates, size, survivors, whole
from sim.theorems.theorem import Collected, Example, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

_MANY = 80  # tokens, after which it no longer matters how a text began
_LONGEST = 120  # no best draft length of the points that are drawn is longer


theorem = Collected("speculative")
_EQ_1 = "[Leviathan2023], Eq. 1"


# --- What they are tried on ---


def _points(**fields: SearchStrategy[Any]) -> SearchStrategy[Example]:
    given = {"tokens": whole(1, 40), "draft_length": whole(0, 8), "acceptance_rate": rates(), "cost_ratio": rates()}
    return st.fixed_dictionaries(given | fields)


def _uncertain() -> SearchStrategy[Example]:
    return _points().filter(lambda x: x["acceptance_rate"] < 1)


def _priced() -> SearchStrategy[Example]:
    """Points with a best draft length in sight: a draft costs something, and at most what a pass of the target does."""
    costs = st.integers(1, 24).map(lambda twentieths: twentieths / 20)
    return st.fixed_dictionaries({"acceptance_rate": rates().filter(lambda rate: rate < 1), "cost_ratio": costs})


def _curves() -> SearchStrategy[Example]:
    steps = st.lists(st.integers(0, 4), max_size=6)
    return st.fixed_dictionaries({"acceptance_rate": rates(), "cost_ratio": rates(), "steps": steps})


def _mixtures() -> SearchStrategy[Example]:
    weights = st.lists(st.integers(0, 3), min_size=1, max_size=4).filter(any)
    return st.fixed_dictionaries({"weights": weights, "law": st.fixed_dictionaries({"match_rate": rates()})})


def _rates_by_place() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"acceptance_rates": st.lists(rates(), min_size=1, max_size=3)})


def _betas() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"a": whole(1, 9), "b": whole(1, 9), "draft_length": whole(0, 3)})


def _chains() -> SearchStrategy[Example]:
    return st.fixed_dictionaries(
        {
            "draft_length": whole(0, 3),
            "match_rate": whole(8, 16).map(lambda twentieths: twentieths / 20),
            "correlation": whole(-1, 3).map(lambda fifths: fifths / 5),
        }
    )


# --- 1: rounds and drafted tokens in the mean ---


@theorem("1a", "The mean number of rounds, over all luck, is R(l).", source="renewal theory", given=few)
def rounds_in_the_mean(x: Example) -> None:
    n, gamma, alpha = _few(x)
    equal("mean rounds", mean(x, n, rounds), float(formulas.target_runs(n, alpha, gamma)), CLOSE)


@theorem("1b", "The mean number of drafted tokens, over all luck, is D(l).", source="renewal theory", given=few)
def drafted_in_the_mean(x: Example) -> None:
    n, gamma, alpha = _few(x)
    equal("mean drafted tokens", mean(x, n, drafted), float(formulas.draft_runs(n, alpha, gamma)), CLOSE)


@theorem("1c", "A round starts when m tokens are out with chance u_m.", source="renewal theory", given=few)
def starts_in_the_mean(x: Example) -> None:
    n, gamma, alpha = _few(x)
    density = formulas.renewal_density(n, alpha, gamma)
    for out in range(n):
        chance = mean(x, n, lambda run, out=out: out in starts(run))  # type: ignore[misc]
        equal(f"chance that a round starts after {out} tokens", float(density[out]), chance, CLOSE)


@theorem("1d", "R(l) is what its recursion gives in fractions, and the sum of u_m; D(l) is that of u_m min(gamma, l - m - 1).",
         source="renewal theory", given=_points)
def recursion(x: Example) -> None:
    n, gamma, alpha = _point(x)
    exact = _rounds(n, Fraction(x["acceptance_rate"]).limit_denominator(100), gamma)
    equal("R", float(formulas.target_runs(n, alpha, gamma)), float(exact[n]), CLOSE)
    density = formulas.renewal_density(n, alpha, gamma)
    equal("sum of the chances of starts", math.fsum(density), float(exact[n]), CLOSE)
    drafts = math.fsum(chance * min(gamma, n - out - 1) for out, chance in enumerate(density.tolist()))
    equal("D", float(formulas.draft_runs(n, alpha, gamma)), drafts, CLOSE)


@theorem("1e", "Mean and variance of the latency, mean compute, rounds and drafts are those over all luck, under any law and cost.",
         source="forward over the starts of rounds", given=lambda: few(costs="tenths", law="any"))
def prediction(x: Example) -> None:
    n = x["tokens"]
    found = formulas.predict(choice(x), n, law_of(x), cost(x))
    runs = list(all_runs(x, n))

    def average(values: list[float]) -> float:
        return math.fsum(chance * value for (chance, _), value in zip(runs, values, strict=True))

    times = [run.latency for _, run in runs]
    time = average(times)
    equal("mean latency", float(found.latency), time, CLOSE)
    equal("mean compute", float(found.busy), average([run.busy for _, run in runs]), CLOSE)
    counts = found.rounds, found.drafted
    for what, got, of in zip(("mean rounds", "mean drafted tokens"), counts, (rounds, drafted), strict=True):
        equal(what, float(np.asarray(got)), average([of(run) for _, run in runs]), CLOSE)
    variance = average([(value - time) ** 2 for value in times])
    at_most("error of the variance", abs(float(found.latency_variance) - variance), CLOSE * time**2)
    equal("latency of plain decoding", float(found.plain_latency), n * cost(x).target_pass, CLOSE)
    if choice(x).placement == "colocated":
        equal("units in use", float(found.units_ratio), 1.0)


# --- 2 and 3: bounds and the limit ---


@theorem("2a", "R(l) is between l / (gamma + 1), rounded up, and l, and at least l / mu.", source="Wald", given=_points)
def bounds_of_rounds(x: Example) -> None:
    n, gamma, alpha = _point(x)
    runs = float(formulas.target_runs(n, alpha, gamma))
    at_most("least rounds", -(-n // (gamma + 1)), runs, CLOSE)
    at_most("rounds", runs, n, CLOSE)
    at_most("tokens over tokens of a round", n / float(formulas.expected_tokens(alpha, gamma)), runs, CLOSE)


@theorem("2b", "Two texts in one go take no more rounds than one after the other: R(l + m) <= R(l) + R(m).",
         source="a cut adds a start", given=lambda: _points(more_tokens=whole(1, 40)))
def subadditive(x: Example) -> None:
    n, gamma, alpha = _point(x)
    more = x["more_tokens"]
    together, one, other = (float(formulas.target_runs(tokens, alpha, gamma)) for tokens in (n + more, n, more))
    at_most("rounds of both texts in one go", together, one + other, CLOSE)


@theorem("2c", "R(l) falls with alpha and gamma, and rises with l.", source="coupling", given=lambda: _points(other_rate=rates()))
def monotone_rounds(x: Example) -> None:
    n, gamma, alpha = _point(x)
    runs = float(formulas.target_runs(n, alpha, gamma))
    at_most("rounds at a higher rate", float(formulas.target_runs(n, max(alpha, x["other_rate"]), gamma)), runs, CLOSE)
    at_most("rounds with a longer draft", float(formulas.target_runs(n, alpha, gamma + 1)), runs, CLOSE)
    at_most("rounds of one token less", runs, float(formulas.target_runs(n + 1, alpha, gamma)), CLOSE)


@theorem("2d", "The speed-up of a finite text is at most the larger of 1 and that of an endless one.",
         source="false: where gamma is too long for c, cutting the last draft short helps", given=_points, expect="fails")
def finite_below_infinite(x: Example) -> None:
    n, gamma, alpha = _point(x)
    finite = float(formulas.finite_speedup(n, alpha, gamma, x["cost_ratio"]))
    at_most("speed-up of these tokens", finite, max(1.0, float(formulas.speedup(alpha, gamma, x["cost_ratio"]))), CLOSE)


@theorem("3", "R(l) - l / mu is within alpha^l / (1 - alpha) of (E[N^2] - mu) / (2 mu^2).",
         source="renewal theory: u_m is within alpha^m of 1 / mu", given=_uncertain)
def limit_of_rounds(x: Example) -> None:
    n, gamma, alpha = _point(x)
    mu = float(formulas.expected_tokens(alpha, gamma))
    square = float(formulas.tokens_variance(alpha, gamma)) + mu**2
    limit = (square - mu) / (2 * mu**2)
    error = abs(float(formulas.target_runs(n, alpha, gamma)) - n / mu - limit)
    at_most("distance from the limit", error, alpha**n / (1 - alpha) + 1e-12 * n)


# --- 4 and 5: on every path ---


@theorem("4a", "Accepted tokens and rounds add up to l, on every path, in all views, whatever survives of a draft.",
         source="a round gives one token more than it accepts", given=lambda: drafting(luck="survive", costs="whole"))
def accepted_and_rounds(x: Example) -> None:
    n, gamma = size(x), x["draft_length"]
    run, work, tally = play(x), counted(x), walked(x)
    equal("tokens of the simulator and of the counter", (len(run.tokens), len(work.tokens)), (n, n))
    equal("accepted tokens and rounds", accepted(run) + rounds(run), n)
    equal("rounds by length, of the counter", sorted(work.rounds.items()), sorted(run.rounds.items()))
    equal("drafted tokens of the counter and of the paths", (drafted(work), tally.drafted[0]), (drafted(run), drafted(run)))
    equal("rounds of the paths", tally.rounds.tolist(), [rounds(run)] * len(tally.rounds))
    lengths = [sum(times for (count, _), times in run.rounds.items() if count == length) for length in range(gamma + 1)]
    equal("rounds of the paths by accepted tokens", tally.accepted.tolist(), [len(tally.rounds) * times for times in lengths])


@theorem("4b", "A round drafts min(gamma, l - m - 1) tokens after m: no round goes beyond the end.",
         source="the target gives the last token", given=lambda: drafting(luck="survive"))
def draft_is_cut(x: Example) -> None:
    n, gamma = size(x), x["draft_length"]
    run = play(x)
    wanted = [min(gamma, n - out - 1) for out in starts(run)]
    equal("drafted tokens", drafted(run), sum(wanted))
    equal("longest and shortest draft", _ends(count for _, count in run.rounds), _ends(wanted))
    for count, length in run.rounds:
        at_most("accepted tokens of a round", count, length)


@theorem("5", "Cutting drafts short at the end costs no round, and saves drafts.",
         source="a round that reaches the end does so anyway", given=lambda: drafting(luck="survive"))
def cut_drafts_cost_no_round(x: Example) -> None:
    """Whole drafts beyond the end, of tokens that are as good as those asked for: the same rounds begin."""
    n, gamma = size(x), x["draft_length"]
    lengths, begun, out = survivors(x), [], 0
    while out < n:
        begun.append(out)
        out += min(lengths[out], gamma) + 1
    equal("starts of rounds", starts(play(x)), begun)
    at_most("drafted tokens", drafted(play(x)), gamma * len(begun))


# --- 6 and 7: the law of a round ---


@theorem("6a", "A round gives j <= gamma tokens with chance alpha^(j-1) (1 - alpha), and gamma + 1 with alpha^gamma.",
         source="[Leviathan2023], Section 3.1", given=few)
def law_of_a_round(x: Example) -> None:
    gamma, alpha = x["draft_length"], _rate(x)
    chances = formulas.tokens_pmf(alpha, gamma)
    equal("number of chances", len(chances), gamma + 1)
    for tokens in range(1, gamma + 2):
        chance = mean(x, gamma + 1, lambda run, tokens=tokens: run.commits[0][2] == tokens)  # type: ignore[misc]
        equal(f"chance of {tokens} tokens", float(chances[tokens - 1]), chance, CLOSE)


@theorem("6b", "These chances add up to 1, and have the mean of Eq. 1 and the variance of the formula.", source=_EQ_1,
         given=_points)
def moments_of_a_round(x: Example) -> None:
    gamma, alpha = x["draft_length"], x["acceptance_rate"]
    chances, tokens = formulas.tokens_pmf(alpha, gamma), np.arange(1, gamma + 2)
    equal("sum of the chances", math.fsum(chances), 1.0, CLOSE)
    mu = math.fsum(chances * tokens)
    equal("mean", float(formulas.expected_tokens(alpha, gamma)), mu, CLOSE)
    variance = math.fsum(chances * (tokens - mu) ** 2)
    at_most("error of the variance", abs(float(formulas.tokens_variance(alpha, gamma)) - variance), CLOSE * mu**2)


@theorem("6c", "E[z^N] = 1 + (z - 1) (1 - (alpha z)^G) / (1 - alpha z).", source="geometric sums",
         given=lambda: _points(z=rates()).filter(lambda x: x["acceptance_rate"] * x["z"] < 1))
def generating_function(x: Example) -> None:
    gamma, z = x["draft_length"], Fraction(x["z"]).limit_denominator(100)
    alpha = Fraction(x["acceptance_rate"]).limit_denominator(100)
    found = math.fsum(formulas.tokens_pmf(x["acceptance_rate"], gamma) * float(z) ** np.arange(1, gamma + 2))
    want = 1 + (z - 1) * (1 - (alpha * z) ** (gamma + 1)) / (1 - alpha * z)
    at_most("error of E[z^N]", abs(found - float(want)), CLOSE)


@theorem("7a", "Drafts of a random length D give (1 - alpha E[alpha^D]) / (1 - alpha) tokens, at most Eq. 1 at E[D] rounded up.",
         source=_EQ_1, given=_mixtures)
def random_length(x: Example) -> None:
    alpha, weights = _rate(x), x["weights"]
    mass = [weight / sum(weights) for weight in weights]
    first = math.fsum(
        chance * mean({**x, "draft_length": length}, len(mass), lambda run: run.commits[0][2])
        for length, chance in enumerate(mass)
    )
    found = float(laws.expected_tokens_random_length(alpha, mass))
    equal("mean tokens of a round", found, first, CLOSE)
    if alpha < 1:
        closed = (1 - alpha * math.fsum(chance * alpha**length for length, chance in enumerate(mass))) / (1 - alpha)
        equal("the closed form", found, closed, 1e-10)
    ceiling = math.ceil(math.fsum(chance * length for length, chance in enumerate(mass)) - 1e-9)
    at_most("mean tokens", found, float(formulas.expected_tokens(alpha, ceiling)), CLOSE)


@theorem("7b", "With rates by place in the draft a round gives 1 + alpha_1 + alpha_1 alpha_2 + ... tokens.", source=_EQ_1,
         given=_rates_by_place)
def rates_by_place(x: Example) -> None:
    chances = x["acceptance_rates"]
    survival = np.cumprod(chances).tolist()
    first = _first_round(len(chances), survival)
    equal("mean tokens of a round", float(laws.expected_tokens_by_draft_position(chances)), first, CLOSE)


@theorem("7c", "With one Beta(a, b) rate for each round it gives 1 + E[B] + E[B^2] + ..., no less than Eq. 1 at E[B].",
         source="Jensen", given=_betas)
def shared_rate(x: Example) -> None:
    a, b, gamma = x["a"], x["b"], x["draft_length"]
    survival = Rounds.shared_rate(a / (a + b), a + b, gamma).survival.tolist()
    first = _first_round(gamma, survival)
    found = float(laws.expected_tokens_shared_rate(laws.beta_moments(a, b, gamma)))
    equal("mean tokens of a round", found, first, CLOSE)
    at_most("Eq. 1 at the mean rate", float(formulas.expected_tokens(a / (a + b), gamma)), found, CLOSE)


@theorem("7d", "Where acceptances are a chain, by position or by test, rounds come to what the formula says; positive"
         " correlation makes them shorter.", source="[Leviathan2023], Eq. 1, from both states", given=_chains)
def chained(x: Example) -> None:
    gamma, p, rho = x["draft_length"], x["match_rate"], x["correlation"]
    for chain in ("output", "tested"):
        took = _chained_rounds(2 * _MANY, gamma, p, rho, every=chain == "output")
        found = float(laws.expected_tokens_markov(p, rho, gamma, chain))
        equal(f"tokens of a round, {chain}", found, _MANY / (took[2 * _MANY] - took[_MANY]), 1e-4)
        if rho >= 0:
            at_most("tokens of a round of a chain", found, float(formulas.expected_tokens(p, gamma)), CLOSE)


@theorem("7e", "Of a log of accepted lengths by position the simulator makes the rounds that the walk over it does.",
         source="a round goes on to where the next one starts", given=lambda: drafting(12, luck="survive"))
def logged(x: Example) -> None:
    run = play(x)
    count, per_round = laws.tokens_of_rounds([survive + 1 for survive in x["survive"]], x["draft_length"])
    equal("rounds and tokens of a round", (count, per_round), (rounds(run), size(x) / rounds(run)))


# --- 8 to 12: speed ---


@theorem("8a", "S rises with gamma up to a best length and falls after it.", source="[Leviathan2023], Theorem 3.8", given=_priced)
def one_summit(x: Example) -> None:
    alpha, c = x["acceptance_rate"], x["cost_ratio"]
    speeds = _speeds(alpha, c)
    best = int(np.argmax(speeds >= speeds.max() * (1 - CLOSE)))
    at_most("the first fall before the summit", 0.0, float(np.diff(speeds[: best + 1]).min(initial=0.0)) + 1e-12)
    at_most("the last rise after it", float(np.diff(speeds[best:]).max(initial=0.0)), 1e-12)
    at_most("the best length", best, _LONGEST - 1)  # or the summit is out of sight


@theorem("8b", "The best draft length is within one of where the derivative of S vanishes, and no other is better.",
         source="[Leviathan2023], Section 3.5", given=_priced)
def best_length(x: Example) -> None:
    alpha, c = x["acceptance_rate"], x["cost_ratio"]
    speeds, found = _speeds(alpha, c), int(formulas.optimal_draft_length(alpha, c))
    equal("the best speed-up", float(speeds[found]), float(speeds.max()), CLOSE)
    if 0 < alpha < 1 and 0 < c < 1:
        decay = -math.log(alpha)
        level = 1 + decay * (1 - c) / c
        w = level + 2 * math.sqrt(level)
        for _ in range(200):
            w = level + math.log(w)
        real = max((w - level) / decay - 1, 0.0)
        at_most("distance from the real optimum", abs(found - real), 1.0, 1e-9)


@theorem("8c", "With a measured cost of widths, or up to a longest draft, no draft length that is allowed is better.",
         source="[Leviathan2023], Section 3.5", given=_curves)
def best_length_by_cost(x: Example) -> None:
    alpha, c, times = x["acceptance_rate"], x["cost_ratio"], list(accumulate(x["steps"], initial=4))
    curve, flat = list(enumerate(times, start=1)), [times[0]] * len(times)
    for given, prices in (({}, flat), ({"verify_cost": curve}, times)):
        speeds = [
            math.fsum(alpha**place for place in range(gamma + 1)) / (gamma * c + price / times[0])
            for gamma, price in enumerate(prices)
        ]
        for longest in range(len(times)):
            found = int(formulas.optimal_draft_length(alpha, c, longest=longest, **given))
            at_most("the best draft length", found, longest)
            equal(f"its speed-up, up to {longest}", speeds[found], max(speeds[: longest + 1]), CLOSE)
            speed = float(formulas.speedup(alpha, found, c, **given))
            equal("speed-up", speed, speeds[found], CLOSE)
    whole = int(formulas.optimal_draft_length(alpha, c, verify_cost=curve))
    equal("the best speed-up of the curve", speeds[whole], max(speeds), CLOSE)


@theorem("9", "Some draft length is faster than none if alpha > c, by (1 + alpha) / (1 + c) at least, and none is otherwise.",
         source="[Leviathan2023], Corollary 3.9, and its converse", given=_priced)
def worth_it(x: Example) -> None:
    alpha, c = x["acceptance_rate"], x["cost_ratio"]
    best = float(_speeds(alpha, c)[1:].max())
    if alpha > c:
        at_most("the gain of one drafted token", (1 + alpha) / (1 + c), best, CLOSE)
        at_most("no gain", 1.0, (1 + alpha) / (1 + c))
    else:
        at_most("the best speed-up", best, 1.0, CLOSE)
    equal("a draft is asked for", int(formulas.optimal_draft_length(alpha, c, longest=_LONGEST)) > 0, alpha > c)


@theorem("10a", "S, and that of any finite text, is at most 1 / (1 - alpha + c alpha), which free drafts reach in the limit.",
         source="no policy accepts more than alpha of its tokens", given=_points)
def oracle(x: Example) -> None:
    n, gamma, alpha = _point(x)
    c = x["cost_ratio"]
    bound, speed = float(formulas.oracle_speedup(alpha, c)), float(formulas.speedup(alpha, gamma, c))
    at_most("speed-up", speed, bound, CLOSE)
    at_most("speed-up of these tokens", float(formulas.finite_speedup(n, alpha, gamma, c)), bound, CLOSE)
    at_most("bound", bound, 1 / (1 - alpha) if alpha < 1 else math.inf, CLOSE)
    if alpha < 1:
        reached = float(formulas.speedup(alpha, gamma, 0.0)) / float(formulas.oracle_speedup(alpha, 0.0))
        equal("share of the bound that free drafts reach", reached, 1 - alpha ** (gamma + 1), 1e-10)
    equal("bound where a draft pass costs one of the target's", float(formulas.oracle_speedup(alpha, 1.0)), 1.0, CLOSE)


@theorem("10b", "No mean time, over all luck, is below (1 - alpha + c alpha) l.", source="10a",
         given=lambda: few().flatmap(_with_ratio))
def oracle_on_the_simulator(x: Example) -> None:
    n, _, alpha = _few(x)
    c = x["cost_ratio"]
    given = {**x, "cost": {"cost_ratio": c}}
    time = mean(given, n, lambda run: run.latency)
    at_most("tokens over mean time", n, time * float(formulas.oracle_speedup(alpha, c)), CLOSE)


@theorem("11a", "Operations are (gamma c^ + gamma + 1) / mu times those of plain decoding, never less.",
         source="[Leviathan2023], Theorem 3.11", given=_points)
def operations(x: Example) -> None:
    gamma, alpha, c = x["draft_length"], x["acceptance_rate"], x["cost_ratio"]
    found = float(formulas.operations_factor(alpha, gamma, c))
    at_most("operations of plain decoding", 1.0, found, CLOSE)
    mu = math.fsum(alpha**place for place in range(gamma + 1))
    equal("operations", found, (gamma * c + gamma + 1) / mu, CLOSE)


@theorem("11b", "The target works on a position for each drafted token and round, no fewer than it puts out.",
         source="[Leviathan2023], Theorem 3.11", given=lambda: drafting(luck="survive", costs="whole"))
def operations_on_every_path(x: Example) -> None:
    work, layers = counted(x), choice(x).layers
    # The draft model reads what was put out, too: two tokens after a whole draft.
    own = (rounds(work) + drafted(work)) * layers
    at_most("layers run by the target for the tokens", size(x) * layers, own)
    equal("passes of the target", work.passes_of["target"], rounds(work))
    equal("passes of the draft model", work.passes_of["draft"], drafted(work))
    equal("passes", work.passes, rounds(work) + drafted(work))
    equal("positions that are projected", work.heads, rounds(work) + 2 * drafted(work))


@theorem("12a", "S has its limits at alpha = 0, at alpha = 1 and without drafts.", source="[Leviathan2023], Theorem 3.8",
         given=_points)
def limits(x: Example) -> None:
    gamma, c = x["draft_length"], x["cost_ratio"]
    certain, nearly = (float(formulas.speedup(alpha, gamma, c)) for alpha in (1.0, 1 - 1e-12))
    equal("speed-up of a draft that is always right", certain, (gamma + 1) / (gamma * c + 1), CLOSE)
    equal("of one that is right nearly always", nearly, certain, 1e-9)
    equal("of one that is always wrong", float(formulas.speedup(0.0, gamma, c)), 1 / (gamma * c + 1), CLOSE)
    equal("without drafts", float(formulas.speedup(x["acceptance_rate"], 0, c)), 1.0, CLOSE)


@theorem("12c", "With a measured cost of widths l / (mean time over all luck) is the S(l) of the formula.",
         source="a round that is cut short is narrower", given=lambda: few(costs="whole"))
def measured_widths(x: Example) -> None:
    n, gamma, alpha = _few(x)
    given = {**x, "placement": "colocated"}
    time = mean(given, n, lambda run: run.latency)
    prices = cost(given)
    assert prices.cost_ratio is not None
    found = float(formulas.finite_speedup(n, alpha, gamma, prices.cost_ratio, verify_cost=prices.verify_cost))
    equal("speed-up of these tokens", found, n * prices.target_pass / time, CLOSE)


@theorem("12d", "Over arrays of draft lengths the formulas say what they say of each.", source="broadcasting",
         given=lambda: _points(other_length=whole(0, 12)))
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


@theorem("12b", "S(l) = l / (R + c D), in fractions, and becomes S.", source="renewal theory", given=_points)
def finite_becomes_infinite(x: Example) -> None:
    n, gamma, alpha = _point(x)
    c = x["cost_ratio"]
    exact = _rounds(n, Fraction(x["acceptance_rate"]).limit_denominator(100), gamma)
    drafts = sum(exact[max(n - gamma, 0) : n])
    finite = n / float(exact[n] + drafts * Fraction(c).limit_denominator(100))
    equal("speed-up of these tokens", float(formulas.finite_speedup(n, alpha, gamma, c)), finite, CLOSE)
    many = 10**6
    endless = float(formulas.speedup(alpha, gamma, c))
    equal("speed-up of very many", float(formulas.finite_speedup(many, alpha, gamma, c)), endless, 4 * (gamma + 1) ** 2 / many)


# --- Helpers ---


def _few(x: Example) -> tuple[int, int, float]:
    return x["tokens"], x["draft_length"], _rate(x)


def _rate(x: Example) -> float:
    return float(x["law"]["match_rate"])


def _point(x: Example) -> tuple[int, int, float]:
    return x["tokens"], x["draft_length"], x["acceptance_rate"]


def _first_round(gamma: int, survival: list[float]) -> float:
    """Mean tokens of the first round by the simulator; the luck of later positions does not matter to it."""
    ends = [*survival[:gamma], 0.0]
    chances = [sooner - later for sooner, later in pairwise([1.0, *ends])]
    runs = [play({"draft_length": gamma, "survive": [length] + [0] * gamma}) for length in range(gamma + 1)]
    return math.fsum(chance * run.commits[0][2] for chance, run in zip(chances, runs, strict=True))


def _chained_rounds(tokens: int, gamma: int, p: float, rho: float, *, every: bool) -> list[float]:
    """Mean rounds of 0, 1, ... tokens after an accepted one; a coin for `every` position, or for those that are tested."""
    success = p * (1 - rho), p + rho * (1 - p)  # after a rejection, after an acceptance
    found = [[0.0, 0.0]]
    for left in range(1, tokens + 1):
        count, row = min(gamma, left - 1), []
        for before in (0, 1):
            total, reach, last = 1.0, 1.0, before
            for place in range(count):
                total += reach * (1 - success[last]) * found[left - place - 1][0]
                reach, last = reach * success[last], 1
            ahead = found[left - count - 1]
            total += reach * (success[last] * ahead[1] + (1 - success[last]) * ahead[0] if every else ahead[last])
            row.append(total)
        found.append(row)
    return [row[1] for row in found]


def _ends(values: Iterable[int]) -> tuple[int, int]:
    found = list(values)
    return min(found), max(found)


def _rounds(tokens: int, alpha: Fraction, gamma: int) -> list[Fraction]:
    """R(0), ..., R(tokens) by their recursion: a round, and what is left after it."""
    chances = [alpha ** (j - 1) * (1 - alpha) for j in range(1, gamma + 1)] + [alpha**gamma]
    found = [Fraction(0)]
    for left in range(1, tokens + 1):
        found.append(sum((chance * found[left - j] for j, chance in enumerate(chances[:left], start=1)), Fraction(1)))
    return found


def _speeds(alpha: float, c: float) -> formulas.Floats:
    return formulas.speedup(alpha, np.arange(_LONGEST), c)


def _with_ratio(example: Example) -> SearchStrategy[Example]:
    return rates().map(lambda ratio: {**example, "cost_ratio": ratio})


THEOREMS = theorem.all()
