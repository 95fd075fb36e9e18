"""The mutation run itself: what it plants, which tests it picks, and what it says."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests import mutation_sample
from tests.mutation_sample import ROOT, Fault, Map, Outcome, changes, drawn, places, summary


@pytest.mark.parametrize(("before", "kind", "after"), [
    ("a < b", "comparison", "a <= b"), ("a + b", "arithmetic", "a - b"), ("3", "number", "4"), ("2.0", "number", "3.0"),
    ("'time [ms]'", "words", "'TIME [MS]'"), ("not a", "sign", "a"), ("a and b", "and/or", "a or b"), ("min", "min/max", "max"),
    ("a.sort()", "dropped call", "a"), ("f(a, b)", "swapped arguments", "f(b, a)"),
    ("a if b else c", "condition", "a if not b else c"),
])  # fmt: skip
def test_faults_are_small_changes(before: str, kind: str, after: str) -> None:
    node = ast.parse(before, mode="eval").body
    assert (kind, after) in [(found, ast.unparse(changed)) for found, changed in changes(node) if changed is not None]


@pytest.mark.parametrize("call", ["max(a, b)", "np.maximum(a, b)", "math.hypot(a, b)", "f(*a, b)", "f([], [], c)"])
def test_arguments_whose_order_says_nothing_are_not_swapped(call: str) -> None:
    assert "swapped arguments" not in [kind for kind, _ in changes(ast.parse(call, mode="eval").body)]


def test_a_change_changes_something() -> None:
    tree = ast.parse("', '.join(x) + ' [ms]' + '[#]' + str(-1) + str(0.0) + str(True)")
    found = [(ast.unparse(node), ast.unparse(changed)) for *_, node, _, changed in places(tree) if changed is not None]
    assert len(found) > 4
    assert all(before != after for before, after in found)


def test_words_that_only_explain_and_looks_are_left_alone() -> None:
    source = 'draw(1, help="so many", fontsize=9, label="time [ms]")\nraise ParameterError(f"{x} is" + " too large", 3)\n'
    kinds = [kind for *_, kind, _ in places(ast.parse(source))]
    assert sorted(kinds) == ["dropped keyword", "dropped statement", "number", "words"]


def test_a_draw_is_repeated_by_its_seed_and_every_fault_changes_its_file() -> None:
    faults = drawn("figures", 8, 3)
    assert faults == drawn("figures", 8, 3)
    assert faults != drawn("figures", 8, 4)
    for fault in faults:
        before = (ROOT / fault.path).read_text(encoding="utf-8")
        assert ast.unparse(ast.parse(before)) + "\n" != fault.source
        assert 1 <= fault.line <= len(before.splitlines())


def test_the_tests_of_a_line_are_picked_fastest_first_within_the_time(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = "x = 1\n\n\ndef f(a):\n    return g(a,\n             2)\n\n\ndef unused(\n    a=3,\n):\n    return 3\n"
    (tmp_path / "some.py").write_text(source)
    monkeypatch.setattr(mutation_sample, "ROOT", tmp_path)
    known = Map(tmp_path)
    known.seconds = {"slow": 9.0, "quick": 1.0, "other": 2.0}
    known.lines["some.py"] = {1: set(), 5: {"slow", "quick"}, 4: set(), 9: set()}

    def of(line: int, most: float) -> list[str]:
        return known.tests(Fault("some.py", line, "number", "", "", ""), most)

    assert of(5, 100) == ["quick", "slow"]
    assert of(5, 2) == ["quick"]
    assert of(6, 100) == ["quick", "slow"]  # a statement over two lines
    assert of(1, 100) == ["quick", "slow"]  # run at import: whatever runs the file
    assert of(12, 100) == of(10, 100) == []
    known.lines["some.py"][12] = {"other"}
    assert of(10, 100) == ["other"]  # a default: whatever calls it


def test_a_summary_has_rates_with_intervals_and_what_was_left() -> None:
    fault = Fault("sim/x.py", 1, "number", "1", "2", "")
    outcomes = [Outcome(fault, state, "", 1) for state in ("caught", "caught", "caught", "survived")]
    said = summary(outcomes).splitlines()
    assert said[1].split()[:6] == ["sim", "4", "3", "1", "0", "75.0%"]
    assert said[-1] == "not caught, by kind: number 1"
