"""Theorems: a statement, a search strategy for examples, and a predicate that reports in numbers where it fails."""

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

__all__ = ["Example", "Theorem", "TheoremCollection", "at_most", "drawn", "equal", "st"]


class _Later:
    """A module that is imported when an attribute is first used."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        return getattr(importlib.import_module(self._name), name)


if not TYPE_CHECKING:
    st = _Later("hypothesis.strategies")  # not needed to list theorems

Example = dict[str, Any]
"""Input of a theorem: named plain values, so that it can be saved, sent and replayed."""


Drawn = TypeVar("Drawn")
Arguments = ParamSpec("Arguments")
Predicate = Callable[[Example], bool | None]


@dataclass(frozen=True)
class Theorem:
    """A numbered invariant.

    `given` builds the search strategy and is called only when a search begins: listing theorems and replaying an example do not
    need hypothesis. `holds` takes an example, and returns False or raises AssertionError if the statement is wrong for it. A
    plausible statement that is false has `expect="fails"`: knowing that it is false is part of the theory.
    """

    number: str
    statement: str
    source: str
    method: str
    given: Callable[[], SearchStrategy[Example]]
    holds: Predicate
    expect: str = "holds"

    def error(self, example: Example, let_through: tuple[type[Exception], ...] = ()) -> str | None:
        """Return the error of the statement on this example, None if it holds."""
        try:
            right = self.holds(example)
        except let_through:
            raise
        except AssertionError as error:
            return str(error) or "the assertion has no message"
        except Exception as error:  # an exception in the code under test is a counterexample too
            return f"{type(error).__name__}: {error}"
        return "the predicate is false" if right is False else None


class TheoremCollection:
    """Theorems of a method, collected by decorating the predicates that check them."""

    def __init__(self, method: str) -> None:
        self.method = method
        self._found: list[Theorem] = []

    def __call__(
        self, number: str, statement: str, *, source: str, given: Callable[[], SearchStrategy[Example]], expect: str = "holds"
    ) -> Callable[[Predicate], Predicate]:
        """Register a theorem with the decorated predicate; a predicate may serve several theorems."""

        def decorated(holds: Predicate) -> Predicate:
            self._found.append(Theorem(number, statement, source, self.method, given, holds, expect))
            return holds

        return decorated

    def all(self) -> tuple[Theorem, ...]:
        """Return the theorems in the order of their numbers."""
        return tuple(sorted(self._found, key=lambda each: (int(re.findall(r"\d+", each.number)[0]), each.number)))


def drawn(make: Callable[Concatenate[DrawFn, Arguments], Drawn]) -> Callable[Arguments, SearchStrategy[Drawn]]:
    """Turn a function that draws an example into a search strategy; hypothesis is imported only when one is built."""

    @functools.cache
    def composite() -> Callable[Arguments, SearchStrategy[Drawn]]:
        return st.composite(make)  # it reads the source of the function

    @functools.wraps(make)
    def strategy(*args: Arguments.args, **kwargs: Arguments.kwargs) -> SearchStrategy[Drawn]:
        return composite()(*args, **kwargs)

    return strategy


# Not `assert`: these must also work under `python -O`.


def equal(what: str, got: Any, want: Any, within: float = 0.0) -> None:
    """Require that both are equal, numbers to a relative error of `within`."""
    if got == want or (within and abs(got - want) <= within * abs(want)):
        return
    raise AssertionError(f"{what}: got {_short(got)}, expected {_short(want)}" + (f" within {within:g}" if within else ""))


def at_most(what: str, got: float, bound: float, within: float = 0.0) -> None:
    """Require that `got` is at most `bound`, to a relative error of `within`."""
    if not got <= bound + within * abs(bound):
        raise AssertionError(f"{what}: got {_short(got)}, expected at most {_short(bound)}")


def _short(value: object) -> str:
    return repr(value.item() if hasattr(value, "item") else value)
