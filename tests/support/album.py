"""Recorder of figures that replaces drawing, for tests of which figures are drawn, from which rows and under which names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import polars as pl
import pytest

import figures
from figures.common import style
from figures.of_comparisons import error_by_method, formula_limits, gantt_pair, predicted_measured, time_parts
from figures.of_hardware import layer_time, pass_cost, reached_peaks
from figures.of_logs import acceptance_by_position, accepted_lengths, agreement_over_cost, match_rates
from figures.of_papers import ppd_table_3_times, slides_speedups
from figures.of_runs import (
    accepted_tokens,
    bild_rates,
    bild_thresholds,
    latency_distribution,
    method_comparison,
    operations_and_bytes,
    reserved_devices,
    speedup,
    speedup_by_batch,
    speedup_by_device,
    tradeoff,
)
from figures.of_theory import hierarchical_regions, skipdecode_layers, skipdecode_schedule

DRAWING = (
    acceptance_by_position, accepted_lengths, accepted_tokens, agreement_over_cost, bild_rates, bild_thresholds, error_by_method,
    formula_limits, gantt_pair, hierarchical_regions, latency_distribution, layer_time, match_rates, method_comparison,
    operations_and_bytes, pass_cost, ppd_table_3_times, predicted_measured, reached_peaks, reserved_devices, skipdecode_layers,
    skipdecode_schedule, slides_speedups, speedup, speedup_by_batch, speedup_by_device, time_parts, tradeoff,
)  # fmt: skip


class Album:
    """Requested figures by file name: the module, its arguments, its options, and the line above the figure."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.drawn: dict[str, tuple[str, tuple[Any, ...], dict[str, Any], str]] = {}
        self.folders: set[Path] = set()
        for module in DRAWING:
            name = module.__name__.rpartition(".")[2]
            monkeypatch.setattr(module, "draw", lambda *arguments, name=name, **options: (name, arguments, options, ""))
        monkeypatch.setattr(match_rates, "draw_by_position", lambda *arguments: ("by_position", arguments, {}, ""))
        monkeypatch.setattr(style, "with_subject_line", lambda figure, about: (*figure[:3], about))
        monkeypatch.setattr(figures, "save", self._saved)

    def _saved(self, figure: Any, path: Path) -> list[Path]:
        self.drawn[path.name] = figure
        self.folders.add(path.parent)
        return [path]

    def points(self, name: str) -> list[int]:
        """Points of the rows that a figure was drawn from."""
        rows: pl.DataFrame = self.drawn[name][1][0]
        return rows["point"].unique(maintain_order=True).to_list()
