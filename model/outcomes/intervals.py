"""95 % confidence intervals: of a proportion from its counts, of a mean from its sample."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

LEVEL = 0.95
"""Confidence level of all intervals."""

EIGHTY_OVER_MEDIAN = 1.9
"""Half-width of an 80 % interval over a median error, for normal errors: 1.282 / 0.674 [-]."""

Floats = NDArray[np.float64]


def wilson(rate: ArrayLike, trials: ArrayLike) -> tuple[Floats, Floats]:
    """Wilson score interval of a proportion observed as `rate` in `trials` trials.

    >>> low, high = wilson(0.6837, 10_570 * 16)
    >>> round(float(low), 4), round(float(high), 4)
    (0.6815, 0.6859)
    """
    from scipy.special import ndtri

    p, n, z = np.asarray(rate, dtype=np.float64), np.asarray(trials, dtype=np.float64), float(ndtri((1 + LEVEL) / 2))
    centre = (p + z * z / (2 * n)) / (1 + z * z / n)
    half = z / (1 + z * z / n) * np.sqrt(p * (1 - p) / n + z * z / (4 * n**2))
    return np.clip(centre - half, 0.0, p), np.clip(centre + half, p, 1.0)  # keep the rate inside despite rounding


def half_width(deviation: ArrayLike, count: ArrayLike) -> Floats:
    """Half width of Student's t interval of a mean of `count` values with standard deviation `deviation`; nan below two values.

    >>> round(float(half_width(1.0, 10)), 4)
    0.7154
    """
    from scipy.special import stdtrit

    n = np.asarray(count, dtype=np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        width = stdtrit(np.maximum(n - 1, 1), (1 + LEVEL) / 2) * np.asarray(deviation) / np.sqrt(n)
    return np.asarray(np.where(n > 1, width, np.nan))
