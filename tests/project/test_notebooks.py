"""The notebooks run from top to bottom: here in this process, which has the libraries loaded; by `make notebooks` in kernels."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))


def show(*what: Any) -> None:
    """What a kernel shows as rich output; here it need only be said."""
    for each in what:
        repr(each)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(path.parent)
    cells = [cell for cell in json.loads(path.read_text(encoding="utf-8"))["cells"] if cell["cell_type"] == "code"]
    assert cells
    names: dict[str, Callable[..., None] | str] = {"__name__": "__main__", "display": show}
    for number, cell in enumerate(cells):
        source = "".join(cell["source"]).removeprefix("%matplotlib inline\n")  # a kernel's to do
        exec(compile(source, f"{path.name}, code cell {number}", "exec"), names)
