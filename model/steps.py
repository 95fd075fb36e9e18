"""The vocabulary of decoding: what a process may ask for.

An algorithm is a generator that yields steps and is sent their answers. It holds no clock and no tensor. The simulator answers
with time (`sim.engine.events`), the counter with numbers (`model.interpret.interpreter`), a real model with hidden states
(`calibrate`).

Four rules hold in every interpreter. The position a `Forward` is placed at cuts the cache, so there is no separate rollback; a
gap before it is an error. A sub-process starts with its parent's cache and follows it: rows that the parent is writing are
visible to it layer by layer. Only a task that has returned can be adopted: one that still runs, or was stopped, is an error.
`Commit` is the only thing that makes output; decoding ends with the last token asked for.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Generator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, Final, Literal, NamedTuple, Protocol

Steps = Generator["Step", Any, Any]
"""An algorithm or a sub-process: yields steps, is sent answers, returns whatever its starter may want of it."""


def ended(tokens: list[int], stop: Collection[int]) -> list[int]:
    """Tokens up to the first that ends a sequence.

    >>> ended([7, 2, 9, 2], (9, 3))
    [7, 2, 9]
    """
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in stop), tokens)


class LayerSpan(NamedTuple):
    """Layers [first, last) of a model, as one pass runs them.

    Layers of `gaps`, half-open ranges between the two, are not run: the state goes past them as it is, and they get no row. With
    `kv_only` the layers make keys and values of the state and no more: it does not change. A span of no layers is a head alone.
    """

    first: int
    last: int
    gaps: tuple[tuple[int, int], ...] = ()
    kv_only: bool = False

    @property
    def ranges(self) -> Sequence[tuple[int, int]]:
        """The layers that are run, as half-open ranges.

        >>> LayerSpan(0, 24, gaps=((1, 17),)).ranges
        [(0, 1), (17, 24)]
        """
        bounds = [self.first, *[bound for gap in self.gaps for bound in gap], self.last]
        return [span for span in zip(bounds[::2], bounds[1::2], strict=True) if span[0] < span[1]]

    @property
    def size(self) -> int:
        """Number of layers, without those of the gaps.

        >>> LayerSpan(0, 24, gaps=((1, 17),)).size
        8
        """
        return self.last - self.first - sum(last - first for first, last in self.gaps)


@dataclass(frozen=True)
class Batch:
    """The sequences of one pass: the i-th is number `sequences[i]`, and has `widths[i]` tokens from position `positions[i]` on.

    Tokens lie sequence after sequence; the last `heads[i]` of each are projected. Each sequence has a separate cache; those that
    have ended are no longer named.
    """

    sequences: tuple[int, ...]
    positions: tuple[int, ...]
    widths: tuple[int, ...]
    heads: tuple[int, ...]

    @classmethod
    def uniform(cls, sequences: tuple[int, ...], positions: int | tuple[int, ...], width: int = 1, heads: int = 0) -> Batch:
        """As many tokens of each sequence, and as many of each projected; one position for all or one for each.

        >>> Batch.uniform((3, 1), 5, width=2, heads=1)
        Batch(sequences=(3, 1), positions=(5, 5), widths=(2, 2), heads=(1, 1))
        """
        count = len(sequences)
        return cls(sequences, (positions,) * count if isinstance(positions, int) else positions, (width,) * count, (heads,) * count)

    @property
    def aligned(self) -> bool:
        """Whether all sequences have as many tokens, from one position on."""
        return len({*self.positions}) == len({*self.widths}) == 1

    @cached_property
    def starts(self) -> tuple[int, ...]:
        """Index of the first token of each sequence among those of the pass."""
        return tuple(accumulate(self.widths[:-1], initial=0))

    @cached_property
    def head_starts(self) -> tuple[int, ...]:
        """Index of the first projected position of each sequence among those of the pass."""
        return tuple(accumulate(self.heads[:-1], initial=0))

    @property
    def end(self) -> int:
        """The position after the last token of the longest sequence."""
        return max([at + width for at, width in zip(self.positions, self.widths, strict=True)])

    def locate(self, index: int) -> tuple[int, int]:
        """Of a token of the pass the index of its sequence in the batch, and its index among the tokens of that sequence.

        >>> [Batch((3, 1), (6, 5), (1, 2), (1, 1)).locate(index) for index in range(3)]
        [(0, 0), (1, 0), (1, 1)]
        """
        found = bisect_right(self.starts, index) - 1
        return found, index - self.starts[found]

    def require(self, step: Forward) -> None:
        """Refuse a pass whose tokens, positions or heads are not those of its sequences."""
        count, tokens = len(self.sequences), len(step.tokens)
        positions, widths, heads = self.positions, self.widths, self.heads
        wrong = None
        if len({*self.sequences}) < count or not count:
            wrong = f"sequences must be different ones, at least one, got {self.sequences}"
        elif len(positions) != count or len(widths) != count or len(heads) != count:
            wrong = f"positions, widths and heads must be one of each of {count} sequences, got {positions}, {widths} and {heads}"
        elif min(widths) < 1 or sum(widths) != tokens:
            wrong = f"widths must be at least 1 and add up to {tokens} tokens, got {widths}"
        elif any(not 0 <= projected <= width for projected, width in zip(heads, widths, strict=True)):
            wrong = f"heads must be between 0 and widths={widths}, got {heads}"
        elif sum(heads) != step.heads:
            wrong = f"heads must add up to {step.heads}, those of the pass, got {heads}"
        elif min(positions) != step.at:
            wrong = f"the least of positions must be {step.at}, that of the pass, got {positions}"
        elif step.compared not in (0, tokens):
            wrong = f"compared must be 0 or all {tokens} tokens, got {step.compared}"
        elif step.tree and count > 1:
            wrong = f"sequences must be one where several hypotheses are followed, got {self.sequences}"
        if wrong is not None:
            raise CacheError(f"{step.role}: of a batch {wrong}")


class Forward(NamedTuple):
    """Run `layers` of the model `role` on `tokens`, the first of them at cache position `at`. Answer: an output.

    `state` is the output to go on from where the first layer is above 0, or a tuple of the outputs of several passes whose tokens
    follow one another; `heads` is how many positions, the last ones, are projected onto the vocabulary at the end of this pass.
    `unit` is where it is run, if not where the process made its last pass; what it works on then takes a link to get there.

    `tree` makes it a pass over several hypotheses: token i follows token `tree[i]` of this pass, or where that is -1-j the j-th
    token that the cache holds at position at - 1. Without it each follows the one before it, and the first the 0-th there.

    `batch` makes it a pass over several sequences, or over one that is named: `heads` is then the sum of theirs, and `at` the least
    of their positions. `compared` is the number of positions at which the state is compared with that of the layer before.
    """

    role: str
    tokens: tuple[int, ...]
    at: int
    layers: LayerSpan
    state: Any = None
    heads: int = 0
    unit: int | None = None
    tree: tuple[int, ...] = ()
    batch: Batch | None = None
    compared: int = 0

    @property
    def joins(self) -> bool:
        """Whether it goes on from the outputs of several passes, which have ended, not from one that it belongs to."""
        return type(self.state) is tuple  # an output may be a pass itself, and that a tuple with names

    @property
    def positions(self) -> Sequence[int]:
        """The cache position of each token.

        >>> Forward("target", (7, 8, 9, 6), 5, LayerSpan(0, 4), tree=(-1, -2, 0, 2)).positions
        [5, 5, 6, 7]
        >>> Forward("target", (7, 8, 7), 5, LayerSpan(0, 4), batch=Batch((0, 1), (6, 5), (1, 2), (0, 0))).positions
        [6, 5, 6]
        """
        if self.tree:
            found: list[int] = []
            for before in self.tree:
                found.append(self.at if before < 0 else found[before] + 1)
            return found
        batch = self.batch
        if batch is None:
            return range(self.at, self.at + len(self.tokens))
        return [at + index for at, width in zip(batch.positions, batch.widths, strict=True) for index in range(width)]

    @property
    def end(self) -> int:
        """The position after the last token: that of the longest hypothesis of a tree, of the longest sequence of a batch."""
        if self.tree:
            return max(self.positions) + 1
        return self.at + len(self.tokens) if self.batch is None else self.batch.end

    @property
    def width(self) -> int:
        """Number of tokens; in a batch of the sequence that has most."""
        return len(self.tokens) if self.batch is None else max(self.batch.widths)

    @property
    def batch_size(self) -> int:
        """Number of sequences, 1 without a batch."""
        return 1 if self.batch is None else len(self.batch.sequences)

    def sequence_of(self, offset: int) -> int:
        """The number of the sequence of a token, by the token's index as in a list; 0 without a batch.

        >>> step = Forward("target", (7, 8, 7), 5, LayerSpan(0, 4), batch=Batch((3, 1), (6, 5), (1, 2), (0, 0)))
        >>> [step.sequence_of(offset) for offset in (0, 1, -2, -1)]
        [3, 1, 1, 1]
        """
        batch = self.batch
        return 0 if batch is None else batch.sequences[batch.locate(offset % len(self.tokens))[0]]

    def part(self, index: int) -> Forward:
        """The pass of one sequence of the batch, by its index there.

        >>> step = Forward("target", (7, 8, 7), 5, LayerSpan(0, 4), heads=2, batch=Batch((3, 1), (6, 5), (1, 2), (1, 1)))
        >>> step.part(1)
        Forward(role='target', tokens=(8, 7), at=5, layers=LayerSpan(...), state=None, heads=1, ...)
        """
        batch = self.batch
        assert batch is not None
        start, width = batch.starts[index], batch.widths[index]
        compared = width if self.compared else 0
        own, at, heads = self.tokens[start : start + width], batch.positions[index], batch.heads[index]
        return Forward(self.role, own, at, self.layers, self.state, heads, self.unit, self.tree, None, compared)

    def alone(self, hypothesis: int) -> Forward:
        """The pass of one of its hypotheses, where each is one token.

        >>> found = Forward("target", (7, 8, 9), 5, LayerSpan(0, 4), tree=(-1, -1, -1)).alone(1)
        >>> found.tokens, found.at, found.tree
        ((8,), 5, ())
        """
        return self._replace(tokens=(self.tokens[hypothesis],), at=self.positions[hypothesis], tree=())


GREEDY: Final = "next"
SAMPLED: Final = "sample"
"""What decoders read that take the likeliest token, and those that draw one."""


class Read(NamedTuple):
    """Ask an output about the token that follows its position `offset` (negative, from the end, as in a list).

    * `next`: the likeliest token; `top`: the `width` likeliest, best first.
    * `sample`: a token drawn from the law; `probability`: that of `token` under it.
    * `uniform`: a random number in [0, 1), drawn for the test of the token that follows.
    * `confidence`: how sure the output is of `token`, or without one of its likeliest, a number in [0, 1].
    * `saturation`: how little the state has changed in the pass's last layer, a number in [0, 1]; of a pass that `compared` them.
    * `distance`: how far the law is from `token`, its cross-entropy [nats].
    * `residual`: a token drawn from norm(max(0, p - q)), p being this law and q that of the output `against` at `against_offset`.
    * `beams`: the `width` likeliest of all continuations of `hypotheses`, best first (`Continuation`). A hypothesis is a token
      of the pass, by its index, and the logarithm of the probability of all that leads to it.
    """

    kind: Literal["next", "top", "sample", "probability", "uniform", "residual", "confidence", "saturation", "distance", "beams"]
    output: Any
    offset: int = -1
    width: int = 1
    token: int | None = None
    against: Any = None
    against_offset: int = -1
    hypotheses: tuple[tuple[int, float], ...] = ()


class Continuation(NamedTuple):
    """A token that goes on from a hypothesis: of which, by the index of its last token in the pass, and how likely both are."""

    token: int
    follows: int
    score: float
    """The logarithm of the probability of the hypothesis and the token."""


class Fork(NamedTuple):
    """Start sub-processes together, the i-th on `units[i]` (None: on any unit that is free). Answer: a sequence of tasks.

    A sub-process is a generator of steps, or a single pass, whose output is then its value. They start together because dispatching
    is one act of the process that does it, and its cost depends on how many there are.

    The i-th starts with the cache of the ended task `heirs_of[i]`; where that is None, or none are named, with its starter's. On
    the unit where that cache lies it takes no link to get there.
    """

    bodies: tuple[Steps | Forward, ...]
    units: tuple[int | None, ...]
    heirs_of: tuple[Any, ...] = ()


class Join(NamedTuple):
    """Wait until these tasks have ended. Answer: what each has returned."""

    tasks: tuple[Any, ...]


class Stop(NamedTuple):
    """End these tasks now, with all that they have started; one that has already ended is left as it is."""

    tasks: tuple[Any, ...]


class Adopt(NamedTuple):
    """Take over the output of an ended task, and its cache rows of layers [0, layers) at position `at`. Answer: that output.

    Where the task was a pass over several hypotheses, `hypothesis` is the token of it that is taken over, alone.
    """

    task: Any
    at: int
    layers: int
    hypothesis: int | None = None


class Commit(NamedTuple):
    """These tokens are generated, for good. `kind` says what gave them: match, miss, token, round, ...

    `drafted` is how many drafted tokens were on offer, where any could be; all of `tokens` but the last are then accepted ones.

    `back` is how many of the tokens generated last these replace, in methods that follow several hypotheses, of which now one
    leads, now another; so many of `tokens` are then no gain. `sequence` is the number of their sequence, where those of a batch
    commit separately.
    """

    kind: str
    tokens: tuple[int, ...]
    drafted: int | None = None
    back: int = 0
    sequence: int | None = None


Step = Forward | Read | Fork | Join | Stop | Adopt | Commit


class CacheError(RuntimeError):
    """A pass was placed beyond what its cache holds, or a task taken over that has nothing: a defect, in every interpreter."""


class Ending(Protocol):
    """A task as every interpreter keeps it, as far as its end goes."""

    ended: bool
    """Whether it runs no longer, having returned or been stopped."""
    stopped: bool
    """Whether it was stopped before it returned."""


def require_ended(task: Ending) -> None:
    """Refuse to take over the output or the cache of a task that was stopped, or that has not ended."""
    if task.stopped:
        raise CacheError("a task that was stopped cannot be taken over; stop the others and leave this one to end")
    if not task.ended:
        raise CacheError("a task that has not ended cannot be taken over; join it first")
