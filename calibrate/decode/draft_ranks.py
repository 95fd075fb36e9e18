"""Measured ranks of the target's tokens among a draft model's likeliest tokens, along a position log, and rates of hits by fan-out.

The draft model reads each logged sequence in one pass. Ranks are those that SSD prepares drafts by
(`model.outcomes.position_ranks`), and the rate of rank 1 is the acceptance rate of greedy drafts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from calibrate.decode.position_logging import ranks_of
from model.base import checks
from model.base.checks import ParameterError
from model.outcomes.intervals import half_width
from model.steps import LayerSpan

if TYPE_CHECKING:
    from calibrate.decoders.transformers_adapter import Decoder
    from model.logs.position_log import PositionLog


def of_log(log: PositionLog, draft: Decoder) -> list[list[int]]:
    """Ranks at each output position of each logged sequence, from 1; ties are ordered by token.

    For logs that were made without ranks; others have them (`PositionLog.draft_ranks`).
    """
    import torch

    tokens, found = log.table["token"].to_list(), []
    for number, (start, stop) in enumerate(zip(log.starts[:-1].tolist(), log.starts[1:].tolist(), strict=True)):
        prompt = tuple(log.header["prompts"][number]["tokens"])
        text = tuple(tokens[start:stop])
        if max(*prompt, *text) >= draft.vocabulary:
            raise ParameterError(f"draft must have the vocabulary of the log's target, got {draft.vocabulary} tokens")
        with torch.inference_mode():
            read = (*prompt, *text[:-1])
            states = draft.run(read, 0, LayerSpan(0, draft.layers), draft.rows())
            logits = draft.logits(states[-len(text) :], draft.layers).float()
            found.append(ranks_of(logits, torch.tensor(text, device=logits.device)).tolist())
    return found


@dataclass(frozen=True)
class HitRate:
    """Rate of hits with a fan-out, and half the width of its 95 % interval, between sequences."""

    fan_out: int
    rate: float
    half_width: float
    trials: int


def after_rejection(records: Sequence[Sequence[int]], fan_outs: Sequence[int]) -> list[HitRate]:
    """Rates at which a rejected token's replacement is among the F likeliest of the other tokens: ranks 2 to F + 1.

    >>> [each.rate for each in after_rejection([[1, 2, 3], [4, 1, 2]], [1, 2, 3])]
    [0.5, 0.75, 1.0]
    """
    return [_rate([[rank <= count + 1 for rank in record if rank != 1] for record in records], count) for count in fan_outs]


def after_acceptance(records: Sequence[Sequence[int]], fan_outs: Sequence[int]) -> list[HitRate]:
    """Rates at which the target's token is among the draft's F likeliest: ranks 1 to F, as after a draft that is accepted in full.

    >>> [each.rate for each in after_acceptance([[1, 2], [4, 1]], [1, 2])]
    [0.5, 0.75]
    """
    return [_rate([[rank <= count for rank in record] for record in records], count) for count in fan_outs]


def _rate(hits: Sequence[Sequence[bool]], fan_out: int) -> HitRate:
    """Ratio of hits to trials over all sequences; its interval is that of a ratio of means between sequences."""
    found, trials = (np.array([of(record) for record in hits], dtype=np.float64) for of in (sum, len))
    if not trials.sum():
        raise ParameterError("records must have at least one position to count, got none; log more tokens")
    rate = float(found.sum() / trials.sum())
    spread = float((found - rate * trials).std(ddof=1) / trials.mean()) if len(hits) > 1 else float("nan")
    return HitRate(fan_out, rate, float(half_width(spread, len(hits))), int(trials.sum()))


def exponent(records: Sequence[Sequence[int]], most: int) -> float:
    """Exponent r of the power law P(rank > F) = P(rank > 1) F^-r, by least squares of logarithms at F = 2, ..., `most`.

    >>> round(exponent([[1, 1, 2, 3, 5, 9, 9, 9]], 4), 3)  # 6, 5, 4, 4 of 8 ranks are above 1, 2, 3, 4
    0.314
    """
    checks.whole("most", most, 2)
    ranks = np.array([rank for record in records for rank in record])
    counts = np.arange(1, most + 1)
    above = np.array([(ranks > count).sum() for count in counts], dtype=np.float64)
    if not above.all():
        raise ParameterError(f"most must be below {int(ranks.max())}, the largest rank, got {most}")
    x, y = np.log(counts), np.log(above / above[0])
    return float(-(x @ y) / (x @ x))
