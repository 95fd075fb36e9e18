"""JSON as its standard has it: no NaN and no Infinity, which many readers refuse.

All files and documents in JSON are written here. A parameter that is infinite is the text "inf", as TOML spells it; what has no
value (NaN) is null.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """A value as JSON can say it.

    >>> plain({"rollback_threshold": float("inf"), "lengths": (3, 4), "speedup": float("nan")})
    {'rollback_threshold': 'inf', 'lengths': [3, 4], 'speedup': None}
    """
    if isinstance(value, Mapping):
        return {key: plain(each) for key, each in value.items()}
    if isinstance(value, tuple | list):
        return [plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    return value


def dumps(value: Any, indent: int | None = None, *, sort_keys: bool = False, separators: tuple[str, str] | None = None) -> str:
    """The text of a document; `indent` and the others as of the standard library.

    >>> dumps([1.5, float("-inf"), float("nan")])
    '[1.5, "-inf", null]'
    """
    return json.dumps(plain(value), indent=indent, sort_keys=sort_keys, separators=separators, allow_nan=False)  # noqa: TID251
