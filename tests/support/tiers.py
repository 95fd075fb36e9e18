"""What of many cases is drawn in the quick tier, and what in the slow one alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def crossed(rows: Iterable[Any], columns: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Pairs of both: each row with the first column, and `few` rows with every column; the other pairs are of the slow tier."""
    rows, columns = list(rows), list(columns)
    assert {*few} <= {*rows}
    return [
        pytest.param(row, column, marks=() if column == columns[0] or row in few else pytest.mark.slow)
        for column in columns for row in rows
    ]  # fmt: skip


def examples(quick: int, thorough: int = 1000) -> int:
    """Examples of one property: `quick` in the quick tier; with --hypothesis-profile=thorough, `thorough`."""
    return thorough if settings.default is not None and settings.default.max_examples > 100 else quick
