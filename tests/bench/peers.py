"""The vectorised paths relative to a loop in Python per round, as published simulators of speculative decoding have it.

Such a simulator draws the accepted length of each draft from a capped geometric distribution, adds the times of the draft and of
the verification, and goes on until all tokens are generated (the offline simulators of [Timor2024], arXiv:2405.14105, are of this
form). The loops here are written anew, with random numbers drawn in one call of numpy, which favours them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from model.costs.layer_times import UnitCost
from model.methods.dsi import paths as dsi_paths
from model.methods.dsi.algorithm import Parameters as DsiParameters
from model.methods.rounds.round_walks import Tally
from model.outcomes import random_streams
from tests.bench import speculative
from tests.bench.measure import Benchmark, rate

LAYERS, COST_RATIO, ACCEPTANCE_RATE = 40, 0.1, 0.8
UNLIMITED = DsiParameters(LAYERS, 1, 10)
"""As many replicas of the target as are ever busy, ceil(1 / `COST_RATIO`), as the published simulators assume."""
COST = UnitCost(LAYERS, cost_ratio=COST_RATIO)


def accepted_lengths(rate: float, count: int, seed: int = 0) -> list[int]:
    """Numbers of accepted tokens before the first rejection, not capped."""
    return (np.random.default_rng(seed).geometric(1 - rate, count) - 1).tolist()


def speculative_loop(accepted: Iterator[int], tokens: int, draft_length: int, cost_ratio: float) -> float:
    """Time of one speculative decoding [times of a target pass]: a round of at most `draft_length` drafted tokens at a time."""
    left, time = tokens, 0.0
    while left > 0:
        drafted = min(draft_length, left - 1)
        time += drafted * cost_ratio + 1
        left -= min(next(accepted), drafted) + 1
    return time


def dsi_loop(accepted: Iterator[int], tokens: int, cost_ratio: float) -> float:
    """Time of one decoding by DSI with a lookahead of 1 and enough replicas [times of a target pass]."""
    left, time = tokens, 0.0
    while left > 0:
        kept = min(next(accepted), left - 1)
        time += kept * cost_ratio + 1  # the pass that finds the rejection starts when the last kept token is drafted
        left -= kept + 1
    return time


def dsi_walk(tokens: int, block: int) -> Tally:
    """Simulate one block of sequences by DSI."""
    draws = random_streams.tiles(0, "accept", block, tokens - 1)
    return dsi_paths.walk(UNLIMITED, tokens, COST, speculative.LAW.drafts(draws))


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """128 tokens, acceptance rate .8; drafts of 4 tokens, and DSI."""
    tokens, blocks, sequences = (8, 1, 10) if tiny else (128, 4, 2000)

    def looped(one: Callable[[Iterator[int]], float]) -> Callable[[], float]:
        def all_of() -> None:
            accepted = iter(accepted_lengths(ACCEPTANCE_RATE, sequences * tokens))
            for _ in range(sequences):
                one(accepted)

        return lambda: rate(sequences * tokens, all_of)

    def walked(do: Callable[[int], object], repeats: Iterable[int]) -> Callable[[], float]:
        return lambda: rate(len([*repeats]) * random_streams.BLOCK * tokens, lambda: [do(block) for block in repeats])

    chain = looped(lambda accepted: speculative_loop(accepted, tokens, speculative.DRAFT_LENGTH, COST_RATIO))
    dsi = looped(lambda accepted: dsi_loop(accepted, tokens, COST_RATIO))
    ours = walked(lambda block: speculative.walk(tokens, block), range(5 * blocks))
    words = "a loop in Python per round"
    return [
        Benchmark("peer-speculative-loop", "tokens/s", ours, chain, words, 2),
        Benchmark("peer-dsi-loop", "tokens/s", walked(lambda block: dsi_walk(tokens, block), range(blocks)), dsi, words, 1),
        Benchmark("peer-dsi-rate", "tokens/s", walked(lambda block: dsi_walk(tokens, block), range(blocks)), lambda: 2e6,
                  "2 million tokens per second", 1),
    ]  # fmt: skip
