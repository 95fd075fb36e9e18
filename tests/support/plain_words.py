"""Words that the project does not use, and where they still stand: `python -m tests.support.plain_words [PATH ...]`.

Docstrings, comments and strings of modules, names of tests, pages, scenarios and notebooks are read; published tables and data are
not.
"""

from __future__ import annotations

import io
import json
import re
import sys
import tokenize
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PACKAGES = ("model", "sim", "calibrate", "figures", "tests", "notebooks")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")

WORDS = {
    r"luck\w*": "random draws, seed", r"coins?": "random draws", r"left to chance|dealt|chance decides": "random",
    r"sittings?": "measurement session", r"foretell\w*|foretold": "predict",
    r"whoever|whomever|whatever|nobody|somebody": "the subject itself", r"so many": "the number itself",
    r"counts? as nothing|counted as nothing": "assumed 0", r"(comes?|coming|came) along": "bundled",
    r"put(s|ting)? out": "generate", r"hand(s|ed|ing)? over": "fall back, pass on",
    r"(take|takes|taking|took|taken) back": "roll back, undo", r"behind": "after", r"beside": "next to, concurrently with",
    r"texts": "sequences", r"wide pass(es)?": "multi-token pass", r"dear(er|est)?": "expensive",
}  # fmt: skip
"""Patterns of words, and what to write instead."""
PATTERN = re.compile(rf"\b(?:{'|'.join(f'(?:{each})' for each in WORDS)})\b", re.IGNORECASE)


class Occurrence(NamedTuple):
    """One such word."""

    path: Path
    line: int
    word: str

    def __str__(self) -> str:
        return f"{self.path.relative_to(ROOT)}:{self.line}: {self.word}"


def _in(text: str, path: Path, line: int = 1) -> Iterator[Occurrence]:
    for found in PATTERN.finditer(text):
        yield Occurrence(path, line + text.count("\n", 0, found.start()), found[0])


def _of_module(path: Path) -> Iterator[Occurrence]:
    """Comments, strings and docstrings, and names of tests with their underscores as spaces."""
    text, tests, before = path.read_text(), path.name.startswith("test_"), ""
    if not PATTERN.search(text) and not PATTERN.search(text.replace("_", " ")):
        return  # tokens are made of the text: most files need not be taken apart
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.STRING, tokenize.COMMENT) or token.type in MIDDLES:
            yield from _in(token.string, path, token.start[0])
        elif tests and before == "def" and token.type == tokenize.NAME:
            yield from _in(token.string.replace("_", " "), path, token.start[0])
        before = token.string


MIDDLES = (getattr(tokenize, "FSTRING_MIDDLE", -1),)
"""The texts between the braces of f-strings are tokens of their own from Python 3.12 on."""


def _of_notebook(path: Path) -> Iterator[Occurrence]:
    for cell in json.loads(path.read_text())["cells"]:
        yield from _in("".join(cell["source"]), path)


def occurrences(paths: Sequence[Path]) -> list[Occurrence]:
    """Such words in files, or in all files below folders."""
    readers = {".py": _of_module, ".ipynb": _of_notebook}
    found: list[Occurrence] = []
    for path in paths:
        files = [path] if path.is_file() else [each for kind in ("*.py", "*.ipynb", "*.md", "*.toml") for each in path.rglob(kind)]
        for each in sorted(files):
            if each != Path(__file__) and not {".venv", "data", ".ipynb_checkpoints"} & set(each.relative_to(ROOT).parts):
                found += readers.get(each.suffix, lambda path: _in(path.read_text(), path))(each)
    return found


def main() -> None:
    """Print where they stand, and how many there are."""
    given = [Path(each).resolve() for each in sys.argv[1:]] or [ROOT / each for each in (*PACKAGES, *PAGES)]
    found = occurrences(given)
    print(*found, f"{len(found)} words", sep="\n")


if __name__ == "__main__":
    main()
