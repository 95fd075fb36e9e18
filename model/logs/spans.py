"""Time spans of a run: of the simulator in its unit of time, of real processes in measured seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

MAIN_PROCESS_KINDS = ("dispatch", "promotion")
"""Spans that occupy the main process, even if recorded for another unit or a link."""


class Span(NamedTuple):
    """Interval in which a process of a run occupies a unit, or a transfer a link (then `unit` is -1).

    Times of simulated runs are in the cost model's unit, times of real runs in seconds on one monotonic clock. `what` is one of:

    * `forward`: a unit makes a pass; in a sub-process of a real run, from the arrival of its KV cache rows on.
    * `head`: the main process computes logits and reads a token; called `read` in simulations in which reads take time.
    * `dispatch`: the main process sends work to other processes.
    * `link` (unit -1): from the dispatch until the sub-process has woken up and received missing rows.
    * `promotion` (unit -1): the state and rows of a sub-process are adopted.
    * `wait`: the main process waits for another process.

    >>> Span(1, 0.0, 0.25, "forward", 3, 17, 0, 6, "kept").seconds
    0.25
    """

    unit: int
    start: float
    end: float
    what: str
    process: int
    position: int  # position of the last token of a pass; -1 if there is none
    first: int  # layers [first, last)
    last: int
    fate: str  # kept, discarded (ended but not used) or cancelled (stopped)
    role: str = "target"  # model of the pass
    width: int = 1  # number of tokens
    depth: int = 0  # number of positions, for several hypotheses or sequences; 0: equal to width
    gaps: tuple[tuple[int, int], ...] = ()  # skipped ranges of layers
    kv_only: bool = False  # only keys and values were computed

    @property
    def earliest(self) -> int:
        """Position of the first token of a pass."""
        return self.position - (self.depth or self.width) + 1

    @property
    def layers_run(self) -> list[tuple[int, int]]:
        """Layers that were run (without gaps), as half-open ranges.

        >>> Span(0, 0.0, 1.0, "forward", 0, 17, 0, 6, "kept", gaps=((2, 4),)).layers_run
        [(0, 2), (4, 6)]
        """
        edges = [self.first, *(edge for gap in self.gaps for edge in gap), self.last]
        return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]

    @property
    def seconds(self) -> float:
        """Duration."""
        return self.end - self.start


STORED_FIELDS = ("unit", "start", "end", "what", "process", "position", "first", "last", "fate", "role", "width", "depth")
"""Fields of a span that files contain; methods over several processes do not use the others."""


def plain(spans: Iterable[Span], run_start: float) -> list[dict[str, Any]]:
    """Spans as stored in files: times relative to `begun`, the start of the run, rounded to 0.1 us.

    >>> plain([Span(1, 7.0, 7.25, "forward", 3, 17, 0, 6, "kept")], 7.0)[0]["end"]
    0.25
    """
    rows = []
    for span in spans:
        row = {name: getattr(span, name) for name in STORED_FIELDS}
        rows.append(row | {name: round(row[name] - run_start, 7) for name in ("start", "end")})
    return rows


def main_process_seconds(spans: Sequence[Span]) -> dict[str, float]:
    """Time of the main process by kind of span [s]; where spans overlap, the time counts for the one that began last.

    Spans overlap because the main process may start processes, or read their outputs, between two layers of a pass.

    >>> whole, within = Span(0, 0.0, 1.0, "forward", 0, 17, 0, 6, "kept"), Span(1, 0.5, 0.75, "dispatch", 1, -1, 0, 0, "kept")
    >>> main_process_seconds([within, whole, Span(1, 0.0, 9.0, "forward", 1, 18, 0, 6, "kept")])
    {'forward': 0.75, 'dispatch': 0.25}
    """
    seconds: dict[str, float] = {}
    open_: list[Span] = []
    main = [span for span in spans if span.unit == 0 or span.what in MAIN_PROCESS_KINDS]
    for span in sorted(main, key=lambda each: (each.start, -each.end)):
        while open_ and open_[-1].end <= span.start:
            open_.pop()
        if open_:
            seconds[open_[-1].what] -= min(span.end, open_[-1].end) - span.start
        seconds[span.what] = seconds.get(span.what, 0.0) + span.seconds
        open_.append(span)
    return seconds


def overlap_with_other_units(spans: Sequence[Span], span: Span) -> float:
    """Time within a span during which at least one other unit made a pass [s].

    >>> rows = [Span(unit, start, start + 1.0, "forward", unit, 0, 0, 6, "kept") for unit, start in ((0, 0.0), (1, 0.5), (2, 0.75))]
    >>> overlap_with_other_units(rows, rows[0])
    0.5
    """
    others = [each for each in spans if each.what == "forward" and each.unit not in (-1, span.unit)]
    overlap, until = 0.0, span.start
    for each in sorted(others, key=lambda other: other.start):
        start, end = max(each.start, until), min(each.end, span.end)
        if end > start:
            overlap += end - start
            until = end
    return overlap
