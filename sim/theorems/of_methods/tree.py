"""Theorems on tree drafts, 43 to 46: agreement of the views, output, trees, speed.

An example of a decoding has `parents` (the tree), `ranks` (by depth, the rank of the target's token at each position; 0: none of
the candidates), `drafter`, and perhaps `cost` and `placement`. Symbols: n nodes, D depth, w width, G tokens of a round, v time of
the verification in plain steps, c time of a draft pass, p the target's distribution, q the draft's.

[Chen2024] Z. Chen et al. Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding. arXiv:2402.12374.
[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
[Li2024b] Y. Li et al. EAGLE-2: Faster Inference of Language Models with Dynamic Draft Trees. arXiv:2406.16858.
[Miao2024] X. Miao et al. SpecInfer. ASPLOS 2024, arXiv:2305.09781.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.interpreter import CountedWork
from model.interpret.simulated_answers import DraftOutcomes, Ranked, World
from model.methods.draft_model import PLACEMENTS
from model.methods.rounds import Rounds, Tally
from model.methods.speculative import algorithm as speculative
from model.methods.speculative import paths as speculative_paths
from model.methods.tree import algorithm, draft_trees, paths, theory
from model.methods.tree.draft_trees import DraftTree
from model.outcomes.random_streams import BLOCK
from model.outcomes.rank_laws import RankRates, ReplayedRanks
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
from sim.theorems.pipelined_examples import CLOSE, amounts, integers, rates
from sim.theorems.theorem import Example, TheoremCollection, at_most, drawn, equal, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

theorem = TheoremCollection("tree")
_RANKS = 2  # ranks with rates in examples that enumerate all outcomes


# --- Examples ---


def _parents(draw: DrawFn, nodes: int) -> list[int]:
    """Draw a tree of 1 to `nodes` nodes in breadth-first order."""
    found = [-1]
    for index in range(1, draw(st.integers(1, nodes))):
        found.append(draw(st.integers(found[-1], index - 1)))
    return found


@drawn
def _decodings(
    draw: DrawFn, /, costs: str = "plain", tokens: int = 8, nodes: int = 6, **fields: SearchStrategy[Any]
) -> Example:
    """Draw decodings with ranks at all positions. `costs`: `plain`, in `whole` numbers and quarters, or in `tenths`."""
    parents = _parents(draw, nodes)
    tree, count = DraftTree(tuple(parents)), draw(st.integers(1, tokens))
    return {
        "parents": parents, "ranks": [digits(draw, count, tree.width + 1) for _ in range(tree.depth)],
        "drafter": draw(st.sampled_from(speculative.DRAFTERS)), **_stage(draw, costs, tree.nodes),
    } | {name: draw(strategy) for name, strategy in fields.items()}  # fmt: skip


@drawn
def _short(draw: DrawFn, /, costs: str = "tenths") -> Example:
    """Draw decodings short enough to enumerate all outcomes, with rank rates: at most two ranks at each depth."""
    parents = draw(st.sampled_from([[-1], [-1, -1], [-1, 0], [-1, -1, 0], [-1, -1, 1], [-1, -1, 0, 1], [-1, 0, 0]]))
    return {
        "parents": parents, "rates": _rank_rates(draw, 2), "tokens": draw(st.integers(1, 4)),
        "drafter": draw(st.sampled_from(speculative.DRAFTERS)), **_stage(draw, costs, len(parents)),
    }  # fmt: skip


def _stage(draw: DrawFn, costs: str, nodes: int) -> Example:
    """Draw what changes times but no outcome."""
    if costs == "plain":
        return {}
    amount = amounts(costs)
    parts, first = (4, 4) if costs == "whole" else (10, 7)
    given: Example = {"cost_ratio": draw(st.integers(0, 8)) / parts}
    given |= {name: draw(amount) for name in ("link", "final_head") if draw(st.booleans())}
    if draw(st.booleans()):
        times = itertools.accumulate(digits(draw, nodes, 4), initial=first)
        given["verify_cost"] = [[width, time] for width, time in enumerate(times, start=1)]
    placement, sequences = draw(st.sampled_from(PLACEMENTS)), draw(st.integers(1, 2))
    return {"layers": draw(st.integers(1, 3)), "placement": placement, "sequences": sequences, "cost": given}


def _rank_rates(draw: DrawFn, depth: int, ranks: int = _RANKS) -> list[list[float]]:
    """Draw rank rates in twentieths whose sum is at most 1 at each depth."""
    found = []
    for _ in range(depth):
        row, left = [], 20
        for _ in range(ranks):
            row.append(draw(st.integers(0, left)))
            left -= row[-1]
        found.append([twentieths / 20 for twentieths in row])
    return found


@drawn
def _rated(draw: DrawFn, depth: int, ranks: int, falling: bool = False, /, **fields: SearchStrategy[Any]) -> Example:
    """Draw rank rates; `falling` with the rank."""
    table = _rank_rates(draw, depth, ranks)
    return {"rates": [sorted(row, reverse=True) for row in table] if falling else table} | {
        name: draw(strategy) for name, strategy in fields.items()
    }


@drawn
def _pairs(draw: DrawFn, /, least: int = 0, **fields: SearchStrategy[Any]) -> Example:
    """Draw pairs of models with a vocabulary of two or three words, a tree, and perhaps a stop token."""
    words = draw(st.integers(2, 3))
    example: Example = {"parents": _parents(draw, 3), "tokens": draw(st.integers(1, 5 - words))}
    for role in ("target", "draft"):
        example[role] = [
            [max(weight, least) for weight in digits(draw, words, 3, least=1)] for _ in range(draw(st.sampled_from((1, 3))))
        ]
    if draw(st.booleans()):
        example["stop"] = draw(st.integers(0, words - 1))
    example["drafter"] = draw(st.sampled_from(speculative.DRAFTERS))
    return example | {name: draw(strategy) for name, strategy in fields.items()}


# --- Playing an example ---


def parameters_of(x: Example) -> algorithm.Parameters:
    """Return the parameters of an example."""
    placement = x.get("placement", PLACEMENTS[0]) if x["drafter"] == speculative.MODEL else PLACEMENTS[0]
    rest = {name: x[name] for name in ("sampled", "candidates", "sequences") if name in x}
    return algorithm.Parameters(
        x.get("layers", 1), "listed", parents=tuple(x["parents"]), drafter=x["drafter"], placement=placement, **rest
    )


def cost(x: Example) -> UnitCost:
    """Return the costs of an example; by default a draft pass takes a quarter of the target's."""
    given = {"cost_ratio": 0.25} | x.get("cost", {})
    if given.get("verify_cost"):
        given["verify_cost"] = tuple((width, time) for width, time in given["verify_cost"])
    return UnitCost(x.get("layers", 1), **given)


def world(x: Example) -> Ranked:
    """Return the simulated answers of an example."""
    return Ranked(1, x.get("layers", 1), [[0] * size(x), *x["ranks"]])


def size(x: Example) -> int:
    """Return the number of tokens of an example."""
    return len(x["ranks"][0])


def play(x: Example, **more: Any) -> Run:
    """Simulate an example's decoding."""
    parameters = parameters_of(x)
    steps = algorithm.decode(parameters, PROMPT, size(x))
    return simulate(steps, size(x), Cluster(parameters.units), cost(x), world(x), **more)


def count_work(x: Example) -> CountedWork:
    """Count the work of an example's decoding."""
    return interpreter.count(algorithm.decode(parameters_of(x), PROMPT, size(x)), world(x), size(x))


def walk_paths(x: Example) -> Tally:
    """Walk an example's decoding in every replication of the vectorised paths."""
    law = ReplayedRanks([x["ranks"]])
    return paths.walk(parameters_of(x), size(x), cost(x), law.sample(iter([np.zeros((size(x), BLOCK))])))


def rounding(x: Example) -> float:
    """Bound on the relative rounding error of a decoding's times."""
    return (len(x["parents"]) + parameters_of(x).layers + 8) * size(x) * sys.float_info.epsilon


def all_ranks(x: Example) -> Iterator[tuple[float, Example]]:
    """Yield every decoding that the rates of an example allow, with its probability; the last token is never tested."""
    one: list[tuple[float, tuple[int, ...]]] = []
    for path in itertools.product(range(_RANKS + 1), repeat=len(x["rates"])):
        ends = path.index(0) if 0 in path else len(path)
        if not any(path[ends:]):  # ranks after a position without a match have no effect
            chances = [x["rates"][depth][rank - 1] for depth, rank in enumerate(path[:ends])]
            rest = 1 - sum(x["rates"][ends]) if ends < len(path) else 1.0
            one.append((math.prod(chances) * rest, path))
    one = [(chance, path) for chance, path in one if chance > 1e-12]
    for chosen in itertools.product(one, repeat=x["tokens"] - 1):
        ranks = [[path[depth] for _, path in chosen] + [0] for depth in range(len(x["rates"]))]
        yield math.prod(chance for chance, _ in chosen), {**x, "ranks": ranks}


def law_of(x: Example) -> RankRates:
    """Return the law of an example's ranks."""
    return RankRates([x["rates"]])


# --- 43: views ---


@theorem("43a", "Events and paths agree exactly on every path, with costs in quarters of a layer.", source="no contention",
         given=lambda: _decodings("whole"))
def events_are_paths(x: Example) -> None:
    _compare(x, 0.0)


@theorem("43b", "Events and paths agree to rounding on every path, with costs in tenths.", source="no contention",
         given=lambda: _decodings("tenths"))
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
         source="forward recursion over starts of rounds", given=_short)
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
         source="counting", given=lambda: _short("plain"))
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
         given=_decodings)
def text_is_plain(x: Example) -> None:
    run, work = play(x), count_work(x)
    equal("text", [*run.tokens][: size(x)], [*range(1, size(x) + 1)])
    equal("text of the counter", work.tokens[: size(x)], [*range(1, size(x) + 1)])
    equal("passes", run.account.totals().by_model, work.account.totals().by_model)


@theorem("43f", "One event per pass and one event per layer give the same run, to rounding.", source="layers run in turn",
         given=lambda: _decodings("tenths"))
def layers_are_passes(x: Example) -> None:
    one, many = play(x), play(x, per_layer=True)
    equal("latency", many.latency, one.latency, rounding(x))
    equal("compute", many.busy, one.busy, rounding(x))


@theorem("43g", "A chain is speculative decoding: on the same random draws, rates by position in the draft give the same time,"
         " rounds and drafts, on every path.",
         source="a chain has one candidate per position",
         given=lambda: _rated(3, 1, draws=st.lists(rates(), min_size=1, max_size=9), drafter=st.sampled_from(speculative.DRAFTERS),
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
         given=lambda: _decodings().map(lambda x: {**x, "parents": [*range(-1, len(x["ranks"]) - 1)]}))
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
    tables = [[sorted(row, reverse=True) for row in _rank_rates(draw, 3)] for _ in range(2)]
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


# --- 44: output ---


def _steps(x: Example) -> Callable[[], Any]:
    parameters, stop = parameters_of(x), () if x.get("stop") is None else (x["stop"],)
    return lambda: algorithm.decode(parameters, PROMPT, x["tokens"], stop)


@theorem("44a", "The sampled text has exactly the target's distribution, with the likeliest candidates and with drawn ones.",
         source="[Miao2024], Theorem 4.2; [Chen2024], Section 3.2",
         given=lambda: _pairs(sampled=st.just(True), candidates=st.sampled_from(algorithm.CANDIDATES)))
def output_is_exact(x: Example) -> None:
    found = law_of_text(_steps(x), models(x), PROMPT, x["tokens"])
    if gap := distance(found, law_of_model(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))):
        raise AssertionError(f"the text has another distribution: total variation distance {gap}")


@theorem("44b", "In greedy decoding the text is the target's, token for token.", source="a token is the target's own or equals it",
         given=_pairs)
def greedy_output(x: Example) -> None:
    want = greedy_text(models(x)["target"], PROMPT, x["tokens"], x.get("stop"))
    for decoding in possible_decodings(_steps(x), models(x), PROMPT, x["tokens"]):
        equal("text", decoding.text, want)


@theorem("44c", "A tree that grows by confidence keeps the distribution of the sampled text.",
         source="[Li2024b]: the candidates are no random choice",
         given=lambda: _pairs(sampled=st.booleans(), nodes=integers(1, 4), drafter=st.sampled_from(["model", "heads"])))
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
         given=lambda: _pairs(least=1, sampled=st.just(True)))
def all_words_are_accepted(x: Example) -> None:
    p, q = (models(x)[role](PROMPT) for role in ("target", "draft"))
    equal("probability that all are rejected", _rank_law(p, q, len(q))[0], 0)


@theorem("44e", "A further candidate never lowers the probability of acceptance, and none of the earlier ranks changes.",
         source="candidates are tried in turn", given=lambda: _pairs(least=1))
def more_candidates_accept_more(x: Example) -> None:
    p, q = (models(x)[role](PROMPT) for role in ("target", "draft"))
    few, many = _rank_law(p, q, 1), _rank_law(p, q, 2)
    equal("probability of rank 1", many[1], few[1])
    at_most("probability of no acceptance", float(many[0]), float(few[0]))
    equal("probability of rank 1", few[1], sum(min(one, other) for one, other in zip(p, q, strict=True)))


@theorem("44f", "Candidates drawn without replacement may each be tested against the draft's whole distribution.",
         source="false: the second candidate is drawn from q without the first", given=lambda: _pairs(least=1), expect="fails")
def whole_distribution_will_do(x: Example) -> None:
    p, q = (models(x)[role](PROMPT) for role in ("target", "draft"))
    equal("distribution of the token", _token_law(p, q, 2, lambda left, _: left), p)


@theorem("44g", "Tested against the draft's distribution without the rejected tokens, the token has the target's distribution.",
         source="[Chen2024], Algorithm 2", given=lambda: _pairs(least=1))
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


# --- 45: trees ---


@cache
def _all_trees(nodes: int, depth: int, width: int) -> tuple[DraftTree, ...]:
    """All trees of 1 to `nodes` nodes, at most this deep, with at most `width` children of a node."""
    found: list[tuple[int, ...]] = [(-1,)]
    for parents in found:
        if len(parents) < nodes:
            found += [(*parents, parent) for parent in range(parents[-1], len(parents))]
    trees = [DraftTree(parents) for parents in found]
    return tuple(tree for tree in trees if tree.depth <= depth and tree.width <= width)


@theorem("45a", "G is 1 plus the sum over all nodes of the rates on their paths: the mean tokens of a round, by enumeration.",
         source="[Chen2024], Section 3.1", given=lambda: _short("plain"))
def tokens_are_sum_over_nodes(x: Example) -> None:
    tree = parameters_of(x).trees[0]
    one = {**x, "tokens": 2}
    lengths: dict[int, float] = {}
    for chance, example in all_ranks(one):
        path, node = [row[0] for row in example["ranks"]], draft_trees.ROOT
        count = 0
        for rank in path:
            children = tree.children.get(node, ())
            if not 0 < rank <= len(children):
                break
            node, count = children[rank - 1], count + 1
        lengths[count] = lengths.get(count, 0.0) + chance
    mean = sum(chance * (1 + count) for count, chance in lengths.items())
    equal("G", theory.expected_tokens(tree, x["rates"]), mean, CLOSE)
    for place, survival in enumerate(tree.survival(x["rates"]).tolist(), 1):
        want = sum(chance for count, chance in lengths.items() if count >= place)
        at_most(f"error of P(accepted >= {place})", abs(survival - want), CLOSE)


@theorem("45b", "Dynamic programming finds the tree with most accepted tokens of all trees of n nodes, depth D and width w.",
         source="[Chen2024], Proposition 3.4", given=lambda: _rated(3, 3, nodes=integers(1, 5), depth=integers(1, 3)))
def optimum_of_all_trees(x: Example) -> None:
    trees = draft_trees.OptimalTrees(x["rates"], x["nodes"], x["depth"])
    best = max(tree.accepted_tokens(x["rates"]) for tree in _all_trees(x["nodes"], x["depth"], 3))
    own = trees.tree(x["nodes"])
    at_most("nodes", own.nodes, x["nodes"])
    at_most("depth", own.depth, x["depth"])
    at_most("best of all trees", best, own.accepted_tokens(x["rates"]), CLOSE)
    equal("accepted tokens", float(trees.accepted[x["nodes"]]), own.accepted_tokens(x["rates"]), CLOSE)


@theorem("45c", "With rates that do not rise with the rank, the best trees consist of the likeliest nodes: each further node gains"
         " no more than the one before, and a deeper limit never accepts less.",
         source="a node is no likelier than its parent and its elder siblings",
         given=lambda: _rated(3, 3, True, nodes=integers(1, 12)))
def gains_do_not_rise(x: Example) -> None:
    by_depth = [draft_trees.OptimalTrees(x["rates"], x["nodes"], depth).accepted for depth in (1, 2, 3)]
    for accepted_tokens in by_depth:
        gains = np.diff(accepted_tokens).tolist()
        for before, after in itertools.pairwise(gains):
            at_most("gain of a node", after, before, 1e-9)
    for shallow, deep in itertools.pairwise(by_depth):
        at_most("accepted tokens", float(shallow[-1]), float(deep[-1]), CLOSE)


@theorem("45d", "With any rates, each further node of the best trees gains no more than the one before.",
         source="false: a likely second candidate needs a first one", given=lambda: _rated(1, 3, nodes=st.just(3)), expect="fails")
def gains_never_rise(x: Example) -> None:
    gains = np.diff(draft_trees.OptimalTrees(x["rates"], x["nodes"], 1).accepted).tolist()
    for before, after in itertools.pairwise(gains):
        at_most("gain of a node", after, before, 1e-9)


def _read_in_limits(tree: DraftTree, width: int) -> bool:
    """True if the draft reads at most `width` nodes of each depth."""
    return max(tree.draft_widths, default=0) <= width


@theorem("45e", "Growth by confidence finds the best of all trees whose draft reads at most w nodes per depth, each with at most w"
         " children, with rates that do not rise with the rank.",
         source="[Li2024b], Section 4: it reads the likeliest nodes",
         given=lambda: _rated(3, 2, True, nodes=integers(1, 6)))
def growth_is_best_in_its_limits(x: Example) -> None:
    own = draft_trees.confident(x["rates"], x["nodes"], 3, 2)
    trees = [tree for tree in _all_trees(x["nodes"], 3, 2) if _read_in_limits(tree, 2)]
    best = max(tree.accepted_tokens(x["rates"]) for tree in trees)
    equal("accepted tokens", own.accepted_tokens(x["rates"]), best, CLOSE)


@theorem("45f", "Growth by confidence never accepts more than the best tree of as many nodes, depth and children.",
         source="the best tree is the best of all", given=lambda: _rated(3, 2, True, nodes=integers(1, 12)))
def growth_is_no_better(x: Example) -> None:
    own = draft_trees.confident(x["rates"], x["nodes"], 3, 2)
    best = draft_trees.OptimalTrees(x["rates"], x["nodes"], 3, 2).accepted[-1]
    at_most("accepted tokens", own.accepted_tokens(x["rates"]), float(best), CLOSE)


@theorem("45g", "Growth by confidence accepts as many tokens as the best tree of as many nodes, depth and children.",
         source="false: it reads at most w nodes per depth", given=lambda: _rated(3, 2, True, nodes=integers(8, 12)),
         expect="fails")
def growth_is_optimal(x: Example) -> None:
    own = draft_trees.confident(x["rates"], x["nodes"], 3, 2)
    best = draft_trees.OptimalTrees(x["rates"], x["nodes"], 3, 2).accepted[-1]
    equal("accepted tokens", own.accepted_tokens(x["rates"]), float(best), CLOSE)


@theorem("45h", "If classes of drafts have their own rates, growth by the class's confidence accepts no fewer tokens than any tree"
         " in the same limits, on average over the classes.",
         source="the mean of the largest is at least the largest mean",
         given=lambda: st.lists(_rated(3, 2, True), min_size=2, max_size=3).map(lambda each: {"classes": each}))
def confidence_is_worth(x: Example) -> None:
    tables = [each["rates"] for each in x["classes"]]
    own = sum(draft_trees.confident(table, 4, 3, 2).accepted_tokens(table) for table in tables)
    for tree in _all_trees(4, 3, 2):
        if _read_in_limits(tree, 2):
            at_most("accepted tokens of one tree", sum(tree.accepted_tokens(table) for table in tables), own, CLOSE)


@theorem("45i", "A tree that contains another never takes more rounds on average.",
         source="rounds are independent: each accepts no fewer tokens in law",
         given=lambda: _rated(2, 2, parent=integers(-1, 1), tokens=integers(1, 9)))
def larger_tree_takes_fewer_rounds(x: Example) -> None:
    small, large = (_rounds_of(x, parents) for parents in _nested(x["parent"]))
    at_most("mean rounds of the larger tree", large, small, CLOSE)


@theorem("45j", "A tree that contains another never takes more rounds, on any path.",
         source="false: it may begin a round where the draft fails", expect="fails",
         given=lambda: st.lists(st.lists(integers(0, 1), min_size=9, max_size=9), min_size=3, max_size=3).map(lambda ranks: {
             "drafter": speculative.MODEL, "ranks": ranks}))
def larger_tree_takes_fewer_rounds_on_paths(x: Example) -> None:
    small, large = (rounds(play({**x, "parents": [*range(-1, depth - 1)]})) for depth in (2, 3))
    at_most("rounds of the larger tree", large, small)


def _nested(parent: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return a tree and one with a further node."""
    return (-1, -1), (-1, -1, parent) if parent >= 0 else (-1, -1, 0)


def _rounds_of(x: Example, parents: tuple[int, ...]) -> float:
    parameters = algorithm.Parameters(1, "listed", parents=parents)
    return float(np.asarray(theory.predict(parameters, x["tokens"], law_of(x), UnitCost(1, cost_ratio=0.25)).rounds))


# --- 46: speed ---


@drawn
def _priced(draw: DrawFn, /, **fields: SearchStrategy[Any]) -> Example:
    """Draw rank rates, the time of a draft pass, and the times of wider passes of the target."""
    steps = digits(draw, 4, 6)
    return {
        "rates": [sorted(row, reverse=True) for row in _rank_rates(draw, 3)], "cost_ratio": draw(st.integers(0, 10)) / 20,
        "verify_cost": [[width, 10 + time] for width, time in enumerate(itertools.accumulate(steps, initial=0), 1)],
    } | {name: draw(strategy) for name, strategy in fields.items()}  # fmt: skip


def _price(x: Example) -> UnitCost:
    return UnitCost(1, cost_ratio=x["cost_ratio"], verify_cost=tuple((width, time) for width, time in x["verify_cost"]))


@theorem("46a", "The best tree for a batch is the best of all trees of at most n nodes, and plain decoding.",
         source="[Chen2024], Section 3.3", given=_priced)
def best_tree_is_best(x: Example) -> None:
    found = theory.best_tree(x["rates"], 1, _price(x), nodes=4, depth=3, width=2)
    curve = dict(x["verify_cost"])
    speeds = [
        float(theory.speedup(tree, x["rates"], x["cost_ratio"], verify_factor=curve[tree.nodes + 1] / 10))
        for tree in _all_trees(4, 3, 2)
    ]
    equal("best speed-up", found.speedup, max(1.0, *speeds), CLOSE)
    if found.tree is not None:
        own = theory.speedup(found.tree, x["rates"], x["cost_ratio"], verify_factor=curve[found.tree.nodes + 1] / 10)
        equal("speed-up of the tree", float(own), found.speedup, CLOSE)


@theorem("46b", "Where a pass takes the same time for any number of tokens, a further node of the best trees never makes decoding"
         " slower.", source="G does not fall", given=lambda: _rated(3, 2, True, cost_ratio=rates()))
def free_width_takes_large_trees(x: Example) -> None:
    found = theory.best_trees(x["rates"], 1, UnitCost(1, cost_ratio=x["cost_ratio"]), nodes=6, depth=3)
    for small, large in itertools.pairwise(found):
        at_most("speed-up of the smaller tree", small.speedup, large.speedup, CLOSE)
    full = draft_trees.OptimalTrees(x["rates"], 6, 3).accepted[-1]
    at_most("speed-up of the deepest tree", (1 + float(full)) / (1 + 3 * x["cost_ratio"]), found[-1].speedup, CLOSE)


@theorem("46c", "A larger tree of the best is never slower.", source="false: verifying takes longer", given=_priced, expect="fails")
def larger_is_faster(x: Example) -> None:
    trees, curve = draft_trees.OptimalTrees(x["rates"], 4, 1, 2), dict(x["verify_cost"])
    speeds = [
        float(theory.speedup(tree, x["rates"], x["cost_ratio"], verify_factor=curve[tree.nodes + 1] / 10))
        for tree in (trees.tree(1), trees.tree(2))
    ]
    at_most("speed-up of the smaller tree", speeds[0], speeds[1], CLOSE)


@theorem("46d", "The speed-up of l tokens tends to G / (v + D c) as l grows.", source="renewal theory",
         given=lambda: _priced(parents=st.sampled_from([[-1], [-1, -1], [-1, 0], [-1, -1, 0], [-1, -1, 0, 1]])))
def tends_to_limit(x: Example) -> None:
    tree, many = DraftTree(tuple(x["parents"])), 1000
    parameters = algorithm.Parameters(1, "listed", parents=tree.parents)
    found = theory.predict(parameters, many, law_of(x), _price(x))
    factor = dict(x["verify_cost"])[tree.nodes + 1] / 10
    limit = float(theory.speedup(tree, x["rates"], x["cost_ratio"], verify_factor=factor))
    equal("speed-up of 1000 tokens", float(found.plain_latency / found.latency), limit, 4 * (tree.depth + 1) ** 2 / many)


@theorem("46e", "A tree is faster than the chain of its first candidates exactly if it gains a larger share of G than of the"
         " round's time.", source="S = G / (v + D c)", given=_priced)
def tree_against_chain(x: Example) -> None:
    tree, chain = DraftTree((-1, -1, 0, 1)), draft_trees.chain(2)
    curve, c = dict(x["verify_cost"]), x["cost_ratio"]
    tokens = [theory.expected_tokens(each, x["rates"]) for each in (tree, chain)]
    times = [curve[each.nodes + 1] / 10 + 2 * c for each in (tree, chain)]
    speeds = [_long_run(each, x) for each in (tree, chain)]
    if abs(tokens[0] * times[1] - tokens[1] * times[0]) > 1e-9:
        equal("tree is faster", speeds[0] > speeds[1], tokens[0] / tokens[1] > times[0] / times[1])


def _long_run(tree: DraftTree, x: Example) -> float:
    """Tokens per time of endless decoding, by the time per token between two lengths in a batch that is kept full."""
    parameters = algorithm.Parameters(1, "listed", parents=tree.parents, sequences=2)
    short, long = (float(theory.predict(parameters, tokens, law_of(x), _price(x)).latency) for tokens in (400, 900))
    return 500 / (long - short)


THEOREMS = theorem.all()
