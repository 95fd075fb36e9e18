"""Published acceptance logs: the tokens of a round that starts at each output position.

Files are JSON lines, one request per line: `prompt_token_ids`, `generated_token_ids`, and for each drafter an object `acc_DRAFTER`
with `acc_len`, a list of whole numbers >= 1, one per output position, which include the target's token.
`model.methods.speculative.rates_from_logs` estimates rates from them; outcomes of kind `rounds` replay them.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from model.base import bounded_files, checks
from model.base.checks import ParameterError

FORM = "JSON lines with prompt_token_ids, generated_token_ids and, for each drafter, acc_DRAFTER with a list acc_len"


@dataclass(frozen=True)
class Request:
    """One request: id, numbers of prompt and output tokens, and the tokens of a round that starts at each output position.

    `len(lengths)` differs from `output_tokens` if the drafter was logged on another output than the file holds.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.id:
            raise ParameterError(f"id must be a non-empty string, got {checks.shown(self.id)}")
        checks.whole("prompt_tokens", self.prompt_tokens, 0)
        checks.whole("output_tokens", self.output_tokens, 1)
        if not self.lengths:
            raise ParameterError(f"lengths must have a number for each output position, got {checks.shown(self.lengths)}")
        for index, length in enumerate(self.lengths):
            checks.whole(f"lengths[{index}]", length, 1, checks.MAX_TOKENS)


@dataclass(frozen=True)
class AcceptanceLog:
    """Requests of one drafter. `source` is their provenance, such as the published file that they were measured for.

    >>> log = AcceptanceLog("eagle", (Request("a", 12, 4, (3, 2, 1, 2)), Request("b", 9, 5, (1, 1))), "assumed: by hand")
    >>> log.lengths, log.of_other_outputs
    ([[3, 2, 1, 2], [1, 1]], ('b',))
    """

    drafter: str
    requests: tuple[Request, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.requests:
            raise ParameterError("requests must hold at least one request, got none")
        seen: set[str] = set()
        for request in self.requests:
            if request.id in seen:
                raise ParameterError(f"ids of requests must differ, got {checks.shown(request.id)} twice; remove one of them")
            seen.add(request.id)

    @property
    def lengths(self) -> list[list[int]]:
        """Lengths of each request, shapes (positions,), as `model.methods.speculative.rates_from_logs` takes them."""
        return [[*request.lengths] for request in self.requests]

    @property
    def of_other_outputs(self) -> tuple[str, ...]:
        """Ids of requests whose numbers of lengths and output tokens differ: the lengths belong to another output."""
        return tuple(request.id for request in self.requests if len(request.lengths) != request.output_tokens)


def read(path: str | Path, drafter: str) -> AcceptanceLog:
    """Read the log of one drafter from a file of JSON lines; `drafters` lists them."""
    rows = _rows(path)
    known = _drafters(path, rows)
    if drafter not in known:
        raise ParameterError(f"{path}: {checks.unknown('drafter', drafter, known)}")
    found: dict[str, int] = {}
    requests: list[Request] = []
    for number, row in rows:
        request = _request(row, f"acc_{drafter}", str(number), f"{path}: row {number}")
        if request.id in found:
            both = f"{checks.shown(request.id)} in rows {found[request.id]} and {number}"
            raise ParameterError(f"{path}: ids of requests must differ, got {both}; remove one of them")
        found[request.id] = number
        requests.append(request)
    return AcceptanceLog(drafter, tuple(requests), f"measured: {Path(path).name}, drafter {drafter}")


def drafters(path: str | Path) -> tuple[str, ...]:
    """Return the drafters of the file's first request."""
    return _drafters(path, _rows(path))


def _drafters(path: str | Path, rows: list[tuple[int, dict[str, Any]]]) -> tuple[str, ...]:
    number, first = rows[0]
    found = tuple(name.removeprefix("acc_") for name in first if name.startswith("acc_"))
    if not found:
        raise ParameterError(f"{path}: row {number} names no drafter, got {checks.shown([*first])}; it must be {FORM}")
    return found


def _request(row: dict[str, Any], key: str, number: str, at: str) -> Request:
    held = row.get(key)
    if not isinstance(held, dict) or not isinstance(held.get("acc_len"), list):
        raise ParameterError(f"{at} has no {key}.acc_len, a list of whole numbers; every row must have one")
    prompt, output = (len(_tokens(row, name, at)) for name in ("prompt_token_ids", "generated_token_ids"))
    try:
        return Request(str(row.get("id", number)), prompt, output, tuple(held["acc_len"]))
    except ParameterError as error:
        raise ParameterError(f"{at}: {error}") from None


def _tokens(row: dict[str, Any], name: str, at: str) -> list[Any]:
    if not isinstance(row.get(name), list):
        raise ParameterError(f"{at} has no {name}, a list of token ids; it must be {FORM}")
    return list(row[name])


def _rows(path: str | Path) -> list[tuple[int, dict[str, Any]]]:
    if not Path(path).is_file():
        raise ParameterError(f"{path}: there is no such file; give one of {FORM}")
    try:
        text = bounded_files.read_text(path)
    except UnicodeDecodeError as error:
        raise ParameterError(f"{path}: it is not text in UTF-8 (byte {error.start + 1}); it must be {FORM}") from None
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON strings may hold other line separators
        if not line.strip():
            continue
        try:
            row = bounded_files.json_of(line)
        except ValueError as error:
            raise ParameterError(f"{path}: row {number}: it is not JSON: {error}; the file must be {FORM}") from None
        if not isinstance(row, dict):
            raise ParameterError(f"{path}: row {number}: it must be an object, got {checks.shown(row)}; the file must be {FORM}")
        rows.append((number, row))
    if not rows:
        raise ParameterError(f"{path}: it is empty; it must be {FORM}")
    return rows
