"""Tree drafts, vectorised over replications: rounds follow from the ranks of the target's tokens, position by position."""

from __future__ import annotations

from collections.abc import Iterator

from model.costs.step_costs import StepCosts
from model.methods.rounds.round_walks import Tally
from model.methods.tree import tree_rounds
from model.methods.tree.algorithm import Parameters
from model.outcomes.random_streams import BLOCK
from model.outcomes.rank_laws import Ranks


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Ranks]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the ranks at all positions."""
    return tree_rounds.walk(parameters, tokens, outcomes, tree_rounds.prices(parameters, cost, tokens), BLOCK)
