"""Axes of numbers as arrays: rows, columns and errors are those of points that are resolved one by one."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from polars.testing import assert_frame_equal

import sim
from model.base.checks import ParameterError
from model.costs import watched_costs
from model.costs.layer_times import UnitCost
from model.costs.many_costs import UnitCosts, VariedCosts, joined
from model.costs.step_costs import ALL_LAYERS, PassShape
from model.methods import registry
from model.methods.prediction import ChoiceGroup, GroupedChoices, PredictionPoints
from model.outcomes.outcome_laws import Iid
from model.steps import LayerSpan
from sim.scenarios import cases, scenario_file
from sim.scenarios.cases import Cost
from sim.scenarios.grid import Grid
from sim.scenarios.outcomes.outcome_records import VariedOutcomes
from sim.scenarios.part_columns import CaseGroup, PartColumn
from sim.views import formula_view, point_blocks, work_columns
from sim.views.point_blocks import TOKENS
from tests.support.tiers import examples

ACCEPTANCE = {"kind": "iid", "acceptance_rate": 0.6}
DRAFTING = {"cost_ratio": 0.2}
SCENARIOS: dict[str, dict[str, Any]] = {
    "speculative": {
        "method": [{"name": "speculative", "layers": 6, "draft_length": 3}], "outcomes": ACCEPTANCE, "cost": DRAFTING,
        "sweep": {"method.draft_length": [1, 4]},
    },
    "speculative on two units": {
        "method": [{"name": "speculative", "layers": 6, "draft_length": 2, "placement": "separate"}],
        "outcomes": ACCEPTANCE | {"trials": 40}, "cost": {"cost_ratio": 0.2, "operations_ratio": 0.1, "link": 0.5},
        "cluster": {"units": 2, "links": "shared"},
    },
    "a batch kept full, by width": {
        "method": [{"name": "speculative", "layers": 6, "draft_length": 2, "sequences": 2}], "outcomes": ACCEPTANCE,
        "cost": {"cost_ratio": 0.2, "verify_cost": [[1, 1.0], [8, 2.0]]},
    },
    "a law by draft position and a law of one rate": {
        "method": [
            {
                "name": "speculative", "layers": 6, "draft_length": 2,
                "outcomes": {"kind": "by-draft-position", "acceptance_rates": [0.9, 0.4]},
            },
            {"name": "speculative", "layers": 6, "draft_length": 3},
        ],
        "outcomes": ACCEPTANCE, "cost": DRAFTING,
    },
    "bild": {
        "method": [{"name": "bild", "layers": 6, "variant": "code"}], "cost": DRAFTING | {"operations_ratio": 0.1},
        "outcomes": {"kind": "rates", "fallback_rate": 0.3, "rollback_rate": 0.2, "trials": 30},
        "sweep": {"method.placement": ["same", "separate"]},
    },
    "skipdecode": {
        "method": [{"name": "skipdecode", "layers": 8, "min_layers": 2, "max_layers": 6, "prompt": 4, "sequence_length": 20}],
    },
    "early_exit": {
        "method": [{"name": "early_exit", "layers": 4}], "outcomes": {"kind": "hazards", "hazards": [0.1, 0.5, 0.2, 1.0]},
        "cost": {"propagation": 0.1}, "sweep": {"method.measure": ["softmax", "state"]},
    },
    "ppd": {
        "method": [{"name": "ppd", "layers": 4, "exit_layer": 2, "candidates": 2}], "outcomes": {"kind": "iid", "match_rate": 0.5},
        "cluster": {"units": 3, "stop": "pass"},
    },
    "ppd, nested": {
        "method": [{"name": "ppd", "layers": 4, "exit_layer": 1, "candidates": 2, "form": "nested"}],
        "outcomes": {"kind": "iid", "match_rate": 0.5},
    },
    "ppd of a shape": {
        "method": [{"name": "ppd", "exit_layer": 20, "candidates": 2}], "outcomes": {"kind": "iid", "match_rate": 0.5},
        "cost": {"shape": "llama-2-13b"},
    },
    "skipdecode of a shape": {
        "method": [{"name": "skipdecode", "min_layers": 2, "max_layers": 6, "prompt": 4, "sequence_length": 20}],
        "cost": {"shape": "llama-2-13b"},
    },
    "skipdecode in static batches": {
        "method": [
            {
                "name": "skipdecode", "layers": 8, "min_layers": 2, "max_layers": 6, "prompt": 4, "sequence_length": 60,
                "sequences": 2, "batching": "static",
            },
            {"name": "early_exit", "layers": 8, "exit_layer": 3, "sequences": 2, "batching": "static"},
        ],
    },
    "early_exit of a shape, by rates": {
        "method": [{"name": "early_exit"}], "outcomes": {"kind": "hazards", "hazards": [0.05] * 39 + [1.0]},
        "cost": {"shape": "llama-2-13b", "propagation": 0.1}, "sweep": {"method.fill": ["propagate", "backfill"]},
    },
    "ngram": {
        "method": [{"name": "ngram", "layers": 6, "draft_length": 2}], "cost": {"verify_cost": [[1, 1.0], [8, 2.0]]},
        "outcomes": {"kind": "iid", "hit_rate": 0.4, "acceptance_rate": 0.6}, "sweep": {"method.draft_length": [1, 3]},
    },
    "ngram with trials, kept full": {
        "method": [{"name": "ngram", "layers": 6, "draft_length": 2, "sequences": 2}],
        "outcomes": {"kind": "iid", "hit_rate": 0.4, "acceptance_rate": 0.6, "trials": 50},
    },
    "adaptive": {"method": [{"name": "adaptive", "layers": 6, "policy": "optimum"}], "outcomes": ACCEPTANCE, "cost": DRAFTING},
    "adaptive by the heuristic": {
        "method": [{"name": "adaptive", "layers": 6, "policy": "heuristic", "max_draft_length": 4}], "outcomes": ACCEPTANCE,
        "cost": DRAFTING,
    },
    "pearl": {"method": [{"name": "pearl", "layers": 6, "draft_length": 2}], "outcomes": ACCEPTANCE, "cost": DRAFTING},
    "amusd": {"method": [{"name": "amusd", "layers": 6, "draft_length": 3}], "outcomes": ACCEPTANCE, "cost": DRAFTING},
    "dsi": {"method": [{"name": "dsi", "layers": 6, "lookahead": 2, "verifiers": 2}], "outcomes": ACCEPTANCE, "cost": DRAFTING},
    "hierarchical": {
        "method": [{"name": "hierarchical", "layers": 6, "draft_length": 3}],
        "outcomes": {"accept": ACCEPTANCE, "medium_accept": ACCEPTANCE},
        "cost": DRAFTING | {"medium_cost_ratio": 0.5, "final_head": 0.5},
    },
    "several methods": {
        "method": [{"name": "autoregressive", "layers": 4}, {"name": "speculative", "layers": 4, "draft_length": 2}],
        "outcomes": ACCEPTANCE, "cost": DRAFTING, "sweep": {"scenario.tokens": [1, 7]},
    },
    "costs of one method": {
        "method": [
            {"name": "speculative", "layers": 4, "draft_length": 2, "cost": {"cost_ratio": 0.7}},
            {"name": "speculative", "layers": 4, "draft_length": 2},
        ],
        "outcomes": ACCEPTANCE, "cost": DRAFTING,
    },
    "a batch kept full": {
        "method": [{"name": "speculative", "layers": 6, "draft_length": 4, "sequences": 2}], "outcomes": ACCEPTANCE,
        "cost": DRAFTING,
    },
    "pearl that waits for a unit": {
        "method": [{"name": "pearl", "layers": 6, "draft_length": 2}], "outcomes": ACCEPTANCE, "cost": DRAFTING,
        "cluster": {"units": 1},
    },
    "dsi that waits for units": {
        "method": [{"name": "dsi", "layers": 6, "lookahead": 1, "verifiers": 4}], "outcomes": ACCEPTANCE, "cost": DRAFTING,
        "cluster": {"units": 3},
    },
    "ppd that waits for units unless links are slow": {
        "method": [{"name": "ppd", "layers": 4, "exit_layer": 2, "candidates": 2}],
        "outcomes": {"kind": "iid", "match_rate": 0.5}, "cluster": {"units": 2},
    },
    "static batches": {
        "method": [{"name": "speculative", "layers": 6, "draft_length": 2, "sequences": 2, "batching": "static"}],
        "outcomes": ACCEPTANCE, "cost": DRAFTING | {"verify_cost": [[1, 1.0], [8, 2.0]]},
    },
    "dsi, by width": {
        "method": [{"name": "dsi", "layers": 6, "lookahead": 4, "verifiers": 2}], "outcomes": ACCEPTANCE,
        "cost": DRAFTING | {"verify_cost": [[1, 1.0], [3, 2.0]]}, "sweep": {"scenario.tokens": [2]},
    },
    "rates by position": {
        "method": [{"name": "speculative", "layers": 4, "draft_length": 2}], "cost": DRAFTING,
        "outcomes": {"kind": "by-position", "acceptance_rates": [0.25, 0.75] * 16},
    },
    "published costs": {
        "method": [{"name": "speculative", "layers": 4, "draft_length": 2}], "outcomes": ACCEPTANCE,
        "cost": {"kind": "published", "task": "cnndm"},
    },
}  # fmt: skip
H100 = {"kind": "profile", "profile": "h100-llama-3.1-8b"}
DRAFTED_ON_H100 = H100 | {"draft_profile": "h100-operations", "draft_shape": "llama-3.2-1b"}
ON_HARDWARE: dict[str, dict[str, Any]] = {
    "speculative": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2}], "outcomes": ACCEPTANCE | {"trials": 40},
        "cost": DRAFTED_ON_H100, "sweep": {"method.draft_length": [1, 3]},
    },
    "on two units": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2, "placement": "separate"}], "outcomes": ACCEPTANCE,
        "cost": DRAFTED_ON_H100 | {"link_s": 0.001},
    },
    "a batch kept full": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2, "sequences": 4}], "outcomes": ACCEPTANCE,
        "cost": DRAFTED_ON_H100, "sweep": {"method.batching": ["continuous", "lockstep"]},
    },
    "plain decoding kept full, over two devices": {
        "method": [{"name": "autoregressive", "sequences": 3}],
        "cost": {"kind": "roofline", "device": "h100", "shape": "llama-2-13b", "tensor_parallel": 2},
    },
    "draft heads in a batch kept full": {
        "method": [{"name": "speculative", "draft_length": 2, "drafter": "heads"}], "outcomes": ACCEPTANCE,
        "cost": {"kind": "engine", "law": "vllm-llama-3.1-8b-eagle3-h100"}, "sweep": {"method.sequences": [1, 8]},
    },
    "static batches": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2, "sequences": 2, "batching": "static"}],
        "outcomes": ACCEPTANCE, "cost": DRAFTED_ON_H100,
    },
    "static batches on several devices": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 3, "sequences": 3, "batching": "static"}],
        "outcomes": ACCEPTANCE, "cost": DRAFTED_ON_H100, "sweep": {"cost.tensor_parallel": [1, 4]},
    },
    "a draft that reads less": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2, "context_budget": 6}], "outcomes": ACCEPTANCE,
        "cost": DRAFTED_ON_H100,
    },
    "a draft and a medium model that read less": {
        "method": [
            {"name": "hierarchical", "layers": 32, "draft_length": 2, "context_budget": 14, "medium_context_budget": 30},
        ],
        "outcomes": {"accept": ACCEPTANCE, "medium_accept": ACCEPTANCE}, "cost": DRAFTED_ON_H100 | {"medium_shape": "llama-3.2-3b"},
        "sweep": {"method.context_budget": [14, 36]},
    },
    "drafts that read less, of batches": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2, "context_budget": 20, "sequences": 3}],
        "outcomes": ACCEPTANCE, "cost": DRAFTED_ON_H100, "sweep": {"method.batching": ["continuous", "lockstep"]},
    },
    "a model that reads less when it drafts": {
        "method": [
            {
                "name": "self_speculative", "layers": 32, "exit_layer": 32, "draft_length": 2, "reuse": False,
                "context_budget": 12,
            },
        ],
        "outcomes": ACCEPTANCE, "cost": H100,
    },
    "adaptive drafts": {
        "method": [{"name": "adaptive", "layers": 32, "policy": "heuristic", "max_draft_length": 4}], "outcomes": ACCEPTANCE,
        "cost": DRAFTED_ON_H100, "sweep": {"method.policy": ["heuristic", "optimum"]},
    },
    "drafts that end at a doubt": {
        "method": [{"name": "adaptive", "layers": 32, "policy": "confidence", "max_draft_length": 3}],
        "outcomes": {"accept": ACCEPTANCE, "confidence": {"kind": "two-class", "low_if_accepted": 0.25, "low_if_rejected": 0.5}},
        "cost": DRAFTED_ON_H100, "sweep": {"method.placement": ["colocated", "separate"]},
    },
    "tree": {
        "method": [{"name": "tree", "layers": 32, "shape": "full", "draft_depth": 2, "width": 2}],
        "outcomes": {"kind": "by-depth", "rank_rates": [0.6, 0.2]}, "cost": DRAFTED_ON_H100,
    },
    "ppd": {
        "method": [{"name": "ppd", "layers": 32, "exit_layer": 16, "candidates": 2}], "cost": H100, "cluster": {"units": 2},
        "outcomes": {"kind": "iid", "match_rate": 0.5},
    },
    "skipdecode": {
        "method": [{"name": "skipdecode", "layers": 32, "min_layers": 8, "max_layers": 24, "prompt": 4, "sequence_length": 20}],
        "cost": H100,
    },
    "self_speculative": {
        "method": [{"name": "self_speculative", "layers": 32, "exit_layer": 8, "draft_length": 2}], "outcomes": ACCEPTANCE,
        "cost": H100,
    },
    "early_exit": {
        "method": [{"name": "early_exit", "layers": 32, "measure": "state"}], "cost": H100,
        "outcomes": {"kind": "hazards", "hazards": [0.05] * 31 + [1.0]},
    },
    "pearl": {
        "method": [{"name": "pearl", "layers": 32, "draft_length": 2}], "outcomes": ACCEPTANCE, "cost": DRAFTED_ON_H100,
    },
    "pearl whose drafts are stopped": {
        "method": [{"name": "pearl", "layers": 32, "draft_length": 4, "draft_stop": "rejection"}], "outcomes": ACCEPTANCE,
        "cost": DRAFTED_ON_H100,
    },
    "amusd": {"method": [{"name": "amusd", "layers": 32, "draft_length": 6}], "outcomes": ACCEPTANCE, "cost": DRAFTED_ON_H100},
    "dsi": {
        "method": [{"name": "dsi", "layers": 32, "lookahead": 2, "verifiers": 2}], "outcomes": ACCEPTANCE, "cost": DRAFTED_ON_H100,
    },
    "ssd": {
        "method": [{"name": "ssd", "layers": 32, "draft_length": 3, "fan_out": 2}],
        "outcomes": {"kind": "ranks", "rank_rates": [0.6, 0.2, 0.1]}, "cost": DRAFTED_ON_H100 | {"link_s": 0.001},
        "sweep": {"method.backup": ["draft", "none"]},
    },
    "autoregressive over a roofline": {
        "method": [{"name": "autoregressive", "layers": 40}],
        "cost": {"kind": "roofline", "device": "h100", "shape": "llama-2-13b"},
    },
    "over two devices": {
        "method": [{"name": "autoregressive"}],
        "cost": {"kind": "roofline", "device": "h100", "shape": "llama-2-13b", "tensor_parallel": 2},
    },
    "over one, two and four devices": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2}], "outcomes": ACCEPTANCE | {"trials": 40},
        "cost": DRAFTED_ON_H100, "sweep": {"cost.tensor_parallel": [1, 2, 3, 4]},
    },
    "a draft on one of five devices": {
        "method": [{"name": "speculative", "layers": 32, "draft_length": 2, "placement": "separate"}], "outcomes": ACCEPTANCE,
        "cost": DRAFTED_ON_H100 | {"tensor_parallel": 4, "link_s": 0.001}, "sweep": {"method.draft_length": [1, 3]},
    },
    "a draft head over several devices": {
        "method": [{"name": "speculative", "draft_length": 2, "drafter": "heads"}], "outcomes": ACCEPTANCE,
        "cost": {"kind": "roofline", "device": "h100", "shape": "llama-3.1-8b", "draft_shape": "eagle3:llama-3.1-8b"},
        "sweep": {"cost.tensor_parallel": [2, 8]},
    },
}  # fmt: skip
COSTS = (
    "cost_ratio", "operations_ratio", "medium_cost_ratio", "final_head", "early_head", "link", "dispatch", "state_check",
    "propagation",
)  # fmt: skip
RATES = (
    "outcomes.acceptance_rate", "outcomes.fallback_rate", "outcomes.rollback_rate", "outcomes.match_rate",
    "outcomes.hit_rate", "outcomes.accept.acceptance_rate", "outcomes.medium_accept.acceptance_rate", "outcomes.trials",
)  # fmt: skip
BAD: tuple[Any, ...] = (-0.5, 1e-14, 1.5, 1e10, math.nan, math.inf, "x", True, 10**30)


@contextmanager
def one_by_one() -> Iterator[None]:
    """Resolve every part alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point_blocks, "_number_axes", lambda grid: ({}, {}))
        yield


@st.composite
def axes(draw: st.DrawFn) -> Any:
    kind = draw(st.sampled_from(["range", "whole", "list", "list", "bad"]))
    if kind == "range":
        start, stop = draw(st.sampled_from([0, 0.0, 0.25])), draw(st.sampled_from([1, 0.75, 1.5]))
        return {"from": start, "to": stop, "count": draw(st.integers(1, 9))}
    if kind == "whole":
        return draw(st.lists(st.integers(0, 2), min_size=1, max_size=7))
    values = draw(st.lists(st.floats(0, 1) | st.sampled_from([0, 1, 0.5]), min_size=1, max_size=9))
    if kind == "bad":
        for value in draw(st.lists(st.sampled_from(BAD), min_size=1, max_size=2)):
            values.insert(draw(st.integers(0, len(values))), value)
    return values


@st.composite
def lengths(draw: st.DrawFn) -> Any:
    """Numbers of tokens, some of them invalid."""
    values: list[Any] = draw(st.lists(st.integers(1, 24), min_size=1, max_size=8))
    if draw(st.booleans()):
        values.insert(draw(st.integers(0, len(values))), draw(st.sampled_from([0, -1, 2.5, True, "x", 10**9, 10**30])))
    return values


@st.composite
def grids(draw: st.DrawFn) -> dict[str, Any]:
    tables = SCENARIOS[draw(st.sampled_from([*SCENARIOS]))]
    costs = [f"cost.{name}" for name in COSTS]
    names = draw(st.lists(st.sampled_from([*costs, *RATES * 2, *[TOKENS] * 6]), min_size=1, max_size=2, unique=True))
    sweep = tables.get("sweep", {}) | {name: draw(lengths() if name == TOKENS else axes()) for name in names}
    return {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **tables, "sweep": sweep}


def frame_of(tables: dict[str, Any]) -> pl.DataFrame:
    grid = Grid(tables, check=False)
    return formula_view.frame(grid, 0, grid.points)


def assert_same(found: pl.DataFrame, expected: pl.DataFrame) -> None:
    """Equal columns and values; estimates up to rounding, and variances within roundings of the squared time."""
    assert found.schema == expected.schema
    deviation = [name for name in found.columns if name.startswith("latency_sd")]
    assert_frame_equal(found.drop(deviation), expected.drop(deviation), rel_tol=1e-12, abs_tol=1e-14)
    for name in deviation:
        one, other = (frame[name].cast(pl.Float64).to_numpy() for frame in (found, expected))
        time = expected[name.replace("latency_sd", "latency")].cast(pl.Float64).to_numpy()
        assert (np.isnan(one) == np.isnan(other)).all()
        known = ~np.isnan(other)
        assert (np.abs(one**2 - other**2)[known] <= 8 * np.finfo(float).eps * time[known] ** 2).all()


@given(grids(), st.sampled_from([0, 4]))
@settings(max_examples=examples(150, 2000), deadline=None)
def test_rows_and_errors_are_those_of_single_points(tables: dict[str, Any], few: int) -> None:
    """All columns, their order and types; estimates up to rounding. Each invalid value fails at its points, with the same text."""
    try:
        Grid(tables, check=False)
    except ParameterError:  # an axis of one range that is out of bounds, or a path that no method has
        return
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(point_blocks, "FEW", few)
        together = frame_of(tables)
    with one_by_one():
        alone = frame_of(tables)
    assert_same(together, alone)


FIXED = [0.5, 0.125, 1.5, 0.0, 1.0, 0.25, -0.5, 0.75, 1e-14, 0.375]
"""Values of an axis, some of them invalid: as a rate, as a time, or as the ratio of a medium model."""


LENGTHS = [6, 1, 30, 2, 0, 9, 3, 6, 16, 5]
"""Numbers of tokens, one of them invalid and one longer than the schedule of SkipDecode."""


@pytest.mark.parametrize("name", SCENARIOS)
def test_each_axis_of_each_scenario_as_an_array(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of a part of the points, which uses a part of each group, and of two costs at once."""
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **SCENARIOS[name]}
    sweeps: list[dict[str, Any]] = [{path: FIXED} for path in (*[f"cost.{cost}" for cost in COSTS], *RATES)]
    sweeps += [{"cost.link": [0.0, 3.0, 0.5, 4.0, 1.0, 2.5]}, {"cost.cost_ratio": FIXED, "cost.link": [0.0, 0.25, 2.0]}]
    sweeps += [{"cost.dispatch": FIXED, "cost.cost_ratio": [0.1, 0.5, 0.9]}]
    sweeps += [{TOKENS: LENGTHS, "outcomes.match_rate": FIXED}]
    sweeps += [{TOKENS: LENGTHS}, {TOKENS: LENGTHS, "cost.cost_ratio": FIXED}, {"cost.final_head": FIXED, TOKENS: LENGTHS}]
    monkeypatch.setattr(point_blocks, "FEW", 0)
    monkeypatch.setattr(work_columns, "_CELLS", 60)  # several blocks of laws
    compared = 0
    for sweep in sweeps:
        swept = tables | {"sweep": tables.get("sweep", {}) | sweep}
        try:
            grid = Grid(swept, check=False)
        except ParameterError:  # a path that no method has
            continue
        bounds = [(0, grid.points), (3, grid.points - 2)]
        together = [formula_view.frame(grid, *each) for each in bounds]
        with one_by_one():
            alone = [formula_view.frame(Grid(swept, check=False), *each) for each in bounds]
        for one, other in zip(together, alone, strict=True):
            assert_same(one, other)
        compared += 1
    assert compared > 2


def test_work_is_known_for_some_forms_only() -> None:
    """Where the theory has no work of the passes its columns are empty, also next to points where it has."""
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **SCENARIOS["ppd of a shape"]}
    found = frame_of(tables | {"sweep": {"method.form": ["literal", "eager"], TOKENS: [*range(5, 12)]}})
    known = pl.col("form") == "literal"
    assert found.filter(known)["flops_per_token"].is_finite().all()
    assert found.filter(~known)["flops_per_token"].is_null().all()
    assert found["form"].value_counts()["count"].to_list() == [7, 7]


@pytest.mark.parametrize("swept", ["method.layers", "method.draft_length"])
def test_groups_whose_costs_differ_share_nothing(swept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other layers at the same values, and other values of the same layers, in blocks that cut off as many at each end."""
    monkeypatch.setattr(point_blocks, "FEW", 0)
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **SCENARIOS["a batch kept full"]}
    tables |= {"sweep": {swept: [3, 5], "cost.final_head": [0.0, 0.25, 0.0, 1.0, 2.0, 4.0]}}
    for first, last in ((0, 12), (2, 10)):
        together = formula_view.frame(Grid(tables), first, last)
        with one_by_one():
            assert_same(together, formula_view.frame(Grid(tables), first, last))


def test_busy_time_of_many_points_leaves_transfers_out() -> None:
    """Above a number of points one evaluation gives both times, but only where nothing but passes takes time."""
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **SCENARIOS["speculative on two units"]}
    tables |= {"cluster": {}, "cost": {"cost_ratio": 0.2, "operations_ratio": 0.1, "link": 0.5}}
    count = formula_view.MANY_POINTS + 1
    many = frame_of(tables | {"sweep": {"cost.cost_ratio": {"from": 0.25, "to": 1.0, "count": count}}})
    few = frame_of(tables | {"sweep": {"cost.cost_ratio": [0.25, 1.0]}})
    assert_same(many[[0, -1]].drop("point"), few.drop("point"))


def test_records_of_equal_tables_name_their_sections() -> None:
    grid = Grid({"scenario": {"name": "x", "tokens": 6}, **SCENARIOS["pearl"]})
    assert grid.record(Cost, {"final_head": 1.0}, "cost") is grid.record(Cost, {"final_head": 1.0}, "cost")
    for section in ("cost", "method.cost"):
        with pytest.raises(ParameterError, match=rf"^{section}: final_head must be"):
            grid.record(Cost, {"final_head": -1.0}, section)


LISTED = {
    "acceptance by draft position": (
        {"method": [{"name": "speculative", "layers": 6, "draft_length": 2}], "cost": DRAFTING,
         "outcomes": {"kind": "by-draft-position", "acceptance_rates": [0.5, 0.5]}, "sweep": {"method.draft_length": [1, 2, 3]}},
        "outcomes.acceptance_rates",
        [[0.5, 0.25], [1, 0], [0.75, 1.5], [0.125, 1.0], [-0.5, 0.5], [0.0, math.nan], [0.875, 0.375]],
    ),
    "hazards": (
        {"method": [{"name": "early_exit", "layers": 3}], "outcomes": {"kind": "hazards", "hazards": [0.0, 0.5, 1.0]},
         "cost": {"early_head": 0.1}, "sweep": {"method.first_check": [1, 2]}},
        "outcomes.hazards",
        [[0.0, 0.5, 1.0], [0.0, 0.25, 0.5], [0.5, 0.5, 1.0], [0, 1, 1], [0.0, 0.0, 0.0], [0.0, 2.0, 1.0]],
    ),
    "lists of several lengths": (
        {"method": [{"name": "speculative", "layers": 6, "draft_length": 2}], "cost": DRAFTING,
         "outcomes": {"kind": "by-draft-position", "acceptance_rates": [0.5, 0.5]}},
        "outcomes.acceptance_rates", [[0.5, 0.25], [0.5], [0.75, 0.5, 0.25], 0.5, []],
    ),
    "lists of several lengths alone": (
        {"method": [{"name": "speculative", "layers": 6, "draft_length": 2}], "cost": DRAFTING,
         "outcomes": {"kind": "by-draft-position", "acceptance_rates": [0.5, 0.5]}},
        "outcomes.acceptance_rates", [[0.5, 0.25], [0.5], [0.75, 0.5, 0.25]],
    ),
    "lists in place of a rate": (
        {"method": [{"name": "speculative", "layers": 6, "draft_length": 2}], "cost": DRAFTING, "outcomes": ACCEPTANCE},
        "outcomes.acceptance_rate", [[0.5], [0.25]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LISTED)
@pytest.mark.parametrize("few", [0, 4])
def test_axis_of_lists_as_an_array(name: str, few: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With costs that vary, too; each invalid list fails at its points, with the same text."""
    monkeypatch.setattr(point_blocks, "FEW", few)
    tables, path, values = LISTED[name]
    sweep = {**tables.get("sweep", {}), path: values, "cost.final_head": [0.0, 0.5]}
    swept = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **tables, "sweep": sweep}
    together = frame_of(swept)
    with one_by_one():
        assert_same(together, frame_of(swept))


def test_lists_are_made_together(monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.scenarios.outcomes.exit_outcomes import ExitHazards

    made: list[Any] = []
    alone = ExitHazards.outcome
    monkeypatch.setattr(ExitHazards, "outcome", lambda *args: made.append(args) or alone(*args))
    tables, path, _ = LISTED["hazards"]
    values = [[0.0, each / 128, 1.0] for each in range(100)]
    swept = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **tables, "sweep": {path: values}}
    assert frame_of(swept).height == 100
    assert len(made) == 1


@pytest.mark.parametrize("place", range(3))
@pytest.mark.parametrize("bad", [1.5, -0.25, math.nan])
def test_bad_number_in_a_long_axis_of_lists_is_refused_before_a_run(place: int, bad: float) -> None:
    tables, path, _ = LISTED["hazards"]
    values = [[0.0, 0.25 + each / 1024, 1.0] for each in range(100)]
    values[40][place] = bad
    with pytest.raises(ParameterError, match=r"hazards\[" + str(place)):
        Grid({"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **tables, "sweep": {path: values}})


@pytest.mark.parametrize("axis", [{"from": -0.25, "to": 1.0, "count": 9}, {"from": 0.25, "to": 1.25, "count": 600}])
def test_end_of_a_range_that_is_invalid_is_refused_before_a_run(axis: dict[str, Any]) -> None:
    scenario = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **SCENARIOS["pearl"]}
    with pytest.raises(ParameterError, match="acceptance_rate must be between 0 and 1"):
        Grid({**scenario, "sweep": {"outcomes.acceptance_rate": axis}})


@pytest.mark.parametrize("lengths", [[1, 2, 3, 4], [4, 3, 2, 1]])
def test_value_of_a_small_grid_is_refused_only_if_it_is_invalid_with_all_others(lengths: list[int]) -> None:
    """Lists of two rates hold for drafts of one and two tokens, of three only one of the lists."""
    tables, path, _ = LISTED["acceptance by draft position"]
    sweep = {"method.draft_length": lengths, path: [[0.5, 0.25], [0.75, 0.5], [0.5, 0.25, 0.125]]}
    scenario = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **tables}
    with pytest.raises(ParameterError, match="one rate for each of 4 drafted tokens, got 2"):
        Grid({**scenario, "sweep": sweep})
    assert Grid({**scenario, "sweep": sweep | {"method.draft_length": [each for each in lengths if each < 4]}}).points == 9


SECONDS = [0.001, 0.0, 0.01, -1.0, 0.002, 1e7, 0.0, 0.005, 0.25]
HARDWARE_AXES: dict[str, dict[str, Any]] = {
    "prompts": {"cost.prompt": [100, 7, 0, 2048, -1, 131, 900_000, 513, 100_000_000, 9000]},
    "a range of prompts": {"cost.prompt": {"from": 16, "to": 36, "count": 11}},
    "prompts that are no whole numbers": {"cost.prompt": {"from": 16, "to": 36.5, "count": 6}},
    "engine steps": {"cost.step_s": SECONDS},
    "draft steps": {"cost.draft_step_s": SECONDS},
    "links": {"cost.link_s": SECONDS},
    "dispatches": {"cost.dispatch_s": SECONDS},
    "comparisons of states": {"cost.state_check_s": SECONDS},
    "rates and prompts": {"outcomes.acceptance_rate": [0.25, 0.75], "cost.prompt": [9, 700, 64, 128, 256, 32]},
    "two costs": {"cost.prompt": [9, 700, 64], "cost.step_s": [0.0, 0.001, 0.5, 0.25]},
    "tokens": {"scenario.tokens": LENGTHS},
    "tokens and prompts": {"scenario.tokens": LENGTHS, "cost.prompt": [9, 400_000, -1, 604_300]},
    "tokens and engine steps": {"scenario.tokens": LENGTHS, "cost.step_s": [0.0, 0.001, 0.25]},
    "tokens and links": {"scenario.tokens": LENGTHS, "cost.link_s": [0.0, 0.001, 0.25]},
    "tokens and rates": {"scenario.tokens": LENGTHS, "outcomes.acceptance_rate": [0.0, 0.75, 1.0]},
}  # fmt: skip


@pytest.mark.parametrize("name", ON_HARDWARE)
@pytest.mark.parametrize("swept", HARDWARE_AXES)
def test_axes_on_hardware_as_arrays(name: str, swept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **ON_HARDWARE[name]}
    tables |= {"sweep": tables.get("sweep", {}) | HARDWARE_AXES[swept]}
    try:
        grid = Grid(tables, check=False)
    except ParameterError:  # a path that no method has
        return
    monkeypatch.setattr(point_blocks, "FEW", 0)
    together = formula_view.frame(grid, 1, grid.points)
    with one_by_one():
        alone = formula_view.frame(Grid(tables, check=False), 1, grid.points)
    assert_same(together, alone)


@pytest.mark.parametrize("name", ["pearl", "pearl whose drafts are stopped", "amusd", "dsi", "ssd"])
def test_work_that_depends_on_times_is_that_of_each_point(name: str) -> None:
    """Slower drafts begin fewer passes until a rejection stops them."""
    tables = {"scenario": {"name": "x", "tokens": 20, "views": ["formula"]}, **ON_HARDWARE[name]}
    grid = Grid(tables | {"sweep": {"cost.draft_step_s": [0.0, 0.002, 0.0, 0.02]}})
    together = formula_view.frame(grid, 0, grid.points)
    assert_same(together, pl.concat([formula_view.frame(grid, at, at + 1) for at in range(grid.points)]))
    assert (together["flops_per_token"].n_unique() == 1) == (name == "pearl")


def test_prompts_fit_one_device_as_they_do_alone() -> None:
    """Weights of 16 GB and 128 kB of cache for each position: three prompts fit 80 GB, and a fourth fits two devices only."""
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **ON_HARDWARE["speculative"]}
    tables |= {"sweep": {"cost.tensor_parallel": [1, 2], "cost.prompt": [16, 4096, 400_000, 600_000, 2_000_000]}}
    found = frame_of(tables)
    assert found.filter(pl.col("error").is_not_null())["point"].to_list() == [3, 4, 9]
    fits = found.filter(pl.col("tensor_parallel") == 2)["speedup_over_one_device"].is_not_nan()
    assert fits.to_list() == [True, True, True, False]


NEEDS: dict[str, tuple[str, dict[str, list[Any]]]] = {
    "tokens": ("speculative", {"scenario.tokens": [3, 60]}),
    "sequences of batches of each kind": (
        "speculative", {"method.sequences": [1, 3], "method.batching": ["continuous", "static", "lockstep"]},
    ),
    "placement, and units for it": (
        "on two units", {"method.placement": ["same", "separate"], "cluster.units": [1, 2], "cost.tensor_parallel": [1, 2]},
    ),
    "layer whose state is sent": ("ppd", {"method.exit_layer": [8, 24], "method.candidates": [1, 2]}),
    "context budget": ("a draft that reads less", {"method.context_budget": [2, 6], "cost.prompt": [4, 9000]}),
    "layers": ("speculative", {"method.layers": [32, 40]}),
    "shapes of equal depth": (
        "autoregressive over a roofline", {"method.layers": [32], "cost.shape": ["llama-3.1-8b", "llama-2-7b"]},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", NEEDS)
def test_methods_share_costs_on_hardware_only_if_they_need_the_same(name: str) -> None:
    """Points of a grid are those of scenarios of one point, which share nothing."""
    scenario, sweep = NEEDS[name]
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **ON_HARDWARE[scenario]}
    grid = Grid(tables | {"sweep": sweep}, check=False)
    for row in formula_view.frame(grid, 0, grid.points).rows(named=True):
        alone = frame_of(dict(grid.tables_at(grid.indices(row["point"])))).row(0, named=True)
        for column in {*alone} - {"point"}:
            if not column.startswith("latency_sd"):
                same = pytest.approx(alone[column], rel=1e-12, nan_ok=True) if isinstance(alone[column], float) else alone[column]
                assert row[column] == same, column


def test_costs_on_hardware_are_made_once_for_all_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    from sim.scenarios import hardware_cost

    right, made = hardware_cost._point_costs, []
    monkeypatch.setattr(hardware_cost, "_point_costs", lambda *args: made.append(args) or right(*args))
    sweep = {"method.draft_length": [1, 2, 3, 4], "cost.tensor_parallel": [1, 2], "cost.prompt": [*range(20)]}
    found = frame_of({"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE["speculative"], "sweep": sweep})
    assert (found.height, len(made)) == (160, 2)


def test_straggler_losses_of_many_points_are_those_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Points share costs, in any order of the axes, and are computed in blocks."""
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **ON_HARDWARE["static batches"]}
    for sweep in HARDWARE_AXES["rates and prompts"], dict(reversed(HARDWARE_AXES["rates and prompts"].items())):
        alone = frame_of(tables | {"sweep": sweep})
        with monkeypatch.context() as patch:
            patch.setattr(formula_view, "MANY_POINTS", 5)
            assert_same(frame_of(tables | {"sweep": sweep}), alone)
        assert alone["straggler_loss"].n_unique() == alone.height



@pytest.mark.parametrize(("name", "rate"), [("speculative", "acceptance_rate"), ("ngram with trials, kept full", "hit_rate")])
@pytest.mark.parametrize("size", [1, 6])
def test_bounds_are_those_at_the_ends_of_the_rates(name: str, rate: str, size: int) -> None:
    """Of a single point, and of an axis."""
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **SCENARIOS[name]}
    swept = {f"outcomes.{rate}": np.linspace(0.25, 0.75, size).tolist()}
    found = frame_of(tables | {"outcomes": tables["outcomes"] | {"trials": 50}, "sweep": swept})
    for end in ("low", "high"):
        exact = {key: value for key, value in tables["outcomes"].items() if key != "trials"}
        ends = found[f"{rate}_{end}"].to_list()
        alone = [frame_of(tables | {"outcomes": exact | {rate: each}, "sweep": {}})["speedup"][0] for each in ends]
        assert found[f"speedup_input_{end}"].to_list() == pytest.approx(alone, rel=1e-12)


def test_bounds_on_hardware_have_the_worse_rate_at_the_slower_costs() -> None:
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **ON_HARDWARE["speculative"]}
    found, grid = frame_of(tables), Grid(tables)
    for point in range(grid.points):
        case = grid.case(point)
        outcome, hardware = case.outcome, case.hardware
        assert outcome is not None
        assert hardware is not None
        slow, fast = hardware.ends
        predict = registry.method("speculative").predict
        for end, law, cost in (("low", outcome.low, slow), ("high", outcome.high, fast)):
            alone = predict(case.parameters, 6, law, cost)
            assert found[f"speedup_input_{end}"][point] == pytest.approx(float(alone.plain_latency / alone.latency), rel=1e-12)


@pytest.mark.parametrize("devices", [[1], [1, 4]])
def test_many_points_on_hardware_as_arrays(devices: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough points that times of passes are not evaluated twice; busy time is still that of few points."""
    swept = {"sweep": {"cost.prompt": [*range(5, 25)], "cost.tensor_parallel": devices}}
    tables = {"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE["speculative"], **swept}
    few = frame_of(tables)
    monkeypatch.setattr(formula_view, "MANY_POINTS", 9)
    assert_same(frame_of(tables), few)
    tables = {"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE["speculative"], **swept}
    together = frame_of(tables)
    with one_by_one():
        assert_same(together, frame_of(tables))


def test_sources_of_times_do_not_depend_on_prompts_and_times() -> None:
    """All prompts are listed; an axis is not followed value by value."""
    tables = {"scenario": {"name": "x", "tokens": 4}, **ON_HARDWARE["speculative"], "sweep": {}}
    alone = scenario_file.cost_sources(tables)
    swept = tables | {"sweep": {"cost.prompt": [-1, 7, 9], "cost.step_s": [0.0, 0.001, -1.0]}}
    assert scenario_file.cost_sources(swept) == alone
    assert scenario_file.cost_source(swept).endswith("; prompt 7, 9, tensor_parallel 1")


@pytest.mark.parametrize("swept", ["cost.prompt", "cost.link_s", "cost.step_s"])
def test_costs_with_another_demand_are_resolved_alone(swept: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a slow link the main process of PPD ends before its candidates arrive, and fewer units are needed at once."""
    resolved: list[Any] = []
    alone = cases.resolve_but_outcomes
    monkeypatch.setattr(cases, "resolve_but_outcomes", lambda *args: resolved.append(args) or alone(*args))
    values = {"cost.prompt": [*range(5, 25)], "cost.link_s": [1e-5, 2e-5, 3e-5, 1.0, 2.0, 4e-5], "cost.step_s": [0.001, 0.002] * 4}
    tables = {"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE["ppd"]}
    tables |= {"cluster": {"units": 2}, "cost": {**H100, "link_s": 1e-5, "step_s": 0.001}}
    tables |= {"sweep": {"method.exit_layer": [16, 24], swept: values[swept]}}
    together = frame_of(tables)
    assert len(resolved) == 2 * (3 if swept == "cost.link_s" else 1)
    with one_by_one():
        assert_same(together, frame_of(tables))
    waits = together["no_value_because"].is_not_null()
    assert waits.all() if swept != "cost.link_s" else waits.to_list() == [True, True, True, False, False, True] * 2


def test_tokens_and_links_with_another_demand() -> None:
    """A slow link leaves a unit free, at any number of tokens: its points have values, and the others wait."""
    tables = {"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE["ppd"]}
    tables |= {"cluster": {"units": 2}, "cost": {**H100, "link_s": 1e-5}}
    tables |= {"sweep": {"scenario.tokens": [1, 2, 3, 4, 5, 6], "cost.link_s": [1e-5, 2e-5, 1.0]}}
    together = frame_of(tables)
    with one_by_one():
        assert_same(together, frame_of(tables))
    assert 0 < together["no_value_because"].null_count() < together.height


def test_tokens_on_hardware_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those of a method that may wait for units."""
    right, made = cases.resolve_but_outcomes, []
    monkeypatch.setattr(cases, "resolve_but_outcomes", lambda *args: made.append(args) or right(*args))
    swept = {"scenario.tokens": [*range(1, 21)], "cost.prompt": [*range(7)]}
    for name, groups in {"speculative": 2, "a batch kept full": 2, "ppd": 1, "skipdecode": 1, "tree": 1}.items():
        made.clear()
        tables = {"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE[name]}
        sizes = {"scenario.tokens": [*range(1, 17)]} if name == "skipdecode" else {}
        found = frame_of(tables | {"sweep": tables.get("sweep", {}) | swept | sizes})
        assert (found.height, len(made)) == (groups * 7 * (16 if sizes else 20), groups), name


@contextmanager
def resolutions() -> Iterator[list[Any]]:
    """List that gets an entry for each case that is resolved."""
    right, made = cases.resolve_but_outcomes, list[Any]()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cases, "resolve_but_outcomes", lambda *args: made.append(args) or right(*args))
        yield made


@pytest.mark.parametrize("name", [name for name in ON_HARDWARE if "less" in name])
def test_budgets_are_resolved_once_but_where_they_are_refused(name: str) -> None:
    """A budget is refused if the context is shorter, at some pairs of prompt and tokens: each of these is resolved alone."""
    tables = {"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE[name]}
    path, values = next(iter(tables.get("sweep", {"": [None]}).items()))
    methods = [{**tables["method"][0], path.removeprefix("method."): value} for value in values]
    largest = [max(method["context_budget"], method.get("medium_context_budget", 0)) for method in methods]
    sweep = tables.get("sweep", {}) | {"scenario.tokens": [*range(32, 0, -1)], "cost.prompt": [*range(7, -1, -1)]}
    with resolutions() as made:
        found = frame_of(tables | {"sweep": sweep})
    refused = sum(prompt + tokens < budget for tokens in range(1, 33) for prompt in range(8) for budget in largest)
    assert found["error"].is_not_null().sum() == refused > 0
    assert len(made) == len(largest) + refused


@pytest.mark.parametrize("tokens", [[4], [2, 3, 4, 5, 6, 7]])
def test_budgets_without_effect_are_refused_as_they_are_alone(tokens: list[int]) -> None:
    """Steps of this engine take the same time with any context, so that a budget is valid only if it is the whole context."""
    tables = {"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, "outcomes": ACCEPTANCE}
    tables["method"] = [{"name": "self_speculative", "draft_length": 2, "exit_layer": 94, "reuse": False, "context_budget": 20}]
    tables["cost"] = {"kind": "engine", "law": "sglang-qwen3-235b-a22b"}
    tables |= {"sweep": {"scenario.tokens": tokens, "cost.prompt": [20 - tokens[0], 17, 18, 15, 14, 13, 12, 100]}}
    with resolutions() as made:
        together = frame_of(tables)
    with one_by_one():
        assert_same(together, frame_of(tables))
    refused = together["error"].is_not_null()
    assert refused.sum() == together.height - len(tokens)
    assert together.filter(refused)["error"].str.contains("must make a pass of the target shorter|must be at most").all()
    assert len(made) == 1 + refused.sum()


def test_prompts_and_steps_are_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of one of them with zeros, which is resolved for zeros and for other values."""
    right, made = cases.resolve_but_outcomes, []
    monkeypatch.setattr(cases, "resolve_but_outcomes", lambda *args: made.append(args) or right(*args))
    swept = {"sweep": {"cost.prompt": [*range(20)], "cost.step_s": [0.0, 0.001, 0.002, 0.0, 0.003]}}
    found = frame_of({"scenario": {"name": "x", "tokens": 4, "views": ["formula"]}, **ON_HARDWARE["speculative"], **swept})
    assert (found.height, len(made)) == (100, 2)


def test_scenarios_are_valid_and_some_are_made_as_arrays() -> None:
    """The examples above compare arrays, not only points that are resolved alone."""
    made = []
    for name, tables in SCENARIOS.items():
        for path in ("cost.final_head", "outcomes.acceptance_rate", "outcomes.fallback_rate", "outcomes.match_rate"):
            swept = {path: {"from": 0.125, "to": 0.875, "count": 9}}
            grid = Grid({"scenario": {"name": "x", "tokens": 6}, **tables, "sweep": swept}, check=False)
            points, failures = point_blocks.of_grid(grid, 0, grid.points)
            few = len(points.choices.groups) < 9 > len(points.outcomes.groups)
            made += [(name, path.partition(".")[0])] * (few and not failures)
    by_section = {section: {name for name, of in made if of == section} for section in ("cost", "outcomes")}
    # The policy "optimum" decides by costs, a full batch scales them, published ones follow from a table, a curve is too short.
    narrow = "dsi, by width"
    assert {*SCENARIOS} - by_section["cost"] == {"adaptive", "a batch kept full, by width", "published costs", narrow}
    schedules = {name for name in SCENARIOS if name.startswith(("skipdecode", "early_exit"))}
    without_this_rate = {*schedules, "hierarchical", "rates by position", narrow}
    assert {*SCENARIOS} - by_section["outcomes"] == without_this_rate


def test_bad_value_in_the_middle_of_a_long_axis_fails_at_its_point(tmp_path: Path) -> None:
    values = [*np.linspace(0, 1, 700).tolist()]
    values[123], values[456] = 1e-14, "x"  # type: ignore[call-overload]
    tables = {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, **SCENARIOS["skipdecode"]}
    grid = Grid(tables | {"sweep": {"cost.final_head": values[:456] + values[457:]}})
    failed = formula_view.frame(grid, 0, grid.points).filter(pl.col("error").is_not_null())
    assert failed["point"].to_list() == [123]
    with pytest.raises(ParameterError) as error:
        Grid(tables | {"cost": {"final_head": 1e-14}})
    assert failed["error"][0] == str(error.value)
    values[123] = 0.25
    with pytest.raises(ParameterError, match="final_head must be a number, got 'x'"):
        Grid(tables | {"sweep": {"cost.final_head": values}})


def test_a_long_axis_is_resolved_once(monkeypatch: pytest.MonkeyPatch) -> None:
    right, made = cases.resolve_but_outcomes, []

    def resolve(*args: Any) -> Any:
        made.append(args)
        return right(*args)

    monkeypatch.setattr(cases, "resolve_but_outcomes", resolve)
    costs, rates = {"from": 0.1, "to": 0.9, "count": 500}, {"from": 0.0, "to": 1.0, "count": 50}
    sweep = {"cost.cost_ratio": costs, "outcomes.acceptance_rate": rates}
    tables = SCENARIOS["speculative"] | {"scenario": {"name": "x", "tokens": 6}, "sweep": sweep}
    grid = Grid(tables, check=False)
    found = formula_view.frame(grid, 0, grid.points)
    assert (found.height, len(made)) == (25_000, 1)


@pytest.mark.slow
def test_results_do_not_depend_on_workers(tmp_path: Path) -> None:
    ratios = {"from": 0.0, "to": 0.9, "count": 9001}
    values = {"cost.cost_ratio": ratios, "outcomes.acceptance_rate": [0.1, 0.5, 0.7, 0.9, 0.95, 1.0]}
    tables = SCENARIOS["speculative"] | {"scenario": {"name": "x", "tokens": 6, "views": ["formula"]}, "sweep": values}
    for jobs in (1, 2):
        sim.run(tables, out=tmp_path / str(jobs), jobs=jobs)
    one, two = ((tmp_path / each / "results.parquet").read_bytes() for each in ("1", "2"))
    assert one == two


# --- Parts ---------------------------------------------------------------------------------------------------------------


NUMBERS = tuple(field.name for field in fields(UnitCost) if field.name in (*cases.VARIED, "draft_devices"))


@st.composite
def varied_costs(draw: st.DrawFn) -> VariedCosts:
    curve = draw(st.sampled_from([None, ((1, 1.0), (64, 3.0))]))
    times = draw(st.sampled_from([None, (0.5, 1.0, 2.0, 0.25)]))
    first = UnitCost(4, cost_ratio=draw(st.floats(0, 2)), final_head=draw(st.floats(0, 2)), verify_cost=curve, layer_times=times)
    names, size = draw(st.lists(st.sampled_from(NUMBERS), min_size=1, max_size=4, unique=True)), draw(st.integers(1, 4))
    return VariedCosts(first, {name: np.array(draw(st.lists(st.floats(0, 3), min_size=size, max_size=size))) for name in names})


def test_single_costs_are_the_first_with_its_numbers() -> None:
    first = UnitCost(4, cost_ratio=0.5, layer_times=(1.0, 2.0, 1.0, 1.0))
    costs = VariedCosts(first, {"link": np.array([0.0, 2.0]), "final_head": np.array([1.0, 0.5])})
    assert [*costs] == [replace(first, link=0.0, final_head=1.0), replace(first, link=2.0, final_head=0.5)]
    assert [*costs[1:]] == [costs[1]] == [*costs.at(np.array([1]))]
    assert costs[1].target_pass == 5.5  # no property of the first is kept


@given(varied_costs())
@settings(deadline=None)
def test_arrays_of_costs_are_those_of_each(costs: VariedCosts) -> None:
    shapes = (
        PassShape(LayerSpan(0, 4), heads=1), PassShape(ALL_LAYERS, "draft", heads=1), PassShape(LayerSpan(1, 3), width=2),
        PassShape(LayerSpan(1, 4, kv_only=True), sequences=np.array([1, 3])), PassShape(LayerSpan(0, 2), heads=1, compared=True),
    )  # fmt: skip
    reduced = UnitCosts([each.passes_only() for each in costs])
    for one, other in ((joined(costs), UnitCosts([*costs])), (joined(costs.passes_only()), reduced)):
        for shape in shapes:
            np.testing.assert_array_equal(one.times(shape), other.times(shape))
        np.testing.assert_array_equal(one.plain_time(5), other.plain_time(5))
        np.testing.assert_array_equal(one.draft_devices, other.draft_devices)
        np.testing.assert_array_equal(one.link, other.link)
        np.testing.assert_array_equal(one.operations("draft"), other.operations("draft"))


@given(st.sampled_from(cases.VARIED), st.floats() | st.sampled_from([0.0, 1.0, 1e-12, 9e-13, 1e9, 1.1e9, -0.0]), st.booleans())
def test_values_allowed_in_an_array_are_those_allowed_alone(name: str, value: float, slow: bool) -> None:
    record = Cost(allow_slow_medium=slow)
    try:
        replace(record, **{name: value})
        valid = True
    except ParameterError:
        valid = False
    assert record.allowed(name, np.array([0.5, value])).tolist() == [True, valid]


VALUES: dict[str, tuple[Callable[[UnitCost], Any], set[str]]] = {
    "a number": (lambda cost: cost.link, {"link"}),
    "a ratio": (lambda cost: cost.ratio("draft"), {"cost_ratio"}),
    "overheads of one unit": (lambda cost: cost.has_overheads(1), {"dispatch", "dispatch_per_process"}),
    "a cached property": (lambda cost: cost.target_pass, {"final_head", "link", "dispatch"}),
    "a changed copy": (lambda cost: cost.passes_only().cost_ratio, {"cost_ratio", "link"}),
    "a comparison": (lambda cost: cost == UnitCost(4, cost_ratio=0.5, final_head=1.0), {"cost_ratio", "early_head"}),
    "a replaced number": (lambda cost: replace(cost, link=1.0).early_head, {"early_head", "cost_ratio"}),
    "its dictionary": (lambda cost: vars(cost)["early_head"], {"early_head", "link"}),
    "nothing": (lambda cost: cost.layers, set()),
}


@pytest.mark.parametrize("name", VALUES)
def test_what_a_value_reads_is_noticed(name: str) -> None:
    value, reads = VALUES[name]
    cost = UnitCost(4, cost_ratio=0.5, final_head=1.0)
    assert cost.target_pass == 5.0  # cached properties must not hide what is read
    for number in reads:
        assert watched_costs.evaluated(cost, [number], value) == (value(cost), True)
    assert watched_costs.evaluated(UnitCost(4, cost_ratio=0.5), ["cost_ratio"], lambda cost: cost.plain) == (True, False)
    if not reads:
        assert watched_costs.evaluated(cost, cases.VARIED, value) == (value(cost), False)


@given(varied_costs(), st.data())
@settings(deadline=None)
def test_values_of_choices_are_those_of_each(costs: VariedCosts, data: st.DataObject) -> None:
    kind = registry.parameters("speculative")
    groups = [ChoiceGroup(kind(layers=4, draft_length=2), 7, costs), ChoiceGroup(kind(layers=4, draft_length=3), 9, [costs.first])]
    choices: GroupedChoices[Any] = GroupedChoices(groups)
    choice = np.array(data.draw(st.lists(st.integers(0, len(choices) - 1), min_size=1, max_size=9)), dtype=np.intp)
    points = PredictionPoints(choices, [Iid(0.5)], choice, np.zeros(choice.size, dtype=np.intp))
    listed = replace(points, choices=[*choices])
    plain = lambda each: each.parameters.plain_time(each.tokens, each.cost)  # noqa: E731
    for value in (lambda each: each.tokens, lambda each: each.cost.link, plain):
        np.testing.assert_array_equal(points.of_choices(value), listed.of_choices(value))
    together, alone = (registry.method("speculative").predict_points(each) for each in (points, listed))
    for name, values in vars(alone).items():
        np.testing.assert_allclose(getattr(together, name), values, rtol=1e-12, atol=1e-14, err_msg=name)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=5), st.sampled_from([None, 30]))
def test_outcomes_at_several_rates_are_those_of_each(rates: list[float], trials: int | None) -> None:
    from sim.scenarios.outcomes.acceptance_outcomes import IndependentAcceptance
    from sim.scenarios.outcomes.decision_outcomes import DecisionRates

    records: list[Any] = [IndependentAcceptance(0.5, trials=trials), DecisionRates(0.5, 0.25, trials=trials)]
    parameters: Any = registry.parameters("bild")(layers=4)
    for record in records:
        for key in record.RATES:
            several = record.varied({key: np.array(rates)}, record.outcome(parameters, 5), parameters)
            assert isinstance(several, VariedOutcomes)
            for index, rate in enumerate(rates):
                one = replace(record, **{key: rate}).outcome(parameters, 5)
                ours = vars(several.at(np.array([index]))[0]) | vars(several[index])
                for name, value in vars(one).items():
                    if name in ("law", "low", "high") and value is not None:
                        assert type(ours[name]) is type(value)
                        assert vars(ours[name]) == vars(value)
                    else:
                        assert ours[name] == (pytest.approx(value, rel=1e-14) if isinstance(value, float) else value), name


def test_costs_in_another_order() -> None:
    costs = VariedCosts(UnitCost(4), {"link": np.array([0.0, 1.0])})
    assert costs.at(np.array([0, 1])) is costs
    assert costs.at(np.array([1, 0])).numbers["link"].tolist() == [1.0, 0.0]


@given(varied_costs())
def test_distinct_costs_are_those_of_each(costs: VariedCosts) -> None:
    doubled = costs.at(np.tile(np.arange(len(costs)), 2))
    distinct, index = doubled.unique()
    assert len(distinct) <= len(costs)
    assert [distinct[place] for place in index.tolist()] == [*costs, *costs]


def test_columns_of_parts() -> None:
    tables = {"scenario": {"name": "x", "tokens": 6}, **SCENARIOS["speculative"], "sweep": {}}
    case = Grid(tables).case(0)
    assert isinstance(case.cost, UnitCost)
    several = CaseGroup(case, VariedCosts(case.cost, {"cost_ratio": np.array([0.1, 0.2, 0.3])}))
    column: PartColumn[CaseGroup] = PartColumn([CaseGroup(case), several, CaseGroup(case)])
    assert [each.cost.cost_ratio for each in column] == [0.2, 0.1, 0.2, 0.3, 0.2] == [each.cost.cost_ratio for each in column[:]]
    assert [each.cost.cost_ratio for each in column.at(np.array([0, 2, 3]))] == [0.2, 0.2, 0.3]
    with pytest.raises(IndexError):
        column[5]
