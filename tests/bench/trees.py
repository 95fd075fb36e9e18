"""Tree drafts relative to two limits: drawing the random numbers, two million tokens per second."""

from __future__ import annotations

from collections.abc import Callable

from model.costs.layer_times import UnitCost
from model.methods.rounds import round_walks
from model.methods.tree import paths
from model.methods.tree.algorithm import Parameters
from model.outcomes import random_streams
from model.outcomes.rank_laws import RankRates
from tests.bench.measure import Benchmark, rate

LAYERS = 40
ROW = (0.62, 0.13, 0.06, 0.035, 0.02, 0.015, 0.01, 0.01)
CHOICE = Parameters(LAYERS, "eagle-2", 5, 8, 63, rank_rates=(ROW,))
COST, LAW = UnitCost(LAYERS, cost_ratio=0.05, verify_cost=((1, 1.0), (64, 1.5))), RankRates([(ROW,) * 5])


def walk(tokens: int, block: int) -> round_walks.Tally:
    """Simulate one block of sequences."""
    return paths.walk(CHOICE, tokens, COST, LAW.sample(random_streams.tiles(0, "rank", block, tokens)))


def draw(tokens: int, block: int) -> None:
    """Draw the same random numbers and discard them."""
    for _ in random_streams.tiles(0, "rank", block, tokens):
        pass


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """The published tree of 63 nodes, depth 5 and 8 candidates; 128 tokens."""
    tokens, blocks = (8, 1) if tiny else (128, 4)

    def tokens_of(do: Callable[[int], object]) -> Callable[[], float]:
        return lambda: rate(blocks * random_streams.BLOCK * tokens, lambda: [do(block) for block in range(blocks)])

    walked = tokens_of(lambda block: walk(tokens, block))
    return [
        Benchmark("tree-paths", "tokens/s", walked, tokens_of(lambda block: draw(tokens, block)),
                  "drawing the random numbers", 0.02),
        Benchmark("tree-paths-rate", "tokens/s", walked, lambda: 2e6, "2 million tokens per second", 1),
    ]  # fmt: skip
