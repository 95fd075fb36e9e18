"""Versions of the program and of the libraries it uses."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

LIBRARIES = ("decodesim", "numpy", "scipy", "simpy", "polars", "matplotlib", "joblib", "typer", "torch", "transformers")


def versions() -> dict[str, str]:
    """Return the versions of installed libraries, by name."""
    return dict(_versions())


@functools.cache  # every run records them, and each look-up reads files
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
