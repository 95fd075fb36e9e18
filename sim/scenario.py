"""Scenarios: TOML with [scenario], [[method]], [outcomes], [cost], [cluster] and [sweep], read, overridden and checked.

[outcomes] and [cost] hold for every method; one that differs has its own, [method.outcomes] and [method.cost]. [outcomes] is one
law, or one for each kind of outcome: [outcomes.match], [outcomes.accept]. A scenario is kept as the plain tables it was written in;
`Case` is one point of its grid made into checked objects. Unknown keys, and parameters that no method takes, are errors.
"""

from __future__ import annotations

import copy
import difflib
import hashlib
import importlib
import json
import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, replace
from importlib import resources
from pathlib import Path
from types import ModuleType
from typing import Any

from model import checks, published
from model.checks import ParameterError
from model.latency import OPERATIONS, RATIOS, UnitCost
from sim import acceptances, outcomes
from sim.cluster import Cluster
from sim.outcomes import Outcome

VIEWS = ("formula", "paths", "events")
SECTIONS = ("scenario", "method", "outcomes", "cost", "cluster", "sweep")
OWN = ("outcomes", "cost")
"""Sections that a method may have of its own."""
LAWS = {"match": outcomes.KINDS, "accept": acceptances.KINDS, "medium_accept": acceptances.BY_POSITION,
        "confidence": acceptances.CONFIDENCE}  # fmt: skip
"""Kinds of laws, by the outcome that methods ask for."""
DEFAULT = "ppd-figures-3-and-4"
MAX_REPLICATIONS = 1_000_000_000
MAX_TIME = 1e9
"""Layer-times, or seconds; far larger ones would only run over when they are squared and summed."""

Tables = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """[scenario]: what is decoded, how often, and in which views. `event_replications` defaults to `replications`."""

    name: str
    tokens: int
    replications: int = 1000
    event_replications: int | None = None
    seed: int = 0
    views: tuple[str, ...] = VIEWS
    description: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "description"):
            if not isinstance(getattr(self, name), str):
                raise ParameterError(f"{name} must be a text in quotes, got {checks.shown(getattr(self, name))}")
        if not self.name.isprintable() or len(self.name) > 100 or "/" in self.name or self.name.startswith(".") or not self.name:
            known = "1 to 100 characters, no slash, no dot in front"
            raise ParameterError(f"name must be usable as the name of a folder ({known}), got {checks.shown(self.name)}")
        checks.whole("tokens", self.tokens, 1, checks.MAX_TOKENS)
        checks.whole("replications", self.replications, 1, MAX_REPLICATIONS)
        if self.event_replications is not None:
            checks.whole("event_replications", self.event_replications, 1, MAX_REPLICATIONS)
        checks.whole("seed", self.seed, 0, 2**63 - 1)
        _check_views(self.views)


def _check_views(views: Any) -> None:
    if not isinstance(views, tuple) or not views:
        raise ParameterError(f"views must be a list of at least one of {', '.join(VIEWS)}, got {checks.shown(views)}")
    for view in views:
        checks.one_of("view", view, VIEWS)
    if len(set(views)) < len(views):
        raise ParameterError(f"views must name each view once, got {checks.shown(views)}")


@dataclass(frozen=True)
class Cost:
    """[cost]: the options of `model.latency.UnitCost`, and how long a layer takes where times are wanted in seconds.

    `kind` published takes the cost ratio from the base timings that the speculative-decoding deck prints for a `task`.
    """

    kind: str = "unit"
    task: str | None = None
    layer_times: tuple[float, ...] | None = None
    early_head: float = 0.0
    final_head: float = 0.0
    dispatch: float = 0.0
    dispatch_per_process: float = 0.0
    dispatch_law: str = "linear"
    link: float = 0.0
    promotion: float = 0.0
    cost_ratio: float | None = None
    medium_cost_ratio: float | None = None
    allow_slow_medium: bool = False
    operations_ratio: float | None = None
    medium_operations_ratio: float | None = None
    verify_cost: tuple[tuple[int, float], ...] | None = None
    seconds_per_layer: float | None = None

    def __post_init__(self) -> None:
        checks.one_of("kind", self.kind, ("unit", "published"))
        if (self.kind == "published") != (self.task is not None):
            raise ParameterError(f"task must be given with kind 'published' and with no other, got {checks.shown(self.task)}")
        if self.task is not None:
            checks.one_of("task", self.task, {str(row["task"]) for row in published.table("deck-table-1").rows})
            if self.cost_ratio is not None:
                raise ParameterError("cost_ratio is the table's own with kind 'published'; leave it out, or kind and task")
        for name in (*RATIOS.values(), *OPERATIONS.values()):
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), 0, MAX_TIME)
        checks.flag("allow_slow_medium", self.allow_slow_medium)
        if not self.allow_slow_medium and self.medium_cost_ratio is not None and self.medium_cost_ratio > 1:
            raise ParameterError(
                f"medium_cost_ratio must be at most 1, a medium model no slower than the large one, got {self.medium_cost_ratio:g};"
                " if it is meant, say allow_slow_medium = true"
            )
        if self.seconds_per_layer is not None:
            checks.number("seconds_per_layer", self.seconds_per_layer, 0, MAX_TIME)
        for name in ("early_head", "final_head", "dispatch", "dispatch_per_process", "link", "promotion"):
            checks.number(name, getattr(self, name), 0, MAX_TIME)
        if self.layer_times is not None and not isinstance(self.layer_times, tuple):
            raise ParameterError(f"layer_times must be a list with a time for each layer, got {checks.shown(self.layer_times)}")
        if self.layer_times == ():
            raise ParameterError("layer_times must have one time for each layer, got an empty list; leave it out for equal layers")
        for index, time in enumerate(self.layer_times or ()):
            checks.number(f"layer_times[{index}]", time, 0, MAX_TIME)
        if self.layer_times and not any(self.layer_times):
            raise ParameterError(f"layer_times must have a time above 0, got {checks.shown(self.layer_times)}")
        self.model(1 if self.layer_times is None else len(self.layer_times))

    def model(self, layers: int) -> UnitCost:
        """The cost model for a network of so many layers."""
        own = {field.name: getattr(self, field.name) for field in fields(UnitCost) if field.name != "layers"}
        if self.task is not None:
            from model.published import deck_report

            own["cost_ratio"] = deck_report.cost_ratio(self.task)
        return UnitCost(layers, **own)


@dataclass(frozen=True)
class Machine:
    """[cluster]: as `sim.cluster.Cluster`; without `units` there are as many as the method reserves."""

    units: int | None = None
    links: str = "point-to-point"
    stop: str = "now"

    def __post_init__(self) -> None:
        self.cluster(1)

    def cluster(self, reserved: int) -> Cluster:
        """The cluster for a method that reserves so many units."""
        return Cluster(reserved if self.units is None else self.units, self.links, self.stop)


@dataclass(frozen=True)
class Case:
    """One point of the grid, checked."""

    method: str
    parameters: Any
    settings: Settings
    outcomes: Mapping[str, Outcome]
    """By the name of what the method asks for."""
    cost: UnitCost
    seconds_per_layer: float | None
    cluster: Cluster

    @property
    def outcome(self) -> Outcome | None:
        """The first of its outcomes: of most methods the only one."""
        return next(iter(self.outcomes.values()), None)

    @property
    def contended(self) -> bool:
        """Whether processes may have to wait for units or links, which only the `events` view knows."""
        growing = not self.cost.plain and not getattr(self.parameters, "bounded", True)
        return self.cluster.units < self.parameters.units or self.cluster.links == "shared" or self.cluster.stop != "now" or growing

    @property
    def held(self) -> int:
        """Units that are reserved throughout: as many as the method wants and there are; all of them where it may want more."""
        growing = not self.cost.plain and not getattr(self.parameters, "bounded", True)
        return self.cluster.units if growing else min(self.parameters.units, self.cluster.units)


def names() -> list[str]:
    """Names of the embedded scenarios."""
    files = (path.name for path in resources.files("sim.scenarios").iterdir())
    return sorted(name.removesuffix(".toml") for name in files if name.endswith(".toml"))


def load(source: str | Path | Mapping[str, Any] | None = None) -> Tables:
    """The tables of a scenario: a path, the name of an embedded one, tables already read, or None for the default."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    label = DEFAULT if source is None else str(source)
    if source is None or (label in names() and not Path(label).exists()):
        text = resources.files("sim.scenarios").joinpath(f"{label}.toml").read_text(encoding="utf-8")
    else:
        try:
            text = Path(label).read_text(encoding="utf-8-sig")  # editors may put a byte-order mark in front
        except UnicodeDecodeError:
            raise ParameterError(f"scenario {label!r} is no text in UTF-8; name a TOML file, or save it as UTF-8") from None
        except (OSError, ValueError) as error:
            close = difflib.get_close_matches(label, names(), n=1)
            hint = f"; did you mean the embedded scenario {close[0]}?" if close else "; `sim ls scenarios` lists the embedded ones"
            raise ParameterError(f"scenario {checks.shown(label)} cannot be read: {_reason(error)}{hint}") from None
    try:
        return _located(tomllib.loads(text), Path(label).parent)
    except RecursionError:
        raise ParameterError(f"scenario {label!r} is not TOML: brackets nested too deeply") from None
    except ValueError as error:  # TOMLDecodeError is one; so is a number of thousands of digits
        raise ParameterError(f"scenario {label!r} is not TOML: {_plainly(error, text)}") from None


def _located(tables: Tables, folder: Path) -> Tables:
    """A file that a scenario names is beside it, not wherever the command happens to run."""
    for table in _laws_of(tables):
        if isinstance(table.get("file"), str):
            table["file"] = str(folder / table["file"])
    for path in _file_axes(tables):
        sweep = tables["sweep"]
        sweep[path] = [str(folder / name) if isinstance(name, str) else name for name in sweep[path]]
    return tables


def _laws_of(tables: Mapping[str, Any]) -> list[Tables]:
    """Every table of a scenario that says a law of outcomes, or may."""
    methods = tables.get("method")
    above = [tables, *(methods if isinstance(methods, list) else [methods])]
    found = [table.get("outcomes") for table in above if isinstance(table, Mapping)]
    inner = [each for table in found if isinstance(table, dict) for each in table.values()]
    return [table for table in (*found, *inner) if isinstance(table, dict)]


def _file_axes(tables: Mapping[str, Any]) -> list[str]:
    sweep = tables.get("sweep", {})
    if not isinstance(sweep, Mapping):
        return []
    return [path for path, values in sweep.items() if isinstance(values, list) and "outcomes" in path and path.endswith(".file")]


def _plainly(error: ValueError, text: str) -> str:
    """A parser's message in words for readers who have never seen its sources, with a line in every case."""
    about = str(error).replace("end of document", f"the end, line {len(text.splitlines())}")
    if "overwrite" in about or "twice" in about:
        return f"{about}: a key or a table is given a second time"
    return "a number has too many digits" if "digits" in about else about


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def method_tables(tables: Mapping[str, Any]) -> list[Tables]:
    """The [[method]] tables; a single [method] is one of them."""
    methods = tables.get("method", [])
    found = methods if isinstance(methods, list) else [methods]
    for table in found:
        if not isinstance(table, Mapping):
            raise ParameterError(f"method must be a table, [[method]] with name = ..., got {checks.shown(table)}")
    return found


def algorithm(name: Any) -> ModuleType:
    """The module of a method's parameters and process: `model.algorithms.NAME`, or any importable module with a dot in its name."""
    known = method_names()
    if not isinstance(name, str) or (name not in known and "." not in name):
        raise checks.unknown("method", name, known)
    try:
        module = importlib.import_module(name if "." in name else f"model.algorithms.{name}")
    except (ImportError, TypeError, ValueError) as error:  # the latter two: a name that no module can have
        raise ParameterError(f"method {name!r} cannot be imported: {error}; known: {', '.join(known)}") from None
    if not hasattr(module, "Parameters"):
        raise ParameterError(f"method {name!r} is a module without Parameters, so no method; known: {', '.join(known)}")
    return module


def theory(name: str) -> ModuleType:
    """The module of a method's closed forms: `model.NAME`, or the module itself for a method from outside."""
    return importlib.import_module(name if "." in name else f"model.{name}")


def twin(name: str) -> ModuleType:
    """The module of a method's vectorised paths: `sim.paths.NAME`, or the module itself for a method from outside."""
    return importlib.import_module(name if "." in name else f"sim.paths.{name}")


def method_names() -> list[str]:
    """Names of the methods: the files in `model/algorithms`."""
    files = (path.name for path in resources.files("model.algorithms").iterdir())
    return sorted(name.removesuffix(".py") for name in files if name.endswith(".py") and not name.startswith("_"))


def build(kind: type, table: Any, where: str) -> Any:
    """A checked object from a table: no unknown key, none missing, and whatever the object checks itself."""
    if not isinstance(table, Mapping):
        raise ParameterError(f"[{where}] must be a table, got {checks.shown(table)}")
    known = {field.name: field for field in fields(kind)}
    for key in table:
        if key not in known:
            raise ParameterError(f"unknown key {where}.{key}; {checks.nearest(key, known)}")
    missing = [name for name, field in known.items() if field.default is MISSING and name not in table]
    if missing:
        raise ParameterError(f"{where}.{missing[0]} is required and has no default; add it under [{where}]")
    try:
        return kind(**{key: _frozen(value) for key, value in table.items()})
    except ParameterError as error:
        raise ParameterError(error if str(error).startswith(where) else f"{where}: {error}") from None


def _frozen(value: Any) -> Any:
    return tuple(_frozen(each) for each in value) if isinstance(value, list) else value


def case(tables: Tables, index: int = 0) -> Case:
    """The checked objects of one point: these tables, without their sweep, and the method of this index."""
    for key in tables:
        if key not in SECTIONS:
            raise ParameterError(f"unknown section [{key}]; {checks.nearest(key, SECTIONS)}")
    settings = build(Settings, tables.get("scenario", {}), "scenario")
    methods = method_tables(tables)
    if not methods:
        raise ParameterError("a scenario needs at least one [[method]] table; `sim ls methods` lists the methods")
    table = dict(methods[index])
    name = table.pop("name", None)
    if name is None:
        raise ParameterError(f"method.name is required; known: {', '.join(method_names())}")
    module = algorithm(name)
    own = {section: table.pop(section, None) for section in OWN}
    _refuse_unused(tables, methods)
    parameters = build(module.Parameters, _renamed(module.Parameters, table), "method")
    where = {section: f"method.{section}" if own[section] is not None else section for section in OWN}
    cost_table = tables.get("cost", {}) if own["cost"] is None else own["cost"]
    cost = build(Cost, cost_table, where["cost"])
    model = cost.model(parameters.layers)
    for role in getattr(parameters, "ROLES", ()):
        if model.whole(role) is None:
            raise ParameterError(
                f"{where['cost']}.{RATIOS[role]} is required by method {name} and has no default: the time of a pass of the {role}"
                " model over one of the target"
            )
    counted = {OPERATIONS[role]: getattr(model, OPERATIONS[role]) for role in getattr(parameters, "ROLES", ())}
    unknown = [ratio for ratio, value in counted.items() if value is None]
    if 0 < len(unknown) < len(counted):
        raise ParameterError(
            f"{where['cost']}.{unknown[0]} is required by method {name} beside the other: the arithmetic of a token in that model"
            " over that of one in the target; or leave out both, and operations are not counted"
        )
    widest = getattr(parameters, "widest", 1)
    if model.curve is not None and model.curve.last < widest:
        raise ParameterError(
            f"{where['cost']}.verify_cost must reach width {widest}, the widest pass of method {name}, got {model.curve.last};"
            " measure wider passes or draft less"
        )
    machine = build(Machine, tables.get("cluster", {}), "cluster")
    laws = tables.get("outcomes") if own["outcomes"] is None else own["outcomes"]
    found = _outcomes(laws, where["outcomes"], name, parameters, settings.tokens)
    cluster = machine.cluster(parameters.units)
    if hasattr(parameters, "informed"):
        parameters = parameters.informed(model)
    return Case(name, parameters, settings, found, model, cost.seconds_per_layer, cluster)


def _asked(kind: Any, table: Mapping[str, Any]) -> tuple[str, ...]:
    """The outcomes that a method asks for with these parameters: all of its OUTCOMES, or what its `asked` picks of them."""
    found: tuple[str, ...] = kind.asked(table) if hasattr(kind, "asked") else kind.OUTCOMES
    return found


def _renamed(kind: Any, table: Tables) -> Tables:
    """A method's table with what other programs call its parameters under their names here."""
    aliases = getattr(kind, "ALIASES", {})
    twice = [alias for alias, key in aliases.items() if {alias, key} <= table.keys()]
    if twice:
        raise ParameterError(f"method.{twice[0]} is another name of {aliases[twice[0]]}; give one of the two")
    return {aliases.get(key, key): value for key, value in table.items()}


def _refuse_unused(tables: Tables, methods: list[Tables]) -> None:
    """What no method of the scenario looks at is an error: somebody thinks that it counts."""
    kinds = [algorithm(table.get("name")).Parameters for table in methods]
    shared = [(kind, table) for kind, table in zip(kinds, methods, strict=True) if "outcomes" not in table]
    table = tables.get("outcomes")
    if isinstance(table, Mapping) and "kind" not in table:
        wanted = {name for kind, own in shared for name in _asked(kind, own)}
        for name in table:
            if name in LAWS and name not in wanted:
                raise ParameterError(f"[outcomes.{name}] is used by no method of this scenario; leave it out")
    roles = {role for kind, table in zip(kinds, methods, strict=True) if "cost" not in table for role in getattr(kind, "ROLES", ())}
    _refuse_unused_cost("cost", tables.get("cost"), roles)
    for kind, table in zip(kinds, methods, strict=True):
        _refuse_unused_cost("method.cost", table.get("cost"), {*getattr(kind, "ROLES", ())})


def _refuse_unused_cost(where: str, table: Any, roles: set[str]) -> None:
    if not isinstance(table, Mapping):
        return
    needs = {ratio: {role} for role, ratio in [*RATIOS.items(), *OPERATIONS.items()]} | {
        "task": {"draft"}, "allow_slow_medium": {"medium"}, "verify_cost": {*RATIOS},
    }  # fmt: skip
    for key, users in needs.items():
        if key in table and not roles & users:
            raise ParameterError(f"{where}.{key} is used by no method that it is given for; leave it out")


def _outcomes(table: Any, where: str, name: str, parameters: Any, tokens: int) -> dict[str, outcomes.Outcome]:
    wanted = _asked(type(parameters), vars(parameters))
    if table is None:
        if wanted:
            raise ParameterError(f"method {name} needs [outcomes] ({', '.join(wanted)}), and the scenario has none")
        return {}
    if not isinstance(table, Mapping):
        raise ParameterError(f"[{where}] must be a table, got {table!r}")
    one = "kind" in table
    if not one and not {*table} & {*LAWS} and not any(isinstance(value, Mapping) for value in table.values()):
        raise ParameterError(f"{where}.kind is required: one of {', '.join(sorted(LAWS[(*wanted, 'match')[0]]))}")
    unknown = [] if one else [key for key in table if key not in LAWS]
    if unknown:
        raise ParameterError(f"unknown key {where}.{unknown[0]}; {checks.nearest(unknown[0], LAWS)}")
    missing = [key for key in wanted if not one and key not in table]
    if missing or (one and len(wanted) > 1):
        tables_ = " and ".join(f"[{where}.{key}]" for key in wanted)
        raise ParameterError(f"method {name} needs {tables_}" + (f", and [{where}.{missing[0]}] is missing" if missing else ""))
    if one and not wanted:
        # Nobody looks at it; it must be sound all the same, as one of the laws that there are.
        checks.one_of(f"{where}.kind", table["kind"], {kind for kinds in LAWS.values() for kind in kinds})
        return {}
    return {key: _law(table if one else table[key], where if one else f"{where}.{key}", key, parameters, tokens) for key in wanted}


def _law(table: Any, where: str, outcome: str, parameters: Any, tokens: int) -> outcomes.Outcome:
    if not isinstance(table, Mapping):
        raise ParameterError(f"[{where}] must be a table, got {checks.shown(table)}")
    kinds: Mapping[str, Any] = LAWS[outcome]
    if "kind" not in table:
        raise ParameterError(f"{where}.kind is required: one of {', '.join(sorted(kinds))}")
    checks.one_of(f"{where}.kind", table["kind"], kinds)
    try:
        laws = build(kinds[table["kind"]], {key: value for key, value in table.items() if key != "kind"}, where)
    except ParameterError as error:
        if "unknown key" not in str(error):
            raise
        raise ParameterError(f"{error} (of {where}.kind {table['kind']!r}, for {outcomes.RATES[outcome]})") from None
    found: outcomes.Outcome = laws.outcome(parameters, tokens)
    return replace(found, kind=table["kind"])


def apply(tables: Tables, path: str, value: Any, only: int | None = None) -> None:
    """Set one dotted path in the tables. `method.x` is set in every method, or in that of index `only`, and all must take x."""
    section, _, key = path.partition(".")
    if section not in SECTIONS or section == "sweep" or not key:
        known = [f"{name}.KEY" for name in SECTIONS if name != "sweep"]
        raise ParameterError(f"unknown path {path!r}; {checks.nearest(path, known)}")
    if section in OWN:
        _apply_shared(tables, section, key, value, only)
    elif section != "method":
        _put(tables.setdefault(section, {}), section, key, value)
    else:
        _apply_to_methods(tables, key, value, only)


def _put(table: Any, where: str, key: str, value: Any) -> None:
    """Set a key, or a key of a table in the table where it has dots."""
    *above, last = key.split(".")
    for name in above:
        if not isinstance(table, dict):
            break
        table, where = table.setdefault(name, {}), f"{where}.{name}"
    if not isinstance(table, dict):
        raise ParameterError(f"[{where}] must be a table, got {table!r}")
    table[last] = value


def _apply_shared(tables: Tables, section: str, key: str, value: Any, only: int | None) -> None:
    """Set what holds for all methods; where each has its own, in those that say it already."""
    own = [table for index, table in enumerate(method_tables(tables)) if section in table and only in (None, index)]
    if section in tables or not own:
        _put(tables.setdefault(section, {}), section, key, value)
        return
    saying = [table for table in own if _says(table[section], key)]
    if not saying:
        raise ParameterError(f"no [method.{section}] says {key}; write the path of one that should: method.{section}.{key}")
    for table in saying:
        _put(table[section], f"method.{section}", key, value)


def _says(table: Any, key: str) -> bool:
    for name in key.split("."):
        if not isinstance(table, Mapping) or name not in table:
            return False
        table = table[name]
    return True


def _apply_to_methods(tables: Tables, key: str, value: Any, only: int | None) -> None:
    """In every method, or with a method's name in front of the key in those of that name."""
    named, _, rest = key.partition(".")
    meant = {table.get("name") for table in method_tables(tables)}
    if rest and named in meant:
        meant, key = {named}, rest
    for index, table in enumerate(method_tables(tables)):
        if (only is not None and index != only) or table.get("name") not in meant:
            continue
        name, first = table.get("name"), key.partition(".")[0]
        if key == "name":
            algorithm(value)
        elif first in OWN and first != key:
            _put(table, "method", key, value)
            continue
        else:
            kind = algorithm(name).Parameters
            known = [field.name for field in fields(kind)]
            aliases = getattr(kind, "ALIASES", {})
            if key not in known and key not in aliases:
                raise ParameterError(f"method {name} takes no {key}; {checks.nearest(key, known)}")
            for other in (alias for alias, meant in aliases.items() if meant == aliases.get(key, key)):
                table.pop(other, None)  # one value, whatever it is called
            table.pop(aliases.get(key, key), None)
        table[key] = value


def cost_source(tables: Mapping[str, Any]) -> str:
    """Where the times come from, in words for whoever reads a result."""
    costs = [table for table in (tables.get("cost"), *(each.get("cost") for each in method_tables(tables))) if table]
    given = [key for table in costs for key in table if key not in ("kind", "task")]
    given += [path.rpartition(".")[2] for path in tables.get("sweep", {}) if path.startswith(("cost.", "method.cost."))]
    printed = any(table.get("kind") == "published" for table in costs)
    ratios = "published: the cost ratio, Table 1 of the deck; " if printed else ""
    if not given:
        return f"{ratios}assumed: every layer one time unit, nothing else takes time"
    return f"{ratios}assumed, as [cost] says: {', '.join(dict.fromkeys(given))}; layers not named take one time unit each"


def fingerprint(tables: Tables) -> str:
    """A hash of all that decides the results: the resolved tables, the files they name, and the version of what computes them."""
    from sim.version import RESULTS_VERSION

    files = [table.get("file") for table in _laws_of(tables)]
    files += [name for path in _file_axes(tables) for name in tables["sweep"][path]]
    contents = {str(name): hashlib.sha256(Path(name).read_bytes()).hexdigest() for name in files if name is not None}
    text = json.dumps([tables, contents, RESULTS_VERSION], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()
