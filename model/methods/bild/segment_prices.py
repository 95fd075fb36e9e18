"""Passes of the segments of Big Little Decoder, and the prices of segments."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.costs.step_costs import ALL_LAYERS, PassShape, StepCosts
from model.methods.bild.algorithm import Parameters
from model.methods.rounds.prices_of_rounds import reread_times, sums_from, times_by_width
from model.steps import LayerSpan

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class SegmentPasses:
    """Shapes of the passes of a segment."""

    parameters: Parameters

    @property
    def draft(self) -> PassShape:
        """Pass of the small model over one token; with an exit layer through the first layers of the large one."""
        early = self.parameters.exit_layer
        return PassShape(ALL_LAYERS, "draft", heads=1) if early is None else PassShape(LayerSpan(0, early), heads=1)

    @property
    def reread(self) -> PassShape:
        """Pass of a separate small model that also reads the token before."""
        return self.draft._replace(width=2)

    @property
    def last(self) -> PassShape:
        """Pass of the last token of a full draft through the first layers, without a head."""
        return self.draft._replace(heads=0)

    def verify(self, width: Any) -> PassShape:
        """Pass of the large model over this number of tokens, or each of an array; with an exit layer through the other layers."""
        layers, early = self.parameters.layers, self.parameters.exit_layer
        return PassShape(LayerSpan(early or 0, layers), width=width, heads=width, joins=early is not None)

    def again(self, width: Any) -> PassShape:
        """Pass of the large model after a rollback, in the variant `code`."""
        return PassShape(LayerSpan(0, self.parameters.layers), width=width, heads=1)


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
    longest, passes = parameters.longest_draft, SegmentPasses(parameters)
    widths, written = np.arange(1, parameters.largest_pass + 1), np.arange(longest + 1)
    runs = written + np.array([[0], [1]])
    axes = (...,) + (None,) * (2 if cost.uniform else 3)  # of one number for each of several costs
    small = _times_of_runs(cost, passes.draft, runs, tokens)
    large = times_by_width(cost, passes.verify, widths, tokens)
    large = large[..., None, :] if cost.uniform else large[..., None, :, :]
    reread = None
    if parameters.exit_layer is None:
        time, busy = small + large, small * np.asarray(cost.draft_devices)[axes] + large
        if not cost.uniform:
            extra = reread_times(cost, tokens)
            reread = np.stack([extra, extra * np.asarray(cost.draft_devices)[..., None]])
        moved = 2 * np.asarray(cost.link)[axes] * _over(runs > 0, cost) if parameters.placement == "separate" else 0.0
        drafting = np.where(runs > 0, runs * np.asarray(cost.operations("draft"))[..., None, None], 0.0)
        operations = _over(1 + written + drafting, cost)
    else:
        last = cost.times(passes.last, 0 if cost.uniform else np.arange(tokens)[:, None] + written)
        full = np.array([[1.0], [0.0]])  # the last token of a full draft also runs through the first layers
        last = last[..., None, None] if cost.uniform else last[..., None, :, :]
        time = busy = small + large + last * _over(full, cost)
        moved, operations = 0.0, 1.0 + written
    back = times_by_width(cost, passes.again, written[:-1] + 2, tokens)
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


def busy_throughout(parameters: Parameters, cost: StepCosts, tokens: int) -> NDArray[np.bool_]:
    """True for each of several costs at which all segments take as much unit-time as time."""
    devices, link = np.asarray(cost.draft_devices), np.asarray(cost.link)
    if parameters.exit_layer is not None:
        return np.ones(link.shape, dtype=np.bool_)
    alike = devices == 1
    if not alike.all():
        at = np.arange(1 if cost.uniform else tokens + parameters.longest_draft)
        alike = alike | (cost.times(SegmentPasses(parameters).draft, at) == 0).all(axis=-1)
    return np.asarray(alike & (link == 0) if parameters.placement == "separate" else alike)
