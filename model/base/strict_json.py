"""Standard JSON without NaN and Infinity, which many readers refuse.

The project writes all JSON with this module. Infinity becomes the string "inf", as in TOML; NaN (no value) becomes null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """Convert a value to one that standard JSON can represent.

    >>> plain({"rollback_threshold": float("inf"), "lengths": (3, 4), "speedup": float("nan")})
    {'rollback_threshold': 'inf', 'lengths': [3, 4], 'speedup': None}
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None if math.isnan(value) else str(float(value))
    if isinstance(value, str | int):
        return value
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    return value


def dumps(value: Any, indent: int | None = None, *, sort_keys: bool = False, separators: tuple[str, str] | None = None) -> str:
    """JSON text of a value; the options are those of `json.dumps`.

    >>> dumps([1.5, float("-inf"), float("nan")])
    '[1.5, "-inf", null]'
    """
    return json.dumps(plain(value), indent=indent, sort_keys=sort_keys, separators=separators, allow_nan=False)  # noqa: TID251
