"""Adaptive draft lengths, vectorised over replications: the policy sets the draft length of each replication's next round."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from model.costs.step_costs import StepCosts
from model.methods.adaptive.algorithm import Parameters
from model.methods.adaptive.theory import prices_of
from model.methods.rounds.round_walks import Tally, varying
from model.outcomes.outcome_laws import Outcomes
from model.outcomes.random_streams import BLOCK

LAST_MATTERS = False
"""The last token is never a drafted one."""


def walk(parameters: Parameters, tokens: int, cost: StepCosts, outcomes: Iterator[Outcomes] | Mapping[str, Any]) -> Tally:
    """Time, unit-time and rounds of a block of replications, from the outcomes of the first tokens - 1 positions."""
    prices = prices_of(parameters, cost, tokens)
    if not isinstance(outcomes, Mapping):
        skipping = parameters.draft_costs(cost) if parameters.may_skip and not cost.uniform else None
        return varying(parameters.initial_policy(BLOCK), tokens, outcomes, prices, skipping=skipping)
    doubts = np.concatenate([np.zeros((0, BLOCK), dtype=np.uint8), *outcomes["confidence"]])
    return varying(parameters.initial_policy(BLOCK), tokens, outcomes["accept"], prices, doubts)
