"""Engine overhead per step: each pass takes exactly that much longer in every view, plain decoding included."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from math import log2
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import sim
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.costs.pass_seconds import PassSeconds
from model.hardware.cost_models import WithEngineOverhead, pass_time, prompt_time, step_time
from model.hardware.roofline import Roofline
from model.methods.early_exit import algorithm as early_exit
from model.methods.early_exit import theory
from model.methods.early_exit.finite_early_exit import Depths
from sim.commands import listing
from sim.scenarios import hardware_cost
from tests.support.position_costs import growing

LAYERS, TOKENS = 24, 24
COST = {"kind": "roofline", "device": "a100", "shape": "opt-1.3b", "prompt": 100}
DRAFT = {**COST, "draft_shape": "opt-125m"}
MEDIUM = {**DRAFT, "medium_shape": "opt-125m"}
ACCEPT, MATCH = {"accept": {"kind": "iid", "acceptance_rate": 1.0}}, {"match": {"kind": "iid", "match_rate": 1.0}}
RATES = {"decision": {"kind": "rates", "fallback_rate": 0.0, "rollback_rate": 0.0}}
EXITS = {"exit": {"kind": "hazards", "hazards": [0.0] * 7 + [1.0] + [0.0] * 15 + [1.0]}}
HIERARCHY = {**ACCEPT, "medium_accept": {"kind": "iid", "acceptance_rate": 1.0}}
SKIP = {"name": "skipdecode", "min_layers": 8, "max_layers": 8, "prompt": 0, "sequence_length": TOKENS}
SURE: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any], int, int]] = {
    # Method, outcomes, costs, and by hand: the target's steps and the passes of smaller models, for deterministic outcomes.
    "plain": ({"name": "autoregressive"}, {}, COST, 24, 0),
    "speculative": ({"name": "speculative", "draft_length": 3}, ACCEPT, DRAFT, 6, 18),
    "hierarchical": ({"name": "hierarchical", "draft_length": 3, "reading": "literal"}, HIERARCHY, MEDIUM, 6, 18 + 6),
    "pipelined": ({"name": "ppd", "exit_layer": 12, "candidates": 2, "form": "literal"}, MATCH, COST, 1 + 2 * 24, 0),
    "pipelined, batched": ({"name": "ppd", "exit_layer": 12, "candidates": 2, "batched": True}, MATCH, COST, 1 + 24, 0),
    "two models": ({"name": "bild", "max_draft_length": 3}, RATES, DRAFT, 6, 18),
    # Three drafted tokens and the last one read, then the rest of the layers over all four.
    "own layers": ({"name": "bild", "max_draft_length": 3, "exit_layer": 6}, RATES, COST, 6 * (3 + 1 + 1), 0),
    "early exit": ({"name": "early_exit"}, EXITS, COST, 24, 0),
    "early exit, a batch": ({"name": "early_exit", "sequences": 4, "batching": "static", "measure": "state"}, EXITS, COST, 24, 0),
    "rows when needed": ({"name": "early_exit", "fill": "backfill", "measure": "state"}, EXITS, COST, 24, 0),
    "the lowest layers skipped": (SKIP | {"warm_up": 0}, {}, COST, 24, 0),
    "layers between skipped": (SKIP | {"warm_up": 2, "sequences": 4, "batching": "static"}, {}, COST, 24, 0),
    "two batches": (SKIP | {"warm_up": 0, "sequences": 2, "batching": "static", "lengths": [24, 12, 5]}, {}, COST, 24 + 5, 0),
}  # fmt: skip


def tables(method: dict[str, Any], outcomes: dict[str, Any], cost: dict[str, Any], **settings: Any) -> dict[str, Any]:
    said = {"name": "steps", "tokens": TOKENS, "replications": 1, "views": ["paths", "events"], **settings}
    own = {"scenario": said, "method": [{"layers": LAYERS, **method}], "cost": cost}
    return own | ({"outcomes": outcomes} if outcomes else {})


@pytest.mark.parametrize("case", SURE)
def test_step_overhead_adds_once_per_step(case: str) -> None:
    method, outcomes, cost, steps, drafts = SURE[case]
    without = sim.run(tables(method, outcomes, cost), out=None).to_dicts()
    also = {"draft_step_s": 0.0007} if drafts else {}
    more = sim.run(tables(method, outcomes, cost | {"step_s": 0.002} | also), out=None).to_dicts()
    for one, other in zip(without, more, strict=True):
        assert other["busy_s"] - one["busy_s"] == pytest.approx(0.002 * steps + 0.0007 * drafts, rel=1e-6)
        plain = [row["speedup"] * row["latency_s"] for row in (one, other)]
        count = 24 + 5 if case == "two batches" else 24
        assert plain[1] - plain[0] == pytest.approx(0.002 * count, rel=1e-6)
        assert other["prompt_s"] - one["prompt_s"] == pytest.approx(0.002, rel=1e-6)
        if one["units"] == 1:
            assert other["latency_s"] == pytest.approx(other["busy_s"], rel=1e-9)


PIPELINED = {"name": "ppd", "exit_layer": 12, "candidates": 2}
EXITING = {"name": "early_exit", "measure": "state"}
PAID: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any], float]] = {
    # The key, and by hand: how often the overhead occurs until the last token, if all candidates match.
    "dispatch": ("dispatch_s", PIPELINED | {"form": "literal"}, MATCH, {}, 24),
    "dispatch of each process": ("dispatch_per_process_s", PIPELINED | {"form": "literal"}, MATCH, {}, 2 * 24),
    "dispatch along a tree": ("dispatch_per_process_s", PIPELINED | {"form": "literal"}, MATCH, {"dispatch_law": "tree"},
                              24 * log2(2 + 1)),
    "links, which are slow": ("link_s", PIPELINED | {"form": "literal"}, MATCH, {"link_s": 0.05}, 24),
    "links, and no wait for the last": ("link_s", PIPELINED | {"form": "eager"}, MATCH, {"link_s": 0.05}, 23),
    "promotions of all but the last": ("promotion_s", PIPELINED | {"form": "literal"}, MATCH, {}, 23),
    "checks of eight layers": ("state_check_s", EXITING, EXITS, {}, 24 * 8),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["roofline", "profile"])
@pytest.mark.parametrize("case", PAID)
def test_step_overhead_in_seconds_is_added_in_seconds(case: str, kind: str) -> None:
    key, method, outcomes, also, count = PAID[case]
    hardware_, layers = (COST, 24) if kind == "roofline" else ({"kind": "profile", "profile": "h100-llama-2-7b"}, 32)
    given_ = [tables(method | {"layers": layers}, outcomes, hardware_ | also) for _ in range(2)]
    for own, more in zip(given_, (0.0, 0.003), strict=True):
        own["cost"][key] = own["cost"].get(key, 0.0) + more
        if "exit_layer" in method:
            own["method"][0]["exit_layer"] = layers // 2
        if outcomes is EXITS:
            own["outcomes"] = {"exit": {"kind": "hazards", "hazards": [0.0] * 7 + [1.0] + [0.0] * (layers - 9) + [1.0]}}
        own["scenario"]["views"] = ["formula", "paths", "events"]
    rows = [sim.run(own, out=None).to_dicts() for own in given_]
    for one, other in zip(*rows, strict=True):
        assert other["latency_s"] - one["latency_s"] == pytest.approx(0.003 * count, rel=1e-6), one["view"]


HALF = {"match": {"kind": "iid", "match_rate": 0.5}}
TENTHS = {"exit": {"kind": "hazards", "hazards": [0.1] * 23 + [1.0]}}
ANY: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "speculative": (
        {"name": "speculative", "draft_length": 4, "sequences": 8}, {"accept": {"kind": "iid", "acceptance_rate": 0.7}}, DRAFT
    ),
    "pipelined": ({"name": "ppd", "exit_layer": 12, "candidates": 2}, HALF, COST),
    "eager": ({"name": "ppd", "exit_layer": 14, "candidates": 1, "form": "eager"}, HALF, COST),
    "batched": (
        {"name": "ppd", "exit_layer": 14, "candidates": 3, "batched": True}, HALF, COST
    ),
    "own layers": (
        {"name": "bild", "max_draft_length": 4, "exit_layer": 6, "sequences": 16, "batching": "lockstep"},
        {"decision": {"kind": "rates", "fallback_rate": 0.2, "rollback_rate": 0.1}}, COST,
    ),
    "a batch": ({"name": "early_exit", "sequences": 4, "batching": "static", "measure": "state"}, TENTHS, COST),
    "backfill": (
        {"name": "early_exit", "fill": "backfill", "measure": "state"},
        TENTHS, COST,
    ),
    "skipped": (SKIP | {"min_layers": 5, "max_layers": 9, "warm_up": 0, "sequences": 4, "batching": "static"}, {}, COST),
}  # fmt: skip


@pytest.mark.parametrize("case", ANY)
def test_three_views_agree_on_step_overhead(case: str) -> None:
    method, outcomes, cost = ANY[case]
    also = {"draft_step_s": 0.002} if "draft_shape" in cost else {}
    own = tables(method, outcomes, cost | {"step_s": 0.01} | also, views=["formula", "paths", "events"], replications=400, seed=5)
    own["scenario"]["event_replications"] = 20
    formula, paths, events = sim.run(own, out=None).to_dicts()
    assert events["paths_difference"] <= 1e-9 * formula["latency_s"]
    # A half-width is 1.96 standard errors: 5 of them have a false-alarm rate below 1e-6 for all cases together.
    room = 5 / 1.96 * (paths["latency_s_high"] - paths["latency_s_low"]) / 2
    assert abs(paths["latency_s"] - formula["latency_s"]) <= room + 1e-9 * formula["latency_s"]
    assert formula["speedup"] * formula["latency_s"] == pytest.approx(paths["speedup"] * paths["latency_s"], rel=1e-9)


@pytest.mark.parametrize(("fill", "batch"), [("backfill", 1), ("propagate", 1), ("propagate", 3)])
def test_backfilled_rows_and_deeper_tokens_have_no_step_overhead(fill: str, batch: int) -> None:
    """A decoding takes longer by the overhead of its passes only, one per token of the longest sequence."""
    choice = early_exit.Parameters(6, measure="state", fill=fill, sequences=batch, batching="static")
    law, tokens, step = Depths([0.1, 0.3, 0.1, 0.2, 0.1, 0.2]), 20, 7.0
    without = growing(6, prompt=3, state_check=0.25)
    kernels = without.hardware("target")
    given_ = replace(without, hardware_models={"target": WithEngineOverhead(kernels, float(kernels.step().seconds) + step)})
    free = replace(without, hardware_models={"target": WithEngineOverhead(kernels, float(kernels.step().seconds))})
    found = [float(theory.predict(choice, tokens, law, cost).latency) for cost in (free, given_)]
    assert found[1] - found[0] == pytest.approx(step * tokens, rel=1e-9)
    bounds = [theory.slowest(choice, tokens, cost)[0] for cost in (free, given_)]
    assert bounds[1] - bounds[0] == pytest.approx(step * tokens, rel=1e-9)


def test_slow_steps_dominate_the_time_of_a_round() -> None:
    """If the overhead is far longer than the kernels, the speed-up is the tokens per round over 1 + K draft steps."""
    rate, length, share = 0.8, 4, 0.3
    method, outcomes = {"name": "speculative", "draft_length": length}, {"accept": {"kind": "iid", "acceptance_rate": rate}}
    gaps = []
    for step in (0.01, 0.1, 1.0, 10.0):
        cost = DRAFT | {"step_s": step, "draft_step_s": share * step}
        (row,) = sim.run(tables(method, outcomes, cost, views=["formula"], tokens=600), out=None).to_dicts()
        gaps.append(abs(row["speedup"] / (row["tokens_per_round"] / (1 + length * share)) - 1))
    assert gaps == sorted(gaps, reverse=True)
    assert gaps[-1] < 3e-3 < gaps[0]


def test_given_step_overhead_equals_a_measured_one() -> None:
    """Overhead in [cost], added to or instead of a measured step in the profile, gives the same costs."""

    class Stepping(Roofline):
        def step(self, batch: Any = 1, *, within: bool = False) -> Any:
            return super().step(batch, within=within)._replace(seconds=super().step(batch).seconds + 0.003)

    target, draft = preset("opt-1.3b"), preset("opt-125m")
    peaks = 2e12, 3e14
    both = [
        PassSeconds({"target": of(target), "draft": of(draft)}, prompt=50)
        for of in (lambda shape: Stepping(shape, *peaks), lambda shape: WithEngineOverhead(Roofline(shape, *peaks), 0.003))
    ]
    kernels = PassSeconds({"target": Roofline(target, *peaks), "draft": Roofline(draft, *peaks)}, prompt=50)
    at = np.arange(20)
    asked: list[Callable[[PassSeconds], Any]] = [
        lambda cost: cost.verify_times(5, at, 4), lambda cost: cost.draft_times(at), lambda cost: cost.plain_times(at)
    ]
    for times in asked:
        measured, stated, without = (times(cost) for cost in (*both, kernels))
        assert measured == pytest.approx(stated, rel=1e-12)
        assert measured - without == pytest.approx(np.full(20, 0.003))


@given(st.integers(1, 8), st.integers(0, 500), st.integers(1, 16), st.floats(0, 10))
def test_step_overhead_is_added_to_a_pass_on_hardware(width: int, context: int, batch: int, step: float) -> None:
    kernels = Roofline(preset("opt-125m"), 2e12, 3e14)
    served = WithEngineOverhead(kernels, step)
    for heads in (None, 0, 1):
        pair = [float(pass_time(of, width, context, batch, heads=heads).seconds) for of in (served, kernels)]
        assert pair[0] - pair[1] == pytest.approx(step, abs=1e-12)
    assert float(step_time(served, context, batch).error) <= float(step_time(kernels, context, batch).error)
    assert float((prompt_time(served, 5).seconds) - prompt_time(kernels, 5).seconds) == pytest.approx(step, abs=1e-12)
    for name in ("shape", "tensor_parallel", "provenance"):
        assert getattr(served, name) == getattr(kernels, name)
    for asked in ("embedding", "head", "transfer"):
        assert getattr(served, asked)(7) == getattr(kernels, asked)(7)


@pytest.mark.parametrize(
    ("cost", "message"),
    [
        (COST | {"step_s": -1.0}, "step_s must be between 0 and 1e+06, got -1.0"),
        (COST | {"step_s": float("nan")}, "step_s must be between 0 and 1e+06, got nan"),
        (COST | {"draft_step_s": 0.1}, "cost.draft_step_s is used by no method that it is given for; leave it out"),
        ({"step_s": 0.1}, "cost.step_s belongs to kinds profile, roofline and engine, got it with kind 'unit'; leave it out"),
        ({"step": 0.1}, "unknown key cost.step; "),
    ],
)
def test_invalid_step_overheads_are_refused(cost: dict[str, Any], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        sim.run(tables({"name": "autoregressive"}, {}, cost), out=None)
    assert message in str(caught.value)


def test_step_without_overhead_is_listed_as_missing() -> None:
    method, outcomes, *_ = ANY["speculative"]
    own = tables(method, outcomes, DRAFT | {"step_s": 0.0, "draft_step_s": 0.0}, views=["formula"])
    own["sweep"] = {"cost.step_s": [0.0, 0.1], "cost.draft_step_s": [0.0, 1.0]}
    assert sim.run(own, out=None)["cost_missing"].to_list() == ["step, draft_step", "step", "draft_step", None]
    about = listing.lines("costs")
    assert "plain decoding" in about["step_s"]
    assert "draft model" in about["draft_step_s"]
    assert hardware_cost.HardwareCost(**COST).step_s == 0
