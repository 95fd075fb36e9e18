"""Prices of passes at a fixed place in a long text, for many draws of what is uncertain and many cells at once.

A decoding of many tokens at constant prices has a time per token that does not depend on how it begins and ends. The closed forms
of it (`steady_state` of a method's theory) take these prices: arrays of shape (draws, cells), where a cell is a number of running
sequences and a context.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks

Floats = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class SteadyPrices:
    """Prices of whole passes.

    Parameters
    ----------
    seconds
        Function from tokens per sequence to the time of a pass of the target [s], shape (draws, cells); asked once for each width.
    draft
        Time of a pass of the draft, at any width [s]; shape (draws, cells).
    branches
        Function from drafts of each sequence to the time of a pass of the draft over one token of all of them [s], of that shape;
        None: as long as over one draft.
    sequences
        Running sequences of each cell, shape (cells,) or one that broadcasts.
    overhead
        Part of a pass of the target that does not come from its layers, at any width [s]; of that shape, or one that broadcasts.
    waiting
        Time per output token that goes to other work, such as prompts of other requests, the same for each method [s];
        as `overhead`.

    >>> prices = SteadyPrices(lambda width: np.full((1, 1), 1.0 + 0.1 * width), np.full((1, 1), 0.2))
    >>> prices.verify(1).tolist(), prices.widths(2).tolist(), prices.shape
    ([[1.1]], [[[1.1, 1.2]]], (1, 1))
    """

    seconds: Callable[[int], Floats]
    draft: Floats
    overhead: Floats | float = 0.0
    waiting: Floats | float = 0.0
    branches: Callable[[int], Floats] | None = None
    sequences: Floats | float = 1.0
    _known: dict[int, Floats] = field(default_factory=dict, init=False, repr=False)

    @property
    def shape(self) -> tuple[int, ...]:
        """Draws and cells."""
        return self.draft.shape

    def verify(self, width: int) -> Floats:
        """Time of a pass of the target over this number of tokens per sequence [s]; 1: a step of plain decoding."""
        checks.whole("width", width, 1)
        if width not in self._known:
            self._known[width] = np.broadcast_to(self.seconds(width), self.shape)
        return self._known[width]

    def branched(self, drafts: int) -> Floats:
        """Time of a pass of the draft over one token of this number of drafts of each sequence [s]."""
        checks.whole("drafts", drafts, 1)
        return self.draft if self.branches is None or drafts == 1 else np.broadcast_to(self.branches(drafts), self.shape)

    def part(self, share: float, *, begins: bool, width: int = 1) -> Floats:
        """Time of a pass through this share of the target's layers [s]; with the overhead if it begins at the first layer.

        >>> prices = SteadyPrices(lambda width: np.full((1, 1), 5.0), np.zeros((1, 1)), overhead=1.0)
        >>> prices.part(0.5, begins=True).tolist(), prices.part(0.5, begins=False).tolist()
        ([[3.0]], [[2.0]])
        """
        return np.asarray(share * np.maximum(self.verify(width) - self.overhead, 0.0) + (self.overhead if begins else 0.0))

    def widths(self, most: int) -> Floats:
        """Times of passes over 1, 2, ..., `most` tokens [s], along a new last axis."""
        return np.stack([self.verify(width) for width in range(1, most + 1)], axis=-1)

    def at(self, cells: Any) -> SteadyPrices:
        """Prices of a subset of the cells."""
        overhead, waiting = (np.broadcast_to(each, self.shape)[:, cells] for each in (self.overhead, self.waiting))
        sequences = np.broadcast_to(self.sequences, self.shape[1:])[cells]
        return SteadyPrices(
            lambda width: self.verify(width)[:, cells], self.draft[:, cells], overhead, waiting,
            lambda drafts: self.branched(drafts)[:, cells], sequences,
        )  # fmt: skip
