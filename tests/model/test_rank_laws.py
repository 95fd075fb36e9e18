"""Laws of ranks: draws by interval, frequencies, classes, records."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.methods.rounds.round_laws import Rounds
from model.outcomes import random_streams
from model.outcomes.rank_laws import RankRates, ReplayedRanks

TABLE = [[0.5, 0.2, 0.1], [0.4, 0.0, 0.3]]


def drawn(law: RankRates | ReplayedRanks, draws: np.ndarray) -> np.ndarray:
    return next(law.sample(iter([draws]))).copy()


@given(st.lists(st.floats(0, 1), min_size=1, max_size=4), st.lists(st.floats(0, 1, exclude_max=True), min_size=1, max_size=20))
def test_one_candidate_is_the_law_of_rounds(rates: list[float], draws: list[float]) -> None:
    """Draw by draw, also at the bounds of the intervals."""
    survival = np.cumprod(rates)
    values = np.array([*draws, *survival[survival < 1], *np.nextafter(survival, 0)])[None]
    ranks = drawn(RankRates([[[rate] for rate in rates]]), values)[0, 1:]
    accepted = np.cumprod(ranks, axis=0).sum(axis=0)
    assert accepted.tolist() == Rounds.by_draft_position(rates).survivors(iter([values]), len(rates))[0].tolist()


@given(st.floats(0, 1, exclude_max=True), st.floats(0, 1, exclude_max=True))
def test_a_smaller_draw_has_the_earlier_path(one: float, other: float) -> None:
    low, high = sorted((one, other))
    paths = drawn(RankRates([TABLE]), np.array([[low, high]]))[0, 1:].T
    first, second = ([rank or 9 for rank in path] for path in paths.tolist())  # none comes last
    assert first <= second


def test_a_draw_at_a_bound_is_in_the_interval_above() -> None:
    """Quotients that are rounded across a bound are corrected."""
    table = [[0.1] * 9] * 3
    bounds = np.arange(1, 730) / 1000.0
    ranks = drawn(RankRates([table]), np.stack([bounds, np.nextafter(bounds, 0)]))[:, 1:]
    low, size = np.zeros(bounds.size), np.ones(bounds.size)
    for depth in range(2):
        own = ranks[0, depth].astype(int)
        inside = own > 0
        edges = np.concatenate([[0.0], np.cumsum(table[depth])])
        assert (bounds[inside] >= (low + size * edges[own - 1])[inside]).all()
        assert (bounds[inside] < (low + size * edges[np.minimum(own, 9)])[inside]).all()
        low, size = np.where(inside, low + size * edges[own - 1], low), np.where(inside, size * 0.1, 0.0)


def test_frequencies() -> None:
    """Counts of each path within five standard deviations: a false alarm in a million runs for each of 13 paths."""
    law, blocks = RankRates([TABLE]), 20
    counts: dict[tuple[int, ...], int] = {}
    for block in range(blocks):
        for tile in law.sample(random_streams.tiles(0, "rank", block, 8)):
            paths, times = np.unique(tile[:, 1:].swapaxes(0, 1).reshape(2, -1), axis=1, return_counts=True)
            for path, count in zip(map(tuple, paths.T.tolist()), times.tolist(), strict=True):
                counts[path] = counts.get(path, 0) + count
    total = blocks * 8 * random_streams.BLOCK
    assert sum(counts.values()) == total
    ends = {0: 1 - 0.8}
    for first, rate in enumerate(TABLE[0], 1):
        for second, chance in enumerate([1 - sum(TABLE[1]), *TABLE[1]]):
            want = rate * chance
            assert abs(counts.get((first, second), 0) - total * want) <= 5 * (total * want * (1 - want)) ** 0.5
    assert abs(counts[0, 0] - total * ends[0]) <= 5 * (total * 0.2 * 0.8) ** 0.5


def test_classes_of_drafts_and_of_sequences() -> None:
    """Each draft has its class, in its share; with `by_sequence` all drafts of a sequence have one."""
    tables = [[[1.0]], [[0.0]]]
    draws = np.array([(np.arange(8) + 0.5) / 8, np.full(8, 0.1)])
    each = drawn(RankRates(tables, [3, 1]), draws)
    assert each[:, 0].tolist() == [[0] * 6 + [1] * 2, [0] * 8]
    assert each[:, 1].tolist() == [[1] * 6 + [0] * 2, [1] * 8]
    whole = drawn(RankRates(tables, [3, 1], by_sequence=True), draws)
    assert whole[:, 0].tolist() == [[0] * 6 + [1] * 2] * 2
    assert whole[:, 1].tolist() == [[1] * 6 + [0] * 2] * 2


def test_a_class_uses_its_part_of_the_draw() -> None:
    """Ranks within a class are independent of the class: a draw in the middle of its part is the median of its ranks."""
    found = drawn(RankRates([[[0.5, 0.5]], [[0.5, 0.5]]]), np.array([[0.24, 0.26, 0.74, 0.76]]))
    assert found[0].tolist() == [[0, 0, 1, 1], [1, 2, 1, 2]]


def test_results_do_not_depend_on_tiles() -> None:
    law, draws = RankRates([TABLE, TABLE[::-1]], [1, 2]), np.random.default_rng(1).random((37, 50))
    whole = drawn(law, draws)
    parts = np.concatenate([tile.copy() for tile in law.sample(iter([draws[:32], draws[32:]]))])
    assert (whole == parts).all()


@pytest.mark.parametrize(("make", "message"), [
    (lambda: RankRates([]), "rates must be tables of one depth of at least 1"),
    (lambda: RankRates([[[0.5]], [[0.5], [0.5]]]), r"for each class, got depths \[1, 2\]"),
    (lambda: RankRates([[[0.7, 0.4]]]), "sum to at most 1"),
    (lambda: RankRates([[[1.2]]]), "rates"),
    (lambda: RankRates([[[0.5]]], [0.0]), "weights must have one share"),
    (lambda: RankRates([[[0.5]]], [1.0, 1.0]), "weights must have one share"),
    (lambda: ReplayedRanks([[1, 2]]), "records must be lists of ranks"),
    (lambda: ReplayedRanks([[[0.5]]]), "records"),
    (lambda: drawn(ReplayedRanks([[[1]]]), np.zeros((2, 1))), "records must cover 2 output positions, got 1"),
])  # fmt: skip
def test_impossible_laws(make: object, message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        make()  # type: ignore[operator]
