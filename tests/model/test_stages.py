"""Stages: moments compared with brute-force enumeration, sums with a plain loop."""

import itertools

import numpy as np
import pytest

from model.base.checks import ParameterError
from model.methods.stages import Stage, moments, moments_of_pairs, sums
from model.outcomes.outcome_laws import ByPosition, Iid, Law, Markov, RecordedProbabilities, Replay

TWO = (Stage(7.0, 11.0, 1), Stage(3.0, 20.0, 1))
THREE = (Stage(7.0, 11.0, 1), Stage(3.0, 20.0, 2), Stage(5.5, 2.0, 1))
FOUR = (Stage(7.0, 11.0, 2), Stage(3.0, 20.0, 3), Stage(5.5, 2.0, 1), Stage(1.0, 1.0, 0))
LAWS: list[Law] = [
    Iid(0.3), Iid(1.0), Markov(0.4, 0.5), Markov(0.5, -1.0), ByPosition([0.9, 0.1, 0.6, 0.3, 0.5, 0.8]),
    Replay([[True, False, True, True, True], [True] * 5, [False, False, True, True, False]]),
    RecordedProbabilities([[0.9, 0.1, 0.6, 0.3, 0.5], [0.5] * 5]),
]  # fmt: skip


def by_position(steps: tuple[Stage, ...], tokens: int) -> tuple[Stage, ...]:
    """Stages with times that vary by position."""
    rng = np.random.default_rng(len(steps))
    return tuple(Stage(stage.time + rng.random(tokens), stage.busy * rng.random(tokens), stage.on_match) for stage in steps)


def walk(steps: tuple[Stage, ...], matches: tuple[bool, ...]) -> tuple[float, float]:
    """Time and unit-time of one decoding, token by token."""
    stage, time, busy = 0, 0.0, 0.0
    for at, match in enumerate((*matches, False)):
        here = [float(np.broadcast_to(value, len(matches) + 1)[at]) for value in steps[stage][:2]]
        time, busy = time + here[0], busy + here[1]
        stage = steps[stage].on_match if match else 0
    return time, busy


def chance(law: Law, matches: tuple[bool, ...]) -> float:
    """Probability of a sequence of matches."""
    if isinstance(law, RecordedProbabilities):
        return float(np.mean([chance(each, matches) for each in law.chains]))
    if isinstance(law, Replay):
        return float(np.mean([tuple(record[: len(matches)]) == matches for record in law.records.tolist()]))
    product, last = 1.0, None
    for index, match in enumerate(matches):
        if isinstance(law, ByPosition):
            p = law.rates[index]
        elif isinstance(law, Markov) and last is not None:
            p = law.rate + law.correlation * (last - law.rate)
        else:
            p = law.rate  # type: ignore[attr-defined]
        product, last = product * float(p if match else 1 - p), match
    return product


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize("steps", [TWO, THREE, FOUR])
@pytest.mark.parametrize("n", [1, 2, 3, 6])
@pytest.mark.parametrize("varied", [False, True])
def test_moments_by_enumeration(law: Law, steps: tuple[Stage, ...], n: int, varied: bool) -> None:
    steps = by_position(steps, n) if varied else steps
    sequences = list(itertools.product((False, True), repeat=n - 1))
    mass = np.array([chance(law, matches) for matches in sequences])
    time, busy = np.array([walk(steps, matches) for matches in sequences]).T
    assert mass.sum() == pytest.approx(1)
    mean, variance, busy_mean, ratio = moments(steps, n, law)
    assert mean == pytest.approx(mass @ time)
    assert variance == pytest.approx(mass @ (time - mass @ time) ** 2, abs=1e-9)
    assert variance >= 0
    assert busy_mean == pytest.approx(mass @ busy)
    if isinstance(law, Replay) or (len(steps) == 2 and not varied):
        assert ratio == pytest.approx(mass @ (busy / time))
    else:
        assert np.isnan(ratio) or ratio == pytest.approx(mass @ (busy / time))


def test_variance_of_stages_is_never_negative() -> None:
    """If the time is certain, mean square minus squared mean is rounding error of either sign."""
    tenths = (Stage(0.1, 0.3, 1), Stage(0.7, 0.1, 2), Stage(0.2, 0.9, 1))
    for n, p in itertools.product(range(1, 60), (0.0, 1.0)):
        assert 0 <= moments(tenths, n, Iid(p))[1] < 1e-10


@pytest.mark.parametrize("steps", [TWO, THREE, FOUR])
@pytest.mark.parametrize("cuts", [(), (3,), (1, 4, 6)])
def test_sums_equal_a_walk_of_every_column(steps: tuple[Stage, ...], cuts: tuple[int, ...]) -> None:
    """For any cuts into tiles, with times that are uniform or vary by position."""
    outcomes = np.array(list(itertools.product((False, True), repeat=7))).T
    for each in (steps, by_position(steps, 8)):
        time, busy = sums(each, np.split(outcomes, cuts), 8, outcomes.shape[1])
        assert [*zip(time, busy, strict=True)] == [pytest.approx(walk(each, tuple(column))) for column in outcomes.T.tolist()]


def test_one_token_needs_no_outcome() -> None:
    for steps in (TWO, THREE, *([stage._replace(time=np.array([stage.time])) for stage in each] for each in (TWO, THREE))):
        time, busy = sums(tuple(steps), [], 1, 3)
        assert (time.tolist(), busy.tolist()) == ([7.0] * 3, [11.0] * 3)


def test_tiles_of_255_positions_are_counted() -> None:
    for steps in (TWO, THREE):
        time, _ = sums(steps, [np.ones((255, 1), dtype=bool)] * 2, 511, 1)
        assert time[0] == walk(steps, (True,) * 510)[0]


@pytest.mark.parametrize("positions", [256, 257, 300, 512])
def test_tiles_longer_than_255_positions_are_counted(positions: int) -> None:
    """All matches are counted, in every column."""
    some = np.random.default_rng(1).random(positions) < 0.9
    tile = np.stack([np.ones(positions, dtype=bool), some, ~some, np.zeros(positions, dtype=bool)], axis=1)
    for steps in (TWO, THREE):
        time, busy = sums(steps, [tile, tile[:3]], positions + 4, 4)
        for column, got in enumerate(zip(time, busy, strict=True)):
            assert got == pytest.approx(walk(steps, (*tile[:, column].tolist(), *tile[:3, column].tolist())))


class Pair(Law):
    """A law that has only a distribution of the number of matches."""

    def mean(self, positions):  # type: ignore[no-untyped-def]
        return np.asarray(positions / 2)

    def variance(self, positions):  # type: ignore[no-untyped-def]
        return np.asarray(positions**2 / 4)

    def pmf(self, positions):  # type: ignore[no-untyped-def]
        mass = np.zeros(positions + 1)
        mass[0] = mass[-1] = 0.5
        return mass

    def sample(self, draws):  # type: ignore[no-untyped-def]
        raise NotImplementedError


def test_a_law_of_counts_suffices_only_for_two_uniform_stages() -> None:
    mean, variance, _, _ = moments(TWO, 5, Pair())
    assert (mean, variance) == ((35 + 19) / 2, 8.0**2)
    for steps in (THREE, by_position(TWO, 5)):
        with pytest.raises(ParameterError, match=r"these stages need a law of single positions; .*\['paths'\]"):
            moments(steps, 5, Pair())


@pytest.mark.parametrize("steps", [TWO, THREE, FOUR])
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("varied", [False, True])
def test_moments_of_pairs_equal_those_of_each(steps: tuple[Stage, ...], n: int, varied: bool) -> None:
    """Of all laws at several costs, in any order; of pairs of which only means are asked all but the variance."""
    factors = np.array([1.0, 0.5, 3.0])
    own = by_position(steps, n) if varied else steps
    costs = [
        tuple(Stage(factor * time, busy / factor, on_match) for time, busy, on_match in own) for factor in factors.tolist()
    ]
    together = tuple(
        Stage(np.array([stage.time for stage in of]), np.array([stage.busy for stage in of]), of[0].on_match)
        for of in zip(*costs, strict=True)
    )
    law, price = np.repeat(np.arange(len(LAWS)), factors.size)[::-1], np.tile(np.arange(factors.size), len(LAWS))
    means = np.arange(law.size) % 2 == 0
    found = moments_of_pairs(together, n, LAWS, law, price)
    for column, of, which in zip(found.T, law.tolist(), price.tolist(), strict=True):
        assert column.tolist() == pytest.approx(moments(costs[which], n, LAWS[of]), nan_ok=True, rel=1e-13, abs=1e-13)
    some = moments_of_pairs(together, n, LAWS, law, price, means)
    assert np.array_equal(some[:, ~means], found[:, ~means], equal_nan=True)
    assert np.array_equal(some[[0, 2, 3]], found[[0, 2, 3]], equal_nan=True)


def test_too_short_records_are_refused() -> None:
    with pytest.raises(ParameterError, match="records must cover 5 output positions, got 3"):
        moments(TWO, 6, Replay([[True, True, False]]))


def test_too_short_records_are_refused_with_three_stages() -> None:
    with pytest.raises(ParameterError, match="records must cover 5 output positions, got 3"):
        moments(THREE, 6, Replay([[True, True, False]]))


def test_the_last_position_needs_no_rate() -> None:
    law = ByPosition([0.9, 0.1])
    assert moments(TWO, 3, law)[0] == pytest.approx(7 + 0.9 * 3 + 0.1 * 7 + 0.1 * 3 + 0.9 * 7)
    assert moments(THREE, 3, law)[0] > 0
