"""Figures in an engine's output: numbers found by their label, with the rounding of their printed digits.

Lines are parsed by label and never by place, because engines changed the order of their fields.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import takewhile
from typing import Any, NamedTuple

from model.base import checks
from model.base.checks import ParameterError
from model.logs.acceptance_record import MOST_COUNT, MOST_POSITIONS

FINEST = 5e-5
"""Largest assumed rounding of a number in JSON, which engines write with all digits."""


class Printed(NamedTuple):
    """A printed number, and half a unit of its last digit."""

    value: float
    half: float = 0.0


_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)(e[-+]?\d+)?|[-+]?(nan|inf|infinity)", re.ASCII | re.IGNORECASE)
_THOUSANDS = re.compile(r",\d{3}(?!\d)")


@lru_cache(maxsize=256)
def _pattern(label: str) -> re.Pattern[str]:
    return re.compile(rf"(?<![\w#]){label}\s*[:=]\s*(?P<number>[^\s,;)|]*)\s*(?P<percent>%?)", re.IGNORECASE)


def after(text: str, label: str) -> str | None:
    """Text of the number after a label (a regular expression), with its per cent sign; None without the label."""
    found = _pattern(label).search(text)
    if found is not None and _THOUSANDS.match(text, found.end("number")):
        raise ParameterError(f"{found[0].strip()}... must be a number without separators of thousands; remove them")
    return None if found is None else found["number"].rstrip(".") + found["percent"]


def printed(name: str, number: str) -> Printed:
    """Parse a number; a per cent sign divides it by 100.

    >>> printed("rate", "82.7%")
    Printed(value=0.827, half=0.0005)
    """
    percent, digits = number.endswith("%"), number.rstrip("%")
    if _NUMBER.fullmatch(digits) is None:
        raise ParameterError(f"{name} must be a number, got {checks.shown(number)}")
    value = float(digits)
    if not math.isfinite(value):
        raise ParameterError(f"{name} must be a finite number, got {number if len(number) < 40 else checks.shown(number)}")
    whole, _, decimals = digits.lower().partition(".")
    exact = "e" in whole or "e" in decimals
    unit = 0.0 if exact else 10.0 ** -len(decimals)
    scale = 100 if percent else 1
    return Printed(value / scale, unit / 2 / scale)


def number_of(text: str, label: str, name: str = "") -> Printed | None:
    """Number after a label; None without the label."""
    found = after(text, label)
    return None if found is None else printed(name or label, found)


def count_of(text: str, label: str, name: str = "") -> int | None:
    """Whole number of at least 0 after a label; None without the label."""
    found = after(text, label)
    return None if found is None else count(name or label, found)


def count(name: str, value: object) -> int:
    """Return a count as a whole number; raise `ParameterError` for anything else, and for negative counts."""
    if isinstance(value, str):
        if _NUMBER.fullmatch(value) is None:
            raise ParameterError(f"{name} must be a whole number, got {checks.shown(value)}")
        value = float(value)
    if isinstance(value, float) and math.isfinite(value) and value == math.floor(value):
        value = int(value)
    checks.whole(name, value, 0)
    assert isinstance(value, int)
    if value > MOST_COUNT:
        raise ParameterError(f"{name} must be at most {MOST_COUNT}, got {checks.shown(value)}")
    return value


def share(name: str, value: Printed, most: float = 1.0) -> Printed:
    """Return a rate; raise `ParameterError` if it is outside 0 and 1."""
    if not 0 <= value.value <= most:
        raise ParameterError(f"{name} must be between 0 and {most:g} (100 per cent), got {value.value:g}")
    return value


def length(name: str, value: Printed) -> Printed:
    """Return a mean acceptance length; raise `ParameterError` if it is below 1."""
    if not 1 - value.half <= value.value <= MOST_POSITIONS + 1:
        raise ParameterError(f"{name} must be between 1 and {MOST_POSITIONS + 1}, got {value.value:g}")
    return Printed(max(value.value, 1.0), value.half)


def shares_after(text: str, label: str, name: str) -> list[Printed] | None:
    """Rates in a comma-separated list after a label; the list ends at the first word."""
    found = re.search(rf"{label}\s*[:=]\s*\(?(?P<list>[^)]*)", text, re.IGNORECASE)
    if found is None:
        return None
    parts = (each.strip().rstrip(".") for each in found["list"].split(","))
    numbers = list(takewhile(lambda part: not re.match(r"(?!nan|inf)[A-Za-z#]|$", part, re.IGNORECASE), parts))
    if len(numbers) > MOST_POSITIONS:
        raise ParameterError(f"{name} must have at most {MOST_POSITIONS} rates, got {len(numbers)}")
    return [share(name, printed(name, each)) for each in numbers]


# --- JSON ---


def json_number(name: str, value: object) -> Printed:
    """Number of a JSON document; its rounding is that of its digits, or `FINEST` if that is finer."""
    checks.number(name, value)
    assert isinstance(value, int | float)
    decimals = len(repr(float(value)).partition(".")[2]) if "e" not in repr(float(value)) else 20
    return Printed(float(value), min(0.5 * 10.0**-decimals, FINEST))


def optional(found: Mapping[str, Any], *names: str) -> Any:
    """Value of the first of these keys that is there and not null."""
    return next((found[name] for name in names if found.get(name) is not None), None)


def json_count(found: Mapping[str, Any], *names: str) -> int | None:
    """Count under the first of these keys; None if there is none."""
    value = optional(found, *names)
    return None if value is None else count(names[0], value)


def json_counts(name: str, values: object) -> list[int]:
    """List of counts; a sparse map from index to count is filled with zeros."""
    if isinstance(values, Mapping):
        indices = {count(f"index of {name}", key): count(name, value) for key, value in values.items()}
        if any(index > MOST_POSITIONS for index in indices):
            raise ParameterError(f"index of {name} must be at most {MOST_POSITIONS}, got {max(indices)}")
        return [indices.get(index, 0) for index in range(max(indices, default=-1) + 1)]
    if not isinstance(values, Sequence) or isinstance(values, str) or len(values) > MOST_POSITIONS + 1:
        raise ParameterError(f"{name} must be a list of at most {MOST_POSITIONS + 1} counts, got {checks.shown(values)}")
    return [count(name, value) for value in values]


def positive(name: str, value: object) -> float | None:
    """Time or rate of a JSON document or a label; None where it is null or 0."""
    if value is None:
        return None
    found = value.value if isinstance(value, Printed) else value
    checks.number(name, found, 0)
    return float(found) or None  # type: ignore[arg-type]
