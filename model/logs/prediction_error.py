"""Comparison of predicted and measured times: errors by method relative to the noise, and the ranking of settings.

The input is a table written by `sim compare` with one row per measured decoding: method, settings, prompt, tokens, predicted_s and
measured_s [s], error = predicted / measured - 1 [-], and noise, the median deviation of a repeat from the median repeat [-].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from model.logs.measured_runs import ROLES

if TYPE_CHECKING:
    import polars as pl

BAND = 0.05
"""Largest acceptable median error if the noise is small [-]."""
NOISES = 1.5
"""Largest acceptable median error in multiples of the noise [-]."""
PARTS = (*ROLES, "reads", "transfers", "waiting", "rest")
"""Parts of the time of a run: passes of each model; logits and reads; starting and adopting processes; waiting for them; the rest.
With several processes it is the time of the main process, which does the reads."""


def floor(noise: ArrayLike) -> float:
    """Error of predictions that noise alone can explain: 1.5 times the median noise of the measurements [-].

    >>> round(floor([0.02, 0.04, 0.3]), 3)
    0.06
    """
    return NOISES * float(np.median(np.asarray(noise, dtype=np.float64)))


def bound(noise: ArrayLike) -> float:
    """Largest acceptable median error: 5 % or the `floor` of the noise, whichever is larger [-].

    >>> bound([0.01, 0.02]), round(bound([0.02, 0.04, 0.3]), 3)
    (0.05, 0.06)
    """
    return max(BAND, floor(noise))


def choices(table: pl.DataFrame) -> int:
    """Number of different settings of methods, counting different forced rates separately.

    >>> import polars as pl
    >>> choices(pl.DataFrame({"method": ["ppd", "ppd", "bild"], "settings": ["a", "b", "b"], "prompt": "x"}))
    3
    """
    return table.select(name for name in ("method", "settings", "forced") if name in table.columns).n_unique()


PROFILES = "times from profiles"


def times_from(table: pl.DataFrame) -> str:
    """Source of the predicted times: `PROFILES`, or the step law that the column `step_law` names.

    >>> import polars as pl
    >>> times_from(pl.DataFrame({"step_law": ["mine", "mine"]})), times_from(pl.DataFrame({"step_law": ["", ""]}))
    ('times by step law mine', 'times from profiles')
    """
    names = [str(name) for name in dict.fromkeys(table["step_law"]) if name] if "step_law" in table.columns else []
    return f"times by step law {', '.join(names)}" if names else PROFILES


def by_method(table: pl.DataFrame) -> list[dict[str, Any]]:
    """Errors of each method: median, 90 % quantile and worst, with the bound that noise allows; `held` if they keep within it.

    `held` requires a median error within the bound and a 90 % quantile within twice the bound.

    >>> import polars as pl
    >>> rows = {"method": "ppd", "settings": ["a", "b", "b"], "error": [0.01, -0.03, 0.2], "noise": [0.01, 0.02, 0.03]}
    >>> [row] = by_method(pl.DataFrame(rows))
    >>> row["settings"], row["median_error"], row["worst_error"], row["bias"], row["bound"]
    (2, 0.03, 0.2, 0.01, 0.05)
    >>> row["held"]  # the 90 % quantile exceeds twice the bound
    False
    """
    rows = []
    for method in dict.fromkeys(table["method"]):
        runs = table.filter(table["method"] == method)
        errors, noise = np.abs(runs["error"].to_numpy()), runs["noise"].to_numpy()
        allowed = bound(noise)
        rows.append({
            "method": method, "runs": runs.height, "settings": choices(runs), "median_error": float(np.median(errors)),
            "p90_error": float(np.quantile(errors, 0.9)), "worst_error": float(errors.max()),
            "bias": float(np.median(runs["error"].to_numpy())), "noise": float(np.median(noise)), "bound": allowed,
            "held": bool(np.median(errors) <= allowed and np.quantile(errors, 0.9) <= 2 * allowed),
        })  # fmt: skip
    return rows


def ranking(table: pl.DataFrame) -> tuple[int, int]:
    """Return (pairs, correct): pairs of settings whose measured times are distinguishable, and those that are predicted in order.

    Two settings on the same prompt are distinguishable if their times per token differ by more than twice the noise.

    >>> import polars as pl
    >>> times = {"measured_s": [1.0, 1.01, 2.0], "predicted_s": [3.0, 1.0, 2.0]}
    >>> ranking(pl.DataFrame({"prompt": ["a"] * 3, "tokens": [8] * 3, "noise": [0.01] * 3} | times))
    (2, 1)
    """
    pairs = right = 0
    for prompt in dict.fromkeys(table["prompt"]):
        runs = table.filter(table["prompt"] == prompt)
        measured, predicted = (runs[name].to_numpy() / runs["tokens"].to_numpy() for name in ("measured_s", "predicted_s"))
        noise = runs["noise"].to_numpy() * measured
        for one in range(runs.height):
            for other in range(one):
                if abs(measured[one] - measured[other]) > 2 * max(noise[one], noise[other]):
                    pairs += 1
                    right += int((measured[one] > measured[other]) == (predicted[one] > predicted[other]))
    return pairs, right
