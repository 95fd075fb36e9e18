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

from collections.abc import Collection, Generator, Sequence
from typing import Any, Final, Literal, NamedTuple, Protocol

Steps = Generator["Step", Any, Any]
"""An algorithm or a sub-process: yields steps, is sent answers, returns whatever its starter may want of it."""


def ended(tokens: list[int], stop: Collection[int]) -> list[int]:
    """Tokens up to the first that ends a text.

    >>> ended([7, 2, 9, 2], (9, 3))
    [7, 2, 9]
    """
    return next((tokens[: place + 1] for place, token in enumerate(tokens) if token in stop), tokens)


class Forward(NamedTuple):
    """Run layers [first, last) of `role` on `tokens`, the first of them at cache position `at`. Answer: an output.

    `state` is the output to go on from where `first` is above 0; `heads` is how many of the positions are projected onto the
    vocabulary at the end of this pass. A span without layers is a head alone. `unit` is where it is run, if not where the process
    made its last pass; what it works on then takes a link to get there.

    `after` makes it a pass over several hypotheses, a tree: token i follows token `after[i]` of this pass, or where that is -1-j
    the j-th token that the cache holds at position at - 1. Without it each follows the one before it, and the first the 0-th there.

    `texts` makes it a pass over a batch, of as many tokens of each of the texts with these numbers: all of the first text come
    first, then as many of the second; so do the positions that `heads` and `compared` count. The first of each stands at position
    `at` of its text, or where texts stand at unequal positions the i-th at `places[i]`, and `at` is the least of them. Each text
    has a cache of its own; those that have ended are no longer named.

    Layers of `gaps`, half-open ranges between `first` and `last`, are not run: the state goes past them as it is, and they get no
    row. With `rows_only` the layers make keys and values of the state and no more: it does not change. `state` may be the outputs
    of several passes, one behind the other. `compared` is at how many positions the state is compared with that of the layer
    before.
    """

    role: str
    tokens: tuple[int, ...]
    at: int
    first: int
    last: int
    state: Any = None
    heads: int = 0
    unit: int | None = None
    after: tuple[int, ...] = ()
    texts: tuple[int, ...] = ()
    gaps: tuple[tuple[int, int], ...] = ()
    rows_only: bool = False
    compared: int = 0
    places: tuple[int, ...] = ()

    @property
    def spans(self) -> Sequence[tuple[int, int]]:
        """The layers that are run, as half-open ranges.

        >>> Forward("target", (7,), 5, 0, 24, gaps=((1, 17),)).spans
        [(0, 1), (17, 24)]
        """
        bounds = [self.first, *[bound for gap in self.gaps for bound in gap], self.last]
        return [span for span in zip(bounds[::2], bounds[1::2], strict=True) if span[0] < span[1]]

    @property
    def joins(self) -> bool:
        """Whether it goes on from the outputs of several passes, which have ended, not from one that it belongs to."""
        return type(self.state) is tuple  # an output may be a pass itself, and that a tuple with names

    @property
    def positions(self) -> Sequence[int]:
        """The cache position of each token.

        >>> Forward("target", (7, 8, 9, 6), 5, 0, 4, after=(-1, -2, 0, 2)).positions
        [5, 5, 6, 7]
        >>> Forward("target", (7, 8, 7, 9), 5, 0, 4, texts=(0, 1), places=(6, 5)).positions
        [6, 7, 5, 6]
        """
        if len(self.texts) > 1:
            width = self.width
            return [place + index for place in self.places or (self.at,) * len(self.texts) for index in range(width)]
        if not self.after:
            return range(self.at, self.at + len(self.tokens))
        found: list[int] = []
        for before in self.after:
            found.append(self.at if before < 0 else found[before] + 1)
        return found

    @property
    def end(self) -> int:
        """The position behind its last token: of a tree, behind its longest hypothesis, of a batch, behind its longest text."""
        if len(self.texts) > 1:
            return max(self.places, default=self.at) + self.width
        return max(self.positions) + 1 if self.after else self.at + len(self.tokens)

    @property
    def width(self) -> int:
        """How many tokens of each text there are."""
        return len(self.tokens) // max(len(self.texts), 1)

    def text_of(self, offset: int) -> int:
        """The number of the text that a token is of, by the token's index as in a list; 0 where there is no batch.

        >>> [Forward("target", (7, 8, 7, 9), 5, 0, 4, texts=(3, 1)).text_of(offset) for offset in (0, 1, -2, -1)]
        [3, 3, 1, 1]
        """
        return self.texts[offset % len(self.tokens) // self.width] if self.texts else 0

    def part(self, index: int) -> Forward:
        """This pass as one of its texts sees it, by its index in `texts`.

        >>> Forward("target", (7, 8, 7, 9), 5, 0, 4, heads=4, texts=(3, 1), places=(6, 5)).part(0)
        Forward(role='target', tokens=(7, 8), at=6, first=0, last=4, state=None, heads=2, ...)
        """
        count, width = len(self.texts), self.width
        role, tokens, at, first, last, state, heads, unit, after, _, gaps, rows_only, compared, places = self
        own, place = tokens[index * width : (index + 1) * width], places[index] if places else at
        return Forward(role, own, place, first, last, state, heads // count, unit, after, (), gaps, rows_only, compared // count)

    def alone(self, hypothesis: int) -> Forward:
        """This pass as one of its hypotheses sees it, those that are a token each.

        >>> Forward("target", (7, 8, 9), 5, 0, 4, after=(-1, -1, -1)).alone(1)[:5]
        ('target', (8,), 5, 0, 4)
        """
        return self._replace(tokens=(self.tokens[hypothesis],), at=self.positions[hypothesis], after=())


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
    * `beams`: the `width` likeliest of all continuations of `hypotheses`, best first, as `Continuation`s. A hypothesis is a token
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
    """These tokens are output, for good. `kind` says what gave them: match, miss, token, round, ...

    `drafted` is how many drafted tokens were on offer, where any could be; all of `tokens` but the last are then accepted ones.

    `back` is how many of the tokens put out last these replace, in methods that follow several hypotheses, of which now one leads,
    now another; so many of `tokens` are then no gain. `text` is the number of the text that they are of, where texts of a batch put
    out each its own.
    """

    kind: str
    tokens: tuple[int, ...]
    drafted: int | None = None
    back: int = 0
    text: int | None = None


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
