"""Report of `sim audit`: the verdict on each claim, with its inequality and sources."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sim.reporting.report_document import Bullets, DataTable, ProvenanceRow, ReportDocument, Section, TableCell, written_by
from sim.runs.environment import versions


def of_audit(content: Mapping[str, Any], path: Path) -> ReportDocument:
    """Return the report of the JSON document of `sim audit`."""
    with written_by("sim audit", "an audit", path):
        return _document(content)


def _document(content: Mapping[str, Any]) -> ReportDocument:
    claims = content["claims"]
    counted = ", ".join(
        f"{count} {'conditional' if kind == 'needs' else kind}" for kind, count in content["counts"].items() if count
    )
    rows = [
        (each["row"], each["method"], each["model"], each["gpu"], each["speedup"], each["deciding_bound"],
         TableCell(str(each["verdict"]), "warning" if each["kind"] in ("impossible", "contradictory") else ""), each["decided_by"])
        for each in claims
    ]  # fmt: skip
    columns = ("row", "method", "model", "GPU", "claimed", "bound", "verdict", "which bound")
    table = DataTable("Claims and what is possible", columns, rows)
    reasons = Bullets(tuple(f"Row {each['row']} ({each['source'] or each['method']}): {each['sentence']}" for each in claims))
    sources = dict.fromkeys(source for each in claims for source in each["sources"])
    return ReportDocument(
        "Audit of claims", "Which of these speed-ups are possible?", f"{len(claims)} claims: {counted}.",
        [Section("Verdicts", [table]), Section("Reasons", [reasons])], (), (str(content["tolerance"]),),
        [ProvenanceRow(source, "", "assumed" if "assumed" in source else "published") for source in sources],
        versions=versions(),
    )  # fmt: skip
