"""[cost] with kind `engine`: steps of all views take what the law says, and mistakes are refused in one line."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import figures
import sim
from model.architectures import published_shapes
from model.base.checks import ParameterError
from model.costs.pass_seconds import PassSeconds
from model.engines import law_costs, law_fit, step_law, step_terms
from model.engines.cells import Cells
from model.engines.kernel_times import KernelSource
from model.engines.law_costs import LawDraft, LawTarget
from model.engines.step_law import StepLaw
from model.hardware.cost_models import WithEngineOverhead
from sim.scenarios.hardware_cost import HardwareCost
from tests.support.figure_checks import svg_words

LENGTH = 3


@functools.cache
def law(kernels: bool = False) -> StepLaw:
    number, drafted = np.array([1.0, 8, 64, 1, 8, 64]), np.array([0.0, 0, 0, 3, 3, 3])
    emitted = step_terms.acceptance_length(0.7, 0.0, drafted)
    seconds = 0.01 + 5e-5 * number * (drafted + 1) + 4e-4 * drafted
    cells = Cells.of("tpot_ms", number, drafted, 1e3 * seconds / emitted, mean_acceptance_length=emitted)
    return law_fit.fit(
        cells, "mine", kernels=KernelSource("llama-3.1-8b", "h100") if kernels else None, facts={"engine": "vllm 0.9"}
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    step_law.write(law(), tmp_path / "mine.json")
    step_law.write(law(kernels=True), tmp_path / "kernels.json")
    return tmp_path


def scenario(folder: Path, cost: dict[str, Any], method: dict[str, Any] | None = None) -> dict[str, Any]:
    own = method or {"name": "speculative", "draft_length": LENGTH, "sequences": 8}
    return {
        "scenario": {"name": "engine", "tokens": 32, "replications": 64, "event_replications": 2}, "method": [own],
        "outcomes": {"kind": "iid", "acceptance_rate": 0.7}, "cost": {"kind": "engine", "law": str(folder / "mine.json")} | cost,
    }  # fmt: skip


SHAPE = {"shape": "llama-3.1-8b"}


@pytest.mark.parametrize("width", [1, 2, 4])
@pytest.mark.parametrize("batch", [1, 8, 64])
def test_layers_and_overhead_of_a_pass_sum_to_the_law(width: int, batch: int) -> None:
    found = law()
    shape = published_shapes.named_shape("llama-3.1-8b")
    cost = PassSeconds({"target": LawTarget(found, shape), "draft": LawDraft(found, shape)}, batch=batch)
    expected = found.pass_seconds(batch, width, 0)[0]
    assert float(cost.verify_times(width, 0)) == pytest.approx(float(expected), rel=1e-12)
    overhead = found.coefficients["step"] + batch * found.coefficients["sequence"]
    assert float(LawTarget(found, shape).step(batch).seconds) == pytest.approx(overhead, rel=1e-12)
    assert float(cost.draft_times(0)) == pytest.approx(found.coefficients["draft_pass"], rel=1e-12)


def test_costs_of_a_draw_are_those_made_with_its_law() -> None:
    found = law()
    one = found.drawn(7)
    assert {name: [value] for name, value in one.coefficients.items()} == {
        name: each.tolist() for name, each in one.draws.items() if name != "noise"
    }
    assert one.coefficients["step"] == found.draws["step"][7] != found.coefficients["step"]
    shape = published_shapes.named_shape("llama-3.1-8b")

    def costs(of: StepLaw) -> PassSeconds:
        models = {"target": WithEngineOverhead(LawTarget(of, shape), 1e-3), "draft": LawDraft(of, shape)}
        return PassSeconds(models, batch=4, verification=of.coefficients["round"])

    replaced = law_costs.with_law(costs(found), one)
    assert (replaced.hardware_models, replaced.verification) == (costs(one).hardware_models, costs(one).verification)
    assert float(replaced.verify_times(3, 5)) == float(costs(one).verify_times(3, 5)) != float(costs(found).verify_times(3, 5))


def test_views_agree_and_plain_decoding_takes_the_law_s_time(folder: Path) -> None:
    table = sim.run(scenario(folder, SHAPE), views=("formula", "paths", "events"), out=folder / "run")
    plain = float(law().predict(Cells.of("tpot_ms", [8], [0])).values[0])
    by_view = {row["view"]: row for row in table.to_dicts()}
    assert {*by_view} == {"formula", "paths", "events"}
    for row in by_view.values():
        assert row["tpot_ms"] * row["speedup"] == pytest.approx(plain, rel=0.1 if row["view"] != "formula" else 0.02)
        assert row["cost_missing"] is None
        assert "step law mine of 6 cells (vllm 0.9; number of devices not stated" in row["cost_source"]


def test_verdict_does_not_say_kernels_only(folder: Path) -> None:
    sim.run(scenario(folder, SHAPE), views=("formula",), out=folder / "run")
    summary = next((folder / "run").rglob("summary.txt")).read_text()
    assert "times: " in summary
    assert "kernels only" not in summary


def test_law_with_kernels_needs_no_shape(folder: Path) -> None:
    found = sim.run(scenario(folder, {"law": str(folder / "kernels.json")}), views=("formula",), out=folder / "run")
    assert found["speedup"][0] > 1


@pytest.mark.parametrize(
    "method",
    [
        {"name": "ppd", "exit_layer": 16, "candidates": 1, "sequences": 1},
        {"name": "early_exit", "exit_layer": 20, "sequences": 1},
        {"name": "bild", "max_draft_length": 4, "sequences": 1},
    ],
    ids=lambda method: method["name"],
)  # fmt: skip
def test_other_methods_are_priced_by_the_law(method: dict[str, Any], folder: Path) -> None:
    outcomes = {
        "ppd": {"kind": "iid", "match_rate": 0.6}, "early_exit": {"kind": "fixed"},
        "bild": {"kind": "rates", "fallback_rate": 0.3, "rollback_rate": 0.1},
    }[method["name"]]  # fmt: skip
    tables = scenario(folder, SHAPE, method) | {"outcomes": outcomes}
    if method["name"] == "early_exit":
        del tables["outcomes"]
    found = sim.run(tables, views=("formula", "paths"), out=folder / "run")
    speedups = (
        found.filter(found["view"] == "formula")["speedup"].to_list() + found.filter(found["view"] == "paths")["speedup"].to_list()
    )
    assert speedups[0] == pytest.approx(speedups[1], rel=0.1)


BAD = [
    ({}, "shape is required with law mine, which names no model; `sim ls shapes` lists them"),
    ({"law": "nonsense"}, "unknown engine law 'nonsense'"),
    (SHAPE | {"profile": "h100-llama-3.1-8b"}, "profile is not used by kind 'engine'"),
    (SHAPE | {"step_s": 0.001}, "step_s is not used by kind 'engine'"),
    (SHAPE | {"device": "h100"}, "device is not used by kind 'engine'"),
    (SHAPE | {"law": 3}, "law must be a name in quotes, got 3"),
    (SHAPE | {"dtype": "float8"}, "dtype is not used by kind 'engine'"),
]  # fmt: skip


@pytest.mark.parametrize(("change", "message"), BAD, ids=[message[:30] for _, message in BAD])
def test_mistakes_are_refused(change: dict[str, Any], message: str, folder: Path) -> None:
    with pytest.raises(ParameterError) as caught:
        HardwareCost(**({"kind": "engine", "law": str(folder / "mine.json")} | change))
    assert message in str(caught.value)


def test_shape_of_another_model_than_the_law_s_is_refused(folder: Path) -> None:
    with pytest.raises(ParameterError, match=r"shape must be llama-3\.1-8b, the model of law mine, got qwen3-8b"):
        HardwareCost(kind="engine", law=str(folder / "kernels.json"), shape="qwen3-8b")
    with pytest.raises(ParameterError, match=r"shape must be of a model with 8 of 160 experts, as law .*; llama-3\.1-8b has none"):
        HardwareCost(kind="engine", law="sglang-glm-4.7-fp8", shape="llama-3.1-8b")
    assert HardwareCost(kind="engine", law="sglang-deepseek-r1-fp8-b300", shape="deepseek-r1").of("target") is not None


def test_other_split_than_the_law_s_is_refused(folder: Path) -> None:
    with pytest.raises(ParameterError, match="tensor_parallel must be 1, that of law mine, got 4; leave it out"):
        HardwareCost(kind="engine", law=str(folder / "kernels.json"), tensor_parallel=4)
    with pytest.raises(ParameterError, match="law is required by kind 'engine'"):
        HardwareCost(kind="engine")
    with pytest.raises(ParameterError, match="law is not used by kind 'roofline'"):
        HardwareCost(kind="roofline", device="h100", shape="llama-3.1-8b", law="mine")


def test_a_medium_model_is_refused(folder: Path) -> None:
    hierarchy = scenario(folder, SHAPE, {"name": "hierarchical", "draft_length": 2})
    hierarchy["outcomes"] |= {"medium_acceptance_rate": 0.5}
    with pytest.raises(ParameterError, match=r"cost\.kind 'engine' has no times of a medium model, which method hierarchical has"):
        sim.run(hierarchy, views=("formula",), out=folder / "run")


# --- Figures ---

ACCEPTANCE = {"kind": "iid", "acceptance_rate": 0.7}
SPECULATIVE = {"name": "speculative", "draft_length": LENGTH, "sequences": 8}
DRAWN: dict[str, tuple[list[dict[str, Any]], dict[str, Any] | None, dict[str, list[Any]], set[str]]] = {
    "draft lengths": (
        [SPECULATIVE], ACCEPTANCE, {"method.draft_length": [1, 4], "outcomes.acceptance_rate": [0.5, 0.8]},
        {"speedup_acceptance_rate", "speedup_draft_length", "accepted", "distribution_point_0"},
    ),
    "batches": (
        [SPECULATIVE], ACCEPTANCE, {"method.sequences": [1, 16, 64]},
        {"speedup_by_batch", "speedup_acceptance_rate", "accepted", "distribution_point_0"},
    ),
    "methods": (
        [{"name": "autoregressive"}, SPECULATIVE | {"sequences": 1}, {"name": "adaptive", "policy": "heuristic"}], ACCEPTANCE, {},
        {"methods", "speedup_acceptance_rate", "accepted", "distribution_point_1"},
    ),
    "laws": (
        [SPECULATIVE], ACCEPTANCE, {"cost.law": ["mine.json", "kernels.json"]},
        {"speedup_by_device", "accepted", "distribution_point_0"},
    ),
    "pipelined": (
        [{"name": "ppd", "exit_layer": 16, "candidates": 1}], {"kind": "iid", "match_rate": 0.6}, {"method.candidates": [1, 3]},
        {"tradeoff_mean_busy_units", "tradeoff_compute_per_token", "distribution_point_0"},
    ),
    "fallback": (
        [{"name": "bild", "max_draft_length": 4}], {"kind": "rates", "fallback_rate": 0.3, "rollback_rate": 0.1},
        {"outcomes.fallback_rate": [0.1, 0.3]}, {"choices", "bild_rates", "accepted", "distribution_point_0"},
    ),
    "skipped layers": (
        [{"name": "skipdecode", "max_layers": 24, "min_layers": 8, "prompt": 16, "sequence_length": 48}], None,
        {"method.min_layers": [6, 12]}, {"choices", "skipdecode_layers"},
    ),
}  # fmt: skip
"""Methods, outcomes and sweep of a run on a law, and the figures that apply to it."""


@pytest.mark.parametrize("name", DRAWN)
def test_figures_that_apply_to_hardware_are_drawn(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """None names a profile, a device or the kind of the cost; each has the law above it, unless laws are swept."""
    methods, outcomes, sweep, expected = DRAWN[name]
    monkeypatch.chdir(folder)
    tables = scenario(folder, SHAPE) | {"method": methods, "sweep": sweep}
    tables |= {"outcomes": outcomes} if outcomes is not None else {}
    if outcomes is None:
        del tables["outcomes"]
    sim.run(tables, views=("formula", "paths", "events"), out=folder / "run")
    drawn = figures.of_run(folder / "run")
    assert {path.stem for path in drawn} == expected
    for path in drawn:
        if path.suffix == ".svg":
            words = svg_words(path)
            assert not any("None" in each or "profile" in each for each in words)
            assert any(each.startswith("engine: llama-3.1-8b, step law mine") for each in words) == (name != "laws")
            assert path.stem != "speedup_by_device" or {"mine", "kernels", "speculative decoding, γ = 3, 1 engine"} <= {*words}


def test_bundled_law_brings_its_model_and_its_devices(tmp_path: Path) -> None:
    bundled = {"law": "sglang-deepseek-r1-fp8-b300"}
    table = sim.run(scenario(tmp_path, bundled), views="formula", out=tmp_path / "run").to_dicts()[0]
    assert (table["tensor_parallel"], table["units"]) == (8, 8)
    with pytest.raises(ParameterError, match="tensor_parallel must be 8, that of law sglang-deepseek-r1-fp8-b300, got 4"):
        HardwareCost("engine", **bundled, tensor_parallel=4)
    assert HardwareCost("engine", law="sglang-qwen3-235b-a22b", tensor_parallel=4).split == 4
    with pytest.raises(ParameterError, match="shape must be qwen3-235b-a22b, the model of law sglang-qwen3"):
        HardwareCost("engine", law="sglang-qwen3-235b-a22b", shape="qwen3-30b-a3b")


def test_parallel_heads_are_refused_where_each_token_takes_a_pass(tmp_path: Path) -> None:
    cost = {"kind": "roofline", "law": None, "device": "h100", "shape": "llama-3.1-8b", "draft_shape": "p-eagle:llama-3.1-8b"}
    table = scenario(tmp_path, cost)
    del table["cost"]["law"]
    with pytest.raises(ParameterError, match=r"p-eagle:llama-3\.1-8b drafts all its tokens in one pass"):
        sim.run(table, views="formula", out=tmp_path / "run")
