"""Time passes over a grid of widths, contexts, batches and numbers of busy processes, and keep the raw rows."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from calibrate.devices.device_failures import failure_of
from calibrate.timing.single_pass import MODES, Effort, Point, measure
from model.base import bounded_files, checks, strict_json, typed_values
from model.base.checks import ParameterError

if TYPE_CHECKING:
    from calibrate.timing.busy_neighbours import Companions, Spec
    from calibrate.timing.library_pass import LibraryModel

MOST_POINTS = 100_000


@dataclass(frozen=True)
class TimingGrid:
    """All passes to time, in several rounds. A round covers the whole grid, so a disturbance of some seconds spoils one round of
    a point and not all its rounds.

    `widths` are tokens per sequence, `contexts` cached positions, `batches` sequences, `busy` other busy processes.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    busy: tuple[int, ...] = (0,)
    modes: tuple[str, ...] = ("eager",)
    rounds: int = 1

    def __post_init__(self) -> None:
        for name, least in (("widths", 1), ("contexts", 0), ("batches", 1), ("busy", 0)):
            values = getattr(self, name)
            if not isinstance(values, tuple | list):  # a plan's file may hold any value
                raise ParameterError(f"{name} must be a list of whole numbers, got {checks.shown(values)}")
            if not values:
                raise ParameterError(f"{name} must have at least one number, got none")
            for value in values:
                checks.whole(name, value, least, 1_000_000)
            if len(set(values)) != len(values):
                raise ParameterError(f"{name} must be different numbers, got {checks.shown(values)}")
        checks.whole("rounds", self.rounds, 1, 1000)
        if not self.modes:
            raise ParameterError("mode must be at least one, got none")
        for mode in self.modes:
            checks.one_of("mode", mode, MODES)
        if len(self.points()) > MOST_POINTS:
            raise ParameterError(f"the grid must have at most {MOST_POINTS} points, got {len(self.points())}")

    def points(self) -> list[Point]:
        """Return the points in the order in which they are timed."""
        return [
            Point(mode, width, context, batch, busy, turn)
            for turn in range(self.rounds)
            for mode in self.modes
            for busy in self.busy
            for batch in self.batches
            for context in self.contexts
            for width in self.widths
        ]


# --- raw rows ---


class RawTimings:
    """The raw file: JSON lines, the machine first, then each point as soon as it is timed."""

    def __init__(self, path: Path, header: dict[str, Any], resume: bool) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.header = header
        if path.exists():
            if not resume:
                raise ParameterError(f"{path} is there already; --resume continues it, another -o or --name starts a new file")
            self.header, self.rows = read(path)
            for key in ("model", "device", "dtype", "source", "name", "threads", "torch", "transformers", "passes"):
                if self.header.get(key) != header.get(key):
                    was, now = self.header.get(key), header.get(key)
                    raise ParameterError(f"{path} was timed with {key} {was}, and this is {now}; start again with another -o")
            # Rewriting the file drops a last line that was cut off.
            lines = [strict_json.dumps(row) for row in (self.header, *self.rows)]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            path.write_text(strict_json.dumps(header) + "\n", encoding="utf-8")

    def done(self) -> set[Point]:
        """Return the points that are timed already."""
        return {Point(**{name: row[name] for name in Point.__dataclass_fields__}) for row in self.rows if row["kind"] == "point"}

    def add(self, row: dict[str, Any]) -> None:
        """Append a row and flush it, so that it survives a crash."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(strict_json.dumps(row) + "\n")
            file.flush()


class _RawRow(TypedDict):
    kind: str


class _PointRow(TypedDict):
    """Required fields of a point's row. Times are the lower quartile, the middle and the upper quartile [us]."""

    mode: str
    width: int
    context: int
    batch: int
    busy: int
    round: int
    repeats: int
    whole_us: list[float]
    head_us: list[float]
    embedding_us: list[float]
    layers_us: NotRequired[list[list[float]]]
    sum_us: NotRequired[list[float]]


_KINDS: dict[str, Any] = {"point": _PointRow}


def read(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Return the machine and the rows of a raw file, without a last line that was cut off."""
    path = Path(path)
    try:
        lines = bounded_files.read_text(path).splitlines()
    except (OSError, ValueError) as error:
        raise ParameterError(f"{path.name} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = bounded_files.json_of(line)
            typed_values.check(row, _RawRow, "row")
            typed_values.check(row, _KINDS.get(row["kind"], _RawRow), "row")
        except ValueError as error:
            if number == len(lines) and number > 1:
                break
            why = f"it must be a raw row of `calibrate layers`: {error}"
            raise ParameterError(f"{path.name}, line {number}: {why}") from None
        rows.append(row)
    if not rows or rows[0]["kind"] != "machine":
        raise ParameterError(f"{path.name}: its first line must describe the machine; it is no file of `calibrate layers`")
    return rows[0], rows[1:]


# --- timing the grid ---


@dataclass(frozen=True)
class TimedGrid:
    """Result of timing a grid: the rows, and the points without a row, each with its error."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]
    failed: list[tuple[Point, str]]
    path: Path


def time_grid(
    model: LibraryModel,
    grid: TimingGrid,
    rows: RawTimings,
    spec: Spec,
    *,
    effort: Effort,
    minutes: float,
    progress: Callable[[int, int, str], None] | None = None,
    between: Callable[[], None] | None = None,
) -> TimedGrid:
    """Time the points that are not timed yet. Each gets an equal share of the remaining `minutes`; failed points are recorded.

    `between` is called after each timed point. Once the device is lost, the remaining points are not tried: all would fail.
    """
    done = rows.done()
    todo = [point for point in grid.points() if point not in done]
    failed: list[tuple[Point, str]] = []
    end = time.monotonic() + 60 * minutes
    lost = ""
    with _Neighbours(spec) as neighbours:
        for number, point in enumerate(todo):
            if progress is not None:
                progress(number, len(todo), str(point))
            now = time.monotonic()
            if lost or now >= end:
                failed.append((point, lost or "not reached within the minutes; --resume with more --minutes"))
                continue
            until = now + (end - now) / (len(todo) - number)
            try:
                row = neighbours.measure(model, point, effort, until)
            except ParameterError as error:
                failed.append((point, str(error)))
            except (RuntimeError, MemoryError) as error:
                failure = failure_of(error)
                failed.append((point, failure.line))
                lost = f"not reached, because the device was lost: {failure.line}" if failure.lost else ""
                release(model.device)
            else:
                rows.add(row)
                if between is not None:
                    between()
                continue
            rows.add({"kind": "failed", **asdict(point), "error": failed[-1][1]})
    if progress is not None:
        progress(len(todo), len(todo), "")
    return TimedGrid(rows.header, rows.rows, failed, rows.path)


class _Neighbours:
    """Busy neighbour processes. They start when a point first asks for some, and restart when the number changes."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.count = 0
        self.companions: Companions | None = None

    def __enter__(self) -> _Neighbours:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self.companions is not None:
            self.companions.close()
        self.companions, self.count = None, 0

    def measure(self, model: LibraryModel, point: Point, effort: Effort, until: float) -> dict[str, Any]:
        """Time a point while `point.busy` other processes run the same pass; return its raw row."""
        if not point.busy:
            return measure(model, point, effort, until)
        from calibrate.timing.busy_neighbours import Companions

        if self.count != point.busy:
            self._end()
            self.companions = Companions(point.busy, self.spec)
            self.count = point.busy
        assert self.companions is not None
        try:
            with self.companions.at(point.width, point.context, point.batch, point.mode) as passes:
                row = measure(model, point, effort, until)
        except RuntimeError:
            self._end()  # their state is unknown now: the next point gets new processes
            raise
        return row | {"companion_passes": passes}


def release(device: str) -> None:
    """Free the memory of a failed point, if the device still answers."""
    import contextlib

    import torch

    gc.collect()
    if device.startswith("cuda"):
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def shares(rows: Sequence[dict[str, Any]], mode: str) -> Iterator[tuple[tuple[int, int, int, int], list[dict[str, Any]]]]:
    """Yield the rows of a mode by point (busy, batch, context, width), sorted, all rounds of a point together."""
    points: dict[tuple[int, int, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "point" and row["mode"] == mode:
            points.setdefault((row["busy"], row["batch"], row["context"], row["width"]), []).append(row)
    yield from sorted(points.items())
