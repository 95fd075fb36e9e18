"""The corpus of the family: source and documentation of the Python standard library, which every user has.

Parts that differ between installations or are no text are left out: tests, tools that distributions package separately, tables of
encodings. The modules of `HELD_OUT` are held out: no model is trained on them; they are for losses and prompts.
"""

from __future__ import annotations

import hashlib
import os
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

from model.base import bounded_files
from model.base.checks import ParameterError

EXCLUDED = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "turtledemo", "lib2to3", "distutils", "ensurepip",
     "encodings", "__phello__", "tkinter", "lib-dynload", "_sysconfigdata"}
)  # fmt: skip
HELD_OUT = (
    "argparse.py", "calendar.py", "csv.py", "dataclasses.py", "difflib.py", "fractions.py", "graphlib.py", "heapq.py", "json",
    "queue.py", "sched.py", "shelve.py", "statistics.py", "textwrap.py", "tomllib", "wsgiref", "zipapp.py",
)  # fmt: skip
"""Modules and packages of all kinds, about 1/14 of the text."""
STANDARD = "Python standard library"
HELD_OUT_PART = 14
"""Of a user's text, one part in this number is held out."""
SUFFIXES = (".md", ".py", ".rst", ".txt")


@dataclass(frozen=True)
class Corpus:
    """Text of each module by path, sorted by name: `training` and `held_out`."""

    training: dict[str, str]
    held_out: dict[str, str]
    python: str
    checksum: str
    """sha256 of all paths and contents; another version of Python gives another corpus."""
    name: str = STANDARD

    @property
    def characters(self) -> int:
        """Number of characters of the training text."""
        return sum(map(len, self.training.values()))

    def cut(self, characters: int) -> Corpus:
        """Return the first modules of both parts, with `characters` characters of training text and a tenth of held-out text: a
        quick trial.
        """
        parts = _first(self.training, characters), _first(self.held_out, characters // 10)
        return Corpus(*parts, self.python, _checksum(parts[0] | parts[1]), f"{self.name}, its beginning")

    def about(self) -> dict[str, Any]:
        """Return the entries of the corpus in a model's log."""
        return {"name": self.name, "python": self.python, "checksum": self.checksum, "characters": self.characters}


def standard_library(root: Path | None = None) -> Corpus:
    """Return the corpus of this Python, or of the library at `root`.

    >>> found = standard_library()
    >>> "csv.py" in found.held_out, "random.py" in found.training, "json/decoder.py" in found.training
    (True, True, False)
    """
    where = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    for path in sorted(_modules(where)):
        try:
            text = (where / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old modules declare another encoding
            continue
        (held_out if path.parts[0] in HELD_OUT else training)[str(path)] = text
    if not training or not held_out:
        raise ParameterError(f"no standard library is at {where}, or not its source; give the folder that has random.py in it")
    return Corpus(training, held_out, platform.python_version(), _checksum(training | held_out))


def corpus_of_files(path: Path) -> Corpus:
    """Return the corpus of a text file, or of the text files below a folder, with 1/14 held out.

    From a file its end is held out; from a folder whole files, those with the smallest sha256 of their names, so that adding a file
    changes little.
    """
    if path.is_file():
        lines = _read(path).splitlines(keepends=True)
        kept = len(lines) - max(len(lines) // HELD_OUT_PART, 1)
        training, held_out = {path.name: "".join(lines[:kept])}, {f"{path.name}, its end": "".join(lines[kept:])}
    elif path.is_dir():
        found = sorted(each for each in path.rglob("*") if each.suffix in SUFFIXES and each.is_file())
        texts = {each.relative_to(path).as_posix(): each for each in found if not _hidden(each.relative_to(path))}
        by_hash = sorted(texts, key=lambda name: hashlib.sha256(name.encode()).digest())
        aside = set(by_hash[: max(len(texts) // HELD_OUT_PART, 1)])
        training = {name: _read(each) for name, each in texts.items() if name not in aside}
        held_out = {name: _read(texts[name]) for name in sorted(aside)}
    else:
        raise ParameterError(f"text must be a file or a folder, and there is none at {path}")
    if not any(training.values()) or not any(held_out.values()):
        kinds = f"two lines of a file, or two files of {', '.join(SUFFIXES)} in a folder"
        raise ParameterError(f"text must have a part to train on and one to hold out, at least {kinds}; {path.name} has not")
    return Corpus(training, held_out, platform.python_version(), _checksum(training | held_out), path.resolve().name)


def _checksum(texts: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for path in sorted(texts, key=PurePosixPath):
        digest.update(f"{path}\0{len(texts[path])}\0".encode())
        digest.update(texts[path].encode())
    return digest.hexdigest()


def _first(texts: dict[str, str], characters: int) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for path, text in texts.items():
        chosen[path] = text[: characters - sum(map(len, chosen.values()))]
        if sum(map(len, chosen.values())) >= characters:
            break
    return chosen


def _read(path: Path) -> str:
    try:
        return bounded_files.read_text(path)
    except UnicodeDecodeError as error:
        raise ParameterError(f"text must be in UTF-8, and {path.name} is not: {error.reason} at byte {error.start}") from None


def _hidden(path: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in path.parts)


def _modules(root: Path) -> Iterator[PurePosixPath]:
    """Yield the paths of modules below the root, without entering the folders in `EXCLUDED`, which may hold every installed
    package.
    """
    for folder, below, names in os.walk(root):
        below[:] = filter(_kept, below)
        here = Path(folder).relative_to(root)
        yield from (PurePosixPath(here.joinpath(name).as_posix()) for name in filter(_kept, names) if name.endswith(".py"))


def _kept(part: str) -> bool:
    return part not in EXCLUDED and not part.startswith(("config-", "_sysconfigdata"))
