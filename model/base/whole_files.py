"""Atomic writes of files and folders: complete or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

TEMPORARY = ".tmp"


@contextlib.contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Temporary path in the folder of `path` for a file or folder that is moved to `path` at the end, or removed on failure.

    Parent folders are created.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with temporary_path(path) as part:
        yield part
        part.replace(path)


@contextlib.contextmanager
def temporary_path(path: Path) -> Iterator[Path]:
    """Temporary path in the folder of `path`; anything left there is removed at the end."""
    part = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}{TEMPORARY}")
    try:
        yield part
    finally:
        if part.is_dir():
            shutil.rmtree(part, ignore_errors=True)
        else:
            part.unlink(missing_ok=True)


def write_text(path: Path, text: str) -> Path:
    """Write a text file and return its path."""
    with atomic_path(path) as part:
        part.write_text(text, encoding="utf-8")
    return path


def write_bytes(path: Path, content: bytes) -> Path:
    """Write a file of bytes and return its path."""
    with atomic_path(path) as part:
        part.write_bytes(content)
    return path
