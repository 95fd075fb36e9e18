"""Timing passes of real models: every layer, the head, the embedding and the whole, over a grid of widths, contexts and batches.

Each repeat is a pair: the pass as it is, which gives the whole, and the same pass with its parts marked. Marks cost time between
the parts and not in them, so the whole is never taken from a marked pass. What a pass takes besides its parts is what remains.
"""

from __future__ import annotations

import gc
import json
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from model import checks
from model.checks import ParameterError

if TYPE_CHECKING:
    from calibrate import adapter
    from calibrate.companions import Companions, Spec

MOST_POINTS = 100_000
WAITED = 0.02
"""Share of a stretch that a thread may not have run before it counts as interrupted [-]."""


class Clock(Protocol):
    """Times a stretch of work, and the parts that are marked in it."""

    def start(self) -> None:
        """Begin the stretch, with nothing left to do on the device."""

    def stop(self) -> float:
        """End it, with everything done; its length [s]."""

    def mark(self, name: str, index: int, edge: int) -> None:
        """Note that a part begins (edge 0) or ends (1)."""

    def span(self, name: str, index: int) -> float:
        """Length of a marked part [s]; to be asked once the stretch has ended."""

    def disturbed(self) -> bool:
        """Whether the last stretch was interrupted: its length then says something about the machine's other work."""


class HostClock:
    """The processor's own clock, for work on the processor.

    Work of a single thread was interrupted where the thread did not run for a part of the time that passed.
    """

    def __init__(self, single: bool = False) -> None:
        self.single = single
        self.at: dict[tuple[str, int, int], float] = {}
        self.begun = self.worked = 0.0
        self.waited = 0.0

    def start(self) -> None:
        """See `Clock`."""
        self.worked = time.thread_time()
        self.begun = time.perf_counter()

    def stop(self) -> float:
        """See `Clock`."""
        passed = time.perf_counter() - self.begun
        self.waited = 1 - (time.thread_time() - self.worked) / passed
        return passed

    def disturbed(self) -> bool:
        """See `Clock`."""
        return self.single and self.waited > WAITED

    def mark(self, name: str, index: int, edge: int) -> None:
        """See `Clock`."""
        self.at[name, index, edge] = time.perf_counter()

    def span(self, name: str, index: int) -> float:
        """See `Clock`."""
        return self.at[name, index, 1] - self.at[name, index, 0]


class DeviceClock:
    """Events on a GPU's own time line: all are recorded on the way and read after one synchronisation at the end."""

    def __init__(self, device: str, graph: bool = False) -> None:
        self.device, self.graph = device, graph
        self.at: dict[tuple[str, int, int], Any] = {}
        self.ends = (self._event(False), self._event(False))

    def _event(self, external: bool) -> Any:
        import torch

        event: Any = torch.cuda.Event
        try:
            return event(enable_timing=True, external=True) if external else event(enable_timing=True)
        except TypeError:
            raise RuntimeError(f"torch {torch.__version__} cannot time inside graphs; take a newer one, or mode eager") from None

    def start(self) -> None:
        """See `Clock`."""
        import torch

        torch.cuda.synchronize(self.device)
        self.ends[0].record()

    def stop(self) -> float:
        """See `Clock`."""
        import torch

        self.ends[1].record()
        torch.cuda.synchronize(self.device)
        return float(self.ends[0].elapsed_time(self.ends[1])) / 1e3

    def mark(self, name: str, index: int, edge: int) -> None:
        """See `Clock`. Events are made once and recorded again: making them takes longer than a small kernel."""
        key = (name, index, edge)
        if key not in self.at:
            self.at[key] = self._event(self.graph)
        self.at[key].record()

    def disturbed(self) -> bool:
        """See `Clock`: a GPU is not taken away in the middle of a kernel."""
        return False

    def span(self, name: str, index: int) -> float:
        """See `Clock`."""
        return float(self.at[name, index, 0].elapsed_time(self.at[name, index, 1])) / 1e3


def clock_of(device: str, mode: str = "eager") -> Clock:
    """The clock that suits a device; in graphs its marks are events that graphs record."""
    import torch

    return DeviceClock(device, mode == "cuda-graph") if device.startswith("cuda") else HostClock(torch.get_num_threads() == 1)


@dataclass(frozen=True)
class Point:
    """One pass to be timed: `width` tokens of `batch` texts behind `context`, with `busy` other processes at the same work."""

    mode: str
    width: int
    context: int
    batch: int
    busy: int
    round: int = 0

    def __str__(self) -> str:
        """As messages name it."""
        among = f" busy {self.busy}" if self.busy else ""
        return f"{self.mode} width {self.width} context {self.context} batch {self.batch}{among}"


@dataclass(frozen=True)
class Grid:
    """All passes that are to be timed, each in so many rounds: a round goes over the whole grid, so that a disturbance of some
    seconds spoils one round of a point and not the point.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    busy: tuple[int, ...] = (0,)
    modes: tuple[str, ...] = ("eager",)
    rounds: int = 1

    def __post_init__(self) -> None:
        from calibrate.adapter import MODES

        for name, least in (("widths", 1), ("contexts", 0), ("batches", 1), ("busy", 0)):
            values = getattr(self, name)
            if not values:
                raise ParameterError(f"{name} must be at least one number, got none")
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
        """In the order in which they are timed."""
        return [
            Point(mode, width, context, batch, busy, turn)
            for turn in range(self.rounds)
            for mode in self.modes
            for busy in self.busy
            for batch in self.batches
            for context in self.contexts
            for width in self.widths
        ]


@dataclass(frozen=True)
class Effort:
    """When a point has been timed well enough.

    Parameters
    ----------
    target
        Of (upper - lower quartile) / median / sqrt(repeats) of the whole pass: about the relative error of its median [-].
    least, most
        Repeats at least and at most.
    warmups
        Passes before that, which nobody times.
    """

    target: float = 0.005
    least: int = 10
    most: int = 1000
    warmups: int = 5

    def __post_init__(self) -> None:
        checks.number("target", self.target, 0)
        checks.whole("least", self.least, 1)
        checks.whole("most", self.most, self.least)
        checks.whole("warmups", self.warmups, 0)


def quartiles(seconds: Sequence[float]) -> list[float]:
    """Lower quartile, median and upper quartile [us], as raw rows hold them."""
    return [round(float(each) * 1e6, 3) for each in np.percentile(seconds, (25, 50, 75))]


def spread(seconds: Sequence[float]) -> float:
    """About the relative error of the median: interquartile range / median / sqrt(n).

    >>> spread([1.0, 1.0, 1.1, 1.1])
    0.0476...
    """
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle / math.sqrt(len(seconds)))


def measure(model: adapter.Model, point: Point, effort: Effort, until: float) -> dict[str, Any]:
    """Time one point until its spread is small enough, or until that moment of `time.monotonic`; a raw row.

    Repeats that were interrupted are left out as long as enough others come in time; the row counts those (`disturbed`), and those
    that had to be taken anyway.
    """
    import torch

    begun = time.monotonic()
    clock = clock_of(model.device, point.mode)
    clean: list[_Repeat] = []
    disturbed: list[_Repeat] = []
    with torch.inference_mode(), _undisturbed():
        work = model.begin(point.width, point.context, point.batch, point.mode)
        for _ in range(effort.warmups):
            work.run()
            work.back()
        work.run_watched(clock.mark)
        work.back()
        while True:
            clock.start()
            work.run()
            whole = clock.stop()
            interrupted = clock.disturbed()
            work.back()
            clock.start()
            work.run_watched(clock.mark)
            marked = clock.stop()
            interrupted |= clock.disturbed()
            work.back()
            repeat = _Repeat(whole, marked, {key: clock.span(*key) for key in work.parts})
            (disturbed if interrupted else clean).append(repeat)
            late = time.monotonic() >= until or len(clean) + len(disturbed) >= effort.most
            if len(clean) >= effort.least and (late or spread([each.whole for each in clean]) < effort.target):
                break
            if late and len(clean) + len(disturbed) >= effort.least:
                break
        work.check()
    anyway = max(effort.least - len(clean), 0)  # then the shortest of the others: what was least disturbed
    clean += sorted(disturbed, key=lambda each: each.whole)[:anyway]
    wholes = [each.whole for each in clean]
    parts = {key: [each.parts[key] for each in clean] for key in work.parts}
    called = _called(clean, parts) if ("call", 0) in parts else {}
    norm, head = parts.get(("norm", 0), [0.0] * len(clean)), parts["head", 0]
    return {
        "kind": "point", **asdict(point), "repeats": len(clean), "disturbed": len(disturbed) - anyway,
        "taken_anyway": anyway, "spread": round(spread(wholes), 5), "load": _load(),
        "whole_us": quartiles(wholes), "marked_us": quartiles([each.marked for each in clean]),
        "layers_us": [quartiles(times) for (name, _), times in parts.items() if name == "layer"],
        "head_us": quartiles([one + other for one, other in zip(norm, head, strict=True)]),
        "embedding_us": quartiles(parts["embedding", 0]), **called, "seconds": round(time.monotonic() - begun, 3),
    }  # fmt: skip


def _called(clean: Sequence[_Repeat], parts: dict[tuple[str, int], list[float]]) -> dict[str, list[float]]:
    """Of passes that mark their call: all layers together, what else it takes, and the look at the pass before, its head apart.

    Each is a difference within a repeat, so what disturbed the repeat is in none of them twice.
    """
    layers = np.sum([times for (name, _), times in parts.items() if name == "layer"], axis=0)
    call = np.asarray(parts["call", 0])
    rest = call - layers - np.asarray(parts["embedding", 0])
    look = np.asarray([each.marked for each in clean]) - call - np.asarray(parts["head", 0])
    return {name: quartiles(list(values)) for name, values in (("sum_us", layers), ("rest_us", rest), ("look_us", look))}


class _Repeat(NamedTuple):
    """Times of a pass as it is, of the same pass with marks, and of its parts [s]."""

    whole: float
    marked: float
    parts: dict[tuple[str, int], float]


def _load() -> float | None:
    """How many processes wanted to run in the last minute, this one and its companions too; None where nobody counts."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


class _undisturbed:  # noqa: N801, a context manager
    """Keep the garbage collector from running in the middle of a pass."""

    def __enter__(self) -> None:
        gc.collect()
        self.was = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was:
            gc.enable()


# --- raw rows ---


class Rows:
    """The raw file: JSON lines, the machine first, then each point as soon as it was timed."""

    def __init__(self, path: Path, header: dict[str, Any], resume: bool) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.header = header
        if path.exists():
            if not resume:
                raise ParameterError(f"{path} is there already; --resume goes on with it, another -o or --name begins anew")
            self.header, self.rows = read(path)
            for key in ("model", "device", "dtype", "source", "name", "threads", "torch", "transformers"):
                if self.header.get(key) != header.get(key):
                    was, now = self.header.get(key), header.get(key)
                    raise ParameterError(f"{path} was timed with {key} {was}, and this is {now}; begin anew with another -o")
            # Whatever was cut off in the middle of a line goes.
            lines = [json.dumps(row) for row in (self.header, *self.rows)]
            path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(header) + "\n", encoding="utf-8")

    def done(self) -> set[Point]:
        """Points that need not be timed again."""
        return {Point(**{name: row[name] for name in Point.__dataclass_fields__}) for row in self.rows if row["kind"] == "point"}

    def add(self, row: dict[str, Any]) -> None:
        """Append a row, so that it is there whatever happens next."""
        self.rows.append(row)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()


def read(path: str | Path) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and the rows of a raw file; a last line that was cut off is left out."""
    path = Path(path)
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"{path.name} cannot be read: {error}") from None
    rows = []
    for number, line in enumerate(lines, 1):
        try:
            row = json.loads(line)
            row["kind"]
        except (ValueError, KeyError, TypeError):
            if number == len(lines) and number > 1:
                break
            raise ParameterError(f"{path.name}, line {number}: it must be a raw row of `calibrate layers`") from None
        rows.append(row)
    if not rows or rows[0]["kind"] != "machine":
        raise ParameterError(f"{path.name}: its first line must say the machine; it is no file of `calibrate layers`")
    return rows[0], rows[1:]


# --- going over the grid ---


@dataclass(frozen=True)
class Outcome:
    """What came of a grid: rows, and the points that have none, with why."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]
    failed: list[tuple[Point, str]]
    path: Path


def go_over(
    model: adapter.Model,
    grid: Grid,
    rows: Rows,
    spec: Spec,
    *,
    effort: Effort,
    minutes: float,
    progress: Callable[[int, int, str], None] | None = None,
) -> Outcome:
    """Time what has not been timed yet, sharing the minutes out; whatever fails is kept account of and the rest goes on.

    A device that is lost ends it: every later point would fail with it, one by one.
    """
    done = rows.done()
    todo = [point for point in grid.points() if point not in done]
    failed: list[tuple[Point, str]] = []
    end = time.monotonic() + 60 * minutes
    lost = ""
    with _Crowd(spec) as crowd:
        for number, point in enumerate(todo):
            if progress is not None:
                progress(number, len(todo), str(point))
            now = time.monotonic()
            if lost or now >= end:
                failed.append((point, lost or "the minutes were spent before it; --resume with more of them"))
                continue
            until = now + (end - now) / (len(todo) - number)
            try:
                row = crowd.measure(model, point, effort, until)
            except ParameterError as error:
                failed.append((point, str(error)))
            except (RuntimeError, MemoryError) as error:
                reason, is_lost = _told(error)
                failed.append((point, reason))
                lost = f"the device was lost before it: {reason}" if is_lost else ""
                _release(model.device)
            else:
                rows.add(row)
                continue
            rows.add({"kind": "failed", **asdict(point), "error": failed[-1][1]})
    if progress is not None:
        progress(len(todo), len(todo), "")
    return Outcome(rows.header, rows.rows, failed, rows.path)


class _Crowd:
    """Companions, as many as a point asks for; started when the first one asks, ended when another number is asked for."""

    def __init__(self, spec: Spec) -> None:
        self.spec = spec
        self.count = 0
        self.companions: Companions | None = None

    def __enter__(self) -> _Crowd:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        if self.companions is not None:
            self.companions.close()
        self.companions, self.count = None, 0

    def measure(self, model: adapter.Model, point: Point, effort: Effort, until: float) -> dict[str, Any]:
        """Time a point among as many busy processes as it says."""
        if not point.busy:
            return measure(model, point, effort, until)
        from calibrate.companions import Companions

        if self.count != point.busy:
            self._end()
            self.companions = Companions(point.busy, self.spec)
            self.count = point.busy
        assert self.companions is not None
        try:
            with self.companions.at(point.width, point.context, point.batch, point.mode) as passes:
                row = measure(model, point, effort, until)
        except RuntimeError:
            self._end()  # whatever state they are in, the next point gets new ones
            raise
        return row | {"companion_passes": passes}


def _told(error: BaseException) -> tuple[str, bool]:
    """An error in a line, and whether the device is gone with it."""
    import torch

    line = (str(error).splitlines() or [""])[0][:200]
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in line:
        return f"out of memory: {line}", False
    lost = isinstance(error, getattr(torch, "AcceleratorError", ())) or "CUDA error" in line
    return f"{type(error).__name__}: {line}", lost


def _release(device: str) -> None:
    """Give memory of a failed point back, where the device still answers."""
    import contextlib

    import torch

    gc.collect()
    if device.startswith("cuda"):
        with contextlib.suppress(RuntimeError):
            torch.cuda.empty_cache()


def shares(rows: Sequence[dict[str, Any]], mode: str) -> Iterator[tuple[tuple[int, int, int, int], list[dict[str, Any]]]]:
    """The rows of a mode by point (busy, batch, context, width), the rounds of each together, in order."""
    points: dict[tuple[int, int, int, int], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] == "point" and row["mode"] == mode:
            points.setdefault((row["busy"], row["batch"], row["context"], row["width"]), []).append(row)
    yield from sorted(points.items())
