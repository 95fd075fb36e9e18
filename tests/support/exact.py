"""What closed forms are tested by: fractions and recursions that share nothing with them, and how near is near."""

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
    """P(N = 1), ..., P(N = gamma + 1): so many tests are passed, then one is not, or none is left."""
    return [alpha**j * (1 - alpha) for j in range(gamma)] + [alpha**gamma]


def mean(alpha: Fraction, gamma: int) -> Fraction:
    return sum((alpha**j for j in range(gamma + 1)), Fraction(0))


def recursion(alpha: Fraction, gamma: int, tokens: int, price: Callable[[int], Fraction]) -> Fraction:
    """Expected price of all rounds until `tokens` are out, where a round with drafts of length w costs price(w)."""
    chances = pmf(alpha, gamma)

    @cache
    def rest(left: int) -> Fraction:
        if left <= 0:
            return Fraction(0)
        return price(min(gamma, left - 1)) + sum(chance * rest(left - j) for j, chance in enumerate(chances, 1))

    for left in range(tokens):  # shallow recursion
        rest(left)
    return rest(tokens)


def close(value: Any, exact: Fraction, error: float = 1e-13) -> bool:
    """Within a relative error; below the smallest normal float, whose digits are fixed, within that error of it."""
    return abs(Fraction(float(value)) - exact) <= Fraction(error) * max(abs(exact), TINY)


def near(value: Any, expected: Any, rtol: float = 1e-13, atol: float = 0.0) -> bool:
    """All within a relative error, and nothing beside it: numpy's own default lets 1e-8 pass."""
    return np.allclose(value, expected, rtol=rtol, atol=atol)
