"""What the theory of a method says about a decoding: the record that every method's `predict` returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Prediction:
    """Expectations over the law of outcomes, each an array of the points' shape; nan where the theory has no value.

    Times are in the cost model's unit, compute in that unit summed over busy compute units.
    """

    latency: Floats
    latency_variance: Floats
    busy: Floats
    units_ratio: Floats
    """E[busy / latency]; not the ratio of the two expectations."""
    units: Floats
    """Compute units reserved throughout."""
    plain_latency: Floats
    """Of plain decoding of the same tokens."""
    rounds: Floats | None = None
    """Rounds of drafting and verifying, of methods that have them."""
    drafted: Floats | None = None
    """Tokens drafted in them."""
    operations: Floats | None = None
    """Arithmetic, in that of a token in a pass of the target."""
