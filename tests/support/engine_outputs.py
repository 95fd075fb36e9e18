"""Writers of engines' output from known counts: each prints as its engine does, with the fields of a line in any order."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from hypothesis import strategies as st


@dataclass(frozen=True)
class Steps:
    """Verification steps of drafts of one length: accepted tokens of each."""

    draft_length: int
    accepted: tuple[int, ...]

    @property
    def drafts(self) -> int:
        """Number of drafts."""
        return len(self.accepted)

    @property
    def drafted(self) -> int:
        """Number of drafted tokens."""
        return self.draft_length * self.drafts

    @property
    def total(self) -> int:
        """Number of accepted tokens."""
        return sum(self.accepted)

    @property
    def length(self) -> float:
        """Mean acceptance length."""
        return 1 + self.total / self.drafts

    @property
    def histogram(self) -> list[int]:
        """Drafts with exactly 0, 1, 2, ... accepted tokens."""
        return [self.accepted.count(number) for number in range(self.draft_length + 1)]

    @property
    def positions(self) -> list[int]:
        """Drafts with at least 1, 2, ... accepted tokens."""
        return [sum(number > index for number in self.accepted) for index in range(self.draft_length)]

    def rates(self, digits: int = 3, percent: bool = False) -> list[str]:
        """Survival by position as printed."""
        return [f"{each / self.drafts * (100 if percent else 1):.{digits}f}" for each in self.positions]


@st.composite
def steps(draw: st.DrawFn, draft_length: int | None = None, most: int = 200) -> Steps:
    """Draw the steps of one line or request; drafts are of 1 to 6 tokens."""
    longest = draw(st.integers(1, 6)) if draft_length is None else draft_length
    return Steps(longest, tuple(draw(st.lists(st.integers(0, longest), min_size=1, max_size=most))))


@st.composite
def logs(draw: st.DrawFn, most: int = 200) -> list[Steps]:
    """Draw the lines of a log, all with drafts of one length."""
    longest = draw(st.integers(1, 6))
    return draw(st.lists(steps(longest, most), min_size=1, max_size=4))


def together(lines: Sequence[Steps]) -> Steps:
    """All steps of a log."""
    return Steps(lines[0].draft_length, tuple(number for line in lines for number in line.accepted))


def vllm_v1(line: Steps, order: Sequence[int]) -> str:
    """Line of vLLM V1; `order` is a permutation of its six fields."""
    fields = [
        f"Mean acceptance length: {line.length:.2f}", f"Accepted throughput: {line.total / 10:.2f} tokens/s",
        f"Drafted throughput: {line.drafted / 10:.2f} tokens/s", f"Accepted: {line.total} tokens",
        f"Drafted: {line.drafted} tokens", f"Per-position acceptance rate: {', '.join(line.rates())}",
        f"Avg Draft acceptance rate: {100 * line.total / line.drafted:.1f}%",
    ]  # fmt: skip
    return "INFO 09-18 04:30:45 [metrics.py:120] SpecDecoding metrics: " + ", ".join(fields[index] for index in order)


def lmdeploy_log(line: Steps, order: Sequence[int], running: int = 3) -> str:
    """Line of LMDeploy."""
    fields = [
        f"Draft acceptance rate: {100 * line.total / line.drafted:.2f}%", f"Mean acceptance length: {line.length:.2f}",
        f"Accepted: {line.total} tokens", f"Drafted: {line.drafted} tokens",
        f"Per-position acceptance rate: {', '.join(line.rates())}",
    ]  # fmt: skip
    head = f"[2026-05-01 10:00:00 Engine 000] Avg thr (in/out): 0.0 / {line.total + line.drafts:.1f} tokens/s, "
    head += f"Server (succeeded/failed/routed/waiting): 1 / 0 / 3 / 0, Engine (running/waiting): {running} / 0, KV cache: 1.0%, "
    return f"{head}SpecDecoding metrics: {', '.join(fields[index] for index in order)}"


def vllm_v0(line: Steps, accepted: int, order: Sequence[int]) -> str:
    """Line of vLLM V0, whose accepted tokens include some after a rejected one."""
    emitted = line.total + line.drafts
    fields = [
        f"Draft acceptance rate: {accepted / line.drafted:.3f}",
        f"System efficiency: {emitted / line.drafts / (line.draft_length + 1):.3f}",
        f"Number of speculative tokens: {line.draft_length}", f"Number of accepted tokens: {accepted}",
        f"Number of draft tokens: {line.drafted}", f"Number of emitted tokens: {emitted}",
    ]  # fmt: skip
    return f"Speculative metrics: {', '.join(fields[index] for index in order)}."


def vllm_bench(line: Steps, tpot: float = 10.0, concurrency: int = 8) -> str:
    """Printed result of vllm bench serve."""
    rows = [
        ("Successful requests:", "20"), ("Maximum request concurrency:", str(concurrency)), ("Benchmark duration (s):", "30.00"),
        ("Total input tokens:", "2000"), ("Total generated tokens:", "1000"), ("Mean TPOT (ms):", f"{tpot:.2f}"),
        ("Mean ITL (ms):", f"{tpot * line.length:.2f}"), ("Acceptance rate (%):", f"{100 * line.total / line.drafted:.2f}"),
        ("Acceptance length:", f"{line.length:.2f}"), ("Drafts:", str(line.drafts)), ("Draft tokens:", str(line.drafted)),
        ("Accepted tokens:", str(line.total)), ("Per-position acceptance (%):", ""),
        *((f"  Position {index}:", rate) for index, rate in enumerate(line.rates(2, percent=True))),
    ]  # fmt: skip
    text = "\n".join(f"{label:<40} {value:<10}" for label, value in rows)
    return f"============ Serving Benchmark Result ============\n{text}\n{'=' * 50}"


def vllm_bench_json(line: Steps, tpot: float = 10.0, concurrency: int = 8) -> dict[str, Any]:
    """Result of vllm bench serve in JSON."""
    return {
        "backend": "openai", "completed": 20, "max_concurrency": concurrency, "total_input_tokens": 2000,
        "total_output_tokens": 1000, "mean_tpot_ms": tpot, "mean_itl_ms": tpot * line.length, "output_throughput": 300.0,
        "errors": ["", ""],
        "spec_decode_acceptance_rate": 100 * line.total / line.drafted, "spec_decode_acceptance_length": line.length,
        "spec_decode_num_drafts": line.drafts, "spec_decode_draft_tokens": line.drafted, "spec_decode_accepted_tokens": line.total,
        "spec_decode_per_position_acceptance_rates": [each / line.drafts for each in line.positions],
    }  # fmt: skip


def vllm_response(line: Steps, sparse: bool = False) -> dict[str, Any]:
    """Response of vLLM with the metrics of its request."""
    histogram: Any = line.histogram
    if sparse:
        histogram = {str(index): number for index, number in enumerate(line.histogram) if number}
    metrics = {
        "mean_acceptance_length": line.length, "draft_acceptance_rate": line.total / line.drafted,
        "acceptance_histogram": histogram, "num_spec_steps": line.drafts, "num_accepted_draft_tokens": line.total,
        "num_draft_tokens": line.drafted, "num_spec_tokens": line.draft_length,
    }  # fmt: skip
    return {"choices": [{"text": "x"}], "usage": {"completion_tokens": 9}, "metrics": {"speculative_decoding": metrics}}


def counters(line: Steps, prefix: str, labels: str = 'engine="0"') -> str:
    """Prometheus text."""
    rows = [f'{prefix}:spec_decode_num_accepted_tokens_per_pos_total{{{labels},position="{index}"}} {float(number)}'
            for index, number in enumerate(line.positions)]  # fmt: skip
    for name, value in (("drafts", line.drafts), ("draft_tokens", line.drafted), ("accepted_tokens", line.total)):
        rows += [
            f"# TYPE {prefix}:spec_decode_num_{name}_total counter",
            f"{prefix}:spec_decode_num_{name}_total{{{labels}}} {float(value)}",
            f"{prefix}:spec_decode_num_{name}_created{{{labels}}} 1.7e+09",
        ]
    return "\n".join([*rows, f"{prefix}:num_requests_running{{{labels}}} 0.0"])


def sglang_line(length: float, running: int, rate: float, tokens: int, date: str = "2026-05-02", accept_rate: str = "") -> str:
    """Decode line of SGLang; without a length (0) it is of plain decoding."""
    accept = f"accept len: {length:.2f}, {accept_rate}" if length else ""
    return (
        f"[{date} 10:27:57 TP0] Decode batch. #running-req: {running}, #token: {tokens}, token usage: 0.00, {accept}cuda graph:"
        f" True, gen throughput (token/s): {rate:.2f}, #queue-req: 0, "
    )


def sglang_response(line: Steps, names: int = 0) -> dict[str, Any]:
    """Response of SGLang; the names of its counts changed twice."""
    accepted, drafted, histogram = (
        ("spec_accept_token_num", "spec_draft_token_num", "spec_accept_histogram"),
        ("spec_num_correct_drafts", "spec_num_proposed_drafts", "spec_correct_drafts_histogram"),
        ("spec_accepted_drafts", "spec_proposed_drafts", "spec_accept_histogram"),
    )[names]
    meta = {
        "completion_tokens": line.total + line.drafts + 1, "spec_verify_ct": line.drafts, accepted: line.total,
        drafted: line.drafted, histogram: line.histogram, "spec_accept_length": (line.total + line.drafts + 1) / line.drafts,
    }  # fmt: skip
    return {"text": "x", "meta_info": meta}


def llama_request(line: Steps, task: int) -> str:
    """Line of llama.cpp's server about a request."""
    ratio, shown = line.total / line.drafted, ", ".join(line.rates())
    return (
        f"slot print_timing: id  1 | task {task} | draft acceptance = {ratio:.5f} ({line.total:5d} accepted / {line.drafted:5d}"
        f" generated), mean acceptance length = {line.length:5.2f}, acceptance rate per position = ({shown})"
    )


def llama_statistics(line: Steps, milliseconds: float) -> str:
    """Line of llama.cpp's totals since the start."""
    some = sum(number > 0 for number in line.accepted)
    return (
        f"statistics     draft-eagle3: #calls(b,g,a) =    1 {line.drafts:6d} {line.drafts:6d}, #gen drafts = {line.drafts:6d}, #acc"
        f" drafts = {some:5d}, #gen tokens = {line.drafted:6d}, #acc tokens = {line.total:5d}, #mean acc len = {line.length:.2f},"
        f" #acc rate/pos = ({', '.join(line.rates())}), dur(b,g,a) = 0.005, {milliseconds:.3f}, 0.114 ms"
    )


def trtllm_rows(line: Steps) -> list[dict[str, Any]]:
    """Iteration statistics of TensorRT-LLM: a row per step, and one without drafts."""
    rows = [
        {"iter": index, "iterLatencyMS": 5.0, "inflightBatchingStats": {"numContextRequests": 0, "numGenRequests": 1},
         "specDecodingStats": {"numDraftTokens": line.draft_length, "numAcceptedTokens": number, "numRequestsWithDraftTokens": 1,
                               "acceptanceLength": float(number + 1), "iterLatencyMS": 1.0, "draftOverhead": 0.2}}
        for index, number in enumerate(line.accepted)
    ]  # fmt: skip
    none = {"numDraftTokens": 0, "numAcceptedTokens": 0, "numRequestsWithDraftTokens": 0, "acceptanceLength": 0.0}
    return [{"iter": -1, "iterLatencyMS": 50.0, "specDecodingStats": none}, *rows]


def trtllm_report(requests: Sequence[Steps]) -> str:
    """Printed report of trtllm-bench; each request generates a token in each iteration and its accepted ones."""
    count, longest = len(requests), requests[0].draft_length
    drafts, total = (sum(values) / count for values in zip(*((each.drafts, each.total) for each in requests), strict=True))
    mean = sum(each.length for each in requests) / count
    rows = [
        f"Number of requests:             {count}", "Number of concurrent requests:  4.0000",
        "Average Input Length (tokens):  100.0000",
        f"Average Output Length (tokens): {drafts + total:.4f}", "Average time-per-output-token [TPOT] (ms):        3.5000",
        "[DT] MINIMUM: 1.00", f"[DT] AVERAGE: {drafts * longest:.2f}", f"[ADT] AVERAGE: {total:.2f}", "[AL] MINIMUM: 1.00",
        "[AL] MAXIMUM: 4.00", f"[AL] AVERAGE: {mean:.2f}", "[AL] P50    : 2.00",
    ]  # fmt: skip
    return "\n".join(rows)


def eagle_line(turns: Sequence[Steps], listed: bool) -> str:
    """Answer of EAGLE's scripts; `listed` adds the tokens of every step."""
    choice: dict[str, Any] = {
        "index": 0, "turns": ["x"] * len(turns), "idxs": [each.drafts - 1 for each in turns],
        "new_tokens": [each.total + each.drafts for each in turns], "wall_time": [0.01 * each.drafts for each in turns],
    }  # fmt: skip
    if listed:
        choice["accept_length_list"] = [number + 1 for each in turns for number in each.accepted]
    return json.dumps({"question_id": 81, "model_id": "m", "choices": [choice], "tstamp": 1.5})


def mlx_tokens(line: Steps) -> str:
    """Tokens of mlx-lm in JSON lines: those of a draft, then the target's."""
    return "\n".join(
        json.dumps({"token": 1, "from_draft": mark}) for number in line.accepted for mark in [True] * number + [False]
    )
