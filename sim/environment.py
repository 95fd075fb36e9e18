"""What the program runs on: versions of itself and of what it is built from."""

from __future__ import annotations

import platform
from functools import lru_cache
from importlib import metadata

LIBRARIES = ("decodesim", "numpy", "scipy", "simpy", "polars", "matplotlib", "joblib", "typer", "torch", "transformers")


def versions() -> dict[str, str]:
    """Version by name, of what is installed."""
    return dict(_installed())


@lru_cache(maxsize=1)
def _installed() -> dict[str, str]:
    """The same, read once: parsing the metadata of all packages takes longer than a small run."""
    found = {"python": platform.python_version()}
    for name in LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found
