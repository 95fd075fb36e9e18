"""Columns of parts that points share: cases and outcomes, in groups whose members differ in single numbers only.

A group holds one part and arrays of the numbers in which the others differ. A member is made when it is asked for; what does not
depend on the numbers is evaluated once for the whole group.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Generic, Protocol, Self, TypeVar, overload

import numpy as np
from numpy.typing import NDArray

from model.costs import watched_costs
from model.costs.many_costs import VariedCosts
from model.costs.step_costs import StepCosts
from model.methods.prediction import by_outcome
from sim.scenarios.cases import Case, OneDevice
from sim.scenarios.outcomes.outcome_records import Outcome, VariedOutcomes

if TYPE_CHECKING:
    from model.costs.many_seconds import VariedSeconds

Floats = NDArray[np.float64]
Index = NDArray[np.intp]
Integers = NDArray[np.int64]
Value = TypeVar("Value")
Part = TypeVar("Part", covariant=True)


class Group(Protocol[Part]):
    """Parts that differ in single numbers only."""

    @property
    def first(self) -> Part:
        """A part with everything that is the same for all."""

    def __len__(self) -> int: ...

    def member(self, place: int) -> Part:
        """One of the parts."""

    def at(self, places: Index) -> Self:
        """A subset, in this order."""


class CaseGroup:
    """Cases that differ in numbers of their costs, and in their number of tokens, only; or `size` equal ones.

    Parameters
    ----------
    first
        A case.
    costs, tokens
        Costs and numbers of tokens of all cases, if they differ; shape (cases,).
    size
        Number of equal cases.
    """

    def __init__(self, first: Case, costs: VariedCosts | None = None, size: int = 1, tokens: Integers | None = None) -> None:
        self.first, self.costs, self.tokens = first, costs, tokens
        self.size = len(costs) if costs is not None else size if tokens is None else tokens.size
        self._made: dict[int, Case] = {}
        self._of_lengths: dict[Any, Case] = {}

    def __len__(self) -> int:
        return self.size

    def member(self, place: int) -> Case:
        """One of the cases."""
        if place not in self._made:
            case = self.first if self.costs is None else self.first.with_cost(self.costs[place])
            self._made[place] = case if self.tokens is None else case.with_tokens(int(self.tokens[place]))
        return self._made[place]

    def at(self, places: Index) -> CaseGroup:
        """A subset of the cases, in this order."""
        costs, tokens = (None if each is None else _at(each, places) for each in (self.costs, self.tokens))
        found = CaseGroup(self.first, costs, places.size, tokens)
        found._of_lengths = self._of_lengths  # these keep what was computed from them
        return found

    def distinct(self, value: Callable[[Case], Value], places: Index) -> tuple[list[Value], Index]:
        """Values of these cases, and the index of each case's value; one for cases between which nothing that it uses differs."""
        if self.tokens is None:
            return self._distinct(value, self.first, places)
        values: list[Value] = []
        index = np.empty(places.size, dtype=np.intp)

        def of_length(tokens: Any, mine: Index) -> tuple[list[Value], Index]:
            return self._distinct(value, self._case_of(tokens), places[mine])

        for (each, own), mine in watched_costs.of_numbers(self.tokens[places], of_length):
            index[mine] = len(values) + own
            values += each
        return values, index

    def _distinct(self, value: Callable[[Case], Value], first: Case, places: Index) -> tuple[list[Value], Index]:
        """`distinct` of cases with as many tokens as `first`."""
        if self.costs is None:
            return [value(first)], np.zeros(places.size, dtype=np.intp)
        costs = self.costs.at(places)
        found = costs.distinct(lambda cost: value(first.with_cost(cost)))
        return ([value(first.with_cost(cost)) for cost in costs], np.arange(places.size)) if found is None else found

    def numbers(self, name: str) -> NDArray[Any] | None:
        """Values of a number of the costs, or of `tokens`; None if all cases have the same."""
        if name == "tokens":
            return self.tokens
        return None if self.costs is None else self.costs.numbers.get(name)

    def _case_of(self, tokens: Any) -> Case:
        """A case with this number of tokens, or with any of several (`watched_costs.between`); made once."""
        key = tokens if isinstance(tokens, int) else tokens.bounds
        if key not in self._of_lengths:
            self._of_lengths[key] = self.first.with_tokens(tokens)
        return self._of_lengths[key]

    def on_one_device(self) -> OneDevice:
        """Plain decoding of each case on one device; shapes (cases,) or ()."""
        return self.first.on_one_device

    def costs_of(self, which: str) -> Sequence[StepCosts]:
        """Costs of the cases; `which` is that of `Case.cost_at`."""
        if self.costs is None:
            return [self.first.cost_at(which)] * self.size
        return self.costs.passes_only() if which == "passes" else self.costs

    def distinct_costs(self, which: str) -> tuple[Sequence[StepCosts], Index]:
        """As `costs_of`, but equal costs of as many tokens once where they are known as such, and the index of each case's."""
        if self.costs is None and self.tokens is None:
            return [self.first.cost_at(which)], np.zeros(self.size, dtype=np.intp)
        return self.costs_of(which), np.arange(self.size)


def _at(values: Any, places: Index) -> Any:
    return values.at(places) if isinstance(values, VariedCosts) else values[places]


class HardwareGroup(CaseGroup):
    """Cases on hardware that differ in numbers of their costs, and in their number of tokens, only.

    Functions of cases are evaluated for the first one, with each number of tokens: `sim.scenarios.hardware_axes` has said which
    cases are alike, and `columns` has what differs.

    Parameters
    ----------
    first, costs
        A case, and the costs of all.
    columns
        Columns of costs that differ, by name; shape (cases,).
    make
        Resolves one of the cases.
    tokens
        Number of tokens of each case, if they differ; shape (cases,).
    alone
        Costs of plain decoding on one device, if the model is known to fit one in any of the cases.
    """

    def __init__(
        self, first: Case, costs: VariedSeconds, columns: Mapping[str, NDArray[Any]], make: Callable[[int], Case],
        places: Index | None = None, *, tokens: Integers | None = None, alone: VariedSeconds | None = None,
    ) -> None:  # fmt: skip
        super().__init__(first, None, len(costs), tokens)
        self.seconds, self.columns, self._make, self._alone = costs, columns, make, alone
        self.places = np.arange(len(costs)) if places is None else places

    def member(self, place: int) -> Case:
        """One of the cases."""
        if place not in self._made:
            self._made[place] = self._make(int(self.places[place]))
        return self._made[place]

    def at(self, places: Index) -> HardwareGroup:
        """A subset of the cases, in this order."""
        columns = {name: values[places] for name, values in self.columns.items()}
        alone = None if self._alone is None else self._alone.at(places)
        tokens = None if self.tokens is None else self.tokens[places]
        found = HardwareGroup(
            self.first, self.seconds.at(places), columns, self._make, self.places[places], tokens=tokens, alone=alone
        )  # fmt: skip
        found._of_lengths = self._of_lengths
        return found

    def numbers(self, name: str) -> NDArray[Any] | None:
        """Values of a column, or of `tokens`; None if all cases have the same."""
        return self.tokens if name == "tokens" else self.columns.get(name)

    def on_one_device(self) -> OneDevice:
        """Plain decoding of each case on one device; shapes (cases,) or ()."""
        error = self.columns.get("one_device_error", np.asarray(0.0))
        if self._alone is None:
            return OneDevice(np.asarray(np.nan), self.columns["seconds_error"], error)
        if self.tokens is None:
            time = self.first.parameters.plain_time(self.first.settings.tokens, self._alone.joined())
        else:
            from model.costs import many_seconds

            time = many_seconds.plain_times_of(self._alone, self.tokens, self.first.parameters.plain_step_times)
        return OneDevice(np.where(np.isnan(error), np.nan, time), self.columns["seconds_error"], error)

    def costs_of(self, which: str) -> Sequence[StepCosts]:
        """Costs of the cases; `which` is that of `Case.cost_at`."""
        if which == "passes":
            return self.seconds.passes_only()
        from model.costs.pass_seconds import PassSeconds

        cost = self.first.cost_at(which)
        assert isinstance(cost, PassSeconds)
        return self.seconds.of(cost)

    def distinct_costs(self, which: str) -> tuple[Sequence[StepCosts], Index]:
        """As `costs_of`, but equal costs of as many tokens once where they are known as such, and the index of each case's."""
        if which == "passes" and self.tokens is None:  # without the overheads in which they differ
            return self.seconds.passes_only().unique()
        return self.costs_of(which), np.arange(self.size)


class OutcomeGroup:
    """Outcomes by kind, of which those in `varied` differ in rates; without them equal mappings, of which there are `size`."""

    def __init__(self, first: Mapping[str, Outcome], varied: Mapping[str, VariedOutcomes] | None = None, size: int = 1) -> None:
        self.first, self.varied = first, varied or {}
        self.size = len(next(iter(self.varied.values()))) if self.varied else size

    def __len__(self) -> int:
        return self.size

    def member(self, place: int) -> Mapping[str, Outcome]:
        """One of the mappings."""
        return {name: self.varied[name][place] if name in self.varied else outcome for name, outcome in self.first.items()}

    def at(self, places: Index) -> OutcomeGroup:
        """A subset, in this order."""
        return OutcomeGroup(self.first, {name: each.at(places) for name, each in self.varied.items()}, places.size)

    def laws(self, which: str) -> list[Any]:
        """Laws in the form that a method's `predict` takes, at given rates: `law`, or an end of their interval, `low` or `high`."""
        columns = {name: self.varied[name].laws_of(which) if name in self.varied else None for name in self.first}
        fixed = {name: _law(outcome, which) for name, outcome in self.first.items()}
        if not self.varied:
            return [by_outcome(fixed)] * self.size
        if len(columns) == 1:
            ((_, laws),) = columns.items()
            return [*(laws or ())]
        return [
            by_outcome({name: fixed[name] if laws is None else laws[place] for name, laws in columns.items()})
            for place in range(len(self))
        ]

    @property
    def bounded(self) -> bool:
        """True if a rate has an interval."""
        return any(outcome.low is not None for outcome in self.first.values())


def _law(outcome: Outcome, which: str) -> Any:
    return (outcome.low if which == "low" else outcome.high if which == "high" else None) or outcome.law


AnyGroup = TypeVar("AnyGroup", bound=Group[Any])


class PartColumn(Sequence[Any], Generic[AnyGroup]):
    """Parts of all groups, one after another."""

    def __init__(self, groups: Sequence[AnyGroup]) -> None:
        self.groups = groups
        self.starts = np.cumsum([0, *(len(group) for group in groups)])

    def __len__(self) -> int:
        return int(self.starts[-1])

    @overload
    def __getitem__(self, index: int) -> Any: ...

    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...

    def __getitem__(self, index: int | slice) -> Any:
        if isinstance(index, slice):
            return [self[each] for each in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        number = int(np.searchsorted(self.starts, index, side="right")) - 1
        return self.groups[number].member(int(index) - int(self.starts[number]))

    def segments(self, used: Index) -> Iterator[tuple[AnyGroup, slice, Index]]:
        """Groups that rising indices use: each with their slice in these, and their places in the group."""
        number = np.searchsorted(self.starts, used, side="right") - 1
        bounds = [0, *(np.flatnonzero(np.diff(number)) + 1).tolist(), used.size]
        for start, stop in itertools.pairwise(bounds):
            if start < stop:
                group = int(number[start])
                yield self.groups[group], slice(start, stop), used[start:stop] - self.starts[group]

    def at(self, used: Index) -> Self:
        """Those parts that rising indices use."""
        return type(self)([group.at(places) for group, _, places in self.segments(used)])


def values_of(segments: Sequence[tuple[CaseGroup, slice, Index]], value: Callable[[Case], Any]) -> Floats:
    """A function of cases, of a number or a tuple of numbers, by segment; see `CaseGroup.distinct`."""
    found = []
    for group, _, places in segments:
        each, index = group.distinct(value, places)
        found.append(np.array(each, dtype=np.float64)[index])
    return np.concatenate(found) if found else np.empty(0)
