"""Published speed-ups as claims, for `sim audit`: each row of a table with the terms that the paper prints next to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from model import published
from model.base import checks


def _deck(row: Mapping[str, Any]) -> dict[str, Any]:
    return {"model": "t5-large", "draft": row.get("draft_model", "t5-small"), "acceptance_rate": row.get("acceptance_rate")}


def _deck_hierarchy(row: Mapping[str, Any]) -> dict[str, Any]:
    large, _, small = row["combination"].partition("+")
    return _deck(row) | ({"method": "speculative", "draft": f"t5-{small}"} if large == "large" else {"method": "hierarchical"})


def _ppd_latency(row: Mapping[str, Any]) -> dict[str, Any] | None:
    if row["method"] != "ppd":
        return None
    plain = published.table("ppd-table-3").lookup(data_set=row["data_set"], method="greedy")["latency_s"]
    speedup = f"{plain / row['latency_s']:.3f}"
    return {"model": "llama-2-13b", "match_rate": f"{row['match_percent']}%", "speedup": speedup}


def _bild(row: Mapping[str, Any]) -> dict[str, Any] | None:
    sizes = {"model": f"{row['model']}-large", "draft": f"{row['model']}-small"}
    return None if row["speedup"] is None else {**sizes, "gpu": "t4", "batch": 1, "draft_length": 10}


def _skipdecode(row: Mapping[str, Any]) -> dict[str, Any] | None:
    layers = {"model": row["model"], "mean_layers": row["mean_layers"], "speedup": row["target_speedup"]}
    return None if row["target_speedup"] == 1 else layers


_TERMS: dict[str, tuple[str, Callable[[Mapping[str, Any]], dict[str, Any] | None]]] = {
    "deck-table-2": ("speculative", lambda row: _deck(row) | {"draft_length": row["draft_length"]}),
    "deck-adaptive": ("adaptive", _deck),
    "deck-beam": ("beam", _deck),
    "deck-hierarchy": ("", _deck_hierarchy),
    "ppd-table-3": ("ppd", _ppd_latency),
    "bild-table-1": ("bild", _bild),
    "skipdecode-table-4": ("skipdecode", _skipdecode),
}
TABLES = tuple(_TERMS)
"""Tables with speed-ups."""


def claims(table: str) -> list[dict[str, Any]]:
    """Rows of a published table with a speed-up, with the columns of `model.audit.claims`; baselines are left out.

    >>> claims("deck-table-2")[1]["source"], claims("deck-table-2")[1]["acceptance_rate"], claims("deck-table-2")[1]["speedup"]
    ('Deck Table 2, EnDe, gamma 7', 0.55, 2.56)
    """
    checks.one_of("table", table, TABLES)
    method, terms_of = _TERMS[table]
    printed, found = published.table(table), []
    for row in printed.rows:
        terms = terms_of(row)
        if terms is not None:
            found.append({"source": printed.cite(row), "method": method, "speedup": row.get("speedup"), **terms})
    return found
