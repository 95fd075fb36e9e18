"""Notes that a scenario may request by name: sentences of an analysis of a paper's tables, printed with the results of a run."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Note:
    """Sentences about the rows of a results table.

    Attributes:
        columns: required columns; without them there are no sentences.
        analysis: module of `model.published` with the sentences, imported when they are wanted.
        optional_columns: columns that need not exist.
    """

    columns: tuple[str, ...]
    analysis: str
    optional_columns: tuple[str, ...] = ()

    def sentences(self, rows: Sequence[Mapping[str, Any]]) -> list[str]:
        """Sentences on the distinct rows of these columns; none if the rows do not replay the paper's own points."""
        found: list[str] = importlib.import_module(f"model.published.{self.analysis}").run_sentences(rows)
        return found


_PPD = ("method", "outcomes_source", "layers", "exit_layer", "candidates", "tokens")

NOTES = {
    "deck-table-2": Note(("published_speedup",), "deck_analysis"),
    "ppd-figure-3": Note((*_PPD, "data_set", "head", "match_rate"), "ppd_figure_3", ("seconds_per_layer",)),
    "ppd-table-3": Note(
        (*_PPD, "seconds_per_layer", "latency_s", "point", "view", "contended"), "ppd_table_3_fit",
        ("fitted_on", "latency_layers_low", "latency_layers_high"),
    ),
    "skipdecode-table-2": Note(
        ("method", "layers", "min_layers", "max_layers", "warm_up", "prompt", "sequence_length", "power"), "skipdecode_analysis"
    ),
}  # fmt: skip
"""Valid names of `notes` in [scenario]."""
