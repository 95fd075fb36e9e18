"""Prices of rounds by what drafts: a draft model, draft heads, or a parallel draft."""

from __future__ import annotations

from numpy.typing import ArrayLike

from model.costs.step_costs import StepCosts
from model.methods.rounds.prices_of_rounds import ReadingTimes, RoundPrices, head_prices, prices_by_start
from model.methods.speculative.algorithm import Parameters


def prices_of(parameters: Parameters, tokens: ArrayLike, cost: StepCosts) -> tuple[RoundPrices, ReadingTimes | None]:
    """Prices of rounds of one sequence of `tokens` tokens, or of several numbers of them, and what is added for accepted tokens.

    See `prices_of_rounds.prices_by_start` and `head_prices`.
    """
    if parameters.reads_states:
        parallel = parameters.drafts_in_one_pass
        return head_prices(cost, parameters.draft_length, tokens=tokens, cut=parameters.cut, parallel=parallel)
    cost, separate = parameters.draft_costs(cost), parameters.placement == "separate"
    return prices_by_start(cost, parameters.draft_length, tokens=tokens, cut=parameters.cut, separate=separate), None
