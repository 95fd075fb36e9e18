"""JSON schemas with their references replaced by what they refer to."""

from __future__ import annotations

from typing import Any


def inline_references(schema: dict[str, Any]) -> dict[str, Any]:
    """The same schema without `$defs`; its definitions refer to each other in no circle."""
    defs = schema["$defs"]

    def whole(part: Any) -> Any:
        if isinstance(part, list):
            return [whole(each) for each in part]
        if not isinstance(part, dict):
            return part
        return whole(defs[part["$ref"].rpartition("/")[2]]) if "$ref" in part else {key: whole(each) for key, each in part.items()}

    return {key: whole(each) for key, each in schema.items() if key != "$defs"}
