"""Big Little Decoder, vectorised over replications: fallbacks determine the length of segments, rollbacks their end."""

from __future__ import annotations

from collections.abc import Iterator

from model.costs.step_costs import StepCosts
from model.methods.bild.algorithm import Parameters
from model.methods.bild.finite_bild import segments
from model.methods.bild.segment_prices import prices
from model.methods.bild.threshold_decisions import Digits
from model.methods.rounds.round_walks import Tally
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, decisions: Iterator[Digits]) -> Tally:
    """Time, unit-time and segments of a block of replications, from the decisions at the first tokens - 1 positions."""
    return segments(parameters, tokens, decisions, prices(parameters, cost, tokens), BLOCK)
