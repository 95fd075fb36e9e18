"""Files and folders that are there whole or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".tmp"


@contextlib.contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A place beside `path` to write a file or a folder to, put there in the end; nothing is left where that fails.

    Folders above it are made.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with beside(path) as part:
        yield part
        part.replace(path)


@contextlib.contextmanager
def beside(path: Path) -> Iterator[Path]:
    """A place beside `path` that is empty in the end."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        yield part
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Write a text file; its path."""
    with whole(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file into a folder that is there; its path."""
    with beside(path) as part:
        part.write_bytes(content)
        return part.replace(path)
