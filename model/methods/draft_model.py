"""Methods of one process with a draft model: where that runs, and what follows from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from model.base import checks
from model.costs.step_costs import StepCosts
from model.methods.method_parameters import MethodParameters
from model.methods.peak_demand import Demand, of_one_process

COLOCATED, SEPARATE = PLACEMENTS = ("colocated", "separate")
MAX_DRAFT = 250
"""Longer drafts than anybody makes; positions within one are kept in a byte."""


@dataclass(frozen=True, kw_only=True)
class DraftModel(MethodParameters):
    """A choice of a method with a draft model.

    Parameters
    ----------
    placement
        `colocated`: all models share the target's unit. `separate`: each has a unit of its own.
    draft_layers
        Depth of the draft model; its time is the scenario's `cost_ratio`, whatever its depth.
    """

    placement: str = COLOCATED
    draft_layers: int = 1

    def check_models(self) -> None:
        """Refuse depths and placements that no target and draft can have."""
        checks.whole("layers", self.layers, 1, checks.MAX_LAYERS)
        checks.whole("draft_layers", self.draft_layers, 1, checks.MAX_LAYERS)
        checks.one_of("placement", self.placement, PLACEMENTS)

    @classmethod
    def costs_for(cls, table: Mapping[str, Any]) -> tuple[str, ...]:
        """Costs that a choice with these parameters has: a link only where models are on units of their own."""
        together = table.get("placement", COLOCATED) == COLOCATED
        return tuple(name for name in cls.COSTS if not (together and name == "link"))

    @property
    def separate_units(self) -> int:
        """Units that smaller models have to themselves."""
        return 0 if self.placement == COLOCATED else len(self.roles)

    @property
    def units(self) -> int:
        """Compute units that it reserves."""
        return 1 + self.separate_units

    def demand(self, cost: StepCosts, tokens: int) -> Demand:
        """The most that it may want at once: it is one process."""
        return of_one_process(self.units, cost)
