"""Random streams: a number depends only on seed, purpose, replication and position, not on the order or size of requests."""

import itertools
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from model.outcomes import random_streams
from model.outcomes.random_streams import BLOCK


def drawn(seed: int = 1, purpose: str = "match", block: int = 0, positions: int = 40) -> NDArray[np.float64]:
    """All random numbers of a block, shape (positions, BLOCK)."""
    return np.concatenate([tile.copy() for tile in random_streams.tiles(seed, purpose, block, positions)])


@pytest.mark.parametrize("positions", [1, 2, 31, 32, 33, 64, 65, 100])
def test_longer_run_extends_a_shorter_one(positions: int) -> None:
    shorter = drawn(positions=positions)
    assert shorter.shape == (positions, BLOCK)
    assert (drawn(positions=101)[:positions] == shorter).all()


def test_tiles_have_at_most_32_positions() -> None:
    assert [len(tile) for tile in random_streams.tiles(1, "match", 0, 70)] == [32, 32, 6]
    assert [len(tile) for tile in random_streams.tiles(1, "match", 0, 64)] == [32, 32]
    assert [*random_streams.tiles(1, "match", 0, 0)] == []


def test_blocks_may_be_drawn_in_any_order_and_interleaved() -> None:
    alone = [drawn(block=block) for block in range(3)]
    backwards = [drawn(block=block) for block in (2, 1, 0)][::-1]
    interleaved = [[], [], []]  # type: ignore[var-annotated]
    for tiles in zip(*(random_streams.tiles(1, "match", block, 40) for block in range(3)), strict=True):
        for got, tile in zip(interleaved, tiles, strict=True):
            got.append(tile.copy())
    for block in range(3):
        assert (alone[block] == backwards[block]).all()
        assert (alone[block] == np.concatenate(interleaved[block])).all()


def test_seeds_purposes_and_blocks_have_independent_streams() -> None:
    """Independent streams share a 53-bit number with probability 10^-7 only, and correlate by less than 6 sigma."""
    streams = [
        drawn(), drawn(seed=2), drawn(purpose="accept"), drawn(block=1), drawn(seed=2, block=1),
        drawn(purpose="match 2"), drawn(seed=0), drawn(purpose=""),
    ]  # fmt: skip
    for one, other in itertools.combinations(streams, 2):
        assert not np.isin(one[0], other).any()
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 6 / np.sqrt(one.size)


def test_draws_are_uniform_and_positions_independent() -> None:
    """Chi-square tests of 64 cells, and of 8 x 8 cells of neighbours, each with one false alarm in a million seeds."""
    draws = drawn(positions=64)
    assert draws.min() >= 0
    assert draws.max() < 1
    for cells in ((64 * draws).astype(int).ravel(), (8 * (8 * draws[:-1]).astype(int) + (8 * draws[1:]).astype(int))[::2].ravel()):
        counts, expected = np.bincount(cells, minlength=64), cells.size / 64
        assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-6, 63)


def test_stream_is_the_same_in_every_process() -> None:
    """The key consists of the seed, a checksum of the purpose and the block, which do not depend on the process."""
    key = np.random.SeedSequence(7, spawn_key=(zlib.crc32(b"match"), 3))
    again = np.random.Generator(np.random.Philox(key)).random((2, BLOCK))
    assert (drawn(seed=7, block=3, positions=2) == again).all()
    assert (random_streams.stream(7, "match", 3).random((2, BLOCK)) == again).all()


@pytest.mark.parametrize("order", [*itertools.permutations([1, 32, 45, 100])], ids=str)
def test_recent_tiles_are_those_of_the_stream_in_any_order_of_requests(order: tuple[int, ...]) -> None:
    whole = drawn(seed=3, block=2, positions=100)
    for positions in order:
        found = [*random_streams.recent_tiles(3, "match", 2, positions)]
        assert [len(tile) for tile in found] == [len(tile) for tile in random_streams.tiles(3, "match", 2, positions)]
        assert (np.concatenate(found) == whole[:positions]).all()
    assert [*random_streams.recent_tiles(3, "match", 2, 0)] == []


def test_recent_tiles_are_drawn_once_and_cannot_be_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    first = [*random_streams.recent_tiles(11, "match", 0, 70)]
    monkeypatch.setattr(random_streams, "stream", None)  # nothing more is drawn
    assert all(one is other for one, other in zip(first, random_streams.recent_tiles(11, "match", 0, 70), strict=True))
    with pytest.raises(ValueError, match="read-only"):
        first[0][0, 0] = 0.5


def test_recent_tiles_differ_by_seed_purpose_and_block() -> None:
    streams = [
        [*random_streams.recent_tiles(*key, 33)]
        for key in ((5, "match", 0), (6, "match", 0), (5, "accept", 0), (5, "match", 1), (5, "match", 0))
    ]
    assert not any(np.isin(one[tile][0], other[tile]).any() for one, other in itertools.pairwise(streams) for tile in (0, 1))
    assert (streams[0][1] == streams[-1][1]).all()


def test_memory_of_recent_tiles_is_bounded() -> None:
    for block in range(20):
        for _ in random_streams.recent_tiles(13, "match", block, 64):
            pass
    kept = random_streams._tile.cache_info()
    assert kept.currsize == kept.maxsize == 32  # of 1 MiB each
