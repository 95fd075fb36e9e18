"""Servers in SimPy: arrivals, replicas and their steps as events.

Arrivals precede ends of steps of the same time, so that a step that begins then sees them. A server that sleeps and is given a
request begins before other steps of that time end.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any

from simpy import Environment
from simpy.events import URGENT, Event

from model.serving.fast_server import Router, least_loaded
from model.serving.loads import Load
from model.serving.records.recorder import Recorder
from model.serving.server import Server


def serve(
    load: Load, servers: Sequence[Server], recorder: Recorder, *, router: Router = least_loaded,
    progress: Callable[[int, float], None] = lambda *_: None,
) -> None:  # fmt: skip
    """Serve all requests of a load; see `model.serving.fast_server.serve`, which does the same without events."""
    _Service(load, servers, recorder, router, progress).run()


class _Service:
    def __init__(
        self, load: Load, servers: Sequence[Server], recorder: Recorder, router: Router, progress: Callable[[int, float], None]
    ) -> None:
        self.load, self.servers, self.recorder, self.router, self.progress = load, servers, recorder, router, progress
        self.env = Environment()
        self.asleep: dict[int, Event] = {}
        self.sent = 0

    def run(self) -> None:
        if self.load.concurrency is None:
            self.env.process(self.arrivals())
        else:
            self.send(min(self.load.concurrency, self.load.count))
        for index in range(len(self.servers)):
            self.env.process(self.replica(index))
        self.env.run()

    def send(self, until: int) -> None:
        """Submit requests up to a number, and wake servers that have nothing to do."""
        while self.sent < until:
            self.recorder.arrived(self.sent, self.env.now)
            self.servers[self.router(self.servers, self.sent)].submit(self.sent)
            self.sent += 1

    def wake(self) -> None:
        for index in sorted(self.asleep):
            if self.servers[index].load:
                self._soon(self.asleep.pop(index), 0.0)

    def _soon(self, event: Event, delay: float) -> None:
        """Let an event happen before all ends of steps of its time."""
        event._ok, event._value = True, None
        self.env.schedule(event, priority=URGENT, delay=delay)

    def arrivals(self) -> Generator[Event, Any, None]:
        env, load = self.env, self.load
        while self.sent < load.count:
            arrival = load.request(self.sent).arrival
            due = Event(env)
            self._soon(due, arrival - env.now)
            yield due
            last = self.sent
            while last < load.count and load.request(last).arrival == arrival:
                last += 1
            self.send(last)
            self.wake()

    def replica(self, index: int) -> Generator[Event, Any, None]:
        env, server, load = self.env, self.servers[index], self.load
        while True:
            seconds = server.begin()
            if seconds is None:
                self.asleep[index] = Event(env)
                yield self.asleep[index]
                continue
            self.recorder.began(server.admitted, env.now)
            yield env.timeout(seconds)
            record, finished = server.end()
            self.recorder.step(record, server.first, server.continued, finished, env.now, index)
            if load.concurrency is not None:
                self.send(min(self.sent + len(finished), load.count))
                self.wake()
            if finished:
                self.progress(self.recorder.finished, env.now)
