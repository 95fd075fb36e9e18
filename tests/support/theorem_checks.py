"""Checks of theorems in tests: they hold or fail as expected, fail on small examples, detect faults, and survive JSON."""

from __future__ import annotations

import contextlib
import importlib
import json
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from numbers import Real
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, Verbosity, find, settings
from hypothesis.errors import NoSuchExample

from model.costs.step_costs import StepCosts
from sim.scenarios.cases import Case
from sim.theorems import TheoremVerdict, check, replay, select
from sim.theorems.theorem import Theorem

Fault = Callable[[pytest.MonkeyPatch], None]
FEW, MORE, MANY = 30, 60, 1000
"""Examples in the quick tier, for theorems whose planted faults show late, and in the slow tier."""
_NUMBER = r"-?\d[\d.]*(e-?\d+)?"
LATE_FAULTS = {("speculative", "28e"), ("ppd", "27c"), ("skipdecode", "30c")}
"""Theorems with a planted fault that shows within `MORE` examples, but not within `FEW`."""


def verdict_on(theorem: Theorem, **options: Any) -> TheoremVerdict:
    (verdict,) = check(theorem.method, only=[theorem.number], **options)
    return verdict


STORED_EXAMPLES, COMPARED_EXAMPLES = 25, 10
"""Number of examples whose ranges are stored, and of those, the first, whose comparisons are stored."""


def summary_of(theorem: Theorem) -> tuple[dict[str, Any], list[str]]:
    """Record what a theorem states, its examples, and the comparisons made on at least a fifth of the first examples: tolerance,
    range and mean of the compared numbers, so that a change of the test is seen; also return the errors of all examples.

    For a bound, also its range and the number of examples that reach it, so a looser bound is seen. Numbers in strings are `#`.
    For a statement that must not hold, also the number of examples on which it fails.
    """
    seen: Counter[str] = Counter()
    reached: Counter[str] = Counter()
    within_most: dict[str, float] = {}
    values: dict[str, dict[str, list[float]]] = {}
    examples: list[Any] = []
    errors: list[str | None] = []
    statement = importlib.import_module("sim.theorems.theorem")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("equal", "at_most"):
            original = getattr(statement, name)

            def recorded_check(what: str, *rest: Any, original: Any = original, name: str = name, **more: Any) -> None:
                within = more.get("within", rest[2] if len(rest) > 2 else 0.0)
                comparison = f"{name}: {re.sub(_NUMBER, '#', what)}"
                now.add(comparison)
                within_most[comparison] = max(within_most.get(comparison, 0.0), float(np.max(within)))
                found = values.setdefault(comparison, {"got": [], "bound": []})
                found["got"] += _numbers_in(rest[0])
                found["bound"] += _numbers_in(rest[1]) if name == "at_most" else []
                if name == "at_most" and np.all(np.isclose(rest[0], rest[1], rtol=1e-9, atol=0)):
                    tight.add(comparison)
                original(what, *rest, **more)

            for module in [module for known, module in sys.modules.items() if known.startswith("sim.theorems")]:
                if getattr(module, name, None) is original:
                    patch.setattr(module, name, recorded_check)
        how = settings(
            max_examples=STORED_EXAMPLES, database=None, phases=(Phase.generate,), derandomize=False, verbosity=Verbosity.quiet
        )
        with contextlib.suppress(NoSuchExample):
            find(theorem.given(), lambda example: examples.append(example) or False, settings=how, random=random.Random(1))
        for example in examples[:COMPARED_EXAMPLES]:
            now: set[str] = set()
            tight: set[str] = set()
            errors.append(theorem.error(example))
            seen.update(now)
            reached.update(tight)
    wrong = len(errors) - errors.count(None)
    errors += [theorem.error(example) for example in examples[COMPARED_EXAMPLES:]]

    def describe(what: str) -> str:
        parts = [f"within {within_most[what]:.3g}" if within_most[what] else "exactly"]
        parts += [f"{name} {_range(found)}" for name, found in values[what].items() if found]
        return f"{what} ({'; '.join([*parts, *[f'reached {reached[what]} times'] * (what in reached)])})"

    frequent = [what for what, count in seen.items() if 5 * count >= min(len(examples), COMPARED_EXAMPLES)]
    kept = {
        "statement": theorem.statement, "source": theorem.source, "expect": theorem.expect,
        **({"fails_on": wrong} if theorem.expect == "fails" else {}),
        "tried_on": ranges(examples), "compares": sorted(map(describe, frequent)),
    }  # fmt: skip
    return kept, [error for error in errors if error is not None]


def _numbers_in(value: Any) -> list[float]:
    """All numbers of a value, including those of its parts."""
    if isinstance(value, np.ndarray | np.generic):
        return _numbers_in(value.tolist())
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple | set):
        return [number for each in value for number in _numbers_in(each)]
    return [float(value)] if isinstance(value, Real) and not isinstance(value, bool) else []


def _range(numbers: Sequence[float]) -> str:
    """Least, greatest and mean; values below 1e-9 are 0."""
    least, greatest, mean = (each if abs(each) > 1e-9 else 0.0 for each in (min(numbers), max(numbers), float(np.mean(numbers))))
    return f"{least:.4g} to {greatest:.4g}, mean {mean:.6g}" if least != greatest else f"{least:.6g}"


def ranges(examples: Sequence[Any]) -> list[str]:
    """Values of each field of the examples: range of numbers, or all words; `-` where it is missing."""
    found: dict[str, list[Any]] = {}
    count: Counter[str] = Counter()

    def collect(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                collect(each, f"{name}.{key}".removeprefix("."))
        elif isinstance(value, list | tuple):
            found.setdefault(f"length of {name}", []).append(len(value))
            for each in value:
                collect(each, f"{name}[]")
        else:
            found.setdefault(name, []).append(value)

    for example in examples:
        collect(example, "")
        count.update(_fields(example))
    lines = []
    for name, values in sorted(found.items()):
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        words = sorted({str(value) for value in values if not isinstance(value, int | float) or isinstance(value, bool)})
        parts = [f"{min(numbers):g} to {max(numbers):g}"] if numbers else []
        missing = ["-"] if name in count and count[name] < len(examples) else []
        lines.append(f"{name}: {', '.join([*parts, *words, *missing])}")
    return lines


def _fields(example: Any, name: str = "") -> Iterator[str]:
    """Names of an example's fields, recursively, except in lists."""
    if isinstance(example, dict):
        for key, each in example.items():
            yield from _fields(each, f"{name}.{key}".removeprefix("."))
    else:
        yield name


def quick_theorems(theorems: Sequence[Theorem]) -> list[Theorem]:
    """Select theorems that hold, for tests of `check` itself. All theorems are tested on the same number of examples in
    `test_theorems_said`."""
    holding = [theorem for theorem in theorems if theorem.expect == "holds"]
    return [theorem for index, theorem in enumerate(holding) if not index % 8 or (theorem.method, theorem.number) in LATE_FAULTS]


def quick_examples(theorem: Theorem) -> int:
    """Number of examples of a theorem in the quick tier."""
    return MORE if (theorem.method, theorem.number) in LATE_FAULTS else FEW


def assert_expected_verdict(theorem: Theorem, *, examples: int, seed: int = 0) -> None:
    verdict = verdict_on(theorem, examples=examples, seed=seed)
    assert verdict.expected is not False, f"{theorem.statement}\n{verdict.error}\n{verdict.reproduce}"
    # A theorem may have fewer different examples than requested.
    assert verdict.tried == examples or examples > MORE or not verdict.holds


def assert_fails_on_small_example(theorem: Theorem) -> dict[str, Any]:
    """Check that a false theorem fails on a small example, and again on that example alone."""
    verdict = verdict_on(theorem, examples=MANY)
    assert not verdict.holds
    assert verdict.expected
    assert verdict.error
    assert verdict.counterexample is not None
    assert len(json.dumps(verdict.counterexample)) < 330
    again = replay(theorem.number, verdict.counterexample, theorem.method)
    assert (again.holds, again.error, again.expected) == (False, verdict.error, True)
    return verdict.counterexample


def fault_parameters(faults: Sequence[tuple[str, str, Fault]]) -> list[Any]:
    """Parameters of a test of planted faults: all faults are searched for, and the first of every eighth theorem is minimised;
    slow: all are minimised."""
    small = {number: what for number, what, _ in reversed(faults)}  # the first of each theorem
    few = [*dict.fromkeys(number for number, *_ in faults)][::8]
    found = []
    for number, what, fault in faults:
        quick = number in few and small[number] == what
        found += [] if quick else [pytest.param(number, fault, False, id=f"{number} {what}".strip())]
        found += [pytest.param(number, fault, True, id=f"{number} {what} made small", marks=() if quick else pytest.mark.slow)]
    return found


def assert_fault_shows(method: str, number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fault shows on a drawn example, which passes without the fault."""
    [theorem] = select(method, only=[number])
    how = settings(max_examples=MANY, database=None, phases=(Phase.generate,), derandomize=False, verbosity=Verbosity.quiet)
    with monkeypatch.context() as patch:
        fault(patch)
        example = find(theorem.given(), lambda example: theorem.error(example) is not None, settings=how, random=random.Random(0))
    assert theorem.error(example) is None


def assert_fault_refuted(method: str, number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that a fault shows on a minimised example, which passes without the fault."""
    with monkeypatch.context() as patch:
        fault(patch)
        (verdict,) = check(method, only=[number], examples=MANY)
        assert not verdict.holds, f"{verdict.tried} examples did not show the fault"
        assert verdict.counterexample is not None
        assert len(json.dumps(verdict.counterexample)) < 400, "the counterexample is not small"
        again = replay(number, verdict.counterexample, method)
        assert (again.holds, again.error) == (False, verdict.error)
    mended = replay(number, verdict.counterexample, method)
    assert (mended.holds, mended.error, mended.counterexample) == (True, "", None)


def verdict_tests(theorems: Sequence[Theorem], named: Callable[[Theorem], str] = lambda theorem: theorem.number) -> tuple[Any, Any]:
    """Return two tests of these theorems: their expected verdicts on few examples, and in the slow tier on many."""

    @pytest.mark.parametrize("theorem", [pytest.param(theorem, id=named(theorem)) for theorem in quick_theorems(theorems)])
    def expected(theorem: Theorem) -> None:
        assert_expected_verdict(theorem, examples=quick_examples(theorem))

    @pytest.mark.slow
    @pytest.mark.parametrize("theorem", [pytest.param(theorem, id=named(theorem)) for theorem in theorems])
    def expected_on_many(theorem: Theorem) -> None:
        assert_expected_verdict(theorem, examples=MANY, seed=1)

    return expected, expected_on_many


def assert_examples_survive_json(theorem: Theorem, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("sim.theorems.THEOREMS", (replace(theorem, holds=lambda example: seen.append(example)),))
    list(check(examples=5))
    assert seen
    for example in seen:
        again = json.loads(json.dumps(example))
        assert again == example
        assert theorem.error(again) == theorem.error(example)


def with_fault(fault: Callable[..., Any], what: Any, name: str) -> Fault:
    """Return a fault that replaces `what.name` by `fault`, which receives the right function first.

    Costs forget times of passes that they know from before.
    """

    def spoil(patch: pytest.MonkeyPatch) -> None:
        right = getattr(what, name)
        patch.setattr(StepCosts, "times_by_kind", property(lambda cost: {}))
        patch.setattr(what, name, lambda *args, **kwargs: fault(right, *args, **kwargs))

    return spoil


def plus_one(right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*args, **kwargs) + 1


def plain_decoding_on_one_device(patch: pytest.MonkeyPatch) -> None:
    """Plant a fault: speed-ups on several devices are relative to plain decoding on one."""
    right = Case.plain_time.fget  # type: ignore[attr-defined]

    def fault(case: Case) -> float:
        alone = case.plain_time_on_one_device
        return float(right(case)) if alone is None else alone

    patch.setattr(Case, "plain_time", property(fault))
