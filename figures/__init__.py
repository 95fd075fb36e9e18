"""Draws stored rows: one file a figure, each with one function `draw`; `save` writes what it returns.

Nothing here simulates or keeps state: a figure is a function of the rows that it is given, and the same rows give the same bytes.
"""

from __future__ import annotations

import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from model import checks

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = ("png", "svg")


def save(figure: Figure, path: str | Path, formats: Sequence[str] = FORMATS) -> list[Path]:
    """Write a figure to `path`.png and `path`.svg (or to those of `formats`), and say where.

    Neither file holds a date, a version or a random name, and each appears whole or not at all.
    """
    from figures.style import house

    for name in formats:
        checks.one_of("figure format", name, FORMATS)
    paths = []
    for name in formats:
        target = Path(f"{path}.{name}")
        metadata = {"Software": None} if name == "png" else {"Date": None, "Creator": None}
        buffer = io.BytesIO()
        with house():
            figure.savefig(buffer, format=name, dpi=150, metadata=metadata)
        partial = target.with_name(f".{target.name}.{os.getpid()}.partial")
        try:
            partial.write_bytes(buffer.getvalue())
            os.replace(partial, target)
        except OSError as error:
            partial.unlink(missing_ok=True)
            raise checks.ParameterError(f"cannot write {target}: {error.strerror}") from None
        paths.append(target)
    return paths
