"""Printed report of a run: the verdict, tables that compare the views, notes on sources and uncertainty, and file paths."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from model.base import checks
from model.base.checks import ParameterError
from model.base.whole_files import write_text
from model.methods.registry import algorithm
from model.outcomes.intervals import EIGHTY_OVER_MEDIAN
from model.outcomes.outcome_kinds import KINDS
from model.published.paper_notes import NOTES, Note
from sim.runs import json_rows, verdict
from sim.runs.sweep import Report
from sim.runs.verdict import Verdict
from sim.scenarios.scenario_file import cost_source, method_tables
from sim.views import agreement, metrics

MOST_ROWS = 60
MOST_NOTES = 5
"""Printed notes on the outcomes of single points."""
_MOST_REASONS = 4
MOST_LISTED = 10_000
"""Rows read for printing, listing and figures; the whole table may be larger than memory."""
WIDE = 148
MIN_TEXT_WIDTH = 24
"""Width to which a column of words is narrowed where the table is too wide; longer words wrap."""
NO_CLOSED_FORM = "no closed form for these points; use --view paths or --view events"
TITLES = {
    "speedup": "speed-up\n(plain decoding = 1)", "tpot_ms": "time per output\ntoken [ms]",
    "compute_per_token": "GPU-time per token\n(plain decoding = 1)", "mean_busy_units": "mean busy\nunits",
    "tokens_per_round": "tokens per\nround", "straggler_loss": "straggler loss\n(share of time)",
    "speedup_over_one_device": "speed-up over\none device",
}  # fmt: skip
"""Printed columns of results, in the order of importance, and their headings."""
FURTHER_TITLES = {
    "relative_latency": "latency\n(plain decoding = 1)", "operations_per_token": "operations per token\n(plain decoding = 1)",
    "tpot_layers": "time per output\ntoken [layer-times]", "latency_s": "latency\n[s]", "latency_layers": "latency\n[layer-times]",
    "draft_acceptance_rate": "draft acceptance\nrate", "flops_per_token": "FLOPs\nper token",
    "weight_bytes_per_token": "weights read\nper token [bytes]", "arithmetic_intensity": "arithmetic intensity\n[FLOPs/byte]",
    **{name: f"{name.split('_')[1]} time per\ntoken [layer-times]" for name in metrics.TIME_PARTS},
    **{name: f"{name.split('_')[1]} time\nper token [s]" for name in metrics.TIME_PARTS_S},
}  # fmt: skip
"""Headings of columns that are printed only if they are asked for; others have their names as headings."""
ALL_COLUMNS = "all"
_RATES = tuple(dict.fromkeys(kind.rate for kind in KINDS.values()))
VIEWS = ("formula", "paths", "events")


class Findings(NamedTuple):
    """What a report says of the whole table of results; computed once for all outputs of a run."""

    verdict: Verdict
    notes: list[str]


def findings(report: Report) -> Findings:
    """Compute the verdict and the notes of a run."""
    table = report.table()
    return Findings(verdict.of(table, report.tables), notes(table, report.tables))


class Summary(NamedTuple):
    """What is written into a run's directory: the printed report, and the JSON document."""

    text: str
    document: str


def summarise(report: Report, frame: pl.DataFrame, figures: list[Path], found: Findings | None = None) -> Summary:
    """Write the printed report into the run's directory, summary.txt, and summary.json for programs. Return both."""
    assert report.out is not None
    found = found or findings(report)
    text, content = io.StringIO(), document(report, frame, figures, found)
    show(report, frame, figures, Console(file=text, width=WIDE, highlight=False), found=found)
    write_text(report.out / "summary.txt", text.getvalue())
    write_text(report.out / "summary.json", content + "\n")
    return Summary(text.getvalue(), content)


def prints_like_a_file() -> bool:
    """Return whether stdout would get the text of summary.txt: it is no terminal, knows Unicode, and has no width of its own."""
    console = Console(highlight=False)
    plain = not (console.is_terminal or console.is_jupyter or console.options.ascii_only)
    return plain and "COLUMNS" not in os.environ


KNOWN_COLUMNS = tuple(dict.fromkeys((
    *TITLES, *FURTHER_TITLES, *metrics.columns(), *metrics.WORK, *metrics.PER_ROUND, "latency_s", "busy_s", "reserved_s",
    "reserved_units", "reserved_layers", "occupancy", "memory_share", "prompt_s", "prompt_tokens", "seconds_error",
)))  # fmt: skip
"""Columns that can be asked for."""


def check_columns(asked: str | None) -> None:
    """Refuse names of columns that no run has; `asked` has commas between names, or is `all`."""
    for name in () if asked in (None, ALL_COLUMNS) else str(asked).split(","):
        if name.strip() not in KNOWN_COLUMNS:
            headed = ", ".join((*TITLES, *FURTHER_TITLES))
            hint = checks.nearest(name.strip(), KNOWN_COLUMNS).partition("known:")[0]
            problem = f"--columns must name columns of results, got {checks.shown(name.strip())}"
            raise ParameterError(f"{problem}; {hint}known: {headed}, all")


def columns(asked: str | None, frame: pl.DataFrame) -> list[str]:
    """Columns of results to print, those with a value: by default those of `TITLES`, with `all` all that have a heading."""
    headed = {None: [*TITLES], ALL_COLUMNS: [*TITLES, *FURTHER_TITLES]}
    names = headed[asked] if asked in headed else [name.strip() for name in str(asked).split(",")]
    return [name for name in names if name in frame.columns and frame[name].count()]


def show(
    report: Report, frame: pl.DataFrame, figures: list[Path], console: Console | None = None, asked: str | None = None,
    found: Findings | None = None,
) -> None:
    """Print the result of a run to stdout, the verdict first; one table if it fits the width, else several.

    The width is that of the terminal, or `COLUMNS`; without either, 148 characters. `asked` are the names of columns with commas
    between, or `all`. `found` is computed if it is not given.
    """
    found = found or findings(report)
    if console is None:
        console = Console(highlight=False)
        console = console if console.is_terminal or "COLUMNS" in os.environ else Console(width=WIDE, highlight=False)
    console.print(found.verdict.text, soft_wrap=True, markup=False)
    name, about = (escape(report.tables["scenario"].get(key, "")) for key in ("name", "description"))
    console.print(f"[bold]{name}[/bold]" + (f": {about}" if about else ""))
    shown = with_method_labels(frame.filter(pl.col("point").rank("dense") <= MOST_ROWS), report.tables)
    names = columns(asked, shown)
    digits = 4 if console.width >= 100 else 3
    while names:
        table, taken = _table(shown, tuple(names[:1]), digits), 1
        least = _size_of(console, table).minimum
        while taken < len(names):
            wider = _table(shown, tuple(names[: taken + 1]), digits)
            if _size_of(console, wider).maximum > console.width:
                break
            table, taken = wider, taken + 1
        # No digits are cut: if wrapped words do not make the table of one estimate narrow enough, it is wider than the console.
        table.width = least if least > console.width else None
        console.print(table, crop=False, no_wrap=True, overflow="ignore")
        names = names[taken:]
    if not columns(None, shown) and not _all_wait(shown):
        console.print(NO_CLOSED_FORM, markup=False)
    hidden = report.rows - shown.height
    if hidden:
        console.print(f"... and {hidden:,} more rows in the table of results")
    for line in found.notes:
        console.print(line, markup=False)
    for row in report.failed[:10]:
        console.print(f"[red]failed[/red]: point {row['point']}, {row['view']}: {escape(row['error'])}")
    if len(report.failed) > 10:
        console.print(f"... and {len(report.failed) - 10} more in failed.json")
    for each in report.disagreements[:10]:
        console.print(f"[red]views disagree[/red]: {escape(agreement.describe(each))}")
    if report.disagreements:
        more = f"; {len(report.disagreements) - 10} more are in disagreements.json" if len(report.disagreements) > 10 else ""
        console.print(f"a disagreement between views is a bug in the program, please report it; all results are kept{more}")
    csv = ", .csv" if report.out is not None and (report.out / "results.csv").exists() else ""
    console.print(f"results: {report.out}/results.parquet{csv}", soft_wrap=True, markup=False)
    for path in figures:
        if path.suffix == ".png":
            console.print(f"figure:  {path}", soft_wrap=True, markup=False)


def _all_wait(shown: pl.DataFrame) -> bool:
    """Return whether every point lacks values because passes may wait for units or links; a note explains this."""
    return "no_value_because" in shown.columns and not shown["no_value_because"].null_count()


def _size_of(console: Console, table: Table) -> Measurement:
    """Widths of a table with its words wrapped and not [characters]."""
    return Measurement.get(console, console.options.update(max_width=10_000), table)


def _table(frame: pl.DataFrame, estimates: tuple[str, ...], digits: int) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    keys = describing_columns(frame)
    for key in keys:
        title = key.rpartition(".")[2].replace("_", "\n")
        numeric = frame[key].dtype.is_numeric()
        table.add_column(title, justify="right" if numeric else "left", no_wrap=numeric)
    views = [view for view in VIEWS if view in frame["view"].unique().to_list()]
    for estimate in estimates:
        for index, view in enumerate(views):
            title = (TITLES | FURTHER_TITLES).get(estimate, estimate) if index == 0 else ""
            heading = Text(f"{title}\n{view}")  # Text: brackets of a unit are not markup
            table.add_column(heading, justify="right", no_wrap=True)
    if "mean_busy_units" in estimates:
        table.add_column("units\nreserved", justify="right")
    for part in frame.partition_by("point", maintain_order=True):
        rows = {row["view"]: row for row in part.to_dicts()}
        first = next(iter(rows.values()))
        cells = [plain_text(first[key]) for key in keys]
        cells += [estimate_text(rows.get(view), estimate, digits) for estimate in estimates for view in views]
        cells += [plain_text(int(list(rows.values())[-1]["reserved_units"]))] if "mean_busy_units" in estimates else []
        table.add_row(*map(Text, cells))  # no markup, which would be looked for at each measuring and printing
    for column in table.columns:
        # Words may wrap, but a number must not be cut: it would read as a different number.
        lines = [line for cell in (column.header, *column.cells) for line in str(cell).split("\n")]
        longest = max(map(len, lines))
        if column.no_wrap:
            column.width = longest
        else:
            column.min_width = min(longest, MIN_TEXT_WIDTH) if column.justify == "left" else longest
    return table


def with_method_labels(frame: pl.DataFrame, tables: Mapping[str, Any]) -> pl.DataFrame:
    """Replace the parameter columns of a table of several methods by one column: the method with its chosen parameters."""
    methods = method_tables(tables)
    if frame["method"].n_unique() < 2:
        return frame
    parameters = {field.name for table in methods for field in fields(algorithm(table["name"]).Parameters)}
    swept = {path.rpartition(".")[2] for path in tables.get("sweep", {}) if path.startswith("method.")}
    axes = math.prod(_size(values) for values in tables.get("sweep", {}).values())

    def label(row: dict[str, Any]) -> str:
        table = methods[row["point"] // axes]
        keys = [key for key in row if key in parameters & {*table, *swept} - {"layers"} and row[key] is not None]
        return ", ".join([row["method"], *(f"{key} {plain_text(row[key])}" for key in keys)])

    labels = pl.Series("method", [label(row) for row in frame.to_dicts()])
    constant = [name for name in frame.columns if name.endswith("_ratio") and frame[name].drop_nulls().n_unique() < 2]
    return frame.with_columns(labels).drop(sorted({*constant} | parameters & {*frame.columns}))


def _size(values: Any) -> int:
    return int(values["count"]) if isinstance(values, Mapping) else len(values)


def describing_columns(frame: pl.DataFrame) -> list[str]:
    """Columns that differ between points, and the rates."""
    aside = {
        "point", "view", "replications", "latency_sd_layers", "reserved_units", "reserved_layers", "peak_units", "paths_difference",
        *(f"{rate}{more}" for rate in _RATES for more in ("_low", "_high", "_trials")), "outcomes_source", "outcomes_note",
        "contended", "exact", "units", "outcomes", *metrics.columns(), *metrics.PER_ROUND,
        *metrics.WORK, "straggler_loss", "arithmetic_intensity", "agreement_source", "no_value_because",
        "no_time_parts_because", *metrics.TIME_PARTS, *metrics.TIME_PARTS_S,
        *(f"plain_{name}" for name in metrics.PLAIN_WORK),
        *(name for name in frame.columns if name.startswith(("tpot_ms", "latency_s", "busy_s", "reserved_s"))),
    }  # fmt: skip
    if "seconds_error" in frame.columns:
        aside |= {"seconds_per_layer", "seconds_error", "memory_share", "prompt_s", "cost_source", "cost_missing"}
        if any(name.rpartition(".")[2] == "prompt" for name in frame.columns):  # the same number, under the name of the axis
            aside |= {"prompt_tokens"}
    fewer = pl.col("contended") | (pl.col("units") != pl.col("reserved_units"))
    if frame["units"].n_unique() > 1 and frame.select(fewer.any()).item():
        aside -= {"units"}
    if frame["exact"].n_unique() > 1:
        aside -= {"exact"}
    if "occupancy" in frame.columns and not frame.select((pl.col("occupancy") < 1).any()).item():
        aside |= {"occupancy"}
    further = (rate.column for kind in KINDS.values() for rate in kind.rates[1:] if rate.label)
    more = (*further, "agreement", "published_speedup")
    rates = [name for name in (*_RATES, *more) if name in frame.columns and (name in _RATES or frame[name].count())]
    telling = [name for name in frame.columns if name not in {*aside, *rates} and frame[name].n_unique() > 1]
    return [*(telling or ["method"]), *rates]


def plain_text(value: object) -> str:
    """Text of a value in a table of results."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "" if value is None else f"{value + 0.0:.4f}" if isinstance(value, float) else str(value)


def estimate_text(row: Mapping[str, Any] | None, name: str, digits: int) -> str:
    """Text of an estimate with its sampling interval; a dash where a view has no row or no value."""
    if row is None or row.get(name) is None:
        return "-"
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    if low is None or high is None:
        return f"{row[name]:.{digits}f}"
    return f"{row[name]:.{digits}f} ±{(high - low) / 2:.{digits}f}"


def notes(table: pl.LazyFrame, tables: Mapping[str, Any]) -> list[str]:
    """Notes that belong to the numbers: provenance, uncertainty, agreement of the views, and costs that are not included."""
    names, lines = table.collect_schema().names(), []
    if "outcomes_source" in names:
        known = distinct(table.drop_nulls("outcomes_source"), "outcomes_source")["outcomes_source"]
        labels = (rate.label for kind in KINDS.values() for rate in kind.rates if rate.label and rate.column in names)
        kinds = [*dict.fromkeys(labels)]
        of = " and ".join(filter(None, (", ".join(kinds[:-1]), kinds[-1])))
        sources = {part.partition(":")[0].strip() for source in known for part in str(source).split(";")}
        lines.append(f"{of} rates: {', '.join(sorted(sources))}")
    if "outcomes_note" in names:
        notes = distinct(table.drop_nulls("outcomes_note"), "outcomes_note")["outcomes_note"].to_list()
        lines += notes[:MOST_NOTES]
        lines += [f"... and {len(notes) - MOST_NOTES} more such notes (column outcomes_note)"] if len(notes) > MOST_NOTES else []
    if "agreement_source" in names:
        lines += _lossy(table)
    lines.append(f"times: {cost_source(tables)}")
    lines += [line for name in tables.get("scenario", {}).get("notes", ()) for line in _of_paper(table, names, NOTES[name])]
    if "view" in names and _one(table, (pl.col("view") != "formula").any()):
        lines.append("±: 95 % confidence interval from sampling")
    if "seconds_error" in names:
        off = _one(table, pl.col("seconds_error").max())
        lines.append(
            f"the time of plain decoding has a median error of up to about ±{off:.1%}"
            f" (80 % interval: ±{off * EIGHTY_OVER_MEDIAN:.1%}); the time of each pass depends on its own context length"
        )
        lacking = distinct(table.drop_nulls("cost_missing"), "cost_missing")["cost_missing"].to_list()
        if lacking:
            parts = ", ".join(sorted({part for each in lacking for part in each.split(", ")}))
            remedy = "; set step_s and draft_step_s in [cost] to include the engine's overhead" if "step" in parts else ""
            lines.append(f"not measured, assumed 0 (column cost_missing): {parts}{remedy}")
        if "memory_share" not in names or _one(table, pl.col("memory_share").is_null().any()):
            lines.append("memory of some devices is not known: not checked whether weights and KV cache fit")
    if "speedup_input_low" in names:
        spread = _one(table, ((pl.col("speedup_input_high") - pl.col("speedup_input_low")) / 2).max())
        if spread is not None:
            of = "rates (95 % intervals) and times (median errors)" if "seconds_error" in names else "rates (95 % intervals)"
            lines.append(f"input uncertainty: the {of} change a speed-up by at most ±{spread:.4f} (columns *_input_low, _high)")
    if "straggler_loss" in names and (loss := _one(table, pl.col("straggler_loss").max())) is not None:
        lines.append(
            f"a static batch waits for its slowest sequence and loses up to {loss:.1%} of its time (column straggler_loss);"
            " batching = 'continuous' models an engine that keeps its batch full"
        )
    if "paths_difference" in names and _one(table, pl.col("paths_difference").count()):
        runs = int(_one(table, pl.col("replications").filter(pl.col("paths_difference").is_not_null()).sum()))
        worst = float(_one(table, pl.col("paths_difference").max()))
        unit = "s" if "seconds_error" in names else "layer-times"
        agree = "are equal to the last bit" if worst == 0 else f"differ by at most {worst:.2g} {unit}"
        lines.append(f"events and paths {agree} on all {runs:,} decodings that both simulated")
    return lines + _of_waiting(table, names)


def _of_waiting(table: pl.LazyFrame, names: Sequence[str]) -> list[str]:
    """Reasons why formula and paths have no values at some points, and what the view events assumes there."""
    if "no_value_because" not in names:
        return []
    waiting = table.filter(pl.col("no_value_because").is_not_null())
    lines = []
    silent = waiting.filter(pl.col("view") != "events")
    views = [view for view in VIEWS if view in silent.select(pl.col("view").unique()).collect(engine="streaming")["view"]]
    if views:
        reasons = sorted(silent.select(pl.col("no_value_because").unique()).collect(engine="streaming").to_series().to_list())
        listed = "; ".join(reasons[:_MOST_REASONS]) + ("; ..." if len(reasons) > _MOST_REASONS else "")
        lines.append(
            f"no value in {' and '.join(views)} where passes may wait for a unit or link (column no_value_because: {listed}); only"
            " the view events models waiting: use --view events"
        )
    if "match_rate" in names and _one(waiting, ((pl.col("view") == "events") & pl.col("match_rate").is_not_null()).any()):
        lines.append("where passes may wait, each candidate is assumed equally likely to be the correct one")
    return lines


def _lossy(table: pl.LazyFrame) -> list[str]:
    """Methods whose output differs from the target model's, grouped by the source of their agreement."""
    lossy = table.filter(~pl.col("exact") & pl.col("agreement_source").is_not_null())
    found = distinct(lossy, "method", "agreement_source")
    lines = []
    for (source,), part in found.group_by("agreement_source", maintain_order=True):
        agreement = "not measured" if source == "unknown" else source
        methods = ", ".join(part["method"].unique(maintain_order=True))
        lines.append(f"not exact, output differs from the target's: {methods}; token agreement is {agreement}")
    return lines


def _of_paper(table: pl.LazyFrame, names: Sequence[str], note: Note) -> list[str]:
    """Sentences of a note on a paper's tables that apply to these results."""
    if not {*note.columns} <= {*names}:
        return []
    wanted = [*note.columns, *(name for name in note.optional_columns if name in names)]
    return note.sentences(distinct(table, *wanted).head(MOST_LISTED).to_dicts())


def distinct(table: pl.LazyFrame, *columns: str) -> pl.DataFrame:
    """Distinct rows of some columns in order of appearance; the table is streamed and need not fit into memory.

    >>> distinct(pl.LazyFrame({"view": ["paths", "formula", "paths"]}), "view").to_series().to_list()
    ['paths', 'formula']
    """
    first = table.select(columns).with_row_index("first row").group_by(columns).agg(pl.col("first row").min())
    return first.collect(engine="streaming").sort("first row").drop("first row")


def _one(table: pl.LazyFrame, expression: pl.Expr) -> Any:
    return table.select(expression).collect(engine="streaming").item()


def document(report: Report, frame: pl.DataFrame, figures: list[Path], found: Findings | None = None) -> str:
    """Return the report as one JSON document."""
    found, rows = found or findings(report), frame.head(MOST_LISTED)
    return json_rows.document({
        "kind": "run", "scenario": report.tables["scenario"]["name"], "out": str(report.out),
        "verdict": found.verdict.document(), "rows": report.rows, "results": rows,
        "truncated": report.rows > rows.height, "failed": report.failed, "disagreements": report.disagreements,
        "notes": found.notes,
        "figures": [str(path) for path in figures], "shards": {"computed": report.computed, "resumed": report.resumed},
    })  # fmt: skip
