"""What a method declares so that its paper's formula is checked against real runs: `sim compare` draws it next to simulation and
measurement.

The declaration stands in the method's parameters (`FORMULA_CHECK`), the formula in its theory (`paper_formula`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from model.logs.recorded_decoding import Decoding, Drafting


@dataclass(frozen=True)
class FormulaCheck:
    """How runs of a method are grouped to be compared with its paper's formula.

    Parameters
    ----------
    claim
        Name of what is checked; figures of it have a title of their own.
    swept
        Parameter along which runs are grouped, those of one value together; empty: each run is checked alone.
    rate
        Outcome rate that runs are swept along, if their outcomes are forced: it does not tell lines apart.
    of_time
        The formula is one of time over plain decoding, not of speed.
    over_processes
        Only runs over several processes count.
    """

    claim: str
    swept: str = ""
    rate: str = ""
    of_time: bool = False
    over_processes: bool = False


@dataclass(frozen=True)
class ComparedRuns:
    """Real runs of one choice of a method, with what was counted in them.

    Parameters
    ----------
    decodings
        At least one, all of the same settings.
    drafting
        Totals of their rounds.
    pass_ratio
        Time of a pass of a model over one token, over that of the target, by its role; of the profiles.
    layers_per_token
        Layers that a token behind the first commit goes through, in the mean.
    """

    decodings: Sequence[Decoding]
    drafting: Drafting
    pass_ratio: Callable[[str], float]
    layers_per_token: Callable[[], float]

    @property
    def settings(self) -> Mapping[str, Any]:
        """The parameters, by their names."""
        return self.decodings[0].settings


class FormulaPoint(NamedTuple):
    """Where in its figure a formula stands, what it says there, and what it was given."""

    x: float
    value: float
    """Speed over plain decoding, or time over it."""
    x_name: str
    about: str
