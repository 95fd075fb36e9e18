"""Check that views agree: paths and events on the same decodings up to rounding, formula and simulation up to sampling error.

A formula gives an expectation, a simulation the mean of a sample. Their difference is bounded by inequalities that do not assume a
normal distribution: they hold for few replications, and for skewed quantities with rare values. For n independent replications of X
in [0, b], the difference exceeds the bound with a probability of at most `chance`.

* If the variance v is known: Bernstein's inequality. With M = max(b - mean, mean) and L = ln(2 / chance),
  |sample mean - mean| <= M L / (3 n) + sqrt((M L / (3 n))^2 + 2 v L / n).
* Otherwise the empirical Bernstein inequality, with the sample variance V: sqrt(2 V L' / n) + 7 b L' / (3 (n - 1)), where
  L' = ln(4 / chance) ([Maurer2009], Theorem 4, for both sides).
* Hoeffding's inequality, b sqrt(L / (2 n)), if that is smaller; next to the empirical bound each gets half of the probability.

[Bernstein] S. Boucheron, G. Lugosi, P. Massart. Concentration Inequalities. Oxford 2013, Corollary 2.11 (and Theorem 2.8).
[Maurer2009] A. Maurer, M. Pontil. Empirical Bernstein Bounds and Sample Variance Penalization. COLT 2009, arXiv:0907.3740.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

import polars as pl

from model.methods import registry
from sim.scenarios.cases import Case
from sim.views.metrics import Sums

FALSE_ALARMS = 1e-6
"""Upper bound on the probability that a run reports a disagreement although its views agree."""
ROUNDING = 1e-9
"""Relative difference up to which sums of the same times count as equal. The events add the times of passes one by one, paths
multiply: n positive terms are summed with a relative error of at most (n - 1) 2^-53 (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, section 4.2), which is 1.2e-10 for a million passes."""
QUANTITIES = ("latency_layers", "busy_layers", "mean_busy_units_per_run", "rounds", "drafted")
SQUARES = ("rounds_square", "drafted_square")
"""Sums of squares over replications, in addition to `sim.views.metrics.Sums`."""


def bound(chance: float, count: int, most: float, mean: float, variance: float | None, sampled: float) -> float:
    """Bound on the difference between a sample mean and its expectation, exceeded with probability `chance`; see above.

    Parameters
    ----------
    chance, count
        Probability of a false alarm, and number of replications.
    most, mean
        Largest possible value (the smallest is 0), and the expectation.
    variance, sampled
        The variance, or None if not known, and the sample variance (divided by count - 1).

    >>> round(bound(1e-6, 1000, 1.0, 0.5, 0.25, 0.25), 4), round(bound(1e-6, 1000, 1.0, 0.5, None, 0.25), 4)
    (0.0852, 0.0872)
    """
    both = math.log(2 / chance)
    hoeffding = most * math.sqrt(both / (2 * count))
    if variance is not None:  # neither bound depends on the sample, so the smaller one may be used
        far = max(most - mean, mean) * both / (3 * count)
        return min(hoeffding, far + math.sqrt(far**2 + 2 * variance * both / count))
    if count < 2:
        return hoeffding
    # Half of the probability for each bound, since the sample decides which is smaller.
    hoeffding, four = most * math.sqrt(math.log(4 / chance) / (2 * count)), math.log(8 / chance)
    return min(hoeffding, math.sqrt(2 * sampled * four / count) + 7 * most * four / (3 * (count - 1)))


def paths_against_events(point: int, part: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Disagreement of paths and events at a point, on the decoding with the largest difference, if it exceeds rounding."""
    if "paths_relative" not in part.columns or (part["paths_relative"].max() or 0.0) <= ROUNDING:  # type: ignore[operator]
        return
    worst = part.filter(pl.col("paths_relative") == pl.col("paths_relative").max())
    for row in worst.head(1).to_dicts():
        if row["paths_relative"] > ROUNDING:
            difference = json.loads(row["paths_worst"])
            limit = ROUNDING * abs(difference["paths"])
            values = ("paths", difference["paths"]), ("events", difference["events"])
            yield _disagreement(point, difference["quantity"], *values, limit) | {"replication": difference["replication"]}


def simulated_against_formula(
    point: int, case: Case, formula: Mapping[str, Any], sums: Sums, more: Mapping[str, float], view: str, points: int
) -> Iterator[dict[str, Any]]:
    """Disagreements of a simulated point and its formula beyond sampling error, at `FALSE_ALARMS` for a run of `points` points.

    `more` has sums of rounds and drafted tokens and of their squares, where they are counted. A method without an upper bound on
    the time of a decoding (`slowest`) is not compared.
    """
    chance = FALSE_ALARMS / (points * len(QUANTITIES))
    for name, most, expected, variance, total, square in _compared(case, formula, sums, more):
        if expected is None or not math.isfinite(expected) or not math.isfinite(most):
            continue
        mean = total / sums.count
        sampled = max(square / sums.count - mean * mean, 0.0) * sums.count / max(sums.count - 1, 1)
        limit = ROUNDING * abs(expected)
        if variance != 0:  # a quantity without variance must be equal up to rounding
            limit += bound(chance, sums.count, most, expected, variance, sampled)
        if not abs(mean - expected) <= limit:
            yield _disagreement(point, name, ("formula", expected), (view, mean), limit)


def _compared(
    case: Case, formula: Mapping[str, Any], sums: Sums, more: Mapping[str, float]
) -> Iterator[tuple[str, float, float | None, float | None, float, float]]:
    """For each quantity: name, largest value, expectation, variance if known, and sums over replications of it and its square."""
    slowest = registry.method(case.method).slowest
    if slowest is None:
        return
    time, busy = slowest(case.parameters, case.settings.tokens, case.cost)
    deviation, tensor_parallel = formula.get("latency_sd_layers"), case.tensor_parallel
    known = deviation is not None and math.isfinite(deviation)
    yield (
        "latency_layers", time, formula.get("latency_layers"), deviation**2 if known and deviation is not None else None,
        sums.latency, sums.latency_square,
    )  # fmt: skip
    yield "busy_layers", busy * tensor_parallel, formula.get("busy_layers"), None, sums.busy, sums.busy_square
    units = max(case.parameters.units, case.peak_demand.units) * tensor_parallel
    yield "mean_busy_units_per_run", units, formula.get("mean_busy_units_per_run"), None, sums.ratio, sums.ratio_square
    per_round, rate = formula.get("tokens_per_round"), formula.get("draft_acceptance_rate")
    if per_round and math.isfinite(per_round) and "rounds_square" in more:
        rounds = case.outputs / per_round
        yield "rounds", float(case.outputs), rounds, None, more["rounds"], more["rounds_square"]
        if rate and math.isfinite(rate):
            most = float(case.outputs * (case.parameters.longest_draft + 1))
            yield "drafted", most, (case.outputs - rounds) / rate, None, more["drafted"], more["drafted_square"]


def _disagreement(point: int, quantity: str, one: tuple[str, float], other: tuple[str, float], limit: float) -> dict[str, Any]:
    return {
        "point": point, "quantity": quantity, "views": [one[0], other[0]], "values": [one[1], other[1]],
        "difference": abs(one[1] - other[1]), "bound": limit,
    }  # fmt: skip


def describe(found: Mapping[str, Any]) -> str:
    """Describe a disagreement in one line."""
    (one, other), (first, second) = found["views"], found["values"]
    where = f", decoding {found['replication']}" if "replication" in found else ""
    return (
        f"point {found['point']}{where}: {found['quantity']} is {first:.6g} by {one} and {second:.6g} by {other}; they differ by"
        f" {found['difference']:.2g}, more than {found['bound']:.2g}"
    )
