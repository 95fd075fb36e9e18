"""Measured runs: wall times of real decoding, repeat by repeat, with all that was read in it: what a prediction is held against.

Four files: NAME.json says what ran on what, NAME.parquet holds a row for each timed run, and NAME.reads.json with
NAME.reads.parquet is the decision log of the decodings (`model.logs.read_log`), from which any of them can be played again.

==========  ===========================================================================================================
column      what it holds
==========  ===========================================================================================================
decoding    which decoding of the log, from 0: a method, its settings and a prompt
repeat      how often it had been timed before
run_order   the place of the run among all: repeats are interleaved, so that whatever drifts drifts for all
units       units that made its passes: processes of the system, or streams of one GPU, as `unit_kind` of the JSON says
seconds     from the first step to the last token [s]
commit_s    when each commit was made, from the start [s]; the first comes behind the prompt
pass_s      of that in passes, by role in `roles` of the JSON [s]
read_s      in looking at what passes have made, heads included [s]
waited      share of the time for which the process was not running: others were [-]
load        processes that wanted to run in the last minute
spans       what happened when, of runs over several units (`model.logs.spans`), in seconds from the start
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
from model.logs.read_log import DecisionLog
from model.logs.recorded_decoding import Decoding
from model.logs.spans import KEPT, Span

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
"""What units are: processes of the system with replicas of the model, or streams of the GPU that has the model."""
MODES = ("eager", "cuda-graph")
"""How passes were made: kernels launched one by one, or as one graph. Runs that do not say so are of the first."""
_KEYS = ("about", "columns", "rows", "reads_sha256")
LATE_S, LATE = 1e-3, 0.01
"""How far a part of a run may lie beyond its end [s], and relative to it [-]: two clocks that are read one after the other. Of runs
over processes, whose answers come in a queue, 0.14 ms were seen."""


class RunsDescription(TypedDict):
    """What a file of measured runs says of all of them."""

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
    **dict.fromkeys(KEPT, int), **dict.fromkeys(("start", "end"), float), **dict.fromkeys(("what", "fate", "role"), str),
}  # fmt: skip
FEWEST = 3
"""Repeats below which nobody can say how far off a median is."""
BUSY = 0.1
"""Share of its time that a run may have waited for others before it counts as disturbed [-]: assumed."""


@dataclass(frozen=True, eq=False)
class MeasuredRuns:
    """Timed decodings.

    Parameters
    ----------
    log
        Each decoding once: a method, its settings, a prompt, what was put out and what was read.
    table
        A row for each timed run (columns above).
    about
        The device, its facts and libraries, the shapes of the models by role, how warm they were, and whether outcomes were forced;
        and what units were of each decoding (`unit_kind`), which are processes where nothing is said; how passes were made
        (`mode`).
    """

    log: DecisionLog
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
        """How passes were made, one of `MODES`."""
        return str(self.about.get("mode", MODES[0]))

    @property
    def _unit_kinds(self) -> list[str]:
        found: list[str] = self.about.get("unit_kind", [UNIT_KINDS[0]] * len(self.log.decodings))
        return found

    @cached_property
    def timed(self) -> dict[int, TimedDecoding]:
        """What was measured of each decoding that was timed."""
        found = {}
        for number in sorted(set(self.table["decoding"])):
            rows = self.table.filter(self.table["decoding"] == number).sort("repeat")
            found[int(number)] = TimedDecoding(self.log.decodings[number], rows, self._unit_kinds[number])
        return found

    @property
    def warnings(self) -> tuple[str, ...]:
        """What makes all of these times doubtful."""
        found = []
        if not self.about["warm_ups"]:
            found.append("no warm-up: first runs take longer")
        if (fewest := min(each.repeats for each in self.timed.values())) < FEWEST:
            found.append(f"{fewest} repeats, fewer than {FEWEST}: nobody knows the noise")
        disturbed = float((self.table["waited"].to_numpy() > BUSY).mean())
        if disturbed > 0.5:
            found.append(f"heavy load: {disturbed:.0%} of the runs waited for more than {BUSY:.0%} of their time")
        return tuple(found)


@dataclass(frozen=True, eq=False)
class TimedDecoding:
    """All repeats of one decoding."""

    decoding: Decoding
    rows: pl.DataFrame
    unit_kind: str = UNIT_KINDS[0]
    """What units were, where there were several."""

    @property
    def repeats(self) -> int:
        """How often it was timed."""
        return self.rows.height

    @property
    def units(self) -> int:
        """Units that made its passes."""
        return int(self.rows["units"][0])

    @cached_property
    def kept(self) -> NDArray[np.bool_]:
        """Repeats that count, shape (repeats,): those that nothing disturbed, if there are enough, or else all."""
        calm = np.asarray(self.rows["waited"].to_numpy() <= BUSY)
        return calm if calm.sum() >= FEWEST else np.ones_like(calm)

    @property
    def disturbed(self) -> bool:
        """Whether too few repeats went undisturbed, so that all count."""
        return bool((self.rows["waited"].to_numpy()[self.kept] > BUSY).any())

    @cached_property
    def totals(self) -> NDArray[np.float64]:
        """From the first step to the last token, of the repeats that count [s]."""
        return np.asarray(self.rows["seconds"].to_numpy()[self.kept], dtype=np.float64)

    @cached_property
    def after_first(self) -> NDArray[np.float64]:
        """From the first commit to the last token, of the repeats that count [s]: what comes before has read the prompt."""
        first = np.array([each[0] for each in self.rows["commit_s"].to_list()])[self.kept]
        return np.asarray(self.totals - first)

    def median(self, *, prompt: bool = False) -> float:
        """The middle repeat, with the time until the first commit or without [s]."""
        return float(np.median(self.totals if prompt else self.after_first))

    def noise(self, *, prompt: bool = False) -> float:
        """How far a repeat is from the middle one, in the median, relative to it [-].

        Behind the first commit as `median` is, or from the start on.
        """
        times = self.totals if prompt else self.after_first
        middle = np.median(times)
        return float(np.median(np.abs(times - middle)) / middle) if middle > 0 else 0.0

    @cached_property
    def middle(self) -> int:
        """The row of the repeat in the middle, of those that count; of two middle ones the shorter."""
        order = np.argsort(self.after_first, kind="stable")
        return int(np.flatnonzero(self.kept)[order[(len(order) - 1) // 2]])

    def spans(self, row: int) -> list[Span]:
        """What happened when in a repeat, from its start [s]; nothing of runs on one unit."""
        return [Span(**each) for each in self.rows["spans"][row].to_list()]

    def of_main(self) -> dict[str, float]:
        """What the main process of several did, and how long [s]: the middle of the repeats that count
        (`model.logs.spans.of_main`)."""
        repeats = [spans.of_main(self.spans(row)) for row in np.flatnonzero(self.kept).tolist()]
        names = dict.fromkeys(name for each in repeats for name in each)
        return {name: float(np.median([each.get(name, 0.0) for each in repeats])) for name in names}

    def part(self, name: str, index: int | None = None) -> float:
        """The middle of `pass_s`, of one role by its index, or of `read_s` [s]."""
        values = [each if index is None else each[index] for each in self.rows[name].to_list()]
        return float(np.median(np.array(values)[self.kept]))


def _check_rows(table: pl.DataFrame, log: DecisionLog) -> None:
    """Refuse measurements that cannot be, by their row, counted from 1, and their column."""
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
        unknown = np.isnan(values) & (name == "load")  # not every system says it
        bad = ~((np.isfinite(values) & (values >= 0) & (values <= high)) | unknown)
        refuse(name, bad, values, "at least 0" if high == math.inf else f"between 0 and {high:g}")
    _refuse_doubled(whole)

    def flat(name: str) -> tuple[NDArray[np.float64], NDArray[np.int64], NDArray[np.int64]]:
        """All elements of a column of lists, the row of each, and how many each row has."""
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
    refuse("decoding", made == 0, whole["decoding"], "one that has put something out")
    refuse("commit_s", sizes != made, sizes, "as many times as the decoding has commits")
    refuse("commit_s", ~(np.isfinite(commits) & (commits >= 0)), commits, "at least 0", rows)
    fell = np.append(False, (np.diff(commits) < 0) & (np.diff(rows) == 0))
    refuse("commit_s", fell, commits, "no earlier than the commit before it", rows)
    refuse("seconds", late < _last(commits, sizes), seconds, "no less than its last commit in commit_s")
    first = commits[np.cumsum(sizes) - sizes]
    refuse("seconds", (sizes > 1) & (seconds <= first), seconds, "more than its first commit in commit_s")
    _check_spans(table, late, whole["units"])


def _last(values: NDArray[np.float64], sizes: NDArray[np.int64]) -> NDArray[np.float64]:
    """The last element of each list of these sizes, none of which is empty."""
    return np.asarray(values[np.cumsum(sizes) - 1])


def _refuse_doubled(whole: Mapping[str, NDArray[Any]]) -> None:
    """Refuse a repeat that is there twice, and a decoding over several numbers of units."""
    seen: dict[tuple[int, int], int] = {}
    units: dict[int, tuple[int, int]] = {}
    for row, (decoding, repeat, held) in enumerate(zip(whole["decoding"], whole["repeat"], whole["units"], strict=True), 1):
        before = seen.setdefault((int(decoding), int(repeat)), row)
        if before != row:
            what = f"decoding {decoding} was timed for repeat {repeat} in row {before} already"
            raise ParameterError(f"row {row}, column repeat: {what}; remove the rows that are there twice")
        there, where = units.setdefault(int(decoding), (int(held), row))
        if there != held:
            raise ParameterError(f"row {row}, column units: must be {there}, as decoding {decoding} had in row {where}, got {held}")


def _check_spans(table: pl.DataFrame, late: NDArray[np.float64], units: NDArray[Any]) -> None:
    """Refuse what is said to have happened before a run, after it, backwards, or on a unit that it did not have."""
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
            said = f"unit {unit[at]} from {start[at]:g} to {end[at]:g} s"
            raise ParameterError(f"row {rows[at] + 1}, column spans: {what}, got {said}")


def save(runs: MeasuredRuns, where: str | Path) -> Path:
    """Write the four files; the path of NAME.json, which is written last."""
    path = json_of(where)
    reads = read_log.save(runs.log, _reads_of(path))
    digest = hashlib.sha256(reads.read_bytes()).hexdigest()
    said = {
        "schema_version": VERSION, "about": dict(runs.about), "columns": dict(UNITS), "rows": runs.table.height,
        "reads_sha256": digest,
    }  # fmt: skip
    return json_and_parquet.save(path, said, runs.table.select(*UNITS))


def load(where: str | Path) -> MeasuredRuns:
    """Measured runs by their NAME.json. They import nothing: methods are only named, and must be known or allowed here."""
    path = json_of(where)
    try:
        said, table = json_and_parquet.load(
            path, _KEYS, "a file of measured runs", VERSION, "measure them again with `calibrate run`"
        )
        typed_values.check(said, _RunsHeader, "")
        if said["columns"] != dict(UNITS) or [*table.columns] != [*UNITS] or table.height != said["rows"]:
            raise ParameterError(f"columns must be {', '.join(UNITS)}, with {said['rows']} rows; measure them again")
        reads = _reads_of(path)
        try:
            content = bounded_files.read_bytes(reads)
        except OSError:
            raise ParameterError(f"its read log {reads.name} is missing from the same folder") from None
        if hashlib.sha256(content).hexdigest() != said["reads_sha256"]:
            raise ParameterError(f"its read log {reads.name} is not the one that it was written with; restore both")
        found = MeasuredRuns(read_log.load(reads), table, said["about"])
        for number, each in enumerate(found.log.decodings):
            try:
                replay.parameters_of(each)
            except ParameterError as error:
                raise ParameterError(f"decoding {number}: {error}") from None
        return found
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def json_of(where: str | Path) -> Path:
    """The path of NAME.json, checked."""
    path = Path(where)
    if path.suffix != ".json" or not path.stem or path.name.endswith(".reads.json"):
        raise ParameterError(f"measured runs must be named NAME.json, got {checks.shown(path.name)}; tables are put beside it")
    return path


def _reads_of(path: Path) -> Path:
    return path.with_name(f"{path.stem}.reads.json")
