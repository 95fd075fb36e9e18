"""Keys, values, columns and options of earlier versions, and what they are called now: for errors that name the new one.

Nothing is read under an old name. Of several new names that counts which is known where the old one was given.
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
"""Options of commands."""
RESULTS = ("held_units", "held_layers", "held_s", "mean_units", "mean_units_per_run", "normalized_latency")
"""Columns that no table of results has any more."""


def now(old: str, known: Collection[str]) -> str | None:
    """Return the name that an old one, which is not known any more, has among the known ones; None where it was none.

    >>> now("apart", ["colocated", "separate"]), now("apart", ["unit_kind", "sweep"]), now("layers", ["layers"])
    ('separate', 'unit_kind', None)
    """
    return next((new for new in RENAMED.get(old, ()) if new in known), None)


def old_column(columns: Iterable[str]) -> str | None:
    """Return what to say of a table of results that has a column of an earlier version, or None where it has none.

    >>> old_column(["point", "held_units"])
    'column held_units is now reserved_units: an earlier version wrote this table'
    """
    found = next((name for name in columns if name in RESULTS), None)
    return None if found is None else f"column {found} is now {RENAMED[found][0]}: an earlier version wrote this table"
