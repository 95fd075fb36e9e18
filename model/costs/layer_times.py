"""Costs of steps in layer-times: one unit of time per layer of the target, as the papers assume, plus optional overheads."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import accumulate

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.costs.step_costs import DISPATCH_LAWS, OPERATIONS, RATIOS, PassShape, StepCosts
from model.costs.width_curve import WidthCurve, as_curve
from model.steps import Forward

Floats = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class LayerTimeCosts:
    """Options of costs in layer-times: the papers assume one unit per layer; all overheads default to 0.

    Parameters
    ----------
    layer_times
        One time per layer, if layers differ [layer-times].
    early_head, final_head
        Computing the logits at the exit layer and at the last layer [layer-times].
    dispatch, dispatch_per_process, dispatch_law
        Starting k sub-processes occupies the main process's unit for dispatch + dispatch_per_process * k (`linear`), or
        dispatch + dispatch_per_process * log2(k + 1) (`tree`) [layer-times].
    link
        Delay between the end of the dispatch and the start of a sub-process [layer-times].
    promotion
        Adopting a sub-process's hidden state and KV cache rows [layer-times].
    propagation
        Computing the keys and values of a layer that a token skipped, from the hidden state at its exit [layer-times].
    state_check
        Comparing the hidden states before and after a layer, by which some early-exit methods decide [layer-times].
    cost_ratio, medium_cost_ratio
        Time of a whole pass of the draft model, and of the medium model of a hierarchy, relative to a pass of the target [-].
    operations_ratio, medium_operations_ratio
        Operations per token of the draft model, and of the medium model, relative to the target [-].
    verify_cost
        Time of a pass of the target by its width, as pairs (width, time) in any unit. Default: the width does not matter, because
        reading the weights limits a pass. In a batch, the width counts the tokens of all sequences of the pass, and passes of the
        draft model slow down by the same factor as a pass of the target over one token per sequence.
    """

    layer_times: tuple[float, ...] | None = None
    early_head: float = 0.0
    final_head: float = 0.0
    dispatch: float = 0.0
    dispatch_per_process: float = 0.0
    dispatch_law: str = "linear"
    link: float = 0.0
    promotion: float = 0.0
    propagation: float = 0.0
    state_check: float = 0.0
    cost_ratio: float | None = None
    medium_cost_ratio: float | None = None
    operations_ratio: float | None = None
    medium_operations_ratio: float | None = None
    verify_cost: tuple[tuple[int, float], ...] | None = None

    def of(self, layers: int) -> UnitCost:
        """Costs of a model with `layers` layers."""
        return UnitCost(layers, **{name: getattr(self, name) for name in _OPTIONS})


_OPTIONS = tuple(field.name for field in fields(LayerTimeCosts))
OVERHEADS = ("dispatch", "dispatch_per_process", "link", "promotion", "draft_devices")
"""Numbers that `passes_only` sets to 0."""
TIMES = tuple(field.name for field in fields(LayerTimeCosts) if field.type == "float")
"""Options that are times: numbers of at least 0."""


@dataclass(frozen=True)
class UnitCost(LayerTimeCosts, StepCosts):
    """Costs in layer-times of a target model with `layers` layers, the same at every position.

    `draft_devices` is the number of devices of a unit that runs only a smaller model, relative to a unit of the target (which may
    have several devices): the weight of its passes in unit-time [-].
    """

    layers: int
    draft_devices: float = 1.0

    def __post_init__(self) -> None:
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        for name in (*TIMES, "draft_devices"):
            checks.number(name, getattr(self, name), 0)
        for name in (*RATIOS.values(), *OPERATIONS.values()):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), 0)
        checks.one_of("dispatch_law", self.dispatch_law, DISPATCH_LAWS)
        if self.verify_cost is not None:
            if not isinstance(self.verify_cost, tuple | list):
                raise ParameterError(f"verify_cost must be pairs of a width and a time, got {checks.shown(self.verify_cost)}")
            self.curve  # noqa: B018  building the curve checks it
        if self.layer_times is not None:
            if len(self.layer_times) != self.layers:
                raise ParameterError(
                    f"layer_times must have one time for each of layers={self.layers}, got {len(self.layer_times)}"
                )
            for index, time in enumerate(self.layer_times):
                checks.number(f"layer_times[{index}]", time, 0)
            if not sum(self.layer_times) > 0:
                raise ParameterError("layer_times must not all be zero; leave them out for layers of one time unit each")

    @cached_property
    def depths(self) -> tuple[float, ...]:
        """Cumulative times: `depths[n]` is the time of layers [0, n)."""
        return tuple(accumulate(self.layer_times or (1.0,) * self.layers, initial=0.0))

    def span(self, first: int, last: int, gaps: Iterable[tuple[int, int]] = ()) -> float:
        """Time of layers [first, last) except those in `gaps`, without a head.

        >>> UnitCost(4).span(0, 4), UnitCost(4).span(0, 4, [(0, 1)])
        (4.0, 3.0)
        """
        return self.depths[last] - self.depths[first] - sum(self.depths[stop] - self.depths[start] for start, stop in gaps)

    def head(self, layer: int) -> float:
        """Time of the logits after `layer` layers."""
        return self.final_head if layer == self.layers else self.early_head

    @cached_property
    def curve(self) -> WidthCurve | None:
        """Time of a pass of the target by width; None without `verify_cost`."""
        return None if self.verify_cost is None else as_curve(self.verify_cost)

    @cached_property
    def target_pass(self) -> float:
        """Time of a whole pass of the target over one token, with logits: a step of plain decoding."""
        return self.depths[-1] + self.final_head

    def ratio(self, role: str) -> float | None:
        """Time of a whole pass of a smaller model relative to a pass of the target [-]; None without a ratio for its role."""
        ratio: float | None = getattr(self, RATIOS[role])
        return ratio

    def pass_time(self, role: str) -> float | None:
        """Time of a whole pass of a smaller model, with logits; None without a ratio for its role."""
        ratio = getattr(self, RATIOS[role]) if role in RATIOS else None
        return None if ratio is None else ratio * self.target_pass

    def operations(self, role: str) -> float:
        """Operations per token in a pass of this model relative to the target [-]; nan without a ratio for its role."""
        ratio = 1.0 if role == "target" else getattr(self, OPERATIONS[role])
        return float("nan") if ratio is None else float(ratio)

    def of_batch(self, sequences: int, max_width: int = 1) -> UnitCost:
        """Costs of a full batch: the time of a pass is that of a pass over `sequences` times as many tokens.

        `max_width` is the largest width that will be used, in tokens per sequence; `verify_cost` must reach `sequences` times that.

        >>> cost = UnitCost(4, verify_cost=((1, 1.0), (2, 1.25), (8, 2.0)), cost_ratio=0.1).of_batch(2, max_width=4)
        >>> cost.target_pass, cost.slowdown(4) * cost.target_pass, cost.pass_time("draft")
        (5.0, 8.0, 0.5)
        """
        if sequences == 1 or self.curve is None:
            return self
        factor = self.slowdown(sequences)
        scaled = {name: getattr(self, name) * factor for name in ("early_head", "final_head", "propagation", "state_check")}
        times = tuple(time * factor for time in self.layer_times or (1.0,) * self.layers)
        pairs = tuple((width, float(self.curve.relative(width * sequences))) for width in range(1, max_width + 1))
        return replace(self, layer_times=times, verify_cost=pairs, **scaled)

    def passes_only(self) -> UnitCost:
        """Copy without overheads, in which unit-time counts passes of the target only.

        >>> UnitCost(4, cost_ratio=0.1, link=3.0).passes_only() == UnitCost(4, cost_ratio=0.1, draft_devices=0.0)
        True
        """
        copy = object.__new__(UnitCost)  # its numbers are checked, and its cached properties stay the same
        vars(copy).update(vars(self), **dict.fromkeys(OVERHEADS, 0.0))
        return copy

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass; the last one includes the head."""
        first, last = step.layers.first, step.layers.last
        whole = self.pass_time(step.role)
        if whole is not None:
            return [whole / last * self.slowdown(step.batch_size)] * (last - first)
        times = [self.propagation if step.layers.kv_only else self.span(layer, layer + 1) for layer in range(first, last)]
        for start, stop in step.layers.gaps:
            times[start - first : stop - first] = [0.0] * (stop - start)
        times[-1] += self._at_the_end(step)
        factor = self.slowdown(len(step.tokens))
        return [time * factor for time in times]

    def forward(self, step: Forward) -> float:
        """Time of a whole pass: from the model's cost ratio, or else as the sum over its layers.

        The head costs the same for any number of positions, because its weights are read once, like those of the layers.
        """
        whole = self.pass_time(step.role)
        if whole is not None:
            return whole if step.batch is None else whole * self.slowdown(step.batch_size)
        if step.layers.kv_only:
            layers = self.propagation * step.layers.size
        else:
            layers = self.span(step.layers.first, step.layers.last, step.layers.gaps)
        return (layers + self._at_the_end(step)) * self.slowdown(len(step.tokens))

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape, the same at every position.

        >>> from model.steps import LayerSpan
        >>> cost = UnitCost(4, final_head=0.5, cost_ratio=0.1, verify_cost=((1, 1.0), (2, 1.5)))
        >>> cost.times(PassShape(LayerSpan(1, 4), heads=1)).tolist(), cost.verify_times([1, 2]).tolist(), float(cost.draft_times())
        (3.5, [4.5, 6.75], 0.45)
        """
        sequences, layers = np.asarray(shape.sequences), shape.layers
        extent = sequences.shape
        if not (np.isscalar(at) and np.isscalar(shape.width)):
            extent = np.broadcast_shapes(extent, np.shape(shape.width), np.shape(at))
        whole = self.pass_time(shape.role)
        if whole is not None:
            return self._slowed(whole, sequences, extent)
        run = self.propagation * layers.size if layers.kv_only else self.span(layers.first, layers.last, layers.gaps)
        end = (self.head(layers.last) if np.any(shape.heads) else 0.0) + (self.state_check if shape.compared else 0.0)
        return self._slowed(run + end, np.asarray(shape.width) * sequences, extent)

    def _slowed(self, time: float, width: ArrayLike, extent: tuple[int, ...]) -> Floats:
        """Time of a pass over `width` tokens in all, from that over one token; broadcast to a shape."""
        slowed = np.asarray(time * self.slowdowns(width))
        return slowed if slowed.shape == extent else np.broadcast_to(slowed, extent)

    def verify_curve(self, max_width: int) -> tuple[tuple[int, float], ...] | None:
        """The pairs of `verify_cost` as given, even if they do not reach `max_width`."""
        return self.verify_cost

    def has_model(self, role: str) -> bool:
        """True for the target, and for models with a cost ratio."""
        return role not in RATIOS or self.ratio(role) is not None

    def _at_the_end(self, step: Forward) -> float:
        """Time of a pass after its last layer: logits and comparison of states."""
        return (self.head(step.layers.last) if step.heads else 0.0) + (self.state_check if step.compared else 0.0)

    def slowdown(self, width: int) -> float:
        """Time of a pass of the target over `width` tokens of all sequences together, relative to a pass over one token [-].

        >>> UnitCost(4, verify_cost=((1, 2.0), (3, 3.0))).slowdown(2)
        1.25
        """
        return 1.0 if width == 1 else float(self.slowdowns(width))

    def slowdowns(self, width: ArrayLike) -> Floats:
        """`slowdown` for arrays of widths."""
        widths = np.asarray(width)
        return np.ones(widths.shape) if self.curve is None else np.where(widths == 1, 1.0, self.curve.relative(widths))

    @property
    def only_layers(self) -> bool:
        """True if units are busy with layers only, all of equal time: unit-time then also measures arithmetic."""
        times = self.early_head, self.final_head, self.dispatch, self.dispatch_per_process, self.propagation, self.state_check
        return not any(times) and self.layer_times is None and self.verify_cost is None

    @property
    def plain(self) -> bool:
        """True if every layer takes one unit of time and everything else takes none, as the theorems assume."""
        # Costs of draft passes, multi-token passes and early exits do not affect methods without them.
        times = self.early_head, self.final_head, self.dispatch, self.dispatch_per_process, self.link, self.promotion
        return not any(times) and self.layer_times is None and self.dispatch_law == "linear"
