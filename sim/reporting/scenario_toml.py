"""TOML text of a scenario's tables, so that a report holds all that its run needs.

>>> print(text_of({"scenario": {"name": "mine", "tokens": 8}, "method": [{"name": "ppd", "outcomes": {"match_rate": 0.5}}]}))
[scenario]
name = "mine"
tokens = 8
<BLANKLINE>
[[method]]
name = "ppd"
outcomes = { match_rate = 0.5 }
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from typing import Any

_BARE = re.compile(r"[A-Za-z0-9_-]+")
_SHORT = {"\b": "\\b", "\t": "\\t", "\n": "\\n", "\f": "\\f", "\r": "\\r", '"': '\\"', "\\": "\\\\"}


def text_of(tables: Mapping[str, Any]) -> str:
    """TOML text of a scenario; keys without a value are left out."""
    return "\n\n".join("\n".join(_lines(name, each)) for name, table in tables.items() for each in _each(table))


def _each(table: Any) -> list[tuple[str, Any]]:
    """Tables below one heading, with the brackets of the heading."""
    if isinstance(table, list) and table and all(isinstance(each, Mapping) for each in table):
        return [("[[{}]]", each) for each in table]
    return [("[{}]" if isinstance(table, Mapping) else "", table)]


def _lines(name: str, headed: tuple[str, Any]) -> Iterator[str]:
    heading, table = headed
    if not heading:
        yield f"{_key(name)} = {_value(table)}"
        return
    yield heading.format(_key(name))
    yield from (f"{_key(key)} = {_value(value)}" for key, value in table.items() if value is not None)


def _key(key: object) -> str:
    return str(key) if _BARE.fullmatch(str(key)) else _string(str(key))


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, Mapping):
        inner = ", ".join(f"{_key(key)} = {_value(each)}" for key, each in value.items() if each is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(each) for each in value if each is not None)}]"
    return str(value) if isinstance(value, int) else _string(str(value))


def _string(text: str) -> str:
    """String in quotes; control characters are escaped."""
    return '"' + "".join(_SHORT.get(each) or (each if each.isprintable() else _escaped(each)) for each in text) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
