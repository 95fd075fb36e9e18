"""Times of requests in batches, in memory that does not grow with the number of requests."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.serving.loads import Load
from model.serving.records.recorder import BIN, Recorder, summed
from model.serving.server import StepRecord

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

FIRST_SIZE = 5
"""Requests of a batch at first, as in MSER-5."""
MOST_BATCHES = 256
"""Most batches; when there are more, two become one."""
_LEAST = 1e-12
"""Times below it count as this long [s]."""


@dataclass
class RequestBatch:
    """Sums over requests of consecutive numbers, and how many of their times are in each bin of the logarithm."""

    count: int = 0
    outputs: int = 0
    several: int = 0
    """Requests of more than one output token, which have a time per token."""
    ttft: float = 0.0
    tpot: float = 0.0
    e2e: float = 0.0
    service: float = 0.0
    """Seconds from admission to the end."""
    end: float = 0.0
    good: int = 0
    """Requests that meet the objectives."""
    bins: dict[str, dict[int, int]] = field(default_factory=lambda: {name: {} for name in ("ttft", "tpot", "e2e")})

    def add(self, name: str, seconds: float) -> None:
        """Add a time of a request."""
        setattr(self, name, getattr(self, name) + seconds)
        number = math.floor(math.log(max(seconds, _LEAST)) / BIN)
        held = self.bins[name]
        held[number] = held.get(number, 0) + 1

    def joined(self, other: RequestBatch) -> RequestBatch:
        """Both batches as one."""
        sums = {name: value + getattr(other, name) for name, value in vars(self).items() if name != "bins"}
        return RequestBatch(**sums, bins={name: summed(own, other.bins[name]) for name, own in self.bins.items()})

    def quantiles(self, name: str, shares: Sequence[float]) -> list[float]:
        """Quantiles of a time, right to 0.1 % [s]; nan without any."""
        held = self.bins[name]
        if not held:
            return [math.nan] * len(shares)
        numbers = np.array(sorted(held))
        upto = np.cumsum([held[each] for each in numbers.tolist()])
        found: list[float] = np.exp((numbers[np.searchsorted(upto, np.array(shares) * upto[-1])] + 0.5) * BIN).tolist()
        return found


class SummaryRecorder(Recorder):
    """A recorder whose memory does not grow with the number of requests: it keeps the times of those that are there.

    Parameters
    ----------
    load
        The load.
    ttft_ms, tpot_ms
        Objectives of a request; None: any.
    """

    def __init__(self, load: Load, ttft_ms: float | None = None, tpot_ms: float | None = None) -> None:
        super().__init__(load, keep=False)
        self.objectives = ttft_ms, tpot_ms
        self.batches: list[RequestBatch] = []
        self.size = FIRST_SIZE
        """Requests of a batch."""
        self.waiting_at_last = 0
        """Requests without a first token when the last one arrived."""
        self._times: dict[int, list[float]] = {}
        """Arrival, admission, first and last output of the requests that are there [s]."""

    def arrived(self, number: int, now: float) -> None:
        """See `Recorder`."""
        if number == self.load.count - 1:
            self.waiting_at_last = sum(math.isnan(each[2]) for each in self._times.values())
        self._times[number] = [now, math.nan, math.nan, math.nan]

    def began(self, admitted: list[int], now: float) -> None:
        """See `Recorder`."""
        for number in admitted:
            times = self._times[number]
            if math.isnan(times[1]):  # not after a preemption
                times[1] = now

    def step(
        self, record: StepRecord, first: list[int], continued: Integers, finished: list[int], now: float, replica: int = 0
    ) -> None:
        """See `Recorder`."""
        before = []
        for number in continued.tolist():
            times = self._times[number]
            before.append(times[3])
            times[3] = now
        for number in first:
            times = self._times[number]
            times[2] = times[3] = now
        self.finished += len(finished)
        self.add_step(record, before, now)
        for number in finished:
            self._finish(number, now)

    def _finish(self, number: int, end: float) -> None:
        arrival, admitted, first, _ = self._times.pop(number)
        batch = self._batch(number)
        output = self.load.request(number).output
        batch.count += 1
        batch.outputs += output
        batch.service += end - admitted
        batch.end += end
        batch.add("ttft", first - arrival)
        batch.add("e2e", end - arrival)
        if output > 1:
            batch.several += 1
            batch.add("tpot", (end - first) / (output - 1))
        ttft_ms, tpot_ms = self.objectives
        late = ttft_ms is not None and 1e3 * (first - arrival) > ttft_ms
        slow = tpot_ms is not None and 1e3 * (end - first) > tpot_ms * max(output - 1, 1)
        batch.good += not (late or slow)

    def _batch(self, number: int) -> RequestBatch:
        while number // self.size >= MOST_BATCHES:
            if len(self.batches) % 2:
                self.batches.append(RequestBatch())
            self.batches = [one.joined(other) for one, other in zip(self.batches[::2], self.batches[1::2], strict=True)]
            self.size *= 2
        index = number // self.size
        while len(self.batches) <= index:
            self.batches.append(RequestBatch())
        return self.batches[index]
