"""Safe reads of untrusted files: regular files only, of bounded size, also when decompressed.

Reading a pipe or a device could block forever, and a file of a few kilobytes may decompress to more than the memory. The content is
only parsed, never executed.
"""

from __future__ import annotations

import csv
import errno
import io
import json
import math
import os
import re
import stat
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from model.base.checks import ParameterError

if TYPE_CHECKING:
    import polars as pl

MOST_BYTES = 2**28
"""Maximum size of a file that is read whole [bytes]: a hundred times the largest file in the project."""
MOST_TOML = 2**22
"""Maximum size of a TOML file [bytes]; its parser is slow."""
MOST_LOG = 2**32
"""Maximum size of a log that is read line by line [bytes]."""
MOST_LINE = 2**20
"""Maximum length of a line of a log [bytes]."""
MOST_VALUES = 2 * 10**8
"""Maximum number of values in a table, elements of lists included; at 8 bytes each they take 1.6 GB."""
MOST_UNPACKED = 2**31
"""Maximum size of a table's decompressed columns [bytes]."""
DEEPEST = 64
"""Maximum nesting depth of brackets."""
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
"""First bytes of compressed files: gzip, zstandard, bzip2, xz, zip, zlib."""
_JSON = re.compile(r'\s*(\{\s*["}]|\[\s*[\[{"])')
_KIND = re.compile(rb'\s*\{\s*"kind"\s*:\s*"([\w-]{1,40})"')
COMPRESSED = "it is compressed; unpack it first"


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """Content of a regular file of at most `most` bytes. Raises `OSError` if it does not exist or cannot be opened."""
    with open(_opened(path), "rb") as file:
        _check_kind(Path(path), os.fstat(file.fileno()), most)
        content = file.read(most + 1)
    if len(content) > most:  # it has grown since the check
        _refuse_size(Path(path), len(content), most)
    return content


def _opened(path: str | Path) -> int:
    """Descriptor of a file. Non-blocking: opening a pipe without a writer would wait forever."""
    found = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    if stat.S_ISDIR(os.fstat(found).st_mode):  # `open` would name the descriptor's number instead of the path
        os.close(found)
        raise IsADirectoryError(errno.EISDIR, "it is a folder, and must be a file", str(path))
    return found


def check_regular(path: str | Path, most: int | None = None) -> None:
    """Raise `ParameterError` for anything but a regular file of at most `most` bytes, before a library opens it by path."""
    _check_kind(Path(path), os.stat(path), most)


def stamp(path: str | Path) -> tuple[int, int] | None:
    """Modification time and size of a file, which change when it is rewritten; None if it cannot be read."""
    try:
        status = os.stat(path)
    except (OSError, ValueError):
        return None
    return status.st_mtime_ns, status.st_size


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """Text of a UTF-8 file, with or without a byte-order mark; line ends are converted to line feeds."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8-sig").read()


def text_lines(path: str | Path, most: int = MOST_LOG, longest: int = MOST_LINE) -> Iterator[str]:
    """Yield the lines of a regular UTF-8 file one after another, without their line ends; memory is bounded by the longest line."""
    with open(_opened(path), "rb") as file:
        _check_kind(Path(path), os.fstat(file.fileno()), most)
        number = 0
        while line := file.readline(longest + 1):
            number += 1
            if number == 1 and line.startswith(_PACKED):
                raise ParameterError(COMPRESSED)
            if len(line) > longest:
                raise ParameterError(f"line {number} must have at most {longest:,} bytes; name a file with shorter lines")
            if b"\x00" in line:
                raise ParameterError(f"line {number} has a zero byte: it is not text in UTF-8; save it as UTF-8")
            try:
                text = line.decode("utf-8-sig" if number == 1 else "utf-8")
            except UnicodeDecodeError:
                raise ParameterError(f"line {number} is not text in UTF-8; save it as UTF-8") from None
            yield text.rstrip("\r\n")


def check_replaceable(path: str | Path, kind: str) -> None:
    """Raise `ParameterError` if a JSON file of the project of another `kind` is there, which writing would replace."""
    try:
        with open(_opened(path), "rb") as file:
            _check_kind(Path(path), os.fstat(file.fileno()), None)
            found = _KIND.match(file.read(1024))
    except (OSError, ParameterError):  # the one who writes reports them
        return
    if found is not None and (there := found[1].decode()) != kind:
        raise ParameterError(f"{Path(path).name} is there and is of kind {there}: choose another NAME than that of this {kind}")


def read_page(path: str | Path) -> str:
    """Text of a page of which a part will be rewritten; empty if it does not exist yet."""
    try:
        return read_text(path)
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        problem = f"{Path(path).name} must be text in UTF-8, and is not (byte {error.start + 1})"
        raise ParameterError(f"{problem}; name another page, or remove it") from None


def _check_kind(path: Path, status: os.stat_result, most: int | None) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise ParameterError(f"{path.name} is a folder, and must be a file")
    if not stat.S_ISREG(status.st_mode):
        raise ParameterError(f"{path.name} must be a regular file, got a pipe, a socket or a device; write it to a file first")
    if most is not None and status.st_size > most:
        _refuse_size(path, status.st_size, most)


def _refuse_size(path: Path, size: int, most: int) -> NoReturn:
    raise ParameterError(f"{path.name} must have at most {most:,} bytes, got {size:,}")


# --- JSON and TOML ---


def json_of(text: str | bytes, *, strict: bool = True) -> Any:
    """Value of a JSON document of bounded nesting depth, without NaN and Infinity.

    With `strict=False` NaN and Infinity are accepted, for callers that check numbers themselves.

    >>> json_of('[1, NaN]')
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: NaN is not JSON; write null where there is no value
    """
    try:
        value = json.loads(text, parse_constant=_refuse_constant, parse_float=_float) if strict else json.loads(text)
    except RecursionError:
        raise ParameterError("brackets are nested too deeply") from None
    _check_depth(value)
    return value


def _float(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ParameterError(f"the number {text[:40]} is too large for a float")
    return value


def _refuse_constant(word: str) -> NoReturn:
    raise ParameterError(f"{word} is not JSON; write null where there is no value")


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(DEEPEST):
        inner: list[Any] = []
        for each in level:
            inner += each.values() if isinstance(each, dict) else each if isinstance(each, list) else ()
        if not inner:
            return
        level = [each for each in inner if isinstance(each, dict | list)]
    if level:
        raise ParameterError(f"brackets must be nested at most {DEEPEST} deep")


def toml_of(text: str) -> dict[str, Any]:
    """Table of a TOML document. Raises `ValueError` if the text is not TOML."""
    try:
        table = tomllib.loads(text)
    except RecursionError:
        raise ParameterError("brackets nested too deeply") from None
    _check_depth(table)
    return table


# --- Tables ---


def read_csv(path: Path, **how: Any) -> pl.DataFrame:
    """Read a CSV file as a polars table; unlike polars, refuse compressed files and expand no patterns in the name."""
    import polars as pl

    content = read_bytes(path)
    if content.startswith(_PACKED):
        raise ParameterError(COMPRESSED)
    try:
        return pl.read_csv(content, **how)
    except pl.exceptions.NoDataError:
        raise ParameterError("the file is empty; it must have a header and at least one row") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        reason = _uneven_row(content) or (str(error).splitlines() or ["damaged"])[0]
        raise ParameterError(f"it cannot be read as CSV: {reason}") from None


def _uneven_row(content: bytes) -> str:
    """Sentence on the first row of a CSV file with more fields than its header, which polars refuses; empty without one."""
    rows = csv.reader(io.StringIO(content.decode("utf-8-sig", errors="replace"), newline=""))
    try:
        width = len(next(rows, []))
        for number, row in enumerate(rows, 1):
            if len(row) > width:
                return uneven(number, len(row), width)
    except csv.Error:
        pass
    return ""


def uneven(row: int, fields: int, width: int) -> str:
    """Message about a row with another number of fields than the header; rows count from 1, the header is not counted."""
    return f"row {row} must have {width} field{'s' * (width != 1)}, as the header has, got {fields}"


def csv_rows(path: Path, most: int, check: Callable[[list[str]], None]) -> tuple[list[str], list[list[str]]]:
    """Header and rows of a small CSV file that a person wrote: blank lines, and lines that begin with #, are skipped.

    Fields are stripped of blanks; `check` may refuse the header, and each row has as many fields. Raises `ParameterError` for
    anything else, and for more than `most` rows.
    """
    content = read_bytes(path)
    if content.startswith(_PACKED):
        raise ParameterError(COMPRESSED)
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise ParameterError("it is not text in UTF-8; save it as UTF-8") from None
    if "\x00" in text:
        raise ParameterError("it has zero bytes: it is not text in UTF-8; save it as UTF-8")
    if _JSON.match(text):
        raise ParameterError("it begins as JSON, and must be CSV with a header")
    lines = (line for line in io.StringIO(text, newline=None) if not line.lstrip().startswith("#"))
    rows: list[list[str]] = []
    try:
        for fields in csv.reader(lines, skipinitialspace=True):
            row = [field.strip() for field in fields]
            if not any(row):  # a blank line, or one of separators alone, as spreadsheets write after the last row
                continue
            if rows and len(row) != len(rows[0]):
                raise ParameterError(uneven(len(rows), len(row), len(rows[0])))
            if len(rows) > most:
                raise ParameterError(f"at most {most:,} rows are allowed, got more")
            if not rows:
                check(row)
            rows.append(row)
    except csv.Error as error:
        raise ParameterError(f"row {max(len(rows), 1)} cannot be read as CSV: {error}") from None
    if not rows:
        raise ParameterError("the file is empty; it must have a header and at least one row")
    return rows[0], rows[1:]


def read_parquet(source: Path | bytes) -> pl.DataFrame:
    """Read a Parquet file, or its content, as a polars table; refuse it if it would decompress to too many bytes."""
    import polars as pl

    content = source if isinstance(source, bytes) else read_bytes(source)
    check_unpacked(content)
    try:
        return pl.read_parquet(content)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # a damaged file
        raise ParameterError(f"it cannot be read as Parquet: {(str(error).splitlines() or ['damaged'])[0]}") from None


def check_unpacked(content: bytes) -> None:
    """Raise `ParameterError` for a Parquet file that is damaged, or too large when decompressed according to its footer."""
    try:
        if len(content) < 12 or content[-4:] != b"PAR1":
            raise ValueError("it does not end as Parquet does")
        size = int.from_bytes(content[-8:-4], "little")
        if size > len(content) - 12:
            raise ValueError("its footer is longer than the file")
        values = unpacked = 0
        for held, packed in _columns(_Compact(content[-8 - size : -8]).struct()):
            values, unpacked = values + held, unpacked + packed
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise ParameterError(f"it cannot be read as Parquet: {error}") from None
    if values > MOST_VALUES or unpacked > MOST_UNPACKED:
        bound = f"at most {MOST_VALUES:,} values and {MOST_UNPACKED:,} bytes"
        raise ParameterError(f"a table must have {bound} when decompressed, got {values:,} and {unpacked:,}")


def _columns(footer: dict[int, Any]) -> Iterator[tuple[int, int]]:
    """Yield the number of values and decompressed bytes of each column chunk (row_groups/columns/meta_data of parquet.thrift)."""
    groups = footer.get(4, [])
    width = max((len(group[1]) for group in groups), default=0)
    yield max(footer.get(3, 0), sum(group.get(3, 0) for group in groups)) * min(width, 1), 0
    for group in groups:
        for chunk in group[1]:
            metadata = chunk[3]
            yield max(metadata[5], 0), max(metadata[6], 0)


class _Compact:
    """Reader of Thrift's compact protocol, as far as Parquet footers use it."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.depth = content, 0, 0

    def struct(self) -> dict[int, Any]:
        """Fields of a struct, by number."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("its footer is nested too deeply")
        fields: dict[int, Any] = {}
        number = 0
        while head := self.byte():
            number = number + (head >> 4) if head >> 4 else self.zigzag()
            fields[number] = self.value(head & 15)
        self.depth -= 1
        return fields

    def value(self, kind: int) -> Any:
        """Value of a type: 1 true, 2 false, 3 byte, 4 to 6 integers, 7 float, 8 bytes, 9 and 10 lists, 12 struct."""
        if kind in (1, 2):
            return kind == 1
        if kind in (4, 5, 6):
            return self.zigzag()
        if kind == 3:
            return self.byte()
        if kind == 7:
            return self.take(8)
        if kind == 8:
            return self.take(self.varint())
        if kind in (9, 10):
            head = self.byte()
            count = self.varint() if head >> 4 == 15 else head >> 4
            inner = 3 if head & 15 in (1, 2) else head & 15
            if count > len(self.content):
                raise ValueError("its footer has a list longer than itself")
            return [self.value(inner) for _ in range(count)]
        if kind == 12:
            return self.struct()
        raise ValueError(f"its footer has a value of unknown kind {kind}")

    def byte(self) -> int:
        """The next byte."""
        self.at += 1
        return self.content[self.at - 1]

    def take(self, count: int) -> bytes:
        """The next `count` bytes."""
        self.at += count
        if self.at > len(self.content):
            raise ValueError("its footer is cut off")
        return self.content[self.at - count : self.at]

    def varint(self) -> int:
        """Unsigned integer with 7 bits per byte (LEB128)."""
        number, shift = 0, 0
        while True:
            byte = self.byte()
            number |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return number
            if shift > 70:
                raise ValueError("its footer has a number too long")

    def zigzag(self) -> int:
        """Signed integer in zigzag encoding."""
        number = self.varint()
        return (number >> 1) ^ -(number & 1)
