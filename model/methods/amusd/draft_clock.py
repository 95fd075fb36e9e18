"""The timing of AMUSD: one round of many decodings at once, by the rules of the simulator.

A decoding is described by its generated tokens, the time when the target is free, and the times when the draft passes of its
unverified tokens begin and end. Which tokens have arrived is decided by comparing times, so they are added exactly as the simulator
adds them: views then agree also where two times are equal. Times that are equal but for rounding are ordered by rounding.

Ties, as in the simulator: a token that arrives when the target decides is not read; a draft pass that would begin when a message
arrives begins first.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods.amusd.algorithm import Parameters
from model.methods.rounds.prices_of_rounds import verify_times
from model.outcomes.outcome_laws import Floats

Counts = NDArray[np.int64]


@dataclass(frozen=True)
class ConcurrentTimes:
    """Times of the passes of decodings, at one cost or at several.

    Parameters
    ----------
    verify
        Pass of the target by generated tokens and waiting tokens that it reads; shape (costs, tokens, draft_length).
    draft
        Pass of the draft model by the output position of the token that it drafts; shape (costs, tokens).
    link
        Time of a transfer; shape (costs,).
    cost
        Index of each decoding's cost; None: all have the first.
    """

    verify: Floats
    draft: Floats
    link: Floats
    cost: NDArray[np.intp] | None = None

    @classmethod
    def of(
        cls, parameters: Parameters, tokens: int, cost: StepCosts, which: NDArray[np.intp] | None = None
    ) -> ConcurrentTimes:  # fmt: skip
        """Prices at a cost, or at several joined ones; `which` is that of each decoding. A draft pass reads the token before."""
        link = np.atleast_1d(np.asarray(cost.link, dtype=np.float64))
        draft = np.asarray(parameters.draft_costs(cost).draft_times(np.arange(tokens)), dtype=np.float64)
        verify = verify_times(cost, parameters.draft_length, tokens).reshape(link.size, tokens, parameters.draft_length)
        return cls(verify, np.array(np.broadcast_to(draft, (link.size, tokens))), link, which)

    @property
    def tokens(self) -> int:
        """Tokens of the decoding."""
        return int(self.draft.shape[1])

    def passes(self, which: NDArray[np.intp], start: Counts, waiting: Counts) -> Floats:
        """Times of passes of the target in these decodings."""
        return np.asarray(self.verify[self._of(which), start, waiting])

    def drafting(self, which: NDArray[np.intp], position: Counts) -> Floats:
        """Times of draft passes in these decodings, by position, shape (decodings, positions)."""
        of = self._of(which)
        return np.asarray(self.draft[of[:, None] if self.cost is not None else of, np.minimum(position, self.tokens - 1)])

    def sent(self, which: NDArray[np.intp], time: Floats) -> Floats:
        """Arrival of what these decodings send at their times, rounded as the simulator's clock; shape of the times."""
        if not self.link.any():
            return time
        link = self.link[self._of(which)]
        link = link[:, None] if np.ndim(link) and time.ndim > 1 else link
        return np.asarray(time + ((time + link) - time))

    def _of(self, which: NDArray[np.intp]) -> Any:
        """Index of each of these decodings' costs, or of that of all."""
        return 0 if self.cost is None else self.cost[which]


@dataclass(frozen=True)
class ConstantTimes:
    """Times of the passes of many decodings, each with its own that do not depend on the position; links take no time.

    Parameters
    ----------
    verify
        Pass of the target by waiting tokens that it reads; shape (decodings, draft_length).
    draft
        Pass of the draft model; shape (decodings,).
    tokens
        Tokens of each decoding.
    """

    verify: Floats
    draft: Floats
    tokens: int

    def passes(self, which: NDArray[np.intp], start: Counts, waiting: Counts) -> Floats:
        """Times of passes of the target in these decodings."""
        return np.asarray(self.verify[which, waiting])

    def drafting(self, which: NDArray[np.intp], position: Counts) -> Floats:
        """Times of draft passes in these decodings, shape (decodings, positions)."""
        return np.broadcast_to(self.draft[which][:, None], position.shape)

    def sent(self, which: NDArray[np.intp], time: Floats) -> Floats:
        """Arrival of what is sent at a time: at once."""
        return time


class Round(NamedTuple):
    """One round of each decoding, before it is known which tokens are right."""

    start: Counts
    """Generated tokens before the round."""
    waiting: Counts
    """Waiting tokens that the pass reads."""
    passed: Floats
    """End of the pass, and of the round if a waiting token is rejected."""
    decided: Floats
    """Time when the token after the waiting ones is decided on: when the pass has ended, and the token has arrived."""
    allowed: Counts
    """End of the output positions that may be drafted, until the next message."""


class DraftClock:
    """Timing of many decodings that are in the same or in different rounds.

    Parameters
    ----------
    parameters, prices
        Parameters, and times of passes.
    start
        Generated tokens of each decoding at time 0, where its first draft begins; shape (decodings,).
    """

    def __init__(self, parameters: Parameters, prices: ConcurrentTimes | ConstantTimes, start: Counts) -> None:
        self.parameters, self.prices, self.tokens = parameters, prices, prices.tokens
        count = len(start)
        self.start, self.goes_on = start.copy(), np.zeros(count, dtype=np.bool_)
        self.free, self.stale = np.zeros(count), np.zeros(count)
        """Time when the target is free, and time of draft passes that continue rejected tokens, so far."""
        self.stale_passes, self.shifted = np.zeros(count, dtype=np.int64), np.zeros(count)
        """Number of such passes, and the time that the last message waited for one of them."""
        self.allowed = np.zeros(count, dtype=np.int64)
        self._size = parameters.draft_length + 1  # positions whose passes matter: the last verified one, and the unverified
        self._begun, self._done = np.zeros((2, count, self._size))

    def next_round(self, which: NDArray[np.intp]) -> Round:
        """Advance these decodings to the decisions of their next round."""
        prices, parameters, most = self.prices, self.parameters, self.parameters.draft_length
        start, free = self.start[which], self.free[which]
        left = self.tokens - 1 - start
        until = start + np.minimum(most, left)
        arrives = prices.sent(which, free)
        new = ~self.goes_on[which]
        begin = np.where(new, arrives, 0.0)
        if new.any():
            begin[new] = self._after_rollback(which[new], arrives[new])
        old = ~new
        if old.any():  # drafting goes on when the message arrives, if it has paused
            before = self._done[which[old], (self.allowed[which[old]] - 1) % self._size]
            begin[old] = np.maximum(before, arrives[old])
        first = np.where(new, start, np.maximum(self.allowed[which], start))
        self._draft(which, first, until, begin)
        self.allowed[which] = until
        needed = np.minimum(parameters.min_waiting, left)
        index = np.arange(most)
        arrived = prices.sent(which, self._done[which[:, None], (start[:, None] + index) % self._size])
        ready = np.where(index < np.minimum(most, left)[:, None], arrived, np.inf)
        last_needed = ready[np.arange(len(which)), np.maximum(needed - 1, 0)]
        waits = (needed > 0) & (last_needed >= free)
        passing = np.where(waits, last_needed, free)
        waiting = np.minimum(np.where(waits, needed, (ready < free[:, None]).sum(axis=1)), most - 1)
        passed = passing + prices.passes(which, start, waiting)
        following = ready[np.arange(len(which)), waiting]
        decided = np.where(waiting < left, np.maximum(passed, following), passed)
        return Round(start, waiting, passed, decided, until)

    def _after_rollback(self, which: NDArray[np.intp], arrives: Floats) -> Floats:
        """Time when the new draft begins: the message has arrived, and the pass in progress has ended or is stopped."""
        passes, work, end = self.after(which, self.start[which], self.allowed[which], arrives)
        left = self.start[which] < self.tokens - 1
        self.stale_passes[which] += passes
        self.stale[which] += work
        self.shifted[which] = np.where(left, end - arrives, 0.0)
        return end

    def after(self, which: NDArray[np.intp], start: Counts, until: Counts, arrives: Floats) -> tuple[Counts, Floats, Floats]:
        """Passes over rejected tokens from position `start` on: number, work, and the time when the unit is free of them.

        `arrives` is the time of the rollback message.
        """
        index = np.arange(self._size - 1)
        where = which[:, None], (start[:, None] + index) % self._size
        inside = start[:, None] + index < until[:, None]
        begun = np.where(inside, self._begun[where], np.inf)
        on = begun <= arrives[:, None]
        done = np.where(on, self._done[where], 0.0)
        end = done.max(axis=1, initial=0.0)
        if self.parameters.stops_passes:
            done, end = np.where(on, np.minimum(done, arrives[:, None]), 0.0), arrives
        return on.sum(axis=1), (done - np.where(on, begun, 0.0)).sum(axis=1), np.maximum(end, arrives)

    def _draft(self, which: NDArray[np.intp], first: Counts, until: Counts, begin: Floats) -> None:
        """Draft the positions from `first` to `until`, one pass after the other."""
        longest = int(np.max(until - first, initial=0))
        if longest <= 0:
            return
        position = first[:, None] + np.arange(longest)
        inside = position < until[:, None]
        price = self.prices.drafting(which, position)
        times = np.add.accumulate(np.concatenate([begin[:, None], price], axis=1), axis=1)
        rows = np.broadcast_to(which[:, None], position.shape)[inside]
        columns = (position % self._size)[inside]
        self._begun[rows, columns] = times[:, :-1][inside]
        self._done[rows, columns] = times[:, 1:][inside]

    def decide(self, which: NDArray[np.intp], round_: Round, kept: Counts) -> None:
        """End the round of these decodings, of whose waiting tokens and the next one `kept` are accepted."""
        waiting = round_.waiting
        rejected = kept < waiting
        self.free[which] = np.where(rejected, round_.passed, round_.decided)
        self.goes_on[which] = kept > waiting
        self.start[which] += np.minimum(kept, waiting) + 1
