"""Big Little Decoder, path by path: where the small model is unsure says how long a segment is, what goes back where it ends."""

from __future__ import annotations

from collections.abc import Iterator

from model.algorithms.bild import Parameters
from model.bild_lengths import prices, segments
from model.coins import BLOCK
from model.decisions import Digits
from model.latency import UnitCost
from model.rounds import Tally

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: UnitCost, decisions: Iterator[Digits]) -> Tally:
    """Time, unit-time and segments of a block of replications, from the decisions at the first tokens - 1 positions."""
    return segments(parameters, tokens, decisions, prices(parameters, cost), BLOCK)
