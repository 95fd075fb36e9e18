"""What `calibrate decode` shows in a terminal, and when it shows a bar; without any model."""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import typer

from calibrate import decode_command
from calibrate.decode_report import Printer


@pytest.mark.parametrize("columns", ["20", "80"])
def test_no_line_is_wrapped_or_cut(columns: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """A line that is copied from a terminal is the line that was written, brackets and all."""
    monkeypatch.setenv("COLUMNS", columns)
    printer = Printer(5, sampled=False, exact=True)
    words = "a line of [many] words " * 9
    printer.line(words)
    decoding: Any = SimpleNamespace(producers=["draft", "target", "nobody"])
    result: Any = SimpleNamespace(decoding=decoding, pieces=[words, "[red]x", "\x1b"])
    printer.text(result)
    assert capsys.readouterr().out == f"{words}\n{words}[red]x\\x1b\n"


def test_what_an_encoding_cannot_show_is_shown_by_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii", write_through=True))
    printer = Printer(5, sampled=False, exact=True)
    printer.line("caf\u00e9 \u65e5")
    assert raw.getvalue() == b"caf\\xe9 \\u65e5\n"
    assert printer.solid == "#"
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="utf-8"))
    assert Printer(5, sampled=False, exact=True).solid == "\u2588"


@pytest.mark.parametrize(("prompts", "quiet", "styled", "as_json", "bar"), [
    (2, False, False, False, True), (2, True, False, False, False), (1, False, False, False, False),
    (2, False, True, False, False), (2, False, True, True, True), (2, False, False, True, True),
])  # fmt: skip
def test_a_bar_is_shown_where_nothing_else_shows_how_far_it_is(
    prompts: int, quiet: bool, styled: bool, as_json: bool, bar: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[tuple[bool, str]] = []

    @contextlib.contextmanager
    def progress(quiet: bool, what: str) -> Iterator[None]:
        shown.append((not quiet, what))
        yield

    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(decode_command, "progress", progress)
    monkeypatch.setattr(Printer, "styled", styled)
    decoder = SimpleNamespace(layers=3)
    run: Any = SimpleNamespace(target=SimpleNamespace(decoder=decoder), sampling=None, exact=True, warm=interrupted)
    with pytest.raises(typer.Exit) as end:
        decode_command._follow(run, ["a"] * prompts, [], {}, None, as_json, quiet)
    assert end.value.exit_code == 130
    assert shown == [(bar, "prompts")]
