"""Early exit in closed form: enumeration of tokens and short decodings in exact fractions, thresholds, limits and errors."""

import itertools
import math
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.methods.early_exit import theory as early_exit
from tests.support.exact import close

HAZARDS = st.lists(st.sampled_from([0.0, 0.25, 0.5, 0.8, 1.0]) | st.floats(0, 1), min_size=1, max_size=6)
THRESHOLDS = st.floats(0, 1)


def tokens(hazards: list[float]) -> Iterator[tuple[int, Fraction]]:
    """Exit layers of a token with their probabilities."""
    here = Fraction(1)
    for layer, hazard in enumerate(hazards[:-1], 1):
        yield layer, here * Fraction(hazard)
        here *= 1 - Fraction(hazard)
    yield len(hazards), here


@given(HAZARDS)
def test_depths_of_a_token_by_enumeration(hazards: list[float]) -> None:
    exact = list(tokens(hazards))
    pmf = early_exit.exit_pmf(hazards)
    assert all(abs(Fraction(float(value)) - chance) < 1e-15 for value, (_, chance) in zip(pmf, exact, strict=True))
    assert close(early_exit.expected_layers(hazards), sum((layer * chance for layer, chance in exact), Fraction(0)))


@given(st.lists(st.sampled_from([0.0, 0.25, 0.5, 1.0]), min_size=1, max_size=4), st.integers(1, 4))
def test_a_batch_waits_for_its_last_token(hazards: list[float], batch: int) -> None:
    exact = Fraction(0)
    for many in itertools.product(list(tokens(hazards)), repeat=batch):
        exact += max(layer for layer, _ in many) * math.prod((chance for _, chance in many), start=Fraction(1))
    assert close(early_exit.expected_layers(hazards, batch), exact)


@given(HAZARDS, st.integers(1, 50))
def test_a_larger_batch_goes_deeper(hazards: list[float], batch: int) -> None:
    means = [float(early_exit.expected_layers(hazards, size)) for size in (1, batch, batch + 1, 10**6)]
    assert all(after >= before - 1e-12 for before, after in itertools.pairwise(means))
    assert 1 <= means[0] <= means[-1] <= len(hazards) + 1e-12


# --- Time ---------------------------------------------------------------------------------------------------------------


@given(HAZARDS, st.data())
def test_time_by_enumeration(hazards: list[float], data: st.DataObject) -> None:
    first = data.draw(st.integers(1, len(hazards)))
    hazards = [0.0] * (first - 1) + hazards[first - 1 :]
    head, check, row = (data.draw(st.floats(0, 3)) for _ in range(3))
    softmax = state = Fraction(0)
    for layer, chance in tokens(hazards):
        owed = layer + Fraction(row) * (len(hazards) - layer)
        checked = len(range(first, min(layer, len(hazards) - 1) + 1))
        heads = checked + (layer == len(hazards))  # the last check is the final projection
        softmax += chance * (owed + Fraction(head) * heads)
        state += chance * (owed + Fraction(head) + Fraction(check) * checked)
    more = {"head": head, "check": check, "propagation": row, "first": first}
    assert close(early_exit.expected_time(hazards, measure="state", **more), state, 1e-12)
    assert close(early_exit.expected_time(hazards, measure="softmax", **more), softmax, 1e-12)


def test_tokens_that_never_exit_run_the_whole_model() -> None:
    hazards = [0.0] * 7 + [0.3]  # the hazard of the last layer has no effect
    assert float(early_exit.expected_layers(hazards)) == 8
    assert early_exit.exit_pmf(hazards).tolist() == [0] * 7 + [1]
    assert float(early_exit.expected_time(hazards, measure="softmax", head=2.0, first=8)) == 8 + 2
    assert float(early_exit.expected_time(hazards, measure="softmax", head=2.0)) == 8 + 16
    assert float(early_exit.expected_time(hazards, measure="state", head=2.0, check=0.5, first=6)) == 8 + 2 + 1


@given(HAZARDS)
def test_default_costs_of_checks_and_propagation_are_zero(hazards: list[float]) -> None:
    """And tokens may leave from the first layer on."""
    for measure in early_exit.MEASURES:
        said = early_exit.expected_time(hazards, measure=measure, head=2.0, check=0.0, propagation=0.0, first=1)
        assert early_exit.expected_time(hazards, measure=measure, head=2.0) == said


def test_laws_are_along_the_last_axis() -> None:
    rows = [[0.2, 0.3, 0.5, 1.0], [0.0, 0.9, 0.1, 0.0], [1.0, 0.5, 0.5, 0.5]]
    functions: list[Callable[[Any], Any]] = [
        early_exit.expected_layers, early_exit.exit_pmf, lambda each: early_exit.expected_layers(each, 3),
        lambda each: early_exit.expected_time(each, measure="softmax", head=1.0, propagation=0.1),
        lambda each: early_exit.expected_time(each, measure="state", head=1.0, check=0.2),
    ]  # fmt: skip
    for function in functions:
        assert function([rows, rows[::-1]]).tolist() == [
            [function(row).tolist() for row in rows], [function(row).tolist() for row in rows[::-1]]
        ]  # fmt: skip


# --- Decisions ------------------------------------------------------------------------------------------------------------


@given(THRESHOLDS, st.integers(1, 500), st.floats(0, 20), st.data())
def test_the_threshold_decays_within_its_bounds(level: float, longest: int, temperature: float, data: st.DataObject) -> None:
    """Property 30: never rising, the code's in [.9 lambda, lambda]; both forms are equal at lambda = 1."""
    places = np.arange(longest + 1)
    code, paper = (
        early_exit.decayed_threshold(level, places, longest, temperature, form=form) for form in ("code", "paper")
    )
    for values in (code, paper):
        assert np.all(np.diff(values) <= 1e-16)
    assert np.all((code >= 0.9 * level - 1e-15) & (code <= level + 1e-15))
    assert np.all((paper >= code - 1e-15) & (paper <= 1))
    assert np.allclose(paper - code, 0.1 * np.exp(-temperature * places / longest) * (1 - level), rtol=0, atol=1e-15)
    place = data.draw(st.integers(0, longest))
    one = [float(early_exit.decayed_threshold(1, place, longest, temperature, form=form)) for form in early_exit.FORMS]
    assert one[0] == pytest.approx(one[1], rel=1e-15)
    assert code[0] == pytest.approx(level, rel=1e-15)


@given(st.lists(st.lists(st.sampled_from([0.0, 0.3, 0.5, 0.9, 1.0]), min_size=5, max_size=5), min_size=1, max_size=6), st.data())
def test_exits_token_by_token(rows: list[list[float]], data: st.DataObject) -> None:
    first, strict = data.draw(st.integers(1, 5)), data.draw(st.booleans())
    needed = data.draw(st.lists(st.sampled_from([0.0, 0.3, 0.6, 0.9, 1.0]), min_size=len(rows), max_size=len(rows)))
    found = early_exit.exits(rows, needed, first=first, strict=strict)
    for row, level, layer in zip(rows, needed, found.tolist(), strict=True):
        sure = [index for index in range(first, 5) if (row[index - 1] > level if strict else row[index - 1] >= level)]
        assert layer == (sure[0] if sure else 5)
    # A higher threshold never makes a token leave earlier.
    higher = early_exit.exits(rows, np.minimum(np.array(needed) + 0.1, 1), first=first, strict=strict)
    assert np.all(higher >= found)


def test_a_token_exactly_at_the_threshold_leaves() -> None:
    """By default at equality, as in [t5x], and from the first layer on; for any shape."""
    one, two = [0.9, 0.3, 1.0], [0.2, 0.9, 0.0]
    assert int(early_exit.exits(one, 0.9)) == 1
    assert early_exit.exits([one, two], [0.9, 0.9]).tolist() == [1, 2]
    assert early_exit.exits([[one, two], [two, one]], np.full((2, 2), 0.9)).tolist() == [[1, 2], [2, 1]]


def test_empty_arrays_of_tokens_and_laws_are_accepted() -> None:
    """As long as there are layers."""
    assert early_exit.exits(np.zeros((0, 3)), np.zeros(0)).shape == (0,)
    assert early_exit.expected_layers(np.zeros((0, 3))).shape == (0,)


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: early_exit.expected_layers([0.5, 1.2]), r"hazards\[1\] must be between 0 and 1, got 1\.2"),
    (lambda: early_exit.expected_layers([0.5, -0.2]), r"hazards\[1\] must be between 0 and 1, got -0\.2"),
    (lambda: early_exit.expected_layers([]), "hazards must have a probability for each layer"),
    (lambda: early_exit.expected_layers([[], []]), r"hazards must have a probability for each layer, got \[\[\], \[\]\]"),
    (lambda: early_exit.expected_layers(0.5), r"hazards must have a probability for each layer, got 0\.5"),
    (lambda: early_exit.expected_layers([0.5], 0), "batch must be at least 1, got 0"),
    (lambda: early_exit.expected_time([0.5, 1], measure="cosine", head=1.0), "unknown measure 'cosine'"),
    (lambda: early_exit.expected_time([0.5, 1], measure="state", head=-1.0), "head must be at least 0, got -1"),
    (lambda: early_exit.expected_time([0.5, 1], measure="state", head=1.0, check=-1.0), "check must be at least 0"),
    (lambda: early_exit.expected_time([0.5, 1], measure="state", head=1.0, propagation=-1.0), "propagation must be at least 0"),
    (lambda: early_exit.expected_time([0.5, 1], measure="state", head=1.0, first=3), "first must be between 1 and layers=2, got 3"),
    (lambda: early_exit.expected_time([0.5, 1], measure="state", head=1.0, first=0), "first must be between 1 and layers=2, got 0"),
    (lambda: early_exit.expected_time([0.5, 1], measure="state", head=1.0, first=2), "hazards must be 0 at .* before first=2"),
    (lambda: early_exit.expected_time([[0.0, 0.5], [0.5, 0.5]], measure="state", head=1.0, first=2), "hazards must be 0 at"),
    (lambda: early_exit.exits([0.5, 1.5], 0.5), r"confidences\[1\] must be between 0 and 1, got 1\.5"),
    (lambda: early_exit.exits([-0.5, 0.5], 0.5), r"confidences\[0\] must be between 0 and 1, got -0\.5"),
    (lambda: early_exit.exits([], 0.5), "confidences must have a number for each layer"),
    (lambda: early_exit.exits([[], []], [0.5, 0.5]), r"confidences must have a number for each layer, got \[\[\], \[\]\]"),
    (lambda: early_exit.exits(0.5, 0.5), "confidences must have a number for each layer"),
    (lambda: early_exit.exits([0.5, 0.5], 1.5), r"thresholds must be between 0 and 1, got 1\.5"),
    (lambda: early_exit.exits([0.5, 0.5], -0.5), r"thresholds must be between 0 and 1, got -0\.5"),
    (lambda: early_exit.exits([0.5, 0.5], 0.5, first=3), "first must be between 1 and layers=2, got 3"),
    (lambda: early_exit.exits([0.5, 0.5], 0.5, first=0), "first must be between 1 and layers=2, got 0"),
    (lambda: early_exit.decayed_threshold(1.5, 0, 10, 1), r"threshold must be between 0 and 1, got 1\.5"),
    (lambda: early_exit.decayed_threshold(-0.5, 0, 10, 1), r"threshold must be between 0 and 1, got -0\.5"),
    (lambda: early_exit.decayed_threshold(0.5, -1, 10, 1), "position must be at least 0, got -1"),
    (lambda: early_exit.decayed_threshold(0.5, 1, 0, 1), "longest must be at least 1, got 0"),
    (lambda: early_exit.decayed_threshold(0.5, 1, 10, -1), "temperature must be at least 0, got -1"),
    (lambda: early_exit.decayed_threshold(0.5, 1, 10, 1, form="t5x"), "unknown form 't5x'"),
]


@pytest.mark.parametrize(("call", "message"), BAD)
def test_bad_input_names_the_value_and_its_bound(call: Callable[[], object], message: str) -> None:
    with pytest.raises(ParameterError, match=f"^{message}"):
        call()
