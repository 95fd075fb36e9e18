"""Decision records: rates by counting, monotonicity in the thresholds, the assumed record, and errors."""

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.methods.bild import theory as bild
from model.methods.bild.threshold_decisions import COLUMNS, Decisions, synthetic

TOKENS = st.lists(
    st.tuples(st.sampled_from([0.0, 0.25, 0.5, 0.9, 1.0]), st.sampled_from([0.0, 0.5, 2.0, 9.0]), st.booleans()),
    min_size=1, max_size=30,
)  # fmt: skip
LEVELS = st.sampled_from([0.0, 0.25, 0.3, 0.9, 1.0, 1.5])
DISTANCES = st.sampled_from([0.0, 0.5, 1.0, 9.0, 20.0])
VARIANTS = pytest.mark.parametrize("variant", bild.VARIANTS)


def record(tokens: list[tuple[float, float, bool]]) -> Decisions:
    return Decisions(*zip(*tokens, strict=True), "assumed: drawn")


@VARIANTS
@given(TOKENS, LEVELS, DISTANCES)
def test_rates_by_counting(variant: str, tokens: list[tuple[float, float, bool]], low: float, high: float) -> None:
    written = [each for each in tokens if not each[0] < low]
    back = [each for each in written if each[1] > high and not (variant == "code" and each[2])]
    stays = [each for each in written if each not in back]
    found = record(tokens).rates(low, high, variant=variant)
    expected = (
        1 - len(written) / len(tokens), len(back) / len(written) if written else math.nan,
        sum(agrees for *_, agrees in stays) / len(stays) if stays else math.nan,
    )  # fmt: skip
    assert [float(value) for value in found] == pytest.approx(expected, nan_ok=True)


@VARIANTS
@given(TOKENS, LEVELS, DISTANCES)
def test_decisions_on_each_token(variant: str, tokens: list[tuple[float, float, bool]], low: float, high: float) -> None:
    """At the thresholds a token is sure enough, and likely enough."""
    found = record(tokens).decided(low, high, variant=variant)
    assert found.dtype == np.uint8
    for (confidence, distance, agrees), decision in zip(tokens, found.tolist(), strict=True):
        back = distance > high and (variant == "paper" or not agrees)
        assert decision == (1 if confidence < low else 2 if back else 0)
    assert record(tokens).decided(low, high).tolist() == record(tokens).decided(low, high, variant="paper").tolist()


@VARIANTS
def test_an_infinite_rollback_threshold_never_rolls_back(variant: str) -> None:
    log = record([(0.5, 1e300, False), (0.9, 0.1, True)])
    assert log.rates(0.2, math.inf, variant=variant).rollback_rate == 0
    assert log.decided(0.2, math.inf, variant=variant).tolist() == [0, 0]


@given(TOKENS, LEVELS, LEVELS, DISTANCES, DISTANCES)
def test_rates_are_monotone_in_the_thresholds(
    tokens: list[tuple[float, float, bool]], one: float, other: float, near: float, far: float
) -> None:
    """On one record: a higher fallback threshold falls back more often, a higher rollback threshold rolls back less."""
    log = record(tokens)
    low, high = (log.rates(level, near).fallback_rate for level in sorted((one, other)))
    assert low <= high
    some, fewer = (float(log.rates(one, distance).rollback_rate) for distance in sorted((near, far)))
    assert fewer <= some or math.isnan(some)
    assert not log.rates(one, 9.0).rollback_rate > 0  # no distance is larger, so no rollbacks
    assert log.rates(0.0, near).fallback_rate == 0
    assert log.rates(1.5, near).fallback_rate == 1


@VARIANTS
@given(TOKENS, LEVELS, DISTANCES, st.integers(1, 10))
def test_agreement_counts_the_accepted_tokens(
    variant: str, tokens: list[tuple[float, float, bool]], low: float, high: float, most: int
) -> None:
    log = record(tokens)
    found = log.rates(low, high, variant=variant)
    fallback, rollback = float(found.fallback_rate), float(np.nan_to_num(found.rollback_rate))
    total = float(bild.expected_tokens(fallback, rollback, most, variant=variant))
    again = float(bild.rollback_probability(fallback, rollback, most)) if variant == "code" else 0.0
    small = total - 1 - again
    right = small * float(np.nan_to_num(found.agreement_kept)) + 1 + again
    value = float(bild.agreement(log, low, high, most, variant=variant))
    assert value == pytest.approx(right / total, rel=1e-12)
    assert 0 < value <= 1 + 1e-12
    if all(agrees for *_, agrees in tokens):
        assert value == pytest.approx(1)


def test_thresholds_broadcast() -> None:
    log = synthetic(500, np.random.default_rng(1).random((3, 500)))
    low, high = np.array([0.2, 0.5, 0.9]), np.array([[1.0], [3.0]])
    for function in (lambda *at: log.rates(*at), lambda *at: (bild.agreement(log, *at, 10),)):
        for index, grid in enumerate(function(low, high)):
            assert grid.shape == (2, 3)
            single = [[float(function(one, two)[index]) for one in low] for two in high[:, 0]]
            assert grid.tolist() == [pytest.approx(row) for row in single]


# --- The assumed record ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sureness", [0.5, 3.0])
def test_the_synthetic_small_model_is_calibrated(sureness: float) -> None:
    """Mean confidence s / (s + 1), and accuracy equals confidence in every band: within 5 standard errors (3e-6 per check)."""
    count = 200_000
    log = synthetic(count, np.random.default_rng(7).random((3, count)), sureness=sureness)
    assert log.source.startswith("assumed")
    mean = sureness / (sureness + 1)
    assert abs(float(log.confidence.mean()) - mean) < 5 * math.sqrt(mean * (1 - mean) / count)
    for low in (0.0, 0.25, 0.5, 0.75):
        band = (log.confidence >= low) & (log.confidence < low + 0.25)
        said, right = float(log.confidence[band].mean()), float(log.agrees[band].mean())
        assert abs(said - right) < 5 * math.sqrt(0.25 / np.count_nonzero(band))
    # The large model gives probability at least c to a token it agrees with, and less than 1 - c to others.
    likely = np.exp(-log.distance)
    assert np.all(likely[log.agrees] >= log.confidence[log.agrees] - 1e-12)
    assert np.all(likely[~log.agrees] <= 1 - log.confidence[~log.agrees] + 1e-12)


UNIFORM = st.floats(0, 1)


@given(st.lists(st.tuples(UNIFORM, UNIFORM, UNIFORM), min_size=1, max_size=6), st.floats(0.5, 8))
def test_a_synthetic_record_draw_by_draw(draws: list[tuple[float, float, float]], sureness: float) -> None:
    """Separate draws for the confidence, for the agreement, and for the large model's probability."""
    log = synthetic(len(draws), np.transpose(draws), sureness=sureness)
    for (said, right, gives), confidence, agrees, distance in zip(draws, log.confidence, log.agrees, log.distance, strict=True):
        assert confidence == pytest.approx(said ** (1 / sureness), rel=1e-14)
        assert agrees == (right < confidence)
        rest = (1 - confidence) * gives
        likely = 1 - rest if agrees else rest
        assert distance == pytest.approx(-math.log(max(likely, 2.0**-1022)), rel=1e-14, abs=1e-15)


def test_source_and_default_of_a_synthetic_record() -> None:
    """By default the confidence is Beta(3, 1)."""
    log = synthetic(2, [[0.125, 1.0], [0.9, 0.9], [0.5, 0.5]])
    assert log.confidence.tolist() == pytest.approx([0.5, 1.0])
    assert log.source == "assumed: a small model that knows how often it is right"


def test_a_synthetic_record_at_extreme_draws() -> None:
    log = synthetic(3, [[0.0, 1.0, 1e-20], [0.0, 0.0, 0.0], [0.0, 1.0, 1.0]], sureness=1.0)
    assert np.isfinite(log.distance).all()
    assert log.agrees.tolist() == [False, True, True]  # probability zero never occurs, at any draw
    assert synthetic(1, [[0.3], [0.3], [0.3]], sureness=0.0).confidence.tolist() == [0.0]


# --- Errors -----------------------------------------------------------------------------------------------------------------


GOOD: dict[str, Any] = {"confidence": [0.5, 0.6], "distance": [0.1, 0.2], "agrees": [True, False], "source": "assumed"}
BAD: list[tuple[dict[str, Any], str]] = [
    ({"confidence": [0.5, 1.1]}, r"confidence must be between 0 and 1, got 1\.1 in row 2"),
    ({"confidence": [math.nan, 0.5]}, "confidence must be between 0 and 1, got nan in row 1"),
    ({"confidence": [-0.1, 0.5]}, r"confidence must be between 0 and 1, got -0\.1 in row 1"),
    ({"distance": [0.5, -1.0]}, "distance must be finite and at least 0, got -1 in row 2"),
    ({"distance": [math.inf, 1.0]}, "distance must be finite and at least 0, got inf in row 1"),
    ({"agrees": [True, 0.5]}, r"agrees must be true or false, got 0\.5 in row 2"),
    ({"agrees": [True, 2]}, "agrees must be between 0 and 1, got 2 in row 2"),
    ({"agrees": [True]}, "columns must have one value for each token, at least one, got confidence 2, distance 2, agrees 1"),
    ({"confidence": [], "distance": [], "agrees": []}, "columns must have one value for each token, at least one"),
    ({"confidence": ["a", "b"]}, "confidence must be a list of numbers"),
    ({"distance": 0.5}, r"distance must be a list of numbers, got 0\.5"),
]


@pytest.mark.parametrize(("change", "message"), BAD)
def test_errors_of_a_record_name_its_row(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        Decisions(**{**GOOD, **change})


def test_columns_of_a_table() -> None:
    columns = {name: GOOD[name] for name in COLUMNS}
    log = Decisions.of_columns(columns, "measured: two tokens")
    assert (log.confidence.tolist(), log.agrees.tolist(), log.source) == ([0.5, 0.6], [True, False], "measured: two tokens")
    for name in COLUMNS:
        with pytest.raises(ParameterError, match=rf"^column {name} is missing; a decision record has confidence, distance, agrees"):
            Decisions.of_columns({key: value for key, value in columns.items() if key != name}, "measured")
    with pytest.raises(ParameterError, match=r"^unknown column 'confidense'; did you mean confidence"):
        Decisions.of_columns({**columns, "confidense": [1]}, "measured")


LOG = Decisions(**GOOD)
OTHERS: list[tuple[Callable[[], object], str]] = [
    (lambda: LOG.rates(-0.1, 1), r"fallback_threshold must be at least 0, got -0\.1"),
    (lambda: LOG.rates(0.1, -1), "rollback_threshold must be at least 0, got -1"),
    (lambda: LOG.rates(0.1, 1, variant="papers"), "unknown variant 'papers'"),
    (lambda: LOG.decided(0.1, 1, variant="papers"), "unknown variant 'papers'"),
    (lambda: bild.agreement(LOG, 0.1, 1, 0), "max_draft_length must be at least 1, got 0"),
    (lambda: synthetic(0, np.zeros((3, 0))), "count must be at least 1, got 0"),
    (lambda: synthetic(2, np.zeros((2, 2))), r"draws must have the shape \[3, 2\], got \[2, 2\]"),
    (lambda: synthetic(1, [[2.0], [0.0], [0.0]]), r"draws\[0, 0\] must be between 0 and 1, got 2"),
    (lambda: synthetic(1, [[0.0], [-0.5], [0.0]]), r"draws\[1, 0\] must be between 0 and 1, got -0\.5"),
    (lambda: synthetic(1, np.zeros((3, 1)), sureness=-1), "sureness must be at least 0, got -1"),
]


@pytest.mark.parametrize(("call", "message"), OTHERS)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()
