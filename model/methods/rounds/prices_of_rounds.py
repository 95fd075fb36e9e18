"""Prices of rounds by their number of drafted tokens, and times of the passes that they make."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.costs.many_costs import as_slice
from model.costs.step_costs import PassShape, StepCosts
from model.outcomes.outcome_laws import Bools, Floats


class RoundPrices(NamedTuple):
    """Time, unit-time and arithmetic of a round, by its number of drafted tokens 0, 1, 2, ...

    `time` and `busy` have shape (longest + 1,). If times depend on the position, the shape is (2, positions, longest + 1): index 1
    of the first axis is for a round that follows a completely accepted draft, the second axis is the start position. After a
    completely accepted draft the first draft pass reads two tokens, because the draft model has not read its last token yet. Where
    the start position determines the drafted tokens, the shape is (2, positions), or (2, cells) of several lengths (`RoundCells`).
    Of several costs (`model.costs.many_costs`) all arrays have a leading axis of costs; `of` has the prices of one.
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

    def by_start(self, drafted: NDArray[np.int64]) -> RoundPrices:
        """Prices by start position only, of rounds that draft `drafted` tokens from each position, an array of shape (positions,).

        >>> prices = RoundPrices(np.array([1.0, 5.0]), np.array([1.0, 4.0]), np.array([1.0, 2.0]))
        >>> prices.by_start(np.array([1, 1, 0])).time.tolist()
        [[5.0, 5.0, 1.0], [5.0, 5.0, 1.0]]
        """
        if self.time.ndim == self.operations.ndim + 1:
            return self
        where: Any = (..., np.stack([drafted] * 2)) if self.uniform else (..., np.arange(drafted.size), drafted)
        time = self.time[where]
        return RoundPrices(time, time if self.busy is self.time else self.busy[where], self.operations)

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

    Shape (cells, longest + 1), by round (`RoundCells`) and accepted tokens; 0 without accepted tokens, and where a round drafts
    none. Of several costs with a leading axis of costs.
    """

    time: Floats
    busy: Floats

    def of(self, cost: int) -> ReadingTimes:
        """The times at one of several costs."""
        return ReadingTimes(self.time[cost], self.busy[cost])


class RoundCells(NamedTuple):
    """Rounds that are priced, of decodings of several lengths: first those that lengths have in common, then the last of each.

    Parameters
    ----------
    lengths
        Numbers of tokens, distinct and rising.
    start, drafted
        Start position and drafted tokens of each round; shape (cells,).
    whole
        Number of first cells: rounds that start at position 0, 1, ...
    last
        Number of last positions of each length whose rounds have cells of their own, shape (last, lengths), in rising order of
        positions; a position before the first one counts as 0. Rounds at the positions before are of the first cells.
    """

    lengths: NDArray[np.int64]
    start: NDArray[np.int64]
    drafted: NDArray[np.int64]
    whole: int
    last: int

    @classmethod
    def of(cls, longest: int, lengths: ArrayLike, cut: bool = True) -> RoundCells:
        """Rounds that draft `longest` tokens; with `cut` at most one token less than remain.

        >>> cells = RoundCells.of(2, [2, 4])
        >>> cells.start.tolist(), cells.drafted.tolist(), cells.whole
        ([0, 1, 0, 2, 1, 3], [2, 2, 1, 1, 0, 0], 2)
        """
        each = np.atleast_1d(np.asarray(lengths, dtype=np.int64))
        tokens = int(each[-1])
        if each.size == 1 or not (cut and longest):
            drafted = np.minimum(longest, np.arange(tokens)[::-1]) if cut else np.full(tokens, longest)
            return cls(each, np.arange(tokens), drafted, tokens, 0)
        last = min(longest, tokens)
        whole, left = tokens - last, np.arange(last)[::-1]
        start = np.concatenate([np.arange(whole), np.maximum(each - 1 - left[:, None], 0).ravel()])
        return cls(each, start, np.concatenate([np.full(whole, longest), np.repeat(left, each.size)]), whole, last)

    @property
    def until(self) -> NDArray[np.int64]:
        """Number of the first cells that each length has."""
        return np.maximum(self.lengths - self.last, 0)

    @property
    def last_starts(self) -> NDArray[np.int64]:
        """Start positions of the last rounds, shape (last, lengths); below 0 there is none."""
        return np.asarray(self.lengths - np.arange(self.last, 0, -1)[:, None])

    def sums(self, mass: Floats, *values: NDArray[Any]) -> Floats:
        """Sums over the rounds of each length of probability x value; shape (values, laws, lengths).

        `mass` has the probability that a round starts at each position, shape (positions, laws); each of `values` a number of each
        cell. Without a threaded library, as `prediction.linear`.

        >>> RoundCells.of(1, [1, 3]).sums(np.array([[1.0], [0.5], [0.75]]), np.array([8.0, 8.0, 2.0, 1.0])).tolist()
        [[[2.0, 12.75]]]
        """
        if not self.last and self.lengths.size == 1:
            return np.asarray(np.einsum("tl,tk->kl", mass, np.stack(values, axis=1)))[..., None]
        found = np.zeros((len(values), self.lengths.size, mass.shape[1]))
        for own, each in zip(found, values, strict=True):
            first = np.cumsum(mass[: self.whole] * each[: self.whole, None], axis=0)
            own[self.until > 0] = first[self.until[self.until > 0] - 1]
            for start, last in zip(self.last_starts, self.of_last(each), strict=True):
                own += np.where(start >= 0, last, 0.0)[:, None] * mass[np.maximum(start, 0)]
        return found.swapaxes(1, 2)

    def of_last(self, values: NDArray[Any]) -> NDArray[Any]:
        """Values of the last rounds from those of all cells, their last axis; shape (..., last, lengths)."""
        return values[..., self.whole :].reshape(*values.shape[:-1], self.last, self.lengths.size)


def drafted_by_start(longest: int, tokens: int, cut: bool = True) -> NDArray[np.int64]:
    """Drafted tokens of a round from each position on; with `cut` at most one token less than remain.

    >>> drafted_by_start(2, 4).tolist(), drafted_by_start(2, 4, cut=False).tolist()
    ([2, 2, 1, 0], [2, 2, 2, 2])
    """
    return RoundCells.of(longest, tokens, cut).drafted


def prices_by_start(
    cost: StepCosts, longest: int, *, tokens: ArrayLike = 1, cut: bool = True, separate: bool = False, sequences: int = 1
) -> RoundPrices:
    """`round_prices` by cell (`RoundCells`) only, if times depend on the position; of one number of tokens a cell is a position.

    >>> from model.costs.layer_times import UnitCost
    >>> prices_by_start(UnitCost(40, cost_ratio=0.1), 2, tokens=9).time.tolist()
    [40.0, 44.0, 48.0]
    """
    if cost.uniform:
        return round_prices(cost, longest, separate=separate, sequences=sequences)
    cells = RoundCells.of(longest, tokens, cut)
    start, drafted = cells.start, cells.drafted
    verify = times_of_cells(lambda width, at: cost.verify_times(width, at, sequences), drafted + 1, start)[..., None, :]
    if longest:
        single = cost.draft_times(np.arange(cells.lengths[-1] + longest), sequences=sequences)
        drafts = np.repeat(sums_between(single, start, drafted)[..., None, :], 2, axis=-2)
        # After a completely accepted draft the first pass also reads the token before.
        again = np.flatnonzero((drafted > 0) & (start > 0))
        at = start[again] - 1
        wide = cost.draft_times(at, width=2, sequences=sequences)
        drafts[..., 1, as_slice(again)] += wide - single[..., as_slice(at + 1)]
    else:
        drafts = np.zeros((*verify.shape[:-2], 2, drafted.size))
    busy = time = drafts + verify
    if np.any(cost.draft_devices != 1):
        busy = drafts * _for_each(cost.draft_devices, 2) + verify
    if separate:
        time = time + np.where(drafted > 0, 2 * _for_each(cost.link, 2), 0.0)
    return RoundPrices(time, busy, _operations(cost, longest, sequences))


def times_of_cells(
    times_of: Callable[[int, NDArray[np.int64]], Floats], width: NDArray[np.int64], start: NDArray[np.int64]
) -> Floats:
    """Times of passes with these tokens per sequence, which never rise, from these positions on; shape (..., passes).

    `times_of` gives the times of passes of one width at some positions.

    >>> times_of_cells(lambda width, at: 10.0 * width + at, np.array([3, 3, 1]), np.arange(3)).tolist()
    [30.0, 31.0, 12.0]
    """
    bounds = [0, *(np.flatnonzero(np.diff(width)) + 1).tolist(), width.size]
    parts = [slice(*each) for each in itertools.pairwise(bounds)]
    times = [times_of(int(width[part.start]), start[part]) for part in parts]
    found = np.empty((*times[0].shape[:-1], width.size))
    for part, own in zip(parts, times, strict=True):
        found[..., part] = own
    return found


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
    drafted, axes = np.arange(longest + 1), 1 if cost.uniform else 3
    drafts = draft_times(cost, longest, tokens, sequences=sequences)
    verify = verify_times(cost, longest + 1, tokens, sequences=sequences)
    if cost.uniform:
        drafts, verify = drafts[..., 0, :], verify[..., 0, :]
    else:
        drafts = np.stack([drafts, drafts], axis=-3)
        drafts[..., 1, :, 1:] += reread_times(cost, tokens, sequences=sequences)[..., None]
        verify = verify[..., None, :, :]
    busy = time = drafts + verify
    if np.any(cost.draft_devices != 1):
        busy = drafts * _for_each(cost.draft_devices, axes) + verify
    if separate:
        time = time + np.where(drafted > 0, 2 * _for_each(cost.link, axes), 0.0)
    return RoundPrices(time, busy, _operations(cost, longest, sequences))


def _operations(cost: StepCosts, longest: int, sequences: int = 1) -> Floats:
    """Arithmetic of rounds with 0, 1, ..., `longest` drafted tokens, in units of one token in a pass of the target."""
    drafted = np.arange(longest + 1.0)
    ratio = np.asarray(cost.operations("draft"))[..., None]
    return np.asarray(sequences * (1.0 + drafted + np.where(drafted > 0, drafted * ratio, 0.0)))


def _for_each(number: Any, axes: int) -> Floats:
    """A number of a cost, or of each of several, with this number of further axes."""
    return np.asarray(number)[(..., *(None,) * axes)]


def head_prices(
    cost: StepCosts, longest: int, *, tokens: ArrayLike = 1, cut: bool = True, parallel: bool = False
) -> tuple[RoundPrices, ReadingTimes | None]:
    """Prices of rounds whose draft reads the target's states, on the target's unit, and what is added for accepted tokens.

    The first draft pass of a round reads the tokens that the round before accepted and the target's own: with a accepted tokens it
    covers a + 1 tokens, and if it drafts K tokens in parallel a + K. `ReadingTimes` is its time above that of a pass without
    accepted tokens; None if the width of a draft pass does not matter.

    >>> from model.costs.layer_times import UnitCost
    >>> [head_prices(UnitCost(40, cost_ratio=0.1), 2, parallel=parallel)[0].time.tolist() for parallel in (False, True)]
    [[40.0, 44.0, 48.0], [40.0, 44.0, 44.0]]
    """
    if cost.uniform:
        prices = round_prices(cost, longest)
        if not parallel:
            return prices, None
        drafts = np.minimum(np.arange(longest + 1), 1) * cost.draft_times()[..., None]
        verify = verify_times(cost, longest + 1, 1)[..., 0, :]
        return prices._replace(time=drafts + verify, busy=drafts * _for_each(cost.draft_devices, 1) + verify), None
    cells = RoundCells.of(longest, tokens, cut)
    start, drafted = cells.start, cells.drafted
    verify = times_of_cells(cost.verify_times, drafted + 1, start)
    width = drafted if parallel else np.minimum(drafted, 1)

    def passes(count: int, at: NDArray[np.int64]) -> Floats:
        return cost.draft_times(at, width=count, heads=count) if count else np.zeros_like(verify[..., at])

    alone = drafts = times_of_cells(passes, width, start)
    if not parallel:
        drafts = sums_between(cost.draft_times(np.arange(cells.lengths[-1] + longest)), start, drafted)
    more = np.zeros((*drafts.shape, longest + 1))
    for count in np.unique(width[width > 0]).tolist():
        here = np.flatnonzero(width == count)
        for accepted in range(1, longest + 1):
            after = here[start[here] > accepted]  # the round before began at position 0 or later
            wide = cost.draft_times(start[after] - accepted, width=accepted + count, heads=count)
            more[..., after, accepted] = wide - alone[..., after]
    share = _for_each(cost.draft_devices, 2)
    both = np.stack([drafts] * 2, axis=-2)
    verify = verify[..., None, :]
    prices = RoundPrices(both + verify, both * share + verify, _operations(cost, longest))
    return prices, ReadingTimes(more, more * share)


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
    start, count, until = np.arange(tokens), np.arange(longest + 1), sums_before(times)
    return np.asarray(until[..., start[:, None] + count] - until[..., start][..., None])


def sums_between(times: Floats, start: NDArray[np.int64], count: NDArray[np.int64]) -> Floats:
    """Sums of `count` times from each of several positions on; shape (..., positions).

    >>> sums_between(np.array([1.0, 2.0, 4.0]), np.array([0, 1]), np.array([3, 1])).tolist()
    [7.0, 2.0]
    """
    until = sums_before(times)
    return np.asarray(until.take(start + count, axis=-1) - until[..., as_slice(start)])


def sums_before(times: Floats) -> Floats:
    """Sums of the first 0, 1, 2, ... times along the last axis."""
    return np.concatenate([np.zeros((*times.shape[:-1], 1)), np.cumsum(times, axis=-1)], axis=-1)


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
