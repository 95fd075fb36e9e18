"""Results of `vllm bench serve` and of SGLang's bench_serving: text blocks and JSON with the same figures, and their cells.

Labels and keys: vllm-project/vllm, vllm/benchmarks/serve.py; sgl-project/sglang, python/sglang/bench_serving.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from model.base import checks
from model.base.checks import ParameterError
from model.logs.acceptance_record import MOST_POSITIONS, MeasuredCell
from model.logs.engine_logs.observations import SPACING, Check, Observation
from model.logs.engine_logs.printed_figures import Printed, json_number, optional, positive, printed

LABELS = {
    "Successful requests": "completed", "Maximum request concurrency": "max_concurrency",
    "Max request concurrency": "max_concurrency", "Benchmark duration (s)": "duration", "Total input tokens": "total_input_tokens",
    "Total generated tokens": "total_output_tokens", "Output token throughput (tok/s)": "output_throughput",
    "Mean TPOT (ms)": "mean_tpot_ms", "Mean ITL (ms)": "mean_itl_ms", "Concurrency": "concurrency",
    "Acceptance rate (%)": "acceptance_rate", "Acceptance length": "acceptance_length", "Drafts": "num_drafts",
    "Draft tokens": "draft_tokens", "Accepted tokens": "accepted_tokens", "Accept length": "accept_length",
    "Mean E2E Latency (ms)": "mean_e2e_latency_ms",
}  # fmt: skip
"""Keys of the JSON result by the labels of the printed one."""
MARKS = (*(f"{label}:" for label in (*LABELS, "Backend")), "Position ", "Serving Benchmark Result")
_LINE = re.compile(r"^\s*(?P<label>[A-Z][^:]*?)\s*:\s*(?P<value>.*?)\s*$")
_POSITION = re.compile(r"Position (\d{1,4})$")


class TextBlocks:
    """Reader of printed results: each block becomes an observation by `convert`, which gets its figures by key."""

    def __init__(self, convert: Callable[[Mapping[str, Any]], Observation | None]) -> None:
        self.convert = convert
        self.block: dict[str, Any] = {}

    def take(self, text: str) -> Iterator[Observation]:
        """Add a figure; a heading or a label for the second time begins the next block."""
        if "Serving Benchmark Result" in text:
            yield from self.end()
        found = _LINE.match(text)
        if found is None:
            return
        label, value = found["label"], found["value"]
        position = _POSITION.match(label)
        key = LABELS.get(label) if position is None else f"position {int(position[1])}"
        if label == "Backend":
            self.block["backend"] = value
        elif label == "Max request concurrency":  # vLLM's is "Maximum"
            self.block.setdefault("backend", "sglang")
        if key is None or value in ("", "not set", "None"):
            return
        if key in self.block:
            yield from self.end()
        percent = key == "acceptance_rate" or position is not None
        self.block[key] = printed(label, f"{value.split()[0].rstrip('%')}%" if percent else value.split()[0])

    def end(self) -> Iterator[Observation]:
        """Observation of the block."""
        block, self.block = self.block, {}
        found = self.convert(block) if block else None
        if found is not None:
            yield found


def of_sglang(found: Mapping[str, Any]) -> bool:
    """Return whether a result is of a server of SGLang: by its backend, or by figures that only bench_serving has."""
    if found.get("accept_length") is not None:
        return True
    if isinstance(backend := found.get("backend"), str):
        return backend.startswith("sglang")
    return "accept_length" in found or "mean_e2e_latency_ms" in found


def rates_of(block: Mapping[str, Any]) -> list[Printed] | None:
    """Rates by position of a printed block, from position 0 on without gaps."""
    named = {int(key.removeprefix("position ")): value for key, value in block.items() if key.startswith("position ")}
    if not named:
        return None
    if sorted(named) != list(range(len(named))) or len(named) > MOST_POSITIONS:
        raise ParameterError(f"positions must be 0, 1, 2, ... without gaps, got {checks.shown(sorted(named))}")
    return [named[index] for index in range(len(named))]


def figures(found: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of a JSON result by the same keys as a printed block."""
    return {key: json_number(key, found[key]) for key in LABELS.values() if _numeric(found.get(key))}


def _numeric(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


NO_CONCURRENCY = "gives no cell, for want of the number of requests that ran at once"


def cells(block: Mapping[str, Any], length: float | None, draft_length: int | None) -> tuple[list[MeasuredCell], list[str]]:
    """Cell of a benchmark: mean TPOT at its concurrency, or else its throughput, with the mean context; and notes."""
    at = {key: value.value for key, value in block.items() if isinstance(value, Printed)}
    asked, done = at.get("max_concurrency"), at.get("completed")
    running = min(asked, done or asked) if asked else at.get("concurrency")
    if not running or running <= 0:
        timed = any(at.get(name) for name in ("mean_tpot_ms", "output_throughput"))
        return [], [f"TPOT or throughput of a benchmark {NO_CONCURRENCY}: limit it with --max-concurrency"] if timed else []
    notes = [] if asked else ["sequences of a benchmark without a limit of concurrency is the mean concurrency that it measured"]
    context = None
    if done and at.get("total_input_tokens") is not None and at.get("total_output_tokens") is not None:
        context = round((at["total_input_tokens"] + at["total_output_tokens"] / 2) / done, 1)
    times = {"tpot_ms": at.get("mean_tpot_ms"), "output_tokens_per_s": at.get("output_throughput")}
    name = next((name for name, value in times.items() if positive(name, value)), None)
    if name is None:
        return [], []
    if name == "output_tokens_per_s":
        notes.append("output_tokens_per_s of a benchmark is over its whole duration, time for prompts included")
    found = MeasuredCell(
        sequences=_whole(running), draft_length=draft_length, mean_acceptance_length=length, context=context, **{name: times[name]}
    )
    return [found], notes


def _whole(value: float) -> float:
    return int(value) if value == int(value) else value


def spacing(block: Mapping[str, Any], length: float | None) -> Iterable[Check]:
    """Check that TPOT is ITL over the acceptance length, within 3 %: a chunk of the stream has the tokens of one step."""
    each, gap = block.get("mean_tpot_ms"), block.get("mean_itl_ms")
    if length and each is not None and gap is not None and each.value > 0:
        yield Check(SPACING, abs(gap.value / length / each.value - 1), 0.03)


def plain(block: Mapping[str, Any], draft_length: int | None, notes: str) -> Observation | None:
    """Observation of a benchmark without figures of speculative decoding: a cell, if the user says its draft length."""
    if draft_length is None:
        return Observation(notes=[notes]) if optional(block, "completed", "output_throughput") is not None else None
    found, remarks = cells(block, None if draft_length else 1.0, draft_length)
    if found and draft_length:
        remarks.append(
            "mean_acceptance_length of a benchmark without figures of speculative decoding is unknown: its cell has none"
        )
    return Observation(cells=found, notes=remarks)
