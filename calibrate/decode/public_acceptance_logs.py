"""Acceptance logs that others published: how many tokens a round would give if its draft started at each output position.

JSON lines, a request each: `prompt_token_ids`, `generated_token_ids`, and for each drafter an object `acc_DRAFTER` with `acc_len`,
a list with a number of at least 1 for each output position (the target's own token is counted).
`model.methods.speculative.rates_from_logs` makes rates of them, the outcomes of kind `rounds` replay them.
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
    """One text: its id, tokens of its prompt and of its output, and by output position the tokens of a round that starts there.

    `lengths` need not be as many as `output_tokens`: where a drafter was logged on a text of its own, the two differ.
    """

    id: str
    prompt_tokens: int
    output_tokens: int
    lengths: tuple[int, ...]

    def __post_init__(self) -> None:
        if not self.id:
            raise ParameterError(f"id must be a text that is not empty, got {checks.shown(self.id)}")
        checks.whole("prompt_tokens", self.prompt_tokens, 0)
        checks.whole("output_tokens", self.output_tokens, 1)
        if not self.lengths:
            raise ParameterError(f"lengths must have a number for each output position, got {checks.shown(self.lengths)}")
        for index, length in enumerate(self.lengths):
            checks.whole(f"lengths[{index}]", length, 1, checks.MAX_TOKENS)


@dataclass(frozen=True)
class AcceptanceLog:
    """The requests of one drafter. `source` says what they are: measured by whoever published the file.

    >>> log = AcceptanceLog("eagle", (Request("a", 12, 4, (3, 2, 1, 2)), Request("b", 9, 5, (1, 1))), "assumed: by hand")
    >>> log.lengths, log.of_other_texts
    ([[3, 2, 1, 2], [1, 1]], ('b',))
    """

    drafter: str
    requests: tuple[Request, ...]
    source: str

    def __post_init__(self) -> None:
        if not self.requests:
            raise ParameterError("requests must have at least one, got none")
        seen: set[str] = set()
        for request in self.requests:
            if request.id in seen:
                raise ParameterError(f"ids of requests must differ, got {checks.shown(request.id)} twice; take one of them out")
            seen.add(request.id)

    @property
    def lengths(self) -> list[list[int]]:
        """As `model.methods.speculative.rates_from_logs` takes them; shapes (positions,)."""
        return [[*request.lengths] for request in self.requests]

    @property
    def of_other_texts(self) -> tuple[str, ...]:
        """Ids of requests with more or fewer lengths than output tokens: they were logged on another text than is beside them."""
        return tuple(request.id for request in self.requests if len(request.lengths) != request.output_tokens)


def read(path: str | Path, drafter: str) -> AcceptanceLog:
    """The log of one drafter from a file of JSON lines; see `drafters` for which there are."""
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
            raise ParameterError(f"{path}: ids of requests must differ, got {both}; take one of them out")
        found[request.id] = number
        requests.append(request)
    return AcceptanceLog(drafter, tuple(requests), f"measured: {Path(path).name}, drafter {drafter}")


def drafters(path: str | Path) -> tuple[str, ...]:
    """The drafters that the file's first request names."""
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
        raise ParameterError(f"{path}: it is no text in UTF-8 (byte {error.start + 1}); it must be {FORM}") from None
    rows: list[tuple[int, dict[str, Any]]] = []
    for number, line in enumerate(text.split("\n"), start=1):  # not splitlines: JSON may hold other line ends as they are
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
