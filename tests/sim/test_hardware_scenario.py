"""Scenarios on hardware: the times of a run are those of the profile's passes, for every method and view."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model.architectures.published_shapes import preset
from model.base.checks import ParameterError
from model.hardware import devices, profile, profile_files
from model.hardware.cost_models import bytes_of_state, memory, pass_time, prompt_time, step_time
from model.hardware.devices import DEVICES
from model.hardware.profile import Profile, Source, table_of
from model.hardware.profile_costs import ProfileCosts
from model.hardware.roofline import Efficiency, Roofline
from sim.commands.sim_app import app
from sim.runs import trace
from sim.scenarios.grid import Grid
from sim.scenarios.hardware_cost import ROLES, HardwareCost

ROOFLINE = {"kind": "roofline", "device": "a100", "shape": "llama-2-13b"}
MATCH = {"match": {"kind": "iid", "match_rate": 0.5}}
PPD = {"name": "ppd", "exit_layer": 20, "candidates": 1}
ACCEPT = {"accept": {"kind": "iid", "acceptance_rate": 0.7}}
LEAVING = {"exit": {"kind": "hazards", "hazards": [0.1] * 39 + [1.0]}}


Tables = dict[str, Any]


def scenario(method: Tables, cost: Tables, outcomes: Tables | None = None, **settings: Any) -> Tables:
    said: dict[str, Any] = {
        "scenario": {"name": "hardware", "tokens": 32, "replications": 64, **settings},
        "method": [{"layers": 40, **method}], "cost": dict(cost),
    }  # fmt: skip
    return said | ({"outcomes": outcomes} if outcomes else {})


def rows_of(tables: dict[str, Any]) -> list[dict[str, Any]]:
    return sim.run(tables, out=None).to_dicts()


def a100(name: str = "llama-2-13b", tensor_parallel: int = 1) -> Roofline:
    of = DEVICES["a100"]
    return Roofline(preset(name), of.bandwidth, of.rates["bfloat16"], tensor_parallel=tensor_parallel, link=of.link)


def test_plain_decoding_takes_one_step_per_token() -> None:
    found = rows_of(scenario({"name": "autoregressive", "sequences": 3}, ROOFLINE | {"prompt": 100}))
    steps = step_time(a100(), 100 + (np.arange(32) + 2 * 16) / 3, 3)  # the two others are half-way through, in the mean
    total = float(steps.seconds.sum())
    assert [row["view"] for row in found] == ["formula", "paths", "events"]
    for row in found:
        assert row["latency_s"] == pytest.approx(total, rel=1e-9)
        assert row["tpot_ms"] == pytest.approx(1e3 * total / 32, rel=1e-9)
        assert row["latency_layers"] is row["tpot_layers"] is row["busy_layers"] is row["latency_sd_layers"] is None
        assert row["speedup"] == pytest.approx(1)
        assert row["seconds_error"] == pytest.approx(float(steps.seconds @ steps.error) / total)
        assert Efficiency().error < row["seconds_error"] < Efficiency().attention_error
        assert row["cost_source"].startswith("assumed efficiencies")
        assert row["prompt_s"] == pytest.approx(float(prompt_time(a100(), 100, 3).seconds))


def test_rounds_take_the_time_of_their_passes() -> None:
    always = {"accept": {"kind": "iid", "acceptance_rate": 1.0}}
    draft = scenario({"name": "speculative", "draft_length": 3}, ROOFLINE | {"draft_shape": "llama-68m"}, always)
    start = 512 + 4 * np.arange(8)
    wide = float(pass_time(a100(), 4, start).seconds.sum())
    # A draft also reads the last token of the previous draft, which was accepted in full.
    first = float(step_time(a100("llama-68m"), 512).seconds + pass_time(a100("llama-68m"), 2, start[1:] - 1, heads=1).seconds.sum())
    later = sum(float(step_time(a100("llama-68m"), start + place).seconds.sum()) for place in (1, 2))
    for row in rows_of(draft):
        assert row["latency_s"] == pytest.approx(wide + first + later, rel=1e-9)


def test_batching_makes_multi_token_passes_expensive() -> None:
    method = {"name": "speculative", "draft_length": 7}
    cost = ROOFLINE | {"draft_shape": "llama-68m", "prompt": 64}
    speeds = [rows_of(scenario(method | {"sequences": count}, cost, ACCEPT))[0]["speedup"] for count in (1, 32, 256)]
    assert speeds[0] > speeds[1] > speeds[2]


def test_units_of_several_devices_count_as_devices() -> None:
    plain = rows_of(scenario({"name": "autoregressive"}, ROOFLINE))[0]
    split = rows_of(scenario({"name": "autoregressive"}, ROOFLINE | {"tensor_parallel": 4}))
    steps = [step_time(a100(tensor_parallel=tensor_parallel), 512 + np.arange(32)) for tensor_parallel in (1, 4)]
    times = [float(each.seconds.sum()) for each in steps]
    for row in split:
        assert row["latency_s"] == pytest.approx(times[1], rel=1e-9)
        assert row["speedup"] == pytest.approx(1, rel=1e-9)
        assert row["speedup_over_one_device"] == pytest.approx(times[0] / times[1], rel=1e-9)
        assert row["mean_busy_units"] == pytest.approx(4)
        assert row["reserved_units"] == row["units"] == row["tensor_parallel"] == 4
        assert row["peak_units"] == (4 if row["view"] == "events" else None)
        # Busy time over that of plain decoding on the same devices.
        assert row["compute_per_token"] == pytest.approx(1, rel=1e-9)
        assert row["speedup_input_low"] == row["speedup"] == row["speedup_input_high"]
        low, high = (row[f"speedup_over_one_device_input_{end}"] for end in ("low", "high"))
        errors = [float(each.seconds @ each.error) / time for each, time in zip(steps, times, strict=True)]
        one, four = (((1 - error) * time, (1 + error) * time) for error, time in zip(errors, times, strict=True))
        assert (low, high) == pytest.approx((one[0] / four[1], one[1] / four[0]), rel=1e-9)
    assert plain["tensor_parallel"] == 1
    assert "speedup_over_one_device" not in plain
    assert "send" not in (plain["cost_missing"] or "")
    both = rows_of(scenario({"name": "ppd", "exit_layer": 20, "candidates": 1}, ROOFLINE | {"tensor_parallel": 2}, MATCH))
    one = rows_of(scenario({"name": "ppd", "exit_layer": 20, "candidates": 1}, ROOFLINE, MATCH))
    for row, single in zip(both, one, strict=True):
        assert row["reserved_units"] == 4
        assert row["mean_busy_units"] == pytest.approx(2 * single["mean_busy_units"], rel=1e-2)
        assert row["compute_per_token"] == pytest.approx(single["compute_per_token"], rel=1e-2)


DECIDED = {"decision": {"kind": "rates", "fallback_rate": 0.3, "rollback_rate": 0.1}}
APART: dict[str, tuple[Tables, Tables, int]] = {
    "speculative": ({"name": "speculative", "draft_length": 3}, ACCEPT, 1),
    "adaptive": ({"name": "adaptive", "policy": "heuristic"}, ACCEPT, 1),
    "bild": ({"name": "bild"}, DECIDED, 1),
    **{reading: (
        {"name": "hierarchical", "draft_length": 2, "reading": reading} | inner,
        ACCEPT | {"medium_accept": {"kind": "iid", "acceptance_rate": 0.8}}, 2,
    ) for reading, inner in (("literal", {}), ("bonus", {}), ("recursive", {"inner_draft_length": 1}))},
}  # fmt: skip


@pytest.mark.parametrize("name", APART)
def test_separate_draft_model_reserves_one_device(name: str) -> None:
    """The draft's layers are not split: the target's unit has four devices and each smaller model one, both busy and reserved."""
    method, outcomes, smaller = APART[name]
    costs = ROOFLINE | {"tensor_parallel": 4, "draft_shape": "llama-68m"} | ({"medium_shape": "llama-2-7b"} if smaller == 2 else {})
    tables = scenario(method | {"placement": "separate"}, costs, outcomes, event_replications=16)
    rows = rows_of(tables)  # which warns if views differ; a warning is an error here
    for row in rows:
        assert row["reserved_units"] == row["units"] == 4 + smaller
        assert row["mean_busy_units"] < 4
    run = trace.record(tables)
    busy = {role: sum(each.end - each.start for each in run.intervals if each.role == role and each.unit >= 0) for role in ROLES}
    assert busy["draft"] > 0
    assert busy["medium"] > 0 or smaller == 1
    assert 4 * run.busy == pytest.approx(4 * busy["target"] + busy["draft"] + busy["medium"], rel=1e-12)
    together = rows_of(scenario(method, costs, outcomes, event_replications=16))
    for row, beside in zip(rows, together, strict=True):
        assert beside["reserved_units"] == 4
        assert row["busy_s"] < beside["busy_s"]


SEVENTY: Tables = {
    "kind": "profile", "profile": "h100-llama-2-70b", "draft_profile": "h100-operations", "draft_shape": "llama-68m",
    "tensor_parallel": 4,
}  # fmt: skip


def test_speed_ups_are_over_plain_decoding_on_the_same_devices() -> None:
    """A round with one drafted token generates two at most. The model does not fit one device, so the column is null."""
    for length in (1, 4):
        accept = {"kind": "iid", "acceptance_rate": 0.7}
        method = {"name": "speculative", "layers": 80, "draft_length": length}
        drafting = rows_of(scenario(method, SEVENTY, accept, tokens=256, event_replications=8))
        plain = rows_of(scenario({"name": "autoregressive", "layers": 80}, target_of(SEVENTY), tokens=256, event_replications=8))
        for row, step in zip(drafting, plain, strict=True):
            assert row["speedup"] == pytest.approx(step["latency_s"] / row["latency_s"], rel=1e-9)
            assert 1 < row["speedup"] <= row["tokens_per_round"] < 1.05 * (1 - 0.7 ** (length + 1)) / 0.3
            assert row["compute_per_token"] == pytest.approx(1 / row["speedup"], rel=1e-9)
            assert row["reserved_units"] == 4
            assert row["mean_busy_units"] == pytest.approx(4)
            assert row["speedup_over_one_device"] is None
        assert not {"speedup_over_one_device_low", "speedup_over_one_device_input_low"} & {
            name for name, value in drafting[1].items() if value is not None
        }


def target_of(cost: Tables) -> Tables:
    return {key: value for key, value in cost.items() if not key.startswith("draft_")}


def test_speed_up_over_one_device_needs_a_batch_that_fits() -> None:
    """13 billion weights fit one A100 of 80 GB, with the cache of eight sequences and not of 160."""
    method = {"name": "speculative", "draft_length": 3}
    drafting = ROOFLINE | {"draft_shape": "llama-68m", "tensor_parallel": 4}
    for batch, fits in ((8, True), (160, False)):
        for batching in ("static", "continuous", "lockstep"):
            own = method | {"sequences": batch, "batching": batching}
            row = rows_of(scenario(own, drafting, ACCEPT, views=["formula"]))[0]
            assert row["memory_share"] < 1
            assert (row["speedup_over_one_device"] is not None) == fits
            if fits:
                others = 16.0 if batching == "continuous" else np.arange(32)
                at = 512 + (np.arange(32) + (batch - 1) * others) / batch
                times = [float(step_time(a100(tensor_parallel=each), at, batch).seconds.sum()) for each in (1, 4)]
                assert row["speedup_over_one_device"] == pytest.approx(row["speedup"] * times[0] / times[1], rel=1e-6)


def test_sampled_speed_up_over_one_device_has_its_interval() -> None:
    cost = ROOFLINE | {"draft_shape": "llama-68m", "tensor_parallel": 2}
    row = rows_of(scenario({"name": "speculative", "draft_length": 3}, cost, ACCEPT, views=["paths"]))[0]
    for end in ("low", "high"):
        share = row[f"speedup_{end}"] / row["speedup"]
        assert row[f"speedup_over_one_device_{end}"] / row["speedup_over_one_device"] == pytest.approx(share)
    low, high = (row[f"speedup_over_one_device_input_{end}"] for end in ("low", "high"))
    assert low / row["speedup_input_low"] < row["speedup_over_one_device"] / row["speedup"] < high / row["speedup_input_high"]


def test_memory_is_checked_before_the_run() -> None:
    row = rows_of(scenario({"name": "autoregressive", "sequences": 2}, ROOFLINE | {"prompt": 1000}))[0]
    found = memory(preset("llama-2-13b"), DEVICES["a100"].memory_bytes, context=1032, batch=2)
    assert row["memory_share"] == pytest.approx(found.share)
    beside = rows_of(scenario({"name": "speculative", "draft_length": 3}, ROOFLINE | {"draft_shape": "llama-68m"}, ACCEPT))[0]
    alone = rows_of(
        scenario(
            {"name": "speculative", "draft_length": 3, "placement": "separate"}, ROOFLINE | {"draft_shape": "llama-68m"}, ACCEPT
        )
    )[0]
    assert beside["memory_share"] > alone["memory_share"]


def test_batch_of_sequences_is_a_pass_over_all_of_them() -> None:
    method = {"name": "skipdecode", "min_layers": 40, "max_layers": 40, "warm_up": 1, "prompt": 0, "sequence_length": 32}
    found = rows_of(scenario(method | {"sequences": 8, "batching": "static"}, ROOFLINE))
    total = float(step_time(a100(), 512 + np.arange(32), 8).seconds.sum())
    for row in found:
        assert row["latency_s"] == pytest.approx(total, rel=1e-6)


@pytest.fixture
def measured(tmp_path: Path) -> Path:
    """A profile of the smallest Llama, by hand."""
    rows: list[dict[str, Any]] = [
        {
            "part": "layer", "width": width, "context": context, "batch": 1, "busy": busy,
            "time_s": 1e-4 * (1 + width / 10) * (1 + busy),
        }
        for width in (1, 2, 4)
        for context in (0, 1024)
        for busy in (0, 1)
    ]  # fmt: skip
    rows += [{"part": "head", "positions": 1, "time_s": 5e-5}, {"part": "step", "batch": 1, "time_s": 3e-5}]
    rows += [{"part": "send", "size": size, "time_s": 1e-5} for size in (1, 10**9)]
    made = Profile(
        name="by-hand", device="here", model="llama-68m", dtype="bfloat16", engine="none", mode="eager", kind="model",
        provenance="measured", date="2026-11-21", bandwidth=1e12, rate=1e14, cache_bytes=1e8, table=table_of(rows),
        sources=(Source("by hand", "rows"),), shape=vars(preset("llama-68m")), errors={"layer": 0.05},
    )  # fmt: skip
    return profile_files.save(made, tmp_path)


def test_costs_depend_on_batch_and_devices_of_the_method(monkeypatch: pytest.MonkeyPatch) -> None:
    """The costs of a method, where layers are split of plain decoding on one device, and what is asked of its memory: draft
    models lie on the same devices unless they are placed on others."""
    rooms: list[tuple[Any, Tables]] = []

    def recorded(of: Any, *rest: Any, **more: Any) -> Any:
        rooms.append((of, {**more, "memory": rest}))
        return memory(of, *rest, **more)

    monkeypatch.setattr("sim.scenarios.hardware_cost.cost_models.memory", recorded)
    drafting, draft = {"name": "speculative", "draft_length": 3}, ROOFLINE | {"draft_shape": "llama-68m"}
    skipping = {"name": "skipdecode", "min_layers": 20, "max_layers": 40, "warm_up": 1, "prompt": 0, "sequence_length": 40}
    taking = {"dispatch": 1e-3, "dispatch_per_process": 2e-3, "link": 3e-3, "promotion": 4e-3, "state_check": 5e-3}
    in_seconds = {f"{name}_s": seconds for name, seconds in taking.items() if name != "state_check"} | {"dispatch_law": "tree"}
    several = {"sequences": 4, "batching": "static"}
    for method, cost, law, batch, others_position, handed_over in (
        ({"name": "autoregressive", "sequences": 3}, ROOFLINE | {"prompt": 100}, None, 3, 16.0, 0),
        (drafting | {"sequences": 4, "batching": "lockstep"}, draft, ACCEPT, 4, None, 0),
        (drafting | several, draft | {"draft_step_s": 1e-3}, ACCEPT, 1, None, 0),
        (drafting | several, draft | {"tensor_parallel": 2, "step_s": 2e-3}, ACCEPT, 1, None, 0),
        (drafting | {"sequences": 4, "placement": "separate"}, draft | {"tensor_parallel": 2}, ACCEPT, 4, 16.0, 0),
        (skipping | several, ROOFLINE | {"tensor_parallel": 2, "step_s": 1e-3}, None, 1, None, 0),
        (PPD, ROOFLINE | in_seconds | {"tensor_parallel": 2}, MATCH, 1, None, 20),
        ({"name": "early_exit", "measure": "state"}, ROOFLINE | {"state_check_s": 5e-3}, LEAVING, 1, None, 0),
    ):  # fmt: skip
        rooms.clear()
        case = Grid(scenario(method, cost, law)).case(0)
        assert case.hardware is not None
        tensor_parallel, prompt, sequences = cost.get("tensor_parallel", 1), cost.get("prompt", 512), method.get("sequences", 1)
        for found, held in ((case.hardware.cost, tensor_parallel), (case.hardware.one_device, 1)):
            if found is None:
                assert tensor_parallel == 1
                continue
            assert (found.prompt, found.batch, found.others_position, found.middle) == (prompt, batch, others_position, 16)
            target: Any = found.hardware("target")
            assert (target.tensor_parallel, target.step_s) == (held, cost.get("step_s", 0.0))
        found = case.hardware.cost
        small: Any = found.hardware_models.get("draft")
        assert (small is None) == ("draft_shape" not in cost)
        if small is not None:
            assert (small.shape, small.tensor_parallel, small.step_s) == (preset("llama-68m"), 1, cost.get("draft_step_s", 0.0))
        one = a100(tensor_parallel=tensor_parallel)
        moved = {"link": 64, "promotion": bytes_of_state(preset("llama-2-13b"), handed_over)}
        for name in taking:
            own = float(one.transfer(moved[name]).seconds) if name in moved else 0.0
            assert getattr(found, name) == pytest.approx(own + cost.get(f"{name}_s", 0.0))
        assert found.dispatch_law == cost.get("dispatch_law", "linear")
        also = () if small is None or method.get("placement") == "separate" else (preset("llama-68m"),)
        here = {"context": prompt + 32, "batch": sequences, "memory": (DEVICES["a100"].memory_bytes,)}
        assert rooms == [
            *((preset("llama-2-13b"), here) for _ in range(tensor_parallel > 1)),
            (preset("llama-2-13b"), here | {"tensor_parallel": tensor_parallel, "also": also, "draft_budget": (None,) * len(also)}),
        ]  # fmt: skip


def test_model_that_just_fits_is_compared_with_one_device(tmp_path: Path) -> None:
    """With the cache of all sequences at their end; with one byte less memory the speed-up over one device is null."""
    needed = int(memory(preset("llama-68m"), 1.0, context=100 + 32, batch=3).required)
    for spare in (0, -1):
        path = tmp_path / f"device{spare}.toml"
        small = replace(DEVICES["a100"], name="small", memory_bytes=float(needed + spare))
        path.write_text(devices.toml_text(small), encoding="utf-8")
        cost = ROOFLINE | {"device": str(path), "shape": "llama-68m", "tensor_parallel": 2, "prompt": 100}
        (row,) = rows_of(scenario({"name": "autoregressive", "layers": 2, "sequences": 3}, cost, views=["formula"]))
        assert (row["speedup_over_one_device"] is None) == (spare < 0)


def test_draft_on_a_separate_device_shares_no_memory() -> None:
    """At the estimated costs and at both ends; with only the target's units the draft is on these."""
    drafting, draft = {"name": "speculative", "draft_length": 3}, ROOFLINE | {"draft_shape": "llama-68m"}
    for tensor_parallel, placement, units, share in (
        (1, "separate", None, 1.0), (4, "colocated", None, 1.0), (4, "separate", None, 0.25), (4, "separate", 2, 0.25),
        (4, "separate", 1, 1.0),
    ):  # fmt: skip
        tables = scenario(
            drafting | {"placement": placement}, draft | {"tensor_parallel": tensor_parallel}, ACCEPT, views=["events"]
        )
        case = Grid(tables | ({} if units is None else {"cluster": {"units": units}})).case(0)
        assert case.hardware is not None
        assert [each.draft_devices for each in (case.cost, case.hardware.cost, *case.hardware.ends)] == [share] * 4


def test_split_layers_are_compared_with_one_device_equally_busy(tmp_path: Path) -> None:
    """With a profile of layers that take half as long on two devices and three times as long while another unit is busy."""
    rows: list[dict[str, Any]] = [
        {"part": "layer", "width": 1, "context": context, "batch": 1, "busy": busy, "tensor_parallel": tensor_parallel,
         "time_s": 1e-4 * (1 + 2 * busy) / tensor_parallel}
        for busy in (0, 1) for tensor_parallel in (1, 2) for context in (0, 1024)
    ]  # fmt: skip
    rows += [{"part": "head", "positions": 1, "tensor_parallel": tensor_parallel, "time_s": 5e-5} for tensor_parallel in (1, 2)]
    made = Profile(
        name="split", device="h100", model="llama-68m", dtype="bfloat16", engine="none", mode="eager", kind="model",
        provenance="measured", date="2026-11-21", bandwidth=1e12, rate=1e14, cache_bytes=1e8, table=table_of(rows),
        sources=(Source("by hand", "rows"),), shape=vars(preset("llama-68m")),
    )  # fmt: skip
    path = profile_files.save(made, tmp_path)
    for busy in (0, 1):
        cost = {"kind": "profile", "profile": str(path), "tensor_parallel": 2, "busy": busy, "prompt": 100}
        (row,) = rows_of(scenario({"name": "autoregressive", "layers": 2}, cost, views=["formula"]))
        layers = 2 * 1e-4 * (1 + 2 * busy)
        assert row["speedup_over_one_device"] == pytest.approx((layers + 5e-5) / (layers / 2 + 5e-5), rel=1e-9)


def test_own_profile_gives_seconds_in_every_view(measured: Path, tmp_path: Path) -> None:
    text = f"""
[scenario]
name = "own"
tokens = 10
replications = 20
[[method]]
name = "autoregressive"
layers = 2
[cost]
kind = "profile"
profile = "{measured.name}"
prompt = 100
busy = 1
"""
    path = tmp_path / "own.toml"
    path.write_text(text)  # in the folder of the profile
    step = 2 * 1e-4 * 1.1 * 2 + 5e-5 + 3e-5
    for row in sim.run(path, out=None).to_dicts():
        assert row["latency_s"] == pytest.approx(10 * step, rel=1e-9)
        assert row["cost_source"] == "measured (by hand)"
        assert row["tpot_ms_input_low"] == pytest.approx(1e3 * step * (1 - row["seconds_error"]))
        assert row["tpot_ms_input_high"] == pytest.approx(1e3 * step * (1 + row["seconds_error"]))
        assert "memory_share" not in row  # the memory of the device is not known


def test_run_prints_the_source_of_its_times(measured: Path) -> None:
    tables = scenario({"name": "autoregressive", "layers": 2}, {"kind": "profile", "profile": str(measured)})
    done = CliRunner().invoke(app, ["run", *_written(tables, measured.parent), "--view", "formula"])
    assert done.exit_code == 0, done.output
    said = " ".join(done.stdout.split())
    assert "by-hand.json: measured (by hand); prompt 512, tensor_parallel 1" in said
    assert "the time of each pass depends on its own context length" in said
    assert "not checked whether weights and KV cache fit" in said
    assert "not measured, assumed 0 (column cost_missing): embedding" in said


def _written(tables: dict[str, Any], folder: Path) -> list[str]:
    path = folder / "scenario.toml"
    lines = []
    for name, table in tables.items():
        for each in table if isinstance(table, list) else [table]:
            lines.append(f"[[{name}]]" if isinstance(table, list) else f"[{name}]")
            lines += [f"{key} = {json.dumps(value)}" for key, value in each.items() if not isinstance(value, dict)]
            for inner, value in each.items():
                if isinstance(value, dict):
                    lines.append(f"[{name}.{inner}]")
                    lines += [f"{key} = {json.dumps(what)}" for key, what in value.items()]
    path.write_text("\n".join(lines))
    return [str(path), "-o", str(folder / "out")]


def test_methods_may_override_single_shared_costs() -> None:
    tables = scenario({"name": "autoregressive"}, ROOFLINE)
    tables["method"].append({"name": "autoregressive", "layers": 40, "cost": {"tensor_parallel": 2}})
    tables["sweep"] = {"cost.device": ["a100", "h100"]}
    grid = Grid(tables)
    cases = [grid.case(point) for point in range(grid.points)]
    assert [case.tensor_parallel for case in cases] == [1, 1, 2, 2]
    seconds = [case.plain_time for case in cases]
    assert len(set(seconds)) == 4
    whole = copy.deepcopy(tables)
    whole["method"][1]["cost"] = {"kind": "unit", "final_head": 1.0}
    del whole["sweep"]
    assert Grid(whole).case(1).hardware is None  # a table with a kind does not inherit


H100 = {"kind": "profile", "profile": "h100-llama-2-13b"}
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({}, {"kind": "profil"}, "cost: unknown kind 'profil'; did you mean profile?"),
    ({}, {"kind": "roofline", "shape": "llama-2-13b"}, "cost: device is required by kind 'roofline'"),
    ({}, {"kind": "roofline", "device": "a100"}, "cost: shape is required by kind 'roofline'"),
    ({}, {"kind": "profile"}, "cost: profile is required by kind 'profile'"),
    ({}, {"kind": "profile", "profile": "h100-llama-13b"}, "cost: profile: unknown profile 'h100-llama-13b'"),
    ({}, {"kind": "profile", "profile": "missing.json"}, "cost: profile: missing.json: there is no such file"),
    ({}, {"kind": "profile", "profile": 3}, "cost: profile must be a name in quotes, got 3"),
    ({}, {"kind": "profile", "profile": "h100-operations"}, "cost: profile: h100-operations is a profile of operations: name"),
    ({}, H100 | {"shape": "opt-1.3b"}, "cost: profile: h100-llama-2-13b is of llama-2-13b, not of opt-1.3b"),
    ({}, H100 | {"dtype": "float8"}, "cost: profile: dtype must be bfloat16, that of h100-llama-2-13b, got 'float8'; it covers"),
    ({}, H100 | {"tensor_parallel": 3}, "cost: profile: tensor_parallel must be one of 1, 2, 4, 8 in profile"),
    ({}, H100 | {"busy": 1}, "busy must be 0 in profile h100-llama-2-13b, got 1"),
    ({}, H100 | {"device": "h100"}, "cost: device is not used by kind 'profile'; leave it out"),
    ({}, ROOFLINE | {"profile": "x"}, "cost: profile is not used by kind 'roofline'; leave it out"),
    ({}, ROOFLINE | {"busy": 1}, "cost: busy is not used by kind 'roofline'; leave it out"),
    ({}, ROOFLINE | {"device": "a1000"}, "cost: unknown device 'a1000'"),
    ({}, ROOFLINE | {"shape": "llama"}, "cost: unknown shape 'llama'"),
    ({}, ROOFLINE | {"dtype": "bf16"}, "cost: unknown dtype 'bf16'"),
    ({}, ROOFLINE | {"device": "v100"}, "cost: dtype must be one of float16, float32"),
    ({}, ROOFLINE | {"tensor_parallel": 3}, "tensor_parallel must divide heads=40, got 3"),
    ({}, ROOFLINE | {"tensor_parallel": 0}, "cost: tensor_parallel must be between 1 and 1024, got 0"),
    ({"sequences": 0}, ROOFLINE, "method: sequences must be between 1 and 100000, got 0"),
    ({}, ROOFLINE | {"prompt": -1}, "cost: prompt must be between 0 and 1000000, got -1"),
    (PPD, ROOFLINE | {"link_s": -1}, "cost: link_s must be between 0 and 1e+06, got -1"),
    (PPD, ROOFLINE | {"dispatch_law": "log"}, "cost: unknown dispatch_law 'log'"),
    ({}, ROOFLINE | {"memory_efficiency": 0}, "cost: memory must be above 0, got 0"),
    ({}, ROOFLINE | {"final_head": 1}, "cost.final_head belongs to costs in layer-times, got it with kind 'roofline'"),
    ({}, ROOFLINE | {"link": 1}, "cost.link belongs to costs in layer-times, got it with kind 'roofline'; use link_s instead"),
    ({}, {"prompt": 5}, "cost.prompt belongs to kinds profile, roofline and engine, got it with kind 'unit'; leave it out"),
    ({}, ROOFLINE | {"devise": 1}, "unknown key cost.devise; did you mean device?"),
    ({}, ROOFLINE | {"draft_shape": "llama-68m"}, "cost.draft_shape is used by no method that it is given for; leave it out"),
    ({"layers": 39}, ROOFLINE, "method.layers must be 40, as in cost, got 39; set it"),
    ({"sequences": 4096}, ROOFLINE, "weights (26.0 GB) and cache ("),
    ({"name": "speculative", "draft_length": 2}, ROOFLINE, "cost.draft_shape is required by method speculative"),
    ({}, ROOFLINE | {"batch": 2}, "unknown key cost.batch; it is now method.sequences"),
    ({"batch": 2}, ROOFLINE, "unknown key method.batch; it is now sequences, with batching = 'continuous'"),
]  # fmt: skip


def test_cost_axis_has_a_column_next_to_a_parameter_of_its_name() -> None:
    """`prompt` is the start of SkipDecode's schedule; `cost.prompt` is the number of cached positions."""
    method = {"name": "skipdecode", "min_layers": 20, "max_layers": 40, "prompt": 4, "sequence_length": 64}
    found = sim.run(scenario(method, ROOFLINE) | {"sweep": {"cost.prompt": [64, 640]}}, out=None, views=["formula"])
    assert found.select("prompt", "cost.prompt").rows() == [(4, 64), (4, 640)]
    assert found["tpot_ms"].is_sorted()
    assert "cost.prompt" not in sim.run(scenario(method, ROOFLINE), out=None, views=["formula"]).columns


@pytest.mark.parametrize(("method", "cost", "message"), BAD, ids=[message[:60] for *_, message in BAD])
def test_bad_input_is_one_line_and_writes_nothing(method: Tables, cost: Tables, message: str, tmp_path: Path) -> None:
    tables = scenario({"name": "autoregressive"} | method, cost, ACCEPT if method.get("name") == "speculative" else None)
    done = CliRunner().invoke(app, ["run", *_written(tables, tmp_path)])
    assert done.exit_code == 2, done.output
    assert message in done.stderr
    assert done.stderr.count("\n") == 1
    assert "Traceback" not in done.output
    assert not (tmp_path / "out").exists()


def test_a_damaged_profile_is_named(measured: Path) -> None:
    measured.with_suffix(".parquet").write_bytes(b"nothing")
    tables = scenario({"name": "autoregressive", "layers": 2}, {"kind": "profile", "profile": str(measured)})
    done = CliRunner().invoke(app, ["run", *_written(tables, measured.parent)])
    assert done.exit_code == 2
    assert "by-hand.json: its table by-hand.parquet is not the one that it was written with" in done.stderr


@pytest.mark.parametrize(
    ("share", "limit"), [(0.0, ""), (0.8, ""), (1.5, "1e+12 at most (memory)"), (1e6, "1e+14 at most (arithmetic)")]
)
def test_own_profile_faster_than_its_device_is_refused(measured: Path, share: float, limit: str) -> None:
    """A layer reads 19 MB at 1e12 bytes/s, which takes 19 us at least; the profile gives a shorter time."""
    made = replace(profile_files.load(measured), cache_bytes=0.0)
    faster = 1.1e-4 / 19e-6 * share
    if share:
        scaled = [pl.col(name) / pl.when(pl.col("part") == "layer").then(faster).otherwise(1.0) for name in profile.TIMES]
        made = replace(made, table=made.table.with_columns(scaled))
    path = profile_files.save(replace(made, name="fast"), measured.parent)
    tables = scenario({"name": "autoregressive", "layers": 2}, {"kind": "profile", "profile": str(path)})
    done = CliRunner().invoke(app, ["run", *_written(tables, measured.parent), "--view", "formula"])
    assert done.exit_code == (2 if limit else 0), done.output
    if limit:
        assert done.stderr.startswith("error: cost: profile: fast.json: layer at width ")
        assert f"reaches {limit}" in done.stderr
        assert done.stderr.count("\n") == 1


def test_bundled_profiles_have_costs_for_every_method() -> None:
    cost = H100 | {"draft_profile": "h100-operations", "draft_shape": "llama-68m"}
    tables = scenario({"name": "speculative", "draft_length": 4}, cost, ACCEPT)
    for row in rows_of(tables):
        assert row["cost_source"].startswith("composed")
        assert 1 < row["speedup"] < (1 - 0.7**5) / 0.3
        plain = step_time(ProfileCosts(profile_files.load("h100-llama-2-13b")), 512 + np.arange(32)).seconds.sum()
        assert row["speedup"] * row["latency_s"] == pytest.approx(float(plain), rel=1e-9)


def test_composed_profile_is_named_by_device_and_model() -> None:
    for role, where in (("target", ""), ("draft", "draft_")):
        cost = HardwareCost(**({"kind": "profile", "profile": "h100-llama-2-13b"} | {  # type: ignore[arg-type]
            f"{where}profile": "h100-operations", f"{where}shape": "llama-68m"}))
        found = cost.of(role)
        assert isinstance(found, ProfileCosts)
        assert (found.profile.name, found.profile.model, found.profile.device) == ("h100-llama-68m", "llama-68m", "h100")


def test_unmeasured_draft_is_estimated_on_the_same_device() -> None:
    method = {"name": "speculative", "draft_length": 4, "layers": 32}
    cost = {"kind": "profile", "profile": "rtx-4090-llama-3.1-8b", "draft_shape": "llama-68m"}
    of = DEVICES["rtx-4090"]
    guessed = Roofline(preset("llama-68m"), of.bandwidth, of.rates["bfloat16"])
    measured = ProfileCosts(profile_files.load("rtx-4090-llama-3.1-8b"))
    ratio = float(step_time(guessed, 528).seconds / step_time(measured, 528).seconds)
    for row in rows_of(scenario(method, cost, ACCEPT)):
        assert row["cost_ratio"] == pytest.approx(ratio)
        assert row["cost_source"].startswith("measured")
        assert "assumed efficiencies of the published peaks of rtx-4090" in row["cost_source"]


def test_unmeasured_parts_are_listed() -> None:
    def missing(cost: Tables, method: Tables | None = None) -> str | None:
        return rows_of(scenario(method or {"name": "autoregressive"}, cost, MATCH if method else None))[0]["cost_missing"]

    assert missing(ROOFLINE) == "step"
    assert missing(H100) == "step"
    reader = {"kind": "profile", "profile": "a40-llama-2-7b"}
    assert missing(reader, {"name": "ppd", "layers": 32, "exit_layer": 16, "candidates": 1}) == "step"
    split = rows_of(scenario({"name": "autoregressive", "layers": 32}, reader | {"tensor_parallel": 2}))[0]
    assert split["cost_missing"] == "step, all_reduce"
    alone = {"kind": "profile", "profile": "rtx-4090-llama-3.1-8b"}
    assert rows_of(scenario({"name": "autoregressive", "layers": 32}, alone))[0]["cost_missing"] is None
    handing = scenario({"name": "ppd", "layers": 32, "exit_layer": 16, "candidates": 1}, alone, MATCH)
    assert rows_of(handing)[0]["cost_missing"] == "send"


def test_batched_candidates_on_two_units_take_the_time_of_many_units() -> None:
    """With measured multi-token passes of an H100; the account of passes is that of the same number of candidates."""
    table = sim.run("ppd-batched", out=None, views=["formula"])
    for k in (3, 5):
        rows = table.filter((pl.col("method") == "ppd") & (pl.col("candidates") == k))
        apart, batched = (rows.row(by_predicate=pl.col("batched") == value, named=True) for value in (False, True))
        assert (apart["reserved_units"], batched["reserved_units"]) == (k + 1, 2)
        assert 1 < batched["speedup"] <= apart["speedup"] < 1.02 * batched["speedup"]
        assert batched["compute_per_token"] < apart["compute_per_token"] / 1.5
        assert batched["match_rate"] == apart["match_rate"]


def test_operations_of_batched_candidates_equal_those_of_many_units() -> None:
    """In every view, and in the vectorised grid."""
    one: Any = {"name": "ppd", "layers": 8, "exit_layer": 5, "candidates": 3}
    for views in (["formula"], ["formula", "paths", "events"]):
        tables = [scenario(one | {"batched": value}, {}, MATCH["match"], tokens=16, views=views) for value in (True, False)]
        tables = [{key: value for key, value in table.items() if key != "cost"} for table in tables]
        batched, apart = (sim.run(table, sweep={"method.exit_layer": [4, 6]}, replications=500) for table in tables)
        for ours, theirs in zip(batched.to_dicts(), apart.to_dicts(), strict=True):
            assert ours["operations_per_token"] == pytest.approx(theirs["operations_per_token"], rel=0.02), ours["view"]
            more = 2 * (8 - ours["exit_layer"]) / 8  # two candidates' layers that cost no unit any time
            assert ours["operations_per_token"] - ours["compute_per_token"] == pytest.approx(more, abs=0.02)


def test_tensor_parallel_scenario_names_the_fastest() -> None:
    table = sim.run("ppd-against-tensor-parallel", out=None, views=["formula"])
    for (name,), part in table.group_by("cost.profile" if "cost.profile" in table.columns else "profile"):
        held = {int(units): group for (units,), group in part.group_by("reserved_units")}
        for units in (2, 4):
            pipelined = held[units].filter(pl.col("method") == "ppd")["speedup_over_one_device"].max()
            split = held[units].filter(pl.col("method") == "autoregressive")["speedup_over_one_device"].max()
            assert split > pipelined > 1, name


def test_verify_cost_is_used_only_by_batched_candidates() -> None:
    one: Any = {"name": "ppd", "layers": 8, "exit_layer": 4, "candidates": 3}
    curve = {"verify_cost": [[1, 1.0], [2, 1.5]]}
    with pytest.raises(ParameterError, match="verify_cost is used by no method that it is given for; leave it out"):
        rows_of(scenario(one, curve, MATCH))
    with pytest.raises(ParameterError, match="verify_cost must reach width 3, the widest pass of method ppd, got 2"):
        rows_of(scenario(one | {"batched": True}, curve, MATCH))
    wide = {"verify_cost": [[1, 1.0], [3, 1.5]]}
    found = [rows_of(scenario(one | {"batched": value}, wide if value else {}, MATCH)) for value in (True, False)]
    slow, quick = (rows[0]["speedup"] for rows in found)
    assert slow < quick
    swept = sim.run(scenario(one, wide, MATCH), views=["formula"], sweep={"method.batched": [True, False]})
    assert swept["speedup"].to_list() == [slow, quick]


@pytest.mark.parametrize("key", ["shape", "draft_shape", "medium_shape"])
def test_invalid_shape_is_named_by_its_key(key: str) -> None:
    with pytest.raises(ParameterError, match=f"unknown {key} 'llama-2-7c'; did you mean llama-2-7b"):
        HardwareCost(**(ROOFLINE | {key: "llama-2-7c"}))
