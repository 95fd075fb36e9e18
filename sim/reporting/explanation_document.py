"""Report of `sim explain`: its verdict, the terms of a step, the factors of a claim, and what to change."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from sim.reporting import embedded_svg
from sim.reporting.report_document import (
    Bullets,
    CodeLines,
    DataTable,
    Part,
    ProvenanceRow,
    ReportDocument,
    Section,
    SvgFigure,
    TableCell,
    written_by,
)

_TERMS = {"verify": "verification", "draft": "drafting", "overhead": "engine overhead"}
_CAPTION_OF_TERMS = "Time of a step with drafts, in steps of plain decoding: extra time of each term, with 80 % intervals"
_CAPTION_OF_CLAIM = "From the claimed to the measured speed-up: a factor for each difference, with 80 % intervals"


def of_explanation(content: Mapping[str, Any], path: Path) -> ReportDocument:
    """Return the report of the JSON document of `sim explain`; its figure is an SVG file of the same name next to it."""
    with written_by("sim explain", "an explanation", path):
        return _document(content, path)


def _document(content: Mapping[str, Any], path: Path) -> ReportDocument:
    claimed = content["claimed_speedup"]
    asked = f"Why is the speed-up {content['speedup']:.2f}"
    asked += "?" if claimed is None else f", and not the {claimed:.2f} that was claimed?"
    sections = [Section("Terms of a step", [*_terms(content), *(_figure(path, _CAPTION_OF_TERMS) if claimed is None else ())])]
    if claimed is not None:
        sections.append(Section("Differences to the claim", [_factors(content), *_figure(path, _CAPTION_OF_CLAIM)]))
    sections.append(Section("What to change", [Bullets(tuple(map(str, content["advice"]))), _lengths(content)]))
    return ReportDocument(
        title=f"Speed-up of {content['speedup']:.2f} over plain decoding, explained",
        question=asked,
        verdict=str(content["verdict"]),
        sections=sections,
        notes=[str(note) for note in content["notes"]],
        provenance=[
            ProvenanceRow(str(row["input"]), str(row["value"]), str(row["kind"]), str(row["source"])) for row in content["rests_on"]
        ],
        reproduce=[CodeLines(shlex.join(map(str, content["command"])), "", "sh")] if content.get("command") else (),
        versions={str(name): str(version) for name, version in dict(content.get("versions", {})).items()},
    )


def _terms(content: Mapping[str, Any]) -> Iterator[Part]:
    rows = [
        [_TERMS.get(row["term"], str(row["term"])), f"{row['value']:.3f}", f"{row['low']:.3f} to {row['high']:.3f}",
         f"{row['plain']:.3f}",
         TableCell(f"{row['extra']:+.3f}", "warning" if row["term"] == content["largest"] else ""), row["kind"]]
        for row in content["terms"]
    ]  # fmt: skip
    total = float(content["step_in_plain_steps"])
    rows.append(["step", f"{total:.3f}", "", "1.000", f"{total - 1:+.3f}", "measured"])
    yield DataTable(
        "Time of a step with drafts", ("term", "value", "80 % interval", "in a plain step", "extra", "source"), rows,
        ("", "plain steps", "plain steps", "plain steps", "plain steps", ""),
        notes=[
            f"Speed-up = {content['acceptance_length']:.3f} tokens / {total:.3f} plain steps = {content['speedup']:.3f}."
            " The mark is on the largest extra time."
        ],
    )  # fmt: skip


def _factors(content: Mapping[str, Any]) -> DataTable:
    rows = [[row["setting"], row["claimed"], row["mine"], f"{row['factor']:.3f}"] for row in content["shares"]]
    rows.append(["together", "", "", f"{content['speedup'] / content['claimed_speedup']:.3f}"])
    return DataTable("Factors from the claimed to the measured speed-up", ("difference", "claimed", "measured", "factor"), rows)


def _lengths(content: Mapping[str, Any]) -> DataTable:
    rows = [[row["draft_length"], f"{row['speedup']:.2f}"] for row in content["speedup_by_draft_length"]]
    return DataTable("Predicted speed-up by draft length", ("draft length", "speed-up"), rows, ("tokens", ""))


def _figure(path: Path, caption: str) -> Iterator[SvgFigure]:
    drawn = path.with_suffix(".svg")
    if drawn.is_file():
        figure = embedded_svg.load(drawn)
        yield replace(figure, caption=caption, alternative=f"{caption}. {figure.alternative}")
