"""Acceptance records: counts and rates of accepted draft tokens that a serving engine printed, as one JSON file.

`calibrate import engine-log` writes them; a scenario takes them as outcomes (`kind = "engine-log"`). D drafts with d drafted tokens
have a accepted ones; a mean acceptance length is 1 + a / D, with the target's own (bonus) token. A field that the engine does not
print is null.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np

from model.base import bounded_files, checks, strict_json
from model.base.checks import ParameterError
from model.outcomes.intervals import wilson

KIND = "acceptance-record"
SCHEMA_VERSION = 1
ENGINES = ("vllm", "sglang", "trtllm", "llama.cpp", "lmdeploy", "mlx-lm", "eagle")
"""Engines of records, by the names that `--engine` takes."""
MOST_COUNT = 2**53
"""Maximum of a count; larger whole numbers are not exact as floats."""
MOST_POSITIONS = 1024
"""Maximum draft length of a record [tokens]."""
MOST_REQUESTS = 10_000
"""Maximum number of requests whose separate counts are kept."""
MOST_NOTES = 1000
MOST_CELLS = 100_000
TIMES = ("tpot_ms", "step_ms", "output_tokens_per_s")
"""Units of a cell's time: milliseconds per token and sequence, milliseconds per step, tokens per second of all sequences."""


SEQUENCES, SPANS = (1e-3, 1e6), (1e-9, 1e12)
"""Bounds of a cell's running sequences and of its time or throughput: those of the cells that a step law is fitted to."""


@dataclass(frozen=True)
class LogSource:
    """A file that was read: its name without folders, and its number of lines."""

    file: str
    lines: int

    def __post_init__(self) -> None:
        _text("sources.file", self.file)
        checks.whole("sources.lines", self.lines, 0, MOST_COUNT)


@dataclass(frozen=True)
class Identity:
    """An equation or bound that the printed figures must satisfy: largest difference found, and the tolerance of its rounding."""

    identity: str
    holds: bool
    difference: float
    tolerance: float
    note: str = ""

    def __post_init__(self) -> None:
        _text("identities.identity", self.identity)
        checks.flag("identities.holds", self.holds)
        for name in ("difference", "tolerance"):
            checks.number(f"identities.{name}", getattr(self, name))
        _text("identities.note", self.note, empty=True)


@dataclass(frozen=True)
class MeasuredCell:
    """A measured speed of the engine: sequences running at once, draft length (0: plain), and one time in one of `TIMES`."""

    sequences: float
    draft_length: int | None
    mean_acceptance_length: float | None
    tpot_ms: float | None = None
    step_ms: float | None = None
    output_tokens_per_s: float | None = None
    context: float | None = None
    weight: float | None = None

    def __post_init__(self) -> None:
        checks.number("cells.sequences", self.sequences, *SEQUENCES)
        if self.draft_length is not None:
            checks.whole("cells.draft_length", self.draft_length, 0, MOST_POSITIONS)
        if self.mean_acceptance_length is not None:
            checks.number("cells.mean_acceptance_length", self.mean_acceptance_length, 1, MOST_POSITIONS + 1)
        for name in (*TIMES, "context", "weight"):
            if getattr(self, name) is not None:
                checks.number(f"cells.{name}", getattr(self, name), *(SPANS if name in TIMES else (0,)))
        given = [name for name in TIMES if getattr(self, name) is not None]
        if len(given) != 1 or getattr(self, given[0]) <= 0:
            raise ParameterError(f"a cell must have one of {', '.join(TIMES)}, above 0, got {', '.join(given) or 'none'}")


@dataclass(frozen=True)
class ServedSettings:
    """What the engine's output says of its server; a field is None where it does not say it.

    Parameters
    ----------
    model, draft
        Names of the model and of the draft's checkpoint, as the engine takes them.
    method
        How it drafts: eagle3, eagle, mtp, medusa, draft_model, ngram or another name.
    draft_length
        Drafted tokens per step that were asked for.
    """

    model: str | None = None
    method: str | None = None
    draft: str | None = None
    draft_length: int | None = None

    def __post_init__(self) -> None:
        for name in ("model", "method", "draft"):
            if getattr(self, name) is not None:
                _text(f"served.{name}", getattr(self, name))
        if self.draft_length is not None:
            checks.whole("served.draft_length", self.draft_length, 1, MOST_POSITIONS)


@dataclass(frozen=True)
class AcceptanceRecord:
    """Accepted draft tokens of one engine, summed over files; each field is null if the engine's output does not give it.

    Parameters
    ----------
    engine, dialects, sources
        Name of the engine, the forms of output that were found, and the files.
    draft_length
        Longest draft K [tokens]; null where unknown or mixed. 0: plain decoding.
    drafts, drafted, accepted
        Number of drafts D, of drafted tokens d and of accepted tokens a, without bonus tokens.
    mean_acceptance_length
        Tokens per verification step, bonus token counted: 1 + a / D.
    mean_acceptance_length_rounding
        Half a unit of the last printed digit, if the length was not computed from counts.
    draft_acceptance_rate
        a / d.
    histogram
        Drafts of which exactly j tokens were accepted, j = 0..K.
    survival, survival_low, survival_high
        Share of drafts of which at least i + 1 tokens were accepted, and its 95 % interval (Wilson).
    conditional_rates
        Acceptance by draft position if all tokens before were accepted: ratios of survival; null after a survival of 0, at
        positions that not all drafts reach, and for printed rates that rise.
    requests, per_request
        Number of requests, and their separate counts.
    draft_ms_per_token
        Measured time of drafting one token [ms].
    identities, cells, notes
        Checked equations, measured speeds, remarks of the importer.
    served
        What the output says of its server.
    """

    engine: str
    dialects: tuple[str, ...]
    sources: tuple[LogSource, ...]
    draft_length: int | None = None
    drafts: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    mean_acceptance_length: float | None = None
    mean_acceptance_length_rounding: float | None = None
    draft_acceptance_rate: float | None = None
    histogram: tuple[int, ...] | None = None
    survival: tuple[float, ...] | None = None
    survival_low: tuple[float, ...] | None = None
    survival_high: tuple[float, ...] | None = None
    conditional_rates: tuple[float | None, ...] | None = None
    requests: int | None = None
    per_request: Mapping[str, tuple[float | None, ...]] | None = None
    draft_ms_per_token: float | None = None
    identities: tuple[Identity, ...] = ()
    cells: tuple[MeasuredCell, ...] = ()
    notes: tuple[str, ...] = ()
    served: ServedSettings | None = None

    def __post_init__(self) -> None:
        checks.one_of("engine", self.engine, ENGINES)
        for name in ("dialects", "notes"):
            for text in _list(name, getattr(self, name), MOST_NOTES):
                _text(name, text)
        for name in ("draft_length", "drafts", "drafted", "accepted", "requests"):
            if getattr(self, name) is not None:
                checks.whole(name, getattr(self, name), 0, MOST_POSITIONS if name == "draft_length" else MOST_COUNT)
        if self.accepted is not None and self.drafted is not None and self.accepted > self.drafted:
            raise ParameterError(f"accepted must be at most drafted={self.drafted}, got {self.accepted}")
        for name, low, high in (
            ("mean_acceptance_length", 1, MOST_POSITIONS + 1), ("mean_acceptance_length_rounding", 0, 1),
            ("draft_acceptance_rate", 0, 1), ("draft_ms_per_token", 0, 1e12),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                checks.number(name, getattr(self, name), low, high)
        self._check_positions()
        if self.per_request is not None:
            if not isinstance(self.per_request, Mapping):
                raise ParameterError(f"per_request must be lists by name, got {checks.shown(self.per_request)}")
            for name, values in self.per_request.items():
                for value in _list(f"per_request.{name}", values, MOST_REQUESTS):
                    if value is not None:
                        checks.number(f"per_request.{name}", value, 0)

    def _check_positions(self) -> None:
        """Check the lists by draft position, and that they have one length."""
        if self.histogram is not None:
            for count in _list("histogram", self.histogram, MOST_POSITIONS + 1):
                checks.whole("histogram", count, 0, MOST_COUNT)
        lists = ("survival", "survival_low", "survival_high", "conditional_rates")
        for name in lists:
            values = getattr(self, name)
            if values is None:
                continue
            for index, value in enumerate(_list(name, values, MOST_POSITIONS)):
                if value is not None or name != "conditional_rates":
                    checks.number(f"{name}[{index}]", value, 0, 1)
            if self.survival is None or len(values) != len(self.survival):
                raise ParameterError(f"{name} must have one rate for each of survival, got {len(values)}")
    @property
    def known_rates(self) -> tuple[float, ...]:
        """Conditional rates of the first positions, as far as they are known; 0 after a survival of 0."""
        if self.survival is None or self.conditional_rates is None:
            return ()
        before = (1.0, *self.survival[:-1])
        known = (0.0 if not last else rate for rate, last in zip(self.conditional_rates, before, strict=True))
        return tuple(takewhile(lambda rate: rate is not None, known))  # type: ignore[arg-type]


def _text(name: str, text: object, *, empty: bool = False) -> None:
    if not isinstance(text, str) or len(text) > 2000 or not (text or empty):
        raise ParameterError(f"{name} must be a text of 1 to 2000 characters, got {checks.shown(text)}")


def _list(name: str, values: object, most: int) -> Sequence[Any]:
    if not isinstance(values, tuple):
        raise ParameterError(f"{name} must be a list, got {checks.shown(values)}")
    if len(values) > most:
        raise ParameterError(f"{name} must have at most {most:,} values, got {len(values):,}")
    return values


def with_intervals(record: AcceptanceRecord, reached: int = MOST_POSITIONS) -> AcceptanceRecord:
    """Return the record with conditional rates, and with Wilson intervals if the number of drafts is known.

    `reached` is the number of positions that all drafts reach; rates of those after it are unknown.

    >>> made = with_intervals(AcceptanceRecord("vllm", ("v1",), (), drafts=124, survival=(0.96, 0.48)))
    >>> made.conditional_rates, round(made.survival_low[0], 3), round(made.survival_high[0], 3)
    ((0.96, 0.5), 0.91, 0.983)
    """
    if record.survival is None or np.any(np.diff(record.survival) > 0):  # rates that rise are of no survival
        return record
    before = (1.0, *record.survival[:-1])
    pairs = enumerate(zip(record.survival, before, strict=True))
    rates = tuple(now / last if last and index < reached else None for index, (now, last) in pairs)
    if not record.drafts:
        return replace(record, conditional_rates=rates)
    low, high = wilson(record.survival, record.drafts)
    return replace(
        record, conditional_rates=rates, survival_low=tuple(map(float, low)), survival_high=tuple(map(float, high))
    )


# --- JSON ---


def dumps(record: AcceptanceRecord) -> str:
    """JSON text of a record."""
    return strict_json.dumps(document(record), indent=1) + "\n"


def document(record: AcceptanceRecord) -> dict[str, Any]:
    """Record as a JSON document."""
    return {"kind": KIND, "schema_version": SCHEMA_VERSION, **asdict(record)}


_MAY_LACK: Mapping[str, Any] = {"served": None}
"""Fields that records of earlier versions do not have, with what their absence means."""


def of_document(found: Any) -> AcceptanceRecord:
    """Record of a JSON document; unknown, missing and impossible values are errors."""
    again = "import the engine's log again: calibrate import engine-log FILE -o NAME"
    if not isinstance(found, dict) or found.get("kind") != KIND:
        raise ParameterError(f"it is not an acceptance record: kind must be {KIND!r}; {again}")
    if found.get("schema_version") != SCHEMA_VERSION or isinstance(found["schema_version"], bool):
        raise ParameterError(f"schema_version must be {SCHEMA_VERSION}, got {checks.shown(found.get('schema_version'))}; {again}")
    names = [field.name for field in fields(AcceptanceRecord)]
    given = {**_MAY_LACK} | {name: value for name, value in found.items() if name not in ("kind", "schema_version")}
    for name in given:
        if name not in names:
            raise ParameterError(f"unknown key {checks.shown(name)}; {checks.nearest(name, names)}")
    for name in names:
        if name not in given:
            raise ParameterError(f"{name} is missing; {again}")
    for name, kind in (("sources", LogSource), ("identities", Identity), ("cells", MeasuredCell)):
        given[name] = _records(name, given[name], kind)
    if given["served"] is not None:
        (given["served"],) = _records("served", [given["served"]], ServedSettings)
    if isinstance(given["per_request"], dict):
        given["per_request"] = {name: _tuple(values) for name, values in given["per_request"].items()}
    return AcceptanceRecord(**{name: _tuple(value) for name, value in given.items()})


def _records(name: str, values: Any, kind: type) -> tuple[Any, ...]:
    if not isinstance(values, list) or len(values) > MOST_CELLS:
        raise ParameterError(f"{name} must be a list of at most {MOST_CELLS:,} objects, got {checks.shown(values)}")
    keys = {field.name for field in fields(kind)}
    for value in values:
        if not isinstance(value, dict) or {*value} != keys:
            raise ParameterError(f"{name} must be objects with {', '.join(sorted(keys))}, got {checks.shown(value)}")
    return tuple(kind(**value) for value in values)


def _tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def load(path: str | Path) -> AcceptanceRecord:
    """Read a record from its JSON file; raise `ParameterError` of one line if it is not one."""
    try:
        return of_document(bounded_files.json_of(bounded_files.read_text(path)))
    except UnicodeDecodeError:
        reason = "it is not UTF-8 text"
    except OSError as error:
        reason = error.strerror or str(error)
    except ParameterError as error:
        reason = str(error)
    except ValueError as error:  # a number of thousands of digits is one too
        reason = f"it is not JSON: {str(error).splitlines()[0]}"
    raise ParameterError(f"file {str(path)!r} cannot be read: {reason}")
