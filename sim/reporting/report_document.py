"""Report as data: question, verdict, sections of text, tables, figures and code, provenance of the inputs, and how to reproduce it.

Nothing here knows about runs, HTML or Markdown. A command makes a `ReportDocument` of its results, and `sim.reporting.html_page`
and `sim.reporting.markdown_page` render it. All text is plain: renderers escape it, so names and messages of users may be passed as
they are.

>>> table = DataTable("Speed-up by length", ("K", "speed-up"), ((3, TableCell("1.62x", "best")), (5, "1.58x")), ("tokens", ""))
>>> table.headings
('K [tokens]', 'speed-up')
>>> ReportDocument("Example", "Does it pay?", "K = 3 is fastest.", (Section("Results", (table,)),)).sections[0].title
'Results'
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeAlias

from model.base import checks
from model.base.checks import ParameterError

MOST_ROWS = 200
"""Rows of a table that a report shows."""
KINDS = {
    "measured": "timed or counted on the hardware or models named",
    "published": "a number of the publication named",
    "composed": "combined from measured times of operations",
    "fitted": "fitted to the measured or published numbers named",
    "prior": "a range from public measurements of other systems",
    "assumed": "neither measured nor published: set by hand, or left at its default",
    "chosen": "a choice of the question, such as a draft length, a batch or a model",
}
"""Kinds of provenance of an input, and their meanings."""
MARKS = {"best": "best", "tie": "tie", "warning": "warning"}
"""Marks of cells, and the words that renderers print with them: no meaning depends on colour alone."""


@dataclass(frozen=True)
class TableCell:
    """Text of a table's cell with a mark (`MARKS`)."""

    text: str
    mark: str = ""

    def __post_init__(self) -> None:
        if self.mark:
            checks.one_of("mark of a cell", self.mark, MARKS)


Value: TypeAlias = str | int | float | bool | TableCell | None
"""Content of a table's cell: None is shown as a dash, numbers with four significant digits."""


@dataclass(frozen=True)
class Paragraph:
    """A paragraph of plain text."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list of sentences."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class DataTable:
    """A table with a caption; the first column names the rows.

    Parameters
    ----------
    caption
        One line.
    columns
        Names of the columns.
    rows
        One value per column in each row. Of more than `MOST_ROWS` the first are kept, and a note counts them.
    units
        Unit of each column, or an empty text; without it, no column has one.
    whole
        Where the whole table is, such as the path of a file; shown if rows are left out.
    count
        Number of rows of the whole table; by default that of `rows`.
    notes
        Lines below the table.
    """

    caption: str
    columns: Sequence[str]
    rows: Iterable[Sequence[Value]]
    units: Sequence[str] = ()
    whole: str = ""
    count: int | None = None
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        source = iter(self.rows)
        rows = tuple(tuple(row) for row in islice(source, MOST_ROWS))
        further = sum(1 for _ in source)  # a generator is counted and not kept
        given = self.count if self.count is not None else len(rows) + further
        if not self.columns:
            raise ParameterError(f"table {self.caption!r} must have at least one column, got none")
        if self.units and len(self.units) != len(self.columns):
            raise ParameterError(f"table {self.caption!r} must have {len(self.columns)} units, got {len(self.units)}")
        wrong = next((len(row) for row in rows if len(row) != len(self.columns)), None)
        if wrong is not None:
            raise ParameterError(f"rows of table {self.caption!r} must have {len(self.columns)} values, got {wrong}")
        for name, value in (("rows", rows), ("count", given), ("columns", tuple(self.columns)), ("notes", tuple(self.notes))):
            object.__setattr__(self, name, value)

    @property
    def headings(self) -> tuple[str, ...]:
        """Names of the columns with their units."""
        units = self.units or [""] * len(self.columns)
        return tuple(f"{name} [{unit}]" if unit else name for name, unit in zip(self.columns, units, strict=True))

    @property
    def shown(self) -> tuple[tuple[TableCell, ...], ...]:
        """Rows of cells with their text."""
        return tuple(tuple(cell(value) for value in row) for row in self.rows)  # rows is a tuple after __post_init__

    @property
    def numeric(self) -> tuple[bool, ...]:
        """Return for each column whether its cells read as numbers, which are aligned at the right."""
        table = self.shown
        return tuple(
            any(_is_number(row[index].text) for row in table)
            and all(_is_number(row[index].text) or row[index].text in ("", "-", DASH) for row in table)
            for index in range(len(self.columns))
        )

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes below the table; the last counts rows that are not shown."""
        table = self.shown
        assert self.count is not None
        if self.count <= len(table):
            return tuple(self.notes)
        where = f"; the whole table is in {self.whole}" if self.whole else ""
        return (*self.notes, f"The first {len(table):,} of {self.count:,} rows are shown{where}.")


DASH = "–"
_UNPRINTABLE = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]")


def printable(text: str) -> str:
    """Return text with control characters, reversals of the writing direction and halves of characters replaced.

    >>> printable(f"a{chr(0)}b") == f"a{chr(0xFFFD)}b"
    True
    """
    return _UNPRINTABLE.sub("\ufffd", text)


def cell(value: Value) -> TableCell:
    """Return a value as a cell.

    >>> cell(1.23456).text, cell(None).text, cell(True).text, cell(12345).text
    ('1.235', '–', 'yes', '12,345')
    """
    if isinstance(value, TableCell):
        return value
    if value is None:
        return TableCell(DASH)
    if isinstance(value, bool):
        return TableCell("yes" if value else "no")
    if isinstance(value, float):
        return TableCell(f"{value:.4g}")
    return TableCell(f"{value:,}" if isinstance(value, int) else str(value))


def _is_number(text: str) -> bool:
    first = text.strip().lstrip("+-−±<>≤≥~ ")
    return bool(first) and (first[0].isdigit() or (first[0] == "." and first[1:2].isdigit())) and len(text.split()) <= 4


@dataclass(frozen=True)
class SvgFigure:
    """A figure: SVG text, a caption of one line, and a text alternative that says what is drawn."""

    svg: str
    caption: str
    alternative: str
    name: str = ""
    """File name without its ending, for formats that keep figures in files."""

    def __post_init__(self) -> None:
        for what, words in (("caption", self.caption), ("text alternative", self.alternative)):
            if not words.strip():
                raise ParameterError(f"{what} of a figure must be a text, got an empty one; say what the figure shows")


@dataclass(frozen=True)
class CodeLines:
    """Lines to paste, such as a command or a configuration, with a sentence that says what they do."""

    text: str
    caption: str = ""
    language: str = ""


Part: TypeAlias = Paragraph | Bullets | DataTable | SvgFigure | CodeLines


@dataclass(frozen=True)
class Section:
    """A part of a report with a heading."""

    title: str
    parts: Sequence[Part]


@dataclass(frozen=True)
class ProvenanceRow:
    """An input: its name, its value as text, its kind (`KINDS`) and the source."""

    name: str
    value: str
    kind: str
    source: str = ""

    def __post_init__(self) -> None:
        checks.one_of("kind of provenance", self.kind, KINDS)


@dataclass(frozen=True)
class ReportDocument:
    """A report, independent of what it is about and of how it is rendered.

    Parameters
    ----------
    title
        One line.
    question, verdict
        What was asked, and the answer: a sentence or two each.
    sections
        Results, in the order of importance.
    warnings
        What a reader must know before the answer is used; shown next to the verdict.
    notes
        Sentences on uncertainty and assumptions.
    provenance
        Every input of the answer, with its source.
    reproduce
        Commands and files that give the same results.
    versions
        Versions of the program and its libraries, by name.
    facts
        Further facts by name, such as the seed and the platform.
    """

    title: str
    question: str
    verdict: str
    sections: Sequence[Section] = ()
    warnings: Sequence[str] = ()
    notes: Sequence[str] = ()
    provenance: Sequence[ProvenanceRow] = ()
    reproduce: Sequence[CodeLines] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("title", "question", "verdict"):
            if not getattr(self, name).strip():
                raise ParameterError(f"{name} of a report must be a text, got an empty one")

    def provenance_table(self) -> DataTable:
        """Table of the inputs, with the meanings of the kinds that occur below it."""
        rows = [(row.name, row.value, row.kind, row.source) for row in self.provenance]
        kinds = [f"{kind}: {meaning}." for kind, meaning in KINDS.items() if any(row.kind == kind for row in self.provenance)]
        return DataTable("Inputs and their sources", ("input", "value", "kind", "source"), rows, notes=kinds)

    def facts_table(self) -> DataTable:
        """Table of versions and further facts."""
        return DataTable("Versions and settings", ("what", "value"), [*self.facts.items(), *self.versions.items()])


BROKEN: tuple[type[Exception], ...] = (ArithmeticError, LookupError, TypeError, AttributeError, ValueError)
"""Errors that documents changed by hand lead to."""


@contextmanager
def written_by(command: str, what: str, source: object) -> Iterator[None]:
    """Turn errors in the content of a document into one line: it is not `what` as `command` writes it."""
    try:
        yield
    except ParameterError:
        raise
    except BROKEN as error:
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise ParameterError(f"{source} is not {what} as the program writes it ({why}); run `{command}` again") from None
