"""Clocks that time a stretch of work and its marked parts: the host's clock, or events of a GPU."""

from __future__ import annotations

import time
from typing import Any, Protocol

INTERRUPTED_SHARE = 0.02
"""Share of a stretch without CPU time above which it was interrupted [-]."""


class Clock(Protocol):
    """Clock of a stretch of work and of its marked parts."""

    def start(self) -> None:
        """Begin the stretch, once the device is idle."""

    def stop(self) -> float:
        """End the stretch, once the device is idle; return its length [s]."""

    def mark(self, name: str, index: int, edge: int) -> None:
        """Mark the beginning (edge 0) or the end (edge 1) of a part."""

    def span(self, name: str, index: int) -> float:
        """Return the length of a marked part [s]; call it after `stop`."""

    def disturbed(self) -> bool:
        """Whether the last stretch was interrupted, so that its length includes other work of the machine."""


class HostClock:
    """The host's clock, for work on the CPU.

    Single-threaded work was interrupted if the thread did not run for part of the time.
    """

    def __init__(self, single: bool = False) -> None:
        self.single = single
        self.at: dict[tuple[str, int, int], float] = {}
        self.started_at = self.cpu_started_at = 0.0
        self.waiting_share = 0.0

    def start(self) -> None:
        """See `Clock`."""
        self.cpu_started_at = time.thread_time()
        self.started_at = time.perf_counter()

    def stop(self) -> float:
        """See `Clock`."""
        passed = time.perf_counter() - self.started_at
        self.waiting_share = 1 - (time.thread_time() - self.cpu_started_at) / passed
        return passed

    def disturbed(self) -> bool:
        """See `Clock`."""
        return self.single and self.waiting_share > INTERRUPTED_SHARE

    def mark(self, name: str, index: int, edge: int) -> None:
        """See `Clock`."""
        self.at[name, index, edge] = time.perf_counter()

    def span(self, name: str, index: int) -> float:
        """See `Clock`."""
        return self.at[name, index, 1] - self.at[name, index, 0]


class DeviceClock:
    """Events on a GPU's timeline: recorded during the work, and read after one synchronisation at its end."""

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
        """See `Clock`. Events are reused: creating one takes longer than a small kernel."""
        key = (name, index, edge)
        if key not in self.at:
            self.at[key] = self._event(self.graph)
        self.at[key].record()

    def disturbed(self) -> bool:
        """See `Clock`: a GPU does not interrupt a kernel."""
        return False

    def span(self, name: str, index: int) -> float:
        """See `Clock`."""
        return float(self.at[name, index, 0].elapsed_time(self.at[name, index, 1])) / 1e3


def clock_of(device: str, mode: str = "eager") -> Clock:
    """Return the clock of a device; in mode cuda-graph its marks are events that graphs record."""
    import torch

    return DeviceClock(device, mode == "cuda-graph") if device.startswith("cuda") else HostClock(torch.get_num_threads() == 1)
