"""A served load as a Chrome trace, which opens in Perfetto: steps of each replica, counters, and the life of each request."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from model.serving.loads import Load
from model.serving.records.recorder import Integers, Recorder
from model.serving.server import StepRecord

MOST_STEPS = 100_000
"""Steps of a trace; viewers are slow with more."""
MOST_REQUESTS = 2_000
"""Requests of a trace that are shown one by one."""
COUNTERS = ("running", "waiting", "blocks")


class TracedStep(NamedTuple):
    """A step of a replica, and the time at which it ended [s]."""

    replica: int
    end: float
    did: StepRecord


class StepLog(Recorder):
    """A recorder that keeps the first `MOST_STEPS` steps."""

    def __init__(self, load: Load) -> None:
        super().__init__(load)
        self.steps: list[TracedStep] = []

    def step(
        self, record: StepRecord, first: list[int], continued: Integers, finished: list[int], now: float, replica: int = 0
    ) -> None:
        """A step ends."""
        super().step(record, first, continued, finished, now, replica)
        if len(self.steps) < MOST_STEPS:
            self.steps.append(TracedStep(replica, now, record))


def chrome_trace(runs: Mapping[str, StepLog]) -> dict[str, Any]:
    """Trace of runs, with a process for each; times are rounded to the nanosecond."""
    events: list[dict[str, Any]] = []
    for process, (name, log) in enumerate(runs.items(), 1):
        events.append({"ph": "M", "pid": process, "tid": 0, "name": "process_name", "args": {"name": name}})
        events += _steps(process, log)
        events += _requests(process, log)
    cut = [name for name, log in runs.items() if log.totals.steps > len(log.steps)]
    about = {"made_by": "decodesim", "time": "simulated"}
    if cut:
        about["cut"] = f"the first {MOST_STEPS:,} steps of {', '.join(cut)}"
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": about}


def _steps(process: int, log: StepLog) -> Iterator[dict[str, Any]]:
    for replica in sorted({each.replica for each in log.steps}):
        said = {"name": f"replica {replica}: engine steps"}
        yield {"ph": "M", "pid": process, "tid": replica + 1, "name": "thread_name", "args": said}
    for replica, end, did in log.steps:
        start = _stamp(end - did.seconds)
        kind = "decode" if not did.prompt_tokens else "decode and prompts" if did.sequences else "prompts"
        length = f", K = {did.drafted / did.sequences:.3g}" if did.drafted else ""
        name = f"{kind}: {did.sequences} sequences{length}" if did.sequences else f"{kind}: {did.prompt_tokens} tokens"
        args = {"sequences": did.sequences, "drafted": did.drafted, "emitted": did.emitted, "prompt_tokens": did.prompt_tokens}
        track = {"pid": process, "tid": replica + 1}
        yield {"ph": "X", "name": name, "cat": kind, "ts": start / 1e3, "dur": (_stamp(end) - start) / 1e3, "args": args, **track}
        for counter in COUNTERS:
            shown = f"{counter}, replica {replica}" if replica else counter
            yield {"ph": "C", "name": shown, "ts": start / 1e3, "args": {counter: getattr(did, counter)}, **track}


def _requests(process: int, log: StepLog) -> Iterator[dict[str, Any]]:
    """Three spans of each request: it waits, its prompt is read, and its output is generated."""
    last = log.steps[-1].end if log.steps else 0.0
    for number in range(min(log.load.count, MOST_REQUESTS)):
        request = log.load.request(number)
        times = (log.arrival[number], log.admitted[number], log.first[number], log.end[number])
        args = {"prompt": request.prompt, "output": request.output}
        for what, start, end in zip(("waits", "prompt", "output"), times, times[1:], strict=False):
            if not end <= last:
                break
            common = {"cat": "request", "id": number, "pid": process, "tid": 0, "name": what}
            yield {"ph": "b", "ts": _stamp(start) / 1e3, "args": args, **common}
            yield {"ph": "e", "ts": _stamp(end) / 1e3, **common}


def _stamp(seconds: float) -> int:
    """Time stamp [ns]."""
    return round(1e9 * float(seconds))
