"""Reader of other projects' tables; errors about missing, malformed or impossible values name the file, row and column.

Rows are counted from 1, without the header. Nothing is written here.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from model.architectures.transformer import Shape
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.hardware import physical_limits
from model.hardware.devices import Device
from model.hardware.interpolation import Floats, Surface
from model.hardware.profile import AXES, Profile, Source, table_of

if TYPE_CHECKING:
    import polars as pl

UNITS = {"s": 1.0, "ms": 1e-3, "us": 1e-6}
"""Units of times, in seconds."""
DTYPE = "bfloat16"
"""Type of the imported measurements; some are in float16, which has the same bytes and rate."""
BYTES_EACH = 2
CLOCKS = 1.1
"""Factor by which a card may run above the rated clock of its peak rate, as an RTX 4090 does; memory does not. Assumed."""
MOST_S, MOST_COUNTED = 1e3, 10**12
"""Largest plausible time of an operation [s], and largest plausible number of tokens, sequences or bytes."""
DIP = 0.05
"""Smallest relative fall of a time, as the number of tokens grows, that is reported."""


@dataclass(frozen=True, eq=False)
class ImportedTable:
    """Rows of one file."""

    path: Path
    shown: str
    """Name in messages: the path relative to the given folder."""
    frame: pl.DataFrame
    numbers: NDArray[np.int64]
    """Row numbers in the file, counted from 1."""

    @property
    def height(self) -> int:
        """Number of rows."""
        return self.frame.height

    def refuse(self, row: int, column: str, message: str) -> ParameterError:
        """Return the error about a value; `row` is the index in this table."""
        return ParameterError(f"{self.shown}: row {self.numbers[row]}, column {column}: {message}")

    def column(self, name: str, *, least: float | None = None) -> Floats:
        """Return a column of numbers, shape (rows,); each must be present, finite and at least `least`."""
        import polars as pl

        held = self.frame[name]
        values: Floats = held.cast(pl.Float64, strict=False).to_numpy()  # null becomes nan
        bad = ~np.isfinite(values) if least is None else ~(np.isfinite(values) & (values >= least))
        if bad.any():
            where = int(np.argmax(bad))
            bound = "a number" if least is None else f"a number of at least {least:g}"
            raise self.refuse(where, name, f"must be {bound}, got {checks.shown(held[where])}")
        return values

    def whole(self, name: str, *, least: int) -> Floats:
        """Return a column of counts, shape (rows,): whole numbers of at least `least`."""
        values = self.column(name, least=least)
        for bad, bound in ((values > MOST_COUNTED, f"at most {MOST_COUNTED:,}"), (values != np.floor(values), "a whole number")):
            if bad.any():
                where = int(np.argmax(bad))
                raise self.refuse(where, name, f"must be {bound}, got {checks.shown(float(values[where]))}")
        return values

    def seconds(self, name: str, unit: str) -> Floats:
        """Return a column of times in seconds, shape (rows,); 0 is allowed, because short times may have been rounded to it."""
        checks.one_of("unit", unit, UNITS)
        times = self.column(name, least=0)
        if (times > MOST_S / UNITS[unit]).any():
            where = int(np.argmax(times))
            raise self.refuse(where, name, f"must be at most {MOST_S:g} s, got {times[where]:g} {unit}; check the unit")
        return times * UNITS[unit]

    def words(self, name: str, known: Iterable[str]) -> NDArray[np.str_]:
        """Return a column of words in lower case, shape (rows,); each must be one of `known`."""
        import polars as pl

        allowed = [*known]
        held = self.frame[name].cast(pl.String).fill_null("").str.to_lowercase()
        bad = ~held.is_in(allowed).to_numpy()
        if bad.any():
            where = int(np.argmax(bad))
            raise self.refuse(where, name, str(checks.unknown("value", held[where], allowed)))
        return held.to_numpy().astype(np.str_)

    def where(self, mask: NDArray[np.bool_] | pl.Series) -> ImportedTable:
        """Return the rows that a mask selects."""
        kept = np.asarray(mask)
        return ImportedTable(self.path, self.shown, self.frame.filter(kept), self.numbers[kept])


def read(path: Path, columns: Iterable[str], *, root: Path) -> ImportedTable:
    """Read the table of a CSV or Parquet file, which must have rows and these columns."""
    try:
        shown = path.relative_to(root).as_posix()
    except ValueError:
        shown = path.name
    if not path.is_file():
        raise ParameterError(f"{shown}: there is no such file; give the folder that holds it")
    try:
        frame = (
            bounded_files.read_csv(path, infer_schema_length=None) if path.suffix == ".csv" else bounded_files.read_parquet(path)
        )
    except (ParameterError, OSError) as error:
        raise ParameterError(f"{shown}: {error}") from None
    found = ImportedTable(path, shown, frame, np.arange(1, frame.height + 1))
    require(found, columns)
    if not frame.height:
        raise ParameterError(f"{shown}: the table is empty; it must have at least one row")
    return found


def require(table: ImportedTable, columns: Iterable[str]) -> None:
    """Refuse a table that lacks one of these columns."""
    for name in columns:
        if name not in table.frame.columns:
            raise ParameterError(f"{table.shown}: column {name} is missing; {_nearest(name, table.frame.columns)}")


def _nearest(name: str, columns: list[str]) -> str:
    """Return a clause with the nearest of a table's columns, of which other projects have dozens."""
    close = difflib.get_close_matches(name, columns, cutoff=0)
    return (
        f"the nearest of its {len(columns)} columns is {close[0]}; the format of the file has changed"
        if close
        else "it has no columns"
    )


def time_column(table: ImportedTable, stem: str) -> tuple[str, str]:
    """Return the column of times whose name ends in its unit, as `time_us`, and that unit."""
    found = [name for name in table.frame.columns if name.startswith(f"{stem}_")]
    if not found:
        raise ParameterError(f"{table.shown}: column {stem}_us is missing; {_nearest(f'{stem}_us', table.frame.columns)}")
    unit = found[0].removeprefix(f"{stem}_")
    if unit not in UNITS:
        raise ParameterError(f"{table.shown}: column {found[0]}: {checks.unknown('unit', unit, UNITS)}")
    return found[0], unit


def check_reached(
    table: ImportedTable, column: str, seconds: Floats, device: Device, *, moved: Floats | None = None,
    operations: Floats | None = None, rounding: float = 0.0, launches: float = 1, most: tuple[Floats, Floats] | None = None,
) -> None:  # fmt: skip
    """Refuse a time that is too short for the device, or far too long for it (`model.hardware.physical_limits.longest_time`).

    Bytes beyond the capacity of the last-level cache must come from memory, and no arithmetic is faster than its peak.

    Parameters
    ----------
    seconds
        Times, shape (rows,) [s].
    moved, operations
        Bytes read [bytes], and arithmetic [operations], shape (rows,).
    rounding
        Largest difference of a time to its written value [s].
    launches
        Largest number of kernels per row.
    most
        Upper bounds of the bytes and the operations, for kernels that do more than necessary.
    """
    bytes_, work = (0.0 if moved is None else moved, 0.0 if operations is None else operations) if most is None else most
    slowest = physical_limits.longest_time(bytes_, work, device.bandwidth, device.rate(DTYPE), launches)
    _refuse_slower(table, column, seconds, np.broadcast_to(slowest, seconds.shape), device)
    longest = seconds + rounding
    if moved is not None:
        least = np.maximum(moved - device.cache_bytes, 0) / device.bandwidth
        _refuse_faster(table, column, seconds, longest < least, moved, "bytes/s", device.bandwidth, device, "memory")
    if operations is not None:
        peak = device.rate(DTYPE) * CLOCKS
        _refuse_faster(table, column, seconds, longest < operations / peak, operations, "operations/s", peak, device, "arithmetic")


def _refuse_slower(table: ImportedTable, column: str, seconds: Floats, slowest: Floats, device: Device) -> None:
    bad = seconds > slowest
    if bad.any():
        where = int(np.argmax(bad))
        also = f" ({bad.sum()} rows like it)" if bad.sum() > 1 else ""
        most = f"{device.name} at a hundredth of its peaks takes at most {slowest[where]:.3g} s"
        message = f"{seconds[where]:.4g} s is too long{also}: {most}"
        raise table.refuse(where, column, f"{message}; check the unit and the device, or leave this file out")


def _refuse_faster(
    table: ImportedTable,
    column: str,
    seconds: Floats,
    bad: NDArray[np.bool_],
    amount: Floats,
    unit: str,
    peak: float,
    device: Device,
    what: str,
) -> None:
    if not bad.any():
        return
    where = int(np.argmax(bad))
    reached = f"{amount[where] / seconds[where]:.3g} {unit}" if seconds[where] else "zero time"
    also = f" ({bad.sum()} rows like it)" if bad.sum() > 1 else ""
    message = f"{seconds[where]:.4g} s would be {reached}, above the {peak:.3g} {unit} of the {what} of {device.name}{also}"
    raise table.refuse(where, column, f"{message}; check the unit and the device, or leave this file out")


def products(shape: Shape) -> tuple[tuple[int, int], ...]:
    """(inputs, outputs) of the products of a layer without cross-attention: into attention, out of it, up and down."""
    return (*shape.matrices[:2], *shape.matrices[-2:])


def check_total(table: ImportedTable, column: str, total: Floats) -> None:
    """Refuse a pass with a total time of 0."""
    if (total <= 0).any():
        raise table.refuse(int(np.argmax(total <= 0)), column, "the total time of the pass must be above 0 s, got 0")


def merged(keys: Mapping[str, Floats | int], values: Mapping[str, Floats]) -> tuple[dict[str, Floats], dict[str, Floats], Floats]:
    """Merge repeats to one row per point: the points, the median of each column, and the number of repeats."""
    import polars as pl

    medians = [pl.col(name).median() for name in values]
    frame = pl.DataFrame({**keys, **values}).group_by(list(keys)).agg(*medians, pl.len().alias("repeats")).sort(list(keys))
    points, times = ({name: frame[name].to_numpy() for name in names} for names in (keys, values))
    return points, times, frame["repeats"].to_numpy()


def rows(part: str, keys: Mapping[str, Floats | int], values: Mapping[str, Floats]) -> list[dict[str, Any]]:
    """Return rows of a profile, one per point, with repeats merged."""
    points, times, repeats = merged(keys, values)
    columns = {name: column.astype(np.int64) for name, column in points.items()}
    columns |= {name: column.astype(np.float64) for name, column in times.items()}
    found = {"repeats": repeats.tolist()} | {name: column.tolist() for name, column in columns.items()}
    return [{"part": part, **dict(zip(found, row, strict=True))} for row in zip(*found.values(), strict=True)]


def profile_of(
    device: Device, rows: list[dict[str, Any]], sources: Iterable[Source], notes: Iterable[str], **more: Any
) -> Profile:
    """Return a profile of measured rows on a device; `more` are its other fields."""
    fields: dict[str, Any] = {"dtype": DTYPE, "provenance": "measured", "date": "", "device": device.name} | more
    return Profile(
        bandwidth=device.bandwidth, rate=device.rate(DTYPE), cache_bytes=device.cache_bytes, table=table_of(rows),
        sources=tuple(sources), notes=tuple(notes), **fields,
    )  # fmt: skip


def dips(rows: list[dict[str, Any]], part: str, axis: str) -> list[str]:
    """Return a note on times that fall with more tokens. Such falls are real: larger passes get better kernels."""
    found, points, worst = 0, 0, (0.0, 0)
    for tensor_parallel in sorted({row.get("tensor_parallel", 1) for row in rows if row["part"] == part}):
        chosen = [row for row in rows if row["part"] == part and row.get("tensor_parallel", 1) == tensor_parallel]
        points += len(chosen)
        surface = Surface({axis: [row[axis] for row in chosen]}, [row["time_s"] for row in chosen])
        for (at,), share in surface.dips(axis, DIP):
            found, worst = found + 1, max(worst, (share, int(at)))
    if not found:
        return []
    return [
        f"{part}: at {found} of {points} points the time falls by more than {DIP:.0%}, by {worst[0]:.0%} at {axis} {worst[1]}"
    ]


def source(table: ImportedTable, root: Path, repository: str, licence: str, commit: str, parts: Iterable[str]) -> Source:
    """Return the source of rows, with the file's checksum."""
    digest = hashlib.sha256(bounded_files.read_bytes(table.path)).hexdigest()
    return Source(repository, table.shown, commit, licence, digest, tuple(parts))


def errors(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Median leave-one-out relative error of each part, interpolated between neighbours [-]."""
    found = {}
    for part in dict.fromkeys(row["part"] for row in rows):
        each = []
        for tensor_parallel in {row["tensor_parallel"] for row in rows if row["part"] == part}:
            chosen = [row for row in rows if row["part"] == part and row["tensor_parallel"] == tensor_parallel]
            axes = {axis: [row[axis] for row in chosen] for axis in AXES[part]}
            each.append(Surface(axes, [row["time_s"] for row in chosen]).error)
        found[part] = round(float(np.median(each)), 4)
    return found
