"""Parameters of single-process methods with a draft model: its size and its placement on compute units."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.method_parameters import ContextBudget, MethodParameters
from model.methods.peak_demand import Demand, of_one_process

COLOCATED, SEPARATE = PLACEMENTS = ("colocated", "separate")
MAX_DRAFT = 250
"""Longest draft: positions in a draft are stored in a byte."""


@dataclass(frozen=True, kw_only=True)
class BudgetedDraft(MethodParameters):
    """Parameters of a method whose draft passes may read less of the context than is cached.

    A draft pass reads its own tokens and at most `context_budget` cached positions of each sequence, the first few and the latest
    (`model.steps.visible_positions`), as in MagicDec [Sadhukhan2025] and TriForce; the verification reads all. So the price of a
    draft pass does not grow with the context, and its tokens are accepted less often. The output stays exact, because the
    verification does not depend on what the draft has read.

    [Sadhukhan2025] R. Sadhukhan et al. MagicDec: Breaking the Latency-Throughput Tradeoff for Long Context Generation with
    Speculative Decoding. ICLR 2025, arXiv:2408.11049.

    Parameters
    ----------
    context_budget
        Largest number of cached positions of each sequence that a draft pass reads; None: all.
    """

    context_budget: int | None = None

    def check_budgets(self) -> None:
        """Raise ParameterError for budgets that are no positive number, or of drafts that read the target's states."""
        for budget in self.context_budgets:
            checks.whole(budget.name, budget.positions, 1, checks.MAX_TOKENS)
            if self.reads_states:
                drafter = self.table()["drafter"]
                raise checks.ParameterError(
                    f"{budget.name} must be left out with drafter='{drafter}', got {budget.positions}: only passes of a draft model"
                    " with a cache of its own have a budget; leave it out, or set drafter = 'model'"
                )

    @property
    def context_budgets(self) -> tuple[ContextBudget, ...]:
        """Budgets of draft passes: that of the draft model, or of a model that drafts for itself."""
        if self.context_budget is None:
            return ()
        return (ContextBudget("context_budget", "draft" if "draft" in self.roles else "target", self.context_budget),)


@dataclass(frozen=True, kw_only=True)
class DraftModel(MethodParameters):
    """Parameters of a method with a draft model.

    Parameters
    ----------
    placement
        `colocated`: all models share the target's unit. `separate`: each model has its own unit.
    draft_layers
        Layers of the draft model. Its time is set by the scenario's `cost_ratio`, not by its depth.
    """

    placement: str = COLOCATED
    draft_layers: int = 1

    def check_models(self) -> None:
        """Raise ParameterError for impossible depths or an unknown placement."""
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.whole("draft_layers", self.draft_layers, 1, checks.MAX_LAYERS)
        checks.one_of("placement", self.placement, PLACEMENTS)

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Subset of COSTS that applies with these parameters; `link` only if models are on separate units."""
        together = table.get("placement", COLOCATED) == COLOCATED
        return tuple(name for name in cls.COSTS if not (together and name == "link"))

    @property
    def separate_units(self) -> int:
        """Reserved units that are dedicated to models other than the target."""
        return 0 if self.placement == COLOCATED else len(self.roles)

    @property
    def units(self) -> int:
        """Compute units that are reserved."""
        return 1 + self.separate_units

    @property
    def serial(self) -> bool:
        """True: one process makes all passes, also where its models are on separate units."""
        return True

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """Peak demand of a single process."""
        return of_one_process(self.units, cost)
