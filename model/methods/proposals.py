"""Proposals of a method for advice: parameters worth trying with what is known, or what would have to be known."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple


@dataclass(frozen=True)
class Known:
    """What is known of a situation.

    Parameters
    ----------
    layers
        Layers of the target.
    units
        Units that the devices make up, each with a replica of the target.
    draft_lengths
        Draft lengths of interest.
    rates
        Conditional acceptance rates by draft position.
    match_rate
        Probability that an early candidate is the final token; None: unknown.
    lossy
        True if methods whose output differs from the target's are wanted too.
    independent_draft
        True if the draft is a model of its own; False for a head, which needs the target's states, and for an unknown draft.
    parallel_draft
        True if one pass of the draft drafts all tokens of a round.
    rank_rates
        By depth of a draft, the probabilities that the target's token is the draft's first, second, ... candidate, if the tokens
        before are right; None: unknown.
    block_rates
        Conditional acceptance rates by draft position under block verification; None: unknown.
    """

    layers: int
    units: int
    draft_lengths: tuple[int, ...]
    rates: tuple[float, ...]
    match_rate: float | None = None
    lossy: bool = False
    independent_draft: bool = True
    parallel_draft: bool = False
    rank_rates: tuple[tuple[float, ...], ...] | None = None
    block_rates: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Proposal:
    """Parameters of a method, and the outcomes that it reads, as tables of a scenario."""

    parameters: Mapping[str, Any]
    outcomes: Mapping[str, Any] = field(default_factory=dict)
    assumed: str = ""
    """What the proposal assumes, as printed text."""
    setting: str = ""
    """The parameters that distinguish the proposal from the method's others, as printed text."""
    variant: str = ""
    """Name of the variant of the method, if proposals of several variants are compared; empty: the method's own name."""


PROPOSED_TOKENS = 128
"""Output length of proposals whose passes depend on the position [tokens]."""


class Proposals(NamedTuple):
    """Proposals of a method; without any, what is missing (empty: the method is not for advice).

    Their number and order do not depend on rates, so that the same proposal can be evaluated with other rates.
    """

    made: tuple[Proposal, ...] = ()
    missing: str = ""


def needs_lossy(known: Known) -> str:
    """What a lossy method misses if only exact ones are wanted."""
    return "" if known.lossy else "it is not exact: --lossy includes it"
