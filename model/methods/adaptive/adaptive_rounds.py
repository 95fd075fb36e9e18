"""Rounds of adaptive draft lengths: expected numbers by start position and drafted tokens, under many laws and lengths at once.

Forward recursions over the position at which a round starts and the policy's state. A round starts after one of three endings of
the round before: a rejection (or the beginning), or a completely accepted draft, after which the target's own token has a wrong or
a right outcome (which matters if outcomes are dependent).

Counts of rounds have the shape (2, starts, drafted tokens, decodings): index 1 of the first axis is for rounds that follow a
completely accepted draft, as in `RoundPrices`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.adaptive.common_positions import CountedDecodings, DecodingsByLength, placed
from model.methods.adaptive.confidence_rounds import confidence_counts
from model.methods.adaptive.draft_acceptance import AcceptanceRates
from model.methods.adaptive.heuristic_rounds import heuristic_counts, heuristic_squares
from model.methods.prediction import pair_blocks
from model.methods.rounds.prices_of_rounds import RoundPrices
from model.methods.rounds.round_laws import Rounds
from model.outcomes.outcome_laws import Chain, TwoClass

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]

CELLS = 400_000
"""Numbers in the counts of decodings that are made together: 3 MB."""
DECODINGS = 1000
"""Decodings that are followed together."""
_KEPT = 8
"""Numbers of groups of decodings whose counts are kept."""


class PolicyLaws(NamedTuple):
    """Laws of acceptance, and of the draft model's confidence where drafts end by it; one of each for a law of outcomes."""

    accepted: Sequence[Chain | Rounds]
    doubts: Sequence[TwoClass]


class RoundsOfPoints(NamedTuple):
    """Expected rounds of some points.

    Parameters
    ----------
    points, decoding
        Index of each point, and of its decoding among these.
    drafted
        Rounds by drafted tokens, shape (drafted tokens, decodings).
    by_position
        Rounds by the kind of round before, start position and drafted tokens, if asked for; shape (2, positions, drafted tokens,
        decodings).
    """

    points: Indices
    decoding: Indices
    drafted: Floats
    by_position: Floats | None = None


class PolicyRounds:
    """Expected rounds of a policy, kept for the laws and numbers of tokens that were asked for last.

    Parameters
    ----------
    first
        Draft length of the first round, for the heuristic; None for drafts that end at a doubt.
    longest
        Longest draft.
    """

    def __init__(self, first: int | None, longest: int) -> None:
        self.first, self.longest = first, longest
        self._found: dict[Any, tuple[Any, CountedDecodings]] = {}

    def of_points(
        self, laws: PolicyLaws, lengths: Integers, law: Indices, length: Indices, *, by_position: bool
    ) -> Iterator[RoundsOfPoints]:
        """Expected rounds at points, each of one of the laws and one of several lengths, which rise; some points at a time."""
        size = max(CELLS // (2 * int(lengths[-1]) * (self.longest + 1)), 1)
        for block in pair_blocks(law, length, DECODINGS):
            order, place = placed(block.price)
            found, decoding = self._counted(laws, block.law[order], lengths[block.price[order]]), place[block.pair]
            if not by_position:
                yield RoundsOfPoints(block.points, decoding, found.summed())
                continue
            for start in range(0, order.size, size):
                mine, counts = np.flatnonzero((start <= decoding) & (decoding < start + size)), found.at(slice(start, start + size))
                yield RoundsOfPoints(block.points[mine], decoding[mine] - start, counts.sum(axis=(0, 1)), counts)

    def _counted(self, laws: PolicyLaws, law: Indices, tokens: Integers) -> CountedDecodings:
        """Counts of these decodings, by rising number of tokens."""
        used, which = np.unique(law, return_inverse=True)
        own = PolicyLaws(*([each[number] for number in used.tolist()] if each else [] for each in laws))
        key = *map(id, (*own.accepted, *own.doubts)), which.tobytes(), tokens.tobytes()
        if key not in self._found:
            of = DecodingsByLength(which, tokens, self.longest)
            rates = AcceptanceRates.of(own.accepted, int(tokens[-1]), self.longest)
            found = confidence_counts(rates, own.doubts, of) if self.first is None else heuristic_counts(self.first, rates, of)
            if len(self._found) >= _KEPT:
                self._found.clear()
            self._found[key] = own, found  # the laws are held, so that no other has the same identity
        return self._found[key][1]

    def squares(
        self, laws: PolicyLaws, prices: RoundPrices, law: Indices, price: Indices, lengths: Integers, length: Indices
    ) -> Floats:
        """Mean square of the time of each decoding, without drafts that end at a doubt; nan with these."""
        if self.first is None:
            return np.full(law.size, np.nan)
        rates = AcceptanceRates.of(laws.accepted, int(lengths[-1]), self.longest)
        return heuristic_squares(self.first, self.longest, rates, prices, law, price, lengths, length)
