"""A simulated decoding as a Chrome trace, which opens in Perfetto (ui.perfetto.dev) or chrome://tracing."""

from __future__ import annotations

import gzip
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from model.base import checks, strict_json, whole_files
from model.base.checks import ParameterError
from model.logs.spans import Span
from model.methods.registry import allow_modules
from sim.engine.events import Run
from sim.runs.sweep import resolve
from sim.scenarios.cases import Case
from sim.scenarios.grid import Grid
from sim.views import evaluation, point_columns

_PROCESS = 1
_MILLISECOND = 1_000_000  # [ns]; one layer-time is shown as 1 ms
OF_TRACES = (".json", ".json.gz")
_SUFFIXES = (*OF_TRACES, ".png", ".svg")


class RecordedDecoding(NamedTuple):
    """A recorded decoding, in milliseconds where the seconds of a layer are known, with its point's columns of the results."""

    run: Run
    about: dict[str, Any]
    time_unit: str


def record(
    scenario: str | Path | Mapping[str, Any] | None = None,
    *,
    point: int = 0,
    replication: int = 0,
    tokens: int | None = None,
    methods: Sequence[str] = (),
    **overrides: Any,
) -> Run:
    """Simulate one decoding of one point of a scenario, of at most `tokens` tokens, and keep every interval.

    `methods` are modules outside the project that the scenario may name; `overrides` are those of `sim.runs.sweep.resolve`.
    """
    given: dict[str, Any] = {"point": point, "replication": replication, "tokens": tokens}
    return _recorded(scenario, methods=methods, **given, **overrides)[0]


def described(
    scenario: str | Path | Mapping[str, Any] | None = None, *, point: int = 0, replication: int = 0, **options: Any
) -> RecordedDecoding:
    """Simulate one decoding as `record` does, and describe it; `options` are the other arguments of `record`."""
    run, case, about = _recorded(scenario, point=point, replication=replication, **options)
    if case.seconds is None:
        return RecordedDecoding(run, about, "layer-times")
    factor = 1e3 * case.seconds
    intervals = [row._replace(start=factor * row.start, end=factor * row.end) for row in run.intervals]
    commits = [(factor * time, kind, count) for time, kind, count in run.commits]
    scaled = replace(run, latency=factor * run.latency, busy=factor * run.busy, intervals=intervals, commits=commits)
    return RecordedDecoding(scaled, about, "ms")


def _recorded(
    scenario: str | Path | Mapping[str, Any] | None, *, point: int, replication: int, tokens: int | None = None,
    methods: Sequence[str] = (), **overrides: Any,
) -> tuple[Run, Case, dict[str, Any]]:  # fmt: skip
    with allow_modules(methods):
        grid = Grid(resolve(scenario, **overrides))
        checks.whole("point", point, 0, grid.points - 1)
        checks.whole("replication", replication, 0)
        case = grid.case(point)
        if tokens is not None:
            checks.whole("tokens", tokens, 1)
            case = _shortened(case, min(tokens, case.settings.tokens))
        [world] = evaluation.worlds_of(case, replication, replication + 1)
        run: Run = evaluation.simulate(case, world, record=True)
        return run, case, point_columns.described(grid, point, case) | {"scenario": grid.tables["scenario"].get("name", "")}


def _shortened(case: Case, tokens: int) -> Case:
    """Return the case shortened to `tokens` tokens per sequence."""
    return replace(case, parameters=case.parameters.shortened(tokens), settings=replace(case.settings, tokens=tokens))


def chrome_trace(
    intervals: Sequence[Span], commits: Sequence[tuple[float, str, int]], name: str, time_unit: str = "layer-times"
) -> dict[str, Any]:
    """Chrome trace of `Run.intervals` and `Run.commits`, with a track for each unit, and tracks for links, commits, and busy units.

    Times are in `time_unit`, one of which is shown as 1 ms. Time stamps are rounded to the nanosecond, the resolution of viewers:
    intervals that meet in the simulation meet in the trace. Exact times are in the `args` of each event.
    """
    on_units = [row for row in intervals if row.unit >= 0]
    # Viewers take thread 0 for the idle task, so unit numbers are shifted by 1.
    tracks = [(row.unit + 1, row) for row in on_units]
    units = max((row.unit for row in on_units), default=-1) + 1
    names = {unit + 1: f"unit {unit}" for unit in range(units)}
    # Unit 0 is the main process's if all verification runs on it; in PPD's nested form promoted processes stay on their units.
    passes = [row for row in on_units if row.what == "forward" and row.fate == "kept" and row.role == "target"]
    deepest = max((row.last for row in passes), default=0)
    if {row.unit for row in passes if row.last == deepest} == {0}:
        names[1] = "unit 0 (main)"
    for lane, row in _lanes([row for row in intervals if row.unit < 0]):
        names[units + 1 + lane] = f"link {lane}"
        tracks.append((units + 1 + lane, row))
    events = [{"ph": "M", "pid": _PROCESS, "tid": 0, "name": "process_name", "args": {"name": "cluster"}}]
    for track, words in sorted(names.items()):
        events.append({"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_name", "args": {"name": words}})
        events.append({"ph": "M", "pid": _PROCESS, "tid": track, "name": "thread_sort_index", "args": {"sort_index": track}})
    events.extend(_complete(track, row) for track, row in sorted(tracks, key=lambda pair: (pair[1].start, pair[0], pair[1].end)))
    events.extend(_commits(commits))
    events.extend(_busy(on_units))
    shown = "simulated" if time_unit == "ms" else "simulated; one layer-time is shown as 1 ms"
    return {
        "traceEvents": events,
        "displayTimeUnit": "ms",
        "otherData": {"name": name, "time": shown, "made_by": "decodesim"},
    }


def write(path: str | Path, run: Run, name: str, time_unit: str = "layer-times") -> Path:
    """Write the trace of a run simulated with `record` to .json or .json.gz; the file is written completely or not at all."""
    if not run.intervals:
        raise ParameterError("the run has no intervals to trace; simulate it with record=True")
    return write_trace(path, lambda: chrome_trace(run.intervals, run.commits, name, time_unit))


def write_trace(path: str | Path, made: Callable[[], dict[str, Any]]) -> Path:
    """Write a Chrome trace, which is made after the name of the file was checked."""
    target = Path(path)
    check_name(target)
    content = strict_json.dumps(made(), separators=(",", ":")).encode()
    if target.name.endswith(".gz"):
        content = gzip.compress(content, mtime=0)
    try:
        return whole_files.write_bytes(target, content)
    except OSError as error:
        raise ParameterError(f"cannot write {target}: {error.strerror}") from None


def check_name(path: Path, suffixes: Sequence[str] = _SUFFIXES) -> None:
    """Refuse a file that is not one of traces; `suffixes` are those that its errors name."""
    if not path.name.endswith(OF_TRACES):
        raise ParameterError(f"a trace is written to a file that ends in one of {', '.join(suffixes)}, got {path.name!r}")


def _stamp(time: float) -> int:
    """Time stamp [ns]. Starts and ends are rounded alike and a duration is their difference, so neighbours never overlap."""
    return round(time * _MILLISECOND)


def _complete(track: int, row: Span) -> dict[str, Any]:
    start, end = _stamp(row.start), _stamp(row.end)
    args: dict[str, Any] = {"fate": row.fate, "process": row.process, "start": row.start, "end": row.end}
    label = row.what
    if row.what == "forward":
        at = f"tokens {row.earliest}–{row.position}" if row.earliest < row.position else f"token {row.position}"
        # With several hypotheses or sequences a pass has more tokens than positions.
        done = f"layers {', '.join(f'{low}–{high}' for low, high in row.layers_run)}" if row.layers_run else "head"
        done = f"keys and values of {done}" if row.kv_only else done
        label = f"{at}{f' ({row.width} in all)' if row.depth else ''} · {done}"
        label = label if row.role == "target" else f"{row.role}: {label}"
        args |= {"position": row.position, "layers": f"[{row.first}, {row.last})", "role": row.role, "tokens": row.width}
    return {
        "ph": "X", "pid": _PROCESS, "tid": track, "name": label, "cat": f"{row.what},{row.fate}",
        "ts": start / 1000, "dur": (end - start) / 1000, "args": args,
    }  # fmt: skip


def _commits(commits: Iterable[tuple[float, str, int]]) -> Iterator[dict[str, Any]]:
    """An instant event for each commit, and a counter of generated tokens."""
    generated = 0
    for time, kind, tokens in commits:
        generated += tokens
        common = {"pid": _PROCESS, "tid": 1, "cat": "commit", "ts": _stamp(time) / 1000}
        args = {"kind": kind, "tokens": tokens, "time": time}
        yield {"ph": "i", "s": "p", "name": f"{kind}: {generated} generated", **common, "args": args}
        yield {"ph": "C", "name": "tokens generated", **common, "args": {"tokens": generated}}


def _busy(rows: Sequence[Span]) -> Iterator[dict[str, Any]]:
    """Counter of busy units, at each change."""
    changes: dict[int, int] = {}
    for row in rows:
        changes[_stamp(row.start)] = changes.get(_stamp(row.start), 0) + 1
        changes[_stamp(row.end)] = changes.get(_stamp(row.end), 0) - 1
    busy = 0
    for stamp, change in sorted(changes.items()):
        if change:
            busy += change
            yield {"ph": "C", "pid": _PROCESS, "name": "busy units", "ts": stamp / 1000, "args": {"units": busy}}


def _lanes(rows: Sequence[Span]) -> Iterator[tuple[int, Span]]:
    """Put concurrent transfers on separate tracks: events of one track must not overlap."""
    free: list[float] = []
    for row in sorted(rows, key=lambda row: (row.start, row.end)):
        lane = next((index for index, time in enumerate(free) if time <= row.start), len(free))
        free[lane : lane + 1] = [row.end]
        yield lane, row
