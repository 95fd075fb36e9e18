"""What is said of a published table, whoever published it; the numbers are in the CSV files beside this."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableNotes:
    """Everything about one table that is not a number: what it is called, which columns are keys, and what is said of it."""

    label: str
    title: str
    setting: str
    keys: tuple[str, ...]
    notes: tuple[str, ...]
