"""Files of hardware profiles: NAME.json with the metadata, and next to it NAME.parquet with the table.

Nothing in them is executed. Damaged files, impossible values and other versions are refused; errors name the row.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, TypedDict

from model.base import checks, json_and_parquet, typed_values
from model.base.checks import ParameterError
from model.hardware import physical_limits
from model.hardware.profile import AXES, UNITS, Profile, Source

SCHEMA_VERSION = 2


def save(profile: Profile, folder: str | Path) -> Path:
    """Write NAME.json and NAME.parquet, completely or not at all, the JSON last; return the path of the JSON."""
    keys = {"schema_version": SCHEMA_VERSION} | {name: getattr(profile, name) for name in _SAME}
    keys |= {"bandwidth_bytes_per_s": profile.bandwidth, "rate_flop_per_s": profile.rate}
    keys |= {"shape": dict(profile.shape), "errors": dict(profile.errors)}
    keys |= {"notes": list(profile.notes), "facts": dict(profile.facts)}
    keys |= {"columns": {name: UNITS[name] for name in profile.table.columns}, "rows": profile.table.height}
    keys |= {"sources": [vars(source) | {"parts": list(source.parts)} for source in profile.sources]}
    return json_and_parquet.save(Path(folder) / f"{profile.name}.json", keys, profile.table)


_SAME = ("name", "kind", "device", "model", "dtype", "engine", "mode", "provenance", "date", "cache_bytes")
_KEYS = {
    *_SAME, "bandwidth_bytes_per_s", "rate_flop_per_s", "shape", "errors", "notes", "facts", "columns", "rows", "sources",
}  # fmt: skip


def load(where: str | Path) -> Profile:
    """Load a bundled profile by name, or any profile by the path of its JSON file."""
    path = Path(where)
    if path.suffix != ".json" and os.sep not in str(where):
        if str(where) not in names():
            raise ParameterError(f"{checks.unknown('profile', str(where), names())}; or give the path of a profile's .json")
        path = Path(str(_bundled() / f"{where}.json"))
    elif path.suffix != ".json":
        raise ParameterError(f"a profile is given by its .json file, got {path.name}; its table is found automatically")
    try:
        return _read(path)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}") from None


def _read(path: Path) -> Profile:
    said, table = json_and_parquet.load(path, _KEYS, "a profile", SCHEMA_VERSION, "import or measure it again")
    _check_said(said)
    for name, unit in said["columns"].items():
        if UNITS.get(name) != unit:
            known = f"must be in {UNITS[name]}" if name in UNITS else "is unknown"
            raise ParameterError(f"column {name} {known}, got {checks.shown(unit)}")
    without = [name for name in table.columns if name not in said["columns"]]
    if without:
        raise ParameterError(f"column {without[0]} has no unit; columns must name all of the table's")
    if table.height != said["rows"]:
        raise ParameterError(f"rows must be the table's {table.height}, got {checks.shown(said['rows'])}")
    try:
        typed_values.check(said["sources"], list[_Source], "sources")
        sources = tuple(Source(**{**each, "parts": tuple(each["parts"])}) for each in said["sources"])
    except (TypeError, ParameterError) as error:
        raise ParameterError(f"sources must each have repository, file, commit, licence, sha256 and parts: {error}") from None
    same = {name: said[name] for name in _SAME}
    same |= {name: said[name] for name in ("errors", "facts")}
    same["shape"] = {name: tuple(each) if isinstance(each, list) else each for name, each in said["shape"].items()}
    peaks = {"bandwidth": said["bandwidth_bytes_per_s"], "rate": said["rate_flop_per_s"]}
    found = Profile(**same, **peaks, table=table, sources=sources, notes=tuple(said["notes"]))
    physical_limits.refuse_slow(found)
    return found


class _Source(TypedDict):
    """A `Source` in the JSON file."""

    repository: str
    file: str
    commit: str
    licence: str
    sha256: str
    parts: list[str]


_TABLES = ("shape", "errors", "facts", "columns")
_LISTS = ("notes", "sources")


def _check_said(said: Mapping[str, Any]) -> None:
    """Refuse a value of a wrong type, as after an edit by hand; the error names the key."""
    for keys, kind, what in ((_TABLES, dict, "a table of keys"), (_LISTS, list, "a list")):
        for key in keys:
            if not isinstance(said[key], kind):
                raise ParameterError(f"{key} must be {what}, got {checks.shown(said[key])}")
    for note in said["notes"]:
        if not isinstance(note, str):
            raise ParameterError(f"notes must be strings, got {checks.shown(note)}")
    for part, error in said["errors"].items():
        checks.one_of("part in errors", part, AXES)
        checks.number(f"errors[{part}]", error, 0)


def _bundled() -> Traversable:
    return resources.files("model") / "profiles"


def names() -> list[str]:
    """Names of the bundled profiles."""
    folder = _bundled()
    if not folder.is_dir():
        return []
    return sorted(each.name.removesuffix(".json") for each in folder.iterdir() if each.name.endswith(".json"))
