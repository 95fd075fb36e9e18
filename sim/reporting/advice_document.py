"""Report of `sim advise`: its verdict, speed-ups by running sequences, what would overturn it, and lines to paste."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from model.methods import registry
from sim.reporting.report_document import (
    Bullets,
    CodeLines,
    DataTable,
    Paragraph,
    Part,
    ProvenanceRow,
    ReportDocument,
    Section,
    SvgFigure,
    TableCell,
    Value,
    written_by,
)

DRAFTS = "speculative"
"""Method whose draft lengths are the columns of the tables; plain decoding is their baseline."""
_CAPTION = "Speed-up over plain decoding on the same devices by running sequences, with 80 % intervals"


def of_advice(content: Mapping[str, Any], path: Path, figure: SvgFigure | None = None) -> ReportDocument:
    """Return the report of the JSON document of `sim advise`, with its figure if there is one."""
    with written_by("sim advise", "advice", path):
        return _document(content, figure)


def subject_of(content: Mapping[str, Any]) -> str:
    """What a document is about: model and devices."""
    return f"{content['model'] or 'the model of the step law'} on {content['tensor_parallel']} x {content['gpu'] or 'GPU'}"


def _document(content: Mapping[str, Any], figure: SvgFigure | None) -> ReportDocument:
    subject = subject_of(content)
    draft = f" with the draft {content['draft']}" if content["draft"] else ""
    sections = [Section("Speed-up by running sequences", [*_speedups(content), *_figures(figure)])]
    sections += [Section("What would overturn it", [*_overturning(content)])]
    sections += [Section(title, parts) for title, parts in _further(content) if parts]
    verdict = str(content["verdict"]).rstrip(".")
    return ReportDocument(
        title=f"Advice on drafting: {subject}",
        question=f"Does drafting pay for {subject}{draft}: with which draft length, and up to how many running sequences?",
        verdict=f"{verdict}.",
        sections=sections,
        warnings=["Times are of kernels only: the engine's overhead is not included."] if content["kernels_only"] else (),
        notes=[str(note) for note in content["notes"]],
        provenance=[
            ProvenanceRow(str(row["input"]), str(row["value"]), str(row["kind"]), str(row["source"])) for row in content["rests_on"]
        ],
        reproduce=[CodeLines(shlex.join(map(str, content["command"])), "", "sh")] if content.get("command") else (),
        versions={str(name): str(version) for name, version in dict(content.get("versions", {})).items()},
    )  # fmt: skip


def _speedups(content: Mapping[str, Any]) -> Iterator[DataTable]:
    """A table for each acceptance: rows of running sequences, columns of draft lengths."""
    rows = [row for row in content["table"] if row["method"] in (DRAFTS, registry.PLAIN)]
    for acceptance in dict.fromkeys(row["acceptance"] for row in rows):
        own = [row for row in rows if row["acceptance"] == acceptance]
        lengths = sorted({row["draft_length"] for row in own if row["method"] == DRAFTS and row["draft_length"]})
        columns = ["running", *(f"K = {length}" for length in lengths), "interval of the best", "TPOT, plain", "TPOT, best"]
        shown = []
        for batch in dict.fromkeys(row["batch"] for row in own):
            by_length = {row["draft_length"] or 0: row for row in own if row["batch"] == batch}
            best = next((row for row in by_length.values() if row["best"]), by_length[0])
            cells: list[Value] = [_speedup(by_length.get(length)) for length in lengths]
            bounds = f"{best['speedup_low']:.2f} to {best['speedup_high']:.2f}" if best["draft_length"] else "plain decoding"
            shown.append([batch, *cells, bounds, by_length[0]["tpot_ms"], best["tpot_ms"]])
        caption = f"Speed-up over plain decoding on the same devices, acceptance {acceptance}"
        units = ["sequences", *[""] * len(lengths), "80 %", "ms", "ms"]
        yield DataTable(caption, columns, shown, units, notes=["K: draft length. Tie: the interval contains the best."])


def _speedup(row: Mapping[str, Any] | None) -> Value:
    if row is None:
        return None
    return TableCell(f"{row['speedup']:.2f}", "best" if row["best"] else "tie" if row["tie"] else "")


def _bounds(row: Mapping[str, Any]) -> Value:
    low, high = row["speedup_low"], row["speedup_high"]
    return None if low is None or high is None else f"{low:.2f} to {high:.2f}"


def _figures(figure: SvgFigure | None) -> Iterator[SvgFigure]:
    if figure is not None:
        yield replace(figure, caption=_CAPTION, alternative=f"{_CAPTION}: a curve for each best draft length. {figure.alternative}")


def _overturning(content: Mapping[str, Any]) -> Iterator[Part]:
    """Break-even values, the inputs that move the answer most, and the measurement that would help most."""
    rows = content["break_even"]["by_batch"]
    yield DataTable(
        "Values at which drafting and plain decoding are equally fast",
        ("running", "case", "acceptance now", "break-even acceptance", "draft pass now", "break-even draft pass"),
        [[row["batch"], row["acceptance_case"], row["now_acceptance"], row["acceptance"], row["now_draft_pass_ms"],
          row["draft_pass_ms"]] for row in rows],
        ("sequences", "", "", "", "ms", "ms"),
    )  # fmt: skip
    if content["moves_most"]:
        moved = [[row["input"], row["speedup_low"], row["speedup_high"]] for row in content["moves_most"]]
        columns = ("input", "speed-up at its low end", "speed-up at its high end")
        yield DataTable("Inputs that move the speed-up most", columns, moved)
    if content["measure_next"]:
        yield Paragraph(f"What would help most: {content['measure_next']}.")


def _further(content: Mapping[str, Any]) -> Iterator[tuple[str, Sequence[Part]]]:
    """Other methods, other uses of the devices, lines to paste, and what was not evaluated; some may be empty."""
    others = [row for row in content["table"] if row["method"] not in (DRAFTS, registry.PLAIN)]
    columns = ("method", "running", "draft length", "speed-up", "interval", "TPOT", "throughput", "exact")
    units = ("", "sequences", "tokens", "plain decoding = 1", "80 %", "ms", "tok/s per GPU", "")
    rows = [[registry.label(str(row["method"])), row["batch"], row["draft_length"], row["speedup"], _bounds(row), row["tpot_ms"],
             row["tokens_per_s_per_gpu"], row["exact"]] for row in others]  # fmt: skip
    yield "Other methods", [DataTable("Other methods on the same costs", columns, rows, units)] if rows else []
    uses = [[row["option"], row["running"], row["replicas"], row["gpus_per_replica"], row["draft_length"], row["tpot_ms"],
             row["tokens_per_s_per_gpu"]] for row in content["alternatives"]]  # fmt: skip
    heads = ("option", "running", "replicas", "devices of a replica", "draft length", "TPOT", "throughput")
    of_uses = ("", "sequences", "", "", "tokens", "ms", "tok/s per GPU")
    yield "Other uses of the same devices", [DataTable("Other uses of the same devices", heads, uses, of_uses)] if uses else []
    settings = content["settings"]
    yield "Lines to paste", [CodeLines("\n".join(map(str, lines)), f"{engine}:") for engine, lines in settings.items()]
    left = [f"{registry.label(str(row['method']))}: {row['because']}" for row in content["not_evaluated"]]
    yield "Not evaluated", [Bullets(tuple(left))] if left else []
