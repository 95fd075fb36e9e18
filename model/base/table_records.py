"""Checked objects from tables, as TOML files and command lines give them: no unknown key, none missing, none twice."""

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
    """The base of records whose keys had other names, or have several."""

    GONE: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Keys of earlier versions, and what to say instead."""
    ALIASES: ClassVar[Mapping[str, str]] = MappingProxyType({})
    """Other names of keys, as other programs have them."""


def build(kind: type[Built], table: Any, where: str, remedy: str = "") -> Built:
    """A checked object from a table: no unknown key, none missing, and whatever the object checks itself.

    `where` is what messages call the table, `remedy` how a missing key is given, with KEY for its name.

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
    """Refuse keys that an object of this kind does not have; `about` is what messages end with."""
    known = _names(kind)
    for key in table:
        if key not in known:
            raise ParameterError(f"unknown key {where}.{key}; {instead(kind, key)}{about}")


@cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(field.name for field in fields(kind))


@cache
def _required(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind) if field.default is MISSING)


def instead(kind: type, key: str) -> str:
    """What to say of a key that an object of this kind does not have: what it is called now (its GONE), or the nearest known."""
    gone = kind.GONE if issubclass(kind, TableRecord) else {}
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
    """Lists as tuples, at every depth."""
    return tuple(frozen(each) for each in value) if isinstance(value, list) else value


def frozen_values(table: Mapping[str, Any]) -> dict[str, Any]:
    """The same table with its lists as tuples."""
    return {key: frozen(value) for key, value in table.items()}


def renamed(kind: type[TableRecord], table: Mapping[str, Any]) -> dict[str, Any]:
    """A method's table with what other programs call its parameters under their names here."""
    aliases = kind.ALIASES
    twice = [alias for alias, key in aliases.items() if {alias, key} <= table.keys()]
    if twice:
        raise ParameterError(f"method.{twice[0]} is another name of {aliases[twice[0]]}; give one of the two")
    return {aliases.get(key, key): value for key, value in table.items()}


def parse_value(text: str) -> Any:
    """A value from the command line: what TOML makes of it, or the text itself.

    >>> parse_value("0.4"), parse_value("true"), parse_value("literal"), parse_value("[1, 2]")
    (0.4, True, 'literal', [1, 2])
    """
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):  # no TOML, or a number too long or brackets too deep for its parser
        return text
