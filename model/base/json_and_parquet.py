"""A table and its description as two files in one folder: NAME.parquet and NAME.json.

Both contain data only; nothing in them is executed. The JSON file holds the table's checksum and is written last, so that an
incomplete pair is never read.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from model.base import bounded_files, checks, strict_json, whole_files
from model.base.checks import ParameterError

if TYPE_CHECKING:
    import polars as pl


def save(path: Path, header: Mapping[str, Any], table: pl.DataFrame) -> Path:
    """Write a JSON file and its table into the same folder, both or neither; return the path of the JSON file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = path.with_name(f"{path.name.removesuffix('.json')}.parquet")
    with whole_files.temporary_path(data) as content, whole_files.atomic_path(path) as about:
        table.write_parquet(content, statistics=False)
        digest = hashlib.sha256(content.read_bytes()).hexdigest()
        about.write_text(strict_json.dumps({**header, "sha256": digest}, indent=1) + "\n", encoding="utf-8")
        content.replace(data)
    return path


def load(
    path: Path, keys: Collection[str], description: str, version: int, version_remedy: str, part: str | None = None
) -> tuple[dict[str, Any], pl.DataFrame]:
    """Read a JSON file with exactly these keys and this schema version, and its table, whose checksum must match.

    In messages, `description` names the kind of file and `version_remedy` is the remedy for a file of another version. `part` is
    the required value of the key `part`, if any.
    """
    try:
        header = bounded_files.json_of(bounded_files.read_bytes(path))
    except FileNotFoundError:
        raise ParameterError("there is no such file") from None
    except OSError as error:
        raise ParameterError(f"it cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise ParameterError(f"it cannot be read as JSON: {str(error).splitlines()[0]}") from None
    if not isinstance(header, dict) or "schema_version" not in header:
        raise ParameterError(f"it is not {description}: schema_version is missing")
    if header["schema_version"] != version:
        other = header["schema_version"]
        earlier = isinstance(other, int) and not isinstance(other, bool) and 0 < other < version
        cause = ", of an earlier version of decodesim, whose keys had other names" if earlier else ""
        raise ParameterError(f"schema_version must be {version}, got {checks.shown(other)}{cause}; {version_remedy}")
    if part is not None and "part" in header and header["part"] != part:  # checked first: other parts have other keys
        raise ParameterError(f"part must be {part!r}, got {checks.shown(header['part'])}: it is {description} of another kind")
    known = {*keys, "schema_version", "sha256"}
    for key in sorted(known ^ {*header}):
        raise ParameterError(f"{key} is missing" if key in known else f"unknown key {key}; {checks.nearest(key, known)}")
    data = path.with_name(f"{path.name.removesuffix('.json')}.parquet")
    try:
        content = bounded_files.read_bytes(data)
    except OSError:
        raise ParameterError(f"its table {data.name} is missing from the same folder") from None
    if hashlib.sha256(content).hexdigest() != header["sha256"]:
        raise ParameterError(f"its table {data.name} is not the one that it was written with (sha256); restore both")
    try:
        return header, bounded_files.read_parquet(content)
    except ParameterError as error:  # a damaged table with a correct checksum
        raise ParameterError(f"its table {data.name}: {error}; {version_remedy}") from None
