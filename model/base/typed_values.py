"""Values of files against the types that they are declared with: one look when a file is read, so that nothing later has to.

Kinds are written as Python writes them: `str`, `int`, `float` (finite, and whole numbers too), `bool`, `None`, `Any`, unions,
`list[X]`, `dict[str, X]`, and a `TypedDict` for a table of keys, whose further keys are left alone.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from model.base import checks
from model.base.checks import ParameterError

_SAID = {
    str: "a text", int: "a whole number", float: "a finite number", bool: "true or false", list: "a list", dict: "a table of keys",
    type(None): "nothing",
}  # fmt: skip


def check(value: Any, kind: Any, where: str) -> None:
    """Refuse a value that is not of a kind, naming the innermost place that is not.

    >>> check({"seconds": [1.0, "2"]}, dict[str, list[float]], "about")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: about.seconds[1] must be a finite number, got '2'
    """
    kind, origin, inner = _taken_apart(kind)
    if kind is Any:
        return
    if origin in (Union, types.UnionType):
        if not any(_shallow(value, each) for each in inner):
            raise _wrong(where, " or ".join(_said(each) for each in inner), value)
        check(value, next(each for each in inner if _shallow(value, each)), where)
        return
    if not _shallow(value, kind):
        raise _wrong(where, _said(kind), value)
    if is_typeddict(kind):
        hints = _hints(kind)
        for key in sorted(key for key, each in hints.items() if key not in value and get_origin(each) is not NotRequired):
            raise ParameterError(f"{where}.{key} is missing" if where else f"{key} is missing")
        for key in hints.keys() & {*value}:
            check(value[key], hints[key], f"{where}.{key}" if where else key)
    elif origin is list and inner:
        if {*map(type, value)} <= _PLAIN.get(inner[0], frozenset()):  # most lists are of tokens, and long
            return
        for index, each in enumerate(value):
            check(each, inner[0], f"{where}[{index}]")
    elif origin is dict and inner:
        for key, each in value.items():
            check(each, inner[1], f"{where}.{key}" if where else key)


_PLAIN: dict[Any, frozenset[type]] = {of: frozenset({of}) for of in (int, str, bool)}
"""Kinds of which whatever has that type is one; a number may be NaN."""


@functools.cache
def _taken_apart(kind: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """A kind as it is wherever a key is there, what it is made with, and of what."""
    if get_origin(kind) is NotRequired:
        kind = get_args(kind)[0]
    return kind, get_origin(kind) or kind, get_args(kind)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """The kinds of a table's keys; its annotations are texts: `__required_keys__` knows nothing of them."""
    return get_type_hints(kind, include_extras=True)


def _shallow(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind, whatever is in it."""
    if kind is Any:
        return True
    of = _made_with(kind)
    if of is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
    return isinstance(value, of) and (of is bool or not isinstance(value, bool))


@functools.cache
def _made_with(kind: Any) -> Any:
    """The type of a value of a kind; a table of keys is a dict."""
    return dict if is_typeddict(kind) else get_origin(kind) or kind


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _said(kind: Any) -> str:
    return _SAID[_made_with(kind)]


def _wrong(where: str, bound: str, value: Any) -> ParameterError:
    return ParameterError(f"{where} must be {bound}, got {'nothing' if value is None else checks.shown(value)}")


# --- columns of tables ---


def check_columns(table: Any, kinds: dict[str, Any], nullable: frozenset[str] = frozenset()) -> None:
    """Refuse columns of a table (polars) that are missing, of another kind, or have a value that is not there; rows count from 1.

    Kinds are `str`, `int`, `float`, lists of these, and `list[dict[str, Any]]`, whose fields a caller looks at.
    """
    for name, kind in kinds.items():
        if name not in table.columns:
            raise ParameterError(f"column {name} is missing; the table has {checks.shown(table.columns)}")
        column = table[name]
        if not _holds(column.dtype, kind, empty=not column.len() or column.null_count() == column.len()):
            raise ParameterError(f"column {name} must hold {_plural(kind)}, got {column.dtype}")
        if name not in nullable and column.null_count():
            row = int(column.is_null().arg_max() or 0) + 1
            raise ParameterError(f"row {row}, column {name}: must be {_said(kind)}, got nothing")
        if get_origin(kind) is list:
            holes = column.list.eval(_element().is_null()).list.any()
            if holes.any():
                row = int(holes.fill_null(False).arg_max() or 0) + 1
                raise ParameterError(f"row {row}, column {name}: must be {_plural(kind)}, got one that is not there")


def _element() -> Any:
    import polars as pl

    return pl.element()


def _plural(kind: Any) -> str:
    inner = get_args(kind)
    of = {str: "texts", int: "whole numbers", float: "numbers", dict: "tables of keys"}
    return f"lists of {of[get_origin(inner[0]) or inner[0]]}" if inner else of[kind]


def _holds(dtype: Any, kind: Any, *, empty: bool) -> bool:
    """Whether a column of this type can hold values of this kind; one without a value may be of any type."""
    import polars as pl

    if dtype == pl.Null:
        return empty
    if get_origin(kind) is list:
        inner = get_args(kind)[0]
        return isinstance(dtype, pl.List) and (dtype.inner == pl.Null or _holds(dtype.inner, inner, empty=False))
    if kind is str:
        return bool(dtype == pl.String)
    if (get_origin(kind) or kind) is dict:
        return isinstance(dtype, pl.Struct)
    return bool(dtype.is_integer() or (kind is float and dtype.is_float()))
