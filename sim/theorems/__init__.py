"""The theorems as objects, and the search for an example that refutes one.

Every claim of `model` about a method is here a `Theorem` that the simulator is asked about: `check` tries it on many drawn examples
and, where it fails, says on which smallest one; `replay` tries it on one example.
"""

from __future__ import annotations

import importlib
import json
import random
import shlex
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import TYPE_CHECKING, Any

from model.base import checks, strict_json
from sim.theorems import engine_invariants, of_methods, speedup_bound
from sim.theorems.theorem import Example, Theorem

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase


def _of_methods() -> Iterator[Theorem]:
    """The theorems of all modules of `sim/theorems/of_methods`."""
    names = sorted(each.name for each in resources.files(of_methods).iterdir())
    for name in names:
        if name.endswith(".py") and name != "__init__.py":
            yield from importlib.import_module(f"{of_methods.__name__}.{name.removesuffix('.py')}").THEOREMS


THEOREMS = tuple(
    sorted((*_of_methods(), *engine_invariants.THEOREMS, *speedup_bound.THEOREMS), key=lambda theorem: theorem.method)
)

ENOUGH = 200
"""Examples by which a statement that must fail has to be refuted."""


@dataclass(frozen=True)
class TheoremVerdict:
    """What came of trying a theorem."""

    theorem: Theorem
    tried: int
    """Examples tried, up to and with the first that refuted it; making that one smaller is not counted."""
    holds: bool
    """On every example tried."""
    counterexample: Example | None
    """The smallest found that refutes it."""
    error: str
    """What is wrong there, in numbers."""
    seconds: float

    @property
    def undecided(self) -> bool:
        """Whether a statement that must fail was not refuted, but by too few examples to say anything."""
        return self.holds and self.theorem.expect == "fails" and self.tried < ENOUGH

    @property
    def expected(self) -> bool | None:
        """Whether it came out as the theory says; None where it is undecided."""
        return None if self.undecided else self.holds == (self.theorem.expect == "holds")

    @property
    def reproduce(self) -> str:
        """The shell command that tries the theorem on the counterexample again; empty where there is none."""
        if self.counterexample is None:
            return ""
        theorem = ["--method", self.theorem.method, "--theorem", self.theorem.number]
        return shlex.join(["sim", "check", *theorem, "--example", strict_json.dumps(self.counterexample)])

    def document(self) -> dict[str, Any]:
        """All of it, as plain values."""
        theorem = self.theorem
        return {
            "method": theorem.method, "theorem": theorem.number, "statement": theorem.statement, "source": theorem.source,
            "expect": theorem.expect, "tried": self.tried, "holds": self.holds, "as_expected": self.expected,
            "seconds": round(self.seconds, 3), "counterexample": self.counterexample, "error": self.error,
            "reproduce": self.reproduce,
        }  # fmt: skip

    def __str__(self) -> str:
        must = "" if self.theorem.expect == "holds" else " (must not hold)"
        verdict = ("holds" if self.holds else "fails") + ("  <-- WRONG" if self.expected is False else "")
        verdict = "open" if self.undecided else verdict
        name = f"{self.theorem.method} {self.theorem.number:4}"
        lines = [f"{name} {verdict:6} {self.tried:6} examples  {self.theorem.statement}{must}"]
        if not self.holds:
            lines += [f"      {self.error}", f"      {self.reproduce}"]
        return "\n".join(lines)


def summary(verdicts: Sequence[TheoremVerdict]) -> str:
    """One line: the statements that came out wrong, and those that must fail and were not refuted, by method and number."""
    wrong = [verdict for verdict in verdicts if verdict.expected is False]
    still_open = [verdict for verdict in verdicts if verdict.undecided]
    if not wrong and not still_open:
        return "every statement came out as the theory says"
    found = "no statement came out wrong"
    if wrong:
        unrefuted = " (no counterexample found)"
        names = [_named(verdict) + (unrefuted if verdict.holds else "") for verdict in wrong]
        found = f"{len(wrong)} {'statement' if len(wrong) == 1 else 'statements'} came out wrong: {', '.join(names)}"
    if still_open:
        names = [f"{_named(verdict)} ({verdict.tried} tried)" for verdict in still_open]
        found += f"; open, as they must fail and no counterexample was found: {', '.join(names)}; try --examples {ENOUGH} or more"
    return found


def _named(verdict: TheoremVerdict) -> str:
    return f"{verdict.theorem.method} {verdict.theorem.number}"


def select(method: str | None = None, only: Sequence[str] | None = None) -> tuple[Theorem, ...]:
    """The theorems of a method or of all, or those with these numbers; a number without its letter means all it is split into.

    >>> [theorem.number for theorem in select("ppd", only=["27"])]
    ['27a', '27b', '27c']
    """
    methods = dict.fromkeys(theorem.method for theorem in THEOREMS)
    if method is not None and method not in methods:
        raise checks.unknown("method", method, methods)
    found = [theorem for theorem in THEOREMS if method in (None, theorem.method)]
    if only is None:
        return tuple(found)
    for wanted in only:
        if not any(wanted in _names(theorem) for theorem in found):
            raise checks.unknown("theorem", wanted, dict.fromkeys(theorem.number for theorem in found))
    return tuple(theorem for theorem in found if _names(theorem) & {*only})


def _names(theorem: Theorem) -> set[str]:
    return {theorem.number, theorem.number.rstrip("abcdefghijklmnopqrstuvwxyz")}


def check(
    method: str | None = None,
    examples: int = 1000,
    seed: int = 0,
    only: Sequence[str] | None = None,
    database: ExampleDatabase | None = None,
) -> Iterator[TheoremVerdict]:
    """Try theorems of a method, or of all, on drawn examples, one after another.

    The seed decides which are drawn, whatever else is checked. With a `database`, counterexamples of earlier searches are kept
    there and tried first.
    """
    chosen = select(method, only)
    checks.whole("examples", examples, 1)
    checks.whole("seed", seed, 0)
    try:
        import hypothesis  # noqa: F401  it is asked for here so that the error comes before the first verdict
    except ImportError:
        raise checks.ParameterError("theorems are checked with hypothesis, which is not installed; install hypothesis") from None
    return (_search(theorem, examples, seed, database) for theorem in chosen)


def replay(number: str, example: Example, method: str | None = None) -> TheoremVerdict:
    """Try one theorem on one example, such as an earlier counterexample. Where methods share the number, name one.

    >>> replay("21a", {"form": "literal", "layers": 40, "exit_layer": 20, "candidates": 3, "matches": [True, False]}).holds
    True
    """
    known = [theorem for theorem in select(method) if theorem.number == number]
    if not known:
        raise checks.unknown("theorem", number, dict.fromkeys(theorem.number for theorem in select(method)))
    if len(known) > 1:
        owners = " and ".join(theorem.method for theorem in known)
        raise checks.ParameterError(f"theorem {number} is one of {owners}; name the method")
    if not isinstance(example, dict):
        raise checks.ParameterError(f"example must be an object of fields and values, got {example!r}")
    start = time.perf_counter()
    try:
        # A slip in what was typed is no refutation.
        error = known[0].error(example, let_through=(checks.ParameterError, KeyError))
    except KeyError as missing:
        if missing.args[0] not in example:
            raise checks.ParameterError(f"example of theorem {number} lacks the field {missing.args[0]!r}") from None
        error = known[0].error(example)
    return _verdict(known[0], 1, error, example, start)


def _search(theorem: Theorem, examples: int, seed: int, database: ExampleDatabase | None) -> TheoremVerdict:
    from hypothesis import Phase, Verbosity, find, settings
    from hypothesis.errors import NoSuchExample

    start, tried, found = time.perf_counter(), 0, False

    def refutes(example: Example) -> bool:
        nonlocal tried, found
        tried += not found
        wrong = theorem.error(example) is not None
        found = found or wrong
        return wrong

    # Hypothesis keeps no database where a seed is given, and what it would keep are choices, which mean something else once a
    # strategy has changed. Examples are plain values, so they are kept as such.
    key = f"{theorem.method} {theorem.number}".encode()
    for stored in sorted(database.fetch(key), key=len) if database is not None else ():
        if refutes(earlier := json.loads(stored)):
            return _verdict(theorem, tried, theorem.error(earlier), earlier, start)
    how = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
    )
    try:
        example = find(theorem.given(), refutes, settings=how, random=random.Random(seed))
    except NoSuchExample:
        return _verdict(theorem, tried, None, {}, start)
    if database is not None:
        database.save(key, strict_json.dumps(example).encode())
    return _verdict(theorem, tried, theorem.error(example), example, start)


def _verdict(theorem: Theorem, tried: int, error: str | None, example: Example, start: float) -> TheoremVerdict:
    seconds = time.perf_counter() - start
    return TheoremVerdict(theorem, tried, error is None, None if error is None else example, error or "", seconds)
