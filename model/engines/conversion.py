"""Predictions in the unit of the cells: between throughput and time per token stands the time that the engine spends on prompts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from model.base import checks
from model.engines import cells as cell_tables
from model.engines import kernel_times, step_terms
from model.engines.cells import Cells, Floats
from model.engines.step_law import StepLaw


@dataclass(frozen=True)
class ConvertedPredictions:
    """Rows of predictions in the unit of the cells, and what was assumed."""

    rows: list[dict[str, Any]]
    notes: tuple[str, ...]


def predict_in_unit(law: StepLaw, cells: Cells, prefill_share: float | None = None) -> ConvertedPredictions:
    """Predict cells in their own unit.

    Throughput counts the time that goes to prompts, the time of a step does not; time per output token contains the prompts of
    others that were processed while a sequence was generating. `prefill_share` is the share of the time that throughput contains
    and the other unit does not; None: what the law's own term `prompt` says, or 0 in a law of steps. A note says it.

    Each row has `sequences`, `draft_length`, `mean_acceptance_length` (used), the measured value (null if none), `predicted`, `low`
    and `high` (80 %), `error` (predicted over measured, minus 1; null without a measured value) and `beyond` (doublings beyond the
    fitted cells).
    """
    if prefill_share is not None:
        checks.number("prefill_share", prefill_share, 0, 0.99)
    asked = Cells.of(
        law.unit, cells.sequences, cells.draft_length, mean_acceptance_length=cells.mean_acceptance_length,
        draft_passes=cells.draft_passes, context=cells.context, weight=cells.weight,
    )  # fmt: skip
    values, low, high, beyond = law.predict(asked)
    notes = []
    lengths = np.full(cells.size, np.nan)
    if (
        law.unit != "step_ms"
        or law.acceptance
        or "acceptance_rate" in law.coefficients
        or not np.isnan(cells.mean_acceptance_length).all()
    ):
        lengths = np.where(cells.draft_length == 0, 1.0, cells.mean_acceptance_length)
        if "acceptance_rate" in law.coefficients or law.acceptance or law.unit != "step_ms":
            lengths = law.acceptance_lengths(asked)[0]
    if cells.unit != law.unit:
        length = law.acceptance_lengths(asked)[0]
        factor, note = _change_of_time(law, cells.unit, asked, length, prefill_share)
        values, low, high = (
            cell_tables.to_unit(
                cells.unit, factor * cell_tables.from_unit(law.unit, each, cells.sequences, length), cells.sequences, length
            )
            for each in (values, low, high)
        )
        low, high = np.minimum(low, high), np.maximum(low, high)
        notes.append(f"converted from {law.unit}, with {note} of the time of throughput for prompts; --prefill-share sets it")
    if count := int(np.sum(beyond > 0)):
        of = "1 cell is" if count == 1 else f"{count} cells are"
        notes.append(f"{of} beyond the fitted ones, by up to {beyond.max():.1f} doublings: wider intervals")
    if law.kernels is not None and np.isnan(cells.context).any():
        notes.append(f"context is assumed to be {kernel_times.USUAL_CONTEXT} positions where the file has none")
    if law.cells is None:
        notes.append("the law has no cells: its predictions and intervals are those of the priors")
    rows = [
        {
            "sequences": float(cells.sequences[i]), "draft_length": int(cells.draft_length[i]),
            "mean_acceptance_length": _number(lengths[i]), cells.unit: _number(cells.values[i]), "predicted": float(values[i]),
            "low": float(low[i]), "high": float(high[i]),
            "error": None if np.isnan(cells.values[i]) else float(values[i] / cells.values[i] - 1), "beyond": float(beyond[i]),
        }
        for i in range(cells.size)
    ]  # fmt: skip
    return ConvertedPredictions(rows, tuple(notes))


def _number(value: float) -> float | None:
    return None if np.isnan(value) else float(value)


def _change_of_time(law: StepLaw, wanted: str, cells: Cells, length: Floats, share: float | None) -> tuple[Floats, str]:
    """Factor from the time that the law's unit counts to that of the wanted unit, and the share of prompts as text; (cells,)."""
    if share is not None or "prompt" not in law.coefficients:
        left = 1 - (share or 0.0)
        factor = left if law.unit == "output_tokens_per_s" else 1 / left if wanted == "output_tokens_per_s" else 1.0
        return np.full(cells.size, factor), f"{1 - left:.1%} ({'assumed' if share is None else 'given'})"
    steps = law.step_seconds(cells)[0]
    had, wants, all_prompts = (
        steps + length * step_terms.prompt_seconds(law.coefficients, cell_tables.served(unit, cells.sequences))
        for unit in (law.unit, wanted, "output_tokens_per_s")
    )
    low, high = (f"{each:.1%}" for each in np.quantile(1 - steps / all_prompts, [0, 1]))
    return wants / had, f"{low if low == high else f'{low} to {high}'} (by the law's term `prompt`)"
