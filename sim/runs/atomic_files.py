"""Files that are whole or not there, and directories that belong to one run at a time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from model.base import whole_files
from model.base.bounded_files import check_regular
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import polars as pl


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a temporary file beside `path`, then put it in its place; leave nothing behind where that fails."""
    with whole_files.whole(path) as temporary:
        write(temporary)


def parquet(frame: pl.DataFrame) -> Callable[[Path], object]:
    """What writes a table as Parquet: by our own hand, so that a disk that is full is said to be."""

    def write(path: Path) -> object:
        content = io.BytesIO()
        frame.write_parquet(content)
        return path.write_bytes(content.getbuffer())

    return write


def write_hashed(path: Path, write: Callable[[Path], object]) -> Path:
    """As `write_whole`, under the name of `path` with a hash of the file's content at its end; returns that path."""
    with whole_files.beside(path) as temporary:
        write(temporary)
        return temporary.replace(path.with_name(f"{path.stem}-{_digest(temporary)}{path.suffix}"))


def intact(path: Path) -> bool:
    """Whether a file written by `write_hashed` still is what was written."""
    try:
        check_regular(path)
        return path.stem.rpartition("-")[2] == _digest(path)
    except (OSError, ParameterError):
        return False


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[bool]:
    """Hold a directory against other processes that ask for it so; False where another one has it. It ends with the process."""
    try:
        import fcntl
    except ImportError:  # no such locks on this system: files are whole all the same
        yield True
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        free = True
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            free = False
        except OSError:
            pass  # a file system without locks
        yield free
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
