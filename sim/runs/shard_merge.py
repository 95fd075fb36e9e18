"""Merge of shards into the table of results, by blocks of points: the memory that it takes does not grow with the table.

The view `formula` has final rows in its shards. The pieces of the simulated views are summed by point and compared with the
formula; of each block of points the finished rows are written to a temporary file. All rows, from shards or from these files, are
then streamed into the table. Neither the size of a block nor the number of workers affects a byte of it.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from model.base import strict_json
from model.base.whole_files import temporary_path, write_text
from sim.runs import results_table
from sim.runs.atomic_files import parquet, parquet_bytes, write_whole
from sim.runs.executor import RunError
from sim.runs.shard_plan import Shard, ShardPlan

NO_CSV_BEYOND = 1_000_000
"""Number of rows above which only Parquet is written."""
ROW_GROUP = 100_000
BLOCK_POINTS = 4000
"""Points whose pieces are summed together, at least as many as have distributions (`sim.runs.results_table.FEW_POINTS`)."""

Schema = dict[str, pl.DataType]
Rows = list[dict[str, Any]]


def merge(plan: ShardPlan, shards: Sequence[Shard], paths: Sequence[Path], folder: Path) -> tuple[Rows, Rows]:
    """Merge shards, in the order of the plan, into the tables of a run; return failures and disagreements of views.

    Raises
    ------
    RunError
        If every point failed.
    """
    grid, kinds = plan.grid, Kinds(paths)
    failed: Rows = []
    wrong = None
    if "error" in kinds.schema:
        found = scanned(paths, kinds).filter(pl.col("error").is_not_null()).select("point", "view", "error")
        wrong = found.unique(maintain_order=True).collect()
        failed = [{**row, **{path: str(value) for path, value in grid.values(row["point"]).items()}} for row in wrong.to_dicts()]
    write_text(folder / "failed.json", strict_json.dumps(failed, indent=2) + "\n")
    if failed and not _kept(scanned(paths, kinds), wrong).select(pl.len()).collect().item():
        raise RunError(f"every point failed; the first: {failed[0]['error']}")
    disagreements: Rows = []
    if plan.views == ("formula",) and grid.points > results_table.FEW_POINTS:
        # Shards hold final rows in order.
        _write_table(_kept(scanned(paths, kinds), wrong), folder)
    else:
        with contextlib.ExitStack() as files:
            disagreements = _write_blocks(plan, [*zip(shards, paths, strict=True)], kinds, wrong, folder, files)
    write_text(folder / "disagreements.json", strict_json.dumps(disagreements, indent=2) + "\n")
    return failed, disagreements


def _write_blocks(
    plan: ShardPlan, shards: list[tuple[Shard, Path]], kinds: Kinds, wrong: pl.DataFrame | None, folder: Path,
    files: contextlib.ExitStack,
) -> Rows:  # fmt: skip
    """Merge blocks of points into temporary files, and these into the tables; return the disagreements of views."""
    parts: list[Path] = []
    columns: dict[str, dict[str, None]] = {view: {} for view in ("formula", "paths", "events")}
    disagreements: dict[str, Rows] = {}
    for number, partial in enumerate(_blocks(plan, shards, kinds, wrong)):
        block = results_table.merged(plan.grid, partial)
        for view, names in block.columns.items():
            columns[view] |= dict.fromkeys(names)
        for view, found in block.disagreements.items():
            disagreements.setdefault(view, []).extend(found)
        for name, rows in block.more.items():
            if rows.height:
                write_whole(folder / f"{name}.parquet", parquet(rows))
        if block.table.height:
            part = files.enter_context(temporary_path(folder / "shards" / f"merged-{number}"))
            part.write_bytes(parquet_bytes(block.table))
            parts.append(part)
    # Columns in the order of the whole: those of the formula, then those of each simulated view.
    _write_table(scanned(parts).select([*dict.fromkeys(itertools.chain(*columns.values()))]), folder)
    return [*itertools.chain(*disagreements.values())]


def _blocks(plan: ShardPlan, shards: list[tuple[Shard, Path]], kinds: Kinds, wrong: pl.DataFrame | None) -> Iterator[pl.DataFrame]:
    """Rows of the shards, in their order, for each block of points in turn; all have the columns of all shards."""
    points = plan.grid.points
    spans = {view: [(*plan.points(shard), path) for shard, path in shards if shard.view == view] for view in plan.views}
    unread = {*results_table.FREQUENCIES, "accepted_lengths"} if points > results_table.FEW_POINTS else set[str]()
    empty = pl.DataFrame(schema={name: kind for name, kind in kinds.schema.items() if name not in {"error", *unread}})
    for first in range(0, points, BLOCK_POINTS):
        stop = min(first + BLOCK_POINTS, points)
        found = [empty]
        for of_view in spans.values():
            low = bisect.bisect_right(of_view, first, key=lambda span: span[1])
            high = bisect.bisect_left(of_view, stop, key=lambda span: span[0])
            if low < high:
                own = scanned([path for *_, path in of_view[low:high]]).filter(pl.col("point").is_between(first, stop - 1))
                own = own.select(pl.exclude(*unread)) if unread else own
                found.append(_kept(own, wrong).collect())
        yield pl.concat(found, how="diagonal_relaxed")


def _kept(rows: pl.LazyFrame, wrong: pl.DataFrame | None) -> pl.LazyFrame:
    """The rows without those of failed points. A point with one failed piece is a failed point: its other pieces are dropped."""
    if wrong is None:
        return rows
    rows = rows.drop("error", strict=False)
    return rows.join(wrong.lazy(), on=["view", "point"], how="anti", maintain_order="left")


def _write_table(rows: pl.LazyFrame, folder: Path) -> None:
    """Write rows in order as the table of results, and as CSV where they are few."""
    target, sheet = folder / "results.parquet", folder / "results.csv"
    table = results_table.arranged(rows)
    write_whole(target, lambda path: table.sink_parquet(path, row_group_size=ROW_GROUP, maintain_order=True))
    sheet.unlink(missing_ok=True)
    written = pl.scan_parquet(target, glob=False)
    if written.select(pl.len()).collect().item() <= NO_CSV_BEYOND:
        write_whole(sheet, written.collect().write_csv)


class Kinds:
    """Columns of tables: which have the same, and the columns of all together."""

    def __init__(self, paths: Sequence[Path]) -> None:
        known: dict[tuple[tuple[str, pl.DataType], ...], int] = {}
        schemas = (pl.scan_parquet(path, glob=False).collect_schema() for path in paths)
        self.of = [known.setdefault(tuple(schema.items()), len(known)) for schema in schemas]
        whole = pl.concat([pl.DataFrame(schema=dict(kind)) for kind in known], how="diagonal_relaxed")
        self.schema: Schema = dict(whole.schema)


def scanned(paths: Sequence[Path], kinds: Kinds | None = None) -> pl.LazyFrame:
    """Rows of tables in order, read lazily. Neighbours with the same columns are one scan: thousands of scans need memory."""
    kinds = kinds or Kinds(paths)
    groups = itertools.groupby(range(len(paths)), key=kinds.of.__getitem__)
    parts = [pl.scan_parquet([paths[index] for index in group], glob=False) for _, group in groups]
    return parts[0] if len(parts) == 1 else pl.concat(parts, how="diagonal_relaxed")
