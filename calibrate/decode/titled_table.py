"""Tables of measured rates with a title and notes, as text and for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

NONE = float("nan")
"""A cell without a number."""


@dataclass(frozen=True)
class RateTable:
    """A table with a title and notes."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Any, ...], ...]
    notes: tuple[str, ...] = ()
    """Sentences printed below the rows."""
    most: int | None = None
    """Most rows to print; JSON has all."""

    def document(self) -> dict[str, Any]:
        """Return the table for JSON; numbers that are not finite are null."""
        clean = [[None if isinstance(value, float) and not np.isfinite(value) else value for value in row] for row in self.rows]
        found = {"title": self.title, "rows": [dict(zip(self.columns, row, strict=True)) for row in clean]}
        return found | ({"notes": [*self.notes]} if self.notes else {})

    def lines(self) -> Iterator[str]:
        """Lines of the table as text: title, aligned columns, notes."""
        cells = [self.columns, *[tuple(map(_shown, row)) for row in self.rows[: self.most]]]
        widths = [max(len(row[column]) for row in cells) for column in range(len(self.columns))]
        yield self.title
        for row in cells if self.rows else ():
            yield "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True))
        if len(self.rows) >= len(cells):
            yield f"... and {len(self.rows) - len(cells) + 1} more (--json lists all)"
        yield from self.notes


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return "-" if not np.isfinite(value) else f"{value:.4f}" if abs(value) < 10 else f"{value:.2f}"
    return str(value)
