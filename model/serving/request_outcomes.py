"""Outcomes of the requests of a server, drawn from their law: the same for every interpreter, policy and order of service."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.outcomes import random_streams

Integers = NDArray[np.int64]

BLOCK = 256
"""Requests whose outcomes are drawn together."""
_POSITIONS = 32
_KEPT = 16
"""Blocks that are kept; others are drawn again when they are needed."""

LOOKUP = "lookup"
"""Outcome of methods that look tokens up; the others draft with a model."""


class RequestOutcomes:
    """Outcomes by output position of each request.

    Parameters
    ----------
    law
        Law of accepted drafts (`model.outcomes`), or of lookups (`model.outcomes.lookup_laws`).
    outcome
        `accept` or `lookup`.
    longest
        Largest draft length.
    tokens
        Output tokens of the request of a number; requests from `count` on do not exist.
    count
        Number of requests.
    seed, replication
        Key of the random draws.

    >>> from model.outcomes.outcome_laws import Iid
    >>> some = RequestOutcomes(Iid(0.7), "accept", 3, lambda number: 8, 300, seed=0)
    >>> more = RequestOutcomes(Iid(0.7), "accept", 3, lambda number: 8, 1000, seed=0)
    >>> some.of(299).tolist() == more.of(299).tolist(), len(some.of(0))
    (True, 8)
    """

    def __init__(
        self, law: Any, outcome: str, longest: int, tokens: Callable[[int], int], count: int, *, seed: int, replication: int = 0
    ) -> None:
        self.law, self.outcome, self.longest, self.tokens, self.count = law, outcome, longest, tokens, count
        self.seed, self.purpose = seed, f"{outcome} of requests, replication {replication}"
        self._blocks: OrderedDict[int, Integers] = OrderedDict()

    def of(self, number: int) -> Integers:
        """Outcomes of one request, of shape (output tokens,): accepted tokens of a draft that starts there, or a packed lookup."""
        block, place = divmod(number, BLOCK)
        found = self._blocks.get(block)
        if found is None:
            found = self._blocks[block] = self._drawn(block)
            if len(self._blocks) > _KEPT:
                self._blocks.popitem(last=False)
        else:
            self._blocks.move_to_end(block)
        return found[place, : self.tokens(number)]

    def _drawn(self, block: int) -> Integers:
        last = min((block + 1) * BLOCK, self.count)
        positions = max(self.tokens(number) for number in range(block * BLOCK, last))
        random = random_streams.stream(self.seed, self.purpose, block)

        def draws() -> Iterator[NDArray[np.float64]]:
            for start in range(0, positions, _POSITIONS):
                yield random.random((min(_POSITIONS, positions - start), BLOCK))

        if self.outcome == LOOKUP:
            found = np.concatenate([tile.copy() for tile in self.law.sample(draws())])
        else:
            found = self.law.survivors(draws(), self.longest)
        return np.ascontiguousarray(found.T)
