"""Dependence of a value on single numbers of a cost: what does not read a number is the same at all of its values."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import fields
from typing import Any, TypeVar

from model.costs.layer_times import UnitCost

Value = TypeVar("Value")


class _WatchedCost(UnitCost):
    """A cost that notes whether any of some numbers is read; so does reading its dictionary, which has all of them."""

    def __getattribute__(self, name: str) -> Any:
        get = object.__getattribute__
        if name == "__class__":  # a copy with changes, and a comparison, are those of a cost that is not watched
            return UnitCost
        inner = get(self, "__dict__")
        if name == "__dict__" or name in inner["_watched"]:
            inner["_read"].append(name)
        return get(self, name)


_FIELDS = tuple(field.name for field in fields(UnitCost))


def evaluated(cost: UnitCost, numbers: Collection[str], value: Callable[[UnitCost], Value]) -> tuple[Value, bool]:
    """Value of a function of a cost, and whether it may depend on any of these numbers.

    If not, all costs that differ in these numbers only have this value. The function gets a copy without cached properties, since
    these would hide what they were computed from.

    >>> cost = UnitCost(4, cost_ratio=0.5)
    >>> [evaluated(cost, [name], lambda cost: cost.ratio("draft")) for name in ("link", "cost_ratio")]
    [(0.5, False), (0.5, True)]
    >>> evaluated(cost, ["final_head"], lambda cost: cost.target_pass)  # a cached property reads the dictionary
    (4.0, True)
    """
    copy, read = object.__new__(_WatchedCost), list[str]()
    inner = object.__getattribute__(copy, "__dict__")
    inner |= {name: getattr(cost, name) for name in _FIELDS}
    inner |= {"_watched": frozenset(numbers), "_read": read}
    found = value(copy)
    return found, bool(read)
