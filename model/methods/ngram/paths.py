"""N-gram drafts, vectorised over replications: rounds follow from the outcomes of lookups, position by position."""

from __future__ import annotations

from collections.abc import Iterator

from model.costs.step_costs import StepCosts
from model.methods.ngram import lookup_rounds
from model.methods.ngram.algorithm import Parameters
from model.methods.ngram.theory import round_prices
from model.methods.rounds.round_walks import Tally
from model.outcomes.lookup_laws import Integers
from model.outcomes.random_streams import BLOCK


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Integers]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from packed outcomes of lookups at all positions."""
    prices = round_prices(parameters, cost, tokens=tokens)
    return lookup_rounds.walk(tokens, outcomes, prices, BLOCK, cut=parameters.cut)
