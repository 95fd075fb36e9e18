"""The text that the family reads: the source and the documentation of the Python standard library, which every user has.

Left out is what installations differ in or what is no text: tests, tools that systems package apart, tables of encodings. The
modules of `HELD_OUT` are set aside: no model is trained on them; losses and prompts are theirs.
"""

from __future__ import annotations

import hashlib
import platform
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from model.checks import ParameterError

LEFT_OUT = frozenset(
    {"test", "tests", "site-packages", "dist-packages", "__pycache__", "idlelib", "turtledemo", "lib2to3", "distutils", "ensurepip",
     "encodings", "__phello__", "tkinter", "lib-dynload", "_sysconfigdata"}
)  # fmt: skip
HELD_OUT = (
    "argparse.py", "calendar.py", "csv.py", "dataclasses.py", "difflib.py", "fractions.py", "graphlib.py", "heapq.py", "json",
    "queue.py", "sched.py", "shelve.py", "statistics.py", "textwrap.py", "tomllib", "wsgiref", "zipapp.py",
)  # fmt: skip
"""Modules and packages of all kinds, about one part in fourteen of the text."""


@dataclass(frozen=True)
class Corpus:
    """The text of each module by its path, in the order of their names: `training` and `held_out`."""

    training: dict[str, str]
    held_out: dict[str, str]
    python: str
    checksum: str
    """Of all paths and texts, sha256: what another version of Python has is another corpus."""

    @property
    def characters(self) -> int:
        """Of the training text."""
        return sum(map(len, self.training.values()))


def standard_library(root: Path | None = None) -> Corpus:
    """The corpus of this Python, or of the library at `root`.

    >>> found = standard_library()
    >>> "csv.py" in found.held_out, "random.py" in found.training, "json/decoder.py" in found.training
    (True, True, False)
    """
    where = Path(sysconfig.get_paths()["stdlib"]) if root is None else root
    training: dict[str, str] = {}
    held_out: dict[str, str] = {}
    digest = hashlib.sha256()
    for path in sorted(_modules(where)):
        try:
            text = (where / path).read_text(encoding="utf-8")
        except UnicodeDecodeError:  # a few old modules say what they are written in
            continue
        (held_out if path.parts[0] in HELD_OUT else training)[str(path)] = text
        digest.update(f"{path}\0{len(text)}\0".encode())
        digest.update(text.encode())
    if not training or not held_out:
        raise ParameterError(f"no standard library is at {where}, or not its text; give the folder that has random.py in it")
    return Corpus(training, held_out, platform.python_version(), digest.hexdigest())


def _modules(root: Path) -> Iterator[PurePosixPath]:
    if not root.is_dir():
        return
    for path in root.rglob("*.py"):
        relative = PurePosixPath(path.relative_to(root).as_posix())
        if not any(part in LEFT_OUT or part.startswith(("config-", "_sysconfigdata")) for part in relative.parts):
            yield relative
