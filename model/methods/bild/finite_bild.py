"""Big Little Decoder for a given number of tokens, with decisions by output position: simulation and exact expectations.

A segment that starts at output position s drafts at most min(G, l - 1 - s) tokens, so that the large model emits the last token.
The decision on the small model's token is drawn once per position (`model.methods.bild.threshold_decisions`): positions that are
drafted again after a rollback keep their decisions. The start of a segment depends only on earlier positions, its cost only on
later ones, so means by position are exact. Costs of successive segments are dependent, so there is no variance here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.interpret.account import Totals, Work
from model.interpret.simulated_answers import UNLIKELY, UNSURE
from model.methods.bild.algorithm import Parameters
from model.methods.bild.threshold_decisions import DecisionLaw, Digits, Independent, RecordedDecisions
from model.methods.prediction import DecodingPoints, linear, pair_blocks
from model.methods.rounds import round_moments
from model.methods.rounds.prices_of_rounds import reread_times, sums_before, sums_from, times_by_width
from model.methods.rounds.round_walks import Tally
from model.steps import LayerSpan

Floats = NDArray[np.float64]


class SegmentPrices(NamedTuple):
    """Time, unit-time and arithmetic of segments (`segment`) and of the pass after a rollback (`rollback_pass`).

    `segment` has axes (price, unsure, drafted tokens), `rollback_pass` (price, kept tokens). If times depend on the position, there
    is an additional axis before the last: the start position of the segment. With several costs their axis follows that of prices.
    """

    segment: Floats
    rollback_pass: Floats
    reread: Floats | None = None
    """Additional time and unit-time of a segment, by its start position, if the small model must read two tokens first.

    Shape (2, positions); None if that takes no longer."""

    @property
    def uniform(self) -> bool:
        """True if a segment takes the same time at every position, at a single cost."""
        return self.rollback_pass.ndim == 2

    def at(self, position: int) -> tuple[Floats, Floats]:
        """`segment` and `rollback_pass` of segments that start at a position, at a single cost."""
        if self.uniform:
            return self.segment, self.rollback_pass
        return self.segment[:, :, position], self.rollback_pass[:, position]

    def of(self, cost: int) -> SegmentPrices:
        """Prices at one of several costs."""
        return SegmentPrices(*(None if each is None else each[:, cost] for each in self))  # type: ignore[arg-type]


def prices(parameters: Parameters, cost: StepCosts, tokens: int = 1) -> SegmentPrices:
    """Prices of segments: a pass of the small model per drafted token, one more if it was unsure, and a pass of the large model.

    Start positions are below `tokens`, if times depend on the position. On separate units a segment with drafts uses the link
    twice. With an exit layer each token runs through the first layers alone, after a full draft also the last token, without a
    head. Times are in the unit of the costs.

    >>> from model.costs.layer_times import UnitCost
    >>> found = prices(Parameters(24, max_draft_length=2), UnitCost(24, cost_ratio=0.25, operations_ratio=0.0625))
    >>> found.segment[0].tolist(), found.segment[2].tolist()
    ([[24.0, 30.0, 36.0], [30.0, 36.0, 42.0]], [[1.0, 2.0625, 3.125], [1.0625, 2.125, 3.1875]])
    """
    layers, longest = parameters.layers, parameters.longest_draft
    whole, widths = LayerSpan(0, layers), np.arange(1, parameters.largest_pass + 1)
    written = np.arange(longest + 1)
    runs = written + np.array([[0], [1]])
    axes = (...,) + (None,) * (2 if cost.uniform else 3)  # of one number for each of several costs
    reread = None
    if parameters.exit_layer is None:
        small = _times_of_runs(cost, PassShape(ALL_LAYERS, "draft", heads=1), runs, tokens)
        large = times_by_width(cost, lambda width: PassShape(whole, width=width, heads=width), widths, tokens)
        large = large[..., None, :] if cost.uniform else large[..., None, :, :]
        time, busy = small + large, small * np.asarray(cost.draft_devices)[axes] + large
        if not cost.uniform:
            extra = reread_times(cost, tokens)
            reread = np.stack([extra, extra * np.asarray(cost.draft_devices)[..., None]])
        moved = 2 * np.asarray(cost.link)[axes] * _over(runs > 0, cost) if parameters.placement == "separate" else 0.0
        drafting = np.where(runs > 0, runs * np.asarray(cost.operations("draft"))[..., None, None], 0.0)
        operations = _over(1 + written + drafting, cost)
    else:
        first = LayerSpan(0, parameters.exit_layer)
        rest = LayerSpan(parameters.exit_layer, layers)
        small = _times_of_runs(cost, PassShape(first, heads=1), runs, tokens)
        large = times_by_width(cost, lambda width: PassShape(rest, width=width, heads=width, joins=True), widths, tokens)
        last = cost.times(PassShape(first), 0 if cost.uniform else np.arange(tokens)[:, None] + written)
        full = np.array([[1.0], [0.0]])  # the last token of a full draft also runs through the first layers
        large = large[..., None, :] if cost.uniform else large[..., None, :, :]
        last = last[..., None, None] if cost.uniform else last[..., None, :, :]
        time = busy = small + large + last * _over(full, cost)
        moved, operations = 0.0, 1.0 + written
    back = times_by_width(cost, lambda width: PassShape(whole, width=width, heads=1), written[:-1] + 2, tokens)
    again = np.concatenate([back, np.full((*back.shape[:-1], 1), np.nan)], axis=-1)
    segment, more = np.broadcast_arrays(time + moved, busy, operations), np.broadcast_arrays(again, again, written + 2.0)
    return SegmentPrices(np.array(segment), np.array(more), reread)


def _over(values: NDArray[Any], cost: StepCosts) -> NDArray[Any]:
    """Insert an axis of start positions before the last, if times depend on the position."""
    return values if cost.uniform else values[..., None, :]


def _times_of_runs(cost: StepCosts, shape: PassShape, runs: NDArray[np.int64], tokens: int) -> Floats:
    """Time of `runs` successive passes of the small model, from each position on if times depend on the position."""
    if shape.role == "draft":
        cost.require("draft")
    if cost.uniform:
        return np.asarray(runs * cost.times(shape)[..., None, None])
    most = int(runs.max())
    sums = sums_from(cost.times(shape, np.arange(tokens + most)), most, tokens)
    return np.moveaxis(sums[..., runs], -2, -3)


def segments(parameters: Parameters, tokens: int, decisions: Iterator[Digits], price: SegmentPrices, replications: int) -> Tally:
    """Walk the segments of many replications at once, from tiles of the decisions at the first tokens - 1 positions.

    >>> flat = SegmentPrices(np.ones((3, 2, 3)), np.ones((3, 3)))
    >>> drawn = iter([np.array([[0], [1], [0], [2], [0]], dtype=np.uint8)])  # 0: accepted, 1: unsure, 2: rolled back
    >>> tally = segments(Parameters(24, max_draft_length=2), 6, drawn, flat, 1)
    >>> tally.rounds.tolist(), tally.drafted.tolist(), tally.accepted.tolist()
    ([3.0], [4.0], [0, 3, 0])
    """
    longest, again = parameters.longest_draft, parameters.variant == "code"
    time, busy, operations, passes, drafted = np.zeros((5, replications))
    accepted = np.zeros(longest + 1, dtype=np.int64)
    place, written = np.zeros((2, replications), dtype=np.uint8)
    after_back = np.zeros(replications, dtype=np.bool_)  # variant code, after a rollback: the large model's second token
    late = np.zeros(replications, dtype=np.bool_)  # the small model must read two tokens at the next segment
    for position, (decision, clear) in enumerate(_looking_ahead(decisions, longest, tokens, replications)):
        most = min(longest, tokens - 1 - position)
        starting = (place == 0) & ~after_back
        np.copyto(written, np.minimum(clear, most), where=starting)
        unsure = (written < most).view(np.uint8)
        at = unsure * np.intp(longest + 1) + written
        for total, each in zip((time, busy, operations), price.at(position)[0], strict=True):
            total += each.take(at) * starting  # one flat index is faster than two
        if price.reread is not None:
            if most:
                time += price.reread[0, position] * (starting & late)
                busy += price.reread[1, position] * (starting & late)
            np.copyto(late, written == most, where=starting)
        passes += starting
        drafted += written * starting
        back = (place < written) & (decision == UNLIKELY) & ~after_back
        ends = (back | (place == written)) & ~after_back
        accepted += np.bincount(place[ends], minlength=longest + 1)
        if again:
            accepted[0] += int(np.count_nonzero(after_back))
            passes += after_back
            kept: Any = place if price.uniform else (position - place.astype(np.intp), place)
            for total, each in zip((time, busy, operations), price.rollback_pass, strict=True):
                total += np.where(back, each[kept], 0.0)
        np.copyto(late, again, where=back)
        place = (place + 1) * ~(ends | after_back)
        after_back = back & again
    return Tally(time, busy, operations, passes, drafted, accepted)


def _looking_ahead(tiles: Iterator[Digits], longest: int, tokens: int, replications: int) -> Iterator[tuple[Digits, Digits]]:
    """Yield the decisions at each position, and the number of positions (at most `longest`) until the next unsure one."""
    rows = np.zeros((0, replications), dtype=np.uint8)
    ended = False
    while not ended:
        while not ended and len(rows) <= 2 * longest + _ROWS:
            tile = next(tiles, None)
            ended = tile is None
            rows = rows if tile is None else np.concatenate([rows, tile])
        if ended:
            # There is no decision at the last position.
            rows = np.concatenate([rows, np.zeros((1, replications), dtype=np.uint8)])
        ready = len(rows) if ended else len(rows) - longest
        clear = np.zeros_like(rows)
        after = clear[0]
        for row in reversed(range(len(rows))):
            after = np.minimum(after + 1, longest).astype(np.uint8) * (rows[row] != UNSURE)
            clear[row] = after
        yield from zip(rows[:ready], clear[:ready], strict=True)
        rows = rows[ready:]


_ROWS = 256


class SegmentCounts(NamedTuple):
    """Expected numbers of segments and of passes after a rollback, with an axis of laws last.

    `segment` has axes (position, unsure, drafted tokens, law), `rollback_pass` (position, kept tokens, law). Without positions
    their axis has a single entry, the sum, and `reread` is not counted.
    """

    segment: Floats
    rollback_pass: Floats
    reread: Floats
    """Segments at each position in which the small model must read two tokens first; shape (positions, laws)."""

    @property
    def summed(self) -> SegmentCounts:
        """The counts without positions."""
        return SegmentCounts(*(each.sum(axis=0, keepdims=True) for each in self))

    @property
    def passes(self) -> Floats:
        """Passes of the large model by law."""
        return np.asarray(self.segment.sum(axis=(0, 1, 2)) + self.rollback_pass.sum(axis=(0, 1)))

    @property
    def drafted(self) -> Floats:
        """Drafted tokens by law."""
        return np.asarray(np.einsum("purl,r->l", self.segment, np.arange(self.segment.shape[2])))


class _SegmentEnds(NamedTuple):
    """Probabilities of a segment that may draft `most` tokens, with an axis of laws last."""

    unsure: Floats
    """A fallback after 0, 1, ..., most - 1 drafted tokens, of which all are accepted or one is rolled back."""
    written: Floats
    """At least 0, 1, ..., most drafted tokens."""
    accepted: Floats
    """At least 0, 1, ..., most drafted tokens, all accepted."""
    back: Floats
    """A rollback after 0, 1, ..., most - 1 accepted tokens."""
    stops: Floats
    """A fallback after 0, 1, ..., most - 1 drafted tokens, all accepted."""

    @staticmethod
    def of(fallback: Floats, rollback: Floats) -> _SegmentEnds:
        """Probabilities from the rates at the positions that may be drafted, shape (most, laws)."""
        goes_on, keeps = 1 - fallback, (1 - fallback) * (1 - rollback)
        one = np.ones((1, *fallback.shape[1:]))
        written, accepted = (np.concatenate([one, np.cumprod(each, axis=0)]) for each in (goes_on, keeps))
        return _SegmentEnds(
            written[:-1] * fallback, written, accepted, accepted[:-1] * goes_on * rollback, accepted[:-1] * fallback
        )

    def cut(self, most: int) -> _SegmentEnds:
        """Probabilities of a segment that may draft fewer tokens."""
        return _SegmentEnds(
            self.unsure[:most], self.written[: most + 1], self.accepted[: most + 1], self.back[:most], self.stops[:most]
        )

    def advance(self, *, code: bool) -> Floats:
        """Probability that the next segment starts 1, 2, ..., most + 1 tokens later; shape (most + 1, laws)."""
        found = np.concatenate([self.stops, self.accepted[-1:]])
        found[1 if code else 0 : len(self.back) + (1 if code else 0)] += self.back
        return found


def counts_of(parameters: Parameters, tokens: int, laws: Sequence[Independent], *, by_position: bool = False) -> SegmentCounts:
    """Expected numbers of segments of decodings: where one starts depends only on earlier decisions.

    A recursion over the start positions, for all laws at once.

    >>> found = counts_of(Parameters(24, max_draft_length=1), 3, [Independent(0.5, 0.0)])
    >>> found.segment[0, :, :, 0].tolist()  # at first and, with probability 0.5, next; the last segment drafts nothing
    [[0.75, 0.75], [0.75, 0.0]]
    """
    longest, code = parameters.longest_draft, parameters.variant == "code"
    constant = all(law.constant for law in laws)
    if constant:
        fallback, rollback = (
            np.array([[float(getattr(law, name)) for law in laws]]) for name in ("fallback_rate", "rollback_rate")
        )
    else:
        each = [law.probabilities(tokens - 1) for law in laws]
        fallback, rollback = (np.stack(rates, axis=-1) for rates in zip(*each, strict=True))
    how = _Counting(longest, tokens, len(laws), code, constant, by_position)
    if len(laws) <= _FEW_LAWS:
        return _kept_counts(how, fallback.tobytes(), rollback.tobytes())
    return _counted(how, fallback, rollback)


_FEW_LAWS = 8
"""Number of laws up to which counts are kept: methods whose parameters differ ask for the same ones."""


class _Counting(NamedTuple):
    """What counts of segments depend on besides rates."""

    longest: int
    tokens: int
    laws: int
    code: bool
    constant: bool
    """All positions have the same rates."""
    by_position: bool


@lru_cache(maxsize=64)
def _kept_counts(how: _Counting, *rates: bytes) -> SegmentCounts:
    found = _counted(how, *(np.frombuffer(each).reshape(-1, how.laws) for each in rates))
    for each in found:
        each.flags.writeable = False
    return found


def _counted(how: _Counting, fallback: Floats, rollback: Floats) -> SegmentCounts:
    """`counts_of` with these rates by position, or in one row if they are `constant`; shape (rows, laws)."""
    longest, tokens, count, code, constant, by_position = how
    rows = tokens if by_position else 1
    segment, again = np.zeros((rows, 2, longest + 1, count)), np.zeros((rows, longest, count))
    mass, late = np.zeros((tokens + 1, count)), np.zeros((tokens + 1, count))
    mass[0] = 1.0
    # If all positions have the same rates, the segments from the first `whole` positions are alike.
    whole = max(tokens - longest, 0) if constant else 0
    alike = _SegmentEnds.of(*(np.repeat(rates, longest, axis=0) for rates in (fallback, rollback))) if constant else None
    advance = None if alike is None else alike.advance(code=code)
    for start in range(tokens):
        if start < whole:
            mass[start + 1 : start + 2 + longest] += mass[start] * advance
            continue
        most = min(longest, tokens - 1 - start)
        ahead, here = slice(start, start + most), mass[start]
        ends = _SegmentEnds.of(fallback[ahead], rollback[ahead]) if alike is None else alike.cut(most)
        _count(segment, again, start if by_position else 0, ends, here[None], code=code)
        if most:
            mass[start + 1 : start + 2 + most] += here * ends.advance(code=code)
            if by_position:
                _count_late(late, start, ends, here[None], code=code)
    if alike is not None and whole:
        _count(segment, again, 0, alike, mass[:whole] if by_position else mass[:whole].sum(axis=0, keepdims=True), code=code)
        if by_position:
            _count_late(late, 0, alike, mass[:whole], code=code)
    late[max(tokens - 1, 0) :] = 0.0  # the last segment has no draft
    return SegmentCounts(segment, again, late[:tokens])


class _SegmentStarts(NamedTuple):
    """Where segments of laws with constant rates start; the tokens after a position do not matter."""

    ends: _SegmentEnds
    """Probabilities of a segment whose draft is not cut."""
    mass: Floats
    """Probability that a segment starts at each position; shape (positions, laws)."""
    late: Floats
    """Probability that one does in which the small model must read two tokens first."""

    @staticmethod
    def of(parameters: Parameters, tokens: int, laws: Sequence[Independent]) -> _SegmentStarts:
        """The segments that start at the first `tokens` positions."""
        longest, code = parameters.longest_draft, parameters.variant == "code"
        rates = (np.array([float(getattr(law, name)) for law in laws]) for name in ("fallback_rate", "rollback_rate"))
        ends = _SegmentEnds.of(*(np.repeat(each[None], longest, axis=0) for each in rates))
        advance, mass = ends.advance(code=code), np.zeros((tokens + longest + 1, len(laws)))
        mass[0] = 1.0
        for start in range(tokens):
            mass[start + 1 : start + 2 + longest] += mass[start] * advance
        late, mass = np.zeros((tokens + longest + 2, len(laws))), mass[:tokens]
        _count_late(late, 0, ends, mass, code=code)
        return _SegmentStarts(ends, mass, late[:tokens])

    def by_draft(self, lengths: NDArray[np.int64], weight: Floats | None = None) -> Floats:
        """Expected segments of decodings by the tokens that they may draft; shape (longest draft + 1, lengths, laws).

        Only the last segments are cut. `weight` are weights of the positions, 1 by default.
        """
        mass = self.mass if weight is None else self.mass * weight[:, None]
        longest = len(self.ends.back)
        before = np.concatenate([np.zeros((1, mass.shape[1])), mass.cumsum(axis=0)])
        left = lengths[:, None] - 1 - np.arange(longest)  # position from which each number of tokens may be drafted
        cut = np.where(left[..., None] >= 0, mass[np.maximum(left, 0)], 0.0)
        return np.concatenate([np.moveaxis(cut, 1, 0), before[np.maximum(lengths - longest, 0)][None]])


def counts_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], starts: _SegmentStarts) -> SegmentCounts:
    """`counts_of` decodings of each of several lengths under laws with constant rates, the laws of the first length first.

    >>> parameters, laws = Parameters(24, max_draft_length=1), [Independent(0.5, 0.25)]
    >>> found = counts_of_lengths(parameters, np.array([3, 8]), _SegmentStarts.of(parameters, 8, laws))
    >>> found.passes.tolist() == [float(counts_of(parameters, tokens, laws).passes[0]) for tokens in (3, 8)]
    True
    """
    ends, count = starts.ends, starts.by_draft(lengths)
    longer = count[:0:-1].cumsum(axis=0)[::-1]  # segments that may draft more than 0, 1, ... tokens
    segment = np.zeros((1, 2, *count.shape))
    segment[0, 0] = ends.written[:, None] * count
    segment[0, 1, :-1] = ends.unsure[:, None] * longer
    again = (ends.back[:, None] * longer if parameters.variant == "code" else np.zeros_like(longer))[None]
    columns = count.shape[1] * count.shape[2]
    segment, again = segment.reshape(*segment.shape[:3], columns), again.reshape(*again.shape[:2], columns)
    return SegmentCounts(segment, again, np.zeros((1, columns)))


def _count(segment: Floats, again: Floats, row: int, ends: _SegmentEnds, mass: Floats, *, code: bool) -> None:
    """Add segments of rows from this one on, which start with the probabilities `mass`, shape (rows, laws)."""
    most, rows = len(ends.back), slice(row, row + len(mass))
    segment[rows, 1, :most] += mass[:, None] * ends.unsure
    segment[rows, 0, most] += mass * ends.written[-1]
    if code:
        again[rows, :most] += mass[:, None] * ends.back


def _count_late(late: Floats, start: int, ends: _SegmentEnds, mass: Floats, *, code: bool) -> None:
    """Add what follows segments from positions from this one on, which start with the probabilities `mass`.

    The small model has not read the last token of a full draft, nor the first of two tokens of the large model.
    """
    most, rows = len(ends.back), len(mass)
    late[start + 1 + most : start + 1 + most + rows] += mass * ends.accepted[-1]
    for kept in range(most if code else 0):
        late[start + 2 + kept : start + 2 + kept + rows] += mass * ends.back[kept]


def moments_of_points(points: DecodingPoints[Parameters], price: SegmentPrices) -> round_moments.Moments:
    """Exact means of `segments` at points, with the prices of their costs; arrays of shape (points,).

    The times of the segments of a decoding add up, so that segments are counted once for all prices. The variance is nan except for
    records, each of which is replayed once.
    """
    replayed = np.array([isinstance(law, RecordedDecisions) for law in points.laws], dtype=np.bool_)
    found = np.empty((len(round_moments.Moments._fields), points.law.size))
    own = replayed[points.law]
    for at in np.flatnonzero(own).tolist():
        found[:, at] = _of_records(points.parameters, points.tokens, points.laws[points.law[at]], price.of(int(points.price[at])))
    if not own.all():
        counted = _of_counts if points.lengths is None else _of_lengths
        found[:, ~own] = counted(points.at(np.flatnonzero(~own)), price)
    return round_moments.Moments(*found)


def _of_counts(points: DecodingPoints[Parameters], price: SegmentPrices) -> Floats:
    """Rows of `Moments` at points with independent decisions."""
    tokens, longest, uniform = points.tokens, points.parameters.longest_draft, price.segment.ndim == 4
    segment, again = price.segment, price.rollback_pass[..., :longest]
    if not uniform:
        segment, again = np.moveaxis(segment, -2, 2), np.moveaxis(again, -2, 2)  # the position is the first axis of counts
    time, unit_time = (_in_columns((segment[each], again[each]), each, price.reread) for each in (0, 1))
    alike = np.array_equal(time, unit_time)
    # Arithmetic does not depend on the position, so that it needs the sums of counts over positions only.
    worked = _in_columns((segment[2], again[2]) if uniform else (segment[2, :, 0], again[2, :, 0]))
    found = np.empty((len(round_moments.Moments._fields), points.law.size))
    size = max(_COUNTS // (time.shape[1] if not uniform else tokens + time.shape[1]), 1)
    for start in range(0, len(points.laws), size):
        mine = np.flatnonzero((points.law >= start) & (points.law < start + size))
        law, cost = points.law[mine] - start, points.price[mine]
        counted = counts_of(points.parameters, tokens, points.laws[start : start + size], by_position=not uniform)
        rows = [each.reshape(-1, each.shape[-1]) for each in counted[: 2 if price.reread is None else 3]]
        counts = np.concatenate(rows) if len(rows) > 1 else rows[0]
        spent = linear(counts, time, law, cost)
        busy = spent if alike else linear(counts, unit_time, law, cost)
        total = counted.summed
        operations = linear(np.concatenate([each[0].reshape(-1, each.shape[-1]) for each in total[:2]]), worked, law, cost)
        found[:, mine] = spent, np.full(mine.size, np.nan), busy, operations, total.passes[law], total.drafted[law]
    return found


def _of_lengths(points: DecodingPoints[Parameters], price: SegmentPrices) -> Floats:
    """Rows of `Moments` at points of several lengths with constant rates."""
    parameters, tokens, drafting = points.parameters, points.tokens, points.parameters.exit_layer is None
    lengths, length = points.of_lengths()
    uniform, written = price.segment.ndim == 4, np.arange(parameters.longest_draft + 1)
    alike = np.array_equal(price.segment[0], price.segment[1]) and (price.reread is None or np.array_equal(*price.reread))
    found = np.empty((len(round_moments.Moments._fields), points.law.size))
    size = max(_COUNTS // (tokens + lengths.size * 3 * written.size), 1)
    for start in range(0, len(points.laws), size):
        mine = np.flatnonzero((points.law >= start) & (points.law < start + size))
        part = replace(points.at(mine), laws=points.laws[start : start + size], law=points.law[mine] - start)
        starts = _SegmentStarts.of(parameters, tokens, part.laws)
        counted = counts_of_lengths(parameters, lengths, starts)
        which = length[mine] * len(part.laws) + part.law
        if uniform:
            counts = np.concatenate([each[0].reshape(-1, each.shape[-1]) for each in counted[:2]])
            columns = (_in_columns((price.segment[each], price.rollback_pass[each, ..., :-1])) for each in (0, 1))
            spent, busy = (linear(counts, each, which, part.price) for each in columns)
        else:
            spent = _spent_of_lengths(starts, part, price, 0)
            busy = spent if alike else _spent_of_lengths(starts, part, price, 1)
        segment, again = counted.segment[0], counted.rollback_pass[0]
        read = (written + 1) @ segment.sum(axis=0) + (written[:-1] + 2) @ again
        runs = (written @ segment.sum(axis=0) + segment[1].sum(axis=0))[which]
        drafts = np.where(runs > 0, runs * part.operations("draft"), 0.0) if drafting else 0.0
        unknown = np.full(mine.size, np.nan)
        found[:, mine] = spent, unknown, busy, read[which] + drafts, counted.passes[which], counted.drafted[which]
    return found


def _spent_of_lengths(starts: _SegmentStarts, points: DecodingPoints[Parameters], price: SegmentPrices, number: int) -> Floats:
    """Expected time (`number` 0) or unit-time (1) at points, where times depend on the position.

    Sums over the starts of segments: those whose drafts are not cut, up to the longest decoding, and for each length its last ones.
    """
    assert points.lengths is not None
    tokens, longest, code = points.tokens, points.parameters.longest_draft, points.parameters.variant == "code"
    ends = starts.ends
    mass, late, unsure, written, back = (
        np.ascontiguousarray(each.T) for each in (starts.mass, starts.late, ends.unsure, ends.written, ends.back)
    )
    found = np.empty(points.law.size)
    for law, cost, own, pair in pair_blocks(points.law, points.price, max(_CELLS // (tokens * (longest + 1)), 1)):
        # By start and tokens that may be drafted: the draft ends early, or it is complete.
        early = unsure[law, None] * price.segment[number, cost, 1, :, :-1]
        if code:
            early += back[law, None] * price.rollback_pass[number, cost, :, :-1]
        each = written[law, None] * price.segment[number, cost, 0]
        each[..., 1:] += early.cumsum(axis=-1)
        each *= mass[law, :, None]
        until = np.zeros((law.size, tokens + 1))
        if tokens >= longest:
            until[:, longest:] = sums_before(each[:, : tokens - longest, longest])
        for most in range(min(longest, tokens)):
            until[:, most + 1 :] += each[:, : tokens - most, most]
        if price.reread is not None:  # the last segment has no draft
            until[:, 1:] += sums_before(late[law, :-1] * price.reread[number, cost, :-1])
        found[own] = until[pair, points.lengths[own]]
    return found


def _in_columns(each: Sequence[Floats], number: int = 0, reread: Floats | None = None) -> Floats:
    """Prices in the order of counts, with an axis of costs first; `reread[number]` has those of segments that read two tokens."""
    columns = [prices.reshape(len(prices), -1) for prices in each]
    return np.concatenate(columns if reread is None else [*columns, reread[number]], axis=1)


_COUNTS = 600_000
"""Counts that are computed together: a few MB."""
_CELLS = 100_000
"""Starts x drafts x pairs of laws and costs that are evaluated together."""


def _of_records(parameters: Parameters, tokens: int, law: RecordedDecisions, price: SegmentPrices) -> round_moments.Moments:
    law.cover(tokens - 1)
    decisions = np.ascontiguousarray(law.records[:, : tokens - 1].T)
    return round_moments.mean_of(segments(parameters, tokens, iter([decisions]), price, len(law.records)))


def work_of_laws(parameters: Parameters, tokens: int, laws: Sequence[DecisionLaw]) -> Work | None:
    """Expected work of the passes of both models under each of several laws, as arrays of shape (laws,); None if one is of records.

    With an exit layer all passes are the target's: single-token passes through the first layers, one pass through the others.

    >>> found = work_of_laws(Parameters(24, draft_layers=6), 10, [Independent(1.0, 0.0)]).at(0).by_model  # always unsure
    >>> found["target"].passes, found["draft"].passes  # the last token needs no draft
    (10.0, 9.0)
    """
    known = [law for law in laws if isinstance(law, Independent)]
    if len(known) < len(laws):
        return None
    alike = work_of_lengths(parameters, np.array([tokens]), laws)
    if alike is not None:
        return alike.at((slice(None), 0))
    size = max(_COUNTS // (tokens * 3 * (parameters.longest_draft + 1)), 1)
    parts = [_sums_at_positions(parameters, counts_of(parameters, tokens, known[at : at + size], by_position=True))
             for at in range(0, len(known), size)]
    return _work(parameters, np.concatenate(parts, axis=-1), drafts=tokens > 1)


def work_of_lengths(parameters: Parameters, lengths: NDArray[np.int64], laws: Sequence[DecisionLaw]) -> Work | None:
    """`work_of_laws` of several lengths, which rise; shape (laws, lengths). None: not all rates are the same at all positions.

    >>> found = work_of_lengths(Parameters(24, draft_layers=6), np.array([1, 10]), [Independent(1.0, 0.0)])
    >>> found.by_model["draft"].passes.tolist()
    [[0.0, 9.0]]
    """
    known = [law for law in laws if isinstance(law, Independent) and law.constant]
    if len(known) < len(laws):
        return None
    starts, most = _SegmentStarts.of(parameters, int(lengths[-1]), known), np.arange(parameters.longest_draft + 1)
    # One segment that may draft each number of tokens; what a pass reads rises with its position.
    segment = np.zeros((most.size, 2, most.size, len(known)))
    again = np.zeros((most.size, most.size - 1, len(known)))
    for drafts in most.tolist():
        _count(segment, again, drafts, starts.ends.cut(drafts), np.ones((1, len(known))), code=parameters.variant == "code")
    first, second = (_sums(parameters, segment, again, np.full(most.size, place), most) for place in (0.0, 1.0))
    place = np.arange(float(lengths[-1]))
    sums = np.einsum("mvdl,dnl->mvln", first, starts.by_draft(lengths))
    sums += np.einsum("mvdl,dnl->mvln", second - first, starts.by_draft(lengths, place))
    if parameters.exit_layer is None:  # the last segment has no draft
        for row, weights in ((1, starts.late), (2, starts.late * place[:, None])):
            sums[1, row] += sums_before(weights.T)[:, lengths - 1]
    return _work(parameters, sums, drafts=bool(lengths[-1] > 1))


def _work(parameters: Parameters, sums: Floats, *, drafts: bool) -> Work:
    """Work from `_sums` over all segments; without passes of the small model if there are no `drafts`."""
    (large, small), early = sums, parameters.exit_layer
    if early is not None:
        first, others = _totals(early, small)._replace(head_runs=small[4]), _totals(parameters.layers - early, large)
        return Work({"target": Totals(*(one + other for one, other in zip(first, others, strict=True)))})
    found = {"target": _totals(parameters.layers, large)}
    return Work(found | {"draft": _totals(parameters.draft_layers, small)} if drafts else found)


def _sums_at_positions(parameters: Parameters, counts: SegmentCounts) -> Floats:
    """`_sums` over the segments from all positions, and what the small model also reads."""
    tokens = len(counts.segment)
    place = np.arange(float(tokens))
    most = np.minimum(parameters.longest_draft, tokens - 1 - place)
    found = np.asarray(_sums(parameters, counts.segment, counts.rollback_pass, place, most).sum(axis=2))
    if parameters.exit_layer is None:
        found[1, 1] += counts.reread.sum(axis=0)
        found[1, 2] += place @ counts.reread
    return found


def _sums(parameters: Parameters, segment: Floats, again: Floats, place: Floats, most: NDArray[Any]) -> Floats:
    """Passes, tokens, attended positions, rows read and heads of the large and of the small model; shape (2, 5, rows, laws).

    A row has the segments that start at a position, `place`, and may draft `most` tokens, and the passes after their rollbacks.
    """
    longest, place = parameters.longest_draft, place[:, None]
    drafted, kept = np.arange(longest + 1.0), np.arange(float(longest))
    segments_ = segment.sum(axis=1)
    large = _wide(place, drafted + 1, segments_, drafted + 1) + _wide(place, kept + 2, again, np.ones(longest))
    asked = np.minimum(drafted + 1, most[:, None])
    runs = asked if parameters.exit_layer is None else drafted + 1 + 0 * place  # the last token of a full draft runs there too
    seen = place * runs + runs * (runs + 1) / 2
    small = [np.einsum("prl,pr->pl", segments_, each) for each in (runs, runs, seen, seen, asked)]
    return np.array([large, small])


def _wide(place: Floats, width: Floats, mass: Floats, heads: Floats) -> Floats:
    """Passes of each row: their number, tokens, attended positions, rows read and heads, weighted by `mass`."""
    attended, one = place * width + width * (width + 1) / 2, np.ones_like(width)
    each = (np.broadcast_to(values, attended.shape) for values in (one, width, attended, place + width, heads))
    return np.array([np.einsum("prl,pr->pl", mass, values) for values in each])


def _totals(layers: int, sums: Floats) -> Totals:
    passes, tokens, attended, read, heads = sums
    return Totals(passes, layers * passes, layers * tokens, layers * attended, layers * read, head_runs=passes, heads=heads)
