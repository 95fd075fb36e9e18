"""Discrete-event simulator: runs an algorithm on compute units and links, with SimPy's clock.

At equal times passes finish first, then their decisions take effect (verify, stop), then sub-processes start: starts and
assignments of free units are postponed until no other event is due at that time. A process that continues keeps its unit before
all waiting processes.

Two things save events or steps, and the run is the same to the last bit. A pass that nothing else can begin or end before is made
at once: the clock goes on to its end without an event. So are the passes of offers (`model.steps.Offer`), with their reads
(`sim.engine.passes_alone`). Passes that end at the same time share an event where no other event was scheduled between theirs
(`SimulatedClock.call_together`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

from simpy.core import EmptySchedule
from simpy.events import Event

from model.costs.step_costs import StepCosts
from model.interpret.account import Kind
from model.interpret.interpreter import Cache
from model.interpret.simulated_answers import Answers
from model.logs.spans import Span
from model.steps import (
    Adopt,
    CacheError,
    Commit,
    DraftChain,
    DraftLevels,
    DraftLimit,
    DraftRounds,
    EarlyRounds,
    Fork,
    Forward,
    Join,
    Lookup,
    NextTokens,
    Read,
    ReadEach,
    Steps,
    Stop,
    require_ended,
)
from sim.engine.cluster import Cluster
from sim.engine.known_passes import KnownPass
from sim.engine.passes_alone import PassesAlone
from sim.engine.simulated_run import Run as Run


def simulate(
    steps: Steps,
    tokens: int,
    cluster: Cluster,
    cost: StepCosts,
    world: Answers,
    *,
    per_layer: bool = False,
    record: bool = False,
) -> Run:
    """Decode until `tokens` tokens are generated; the latency is the time of the last token.

    Times come from `cost`: per kind of pass if it is `uniform`, else per pass, by its position. A pass is one event; with
    `per_layer` each of its layers is one, and units do not slow each other down. `record` keeps every interval.

    >>> from model.methods.ppd import algorithm as ppd
    >>> from model.costs.layer_times import UnitCost
    >>> from model.interpret.simulated_answers import World
    >>> choice = ppd.Parameters(layers=40, exit_layer=20, candidates=3)
    >>> run = simulate(ppd.decode(choice, [0], 3), 3, Cluster(4), UnitCost(40), World(1, 40, [True, False, True]))
    >>> run.latency, run.busy, run.peak_units  # d l - (d - d') matches = 100; k (d - d') l = 180 more
    (100.0, 280.0, 4)
    """
    return _Engine(cluster, cost, world, tokens, per_layer, record).run(steps)


class _Engine(PassesAlone):
    """State of one simulation: the process on each unit, waiting processes, and processes about to start."""

    def __init__(
        self, cluster: Cluster, cost: StepCosts, world: Answers, tokens: int, per_layer: bool, record: bool
    ) -> None:
        super().__init__(cluster, cost, world, tokens)
        self.per_layer, self.record = per_layer, record
        self.reading = cost.reading if cost.reads_take_time else None
        self.among = cost.slowdown_among if cost.units_share and not per_layer else None
        self.sharing: list[_Process] = []  # the processes that slow each other down
        self.plain = not per_layer and not record and self.among is None  # passes may be made at once
        self.holders: list[_Process | None] = [None] * cluster.units
        self.waiting: list[_Process] = []
        self.starting: list[_Process] = []
        self.changed = self.flushing = False
        self.active = 0
        self.link_free = self.waiting_time = 0.0
        self.records: list[tuple[Span, _Process | None]] = []
        self.numbers: dict[_Process, int] = {}  # of the processes on record

    def run(self, steps: Steps) -> Run:
        main = _Process(self, steps, None, 0)
        main.cache, main.kept = Cache(), True
        self.world.written, self.world.generated = self.result.tokens, self.result.sequences
        main.advance(None)
        env = self.env
        step, peek = env.step, env.peek
        try:
            while not self.done:
                if self.changed and peek() > env.now:
                    self.flush()
                else:
                    step()
        except EmptySchedule:
            raise RuntimeError("the algorithm came to a halt before it had generated all its tokens") from None
        for process in self.waiting:
            process.end_wait()
        for holder in self.holders:  # passes still running end with the last token
            if holder is not None:
                holder.release("cancelled")
        result = self.result
        result.latency, result.busy, result.peak_units, result.account = self.env.now, self.busy, self.peak, self.account
        result.waiting_time, result.draft_time, result.target_time = self.waiting_time, self.draft_time, self.target_time
        for key, known in self.known.items():
            if known.passes:
                self.account.include_passes(Kind._make(key[:5]), known.passes, known.attended, known.read)
        result.intervals = [self._judged(row, process) for row, process in self.records]
        return result

    @staticmethod
    def _judged(row: Span, process: _Process | None) -> Span:
        unused = process is not None and not process.kept and row.fate == "kept"
        return row._replace(fate="discarded") if unused else row

    def commit(self, process: _Process, step: Commit) -> None:
        result, tokens = self.result, step.tokens
        process.kept = True
        result.tokens[len(result.tokens) - step.back :] = tokens
        if step.sequence is not None:
            result.sequences.setdefault(step.sequence, []).extend(tokens)
        result.commits.append((self.env.now, step.kind, len(tokens)))
        if step.drafted is not None:
            result.rounds[len(tokens) - step.back - 1, step.drafted] += 1
        self.done = len(result.tokens) >= self.wanted

    def number(self, process: _Process) -> int:
        return self.numbers.setdefault(process, len(self.numbers))

    # --- units ---

    def free_unit(self, process: _Process) -> int:
        """Return a free unit that the process may use, other than its own, or -1."""
        return self.holders.index(None) if not process.fixed and self.active < len(self.holders) else -1

    def flush(self) -> None:
        """Assign free units to waiting processes, first come first served; then start sub-processes."""
        self.changed, self.flushing = False, True
        if self.waiting:
            waiting, self.waiting = self.waiting, []
            for process in waiting:
                if not process.ended:
                    process.take_or_wait()
        starting, self.starting = self.starting, []
        for process in starting:
            if not process.ended:
                process.begin()
        self.flushing = False

    def share(self) -> None:
        """Reschedule all running passes: after a unit is taken or released they continue at another speed."""
        assert self.among is not None
        now, factor = self.env.now, self.among(len(self.sharing) - 1)
        for process in self.sharing:
            process.left -= (now - process.paced_at) / process.factor
            process.paced_at, process.factor = now, factor
            process.turn += 1
            self.env.call_later(max(process.left, 0.0) * factor, partial(process.due, process.turn))

    # --- links ---

    def send_out(self, subs: Sequence[_Process]) -> None:
        """Send sub-processes over links to their units, and start them there."""
        if self.cost.link:
            near = [sub for sub in subs if sub.near]
            for sub in subs:
                if not sub.near:
                    self.transfer(self.cost.link, "link", sub, partial(self.arrive, (sub,)))
            self.launch(near)
        else:
            self.launch(subs)

    def arrive(self, subs: Sequence[_Process], _: Event) -> None:
        self.launch(subs)

    def launch(self, subs: Sequence[_Process]) -> None:
        self.starting.extend(subs)
        self.changed = True

    def transfer(self, seconds: float, what: str, process: _Process, arrived: Callable[[Event], None]) -> None:
        now = start = self.env.now
        if self.cluster.links == "shared":  # a transfer is not cancelled, even if its receiver is stopped
            start = max(now, self.link_free)
            self.waiting_time += start - now
            self.link_free = start + seconds
        if self.record:
            row = Span(-1, start, start + seconds, what, self.number(process), -1, 0, 0, "kept")
            self.records.append((row, None))
        self.env.call_later(start + seconds - now, arrived)

class _Reading(NamedTuple):
    """A read that takes time, with its answer."""

    answer: Any


class _Process:
    """One process of the algorithm: its generator, its cache, its unit, and the process that waits for its end."""

    # Class attributes, since most processes never change them.
    ended = stopped = kept = False
    value: Any = None  # its return value
    unit = -1
    layer = 0  # the next layer to run, where a pass is one event per layer
    asked: float | None = None  # start of its wait for a unit
    waiting = 0  # joined processes that have not ended
    watcher: _Process | None = None  # joined this process
    subs: Sequence[_Process] = ()
    joined: Sequence[_Process] = subs  # those joined last
    source: _Process | None = None  # the process whose rows it started with; kept on record only
    # Set at the start, and with every pass or dispatch (for a dispatch `step` is the sub-processes sent out).
    cache: Cache
    step: Forward | _Reading | Sequence[_Process] = ()
    known: KnownPass
    seconds: float
    since: float
    layer_times: list[float]
    # Where units slow each other down: remaining time if alone, when it was computed, slowdown factor, and the valid schedule.
    left: float
    paced_at: float
    factor: float
    turn = 0

    def __init__(self, engine: _Engine, body: Steps | Forward, parent: _Process | None, place: int | None) -> None:
        self.engine, self.body, self.parent = engine, body, parent
        # A unit number beyond the cluster's means any unit.
        self.place = -1 if place is None or place >= len(engine.holders) else place
        self.fixed = self.place >= 0

    @property
    def near(self) -> bool:
        """True if it runs on its parent's unit, where its initial cache is."""
        return self.fixed and self.parent is not None and self.parent.place == self.place

    def begin(self) -> None:
        parent = self.parent
        assert parent is not None
        if type(self.body) is Forward:
            # A single pass needs no separate cache: it reads its parent's, and the step has the rows that it adds.
            parent.cache.require(self.body)
            self._forward(self.body)
        else:
            self.cache = parent.cache.copy()
            if self.engine.record:
                self.source = parent
            self.advance(None)

    def _heirs(self, bodies: Any, units: Any, heirs_of: Any) -> list[_Process]:
        """Create sub-processes that start with the caches of ended ones."""
        for old in heirs_of:
            if old is not None:
                require_ended(old)
                old.keep()
        each = zip(bodies, units, heirs_of, strict=True)
        return [_Process(self.engine, body, old or self, place) for body, place, old in each]

    def keep(self) -> None:
        """Note that its results are used, and the rows that it started with."""
        used: _Process | None = self
        while used is not None and not used.kept:
            used.kept, used = True, used.source

    def _forward(self, step: Forward) -> None:
        self.step, unit = step, step.unit
        self.known = known = self.engine.known_pass(step)
        self.seconds = known.seconds
        if self.engine.per_layer:
            self.layer = step.layers.first
        if unit is not None and unit != self.place:
            self._move(unit)
        else:
            self.take_or_wait()

    def _move(self, unit: int) -> None:
        """Continue on another unit, after its state has been sent over a link. A unit beyond the cluster's means any unit."""
        engine = self.engine
        self.place, moved = (unit, self.place >= 0) if unit < len(engine.holders) else (self.place, False)
        engine.account.moves += moved
        if moved and engine.cost.link:
            engine.transfer(engine.cost.link, "link", self, self._moved)
        else:
            self.take_or_wait()

    def _moved(self, _: Event) -> None:
        if not self.ended:
            self.take_or_wait()

    def advance(self, answer: Any) -> None:
        """Send an answer to the algorithm, and execute its steps until one takes time."""
        assert not isinstance(self.body, Forward)
        engine, send = self.engine, self.body.send
        while True:
            try:
                step: Any = send(answer)
            except StopIteration as end:
                self._end(end.value)
                return
            answer, kind = None, type(step)
            if kind is Forward:
                self.cache.write(step)
                if self._alone(step):
                    engine.pass_alone(step)
                    answer = step  # without tensors, the step itself is the output of a pass
                    continue
                self._forward(step)
                return
            if kind is Read:
                answer = engine.world.read(step)
                if engine.reading is not None and (seconds := engine.reading(step)):
                    self.step, self.seconds = _Reading(answer), seconds
                    self.take_or_wait()
                    return
            elif kind is Commit:
                engine.commit(self, step)
                if engine.done:
                    return
            elif kind is ReadEach:
                answer = None if engine.reading is not None else engine.world.read_each(step)
            elif kind is DraftChain:
                if engine.reading is None and self._alone(step.first):
                    answer = engine.chain_alone(self.cache, step)
            elif kind is DraftRounds:
                first = step.first
                if engine.reading is None and (type(first) is Lookup or self._alone(first)) and self._alone(step.verify):
                    answer = engine.rounds_alone(self.cache, step)
                    if engine.done:
                        return
            elif kind is NextTokens:
                if engine.reading is None and self._alone(step.first):
                    answer = engine.tokens_alone(self.cache, step)
                    if engine.done:
                        return
            elif kind is EarlyRounds:
                if engine.reading is None and self._alone(step.first):
                    answer = engine.rounds_ahead_alone(self.place, self.cache, step)
                    if engine.done:
                        return
            elif kind is DraftLimit:
                answer = step.longest
            elif kind is Lookup:
                answer = engine.world.look_up(step)
            elif kind is Fork:
                bodies, units, heirs_of = step
                if heirs_of:
                    answer = self._heirs(bodies, units, heirs_of)
                else:
                    answer = [_Process(engine, body, self, place) for body, place in zip(bodies, units, strict=True)]
                if self.subs is self.joined:  # all have ended
                    self.subs = answer
                else:
                    self.subs = [*[sub for sub in self.subs if not sub.ended], *answer]
                seconds = engine.dispatching(len(answer))
                if seconds:
                    self.step, self.seconds = answer, seconds
                    self.take_or_wait()
                    return
                engine.send_out(answer)
            elif kind is Join:
                self.joined = step.tasks
                for sub in step.tasks:
                    if not sub.ended:
                        sub.watcher = self
                        self.waiting += 1
                if self.waiting:
                    return
                answer = self._gathered()
            elif kind is Adopt:
                sub = step.task
                require_ended(sub)
                sub.kept = True
                made, value = (sub.step, sub.value) if step.hypothesis is None else sub.alone(step.hypothesis)
                self.cache.adopt(made, step.at, step.layers)
                engine.account.adoptions += 1
                engine.account.adopted_rows += step.layers
                if engine.cost.promotion:
                    engine.transfer(engine.cost.promotion, "promotion", sub, partial(self._adopted, value))
                    return
                answer = value
            elif kind is Stop:
                for sub in step.tasks:
                    sub.stop()
            else:  # an offer that is always declined
                assert kind is DraftLevels

    def _alone(self, step: Forward) -> bool:
        """True if nothing else can begin or end before this pass ends."""
        engine = self.engine
        return (
            engine.plain and not (engine.active or engine.env.busy or engine.changed or engine.flushing)
            and self.place >= 0 and (step.unit is None or step.unit == self.place)
        )  # fmt: skip

    def _adopted(self, value: Any, _: Event) -> None:
        self.advance(value)

    def _end(self, value: Any) -> None:
        self.value, self.ended, self.subs, self.parent = value, True, (), None
        watcher = self.watcher
        if watcher is not None and not watcher.ended:
            watcher.waiting -= 1
            if not watcher.waiting:
                watcher.advance(watcher._gathered())

    def _gathered(self) -> list[Any]:
        """What the joined processes have returned. What a process returns is used; single passes are used if they are adopted."""
        if self.engine.record:
            for sub in self.joined:
                if sub.value is not None and not isinstance(sub.body, Forward):
                    sub.keep()
        return [sub.value for sub in self.joined]

    def stop(self) -> None:
        """End this process and all that it has started; release its unit as `stop` of the cluster says."""
        if not self.ended:
            self.ended = self.stopped = True
            if not isinstance(self.body, Forward):
                self.body.close()
            if self.unit >= 0:
                self._let_go()
            else:
                self.end_wait()
        for sub in self.subs:
            sub.stop()

    # --- holding a unit ---

    def take_or_wait(self) -> None:
        """Occupy a unit for the time of the step, or wait until one is free."""
        engine, unit = self.engine, self.place
        if unit < 0 or engine.holders[unit] is not None:
            unit = engine.free_unit(self)
            if unit < 0:
                if self.asked is None:
                    self.asked = engine.env.now
                engine.waiting.append(self)
                return
            self.place = unit
        if self.asked is not None:
            self.end_wait()
        self.unit = unit
        engine.holders[unit] = self
        engine.active = active = engine.active + 1
        if active > engine.peak:
            engine.peak = active
        env = engine.env
        self.since = env.now
        if engine.per_layer and type(step := self.step) is Forward and step.layers.first < step.layers.last:
            self.layer = step.layers.first
            if self.known.layer_times is None or engine.by_position:
                self.known.layer_times = engine.cost.layer_times_of(step)
            self.layer_times = self.known.layer_times
            self._tick()
        elif engine.among is not None:
            self.left, self.paced_at, self.factor = self.seconds, env.now, 1.0
            engine.sharing.append(self)
            engine.share()
        else:
            env.call_together(self.seconds, self._passed)

    def alone(self, hypothesis: int) -> tuple[Forward, Any]:
        """Last pass and output of one of its hypotheses."""
        assert isinstance(self.step, Forward)
        return self.step.alone(hypothesis), self.value.alone(hypothesis)

    def end_wait(self) -> None:
        """End the wait for a unit: the process has one, or no longer needs one."""
        if self.asked is not None:
            self.engine.waiting_time += self.engine.env.now - self.asked
            self.asked = None

    def due(self, turn: int, event: Event) -> None:
        """End the current step, unless it has been rescheduled since this event was made."""
        if turn == self.turn:
            self._passed(event)

    def _tick(self, _: Event | None = None) -> None:
        """Start the next layer; the head is part of the last."""
        if self.unit < 0:  # stopped
            return
        engine, layer, parent = self.engine, self.layer, self.parent
        step: Any = self.step  # a pass: dispatches have no layers
        first, last = step.layers.first, step.layers.last
        if parent is not None and parent.layer <= layer and layer > first:
            parent.must_have_run(layer - 1, step)
        self.layer = layer + 1
        seconds = self.layer_times[layer - first]
        engine.env.call_later(seconds, self._tick if layer + 1 < last else self._passed)

    def must_have_run(self, layer: int, follower: Forward) -> None:
        """Check that this process has run a layer whose KV cache row a sub-process reads."""
        step = self.step
        if not isinstance(step, Forward) or step.role != follower.role or step.end != follower.at:
            return
        if self.layer <= layer + 1:
            raise CacheError(f"layer {layer} of position {follower.at - 1} was followed before it had run")

    def _passed(self, _: Event) -> None:
        engine = self.engine
        if self.unit < 0 or engine.done:  # stopped, with its unit released earlier; or the last token came with the same event
            return
        if self.ended:
            self.release("cancelled")
            return
        self.release("kept")
        step = self.step
        if isinstance(step, Forward):
            if engine.per_layer:
                self.layer += 1  # all layers have run
            if step is self.body:
                self._end(step)
            else:
                self.advance(step)  # without tensors, the step itself is the output of a pass
        elif isinstance(step, _Reading):
            self.advance(step.answer)
        else:
            engine.send_out(step)
            self.advance(step)

    def release(self, fate: str) -> None:
        engine, unit = self.engine, self.unit
        now = engine.env.now
        step, share = self.step, 1.0
        busy = now - self.since
        if type(step) is Forward:
            known = self.known
            if known.is_target:
                engine.target_time += busy - known.overhead
            else:
                share = engine.draft_devices
                engine.draft_time += busy - known.overhead
            known.count(step)
        engine.busy += busy * share
        if engine.record:
            self._record(fate, now)
        self.unit = -1
        if engine.among is not None:
            self.turn += 1
            engine.sharing.remove(self)
            engine.share()
        engine.holders[unit] = None
        engine.active -= 1
        if engine.waiting:
            engine.changed = True

    def _record(self, fate: str, now: float) -> None:
        step, number = self.step, self.engine.number(self)
        if isinstance(step, Forward):
            layers, end = step.layers, step.end
            depth = end - step.at if step.tree or step.batch is not None else 0
            more = layers.first, layers.last, fate, step.role, len(step.tokens), depth, layers.gaps, layers.kv_only
            row = Span(self.unit, self.since, now, "forward", number, end - 1, *more)
        else:
            what = "read" if isinstance(step, _Reading) else "dispatch"
            row = Span(self.unit, self.since, now, what, number, -1, -1, -1, fate)
        self.engine.records.append((row, self))

    def _let_go(self) -> None:
        engine, step = self.engine, self.step
        if engine.cluster.stop == "now":
            self.release("cancelled")
        elif engine.cluster.stop == "layer" and isinstance(step, Forward):
            depths = [0.0, *accumulate(engine.cost.layer_times_of(step._replace(heads=0)))]
            now = engine.env.now
            # The next boundary between layers (up to rounding); within the head, the end of the pass.
            elapsed = (now - self.since) * (1 - 1e-12)
            boundary = bisect_left(depths, elapsed)
            if boundary < len(depths):
                rest = max(self.since + depths[boundary] - now, 0.0)
                engine.env.call_later(rest, self._passed)
