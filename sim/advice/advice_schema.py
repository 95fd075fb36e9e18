"""JSON schema of the document that `sim advise --json` prints."""

from __future__ import annotations

from typing import Any

from sim.advice.advice import KIND, SCHEMA_VERSION

_TEXT, _NUMBER, _WHOLE, _FLAG = ({"type": each} for each in ("string", "number", "integer", "boolean"))
_OR_NULL = {name: {"type": [name, "null"]} for name in ("string", "number", "integer", "boolean")}


def schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12)."""
    best = {"type": "object", "additionalProperties": _WHOLE, "description": "Best draft length by running sequences; 0: plain."}
    off = {
        "type": "object", "description": "Running sequences from which drafts do not pay.",
        "properties": dict.fromkeys(("batch", "low", "high", "pays_until", "costs_from"), _OR_NULL["number"]) | {"limit": _NUMBER},
    }  # fmt: skip
    rows = {
        "method": _TEXT, "setting": _TEXT, "acceptance": _TEXT, "batch": _WHOLE, "draft_length": _OR_NULL["integer"], "speedup": _NUMBER,
        "speedup_low": _OR_NULL["number"], "speedup_high": _OR_NULL["number"], "tpot_ms": _NUMBER,
        "tokens_per_s_per_gpu": _NUMBER, "gpus": _WHOLE, "exact": _FLAG, "best": _FLAG, "tie": _FLAG,
        "advised": _FLAG | {"description": "True for the draft length that the verdict names at this number; 0: plain decoding."},
        "meets_slo": _OR_NULL["boolean"],
    }  # fmt: skip
    broken = {
        "batch": _NUMBER, "acceptance": _OR_NULL["number"], "cost_ratio": _OR_NULL["number"], "now_acceptance": _NUMBER,
        "draft_pass_ms": _OR_NULL["number"], "now_draft_pass_ms": _NUMBER,
    }  # fmt: skip
    alternative = {
        "option": _TEXT, "running": _WHOLE, "replicas": _WHOLE, "gpus_per_replica": _WHOLE, "sequences_per_replica": _WHOLE,
        "draft_length": _OR_NULL["integer"], "tpot_ms": _NUMBER, "tokens_per_s_per_gpu": _NUMBER, "asked": _FLAG,
    }  # fmt: skip
    case = {"acceptance": _TEXT, "verdict": _TEXT, "best": best, "switch_off_batch": _OR_NULL["number"], "switch_off": off}
    evidence = {"input": _TEXT, "value": _TEXT, "source": _TEXT, "kind": {"enum": ["measured", "published", "assumed", "prior"]}}
    moved = {"input": _TEXT, "speedup_low": _NUMBER, "speedup_high": _NUMBER}
    spread = {f"{name}{end}": _OR_NULL["number"] for name in ("running", "tpot_ms", "e2e_ms") for end in ("", "_low", "_high")}
    arrivals = _object({
        "rate": _NUMBER, "replicas": _WHOLE, "prompt": _NUMBER, "output": _NUMBER, "most_running": _WHOLE, "verdict": _TEXT,
        "best": _OR_NULL["integer"], "table": _list({
            "draft_length": _WHOLE, **spread, "keeps_up": _NUMBER, "most_requests_per_s": _NUMBER,
        }),
    })  # fmt: skip
    keys = {
        "kind": {"const": KIND}, "schema_version": {"const": SCHEMA_VERSION}, "verdict": _TEXT, "model": _OR_NULL["string"],
        "gpu": _OR_NULL["string"], "tensor_parallel": _WHOLE, "gpus": _WHOLE, "draft": _OR_NULL["string"], "best": best,
        "switch_off_batch": _OR_NULL["number"], "switch_off": off, "cases": _list(case), "table": _list(rows),
        "rests_on": _list(evidence),
        "break_even": _object(broken | {"by_batch": _list(broken | {"acceptance_case": _TEXT})}),
        "moves_most": _list(moved), "measure_next": _OR_NULL["string"], "alternatives": _list(alternative),
        "arrivals": {"anyOf": [{"type": "null"}, arrivals]}, "not_evaluated": _list({"method": _TEXT, "because": _TEXT}),
        "settings": {"type": "object", "additionalProperties": {"type": "array", "items": _TEXT}}, "kernels_only": _FLAG,
        "notes": {"type": "array", "items": _TEXT}, "command": {"type": "array", "items": _TEXT},
        "versions": {"type": "object", "additionalProperties": _TEXT},
    }  # fmt: skip
    found = _object(keys)
    found["required"] = [name for name in keys if name not in ("command", "versions")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Advice of sim advise", **found}


def _object(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}


def _list(keys: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": _object(keys)}
