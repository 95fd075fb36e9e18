"""What a theorem is here: a sentence, examples to try it on, and a predicate that says with numbers where it fails."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

if TYPE_CHECKING:
    from hypothesis import strategies as st
    from hypothesis.strategies import DrawFn, SearchStrategy

__all__ = ["Collected", "Example", "Theorem", "at_most", "drawn", "equal", "st"]


class _Later:
    """A module that is imported when something of it is asked for."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


if not TYPE_CHECKING:
    st = _Later("hypothesis.strategies")  # not needed to list theorems

Example = dict[str, Any]
"""What a theorem is tried on: plain values under names, so that it can be written down, mailed and tried again."""


Drawn = TypeVar("Drawn")
Given = ParamSpec("Given")
Predicate = Callable[[Example], bool | None]


@dataclass(frozen=True)
class Theorem:
    """A numbered invariant.

    `given` builds the search strategy, and is called only when a search begins: hypothesis is not needed to list theorems, nor to
    try one on a given example. `holds` takes an example and says by False or an AssertionError that the statement is wrong there.
    A statement that must not hold has `expect="fails"`: what looks true and is not is part of the theory.
    """

    number: str
    statement: str
    source: str
    method: str
    given: Callable[[], SearchStrategy[Example]]
    holds: Predicate
    expect: str = "holds"

    def error(self, example: Example, let_through: tuple[type[Exception], ...] = ()) -> str | None:
        """What is wrong with the statement on this example; None where it holds."""
        try:
            right = self.holds(example)
        except let_through:
            raise
        except AssertionError as error:
            return str(error) or "the assertion gave no numbers"
        except Exception as error:  # the code under test broke down: as much a counterexample as a wrong number
            return f"{type(error).__name__}: {error}"
        return "the predicate is false" if right is False else None


class Collected:
    """The theorems of a method, each stated above the predicate that says whether it holds."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._found: list[Theorem] = []

    def __call__(
        self, number: str, statement: str, *, source: str, given: Callable[[], SearchStrategy[Example]], expect: str = "holds"
    ) -> Callable[[Predicate], Predicate]:
        """State a theorem of the predicate that follows; one predicate may be that of several."""

        def decorated(holds: Predicate) -> Predicate:
            self._found.append(Theorem(number, statement, source, self.method, given, holds, expect))
            return holds

        return decorated

    def all(self) -> tuple[Theorem, ...]:
        """In the order of their numbers."""
        return tuple(sorted(self._found, key=lambda each: (int(re.findall(r"\d+", each.number)[0]), each.number)))


def drawn(make: Callable[Concatenate[DrawFn, Given], Drawn]) -> Callable[Given, SearchStrategy[Drawn]]:
    """A search strategy of a function that draws an example; hypothesis is imported when it is asked for one."""

    @functools.wraps(make)
    def strategy(*args: Given.args, **kwargs: Given.kwargs) -> SearchStrategy[Drawn]:
        return st.composite(make)(*args, **kwargs)

    return strategy


# Not `assert`: these must speak also where Python runs without assertions.


def equal(what: str, got: Any, want: Any, within: float = 0.0) -> None:
    """The two are the same; numbers to a relative error of `within`."""
    if got == want or (within and abs(got - want) <= within * abs(want)):
        return
    raise AssertionError(f"{what}: got {_short(got)}, expected {_short(want)}" + (f" within {within:g}" if within else ""))


def at_most(what: str, got: float, bound: float, within: float = 0.0) -> None:
    """`got` is not above `bound`, to a relative error of `within`."""
    if not got <= bound + within * abs(bound):
        raise AssertionError(f"{what}: got {_short(got)}, expected at most {_short(bound)}")


def _short(value: object) -> str:
    return repr(value.item() if hasattr(value, "item") else value)
