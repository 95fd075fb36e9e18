"""Runs of scenarios: split into shards, computed by workers, merged into tables, and resumed after an interruption.

A shard is a part of one view's work (`sim.runs.shard_plan`). Every shard has its own random draws, so the table is the same to the
byte for any number of workers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from model.base import bounded_files, checks, strict_json
from model.base.checks import ParameterError
from model.base.table_records import parse_value
from model.base.whole_files import TEMPORARY, write_text
from model.methods import registry
from sim.runs import dask_cluster, executor, shard_merge
from sim.runs.atomic_files import intact, locked, parquet_bytes
from sim.runs.executor import Executor, LocalProcesses, RunError, WorkersLostError
from sim.runs.shard_plan import Shard, ShardPlan
from sim.scenarios import outcomes_section, scenario_file
from sim.scenarios.grid import Grid, parse_axis
from sim.scenarios.scenario_file import Tables
from sim.views import evaluation, formula_view

ASK_BEYOND = 10_000_000
"""Number of grid points above which a run must be confirmed with --yes."""
MAX_SHARDS = 1_000_000
"""Bound on the shards of a run. At one second each they take eleven days; a longer list might not fit into memory."""


def compute(
    shard: Shard, tables: Tables, fingerprint: str, allowed: Sequence[str] = (), plan: ShardPlan | None = None
) -> bytes:
    """Compute a shard and return the content of its file; `allowed` are the modules of methods outside the project.

    A worker makes the plan of its tables once; without workers, `plan` is the plan of the run.
    """
    with registry.allow_modules(allowed):
        plan = plan or _plan_of(tables, fingerprint)
        grid = plan.grid
        if shard.view == "formula":
            frame = formula_view.frame(grid, shard.first, shard.last)
        else:
            rows, failures = evaluation.evaluate(grid, shard.view, plan.work(shard))
            frame = pl.DataFrame([*rows, *failures], infer_schema_length=None)
        return parquet_bytes(frame)


@dataclass(frozen=True)
class Report:
    """Result of a run: its directory (None if no files are kept), number of rows, failed points, and disagreements."""

    out: Path | None
    tables: Tables
    rows: int
    failed: list[dict[str, Any]]
    computed: int
    resumed: int
    disagreements: list[dict[str, Any]] = field(default_factory=list)
    """Differences between views that must agree (`sim.views.agreement`): a bug in the program."""

    def table(self) -> pl.LazyFrame:
        """Return the results table, read lazily."""
        assert self.out is not None
        return pl.scan_parquet(self.out / "results.parquet", glob=False)

    def frame(self, rows: int | None = None) -> pl.DataFrame:
        """Return the results table, or its first rows."""
        return (self.table() if rows is None else self.table().head(rows)).collect()


_plans: dict[tuple[Any, ...], ShardPlan] = {}
"""The last plan made by a worker: points that its shards share are resolved once."""


def _plan_of(tables: Tables, fingerprint: str) -> ShardPlan:
    key = fingerprint, registry.allowed_modules()
    if key not in _plans:
        check_files(scenario_file.fingerprint(tables) == fingerprint, scenario_file.named_files(tables))
        _plans.clear()
        _plans[key] = ShardPlan(Grid(tables, check=False))
    return _plans[key]


def check_files(same: bool, names: Iterable[str]) -> None:
    """Refuse to compute where files that the scenario names are not the same as in the process that started the run."""
    if not same:
        listed = ", ".join(sorted(names)) or "the scenario"
        remedy = "name them by absolute paths in a folder that all workers share, and leave them unchanged during a run"
        raise ParameterError(f"a worker finds other files than the main process ({listed}); {remedy}")


def resolve(
    source: str | Path | Mapping[str, Any] | None = None,
    *,
    set: Mapping[str, Any] | Iterable[str] = (),
    sweep: Mapping[str, Any] | Iterable[str] = (),
    views: Sequence[str] | None = None,
    replications: int | None = None,
    seed: int | None = None,
) -> Tables:
    """Return the tables of a scenario with overrides applied: values set, axes added, keys of [scenario] replaced."""
    tables = scenario_file.load(source)
    given: list[str] = []
    for path, value in pairs(set, parse_value, "--set"):
        axes = tables.get("sweep", {})
        scenario_file.apply(tables, path, value)
        given.append(path)
        if isinstance(axes, dict):
            axes.pop(path, None)  # a value that is set is no longer swept
    for path, values in pairs(sweep, parse_axis, "--sweep"):
        axes = tables.setdefault("sweep", {})
        if not isinstance(axes, dict):
            raise ParameterError(f"[sweep] must be a table of paths and lists, got {checks.shown(axes)}")
        axes[path] = _listed(values)
        given.append(path)
    _forget_provenance(tables, given)
    own = tables.setdefault("scenario", {})
    if not isinstance(own, dict):
        raise ParameterError(f"[scenario] must be a table, got {checks.shown(own)}")
    if views is not None:
        own["views"] = [views] if isinstance(views, str) else list(views)
    if replications is not None:
        own["replications"] = own["event_replications"] = replications
    if seed is not None:
        own["seed"] = seed
        if isinstance(tables.get("sweep"), dict):
            tables["sweep"].pop("scenario.seed", None)
    return tables


def _forget_provenance(tables: Tables, given: list[str]) -> None:
    """Remove `trials` and `source` of a rate that was overridden, unless they were overridden too."""
    for path in given:
        above, _, key = path.rpartition(".")
        if key not in outcomes_section.rates():
            continue
        for table in _tables_at(tables, above):
            for other in ("trials", "source"):
                if f"{above}.{other}" not in given:
                    table.pop(other, None)


def _tables_at(tables: Tables, path: str) -> list[Tables]:
    """Return the tables at a path; a path in [outcomes] also means the [method.outcomes] of each method."""
    first, *rest = path.split(".")
    own = scenario_file.method_tables(tables)
    found: list[Any] = [*own] if first == "method" else [tables.get(first), *(table.get(first) for table in own)]
    for name in rest:
        found = [table.get(name) for table in found if isinstance(table, dict)]
    return [table for table in found if isinstance(table, dict)]


def _listed(values: Any) -> Any:
    """Values of an axis as a list: Python callers may also pass tuples, ranges and arrays."""
    if isinstance(values, np.ndarray):
        return values.tolist()
    return list(values) if isinstance(values, tuple | range) else values


def pairs(given: Mapping[str, Any] | Iterable[str], parse: Callable[[str], Any], option: str) -> Iterator[tuple[str, Any]]:
    """Paths and values of --set or --sweep, from a mapping or from the words of a command line."""
    if isinstance(given, Mapping):
        yield from given.items()
        return
    for text in given:
        path, equals, value = text.partition("=")
        if not equals:
            wanted, example = ("VALUE", "outcomes.match_rate=0.4") if option == "--set" else ("VALUES", "method.candidates=1,3,5")
            raise ParameterError(f"{option} must be PATH={wanted}, got {text!r}; for example {option} {example}")
        yield path.strip(), parse(value.strip())


def run(
    source: str | Path | Mapping[str, Any] | None = None,
    *,
    out: str | Path | None = None,
    jobs: int | str | None = None,
    scheduler: str | None = None,
    resume: bool = False,
    yes: bool = False,
    progress: Callable[[int, int], None] | None = None,
    **overrides: Any,
) -> Report:
    """Run a scenario into a directory; `overrides` are those of `resolve`; `progress` is called with shards done and in total.

    `jobs` is a number of processes or `dask`, and `scheduler` the address of a dask scheduler (`sim.runs.dask_cluster.opened`).
    """
    tables = resolve(source, **overrides)
    grid = Grid(tables)
    if grid.points > ASK_BEYOND and not yes:
        raise ParameterError(f"the grid has {grid.points:,} points, more than {ASK_BEYOND:,}; say --yes to run it")
    jobs = executor.check_jobs(jobs, scheduler)
    plan = ShardPlan(grid)
    if plan.count() > MAX_SHARDS:
        hours = f"about {plan.estimate() / 3600:,.0f} hours on one core"
        remedy = "take fewer points, views or replications"
        raise ParameterError(f"a run must have at most {MAX_SHARDS:,} shards, got {plan.count():,} ({hours}); {remedy}")
    folder = (
        Path(out) if out is not None else Path("runs") / f"{tables['scenario']['name']}-{scenario_file.fingerprint(tables)[:8]}"
    )
    with dask_cluster.opened(jobs, scheduler) as named:
        make_folder(folder)
        with locked(folder) as free:
            if not free:
                raise ParameterError(f"another run is at work in {folder}; wait until it ends, or name another directory with -o")
            _prepare(folder, tables, resume=resume)
            with kept(folder):
                return _run(plan, folder, jobs if isinstance(jobs, int) else None, named, progress)


@contextlib.contextmanager
def kept(folder: Path, what: str = "shards") -> Iterator[None]:
    """Say where finished work is kept, in errors that end a run and in an interruption."""
    hint = f"finished {what} are kept in {folder}; resume with the same command and --resume"
    try:
        yield
    except (OSError, pl.exceptions.PolarsError) as error:
        raise RunError(f"{_reason(error, folder)}; {hint}") from None
    except WorkersLostError as error:
        raise WorkersLostError(f"{error}; {hint}") from None
    except KeyboardInterrupt:
        raise KeyboardInterrupt(hint) from None


def _run(
    plan: ShardPlan, folder: Path, jobs: int | None, named: Executor | None, progress: Callable[[int, int], None] | None
) -> Report:
    tables, shards = plan.grid.tables, plan.shards()
    fingerprint = scenario_file.fingerprint(tables)
    todo = {shard: folder / "shards" / plan.file(shard, fingerprint) for shard in shards}
    done = intact(todo)
    resumed = len(done)
    missing = {shard: path for shard, path in todo.items() if shard not in done}
    for shard, path in _computed(plan, missing, named or LocalProcesses(_workers(jobs, plan, len(missing)))):
        done[shard] = path
        if progress is not None:
            progress(len(done), len(todo))
    # In the order of the plan, not in the order of completion.
    failed, disagreements = shard_merge.merge(plan, shards, [done[shard] for shard in shards], folder)
    rows = int(pl.scan_parquet(folder / "results.parquet", glob=False).select(pl.len()).collect().item())
    _describe(folder, tables, plan, rows, failed, disagreements)
    return Report(folder, tables, rows, failed, len(missing), resumed, disagreements)


def _reason(error: Exception, folder: Path) -> str:
    if not isinstance(error, OSError):
        return f"a table in {folder} cannot be written or read again (disk full?): {str(error).partition(chr(10))[0]}"
    return f"{error.strerror or error} ({error.filename or folder})"


def _workers(jobs: int | None, plan: ShardPlan, shards: int) -> int:
    """Number of workers: `jobs`; by default all cores, or one where starting workers would take longer than the work."""
    wanted = jobs if jobs is not None else (os.cpu_count() or 1) if plan.estimate() > 5 else 1
    return max(1, min(wanted, shards))


def make_folder(folder: Path) -> None:
    """Make the directory of a run. Raises ParameterError."""
    try:
        if folder.exists() and not folder.is_dir():
            raise ParameterError(f"{folder} exists and is not the directory of a run; name another with -o")
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ParameterError(f"{folder} cannot be written: {error.strerror}; name another directory with -o") from None


def _prepare(folder: Path, tables: Tables, *, resume: bool) -> None:
    """Check that the directory is new or belongs to this scenario; without `resume`, remove its shards."""
    note, fingerprint, held = folder / "metadata.json", scenario_file.fingerprint(tables), None
    if any(path.suffix != TEMPORARY for path in folder.iterdir()):
        try:
            held = bounded_files.json_of(bounded_files.read_bytes(note))["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ParameterError(f"{folder} exists and is not the directory of a run; name another directory with -o") from None
        if held != fingerprint:
            raise ParameterError(f"{folder} holds the run of another scenario (or version); name another directory with -o")
        if not resume:
            shutil.rmtree(folder / "shards", ignore_errors=True)
    for left in (*folder.glob(f".*{TEMPORARY}"), *folder.glob(f"shards/.*{TEMPORARY}")):
        left.unlink(missing_ok=True)  # temporary files of a run that was killed while writing
    try:
        if held is None or not resume:  # a resumed run need not write it again: on a full disk that would fail
            begun = {"fingerprint": fingerprint, "scenario": tables, "complete": False}
            write_text(note, strict_json.dumps(begun, indent=2) + "\n")
        (folder / "shards").mkdir(exist_ok=True)
    except OSError as error:
        raise ParameterError(f"{folder} cannot be written: {error.strerror}; name another directory with -o") from None


def _computed(plan: ShardPlan, missing: dict[Shard, Path], workers: Executor) -> Iterator[tuple[Shard, Path]]:
    """Compute shards and yield each with its path."""
    tables, here = plan.grid.tables, workers == LocalProcesses(1)
    work = functools.partial(
        compute, tables=tables, fingerprint=scenario_file.fingerprint(tables), allowed=registry.allowed_modules(),
        plan=plan if here else None,
    )  # fmt: skip
    yield from workers.completed(work, missing)


def _describe(
    folder: Path, tables: Tables, plan: ShardPlan, rows: int, failed: list[dict[str, Any]], disagreements: list[dict[str, Any]]
) -> None:
    """Write metadata.json: the scenario, versions, and sources of the numbers."""
    import platform

    from sim.runs.environment import versions

    table = pl.scan_parquet(folder / "results.parquet", glob=False)
    sources: list[str] = []
    if "outcomes_source" in table.collect_schema().names():
        known = table.select(pl.col("outcomes_source").drop_nulls().unique()).collect(engine="streaming")
        sources = sorted(known["outcomes_source"].to_list())
    document = {
        "fingerprint": scenario_file.fingerprint(tables), "results_version": scenario_file.RESULTS_VERSION, "scenario": tables,
        "files": scenario_file.named_files(tables), "methods": list(registry.allowed_modules()), "complete": True,
        "points": plan.grid.points, "rows": rows,
        "views": list(plan.views), "replications": {view: plan.replications[view] for view in plan.views if view != "formula"},
        "failed": len(failed), "disagreements": len(disagreements), "outcomes": sources[:100],
        "cost": scenario_file.cost_source(tables), "versions": versions(), "platform": platform.platform(),
    }  # fmt: skip
    write_text(folder / "metadata.json", strict_json.dumps(document, indent=2) + "\n")
