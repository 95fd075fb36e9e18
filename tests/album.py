"""Figures that are asked for and not drawn: for tests that ask which figures are drawn, of what and under which names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import figures
from figures import (
    acceptance_by_position,
    accepted,
    accepted_lengths,
    agreement,
    bild,
    bild_rates,
    deck,
    devices_held,
    distribution,
    error_by_method,
    exit_schedule,
    formula_limits,
    gantt_pair,
    hierarchical,
    layer_map,
    layer_time,
    match_rate,
    methods,
    predicted_measured,
    roofline,
    speedup,
    speedup_by_batch,
    speedup_by_device,
    style,
    table_3,
    time_parts,
    tradeoff,
    verify_cost_hardware,
    work,
)

DRAWING = (
    acceptance_by_position, accepted, accepted_lengths, agreement, bild, bild_rates, deck, devices_held, distribution,
    error_by_method, exit_schedule, formula_limits, gantt_pair, hierarchical, layer_map, layer_time, match_rate, methods,
    predicted_measured, roofline, speedup, speedup_by_batch, speedup_by_device, table_3, time_parts, tradeoff,
    verify_cost_hardware, work,
)  # fmt: skip


class Album:
    """What was asked to be drawn, by the names of files: the module, what it was given, and what stands above it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {}
        self.folders: set[Path] = set()
        for module in DRAWING:
            name = module.__name__.rpartition(".")[2]
            monkeypatch.setattr(module, "draw", lambda *given, name=name, **options: (name, given, options, ""))
        monkeypatch.setattr(match_rate, "draw_by_position", lambda *given: ("by_position", given, {}, ""))
        monkeypatch.setattr(style, "headed", lambda figure, about: (*figure[:3], about))
        monkeypatch.setattr(figures, "save", self._saved)

    def _saved(self, figure: Any, path: Path) -> list[Path]:
        self.drawn[path.name] = figure
        self.folders.add(path.parent)
        return [path]

    def points(self, name: str) -> list[int]:
        """The points of the rows that a figure was given."""
        rows: pl.DataFrame = self.drawn[name][1][0]
        return rows["point"].unique(maintain_order=True).to_list()
