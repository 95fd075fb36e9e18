"""The view `formula`: closed forms, evaluated for many points of a grid at once.

Points share their choices (method, parameters, tokens, costs, cluster) and their outcomes. Each choice and each set of outcomes is
resolved once, and together where they differ in single numbers only (`sim.views.point_blocks`). The theory is evaluated for all
points of a method together, and rows are assembled by column.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.costs.many_costs import Varied
from model.costs.step_costs import StepCosts
from model.methods import registry
from model.methods.method_parameters import MethodParameters
from model.methods.prediction import ChoiceGroup, GroupedChoices, Prediction, PredictionPoints
from model.steps import CacheError
from sim.scenarios.cases import Case, OneDevice
from sim.scenarios.grid import Axis, Grid
from sim.views import metrics, point_columns, time_breakdown, work_columns
from sim.views.point_blocks import PointBlock, failure, of_case, of_grid

Floats = NDArray[np.float64]
Index = NDArray[np.intp]
Row = dict[str, Any]

EXPECTED = (ParameterError, CacheError)
"""Errors that may occur at one point of a grid and not at others."""
MANY_POINTS = 1000
"""Points of one method above which times of passes are not evaluated twice, where one evaluation has both."""
FAILED = {"point": pl.Int64, "view": pl.String, "error": pl.String}


# --- Rows ---------------------------------------------------------------------------------------------------------------


def frame(grid: Grid, start: int, stop: int) -> pl.DataFrame:
    """Rows of points [start, stop) in order, followed by the rows of points that fail."""
    points, failures = of_grid(grid, start, stop)
    waits = points.facts.contended > 0
    parts = [points.at(np.flatnonzero(waits))]
    names = np.repeat([group.first.method for group in points.choices.groups], np.diff(points.choices.starts))
    methods = names[points.choice] if points.number.size else np.empty(0, dtype=str)
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
            failures.append(failure(int(points.number[0]), error))
            return []
    half = points.number.size // 2
    index = np.arange(points.number.size)
    return [*_computable(points.at(index[:half]), failures), *_computable(points.at(index[half:]), failures)]


def _described(grid: Grid, points: PointBlock) -> pl.DataFrame:
    """Columns that describe points, as `sim.views.point_columns.described`, but computed by column."""
    start = pl.DataFrame({"point": points.number, "view": pl.repeat("formula", points.number.size, eager=True)})
    columns = [start, _choice_columns(points), _outcome_columns(grid, points), _cost_columns(points)]
    if points.number.size and (points.facts.contended > 0).all():
        columns.append(pl.DataFrame({"reserved_units": points.facts.reserved_devices}))
    found = pl.concat(columns, how="horizontal")
    where = np.unravel_index(points.number, grid.shape)[1:]
    own = set().union(*(point_columns.axes_of_costs(group.first) for group, _, _ in points.segments))
    for axis, index in zip(grid.axes, where, strict=True):
        section, last = axis.path.partition(".")[2], axis.path.rpartition(".")[2]
        if section in found.columns and axis.path not in own:
            continue
        values = _axis_column(axis, index)
        if axis.path not in own and last in found.columns:
            same = _same(found[last], values[axis.path])
            if same.all():
                continue
            values = values.select(pl.when(~same).then(pl.col(axis.path)).alias(axis.path))
        found = found.hstack(values)
    return found


def _choice_columns(points: PointBlock) -> pl.DataFrame:
    """Method, parameters and tokens: the same for all choices of a group, but for tokens that vary."""
    varied = [(part, group.tokens[places]) for group, part, places in points.segments if group.tokens is not None]
    table = _gathered([point_columns.of_choice(group.first) for group, _, _ in points.segments], points.segment)
    used, index = points.used_choices
    return _with_numbers(table, {"tokens": varied} if varied else {}, used.size, index)


def _cost_columns(points: PointBlock) -> pl.DataFrame:
    """Costs and cluster: one row for each group, but for numbers that vary."""
    used, index = points.used_choices
    rows: list[Row] = []
    which = np.empty(used.size, dtype=np.intp)
    numbers: dict[str, list[tuple[slice, NDArray[Any]]]] = {}
    for group, part, places in points.segments:
        ratios, plain = point_columns.ratios(group.first), point_columns.plain_work(group.first)
        rest, each = group.distinct(point_columns.of_costs_but_numbers, places)
        which[part] = len(rows) + each
        rows += [ratios | plain | each for each in rest]
        for name in (*ratios, *point_columns.ON_HARDWARE):
            values = group.numbers(name)
            if values is not None:
                numbers.setdefault(name, []).append((part, values[places]))
        if group.tokens is not None:
            for name, values in point_columns.plain_work(group.first.with_tokens(group.tokens[places])).items():
                numbers.setdefault(name, []).append((part, values))
    return _with_numbers(_gathered(rows, which[index]), numbers, used.size, index)


def _outcome_columns(grid: Grid, points: PointBlock) -> pl.DataFrame:
    """Kinds, rates and sources of outcomes: one row for each group, but for rates that vary."""
    used, first, index = np.unique(points.outcome, return_index=True, return_inverse=True)
    rows: list[Row] = []
    which = np.empty(used.size, dtype=np.intp)
    numbers: dict[str, list[tuple[slice, NDArray[Any]]]] = {}
    for group, part, places in points.outcomes.segments(used):
        point = int(first[part.start])
        which[part] = len(rows)
        rows.append(point_columns.of_outcomes(points.case(point), point_columns.outcomes_table(grid, int(points.number[point]))))
        for name, values in point_columns.varied_rates(group.varied).items():
            numbers.setdefault(name, []).append((part, values[places]))
    return _with_numbers(_gathered(rows, which[index]), numbers, used.size, index)


def _with_numbers(
    table: pl.DataFrame, numbers: Mapping[str, Sequence[tuple[slice, NDArray[Any]]]], size: int, index: Index
) -> pl.DataFrame:
    """The table with numbers of some parts, of `size` in all, instead of those in its columns; `index` has the part of each row."""
    for name, parts in numbers.items():
        has, values = np.zeros(size, dtype=np.bool_), np.zeros(size, dtype=np.result_type(*(each for _, each in parts)))
        for part, each in parts:
            has[part], values[part] = True, each
        column = pl.lit(pl.Series(name, values[index]))
        given = column if has.all() else pl.when(pl.Series(has[index])).then(column).otherwise(pl.col(name))
        table = table.with_columns(given.alias(name))
    return table


def _axis_column(axis: Axis, index: Index) -> pl.DataFrame:
    """Values of an axis at these indices."""
    numbers = axis.numbers(index)
    if numbers is not None:
        return pl.DataFrame({axis.path: numbers})
    used, place = np.unique(index, return_inverse=True)
    return _gathered([{axis.path: point_columns.cell(axis.values[each])} for each in used.tolist()], place)


def _same(one: pl.Series, other: pl.Series) -> pl.Series:
    """Which values of two columns are equal."""
    if one.dtype.is_numeric() and other.dtype.is_numeric() and not one.null_count() and not other.null_count():
        return one == other
    return pl.Series([ours == theirs for ours, theirs in zip(one.to_list(), other.to_list(), strict=True)])


def _gathered(rows: Sequence[Row], index: Index) -> pl.DataFrame:
    """Return a table of the rows at these indices."""
    return pl.DataFrame(rows, infer_schema_length=None)[index] if rows else pl.DataFrame()


# --- Estimates ----------------------------------------------------------------------------------------------------------


def _steps(parameters: MethodParameters, tokens: int) -> int:
    return parameters.plain_steps(tokens)


def _concurrent(parameters: MethodParameters, tokens: int) -> int:
    return parameters.concurrent_sequences


def estimates(points: PointBlock) -> pl.DataFrame:
    """Estimates by the theory for points of one method."""
    method = registry.method(points.choices[points.choice[0]].method)
    tensor_parallel, steps = points.facts.tensor_parallel, points.of_decodings(_steps)
    prediction, passes, (low, high) = _with_passes(method, points, tensor_parallel, bounded := _bounded(points))
    found: dict[str, Floats] = metrics.of_prediction(prediction, steps, tensor_parallel)
    if bounded.size:
        one, other = (metrics.of_prediction(each, steps[bounded], tensor_parallel[bounded]) for each in (low, high))
        found |= _between(one, other, bounded, points.number.size)
    if prediction.rounds is not None:
        outputs = points.of_decodings(lambda parameters, tokens: parameters.total_tokens(tokens))
        found |= metrics.per_round(outputs, prediction.rounds, prediction.drafted, prediction.operations)
    found["latency_sd_layers"] = np.sqrt(np.asarray(prediction.latency_variance, dtype=np.float64))
    found["reserved_units"] = points.facts.reserved_devices
    loss = np.zeros(points.number.size)
    more = [pl.DataFrame({name: np.broadcast_to(values, points.number.shape) for name, values in found.items()})]
    if (tensor_parallel > 1).any():
        more.append(_columns_over_one_device(points, found, prediction.plain_latency))
    if prediction.rounds is None:
        more.append(work_columns.of_operations(method, points, found["compute_per_token"]))
    elif method.straggler_loss is not None and (points.of_decodings(_concurrent) > 1).any():
        losses = _straggler_losses(points, np.asarray(prediction.rounds), found["latency_layers"])
        more.append(pl.DataFrame({"straggler_loss": pl.Series(losses, nan_to_null=True)}))
        loss = np.nan_to_num(losses)
    more.append(_time_parts(points, np.asarray(prediction.latency, dtype=np.float64), passes, loss))
    if method.has_work and any(group.first.shapes for group, _, _ in points.segments):
        more.append(work_columns.of_shapes(method, points))
    return pl.concat([each for each in more if each.width], how="horizontal")


class _Priced(NamedTuple):
    """Points to predict at given rates and costs.

    `rates` are `law`, or an end of their interval: `low`, `high`; `costs` are `cost`, those without overheads (`passes`), or `slow`
    and `fast`. Busy time is in devices: a unit has `tensor_parallel` of them. Variances are not asked where `means`.
    """

    points: PointBlock
    rates: str
    costs: str
    tensor_parallel: Floats
    means: bool = False


def _predicted(method: registry.Method, asked: Sequence[_Priced]) -> list[Prediction]:
    """Predictions of all that is asked, evaluated together, so that what depends on the laws only is computed once."""
    groups: list[ChoiceGroup[Any]] = []
    choice: list[Index] = []
    begins = 0
    for points, _, costs, *_ in asked:
        place = np.empty(points.used_choices[0].size, dtype=np.intp)
        for group, part, places in points.segments:
            own = group.at(places)
            each, index = own.distinct_costs(costs)
            tokens = group.first.settings.tokens if own.tokens is None else own.tokens
            groups.append(ChoiceGroup(group.first.parameters, tokens, each))
            place[part] = begins + index
            begins += len(each)
        choice.append(place[points.used_choices[1]])
    laws, law = _laws(asked)
    means = np.repeat([each.means for each in asked], [each.points.number.size for each in asked])
    found = method.predict_points(PredictionPoints(GroupedChoices(groups), laws, np.concatenate(choice), law, means))
    ends = np.cumsum([0, *(each.points.number.size for each in asked)])
    parts = [found.at(np.arange(start, stop)) for start, stop in itertools.pairwise(ends.tolist())]
    return [_in_devices(each, of.tensor_parallel) for each, of in zip(parts, asked, strict=True)]


def _laws(asked: Sequence[_Priced]) -> tuple[list[Any], Index]:
    """Distinct laws of all that is asked, and the index of each point's law; without intervals of rates the ends are the laws."""
    outcomes = asked[0].points.outcomes
    bounded = any(group.bounded for group in outcomes.groups)
    rates = [each.rates if bounded else "law" for each in asked]
    laws: list[Any] = []
    law: list[Index] = [np.empty(0, dtype=np.intp)] * len(asked)
    for name in dict.fromkeys(rates):
        mine = [number for number, each in enumerate(rates) if each == name]
        taken = np.unique(np.concatenate([asked[number].points.outcome for number in mine]))
        for number in mine:
            law[number] = len(laws) + np.searchsorted(taken, asked[number].points.outcome)
        laws += [each for group, _, places in outcomes.segments(taken) for each in group.at(places).laws(name)]
    return laws, np.concatenate(law)


def _in_devices(prediction: Prediction, tensor_parallel: Floats) -> Prediction:
    """The prediction with busy time in devices."""
    if (tensor_parallel == 1).all():
        return prediction
    return replace(prediction, busy=prediction.busy * tensor_parallel, units_ratio=prediction.units_ratio * tensor_parallel)


def _with_passes(
    method: registry.Method, points: PointBlock, tensor_parallel: Floats, bounded: Index
) -> tuple[Prediction, tuple[Floats, Floats], tuple[Prediction, Prediction]]:
    """Prediction, with the times of all passes and of the target's (nan where the time has no parts), and its bounds.

    The bounds are of the `bounded` points: all rates at their low ends with all costs at their high ends, and the reverse.
    """
    known, nothing_else = points.facts.has_parts > 0, points.facts.passes_alone > 0
    several = known & (points.facts.several_parts > 0)
    many = points.number.size > MANY_POINTS
    part = points.at(bounded)
    ends = [_Priced(part, *end, tensor_parallel[bounded], means=True) for end in (("low", "slow"), ("high", "fast"))]
    if many and several.all() and nothing_else.all():
        # Nothing but passes, on devices that count alike: one evaluation gives both. Busy time is then not evaluated on its own,
        # so smaller blocks evaluate it and are compared with the simulated views.
        alone = _Priced(points, "law", "passes", np.ones(points.number.size))
        reduced, low, high = _predicted(method, [alone, *ends])
        one = np.where(np.isfinite(reduced.latency), 1.0, np.nan)
        passes = np.asarray(reduced.latency), np.asarray(reduced.busy)
        whole = replace(reduced, busy=reduced.latency, units_ratio=one)
        return _in_devices(whole, tensor_parallel), passes, (low, high)
    index = np.flatnonzero(several)
    apart = _Priced(points.at(index), "law", "passes", np.ones(index.size), means=True)
    asked = [_Priced(points, "law", "cost", tensor_parallel), *ends, apart]
    prediction, low, high, reduced = _predicted(method, asked)
    all_passes, target = (np.where(known, prediction.latency, np.nan) for _ in range(2))
    all_passes[index], target[index] = reduced.latency, reduced.busy
    return prediction, (all_passes, target), (low, high)


def _time_parts(points: PointBlock, latency: Floats, passes: tuple[Floats, Floats], loss: Floats) -> pl.DataFrame:
    """Parts of the time per token; nan where they are not defined."""
    steps = points.of_decodings(_steps)
    return pl.DataFrame(time_breakdown.per_token(time_breakdown.of_passes(latency, *passes), latency, steps, loss)).with_columns(
        pl.when(pl.Series(np.isfinite(passes[0]))).then(pl.col(name)).alias(name) for name in metrics.TIME_PARTS
    )


def _bounded(points: PointBlock) -> Index:
    """Indices of the points whose rates or costs have an interval."""
    rates = np.repeat([group.bounded for group in points.outcomes.groups], np.diff(points.outcomes.starts))[points.outcome]
    return np.flatnonzero(rates | (points.facts.on_hardware > 0))


def _between(one: dict[str, Floats], other: dict[str, Floats], where: Index, size: int) -> dict[str, Floats]:
    bounds = {}
    for name in metrics.ESTIMATES:
        for end, least in (("low", np.fmin), ("high", np.fmax)):
            values = np.full(size, np.nan)
            values[where] = least(one[name], other[name])
            bounds[f"{name}_input_{end}"] = values
    return bounds


def formula_row(case: Case) -> Row:
    """Estimates by the theory for one point."""
    return {name: value for name, value in estimates(of_case(case)).row(0, named=True).items() if value is not None}


def over_one_device(case: Case, row: Row) -> Row:
    """Speed-up over plain decoding on one device, computed from that over the same devices; empty with one device per unit.

    The value is nan where the model is not known to fit one device.
    """
    if case.tensor_parallel == 1:
        return {}
    found = _over_one_device(case.on_one_device, case.plain_time, row)
    return {name: float(value) for name, (value, known) in found.items() if known}


def _over_one_device(alone: OneDevice, plain: Any, row: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Columns of `over_one_device` from the time of plain decoding and the speed-ups, and where they have a value.

    Step times on one device and on several are separate measurements, so both errors widen the bounds from inputs.
    """
    factor, fits = np.asarray(alone.time / plain), np.isfinite(alone.time)
    with np.errstate(divide="ignore"):
        wrong = {
            "input_low": (1 - np.minimum(alone.own_error, 1.0)) / (1 + np.asarray(alone.error)),
            "input_high": (1 + np.asarray(alone.own_error)) / (1 - np.asarray(alone.error)),
        }
    has = {"input_high": fits & (np.asarray(alone.error) < 1)}
    found = {metrics.ONE_DEVICE: (row["speedup"] * factor, np.ones_like(fits))}
    for bound in metrics.BOUNDS:
        value = row.get(f"speedup_{bound}")
        if value is not None:
            found[f"{metrics.ONE_DEVICE}_{bound}"] = value * factor * wrong.get(bound, 1.0), has.get(bound, fits)
    return found


def _columns_over_one_device(points: PointBlock, found: Mapping[str, Floats], plain: Floats) -> pl.DataFrame:
    """Columns of `over_one_device`; `plain` is the time of plain decoding."""
    used, index = points.used_choices
    alone = np.empty((len(OneDevice._fields), used.size))
    for group, part, places in points.segments:
        for values, column in zip(alone, group.at(places).on_one_device(), strict=True):
            values[part] = column
    several = points.facts.tensor_parallel > 1
    columns = {}
    for name, (values, known) in _over_one_device(OneDevice(*alone[:, index]), plain, found).items():
        if (known & several).any():
            columns[name] = pl.select(pl.when(pl.Series(known & several)).then(pl.Series(values))).to_series()
    return pl.DataFrame(columns)


def straggler_loss(
    case: Case, rounds: Any, latency: Any, cost: StepCosts | None = None, price: Index | None = None
) -> Row:  # fmt: skip
    """Straggler loss of static batches from the mean rounds and latency (or arrays), if the method's theory gives it.

    `cost` are costs in place of the case's, one for each entry of the arrays; or `price` is the index of each entry's, and the
    tokens of the case are an array, too.
    """
    known = registry.method(case.method).straggler_loss
    costs = case.cost if cost is None else cost
    more = () if price is None else (price,)  # asked only of methods that predict several numbers of tokens of batches together
    loss = None if known is None else known(case.parameters, costs, rounds, latency, case.settings.tokens, *more)
    return {} if loss is None else {"straggler_loss": loss}


def _straggler_losses(points: PointBlock, rounds: Floats, latency: Floats) -> Floats:
    """`straggler_loss` of each point, at once for points of one group; nan where there is none."""
    index, found = points.used_choices[1], np.full(points.number.size, np.nan)
    order = np.argsort(index, kind="stable")
    for group, part, places in points.segments:
        mine = order[slice(*np.searchsorted(index[order], [part.start, part.stop]))]
        costs = group.at(places).costs_of("cost")
        for at in range(0, mine.size, MANY_POINTS):
            some = mine[at : at + MANY_POINTS]
            own, case, price = index[some] - part.start, group.first, None
            varied = costs.at(own) if isinstance(costs, Varied) else None
            if group.tokens is not None:
                case = case.with_tokens(group.tokens[places[own]])
                if varied is not None and not case.cost.uniform:
                    varied, price = varied.unique()
            row = straggler_loss(case, rounds[some], latency[some], case.cost if varied is None else varied.joined(), price)
            found[some] = row.get("straggler_loss", np.nan)
    return found
