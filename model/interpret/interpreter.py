"""The counter: runs an algorithm without models or times and counts the work that it requests.

The progress of a stopped process depends on the durations of passes. Here a layer takes one unit of time and everything else takes
none. For algorithms that stop no running process (the literal and the flat form of Predictive Pipelined Decoding) the counts hold
for any durations. The current pass of a stopped process is counted in full.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Any

from model.interpret import text_lookup
from model.interpret.account import Account
from model.interpret.simulated_answers import World
from model.steps import (
    Adopt,
    Batch,
    CacheError,
    Commit,
    DraftChain,
    DraftLevels,
    DraftLimit,
    Features,
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


class Cache:
    """Number of KV cache rows in each layer of each model.

    Without passes that skip layers, no layer holds more rows than an earlier one. A pass is recorded when it is requested;
    sub-processes follow it layer by layer. It truncates its own layers and all later layers at its position, because their later
    rows were computed from the replaced ones. A skipped layer lacks the row of that position and of all later ones; they must be
    filled in (`kv_only`) before the layer can run again, which replaces no rows. Rows of a pass with a context budget are not the
    model's own: a pass without one must replace them.
    """

    __slots__ = ("breadths", "limited", "rows", "sequences", "skipping")

    def __init__(self, rows: dict[str, list[int]] | None = None, breadths: dict[str, list[int]] | None = None) -> None:
        self.rows = {} if rows is None else rows
        self.breadths = {} if breadths is None else breadths
        """Number of tokens at each position, for models that have made passes over several hypotheses."""
        self.skipping: frozenset[str] = frozenset()
        """Models that have skipped layers; only there may a later layer hold more rows than an earlier one."""
        self.limited: dict[str, int] = {}
        """First position whose rows come from passes with a context budget, for models that have made such passes."""
        self.sequences: dict[int, Cache] = {}
        """Caches of the sequences of a batch, by number; each continues the rows shared before its first batched pass."""

    def copy(self) -> Cache:
        """Independent copy, for a sub-process to start with."""
        rows = {role: held[:] for role, held in self.rows.items()}
        cache = Cache(rows, {role: held[:] for role, held in self.breadths.items()} if self.breadths else None)
        cache.skipping = self.skipping
        cache.limited = {**self.limited}
        cache.sequences = {number: each.copy() for number, each in self.sequences.items()}
        return cache

    def require(self, step: Forward) -> None:
        """Raise `CacheError` if rows before the pass are missing, or if the layer before its first has not run on its tokens.

        Also if it reads states that are not those before its tokens.
        """
        if type(step.state) is Features:
            step.state.require(step)
        if step.batch is not None:
            for number, part in _parts(step, step.batch):
                self.sequences.get(number, self).require(part)
            return
        first, last, gaps, _ = step.layers
        if first == last:
            return
        role, at = step.role, step.at
        if self.limited and step.context_budget is None and self.limited.get(role, at) < at:
            raise CacheError(
                f"{role}: a pass over the whole context at position {at}, but rows from {self.limited[role]} on come from passes"
                " with a context budget"
            )
        held = self.rows.get(role, ())
        if gaps or role in self.skipping:
            self._require_spans(step)
            return
        _require_rows(role, held, first, last, at, step.end if first else at)
        if step.tree:
            self._require_tree(step)

    def _require_spans(self, step: Forward) -> None:
        """`require` for a model that skips layers: each layer that is run must hold all rows before this pass."""
        role, _, at, (first, last, gaps, _), *_ = step
        held = self.rows.get(role, [])
        if len(held) < last:
            held = held + [0] * (last - len(held))
        low = first
        for start, stop in (*gaps, (last, last)):
            if not low <= start <= stop <= last or (start, stop) == (first, last) != (last, last):
                raise CacheError(f"{role}: layers {list(gaps)} cannot be skipped in a pass through [{first}, {last})")
            if low < start and min(held[low:start]) < at:
                raise CacheError(f"{role}: layers [{low}, {start}) at position {at}, but they hold {held[low:start]}")
            low = stop
        if first and held[first - 1] < step.end:
            raise CacheError(f"{role}: layer {first} continues from a layer that holds only {held[first - 1]} positions")

    def _require_tree(self, step: Forward) -> None:
        """Raise `CacheError` if a hypothesis follows a token that does not exist."""
        before = self.breadths.get(step.role, ())[step.at - 1 : step.at] if step.at else ()
        breadth = before[0] if before else 1  # a position written by ordinary passes only, or the empty sequence
        for index, follows in enumerate(step.tree):
            if not -1 - breadth < follows < index:
                raise CacheError(
                    f"{step.role}: token {index} at position {step.at} follows {follows}, but there are {breadth} tokens before it"
                )
        if len(step.tree) != len(step.tokens):
            raise CacheError(f"{step.role}: {len(step.tokens)} tokens follow {len(step.tree)}")

    def write(self, step: Forward, passes: int = 1) -> None:
        """Record a pass, or several passes over one token each, one after another, of which `step` is the first."""
        role, tokens, at, (first, last, gaps, kv_only), state, _, _, tree, batch, _, _, budget = step
        usual = batch is None and budget is None and not (gaps or kv_only or tree or self.breadths or self.skipping or self.limited)
        if usual and type(state) is not Features:  # one sequence, over tokens that follow one another
            held, end = self.rows.get(role), at + len(tokens) + passes - 1
            if held is None:
                held = []
            if first < last:
                _require_rows(role, held, first, last, at, end)
            self.rows[role] = held
            held[first:last] = [end] * (last - first)
            if last < len(held) and held[last] > at:
                held[last:] = [min(rows, at) for rows in held[last:]]
            return
        self.require(step)
        if batch is not None:
            for number, part in _parts(step, batch):
                if number not in self.sequences:
                    self.sequences[number] = Cache({role: held[:] for role, held in self.rows.items()})
                    self.sequences[number].limited = {**self.limited}
                self.sequences[number].write(part)
            return
        if step.context_budget is not None:
            self.limited[role] = min(self.limited.get(role, at), at)
        elif self.limited and not first and self.limited.get(role, -1) >= at:
            del self.limited[role]
        held = self.rows.setdefault(role, [])
        if gaps or role in self.skipping:
            self._write_spans(step, step.end + passes - 1)
            return
        positions = step.positions if tree else range(at, at + len(tokens) + passes - 1)
        end = max(positions) + 1
        held[first:last] = [end] * (last - first)
        if last < len(held) and held[last] > at and not kv_only:
            held[last:] = [min(rows, at) for rows in held[last:]]
        if tree or (self.breadths and role in self.breadths):
            self._spread(role, at, end, positions)

    def _write_spans(self, step: Forward, end: int) -> None:
        """`write` for a model that skips layers; `end` is the position after the last token."""
        role, _, at, (first, last, gaps, kv_only), *_ = step
        if role not in self.skipping:
            self.skipping |= {role}
        held = self.rows[role]
        if len(held) < last:
            held += [0] * (last - len(held))
        if not kv_only and max(held) > at:
            held[first:] = [min(rows, at) for rows in held[first:]]
        low = first
        for start, stop in (*gaps, (last, last)):
            held[low:start] = [end] * (start - low)
            low = stop

    def _spread(self, role: str, at: int, end: int, positions: Sequence[int]) -> None:
        """Record the number of tokens of a pass from position `at` to `end` at each position."""
        held = self.breadths.setdefault(role, [])
        del held[at:]
        held += [1] * (at - len(held))
        held += [0] * (end - at)
        for position in positions:
            held[position] += 1

    def adopt(self, step: Forward, at: int, layers: int, hypothesis: int | None = None) -> None:
        """Adopt the rows of layers [0, layers) at position `at` from a process whose last pass is `step`: see `Adopt`."""
        if hypothesis is not None:
            step = step.alone(hypothesis)
        held = self.rows[step.role]
        run = step.layers
        if run.first or run.last < layers or step.at + len(step.tokens) != at + 1 or (layers and held[layers - 1] < at):
            made = f"a pass of layers [{run.first}, {run.last}) over {len(step.tokens)} tokens at position {step.at}"
            raise CacheError(f"{step.role}: rows of layers [0, {layers}) at position {at} cannot be adopted from {made}")
        held[:layers] = [at + 1] * layers


def _require_rows(role: str, held: Sequence[int], first: int, last: int, at: int, end: int) -> None:
    """Raise `CacheError` unless layers [first, last) hold all rows before `at`, and the layer before them all before `end`."""
    known = len(held)
    if (held[last - 1] if last <= known else 0) < at or (first and (held[first - 1] if first <= known else 0) < end):
        raise CacheError(f"{role}: layers [{first}, {last}) at position {at}, but the layers hold {list(held[:last])}")


def _parts(step: Forward, batch: Batch) -> Iterator[tuple[int, Forward]]:
    """Number and pass of each sequence of a batch."""
    batch.require(step)
    return ((number, step.part(index)) for index, number in enumerate(batch.sequences))


@dataclass
class CountedWork:
    """Work requested by an algorithm (passes, transfers, sub-processes) and its output."""

    account: Account = field(default_factory=Account)
    forks: int = 0
    """Number of sub-processes started."""
    commits: list[str] = field(default_factory=list)
    """Kind of each commit."""
    committed: list[Commit] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    sequences: dict[int, list[int]] = field(default_factory=dict)
    """Tokens generated by each sequence of a batch, if they commit separately."""
    rounds: Counter[tuple[int, int]] = field(default_factory=Counter)
    """Number of rounds by (accepted tokens, drafted tokens)."""

    @property
    def passes(self) -> int:
        """Passes of all models."""
        return self.account.passes

    @property
    def layer_passes(self) -> int:
        """Layers run, counted once per token of a pass."""
        return self.account.layer_passes

    @property
    def heads(self) -> int:
        """Positions whose logits were computed."""
        return self.account.heads

    @property
    def adoptions(self) -> int:
        """Number of adopted outputs (`Adopt`)."""
        return self.account.adoptions

    @property
    def passes_of(self) -> Counter[str]:
        """Passes of each model."""
        return self.account.passes_of


class Task:
    """A process: its body, its cache, its sub-processes and its return value."""

    def __init__(self, body: Steps | Forward, parent: Task | None = None) -> None:
        self.body = _one_pass(body) if isinstance(body, Forward) else body
        self.parent = parent
        self.cache: Any = None
        self.started: list[Task] = []
        self.value: Any = None
        self.answer: Any = None
        self.last: Any = None  # the last pass
        self.ended = self.stopped = False
        self.joined: Any = None  # tasks that it waits for
        self.watcher: Task | None = None  # the task that waits for this one

    @property
    def running(self) -> bool:
        """True while this task or any of its sub-processes runs."""
        tasks = [self]  # a chain of tasks may be longer than the recursion limit
        while tasks:
            task = tasks.pop()
            if not task.ended:
                return True
            tasks += task.started
        return False


def _one_pass(step: Forward) -> Steps:
    return (yield step)


def count(steps: Steps, world: World, tokens: int) -> CountedWork:
    """Run an algorithm until it has generated `tokens` tokens and return the work that it requested.

    >>> from model.methods.ppd import algorithm as ppd
    >>> choice = ppd.Parameters(layers=40, exit_layer=20, candidates=3)
    >>> work = count(ppd.decode(choice, [0], 2), World(1, 40, [True, False]), 2)
    >>> work.commits, work.layer_passes  # 40 + 20 in the main process, 3 x 20 per token in sub-processes
    (['match', 'miss'], 180)
    """
    return Counting(world).run(steps, tokens)


class Interpreter(ABC):
    """Base of interpreters that run one process at a time; subclasses define passes and reads.

    A logical clock orders the processes: a layer of any model takes one unit of time, everything else takes none, and there are as
    many units as needed. This equals the simulator's clock if only layers take time, including the order of simultaneous events, so
    both make the same passes, even those of processes that are stopped later. A pass is executed when it begins.
    """

    def __init__(self) -> None:
        self.work = CountedWork()
        self.wanted = 0
        self.now = 0
        self.due: list[tuple[int, int, Task]] = []
        """Heap of running passes: (end time, order of start, task)."""
        self.unborn: list[Task] = []
        """Sub-processes that have been forked but not yet begun."""
        self.born_next = 0
        """Number of sub-processes that begin at this moment, after the one that has just begun."""

    @abstractmethod
    def new_cache(self) -> Any:
        """Empty cache of the main process; it must have a method `copy`."""

    @abstractmethod
    def forward(self, cache: Any, step: Forward) -> Any:
        """Make a pass on this cache and return its output."""

    @abstractmethod
    def read(self, step: Read) -> Any:
        """Answer a read."""

    def look_up(self, step: Lookup) -> tuple[int, ...]:
        """Look up the last tokens of a text earlier in it."""
        return text_lookup.answer(step)

    @abstractmethod
    def adopt(self, cache: Any, task: Task, at: int, layers: int, hypothesis: int | None) -> None:
        """Adopt an ended task's rows of layers [0, layers) at position `at`: see `Adopt`."""

    def commit(self, step: Commit) -> None:
        """Emit tokens."""
        work = self.work
        work.commits.append(step.kind)
        work.committed.append(step)
        work.tokens[len(work.tokens) - step.back :] = step.tokens
        if step.sequence is not None:
            work.sequences.setdefault(step.sequence, []).extend(step.tokens)
        if step.drafted is not None:
            work.rounds[len(step.tokens) - step.back - 1, step.drafted] += 1

    def run(self, steps: Steps, tokens: int) -> CountedWork:
        """Run until `tokens` tokens are generated or the algorithm ends."""
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
        """Begin forked sub-processes, after all other events of this moment; those stopped meanwhile never begin."""
        births, self.unborn = self.unborn, []
        for index, task in enumerate(births, start=1):
            self.born_next = len(births) - index
            if not task.ended:
                assert task.parent is not None
                task.cache, task.parent = task.parent.cache.copy(), None
                self._drive(task)

    def _drive(self, task: Task) -> None:
        """Run a task until it has to wait or ends."""
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
                    if self.due or self.unborn or self.born_next:
                        heappush(self.due, (self.now + step.layers.size, work.account.passes, task))
                        return
                    # No other process is there: the end time of the pass does not matter.
                case Read():
                    task.answer = self.read(step)
                case Commit():
                    self.commit(step)
                case DraftLimit():
                    task.answer = step.longest
                case Lookup():
                    task.answer = self.look_up(step)
                case Fork():
                    heirs_of = step.heirs_of or (None,) * len(step.bodies)
                    for old in step.heirs_of:
                        if old is not None:
                            require_ended(old)
                    task.answer = tuple(Task(body, old or task) for body, old in zip(step.bodies, heirs_of, strict=True))
                    # Drop finished tasks whose sub-processes have finished too, to free the rows that they copied.
                    task.started = [sub for sub in task.started if sub.running]
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
                case NextTokens() | DraftChain() | DraftLevels() | ReadEach():
                    if not (self.due or self.unborn or self.born_next):
                        task.answer = self.take(task, step)

    def take(self, task: Task, step: NextTokens | DraftChain | DraftLevels | ReadEach) -> Any:
        """Answer an offer where no other process is there, or None: it is declined."""
        return None

    def _gathered(self, task: Task) -> bool:
        """If all tasks that `task` waits for have ended, set its answer and return True."""
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
        """Stop a task and all its sub-processes."""
        if not task.ended:
            task.ended = task.stopped = True
            task.body.close()
        for sub in task.started:
            self._cancel(sub)
        task.started, task.joined = [], None


class Counting(Interpreter):
    """The counter: a `World` answers reads, and a pass is its own output."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self.world = world
        world.written, world.generated = self.work.tokens, self.work.sequences

    def new_cache(self) -> Cache:
        """Cache without rows."""
        return Cache()

    def forward(self, cache: Cache, step: Forward) -> Forward:
        """See `Interpreter`."""
        cache.write(step)
        return step

    def read(self, step: Read) -> Any:
        """See `Interpreter`."""
        return self.world.read(step)

    def look_up(self, step: Lookup) -> tuple[int, ...]:
        """See `Interpreter`."""
        return self.world.look_up(step)

    def adopt(self, cache: Cache, task: Task, at: int, layers: int, hypothesis: int | None) -> None:
        """See `Interpreter`."""
        cache.adopt(task.last, at, layers, hypothesis)
