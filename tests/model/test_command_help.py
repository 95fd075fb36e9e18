"""Values of a command line: read as typer reads them, whether or not they need a validator."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import pytest
import typer
from typer.core import TyperCommand

from model.base.command_help import DocumentedCommand, UsageError


def read(kind: type[TyperCommand], words: list[str]) -> dict[str, Any] | None:
    """Values that a command of this class gets from a command line; None if it refuses the line."""
    app, got = typer.Typer(), {}

    @app.command(cls=kind)
    def command(
        name: Annotated[str, typer.Argument()],
        more: Annotated[list[str] | None, typer.Argument()] = None,
        word: Annotated[str, typer.Option()] = "default",
        other: Annotated[str | None, typer.Option()] = None,
        several: Annotated[list[str] | None, typer.Option()] = None,
        files: Annotated[list[Path] | None, typer.Option()] = None,
        count: Annotated[int, typer.Option(min=0)] = 3,
        seed: Annotated[int | None, typer.Option()] = None,
        rate: Annotated[float | None, typer.Option()] = None,
        share: Annotated[float, typer.Option()] = 0.5,
        path: Annotated[Path | None, typer.Option()] = None,
        place: Annotated[Path, typer.Option()] = Path("here"),
        flag: Annotated[bool, typer.Option("--flag")] = False,
        draw: Annotated[bool, typer.Option()] = True,
    ) -> None:
        got.update(locals())

    try:
        app(words, standalone_mode=False)
    except (UsageError, SystemExit):
        return None
    return {name: value for name, value in got.items() if name not in ("app", "kind", "words", "got")}


REFUSED = ("n --count -1", "n --count x", "n --count 1.5", "n --seed 0x5", "n --rate x", "n --draw=1", "n --none", "n --word")


@pytest.mark.parametrize(
    "words",
    [
        "n", "", "n m o", "n --word w", "n --word=", "n --other 7", "n --several a --several b", "n --several=a,b", "n --files a",
        "n --count 4", "n --count -1", "n --count x", "n --count 1.5", "n --seed 5", "n --seed 0x5", "n --rate 2", "n --rate inf",
        "n --rate x", "n --share 1e-3", "n --path p", "n --place q", "n --flag", "n --no-draw", "n --draw=1", "n --none",
        "n --word", "n --files a --files b",
    ],
)  # fmt: skip
def test_values_are_those_that_typer_reads(words: str) -> None:
    ours, theirs = (read(kind, words.split(" ") if words else []) for kind in (DocumentedCommand, TyperCommand))
    assert ours == theirs
    assert (ours is None) == (words in ("", *REFUSED))
    if ours is not None and theirs is not None:
        assert [*map(type, ours.values())] == [*map(type, theirs.values())]


def test_a_process_may_run_a_command_any_number_of_times() -> None:
    """More often than calls may be nested."""
    app, got = typer.Typer(), list[int]()

    @app.command(cls=DocumentedCommand)
    def command(count: Annotated[int, typer.Option()] = 3) -> None:
        got.append(count)

    program = typer.main.get_command(app)
    for number in range(sys.getrecursionlimit()):
        program([f"--count={number}"], standalone_mode=False)
    assert got == [*range(sys.getrecursionlimit())]
