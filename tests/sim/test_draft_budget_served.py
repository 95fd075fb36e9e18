"""Drafts within a context budget, in `sim serve`, in scenarios of servers and in `sim advise`."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import jsonschema
import polars as pl
import pytest
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from model.serving import fast_server
from model.serving.loads import RequestLengths
from model.serving.records.recorder import Recorder
from sim.advice.advice_schema import schema
from sim.advice.situation import Inputs
from sim.commands.sim_app import app
from sim.engine import serving as events
from sim.serving import load_scenario, study
from sim.serving.draft_placement import DraftPlacement
from sim.serving.study import ServingInputs
from sim.theorems.served_examples import play

SAID = Inputs(model="llama-3.1-8b", gpu="h100", draft="llama-3.2-1b", acceptance=0.7, kernels="roofline")
LONG = RequestLengths(6000, 40, prompt_cv=0.5)
"""Prompts of different lengths: of a batch, some are within a budget and some beyond it."""
SELF = 'self-speculative:{"exit_layer":32,"draft_length":3,"reuse":false,"context_budget":%s,"acceptance":0.8}'
SYSTEM = ["--model", "llama-3.1-8b", "--gpu", "h100", "--acceptance", "0.7"]
DRAFT = ["--draft", "llama-3.2-1b", "--draft-context-budget"]
SERVE = ["serve", *SYSTEM, "--concurrency", "2"]


def inputs(budget: int | None, policies: tuple[str, ...] = ("static:3",), **more: Any) -> ServingInputs:
    kept = {"concurrencies": (8,), "lengths": LONG, "requests": 40, "replications": 2} | more
    return ServingInputs(replace(SAID, draft_context_budget=budget), policies, **kept)


def answer(*words: str) -> dict[str, Any]:
    found = CliRunner().invoke(app, [*words, "--json"])
    assert found.exit_code == 0, found.stderr
    document: dict[str, Any] = json.loads(found.stdout)
    return document


# --- Laws ---


@pytest.mark.parametrize("policy", ["static:3", "goodput", "dspark", "oracle", "schedule", "vllm:[[1,4,3],[5,512,1]]",
                                    'tree:{"shape":"chain","draft_depth":3,"rank_rates":[0.6]}'])  # fmt: skip
def test_a_budget_of_the_whole_context_changes_no_figure(policy: str) -> None:
    whole, limited = (study.serve(inputs(each, (policy,), requests=20)) for each in (None, 100_000))
    assert limited.rows == whole.rows
    assert limited.schedule == whole.schedule
    assert limited.off_from == whole.off_from
    assert limited.settings.num_blocks == whole.settings.num_blocks


@pytest.mark.parametrize("policy", ["static:3", SELF % 700, 'tree:{"shape":"chain","draft_depth":3,"rank_rates":[0.6]}'])
@pytest.mark.parametrize("placement", [DraftPlacement(), DraftPlacement("separate", "20us")], ids=["colocated", "separate"])
def test_events_are_the_loop_with_a_budget(policy: str, placement: DraftPlacement) -> None:
    """To the last bit, with a cache so small that sequences are preempted."""
    policies = ("static:1", policy)
    made = study.plan(inputs(512, policies, placement=placement, num_blocks=1500, lengths=replace(LONG, output=1000)))
    load = study._load(made.inputs, made.loads[0], 30, made.lengths, None, 0)
    found = []
    for drive in (fast_server.serve, events.serve):
        servers = study.servers_of(
            made.settings, made.policies[1], made.prices, load, made.acceptance.point, made.drafter, 1, 0, 0, depth=32
        )
        recorder = Recorder(load)
        drive(load, servers, recorder)
        found.append((recorder.end.tolist(), recorder.first.tolist(), recorder.totals, servers[0].scheduler.preemptions))
    assert found[0] == found[1]
    assert found[0][3] > 0


def test_a_smaller_budget_serves_long_contexts_faster() -> None:
    """Fixed draft lengths and all requests at once: less reading is the only difference."""
    words = [*SERVE, "--draft", "llama-3.2-1b", "--policy", "static:3", "--prompt", "16000", "--output", "100",
             "--requests", "20", "--replications", "0"]  # fmt: skip
    speeds = [answer(*words, *more)["table"][0]["output_tokens_per_s"] for more in (
        [], ["--draft-context-budget", "8000"], ["--draft-context-budget", "512"], ["--draft-context-budget", "1"],
    )]  # fmt: skip
    assert speeds == sorted(speeds)
    assert len({*speeds}) == 4


def test_self_drafts_within_a_budget_take_less_and_share_the_cache() -> None:
    given = {"concurrencies": (8,), "lengths": LONG, "requests": 20, "replications": 0}
    limited, whole = (
        study.plan(ServingInputs(replace(SAID, draft=None), (SELF % each,), **given)) for each in (512, 16_000)
    )
    assert limited.settings.num_blocks == whole.settings.num_blocks  # a model that drafts for itself keeps all positions
    assert limited.settings.draft_context_budget is None
    runs = [each.run(each.runs[0]).figures for each in (limited, whole)]
    assert runs[0]["output_tokens_per_s"] > runs[1]["output_tokens_per_s"]


def test_a_server_limits_each_sequence() -> None:
    """By hand: after prompts of 3 and 12 tokens, two drafted tokens are read within 5 positions.

    A pass of the draft reads 3 + 5 positions in the first round, 4 + 5 in the second and 5 + 5 in the third: nothing is accepted.
    The passes of the target take 1 s, and so does the pass with both prompts.
    """
    x = {
        "requests": [[0, 3, 4], [0, 12, 4]], "per": 1, "seqs": 2, "batched": 32, "block": 4, "spare": None, "lookahead": 0,
        "clients": None, "method": "model, budget", "budget": 5, "draft_length": 2, "outcomes": [0],
        "prices": {"step": 1, "drafting_position": 1},
    }  # fmt: skip
    for generators in (False, True):
        run = play(x, generators=generators)
        assert [each.seconds for each in run.steps] == [1, 1 + 2 * 8, 1 + 2 * 9, 1 + 2 * 10]


def test_drafts_during_the_targets_pass_have_the_budget_too() -> None:
    """On a slow device of its own the draft decides the time of a step, and reads less."""
    apart = {"placement": DraftPlacement("separate", "20us", "l4"), "lengths": RequestLengths(30_000, 300), "replications": 0}
    apart |= {"concurrencies": (2,), "requests": 20}
    whole, limited = (study.serve(inputs(each, ("pearl:4",), **apart)) for each in (None, 512))
    assert limited.rows[0]["output_tokens_per_s"] > 1.05 * whole.rows[0]["output_tokens_per_s"]
    assert limited.rows[0]["tokens_per_step"] == whole.rows[0]["tokens_per_step"]


# --- Memory ---


def test_a_draft_keeps_the_blocks_of_its_budget() -> None:
    """By hand: a sequence of 6,400 positions takes 400 blocks, of which 368 without the draft's share."""
    whole, limited = (study.plan(inputs(each)).settings for each in (None, 512))
    assert limited.num_blocks == whole.num_blocks
    assert (limited.draft_context_budget, whole.draft_context_budget) == (512, None)
    # Llama-3.2-1B has 16 layers of 8 heads of 64 dimensions, Llama-3.1-8B 32 of 8 of 128.
    assert limited.draft_cache_share == pytest.approx(16 * 64 / (16 * 64 + 32 * 128))
    taken = limited.units_for(6400) / limited.block_units
    assert taken == pytest.approx(32 + 368 * (1 - limited.draft_cache_share), rel=1e-3)
    assert whole.units_for(6400) / whole.block_units == 400


def test_more_sequences_run_where_the_cache_limits_them() -> None:
    given = {
        "concurrencies": (20,), "lengths": RequestLengths(16_000, 800), "requests": 60, "replications": 0, "num_blocks": 10_500,
    }  # fmt: skip
    whole, limited = (study.serve(inputs(each, **given)) for each in (None, 512))
    assert limited.rows[0]["mean_running"] > 1.1 * whole.rows[0]["mean_running"]
    limits = [each.settings.memory_of(16_800) for each in (whole, limited)]
    assert limits[0] == 16_800 > limits[1]
    for budget, found, limit in zip((None, 512), (whole, limited), limits, strict=True):
        assert study.plan(inputs(budget, **given)).schedules.fitting(found.workload) == int(10_500 * 16 // limit)


def test_memory_of_a_draft_on_its_own_device() -> None:
    """A small device holds the budgets of all sequences that run, but not their whole contexts."""
    apart = DraftPlacement("separate", "20us", "l4")
    given = {"placement": apart, "max_num_seqs": 64}
    whole, limited = (
        study.plan(replace(of, said=replace(of.said, tensor_parallel=4))) for of in (inputs(each, **given) for each in (None, 512))
    )
    assert whole.settings.num_blocks is not None
    assert limited.settings.num_blocks is not None
    assert limited.settings.num_blocks > whole.settings.num_blocks
    assert limited.settings.draft_cache_share == 0
    assert any("limit both" in note for note in whole.notes)
    assert not any("limit both" in note for note in limited.notes)


# --- Scenarios ---


def test_a_scenario_says_the_same() -> None:
    tables: dict[str, Any] = {
        "scenario": {"name": "budget"}, "load": {"concurrency": 4},
        "system": {"model": "llama-3.1-8b", "gpu": "h100", "draft": "llama-3.2-1b", "acceptance": 0.7, "draft_context_budget": 512},
    }  # fmt: skip
    ((_, found),) = load_scenario.points(tables)
    assert found.said.draft_context_budget == 512
    swept = load_scenario.resolve(tables, sweep=[("system.draft_context_budget", [256, 1024])])
    assert [each.said.draft_context_budget for _, each in load_scenario.points(swept)] == [256, 1024]
    with pytest.raises(ParameterError, match=r"system.draft_context_budget"):
        load_scenario.points({**tables, "system": tables["system"] | {"draft_context_budget": "512"}})


# --- Advice ---


ADVISE = ["advise", *SYSTEM, "--draft", "llama-3.2-1b", "--context", "32000"]


def test_advice_has_the_pass_and_the_sequences_that_fit() -> None:
    whole, limited = answer(*ADVISE), answer(*ADVISE, "--draft-context-budget", "512")
    for each in (whole, limited):
        jsonschema.validate(each, schema())
    assert whole["draft_context_budget"] is None
    budget = limited["draft_context_budget"]
    assert (budget["positions"], budget["context"]) == (512, 32_000)
    assert budget["most_sequences"] > budget["most_sequences_without"]
    now = {row["batch"]: row["now_draft_pass_ms"] for row in limited["break_even"]["by_batch"]}
    before = {row["batch"]: row["now_draft_pass_ms"] for row in whole["break_even"]["by_batch"]}
    for row in budget["by_batch"]:
        assert row["draft_pass_ms"] == pytest.approx(now[row["batch"]])
        assert row["draft_pass_ms_without"] == pytest.approx(before[row["batch"]])
    gains = [{(row["batch"], row["draft_length"]): row["speedup"] for row in each["table"] if row["method"] == "speculative"}
             for each in (whole, limited)]  # fmt: skip
    assert all(gains[1][key] > value for key, value in gains[0].items())


def test_advice_with_the_whole_context_is_that_without_a_budget() -> None:
    whole, limited = answer(*ADVISE), answer(*ADVISE, "--draft-context-budget", "32000")
    assert limited["table"] == whole["table"]
    assert limited["switch_off"] == whole["switch_off"]
    assert limited["draft_context_budget"]["most_sequences"] == limited["draft_context_budget"]["most_sequences_without"]


def test_advice_prints_what_the_budget_does() -> None:
    found = CliRunner().invoke(app, [*ADVISE, "--draft-context-budget", "512"]).stdout
    text = " ".join(found.split())
    assert "draft context budget 512 positions of each sequence; a pass of the draft for" in text
    assert "if the draft keeps all of them" in text
    assert "it falls with the budget, so measure it with one" in text
    assert "budget" not in CliRunner().invoke(app, ADVISE).stdout


def test_maps_and_rates_of_arrivals_know_the_budget() -> None:
    rows = []
    for more in ([], ["--draft-context-budget", "512"]):
        of_map = answer("advise", *SYSTEM, "--draft", "llama-3.2-1b", "--map", "--batch", "4", "--contexts", "16k", *more)
        arriving = answer("advise", *SYSTEM, "--draft", "llama-3.2-1b", "--rate", "0.5", "--prompt", "16000", *more)
        drafts = next(row for row in of_map["table"] if row["method"] == "speculative")
        rows.append((drafts["speedup"], -min(row["tpot_ms"] for row in arriving["arrivals"]["table"])))
    assert all(limited > whole for whole, limited in zip(*rows, strict=True))


# --- Refusals ---


@pytest.mark.parametrize(("options", "said"), [
    ([*DRAFT, "0"], "draft_context_budget must be between 1 and 1000000, got 0"),
    ([*DRAFT, "-5"], "draft_context_budget must be"),
    ([*DRAFT, "2.5"], "2.5"),
    ([*DRAFT, "many"], "many"),
    ([*DRAFT, "200000"], "draft_context_budget must be at most 131072, the context of llama-3.1-8b, got 200000"),
    ([*DRAFT, "9999999999"], "draft_context_budget must be"),
    (["--draft", "llama-68m", "--draft-context-budget", "4096"], "the context of llama-68m"),
    (["--draft-context-budget", "512"], "--draft is required"),
    (["--draft", "eagle3", "--draft-context-budget", "512"], "must be left out with draft eagle3:llama-3.1-8b"),
    (["--draft", "mtp", "--draft-context-budget", "512"], "must be left out with draft mtp:llama-3.1-8b"),
    (["--draft", "medusa", "--draft-context-budget", "512"], "must be left out with draft medusa:llama-3.1-8b"),
])  # fmt: skip
@pytest.mark.parametrize("command", [SERVE, ["advise", *SYSTEM]], ids=["serve", "advise"])
def test_bad_budgets_are_refused_in_one_line(command: list[str], options: list[str], said: str) -> None:
    refused([*command, *options], said)


@pytest.mark.parametrize(("words", "said"), [
    ([*SERVE, *DRAFT, "512", "--policy", "off"], "which policies off do not make"),
    ([*SERVE, *DRAFT, "512", "--policy", 'ngram:{"draft_length":4,"hit_rate":0.4,"acceptance":0.6}'], "is of passes of the draft"),
    ([*SERVE, *DRAFT, "4096", "--max-model-len", "2048"], "draft_context_budget must be between 1 and max_model_len=2048"),
    ([*SERVE, "--policy", SELF % 0], "context_budget must be"),
    ([*SERVE, "--policy", SELF % 200_000], "self-speculative.context_budget must be between 1 and max_model_len=131072"),
    ([*SERVE, "--policy", (SELF % 512).replace("false", "true")], "reuse must be false with context_budget=512"),
    (["serve", "--engine-law", "sglang-qwen3-235b-a22b", "--concurrency", "2", "--draft-context-budget", "512"],
     "must be left out with step law sglang-qwen3-235b-a22b"),
    (["advise", "--engine-law", "sglang-qwen3-235b-a22b", "--draft-context-budget", "512"], "the same time at any context"),
])  # fmt: skip
def test_budgets_without_a_draft_that_has_one_are_refused(words: list[str], said: str) -> None:
    refused(words, said)


def refused(words: list[str], said: str) -> None:
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 2, found.stdout
    assert said in " ".join(found.stderr.split())
    assert len(found.stderr.strip().splitlines()) == 1, found.stderr


def test_bundled_scenario_shows_what_the_budget_saves() -> None:
    less = {"load.concurrency": [15], "load.requests": 30, "scenario.replications": 0}
    table = sim.run("serving-long-context", set=less)
    assert table["system.draft_context_budget"].unique().sort().to_list() == [512, 4096, 40_000]
    by_policy = {
        name: table.filter(pl.col("policy").str.starts_with(name))["output_tokens_per_s"].to_list()
        for name in ("off", "static", "self")
    }
    # The draft model's passes take longer with the budget; only memory changes for policies without it.
    assert by_policy["static"] == sorted(by_policy["static"], reverse=True)
    assert by_policy["static"][0] > 1.1 * by_policy["static"][2]
    assert by_policy["off"][0] == by_policy["off"][1] >= by_policy["off"][2]
    assert by_policy["self"][0] == by_policy["self"][1]
    assert all(own > plain for own, plain in zip(by_policy["self"], by_policy["off"], strict=True))
