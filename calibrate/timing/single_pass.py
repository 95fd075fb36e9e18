"""Time one pass of a real model: every layer, the head, the embedding and the whole.

Each repeat is a pair: the plain pass gives the time of the whole, and the same pass with marks gives the times of its parts. Marks
cost time between the parts, so the whole is never taken from a marked pass. The overhead is the whole minus its parts.
"""

from __future__ import annotations

import gc
import math
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from calibrate.devices.clocks import clock_of
from model.base import checks

if TYPE_CHECKING:
    from calibrate.timing.library_pass import LibraryModel, Repeatable

MODES = ("eager", "cuda-graph", "interpreter")
"""Kernels launched one by one by the library's code, or as one CUDA graph, or as decoding with this project's interpreter does."""


@dataclass(frozen=True)
class Point:
    """One pass to time: `width` tokens of each of `batch` sequences after `context` positions, with `busy` other busy processes."""

    mode: str
    width: int
    context: int
    batch: int
    busy: int
    round: int = 0

    def __str__(self) -> str:
        """Return the name that messages use."""
        among = f" busy {self.busy}" if self.busy else ""
        return f"{self.mode} width {self.width} context {self.context} batch {self.batch}{among}"


@dataclass(frozen=True)
class Effort:
    """Stopping rule of a measurement.

    Parameters
    ----------
    target
        Bound on (upper - lower quartile) / median / sqrt(repeats) of the whole pass: about the relative error of its median [-].
    least, most
        Minimum and maximum number of repeats.
    warmups
        Untimed passes before the repeats.
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
    """Return the lower quartile, median and upper quartile [us], as raw rows hold them."""
    return [round(float(each) * 1e6, 3) for each in np.percentile(seconds, (25, 50, 75))]


def means(seconds: Sequence[float]) -> list[float]:
    """Return the lower quartile, mean and upper quartile [us], for times that are added up."""
    low, _, high = quartiles(seconds)
    return [low, round(1e6 * float(np.mean(seconds)), 3), high]


def table_times(rounds: list[list[float]], repeats: int) -> dict[str, Any]:
    """Return the time columns of a profile's table [s]: medians over rounds of lower quartile, middle and upper quartile [us]."""
    low, middle, high = (float(each) / 1e6 for each in np.median(rounds, axis=0))
    return {"time_s": middle, "low_s": min(low, middle), "high_s": max(high, middle), "repeats": repeats}


def spread(seconds: Sequence[float]) -> float:
    """Return about the relative error of the median: interquartile range / median / sqrt(n).

    >>> spread([1.0, 1.0, 1.1, 1.1])
    0.0476...
    """
    low, middle, high = np.percentile(seconds, (25, 50, 75))
    return float((high - low) / middle / math.sqrt(len(seconds)))


def prepare(model: LibraryModel, width: int, context: int, batch: int, mode: str = "eager") -> Repeatable:
    """Return a repeatable pass over `width` tokens of each of `batch` sequences after `context` cached positions."""
    from calibrate.timing import library_pass

    model.architecture.check_positions(width, context)
    if mode == "interpreter":
        from calibrate.timing.interpreter_pass import InterpretedPass

        return InterpretedPass(model, width, context, batch)
    return (library_pass.GraphPass if mode == "cuda-graph" else library_pass.EagerPass)(model, width, context, batch)


def measure(model: LibraryModel, point: Point, effort: Effort, until: float) -> dict[str, Any]:
    """Time one point until its spread is small enough, or until `until` [s of `time.monotonic`]; return its raw row.

    Interrupted repeats are left out if there are enough others. The row counts them (`disturbed`), and those that were used because
    there were too few others (`taken_anyway`).

    Times are medians and quartiles. Passes of the interpreter get means instead: they are compared with runs of many passes, whose
    times add up.
    """
    import torch

    begun = time.monotonic()
    clock = clock_of(model.device, point.mode)
    clean: list[_Repeat] = []
    disturbed: list[_Repeat] = []
    with torch.inference_mode(), _undisturbed():
        work = prepare(model, point.width, point.context, point.batch, point.mode)
        for _ in range(effort.warmups):
            work.run()
            work.roll_back()
        work.run_marked(clock.mark)
        work.roll_back()
        while True:
            clock.start()
            work.run()
            whole = clock.stop()
            interrupted = clock.disturbed()
            work.roll_back()
            clock.start()
            work.run_marked(clock.mark)
            marked = clock.stop()
            interrupted |= clock.disturbed()
            work.roll_back()
            repeat = _Repeat(whole, marked, {key: clock.span(*key) for key in work.parts})
            (disturbed if interrupted else clean).append(repeat)
            late = time.monotonic() >= until or len(clean) + len(disturbed) >= effort.most
            if len(clean) >= effort.least and (late or spread([each.whole for each in clean]) < effort.target):
                break
            if late and len(clean) + len(disturbed) >= effort.least:
                break
        work.check()
    anyway = max(effort.least - len(clean), 0)  # too few clean repeats: add the shortest of the others
    clean += sorted(disturbed, key=lambda each: each.whole)[:anyway]
    wholes, about = [each.whole for each in clean], means if point.mode == "interpreter" else quartiles
    parts = {key: [each.parts[key] for each in clean] for key in work.parts}
    called = _called(clean, parts, about, model.decoder.layers) if ("call", 0) in parts else {}
    norm, head = parts.get(("norm", 0), [0.0] * len(clean)), parts["head", 0]
    return {
        "kind": "point", **asdict(point), "repeats": len(clean), "disturbed": len(disturbed) - anyway,
        "taken_anyway": anyway, "spread": round(spread(wholes), 5), "load": _load(),
        "whole_us": about(wholes), "marked_us": about([each.marked for each in clean]),
        "layers_us": [about(times) for (name, _), times in parts.items() if name == "layer"],
        "head_us": about([one + other for one, other in zip(norm, head, strict=True)]),
        "embedding_us": about(parts["embedding", 0]), **called, "seconds": round(time.monotonic() - begun, 3),
    }  # fmt: skip


def _called(
    clean: Sequence[_Repeat], parts: dict[tuple[str, int], list[float]], about: Callable[[Sequence[float]], list[float]], depth: int
) -> dict[str, list[float]]:
    """Return times of a pass that marks its call: all layers together, the rest of the call, and the first read without its head.

    Each is a difference within one repeat, so a disturbance counts once. Inside a CUDA graph nothing can be marked: there the time
    of all `depth` layers is extrapolated from the difference to a replay of fewer of them (`short`).
    """
    layers = np.sum([times for (name, _), times in parts.items() if name == "layer"], axis=0)
    call = np.asarray(parts["call", 0])
    for (name, few), times in parts.items():
        if name == "short":
            layers = (layers - np.asarray(times)) * depth / (depth - few)
    rest = call - layers - np.asarray(parts["embedding", 0])
    marked = np.asarray([each.marked for each in clean]) - np.asarray(parts.get(("aside", 0), 0.0))
    look = marked - call - np.asarray(parts["head", 0])
    return {name: about(list(values)) for name, values in (("sum_us", layers), ("rest_us", rest), ("first_read_us", look))}


class _Repeat(NamedTuple):
    """Times of a plain pass, of the same pass with marks, and of its parts [s]."""

    whole: float
    marked: float
    parts: dict[tuple[str, int], float]


def _load() -> float | None:
    """Return the load average of the last minute, this process and its companions included; None where the system has none."""
    try:
        return round(os.getloadavg()[0], 2)
    except (AttributeError, OSError):
        return None


class _undisturbed:  # noqa: N801, a context manager
    """Disable the garbage collector during a measurement."""

    def __enter__(self) -> None:
        gc.collect()
        self.was = gc.isenabled()
        gc.disable()

    def __exit__(self, *_: object) -> None:
        if self.was:
            gc.enable()
