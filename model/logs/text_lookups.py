"""Lookups in the sequences of a decision log: match lengths, and drafted and accepted tokens, at every output position.

A log holds prompts and generated tokens, from which lookups of every kind follow; nothing else needs to be logged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from model.base.checks import ParameterError
from model.interpret.text_lookup import TextLookups, along
from model.logs.position_log import PositionLog
from model.outcomes import lookup_laws as laws

Integers = NDArray[np.int64]
Bools = NDArray[np.bool_]
Floats = NDArray[np.float64]


def of_log(
    log: PositionLog, min_match: int, max_match: int, longest: int, per_match: float | None = None
) -> list[TextLookups]:
    """Lookups along each sequence of a log; see `model.interpret.text_lookup.along`.

    >>> from model.logs.position_log import bundled
    >>> found = of_log(bundled(), 1, 2, 5)
    >>> len(found), len(found[0].match)
    (200, 64)
    """
    texts = log.by_sequence(log.table["token"].to_numpy())
    return [
        along(prompt, text.tolist(), min_match, max_match, longest, per_match)
        for prompt, text in zip(_prompts(log), texts, strict=True)
    ]


def possible(log: PositionLog) -> bool:
    """True if a log holds the tokens of its prompts, in which lookups find matches."""
    return all(isinstance(each, list) and each and {*map(type, each)} == {int} for each in _tokens(log))


def check(log: PositionLog) -> None:
    """Raise ParameterError for a log without the tokens of its prompts."""
    if not possible(log):
        raise ParameterError("this log has no match lengths: it lacks the tokens of its prompts; log it again")


def _prompts(log: PositionLog) -> list[list[int]]:
    check(log)
    return _tokens(log)


def _tokens(log: PositionLog) -> list[Any]:
    """Tokens of each prompt, as the log has them."""
    numbers = [int(log.table["prompt"][int(start)]) for start in log.starts[:-1]]
    listed = log.header["prompts"]
    return [listed[number].get("tokens") if number < len(listed) else None for number in numbers]


# --- Laws from the rounds of a log ---


class PlayedLookups(NamedTuple):
    """Rounds of a decoding along logged sequences, all of shape (rounds,); drafts are cut to the remaining tokens."""

    match: Integers
    drafted: Integers
    accepted: Integers
    after_acceptance: Bools
    """True for rounds that follow one with accepted tokens."""
    whole: Bools
    """True for drafts that were not cut at the end of a sequence."""

    @property
    def tokens_per_round(self) -> float:
        """Mean number of tokens of a round, the target's own included."""
        return float(self.accepted.mean() + 1)


def played(sequences: Sequence[TextLookups]) -> PlayedLookups:
    """Play each sequence from its first token on: a round starts after the tokens of the one before.

    >>> rounds = played([TextLookups(*np.array([[1, 0, 2], [2, 0, 1], [1, 0, 0]]))])
    >>> rounds.accepted.tolist(), rounds.after_acceptance.tolist()
    ([1, 0], [False, True])
    """
    rows = []
    for match, drafted, accepted in sequences:
        at, before = 0, False
        while at < len(match):
            left = len(match) - 1 - at
            kept = min(int(accepted[at]), left)
            rows.append((match[at], min(drafted[at], left), kept, before, drafted[at] <= left))
            at, before = at + 1 + kept, kept > 0
    columns = np.array(rows, dtype=np.int64).reshape(-1, 5).T
    return PlayedLookups(columns[0], columns[1], columns[2], columns[3].astype(np.bool_), columns[4].astype(np.bool_))


class CountedLookups(NamedTuple):
    """Counts of rounds by the length of their match; the last axis of `rounds` is the round before: accepted none, some."""

    lengths: list[int]
    rounds: Integers
    """Shape (lengths + 1, 2); the first row counts rounds without a match."""
    accepted: list[Integers]
    """For each length, how often the j-th drafted token was accepted."""
    tested: list[Integers]
    """For each length, how often it was tested."""

    @property
    def rates(self) -> Floats:
        """Share of each length among the rounds after one that accepted none, and after one that accepted some; (2, lengths)."""
        return np.asarray((self.rounds / np.maximum(self.rounds.sum(axis=0), 1)).T[:, 1:])

    @property
    def shares(self) -> Floats:
        """Share of each length among all rounds, (lengths,)."""
        return np.asarray(self.rounds.sum(axis=1)[1:] / self.rounds.sum())

    def acceptance(self, index: int) -> Floats:
        """Rates of acceptance by position in a draft, after matches of the length with this index; 0 where never tested."""
        return np.asarray(self.accepted[index] / np.maximum(self.tested[index], 1))


def counted(rounds: PlayedLookups, draft_length: int) -> CountedLookups:
    """Count rounds by the length of their match."""
    found = rounds.drafted > 0
    lengths = sorted({*rounds.match[found].tolist()})
    table = np.zeros((len(lengths) + 1, 2), dtype=np.int64)
    kind = np.where(found, np.searchsorted(lengths, rounds.match) + 1, 0)
    # A draft that is cut to nothing at the end of a text says nothing about matches.
    open_ = found | rounds.whole
    np.add.at(table, (kind[open_], rounds.after_acceptance[open_].astype(np.intp)), 1)
    place = np.arange(draft_length)
    accepted, tested = [], []
    for number in range(1, len(lengths) + 1):
        own = kind == number
        kept, drafted = rounds.accepted[own][:, None], rounds.drafted[own][:, None]
        accepted.append((place < kept).sum(axis=0))
        tested.append((place < np.minimum(kept + 1, drafted)).sum(axis=0))
    return CountedLookups(lengths, table, accepted, tested)


def law_by_match(counts: CountedLookups, drafted: Sequence[int], *, stretches: bool = True) -> laws.Lookups:
    """Law of lookups with the counted rates; `drafted` tokens after each length.

    Without `stretches` a round does not depend on the one before.
    """
    chances = counts.rates if stretches else counts.shares
    survival = [np.cumprod(counts.acceptance(index)[:count]) for index, count in enumerate(drafted)]
    return laws.Lookups(chances, drafted, survival)


def law_of_means(rounds: PlayedLookups, draft_length: int) -> laws.Lookups:
    """Law of lookups with one rate of matches and one of acceptance."""
    tested = np.minimum(rounds.accepted + 1, rounds.drafted).sum()
    alpha = float(rounds.accepted.sum() / tested) if tested else 0.0
    return laws.Lookups.of_rates(float((rounds.drafted > 0).mean()), alpha, draft_length)
