"""Results of a study of a server under load: figures of each policy at each load, a verdict, and both as printed text."""

from __future__ import annotations

import io
import itertools
import math
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table
from scipy import special

from model.base import bounded_files
from model.engines.step_terms import PRIORS
from model.serving.closed_form import Workload
from model.serving.records import measures
from model.serving.records.recorder import TimeSeries
from model.serving.scheduler import ServerSettings
from sim.advice import engine_settings
from sim.advice.engine_settings import Range
from sim.advice.situation import Evidence, Situation
from sim.serving import policies, served_methods
from sim.serving.draft_placement import DraftPlacement
from sim.serving.draft_schedules import NOWHERE, SHARE, ContextRow, ScheduleRow, SwitchOffLoad, as_ranges

KIND, SCHEMA_VERSION = "serving", 1
WIDTH = 118
_BOUNDED = (("draft before the target's pass and ", policies.CONCURRENT), ("draft chains and ", served_methods.BY_THE_DRAFT))
"""What the bound is for, said where other policies are shown too."""
SLICES = 200
"""Largest number of slices of a time series in a document."""
_ENDS = ("", "_low", "_high")
SPREAD = [*(f"{statistic}_{name}_ms" for name in measures.TIMES for statistic in measures.STATISTICS), "output_tokens_per_s",
          "requests_per_s"]  # fmt: skip


class LoadPoint(NamedTuple):
    """One load of the study: a rate, a number of clients, or a speed of the trace."""

    rate: float | None
    concurrency: int | None

    @property
    def text(self) -> str:
        """The load as printed text."""
        return f"{self.concurrency} clients" if self.rate is None else f"{self.rate:.4g}/s"


@dataclass(frozen=True, eq=False)
class ServedPoint:
    """Figures of one policy at one load; `spread` has the 80 % interval of those that have one.

    `speeds` are tokens per second with clients, and inverse mean times of requests under arrivals: of the run with the estimates,
    then of the further runs. Those of all policies have the same requests, outcomes and draws.
    """

    load: LoadPoint
    policy: str
    figures: dict[str, float]
    spread: dict[str, tuple[float, float]]
    stable: bool
    series: TimeSeries
    within_slo: float | None
    speeds: tuple[float, ...] = ()
    within_spread: tuple[float, float] = (math.nan, math.nan)
    """80 % interval of `within_slo`."""

    def faster_than(self, other: ServedPoint) -> tuple[float, float, float]:
        """Ratio of the speeds with its 80 % interval, from the runs of both in pairs; nan where there are too few [-]."""
        ratio, *drawn = (own / its for own, its in zip(self.speeds, other.speeds, strict=True))
        return (ratio, *interval(ratio, drawn))

    def series_document(self) -> dict[str, Any]:
        """Its load and policy with the columns of its time series, in at most `SLICES` slices."""
        return {
            "rate": self.load.rate, "concurrency": self.load.concurrency, "policy": self.policy,
            **self.series.thinned(SLICES).table(),
        }  # fmt: skip

    def row(self, num_blocks: int | None, gpus: int, *, separate: bool = False) -> dict[str, Any]:
        """Row of `--json`; `num_blocks` and `gpus` are those of all replicas, `separate` tells of a draft's own devices."""
        row: dict[str, Any] = {"rate": self.load.rate, "concurrency": self.load.concurrency, "policy": self.policy}
        for name in SPREAD:
            low, high = self.spread.get(name, (math.nan, math.nan))
            row |= {name: self.figures[name], f"{name}_low": low, f"{name}_high": high}
        blocks = self.figures["mean_blocks"]
        return row | {
            "mean_running": self.figures["mean_running"], "utilization": self.figures["utilization"],
            "draft_utilization": self.figures["draft_utilization"] if separate else None,
            "gpus": gpus, "output_tokens_per_s_per_gpu": self.figures["output_tokens_per_s"] / gpus,
            "kv_utilization": None if num_blocks is None else blocks / num_blocks, "preemptions": int(self.figures["preemptions"]),
            "mean_draft_length": self.figures["mean_draft_length"], "tokens_per_step": self.figures["tokens_per_step"],
            "stable": self.stable, "exact": not self.policy.startswith(served_methods.LOSSY),
            **dict(zip((f"requests_per_s_within_slo{end}" for end in _ENDS), (self.within_slo, *self.within_spread), strict=True)),
        }  # fmt: skip


@dataclass(frozen=True, eq=False)
class Study:
    """Results.

    `points` are in the order of loads and policies; `schedule` is the closed form's best draft length by running sequences, and
    `by_context` that over contexts too, if it was asked for.
    """

    replicas: int
    placement: DraftPlacement
    situation: Situation
    settings: ServerSettings
    points: tuple[ServedPoint, ...]
    schedule: tuple[ScheduleRow, ...]
    workload: Workload
    rests_on: tuple[Evidence, ...]
    notes: tuple[str, ...] = field(default=())
    off_from: SwitchOffLoad = NOWHERE
    by_context: tuple[ContextRow, ...] = ()
    bounds: Mapping[LoadPoint, float] = field(default_factory=dict)
    """Most tokens per second that any policy of draft length reaches, by clients."""

    @cached_property
    def loads(self) -> list[LoadPoint]:
        """Loads, in order."""
        return list(dict.fromkeys(each.load for each in self.points))

    def at(self, load: LoadPoint) -> list[ServedPoint]:
        """Points of one load."""
        return [each for each in self.points if each.load == load]

    def best(self, load: LoadPoint) -> ServedPoint:
        """The point of the policy with the shortest mean time of a request, or with clients the most tokens per second.

        What no engine can do (`oracle`) is left out, and so are lossy methods.
        """
        able = [each for each in self.at(load) if not each.policy.startswith(("oracle", *served_methods.LOSSY))] or self.at(load)
        if load.rate is None:
            return max(able, key=lambda each: each.figures["output_tokens_per_s"])
        return min(able, key=lambda each: (not each.stable, each.figures["mean_e2e_ms"]))

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Rows of `--json`: each point, its gain over plain decoding, and its regret: how much faster the best policy is."""
        rows = []
        for each in self.points:
            off = next((other for other in self.at(each.load) if other.policy == "off"), None)
            gain = (math.nan,) * 3 if off is None else each.faster_than(off)
            best = self.best(each.load).faster_than(each)
            compared = [(f"gain_over_off{end}", value) for end, value in zip(_ENDS, gain, strict=True)]
            compared += [(f"regret{end}", value - 1) for end, value in zip(_ENDS, best, strict=True)]
            bound = {"bound_tokens_per_s": self.bounds.get(each.load)}
            own = each.row(self.num_blocks, self.gpus(each.policy), separate=self.separate(each.policy))
            rows.append(own | dict(compared) | bound)
        return rows

    def separate(self, policy: str) -> bool:
        """True if this policy drafts on a device of its own."""
        return self.placement.separate and policies.uses_draft(policy)

    def gpus(self, policy: str) -> int:
        """Devices of all replicas with this policy, those of the draft's own included."""
        return self.replicas * (self.situation.tensor_parallel + self.separate(policy))

    @property
    def num_blocks(self) -> int | None:
        """Blocks of the caches of all replicas; None: any number."""
        return None if self.settings.num_blocks is None else self.settings.num_blocks * self.replicas

    @cached_property
    def switch_off(self) -> int | None:
        """Running sequences from which on plain decoding gives the most tokens per second, by the closed form; None: not within."""
        off = None
        for row in reversed(self.schedule):
            if row.draft_length:
                break
            off = row.running
        return off

    @cached_property
    def ranges(self) -> list[Range]:
        """The schedule as ranges of running sequences."""
        return as_ranges(self.schedule)

    @cached_property
    def verdict(self) -> str:
        """The answer in a sentence or two."""
        parts = []
        kept = [load for load in self.loads if self.best(load).stable]
        for policy, group in itertools.groupby(kept, key=lambda load: self.best(load).policy):
            loads = list(group)
            span = loads[0].text if len(loads) == 1 else f"{loads[0].text} to {loads[-1].text}"
            parts.append(f"{policy} is best at {span}{self._gain(loads[0])}")
        unstable = [load.text for load in self.loads if load not in kept]
        if unstable:
            parts.append(f"no policy keeps up with {', '.join(unstable)}: the queue grows")
        if any(row.draft_length for row in self.schedule):
            parts.append(self._off_text())
        return "; ".join(parts)

    def _off_text(self) -> str:
        """Where drafts stop paying, in words."""
        running, low, high = self.off_from[:3]
        most = self.schedule[-1].running
        if running is None:
            unsure = "" if low is None else f" (in the 80 % interval perhaps only up to {low:.0f})"
            what = "the most that run" if most == self.settings.max_num_seqs else "the most that the cache holds, about"
            return f"in closed form drafts pay with up to {most} running sequences, {what}{unsure}"
        ends = f"{low:.0f} to {high:.0f}" if high is not None else f"from {low:.0f} to beyond {most}"
        return f"in closed form a server without the draft is faster from about {running:.0f} running sequences on (80 % {ends})"

    def _gain(self, load: LoadPoint) -> str:
        """How much faster the best policy is than plain decoding, where both were run."""
        best, off = self.best(load), next((each for each in self.at(load) if each.policy == "off"), None)
        if off is None or best is off:
            return ""
        name = "output_tokens_per_s" if load.rate is None else "mean_e2e_ms"
        ratio = best.figures[name] / off.figures[name]
        what = f"{ratio:.2f}x the tokens per second" if load.rate is None else f"requests take {ratio:.2f} of the time"
        _, low, high = best.faster_than(off)
        if math.isfinite(low):
            ends = (low, high) if load.rate is None else (1 / high, 1 / low)
            what += f" (80 % interval {ends[0]:.2f} to {ends[1]:.2f})"
        return f": {what} of off" if off.stable or load.rate is None else " (off does not keep up)"

    def __str__(self) -> str:
        return text(self)

    def document(self) -> dict[str, Any]:
        """The results as JSON values."""
        return {
            "kind": KIND, "schema_version": SCHEMA_VERSION, "verdict": self.verdict, "model": self.situation.name,
            "gpu": self.situation.gpu, "tensor_parallel": self.situation.tensor_parallel, "replicas": self.replicas,
            "table": [plain_values(row) for row in self.rows],
            "settings": {name: getattr(self.settings, name) for name in ServerSettings.names()},
            "workload": {"prompt": self.workload.prompt, "output": self.workload.output},
            "schedule": [row._asdict() for row in self.schedule], "switch_off_running": self.switch_off,
            "switch_off": self.off_from._asdict(), "by_context": [row._asdict() for row in self.by_context],
            "series": [each.series_document() for each in self.points],
            "ranges": [[*each] for each in self.ranges],
            "lines": {engine: self.lines(engine) for engine in engine_settings.NAMES},
            "rests_on": [vars(each) for each in self.rests_on], "notes": [*self.notes],
        }  # fmt: skip

    def lines(self, engine: str) -> list[str]:
        """Lines that set an engine to the schedule."""
        of = self.situation
        draft = of.draft or engine_settings.draft_of(of.law.facts.get("draft", ""))
        lines = engine_settings.lines(
            engine, of.name or engine_settings.MODEL, draft, self.ranges, tensor_parallel=of.tensor_parallel
        )
        return [*(f"# {each}" for each in self._of_schedule()), *lines]

    def _of_schedule(self) -> Iterator[str]:
        """What the schedule gains where it was simulated, in words."""
        for load in self.loads:
            own = next((each for each in self.at(load) if each.policy == policies.OWN), None)
            others = [each for each in self.at(load) if each.policy.partition(":")[0] in policies.OF_ENGINES]
            if own is not None and others:
                gains = ", ".join(f"{_ratio(own.faster_than(each))} of {each.policy}" for each in others)
                what = "tokens per second" if load.rate is None else "speed of a request"
                yield f"simulated at {load.text}, {what} of this schedule: {gains}"


def _ratio(of: tuple[float, float, float]) -> str:
    """A ratio with its interval, if there is one."""
    value, low, high = of
    return f"{value:.2f}x" + (f" (80 % interval {low:.2f} to {high:.2f})" if math.isfinite(low) else "")


def speed(load: LoadPoint, figures: Mapping[str, float]) -> float:
    """Tokens per second with clients; the inverse of a request's mean time under arrivals [1/s]."""
    return figures["output_tokens_per_s"] if load.rate is None else 1e3 / figures["mean_e2e_ms"]


def plain_values(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with null in place of numbers that are not finite."""
    return {name: None if isinstance(value, float) and not math.isfinite(value) else value for name, value in row.items()}


def interval(value: float, drawn: Sequence[float]) -> tuple[float, float]:
    """Interval (80 %) of a positive figure from replications that draw all inputs, around them and at least the value itself.

    >>> interval(1.0, [1.0, 1.0]), [round(each, 3) for each in interval(2.0, [1.0, 4.0])]
    ((1.0, 1.0), [0.05, 80.488])
    """
    logs = np.log(np.array([each for each in drawn if each > 0]))
    if logs.size < 2 or not value > 0:
        return math.nan, math.nan
    reach = float(special.stdtrit(logs.size - 1, (1 + SHARE) / 2) * logs.std(ddof=1) * math.sqrt(1 + 1 / logs.size))
    low, high = math.exp(logs.mean() - reach), math.exp(logs.mean() + reach)
    return min(low, value), max(high, value)


def interval_from_zero(value: float | None, drawn: Sequence[float | None]) -> tuple[float, float]:
    """Interval (80 %) of a figure that may be 0 from replications that draw all inputs, as `interval` without the logarithm.

    >>> [round(each, 3) for each in interval_from_zero(1.0, [0.0, 1.0])], interval_from_zero(None, [None, None])
    ([0.0, 3.165], (nan, nan))
    """
    found = np.array([each for each in drawn if each is not None])
    if value is None or found.size < 2:
        return math.nan, math.nan
    reach = float(special.stdtrit(found.size - 1, (1 + SHARE) / 2) * found.std(ddof=1) * math.sqrt(1 + 1 / found.size))
    return min(max(float(found.mean()) - reach, 0.0), value), max(float(found.mean()) + reach, value)


# --- As printed text ---


def text(study: Study, width: int = WIDTH) -> str:
    """The study on one screen."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False, markup=False)
    for paragraph in textwrap.wrap(study.verdict, width):
        console.print(paragraph, soft_wrap=True)
    console.print()
    console.print(_table(study))
    if study.bounds:
        most = ", ".join(f"{_number(bound)} at {load.text}" for load, bound in study.bounds.items())
        which = [text for text, kinds in _BOUNDED if any(each.policy.startswith(kinds) for each in study.points)]
        of = f"bound of policies that {''.join(which)}do not know what is accepted, in tokens/s"
        _bullet(console, f"{of}: {most} (closed form, without prompts)", width)
    for load in study.loads if any(each.within_slo is not None for each in study.points) else ():
        kept = "; ".join(f"{_label(each.policy)} {_within(each)}" for each in study.at(load))
        _bullet(console, f"requests within the objectives at {load.text}: {kept}", width)
    for policy in dict.fromkeys(each.policy for each in study.points):
        if _label(policy) != policy:
            _bullet(console, f"{_label(policy)}: {policy}", width)
    if any(row.draft_length for row in study.schedule):
        console.print("\nbest draft length by running sequences of a server that has the draft, in closed form")
        spans = "; ".join(f"{_span(each.first, each.last)}: {each.draft_length or 'off'}" for each in study.ranges)
        _bullet(console, spans, width)
    console.print("\nrests on")
    for line in _rests_on(study):
        _bullet(console, line, width)
    for note in dict.fromkeys(study.notes):
        _bullet(console, f"note: {note}", width)
    out: Any = console.file
    return str(out.getvalue()).rstrip() + "\n"


def _within(point: ServedPoint) -> str:
    """Requests per second within the objectives, with their interval if there is one."""
    low, high = point.within_spread
    ends = f" (80 % interval {_number(low)} to {_number(high)})" if math.isfinite(low) else ""
    return f"{_number(point.within_slo or 0.0)}/s{ends}"


def _span(first: int, last: int) -> str:
    if last >= 4096:
        return f"{first} on" if first > 1 else "all"
    return f"{first}" if first == last else f"{first} to {last}"


def _bullet(console: Console, line: str, width: int) -> None:
    for part in textwrap.wrap(line, width - 2, initial_indent="  ", subsequent_indent="    "):
        console.print(part, soft_wrap=True)


def _table(study: Study) -> Table:
    table = Table(
        title="by load and policy  (* best; ! the queue grows)", title_justify="left", box=box.SIMPLE_HEAD, title_style="",
        pad_edge=False, padding=(0, 0, 0, 1),
    )  # fmt: skip
    table.add_column("\nload", no_wrap=True)
    table.add_column("\npolicy", overflow="fold", min_width=11, max_width=22)
    columns = ("tokens/s\nall", "80 %\ninterval", "TTFT\np50 ms", "\np99", "TPOT\nms", "\np99", "request\nmean s", "\np99",
               "running\nall", "\nK", "cache\nfull", "pre-\nempted")  # fmt: skip
    for name in columns:
        table.add_column(name, justify="right", no_wrap=True)
    for load in study.loads:
        best = study.best(load)
        for number, each in enumerate(study.at(load)):
            table.add_row(*_cells(study, load if not number else None, each, each is best))
    return table


def _cells(study: Study, load: LoadPoint | None, each: ServedPoint, best: bool) -> Iterator[str]:
    figures = each.figures
    yield load.text if load is not None else ""
    yield _label(each.policy) + ("*" if best else "") + ("" if each.stable else "!")
    yield _number(figures["output_tokens_per_s"])
    low, high = each.spread.get("output_tokens_per_s", (math.nan, math.nan))
    yield f"{_number(low)}-{_number(high)}"
    for name in ("p50_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms"):
        yield _number(figures[name])
    for name in ("mean_e2e_ms", "p99_e2e_ms"):
        yield _number(figures[name] / 1e3)
    yield _number(figures["mean_running"])
    yield _number(figures["mean_draft_length"])
    blocks = study.num_blocks
    yield "-" if blocks is None else f"{figures['mean_blocks'] / blocks:.0%}"
    yield f"{figures['preemptions']:.0f}"


def _label(policy: str) -> str:
    """Name of a policy in a narrow column: that of a method with the values of its settings, without lists of more than two.

    >>> _label('self-speculative:{"exit_layer": 8, "draft_length": 3}'), _label("static:3")
    ('self-spec:8,3', 'static:3')
    >>> _label('tree:{"shape": "chain", "draft_depth": 3, "rank_rates": [0.6, 0.2, 0.1]}')
    'tree:chain,3,[0.6,..]'
    """
    kind, _, settings = policy.partition(":")
    if kind not in served_methods.KINDS:
        return policy
    values = ",".join(_value(each) for each in bounded_files.json_of(settings).values())
    return f"{kind.replace('self-speculative', 'self-spec')}:{values}"


def _value(setting: Any) -> str:
    """A setting, or the beginning of a long list."""
    if isinstance(setting, list) and len(setting) > 2:
        return f"[{_value(setting[0])},..]"
    return str(setting).replace(" ", "")


def _number(value: float) -> str:
    """A number with three digits, without an exponent.

    >>> _number(0.01234), _number(1234.5), _number(float("nan"))
    ('0.0123', '1,234', '-')
    """
    if not math.isfinite(value):
        return "-"
    if not value:
        return "0"
    digits = max(0, 2 - math.floor(math.log10(abs(value))))
    return f"{value:,.{digits}f}"


def _rests_on(study: Study) -> list[str]:
    """A line for each source; the terms of a law with the same source share one."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in study.rests_on:
        term = each.input in PRIORS
        lines.setdefault((each.kind, each.source), []).append(each.input if term else f"{each.input} {each.value}")
    return [f"{kind}: {', '.join(inputs)} ({source})" for (kind, source), inputs in lines.items()]
