"""What times a stretch of work and the parts that are marked in it: the processor's clock, or events of a GPU."""

from __future__ import annotations

import time
from typing import Any, Protocol

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
