"""Advice as printed text, for a terminal, and as HTML, for a notebook."""

from __future__ import annotations

import io
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich import box
from rich.console import Console
from rich.table import Table

from model.engines.step_terms import PRIORS
from model.methods import registry
from sim.advice.other_methods import NO_SPREAD

if TYPE_CHECKING:
    from model.serving.arrivals import Arrivals
    from sim.advice.advice import AcceptanceCase, Advice
    from sim.advice.situation import Evidence

WIDTH = 118
MOST_LENGTHS = 10
MOST_OTHERS, MOST_INFLUENCES, MOST_USES = 6, 3, 4


def text(advice: Advice, width: int = WIDTH) -> str:
    """The advice on one screen."""
    console = Console(file=io.StringIO(), width=width, force_terminal=False, highlight=False, markup=False)
    for paragraph in textwrap.wrap(advice.verdict, width):
        console.print(paragraph, soft_wrap=True)
    if advice.arrivals is not None:
        console.print()
        console.print(_of_arrivals(advice.arrivals))
    for case in advice.cases:
        console.print()
        console.print(_of_case(advice, case))
    others = _other_methods(advice)
    console.print("\nother methods" if others else "")
    for line in others:
        bullet(console, line, width)
    for shown in _alternatives(advice):
        console.print(shown)
    console.print("\nwhat would overturn it")
    for line in _overturn(advice):
        bullet(console, line, width)
    console.print("\nrests on")
    for line in rests_on(advice.situation.rests_on):
        bullet(console, line, width)
    for note in (*advice.situation.notes, *advice.others.notes):
        bullet(console, f"note: {note}", width)
    out: Any = console.file
    return str(out.getvalue()).rstrip() + "\n"


def _of_arrivals(arrivals: Arrivals) -> Table:
    title = f"at {arrivals.rate:g} requests/s, in closed form  (* best; -: queue grows)"
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, title_style="", pad_edge=False)
    for name in ("K", "running\nper replica", "TPOT\n[ms]", "80 %\ninterval", "request\n[s]", "most requests/s\nper replica"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in arrivals.rows:
        mark = "*" if row is arrivals.best else ""
        if row.running is None or row.tpot_ms is None or row.e2e_ms is None:
            table.add_row(f"{row.draft_length}", "-", "-", "-", "-", f"{row.most_requests_per_s:.3g}")
            continue
        ends = "-" if row.tpot_ms_low is None else f"{row.tpot_ms_low:.3g}-{row.tpot_ms_high:.3g}"
        values = f"{row.running:.3g}", f"{row.tpot_ms:.3g}", ends, f"{row.e2e_ms / 1e3:.3g}", f"{row.most_requests_per_s:.3g}"
        table.add_row(f"{row.draft_length}{mark}", *values)
    return table


def bullet(console: Console, line: str, width: int) -> None:
    """Print a line of a list, indented where it goes on."""
    for part in textwrap.wrap(line, width - 2, initial_indent="  ", subsequent_indent="    "):
        console.print(part, soft_wrap=True)


def _of_case(advice: Advice, case: AcceptanceCase) -> Table:
    choice, parallel = case.choice, advice.situation.tensor_parallel
    several = f", acceptance {case.acceptance.text}" if len(advice.cases) > 1 else ""
    table = Table(
        title=f"speed-up over plain decoding{several}  (* best on average, ~ tied)",
        title_justify="left",
        box=box.SIMPLE_HEAD, title_style="", pad_edge=False, padding=(0, 0, 0, 1),
    )  # fmt: skip
    table.add_column("running\nseqs", justify="right", no_wrap=True)
    lengths = choice.draft_lengths[1 : 1 + MOST_LENGTHS]
    for length in lengths:
        table.add_column(f"\nK={length}", justify="right", no_wrap=True)
    for name in ("80 % interval\nof the best", "TPOT [ms]\nplain", "\nbest", "tok/s/GPU\nplain", "\nbest"):
        table.add_column(name, justify="right", no_wrap=True)
    low, high = choice.interval
    for row, batch in enumerate(choice.batches):
        best, tpot, rate = int(choice.best[row]), 1e3 * choice.tpot_seconds[row], choice.throughput[row] / parallel
        cells = [f"{choice.speedups[row, 1 + at]:.2f}{_mark(case, row, 1 + at)}" for at in range(len(lengths))]
        shown = best or 1 + int(choice.losses[row, 1:].argmin())
        span = f"{low[row, shown]:.2f} to {high[row, shown]:.2f}"
        table.add_row(f"{batch:g}", *cells, span, number(tpot[0]), number(tpot[best]) if best else "plain", number(rate[0]),
                      number(rate[best]) if best else "plain")  # fmt: skip
    return table


def number(value: float) -> str:
    """A number with three digits, without an exponent.

    >>> number(3.8541), number(8190.2)
    ('3.85', '8,190')
    """
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _mark(case: AcceptanceCase, row: int, column: int) -> str:
    return "*" if case.choice.best[row] == column else "~" if case.choice.ties[row, column] else " "


def _other_methods(advice: Advice) -> list[str]:
    """The fastest choice of each other method at the smallest batch."""
    found: dict[str, Any] = {}
    for row in advice.others.rows:
        found.setdefault(row["method"], row)
    lines = []
    for name, row in list(found.items())[:MOST_OTHERS]:
        agreement = "" if row["exact"] else "; not exact: agreement with the target unknown"
        label = ", ".join(filter(None, (registry.label(name, short=True), row["setting"])))
        known = row["speedup_low"] is not None
        span = f" ({row['speedup_low']:.2f} to {row['speedup_high']:.2f})" if known else f" (no interval: {NO_SPREAD})"
        lines.append(
            f"{label}: {row['speedup']:.2f}x{span} with {row['batch']} running on {row['gpus']}"
            f" GPU{'s' if row['gpus'] > 1 else ''}, TPOT {number(row['tpot_ms'])} ms,"
            f" {number(row['tokens_per_s_per_gpu'])} tok/s/GPU{agreement}"
        )
    reasons: dict[str, list[str]] = {}
    for name, why in advice.others.left_out:
        reasons.setdefault(why, []).append(registry.label(name, short=True))
    missing = [f"{', '.join(names)} ({why})" for why, names in reasons.items()]
    return lines + ([f"not evaluated: {'; '.join(missing)}"] if missing else [])


def _alternatives(advice: Advice) -> list[Any]:
    """Other uses of the same devices at the smallest and at the middle load."""
    if not advice.alternatives:
        return []
    loads = sorted({each.running for each in advice.alternatives})
    table = Table(
        title=f"the same {advice.situation.gpus} GPUs otherwise (> as asked)", title_justify="left", box=box.SIMPLE_HEAD,
        title_style="", pad_edge=False,
    )  # fmt: skip
    for name in ("running\nin all", "\nuse", "TPOT\n[ms]", "\ntok/s/GPU"):
        table.add_column(name, justify="left" if "use" in name else "right")
    for load in dict.fromkeys((loads[0], loads[len(loads) // 2])):
        at_load = [each for each in advice.alternatives if each.running == load]
        for each in [each for place, each in enumerate(at_load) if place < MOST_USES or each.asked]:
            mark = "> " if each.asked else "  "
            table.add_row(f"{load}", mark + each.option, number(each.tpot_ms), number(each.tokens_per_s_per_gpu))
    return [table]


def _overturn(advice: Advice) -> list[str]:
    case = advice.cases[0]
    lines = []
    for each in (case.break_evens[0], case.break_evens[-1])[: len(case.break_evens)]:
        alpha = "at no acceptance" if each.acceptance is None else f"at an acceptance of {each.acceptance:.2f}"
        cost = "not even with a free draft"
        if each.draft_pass_seconds is not None:
            cost = f"or a draft pass of {1e3 * each.draft_pass_seconds:.3g} ms ({each.cost_ratio:.2f} of a plain step)"
        now = f"now {each.now_acceptance:.2f} and {1e3 * each.now_draft_pass_seconds:.3g} ms"
        lines.append(f"break-even with {each.batch:g} running: {alpha}, {cost}; {now}")
    lines = [*dict.fromkeys(lines)]
    ends = [(each.name, *sorted((each.low, each.high))) for each in case.influences[:MOST_INFLUENCES]]
    if ends:
        moved = ", ".join(f"{name} ({low:.2f} to {high:.2f}x)" for name, low, high in ends)
        lines.append(f"inputs that move the speed-up with {case.middle:g} running most, within their 80 % intervals: {moved}")
    if advice.measure_next is not None:
        lines.append(f"{advice.measure_next} (`calibrate engine commands` prints how)")
    return lines


def rests_on(inputs: Sequence[Evidence]) -> list[str]:
    """A line for each input; the terms of a law with the same source share one."""
    lines: dict[tuple[str, str], list[str]] = {}
    for each in inputs:
        term = each.input in PRIORS
        lines.setdefault((each.kind, each.source), []).append(each.input if term else f"{each.input} {each.value}")
    return [f"{kind}: {', '.join(inputs)} ({source})" for (kind, source), inputs in lines.items()]


def html(advice: Advice) -> str:
    """The advice for a notebook."""
    from html import escape

    body = text(advice).split("\n", 1)[-1] if len(advice.verdict) <= WIDTH else text(advice)
    return f"<p><strong>{escape(advice.verdict)}</strong></p><pre>{escape(body)}</pre>"
