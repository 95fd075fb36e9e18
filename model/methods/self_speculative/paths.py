"""Self-speculative decoding, vectorised over replications: rounds follow from the outcomes, position by position."""

from __future__ import annotations

from collections.abc import Iterator

from model.costs.step_costs import StepCosts
from model.methods.rounds.round_walks import Tally, fixed
from model.methods.self_speculative.algorithm import Parameters
from model.methods.self_speculative.theory import round_prices
from model.outcomes.outcome_laws import Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Outcomes]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions."""
    prices = round_prices(parameters, cost, tokens=tokens)
    return fixed(parameters.draft_length, tokens, outcomes, prices, BLOCK, cut=parameters.cut)
