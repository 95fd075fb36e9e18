"""Scenarios with a context budget: every kind of costs that knows the context, agreement of the views, and refused budgets."""

from __future__ import annotations

import copy
from typing import Any

import polars as pl
import pytest

import sim
from model.base.checks import ParameterError

OWN = {
    "name": "self_speculative", "layers": 32, "exit_layer": 32, "draft_length": 3, "reuse": False, "context_budget": 256,
    "sequences": 16,
}  # fmt: skip
MODEL = {"name": "speculative", "layers": 32, "draft_length": 3, "context_budget": 256, "sequences": 16}
ROOFLINE = {"kind": "roofline", "device": "a100", "shape": "llama-3.1-8b", "tensor_parallel": 8, "prompt": 8000}
WITH_DRAFT = {**ROOFLINE, "draft_shape": "llama-3.2-1b"}
PROFILE = {
    "kind": "profile", "profile": "h100-llama-3.1-8b", "draft_profile": "h100-operations", "draft_shape": "llama-3.2-1b",
    "prompt": 8000,
}  # fmt: skip


def tables(method: dict[str, Any], cost: dict[str, Any], **more: Any) -> dict[str, Any]:
    return copy.deepcopy({
        "scenario": {"name": "budgets", "tokens": 24, "replications": 256, "event_replications": 4, **more},
        "method": [method], "outcomes": {"kind": "iid", "acceptance_rate": 0.8}, "cost": cost,
    })  # fmt: skip


def speedups(method: dict[str, Any], cost: dict[str, Any], **more: Any) -> float:
    return float(sim.run(tables(method, cost, **more), views=["formula"])["speedup"][0])


@pytest.mark.parametrize("batching", ["continuous", "static", "lockstep"])
@pytest.mark.parametrize(("method", "cost"), [(OWN, ROOFLINE), (MODEL, PROFILE), (MODEL, WITH_DRAFT)])
def test_views_agree_and_reading_less_is_faster_at_equal_acceptance(method: Any, cost: Any, batching: str) -> None:
    if batching == "static" and method is OWN:
        pytest.skip("a model that drafts for itself has no static batches")
    method = {**method, "batching": batching}
    table = sim.run(tables(method, cost))
    by_view = {row["view"]: row for row in table.iter_rows(named=True)}
    assert by_view.keys() == {"formula", "paths", "events"}
    assert by_view["events"]["paths_difference"] < 1e-9 * by_view["events"]["latency_s"]
    assert by_view["paths"]["speedup_low"] - 0.02 < by_view["formula"]["speedup"] < by_view["paths"]["speedup_high"] + 0.02
    more = speedups({**method, "context_budget": 4000}, cost)
    assert more < by_view["formula"]["speedup"]
    if method["name"] == "speculative":
        whole = {name: value for name, value in method.items() if name != "context_budget"}
        assert speedups(whole, cost) < more


def test_a_draft_keeps_only_its_budget_in_memory() -> None:
    shares = [
        sim.run(tables({**MODEL, "context_budget": budget}, WITH_DRAFT), views=["formula"])["memory_share"][0]
        for budget in (256, 8000)
    ]
    assert shares[0] < shares[1]


def test_sweep_over_budgets() -> None:
    found = sim.run({**tables(OWN, ROOFLINE), "sweep": {"method.context_budget": [64, 512, 4096]}}, views=["formula"])
    assert found["context_budget"].to_list() == [64, 512, 4096]
    assert found["speedup"].is_sorted(descending=True)
    assert found.select(pl.col("speedup").n_unique()).item() == 3


@pytest.mark.parametrize(
    ("method", "cost", "words"),
    [
        ({**OWN, "context_budget": 0}, ROOFLINE, "context_budget must be between 1 and 1000000, got 0"),
        ({**OWN, "context_budget": -4}, ROOFLINE, "context_budget must be between 1 and 1000000, got -4"),
        ({**OWN, "context_budget": "256"}, ROOFLINE, "context_budget must be a whole number"),
        ({**OWN, "context_budget": 8025}, ROOFLINE, "context_budget must be at most 8024, .* got 8025; leave it out"),
        ({**OWN, "reuse": True}, ROOFLINE, "reuse must be false with context_budget=256"),
        ({**OWN, "exit_layer": 33}, ROOFLINE, "exit_layer must be between 1 and layers=32, got 33"),
        ({"name": "adaptive", "layers": 32, "max_draft_length": 3, "context_budget": 256}, WITH_DRAFT,
         "unknown key method.context_budget; known: batching"),
        ({**MODEL, "drafter": "heads"}, {**ROOFLINE, "draft_shape": "eagle3:llama-3.1-8b"},
         "context_budget must be left out with drafter='heads', got 256"),
        (MODEL, {"kind": "unit", "cost_ratio": 0.1},
         "context_budget needs costs that know the context, got 256 with cost.kind 'unit'"),
        ({**OWN, "layers": 94, "exit_layer": 94}, {"kind": "engine", "law": "sglang-qwen3-235b-a22b", "prompt": 8000},
         "context_budget must make a pass of the target shorter"),
    ],
)  # fmt: skip
def test_impossible_budgets_are_refused_in_one_line(method: dict[str, Any], cost: dict[str, Any], words: str) -> None:
    with pytest.raises(ParameterError, match=words) as refused:
        sim.run(tables(method, cost), views=["formula"])
    assert "\n" not in str(refused.value)
