"""The [outcomes] of methods whose text is not the target's: what becomes of a small model's token, how deep a token must go.

How far the text agrees with the target's is told by a record, or by nobody: it is never assumed.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.interpret.world import UNLIKELY
from model.methods.bild import theory as bild
from model.methods.bild import threshold_decisions
from model.methods.bild.threshold_decisions import Decisions, Digits, Independent, RecordedDecisions
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.early_exit.theory import exit_pmf, exits
from model.outcomes import random_streams
from model.outcomes.intervals import wilson
from sim.scenarios.match_outcomes import Outcome, check_provenance, json_of, log_of, text_of

Floats = NDArray[np.float64]
Columns = Mapping[str, list[Any]]

ASSUMED = 100_000
"""Tokens of a record that is drawn from an assumed law."""


# --- Big Little Decoder: what becomes of the small model's token ---------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The small model hands over with chance `fallback_rate`; what it writes is taken back with chance `rollback_rate`.

    `trials` says on how many of the small model's runs the rates rest. The method has no thresholds then.
    """

    fallback_rate: float
    rollback_rate: float
    trials: int | None = None
    source: str = "assumed"

    def __post_init__(self) -> None:
        checks.number("fallback_rate", self.fallback_rate, 0, 1)
        checks.number("rollback_rate", self.rollback_rate, 0, 1)
        check_provenance(self.trials, self.source)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point of the grid."""
        _refuse_thresholds(parameters, "rates", ("fallback_threshold", "rollback_threshold"))
        return _independent(self.fallback_rate, self.rollback_rate, self.trials, self.source)


@dataclass(frozen=True)
class RatesByPosition:
    """As `rates`, with a rate of each kind for each output position."""

    fallback_rates: tuple[float, ...]
    rollback_rates: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        for name in ("fallback_rates", "rollback_rates"):
            given: Any = getattr(self, name)
            if not isinstance(given, tuple) or not given:
                form = "a list of rates, one for each output position"
                raise checks.ParameterError(f"{name} must be {form}, got {checks.shown(given)}")
            for index, rate in enumerate(given):
                checks.number(f"{name}[{index}]", rate, 0, 1)
            if len(given) != len(self.fallback_rates):
                raise checks.ParameterError(
                    f"rollback_rates must be as many as fallback_rates, {len(self.fallback_rates)}, got {len(given)}"
                )
        check_provenance(None, self.source)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point."""
        _refuse_thresholds(parameters, "by-position", ("fallback_threshold", "rollback_threshold"))
        if len(self.fallback_rates) < tokens:
            form = f"one rate for each of {tokens} output positions"
            raise checks.ParameterError(
                f"fallback_rates must have {form}, got {len(self.fallback_rates)}; give more rates or fewer tokens"
            )
        rates = (float(np.mean(each[:tokens])) for each in (self.fallback_rates, self.rollback_rates))
        fallback, rollback = rates
        return Outcome(
            Independent(self.fallback_rates, self.rollback_rates), fallback, self.source, also={"rollback_rate": rollback}
        )


@lru_cache(maxsize=8)
def _assumed(sureness: float) -> Decisions:
    """The record that is drawn where none was measured: every point of a run asks for the same one."""
    draws = np.concatenate([*random_streams.tiles(0, "record", 0, 3 * -(-ASSUMED // random_streams.BLOCK))], axis=None)
    found = threshold_decisions.synthetic(ASSUMED, draws[: 3 * ASSUMED].reshape(3, ASSUMED), sureness=sureness)
    for column in (found.confidence, found.distance, found.agrees):
        column.setflags(write=False)
    return found


@dataclass(frozen=True)
class Thresholds:
    """The rates that the method's thresholds come to on a decision record, and the agreement that the record tells of.

    The record is a `file`: JSON (an object of lists) or CSV, with a row for each token that the small model proposes: its largest
    probability (`confidence`), the large model's cross-entropy of that token (`distance` [nats]), and whether it is the large
    model's likeliest too (`agrees`). Or it is drawn from the law of `model.methods.bild.threshold_decisions.synthetic`, which
    nobody measured, with this `sureness`: the confidence is Beta(sureness, 1), and right as often as it says. The method has both
    of its thresholds then.
    """

    file: str | None = None
    sureness: float | None = None
    log: str | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.file, self.sureness, self.log)) != 1:
            raise checks.ParameterError("outcomes.kind 'thresholds' takes a file, a log or sureness, one of the three")
        if self.file is not None and not isinstance(self.file, str):
            raise checks.ParameterError(f"file must be a path in quotes, got {checks.shown(self.file)}")
        if self.sureness is not None:
            checks.number("sureness", self.sureness, 0)
            if self.source not in (None, "assumed"):
                raise checks.ParameterError(f"source must be assumed with sureness, which nobody measured, got {self.source!r}")
        elif self.source is not None:
            check_provenance(None, self.source)
        self.record()

    def record(self) -> Decisions:
        """The decision record."""
        if self.log is not None:
            return _joined(log_of(self.log).decisions(), f"{self.source or 'measured'}: log {Path(self.log).name}")
        if self.sureness is not None:
            return _assumed(self.sureness)
        assert self.file is not None
        found: Decisions = _read_once(_record_of, self.file, self.source or "measured", _stamp(self.file))
        return found

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point: independent, with the record's rates; the interval is what so many tokens leave open."""
        low, high = _thresholds(parameters)
        record = self.record()
        found = record.rates(low, high, variant=parameters.variant)
        agreement = float(bild.agreement(record, low, high, parameters.maximum_draft, variant=parameters.variant))
        rates = float(found.fallback_rate), float(np.nan_to_num(found.rollback_rate))
        trials = None if self.sureness is not None else int(record.confidence.size)
        outcome = _independent(*rates, trials, record.source)
        return _agreeing(outcome, agreement, record.source)


@dataclass(frozen=True)
class Replay:
    """The decisions of recorded texts at the method's thresholds: a JSON `file` as for `thresholds`, in each column lists of texts,
    or a decision `log`, what its draft and target say along the target's texts.

    Every decoding is one of the texts, drawn with equal chances, of which each covers all tokens but the last.
    """

    file: str | None = None
    log: str | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        _one_source(self.file, self.log)
        check_provenance(None, self.source)
        self.texts()

    def texts(self) -> list[Decisions]:
        """The record of each text."""
        if self.log is not None:
            return log_of(self.log).decisions()
        assert self.file is not None
        found: list[Decisions] = _read_once(_texts_in, self.file, self.source, _stamp(self.file))
        return found

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point; the rates are those of all tokens, the agreement that of the texts as they are played."""
        low, high = _thresholds(parameters)
        texts = self.texts()
        lengths = sorted({text.confidence.size for text in texts})
        if lengths[0] < tokens - 1:
            raise checks.ParameterError(
                f"texts must have decisions for tokens-1={tokens - 1} positions, got {lengths[0]} in the shortest; decode fewer"
                " tokens, or leave out short texts"
            )
        decided = [text.decided(low, high, variant=parameters.variant)[: lengths[0]] for text in texts]
        whole = _joined(texts, self.source)
        found = whole.rates(low, high, variant=parameters.variant)
        agreement = 1 - float(np.mean([_foreign(parameters, *pair, tokens) for pair in zip(decided, texts, strict=True)])) / tokens
        also = {"rollback_rate": float(np.nan_to_num(found.rollback_rate))}
        outcome = Outcome(
            RecordedDecisions(decided), float(found.fallback_rate), self.source, also=also, trials=int(whole.confidence.size)
        )
        return _agreeing(outcome, agreement, self.source)


def _one_source(file: Any, log: Any) -> None:
    """Refuse records that come from nowhere, or from two places."""
    if (file is None) == (log is None):
        raise checks.ParameterError("outcomes must come from a file or from a log, one of the two")
    if file is not None and not isinstance(file, str):
        raise checks.ParameterError(f"file must be a path in quotes, got {checks.shown(file)}")


def _foreign(parameters: Any, decided: Digits, record: Decisions, tokens: int) -> int:
    """How many tokens of a recorded text stay that the large model would not have written."""
    start = foreign = 0
    while start < tokens:
        drafted = slice(start, min(start + parameters.maximum_draft, tokens - 1))
        stops = np.flatnonzero(decided[drafted])
        kept = int(stops[0]) if stops.size else len(decided[drafted])
        foreign += int(np.count_nonzero(~record.agrees[start : start + kept]))
        again = stops.size > 0 and decided[start + kept] == UNLIKELY and parameters.variant == "code"
        start += kept + 1 + again
    return foreign


def _independent(fallback: float, rollback: float, trials: int | None, source: str) -> Outcome:
    law, also = Independent(fallback, rollback), {"rollback_rate": rollback}
    if trials is None:
        return Outcome(law, fallback, source, also=also)
    low, high = (float(bound) for bound in wilson(fallback, trials))
    written = max(trials * (1 - fallback), 1.0)
    back_low, back_high = (float(bound) for bound in wilson(rollback, written))
    return Outcome(law, fallback, source, Independent(low, back_low), Independent(high, back_high), low, high, trials, also=also)


def _agreeing(outcome: Outcome, agreement: float, source: str, whose: str = "large model") -> Outcome:
    return replace(outcome, agreement=agreement, agreement_source=f"{source}: share of tokens that the {whose} would have written")


def _thresholds(parameters: Any) -> tuple[float, float]:
    for name in ("fallback_threshold", "rollback_threshold"):
        if getattr(parameters, name) is None:
            raise checks.ParameterError(f"{name} is required where outcomes come of thresholds; give it under [[method]]")
    return parameters.fallback_threshold, parameters.rollback_threshold


def _refuse_thresholds(parameters: Any, kind: str, names: tuple[str, ...]) -> None:
    for name in names:
        if getattr(parameters, name) is not None:
            raise checks.ParameterError(
                f"{name} has no bearing on outcomes.kind {kind!r}, which states what it comes to; leave it out, or give a record"
            )


@lru_cache(maxsize=8)
def _read_once(read: Callable[[str, str], Any], file: str, source: str, stamp: object) -> Any:
    """What a file holds; every point of a grid asks for it anew, and a long one takes seconds."""
    return read(file, source)


def _stamp(file: str) -> object:
    """What is another once a file has changed; of a file that cannot be read whoever reads it will tell."""
    try:
        found = Path(file).stat()
    except (OSError, ValueError):
        return None
    return found.st_mtime_ns, found.st_size


def _texts_in(file: str, source: str) -> list[Decisions]:
    return _texts_of(file, _columns_of(file), source)


def _record_of(file: str, source: str) -> Decisions:
    columns = _columns_of(file)
    if any(isinstance(value, list) for values in columns.values() for value in values[:1]):
        return _joined(_texts_of(file, columns, source), f"{source}: {file}")
    try:
        return Decisions.of_columns(columns, f"{source}: {file}")
    except checks.ParameterError as error:
        raise checks.ParameterError(f"{error} (of the decision record {file!r})") from None


def _texts_of(file: str, columns: Columns, source: str) -> list[Decisions]:
    """The record of each text of a file that has a list for each in every column."""
    flat = [name for name, values in columns.items() if not values or not all(isinstance(value, list) for value in values)]
    if flat or not columns:
        form = f"a list for each text in every column ({', '.join(threshold_decisions.COLUMNS)})"
        got = f"none in {flat[0]}; without texts, where no column has any, it suits kind 'thresholds'" if flat else "no column"
        raise checks.ParameterError(f"file {file!r} must have {form}, got {got}")
    counts = {name: len(values) for name, values in columns.items()}
    if len({*counts.values()}) > 1:
        listed = ", ".join(f"{name} {count}" for name, count in counts.items())
        raise checks.ParameterError(f"file {file!r} must have as many texts in every column, got {listed}")
    found = []
    for text in range(next(iter(counts.values()))):
        try:
            found.append(Decisions.of_columns({name: values[text] for name, values in columns.items()}, source))
        except checks.ParameterError as error:
            raise checks.ParameterError(f"{error} (of text {text + 1} of the decision record {file!r})") from None
    return found


def _joined(texts: list[Decisions], source: str) -> Decisions:
    columns = {name: np.concatenate([getattr(text, name) for text in texts]) for name in threshold_decisions.COLUMNS}
    return Decisions.of_columns(columns, source)


def _columns_of(file: str) -> Columns:
    if file.lower().endswith(".csv"):
        return _columns_of_csv(file)
    found = json_of(file, "decisions", "JSON or CSV")
    if not isinstance(found, dict) or not all(isinstance(values, list) for values in found.values()):
        raise checks.ParameterError(f"file {file!r} must hold an object of lists, with {', '.join(threshold_decisions.COLUMNS)}")
    return found


def _columns_of_csv(file: str) -> Columns:
    text = text_of(file, "decisions", "JSON or CSV")
    try:
        rows = [row for row in csv.reader(io.StringIO(text)) if row]
    except csv.Error as error:
        raise checks.ParameterError(f"file {file!r} cannot be read: it is not CSV: {error}") from None
    if not rows:
        columns = ", ".join(threshold_decisions.COLUMNS)
        raise checks.ParameterError(f"file {file!r} cannot be read: it is empty; its columns are {columns}")
    names = [name.strip() for name in rows[0]]
    twice = [name for index, name in enumerate(names) if name in names[:index]]
    if twice:
        raise checks.ParameterError(f"file {file!r} must have each column once, got {checks.shown(twice[0])} a second time")
    for number, row in enumerate(rows[1:], start=1):
        if len(row) != len(names):
            form = f"{len(names)} values in each row"
            raise checks.ParameterError(f"file {file!r} must have {form}, got {len(row)} in row {number}")
    return {name: [_value(row[index]) for row in rows[1:]] for index, name in enumerate(names)}


def _value(cell: str) -> Any:
    """What a cell says: true, false, or a number; anything else is left to who checks columns."""
    words = {"true": True, "false": False}
    try:
        return words[cell.strip().lower()] if cell.strip().lower() in words else float(cell)
    except ValueError:
        return cell


DECISIONS: dict[str, type[Rates | RatesByPosition | Thresholds | Replay]] = {
    "rates": Rates, "by-position": RatesByPosition, "thresholds": Thresholds, "replay": Replay,
}  # fmt: skip
"""Laws of what becomes of a small model's token."""


# --- Early exit: how deep a token must go --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hazards:
    """A token that has come to layer j leaves behind it with chance `hazards[j - 1]`; behind the last all do.

    There are as many as the method has layers, 0 before its `first_check`; it has no threshold.
    """

    hazards: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        given: Any = self.hazards
        if not isinstance(given, tuple) or not given:
            raise checks.ParameterError(f"hazards must be a list with a chance for each layer, got {checks.shown(given)}")
        for index, hazard in enumerate(given):
            checks.number(f"hazards[{index}]", hazard, 0, 1)
        check_provenance(None, self.source)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point; no token leaves before it is checked."""
        _refuse_thresholds(parameters, "hazards", ("threshold",))
        if len(self.hazards) != parameters.layers:
            raise checks.ParameterError(
                f"hazards must have one chance for each of layers={parameters.layers}, got {len(self.hazards)}"
            )
        early = [index for index, hazard in enumerate(self.hazards[: parameters.first_check - 1]) if hazard]
        if early:
            raise checks.ParameterError(
                f"hazards must be 0 before first_check={parameters.first_check}, where no token can leave, got"
                f" {self.hazards[early[0]]:g} behind layer {early[0] + 1}"
            )
        law = Depths(exit_pmf(self.hazards), parameters.texts)
        return Outcome(law, law.mean(tokens), self.source)


@dataclass(frozen=True)
class Confidences:
    """How sure each layer was of recorded tokens: a JSON `file` with `confidence`, a list for each token of one number a layer.

    `agrees`, of the same shape, may say whether that layer's token is the last one's. Places draw their tokens from all recorded;
    the method's `threshold`, which may fall with the place, says how deep each must go. Of a decision `log` they are what the
    target's layers say along its text, by the method's measure.
    """

    file: str | None = None
    log: str | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        _one_source(self.file, self.log)
        check_provenance(None, self.source)
        self.record("softmax")

    def record(self, measure: str) -> dict[str, Floats]:
        """Arrays of shape (tokens, layers)."""
        if self.log is not None:
            log = log_of(self.log)
            agrees = log.table["rank_common"].to_numpy() == 1
            agrees[:, -1] = True  # what is put out is the last layer's, drawn or not
            return {"confidence": log.sureness(measure), "agrees": agrees.astype(np.float64)}
        assert self.file is not None
        found = json_of(self.file, "confidences")
        if not isinstance(found, dict) or "confidence" not in found:
            about = "a record is an object that has confidence, and may have agrees"
            raise checks.ParameterError(f"column confidence is missing in {self.file!r}; {about}")
        unknown = [name for name in found if name not in ("confidence", "agrees")]
        if unknown:
            raise checks.ParameterError(f"{checks.unknown('column', unknown[0], ('confidence', 'agrees'))} (of {self.file!r})")
        try:
            tables = {name: self._table(name, rows) for name, rows in found.items()}
            if "agrees" in tables:
                _check_agrees(tables["agrees"], tables["confidence"].shape)
        except checks.ParameterError as error:
            raise checks.ParameterError(f"{error} (of the record {self.file!r})") from None
        return tables

    def _table(self, name: str, rows: Any) -> Floats:
        form = "a list for each token of one number for each layer"
        if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
            raise checks.ParameterError(f"{name} must be {form}, got {checks.shown(rows)}")
        for number, row in enumerate(rows, start=1):
            if len(row) != len(rows[0]):
                raise checks.ParameterError(f"{name} must be {form}, {len(rows[0])} of them, got {len(row)} in row {number}")
            for value in row:
                fits = isinstance(value, int | float) and (name == "agrees" or not isinstance(value, bool))
                if not fits or not 0 <= value <= 1:
                    raise checks.ParameterError(f"{name} must be between 0 and 1, got {checks.shown(value)} in row {number}")
        return np.array(rows, dtype=np.float64)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point: at each place the depths of all recorded tokens, equally likely."""
        if parameters.threshold is None:
            raise checks.ParameterError("threshold is required where outcomes are confidences; give it under [[method]]")
        record = self.record(parameters.measure)
        seen = record["confidence"]
        count, layers = seen.shape
        if layers != parameters.layers:
            raise checks.ParameterError(f"confidence must have a number for each of layers={parameters.layers}, got {layers}")
        needed = {parameters.needed(place) for place in range(tokens)}
        depths = {level: exits(seen, np.full(count, level), first=parameters.first_check) for level in needed}
        shares = {level: np.bincount(found, minlength=layers + 1)[1:] / count for level, found in depths.items()}
        levels = [parameters.needed(place) for place in range(tokens)]
        law = Depths([shares[level] for level in levels], parameters.texts)
        outcome = Outcome(law, law.mean(tokens), f"{self.source}: {self.file or self.log}", trials=count)
        if "agrees" not in record or parameters.texts > 1:
            return outcome
        picked = {level: float(record["agrees"][np.arange(count), found - 1].mean()) for level, found in depths.items()}
        agreement = float(np.mean([picked[level] for level in levels]))
        return _agreeing(outcome, agreement, f"{self.source}: {self.file or self.log}", "last layer")


def _check_agrees(agrees: Floats, shape: tuple[int, ...]) -> None:
    """Refuse answers that do not go with the confidences, or of which one is neither yes nor no."""
    if agrees.shape != shape:
        given = " by ".join(map(str, agrees.shape))
        raise checks.ParameterError(f"agrees must have a value for each of confidence, {shape[0]} by {shape[1]}, got {given}")
    halves = np.argwhere((agrees != 0) & (agrees != 1))
    if halves.size:
        row, layer = halves[0]
        raise checks.ParameterError(f"agrees must be true or false, got {agrees[row, layer]:g} in row {row + 1}")
    wrong = np.flatnonzero(agrees[:, -1] == 0)
    if wrong.size:
        raise checks.ParameterError(
            f"agrees must be true at the last layer, whose token it is compared with, got false in row {wrong[0] + 1}"
        )


EXITS: dict[str, type[Hazards | Confidences]] = {"hazards": Hazards, "confidences": Confidences}
"""Laws of how deep a token must go."""
