"""Results of the benchmarks by version, kept in `history.csv`: recorded by `make bench ARGS=--record`, read by the guide.

A row is one benchmark of one version: medians of ours, of the limit and of their ratio, with the quartiles of the ratio, and the
machine. Rows with another source than `measured` hold a figure that the change log states; it has no quartiles and no machine.
"""

from __future__ import annotations

import csv
import datetime
import os
import platform
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median

import numpy

from model.base import whole_files
from sim import __version__
from tests.bench.measure import Result

FILE = Path(__file__).with_name("history.csv")
MEASURED, STATED = "measured", "change log"


@dataclass(frozen=True)
class Record:
    """One benchmark of one version; None where a stated figure lacks it."""

    version: str
    date: str
    source: str
    benchmark: str
    unit: str
    limit_is: str
    ours: float | None = None
    limit: float | None = None
    ratio: float | None = None
    lower_quartile: float | None = None
    upper_quartile: float | None = None
    repeats: int | None = None
    target: str = ""
    machine: str = ""
    libraries: str = ""
    """Versions of Python and numpy."""

    @property
    def column(self) -> str:
        """Heading of the version: its number and the date of the measurement."""
        return f"{self.version}, {self.date}" + ("" if self.source == MEASURED else f" ({self.source})")


NUMBERS = {"ours", "limit", "ratio", "lower_quartile", "upper_quartile"}


def read(path: Path = FILE) -> list[Record]:
    """Return all records, in the order of the file."""
    with path.open(encoding="utf-8", newline="") as file:
        return [_record(row) for row in csv.DictReader(file)]


def _record(row: Mapping[str, str]) -> Record:
    numbers = {name: float(row[name]) if row[name] else None for name in NUMBERS}
    words = {name: row[name] for name in row if name not in {*NUMBERS, "repeats"}}
    return Record(**words, **numbers, repeats=int(row["repeats"]) if row["repeats"] else None)  # type: ignore[arg-type]


def write(records: Iterable[Record], path: Path = FILE) -> None:
    """Write records as CSV, numbers with 4 digits."""
    with whole_files.atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        sheet = csv.DictWriter(file, [field.name for field in fields(Record)], lineterminator="\n")
        sheet.writeheader()
        for record in records:
            row = asdict(record)
            sheet.writerow(row | {name: "" if row[name] is None else _digits(row[name], 4) for name in NUMBERS})


def _digits(value: float, digits: int, mark: str = "") -> str:
    """A number with this many significant digits, without an exponent; `mark` is the thousands separator."""
    return f"{float(f'{value:.{digits}g}'):{mark}.12g}"


def record(results: Sequence[Result], path: Path = FILE, date: str | None = None) -> list[Record]:
    """Add results to the file, in place of those of the same version, day and benchmark; return all records.

    Results of a version that were measured on another day stay.
    """
    made = of_results(results, date or datetime.datetime.now(datetime.UTC).date().isoformat())
    replaced = {(each.column, each.benchmark) for each in made}
    kept = [each for each in (read(path) if path.exists() else []) if (each.column, each.benchmark) not in replaced]
    everything = [*kept, *made]
    write(everything, path)
    return everything


def of_results(results: Sequence[Result], date: str) -> list[Record]:
    """Records of measured results of this version, on this machine."""
    found = []
    for result in results:
        benchmark, ratios = result.benchmark, result.ratios
        if not ratios:
            continue
        target = "" if benchmark.target is None else f"{'≤' if benchmark.at_most else '≥'} {benchmark.target:g}"
        found.append(
            Record(
                __version__, date, MEASURED, benchmark.name, benchmark.unit, benchmark.against, median(result.ours),
                median(result.limit), median(ratios), *result.quartiles, len(ratios), target, machine(), libraries(),
            )
        )  # fmt: skip
    return found


def machine() -> str:
    """Processor, number of cores, and load of the last five minutes, which says whether the machine was quiet."""
    load = f", load {os.getloadavg()[1]:.1f}" if hasattr(os, "getloadavg") else ""
    return f"{_processor()}, {os.cpu_count()} cores{load}"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def libraries() -> str:
    """Versions of Python and numpy."""
    return f"Python {platform.python_version()}, numpy {numpy.__version__}"


# --- The table ----------------------------------------------------------------------------------------------------------


def columns(records: Sequence[Record]) -> list[str]:
    """Headings of the versions, in the order of the file."""
    return [*dict.fromkeys(each.column for each in records)]


def rows(records: Sequence[Record]) -> list[list[str]]:
    """Cells of the table: benchmark, unit, limit, target, and for each version ours with the ratio and its quartiles."""
    heads = columns(records)
    found: dict[str, dict[str, Record]] = {}
    for each in records:
        found.setdefault(each.benchmark, {})[each.column] = each
    table = []
    for name, by_column in found.items():
        last = [*by_column.values()][-1]
        cells = [cell(by_column[head]) if head in by_column else "" for head in heads]
        table.append([name, last.unit, last.limit_is, last.target, *cells])
    return table


def cell(record: Record) -> str:
    """Ours, and the ratio to the limit with its quartiles.

    >>> cell(Record("1", "2026-01-01", MEASURED, "a", "points/s", "numpy", 5e6, 1e7, 0.5, 0.45, 0.55, 7))
    '5,000,000, ratio 0.5 (0.45 to 0.55)'
    >>> cell(Record("1", "2026-01-01", STATED, "a", "points/s", "numpy", ours=8000))
    '8,000'
    """
    parts = [] if record.ours is None else [_digits(record.ours, 3, ",")]
    if record.ratio is not None:
        between = "" if record.lower_quartile is None else f" ({record.lower_quartile:.2g} to {record.upper_quartile:.2g})"
        parts.append(f"ratio {record.ratio:.3g}{between}")
    return ", ".join(parts)


def text(records: Sequence[Record]) -> str:
    """The history for a terminal: the versions with their machines, then a block per benchmark."""
    heads, lines = columns(records), []
    for head in heads:
        one = next(each for each in records if each.column == head)
        lines.append(f"{head}: " + (", ".join(filter(None, (one.machine, one.libraries))) or "as the change log states them"))
    for name, unit, limit, target, *cells in rows(records):
        lines += ["", f"{name} [{unit}], against {limit}" + (f"; target {target}" if target else "")]
        lines += [f"  {head}: {each}" for head, each in zip(heads, cells, strict=True) if each]
    return "\n".join(lines)


def page() -> str:
    """The history as a page of the guide."""
    records = read()
    parts = [
        "# Benchmarks by version",
        "Medians of ours, and in words the ratio to the limit with its quartiles, from `make bench ARGS=--record`. Rates are per"
        " second of CPU time on one core; commands are timed by the clock. Higher is better, but where the target is ≤. Figures of"
        " the change log are of the same methods over other grids or outcomes, without a spread. [How to read"
        " them](../howto/speed.md).",
        "## Machines", _markdown(["version", "machine", "libraries", "source"], _machines(records)),
        "## Results", _markdown(["benchmark", "unit", "limit is", "target", *columns(records)], rows(records)),
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


def _machines(records: Sequence[Record]) -> list[list[str]]:
    found = {each.column: each for each in records}
    return [[head, one.machine or "not stated", one.libraries or "not stated", one.source] for head, one in found.items()]


def _markdown(heads: Sequence[str], cells: Iterable[Sequence[str]]) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (heads, ["---"] * len(heads), *cells))


def selected(records: Sequence[Record], *names: str) -> list[Record]:
    """Records of benchmarks with these names or common prefixes."""
    return [each for each in records if any(each.benchmark == name or each.benchmark.startswith(f"{name}-") for name in names)]
