"""Files that are written completely or not at all, and directories locked for one run at a time."""

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
    """Let `write` make a temporary file in the folder of `path`, then rename it to `path`; leave no file if that fails."""
    with whole_files.atomic_path(path) as temporary:
        write(temporary)


def parquet(frame: pl.DataFrame) -> Callable[[Path], object]:
    """Return a function that writes a table as Parquet, through Python, so that a full disk raises OSError."""

    def write(path: Path) -> object:
        content = io.BytesIO()
        frame.write_parquet(content)
        return path.write_bytes(content.getbuffer())

    return write


def write_hashed(path: Path, write: Callable[[Path], object]) -> Path:
    """Write as `write_whole` does, with a hash of the content added to the file name; return the path."""
    with whole_files.temporary_path(path) as temporary:
        write(temporary)
        return temporary.replace(path.with_name(f"{path.stem}-{_digest(temporary)}{path.suffix}"))


def is_unchanged(path: Path) -> bool:
    """Return whether a file written by `write_hashed` is unchanged."""
    try:
        check_regular(path)
        return path.stem.rpartition("-")[2] == _digest(path)
    except (OSError, ParameterError):
        return False


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[bool]:
    """Lock a directory until the block or the process ends; yield False if another process holds the lock."""
    try:
        import fcntl
    except ImportError:  # a system without such locks; files are still written completely
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
