"""The kinds of outcomes that methods ask for: what each is of, what its rates are called, how it is drawn.

They are listed here and nowhere else. A method names those that it asks for in its OUTCOMES; the laws that a scenario may give for
each are in `sim.scenarios.outcomes_section`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from model.base import checks


class RateColumn(NamedTuple):
    """A column of results with a rate, and the word for it in sentences; empty where they do not speak of it."""

    column: str
    word: str = ""


@dataclass(frozen=True)
class OutcomeKind:
    """One kind of outcome.

    Parameters
    ----------
    name
        What methods and scenarios call it. Its random streams have this purpose.
    rates
        The columns of its rates, the first of which has the interval.
    forced
        The rates that say its law where outcomes are forced on real passes, each position independent of the others; None where
        they cannot be forced so.
    drafted
        Whether it is asked of drafted tokens, so that it may depend on where their draft starts; others are drawn by output
        position, whatever the method does.
    lossy
        Whether methods that ask for it put out other tokens than the target would.
    ranked
        Whether it is one of several candidates, and which one is drawn too.
    of_last
        Whether there is one of the last token.
    of_sequences
        Whether there is one for each sequence of a batch at every position.
    """

    name: str
    rates: tuple[RateColumn, ...]
    forced: tuple[str, ...] | None
    drafted: bool = False
    lossy: bool = False
    ranked: bool = False
    of_last: bool = True
    of_sequences: bool = False

    @property
    def rate(self) -> str:
        """The column of its first rate."""
        return self.rates[0].column

    def positions(self, tokens: int, sequences: int) -> int:
        """How many are drawn for a decoding of so many tokens of so many sequences, position by position."""
        return (tokens if self.of_last else tokens - 1) * (sequences if self.of_sequences else 1)


_ALL = (
    OutcomeKind("match", (RateColumn("match_rate", "match"),), ("match_rate",), ranked=True),
    OutcomeKind("accept", (RateColumn("acceptance_rate", "acceptance"),), ("acceptance_rate",), drafted=True),
    OutcomeKind("medium_accept", (RateColumn("medium_acceptance_rate"),), ("medium_acceptance_rate",), drafted=True),
    OutcomeKind("confidence", (RateColumn("low_if_accepted"), RateColumn("low_if_rejected")), None),
    OutcomeKind(
        "decision", (RateColumn("fallback_rate", "fallback"), RateColumn("rollback_rate", "rollback")),
        ("fallback_rate", "rollback_rate"), lossy=True, of_last=False,
    ),
    # exit_rate is the chance that a token leaves behind a layer that it has come to, from the first that is checked on.
    OutcomeKind("exit", (RateColumn("mean_exit_layer", "exit"),), ("exit_rate",), lossy=True, of_sequences=True),
)  # fmt: skip
KINDS = {kind.name: kind for kind in _ALL}
"""All kinds, by their names."""


def kind_of(name: str) -> OutcomeKind:
    """The kind of this name.

    >>> kind_of("accept").rate, kind_of("exit").forced
    ('acceptance_rate', ('exit_rate',))
    """
    checks.one_of("outcome", name, KINDS)
    return KINDS[name]


def any_lossy(names: Iterable[str]) -> bool:
    """Whether any of these kinds is of methods that put out other tokens than the target would."""
    return any(KINDS[name].lossy for name in names)
