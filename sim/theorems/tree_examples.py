"""Examples for theorems on tree drafts: decodings with ranks by position, rank rates, and small models given as tables.

An example of a decoding has `parents` (the tree), `ranks` (by depth, the rank of the target's token at each position; 0: none of
the candidates), `drafter`, and perhaps `cost`, `placement` and `sequences`. One with `rates` instead of `ranks` stands for all
decodings of `tokens` tokens that these rank rates allow.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from model.costs.layer_times import UnitCost
from model.interpret import interpreter
from model.interpret.interpreter import CountedWork
from model.interpret.simulated_answers import Ranked
from model.methods.draft_model import PLACEMENTS
from model.methods.rounds.round_walks import Tally
from model.methods.speculative import algorithm as speculative
from model.methods.tree import algorithm, paths
from model.methods.tree.draft_trees import DraftTree
from model.outcomes.random_streams import BLOCK
from model.outcomes.rank_laws import RankRates, ReplayedRanks
from sim.engine.cluster import Cluster
from sim.engine.events import Run, simulate
from sim.theorems.drafting_examples import PROMPT, digits
from sim.theorems.pipelined_examples import amounts
from sim.theorems.theorem import Example, drawn, st

if TYPE_CHECKING:
    from hypothesis.strategies import DrawFn, SearchStrategy

RANKS = 2
"""Ranks with rates in examples whose outcomes are enumerated."""


# --- Examples ---


def draw_parents(draw: DrawFn, nodes: int) -> list[int]:
    """Draw a tree of 1 to `nodes` nodes in breadth-first order."""
    found = [-1]
    for index in range(1, draw(st.integers(1, nodes))):
        found.append(draw(st.integers(found[-1], index - 1)))
    return found


@drawn
def decodings(
    draw: DrawFn, /, costs: str = "plain", tokens: int = 8, nodes: int = 6, **fields: SearchStrategy[Any]
) -> Example:
    """Draw decodings with ranks at all positions. `costs`: `plain`, in `whole` numbers and quarters, or in `tenths`."""
    parents = draw_parents(draw, nodes)
    tree, count = DraftTree(tuple(parents)), draw(st.integers(1, tokens))
    return {
        "parents": parents, "ranks": [digits(draw, count, tree.width + 1) for _ in range(tree.depth)],
        "drafter": draw(st.sampled_from(speculative.DRAFTERS)), **stage(draw, costs, tree.nodes),
    } | {name: draw(strategy) for name, strategy in fields.items()}  # fmt: skip


@drawn
def short_decodings(draw: DrawFn, /, costs: str = "tenths") -> Example:
    """Draw decodings short enough to enumerate all outcomes, with rank rates: at most two ranks at each depth."""
    parents = draw(st.sampled_from([[-1], [-1, -1], [-1, 0], [-1, -1, 0], [-1, -1, 1], [-1, -1, 0, 1], [-1, 0, 0]]))
    return {
        "parents": parents, "rates": rank_rates(draw, 2), "tokens": draw(st.integers(1, 4)),
        "drafter": draw(st.sampled_from(speculative.DRAFTERS)), **stage(draw, costs, len(parents)),
    }  # fmt: skip


def stage(draw: DrawFn, costs: str, nodes: int) -> Example:
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


def rank_rates(draw: DrawFn, depth: int, ranks: int = RANKS) -> list[list[float]]:
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
def rated(draw: DrawFn, depth: int, ranks: int, falling: bool = False, /, **fields: SearchStrategy[Any]) -> Example:
    """Draw rank rates; `falling` with the rank."""
    table = rank_rates(draw, depth, ranks)
    return {"rates": [sorted(row, reverse=True) for row in table] if falling else table} | {
        name: draw(strategy) for name, strategy in fields.items()
    }


@drawn
def tree_pairs(draw: DrawFn, /, least: int = 0, **fields: SearchStrategy[Any]) -> Example:
    """Draw pairs of models with a vocabulary of two or three words, a tree, and perhaps a stop token."""
    words = draw(st.integers(2, 3))
    example: Example = {"parents": draw_parents(draw, 3), "tokens": draw(st.integers(1, 5 - words))}
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
    for path in itertools.product(range(RANKS + 1), repeat=len(x["rates"])):
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
