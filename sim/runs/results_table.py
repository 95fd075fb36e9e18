"""Results table, merged from shards: one row per point and view, with parameters, estimates and their intervals."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator
from itertools import zip_longest
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from model.interpret.account import FlopsAndBytes
from model.methods import registry
from sim.scenarios.cases import Case
from sim.scenarios.grid import Grid
from sim.views import agreement, formula_view, metrics, point_columns, time_breakdown, work_columns
from sim.views.metrics import Sums

FEW_POINTS = 200
"""Number of points up to which the whole distribution of the latency is kept."""

ROUNDS = ("rounds", "drafted", "operations", "accepted_lengths", *agreement.SQUARES)
"""Columns on rounds: sums over replications, and the number of rounds that accepted 0, 1, 2, ... tokens."""
WORK_COLUMNS = FlopsAndBytes._fields
"""Work counted by the view events where shapes are known: sums over replications."""
PARTS = time_breakdown.SUMS
"""Parts of the time: sums over replications."""
FREQUENCIES = ("values", "counts")
"""Latencies and how often each occurs."""
SUMS = tuple(Sums.__dataclass_fields__)


def sampled_row(sums: Sums, case: Case, formula: dict[str, float] | None, view: Any) -> dict[str, Any]:
    """Estimates and intervals of a simulated point; the input interval is the formula's, scaled with the estimate."""
    plain = case.plain_time
    values, wide, spread = sums.sampled(plain, case.steps, case.tensor_parallel)
    row: dict[str, Any] = dict(values)
    for name in metrics.ESTIMATES:
        if name == "speedup":
            low, high = (row["latency_layers"] + sign * wide["latency_layers"] for sign in (1, -1))
            row["speedup_low"], row["speedup_high"] = plain / low, plain / high if high > 0 else float("nan")
        else:
            row[f"{name}_low"], row[f"{name}_high"] = values[name] - wide[name], values[name] + wide[name]
        if formula and formula[name] and formula.get(f"{name}_input_low") is not None:
            for bound in ("input_low", "input_high"):
                row[f"{name}_{bound}"] = values[name] * formula[f"{name}_{bound}"] / formula[name]
    row |= formula_view.over_one_device(case, row)
    row |= {"latency_sd_layers": spread, "replications": sums.count, "reserved_units": float(case.devices(case.reserved_units))}
    return row


class Finished(NamedTuple):
    """Result of merging all shards."""

    table: pl.DataFrame
    more: dict[str, pl.DataFrame]
    """Tables of distributions, by name."""
    disagreements: list[dict[str, Any]]
    """Differences between views that must agree; see `sim.views.agreement`."""


class MergedBlock(NamedTuple):
    """Result of merging the shards of some points."""

    table: pl.DataFrame
    """Rows in the order of points and views; columns are not arranged."""
    more: dict[str, pl.DataFrame]
    """Tables of distributions, by name; empty in a run of more than `FEW_POINTS` points."""
    columns: dict[str, list[str]]
    """Columns of each view's rows."""
    disagreements: dict[str, list[dict[str, Any]]]
    """Differences between views that must agree, by the simulated view."""


def finish(grid: Grid, partial: pl.DataFrame) -> Finished:
    """Return the tables of a run and the disagreements of its views, from the rows of all shards in order."""
    block = merged(grid, partial)
    return Finished(table(block.table), block.more, [*itertools.chain(*block.disagreements.values())])


def merged(grid: Grid, partial: pl.DataFrame) -> MergedBlock:
    """Merge the pieces of all points that `partial` has, which are the rows of their shards in order."""
    theory = partial.filter(pl.col("view") == "formula")
    theory = theory.drop([name for name in (*SUMS, *FREQUENCIES, *ROUNDS, *PARTS, *WORK_COLUMNS) if name in theory.columns])
    by_point = {row["point"]: row for row in theory.to_dicts()}
    rows: dict[str, list[dict[str, Any]]] = {"paths": [], "events": []}
    distributions: list[dict[str, Any]] = []
    accepted: list[dict[str, Any]] = []
    disagreements: dict[str, list[dict[str, Any]]] = {"paths": [], "events": []}
    walked = {*partial.filter(pl.col("view") == "paths")["point"].unique()} if theory.height else set()
    for view, point, part in _pieces(partial):
        case = grid.case(point)
        if view != "events" and case.contended:
            rows[view].append(point_columns.without_value(grid, point, case) | {"view": view})
            continue
        formula = None if case.contended else by_point[point] if point in by_point else _formula(grid, point)
        sums = Sums(int(part["count"].sum()), *(_sum(part, name) for name in SUMS if name != "count"))
        row = point_columns.described(grid, point, case) | {"view": view} | sampled_row(sums, case, formula, view)
        if formula is not None and theory.height and (view == "paths" or point not in walked):
            rounds = {name: _sum(part, name) for name in ("rounds", "drafted", *agreement.SQUARES) if _whole(part, name)}
            disagreements[view] += agreement.simulated_against_formula(point, case, formula, sums, rounds, str(view), grid.points)
        if "rounds" in part.columns and part["rounds"].count():
            means = [_sum(part, name) / sums.count for name in ROUNDS[:3]]
            each_round = metrics.per_round(case.outputs, *means)
            row |= {name: float(value) for name, value in each_round.items()}
            row |= formula_view.straggler_loss(case, means[0], row["latency_layers"])
        elif "operations" in part.columns and part["operations"].count():
            row["operations_per_token"] = _sum(part, "operations") / sums.count / case.outputs
        else:
            row |= work_columns.operations_of(case, row["compute_per_token"])
        if PARTS[0] in part.columns and part[PARTS[0]].count():
            parts = time_breakdown.TimeBreakdown(*(np.asarray(_sum(part, name) / sums.count) for name in PARTS))
            each_part = time_breakdown.per_token(parts, row["latency_layers"], case.steps, row.get("straggler_loss", 0.0))
            row |= {name: float(value) for name, value in each_part.items()}
        if case.shapes and WORK_COLUMNS[0] in part.columns and part[WORK_COLUMNS[0]].count():
            total = FlopsAndBytes(*(_sum(part, name) for name in WORK_COLUMNS))
            row |= metrics.work_per_token(total, sums.count * case.outputs, case.full_batch)
        if view == "events":
            row |= {"peak_units": part["peak_units"].max(), "paths_difference": part["paths_difference"].max()}
            disagreements[view] += agreement.paths_against_events(point, part)
        rows[view].append(row)
        if grid.points <= FEW_POINTS:
            distributions += _distribution(point, view, case, part)
            accepted += _accepted(point, view, part)
    if grid.points <= FEW_POINTS:
        for point in by_point:
            case = grid.case(point)
            distributions += [] if case.contended else _law(point, case)
    simulated = pl.DataFrame([*itertools.chain(*rows.values())], infer_schema_length=None)
    frames = [frame for frame in (theory, simulated) if frame.height]
    more = {"distribution": pl.DataFrame(distributions, schema=DISTRIBUTION), "accepted": pl.DataFrame(accepted, schema=ACCEPTED)}
    columns = {"formula": theory.columns if theory.height else []}
    columns |= {view: [*dict.fromkeys(itertools.chain(*found))] for view, found in rows.items()}
    for each in itertools.chain(*disagreements.values()):
        each |= {path: str(value) for path, value in grid.values(each["point"]).items()}
    together = pl.concat(frames, how="diagonal_relaxed") if frames else pl.DataFrame()
    return MergedBlock(_in_order(together) if frames else together, more, columns, disagreements)


def _pieces(partial: pl.DataFrame) -> Iterator[tuple[str, int, pl.DataFrame]]:
    """View, point and pieces of each simulated point. The rows of shards are sorted already, so that pieces are a slice."""
    simulated = partial.filter(pl.col("view") != "formula")
    simulated = simulated.sort(pl.col("view") == "events", "point", maintain_order=True)
    runs = simulated.select(pl.struct("view", "point").rle().alias("runs")).unnest("runs").unnest("value")
    at = 0
    for length, view, point in runs.select("len", "view", "point").iter_rows():
        yield view, point, simulated.slice(at, length)
        at += length


def _sum(part: pl.DataFrame, name: str) -> float:
    """Exact sum of a column: it does not depend on the order or on how a point was split."""
    return math.fsum(part[name].to_list())


def _whole(part: pl.DataFrame, name: str) -> bool:
    return name in part.columns and not part[name].null_count()


ACCEPTED = {"point": pl.Int64, "view": pl.String, "accepted": pl.Int64, "rounds": pl.Int64}
DISTRIBUTION = {
    "point": pl.Int64, "view": pl.String, "latency_layers": pl.Float64, "latency_s": pl.Float64, "probability": pl.Float64
}


def _formula(grid: Grid, point: int) -> dict[str, float] | None:
    """Formula row of a point; None if the formula has no value there."""
    try:
        case = grid.case(point)
        return None if case.contended else formula_view.formula_row(case)
    except formula_view.EXPECTED:
        return None


def _in_layers(name: str) -> bool:
    """Return whether a column has times in layer-times, or bounds of them."""
    return name in metrics.TIME_PARTS or name.startswith(("latency_layers", "latency_sd_layers", "busy_layers", "reserved_layers"))


def _latency(case: Case, value: float) -> dict[str, float | None]:
    """Latency in layer-times and in seconds; None for a unit in which it is not known."""
    seconds = case.seconds
    return {
        "latency_layers": None if case.hardware is not None else value, "latency_s": None if seconds is None else value * seconds
    }


def _distribution(point: int, view: str, case: Case, part: pl.DataFrame) -> list[dict[str, Any]]:
    counts: Counter[float] = Counter()
    for values, each in zip(part["values"].to_list(), part["counts"].to_list(), strict=True):
        counts.update(dict(zip(values, each, strict=True)))
    total = counts.total()
    return [
        {"point": point, "view": view, **_latency(case, value), "probability": count / total}
        for value, count in sorted(counts.items())
    ]


def _accepted(point: int, view: str, part: pl.DataFrame) -> list[dict[str, Any]]:
    """Number of rounds that accepted 0, 1, 2, ... tokens; empty where a view has not counted all rounds."""
    if "accepted_lengths" not in part.columns or part["accepted_lengths"].null_count():
        return []
    lists = part["accepted_lengths"].to_list()
    counts = [sum(column) for column in zip_longest(*lists, fillvalue=0)]
    return [{"point": point, "view": view, "accepted": length, "rounds": count} for length, count in enumerate(counts)]


def _law(point: int, case: Case) -> list[dict[str, Any]]:
    """Distribution of the latency by the theory, if it has one."""
    law = registry.method(case.method).distribution
    if law is None or case.outcome is None:
        return []
    found = law(case.parameters, case.settings.tokens, case.outcome.law, case.cost)
    if found is None:
        return []
    pairs = zip(*(values.tolist() for values in found), strict=True)
    return [{"point": point, "view": "formula", **_latency(case, value), "probability": chance} for value, chance in pairs]


def table(frame: pl.DataFrame) -> pl.DataFrame:
    """Sort rows by point and view, and put columns in their order."""
    return arranged(_in_order(frame).lazy()).collect()


def _in_order(frame: pl.DataFrame) -> pl.DataFrame:
    view = pl.col("view").replace_strict({"formula": 0, "paths": 1, "events": 2}, return_dtype=pl.Int8)
    return frame.sort("point", view)


def arranged(frame: pl.LazyFrame) -> pl.LazyFrame:
    """Order the columns: descriptions first, then each estimate with its bounds; missing values are null."""
    absent = {*metrics.ESTIMATES, "reserved_units"} - {*frame.collect_schema().names()}
    frame = frame.with_columns(pl.lit(None, dtype=pl.Float64).alias(name) for name in sorted(absent))
    frame = frame.with_columns(reserved_layers=pl.col("reserved_units") * pl.col("latency_layers"))
    names = frame.collect_schema().names()
    if metrics.ONE_DEVICE in names:  # on one device the two speed-ups are equal
        own = {f"speedup{end}": f"{metrics.ONE_DEVICE}{end}" for end in ("", *(f"_{each}" for each in metrics.BOUNDS))}
        frame = frame.with_columns(
            pl.when(pl.col("tensor_parallel") == 1).then(pl.col(name)).otherwise(pl.col(other)).alias(other)
            for name, other in own.items() if name in names and other in names
        )  # fmt: skip
    if "seconds_per_layer" in names or "in_seconds" in names:
        times = {name: (name.replace("_layers", "_s"), 1.0) for name in names if _in_layers(name)}
        times |= {name: (name.replace("layers", "ms"), 1e3) for name in names if name.startswith("tpot_layers")}
        held = pl.col("in_seconds").fill_null(False) if "in_seconds" in names else pl.lit(False)
        seconds = pl.col("seconds_per_layer") if "seconds_per_layer" in names else pl.lit(None, dtype=pl.Float64)
        seconds = pl.when(held).then(1.0).otherwise(seconds)
        # The relative error of the seconds widens the bounds from inputs.
        wrong = pl.col("seconds_error").fill_null(0.0) if "seconds_error" in names else pl.lit(0.0)
        bounds = {"_input_low": 1 - wrong, "_input_high": 1 + wrong}

        def share(name: str) -> pl.Expr:
            return next((bound for end, bound in bounds.items() if name.endswith(end)), pl.lit(1.0))

        frame = frame.with_columns(
            (pl.col(name) * seconds * factor * share(name)).alias(other) for name, (other, factor) in times.items()
        )
        # With costs in seconds, columns in layer-times are null.
        frame = frame.with_columns(pl.when(held).then(None).otherwise(pl.col(name)).alias(name) for name in times)
        names = [name for name in names if name != "in_seconds"] + [other for other, _ in times.values()]
    estimates = metrics.columns()
    names = [name for name in names if name not in (*ROUNDS, *PARTS)]
    first = ["point", "view", *(name for name in names if name not in estimates and name not in ("point", "view"))]
    there = [name for name in estimates if name in names]
    # Estimates and bounds that are not finite become null; a parameter may be infinite.
    finite = [pl.when(pl.col(name).cast(pl.Float64).is_finite()).then(pl.col(name)).alias(name) for name in there]
    return frame.select([*first, *there]).with_columns(finite).with_columns(pl.col(pl.Float64).fill_nan(None))
