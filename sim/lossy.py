"""The [outcomes] of methods whose text is not the target's: what becomes of a small model's token, how deep a token must go.

How far the text agrees with the target's is told by a record, or by nobody: it is never assumed.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from model import checks, coins, decisions
from model.decisions import Decisions, Independent, Recorded
from model.early_exit import exit_pmf, exits
from model.early_exit_lengths import Depths
from model.intervals import wilson
from sim.outcomes import Outcome, check_provenance, text_of

Floats = NDArray[np.float64]

ASSUMED = 100_000
"""Tokens of a record that is drawn from an assumed law."""


# --- Big Little Decoder: what becomes of the small model's token ---------------------------------------------------------


@dataclass(frozen=True)
class Rates:
    """The small model hands over with chance `fallback_rate`; what it writes is taken back with chance `rollback_rate`.

    `trials` says on how many of the small model's runs the rates rest.
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


@dataclass(frozen=True)
class Thresholds:
    """The rates that the method's thresholds come to on a decision record, and the agreement that the record tells of.

    The record is a `file`: JSON (an object of lists) or CSV, with columns confidence, distance and agrees; or it is drawn from the
    law of `model.decisions.synthetic`, which nobody measured, with this `sureness`.
    """

    file: str | None = None
    sureness: float | None = None
    source: str | None = None

    def __post_init__(self) -> None:
        if (self.file is None) == (self.sureness is None):
            raise checks.ParameterError("outcomes.kind 'thresholds' takes either file or sureness, one of the two")
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
        if self.sureness is not None:
            luck = np.concatenate([*coins.tiles(0, "record", 0, 3 * -(-ASSUMED // coins.BLOCK))], axis=None)
            return decisions.synthetic(ASSUMED, luck[: 3 * ASSUMED].reshape(3, ASSUMED), sureness=self.sureness)
        assert self.file is not None
        return _record_of(self.file, self.source or "measured")

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point: independent, with the record's rates; the interval is what so many tokens leave open."""
        low, high = _thresholds(parameters)
        record = self.record()
        found = record.rates(low, high, variant=parameters.variant)
        agreement = float(record.agreement(low, high, parameters.maximum_draft, variant=parameters.variant))
        rates = float(found.fallback_rate), float(np.nan_to_num(found.rollback_rate))
        trials = None if self.sureness is not None else int(record.confidence.size)
        outcome = _independent(*rates, trials, record.source)
        return _agreeing(outcome, agreement, record.source)


@dataclass(frozen=True)
class Replay:
    """The decisions of recorded texts at the method's thresholds: a JSON `file` as for `thresholds`, in each column lists of texts.
    """

    file: str
    source: str = "measured"

    def __post_init__(self) -> None:
        if not isinstance(self.file, str):
            raise checks.ParameterError(f"file must be a path in quotes, got {checks.shown(self.file)}")
        check_provenance(None, self.source)
        self.texts()

    def texts(self) -> list[Decisions]:
        """The record of each text."""
        columns = _columns_of(self.file)
        nested = {name: values for name, values in columns.items() if values and isinstance(values[0], list)}
        if set(nested) != set(columns):
            raise checks.ParameterError(f"file {self.file!r} must have lists of texts, one list for each text, in every column")
        if len({len(values) for values in columns.values()}) > 1:
            raise checks.ParameterError(f"file {self.file!r} must have as many texts in every column")
        count = len(next(iter(columns.values())))
        found = []
        for text in range(count):
            try:
                found.append(Decisions.of_columns({name: values[text] for name, values in columns.items()}, self.source))
            except checks.ParameterError as error:
                raise checks.ParameterError(f"{error} of text {text + 1} in {self.file!r}") from None
        return found

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point; the agreement is that of the tokens of all texts."""
        low, high = _thresholds(parameters)
        texts = self.texts()
        lengths = sorted({text.confidence.size for text in texts})
        if lengths[0] < tokens - 1:
            raise checks.ParameterError(
                f"texts must have decisions for tokens-1={tokens - 1} positions, got {lengths[0]} in the shortest; decode fewer"
                " tokens"
            )
        law = Recorded([text.decided(low, high, variant=parameters.variant)[: lengths[0]] for text in texts])
        columns = {name: np.concatenate([getattr(text, name) for text in texts]) for name in decisions.COLUMNS}
        whole = Decisions.of_columns(columns, self.source)
        found = whole.rates(low, high, variant=parameters.variant)
        agreement = float(whole.agreement(low, high, parameters.maximum_draft, variant=parameters.variant))
        also = {"rollback_rate": float(np.nan_to_num(found.rollback_rate))}
        outcome = Outcome(law, float(found.fallback_rate), self.source, also=also, trials=int(whole.confidence.size))
        return _agreeing(outcome, agreement, self.source)


def _independent(fallback: float, rollback: float, trials: int | None, source: str) -> Outcome:
    law, also = Independent(fallback, rollback), {"rollback_rate": rollback}
    if trials is None:
        return Outcome(law, fallback, source, also=also)
    low, high = (float(bound) for bound in wilson(fallback, trials))
    written = max(trials * (1 - fallback), 1.0)
    back_low, back_high = (float(bound) for bound in wilson(rollback, written))
    return Outcome(law, fallback, source, Independent(low, back_low), Independent(high, back_high), low, high, trials, also=also)


def _agreeing(outcome: Outcome, agreement: float, source: str) -> Outcome:
    return replace(outcome, agreement=agreement, agreement_source=f"{source}: share of tokens that are the large model's own")


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


def _record_of(file: str, source: str) -> Decisions:
    columns = {
        name: [each for text in values for each in text] if values and isinstance(values[0], list) else values
        for name, values in _columns_of(file).items()
    }
    try:
        return Decisions.of_columns(columns, f"{source}: {file}")
    except checks.ParameterError as error:
        raise checks.ParameterError(f"{error} (of the decision record {file!r})") from None


def _columns_of(file: str) -> Mapping[str, list[Any]]:
    text = text_of(file, "decisions")
    if file.endswith(".csv"):
        rows = [*csv.reader(io.StringIO(text))]
        if not rows:
            columns = ", ".join(decisions.COLUMNS)
            raise checks.ParameterError(f"file {file!r} cannot be read: it is empty; its columns are {columns}")
        for number, row in enumerate(rows[1:], start=1):
            if len(row) != len(rows[0]):
                form = f"{len(rows[0])} values in each row"
                raise checks.ParameterError(f"file {file!r} must have {form}, got {len(row)} in row {number}")
        values = {name: [_value(row[index]) for row in rows[1:]] for index, name in enumerate(rows[0])}
        return values
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise checks.ParameterError(f"file {file!r} cannot be read: it is not JSON: {error}; name a JSON or CSV file") from None
    if not isinstance(found, dict) or not all(isinstance(values, list) for values in found.values()):
        raise checks.ParameterError(f"file {file!r} must hold an object of lists, with {', '.join(decisions.COLUMNS)}")
    return found


def _value(cell: str) -> Any:
    words = {"true": 1.0, "false": 0.0}
    return words.get(cell.strip().lower(), cell)


DECISIONS: dict[str, type[Rates | RatesByPosition | Thresholds | Replay]] = {
    "rates": Rates, "by-position": RatesByPosition, "thresholds": Thresholds, "replay": Replay,
}  # fmt: skip
"""Laws of what becomes of a small model's token."""


# --- Early exit: how deep a token must go --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Hazards:
    """A token that has come to layer j leaves behind it with chance `hazards[j - 1]`; behind the last all do."""

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
    the method's threshold, which may fall with the place, says how deep each must go.
    """

    file: str
    source: str = "measured"

    def __post_init__(self) -> None:
        if not isinstance(self.file, str):
            raise checks.ParameterError(f"file must be a path in quotes, got {checks.shown(self.file)}")
        check_provenance(None, self.source)
        self.record()

    def record(self) -> dict[str, Floats]:
        """Arrays of shape (tokens, layers)."""
        text = text_of(self.file, "confidences")
        try:
            found = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise checks.ParameterError(f"file {self.file!r} cannot be read: it is not JSON: {error}") from None
        if not isinstance(found, dict) or "confidence" not in found:
            about = "a record has confidence, and may have agrees"
            raise checks.ParameterError(f"column confidence is missing in {self.file!r}; {about}")
        unknown = [name for name in found if name not in ("confidence", "agrees")]
        if unknown:
            raise checks.ParameterError(f"unknown column {unknown[0]}; {checks.nearest(unknown[0], ('confidence', 'agrees'))}")
        return {name: self._table(name, rows) for name, rows in found.items()}

    def _table(self, name: str, rows: Any) -> Floats:
        form = "a list for each token of one number for each layer"
        if not isinstance(rows, list) or not rows or not all(isinstance(row, list) and row for row in rows):
            raise checks.ParameterError(f"{name} must be {form}, got {checks.shown(rows)}")
        for number, row in enumerate(rows, start=1):
            if len(row) != len(rows[0]):
                raise checks.ParameterError(f"{name} must be {form}, {len(rows[0])} of them, got {len(row)} in row {number}")
            for value in row:
                if not isinstance(value, int | float) or not 0 <= value <= 1:
                    raise checks.ParameterError(f"{name} must be between 0 and 1, got {checks.shown(value)} in row {number}")
        return np.array(rows, dtype=np.float64)

    def outcome(self, parameters: Any, tokens: int) -> Outcome:
        """The law for one point: at each place the depths of all recorded tokens, equally likely."""
        if parameters.threshold is None:
            raise checks.ParameterError("threshold is required where outcomes are confidences; give it under [[method]]")
        record = self.record()
        seen = record["confidence"]
        count, layers = seen.shape
        if layers != parameters.layers:
            raise checks.ParameterError(f"confidence must have a number for each of layers={parameters.layers}, got {layers}")
        needed = {parameters.needed(place) for place in range(tokens)}
        depths = {level: exits(seen, np.full(count, level), first=parameters.first_check) for level in needed}
        shares = {level: np.bincount(found, minlength=layers + 1)[1:] / count for level, found in depths.items()}
        levels = [parameters.needed(place) for place in range(tokens)]
        law = Depths([shares[level] for level in levels], parameters.texts)
        outcome = Outcome(law, law.mean(tokens), f"{self.source}: {self.file}", trials=count)
        if "agrees" not in record or parameters.texts > 1:
            return outcome
        picked = {level: float(record["agrees"][np.arange(count), found - 1].mean()) for level, found in depths.items()}
        agreement = float(np.mean([picked[level] for level in levels]))
        return _agreeing(outcome, agreement, f"{self.source}: {self.file}")


EXITS: dict[str, type[Hazards | Confidences]] = {"hazards": Hazards, "confidences": Confidences}
"""Laws of how deep a token must go."""
