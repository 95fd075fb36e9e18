"""A draft on a device of its own under load: what leaves the target, what it costs, and what is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from model.serving.closed_form import ClosedForm, Workload
from model.serving.step_prices import DraftDevice, LawPrices
from sim.advice.situation import Inputs
from sim.commands.sim_app import app
from sim.serving import load_scenario, study
from sim.serving.draft_placement import DraftPlacement
from sim.serving.study import ServingInputs

SAID = Inputs(model="llama-3.1-8b", gpu="h100", draft="llama-3.2-1b", acceptance=0.7)
SYSTEM = {"model": "llama-3.1-8b", "gpu": "h100", "draft": "llama-3.2-1b", "acceptance": 0.7}
OPTIONS = ["serve", "--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7", "--concurrency", "2"]


def planned(**placement: Any) -> study.StudyPlan:
    return study.plan(ServingInputs(
        SAID, ("off", "static:2"), concurrencies=(4,), requests=40, replications=0, placement=DraftPlacement(**placement)
    ))  # fmt: skip


def test_weights_and_cache_of_the_draft_leave_the_targets_memory() -> None:
    with_target, apart = planned(), planned(placement="separate", link="20us")
    assert with_target.settings.num_blocks is not None
    assert apart.settings.num_blocks is not None
    assert apart.settings.num_blocks > with_target.settings.num_blocks
    assert (with_target.settings.lookahead, apart.settings.lookahead) == (1, 0)


def test_a_step_that_drafts_has_two_transfers_more_in_closed_form() -> None:
    plain, apart = planned(), planned(placement="separate", link="2ms")
    workload = Workload(100.0, 50.0)
    for running in (1, 8):
        for length, links in ((0, 0.0), (2, 4e-3)):
            seconds = [ClosedForm(of.prices, 1.0, length, length, workload).round_seconds(running) for of in (plain, apart)]
            assert seconds[1] - seconds[0] == pytest.approx(links, abs=1e-12)


def test_rows_count_the_drafts_device_and_its_time() -> None:
    found = study.serve(planned(placement="separate", link="20us").inputs)
    off, drafting = found.rows
    assert (off["gpus"], off["draft_utilization"]) == (1, None)
    assert drafting["gpus"] == 2
    assert drafting["output_tokens_per_s_per_gpu"] == drafting["output_tokens_per_s"] / 2
    # Draft and target take turns, with two transfers in between.
    assert 0 < drafting["draft_utilization"] < 1 - drafting["utilization"]
    assert any("2 GPUs" in note for note in found.notes)
    assert {"draft device", "link"} <= {each.input for each in found.rests_on}


def test_a_draft_takes_the_time_of_its_own_device() -> None:
    """A device with less bandwidth takes longer; the target's prices stay."""
    same, other = (planned(placement="separate", link="20us", **more).prices for more in ({}, {"gpu": "l4"}))
    assert other.draft(4, 4000) > same.draft(4, 4000)
    assert other.own_device is not None
    assert other.own_device.kernels is not None
    explicit = LawPrices(same.law, own_device=DraftDevice(2e-5, replace(other.own_device.kernels, gpu="h100")))
    assert explicit.draft(4, 4000) == pytest.approx(same.draft(4, 4000))


def test_a_scenario_says_the_same() -> None:
    tables: dict[str, Any] = {
        "scenario": {"name": "apart"}, "system": SYSTEM | {"placement": "separate", "link": "20us", "draft_gpu": "h200"},
        "load": {"concurrency": 4}, "server": {},
    }  # fmt: skip
    ((_, inputs),) = load_scenario.points(tables)
    assert inputs.placement == DraftPlacement("separate", "20us", "h200")


@pytest.mark.parametrize(("options", "said"), [
    (["--draft", "llama-3.2-1b", "--link", "20us"], "--link is of a draft on a device of its own"),
    (["--draft", "llama-3.2-1b", "--draft-gpu", "h100"], "--draft-gpu is of a draft on a device of its own"),
    (["--draft", "llama-3.2-1b", "--placement", "separate"], "--link is required"),
    (["--draft", "llama-3.2-1b", "--placement", "separate", "--link", "-1us"], "link must be a time of at least 0"),
    (["--draft", "llama-3.2-1b", "--placement", "separate", "--link", "20"], "link must be a time of at least 0"),
    (["--draft", "llama-3.2-1b", "--placement", "elsewhere", "--link", "20us"], "unknown placement"),
    (["--draft", "eagle3", "--placement", "separate", "--link", "20us"], "which reads the target's states"),
    (["--placement", "separate", "--link", "20us"], "--draft is required"),
    (["--draft", "llama-3.2-1b", "--placement", "separate", "--link", "1us", "--draft-gpu", "h1000"], "h1000"),
])  # fmt: skip
def test_refusals(options: list[str], said: str) -> None:
    found = CliRunner().invoke(app, [*OPTIONS, *options])
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr


def test_placement_link_and_device_change_the_times_of_drafts() -> None:
    speeds = []
    for more in ([], *(["--placement", "separate", *rest] for rest in (
        ["--link", "20us"], ["--link", "2ms"], ["--link", "20us", "--draft-gpu", "l4"],
    ))):  # fmt: skip
        words = [*OPTIONS, "--draft", "llama-3.2-1b", "--policy", "static:2", "--requests", "40", "--replications", "0", "--json"]
        found = CliRunner().invoke(app, [*words, *more])
        assert found.exit_code == 0
        speeds.append(json.loads(found.stdout)["table"][0]["output_tokens_per_s"])
    colocated, near, far, slow = speeds
    assert colocated > near > far
    assert near > slow
