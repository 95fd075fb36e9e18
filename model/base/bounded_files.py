"""Reads of files that somebody else may have written: regular files alone, of a bounded size, unpacked too.

A pipe or a device would be waited for or read for ever, and a file of a few kilobytes may unpack to more than the memory. What a
file holds is looked at here no further than that; nothing of it is run.
"""

from __future__ import annotations

import io
import json
import math
import os
import stat
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from model.base.checks import ParameterError

if TYPE_CHECKING:
    import polars as pl

MOST_BYTES = 2**28
"""Of a file that is read whole [bytes]: a hundred times the largest that the project has met."""
MOST_TOML = 2**22
"""Of a file of settings [bytes], whose parser is slow."""
MOST_VALUES = 2 * 10**8
"""Of a table, lists of lists counted element by element; at 8 bytes each they take 1.6 GB."""
MOST_UNPACKED = 2**31
"""Of a table's columns as they are unpacked [bytes]."""
DEEPEST = 64
"""Brackets within brackets."""
_PACKED = (b"\x1f\x8b", b"\x28\xb5\x2f\xfd", b"BZh", b"\xfd7zXZ", b"PK\x03\x04", b"\x78\x01", b"\x78\x5e", b"\x78\x9c", b"\x78\xda")
"""How compressed files begin: gzip, zstandard, bzip2, xz, zip, zlib."""


def read_bytes(path: str | Path, most: int = MOST_BYTES) -> bytes:
    """The content of a regular file of at most so many bytes. `OSError` where there is none, or it cannot be opened."""
    # Without waiting: a pipe that nobody writes to would not even open.
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0) | getattr(os, "O_CLOEXEC", 0))
    with open(handle, "rb") as file:
        _check_kind(Path(path), os.fstat(handle), most)
        content = file.read(most + 1)
    if len(content) > most:  # it grows while it is read
        _refuse_size(Path(path), len(content), most)
    return content


def check_regular(path: str | Path, most: int | None = None) -> None:
    """Refuse what is there and is no regular file, or a larger one, before a library opens it by its path."""
    _check_kind(Path(path), os.stat(path), most)


def stamp(path: str | Path) -> tuple[int, int] | None:
    """What is another once a file has been written again; None where it cannot be looked at."""
    try:
        found = os.stat(path)
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def read_text(path: str | Path, most: int = MOST_BYTES) -> str:
    """The text of a file in UTF-8, with or without a byte-order mark; its lines end in a line feed, whatever ended them."""
    return io.TextIOWrapper(io.BytesIO(read_bytes(path, most)), encoding="utf-8-sig").read()


def read_page(path: str | Path) -> str:
    """The text of a page, of which a part is to be written anew; empty where there is none yet."""
    try:
        return read_text(path)
    except FileNotFoundError:
        return ""
    except UnicodeDecodeError as error:
        said = f"{Path(path).name} must be text in UTF-8, and is not (byte {error.start + 1})"
        raise ParameterError(f"{said}; name another page, or remove it") from None


def _check_kind(path: Path, found: os.stat_result, most: int | None) -> None:
    if stat.S_ISDIR(found.st_mode):
        raise ParameterError(f"{path.name} is a folder, and must be a file")
    if not stat.S_ISREG(found.st_mode):
        raise ParameterError(f"{path.name} must be a regular file, got a pipe, a socket or a device; write it to a file first")
    if most is not None and found.st_size > most:
        _refuse_size(path, found.st_size, most)


def _refuse_size(path: Path, size: int, most: int) -> NoReturn:
    raise ParameterError(f"{path.name} must have at most {most:,} bytes, got {size:,}")


# --- JSON and TOML ---


def json_of(text: str | bytes, *, strict: bool = True) -> Any:
    """What JSON says, with no brackets deeper than anybody writes; and in the strict sense no NaN and no Infinity.

    Without `strict` these are read as numbers, for callers that refuse them where they stand.

    >>> json_of('[1, NaN]')
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: NaN is not JSON; write null where there is no value
    """
    try:
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_float) if strict else json.loads(text)
    except RecursionError:
        raise ParameterError("brackets are nested too deeply") from None
    _check_depth(found)
    return found


def _float(text: str) -> float:
    found = float(text)
    if not math.isfinite(found):
        raise ParameterError(f"the number {text[:40]} is beyond every float")
    return found


def _refuse_constant(word: str) -> NoReturn:
    raise ParameterError(f"{word} is not JSON; write null where there is no value")


def _check_depth(found: Any) -> None:
    level = [found]
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
    """What TOML says; `ValueError` where it is none."""
    try:
        found = tomllib.loads(text)
    except RecursionError:
        raise ParameterError("brackets nested too deeply") from None
    _check_depth(found)
    return found


# --- tables ---


def read_csv(path: Path, **how: Any) -> pl.DataFrame:
    """A CSV file as a table (polars), by its very name and not unpacked, as it would be by itself."""
    import polars as pl

    content = read_bytes(path)
    if content.startswith(_PACKED):
        raise ParameterError("it is compressed; unpack it first")
    try:
        return pl.read_csv(content, **how)
    except pl.exceptions.NoDataError:
        raise ParameterError("the file is empty; it must have a header and at least one row") from None
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise ParameterError(f"it cannot be read as CSV: {(str(error).splitlines() or ['damaged'])[0]}") from None


def read_parquet(source: Path | bytes) -> pl.DataFrame:
    """A Parquet file, or its content, as a table, if that is not larger unpacked than memory has room for."""
    import polars as pl

    content = source if isinstance(source, bytes) else read_bytes(source)
    check_unpacked(content)
    try:
        return pl.read_parquet(content)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:  # whatever somebody has made of it
        raise ParameterError(f"it cannot be read as Parquet: {(str(error).splitlines() or ['damaged'])[0]}") from None


def check_unpacked(content: bytes) -> None:
    """Refuse a Parquet file by what its footer says of its columns, which may be packed a thousandfold."""
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
        raise ParameterError(f"a table must have {bound} when it is unpacked, got {values:,} and {unpacked:,}")


def _columns(footer: dict[int, Any]) -> Iterator[tuple[int, int]]:
    """Values and unpacked bytes of each chunk of a column: FileMetaData of parquet.thrift, row_groups, columns, meta_data."""
    groups = footer.get(4, [])
    width = max((len(group[1]) for group in groups), default=0)
    yield max(footer.get(3, 0), sum(group.get(3, 0) for group in groups)) * min(width, 1), 0
    for group in groups:
        for chunk in group[1]:
            said = chunk[3]
            yield max(said[5], 0), max(said[6], 0)


class _Compact:
    """The compact protocol of Thrift, as far as footers of Parquet use it."""

    def __init__(self, content: bytes) -> None:
        self.content, self.at, self.depth = content, 0, 0

    def struct(self) -> dict[int, Any]:
        """Fields by their numbers."""
        self.depth += 1
        if self.depth > DEEPEST:
            raise ValueError("its footer is nested too deeply")
        found: dict[int, Any] = {}
        field = 0
        while head := self.byte():
            field = field + (head >> 4) if head >> 4 else self.zigzag()
            found[field] = self.value(head & 15)
        self.depth -= 1
        return found

    def value(self, kind: int) -> Any:
        """A value of a kind: 1 and 2 are truth itself, 3 a byte, 4 to 6 whole numbers, 7 a float, 8 bytes, 9 and 10 lists."""
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
        """The next so many bytes."""
        self.at += count
        if self.at > len(self.content):
            raise ValueError("its footer is cut off")
        return self.content[self.at - count : self.at]

    def varint(self) -> int:
        """A whole number in sevens of bits."""
        found, shift = 0, 0
        while True:
            byte = self.byte()
            found |= (byte & 127) << shift
            shift += 7
            if byte < 128:
                return found
            if shift > 70:
                raise ValueError("its footer has a number too long")

    def zigzag(self) -> int:
        """A whole number with a sign."""
        found = self.varint()
        return (found >> 1) ^ -(found & 1)
