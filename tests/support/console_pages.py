"""Pages of the guide whose commands are executed: blocks of `console` with lines `$ command` and, below, what it prints.

A line `...` stands for any lines. A command continues after a backslash at the end of a line, and on lines `> `. Commands of `sim`
and `calibrate` and `python -c` run in this process; `cat` and `head` show files. All commands of a page run in one folder, with the
files of `howto/files`.
"""

from __future__ import annotations

import contextlib
import difflib
import importlib
import io
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from typer.testing import CliRunner

FOLDER = Path(__file__).parents[2] / "notebooks" / "howto"
FILES = FOLDER / "files"
WIDTH = 118
ELLIPSIS = "..."
APPS = {"sim": "sim.commands.sim_app", "calibrate": "calibrate.commands.calibrate_app"}
SHOWN_BY = ("cat", "head")
_BLOCK = re.compile(r"(?<=^```console\n)(.*?)(?=^```$)", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Shown:
    """One command of a page, as its lines, and the lines of output that the page shows."""

    command: tuple[str, ...]
    output: tuple[str, ...]

    @property
    def arguments(self) -> list[str]:
        """The command as a shell splits it."""
        return shlex.split("\n".join(line.removeprefix("> ") for line in self.command).removeprefix("$ ").replace("\\\n", ""))


def pages() -> list[Path]:
    """All pages with commands that are executed."""
    return sorted(FOLDER.glob("*.md"))


def commands(block: str) -> list[Shown]:
    """Commands of a block with their outputs.

    >>> commands("$ sim ls \\\\\\n    laws\\nmine\\n\\n$ cat a\\n")
    [Shown(command=('$ sim ls \\\\', '    laws'), output=('mine', '')), Shown(command=('$ cat a',), output=())]
    """
    found: list[tuple[list[str], list[str]]] = []
    goes_on = False
    for line in block.splitlines():
        if goes_on or (line.startswith("> ") and found and not found[-1][1]):
            found[-1][0].append(line)
        elif line.startswith("$ "):
            found.append(([line], []))
        elif not found:
            raise ValueError(f"a block must open with a line '$ command', got {line!r}")
        else:
            found[-1][1].append(line)
            continue
        goes_on = line.endswith("\\")
    return [Shown(tuple(command), tuple(output)) for command, output in found]


def blocks(page: str) -> list[str]:
    """Console blocks of a page."""
    return _BLOCK.findall(page)


def prose(page: str) -> list[str]:
    """Lines of a page without the outputs of its commands."""
    kept = _BLOCK.sub(lambda found: "".join(f"{line}\n" for each in commands(found[0]) for line in each.command), page)
    return kept.splitlines()


def run(arguments: Sequence[str]) -> list[str]:
    """Lines that a command prints in the current folder; those of the standard error too if it fails."""
    program, *rest = arguments
    if program in SHOWN_BY:
        printed = subprocess.run(arguments, capture_output=True, text=True, check=True).stdout
    elif program == "python":
        [option, code] = rest
        assert option == "-c"
        with contextlib.redirect_stdout(io.StringIO()) as file:
            exec(compile(code, "python -c", "exec"), {"__name__": "__main__"})
        printed = file.getvalue()
    else:
        app, before = importlib.import_module(APPS[program]).app, sys.argv
        sys.argv = list(arguments)  # documents keep the command
        try:
            done = CliRunner().invoke(app, rest, prog_name=program)
        finally:
            sys.argv = before
        if done.exception is not None and not isinstance(done.exception, SystemExit):
            raise done.exception
        printed = done.stdout + (done.stderr if done.exit_code else "")
    return [line.rstrip() for line in printed.rstrip("\n").splitlines()]


@contextlib.contextmanager
def folder() -> Iterator[None]:
    """Work in a temporary folder with the files of the pages, in a terminal of fixed width."""
    before = os.environ.get("COLUMNS")
    with tempfile.TemporaryDirectory() as path, contextlib.chdir(path):
        shutil.copytree(FILES, path, dirs_exist_ok=True)
        os.environ["COLUMNS"] = str(WIDTH)
        try:
            yield
        finally:
            os.environ.pop("COLUMNS")
            if before is not None:
                os.environ["COLUMNS"] = before


def agrees(shown: Sequence[str], printed: Sequence[str]) -> bool:
    """Return whether the shown lines are the printed ones, with `...` for any number of lines.

    >>> agrees(["a", "...", "d"], ["a", "b", "c", "d "]), agrees(["a", "..."], ["b", "a"])
    (True, False)
    """
    pattern = "".join("(?:.*\n)*" if line == ELLIPSIS else re.escape(line.rstrip()) + "\n" for line in shown)
    return re.fullmatch(pattern, "".join(f"{line.rstrip()}\n" for line in printed)) is not None


def shortened(shown: Sequence[str], printed: Sequence[str]) -> list[str]:
    """The printed lines, with `...` where the shown lines have it; all of them if the places are not found.

    A part that ends in a line unlike all new ones goes to the end of its paragraph.

    >>> shortened(["best 1.2", "...", "rests on", "  a"], ["best 1.3", "K 2", "K 3", "rests on", "  a"])
    ['best 1.3', '...', 'rests on', '  a']
    """
    parts: list[list[str]] = [[]]
    for line in shown:
        if line == ELLIPSIS:
            parts.append([])
        else:
            parts[-1].append(line)
    lines: list[str] = []
    at = 0
    for number, part in enumerate(parts):
        lines += [ELLIPSIS] if number else []
        if not part:
            continue
        first = _closest(part[0], printed, at) if number else 0
        if first is None:
            return list(printed)
        last = _closest(part[-1], printed, first) if number < len(parts) - 1 else len(printed) - 1
        if last is None:
            last = next((place for place in range(first, len(printed)) if not printed[place]), len(printed)) - 1
        lines += printed[first : last + 1]
        at = last + 1
    return lines


def _closest(line: str, printed: Sequence[str], start: int) -> int | None:
    """Place of the line from `start` on that is most like this one, by its words first; None: there is none."""
    best, found = 0.6, None
    for place in range(start, len(printed)):
        words = difflib.SequenceMatcher(None, _digits(line), _digits(printed[place])).ratio()
        first = line.split()[:1] == printed[place].split()[:1]  # the row of a table
        likeness = words + difflib.SequenceMatcher(None, line, printed[place]).ratio() / 4 + first / 4
        if words > 0.6 and likeness > best:
            best, found = likeness, place
    return found


def _digits(line: str) -> str:
    return re.sub(r"\d+", "0", line)


def store(path: Path) -> bool:
    """Write the page with what its commands print now; return whether it changed."""
    page = path.read_text(encoding="utf-8")

    def renewed(found: re.Match[str]) -> str:
        lines: list[str] = []
        for each in commands(found[0]):
            blank = [""] if each.output and not each.output[-1] else []  # between two commands
            printed, shown = run(each.arguments), list(each.output[: len(each.output) - len(blank)])
            lines += [*each.command, *(shown if shown and agrees(shown, printed) else shortened(shown or printed, printed)), *blank]
        return "".join(f"{line}\n" for line in lines)

    with folder():
        new = _BLOCK.sub(renewed, page)
    if new != page:
        path.write_text(new, encoding="utf-8")
    return new != page


def differences(path: Path) -> Iterator[str]:
    """Differences between what a page shows and what its commands print."""
    with folder():
        for block in blocks(path.read_text(encoding="utf-8")):
            for each in commands(block):
                shown, printed = list(each.output), run(each.arguments)
                if shown and not shown[-1]:
                    shown.pop()
                if not agrees(shown, printed):
                    lines = difflib.unified_diff(shown, shortened(shown, printed), "shown", "printed", lineterm="", n=1)
                    yield "\n".join([*each.command, *lines])
