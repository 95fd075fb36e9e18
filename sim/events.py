"""The simulator: interprets an algorithm on compute units and links, by SimPy's clock.

At equal times passes finish, then what they decide happens (verify, stop), then sub-processes start: births, and units changing hands,
wait for a flush that comes last at that time. A process that goes on keeps its unit ahead of all that wait for one.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from simpy import Environment
from simpy.core import EmptySchedule
from simpy.events import Event, Timeout

from model import checks
from model.latency import UnitCost
from model.steps import Adopt, Commit, Fork, Forward, Join, Read, Steps
from model.work import Cache
from model.world import output

LINKS = ("point-to-point", "shared")
STOPS = ("now", "layer", "pass")
_LAST = 2  # SimPy's priority of a flush: after all that is normal (1) at that time


@dataclass(frozen=True)
class Cluster:
    """Compute units and the links between them.

    `links`: one from the main process to each sub-process (`point-to-point`), or one for all that carries one transfer at a time
    (`shared`). `stop`: when a stopped process lets go of its unit: `now`, at the end of the `layer` or of the `pass` it is in.
    """

    units: int
    links: str = "point-to-point"
    stop: str = "now"

    def __post_init__(self) -> None:
        checks.whole("units", self.units, 1, checks.MAX_UNITS)
        checks.one_of("links", self.links, LINKS)
        checks.one_of("stop", self.stop, STOPS)


class Interval(NamedTuple):
    """A stretch of time for which a process held a unit, or a transfer a link (then `unit` is -1)."""

    unit: int
    start: float
    end: float
    what: str  # forward, dispatch, link, promotion
    process: int
    position: int  # of the last token of a pass; -1 where there is none
    first: int
    last: int
    fate: str  # kept, discarded (ended, not used), cancelled (stopped)


@dataclass
class Run:
    """What a simulated decoding took and did; times in the cost model's unit."""

    latency: float = 0.0
    busy: float = 0.0
    peak_units: int = 0
    passes: int = 0
    tokens: list[int] = field(default_factory=list)
    commits: list[tuple[float, str, int]] = field(default_factory=list)  # time, kind, number of tokens
    intervals: list[Interval] = field(default_factory=list)


class Answers(Protocol):
    """Whoever answers reads: `model.world.World`, or a record of what real models said."""

    def read(self, step: Read) -> Any:
        """The answer to a read."""


def simulate(
    steps: Steps,
    tokens: int,
    cluster: Cluster,
    cost: UnitCost,
    world: Answers,
    *,
    per_layer: bool = False,
    record: bool = False,
) -> Run:
    """Decode until `tokens` tokens are out; the latency is the time of the last.

    A pass is one event, or with `per_layer` each of its layers is. `record` keeps every interval.

    >>> from model.algorithms import ppd
    >>> from model.world import World
    >>> choice = ppd.Parameters(layers=40, exit_layer=20, candidates=3)
    >>> run = simulate(ppd.decode(choice, [0], 3), 3, Cluster(4), UnitCost(40), World(1, 40, [True, False, True]))
    >>> run.latency, run.busy, run.peak_units  # d l - (d - d') matches = 100; k (d - d') l = 180 more
    (100.0, 280.0, 4)
    """
    return _Engine(cluster, cost, world, tokens, per_layer, record).run(steps)


class _Engine:
    """The state of one simulation: who holds which unit, who waits, who is about to be born."""

    def __init__(
        self, cluster: Cluster, cost: UnitCost, world: Answers, tokens: int, per_layer: bool, record: bool
    ) -> None:
        self.cluster, self.cost, self.world, self.wanted = cluster, cost, world, tokens
        self.per_layer, self.record = per_layer, record
        self.layer_times = [cost.span(layer, layer + 1) for layer in range(cost.layers)]
        self.env = Environment()
        self.holders: list[_Process | None] = [None] * cluster.units
        self.waiting: list[_Process] = []
        self.births: list[_Process] = []
        self.flush_due = self.done = False
        self.processes = self.active = 0
        self.link_free = 0.0
        self.result = Run()
        self.records: list[tuple[Interval, _Process | None]] = []

    def run(self, steps: Steps) -> Run:
        main = _Process(self, steps, None, 0)
        main.cache, main.kept = Cache(), True
        main.advance(None)
        step = self.env.step
        try:
            while not self.done:
                step()
        except EmptySchedule:
            raise RuntimeError("the algorithm came to a halt before it had put out all its tokens") from None
        result, result.latency = self.result, self.env.now
        for holder in self.holders:  # whatever still runs is cut off with the last token
            if holder is not None:
                holder.release("cancelled")
        result.intervals = [self._judged(row, process) for row, process in self.records]
        return result

    @staticmethod
    def _judged(row: Interval, process: _Process | None) -> Interval:
        unused = process is not None and not process.kept and row.fate == "kept"
        return row._replace(fate="discarded") if unused else row

    def commit(self, process: _Process, step: Commit) -> None:
        result, process.kept = self.result, True
        result.tokens.extend(step.tokens)
        result.commits.append((self.env.now, step.kind, len(step.tokens)))
        self.done = len(result.tokens) >= self.wanted

    # --- units ---

    def free_unit(self, process: _Process) -> int:
        """A free unit that the process may use, its own first, or -1."""
        holders, place = self.holders, process.place
        if place >= 0 and holders[place] is None:
            return place
        return holders.index(None) if not process.fixed and self.active < len(holders) else -1

    def release(self, unit: int) -> None:
        self.holders[unit] = None
        self.active -= 1
        if self.waiting:
            self.flush_later()

    def flush_later(self) -> None:
        if not self.flush_due:
            self.flush_due = True
            event = Event(self.env)
            event._ok = True
            event.callbacks.append(self.flush)  # type: ignore[union-attr]  # SimPy: None once processed
            self.env.schedule(event, _LAST)  # type: ignore[arg-type]  # an own, later priority

    def flush(self, _: Event) -> None:
        """Units that are free go to those that wait, in order of asking; then sub-processes are born."""
        self.flush_due = False
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for process in waiting:
                if not process.ended:
                    process.take_or_wait()
        births, self.births = self.births, []
        for process in births:
            if not process.ended:
                process.born()

    # --- links ---

    def send_out(self, subs: tuple[_Process, ...]) -> None:
        """Sub-processes travel to their units, and are born there."""
        if self.cost.link:
            for sub in subs:
                self.transfer(self.cost.link, "link", sub, lambda _, sub=sub: self.bear((sub,)))
        else:
            self.bear(subs)

    def bear(self, subs: tuple[_Process, ...]) -> None:
        self.births.extend(subs)
        self.flush_later()

    def transfer(self, seconds: float, what: str, process: _Process, arrived: Callable[[Event], None]) -> None:
        now = start = self.env.now
        if self.cluster.links == "shared":
            start = max(now, self.link_free)
            self.link_free = start + seconds
        if self.record:
            row = Interval(-1, start, start + seconds, what, process.index, -1, 0, 0, "kept")
            self.records.append((row, None))
        Timeout(self.env, start + seconds - now).callbacks.append(arrived)  # type: ignore[union-attr]


class _Process:
    """One process of the algorithm: its generator, its cache, the unit it holds, and whom to tell when it ends."""

    __slots__ = (
        "after", "body", "cache", "ended", "engine", "fixed", "index", "kept", "layer", "parent", "passed", "place", "seconds",
        "since", "step", "subs", "ticked", "unit", "value", "waiting", "watcher",
    )  # fmt: skip

    def __init__(self, engine: _Engine, body: Steps, parent: _Process | None, place: int | None) -> None:
        self.engine, self.body, self.parent = engine, body, parent
        self.index = engine.processes
        engine.processes += 1
        # A unit that the cluster does not have is any unit.
        self.fixed = place is not None and place < len(engine.holders)
        self.place = place if self.fixed and place is not None else -1
        self.cache: Cache | None = None
        self.ended = self.kept = False
        self.value: Any = None
        self.subs: tuple[_Process, ...] = ()
        self.watcher: _Process | None = None  # joined this process
        self.waiting = 0  # joined processes that have not ended
        self.unit = -1
        self.passed, self.ticked = self._passed, self._ticked  # bound once, handed to SimPy at every pass

    def born(self) -> None:
        parent, self.parent = self.parent, None
        self.cache = parent.cache.copy()  # type: ignore[union-attr]  # only the main process has no parent
        self.advance(None)

    def advance(self, answer: Any) -> None:
        """Send an answer, and carry out what the algorithm asks until something takes time."""
        engine, send = self.engine, self.body.send
        while True:
            try:
                step = send(answer)
            except StopIteration as end:
                self._end(end.value)
                return
            answer, kind = None, type(step)
            if kind is Forward:
                self.cache.write(step)  # type: ignore[union-attr]  # given at birth
                self._hold_for(engine.cost.forward(step), step, self._forwarded)
                return
            if kind is Read:
                answer = engine.world.read(step)
            elif kind is Commit:
                engine.commit(self, step)
                if engine.done:
                    return
            elif kind is Fork:
                answer = tuple([_Process(engine, *each) for each in zip(step.bodies, (self,) * len(step.bodies), step.units, strict=True)])
                self.subs = (*(sub for sub in self.subs if not sub.ended), *answer)
                seconds = engine.cost.dispatching(len(answer))
                if seconds:
                    self._hold_for(seconds, step, lambda subs=answer: self._dispatched(subs))
                    return
                engine.send_out(answer)
            elif kind is Join:
                for sub in step.tasks:
                    if not sub.ended:
                        sub.watcher = self
                        self.waiting += 1
                if self.waiting:
                    return
            elif kind is Adopt:
                sub = step.task
                sub.kept = True
                self.cache.adopt(sub.cache, "target", step.at, step.layers)  # type: ignore[union-attr]
                if engine.cost.promotion:
                    engine.transfer(engine.cost.promotion, "promotion", sub, lambda _, sub=sub: self.advance(sub.value))
                    return
                answer = sub.value
            else:
                for sub in step.tasks:
                    sub.stop()

    def _forwarded(self) -> None:
        self.advance(output(self.step))

    def _dispatched(self, subs: tuple[_Process, ...]) -> None:
        self.engine.send_out(subs)
        self.advance(subs)

    def _end(self, value: Any) -> None:
        self.value, self.ended, self.subs = value, True, ()
        watcher = self.watcher
        if watcher is not None and not watcher.ended:
            watcher.waiting -= 1
            if not watcher.waiting:
                watcher.advance(None)

    def stop(self) -> None:
        """End, with all that this process has started; let go of the unit as the cluster says."""
        if not self.ended:
            self.ended = True
            self.body.close()
            if self.unit >= 0:
                self._let_go()
        for sub in self.subs:
            sub.stop()

    # --- holding a unit ---

    def _hold_for(self, seconds: float, step: Any, after: Callable[[], None]) -> None:
        self.seconds, self.step, self.after = seconds, step, after
        self.take_or_wait()

    def take_or_wait(self) -> None:
        engine = self.engine
        unit = engine.free_unit(self)
        if unit < 0:
            engine.waiting.append(self)
            return
        self.unit = self.place = unit
        self.since = engine.env.now
        engine.holders[unit] = self
        engine.active += 1
        if engine.active > engine.result.peak_units:
            engine.result.peak_units = engine.active
        if engine.per_layer and type(self.step) is Forward and self.step.first < self.step.last:
            self.layer = self.step.first
            self._tick()
        else:
            Timeout(engine.env, self.seconds).callbacks.append(self.passed)  # type: ignore[union-attr]

    def _tick(self) -> None:
        """Start the next layer; the head belongs to the last."""
        engine, layer = self.engine, self.layer
        self.layer = layer + 1
        if self.layer < self.step.last:
            Timeout(engine.env, engine.layer_times[layer]).callbacks.append(self.ticked)  # type: ignore[union-attr]
        else:
            seconds = engine.layer_times[layer] + engine.cost.head(self.step)
            Timeout(engine.env, seconds).callbacks.append(self.passed)  # type: ignore[union-attr]

    def _ticked(self, _: Event) -> None:
        if self.unit >= 0:
            self._tick()

    def _passed(self, _: Event) -> None:
        if self.unit < 0:  # stopped, and its unit given back before
            return
        if self.ended:
            self.release("cancelled")
        else:
            self.release("kept")
            self.after()

    def release(self, fate: str) -> None:
        engine = self.engine
        now = engine.env.now
        engine.result.busy += now - self.since
        engine.result.passes += 1
        if engine.record:
            step, what = self.step, "dispatch"
            position = first = last = -1
            if type(step) is Forward:
                what, position, first, last = "forward", step.at + len(step.tokens) - 1, step.first, step.last
            row = Interval(self.unit, self.since, now, what, self.index, position, first, last, fate)
            engine.records.append((row, self))
        unit, self.unit = self.unit, -1
        engine.release(unit)

    def _let_go(self) -> None:
        engine, step = self.engine, self.step
        if engine.cluster.stop == "now":
            self.release("cancelled")
        elif engine.cluster.stop == "layer" and type(step) is Forward:
            depths, now = engine.cost.depths, engine.env.now
            # The first boundary between layers that is not behind us; in the head, the end of the pass.
            boundary = bisect_left(depths, depths[step.first] + now - self.since, step.first, step.last + 1)
            if boundary <= step.last:
                rest = max(self.since + depths[boundary] - depths[step.first] - now, 0.0)
                Timeout(engine.env, rest).callbacks.append(self.passed)  # type: ignore[union-attr]
