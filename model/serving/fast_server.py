"""Servers on a plain clock: the fast twin of `sim.engine.serving`, equal to it step by step.

Events are arrivals and ends of steps alone, so that a loop over the earliest of them is enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from heapq import heappop, heappush

from model.serving.loads import Load
from model.serving.records.recorder import Recorder
from model.serving.server import Server

Router = Callable[[Sequence[Server], int], int]
"""Choose the server of the request of a number."""


def least_loaded(servers: Sequence[Server], number: int) -> int:
    """The server with the fewest running and waiting requests; the first of several."""
    return min(range(len(servers)), key=lambda index: servers[index].load)


def round_robin(servers: Sequence[Server], number: int) -> int:
    """Each server in turn."""
    return number % len(servers)


ROUTERS: dict[str, Router] = {"least-loaded": least_loaded, "round-robin": round_robin}


def serve(
    load: Load, servers: Sequence[Server], recorder: Recorder, *, router: Router = least_loaded,
    progress: Callable[[int, float], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Serve all requests of a load; `progress` is called with the finished requests and the simulated seconds."""
    steps: list[tuple[float, int, int]] = []  # end, order of its start, server
    started = 0
    idle = set(range(len(servers)))
    clock = now = 0.0  # of the last arrival, and of the last event
    sent = 0

    def submit(number: int) -> None:
        where = router(servers, number)
        recorder.arrived(number, now)
        servers[where].submit(number)

    def begin(index: int) -> None:
        nonlocal started
        seconds = servers[index].begin()
        if seconds is None:
            idle.add(index)
            return
        recorder.began(servers[index].admitted, now)
        idle.discard(index)
        heappush(steps, (now + seconds, started, index))
        started += 1

    if load.concurrency is not None:
        while sent < min(load.concurrency, load.count):
            submit(sent)
            sent += 1
        for index in sorted(idle):
            begin(index)
    while True:
        arrival = load.request(sent).arrival if load.concurrency is None and sent < load.count else math.inf
        if arrival is math.inf and not steps:
            return
        due = clock + (arrival - clock)  # as a timeout of an event simulator adds it
        if not steps or due <= steps[0][0]:
            clock = now = max(due, now)
            while sent < load.count and load.request(sent).arrival == arrival:
                submit(sent)
                sent += 1
            for index in sorted(idle):
                begin(index)
            continue
        now, _, index = heappop(steps)
        server = servers[index]
        record, finished = server.end()
        recorder.step(record, server.first, server.continued, finished, now, index)
        if load.concurrency is not None:
            for _ in finished:
                if sent < load.count:
                    submit(sent)
                    sent += 1
        begin(index)
        if finished:
            if load.concurrency is not None:
                for other in sorted(idle):
                    begin(other)
            progress(recorder.finished, now)
