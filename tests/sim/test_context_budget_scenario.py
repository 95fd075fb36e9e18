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


RATES = {"kind": "iid", "acceptance_rate": 0.8}
RANKS = {"kind": "ranks", "rank_rates": [0.7, 0.1, 0.05]}
TREE = {"kind": "by-depth", "rank_rates": [[0.7, 0.1], [0.7, 0.1]]}
THREE = {"accept": RATES, "medium_accept": RATES}
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "adaptive": ({"policy": "heuristic", "max_draft_length": 4}, RATES),
    "adaptive, by costs": ({"policy": "optimum", "max_draft_length": 4}, RATES),
    "hierarchical": ({"draft_length": 3}, THREE),
    "hierarchical, recursive": ({"draft_length": 4, "reading": "recursive", "inner_draft_length": 2}, THREE),
    "pearl": ({"draft_length": 3}, RATES), "pearl, stopped": ({"draft_length": 3, "draft_stop": "rejection"}, RATES),
    "amusd": ({"draft_length": 6}, RATES), "dsi": ({"lookahead": 2, "verifiers": 3}, RATES),
    "ssd": ({"draft_length": 3, "fan_out": 2}, RANKS), "tree": ({"shape": "full", "draft_depth": 2, "width": 2}, TREE),
}  # fmt: skip


def row_of(name: str, views: list[str], **budgets: int) -> dict[str, dict[str, Any]]:
    """Rows of a method by view; sequences of 1, as not every method decodes batches."""
    settings, outcomes = OTHERS[name]
    method = {"name": name.partition(",")[0], "layers": 32, **settings, **budgets}
    cost = WITH_DRAFT | ({"medium_shape": "llama-3.2-3b"} if outcomes is THREE else {}) | {"prompt": 60_000}
    table = sim.run({**tables(method, cost), "outcomes": outcomes}, views=views)
    return {row["view"]: row for row in table.iter_rows(named=True)}


@pytest.mark.parametrize("name", OTHERS)
def test_every_method_with_a_draft_model_has_a_budget(name: str) -> None:
    names = ["context_budget"] + ["medium_context_budget"] * (OTHERS[name][1] is THREE)
    rows = row_of(name, ["formula", "paths", "events"], **dict.fromkeys(names, 256))
    assert rows["events"]["paths_difference"] < 1e-9 * rows["events"]["latency_s"]
    formula, sampled = rows["formula"]["speedup"], rows["paths"]
    if formula is not None:  # policies by costs have no closed form
        assert sampled["speedup_low"] - 0.02 < formula < sampled["speedup_high"] + 0.02
    whole = row_of(name, ["paths"])["paths"]
    assert whole["speedup"] < sampled["speedup"]
    assert whole["cost_ratio"] > sampled["cost_ratio"]
    context = row_of(name, ["paths"], **dict.fromkeys(names, 60_024))["paths"]
    assert (context["speedup"], context["cost_ratio"]) == (whole["speedup"], whole["cost_ratio"])
    if len(names) > 1:
        small = row_of(name, ["paths"], context_budget=256)["paths"]
        assert whole["speedup"] < small["speedup"] < sampled["speedup"]


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
        *(
            ({"name": name.partition(",")[0], "layers": 32, **settings, "context_budget": budget}, WITH_DRAFT, words)
            for name, (settings, outcomes) in OTHERS.items() if outcomes is RATES
            for budget, words in (
                (0, "context_budget must be between 1 and 1000000, got 0"), (2.5, "context_budget must be a whole number"),
                (8025, "context_budget must be at most 8024, .* got 8025; leave it out"),
            )
        ),
        ({"name": "hierarchical", "layers": 32, "draft_length": 3, "medium_context_budget": 0}, WITH_DRAFT,
         "medium_context_budget must be between 1 and 1000000, got 0"),
        ({"name": "tree", "layers": 32, "shape": "chain", "draft_depth": 2, "drafter": "heads", "context_budget": 8}, WITH_DRAFT,
         "context_budget must be left out with drafter='heads', got 8"),
        ({"name": "pearl", "layers": 32, "draft_length": 3, "context_budget": 8}, {"kind": "unit", "cost_ratio": 0.1},
         "context_budget needs costs that know the context, got 8 with cost.kind 'unit'"),
        ({"name": "bild", "layers": 32, "context_budget": 256}, WITH_DRAFT,
         "unknown key method.context_budget; tokens of the small model are part of the output, .* leave it out"),
        ({"name": "ngram", "layers": 32, "draft_length": 2, "context_budget": 256}, ROOFLINE,
         "unknown key method.context_budget; drafts are looked up in the text, .* leave it out"),
        ({"name": "beam", "layers": 32, "draft_length": 2, "beams": 2, "context_budget": 256}, WITH_DRAFT,
         "unknown key method.context_budget; known: "),
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
