"""Dialects of llama.cpp: the server's timings and statistics, llama-speculative, timings in responses, Prometheus counters.

Sources: ggml-org/llama.cpp, tools/server/server-context.cpp (lines and timings of a request), common/speculative.cpp (statistics:
lengths and rates are over accept calls, the third of #calls(b,g,a)), examples/speculative/speculative.cpp, docs/speculative.md,
#14104 (the rate is over tested tokens).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from model.base.checks import ParameterError
from model.logs.engine_logs import prometheus_counters
from model.logs.engine_logs.observations import (
    OF_RATIO,
    Check,
    Observation,
    ObservationSums,
    checks_of,
    counts_of,
)
from model.logs.engine_logs.output_forms import OutputForm, objects, separate
from model.logs.engine_logs.printed_figures import (
    Printed,
    after,
    count,
    json_count,
    length,
    number_of,
    positive,
    printed,
    share,
    shares_after,
)
from model.logs.engine_logs.vllm import of_figures

_REQUEST = re.compile(
    r"draft acceptance(?: rate)?\s*=\s*(?P<rate>\S+)\s*\(\s*(?P<accepted>\S+) accepted\s*/\s*(?P<drafted>\S+) generated\)"
)
_SLOT = re.compile(r"slot\s+\S+\s+id\s+(\d+)")
_STATISTICS = re.compile(r"statistics\s+(?P<name>[\w.-]+):")
_CALLS = re.compile(r"#calls\s*\(b,g,a\)\s*=\s*(\d+)[ ,]+(\d+)[ ,]+(\d+)")
_EVAL = re.compile(r"(?<!prompt )\beval time\s*=\s*(?P<ms>\S+) ms\s*/\s*(?P<tokens>\S+) (?:tokens|runs)")
_TIMES = re.compile(r"dur\s*\(b,g,a\)\s*=\s*([^\s,]+),\s*([^\s,]+),\s*([^\s,]+)\s*ms")


WITHOUT_SEQUENCES = (
    "gives no cell, for want of the number of sequences that ran at once: where it is 1, this is the tpot_ms of a cell"
)


class _GrowingCounts:
    """Statistics that grow from line to line: their last values, added up over restarts, at which they fall."""

    def __init__(self) -> None:
        self.last: Observation | None = None
        self.before: list[Observation] = []

    def add(self, seen: Observation) -> None:
        """Take the next line."""
        pairs = zip(_growing(seen), _growing(seen if self.last is None else self.last), strict=True)
        if self.last is not None and any(now < last for now, last in pairs):
            self.before.append(self.last)
        self.last = seen

    def found(self) -> list[Observation]:
        """Last observation, and those before each restart."""
        return self.before + ([] if self.last is None else [self.last])


def _growing(seen: Observation) -> tuple[float, ...]:
    return seen.drafts or 0, seen.drafted or 0, seen.accepted or 0


class _Server:
    """Reader of a server's log: a line for each request, and statistics that are totals since the start.

    The statistics have the exact number of drafts and the time of drafting, so they are used if they are there, and the requests'
    lines otherwise. Slots share their statistics or, in other versions, each has separate ones, and a log may be put together of
    several: of these readings the one is right that has as many tokens as the lines of requests; the first one if none has.
    """

    def __init__(self, draft_length: int | None) -> None:
        self.requests = ObservationSums()
        self.shared: dict[str, _GrowingCounts] = {}
        self.by_slot: dict[tuple[str, str], _GrowingCounts] = {}
        self.separate = ObservationSums()
        self.slot = ""
        self.spent = [0.0, 0]
        """Milliseconds and tokens of lines with an eval time."""

    def take(self, text: str) -> Iterator[Observation]:
        """Add a line."""
        slot = _SLOT.search(text)
        if slot is not None:
            self.slot = slot[1]
        timed = _EVAL.search(text)
        if timed is not None:
            spent = positive("eval time", printed("eval time", timed["ms"])) or 0.0
            self.spent = [self.spent[0] + spent, self.spent[1] + count("tokens of eval time", timed["tokens"])]
        found = _REQUEST.search(text)
        if found is not None:
            seen = _request(text[found.start() :], found)
            if seen is not None:
                self.requests.add(seen)
        name = _STATISTICS.search(text)
        if name is not None and "#gen tokens" in text:
            statistics = _statistics(text[name.start() :])
            if statistics.drafted:
                self.shared.setdefault(name["name"], _GrowingCounts()).add(statistics)
                self.by_slot.setdefault((name["name"], self.slot), _GrowingCounts()).add(statistics)
                self.separate.add(statistics)
        return iter(())

    def end(self) -> Iterator[Observation | ObservationSums]:
        """Sums of the statistics, or of the requests' lines."""
        listed = self.requests
        milliseconds, tokens = self.spent
        if milliseconds and tokens:
            mean = f"{milliseconds / tokens:.4g} ms per token over {tokens} tokens"
            yield Observation(notes=[f"eval time of llama.cpp ({mean}) {WITHOUT_SEQUENCES}"])
        if not self.separate.count or self.separate.drafts is None:
            yield listed
            return
        readings = [_summed(each) for each in (self.shared, self.by_slot)] + [self.separate]
        same = [each for each in readings if (each.accepted, each.drafted) == (listed.accepted, listed.drafted)]
        chosen = (same or readings)[0]
        if listed.count:
            if not same:
                note = f"statistics have {chosen.accepted} accepted tokens and the lines of requests {listed.accepted}"
                chosen.note(f"{note}: the statistics are used")
            chosen.requests = listed.count
            chosen.merge_checks(listed)
        yield chosen


def _summed(series: Mapping[Any, _GrowingCounts]) -> ObservationSums:
    sums = ObservationSums()
    for each in series.values():
        for seen in each.found():
            sums.add(seen)
    return sums


def _request(text: str, found: re.Match[str]) -> Observation | None:
    """Observation of a request's line."""
    accepted, drafted = count("accepted", found["accepted"]), count("generated", found["drafted"])
    if not drafted:
        return None
    ratio = share("draft acceptance", printed("draft acceptance", found["rate"]))
    mean = number_of(text, "mean acceptance length") or number_of(text, "mean len")
    mean = None if mean is None else length("mean acceptance length", mean)
    rates = shares_after(text, "acceptance rate per position", "acceptance rate per position") or None
    made = of_figures(accepted, drafted, mean, rates, ratio, None)
    return replace(made, request=True)


def _statistics(text: str) -> Observation:
    """Observation of a line of statistics."""
    accepted, drafted = (_count(text, f"#{name} tokens") for name in ("acc", "gen"))
    calls, times = _CALLS.search(text), _TIMES.search(text)
    drafts = int(calls[3]) if calls is not None else _count(text, "#gen drafts")
    if accepted is None or drafted is None:
        raise ParameterError("statistics must have #gen tokens and #acc tokens")
    if accepted > drafted:
        raise ParameterError(f"#acc tokens must be at most #gen tokens={drafted}, got {accepted}")
    mean = number_of(text, "#mean acc len")
    mean = None if mean is None else length("#mean acc len", mean)
    rates = shares_after(text, "#acc rate/pos", "#acc rate/pos") or None
    made = Observation(drafts=drafts, drafted=drafted, accepted=accepted, draft_length=len(rates) if rates else None)
    if rates and drafts:
        made.positions, made.whole = counts_of(rates, drafts, accepted, exact=True)
    made.checks = checks_of(mean, rates, None, accepted, drafted, drafts, made.draft_length)
    if times is not None:
        spent = printed("dur(b,g,a)", times[2])
        if spent.value < 0:
            raise ParameterError(f"dur(b,g,a) must be at least 0 ms, got {times[2]}")
        made.drafting = spent.value, drafted
    return made


def _count(text: str, label: str) -> int | None:
    found = after(text, label)
    return None if found is None else count(label, found)


# --- llama-speculative ---


WITHOUT_DRAFTS = (
    "the summary of llama-speculative has no number of drafts; llama-server prints it (lines of statistics and of draft acceptance"
    " in its log, timings in its responses)"
)


class _Speculative:
    """Reader of llama-speculative's summary: it has no number of drafts, and so no acceptance length."""

    def __init__(self, draft_length: int | None) -> None:
        self.block: dict[str, int] = {}
        self.rate: Printed | None = None

    def take(self, text: str) -> Iterator[Observation]:
        """Add a figure; a label for the second time begins the next summary."""
        found = re.search(r"(?:^|\s)(n_drafted|n_draft|n_accept|n_predict|accept)\s*=\s*([-+\d.]+%?|-?nan%?)\s*$", text)
        if found is None:
            return
        name = found[1]
        if name == "accept":
            if "nan" not in found[2]:  # 0 of 0
                self.rate = share("accept", printed("accept", found[2]))
            return
        if name in self.block:
            yield from self.end()
        self.block[name] = count(name, found[2])

    def end(self) -> Iterator[Observation]:
        """Observation of the summary."""
        block, rate = self.block, self.rate
        self.block, self.rate = {}, None
        if not block.get("n_drafted") or "n_accept" not in block:
            return
        drafted, accepted = block["n_drafted"], block["n_accept"]
        found = Observation(
            drafted=drafted, accepted=accepted, draft_length=block.get("n_draft") or None, request=True, notes=[WITHOUT_DRAFTS]
        )
        if rate is not None:
            found.checks.append(Check(OF_RATIO, abs(rate.value - accepted / drafted), rate.half + 1e-9))
        yield found


# --- Responses ---


def _responses(document: Any, draft_length: int | None) -> list[Observation]:
    found = []
    for each in objects(document):
        if "predicted_n" in each and each.get("predicted_ms"):
            found.append(Observation(notes=[f"predicted_per_token_ms of llama.cpp's timings {WITHOUT_SEQUENCES}"]))
        if "draft_n" not in each or "draft_n_accepted" not in each:
            continue
        drafted, accepted = json_count(each, "draft_n"), json_count(each, "draft_n_accepted")
        if not drafted or accepted is None:
            continue
        drafts, predicted = json_count(each, "draft_rounds"), json_count(each, "predicted_n")
        made = Observation(drafts=drafts, drafted=drafted, accepted=accepted, draft_length=draft_length or None, request=True)
        if drafts is None and predicted is not None and predicted > accepted:
            # A step generates its accepted tokens and one more; some steps have no draft.
            made.weight = float(predicted - accepted)
            made.length = Printed(predicted / made.weight, 1 / made.weight)
            made.notes.append("timings have no number of drafts: the length is about generated tokens / (generated - accepted)")
        found.append(made)
    return found


DIALECTS = (
    OutputForm(
        "llama.cpp-server", "'draft acceptance = ... accepted / ... generated' or 'statistics'",
        ("draft acceptance", "statistics ", "print_timing", "eval time"), _Server,
    ),
    OutputForm("llama-speculative", "n_drafted and n_accept", ("n_draft", "n_accept", "n_predict", "accept "), _Speculative),
    OutputForm("llama.cpp-responses", "timings.draft_n", documents=separate(_responses)),
    prometheus_counters.counters("llamacpp", "llama.cpp-prometheus"),
)  # fmt: skip
