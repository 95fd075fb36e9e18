"""Predicted times against measured ones: errors by method beside the noise, and whether settings are ordered rightly.

All of it is computed from rows as `sim compare` writes them, a row for each measured decoding: method, settings, prompt, tokens,
predicted_s and measured_s [s], error = predicted / measured - 1 [-], and noise, how far a repeat is from the middle one [-].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from model.logs.measured_runs import ROLES

if TYPE_CHECKING:
    import polars as pl

BAND = 0.05
"""An error up to here is a good one, or up to 1.5 times the noise [-]."""
NOISES = 1.5
PARTS = (*ROLES, "reads", "transfers", "waiting", "rest")
"""What the whole time of a run goes into: passes of each model, heads with reads, starting and taking over processes, waiting for
them, and everything else. Over several processes it is the main one's time, which reads what its passes have made."""


def floor(noise: ArrayLike) -> float:
    """How far off a prediction may be for the noise of these measurements alone: 1.5 times their median [-].

    >>> round(floor([0.02, 0.04, 0.3]), 3)
    0.06
    """
    return NOISES * float(np.median(np.asarray(noise, dtype=np.float64)))


def bound(noise: ArrayLike) -> float:
    """What the median error of measurements with such noise may be: 5 %, or the floor of the noise where that is more [-].

    >>> bound([0.01, 0.02]), round(bound([0.02, 0.04, 0.3]), 3)
    (0.05, 0.06)
    """
    return max(BAND, floor(noise))


def choices(table: pl.DataFrame) -> int:
    """How many choices of a method's parameters there are, or of the rates that forced its outcomes.

    >>> import polars as pl
    >>> choices(pl.DataFrame({"method": ["ppd", "ppd", "bild"], "settings": ["a", "b", "b"], "prompt": "x"}))
    3
    """
    return table.select(name for name in ("method", "settings", "forced") if name in table.columns).n_unique()


def by_method(table: pl.DataFrame) -> list[dict[str, Any]]:
    """Errors of each method: median, ninth decile and worst, beside the bound that noise allows; `held` where they keep it.

    >>> import polars as pl
    >>> rows = {"method": "ppd", "settings": ["a", "b", "b"], "error": [0.01, -0.03, 0.2], "noise": [0.01, 0.02, 0.03]}
    >>> [found] = by_method(pl.DataFrame(rows))
    >>> found["settings"], found["median_error"], found["worst_error"], found["bias"], found["bound"]
    (2, 0.03, 0.2, 0.01, 0.05)
    >>> found["held"]  # nine of ten would have to be within twice the bound
    False
    """
    rows = []
    for method in dict.fromkeys(table["method"]):
        own = table.filter(table["method"] == method)
        errors, noise = np.abs(own["error"].to_numpy()), own["noise"].to_numpy()
        allowed = bound(noise)
        rows.append({
            "method": method, "runs": own.height, "settings": choices(own), "median_error": float(np.median(errors)),
            "p90_error": float(np.quantile(errors, 0.9)), "worst_error": float(errors.max()),
            "bias": float(np.median(own["error"].to_numpy())), "noise": float(np.median(noise)), "bound": allowed,
            "held": bool(np.median(errors) <= allowed and np.quantile(errors, 0.9) <= 2 * allowed),
        })  # fmt: skip
    return rows


def ranking(table: pl.DataFrame) -> tuple[int, int]:
    """Of pairs of settings on one prompt that differ in measured time by more than twice the noise: how many, and how many of
    them the prediction orders rightly.

    >>> import polars as pl
    >>> times = {"measured_s": [1.0, 1.01, 2.0], "predicted_s": [3.0, 1.0, 2.0]}
    >>> ranking(pl.DataFrame({"prompt": ["a"] * 3, "tokens": [8] * 3, "noise": [0.01] * 3} | times))
    (2, 1)
    """
    pairs = right = 0
    for prompt in dict.fromkeys(table["prompt"]):
        own = table.filter(table["prompt"] == prompt)
        measured, predicted = (own[name].to_numpy() / own["tokens"].to_numpy() for name in ("measured_s", "predicted_s"))
        noise = own["noise"].to_numpy() * measured
        for one in range(own.height):
            for other in range(one):
                if abs(measured[one] - measured[other]) > 2 * max(noise[one], noise[other]):
                    pairs += 1
                    right += int((measured[one] > measured[other]) == (predicted[one] > predicted[other]))
    return pairs, right
