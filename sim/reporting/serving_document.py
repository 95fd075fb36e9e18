"""Reports of servers under load: of a study of `sim serve`, and of a run of a scenario with [load]."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from sim.reporting import scenario_toml
from sim.reporting.report_document import (
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

FILE = "serving.json"
"""File of a run's results, by which its directory is known."""
MOST_POINTS = 12
"""Combinations of axes that a report shows."""


def of_study(content: Mapping[str, Any], path: Path, figures: Sequence[SvgFigure] = ()) -> ReportDocument:
    """Return the report of the JSON document of `sim serve`."""
    with written_by("sim serve", "a study of a server", path):
        sections = [Section(title, parts) for title, parts in _parts(content, figures) if parts]
        return ReportDocument(
            title=f"Under load: {_subject(content)}", question=_question(content), verdict=f"{content['verdict']}.",
            sections=sections, warnings=[*_warnings(content)], notes=[str(each) for each in content["notes"]],
            provenance=_provenance(content),
            reproduce=[CodeLines(shlex.join(map(str, content["command"])), "", "sh")] if content.get("command") else (),
            versions=_versions(content),
        )  # fmt: skip


def of_run(content: Mapping[str, Any], path: Path, figures: Sequence[Sequence[SvgFigure]] = ()) -> ReportDocument:
    """Return the report of the results of a run; `figures` are those of each combination of its axes."""
    with written_by("sim run", "a run of a server", path):
        points, scenario = list(content["points"]), content["scenario"]
        name = str(scenario["scenario"]["name"])
        sections: list[Section] = []
        for index, point in enumerate(points[:MOST_POINTS]):
            at = ", ".join(f"{key} = {value}" for key, value in point["axes"].items())
            drawn = figures[index] if index < len(figures) else ()
            for title, parts in _parts(point, drawn):
                if parts:
                    named = f"{at}: {title[0].lower()}{title[1:]}" if at else title
                    sections.append(Section(named, [*([Paragraph(f"{point['verdict']}.")] if at and not sections else []), *parts]))
        verdicts = [str(point["verdict"]) for point in points]
        verdict = f"{verdicts[0]}." if len(points) == 1 else _together(points)
        notes = dict.fromkeys(str(each) for point in points for each in point["notes"])
        if len(points) > MOST_POINTS:
            notes[f"the first {MOST_POINTS} of {len(points)} combinations of axes are shown; {FILE} has all"] = None
        toml = CodeLines(scenario_toml.text_of(scenario), f"{name}.toml:", "toml")
        return ReportDocument(
            title=f"Under load: {name}", question=_question(points[0]), verdict=verdict, sections=sections,
            warnings=[*dict.fromkeys(each for point in points for each in _warnings(point))], notes=[*notes],
            provenance=_provenance(points[0]), reproduce=[toml, CodeLines(f"sim run {name}.toml", "", "sh")],
            versions=_versions(content),
        )  # fmt: skip


def _subject(content: Mapping[str, Any]) -> str:
    several = content["tensor_parallel"] > 1
    devices = (f"{content['tensor_parallel']} x " if several else "") + (content["gpu"] or "GPU")
    where = f" on {devices}" if several or content["gpu"] else ""  # a law may not say on which device it was measured
    replicas = f", {content['replicas']} replicas" if content["replicas"] > 1 else ""
    return f"{content['model'] or 'the model of the step law'}{where}{replicas}"


def _question(content: Mapping[str, Any]) -> str:
    return f"Which policy of draft length suits {_subject(content)}, at which load, and when should drafting be switched off?"


def _together(points: Sequence[Mapping[str, Any]]) -> str:
    """Verdicts of several combinations of axes."""
    said = [f"{', '.join(f'{key} = {value}' for key, value in each['axes'].items())}: {each['verdict']}" for each in points[:4]]
    more = f"; and {len(points) - 4} more" if len(points) > 4 else ""
    return "; ".join(said) + more + "."


def _warnings(content: Mapping[str, Any]) -> Iterator[str]:
    for row in content["table"]:
        if not row["stable"]:
            yield f"At {_load(row)} the queue of policy {row['policy']} grows: times there are longer with more requests."


def _load(row: Mapping[str, Any]) -> str:
    return f"{row['concurrency']} clients" if row["rate"] is None else f"{row['rate']:.4g} requests/s"


def _parts(content: Mapping[str, Any], figures: Sequence[SvgFigure]) -> Iterator[tuple[str, Sequence[Part]]]:
    yield "Throughput and times by load and policy", [_rates(content), _times(content), *islice(figures, 1)]
    rows = [[row["running"], row["draft_length"] or "off", row["output_tokens_per_s"], row["plain_tokens_per_s"]]
            for row in content["schedule"]]  # fmt: skip
    parts: list[Part] = []
    if any(row["draft_length"] for row in content["schedule"]):
        columns = ("running sequences", "draft length", "throughput", "throughput of plain decoding")
        parts.append(DataTable("Best draft length in closed form", columns, rows, ("", "tokens", "tok/s", "tok/s")))
        parts += [CodeLines("\n".join(map(str, lines)), f"{engine}:") for engine, lines in content["lines"].items()]
    yield "When to switch drafting off", [*parts, *islice(figures, 1, None)]


def _rates(content: Mapping[str, Any]) -> DataTable:
    best, name = _best(content["table"]), "requests_per_s_within_slo"
    asked = any(row.get(name) is not None for row in content["table"])
    rows = []
    for index, row in enumerate(content["table"]):
        mark = "best" if index in best else "" if row["stable"] else "warning"
        gain: Value = None if row["gain_over_off"] is None else f"{row['gain_over_off']:.2f}"
        rows.append([
            _load(row), TableCell(str(row["policy"]), mark), row["output_tokens_per_s"], _bounds(row, "output_tokens_per_s"), gain,
            _bounds(row, "gain_over_off"), row["mean_draft_length"], row["mean_running"], row["utilization"], row["preemptions"],
            *((row[name], _bounds(row, name)) if asked else ()),
        ])  # fmt: skip
    columns = ("load", "policy", "throughput", "interval", "gain over off", "interval", "draft length", "running", "busy",
               "preemptions", *(("within objectives", "interval") if asked else ()))  # fmt: skip
    units = ("", "", "tok/s", "80 %", "", "80 %", "tokens", "sequences", "share", "", *(("requests/s", "80 %") if asked else ()))
    notes = ["Gain: of throughput with clients, of the inverse mean time of a request under arrivals."]
    if not all(row["stable"] for row in content["table"]):
        notes.append("Warning: the queue grows.")
    return DataTable("Throughput by load and policy", columns, rows, units, notes=notes)


def _times(content: Mapping[str, Any]) -> DataTable:
    names = ("mean_ttft_ms", "p99_ttft_ms", "mean_tpot_ms", "p99_tpot_ms", "mean_itl_ms", "p99_itl_ms", "mean_e2e_ms", "p99_e2e_ms")
    rows = [[_load(row), str(row["policy"]), *(row[name] for name in names)] for row in content["table"]]
    columns = ("load", "policy", "TTFT", "TTFT, p99", "TPOT", "TPOT, p99", "ITL", "ITL, p99", "request", "request, p99")
    notes = ["TTFT: to the first token; TPOT: per token after it; ITL: between outputs, a step's tokens being one; means and p99."]
    return DataTable("Times of requests", columns, rows, ("", "", *["ms"] * len(names)), notes=notes)


def _best(table: Sequence[Mapping[str, Any]]) -> set[int]:
    """Rows of the policies without regret at their load that keep up."""
    return {index for index, row in enumerate(table) if row["regret"] == 0 and row["stable"]}


def _bounds(row: Mapping[str, Any], name: str) -> Value:
    low, high = row.get(f"{name}_low"), row.get(f"{name}_high")
    return None if low is None or high is None else f"{low:,.4g} to {high:,.4g}"


def _provenance(content: Mapping[str, Any]) -> list[ProvenanceRow]:
    return [
        ProvenanceRow(str(row["input"]), str(row["value"]), str(row["kind"]), str(row["source"])) for row in content["rests_on"]
    ]


def _versions(content: Mapping[str, Any]) -> dict[str, str]:
    return {str(name): str(version) for name, version in dict(content.get("versions", {})).items()}
