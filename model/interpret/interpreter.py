"""The counter: interprets an algorithm and says how much work it asks for.

How far a stopped process has come depends on what passes take: here layers take one each, and nothing else any time. For algorithms
that stop nothing before its end (the literal and the flat form of Predictive Pipelined Decoding) the counts hold whatever anything
takes; a process that is stopped is counted with the pass that it is in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from model.interpret.account import Account
from model.interpret.simulated_answers import World
from model.steps import Adopt, Batch, CacheError, Commit, Fork, Forward, Join, Read, Steps, Stop, require_ended


class Cache:
    """How many positions each layer of each model holds; without passes that skip layers, none holds more than one above it.

    A pass is announced when it is asked for, and whoever follows it does so layer by layer. It cuts its layers at its position, and
    those below them too: what they hold of later positions was computed from what is being replaced. A layer that a pass skips
    lacks that row from then on, and every later one: whoever comes to it again must fill them in first, which replaces nothing.
    """

    __slots__ = ("breadths", "rows", "sequences", "skipping")

    def __init__(self, rows: dict[str, list[int]] | None = None, breadths: dict[str, list[int]] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self.breadths = {} if breadths is None else breadths
        """How many tokens there are at each position, of models that have made passes over several hypotheses."""
        self.skipping: frozenset[str] = frozenset()
        """Models that have skipped layers: whose rows may rise from one layer to the next."""
        self.sequences: dict[int, Cache] = {}
        """The caches of the sequences of a batch, by their numbers; each goes on from what was read before it was named."""

    def copy(self) -> Cache:
        """What a sub-process starts with."""
        rows = {role: held[:] for role, held in self.rows.items()}
        found = Cache(rows, {role: held[:] for role, held in self.breadths.items()} if self.breadths else None)
        found.skipping = self.skipping
        found.sequences = {number: cache.copy() for number, cache in self.sequences.items()}
        return found

    def require(self, step: Forward) -> None:
        """Refuse a pass that lacks the rows before it, or goes on from layers that have not seen its tokens."""
        if step.batch is not None:
            for number, one in _one_by_one(step, step.batch):
                self.sequences.get(number, self).require(one)
            return
        first, last, gaps, _ = step.layers
        if first == last:
            return
        role, at = step.role, step.at
        held = self.rows.get(role, ())
        known = len(held)
        if gaps or role in self.skipping:
            self._require_spans(step)
            return
        if (held[last - 1] if last <= known else 0) < at or (first and (held[first - 1] if first <= known else 0) < step.end):
            raise CacheError(f"{role}: layers [{first}, {last}) at position {at}, but the layers hold {list(held[:last])}")
        if step.tree:
            self._require_tree(step)

    def _require_spans(self, step: Forward) -> None:
        """The same of a model that skips layers: each layer that is run must hold all rows before this pass."""
        role, at, layers = step.role, step.at, step.layers
        first, last = layers.first, layers.last
        held = self.rows.get(role, [])
        if len(held) < last:
            held = held + [0] * (last - len(held))
        low = first
        for start, stop in (*layers.gaps, (last, last)):
            if not low <= start <= stop <= last or (start, stop) == (first, last) != (last, last):
                through = f"[{first}, {last})"
                raise CacheError(f"{role}: layers {list(layers.gaps)} cannot be skipped in a pass through {through}")
            if low < start and min(held[low:start]) < at:
                raise CacheError(f"{role}: layers [{low}, {start}) at position {at}, but they hold {held[low:start]}")
            low = stop
        if first and held[first - 1] < step.end:
            raise CacheError(f"{role}: layer {first} goes on from one that holds only {held[first - 1]} positions")

    def _require_tree(self, step: Forward) -> None:
        """Refuse hypotheses that follow what is not there."""
        before = self.breadths.get(step.role, ())[step.at - 1 : step.at] if step.at else ()
        breadth = before[0] if before else 1  # a position that only ordinary passes have made, or the empty sequence
        for index, follows in enumerate(step.tree):
            if not -1 - breadth < follows < index:
                raise CacheError(
                    f"{step.role}: token {index} at position {step.at} follows {follows}, but there are {breadth} tokens before it"
                )
        if len(step.tree) != len(step.tokens):
            raise CacheError(f"{step.role}: {len(step.tokens)} tokens follow {len(step.tree)}")

    def write(self, step: Forward) -> None:
        """Place a pass."""
        self.require(step)
        if step.batch is not None:
            for number, one in _one_by_one(step, step.batch):
                if number not in self.sequences:
                    self.sequences[number] = Cache({each: held[:] for each, held in self.rows.items()})
                self.sequences[number].write(one)
            return
        role, at = step.role, step.at
        first, last, gaps, kv_only = step.layers
        held = self.rows.setdefault(role, [])
        if gaps or role in self.skipping:
            self._write_spans(step)
            return
        held[first:last] = [step.end if step.tree else at + len(step.tokens)] * (last - first)
        if last < len(held) and held[last] > at and not kv_only:
            held[last:] = [min(rows, at) for rows in held[last:]]
        if step.tree or (self.breadths and role in self.breadths):
            self._spread(step)

    def _write_spans(self, step: Forward) -> None:
        """The same of a model that skips layers."""
        role, at, layers = step.role, step.at, step.layers
        first, last = layers.first, layers.last
        if role not in self.skipping:
            self.skipping |= {role}
        held, end = self.rows[role], step.end
        if len(held) < last:
            held += [0] * (last - len(held))
        if max(held) > at and not layers.kv_only:
            held[first:] = [min(rows, at) for rows in held[first:]]
        low = first
        for start, stop in (*layers.gaps, (last, last)):
            held[low:start] = [end] * (start - low)
            low = stop

    def _spread(self, step: Forward) -> None:
        """Remember how many tokens of a pass stand at each position."""
        held = self.breadths.setdefault(step.role, [])
        held[:] = [*held[: step.at], *[1] * (step.at - len(held)), *[0] * (step.end - step.at)]
        for position in step.positions:
            held[position] += 1

    def adopt(self, step: Forward, at: int, layers: int, hypothesis: int | None = None) -> None:
        """Take over the rows of layers [0, layers) at position `at` from a process that made this pass last: see `Adopt`."""
        if hypothesis is not None:
            step = step.alone(hypothesis)
        held = self.rows[step.role]
        run = step.layers
        if run.first or run.last < layers or step.at + len(step.tokens) != at + 1 or (layers and held[layers - 1] < at):
            made = f"a pass of layers [{run.first}, {run.last}) over {len(step.tokens)} tokens at position {step.at}"
            raise CacheError(f"{step.role}: rows of layers [0, {layers}) at position {at} cannot be taken over from {made}")
        held[:layers] = [at + 1] * layers


def _one_by_one(step: Forward, batch: Batch) -> Iterator[tuple[int, Forward]]:
    """The number and the pass of each sequence of a batch."""
    batch.require(step)
    return ((number, step.part(index)) for index, number in enumerate(batch.sequences))


@dataclass
class CountedWork:
    """What an algorithm asked for: its passes and transfers, how many processes it started, and the output."""

    account: Account = field(default_factory=Account)
    forks: int = 0
    commits: list[str] = field(default_factory=list)
    """The kind of each commit."""
    committed: list[Commit] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sequences: dict[int, list[int]] = field(default_factory=dict)
    """Tokens that each sequence of a batch has generated, where they commit separately."""
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """How many rounds had so many tokens (accepted, drafted)."""

    @property
    def passes(self) -> int:
        """Passes of all models."""
        return self.account.passes

    @property
    def layer_passes(self) -> int:
        """Layers run, once for each token of a pass."""
        return self.account.layer_passes

    @property
    def heads(self) -> int:
        """Positions projected onto the vocabulary."""
        return self.account.heads

    @property
    def adoptions(self) -> int:
        """How often a process took over another's output."""
        return self.account.adoptions

    @property
    def passes_of(self) -> Counter[str]:
        """Passes of each model."""
        return self.account.passes_of


class Task:
    """A process: its body, the cache that it works on, what it has started and what it returned."""

    def __init__(self, body: Steps | Forward, parent: Task | None = None) -> None:
        self.body = _one_pass(body) if isinstance(body, Forward) else body
        self.parent = parent
        self.cache: Any = None
        self.started: list[Task] = []
        self.value: Any = None
        self.answer: Any = None
        self.last: Any = None  # the pass made last
        self.ended = self.stopped = False
        self.joined: Any = None  # those that it waits for
        self.watcher: Task | None = None  # waits for this one

    @property
    def at_work(self) -> bool:
        """Whether it has not ended, or some task has not that it has started."""
        return not self.ended or any(sub.at_work for sub in self.started)


def _one_pass(step: Forward) -> Steps:
    return (yield step)


def count(steps: Steps, world: World, tokens: int) -> CountedWork:
    """Interpret an algorithm until it has put out `tokens` tokens, and say what it asked for.

    >>> from model.methods.ppd import algorithm as ppd
    >>> choice = ppd.Parameters(layers=40, exit_layer=20, candidates=3)
    >>> work = count(ppd.decode(choice, [0], 2), World(1, 40, [True, False]), 2)
    >>> work.commits, work.layer_passes  # 40 + 20 of the main process, 3 x 20 of sub-processes a token
    (['match', 'miss'], 180)
    """
    return Counting(world).run(steps, tokens)


class Interpreter(ABC):
    """Interprets an algorithm, one process at a time; what passes and reads are is left open.

    Whose turn it is says a clock of its own, on which a layer of any model takes one and nothing else any time, on as many units as
    are asked for: the simulator's clock where layers alone take time, with its order at equal times. So it makes the passes that
    the simulator makes, those of processes included that are stopped later. A pass is made as it begins; then nobody needs to know
    whether its end will be waited for.
    """

    def __init__(self) -> None:
        self.work = CountedWork()
        self.wanted = 0
        self.now = 0
        self.due: list[tuple[int, int, Task]] = []
        """Passes under way: when each ends, in which order they began, and whose it is."""
        self.unborn: list[Task] = []

    @abstractmethod
    def new_cache(self) -> Any:
        """What the first process starts with; it knows how to `copy` itself."""

    @abstractmethod
    def forward(self, cache: Any, step: Forward) -> Any:
        """Make a pass, on this cache; its output."""

    @abstractmethod
    def read(self, step: Read) -> Any:
        """The answer to a read."""

    @abstractmethod
    def adopt(self, cache: Any, task: Task, at: int, layers: int, hypothesis: int | None) -> None:
        """Take over an ended task's rows of layers [0, layers) at position `at`: see `Adopt`."""

    def commit(self, step: Commit) -> None:
        """Put out tokens."""
        work = self.work
        work.commits.append(step.kind)
        work.committed.append(step)
        work.tokens[len(work.tokens) - step.back :] = step.tokens
        if step.sequence is not None:
            work.sequences.setdefault(step.sequence, []).extend(step.tokens)
        if step.drafted is not None:
            work.rounds[len(step.tokens) - step.back - 1, step.drafted] += 1

    def run(self, steps: Steps, tokens: int) -> CountedWork:
        """Interpret until `tokens` tokens are out, or the algorithm ends."""
        self.wanted = tokens
        main = Task(steps)
        main.cache = self.new_cache()
        self._drive(main)
        due = self.due
        while len(self.work.tokens) < tokens:
            if due and (due[0][0] <= self.now or not self.unborn):
                self.now, _, task = heappop(due)
                if not task.ended:
                    self._drive(task)
            elif self.unborn:
                self._bear_all()
            else:
                break
        return self.work

    def _bear_all(self) -> None:
        """Sub-processes begin once all that happens at the moment has happened: those that were stopped meanwhile never do."""
        births, self.unborn = self.unborn, []
        for task in births:
            if not task.ended:
                assert task.parent is not None
                task.cache, task.parent = task.parent.cache.copy(), None
                self._drive(task)

    def _drive(self, task: Task) -> None:
        """Drive a task until it has to wait, or to its end."""
        work = self.work
        while not task.ended and len(work.tokens) < self.wanted:
            try:
                step = task.body.send(task.answer)
            except StopIteration as end:
                self._return(task, end.value)
                return
            task.answer = None
            match step:
                case Forward():
                    task.answer = self.forward(task.cache, step)
                    task.last = step
                    work.account.add(step)
                    if self.due or self.unborn:
                        heappush(self.due, (self.now + step.layers.size, work.account.passes, task))
                        return
                    # Nobody else is there: when it ends does not matter.
                case Read():
                    task.answer = self.read(step)
                case Fork():
                    heirs_of = step.heirs_of or (None,) * len(step.bodies)
                    for old in step.heirs_of:
                        if old is not None:
                            require_ended(old)
                    task.answer = tuple(Task(body, old or task) for body, old in zip(step.bodies, heirs_of, strict=True))
                    # Tasks that have ended, with all that they have started, are let go of, with the rows that they have copied.
                    task.started = [sub for sub in task.started if sub.at_work]
                    task.started.extend(task.answer)
                    self.unborn.extend(task.answer)
                    work.forks += len(task.answer)
                case Join():
                    task.joined = step.tasks
                    for sub in step.tasks:
                        sub.watcher = task
                    if not self._gathered(task):
                        return
                case Stop():
                    for sub in step.tasks:
                        self._cancel(sub)
                    task.started = [sub for sub in task.started if not sub.ended]
                case Adopt():
                    require_ended(step.task)
                    self.adopt(task.cache, *step)
                    work.account.adoptions += 1
                    work.account.adopted_rows += step.layers
                    made = step.task.value
                    task.answer = made if step.hypothesis is None else made.alone(step.hypothesis)
                case Commit():
                    self.commit(step)

    def _gathered(self, task: Task) -> bool:
        """Whether all that a task waits for have ended; they then answer it."""
        if not all(sub.ended for sub in task.joined):
            return False
        task.answer, task.joined = tuple(sub.value for sub in task.joined), None
        return True

    def _return(self, task: Task, value: Any) -> None:
        task.value, task.ended = value, True
        watcher, task.watcher = task.watcher, None
        if watcher is not None and not watcher.ended and watcher.joined is not None and self._gathered(watcher):
            self._drive(watcher)

    def _cancel(self, task: Task) -> None:
        """End a task, with all that it has started."""
        if not task.ended:
            task.ended = task.stopped = True
            task.body.close()
        for sub in task.started:
            self._cancel(sub)
        task.started, task.joined = [], None


class Counting(Interpreter):
    """The counter: a world answers, and a pass is its own output."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        world.written, world.generated = self.work.tokens, self.work.sequences

    def new_cache(self) -> Cache:
        """No rows yet."""
        return Cache()

    def forward(self, cache: Cache, step: Forward) -> Forward:
        """See `Interpreter`."""
        cache.write(step)
        return step

    def read(self, step: Read) -> Any:
        """See `Interpreter`."""
        return self.world.read(step)

    def adopt(self, cache: Cache, task: Task, at: int, layers: int, hypothesis: int | None) -> None:
        """See `Interpreter`."""
        cache.adopt(task.last, at, layers, hypothesis)
