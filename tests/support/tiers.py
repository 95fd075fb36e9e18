"""Selection of test cases for the quick and the slow tier."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def cross_rows(rows: Iterable[Any], columns: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Pairs of rows and columns: each row with the first column, and `few` rows with every column; other pairs are slow."""
    rows, columns = list(rows), list(columns)
    assert {*few} <= {*rows}
    return [
        pytest.param(row, column, marks=() if column == columns[0] or row in few else pytest.mark.slow)
        for column in columns for row in rows
    ]  # fmt: skip


def examples(quick: int, thorough: int = 1000) -> int:
    """Number of examples of a property: `quick`, or `thorough` with --hypothesis-profile=thorough."""
    return thorough if settings.default is not None and settings.default.max_examples > 100 else quick
