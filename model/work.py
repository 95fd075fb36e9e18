"""The counter: interprets an algorithm without a clock and says how much work it asks for.

Without a clock nobody can say how far a stopped process has come: it is counted with the pass that it is in. For algorithms that
stop nothing before its end (the literal and the flat form of Predictive Pipelined Decoding) the counts are exact.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from model.steps import Adopt, CacheError, Commit, Fork, Forward, Join, Read, Steps, Stop
from model.world import World, output


class Cache:
    """How many positions each layer of each model holds.

    A pass is announced when it is asked for, and whoever follows it does so layer by layer.
    """

    __slots__ = ("rows",)

    def __init__(self, rows: dict[str, list[int]]) -> None:
        self.rows = rows

    def copy(self) -> Cache:
        """What a sub-process starts with."""
        return Cache({role: held[:] for role, held in self.rows.items()})

    def write(self, role: str, width: int, at: int, first: int, last: int) -> None:
        """Place a pass: cut its layers at its position and add its tokens; a gap before it is an error."""
        if first == last:
            return
        held = self.rows.get(role)
        if held is None or len(held) < last:
            held = self.rows[role] = (held or []) + [0] * (last - len(held or ()))
        if min(held[first:last]) < at:
            raise CacheError(f"{role}: layers [{first}, {last}) at {at}, but the cache holds {held[first:last]}")
        held[first:last] = [at + width] * (last - first)

    def adopt(self, other: Cache, role: str, at: int, layers: int) -> None:
        """Take over the rows of layers [0, layers) at position `at` from a sub-process."""
        held = self.rows[role]
        if layers and (min(other.rows[role][:layers]) <= at or min(held[:layers]) < at):
            raise CacheError(f"{role}: no rows of layers [0, {layers}) at position {at} to take over")
        held[:layers] = [at + 1] * layers


@dataclass
class Work:
    """What an algorithm asked for: numbers of passes, of layers run in them, of heads, of starts and transfers, and the output."""

    passes: int = 0
    layer_passes: int = 0
    heads: int = 0
    forks: int = 0
    adoptions: int = 0
    commits: list[str] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)


class _Task:
    def __init__(self, body: Steps | Forward, parent: _Task | None = None) -> None:
        self.body = _one_pass(body) if isinstance(body, Forward) else body
        self.parent = parent
        self.cache: Cache | None = None
        self.started: list[_Task] = []
        self.value: Any = None
        self.answer: Any = None
        self.passes = 0
        self.ended = False


def _one_pass(step: Forward) -> Steps:
    return (yield step)


def count(steps: Steps, world: World, tokens: int) -> Work:
    """Interpret an algorithm until it has put out `tokens` tokens, and say what it asked for.

    >>> from model.algorithms import ppd
    >>> choice = ppd.Parameters(layers=40, exit_layer=20, candidates=3)
    >>> work = count(ppd.decode(choice, [0], 2), World(1, 40, [True, False]), 2)
    >>> work.commits, work.layer_passes  # 40 + 20 of the main process, 3 x 20 of sub-processes a token
    (['match', 'miss'], 180)
    """
    work = Work()
    alive = deque([_Task(steps)])
    while alive and len(work.tokens) < tokens:
        task = alive.popleft()
        _run(task, world, work, tokens)
        alive.extend(task.started)
    return work


def _run(task: _Task, world: World, work: Work, tokens: int, passes: int | None = None) -> None:
    """Drive a task to its end, or until it has made so many passes. A sub-process starts when it is first looked at."""
    if task.cache is None:
        task.cache = Cache({}) if task.parent is None or task.parent.cache is None else task.parent.cache.copy()
    while not task.ended and len(work.tokens) < tokens and task.passes != passes:
        try:
            step = task.body.send(task.answer)
        except StopIteration as end:
            task.value, task.ended = end.value, True
            return
        task.answer = None
        match step:
            case Forward():
                task.cache.write(step.role, len(step.tokens), step.at, step.first, step.last)
                task.passes += 1
                work.passes += 1
                work.layer_passes += (step.last - step.first) * len(step.tokens)
                work.heads += step.heads
                task.answer = output(step)
            case Read():
                task.answer = world.read(step)
            case Fork():
                task.answer = tuple(_Task(body, task) for body in step.bodies)
                task.started.extend(task.answer)
                work.forks += len(task.answer)
            case Join():
                for sub in step.tasks:
                    _run(sub, world, work, tokens)
            case Stop():
                for sub in step.tasks:
                    _run(sub, world, work, tokens, passes=1)
                    sub.ended = True
                    sub.body.close()
                    task.started.remove(sub)
            case Adopt():
                task.cache.adopt(step.task.cache, "target", step.at, step.layers)
                work.adoptions += 1
                task.answer = step.task.value
            case Commit():
                work.commits.append(step.kind)
                work.tokens.extend(step.tokens)
