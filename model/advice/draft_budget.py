"""Effect of a context budget of drafts: time of their passes, and the sequences that fit the memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from model.engines.step_law import StepLaw


@dataclass(frozen=True)
class BudgetEffect:
    """What drafts gain that read less of the context, at each number of running sequences.

    Parameters
    ----------
    positions
        Largest number of cached positions of each sequence that a pass of the draft reads.
    context
        Cached positions of each sequence.
    batches
        Running sequences.
    pass_seconds, whole_pass_seconds
        Seconds of a pass of the draft within the budget, and over the whole context; one for each of `batches` [s].
    most_sequences, whole_most_sequences
        Sequences that fit the memory if the draft keeps the positions of its budget, and if it keeps all; None: unknown.
    """

    positions: int
    context: float
    batches: tuple[int, ...]
    pass_seconds: tuple[float, ...]
    whole_pass_seconds: tuple[float, ...]
    most_sequences: int | None
    whole_most_sequences: int | None

    @property
    def passes_text(self) -> str:
        """Times of passes of the draft at the largest number of running sequences, as printed text."""
        mine, whole = 1e3 * self.pass_seconds[-1], 1e3 * self.whole_pass_seconds[-1]
        return f"a pass of the draft for {self.batches[-1]} running takes {mine:.3g} ms in place of {whole:.3g}"

    def document(self) -> dict[str, Any]:
        """Values for JSON."""
        rows = zip(self.batches, self.pass_seconds, self.whole_pass_seconds, strict=True)
        return {
            "positions": self.positions, "context": self.context, "most_sequences": self.most_sequences,
            "most_sequences_without": self.whole_most_sequences,
            "by_batch": [
                {"batch": batch, "draft_pass_ms": 1e3 * mine, "draft_pass_ms_without": 1e3 * whole} for batch, mine, whole in rows
            ],
        }  # fmt: skip


def effect(law: StepLaw, context: float, batches: Sequence[int], most: int | None, whole_most: int | None) -> BudgetEffect | None:
    """Effect of the budget of a law's drafts; None if they have none.

    Parameters
    ----------
    law
        Step law with kernels of a draft.
    context, batches
        Cached positions of each sequence, and numbers of running sequences.
    most, whole_most
        Sequences that fit the memory with the budget and without; None: unknown.

    >>> from model.engines import law_fit
    >>> from model.engines.kernel_times import KernelSource
    >>> source = KernelSource("llama-3.1-8b", "h100", draft="llama-3.2-1b", draft_context_budget=512)
    >>> found = effect(law_fit.kernels_only(source), 32_000, [8], 14, 11)
    >>> found.passes_text
    'a pass of the draft for 8 running takes 1.6 ms in place of 4.47'
    """
    if law.kernels is None or law.kernels.draft_context_budget is None:
        return None
    whole = replace(law, kernels=replace(law.kernels, draft_context_budget=None))
    mine, all_ = (each.draft_seconds(np.array(batches), context)[0].tolist() for each in (law, whole))
    return BudgetEffect(
        law.kernels.draft_context_budget, context, tuple(batches), tuple(mine), tuple(all_), most, whole_most
    )
