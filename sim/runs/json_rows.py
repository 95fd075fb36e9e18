"""Rows of a table as JSON text, made column by column: much faster than from a dictionary per row, with the same result."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import polars as pl

from model.base import strict_json

INDENT = 2


def of_table(frame: pl.DataFrame, level: int = 0) -> str:
    """JSON text of a list with an object per row, equal to `strict_json.dumps(frame.to_dicts(), indent=2)`.

    Lines after the first are indented by `level` steps more.

    >>> print(of_table(pl.DataFrame({"speedup": [1.5, None], "view": ["formula", "paths"]})[:1]))
    [
      {
        "speedup": 1.5,
        "view": "formula"
      }
    ]
    """
    if not frame.height:
        return "[]"
    outer, inner = (" " * (INDENT * (level + more)) for more in (1, 2))
    lines: list[str] = []
    varying: list[list[str]] = []
    for column in frame:
        name, values = strict_json.dumps(column.name).replace("%", "%%"), _values(column, level + 2)
        if values.count(values[0]) == len(values):  # a value that all rows share becomes a part of the template
            lines.append(f"{inner}{name}: {values[0].replace('%', '%%')}")
        else:
            lines.append(f"{inner}{name}: %s")
            varying.append(values)
    template = ",\n".join(lines)
    template = f"{{\n{template}\n{outer}}}" if lines else "{}"
    rows = zip(*varying, strict=True) if varying else [()] * frame.height
    listed = f",\n{outer}".join([template % row for row in rows])
    return f"[\n{outer}{listed}\n{' ' * (INDENT * level)}]"


def document(content: Mapping[str, Any | pl.DataFrame]) -> str:
    """JSON text of an object; a value that is a table becomes the list of its rows.

    >>> print(document({"kind": "run", "results": pl.DataFrame({"point": [0]})}))
    {
      "kind": "run",
      "results": [
        {
          "point": 0
        }
      ]
    }
    """
    lines = []
    for name, value in content.items():
        text = of_table(value, 1) if isinstance(value, pl.DataFrame) else _indented(strict_json.dumps(value, indent=INDENT), 1)
        lines.append(f"{' ' * INDENT}{strict_json.dumps(name)}: {text}")
    return "{\n" + ",\n".join(lines) + "\n}" if lines else "{}"


def _values(column: pl.Series, level: int) -> list[str]:
    """JSON text of each value of a column."""
    values = column.to_list()
    if column.dtype.is_integer() or (column.dtype == pl.Float64 and column.is_finite().all()):  # `all` passes over nulls
        return ["null" if value is None else repr(value) for value in values]
    if column.dtype in (pl.String, pl.Boolean, pl.Null):
        known = {value: strict_json.dumps(value) for value in column.unique()}
        return [known[value] for value in values]
    return [_indented(strict_json.dumps(value, indent=INDENT), level) for value in values]


def _indented(text: str, level: int) -> str:
    """Indent the lines of a JSON text after the first; strings in it have no line breaks."""
    return text.replace("\n", "\n" + " " * (INDENT * level)) if "\n" in text else text
