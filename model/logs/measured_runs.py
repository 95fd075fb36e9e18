"""Measured runs: wall times of real decodings with all their repeats and reads, to compare with predictions.

There are four files: NAME.json describes models and hardware, NAME.parquet has one row per timed run, and NAME.reads.json with
NAME.reads.parquet is the read log of the decodings (`model.logs.read_log`), from which they can be replayed.

==========  ===========================================================================================================
column      content
==========  ===========================================================================================================
decoding    number of the decoding in the read log, from 0: a method, its settings and a prompt
repeat      number of the repeat, from 0
run_order   position of the run among all runs; repeats are interleaved, so that drift affects all decodings equally
units       units that made the passes: processes, or streams of one GPU, according to `unit_kind` of the JSON file
seconds     time from the first step to the last token [s]
commit_s    time of each commit since the start [s]; the first one follows the prompt
pass_s      time in passes by role, in the order of `roles` of the JSON file [s]
read_s      time in reads, logits included [s]
waited      fraction of the time in which the process did not run because other processes did [-]
load        mean number of runnable processes in the last minute
spans       time spans of runs over several units (`model.logs.spans`), from the start [s]
==========  ===========================================================================================================
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

import numpy as np
from numpy.typing import NDArray

from model.base import bounded_files, checks, json_and_parquet, typed_values
from model.base.checks import ParameterError
from model.logs import read_log, replay, spans
from model.logs.read_log import ReadLog
from model.logs.recorded_decoding import Decoding
from model.logs.spans import STORED_FIELDS, Span

if TYPE_CHECKING:
    import polars as pl

VERSION = 3
ROLES = ("target", "draft", "medium")
UNITS: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("decoding", "repeat", "run_order", "units"), "1"),
        **dict.fromkeys(("seconds", "commit_s", "pass_s", "read_s"), "s"), "waited": "-", "load": "1", "spans": "s",
    }
)  # fmt: skip
UNIT_KINDS = ("processes", "streams")
"""Kinds of units: processes, with replicas of the model, or for several models with a model each; or streams of the GPU that holds
the model."""
MODES = ("eager", "cuda-graph")
"""Execution of passes: kernels launched one by one (the default), or as one CUDA graph."""
_KEYS = ("about", "columns", "rows", "reads_sha256")
LATE_S, LATE = 1e-3, 0.01
"""Tolerance for parts of a run that end after the run, absolute [s] and relative [-], because two clocks are read one after the
other. In runs over several processes, whose answers pass through a queue, 0.14 ms were observed."""


class RunsDescription(TypedDict):
    """Description that all runs of a file share."""

    device: str
    dtype: str
    threads: int | None
    machine: dict[str, Any]
    shapes: dict[str, dict[str, Any]]
    prompts: str
    warm_ups: int
    forced: list[dict[str, float] | None] | None
    roles: list[str]
    profiles: dict[str, str]
    date: str
    versions: dict[str, str]
    unit_kind: NotRequired[list[str]]
    mode: NotRequired[str]
    devices: NotRequired[list[str]]


class _RunsHeader(TypedDict):
    about: dict[str, Any]
    columns: dict[str, str]
    rows: int
    reads_sha256: str
_COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("decoding", "repeat", "run_order", "units"), int), "seconds": float, "commit_s": list[float],
    "pass_s": list[float], "read_s": float, "waited": float, "load": float, "spans": list[dict[str, Any]],
}  # fmt: skip
_SPAN: dict[str, Any] = {
    **dict.fromkeys(STORED_FIELDS, int), **dict.fromkeys(("start", "end"), float), **dict.fromkeys(("what", "fate", "role"), str),
}  # fmt: skip
FEWEST = 3
"""Minimum number of repeats for an estimate of the noise."""
BUSY = 0.1
"""A run is disturbed if it waited for other processes for more than this fraction of its time [-] (assumed)."""


@dataclass(frozen=True, eq=False)
class MeasuredRuns:
    """Timed decodings.

    Parameters
    ----------
    log
        Read log with each decoding once: its method, settings, prompt, output and reads.
    table
        One row per timed run (columns above).
    about
        Device, machine and library versions; shapes of the models by role; number of warm-up runs; forced outcomes; optionally the
        kind of units of each decoding (`unit_kind`, default processes) and the execution of passes (`mode`).
    """

    log: ReadLog
    table: pl.DataFrame
    about: Mapping[str, Any]

    def __post_init__(self) -> None:
        typed_values.check(dict(self.about), RunsDescription, "about")
        if [*self.about["roles"]] != [*ROLES]:
            raise ParameterError(f"about.roles must be {checks.shown(ROLES)}, got {checks.shown(self.about['roles'])}")
        checks.whole("warm_ups", self.about["warm_ups"], 0)
        for name, each in (("unit_kind", self._unit_kinds), ("forced", self.about["forced"])):
            if each is not None and len(each) != len(self.log.decodings):
                raise ParameterError(f"{name} must have one for each of {len(self.log.decodings)} decodings, got {len(each)}")
        for unit_kind in self._unit_kinds:
            checks.one_of("unit_kind", unit_kind, UNIT_KINDS)
        checks.one_of("mode", self.mode, MODES)
        if not self.table.height:
            raise ParameterError("measured runs must have at least one row, got none")
        _check_rows(self.table, self.log)

    @property
    def mode(self) -> str:
        """Execution of passes, one of `MODES`."""
        return str(self.about.get("mode", MODES[0]))

    @property
    def _unit_kinds(self) -> list[str]:
        kinds: list[str] = self.about.get("unit_kind", [UNIT_KINDS[0]] * len(self.log.decodings))
        return kinds

    @cached_property
    def timed(self) -> dict[int, TimedDecoding]:
        """Timed decodings by their number in the read log."""
        timed = {}
        for number in sorted(set(self.table["decoding"])):
            rows = self.table.filter(self.table["decoding"] == number).sort("repeat")
            timed[int(number)] = TimedDecoding(self.log.decodings[number], rows, self._unit_kinds[number])
        return timed

    @property
    def warnings(self) -> tuple[str, ...]:
        """Reasons why all of these times are doubtful."""
        reasons = []
        if not self.about["warm_ups"]:
            reasons.append("no warm-up: first runs take longer")
        if (fewest := min(each.repeats for each in self.timed.values())) < FEWEST:
            reasons.append(f"{fewest} repeats, fewer than {FEWEST}: the noise is unknown")
        disturbed = float((self.table["waited"].to_numpy() > BUSY).mean())
        if disturbed > 0.5:
            reasons.append(f"heavy load: {disturbed:.0%} of the runs waited for more than {BUSY:.0%} of their time")
        return tuple(reasons)


@dataclass(frozen=True, eq=False)
class TimedDecoding:
    """All repeats of one decoding."""

    decoding: Decoding
    rows: pl.DataFrame
    unit_kind: str = UNIT_KINDS[0]
    """Kind of units, if there are several."""

    @property
    def repeats(self) -> int:
        """Number of repeats."""
        return self.rows.height

    @property
    def units(self) -> int:
        """Units that made its passes."""
        return int(self.rows["units"][0])

    @property
    def separate_models(self) -> bool:
        """True if each model has a process (or several, with a replica each); else the units have replicas of one model."""
        roles = {kind.role for kind in self.decoding.account.passes_by_kind}
        return self.units > 1 and self.unit_kind == UNIT_KINDS[0] and len(roles) > 1

    @cached_property
    def used_repeats(self) -> NDArray[np.bool_]:
        """Mask of the repeats that are used, shape (repeats,): the undisturbed ones if there are enough, else all."""
        calm = np.asarray(self.rows["waited"].to_numpy() <= BUSY)
        return calm if calm.sum() >= FEWEST else np.ones_like(calm)

    @property
    def disturbed(self) -> bool:
        """True if too few repeats were undisturbed, so that all are used."""
        return bool((self.rows["waited"].to_numpy()[self.used_repeats] > BUSY).any())

    @cached_property
    def totals(self) -> NDArray[np.float64]:
        """Times from the first step to the last token, of the repeats that are used [s]."""
        return np.asarray(self.rows["seconds"].to_numpy()[self.used_repeats], dtype=np.float64)

    @cached_property
    def after_first(self) -> NDArray[np.float64]:
        """Times from the first commit to the last token, without the prompt, of the repeats that are used [s]."""
        first = np.array([each[0] for each in self.rows["commit_s"].to_list()])[self.used_repeats]
        return np.asarray(self.totals - first)

    def median(self, *, prompt: bool = False) -> float:
        """Median time of a repeat, with the time before the first commit if `prompt` is set [s]."""
        return float(np.median(self.totals if prompt else self.after_first))

    def noise(self, *, prompt: bool = False) -> float:
        """Median absolute deviation of the repeats, relative to their median [-]; `prompt` as in `median`."""
        times = self.totals if prompt else self.after_first
        middle = np.median(times)
        return float(np.median(np.abs(times - middle)) / middle) if middle > 0 else 0.0

    @cached_property
    def median_repeat(self) -> int:
        """Row of the median repeat among those that are used; for an even number, of the shorter middle one."""
        order = np.argsort(self.after_first, kind="stable")
        return int(np.flatnonzero(self.used_repeats)[order[(len(order) - 1) // 2]])

    def spans(self, row: int) -> list[Span]:
        """Time spans of a repeat, from its start [s]; empty for runs on one unit."""
        return [Span(**each) for each in self.rows["spans"][row].to_list()]

    def main_process_seconds(self) -> dict[str, float]:
        """Time of the main process by kind of span [s], median of the repeats that are used.

        See `model.logs.spans.main_process_seconds`.
        """
        repeats = [spans.main_process_seconds(self.spans(row)) for row in np.flatnonzero(self.used_repeats).tolist()]
        names = dict.fromkeys(name for each in repeats for name in each)
        return {name: float(np.median([each.get(name, 0.0) for each in repeats])) for name in names}

    def column_median(self, name: str, index: int | None = None) -> float:
        """Median of column `name` [s]: `read_s`, or `pass_s` of the role with this index."""
        values = [each if index is None else each[index] for each in self.rows[name].to_list()]
        return float(np.median(np.array(values)[self.used_repeats]))


def _check_rows(table: pl.DataFrame, log: ReadLog) -> None:
    """Raise `ParameterError` for impossible measurements, with row (counted from 1) and column."""
    typed_values.check_columns(table, _COLUMNS)
    every = np.arange(table.height)
    whole = {name: table[name].to_numpy() for name in ("decoding", "repeat", "run_order", "units")}
    seconds = table["seconds"].to_numpy().astype(np.float64)

    def refuse(name: str, bad: NDArray[np.bool_], values: NDArray[Any], bound: str, rows: NDArray[np.int64] = every) -> None:
        if bad.any():
            first = int(np.argmax(bad))
            raise ParameterError(f"row {rows[first] + 1}, column {name}: must be {bound}, got {checks.shown(values[first])}")

    decodings = len(log.decodings)
    refuse("decoding", (whole["decoding"] < 0) | (whole["decoding"] >= decodings), whole["decoding"], f"0 to {decodings - 1}")
    for name, least in (("repeat", 0), ("run_order", 0), ("units", 1)):
        refuse(name, whole[name] < least, whole[name], f"at least {least}")
    refuse("seconds", ~(np.isfinite(seconds) & (seconds > 0)), seconds, "above 0")
    for name, high in (("read_s", math.inf), ("waited", 1.0), ("load", math.inf)):
        values = table[name].to_numpy().astype(np.float64)
        unknown = np.isnan(values) & (name == "load")  # not available on every system
        bad = ~((np.isfinite(values) & (values >= 0) & (values <= high)) | unknown)
        refuse(name, bad, values, "at least 0" if high == math.inf else f"between 0 and {high:g}")
    _refuse_doubled(whole)

    def flat(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """All elements of a column of lists, their rows, and the number of elements per row."""
        sizes = table[name].list.len().to_numpy().astype(np.int64)
        values = np.array([each for row in table[name].to_list() for each in row], dtype=np.float64)
        return values, np.repeat(every, sizes), sizes

    late = seconds + np.maximum(LATE_S, LATE * seconds)
    passes, rows, sizes = flat("pass_s")
    refuse("pass_s", sizes != len(ROLES), sizes, f"{len(ROLES)} numbers, one for each of {', '.join(ROLES)}")
    refuse("pass_s", ~(np.isfinite(passes) & (passes >= 0)), passes, "at least 0", rows)
    parts = passes.reshape(-1, len(ROLES)).sum(axis=1) + table["read_s"].to_numpy()
    over = (whole["units"] == 1) & (parts > late)  # several units make passes at once
    refuse("pass_s", over, parts, "with read_s at most the run's seconds")
    commits, rows, sizes = flat("commit_s")
    made = np.array([len(log.decodings[number].commits) for number in whole["decoding"]])
    refuse("decoding", made == 0, whole["decoding"], "one with at least one commit")
    refuse("commit_s", sizes != made, sizes, "as many times as the decoding has commits")
    refuse("commit_s", ~(np.isfinite(commits) & (commits >= 0)), commits, "at least 0", rows)
    fell = np.append(False, (np.diff(commits) < 0) & (np.diff(rows) == 0))
    refuse("commit_s", fell, commits, "no earlier than the commit before it", rows)
    refuse("seconds", late < _last(commits, sizes), seconds, "no less than its last commit in commit_s")
    first = commits[np.cumsum(sizes) - sizes]
    refuse("seconds", (sizes > 1) & (seconds <= first), seconds, "more than its first commit in commit_s")
    _check_spans(table, late, whole["units"])


def _last(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """Last element of each list of these sizes, which are above 0."""
    return np.asarray(values[np.cumsum(sizes) - 1])


def _refuse_doubled(whole: Mapping[str, NDArray[Any]]) -> None:
    """Raise `ParameterError` for duplicate repeats, and for decodings with several numbers of units."""
    seen: dict[tuple[int, int], int] = {}
    units: dict[int, tuple[int, int]] = {}
    for row, (decoding, repeat, held) in enumerate(zip(whole["decoding"], whole["repeat"], whole["units"], strict=True), 1):
        before = seen.setdefault((int(decoding), int(repeat)), row)
        if before != row:
            what = f"decoding {decoding} was timed for repeat {repeat} in row {before} already"
            raise ParameterError(f"row {row}, column repeat: {what}; remove duplicate rows")
        first, where = units.setdefault(int(decoding), (int(held), row))
        if first != held:
            raise ParameterError(f"row {row}, column units: must be {first}, as decoding {decoding} had in row {where}, got {held}")


def _check_spans(table: pl.DataFrame, late: NDArray[np.float64], units: NDArray[Any]) -> None:
    """Raise `ParameterError` for a span outside its run, with its end before its start, or on a unit that the run lacks."""
    held = table["spans"].list.len().to_numpy()
    if not held.any():
        return
    spans = table["spans"].explode().drop_nulls().struct.unnest()
    try:
        typed_values.check_columns(spans, _SPAN)
    except ParameterError as error:
        raise ParameterError(f"spans: {error}") from None
    rows = np.repeat(np.arange(table.height), held)
    start, end, unit = (spans[name].to_numpy() for name in ("start", "end", "unit"))
    good = np.isfinite(start) & np.isfinite(end) & (start >= 0) & (end >= start) & (end <= late[rows])
    for bad, what in (
        (~good, "spans must begin at 0 or later, end no earlier than that, and within the run's seconds"),
        ((unit < -1) | (unit >= units[rows]), "spans must be on units that the run has (units)"),
    ):
        if bad.any():
            at = int(np.argmax(bad))
            span = f"unit {unit[at]} from {start[at]:g} to {end[at]:g} s"
            raise ParameterError(f"row {rows[at] + 1}, column spans: {what}, got {span}")


def save(runs: MeasuredRuns, where: str | Path) -> Path:
    """Write the four files and return the path of NAME.json, which is written last."""
    path = json_of(where)
    reads = read_log.save(runs.log, _reads_of(path))
    digest = hashlib.sha256(reads.read_bytes()).hexdigest()
    header = {
        "schema_version": VERSION, "about": dict(runs.about), "columns": dict(UNITS), "rows": runs.table.height,
        "reads_sha256": digest,
    }  # fmt: skip
    return json_and_parquet.save(path, header, runs.table.select(*UNITS))


def load(where: str | Path) -> MeasuredRuns:
    """Load measured runs from NAME.json. Nothing is imported: methods are only named, and must be known or allowed."""
    path = json_of(where)
    try:
        header, table = json_and_parquet.load(
            path, _KEYS, "a file of measured runs", VERSION, "measure them again with `calibrate run`"
        )
        typed_values.check(header, _RunsHeader, "")
        if header["columns"] != dict(UNITS) or [*table.columns] != [*UNITS] or table.height != header["rows"]:
            raise ParameterError(f"columns must be {', '.join(UNITS)}, with {header['rows']} rows; measure them again")
        reads = _reads_of(path)
        try:
            content = bounded_files.read_bytes(reads)
        except OSError:
            raise ParameterError(f"its read log {reads.name} is missing from the same folder") from None
        if hashlib.sha256(content).hexdigest() != header["reads_sha256"]:
            raise ParameterError(f"its read log {reads.name} is not the one that it was written with; restore both")
        runs = MeasuredRuns(read_log.load(reads), table, header["about"])
        for number, each in enumerate(runs.log.decodings):
            try:
                replay.parameters_of(each)
            except ParameterError as error:
                raise ParameterError(f"decoding {number}: {error}") from None
        return runs
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def json_of(where: str | Path) -> Path:
    """Path of NAME.json, checked."""
    path = Path(where)
    if path.suffix != ".json" or not path.stem or path.name.endswith(".reads.json"):
        raise ParameterError(f"measured runs must be named NAME.json, got {checks.shown(path.name)}; tables go to the same folder")
    return path


def _reads_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.reads.json")
