"""[outcomes] of drafted tokens that are computed from the distributions of both models."""

from __future__ import annotations

from dataclasses import dataclass

from model.base import checks
from model.methods import rounds
from model.methods.method_parameters import MethodParameters
from model.methods.speculative import block_verification
from model.methods.speculative.algorithm import BLOCK, TOKEN
from sim.scenarios.outcome_records import LawRecord, Outcome, check_provenance


@dataclass(frozen=True)
class AcceptanceOfDistributions(LawRecord):
    """Each next token has the distribution `p` in the target and `q` in the draft model, whatever the tokens before it.

    The accepted length of a sampled draft follows from them, for token-wise and for block verification. As each model has one
    distribution, this is for examples, and not for texts.
    """

    BY_DRAFT_POSITION = True

    p: tuple[float, ...]
    q: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        check_provenance(None, self.source)
        block_verification.survival(self.p, self.q, 0)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rate is that of the first position in a draft."""
        if not parameters.sampled:
            raise checks.ParameterError(
                "sampled must be true with outcomes of kind 'distributions', got false: p and q are those of sampled tokens; set it"
            )
        how = BLOCK if parameters.joint_verification else TOKEN
        survival = block_verification.survival(self.p, self.q, max(parameters.longest_draft, 1), how)
        return Outcome(rounds.Rounds(survival), float(survival[0]), self.source)
