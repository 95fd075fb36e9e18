"""`sim audit`: claims of speed-ups against what is possible, as a table, a JSON document and a data frame."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.audit import claims as audited_claims
from model.audit.verdicts import KINDS, TOLERANCE, ClaimVerdict
from model.audit.verdicts import audit as verdicts_on
from model.base import checks
from model.base.checks import ParameterError
from model.methods.claim_bounds import TERMS

if TYPE_CHECKING:
    import polars as pl
    from rich.console import Console
    from rich.table import Table

WIDE = 148
TITLES = {
    "row": "row", "method": "method", "model": "model", "gpu": "GPU", "batch": "batch\n[sequences]", "speedup": "claimed\nspeed-up",
    "deciding_bound": "bound", "verdict": "verdict", "decided_by": "which bound",
}  # fmt: skip
"""Printed columns and their headings."""
FURTHER_TITLES = {
    "bound_free": "formula, free\ndrafts", "bound_draft": "formula, draft at\nfull bandwidth",
    "bound_batch": "formula, batch\nat peaks", "bound": "largest\npossible",
    "source": "source", "draft": "draft", "engine": "engine", "context": "context\n[tokens]", "tensor_parallel": "tensor\nparallel",
    "needed_acceptance": "needed\nacceptance", "needed_cost_ratio": "needed cost\nratio",
    "needed_plain_tpot_ms": "needed plain\nTPOT [ms]", "plain_tpot_limit_ms": "least plain\nTPOT [ms]", "kind": "kind",
    "needs": "needs", "needed": "needed", "missing": "missing",
} | {name: term.label for name, term in TERMS.items()} | {"plain_tpot_ms": "plain TPOT\n[ms]"}  # fmt: skip
"""Headings of columns that are printed only if they are asked for."""
ALL_COLUMNS = "all"
MOST_ROWS, MOST_SENTENCES = 200, 60
WIDEST = 44
"""Characters of the name of a bound in a line of the table."""
UNIT_NOTE = "speed-ups are over plain decoding on the same GPUs in the same batch; plain TPOT is its time per output token"
BOUNDS_NOTE = (
    "bound: the one that decides; the largest possible holds for any dependence between outcomes, the formula is that of the"
    " method's paper; --columns all prints the others"
)


@dataclass(frozen=True)
class AuditDocument:
    """The JSON document of an audit.

    Parameters
    ----------
    claims
        ClaimVerdict on each claim, in the order of the file.
    counts
        Claims by kind of verdict.
    tolerance
        The rounding that is granted to printed numbers.
    unused_columns
        Columns of the file that have no meaning here.
    kind
        Kind of the document, for `sim report`.
    """

    claims: list[ClaimVerdict]
    counts: dict[str, int]
    tolerance: str
    unused_columns: list[str]
    kind: str = "audit"


def of_file(path: Path, progress: Callable[[int, int], None] | None = None) -> AuditDocument:
    """Audit of the claims of a CSV file; `progress` is called with the number of claims done and of all claims."""
    found, unused = audited_claims.read_claims(path)
    verdicts: list[ClaimVerdict] = []
    for claim in found:
        verdicts += verdicts_on([claim])
        if progress is not None:
            progress(len(verdicts), len(found))
    return _of(verdicts, unused)


def of_rows(rows: Sequence[Mapping[str, Any]]) -> AuditDocument:
    """Audit of claims given as mappings with the names of columns."""
    return _of(verdicts_on(audited_claims.of_rows(rows)), ())


def _of(verdicts: list[ClaimVerdict], unused: Sequence[str]) -> AuditDocument:
    counts = {kind: sum(each.kind == kind for each in verdicts) for kind in KINDS}
    return AuditDocument(verdicts, counts, TOLERANCE, list(unused))


def document(found: AuditDocument) -> dict[str, Any]:
    """Fields of the audit, for JSON."""
    return {field.name: getattr(found, field.name) for field in fields(found)} | {
        "claims": [each.document() for each in found.claims]
    }


def schema() -> dict[str, Any]:
    """JSON schema of the document that `sim audit --json` prints."""
    from pydantic import TypeAdapter

    from model.base.table_records import documented

    made: dict[str, Any] = TypeAdapter(AuditDocument).json_schema()
    for kind, table in ((AuditDocument, made), (ClaimVerdict, made["$defs"]["ClaimVerdict"])):
        table["additionalProperties"] = False
        for name, meaning in documented(kind).items():
            if name in table["properties"]:
                table["properties"][name]["description"] = meaning
    made["$defs"]["ClaimVerdict"]["properties"]["kind"]["enum"] = list(KINDS)
    return made


def frame(found: AuditDocument) -> pl.DataFrame:
    """Verdicts as a table with a row for each claim: the fields of `ClaimVerdict`, and the stated terms as columns of their own."""
    import polars as pl

    rows = [_flat(each) for each in found.claims]
    texts = {"method", "model", "gpu", "draft", "engine", "source", "verdict", "kind", "needs", "missing", "inequality", "sentence"}
    texts |= {"sources", "decided_by"}
    whole = {"row", "batch", "context", "tensor_parallel"}
    schema = {name: pl.String if name in texts else pl.Int64 if name in whole else pl.Float64 for name in rows[0]}
    return pl.DataFrame(rows, schema=schema)


def _flat(verdict: ClaimVerdict) -> dict[str, Any]:
    found = verdict.document()
    terms = found.pop("terms")
    found["sources"] = "; ".join(found["sources"])
    return found | {name: terms.get(name) for name in (*TERMS, "plain_tpot_ms")}


# --- Printed report ---------------------------------------------------------------------------------------------------


def check_columns(asked: str | None) -> None:
    """Refuse names of columns that no audit has; `asked` has commas between names, or is `all`."""
    known = (*TITLES, *FURTHER_TITLES)
    for name in () if asked in (None, ALL_COLUMNS) else str(asked).split(","):
        if name.strip() not in known:
            hint = checks.nearest(name.strip(), (*known, ALL_COLUMNS))
            raise ParameterError(f"--columns must name columns of an audit, got {checks.shown(name.strip())}; {hint}")


def show(found: AuditDocument, asked: str | None = None, console: Console | None = None) -> None:
    """Print the verdicts as a table with the bound that decides each, then a sentence for each claim."""
    from rich.console import Console as Printer

    if console is None:
        console = Printer(highlight=False)
        console = console if console.is_terminal or "COLUMNS" in os.environ else Printer(width=WIDE, highlight=False)
    listed = [_flat(each) for each in found.claims[:MOST_ROWS]]
    heads = TITLES | FURTHER_TITLES
    names = {None: [*TITLES], ALL_COLUMNS: [*heads]}.get(asked) or [name.strip() for name in str(asked).split(",")]
    names = [name for name in names if any(row[name] is not None for row in listed)] if asked in (None, ALL_COLUMNS) else names
    console.print(_counted(found), soft_wrap=True, markup=False)
    while names:
        taken = len(names)
        while taken > 2 and _width(console, _table(names[:taken], listed)) > console.width:
            taken -= 1
        console.print(_table(names[:taken], listed))
        names = [] if taken == len(names) else [*(["row"] if "row" in names else []), *names[taken:]]
    if len(found.claims) > len(listed):
        console.print(f"... and {len(found.claims) - len(listed):,} more claims; --json has all", markup=False)
    for each in found.claims[:MOST_SENTENCES]:
        about = f" ({each.source})" if each.source else ""
        console.print(f"row {each.row}{about}: {each.sentence}", soft_wrap=True, markup=False)
    if len(found.claims) > MOST_SENTENCES:
        console.print(f"... and {len(found.claims) - MOST_SENTENCES:,} more; --json has all", markup=False)
    sources = dict.fromkeys(source for each in found.claims for source in each.sources)
    if found.unused_columns:
        console.print(f"columns without a meaning here: {', '.join(found.unused_columns)}", soft_wrap=True, markup=False)
    console.print(BOUNDS_NOTE, soft_wrap=True, markup=False)
    console.print(f"{UNIT_NOTE}; no efficiency of kernels or engines is assumed", soft_wrap=True, markup=False)
    console.print(f"rounding: {TOLERANCE}", soft_wrap=True, markup=False)
    for source in [*sources][:MOST_SENTENCES]:
        console.print(f"from: {source}", soft_wrap=True, markup=False)


def _table(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    for name in names:
        numeric = not any(isinstance(row[name], str) for row in rows)
        title = Text((TITLES | FURTHER_TITLES)[name])  # Text: brackets of a unit are not markup
        folded = name in ("source", "decided_by")
        table.add_column(title, justify="right" if numeric else "left", no_wrap=not folded, overflow="fold",
                         max_width=WIDEST if name == "decided_by" else None)  # fmt: skip
    for row in rows:
        table.add_row(*(Text(_cell(row[name])) for name in names))
    return table


def _width(console: Console, table: Table) -> int:
    from rich.measure import Measurement

    return Measurement.get(console, console.options.update(max_width=10_000), table).maximum


def _counted(found: AuditDocument) -> str:
    total = len(found.claims)
    parts = [f"{count} {'conditional' if kind == 'needs' else kind}" for kind, count in found.counts.items() if count]
    return f"{total} claim{'s' * (total != 1)}: {', '.join(parts)}"


def _cell(value: object) -> str:
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
