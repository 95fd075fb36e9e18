"""JSON schema of scenarios, derived from the dataclasses that check them."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from model.methods import registry
from model.published.paper_notes import NOTES
from sim.scenarios import cases
from sim.scenarios.hardware_cost import HardwareCost
from sim.scenarios.outcomes_section import LAWS


def _of(kind: type, name: str | None = None, key: str = "name") -> dict[str, Any]:
    """Schema of a dataclass without unknown keys; with `name`, of a table with that value under `key`."""
    found: dict[str, Any] = TypeAdapter(kind).json_schema()
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


def of_scenarios() -> dict[str, Any]:
    """Return the schema of a scenario."""
    cost = {"anyOf": [_of(cases.Cost), _of(HardwareCost)]}
    laws = {outcome: {"anyOf": [_of(kind, name, key="kind") for name, kind in kinds.items()]} for outcome, kinds in LAWS.items()}
    by_name = {"type": "object", "additionalProperties": False, "minProperties": 1, "properties": laws}
    anything = {"anyOf": [*(law for each in laws.values() for law in each["anyOf"]), by_name]}
    tables = [_of(registry.parameters(name), name) for name in registry.names()]
    for name, table in zip(registry.names(), tables, strict=True):
        for alias, meant in registry.parameters(name).ALIASES.items():
            table["properties"][alias] = table["properties"][meant]
            table["required"].remove(meant)
            table["oneOf"] = [{"required": [alias]}, {"required": [meant]}]
        table["properties"] |= {"outcomes": anything, "cost": {"anyOf": [*cost["anyOf"], _part(HardwareCost)]}}
    method = {"anyOf": tables}
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
            "outcomes": anything, "cost": cost, "cluster": _of(cases.Machine),
            "sweep": {"type": "object", "additionalProperties": {"anyOf": [values, span]}},
        },
    }  # fmt: skip
