"""Dialects of vLLM: log lines of V1 and V0, `vllm bench serve`, metrics of requests, Prometheus counters.

Sources: vllm-project/vllm, vllm/v1/spec_decode/metrics.py (V1 lines, whose field order changed, and counters),
vllm/v1/metrics/loggers.py (throughput and running requests), vllm/spec_decode/metrics.py up to 0.10 (V0),
vllm/benchmarks/serve.py, docs/features/speculative_decoding (metrics of requests, PR 48915).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from model.base.checks import ParameterError, shown
from model.logs.acceptance_record import MOST_POSITIONS, MeasuredCell
from model.logs.engine_logs import prometheus_counters, serving_benchmarks
from model.logs.engine_logs.observations import (
    MOMENT,
    OF_COUNTS,
    OF_RATIO,
    SUM,
    Check,
    Observation,
    checked_drafts,
    checks_of,
    counts_of,
    drafts_of,
    whole_length,
)
from model.logs.engine_logs.output_forms import OutputForm, objects, separate
from model.logs.engine_logs.printed_figures import (
    Printed,
    after,
    count,
    count_of,
    json_count,
    json_counts,
    json_number,
    length,
    number_of,
    optional,
    printed,
    share,
    shares_after,
)

MOST_STEPS = 10**6
"""Maximum number of steps of one request."""
_TIME = re.compile(r"\d\d-\d\d \d\d:\d\d:\d\d")
EFFICIENCY = "system efficiency = emitted / (drafts * (draft_length + 1))"
PLAIN = (
    "no figures of speculative decoding in a benchmark or log; if it is of plain decoding, --draft-length 0 makes it a cell (with"
    " several files, one number for each, as 0,3)"
)


# --- V1: SpecDecoding metrics ---


def spec_decoding(text: str) -> Observation | None:
    """Observation of a line with "SpecDecoding metrics", in any order of its fields; None for an interval without drafts.

    >>> found = spec_decoding(
    ...     "SpecDecoding metrics: Mean acceptance length: 5.14, Accepted: 513 tokens, Drafted: 620 tokens,"
    ...     " Per-position acceptance rate: 0.960, 0.863, 0.823, 0.782, 0.710, Avg Draft acceptance rate: 82.7%"
    ... )
    >>> found.drafts, found.positions
    (124.0, [119.0, 107.0, 102.0, 97.0, 88.0])
    """
    text = text[text.index("SpecDecoding metrics") :]
    accepted, drafted = count_of(text, "Accepted"), count_of(text, "Drafted")
    length_shown = after(text, "Mean acceptance length")
    if accepted is None or drafted is None or length_shown is None:
        return Observation(notes=["lines of SpecDecoding metrics without Accepted, Drafted or length are cut off, and left out"])
    if not drafted and not accepted:  # its ratios are 0 / 0
        return None
    rates = shares_after(text, "Per-position acceptance rate", "Per-position acceptance rate") or None
    mean = printed("Mean acceptance length", length_shown)
    notes = []
    if rates and _without_bonus(mean, rates):
        mean = Printed(mean.value + 1, mean.half)
        notes.append("lengths without the bonus token, as vLLM V1 printed them before 2025-05: 1 is added")
    mean = length("Mean acceptance length", mean)
    found = after(text, "Draft acceptance rate")
    ratio = None if found is None else share("Draft acceptance rate", printed("Draft acceptance rate", found))
    made = of_figures(accepted, drafted, mean, rates, ratio, None)
    made.notes += notes
    return made


def _without_bonus(mean: Printed, rates: Sequence[Printed]) -> bool:
    """Return whether the printed length is the sum of the rates, instead of 1 more."""
    total, slack = sum(each.value for each in rates), mean.half + sum(each.half for each in rates) + 1e-9
    return abs(mean.value - total) <= slack < abs(mean.value - 1 - total)


def of_figures(
    accepted: int, drafted: int, mean: Printed | None, rates: Sequence[Printed] | None, ratio: Printed | None, drafts: int | None
) -> Observation:
    """Observation of counts with printed ratios; the number of drafts is computed from these if it is not given."""
    if accepted > drafted:
        raise ParameterError(f"accepted tokens must be at most the drafted={drafted}, got {accepted}")
    draft_length = len(rates) if rates and drafts is None else None
    made = Observation(drafts=drafts, drafted=drafted, accepted=accepted, length=mean)
    if drafts is None:
        made.drafts, made.exact = drafts_of(accepted, drafted, draft_length, mean, rates)
    else:
        draft_length = whole_length(drafted, drafts) or (len(rates) if rates else None)
        if rates and draft_length and len(rates) > draft_length:
            draft_length = len(rates)  # drafts of different lengths, whose mean happens to be whole
    made.draft_length = draft_length
    if rates and made.drafts:
        made.positions, made.whole = counts_of(rates, made.drafts, accepted if len(rates) == draft_length else None, made.exact)
    elif rates:
        made.rates = rates
    made.checks = checks_of(mean, rates, ratio, accepted, drafted, made.drafts, draft_length)
    return made


class _Interval:
    """Sums over intervals of the log with one number of running requests and one draft length."""

    def __init__(self) -> None:
        self.tokens = self.seconds = self.drafts = self.accepted = 0.0
        self.count = 0

    def add(self, rate: float, seconds: float, drafts: float, accepted: float) -> None:
        """Add an interval of this throughput [tokens/s] and duration [s]."""
        self.tokens, self.seconds = self.tokens + rate * seconds, self.seconds + seconds
        self.drafts, self.accepted, self.count = self.drafts + drafts, self.accepted + accepted, self.count + 1


class IntervalCells:
    """Cells of a log that prints throughput and running requests before each line of speculative decoding.

    Throughput is of the whole interval and running requests are of its end, so that intervals in which their number changed are
    used only for numbers that have no other.
    """

    def __init__(self) -> None:
        self.held: dict[tuple[int, int | None, bool], _Interval] = {}
        self.last: int | None = None
        self.prompts = self.total = 0

    def add(self, running: int, rate: float, prompts: float, seen: Observation | None) -> None:
        """Add an interval; `seen` is its line of speculative decoding, None for plain decoding."""
        steady, self.last = self.last == running, running
        if not running or not rate or (seen is not None and not seen.drafts):
            return
        self.total += 1
        self.prompts += prompts > 0
        key = running, 0 if seen is None else seen.draft_length, steady
        drafts, accepted = (1.0, 0.0) if seen is None else (float(seen.drafts or 0), float(seen.accepted or 0))
        # Tokens over throughput is the interval's duration.
        self.held.setdefault(key, _Interval()).add(rate, (drafts + accepted) / rate, drafts, accepted)

    def observations(self) -> Iterator[Observation]:
        """One observation with all cells."""
        unsteady, cells = 0, []
        for (running, draft_length, steady), sums in self.held.items():
            if not steady and (running, draft_length, True) in self.held:
                continue
            unsteady += not steady
            mean = 1 + sums.accepted / sums.drafts
            cells.append(
                MeasuredCell(
                    sequences=running, draft_length=draft_length, mean_acceptance_length=round(mean, 4),
                    output_tokens_per_s=round(sums.tokens / sums.seconds, 3), weight=sums.count,
                )
            )
        if not cells:
            return
        cells.sort(key=lambda each: (each.draft_length or 0, each.sequences))
        notes = ["weight of a cell is its number of log intervals"]
        if unsteady:
            notes.append(f"{unsteady} cells are of intervals in which the number of running requests may have changed")
        if self.prompts:
            notes.append(f"{self.prompts} of {self.total} intervals with cells also read prompts, which lowers their throughput")
        yield Observation(cells=cells, notes=notes)


class _V1:
    """Reader of V1's log: each interval has a line of throughput and, if there were drafts, one of speculative decoding after it.

    A log may also be sorted or filtered so that the line of speculative decoding is first: then the next line of throughput is of
    the same interval, if it has the same time.
    """

    def __init__(self, draft_length: int | None) -> None:
        self.given = self.plain = draft_length == 0
        self.cells = IntervalCells()
        self.interval: tuple[str, int, float, float] | None = None
        """Time, running requests and throughputs of the last line of throughput, if no line of speculative decoding followed."""
        self.waiting: tuple[str, Observation] | None = None
        """Line of speculative decoding without a line of throughput before it, with its time."""
        self.reversed = self.speculative = self.seen = False

    def take(self, text: str) -> Iterator[Observation]:
        """Observation of a line of speculative decoding."""
        time = _TIME.search(text)
        shown = "" if time is None else time[0]
        if "speculative_config=" in text:  # the engine's settings, at its start
            self._plain()
            self.plain, self.speculative = self.given or "speculative_config=None" in text, False
        elif "SpecDecoding metrics" not in text:
            self._throughput(text, shown)
        elif "Avg thr (in/out)" not in text:  # that one is LMDeploy's
            found = spec_decoding(text)
            if found is None:
                return
            if found.speaks():
                self.speculative = True
                if self.interval is not None and not self.reversed:
                    self.cells.add(*self.interval[1:], found)
                    self.interval = None
                else:
                    self.waiting = shown, found
            yield found

    def _throughput(self, text: str, time: str) -> None:
        self._plain()
        rate, running = number_of(text, "Avg generation throughput"), count_of(text, "Running")
        prompts = number_of(text, "Avg prompt throughput")
        if rate is None or running is None:
            return
        if rate.value < 0:
            raise ParameterError(f"Avg generation throughput must be at least 0, got {rate.value:g}")
        figures = running, rate.value, 0.0 if prompts is None else prompts.value
        if self.waiting is not None and self.waiting[0] == time and (self.reversed or not self.seen):
            self.cells.add(*figures, self.waiting[1])
            self.reversed = True
        else:
            self.interval = time, *figures
        self.seen, self.waiting = True, None

    def _plain(self) -> None:
        """Close an interval without drafts."""
        if self.interval is not None:
            if self.plain and not self.speculative:
                self.cells.add(*self.interval[1:], None)
            else:
                self.cells.last = self.interval[1]
            self.interval = None

    def end(self) -> Iterator[Observation]:
        """Cells of all intervals."""
        self._plain()
        yield from self.cells.observations()
        if self.seen and not self.speculative and not self.plain:
            yield Observation(notes=[PLAIN])


# --- V0: Speculative metrics ---


class _V0:
    """Reader of V0's lines, whose counts are totals since the start: the last line counts, or the last before each restart.

    "accepted tokens" of V0 counts every token that is accepted by itself, also after a rejected one, so that 1 + a / D is not its
    acceptance length; emitted tokens / drafts is, with drafts = draft tokens / K.
    """

    def __init__(self, draft_length: int | None) -> None:
        self.last: Observation | None = None

    def take(self, text: str) -> Iterator[Observation]:
        """Return the totals before a restart."""
        text = text[text.index("Speculative metrics") :]
        names = ("accepted", "draft", "emitted")
        accepted, drafted, emitted = (count_of(text, f"Number of {name} tokens") for name in names)
        draft_length = count_of(text, "Number of speculative tokens")
        if accepted is None or drafted is None or emitted is None or not draft_length:
            yield Observation(notes=["lines of Speculative metrics that are cut off are left out"])
            return
        if not drafted:  # before the first draft, with ratios of 0 / 0
            return
        figures = {name: after(text, name) for name in ("Draft acceptance rate", "System efficiency")}
        ratio, efficiency = (None if each is None else share(name, printed(name, each)) for name, each in figures.items())
        if accepted > drafted:
            raise ParameterError(f"accepted tokens must be at most the drafted={drafted}, got {accepted}")
        drafts = drafted / draft_length
        if emitted > drafts * (draft_length + 1) + draft_length + 1:
            bound = f"drafts * (draft_length + 1) = {drafts * (draft_length + 1):g}"
            raise ParameterError(f"emitted tokens must be at most {bound}, got {emitted}")
        found = Observation(
            drafts=float(math.ceil(drafts)), exact=drafts == int(drafts), drafted=drafted, accepted=accepted,
            length=Printed(max(emitted / drafts, 1.0)), length_first=True, draft_length=draft_length,
            notes=["V0 counts accepted tokens after a rejected one too: the length is emitted tokens / drafts, not 1 + a / D"],
        )  # fmt: skip
        if efficiency is not None:
            difference = abs(efficiency.value - emitted / drafts / (draft_length + 1))
            found.checks.append(Check(EFFICIENCY, difference, efficiency.half + 1e-9))
        if ratio is not None:
            found.checks.append(Check(OF_RATIO, abs(ratio.value - accepted / drafted), ratio.half + 1e-9))
        if self.last is not None and self.last.drafted is not None and drafted < self.last.drafted:
            found.notes.append("counts of V0 fell: the server was restarted, and its totals before are added")
            yield self.last
        self.last = found

    def end(self) -> Iterator[Observation]:
        """ObservationSums of the last line."""
        if self.last is not None:
            yield self.last


# --- vllm bench serve ---


def _benchmark(block: Mapping[str, Any], rates: Sequence[Printed] | None, draft_length: int | None) -> Observation | None:
    """Observation of a benchmark's figures."""
    names = ("acceptance_rate", "acceptance_length", "num_drafts", "draft_tokens", "accepted_tokens")
    ratio, mean, *_ = (block.get(name) for name in names)
    drafts, drafted, accepted = (count(name, block[name].value) if name in block else None for name in names[2:])
    if all(block.get(name) is None for name in names) and not rates:
        return serving_benchmarks.plain(block, draft_length, PLAIN)
    ratio = None if ratio is None else share("Acceptance rate", ratio)
    mean = None if mean is None else length("Acceptance length", mean)
    rates = None if not rates else [share("Per-position acceptance", each) for each in rates]
    checked_drafts(drafts, drafted)
    if accepted is not None and drafted is not None:
        if not drafted:
            return serving_benchmarks.plain(block, draft_length, PLAIN)
        found = of_figures(accepted, drafted, mean, rates, ratio, drafts)
    else:
        found = Observation(drafts=drafts, drafted=drafted, accepted=accepted, length=mean, rates=rates)
        found.draft_length = len(rates) if rates else None
        found.checks = checks_of(mean, rates, ratio, accepted, drafted, drafts, found.draft_length)
    if found.draft_length is None and draft_length:
        found.draft_length = draft_length
    found.requests = count("completed", block["completed"].value) if "completed" in block else None
    known = 1 + found.accepted / found.drafts if found.accepted is not None and found.drafts else mean and mean.value
    found.checks += serving_benchmarks.spacing(block, known)
    found.cells, notes = serving_benchmarks.cells(block, None if known is None else round(known, 4), found.draft_length)
    found.notes += notes
    if rates and found.draft_length and len(rates) < found.draft_length:
        found.notes.append(f"rates of {len(rates)} of {found.draft_length} draft positions are given")
    return found


def _text(draft_length: int | None) -> serving_benchmarks.TextBlocks:
    def convert(block: Mapping[str, Any]) -> Observation | None:
        if serving_benchmarks.of_sglang(block):
            return None
        return _benchmark(block, serving_benchmarks.rates_of(block), draft_length)

    return serving_benchmarks.TextBlocks(convert)


def _result(document: Any, draft_length: int | None) -> list[Observation]:
    found = []
    for each in document if isinstance(document, list) else [document]:
        if not isinstance(each, dict):
            continue
        prefix = "spec_decode_"
        named = {key.removeprefix(prefix): value for key, value in each.items() if key.startswith(prefix)}
        if not named and ("output_throughput" not in each or serving_benchmarks.of_sglang(each)):
            continue
        block = serving_benchmarks.figures({**each, **named})
        if "acceptance_rate" in block:
            rate = block["acceptance_rate"]
            block["acceptance_rate"] = Printed(rate.value / 100, rate.half / 100)
        listed = optional(named, "per_position_acceptance_rates")
        if listed is not None and not isinstance(listed, list):
            raise ParameterError("spec_decode_per_position_acceptance_rates must be a list of rates")
        rates = [json_number("spec_decode_per_position_acceptance_rates", rate) for rate in listed or ()]
        made = _benchmark(block, rates, draft_length)
        found += [] if made is None else [made]
    return found


# --- metrics of requests ---


def _requests(document: Any, draft_length: int | None) -> list[Observation]:
    keys = ("acceptance_histogram", "num_spec_steps", "mean_acceptance_length")
    return [request(each) for each in objects(document) if all(key in each for key in keys) and each["num_spec_steps"]]


def request(found: Mapping[str, Any]) -> Observation:
    """Observation of one request: counts and histogram, dense or sparse, checked against each other."""
    drafts, drafted = json_count(found, "num_spec_steps"), json_count(found, "num_draft_tokens", "total_draft_tokens")
    accepted = json_count(found, "num_accepted_draft_tokens", "total_accepted_draft_tokens")
    longest = json_count(found, "num_spec_tokens")
    listed = optional(found, "acceptance_histogram")
    histogram = None if listed is None else json_counts("acceptance_histogram", listed)
    steps = optional(found, "per_step_accepted")
    if steps is not None and histogram is None:
        histogram = histogram_of("per_step_accepted", steps)
    made = Observation(
        drafts=drafts, drafted=drafted, accepted=accepted, histogram=histogram, draft_length=longest, request=True,
    )  # fmt: skip
    if histogram is not None:
        if longest is not None:
            histogram += [0] * (longest + 1 - len(histogram))
        made.checks += of_histogram(histogram, drafts, accepted)
    mean, ratio = optional(found, "mean_acceptance_length"), optional(found, "draft_acceptance_rate")
    if mean is not None and drafts and accepted is not None:
        printed_mean = length("mean_acceptance_length", json_number("mean_acceptance_length", mean))
        made.checks.append(Check(OF_COUNTS, abs(printed_mean.value - 1 - accepted / drafts), printed_mean.half + 1e-9))
    if ratio is not None and drafted and accepted is not None:
        rate = share("draft_acceptance_rate", json_number("draft_acceptance_rate", ratio))
        made.checks.append(Check(OF_RATIO, abs(rate.value - accepted / drafted), rate.half + 1e-9))
    return made


def histogram_of(name: str, steps: object, less: int = 0) -> list[int]:
    """Histogram of a list of accepted tokens by step, of which `less` are not counted."""
    if not isinstance(steps, list) or len(steps) > MOST_STEPS:
        raise ParameterError(f"{name} must be a list of at most {MOST_STEPS:,} counts, got {shown(steps)}")
    numbers = Counter(count(name, step) - less for step in steps)
    if numbers and not 0 <= min(numbers) <= max(numbers) <= MOST_POSITIONS:
        raise ParameterError(f"{name} must be counts between {less} and {MOST_POSITIONS + less}, got {min(numbers) + less}")
    return [numbers[number] for number in range(max(numbers, default=0) + 1)]


def of_histogram(histogram: Sequence[int], drafts: int | None, accepted: int | None) -> Iterable[Check]:
    """Checks of a histogram against its counts."""
    if drafts is not None:
        yield Check(SUM, float(abs(sum(histogram) - drafts)), 0.0)
    if accepted is not None:
        yield Check(MOMENT, float(abs(sum(index * number for index, number in enumerate(histogram)) - accepted)), 0.0)


DIALECTS = (
    OutputForm(
        "vllm-v1-log", "'SpecDecoding metrics:'", ("SpecDecoding metrics", "Avg generation throughput", "speculative_config="), _V1,
    ),
    OutputForm("vllm-v0-log", "'Speculative metrics:'", ("Speculative metrics",), _V0),
    OutputForm("vllm-bench-text", "'Acceptance length:' of vllm bench serve", serving_benchmarks.MARKS, _text),
    OutputForm("vllm-bench-json", "spec_decode_num_drafts of vllm bench serve", documents=separate(_result)),
    OutputForm("vllm-requests", "metrics.speculative_decoding of responses", documents=separate(_requests)),
    prometheus_counters.counters("vllm", "vllm-prometheus"),
)  # fmt: skip
