"""Files that are written completely or not at all, and directories locked for one run at a time."""

from __future__ import annotations

import contextlib
import hashlib
import io
import os
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from model.base import whole_files
from model.base.bounded_files import check_regular
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import polars as pl

Task = TypeVar("Task", bound=Hashable)


def write_whole(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` make a temporary file in the folder of `path`, then rename it to `path`; leave no file if that fails."""
    with whole_files.atomic_path(path) as temporary:
        write(temporary)


def parquet(frame: pl.DataFrame) -> Callable[[Path], object]:
    """Return a function that writes a table as Parquet, through Python, so that a full disk raises OSError."""

    return lambda path: path.write_bytes(parquet_bytes(frame))


def write_hashed(path: Path, write: Callable[[Path], object]) -> Path:
    """Write as `write_whole` does, with a hash of the content added to the file name; return the path."""
    with whole_files.temporary_path(path) as temporary:
        write(temporary)
        return temporary.replace(path.with_name(f"{path.stem}-{_digest(temporary)}{path.suffix}"))


def write_content(path: Path, content: bytes) -> Path:
    """Write bytes as `write_hashed` does."""
    return write_hashed(path, lambda temporary: temporary.write_bytes(content))


def is_unchanged(path: Path) -> bool:
    """Return whether a file written by `write_hashed` is unchanged."""
    try:
        check_regular(path)
        return path.stem.rpartition("-")[2] == _digest(path)
    except (OSError, ParameterError):
        return False


def intact(files: Mapping[Task, Path]) -> dict[Task, Path]:
    """Find the files written by `write_hashed` that are unchanged, of tasks with the paths given to it; remove damaged ones."""
    wanted = {path.stem: task for task, path in files.items()}
    found: dict[Task, Path] = {}
    for folder, ending in {(path.parent, path.suffix) for path in files.values()}:
        for path in sorted(folder.glob(f"*{ending}")):
            task = wanted.get(path.stem.rpartition("-")[0])
            if task is None or task in found:
                continue
            if is_unchanged(path):
                found[task] = path
            else:
                path.unlink(missing_ok=True)
    return found


def parquet_bytes(frame: pl.DataFrame) -> bytes:
    """Content of a Parquet file with a table."""
    content = io.BytesIO()
    frame.write_parquet(content)
    return content.getvalue()


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
