"""Luck, indexed by output position: every method, view and grid point that asks for it is dealt the same.

One Philox stream per (seed, purpose, block of replications), laid out position-major: the coin of position j and replication r
does not depend on how many tokens or replications are asked for, on who asks, or in which order. So a longer run extends a shorter
one, results do not depend on the number of workers, and a law with a higher rate can only turn misses into matches.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Replications in a block."""
_ROWS = 32
"""Positions drawn at a time: a tile of 1 MiB stays in the processor's cache while a law and a path read it."""


def stream(seed: int, purpose: str, block: int) -> np.random.Generator:
    """The random stream of one block of replications for one purpose."""
    # crc32 rather than hash(): the latter differs from process to process.
    key = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), block))
    return np.random.Generator(np.random.Philox(key))


def of_text(purpose: str, text: int) -> str:
    """The purpose of the coins of a text, by its number in its batch: the first has those that it would have alone."""
    return f"{purpose}, text {text}" if text else purpose


def tiles(seed: int, purpose: str, block: int, positions: int) -> Iterator[NDArray[np.float64]]:
    """Uniform coins in [0, 1) as tiles of shape (at most 32 positions, BLOCK); the buffer is used again for the next tile.

    >>> first = next(tiles(seed=0, purpose="match", block=0, positions=2)).copy()
    >>> longer = next(tiles(seed=0, purpose="match", block=0, positions=9))
    >>> bool((longer[:2] == first).all()), longer.shape
    (True, (9, 4096))
    """
    rng = stream(seed, purpose, block)
    buffer = np.empty((min(_ROWS, positions), BLOCK))
    for start in range(0, positions, _ROWS):
        tile = buffer[: min(_ROWS, positions - start)]
        rng.random(out=tile)
        yield tile
