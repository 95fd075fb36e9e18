"""Methods by their names: the module of each, and the models that it has beside the target."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib import resources
from types import ModuleType
from typing import Any

from model import checks
from model.checks import ParameterError


def names() -> list[str]:
    """Names of the methods: the files in `model/algorithms`."""
    files = (path.name for path in resources.files("model.algorithms").iterdir())
    return sorted(name.removesuffix(".py") for name in files if name.endswith(".py") and not name.startswith("_"))


def algorithm(name: Any) -> ModuleType:
    """The module of a method's parameters and process: `model.algorithms.NAME`, or any importable module with a dot in its name."""
    known = names()
    if not isinstance(name, str) or (name not in known and "." not in name):
        raise checks.unknown("method", name, known)
    try:
        module = importlib.import_module(name if "." in name else f"model.algorithms.{name}")
    except (ImportError, TypeError, ValueError) as error:  # the latter two: a name that no module can have
        raise ParameterError(f"method {name!r} cannot be imported: {error}; known: {', '.join(known)}") from None
    if not hasattr(module, "Parameters"):
        raise ParameterError(f"method {name!r} is a module without Parameters, so no method; known: {', '.join(known)}")
    return module


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
    "draft": ("cost_ratio", "operations_ratio", "task", "draft_shape", "draft_profile"),
    "medium": ("medium_cost_ratio", "medium_operations_ratio", "allow_slow_medium", "medium_shape", "medium_profile"),
}
"""Costs that methods with a model of a role look at."""


def costs(kind: Any, table: Mapping[str, Any]) -> frozenset[str]:
    """The costs, of those that not every method has, that a method of this kind looks at with these parameters.

    Those of its roles, and its COSTS, or what its `costs` picks of them. A method that declares no COSTS is taken to look at all.
    """
    own = kind.costs(table) if hasattr(kind, "costs") else getattr(kind, "COSTS", COSTS)
    return frozenset(own).union(*(COSTS_OF[role] for role in roles(kind, table)))


def roles_of(parameters: Any) -> tuple[str, ...]:
    """The models beside the target that a choice has."""
    return roles(type(parameters), vars(parameters))
