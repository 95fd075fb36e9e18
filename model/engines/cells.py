"""Measured cells of a serving engine: running sequences, draft length, acceptance length, and a time or a throughput.

A *step* of an engine is one pass of the target over all running sequences, with the draft passes before it. A sequence gets AL
tokens per step (mean acceptance length; 1 without a draft). From the seconds T of a step with R running sequences follow the time
per output token of a sequence, T / AL, and the throughput of all of them, R AL / T. Measured throughput and time per token also
contain the time that the engine spends on prompts (prefill) in between, and their tables rarely say how much.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import bounded_files, checks, strict_json, whole_files
from model.base.checks import ParameterError

Floats = NDArray[np.float64]

UNITS = {
    "step_ms": "time of a step [ms]", "tpot_ms": "time per output token of a sequence [ms]",
    "output_tokens_per_s": "throughput of all sequences together [tokens/s]",
}  # fmt: skip
"""Columns that hold the measured value; a table has one of them."""
REQUIRED = ("sequences", "draft_length")
OPTIONAL = ("mean_acceptance_length", "draft_passes", "context", "weight")
MOST_CELLS = 2000
MOST_SEQUENCES, MOST_DRAFT = 1e6, 1024


@dataclass(frozen=True, eq=False)
class Cells:
    """Table of cells; all arrays have shape (cells,).

    Parameters
    ----------
    unit
        One of `UNITS`: what `values` are.
    sequences, draft_length
        Sequences that run at once (the mean, if it varies), and drafted tokens per step (0: plain decoding).
    values
        Measured values in the unit; nan where nothing was measured.
    mean_acceptance_length
        Tokens per step and sequence, bonus token included; nan where unknown.
    draft_passes
        Sequential passes of the draft per step: as many as drafted tokens, or 1 if one pass drafts all of them.
    context
        Cached positions per sequence; nan where unknown.
    weight
        Number of measurements that a cell counts for.

    >>> Cells.of("tpot_ms", [1, 1], [0, 3], [10.0, 6.0], mean_acceptance_length=[1.0, 2.5]).step_seconds().tolist()
    [0.01, 0.015]
    """

    unit: str
    sequences: Floats
    draft_length: Floats
    values: Floats
    mean_acceptance_length: Floats
    draft_passes: Floats
    context: Floats
    weight: Floats

    @classmethod
    def of(
        cls, unit: str, sequences: ArrayLike, draft_length: ArrayLike, values: ArrayLike | None = None, *,
        mean_acceptance_length: ArrayLike | None = None, draft_passes: ArrayLike | None = None, context: ArrayLike | None = None,
        weight: ArrayLike | None = None,
    ) -> Cells:  # fmt: skip
        """Build and check a table; what is left out, or nan, is unknown (weight: 1, draft passes: one per drafted token)."""
        checks.one_of("unit", unit, UNITS)
        number, drafted = (_required(name, each) for name, each in (("sequences", sequences), ("draft_length", draft_length)))
        shape = np.broadcast_shapes(number.shape, drafted.shape)
        if len(shape) != 1 or not 1 <= shape[0] <= MOST_CELLS:
            raise ParameterError(f"cells must be a list of 1 to {MOST_CELLS}, got shape {shape}")
        passes = np.array(np.broadcast_to(_optional(draft_passes, shape), shape))
        heavy = np.array(np.broadcast_to(_optional(weight, shape), shape))
        drafted = np.broadcast_to(drafted, shape)
        found = cls(
            unit, np.broadcast_to(number, shape), drafted, _optional(values, shape), _optional(mean_acceptance_length, shape),
            np.where(np.isnan(passes), drafted, passes), _optional(context, shape), np.where(np.isnan(heavy), 1.0, heavy),
        )  # fmt: skip
        found._check()
        return found

    def _check(self) -> None:
        between = {
            "sequences": (self.sequences, 1e-3, MOST_SEQUENCES), "draft_length": (self.draft_length, 0, MOST_DRAFT),
            self.unit: (self.values, 1e-9, 1e12), "mean_acceptance_length": (self.mean_acceptance_length, 1, MOST_DRAFT + 1),
            "draft_passes": (self.draft_passes, 0, MOST_DRAFT), "context": (self.context, 0, checks.MAX_TOKENS),
            "weight": (self.weight, 1e-6, 1e9),
        }  # fmt: skip
        for name, (column, low, high) in between.items():
            bad = (column < low) | (column > high) | np.isinf(column)
            if name in REQUIRED:
                bad |= np.isnan(column)
            if np.any(bad):
                row = int(np.argmax(bad))
                raise ParameterError(f"row {row + 1}: {name} must be between {low:g} and {high:g}, got {column[row]:g}")
        parts = self.draft_length != np.floor(self.draft_length)
        if np.any(parts):
            row = int(np.argmax(parts))
            raise ParameterError(f"row {row + 1}: draft_length must be a whole number, got {self.draft_length[row]:g}")
        most = self.draft_length + 1
        over = self.mean_acceptance_length > most * 1.001
        if np.any(over):
            row = int(np.argmax(over))
            raise ParameterError(
                f"row {row + 1}: mean_acceptance_length must be at most draft_length + 1 = {most[row]:g} (the bonus token counted),"
                f" got {self.mean_acceptance_length[row]:g}"
            )

    @property
    def size(self) -> int:
        """Number of cells."""
        return int(self.sequences.size)

    @property
    def measured(self) -> NDArray[np.bool_]:
        """Mask of the cells with a measured value; shape (cells,)."""
        return ~np.isnan(self.values)

    def __getitem__(self, chosen: Any) -> Cells:
        """Return the chosen cells (a mask, a slice or indices)."""
        arrays = {name: np.atleast_1d(each[chosen]) for name, each in vars(self).items() if name != "unit"}
        return Cells(self.unit, **arrays)

    def step_seconds(self, acceptance_length: ArrayLike | None = None) -> Floats:
        """Seconds of a step that the measured values mean at these acceptance lengths (default: those of the table) [s]."""
        length = self.mean_acceptance_length if acceptance_length is None else np.asarray(acceptance_length)
        return from_unit(self.unit, self.values, self.sequences, np.where(self.draft_length == 0, 1.0, length))


def served(unit: str, sequences: ArrayLike) -> Floats:
    """Sequences whose prompts are processed during the time that a value counts: the time per token of a sequence begins after its
    own prompt, and the time of a step contains none.

    >>> [served(unit, 8).tolist() for unit in UNITS]
    [0.0, 7.0, 8.0]
    """
    number = np.asarray(sequences, dtype=np.float64)
    return np.asarray({"step_ms": 0 * number, "tpot_ms": np.maximum(number - 1, 0)}.get(unit, number))


def from_unit(unit: str, values: ArrayLike, sequences: ArrayLike, length: ArrayLike) -> Floats:
    """Seconds of a step from a value in a unit [s]."""
    value, number, tokens = (np.asarray(each, dtype=np.float64) for each in (values, sequences, length))
    return np.asarray({"step_ms": value / 1e3, "tpot_ms": value * tokens / 1e3}.get(unit, number * tokens / value))


def to_unit(unit: str, seconds: ArrayLike, sequences: ArrayLike, length: ArrayLike) -> Floats:
    """Value in a unit from seconds of a step.

    >>> float(to_unit("output_tokens_per_s", 0.02, 8, 2.5))
    1000.0
    """
    time, number, tokens = (np.asarray(each, dtype=np.float64) for each in (seconds, sequences, length))
    return np.asarray({"step_ms": 1e3 * time, "tpot_ms": 1e3 * time / tokens}.get(unit, number * tokens / time))


def _required(name: str, values: ArrayLike) -> Floats:
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ParameterError(f"{name} must be numbers, got {checks.shown(values)}") from None


def _optional(values: ArrayLike | None, shape: tuple[int, ...]) -> Floats:
    found = np.asarray(np.nan if values is None else values, dtype=np.float64)
    return np.array(np.broadcast_to(found, shape))


# --- Files ---


@dataclass(frozen=True)
class CellsFile:
    """Cells of a CSV file, and its columns that were not used."""

    cells: Cells
    unused: tuple[str, ...] = ()


def read_csv(path: Path, *, unit: str | None = None) -> CellsFile:
    """Read cells from a CSV file with a header line.

    Columns: `sequences`, `draft_length`, one of `UNITS` (or none, if `unit` is given and only predictions are wanted), and any of
    `OPTIONAL`; an empty field is an unknown value. Blank lines, and lines that begin with #, are skipped. Raises ParameterError
    that names file, row (the header is not counted) and column.
    """
    try:
        return _read(path, unit)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None
    except OSError as error:
        raise ParameterError(f"file {str(path)!r} cannot be read: {error.strerror or error}") from None


def _read(path: Path, unit: str | None) -> CellsFile:
    header, rows = bounded_files.csv_rows(path, MOST_CELLS, _check_header)
    times = [name for name in UNITS if name in header]
    if len(times) > 1:
        raise ParameterError(f"one column of measured values is needed, got {' and '.join(times)}; keep one of them")
    if not times and unit is None:
        raise ParameterError(f"a column of measured values is needed: one of {', '.join(UNITS)}")
    if not rows:
        raise ParameterError("at least one cell is needed, got a file without rows")
    columns = {
        name: np.array([_number(name, number, row[index]) for number, row in enumerate(rows, 1)], dtype=np.float64)
        for index, name in enumerate(header) if name in KNOWN
    }  # fmt: skip
    for name in REQUIRED:
        if np.any(np.isnan(columns[name])):
            raise ParameterError(f"row {int(np.argmax(np.isnan(columns[name]))) + 1}: {name} must be a number, got an empty field")
    of = times[0] if times else str(unit)
    optional = {name: columns.get(name) for name in OPTIONAL}
    cells = Cells.of(of, columns["sequences"], columns["draft_length"], columns.get(of), **optional)
    return CellsFile(cells, tuple(name for name in header if name not in KNOWN))


KNOWN = (*REQUIRED, *UNITS, *OPTIONAL)


def _check_header(header: list[str]) -> None:
    """Raise ParameterError for columns without a name, twice, missing, or named almost as a known one."""
    if len(header) == 1 and (other := next((mark for mark in (";", "\t", "|") if mark in header[0]), None)):
        raise ParameterError(f"columns must be separated by commas, got {'a tab' if other == chr(9) else repr(other)}")
    for index, name in enumerate(header):
        if name and name in header[:index]:
            raise ParameterError(f"column {checks.shown(name)[1:-1]} is there twice; keep one of them")
    similar = {
        name: close[0] for name in header
        if name not in KNOWN and (close := difflib.get_close_matches(_plain_name(name), KNOWN, n=1, cutoff=0.8))
    }  # fmt: skip
    for name in REQUIRED:
        if name not in header:
            meant = [f"for {checks.shown(each)} did you mean {name}? " for each, known in similar.items() if known == name]
            listed = ", ".join(checks.shown(each)[1:-1] for each in header[:20])
            listed = listed if len(listed) < 300 else f"{listed[:300]}..."
            raise ParameterError(f"column {name} is missing; {''.join(meant[:1])}the columns are {listed}")
    if "" in header:
        raise ParameterError(f"column {header.index('') + 1} has no name in the header; name it, or remove it")
    for name, known in similar.items():
        raise ParameterError(f"unknown column {checks.shown(name)}; {checks.nearest(known, KNOWN)}")


def _plain_name(name: str) -> str:
    """Name of a column in lower case, with a low line in place of blanks and brackets."""
    return re.sub(r"\W+", "_", name.lower()).strip("_")


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?", re.ASCII | re.IGNORECASE)


def _number(name: str, row: int, text: str) -> float:
    if not text:
        return np.nan
    found = float(text) if _NUMBER.fullmatch(text) else np.inf
    if not np.isfinite(found):
        empty = "" if name in REQUIRED else ", or empty where unknown"
        raise ParameterError(f"row {row}: {name} must be a number{empty}, got {checks.shown(text)}")
    return found


def rows(cells: Cells) -> list[dict[str, float | None]]:
    """Cells as rows with the column names of a file; unknown values are None, columns without any value left out."""
    columns: Mapping[str, Floats] = {
        "sequences": cells.sequences, "draft_length": cells.draft_length, cells.unit: cells.values,
        "mean_acceptance_length": cells.mean_acceptance_length, "context": cells.context,
    }  # fmt: skip
    if np.any(cells.draft_passes != cells.draft_length):
        columns = {**columns, "draft_passes": cells.draft_passes}
    if np.any(cells.weight != 1):
        columns = {**columns, "weight": cells.weight}
    kept = {name: column for name, column in columns.items() if not np.isnan(column).all() or name in REQUIRED}
    return [
        {name: None if np.isnan(column[row]) else float(column[row]) for name, column in kept.items()} for row in range(cells.size)
    ]


def of_rows(unit: str, listed: list[dict[str, float | None]]) -> Cells:
    """Cells from rows, as `rows` gives them."""
    columns: dict[str, list[float]] = {}
    for name in (*REQUIRED, unit, *OPTIONAL):
        found = [row.get(name) for row in listed]
        columns[name] = [np.nan if each is None else float(each) for each in found]
    if wrong := [name for row in listed for name in row if name not in columns]:
        raise ParameterError(f"unknown column {checks.shown(wrong[0])} of cells; {checks.nearest(wrong[0], columns)}")
    optional = {name: columns[name] for name in OPTIONAL}
    return Cells.of(unit, columns["sequences"], columns["draft_length"], columns[unit], **optional)


def write_csv(path: Path, cells: Cells) -> Path:
    """Write cells as a CSV file that `read_csv` reads, completely or not at all."""
    listed = rows(cells)
    lines = [",".join(listed[0])]
    lines += [",".join("" if value is None else strict_json.dumps(_plain(value)) for value in row.values()) for row in listed]
    return whole_files.write_text(path, "\n".join(lines) + "\n")


def _plain(value: float) -> float | int:
    return int(value) if value == int(value) and abs(value) < 1e15 else value
