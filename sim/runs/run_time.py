"""Estimate of the time of a run, from a sample of its points that is really computed."""

from __future__ import annotations

from collections.abc import Callable
from time import perf_counter
from typing import Any

from sim.runs.shard_plan import ShardPlan
from sim.views import evaluation, formula_view

SAMPLED_POINTS = 5
SAMPLED_DECODINGS = 1, 4
"""Simulated decodings of each sampled point in the view events: few and more, as a piece has a fixed cost too."""
SAMPLED_NEIGHBOURS = 32, 128
"""Neighbouring points whose closed forms are evaluated together, likewise; more, where these take no time worth measuring."""
ENOUGH_SECONDS = 0.1
"""Time of a sample of closed forms from which the time of one more point is known [s]."""
MOST_SECONDS = 4.0
"""No further point is sampled after this time [s]."""
FIXED_SECONDS = 0.5
"""Time of a run besides its points: files, tables and the printed report [s]."""


def estimate(plan: ShardPlan) -> float:
    """Time of a run on one core, without figures [s]; a few of its points are computed and nothing is written."""
    seconds = {"formula": _formula, "paths": _paths, "events": _events}
    return FIXED_SECONDS + sum(seconds[view](plan) for view in plan.views)


def _sample(points: int) -> list[int]:
    """Points at equal distances, the first and the last among them.

    >>> _sample(3), _sample(1000)
    ([0, 1, 2], [0, 250, 500, 749, 999])
    """
    steps = SAMPLED_POINTS - 1
    return sorted({round(index * (points - 1) / steps) for index in range(SAMPLED_POINTS)})


def _formula(plan: ShardPlan) -> float:
    """Closed forms: all points together if they are few, else by neighbouring points [s]."""
    points, (few, more) = int(plan.grid.points), SAMPLED_NEIGHBOURS
    if points <= more:
        return _timed(lambda: formula_view.frame(plan.grid, 0, points))
    first, second = _neighbours(plan, few), _neighbours(plan, more)
    while second < ENOUGH_SECONDS and more < (most := min(points, plan.step("formula"))):
        few, more = more, min(4 * more, most)
        first, second = second, _neighbours(plan, more)
    return first + _slope(first, second, few, more) * (points - few)


def _neighbours(plan: ShardPlan, count: int) -> float:
    """Time of the closed forms of this number of points in the middle of the grid [s]."""
    start = (int(plan.grid.points) - count) // 2
    return _timed(lambda: formula_view.frame(plan.grid, start, start + count))


def _paths(plan: ShardPlan) -> float:
    """Monte Carlo: a block of replications of each sampled point [s]."""
    count, block = int(plan.replications["paths"]), int(plan.size["paths"])

    def one(point: int) -> float:
        return _timed(lambda: evaluation.evaluate(plan.grid, "paths", [(point, 0, min(count, block))])) * -(-count // block)

    return _of_all(plan, one)


def _events(plan: ShardPlan) -> float:
    """Simulation: a few decodings of each sampled point [s]."""
    count = int(plan.replications["events"])
    few, more = (min(count, sampled) for sampled in SAMPLED_DECODINGS)

    def some(point: int, decodings: int) -> float:
        return _timed(lambda: evaluation.evaluate(plan.grid, "events", [(point, 0, decodings)]))

    def one(point: int) -> float:
        first, second = some(point, few), some(point, more)
        return second + _slope(first, second, few, more) * (count - more)

    return _of_all(plan, one)


def _of_all(plan: ShardPlan, one: Callable[[int], float]) -> float:
    """Time of all points, from the mean of those that are sampled within `MOST_SECONDS` [s]."""
    begun, seconds = perf_counter(), list[float]()
    for point in _sample(plan.grid.points):
        seconds.append(one(point))
        if perf_counter() - begun > MOST_SECONDS:
            break
    return float(plan.grid.points * sum(seconds) / len(seconds))


def _timed(work: Callable[[], Any]) -> float:
    begun = perf_counter()
    work()
    return perf_counter() - begun


def _slope(first: float, second: float, few: int, more: int) -> float:
    """Time of one more; where the noise is larger than that, the mean."""
    return (second - first) / (more - few) if second > first and more > few else second / more
