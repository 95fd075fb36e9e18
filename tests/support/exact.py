"""Exact references for closed forms: fractions and independent recursions, and tolerances."""

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np
from hypothesis import strategies as st

RATES = st.floats(0, 1) | st.sampled_from([0.0, 1.0, 1 - 1e-12, 1 - 2**-53, 1e-12, 0.5])
LENGTHS = st.integers(0, 12)
TINY = Fraction(float(np.finfo(np.float64).tiny))


def pmf(alpha: Fraction, gamma: int) -> list[Fraction]:
    """P(N = 1), ..., P(N = gamma + 1): tests passed until the first failure, or all gamma passed."""
    return [alpha**j * (1 - alpha) for j in range(gamma)] + [alpha**gamma]


def mean(alpha: Fraction, gamma: int) -> Fraction:
    return sum((alpha**j for j in range(gamma + 1)), Fraction(0))


def recursion(alpha: Fraction, gamma: int, tokens: int, price: Callable[[int], Fraction]) -> Fraction:
    """Expected price of all rounds until `tokens` tokens are generated; a round with draft length w costs price(w)."""
    probabilities = pmf(alpha, gamma)

    @cache
    def rest(left: int) -> Fraction:
        if left <= 0:
            return Fraction(0)
        return price(min(gamma, left - 1)) + sum(probability * rest(left - j) for j, probability in enumerate(probabilities, 1))

    for left in range(tokens):  # shallow recursion
        rest(left)
    return rest(tokens)


def close(value: Any, exact: Fraction, error: float = 1e-13) -> bool:
    """Return whether a value is within a relative error; below the smallest normal float, within that error of it."""
    return abs(Fraction(float(value)) - exact) <= Fraction(error) * max(abs(exact), TINY)


def near(value: Any, expected: Any, rtol: float = 1e-13, atol: float = 0.0) -> bool:
    """Return whether all values are within a relative error; numpy's default absolute error of 1e-8 is off."""
    return np.allclose(value, expected, rtol=rtol, atol=atol)


def assert_work_of_each(theory: Any, chosen: tuple[Any, int], laws: list[Any], *, rtol: float, atol: float = 0.0) -> None:
    """Check the work of a method's module under several laws together; `chosen` are its parameters and tokens."""
    found = theory.work_of_laws(*chosen, laws)
    for index, law in enumerate(laws):
        one, ours = theory.work(*chosen, law), found.at(index)
        assert one.by_model.keys() == found.by_model.keys()
        for role, totals in one.by_model.items():
            np.testing.assert_allclose(totals, ours.by_model[role], rtol=rtol, atol=atol)
        np.testing.assert_allclose(one[1:], ours[1:], rtol=rtol, atol=atol)
