"""Snapshot of every theorem: statement, ranges of its examples, and comparisons, so that no theorem is weakened unnoticed.

The snapshot is `data/theorems.json`; `python -m tests.sim.test_theorem_statements` rewrites it. Review the diff before
committing it.
"""

from __future__ import annotations

import importlib
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from sim.theorems import THEOREMS
from sim.theorems.theorem import Theorem
from tests.support.theorem_checks import summary_of

SNAPSHOT = Path(__file__).parents[1] / "data" / "theorems.json"


def name(theorem: Theorem) -> str:
    return f"{theorem.method} {theorem.number}"


@cache
def snapshot() -> dict[str, Any]:
    theorems: dict[str, Any] = json.loads(SNAPSHOT.read_text(encoding="utf-8"))
    return theorems


def test_snapshot_has_every_theorem() -> None:
    assert [*snapshot()] == [name(theorem) for theorem in THEOREMS]


@pytest.mark.parametrize("theorem", THEOREMS, ids=name)
def test_theorem_matches_snapshot_and_holds(theorem: Theorem) -> None:
    summary, errors = summary_of(theorem)
    assert summary == snapshot()[name(theorem)]
    assert not errors or theorem.expect != "holds", errors[0]


if __name__ == "__main__":
    importlib.import_module("tests.conftest")  # same examples as in the tests
    text = json.dumps({name(theorem): summary_of(theorem)[0] for theorem in THEOREMS}, indent=1, ensure_ascii=False)
    SNAPSHOT.write_text(text + "\n", encoding="utf-8")
