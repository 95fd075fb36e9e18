"""Facts about cases that the view `formula` decides by, evaluated together and once for all points of a choice."""

from __future__ import annotations

from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from sim.scenarios.cases import Case
from sim.scenarios.part_columns import CaseGroup, PartColumn, values_of
from sim.views import time_breakdown


class CaseFacts(NamedTuple):
    """Facts about a case, or columns of those of several cases as floats; shape (cases,)."""

    contended: Any
    """Passes may wait, so that there are no estimates."""
    on_hardware: Any
    tensor_parallel: Any
    reserved_devices: Any
    has_parts: Any
    """The parts of the time are defined (`time_breakdown.missing_because`)."""
    several_parts: Any
    """As `time_breakdown.several_parts`."""
    passes_alone: Any
    """As `time_breakdown.passes_alone`."""
    busy_counts_operations: Any
    """As the function of this name."""


def facts_of(case: Case) -> CaseFacts:
    """Facts about one case.

    >>> from sim.scenarios import cases
    >>> table = {"name": "early_exit", "layers": 24, "exit_layer": 12}
    >>> facts_of(cases.resolve({"scenario": {"name": "one", "tokens": 8}, "method": table, "cost": {"final_head": 1.0}}))._asdict()
    {'contended': False, 'on_hardware': False, 'tensor_parallel': 1, 'reserved_devices': 1, ...}
    """
    return CaseFacts(
        case.contended, case.hardware is not None, case.tensor_parallel, case.devices(case.reserved_units),
        time_breakdown.missing_because(case) is None, time_breakdown.several_parts(case), time_breakdown.passes_alone(case),
        busy_counts_operations(case),
    )  # fmt: skip


def busy_counts_operations(case: Case) -> bool:
    """True if the busy time is that of the arithmetic: units run layers of one sequence only, all of equal time."""
    return not case.parameters.roles and case.parameters.decoded_sequences == 1 and bool(case.cost.only_layers)


class CaseColumn(PartColumn[CaseGroup]):
    """Cases of all groups, one after another, and their facts."""

    @cached_property
    def facts(self) -> CaseFacts:
        """Facts about each case."""
        found = values_of([*self.segments(np.arange(len(self)))], facts_of)
        return CaseFacts(*found.reshape(-1, len(CaseFacts._fields)).T)
