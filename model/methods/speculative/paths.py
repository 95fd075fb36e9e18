"""Speculative decoding, vectorised over replications: rounds follow from the outcomes, position by position.

In static batches the price of a round depends on the sequences that are left.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import cast

from model.costs.step_costs import StepCosts
from model.methods.rounds.round_walks import Tally, fixed
from model.methods.speculative.algorithm import Parameters
from model.methods.speculative.drafter_prices import prices_of
from model.methods.speculative.static_batches import decodings
from model.outcomes.outcome_laws import Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(
    parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Outcomes] | Iterable[Iterator[Outcomes]]
) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions.

    With several sequences, `outcomes` yields the outcomes of each.
    """
    if parameters.decoded_sequences > 1:
        return decodings(parameters, tokens, cast("Iterable[Iterator[Outcomes]]", outcomes), cost, BLOCK)
    outcomes = cast("Iterator[Outcomes]", outcomes)
    prices, reading = prices_of(parameters, tokens, cost)
    return fixed(parameters.draft_length, tokens, outcomes, prices, BLOCK, cut=parameters.cut, reading=reading)
