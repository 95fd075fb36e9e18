"""Checks of values against their declared types, once when a file is read.

Types are Python annotations: `str`, `int`, `float` (finite numbers, integers included), `bool`, `None`, `Any`, unions, `list[X]`,
`dict[str, X]`, and `TypedDict`, which allows additional keys.
"""

from __future__ import annotations

import functools
import math
import types
from typing import Any, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

from model.base import checks
from model.base.checks import ParameterError

_NAMES = {
    str: "a string", int: "a whole number", float: "a finite number", bool: "true or false", list: "a list",
    dict: "a table of keys", type(None): "null",
}  # fmt: skip


def check(value: Any, kind: Any, where: str) -> None:
    """Raise `ParameterError` unless the value has the type `kind`; the message names the innermost value that differs.

    >>> check({"seconds": [1.0, "2"]}, dict[str, list[float]], "about")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: about.seconds[1] must be a finite number, got '2'
    """
    kind, origin, inner = _parts_of(kind)
    if kind is Any:
        return
    if origin in (Union, types.UnionType):
        if not any(_shallow(value, each) for each in inner):
            raise _wrong(where, " or ".join(_name(each) for each in inner), value)
        check(value, next(each for each in inner if _shallow(value, each)), where)
        return
    if not _shallow(value, kind):
        raise _wrong(where, _name(kind), value)
    if is_typeddict(kind):
        hints = _hints(kind)
        for key in sorted(key for key, each in hints.items() if key not in value and get_origin(each) is not NotRequired):
            raise ParameterError(f"{where}.{key} is missing" if where else f"{key} is missing")
        for key in hints.keys() & {*value}:
            check(value[key], hints[key], f"{where}.{key}" if where else key)
    elif origin is list and inner:
        if {*map(type, value)} <= _PLAIN.get(inner[0], frozenset()):  # a shortcut for long lists of tokens
            return
        for index, each in enumerate(value):
            check(each, inner[0], f"{where}[{index}]")
    elif origin is dict and inner:
        for key, each in value.items():
            check(each, inner[1], f"{where}.{key}" if where else key)


_PLAIN: dict[Any, frozenset[type]] = {of: frozenset({of}) for of in (int, str, bool)}
"""Types that need no further check of a value; a float might be NaN."""


@functools.cache
def _parts_of(kind: Any) -> tuple[Any, Any, tuple[Any, ...]]:
    """Return the type without `NotRequired`, its origin and its arguments."""
    if get_origin(kind) is NotRequired:
        kind = get_args(kind)[0]
    return kind, get_origin(kind) or kind, get_args(kind)


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    """Types of the keys of a `TypedDict`. Its annotations are strings, so that `__required_keys__` is not correct."""
    return get_type_hints(kind, include_extras=True)


def _shallow(value: Any, kind: Any) -> bool:
    """True if a value has a type; its elements are not checked."""
    if kind is Any:
        return True
    of = _runtime_type(kind)
    if of is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and _finite(value)
    return isinstance(value, of) and (of is bool or not isinstance(value, bool))


@functools.cache
def _runtime_type(kind: Any) -> Any:
    """Class of the values of a type; `dict` for a `TypedDict`."""
    return dict if is_typeddict(kind) else get_origin(kind) or kind


def _finite(value: float) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer too large for a float
        return False


def _name(kind: Any) -> str:
    return _NAMES[_runtime_type(kind)]


def _wrong(where: str, bound: str, value: Any) -> ParameterError:
    return ParameterError(f"{where} must be {bound}, got {'null' if value is None else checks.shown(value)}")


# --- Columns of tables ---


def check_columns(table: Any, kinds: dict[str, Any], nullable: frozenset[str] = frozenset()) -> None:
    """Raise `ParameterError` for a column of a polars table that is missing, has another type or contains nulls.

    Types are `str`, `int`, `float`, lists of these, and `list[dict[str, Any]]`, whose fields are not checked. Columns in `nullable`
    may contain nulls. Messages count rows from 1.
    """
    for name, kind in kinds.items():
        if name not in table.columns:
            raise ParameterError(f"column {name} is missing; the table has {checks.shown(table.columns)}")
        column = table[name]
        if not _holds(column.dtype, kind, empty=not column.len() or column.null_count() == column.len()):
            raise ParameterError(f"column {name} must hold {_plural(kind)}, got {column.dtype}")
        if name not in nullable and column.null_count():
            row = int(column.is_null().arg_max() or 0) + 1
            raise ParameterError(f"row {row}, column {name}: must be {_name(kind)}, got null")
        if get_origin(kind) is list and column.null_count() < column.len():
            nulls = column.list.eval(_element().is_null()).list.any()
            if nulls.any():
                row = int(nulls.fill_null(False).arg_max() or 0) + 1
                raise ParameterError(f"row {row}, column {name}: must be {_plural(kind)}, got a list with null")


def _element() -> Any:
    import polars as pl

    return pl.element()


def _plural(kind: Any) -> str:
    inner = get_args(kind)
    of = {str: "strings", int: "whole numbers", float: "numbers", dict: "tables of keys"}
    return f"lists of {of[get_origin(inner[0]) or inner[0]]}" if inner else of[kind]


def _holds(dtype: Any, kind: Any, *, empty: bool) -> bool:
    """True if a column of this polars type can hold values of this type; a column of nulls only (`empty`) may have any type."""
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
