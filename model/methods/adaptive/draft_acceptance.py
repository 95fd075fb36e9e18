"""Acceptance of drafts of any length from any position on, under many laws at once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.rounds.round_laws import Rounds
from model.outcomes.outcome_laws import Chain

Floats = NDArray[np.float64]

REJECTED, WRONG, RIGHT = range(3)
"""Endings of the round before: a rejection; a completely accepted draft, with a wrong or a right outcome of the token after it."""
AFTER_FULL_DRAFT = np.array([0, 1, 1])
"""Index of the first axis of counts and prices, by ending of the round before."""


class AcceptanceRates(NamedTuple):
    """Acceptance probabilities of drafts of at most `longest` tokens, by law.

    Parameters
    ----------
    first
        Of the first token of a draft that starts at each position after a wrong outcome; shape (tokens, laws).
    each
        Of each token of a draft after a right outcome, and of the token after it: shape (positions, longest + 1, laws).
    """

    first: Floats
    each: Floats
    alike: bool
    """True if the outcome before a draft does not matter."""

    @classmethod
    def of(cls, laws: Sequence[Chain | Rounds], tokens: int, longest: int) -> AcceptanceRates:
        """Rates of these laws."""
        low, high = zip(*(law.draft_probabilities(tokens, longest) for law in laws), strict=True)
        first, each = np.stack([rates[:, 0] for rates in low], axis=-1), np.stack(high, axis=-1)
        return cls(first, each, np.array_equal(first, each[:, 0]))

    def at(self, start: int, drafted: int) -> tuple[Floats, Floats]:
        """Acceptance of each of the drafted tokens from a position on, after a wrong and a right outcome; shape (drafted, laws)."""
        places = np.arange(drafted)
        right = self.each[start + places, places]
        if self.alike:
            return right, right
        wrong = right.copy()
        wrong[:1] = self.first[start]
        return wrong, right

    def after(self, start: int, drafted: NDArray[np.int64]) -> Floats:
        """Acceptance of the token after each number of drafted tokens, shape (numbers, laws)."""
        return self.each[start + drafted, drafted]

    def at_laws(self, law: NDArray[np.intp]) -> AcceptanceRates:
        """Rates under these of the laws."""
        return AcceptanceRates(self.first[:, law], self.each[:, :, law], self.alike)

    def last(self, law: NDArray[np.intp], begin: NDArray[np.int64], positions: int) -> AcceptanceRates:
        """Rates at some positions of decodings, from position `begin` of each under its law on; shape (positions, ..., decodings).

        Those at a position below 0, where no round starts, are the first ones.
        """
        place = np.maximum(begin + np.arange(positions)[:, None], 0)
        return AcceptanceRates(self.first[place, law], np.moveaxis(self.each[place, :, law], -1, 1), self.alike)
