"""Functions of numbers that are evaluated once for many numbers: only where they are the same for all of them."""

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.costs.watched_costs import SMALL, between, of_numbers

COMPARISONS = (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne, min, max)
USES: dict[str, Callable[[Any], Any]] = {
    "itself": lambda number: number,
    "in a list": lambda number: [1, number],
    "in rows of a table": lambda number: ([{"tokens": 1}, {"tokens": number}], 2),
    "a sum": lambda number: number + 1,
    "a sum from the right": lambda number: 1 + number,
    "a power": lambda number: 2**number,
    "text": lambda number: f"{number}",
    "a key": lambda number: {number: 1},
    "an index": lambda number: range(100)[number],
    "a length": lambda number: len(range(number)),
    "an array": lambda number: np.arange(number),
    "a comparison with an array": lambda number: number < np.arange(50),
    "the remainder": lambda number: number % 2,
}


@given(st.sampled_from(COMPARISONS), st.booleans(), st.floats(-3, 40) | st.integers(-3, 40), st.integers(1, 30), st.integers(0, 9))
def test_a_comparison_is_that_of_every_number(
    compare: Callable[[Any, Any], Any], swapped: bool, other: float, low: int, more: int
) -> None:
    """A comparison is known exactly if it is the same for all numbers of the interval; outside of it always."""

    def value(number: Any) -> Any:
        return compare(other, number) if swapped else compare(number, other)

    found, each = between(low, low + more, value), [value(number) for number in range(low, low + more + 1)]
    if found is not None:
        assert all(one == found for one in each)
        assert isinstance(found, bool) or found == other
    if not low <= other <= low + more and isinstance(each[0], bool):
        assert found == each[0]


@pytest.mark.parametrize("name", USES)
def test_a_number_that_is_used_is_not_the_same_for_all(name: str) -> None:
    assert between(2, 9, USES[name]) is None
    assert between(9, 9, USES[name]) is None


def test_a_truth_value_is_known_without_0() -> None:
    assert between(1, 9, lambda number: "some" if number else "none") == "some"
    assert between(-1, 1, lambda number: "some" if number else "none") is None


@given(st.lists(st.integers(1, 40), max_size=30), st.integers(0, 40), st.sampled_from(["compared", "used", "ignored"]))
def test_numbers_have_the_values_that_they_have_alone(numbers: list[int], bound: int, kind: str) -> None:
    """Each index once; numbers above `SMALL` together unless they differ."""

    def value(number: Any, _: Any) -> Any:
        return min(number, bound) if kind == "compared" else number * 2 if kind == "used" else 7

    values: dict[int, Any] = {}
    calls = 0
    for found, index in of_numbers(np.array(numbers, dtype=np.int64), value):
        calls += 1
        for place in index.tolist():
            assert place not in values
            values[place] = found
    assert [values[place] for place in range(len(numbers))] == [value(number, None) for number in numbers]
    if kind == "ignored" or (kind == "compared" and bound <= SMALL):
        assert calls <= len({number for number in numbers if number <= SMALL}) + 1


def test_a_function_gets_the_indices_of_its_numbers() -> None:
    numbers = np.array([50, 3, 60, 3, 8, 9])
    seen = {}

    def value(number: Any, index: Any) -> str:
        seen[tuple(index.tolist())] = number
        return "alike"

    assert {tuple(index.tolist()) for _, index in of_numbers(numbers, value)} == {(0, 2, 5), (1, 3), (4,)}
    assert seen[1, 3] == 3
    assert seen[4,] == 8
