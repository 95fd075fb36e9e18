"""Values of options as users write them: numbers, times with a unit, and acceptance with its uncertainty or cases."""

from __future__ import annotations

import re
from typing import Any

from model.advice import acceptance_draws
from model.advice.acceptance_draws import AcceptanceDraws
from model.base import checks
from model.base.checks import ParameterError


def acceptance_of(given: Any, seed: int = 0) -> list[AcceptanceDraws]:
    """Cases of acceptance: a number, a pair (an uncertain value), a list of cases, or text such as 0.6..0.7 or 0.6,0.7.

    >>> [each.text for each in acceptance_of("0.6..0.7,0.8")]
    ['0.6 to 0.7', '0.8']
    """
    if isinstance(given, str):
        cases: list[Any] = []
        for part in given.split(","):
            ends = part.split("..")
            try:
                numbers = [float(each) for each in ends]
            except ValueError:
                numbers = []
            if len(numbers) not in (1, 2):
                raise ParameterError(
                    f"acceptance must be a number, a range such as 0.6..0.7, or cases such as 0.6,0.7, got {checks.shown(given)}"
                )
            cases.append(numbers[0] if len(numbers) == 1 else tuple(numbers))
    elif isinstance(given, tuple):
        cases = [given]
    else:
        cases = list(given) if isinstance(given, list) else [given]
    found = []
    for case in cases:
        if isinstance(case, tuple) and len(case) != 2:
            raise ParameterError(f"an uncertain acceptance must be (low, high), got {checks.shown(case)}")
        found.append(acceptance_draws.constant(*case, seed=seed) if isinstance(case, tuple) else acceptance_draws.constant(case))
    if not found:
        raise ParameterError("acceptance must have at least one case, got none")
    return found


def range_of(name: str, given: Any) -> tuple[float, float | None]:
    """A number, or both ends of an uncertain one: 0.5, a pair, or text such as 0.5..0.6.

    >>> range_of("match_rate", "0.5..0.6"), range_of("match_rate", 0.5)
    ((0.5, 0.6), (0.5, None))
    """
    ends = tuple(given.split("..")) if isinstance(given, str) else given if isinstance(given, tuple) else (given,)
    try:
        found = [float(each) for each in ends if not isinstance(each, bool)]
    except (TypeError, ValueError):
        found = []
    if len(found) != len(ends) or len(found) not in (1, 2):
        raise ParameterError(f"{name} must be a number, or a range such as 0.5..0.6, got {checks.shown(given)}")
    return found[0], found[1] if len(found) == 2 else None


def numbers(name: str, text: str | None, kind: type) -> tuple[Any, ...] | None:
    """Comma-separated numbers of an option, or None.

    >>> numbers("batch", "1, 8", int), numbers("batch", None, int)
    ((1, 8), None)
    """
    if text is None:
        return None
    try:
        return tuple(kind(each) for each in text.split(","))
    except ValueError:
        what = "whole numbers, such as 1,8,64" if kind is int else "numbers, such as 0.8,0.7,0.6"
        raise ParameterError(f"{name} must be comma-separated {what}, got {checks.shown(text)}") from None


def positions(name: str, text: str | None) -> tuple[int, ...] | None:
    """Comma-separated numbers of positions, where k means 1,024, or None.

    >>> positions("contexts", "1k, 8k,500"), positions("contexts", None)
    ((1024, 8192, 500), None)
    """
    if text is None:
        return None
    found = [re.fullmatch(r"\s*([0-9]{1,12})(k?)\s*", each, re.IGNORECASE) for each in text.split(",")]
    if not all(found):
        raise ParameterError(f"{name} must be comma-separated whole numbers, such as 1k,8k,64k (k: 1024), got {checks.shown(text)}")
    return tuple(int(each[1]) * (1024 if each[2] else 1) for each in found if each is not None)


def rank_table(name: str, text: str | None) -> tuple[tuple[float, ...], ...] | None:
    """Rates by rank, separated by commas, for each depth, separated by slashes, or None.

    >>> rank_table("rank_rates", "0.6,0.2/0.5,0.2"), rank_table("rank_rates", None)
    (((0.6, 0.2), (0.5, 0.2)), None)
    """
    if text is None:
        return None
    try:
        return tuple(tuple(float(each) for each in row.split(",")) for row in text.split("/"))
    except ValueError:
        what = "comma-separated rates by rank, such as 0.6,0.2,0.1, and a slash between depths"
        raise ParameterError(f"{name} must be {what}, got {checks.shown(text)}") from None


def single(values: tuple[int, ...] | None) -> int | tuple[int, ...] | None:
    """The only one of several values, or all of them.

    >>> single((3,)), single((0, 3)), single(None)
    (3, (0, 3), None)
    """
    return values[0] if values is not None and len(values) == 1 else values


def milliseconds(name: str, text: str | None) -> float | None:
    """A time with its unit, in milliseconds, or None.

    >>> milliseconds("slo_tpot", "20ms"), milliseconds("slo_tpot", "0.02 s")
    (20.0, 20.0)
    """
    if text is None:
        return None
    found = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*(ms|s)\s*", text)
    if found is None or float(found[1]) <= 0:
        raise ParameterError(f"{name} must be a time above 0 with its unit, such as 20ms, got {checks.shown(text)}")
    return float(found[1]) * (1e3 if found[2] == "s" else 1.0)
