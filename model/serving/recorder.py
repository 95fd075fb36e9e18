"""What a simulated server did: times of its requests, and totals over its steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from model.serving.loads import Load
from model.serving.server import StepRecord

Floats = NDArray[np.float64]

SLICES = 512
"""Largest number of slices of a time series; when they are full, two become one."""


@dataclass
class StepTotals:
    """Sums over all steps of all replicas."""

    steps: int = 0
    busy: float = 0.0
    """Seconds of steps."""
    emitted: int = 0
    drafted: int = 0
    sequences: int = 0
    """Decoding sequences, summed over the steps."""
    prompt_tokens: int = 0
    running_time: float = 0.0
    """Running sequences times seconds."""
    block_time: float = 0.0
    preemptions: int = 0


class Recorder:
    """Times of requests and totals of steps.

    `arrival`, `admitted`, `first` and `end` hold the times at which each request arrived, was first admitted, had its first
    token, and was finished; shape (requests,), nan before [s].
    """

    def __init__(self, load: Load) -> None:
        self.load = load
        self.arrival, self.admitted, self.first, self.end = (np.full(load.count, np.nan) for _ in range(4))
        self.totals, self.series = StepTotals(), TimeSeries()
        self.now = 0.0
        self.finished = 0

    def arrived(self, number: int, now: float) -> None:
        """A request arrives."""
        self.arrival[number] = now

    def began(self, admitted: list[int], now: float) -> None:
        """A step begins, which admits these requests."""
        for number in admitted:
            if np.isnan(self.admitted[number]):  # not after a preemption
                self.admitted[number] = now

    def step(self, record: StepRecord, first: list[int], finished: list[int], now: float) -> None:
        """A step ends."""
        totals, seconds = self.totals, record.seconds
        totals.steps += 1
        totals.busy += seconds
        totals.emitted += record.emitted
        totals.drafted += record.drafted
        totals.sequences += record.sequences
        totals.prompt_tokens += record.prompt_tokens
        totals.running_time += record.running * seconds
        totals.block_time += record.blocks * seconds
        for number in first:
            self.first[number] = now
        for number in finished:
            self.end[number] = now
        self.finished += len(finished)
        self.series.add(record, now)
        self.now = now


@dataclass
class TimeSeries:
    """Running and waiting requests, draft length and blocks over time, in slices that are merged when there are too many."""

    rows: list[list[float]] = field(default_factory=list)
    span: int = 1
    """Steps of a slice."""
    _open: list[float] = field(default_factory=lambda: [0.0] * 8)

    def add(self, record: StepRecord, now: float) -> None:
        """Add a step that ends at `now`."""
        seconds = record.seconds
        each = self._open
        for index, value in enumerate((
            1, seconds, record.running * seconds, record.waiting * seconds, record.drafted, record.sequences,
            record.blocks * seconds, record.emitted,
        )):  # fmt: skip
            each[index] += value
        if each[0] >= self.span:
            self.rows.append([now, *each[1:]])
            self._open = [0.0] * 8
            if len(self.rows) >= 2 * SLICES:
                self._merge()

    def _merge(self) -> None:
        pairs = zip(self.rows[::2], self.rows[1::2], strict=True)
        self.rows = [[later[0], *[one + other for one, other in zip(first[1:], later[1:], strict=True)]] for first, later in pairs]
        self.span *= 2

    def emitted_between(self, start: float, stop: float) -> float:
        """Tokens generated between two times, interpolated within slices."""
        rows = self.rows if not self._open[0] else [*self.rows, [math.inf, *self._open[1:]]]
        times = np.array([0.0, *[row[0] for row in rows]])
        times[-1] = times[-1] if math.isfinite(times[-1]) else max(stop, times[-2])
        total = np.concatenate([[0.0], np.cumsum([row[7] for row in rows])])
        return float(np.interp(stop, times, total) - np.interp(start, times, total))

    def table(self) -> dict[str, list[float]]:
        """Columns of the series: end of the slice [s], means of running and waiting requests, of the draft length and of blocks."""
        found: dict[str, list[float]] = {name: [] for name in ("time_s", "running", "waiting", "draft_length", "blocks")}
        for now, seconds, running, waiting, drafted, sequences, blocks, _ in self.rows:
            values = now, running / seconds, waiting / seconds, drafted / sequences if sequences else 0.0, blocks / seconds
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
        return found
