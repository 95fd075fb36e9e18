"""Kinds of costs, and keys that no kind has any more: apart from the costs, so that a scenario imports those of its kind alone."""

from __future__ import annotations

from types import MappingProxyType

IN_LAYER_TIMES = ("unit", "published")
"""Kinds of costs defined in `sim.scenarios.cases`."""
ON_HARDWARE = ("profile", "roofline", "engine")
"""Kinds of costs defined in `sim.scenarios.hardware_cost`."""
REMOVED_KEYS = MappingProxyType({
    "batch": "it is now method.sequences, the number of sequences decoded together; those that share one set of random outcomes, as"
    " with batch, are method.batching = 'lockstep'"
})
"""Removed keys of costs, with their replacements."""
