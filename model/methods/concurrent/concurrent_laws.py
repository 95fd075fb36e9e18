"""Laws of acceptances under which methods that draft and verify concurrently have a closed form: those of single positions."""

from __future__ import annotations

from typing import Any

import numpy as np

from model.base import checks
from model.outcomes.outcome_laws import ByPosition, Chain, Floats, RecordedProbabilities, Replay


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


def positions_of(rates: Floats, most: int) -> int:
    """Positions of a draft to look at, so that later ones have a probability below `NEGLIGIBLE`, and at most `most`.

    >>> positions_of(np.array([0.5, 0.0]), 1000), positions_of(np.array([1.0]), 1000)
    (30, 1000)
    """
    largest = float(np.max(rates, initial=0.0))
    if largest >= 1:
        return most
    return min(most, max(2, int(np.ceil(np.log(NEGLIGIBLE) / np.log(largest)))) if largest > 0 else 2)


NEGLIGIBLE = 1e-9
"""Probability of later positions that is left to a line through the last ones."""
