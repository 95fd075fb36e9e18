"""Laws of outcomes: distribution, moments and sampler agree, by enumeration and by statistical tests."""

import itertools
import math
from collections.abc import Iterator
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import chi2

from model.base.checks import ParameterError
from model.outcomes import random_streams
from model.outcomes.outcome_laws import ByPosition, Iid, Law, Markov, RecordedProbabilities, Replay

FALSE_ALARMS = 1e-6
"""Probability that a correct sampler fails a statistical test. Seeds are fixed, so such a failure would be permanent."""
RECORDS = [[True, False, True, True], [True, True, False, False], [True, False, True, False]]
LAWS: dict[str, Law] = {
    "iid": Iid(0.375), "never": Iid(0.0), "always": Iid(1.0), "by position": ByPosition([0.125, 0.875, 0.5, 0.0, 1.0, 0.25]),
    "markov": Markov(0.5, 0.25), "alternating": Markov(0.5, -1.0), "negative": Markov(0.5, -0.5), "sticky": Markov(0.75, 0.5),
    "constant": Markov(0.25, 1.0),
}  # fmt: skip


def grid(positions: int, tiles: tuple[int, ...]) -> Iterator[NDArray[np.float64]]:
    """All combinations of random numbers at the midpoints of eighths, one per column, as tiles that share one buffer."""
    columns = np.array(list(itertools.product((np.arange(8) + 0.5) / 8, repeat=positions))).T
    buffer = np.empty_like(columns)
    for first, last in itertools.pairwise((0, *tiles, positions)):
        buffer[: last - first] = columns[first:last]
        yield buffer[: last - first]
        buffer[:] = np.nan


@pytest.mark.parametrize("name", LAWS)
@pytest.mark.parametrize("tiles", [(), (3,), (2, 3)])
def test_sampler_has_the_law_exactly(name: str, tiles: tuple[int, ...]) -> None:
    """All probabilities here are multiples of 1/8, so midpoints of eighths give every outcome its exact frequency."""
    law = LAWS[name]
    outcomes = np.concatenate([tile.copy() for tile in law.sample(grid(4, tiles))])
    assert outcomes.shape == (4, 8**4)
    after_failure, after_success = law.probabilities(4)  # type: ignore[attr-defined]
    for pattern in itertools.product((False, True), repeat=4):
        expected = 1.0
        for index, hit in enumerate(pattern):
            p = (after_success if index and pattern[index - 1] else after_failure)[index]
            expected *= p if hit else 1 - p
        frequency = (pattern == outcomes.T).all(axis=1).mean()
        assert abs(frequency - expected) < 1e-12


REPLAYED = {
    "records": Replay([[*each, True] for each in RECORDS]),
    "chances": RecordedProbabilities([[0.9, 0.2, 1.0, 0.5, 0.3], [0.4, 0.0, 0.6, 0.9, 0.7]]),
}  # fmt: skip


@given(st.sampled_from([*LAWS.values(), *REPLAYED.values()]), st.sets(st.integers(0, 5), min_size=1))
def test_distributions_of_several_numbers_of_positions_are_those_of_each(law: Law, positions: set[int]) -> None:
    rising = sorted(positions)
    for count, mass in zip(rising, law.pmfs(rising), strict=True):
        assert mass.tolist() == pytest.approx(law.pmf(count).tolist(), rel=1e-13, abs=1e-300)


@pytest.mark.parametrize("name", [*LAWS, *REPLAYED])
@pytest.mark.parametrize("positions", [0, 1, 2, 5])
def test_moments_equal_those_of_the_distribution(name: str, positions: int) -> None:
    law = (LAWS | REPLAYED)[name]
    mass, count = law.pmf(positions), np.arange(positions + 1)
    assert mass.shape == (positions + 1,)
    assert (mass >= 0).all()
    assert mass.sum() == pytest.approx(1)
    assert mass @ count == pytest.approx(float(law.mean(positions)), abs=1e-12)
    assert mass @ (count - mass @ count) ** 2 == pytest.approx(float(law.variance(positions)), abs=1e-12)
    assert law.mean([0, positions]).tolist() == [0.0, float(law.mean(positions))]
    assert law.variance([0, positions]).tolist() == [0.0, float(law.variance(positions))]


def test_equal_chains_have_equal_distributions() -> None:
    for p in (0.0, 0.3, 1.0):
        plain = Iid(p).pmf(6)
        assert Markov(p, 0.0).pmf(6) == pytest.approx(plain)
        assert ByPosition([p] * 6).pmf(6) == pytest.approx(plain)


@given(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 1.0, 1e-300, 1 - 2**-53, 0.5])), st.integers(0, 60))
def test_distribution_of_independent_outcomes_is_binomial(p: float, positions: int) -> None:
    """Exact in fractions, so that also the smallest probabilities have their digits."""
    exact, mass = Fraction(p), Iid(p).pmf(positions)
    for count, found in enumerate(mass.tolist()):
        expected = math.comb(positions, count) * exact**count * (1 - exact) ** (positions - count)
        assert abs(Fraction(found) - expected) <= Fraction(6 * (positions + 1) * 2.0**-53) * expected + Fraction(1, 10**300)


def test_markov_at_its_limits() -> None:
    """At rho = 1 all positions agree; at rho = -1 (p = 1/2 only) they alternate, so the variance of an even number is 0."""
    assert Markov(0.3, 1.0).pmf(7) == pytest.approx([0.7, 0, 0, 0, 0, 0, 0, 0.3])
    assert float(Markov(0.3, 1.0).variance(7)) == pytest.approx(0.3 * 0.7 * 49)
    assert Markov(0.5, -1.0).pmf(6) == pytest.approx([0, 0, 0, 1, 0, 0, 0])
    assert Markov(0.5, -1.0).pmf(5) == pytest.approx([0, 0, 0.5, 0.5, 0, 0])
    assert Markov(0.5, -1.0).variance([5, 6]).tolist() == [0.25, 0.0]
    near = float(Markov(0.3, 1 - 1e-5).variance(7))
    assert near == pytest.approx(0.3 * 0.7 * 49, rel=1e-4)


def test_markov_correlation_and_rate() -> None:
    p, rho = 0.75, -0.25
    both = float(Markov(p, rho).pmf(2)[2])
    assert (both - p * p) / (p * (1 - p)) == pytest.approx(rho)
    law = Markov(p, rho)
    rate = p
    for low, high in zip(*law.probabilities(9), strict=True):
        rate = rate * high + (1 - rate) * low
        assert rate == pytest.approx(p)


def test_markov_broadcasts() -> None:
    law = Markov([[0.3], [0.5]], [0.0, 0.4, 1.0])
    assert law.variance(9).shape == (2, 3)
    assert law.variance(9)[1, 1] == float(Markov(0.5, 0.4).variance(9))
    assert law.variance(9)[0, 2] == pytest.approx(0.3 * 0.7 * 81)
    assert Iid([0.25, 0.5]).mean([[2], [4]]).tolist() == [[0.5, 1.0], [1.0, 2.0]]


def test_replay_draws_its_records_uniformly() -> None:
    law = Replay(RECORDS)
    draws = (np.arange(30) + 0.5) / 30
    tiles = [np.tile(draws, (1, 1)), np.zeros((3, 30))]  # only the first number matters
    outcomes = np.concatenate([*law.sample(iter(tiles))])
    assert outcomes.T.tolist() == [RECORDS[int(c * 3)] for c in draws]
    assert law.pmf(4) == pytest.approx([0, 0, 2 / 3, 1 / 3, 0])
    assert law.pmf(1) == pytest.approx([0, 1])
    for positions in (0, 1, 3, 4):
        mass, count = law.pmf(positions), np.arange(positions + 1)
        assert float(law.mean(positions)) == pytest.approx(mass @ count)
        assert float(law.variance(positions)) == pytest.approx(mass @ (count - mass @ count) ** 2, abs=1e-12)
    assert law.mean([1, 4]) == pytest.approx([1, 7 / 3])
    assert Replay(np.array([[1, 0], [1, 1]])).records.dtype == np.bool_


@pytest.mark.parametrize("name", ["iid", "sticky", "negative", "by position", "replay"])
def test_samples_from_the_random_streams_have_the_law(name: str) -> None:
    """Chi-square test over the 16 outcomes of four positions, 5 x 4096 replications, one false alarm in a million seeds."""
    law = Replay(RECORDS) if name == "replay" else LAWS[name]
    observed = np.zeros(16)
    for block in range(5):
        outcomes = np.concatenate([tile.copy() for tile in law.sample(random_streams.tiles(11, "match", block, 4))])
        observed += np.bincount(outcomes.T @ [8, 4, 2, 1], minlength=16)
    expected = np.zeros(16)
    if isinstance(law, Replay):
        for record in RECORDS:
            expected[np.dot(record, [8, 4, 2, 1])] += observed.sum() / 3
    else:
        low, high = law.probabilities(4)  # type: ignore[attr-defined]
        for pattern in itertools.product((0, 1), repeat=4):
            p = [high[i] if i and pattern[i - 1] else low[i] for i in range(4)]
            probability = np.prod([q if hit else 1 - q for q, hit in zip(p, pattern, strict=True)])
            expected[np.dot(pattern, [8, 4, 2, 1])] = observed.sum() * probability
    assert observed[expected == 0].sum() == 0
    possible = expected > 0
    distance = float(((observed - expected)[possible] ** 2 / expected[possible]).sum())
    assert distance < chi2.isf(FALSE_ALARMS, possible.sum() - 1)


def test_higher_rate_only_turns_misses_into_matches() -> None:
    def sampled(law: Law) -> NDArray[np.bool_]:
        return np.concatenate([tile.copy() for tile in law.sample(random_streams.tiles(2, "match", 0, 70))])

    low, high = sampled(Iid(0.4)), sampled(Iid(0.6))
    assert (low <= high).all()
    assert (low < high).any()
    assert (sampled(ByPosition([0.6] * 70)) == high).all()
    assert (sampled(Markov(0.6, 0.0)) == high).all()


@pytest.mark.parametrize(
    ("law", "arguments", "message"),
    [
        (Iid, (1.1,), "rate must be between 0 and 1, got 1.1"),
        (Iid, ([0.5, float("nan")],), r"rate\[1\] must be between 0 and 1, got nan"),
        (ByPosition, ([0.5, -1],), r"rates\[1\] must be between 0 and 1, got -1"),
        (ByPosition, ([[0.5]],), "rates must be a list of rates"),
        (ByPosition, ([],), "rates must be a list of rates"),
        (ByPosition, (0.5,), "rates must be a list of rates"),
        (Markov, (0.5, 1.5), "correlation must be between -1 and 1, got 1.5"),
        (Markov, (0.2, -0.5), "correlation must be at least -min"),
        (Markov, (0.8, -0.5), "correlation must be at least -min"),
        (Replay, ([[True], [True, False]],), r"common length of at least 1, got lengths \[1, 2\]"),
        (Replay, ([],), r"common length of at least 1, got lengths \[\]"),
        (Replay, ([[]],), r"common length of at least 1, got lengths \[0\]"),
        (Replay, ([[2, 0]],), "records must hold true and false"),
    ],
)
def test_invalid_laws_are_refused(law: type, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ParameterError, match=message):
        law(*arguments)


def test_laws_by_position_end_with_their_rates() -> None:
    law = ByPosition([0.1, 0.2])
    for ask in (law.mean, law.variance, law.probabilities, law.pmf):
        assert ask(2) is not None
        with pytest.raises(ParameterError, match="one rate for each of 3 output positions, got 2; give more rates or fewer"):
            ask(3)
    assert len(list(law.sample(random_streams.tiles(0, "match", 0, 2)))) == 1
    with pytest.raises(ParameterError, match="each of 33 output positions, got 32"):
        list(ByPosition([0.5] * 32).sample(random_streams.tiles(0, "match", 0, 33)))
    record = Replay([[True] * 32])
    for ask in (record.mean, record.variance, record.pmf):
        with pytest.raises(ParameterError, match="records must cover 33 output positions, got 32; give longer records"):
            ask(33)
    with pytest.raises(ParameterError, match="records must cover 33"):
        list(record.sample(random_streams.tiles(0, "match", 0, 33)))


def test_most_negative_correlation_is_allowed() -> None:
    """At the bound a match never follows a match, or a miss never follows a miss; anything below is refused."""
    for p in np.arange(1, 1000) / 1000:
        bound = -min(p / (1 - p), (1 - p) / p)
        law = Markov(p, bound)
        assert law.after_failure == pytest.approx(1.0) if p >= 0.5 else law.after_success == pytest.approx(0.0, abs=1e-12)
        with pytest.raises(ParameterError, match=r"correlation must be (at least -min|between -1 and 1)"):
            Markov(p, bound - 1e-9)
