"""Time of decodings whose rounds are independent but are priced by their start position: means and mean squares.

The time of a decoding is the sum over start positions s of 1(a round starts at s) t(s), where t may depend on how many tokens the
round before accepted, since the first draft pass of a round may read them. So the mean is a sum of probability x time, and the mean
square that of probability x t(s) (t(s) + 2 E[time before s | a round starts at s]).
"""

from __future__ import annotations

import itertools
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.methods.prediction import linear
from model.outcomes import round_counts
from model.outcomes.outcome_laws import Floats

_TOGETHER = 500
"""Pairs of laws and prices that are computed together, so that their arrays stay in the cache of a processor."""


class RoundStarts(NamedTuple):
    """Where rounds start under several laws, and by what the round before accepted.

    Parameters
    ----------
    chance
        Probability that a round accepts 0, 1, ..., K tokens, shape (K + 1, laws); beyond the last token it ends the decoding.
    mass
        Probability that a round starts at each position, shape (tokens, laws).
    kinds
        Slices of accepted tokens after which rounds take the same time; the first round is of the first kind.
    by_kind
        Probability that a round starts after one of each kind, shape (kinds, tokens, laws).
    """

    chance: Floats
    mass: Floats
    kinds: tuple[slice, ...]
    by_kind: Floats

    @classmethod
    def of(cls, longest: int, tokens: int, survival: Floats, *, by_accepted: bool = False) -> RoundStarts:
        """Starts under laws by their `survival`, shape (laws, K); see `round_starts.survival_of`.

        The kinds are not all tokens accepted and all of at least one, or `by_accepted` each number of accepted tokens.

        >>> found = RoundStarts.of(1, 3, np.array([[0.5]]))
        >>> found.mass[:, 0].tolist(), found.by_kind[:, :, 0].tolist()
        ([1.0, 0.5, 0.75], [[1.0, 0.5, 0.25], [0.0, 0.0, 0.5]])
        """
        ends = round_counts.chain_ends(longest, tokens + longest, survival)  # of the first rounds: not cut
        chance, mass = ends[0].chance, round_counts.start_masses(round_counts.chain_ends(longest, tokens, survival))
        bounds = [*range(longest + 2)] if by_accepted else [0, *([longest] if longest else []), longest + 1]
        kinds = tuple(slice(*each) for each in itertools.pairwise(bounds))
        by_kind = np.zeros((len(kinds), *mass.shape))
        by_kind[0, 0] = 1.0
        for kind, accepted in ((kind, each) for kind, every in enumerate(kinds) for each in range(every.start, every.stop)):
            by_kind[kind, accepted + 1 :] += chance[accepted] * mass[: max(tokens - accepted - 1, 0)]
        return cls(chance, mass, kinds, by_kind)

    def times(self, prices: Floats, reading: Floats | None) -> Floats:
        """Times of rounds by kind and start position, of shape (costs, kinds, tokens), from those of `RoundPrices.by_start`.

        Those after a completely accepted draft are of the last kind. `reading`, of shape (costs, tokens, K + 1), is added.
        """
        if reading is None:
            return prices[:, : len(self.kinds)]
        times = np.repeat(prices[:, :1], len(self.kinds), axis=1)
        times[:, -1] = prices[:, min(len(self.kinds) - 1, 1)]
        return times + np.swapaxes(reading, 1, 2)

    def mean(self, times: Floats, law: NDArray[np.intp], price: NDArray[np.intp]) -> Floats:
        """Mean time of pairs of laws and prices; `times` has shape (costs, kinds, tokens)."""
        return linear(self.by_kind.reshape(-1, self.mass.shape[1]), times.reshape(len(times), -1), law, price)

    def square(self, times: Floats, law: NDArray[np.intp], price: NDArray[np.intp]) -> Floats:
        """Mean square of the time of pairs of laws and prices."""
        found = np.empty(law.size)
        for at in range(0, law.size, _TOGETHER):
            part = slice(at, at + _TOGETHER)
            found[part] = self._square(times, law[part], price[part])
        return found

    def _windows(self) -> list[slice]:
        """Start positions of rounds before a round, of the last K + 1 positions, by kind."""
        return [slice(len(self.chance) - each.stop, len(self.chance) - each.start) for each in self.kinds]

    def _square(self, times: Floats, law: NDArray[np.intp], price: NDArray[np.intp]) -> Floats:
        laws, prices = (each[:1] if (each == each[0]).all() else each for each in (law, price))
        longest, tokens = len(self.chance) - 1, len(self.mass)
        chance = np.ascontiguousarray(self.chance[::-1, laws])  # the earliest start of the round before is first
        time = np.ascontiguousarray(np.moveaxis(times[prices], 0, -1))  # (kinds, tokens, pairs)
        spent = self.by_kind[..., laws] * time
        of_round = spent.sum(axis=0)
        # Mean time until the end of the round from each position, and until the start by kind, with their probabilities.
        until = np.zeros((longest + 1 + tokens, of_round.shape[1]))
        before = np.zeros_like(spent)
        steps = [(before[kind], chance[own], own) for kind, own in enumerate(self._windows())]
        for start in range(tokens):
            rows, found = until[start : start + longest + 1], of_round[start]
            for times_before, chances, own in steps:
                here = times_before[start]
                np.einsum("ap,ap->p", chances, rows[own], out=here)
                found += here
            until[start + longest + 1] = found
        before *= 2
        before += spent
        return np.asarray(np.einsum("ktp,ktp->p", time, before))
