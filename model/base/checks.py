"""User errors with name, value, bound and remedy, and the checks that raise them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterable, Mapping
from typing import NoReturn

import numpy as np
from numpy.typing import ArrayLike, NDArray

from model.base import renamed_keys

MAX_LAYERS, MAX_TOKENS, MAX_CANDIDATES, MAX_UNITS = 10_000, 1_000_000, 1_000, 100_000
"""Upper bounds far beyond any model or cluster in use: larger numbers are typing errors and would exhaust the memory."""


class ParameterError(ValueError):
    """An invalid value given by the user; the message is a complete single line that needs no traceback.

    >>> print(ParameterError("column a" + chr(13) + "b is missing"))
    column a b is missing
    """

    def __init__(self, message: object = "") -> None:
        super().__init__(" ".join(str(message).splitlines()))  # quoted values may contain any kind of line end


class TableError(ParameterError):
    """An error about a table or one of its keys; `rest` follows the table's name, which the caller may replace.

    >>> print(TableError("outcomes", ".head is required by ppd-table-2"))
    outcomes.head is required by ppd-table-2
    """

    def __init__(self, table: str, rest: str) -> None:
        super().__init__(f"{table}{rest}")
        self.table, self.rest = table, rest

    def __reduce__(self) -> tuple[type[TableError], tuple[str, str]]:
        return TableError, (self.table, self.rest)  # workers pickle it


MOST_LISTED, FEW = 450, 8
"""Characters of known names that a message lists, and the number of similar names that it lists if there are more."""


def nearest(word: str, known: Iterable[str]) -> str:
    """Clause of a message about an unknown word: the new name of a renamed word, or the closest known word and all known words.

    >>> nearest("canditates", ["candidates", "layers"])
    'did you mean candidates? known: candidates, layers'
    >>> nearest("ways", ["busy", "tensor_parallel"])
    'it is now tensor_parallel'
    >>> nearest("item 7x", [f"item {number}" for number in range(100)])
    'did you mean item 7? known: item 7, item 75, item 76, item 77, item 78, item 79, item 87, item 97 and 92 others'
    """
    names = sorted(known)
    if (new := renamed_keys.current_name(word, names)) is not None:
        return f"it is now {new}"
    close = [each for each in names if each.lower() == word.lower()] or difflib.get_close_matches(word, names, n=1, cutoff=0.5)
    listed = ", ".join(names)
    if len(listed) > MOST_LISTED:
        similar = sorted(difflib.get_close_matches(word, names, n=FEW, cutoff=0.0))
        listed = f"{', '.join(similar)} and {len(names) - len(similar)} others"
    return (f"did you mean {close[0]}? " if close else "") + f"known: {listed}"


def unknown(kind: str, word: object, known: Iterable[str]) -> ParameterError:
    """Error about a name that is not among the known names.

    >>> print(unknown("form", "litteral", ["literal", "eager"]))
    unknown form 'litteral'; did you mean literal? known: eager, literal
    """
    return ParameterError(f"unknown {kind} {shown(word)}; {nearest(word if isinstance(word, str) else shown(word), known)}")


def shown(value: object) -> str:
    """Short representation of any value, for messages.

    >>> shown("two"), shown((1, 2)), shown(10**5000), len(shown("x" * 500))
    ("'two'", '[1, 2]', 'a whole number of about 5001 digits', 67)
    """
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a whole number of about {int(value.bit_length() * math.log10(2)) + 1} digits"
    if isinstance(value, tuple | list):
        text = f"[{', '.join(shown(each) for each in value[:20])}{', ...' if len(value) > 20 else ''}]"
    else:
        text = repr(value.item() if isinstance(value, np.generic) else value)
    return text if len(text) <= 200 else f"{text[:64]}..."


def differing_key(one: Mapping[str, object], other: Mapping[str, object]) -> str:
    """First key that only one of two unequal tables has, or whose values differ.

    >>> differing_key({"seed": 1, "units": None}, {"seed": 1})
    'units'
    """
    missing = object()
    return next(key for key in {**one, **other} if one.get(key, missing) != other.get(key, missing))


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Raise `ParameterError` unless the value is one of the known words."""
    names = tuple(known)
    if not isinstance(value, str) or value not in names:  # `in` would compare an array element by element
        raise unknown(name, value, names)


def whole(name: str, value: object, low: int, high: int | None = None, high_name: str = "") -> None:
    """Raise `ParameterError` unless the value is a whole number between `low` and `high`, both included.

    >>> whole("exit_layer", 41, 1, 40, "layers")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: exit_layer must be between 1 and layers=40, got 41
    """
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ParameterError(f"{name} must be a whole number, got {shown(value)}")
    if value < low or (high is not None and value > high):
        raise ParameterError(f"{name} must be {_range(low, high, high_name)}, got {shown(value)}")


def flag(name: str, value: object) -> None:
    """Raise `ParameterError` unless the value is true or false."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name} must be true or false, got {shown(value)}")


def number(name: str, value: object, low: float = -math.inf, high: float = math.inf) -> None:
    """Raise `ParameterError` unless the value is a finite number between `low` and `high`, both included."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.integer | np.floating):
        raise ParameterError(f"{name} must be a number, got {shown(value)}")
    try:
        finite = math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        finite = False
    if not finite or value < low or value > high:
        bound = _range(low, None if high == math.inf else high)
        also = "finite and " if not finite and high == math.inf != -low else ""
        raise ParameterError(f"{name} must be {also}{bound}, got {shown(value)}")


def array(name: str, values: ArrayLike, low: float = -math.inf, high: float = math.inf) -> NDArray[np.float64]:
    """Return `values` as a float array; raise `ParameterError` for the first element not finite or not in [low, high]."""
    try:
        result = np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):
        raise ParameterError(f"{name} must be numbers, got {shown(values)}") from None
    # Minimum and maximum need no temporary array; nan fails both comparisons.
    least, most = (result.min(), result.max()) if result.size else (0.0, 0.0)
    if result.size and not (least >= low and most <= high and math.isfinite(least) and math.isfinite(most)):
        bad = ~((result >= low) & (result <= high) & np.isfinite(result))
        _refuse(name, result, bad, _range(low, None if high == math.inf else high))
    return result


def _refuse(name: str, values: NDArray[np.float64], bad: NDArray[np.bool_], bound: str) -> NoReturn:
    where = tuple(int(i) for i in np.argwhere(bad)[0])
    index = f"[{', '.join(map(str, where))}]" if where else ""
    raise ParameterError(f"{name}{index} must be {bound}, got {values[where]}")


def whole_array(name: str, values: ArrayLike, low: int) -> NDArray[np.float64]:
    """Like `array`, for whole numbers of at least `low`; returns floats."""
    result = array(name, values, low)
    if np.asarray(values).dtype.kind not in "iu" and np.any(result != np.floor(result)):
        _refuse(name, result, result != np.floor(result), "a whole number")
    return result


def distributions(name: str, values: ArrayLike) -> NDArray[np.float64]:
    """Return `values` as a float array of distributions along the last axis, whose sums are 1 within 1e-6.

    >>> distributions("p", [[0.5, 0.5], [0.5, 0.43]])
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: p[1] must sum to 1, got 0.93
    """
    result = array(name, values, 0)
    if not result.shape or not result.shape[-1]:
        raise ParameterError(f"{name} must be a list of probabilities, got {shown(values)}")
    sums = np.asarray(result.sum(axis=-1))
    bad = np.abs(sums - 1) > 1e-6
    if bad.any():
        where = tuple(int(i) for i in np.argwhere(bad)[0])
        index = f"[{', '.join(map(str, where))}]" if where else ""
        raise ParameterError(f"{name}{index} must sum to 1, got {sums[where]:.6g}")
    return result


def _range(low: float, high: float | None, high_name: str = "") -> str:
    if high is None:
        return "a finite number" if low == -math.inf else f"at least {_plain(low)}"
    return f"between {_plain(low)} and {high_name + '=' if high_name else ''}{_plain(high)}"


def _plain(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"
