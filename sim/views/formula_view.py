"""The view `formula`: closed forms, evaluated for many points of a grid at once.

Points share their choices (method, parameters, tokens, costs, cluster) and their outcomes. Each choice and each set of outcomes is
resolved once, the theory is evaluated for all points of a method together, and rows are assembled by column.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.costs.step_costs import StepCosts
from model.interpret.account import Work, flops_and_bytes
from model.methods import registry
from model.methods.prediction import MethodChoice, Prediction, PredictionPoints, by_outcome
from model.steps import CacheError
from sim.scenarios.cases import Case
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes.outcome_records import Outcome
from sim.views import metrics, point_columns, time_breakdown

Floats = NDArray[np.float64]
Index = NDArray[np.intp]
Row = dict[str, Any]

EXPECTED = (ParameterError, CacheError)
"""Errors that may occur at one point of a grid and not at others."""
MANY_POINTS = 1000
"""Points of one method above which times of passes are not evaluated twice, where one evaluation has both."""
FAILED = {"point": pl.Int64, "view": pl.String, "error": pl.String}


@dataclass(frozen=True)
class PointBlock:
    """Points as indices into distinct choices and distinct outcomes."""

    number: Index
    """Number of each point in its grid."""
    choices: Sequence[Case]
    """Cases without outcomes."""
    outcomes: Sequence[Mapping[str, Outcome]]
    choice: Index
    outcome: Index

    def at(self, index: Index) -> PointBlock:
        """Return a selection of the points, in this order."""
        return PointBlock(self.number[index], self.choices, self.outcomes, self.choice[index], self.outcome[index])

    @cached_property
    def _used(self) -> tuple[list[Case], Index]:
        used, index = np.unique(self.choice, return_inverse=True)
        return [self.choices[each] for each in used.tolist()], index

    def of_choices(self, value: Callable[[Case], float]) -> Floats:
        """Evaluate a function of the choice for each point."""
        used, index = self._used
        return np.array([value(case) for case in used], dtype=np.float64)[index]

    def of_decodings(self, value: Callable[[Case], float]) -> Floats:
        """Evaluate a function of parameters and tokens for each point, once for choices that share these objects."""
        used, index = self._used
        decodings = [(id(case.parameters), case.settings.tokens) for case in used]
        values = {each: value(case) for each, case in dict(zip(decodings, used, strict=True)).items()}
        return np.array([values[each] for each in decodings], dtype=np.float64)[index]

    def case(self, point: int) -> Case:
        """Return the case of one point, by its index in this block."""
        return self.choices[int(self.choice[point])].with_outcomes(self.outcomes[int(self.outcome[point])])


def of_case(case: Case) -> PointBlock:
    """Return a block of a single point."""
    one = np.zeros(1, dtype=np.intp)
    return PointBlock(one, [case], [case.outcomes], one, one)


def of_grid(grid: Grid, start: int, stop: int) -> tuple[PointBlock, list[Row]]:
    """Resolve the points [start, stop) of a grid; return the valid ones, and a failure for each of the others."""
    number = np.arange(start, stop)
    where = np.stack(np.unravel_index(number, grid.shape))
    choices, choice = _parts(where, grid.shape, [kind != "outcomes" for kind in grid.kinds], grid.choice)
    needs = [None if isinstance(each, ParameterError) else grid.outcomes_key(each) for each in choices]
    which = {key: index for index, key in enumerate(dict.fromkeys(needs))}
    need = np.array([which[each] for each in needs], dtype=np.intp)[choice]

    def outcomes_at(point: Sequence[int]) -> Mapping[str, Outcome]:
        case = choices[choice[int(np.ravel_multi_index(tuple(point), grid.shape)) - start]]
        if isinstance(case, ParameterError):
            raise case
        return grid.outcomes(point, case)

    outcomes, outcome = _parts(where, grid.shape, grid.outcomes_axes, outcomes_at, need)
    failures, good = [], np.ones(number.size, dtype=np.bool_)
    for found, index in ((choices, choice), (outcomes, outcome)):
        for each in np.flatnonzero([isinstance(one, ParameterError) for one in found]).tolist():
            wrong = np.flatnonzero((index == each) & good)
            good[wrong] = False
            failures += [_failure(point, found[each]) for point in number[wrong].tolist()]
    (choices, choice), (outcomes, outcome) = _used(choices, choice[good]), _used(outcomes, outcome[good])
    return PointBlock(number[good], choices, outcomes, choice, outcome), failures


def _used(found: Sequence[Any], index: Index) -> tuple[list[Any], Index]:
    """Keep the entries that any point uses, with the index of each point's entry."""
    used, again = np.unique(index, return_inverse=True)
    return [found[each] for each in used.tolist()], again


def _parts(
    where: NDArray[np.intp], shape: Sequence[int], relevant: Sequence[bool], make: Callable[[Sequence[int]], Any], *more: Index
) -> tuple[list[Any], Index]:
    """Distinct parts of points (or the error of making one), by the relevant axes, and the index of each point's part."""
    axes = [axis for axis, is_relevant in enumerate(relevant) if is_relevant]
    sizes = [*(shape[axis] for axis in axes), *(int(each.max()) + 1 for each in more)]
    keys = np.ravel_multi_index((*where[axes], *more), sizes)
    _, first, index = np.unique(keys, return_index=True, return_inverse=True)
    found = []
    for point in where[:, first].T.tolist():
        try:
            found.append(make(point))
        except ParameterError as error:
            found.append(error)
    return found, index


def _failure(point: int, error: Exception) -> Row:
    return {"point": point, "view": "formula", "error": str(error)}


# --- Rows ---------------------------------------------------------------------------------------------------------------


def frame(grid: Grid, start: int, stop: int) -> pl.DataFrame:
    """Rows of points [start, stop) in order, followed by the rows of points that fail."""
    points, failures = of_grid(grid, start, stop)
    waits = points.of_choices(lambda case: case.contended) > 0
    parts = [points.at(np.flatnonzero(waits))]
    methods = np.array([case.method for case in points.choices])[points.choice] if points.number.size else np.empty(0, dtype=str)
    parts += [points.at(np.flatnonzero(~waits & (methods == method))) for method in dict.fromkeys(methods.tolist())]
    frames = [_described(grid, part) for part in parts[:1] if part.number.size]
    for part in parts[1:]:
        frames += [_described(grid, some).hstack(found) for some, found in _computable(part, failures)]
    whole = pl.concat(frames, how="diagonal_relaxed").sort("point") if frames else pl.DataFrame()
    wrong = pl.DataFrame(failures, schema=FAILED).sort("point")
    return pl.concat([whole, wrong], how="diagonal_relaxed") if failures else whole


def _computable(points: PointBlock, failures: list[Row]) -> list[tuple[PointBlock, pl.DataFrame]]:
    """Points with their estimates, computed together; after an error, halves are tried until the failing points are found."""
    if not points.number.size:
        return []
    try:
        return [(points, estimates(points))]
    except EXPECTED as error:
        if points.number.size == 1:
            failures.append(_failure(int(points.number[0]), error))
            return []
    half = points.number.size // 2
    index = np.arange(points.number.size)
    return [*_computable(points.at(index[:half]), failures), *_computable(points.at(index[half:]), failures)]


def _described(grid: Grid, points: PointBlock) -> pl.DataFrame:
    """Columns that describe points, as `sim.views.point_columns.described`, but computed by column."""
    chosen = np.unique(points.choice, return_inverse=True)
    cases = [points.choices[each] for each in chosen[0].tolist()]
    first = np.unique(points.outcome, return_index=True, return_inverse=True)
    tables = [point_columns.outcomes_table(grid, number) for number in points.number[first[1]].tolist()]
    of_outcomes = [
        point_columns.of_outcomes(points.case(point), table) for point, table in zip(first[1].tolist(), tables, strict=True)
    ]
    start = pl.DataFrame({"point": points.number, "view": pl.repeat("formula", points.number.size, eager=True)})
    columns = [
        start, _gathered([point_columns.of_choice(case) for case in cases], chosen[1]), _gathered(of_outcomes, first[2]),
        _gathered([point_columns.of_costs(case) for case in cases], chosen[1]),
    ]  # fmt: skip
    if points.number.size and all(case.contended for case in cases):
        columns.append(pl.DataFrame({"reserved_units": points.of_choices(lambda case: float(case.devices(case.reserved_units)))}))
    found = pl.concat(columns, how="horizontal")
    where = np.unravel_index(points.number, grid.shape)[1:]
    own = set().union(*(point_columns.axes_of_costs(case) for case in cases))
    for axis, index in zip(grid.axes, where, strict=True):
        section, last = axis.path.partition(".")[2], axis.path.rpartition(".")[2]
        if section in found.columns and axis.path not in own:
            continue
        used, place = np.unique(index, return_inverse=True)
        values = _gathered([{axis.path: point_columns.cell(axis.values[each])} for each in used.tolist()], place)
        if axis.path not in own and last in found.columns:
            same = pl.Series([one == other for one, other in zip(found[last].to_list(), values[axis.path].to_list(), strict=True)])
            if same.all():
                continue
            values = values.select(pl.when(~same).then(pl.col(axis.path)).alias(axis.path))
        found = found.hstack(values)
    return found


def _gathered(rows: Sequence[Row], index: Index) -> pl.DataFrame:
    """Return a table of the rows at these indices."""
    return pl.DataFrame(rows, infer_schema_length=None)[index] if rows else pl.DataFrame()


# --- Estimates ----------------------------------------------------------------------------------------------------------


def estimates(points: PointBlock) -> pl.DataFrame:
    """Estimates by the theory for points of one method."""
    method = registry.method(points.choices[points.choice[0]].method)
    tensor_parallel, steps = points.of_choices(lambda case: case.tensor_parallel), points.of_decodings(lambda case: case.steps)
    prediction, passes = _with_passes(method, points, tensor_parallel)
    found: dict[str, Floats] = metrics.of_prediction(prediction, steps, tensor_parallel)
    bounded = _bounded(points)
    if bounded.size:
        # Bounds: all rates at their low ends with all costs at their high ends, and the reverse.
        part = points.at(bounded)
        ends = [_predicted(method, part, *end, tensor_parallel[bounded]) for end in (("low", "slow"), ("high", "fast"))]
        low, high = (metrics.of_prediction(each, steps[bounded], tensor_parallel[bounded]) for each in ends)
        found |= _between(low, high, bounded, points.number.size)
    if prediction.rounds is not None:
        outputs = points.of_decodings(lambda case: case.outputs)
        found |= metrics.per_round(outputs, prediction.rounds, prediction.drafted, prediction.operations)
    found["latency_sd_layers"] = np.sqrt(np.asarray(prediction.latency_variance, dtype=np.float64))
    found["reserved_units"] = points.of_choices(lambda case: float(case.devices(case.reserved_units)))
    loss = np.zeros(points.number.size)
    more = [pl.DataFrame({name: np.broadcast_to(values, points.number.shape) for name, values in found.items()})]
    if (tensor_parallel > 1).any():
        more.append(_each(points, found, over_one_device))
    if prediction.rounds is None:
        more.append(_operations(method, points, found["compute_per_token"]))
    elif method.straggler_loss is not None and (points.of_decodings(lambda case: case.parameters.concurrent_sequences) > 1).any():
        losses = _straggler_losses(points, np.asarray(prediction.rounds), found["latency_layers"])
        more.append(pl.DataFrame({"straggler_loss": pl.Series(losses, nan_to_null=True)}))
        loss = np.nan_to_num(losses)
    more.append(_time_parts(points, np.asarray(prediction.latency, dtype=np.float64), passes, loss))
    if method.has_work and any(points.choices[each].shapes for each in np.unique(points.choice).tolist()):
        more.append(_work_columns(method, points))
    return pl.concat([each for each in more if each.width], how="horizontal")


def _predicted(method: registry.Method, points: PointBlock, rates: str, costs: str, tensor_parallel: Floats) -> Prediction:
    """Prediction at given rates (`law`, or an end of their interval: `low`, `high`) and costs (`cost`, `slow`, `fast`).

    Busy time and units are in devices: a unit has `tensor_parallel` of them.
    """
    used, choice = np.unique(points.choice, return_inverse=True)
    chosen = [points.choices[each] for each in used.tolist()]
    taken, law = np.unique(points.outcome, return_inverse=True)
    choices = [MethodChoice(case.parameters, case.settings.tokens, _cost(case, costs)) for case in chosen]
    laws = [by_outcome({name: _law(outcome, rates) for name, outcome in points.outcomes[each].items()}) for each in taken.tolist()]
    prediction = method.predict_points(PredictionPoints(choices, laws, choice, law))
    if (tensor_parallel == 1).all():
        return prediction
    pairs = zip(points.choice.tolist(), prediction.units.tolist(), strict=True)
    devices = np.array([float(points.choices[choice].devices(int(units))) for choice, units in pairs])
    return replace(
        prediction, busy=prediction.busy * tensor_parallel, units_ratio=prediction.units_ratio * tensor_parallel, units=devices
    )


def _cost(case: Case, which: str) -> StepCosts:
    if which == "passes":
        return case.cost.passes_only()
    if which == "cost" or case.hardware is None:
        return case.cost
    slow, fast = case.hardware.ends
    return slow if which == "slow" else fast


def _with_passes(method: registry.Method, points: PointBlock, tensor_parallel: Floats) -> tuple[Prediction, tuple[Floats, Floats]]:
    """Prediction, with the times of all passes and of the target's; nan where the time has no parts."""
    known = points.of_choices(lambda case: time_breakdown.missing_because(case) is None) > 0
    several = known & (points.of_choices(time_breakdown.several_parts) > 0)
    nothing_else = points.of_choices(time_breakdown.passes_alone) > 0
    many = points.number.size > MANY_POINTS
    if many and several.all() and nothing_else.all() and (tensor_parallel == 1).all():
        # Nothing but passes, on devices that count alike: one evaluation gives both. Busy time is then not evaluated on its own,
        # so smaller blocks evaluate it and are compared with the simulated views.
        reduced = _predicted(method, points, "law", "passes", tensor_parallel)
        one = np.where(np.isfinite(reduced.latency), 1.0, np.nan)
        return replace(reduced, busy=reduced.latency, units_ratio=one), (np.asarray(reduced.latency), np.asarray(reduced.busy))
    prediction = _predicted(method, points, "law", "cost", tensor_parallel)
    passes, target = (np.where(known, prediction.latency, np.nan) for _ in range(2))
    index = np.flatnonzero(several)
    if index.size:
        reduced = _predicted(method, points.at(index), "law", "passes", np.ones(index.size))
        passes[index], target[index] = reduced.latency, reduced.busy
    return prediction, (passes, target)


def _time_parts(points: PointBlock, latency: Floats, passes: tuple[Floats, Floats], loss: Floats) -> pl.DataFrame:
    """Parts of the time per token; nan where they are not defined."""
    steps = points.of_decodings(lambda case: case.steps)
    return pl.DataFrame(time_breakdown.per_token(time_breakdown.of_passes(latency, *passes), latency, steps, loss)).with_columns(
        pl.when(pl.Series(np.isfinite(passes[0]))).then(pl.col(name)).alias(name) for name in metrics.TIME_PARTS
    )


def _law(outcome: Outcome, which: str) -> Any:
    return (outcome.low if which == "low" else outcome.high if which == "high" else None) or outcome.law


def _bounded(points: PointBlock) -> Index:
    """Indices of the points whose rates or costs have an interval."""
    rates = np.array([any(outcome.low is not None for outcome in each.values()) for each in points.outcomes])[points.outcome]
    return np.flatnonzero(rates | (points.of_choices(lambda case: case.hardware is not None) > 0))


def _between(one: dict[str, Floats], other: dict[str, Floats], where: Index, size: int) -> dict[str, Floats]:
    bounds = {}
    for name in metrics.ESTIMATES:
        for end, least in (("low", np.fmin), ("high", np.fmax)):
            values = np.full(size, np.nan)
            values[where] = least(one[name], other[name])
            bounds[f"{name}_input_{end}"] = values
    return bounds


def _each(
    points: PointBlock, found: dict[str, Floats], value: Callable[[Case, Row], Row], needs: Sequence[str] | None = None
) -> pl.DataFrame:
    """Columns computed row by row from a point and its estimates; null where `value` returns none."""
    names = [*found] if needs is None else needs
    columns = [found[name].tolist() for name in names]
    rows = [value(points.case(at), dict(zip(names, row, strict=True))) for at, row in enumerate(zip(*columns, strict=True))]
    return pl.DataFrame(rows, infer_schema_length=None)


def formula_row(case: Case) -> Row:
    """Estimates by the theory for one point."""
    return {name: value for name, value in estimates(of_case(case)).row(0, named=True).items() if value is not None}


def over_one_device(case: Case, row: Row) -> Row:
    """Speed-up over plain decoding on one device, computed from that over the same devices; empty with one device per unit.

    Step times on one device and on several are separate measurements, so both errors widen the bounds from inputs. The value is nan
    where the model is not known to fit one device.
    """
    if case.tensor_parallel == 1 or case.hardware is None:
        return {}
    name, alone = metrics.ONE_DEVICE, case.plain_time_on_one_device
    if alone is None or case.hardware.one_device is None:
        return {name: float("nan")}
    factor, ours, theirs = alone / case.plain_time, case.hardware.error, case.hardware.one_device_error
    wrong = {"input_low": (1 - min(theirs, 1.0)) / (1 + ours), "input_high": (1 + theirs) / (1 - ours) if ours < 1 else None}
    found = {name: row["speedup"] * factor}
    for bound in metrics.BOUNDS:
        value, more = row.get(f"speedup_{bound}"), wrong.get(bound, 1.0)
        found |= {} if value is None or more is None else {f"{name}_{bound}": value * factor * more}
    return found


def straggler_loss(case: Case, rounds: Any, latency: Any) -> Row:
    """Straggler loss of static batches from the mean rounds and latency (or arrays), if the method's theory gives it."""
    known = registry.method(case.method).straggler_loss
    loss = None if known is None else known(case.parameters, case.cost, rounds, latency, case.settings.tokens)
    return {} if loss is None else {"straggler_loss": loss}


def _straggler_losses(points: PointBlock, rounds: Floats, latency: Floats) -> Floats:
    """`straggler_loss` of each point, at once for points of one choice; nan where there is none."""
    used, index = np.unique(points.choice, return_inverse=True)
    order = np.argsort(index, kind="stable")
    parts = np.split(order, np.cumsum(np.bincount(index))[:-1])
    found = np.full(points.number.size, np.nan)
    for choice, mine in zip(used.tolist(), parts, strict=True):
        row = straggler_loss(points.choices[choice], rounds[mine], latency[mine])
        found[mine] = row.get("straggler_loss", np.nan)
    return found


def work_of(case: Case) -> Row:
    """FLOPs and bytes per token by the theory, if shapes are given and the theory has them."""
    found = _work(case) if case.shapes else None
    return {} if found is None else metrics.work_per_token(flops_and_bytes(found, case.shapes), case.outputs, case.full_batch)


def _work_columns(method: registry.Method, points: PointBlock) -> pl.DataFrame:
    """Columns of `work_of`."""

    def columns(case: Case, work: Work) -> Row:
        return metrics.work_per_token(flops_and_bytes(work, case.shapes), case.outputs, case.full_batch)

    return _of_works(method, points, lambda case: bool(case.shapes), columns)


def _operations(method: registry.Method, points: PointBlock, compute_per_token: Floats) -> pl.DataFrame:
    """Column of `operations_of`; no column where no point has a value."""
    counted = points.of_decodings(lambda case: case.parameters.counts_layers) > 0
    known = points.of_choices(_busy_counts_operations) > 0
    column = pl.DataFrame({"operations_per_token": np.broadcast_to(compute_per_token, known.shape)})
    column = column.select(pl.when(pl.Series(known & ~counted)).then(pl.all()))
    if counted.any():
        worked = _of_works(method, points, lambda case: case.parameters.counts_layers, _layers_per_token)
        column = worked.select(pl.all().fill_null(column.to_series())) if worked.width else column
    return pl.DataFrame() if column.to_series().is_null().all() else column


def _layers_per_token(case: Case, work: Work) -> Row:
    """Layers run per token, relative to those of the model, from the work of one decoding or of several."""
    return {"operations_per_token": work.by_model["target"].layer_passes / case.parameters.layers / case.outputs}


def _of_works(
    method: registry.Method, points: PointBlock, needed: Callable[[Case], bool], columns: Callable[[Case, Work], Row]
) -> pl.DataFrame:
    """Columns of each point's work, together for all laws, and once for all costs if passes do not depend on times.

    `columns` makes a row of a work, or arrays if its totals are arrays. Values are null where the work is not needed or not known.
    """
    alike: dict[Any, int] = {}
    seen: dict[Any, int] = {}  # by identity, which is faster than by value
    cases: list[Case] = []
    kind = np.zeros(len(points.choices), dtype=np.intp)
    for each in np.unique(points.choice).tolist():
        case = points.choices[each]
        priced = None if method.timed_work is None else id(case.cost)
        key = id(case.parameters), case.settings.tokens, priced, *((role, id(shape)) for role, shape in case.shapes.items())
        if key not in seen:
            seen[key] = alike.setdefault((case.parameters, *key[1:]), len(alike))
            if seen[key] == len(cases):
                cases.append(case)
        kind[each] = seen[key]
    keys, index = np.unique(kind[points.choice] * len(points.outcomes) + points.outcome, return_inverse=True)
    bounds = np.searchsorted(keys, np.arange(len(cases) + 1) * len(points.outcomes))
    parts: list[tuple[int, Row]] = []
    for case, start, stop in zip(cases, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
        if not needed(case):
            parts.append((stop - start, {}))
            continue
        outcomes = [points.outcomes[each] for each in (keys[start:stop] % len(points.outcomes)).tolist()]
        laws = [by_outcome({name: each.law for name, each in of.items()}) for of in outcomes]
        found = method.work_of_all(case.parameters, case.settings.tokens, laws, case.cost)
        if found is not None:
            parts.append((len(laws), columns(case, found)))
        else:
            works = [_work(case.with_outcomes(each)) for each in outcomes]
            parts += [(1, {} if work is None else columns(case, work)) for work in works]
    whole = {}
    for name in dict.fromkeys(name for _, part in parts for name in part):
        values = np.concatenate([np.broadcast_to(part.get(name, np.nan), size) for size, part in parts])
        has = np.repeat([name in part for _, part in parts], [size for size, _ in parts])
        whole[name] = pl.select(pl.when(pl.Series(has)).then(pl.Series(values))).to_series()[index]
    return pl.DataFrame(whole)


def _work(case: Case) -> Any:
    laws = by_outcome({name: outcome.law for name, outcome in case.outcomes.items()})
    return registry.method(case.method).expected_work(case.parameters, case.settings.tokens, laws, case.cost)


def operations_of(case: Case, compute_per_token: float, *, sampled: bool = False) -> Row:
    """Operations per token of a method that does not draft: from the theory's count of layers, or equal to its busy time.

    For simulated views the busy time is preferred if every pass has one token, since it belongs to the same decodings.
    """
    known = _busy_counts_operations(case)
    if case.parameters.counts_layers and not (sampled and known and case.parameters.largest_pass == 1):
        worked = _work(case)
        return {} if worked is None else _layers_per_token(case, worked)
    return {"operations_per_token": compute_per_token} if known else {}


def _busy_counts_operations(case: Case) -> bool:
    """True if the busy time is that of the arithmetic: units run layers of one sequence only, all of equal time."""
    return not case.parameters.roles and case.parameters.decoded_sequences == 1 and case.cost.only_layers
