"""A table and what is said of it, in one Parquet file: whole or not at all, and refused if it is another kind or version."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model import checks
from model.checks import ParameterError

if TYPE_CHECKING:
    import polars as pl

KEY = "decodesim"
"""Of the file's own metadata."""


def write(path: str | Path, kind: str, version: int, table: pl.DataFrame, said: Mapping[str, Any]) -> Path:
    """Write a table of a kind, with what is said of it. Returns the path."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        about = {"kind": kind, "schema_version": version, "rows": table.height, "said": dict(said)}
        table.write_parquet(part, metadata={KEY: json.dumps(about)}, statistics=False)
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    return path


def read(path: str | Path, kind: str, version: int) -> tuple[pl.DataFrame, dict[str, Any]]:
    """The table of this kind in a file, and what is said of it."""
    import polars as pl

    path = Path(path)
    if not path.is_file():
        raise ParameterError(f"{path.name} must be a {kind}, and there is no such file")
    try:
        said = pl.read_parquet_metadata(path).get(KEY)
        table = pl.read_parquet(path)
    except (OSError, pl.exceptions.PolarsError) as error:
        reason = str(error).splitlines()[0]
        raise ParameterError(f"{path.name} cannot be read as a {kind}: {reason}; it may have been cut off: make it again") from None
    try:
        about = json.loads(said or "null")
    except ValueError:
        about = None
    if not isinstance(about, dict) or about.get("kind") != kind:
        found = about.get("kind", "no such note") if isinstance(about, dict) else "no note of what it is"
        raise ParameterError(f"{path.name} must be a {kind}, got {checks.shown(found)}")
    if about.get("schema_version") != version:
        found = checks.shown(about.get("schema_version"))
        raise ParameterError(f"{path.name}: schema_version must be {version}, got {found}; make the {kind} again")
    if about.get("rows") != table.height:
        raise ParameterError(f"{path.name}: rows must be {about.get('rows')}, got {table.height}")
    return table, about["said"]
