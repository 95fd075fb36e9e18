"""Numbers of the PPD paper's Figure 3 for a run of its points: Eqs. 3 and 5 in the limit of many tokens, Theorem 4.1 for the run.

Section 4.3 of the paper gives the smallest and the largest latency of its points, relative to plain decoding, in that limit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from model.methods.ppd import theory as ppd

DATA_SETS = ("squad", "wmt", "cnn_dm")


def run_sentences(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """`sentences` about those points of a run that are the paper's."""
    return sentences(replayed(rows))


def replayed(rows: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Points of a results table that are the paper's: published rates of all its data sets, exit in the middle, no devices.

    There is one row per data set, head and number of candidates; none if a data set is missing.
    """
    points: dict[tuple[Any, ...], Mapping[str, Any]] = {}
    for row in rows:
        layers, exit_layer = row.get("layers") or 0, row.get("exit_layer") or 0
        published = str(row.get("outcomes_source")).startswith("published: PPD Table 2")
        if row.get("method") == "ppd" and published and layers == 2 * exit_layer and row.get("seconds_per_layer") is None:
            points.setdefault((row.get("data_set"), row.get("head"), row["candidates"]), row)
    return [*points.values()] if {key[0] for key in points} >= {*DATA_SETS} else []


def sentences(points: Sequence[Mapping[str, Any]]) -> list[str]:
    """Eq. 3 and Eq. 5 at the points of the smallest and the largest latency, and Theorem 4.1 for the run's tokens.

    >>> point = {"layers": 40, "exit_layer": 20, "tokens": 128, "data_set": "squad", "head": "trained"}
    >>> rates = {"candidates": 5, "match_rate": 0.7415}, {"candidates": 1, "match_rate": 0.2163, "data_set": "wmt", "head": "final"}
    >>> for line in sentences([point | rate for rate in rates]):
    ...     print(line)
    Eq. 3 of the PPD paper, many tokens: latency relative to plain decoding 0.629 (squad, trained head, k = 5) to 0.892 (wmt, ...
    """
    if not points:
        return []
    best, worst = (pick(points, key=lambda row: float(ppd.relative_latency(row["match_rate"]))) for pick in (min, max))
    limits = [f"{float(ppd.relative_latency(row['match_rate'])):.3f} ({_named(row)})" for row in (best, worst)]
    units = [f"{float(ppd.mean_busy_units(row['match_rate'], row['candidates'])):.3f}" for row in (best, worst)]
    finite = [f"{_finite(row):.4f}" for row in (best, worst)]
    return [
        f"Eq. 3 of the PPD paper, many tokens: latency relative to plain decoding {' to '.join(limits)}, at {' and '.join(units)}"
        f" busy units (Eq. 5); for {best['tokens']} tokens Theorem 4.1 gives {' and '.join(finite)}"
    ]


def _named(row: Mapping[str, Any]) -> str:
    return f"{row['data_set']}, {row['head']} head, k = {row['candidates']}"


def _finite(row: Mapping[str, Any]) -> float:
    latency = ppd.expected_latency(row["layers"], row["exit_layer"], row["tokens"], row["match_rate"])
    return float(latency) / float(row["layers"] * row["tokens"])
