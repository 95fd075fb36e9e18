"""What every theorem says, what it is tried on and what it compares, so that none says, tries or looks at less unseen.

It is kept in `data/theorems.json`. `python -m tests.sim.test_theorems_said` writes the file anew, to be read before it is kept.
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
from tests.support.trying import compared

KEPT = Path(__file__).parents[1] / "data" / "theorems.json"


def name(theorem: Theorem) -> str:
    return f"{theorem.method} {theorem.number}"


@cache
def kept() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf-8"))
    return found


def test_every_theorem_is_here() -> None:
    assert [*kept()] == [name(each) for each in THEOREMS]


@pytest.mark.parametrize("theorem", THEOREMS, ids=name)
def test_a_theorem_holds_and_says_and_compares_what_it_is_meant_to(theorem: Theorem) -> None:
    found, errors = compared(theorem)
    assert found == kept()[name(theorem)]
    assert not errors or theorem.expect != "holds", errors[0]


if __name__ == "__main__":
    importlib.import_module("tests.conftest")  # draws what tests draw
    text = json.dumps({name(each): compared(each)[0] for each in THEOREMS}, indent=1, ensure_ascii=False)
    KEPT.write_text(text + "\n", encoding="utf-8")
