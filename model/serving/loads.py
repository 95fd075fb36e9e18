"""Loads: when requests arrive, and how long their prompts and outputs are.

A load is a function of the number of a request, so that every policy, interpreter and worker sees the same requests. Random numbers
are keyed by seed, replication and block of requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.base.checks import ParameterError
from model.outcomes import random_streams
from model.serving.server import ServerRequest

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]

BLOCK = 4096
_KEPT = 16
"""Blocks that are kept; others are drawn again when they are needed."""
MOST_REQUESTS = 10_000_000
LEAST_SPEED, MOST_SPEED = 1e-6, 1e6
"""Speeds at which a trace is played, relative to its own."""


@dataclass(frozen=True)
class RequestLengths:
    """Tokens of prompts and outputs.

    Parameters
    ----------
    prompt, output
        Mean tokens.
    prompt_cv, output_cv
        Coefficient of variation of a log-normal law, rounded to at least 1 token; 0: all are equal.

    >>> RequestLengths(1000, 200).drawn(0, 0, 2).tolist()
    [[1000, 200], [1000, 200]]
    """

    prompt: float
    output: float
    prompt_cv: float = 0.0
    output_cv: float = 0.0

    def __post_init__(self) -> None:
        for name in ("prompt", "output"):
            checks.number(name, getattr(self, name), 1, checks.MAX_TOKENS)
            checks.number(f"{name}_cv", getattr(self, f"{name}_cv"), 0, 10)

    def drawn(self, seed: int, block: int, count: int) -> Integers:
        """Prompt and output tokens of the requests of a block; shape (count, 2)."""
        random = random_streams.stream(seed, "lengths of requests", block)
        normal = random.standard_normal((count, 2))
        means, variations = np.array([self.prompt, self.output]), np.array([self.prompt_cv, self.output_cv])
        spread = np.sqrt(np.log1p(variations**2))
        found = np.exp(np.log(means) + spread * normal - spread**2 / 2)
        return np.asarray(np.clip(np.rint(found), 1, checks.MAX_TOKENS), dtype=np.int64)


class TracedRequests(NamedTuple):
    """Requests of a trace: arrival times from 0 on [s], and tokens of prompts and outputs; arrays of shape (requests,)."""

    arrivals: Floats
    prompts: Integers
    outputs: Integers


class Load(ABC):
    """Requests by number.

    `count` is their number, and `concurrency` the number of clients that each send the next request when theirs is finished; None:
    requests arrive at their own times.
    """

    count: int
    concurrency: int | None = None

    @abstractmethod
    def request(self, number: int) -> ServerRequest:
        """ServerRequest of a number; its arrival is 0 where clients send it."""

    @property
    @abstractmethod
    def longest(self) -> tuple[int, int]:
        """Tokens of the prompt and the output of the request that has the most of both together."""


@dataclass(frozen=True)
class DrawnLoad(Load):
    """Requests with drawn lengths, at a rate or by clients.

    Parameters
    ----------
    lengths, count
        Law of the lengths, and number of requests.
    rate
        Requests per second; None with `concurrency`.
    burstiness
        Coefficient of variation of the gaps between arrivals, which have a gamma law: 1 is a Poisson process, 0 even gaps.
    concurrency
        Clients; None with `rate`.
    seed, replication
        Key of the random draws.

    >>> load = DrawnLoad(RequestLengths(100, 20), 1000, rate=4.0, burstiness=0.0)
    >>> round(load.request(999).arrival, 9)
    250.0
    """

    lengths: RequestLengths
    count: int
    rate: float | None = None
    burstiness: float = 1.0
    concurrency: int | None = None
    seed: int = 0
    replication: int = 0
    _blocks: OrderedDict[int, tuple[Integers, Floats]] = field(default_factory=OrderedDict, init=False, repr=False, compare=False)
    """Lengths and arrivals of the blocks of requests that were used last."""
    _starts: list[float] = field(default_factory=lambda: [0.0], init=False, repr=False, compare=False)
    """Arrival of the last request before each block."""

    def __post_init__(self) -> None:
        checks.whole("requests", self.count, 1, MOST_REQUESTS)
        if (self.rate is None) == (self.concurrency is None):
            raise ParameterError("a load needs a rate or a concurrency, and not both")
        if self.rate is not None:
            checks.number("rate", self.rate, 1e-6, 1e6)
        if self.concurrency is not None:
            checks.whole("concurrency", self.concurrency, 1, 65_536)
        if self.burstiness:  # 0: even gaps
            checks.number("burstiness", self.burstiness, 1e-3, 100)

    def request(self, number: int) -> ServerRequest:
        """See `Load`."""
        block, place = divmod(number, BLOCK)
        lengths, arrivals = self._block(block)
        prompt, output = lengths[place].tolist()
        return ServerRequest(number, 0.0 if self.rate is None else float(arrivals[place]), prompt, output)

    @property
    def longest(self) -> tuple[int, int]:
        """See `Load`."""
        if not (self.lengths.prompt_cv or self.lengths.output_cv):
            first = self.request(0)
            return first.prompt, first.output
        return max((_longest(self._block(each)[0]) for each in range(-(-self.count // BLOCK))), key=sum)

    def _block(self, index: int) -> tuple[Integers, Floats]:
        found = self._blocks.get(index)
        if found is None:
            while len(self._starts) <= index:  # arrivals follow from all gaps before
                self._draw(len(self._starts) - 1)
            found = self._draw(index)
        return found

    def _draw(self, index: int) -> tuple[Integers, Floats]:
        number = min(BLOCK, self.count - index * BLOCK)
        arrivals = np.zeros(number)
        if self.rate is not None:
            random = random_streams.stream(self._key, "gaps between requests", index)
            shape = 1 / self.burstiness**2 if self.burstiness else 0.0
            gaps = random.gamma(shape, 1 / (shape * self.rate), number) if shape else np.full(number, 1 / self.rate)
            arrivals = np.concatenate([self._starts[index : index + 1], gaps]).cumsum()[1:]
        if len(self._starts) == index + 1:
            self._starts.append(float(arrivals[-1]))
        found = self._blocks[index] = self.lengths.drawn(self._key, index, number), arrivals
        if len(self._blocks) > _KEPT:
            self._blocks.popitem(last=False)
        return found

    @property
    def _key(self) -> int:
        """Seed of this replication."""
        if not self.replication:
            return self.seed
        return int(np.random.SeedSequence((self.seed, self.replication)).generate_state(1)[0])


@dataclass(frozen=True, eq=False)
class TracedLoad(Load):
    """Requests of a trace, at its arrival times or by clients.

    `speed` divides the times: 2 is a load of twice the rate.
    """

    trace: TracedRequests
    speed: float = 1.0
    concurrency: int | None = None

    def __post_init__(self) -> None:
        checks.number("speed", self.speed, LEAST_SPEED, MOST_SPEED)

    @property
    def count(self) -> int:  # type: ignore[override]
        """Number of requests."""
        return int(self.trace.arrivals.size)

    def request(self, number: int) -> ServerRequest:
        """See `Load`."""
        arrival = 0.0 if self.concurrency is not None else float(self.trace.arrivals[number]) / self.speed
        return ServerRequest(number, arrival, int(self.trace.prompts[number]), int(self.trace.outputs[number]))

    @property
    def longest(self) -> tuple[int, int]:
        """See `Load`."""
        return _longest(np.column_stack([self.trace.prompts, self.trace.outputs]))


def _longest(lengths: Integers) -> tuple[int, int]:
    """The row with the largest sum; `lengths` has the shape (requests, 2)."""
    prompt, output = lengths[lengths.sum(axis=1).argmax()].tolist()
    return prompt, output
