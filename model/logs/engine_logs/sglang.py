"""Dialects of SGLang: decode lines of the scheduler, meta_info and sglext of responses, bench_serving.

Sources: sgl-project/sglang, python/sglang/srt/managers/scheduler_metrics_mixin.py (decode lines), tokenizer_manager.py (meta_info),
#33518 (sglext), python/sglang/bench_serving.py. The accept rate changed in #11572 of 2025-10-13 and in #23530 of 2026-04-23, after
release 0.5.10.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterator, Mapping
from statistics import median
from typing import Any

from model.base.checks import ParameterError
from model.logs.acceptance_record import MeasuredCell
from model.logs.engine_logs import serving_benchmarks
from model.logs.engine_logs.observations import Check, Observation, whole_length
from model.logs.engine_logs.output_forms import OutputForm, objects, separate
from model.logs.engine_logs.printed_figures import (
    FINEST,
    Printed,
    count_of,
    json_count,
    json_counts,
    json_number,
    length,
    number_of,
    optional,
    share,
)
from model.logs.engine_logs.vllm import PLAIN, of_histogram
from model.methods.speculative.engine_dialects import DIALECTS as FIGURES

OF_RESPONSE = "spec_accept_length = 1 + accepted / drafts, within the first and last token"
_DATE = re.compile(r"(\d{4}-\d{2}-\d{2})[ T]")
_PLAIN = re.compile(r"speculative_algorithm['\"]?\s*[=:]\s*None\b")
_STEPS = re.compile(r"speculative_num_steps['\"]?\s*[=:]\s*(\d{1,4})")
_WIDTH = re.compile(r"speculative_eagle_topk['\"]?\s*[=:]\s*(\d{1,6})")
FIRST_CHANGE, SECOND_CHANGE = "2025-10-13", "2026-04-23"
"""Dates of #11572 and #23530: no line before them has the meaning that they gave to the accept rate."""
MEANINGS = {
    "with-bonus": f"(a + D) / (D (K + 1)), as SGLang prints it from #11572 of {FIRST_CHANGE} to #23530 of {SECOND_CHANGE}",
    "drafts": f"a / (D K), as SGLang prints it from #23530 of {SECOND_CHANGE} on",
}
"""Meanings of the accept rate from which the draft length K follows; D drafts have a accepted tokens."""
OLDER = "a run of an older version needs --draft-length"


class _Decode:
    """Reader of decode lines: sums weighted by running requests, and the time of a step by number of running requests.

    A line is about the same number of steps (the log interval) for all requests, so that its drafts are in proportion to them.
    """

    def __init__(self, draft_length: int | None) -> None:
        self.as_given = self.plain = draft_length == 0
        self.given = draft_length or None
        self.steps: int | None = None
        self.tree = False
        self.total = self.weight = self.slack = 0.0
        self.lines = self.bare = 0
        self.drafted = {name: [0.0, math.inf] for name in ("drafts", "with-bonus")}
        """Bounds of the tokens drafted per step, by meaning of the accept rate."""
        self.dates: list[str] = []
        """First and last date of lines with an accept rate."""
        self.undated = self.above_one = False
        self.times: dict[tuple[int, bool], list[array[float]]] = {}

    def take(self, text: str) -> Iterator[Observation]:
        """Add a line."""
        steps = _STEPS.search(text)
        if steps is not None:
            self.steps = int(steps[1])
            width = _WIDTH.search(text)
            self.tree = width is not None and int(width[1]) > 1
        if "speculative_algorithm" in text:
            self.plain = self.as_given or _PLAIN.search(text) is not None
        if "Decode batch" in text:
            self._decode(text[text.index("Decode batch") :], _DATE.search(text))
        return iter(())

    def _decode(self, text: str, date: re.Match[str] | None) -> None:
        running, rate = count_of(text, "#running-req"), number_of(text, r"gen throughput \(token/s\)", "gen throughput")
        mean = number_of(text, "accept len")
        if rate is not None and rate.value < 0:
            raise ParameterError(f"gen throughput must be at least 0, got {rate.value:g}")
        bare = mean is None
        if mean is None:
            self.bare += 1
            if not self.plain:
                return
            mean = Printed(1.0)
        else:
            mean = length("accept len", mean)
            weight = max(running or 1, 1)
            self.lines += 1
            self.total, self.weight = self.total + weight * mean.value, self.weight + weight
            self.slack += weight * mean.half
            self._rate(text, mean, None if date is None else date[1])
        if running and rate is not None and rate.value:
            tokens = count_of(text, "#token") or count_of(text, "#full token")
            held = self.times.setdefault((running, bare), [array("d"), array("d"), array("d")])
            held[0].append(1000 * running * mean.value / rate.value)
            held[1].append(mean.value)
            held[2].append(math.nan if tokens is None else tokens / running)

    def _rate(self, text: str, mean: Printed, date: str | None) -> None:
        """Narrow the number of drafted tokens per step by the accept rate, in each of its meanings."""
        rate = number_of(text, "accept rate")
        if rate is None:
            return
        if rate.value < 0:
            share("accept rate", rate)
        self.above_one |= rate.value > 1
        self.undated |= date is None
        if date is not None:
            self.dates = [min([date, *self.dates]), max([date, *self.dates])]
        for name, less in (("drafts", 1.0), ("with-bonus", 0.0)):
            low, high = (mean.value - less - mean.half) / max(rate.value + rate.half, FINEST), math.inf
            if rate.value > rate.half:
                high = (mean.value - less + mean.half) / max(rate.value - rate.half, FINEST)
            bounds = self.drafted[name]
            bounds[:] = max(bounds[0], low), min(bounds[1], high)

    def _draft_length(self) -> tuple[int | None, list[str]]:
        """Draft length: of the server's arguments, of the user, or the only one that lengths and rates allow."""
        if self.steps:
            return self.steps, ["drafts are trees; draft_length is their depth"] if self.tree else []
        fitting, reason = self._fitting() if self.dates or self.undated else ({}, "")
        if self.given:
            others = [f"{number} ({MEANINGS[name]})" for name, number in fitting.items()]
            doubt = others and self.given not in fitting.values()
            note = f"accept len and accept rate fit a draft length of {' or of '.join(others)}, not {self.given} as given"
            return self.given, [f"{note}; of a tree they count all its tokens"] if doubt else []
        if len(fitting) != 1:
            return None, [f"accept rate is ignored: {reason}"] if reason else []
        (name, number), = fitting.items()
        note = f"draft_length is the tokens drafted per step, from accept len and the accept rate {MEANINGS[name]}"
        return number, [f"{note}; of a tree it is more than its depth; {OLDER}"]

    def _fitting(self) -> tuple[dict[str, int], str]:
        """Draft lengths that lengths and rates allow, by meaning of the rate, and the reason why these are not one."""
        if self.undated:
            return {}, f"its meaning changed on {FIRST_CHANGE} and {SECOND_CHANGE}, and lines have no date"
        first, last = self.dates
        if first < FIRST_CHANGE:
            return {}, f"before 2025-10 (#11572 of {FIRST_CHANGE}) it {FIGURES['sglang'].rates['before-2025-10'].meaning}"
        if self.above_one:
            return {}, f"it is above 1, as in versions before #11572 of {FIRST_CHANGE}; {OLDER}"
        found = {}
        for name, (low, high) in self.drafted.items():
            if name == "drafts" and last < SECOND_CHANGE:
                continue
            least, most = math.ceil(low - 1e-9), math.floor(min(high, 1e9) + 1e-9)
            if least == most and least - (name == "with-bonus") >= 1:
                found[name] = least - (name == "with-bonus")
        if len(found) > 1:
            both = " and ".join(f"{number} ({MEANINGS[name]})" for name, number in found.items())
            return found, f"it fits draft lengths of {both}; --draft-length says which"
        return found, f"no whole draft length fits it in its meanings since {FIRST_CHANGE}; {OLDER}"

    def end(self) -> Iterator[Observation]:
        """Observation of all lines, and cells."""
        draft_length, notes = self._draft_length()
        cells = []
        for (running, plain), (times, lengths, contexts) in sorted(self.times.items()):
            known = [each for each in contexts if not math.isnan(each)]
            cells.append(
                MeasuredCell(
                    sequences=running, draft_length=0 if plain else draft_length,
                    mean_acceptance_length=round(math.fsum(lengths) / len(lengths), 4), step_ms=round(median(times), 5),
                    context=round(math.fsum(known) / len(known), 1) if known else None, weight=len(times),
                )
            )
        if cells:
            notes.append("step_ms is running requests * accept len / throughput, the median of lines; weight is their number")
        found = Observation(cells=cells, notes=notes)
        if self.lines:
            found.length, found.weight = Printed(self.total / self.weight, self.slack / self.weight), self.weight
            found.draft_length = draft_length
            if self.lines > 1:
                found.notes.append("decode lines have no counts: their lengths are weighted by running requests")
        elif self.bare and not self.plain:
            found.notes.append(PLAIN)
        yield found


# --- Responses ---


def _responses(document: Any, draft_length: int | None) -> list[Observation]:
    return [
        _response(found, draft_length) for response in (document if isinstance(document, list) else [document])
        for found in _of_response(response)
    ]  # fmt: skip


_HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")
_KEYS = ("spec_verify_ct", "spec_accept_length", *_HISTOGRAMS)


def _of_response(response: Any) -> list[dict[str, Any]]:
    """Objects with the counts of a response: of meta_info, or else of sglext, which repeats them."""
    found = [each for each in objects(response) if any(each.get(key) for key in _KEYS) and each.get("spec_verify_ct") != 0]
    extensions = [value for each in objects(response) for key, value in each.items() if key.startswith("sglext")]
    repeated = {id(each) for each in objects(extensions)}
    return [each for each in found if id(each) not in repeated] or found


def _response(found: Mapping[str, Any], given: int | None) -> Observation:
    """Observation of one request; counts have had three names each."""
    drafts = json_count(found, "spec_verify_ct")
    accepted = json_count(found, "spec_accept_token_num", "spec_num_correct_drafts", "spec_accepted_drafts")
    drafted = json_count(found, "spec_draft_token_num", "spec_num_proposed_drafts", "spec_proposed_drafts")
    listed = optional(found, *_HISTOGRAMS)
    histogram = json_counts(_HISTOGRAMS[0], listed) if listed else None
    checks: list[Check] = []
    if histogram is not None:
        checks += of_histogram(histogram, drafts, accepted)
        if drafts is None:
            drafts = sum(histogram)
        if accepted is None:
            accepted = sum(index * number for index, number in enumerate(histogram))
    draft_length = whole_length(drafted, drafts)
    if draft_length is not None and histogram is not None and len(histogram) > draft_length + 1:
        draft_length = None  # drafts of different lengths
    tree = bool(given and draft_length and given < draft_length)
    made = Observation(
        drafts=drafts, drafted=drafted, accepted=accepted, histogram=histogram,
        draft_length=given if tree else draft_length or given or None, request=True, checks=checks,
    )  # fmt: skip
    if tree:
        made.notes.append(f"drafts are of {draft_length} tokens per step: as trees, whose depth draft_length is, as it was given")
    elif draft_length:
        made.notes.append("draft_length is the tokens drafted per step; of a tree it is more than its depth")
    mean = optional(found, "spec_accept_length")
    if mean is not None:
        shown = length("spec_accept_length", json_number("spec_accept_length", mean))
        if accepted is None or not drafts:
            made.length = shown
            made.weight = (json_count(found, "completion_tokens") or shown.value) / shown.value
        else:  # the length is generated tokens / steps: with the prompt's token, without those after the end
            slack = ((draft_length or 8) + 1) / drafts
            made.checks.append(Check(OF_RESPONSE, abs(shown.value - 1 - accepted / drafts), slack))
    return made


# --- bench_serving ---


def _benchmark(block: Mapping[str, Any], draft_length: int | None) -> Observation | None:
    if "accept_length" not in block:
        return serving_benchmarks.plain(block, draft_length, PLAIN)
    mean = length("accept length", block["accept_length"])
    done = block.get("completed")
    found = Observation(
        length=mean, draft_length=draft_length or None, requests=None if done is None else int(done.value),
        weight=block["total_output_tokens"].value / mean.value if "total_output_tokens" in block else 1.0,
        notes=["accept length of bench_serving is the server's mean since its start"],
    )  # fmt: skip
    found.cells, notes = serving_benchmarks.cells(block, mean.value, found.draft_length)
    found.notes += notes
    return found


def _text(draft_length: int | None) -> serving_benchmarks.TextBlocks:
    def convert(block: Mapping[str, Any]) -> Observation | None:
        return _benchmark(block, draft_length) if serving_benchmarks.of_sglang(block) else None

    return serving_benchmarks.TextBlocks(convert)


def _result(document: Any, draft_length: int | None) -> list[Observation]:
    results = document if isinstance(document, list) else [document]
    ours = [each for each in results if isinstance(each, dict) and serving_benchmarks.of_sglang(each)]
    made = [_benchmark(serving_benchmarks.figures(each), draft_length) for each in ours]
    return [each for each in made if each is not None]


DIALECTS = (
    OutputForm(
        "sglang-log",
        "'Decode batch' with 'accept len:'",
        ("Decode batch", "speculative_num_steps", "speculative_algorithm"),
        _Decode,
    ),
    OutputForm("sglang-bench-text", "'Accept length:' of bench_serving", serving_benchmarks.MARKS, _text),
    OutputForm("sglang-bench-json", "accept_length of bench_serving", documents=separate(_result)),
    OutputForm("sglang-responses", "spec_verify_ct or a histogram in meta_info or sglext", documents=separate(_responses)),
)
