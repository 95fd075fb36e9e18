"""Grid of a scenario: its methods times the axes of its sweep. A point is a number, resolved to tables when needed."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np

from model.base import checks
from model.base.checks import ParameterError
from model.base.table_records import build, parse_value
from model.methods import registry
from sim.scenarios import cases, outcomes_section, scenario_file
from sim.scenarios.cases import Case
from sim.scenarios.outcomes.outcome_records import Outcome
from sim.scenarios.scenario_file import SECTIONS, Tables

CACHE_SIZE = 4096
"""Number of resolved parts that a grid caches: points share the parts that do not vary."""
FEW_POINTS = 512
"""Number of points of a grid up to which a value is refused only if it is invalid with all combinations of the other axes."""
RANDOM_COMBINATIONS = 64
"""Number of random combinations with other axes in which an invalid value of a larger grid is tried before it is refused."""
MAX_POINTS = 10**12
"""Bound on the points of a grid, so that point numbers do not overflow."""
SWEPT = ("scenario.tokens", "scenario.seed")
"""Keys of [scenario] that may be swept; the others apply to the whole run."""
MAX_CHECKED_VALUES = 64
"""A longer list, and any range, is checked only at its ends, since the valid values of every numeric parameter form an interval.

Of a long list of lists those with the extremes of each place are checked.
"""


@dataclass(frozen=True)
class Axis:
    """One axis of a sweep: a dotted path and its values."""

    path: str
    values: Sequence[Any]

    @cached_property
    def numeric(self) -> bool:
        """True if every value is a number."""
        return isinstance(self.values, _Range) or all(_number(value) for value in self.values)

    @cached_property
    def listed(self) -> bool:
        """True if every value is a list of numbers, and all have one length."""
        values = self.values
        if isinstance(values, _Range) or not all(isinstance(value, list) and value for value in values):
            return False
        return len({len(value) for value in values}) == 1 and all(_number(each) for value in values for each in value)

    def rows(self, indices: Any) -> Any:
        """The lists at these indices as floats, shape (..., length); for an axis that is `listed`."""
        return self._rows[indices]

    @cached_property
    def _rows(self) -> Any:
        return np.array(self.values, dtype=np.float64)

    def numbers(self, indices: Any) -> Any:
        """The values at these indices as an array of whole numbers or of floats; None if not all values are numbers."""
        if isinstance(self.values, _Range):
            return self.values.array(indices)
        return None if self._array is None else self._array[indices]

    @cached_property
    def _array(self) -> Any:
        if not self.numeric:
            return None
        array = np.asarray(self.values)
        return array if array.dtype.kind in "if" else None  # numbers beyond 64 bits are objects

    def ends(self) -> list[int]:
        """Indices of the values to check before a run: all of a short list, the extremes of a long one and of a range."""
        values = self.values
        if isinstance(values, _Range):
            return sorted({0, len(values) - 1})
        if len(values) > MAX_CHECKED_VALUES and self.listed:
            return sorted({*self._rows.argmin(axis=0).tolist(), *self._rows.argmax(axis=0).tolist()})  # nan is both
        if len(values) <= MAX_CHECKED_VALUES or not self.numeric:
            return list(range(len(values)))
        order = sorted(range(len(values)), key=lambda index: values[index])
        kinds = {type(value): index for index, value in enumerate(values)}
        return [order[0], order[-1], *(index for index, value in enumerate(values) if value != value), *kinds.values()]


class _Range(Sequence[Any]):
    """Evenly spaced numbers from `start` to `stop`, both included; integers if the ends and the step are."""

    def __init__(self, start: float, stop: float, count: int) -> None:
        self.start, self.stop, self.size = start, stop, count
        self.whole = isinstance(start, int) and isinstance(stop, int) and (count == 1 or (stop - start) % (count - 1) == 0)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: Any) -> Any:
        if not 0 <= index < self.size:
            raise IndexError(index)
        # As `array`, whose arithmetic is the same.
        value = self.start + index * ((self.stop - self.start) / max(self.size - 1, 1))
        return round(value) if self.whole else float(self.stop if index == self.size - 1 else value)

    def array(self, indices: Any) -> Any:
        """The values at these indices."""
        step = (self.stop - self.start) / max(self.size - 1, 1)
        values = self.start + indices * step
        return np.rint(values).astype(np.int64) if self.whole else np.where(indices == self.size - 1, self.stop, values)


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


class Grid:
    """All points of a scenario. Axes are checked here, once; an invalid combination of values fails only at its point."""

    def __init__(self, tables: Tables, *, check: bool = True) -> None:
        for key in tables:
            if key not in scenario_file.SECTIONS:
                raise ParameterError(f"unknown section [{key}]; {checks.nearest(key, scenario_file.SECTIONS)}")
        self.tables = tables
        self.base = {key: value for key, value in tables.items() if key != "sweep"}
        sweep = tables.get("sweep", {})
        if not isinstance(sweep, Mapping):
            raise ParameterError(f"[sweep] must be a table of paths and lists, got {checks.shown(sweep)}")
        self.axes = tuple(Axis(path, axis_values(path, values)) for path, values in sweep.items())
        self.methods = len(scenario_file.method_tables(self.base))
        self.shape = (max(self.methods, 1), *(len(axis.values) for axis in self.axes))
        self._choices: _Kept[Case] = _Kept()
        self._outcomes: _Kept[Mapping[str, Outcome]] = _Kept()
        self._records: _Kept[Any] = _Kept()
        self._tables: tuple[tuple[int, ...] | None, Tables] = None, {}
        self.points = 1
        for size in self.shape:
            self.points *= size
        if self.points > MAX_POINTS:
            raise ParameterError(f"a grid must have at most {MAX_POINTS:,} points, got {self.points:,}; shorten an axis")
        if check:
            self._check()

    def _check(self) -> None:
        """Raise an error for a value that is invalid in all combinations that are tried; others fail at their points in a run."""
        for axis, indices in enumerate([range(self.shape[0]), *(axis.ends() for axis in self.axes)]):
            for index in indices:
                self._check_value(axis, index)

    def _check_value(self, axis: int, index: int) -> None:
        first: ParameterError | None = None
        for where in self._combinations(axis, index):
            try:
                self.case_at(where)
                return
            except ParameterError as error:
                first = first or error
        assert first is not None
        raise first

    def _combinations(self, axis: int, index: int) -> Iterator[tuple[int, ...]]:
        """A value with the first values of the other axes, then with all others in turn, or in a large grid with random ones."""
        others = [range(size) for size in self.shape]
        others[axis] = range(index, index + 1)
        if self.points <= FEW_POINTS:
            yield from itertools.product(*others)
            return
        draw = random.Random(0)
        yield tuple(each[0] for each in others)
        for _ in range(RANDOM_COMBINATIONS):
            yield tuple(draw.choice(each) for each in others)

    def indices(self, point: int) -> tuple[int, ...]:
        """Index of the method, and of the value on each axis, at a point."""
        return tuple(int(index) for index in np.unravel_index(point, self.shape))

    def values(self, point: int) -> dict[str, Any]:
        """Value of a point on each axis, by path."""
        _, *where = self.indices(point)
        return {axis.path: axis.values[index] for axis, index in zip(self.axes, where, strict=True)}

    def case(self, point: int) -> Case:
        """Return the checked objects of a point; points share the parts that do not vary."""
        return self.case_at(self.indices(point))

    def case_at(self, where: Sequence[int]) -> Case:
        """`case` of the point with these indices on each axis."""
        case = self.choice(where)
        return case.with_outcomes(self.outcomes(where, case))

    def choice(self, where: Sequence[int]) -> Case:
        """Return the checked objects of a point without its outcomes, by its index on each axis."""
        key = tuple([index for index, kind in zip(where, self.kinds, strict=True) if kind != "outcomes"])
        return self._choices.get(key, lambda: self._resolved(where))

    def outcomes_key(self, case: Case) -> tuple[Any, ...]:
        """Key of what outcomes depend on besides axes: the kinds that the method uses, and the depths of its models."""
        depths = () if not self.outcomes_use else tuple([case.parameters.depth(role) for role in case.parameters.roles])
        return case.parameters.outcomes, depths

    @cached_property
    def outcomes_axes(self) -> tuple[bool, ...]:
        """Flags: outcomes may depend on the method (first), and on each axis."""
        known = {"parameters": "method", "tokens": "tokens"}
        relevant = ("outcomes", *(known[each] for each in self.outcomes_use))
        return True, *(kind in relevant for kind in self.kinds[1:])

    @cached_property
    def outcomes_use(self) -> frozenset[str]:
        """What the laws of the grid depend on: `parameters` of the methods, and `tokens`."""
        if any(axis.path.rpartition(".")[2] in ("kind", "name") for axis in self.axes):
            return frozenset(("parameters", "tokens"))
        methods = scenario_file.method_tables(self.base)
        used = {outcome for table in methods for outcome in registry.parameters(table["name"]).OUTCOMES}
        tables = [self.base.get("outcomes"), *(table.get("outcomes") for table in methods)]
        return frozenset().union(*(outcomes_section.uses(table, used) for table in tables if table is not None))

    def outcomes(self, where: Sequence[int], case: Case) -> Mapping[str, Outcome]:
        """Outcomes of a point; `case` has its other objects."""
        shared = [index for index, relevant in zip(where, self.outcomes_axes, strict=True) if relevant]
        key = (*shared, *self.outcomes_key(case))
        return self._outcomes.get(key, lambda: cases.resolve_outcomes(self.tables_at(where), where[0], case))

    @cached_property
    def kinds(self) -> tuple[str, ...]:
        """Part that the method's index and each axis change: `method`, `outcomes`, `tokens`, or `other`."""
        return "method", *(_kind(axis.path) for axis in self.axes)

    def _resolved(self, where: Sequence[int]) -> Case:
        case = cases.resolve_but_outcomes(self.tables_at(where), where[0], self.used, self.record)
        case.contention  # noqa: B018  computed here and cached: all points of this choice share it
        return case

    def record(self, kind: type, table: Any, section: str, remedy: str = "") -> Any:
        """Record of a section, made once for all points whose tables are alike."""
        try:
            content = repr(table)
        except ValueError:  # a whole number of more digits than are printed
            return build(kind, table, section, remedy)
        return self._records.get((kind, section, remedy, content), lambda: build(kind, table, section, remedy))

    def tables_at(self, where: Sequence[int]) -> Tables:
        """Tables of a point without a sweep, by its index on each axis; they must not be changed."""
        key = tuple(where[1:])
        if self._tables[0] != key:
            tables: Tables = _copied(self.base)
            for axis, index in zip(self.axes, key, strict=True):
                scenario_file.apply(tables, axis.path, axis.values[index])
            self._tables = key, tables
        return self._tables[1]

    @cached_property
    def used(self) -> list[frozenset[str]]:
        """Costs that each method uses with any value of the axes: a cost unused at one point may be used at another."""
        try:
            found = cases.used_costs(scenario_file.method_tables(self.base))
        except ParameterError:  # reported when each point is resolved
            return []
        for axis in self.axes:
            if not axis.path.startswith("method."):
                continue
            for index in axis.ends():
                tables = copy.deepcopy(self.base)
                try:
                    scenario_file.apply(tables, axis.path, axis.values[index])
                    more = cases.used_costs(scenario_file.method_tables(tables))
                except ParameterError:  # reported when its point is resolved
                    continue
                found = [one | other for one, other in zip(found, more, strict=True)]
        return found


def _copied(tables: Any) -> Any:
    """Copy nested tables and lists of tables; values are shared."""
    if isinstance(tables, dict):
        return {key: _copied(value) if isinstance(value, dict | list) else value for key, value in tables.items()}
    return [_copied(each) for each in tables] if any(isinstance(each, dict) for each in tables) else tables


def _kind(path: str) -> str:
    first, *rest = path.split(".")
    if first == "scenario":
        return rest[0] if rest == ["tokens"] else "other"
    if first == "outcomes" or (first == "method" and "outcomes" in rest):
        return "outcomes"
    return "method" if first == "method" and "cost" not in rest else "other"


Part = TypeVar("Part")


class _Kept(Generic[Part]):
    """Cache of resolved parts, or of the errors they raise, by key; the oldest entry is dropped first."""

    def __init__(self) -> None:
        self.parts: dict[tuple[Any, ...], Part | ParameterError] = {}

    def get(self, key: tuple[Any, ...], make: Callable[[], Part]) -> Part:
        found = self.parts.get(key)
        if found is None:
            if len(self.parts) >= CACHE_SIZE:
                self.parts.pop(next(iter(self.parts)))
            try:
                found = make()
            except ParameterError as error:
                found = error
            self.parts[key] = found
        if isinstance(found, ParameterError):
            raise found.with_traceback(None)
        return found


def axis_values(path: str, values: Any) -> Sequence[Any]:
    """Values of an axis: a list, or a table of from, to and count."""
    if path.startswith("scenario.") and path not in SWEPT:
        raise ParameterError(f"{path} cannot be swept, it applies to the whole run; of [scenario] only {' and '.join(SWEPT)} can")
    if isinstance(values, Mapping):
        if set(values) != {"from", "to", "count"}:
            # TOML reads a dotted path without quotes as nested tables.
            hint = f'; write the path in quotes: "{path}.{next(iter(values), "KEY")}" = [...]' if path in SECTIONS else ""
            raise ParameterError(f"sweep.{path} must be a list, or a table of from, to and count, got {dict(values)!r}{hint}")
        checks.number(f"sweep.{path}.from", values["from"])
        checks.number(f"sweep.{path}.to", values["to"])
        checks.whole(f"sweep.{path}.count", values["count"], 1, 1_000_000_000)
        return _Range(values["from"], values["to"], values["count"])
    if not isinstance(values, list):
        raise ParameterError(f"sweep.{path} must be a list of values, got {checks.shown(values)}; write it in brackets: [...]")
    if not values:
        raise ParameterError(f"sweep.{path} must have at least one value, got an empty list; give values or leave the axis out")
    return values


def parse_axis(text: str) -> Any:
    """Parse the values of an axis from the command line: a comma list, a TOML list, or from:to:count.

    >>> parse_axis("1,3,5"), parse_axis("0:1:5"), parse_axis("squad,wmt"), parse_axis("[[1, 2], [3]]")
    ([1, 3, 5], {'from': 0, 'to': 1, 'count': 5}, ['squad', 'wmt'], [[1, 2], [3]])
    """
    if isinstance(parse_value(text), list):
        return parse_value(text)
    parts = [parse_value(part) for part in text.split(":")]
    if len(parts) > 1 and _number(parts[0]):
        if len(parts) != 3 or not all(_number(part) for part in parts):
            raise ParameterError(f"an axis must be VALUE,VALUE,... or three numbers from:to:count (0:1:11), got {text!r}")
        return dict(zip(("from", "to", "count"), parts, strict=True))
    return [parse_value(part.strip()) for part in text.split(",")] if text.strip() else []
