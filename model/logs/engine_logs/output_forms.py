"""Form of an engine's output: how it is found, and how it becomes observations."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from model.logs.engine_logs.observations import Observation, ObservationSums


class Reader(Protocol):
    """Reader of one file: of its lines with a dialect's marks, or of its JSON documents."""

    def take(self, found: Any) -> Iterable[Observation]:
        """Observations that this line or document completes."""
        ...

    def end(self) -> Iterable[Observation | ObservationSums]:
        """Observations that the end of the file completes, or their sums."""
        ...


@dataclass(frozen=True)
class OutputForm:
    """A form of output: lines of text with certain `marks`, or JSON `documents`.

    Both begin a reader for one file, with the draft length that the user gave for output that does not say it (None without one, 0
    for plain decoding). Readers return no observation for what is not of their dialect.
    """

    name: str
    seeks: str
    """Text that the dialect looks for, for messages."""
    marks: tuple[str, ...] = ()
    lines: Callable[[int | None], Reader] | None = None
    documents: Callable[[int | None], Reader] | None = None


class Separate:
    """Reader of a dialect in which no line or document depends on another."""

    def __init__(self, convert: Callable[[Any, int | None], Iterable[Observation]], draft_length: int | None) -> None:
        self.convert, self.draft_length = convert, draft_length

    def take(self, found: Any) -> Iterable[Observation]:
        """Observations of the line or document."""
        return self.convert(found, self.draft_length)

    def end(self) -> Iterable[Observation]:
        """Return nothing."""
        return ()


def separate(convert: Callable[[Any, int | None], Iterable[Observation]]) -> Callable[[int | None], Reader]:
    """Readers that convert each line or document by itself."""
    return partial(Separate, convert)


def objects(document: Any) -> Iterator[dict[str, Any]]:
    """Yield all objects of a JSON document in their order, each before those inside it."""
    stack = [document]
    while stack:
        found = stack.pop()
        if isinstance(found, dict):
            yield found
            stack += [each for each in reversed(found.values()) if isinstance(each, dict | list)]
        elif isinstance(found, list):
            stack += [each for each in reversed(found) if isinstance(each, dict | list)]
