"""Parameters of single-process methods with a draft model: its size and its placement on compute units."""

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
"""Longest draft: positions in a draft are stored in a byte."""


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
