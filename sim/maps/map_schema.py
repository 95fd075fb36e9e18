"""JSON schema of the document that `sim advise --map --json` prints."""

from __future__ import annotations

from typing import Any

from sim.advice.advice_schema import FLAG, OR_NULL, TEXT, WHOLE, closed_object, list_of
from sim.maps.method_map import KIND, SCHEMA_VERSION


def schema() -> dict[str, Any]:
    """The schema (JSON Schema 2020-12)."""
    rows = {
        "batch": WHOLE, "context": WHOLE, "fits": FLAG | {"description": "False: the memory does not hold the sequences."},
        "method": OR_NULL["string"], "label": OR_NULL["string"], "setting": OR_NULL["string"], "speedup": OR_NULL["number"],
        "speedup_low": OR_NULL["number"], "speedup_high": OR_NULL["number"], "tpot_ms": OR_NULL["number"],
        "gpus": OR_NULL["integer"],
        "gpu_ms_per_token": OR_NULL["number"] | {"description": "GPU-time of an output token, over all GPUs that are reserved."},
        "exact": OR_NULL["boolean"], "fastest": OR_NULL["boolean"],
        "tied": OR_NULL["boolean"] | {"description": "True if the interval of the ratio of its speed to the fastest includes 1."},
        "least_gpu_time": OR_NULL["boolean"],
    }  # fmt: skip
    evidence = {"input": TEXT, "value": TEXT, "source": TEXT, "kind": {"enum": ["measured", "published", "assumed", "prior"]}}
    keys = {
        "kind": {"const": KIND}, "schema_version": {"const": SCHEMA_VERSION}, "verdict": TEXT, "model": OR_NULL["string"],
        "gpu": OR_NULL["string"], "tensor_parallel": WHOLE, "gpus": WHOLE, "draft": OR_NULL["string"], "table": list_of(rows),
        "not_evaluated": list_of({"method": TEXT, "because": TEXT}), "rests_on": list_of(evidence), "kernels_only": FLAG,
        "notes": {"type": "array", "items": TEXT}, "command": {"type": "array", "items": TEXT},
        "versions": {"type": "object", "additionalProperties": TEXT},
    }  # fmt: skip
    found = closed_object(keys)
    found["required"] = [name for name in keys if name not in ("command", "versions")]
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "Map of sim advise --map", **found}
