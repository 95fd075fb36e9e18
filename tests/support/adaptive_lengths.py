"""Adaptive draft lengths for tests: policies with default options, and outcomes from given acceptances."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.methods.adaptive.algorithm import OPTIONS, Parameters
from model.outcomes.outcome_laws import Outcomes

Bools = NDArray[np.bool_]
Whole = NDArray[np.int64]
POLICIES = tuple(OPTIONS)
ONLINE_POLICIES = ("gradient", "optimum")


def parameters_of(policy: str, **options: Any) -> Parameters:
    """Parameters of a policy, with a believed cost ratio of .2 if the policy needs one."""
    required: dict[str, Any] = {"believed_cost_ratio": 0.2} if policy in ONLINE_POLICIES else {}
    return Parameters(4, policy, **{"max_draft_length": 6, **required, **options})


def outcomes_of_rows(rows: Bools) -> Iterator[Outcomes]:
    """Outcomes by output position, independent of the position in the draft."""
    return iter([lambda _, row=row: row for row in rows])


def round_speed(rate: float, length: int) -> float:
    """Speed-up of Theorem 3.8 at c = .2."""
    return sum(rate**j for j in range(length + 1)) / (1 + 0.2 * length)
