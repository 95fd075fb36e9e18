"""Report of `sim compare`: errors of predictions by method next to the noise, the largest errors, and figures."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from model.base import checks, typed_values
from model.base.checks import ParameterError
from model.logs import prediction_error
from sim.comparison import comparison_report, run_comparison
from sim.reporting.report_document import (
    CodeLines,
    DataTable,
    Paragraph,
    ProvenanceRow,
    ReportDocument,
    Section,
    SvgFigure,
    TableCell,
    Value,
)

BROKEN: tuple[type[Exception], ...] = (
    pl.exceptions.PolarsError,
    ArithmeticError,
    LookupError,
    TypeError,
    AttributeError,
    ValueError,
)
"""Errors of documents that were changed by hand."""
_ERRORS = {"median_error": "median", "p90_error": "90th percentile", "worst_error": "worst", "bias": "bias", "noise": "noise"}


_FIRST = ("predicted_measured", "error_by_method", "time_parts", "gantt_pair")
"""Figures in the order of importance; others follow."""


def figure_order(path: Path) -> tuple[int, str]:
    """Sort key of a figure's file."""
    return (_FIRST.index(path.stem) if path.stem in _FIRST else len(_FIRST)), path.name


def of_comparison(content: Mapping[str, Any], source: str, figures: Sequence[SvgFigure] = ()) -> ReportDocument:
    """Return the report of the JSON document of `sim compare`; `source` is its path, which holds the whole tables."""
    try:
        return _document(content, source, figures)
    except BROKEN as error:
        raise refusal(error, source) from None


def all_runs(content: Mapping[str, Any], source: str) -> pl.DataFrame:
    """Rows of all runs of a comparison, with the name of their file."""
    try:
        return run_comparison.concatenate([(name, table, about) for name, table, about in _files(content, source)])
    except BROKEN as error:
        raise refusal(error, source) from None


def refusal(error: Exception, source: str) -> Exception:
    """Error of one line for a document that a command has not written."""
    if isinstance(error, ParameterError):
        return error
    why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
    return ParameterError(f"{source} is not a comparison as the program writes it ({why}); run `sim compare` again")


def _files(content: Mapping[str, Any], source: str) -> list[tuple[str, pl.DataFrame, dict[str, Any]]]:
    """Name, runs and facts of each file of runs."""
    found = [(str(each["name"]), pl.DataFrame(each["runs"], infer_schema_length=None), each["about"]) for each in content["files"]]
    if not found or not all(table.height for _, table, _ in found):
        raise ParameterError(f"{source} has no runs; run `sim compare` again")
    for name, table, _ in found:
        try:
            _check_runs(table)
        except ParameterError as error:
            raise ParameterError(f"{source}, runs of {name}: {error}; run `sim compare` again") from None
    return found


COLUMNS: dict[str, Any] = {
    **dict.fromkeys(("method", "settings", "prompt", "forced", "warnings", "mismatch", "missing"), str),
    **dict.fromkeys(("tokens", "units", "repeats"), int),
    **dict.fromkeys(("predicted_s", "measured_s", "error", "noise", "contention_s"), float),
}  # fmt: skip
"""Columns of a table of runs, and their types."""


def _check_runs(table: pl.DataFrame) -> None:
    """Refuse a table whose numbers cannot be those of runs: they are divided by, and drawn on logarithmic axes."""
    typed_values.check_columns(table, COLUMNS)
    for name in ("tokens", "units", "repeats"):
        checks.whole_array(name, table[name].to_numpy(), 1)
    for name in ("predicted_s", "measured_s"):
        checks.array(name, table[name].to_numpy(), 1e-12, 1e12)
    for name in ("error", "noise", "contention_s"):
        checks.array(name, table[name].to_numpy(), -1e12, 1e12)


def _document(content: Mapping[str, Any], source: str, figures: Sequence[SvgFigure]) -> ReportDocument:
    files = _files(content, source)
    sections = [Section(f"{name}: {comparison_report.setup_of(about)}", [*_tables(table, source)]) for name, table, about in files]
    sections += [Section("Figures", figures)] if figures else []
    notes = [
        comparison_report.NOTE_ON_ERRORS,
        *(note for _, table, about in files for note in comparison_report.remarks(table, about)),
    ]
    names = ", ".join(name for name, _, _ in files)
    return ReportDocument(
        title=f"Predicted against measured times: {names}",
        question="How far are predicted times from the measured times of the same decodings?",
        verdict=_verdict([table for _, table, _ in files]),
        sections=sections,
        warnings=[*dict.fromkeys(line for _, table, about in files for line in comparison_report.warnings(table, about))],
        notes=[_sentence(note) for note in dict.fromkeys(notes)],
        provenance=[row for name, table, about in files for row in _provenance(name, table, about)],
        reproduce=[CodeLines(f"sim compare {' '.join(f'{name}.json' for name, _, _ in files)} --figures pictures", language="sh",
                             caption="With the same files of runs and their profiles, or the step law named:")],
        versions={f"{name}, {library}": str(version) for name, _, about in files for library, version in _versions(about)},
        facts={f"date of {name}": str(about.get("date", "")) for name, _, about in files},
    )  # fmt: skip


def _verdict(tables: Sequence[pl.DataFrame]) -> str:
    """Methods whose errors are within their bounds, the worst one, and the ranking of settings."""
    rows = [row for table in tables for row in prediction_error.by_method(table)]
    held = sum(bool(row["held"]) for row in rows)
    worst = max(rows, key=lambda row: float(row["median_error"]))
    pairs, right = (sum(counts) for counts in zip(*(prediction_error.ranking(table) for table in tables), strict=True))
    ranked = f" {right} of {pairs} pairs of settings are ranked correctly." if pairs else ""
    return (
        f"The errors of {held} of {len(rows)} methods are within the bounds that the noise allows; the largest median error is"
        f" {worst['median_error']:.1%} ({worst['method']}, bound {worst['bound']:.1%}).{ranked}"
    )


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}".rstrip(".") + "."


def _tables(table: pl.DataFrame, source: str) -> Iterator[Paragraph | DataTable]:
    yield Paragraph(f"{table.height} decodings of {prediction_error.choices(table)} settings.")
    rows: list[list[Value]] = []
    for row in prediction_error.by_method(table):
        bound = TableCell("yes") if row["held"] else TableCell("no", "warning")
        errors = [f"{100 * row[name]:.1f}" for name in _ERRORS]
        rows.append([row["method"], row["settings"], row["runs"], *errors, f"{100 * row['bound']:.1f}", bound])
    columns = ("method", "settings", "runs", *_ERRORS.values(), "bound of median", "within bounds")
    units = ("", "", "", *["%"] * len(_ERRORS), "%", "")
    yield DataTable("Errors by method: predicted / measured - 1", columns, rows, units, whole=source)
    worst = table.sort(table["error"].abs(), descending=True)
    yield DataTable(
        "Largest errors", ("method", "settings", "prompt", "predicted", "measured", "error", "noise"),
        [
            (row["method"], row["settings"] or None, str(row["prompt"])[:40], f"{1e3 * row['predicted_s']:.1f}",
             f"{1e3 * row['measured_s']:.1f}", f"{100 * row['error']:.1f}", f"{100 * row['noise']:.1f}")
            for row in worst.head(comparison_report.WORST).iter_rows(named=True)
        ],
        ("", "", "", "ms", "ms", "%", "%"), whole=source, count=table.height,
    )  # fmt: skip


def _provenance(name: str, table: pl.DataFrame, about: Mapping[str, Any]) -> Iterator[ProvenanceRow]:
    yield ProvenanceRow(f"times of {name}", f"{table.height} decodings", "measured", comparison_report.setup_of(about))
    law = about.get("step_law")
    if isinstance(law, Mapping):
        yield ProvenanceRow("predicted times", str(law.get("name", "")), "fitted", str(law.get("provenance", "")))
    else:
        yield ProvenanceRow("predicted times", "", "measured", "profiles of that machine; the times of the runs are not used")


def _versions(about: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    versions = about.get("versions") or dict(about.get("machine", {})).get("versions")
    yield from versions.items() if isinstance(versions, Mapping) else ()
