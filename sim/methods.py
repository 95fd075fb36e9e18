"""Where the modules of a method are: its algorithm, its theory and its vectorised twin have one name."""

from __future__ import annotations

import importlib
from types import ModuleType

from model.methods import COSTS, COSTS_OF, algorithm, allowed, allowing, costs, names, needed, roles, roles_of

__all__ = [
    "COSTS", "COSTS_OF", "algorithm", "allowed", "allowing", "check_whole", "costs", "names", "roles", "roles_of", "theory", "twin",
]  # fmt: skip


def theory(name: str) -> ModuleType:
    """The module of a method's closed forms: `model.NAME`, or the module itself for a method from outside."""
    return algorithm(name) if "." in name else importlib.import_module(f"model.{name}")


def twin(name: str) -> ModuleType:
    """The module of a method's vectorised paths: `sim.paths.NAME`, or the module itself for a method from outside."""
    return algorithm(name) if "." in name else importlib.import_module(f"sim.paths.{name}")


def check_whole(name: str) -> None:
    """Refuse a method from outside that lacks the function of a view: whatever view is asked for is compared with the others."""
    for part in ("predict", "walk") if "." in name else ():
        needed(algorithm(name), part)
