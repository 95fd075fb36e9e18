"""What a method may want at once: on fewer units, on a shared link, or where stopped work goes on, it may have to wait.

Closed forms and vectorised paths price a decoding for which nothing waits. Where a cluster has less than this, only a simulation of
units and links knows what happens.
"""

from __future__ import annotations

from typing import NamedTuple

from model.costs.step_costs import StepCosts


class Demand(NamedTuple):
    """The most that processes of one decoding may want at once, at given costs."""

    units: int
    """Units on which something is done at the same time; of one process that moves all, where moving takes time."""
    transfers: int = 1
    """Transfers under way at the same time."""
    stopped: str | None = None
    """Where a process may be that is stopped while it works: between its `layers` alone, or `anywhere`."""


def of_one_process(units: int, cost: StepCosts) -> Demand:
    """The demand of a single process, which does one thing at a time: it lacks a unit only where going there takes time."""
    return Demand(units if cost.link else 1)
