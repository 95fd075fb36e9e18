"""Dependence of a value on single numbers of a cost.

What does not read a number is the same at all of its values. What only tests numbers for 0 is the same for all costs that have the
same zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import MISSING, fields
from functools import cache
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

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


class _IsReadError(Exception):
    """A number is used otherwise than in a test for 0."""


def _refuse(self: Any, *_: Any) -> Any:
    raise _IsReadError


class _Tested:
    """A number that can be tested for 0, and for nothing else."""

    def __init__(self, value: bool) -> None:
        self._value = value

    def __bool__(self) -> bool:
        return self._value


@cache
def _fields_of(kind: type) -> list[tuple[str, Callable[[], Any] | None]]:
    """Fields of a dataclass; with a function for those that are not given but made."""
    found: list[tuple[str, Callable[[], Any] | None]] = []
    for field in fields(kind):
        made = (lambda: None) if field.default_factory is MISSING else field.default_factory
        found.append((field.name, None if field.init else made))
    return found


_OPERATIONS = (
    "eq ne lt le gt ge hash float int index complex neg pos abs round add radd sub rsub mul rmul truediv rtruediv floordiv"
    " rfloordiv mod rmod pow rpow divmod rdivmod array array_ufunc array_function len iter format str repr getattr"
)
for _operation in _OPERATIONS.split():
    setattr(_Tested, f"__{_operation}__", _refuse)


def tested_alone(cost: Any, numbers: Mapping[str, Any], value: Callable[[Any], Value]) -> Value | None:
    """Value of a function of a cost (a dataclass) that may test these numbers for 0; None if it uses one of them otherwise.

    The function gets a copy without anything that was computed from the numbers.

    >>> cost = UnitCost(4, cost_ratio=0.5)
    >>> [tested_alone(cost, {"link": 2.0}, of) for of in (lambda cost: cost.has_overheads(2), lambda cost: 2 * cost.link)]
    [True, None]
    """
    copy = object.__new__(type(cost))
    kind: type = type(cost)
    for name, make in _fields_of(kind):
        vars(copy)[name] = getattr(cost, name) if make is None else make()
    vars(copy).update({name: _Tested(bool(number)) for name, number in numbers.items()})
    try:
        found = value(copy)
    except Exception:  # of any kind, since the number is none: the value is then computed from each cost
        return None
    parts = found.values() if isinstance(found, Mapping) else found if isinstance(found, tuple) else (found,)
    return None if any(isinstance(each, _Tested) for each in parts) else found


class _Between(_Tested):
    """Any number of an interval: it can be compared with numbers that are not inside, and be used for nothing else."""

    def __init__(self, low: int, high: int) -> None:
        self.bounds = low, high

    def __bool__(self) -> bool:
        return self != 0

    def _above(self, other: Any) -> bool:
        """True if every number of the interval is above the other, False if every number is below it."""
        low, high = self.bounds
        if not isinstance(other, int | float) or low <= other <= high:
            raise _IsReadError
        return other < low

    def __gt__(self, other: Any) -> bool:
        return self._above(other)

    __ge__ = __gt__

    def __lt__(self, other: Any) -> bool:
        return not self._above(other)

    __le__ = __lt__

    def __eq__(self, other: Any) -> bool:
        self._above(other)
        return False

    def __ne__(self, other: Any) -> bool:
        self._above(other)
        return True

    __hash__ = None  # type: ignore[assignment]


def between(low: int, high: int, value: Callable[[Any], Value]) -> Value | None:
    """Value of a function of a number that is the same for all numbers from `low` to `high`; None if this is not known.

    It is known if the function compares its number with numbers outside of the interval, and uses it for nothing else.

    >>> between(3, 9, lambda number: min(number, 2)), between(2, 9, lambda number: min(number, 2))
    (2, None)
    """
    number = _Between(low, high)
    try:
        found = value(number)
    except Exception:  # of any kind, since the number is none
        return None
    return None if _holds(found, number) else found


def _holds(found: Any, number: _Between) -> bool:
    """True if a value is this number, or contains it."""
    inner = found.values() if isinstance(found, Mapping) else found if isinstance(found, list | tuple) else ()
    return found is number or any(_holds(each, number) for each in inner)


def of_numbers(
    numbers: NDArray[np.int64], value: Callable[[Any, NDArray[np.intp]], Value]
) -> Iterator[tuple[Value, NDArray[np.intp]]]:
    """Value of a function of each of several numbers, and the indices of the numbers that have it.

    For all numbers above `SMALL` it is evaluated once, if it is the same for them (`between`). Its second argument has the indices
    of the numbers that it is evaluated for.

    >>> [(found, index.tolist()) for found, index in of_numbers(np.array([9, 1, 70]), lambda number, _: min(number, 2))]
    [(2, [0, 2]), (1, [1])]
    """
    many, each = np.flatnonzero(numbers > SMALL), np.arange(numbers.size)
    if many.size:
        found = between(int(numbers[many].min()), int(numbers[many].max()), lambda number: value(number, many))
        if found is not None:
            yield found, many
            each = np.flatnonzero(numbers <= SMALL)
    distinct, which = np.unique(numbers[each], return_inverse=True)
    order = np.argsort(which, kind="stable")
    bounds = np.searchsorted(which[order], np.arange(distinct.size + 1)).tolist()
    for number, start, stop in zip(distinct.tolist(), bounds[:-1], bounds[1:], strict=True):
        mine = each[order[start:stop]]
        yield value(number, mine), mine


SMALL = 8
"""Numbers up to this are told apart: some functions treat the first few specially."""


def kinds_of(numbers: Mapping[str, NDArray[Any]]) -> tuple[list[int], NDArray[np.intp]]:
    """Kinds of several costs by which of their numbers are 0 (a bit for each that is not), and the index of each cost's kind.

    >>> kinds, index = kinds_of({"link": np.array([0.0, 1.0, 2.0]), "final_head": np.array([0.0, 0.0, 0.5])})
    >>> kinds, index.tolist()
    ([0, 1, 3], [0, 1, 2])
    """
    kinds, index = np.unique(
        sum((each != 0) << place for place, each in enumerate(numbers.values())), return_inverse=True
    )  # fmt: skip
    return kinds.tolist(), index


def distinct(
    cost: UnitCost, numbers: Mapping[str, NDArray[Any]], value: Callable[[UnitCost], Value],
    kinds: tuple[list[int], NDArray[np.intp]] | None = None,
) -> tuple[list[Value], NDArray[np.intp]] | None:  # fmt: skip
    """Values of a function of each of several costs that differ in these numbers, and the index of each cost's value.

    None if the value must be computed from each cost. `kinds` are those of `kinds_of`, if they are known.

    >>> found, index = distinct(UnitCost(4), {"link": np.array([0.0, 1.0, 2.0])}, lambda cost: cost.has_overheads(2))
    >>> found, index.tolist()
    ([False, True], [0, 1, 1])
    """
    one, varies = evaluated(cost, numbers, value)
    if not varies:
        return [one], np.zeros(len(next(iter(numbers.values()))), dtype=np.intp)
    zeros, index = kinds_of(numbers) if kinds is None else kinds
    found = []
    for kind in zeros:
        each = tested_alone(cost, {name: kind >> place & 1 for place, name in enumerate(numbers)}, value)
        if each is None:
            return None
        found.append(each)
    return found, index

