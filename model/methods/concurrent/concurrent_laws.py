"""Laws of acceptances under which methods that draft and verify concurrently have a closed form: those of single positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from model.base import checks
from model.outcomes.outcome_laws import ByPosition, Chain, RecordedProbabilities, Replay


def chains_of(law: Any, label: str) -> list[Chain]:
    """Return the chains whose mixture is the law; a record is a chain with probabilities 0 and 1. `label`: the method's name."""
    if isinstance(law, Replay):
        return [ByPosition(record) for record in law.records.astype(np.float64)]
    if isinstance(law, RecordedProbabilities):
        return list(law.chains)
    if isinstance(law, Chain):
        return [law]
    raise checks.ParameterError(
        f"this law of acceptances has no closed form for {label}, whose drafts continue after unverified tokens; choose one by"
        " output position, such as kind 'iid', 'markov', 'by-position' or 'replay'"
    )
