"""Theorems on tree drafts, 43 and 44: agreement of the views, output. Examples are described in `tree_examples`.

Symbols: p the target's distribution, q the draft's.

[Chen2024] Z. Chen et al. Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding. arXiv:2402.12374.
[Li2024b] Y. Li et al. EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees. arXiv:2406.16858.
[Miao2024] X. Miao et al. SpecInfer: Accelerating LLM Serving with Tree-based Speculative Inference and Verification. ASPLOS 2024,
arXiv:2305.09781.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.simulated_answers import DraftOutcomes, Ranked, World
from model.methods.draft_model import PLACEMENTS
from model.methods.rounds.round_laws import Rounds
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import paths as speculative_paths
from model.methods.tree import algorithm, paths, theory
from model.methods.tree.draft_trees import ROOT
from model.outcomes.random_streams import BLOCK
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import PROMPT, accepted, digits, drafted, models, rounds
from sim.theorems.output_law import (
    Law,
    after_rejections,
    distance,
    greedy_text,
    law_of_model,
    law_of_text,
    possible_decodings,
    residual,
    without,
)
from sim.theorems.pipelined_examples import CLOSE, integers, rates
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st
from sim.theorems.tree_examples import (
    all_ranks,
    cost,
    count_work,
    decodings,
    law_of,
    parameters_of,
    play,
    rank_rates,
    rated,
    rounding,
    short_decodings,
    size,
    tree_pairs,
    walk_paths,
)

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn

theorem = TheoremCollection("tree")


# --- 43: views ---


@theorem("43a", "Events and paths agree exactly on every path, with costs in quarters of a layer.", source="no contention",
         given=lambda: decodings("whole"))
def events_are_paths(x: Example) -> None:
    _compare(x, 0.0)


@theorem("43b", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: decodings("tenths"))
def events_are_paths_to_rounding(x: Example) -> None:
    _compare(x, rounding(x))


def _compare(x: Example, within: float) -> None:
    run, tally = play(x), walk_paths(x)
    equal("latency", float(tally.time[0]), run.latency, within)
    equal("compute", float(tally.busy[0]), run.busy, within)
    equal("rounds", float(tally.rounds[0]), rounds(run))
    equal("drafted tokens", float(tally.drafted[0]), drafted(run))
    most = parameters_of(x).levels + 1
    equal("accepted tokens", sum(count * int(times) for count, times in enumerate(tally.accepted[:most])), accepted(run) * BLOCK)


@theorem("43c", "The formula gives the mean and variance of the time, and the mean compute, rounds and drafted tokens.",
         source="forward recursion over starts of rounds", given=short_decodings)
def formula_is_mean(x: Example) -> None:
    found = theory.predict(parameters_of(x), x["tokens"], law_of(x), cost(x))
    every = [(chance, play(example)) for chance, example in all_ranks(x)]

    def mean(of: Callable[[Run], float]) -> float:
        return math.fsum(chance * of(run) for chance, run in every)

    latency = mean(lambda run: run.latency)
    square = mean(lambda run: run.latency**2)
    equal("mean latency", float(found.latency), latency, CLOSE)
    at_most("error of the variance", abs(float(found.latency_variance) - (square - latency**2)), CLOSE * max(square, 1.0))
    equal("mean compute", float(found.busy), mean(lambda run: run.busy), CLOSE)
    equal("mean rounds", float(np.asarray(found.rounds)), mean(rounds), CLOSE)
    equal("mean drafted tokens", float(np.asarray(found.drafted)), mean(drafted), CLOSE)


@theorem("43d", "Expected work is the mean of counted work: passes, layers, tokens, positions read and attended to, logits.",
         source="counting", given=lambda: short_decodings("plain"))
def work_is_mean(x: Example) -> None:
    expected = theory.work(parameters_of(x), x["tokens"], law_of(x))
    assert expected is not None
    total: dict[str, Any] = {}
    for chance, example in all_ranks(x):
        for role, values in count_work(example).account.totals().by_model.items():
            total[role] = total.get(role, 0.0) + chance * np.array(values)
    for role, values in expected.by_model.items():
        for what, got, want in zip(values._fields, values, total.get(role, np.zeros(len(values))).tolist(), strict=True):
            equal(f"{what} of the {role}", got, want, CLOSE)


@theorem("43e", "Events and counter generate the text of plain decoding, with equal passes.", source="exactness",
         given=decodings)
def text_is_plain(x: Example) -> None:
    run, work = play(x), count_work(x)
    equal("text", [*run.tokens][: size(x)], [*range(1, size(x) + 1)])
    equal("text of the counter", work.tokens[: size(x)], [*range(1, size(x) + 1)])
    equal("passes", run.account.totals().by_model, work.account.totals().by_model)


@theorem("43f", "One event per pass and one event per layer give the same run, to rounding.", source="layers run in turn",
         given=lambda: decodings("tenths"))
def layers_are_passes(x: Example) -> None:
    one, many = play(x), play(x, per_layer=True)
    equal("latency", many.latency, one.latency, rounding(x))
    equal("compute", many.busy, one.busy, rounding(x))


@theorem("43g", "A chain is speculative decoding: on the same random draws, rates by position in the draft give the same time,"
         " rounds and drafts, on every path.",
         source="a chain has one candidate per position",
         given=lambda: rated(3, 1, draws=st.lists(rates(), min_size=1, max_size=9), drafter=st.sampled_from(speculative.DRAFTERS),
                              placement=st.sampled_from(PLACEMENTS)))
def chain_is_speculative(x: Example) -> None:
    draws = np.repeat(np.minimum(np.array(x["draws"]), np.nextafter(1.0, 0.0))[:, None], BLOCK, axis=1)
    tokens, one = len(x["draws"]), {**x, "parents": (-1, 0, 1)}
    own = parameters_of(one)
    price = UnitCost(1, cost_ratio=0.25, link=0.5, verify_cost=((1, 1.0), (4, 1.75)), operations_ratio=0.125)
    other = speculative.Parameters(1, 3, drafter=x["drafter"], placement=own.placement)
    law = Rounds.by_draft_position([row[0] for row in x["rates"]])
    tree = paths.walk(own, tokens, price, law_of(x).sample(iter([draws])))
    chain = speculative_paths.walk(other, tokens, price, law.drafts(iter([draws[: tokens - 1]] if tokens > 1 else [])))
    for what in ("time", "busy", "rounds", "drafted"):
        equal(what, float(getattr(tree, what)[0]), float(getattr(chain, what)[0]))
    equal("accepted tokens", tree.accepted[:4].tolist(), chain.accepted.tolist())
    if x["drafter"] != speculative.PARALLEL:  # which counts its tokens as if they were drafted one by one
        equal("operations", float(tree.operations[0]), float(chain.operations[0]))


@theorem("43h", "The steps of a chain are those of speculative decoding, pass by pass.", source="a chain has one candidate",
         given=lambda: decodings().map(lambda x: {**x, "parents": [*range(-1, len(x["ranks"]) - 1)]}))
def chain_makes_same_passes(x: Example) -> None:
    lengths = [next((depth for depth, rank in enumerate(path) if rank != 1), len(path)) for path in zip(*x["ranks"], strict=True)]
    other = speculative.Parameters(1, len(x["parents"]), drafter=x["drafter"])
    answers = World(1, 1, drafts={"draft": DraftOutcomes("target", lengths)})
    chain = interpreter.count(speculative.decode(other, PROMPT, size(x)), answers, size(x))
    own = count_work(x)
    equal("passes", own.account.passes_by_kind, chain.account.passes_by_kind)
    equal("rounds", own.rounds, chain.rounds)


@drawn
def _confident(draw: DrawFn) -> Example:
    """Draw decodings with a tree that grows by confidence: tables of confidences, and the class of the draft at each position."""
    tables = [[sorted(row, reverse=True) for row in rank_rates(draw, 3)] for _ in range(2)]
    count = draw(st.integers(1, 8))
    return {
        "rank_rates": tables, "nodes": draw(st.integers(1, 8)), "classes": digits(draw, count, 1),
        "ranks": [digits(draw, count, 2) for _ in range(3)], "sequences": draw(st.integers(1, 2)),
        "drafter": draw(st.sampled_from((speculative.MODEL, speculative.HEADS))),
    }  # fmt: skip


@theorem("43i", "Events and paths agree on every path where the tree grows by the confidence of the draft's class.",
         source="the draft knows its class", given=_confident)
def confident_events_are_paths(x: Example) -> None:
    tables = tuple(tuple(tuple(row) for row in table) for table in x["rank_rates"])
    parameters = algorithm.Parameters(
        1, "eagle-2", draft_depth=3, width=2, nodes=x["nodes"], rank_rates=tables, drafter=x["drafter"], sequences=x["sequences"]
    )
    price = UnitCost(1, cost_ratio=0.25, verify_cost=((1, 1.0), (9, 3.0)))
    outcomes = [x["classes"], *x["ranks"]]
    steps = algorithm.decode(parameters, PROMPT, size(x))
    run = simulate(steps, size(x), Cluster(1), price, Ranked(1, 1, outcomes, parameters.draft_confidences))
    tile = np.array(outcomes, dtype=np.uint16).T[:, :, None]
    tally = paths.walk(parameters, size(x), price, iter([np.repeat(tile, BLOCK, axis=2)]))
    equal("latency", float(tally.time[0]), run.latency, CLOSE)
    equal("rounds", float(tally.rounds[0]), rounds(run))
    equal("drafted tokens", float(tally.drafted[0]), drafted(run))
    equal("text", [*run.tokens][: size(x)], [*range(1, size(x) + 1)])


@theorem("43j", "Each commit holds the ranks of its tokens by depth, and the numbers of candidates that were verified there.",
         source="the outcomes themselves", given=lambda: decodings("whole"))
def commits_hold_ranks(x: Example) -> None:
    parameters, at = parameters_of(x), 0
    for commit in count_work(x).committed:
        room = size(x) - at - 1
        levels = min(parameters.levels, room) if parameters.cut else parameters.levels
        children = parameters.trees[0].cut(levels).children if levels else {}
        node, expected = ROOT, []
        for depth in range(levels + 1):
            below = children.get(node, ()) if depth < room else ()
            rank = x["ranks"][depth][at] if below else 0
            expected.append((rank if rank <= len(below) else 0, len(below)))
            if not expected[-1][0]:
                break
            node = below[rank - 1]
        equal("ranks and candidates", [*zip(commit.ranks, commit.candidates, strict=True)], expected)
        at += len(commit.tokens)


# --- 44: output ---


def _steps(x: Example) -> Callable[[], Any]:
    parameters, stop = parameters_of(x), () if x.get("stop") is None else (x["stop"],)
    return lambda: algorithm.decode(parameters, PROMPT, x["tokens"], stop)


@theorem("44a", "The sampled text has exactly the target's distribution, with the likeliest candidates and with drawn ones.",
         source="[Miao2024], Theorem 4.2; [Chen2024], Section 3.2",
         given=lambda: tree_pairs(sampled=st.just(True), candidates=st.sampled_from(algorithm.CANDIDATES)))
def output_is_exact(x: Example) -> None:
    found = law_of_text(_steps(x), models(x), PROMPT, x["tokens"])
    if gap := distance(found, law_of_model(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))):
        raise AssertionError(f"the text has another distribution: total variation distance {gap}")


@theorem("44b", "In greedy decoding the text is the target's, token for token.", source="a token is the target's own or equals it",
         given=tree_pairs)
def greedy_output(x: Example) -> None:
    want = greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))
    for decoding in possible_decodings(_steps(x), models(x), PROMPT, x["tokens"]):
        equal("text", decoding.text, want)


@theorem("44c", "A tree that grows by confidence keeps the distribution of the sampled text.",
         source="[Li2024b]: the candidates are no random choice",
         given=lambda: tree_pairs(sampled=st.booleans(), nodes=integers(1, 4), drafter=st.sampled_from(["model", "heads"])))
def confident_output_is_exact(x: Example) -> None:
    parameters = algorithm.Parameters(
        1, "eagle-2", draft_depth=2, width=2, nodes=x["nodes"], drafter=x["drafter"], sampled=x["sampled"]
    )
    stop = () if x.get("stop") is None else (x["stop"],)
    found = law_of_text(lambda: algorithm.decode(parameters, PROMPT, x["tokens"], stop), models(x), PROMPT, x["tokens"])
    target = models(x)["target"]
    if x["sampled"]:
        want = law_of_model(target, PROMPT, x["tokens"], x.get("stop"))
    else:
        want = {greedy_text(target, PROMPT, x["tokens"], x.get("stop")): Fraction(1)}
    equal("distance of the text's distribution", distance(found, want), 0)


@theorem("44d", "With as many drawn candidates as words, all of which the draft may draw, one is accepted.",
         source="[Chen2024], Section 3.2: a rejected token has no probability left",
         given=lambda: tree_pairs(least=1, sampled=st.just(True)))
def all_words_are_accepted(x: Example) -> None:
    p, q = (models(x)[role](PROMPT) for role in ("target", "draft"))
    equal("probability that all are rejected", _rank_law(p, q, len(q))[0], 0)


@theorem("44e", "A further candidate never lowers the probability of acceptance, and none of the earlier ranks changes.",
         source="candidates are tried in turn", given=lambda: tree_pairs(least=1))
def more_candidates_accept_more(x: Example) -> None:
    p, q = (models(x)[role](PROMPT) for role in ("target", "draft"))
    few, many = _rank_law(p, q, 1), _rank_law(p, q, 2)
    equal("probability of rank 1", many[1], few[1])
    at_most("probability of no acceptance", float(many[0]), float(few[0]))
    equal("probability of rank 1", few[1], sum(min(one, other) for one, other in zip(p, q, strict=True)))


@theorem("44f", "Candidates drawn without replacement may each be tested against the draft's whole distribution.",
         source="false: the second candidate is drawn from q without the first", given=lambda: tree_pairs(least=1), expect="fails")
def whole_distribution_will_do(x: Example) -> None:
    p, q = (models(x)[role](PROMPT) for role in ("target", "draft"))
    equal("distribution of the token", _token_law(p, q, 2, lambda left, _: left), p)


@theorem("44g", "Tested against the draft's distribution without the rejected tokens, the token has the target's distribution.",
         source="[Chen2024], Algorithm 2", given=lambda: tree_pairs(least=1))
def remaining_distribution_is_exact(x: Example) -> None:
    p, q = (models(x)[role](PROMPT) for role in ("target", "draft"))
    equal("distribution of the token", _token_law(p, q, 2, without), p)


def _rank_law(p: Law, q: Law, candidates: int) -> list[Fraction]:
    """Probability that no candidate is accepted, the first one, the second one, ..."""
    found = [Fraction(0)] * (candidates + 1)

    def follow(chance: Fraction, drawn_before: tuple[int, ...]) -> None:
        place = len(drawn_before)
        if place == candidates or not any(part for token, part in enumerate(q) if token not in drawn_before):
            found[0] += chance
            return
        left, now = without(q, drawn_before), after_rejections(p, q, drawn_before)[0] if place < len(q) else p
        for token, share in enumerate(left):
            if share:
                taken = min(Fraction(1), now[token] / share)
                found[place + 1] += chance * share * taken
                if taken < 1:
                    follow(chance * share * (1 - taken), (*drawn_before, token))

    follow(Fraction(1), ())
    return found


def _token_law(p: Law, q: Law, candidates: int, tested: Callable[[Law, Sequence[int]], Law]) -> Law:
    """Distribution of the emitted token, where candidates are tested against the distribution `tested`."""
    found = [Fraction(0)] * len(p)

    def follow(chance: Fraction, now: Law, before: tuple[int, ...]) -> None:
        left = without(q, before) if len(before) < min(candidates, len(q)) else None
        if left is None:
            for token, share in enumerate(now):
                found[token] += chance * share
            return
        against = tested(q, before)
        for token, share in enumerate(left):
            if share:
                taken = min(Fraction(1), now[token] / against[token])
                found[token] += chance * share * taken
                if taken < 1:
                    follow(chance * share * (1 - taken), residual(now, against), (*before, token))

    follow(Fraction(1), p, ())
    return tuple(found)


THEOREMS = theorem.all()
