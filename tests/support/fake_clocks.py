"""Fake clocks for tests: timed work takes exactly the time that the test sets, on any machine under any load."""

from __future__ import annotations

import importlib
import pkgutil
import sys
import time
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import calibrate
from calibrate.devices import machine
from calibrate.timing import process_times, read_times

TICK = 1e-5
"""Time of one reading of a clock [s]."""
_PRODUCTS = {getattr(torch.ops.aten, name) for name in ("mm", "addmm", "bmm", "baddbmm", "linear", "matmul")}
_CLOCKS = ("perf_counter", "monotonic", "thread_time", "process_time")


class FakeTime:
    """Replacement of the module `time`: its clocks advance only when they are read, and by `sleep` and `spend`."""

    def __init__(self, tick: float = TICK) -> None:
        self.now, self.tick = 0.0, tick

    def spend(self, seconds: float) -> None:
        """Let time pass."""
        self.now += seconds

    sleep = spend

    def __getattr__(self, name: str) -> Any:
        return self._read if name in _CLOCKS else getattr(time, name)

    def _read(self) -> float:
        self.now += self.tick
        return self.now

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Make all modules of `calibrate` use this clock; processes that it starts use the machine's."""
        for each in pkgutil.walk_packages(calibrate.__path__, "calibrate."):
            if not each.name.endswith("__main__"):
                importlib.import_module(each.name)
        for name, module in [*sys.modules.items()]:
            if name.startswith("calibrate.") and vars(module).get("time") is time:
                monkeypatch.setattr(module, "time", self)


def install_fake_time(monkeypatch: pytest.MonkeyPatch) -> FakeTime:
    """Install a clock for everything timed in this process, and measure the device's peaks on little data."""
    clock = FakeTime()
    clock.install(monkeypatch)
    monkeypatch.setattr(machine, "SMALL_SIDE", 16)
    monkeypatch.setattr(machine, "_SHARE", 1e-6)  # of the readings of this clock; otherwise a trial would run between all rows
    monkeypatch.setattr(machine, "QUICK_SIZES", {"cpu": (48, 2**20)})
    return clock


AXES = {
    "HYPOTHESES": (1, 16), "KV_ONLY_TOKENS": (1, 8), "GAPS": (0, 1000), "WIDTHS_AFTER_PAUSES": (4,), "GAPS_OF_WIDTHS": (0, 1000),
    "SHORT_PASSES": (1,), "STEADY_AFTER": 1, "PROCESS_PROMPT": 4, "WARM_UPS": 2,
}  # fmt: skip
"""Ends of the axes that a measurement session times besides passes: the least that a prediction can interpolate between."""


def few_parts(monkeypatch: pytest.MonkeyPatch, context: int = 8, repeats: int = 2) -> None:
    """Time the parts of a measurement session that are not whole passes at fewer points and less often, which is enough for clocks
    without noise."""
    for name, times in (("time_reads", 1), ("time_after_pauses", repeats)):
        whole = getattr(read_times, name)
        monkeypatch.setattr(read_times, name, lambda decoder, whole=whole, times=times: whole(decoder, context, times))
    for constant, value in AXES.items():
        monkeypatch.setattr(read_times, constant, value)
    monkeypatch.setattr(process_times, "PROCESS_PROMPT", AXES["PROCESS_PROMPT"])


class Machine(TorchDispatchMode):
    """A device whose operations take the times of given kernel rates, on the clock of a test.

    Products of float16 whose operands are both row-major run at `slow`, those of `inner` columns and rows at `best`, all others at
    `rate` [FLOP/s]; everything else moves its bytes at `bandwidth` [B/s].
    """

    def __init__(
        self, clock: FakeTime, rate: float = 1e11, slow: float | None = None, inner: int = 0, best: float | None = None,
        bandwidth: float = 1e11,
    ) -> None:
        super().__init__()
        self.clock, self.rate, self.bandwidth = clock, rate, bandwidth
        clock.tick = 1e-9  # tiny: operations are shorter than the usual time of reading a clock
        self.slow, self.inner, self.best = rate if slow is None else slow, inner, rate if best is None else best

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled here, so torch needs no guard for each operation."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        operands = [each for each in args if isinstance(each, torch.Tensor) and each.ndim >= 2][-2:]
        if func._overloadpacket in _PRODUCTS and len(operands) == 2:
            left, right = operands if func._overloadpacket is not torch.ops.aten.linear else (operands[0], operands[1].mT)
            rate = self.rate
            if left.dtype == torch.float16 and left.stride(-1) == right.stride(-1) == 1:
                rate = self.slow
            if left.shape[-1] == self.inner:
                rate = self.best
            self.clock.spend(2 * result.numel() * left.shape[-1] / rate)
        elif isinstance(result, torch.Tensor):
            self.clock.spend(result.numel() * result.itemsize / self.bandwidth)
        return result


# --- Readings of clocks ---


class PassClock:
    """A clock with a given time for each part, and some time of the pass outside the parts."""

    def __init__(self, layer: float = 1.0) -> None:
        self.parts = {"layer": layer, "head": 3.0, "norm": 0.5, "embedding": 0.25}
        self.whole = 6 * layer + 3.0 + 0.5 + 0.25 + 2.0

    def start(self) -> None:
        """Nothing to do."""

    def stop(self) -> float:
        return self.whole * 1e-6

    def mark(self, name: str, index: int, edge: int) -> None:
        """Nothing to do."""

    def disturbed(self) -> bool:
        return False

    def span(self, name: str, index: int) -> float:
        return self.parts[name] * (index + 1) * 1e-6 if name == "layer" else self.parts[name] * 1e-6


class SteppedClock:
    """A clock that advances only by its step and by `sleep`."""

    def __init__(self, step: float = 0.0) -> None:
        self.now, self.step, self.readings = 1000.0, step, 0

    def read(self) -> float:
        self.readings += 1
        self.now += self.step
        return self.now

    perf_counter = monotonic = read

    def sleep(self, seconds: float) -> None:
        self.now += seconds
