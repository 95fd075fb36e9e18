"""Tables of a rank log: rank rates by depth, as a scenario takes them, and tokens per round of draft trees.

The tokens per round are seen by following each sequence round by round, and predicted in closed form by the rank rates of the other
half of the sequences, which also choose the trees: no sequence predicts itself.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from calibrate.decode.titled_table import NONE, RateTable
from model.base import checks
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.logs.rank_log import Integers, RankLog, counted
from model.methods.speculative import rates_from_logs
from model.methods.tree import theory
from model.methods.tree.algorithm import Parameters
from model.methods.tree.draft_trees import MAX_NODES
from model.outcomes.intervals import LEVEL
from model.outcomes.rank_laws import RankLaw, RankRates, ReplayedRanks

NODES = (8, 16, 63)
"""Numbers of nodes of the trees in the table of tokens per round."""


def tables(log: RankLog, nodes: Sequence[int] = NODES) -> Iterator[RateTable]:
    """Yield the tables of a log."""
    for count in nodes:
        checks.whole("nodes", count, 1, MAX_NODES)
    about = f"{log.header['draft']['name']} for {log.header['target']['name']}; {log.sequences} sequences"
    yield rank_rates(log, about)
    yield tokens_per_round(log, nodes, about)


def rank_rates(log: RankLog, about: str) -> RateTable:
    """Table of the rank rates by depth, with the line that a scenario takes."""
    counts = counted(log.ranks, log.top)
    parts = [counted([each], log.top) for each in log.ranks]
    rows = []
    for depth in range(log.depth):
        trials = np.array([part.trials[depth] for part in parts])
        for rank in range(log.top):
            found = rates_from_logs.rates(counts.hits[depth, rank], counts.trials[depth])
            over = rates_from_logs.ratio_interval([part.hits[depth, rank] for part in parts], trials)
            rows.append((depth + 1, rank + 1, *map(float, found[:3]), *over, int(found.trials)))
    notes = [
        "rate: the target's token has this rank among the draft's candidates, where the tokens before were candidates too",
        f"low, high: {LEVEL:.0%} interval for independent drafts (Wilson); text_low, text_high: over sequences",
    ]
    rates = counts.rates()
    if len(rates) == log.depth:
        first = int(counts.trials[0])
        notes.append(f'as [outcomes]: kind = "by-depth"; rank_rates = {rates}; trials = {first}; source = "measured"')
    columns = ("depth", "rank", "rate", "low", "high", "text_low", "text_high", "trials")
    return RateTable(f"Rank rates by depth (measured; {about})", columns, tuple(rows), tuple(notes))


def tokens_per_round(log: RankLog, nodes: Sequence[int], about: str) -> RateTable:
    """Table of tokens per round of a chain and of the best trees of these numbers of nodes, seen and predicted."""
    rows = []
    halves = {"odd": (log.ranks[1::2], log.ranks[::2]), "even": (log.ranks[::2], log.ranks[1::2])}
    for name, (by, of) in halves.items():
        if not by or not of:
            continue
        rates = counted(by, log.top).rates()
        if len(rates) < log.depth:
            bound = f"sequences must reach depth {log.depth} in both halves"
            raise ParameterError(f"{bound}, got {len(rates)}; record more, or less deep")
        for tree in trees(log, rates, nodes):
            seen, low, high = _seen(tree, of)
            found = _predicted(tree, RankRates([_narrowed(rates, tree)]), of)
            rows.append((name, tree.shape, tree.longest_draft, len(of), seen, low, high, found, found / seen - 1))
    notes = (
        "of: the sequences that are followed, from the first position on; trees and prediction are of the other half's rates",
        f"low, high: {LEVEL:.0%} interval of tokens per round over sequences; predicted: exact mean for independent rounds",
    )
    columns = ("of", "tree", "nodes", "sequences", "tokens_per_round", "low", "high", "predicted", "error")
    return RateTable(f"Tokens per round of draft trees (measured; {about}), and by the closed form", columns, tuple(rows), notes)


def trees(log: RankLog, rates: Sequence[Sequence[float]], nodes: Sequence[int]) -> list[Parameters]:
    """Parameters of a chain, and of the best trees at these rates [Chen2024], all of the log's depth at most."""
    layers, table = log.header["target"]["layers"], tuple(map(tuple, rates))
    found = [Parameters(layers, "chain", log.depth)]
    return found + [Parameters(layers, "sequoia", log.depth, nodes=count, rank_rates=table) for count in nodes]


def _narrowed(rates: Sequence[Sequence[float]], tree: Parameters) -> list[Sequence[float]]:
    """The rates of the ranks that a tree has at each depth."""
    return [row[:width] for row, width in zip(rates, tree.ranks_by_depth, strict=False)]


def _seen(tree: Parameters, sequences: Sequence[Integers]) -> tuple[float, float, float]:
    """Tokens per round of these sequences, and its interval over them."""
    depth = tree.levels
    tokens = [len(each) for each in sequences]
    rounds = [round(_rounds(tree, len(each), ReplayedRanks([each[:, :depth].T]))) for each in sequences]
    low, high = rates_from_logs.ratio_interval(rounds, tokens)
    return sum(tokens) / sum(rounds), 1 / high, 1 / low if low else NONE


def _predicted(tree: Parameters, law: RankLaw, sequences: Sequence[Integers]) -> float:
    """Tokens per round of sequences of these lengths, for independent rounds."""
    lengths, counts = np.unique([len(each) for each in sequences], return_counts=True)
    rounds = np.array([_rounds(tree, int(length), law) for length in lengths])
    return float(lengths @ counts / (rounds @ counts))


def _rounds(tree: Parameters, tokens: int, law: RankLaw) -> float:
    cost: Any = UnitCost(tree.layers, cost_ratio=0.0)
    return float(theory.predict(tree, tokens, law, cost).rounds)
