"""What a simulated server did: times of its requests, and totals over its steps."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.serving.loads import Load
from model.serving.server import StepRecord

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

SLICES = 512
"""Largest number of slices of a time series; when they are full, two become one."""
BIN = math.log(1.002)
"""Width of the bins of the gaps between outputs, in the logarithm: their quantiles are right to 0.1 %."""


@dataclass
class StepTotals:
    """Sums over all steps of all replicas."""

    steps: int = 0
    busy: float = 0.0
    """Seconds of steps."""
    on_target: float = 0.0
    """Seconds of the target's devices."""
    on_draft: float = 0.0
    """Seconds of the draft's own devices."""
    emitted: int = 0
    drafted: int = 0
    sequences: int = 0
    """Decoding sequences, summed over the steps."""
    prompt_tokens: int = 0
    running_time: float = 0.0
    """Running sequences times seconds."""
    block_time: float = 0.0
    preemptions: int = 0
    gaps: int = 0
    """Outputs after the first of a request; an output is what a step adds to a sequence."""
    gap_time: float = 0.0
    """Seconds from each of them back to the one before."""


class Recorder:
    """Times of requests and totals of steps.

    `arrival`, `admitted`, `first` and `end` hold the times at which each request arrived, was first admitted, had its first
    token, and was finished; shape (requests,), nan before [s]. Without `keep` they are empty.
    """

    def __init__(self, load: Load, *, keep: bool = True) -> None:
        self.load = load
        count = load.count if keep else 0
        self.arrival, self.admitted, self.first, self.end = (np.full(count, np.nan) for _ in range(4))
        self._last = np.full(count, np.nan)
        """Time of each request's last output [s]."""
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

    def step(
        self, record: StepRecord, first: list[int], continued: Integers, finished: list[int], now: float, replica: int = 0
    ) -> None:
        """A step of a replica ends, with the first output of some requests and a further one of others."""
        before = self._last[continued].tolist()
        self._last[continued] = now
        for number in first:
            self.first[number] = self._last[number] = now
        for number in finished:
            self.end[number] = now
        self.finished += len(finished)
        self.add_step(record, before, now)

    def add_step(self, record: StepRecord, before: list[float], now: float) -> None:
        """Add a step to the totals and the series; `before` are the times of the outputs before those that continue."""
        totals, seconds = self.totals, record.seconds
        totals.steps += 1
        totals.busy += seconds
        totals.on_target += record.target_seconds
        totals.on_draft += record.draft_seconds
        totals.emitted += record.emitted
        totals.drafted += record.drafted
        totals.sequences += record.sequences
        totals.prompt_tokens += record.prompt_tokens
        totals.running_time += record.running * seconds
        totals.block_time += record.blocks * seconds
        if before:
            totals.gaps += len(before)
            totals.gap_time += self.series.add_gaps(before, now)
        self.series.add(record, now)
        self.now = now


class SeriesSums(NamedTuple):
    """Sums over the steps of a time: their seconds, requests and blocks times seconds, drafted tokens, sequences, and tokens,
    and the seconds of the target's devices and of the draft's own."""

    busy: float
    running: float
    waiting: float
    drafted: float
    sequences: float
    blocks: float
    emitted: float
    on_target: float
    on_draft: float


@dataclass
class TimeSeries:
    """Running and waiting requests, draft length and blocks over time, in slices that are merged when there are too many."""

    rows: list[list[float]] = field(default_factory=list)
    span: int = 1
    """Steps of a slice."""
    gaps: list[dict[int, int]] = field(default_factory=lambda: [{}])
    """For each slice, and the open one, the number of gaps between outputs of a request in each bin of their logarithm."""
    _open: list[float] = field(default_factory=lambda: [0.0] * 10)

    def add(self, record: StepRecord, now: float) -> None:
        """Add a step that ends at `now`."""
        seconds, sequences, running, waiting, drafted, emitted, _, blocks, on_target, on_draft = record
        steps, spent, busy, queued, proposed, decoded, held, generated, target, draft = self._open
        self._open = [
            steps + 1, spent + seconds, busy + running * seconds, queued + waiting * seconds, proposed + drafted,
            decoded + sequences, held + blocks * seconds, generated + emitted,
            target + on_target, draft + on_draft,
        ]  # fmt: skip
        if steps + 1 >= self.span:
            self.rows.append([now, *self._open[1:]])
            self.gaps.append({})
            self._open = [0.0] * 10
            if len(self.rows) >= 2 * SLICES:
                self._merge()

    def _merge(self) -> None:
        self.rows = _halved(self.rows)
        *gaps, still = self.gaps
        self.gaps = [*(summed(first, later) for first, later in zip(gaps[::2], gaps[1::2], strict=True)), still]
        self.span *= 2

    def add_gaps(self, before: list[float], now: float) -> float:
        """Add the gaps from the times of outputs `before` to those of a step that ends `now`; return their sum [s]."""
        held, total = self.gaps[-1], 0.0
        alike = before.count(before[0]) == len(before)  # the usual case: all sequences were in the last step
        for last, count in ((before[0], len(before)),) if alike else Counter(before).items():
            number = math.floor(math.log(now - last) / BIN)
            held[number] = held.get(number, 0) + count
            total += count * (now - last)
        return total

    def gaps_between(self, start: float, stop: float) -> tuple[Floats, Integers]:
        """Gaps between outputs in the slices that end after `start` and not after `stop`: centres of bins [s], and their counts."""
        held: dict[int, int] = {}
        last = self.rows[-1][0] if self.rows else 0.0
        ends = [*(row[0] for row in self.rows), max(stop, last)]
        within = [counts for now, counts in zip(ends, self.gaps, strict=True) if start < now <= stop]
        for counts in within or self.gaps:  # a window within a slice: all that is known
            held = summed(held, counts)
        bins = sorted(held)
        return np.exp((np.array(bins, dtype=float) + 0.5) * BIN), np.array([held[each] for each in bins], dtype=np.int64)

    def thinned(self, most: int) -> TimeSeries:
        """The series in at most `most` slices, without gaps between outputs."""
        rows = self.rows
        while len(rows) > most:
            rows = _halved(rows)
        return TimeSeries(rows)

    def between(self, start: float, stop: float) -> SeriesSums:
        """Sums between two times, interpolated within slices."""
        rows = self.rows if not self._open[0] else [*self.rows, [math.inf, *self._open[1:]]]
        times = np.array([0.0, *[row[0] for row in rows]])
        times[-1] = times[-1] if math.isfinite(times[-1]) else max(stop, times[-2])
        totals = np.concatenate([np.zeros((1, 9)), np.cumsum([row[1:] for row in rows], axis=0)]) if rows else np.zeros((1, 9))
        return SeriesSums(*(float(np.interp(stop, times, each) - np.interp(start, times, each)) for each in totals.T))

    def table(self) -> dict[str, list[float]]:
        """Columns of the series: end of the slice [s], means of running and waiting requests, of the draft length and of blocks."""
        found: dict[str, list[float]] = {name: [] for name in ("time_s", "running", "waiting", "draft_length", "blocks")}
        for now, seconds, running, waiting, drafted, sequences, blocks, *_ in self.rows:
            values = now, running / seconds, waiting / seconds, drafted / sequences if sequences else 0.0, blocks / seconds
            for name, value in zip(found, values, strict=True):
                found[name].append(value)
        return found


def _halved(rows: list[list[float]]) -> list[list[float]]:
    """Rows joined in pairs, of which the first column is an end and the others are sums; an odd last one stays."""
    pairs = [rows[index : index + 2] for index in range(0, len(rows), 2)]
    return [[pair[-1][0], *map(sum, zip(*(row[1:] for row in pair), strict=True))] for pair in pairs]


def summed(one: dict[int, int], other: dict[int, int]) -> dict[int, int]:
    """Sums of the values by key."""
    found = dict(one)
    for number, count in other.items():
        found[number] = found.get(number, 0) + count
    return found
