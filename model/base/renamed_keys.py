"""Renamed keys, values, columns and options of earlier versions, for errors that give the new name.

Old names are never accepted. If an old name has several new names, the error gives the one that is valid in its context.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from types import MappingProxyType

RENAMED: Mapping[str, tuple[str, ...]] = MappingProxyType({
    # scenarios
    "ways": ("tensor_parallel",),
    "together": ("colocated", "batched_widths"),
    "apart": ("separate", "unit_kind"),
    "maximum_draft": ("max_draft_length",),
    "sequence": ("sequence_length",),
    # results
    "held_units": ("reserved_units",),
    "held_layers": ("reserved_layers",),
    "held_s": ("reserved_s",),
    "mean_units": ("mean_busy_units",),
    "mean_units_per_run": ("mean_busy_units_per_run",),
    "normalized_latency": ("relative_latency",),
    # profiles
    "again": ("resumed_step",),
    "look": ("first_read",),
    "rows": ("kv_rows",),
    "chance": ("probability",),
    "after": ("after_gap",),
    "wide_after": ("wide_after_gap",),
    "alone": ("main_alone",),
    "beside": ("main_concurrent",),
    "called": ("subprocess_step",),
    # measured runs and logs
    "turn": ("scheduling", "run_order"),
    "texts": ("decodings", "sequences"),
    "text": ("decoding", "prompt", "sequence"),
    "row": ("sequence",),
    "asked": ("max_tokens",),
})
OPTIONS: Mapping[str, str] = MappingProxyType({"--ways": "--tensor-parallel", "--apart": "--unit-kind"})
"""Renamed options of commands."""
RESULTS = ("held_units", "held_layers", "held_s", "mean_units", "mean_units_per_run", "normalized_latency")
"""Old names of result columns."""


def current_name(old: str, known: Collection[str]) -> str | None:
    """Return the new name of an old one, chosen among the known names; None if `old` was never renamed to one of them.

    >>> current_name("apart", ["colocated", "separate"]), current_name("apart", ["unit_kind", "sweep"])
    ('separate', 'unit_kind')
    >>> current_name("layers", ["layers"])
    """
    return next((new for new in RENAMED.get(old, ()) if new in known), None)


def old_column(columns: Iterable[str]) -> str | None:
    """Return the message about a results table with a column of an earlier version; None if it has no such column.

    >>> old_column(["point", "held_units"])
    'column held_units is now reserved_units: an earlier version wrote this table'
    """
    old = next((name for name in columns if name in RESULTS), None)
    return None if old is None else f"column {old} is now {RENAMED[old][0]}: an earlier version wrote this table"
