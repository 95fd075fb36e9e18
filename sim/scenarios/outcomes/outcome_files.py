"""Files of recorded outcomes named by a scenario: JSON, and tables of columns in JSON or CSV."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from functools import lru_cache
from typing import Any

from model.base import bounded_files, checks

JSON_OR_CSV = "JSON or CSV"


def text_of(file: str, what: str, form: str = "JSON") -> str:
    """Text of a file of outcomes; editors and spreadsheets may put a byte-order mark before it."""
    try:
        return bounded_files.read_text(file)
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    raise checks.ParameterError(f"file {file!r} cannot be read: {reason}; name a {form} file of {what}")


def json_of(file: str, what: str, form: str = "JSON") -> Any:
    """Content of a JSON file of outcomes."""
    text = text_of(file, what, form)
    try:
        return bounded_files.json_of(text, strict=False)
    except ValueError as error:  # a number of thousands of digits is one too
        known = isinstance(error, json.JSONDecodeError | checks.ParameterError)
        reason = str(error) if known else "a number has too many digits"
    raise checks.ParameterError(f"file {file!r} cannot be read: it is not JSON: {reason}; name a {form} file of {what}")


def columns_of(file: str, what: str, names: tuple[str, ...]) -> dict[str, list[Any]]:
    """Columns of a table of outcomes with these names: an object of lists in JSON, or CSV."""
    if file.lower().endswith(".csv"):
        return _columns_of_csv(file, what, names)
    found = json_of(file, what, JSON_OR_CSV)
    if not isinstance(found, dict) or not all(isinstance(values, list) for values in found.values()):
        raise checks.ParameterError(f"file {file!r} must hold an object of lists, with {', '.join(names)}")
    return found


def _columns_of_csv(file: str, what: str, names: tuple[str, ...]) -> dict[str, list[Any]]:
    # Not read by polars, which fills short rows with nulls and renames duplicate columns: both are errors here.
    try:
        head, *rows = [row for row in csv.reader(io.StringIO(text_of(file, what, JSON_OR_CSV))) if row] or [[]]
    except csv.Error as error:
        raise checks.ParameterError(f"file {file!r} cannot be read: it is not CSV: {error}") from None
    if not head:
        raise checks.ParameterError(f"file {file!r} cannot be read: it is empty; its columns are {', '.join(names)}")
    head = [name.strip() for name in head]
    for index, name in enumerate(head):
        if name in head[:index]:
            raise checks.ParameterError(f"file {file!r} must have each column once, got {checks.shown(name)} a second time")
    for number, row in enumerate(rows, start=1):
        if len(row) != len(head):
            form = f"{len(head)} values in each row"
            raise checks.ParameterError(f"file {file!r} must have {form}, got {len(row)} in row {number}")
    return {name: [_value(row[index]) for row in rows] for index, name in enumerate(head)}


def _value(cell: str) -> Any:
    """Parse a cell as true, false or a number; other strings are returned for the check of the column."""
    word = cell.strip().lower()
    try:
        return word == "true" if word in ("true", "false") else float(cell)
    except ValueError:
        return cell


def read_once(read: Callable[[str, str], Any], file: str, source: str) -> Any:
    """Return `read(file, source)`, cached: every point of a grid needs it, and a long file takes seconds."""
    return _read_once(read, file, source, bounded_files.stamp(file))


@lru_cache(maxsize=8)
def _read_once(read: Callable[[str, str], Any], file: str, source: str, stamp: object) -> Any:
    return read(file, source)
