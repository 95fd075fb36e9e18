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

from model.costs.step_costs import PassShape
from model.interpret.account import Totals, Work
from model.interpret.simulated_answers import UNLIKELY, UNSURE
from model.methods.bild.algorithm import Parameters
from model.methods.bild.segment_prices import SegmentPasses, SegmentPrices, prices
from model.methods.bild.threshold_decisions import DecisionLaw, Digits, Independent, RecordedDecisions
from model.methods.prediction import DecodingPoints, pair_blocks
from model.methods.rounds import round_moments
from model.methods.rounds.prices_of_rounds import reread_times, sums_before, times_by_width
from model.methods.rounds.round_walks import Tally

Floats = NDArray[np.float64]


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


class PassCounts(NamedTuple):
    """Expected numbers of passes by shape, each of shape (positions, laws); a single position has the sum of all.

    A price is that of one pass at its position, so that counts are sums over all else that a segment has.
    """

    draft: list[tuple[PassShape, Floats]]
    """Passes of the small model, or through the first layers."""
    large: list[tuple[PassShape, Floats]]
    drafting: Floats
    """Segments with passes of the small model by law."""

    @staticmethod
    def of(parameters: Parameters, counts: SegmentCounts) -> PassCounts:
        """Passes of these segments, by the positions that these have.

        >>> parameters = Parameters(24, max_draft_length=1)
        >>> found = PassCounts.of(parameters, counts_of(parameters, 3, [Independent(0.5, 0.0)], by_position=True))
        >>> [(shape.width, count[:, 0].tolist()) for shape, count in found.draft]
        [(1, [1.0, 0.5, 0.0]), (2, [0.0, 0.0, 0.0])]
        """
        shapes, (segment, again, reread) = SegmentPasses(parameters), counts
        full, stopped = segment[:, 0], segment[:, 1]
        asked = (full[:, 1:] + stopped[:, :-1])[:, ::-1].cumsum(axis=1)[:, ::-1]  # 1, 2, ... passes of the small model or more
        single, draft = _moved(asked), []
        if parameters.exit_layer is not None:
            draft = [(shapes.draft, single), (shapes.last, _moved(full))]
        elif len(segment) == 1:
            draft = [(shapes.draft, single)]
        else:
            before = np.concatenate([reread[1:], np.zeros_like(reread[:1])])  # a wider pass begins at the position before
            draft = [(shapes.draft, single - reread), (shapes.reread, before)]
        large = [(shapes.verify(width), count) for width, count in enumerate(np.moveaxis(full + stopped, 1, 0), 1)]
        if parameters.variant == "code":
            large += [(shapes.again(width), count) for width, count in enumerate(np.moveaxis(again, 1, 0), 2)]
        return PassCounts(draft, large, asked[:, 0].sum(axis=0))


def _moved(counts: Floats) -> Floats:
    """Passes at each position from those 0, 1, ... positions after the start of a segment; shape (positions, laws)."""
    found = np.zeros((len(counts), counts.shape[2]))
    if len(counts) == 1:
        return np.asarray(counts.sum(axis=1))
    for after in range(min(counts.shape[1], len(counts))):
        found[after:] += counts[: len(counts) - after, after]
    return found


def moments_of_points(points: DecodingPoints[Parameters]) -> round_moments.Moments:
    """Exact means of `segments` at points; arrays of shape (points,).

    The times of the passes of a decoding add up, so that they are counted once for all costs. The variance is nan except for
    records, each of which is replayed once.
    """
    replayed = np.array([isinstance(law, RecordedDecisions) for law in points.laws], dtype=np.bool_)
    found = np.empty((len(round_moments.Moments._fields), points.law.size))
    own = replayed[points.law]
    if own.any():
        price = prices(points.parameters, points.cost, points.tokens)
        for at in np.flatnonzero(own).tolist():
            law = points.laws[points.law[at]]
            found[:, at] = _of_records(points.parameters, points.tokens, law, price.of(int(points.price[at])))
    if not own.all():
        counted = _of_counts if points.lengths is None else _of_lengths
        found[:, ~own] = counted(points.at(np.flatnonzero(~own)))
    return round_moments.Moments(*found)


def _of_counts(points: DecodingPoints[Parameters]) -> Floats:
    """Rows of `Moments` at points with independent decisions."""
    parameters, tokens, uniform = points.parameters, points.tokens, points.cost.uniform
    found = np.empty((len(round_moments.Moments._fields), points.law.size))
    size = max(_COUNTS // (3 * (parameters.longest_draft + 1) * (1 if uniform else tokens) + tokens), 1)
    for start in range(0, len(points.laws), size):
        mine = np.flatnonzero((points.law >= start) & (points.law < start + size))
        part = replace(points.at(mine), laws=points.laws[start : start + size], law=points.law[mine] - start)
        counted = counts_of(parameters, tokens, part.laws, by_position=not uniform)
        passes = PassCounts.of(parameters, counted)
        times = part.time_of(passes.draft), part.time_of(passes.large)
        found[:, mine] = _moments(part, counted.summed, part.law, *times, passes.drafting[part.law])
    return found


def _of_lengths(points: DecodingPoints[Parameters]) -> Floats:
    """Rows of `Moments` at points of several lengths with constant rates."""
    parameters, tokens = points.parameters, points.tokens
    lengths, length = points.of_lengths()
    found = np.empty((len(round_moments.Moments._fields), points.law.size))
    size = max(_COUNTS // (tokens + lengths.size * 3 * (parameters.longest_draft + 1)), 1)
    for start in range(0, len(points.laws), size):
        mine = np.flatnonzero((points.law >= start) & (points.law < start + size))
        part = replace(points.at(mine), laws=points.laws[start : start + size], law=points.law[mine] - start)
        starts = _SegmentStarts.of(parameters, tokens, part.laws)
        counted = counts_of_lengths(parameters, lengths, starts)
        passes, which = PassCounts.of(parameters, counted), length[mine] * len(part.laws) + part.law
        if points.cost.uniform:
            each = replace(part, law=which, lengths=None)
            times = each.time_of(passes.draft), each.time_of(passes.large)
        else:
            times = _times_of_lengths(starts, part)
        found[:, mine] = _moments(part, counted, which, *times, passes.drafting[which])
    return found


def _moments(
    points: DecodingPoints[Parameters], counts: SegmentCounts, law: NDArray[np.intp], draft: Floats, large: Floats, drafting: Floats
) -> Floats:  # fmt: skip
    """Rows of `Moments` from the time of passes of both models and the segments with drafts, at each point.

    `law` is the index of each point's segments in `counts`, which are without positions.
    """
    parameters, (segment, again) = points.parameters, (each[0] for each in counts[:2])
    written, time, busy = np.arange(parameters.longest_draft + 1), draft + large, draft + large
    runs: Any = 0.0
    if parameters.exit_layer is None:
        busy = draft * np.asarray(points.cost.draft_devices)[points.price] + large
        if parameters.placement == "separate":
            time = time + 2 * np.asarray(points.cost.link)[points.price] * drafting
        runs = (written @ segment.sum(axis=0) + segment[1].sum(axis=0))[law]
        runs = np.where(runs > 0, runs * points.operations("draft"), 0.0)
    read = ((written + 1) @ segment.sum(axis=0) + (written[:-1] + 2) @ again)[law]
    unknown = np.full(law.size, np.nan)
    return np.array([time, unknown, busy, read + runs, counts.passes[law], counts.drafted[law]])


def _times_of_lengths(starts: _SegmentStarts, points: DecodingPoints[Parameters]) -> tuple[Floats, Floats]:
    """Expected time of passes of the small and of the large model at points, where times depend on the position.

    Sums over the starts of segments: those whose drafts are not cut, up to the longest decoding, and for each length its last ones.
    """
    assert points.lengths is not None
    parameters, tokens, cost = points.parameters, points.tokens, points.cost
    longest, code, shapes = parameters.longest_draft, parameters.variant == "code", SegmentPasses(parameters)
    ends, early = starts.ends, parameters.exit_layer is not None
    mass, late, unsure, written, back = (
        np.ascontiguousarray(each.T) for each in (starts.mass, starts.late, ends.unsure, ends.written, ends.back)
    )
    drafts = cost.times(shapes.draft, np.arange(tokens + longest))
    verify = times_by_width(cost, shapes.verify, np.arange(1, longest + 2), tokens)
    again = times_by_width(cost, shapes.again, np.arange(2, longest + 2), tokens) if code else None
    last = cost.times(shapes.last, np.arange(tokens + longest)) if early else None
    reread = None if early else reread_times(cost, tokens)
    found = np.empty((2, points.law.size))
    for law, price, own, pair in pair_blocks(points.law, points.price, max(_CELLS // (tokens * (longest + 1)), 1)):
        # By start and tokens that may be drafted: the passes until a draft ends early, and those of a complete draft.
        small, large = np.zeros((2, law.size, tokens, longest + 1))
        small[..., 1:] = (_windows(drafts[price], longest, tokens) * written[law, None, :-1]).cumsum(axis=-1)
        if last is not None:
            small += _windows(last[price], longest + 1, tokens) * written[law, None]
        ended = unsure[law, None] * verify[price, :, :-1]
        if again is not None:
            ended += back[law, None] * again[price]
        np.cumsum(ended, axis=-1, out=large[..., 1:])
        large += written[law, None] * verify[price]
        until = [_until(each * mass[law, :, None]) for each in (small, large)]
        if reread is not None:  # the last segment has no draft
            until[0][:, 1:] += sums_before(late[law, :-1] * reread[price, :-1])
        found[:, own] = [each[pair, points.lengths[own]] for each in until]
    return found[0], found[1]


def _windows(times: Floats, size: int, tokens: int) -> Floats:
    """Times of passes 0, 1, ..., `size` - 1 positions after each position; shape (..., tokens, size)."""
    return np.lib.stride_tricks.sliding_window_view(times, size, axis=-1)[..., :tokens, :]


def _until(times: Floats) -> Floats:
    """Times of decodings of 0, 1, ... tokens; shape (pairs, tokens + 1).

    `times` has those of segments from each position by the tokens that they may draft, which only the last ones cut.
    """
    tokens, longest = times.shape[1], times.shape[2] - 1
    found = np.zeros((len(times), tokens + 1))
    if tokens >= longest:
        found[:, longest:] = sums_before(times[:, : tokens - longest, longest])
    for most in range(min(longest, tokens)):
        found[:, most + 1 :] += times[:, : tokens - most, most]
    return found


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
