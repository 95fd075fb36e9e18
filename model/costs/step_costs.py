"""Interface of costs: the times of an algorithm's steps, for closed forms, vectorised paths, the simulator and predicted runs.

A cost model has one unit of time: layer-times (`model.costs.layer_times.UnitCost`) or seconds
(`model.costs.pass_seconds.PassSeconds`). If the time of a pass depends on its context, each pass is priced at its own position, and
expectations are sums over the positions at which passes start.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base.checks import ParameterError
from model.steps import Forward, LayerSpan, Read

Floats = NDArray[np.float64]

RATIOS = {"draft": "cost_ratio", "medium": "medium_cost_ratio"}
"""By role: scenario key of the time of a pass relative to a pass of the target."""
OPERATIONS = {"draft": "operations_ratio", "medium": "medium_operations_ratio"}
"""By role: scenario key of the operations per token relative to the target."""
DISPATCH_LAWS = ("linear", "tree")


class PassShape(NamedTuple):
    """Everything that determines the time of a pass, except its position.

    Parameters
    ----------
    layers
        The layers that the pass runs.
    role
        The model: `target`, `draft`, ...
    width, sequences
        Tokens per sequence, and number of sequences; integers or arrays.
    heads
        Positions per sequence whose logits are computed.
    compared
        True if the hidden state is compared with that of the previous layer.
    joins
        True if the pass continues from the outputs of several passes.
    tree
        True if the pass follows several hypotheses.
    within_step
        True if another pass pays the overhead of the engine step; see `model.steps.Forward`.
    context_budget
        Largest number of cached positions of each sequence that the pass reads; None: all. Costs in layer-times know no context.
    """

    layers: LayerSpan
    role: str = "target"
    width: ArrayLike = 1
    sequences: ArrayLike = 1
    heads: ArrayLike = 0
    compared: bool = False
    joins: bool = False
    tree: bool = False
    within_step: bool = False
    context_budget: int | None = None

    @staticmethod
    def of(step: Forward) -> PassShape:
        """Shape of a pass; in a ragged batch all sequences are padded to the widest.

        >>> PassShape.of(Forward("target", (7, 8), 5, LayerSpan(0, 4), heads=1))[1:5]
        ('target', 2, 1, 1)
        """
        heads = step.heads if step.batch is None else max(step.batch.heads)
        compared, tree = bool(step.compared), bool(step.tree)
        return PassShape(
            step.layers, step.role, step.width, step.batch_size, heads, compared, step.joins, tree, step.within_step,
            step.context_budget,
        )  # fmt: skip

    @property
    def begins(self) -> bool:
        """True if the pass starts at the first layer or continues from several passes, so that it needs an engine step."""
        return (not self.layers.first or self.joins) and self.layers.first < self.layers.last and not self.layers.kv_only


def position_of(step: Forward) -> int:
    """Number of cached positions before a pass; in a batch, those of the longest sequence, to which the others are padded."""
    return step.at if step.batch is None else max(step.batch.positions)


class StepCosts:
    """Base of all costs, with defaults for optional parts.

    A subclass provides `layers`, `times` and `layer_times_of`; for methods with several models or adaptive draft lengths also
    `has_model`, `ratio`, `operations` and `verify_curve`.
    """

    layers: int
    """Depth of the target model."""
    dispatch: float = 0.0
    dispatch_per_process: float = 0.0
    dispatch_law: str = "linear"
    link: float = 0.0
    """Time from the end of a dispatch to the start of a sub-process, and to move a state from one unit to another."""
    promotion: float = 0.0
    """Time to adopt a sub-process's hidden state and KV cache rows."""
    draft_devices: float = 1.0
    """Devices per unit that runs only a smaller model, relative to a unit of the target: the weight of its unit-time."""

    uniform: bool = True
    """True if a pass takes the same time at every position."""
    reads_take_time: bool = False
    """True if reads take time: the engine then calls `reading`."""
    units_share: bool = False
    """True if busy units slow each other down: the engine then calls `slowdown_among`."""

    @property
    def only_layers(self) -> bool:
        """True if units are busy with layers only, all of equal time: unit-time then also measures arithmetic."""
        return False

    @property
    def plain(self) -> bool:
        """True if every layer takes one unit of time and everything else takes none, as the papers assume."""
        return False

    def has_overheads(self, units: int) -> bool:
        """True if, on this number of units, anything but the work of passes takes time: engine steps, starting processes, links."""
        return any((self.dispatch, self.dispatch_per_process, *((self.link, self.promotion) if units > 1 else ())))

    def passes_only(self) -> StepCosts:
        """Copy without overheads, in which unit-time counts passes of the target only (`draft_devices` is 0).

        A decoding whose passes follow one another takes a sum of times. With these costs its time is that of all passes and its
        unit-time that of the target's, so that both together give the time of drafting, of verifying and of overheads.
        """
        raise NotImplementedError

    @property
    def steps_take_time(self) -> bool:
        """True if the times of passes contain overheads of engine steps (`overhead_of`)."""
        return False

    def within_budgets(self, budgets: Mapping[str, int]) -> Self:
        """The same costs with passes that read at most `budgets[role]` cached positions of each sequence; equal calls, one object.

        Costs whose passes take the same time at every context stay as they are.
        """
        return self

    def overhead_of(self, step: Forward) -> float:
        """Overhead of the engine that the time of a pass contains."""
        return 0.0

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape after `at` positions; broadcasts over `at`, widths and sequences.

        Positions count from the last token of the prompt, which is at position 0.
        """
        raise NotImplementedError

    def summed_times(self, shape: PassShape, weights: Floats) -> Floats:
        """Sums over positions 0, 1, ... of weight x time of a pass of this shape; shape (..., sums).

        `weights` has the shape (positions, sums). Without a threaded library for one sum, as `model.methods.prediction.linear`.

        >>> from model.costs.layer_times import UnitCost
        >>> UnitCost(4).summed_times(PassShape(LayerSpan(0, 4)), np.array([[1.0, 0.0], [0.5, 2.0]])).tolist()
        [6.0, 8.0]
        """
        if self.uniform:
            return np.asarray(self.times(shape)[..., None] * weights.sum(axis=0))
        return weighted(self.times(shape, np.arange(len(weights))), weights)

    def summed_values(self, shapes: Sequence[PassShape], value: Callable[[Floats], Floats], weights: Floats) -> Floats:
        """Sums over positions 0, 1, ... of weight x value of the times of some passes; shape (..., values).

        `weights` has the shape (positions,). `value` maps times of shape (passes, n) to an array of shape (values, n).

        >>> from model.costs.layer_times import UnitCost
        >>> shapes = [PassShape(LayerSpan(0, 4)), PassShape(LayerSpan(0, 1))]
        >>> UnitCost(4).summed_values(shapes, lambda times: times[:1] * times[1:], np.array([1.0, 0.5])).tolist()
        [6.0]
        """
        times = np.stack([self.times(shape, np.arange(len(weights))) for shape in shapes])
        values = value(times.reshape(len(shapes), -1))
        return np.moveaxis(values.reshape(-1, *times.shape[1:]) @ weights, 0, -1)

    def forward(self, step: Forward) -> float:
        """Time of a whole pass at its position."""
        return float(self.times(PassShape.of(step), position_of(step)))

    @cached_property
    def times_by_kind(self) -> dict[Hashable, float]:
        """`forward` by kind of pass, where it is `uniform`, as far as the simulator has asked: all decodings share them."""
        return {}

    @property
    def tabulated(self) -> bool:
        """True if the time of a pass depends on nothing but its shape and position, and not on the passes before it."""
        return self.uniform or type(self).forward is StepCosts.forward

    def alike(self, shape: PassShape) -> PassShape:
        """A shape of a pass that takes the same time as this one; the same one for many shapes where their layers are alike."""
        return shape

    def as_repeated(self, shape: PassShape) -> tuple[PassShape, int]:
        """A pass, and how many of it take as long as a pass of this shape, so that few passes are priced for many shapes."""
        return self.alike(shape), 1

    def times_by_position(self, step: Forward, positions: int) -> list[float]:
        """`forward` of passes like this one at positions 0, 1, ..., `positions` - 1, if they are `tabulated`.

        >>> from model.costs.layer_times import UnitCost
        >>> UnitCost(4).times_by_position(Forward("target", (7,), 5, LayerSpan(0, 4)), 3)
        [4.0, 4.0, 4.0]
        """
        if self.uniform:
            return [self.forward(step)] * positions
        found: list[float] = self.times(PassShape.of(step), np.arange(positions)).tolist()
        return found

    def layer_times_of(self, step: Forward) -> list[float]:
        """Times of the layers of a pass; the last one includes the head."""
        raise NotImplementedError

    def dispatching(self, processes: int) -> float:
        """Time that starting `processes` sub-processes occupies the starter's unit; see `dispatch_law`."""
        count = processes if self.dispatch_law == "linear" else math.log2(processes + 1)
        return self.dispatch + self.dispatch_per_process * count

    def reading(self, step: Read) -> float:
        """Time of a read."""
        return 0.0

    def slowdown_among(self, others: int) -> float:
        """Slowdown factor of all times while `others` other units are busy."""
        return 1.0

    def has_model(self, role: str) -> bool:
        """True if the time of passes of this model is known."""
        raise NotImplementedError

    def require(self, role: str) -> None:
        """Raise `ParameterError` unless the time of passes of this model is known."""
        if not self.has_model(role):
            raise ParameterError(f"{RATIOS[role]} is required: the time of a pass of the {role} model relative to the target")

    def ratio(self, role: str) -> float | None:
        """Time of a whole pass of a smaller model relative to a pass of the target [-]; None if unknown."""
        raise NotImplementedError

    def operations(self, role: str) -> float:
        """Operations per token in a pass of this model relative to the target [-]; nan if unknown."""
        raise NotImplementedError

    def operations_at(self, role: str, cost: NDArray[np.intp], at: NDArray[np.int64]) -> Floats:
        """`operations` of the costs with these indices; where they differ in their `middle`, at output positions `at` instead."""
        return np.asarray(np.broadcast_to(np.atleast_1d(self.operations(role))[cost], at.shape))

    def with_middle(self, at: int) -> StepCosts:
        """These costs; where they differ in their `middle`, all at `at`."""
        return self

    def content(self) -> Hashable:
        """A value that is equal only for costs with the same times: those of several costs may be made again and again."""
        return self

    # --- Passes that most methods make ---

    def plain_times(self, at: ArrayLike = 0, sequences: ArrayLike = 1) -> Floats:
        """Time of a step of plain decoding: a pass of the target over one token per sequence, with logits."""
        return self.times(PassShape(LayerSpan(0, self.layers), sequences=sequences, heads=1), at)

    def verify_times(self, width: ArrayLike, at: ArrayLike = 0, sequences: ArrayLike = 1) -> Floats:
        """Time of a verification: a pass of the target over `width` tokens per sequence, with logits of all."""
        return self.times(PassShape(LayerSpan(0, self.layers), width=width, sequences=sequences, heads=width), at)

    def draft_times(
        self, at: ArrayLike = 0, *, role: str = "draft", width: ArrayLike = 1, sequences: ArrayLike = 1, heads: ArrayLike = 1
    ) -> Floats:
        """Time of a whole pass of a smaller model over `width` tokens per sequence, with logits of the last `heads` tokens."""
        self.require(role)
        return self.times(PassShape(ALL_LAYERS, role, width, sequences, heads), at)

    def verify_curve(self, max_width: int) -> tuple[tuple[int, float], ...] | None:
        """Pairs (width, time of a pass of the target relative to width 1) up to `max_width`; None if the time is constant.

        For policies that choose the draft length: one curve, at one fixed position.
        """
        raise NotImplementedError

    def plain_time(self, tokens: int) -> Any:
        """Time of plain decoding of `tokens` tokens of one sequence; of several costs (`model.costs.many_costs`) an array."""
        time = tokens * self.plain_times() if self.uniform else self.plain_times(np.arange(tokens)).sum(axis=-1)
        return time if np.ndim(time) else float(time)


def weighted(times: Floats, weights: Floats) -> Floats:
    """Products of times, shape (..., positions), and weights, shape (positions, sums)."""
    return np.einsum("...p,p->...", times, weights[:, 0])[..., None] if weights.shape[1] == 1 else np.asarray(times @ weights)


ALL_LAYERS = LayerSpan(0, -1)
"""All layers of a smaller model; the cost model knows their number."""
