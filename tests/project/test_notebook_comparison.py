"""The notebook of predicted against measured, on runs that are made here: the committed ones are executed with the notebooks."""

from __future__ import annotations

import ast
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from model.hardware import profile_files
from model.logs import measured_runs
from tests.support.comparisons import example_runs

NOTEBOOK = Path(__file__).resolve().parents[2] / "notebooks" / "predicted_against_real.ipynb"


def made(folder: Path) -> Path:
    """Runs with the profiles of their measurement session in the same folder."""
    found, profiles = example_runs()
    files = {role: profile_files.save(each, folder).name for role, each in profiles.items()}
    return measured_runs.save(dataclasses.replace(found, about=dict(found.about) | {"profiles": files}), folder / "some.json")


def cells() -> list[str]:
    said = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    return ["".join(cell["source"]) for cell in said["cells"] if cell["cell_type"] == "code"]


def test_it_runs_on_any_runs_by_one_constant(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    where = made(tmp_path)
    known: dict[str, Any] = {}
    figures: list[Figure] = []
    named = 0
    for cell in cells():
        lines = [line for line in cell.splitlines() if not line.startswith("%")]
        for index, line in enumerate(lines):
            for name in ("RUNS", "OVER"):
                if line.startswith(f"{name} = "):
                    lines[index], named = f"{name} = Path({str(where)!r})", named + 1
        body = ast.parse("\n".join(lines))
        last = body.body.pop() if isinstance(body.body[-1], ast.Expr) else None
        exec(compile(body, NOTEBOOK.name, "exec"), known)
        shown = None if last is None else eval(compile(ast.Expression(last.value), NOTEBOOK.name, "eval"), known)
        figures += [shown] if isinstance(shown, Figure) else []
    assert named == 2
    assert len(figures) == 10
    said = capsys.readouterr().out
    assert "26 decodings, 3 or more repeats of each" in said
    assert "claims that these runs have something on: verify ppd bild skipdecode bus" in said
