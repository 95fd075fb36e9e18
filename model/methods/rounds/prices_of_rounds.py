"""Prices of rounds by their number of drafted tokens, and times of the passes that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import PassShape, StepCosts
from model.outcomes.outcome_laws import Bools, Floats


class RoundPrices(NamedTuple):
    """Time, unit-time and arithmetic of a round, by its number of drafted tokens 0, 1, 2, ...

    `time` and `busy` have shape (longest + 1,). If times depend on the position, the shape is (2, positions, longest + 1): index 1
    of the first axis is for a round that follows a completely accepted draft, the second axis is the start position. After a
    completely accepted draft the first draft pass reads two tokens, because the draft model has not read its last token yet. Of
    several costs (`model.costs.many_costs`) all arrays have a leading axis of costs; `of` has the prices of one.
    """

    time: Floats
    busy: Floats
    operations: Floats
    """Arithmetic, in units of one token in a pass of the target; shape (longest + 1,)."""

    def of(self, cost: int) -> RoundPrices:
        """Prices at one of several costs."""
        return RoundPrices(self.time[cost], self.busy[cost], self.operations[cost])

    @property
    def uniform(self) -> bool:
        """True if a round takes the same time at every position."""
        return self.time.ndim == self.operations.ndim

    def of_rounds(self, after_full_draft: Bools, start: NDArray[np.int64], drafted: NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Time and unit-time of rounds with these start positions and numbers of drafted tokens.

        `after_full_draft` marks the rounds that follow a completely accepted draft.
        """
        where: Any = drafted if self.uniform else (after_full_draft.astype(np.intp), start, drafted)
        return self.time[where], self.busy[where]

    def of_starts(self, start: int, drafted: NDArray[np.int64]) -> RoundPrices:
        """Prices of rounds that start at this position, by `drafted`.

        `time` and `busy` have shape (1 or 2, drafted); with 2, index 1 is for rounds that follow a completely accepted draft.
        """
        where: Any = (None, drafted) if self.uniform else (slice(None), start, drafted)
        return RoundPrices(self.time[where], self.busy[where], self.operations[drafted])


class ReadingTimes(NamedTuple):
    """Additional time and unit-time of a round whose first draft pass reads all that the round before accepted.

    Shape (positions, longest + 1), by start position and accepted tokens; 0 without accepted tokens, and where a round drafts none.
    Of several costs with a leading axis of costs.
    """

    time: Floats
    busy: Floats

    def of(self, cost: int) -> ReadingTimes:
        """The times at one of several costs."""
        return ReadingTimes(self.time[cost], self.busy[cost])


def round_prices(
    cost: StepCosts, longest: int, *, tokens: int = 1, separate: bool = False, sequences: int = 1
) -> RoundPrices:
    """Prices of rounds with 0, 1, ..., `longest` drafted tokens: one draft pass per token, and one pass of the target.

    Start positions are below `tokens`, if times depend on the position. If the models are on `separate` units, a round with drafts
    uses the link twice, to the draft model and back. With several `sequences` each pass has the same number of tokens of each.
    Arithmetic as in Theorem 3.11 of [Leviathan2023]: gamma + 1 tokens in the target, gamma in the draft model.

    >>> from model.costs.layer_times import UnitCost
    >>> prices = round_prices(UnitCost(40, cost_ratio=0.1, link=2.0, operations_ratio=0.5), 2, separate=True)
    >>> [each.tolist() for each in prices]
    [[40.0, 48.0, 52.0], [40.0, 44.0, 48.0], [1.0, 2.5, 4.0]]
    """
    drafted = np.arange(longest + 1.0)
    ratio = np.asarray(cost.operations("draft"))[..., None]
    operations = sequences * (1.0 + drafted + np.where(drafted > 0, drafted * ratio, 0.0))
    drafts = draft_times(cost, longest, tokens, sequences=sequences)
    verify = verify_times(cost, longest + 1, tokens, sequences=sequences)
    if cost.uniform:
        drafts, verify = drafts[..., 0, :], verify[..., 0, :]
    else:
        more = reread_times(cost, tokens, sequences=sequences)[..., None]
        drafts = np.stack([drafts, drafts + np.where(drafted > 0, more, 0.0)], axis=-3)
        verify = verify[..., None, :, :]
    link = np.where(drafted > 0, 2 * _for_each(cost.link, cost) * separate, 0.0)
    return RoundPrices(drafts + verify + link, drafts * _for_each(cost.draft_devices, cost) + verify, operations)


def _for_each(number: Any, cost: StepCosts) -> Floats:
    """A number of a cost, or of each of several, with as many further axes as prices have."""
    return np.asarray(number)[(..., *(None,) * (1 if cost.uniform else 3))]


def head_prices(
    cost: StepCosts, longest: int, *, tokens: int = 1, cut: bool = True, parallel: bool = False
) -> tuple[RoundPrices, ReadingTimes | None]:
    """Prices of rounds whose draft reads the target's states, on the target's unit, and what is added for accepted tokens.

    The first draft pass of a round reads the tokens that the round before accepted and the target's own: with a accepted tokens it
    covers a + 1 tokens, and if it drafts K tokens in parallel a + K. `ReadingTimes` is its time above that of a pass without
    accepted tokens; None if the width of a draft pass does not matter.

    >>> from model.costs.layer_times import UnitCost
    >>> [head_prices(UnitCost(40, cost_ratio=0.1), 2, parallel=parallel)[0].time.tolist() for parallel in (False, True)]
    [[40.0, 44.0, 48.0], [40.0, 44.0, 44.0]]
    """
    prices = round_prices(cost, longest, tokens=tokens)
    if cost.uniform and not parallel:
        return prices, None
    verify, share = verify_times(cost, longest + 1, tokens), _for_each(cost.draft_devices, cost)
    if cost.uniform:
        drafts = np.minimum(np.arange(longest + 1), 1) * cost.draft_times()[..., None]
        return prices._replace(time=drafts + verify[..., 0, :], busy=drafts * share + verify[..., 0, :]), None
    start = np.arange(tokens)
    drafts = draft_times(cost, longest, tokens)
    if parallel:
        own = [cost.draft_times(start, width=count, heads=count) for count in range(1, longest + 1)]
        drafts = np.stack([np.zeros_like(drafts[..., 0]), *own], axis=-1)
    drafted = np.minimum(longest, tokens - 1 - start) if cut else np.full(tokens, longest)
    more = np.zeros_like(drafts)
    for count in np.unique(drafted[drafted > 0]).tolist():
        here = np.flatnonzero(drafted == count)
        width = count if parallel else 1
        alone = cost.draft_times(here, width=width, heads=width)
        for accepted in range(1, longest + 1):
            after = here > accepted  # the round before began at position 0 or later
            wide = cost.draft_times(here[after] - accepted, width=accepted + width, heads=width)
            more[..., here[after], accepted] = wide - alone[..., after]
    both = np.stack([drafts] * 2, axis=-3)
    verify = verify[..., None, :, :]
    return RoundPrices(both + verify, both * share + verify, prices.operations), ReadingTimes(more, more * share[..., 0])


def draft_times(cost: StepCosts, longest: int, tokens: int, *, role: str = "draft", sequences: int = 1) -> Floats:
    """Time of 0, 1, ..., `longest` single-token draft passes from each position on; shape (..., tokens, longest + 1)."""
    if cost.uniform:
        each = np.arange(longest + 1) * cost.draft_times(role=role, sequences=sequences)[..., None, None]
        return np.broadcast_to(each, (*each.shape[:-2], tokens, longest + 1))
    at = np.arange(tokens + longest)
    return sums_from(cost.draft_times(at, role=role, sequences=sequences), longest, tokens)


def sums_from(times: Floats, longest: int, tokens: int) -> Floats:
    """Sums of 0, 1, ..., `longest` consecutive times from each position on; shape (..., tokens, longest + 1).

    >>> sums_from(np.array([1.0, 2.0, 4.0]), 2, 2).tolist()
    [[0.0, 1.0, 3.0], [0.0, 2.0, 6.0]]
    """
    start, count = np.arange(tokens), np.arange(longest + 1)
    until = np.concatenate([np.zeros((*times.shape[:-1], 1)), np.cumsum(times, axis=-1)], axis=-1)
    return np.asarray(until[..., start[:, None] + count] - until[..., start][..., None])


def times_by_width(
    cost: StepCosts, shape_of: Callable[[Any], PassShape], widths: NDArray[np.int64], tokens: int, *, before: int = 0
) -> Floats:
    """Times of passes by their tokens per sequence, starting `before` positions before each position.

    Shape (..., widths), or (..., tokens, widths) if times depend on the position; of several costs these are the first axis.

    >>> from model.costs.layer_times import UnitCost
    >>> from model.steps import LayerSpan
    >>> cost = UnitCost(4, verify_cost=((1, 1.0), (3, 2.0)))
    >>> times_by_width(cost, lambda width: PassShape(LayerSpan(0, 4), width=width), np.array([1, 3]), 9).tolist()
    [4.0, 8.0]
    """
    if cost.uniform:
        return cost.times(shape_of(widths))
    start = np.maximum(np.arange(tokens) - before, 0)
    return np.stack([cost.times(shape_of(int(width)), start) for width in widths], axis=-1)


def verify_times(cost: StepCosts, max_width: int, tokens: int, *, sequences: int = 1) -> Floats:
    """Time of a pass of the target over 1, 2, ..., `max_width` tokens from each position on; shape (..., tokens, max_width).

    With several `sequences` the tokens are per sequence.
    """
    start, widths = np.arange(tokens), np.arange(1, max_width + 1)
    if cost.uniform:
        each = cost.verify_times(widths, sequences=sequences)[..., None, :]
        return np.broadcast_to(each, (*each.shape[:-2], tokens, max_width))
    return np.stack([cost.verify_times(width, start, sequences) for width in widths.tolist()], axis=-1)


def reread_times(cost: StepCosts, tokens: int, *, role: str = "draft", sequences: int = 1) -> Floats:
    """Additional time of a draft pass at each position if it also reads the token before; shape (..., tokens), 0 at the first."""
    start = np.arange(1, tokens)
    narrow, wide = (
        cost.draft_times(at, role=role, width=width, sequences=sequences)
        for width, at in ((1, start), (2, start - 1))
    )
    return np.concatenate([np.zeros((*wide.shape[:-1], 1)), wide - narrow], axis=-1)


def slowest_of(tokens: int, prices: RoundPrices) -> tuple[float, float]:
    """Upper bounds of time and unit-time of a decoding whose rounds emit at least one token each."""
    return tokens * float(prices.time.max()), tokens * float(prices.busy.max())


def operations_of(rounds: Mapping[tuple[int, int], int], prices: RoundPrices) -> float:
    """Arithmetic of a run; `rounds` counts rounds by (accepted, drafted) tokens."""
    return float(sum(count * prices.operations[drafted] for (_, drafted), count in rounds.items()))
