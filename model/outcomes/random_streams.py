"""Random streams indexed by output position, shared by all methods, views and grid points (common random numbers).

There is one Philox stream per (seed, purpose, block of replications), in position-major order. The number at position j of
replication r does not depend on the number of tokens or replications, on the caller, or on the order of calls. Therefore a longer
run extends a shorter one, results do not depend on the number of workers, and a higher rate can only turn misses into matches.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator
from typing import cast

import numpy as np
from numpy.typing import NDArray

BLOCK = 4096
"""Replications per block."""
_ROWS = 32
"""Positions per tile: a tile of 1 MiB stays in the processor's cache while a law and a path read it."""
_RECENT = 32
"""Tiles that `recent_tiles` keeps."""
_PER_COUNT = 4
"""Numbers that Philox draws at each step of its counter."""


def stream(seed: int, purpose: str, block: int) -> np.random.Generator:
    """Random stream of one block of replications for one purpose."""
    # crc32, because hash() differs between processes.
    key = np.random.SeedSequence(seed, spawn_key=(zlib.crc32(purpose.encode()), block))
    return np.random.Generator(np.random.Philox(key))


def sequence_purpose(purpose: str, sequence: int) -> str:
    """Purpose of the random stream of sequence number `text` of a batch; the first sequence has the stream of a single one."""
    return f"{purpose}, text {sequence}" if sequence else purpose


def tiles(seed: int, purpose: str, block: int, positions: int) -> Iterator[NDArray[np.float64]]:
    """Yield uniform random numbers in [0, 1) as tiles of shape (at most 32 positions, BLOCK); every tile reuses one buffer.

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


def recent_tiles(seed: int, purpose: str, block: int, positions: int) -> Iterator[NDArray[np.float64]]:
    """Same numbers as `tiles`, for streams that are read again soon: by all views, and at all points of a grid with one seed.

    The last 32 tiles (32 MiB) are kept, so that a run of few blocks draws each number once. Tiles cannot be written to.

    >>> once, again = (next(recent_tiles(seed=0, purpose="match", block=0, positions=2)) for _ in range(2))
    >>> once is again, bool((once == next(tiles(seed=0, purpose="match", block=0, positions=2))).all())
    (True, True)
    """
    for start in range(0, positions, _ROWS):
        yield _tile(seed, purpose, block, start, min(_ROWS, positions - start))


@functools.lru_cache(maxsize=_RECENT)
def _tile(seed: int, purpose: str, block: int, start: int, rows: int) -> NDArray[np.float64]:
    """Numbers at positions [start, start + rows) of a stream."""
    rng = stream(seed, purpose, block)
    cast(np.random.Philox, rng.bit_generator).advance(start * BLOCK // _PER_COUNT)
    tile = rng.random((rows, BLOCK))
    tile.flags.writeable = False
    return tile
