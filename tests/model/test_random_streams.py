"""Coins: each has its place, whoever asks, in whatever order, for however many."""

import itertools
import zlib

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from model.outcomes import random_streams
from model.outcomes.random_streams import BLOCK


def dealt(seed: int = 1, purpose: str = "match", block: int = 0, positions: int = 40) -> NDArray[np.float64]:
    """All coins of a block, position by position."""
    return np.concatenate([tile.copy() for tile in random_streams.tiles(seed, purpose, block, positions)])


@pytest.mark.parametrize("positions", [1, 2, 31, 32, 33, 64, 65, 100])
def test_a_longer_run_extends_a_shorter_one(positions: int) -> None:
    shorter = dealt(positions=positions)
    assert shorter.shape == (positions, BLOCK)
    assert (dealt(positions=101)[:positions] == shorter).all()


def test_tiles_are_of_at_most_32_positions() -> None:
    assert [len(tile) for tile in random_streams.tiles(1, "match", 0, 70)] == [32, 32, 6]
    assert [len(tile) for tile in random_streams.tiles(1, "match", 0, 64)] == [32, 32]
    assert [*random_streams.tiles(1, "match", 0, 0)] == []


def test_blocks_may_be_dealt_in_any_order_and_at_the_same_time() -> None:
    alone = [dealt(block=block) for block in range(3)]
    backwards = [dealt(block=block) for block in (2, 1, 0)][::-1]
    woven = [[], [], []]  # type: ignore[var-annotated]
    for tiles in zip(*(random_streams.tiles(1, "match", block, 40) for block in range(3)), strict=True):
        for got, tile in zip(woven, tiles, strict=True):
            got.append(tile.copy())
    for block in range(3):
        assert (alone[block] == backwards[block]).all()
        assert (alone[block] == np.concatenate(woven[block])).all()


def test_seeds_purposes_and_blocks_have_coins_of_their_own() -> None:
    """Independent streams share no coin of 53 bits but by a chance of one in 10^7, and correlate by less than 6 sigma."""
    streams = [
        dealt(), dealt(seed=2), dealt(purpose="accept"), dealt(block=1), dealt(seed=2, block=1),
        dealt(purpose="match 2"), dealt(seed=0), dealt(purpose=""),
    ]  # fmt: skip
    for one, other in itertools.combinations(streams, 2):
        assert not np.isin(one[0], other).any()
        correlation = np.corrcoef(one.ravel(), other.ravel())[0, 1]
        assert abs(correlation) < 6 / np.sqrt(one.size)


def test_coins_are_uniform_and_positions_independent() -> None:
    """Chi-square of 64 cells, and of 8 x 8 cells of neighbours, each one false alarm in a million seeds."""
    coin = dealt(positions=64)
    assert coin.min() >= 0
    assert coin.max() < 1
    for cells in ((64 * coin).astype(int).ravel(), (8 * (8 * coin[:-1]).astype(int) + (8 * coin[1:]).astype(int))[::2].ravel()):
        found, due = np.bincount(cells, minlength=64), cells.size / 64
        assert ((found - due) ** 2 / due).sum() < chi2.isf(1e-6, 63)


def test_a_stream_is_the_same_in_every_process() -> None:
    """The key is made of the seed, a checksum of the purpose and the block: all of them numbers that are fixed for good."""
    key = np.random.SeedSequence(7, spawn_key=(zlib.crc32(b"match"), 3))
    again = np.random.Generator(np.random.Philox(key)).random((2, BLOCK))
    assert (dealt(seed=7, block=3, positions=2) == again).all()
    assert (random_streams.stream(7, "match", 3).random((2, BLOCK)) == again).all()
