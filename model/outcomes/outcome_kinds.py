"""The kinds of random outcomes that methods use (match, accept, exit, ...): their rates, and how they are drawn.

This is the only list of kinds. A method names the kinds that it uses in its `OUTCOMES`; `sim.scenarios.outcomes_section` defines
the laws that a scenario may give for each kind.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from model.base import checks


class RateColumn(NamedTuple):
    """A result column that holds a rate, and the word for the rate in sentences (empty if never mentioned)."""

    column: str
    label: str = ""


@dataclass(frozen=True)
class OutcomeKind:
    """One kind of outcome.

    Parameters
    ----------
    name
        Name in methods and scenarios, and purpose of its random streams.
    rates
        Columns of its rates; the first one has a confidence interval.
    forced
        Rates that define its law when outcomes are forced on real passes, independently at every position; None if it cannot be
        forced.
    drafted
        True for outcomes of drafted tokens, which may depend on the start of the draft. Other kinds are drawn by output position,
        independent of the method.
    lossy
        True if methods with this kind of outcome may generate other tokens than the target.
    ranked
        True if the outcome concerns one of several candidates, whose rank is drawn too.
    includes_last
        True if the last output position has an outcome too.
    per_sequence
        True if every sequence of a batch has a separate outcome at every position.
    """

    name: str
    rates: tuple[RateColumn, ...]
    forced: tuple[str, ...] | None
    drafted: bool = False
    lossy: bool = False
    ranked: bool = False
    includes_last: bool = True
    per_sequence: bool = False

    @property
    def rate(self) -> str:
        """Column of its first rate."""
        return self.rates[0].column

    def positions(self, tokens: int, sequences: int) -> int:
        """Number of outcomes to draw for a decoding of `tokens` tokens in each of `sequences` sequences."""
        return (tokens if self.includes_last else tokens - 1) * (sequences if self.per_sequence else 1)


_ALL = (
    OutcomeKind("match", (RateColumn("match_rate", "match"),), ("match_rate",), ranked=True),
    OutcomeKind("accept", (RateColumn("acceptance_rate", "acceptance"),), ("acceptance_rate",), drafted=True),
    OutcomeKind("medium_accept", (RateColumn("medium_acceptance_rate"),), ("medium_acceptance_rate",), drafted=True),
    OutcomeKind("confidence", (RateColumn("low_if_accepted"), RateColumn("low_if_rejected")), None),
    OutcomeKind(
        "decision", (RateColumn("fallback_rate", "fallback"), RateColumn("rollback_rate", "rollback")),
        ("fallback_rate", "rollback_rate"), lossy=True, includes_last=False,
    ),
    OutcomeKind("lookup", (RateColumn("hit_rate", "hit"),), ("hit_rate", "acceptance_rate")),
    # The rank of the target's token among the draft's candidates; the rate is that of rank 1 at the first depth.
    OutcomeKind("rank", (RateColumn("first_rank_rate", "first rank"),), None),
    # Rank of the target's token among the draft's likeliest tokens, by output position. The rate of rank 1 is that of accepted
    # drafted tokens; the other one is that of all ranks for which drafts are prepared.
    OutcomeKind(
        "position_rank", (RateColumn("acceptance_rate", "acceptance"), RateColumn("candidates_rate", "candidate")), None,
        includes_last=False,
    ),
    # exit_rate is the probability to exit after a layer that a token has reached, from the first checked layer on.
    OutcomeKind("exit", (RateColumn("mean_exit_layer", "exit"),), ("exit_rate",), lossy=True, per_sequence=True),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ALL}
"""All kinds, by name."""


def kind_of(name: str) -> OutcomeKind:
    """Return the kind with this name.

    >>> kind_of("accept").rate, kind_of("exit").forced
    ('acceptance_rate', ('exit_rate',))
    """
    checks.one_of("outcome", name, KINDS)
    return KINDS[name]


def any_lossy(names: Iterable[str]) -> bool:
    """True if any of these kinds is lossy: methods with it may generate other tokens than the target."""
    return any(KINDS[name].lossy for name in names)
