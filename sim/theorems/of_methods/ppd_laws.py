"""Theorems on Predictive Pipelined Decoding, 24 to 27: distribution of the latency, mean busy units, overheads, speed-up limit.

Times are in layer-times: T = latency, C = compute, d = layers, d' = exit layer, k = candidates, l = tokens, p = match rate.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model.methods.ppd import theory as formulas
from model.methods.ppd.algorithm import FORMS
from model.methods.stages import sums
from model.outcomes.outcome_laws import Iid, Markov
from sim.theorems.pipelined_examples import (
    CLOSE,
    OVERHEADS,
    UPPER_HALF,
    Floats,
    chances,
    cost,
    decodings,
    gaps,
    integers,
    law,
    laws,
    markov,
    numbers,
    overheads,
    parameters_of,
    paths,
    play,
    rates,
    rounding,
    short_decodings,
    simulate_all,
)
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy


theorem = TheoremCollection("ppd")
_YANG = "Theorem 4.1 of [Yang2024]"
_PROOF = "proof of Theorem 4.1 of [Yang2024]"


# --- Examples ---


@drawn
def _upper_half(draw: DrawFn, /, **fields: SearchStrategy[Any]) -> Example:
    """Draw up to 128 layers, with exit layers in the upper half."""
    layers = draw(st.integers(1, 128))
    example = {"layers": layers, "exit_layer": draw(st.integers(-(-layers // 2), layers)), "match_rate": draw(rates())}
    return example | {name: draw(strategy) for name, strategy in fields.items()}


def _matches(most: int) -> SearchStrategy[list[bool]]:
    """Draw lists of matches of which only the length matters."""
    return integers(1, most).map(lambda tokens: [True] * tokens)


def _laws_of_counts() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"positions": st.integers(0, 7), "law": laws(7)})


def _with_overheads(kind: str) -> SearchStrategy[Example]:
    """Draw decodings with exit layers in the upper half and all overheads, and one overhead to increase."""
    return decodings(
        UPPER_HALF, cost=overheads(kind), name=st.sampled_from(OVERHEADS), more=st.integers(1, 4)
    )


def _by_position() -> SearchStrategy[Example]:
    return st.fixed_dictionaries({"match_rates": st.lists(rates(), min_size=7, max_size=7)})


# --- 24: distribution of the latency ---


@theorem("24a", "For d' >= d/2 and in the nested form, Var T = (d - d')^2 (l - 1) p (1 - p), and `latency_pmf` gives the law of T.",
         source=_PROOF, given=lambda: short_decodings((*UPPER_HALF, "nested"), tokens=8))
def variance_and_pmf(x: Example) -> None:
    d, exit_at, _, n, _ = numbers(x)
    outcomes, latency, _ = _walk_all(x)
    mass = chances(Iid(x["match_rate"]), outcomes)
    _moments("latency", latency, mass, d * n, formulas.expected_latency(d, exit_at, n, x["match_rate"]),
             formulas.latency_variance(d, exit_at, n, x["match_rate"]))  # fmt: skip
    values, probabilities = formulas.latency_pmf(d, exit_at, n, x["match_rate"])
    for value, probability in zip(values, probabilities, strict=True):
        equal(f"probability of latency {value:g}", probability, math.fsum(mass[latency == value]), CLOSE)


@theorem("24b", "With match rate p_j at position j, E[T] = d l - (d - d') sum p_j and Var T = (d - d')^2 sum p_j (1 - p_j), j < l.",
         source="matches are independent", given=lambda: short_decodings((*UPPER_HALF, "nested"), tokens=8, law=_by_position()))
def rates_by_position(x: Example) -> None:
    d, exit_at, _, n, _ = numbers(x)
    outcomes, latency, _ = _walk_all(x)
    given = [*x["law"]["match_rates"][: n - 1], 0.5]  # the last rate has no effect
    _moments("latency", latency, chances(law(x["law"]), outcomes), d * n, *formulas.position_latency(d, exit_at, given))


@theorem("24c", "For d' >= d/2 and in the nested form, correlated matches do not change E[T], and `markov_latency` gives Var T.",
         source="variance of a stationary two-state chain",
         given=lambda: short_decodings((*UPPER_HALF, "nested"), tokens=8, law=markov()))
def correlated_matches(x: Example) -> None:
    d, exit_at, _, n, _ = numbers(x)
    outcomes, latency, _ = _walk_all(x)
    p, rho = x["law"]["match_rate"], x["law"]["correlation"]
    mean, variance = formulas.markov_latency(d, exit_at, n, p, rho)
    _moments("latency", latency, chances(Markov(p, rho), outcomes), d * n, mean, variance)
    equal("mean without correlation", float(mean), float(formulas.expected_latency(d, exit_at, n, p)))


@theorem("24d", "The mean, variance and pmf of the matches of a law equal those of its enumerated outcomes.", source="definition",
         given=lambda: _laws_of_counts())
def counts_of_matches(x: Example) -> None:
    outcomes, match_law = paths(x["positions"]), law(x["law"])
    mass, count = chances(match_law, outcomes), outcomes.sum(axis=0)
    _moments("matches", count, mass, x["positions"], match_law.mean(x["positions"]), match_law.variance(x["positions"]))
    for value, probability in enumerate(match_law.pmf(x["positions"])):
        # A mass of zero may be off by the rounding of 1 - p.
        if not abs(probability - math.fsum(mass[count == value])) <= CLOSE:
            raise AssertionError(f"probability of {value} matches: got {probability}, expected {math.fsum(mass[count == value])}")


@theorem("24e", "For any law, form and cost the predicted E[T], E[C], Var T and E[C/T], where given, are those over all outcomes.",
         source="definition", given=lambda: short_decodings(FORMS, tokens=7, costs="tenths", law=laws(6)))
def predictions(x: Example) -> None:
    n = len(x["matches"])
    outcomes, latency, busy = _walk_all(x)
    prediction, mass = formulas.predict(parameters_of(x), n, law(x["law"]), cost(x)), chances(law(x["law"]), outcomes)
    mean = mass @ latency
    top = float(latency.max())
    if math.isnan(prediction.latency_variance):  # the closed form of the flat form gives no variance
        equal("mean of the latency", float(prediction.latency), mean, CLOSE)
    else:
        _moments("latency", latency, mass, top, prediction.latency, prediction.latency_variance)
    equal("mean of the compute", float(prediction.busy), mass @ busy, CLOSE)
    if not math.isnan(prediction.units_ratio):
        equal("mean of compute over latency", float(prediction.units_ratio), mass @ (busy / latency), CLOSE)


# --- 25: the mean number of busy units ---


@theorem("25a", "E[C/T] >= E[C]/E[T], with equality only for l = 1, p = 0, p = 1 or d' = d.", source="Jensen's inequality",
         given=lambda: _upper_half(candidates=integers(1, 8), matches=_matches(64)))
def jensen(x: Example) -> None:
    d, exit_at, k, n, _ = numbers(x)
    p = x["match_rate"]
    ratio = float(formulas.expected_units_ratio(d, exit_at, n, p, k))
    quotient = float(formulas.expected_compute(d, exit_at, n, p, k) / formulas.expected_latency(d, exit_at, n, p))
    if n == 1 or p in (0, 1) or exit_at == d:
        equal("E[C/T] in case of equality", ratio, quotient, CLOSE)
    elif not ratio > quotient:
        raise AssertionError(f"E[C/T] is {ratio!r}, not above E[C]/E[T], which is {quotient!r}")


@theorem("25b", "For d' >= d/2, E[C/T] = 1 + k (d - d') l E[1/T].", source="21b", given=lambda: short_decodings(UPPER_HALF))
def ratio_from_every_path(x: Example) -> None:
    d, exit_at, k, n, _ = numbers(x)
    latency, busy, mass = simulate_all(x, x["match_rate"])
    equal("E[C/T]", float(formulas.expected_units_ratio(d, exit_at, n, x["match_rate"], k)), mass @ (busy / latency), CLOSE)


@theorem("25c", "E[C]/E[T] (from below) and E[C/T] tend to 1 + k (d - d') / (d - (d - d') p), which is Eq. 5 for d' = d/2.",
         source="Eq. 5 of [Yang2024], at any d'", given=lambda: _upper_half(candidates=integers(1, 8)))
def units_in_the_long_run(x: Example) -> None:
    d, exit_at, k, p, n = x["layers"], x["exit_layer"], x["candidates"], x["match_rate"], 4000
    limit = 1 + k * (d - exit_at) / (d - (d - exit_at) * p)
    quotient = float(formulas.expected_compute(d, exit_at, n, p, k) / formulas.expected_latency(d, exit_at, n, p))
    ratio = float(formulas.expected_units_ratio(d, exit_at, n, p, k))
    # The quotient is off its limit by k s^2 p / (D^2 l + ...) with the saving s = d - d' and D = d - s p, which is at least d/2;
    # E[C/T] is above the quotient by k s^3 p (1 - p) / (D^3 l) and smaller terms: together less than 2 k / l.
    at_most("distance of E[C]/E[T] from its limit", abs(quotient - limit), 2 * k / n)
    at_most("distance of E[C/T] from its limit", abs(ratio - limit), 2 * k / n)
    at_most("E[C]/E[T]", quotient, limit, CLOSE)
    if 2 * exit_at == d:
        equal("Eq. 5", float(formulas.mean_busy_units(p, k)), limit, CLOSE)


# --- 26: overheads ---


@theorem("26a", "With overheads in whole layer-times, `literal_gaps` and `eager_gaps` give every gap exactly.",
         source="derived: the timeline of one token", given=lambda: decodings(UPPER_HALF, cost=overheads("whole")))
@theorem("26b", "With overheads in tenths of layer-times, `literal_gaps` and `eager_gaps` give every gap to rounding.",
         source="derived: the timeline of one token", given=lambda: decodings(UPPER_HALF, cost=overheads("tenths")))
def gaps_with_overheads(x: Example) -> None:
    (miss, match), simulated = _formula_gaps(x), gaps(x)
    within = rounding(x) * len(simulated)  # a gap is a difference of two rounded times
    for at, (gap, after_match) in enumerate(zip(simulated, [False, *x["matches"]], strict=False)):
        equal(f"gap before token {at + 1}", gap, match if after_match else miss, within)
    want = miss + sum(match if after_match else miss for after_match in x["matches"][:-1])
    equal("latency", play(x).latency, want, rounding(x))


@theorem("26c", "E[T] = G0 + (l - 1) (p G1 + (1 - p) G0) with the gaps G0 after a miss and G1 after a match.",
         source="26a", given=lambda: short_decodings(UPPER_HALF, cost=overheads("tenths")))
def mean_with_overheads(x: Example) -> None:
    latency, _, mass = simulate_all(x, x["match_rate"])
    want = float(formulas.latency_of_gaps(*_formula_gaps(x), len(x["matches"]), x["match_rate"]))
    equal("mean of the latency", mass @ latency, want, CLOSE)


@theorem("26d", "Without overheads the gaps are d and d', and E[T] is that of Theorem 4.1.", source=_YANG,
         given=lambda: decodings(UPPER_HALF, match_rate=rates()))
def without_overheads(x: Example) -> None:
    d, exit_at, _, n, _ = numbers(x)
    nothing = dict.fromkeys(OVERHEADS, 0.0)
    free_gaps = (formulas.literal_gaps if x["form"] == "literal" else formulas.eager_gaps)(d, exit_at, **nothing)
    equal("gaps", tuple(float(gap) for gap in free_gaps), (d, exit_at))
    want = float(formulas.expected_latency(d, exit_at, n, x["match_rate"]))
    equal("mean of the latency", float(formulas.latency_of_gaps(*free_gaps, n, x["match_rate"])), want, CLOSE)
    free, plain = play(x, cost=nothing), play(x)
    equal("latency and compute", (free.latency, free.busy), (plain.latency, plain.busy))


@theorem("26e", "A larger overhead never makes a run or a gap shorter.", source="26a", given=lambda: _with_overheads("whole"))
def overheads_cost_time(x: Example) -> None:
    more = {**x["cost"], x["name"]: x["cost"][x["name"]] + x["more"]}
    at_most(f"latency with less {x['name']}", play(x).latency, play(x, cost=more).latency)
    for what, less, greater in zip(("miss", "match"), _formula_gaps(x), _formula_gaps({**x, "cost": more}), strict=True):
        at_most(f"gap after a {what} with less {x['name']}", less, greater)


@theorem("26g", "On the units that they reserve, the eager form is never slower than the literal one.",
         source="26a: a sub-process is at least as far, and nothing waits for a wrong one",
         given=lambda: decodings(("literal",), cost=overheads("tenths")))
def eager_is_no_slower(x: Example) -> None:
    at_most("latency of the eager form", play(x, form="eager").latency, play(x, form="literal").latency, rounding(x))


@theorem("26f", "With overheads the eager form takes the time of the literal one.", source="false: true only without overheads",
         given=lambda: decodings(("literal",), cost=overheads("whole")), expect="fails")
def eager_is_literal(x: Example) -> None:
    equal("latency of the eager form", play(x, form="eager").latency, play(x, form="literal").latency)


# --- 27: the limit of the speed-up ---


@theorem("27a", "1/S(l) = 1/S + p (1 - d'/d) / l: the speed-up rises with l to S = 1/(1 - p + p d'/d), Eq. 3 for d' = d/2.",
         source="21c and Eq. 3 of [Yang2024]", given=lambda: _upper_half(tokens=integers(1, 4096)))
def limit_of_the_speed_up(x: Example) -> None:
    d, exit_at, n, p = x["layers"], x["exit_layer"], x["tokens"], x["match_rate"]
    saving = p * (1 - exit_at / d)
    here, next_one = (float(d * m / formulas.expected_latency(d, exit_at, m, p)) for m in (n, n + 1))
    limit = 1 / (1 - p + p * exit_at / d)
    equal("1 / speed-up", 1 / here, 1 / limit + saving / n, CLOSE)
    at_most("speed-up", here, next_one, CLOSE)
    at_most("speed-up", next_one, limit, CLOSE)
    if 2 * exit_at == d:
        equal("Eq. 3", float(formulas.relative_latency(p)), 1 / limit, CLOSE)


@theorem("27b", "E[T]/d equals the latency of distributed speculative inference with lookahead 1 and draft cost d'/d.",
         source="Timor et al., arXiv:2405.14105: c p (l - 1) + (1 - p) (l - 1) + 1",
         given=lambda: _upper_half(tokens=integers(1, 4096)))
def distributed_speculation(x: Example) -> None:
    d, exit_at, n, p = x["layers"], x["exit_layer"], x["tokens"], x["match_rate"]
    lookahead_1 = exit_at / d * p * (n - 1) + (1 - p) * (n - 1) + 1
    equal("latency in passes", float(formulas.expected_latency(d, exit_at, n, p)) / d, lookahead_1, CLOSE)


@theorem("27c", "The speed-up of speculative decoding with fixed draft length and draft cost d'/d is at most 1/(1 - p + p d'/d).",
         source="Theorem 3.8 of Leviathan et al., arXiv:2211.17192, against an oracle draft length",
         given=lambda: _upper_half(draft_length=integers(0, 64)))
def fixed_drafts(x: Example) -> None:
    d, exit_at, p, n = x["layers"], x["exit_layer"], x["match_rate"], 1000
    limit = 1 / (float(formulas.expected_latency(d, exit_at, n, p)) / (d * n) - p * (1 - exit_at / d) / n)  # by 27a
    drafted = sum(p**length for length in range(x["draft_length"] + 1)) / (x["draft_length"] * exit_at / d + 1)
    at_most("speed-up with drafts of a fixed length", drafted, limit, CLOSE)


# --- Helpers ---


def _formula_gaps(x: Example) -> tuple[float, float]:
    given = cost(x)
    formula = formulas.literal_gaps if x["form"] == "literal" else formulas.eager_gaps
    miss, match = formula(
        x["layers"],
        x["exit_layer"],
        early_head=given.head(x["exit_layer"]),  # at exit_layer = layers it is a final one
        dispatch=given.dispatching(x["candidates"]),
        link=given.link,
        final_head=given.final_head,
        promotion=given.promotion,
    )
    return float(miss), float(match)


def _walk_all(x: Example) -> tuple[NDArray[np.bool_], Floats, Floats]:
    """Return all sequences of outcomes, their latency and compute, from the stages that theorem 28d compares with events."""
    n = len(x["matches"])
    outcomes = paths(n - 1)
    return outcomes, *sums(formulas.stages(parameters_of(x), cost(x), n), [outcomes], n, outcomes.shape[1])


def _moments(what: str, values: Floats, mass: Floats, top: float, mean: Any, variance: Any) -> None:
    """Require this mean and variance of an enumerated quantity that is at most `top`."""
    center = float(mass @ values)
    equal(f"mean of the {what}", float(mean), center, CLOSE)
    spread = float(mass @ (values - center) ** 2)
    # The variance of a certain quantity is a rounded difference of two large squares.
    if not abs(float(variance) - spread) <= CLOSE * (spread + top * top):
        raise AssertionError(f"variance of the {what}: got {float(variance)!r}, expected {spread!r}")


THEOREMS = theorem.all()
