"""Theorems on the methods, and the search for counterexamples.

Every claim of `model` about a method is a `Theorem` that is checked against the simulator. `check` tries it on many random examples
and reports the smallest counterexample found; `replay` tries it on one example.
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
from sim.theorems import engine_invariants, of_methods, server_invariants, server_laws, speedup_bound
from sim.theorems.theorem import Example, Theorem

if TYPE_CHECKING:
    from hypothesis.database import ExampleDatabase


def _of_methods() -> Iterator[Theorem]:
    """Yield the theorems of all modules of `sim/theorems/of_methods`."""
    names = sorted(each.name for each in resources.files(of_methods).iterdir())
    for name in names:
        if name.endswith(".py") and name != "__init__.py":
            yield from importlib.import_module(f"{of_methods.__name__}.{name.removesuffix('.py')}").THEOREMS


_SHARED = (engine_invariants, speedup_bound, server_invariants, server_laws)
THEOREMS = tuple(
    sorted((*_of_methods(), *(each for module in _SHARED for each in module.THEOREMS)), key=lambda theorem: theorem.method)
)

ENOUGH = 200
"""Number of examples within which a false statement must be refuted [examples]."""


@dataclass(frozen=True)
class TheoremVerdict:
    """Result of trying a theorem on examples."""

    theorem: Theorem
    tried: int
    """Examples tried, up to and including the first counterexample; its shrinking is not counted."""
    holds: bool
    """True if it held on every example tried."""
    counterexample: Example | None
    """Smallest counterexample found."""
    error: str
    """Error on the counterexample, in numbers; empty if there is none."""
    seconds: float

    @property
    def undecided(self) -> bool:
        """True if a statement that must fail was not refuted, but by too few examples to decide."""
        return self.holds and self.theorem.expect == "fails" and self.tried < ENOUGH

    @property
    def expected(self) -> bool | None:
        """True if the verdict is the expected one; None if undecided."""
        return None if self.undecided else self.holds == (self.theorem.expect == "holds")

    @property
    def reproduce(self) -> str:
        """Shell command that replays the counterexample; empty if there is none."""
        if self.counterexample is None:
            return ""
        theorem = ["--method", self.theorem.method, "--theorem", self.theorem.number]
        return shlex.join(["sim", "check", *theorem, "--example", strict_json.dumps(self.counterexample)])

    def document(self) -> dict[str, Any]:
        """Return the verdict as plain values, for JSON."""
        theorem = self.theorem
        return {
            "method": theorem.method, "theorem": theorem.number, "statement": theorem.statement, "source": theorem.source,
            "expect": theorem.expect, "tried": self.tried, "holds": self.holds, "as_expected": self.expected,
            "seconds": round(self.seconds, 3), "counterexample": self.counterexample, "error": self.error,
            "reproduce": self.reproduce,
        }  # fmt: skip

    def __str__(self) -> str:
        must = "" if self.theorem.expect == "holds" else " (expected to fail)"
        verdict = ("holds" if self.holds else "fails") + ("  <-- WRONG" if self.expected is False else "")
        verdict = "open" if self.undecided else verdict
        name = f"{self.theorem.method} {self.theorem.number:4}"
        examples = "example " if self.tried == 1 else "examples"
        lines = [f"{name} {verdict:6} {self.tried:6} {examples}  {self.theorem.statement}{must}"]
        if not self.holds:
            lines += [f"      {self.error}", f"      {self.reproduce}"]
        return "\n".join(lines)


def summary(verdicts: Sequence[TheoremVerdict]) -> str:
    """Return one line that names the wrong and the undecided statements by method and number."""
    wrong = [verdict for verdict in verdicts if verdict.expected is False]
    still_open = [verdict for verdict in verdicts if verdict.undecided]
    if not wrong and not still_open:
        return "every statement came out as expected"
    line = "no statement came out wrong"
    if wrong:
        unrefuted = " (no counterexample found)"
        names = [_named(verdict) + (unrefuted if verdict.holds else "") for verdict in wrong]
        line = f"{len(wrong)} {'statement' if len(wrong) == 1 else 'statements'} came out wrong: {', '.join(names)}"
    if still_open:
        names = [f"{_named(verdict)} ({verdict.tried} tried)" for verdict in still_open]
        line += f"; open (expected to fail, no counterexample found): {', '.join(names)}; try --examples {ENOUGH} or more"
    return line


def _named(verdict: TheoremVerdict) -> str:
    return f"{verdict.theorem.method} {verdict.theorem.number}"


def select(method: str | None = None, only: Sequence[str] | None = None) -> tuple[Theorem, ...]:
    """Return the theorems of a method (default: all), or those with the numbers `only`; a number without letter selects all parts.

    >>> [theorem.number for theorem in select("ppd", only=["27"])]
    ['27a', '27b', '27c']
    """
    methods = dict.fromkeys(theorem.method for theorem in THEOREMS)
    if method is not None and method not in methods:
        raise checks.unknown("method", method, methods)
    theorems = [theorem for theorem in THEOREMS if method in (None, theorem.method)]
    if only is None:
        return tuple(theorems)
    for wanted in only:
        if not any(wanted in _names(theorem) for theorem in theorems):
            raise checks.unknown("theorem", wanted, dict.fromkeys(theorem.number for theorem in theorems))
    return tuple(theorem for theorem in theorems if _names(theorem) & {*only})


def _names(theorem: Theorem) -> set[str]:
    return {theorem.number, theorem.number.rstrip("abcdefghijklmnopqrstuvwxyz")}


def check(
    method: str | None = None,
    examples: int = 1000,
    seed: int = 0,
    only: Sequence[str] | None = None,
    database: ExampleDatabase | None = None,
) -> Iterator[TheoremVerdict]:
    """Try the theorems of a method (default: all) on random examples, and yield their verdicts.

    The examples of a theorem depend only on the seed. With a `database`, counterexamples are stored there and tried first in later
    searches.
    """
    chosen = select(method, only)
    checks.whole("examples", examples, 1)
    checks.whole("seed", seed, 0)
    try:
        import hypothesis  # noqa: F401  imported here so that the error precedes the first verdict
    except ImportError:
        raise checks.ParameterError("theorems are checked with hypothesis, which is not installed; install hypothesis") from None
    return (_search(theorem, examples, seed, database) for theorem in chosen)


def replay(number: str, example: Example, method: str | None = None) -> TheoremVerdict:
    """Try one theorem on one example, such as an earlier counterexample; give `method` if several methods share the number.

    >>> replay("21a", {"form": "literal", "layers": 40, "exit_layer": 20, "candidates": 3, "matches": [True, False]}, "ppd").holds
    True
    """
    matching = [theorem for theorem in select(method) if theorem.number == number]
    if not matching:
        raise checks.unknown("theorem", number, dict.fromkeys(theorem.number for theorem in select(method)))
    if len(matching) > 1:
        owners = " and ".join(theorem.method for theorem in matching)
        raise checks.ParameterError(f"theorem {number} exists for {owners}; name the method")
    if not isinstance(example, dict):
        raise checks.ParameterError(f"example must be an object of fields and values, got {example!r}")
    start = time.perf_counter()
    try:
        # A mistyped example is not a counterexample.
        error = matching[0].error(example, let_through=(checks.ParameterError, KeyError))
    except KeyError as missing:
        if missing.args[0] not in example:
            raise checks.ParameterError(f"example of theorem {number} lacks the field {missing.args[0]!r}") from None
        error = matching[0].error(example)
    return _verdict(matching[0], 1, error, example, start)


def _search(theorem: Theorem, examples: int, seed: int, database: ExampleDatabase | None) -> TheoremVerdict:
    from hypothesis import Phase, Verbosity, find, settings
    from hypothesis.errors import NoSuchExample

    start, tried, refuted = time.perf_counter(), 0, False

    def refutes(example: Example) -> bool:
        nonlocal tried, refuted
        tried += not refuted
        wrong = theorem.error(example) is not None
        refuted = refuted or wrong
        return wrong

    # Hypothesis keeps no database if a seed is given, and it would store choices, whose meaning changes with the strategy. Examples
    # are plain values and are stored as such.
    key = f"{theorem.method} {theorem.number}".encode()
    for stored in sorted(database.fetch(key), key=len) if database is not None else ():
        if refutes(earlier := json.loads(stored)):
            return _verdict(theorem, tried, theorem.error(earlier), earlier, start)
    search = settings(
        max_examples=examples,
        database=None,
        deadline=None,
        derandomize=False,
        phases=(Phase.generate, Phase.shrink),
        verbosity=Verbosity.quiet,
    )
    try:
        example = find(theorem.given(), refutes, settings=search, random=random.Random(seed))
    except NoSuchExample:
        return _verdict(theorem, tried, None, {}, start)
    if database is not None:
        database.save(key, strict_json.dumps(example).encode())
    return _verdict(theorem, tried, theorem.error(example), example, start)


def _verdict(theorem: Theorem, tried: int, error: str | None, example: Example, start: float) -> TheoremVerdict:
    seconds = time.perf_counter() - start
    return TheoremVerdict(theorem, tried, error is None, None if error is None else example, error or "", seconds)
