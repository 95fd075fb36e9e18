"""Draft-and-verify rounds: laws of accepted lengths, the walk of many replications at once, and its moments.

A round that starts at output position s drafts min(gamma, l - s) tokens, where l is the last position; in a batch that is kept full
it drafts gamma tokens, and those after l are dropped. Position t is tested as the (t - s)-th of its draft. The token at a rejected
position, or after the whole draft, comes from the target; the next round starts after it. The cost of a round depends on its number
of drafted tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.costs.step_costs import PassShape, StepCosts
from model.methods.prediction import PredictionPoints
from model.outcomes import round_counts
from model.outcomes.outcome_laws import Bools, Chain, Floats, Iid, Law, Outcomes, RecordedProbabilities, Replay
from model.outcomes.round_counts import RoundCounts, RoundTimes

Bytes = NDArray[np.uint8]


# --- Laws of rounds: number of accepted tokens of a draft, by the position where it starts ------------------------------


class Rounds:
    """Independent rounds: at least j drafted tokens are accepted with probability `survival[j - 1]`.

    Covers rates by position in the draft (survival is their cumulative product), one rate drawn for each round (survival is its
    moments), and a histogram of accepted lengths. One random draw per round, at its first position.

    >>> law = Rounds.by_draft_position([0.8, 0.5])
    >>> law.survival.tolist()
    [0.8, 0.4]
    """

    def __init__(self, survival: ArrayLike) -> None:
        self.survival = checks.array("survival", survival, 0, 1)
        if self.survival.ndim != 1 or np.any(np.diff(self.survival) > 0):
            given = checks.shown(self.survival.tolist())
            raise checks.ParameterError(f"survival must be a list of non-increasing probabilities, got {given}")

    @classmethod
    def by_draft_position(cls, acceptance_rates: ArrayLike) -> Rounds:
        """Law in which the j-th drafted token is accepted with probability `acceptance_rates[j - 1]` if those before it were."""
        return cls(np.cumprod(checks.array("acceptance_rates", acceptance_rates, 0, 1)))

    @classmethod
    def shared_rate(cls, acceptance_rate: float, concentration: float, longest: int) -> Rounds:
        """Law in which the rate of each round is drawn from a Beta distribution of this mean with a + b = `concentration`.

        E[B^j] is the product of (a + i)/(a + b + i) over i below j.

        >>> Rounds.shared_rate(0.8, 10, 2).survival.round(4).tolist()  # Beta(8, 2)
        [0.8, 0.6545]
        """
        checks.number("acceptance_rate", acceptance_rate, 0, 1)
        checks.number("concentration", concentration, 0)
        i = np.arange(longest)
        if concentration == 0:  # all or nothing
            return cls.by_draft_position(np.where(i == 0, acceptance_rate, 1.0))
        return cls.by_draft_position((acceptance_rate * concentration + i) / (concentration + i))

    def survivors(self, draws: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """Accepted tokens, at most `longest`, of a draft that starts at each position; shape (positions, replications)."""
        return np.concatenate([self._lengths(tile, longest) for tile in draws])

    def drafts(self, draws: Iterator[Floats]) -> Iterator[Outcomes]:
        """Acceptance of drafted tokens, position by position."""
        return _by_rounds(row for tile in draws for row in self._lengths(tile, len(self.survival)))

    def draft_probabilities(self, positions: int, longest: int) -> tuple[Floats, Floats]:
        """Acceptance probabilities by output position and position in the draft, after a rejection and after an acceptance.

        Both arrays are equal; shape (positions, longest + 1).
        """
        known = np.concatenate([[1.0], self.first(longest)])
        rates = np.zeros(longest + 1)  # the position after the draft is never tested
        np.divide(known[1:], known[:-1], out=rates[:longest], where=known[:-1] > 0)
        chances = np.broadcast_to(rates, (positions, longest + 1))
        return chances, chances

    def first(self, longest: int) -> Floats:
        """Survival of the first `longest` drafted tokens; raises ParameterError if it is not known for all of them."""
        self._cover(longest)
        return self.survival[:longest]

    def _lengths(self, tile: Floats, longest: int) -> NDArray[np.int64]:
        # Number of survival probabilities above the draw.
        return np.asarray(np.searchsorted(-self.survival[:longest], -tile, side="left"))

    def _cover(self, longest: int) -> None:
        if longest > len(self.survival):
            raise checks.ParameterError(
                f"acceptance must be known for each of draft_length={longest} positions in a draft, got {len(self.survival)}"
            )


class MixedRounds:
    """Sequences of several levels of difficulty: a sequence has level i with probability `weights[i]`, in all its rounds.

    Within a sequence rounds are independent (`levels`). Over all sequences the conditional rates never fall with the position in
    the draft, if those of each level do not: survivors are easier sequences. Rounds of one sequence are not independent.

    Parameters
    ----------
    levels
        Law of the rounds of each level.
    weights
        Share of sequences of each level; divided by their sum.

    >>> law = MixedRounds([Rounds.by_draft_position([0.9] * 3), Rounds.by_draft_position([0.5] * 3)], [1, 1])
    >>> law.conditional_rates().round(3).tolist()
    [0.7, 0.757, 0.806]
    >>> law.survivors(iter([np.array([[0.2, 0.7], [0.2, 0.2]])]), longest=3).tolist()  # the first: easy, with a draw of 0.4
    [[3, 1], [3, 2]]
    """

    def __init__(self, levels: Sequence[Rounds], weights: ArrayLike) -> None:
        self.levels = tuple(levels)
        given = checks.array("weights", weights, 0)
        if given.shape != (len(self.levels),) or not self.levels or not given.sum() > 0:
            raise checks.ParameterError(
                f"weights must have one share for each of {len(self.levels)} levels, not all 0, got {checks.shown(given.tolist())}"
            )
        if len({each.survival.size for each in self.levels}) > 1:
            sizes = [each.survival.size for each in self.levels]
            raise checks.ParameterError(f"levels must have rates for the same positions in a draft, got {sizes}")
        self.weights: tuple[float, ...] = tuple((given / given.sum()).tolist())

    @property
    def survival(self) -> Floats:
        """Probability, over all sequences, that at least 1, 2, ... tokens of a sequence's first draft are accepted."""
        return np.asarray(np.array(self.weights) @ np.array([each.survival for each in self.levels]))

    def conditional_rates(self) -> Floats:
        """Probability that the j-th token of a first draft is accepted if those before it were; 0 after a certain rejection."""
        known = np.concatenate([[1.0], self.survival])
        rates = np.zeros(known.size - 1)
        np.divide(known[1:], known[:-1], out=rates, where=known[:-1] > 0)
        return rates

    def survivors(self, draws: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """Accepted tokens, at most `longest`, of a draft that starts at each position; shape (positions, replications)."""
        return np.concatenate([self._lengths(level, tile, longest) for level, tile in self._levels(draws)])

    def drafts(self, draws: Iterator[Floats]) -> Iterator[Outcomes]:
        """Acceptance of drafted tokens, position by position."""
        most = self.levels[0].survival.size
        return _by_rounds(row for level, tile in self._levels(draws) for row in self._lengths(level, tile, most))

    def _levels(self, draws: Iterator[Floats]) -> Iterator[tuple[NDArray[np.intp], Floats]]:
        """Level of each replication, chosen by its first draw, and the draws of each tile: the rest of the first one's is used."""
        ends = np.cumsum(self.weights)
        ends[-1] = 1.0
        begins = np.concatenate([[0.0], ends[:-1]])
        level: NDArray[np.intp] | None = None
        for tile in draws:
            if level is None:
                level = np.searchsorted(ends, tile[0], side="right")
                tile = tile.copy()
                tile[0] = np.minimum((tile[0] - begins[level]) / (ends - begins)[level], np.nextafter(1.0, 0.0))
            yield level, tile

    def _lengths(self, level: NDArray[np.intp], tile: Floats, longest: int) -> NDArray[np.int64]:
        # Number of survival probabilities above the draw, as of one level.
        found = np.zeros(tile.shape, dtype=np.uint16)
        for chances in np.array([each.survival[:longest] for each in self.levels]).T:
            found += tile < chances[level]
        return found.astype(np.int64)


class ReplayRounds:
    """Recorded rounds: in record i, `records[i, j]` tokens are accepted of a draft that starts at position j.

    A replication is one of the records, chosen uniformly by its first random draw.

    >>> law = ReplayRounds([[2, 0, 1], [3, 2, 1]])
    >>> law.survivors(iter([np.array([[0.2, 0.7], [0.0, 0.0]])]), longest=2).tolist()
    [[2, 2], [0, 2]]
    """

    def __init__(self, records: ArrayLike) -> None:
        values = checks.whole_array("records", records, 0)
        if values.ndim != 2 or not values.size:
            raise checks.ParameterError("records must be lists of accepted lengths, all of one length of at least 1")
        self.records = values.astype(np.int64)

    @property
    def count(self) -> int:
        """Number of equally likely records."""
        return len(self.records)

    def survivors(self, draws: Iterator[Floats], longest: int) -> NDArray[np.int64]:
        """Accepted tokens, at most `longest`, of a draft that starts at each position; shape (positions, replications)."""
        return np.asarray(np.minimum(np.array(list(self._rows(draws))), longest))

    def drafts(self, draws: Iterator[Floats]) -> Iterator[Outcomes]:
        """Acceptance of drafted tokens, position by position."""
        return _by_rounds(self._rows(draws))

    def _rows(self, draws: Iterator[Floats]) -> Iterator[NDArray[np.int64]]:
        chosen, position = None, 0
        for tile in draws:
            if chosen is None:
                chosen = (tile[0] * len(self.records)).astype(np.intp)
            for _ in tile:
                if position == self.records.shape[1]:
                    raise checks.ParameterError(f"records must cover more than {position} output positions; take fewer tokens")
                yield self.records[chosen, position]
                position += 1


def _by_rounds(lengths: Iterable[NDArray[np.int64]]) -> Iterator[Outcomes]:
    """Outcomes from accepted lengths by start position: each replication keeps the length of its current round."""
    current: NDArray[np.int64] | None = None
    for here in lengths:

        def outcome(phase: Bytes, here: NDArray[np.int64] = here) -> Bools:
            nonlocal current
            current = here if current is None else np.where(phase == 0, here, current)
            return np.asarray(phase < current)

        yield outcome


class ReplayLog(ReplayRounds):
    """A replayed log: its sequences in cyclic order, each round cut at the end of its sequence.

    A replication begins with a sequence that is chosen uniformly by its first random draw. A decoding of as many tokens as the log
    has repeats exactly the log's rounds.

    >>> law = ReplayLog([[2, 0], [1, 9, 0]])  # accepted lengths are cut: no draft goes beyond its sequence
    >>> law.survivors(iter([np.array([[0.2, 0.7]] * 5)]), longest=3).tolist()
    [[1, 1], [0, 1], [1, 0], [1, 1], [0, 0]]
    """

    def __init__(self, sequences: Sequence[ArrayLike]) -> None:
        held = [checks.whole_array(f"sequences[{index}]", each, 0) for index, each in enumerate(sequences)]
        if not held or not all(each.ndim == 1 and each.size for each in held):
            raise checks.ParameterError("sequences must be lists of accepted lengths, each of at least one")
        remaining = [np.arange(each.size - 1, -1, -1) for each in held]
        self.line = np.concatenate([np.minimum(each, most) for each, most in zip(held, remaining, strict=True)]).astype(np.int64)
        self.begins = np.cumsum([0, *(each.size for each in held[:-1])])

    @property
    def count(self) -> int:
        """Number of equally likely first sequences."""
        return len(self.begins)

    @cached_property
    def records(self) -> NDArray[np.int64]:  # type: ignore[override]
        """Complete cycle from each sequence on; shape (sequences, positions of the log)."""
        return np.stack([np.roll(self.line, -begin) for begin in self.begins])

    def _rows(self, draws: Iterator[Floats]) -> Iterator[NDArray[np.int64]]:
        at: NDArray[np.intp] | None = None
        for tile in draws:
            if at is None:
                at = self.begins[(tile[0] * self.count).astype(np.intp)]
            for _ in tile:
                yield self.line[at]
                at = (at + 1) % self.line.size


RoundLaw = Rounds | MixedRounds | ReplayRounds
AcceptanceLaw = Law | RoundLaw


# --- Many replications at once ------------------------------------------------------------------------------------------


class RoundPrices(NamedTuple):
    """Time, unit-time and arithmetic of a round, by its number of drafted tokens 0, 1, 2, ...

    `time` and `busy` have shape (longest + 1,). If times depend on the position, the shape is (2, positions, longest + 1): index 1
    of the first axis is for a round that follows a completely accepted draft, the second axis is the start position. After a
    completely accepted draft the first draft pass reads two tokens, because the draft model has not read its last token yet.
    """

    time: Floats
    busy: Floats
    operations: Floats
    """Arithmetic, in units of one token in a pass of the target; shape (longest + 1,)."""

    @property
    def uniform(self) -> bool:
        """True if a round takes the same time at every position."""
        return self.time.ndim == 1

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
    """

    time: Floats
    busy: Floats


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

    >>> law = ReplayRounds([[1, 0, 2, 1, 0]])  # the draft from position 0 has one accepted token: 2 are emitted; then 2 accepted
    >>> draws = iter([np.zeros((4, 1))])
    >>> tally = fixed(2, 5, law.drafts(draws), RoundPrices(*np.array([[1.0, 1.1, 1.2]] * 3)), 1)
    >>> tally.rounds.tolist(), tally.drafted.tolist(), tally.accepted.tolist(), tally.time.round(12).tolist()
    ([2.0], [4.0], [0, 1, 1], [2.4])
    """
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
        drafted = np.minimum(draft_length, tokens - 1 - start) if cut else np.full(len(rows), draft_length)
        whole = (rows == draft_length) & (draft_length > 0)
        after_whole = starting & np.concatenate([last[None], whole[:-1]])
        last = whole[-1]
        for total, price in zip(spent, (prices.time, prices.busy), strict=True):
            usual, more = price[0, start, drafted], price[1, start, drafted]
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
    operations = sequences * (1.0 + drafted + np.where(drafted > 0, drafted * cost.operations("draft"), 0.0))
    link = np.where(drafted > 0, 2 * cost.link * separate, 0.0)
    drafts = draft_times(cost, longest, tokens, sequences=sequences)
    verify = verify_times(cost, longest + 1, tokens, sequences=sequences)
    if cost.uniform:
        drafts, verify = drafts[0], verify[0]
    else:
        more = reread_times(cost, tokens, sequences=sequences)[:, None]
        drafts = np.stack([drafts, drafts + np.where(drafted > 0, more, 0.0)])
    return RoundPrices(drafts + verify + link, drafts * cost.draft_devices + verify, operations)


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
    verify = verify_times(cost, longest + 1, tokens)
    if cost.uniform:
        drafts = np.minimum(np.arange(longest + 1), 1) * cost.draft_times()
        return prices._replace(time=drafts + verify[0], busy=drafts * cost.draft_devices + verify[0]), None
    start = np.arange(tokens)
    drafts = draft_times(cost, longest, tokens)
    if parallel:
        own = [cost.draft_times(start, width=count, heads=count) for count in range(1, longest + 1)]
        drafts = np.stack([np.zeros(tokens), *own], axis=1)
    drafted = np.minimum(longest, tokens - 1 - start) if cut else np.full(tokens, longest)
    more = np.zeros((tokens, longest + 1))
    for count in np.unique(drafted[drafted > 0]).tolist():
        here = np.flatnonzero(drafted == count)
        width = count if parallel else 1
        alone = cost.draft_times(here, width=width, heads=width)
        for accepted in range(1, longest + 1):
            after = here > accepted  # the round before began at position 0 or later
            wide = cost.draft_times(here[after] - accepted, width=accepted + width, heads=width)
            more[here[after], accepted] = wide - alone[after]
    time, busy = (np.stack([each, each]) for each in (drafts + verify, drafts * cost.draft_devices + verify))
    return RoundPrices(time, busy, prices.operations), ReadingTimes(more, more * cost.draft_devices)


def draft_times(cost: StepCosts, longest: int, tokens: int, *, role: str = "draft", sequences: int = 1) -> Floats:
    """Time of 0, 1, ..., `longest` single-token draft passes from each position on; shape (tokens, longest + 1)."""
    if cost.uniform:
        return np.broadcast_to(np.arange(longest + 1) * cost.draft_times(role=role, sequences=sequences), (tokens, longest + 1))
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
    """Time of a pass of the target over 1, 2, ..., `max_width` tokens from each position on; shape (tokens, max_width).

    With several `sequences` the tokens are per sequence.
    """
    start, widths = np.arange(tokens), np.arange(1, max_width + 1)
    if cost.uniform:
        return np.broadcast_to(cost.verify_times(widths, sequences=sequences), (tokens, max_width))
    return np.stack([cost.verify_times(width, start, sequences) for width in widths.tolist()], axis=1)


def reread_times(cost: StepCosts, tokens: int, *, role: str = "draft", sequences: int = 1) -> Floats:
    """Additional time of a draft pass at each position if it also reads the token before; shape (..., tokens), 0 at the first."""
    start = np.arange(1, tokens)
    narrow, wide = (
        cost.draft_times(at, role=role, width=width, sequences=sequences)
        for width, at in ((1, start), (2, start - 1))
    )
    return np.concatenate([np.zeros((*wide.shape[:-1], 1)), wide - narrow], axis=-1)


def longest_skipped(cost: StepCosts, tokens: int) -> float:
    """Upper bound of the time that `varying` adds to a round because its first draft pass reads more than two tokens."""
    most = 0.0
    for unread in range(2, tokens):
        start = np.arange(unread, tokens)
        most = max(most, float(_reading_skipped(cost, np.full(len(start), unread), start).max()))
    return most


def slowest_of(tokens: int, prices: RoundPrices) -> tuple[float, float]:
    """Upper bounds of time and unit-time of a decoding whose rounds emit at least one token each."""
    return tokens * float(prices.time.max()), tokens * float(prices.busy.max())


def operations_of(rounds: Mapping[tuple[int, int], int], prices: RoundPrices) -> float:
    """Arithmetic of a run; `rounds` counts rounds by (accepted, drafted) tokens."""
    return float(sum(count * prices.operations[drafted] for (_, drafted), count in rounds.items()))


_ROWS = 32
"""Positions that are counted together; at most 255, because a byte counts them."""


# --- Expectations -------------------------------------------------------------------------------------------------------


class Moments(NamedTuple):
    """Mean and variance of the time; means of unit-time, arithmetic, rounds and drafted tokens; of one decoding or arrays."""

    time: Any
    variance: Any
    busy: Any
    operations: Any
    rounds: Any
    drafted: Any


class RoundChoice(NamedTuple):
    """Arguments of `moments` for one decoding."""

    draft_length: int
    tokens: int
    law: AcceptanceLaw
    prices: RoundPrices
    cut: bool = True
    """True if the last drafts are cut to the remaining tokens."""
    reading: ReadingTimes | None = None


def moments(draft_length: int, tokens: int, law: AcceptanceLaw, prices: RoundPrices, *, cut: bool = True) -> Moments:
    """Exact moments of `fixed`, by a forward recursion over (start position of a round, outcome before it).

    >>> from model.outcomes.outcome_laws import Iid
    >>> flat = np.ones(4)
    >>> round(moments(3, 128, Iid(0.79), RoundPrices(flat, flat, flat)).rounds, 3)  # 128 / 2.907 is 44.030
    44.446
    """
    return moments_of_many([RoundChoice(draft_length, tokens, law, prices, cut)])[0]


class RoundDecoding(NamedTuple):
    """A decoding without the prices of its rounds."""

    draft_length: int
    tokens: int
    law: AcceptanceLaw
    cut: bool = True

    @property
    def survival(self) -> Floats | None:
        """Probability that at least 1, 2, ... drafted tokens are accepted, if rounds are independent and alike; else None."""
        if isinstance(self.law, Iid):
            return np.asarray(float(self.law.rate) ** np.arange(1, self.draft_length + 1))
        return self.law.first(self.draft_length) if isinstance(self.law, Rounds) else None


def moments_of_many(choices: Sequence[RoundChoice]) -> list[Moments]:
    """Moments of many decodings, computed together (`moments_of_points`)."""
    found = [RoundDecoding(each.draft_length, each.tokens, each.law, each.cut) for each in choices]
    keys = [(each.draft_length, each.tokens, id(each.law), each.cut) for each in choices]
    decodings, prices = dict(zip(keys, found, strict=True)), {(id(each.prices), id(each.reading)): each for each in choices}
    of_decodings, of_prices = ({key: index for index, key in enumerate(each)} for each in (decodings, prices))
    joined = moments_of_points(
        [*decodings.values()], [(each.prices, each.reading) for each in prices.values()],
        np.array([of_decodings[key] for key in keys], dtype=np.intp),
        np.array([of_prices[id(each.prices), id(each.reading)] for each in choices], dtype=np.intp),
    )  # fmt: skip
    return [Moments(*values) for values in zip(*(each.tolist() for each in joined), strict=True)]


def moments_of_points(
    decodings: Sequence[RoundDecoding], prices: Sequence[tuple[RoundPrices, ReadingTimes | None]],
    decoding: NDArray[np.intp], price: NDArray[np.intp],
) -> Moments:  # fmt: skip
    """Moments of pairs of decodings and prices, as arrays of shape (pairs,).

    Where rounds are independent and their times do not depend on the position, rounds are counted once for all prices
    (`model.outcomes.round_counts`).

    Parameters
    ----------
    decodings, prices
        Distinct decodings, and distinct prices with what they add for reading accepted tokens.
    decoding, price
        Index of each pair's decoding and prices.
    """
    found = np.empty((len(Moments._fields), decoding.size))
    reached = [each.survival for each in decodings]
    alike = np.array([each is not None for each in reached], dtype=np.bool_)[decoding]
    uniform = np.array([each.uniform and reading is None for each, reading in prices], dtype=np.bool_)[price]
    other = np.flatnonzero(~alike)
    if other.size:
        pairs = zip(decoding[other].tolist(), price[other].tolist(), strict=True)
        choices = [_choice(decodings[one], *prices[which]) for one, which in pairs]
        found[:, other] = np.array(_moments_by_position(choices)).T
    groups: dict[tuple[int, int, bool], list[int]] = {}
    for number in np.unique(decoding[alike]).tolist():
        each = decodings[number]
        groups.setdefault((each.draft_length, each.tokens, each.cut), []).append(number)
    place = np.full(len(decodings), -1)
    for shape, numbers in groups.items():
        place[:] = -1
        place[numbers] = np.arange(len(numbers))
        survival = np.stack([known for known in (reached[number] for number in numbers) if known is not None])
        here = alike & (place[decoding] >= 0)
        for index, moments_of in ((np.flatnonzero(here & uniform), _of_counts), (np.flatnonzero(here & ~uniform), _of_times)):
            if index.size:
                used, which = np.unique(price[index], return_inverse=True)
                mine = [prices[each] for each in used.tolist()]
                found[:, index] = moments_of(survival, mine, place[decoding[index]], which, *shape)
    return Moments(*found)


def moments_of_prediction(
    points: PredictionPoints[Any], prices: Sequence[tuple[RoundPrices, ReadingTimes | None]]
) -> Moments:
    """Moments at points, with the prices of each choice; decodings that differ in their prices only are evaluated together."""
    kinds = [(each.parameters.draft_length, each.tokens, each.parameters.cut) for each in points.choices]
    distinct = {kind: index for index, kind in enumerate(dict.fromkeys(kinds))}
    kind = np.array([distinct[each] for each in kinds], dtype=np.intp)
    choice, law, index = points.pairs()
    keys, decoding = np.unique(kind[choice] * len(points.laws) + law, return_inverse=True)
    listed = [*distinct]
    decodings = []
    for key in keys.tolist():
        (length, tokens, cut), of = listed[key // len(points.laws)], points.laws[key % len(points.laws)]
        decodings.append(RoundDecoding(length, tokens, of, cut))
    return Moments(*(each[index] for each in moments_of_points(decodings, prices, decoding, choice)))


def _choice(decoding: RoundDecoding, prices: RoundPrices, reading: ReadingTimes | None) -> RoundChoice:
    return RoundChoice(decoding.draft_length, decoding.tokens, decoding.law, prices, decoding.cut, reading)


_PAIRS = 20_000
"""Pairs that are priced together."""


def _of_counts(
    survival: Floats, prices: Sequence[tuple[RoundPrices, ReadingTimes | None]], law: NDArray[np.intp], price: NDArray[np.intp],
    longest: int, tokens: int, cut: bool,
) -> Floats:  # fmt: skip
    """Rows of `Moments` of pairs of laws and prices that do not depend on the position: rounds are counted once for all prices."""
    counts = round_counts.counts_of(longest, tokens, survival)
    taken = np.arange(longest + 1) if cut else np.full(longest + 1, longest)  # drafted tokens that are paid for
    time, busy, operations = (
        np.stack([getattr(each, name)[taken] for each, _ in prices]) for name in ("time", "busy", "operations")
    )
    found = np.empty((len(Moments._fields), law.size))
    for at in range(0, law.size, _PAIRS):
        part = slice(at, at + _PAIRS)
        own, mine = RoundCounts(*(each[law[part]] for each in counts)), price[part]
        mean, variance = round_counts.priced(own, time[mine])
        spent = (np.einsum("pk,pk->p", own.mean, each[mine]) for each in (busy, operations))
        found[:, part] = mean, variance, *spent, own.mean.sum(axis=1), own.mean @ taken
    return found


def _of_times(
    survival: Floats, prices: Sequence[tuple[RoundPrices, ReadingTimes | None]], law: NDArray[np.intp], price: NDArray[np.intp],
    longest: int, tokens: int, cut: bool,
) -> Floats:  # fmt: skip
    """Rows of `Moments` of pairs of laws and prices that depend on the position, or on the tokens that were accepted before."""
    start = np.arange(tokens)
    drafted = np.minimum(longest, tokens - 1 - start) if cut else np.full(tokens, longest)
    each = [_times_by_accepted(*of, drafted) for of in prices]
    ends = round_counts.chain_ends(longest, tokens, survival)
    times = RoundTimes(*(
        [by_start[: len(end.accepted)] for by_start, end in zip(np.stack(column, axis=-1), ends, strict=True)]
        for column in zip(*each, strict=True)
    ))  # fmt: skip
    mass = round_counts.start_masses(ends)
    operations = np.stack([of.operations[drafted] for of, _ in prices]) @ mass
    mean, variance, busy = round_counts.timed(ends, times, law, price)
    return np.stack([mean, variance, busy, operations[price, law], mass.sum(axis=0)[law], (drafted @ mass)[law]])


def _times_by_accepted(prices: RoundPrices, reading: ReadingTimes | None, drafted: NDArray[np.int64]) -> tuple[Floats, Floats]:
    """Time and unit-time of a round from each position, by accepted tokens, with what these add to the round that follows."""
    tokens, longest = drafted.size, len(prices.operations) - 1
    start, accepted = np.arange(tokens)[:, None], np.arange(longest + 1)
    following = start + 1 + accepted
    follows, after = following < tokens, np.minimum(following, tokens - 1)
    whole = follows & (accepted == np.minimum(longest, tokens - 1 - start)) & (accepted > 0)
    found = []
    for name in ("time", "busy"):
        values = getattr(prices, name)
        usual, late = (values[drafted],) * 2 if prices.uniform else values[:, np.arange(tokens), drafted]
        times = usual[:, None] + np.where(whole, (late - usual)[after], 0.0)
        if reading is not None:
            times = times + np.where(follows, getattr(reading, name)[after, accepted], 0.0)
        found.append(np.broadcast_to(times, (tokens, longest + 1)))
    return found[0], found[1]


def _moments_by_position(choices: Sequence[RoundChoice]) -> list[Moments]:
    """Moments of decodings whose rounds are not independent and alike, position by position; chains are computed together."""
    found: dict[int, Moments] = {}
    chains: list[int] = []
    for index, choice in enumerate(choices):
        law = choice.law
        if isinstance(law, Replay | ReplayRounds):
            found[index] = _of_records(choice, law)
        elif isinstance(law, RecordedProbabilities):
            found[index] = mixed(moments_of_many([choice._replace(law=each) for each in law.chains]))
        elif isinstance(law, MixedRounds):
            found[index] = mixed(moments_of_many([choice._replace(law=each) for each in law.levels]), law.weights)
        elif isinstance(law, Chain):
            chains.append(index)
        else:
            raise checks.ParameterError("this law of outcomes has no closed form for drafts; ask for views = ['paths']")
    # Sorted, so that decodings of similar size are padded together.
    chains.sort(key=lambda index: (choices[index].tokens, choices[index].draft_length))
    while chains:
        last = choices[chains[-1]]
        size = max(_MOST_CELLS // (last.tokens * (last.draft_length + 1)), 1)
        chains, part = chains[:-size], chains[-size:]
        found |= zip(part, _moments_of_chains([choices[index] for index in part]), strict=True)
    return [found[index] for index in range(len(choices))]


_MOST_CELLS = 150_000
"""Largest number of cells (positions x draft positions x decodings) that are computed together: about 1 MB per array."""


class Starts(NamedTuple):
    """Probabilities that a round starts at each position, in all and after a completely accepted draft of at least one token."""

    mass: Floats
    after_full_draft: Floats


def starts(draft_length: int, tokens: int, law: Chain | Rounds) -> Starts:
    """Distribution of the start positions of the rounds of `fixed`.

    >>> from model.outcomes.outcome_laws import ByPosition
    >>> [each.tolist() for each in starts(2, 5, ByPosition([1, 1, 0, 0, 1]))]
    [[1.0, 0.0, 0.0, 1.0, 1.0], [0.0, 0.0, 0.0, 1.0, 0.0]]
    """
    steps = _RoundSteps([(draft_length, tokens, law)])
    mass = steps.forward(np.zeros((tokens, 1))).mass
    count, after_whole = steps.count[:, 0], np.zeros(tokens + 1)
    np.add.at(after_whole, np.arange(tokens) + 1 + count, (mass * steps.whole).sum(axis=1)[:, 0] * (count > 0))
    return Starts(mass.sum(axis=1)[:, 0], after_whole[:tokens])


def starts_of_laws(draft_length: int, tokens: int, laws: Sequence[Chain | Rounds]) -> Starts:
    """`starts` of several laws; arrays of shape (tokens, laws)."""
    survival = [RoundDecoding(draft_length, tokens, law).survival for law in laws]
    if any(known is None for known in survival):
        each = [starts(draft_length, tokens, law) for law in laws]
        return Starts(*(np.stack(column, axis=1) for column in zip(*each, strict=True)))
    reached = np.stack([known for known in survival if known is not None])
    mass = round_counts.start_masses(round_counts.chain_ends(draft_length, tokens, reached))
    after_full = np.zeros((tokens, len(laws)))
    place = np.arange(tokens)
    count = np.minimum(draft_length, tokens - 1 - place)
    whole = np.concatenate([np.ones((1, len(laws))), reached.T])[count] * mass
    follows = (count > 0) & (place + 1 + count < tokens)
    np.add.at(after_full, (place + 1 + count)[follows], whole[follows])
    return Starts(mass, after_full)


def starts_by_accepted(draft_length: int, tokens: int, law: Chain | Rounds) -> Floats:
    """Probability that a round starts at each position after one that accepted 0, 1, ... tokens; shape (tokens, longest + 1).

    The first round follows none.

    >>> from model.outcomes.outcome_laws import ByPosition
    >>> starts_by_accepted(2, 5, ByPosition([1, 1, 0, 0, 1])).tolist()[3:]
    [[0.0, 0.0, 1.0], [1.0, 0.0, 0.0]]
    """
    steps, found = _RoundSteps([(draft_length, tokens, law)]), np.zeros((tokens, draft_length + 1))
    ends = steps.ended(steps.forward(np.zeros((tokens, 1))).mass)[..., 0]
    for accepted in range(min(draft_length + 1, tokens)):
        found[accepted + 1 :, accepted] = ends[: tokens - accepted - 1, accepted]
    return found


class _RoundSteps:
    """Transition probabilities of rounds that start at each position, for several decodings at once.

    Arrays have axes (position, outcome before it, tokens of the round - 1, decoding), padded with zeros for decodings with fewer
    tokens or shorter drafts. If outcomes are independent, the axis of the outcome before has one entry.
    """

    def __init__(self, decodings: Sequence[tuple[int, int, Chain | Rounds]]) -> None:
        lengths, tokens = (np.array([each[axis] for each in decodings]) for axis in (0, 1))
        self.tokens, longest, size = int(tokens.max()), int(lengths.max()), len(decodings)
        low, high = np.zeros((2, self.tokens, longest + 1, size))
        for index, (length, count, law) in enumerate(decodings):
            low[:count, : length + 1, index], high[:count, : length + 1, index] = law.draft_probabilities(count, length)
        position, place, each = np.arange(self.tokens)[:, None, None], np.arange(longest)[None, :, None], np.arange(size)
        remaining = tokens - 1 - position[:, 0]
        self.count = np.clip(remaining, 0, lengths)  # drafted tokens that can be used; shape (position, decoding)
        drafted = place < self.count[:, None]
        along = high[np.minimum(position + place, self.tokens - 1), place, each]
        alike = np.array_equal(low, high)
        self.ends = np.zeros((self.tokens, 1 if alike else 2, longest + 1, size))
        self.goes_on = np.zeros_like(self.ends) if not alike else None
        self.whole = np.zeros((self.tokens, 1 if alike else 2, size))
        last = np.minimum(position[:, 0] + self.count, self.tokens - 1), self.count, each
        self.begun = begun = remaining >= 0
        for before in range(self.ends.shape[1]):
            rates = along.copy()
            if not before and longest:
                rates[:, 0] = low[:, 0]
            survival = np.cumprod(np.where(drafted, rates, 1.0), axis=1)
            self.whole[:, before] = survival[:, -1] * begun if longest else begun
            ends = self.ends[:, before]
            if longest:
                reached = np.concatenate([np.ones((self.tokens, 1, size)), survival[:, :-1]], axis=1)
                ends[:, :longest] = np.where(drafted, reached * (1 - rates), 0.0)
            if self.goes_on is None:
                ends[position[:, 0], self.count, each] += self.whole[:, before]
                continue
            # The token after a completely accepted draft has an outcome too: it precedes the next round.
            following = high[last] if before else np.where(self.count > 0, high[last], low[last])
            ends[position[:, 0], self.count, each] += self.whole[:, before] * (1 - following)
            self.goes_on[position[:, 0], before, self.count, each] = self.whole[:, before] * following

    def forward(self, times: Floats, onward: Floats | None = None) -> _Visits:
        """Probability that a round starts at each position, by the outcome before it, and the mean time until then.

        `times` is the time of a round by its start position, shape (position, decoding), or (2, position, decoding) with index 1
        for rounds that follow a completely accepted draft. `onward` is additional time by the accepted tokens (`onward`).
        """
        _, before, most, size = self.ends.shape
        usual, more = (times, None) if times.ndim == 2 else (times[0], self._after_whole(times[1] - times[0]))
        state = np.zeros((self.tokens + most, 2, before, size))
        state[0, 0, 0] = 1.0
        begun = self.begun[:, None, None]  # no round starts after the last token
        found = np.empty((self.tokens, 2, before, size))
        each = np.arange(size)
        for start in range(self.tokens):
            found[start] = spent = state[start] * begun[start]
            spent = spent.copy()
            spent[1] += usual[start] * spent[0]
            ahead = state[start + 1 : start + 1 + most]
            ends, goes_on = self.ends[start], None if self.goes_on is None else self.goes_on[start]
            for outcome in range(before):
                ahead[:, :, 0] += spent[None, :, outcome] * ends[outcome][:, None]
                if goes_on is not None:
                    ahead[:, :, 1] += spent[None, :, outcome] * goes_on[outcome][:, None]
            for outcome in range(before if onward is not None else 0):
                assert onward is not None
                added = spent[0, outcome] * onward[start]
                ahead[:, 1, 0] += added * ends[outcome]
                if goes_on is not None:
                    ahead[:, 1, 1] += added * goes_on[outcome]
            if more is not None:  # the additional time of the next round is added at the end of this one
                added, count = spent[0] * more[start], self.count[start]
                on = np.zeros_like(added) if goes_on is None else goes_on[:, count, each]
                ahead[count, 1, 0, each] += (added * (self.whole[start] - on)).sum(axis=0)
                if goes_on is not None:
                    ahead[count, 1, 1, each] += (added * on).sum(axis=0)
        return _Visits(found[:, 0], found[:, 1])

    def onward(self, reading: Floats) -> Floats:
        """Additional time of the round that follows a round from each position, by the accepted tokens of the latter.

        Both arrays have shape (position, accepted tokens, decoding); `reading` is by the position of the following round.
        """
        found = np.zeros_like(reading)
        for accepted in range(min(reading.shape[1], self.tokens - 1)):
            found[: -accepted - 1, accepted] = reading[accepted + 1 :, accepted]
        return found

    def ended(self, values: Floats) -> Floats:
        """Values of visits, by the accepted tokens of the round from there; shape (position, accepted tokens, decoding)."""
        ends = self.ends if self.goes_on is None else self.ends + self.goes_on
        return np.asarray((values[:, :, None] * ends).sum(axis=1))

    def _after_whole(self, more: Floats) -> Floats:
        """Additional time of the round that follows a round from each position, if the draft of the latter is fully accepted."""
        following = np.arange(self.tokens)[:, None] + 1 + self.count
        inside, each = np.minimum(following, self.tokens - 1), np.arange(self.count.shape[1])
        follows = (following < self.tokens) & self.begun[inside, each] & (self.count > 0)
        return np.where(follows, more[inside, each], 0.0)

    def sums(self, values: Floats, visits: _Visits) -> Floats:
        """Expected sum of `values` over all rounds; `values` has the shape of `times`."""
        mass = visits.mass.sum(axis=1)
        if values.ndim == 2:
            return np.asarray((mass * values).sum(axis=0))
        whole = (visits.mass * self.whole).sum(axis=1)
        return np.asarray((mass * values[0] + whole * self._after_whole(values[1] - values[0])).sum(axis=0))


class _Visits(NamedTuple):
    """Start positions of rounds, by the outcome before: their probability, and the mean time until then times that probability."""

    mass: Floats
    first: Floats


def _moments_of_chains(choices: Sequence[RoundChoice]) -> list[Moments]:
    steps = _RoundSteps([(each.draft_length, each.tokens, each.law) for each in choices])  # type: ignore[misc]
    lengths, cut = np.array([each.draft_length for each in choices]), np.array([each.cut for each in choices])
    drafted = np.where(cut, steps.count, lengths)
    uniform = all(each.prices.uniform for each in choices)
    shape = drafted.shape if uniform else (2, *drafted.shape)
    time, busy, operations = np.zeros(shape), np.zeros(shape), np.zeros(drafted.shape)
    longest, read = int(lengths.max()), any(each.reading is not None for each in choices)
    reading = np.zeros((2, steps.tokens, longest + 1, len(choices))) if read else None
    for index, each in enumerate(choices):
        if reading is not None and each.reading is not None:
            reading[:, : each.tokens, : each.draft_length + 1, index] = each.reading
        own = drafted[: each.tokens, index]
        where: Any = own if each.prices.uniform else (slice(None), np.arange(each.tokens), own)
        time[..., : each.tokens, index], busy[..., : each.tokens, index] = each.prices.time[where], each.prices.busy[where]
        operations[: each.tokens, index] = each.prices.operations[own]
    onward = None if reading is None else steps.onward(reading[0])
    visits = steps.forward(time, onward)
    mean, square = steps.sums(time, visits), _squares(steps, time, visits)
    spent = steps.sums(busy, visits)
    if reading is not None and onward is not None:
        mass, first = (steps.ended(each) for each in visits)
        mean = mean + (mass * onward).sum(axis=(0, 1))
        spent = spent + (mass * steps.onward(reading[1])).sum(axis=(0, 1))
        square = square + (onward * (2 * first + onward * mass)).sum(axis=(0, 1)) + _crossed(steps, time, onward, visits)
    rest = (spent, *(steps.sums(each, visits) for each in (operations, np.ones(drafted.shape), drafted)))
    totals = mean, np.maximum(square - mean**2, 0.0), *rest
    return [Moments(*values) for values in zip(*(each.tolist() for each in totals), strict=True)]


def _squares(steps: _RoundSteps, time: Floats, visits: _Visits) -> Floats:
    """Mean square of a decoding's time."""
    mass, first = visits.mass.sum(axis=1), visits.first.sum(axis=1)
    if time.ndim == 2:
        return np.asarray((time * (2 * first + time * mass)).sum(axis=0))
    usual, more = time[0], steps._after_whole(time[1] - time[0])
    whole, until = ((each * steps.whole).sum(axis=1) for each in visits)
    return np.asarray((usual * (2 * first + usual * mass) + more * (2 * until + (2 * usual + more) * whole)).sum(axis=0))


def _crossed(steps: _RoundSteps, time: Floats, onward: Floats, visits: _Visits) -> Floats:
    """Twice the mean product of a round's time and what is added for the tokens that it accepts; summed over rounds."""
    if time.ndim != 2:  # additional time by the accepted tokens and after a completely accepted draft exclude each other
        time = time[0]
    return np.asarray(2 * (time[:, None] * onward * steps.ended(visits.mass)).sum(axis=(0, 1)))


def _of_records(choice: RoundChoice, law: Replay | ReplayRounds) -> Moments:
    draws = draws_of_records(law, choice.tokens)
    outcomes, count = law.drafts(iter([draws])), draws.shape[1]
    return mean_of(
        fixed(choice.draft_length, choice.tokens, outcomes, choice.prices, count, cut=choice.cut, reading=choice.reading)
    )


def draws_of_records(law: Replay | ReplayRounds, tokens: int) -> Floats:
    """Random draws that select each record of a law once; shape (tokens - 1 or 1, records)."""
    count = law.count if isinstance(law, ReplayRounds) else len(law.records)
    return np.broadcast_to((np.arange(count) + 0.5) / count, (max(tokens - 1, 1), count))


def mixed(parts: Sequence[Moments], weights: Sequence[float] | None = None) -> Moments:
    """Moments of a mixture of decodings, by default equally likely; `weights` sum to 1.

    >>> mixed([Moments(1.0, 2.0, 1, 1, 1, 0), Moments(3.0, 4.0, 1, 1, 2, 0)])[:2]
    (2.0, 4.0)
    >>> mixed([Moments(1.0, 2.0, 1, 1, 1, 0), Moments(3.0, 4.0, 1, 1, 2, 0)], (0.75, 0.25))[:2]
    (1.5, 3.25)
    """
    time, variance, *rest = np.array(parts).T
    if weights is None:
        return Moments(float(time.mean()), float(variance.mean() + time.var()), *(float(values.mean()) for values in rest))
    by = np.asarray(weights)
    mean = float(by @ time)
    return Moments(mean, float(by @ variance + by @ (time - mean) ** 2), *(float(by @ values) for values in rest))


def mean_of(tally: Tally) -> Moments:
    """Moments over equally likely decodings."""
    means = tally.busy, tally.operations, tally.rounds, tally.drafted
    return Moments(float(tally.time.mean()), float(tally.time.var()), *(float(values.mean()) for values in means))
