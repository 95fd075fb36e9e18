"""Peak demand of a method for units and transfers.

Closed forms and vectorised paths assume that no process waits. If a cluster offers less than the peak demand (fewer units, a shared
link, stopped work that runs on), processes may wait, and only a simulation of units and links gives the time.
"""

from __future__ import annotations

from typing import NamedTuple

from model.costs.step_costs import StepCosts


class Demand(NamedTuple):
    """Upper bounds of what the processes of one decoding use at the same time, at given costs."""

    units: int
    """Busy units; for a single process that moves between units, all of them if moving takes time."""
    transfers: int = 1
    """Concurrent transfers."""
    stopped: str | None = None
    """Points at which a working process may be stopped: only between `layers`, or `anywhere`; None: never."""


def of_one_process(units: int, cost: StepCosts) -> Demand:
    """Peak demand of a single process, which runs one pass at a time: several units matter only if moving takes time."""
    return Demand(units if cost.link else 1)
