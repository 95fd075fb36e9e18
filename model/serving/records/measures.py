"""Figures of a served load: times to the first token, per token and of requests, with percentiles; throughput, and stability.

In a steady state (a rate or a concurrency) the first requests, which find an empty server, are left out, and so are the last ones,
which meet no later arrivals. How many of the first is decided by MSER-5 [White1997]. A trace is taken whole.

[White1997] K. P. White. An effective truncation heuristic for bias reduction in simulation output. Simulation 69(6), 1997.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.serving.loads import TracedLoad
from model.serving.records.recorder import Recorder
from model.serving.records.request_batches import RequestBatch, SummaryRecorder

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

TIMES = ("ttft", "tpot", "itl", "e2e")
STATISTICS = ("mean", "p50", "p90", "p99")
PERCENTILES = (50, 90, 99)
MOST_TRUNCATED = 0.5
"""Largest share of the requests that is left out at the beginning."""
ROUNDING = 1e-9
"""Squared standard errors, relative to the square of the mean by batches, that count as equal."""
TAIL = 0.1
"""Share of the requests that is left out at the end."""
BACKLOG = 0.05
"""Share of all requests that may wait when the last one arrives; with more the queue is called unstable."""


class Window(NamedTuple):
    """Requests that are measured: numbers [first, last)."""

    first: int
    last: int


def window(recorder: Recorder) -> Window:
    """Requests in the steady state; all of a trace."""
    count = recorder.load.count
    if isinstance(recorder.load, TracedLoad):
        return Window(0, count)
    last = max(1, count - round(TAIL * count))
    return Window(truncation(recorder.end[:last] - recorder.arrival[:last]), last)


def truncation(series: Floats, batch: int = 5) -> int:
    """Observations to leave out at the beginning: those that minimise the standard error of the mean of the rest, by batches.

    >>> truncation(np.array([9.0] * 10 + [1.0, 2.0] * 45))
    10
    """
    count = series.size // batch
    if count < 4:
        return 0
    means = series[: count * batch].reshape(count, batch).mean(axis=1)
    most = int(MOST_TRUNCATED * count)
    left = count - np.arange(most + 1)
    # Sums over the rest, from the end.
    total, squares = np.cumsum(means[::-1])[::-1][: most + 1], np.cumsum(means[::-1] ** 2)[::-1][: most + 1]
    errors = (squares - total**2 / left) / left**2
    # Where requests are alike, errors are what rounding leaves, which differs between processors: as many as possible are kept.
    return int(np.argmax(errors <= errors.min() + ROUNDING * means.mean() ** 2 / count)) * batch


ENDS = 5
"""Requests whose mean end is the beginning, or the end, of the measured time."""


def measured_time(recorder: Recorder) -> tuple[float, float]:
    """Beginning and end of the time in which the measured requests end [s]; all of a trace.

    It is a time of ends, not of arrivals: where a queue grows, arrivals stop long before their tokens are generated.
    """
    chosen = window(recorder)
    if chosen.first == 0 and isinstance(recorder.load, TracedLoad):
        return 0.0, recorder.now
    end = np.sort(recorder.end[chosen.first : chosen.last])
    start, stop = float(end[:ENDS].mean()), float(end[-ENDS:].mean())
    of = slice(chosen.first, chosen.last)
    # Too few requests to follow each other: the whole run.
    return (start, stop) if stop - start > float((recorder.end[of] - recorder.admitted[of]).mean()) else (0.0, recorder.now)


def measured(recorder: Recorder, replicas: int = 1) -> dict[str, float]:
    """Figures of one run by name; times in milliseconds. `utilization` is that of one of the replicas, all others of all together.

    `ttft_ms` is from arrival to the first token, `tpot_ms` per token after it, `e2e_ms` from arrival to the end. `itl_ms` is the
    time between one output of a request and the next, with all tokens of a step as one output, as serving benchmarks count it;
    it is over the steps of the measured time, and its values are right to 0.1 %.
    """
    found, start, stop, output = _of_batches(recorder) if isinstance(recorder, SummaryRecorder) else _of_requests(recorder)
    gaps, counts = recorder.series.gaps_between(start, stop)
    found |= {f"{statistic}_itl_ms": value for statistic, value in _statistics(gaps, counts)}
    span, sums, totals = stop - start or math.inf, recorder.series.between(start, stop), recorder.totals
    tokens_per_s = sums.emitted / span
    return found | {
        "output_tokens_per_s": tokens_per_s, "requests_per_s": tokens_per_s / output,
        "mean_running": sums.running / span,
        "mean_blocks": sums.blocks / span,
        "utilization": sums.on_target / span / replicas, "draft_utilization": sums.on_draft / span / replicas,
        "mean_draft_length": sums.drafted / sums.sequences if sums.sequences else 0.0,
        "tokens_per_step": totals.emitted / totals.steps if totals.steps else 0.0,
        "preemptions": float(totals.preemptions), "simulated_s": recorder.now,
    }


class RequestFigures(NamedTuple):
    """Figures of the measured requests by name [ms], the measured time [s], and the mean tokens of an output."""

    figures: dict[str, float]
    start: float
    stop: float
    output: float


def _of_requests(recorder: Recorder) -> RequestFigures:
    load, chosen = recorder.load, window(recorder)
    outputs = np.array([load.request(number).output for number in range(chosen.first, chosen.last)])
    of = slice(chosen.first, chosen.last)
    arrival, first, end = recorder.arrival[of], recorder.first[of], recorder.end[of]
    several = outputs > 1
    times = {
        "ttft": first - arrival, "tpot": (end - first)[several] / (outputs[several] - 1), "e2e": end - arrival,
    }  # fmt: skip
    found = {f"{statistic}_{name}_ms": value for name in times for statistic, value in _statistics(times[name])}
    return RequestFigures(found, *measured_time(recorder), float(outputs.mean()))


def _of_batches(recorder: SummaryRecorder) -> RequestFigures:
    """Whole batches are left out at the beginning and the end."""
    chosen, whole = _chosen_batches(recorder), isinstance(recorder.load, TracedLoad)
    one = _joined(chosen)
    found: dict[str, float] = {}
    for name, count in (("ttft", one.count), ("tpot", one.several), ("e2e", one.count)):
        mean = getattr(one, name) / count if count else math.nan
        values = [mean, *one.quantiles(name, [each / 100 for each in PERCENTILES])]
        found |= {f"{statistic}_{name}_ms": 1e3 * value for statistic, value in zip(STATISTICS, values, strict=True)}
    start, stop = (each.end / each.count for each in (chosen[0], chosen[-1]))
    if whole or stop - start <= one.service / one.count:
        start, stop = 0.0, recorder.now
    return RequestFigures(found, start, stop, one.outputs / one.count)


def _chosen_batches(recorder: SummaryRecorder) -> list[RequestBatch]:
    """Batches in the steady state; all of a trace."""
    batches = [each for each in recorder.batches if each.count]
    if isinstance(recorder.load, TracedLoad):
        return batches
    count = recorder.load.count
    last = max(1, (count - round(TAIL * count)) // recorder.size)
    first = truncation(np.array([each.e2e / each.count for each in batches[:last]]), 1)
    return batches[first:last]


def _joined(batches: Sequence[RequestBatch]) -> RequestBatch:
    found = batches[0]
    for each in batches[1:]:
        found = found.joined(each)
    return found


def _statistics(values: Floats, counts: Integers | None = None) -> list[tuple[str, float]]:
    """Mean and percentiles of times in seconds, each of which counts once or `counts` times [ms]."""
    if not values.size:
        return [(name, math.nan) for name in STATISTICS]
    if counts is None:
        mean, percentiles = values.mean(), np.percentile(values, PERCENTILES)
    else:
        mean, upto = np.average(values, weights=counts), np.cumsum(counts)
        percentiles = values[np.searchsorted(upto, np.array(PERCENTILES) / 100 * upto[-1])]
    return [*zip(STATISTICS, (1e3 * np.array([mean, *percentiles])).tolist(), strict=True)]


def stable(recorder: Recorder) -> bool:
    """False if the queue grew over the whole run: too many requests waited for their first token when the last one arrived."""
    load = recorder.load
    if load.concurrency is not None:
        return True
    if isinstance(recorder, SummaryRecorder):
        return recorder.waiting_at_last <= max(BACKLOG * load.count, 8)
    last = recorder.arrival[-1]
    waiting = int(np.count_nonzero(recorder.first > last)) - 1
    return waiting <= max(BACKLOG * load.count, 8)


def within(recorder: Recorder, ttft_ms: float | None, tpot_ms: float | None) -> float:
    """Requests per second that meet both objectives (None: any), over the measured window [1/s].

    A `SummaryRecorder` has its own objectives, which these must be.
    """
    if isinstance(recorder, SummaryRecorder):
        assert recorder.objectives == (ttft_ms, tpot_ms)
        one = _joined(_chosen_batches(recorder))
        return one.good / one.count * measured(recorder)["requests_per_s"]
    chosen = window(recorder)
    of = slice(chosen.first, chosen.last)
    outputs = np.array([recorder.load.request(number).output for number in range(chosen.first, chosen.last)])
    arrival, first, end = recorder.arrival[of], recorder.first[of], recorder.end[of]
    good = np.ones(outputs.size, dtype=bool)
    if ttft_ms is not None:
        good &= 1e3 * (first - arrival) <= ttft_ms
    if tpot_ms is not None:
        good &= 1e3 * (end - first) <= tpot_ms * np.maximum(outputs - 1, 1)
    return float(good.mean()) * measured(recorder)["requests_per_s"]
