"""Where the modules of a method are: its algorithm, its theory and its vectorised twin have one name."""

from __future__ import annotations

import importlib
from types import ModuleType

from model.methods import COSTS, COSTS_OF, algorithm, costs, names, roles, roles_of

__all__ = ["COSTS", "COSTS_OF", "algorithm", "costs", "names", "roles", "roles_of", "theory", "twin"]


def theory(name: str) -> ModuleType:
    """The module of a method's closed forms: `model.NAME`, or the module itself for a method from outside."""
    return importlib.import_module(name if "." in name else f"model.{name}")


def twin(name: str) -> ModuleType:
    """The module of a method's vectorised paths: `sim.paths.NAME`, or the module itself for a method from outside."""
    return importlib.import_module(name if "." in name else f"sim.paths.{name}")
