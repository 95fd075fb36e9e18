"""How theorems are tried in tests: they come out as the theory says, fail small, are refuted by faults, can be written down."""

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

from sim.scenarios.cases import Case
from sim.theorems import TheoremVerdict, check, replay, select
from sim.theorems.theorem import Theorem

Fault = Callable[[pytest.MonkeyPatch], None]
FEW, MORE, MANY = 30, 60, 1000
"""Examples in the quick tier, of theorems whose planted faults show late, and in the slow tier."""
_NUMBER = r"-?\d[\d.]*(e-?\d+)?"
SHOW_LATE = {("speculative", "28e"), ("ppd", "27c"), ("skipdecode", "30c")}
"""Theorems with a planted fault that shows within `MORE` examples and not within `FEW`."""


def verdict_on(theorem: Theorem, **options: Any) -> TheoremVerdict:
    (verdict,) = check(theorem.method, only=[theorem.number], **options)
    return verdict


DRAWN, EVALUATED = 25, 10
"""Examples of which the ranges are kept, and the first of them, of which the comparisons are."""


def compared(theorem: Theorem) -> tuple[dict[str, Any], list[str]]:
    """What a theorem says, what it is tried on, and what it compares on at least a fifth of its first examples: how closely,
    between which numbers what it compares lies, and about which mean, so that a test of something else is seen; and the errors of
    all examples.

    Of a bound it says between which numbers that lies too, and on how many examples it is reached: a looser one is seen. Numbers in
    words are `#`. Of what must not hold it says on how many examples it fails.
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
            own = getattr(statement, name)

            def recording(what: str, *rest: Any, own: Any = own, name: str = name, **more: Any) -> None:
                within = more.get("within", rest[2] if len(rest) > 2 else 0.0)
                said = f"{name}: {re.sub(_NUMBER, '#', what)}"
                now.add(said)
                within_most[said] = max(within_most.get(said, 0.0), float(np.max(within)))
                found = values.setdefault(said, {"got": [], "bound": []})
                found["got"] += _numbers_in(rest[0])
                found["bound"] += _numbers_in(rest[1]) if name == "at_most" else []
                if name == "at_most" and np.all(np.isclose(rest[0], rest[1], rtol=1e-9, atol=0)):
                    tight.add(said)
                own(what, *rest, **more)

            for module in [*sys.modules.values()]:
                if getattr(module, "__name__", "").startswith("sim.theorems") and getattr(module, name, None) is own:
                    patch.setattr(module, name, recording)
        how = settings(max_examples=DRAWN, database=None, phases=(Phase.generate,), derandomize=False, verbosity=Verbosity.quiet)
        with contextlib.suppress(NoSuchExample):
            find(theorem.given(), lambda example: examples.append(example) or False, settings=how, random=random.Random(1))
        for example in examples[:EVALUATED]:
            now: set[str] = set()
            tight: set[str] = set()
            errors.append(theorem.error(example))
            seen.update(now)
            reached.update(tight)
    wrong = len(errors) - errors.count(None)
    errors += [theorem.error(example) for example in examples[EVALUATED:]]

    def said_of(what: str) -> str:
        parts = [f"within {within_most[what]:.3g}" if within_most[what] else "exactly"]
        parts += [f"{name} {_range(found)}" for name, found in values[what].items() if found]
        return f"{what} ({'; '.join([*parts, *[f'reached {reached[what]} times'] * (what in reached)])})"

    often = [what for what, count in seen.items() if 5 * count >= min(len(examples), EVALUATED)]
    kept = {
        "statement": theorem.statement, "source": theorem.source, "expect": theorem.expect,
        **({"fails_on": wrong} if theorem.expect == "fails" else {}),
        "tried_on": ranges(examples), "compares": sorted(map(said_of, often)),
    }  # fmt: skip
    return kept, [error for error in errors if error is not None]


def _numbers_in(value: Any) -> list[float]:
    """All numbers of a value, those of its parts included."""
    if isinstance(value, np.ndarray | np.generic):
        return _numbers_in(value.tolist())
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple | set):
        return [number for each in value for number in _numbers_in(each)]
    return [float(value)] if isinstance(value, Real) and not isinstance(value, bool) else []


def _range(numbers: Sequence[float]) -> str:
    """From the least to the greatest, and their mean; what is 0 but for rounding is 0."""
    least, greatest, mean = (each if abs(each) > 1e-9 else 0.0 for each in (min(numbers), max(numbers), float(np.mean(numbers))))
    return f"{least:.4g} to {greatest:.4g}, mean {mean:.6g}" if least != greatest else f"{least:.6g}"


def ranges(examples: Sequence[Any]) -> list[str]:
    """The values that each field of the examples takes: from the least number to the greatest, or all words; `-` where it lacks."""
    found: dict[str, list[Any]] = {}
    count: Counter[str] = Counter()

    def look(value: Any, name: str) -> None:
        if isinstance(value, dict):
            for key, each in value.items():
                look(each, f"{name}.{key}".removeprefix("."))
        elif isinstance(value, list | tuple):
            found.setdefault(f"length of {name}", []).append(len(value))
            for each in value:
                look(each, f"{name}[]")
        else:
            found.setdefault(name, []).append(value)

    for example in examples:
        look(example, "")
        count.update(_fields(example))
    said = []
    for name, values in sorted(found.items()):
        numbers = [value for value in values if isinstance(value, int | float) and not isinstance(value, bool)]
        words = sorted({str(value) for value in values if not isinstance(value, int | float) or isinstance(value, bool)})
        parts = [f"{min(numbers):g} to {max(numbers):g}"] if numbers else []
        missing = ["-"] if name in count and count[name] < len(examples) else []
        said.append(f"{name}: {', '.join([*parts, *words, *missing])}")
    return said


def _fields(example: Any, name: str = "") -> Iterator[str]:
    """The names of an example's fields and of theirs, but for those in lists."""
    if isinstance(example, dict):
        for key, each in example.items():
            yield from _fields(each, f"{name}.{key}".removeprefix("."))
    else:
        yield name


def checked(theorems: Sequence[Theorem]) -> list[Theorem]:
    """Of theorems that hold: those on which `check` itself is tried. All are tried, on as many examples, where it is kept what
    they say (`test_theorems_said`)."""
    holding = [theorem for theorem in theorems if theorem.expect == "holds"]
    return [theorem for index, theorem in enumerate(holding) if not index % 8 or (theorem.method, theorem.number) in SHOW_LATE]


def few(theorem: Theorem) -> int:
    """The examples of a theorem in the quick tier."""
    return MORE if (theorem.method, theorem.number) in SHOW_LATE else FEW


def comes_out(theorem: Theorem, *, examples: int, seed: int = 0) -> None:
    verdict = verdict_on(theorem, examples=examples, seed=seed)
    assert verdict.expected is not False, f"{theorem.statement}\n{verdict.error}\n{verdict.reproduce}"
    # Of many examples there may not be so many.
    assert verdict.tried == examples or examples > MORE or not verdict.holds


def fails_small(theorem: Theorem) -> dict[str, Any]:
    """What must not hold fails on an example of a few words, and again when that is tried alone."""
    verdict = verdict_on(theorem, examples=MANY)
    assert not verdict.holds
    assert verdict.expected
    assert verdict.error
    assert verdict.counterexample is not None
    assert len(json.dumps(verdict.counterexample)) < 330
    again = replay(theorem.number, verdict.counterexample, theorem.method)
    assert (again.holds, again.error, again.expected) == (False, verdict.error, True)
    return verdict.counterexample


def refuting(faults: Sequence[tuple[str, str, Fault]]) -> list[Any]:
    """Parameters of a test of planted faults: all are searched for, and the first of every eighth theorem is made small; slow: all
    are."""
    small = {number: what for number, what, _ in reversed(faults)}  # the first of each theorem
    few = [*dict.fromkeys(number for number, *_ in faults)][::8]
    found = []
    for number, what, fault in faults:
        quick = number in few and small[number] == what
        found += [] if quick else [pytest.param(number, fault, False, id=f"{number} {what}".strip())]
        found += [pytest.param(number, fault, True, id=f"{number} {what} made small", marks=() if quick else pytest.mark.slow)]
    return found


def shows(method: str, number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault shows on an example, as it was drawn, which is none once it is mended."""
    [theorem] = select(method, only=[number])
    how = settings(max_examples=MANY, database=None, phases=(Phase.generate,), derandomize=False, verbosity=Verbosity.quiet)
    with monkeypatch.context() as patch:
        fault(patch)
        example = find(theorem.given(), lambda example: theorem.error(example) is not None, settings=how, random=random.Random(0))
    assert theorem.error(example) is None


def is_refuted(method: str, number: str, fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault shows on a small example, which is none once it is mended."""
    with monkeypatch.context() as patch:
        fault(patch)
        (verdict,) = check(method, only=[number], examples=MANY)
        assert not verdict.holds, f"{verdict.tried} examples did not show the fault"
        assert verdict.counterexample is not None
        assert len(json.dumps(verdict.counterexample)) < 400, "the counterexample is not a small one"
        again = replay(number, verdict.counterexample, method)
        assert (again.holds, again.error) == (False, verdict.error)
    mended = replay(number, verdict.counterexample, method)
    assert (mended.holds, mended.error, mended.counterexample) == (True, "", None)


def survives_json(theorem: Theorem, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr("sim.theorems.THEOREMS", (replace(theorem, holds=lambda example: seen.append(example)),))
    list(check(examples=5))
    assert seen
    for example in seen:
        again = json.loads(json.dumps(example))
        assert again == example
        assert theorem.error(again) == theorem.error(example)


def after(fault: Callable[..., Any], what: Any, name: str) -> Fault:
    """A fault that replaces `what.name` by `fault`, which is given the right one first."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        right = getattr(what, name)
        patch.setattr(what, name, lambda *args, **kwargs: fault(right, *args, **kwargs))

    return spoil


def one_more(right: Any, *args: Any, **kwargs: Any) -> Any:
    return right(*args, **kwargs) + 1


def plain_decoding_on_one_device(patch: pytest.MonkeyPatch) -> None:
    """A fault: speed-ups on several devices are over plain decoding on one."""
    right = Case.plain_time.fget  # type: ignore[attr-defined]

    def fault(case: Case) -> float:
        alone = case.plain_time_on_one_device
        return float(right(case)) if alone is None else alone

    patch.setattr(Case, "plain_time", property(fault))
