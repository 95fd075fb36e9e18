"""What of many cases is drawn in the quick tier, and what in the slow one alone."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

import pytest
from hypothesis import settings


def examples(quick: int) -> settings:
    """So few examples in the quick tier, where they are the same every time; in the thorough profile as many as that says."""
    own = settings.default
    return settings(max_examples=quick if own.derandomize else max(quick, own.max_examples))


def crossed(rows: Iterable[Any], columns: Iterable[Any], few: Collection[Any]) -> list[Any]:
    """Pairs of both: each row with the first column, and `few` rows with every column; the other pairs are of the slow tier."""
    rows, columns = list(rows), list(columns)
    assert {*few} <= {*rows}
    return [
        pytest.param(row, column, marks=() if column == columns[0] or row in few else pytest.mark.slow)
        for column in columns for row in rows
    ]  # fmt: skip
