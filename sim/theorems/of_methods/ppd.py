"""Theorems on Predictive Pipelined Decoding, 21 to 23: latency T and compute C of each form, on every path and in the mean.

The formulas of `model.methods.ppd.theory` are compared with the simulator. Times are in layer-times: d = layers, d' = exit layer,
k = candidates, l = tokens, p = match rate, M = matches before the last position. Laws, overheads and limits are in `ppd_laws`.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

from model.methods.ppd import theory as formulas
from model.outcomes.outcome_laws import Iid
from sim.theorems.pipelined_examples import (
    CLOSE,
    UPPER_HALF,
    chances,
    decodings,
    gaps,
    integers,
    numbers,
    parameters_of,
    paths,
    play,
    rates,
    short_decodings,
    simulate_all,
)
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy


theorem = TheoremCollection("ppd")
_YANG = "Theorem 4.1 of [Yang2024]"
_PROOF = "proof of Theorem 4.1 of [Yang2024]"


# --- Examples ---


def _reordered() -> SearchStrategy[Example]:
    some = st.lists(st.booleans(), min_size=2, max_size=6)
    orders = some.flatmap(lambda given: st.tuples(st.just([*given, True]), st.permutations(given)))
    return st.tuples(decodings(("flat",), half="below", tokens=1, many=1), orders).map(
        lambda drawn: {**drawn[0], "given": drawn[1][0], "order": list(drawn[1][1])}
    )


# --- 21: Theorem 4.1, on every path and in the mean ---


@theorem("21a", "For d' >= d/2, T = d l - (d - d') M on every path, so d + (l - 1) d' <= T <= d l.", source=_PROOF,
         given=lambda: decodings(UPPER_HALF))
@theorem("22a", "In the nested form, T = d l - (d - d') M on every path for any d', so d + (l - 1) d' <= T <= d l.",
         source="derived: each token starts d' or d after the one before", given=lambda: decodings(("nested",)))
def latency_on_every_path(x: Example) -> None:
    d, exit_at, _, n, matches = numbers(x)
    latency = play(x).latency
    equal("latency", latency, d * n - (d - exit_at) * matches)
    at_most("lower bound of the latency", d + (n - 1) * exit_at, latency)
    at_most("latency", latency, d * n)


@theorem("21b", "For d' >= d/2, C - T = k (d - d') l on every path.", source=_PROOF, given=lambda: decodings(UPPER_HALF))
def compute_on_every_path(x: Example) -> None:
    d, exit_at, k, n, _ = numbers(x)
    run = play(x)
    equal("compute minus latency", run.busy - run.latency, k * (d - exit_at) * n)


@theorem("21c", "For d' >= d/2, E[T] = d l - (d - d') (l - 1) p and E[C] = E[T] + k (d - d') l.",
         source=_YANG, given=lambda: short_decodings(UPPER_HALF))
def theorem_4_1(x: Example) -> None:
    d, exit_at, k, n, _ = numbers(x)
    latency, busy, mass = simulate_all(x, x["match_rate"])
    equal("mean of the latency", mass @ latency, float(formulas.expected_latency(d, exit_at, n, x["match_rate"])), CLOSE)
    equal("mean of the compute", mass @ busy, float(formulas.expected_compute(d, exit_at, n, x["match_rate"], k)), CLOSE)


@theorem("21d", "For d' >= d/2, (d l - T) / (d - d') is binomial with l - 1 trials of probability p.",
         source=_PROOF, given=lambda: short_decodings(UPPER_HALF))
def law_of_latency(x: Example) -> None:
    d, exit_at, _, n, _ = numbers(x)
    latency, _, mass = simulate_all(x, x["match_rate"])
    values, probabilities = formulas.latency_pmf(d, exit_at, n, x["match_rate"])
    equal("values of the latency", values.tolist(), sorted(set(latency.tolist())))
    for value, probability in zip(values, probabilities, strict=True):
        equal(f"probability of latency {value:g}", probability, math.fsum(mass[latency == value]), CLOSE)


@theorem("21e", "T = d N + d' (l - N) with N = 1 + misses before the last position, the number of runs; E[N] = l - (l - 1) p.",
         source=_PROOF, given=lambda: decodings((*UPPER_HALF, "nested"), match_rate=rates()))
def runs(x: Example) -> None:
    d, exit_at, _, n, _ = numbers(x)
    run = play(x)
    count = 1 + [kind for _, kind, _ in run.commits[:-1]].count("miss")
    equal("latency from the number of runs", run.latency, d * count + exit_at * (n - count))
    if n <= 8:
        outcomes = paths(n - 1)
        mean = chances(Iid(x["match_rate"]), outcomes) @ (1.0 + (~outcomes).sum(axis=0))
        equal("mean number of runs", float(formulas.expected_runs(n, x["match_rate"])), mean, CLOSE)


@theorem("21f", "If wider passes cost the same, candidates batched on one unit keep T, divide C - T by k and use two units.",
         source="derived: candidates are read at the same time in both cases", given=lambda: decodings((*UPPER_HALF, "flat")))
def batched_on_every_path(x: Example) -> None:
    separate, batched = play(x, batched=False), play(x, batched=True)
    equal("latency", batched.latency, separate.latency)
    equal("compute minus latency, times k", x["candidates"] * (batched.busy - batched.latency), separate.busy - separate.latency)
    at_most("units in use", batched.peak_units, 2)


# --- 22: the nested form ---


@theorem("22b", "In the nested form, C = d l + (k l - M) W on every path, with W = sum of k^i (d - (i + 1) d')^+.",
         source="derived: every wrong sub-process costs W, including its sub-processes", given=lambda: decodings(("nested",)))
def nested_compute_on_every_path(x: Example) -> None:
    d, exit_at, k, n, matches = numbers(x)
    equal("compute", play(x).busy, d * n + (k * n - matches) * float(formulas.nested_waste(d, exit_at, k)))


@theorem("22c", "In the nested form, E[T] = d l - (d - d') (l - 1) p and E[C] = d l + (k l - (l - 1) p) W.",
         source="22a and 22b", given=lambda: short_decodings(("nested",), tokens=4))
def nested_compute_in_the_mean(x: Example) -> None:
    d, exit_at, k, n, _ = numbers(x)
    latency, busy, mass = simulate_all(x, x["match_rate"])
    equal("mean of the latency", mass @ latency, float(formulas.expected_latency(d, exit_at, n, x["match_rate"])), CLOSE)
    equal("mean of the compute", mass @ busy, float(formulas.nested_compute(d, exit_at, n, x["match_rate"], k)), CLOSE)


@theorem("22d", "In the nested form, the peak of units in use equals the sum of k^i for i < ceil(d/d').",
         source="derived: generations that start before the first is verified", given=lambda: decodings(("nested",), tokens=5))
def nested_peak(x: Example) -> None:
    d, exit_at, k, _, _ = numbers(x)
    want = int(formulas.nested_units(d, exit_at, k))
    equal("reserved units", parameters_of(x).units, want)
    # With spare units, so that the cluster does not limit the peak.
    equal("most units in use", play(x, cluster={"units": want * (k + 1) + 1}).peak_units, want)


@theorem("22e", "For d' >= d/2, the nested form has the latency and compute of Algorithm 2.", source="W = d - d' there",
         given=lambda: decodings(("literal",), tokens=6, many=12))
def nested_from_half_on(x: Example) -> None:
    literal, nested = play(x), play(x, form="nested")
    equal("latency and compute", (nested.latency, nested.busy), (literal.latency, literal.busy))


@theorem("22f", "In the nested form with d' < d/2, C - T = k (d - d') l as in Theorem 4.1.",
         source="false: the theorem needs d' >= d/2",
         given=lambda: decodings(("nested",), half="below"), expect="fails")
def compute_of_theorem_4_1_when_nested(x: Example) -> None:
    d, exit_at, k, n, _ = numbers(x)
    run = play(x)
    equal("compute minus latency", run.busy - run.latency, k * (d - exit_at) * n)


# --- 23: the flat form with d' < d/2 ---


@theorem("23a", "In the flat form with d' < d/2, any two consecutive times between tokens sum to at least d.",
         source="derived: after a match at depth g the next prediction is no earlier than d - g",
         given=lambda: decodings(("flat",), half="below"))
def flat_gaps(x: Example) -> None:
    for first, second in pairwise(gaps(x)):
        at_most("layers", x["layers"], first + second)


@theorem("23b", "In the flat form with d' < d/2, T >= d + floor((l - 1)/2) d.", source="23a",
         given=lambda: decodings(("flat",), half="below"))
def flat_bound(x: Example) -> None:
    d, _, _, n, _ = numbers(x)
    at_most("lower bound of the latency", d + (n - 1) // 2 * d, play(x).latency)


@theorem("23c", "In the flat form, `flat_latency` and `flat_compute` give E[T] and E[C] for any d'.",
         source="derived: depths of prediction alternate along a run", given=lambda: short_decodings(("flat",)))
def flat_closed_form(x: Example) -> None:
    d, exit_at, k, n, _ = numbers(x)
    latency, busy, mass = simulate_all(x, x["match_rate"])
    equal("mean of the latency", mass @ latency, float(formulas.flat_latency(d, exit_at, n, x["match_rate"])), CLOSE)
    equal("mean of the compute", mass @ busy, float(formulas.flat_compute(d, exit_at, n, x["match_rate"], k)), CLOSE)


@theorem("23d", "In the flat form with d' < d/2, a match in place of a miss never makes a run longer.", source="derived",
         given=lambda: decodings(("flat",), half="below", at=integers(0, 39)))
def flat_match_in_place_of_a_miss(x: Example) -> None:
    at_most("latency with one more match", play(x, matches=_hit(x)).latency, play(x).latency)


@theorem("23e", "In the flat form with d' < d/2, T depends only on the number of matches, not on their order.",
         source="false: the theorem needs d' >= d/2", given=_reordered, expect="fails")
def flat_latency_from_the_number_of_matches(x: Example) -> None:
    equal("latency with matches reordered", play(x, matches=[*x["order"], True]).latency, play(x, matches=x["given"]).latency)


# --- Helpers ---


def _hit(x: Example) -> list[bool]:
    """Return the matches of an example, with a match at `at`."""
    at = x["at"] % len(x["matches"])
    return [*x["matches"][:at], True, *x["matches"][at + 1 :]]


THEOREMS = theorem.all()
