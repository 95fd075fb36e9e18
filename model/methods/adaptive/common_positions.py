"""Decodings of several lengths that have their first positions in common: followed together, then each at its last positions.

Only at its last positions does a decoding depend on its length, as drafts are cut to the remaining tokens there.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]
Indices = NDArray[np.intp]

Rest = TypeVar("Rest", covariant=True)


class Followed(Protocol[Rest]):
    """Decodings under several laws that are followed from position to position."""

    def step(self, start: int) -> None:
        """Count the rounds that start at a position, and move on to the next."""

    def rest(self, begin: int, columns: Indices) -> Rest:
        """What is needed to go on under some laws from the next position, which is `begin`; positions then count from there.

        At the first position, `begin` may also be below 0: no round starts before.
        """


class DecodingsByLength(NamedTuple):
    """Several decodings by rising number of tokens.

    Parameters
    ----------
    law, tokens
        Law and number of tokens of each.
    longest
        Longest draft.
    """

    law: Indices
    tokens: Integers
    longest: int

    @property
    def last(self) -> int:
        """Number of last positions at which each is followed by itself; none if all have the same length."""
        return self.longest if self.tokens[0] != self.tokens[-1] else 0

    @property
    def begin(self) -> Integers:
        """First one of the last positions of each; below 0 for a decoding that has fewer."""
        return self.tokens - self.last

    @property
    def common(self) -> int:
        """Number of positions before the last ones of the longest."""
        return max(int(self.tokens[-1]) - self.last, 0)

    def rests(self, of: Followed[Rest]) -> Iterator[Rest]:
        """Follow all up to their last positions, and yield what is needed to go on, of all decodings of one length at a time.

        Nothing is yielded if there are no last positions.
        """
        begin, here = self.begin, 0
        for until in np.unique(begin).tolist():
            for start in range(here, until):
                of.step(start)
            here = max(here, until)
            if self.last:
                yield of.rest(until, self.law[begin == until])


class CountedDecodings(NamedTuple):
    """Expected rounds of decodings: up to the last positions by law, and at these by decoding.

    Parameters
    ----------
    common, last
        Shapes (2, positions, drafted tokens, laws) and (2, last positions, drafted tokens, decodings).
    """

    of: DecodingsByLength
    common: Floats
    last: Floats

    def summed(self) -> Floats:
        """Expected rounds of each decoding by drafted tokens; shape (drafted tokens, decodings).

        >>> of = DecodingsByLength(np.array([0, 0]), np.array([1, 3]), 2)
        >>> last = np.array([[[[0.0, 0.5]], [[0.5, 0.5]]], [[[0.0, 0.0]], [[0.0, 0.0]]]])
        >>> CountedDecodings(of, np.full((2, 1, 1, 1), 0.5), last).summed().tolist()
        [[0.5, 2.0]]
        """
        common = np.cumsum(np.pad(self.common.sum(axis=0), ((1, 0), (0, 0), (0, 0))), axis=0)
        first = common[np.maximum(self.of.begin, 0), :, self.of.law]
        return np.asarray(first.T + self.last.sum(axis=(0, 1)))

    def at(self, part: slice) -> Floats:
        """Expected rounds of some decodings at each position of the longest; shape (2, tokens, drafted tokens, decodings).

        >>> of = DecodingsByLength(np.array([0, 0]), np.array([1, 3]), 2)
        >>> counts = CountedDecodings(of, np.ones((2, 1, 1, 1)), np.full((2, 2, 1, 2), 0.5))
        >>> counts.at(slice(2))[0, :, 0].T.tolist()
        [[0.5, 0.0, 0.0], [1.0, 0.5, 0.5]]
        """
        law, last = self.of.law[part], self.last[..., part]
        begin = self.of.begin[part]
        found = np.zeros((2, int(self.of.tokens[part][-1]), *last.shape[2:]))
        first = max(int(begin[-1]), 0)
        found[:, :first] = np.where((np.arange(first)[:, None] < begin)[:, None], self.common[:, :first][..., law], 0.0)
        start = begin + np.arange(last.shape[1])[:, None]
        row, column = np.nonzero(start >= 0)
        found[:, start[row, column], :, column] = last[:, row, :, column]
        return found


def placed(tokens: Any) -> tuple[Indices, Indices]:
    """Order of some decodings by rising number of tokens, and the place of each in it.

    >>> [each.tolist() for each in placed([5, 3, 4])]
    [[1, 2, 0], [2, 0, 1]]
    """
    order = np.argsort(tokens, kind="stable")
    place = np.empty_like(order)
    place[order] = np.arange(order.size)
    return order, place
