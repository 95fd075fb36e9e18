"""Where the first, second, ... round of a sequence starts: cumulative probabilities, for several laws at once.

Rounds come in stretches of a few successive ones, so that little is in memory at a time. The axis of laws is the first one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import ArrayLike

from model.methods.rounds.round_laws import Rounds
from model.methods.rounds.round_starts import RoundSteps, survival_of
from model.outcomes.outcome_laws import Chain, Floats

RoundsLaw = Chain | Rounds

NEVER = 1e-20
"""Probability of a round that changes no sum over rounds, whose first one is certain, beyond rounding."""
_CERTAIN = 1 - 1e-15
"""Probability that is 1 within rounding."""
ROUNDS = 8
"""Rounds of a stretch: of more of them, more positions are those where only some start."""


class RoundStretch(NamedTuple):
    """Probabilities that a sequence has some successive rounds and that each starts at most at a position.

    Parameters
    ----------
    low
        First position at which one of them starts.
    until
        By round and position from `low` on, shape (laws, kinds, rounds, positions); after the last position the same as there. With
        two kinds, index 0 of their axis is without rounds that follow a completely accepted draft of at least one token.
    """

    low: int
    until: Floats

    @property
    def stop(self) -> int:
        """Position from which on probabilities stay the same."""
        return self.low + int(self.until.shape[-1])

    def at(self, positions: ArrayLike) -> Floats:
        """`until` at these positions; shape (laws, kinds, rounds, positions).

        >>> from model.outcomes.outcome_laws import Iid
        >>> [*stretches([Iid(0.5)], 1, 4)][1].at([0, 1, 2, 3])[0, 0].tolist()
        [[0.0, 0.5, 1.0, 1.0], [0.0, 0.0, 0.25, 0.75], [0.0, 0.0, 0.0, 0.125]]
        """
        where = np.asarray(positions) - self.low
        found = self.until.take(where, axis=-1, mode="clip")
        if (where < 0).any():
            found[..., where < 0] = 0.0
        return found


def stretches(laws: Sequence[RoundsLaw], draft_length: int, tokens: int, *, kinds: int = 1) -> Iterator[RoundStretch]:
    """Rounds of a sequence of `tokens` tokens; up to any earlier position also those of a shorter sequence.

    Rounds that are less likely than `NEVER` under all laws may be left out.

    >>> from model.outcomes.outcome_laws import Iid
    >>> [(each.low, each.until[0].tolist()) for each in stretches([Iid(0.5)], 1, 3, kinds=2)]
    [(0, [[[1.0]], [[1.0]]]), (1, [[[0.5, 0.5], [0.0, 0.25]], [[0.5, 1.0], [0.0, 0.25]]])]
    """
    survival = survival_of(laws, draft_length)
    if survival is None:
        return _of_dependent(laws, draft_length, tokens, kinds)
    edge = np.ones((len(laws), 1))
    return _of_independent(-np.diff(np.concatenate([edge, survival, 0 * edge], axis=1), axis=1), tokens, kinds)


def _of_independent(ends: Floats, tokens: int, kinds: int) -> Iterator[RoundStretch]:
    """`stretches` of rounds that accept 0, 1, ... tokens with probabilities `ends`, an array of shape (laws, draft_length + 1).

    The last drafts are cut, which does not matter before the end: what they accept ends the sequence. A round starts at most at a
    position if the one before accepts i tokens and starts at most i + 1 positions earlier.
    """
    laws, most = ends.shape
    backwards = np.ascontiguousarray(ends[:, ::-1, None])  # the round before that starts first is first
    without = -ends[:, -1:, None] * (most > 1)
    # Rounds of a stretch, after the one before it, by position, after `most` zeros: 0 before some position, and 1 from some on.
    rows = np.ones((ROUNDS + 1, laws, most + tokens))
    earlier, rows[..., :most] = sliding_window_view(rows, most, axis=2), 0.0
    yield RoundStretch(0, np.ones((laws, kinds, 1, 1)))
    low, stop = 0, 1
    for number in range(1, tokens, ROUNDS):
        count, stop = min(ROUNDS, tokens - number), min(stop + most * ROUNDS, tokens)
        for row in range(count):
            np.matmul(earlier[row, :, low:stop], backwards, out=rows[row + 1, :, most + low : most + stop, None])
        until = rows[1 : count + 1, :, most:].swapaxes(0, 1)
        start, following = (_first_possible(until[:, row, :stop], low) for row in (0, -1))
        if start == stop:
            return
        stop = min(low + int(np.count_nonzero(until[:, -1, low:stop].min(axis=0) < _CERTAIN)) + 1, stop)
        found = np.empty((laws, kinds, count, stop - start))
        found[:, -1] = until[..., start:stop]
        if kinds == 2:  # without those that follow a completely accepted draft
            np.multiply(rows[:count, :, start:stop].swapaxes(0, 1), without, out=found[:, 0])
            found[:, 0] += found[:, 1]
        yield RoundStretch(start, found)
        low, rows[0] = following, rows[count]
        rows[..., low : low + most] = 0.0


def _first_possible(until: Floats, low: int) -> int:
    """First position from `low` on up to which a round may start; `until` has shape (laws, positions)."""
    return low + int(np.count_nonzero(until[:, low:].max(axis=0) < NEVER))


def _of_dependent(laws: Sequence[RoundsLaw], draft_length: int, tokens: int, kinds: int) -> Iterator[RoundStretch]:
    """`stretches` where outcomes depend on each other or on the position."""
    steps = RoundSteps([(draft_length, tokens, law) for law in laws])
    chances = [each for each in (steps.ends, steps.goes_on) if each is not None]
    state, whole = np.zeros((tokens, 2, len(laws))), np.zeros((tokens, len(laws)))  # by position and the outcome before it
    state[0, 0] = 1.0
    for begin in range(0, tokens, ROUNDS):
        mass = np.zeros((kinds, min(ROUNDS, tokens - begin), tokens, len(laws)))
        for row in range(mass.shape[1]):
            mass[-1, row] = state.sum(axis=1)
            if kinds == 2:
                mass[0, row] = np.maximum(mass[1, row] - whole, 0.0)
            before, state, whole = state, np.zeros_like(state), np.zeros_like(whole)
            for accepted in range(min(draft_length + 1, tokens - 1)):
                for outcome, chance in enumerate(chances):
                    here = before[: -accepted - 1, : chance.shape[1]]
                    more = np.einsum("sbl,sbl->sl", here, chance[: -accepted - 1, :, accepted])
                    state[accepted + 1 :, outcome] += more
                    if draft_length and accepted == draft_length:
                        whole[accepted + 1 :] += more
        until = np.cumsum(mass.transpose(3, 0, 1, 2), axis=-1)
        start = _first_possible(until[:, -1, 0], 0)
        if start == tokens:
            return
        yield RoundStretch(start, np.ascontiguousarray(until[..., start:]))
