"""Simulated time: SimPy's clock, with less to store for each event, and set forward without events where nothing else is due."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from heapq import heappush
from itertools import accumulate

from simpy import Environment
from simpy.events import NORMAL, Event


class _Call(Event):
    """An event that is sure to happen and has no value, as a timeout of SimPy, with less to store."""

    _ok, _value = True, None

    def __init__(self, callback: Callable[[Event], None]) -> None:
        self.callbacks = [callback]


class SimulatedClock(Environment):
    """SimPy's clock, which can be set forward while no event is due."""

    def __init__(self) -> None:
        super().__init__()
        self.busy = self._queue
        """The events that are due."""
        self._latest_time = -1.0
        self._latest: Event  # scheduled after all others

    def call_later(self, seconds: float, callback: Callable[[Event], None]) -> None:
        """Schedule a call, as the callback of a timeout."""
        self._latest = event = _Call(callback)
        self._latest_time = time = self._now + seconds
        heappush(self._queue, (time, NORMAL, next(self._eid), event))

    def call_together(self, seconds: float, callback: Callable[[Event], None]) -> None:
        """Schedule a call, with the event that was scheduled last if it is due at the same time.

        Nothing can happen between two such events, since events of equal times happen in the order in which they were scheduled.
        """
        if self._now + seconds == self._latest_time and self._latest.callbacks is not None:
            self._latest.callbacks.append(callback)
        else:
            self.call_later(seconds, callback)

    def go_on_each(self, seconds: Iterable[float]) -> list[float]:
        """Set the clock forward by these times, one after another; return the time before the first, and the time after each."""
        times = [*accumulate(seconds, initial=self._now)]
        self._now = times[-1]
        return times

    def go_to(self, time: float) -> None:
        """Set the clock forward."""
        self._now = time

    def go_on(self, seconds: float) -> float:
        """Set the clock forward, as a timeout would; return the time between, which may differ from `seconds` by rounding."""
        before = self._now
        self._now = now = before + seconds
        return now - before
