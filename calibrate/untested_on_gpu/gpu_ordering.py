"""The order of work of a parallel run's units: where each is a GPU, events say how far it has come.

A process launches work and goes on. Rows that another unit is to copy are there when its GPU has made them, not when its process
says so: the process notes which event stands behind them (`marks`), and whoever copies them has its own GPU wait for that event, no
process waiting for anything. Only what processes look at is waited for by them: passes that are over, and what they have made.

The events of a unit are a ring, made by the main process, and recorded again in their order. One that has been recorded anew
stands for later work, so to wait for it is to wait long enough; and as nobody's later work waits for work that is not launched
yet, nobody waits for himself.

On the processor what has been written is there, and all of this is nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from model.base.checks import ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RING = 64
"""Events of a unit: more than a pass has layers is not needed, as an older one is recorded anew."""
AHEAD = 2
"""Layers that a pass which may be stopped is launched ahead of its GPU: what is launched cannot be taken back."""
Handles = Sequence[tuple[str, Sequence[bytes]]]
"""Of each unit: its GPU, and what its events are known by in other processes."""


class GaveUp(Exception):  # noqa: N818  it is no error: the pass is stopped
    """Nobody wants this pass any more."""


class Order:
    """Of a unit on the processor: whatever is done is done."""

    def come_behind(self, source: int, low: int, high: int) -> None:
        """Have what is launched from here on come behind what another unit says that it has made of layers [low, high)."""

    def mark(self, low: int, high: int) -> None:
        """Note that rows of layers [low, high) are made by what is launched by now; before anybody is told that they are there."""

    def keep_up(self, stopped: Callable[[], bool] | None, meanwhile: Callable[[], None] | None) -> None:
        """Wait until no more is launched than can be wasted, where somebody may stop it; others may be seen to `meanwhile`."""

    def finish(self, stopped: Callable[[], bool] | None = None, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until all that was launched is done, unless it is stopped."""


class Events(Order):
    """Of a unit on a GPU.

    Parameters
    ----------
    number
        The unit.
    rings
        Of each unit its events.
    marks
        Shape (units, layers), shared by all processes: of the layers' rows, how many events of the unit had been recorded when they
        were launched.
    """

    def __init__(self, number: int, device: str, rings: Sequence[Sequence[Any]], marks: NDArray[np.int64]) -> None:
        self.number, self.rings, self.marks = number, rings, marks
        self.stream = cuda().current_stream(device)
        self.count = int(marks[number].max())
        self.known = [0] * len(rings)
        """Of each unit: the mark behind which this one's work already comes."""

    def come_behind(self, source: int, low: int, high: int) -> None:
        """See `Order`."""
        mark = int(self.marks[source, low:high].max())
        if mark > self.known[source]:
            self.stream.wait_event(self.rings[source][mark % RING])
            self.known[source] = mark

    def mark(self, low: int, high: int) -> None:
        """See `Order`."""
        self.count += 1
        self.rings[self.number][self.count % RING].record(self.stream)
        self.marks[self.number, low:high] = self.count

    def keep_up(self, stopped: Callable[[], bool] | None, meanwhile: Callable[[], None] | None) -> None:
        """See `Order`."""
        if self.count > AHEAD and (stopped is not None or meanwhile is not None):
            self._reach(self.count - AHEAD, stopped, meanwhile)

    def finish(self, stopped: Callable[[], bool] | None = None, meanwhile: Callable[[], None] | None = None) -> None:
        """See `Order`."""
        if stopped is None and meanwhile is None:
            self.stream.synchronize()
            return
        self.mark(0, 0)
        self._reach(self.count, stopped, meanwhile)

    def _reach(self, mark: int, stopped: Callable[[], bool] | None, meanwhile: Callable[[], None] | None) -> None:
        event = self.rings[self.number][mark % RING]
        while not event.query():
            if stopped is not None and stopped():
                raise GaveUp
            if meanwhile is not None:
                meanwhile()


def cuda() -> Any:
    """What makes streams and events."""
    import torch

    return torch.cuda


def made(devices: Sequence[str]) -> list[list[Any]]:
    """Events for units on these GPUs, which any process may record and wait for."""
    found = []
    for device in devices:
        with cuda().device(device):  # an event is of the GPU that is current when it is first asked for
            found.append([cuda().Event(interprocess=True) for _ in range(RING)])
            for event in found[-1]:
                event.ipc_handle()
    return found


def handles(devices: Sequence[str], rings: Sequence[Sequence[Any]]) -> Handles:
    """What other processes know these events by; of units on the processor there are none."""
    return [(device, [event.ipc_handle() for event in ring]) for device, ring in zip(devices, rings, strict=False)]


def opened(known: Handles) -> list[list[Any]]:
    """The events of another process."""
    import torch

    return [[cuda().Event.from_ipc_handle(torch.device(device), each) for each in ring] for device, ring in known]


def settle(devices: Sequence[str]) -> None:
    """Wait until these GPUs have done all that this process has given them."""
    for device in {*devices}:
        cuda().synchronize(device)


def of_units(device: str, units: int, named: Sequence[str] = ()) -> list[str]:
    """The GPU of each unit, the first of them being `device`: those named, or one each from there on.

    >>> of_units("cpu", 3)
    ['cpu', 'cpu', 'cpu']
    >>> of_units("cuda", 2, ["cuda:0", "cuda:0"])
    ['cuda:0', 'cuda:0']
    >>> of_units("cpu", 2, ["cuda:0", "cuda:1"])
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: gpus must begin with the device of the run, cpu, got cuda:0; leave them out, or name the same
    """
    if not named and not device.startswith("cuda"):
        return [device] * units
    first = int(device.partition(":")[2] or 0) if device.startswith("cuda") else -1
    if named:
        said = ",".join(named)
        for each in named:
            kind, _, number = each.partition(":")
            if kind != "cuda" or not number.isdecimal():
                raise ParameterError(f"gpus must be named as cuda:0,cuda:1, got {said}")
        if named[0] != f"cuda:{first}":
            what = f"gpus must begin with the device of the run, {device}, got {named[0]}"
            raise ParameterError(f"{what}; leave them out, or name the same")
        if len(named) != units:
            raise ParameterError(f"gpus must name one for each of {units} units, got {said}; a GPU may be named more than once")
        return [*named]
    return [f"cuda:{first + unit}" for unit in range(units)]


def check(devices: Sequence[str]) -> None:
    """Refuse GPUs that are not there."""
    there = int(cuda().device_count())
    missing = [each for each in devices if int(each.partition(":")[2]) >= there]
    if missing:
        shared = ",".join([devices[0]] * len(devices))
        what = f"gpus must be there, one for each of {len(devices)} units, and {missing[0]} is not among {there}"
        raise ParameterError(f"{what}; name others, or have units share them: --gpus {shared}; or take streams of one")
