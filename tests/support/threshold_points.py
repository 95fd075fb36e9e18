"""Points of a decision record in closed form, as drawn by the figure of BiLD's thresholds."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl

from figures.of_runs.bild_thresholds import BOTH, LARGE, NO_FALLBACK, NO_ROLLBACK, SMALL
from model.base import checks
from model.costs.width_curve import CurveLike
from model.methods.bild import theory as bild
from model.methods.bild.threshold_decisions import Decisions

WINDOWS = tuple(range(3, 11))
"""Draft lengths after which the small model falls back at the latest: Section 4.3 of [Kim2023]."""


def points(
    record: Decisions,
    fallback_thresholds: Sequence[float],
    rollback_thresholds: Sequence[float],
    *,
    cost_ratio: float,
    cost_source: str,
    max_draft_length: int = 10,
    variant: str = "paper",
    windows: Sequence[int] = WINDOWS,
    verify_cost: CurveLike | None = None,
    name: str = "record",
) -> pl.DataFrame:
    """One row per choice: its rates, time per token relative to the large model alone, and agreement with it.

    Policies: both, every pair of thresholds; no rollback, every fallback threshold; no fallback, every window length and rollback
    threshold; and the two models alone. `cost_ratio` is the time of a pass of the small model relative to the large model's,
    `cost_source` its provenance (measured, published or assumed).

    >>> record = Decisions([0.9, 0.4, 0.8, 0.7], [0.1, 3.0, 2.5, 0.2], [True, False, False, True], "assumed: by hand")
    >>> rows = points(record, [0.5], [2.0], cost_ratio=0.25, cost_source="assumed", windows=[4])
    >>> rows.select("policy", "fallback_rate", pl.col("rollback_rate", "latency", "agreement").round(3)).rows()[:3]
    [('both policies', 0.25, 0.333, 0.972, 1.0), ('no rollback', 0.25, 0.0, 0.507, 0.754), ('no fallback', 0.0, 0.5, 1.032, 1.0)]
    """
    low = checks.array("fallback_thresholds", fallback_thresholds, 0)
    high = checks.array("rollback_thresholds", rollback_thresholds, 0)
    lengths = checks.whole_array("windows", windows, 1).astype(int)
    checks.whole("max_draft_length", max_draft_length, 1)
    checks.number("cost_ratio", cost_ratio, 0)
    never = float(record.distance.max())  # no rollback, because no distance is above it
    choices = [(BOTH, x, y, max_draft_length) for y in high.tolist() for x in low.tolist()]
    choices += [(NO_ROLLBACK, x, never, max_draft_length) for x in low.tolist()]
    choices += [(NO_FALLBACK, 0.0, y, length) for y in high.tolist() for length in lengths.tolist()]
    rows: list[dict[str, Any]] = []
    for policy, fallback, rollback, most in choices:
        found = record.rates(fallback, rollback, variant=variant)
        falls, back = float(found.fallback_rate), float(np.nan_to_num(found.rollback_rate))  # nan without drafts
        speed = bild.speedup(falls, back, most, cost_ratio, variant=variant, verify_cost=verify_cost)
        rows.append(
            {
                "policy": policy, "fallback_threshold": None if policy == NO_FALLBACK else fallback,
                "rollback_threshold": None if policy == NO_ROLLBACK else rollback, "max_draft_length": most, "fallback_rate": falls,
                "rollback_rate": back, "latency": 1 / float(speed),
                "agreement": float(bild.agreement(record, fallback, rollback, most, variant=variant)),
            }
        )  # fmt: skip
    rows.append({"policy": LARGE, "latency": 1.0, "agreement": 1.0})
    rows.append({"policy": SMALL, "latency": float(cost_ratio), "agreement": float(record.agrees.mean())})
    shared = {"name": name, "source": record.source, "cost_source": cost_source, "variant": variant}
    return pl.DataFrame([{**shared, "cost_ratio": float(cost_ratio), **row} for row in rows], infer_schema_length=None)
