"""Costs in seconds that differ in single numbers, as one: times have a leading axis of costs, as in `model.costs.many_costs`."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.costs import many_costs, watched_costs
from model.costs.layer_times import OVERHEADS
from model.costs.many_costs import Varied
from model.costs.pass_seconds import ContextTable, PassSeconds
from model.costs.step_costs import PassShape, StepCosts, weighted
from model.hardware.cost_models import Hardware, WithEngineOverhead
from model.hardware.interpolation import Estimate
from model.steps import LayerSpan

Floats = NDArray[np.float64]
Value = TypeVar("Value")
_NUMBERS = ("dispatch", "dispatch_per_process", "link", "promotion", "state_check", "draft_devices")


class VariedSeconds(Varied):
    """Costs in seconds that differ from `first` in some numbers only; a single one is made when it is asked for.

    Parameters
    ----------
    first
        A cost with the other values.
    size
        Number of costs.
    numbers
        Values of `prompt`, `middle`, `others_position` and of times that `PassSeconds` has, by name, each of shape (costs,); valid
        ones. The mean position of others is a multiple of 1/2.
    steps
        Engine overhead per pass, by role, each of shape (costs,) [s]; models of these roles are `WithEngineOverhead`.

    >>> from model.architectures.published_shapes import preset
    >>> from model.hardware.cost_models import UniformLayers
    >>> target = WithEngineOverhead(UniformLayers(preset("llama-2-13b"), 0.001), 0.0)
    >>> costs = VariedSeconds(PassSeconds({"target": target}), 2, {"prompt": np.array([8, 9])}, {"target": np.array([0.0, 0.25])})
    >>> costs[1].prompt, costs.joined().plain_times([0, 1]).round(12).tolist()
    (9, [[0.04, 0.04], [0.29, 0.29]])
    """

    def __init__(
        self, first: PassSeconds, size: int, numbers: Mapping[str, NDArray[Any]], steps: Mapping[str, Floats] | None = None
    ) -> None:
        self.first: PassSeconds = first
        self.size, self.numbers, self.steps = size, numbers, steps or {}
        self._others: dict[int, VariedSeconds] = {}
        self._whole: VariedSeconds | None = None

    def __len__(self) -> int:
        return self.size

    @overload
    def __getitem__(self, index: int) -> PassSeconds: ...

    @overload
    def __getitem__(self, index: slice) -> VariedSeconds: ...

    def __getitem__(self, index: int | slice) -> PassSeconds | VariedSeconds:
        if isinstance(index, slice):
            return self.at(np.arange(self.size)[index])
        if not -self.size <= index < self.size:
            raise IndexError(index)
        models = {
            role: replace(model, step_s=self.steps[role][index].item()) if role in self.steps else model  # type: ignore[type-var]
            for role, model in self.first.hardware_models.items()
        }
        return replace(self.first, hardware_models=models, **{name: each[index].item() for name, each in self.numbers.items()})

    def at(self, index: NDArray[np.intp]) -> VariedSeconds:
        """A subset of the costs, in this order; the same object if it is all of them."""
        if index.size == self.size and np.array_equal(index, np.arange(self.size)):
            return self
        numbers, steps = ({name: values[index] for name, values in each.items()} for each in (self.numbers, self.steps))
        found = VariedSeconds(self.first, index.size, numbers, steps)
        found._whole = self._whole or self
        return found

    @property
    def tables(self) -> _ContextTables:
        """Times of passes by context; those of a subset are those of all costs that it was taken from."""
        return self._tables if self._whole is None else self._whole.tables

    @cached_property
    def _tables(self) -> _ContextTables:
        return _ContextTables(self)

    def of(self, first: PassSeconds) -> VariedSeconds:
        """The same numbers with another cost, such as an end of the uncertainty; made once. Subsets share its times of passes."""
        if id(first) not in self._others:
            found = self._others[id(first)] = VariedSeconds(first, self.size, self.numbers, self.steps)
            found._whole = None if self._whole is None else self._whole.of(first)
        return self._others[id(first)]

    def distinct(self, value: Callable[[PassSeconds], Value]) -> tuple[list[Value], NDArray[np.intp]] | None:
        """See `Varied`; what tests numbers for 0 only is evaluated once for all costs with the same zeros.

        >>> from model.architectures.published_shapes import preset
        >>> from model.hardware.cost_models import UniformLayers
        >>> first = PassSeconds({"target": UniformLayers(preset("llama-2-13b"), 0.001)})
        >>> costs = VariedSeconds(first, 3, {"link": np.array([0.0, 0.5, 0.25])})
        >>> [costs.distinct(each) for each in (lambda cost: bool(cost.link), lambda cost: 2 * cost.link)]
        [([False, True], array([0, 1, 1])), None]
        """
        kinds, index = watched_costs.kinds_of(self.numbers) if self.numbers else ([0], np.zeros(self.size, dtype=np.intp))
        hidden = {"hardware_models": True} if self.steps else {}
        found = []
        for kind in kinds:
            own = {name: kind >> place & 1 for place, name in enumerate(self.numbers)}
            each = watched_costs.tested_alone(self.first, own | hidden, value)
            if each is None:
                return None
            found.append(each)
        return found, index

    def passes_only(self) -> VariedSeconds:
        """Each without overheads, made once; see `PassSeconds.passes_only`."""
        return self._passes_only

    @cached_property
    def _passes_only(self) -> VariedSeconds:
        numbers = {name: values for name, values in self.numbers.items() if name not in OVERHEADS}
        return VariedSeconds(self.first.passes_only(), self.size, numbers)

    def unique(self) -> tuple[VariedSeconds, NDArray[np.intp]]:
        """Costs with distinct times of passes, at any `middle`, and the index of each; made once. See `Varied`."""
        return self._unique

    @cached_property
    def _unique(self) -> tuple[VariedSeconds, NDArray[np.intp]]:
        columns = [values for name, values in (*self.numbers.items(), *self.steps.items()) if name != "middle"]
        places, index = many_costs.distinct_rows(columns, self.size)
        return (self.at(places), index) if places.size < self.size else (self, np.arange(self.size))

    def with_middle(self, at: int) -> VariedSeconds:
        """These costs with all at this `middle`; they share the times of passes."""
        found = VariedSeconds(self.first, self.size, {**self.numbers, "middle": np.full(self.size, at)}, self.steps)
        found._whole = self._whole or self
        return found

    def after(self, positions: NDArray[np.int64]) -> VariedSeconds:
        """These costs from this output position of each on: as many more positions are cached at the first.

        The other sequences of a continuous batch stay where they are: relative to the first position they are farther back.
        """
        numbers = {**self.numbers, "prompt": self.numbers.get("prompt", self.first.prompt) + positions}
        if self.first.others_position is not None:
            numbers["others_position"] = self.numbers.get("others_position", self.first.others_position) - positions
        return VariedSeconds(self.first, self.size, numbers, self.steps)

    def joined(self) -> ManySeconds:
        """All of them as one, made once: methods whose parameters differ ask for the same passes."""
        return self._joined

    @cached_property
    def _joined(self) -> ManySeconds:
        return ManySeconds(self)


class ManySeconds(StepCosts):
    """Costs in seconds, with a leading axis of costs.

    A time depends on the prompt through the context only, so times of a pass are kept by context, once for all costs
    (`_TimesByContext`). Passes at arrays of widths, or at positions that are no whole numbers, are priced at each cost.
    """

    uniform = False

    def __init__(self, costs: VariedSeconds) -> None:
        self.costs, self.layers, self.dispatch_law = costs, costs.first.layers, costs.first.dispatch_law
        for name in _NUMBERS:
            value = costs.numbers.get(name, getattr(costs.first, name))
            setattr(self, name, np.broadcast_to(np.asarray(value, dtype=np.float64), len(costs)))
        self._by_axes: dict[int, PassSeconds] = {}
        self._by_context = _TimesByContext(costs)

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape after `at` output positions, by cost [s]."""
        where = np.asarray(at)
        if self._by_context.has(shape, where):
            return np.broadcast_to(self._by_context.times(shape, where), (len(self.costs), *where.shape))
        extent = np.broadcast_shapes(np.shape(shape.width), np.shape(shape.sequences), where.shape)
        found = self._with_axes(len(extent)).computed_times(shape, where.astype(np.float64))
        return np.broadcast_to(found, (len(self.costs), *extent))

    def content(self) -> Hashable:
        """See `StepCosts`."""
        costs = self.costs
        values = (*costs.numbers.items(), *costs.steps.items())
        return costs.first.content(), len(costs), *((name, each.dtype.str, each.tobytes()) for name, each in values)

    def times_at_each(self, shape: PassShape, at: ArrayLike) -> Floats:
        """Time of a pass of each cost after its own number of output positions, `at` of shape (costs,) or () [s].

        As a single cost computes it, to the last bit.
        """
        found = self._with_axes(0).computed_times(shape, np.asarray(at, dtype=np.float64))
        return np.broadcast_to(found, len(self.costs))

    def summed_times(self, shape: PassShape, weights: Floats) -> Floats:
        """See `StepCosts`; without the times at each position of each cost, where they are the same at one context."""
        found = None
        if self._by_context.has(shape, np.arange(len(weights))):
            found = self._by_context.summed(shape, weights)
        if found is None:
            return super().summed_times(shape, weights)
        return np.broadcast_to(found, (len(self.costs), weights.shape[1]))

    def summed_values(self, shapes: Sequence[PassShape], value: Callable[[Floats], Floats], weights: Floats) -> Floats:
        """See `StepCosts`; once for each context, where the times of all passes are the same at one context."""
        found = None
        if all(self._by_context.has(shape, np.arange(len(weights))) for shape in shapes):
            found = self._by_context.summed_values(shapes, value, weights)
        if found is None:
            return super().summed_values(shapes, value, weights)
        return np.broadcast_to(found, (len(self.costs), found.shape[1]))

    def plain_error(self, at: ArrayLike = 0) -> Floats:
        """Relative error of the time of a step of plain decoding, by cost [-]."""
        where = np.asarray(at)
        if self._by_context.has(PassShape(LayerSpan(0, self.layers), heads=1), where):
            found = self._by_context.plain_error(where)
        else:
            found = self._with_axes(where.ndim).plain_error(where.astype(np.float64))
        return np.broadcast_to(found, (len(self.costs), *where.shape))

    def alike(self, shape: PassShape) -> PassShape:
        """See `StepCosts`."""
        return self.costs.first.alike(shape)

    def as_repeated(self, shape: PassShape) -> tuple[PassShape, int]:
        """See `StepCosts`."""
        return self.costs.first.as_repeated(shape)

    def within_budgets(self, budgets: Mapping[str, int]) -> ManySeconds:
        """See `StepCosts`."""
        return self.costs.of(self.costs.first.within_budgets(budgets)).joined() if budgets else self

    @property
    def target_model(self) -> Hardware:
        """Hardware model of the target; numbers of its passes have a leading axis of costs."""
        return self._with_axes(0).hardware("target")

    def has_model(self, role: str) -> bool:
        """True if there is a hardware model for this role."""
        return self.costs.first.has_model(role)

    def ratio(self, role: str) -> Any:
        """Time of a whole pass of a smaller model relative to a pass of the target, by cost [-]; see `PassSeconds.ratio`."""
        middle = self.costs.numbers.get("middle")
        if not self.has_model(role):
            return None
        if middle is not None:
            then = self.costs.after(middle).joined()
            return then.draft_times(role=role) / then.plain_times()
        return self.draft_times(self.costs.first.middle, role=role) / self.plain_times(self.costs.first.middle)

    def operations(self, role: str) -> Any:
        """Operations per token in a pass of this model relative to the target, by cost [-]."""
        first, numbers = self.costs.first, self.costs.numbers
        if "prompt" not in numbers and "middle" not in numbers:
            return np.full(len(self.costs), first.operations(role))
        return first.operations_after(role, numbers.get("prompt", first.prompt) + numbers.get("middle", first.middle))

    def operations_at(self, role: str, cost: NDArray[np.intp], at: NDArray[np.int64]) -> Floats:
        """See `StepCosts`."""
        if "middle" not in self.costs.numbers:
            return super().operations_at(role, cost, at)
        prompts = self.costs.numbers.get("prompt")
        prompt = self.costs.first.prompt if prompts is None else prompts[cost]
        return np.asarray(self.costs.first.operations_after(role, prompt + at))

    def with_middle(self, at: int) -> ManySeconds:
        """See `StepCosts`."""
        return self.costs.with_middle(at).joined() if "middle" in self.costs.numbers else self

    def _with_axes(self, axes: int) -> PassSeconds:
        """Costs whose numbers are arrays of shape (costs, 1, ..., 1), with this number of further axes."""
        if axes not in self._by_axes:
            costs, shape = self.costs, (-1, *(1,) * axes)
            steps = {role: values.reshape(shape) for role, values in costs.steps.items()}
            found = self._by_axes[axes] = object.__new__(PassSeconds)
            vars(found).update(vars(costs.first), hardware_models=_with_steps(costs.first, steps))
            vars(found).update({name: values.reshape(shape) for name, values in costs.numbers.items()})
        return self._by_axes[axes]


def _with_steps(cost: PassSeconds, steps: Mapping[str, Any]) -> dict[str, Hardware]:
    """Hardware models of a cost with other overheads of engine steps: numbers or arrays, which are checked already."""
    models = dict(cost.hardware_models)
    for role, values in steps.items():
        model = models[role] = object.__new__(WithEngineOverhead)
        vars(model).update(kernels=cost.hardware_models[role].kernels, step_s=values)  # type: ignore[attr-defined]
    return models


class _ByContext(PassSeconds):
    """Costs without a prompt, so that positions are contexts; passes over other layers or with other heads share layers' times."""

    per_position: int
    """Contexts of the tables from one position to the next."""

    def _layer(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        key = "layer", shape.role, shape.width, shape.sequences, shape.context_budget, self.per_position
        table, context = self.by_context.setdefault(key, ContextTable()), (np.asarray(at) * self.per_position).astype(np.intp)
        look_up = super()._layer
        found = table.with_times_at(context, lambda some: look_up(shape, sequences, some / self.per_position))
        return Estimate(found.seconds[context], found.error[context])


class _ContextTables:
    """Times of passes by context, without overheads of engine steps and times of comparisons that differ.

    Arrays are indexed by the position that a cost without a prompt would have; only contexts that occur are priced. If the mean
    position of the other sequences of a batch varies, it is part of the context, in halves: a position is then two contexts.
    """

    def __init__(self, costs: VariedSeconds) -> None:
        first = costs.first
        self.cost = object.__new__(_ByContext)
        models = _with_steps(first, dict.fromkeys(costs.steps, 0.0))
        check = 0.0 if "state_check" in costs.numbers else first.state_check
        # Of a batch whose other sequences are elsewhere, the mean context moves by 1 / batch with each position.
        self.shared = first.others_position is not None and first.batch > 1
        self.per_position = 2 if self.shared and "others_position" in costs.numbers else 1
        others = 0.0 if self.per_position > 1 else first.others_position
        vars(self.cost).update(
            vars(first), hardware_models=models, prompt=0, others_position=others, state_check=check, per_position=self.per_position
        )  # fmt: skip
        self._offsets, self.positions = np.unique(self.offsets(costs)), 0
        self.most = int(self._offsets.max(initial=0))
        self._contexts = np.zeros(0, dtype=np.intp)
        self._found: dict[PassShape, Estimate] = {}
        self.ended: dict[PassShape, Floats] = {}
        """Times at the end of the uncertainty, by shape of passes without overheads that differ."""

    def offsets(self, costs: VariedSeconds) -> NDArray[np.intp]:
        """Index of the context at position 0, by cost; one if it is the same for all."""
        prompts, batch = costs.numbers.get("prompt"), costs.first.batch
        each = np.array([costs.first.prompt] if prompts is None else prompts, dtype=np.intp)
        if not self.shared:
            return each
        found = each * (batch * self.per_position)
        if self.per_position > 1:
            found = found + (batch - 1) * np.rint(costs.numbers["others_position"] * self.per_position).astype(np.intp)
        return found

    def cover(self, at: NDArray[Any]) -> None:
        """Include the contexts of all costs up to the last of these positions."""
        last = int(at.max(initial=0))
        if last < self.positions:
            return
        self.positions = last + 1 + _GROWTH
        self._contexts, self._found, self.ended = self.contexts_from(self._offsets, self.positions), {}, {}

    def contexts_from(self, begins: NDArray[np.intp], positions: int) -> NDArray[np.intp]:
        """Contexts at this number of positions, rising, of costs that have these distinct contexts at position 0."""
        step = self.per_position
        ends = np.zeros((int(begins.max(initial=0)) // step + positions + 1, step), dtype=np.intp)
        begin, part = np.divmod(begins, step)
        ends[begin, part] += 1
        ends[begin + positions, part] -= 1
        return np.flatnonzero(np.cumsum(ends, axis=0))

    def total(self, shape: PassShape) -> Estimate:
        """Times of a pass with their errors, by context."""
        if shape not in self._found:
            cost = self.cost
            own = cost.hardware(shape.role), cost.state_check, cost.verification, cost.counts_steps
            key = shape, cost.context_budgets.get(shape.role), self.per_position, *own
            table = cost.by_context.setdefault(key, ContextTable())
            self._found[shape] = table.with_times_at(self._contexts, lambda at: cost.estimated(shape, at / self.per_position))
        return self._found[shape]


class _TimesByContext:
    """Times of passes of costs that differ in their prompts, in overheads of engine steps and in times of comparisons.

    The latter two are added to the times of `_ContextTables`.
    """

    def __init__(self, costs: VariedSeconds) -> None:
        self._steps, self._checks = costs.steps, costs.numbers.get("state_check")
        self._tables, self._cost = costs.tables, costs.tables.cost
        self._offsets = self._tables.offsets(costs)
        self._plain_errors: tuple[int, Floats] | None = None
        self._known: dict[PassShape, bool] = {}
        self._last: tuple[NDArray[Any], Callable[[Floats], Floats]] | None = None
        """Positions that were asked for last, and the values at these."""

    def has(self, shape: PassShape, at: NDArray[Any]) -> bool:
        """True if times of this pass at these positions can be taken from here."""
        if at.dtype.kind not in "iu":
            return False
        try:
            known = self._known.get(shape)
        except TypeError:  # arrays of widths
            return False
        if known is None:
            limited = shape.context_budget is not None or shape.role in self._cost.context_budgets
            uncertain = shape.compared and (self._checks is not None or self._steps) and not self._certain(shape)
            known = self._known[shape] = (
                not uncertain and self._tables.most <= _MOST_TABULATED * self._tables.per_position
                and not (self._tables.shared and limited)
            )
        return known

    def times(self, shape: PassShape, at: NDArray[Any]) -> Floats:
        """Times at these positions, which broadcast to (costs, *at.shape) [s]."""
        tables = self._tables
        tables.cover(at)
        step = self._overhead(shape)
        ended = self._ended(shape) if step is None else None
        if ended is not None:
            return self._gathered(ended, at)
        total = Estimate(*(self._gathered(each, at) for each in tables.total(shape)))
        overhead = None if step is None else step.reshape(-1, *(1,) * at.ndim)
        return self._at_end(shape, total, self.plain_error(at) if self._as_plain(shape) else np.zeros(()), overhead)

    def summed(self, shape: PassShape, weights: Floats) -> Floats | None:
        """`StepCosts.summed_times`, as of `times`; None if the costs' times differ by more than their contexts and overheads."""
        self._tables.cover(np.array([len(weights) - 1]))
        step, ended = self._overhead(shape), self._ended(shape)
        if ended is None or not (step is None or self._certain(shape)):
            return None
        found: Floats = self._windows_summed(ended[None], weights)[0]
        return found if step is None else np.asarray(found + step[:, None] * weights.sum(axis=0))

    def summed_values(self, shapes: Sequence[PassShape], value: Callable[[Floats], Floats], weights: Floats) -> Floats | None:
        """`StepCosts.summed_values`; None if the costs' times differ by more than their contexts."""
        self._tables.cover(np.array([len(weights) - 1]))
        ended = [self._ended(shape) if self._overhead(shape) is None else None for shape in shapes]
        times = [each for each in ended if each is not None]
        if len(times) < len(ended):
            return None
        contexts = self._tables.contexts_from(self._begins[0], len(weights))
        values = value(np.stack([each[contexts] for each in times]))
        found = np.zeros((len(values), int(contexts[-1]) + 1))
        found[:, contexts] = values
        return np.asarray(self._windows_summed(found, weights[:, None])[..., 0].T)

    def _ended(self, shape: PassShape) -> Floats | None:
        """Times by context at the end of the uncertainty, without overheads; None if they also depend on the overheads."""
        tables, as_plain = self._tables, self._as_plain(shape)
        if as_plain and "target" in self._steps:
            return None
        if shape not in tables.ended:
            plain_error = tables.total(self._plain).error if as_plain else np.zeros(())
            tables.ended[shape] = self._at_end(shape, tables.total(shape), plain_error, None)
        return tables.ended[shape]

    def _as_plain(self, shape: PassShape) -> bool:
        """True if times of this pass have the error of a step of plain decoding besides their own."""
        return shape.role != "target" and self._cost.uncertainty_end != 0

    def _windows_summed(self, by_context: Floats, weights: Floats) -> Floats:
        """Sums of weight x value at the positions from the context of each cost on; shape (values, costs or 1, sums).

        `by_context` has the shape (values, contexts), `weights` (positions, sums).
        """
        (begins, cost), step = self._begins, self._tables.per_position
        windows = np.lib.stride_tricks.sliding_window_view(by_context, step * (len(weights) - 1) + 1, axis=-1)[..., ::step]
        size = max(_WINDOWS // (len(weights) * len(by_context)), 1)
        parts = [weighted(windows[:, begins[start : start + size]], weights) for start in range(0, begins.size, size)]
        return np.asarray((parts[0] if len(parts) == 1 else np.concatenate(parts, axis=1))[:, cost])

    @cached_property
    def _begins(self) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
        """Distinct contexts at position 0, and the index of each cost's."""
        return np.unique(self._offsets, return_inverse=True)

    def plain_error(self, at: NDArray[Any]) -> Floats:
        """Relative error of the time of a step of plain decoding [-], as of `times`."""
        self._tables.cover(at)
        step, positions = self._step(self._plain), self._tables.positions
        if step is None:
            return self._gathered(self._tables.total(self._plain).error, at)
        if self._plain_errors is None or self._plain_errors[0] < positions:
            each = np.arange(positions)
            seconds, error = (self._gathered(values, each) for values in self._tables.total(self._plain))
            whole = seconds + step[:, None]
            self._plain_errors = positions, np.divide(seconds * error, whole, out=np.zeros_like(whole), where=whole > 0)
        return self._plain_errors[1][:, many_costs.as_slice(at)]

    @property
    def _plain(self) -> PassShape:
        return PassShape(LayerSpan(0, self._cost.layers), heads=1)

    def _at_end(self, shape: PassShape, total: Estimate, plain_error: Floats, overhead: Floats | None) -> Floats:
        """Times with an overhead, which has no error, at the end of the uncertainty; see `PassSeconds`."""
        end, (seconds, error) = self._cost.uncertainty_end, total
        found = seconds
        if not self._certain(shape):
            own = shape.role == "target"
            factor = np.asarray(1 + end * plain_error)  # of what has no error of its own
            found = seconds * (factor + end * error)
            if overhead is not None:
                found = found + (overhead if own else overhead * factor)
            return np.maximum(found, 0.0)
        return found if overhead is None else found + overhead

    def _certain(self, shape: PassShape) -> bool:
        """True if times are those of no uncertainty: steps of plain decoding stay at their estimates."""
        return self._cost.uncertainty_end == 0 or (shape.role == "target" and shape.width == 1 and shape.sequences == 1)

    def _overhead(self, shape: PassShape) -> Floats | None:
        """Time that a pass takes besides that in the tables, by cost; None if it is none."""
        step, check = self._step(shape), self._checks if shape.compared else None
        return check if step is None else step if check is None else step + check

    def _step(self, shape: PassShape) -> Floats | None:
        """Overhead of an engine step that a pass pays, by cost; None where it is the same for all."""
        own = self._steps.get(shape.role)
        return own if self._cost.counts_steps and not shape.within_step and (shape.begins or shape.layers.last < 0) else None

    def _gathered(self, by_context: Floats, at: NDArray[Any]) -> Floats:
        """Values at these positions, with a leading axis of prompts: 1 if they are the same for all costs."""
        if self._last is None or not np.array_equal(self._last[0], at):
            self._last = at.copy(), self._values_at(at)
        return self._last[1](by_context)

    def _values_at(self, at: NDArray[Any]) -> Callable[[Floats], Floats]:
        """`_gathered` at these positions, as a function of values by context."""
        where, step = many_costs.as_slice(at), self._tables.per_position
        if isinstance(where, slice):
            starts, size = self._offsets + step * where.start, step * (at.size - 1) + 1
            if starts.size == 1:
                own = slice(int(starts[0]), int(starts[0]) + size, step)
                return lambda values: values[None, own]
            if starts.size * at.size > _FEW_TIMES:
                return lambda values: np.asarray(np.lib.stride_tricks.sliding_window_view(values, size)[:, ::step][starts])
        index = self._offsets.reshape(-1, *(1,) * at.ndim) + step * at
        return lambda values: np.asarray(values[index])


_GROWTH = 16
"""Positions after the last one of which times are also computed, since rounds go beyond the last token."""
_WINDOWS = 65_536
"""Times whose sums are computed together: half a MB."""
_FEW_TIMES = 16_384
"""Times up to which an index of each takes less than a view of windows."""
_MOST_TABULATED = 1 << 17
"""Largest prompt of which times are kept."""


def errors_of(costs: VariedSeconds, tokens: int | NDArray[np.int64]) -> Floats:
    """Relative error of the time of plain decoding of `tokens` tokens (or as many for each cost), by cost [-].

    The mean error of the steps, weighted by their times.
    """
    found = np.empty(len(costs))
    for mine, each, at, where in _in_blocks(costs, tokens):
        weights = each.plain_times(at)
        wrong, whole = (np.cumsum(values, axis=-1)[where] for values in (each.plain_error(at) * weights, weights))
        found[mine] = wrong / whole
    return found


def plain_times_of(
    costs: VariedSeconds, tokens: int | NDArray[np.int64], step_times: Callable[[NDArray[np.intp], ManySeconds], Floats]
) -> Floats:  # fmt: skip
    """Time of plain decoding of `tokens` tokens (or as many for each cost), by cost [s], from the times of steps at positions."""
    found = np.empty(len(costs))
    for mine, each, at, where in _in_blocks(costs, tokens):
        found[mine] = np.cumsum(step_times(at, each), axis=-1)[where]
    return found


def _in_blocks(
    costs: VariedSeconds, tokens: int | NDArray[np.int64]
) -> Iterator[tuple[NDArray[np.intp], ManySeconds, NDArray[np.intp], tuple[NDArray[np.intp], NDArray[np.intp]]]]:
    """Blocks of distinct costs: indices of the costs in it, these as one, positions, and the index of each one's last position."""
    distinct, which = costs.unique()
    lengths = np.broadcast_to(np.asarray(tokens), len(costs))
    at = np.arange(int(lengths.max(initial=1)))
    size = max(_CELLS // at.size, 1)
    for start in range(0, len(distinct), size):
        mine = np.flatnonzero((which >= start) & (which < start + size))
        yield mine, distinct[start : start + size].joined(), at, (which[mine] - start, lengths[mine] - 1)


_CELLS = 500_000
"""Numbers in arrays by cost and position: a few MB."""
