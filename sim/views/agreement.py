"""Whether views that must agree do: paths and events on the same decodings to rounding, formula and simulation within chance.

A formula says a mean; what is simulated has the mean of a sample. How far they may be apart is said by inequalities that need no
normal law: they hold for few replications, and for skewed quantities with rare values. X lies in [0, b], of n independent
replications; the two means are further apart than the bound with a chance of at most `chance`.

* Where the variance v is known: Bernstein's inequality. With M = max(b - mean, mean) and L = ln(2 / chance),
  |sample mean - mean| <= M L / (3 n) + sqrt((M L / (3 n))^2 + 2 v L / n).
* Else the empirical one, with the sample's own variance V: sqrt(2 V L' / n) + 7 b L' / (3 (n - 1)), where L' = ln(4 / chance)
  ([Maurer2009], Theorem 4, for both sides).
* Hoeffding's, b sqrt(L / (2 n)), where that is less; beside the empirical one each has half of the chance.

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
"""How often at most a run is said to disagree with itself whose views do agree."""
ROUNDING = 1e-9
"""Relative error up to which sums of the same times are the same. The clock of the events adds the times of passes one by one,
paths multiply: n terms above zero are summed to within a relative error of (n - 1) 2^-53 (Higham, Accuracy and Stability of
Numerical Algorithms, 2002, section 4.2), so of a million passes to 1.2e-10 at worst, and to far less as a rule."""
QUANTITIES = ("latency_layers", "busy_layers", "mean_busy_units_per_run", "rounds", "drafted")
SQUARES = ("rounds_square", "drafted_square")
"""Sums of squares over replications, beside those of `sim.views.metrics.Sums`."""


def bound(chance: float, count: int, most: float, mean: float, variance: float | None, sampled: float) -> float:
    """How far the mean of a sample may be from its expectation, but for a chance; see above.

    Parameters
    ----------
    chance, count
        Of a false alarm, and replications.
    most, mean
        The greatest value that there is (the least is 0), and the expectation.
    variance, sampled
        The variance where it is known, and that of the sample (dividing by count - 1).

    >>> round(bound(1e-6, 1000, 1.0, 0.5, 0.25, 0.25), 4), round(bound(1e-6, 1000, 1.0, 0.5, None, 0.25), 4)
    (0.0852, 0.0872)
    """
    both = math.log(2 / chance)
    hoeffding = most * math.sqrt(both / (2 * count))
    if variance is not None:  # neither looks at the sample: the lesser may be chosen
        far = max(most - mean, mean) * both / (3 * count)
        return min(hoeffding, far + math.sqrt(far**2 + 2 * variance * both / count))
    if count < 2:
        return hoeffding
    # Half of the chance for each of two bounds, one of which the sample chooses.
    hoeffding, four = most * math.sqrt(math.log(4 / chance) / (2 * count)), math.log(8 / chance)
    return min(hoeffding, math.sqrt(2 * sampled * four / count) + 7 * most * four / (3 * (count - 1)))


def on_the_same_decodings(point: int, part: pl.DataFrame) -> Iterator[dict[str, Any]]:
    """Where paths and events of one point differ by more than rounding, on the decoding on which they differ most."""
    if "paths_relative" not in part.columns:
        return
    worst = part.filter(pl.col("paths_relative") == pl.col("paths_relative").max())
    for row in worst.head(1).to_dicts():
        if row["paths_relative"] > ROUNDING:
            told = json.loads(row["paths_worst"])
            limit = ROUNDING * abs(told["paths"])
            yield _told(point, told["quantity"], ("paths", told["paths"]), ("events", told["events"]), limit) | {
                "replication": told["replication"]
            }


def with_the_formula(
    point: int, case: Case, formula: Mapping[str, Any], sums: Sums, more: Mapping[str, float], view: str, points: int
) -> Iterator[dict[str, Any]]:
    """Where a simulated point and its formula are further apart than chance explains, by `FALSE_ALARMS` for so many points.

    `more` has sums of rounds and drafted tokens and of their squares, where they are counted. A method whose theory does not say
    how long a decoding may take at most (`slowest`) is not compared.
    """
    chance = FALSE_ALARMS / (points * len(QUANTITIES))
    for name, most, expected, variance, total, square in _compared(case, formula, sums, more):
        if expected is None or not math.isfinite(expected) or not math.isfinite(most):
            continue
        mean = total / sums.count
        sampled = max(square / sums.count - mean * mean, 0.0) * sums.count / max(sums.count - 1, 1)
        limit = ROUNDING * abs(expected)
        if variance != 0:  # a quantity without any is known
            limit += bound(chance, sums.count, most, expected, variance, sampled)
        if not abs(mean - expected) <= limit:
            yield _told(point, name, ("formula", expected), (view, mean), limit)


def _compared(
    case: Case, formula: Mapping[str, Any], sums: Sums, more: Mapping[str, float]
) -> Iterator[tuple[str, float, float | None, float | None, float, float]]:
    """Name, greatest value, expectation, variance where it is known, and sums over replications of each quantity and its square."""
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
    units = max(case.parameters.units, case.demand.units) * tensor_parallel
    yield "mean_busy_units_per_run", units, formula.get("mean_busy_units_per_run"), None, sums.ratio, sums.ratio_square
    per_round, rate = formula.get("tokens_per_round"), formula.get("draft_acceptance_rate")
    if per_round and math.isfinite(per_round) and "rounds_square" in more:
        rounds = case.outputs / per_round
        yield "rounds", float(case.outputs), rounds, None, more["rounds"], more["rounds_square"]
        if rate and math.isfinite(rate):
            most = float(case.outputs * (case.parameters.longest_draft + 1))
            yield "drafted", most, (case.outputs - rounds) / rate, None, more["drafted"], more["drafted_square"]


def _told(point: int, quantity: str, one: tuple[str, float], other: tuple[str, float], limit: float) -> dict[str, Any]:
    return {
        "point": point, "quantity": quantity, "views": [one[0], other[0]], "values": [one[1], other[1]],
        "difference": abs(one[1] - other[1]), "bound": limit,
    }  # fmt: skip


def in_words(found: Mapping[str, Any]) -> str:
    """A disagreement as a line."""
    (one, other), (first, second) = found["views"], found["values"]
    where = f", decoding {found['replication']}" if "replication" in found else ""
    return (
        f"point {found['point']}{where}: {found['quantity']} is {first:.6g} by {one} and {second:.6g} by {other}; they differ by"
        f" {found['difference']:.2g}, more than {found['bound']:.2g}"
    )
