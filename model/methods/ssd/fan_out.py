"""Fan-outs of SSD: how many outcomes to prepare after each number of accepted tokens, for a budget of branches.

A round ends after k accepted tokens with a weight w_k, and misses with probability w_k times a decreasing function of the fan-out
F_k. [Kumar2026] takes independent acceptances with rate a and a miss probability F^-r for every k: w_k = a^k (1 - a) for k < K, and
w_K = a^K.
Lagrange's condition r w_k F_k^-(r + 1) = constant gives their capped geometric series (`geometric`). Fan-outs are whole numbers and
the draft's tokens have one law of ranks, so the exact optimum is found branch by branch (`optimal`).

[Kumar2026] T. Kumar, T. Dao, A. May. Speculative Speculative Decoding. arXiv:2603.03251.
"""

from __future__ import annotations

from heapq import heappop, heappush

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.draft_model import MAX_DRAFT
from model.outcomes.position_ranks import MAX_RANK, PositionRankRates

Floats = NDArray[np.float64]


def geometric(acceptance_rate: float, exponent: float, draft_length: int, budget: float) -> Floats:
    """Fan-outs of the paper, real numbers that sum to `budget`; shape (draft_length + 1,).

    F_k = F_0 a^(k / (1 + r)) for k < K, and F_K = F_0 (a^K / (1 - a))^(1 / (1 + r)).

    >>> geometric(0.5, 1.0, 2, 10).round(3).tolist()
    [4.142, 2.929, 2.929]
    """
    checks.number("acceptance_rate", acceptance_rate, 0, 1)
    checks.number("exponent", exponent, 0)
    checks.whole("draft_length", draft_length, 1, MAX_DRAFT)
    checks.number("budget", budget, 0)
    if acceptance_rate == 1:  # only the whole draft is an outcome
        return np.append(np.zeros(draft_length), float(budget))
    weights = acceptance_rate ** np.arange(draft_length + 1.0)
    weights[-1] /= 1 - acceptance_rate
    shares = weights ** (1 / (1 + exponent))
    return np.asarray(budget * shares / shares.sum())


def hit_probability(law: PositionRankRates, fan_outs: tuple[int, ...]) -> float:
    """Probability that the outcome of a whole draft of K tokens is prepared; `fan_outs` has K + 1 numbers.

    >>> hit_probability(PositionRankRates([0.5, 0.25, 0.125]), (1, 2, 1))  # .25 after none, .5 .375 after one, .25 .5 after both
    0.5625
    """
    alpha, total = float(law.rates[0]), 0.0
    for accepted, count in enumerate(fan_outs):
        whole = accepted == len(fan_outs) - 1
        total += alpha**accepted * float((law.rates[:count] if whole else law.rates[1 : count + 1]).sum())
    return min(total, 1.0)  # a sum of all outcomes may exceed 1 by rounding


def optimal(law: PositionRankRates, draft_length: int, budget: int) -> tuple[int, ...]:
    """Fan-outs of at least 1 that sum to `budget`, with the largest hit probability.

    Each further branch goes where its outcome is likeliest. That is optimal if rates do not increase with the rank, as likelier
    outcomes of the same number of accepted tokens are then taken first; other laws are refused. Ties go to fewer accepted tokens.

    >>> optimal(PositionRankRates([0.5, 0.25, 0.125, 0.0625]), 2, 5)
    (3, 1, 1)
    """
    checks.whole("draft_length", draft_length, 1, MAX_DRAFT)
    checks.whole("budget", budget, draft_length + 1, (draft_length + 1) * (MAX_RANK - 1))
    if np.any(np.diff(law.rates) > 0):
        raise checks.ParameterError(
            f"rates must not increase with the rank, got {checks.shown(law.rates.tolist())}: the draft's likeliest tokens must be"
            " the target's likeliest choices; give rates in the order of the draft"
        )
    reach = float(law.rates[0]) ** np.arange(draft_length + 1)
    counts = [1] * (draft_length + 1)

    def gain(accepted: int) -> float:
        """Probability of the outcome that one more branch would prepare."""
        rank = counts[accepted] + (accepted < draft_length)  # index of its rate
        return float(reach[accepted] * law.rates[rank]) if rank < law.rates.size else 0.0

    waiting: list[tuple[float, int]] = []
    for accepted in range(draft_length + 1):
        heappush(waiting, (-gain(accepted), accepted))
    for _ in range(budget - draft_length - 1):
        _, accepted = heappop(waiting)
        counts[accepted] += 1
        heappush(waiting, (-gain(accepted), accepted) if counts[accepted] < MAX_RANK - 1 else (1.0, accepted))
    return tuple(counts)

