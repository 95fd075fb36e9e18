"""A draft on a device of its own under load: what leaves the target, what it costs, and what is refused in one line."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from typer.testing import CliRunner

from model.costs.layer_times import UnitCost
from model.methods.pearl import finite_pearl
from model.outcomes.outcome_laws import Iid
from model.serving.closed_form import ClosedForm, Workload
from model.serving.loads import RequestLengths
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


# --- Drafts during the target's passes ---


def test_acceptance_of_the_first_token_holds_at_every_position_of_concurrent_drafts() -> None:
    said = replace(SAID, acceptance=None, acceptance_by_position=(0.8, 0.6, 0.4, 0.2))
    apart = DraftPlacement("separate", "20us")
    falling, constant = (
        study.serve(ServingInputs(each, ("pearl:4",), concurrencies=(4,), requests=40, replications=0, placement=apart))
        for each in (said, replace(SAID, acceptance=0.8))
    )
    assert falling.rows[0]["tokens_per_step"] == constant.rows[0]["tokens_per_step"]
    assert any("0.8" in note and "every position" in note for note in falling.notes)
    assert not any("every position" in note for note in constant.notes)


def test_tokens_per_step_are_those_of_rounds_in_the_long_run() -> None:
    """One client: tokens per round as the closed form of PEARL, within the spread of 400 outputs (4 sd)."""
    rate, length, output = 0.8, 4, 256
    found = study.serve(ServingInputs(
        replace(SAID, acceptance=rate), (f"pearl:{length}",), concurrencies=(1,), requests=400, replications=0,
        lengths=RequestLengths(64, output), placement=DraftPlacement("separate", "20us"),
    ))  # fmt: skip
    exact = finite_pearl.moments(length, output - 1, Iid(rate), UnitCost(1, cost_ratio=0.1))  # the prompt gives one
    spread = 4 * output / exact.rounds * 0.03 / 400**0.5
    assert found.rows[0]["tokens_per_step"] == pytest.approx((output - 1) / exact.rounds, abs=spread)


@pytest.mark.parametrize(("policy", "placement", "said"), [
    ("pearl:4", [], "--placement must be separate with policy pearl:4"),
    ("pearl", ["--placement", "separate", "--link", "1us"], "pearl:K"),
    ("pearl:0", ["--placement", "separate", "--link", "1us"], "at least 1"),
    ("pearl:126", ["--placement", "separate", "--link", "1us"], "between 1 and 125"),
    ("pearl:x", ["--placement", "separate", "--link", "1us"], "whole number"),
    ("pearl:4", ["--placement", "separate", "--link", "1us", "--max-num-batched-tokens", "4"], "max_num_batched_tokens"),
    ("pearl:4", ["--placement", "separate", "--link", "1us", "--num-blocks", "1"], "blocks"),
    ("ppd:4", ["--placement", "separate", "--link", "1us"], "servers do not decode it"),
])  # fmt: skip
def test_refusals_of_concurrent_drafts(policy: str, placement: list[str], said: str) -> None:
    found = CliRunner().invoke(app, [*OPTIONS, "--draft", "llama-3.2-1b", "--policy", policy, *placement])
    assert found.exit_code == 2
    assert said in " ".join(found.stderr.split())
    assert "Traceback" not in found.stderr
