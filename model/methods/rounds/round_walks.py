"""The walk over rounds of many replications at once: draft lengths that are fixed, or that change from round to round."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import StepCosts
from model.methods.rounds.prices_of_rounds import ReadingTimes, RoundPrices, drafted_by_start
from model.outcomes.outcome_laws import Bools, Floats, Outcomes

Bytes = NDArray[np.uint8]

class Tally(NamedTuple):
    """Times and counts of many decodings: arrays with one value per decoding, except `accepted`."""

    time: Floats
    busy: Floats
    operations: Floats
    rounds: Floats
    drafted: Floats
    accepted: NDArray[np.int64]
    """Number of rounds, over all decodings, that accepted 0, 1, 2, ... tokens."""


def fixed(
    draft_length: int, tokens: int, outcomes: Iterator[Outcomes], prices: RoundPrices, replications: int, *, cut: bool = True,
    reading: ReadingTimes | None = None,
) -> Tally:  # fmt: skip
    """Walk rounds of a fixed draft length; with `cut` the last drafts are shortened, else tokens after the end are dropped.

    `reading` is added to the prices; they must then depend on the position.

    >>> from model.methods.rounds.round_laws import ReplayRounds
    >>> law = ReplayRounds([[1, 0, 2, 1, 0]])  # the draft from position 0 has one accepted token: 2 are emitted; then 2 accepted
    >>> draws = iter([np.zeros((4, 1))])
    >>> tally = fixed(2, 5, law.drafts(draws), RoundPrices(*np.array([[1.0, 1.1, 1.2]] * 3)), 1)
    >>> tally.rounds.tolist(), tally.drafted.tolist(), tally.accepted.tolist(), tally.time.round(12).tolist()
    ([2.0], [4.0], [0, 1, 1], [2.4])
    """
    own = prices.by_start(drafted_by_start(draft_length, tokens, cut))
    whole = max(tokens - draft_length, 0) if cut else tokens  # a round that starts before this position drafts all its tokens
    starts = np.zeros(replications)
    late = np.zeros((draft_length, replications), dtype=np.bool_)  # rounds that start after it, by the remaining tokens to draft
    reached = np.zeros(draft_length + 1, dtype=np.int64)  # output positions at position 0, 1, 2, ... of a draft
    tile = np.zeros((_ROWS, replications), dtype=np.uint8)  # position in the draft of each output position
    phase, going_on = np.zeros(replications, dtype=np.uint8), np.empty(replications, dtype=np.bool_)
    spent, last = np.zeros((2, replications)), np.zeros(replications, dtype=np.bool_)  # last: previous draft completely accepted
    before = np.zeros((1, replications), dtype=np.uint8)  # position in the draft of the output position before the tile

    def charge(starting: Bools, rows: Bytes, first: int) -> None:
        """Add the time of rounds that start at these rows, if it depends on the position."""
        nonlocal last, before
        start = first + np.arange(len(rows))
        whole = (rows == draft_length) & (draft_length > 0)
        after_whole = starting & np.concatenate([last[None], whole[:-1]])
        last = whole[-1]
        for total, price in zip(spent, (own.time, own.busy), strict=True):
            usual, more = price[:, start]
            total += usual @ starting.astype(np.float64) + (more - usual) @ after_whole.astype(np.float64)
        if reading is not None:
            accepted, before = np.concatenate([before, rows[:-1]]), rows[-1:].copy()
            for total, more in zip(spent, reading, strict=True):
                total += (np.take_along_axis(more[start], accepted.astype(np.intp), axis=1) * starting).sum(axis=0)

    def count(rows: Bytes, first: int) -> None:
        starting = rows == 0
        if not prices.uniform:
            charge(starting, rows, first)
        full = max(min(whole - first, len(rows)), 0)
        np.add(starts, np.add.reduce(starting[:full].view(np.uint8), axis=0, dtype=np.uint8), out=starts)
        for row in range(full, len(rows)):
            late[tokens - 1 - first - row] = starting[row]
        reached[0] += int(np.count_nonzero(starting))
        for place in range(1, draft_length + 1):
            reached[place] += int(np.count_nonzero(rows == place))

    filled = first = 0
    for position in range(tokens):
        tile[filled] = phase
        filled += 1
        if filled == _ROWS or position == tokens - 1:
            count(tile[:filled], first)
            first, filled = position + 1, 0
        if position == tokens - 1:
            break
        # A round continues if the drafted token is accepted, at most up to the end of the draft.
        np.less(phase, draft_length, out=going_on)
        going_on &= next(outcomes)(phase)
        phase += 1
        phase *= going_on.view(np.uint8)
    rounds, drafted = starts + late.sum(axis=0), starts * draft_length
    operations = starts * prices.operations[draft_length]
    time, busy = (starts * prices.time[draft_length], starts * prices.busy[draft_length]) if prices.uniform else spent
    for remaining, starting in enumerate(late):
        if prices.uniform:
            time += starting * prices.time[remaining]
            busy += starting * prices.busy[remaining]
        operations += starting * prices.operations[remaining]
        drafted += starting * remaining
    return Tally(time, busy, operations, rounds, drafted, reached - np.append(reached[1:], 0))


class Lengths(Protocol):
    """Draft lengths that change from round to round, separately for each decoding.

    See `model.methods.adaptive.draft_length_policies`.
    """

    length: NDArray[np.int64]
    """Draft length of the next round of each decoding."""

    def learn(self, which: NDArray[np.intp], accepted: NDArray[np.int64], drafted: NDArray[np.int64]) -> None:
        """Update the lengths after a round of each of the decodings `which`."""


def varying(
    lengths: Lengths,
    tokens: int,
    outcomes: Iterator[Outcomes],
    prices: RoundPrices,
    doubts: NDArray[np.uint8] | None = None,
    *,
    skipping: StepCosts | None = None,
) -> Tally:
    """Walk rounds of changing draft lengths, one decoding for each of `lengths.length`; `prices` must cover the longest draft.

    If rounds may draft nothing although tokens remain, the next pass of the draft model reads all tokens that it has skipped, at
    the costs `skipping`.

    With `doubts`, of shape (tokens - 1, replications) and as in `model.outcomes.outcome_laws.TwoClass`, a draft ends with the first
    token of which the draft model is unsure. Drafting does not know about rejections and continues after a token that will be
    rejected.
    """
    replications = len(lengths.length)
    unsure = None if doubts is None else _next_unsure(doubts)
    start, everyone = np.zeros(replications, dtype=np.int64), np.arange(replications)
    limit = np.minimum(lengths.length, tokens - 1)
    time, busy, operations, rounds, drafted_in_all = np.zeros((5, replications))
    # Tokens that the draft model has not read, besides the last: one after a completely accepted draft.
    unread = np.zeros(replications, dtype=np.int64)
    counts = np.zeros(len(prices.operations), dtype=np.int64)
    for position in range(tokens):
        place = position - start
        ends = place == limit  # the target's own token, after a completely accepted draft
        if position < tokens - 1:
            kept = next(outcomes)(place.astype(np.uint8))
            ends |= ~kept
        which = everyone[ends]
        accepted, drafted = place[which], limit[which]
        if doubts is not None and unsure is not None and position < tokens - 1:
            # No bound after a completely accepted draft: its tokens are right.
            drafted = np.minimum(drafted, unsure[position, which] + 1 - start[which])
            # An accepted token of which the draft model is unsure is the last of its draft.
            limit = np.where(~ends & (doubts[position] >= 2), place + 1, limit)
        took, held = prices.of_rounds(unread[which] > 0, start[which], drafted)
        if skipping is not None:
            more = _reading_skipped(skipping, np.where(drafted > 0, unread[which], 0), start[which])
            took, held = took + more, held + more * skipping.draft_devices
        time[which] += took
        busy[which] += held
        operations[which] += prices.operations[drafted]
        rounds[which] += 1
        drafted_in_all[which] += drafted
        counts += np.bincount(accepted, minlength=len(counts))
        lengths.learn(which, accepted, drafted)
        unread[which] = np.where(drafted > 0, accepted == drafted, unread[which] + 1)
        start[which] = position + 1
        limit[which] = np.minimum(lengths.length[which], tokens - 2 - position)
    return Tally(time, busy, operations, rounds, drafted_in_all, counts)


def _reading_skipped(cost: StepCosts, unread: NDArray[np.int64], start: NDArray[np.int64]) -> Floats:
    """Additional time of draft passes that read `unread` tokens besides the last, relative to reading one besides the last."""
    found = np.zeros(len(start))
    several = unread > 1
    if several.any():
        skipped, at = unread[several], start[several]
        found[several] = cost.draft_times(at - skipped, width=skipped + 1) - cost.draft_times(at - 1, width=2)
    return found


def _next_unsure(doubts: NDArray[np.uint8]) -> NDArray[np.int64]:
    """First position, from each position on, at which a draft would be unsure of a wrong token."""
    positions = np.arange(len(doubts))[:, None]
    found = np.where(doubts & 1, positions, len(doubts))
    return np.asarray(np.minimum.accumulate(found[::-1])[::-1])


def longest_skipped(cost: StepCosts, tokens: int) -> float:
    """Upper bound of the time that `varying` adds to a round because its first draft pass reads more than two tokens."""
    most = 0.0
    for unread in range(2, tokens):
        start = np.arange(unread, tokens)
        most = max(most, float(_reading_skipped(cost, np.full(len(start), unread), start).max()))
    return most


_ROWS = 32
"""Positions that are counted together; at most 255, because a byte counts them."""
