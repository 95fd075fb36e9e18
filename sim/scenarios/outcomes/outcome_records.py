"""Base classes and checks of the [outcomes] tables: each table is a checked record from which the law of a point is built.

The records of each kind of outcome are in separate modules; their fields are the keys of the table.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from model.base import bounded_files, checks
from model.base.checks import TableError
from model.logs import position_log
from model.logs.position_log import PositionLog
from model.methods.method_parameters import MethodParameters
from model.outcomes import outcome_laws
from model.outcomes.intervals import half_width, wilson
from sim.scenarios.outcomes.outcome_files import json_of

SOURCES = ("assumed", "measured", "published")


@dataclass(frozen=True)
class Outcome:
    """A law, its rate with its uncertainty interval, and its provenance."""

    law: Any
    rate: float
    source: str
    low: Any = None
    high: Any = None
    rate_low: float | None = None
    rate_high: float | None = None
    trials: int | None = None
    kind: str = ""
    agreement: float | None = None
    """Share of a lossy method's tokens that equal the target's; None if not measured."""
    agreement_source: str | None = None
    published_speedup: float | None = None
    """Speed-up printed next to a published rate, or the ratio of two published times."""
    note: str | None = None
    """Sentence on the origin of the rate, or on what the law replays."""
    further_values: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """Further values of the law, by column name."""


@dataclass(frozen=True)
class VariedOutcomes(Sequence[Outcome]):
    """Outcomes that differ from `first` in their laws and in numbers; a single one is made when it is asked for.

    Parameters
    ----------
    laws, lows, highs
        `law`, `low` and `high` of each; no intervals if `lows` is None.
    numbers
        Further fields of each, by name; shape (outcomes,).
    further_numbers
        `further_values` of each that differ, by name; shape (outcomes,).
    """

    first: Outcome
    laws: Sequence[Any]
    lows: Sequence[Any] | None
    highs: Sequence[Any] | None
    numbers: Mapping[str, NDArray[np.float64]]
    further_numbers: Mapping[str, NDArray[np.float64]] = dataclasses.field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.laws)

    def __getitem__(self, index: Any) -> Any:
        outcome = object.__new__(Outcome)
        vars(outcome).update(vars(self.first), law=self.laws[index])
        vars(outcome).update({name: values[index].item() for name, values in self.numbers.items()})
        if self.lows is not None and self.highs is not None:
            vars(outcome).update(low=self.lows[index], high=self.highs[index])
        if self.further_numbers:
            further = {name: values[index].item() for name, values in self.further_numbers.items()}
            vars(outcome).update(further_values={**self.first.further_values, **further})
        return outcome

    def at(self, index: NDArray[np.intp]) -> VariedOutcomes:
        """A subset of the outcomes, in this order."""

        def of(laws: Sequence[Any] | None) -> Any:
            return None if laws is None else [laws[each] for each in index.tolist()]

        numbers, further = ({name: values[index] for name, values in each.items()} for each in (self.numbers, self.further_numbers))
        return VariedOutcomes(self.first, of(self.laws), of(self.lows), of(self.highs), numbers, further)

    def laws_of(self, which: str) -> Sequence[Any]:
        """Laws at given rates: `law`, or an end of their interval, `low` or `high`; the law itself where there is none."""
        return (self.lows if which == "low" else self.highs if which == "high" else None) or self.laws


class LawRecord(ABC):
    """A table of [outcomes] of one `kind`: a frozen dataclass of its keys."""

    RATES: ClassVar[tuple[str, ...]] = ()
    """Keys that are rates; if one of them is overridden, `trials` and `source` no longer apply."""

    LISTED: ClassVar[tuple[str, ...]] = ()
    """Those that are lists of rates which `varied` takes."""

    USES: ClassVar[tuple[str, ...]] = ("parameters", "tokens")
    """What `outcome` uses; points that differ in nothing else share it."""

    BY_DRAFT_POSITION: ClassVar[bool] = False
    """True if the law is by position in a draft, which methods with drafts that continue over rounds refuse."""

    @abstractmethod
    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point of the grid."""

    def varied(
        self, rates: Mapping[str, NDArray[np.float64]], first: Outcome, parameters: MethodParameters
    ) -> VariedOutcomes | None:
        """Outcomes of the records that differ from this one in these rates only; None: each record is made alone.

        `first` is the outcome of this record with these parameters. Rates have shape (outcomes,), or (outcomes, length) if they are
        `LISTED`; they are in [0, 1].
        """
        return None


# --- a rate, or one for each output position -----------------------------------------------------------------------------


class OneRate(LawRecord):
    """Independent outcomes, all with the rate of the first key; `trials` is the number of trials."""

    USES = ()

    trials: int | None
    source: str

    @property
    def rate(self) -> float:
        """The rate, under the first key of RATES."""
        return float(getattr(self, self.RATES[0]))

    def __post_init__(self) -> None:
        checks.number(self.RATES[0], getattr(self, self.RATES[0]), 0, 1)
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """The law for one point of the grid."""
        return independent(self.rate, self.trials, self.source)

    def varied(
        self, rates: Mapping[str, NDArray[np.float64]], first: Outcome, parameters: MethodParameters
    ) -> VariedOutcomes | None:
        """Outcomes at several rates."""
        (rate,) = rates.values()
        if self.trials is None:
            return VariedOutcomes(first, outcome_laws.Iid.each(rate), None, None, {"rate": rate})
        low, high = wilson(rate, self.trials)
        laws, lows, highs = (outcome_laws.Iid.each(each) for each in (rate, low, high))
        return VariedOutcomes(first, laws, lows, highs, {"rate": rate, "rate_low": low, "rate_high": high})


class CorrelatedRate(OneRate):
    """As `OneRate`, with a `correlation` between neighbouring output positions."""

    correlation: float

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.number("correlation", self.correlation, -1, 1)
        try:
            self._law(self.rate)
        except checks.ParameterError:
            rare = min(self.rate, 1 - self.rate)
            bound = f"between {-rare / (1 - rare):g} and 1 at {self.RATES[0]}={self.rate:g}"
            raise checks.ParameterError(f"correlation must be {bound}, got {self.correlation:g}") from None

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point. The effective number of correlated trials is lower, by (1 - rho) / (1 + rho)."""
        law = self._law(self.rate)
        worth = 0.0 if self.trials is None else self.trials * (1 - self.correlation) / (1 + self.correlation)
        if not 0 < worth < float("inf"):
            return Outcome(law, self.rate, self.source, trials=self.trials)
        low, high = (float(bound) for bound in wilson(self.rate, worth))
        try:
            ends = self._law(low), self._law(high)
        except checks.ParameterError:  # an end that cannot have this correlation
            return Outcome(law, self.rate, self.source, trials=self.trials)
        return Outcome(law, self.rate, self.source, *ends, low, high, self.trials)

    def varied(
        self, rates: Mapping[str, NDArray[np.float64]], first: Outcome, parameters: MethodParameters
    ) -> VariedOutcomes | None:
        """None: which rates are valid depends on the correlation."""
        return None

    def _law(self, rate: float) -> outcome_laws.Markov:
        return outcome_laws.Markov(rate, self.correlation)


class RateByPosition(LawRecord):
    """Independent outcomes with a rate for each output position, in the list of the first key."""

    source: str

    def __post_init__(self) -> None:
        check_rates(self.RATES[0], getattr(self, self.RATES[0]))
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point."""
        name = self.RATES[0]
        law = outcome_laws.ByPosition(getattr(self, name), name=name)
        return Outcome(law, float(law.mean(tokens)) / tokens, self.source)


def independent(rate: float, trials: int | None, source: str) -> Outcome:
    """Independent outcomes, with Wilson's interval of their rate if the trials are known."""
    law = outcome_laws.Iid(rate)
    if trials is None:
        return Outcome(law, rate, source)
    low, high = (float(bound) for bound in wilson(rate, trials))
    return Outcome(law, rate, source, outcome_laws.Iid(low), outcome_laws.Iid(high), low, high, trials)


# --- recorded sequences --------------------------------------------------------------------------------------------------


class RecordedOutcomes(LawRecord):
    """Recorded sequences of outcomes: `records`, a JSON `file` of them (lists of true and false), or a decision `log`."""

    records: tuple[tuple[bool, ...], ...] | None
    file: str | None
    log: str | None
    source: str

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.records, self.file, self.log)) != 1:
            raise TableError("outcomes", ".kind 'replay' takes records, a file or a log, one of the three")
        check_file(self.file)
        check_provenance(None, self.source)
        if self.log is None:
            self._law()
        else:
            self.check_log(log_of(self.log))

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; its interval is between records, since positions within a record are not independent."""
        if self.log is None:
            return recorded(self._law(), tokens, self.source)
        log = log_of(self.log)
        law = self.law_of_log(log, parameters, tokens)
        source = f"{self.source}: {len(law.records)} of {len(log.starts) - 1} sequences of {Path(self.log).name}"
        return recorded(law, tokens, source)

    def check_log(self, log: PositionLog) -> None:
        """Raise an error for a log that lacks the data of this law."""

    @abstractmethod
    def law_of_log(self, log: PositionLog, parameters: MethodParameters, tokens: int) -> Any:
        """Law of the outcomes in those sequences of a log that cover all tokens."""

    def _law(self) -> outcome_laws.Replay:
        records: Any = self.records if self.file is None else json_of(self.file, "records")
        form = "a list of lists of true and false, all of one length of at least 1"
        if not isinstance(records, list | tuple) or not records:
            raise checks.ParameterError(f"records must be {form}, got {checks.shown(records)}")
        for index, record in enumerate(records):
            # Checked by type in one pass: only true, false, 1 and 0 are valid.
            if not isinstance(record, list | tuple) or not {*map(type, record)} <= {bool, int} or not {*record} <= {0, 1}:
                raise checks.ParameterError(f"records must be {form}; records[{index}] is {checks.shown(record)}")
            if not record or len(record) != len(records[0]):
                raise checks.ParameterError(f"records must be {form}; records[{index}] has length {len(record)}")
        return outcome_laws.Replay(records)


def recorded(law: Any, tokens: int, source: str) -> Outcome:
    """Outcome of recorded sequences; its interval is between sequences."""
    records = law.first(tokens)
    by_record, by_position = records.mean(axis=1), records.mean(axis=0)
    rate = float(by_record.mean())
    half = float(half_width(by_record.std(ddof=1), len(records))) if len(records) > 1 else 0.0
    if half == 0:
        return Outcome(law, rate, source)
    low, high = (np.clip(by_position + shift, 0, 1) for shift in (-half, half))
    ends = outcome_laws.ByPosition(low), outcome_laws.ByPosition(high)
    return Outcome(law, rate, source, *ends, float(low.mean()), float(high.mean()), records.size)


def log_of(name: Any) -> PositionLog:
    """Load a decision log by its file, or by the name of a bundled log; cached."""
    if not isinstance(name, str):
        raise checks.ParameterError(f"log must be a path or a name in quotes, got {checks.shown(name)}")
    return _log_once(name, bounded_files.stamp(name))


@lru_cache(maxsize=4)
def _log_once(name: str, stamp: object) -> PositionLog:
    return position_log.load(name)


def check_depth(log: PositionLog, parameters: MethodParameters) -> None:
    """Raise an error if the target of the log has another number of layers."""
    if parameters.layers != log.layers:
        raise checks.ParameterError(f"method.layers must be {log.layers}, as in the log's target, got {parameters.layers}")


# --- checks --------------------------------------------------------------------------------------------------------------


def check_provenance(trials: int | None, source: str) -> None:
    """Check that the source is one of `SOURCES` and the trials a positive number or None."""
    checks.one_of("source", source, SOURCES)
    if trials is not None:
        checks.whole("trials", trials, 1)


def check_rates(name: str, given: Any, form: str = "a list of rates, one for each output position") -> None:
    """Check that `given` is a list of at least one rate."""
    if not isinstance(given, tuple) or not given:
        raise checks.ParameterError(f"{name} must be {form}, got {checks.shown(given)}")
    for index, rate in enumerate(given):
        checks.number(f"{name}[{index}]", rate, 0, 1)


def check_file(file: Any) -> None:
    """Check that `file` is a path or None."""
    if not isinstance(file, str | None):
        raise checks.ParameterError(f"file must be a path in quotes, got {checks.shown(file)}")


def of_method(parameters: MethodParameters, kind: str, names: Sequence[str]) -> list[Any]:
    """Values of the method's parameters that a law needs."""
    known = parameters.table()
    missing = [name for name in names if name not in known]
    if missing:
        raise checks.ParameterError(f"outcomes.kind {kind!r} needs a method with {missing[0]}")
    return [known[name] for name in names]


def checked_parameters(parameters: MethodParameters, needs: Any, kind: str) -> Any:
    """Return the parameters, checked against the runtime protocol `needs` of a law."""
    if not isinstance(parameters, needs):
        names = ", ".join(name for name in vars(needs)["__annotations__"])
        raise checks.ParameterError(f"outcomes.kind {kind!r} needs a method with {names}")
    return parameters


# --- lossy methods -------------------------------------------------------------------------------------------------------


def with_agreement(outcome: Outcome, agreement: float, source: str, whose: str) -> Outcome:
    """Add the agreement measured in a record to an outcome; agreement is never assumed."""
    words = f"{source}: share of tokens equal to those of the {whose}"
    return dataclasses.replace(outcome, agreement=agreement, agreement_source=words)


def check_one_source(file: Any, log: Any) -> None:
    """Check that records come from either a file or a log."""
    if (file is None) == (log is None):
        raise TableError("outcomes", " must come from a file or from a log, one of the two")
    check_file(file)


def refuse_thresholds(parameters: MethodParameters, kind: str, names: Sequence[str]) -> None:
    """Raise an error for thresholds of the method together with a law that gives the resulting rates."""
    for name in names:
        if parameters.table()[name] is not None:
            raise checks.ParameterError(
                f"{name} has no effect with outcomes.kind {kind!r}, which gives the resulting rates; leave it out, or give a record"
            )
