"""The vocabulary of decoding: what a process may ask for.

An algorithm is a generator that yields steps and is sent their answers. It holds no clock and no tensor. The simulator answers
with time (`sim.events`), the counter with numbers (`model.work`), a real model with hidden states (`calibrate`).

Three rules hold in every interpreter. The position a `Forward` is placed at cuts the cache, so there is no separate rollback; a
gap before it is an error. A sub-process starts with its parent's cache and follows it: rows that the parent is writing are
visible to it layer by layer. `Commit` is the only thing that makes output; decoding ends with the last token asked for.
"""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, Literal, NamedTuple

Steps = Generator["Step", Any, Any]
"""An algorithm or a sub-process: yields steps, is sent answers, returns whatever its starter may want of it."""


class Forward(NamedTuple):
    """Run layers [first, last) of `role` on `tokens`, the first of them at cache position `at`. Answer: an output.

    `state` is the output to go on from where `first` is above 0; `heads` is how many of the positions are projected onto the
    vocabulary at the end of this pass. A span without layers is a head alone. `unit` is where it is run, if not where the process
    made its last pass; what it works on then takes a link to get there.
    """

    role: str
    tokens: tuple[int, ...]
    at: int
    first: int
    last: int
    state: Any = None
    heads: int = 0
    unit: int | None = None


class Read(NamedTuple):
    """Ask an output about the token that follows its position `offset` (negative, from the end, as in a list).

    * `next`: the likeliest token; `top`: the `width` likeliest, best first.
    * `sample`: a token drawn from the law; `chance`: the probability of `token` under it.
    * `uniform`: a random number in [0, 1), drawn for the test of the token that follows.
    * `confidence`: how sure the output is of `token`, a number in [0, 1].
    * `residual`: a token drawn from norm(max(0, p - q)), p being this law and q that of the output `against` at `against_offset`.
    """

    kind: Literal["next", "top", "sample", "chance", "uniform", "residual", "confidence"]
    output: Any
    offset: int = -1
    width: int = 1
    token: int | None = None
    against: Any = None
    against_offset: int = -1


class Fork(NamedTuple):
    """Start sub-processes together, the i-th on `units[i]` (None: on any unit that is free). Answer: a sequence of tasks.

    A sub-process is a generator of steps, or a single pass, whose output is then its value. They start together because dispatching
    is one act of the process that does it, and its cost depends on how many there are.
    """

    bodies: tuple[Steps | Forward, ...]
    units: tuple[int | None, ...]


class Join(NamedTuple):
    """Wait until these tasks have ended."""

    tasks: tuple[Any, ...]


class Stop(NamedTuple):
    """End these tasks now, with all that they have started; one that has already ended is left as it is."""

    tasks: tuple[Any, ...]


class Adopt(NamedTuple):
    """Take over the output of an ended task, and its cache rows of layers [0, layers) at position `at`. Answer: that output."""

    task: Any
    at: int
    layers: int


class Commit(NamedTuple):
    """These tokens are output, for good. `kind` says what gave them: match, miss, token, round, ...

    `drafted` is how many drafted tokens were on offer, where any could be; all of `tokens` but the last are then accepted ones.
    """

    kind: str
    tokens: tuple[int, ...]
    drafted: int | None = None


Step = Forward | Read | Fork | Join | Stop | Adopt | Commit


class CacheError(RuntimeError):
    """A pass was placed beyond what its cache holds: a defect of the algorithm, in every interpreter."""
