"""Names of the points of a table of results, made of the columns in which they differ; shared by all figures.

Columns that several figures name get their wording here. A swept axis that no other column shows has a dot in its name.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import polars as pl

from model.methods import registry

SPLIT = "tensor parallelism"
"""Plain decoding with each layer split over several devices."""

CHOICES = {
    "policy": "{}", "estimator": "by {} tokens", "reading": "{}", "rule": "{}", "arrangement": "{}", "form": "{} form",
    "variant": "variant {}", "measure": "{}", "fill": "{}", "placement": "draft {}", "sampled": "sampled", "beams": "{} beams",
    "candidates": "k = {}", "batched": "candidates batched", "draft_length": "γ = {}", "max_draft_length": "drafts up to {}",
    "fan_out": "fan-out {}", "backup": "backup {}", "draft_stop": "stop at {}",
    "max_layers": "{} layers at first", "min_layers": "{} at last", "warm_up": "{} to warm up",
    "power": "power {:g}", "rounding": "rounded {}", "exit_layer": "exit layer {}", "layers": "{} layers",
    "draft_layers": "draft of {} layers", "tensor_parallel": "TP {}", "units": "{} units",
    "sequences": "batch of {}", "batching": "{}", "batch": "batch of {}",
}  # fmt: skip
"""Wording of a method's parameters, in the order in which they are used to distinguish points."""
SETTINGS = {
    "cost.device": "{}", "cost.profile": "{}", "cost.law": "{}", "cost.shape": "{}", "data_set": "{}", "head": "{} head",
    "tokens": "{} tokens",
    "match_rate": "p = {:.3g}", "acceptance_rate": "α = {:.3g}", "medium_acceptance_rate": "medium α = {:.3g}",
    "fallback_threshold": "fallback below {:g}", "rollback_threshold": "rollback above {:g}", "fallback_rate": "f = {:.3g}",
    "rollback_rate": "r = {:.3g}", "mean_exit_layer": "{:.3g} layers on average", "cost_ratio": "c = {:.3g}",
    "medium_cost_ratio": "medium c = {:.3g}", "fitted_on": "fitted on {}",
}  # fmt: skip
"""Wording of the conditions of a run: devices, data, rates, costs."""
WORDS = CHOICES | SETTINGS
MAIN = (
    "policy", "candidates", "match_rate", "draft_length", "acceptance_rate", "fallback_rate", "rollback_rate", "max_layers",
    "min_layers", "exit_layer",
)  # fmt: skip
"""Columns always used in a choice's name, even where fewer would distinguish it."""


COMMON = (*MAIN, "variant", "sequences", "batching", "tokens", "cost_ratio")
"""Columns that a figure may state once for all points."""
_USUAL: dict[str, Any] = {
    "sequences": 1, "batch": 1, "tensor_parallel": 1, "units": 1, "placement": "colocated", "power": 1.0,
    "estimator": "unbiased", "draft_stop": "round", "backup": "draft",
}  # fmt: skip


def one_row_per_point(rows: pl.DataFrame) -> pl.DataFrame:
    """One row per point: its last."""
    return rows.unique("point", keep="last", maintain_order=True)


def distinguishing(rows: pl.DataFrame, names: Collection[str] | None = None) -> list[str]:
    """Return the fewest columns, in their order, that distinguish the points as far as possible; `names` restricts the choice.

    >>> distinguishing(pl.DataFrame({"draft_length": [3, 3, 5], "acceptance_rate": [0.6, 0.7, 0.7], "match_rate": [0.1, 0.2, 0.2]}))
    ['draft_length', 'match_rate']
    """
    known = [name for name in [*CHOICES, *_axes(rows), *SETTINGS] if name in rows.columns and (names is None or name in names)]
    base = ["method"] if "method" in rows.columns else []
    found: list[str] = []
    count = rows.select(base).n_unique() if base else 1
    for name in dict.fromkeys(known):
        more = rows.select(*base, *found, name).n_unique()
        if more > count:
            found, count = [*found, name], more
        if count == rows.height:
            break
    return found


def _axes(rows: pl.DataFrame) -> list[str]:
    return [name for name in rows.columns if "." in name]


def words(row: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return a row's values of these columns in words; missing, false and default values are left out."""
    found = []
    for name in names:
        value = row.get(name)
        if value is None or value is False or value == _USUAL.get(name) or (name == "batching" and row.get("sequences") == 1):
            continue
        found.append(WORDS.get(name, f"{name.rpartition('.')[2]} = {{}}").format(value))
    return found


def method(row: Mapping[str, Any]) -> str:
    """Name of a row's method; plain decoding on several devices is named tensor parallelism."""
    split = row["method"] == registry.PLAIN and (row.get("tensor_parallel") or 1) > 1
    return SPLIT if split else registry.label(str(row["method"]))


def names(rows: pl.DataFrame) -> dict[Any, str]:
    """Return a name for each point number: its method where there are several, and the columns that distinguish it."""
    table = one_row_per_point(rows)
    several = table["method"].n_unique() > 1 if "method" in table.columns else False
    keys = distinguishing(table)
    found = {}
    for row in table.iter_rows(named=True):
        said = words(row, keys)
        head = [method(row)] if "method" in row and (several or not said) else []
        found[row["point"]] = ", ".join([*head, *said]) or f"point {row['point']}"
    return found


def common(rows: pl.DataFrame, wanted: Collection[str] = COMMON) -> list[str]:
    """Values that all points share, of the wanted columns, in words; a shared method comes first."""
    table = one_row_per_point(rows) if "point" in rows.columns else rows
    said = [method(table.row(0, named=True))] if "method" in table.columns and table["method"].n_unique() == 1 else []
    same = [name for name in WORDS if name in table.columns and name in wanted and table[name].n_unique() == 1]
    return said + (words(table.row(0, named=True), same) if table.height else [])
