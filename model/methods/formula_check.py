"""Declaration with which a method has its paper's formula checked: `sim compare` plots it next to simulation and measurement.

The declaration is part of the method's parameters (`FORMULA_CHECK`), the formula part of its theory (`paper_formula`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from model.logs.recorded_decoding import Decoding, Drafting


@dataclass(frozen=True)
class FormulaCheck:
    """Grouping of real runs for the comparison with the paper's formula.

    Parameters
    ----------
    claim
        Name of the checked claim; its figure has a separate title.
    swept
        Parameter by which runs are grouped; empty: each run is checked alone.
    rate
        Outcome rate along which forced runs are swept; runs that differ only in it belong to one line.
    of_time
        The formula gives time relative to plain decoding instead of speed.
    over_processes
        Use only runs over several processes.
    """

    claim: str
    swept: str = ""
    rate: str = ""
    of_time: bool = False
    over_processes: bool = False


@dataclass(frozen=True)
class ComparedRuns:
    """Real runs with one set of parameters, and the counts of their events.

    Parameters
    ----------
    decodings
        At least one decoding; all have the same settings.
    drafting
        Totals over their rounds.
    pass_ratio
        Single-token pass time of the model with a given role, relative to that of the target, from `times`.
    layers_per_token
        Mean layers per token after the first commit.
    times
        Provenance and source of the times of passes, as figures print them.
    """

    decodings: Sequence[Decoding]
    drafting: Drafting
    pass_ratio: Callable[[str], float]
    layers_per_token: Callable[[], float]
    times: str = "measured, of the profiles"

    @property
    def settings(self) -> Mapping[str, Any]:
        """Parameters by name."""
        return self.decodings[0].settings


class FormulaPoint(NamedTuple):
    """Value of a formula, its abscissa in the figure, and a description of its inputs."""

    x: float
    value: float
    """Speed or time relative to plain decoding [-]."""
    x_name: str
    about: str
