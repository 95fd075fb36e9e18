"""Traces of requests: the Azure CSV form, and JSON lines of benchmarks and of conversations.

A trace gives each request an arrival and the tokens of its prompt and its output. What has no token counts gets an assumed number
of characters per token: conversations, of which those with fewer than two turns are left out, and prompts of `vllm bench`.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterator, Mapping
from datetime import datetime
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from model.base import bounded_files, checks
from model.base.checks import ParameterError
from model.serving.loads import MOST_REQUESTS, TracedRequests

PROMPTS = ("ContextTokens", "prompt_len", "input_len", "input_length", "input_toks", "prompt_tokens", "num_prefill_tokens",
           "input_tokens")  # fmt: skip
OUTPUTS = ("GeneratedTokens", "output_len", "output_length", "output_toks", "completion_tokens", "num_decode_tokens",
           "output_tokens")  # fmt: skip
TIMES = {
    "TIMESTAMP": 1.0, "arrival_s": 1.0, "arrival_time": 1.0, "arrived_at": 1.0, "start_time": 1.0, "timestamp": 1e-3,
}  # fmt: skip
"""Names of the arrival, with its unit [s]: Mooncake's `timestamp` is in milliseconds."""
BUNDLED = {"azure-2023-conversation": "azure_2023_conversation.csv"}
"""Traces that come with the program, by name."""
_CLOCK = re.compile(r"(?P<whole>\d{4}-\d\d-\d\d[T ]\d\d:\d\d(:\d\d)?)(?P<part>\.\d{1,30})?(?P<zone>Z|[+-]\d\d:?\d\d)?", re.ASCII)
LONGEST = 1e10
"""Longest time from the first arrival to the last [s]."""
CHARACTERS = 4.0
"""Characters per token of a text: assumed, a usual figure of English."""


class Trace(NamedTuple):
    """A trace that was read."""

    requests: TracedRequests
    name: str
    notes: tuple[str, ...]


def read(path: str | Path, *, limit: int | None = None) -> Trace:
    """Read a trace, at most `limit` requests of it. Raises ParameterError that names the row and the column."""
    where = Path(path)
    if str(path) in BUNDLED and not where.exists():
        where = Path(str(resources.files("sim") / "serving" / "bundled" / BUNDLED[str(path)]))
    if limit is not None:
        checks.whole("limit", limit, 1, MOST_REQUESTS)
    rows = _csv_rows(where) if where.suffix.lower() == ".csv" else _json_rows(where)
    arrivals: list[float] = []
    prompts: list[int] = []
    outputs: list[int] = []
    estimated: set[str] = set()
    first: float | None = None
    dropped = 0
    for row, fields in rows:
        if limit is not None and len(arrivals) >= limit:
            break
        if len(arrivals) >= MOST_REQUESTS:
            raise ParameterError(f"{where.name} must have at most {MOST_REQUESTS:,} requests; give --requests")
        at = f"{where.name}, {row}"
        found = _tokens(fields, at)
        if found is None:
            dropped += 1
            continue
        time = _time(fields, at)
        if found.estimated:
            estimated.add(found.estimated)
        if time is None and first is not None:
            raise ParameterError(f"{at}: an arrival is missing; all requests need one, or none")
        if time is not None:
            if first is None and arrivals:
                raise ParameterError(f"{at}: it has an arrival, and the rows before have none; all requests need one, or none")
            first = time if first is None else first
            if arrivals and time - first < arrivals[-1]:
                raise ParameterError(
                    f"{at}: arrivals must not decrease, got {time - first:g} s after {arrivals[-1]:g} s; sort the trace by arrival"
                )
            if time - first > LONGEST:
                raise ParameterError(
                    f"{at}: an arrival must be at most {LONGEST:g} s after the first, got {time - first:g} s; correct it, or leave"
                    " the row out"
                )
        arrivals.append(math.nan if time is None or first is None else time - first)
        prompts.append(found.prompt)
        outputs.append(found.output)
    if not arrivals and dropped:
        raise ParameterError(
            f"{where.name} has no requests: its {dropped:,} conversations have fewer than two turns with text; name another file"
        )
    if not arrivals:
        raise ParameterError(
            f"{where.name} has no requests; a CSV needs a line with the names of columns, and a trace a row for each request"
        )
    notes = [f"tokens of {each}: {CHARACTERS:g} characters each are assumed" for each in sorted(estimated)]
    if dropped:
        notes.append(f"{dropped:,} conversations of fewer than two turns with text are left out, as benchmarks do")
    made = TracedRequests(np.array(arrivals), np.array(prompts, dtype=np.int64), np.array(outputs, dtype=np.int64))
    return Trace(made, where.name, tuple(notes))


def _csv_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    reader = csv.DictReader(_lines(path))
    try:
        names = [str(name).strip() for name in reader.fieldnames or ()]
        twice = next((name for name in names if names.count(name) > 1), None)
        if twice is not None:
            raise ParameterError(f"{path.name} must have each column once, got {checks.shown(twice)} twice; rename one")
        for row in reader:
            surplus: Any = row.pop(None, ())
            if any(surplus):
                raise ParameterError(
                    f"{path.name}, row {reader.line_num}: it must have at most {len(names)} values, one for each column, got"
                    f" {len(names) + len(surplus)}; quote a value with a comma in it"
                )
            yield f"row {reader.line_num}", {str(name).strip(): value for name, value in row.items()}
    except csv.Error as error:
        raise ParameterError(f"{path.name}, row {reader.line_num + 1}: it cannot be read as CSV: {error}") from None


def _lines(path: Path) -> Iterator[str]:
    """Lines of a file, which errors name."""
    try:
        yield from bounded_files.text_lines(path)
    except ParameterError as error:
        raise ParameterError(f"{path.name}: {error}" if path.name not in str(error) else str(error)) from None
    except OSError as error:
        raise ParameterError(
            f"trace {checks.shown(str(path))} cannot be read: {error.strerror}; name a CSV of Azure's form, JSON lines, or"
            f" {' or '.join(BUNDLED)}"
        ) from None


def _json_rows(path: Path) -> Iterator[tuple[str, Mapping[str, Any]]]:
    if path.suffix.lower() != ".jsonl" and next(iter(_lines(path)), "").lstrip().startswith("["):
        try:
            entries = bounded_files.json_of(bounded_files.read_text(path))
        except ValueError as error:
            raise ParameterError(f"{path.name} cannot be read as a JSON list: {error}") from None
        for index, each in enumerate(entries, 1):
            yield f"entry {index}", _object(each, f"{path.name}, entry {index}")
        return
    for number, line in enumerate(_lines(path), 1):
        if line.strip():
            try:
                found = bounded_files.json_of(line)
            except ValueError:
                raise ParameterError(f"{path.name}, line {number}: it is no JSON object, got {checks.shown(line[:60])}") from None
            yield f"line {number}", _object(found, f"{path.name}, line {number}")


def _object(found: Any, at: str) -> Mapping[str, Any]:
    if not isinstance(found, Mapping):
        raise ParameterError(f"{at}: a request must be a JSON object, got {checks.shown(found)}")
    return found


class _Tokens(NamedTuple):
    """Tokens of a request, and what they are estimated from, if they are."""

    prompt: int
    output: int
    estimated: str = ""


def _tokens(fields: Mapping[str, Any], at: str) -> _Tokens | None:
    """Tokens of the prompt and the output; None for a conversation of fewer than two turns with text."""
    prompt, output = (next((name for name in names if name in fields), None) for names in (PROMPTS, OUTPUTS))
    if prompt is not None and output is not None:
        return _Tokens(_whole(fields[prompt], prompt, at), _whole(fields[output], output, at))
    turns, text = fields.get("conversations"), fields.get("prompt")
    if isinstance(turns, list) and prompt is None and output is None:
        texts = [each.get("value", each.get("content")) if isinstance(each, Mapping) else None for each in turns[:2]]
        if len(texts) < 2 or not all(isinstance(each, str) and each for each in texts):
            return None
        return _Tokens(_estimated(str(texts[0])), _estimated(str(texts[1])), "conversations")
    if prompt is None and output is not None and isinstance(text, str) and text:
        return _Tokens(_estimated(text), _whole(fields[output], output, at), "prompts")
    lacking, names = ("a prompt", PROMPTS) if prompt is None else ("an output", OUTPUTS)
    got = ", ".join(map(str, fields)) or "nothing"
    raise ParameterError(f"{at}: the tokens of {lacking} are missing; one of {', '.join(names)} is needed, got {got}")


def _estimated(text: str) -> int:
    return max(1, round(len(text) / CHARACTERS))


def _got(value: Any) -> str:
    return "nothing" if value is None or value == "" else checks.shown(value)


def _whole(value: Any, name: str, at: str) -> int:
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if isinstance(value, bool) or not number.is_integer() or not 1 <= number <= checks.MAX_TOKENS:
        raise ParameterError(f"{at}: {name} must be a whole number between 1 and {checks.MAX_TOKENS}, got {_got(value)}")
    return int(number)


def _time(fields: Mapping[str, Any], at: str) -> float | None:
    name = next((name for name in TIMES if name in fields), None)
    if name is None:
        return None
    value = fields[name]
    try:
        seconds = float(value) * TIMES[name]
    except (TypeError, ValueError, OverflowError):
        seconds = _clock(value)
    if not math.isfinite(seconds):
        raise ParameterError(f"{at}: {name} must be a time, in seconds or as 2023-11-16 18:15:46.68, got {_got(value)}")
    return seconds


def _clock(value: Any) -> float:
    """Seconds of a date with a time of day; nan if it is none. Digits beyond microseconds count too; without a zone it is UTC."""
    found = _CLOCK.fullmatch(value.strip()) if isinstance(value, str) else None
    if found is None:
        return math.nan
    try:
        whole = datetime.fromisoformat(found["whole"] + (found["zone"] or "Z"))
    except ValueError:
        return math.nan
    return whole.timestamp() + float(f"0{found['part'] or '.0'}")
