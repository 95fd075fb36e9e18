"""[outcomes] of early exit: the layer at which a token exits.

The agreement of the output with the whole model's comes only from records; it is never assumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from model.base import checks
from model.methods.early_exit.finite_early_exit import Depths
from model.methods.early_exit.theory import exit_pmf, exits, expected_layers
from model.methods.method_parameters import MethodParameters
from sim.scenarios.outcomes.outcome_files import json_of, read_once
from sim.scenarios.outcomes.outcome_records import (
    LawRecord,
    Outcome,
    VariedOutcomes,
    check_one_source,
    check_provenance,
    check_rates,
    checked_parameters,
    log_of,
    refuse_thresholds,
    with_agreement,
)

Floats = NDArray[np.float64]


@runtime_checkable
class LeavesByConfidence(Protocol):
    """Parameters of a method whose tokens exit at the first layer where a measure of confidence reaches a threshold."""

    threshold: float | None
    measure: str

    def exit_threshold(self, column: int) -> float:
        """Confidence required of the token at this position, counted from 0."""


@dataclass(frozen=True)
class ExitHazards(LawRecord):
    """A token that has reached layer j exits after it with probability `hazards[j - 1]`; after the last layer all exit.

    There is one hazard per layer of the method, 0 before its `first_check`; the method must have no threshold.
    """

    RATES = LISTED = ("hazards",)

    hazards: tuple[float, ...]
    source: str = "assumed"

    def __post_init__(self) -> None:
        check_rates("hazards", self.hazards, "a list with a probability for each layer")
        check_provenance(None, self.source)

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point; no token exits before `first_check`."""
        refuse_thresholds(parameters, "hazards", ("threshold",))
        if len(self.hazards) != parameters.layers:
            raise checks.ParameterError(
                f"hazards must have one probability for each of layers={parameters.layers}, got {len(self.hazards)}"
            )
        early = [index for index, hazard in enumerate(self.hazards[: parameters.first_check - 1]) if hazard]
        if early:
            raise checks.ParameterError(
                f"hazards must be 0 before first_check={parameters.first_check}, where no token can exit, got"
                f" {self.hazards[early[0]]:g} after layer {early[0] + 1}"
            )
        law = Depths(exit_pmf(self.hazards), parameters.decoded_sequences)
        return Outcome(law, law.mean(tokens), self.source)

    def varied(
        self, rates: Mapping[str, NDArray[np.float64]], first: Outcome, parameters: MethodParameters
    ) -> VariedOutcomes | None:
        """Outcomes with several lists of hazards; None if an exit is where no token can."""
        (hazards,) = rates.values()
        if hazards[:, : parameters.first_check - 1].any():
            return None
        laws = Depths.each(exit_pmf(hazards), parameters.decoded_sequences)
        return VariedOutcomes(first, laws, None, None, {"rate": expected_layers(hazards)})


@dataclass(frozen=True)
class RecordedConfidences(LawRecord):
    """Recorded confidence of each layer in recorded tokens, from a JSON `file` or a decision `log`.

    The file has `confidence`, a list per token of one number per layer, and optionally `agrees` of the same shape: true if the
    layer's token is the last layer's. Each output position draws from all recorded tokens; the method's `threshold`, which may fall
    with the position, gives the exit layer. From a log the confidence is computed by the method's measure along the target's
    sequences.
    """

    file: str | None = None
    log: str | None = None
    source: str = "measured"

    def __post_init__(self) -> None:
        check_one_source(self.file, self.log)
        check_provenance(None, self.source)
        self.record("softmax")

    def record(self, measure: str) -> dict[str, Floats]:
        """Return arrays of shape (tokens, layers)."""
        if self.log is not None:
            log = log_of(self.log)
            agrees = log.table["rank_common"].to_numpy() == 1
            agrees[:, -1] = True  # the generated token is the last layer's, sampled or not
            return {"confidence": log.confidence_by_layer(measure), "agrees": agrees.astype(np.float64)}
        assert self.file is not None
        found: dict[str, Floats] = read_once(_record_of, self.file, self.source)
        return found

    def outcome(self, parameters: MethodParameters, tokens: int) -> Outcome:
        """Law for one point: at each position, the exit layers of all recorded tokens with equal probability."""
        leaving: LeavesByConfidence = checked_parameters(parameters, LeavesByConfidence, "confidences")
        if leaving.threshold is None:
            raise checks.ParameterError("threshold is required where outcomes are confidences; give it under [[method]]")
        record = self.record(leaving.measure)
        seen = record["confidence"]
        count, layers = seen.shape
        if layers != parameters.layers:
            raise checks.ParameterError(f"confidence must have a number for each of layers={parameters.layers}, got {layers}")
        thresholds = {leaving.exit_threshold(position) for position in range(tokens)}
        depths = {level: exits(seen, np.full(count, level), first=parameters.first_check) for level in thresholds}
        shares = {level: np.bincount(found, minlength=layers + 1)[1:] / count for level, found in depths.items()}
        levels = [leaving.exit_threshold(position) for position in range(tokens)]
        law = Depths([shares[level] for level in levels], parameters.decoded_sequences)
        outcome = Outcome(law, law.mean(tokens), f"{self.source}: {self.file or self.log}", trials=count)
        if "agrees" not in record or parameters.decoded_sequences > 1:
            return outcome
        picked = {level: float(record["agrees"][np.arange(count), found - 1].mean()) for level, found in depths.items()}
        agreement = float(np.mean([picked[level] for level in levels]))
        return with_agreement(outcome, agreement, f"{self.source}: {self.file or self.log}", "last layer")


def _record_of(file: str, _: str) -> dict[str, Floats]:
    found = json_of(file, "confidences")
    if not isinstance(found, dict) or "confidence" not in found:
        about = "a record is an object with confidence and, optionally, agrees"
        raise checks.ParameterError(f"column confidence is missing in {file!r}; {about}")
    unknown = [name for name in found if name not in ("confidence", "agrees")]
    if unknown:
        raise checks.ParameterError(f"{checks.unknown('column', unknown[0], ('confidence', 'agrees'))} (of {file!r})")
    try:
        tables = {name: _table(name, rows) for name, rows in found.items()}
        if "agrees" in tables:
            _check_agrees(tables["agrees"], tables["confidence"].shape)
    except checks.ParameterError as error:
        raise checks.ParameterError(f"{error} (of the record {file!r})") from None
    return tables


def _table(name: str, rows: Any) -> Floats:
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


def _check_agrees(agrees: Floats, shape: tuple[int, ...]) -> None:
    """Check that `agrees` has the shape of `confidence` and only values true and false, true at the last layer."""
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


KINDS: dict[str, type[LawRecord]] = {"hazards": ExitHazards, "confidences": RecordedConfidences}
