"""Discrete-event simulator: runs an algorithm on compute units and links, with SimPy's clock.

At equal times passes finish first, then their decisions take effect (verify, stop), then sub-processes start: starts and
assignments of free units are postponed until no other event is due at that time. A process that continues keeps its unit before
all waiting processes.

Two things save events or steps, and the run is the same to the last bit. A pass that nothing else can begin or end before is made
at once (`_Engine.pass_alone`): the clock goes on to its end without an event. So are the passes of offers (`model.steps.Offer`),
with their reads (`_Engine.chain_alone` and the methods after it). Passes that end at the same time share an event where no other
event was scheduled between theirs (`SimulatedClock.call_together`).
"""

from __future__ import annotations

import operator
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate, groupby, repeat
from typing import Any, NamedTuple

from simpy.core import EmptySchedule
from simpy.events import Event

from model.costs.step_costs import StepCosts, position_of
from model.interpret.account import Account, Kind
from model.interpret.interpreter import Cache
from model.interpret.simulated_answers import Answers
from model.logs.spans import Span
from model.steps import (
    Adopt,
    CacheError,
    Commit,
    DraftChain,
    DraftedChain,
    DraftLimit,
    DraftRounds,
    EarlyRounds,
    Features,
    Fork,
    Forward,
    Join,
    LayerSpan,
    Lookup,
    NextTokens,
    Read,
    ReadEach,
    Steps,
    require_ended,
)
from sim.engine.cluster import Cluster
from sim.engine.known_passes import KnownPass, PassKey, key_of
from sim.engine.simulated_clock import SimulatedClock


@dataclass
class Run:
    """Result of a simulated decoding; times in the unit of the cost model."""

    latency: float = 0.0
    busy: float = 0.0
    peak_units: int = 0
    account: Account = field(default_factory=Account)
    """Passes by kind, and transfers."""
    tokens: list[int] = field(default_factory=list)
    sequences: dict[int, list[int]] = field(default_factory=dict)
    """Generated tokens of each sequence of a batch, where sequences commit separately."""
    commits: list[tuple[float, str, int]] = field(default_factory=list)  # time, kind, number of tokens
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of rounds by (accepted, drafted) tokens."""
    intervals: list[Span] = field(default_factory=list)
    draft_time: float = 0.0
    """Busy time of passes of models other than the target, without overheads of engine steps."""
    target_time: float = 0.0
    """The same for the target."""
    waiting_time: float = 0.0
    """Waiting time of processes for units and of transfers for links, summed."""

    @property
    def passes(self) -> int:
        """Passes of all models."""
        return self.account.passes

    @property
    def passes_of(self) -> Counter[str]:
        """Passes of each model."""
        return self.account.passes_of


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


class _Engine:
    """State of one simulation: the process on each unit, waiting processes, and processes about to start."""

    def __init__(
        self, cluster: Cluster, cost: StepCosts, world: Answers, tokens: int, per_layer: bool, record: bool
    ) -> None:
        self.cluster, self.cost, self.world, self.wanted = cluster, cost, world, tokens
        self.per_layer, self.record = per_layer, record
        self.dispatch_times: dict[int, float] = {}
        self.by_position, self.tabulated, self.draft_devices = not cost.uniform, cost.tabulated, cost.draft_devices
        self.reading = cost.reading if cost.reads_take_time else None
        self.among = cost.slowdown_among if cost.units_share and not per_layer else None
        self.sharing: list[_Process] = []  # the processes that slow each other down
        self.known: dict[PassKey, KnownPass] = {}
        self.tables: dict[tuple[Any, ...], list[float]] = {}  # of passes by position, where they depend on it
        self.env = SimulatedClock()
        self.plain = not per_layer and not record and self.among is None  # passes may be made at once
        self.holders: list[_Process | None] = [None] * cluster.units
        self.waiting: list[_Process] = []
        self.starting: list[_Process] = []
        self.changed = self.done = self.flushing = False
        self.active = self.peak = 0
        self.account = Account()
        self.busy = self.link_free = self.waiting_time = self.draft_time = self.target_time = 0.0
        self.result = Run()
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

    def dispatching(self, processes: int) -> float:
        """Time of starting this number of sub-processes."""
        if processes not in self.dispatch_times:
            self.dispatch_times[processes] = self.cost.dispatching(processes)
        return self.dispatch_times[processes]

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

    # --- passes ---

    def known_pass(self, step: Forward) -> KnownPass:
        """Return what is known of passes of this kind, with the time of this one."""
        key = key_of(step)
        known = self.known.get(key)
        if known is None:
            self.known[key] = known = KnownPass(self.cost, step, key)
        if self.by_position:
            known.seconds = self.seconds_of(step, key)
        return known

    def seconds_of(self, step: Forward, key: PassKey) -> float:
        """Time of a pass at its position, from a table of all positions if there can be one."""
        return self.table(step, key, position_of(step))[position_of(step)] if self.tabulated else self.cost.forward(step)

    def table(self, step: Forward, key: PassKey, last: int) -> list[float]:
        """Times of passes like this one at positions 0, 1, ..., at least up to `last`."""
        batch = step.batch
        more = key, step.joins, bool(step.tree), step.context_budget, None if batch is None else batch.heads
        times = self.tables.get(more)
        if times is None or last >= len(times):
            self.tables[more] = times = self.cost.times_by_position(step, max(2 * last, self.wanted) + 1)
        return times

    def pass_alone(self, step: Forward) -> None:
        """Make a pass without an event, while no event is due and no process waits or starts.

        Then no process holds a unit, and none can stop this one.
        """
        known = self.known_pass(step)
        self.add_each((known,), (self.env.go_on(known.seconds),))
        self.peak = self.peak or 1
        known.count(step)

    def chain_alone(self, cache: Cache, step: DraftChain) -> DraftedChain | None:
        """Make a chain of passes as `pass_alone` does, if its reads can be answered together."""
        drafted = self.world.chain(step)
        if drafted is None:
            return None
        first, tokens = step.first, drafted.tokens
        rest = len(tokens) + drafted.unsure - 1  # passes after the first, each over the token that the one before predicted
        if not self.tabulated or first.context_budget is not None or first.layers.gaps:
            cache.write(first)
            self.pass_alone(first)
            for word in _later_passes(first, tokens[:rest]):
                cache.write(word)
                self.pass_alone(word)
        elif len(first.tokens) == 1:
            known, times = self.count_alike(cache, first, rest + 1)
            self.passes_alone([known] * len(times), times)
        else:
            cache.write(first)
            self.pass_alone(first)
            if rest:
                known, times = self.count_alike(cache, next(_later_passes(first, tokens)), rest)
                self.passes_alone([known] * rest, times)
        return drafted

    def rounds_alone(self, cache: Cache, step: DraftRounds) -> Sequence[int] | None:
        """Make rounds as `pass_alone` makes their passes, if their reads can be answered together."""
        verify, result = step.verify, self.result
        first = step.first if isinstance(step.first, Forward) else None  # a lookup makes no passes
        usual = self.tabulated and (first is None or (first.context_budget is None and not first.layers.gaps))
        rounds = self.world.draft_rounds(step) if usual and step.tokens == self.wanted - len(result.tokens) else None
        if rounds is None:
            return None
        last = verify.at + step.tokens + step.length
        drafts = checks = _AlikePasses(self, verify, last, verified=True)
        at, read, again = verify.at, 0, False  # positions of the last token, and of the first that the next draft reads
        if first is not None:
            cache.write(first)
            drafts, read, again = _AlikePasses(self, first, last), first.at, type(first.state) is Features
        cache.write(verify)
        made: list[KnownPass] = []
        seconds: list[float] = []
        ends = []  # number of passes up to the end of each round
        for drafted, accepted, unsure in rounds:
            passes = 0 if first is None else drafted + unsure
            if passes:
                known, times = drafts.begun_at(at + 1 - read, read)
                made.append(known)
                seconds.append(times[read])
                if passes > 1:
                    known, times = drafts.begun_at(1, at + 1, passes - 1)
                    made += [known] * (passes - 1)
                    seconds += times[at + 1 : at + passes]
                read = at + passes
            known, times = checks.begun_at(drafted + 1, at)
            made.append(known)
            seconds.append(times[at])
            ends.append(len(made))
            at += accepted + 1
            read = at - accepted if again else min(read, at)
        clock = self.passes_alone(made, seconds)
        rejected, doubted, otherwise = step.kinds
        for end, (drafted, accepted, unsure) in zip(ends, rounds, strict=True):
            kind = rejected if accepted < drafted else doubted if unsure else otherwise
            result.commits.append((clock[end], kind, accepted + 1))
        result.rounds.update(Counter([(accepted, drafted) for drafted, accepted, _ in rounds]))
        tokens = range(verify.at + 1, at + 1)
        result.tokens += tokens
        self.done = True
        return tokens

    def tokens_alone(self, cache: Cache, step: NextTokens) -> Sequence[int] | None:
        """Make passes as `pass_alone` does, with the commit after each, if their reads can be answered together."""
        tokens = self.world.next_tokens(step) if self.tabulated else None
        if tokens is None:
            return None
        first, result, at = step.first, self.result, step.first.at
        tokens = tokens[: self.wanted - len(result.tokens)]
        made: list[KnownPass] = []
        seconds: list[float] = []
        for span, alike in groupby(step.layers[: len(tokens)]):
            word = Forward(first.role, (0,), at + len(made), span, None, first.heads, first.unit) if made else first
            known, times = self.count_alike(cache, word, len([*alike]))
            made += [known] * len(times)
            seconds += times
        result.commits += zip(self.passes_alone(made, seconds)[1:], repeat(step.kind), repeat(1))
        result.tokens += tokens
        self.done = len(result.tokens) >= self.wanted
        return tokens

    def rounds_ahead_alone(self, place: int, cache: Cache, step: EarlyRounds) -> Sequence[int] | None:
        """Make rounds without events, if the passes of each round's sub-processes begin at once, each on a unit of its own."""
        first, barrier, result = step.first, step.barrier, self.result
        count, last = len(step.units), first.at + step.tokens - 1
        usual = self.tabulated and step.tokens == self.wanted - len(result.tokens) and (barrier or self.cluster.stop == "now")
        several = count == len({place, *step.units}) - 1 and min(step.units) >= 0 and max(step.units) < len(self.holders)
        if not (usual and several) or self.cost.link or self.cost.promotion or self.dispatching(count):
            return None
        matches, stages = self.world.early_matches(step), _RoundsAhead.by_depth(self, step)
        if matches is None or any(min(stage.rest_times) <= 0 for stage in stages.values()):
            return None  # the main process would end before the others begin
        cache.write(first)
        cache.write(stages[0].rest)
        made: list[KnownPass] = []
        took: list[float] = []
        depth, now = 0, self.env.now
        for at, match in enumerate(matches, first.at):
            stage = stages[depth]
            stage.rounds.append(at)
            start = now + stage.before_times[at]
            own_end, end = start + stage.rest_times[at], start + stage.ahead_times[at + 1]
            # Those with a wrong candidate end with the main process, unless it waits for them.
            others = [(end if barrier else min(end, own_end)) - start] * count
            right = match and at < last
            if right:
                others[-1] = end - start
            if end < own_end:
                made += stage.ahead_first
                took += (start - now, *others, own_end - start)
            else:
                made += stage.rest_first
                took += (start - now, own_end - start, *others)
            depth = stage.ahead.layers.last if right else 0
            now = max(own_end, end) if barrier or right else own_end
            result.commits.append((now if barrier else own_end, step.kinds[not match], 1))
        self.env.go_to(now)
        self.add_each(made, took)
        for stage in stages.values():
            stage.count(count)
        self.account.adoptions += sum(matches[:-1])
        self.account.adopted_rows += sum([len(stage.rounds) * depth for depth, stage in stages.items()])
        self.peak = max(self.peak, count + 1)
        self.done = True
        tokens = range(first.at + 1, last + 2)
        result.tokens += tokens
        return tokens

    def add_each(self, made: Iterable[KnownPass], took: Iterable[float]) -> None:
        """Add the times of passes, one by one, so that sums are rounded as those of passes with events."""
        busy, draft_time, target_time, share = self.busy, self.draft_time, self.target_time, self.draft_devices
        for known, time in zip(made, took, strict=True):
            if known.is_target:
                target_time += time - known.overhead
                busy += time
            else:
                draft_time += time - known.overhead
                busy += time * share
        self.busy, self.draft_time, self.target_time = busy, draft_time, target_time

    def known_times(self, step: Forward, last: int) -> tuple[KnownPass, Sequence[float]]:
        """Return what is known of passes like this one, and their times by position, at least up to `last`."""
        known = self.known_pass(step)
        return known, self.table(step, key_of(step), last) if self.by_position else [known.seconds] * (last + 1)

    def count_alike(self, cache: Cache, step: Forward, count: int) -> tuple[KnownPass, Sequence[float]]:
        """Count `count` passes over one token each, which differ in nothing but the position, and record their rows.

        Return what is known of them, and their times.
        """
        cache.write(step, count)
        known, at = self.known_pass(step), step.at
        known.count_several(1, count, count * at + count * (count - 1) // 2)
        return known, self.table(step, key_of(step), at + count)[at : at + count] if self.by_position else [known.seconds] * count

    def passes_alone(self, made: Iterable[KnownPass], seconds: Iterable[float]) -> list[float]:
        """Make passes that take these times as `pass_alone` does, but for counting them.

        Return the time before the first pass, and the times at which the passes end.
        """
        times = self.env.go_on_each(seconds)
        self.add_each(made, map(operator.sub, times[1:], times))
        self.peak = self.peak or 1
        return times


class _AlikePasses:
    """Passes over one sequence that differ in nothing but position and number of tokens.

    Logits are computed of all their tokens if `verified`, else of as many as in `first`. Times are known up to position `last`.
    """

    def __init__(self, engine: _Engine, first: Forward, last: int, *, verified: bool = False) -> None:
        self.engine, self.first, self.last, self.verified = engine, first, last, verified
        self.known: dict[int, tuple[KnownPass, Sequence[float]]] = {}

    def begun_at(self, width: int, at: int, count: int = 1) -> tuple[KnownPass, Sequence[float]]:
        """Count passes over `width` tokens from position `at` on; several begin one position after another.

        Return what is known of them, and their times by position.
        """
        found = self.known.get(width)
        if found is None:
            engine, heads = self.engine, width if self.verified else self.first.heads
            step = self.first._replace(tokens=(0,) * width, heads=heads)
            self.known[width] = found = engine.known_times(step, self.last)
        found[0].count_several(width, count, count * at + count * (count - 1) // 2)
        return found


class _RoundsAhead:
    """Rounds of `EarlyRounds` that begin at the same layer, and what is known of their passes."""

    @classmethod
    def by_depth(cls, engine: _Engine, step: EarlyRounds) -> dict[int, _RoundsAhead]:
        """Rounds by the number of layers that their token has already run: 0, and after a match those of the sub-process."""
        found: dict[int, _RoundsAhead] = {}
        depth = 0
        while depth not in found:
            found[depth] = made = cls(engine, step, depth)
            depth = made.ahead.layers.last
        return found

    def __init__(self, engine: _Engine, step: EarlyRounds, depth: int) -> None:
        first, alone = step.first, len(step.units) == step.candidates
        gap, end = max(first.layers.last, depth), first.at + step.tokens
        words, tree = ((0,), ()) if alone else ((0,) * step.candidates, (-1,) * step.candidates)
        self.rest = first._replace(layers=LayerSpan(gap, step.layers))
        self.ahead = Forward(first.role, words, first.at + 1, LayerSpan(0, step.layers - gap if step.barrier else gap), tree=tree)
        self.before, self.before_times = engine.known_times(first._replace(layers=LayerSpan(depth, gap)), end)
        self.known_rest, self.rest_times = engine.known_times(self.rest, end)
        self.known_ahead, self.ahead_times = engine.known_times(self.ahead, end)
        others = [self.known_ahead] * len(step.units)
        self.ahead_first = [self.before, *others, self.known_rest]
        """Passes in the order of their ends, where those of the sub-processes end before the main process."""
        self.rest_first = [self.before, self.known_rest, *others]
        """The same where they do not."""
        self.rounds: list[int] = []
        """Positions of the rounds that were made."""

    def count(self, units: int) -> None:
        """Count the passes of the rounds."""
        rounds, positions, width = len(self.rounds), sum(self.rounds), len(self.ahead.tokens)
        for known in (self.before, self.known_rest):
            known.count_several(1, rounds, positions)
        self.known_ahead.count_several(width, units * rounds, units * (positions + rounds), tree=width > 1)


def _later_passes(first: Forward, tokens: Sequence[int]) -> Iterator[Forward]:
    """Passes over these tokens, one after another, after the first pass of a chain."""
    role, words, at, layers, _, heads, unit, _, _, _, within_step, budget = first
    for position, token in enumerate(tokens, at + len(words)):
        yield Forward(role, (token,), position, layers, None, heads, unit, (), None, 0, within_step, budget)


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
            else:  # Stop
                for sub in step.tasks:
                    sub.stop()

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
