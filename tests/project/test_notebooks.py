"""The notebooks of the guide run from top to bottom, and their stored outputs are what they show.

They are executed in this process, which has the libraries loaded; `make notebooks` executes them in kernels and stores what they
show. A notebook that ran with the same sources before is not executed again (`--cache-clear` forgets).
"""

from __future__ import annotations

import ast
import contextlib
import functools
import hashlib
import io
import json
import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import polars as pl
import pytest
from IPython.lib.pretty import pretty
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[2]
NOTEBOOKS = sorted(path for path in (ROOT / "notebooks").rglob("*.ipynb") if not {"_build", ".ipynb_checkpoints"} & {*path.parts})
SOURCES = ("model", "sim", "calibrate", "figures")
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")


def code(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


@functools.cache
def digest_of_sources() -> str:
    """Of every source that a notebook may use."""
    found = hashlib.sha256()
    for folder in SOURCES:
        for each in sorted((ROOT / folder).rglob("*")):
            if each.is_file() and "__pycache__" not in each.parts:
                found.update(str(each.relative_to(ROOT)).encode() + each.read_bytes())
    return found.hexdigest()


def digest(path: Path) -> str:
    """Of the notebook and of every source that it may use."""
    return hashlib.sha256(path.read_bytes() + digest_of_sources().encode()).hexdigest()


def executed(path: Path) -> Iterator[tuple[dict[str, Any], str, list[str], int]]:
    """Each code cell with what it printed, the values that it showed as text, and how many figures."""
    shown: list[Any] = []
    names: dict[str, Any] = {"__name__": "__main__", "display": lambda *what: shown.extend(what)}
    for number, cell in enumerate(code(path)):
        body = ast.parse("".join(cell["source"]).removeprefix("%matplotlib inline\n"))
        last = body.body.pop() if body.body and isinstance(body.body[-1], ast.Expr) else None
        name, printed = f"{path.name}, code cell {number}", io.StringIO()
        shown.clear()
        with contextlib.redirect_stdout(printed):
            exec(compile(body, name, "exec"), names)
            if last is not None:
                shown.append(eval(compile(ast.Expression(last.value), name, "eval"), names))
        values = [each for each in shown if each is not None]
        yield cell, printed.getvalue(), [pretty(each) for each in values if not isinstance(each, Figure)], sum(
            isinstance(each, Figure) for each in values
        )
        plt.close("all")


def same(got: str, stored: str) -> bool:
    """Return whether two outputs are equal except for the last digits of numbers."""
    if NUMBER.sub("#", got).split() != NUMBER.sub("#", stored).split():
        return False
    pairs = zip(NUMBER.findall(got), NUMBER.findall(stored), strict=True)
    return all(math.isclose(float(one), float(other), rel_tol=1e-3, abs_tol=1e-6) for one, other in pairs)


def text(outputs: list[dict[str, Any]], kind: str) -> list[str]:
    if kind == "stream":
        return ["".join("".join(each["text"]) for each in outputs if each["output_type"] == kind and each["name"] == "stdout")]
    data = [each["data"] for each in outputs if each["output_type"] in ("execute_result", "display_data")]
    return ["".join(each["text/plain"]) for each in data if "image/png" not in each]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_shows_what_is_stored(path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> None:
    key, now, config = f"notebooks/{path.stem}", digest(path), request.config
    cache = config.cache if config.pluginmanager.hasplugin("cacheprovider") else None
    if cache is not None and cache.get(key, None) == now:
        return
    assert code(path)
    monkeypatch.chdir(path.parent)
    with pl.Config(restore_defaults=True), plt.rc_context():  # what a notebook sets is for itself, as in a kernel
        check(path)
    if cache is not None:
        cache.set(key, now)


def check(path: Path) -> None:
    for cell, printed, values, figures in executed(path):
        remedy = f"{path.name}: stored outputs are out of date; `make notebooks` renews them"
        assert same(printed, text(cell["outputs"], "stream")[0]), remedy
        stored = text(cell["outputs"], "data")
        assert len(values) == len(stored), remedy
        other = [f"{got}\n\nstored:\n{kept}" for got, kept in zip(values, stored, strict=True) if not same(got, kept)]
        assert not other, "\n\n".join([remedy, *other])
        assert figures == sum("image/png" in each.get("data", {}) for each in cell["outputs"]), remedy
        assert all(each["output_type"] != "error" and each.get("name") != "stderr" for each in cell["outputs"])


@pytest.mark.parametrize(
    ("got", "stored", "equal"),
    [("a 1.0002 b", "a 1.0001 b", True), ("a 1.01", "a 1.00", False), ("a 1", "b 1", False), ("1 2", "1", False), ("x", "x", True)],
)
def test_outputs_may_differ_in_last_digits(got: str, stored: str, equal: bool) -> None:
    assert same(got, stored) == equal
