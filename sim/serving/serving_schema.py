"""JSON schemas of scenarios of servers, and of the document that `sim serve --json` prints."""

from __future__ import annotations

from typing import Any

from pydantic import TypeAdapter

from model.base.table_records import documented
from model.serving.records.recorder import TimeSeries
from model.serving.scheduler import ServerSettings
from sim.serving import draft_schedules, study_results
from sim.serving.load_scenario import SECTIONS

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_TEXT, _NUMBER, _WHOLE, _FLAG = ({"type": each} for each in ("string", "number", "integer", "boolean"))
_OR_NULL = {name: {"type": [name, "null"]} for name in ("string", "number", "integer", "boolean")}


def of_scenarios() -> dict[str, Any]:
    """The schema of scenario files with [load] (JSON Schema 2020-12)."""
    sections = {}
    for name, kind in SECTIONS.items():
        found: dict[str, Any] = TypeAdapter(kind).json_schema()
        for key, meaning in documented(kind).items():
            found["properties"][key]["description"] = meaning
        sections[name] = found | {"additionalProperties": False}
    axes = {"type": "object", "additionalProperties": {"type": "array", "minItems": 1}}
    return {
        "$schema": _DIALECT, "title": "decodesim scenario of a server", "type": "object", "additionalProperties": False,
        "required": ["scenario", "load"], "properties": {**sections, "sweep": axes},
    }  # fmt: skip


def of_output() -> dict[str, Any]:
    """The schema of the document of `sim serve --json` (JSON Schema 2020-12)."""
    spread = {f"{name}{end}": _OR_NULL["number"] for name in study_results.SPREAD for end in ("", "_low", "_high")}
    rows = {
        "rate": _OR_NULL["number"], "concurrency": _OR_NULL["integer"], "policy": _TEXT, **spread, "mean_running": _NUMBER,
        "utilization": _NUMBER, "draft_utilization": _OR_NULL["number"], "gpus": _WHOLE, "output_tokens_per_s_per_gpu": _NUMBER,
        "kv_utilization": _OR_NULL["number"], "preemptions": _WHOLE, "mean_draft_length": _NUMBER,
        "tokens_per_step": _NUMBER,
        "bound_tokens_per_s": _OR_NULL["number"], "stable": _FLAG, "exact": _FLAG,
        **{f"{name}{end}": _OR_NULL["number"] for name in ("requests_per_s_within_slo", "gain_over_off", "regret")
           for end in ("", "_low", "_high")},
    }  # fmt: skip
    schedule = dict.fromkeys(draft_schedules.ScheduleRow._fields, _NUMBER)
    settings = {name: {"type": ["number", "boolean", "null"]} for name in ServerSettings.names()}
    evidence = {"input": _TEXT, "value": _TEXT, "source": _TEXT, "kind": {"enum": ["measured", "published", "assumed", "prior"]}}
    keys = {
        "kind": {"const": study_results.KIND}, "schema_version": {"const": study_results.SCHEMA_VERSION}, "verdict": _TEXT,
        "model": _OR_NULL["string"], "gpu": _OR_NULL["string"], "tensor_parallel": _WHOLE, "replicas": _WHOLE, "table": _list(rows),
        "settings": _object(settings), "workload": _object({"prompt": _NUMBER, "output": _NUMBER}), "schedule": _list(schedule),
        "switch_off_running": _OR_NULL["integer"],
        "switch_off": _object(dict.fromkeys(draft_schedules.SwitchOffLoad._fields, _OR_NULL["number"])),
        "by_context": _list({
            "context": _WHOLE, "running": _WHOLE, "draft_length": _OR_NULL["integer"], "gain_over_off": _OR_NULL["number"],
        }),
        "series": _list({
            "rate": _OR_NULL["number"], "concurrency": _OR_NULL["integer"], "policy": _TEXT,
            **{name: {"type": "array", "items": _NUMBER} for name in TimeSeries().table()},
        }),
        "lines": {"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}},
        "ranges": {"type": "array"}, "rests_on": _list(evidence),
        "notes": {"type": "array", "items": _TEXT}, "command": {"type": "array", "items": _TEXT},
        "versions": {"type": "object", "additionalProperties": _TEXT},
    }  # fmt: skip
    found = _object(keys)
    found["required"] = [name for name in keys if name not in ("command", "versions")]
    return {"$schema": _DIALECT, "title": "Study of sim serve", **found}


def _object(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}


def _list(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": _object(keys)}
