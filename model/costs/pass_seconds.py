"""Seconds of passes on hardware, as a function of width, context and batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.architectures.transformer import Shape
from model.base import checks
from model.base.checks import ParameterError
from model.costs.step_costs import DISPATCH_LAWS, Floats, PassShape, StepCosts, position_of
from model.hardware.cost_models import Hardware
from model.hardware.interpolation import NONE, Estimate
from model.hardware.profile_costs import ProfileCosts
from model.steps import Forward, LayerSpan

TOKEN_BYTES = 64
"""Bytes of a message that tells another process the next token."""
_GROWTH = 64
"""Minimum number of positions whose times are computed together."""


class Parts(NamedTuple):
    """Time of a pass, by part [s]."""

    layers: Estimate = NONE
    head: Estimate = NONE
    embedding: Estimate = NONE
    step: Estimate = NONE

    @property
    def total(self) -> Estimate:
        """Time of the whole pass."""
        return self.layers + (self.head + self.embedding + self.step)  # only layers have times by position


class ContextTable:
    """Times by context, each looked up once."""

    def __init__(self) -> None:
        self._known: NDArray[np.bool_] = np.zeros(0, dtype=np.bool_)
        self._times: Floats = np.zeros((2, 0))  # seconds, and their errors

    def with_times_at(self, context: NDArray[np.intp], look_up: Callable[[NDArray[np.intp]], Estimate]) -> Estimate:
        """Times indexed by context up to the largest of these; `look_up` gives those at these contexts that are not known yet."""
        size = int(context.max(initial=0)) + 1
        more = size - self._known.size
        if more > 0:
            more = max(more, self._known.size)
            self._known, self._times = np.pad(self._known, (0, more)), np.pad(self._times, ((0, 0), (0, more)))
        asked = context[~self._known[context]]
        if asked.size:
            self._times[:, asked] = np.stack(np.broadcast_arrays(*look_up(asked)))
            self._known[asked] = True
        return Estimate(*self._times[:, :size])


@dataclass(eq=False)
class PassSeconds(StepCosts):
    """Costs in seconds of passes of models on hardware, priced at their positions.

    Parameters
    ----------
    hardware_models
        Hardware model by role. Parts that a profile lacks take no time; `model.hardware.profile_costs.ProfileCosts.missing` lists
        them.
    prompt
        Cached positions at output position 0.
    batch
        Sequences per pass, all like the decoded one.
    others_position
        Mean position of the other sequences of the batch in continuous batching; attention then reads the mean context. None: all
        sequences are at the same position.
    middle
        Position at which `ratio`, `operations` and `verify_curve` are evaluated.
    busy
        Number of other units of the host that are busy all the time.
    dispatch, dispatch_per_process, dispatch_law, link, promotion, state_check
        As in `model.costs.layer_times.UnitCost`, but in seconds [s].
    draft_devices
        As in `model.costs.layer_times.UnitCost` [-].
    uncertainty_end
        End of the uncertainty interval of the times. 0: the estimates; 1: the upper end; -1: the lower end. Steps of plain decoding
        at the full batch, the reference of speed-ups, stay at their estimates.

    >>> from model.hardware.cost_models import UniformLayers
    >>> from model.architectures.published_shapes import preset
    >>> cost = PassSeconds({"target": UniformLayers(preset("llama-2-13b"), 0.001)}, prompt=512)
    >>> cost.plain_time(100), cost.times(PassShape(LayerSpan(10, 40)), [0, 1]).tolist()
    (4.0, [0.03, 0.03])
    """

    hardware_models: Mapping[str, Hardware]
    prompt: int = 0
    batch: int = 1
    others_position: float | None = None
    middle: int = 0
    busy: int = 0
    dispatch: float = 0.0
    dispatch_per_process: float = 0.0
    dispatch_law: str = "linear"
    link: float = 0.0
    promotion: float = 0.0
    state_check: float = 0.0
    draft_devices: float = 1.0
    uncertainty_end: float = 0.0
    verification: float = 0.0
    """Overhead of an engine that the times of the target's layers contain in passes over several tokens per sequence [s]."""
    counts_steps: bool = True
    """False leaves the overhead of engine steps and of verifications out (`passes_only`)."""
    context_budgets: Mapping[str, int] = field(default_factory=dict)
    """By role: largest number of cached positions of each sequence that its passes read (`within_budgets`)."""
    _times: dict[PassShape, Floats] = field(default_factory=dict, init=False, repr=False)
    """Cache of times of passes, by shape and position."""
    _layers: dict[tuple[str, int, int, int | None], Estimate] = field(default_factory=dict, init=False, repr=False)
    """Cache of times of a layer, by (role, width, sequences, context budget) and position."""
    _totals: dict[PassShape, Estimate] = field(default_factory=dict, init=False, repr=False)
    """Cache of times of passes with their errors, by shape and position."""
    by_context: dict[tuple[Any, ...], ContextTable] = field(default_factory=dict, init=False, repr=False)
    """Cache of times of passes, for costs that differ in their prompts or overheads (`model.costs.many_seconds`)."""
    _passes_only: PassSeconds | None = field(default=None, init=False, repr=False)
    _ends: tuple[PassSeconds, PassSeconds] | None = field(default=None, init=False, repr=False)
    _within: dict[tuple[tuple[str, int], ...], Self] = field(default_factory=dict, init=False, repr=False)

    uniform = False

    def __post_init__(self) -> None:
        checks.whole("prompt", self.prompt, 0)
        checks.whole("batch", self.batch, 1)
        checks.one_of("dispatch_law", self.dispatch_law, DISPATCH_LAWS)

    @property
    def layers(self) -> int:  # type: ignore[override]
        """Depth of the target model."""
        return self.hardware("target").shape.layers

    def uncertainty_ends(self) -> tuple[PassSeconds, PassSeconds]:
        """The same costs at the upper and the lower end of their uncertainty; made once."""
        if self._ends is None:
            self._ends = replace(self, uncertainty_end=1.0), replace(self, uncertainty_end=-1.0)
            for each in self._ends:
                each._layers, each._totals, each.by_context = self._layers, self._totals, self.by_context
        return self._ends

    def share_times(
        self, layers: dict[tuple[str, int, int, int | None], Estimate], by_context: dict[tuple[Any, ...], ContextTable]
    ) -> None:  # fmt: skip
        """Keep times in tables that other costs of the same kernels and batch also use; `layers` are at one prompt."""
        self._layers, self.by_context = layers, by_context

    def has_overheads(self, units: int) -> bool:
        """True if, on this number of units, anything but the work of passes takes time: engine steps, starting processes, links."""
        return self.steps_take_time or super().has_overheads(units)

    @property
    def steps_take_time(self) -> bool:
        """True if the times of passes contain overheads of engine steps."""
        steps = (np.any(each.step(self.batch).seconds) for each in self.hardware_models.values())
        return self.counts_steps and (self.verification > 0 or any(steps))

    def passes_only(self) -> PassSeconds:
        """Copy without overheads, in which unit-time counts passes of the target only; made once."""
        if self._passes_only is None:
            none: dict[str, Any] = dict.fromkeys(("dispatch", "dispatch_per_process", "link", "promotion", "draft_devices"), 0.0)
            self._passes_only = replace(self, **none, counts_steps=False)
            self._passes_only._layers, self._passes_only.by_context = self._layers, self.by_context
        return self._passes_only

    def within_budgets(self, budgets: Mapping[str, int]) -> Self:
        """See `StepCosts`; passes whose shape has a budget keep it, and all times are tabulated once for both.

        >>> from model.hardware.devices import device
        >>> from model.hardware.roofline import Roofline
        >>> from model.architectures.published_shapes import preset
        >>> draft = Roofline.on_device(preset("llama-3.2-1b"), device("h100"))
        >>> cost = PassSeconds({"draft": draft}, prompt=32_000, batch=16)
        >>> [round(1e3 * float(each.draft_times()), 2) for each in (cost, cost.within_budgets({"draft": 512}))]
        [7.92, 1.83]
        """
        key = tuple(sorted(budgets.items()))
        if not key:
            return self
        if key not in self._within:
            found = self._within[key] = replace(self, context_budgets=dict(budgets))
            found._times, found._layers, found._totals = self._times, self._layers, self._totals
            found.by_context = self.by_context
        return self._within[key]

    def overhead_of(self, step: Forward) -> float:
        """Overhead of the engine's step that the time of a pass contains [s]."""
        shape = PassShape.of(step)
        own = float(self._engine_step(shape, np.asarray(shape.sequences) * self.batch).seconds)
        return own + float(self._verification(shape)) * self.counts_steps

    def hardware(self, role: str) -> Hardware:
        """Hardware model of a role."""
        if role not in self.hardware_models:
            raise ParameterError(f"profiles must include every model that makes passes; the {role} has none")
        return self.hardware_models[role]

    def context(self, at: ArrayLike, context_budget: int | None = None) -> Floats:
        """Mean number of cached positions per sequence that a pass at position `at` reads, at most `context_budget` of each.

        >>> from model.hardware.cost_models import UniformLayers
        >>> from model.architectures.published_shapes import preset
        >>> models = {"target": UniformLayers(preset("llama-2-13b"), 0.001)}
        >>> cost = PassSeconds(models, prompt=100, batch=2, others_position=50.0)
        >>> cost.context([0, 60]).tolist(), cost.context([0, 60], 120).tolist()
        ([125.0, 155.0], [110.0, 120.0])
        """
        most = np.inf if context_budget is None else context_budget - self.prompt  # of the positions after the prompt
        mean = np.minimum(np.asarray(at, dtype=np.float64), most)
        if self.others_position is not None and self.batch > 1:
            mean = (mean + (self.batch - 1) * np.minimum(self.others_position, most)) / self.batch
        return self.prompt + mean

    # --- A pass ---

    def parts(self, shape: PassShape, at: ArrayLike = 0) -> Parts:
        """Time of a pass by part: layers, logits (if any), embedding (from layer 0), engine step (`PassShape.begins`)."""
        hardware, layers = self.hardware(shape.role), shape.layers
        if layers.last < 0:
            layers = LayerSpan(0, hardware.shape.layers)
        if layers.last > hardware.shape.layers:
            bound = f"{hardware.shape.layers}, as in its profile"
            raise ParameterError(f"layers of the {shape.role} must be {bound}, got at least {layers.last}")
        sequences = np.asarray(shape.sequences) * self.batch
        tokens = np.asarray(shape.width) * sequences
        head = self._head(shape, layers, sequences) if np.any(shape.heads) else NONE
        if layers.first == layers.last:  # a head alone
            return Parts(head=head)
        layer = self._layer(shape, sequences, at)
        if layers.kv_only:
            layer = self._kv_rows(shape.role, tokens, layer)
        return Parts(
            layer.repeated(layers.size), head, NONE if layers.first or layers.kv_only else hardware.embedding(tokens),
            self._step(shape, sequences, at),
        )  # fmt: skip

    def _layer(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        """Time of one layer; for integer widths and positions, from a table that grows as needed."""
        role, width, budget, where = shape.role, shape.width, shape.context_budget, np.asarray(at)
        hardware = self.hardware(role)
        if not isinstance(width, int) or not isinstance(shape.sequences, int) or where.dtype.kind not in "iu":
            return hardware.layer(width, self.context(at, budget), sequences, busy=self.busy)
        table, last = self._layers.get((role, width, shape.sequences, budget)), int(where.max(initial=0))
        if table is None or table.seconds.size <= last:
            positions = np.arange(max(last + 1, _GROWTH, 0 if table is None else 2 * table.seconds.size))
            estimate = hardware.layer(width, self.context(positions, budget), sequences, busy=self.busy)
            table = Estimate(*(np.broadcast_to(each, positions.shape) for each in estimate))
            self._layers[role, width, shape.sequences, budget] = table
        return Estimate(table.seconds[where], table.error[where])

    def _head(self, shape: PassShape, layers: LayerSpan, sequences: ArrayLike) -> Estimate:
        """Time of the logits; after a single layer (early exit) the profile's `early_head`, as the weights are still cached."""
        early = self.part(shape.role, "early_head", 1) if layers.last - layers.first == 1 else None
        return self.hardware(shape.role).head(np.asarray(shape.heads) * sequences) if early is None else early

    def _kv_rows(self, role: str, tokens: ArrayLike, layer: Estimate) -> Estimate:
        """Time of keys and values of one layer: as measured, or in proportion to their share of the layer's weights."""
        measured = self.part(role, "kv_rows", tokens)
        return layer.repeated(share_of_rows(self.hardware_models[role].shape)) if measured is None else measured

    def _step(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        """Time that occurs once per pass: the engine step, and the handling of several hypotheses."""
        step = self._engine_step(shape, sequences)
        tree = self.part(shape.role, "tree", shape.width, self.context(at, shape.context_budget)) if shape.tree else None
        return step if tree is None else step + tree

    def _engine_step(self, shape: PassShape, sequences: ArrayLike) -> Estimate:
        """Overhead of the engine's step that a pass needs."""
        if not self.counts_steps:
            return Estimate(-self._verification(shape), np.zeros(()))
        if not shape.begins and shape.layers.last >= 0:
            return NONE
        return self.hardware(shape.role).step(sequences, within=shape.within_step)

    def _verification(self, shape: PassShape) -> Floats:
        """Overhead that the times of a pass's layers contain [s]."""
        return np.where((np.asarray(shape.width) > 1) & (shape.role == "target"), self.verification, 0.0)

    def part(self, role: str, part: str, *point: ArrayLike) -> Estimate | None:
        """Time of a part of a model's profile [s]; None without a profile, or if the profile lacks the part."""
        hardware = self.hardware_models.get(role)
        return hardware.part(part, *point) if isinstance(hardware, ProfileCosts) else None

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape after `at` output positions [s]."""
        shape, where = self._within_budget(shape), np.asarray(at)
        single = isinstance(shape.width, int) and isinstance(shape.sequences, int) and isinstance(shape.heads, int)
        if not single or where.dtype.kind not in "iu":
            return self.computed_times(shape, where)
        table, last = self._times.get(shape), int(where.max(initial=0))
        if table is None or table.size <= last:
            positions = np.arange(max(last + 1, _GROWTH, 0 if table is None else 2 * table.size))
            table = self._times[shape] = self._at_end(shape, self._tabulated(shape, positions.size), positions)
        return np.asarray(table[where])

    def _tabulated(self, shape: PassShape, size: int) -> Estimate:
        """`_total` at the first positions, looked up once for both ends of the uncertainty."""
        total = self._totals.get(shape)
        if total is None or total.seconds.size < size:
            total = self._totals[shape] = self._total(shape, np.arange(size))
        return Estimate(*(each[:size] for each in total))

    def _within_budget(self, shape: PassShape) -> PassShape:
        """The shape with the context budget of its role, unless it has one."""
        if shape.context_budget is None and shape.role in self.context_budgets:
            return shape._replace(context_budget=self.context_budgets[shape.role])
        return shape

    def alike(self, shape: PassShape) -> PassShape:
        """See `StepCosts`: all layers after the first take the same time.

        >>> cost = PassSeconds({})
        >>> [cost.alike(PassShape(LayerSpan(*span))).layers[:2] for span in ((0, 1), (1, 2), (7, 9), (8, 8))]
        [(0, 1), (1, 2), (1, 3), (1, 1)]
        """
        first, last, gaps, kv_only = shape.layers
        return shape if first <= 1 or gaps else shape._replace(layers=LayerSpan(1, 1 + last - first, kv_only=kv_only))

    def as_repeated(self, shape: PassShape) -> tuple[PassShape, int]:
        """See `StepCosts`: a pass for keys and values takes the time of a layer for each of its layers, and nothing else.

        >>> cost = PassSeconds({})
        >>> [(shape.layers[:2], count) for shape, count in (
        ...     cost.as_repeated(PassShape(LayerSpan(7, 9, kv_only=kv_only))) for kv_only in (True, False))]
        [((1, 2), 2), ((1, 3), 1)]
        """
        first, last, gaps, kv_only = shape.layers
        if first == last or gaps or not kv_only or shape.compared or shape.tree or np.any(shape.heads) or np.any(shape.width != 1):
            return self.alike(shape), 1
        return shape._replace(layers=LayerSpan(1, 2, kv_only=True)), last - first

    def computed_times(self, shape: PassShape, at: ArrayLike) -> Floats:
        """`times` without a table [s]."""
        shape = self._within_budget(shape)
        return self._at_end(shape, self._total(shape, at), at)

    def estimated(self, shape: PassShape, at: ArrayLike) -> Estimate:
        """`computed_times` before an end of their uncertainty is taken, with their errors."""
        return self._total(self._within_budget(shape), at)

    def _total(self, shape: PassShape, at: ArrayLike) -> Estimate:
        """Time of a whole pass, broadcast over positions, widths and numbers of sequences."""
        total = self.parts(shape, at).total
        seconds = total.seconds + (self.state_check if shape.compared else 0.0)
        extent = np.broadcast_shapes(*map(np.shape, (seconds, shape.width, shape.sequences, at)))
        return Estimate(np.broadcast_to(seconds, extent), np.broadcast_to(total.error, extent))

    def _at_end(self, shape: PassShape, estimate: Estimate, at: ArrayLike) -> Floats:
        """Times at the end of their uncertainty interval that `uncertainty_end` selects."""
        if not self.uncertainty_end:
            return estimate.seconds
        return np.maximum(estimate.seconds * (1 + self.uncertainty_end * self._error(shape, estimate, at)), 0.0)

    def _error(self, shape: PassShape, estimate: Estimate, at: ArrayLike) -> Floats:
        """Relative error of the time of a pass compared with a step of plain decoding [-].

        The errors of other models' passes and of plain steps add up. Target passes share their error with plain steps, so that it
        is 0 for passes over one token of one sequence.
        """
        if shape.role != "target":
            return np.asarray(estimate.error + self.plain_error(at))
        wide = (np.asarray(shape.width) > 1) | (np.asarray(shape.sequences) > 1)
        return np.where(wide, estimate.error, 0.0)

    def plain_error(self, at: ArrayLike = 0) -> Floats:
        """Relative error of the time of a step of plain decoding [-]."""
        shape, where = PassShape(LayerSpan(0, self.layers), heads=1), np.asarray(at)
        if where.dtype.kind not in "iu":
            return np.asarray(self.parts(shape, at).total.error)
        return np.asarray(self._tabulated(shape, int(where.max(initial=0)) + 1).error[where])

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass [s]; the first one includes the embedding and the engine step, the last one the head."""
        parts = self.parts(PassShape.of(step), position_of(step))
        return spread_over(step.layers, *(float(each.seconds) for each in parts), end=self.state_check if step.compared else 0.0)

    # --- The rest of `StepCosts` ---

    def has_model(self, role: str) -> bool:
        """True if there is a hardware model for this role."""
        return role in self.hardware_models

    def ratio(self, role: str) -> float | None:
        """Time of a whole pass of a smaller model relative to a pass of the target, at position `middle` [-]."""
        return float(self.draft_times(self.middle, role=role) / self.plain_times(self.middle)) if self.has_model(role) else None

    def verify_curve(self, max_width: int) -> tuple[tuple[int, float], ...] | None:
        """Pairs (width, time of a pass of the target relative to width 1) at position `middle`; None if the time is constant.

        >>> from model.hardware.cost_models import UniformLayers
        >>> from model.architectures.published_shapes import preset
        >>> PassSeconds({"target": UniformLayers(preset("llama-2-13b"), 0.001)}).verify_curve(3)
        """
        times = [float(self.verify_times(width, self.middle)) for width in range(1, max_width + 1)]
        if min(times) == max(times):
            return None
        return tuple((width, time / times[0]) for width, time in enumerate(times, 1))

    def operations(self, role: str) -> float:
        """Operations per token in a pass of this model relative to the target, at position `middle` [-]."""
        ratio: float = self.operations_after(role, self.prompt + self.middle)
        return ratio

    def operations_after(self, role: str, context: Any) -> Any:
        """`operations` with this number of cached positions, or each of several."""
        counts = [self.hardware(each).shape.operations(1, context, heads=1) for each in (role, "target")]
        return counts[0] / counts[1]


def share_of_rows(shape: Shape) -> float:
    """Fraction of the weights of a layer that a token uses that compute keys and values."""
    return shape.cache_weights / shape.active_layer_weights


def spread_over(layers: LayerSpan, run: float, head: float, embedding: float, step: float, *, end: float = 0.0) -> list[float]:
    """Times of the layers of a pass from the times of its parts; `end` is added to the last layer."""
    times = [run / max(layers.size, 1)] * (layers.last - layers.first)
    for start, stop in layers.gaps:
        times[start - layers.first : stop - layers.first] = [0.0] * (stop - start)
    times[0] += embedding + step
    times[-1] += head + end
    return times
