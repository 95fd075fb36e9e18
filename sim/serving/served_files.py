"""Names of the bundled scenarios of servers, and which scenarios are of a server.

Every `sim run` asks this, so that this module imports little.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from model.base import bounded_files


def names() -> list[str]:
    """Names of the bundled scenarios of servers."""
    return sorted(path.name.removesuffix(".toml") for path in _bundled().iterdir() if path.name.endswith(".toml"))


def text_of(name: str) -> str:
    """Text of a bundled scenario file."""
    return (_bundled() / f"{name}.toml").read_text(encoding="utf-8")


def _bundled() -> Traversable:
    return resources.files("sim") / "serving" / "bundled"


def holds_load(source: str | Path | Mapping[str, Any] | None) -> bool:
    """True if a scenario is one of a server: it has a table [load]. False where it cannot be read."""
    if isinstance(source, Mapping):
        return "load" in source
    try:
        if source is None or not Path(source).is_file():
            return str(source) in names()
        return "load" in bounded_files.toml_of(bounded_files.read_text(source, bounded_files.MOST_TOML))
    except (OSError, ValueError):  # the reader of scenarios says what is wrong
        return False
