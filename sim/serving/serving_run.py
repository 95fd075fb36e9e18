"""Runs of scenarios of a server into a directory: each simulated run is kept when it is done, and resumed after an interruption.

Runs are independent, so that the tables are the same to the byte for any number of workers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from model.base import bounded_files, strict_json, typed_values
from model.base.checks import ParameterError
from model.base.whole_files import TEMPORARY, write_text
from model.serving.records.recorder import TimeSeries
from sim.runs import dask_cluster, executor, sweep
from sim.runs.atomic_files import is_unchanged, locked, parquet, write_content, write_whole
from sim.runs.environment import versions
from sim.runs.executor import Executor, LocalProcesses
from sim.serving import load_scenario, study, study_results
from sim.serving.load_scenario import Tables
from sim.serving.study import RequestProgress, RunOf, ServedRun, StudyPlan
from sim.serving.study_results import Study

KIND = "serving"
FILE = "serving.json"
"""File of the results, as `--json` prints them: for reports and figures."""
MOST_MAPS = 6
SOON = 5.0
"""Seconds of work from which on several workers are started by default, which takes about two seconds."""

Progress = Callable[[float, int, str], None]
"""Called with runs done (of one in this process its part), runs in total, and requests done with the simulated time in words."""


@dataclass(frozen=True)
class Served:
    """Result of a run: its directory, its table, and a study for each combination of the axes."""

    out: Path
    tables: Tables
    table: pl.DataFrame
    studies: tuple[Study, ...]
    axes: tuple[dict[str, Any], ...]
    computed: int
    resumed: int

    def document(self) -> dict[str, Any]:
        """The results as JSON values."""
        return {
            "kind": f"{KIND}-run", "schema_version": study_results.SCHEMA_VERSION, "out": str(self.out), "scenario": self.tables,
            "versions": versions(), "table": [study_results.plain_values(row) for row in self.table.to_dicts()],
            "points": [{"axes": at, **each.document()} for at, each in zip(self.axes, self.studies, strict=True)],
        }  # fmt: skip


@dataclass(frozen=True)
class _Task:
    """One run of one combination of the axes."""

    point: int
    of: RunOf
    number: int

    @property
    def file(self) -> str:
        """Name of its file, without the hash."""
        return f"{self.number:06}.json"


def run(
    tables: Tables, *, out: str | Path | None = None, jobs: int | str | None = None, scheduler: str | None = None,
    resume: bool = False, progress: Progress | None = None, by_context: bool = False,
) -> Served:  # fmt: skip
    """Run a scenario of a server into a directory. Raises ParameterError.

    With `by_context`, best draft lengths are also found over contexts, of the first `MOST_MAPS` combinations of the axes.
    """
    jobs = executor.check_jobs(jobs, scheduler)
    points = load_scenario.points(tables)
    mark = load_scenario.fingerprint(tables)
    folder = Path(out) if out is not None else Path("runs") / f"{tables['scenario']['name']}-{mark[:8]}"
    plans = [study.plan(inputs) for _, inputs in points]
    with dask_cluster.opened(jobs, scheduler) as named:
        sweep.make_folder(folder)
        with locked(folder) as free:
            if not free:
                raise ParameterError(f"another run is at work in {folder}; wait until it ends, or name another directory with -o")
            _prepare(folder, tables, mark, resume=resume)
            with sweep.kept(folder, "runs"):
                number = jobs if isinstance(jobs, int) else None
                return _run(folder, tables, [at for at, _ in points], plans, number, named, progress, by_context=by_context)


def _run(
    folder: Path, tables: Tables, axes: list[dict[str, Any]], plans: list[StudyPlan], jobs: int | None, named: Executor | None,
    progress: Progress | None, *, by_context: bool,
) -> Served:  # fmt: skip
    tasks = [_Task(point, of, 0) for point, plan in enumerate(plans) for of in plan.runs]
    tasks = [_Task(each.point, each.of, number) for number, each in enumerate(tasks)]
    done = {each: found for each in tasks if (found := _held(folder, each)) is not None}
    resumed = len(done)
    requests = {each: plans[each.point].requests(each.of) for each in tasks}
    every = sum(requests.values())

    def tell(finished: int = 0, count: int = 1, now: float = 0.0) -> None:
        """Tell the progress with `finished` requests of a run of `count` at work, at its simulated time."""
        if progress is not None:
            served = sum(requests[each] for each in done) + finished
            seconds = sum(each.figures["simulated_s"] for each in done.values()) + now
            progress(len(done) + finished / count, len(tasks), f"{served:,} of {every:,} requests, {seconds:,.0f} s simulated")

    missing = [each for each in tasks if each not in done]
    for task, path in _computed(folder, tables, plans, missing, jobs, named, None if progress is None else tell):
        done[task] = _read(path)
        tell()
    studies = []
    for point, plan in enumerate(plans):
        maps = plan.by_context() if by_context and point < MOST_MAPS else ()
        studies.append(plan.study({each.of: done[each] for each in tasks if each.point == point}, maps))
    rows = [
        {**at, **row} for at, found in zip(_plain(axes), studies, strict=True)
        for row in found.rows
    ]  # fmt: skip
    table = pl.DataFrame([study_results.plain_values(row) for row in rows], infer_schema_length=None, strict=False)
    write_whole(folder / "results.parquet", parquet(table))
    write_whole(folder / "results.csv", table.write_csv)
    document = {
        "kind": KIND, "fingerprint": load_scenario.fingerprint(tables), "results_version": load_scenario.RESULTS_VERSION,
        "scenario": tables, "complete": True, "points": len(plans), "runs": len(tasks), "rows": table.height,
        "versions": versions(), "platform": platform.platform(),
    }  # fmt: skip
    made = Served(folder, tables, table, tuple(studies), tuple(axes), len(tasks) - resumed, resumed)
    write_text(folder / FILE, strict_json.dumps(made.document()) + "\n")
    write_text(folder / "metadata.json", strict_json.dumps(document, indent=2) + "\n")
    return made


def _plain(axes: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Values of the axes for a table: as JSON text on an axis with values of several types, or lists."""
    paths = axes[0] if axes else {}
    kinds = {path: {type(each[path]) for each in axes} - {int if float in {type(each[path]) for each in axes} else None}
             for path in paths}  # fmt: skip
    mixed = {path for path in paths if len(kinds[path]) > 1 or kinds[path] & {list, dict}}
    return [{path: strict_json.dumps(value) if path in mixed else value for path, value in at.items()} for at in axes]


def _prepare(folder: Path, tables: Tables, mark: str, *, resume: bool) -> None:
    """Check that the directory is new or belongs to this scenario; without `resume`, remove its kept runs."""
    note, held = folder / "metadata.json", None
    if any(path.suffix != TEMPORARY for path in folder.iterdir()):
        try:
            held = bounded_files.json_of(bounded_files.read_bytes(note))["fingerprint"]
        except (OSError, ValueError, KeyError, TypeError):
            raise ParameterError(f"{folder} exists and is not the directory of a run; name another directory with -o") from None
        if held != mark:
            raise ParameterError(f"{folder} holds the run of another scenario (or version); name another directory with -o")
        (folder / FILE).unlink(missing_ok=True)  # of results that are computed again
        if not resume:
            shutil.rmtree(folder / "shards", ignore_errors=True)
    for left in folder.glob(f"**/.*{TEMPORARY}"):
        left.unlink(missing_ok=True)  # of a run that was killed while writing
    try:
        if held is None or not resume:
            begun = {"kind": KIND, "fingerprint": mark, "scenario": tables, "complete": False}
            write_text(note, strict_json.dumps(begun, indent=2) + "\n")
        (folder / "shards").mkdir(exist_ok=True)
    except OSError as error:
        raise ParameterError(f"{folder} cannot be written: {error.strerror}; name another directory with -o") from None


def _held(folder: Path, task: _Task) -> ServedRun | None:
    """The kept result of a run; None if there is none. A damaged file is removed."""
    for path in (folder / "shards").glob(f"{task.file.removesuffix('.json')}-*.json"):
        if is_unchanged(path):
            with contextlib.suppress(ParameterError, KeyError):
                return _read(path)
        path.unlink(missing_ok=True)
    return None


def _read(path: Path) -> ServedRun:
    found = bounded_files.json_of(bounded_files.read_bytes(path))
    typed_values.check(found, dict[str, Any], path.name)
    series = None
    if found["series"] is not None:
        series = TimeSeries([[float(value) for value in row] for row in found["series"]["rows"]], int(found["series"]["span"]))
    figures = {name: float("nan") if value is None else float(value) for name, value in found["figures"].items()}
    return ServedRun(figures, bool(found["stable"]), found["within_slo"], series)


def _content(made: ServedRun) -> bytes:
    """Content of the file of a run."""
    series = None if made.series is None else {"rows": made.series.rows, "span": made.series.span}
    document = {
        "figures": study_results.plain_values(made.figures), "stable": made.stable, "within_slo": made.within_slo, "series": series
    }  # fmt: skip
    return strict_json.dumps(document).encode("utf-8")


_plans: dict[str, list[StudyPlan]] = {}
"""The plans of the scenario that a worker runs, made once."""


def _compute(task: _Task, tables: Tables, mark: str) -> bytes:
    """Simulate one run in a worker; return the content of its file."""
    if mark not in _plans:
        sweep.check_files(load_scenario.fingerprint(tables) == mark, load_scenario.named_files(tables))
        _plans.clear()
        _plans[mark] = [study.plan(inputs) for _, inputs in load_scenario.points(tables)]
    return _content(_plans[mark][task.point].run(task.of))


def _computed(
    folder: Path, tables: Tables, plans: list[StudyPlan], missing: list[_Task], jobs: int | None, named: Executor | None,
    tell: RequestProgress | None,
) -> Iterator[tuple[_Task, Path]]:  # fmt: skip
    """Simulate runs and yield each with its file; the first alone, whose time decides by default whether workers are started.

    `tell` is called with the progress of runs in this process.
    """
    begun, wanted = time.monotonic(), jobs
    files = {task: folder / "shards" / task.file for task in missing}
    while files and named is None and (wanted is None or wanted == 1):
        task, path = next(iter(files.items()))
        del files[task]
        plan = plans[task.point]
        yield task, write_content(path, _content(plan.run(task.of) if tell is None else plan.run(task.of, tell)))
        if wanted is None:
            spent = time.monotonic() - begun
            wanted = (os.cpu_count() or 1) if spent * len(files) > SOON else 1
    if files:
        workers = named or LocalProcesses(min(wanted or 1, len(files)))
        yield from workers.completed(functools.partial(_compute, tables=tables, mark=load_scenario.fingerprint(tables)), files)
