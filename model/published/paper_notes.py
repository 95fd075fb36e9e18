"""Notes that a scenario may request by name: sentences of an analysis of a paper's tables, printed with the results of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from model.published import deck_analysis, ppd_figure_3, ppd_table_3_fit, skipdecode_analysis


@dataclass(frozen=True)
class Note:
    """Sentences about the rows of a results table.

    Attributes:
        columns: required columns; without them there are no sentences.
        sentences: function from the distinct rows of these columns (and of existing columns in `optional_columns`) to sentences; it
            returns none if the rows do not replay the paper's own points.
        optional_columns: columns that need not exist.
    """

    columns: tuple[str, ...]
    sentences: Callable[[Sequence[Mapping[str, Any]]], list[str]]
    optional_columns: tuple[str, ...] = ()


_PPD = ("method", "outcomes_source", "layers", "exit_layer", "candidates", "tokens")

NOTES = {
    "deck-table-2": Note(("published_speedup",), deck_analysis.run_sentences),
    "ppd-figure-3": Note((*_PPD, "data_set", "head", "match_rate"), ppd_figure_3.run_sentences, ("seconds_per_layer",)),
    "ppd-table-3": Note(
        (*_PPD, "seconds_per_layer", "latency_s", "point", "view", "contended"), ppd_table_3_fit.run_sentences,
        ("fitted_on", "latency_layers_low", "latency_layers_high"),
    ),
    "skipdecode-table-2": Note(("method", *skipdecode_analysis.SETTING), skipdecode_analysis.run_sentences),
}  # fmt: skip
"""Valid names of `notes` in [scenario]."""
