"""Several costs as one: times have a leading axis of costs, so that the prices of a method are computed once for all of them.

For closed forms only: passes are not split into layers.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import fields
from functools import cached_property
from operator import attrgetter
from typing import Any, TypeVar, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.costs import watched_costs
from model.costs.layer_times import OVERHEADS, UnitCost
from model.costs.step_costs import OPERATIONS, RATIOS, PassShape, StepCosts

Floats = NDArray[np.float64]
Value = TypeVar("Value")
_NUMBERS = (
    "dispatch", "dispatch_per_process", "early_head", "final_head", "link", "promotion", "propagation", "state_check",
    "draft_devices", *RATIOS.values(), *OPERATIONS.values(),
)  # fmt: skip
_numbers_of = attrgetter(*_NUMBERS)
_curve_and_layers_of = attrgetter("verify_cost", "layer_times")


def joined(costs: Sequence[StepCosts]) -> StepCosts:
    """Costs whose times, and other numbers, have a leading axis with one entry for each of `costs`.

    All must have the same number of layers, and either all or none must be `uniform`.

    >>> cost = joined([UnitCost(4, cost_ratio=0.5), UnitCost(4, cost_ratio=0.25, final_head=1.0)])
    >>> cost.plain_times().tolist(), cost.draft_times().tolist(), cost.verify_times([1, 2]).tolist()
    ([4.0, 5.0], [2.0, 1.25], [[4.0, 4.0], [5.0, 5.0]])
    """
    if isinstance(costs, Varied):
        return costs.joined()
    return UnitCosts(costs) if all(type(each) is UnitCost for each in costs) else PricedTogether(costs)


def joined_groups(groups: Sequence[Sequence[StepCosts]]) -> StepCosts:
    """`joined` of all costs of several groups, one after another; those that differ in numbers only are not made singly.

    >>> groups = [UnitCost(4, cost_ratio=0.5)], VariedCosts(UnitCost(4), {"cost_ratio": np.array([0.25, 0.75])})
    >>> joined_groups(groups).draft_times().tolist()
    [2.0, 1.0, 3.0]
    """
    parts: list[Sequence[StepCosts]] = []
    single: list[StepCosts] = []  # costs of groups that follow one another, all made singly
    for group in groups:
        if not isinstance(group, Varied):
            single += group
            continue
        parts += [single, group] if single else [group]
        single = []
    each = [joined(part) for part in (*parts, single) if len(part)]
    if len(each) == 1:
        return each[0]
    units = [part for part in each if isinstance(part, UnitCosts)]
    return UnitCosts.concatenated(units) if len(units) == len(each) else OneAfterAnother(each)


class Varied(Sequence[StepCosts]):
    """Costs that differ from `first` in some numbers only; a single one is made when it is asked for."""

    first: StepCosts

    @abstractmethod
    def at(self, index: NDArray[np.intp]) -> Varied:
        """A subset of the costs, in this order."""

    @abstractmethod
    def unique(self) -> tuple[Varied, NDArray[np.intp]]:
        """Costs with distinct times, and the index of each."""

    @abstractmethod
    def distinct(self, value: Callable[[Any], Value]) -> tuple[list[Value], NDArray[np.intp]] | None:
        """Values of a function of each cost, and the index of each cost's value; None if it must be evaluated for each."""

    @abstractmethod
    def joined(self) -> StepCosts:
        """All of them as one; see `joined`."""

    @abstractmethod
    def passes_only(self) -> Sequence[StepCosts]:
        """Each without overheads; see `StepCosts.passes_only`."""


class VariedCosts(Varied):
    """Costs in layer-times that differ from `first` in some numbers only; a single one is made when it is asked for.

    Parameters
    ----------
    first
        A cost with the other values.
    numbers
        Values by name, each of shape (costs,); valid ones, since they are not checked again.

    >>> costs = VariedCosts(UnitCost(4, cost_ratio=0.5), {"cost_ratio": np.array([0.25, 0.75])})
    >>> costs[1] == UnitCost(4, cost_ratio=0.75), joined(costs).draft_times().tolist()
    (True, [1.0, 3.0])
    """

    def __init__(self, first: UnitCost, numbers: Mapping[str, NDArray[Any]]) -> None:
        self.first: UnitCost = first
        self.numbers = numbers
        self._same = {name: getattr(first, name) for name in _FIELDS}
        self._size = len(next(iter(numbers.values())))

    def __len__(self) -> int:
        return self._size

    @overload
    def __getitem__(self, index: int) -> UnitCost: ...

    @overload
    def __getitem__(self, index: slice) -> VariedCosts: ...

    def __getitem__(self, index: int | slice) -> UnitCost | VariedCosts:
        if isinstance(index, slice):
            return VariedCosts(self.first, {name: values[index] for name, values in self.numbers.items()})
        cost = object.__new__(UnitCost)
        inner = vars(cost)
        inner.update(self._same)
        for name, values in self.numbers.items():
            inner[name] = values[index].item()
        return cost

    def at(self, index: NDArray[np.intp]) -> VariedCosts:
        """A subset of the costs, in this order; the same object if it is all of them."""
        if index.size == self._size and np.array_equal(index, np.arange(self._size)):
            return self
        return VariedCosts(self.first, {name: values[index] for name, values in self.numbers.items()})

    def unique(self) -> tuple[VariedCosts, NDArray[np.intp]]:
        """Distinct ones of the costs, and the index of each.

        >>> costs, index = VariedCosts(UnitCost(4), {"link": np.array([1.0, 0.5, 1.0])}).unique()
        >>> costs.numbers["link"].tolist(), index.tolist()
        ([0.5, 1.0], [1, 0, 1])
        """
        first, index = distinct_rows([*self.numbers.values()], self._size)
        return self.at(first), index

    def distinct(self, value: Callable[[UnitCost], Value]) -> tuple[list[Value], NDArray[np.intp]] | None:
        """See `Varied` and `model.costs.watched_costs.distinct`."""
        return watched_costs.distinct(self.first, self.numbers, value, self._kinds)

    @cached_property
    def _kinds(self) -> tuple[list[int], NDArray[np.intp]]:
        return watched_costs.kinds_of(self.numbers)

    def joined(self) -> UnitCosts:
        """All of them as one, made once; see `joined`."""
        return self._joined

    @cached_property
    def _joined(self) -> UnitCosts:
        return UnitCosts.varied(self)

    def passes_only(self) -> Sequence[StepCosts]:
        """Each without overheads, made once; see `UnitCost.passes_only`."""
        return self._passes_only

    @cached_property
    def _passes_only(self) -> Sequence[StepCosts]:
        numbers = {name: values for name, values in self.numbers.items() if name not in OVERHEADS}
        first = self.first.passes_only()
        return VariedCosts(first, numbers) if numbers else [first] * len(self)


_FIELDS = tuple(field.name for field in fields(UnitCost))


def distinct_rows(columns: Sequence[NDArray[Any]], size: int) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Index of the first of each of the distinct rows of some columns of `size` numbers, and the number of each row among these.

    >>> distinct_rows([np.array([1.0, 0.5, 1.0])], 3)
    (array([1, 0]), array([1, 0, 1]))
    """
    key = np.zeros(size, dtype=np.intp)
    first = key[:1]
    for values in columns:
        own, index = np.unique(values, return_inverse=True)
        _, first, key = np.unique(key * own.size + index, return_index=True, return_inverse=True)
    return first, key


class UnitCosts(UnitCost):
    """Costs in layer-times, with arrays of shape (costs,) in place of numbers.

    Times of passes of single widths are kept: methods whose parameters differ ask for the same passes.
    """

    @staticmethod
    def varied(costs: VariedCosts) -> UnitCosts:
        """The same as of the single costs, without making them."""
        size, first = len(costs), costs.first
        values: dict[str, Any] = {"layers": first.layers}
        for name in _NUMBERS:
            each = costs.numbers.get(name, getattr(first, name))
            missing = name in RATIOS.values() and each is None
            values[name] = None if missing else np.broadcast_to(np.asarray(each, dtype=np.float64), size)
        if first.layer_times is None:
            values["layer_times"] = None
        else:
            values["depths"] = tuple(np.full(size, depth) for depth in first.depths)
        values["_tree"] = np.full(size, first.dispatch_law == "tree")
        values |= {"_curves": [first], "_curve_of": np.zeros(size, dtype=np.intp)}
        found = object.__new__(UnitCosts)
        vars(found).update(values)
        return found

    @staticmethod
    def concatenated(parts: Sequence[UnitCosts]) -> UnitCosts:
        """All costs, one part after another."""
        sizes = [len(vars(part)["final_head"]) for part in parts]
        values: dict[str, Any] = {"layers": parts[0].layers}
        for name in _NUMBERS:
            each = [getattr(part, name) for part in parts]
            values[name] = None if any(one is None for one in each) else np.concatenate(each)
        if all("depths" not in vars(part) for part in parts):
            values["layer_times"] = None
        else:
            depths = [[np.broadcast_to(depth, size) for depth in part.depths] for part, size in zip(parts, sizes, strict=True)]
            values["depths"] = tuple(np.concatenate(column) for column in zip(*depths, strict=True))
        values["_tree"] = np.concatenate([vars(part)["_tree"] for part in parts])
        curves = [vars(part)["_curves"] for part in parts]
        begins = np.cumsum([0, *(len(each) for each in curves)])
        which = [begin + vars(part)["_curve_of"] for begin, part in zip(begins[:-1], parts, strict=True)]
        values |= {"_curves": [curve for each in curves for curve in each], "_curve_of": np.concatenate(which)}
        found = object.__new__(UnitCosts)
        vars(found).update(values)
        return found

    def __init__(self, costs: Sequence[Any]) -> None:
        values: dict[str, Any] = {"layers": costs[0].layers}
        for name, column in zip(_NUMBERS, zip(*map(_numbers_of, costs), strict=True), strict=True):
            missing = name in RATIOS.values() and None in column  # a ratio that one of the costs lacks: `require` then names it
            values[name] = None if missing else np.array(column, dtype=np.float64)  # an unknown operations_ratio is nan
        curves, layer_times = zip(*map(_curve_and_layers_of, costs), strict=True)
        if any(times is not None for times in layer_times):
            values["depths"] = tuple(np.array([each.depths for each in costs], dtype=np.float64).T)
        else:
            values["layer_times"] = None
        values["_tree"] = np.array([each.dispatch_law == "tree" for each in costs], dtype=np.bool_)
        distinct = {id(curve): index for index, curve in enumerate(curves)}  # one of each
        values["_curves"] = [costs[index] for index in distinct.values()]
        place = {key: number for number, key in enumerate(distinct)}
        values["_curve_of"] = np.array([place[id(curve)] for curve in curves], dtype=np.intp)
        vars(self).update(values)

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape by cost, the same at every position; see `UnitCost.times`."""
        try:
            key = shape, np.shape(at)
            found = self._times.get(key)
        except TypeError:  # arrays of widths
            return super().times(shape, at)
        if found is None:
            found = self._times[key] = super().times(shape, at)
            found.flags.writeable = False
        return found

    @cached_property
    def _times(self) -> dict[Any, Floats]:
        return {}

    @property
    def plain(self) -> bool:
        """True if all costs are plain; see `UnitCost.plain`."""
        times = self.early_head, self.final_head, self.dispatch, self.dispatch_per_process, self.link, self.promotion
        alike = "layer_times" in vars(self)  # else there are times of layers
        return not np.any(times) and alike and not vars(self)["_tree"].any()

    def dispatching(self, processes: int) -> Any:
        """Time that starting `processes` sub-processes occupies the starter's unit, by cost."""
        count = np.where(vars(self)["_tree"], math.log2(processes + 1), processes)
        return self.dispatch + self.dispatch_per_process * count

    def slowdowns(self, width: ArrayLike) -> Floats:
        """Slowdown by cost and width."""
        curves: list[UnitCost] = vars(self)["_curves"]
        return np.stack([each.slowdowns(width) for each in curves])[vars(self)["_curve_of"] if len(curves) > 1 else slice(None)]

    def _slowed(self, time: Any, width: ArrayLike, extent: tuple[int, ...]) -> Floats:
        if all(each.curve is None for each in vars(self)["_curves"]):
            return np.broadcast_to(np.reshape(time, (-1,) + (1,) * len(extent)), (len(vars(self)["final_head"]), *extent))
        slow = self.slowdowns(width)
        slow = slow.reshape(len(slow), *(1,) * (len(extent) + 1 - slow.ndim), *slow.shape[1:])
        time = np.reshape(time, (-1,) + (1,) * len(extent))
        return np.broadcast_to(time * slow, (len(vars(self)["final_head"]), *extent))

    def operations(self, role: str) -> Any:
        """Operations per token in a pass of this model relative to the target, by cost [-]; nan without a ratio."""
        return getattr(self, OPERATIONS[role])


class OneAfterAnother(StepCosts):
    """Costs of several parts, each of which has a leading axis of costs.

    Times that depend on the position are kept by shape of passes: methods whose parameters differ ask for the same passes.
    """

    def __init__(self, parts: Sequence[StepCosts]) -> None:
        self.parts = parts
        self.layers, self.uniform = parts[0].layers, parts[0].uniform
        for name in ("link", "promotion", "draft_devices"):
            setattr(self, name, np.concatenate([getattr(each, name) for each in parts]))
        self._begins = np.cumsum([0, *(np.size(each.link) for each in parts)])
        """Index of the first cost of each part, and the number of costs."""
        self._kept: dict[PassShape, Floats] = {}
        self._operations: dict[str, Any] = {}

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape after `at` positions, by cost."""
        where = np.asarray(at)
        if self.uniform or where.dtype.kind not in "iu" or not where.ndim or any(map(np.ndim, shape[2:5])):  # widths are arrays
            return self._times(shape, where)
        index, last = as_slice(where), int(where.max(initial=0))
        found = self._kept.get(shape)
        if found is None or found.shape[1] <= last:
            if (last + 1) * self._begins[-1] > _FEW_TIMES:
                return self._times(shape, where)
            found = self._times(shape, np.arange(last + 1))
            if sum(each.size for each in self._kept.values()) > _MOST_KEPT:
                self._kept.clear()
            found.flags.writeable = False
            self._kept[shape] = found
        return found[:, index]

    def content(self) -> Hashable:
        """See `StepCosts`."""
        return tuple([each.content() for each in self.parts])

    def summed_times(self, shape: PassShape, weights: Floats) -> Floats:
        """See `StepCosts`."""
        return np.concatenate([each.summed_times(shape, weights) for each in self.parts])

    def summed_values(self, shapes: Sequence[PassShape], value: Callable[[Floats], Floats], weights: Floats) -> Floats:
        """See `StepCosts`."""
        return np.concatenate([each.summed_values(shapes, value, weights) for each in self.parts])

    def alike(self, shape: PassShape) -> PassShape:
        """See `StepCosts`."""
        return _agreed([each.alike(shape) for each in self.parts], shape)

    def as_repeated(self, shape: PassShape) -> tuple[PassShape, int]:
        """See `StepCosts`."""
        return _agreed([each.as_repeated(shape) for each in self.parts], (shape, 1))

    def _times(self, shape: PassShape, at: NDArray[Any]) -> Floats:
        return np.concatenate([each.times(shape, at) for each in self.parts])

    def dispatching(self, processes: int) -> Any:
        """Time that starting `processes` sub-processes occupies the starter's unit, by cost."""
        return np.concatenate([each.dispatching(processes) for each in self.parts])

    def within_budgets(self, budgets: Mapping[str, int]) -> OneAfterAnother:
        """See `StepCosts`."""
        return OneAfterAnother([each.within_budgets(budgets) for each in self.parts]) if budgets else self

    def has_model(self, role: str) -> bool:
        """True if the time of passes of this model is known to all costs."""
        return all(each.has_model(role) for each in self.parts)

    def operations(self, role: str) -> Any:
        """Operations per token in a pass of this model relative to the target, by cost [-]."""
        if role not in self._operations:
            self._operations[role] = np.concatenate([each.operations(role) for each in self.parts])
            self._operations[role].flags.writeable = False
        return self._operations[role]

    def operations_at(self, role: str, cost: NDArray[np.intp], at: NDArray[np.int64]) -> Floats:
        """See `StepCosts`."""
        found, part = np.empty(cost.size), np.searchsorted(self._begins, cost, side="right") - 1
        for number in np.unique(part).tolist():
            mine = part == number
            found[mine] = self.parts[number].operations_at(role, cost[mine] - self._begins[number], at[mine])
        return found

    def with_middle(self, at: int) -> OneAfterAnother:
        """See `StepCosts`."""
        return OneAfterAnother([each.with_middle(at) for each in self.parts])


def _agreed(found: Sequence[Value], otherwise: Value) -> Value:
    """The value of all of them, if it is the same."""
    return found[0] if all(each == found[0] for each in found[1:]) else otherwise


_FEW_TIMES = 60_000
"""Times of a pass up to which they are kept: where there are more, what each call takes besides them is small."""
_MOST_KEPT = 2_000_000
"""Numbers in the times that are kept: 16 MB."""


def as_slice(index: NDArray[Any]) -> slice | NDArray[Any]:
    """The same index as a slice if it is of consecutive numbers.

    >>> as_slice(np.array([3, 4, 5])), as_slice(np.array([3, 5]))
    (slice(3, 6, None), array([3, 5]))
    """
    if index.ndim == 1 and index.size > 1 and index[-1] - index[0] == index.size - 1 and (np.diff(index) == 1).all():
        return slice(int(index[0]), int(index[-1]) + 1)
    return index


class PricedTogether(StepCosts):
    """Costs of any kind, priced one after another."""

    def __init__(self, costs: Sequence[StepCosts]) -> None:
        self.costs = costs
        self.layers, self.uniform = costs[0].layers, costs[0].uniform
        for name in ("link", "promotion", "draft_devices"):
            setattr(self, name, np.array([getattr(each, name) for each in costs], dtype=np.float64))

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape after `at` positions, by cost."""
        return np.stack(np.broadcast_arrays(*(each.times(shape, at) for each in self.costs)))

    def content(self) -> Hashable:
        """See `StepCosts`."""
        return tuple([each.content() for each in self.costs])

    def alike(self, shape: PassShape) -> PassShape:
        """See `StepCosts`."""
        return _agreed([each.alike(shape) for each in self.costs], shape)

    def as_repeated(self, shape: PassShape) -> tuple[PassShape, int]:
        """See `StepCosts`."""
        return _agreed([each.as_repeated(shape) for each in self.costs], (shape, 1))

    def dispatching(self, processes: int) -> Any:
        """Time that starting `processes` sub-processes occupies the starter's unit, by cost."""
        return np.array([each.dispatching(processes) for each in self.costs])

    def within_budgets(self, budgets: Mapping[str, int]) -> PricedTogether:
        """See `StepCosts`."""
        return PricedTogether([each.within_budgets(budgets) for each in self.costs]) if budgets else self

    def has_model(self, role: str) -> bool:
        """True if the time of passes of this model is known to all costs."""
        return all(each.has_model(role) for each in self.costs)

    def operations(self, role: str) -> Any:
        """Operations per token in a pass of this model relative to the target, by cost [-]."""
        return np.array([each.operations(role) for each in self.costs])
