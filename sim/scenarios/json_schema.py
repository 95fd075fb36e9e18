"""JSON schema of scenarios, derived from the dataclasses that check them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import TypeAdapter

from model.base.table_records import documented
from model.methods import registry
from model.published.paper_notes import NOTES
from sim.scenarios import cases
from sim.scenarios.hardware_cost import HardwareCost
from sim.scenarios.outcomes_section import LAWS


def _of(kind: type, name: str | None = None, key: str = "name") -> dict[str, Any]:
    """Schema of a dataclass without unknown keys; with `name`, of a table with that value under `key`."""
    found: dict[str, Any] = TypeAdapter(kind).json_schema()
    for each, meaning in documented(kind).items():
        if each in found["properties"]:
            found["properties"][each]["description"] = meaning
    found["additionalProperties"] = False
    if name is not None:
        found["properties"] = {key: {"const": name}} | found.get("properties", {})
        found["required"] = [key, *found.get("required", [])]
    return found


def _part(kind: type) -> dict[str, Any]:
    """Schema of some keys of a dataclass, without its kind: the overrides of a method."""
    found = _of(kind)
    del found["properties"]["kind"], found["required"]
    return found


def _name_aliases(table: dict[str, Any], aliases: Mapping[str, str]) -> None:
    """Let each key of a table have one of its names: exactly one if it is required, at most one if not."""
    several = []
    for meant in dict.fromkeys(aliases.values()):
        names = [meant, *[alias for alias, known in aliases.items() if known == meant]]
        table["properties"] |= dict.fromkeys(names, table["properties"][meant])
        one: list[dict[str, Any]] = [{"required": [name]} for name in names]
        if meant in table["required"]:
            table["required"].remove(meant)
        else:
            one.append({"not": {"anyOf": one.copy()}})
        several.append({"oneOf": one})
    if several:
        table["allOf"] = several


def of_scenarios() -> dict[str, Any]:
    """Return the schema of a scenario; tables that occur in several places are defined once, in `$defs`."""
    defs: dict[str, dict[str, Any]] = {}

    def named(name: str, schema: dict[str, Any]) -> dict[str, Any]:
        defs[name] = schema
        return {"$ref": f"#/$defs/{name}"}

    units, seconds = named("cost-in-layer-times", _of(cases.Cost)), named("cost-in-seconds", _of(HardwareCost))
    cost = named("cost", {"anyOf": [units, seconds]})
    own_cost = named("cost-of-a-method", {"anyOf": [units, seconds, named("part-of-a-cost", _part(HardwareCost))]})
    laws = {
        outcome: named(outcome, {"anyOf": [
            named(f"{outcome}-{kind}", _of(law, kind, key="kind")) for kind, law in kinds.items()
        ]})
        for outcome, kinds in LAWS.items()
    }  # fmt: skip
    by_name = {"type": "object", "additionalProperties": False, "minProperties": 1, "properties": laws}
    outcomes = named("outcomes", {"anyOf": [*laws.values(), by_name]})
    tables = []
    for name in registry.names():
        table = _of(registry.parameters(name), name)
        _name_aliases(table, registry.parameters(name).ALIASES)
        table["required"] = [key for key in table["required"] if key != "layers"]  # a shape or a profile may know it
        table["properties"] |= {"outcomes": outcomes, "cost": own_cost}
        tables.append(named(name, table))
    method = named("method", {"anyOf": tables})
    settings = _of(cases.Settings)
    for name, known in (("notes", NOTES), ("views", cases.VIEWS)):
        settings["properties"][name]["items"] = {"enum": [*known]}
    values = {"type": "array", "minItems": 1}
    span = {"type": "object", "required": ["from", "to", "count"], "additionalProperties": False, "properties": {
        "from": {"type": "number"}, "to": {"type": "number"}, "count": {"type": "integer", "minimum": 1}}}  # fmt: skip
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema", "title": "decodesim scenario", "type": "object",
        "additionalProperties": False, "required": ["scenario", "method"],
        "properties": {
            "scenario": settings,
            "method": {"anyOf": [method, {"type": "array", "minItems": 1, "items": method}]},
            "outcomes": outcomes, "cost": cost, "cluster": _of(cases.Machine),
            "sweep": {"type": "object", "additionalProperties": {"anyOf": [values, span]}},
        },
        "$defs": defs,
    }  # fmt: skip
