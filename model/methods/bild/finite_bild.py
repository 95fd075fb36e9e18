"""Big Little Decoder for a given number of tokens, with decisions by output position: simulation and exact expectations.

A segment that starts at output position s drafts at most min(G, l - 1 - s) tokens, so that the large model emits the last token.
The decision on the small model's token is drawn once per position (`model.methods.bild.threshold_decisions`): positions that are
drafted again after a rollback keep their decisions. The start of a segment depends only on earlier positions, its cost only on
later ones, so means by position are exact. Costs of successive segments are dependent, so there is no variance here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.interpret.account import Totals, Work
from model.interpret.simulated_answers import UNLIKELY, UNSURE
from model.methods import rounds
from model.methods.bild.algorithm import Parameters
from model.methods.bild.threshold_decisions import DecisionLaw, Digits, Independent, RecordedDecisions
from model.methods.rounds import Tally
from model.steps import LayerSpan

Floats = NDArray[np.float64]


class SegmentPrices(NamedTuple):
    """Time, unit-time and arithmetic of segments (`segment`) and of the pass after a rollback (`rollback_pass`).

    `segment` has axes (price, unsure, drafted tokens), `rollback_pass` (price, kept tokens). If times depend on the position, there
    is an additional axis before the last: the start position of the segment.
    """

    segment: Floats
    rollback_pass: Floats
    reread: Floats | None = None
    """Additional time and unit-time of a segment, by its start position, if the small model must read two tokens first.

    Shape (2, positions); None if that takes no longer."""

    @property
    def uniform(self) -> bool:
        """True if a segment takes the same time at every position."""
        return self.rollback_pass.ndim == 2

    def at(self, position: int) -> tuple[Floats, Floats]:
        """`segment` and `rollback_pass` of segments that start at a position."""
        if self.uniform:
            return self.segment, self.rollback_pass
        return self.segment[:, :, position], self.rollback_pass[:, position]


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
    reread = None
    if parameters.exit_layer is None:
        small = _times_of_runs(cost, PassShape(ALL_LAYERS, "draft", heads=1), runs, tokens)
        large = rounds.times_by_width(cost, lambda width: PassShape(whole, width=width, heads=width), widths, tokens)
        time, busy = (small * share + large for share in (1.0, cost.draft_devices))
        if not cost.uniform:
            reread = np.outer([1.0, cost.draft_devices], rounds.reread_times(cost, tokens))
        moved = 2 * cost.link * (runs > 0) if parameters.placement == "separate" else np.zeros(runs.shape)
        operations = 1 + written + np.where(runs > 0, runs * cost.operations("draft"), 0.0)
    else:
        first = LayerSpan(0, parameters.exit_layer)
        rest = LayerSpan(parameters.exit_layer, layers)
        small = _times_of_runs(cost, PassShape(first, heads=1), runs, tokens)
        large = rounds.times_by_width(cost, lambda width: PassShape(rest, width=width, heads=width, joins=True), widths, tokens)
        small[0] += cost.times(PassShape(first), 0 if cost.uniform else np.arange(tokens)[:, None] + written)
        time = busy = small + large
        moved, operations = np.zeros(runs.shape), np.broadcast_to(1 + written, runs.shape)
    kept = written[:-1]
    back = rounds.times_by_width(cost, lambda width: PassShape(whole, width=width, heads=1), kept + 2, tokens)
    again = np.concatenate([back, np.full((*back.shape[:-1], 1), np.nan)], axis=-1)
    if not cost.uniform:
        moved, operations = moved[:, None], operations[:, None]
    segment, more = np.broadcast_arrays(time + moved, busy, operations), np.broadcast_arrays(again, again, written + 2.0)
    return SegmentPrices(np.array(segment), np.array(more), reread)


def _times_of_runs(cost: StepCosts, shape: PassShape, runs: NDArray[np.int64], tokens: int) -> Floats:
    """Time of `runs` successive passes of the small model, from each position on if times depend on the position."""
    if shape.role == "draft":
        cost.require("draft")
    if cost.uniform:
        return np.asarray(runs * cost.times(shape))
    most = int(runs.max())
    return np.moveaxis(rounds.sums_from(cost.times(shape, np.arange(tokens + most)), most, tokens)[:, runs], 0, 1)


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


def moments(parameters: Parameters, tokens: int, law: DecisionLaw, price: SegmentPrices) -> rounds.Moments:
    """Exact means of `segments`; the variance is nan except for records, each of which is replayed once.

    >>> flat = SegmentPrices(np.ones((3, 2, 4)), np.ones((3, 4)))
    >>> found = moments(Parameters(24, max_draft_length=3), 128, Independent(0.0, 0.21), flat)
    >>> round(found.rounds, 3)  # without fallbacks: speculative decoding with gamma = 3 and alpha = 0.79
    44.446
    """
    if isinstance(law, RecordedDecisions):
        law.cover(tokens - 1)
        decisions = np.ascontiguousarray(law.records[:, : tokens - 1].T)
        return rounds.mean_of(segments(parameters, tokens, iter([decisions]), price, len(law.records)))
    totals, passes, drafted = np.zeros(3), 0.0, 0.0
    for position, each in enumerate(starts(parameters, tokens, law)):
        most = len(each.unsure)
        own, again = price.at(position)
        segment = own[:, 1, :most] @ each.unsure + own[:, 0, most] * each.full_draft
        totals += each.mass * (segment + again[:, :most] @ each.rollback_pass)
        if price.reread is not None and most:
            totals[:2] += each.reread * price.reread[:, position]
        passes += each.mass * (1 + each.rollback_pass.sum())
        drafted += each.mass * each.drafted
    return rounds.Moments(float(totals[0]), float("nan"), float(totals[1]), float(totals[2]), float(passes), float(drafted))


class SegmentStart(NamedTuple):
    """Probabilities of a segment at a position; `mass` is the probability that a segment starts there."""

    mass: float
    reread: float
    """Probability that a segment starts there and the small model must read two tokens first."""
    unsure: Floats
    """Probabilities of a fallback after 0, 1, ... drafted tokens."""
    full_draft: float
    """Probability of a full draft."""
    drafted: float
    """Expected drafted tokens."""
    rollback_pass: Floats
    """Probabilities of a rollback after 0, 1, ... accepted tokens with another pass of the large model."""


def starts(parameters: Parameters, tokens: int, law: Independent) -> Iterator[SegmentStart]:
    """Distribution of segments, position by position: a start depends only on earlier decisions."""
    fallback, rollback = law.probabilities(tokens - 1)
    mass, late = np.zeros((2, tokens + 1))
    mass[0] = 1.0
    code = parameters.variant == "code"
    for start in range(tokens):
        most = min(parameters.longest_draft, tokens - 1 - start)
        here = slice(start, start + most)
        f, r = fallback[here], rollback[here]
        written = np.concatenate([[1.0], np.cumprod(1 - f)])  # at least 0, 1, ... tokens drafted
        stays = np.concatenate([[1.0], np.cumprod((1 - f) * (1 - r))])
        back = stays[:-1] * (1 - f) * r  # 0, 1, ... accepted, and the next rolled back
        again = back if code else np.zeros_like(back)
        yield SegmentStart(mass[start], late[start], written[:-1] * f, written[-1], written[1:].sum(), again)
        mass[start + 1 : start + 1 + most] += mass[start] * stays[:-1] * f
        mass[start + 1 + code : start + 1 + code + most] += mass[start] * back
        mass[start + 1 + most] += mass[start] * stays[-1]
        # The small model has not read the last token of a full draft, nor the first of two tokens of the large model.
        late[start + 1 + most] += mass[start] * stays[-1]
        late[start + 2 : start + 2 + most] += mass[start] * again


def work(parameters: Parameters, tokens: int, law: DecisionLaw) -> Work | None:
    """Expected work of the passes of both models; None for records.

    With an exit layer all passes are the target's: single-token passes through the first layers, one pass through the others.

    >>> found = work(Parameters(24, draft_layers=6), 10, Independent(1.0, 0.0)).by_model  # always unsure
    >>> found["target"].passes, found["draft"].passes  # the last token needs no draft
    (10.0, 9.0)
    """
    if not isinstance(law, Independent):
        return None
    early = parameters.exit_layer
    large, small = np.zeros((2, 5))  # passes, tokens, positions attended to and read; heads
    for place, each in enumerate(starts(parameters, tokens, law)):
        most = len(each.unsure)
        written = np.append(each.unsure, each.full_draft)
        drafted = np.arange(most + 1.0)
        large += each.mass * _wide(place, drafted + 1, written, heads=drafted + 1)
        kept = np.arange(float(most))
        large += each.mass * _wide(place, kept + 2, each.rollback_pass, heads=np.ones(most))
        asked = np.minimum(drafted + 1, most)
        runs = asked if early is None else drafted + 1  # the last token of a full draft runs through the first layers too
        seen = place * runs + runs * (runs + 1) / 2
        small += each.mass * np.array([written @ runs, written @ runs, written @ seen, written @ seen, written @ asked])
        if early is None:
            small += each.reread * (most > 0) * np.array([0.0, 1.0, place, 0.0, 0.0])
    if early is not None:
        first, others = _totals(early, small)._replace(head_runs=float(small[4])), _totals(parameters.layers - early, large)
        return Work({"target": Totals(*(one + other for one, other in zip(first, others, strict=True)))})
    found = {"target": _totals(parameters.layers, large)}
    return Work(found | {"draft": _totals(parameters.draft_layers, small)} if tokens > 1 else found)


def _wide(place: int, width: Floats, mass: Floats, heads: Floats) -> Floats:
    """Expected passes from a position: their number, tokens, attended positions, rows read and heads, weighted by `mass`."""
    attended = place * width + width * (width + 1) / 2
    return np.array([mass.sum(), mass @ width, mass @ attended, mass @ (place + width), mass @ heads])


def _totals(layers: int, sums: Floats) -> Totals:
    passes, tokens, attended, read, heads = map(float, sums)
    return Totals(passes, layers * passes, layers * tokens, layers * attended, layers * read, head_runs=passes, heads=heads)
