"""Rounds of drafts that end where the draft model is unsure: their expected numbers, under many laws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from model.methods.adaptive.common_positions import CountedDecodings, DecodingsByLength
from model.methods.adaptive.draft_acceptance import REJECTED, RIGHT, WRONG, AcceptanceRates
from model.outcomes.outcome_laws import TwoClass

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]


def confidence_counts(
    rates: AcceptanceRates, doubts: Sequence[TwoClass], decodings: DecodingsByLength
) -> CountedDecodings:  # fmt: skip
    """Expected rounds of drafts that end where the draft model is unsure, with the doubts of each law.

    A draft ends after an accepted token with probability `low_if_accepted`. After a token that will be rejected it continues until
    the draft model is unsure, with probability `low_if_rejected` per token, or until it has the longest draft.

    >>> from model.outcomes.outcome_laws import Iid
    >>> rates, of = AcceptanceRates.of([Iid(1.0)], 9, 3), DecodingsByLength(np.array([0]), np.array([9]), 3)
    >>> float(confidence_counts(rates, [TwoClass(1, 0)], of).at(slice(1)).sum())  # one drafted token per round
    5.0
    """
    tokens, longest, positions = int(decodings.tokens[-1]), decodings.longest, decodings.last
    unsure = np.array([(doubt.low_if_accepted, doubt.low_if_rejected) for doubt in doubts]).T
    ahead = np.zeros((longest + 2, 3, len(doubts)))
    ahead[0, REJECTED] = 1.0
    common = _DraftsUntilUnsure(longest, tokens, decodings.common, rates, unsure, ahead)
    rests = [*decodings.rests(common)]
    if not rests:
        return CountedDecodings(decodings, counts := common.counts(), counts[:, :0, :, decodings.law])
    own = rates.last(decodings.law, decodings.begin, positions)
    last = _DraftsUntilUnsure(longest, positions, positions, own, unsure[:, decodings.law], np.concatenate(rests, axis=-1))
    for start in range(positions):
        last.step(start)
    return CountedDecodings(decodings, common.counts(), last.counts())


class _DraftsUntilUnsure:
    """Expected rounds of the first `positions` of `tokens` positions; see `Followed`.

    Parameters
    ----------
    unsure
        Probability that a draft ends after an accepted and after a rejected token, by law; shape (2, laws).
    ahead
        Rounds by the distance to their start, and the ending of the round before; shape (longest + 2, 3, laws).
    """

    def __init__(self, longest: int, tokens: int, positions: int, rates: AcceptanceRates, unsure: Floats, ahead: Floats) -> None:
        self.rates, self.unsure, self.ahead = rates, unsure, ahead
        self.longest = np.minimum(longest, tokens - 1 - np.arange(positions))  # by start
        self._ended = np.zeros((2, positions, longest + 1, unsure.shape[1]))  # completely accepted drafts
        self._rejections = np.zeros((2, positions, longest, unsure.shape[1]))  # first rejected tokens, by their place in the draft

    def step(self, start: int) -> None:
        """Count the rounds that start at a position, and move on to the next."""
        most, ahead, here = int(self.longest[start]), self.ahead, self.ahead[0]
        if not most:
            self._ended[:, start, 0] = _by_kind(here)
        else:
            places, of_accepted = np.arange(most), self.unsure[0]
            ends = np.where((places < most - 1)[:, None], of_accepted, 1.0)
            following = self.rates.after(start, places + 1)
            wrong, right = self.rates.at(start, most)
            accepted = np.stack([wrong, wrong, right])  # by ending of the round before
            reached = np.empty_like(accepted)
            reached[:, 0] = here
            reached[:, 1:] = here[:, None] * np.cumprod(accepted[:, :-1] * (1 - of_accepted), axis=1)
            kept = reached * accepted
            rejected, whole = reached - kept, kept * ends
            self._ended[:, start, 1 : most + 1] = _by_kind(whole)
            self._rejections[:, start, :most] = _by_kind(rejected)
            whole = whole.sum(axis=0)
            ahead[1 : 1 + most, REJECTED] += rejected.sum(axis=0)
            # After the target's bonus token, whose position has an outcome before the next round's first.
            ahead[2 : 2 + most, WRONG] += whole * (1 - following)
            ahead[2 : 2 + most, RIGHT] += whole * following
        ahead[:-1], ahead[-1] = ahead[1:].copy(), 0.0

    def rest(self, begin: int, columns: Indices) -> Floats:
        """What is needed to go on from the next position: `ahead`, from `begin` on."""
        return np.roll(self.ahead[..., columns], max(-begin, 0), axis=0)

    def counts(self) -> Floats:
        """Expected rounds by the kind of round before, start position, drafted tokens and law."""
        found = self._ended
        found[:, :, 1:] += _until_unsure(self._rejections, self.unsure[1], self.longest)
        return found


def _by_kind(of_endings: Floats) -> Floats:
    """Sums over endings of the round before (first axis) of one kind: a rejection, or a completely accepted draft."""
    return np.stack([of_endings[REJECTED], of_endings[WRONG] + of_endings[RIGHT]])


def _until_unsure(rejected: Floats, unsure: Floats, longest: Integers) -> Floats:
    """Probability that a draft with a rejected token ends after 1, 2, ... tokens, from that of its first rejected token there.

    Probabilities have the shape (..., drafts, tokens, laws); `longest` is the largest number of tokens of each draft, at which it
    ends.

    >>> _until_unsure(np.array([[[0.5], [0.0], [0.25]]]), np.array([0.5]), np.array([3])).tolist()
    [[[0.25], [0.125], [0.375]]]
    """
    found, going_on = np.empty_like(rejected), np.zeros_like(rejected[..., 0, :])
    for place in range(rejected.shape[-2]):
        going_on = going_on + rejected[..., place, :]
        found[..., place, :] = going_on * np.where((longest == place + 1)[:, None], 1.0, unsure)
        going_on = going_on - found[..., place, :]
    return found
