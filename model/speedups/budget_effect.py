"""What the context budget of drafts changes in a measured step: time of drafting, speed-up, and sequences that fit the memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from model.advice import draft_budget
from model.advice.draft_budget import BudgetEffect
from model.engines.step_law import StepLaw
from model.speedups.explanation import TermsOfSpeedup


@dataclass(frozen=True)
class BudgetOfStep:
    """A measured step whose drafts read a part of the context, and the same step with drafts that read all of it.

    Parameters
    ----------
    effect
        Times of a pass of the draft, and sequences that fit the memory, with and without the budget.
    drafting, whole_drafting
        Time of drafting in a step, with and without the budget [plain steps].
    speedup, whole_speedup
        Measured speed-up, and that of the step without the budget, at the same acceptance [-].
    """

    effect: BudgetEffect
    drafting: float
    whole_drafting: float
    speedup: float
    whole_speedup: float

    @property
    def text(self) -> str:
        """The budget and the times of a pass, as printed text."""
        return f"{self.effect.positions:,} positions of each sequence; {self.effect.passes_text}"

    def document(self) -> dict[str, Any]:
        """Values for JSON; times of drafting are in plain steps."""
        effect = self.effect
        return {
            "positions": effect.positions, "context": effect.context, "draft_pass_ms": 1e3 * effect.pass_seconds[-1],
            "draft_pass_ms_without": 1e3 * effect.whole_pass_seconds[-1], "drafting": self.drafting,
            "drafting_without": self.whole_drafting, "speedup_without": self.whole_speedup,
            "most_sequences": effect.most_sequences, "most_sequences_without": effect.whole_most_sequences,
        }  # fmt: skip


def of_step(terms: TermsOfSpeedup, law: StepLaw, most: int | None, whole_most: int | None) -> BudgetOfStep | None:
    """What the budget of a law's drafts changes in the step that these terms divide; None if they read the whole context.

    Without the budget drafting takes as many times longer as one pass of the draft does by the law; the other terms stay. `most`
    and `whole_most` are the sequences that fit the memory with the budget and without; None: not known.
    """
    measured = terms.measured
    effect = draft_budget.effect(law, measured.context, [max(round(measured.sequences), 1)], most, whole_most)
    if effect is None:
        return None
    drafting = terms.term("draft").value
    whole = drafting * effect.whole_pass_seconds[-1] / effect.pass_seconds[-1]
    speedup = measured.mean_acceptance_length / (measured.steps - drafting + whole)
    return BudgetOfStep(effect, drafting, whole, measured.speedup, speedup)
