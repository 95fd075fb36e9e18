"""Versions of the program and of the libraries it uses."""

from __future__ import annotations

import functools
import hashlib
import platform
from importlib import metadata
from pathlib import Path

import sim

LIBRARIES = (
    "decodesim", "numpy", "scipy", "simpy", "polars", "matplotlib", "joblib", "distributed", "typer", "torch", "transformers",
)  # fmt: skip

SAME = ("python", "decodesim", "numpy", "scipy", "simpy", "polars")
"""Versions that determine results, to the byte: all workers must have the same."""

PROGRAM_FILES = (".py", ".toml", ".json", ".csv", ".parquet")
"""Endings of the files of the program and its data."""


def versions() -> dict[str, str]:
    """Return the versions of installed libraries, by name."""
    return dict(_versions())


@functools.cache  # every run records them, and each look-up reads files
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = _version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _version(library: str) -> str:
    """Version of an installed library, by the line that says it: `metadata.version` parses the whole page of the library."""
    installed = metadata.distribution(library)
    lines = (installed.read_text("METADATA") or "").splitlines()
    return next((line.removeprefix("Version: ") for line in lines if line.startswith("Version: ")), None) or installed.version


def of_results() -> dict[str, str]:
    """Versions of `SAME`, and a hash of the program itself, which also tells two copies of one version apart."""
    found = _versions() | {"decodesim": sim.__version__}  # of the program that runs here, also where it is not installed
    return {name: found.get(name, "none") for name in SAME} | {"program": _program()}


@functools.cache
def _program() -> str:
    """Hash of the files of the packages `model` and `sim` that compute results."""
    root, mark = Path(sim.__file__).resolve().parents[1], hashlib.sha256()
    for package in ("model", "sim"):
        for path in sorted((root / package).rglob("*")):
            if path.suffix in PROGRAM_FILES and path.is_file():
                mark.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return mark.hexdigest()[:16]
