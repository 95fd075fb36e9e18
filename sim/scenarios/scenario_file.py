"""Scenario files: TOML with [scenario], [[method]], [outcomes], [cost], [cluster] and [sweep], and overrides of their keys.

[outcomes] and [cost] apply to every method, unless a method has [method.outcomes] or [method.cost]. [outcomes] is one law, or one
per kind of outcome: [outcomes.match], [outcomes.accept]. This module keeps a scenario as plain tables; `sim.scenarios.cases` builds
checked objects from them for one grid point.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import itertools
import json
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any

from model.architectures import published_shapes
from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.base.table_records import key_names, unknown_key_remedy
from model.hardware import devices
from model.methods import registry
from sim.scenarios.cost_kinds import ON_HARDWARE

SECTIONS = ("scenario", "method", "outcomes", "cost", "cluster", "sweep")
OVERRIDABLE = ("outcomes", "cost")
"""Sections that a method may override."""
DEFAULT = "ppd-figures-3-and-4"
RESULTS_VERSION = 7
"""Increased when the same scenario would give other numbers or columns: shards of another version are not resumed."""

Tables = dict[str, Any]


def names() -> list[str]:
    """Names of the bundled scenarios."""
    return sorted(path.name.removesuffix(".toml") for path in _bundled().iterdir() if path.name.endswith(".toml"))


def text_of(name: str) -> str:
    """Text of a bundled scenario file."""
    return (_bundled() / f"{name}.toml").read_text(encoding="utf-8")


def _bundled() -> Traversable:
    return resources.files("sim") / "scenarios" / "bundled"


def load(source: str | Path | Mapping[str, Any] | None = None) -> Tables:
    """Load the tables of a scenario from a path, the name of a bundled scenario, or a mapping; None is the default scenario."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    label = DEFAULT if source is None else str(source)
    if source is None or (label in names() and not Path(label).is_file()):
        text = text_of(label)
    else:
        try:
            text = bounded_files.read_text(label, bounded_files.MOST_TOML)  # editors may put a byte-order mark in front
        except UnicodeDecodeError:
            raise ParameterError(f"scenario {label!r} is not UTF-8 text; name a TOML file, or save it as UTF-8") from None
        except (OSError, ValueError) as error:
            close = difflib.get_close_matches(label, names(), n=1)
            hint = f"; did you mean the bundled scenario {close[0]}?" if close else "; `sim ls scenarios` lists the bundled ones"
            raise ParameterError(f"scenario {checks.shown(label)} cannot be read: {_reason(error)}{hint}") from None
    try:
        return _located(bounded_files.toml_of(text), Path(label).parent)
    except ValueError as error:  # TOMLDecodeError is one; so is a number of thousands of digits
        raise ParameterError(f"scenario {label!r} is not TOML: {_plainly(error, text)}") from None


def _located(tables: Tables, folder: Path) -> Tables:
    """Make file names relative to the scenario's folder instead of the working directory."""
    for table, key in (*_outcome_files(tables), *_hardware_files(tables)):
        table[key] = str(folder / table[key])
    for values, index in _file_axes(tables):
        values[index] = str(folder / values[index])
    return tables


def _laws_of(tables: Mapping[str, Any]) -> list[Tables]:
    """All tables of a scenario that may define a law of outcomes."""
    methods = tables.get("method")
    above = [tables, *(methods if isinstance(methods, list) else [methods])]
    found = [table.get("outcomes") for table in above if isinstance(table, Mapping)]
    inner = [each for table in found if isinstance(table, dict) for each in table.values()]
    return [table for table in (*found, *inner) if isinstance(table, dict)]


RECORDS: dict[str, Callable[[str], bool]] = {"file": lambda _: True, "log": lambda name: name.endswith(".json")}
"""Keys of outcomes that name files or bundled logs, with a test whether a value is a file."""


def _outcome_files(tables: Mapping[str, Any]) -> list[tuple[Tables, str]]:
    """Tables and keys of a scenario that name files of recorded outcomes."""
    given = [(table, key) for table in _laws_of(tables) for key in RECORDS if isinstance(table.get(key), str)]
    return [(table, key) for table, key in given if RECORDS[key](table[key])]


SHAPES = ("shape", "draft_shape", "medium_shape")
NAME_OR_FILE = {
    **dict.fromkeys(("profile", "draft_profile", "medium_profile", "law"), lambda name: name.endswith(".json")),
    **dict.fromkeys(SHAPES, published_shapes.is_path), "device": devices.is_path,
}  # fmt: skip
"""Keys of costs that are bundled names or files, with a test whether a value is a file."""


def _costs_of(tables: Mapping[str, Any]) -> list[Tables]:
    """All tables of costs."""
    methods = tables.get("method")
    above = [tables, *(methods if isinstance(methods, list) else [methods])]
    return [table["cost"] for table in above if isinstance(table, Mapping) and isinstance(table.get("cost"), dict)]


def _hardware_files(tables: Mapping[str, Any]) -> list[tuple[Tables, str]]:
    """Tables and keys of a scenario that name files of profiles, models and devices."""
    given = [(table, key) for table in _costs_of(tables) for key in NAME_OR_FILE if isinstance(table.get(key), str)]
    return [(table, key) for table, key in given if NAME_OR_FILE[key](table[key])]


def _file_axes(tables: Mapping[str, Any]) -> list[tuple[list[Any], int]]:
    """Lists and indices of sweep values that name files."""
    sweep = tables.get("sweep", {})
    found = []
    for path, values in sweep.items() if isinstance(sweep, Mapping) else ():
        last = path.rpartition(".")[2]
        is_file = RECORDS.get(last) if "outcomes" in path else NAME_OR_FILE.get(last) if "cost" in path else None
        if isinstance(values, list) and is_file is not None:
            found += [(values, at) for at, each in enumerate(values) if isinstance(each, str) and is_file(each)]
    return found


def _plainly(error: ValueError, text: str) -> str:
    """Message of the TOML parser in plain words, always with a line number."""
    if not isinstance(error, tomllib.TOMLDecodeError | ParameterError):
        return "a number has too many digits"
    about = str(error).replace("end of document", f"the end, line {len(text.splitlines())}")
    return f"{about}: a key or a table is given a second time" if "overwrite" in about or "twice" in about else about


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def method_tables(tables: Mapping[str, Any]) -> list[Tables]:
    """Return the [[method]] tables; a single [method] table gives a list of one."""
    methods = tables.get("method", [])
    found = methods if isinstance(methods, list) else [methods]
    for table in found:
        if not isinstance(table, Mapping):
            raise ParameterError(f"method must be a table, [[method]] with name = ..., got {checks.shown(table)}")
    return found


def apply(tables: Tables, path: str, value: Any) -> None:
    """Set the value at a dotted path. `method.x` is set in every method, and all must have the parameter x."""
    section, _, key = path.partition(".")
    if section not in SECTIONS or section == "sweep" or not key:
        known = [f"{name}.KEY" for name in SECTIONS if name != "sweep"]
        raise ParameterError(f"unknown path {path!r}; {checks.nearest(path, known)}")
    if section in OVERRIDABLE:
        _apply_shared(tables, section, key, value)
    elif section != "method":
        _put(tables.setdefault(section, {}), section, key, value)
    else:
        _apply_to_methods(tables, key, value)


def _put(table: Any, where: str, key: str, value: Any) -> None:
    """Set a key; a key with dots is set in nested tables."""
    *above, last = key.split(".")
    for name in above:
        if not isinstance(table, dict):
            break
        table, where = table.setdefault(name, {}), f"{where}.{name}"
    if not isinstance(table, dict):
        raise ParameterError(f"[{where}] must be a table, got {table!r}")
    table[last] = value


def _apply_shared(tables: Tables, section: str, key: str, value: Any) -> None:
    """Set a key of a shared section; if each method has its own section, in those that already have the key."""
    own = [table for table in method_tables(tables) if section in table]
    if section in tables or not own:
        _put(tables.setdefault(section, {}), section, key, value)
        return
    saying = [table for table in own if _says(table[section], key)]
    if not saying:
        raise ParameterError(f"no [method.{section}] has {key}; to add it, write its full path: method.{section}.{key}")
    for table in saying:
        _put(table[section], f"method.{section}", key, value)


def _says(table: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(table, Mapping) or name not in table:
            return False
        table = table[name]
    return True


def _apply_to_methods(tables: Tables, key: str, value: Any) -> None:
    """Set a key in every method, or, with a method's name before the key, in the methods of that name."""
    named, _, rest = key.partition(".")
    meant = {table.get("name") for table in method_tables(tables)}
    if rest and named in meant:
        meant, key = {named}, rest
    for table in method_tables(tables):
        if table.get("name") not in meant:
            continue
        name, first = table.get("name"), key.partition(".")[0]
        if key == "name":
            registry.parameters(value)
        elif first in OVERRIDABLE and first != key:
            _put(table, "method", key, value)
            continue
        else:
            kind = registry.parameters(name)
            aliases = kind.ALIASES
            if key not in key_names(kind) and key not in aliases:
                raise ParameterError(f"method {name} takes no {key}; {unknown_key_remedy(kind, key)}")
            for other in (alias for alias, meant in aliases.items() if meant == aliases.get(key, key)):
                table.pop(other, None)  # keep a single value under any of its names
            table.pop(aliases.get(key, key), None)
        table[key] = value


def cost_source(tables: Mapping[str, Any]) -> str:
    """Describe the source of the times, for reports."""
    sources, points = _sources_and_points(tables)
    listed = "; ".join(f"{name}: {source}" if name else source for name, source in sources)
    return f"{listed}; {', '.join(f'{key} ' + ', '.join(map(str, seen)) for key, seen in points.items())}" if points else listed


def cost_sources(tables: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names of the profiles, laws or devices whose times are used, each with its source; no name for times in layer-times.

    >>> cost_sources(load("speculative-batches"))[1]
    ('h100-operations', 'composed (ai-dynamo/aiconfigurator)')
    """
    return _sources_and_points(tables)[0]


def _sources_and_points(tables: Mapping[str, Any]) -> tuple[list[tuple[str, str]], dict[str, dict[Any, None]]]:
    """Sources of the times, and the prompts and numbers of devices of costs on hardware."""
    costs = [table for table in _costs_of(tables) if table]
    if _priced(tables):
        named: dict[str, list[str]] = {}
        sources, points = _hardware_sources(tables)
        for name, source in sources.items():
            named.setdefault(source, []).append(name)
        return [(", ".join(names), source) for source, names in named.items()], points
    given = [key for table in costs for key in table]
    given += [path.rpartition(".")[2] for path in tables.get("sweep", {}) if path.startswith(("cost.", "method.cost."))]
    published = "".join(f"{words}; " for key, words in _PUBLISHED_COSTS.items() if key in given)
    rest = [key for key in dict.fromkeys(given) if key not in ("kind", *NO_TIMES, *_PUBLISHED_COSTS)]
    if not rest and "fitted_on" in given:
        return [("", f"{published}assumed: equal layers, and the exit layer of the fitted runs")], {}
    layers = [] if "layer_times" in rest else ["every layer of the target takes one layer-time"]
    parts = [*layers, *([f"{', '.join(rest)} as set in [cost]"] if rest else []), "nothing else takes time"]
    return [("", f"{published}assumed: {'; '.join(parts)}")], {}


NO_TIMES = ("operations_ratio", "medium_operations_ratio", "allow_slow_medium", "shape", "draft_shape", "medium_shape")
"""Keys of [cost] that are not times."""
_PUBLISHED_COSTS = {
    "task": "published: the cost ratio, Table 1 of the slides",
    "data_set": "published: time of plain decoding, PPD Table 3",
    "fitted_on": "fitted to published times, PPD Table 3: a cost per process and token",
}
"""Sources of kind 'published', by the key that selects them."""


_SECONDS = (
    "step_s", "draft_step_s", "dispatch_s", "dispatch_per_process_s", "link_s", "promotion_s", "state_check_s",
)  # fmt: skip


_MOST_LISTED = 1000
"""Prompts, and combinations of values of other axes, of which sources and operating points are listed."""


def _on_hardware(table: Any) -> bool:
    return isinstance(table, Mapping) and table.get("kind") in ON_HARDWARE


def cost_of(tables: Mapping[str, Any], method: Mapping[str, Any]) -> Any:
    """Cost table of a method: [method.cost] or the shared [cost]; without a `kind`, [method.cost] overrides single shared keys."""
    own, shared = method.get("cost"), tables.get("cost", {})
    if own is None:
        return shared
    both = isinstance(own, Mapping) and isinstance(shared, Mapping) and "kind" not in own
    return {**shared, **own} if both and _on_hardware(shared) else own


def _priced(tables: Mapping[str, Any]) -> list[Tables]:
    """Costs of the methods that are on hardware."""
    return [table for table in (cost_of(tables, each) for each in method_tables(tables)) if _on_hardware(table)]


def _hardware_sources(tables: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, dict[Any, None]]]:
    """Provenance of the profiles and devices whose times are used, by name, and the operating points."""
    from sim.scenarios.hardware_cost import ROLES, HardwareCost  # numpy comes with it

    swept = {path: values for path, values in tables.get("sweep", {}).items() if path.startswith(("cost.", "method.cost."))}
    axes = {path.rpartition(".")[2]: values for path, values in swept.items() if isinstance(values, list)}
    asked = axes.get("prompt", [])[:_MOST_LISTED]
    prompts = [value for value in asked if type(value) is int and 0 <= value <= checks.MAX_TOKENS]
    # What is named does not depend on prompts and times, whose ends show whether they are valid.
    axes = {key: values if key not in ("prompt", *_SECONDS) else [*values[:1], *values[-1:]] for key, values in axes.items()}
    named: dict[str, str] = {}
    points: dict[str, dict[Any, None]] = {"prompt": {}, "tensor_parallel": {}}
    for table in _priced(tables):
        combinations = itertools.islice(itertools.product(*axes.values()), _MOST_LISTED)
        varied = [dict(zip(axes, values, strict=True)) for values in combinations]
        for values in varied:
            try:
                cost = HardwareCost(**{**table, **{key: value for key, value in values.items() if key in table or key in points}})
            except (ParameterError, TypeError):  # reported when the point is resolved
                continue
            for role in ROLES:
                found = cost.of(role)
                where = "" if role == "target" else f"{role}_"
                name = getattr(cost, f"{where}profile") or cost.law or f"{getattr(cost, f'{where}shape')} on {cost.device}"
                if found is not None:
                    named[name] = found.provenance
            points["prompt"] |= dict.fromkeys(prompts or [cost.prompt])
            points["tensor_parallel"][cost.split] = None
    return named, points


def fingerprint(tables: Tables) -> str:
    """Hash of everything that determines the results: the resolved tables, the files they name, and the results version."""
    text = json.dumps([tables, named_files(tables), RESULTS_VERSION], sort_keys=True, default=str)  # noqa: TID251  hashed alone
    return hashlib.sha256(text.encode()).hexdigest()


def named_files(tables: Tables) -> dict[str, str | None]:
    """Hash of each file that a scenario names, by its path; None for a missing file."""
    named = [values[index] for values, index in _file_axes(tables)]
    named += [table[key] for table, key in (*_outcome_files(tables), *_hardware_files(tables))]
    return {str(name): _digest(Path(name)) for name in named}  # the JSON of a log or a profile has its table's checksum


def _digest(path: Path) -> str | None:
    """Hash of a file's content, or of the config.json in a model's folder; None for a missing file, which its point reports."""
    path = path / "config.json" if path.is_dir() else path
    return hashlib.sha256(bounded_files.read_bytes(path)).hexdigest() if path.is_file() else None
