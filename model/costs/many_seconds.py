"""Costs in seconds that differ in single numbers, as one: times have a leading axis of costs, as in `model.costs.many_costs`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, overload

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.costs.layer_times import OVERHEADS
from model.costs.many_costs import Varied
from model.costs.pass_seconds import ContextTable, PassSeconds
from model.costs.step_costs import PassShape, StepCosts
from model.hardware.cost_models import Hardware, WithEngineOverhead
from model.hardware.interpolation import Estimate

Floats = NDArray[np.float64]
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
        Values of `prompt` and of times that `PassSeconds` has, by name, each of shape (costs,); valid ones.
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
        """A subset of the costs, in this order."""
        numbers, steps = ({name: values[index] for name, values in each.items()} for each in (self.numbers, self.steps))
        return VariedSeconds(self.first, index.size, numbers, steps)

    def of(self, first: PassSeconds) -> VariedSeconds:
        """The same numbers with another cost, such as an end of the uncertainty."""
        return VariedSeconds(first, self.size, self.numbers, self.steps)

    def passes_only(self) -> VariedSeconds:
        """Each without overheads; see `PassSeconds.passes_only`."""
        numbers = {name: values for name, values in self.numbers.items() if name not in OVERHEADS}
        return VariedSeconds(self.first.passes_only(), self.size, numbers)

    def joined(self) -> ManySeconds:
        """All of them as one."""
        return ManySeconds(self)


class ManySeconds(StepCosts):
    """Costs in seconds, with a leading axis of costs."""

    uniform = False

    def __init__(self, costs: VariedSeconds) -> None:
        self.costs, self.layers = costs, costs.first.layers
        for name in _NUMBERS:
            value = costs.numbers.get(name, getattr(costs.first, name))
            setattr(self, name, np.broadcast_to(np.asarray(value, dtype=np.float64), len(costs)))
        self._by_axes: dict[int, _ByCost] = {}

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape after `at` output positions, by cost [s]."""
        extent = np.broadcast_shapes(np.shape(shape.width), np.shape(shape.sequences), np.shape(at))
        found = self._with_axes(len(extent)).times(shape, at)
        return np.broadcast_to(found, (len(self.costs), *extent))

    def plain_error(self, at: ArrayLike = 0) -> Floats:
        """Relative error of the time of a step of plain decoding, by cost [-]."""
        return np.broadcast_to(self._with_axes(np.ndim(at)).plain_error(at), (len(self.costs), *np.shape(at)))

    def within_budgets(self, budgets: Mapping[str, int]) -> ManySeconds:
        """See `StepCosts`."""
        return ManySeconds(self.costs.of(self.costs.first.within_budgets(budgets))) if budgets else self

    @property
    def target_model(self) -> Hardware:
        """Hardware model of the target; numbers of its passes have a leading axis of costs."""
        return self._with_axes(0).hardware("target")

    def has_model(self, role: str) -> bool:
        """True if there is a hardware model for this role."""
        return self.costs.first.has_model(role)

    def ratio(self, role: str) -> Any:
        """Time of a whole pass of a smaller model relative to a pass of the target, by cost [-]; see `PassSeconds.ratio`."""
        middle = self.costs.first.middle
        return self.draft_times(middle, role=role) / self.plain_times(middle) if self.has_model(role) else None

    def operations(self, role: str) -> Any:
        """Operations per token in a pass of this model relative to the target, by cost [-]."""
        prompts = self.costs.numbers.get("prompt")
        if prompts is None:
            return np.full(len(self.costs), self.costs.first.operations(role))
        return self.costs.first.operations_after(role, prompts)

    def _with_axes(self, axes: int) -> _ByCost:
        """Costs whose numbers are arrays of shape (costs, 1, ..., 1), with this number of further axes."""
        if axes not in self._by_axes:
            costs, shape = self.costs, (-1, *(1,) * axes)
            models = dict(costs.first.hardware_models)
            for role, values in costs.steps.items():
                model = models[role] = object.__new__(WithEngineOverhead)  # its numbers are checked
                vars(model).update(kernels=costs.first.hardware_models[role].kernels, step_s=values.reshape(shape))  # type: ignore[attr-defined]
            found = self._by_axes[axes] = object.__new__(_ByCost)
            vars(found).update(vars(costs.first), hardware_models=models)
            vars(found).update({name: values.reshape(shape) for name, values in costs.numbers.items()})
        return self._by_axes[axes]


class _ByCost(PassSeconds):
    """Costs whose numbers are arrays with a leading axis of costs."""

    def times(self, shape: PassShape, at: ArrayLike = 0) -> Floats:
        """Time of a pass of this shape after `at` output positions [s]; not tabulated."""
        return self.computed_times(shape, np.asarray(at))

    def _layer(self, shape: PassShape, sequences: ArrayLike, at: ArrayLike) -> Estimate:
        """Time of one layer; contexts of several prompts overlap, so each whole number is looked up once."""
        if not np.ndim(self.prompt):
            return super()._layer(shape, sequences, at)
        context = np.asarray(self.context(at, shape.context_budget))
        hardware, role, width = self.hardware(shape.role), shape.role, shape.width

        def looked_up(context: Floats) -> Estimate:
            return hardware.layer(width, context, sequences, busy=self.busy)

        single = not np.ndim(width) and not np.ndim(shape.sequences)
        if not single or context.max(initial=0) > _MOST_TABULATED or (context != np.rint(context)).any():
            return looked_up(context)
        key = role, int(width), int(shape.sequences)  # type: ignore[arg-type]
        return self.by_context.setdefault(key, ContextTable()).at(context.astype(np.intp), looked_up)


_MOST_TABULATED = 1 << 17
"""Largest context of which times are kept."""


def errors_of(costs: VariedSeconds, tokens: int) -> Floats:
    """Relative error of the time of plain decoding, by cost [-]: the mean of its steps, weighted by their times."""
    at, size = np.arange(tokens), max(_CELLS // tokens, 1)
    found = []
    for start in range(0, len(costs), size):
        each = costs[start : start + size].joined()
        weights = each.plain_times(at)
        found.append((each.plain_error(at) * weights).sum(axis=-1) / weights.sum(axis=-1))
    return np.concatenate(found)


_CELLS = 500_000
"""Numbers in arrays by cost and position: a few MB."""
