"""The [outcomes] of a scenario: which law the matches follow, where it comes from, and how surely its rate is known.

Those of drafted tokens are in `sim.scenarios.acceptance_outcomes`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from model import published
from model.base import bounded_files, checks
from model.logs import position_log
from model.logs.position_log import PositionLog
from model.outcomes import outcome_laws
from model.outcomes.intervals import half_width, wilson

SOURCES = ("assumed", "measured", "published")


@dataclass(frozen=True)
class Outcome:
    """A law, its rate with the interval of what is not known about it, and its provenance."""

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
    """Of a lossy method: the share of its tokens that the target would have put out; None if nobody knows."""
    agreement_source: str | None = None
    published_speedup: float | None = None
    """What is printed beside a published rate, or the ratio of two times that are."""
    note: str | None = None
    """A sentence of how the rate came about, or of what the law plays."""
    also: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """What else there is to say of the law, by the name of its column."""


@dataclass(frozen=True)
class Iid:
    """Every position matches with chance `match_rate`; `trials` says on how many comparisons that rests."""

    match_rate: float
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        checks.number("match_rate", self.match_rate, 0, 1)
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point of the grid."""
        return independent(self.match_rate, self.trials, self.source)


@dataclass(frozen=True)
class Markov:
    """As `iid`, with correlation between neighbouring positions."""

    match_rate: float
    correlation: float
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        checks.number("match_rate", self.match_rate, 0, 1)
        checks.number("correlation", self.correlation, -1, 1)
        try:
            outcome_laws.Markov(self.match_rate, self.correlation)
        except checks.ParameterError:
            rare = min(self.match_rate, 1 - self.match_rate)
            bound = f"between {-rare / (1 - rare):g} and 1 at match_rate={self.match_rate:g}"
            raise checks.ParameterError(f"correlation must be {bound}, got {self.correlation:g}") from None
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point. Correlated trials are worth fewer than their number: by (1 - rho) / (1 + rho)."""
        law = outcome_laws.Markov(self.match_rate, self.correlation)
        worth = 0.0 if self.trials is None else self.trials * (1 - self.correlation) / (1 + self.correlation)
        if not 0 < worth < float("inf"):
            return Outcome(law, self.match_rate, self.source, trials=self.trials)
        low, high = (float(bound) for bound in wilson(self.match_rate, worth))
        try:
            ends = outcome_laws.Markov(low, self.correlation), outcome_laws.Markov(high, self.correlation)
        except checks.ParameterError:  # an end that cannot have this correlation
            return Outcome(law, self.match_rate, self.source, trials=self.trials)
        return Outcome(law, self.match_rate, self.source, *ends, low, high, self.trials)


@dataclass(frozen=True)
class ByPosition:
    """Output position j matches with chance `match_rates[j]`."""

    match_rates: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        given: Any = self.match_rates
        if not isinstance(given, tuple) or not given:
            rates = "a list of rates, one for each output position"
            raise checks.ParameterError(f"match_rates must be {rates}, got {checks.shown(given)}")
        for index, rate in enumerate(given):
            checks.number(f"match_rates[{index}]", rate, 0, 1)
        check_provenance(None, self.source)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point."""
        law = outcome_laws.ByPosition(self.match_rates)
        return Outcome(law, float(law.mean(tokens)) / tokens, self.source)


@dataclass(frozen=True)
class Replay:
    """Recorded sequences of matches: `records`, a JSON `file` that holds them (lists of true and false), or a decision `log`.

    Of a log (its file, or the name of a bundled one) they are the matches at the method's own layer and candidates, under the head
    that is named: `common`, or one that was `trained` for the layer.
    """

    records: tuple[tuple[bool, ...], ...] | None = None
    file: str | None = None
    log: str | None = None
    head: str | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.records, self.file, self.log)) != 1:
            raise checks.ParameterError("outcomes.kind 'replay' takes records, a file or a log, one of the three")
        if self.log is not None:
            log_of(self.log)
            check_provenance(None, self.source)
            if self.head is None:
                raise checks.ParameterError(f"head is required with a log: one of {', '.join(position_log.HEADS)}")
            checks.one_of("head", self.head, position_log.HEADS)
            return
        if self.head is not None:
            raise checks.ParameterError("head is of a decision log; leave it out")
        if not isinstance(self.file, str | None):  # what a scenario file holds may be anything
            raise checks.ParameterError(f"file must be a path in quotes, got {checks.shown(self.file)}")
        check_provenance(None, self.source)
        self._law()

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point; its interval is between records: they are independent, positions within one are not."""
        if self.log is None:
            return recorded(self._law(), tokens, self.source)
        log = log_of(self.log)
        layer, candidates = of_method(parameters, "replay of a log", ("exit_layer", "candidates"))
        if layer == log.layers:
            matches = [np.ones(len(text), dtype=np.bool_) for text in log.by_text(log.table["token"].to_numpy())]
        else:
            check_depth(log, parameters)
            form = getattr(parameters, "form", "literal")
            matches = log.matches(layer, candidates, self.head or "common", form=form)
        return of_log(log, self.log, outcome_laws.Replay(log.covering(matches, tokens)), tokens, self.source)

    def _law(self) -> outcome_laws.Replay:
        records = self._read()
        form = "a list of lists of true and false, all of one length of at least 1"
        if not isinstance(records, list | tuple) or not records:
            raise checks.ParameterError(f"records must be {form}, got {checks.shown(records)}")
        for index, record in enumerate(records):
            # By type, in one pass: 1 and 0 may stand for true and false, and nothing else.
            if not isinstance(record, list | tuple) or not {*map(type, record)} <= {bool, int} or not {*record} <= {0, 1}:
                raise checks.ParameterError(f"records must be {form}; records[{index}] is {checks.shown(record)}")
            if not record or len(record) != len(records[0]):
                raise checks.ParameterError(f"records must be {form}; records[{index}] has length {len(record)}")
        return outcome_laws.Replay(records)

    def _read(self) -> Any:
        if self.file is None:
            return self.records
        return json_of(self.file, "records")


def log_of(name: Any) -> PositionLog:
    """A decision log by its file, or by the name of a bundled one; read once."""
    if not isinstance(name, str):
        raise checks.ParameterError(f"log must be a path or a name in quotes, got {checks.shown(name)}")
    return _log_once(name, bounded_files.stamp(name))


@lru_cache(maxsize=4)
def _log_once(name: str, stamp: object) -> PositionLog:
    return position_log.load(name)


def check_depth(log: PositionLog, parameters: Any) -> None:
    """Refuse a log of a target with another number of layers."""
    if parameters.layers != log.layers:
        raise checks.ParameterError(f"method.layers must be {log.layers}, as the target of the log has, got {parameters.layers}")


def of_method(parameters: Any, kind: str, names: Sequence[str]) -> list[Any]:
    """What a law needs to know of the method."""
    missing = [name for name in names if not hasattr(parameters, name)]
    if missing:
        raise checks.ParameterError(f"outcomes.kind {kind!r} needs a method with {missing[0]}")
    return [getattr(parameters, name) for name in names]


def of_log(log: PositionLog, name: str, law: Any, tokens: int, source: str) -> Outcome:
    """The outcome of records of a decision log: says how many of its texts are long enough."""
    return recorded(law, tokens, f"{source}: {len(law.records)} of {len(log.starts) - 1} texts of {Path(name).name}")


def recorded(law: Any, tokens: int, source: str) -> Outcome:
    """The outcome of recorded sequences; its interval is between them."""
    records = law.first(tokens)
    by_record, by_position = records.mean(axis=1), records.mean(axis=0)
    rate = float(by_record.mean())
    half = float(half_width(by_record.std(ddof=1), len(records))) if len(records) > 1 else 0.0
    if half == 0:
        return Outcome(law, rate, source)
    low, high = (np.clip(by_position + shift, 0, 1) for shift in (-half, half))
    ends = outcome_laws.ByPosition(low), outcome_laws.ByPosition(high)
    return Outcome(law, rate, source, *ends, float(low.mean()), float(high.mean()), records.size)


def json_of(file: str, what: str, form: str = "JSON") -> Any:
    """What a JSON file of outcomes holds."""
    text = text_of(file, what, form)
    try:
        return bounded_files.json_of(text, strict=False)
    except ValueError as error:  # a number of thousands of digits is one too
        known = isinstance(error, json.JSONDecodeError | checks.ParameterError)
        reason = str(error) if known else "a number has too many digits"
    raise checks.ParameterError(f"file {file!r} cannot be read: it is not JSON: {reason}; name a {form} file of {what}")


def text_of(file: str, what: str, form: str = "JSON") -> str:
    """What a file of outcomes holds; editors and spreadsheets may put a byte-order mark in front."""
    try:
        return bounded_files.read_text(file)
    except UnicodeDecodeError:
        reason = "it is no text in UTF-8"
    except (OSError, ValueError) as error:
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
    raise checks.ParameterError(f"file {file!r} cannot be read: {reason}; name a {form} file of {what}")


@dataclass(frozen=True)
class Published:
    """A rate of a published table, by what the table asks for: `data_set`, `head` or `sampling`.

    Layer and candidates are the method's. `by_position` takes the rates of the bins of output positions that Tables 6 to 8 print
    instead of a total; with the `table` named one must say which.
    """

    data_set: str
    head: str | None = None
    sampling: str | None = None
    table: str = "ppd-table-2"
    by_position: bool | None = None

    def __post_init__(self) -> None:
        table = published.table(self.table)
        for key in ("data_set", "head", "sampling"):
            value = getattr(self, key)
            if value is None and key in table.keys:
                known = ", ".join(sorted({str(row[key]) for row in table.rows}))
                raise checks.ParameterError(f"outcomes.{key} is required by {self.table}: one of {known}")
            if value is not None and key not in table.keys:
                raise checks.ParameterError(f"outcomes.{key} is not a key of {self.table}; its keys: {', '.join(table.keys)}")
            if value is not None:
                checks.one_of(key, value, sorted({str(row[key]) for row in table.rows}))
        if not isinstance(self.by_position, bool | None):
            raise checks.ParameterError(f"by_position must be true or false, got {self.by_position!r}")
        binned = "first" in table.keys
        if binned and self.by_position is None:
            raise checks.ParameterError(
                f"outcomes.by_position is required by {self.table}, which has bins of output positions: true gives each position"
                " the rate of its bin, false all of them the printed total"
            )
        if self.by_position and not binned and self.table != "ppd-table-2":
            raise checks.ParameterError("outcomes.by_position picks its table by data_set; leave outcomes.table out")

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point."""
        known: dict[str, Any] = {"data_set": self.data_set, "head": self.head, "sampling": self.sampling, "method": "ppd"}
        for key, field in (("layer", "exit_layer"), ("candidates", "candidates")):
            if not hasattr(parameters, field):
                raise checks.ParameterError(f"outcomes.kind 'published' needs a method with {field}")
            known[key] = getattr(parameters, field)
        if self.by_position:
            keys = {key: known[key] for key in ("data_set", "layer", "candidates", "head")}
            rates, source = published.match_rates_by_position(**keys, tokens=tokens)
            law = outcome_laws.ByPosition(rates)
            trials = published.trials_of_a_bin(self.data_set)
            # All bins at their low ends together, and all at their high ends: wider than need be.
            low, high = wilson(rates, trials)
            ends = outcome_laws.ByPosition(low), outcome_laws.ByPosition(high)
            bounds = float(low.mean()), float(high.mean())
            return Outcome(law, float(rates.mean()), f"published: {source}", *ends, *bounds, trials)
        table = published.table(self.table)
        keys = {key: known[key] for key in table.keys if key in known}
        found = published.match_rate(self.table, **keys)
        outcome = independent(found.rate, found.trials, f"published: {found.source}")
        if "latency_s" not in table.rows[0]:
            return outcome
        plain = table.lookup(**keys | {"method": "greedy", "candidates": None})["latency_s"]
        return dataclasses.replace(outcome, published_speedup=plain / table.lookup(**keys)["latency_s"])


KINDS: dict[str, type[Iid | Markov | ByPosition | Replay | Published]] = {
    "iid": Iid, "markov": Markov, "by-position": ByPosition, "replay": Replay, "published": Published,
}  # fmt: skip


def independent(rate: float, trials: int | None, source: str) -> Outcome:
    """Outcomes that do not depend on each other, with Wilson's interval of their rate where its trials are known."""
    law = outcome_laws.Iid(rate)
    if trials is None:
        return Outcome(law, rate, source)
    low, high = (float(bound) for bound in wilson(rate, trials))
    return Outcome(law, rate, source, outcome_laws.Iid(low), outcome_laws.Iid(high), low, high, trials)


def check_provenance(trials: int | None, source: str) -> None:
    """Refuse a source that is none, and trials that are no number."""
    checks.one_of("source", source, SOURCES)
    if trials is not None:
        checks.whole("trials", trials, 1)
