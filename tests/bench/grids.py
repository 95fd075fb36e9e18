"""Closed forms over grids, by method: points per second of a whole run, with its Parquet file, relative to round numbers.

A run takes about 20 ms besides its points, so grids of which 100,000 points per second are asked have thousands of points.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from typing import Any, NamedTuple

from sim.runs import sweep
from tests.bench.measure import Benchmark, rate

Tables = Mapping[str, Any]


class FormulaGrid(NamedTuple):
    """A method, what it is simulated with, and the axes of its grid."""

    target: float
    """Points per second that are asked."""
    method: Tables
    outcomes: Tables
    cost: Tables
    axes: Tables


def _steps(start: float, stop: float, count: int) -> dict[str, float]:
    return {"from": start, "to": stop, "count": count}


MANY_RATES = _steps(0.3, 0.9, 100)
RATES, RATIOS = _steps(0.3, 0.9, 40), _steps(0.02, 0.5, 40)
ACCEPT = {"kind": "iid", "acceptance_rate": 0.8}
RANKS = [0.62, 0.13, 0.06, 0.035, 0.02, 0.015, 0.01, 0.01]
H100 = {"kind": "profile", "profile": "h100-llama-3.1-8b", "draft_profile": "h100-operations", "draft_shape": "llama-3.2-1b"}
DRAFTED = {"outcomes.acceptance_rate": RATES, "method.draft_length": [*range(1, 11)]}

GRIDS = {
    "speculative": FormulaGrid(
        1e5, {"name": "speculative", "layers": 40, "draft_length": 4}, ACCEPT, {"cost_ratio": 0.1},
        {**DRAFTED, "cost.cost_ratio": RATIOS},
    ),
    "lengths": FormulaGrid(
        1e5, {"name": "speculative", "layers": 40, "draft_length": 4}, ACCEPT, {"cost_ratio": 0.1},
        {**DRAFTED, "scenario.tokens": [64, 128, 256, 512, 1024], "cost.cost_ratio": _steps(0.02, 0.5, 20)},
    ),
    "lengths-alone": FormulaGrid(
        1e5, {"name": "speculative", "layers": 40, "draft_length": 4}, ACCEPT, {"cost_ratio": 0.1},
        {"scenario.tokens": _steps(64, 5063, 5000)},
    ),
    "ppd": FormulaGrid(
        1e5, {"name": "ppd", "layers": 40, "exit_layer": 20, "candidates": 3}, {"kind": "iid", "match_rate": 0.7}, {},
        {"outcomes.match_rate": MANY_RATES, "method.exit_layer": [*range(20, 40)], "method.candidates": [*range(1, 9)]},
    ),
    "bild": FormulaGrid(
        1e5, {"name": "bild", "layers": 24}, {"kind": "rates", "fallback_rate": 0.1, "rollback_rate": 0.01}, {"cost_ratio": 0.25},
        {"outcomes.fallback_rate": RATES, "outcomes.rollback_rate": _steps(0.0, 0.1, 10), "cost.cost_ratio": RATIOS},
    ),
    "skipdecode": FormulaGrid(
        1e5, {"name": "skipdecode", "layers": 24, "min_layers": 8, "max_layers": 16, "prompt": 60, "sequence_length": 188}, {}, {},
        {"method.min_layers": [*range(2, 10)], "method.max_layers": [*range(10, 20)], "cost.final_head": _steps(0.0, 3.0, 200)},
    ),
    "early-exit": FormulaGrid(
        1e5, {"name": "early_exit", "layers": 24, "exit_layer": 12}, {}, {"final_head": 2.0},
        {"method.exit_layer": [*range(4, 20)], "cost.final_head": _steps(0.0, 3.0, 50), "cost.early_head": _steps(0.0, 3.0, 10)},
    ),
    "ngram": FormulaGrid(
        1e5, {"name": "ngram", "layers": 32, "draft_length": 4}, {"kind": "iid", "hit_rate": 0.4, "acceptance_rate": 0.6}, {},
        {
            "outcomes.acceptance_rate": MANY_RATES, "outcomes.hit_rate": _steps(0.1, 0.9, 40),
            "method.draft_length": [2, 4, 8],
        },
    ),
    "tree": FormulaGrid(
        1e5, {"name": "tree", "layers": 32, "shape": "eagle-2", "draft_depth": 3, "width": 8, "nodes": 16, "rank_rates": RANKS},
        {"kind": "by-depth", "rank_rates": RANKS}, {"cost_ratio": 0.05},
        {"method.draft_depth": [1, 2, 3, 4, 5], "method.nodes": [8, 16, 32], "cost.cost_ratio": _steps(0.02, 0.5, 1000)},
    ),
    "profile": FormulaGrid(
        2e4, {"name": "speculative", "layers": 32, "draft_length": 4}, ACCEPT, H100,
        {**DRAFTED, "outcomes.acceptance_rate": MANY_RATES, "cost.prompt": [128, 512, 1024, 2048, 4096]},
    ),
    "profile-lengths": FormulaGrid(
        2e4, {"name": "speculative", "layers": 32, "draft_length": 4}, ACCEPT, H100,
        {
            "scenario.tokens": {"from": 64, "to": 563, "count": 500}, "method.draft_length": [2, 4, 6, 8],
            "cost.prompt": [128, 512, 1024, 2048, 4096],
        },
    ),
    "profile-budgets": FormulaGrid(
        2e4, {"name": "speculative", "layers": 32, "draft_length": 4, "context_budget": 512}, ACCEPT, {**H100, "prompt": 2048},
        {"scenario.tokens": {"from": 64, "to": 2063, "count": 2000}, "outcomes.acceptance_rate": [0.3, 0.5, 0.7, 0.9]},
    ),
    "profile-tree": FormulaGrid(
        2e4, {"name": "tree", "layers": 32, "shape": "eagle-2", "draft_depth": 3, "width": 8, "nodes": 16, "rank_rates": RANKS},
        {"kind": "by-depth", "rank_rates": RANKS}, H100,
        {
            "method.draft_depth": [1, 2, 3, 4, 5], "method.nodes": [8, 16, 32],
            "cost.prompt": {"from": 128, "to": 4118, "count": 400},
        },
    ),
    "prompts": FormulaGrid(
        2e4, {"name": "speculative", "layers": 32, "draft_length": 4}, ACCEPT, H100,
        {"cost.prompt": {"from": 128, "to": 5127, "count": 5000}},
    ),
    "engine-steps": FormulaGrid(
        2e4, {"name": "speculative", "layers": 32, "draft_length": 4}, ACCEPT, H100, {"cost.step_s": _steps(1e-5, 1e-2, 5000)},
    ),
    "adaptive": FormulaGrid(
        2e3, {"name": "adaptive", "layers": 24, "policy": "heuristic"}, ACCEPT, {"cost_ratio": 0.1},
        {"outcomes.acceptance_rate": RATES, "cost.cost_ratio": RATIOS},
    ),
    "adaptive-lengths": FormulaGrid(
        2e3, {"name": "adaptive", "layers": 24, "policy": "heuristic"}, ACCEPT, {"cost_ratio": 0.1},
        {"scenario.tokens": {"from": 64, "to": 563, "count": 500}},
    ),
    "profile-adaptive": FormulaGrid(
        2e3, {"name": "adaptive", "layers": 32, "policy": "heuristic"}, ACCEPT, H100,
        {"outcomes.acceptance_rate": _steps(0.3, 0.9, 50), "cost.step_s": _steps(1e-5, 1e-2, 40)},
    ),
    "batches": FormulaGrid(
        2e3, {"name": "speculative", "layers": 32, "draft_length": 4, "sequences": 8}, ACCEPT, H100,
        {**DRAFTED, "method.sequences": [1, 2, 4, 8]},
    ),
    "static-batches": FormulaGrid(
        2e3, {"name": "speculative", "layers": 32, "draft_length": 4, "sequences": 8, "batching": "static"}, ACCEPT, H100,
        {"outcomes.acceptance_rate": _steps(0.3, 0.9, 1000)},
    ),
    "static-lengths": FormulaGrid(
        2e3, {"name": "speculative", "layers": 32, "draft_length": 4, "sequences": 8, "batching": "static"}, ACCEPT, H100,
        {"scenario.tokens": {"from": 32, "to": 331, "count": 300}, "outcomes.acceptance_rate": [0.3, 0.5, 0.7, 0.9]},
    ),
    "static-sizes": FormulaGrid(
        2e3, {"name": "speculative", "layers": 32, "draft_length": 4, "sequences": 8, "batching": "static"}, ACCEPT, H100,
        {
            "method.sequences": [2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64],
            "outcomes.acceptance_rate": _steps(0.3, 0.95, 80),
        },
    ),
    "static-sizes-lengths": FormulaGrid(
        2e3, {"name": "speculative", "layers": 32, "draft_length": 4, "sequences": 8, "batching": "static"}, ACCEPT, H100,
        {
            "method.sequences": [2, 3, 4, 6, 8, 10, 12, 14, 16, 20, 24, 28, 32, 48, 64],
            "scenario.tokens": {"from": 32, "to": 320, "count": 10}, "outcomes.acceptance_rate": _steps(0.3, 0.95, 10),
        },
    ),
}  # fmt: skip


def scenario(name: str, *, tiny: bool = False) -> dict[str, Any]:
    """Tables of the scenario of one grid; `tiny` keeps two values of each axis."""
    grid = GRIDS[name]
    tables = {
        "scenario": {"name": f"bench-{name}", "tokens": 128, "views": ["formula"]}, "method": dict(grid.method),
        "cost": {"kind": "unit", **grid.cost}, "sweep": dict(grid.axes),
    }  # fmt: skip
    if grid.outcomes:
        tables["outcomes"] = {**grid.outcomes, "source": "assumed"}
    if tiny:
        tables["sweep"] = {
            path: values[:2] if isinstance(values, list) else {**values, "count": 2} for path, values in grid.axes.items()
        }
    return tables


def run(tables: Tables) -> int:
    """Run a scenario into a folder that is removed; return the number of rows. Raises RuntimeError if a point failed."""
    with tempfile.TemporaryDirectory() as folder:
        report = sweep.run(tables, out=f"{folder}/run", jobs=1)
    if report.failed:
        raise RuntimeError(f"points failed, the first: {report.failed[0]['error']}")
    return report.rows


def points_per_second(tables: Tables) -> float:
    """Points per second of CPU time of this process and its threads."""
    points = 0

    def do() -> None:
        nonlocal points
        points = run(tables)

    rated = rate(1, do)
    return points * rated


def benchmarks(tiny: bool = False) -> list[Benchmark]:
    """Grids of each kind of closed form, and long single axes of tokens and on a profile; else 128 tokens."""

    def of(name: str, target: float) -> Benchmark:
        tables = scenario(name, tiny=tiny)
        words = f"{target:,.0f} points per second"
        return Benchmark(f"grid-{name}", "points/s", lambda: points_per_second(tables), lambda: target, words, 1)

    return [of(name, grid.target) for name, grid in GRIDS.items()]
