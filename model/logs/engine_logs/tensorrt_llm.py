"""Dialects of TensorRT-LLM: the report of trtllm-bench, statistics of iterations, responses of trtllm-serve.

Sources: NVIDIA/TensorRT-LLM, tensorrt_llm/bench/dataclasses/reporting.py (report), cpp/include/tensorrt_llm/executor/types.h
(SpecDecodingStats of an iteration), tensorrt_llm/serve/openai_protocol.py (responses).
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from model.base.checks import ParameterError
from model.logs.acceptance_record import MeasuredCell
from model.logs.engine_logs.observations import Check, Observation, whole_length
from model.logs.engine_logs.output_forms import OutputForm, objects, separate
from model.logs.engine_logs.printed_figures import (
    Printed,
    count,
    json_count,
    json_number,
    length,
    optional,
    positive,
    printed,
)
from model.logs.engine_logs.serving_benchmarks import NO_CONCURRENCY
from model.logs.engine_logs.vllm import PLAIN, request

OF_ITERATION = "acceptanceLength = (accepted + requests) / requests"
OF_REQUESTS = "mean of [AL] over requests = outputs / iterations, within 10 %"

_LABELS = {
    "Number of requests": "requests", "Number of concurrent requests": "concurrency", "Average Input Length (tokens)": "input",
    "Average Output Length (tokens)": "output", "Total Output Throughput (tokens/sec)": "throughput",
    "Average time-per-output-token [TPOT] (ms)": "tpot", "[DT] AVERAGE": "drafted", "[ADT] AVERAGE": "accepted",
    "[AL] AVERAGE": "length",
}  # fmt: skip
_LINE = re.compile(rf"(?P<label>{'|'.join(map(re.escape, _LABELS))})\s*:\s*(?P<value>\S+)", re.IGNORECASE)
_KEYS = {label.lower(): key for label, key in _LABELS.items()}


class _Report:
    """Reader of printed reports: a label that is there already begins the next report."""

    def __init__(self, draft_length: int | None) -> None:
        self.given = draft_length
        self.block: dict[str, Printed] = {}

    def take(self, text: str) -> Iterator[Observation]:
        """Add a figure."""
        found = _LINE.search(text)
        if found is None:
            return
        key = _KEYS[found["label"].lower()]
        if key in self.block:
            yield from self.end()
        self.block[key] = printed(found["label"], found["value"])

    def end(self) -> Iterator[Observation]:
        """Observation of the report."""
        block, self.block = self.block, {}
        found = _benchmark(block, self.given)
        if found is not None:
            yield found


def _benchmark(block: Mapping[str, Printed], given: int | None) -> Observation | None:
    """Observation of a report's figures.

    [AL] is outputs / iterations of each request, and its average over requests is not that of all tokens. From the means of outputs
    and of accepted tokens (outputs - iterations) over requests, the length is the ratio of the sums. Drafted tokens are K times the
    iterations, an upper bound.
    """
    if "length" not in block:
        if not any(name in block for name in ("tpot", "throughput")):
            return None
        if given is None:
            return Observation(notes=[f"TPOT or throughput of trtllm-bench without [AL] gives no cell: {PLAIN}"])
        found, notes = _cells(block, None if given else 1.0, given)
        return Observation(cells=found, notes=notes)
    mean = length("[AL] AVERAGE", block["length"])
    made = Observation(length=mean, draft_length=given or None)
    requests = count("Number of requests", block["requests"].value) if "requests" in block else None
    made.requests = requests
    made.weight = float(requests or 1)
    outputs, accepted, drafted = (block.get(key) for key in ("output", "accepted", "drafted"))
    if outputs is not None and accepted is not None:
        iterations = outputs.value - accepted.value
        if accepted.value < 0 or iterations <= 0:
            bound = f"between 0 and the output length {outputs.value:g}"
            raise ParameterError(f"[ADT] AVERAGE must be {bound}, got {accepted.value:g}")
        slack = (outputs.half + accepted.half) / iterations * outputs.value / iterations
        made.length = Printed(max(outputs.value / iterations, 1.0), slack)
        made.checks.append(Check(OF_REQUESTS, abs(made.length.value / mean.value - 1), 0.1))
        made.notes.append("the length is outputs / iterations of all requests; [AL] AVERAGE is a mean of their separate lengths")
        if drafted is not None:
            longest = drafted.value / iterations
            error = (drafted.half + longest * (outputs.half + accepted.half)) / iterations
            if abs(longest - round(longest)) <= error + 1e-9 and error < 0.5 and longest >= 0.5:
                made.draft_length = round(longest)
                made.notes.append("draft_length is [DT] / iterations; drafted tokens are an upper bound, so drafted is null")
        if requests:
            made.weight = requests * iterations
    made.cells, notes = _cells(block, round(made.length.value, 4) if made.length else None, made.draft_length)
    made.notes += notes
    return made


def _cells(block: Mapping[str, Printed], mean: float | None, draft_length: int | None) -> tuple[list[MeasuredCell], list[str]]:
    """Cell of a report, or the reason why its time gives none."""
    at = {key: value.value for key, value in block.items()}
    running = positive("concurrency", at.get("concurrency"))
    tpot, rate = positive("tpot", at.get("tpot")), positive("throughput", at.get("throughput"))
    if tpot is None and rate is None:
        return [], []
    if running is None:
        name = "TPOT" if tpot is not None else "throughput"
        return [], [f"{name} of trtllm-bench {NO_CONCURRENCY} ('Number of concurrent requests' of its report)"]
    context = round(at["input"] + at["output"] / 2, 1) if "input" in at and "output" in at else None
    time = {"tpot_ms": tpot} if tpot is not None else {"output_tokens_per_s": rate}
    made = MeasuredCell(
        sequences=round(running, 4), draft_length=draft_length, mean_acceptance_length=mean, context=context, **time
    )  # fmt: skip
    return [made], []


def _report(document: Any, given: int | None) -> list[Observation]:
    found = []
    for each in objects(document):
        decoding, info = each.get("decoding_stats"), each.get("request_info")
        if not isinstance(info, dict) or not any(isinstance(each.get(name), dict) for name in ("decoding_stats", "performance")):
            continue
        decoding = decoding if isinstance(decoding, dict) else {}
        block = {}
        for key, holder, name in (
            ("requests", info, "num_requests"), ("concurrency", info, "avg_num_concurrent_requests"),
            ("input", info, "avg_input_length"), ("output", info, "avg_output_length"),
            ("throughput", each.get("performance"), "system_output_throughput_tok_s"),
            ("tpot", each.get("streaming_metrics"), "avg_tpot_ms"),
            ("drafted", decoding.get("num_draft_tokens_percentiles"), "average"),
            ("accepted", decoding.get("num_accepted_draft_tokens_percentiles"), "average"),
            ("length", decoding.get("acceptance_length_percentiles"), "average"),
        ):  # fmt: skip
            if isinstance(holder, dict) and holder.get(name) is not None:
                block[key] = json_number(name, holder[name])
        made = _benchmark(block, given)
        found += [] if made is None else [made]
    return found


# --- Iterations ---


class _Iterations:
    """Sums over iterations; those without drafts are dropped, whose acceptanceLength is 0 or 1."""

    def __init__(self, draft_length: int | None) -> None:
        self.sums = [0, 0, 0]
        self.rows = self.dropped = 0
        self.lengths: set[int | None] = set()
        self.times: dict[tuple[int, int | None], tuple[array[float], list[int]]] = {}
        self.checks: list[Check] = []

    def take(self, document: Any) -> Iterator[Observation]:
        """Add the iterations of a document."""
        for row in objects(document):
            if isinstance(row.get("specDecodingStats"), dict):
                self._add(row)
        return iter(())

    def _add(self, row: Mapping[str, Any]) -> None:
        found = row["specDecodingStats"]
        drafted, accepted = json_count(found, "numDraftTokens"), json_count(found, "numAcceptedTokens")
        requests = json_count(found, "numRequestsWithDraftTokens")
        if not drafted or not requests or accepted is None or json_count(row, "attentionDpRank", "attentionDPRank"):
            self.dropped += 1  # rows of other ranks repeat those of rank 0
            return
        if accepted > drafted:
            raise ParameterError(f"numAcceptedTokens must be at most numDraftTokens={drafted}, got {accepted}")
        self.rows += 1
        self.sums = [mine + more for mine, more in zip(self.sums, (requests, drafted, accepted), strict=True)]
        longest = whole_length(drafted, requests)
        self.lengths.add(longest)
        if optional(found, "acceptanceLength") is not None:
            mean = json_number("acceptanceLength", found["acceptanceLength"])
            difference = abs(mean.value - 1 - accepted / requests)
            if not self.checks or difference > self.checks[0].difference:
                self.checks = [Check(OF_ITERATION, difference, mean.half + 1e-6)]
        batch, time = row.get("inflightBatchingStats"), positive("iterLatencyMS", row.get("iterLatencyMS"))
        if time is not None and isinstance(batch, dict) and not json_count(batch, "numContextRequests"):
            running = json_count(batch, "numGenRequests", "numScheduledRequests") or requests
            times, sums = self.times.setdefault((running, longest), (array("d"), [0, 0]))
            times.append(time)
            sums[0], sums[1] = sums[0] + accepted, sums[1] + requests

    def end(self) -> Iterator[Observation]:
        """Observation of all rows."""
        if not self.rows:
            return
        drafts, drafted, accepted = self.sums
        notes = [f"{self.dropped} iterations without drafts, or of other ranks, are dropped"] if self.dropped else []
        cells = [
            MeasuredCell(
                sequences=running, draft_length=longest, mean_acceptance_length=round(1 + sums[0] / sums[1], 4),
                step_ms=round(median(times), 5), weight=len(times),
            )
            for (running, longest), (times, sums) in sorted(self.times.items(), key=lambda each: (each[0][0], each[0][1] or 0))
        ]  # fmt: skip
        if cells:
            notes.append("step_ms is the median iterLatencyMS of iterations without prompts; weight is their number")
        yield Observation(
            drafts=drafts, drafted=drafted, accepted=accepted, checks=self.checks, cells=cells, notes=notes,
            draft_length=next(iter(self.lengths)) if len(self.lengths) == 1 else None,
        )  # fmt: skip


# --- Responses ---


def _responses(document: Any, draft_length: int | None) -> list[Observation]:
    found = [each for each in objects(document) if "total_accepted_draft_tokens" in each and "num_spec_steps" in each]
    return [request(each) for each in found if each["num_spec_steps"]]


DIALECTS = (
    OutputForm("trtllm-bench-text", "'[AL] AVERAGE:' of trtllm-bench", tuple(_LABELS), _Report),
    OutputForm("trtllm-bench-json", "decoding_stats of trtllm-bench", documents=separate(_report)),
    OutputForm("trtllm-iterations", "specDecodingStats of iterations", documents=_Iterations),
    OutputForm("trtllm-responses", "speculative_decoding with total_accepted_draft_tokens", documents=separate(_responses)),
)
