"""Dialects of LMDeploy: log lines, and Prometheus counters with vLLM's names.

Source: InternLM/lmdeploy, lmdeploy/metrics/loggers.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from model.logs.engine_logs import prometheus_counters
from model.logs.engine_logs.observations import Observation
from model.logs.engine_logs.output_forms import OutputForm
from model.logs.engine_logs.printed_figures import count, printed
from model.logs.engine_logs.vllm import PLAIN, IntervalCells, spec_decoding

_THROUGHPUT = re.compile(r"Avg thr \(in/out\)\s*:\s*(?P<prompts>\S+)\s*/\s*(?P<rate>\S+) tokens/s")
_RUNNING = re.compile(r"Engine \(running/waiting\)\s*:\s*(?P<running>\S+)\s*/")


class _LogLines:
    """Reader of lines that have throughput, running requests and, if there were drafts, speculative decoding."""

    def __init__(self, draft_length: int | None) -> None:
        self.plain = draft_length == 0
        self.cells = IntervalCells()
        self.bare = self.speculative = False

    def take(self, text: str) -> Iterator[Observation]:
        """Observation of a line."""
        shown, running = _THROUGHPUT.search(text), _RUNNING.search(text)
        if shown is None:
            return
        found = spec_decoding(text) if "SpecDecoding metrics" in text else None
        self.speculative |= found is not None
        self.bare |= found is None
        if running is not None and (self.plain or found is not None):
            prompts, rate = (printed("Avg thr (in/out)", shown[name]).value for name in ("prompts", "rate"))
            if found is None or found.speaks():
                self.cells.add(count("running", running["running"]), rate, prompts, found)
        if found is not None:
            yield found

    def end(self) -> Iterator[Observation]:
        """Cells of all lines."""
        yield from self.cells.observations()
        if self.bare and not (self.speculative or self.plain):
            yield Observation(notes=[PLAIN])


DIALECTS = (
    OutputForm("lmdeploy-log", "'Avg thr (in/out):' with 'SpecDecoding metrics:'", ("Avg thr (in/out)",), _LogLines),
    prometheus_counters.counters("lmdeploy", "lmdeploy-prometheus"),
)
