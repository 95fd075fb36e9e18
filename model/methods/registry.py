"""Methods by their names: the module of each, and the models that it has beside the target.

A name with a dot is the path of a module from outside the project, which is imported, and so run. Files only name methods: such a
name counts where it was allowed in so many words, on the command line or as an argument (`allowing`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import cache
from importlib import resources
from types import ModuleType
from typing import Any

from model.base import checks
from model.base.checks import ParameterError

OPTION = "--methods"
"""How the command line allows a method from outside; in Python `methods=(...)`."""
_PARTS = ("OUTCOMES", "EXACT", "units")
_allowed: ContextVar[tuple[str, ...]] = ContextVar("methods from outside that may be imported", default=())


def names() -> list[str]:
    """Names of the methods: the folders of `model/methods`, then the methods from outside that are allowed here."""
    return [*_own(), *allowed()]


@cache
def _own() -> tuple[str, ...]:
    """The project's methods; listed once, as each point of a sweep asks for them."""
    return tuple(sorted(each.name for each in resources.files("model.methods").iterdir() if (each / "algorithm.py").is_file()))


def allowed() -> tuple[str, ...]:
    """The methods from outside the project that may be imported here."""
    return _allowed.get()


@contextlib.contextmanager
def allowing(modules: Sequence[Any]) -> Iterator[None]:
    """Allow the methods of these modules, named by their dotted paths, beside those allowed already; each is imported and checked.

    >>> with allowing(["os.path"]):
    ...     pass
    Traceback (most recent call last):
        ...
    model.base.checks.ParameterError: method 'os.path' is a module without Parameters, so no method; known: adaptive, ...
    """
    wanted: list[Any] = [modules] if isinstance(modules, str) else [*modules]  # whatever a caller has in its list
    for name in wanted:
        if not isinstance(name, str) or "." not in name:
            bound = "the dotted path of a module, such as my_package.mine; the project's own methods need not be named"
            raise ParameterError(f"{OPTION} must be {bound}, got {checks.shown(name)}")
        _imported(name)
    token = _allowed.set((*dict.fromkeys((*allowed(), *wanted)),))
    try:
        yield
    finally:
        _allowed.reset(token)


def algorithm(name: Any) -> ModuleType:
    """The module of a method's parameters and process: `model.methods.NAME.algorithm`, or a module from outside that is allowed."""
    known = names()
    if isinstance(name, str) and name in known:
        return _imported(name) if "." in name else importlib.import_module(f"model.methods.{name}.algorithm")
    if isinstance(name, str) and "." in name:
        what = f"method {checks.shown(name)} is not one of the project's, and what a file names is not imported"
        raise ParameterError(f"{what}; to run that module, add {OPTION} {checks.shown(name)[1:-1]}; known: {', '.join(known)}")
    raise checks.unknown("method", name, known)


def _imported(name: str) -> ModuleType:
    """A module from outside, with all that a method must have."""
    known = ", ".join(names())
    try:
        module = importlib.import_module(name)
    except KeyboardInterrupt:
        raise
    except BaseException as error:  # its own code runs: it may raise anything, and may try to end the program
        first = (str(error).splitlines() or [""])[0][:200]
        why = first if isinstance(error, ImportError) else f"{type(error).__name__}{f': {first}' if first else ''}"
        raise ParameterError(f"method {checks.shown(name)} cannot be imported: {why}; known: {known}") from None
    kind = getattr(module, "Parameters", None)
    if kind is None:
        raise ParameterError(f"method {name!r} is a module without Parameters, so no method; known: {known}")
    if not isinstance(kind, type) or not dataclasses.is_dataclass(kind):
        raise ParameterError(f"method {name!r} must have a dataclass Parameters, got {checks.shown(kind)}")
    for part in _PARTS:
        if not hasattr(kind, part):
            raise ParameterError(f"method {name!r} must say {part} in its Parameters, and they do not; see CONTRIBUTING.md")
    needed(module, "decode")
    return module


def needed(module: ModuleType, part: str) -> None:
    """Refuse a module without a function of a method that is needed of it."""
    if not callable(getattr(module, part, None)):
        raise ParameterError(f"method {module.__name__!r} must have a function {part}, and has none; see CONTRIBUTING.md")


def theory(name: str) -> ModuleType:
    """The module of a method's closed forms: `model.methods.NAME.theory`, or the module itself for a method from outside."""
    return algorithm(name) if "." in name else importlib.import_module(f"model.methods.{name}.theory")


def twin(name: str) -> ModuleType:
    """The module of a method's vectorised paths: `model.methods.NAME.paths`, or the module itself for a method from outside."""
    return algorithm(name) if "." in name else importlib.import_module(f"model.methods.{name}.paths")


def check_whole(name: str) -> None:
    """Refuse a method from outside that lacks the function of a view: whatever view is asked for is compared with the others."""
    for part in ("predict", "walk") if "." in name else ():
        needed(algorithm(name), part)


def roles(kind: Any, table: Mapping[str, Any]) -> tuple[str, ...]:
    """The models beside the target that a method of this kind has with these parameters: its ROLES, or what `roles` says."""
    found: tuple[str, ...] = kind.roles(table) if hasattr(kind, "roles") else getattr(kind, "ROLES", ())
    return found


COSTS = (
    "early_head", "dispatch", "dispatch_per_process", "dispatch_law", "link", "promotion", "propagation", "state_check",
    "verify_cost", "fitted_on",
)  # fmt: skip
"""Costs that only some methods look at, in layer-times or as NAME_s in seconds. Which ones a method's COSTS say."""
COSTS_OF = {
    "draft": ("cost_ratio", "operations_ratio", "task", "draft_shape", "draft_profile", "draft_step"),
    "medium": (
        "medium_cost_ratio", "medium_operations_ratio", "allow_slow_medium", "medium_shape", "medium_profile", "draft_step",
    ),
}
"""Costs that methods with a model of a role look at."""


def costs(kind: Any, table: Mapping[str, Any]) -> frozenset[str]:
    """The costs, of those that not every method has, that a method of this kind looks at with these parameters.

    Those of its roles, and its COSTS, or what its `costs` picks of them. A method that declares no COSTS is taken to look at all.
    """
    own = kind.costs(table) if hasattr(kind, "costs") else getattr(kind, "COSTS", COSTS)
    batch = () if table.get("sequences", 1) == 1 else ("verify_cost",)  # a pass is as wide as all sequences together
    return frozenset((*own, *batch)).union(*(COSTS_OF[role] for role in roles(kind, table)))


def roles_of(parameters: Any) -> tuple[str, ...]:
    """The models beside the target that a choice has."""
    return roles(type(parameters), vars(parameters))
