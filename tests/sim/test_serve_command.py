"""`sim serve`, its traces and its policies: what users see, and what is refused."""

from __future__ import annotations

import json
import math
import re
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from model.base.checks import ParameterError
from model.serving.records import measures
from model.serving.records.recorder import Recorder
from sim.commands.sim_app import app
from sim.serving import policies, study, study_results, traces
from tests.support.serving import trace

LAW = ("--engine-law", "vllm-llama-3.1-8b-eagle3-h100")
QUICK = ("--requests", "20", "--replications", "2", "--prompt", "64", "--output", "16")


def called(*words: str) -> tuple[int, str, str]:
    done = CliRunner().invoke(app, ["serve", *words])
    return done.exit_code, done.stdout, done.stderr


def document(*words: str) -> dict[str, Any]:
    code, out, error = called(*words, "--json")
    assert (code, [line for line in error.splitlines() if not line.endswith(" ...")]) == (0, [])  # a busy machine tells progress
    found: dict[str, Any] = json.loads(out)
    return found


def test_rows_have_the_figures_of_each_load_and_policy() -> None:
    found = document(
        *LAW, *QUICK, "--rate", "2,50", "--policy", "off", "--policy", "static:2", "--policy", "vllm:[[1,2,3],[3,99,0]]"
    )
    rows = found["table"]
    assert [(row["rate"], row["policy"]) for row in rows] == [
        (rate, policy) for rate in (2, 50) for policy in ("off", "static:2", "vllm:[[1,2,3],[3,99,0]]")
    ]
    for row in rows:
        for name in study_results.SPREAD:
            assert row[f"{name}_low"] <= row[name] <= row[f"{name}_high"], name
        for name in measures.TIMES:
            assert row[f"p50_{name}_ms"] <= row[f"p90_{name}_ms"] <= row[f"p99_{name}_ms"]
        assert row["mean_e2e_ms"] == pytest.approx(row["mean_ttft_ms"] + 15 * row["mean_tpot_ms"])
        # A token takes a gap, or a share of one that it came in with others.
        assert row["mean_tpot_ms"] <= 1.002 * row["mean_itl_ms"]
        assert row["stable"] in (True, False)
        assert 0 < row["mean_running"] <= 20
        assert 0 <= row["kv_utilization"] <= 1
    assert [row["mean_draft_length"] for row in rows[:2]] == [0, 2]
    assert found["verdict"]
    assert {"value", "source", "kind", "input"} == {*found["rests_on"][0]}


def test_clients_keep_as_many_requests_running() -> None:
    rows = document(*LAW, *QUICK, "--concurrency", "1,4", "--policy", "off")["table"]
    assert [row["concurrency"] for row in rows] == [1, 4]
    for row in rows:
        # Little: requests in the system = throughput x time of a request.
        assert row["requests_per_s"] * row["mean_e2e_ms"] / 1e3 == pytest.approx(row["concurrency"], rel=0.1)


def test_the_same_seed_gives_the_same_numbers_and_others_differ() -> None:
    words = (*LAW, *QUICK, "--rate", "20", "--policy", "static:3", "--output-cv", "0.5")
    one, again, other = (document(*words, "--seed", seed)["table"] for seed in ("1", "1", "2"))
    assert one == again
    assert one[0]["mean_e2e_ms"] != other[0]["mean_e2e_ms"]


def test_requests_and_their_order_do_not_depend_on_the_policy() -> None:
    rows = document(*LAW, *QUICK, "--rate", "0.5", "--policy", "off", "--policy", "sglang")["table"]
    assert rows[0]["requests_per_s"] == pytest.approx(rows[1]["requests_per_s"], rel=0.05)


def test_settings_reach_the_server() -> None:
    many = document(*LAW, *QUICK, "--concurrency", "20", "--policy", "off")
    few = document(*LAW, *QUICK, "--concurrency", "20", "--policy", "off", "--max-num-seqs", "2")
    assert few["table"][0]["mean_running"] <= 2 < many["table"][0]["mean_running"]
    tight = document(
        *LAW, *QUICK, "--concurrency", "20", "--policy", "off", "--num-blocks", "12", "--block-size", "8",
        "--max-num-batched-tokens", "32", "--chunked-prefill",
    )  # fmt: skip
    assert tight["settings"]["num_blocks"] == 12
    assert tight["settings"]["block_size"] == 8
    assert tight["table"][0]["kv_utilization"] > 0.5
    crowded = (*LAW, *QUICK, "--concurrency", "20", "--policy", "off", "--num-blocks", "12", "--block-size", "8",
               "--max-num-batched-tokens", "8")  # fmt: skip
    whole, first = (document(*crowded, each)["table"][0] for each in ("--reserve-prompts", "--reserve-chunks"))
    assert whole["preemptions"] < first["preemptions"]
    assert whole["mean_running"] < first["mean_running"]
    two = document(*LAW, *QUICK, "--rate", "200", "--policy", "off", "--replicas", "2", "--router", "round-robin")
    one = document(*LAW, *QUICK, "--rate", "200", "--policy", "off")
    assert two["table"][0]["mean_e2e_ms"] < one["table"][0]["mean_e2e_ms"]
    slow = document(*LAW, *QUICK, "--rate", "20", "--policy", "off", "--slo-tpot", "1ms", "--slo-ttft", "1s")
    fast = document(*LAW, *QUICK, "--rate", "20", "--policy", "off", "--slo-tpot", "1s")
    assert slow["table"][0]["requests_per_s_within_slo"] == 0 < fast["table"][0]["requests_per_s_within_slo"]
    assert fast["table"][0]["requests_per_s_within_slo"] == pytest.approx(fast["table"][0]["requests_per_s"])


KERNELS = (
    "--model", "llama-3.1-8b", "--gpu", "h100", "--draft", "eagle3", "--acceptance", "0.6", "--concurrency", "8",
    "--policy", "static:2",
)  # fmt: skip


@pytest.mark.parametrize("words", [
    ("--model", "llama-2-7b"), ("--gpu", "a100"), ("--tensor-parallel", "2"), ("--draft", "llama-3.2-1b"), ("--engine", "vllm"),
    ("--acceptance", "0.9"), ("--dtype", "float16", "--kernels", "roofline"), ("--weights", "int4", "--kernels", "roofline"),
    ("--kernels", "roofline"), ("--prompt", "640"), ("--output", "32"), ("--prompt-cv", "1"), ("--output-cv", "1"),
    ("--seed", "5"),
])  # fmt: skip
def test_every_input_changes_the_answer(words: tuple[str, ...]) -> None:
    few = ("--requests", "20", "--replications", "0", "--prompt", "64", "--output", "16")
    base = document(*KERNELS, *few)
    merged = dict(zip((*KERNELS, *few)[::2], (*KERNELS, *few)[1::2], strict=True)) | dict(zip(words[::2], words[1::2], strict=True))
    if "llama-2-7b" in words:
        merged["--draft"] = "llama-68m"
    assert document(*[word for pair in merged.items() for word in pair])["table"] != base["table"]


def test_the_engines_own_work_may_overlap_with_passes() -> None:
    """Priors of an engine add its own time to each pass, or hide it under the passes; a fitted law knows no such part."""
    words = (*KERNELS, "--engine", "vllm", "--requests", "20", "--replications", "0")
    after, during = (document(*words, *more)["table"][0] for more in ((), ("--async-scheduling",)))
    kernels = document(*KERNELS, "--engine", "none", "--requests", "20", "--replications", "0")["table"][0]
    assert kernels["mean_tpot_ms"] <= during["mean_tpot_ms"] < after["mean_tpot_ms"]
    code, _, error = called(*LAW, *QUICK, "--rate", "2", "--async-scheduling")
    assert code == 2
    assert "async_scheduling must be left out" in error


def test_acceptance_of_a_log_and_by_position(tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    log.write_text(
        "INFO SpecDecoding metrics: Mean acceptance length: 2.50, Accepted throughput: 75.00 tokens/s, Drafted throughput: 100.00"
        " tokens/s, Accepted: 750 tokens, Drafted: 1000 tokens, Per-position acceptance rate: 0.850, 0.650, Avg Draft acceptance"
        " rate: 75.0%\n"
    )
    words = (*LAW, *QUICK, "--concurrency", "2", "--policy", "static:2")
    found = document(*words, "--log", str(log), "--log-draft-length", "2")
    steps = found["table"][0]["tokens_per_step"]
    by_position = document(*words, "--acceptance-by-position", "0.85,0.7647")
    assert any(row["input"] == "acceptance" and row["kind"] == "measured" for row in found["rests_on"])
    assert steps == pytest.approx(by_position["table"][0]["tokens_per_step"], rel=0.02)


def test_bursts_make_requests_wait() -> None:
    words = (
        *LAW,
        "--requests",
        "150",
        "--replications",
        "0",
        "--prompt",
        "64",
        "--output",
        "32",
        "--rate",
        "30",
        "--policy",
        "off",
    )
    words = (*words, "--max-num-seqs", "4")
    even, bursts = (document(*words, "--burstiness", each)["table"][0]["mean_ttft_ms"] for each in ("0", "4"))
    assert bursts > 1.5 * even


def test_the_schedule_is_printed_as_lines_of_an_engine() -> None:
    code, out, error = called(*LAW, *QUICK, "--rate", "2", "--policy", "static:3", "--settings", "vllm")
    assert (code, error) == (0, "")
    assert "vllm serve" in out
    assert "num_speculative_tokens" in out
    words = ("--concurrency", "2", "--policy", "off", "--policy", "sglang", "--policy", "oracle", "--settings", "vllm")
    _, out, _ = called(*LAW, *QUICK, *words)
    assert re.search(r"tokens per second of this schedule: \d\S*x \(80 % .*\) of off, \d\S*x \(80 % .*\) of sglang\n", out)
    assert "oracle" not in out


def test_the_screen_names_the_best_and_what_it_rests_on() -> None:
    code, out, error = called(*LAW, *QUICK, "--rate", "2", "--acceptance", "0.5..0.7")
    assert (code, error) == (0, "")
    for words in ("is best at 2/s", "goodput", "rests on", "acceptance 0.5 to 0.7", "in closed form"):
        assert words in out


def test_a_trace_is_served_at_its_times_and_at_other_rates(tmp_path: Path) -> None:
    rows = ["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"2023-11-16 18:15:{at:02d}.5000000,64,16" for at in range(0, 40, 2))]
    path = tmp_path / "trace.csv"
    path.write_text("\n".join(rows) + "\n")
    own, fast = (
        document(*LAW, "--trace", str(path), *more, "--policy", "off", "--replications", "0")["table"][0]
        for more in ((), ("--rate", "5"))
    )
    assert (own["rate"], fast["rate"]) == (pytest.approx(0.5), 5)
    assert own["mean_running"] < fast["mean_running"]


@pytest.mark.parametrize(("words", "message"), [
    ((), "a load is needed"), (("--rate", "1", "--concurrency", "2"), "got both; leave one out"),
    (("--rate", "0"), "rate must be between"), (("--rate", "x"), "rate must be comma-separated numbers"),
    (("--concurrency", "0"), "concurrency must be"), (("--rate", "1", "--policy", "best"), "policy must be one of"),
    (("--rate", "1", "--policy", "static:0"), "the draft length must be a whole number of at least 1"),
    (("--rate", "1", "--policy", "static:x"), "the draft length must be a whole number"),
    (("--rate", "1", "--policy", "vllm:[[1,4,3],[6,9,0]]"), "must begin at 5, got 6: it leaves a gap"),
    (("--rate", "1", "--policy", "vllm:[[1,4,3],[4,9,0]]"), "it overlaps"),
    (("--rate", "1", "--policy", "vllm:[[65,512,0],[1,64,3]]"), "policy 'vllm:[[65,512,0],[1,64,3]]': range 1 of a schedule must"),
    (("--rate", "1", "--policy", "vllm:x"), "it must be JSON"),
    (("--rate", "1", "--policy", 'sglang:{"1":[3,1]}'), "policy 'sglang:{\"1\":[3,1]}': candidates of slot 1 must increase"),
    (("--rate", "1", "--perfetto", "steps.png"), "ends in one of .json, .json.gz, got 'steps.png'"),
    (("--rate", "1", "--policy", "sglang:[1]"), "it must be an object of lists"),
    (("--rate", "1", "--policy", "off", "--policy", "off"), "each policy must be given once"),
    (("--rate", "1", "--requests", "3"), "requests must be between 20"), (("--rate", "1", "--replicas", "0"), "replicas must be"),
    (("--rate", "1", "--router", "best"), "unknown router 'best'"),
    (("--rate", "1", "--max-num-seqs", "0"), "max_num_seqs must be"),
    (("--rate", "1", "--num-blocks", "3"), "num_blocks must be at least 81 of 16 positions, for a prompt of 1024 with its output"),
    (("--rate", "1", "--prompt", "131000", "--output", "73"), "max_model_len must be at least 131073, a prompt of 131000"),
    (("--rate", "1", "--max-model-len", "1"), "max_model_len must be between 2"),
    (("--rate", "1", "--prompt", "0"), "prompt must be between 1"),
    (("--rate", "1", "--output", "-4"), "output must be between 1"),
    (("--rate", "1", "--output", "1"), "output must be between 2"),
    (("--rate", "1", "--policy", "static:²"), "the draft length must be a whole number"),
    (("--rate", "1", "--policy", f"goodput:{'9' * 5000}"), "the draft length must be a whole number"),
    (("--rate", "1", "--policy", 'sglang:{"²":[1]}'), "it must be an object of lists"),
    (("--rate", "1", "--policy", "OFF"), "policy must be one of: off, plain decoding; static:K"),
    (("--rate", "1", "--burstiness", "1e-200"), "burstiness must be"), (("--rate", "1", "-o", "."), "must be the name of files"),
    (("--concurrency", "2", "--burstiness", "2"), "burstiness is of arrivals at a --rate"),
    (("--rate", "1", "--kernels", "xxx"), "unknown kernels 'xxx'"),
    (("--rate", "1", "--kernels", "roofline"), "--kernels are those"),
    (("--rate", "1", "--log-draft-length", "3"), "--log-draft-length is of a --log"),
    (("--rate", "1", "--prompt", "1000000"), "prompt and output must have at most"),
    (("--rate", "1", "--burstiness", "-1"), "burstiness must be"),
    (("--rate", "1", "--slo-ttft", "5"), "slo_ttft must be a time"),
    (("--rate", "1", "--acceptance", "0.5,0.7"), "one value or one range"),
    (("--trace", "none.csv"), "trace 'none.csv' cannot be read: No such"),
    (("--rate", "1", "--acceptance-by-position", "0.5", "--policy", "static:3"), "acceptance is known up to 1"),
    (("--rate", "1", "--settings", "tgi"), "unknown settings 'tgi'"),
    (("--rate", "1", "--prompt", "5000", "--whole-prompts", "--max-num-batched-tokens", "4096"), "max_num_batched_tokens must be"),
])  # fmt: skip
def test_impossible_options_are_refused_in_one_line(words: tuple[str, ...], message: str) -> None:
    code, out, error = called(*LAW, *words)
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert message in error


# --- Traces ---

HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
GOOD = "2023-11-16 18:15:46.6805900,374,44"


def read(folder: Path, text: str, name: str = "t.csv") -> traces.Trace:
    path = folder / name
    path.write_text(text)
    return traces.read(path)


def test_forms_of_traces_give_the_same_requests(tmp_path: Path) -> None:
    azure = read(tmp_path, f"{HEADER}\n{GOOD}\n2023-11-16 18:15:47.9305900,10,2\n")

    def lines(times: tuple[float, float], prompt: str, output: str, time: str) -> str:
        rows = ({time: at, prompt: one, output: other} for at, one, other in zip(times, (374, 10), (44, 2), strict=True))
        return "".join(json.dumps(row) + "\n" for row in rows)

    bench = read(tmp_path, lines((5.0, 6.25), "prompt_len", "output_len", "start_time"), "b.jsonl")
    mooncake = read(tmp_path, lines((0, 1250), "input_length", "output_length", "timestamp"), "m.jsonl")
    for each in (azure, bench, mooncake):
        assert each.requests.arrivals.tolist() == pytest.approx([0.0, 1.25])
        assert (each.requests.prompts.tolist(), each.requests.outputs.tolist()) == ([374, 10], [44, 2])
    turns = [{"from": "human", "value": "x" * 400}, {"from": "gpt", "value": "y" * 82}]
    talks = read(tmp_path, json.dumps([{"conversations": turns}]), "s.json")
    assert (talks.requests.prompts.tolist(), talks.requests.outputs.tolist()) == ([100], [20])
    assert math.isnan(talks.requests.arrivals[0])
    assert "assumed" in talks.notes[0]
    custom = read(tmp_path, json.dumps({"prompt": "x" * 400, "output_tokens": 20}) + "\n", "v.jsonl")  # of `vllm bench`
    assert (custom.requests.prompts.tolist(), custom.requests.outputs.tolist()) == ([100], [20])
    assert custom.notes == ("tokens of prompts: 4 characters each are assumed",)


def test_short_conversations_are_left_out_and_counted(tmp_path: Path) -> None:
    turn = {"from": "human", "value": "x" * 8}
    talks = [[], [turn], [turn, turn], [turn, turn | {"value": ""}], [turn, turn | {"value": "y" * 40}, turn]]
    found = read(tmp_path, json.dumps([{"id": str(each), "conversations": turns} for each, turns in enumerate(talks)]), "s.json")
    assert (found.requests.prompts.tolist(), found.requests.outputs.tolist()) == ([2, 2], [2, 10])
    assert found.notes[-1] == "3 conversations of fewer than two turns with text are left out, as benchmarks do"


@pytest.mark.parametrize(("text", "name", "message"), [
    (f"{HEADER}\n2023-11-16 18:15:46.1,5,5\n2023-11-16 18:15:45.1,5,5\n", "t.csv", "row 3: arrivals must not decrease"),
    (f"{HEADER}\n2023-11-16 18:15:46.1,-5,5\n", "t.csv", "row 2: ContextTokens must be a whole number between 1"),
    (f"{HEADER}\n2023-11-16 18:15:46.1,5,0\n", "t.csv", "row 2: GeneratedTokens must be"),
    (f"{HEADER}\n2023-11-16 18:15:46.1,5.5,2\n", "t.csv", "row 2: ContextTokens must be"),
    (f"{HEADER}\nyesterday,5,5\n", "t.csv", "row 2: TIMESTAMP must be a time"), (f"{HEADER}\n", "t.csv", "has no requests"),
    (f"{HEADER}\n{GOOD}\n,5,5\n", "t.csv", "row 3: TIMESTAMP must be a time"),
    (f"{HEADER}\n{GOOD}\n2023-11-16 18:15:47,5\n", "t.csv", "row 3: GeneratedTokens must be a whole number between 1 and"),
    (f"{HEADER}\n{GOOD}\n2023-11-16 18:15:47,5,5,7\n", "t.csv", "row 3: it must have at most 3 values, one for each column, got 4"),
    (f"{HEADER}\n0,5,5\n1e300,5,5\n", "t.csv", "row 3: an arrival must be at most 1e+10 s after the first, got 1e+300 s"),
    ("a,b\n1,2\n", "t.csv", "row 2: the tokens of a prompt are missing"), ("", "t.csv", "has no requests"),
    ("TIMESTAMP,ContextTokens\n1,2\n", "t.csv", "the tokens of an output are missing"),
    ('{"prompt_len": 4}\n', "t.jsonl", "line 1: the tokens of an output are missing"),
    ("nonsense\n", "t.jsonl", "line 1: it is no JSON"),
    ("[1]", "t.json", "entry 1: a request must be a JSON object"),
    ('{"prompt_len": true, "output_len": 3}\n', "t.jsonl", "prompt_len must be"),
    ('{"prompt_len": null, "output_len": 3}\n', "t.jsonl", "1000000, got nothing"),
    (f'{{"prompt_len": {"9" * 400}, "output_len": 3}}\n', "t.jsonl", "line 1: prompt_len must be a whole number"),
    (f'{{"prompt_len": 3, "output_len": 3, "arrival_s": {"9" * 400}}}\n', "t.jsonl", "line 1: arrival_s must be a time"),
    ('{"prompt": "", "output_tokens": 3}\n', "t.jsonl", "line 1: the tokens of a prompt are missing"),
    ('[{"conversations": []}]', "t.json", "t.json has no requests: its 1 conversations have fewer than two turns"),
    ('{"prompt_len": 3, "output_len": 3}\n{"prompt_len": 3, "output_len": 3, "arrival_time": 3}\n',
     "t.jsonl", "line 2: it has an arrival"),
    ('{"prompt_len": 3, "output_len": 3, "arrival_time": 3}\n{"prompt_len": 3, "output_len": 3}\n',
     "t.jsonl", "line 2: an arrival is missing"),
])  # fmt: skip
def test_bad_traces_name_row_and_column(tmp_path: Path, text: str, name: str, message: str) -> None:
    with pytest.raises(ParameterError) as refused:
        read(tmp_path, text, name)
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_trace_without_arrivals_needs_clients(tmp_path: Path) -> None:
    (tmp_path / "t.jsonl").write_text('{"prompt_len": 30, "output_len": 8}\n' * 20)
    code, _, error = called(*LAW, "--trace", str(tmp_path / "t.jsonl"))
    assert (code, "has no arrivals" in error) == (2, True)


# --- Policies and measures ---


@given(st.text(max_size=20))
def test_any_name_of_a_policy_is_read_or_refused(text: str) -> None:
    try:
        policies.named(text)
    except ParameterError as error:
        assert "\n" not in str(error)  # noqa: PT017


def test_a_transient_is_cut_where_it_ends() -> None:
    """MSER-5 on a series whose mean falls from 10 to 1 after 60 of 600 observations, with noise."""
    random = np.random.default_rng(2)
    series = np.where(np.arange(600) < 60, 10.0, 1.0) + random.normal(0, 0.3, 600)
    assert 60 <= measures.truncation(series) <= 80
    assert measures.truncation(random.normal(0, 1, 600)) <= 300
    assert measures.truncation(np.ones(7)) == 0
    # Equal requests, of which rounding makes unequal ones: what is left out does not depend on it.
    alike = [np.full(60, 1 / 3) * (1 + 1e-14 * random.normal(size=60)) for _ in range(20)]
    assert {measures.truncation(each) for each in alike} == {0}


def test_a_growing_queue_is_called_unstable() -> None:
    load = trace(np.arange(200.0), [1] * 200, [1] * 200)
    steady, growing = Recorder(load), Recorder(load)
    for each, service in ((steady, 0.5), (growing, 2.0)):
        end = 0.0
        for number in range(200):
            each.arrival[number] = number
            end = max(end, number) + service
            each.first[number] = each.end[number] = end
    assert (measures.stable(steady), measures.stable(growing)) == (True, False)


@given(st.floats(0.1, 10), st.lists(st.floats(0.1, 10), min_size=2, max_size=6))
def test_an_interval_holds_its_value(value: float, drawn: list[float]) -> None:
    low, high = study_results.interval(value, drawn)
    assert low <= value <= high
    assert low <= np.exp(np.log(drawn).mean()) <= high * (1 + 1e-9)


def test_overload_shows_the_capacity_at_every_rate() -> None:
    """Arrivals end long before their tokens are generated: the measured time is one of ends."""
    own = "--engine-law", "sglang-qwen3-235b-a22b", "--prompt", "1000", "--output", "250"
    rows = document(*own, "--rate", "20,100", "--replications", "0", "--policy", "off")["table"]
    speeds = [row["output_tokens_per_s"] for row in rows]
    assert [row["stable"] for row in rows] == [False, False]
    assert speeds[0] == pytest.approx(speeds[1], rel=0.05)
    at_once = document(*LAW, *QUICK, "--rate", "1000000", "--policy", "off")["table"][0]
    assert at_once["output_tokens_per_s"] == pytest.approx(at_once["mean_running"] * 1e3 / at_once["mean_itl_ms"], rel=0.3)


def test_columns_agree_by_littles_law() -> None:
    [row] = document(*LAW, "--rate", "14", "--prompt", "500", "--output", "100", "--output-cv", "2", "--replications", "0",
                     "--policy", "off", "--requests", "2000")["table"]  # fmt: skip
    assert row["mean_running"] == pytest.approx(row["requests_per_s"] * row["mean_e2e_ms"] / 1e3, rel=0.1)


def test_shares_are_those_of_all_replicas() -> None:
    words = (*LAW, *QUICK, "--rate", "20", "--num-blocks", "200", "--policy", "off")
    [one], [eight] = (document(*words, "--replicas", count)["table"] for count in ("2", "8"))
    assert 0 < eight["utilization"] <= 1
    assert 0 < eight["kv_utilization"] < one["kv_utilization"] <= 1


def test_too_few_requests_are_noted() -> None:
    few = document(*LAW, "--rate", "14", "--requests", "40", "--replications", "0", "--policy", "off")
    assert any("too few for a steady state" in note for note in few["notes"])
    enough = document(*LAW, "--rate", "0.5", "--requests", "200", "--replications", "0", "--policy", "off")
    assert not any("too few" in note for note in enough["notes"])


def test_the_closed_form_stops_where_the_cache_is_full() -> None:
    found = document(*LAW, *QUICK, "--rate", "5", "--num-blocks", "30", "--prompt", "100", "--output", "20", "--policy", "static:1")
    assert [row["running"] for row in found["schedule"]] == [1, 2, 3, 4]  # 480 positions, and 120 of each request
    assert "up to 4 running sequences, the most that the cache holds" in found["verdict"]


def test_requests_beyond_the_context_are_refused_before_any_runs(tmp_path: Path) -> None:
    """The model's context is 131,072 positions; engines that stretch it are given another, and drawn lengths are looked at."""
    words = (*LAW, "--rate", "1", "--replications", "0", "--requests", "20", "--policy", "off")
    assert called(*words, "--prompt", "131000", "--output", "73", "--max-model-len", "131073")[0] == 0
    assert called(*words, "--prompt", "100", "--output", "20", "--max-model-len", "120")[0] == 0
    code, out, error = called(*words, "--prompt", "100", "--output", "20", "--prompt-cv", "1", "--max-model-len", "130")
    assert (code, out) == (2, "")
    assert "raise it if the engine stretches the model's context" in error
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n{GOOD}\n2023-11-16 18:15:47.9305900,200,100\n2023-11-16 18:15:48.9305900,10,2\n")
    code, _, error = called(*LAW, "--trace", str(path), "--policy", "off", "--max-model-len", "417")
    assert code == 2
    assert "max_model_len must be at least 418, a prompt of 374 with its output of 44 tokens, got 417" in error
    assert error.endswith("leave the request out (request 1 of t.csv)\n")


def test_objectives_are_printed() -> None:
    code, out, _ = called(*LAW, *QUICK, "--rate", "5", "--policy", "off", "--slo-ttft", "1s")
    assert code == 0
    pattern = r"requests within the objectives at 5/s: off ([\d.]+)/s \(80 % interval ([\d.]+) to ([\d.]+)\)"
    kept = re.search(pattern, " ".join(out.split()))
    assert kept is not None
    value, low, high = map(float, kept.groups())
    assert 0 <= low <= value <= high
    row = document(*LAW, *QUICK, "--rate", "5", "--policy", "off", "--slo-ttft", "1s")["table"][0]
    name = "requests_per_s_within_slo"
    assert [row[f"{name}{end}"] for end in ("", "_low", "_high")] == pytest.approx([value, low, high], rel=0.01)
    # Where all requests are within, these are all requests.
    assert row[name] == row["requests_per_s"]
    assert document(*LAW, *QUICK, "--rate", "5", "--policy", "off")["table"][0][f"{name}_low"] is None


def test_other_speeds_of_a_trace_are_limited_by_name(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(f"{HEADER}\n0,5,5\n2,5,5\n")
    for rate, said in (("-1", "rate must be between 1e-06"), ("1e6", "rate must be between 5e-07 and 5e+05 requests per second")):
        code, out, error = called(*LAW, "--trace", str(path), "--rate", rate, "--policy", "off")
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert said in error


def test_files_that_cannot_be_written_are_refused_before_anything_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it was simulated")

    monkeypatch.setattr(study, "serve", never)
    (tmp_path / "load.json").mkdir()
    (tmp_path / "file").write_text("")
    for option, name, said in (
        ("--out", "load", "which is a folder"), ("--out", "file/load", "and file is a file"),
        ("--perfetto", "file/steps.json", "and file is a file"), ("--perfetto", "load.json", "which is a folder"),
    ):  # fmt: skip
        code, out, error = called(*LAW, "--rate", "1", option, str(tmp_path / name))
        assert (code, out, error.count("\n")) == (2, "", 1)
        assert error.startswith(f"error: {option} must be")
        assert said in error


def test_the_draft_that_a_law_is_of_takes_memory() -> None:
    """As the draft does that is named; plain decoding alone loads none."""
    words = (*LAW, "--concurrency", "1", "--requests", "20", "--replications", "0", "--policy")
    named, own, off, ngram = (
        document(*words, *more)["settings"]["num_blocks"] for more in (
            ("static:2", "--draft", "eagle3"), ("static:2",), ("off",),
            ('ngram:{"draft_length":2,"hit_rate":0.4,"acceptance":0.6}',),
        )
    )  # fmt: skip
    assert named == own < off == ngram


def test_an_interrupted_study_says_what_can_be_resumed(monkeypatch: pytest.MonkeyPatch) -> None:
    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(study.StudyPlan, "run", stopped)
    code, out, error = called(*LAW, "--rate", "1")
    assert (code, out, error.count("\n")) == (130, "", 1)
    assert error.startswith("interrupted; nothing was written: `sim run` of a scenario with [load] keeps")


def test_drafts_beyond_the_cells_of_the_law_are_noted() -> None:
    words = ("--concurrency", "2", "--requests", "20", "--replications", "0", "--policy", "static:6", "--policy", "static:7")
    notes = " ".join(document("--engine-law", "sglang-qwen3-235b-a22b", *words)["notes"])  # which has drafts of 1 to 6 tokens
    assert "static:7: drafts are longer than the 6 tokens of the law's cells" in notes
    assert "static:6" not in notes


def test_a_trace_without_arrivals_is_played_by_clients(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join('{"prompt_len": 64, "output_len": 8}' for _ in range(30)))
    found = document(*LAW, "--trace", str(tmp_path / "a.jsonl"), "--concurrency", "3", "--replications", "0", "--policy", "off")
    assert found["table"][0]["concurrency"] == 3
    code, _, error = called(*LAW, "--trace", str(tmp_path / "a.jsonl"))
    assert code == 2
    assert "has no arrivals; give --concurrency" in error


@pytest.mark.parametrize("zone", ["UTC", "Europe/Berlin"])
def test_times_of_traces_do_not_depend_on_the_clock_of_the_reader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, zone: str
) -> None:
    monkeypatch.setenv("TZ", zone)
    time.tzset()
    try:
        rows = ["2024-03-31 02:59:59.0", "2024-03-31 03:00:00.0", "2024-03-31 03:00:00.5Z", "2024-03-31T05:00:01.009930+02:00"]
        path = tmp_path / "t.csv"
        path.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *(f"{each},4,4" for each in rows)]))
        assert traces.read(path).requests.arrivals == pytest.approx([0, 1, 1.5, 2.00993])
    finally:
        monkeypatch.undo()
        time.tzset()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [("a.json", '[{"prompt_len": 3, ', "a.json cannot be read as a JSON list"),
     ("a.csv", f"arrival_s,prompt_len,output_len\n1,{'9' * 200_000},3\n", "a.csv, row 2: it cannot be read as CSV"),
     ("a.csv", "arrival_s,prompt_len,prompt_len,output_len\n1,2,3,4\n", "a.csv must have each column once, got 'prompt_len' twice"),
     ("a.csv", "\x00\x01", "a.csv"), ("one.csv", "arrival_s,prompt_len,output_len\n1,2,3\n", "has all arrivals at one time")],
)  # fmt: skip
def test_damaged_traces_are_refused_by_name(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    code, out, error = called(*LAW, "--trace", str(tmp_path / name))
    assert (code, out, error.count("\n")) == (2, "", 1), error
    assert message in error
