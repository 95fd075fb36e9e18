"""Checked objects from tables of TOML files and command lines: unknown, missing and duplicate keys are errors."""

from __future__ import annotations

import inspect
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, fields
from functools import cache
from types import MappingProxyType
from typing import Any, ClassVar, TypeVar

from model.base import checks
from model.base.checks import ParameterError

Built = TypeVar("Built")


class TableRecord:
    """Base of records with removed keys or aliases."""

    REMOVED_KEYS: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys of earlier versions or of similar records, and the reason or remedy that the message about each gives."""
    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Names that other programs use, and the keys that they stand for."""


def build(kind: type[Built], table: Any, where: str, remedy: str = "") -> Built:
    """Build an object from a table; refuse unknown and missing keys and values that the object itself refuses.

    `where` is the table's name in messages; `remedy` says how to give a missing key, with KEY as its placeholder.

    >>> from model.methods.ppd.algorithm import Parameters
    >>> build(Parameters, {"layers": 40, "exit_layr": 20}, "method")
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: unknown key method.exit_layr; did you mean exit_layer? known: batched, ...
    """
    if not isinstance(table, Mapping):
        raise ParameterError(f"[{where}] must be a table, got {checks.shown(table)}")
    refuse_unknown(kind, table, where)
    any_kind: type = kind
    missing = [name for name in _required(any_kind) if name not in table]
    if missing:
        how = remedy.replace("KEY", missing[0]) if remedy else f"add it under [{where}]"
        raise ParameterError(f"{where}.{missing[0]} is required and has no default; {how}")
    try:
        return kind(**{key: frozen(value) for key, value in table.items()})
    except checks.TableError as error:
        raise checks.TableError(where, error.rest) from None
    except ParameterError as error:
        raise ParameterError(f"{where}: {error}") from None


def refuse_unknown(kind: type, table: Mapping[str, Any], where: str, about: str = "") -> None:
    """Raise `ParameterError` for a key that objects of this kind do not have; `about` is appended to the message."""
    known = key_names(kind)
    for key in table:
        if key not in known:
            raise ParameterError(f"unknown key {where}.{key}; {unknown_key_remedy(kind, key)}{about}")


def key_names(kind: type) -> tuple[str, ...]:
    """Keys of the tables of a record, in the order of its fields.

    >>> from model.methods.ppd.algorithm import Parameters
    >>> key_names(Parameters)[-3:]
    ('form', 'sampled', 'batched')
    """
    return _names(kind)


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _required(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.default is MISSING)


def unknown_key_remedy(kind: type, key: str) -> str:
    """Clause of a message about an unknown key: its entry in `REMOVED_KEYS`, or the closest known key."""
    gone = kind.REMOVED_KEYS if issubclass(kind, TableRecord) else {}
    return gone[key] if key in gone else checks.nearest(key, [field.name for field in fields(kind)])


def documented(kind: type) -> dict[str, str]:
    """Descriptions of the keys of a record, from the `Parameters` sections of its docstring and of its bases'."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        names: list[str] = []
        own: dict[str, str] = {}
        for line in inspect.cleandoc(each.__doc__ or "").partition("----------\n")[2].splitlines():
            if line.startswith(" "):
                own |= {name: f"{own.get(name, '')} {line.strip()}".strip() for name in names}
            elif line.startswith(">>>"):
                break
            else:
                names = line.split(", ")
        found |= {name: text for name, text in own.items() if name}
    return found


def frozen(value: Any) -> Any:
    """Convert lists to tuples, at every depth."""
    return tuple(frozen(each) for each in value) if isinstance(value, list) else value


def frozen_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """Return the table with its lists as tuples."""
    return {key: frozen(value) for key, value in table.items()}


def renamed(kind: type[TableRecord], table: Mapping[str, Any]) -> dict[str, Any]:
    """Return a method's table with aliases (names in other programs) replaced by the names of its parameters."""
    aliases = kind.ALIASES
    twice = [alias for alias, key in aliases.items() if {alias, key} <= table.keys()]
    if twice:
        raise ParameterError(f"method.{twice[0]} is another name of {aliases[twice[0]]}; give one of the two")
    return {aliases.get(key, key): value for key, value in table.items()}


def parse_value(text: str) -> Any:
    """Value of a command line argument: parsed as TOML if possible, else the text itself.

    >>> parse_value("0.4"), parse_value("true"), parse_value("literal"), parse_value("[1, 2]")
    (0.4, True, 'literal', [1, 2])
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # not TOML, or a number too long or brackets too deep for its parser
        return text
