"""The mutation run itself: what it plants, which tests it picks, and what it says."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import coverage
import pytest

from tests.mutation import mutation_sample
from tests.mutation.mutation_sample import (
    ROOT,
    Fault,
    Map,
    Outcome,
    changes,
    drawn,
    equivalent,
    hunted,
    is_listed,
    named,
    places,
    summary,
)


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
    source = 'draw(1, help="a number", fontsize=9, label="time [ms]")\nraise ParameterError(f"{x} is" + " too large", 3)\n'
    kinds = [kind for *_, kind, _ in places(ast.parse(source))]
    assert sorted(kinds) == ["dropped keyword", "dropped statement", "number", "words"]


def test_a_draw_is_repeated_by_its_seed_and_every_fault_changes_its_file() -> None:
    two = ("figures/of_papers/dec*.py", "figures/common/point_names.py")
    faults = drawn("figures", 8, 3, two)
    assert faults == drawn("figures", 8, 3, two)
    assert faults != drawn("figures", 8, 4, two)
    assert {fault.path for fault in faults} <= {"figures/of_papers/slides_speedups.py", "figures/common/point_names.py"}
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
    assert of(1, 100) == ["quick", "slow"]  # run at import: every test of the file
    assert of(12, 100) == of(10, 100) == []
    known.lines["some.py"][12] = {"other"}
    assert of(10, 100) == ["other"]  # a default: every caller
    known.lines["some.py"] = {1: set(), 4: set(), 5: set()}
    known.parts = [(None, {"some.py": "", "next.py": "", "below/other.py": ""})]
    known.lines |= {"next.py": {1: {"quick"}}, "below/other.py": {1: {"slow"}}}
    assert of(1, 100) == of(5, 100) == ["quick"]  # run while the modules of the folder are imported
    assert of(12, 100) == []  # never run


class Answering:
    """In the place of `Copies`: answers at once, by what catches each fault."""

    def __init__(self, catching: dict[str, str]) -> None:
        self.catching, self.asked = catching, []

    def ask(self, fault: Fault | None, tests: list[str], expected: float, then: Callable[[str], None]) -> None:
        self.asked.append((fault.path if fault else "", tests))
        first = self.catching.get(fault.path, "") if fault else ("fails anyway" if "unsound" in tests else "")
        then(first if first in tests or not fault else "")

    def finish(self) -> None: ...


def test_survivors_of_the_first_seconds_get_the_tests_that_are_left(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "equivalent.toml").write_text('[[fault]]\npath = "alike.py"\nbefore = "1"\nafter = "2"\nwhy = "only memory"\n')
    monkeypatch.setattr(mutation_sample, "EQUIVALENT", tmp_path / "equivalent.toml")
    (tmp_path / "new.py").write_text("1")
    monkeypatch.setattr(mutation_sample, "ROOT", tmp_path)
    faults = [
        Fault(path, 1, "number", "1", "2", "") for path in ("first.py", "second.py", "never.py", "alike.py", "off.py", "new.py")
    ]
    known = Map(tmp_path, ["new"])
    known.seconds |= {"a": 1.0, "b": 2.0, "unsound": 0.5}
    for fault in faults:
        known.lines[fault.path] = {1: set() if fault.path == "new.py" else {"a", "b"}}
    known.lines["off.py"] = {1: {"a", "unsound"}}
    copies = Answering({"first.py": "a", "second.py": "b", "off.py": "unsound", "new.py": "new"})
    by_path = {each.fault.path: each for each in hunted(faults, known, copies, 1.1, 5.0)}
    assert {path: (each.state, each.by) for path, each in by_path.items()} == {
        "first.py": ("caught", "a"), "second.py": ("caught", "b"), "never.py": ("survived", ""), "alike.py": ("equivalent", ""),
        "off.py": ("survived", ""), "new.py": ("caught", "new"),
    }  # fmt: skip
    assert by_path["never.py"].tests == 3
    assert ("second.py", ["b"]) in copies.asked
    said = capsys.readouterr().out
    assert said.count("survived (") == 2
    assert "equivalent (3 tests): alike.py:1" in said
    assert "ignored, because they also fail on the unchanged tree: unsound" in said


def test_a_listed_fault_with_a_source_line_is_of_that_line_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "some.py").write_text("a = f(-1)\nb = g(-1)\n")
    monkeypatch.setattr(mutation_sample, "ROOT", tmp_path)
    faults = [Fault("some.py", line, "number", "-1", "-2", "") for line in (1, 2)]
    row = {"path": "some.py", "before": "-1", "after": "-2"}
    assert [is_listed(fault, [row]) for fault in faults] == [True, True]
    assert [is_listed(fault, [row | {"line": "f(-1)"}]) for fault in faults] == [True, False]
    assert [is_listed(fault, [row | {"after": "-3"}]) for fault in faults] == [False, False]


def test_a_map_of_another_clone_serves_too(tmp_path: Path) -> None:
    data = coverage.CoverageData(str(tmp_path / "lines-1"))
    data.set_context("a test")
    data.add_lines({"/elsewhere/sim/queue/serve.py": [3]})
    data.write()
    (tmp_path / "durations-1.json").write_text('{"a test": 0.5}')
    assert Map(tmp_path).of("sim/queue/serve.py") == {3: {"a test"}}


def test_a_summary_has_rates_with_intervals_and_what_was_left() -> None:
    fault = Fault("sim/x.py", 1, "number", "1", "2", "")
    outcomes = [Outcome(fault, state, "", 1) for state in ("caught", "caught", "caught", "survived", "equivalent")]
    said = summary(outcomes).splitlines()
    assert said[1].split()[:7] == ["sim", "5", "3", "1", "0", "1", "75.0%"]
    assert said[1].split()[-1] == "60.0%"
    assert said[-1] == "not caught, by kind: number 1"


@pytest.mark.slow
def test_every_listed_fault_exists() -> None:
    """A fault listed as equivalent occurs in the code as it is now."""
    rows = equivalent()
    faults = {path: named(path) for path in {row["path"] for row in rows}}
    assert [row for row in rows if not any(is_listed(fault, [row]) for fault in faults[row["path"]])] == []
