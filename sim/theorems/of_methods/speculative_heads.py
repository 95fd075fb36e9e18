"""Theorems on speculative decoding, 40 to 42: draft heads, parallel drafts, and sequences of several levels of difficulty.

Symbols as in `speculative`; c' = cost ratio of a parallel draft's only pass, beta = its acceptance rate, r_j = conditional
acceptance rate of the j-th drafted token, s_j = r_1 ... r_j.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import itertools
import math
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.methods.draft_model import COLOCATED
from model.methods.rounds.round_laws import MixedRounds, Rounds
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import parallel_drafts
from model.methods.speculative import paths as sampler
from model.methods.speculative import theory as formulas
from model.outcomes.random_streams import BLOCK
from sim.theorems.drafting_examples import (
    decoder,
    drafted,
    drafting,
    law_of,
    models,
    pairs,
    rounds,
    short_decodings,
    starts,
    survival,
    target_law,
    text_law,
    walk_paths,
)
from sim.theorems.of_methods.speculative import prediction
from sim.theorems.output_law import distance, greedy_text, possible_decodings
from sim.theorems.pipelined_examples import CLOSE, count_work, integers, parameters_of, play, rates, rounding
from sim.theorems.theorem import Example, TheoremCollection, at_most, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import SearchStrategy

theorem = TheoremCollection("speculative")
_LONGEST = 8  # longest draft that is compared
_READING_STATES = (speculative.HEADS, speculative.PARALLEL)


# --- Examples ---


def _by_states(examples: SearchStrategy[Example]) -> SearchStrategy[Example]:
    """Draw examples whose draft reads the target's states, on its unit."""
    drafters = st.sampled_from(_READING_STATES)
    return st.builds(lambda x, drafter: {**x, "drafter": drafter, "placement": COLOCATED}, examples, drafters)


def _paths(costs: str) -> SearchStrategy[Example]:
    return _by_states(drafting(outcomes="survive", costs=costs))


def _levels(*, equal_rates: bool) -> SearchStrategy[Example]:
    """Draw levels of difficulty with their weights; with `equal_rates` the rate of a level is the same at all positions."""
    one = rates().map(lambda rate: [rate] * 3) if equal_rates else st.lists(rates(), min_size=3, max_size=3)
    level = st.tuples(one, integers(1, 3)).map(list)
    return st.fixed_dictionaries({"levels": st.lists(level, min_size=2, max_size=3), "tokens": integers(1, 4)})


def _rising_levels() -> SearchStrategy[Example]:
    """Draw levels in each of which the conditional rates do not fall."""
    return _levels(equal_rates=False).map(lambda x: {**x, "levels": [[sorted(row), weight] for row, weight in x["levels"]]})


def _mixed(x: Example) -> MixedRounds:
    return MixedRounds([Rounds.by_draft_position(row) for row, _ in x["levels"]], [weight for _, weight in x["levels"]])


def _points() -> SearchStrategy[Example]:
    ratios = integers(0, 20).map(lambda twentieths: twentieths / 20)
    return st.fixed_dictionaries({"acceptance_rate": rates(), "cost_ratio": ratios, "draft_length": integers(1, _LONGEST)})


def _curves() -> SearchStrategy[Example]:
    steps = st.lists(integers(0, 6), min_size=_LONGEST, max_size=_LONGEST)
    ratios = integers(0, 20).map(lambda twentieths: twentieths / 20)
    return st.fixed_dictionaries({"law": survival(_LONGEST), "cost_ratio": ratios, "steps": steps})


# --- 40: views, output and work ---


@theorem("40a", "With a draft that reads states, events and paths agree exactly on every path, with costs in quarters.",
         source="no contention", given=lambda: _paths("whole"))
@theorem("40b", "With a draft that reads states, events and paths agree to rounding on every path, with costs in tenths.",
         source="no contention", given=lambda: _paths("tenths"))
def events_are_paths(x: Example) -> None:
    run, tally = play(x), walk_paths(x)
    equal("latency", float(tally.time[0]), run.latency, rounding(x))
    equal("compute", float(tally.busy[0]), run.busy, rounding(x))
    equal("rounds", float(tally.rounds[0]), rounds(run))
    equal("drafted tokens", float(tally.drafted[0]), drafted(run))


@theorem("40c", "With a draft that reads states, the formula gives mean and variance of the latency, compute, rounds and drafts.",
         source="forward recursion over starts of rounds", given=lambda: _by_states(short_decodings(costs="tenths", law="any")))
def formula_is_mean(x: Example) -> None:
    prediction(x)


@theorem("40d", "Draft heads and parallel drafts start the same rounds as a draft model with the same outcomes.",
         source="a round depends on outcomes only", given=lambda: _paths("plain"))
def same_rounds(x: Example) -> None:
    own, of_model = play(x), play(x, drafter=speculative.MODEL)
    equal("starts of rounds", starts(own), starts(of_model))
    equal("text", own.tokens, of_model.tokens)


@theorem("40e", "A draft that reads states keeps the distribution of the target's text, for any draft.",
         source="[Leviathan2023], Theorem 3.5: q may depend on anything that is known before the test",
         given=lambda: _by_states(pairs()))
def output_is_exact(x: Example) -> None:
    found, want = text_law(x), target_law(x)
    if gap := distance(found, want):
        raise AssertionError(f"the text has another distribution: total variation distance {gap}")


@theorem("40f", "In greedy decoding with a draft that reads states, the text is the target's, token for token.",
         source="a token is the target's own or equals it", given=lambda: _by_states(pairs(sampled=st.just(False))))
def greedy_output(x: Example) -> None:
    want = greedy_text(models(x)["target"], (0,), x["tokens"], x.get("stop"))
    for decoding in possible_decodings(decoder(x), models(x), (0,), x["tokens"]):
        equal("text", decoding.text, want)


@theorem("40g", "Expected work is the mean of counted work: passes, layers, tokens, positions read and attended to, logits.",
         source="counting", given=lambda: _by_states(short_decodings(law="one rate")))
def work_is_mean(x: Example) -> None:
    tokens, law = x["tokens"], law_of(x)
    expected = formulas.work(parameters_of(x), tokens, law)
    assert expected is not None
    total: dict[str, Any] = {}
    for bits in itertools.product((False, True), repeat=tokens - 1):
        chance = math.prod(law.rate if hit else 1 - law.rate for hit in bits)
        for role, values in count_work({**x, "accept": [*bits, False]}).account.totals().by_model.items():
            total[role] = total.get(role, 0.0) + chance * np.array(values)
    for role, values in expected.by_model.items():
        for what, got, want in zip(values._fields, values, total.get(role, np.zeros(len(values))).tolist(), strict=True):
            equal(f"{what} of the {role}", got, want, CLOSE)


@theorem("40h", "In each round a head reads every token that was accepted again: no fewer tokens than a draft model reads.",
         source="the rows of drafted tokens are not made of the target's states", given=lambda: drafting(outcomes="survive"))
def heads_read_more(x: Example) -> None:
    read = [count_work({**x, "drafter": each}).account.of("draft").layer_passes for each in (speculative.MODEL, speculative.HEADS)]
    at_most("tokens read by a draft model", *read)


@theorem("40i", "A parallel draft reads no more tokens than it drafts.",
         source="false: it also reads what was accepted", given=lambda: drafting(outcomes="survive"), expect="fails")
def parallel_reads_drafts_only(x: Example) -> None:
    work = count_work({**x, "drafter": speculative.PARALLEL})
    at_most("tokens read", work.account.of("draft").layer_passes, drafted(work))


# --- 41: levels of difficulty ---


@theorem("41a", "Over sequences of several levels, in none of which r_j falls with j, r_j does not fall with j.",
         source="the mean of r^2 is at least the square of the mean of r: survivors are easier", given=_rising_levels)
def rates_do_not_fall(x: Example) -> None:
    found = _mixed(x)
    for place, (before, after) in enumerate(pairwise(found.conditional_rates().tolist()), start=1):
        if found.survival[place - 1] > 0:
            at_most(f"r_{place}", before, after, CLOSE)


@theorem("41b", "Over sequences of several levels, r_j does not fall with j, for any rates of each level.",
         source="false: the rates of each level may fall faster", given=lambda: _levels(equal_rates=False), expect="fails")
def rates_never_fall(x: Example) -> None:
    rates_do_not_fall(x)


@theorem("41c", "Tokens, rounds and variance over sequences of several levels are those of the levels, mixed by their weights.",
         source="law of total variance", given=lambda: _levels(equal_rates=False))
def levels_are_mixed(x: Example) -> None:
    parameters, price = speculative.Parameters(1, 3, drafter=speculative.HEADS), UnitCost(1, cost_ratio=0.25)
    law, tokens = _mixed(x), x["tokens"]
    found = formulas.predict(parameters, tokens, law, price)
    each = [formulas.predict(parameters, tokens, level, price) for level in law.levels]
    weights = [weight for _, weight in x["levels"]]
    shares = [weight / sum(weights) for weight in weights]
    mean = sum(share * float(one.latency) for share, one in zip(shares, each, strict=True))
    square = sum(share * (float(one.latency_variance) + float(one.latency) ** 2) for share, one in zip(shares, each, strict=True))
    equal("mean latency", float(found.latency), mean, CLOSE)
    at_most("error of the variance", abs(float(found.latency_variance) - (square - mean**2)), CLOSE * square)
    # The tokens of a first draft: AL = 1 + s_1 + s_2 + s_3, by the shares of the levels.
    lengths = [1 + sum(math.prod(row[:place]) for place in range(1, 4)) for row, _ in x["levels"]]
    equal("AL", 1 + float(law.survival.sum()), sum(a * b for a, b in zip(shares, lengths, strict=True)), CLOSE)


@theorem("41d", "A sequence keeps its level: paths with evenly spread first draws have the levels in their shares.",
         source="one draw chooses the level", given=lambda: _levels(equal_rates=True))
def levels_in_paths(x: Example) -> None:
    even = {**x, "levels": [[[float(index % 2)] * 3, weight] for index, (_, weight) in enumerate(x["levels"])]}
    law, tokens = _mixed(even), x["tokens"]
    draws = np.full((tokens, BLOCK), 0.5)
    draws[0] = (np.arange(BLOCK) + 0.5) / BLOCK
    parameters, price = speculative.Parameters(1, 3, drafter=speculative.HEADS), UnitCost(1, cost_ratio=0.25)
    tally = sampler.walk(parameters, tokens, price, law.drafts(iter([draws])))
    easy = sum(weight for (row, _), weight in zip(even["levels"], law.weights, strict=True) if row[0] == 1)
    quick = float((tally.rounds < tokens).mean()) if tokens > 1 else easy
    at_most("distance of the share of easy sequences", abs(quick - easy), len(law.weights) / BLOCK)


@theorem("41e", "Sequences of several levels take as many rounds as independent rounds with the same r_j.",
         source="false: a hard sequence is hard in all its rounds", given=lambda: _levels(equal_rates=True), expect="fails")
def levels_are_like_rounds(x: Example) -> None:
    parameters, price, law = speculative.Parameters(1, 3), UnitCost(1, cost_ratio=0.25), _mixed(x)
    found, other = (formulas.predict(parameters, 12, each, price) for each in (law, Rounds(law.survival)))
    equal("mean rounds", float(np.asarray(found.rounds)), float(np.asarray(other.rounds)), CLOSE)


# --- 42: one pass, or a pass for each token ---


@theorem("42a", "With the same outcomes a parallel draft is never slower than a chain of heads, on every path.",
         source="one pass takes no longer than K", given=lambda: drafting(outcomes="survive", costs="tenths"))
def parallel_is_no_slower(x: Example) -> None:
    one, many = (play({**x, "placement": COLOCATED, "drafter": each}) for each in (speculative.PARALLEL, speculative.HEADS))
    at_most("latency of a parallel draft", one.latency, many.latency, 1e-12)


@theorem("42b", "With the same acceptance a parallel draft's best length is at least that of a chain, for any cost of verifying.",
         source="the mean tokens of a round are concave in K, so that they fall over K - 1", given=_curves)
def best_parallel_is_longer(x: Example) -> None:
    chain, parallel = (_best(x, each) for each in (False, True))
    at_most("best length of a chain", chain, parallel)


@theorem("42c", "At the break-even acceptance both are equally fast at their best lengths; less is slower, more is faster.",
         source="the mean tokens of a round rise with beta", given=_points)
def break_even(x: Example) -> None:
    alpha, c, most = x["acceptance_rate"], x["cost_ratio"], x["draft_length"]
    beta = float(parallel_drafts.break_even_acceptance(alpha, c, most))
    chain = float(parallel_drafts.best_chain(alpha, c, most)[1])
    at_most("break-even acceptance", beta, max(alpha, c), 1e-9)  # at S* = 1 it is at most c, because 1 + b <= 1 + c

    def parallel(rate: float) -> float:
        return float(parallel_drafts.parallel_speedup(rate, most, c))

    equal("speed-up at the root", parallel(beta), chain, CLOSE)
    at_most("speed-up below the root", parallel(0.9 * beta), chain, CLOSE)
    at_most("speed-up of the chain", chain, parallel(beta + 0.1 * (1 - beta)), CLOSE)


@theorem("42d", "A parallel draft with a lower acceptance rate is slower than a chain.",
         source="false: it saves passes", given=lambda: _points().filter(lambda x: x["acceptance_rate"] > 0), expect="fails")
def lower_acceptance_is_slower(x: Example) -> None:
    alpha, c, gamma = x["acceptance_rate"], x["cost_ratio"], x["draft_length"]
    parallel = float(parallel_drafts.parallel_speedup(alpha - 0.05, gamma, c))
    at_most("speed-up of a parallel draft", parallel, float(formulas.speedup(alpha, gamma, c)), CLOSE)


@theorem("42e", "The best length of a parallel draft is that of a chain with the same acceptance.",
         source="false: each further token of a chain costs a pass", given=_curves, expect="fails")
def same_best_length(x: Example) -> None:
    equal("best length of a parallel draft", _best(x, True), _best(x, False))


@theorem("42f", "A parallel draft's speed-up of l tokens tends to E[N] / (1 + c') as l grows.", source="renewal theory",
         given=_points)
def tends_to_limit(x: Example) -> None:
    alpha, c, gamma, many = x["acceptance_rate"], x["cost_ratio"], x["draft_length"], 4000
    parameters = speculative.Parameters(1, gamma, drafter=speculative.PARALLEL)
    found = formulas.predict(parameters, many, Rounds.by_draft_position([alpha] * gamma), UnitCost(1, cost_ratio=c))
    limit = float(parallel_drafts.parallel_speedup(alpha, gamma, c))
    equal("speed-up of 4000 tokens", many / float(found.latency), limit, 4 * (gamma + 1) ** 2 / many)


# --- Helpers ---


def _best(x: Example, parallel: bool) -> int:
    """Return the best draft length, the smallest in a tie, in fractions of 1 / 20: exact."""
    lengths = 1 + np.concatenate([[0.0], np.cumsum(x["law"]["survival"])])
    verify = 1 + np.concatenate([[0.0], np.cumsum(x["steps"])]) / 20
    passes = np.minimum(np.arange(_LONGEST + 1), 1 if parallel else _LONGEST)
    speeds = (lengths / (verify + passes * x["cost_ratio"])).round(12)
    return int(np.argmax(speeds))


THEOREMS = theorem.all()
