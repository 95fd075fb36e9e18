"""Speculative beam search, vectorised over replications: as speculative decoding with a step per token and separate prices."""

from __future__ import annotations

from collections.abc import Iterator

from model.costs.step_costs import StepCosts
from model.methods.beam.algorithm import Parameters
from model.methods.beam.theory import beam_round_prices
from model.methods.rounds.round_walks import Tally, fixed
from model.outcomes.outcome_laws import Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The last step is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Outcomes]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 steps."""
    return fixed(parameters.draft_length, tokens, outcomes, beam_round_prices(parameters, cost, tokens), BLOCK)
