"""A study of a server as printed text."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from model.base import bounded_files
from model.engines.step_terms import PRIORS
from sim.serving import policies, served_methods

if TYPE_CHECKING:
    from sim.serving.study import LoadPoint, ServedPoint, Study

WIDTH = 118
_BOUNDED = (("draft before the target's pass and ", policies.CONCURRENT), ("draft chains and ", served_methods.BY_THE_DRAFT))
"""What the bound is for, said where other policies are shown too."""


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
