"""[outcomes] of ranks by output position: which of the draft's likeliest tokens is the target's token.

Ranks of trees (`rank_outcomes`) are by the position where a draft starts and by depth; a recorded file serves both.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np

from model.base import checks
from model.methods.method_parameters import MethodParameters
from model.outcomes.intervals import wilson
from model.outcomes.position_ranks import PositionRankRates, RecordedPositionRanks
from sim.scenarios.outcomes.outcome_records import LawRecord, Outcome, check_file, check_provenance, check_rates, checked_parameters
from sim.scenarios.outcomes.rank_outcomes import recorded_ranks


@runtime_checkable
class PreparesOutcomes(Protocol):
    """Parameters of a method that prepares drafts for tokens up to a rank."""

    largest_rank: int


@dataclass(frozen=True)
class RanksAtPositions(LawRecord):
    """The target's token is the r-th likeliest token of the draft with probability `rank_rates[r - 1]`, at every position.

    The first rate is the acceptance rate in greedy decoding. `trials` is the number of positions at which ranks were counted.
    """

    USES = ("parameters",)
    RATES = ("rank_rates",)

    rank_rates: tuple[float, ...]
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        check_rates("rank_rates", self.rank_rates, "a list of probabilities of ranks 1, 2, ...")
        PositionRankRates(self.rank_rates)
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of rank 1. At an end of its interval the other rates keep their ratios."""
        method: PreparesOutcomes = checked_parameters(parameters, PreparesOutcomes, "ranks")
        if len(self.rank_rates) < method.largest_rank:
            raise checks.ParameterError(
                f"rank_rates must have a rate for each of {method.largest_rank} ranks that the fan-out uses, got"
                f" {len(self.rank_rates)}; give more rates (0 for ranks that never occur), or lower fan_out"
            )
        return _outcome(PositionRankRates(self.rank_rates), self.trials, self.source, method.largest_rank)


@dataclass(frozen=True)
class PowerLaw(LawRecord):
    """The target's token is none of the draft's F likeliest with probability (1 - `acceptance_rate`) F^-`exponent`."""

    USES = ("parameters",)
    RATES = ("acceptance_rate", "exponent")

    acceptance_rate: float
    exponent: float
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        checks.number("acceptance_rate", self.acceptance_rate, 0, 1)
        checks.number("exponent", self.exponent, 0, 100)
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; `trials` are those of the acceptance rate."""
        method: PreparesOutcomes = checked_parameters(parameters, PreparesOutcomes, "power-law")
        law = PositionRankRates.power_law(self.acceptance_rate, self.exponent, method.largest_rank)
        return _outcome(law, self.trials, self.source, method.largest_rank)


@dataclass(frozen=True)
class RecordedAtPositions(LawRecord):
    """Recorded ranks by output position, from a JSON `file` of ranks by position and depth.

    The file has the format of kind `replay` of outcomes `rank`. The ranks at depth 1 are used: those after the target's own tokens.
    """

    file: str
    source: str = "measured"

    def __post_init__(self) -> None:
        check_file(self.file)
        check_provenance(None, self.source)
        recorded_ranks(self.file)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point, from the sequences that cover all tokens; ranks above all fan-outs count as 0."""
        method: PreparesOutcomes = checked_parameters(parameters, PreparesOutcomes, "replay")
        records = recorded_ranks(self.file, tokens)
        ranks = np.array([record[:tokens, 0] for record in records])
        hits = float(((ranks >= 1) & (ranks <= method.largest_rank)).mean())
        source = f"{self.source}: {len(records)} sequences of {self.file}"
        law = RecordedPositionRanks(np.where(ranks <= method.largest_rank, ranks, 0))
        return Outcome(law, float((ranks == 1).mean()), source, further_values={"candidates_rate": hits})


def _outcome(law: PositionRankRates, trials: int | None, source: str, ranks: int) -> Outcome:
    rate, further = float(law.rates[0]), {"candidates_rate": min(float(law.rates[:ranks].sum()), 1.0)}
    if trials is None:
        return Outcome(law, rate, source, further_values=further)
    low, high = (float(bound) for bound in wilson(rate, trials))

    def at(bound: float) -> PositionRankRates:
        return PositionRankRates(np.append(bound, law.rates[1:] * ((1 - bound) / (1 - rate) if rate < 1 else 0.0)))

    return Outcome(law, rate, source, at(low), at(high), low, high, trials, further_values=further)


KINDS: dict[str, type[LawRecord]] = {"ranks": RanksAtPositions, "power-law": PowerLaw, "replay": RecordedAtPositions}
"""Records by kind."""
