"""JSON schema of the document that `sim advise --json` prints."""

from __future__ import annotations

from typing import Any

from sim.advice.advice import KIND, SCHEMA_VERSION

TEXT, NUMBER, WHOLE, FLAG = ({"type": each} for each in ("string", "number", "integer", "boolean"))
OR_NULL = {name: {"type": [name, "null"]} for name in ("string", "number", "integer", "boolean")}


def schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12)."""
    best = {"type": "object", "additionalProperties": WHOLE, "description": "Best draft length by running sequences; 0: plain."}
    off = {
        "type": "object", "description": "Running sequences from which drafts do not pay.",
        "properties": dict.fromkeys(("batch", "low", "high", "pays_until", "costs_from"), OR_NULL["number"]) | {"limit": NUMBER},
    }  # fmt: skip
    rows = {
        "method": TEXT, "setting": TEXT, "acceptance": TEXT, "batch": WHOLE, "draft_length": OR_NULL["integer"], "speedup": NUMBER,
        "speedup_low": OR_NULL["number"], "speedup_high": OR_NULL["number"], "tpot_ms": NUMBER,
        "tokens_per_s_per_gpu": NUMBER, "gpus": WHOLE, "exact": FLAG, "best": FLAG, "tie": FLAG,
        "advised": FLAG | {"description": "True for the draft length that the verdict names at this number; 0: plain decoding."},
        "meets_slo": OR_NULL["boolean"],
    }  # fmt: skip
    broken = {
        "batch": NUMBER, "acceptance": OR_NULL["number"], "cost_ratio": OR_NULL["number"], "now_acceptance": NUMBER,
        "draft_pass_ms": OR_NULL["number"], "now_draft_pass_ms": NUMBER,
    }  # fmt: skip
    alternative = {
        "option": TEXT, "running": WHOLE, "replicas": WHOLE, "gpus_per_replica": WHOLE, "sequences_per_replica": WHOLE,
        "draft_length": OR_NULL["integer"], "tpot_ms": NUMBER, "tokens_per_s_per_gpu": NUMBER, "asked": FLAG,
    }  # fmt: skip
    case = {"acceptance": TEXT, "verdict": TEXT, "best": best, "switch_off_batch": OR_NULL["number"], "switch_off": off}
    evidence = {"input": TEXT, "value": TEXT, "source": TEXT, "kind": {"enum": ["measured", "published", "assumed", "prior"]}}
    moved = {"input": TEXT, "speedup_low": NUMBER, "speedup_high": NUMBER}
    spread = {f"{name}{end}": OR_NULL["number"] for name in ("running", "tpot_ms", "e2e_ms") for end in ("", "_low", "_high")}
    arrivals = closed_object({
        "rate": NUMBER, "replicas": WHOLE, "prompt": NUMBER, "output": NUMBER, "most_running": WHOLE, "verdict": TEXT,
        "best": OR_NULL["integer"], "table": list_of({
            "draft_length": WHOLE, **spread, "keeps_up": NUMBER, "most_requests_per_s": NUMBER,
        }),
    })  # fmt: skip
    budget = closed_object({
        "positions": WHOLE | {"description": "Most cached positions of each sequence that a pass of the draft reads."},
        "context": NUMBER, "most_sequences": OR_NULL["integer"], "most_sequences_without": OR_NULL["integer"],
        "by_batch": list_of({"batch": WHOLE, "draft_pass_ms": NUMBER, "draft_pass_ms_without": NUMBER}),
    })  # fmt: skip
    keys = {
        "kind": {"const": KIND}, "schema_version": {"const": SCHEMA_VERSION}, "verdict": TEXT, "model": OR_NULL["string"],
        "gpu": OR_NULL["string"], "tensor_parallel": WHOLE, "gpus": WHOLE, "draft": OR_NULL["string"], "best": best,
        "switch_off_batch": OR_NULL["number"], "switch_off": off, "cases": list_of(case), "table": list_of(rows),
        "rests_on": list_of(evidence),
        "break_even": closed_object(broken | {"by_batch": list_of(broken | {"acceptance_case": TEXT})}),
        "moves_most": list_of(moved), "measure_next": OR_NULL["string"], "alternatives": list_of(alternative),
        "arrivals": {"anyOf": [{"type": "null"}, arrivals]}, "not_evaluated": list_of({"method": TEXT, "because": TEXT}),
        "settings": {"type": "object", "additionalProperties": {"type": "array", "items": TEXT}},
        "draft_context_budget": {"anyOf": [{"type": "null"}, budget]}, "kernels_only": FLAG,
        "notes": {"type": "array", "items": TEXT}, "command": {"type": "array", "items": TEXT},
        "versions": {"type": "object", "additionalProperties": TEXT},
    }  # fmt: skip
    found = closed_object(keys)
    found["required"] = [name for name in keys if name not in ("command", "versions")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Advice of sim advise", **found}


def closed_object(keys: dict[str, Any]) -> dict[str, Any]:
    """Schema of an object with exactly these keys."""
    return {"type": "object", "properties": keys, "required": [*keys], "additionalProperties": False}


def list_of(keys: dict[str, Any]) -> dict[str, Any]:
    """Schema of a list of such objects."""
    return {"type": "array", "items": closed_object(keys)}
