"""Laws of acceptances under which methods that draft and verify concurrently have a closed form: those of single positions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.prediction import DecodingPoints, distinct_pairs
from model.methods.rounds.round_moments import Moments
from model.outcomes.outcome_laws import ByPosition, Chain, Floats, RecordedProbabilities, Replay

Index = NDArray[np.intp]


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


def moments_of_points(
    points: DecodingPoints[Any], label: str, of_pairs: Callable[[Sequence[Chain], Index, Index, NDArray[np.bool_]], Moments]
) -> Moments:
    """Moments at points whose laws are mixtures of chains, from those of distinct pairs of a chain and a cost.

    `of_pairs` takes the chains, the index of each pair's chain and cost, and of which pairs the variance is asked. Arrays of shape
    (points,); variances that are not asked may be nan.
    """
    chains = [chains_of(law, label) for law in points.laws]
    law, price, pair = distinct_pairs(points.law, points.price)
    asked = np.ones(law.size, dtype=np.bool_)
    if points.means is not None:
        asked[:] = False
        asked[pair[~points.means]] = True
    sizes = np.array([len(each) for each in chains])
    begins, own = np.cumsum(sizes) - sizes, sizes[law]
    first = np.cumsum(own) - own
    part = np.arange(own.sum()) - np.repeat(first, own)
    every = [chain for each in chains for chain in each]
    found = of_pairs(every, np.repeat(begins[law], own) + part, np.repeat(price, own), np.repeat(asked, own))
    mean = Moments(*(np.add.reduceat(each, first) / own for each in found))
    square = np.add.reduceat(found.variance + found.time**2, first) / own - mean.time**2
    mixture = mean._replace(variance=np.where(own == 1, mean.variance, np.maximum(square, 0.0)))
    return Moments(*(each[pair] for each in mixture))


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
