"""Logs of engines: verbatim lines, counts that come back from every dialect, and files that are refused.

The excerpts are lines that the engines' users published, as in the projects' issues and documentation; each names its engine.
"""

from __future__ import annotations

import gzip
import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from calibrate.commands.calibrate_app import app
from model.base.checks import ParameterError
from model.logs import acceptance_record, served_settings
from model.logs.acceptance_record import AcceptanceRecord, ServedSettings
from model.logs.engine_logs import engine_log
from model.logs.engine_logs.observations import (
    AT_MOST,
    MOMENT,
    NEVER_RISE,
    OF_COUNTS,
    OF_RATES,
    OF_RATIO,
    REAL_TEXT,
    SPACING,
    SUM,
)
from model.logs.engine_logs.vllm import EFFICIENCY
from model.outcomes.intervals import wilson
from tests.support import engine_outputs as writers
from tests.support.engine_outputs import Steps, logs, steps, together
from tests.support.fuzzing import folder

few = settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])


def imported(text: str, name: str = "x.log", **how: Any) -> AcceptanceRecord:
    """Record of a file with this content; it is the same after writing and reading."""
    with folder() as here:
        path = here / name
        path.write_text(text, encoding="utf-8")
        found = engine_log.read([path], **how)
    assert acceptance_record.of_document(json.loads(acceptance_record.dumps(found))) == found
    return found


def refused(text: str | bytes, **how: Any) -> str:
    """Message about a file with this content; nothing is written."""
    with folder() as here:
        path = here / "x.log"
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
        words = [word for name, value in how.items() for word in (f"--{name.replace('_', '-')}", str(value))]
        done = CliRunner().invoke(app, ["import", "engine-log", str(path), "-o", str(here / "made"), *words])
        assert done.exit_code == 2, (done.output, done.exception)
        assert len(done.stderr.splitlines()) == 1
        assert [each.name for each in here.iterdir()] == ["x.log"]
    return done.stderr


def holding(record: AcceptanceRecord) -> dict[str, bool]:
    """Whether each identity holds, by name."""
    return {each.identity: each.holds for each in record.identities}


def engine_line(running: int, rate: float, prompts: float = 0.0) -> str:
    return (
        f"INFO 09-18 04:30:45 [loggers.py:123] Engine 000: Avg prompt throughput: {prompts:.1f} tokens/s, Avg generation"
        f" throughput: {rate:.1f} tokens/s, Running: {running} reqs, Waiting: 0 reqs, GPU KV cache usage: 1.0%, Prefix"
        " cache hit rate: 0.0%"
    )


# --- Verbatim lines ---

LINES = {
    # vLLM V1 in two orders of its fields, and V0
    "vllm v1": (
        "SpecDecoding metrics: Mean acceptance length: 5.14, Accepted throughput: 6.84 tokens/s, Drafted throughput: 8.26 tokens/s,"
        " Accepted: 513 tokens, Drafted: 620 tokens, Per-position acceptance rate: 0.960, 0.863, 0.823, 0.782, 0.710, Avg Draft"
        " acceptance rate: 82.7%",
        ("vllm", 5, 124, 620, 513, 1 + 513 / 124),
    ),
    "vllm 2025-06": (
        "INFO [metrics.py:86] SpecDecoding metrics: Draft acceptance rate: 38.8%, Mean acceptance length: 2.16, Accepted: 150"
        " tokens, Drafted: 387 tokens, Per-position acceptance rate: 0.543, 0.357, 0.264",
        ("vllm", 3, 129, 387, 150, 1 + 150 / 129),
    ),
    "vllm v0": (
        "Speculative metrics: Draft acceptance rate: 0.607, System efficiency: 0.510, Number of speculative tokens: 4, Number of"
        " accepted tokens: 32594, Number of draft tokens: 53716, Number of emitted tokens: 34244.",
        ("vllm", 4, 13429, 53716, 32594, 34244 / 13429),
    ),
    "vllm bench": (
        "Acceptance rate (%):                     73.47\nAcceptance length:                       3.20\n"
        "Drafts:                                  6393\nDraft tokens:                            19179\n"
        "Accepted tokens:                         14090\nPer-position acceptance (%):\n"
        "  Position 0:                            83.42",
        ("vllm", 3, 6393, 19179, 14090, 1 + 14090 / 6393),
    ),
    "sglang": (
        "[2025-10-22 10:27:57 TP0] Decode batch. #running-req: 1, #token: 186, token usage: 0.00, accept len: 1.95, accept rate:"
        " 0.49, cuda graph: True, gen throughput (token/s): 178.86, #queue-req: 0,",
        ("sglang", 3, None, None, None, 1.95),  # 1.95 / .49 is 4 tokens with the bonus: drafts of 3
    ),
    "sglang before 2025-10": (
        "[2025-05-27 20:14:38 TP0] Decode batch. #running-req: 18, #token: 16384, token usage: 0.71, accept len: 2.40, accept rate:"
        " 0.84,",
        ("sglang", None, None, None, None, 2.4),
    ),
    "llama.cpp": (
        "slot print_timing: id  1 | task 0 | draft acceptance = 0.64479 (  167 accepted /   259 generated), mean acceptance length"
        " =  2.92, acceptance rate per position = (0.805, 0.632, 0.483)\n"
        "statistics     draft-eagle3: #calls(b,g,a) =    1     87     87, #gen drafts =     87, #acc drafts =    70, #gen tokens ="
        "    259, #acc tokens =   167, #mean acc len = 2.92, #acc rate/pos = (0.805, 0.632, 0.483), dur(b,g,a) = 0.005, 325.555,"
        " 0.114 ms",
        ("llama.cpp", 3, 87, 259, 167, 1 + 167 / 87),
    ),
    "llama-speculative": (
        "n_draft   = 8\nn_predict = 136\nn_drafted = 112\nn_accept  = 36\naccept    = 32.143%",
        ("llama.cpp", 8, None, 112, 36, None),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LINES)
def test_verbatim_lines(name: str) -> None:
    text, (engine, draft_length, drafts, drafted, accepted, length) = LINES[name]
    found = imported(text)
    assert (found.engine, found.draft_length, found.drafts, found.drafted, found.accepted) == (
        engine, draft_length, drafts, drafted, accepted,
    )  # fmt: skip
    assert found.mean_acceptance_length == (None if length is None else pytest.approx(length, abs=1e-9))
    assert all(holding(found).values()), found.identities
    assert (found.draft_ms_per_token is None) == (name != "llama.cpp")


def test_lines_of_the_data_folder() -> None:
    """The lines above are those of the shared data, where that is there."""
    where = Path(os.environ.get("DECODESIM_DATA", "")) / "engine" / "logs"
    if not where.is_dir():
        pytest.skip("DECODESIM_DATA is not set")
    held = "\n".join(path.read_text() for path in sorted(where.glob("*.txt")))
    assert all(line.strip() in held for text, _ in LINES.values() for line in text.splitlines())


def test_example_of_vllm_documentation() -> None:
    """docs/features/speculative_decoding, per-request acceptance metrics (vllm-project/vllm#48915)."""
    example = {
        "mean_acceptance_length": 1.2325581395348837, "draft_acceptance_rate": 0.07751937984496124,
        "acceptance_histogram": [39, 1, 0, 3], "num_spec_steps": 43, "num_accepted_draft_tokens": 10, "num_draft_tokens": 129,
        "num_spec_tokens": 3,
    }  # fmt: skip
    found = imported(json.dumps({"choices": [], "metrics": {"speculative_decoding": example}}))
    assert (found.drafts, found.drafted, found.accepted, found.draft_length) == (43, 129, 10, 3)
    assert found.mean_acceptance_length == example["mean_acceptance_length"]
    assert found.draft_acceptance_rate == example["draft_acceptance_rate"]
    assert all(holding(found).values())


def test_answer_in_the_repository_of_eagle() -> None:
    """Question 82 of eagle/outputs/llama-2-chat-70b-fp16-ea-in-temperature-0.0.jsonl (SafeAILab/EAGLE @2320d52e), without text."""
    choice = {
        "index": 0, "turns": ["", ""], "idxs": [40, 92], "new_tokens": [179, 399],
        "wall_time": [6.674628019332886, 15.282948017120361],
    }  # fmt: skip
    found = imported(json.dumps({"question_id": 82, "choices": [choice], "tstamp": 1702393956.4881084}))
    assert (found.engine, found.drafts, found.accepted) == ("eagle", 41 + 93, 179 + 399 - 41 - 93)
    cell, = found.cells
    assert cell.tpot_ms == pytest.approx(1000 * (6.674628019332886 + 15.282948017120361) / (179 + 399), abs=1e-4)


def test_counters_in_the_tests_of_lmdeploy() -> None:
    """Two drafts of 3 tokens with 2 and 1 accepted (InternLM/lmdeploy, tests of the Prometheus logger)."""
    labels = 'model_name="test-model",engine="2"'
    names = {"drafts": 2, "draft_tokens": 6, "accepted_tokens": 3}
    rows = [f"lmdeploy:spec_decode_num_{name}_total{{{labels}}} {value}.0" for name, value in names.items()]
    rows += [f"lmdeploy:spec_decode_mean_accept_rate{{{labels}}} 0.5", f"lmdeploy:spec_decode_mean_accept_length{{{labels}}} 2.5"]
    rows += [f'lmdeploy:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{index}"}} {value}.0'
             for index, value in enumerate((2, 1, 0))]  # fmt: skip
    found = imported("\n".join(rows))
    assert (found.engine, found.mean_acceptance_length, found.draft_acceptance_rate) == ("lmdeploy", 2.5, 0.5)
    assert found.survival == (1.0, 0.5, 0.0)
    assert found.conditional_rates == (1.0, 0.5, 0.0)
    assert found.known_rates == (1.0, 0.5, 0.0)


def test_time_of_sglang_steps_and_of_llama_drafts() -> None:
    cell, = imported(LINES["sglang"][0]).cells
    assert cell.step_ms == pytest.approx(1000 * 1 * 1.95 / 178.86, abs=1e-4)
    assert (cell.sequences, cell.draft_length, cell.context) == (1, 3, 186)
    assert imported(LINES["llama.cpp"][0]).draft_ms_per_token == pytest.approx(325.555 / 259)


def test_line_ends_marks_and_colours_do_not_matter() -> None:
    plain = imported(V1)
    for text in (
        f"\ufeff{V1}\r\n",
        f"\r 50%|##\r100%|####\r{V1}\r",
        f"\n\x1b[1;36m(APIServer pid=1)\x1b[0;0m {V1}\n",
        f"2026-01-01T00:00:00Z stderr F {V1}.",
    ):
        found = imported(text)
        assert (found.drafts, found.histogram, found.draft_length) == (plain.drafts, plain.histogram, plain.draft_length)


@pytest.mark.parametrize("key", ["log", "message", "msg"])
def test_lines_that_a_collector_wraps_in_json(key: str) -> None:
    text = "\n".join(json.dumps({key: f"{line}\n", "stream": "stderr"}) for line in ("starting", V1, V1))
    assert imported(text).drafts == 248


def test_histogram_and_intervals_of_a_line() -> None:
    found = imported(LINES["vllm v1"][0])
    assert found.histogram == (5, 12, 5, 5, 9, 88)
    assert found.survival is not None
    assert found.survival_low is not None
    assert found.survival_high is not None
    low, high = wilson(np.array([119, 107, 102, 97, 88]) / 124, 124)
    assert found.survival_low == pytest.approx(tuple(low))
    assert found.survival_high == pytest.approx(tuple(high))
    assert found.conditional_rates == pytest.approx((119 / 124, 107 / 119, 102 / 107, 97 / 102, 88 / 97))


# --- Counts come back ---


def as_counts(found: AcceptanceRecord, whole: Steps, engine: str) -> None:
    """Check that a record has exactly the counts of these steps."""
    assert found.engine == engine
    assert (found.drafts, found.drafted, found.accepted) == (whole.drafts, whole.drafted, whole.total)
    assert found.mean_acceptance_length == pytest.approx(whole.length, abs=1e-9)
    assert found.draft_length == whole.draft_length
    assert found.survival == pytest.approx([each / whole.drafts for each in whole.positions])
    assert found.histogram == tuple(whole.histogram)
    assert all(value for name, value in holding(found).items() if name != REAL_TEXT), found.identities


@given(logs(), st.permutations(range(7)))
@few
def test_lines_of_vllm_v1_are_summed(lines: list[Steps], order: list[int]) -> None:
    as_counts(imported("\n".join(writers.vllm_v1(line, order) for line in lines)), together(lines), "vllm")


@given(logs(), st.permutations(range(5)))
@few
def test_lines_of_lmdeploy_are_summed(lines: list[Steps], order: list[int]) -> None:
    found = imported("\n".join(writers.lmdeploy_log(line, order) for line in lines))
    as_counts(found, together(lines), "lmdeploy")
    assert {cell.sequences for cell in found.cells} == {3}


@given(logs())
@few
def test_counters_of_prometheus(lines: list[Steps]) -> None:
    for prefix, engine in (("vllm", "vllm"), ("lmdeploy", "lmdeploy"), ("llamacpp", "llama.cpp")):
        text = "\n".join(writers.counters(line, prefix, f'engine="{index}"') for index, line in enumerate(lines))
        found = imported(text)
        as_counts(found, together(lines), engine)
        assert any(f"{len(lines)} sets of labels" in note for note in found.notes) == (len(lines) > 1)


@given(logs())
@few
def test_results_of_vllm_bench(lines: list[Steps]) -> None:
    as_text = imported("\n".join(writers.vllm_bench(line) for line in lines))
    as_json = imported("\n".join(json.dumps(writers.vllm_bench_json(line)) for line in lines))
    as_list = imported(json.dumps([writers.vllm_bench_json(line) for line in lines], indent=2))
    for found in (as_text, as_json, as_list):
        as_counts(found, together(lines), "vllm")
        assert found.requests == 20 * len(lines)
        assert [cell.tpot_ms for cell in found.cells] == [10.0] * len(lines)
        assert {(cell.sequences, cell.context) for cell in found.cells} == {(8, 125.0)}
        assert holding(found)[SPACING]


@given(logs(), st.booleans())
@few
def test_metrics_of_vllm_requests(lines: list[Steps], sparse: bool) -> None:
    found = imported("\n".join(json.dumps(writers.vllm_response(line, sparse)) for line in lines))
    as_counts(found, together(lines), "vllm")
    assert found.requests == len(lines)
    assert found.per_request is not None
    assert found.per_request["accepted"] == tuple(line.total for line in lines)
    assert holding(found)[SUM]
    assert holding(found)[MOMENT]


@given(logs(), st.sampled_from((0, 1, 2)), st.booleans())
@few
def test_responses_of_sglang(lines: list[Steps], names: int, nested: bool) -> None:
    responses = [writers.sglang_response(line, names) for line in lines]
    if nested:  # a chat response repeats its counts
        responses = [{"choices": [each], "sglext": {"spec_tokens_details": dict(each["meta_info"])}} for each in responses]
    as_counts(imported(json.dumps(responses)), together(lines), "sglang")


@given(logs())
@few
def test_iterations_of_tensorrt_llm(lines: list[Steps]) -> None:
    whole = together(lines)
    for text in (json.dumps(writers.trtllm_rows(whole)), "\n".join(map(json.dumps, writers.trtllm_rows(whole)))):
        found = imported(text)
        assert (found.drafts, found.drafted, found.accepted) == (whole.drafts, whole.drafted, whole.total)
        assert found.draft_length == whole.draft_length
        cell, = found.cells
        assert (cell.step_ms, cell.sequences, cell.weight) == (5.0, 1, whole.drafts)
        assert cell.mean_acceptance_length == pytest.approx(whole.length, abs=1e-4)
        assert any("1 iterations without drafts" in note for note in found.notes)


@given(st.integers(1, 6).flatmap(lambda longest: st.lists(steps(longest), min_size=1, max_size=5)))
@few
def test_report_of_tensorrt_llm(requests: list[Steps]) -> None:
    whole, found = together(requests), imported(writers.trtllm_report(requests))
    assert found.engine == "trtllm"
    assert found.mean_acceptance_length is not None
    assert found.mean_acceptance_length_rounding is not None
    difference = abs(found.mean_acceptance_length - whole.length)
    assert difference <= found.mean_acceptance_length_rounding + 1e-9
    assert found.draft_length in (None, whole.draft_length)
    assert (found.drafted, found.requests) == (None, len(requests))


@given(logs(), st.booleans())
@few
def test_lines_of_llama_cpp(lines: list[Steps], with_statistics: bool) -> None:
    text = []
    for index, line in enumerate(lines):
        text.append(writers.llama_request(line, index))
        if with_statistics:  # totals since the start
            text.append(writers.llama_statistics(together(lines[: index + 1]), 10.0 * (index + 1)))
    found, whole = imported("\n".join(text)), together(lines)
    as_counts(found, whole, "llama.cpp")
    assert found.requests == len(lines)
    expected = 10.0 * len(lines) / whole.drafted
    assert found.draft_ms_per_token == (pytest.approx(expected) if with_statistics else None)


@given(st.lists(logs(most=40), min_size=1, max_size=3), st.booleans())
@few
def test_answers_of_eagle(answers: list[list[Steps]], listed: bool) -> None:
    longest = max(each.draft_length for turns in answers for each in turns)
    turns = [[Steps(longest, each.accepted) for each in turns] for turns in answers]
    kept = [each for each in turns if sum(turn.total for turn in each)]  # an answer without accepted tokens is plain decoding
    text = "\n".join(writers.eagle_line(each, listed) for each in turns)
    if not kept:
        with pytest.raises(ParameterError, match="plain decoding"):
            imported(text)
        return
    whole, found = together([turn for each in kept for turn in each]), imported(text)
    assert (found.engine, found.drafts, found.drafted, found.accepted) == ("eagle", whole.drafts, None, whole.total)
    cell, = found.cells
    assert cell.tpot_ms == pytest.approx(10.0 * whole.drafts / (whole.drafts + whole.total), rel=1e-3)
    if listed:
        assert found.histogram is not None
        assert [*found.histogram, *[0] * (longest + 1 - len(found.histogram))] == whole.histogram
    else:
        assert found.histogram is None


@given(steps())
@few
def test_tokens_of_mlx_lm(line: Steps) -> None:
    found = imported(writers.mlx_tokens(line))
    assert (found.engine, found.drafts, found.accepted) == ("mlx-lm", line.drafts, line.total)
    share = line.total / (line.total + line.drafts)
    shared = imported(f"from_draft: {share:.1%}\n")
    assert shared.drafts is None
    assert shared.mean_acceptance_length is not None
    assert shared.mean_acceptance_length_rounding is not None
    assert abs(shared.mean_acceptance_length - line.length) <= 1.01 * shared.mean_acceptance_length_rounding


@given(st.lists(st.tuples(st.integers(1, 64), st.floats(1, 5), st.floats(10, 5000)), min_size=1, max_size=6))
@few
def test_lengths_of_sglang_are_weighted_by_requests(rows: list[tuple[int, float, float]]) -> None:
    found = imported("\n".join(writers.sglang_line(length, running, rate, 100 * running) for running, length, rate in rows))
    expected = sum(running * length for running, length, _ in rows) / sum(running for running, _, _ in rows)
    assert found.mean_acceptance_length == pytest.approx(expected, abs=0.0051)
    assert (found.drafts, found.histogram, found.draft_length) == (None, None, None)
    by_running: dict[int, list[float]] = {running: [] for running, _, _ in rows}
    for running, length, rate in rows:
        by_running[running].append(1000 * running * round(length, 2) / round(rate, 2))
    assert {cell.sequences: cell.step_ms for cell in found.cells} == {
        running: pytest.approx(np.median(times), rel=1e-4) for running, times in by_running.items()
    }


@given(st.integers(1, 6), st.lists(st.floats(0.2, 0.9), min_size=3, max_size=6), st.sampled_from(("2025-11-03", "2026-06-01")))
@few
def test_accept_rate_of_sglang_gives_the_draft_length_or_nothing(longest: int, shares: list[float], date: str) -> None:
    """A wrong length is never given, though two meanings may fit; the true one is among them."""
    lines = []
    for share in shares:
        length = 1 + share * longest
        rate = share if date >= "2026-04" else length / (longest + 1)
        lines.append(writers.sglang_line(length, 2, 100.0, 10, date, f"accept rate: {rate:.2f}, "))
    assert imported("\n".join(lines)).draft_length in (None, longest)


def test_accept_rate_before_2025_10_or_without_a_date_is_ignored() -> None:
    line = writers.sglang_line(2.5, 2, 100.0, 10, "2025-06-01", "accept rate: 1.84, ")
    found = imported(line)
    assert found.draft_length is None
    assert any("before 2025-10" in note for note in found.notes)
    undated = imported(writers.sglang_line(2.5, 2, 100.0, 10, "2026-06-01", "accept rate: 0.50, ").partition("] ")[2])
    assert any("no date" in note for note in undated.notes)
    argued = imported(f"server_args=ServerArgs(speculative_num_steps=3, speculative_eagle_topk=1)\n{line}")
    assert argued.draft_length == 3


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 5)), min_size=1, max_size=60), st.integers(0, 60))
@few
def test_drafts_of_several_lengths_are_within_rounding(rows: list[tuple[int, int]], more: int) -> None:
    """Where drafts may be shorter than K, the line's ratios bound their number."""
    pairs = [(drafted, min(drafted, accepted)) for drafted, accepted in rows] + [(5, 5)] * (more + 1)
    drafts, drafted, accepted = len(pairs), sum(first for first, _ in pairs), sum(second for _, second in pairs)
    rates = [sum(second > index for _, second in pairs) / drafts for index in range(5)]
    found = imported(
        f"SpecDecoding metrics: Mean acceptance length: {1 + accepted / drafts:.2f}, Accepted: {accepted} tokens, Drafted:"
        f" {drafted} tokens, Per-position acceptance rate: {', '.join(f'{rate:.3f}' for rate in rates)}"
    )
    assert found.drafts is not None
    total = sum(float(f"{rate:.3f}") for rate in rates)
    assert accepted / (total + 0.0026) - 0.5 <= found.drafts <= accepted / (total - 0.0026) + 0.5
    if found.histogram is not None:
        assert sum(found.histogram) == found.drafts


def test_histogram_that_rounding_hides_is_null() -> None:
    """Of 4000 drafts, 2001 and 999 print as 2000 and 1000 would, which have the same sum."""
    line = Steps(2, (2,) * 999 + (1,) * 1002 + (0,) * 1999)
    found = imported(writers.vllm_v1(line, range(7)))
    assert (found.drafts, found.accepted, found.histogram) == (4000, 3000, None)
    assert any("survival is of rounded rates" in note for note in found.notes)
    assert found.survival == pytest.approx([each / 4000 for each in line.positions], abs=0.0005)


def test_lengths_of_requests_are_weighted_by_their_drafts() -> None:
    """Responses with steps and a length, but no counts."""
    rows = [{"meta_info": {"spec_verify_ct": drafts, "spec_accept_length": length}} for drafts, length in ((10, 1.5), (30, 3.5))]
    found = imported(json.dumps(rows))
    assert (found.drafts, found.accepted, found.mean_acceptance_length) == (40, None, 3.0)


def test_positions_of_a_result_that_was_cut_are_those_of_all() -> None:
    first, second = Steps(3, (0, 1, 2, 3)), Steps(3, (3, 3))
    cut = writers.vllm_bench(second).partition("  Position 2")[0]
    found = imported(f"{writers.vllm_bench(first)}\n{cut}\n")
    assert (found.drafts, found.draft_length, found.histogram) == (6, 3, None)
    assert found.survival == pytest.approx([5 / 6, 4 / 6])


def test_draft_cost_of_files_is_summed(tmp_path: Path) -> None:
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    for path, line, spent in zip(paths, (Steps(3, (0, 3)), Steps(3, (1,))), (4.0, 8.0), strict=True):
        path.write_text(writers.llama_statistics(line, spent))
    assert engine_log.read(paths).draft_ms_per_token == pytest.approx(12 / 9)
    paths[0].write_text(
        writers.llama_statistics(Steps(3, (0, 3)), 4.0) + "\n"
        + writers.llama_statistics(Steps(3, (1,)), 8.0).replace("draft-eagle3", "ngram-simple")
    )  # fmt: skip
    both = engine_log.read(paths[:1])
    assert (both.drafts, both.draft_ms_per_token) == (3, pytest.approx(12 / 9))


def test_statistics_of_llama_cpp_are_shared_or_of_a_slot_or_of_several_logs() -> None:
    """Which it is, the lines of requests tell: two requests, with totals of the server, of the slot, or of another log."""
    first, second = Steps(3, (0, 3, 1)), Steps(3, (1, 2, 2, 3))
    for later, slot in ((together([first, second]), 1), (second, 2), (second, 1)):
        text = "\n".join((
            writers.llama_request(first, 1), writers.llama_statistics(first, 6.0),
            writers.llama_request(second, 2).replace("id  1", f"id  {slot}"), writers.llama_statistics(later, 6.0),
        ))  # fmt: skip
        as_counts(imported(text), together([first, second]), "llama.cpp")
    restarted = "\n".join((
        writers.llama_request(first, 1), writers.llama_statistics(first, 6.0), writers.llama_request(second, 2),
        writers.llama_statistics(together([first, second]), 6.0), writers.llama_request(first, 1),
        writers.llama_statistics(first, 6.0),
    ))  # fmt: skip
    as_counts(imported(restarted), together([first, second, first]), "llama.cpp")


def test_accept_rate_of_sglang_is_read_with_the_meanings_of_its_date() -> None:
    """A length of 2 at .50 is drafts of 3 with the bonus and drafts of 2 without; before 2026-04 only the former."""
    for date, expected, words in (
        ("2025-10-12", None, "before 2025-10 (#11572 of 2025-10-13)"), ("2025-10-13", 3, "(a + D) / (D (K + 1)), as SGLang"),
        ("2025-11-01", 3, "from #11572 of 2025-10-13 to #23530 of 2026-04-23"),
        ("2026-04-22", 3, "from #11572 of 2025-10-13 to #23530 of 2026-04-23"),
        ("2026-04-23", None, "it fits draft lengths of 2 (a / (D K)"), ("2026-05-01", None, "and 3 ((a + D) / (D (K + 1))"),
    ):  # fmt: skip
        line = writers.sglang_line(2.0, 2, 100.0, 10, date, "accept rate: 0.50, ")
        found = imported(line)
        assert found.draft_length == expected
        assert sum(words in note for note in found.notes) == 1, found.notes
    newer = imported(writers.sglang_line(2.2, 2, 100.0, 10, "2026-05-01", "accept rate: 0.40, "))
    assert newer.draft_length == 3
    assert any("a / (D K), as SGLang prints it from #23530 of 2026-04-23 on" in note for note in newer.notes)


def test_accept_rate_of_zero_in_any_writing_gives_no_length() -> None:
    for rate in ("0.00", "0", "0e0", "1e-320"):
        assert imported(writers.sglang_line(2.0, 2, 100.0, 10, "2026-05-02", f"accept rate: {rate}, ")).draft_length is None


def test_accept_rate_above_one_is_of_an_older_version_at_any_date() -> None:
    found = imported(writers.sglang_line(2.5, 1, 100.0, 10, "2026-05-02", "accept rate: 1.25, "))
    assert (found.draft_length, found.mean_acceptance_length) == (None, 2.5)
    assert any("above 1, as in versions before #11572" in note for note in found.notes)


def test_accept_rate_that_fits_another_length_than_given_is_noted() -> None:
    line = writers.sglang_line(2.0, 2, 100.0, 10, "2025-11-01", "accept rate: 0.50, ")
    for longest, doubts in ((3, 0), (4, 1)):
        found = imported(line, draft_length=longest)
        assert found.draft_length == longest
        assert sum("fit a draft length of 3" in note for note in found.notes) == doubts


def test_given_depth_of_sglang_trees_is_used() -> None:
    """Responses count all tokens of a tree: 8 per step, of depth 3."""
    line = Steps(8, (0, 1, 2, 3))
    assert imported(json.dumps(writers.sglang_response(line))).draft_length == 8
    found = imported(json.dumps(writers.sglang_response(line)), draft_length=3)
    assert found.draft_length == 3
    assert any("as trees" in note for note in found.notes)


# --- What dialects define otherwise ---


@given(st.lists(steps(4, 50), min_size=1, max_size=3), st.permutations(range(6)))
@few
def test_counts_of_vllm_v0_are_totals_since_the_start(lines: list[Steps], order: list[int]) -> None:
    grown = [together(lines[: index + 1]) for index in range(len(lines))]
    text = "\n".join(writers.vllm_v0(each, min(each.drafted, each.total + 1), order) for each in grown)
    once, whole = imported(text), together(lines)
    assert (once.drafts, once.drafted) == (whole.drafts, whole.drafted)
    assert once.mean_acceptance_length == pytest.approx(whole.length)
    assert holding(once)[EFFICIENCY]
    restarted = imported(f"{text}\n{writers.vllm_v0(Steps(4, (2,)), 2, order)}")
    assert restarted.drafts == whole.drafts + (1 if whole.drafts > 1 else 0)


def test_interval_of_vllm_without_drafts_is_no_line() -> None:
    empty = "SpecDecoding metrics: Mean acceptance length: nan, Accepted: 0 tokens, Drafted: 0 tokens, Per-position acceptance"
    empty += " rate: nan, nan"
    found = imported(f"{empty}\n{LINES['vllm v1'][0]}")
    assert found.drafts == 124


def test_first_lengths_of_vllm_v1_lack_the_bonus_token() -> None:
    line = Steps(3, (0, 1, 2, 3, 3))
    text = writers.vllm_v1(line, range(7)).replace(f"length: {line.length:.2f}", f"length: {line.length - 1:.2f}")
    found = imported(text)
    assert (found.drafts, found.mean_acceptance_length) == (5, pytest.approx(line.length))
    assert all(holding(found).values())
    assert any("before 2025-05" in note for note in found.notes)


def test_cells_of_vllm_are_of_intervals_with_steady_requests() -> None:
    line = Steps(3, (0, 1, 2, 3) * 5)
    text = [engine_line(running, rate) + "\n" + writers.vllm_v1(line, range(7))
            for running, rate in ((8, 50.0), (8, 400.0), (8, 400.0), (4, 90.0))]  # fmt: skip
    found = imported("\n".join(text))
    assert [(cell.sequences, cell.output_tokens_per_s, cell.weight, cell.draft_length) for cell in found.cells] == [
        (4, 90.0, 1, 3), (8, 400.0, 2, 3),
    ]  # fmt: skip
    assert {cell.mean_acceptance_length for cell in found.cells} == {2.5}
    assert any("1 cells are of intervals" in note for note in found.notes)


@pytest.mark.parametrize("first", ["throughput", "drafts", "drafts of the interval before"])
def test_lines_of_an_interval_are_paired_in_any_order(first: str) -> None:
    """Throughput k belongs to the k-th line of drafts; a log that was cut begins with drafts of an interval without throughput."""
    lines = [Steps(3, (index,) * 4) for index in range(1, 4)]
    pairs = [(engine_line(8, 100.0 * index), writers.vllm_v1(line, range(7))) for index, line in enumerate(lines, start=1)]
    if first == "drafts of the interval before":
        earlier = writers.vllm_v1(Steps(3, (0,)), range(7)).replace("04:30:45", "04:30:35")
        text = [earlier, *(line for pair in pairs for line in pair)]
    else:
        text = [line for pair in pairs for line in (pair if first == "throughput" else pair[::-1])]
    cell, = imported("\n".join(text)).cells
    # Of intervals 2 and 3, which begin and end with 8 requests: tokens over seconds, each of 4 drafts.
    tokens, seconds = 4 * (3 + 4), 4 * (3 / 200 + 4 / 300)
    assert (cell.output_tokens_per_s, cell.weight) == (pytest.approx(tokens / seconds, abs=1e-3), 2)
    assert cell.mean_acceptance_length == 3.5


def test_plain_decoding_is_a_cell_if_the_user_says_so() -> None:
    text = "\n".join(engine_line(8, rate) for rate in (200.0, 300.0, 300.0))
    assert "--draft-length 0" in refused(text)
    found = imported(text, draft_length=0)
    assert (found.draft_length, found.drafts, found.mean_acceptance_length) == (0, None, None)
    cell, = found.cells
    assert (cell.draft_length, cell.output_tokens_per_s, cell.mean_acceptance_length) == (0, 300.0, 1.0)
    bare = "\n".join(writers.sglang_line(0, 4, 100.0, 400) for _ in range(3))
    assert "--draft-length 0" in refused(bare)
    cell, = imported(bare, draft_length=0).cells
    assert (cell.draft_length, cell.step_ms) == (0, pytest.approx(40.0))


def test_plain_and_speculative_benchmarks_are_cells_of_one_table(tmp_path: Path) -> None:
    speculative = writers.vllm_bench_json(Steps(3, (0, 1, 2, 3)))
    plain = {key: value for key, value in speculative.items() if not key.startswith("spec_decode")} | {"mean_tpot_ms": 20.0}
    paths = [tmp_path / "plain.json", tmp_path / "mtp.json"]
    for path, result in zip(paths, (plain, speculative), strict=True):
        path.write_text(json.dumps(result))
    found = engine_log.read(paths, draft_length=0)
    cells = [(cell.draft_length, cell.tpot_ms, cell.mean_acceptance_length) for cell in found.cells]
    assert cells == [(0, 20.0, 1.0), (3, 10.0, 2.5)]
    assert (found.draft_length, found.drafts) == (3, 4)
    with pytest.raises(ParameterError, match="--draft-length 0"):
        engine_log.read(paths)


def sglang_result(length: float | None, tpot: float) -> dict[str, Any]:
    """Result of bench_serving."""
    return {
        "backend": "sglang", "completed": 10, "max_concurrency": 4, "total_input_tokens": 1000, "duration": 9.0,
        "total_output_tokens": 500, "mean_tpot_ms": tpot, "output_throughput": 70.0, "mean_e2e_latency_ms": 9.0,
        "accept_length": length,
    }  # fmt: skip


def sglang_text(length: float | None, tpot: float) -> str:
    """Printed result of bench_serving."""
    rows = [
        "============ Serving Benchmark Result ============", "Backend:                 sglang",
        "Max request concurrency: 4", "Successful requests:     10", f"Mean TPOT (ms):          {tpot}",
    ]  # fmt: skip
    return "\n".join([*rows, *([] if length is None else [f"Accept length:           {length}"])])


HALVES = Steps(3, (0, 1, 2, 3))
REPORT = writers.trtllm_report([HALVES, Steps(3, (1, 2, 2, 1))])
LMDEPLOY = writers.lmdeploy_log(HALVES, range(5))
BARE_REPORT = "\n".join(line for line in REPORT.splitlines() if not line.startswith("["))
PAIRS: dict[str, tuple[str, str, int | None]] = {
    # a plain run, one with drafts of 3, and the draft length that the latter says
    "vllm log": (engine_line(8, 300.0), f"{engine_line(8, 500.0)}\n{writers.vllm_v1(HALVES, range(7))}", 3),
    "vllm bench": (writers.vllm_bench(HALVES).partition("Acceptance rate")[0], writers.vllm_bench(HALVES), 3),
    "sglang log": (writers.sglang_line(0, 4, 100.0, 400), writers.sglang_line(2.5, 4, 200.0, 400), None),
    "sglang bench": (json.dumps(sglang_result(None, 9.0)), json.dumps(sglang_result(2.5, 5.0)), None),
    "sglang bench text without its backend": (
        sglang_text(None, 9.0).replace("Backend:", "Server:"), sglang_text(2.5, 5.0).replace("Backend:", "Server:"), None,
    ),
    "sglang bench text": (sglang_text(None, 9.0), sglang_text(2.5, 5.0), None),
    "trtllm report": (BARE_REPORT, REPORT, 3),
    "lmdeploy log": (LMDEPLOY.partition("SpecDecoding")[0], LMDEPLOY, 3),
    "eagle": (writers.eagle_line([Steps(3, (0, 0, 0))], False), writers.eagle_line([HALVES], False), None),
}  # fmt: skip


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("name", PAIRS)
def test_plain_and_speculative_files_are_cells_of_one_record(name: str, reverse: bool, tmp_path: Path) -> None:
    """Both runs have the cells that they have alone, and acceptance is that of the run with drafts."""
    *texts, said = PAIRS[name]
    paths = [tmp_path / "plain.log", tmp_path / "drafted.log"]
    for path, text in zip(paths, texts, strict=True):
        path.write_text(text)
    order = [1, 0] if reverse else [0, 1]
    both = engine_log.read([paths[index] for index in order], draft_length=[(0, 3)[index] for index in order])
    plain, drafted = engine_log.read(paths[:1], draft_length=0), engine_log.read(paths[1:], draft_length=3)
    cells = [cell for index in order for cell in (plain, drafted)[index].cells]
    assert [cell.draft_length for cell in cells] == [(0, 3)[index] for index in order]
    assert [cell.mean_acceptance_length == 1 for cell in cells] == [index == 0 for index in order]
    assert both.cells == tuple(cells)
    assert both.engine == plain.engine == drafted.engine
    for each in ("draft_length", "drafts", "accepted", "mean_acceptance_length", "histogram", "survival", "requests"):
        assert getattr(both, each) == getattr(drafted, each), each
    shared = engine_log.read(paths, draft_length=0)  # for the files that do not say it
    assert [cell.draft_length for cell in shared.cells] == [0, said]
    named = [note for note in shared.notes if "draft_length of cells of drafted.log" in note]
    assert len(named) == (said is None)
    with pytest.raises(ParameterError, match=r"plain\.log.*--draft-length 0"):
        engine_log.read(paths)
    with pytest.raises(ParameterError, match=r"draft_length 0 contradicts file .*drafted\.log', which has drafts"):
        engine_log.read(paths, draft_length=[0, 0])
    assert said is None or f"give {said} for it" in refused(texts[1], draft_length=4)


def test_one_number_for_files_that_all_say_another_is_refused(tmp_path: Path) -> None:
    paths = [tmp_path / "a.log", tmp_path / "b.log"]
    for path, longest in zip(paths, (3, 5), strict=True):
        path.write_text(writers.vllm_v1(Steps(longest, (0, 1, 2)), range(7)))
    assert engine_log.read(paths, draft_length=3).drafts == engine_log.read(paths, draft_length=[3, 5]).drafts == 6
    with pytest.raises(ParameterError, match=r"draft_length 4 contradicts file .*a\.log', which has drafts of 3 tokens; give 3"):
        engine_log.read(paths, draft_length=4)
    with pytest.raises(ParameterError, match=r"draft_length 3 contradicts file .*b\.log', which has drafts of 5 tokens; give 5"):
        engine_log.read(paths, draft_length=[3, 3])
    for wrong in ([3], [3, 5, 5]):
        with pytest.raises(ParameterError, match=f"one number, or one for each of the 2 files in their order, got {len(wrong)}"):
            engine_log.read(paths, draft_length=wrong)


@pytest.mark.parametrize(("text", "settings"), [
    ("\n".join(engine_line(8, 300.0) for _ in range(2)), "config: model='m', speculative_config={}, tokenizer='m'"),
    (writers.sglang_line(0, 4, 100.0, 400), "server_args=ServerArgs(model_path='m', speculative_algorithm={})"),
])  # fmt: skip
def test_settings_that_an_engine_prints_say_that_it_decodes_plainly(text: str, settings: str) -> None:
    said = imported(f"{settings.format(None)}\n{text}")
    given = imported(text, draft_length=0)
    assert (said.cells, said.draft_length) == (given.cells, 0)
    assert "which has plain decoding; give 0 for it" in refused(f"{settings.format(None)}\n{text}", draft_length=3)
    assert "--draft-length 0" in refused(f"{settings.format('EAGLE3')}\n{text}")


def test_a_benchmark_of_known_draft_length_without_acceptance_is_a_cell_without_a_length(tmp_path: Path) -> None:
    result = {key: value for key, value in writers.vllm_bench_json(HALVES).items() if not key.startswith("spec_decode")}
    found = imported(json.dumps(result), draft_length=3)
    assert [(cell.draft_length, cell.mean_acceptance_length, cell.tpot_ms) for cell in found.cells] == [(3, None, 10.0)]
    assert any("mean_acceptance_length" in note for note in found.notes)
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, text in zip(paths, (json.dumps(result), json.dumps(writers.vllm_bench_json(HALVES))), strict=True):
        path.write_text(text)
    assert [cell.draft_length for cell in engine_log.read(paths, draft_length=[3, 3]).cells] == [3, 3]
    with pytest.raises(ParameterError, match=r"a\.json.* so that 3 may not be for it; give one number for each file"):
        engine_log.read(paths, draft_length=3)  # it may be of plain decoding


EVAL = """
0.06.895.980 I slot print_timing: id  1 | task 0 | prompt eval time =     300.11 ms /    20 tokens (   15.01 ms per token)
0.06.895.998 I slot print_timing: id  1 | task 0 |        eval time =    2296.72 ms /   256 tokens (    8.97 ms per token)
"""
WITHOUT_CELLS = {
    "llama.cpp": (f"{EVAL}{LINES['llama.cpp'][0]}\n{EVAL}", "eval time of llama.cpp (8.972 ms per token over 512 tokens) gives no"),
    "llama.cpp timings": (
        json.dumps({"timings": {"predicted_n": 16, "predicted_ms": 162.0, "draft_n": 12, "draft_n_accepted": 9}}),
        "predicted_per_token_ms of llama.cpp's timings gives no cell, for want of the number of sequences",
    ),
    "trtllm": (REPORT.replace("Number of concurrent", "Other"), "TPOT of trtllm-bench gives no cell, for want of the number of"),
    "sglang bench": (json.dumps({**sglang_result(2.5, 9.0), "max_concurrency": None}), "gives no cell, for want of the number of"),
    "vllm bench": (writers.vllm_bench(HALVES).replace("Maximum request", "Other"), "TPOT or throughput of a benchmark gives no"),
}  # fmt: skip


@pytest.mark.parametrize("name", WITHOUT_CELLS)
def test_times_that_give_no_cell_are_noted_with_what_is_missing(name: str) -> None:
    text, expected = WITHOUT_CELLS[name]
    found = imported(text)
    assert found.cells == ()
    assert sum(expected in note for note in found.notes) == 1, found.notes
    assert any("no cells: " in line for line in engine_log.report(found))


def test_times_of_plain_decoding_alone_are_refused_with_what_is_missing() -> None:
    assert "eval time of llama.cpp (8.972 ms per token over 256 tokens) gives no cell" in refused(EVAL)
    for text in (BARE_REPORT, json.dumps({
        "request_info": {"num_requests": 2, "avg_num_concurrent_requests": 4.0},
        "performance": {"system_output_throughput_tok_s": 1000.0}, "streaming_metrics": {"avg_tpot_ms": 3.5},
    })):  # fmt: skip
        assert "trtllm-bench without [AL] gives no cell" in refused(text)
        cell, = imported(text, draft_length=0).cells
        assert (cell.sequences, cell.draft_length, cell.mean_acceptance_length, cell.tpot_ms) == (4, 0, 1, 3.5)


def test_cells_of_several_units_are_noted(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text(json.dumps(writers.vllm_bench_json(HALVES)))
    (tmp_path / "b.log").write_text(PAIRS["vllm log"][1])
    found = engine_log.read([tmp_path / "a.json", tmp_path / "b.log"])
    assert any("several units, tpot_ms and output_tokens_per_s" in note for note in found.notes)


def test_draft_length_of_the_user_fills_in_what_is_missing() -> None:
    line = writers.sglang_line(2.5, 4, 100.0, 400)
    assert imported(line).cells[0].draft_length is None
    found = imported(line, draft_length=3)
    assert (found.draft_length, found.cells[0].draft_length) == (3, 3)
    bare = "draft acceptance rate = 0.57576 (  171 accepted /   297 generated)"
    assert (imported(bare).draft_length, imported(bare, draft_length=8).draft_length) == (None, 8)
    assert imported(LINES["vllm v1"][0], draft_length=5).draft_length == 5
    message = refused(LINES["vllm v1"][0], draft_length=3)
    assert "draft_length 3 contradicts file" in message
    assert "x.log', which has drafts of 5 tokens; give 5 for it" in message
    assert "has drafts, whose length it does not say; give their length" in refused(line, draft_length=0)


def test_a_histogram_alone_has_all_counts() -> None:
    line = Steps(3, (0, 1, 1, 3))
    found = imported(json.dumps({"choices": [{"text": "x"}], "sglext_spec": {"spec_correct_drafts_histogram": line.histogram}}))
    assert (found.engine, found.drafts, found.accepted, found.histogram) == ("sglang", 4, 5, tuple(line.histogram))
    assert found.draft_length is None  # the histogram ends at the most tokens that were accepted
    alone = imported(json.dumps({"meta_info": {"spec_accept_length": 2.5, "completion_tokens": 100}}))
    assert (alone.mean_acceptance_length, alone.drafts) == (2.5, None)


def test_bench_serving_of_sglang() -> None:
    rows = {
        "backend": "sglang", "completed": 10, "max_concurrency": None, "concurrency": 2.5, "total_input_tokens": 1000,
        "duration": 9.0, "total_output_tokens": 500, "mean_tpot_ms": 7.0, "mean_itl_ms": 7.0, "output_throughput": 70.0,
        "accept_length": 2.75,
        "mean_e2e_latency_ms": 9.0,
    }  # fmt: skip
    text = "Max request concurrency:                 not set\nConcurrency:                             2.50\n" + "\n".join(
        f"{label}: {rows[key]}" for label, key in engine_log.sglang.serving_benchmarks.LABELS.items()
        if rows.get(key) is not None and key not in ("max_concurrency", "concurrency", "mean_itl_ms")
    )  # fmt: skip
    for found in (imported(json.dumps(rows)), imported(text)):
        assert (found.engine, found.mean_acceptance_length, found.drafts) == ("sglang", 2.75, None)
        cell, = found.cells
        assert (cell.sequences, cell.tpot_ms, cell.context) == (2.5, 7.0, 125.0)


def test_timings_of_llama_cpp_have_about_a_length() -> None:
    timings = {"timings": {"predicted_n": 16, "predicted_ms": 162.0, "draft_n": 12, "draft_n_accepted": 9}}
    found = imported(json.dumps([timings, timings]))
    assert (found.engine, found.drafts, found.drafted, found.accepted, found.requests) == ("llama.cpp", None, 24, 18, 2)
    assert found.mean_acceptance_length == pytest.approx(1 + 9 / 7)
    assert any("about" in note for note in found.notes)


def test_acceptance_that_was_forced_is_noted() -> None:
    found = imported(f"export SGLANG_SIMULATE_ACC_LEN=2.5\n{LINES['sglang'][0]}")
    assert any("SGLANG_SIMULATE_ACC_LEN" in note for note in found.notes)


# --- Identities are reported ---


@pytest.mark.parametrize(
    ("old", "new", "identity"),
    [
        ("length: 5.14", "length: 5.94", OF_COUNTS), ("length: 5.14", "length: 5.94", OF_RATES), ("82.7%", "84.7%", OF_RATIO),
        ("0.863, 0.823", "0.823, 0.863", NEVER_RISE), ("length: 5.14", "length: 6.14", AT_MOST),
    ],
)  # fmt: skip
def test_an_identity_that_fails_is_reported(old: str, new: str, identity: str) -> None:
    text = LINES["vllm v1"][0]
    assert holding(imported(text))[identity]
    assert not holding(imported(text.replace(old, new)))[identity]


def test_other_identities_that_fail() -> None:
    line = Steps(3, (0, 1, 2, 3) * 50)
    response = writers.vllm_response(line)
    metrics = response["metrics"]["speculative_decoding"]
    metrics["acceptance_histogram"] = [50, 50, 50, 49]
    assert not holding(imported(json.dumps(response)))[SUM]
    metrics["acceptance_histogram"] = [49, 51, 50, 50]
    found = holding(imported(json.dumps(response)))
    assert (found[SUM], found[MOMENT]) == (True, False)
    assert not holding(imported(writers.vllm_bench(line).replace("Mean ITL (ms): ", "Mean ITL (ms):  9")))[SPACING]
    whole = imported(writers.vllm_v1(Steps(2, (2,) * 200), range(7)))
    assert not holding(whole)[REAL_TEXT]
    assert any("real text" in note for note in whole.notes)
    assert not holding(imported(LINES["vllm v0"][0].replace("0.510", "0.610")))[EFFICIENCY]


# --- Several files ---


def test_files_are_summed(tmp_path: Path) -> None:
    lines = [Steps(3, (0, 1, 3)), Steps(3, (2,) * 5), Steps(5, (5, 0))]
    paths = [tmp_path / f"{index}.log" for index in range(3)]
    for path, line in zip(paths, lines, strict=True):
        path.write_text(writers.vllm_v1(line, range(7)))
    found = engine_log.read(paths[:2])
    as_counts(found, together(lines[:2]), "vllm")
    assert [(each.file, each.lines) for each in found.sources] == [("0.log", 1), ("1.log", 1)]
    mixed = engine_log.read(paths)
    assert (mixed.drafts, mixed.draft_length) == (10, None)
    assert any("mixed (3, 5)" in note for note in mixed.notes)
    assert len(mixed.known_rates) == 3  # positions that all drafts reach
    with pytest.raises(ParameterError, match="one twice"):
        engine_log.read([paths[0], paths[0]])
    paths[2].write_text(LINES["sglang"][0])
    with pytest.raises(ParameterError, match=r"one engine, got 0\.log: vllm, 2\.log: sglang"):
        engine_log.read([paths[0], paths[2]])


def test_output_of_two_engines_in_a_file_needs_a_choice() -> None:
    text = f"{LINES['sglang'][0]}\n{LINES['vllm v1'][0]}"
    assert "choose one with --engine" in refused(text)
    assert imported(text, engine="sglang").engine == "sglang"
    assert imported(text, engine="vllm").drafts == 124
    assert "looked for" in refused(text, engine="eagle")
    assert "unknown engine 'vlm'; did you mean vllm?" in refused(text, engine="vlm")


def test_colour_codes_do_not_matter() -> None:
    coloured = LINES["vllm v1"][0].replace("SpecDecoding", "\x1b[36mSpecDecoding") + "\x1b[0m"
    assert imported(coloured).drafts == imported(LINES["vllm v1"][0]).drafts


def test_list_of_what_was_looked_for_is_short() -> None:
    assert len(refused("hello")) < 500
    assert "SpecDecoding" in refused("hello", engine="vllm")


# --- Files that are refused ---

V1 = LINES["vllm v1"][0]
BAD: dict[str, tuple[str | bytes, str]] = {
    "empty": ("", "it is empty"), "blank": ("\n \n", "it is empty"), "binary": (b"\x7fELF\x00\x01", "zero byte"),
    "not UTF-8": (b"\xff\xfe line", "UTF-8"), "gzip": (gzip.compress(b"Decode batch"), "it is compressed; unpack it first"),
    "PowerShell": ("Decode batch".encode("utf-16"), "not text in UTF-8; save it as UTF-8"),
    "long line": ("x" * (2**20 + 1), "at most 1,048,576"),
    "other text": ("hello\nworld\n", "looked for"), "other JSON": ('{"a": [1, 2]}', "looked for"),
    "cut JSON": (json.dumps(writers.vllm_response(Steps(3, (1, 2))))[:-9], "begins as JSON"),
    "cut JSON lines": (json.dumps(writers.vllm_response(Steps(3, (1, 2)))) + '\n{"metrics": ', "line 2 must be JSON"),
    "deep JSON": ("[" * 5000, "nested too deeply"), "NaN in JSON": ('{"draft_n": NaN, "draft_n_accepted": 1}', "NaN is not JSON"),
    "thousands": (V1.replace("Accepted: 513", "Accepted: 1,513"), "without separators of thousands; remove them"),
    "negative": (V1.replace("Accepted: 513", "Accepted: -513"), "Accepted must be at least 0, got -513"),
    "more accepted than drafted": (V1.replace("Accepted: 513", "Accepted: 713"), "at most the drafted=620, got 713"),
    "nan": (V1.replace("5.14", "nan"), "Mean acceptance length must be a finite number, got nan"),
    "inf": (V1.replace("0.863", "inf"), "rate must be a finite number, got inf"),
    "percent": (V1.replace("82.7%", "182.7%"), "must be between 0 and 1 (100 per cent), got 1.827"),
    "negative rate": (V1.replace("0.960", "-0.960"), "must be between 0 and 1 (100 per cent), got -0.96"),
    "rate": (V1.replace("0.960", "1.960"), "must be between 0 and 1 (100 per cent), got 1.96"),
    "length": (V1.replace("5.14", "0.14"), "must be between 1 and 1025, got 0.14"),
    "word": (V1.replace("5.14", "five"), "must be a number, got 'five'"),
    "huge count": (V1.replace("620", "9" * 400), "Drafted must be"),
    "low line": (V1.replace("Drafted: 620", "Drafted: 1_620"), "Drafted must be a whole number, got '1_620'"),
    "other digits": (V1.replace("5.14", "\u0665"), "Mean acceptance length must be a number, got"),
    "long number": (writers.sglang_line(2.5, 1, 100.0, 10).replace("100.00", "9" * 5000), "must be a finite number, got '999"),
    "huge time": (writers.vllm_bench(HALVES).replace("10.00", "1e300"), "tpot_ms must be between 1e-09 and 1e+12, got 1e+300"),
    "tiny time": (writers.eagle_line([HALVES], False).replace("0.04", "1e-300"), "cells.tpot_ms must be between 1e-09 and"),
    "half a token": (V1.replace("513", "513.5"), "Accepted must be a whole number, got 513.5"),
    "bench percent": (
        "Acceptance rate (%):  173.47\nAcceptance length: 3.2\nDrafts: 10\nDraft tokens: 30\nAccepted tokens: 22", "1.7347",
    ),
    "gaps": ("Acceptance length: 3.2\n  Position 0: 80.0\n  Position 2: 60.0", "without gaps"),
    "counter NaN": ("vllm:spec_decode_num_drafts_total NaN", "num_drafts must be"),
    "counter twice": ("vllm:spec_decode_num_drafts_total 1\nvllm:spec_decode_num_drafts_total 2", "keep one scrape"),
    "drafted without drafts": ("vllm:spec_decode_num_drafts_total 0\nvllm:spec_decode_num_draft_tokens_total 2", "at least 1"),
    "json counts": (json.dumps({"draft_n": 3, "draft_n_accepted": 4}), "at most the drafted=3, got 4"),
    "json text": (json.dumps({"draft_n": "three", "draft_n_accepted": 1}), "draft_n must be a whole number"),
    "sglang": (writers.sglang_line(2.5, 1, 100.0, 10).replace("2.50", "0.50"), "accept len must be between 1"),
    "eval time": (EVAL.replace("2296.72", "-1"), "eval time must be at least 0, got -1"),
    "sglang rate": (writers.sglang_line(2.5, 1, 100.0, 10, accept_rate="accept rate: -0.84, "), "got -0.84"),
    "v0": (LINES["vllm v0"][0].replace("34244", "134244"), "emitted tokens must be at most"),
    "llama": (LINES["llama.cpp"][0].replace("167 accepted", "367 accepted"), "at most the drafted=259, got 367"),
    "llama-speculative": ("n_drafted = 3\nn_accept = 9", "at most the drafted=3, got 9"),
    "eagle": (json.dumps({"new_tokens": [2], "idxs": [5]}), "at least the steps=6"),
    "eagle lists": (json.dumps({"new_tokens": [2, 3], "idxs": [1]}), "one number for each of idxs"),
    "mlx": ("from_draft: 140%", "got 1.4"), "mlx all": ("from_draft: 100%", "below 1"),
    "iterations": (json.dumps(writers.trtllm_rows(Steps(2, (3,)))), "at most numDraftTokens=2, got 3"),
    "histogram": (json.dumps(writers.vllm_response(Steps(2, (1,)))).replace("[0, 1, 0]", "[0, -1, 0]"), "at least 0, got -1"),
    "wide histogram": (json.dumps(writers.vllm_response(Steps(2, (1,)), True)).replace('{"1"', '{"10000000"'), "at most 1024"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_files_are_refused_in_a_line(name: str) -> None:
    content, expected = BAD[name]
    message = refused(content)
    assert "x.log" in message
    assert expected in message, message


def test_folders_pipes_and_missing_files_are_refused(tmp_path: Path) -> None:
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "none", tmp_path / "loop", tmp_path / "pipe"):
        with pytest.raises(ParameterError, match="cannot be read"):
            engine_log.read([path])
    with pytest.raises(ParameterError, match="at least one log"):
        engine_log.read([])


# --- Writing ---


def written(here: Path, text: str, *more: str) -> Any:
    (here / "x.log").write_text(text)
    return CliRunner().invoke(app, ["import", "engine-log", str(here / "x.log"), "-o", str(here / "made"), *more])


def test_record_and_cells_are_written(tmp_path: Path) -> None:
    done = written(tmp_path, LINES["sglang"][0])
    assert done.exit_code == 0, done.output
    assert "ms per step" in done.stdout
    assert (tmp_path / "made.cells.csv").read_text().splitlines() == [
        "sequences,draft_length,mean_acceptance_length,step_ms,context,weight", "1,3,1.95,10.90238,186.0,1",
    ]  # fmt: skip
    assert acceptance_record.load(tmp_path / "made.json").mean_acceptance_length == 1.95
    alone = tmp_path / "alone"
    alone.mkdir()
    done = written(alone, V1, "--json")
    assert sorted(path.name for path in alone.iterdir()) == ["made.json", "x.log"]
    said = json.loads(done.stdout)
    assert (said["kind"], said["drafts"], said["files"]) == ("acceptance-record", 124, [str(alone / "made.json")])


@pytest.mark.parametrize("name", ["", ".", "..", "/", ".json", "x.json", "x"])
def test_names_that_are_none_or_of_an_input_are_refused(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    content = json.dumps(writers.vllm_bench_json(HALVES))
    (tmp_path / "x.json").write_text(content)
    done = CliRunner().invoke(app, ["import", "engine-log", "x.json", "-o", name])
    assert (done.exit_code, len(done.stderr.splitlines())) == (2, 1), done.stderr
    assert ("is one of the files to import" if "x" in name else "out must name a file") in done.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x.json", content)]


def test_a_record_is_no_log(tmp_path: Path) -> None:
    assert "it is an acceptance record already" in refused(acceptance_record.dumps(imported(V1)))


@pytest.mark.parametrize("name", ["made.json", "made.cells.csv"])
def test_both_files_are_written_or_neither(name: str, tmp_path: Path) -> None:
    (tmp_path / name).mkdir()
    done = written(tmp_path, LINES["sglang"][0])
    assert done.exit_code == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([name, "x.log"])


def test_failure_between_the_files_leaves_neither(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("model.logs.engine_logs.engine_log.whole_files.write_text", full)
    done = written(tmp_path, LINES["sglang"][0])
    assert done.exit_code != 0
    assert [path.name for path in tmp_path.iterdir()] == ["x.log"]


def test_options_of_the_command(tmp_path: Path) -> None:
    done = written(tmp_path, f"{LINES['sglang before 2025-10'][0]}\n{V1}", "--engine", "sglang", "--draft-length", "4")
    found = acceptance_record.load(tmp_path / "made.json")
    assert (found.engine, found.draft_length) == ("sglang", 4), done.output


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "profile"}, "not an acceptance record"), ({"schema_version": 2}, "schema_version must be 1, got 2"),
        ({"engine": "vlm"}, "did you mean vllm"), ({"accepted": 10**6}, "at most drafted=620"),
        ({"survival": [2.0] * 5}, "survival[0]"), ({"survival": [0.5]}, "one rate for each of survival"),
        ({"drafts": -1}, "drafts must be"), ({"notes": "x"}, "notes must be a list"),
        ({"cells": [{}]}, "cells must be objects with"),
        ({"draft_length": 10**9}, "draft_length must be"), ({"more": 1}, "unknown key"),
        ({"histogram": [1.5]}, "histogram must be a whole number"), ({"per_request": [1]}, "lists by name"),
    ],
)  # fmt: skip
def test_records_that_are_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    said = json.loads(acceptance_record.dumps(imported(V1))) | change
    path = tmp_path / "made.json"
    path.write_text(json.dumps(said))
    with pytest.raises(ParameterError, match="cannot be read") as caught:
        acceptance_record.load(path)
    assert message in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


# --- Settings of the server ---

START = "config: model='a/M', speculative_config=SpeculativeConfig(method='eagle3', model='b/E', num_spec_tokens=5), seed=0"
WITHOUT_POSITIONS = "SpecDecoding metrics: Mean acceptance length: 3.50, Accepted: 250 tokens, Drafted: 500 tokens"


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (START, ServedSettings("a/M", "eagle3", "b/E", 5)),
        ("non-default args: {'model': 'a/M', 'speculative_config': {'num_speculative_tokens': 4, 'model': 'b/D'}, 'seed': 42}",
         ServedSettings("a/M", None, "b/D", 4)),
        ("speculative_config=SpeculativeConfig(method='ngram', model='ngram', num_spec_tokens=2), model='a/M'",
         ServedSettings("a/M", "ngram", None, 2)),
        ("server_args=ServerArgs(model_path='a/M', speculative_algorithm='STANDALONE', speculative_draft_model_path='/w/D',"
         " speculative_num_steps=3)", ServedSettings("a/M", "draft_model", "/w/D", 3)),
        ('server_args={"model_path": "a/M", "speculative_algorithm": "EAGLE3"}', ServedSettings("a/M", "eagle3")),
        ("server_args=ServerArgs(model_path='a/M', speculative_algorithm=None)", ServedSettings("a/M")),
        ("config: model='a/M; rm -rf', speculative_config=SpeculativeConfig(method='deepseek_mtp', num_spec_tokens=99999)",
         ServedSettings(None, "mtp")),
        ("speculative_config=", None), ("speculative_config=SpeculativeConfig(((", None), ("server_args=", None),
    ],
)  # fmt: skip
def test_settings_of_a_server_are_read(line: str, expected: ServedSettings | None) -> None:
    assert served_settings.of_line(line) == expected
    if expected is not None:
        assert imported(f"{line}\n{V1}").served == expected


def test_draft_length_of_the_settings_is_that_of_lines_that_do_not_say_it() -> None:
    assert imported(WITHOUT_POSITIONS).draft_length is None
    found = imported(f"{START}\n{WITHOUT_POSITIONS}")
    assert found == replace(imported(f"{START}\n{WITHOUT_POSITIONS}", draft_length=5), served=found.served)
    assert found.draft_length == 5
    assert imported(f"{START.replace('=5', '=3')}\n{V1}").draft_length == 5  # lines with positions say what was drafted
    assert "draft_length 4 contradicts" in refused(f"{START}\n{WITHOUT_POSITIONS}", draft_length=4)


def test_servers_that_differ_give_only_what_they_agree_on() -> None:
    found = imported(f"{START}\n{V1}\n{START.replace('b/E', 'c/E')}\n{V1}")
    assert found.served == ServedSettings("a/M", "eagle3", None, 5)
    assert any("differ in draft, which" in note for note in found.notes)
    plain = imported(f"config: model='a/M', speculative_config=None\n{START}\n{V1}")
    assert plain.served == ServedSettings("a/M", "eagle3", "b/E", 5)


def test_records_of_before_have_no_settings() -> None:
    said = json.loads(acceptance_record.dumps(imported(f"{START}\n{V1}")))
    assert acceptance_record.of_document({key: value for key, value in said.items() if key != "served"}).served is None
    for bad, message in (({"model": 1}, "served must be objects"), ({**said["served"], "draft_length": 0}, "served.draft_length")):
        with pytest.raises(ParameterError, match=message):
            acceptance_record.of_document(said | {"served": bad})


def test_summary_of_llama_speculative_says_what_it_lacks() -> None:
    found = imported("n_draft   = 8\nn_predict = 200\nn_drafted = 240\nn_accept  = 150\naccept    = 62.500%\n")
    assert (found.drafts, found.drafted, found.accepted, found.mean_acceptance_length) == (None, 240, 150, None)
    assert any("no number of drafts; llama-server prints it" in note for note in found.notes)
