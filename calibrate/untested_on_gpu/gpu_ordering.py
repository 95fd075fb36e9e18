"""Order of work between the units of a parallel run: on GPUs, events tell how far each unit is.

A process launches work without waiting for it. Rows that another unit shall copy exist when its GPU has made them, not when its
process says so. The process therefore records an event after them (`marks`), and the GPU of the unit that copies them waits for
that event; no process waits. Processes wait only for what they read: passes that have ended, and their outputs.

The events of a unit are a ring, made by the main process and recorded again in turn. An event that was recorded again stands for
later work, so waiting for it waits long enough. No deadlock is possible, because no later work waits for work that is not launched.

On the CPU all of this does nothing: written rows exist.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from model.base.checks import ParameterError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

RING = 64
"""Events of a unit; as older ones are recorded again, it need not be more than a pass has layers."""
AHEAD = 2
"""Layers by which a pass that may be stopped is launched ahead of its GPU: launched work cannot be cancelled."""
Handles = Sequence[tuple[str, Sequence[bytes]]]
"""GPU of each unit, and handles of its events in other processes."""


class PassStopped(Exception):  # noqa: N818  no error: the pass is stopped
    """The pass is stopped."""


class Order:
    """Order of a unit on the CPU: all launched work is done."""

    def wait_for(self, source: int, low: int, high: int) -> None:
        """Make later work wait for the rows of layers [low, high) that another unit has marked."""

    def mark(self, low: int, high: int) -> None:
        """Record that the work launched by now makes rows of layers [low, high), before other units learn that they exist."""

    def limit_ahead(self, stopped: Callable[[], bool] | None, meanwhile: Callable[[], None] | None) -> None:
        """Wait until at most `AHEAD` layers are launched ahead if the pass may be stopped; `meanwhile` is called in between."""

    def finish(self, stopped: Callable[[], bool] | None = None, meanwhile: Callable[[], None] | None = None) -> None:
        """Wait until all launched work is done, unless it is stopped."""


class Events(Order):
    """Order of a unit on a GPU.

    Parameters
    ----------
    number
        The unit.
    rings
        Events of each unit.
    marks
        Shape (units, layers), shared by all processes: number of events of the unit that had been recorded when the layer's rows
        were launched.
    """

    def __init__(self, number: int, device: str, rings: Sequence[Sequence[Any]], marks: NDArray[np.int64]) -> None:
        self.number, self.rings, self.marks = number, rings, marks
        self.stream = cuda().current_stream(device)
        self.count = int(marks[number].max())
        self.waited_marks = [0] * len(rings)
        """Mark of each unit for which this unit's work already waits."""

    def wait_for(self, source: int, low: int, high: int) -> None:
        """See `Order`."""
        mark = int(self.marks[source, low:high].max())
        if mark > self.waited_marks[source]:
            self.stream.wait_event(self.rings[source][mark % RING])
            self.waited_marks[source] = mark

    def mark(self, low: int, high: int) -> None:
        """See `Order`."""
        self.count += 1
        self.rings[self.number][self.count % RING].record(self.stream)
        self.marks[self.number, low:high] = self.count

    def limit_ahead(self, stopped: Callable[[], bool] | None, meanwhile: Callable[[], None] | None) -> None:
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
                raise PassStopped
            if meanwhile is not None:
                meanwhile()


def cuda() -> Any:
    """Return the module that makes streams and events."""
    import torch

    return torch.cuda


def make_events(devices: Sequence[str]) -> list[list[Any]]:
    """Return events for units on these GPUs, which any process may record and wait for."""
    found = []
    for device in devices:
        with cuda().device(device):  # an event belongs to the GPU that is current when its handle is first requested
            found.append([cuda().Event(interprocess=True) for _ in range(RING)])
            for event in found[-1]:
                event.ipc_handle()
    return found


def handles(devices: Sequence[str], rings: Sequence[Sequence[Any]]) -> Handles:
    """Return the handles of these events for other processes; units on the CPU have none."""
    return [(device, [event.ipc_handle() for event in ring]) for device, ring in zip(devices, rings, strict=False)]


def open_events(handles_of_units: Handles) -> list[list[Any]]:
    """Return the events of another process."""
    import torch

    return [[cuda().Event.from_ipc_handle(torch.device(device), each) for each in ring] for device, ring in handles_of_units]


def settle(devices: Sequence[str]) -> None:
    """Wait until these GPUs have done all work of this process."""
    for device in {*devices}:
        cuda().synchronize(device)


def unit_devices(device: str, units: int, named: Sequence[str] = ()) -> list[str]:
    """Return the GPU of each unit, beginning with `device`: the named ones, or consecutive ones.

    >>> unit_devices("cpu", 3)
    ['cpu', 'cpu', 'cpu']
    >>> unit_devices("cuda", 2, ["cuda:0", "cuda:0"])
    ['cuda:0', 'cuda:0']
    >>> unit_devices("cpu", 2, ["cuda:0", "cuda:1"])
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: gpus must begin with the device of the run, cpu, got cuda:0; leave them out, or name the same
    """
    if not named and not device.startswith("cuda"):
        return [device] * units
    first = int(device.partition(":")[2] or 0) if device.startswith("cuda") else -1
    if named:
        names = ",".join(named)
        for each in named:
            kind, _, number = each.partition(":")
            if kind != "cuda" or not number.isdecimal():
                raise ParameterError(f"gpus must be named as cuda:0,cuda:1, got {names}")
        if named[0] != f"cuda:{first}":
            what = f"gpus must begin with the device of the run, {device}, got {named[0]}"
            raise ParameterError(f"{what}; leave them out, or name the same")
        if len(named) != units:
            raise ParameterError(f"gpus must name one for each of {units} units, got {names}; a GPU may be named more than once")
        return [*named]
    return [f"cuda:{first + unit}" for unit in range(units)]


def check(devices: Sequence[str]) -> None:
    """Refuse GPUs that this machine does not have."""
    there = int(cuda().device_count())
    missing = [each for each in devices if int(each.partition(":")[2]) >= there]
    if missing:
        shared = ",".join([devices[0]] * len(devices))
        what = f"gpus must exist, one for each of {len(devices)} units, and {missing[0]} is not among {there}"
        raise ParameterError(f"{what}; name others, or let units share one: --gpus {shared}; or take streams of one GPU")
