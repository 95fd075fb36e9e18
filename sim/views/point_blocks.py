"""Points of a grid as indices into the parts that they share, for the view `formula`.

Each distinct part is resolved once. Where an axis holds values of one number, such as a cost ratio or an acceptance rate, its
values are checked as an array and one part is resolved for all (`sim.scenarios.part_columns`). Invalid values are resolved one by
one, so that each point fails as it would alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.costs.many_costs import VariedCosts
from model.methods.method_parameters import MethodParameters
from sim.scenarios import cases, outcomes_section, scenario_file
from sim.scenarios.cases import Case
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes.outcome_records import Outcome
from sim.scenarios.part_columns import CaseGroup, OutcomeGroup, PartColumn
from sim.views.case_facts import CaseColumn, CaseFacts

Floats = NDArray[np.float64]
Index = NDArray[np.intp]
Row = dict[str, Any]
TOKENS = "scenario.tokens"
FEW = 4
"""Number of parts up to which each is resolved alone, since that takes less than arrays."""


@dataclass(frozen=True)
class PointBlock:
    """Points as indices into distinct choices and distinct outcomes."""

    number: Index
    """Number of each point in its grid."""
    choices: CaseColumn
    """Cases without outcomes."""
    outcomes: PartColumn[OutcomeGroup]
    choice: Index
    outcome: Index

    def at(self, index: Index) -> PointBlock:
        """Return a selection of the points, in this order."""
        return PointBlock(self.number[index], self.choices, self.outcomes, self.choice[index], self.outcome[index])

    @cached_property
    def used_choices(self) -> tuple[Index, Index]:
        """Rising indices of the choices of these points, and the place of each point's choice among them."""
        used, index = np.unique(self.choice, return_inverse=True)
        return used, index

    @cached_property
    def facts(self) -> CaseFacts:
        """Facts about the choice of each point."""
        return CaseFacts(*(each[self.choice] for each in self.choices.facts))

    @cached_property
    def segments(self) -> list[tuple[CaseGroup, slice, Index]]:
        """Groups of the used choices; see `PartColumn.segments`."""
        return [*self.choices.segments(self.used_choices[0])]

    @cached_property
    def segment(self) -> Index:
        """Place of each point's group in `segments`."""
        sizes = [part.stop - part.start for _, part, _ in self.segments]
        return np.repeat(np.arange(len(sizes)), sizes)[self.used_choices[1]]

    def of_decodings(self, value: Callable[[MethodParameters, Any], Any]) -> Floats:
        """Evaluate a function of parameters and tokens for each point, once for choices that share these.

        Of several numbers of tokens that are predicted together it gets the array.
        """
        used, index = self.used_choices
        known: dict[tuple[int, int], float] = {}
        found = np.empty(used.size)
        for group, part, places in self.segments:
            parameters, tokens = group.first.parameters, group.first.settings.tokens
            if group.tokens is not None:
                found[part] = value(parameters, group.tokens[places])
                continue
            key = id(parameters), tokens
            if key not in known:
                known[key] = value(parameters, tokens)
            found[part] = known[key]
        return found[index]

    def case(self, point: int) -> Case:
        """Return the case of one point, by its index in this block."""
        case: Case = self.choices[int(self.choice[point])]
        return case.with_outcomes(self.outcomes[int(self.outcome[point])])


def of_case(case: Case) -> PointBlock:
    """Return a block of a single point."""
    one = np.zeros(1, dtype=np.intp)
    return PointBlock(one, CaseColumn([CaseGroup(case)]), PartColumn([OutcomeGroup(case.outcomes)]), one, one)


class _Failed:
    """A part that cannot be made, in place of a group of one."""

    def __init__(self, error: ParameterError) -> None:
        self.first = error

    def __len__(self) -> int:
        return 1

    def member(self, place: int) -> ParameterError:
        return self.first

    def at(self, places: Index) -> _Failed:
        return self


def of_grid(grid: Grid, start: int, stop: int) -> tuple[PointBlock, list[Row]]:
    """Resolve the points [start, stop) of a grid; return the valid ones, and a failure for each of the others."""
    number = np.arange(start, stop)
    where = np.stack(np.unravel_index(number, grid.shape))
    varied_costs, varied_rates = _number_axes(grid)
    shared: dict[Any, Any] = {}

    def case_at(point: Sequence[int]) -> CaseGroup:
        return CaseGroup(grid.choice(point))

    def cases_at(first: CaseGroup, points: NDArray[np.intp]) -> tuple[CaseGroup, NDArray[np.bool_]] | None:
        return _cases(grid, first.first, points, varied_costs, shared)

    relevant = [kind != "outcomes" for kind in grid.kinds]
    choices, choice = _parts(where, grid.shape, relevant, varied_costs, case_at, cases_at)
    which: dict[Any, int] = {}
    keys = [None if isinstance(each, _Failed) else grid.outcomes_key(each.first) for each in choices.groups]
    needs = [which.setdefault(key, len(which)) for key in keys]
    need = np.repeat(np.array(needs, dtype=np.intp), np.diff(choices.starts))[choice]

    def outcomes_at(point: Sequence[int]) -> OutcomeGroup:
        case = choices[choice[int(np.ravel_multi_index(tuple(point), grid.shape)) - start]]
        if isinstance(case, ParameterError):
            raise case
        return OutcomeGroup(grid.outcomes(point, case))

    def several_outcomes(first: OutcomeGroup, points: NDArray[np.intp]) -> tuple[OutcomeGroup, NDArray[np.bool_]] | None:
        case = choices[choice[int(np.ravel_multi_index(tuple(points[:, 0].tolist()), grid.shape)) - start]]
        return _outcomes(grid, first.first, case.parameters, points, varied_rates)

    outcomes, outcome = _parts(where, grid.shape, grid.outcomes_axes, varied_rates, outcomes_at, several_outcomes, need)
    failures, good = [], np.ones(number.size, dtype=np.bool_)
    for column, index in ((choices, choice), (outcomes, outcome)):
        for each, begin in zip(column.groups, column.starts.tolist(), strict=False):
            if isinstance(each, _Failed):
                wrong = np.flatnonzero((index == begin) & good)
                good[wrong] = False
                failures += [failure(point, each.first) for point in number[wrong].tolist()]
    (choices, choice), (outcomes, outcome) = _used(choices, choice[good]), _used(outcomes, outcome[good])
    return PointBlock(number[good], CaseColumn(choices.groups), outcomes, choice, outcome), failures


def failure(point: int, error: Exception) -> Row:
    """Row of a point without estimates."""
    return {"point": point, "view": "formula", "error": str(error)}


def _used(column: PartColumn[Any], index: Index) -> tuple[PartColumn[Any], Index]:
    """Keep the parts that any point uses, with the index of each point's part."""
    used, again = np.unique(index, return_inverse=True)
    return column.at(used), again


def _parts(
    where: NDArray[np.intp], shape: Sequence[int], relevant: Sequence[bool], varied: Mapping[int, Any],
    make: Callable[[Sequence[int]], Any], vary: Callable[[Any, NDArray[np.intp]], tuple[Any, NDArray[np.bool_]] | None],
    *more: Index,
) -> tuple[PartColumn[Any], Index]:  # fmt: skip
    """Distinct parts of points (or the error of making one), by the relevant axes, and the index of each point's part.

    Parts that differ in the `varied` axes only are one group: `make` makes one, and `vary` the others from it, as arrays, with the
    mask of those points whose values are valid.
    """
    axes = [axis for axis, is_relevant in enumerate(relevant) if is_relevant]
    sizes = [*(shape[axis] for axis in axes), *(int(each.max()) + 1 for each in more)]
    keys = np.ravel_multi_index((*where[axes], *more), sizes)
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    groups: list[Any] = []
    order: list[Index] = []
    where = where[:, first]

    def alone(each: int) -> Any:
        try:
            return make(where[:, each].tolist())
        except ParameterError as error:
            return _Failed(error)

    fixed = [axis for axis in axes if axis not in varied]
    others = (*where[fixed], *(each[first] for each in more), np.zeros(first.size, dtype=np.intp))
    key = np.ravel_multi_index(others, [*(shape[axis] for axis in fixed), *(int(each.max()) + 1 for each in more), 1])
    by_key = np.argsort(key, kind="stable")
    bounds = np.flatnonzero(np.diff(key[by_key], prepend=-1, append=-1))
    for begin, end in zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        mine = by_key[begin:end]
        while mine.size > FEW:
            mine, group = _several(mine, alone, vary, where)
            if group is None:
                break
            taken, several = group
            groups.append(several)
            order.append(taken)
        for each in mine.tolist():
            groups.append(alone(each))
            order.append(np.array([each]))
    place = np.empty(first.size, dtype=np.intp)
    place[np.concatenate(order)] = np.arange(first.size)
    return PartColumn(groups), place[index]


def _several(
    mine: Index, alone: Callable[[int], Any], vary: Callable[[Any, NDArray[np.intp]], Any], where: NDArray[np.intp]
) -> tuple[Index, tuple[Index, Any] | None]:
    """Those of these parts that must be made alone, and the others with their group."""
    for template in (mine[0], mine[-1], mine[mine.size // 2]):  # the values at the ends may be invalid
        one = alone(int(template))
        if not isinstance(one, _Failed):
            break
    else:
        return mine, None
    several = vary(one, where[:, np.concatenate([[template], mine])])
    if several is None:
        return mine, None
    group, valid = several
    taken = mine[valid]
    return mine[~valid], (taken, group) if taken.size else None


# --- Numbers as arrays ---------------------------------------------------------------------------------------------------


def _number_axes(grid: Grid) -> tuple[dict[int, str], dict[int, tuple[str, str]]]:
    """Axes of tokens or a number of the costs, and of rates of the outcomes (kind and key), by their place in the grid's shape."""
    costs, rates = {}, {}
    for place, axis in enumerate(grid.axes, start=1):
        section, *path = axis.path.split(".")
        if section == "cost" and len(path) == 1 and axis.numeric and _varies(path[0]):
            costs[place] = path[0]
        elif axis.path == TOKENS and axis.numeric:
            costs[place] = axis.path
        elif section == "outcomes" and len(path) <= 2 and (axis.numeric or axis.listed) and path[-1] in outcomes_section.rates():
            rates[place] = ("" if len(path) == 1 else path[0], path[-1])
    return costs, rates


def _varies(key: str) -> bool:
    """Return whether a whole axis of this number of the costs is resolved at once."""
    if key in cases.VARIED:
        return True
    from sim.scenarios import hardware_axes

    return key in hardware_axes.VARIED


def _numbers(grid: Grid, axis: int, points: NDArray[np.intp]) -> NDArray[Any] | None:
    values: NDArray[Any] | None = grid.axes[axis - 1].numbers(points[axis])
    return values


def _cases(
    grid: Grid, first: Case, points: NDArray[np.intp], axes: Mapping[int, str], shared: dict[Any, Any]
) -> tuple[CaseGroup, NDArray[np.bool_]] | None:
    """Cases at points (all but the first of them, which is that of `first`), and the mask of points that are among them.

    Points with an invalid value are not, nor those that differ from the first one in a number that cannot vary here. `shared` holds
    the costs of other groups: those with the same costs share them, and with them the times of passes.
    """
    tokens = next((axis for axis, name in axes.items() if name == TOKENS), None)
    costs = {axis: name for axis, name in axes.items() if axis != tokens}
    taken = np.ones(points.shape[1] - 1, dtype=np.bool_)
    lengths = None if tokens is None else _lengths(grid, first, tokens, points, taken)
    several = None
    if lengths is not None and first.hardware is not None:
        several = _costs(grid, first, points[:, np.concatenate([[True], taken])], costs, shared, lengths[taken])
        lengths = None  # the group has them
    if several is None:
        if tokens is not None and lengths is None:
            taken = points[tokens, 1:] == points[tokens, 0]
        several = _costs(grid, first, points[:, np.concatenate([[True], taken])], costs, shared) if costs else None
    if several is None and lengths is None:
        return None
    if several is None:
        for axis in costs:
            taken &= points[axis, 1:] == points[axis, 0]
        assert lengths is not None
        return CaseGroup(first, tokens=lengths[taken]), taken
    group, valid = several
    places = np.flatnonzero(taken)[valid]
    taken[:] = False
    taken[places] = True
    return group if lengths is None else CaseGroup(first, group.costs, places.size, lengths[places]), taken


def _lengths(
    grid: Grid, first: Case, axis: int, points: NDArray[np.intp], taken: NDArray[np.bool_]
) -> NDArray[np.int64] | None:  # fmt: skip
    """Tokens at points (all but the first of them), if they may vary; takes invalid numbers from `taken`."""
    values = _numbers(grid, axis, points[:, 1:])
    if values is None or values.dtype.kind != "i" or not first.tokens_vary:
        return None
    taken &= (values >= 1) & (values <= checks.MAX_TOKENS)
    if not first.parameters.allows_any_tokens:
        distinct, which = np.unique(values, return_inverse=True)
        taken &= np.array([_fits(first, tokens) for tokens in distinct.tolist()], dtype=np.bool_)[which]
    return np.asarray(values)


def _fits(case: Case, tokens: int) -> bool:
    try:
        case.parameters.check_tokens(tokens)
    except ParameterError:
        return False
    return True


def _costs(
    grid: Grid, first: Case, points: NDArray[np.intp], axes: Mapping[int, str], shared: dict[Any, VariedCosts],
    lengths: NDArray[np.int64] | None = None,
) -> tuple[CaseGroup, NDArray[np.bool_]] | None:  # fmt: skip
    """Cases at points, as `_cases`, which differ in numbers of their costs only; None if these must be resolved one by one.

    On hardware they may also differ in their tokens, `lengths`.
    """
    tables, method = grid.tables_at(points[:, 0].tolist()), int(points[0, 0])
    numbers, valid = {}, np.ones(points.shape[1] - 1, dtype=np.bool_)
    own = scenario_file.method_tables(tables)[method].get("cost")
    if lengths is None and own is not None and "cost" in grid.base and scenario_file.cost_of(tables, {"cost": own}) is own:
        # The axes are of other methods.
        return CaseGroup(first, size=valid.size), valid
    for axis, name in axes.items():
        values = _numbers(grid, axis, points[:, 1:])
        if values is None:
            return None
        numbers[name] = values
    if first.hardware is not None:
        from sim.scenarios import hardware_axes

        def make(place: int) -> Case:
            return grid.choice(points[:, 1 + place].tolist())

        return hardware_axes.varied(first, tables, method, numbers, lengths, valid.size, make, grid.record, shared)
    record = first.varies_with(tables, method, axes.values(), grid.record)
    if record is None or not isinstance(first.cost, UnitCost):
        return None
    for name, values in numbers.items():
        valid &= record.allowed(name, values)
    numbers = {name: values[valid] for name, values in numbers.items()}
    key = id(first.cost), *((name, values.dtype, values.tobytes()) for name, values in numbers.items())
    return CaseGroup(first, shared.setdefault(key, VariedCosts(first.cost, numbers))), valid


def _outcomes(
    grid: Grid, first: Mapping[str, Outcome], parameters: MethodParameters, points: NDArray[np.intp],
    axes: Mapping[int, tuple[str, str]],
) -> tuple[OutcomeGroup, NDArray[np.bool_]] | None:  # fmt: skip
    """Outcomes at points (all but the first of them, which has `first`), and the mask of points with valid values."""
    if not axes:
        return None
    tables = grid.tables_at(points[:, 0].tolist())
    table, own = tables.get("outcomes"), scenario_file.method_tables(tables)[int(points[0, 0])].get("outcomes")
    rates, valid = {}, np.ones(points.shape[1] - 1, dtype=np.bool_)
    if not first or (own is not None and "outcomes" in grid.base):  # the axes are of other methods
        return OutcomeGroup(first, size=valid.size), valid
    if own is not None or not isinstance(table, Mapping):
        return None
    for axis, path in axes.items():
        given = grid.axes[axis - 1]
        values = given.rows(points[axis, 1:]) if given.listed else given.numbers(points[axis, 1:])
        if values is None or values.dtype.kind != "f":  # whole numbers stay such in the table
            return None
        inside = (values >= 0) & (values <= 1)
        valid &= inside.all(axis=1) if given.listed else inside
        rates[path] = values
    varied = outcomes_section.varied(table, "outcomes", first, {path: values[valid] for path, values in rates.items()}, parameters)
    if varied is None:
        return None
    if type(parameters).check_law is not MethodParameters.check_law:
        refused = np.array([_refused(parameters, name, law) for name, each in varied.items() for law in each.laws], dtype=np.bool_)
        if refused.any():
            return None
    return OutcomeGroup(first, varied), valid


def _refused(parameters: MethodParameters, name: str, law: Any) -> bool:
    try:
        parameters.check_law(name, law)
    except ParameterError:
        return True
    return False
