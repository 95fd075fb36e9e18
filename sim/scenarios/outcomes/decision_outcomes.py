"""[outcomes] of Big Little Decoder: fallbacks and rollbacks of the small model's tokens.

The agreement of the output with the large model's comes only from records; it is never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.interpret.simulated_answers import UNLIKELY
from model.methods.bild import theory as bild
from model.methods.bild import threshold_decisions
from model.methods.bild.threshold_decisions import COLUMNS, Decisions, Digits, Independent, RecordedDecisions
from model.methods.method_parameters import MethodParameters
from model.outcomes import random_streams
from model.outcomes.intervals import wilson
from sim.scenarios.outcomes.outcome_files import columns_of, read_once
from sim.scenarios.outcomes.outcome_records import (
    LawRecord,
    Outcome,
    VariedOutcomes,
    check_file,
    check_one_source,
    check_provenance,
    check_rates,
    checked_parameters,
    log_of,
    refuse_thresholds,
    with_agreement,
)

ASSUMED = 100_000
"""Tokens of a record drawn from an assumed distribution."""


@runtime_checkable
class DecidesByThresholds(Protocol):
    """Parameters of a method that falls back and rolls back by thresholds."""

    fallback_threshold: float | None
    rollback_threshold: float | None
    variant: str
    max_draft_length: int


@dataclass(frozen=True)
class DecisionRates(LawRecord):
    """The small model falls back with probability `fallback_rate`; its tokens are rolled back with probability `rollback_rate`.

    `trials` is the number of the small model's passes on which the rates are based. The method must have no thresholds.
    """

    USES = ("parameters",)
    RATES = ("fallback_rate", "rollback_rate")

    fallback_rate: float
    rollback_rate: float
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        checks.number("fallback_rate", self.fallback_rate, 0, 1)
        checks.number("rollback_rate", self.rollback_rate, 0, 1)
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point of the grid."""
        refuse_thresholds(parameters, "rates", ("fallback_threshold", "rollback_threshold"))
        return _independent(self.fallback_rate, self.rollback_rate, self.trials, self.source)

    def varied(
        self, rates: Mapping[str, NDArray[np.float64]], first: Outcome, parameters: MethodParameters
    ) -> VariedOutcomes | None:
        """Outcomes at several pairs of rates."""
        size = len(next(iter(rates.values())))
        pair = [np.broadcast_to(rates.get(name, getattr(self, name)), size) for name in self.RATES]
        fallback, rollback = (np.asarray(each, dtype=np.float64) for each in pair)
        laws, further = Independent.each(fallback, rollback), {"rollback_rate": rollback}
        if self.trials is None:
            return VariedOutcomes(first, laws, None, None, {"rate": fallback}, further)
        low, high = wilson(fallback, self.trials)
        back_low, back_high = wilson(rollback, _written(self.trials, fallback))
        ends = Independent.each(low, back_low), Independent.each(high, back_high)
        return VariedOutcomes(first, laws, *ends, {"rate": fallback, "rate_low": low, "rate_high": high}, further)


@dataclass(frozen=True)
class DecisionRatesByPosition(LawRecord):
    """As `rates`, with one rate of each kind per output position."""

    RATES = ("fallback_rates", "rollback_rates")

    fallback_rates: tuple[float, ...]
    rollback_rates: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name in self.RATES:
            check_rates(name, getattr(self, name))
        given, wanted = len(self.rollback_rates), len(self.fallback_rates)
        if given != wanted:
            raise checks.ParameterError(f"rollback_rates must be as many as fallback_rates, {wanted}, got {given}")
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point."""
        refuse_thresholds(parameters, "by-position", ("fallback_threshold", "rollback_threshold"))
        if len(self.fallback_rates) < tokens:
            form = f"one rate for each of {tokens} output positions"
            raise checks.ParameterError(
                f"fallback_rates must have {form}, got {len(self.fallback_rates)}; give more rates or fewer tokens"
            )
        rates = (float(np.mean(each[:tokens])) for each in (self.fallback_rates, self.rollback_rates))
        fallback, rollback = rates
        return Outcome(
            Independent(self.fallback_rates, self.rollback_rates), fallback, self.source, further_values={"rollback_rate": rollback}
        )


@lru_cache(maxsize=8)
def _assumed(sureness: float) -> Decisions:
    """Synthetic record for an assumed sureness, the same for all points of a run."""
    draws = np.concatenate([*random_streams.tiles(0, "record", 0, 3 * -(-ASSUMED // random_streams.BLOCK))], axis=None)
    found = threshold_decisions.synthetic(ASSUMED, draws[: 3 * ASSUMED].reshape(3, ASSUMED), sureness=sureness)
    for column in (found.confidence, found.distance, found.agrees):
        column.setflags(write=False)
    return found


@dataclass(frozen=True)
class DecisionsAtThresholds(LawRecord):
    """Rates that the method's thresholds give on a decision record, and the agreement in that record.

    The record is a decision `log`, or a `file`: JSON (an object of lists) or CSV, with one row per token that the small model
    proposes: its largest probability (`confidence`), the large model's cross-entropy of that token (`distance` [nats]), and true
    if it is also the large model's most likely token (`agrees`). With `sureness` the record is assumed: it is drawn from the
    distribution of `model.methods.bild.threshold_decisions.synthetic`, with confidence ~ Beta(sureness, 1) and correct with that
    probability. The method must have both thresholds.
    """

    USES = ("parameters",)

    file: str | None = None
    sureness: float | None = None
    log: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.file, self.sureness, self.log)) != 1:
            raise checks.TableError("outcomes", ".kind 'thresholds' takes a file, a log or sureness, one of the three")
        check_file(self.file)
        if self.sureness is not None:
            checks.number("sureness", self.sureness, 0)
            if self.source not in (None, "assumed"):
                raise checks.ParameterError(f"source must be assumed with sureness, which is not measured, got {self.source!r}")
        elif self.source is not None:
            check_provenance(None, self.source)
        self.record()

    def record(self) -> Decisions:
        """Return the decision record."""
        if self.log is not None:
            return _joined(log_of(self.log).decisions(), f"{self.source or 'measured'}: log {Path(self.log).name}")
        if self.sureness is not None:
            return _assumed(self.sureness)
        assert self.file is not None
        found: Decisions = read_once(_record_of, self.file, self.source or "measured")
        return found

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point: independent, with the record's rates and the interval for its number of tokens."""
        deciding: DecidesByThresholds = checked_parameters(parameters, DecidesByThresholds, "thresholds")
        low, high = _thresholds(deciding)
        record = self.record()
        found = record.rates(low, high, variant=deciding.variant)
        agreement = float(bild.agreement(record, low, high, deciding.max_draft_length, variant=deciding.variant))
        rates = float(found.fallback_rate), float(np.nan_to_num(found.rollback_rate))
        trials = None if self.sureness is not None else int(record.confidence.size)
        outcome = _independent(*rates, trials, record.source)
        return with_agreement(outcome, agreement, record.source, "large model")


@dataclass(frozen=True)
class DecisionRecord(LawRecord):
    """Decisions of recorded sequences at the method's thresholds, replayed.

    A JSON `file` has the columns of kind `thresholds`, each with one list per sequence. A decision `log` has the answers of its
    draft and target along the target's sequences. Every decoding replays one of the sequences, drawn with equal probability; each
    must cover all tokens but the last.
    """

    file: str | None = None
    log: str | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        check_one_source(self.file, self.log)
        check_provenance(None, self.source)
        self.sequences()

    def sequences(self) -> list[Decisions]:
        """Return the record of each sequence."""
        if self.log is not None:
            return log_of(self.log).decisions()
        assert self.file is not None
        found: list[Decisions] = read_once(_sequences_in, self.file, self.source)
        return found

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; the rates are those of all tokens, the agreement is that of the replayed sequences."""
        deciding: DecidesByThresholds = checked_parameters(parameters, DecidesByThresholds, "replay")
        low, high = _thresholds(deciding)
        sequences = self.sequences()
        lengths = sorted({sequence.confidence.size for sequence in sequences})
        if lengths[0] < tokens - 1:
            raise checks.ParameterError(
                f"sequences must have decisions for tokens-1={tokens - 1} positions, got {lengths[0]} in the shortest; decode fewer"
                " tokens, or leave out short sequences"
            )
        decided = [sequence.decided(low, high, variant=deciding.variant)[: lengths[0]] for sequence in sequences]
        whole = _joined(sequences, self.source)
        found = whole.rates(low, high, variant=deciding.variant)
        foreign = [_foreign(deciding, *pair, tokens) for pair in zip(decided, sequences, strict=True)]
        agreement = 1 - float(np.mean(foreign)) / tokens
        further = {"rollback_rate": float(np.nan_to_num(found.rollback_rate))}
        trials = int(whole.confidence.size)
        law, fallback = RecordedDecisions(decided), float(found.fallback_rate)
        outcome = Outcome(law, fallback, self.source, further_values=further, trials=trials)
        return with_agreement(outcome, agreement, self.source, "large model")


def _foreign(parameters: DecidesByThresholds, decided: Digits, record: Decisions, tokens: int) -> int:
    """Number of tokens kept in a recorded sequence that the large model would not have generated."""
    start = foreign = 0
    while start < tokens:
        drafted = slice(start, min(start + parameters.max_draft_length, tokens - 1))
        stops = np.flatnonzero(decided[drafted])
        kept = int(stops[0]) if stops.size else len(decided[drafted])
        foreign += int(np.count_nonzero(~record.agrees[start : start + kept]))
        again = stops.size > 0 and decided[start + kept] == UNLIKELY and parameters.variant == "code"
        start += kept + 1 + again
    return foreign


def _independent(fallback: float, rollback: float, trials: int | None, source: str) -> Outcome:
    law, further = Independent(fallback, rollback), {"rollback_rate": rollback}
    if trials is None:
        return Outcome(law, fallback, source, further_values=further)
    low, high = (float(bound) for bound in wilson(fallback, trials))
    back_low, back_high = (float(bound) for bound in wilson(rollback, _written(trials, fallback)))
    laws = Independent(low, back_low), Independent(high, back_high)
    return Outcome(law, fallback, source, *laws, low, high, trials, further_values=further)


def _written(trials: int, fallback: Any) -> Any:
    """Tokens of the small model, which are those that may be rolled back."""
    return np.maximum(trials * (1 - fallback), 1.0)


def _thresholds(parameters: DecidesByThresholds) -> tuple[float, float]:
    fallback, rollback = parameters.fallback_threshold, parameters.rollback_threshold
    for name, value in (("fallback_threshold", fallback), ("rollback_threshold", rollback)):
        if value is None:
            raise checks.ParameterError(f"{name} is required where outcomes depend on thresholds; give it under [[method]]")
    assert fallback is not None
    assert rollback is not None
    return fallback, rollback


def _sequences_in(file: str, source: str) -> list[Decisions]:
    return _sequences_of(file, columns_of(file, "decisions", COLUMNS), source)


def _record_of(file: str, source: str) -> Decisions:
    columns = columns_of(file, "decisions", COLUMNS)
    if any(isinstance(value, list) for values in columns.values() for value in values[:1]):
        return _joined(_sequences_of(file, columns, source), f"{source}: {file}")
    try:
        return Decisions.of_columns(columns, f"{source}: {file}")
    except checks.ParameterError as error:
        raise checks.ParameterError(f"{error} (of the decision record {file!r})") from None


def _sequences_of(file: str, columns: Mapping[str, list[Any]], source: str) -> list[Decisions]:
    """Return the record of each sequence of a file with one list per sequence in every column."""
    flat = [name for name, values in columns.items() if not values or not all(isinstance(value, list) for value in values)]
    if flat or not columns:
        form = f"a list for each sequence in every column ({', '.join(COLUMNS)})"
        got = f"none in {flat[0]}; a file of plain columns is for kind 'thresholds'" if flat else "no column"
        raise checks.ParameterError(f"file {file!r} must have {form}, got {got}")
    counts = {name: len(values) for name, values in columns.items()}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise checks.ParameterError(f"file {file!r} must have the same number of sequences in every column, got {listed}")
    found = []
    for index in range(next(iter(counts.values()))):
        try:
            found.append(Decisions.of_columns({name: values[index] for name, values in columns.items()}, source))
        except checks.ParameterError as error:
            raise checks.ParameterError(f"{error} (of sequence {index + 1} of the decision record {file!r})") from None
    return found


def _joined(sequences: list[Decisions], source: str) -> Decisions:
    columns = {name: np.concatenate([getattr(sequence, name) for sequence in sequences]) for name in COLUMNS}
    return Decisions.of_columns(columns, source)


KINDS: dict[str, type[LawRecord]] = {
    "rates": DecisionRates, "by-position": DecisionRatesByPosition, "thresholds": DecisionsAtThresholds,
    "replay": DecisionRecord,
}  # fmt: skip
