"""Description of a published table without its numbers, which are in CSV files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TableNotes:
    """Label, title, setting, key columns and notes of a published table."""

    label: str
    title: str
    setting: str
    keys: tuple[str, ...]
    notes: tuple[str, ...]
