"""What the program runs on: versions of itself and of what it is built from."""

from __future__ import annotations

import functools
import platform
from importlib import metadata

LIBRARIES = ("decodesim", "numpy", "scipy", "simpy", "polars", "matplotlib", "joblib", "typer", "torch", "transformers")


def versions() -> dict[str, str]:
    """Version by name, of what is installed."""
    return dict(_versions())


@functools.cache  # each run writes them down, and looking them up reads files
def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
