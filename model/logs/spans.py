"""What happened when in a run: of the simulator in its own unit of time, of real processes in measured seconds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

OWN = ("dispatch", "promotion")
"""What the main process does whoever asks for it."""


class Span(NamedTuple):
    """A stretch of time for which a process of a run held a unit, or a transfer a link (then `unit` is -1).

    Times are in the cost model's unit where a run was simulated, and in seconds on one monotonic clock where it was real.

    * `forward`: a unit makes a pass; for a sub-process of a real run from when its rows are there.
    * `head`: the main process projects onto the vocabulary and looks for a token; simulated, where that takes time, `read`.
    * `dispatch`: the main process says to other processes what they are to do.
    * `link` (unit -1): from there until the sub-process has woken up and has the rows that it lacked.
    * `promotion` (unit -1): a sub-process's state and rows are taken over.
    * `wait`: the main process has nothing to do until another one answers.

    >>> Span(1, 0.0, 0.25, "forward", 3, 17, 0, 6, "kept").seconds
    0.25
    """

    unit: int
    start: float
    end: float
    what: str
    process: int
    position: int  # of the last token of a pass; -1 where there is none
    first: int
    last: int
    fate: str  # kept, discarded (ended, not used), cancelled (stopped)
    role: str = "target"  # whose pass it is
    width: int = 1  # of how many tokens
    depth: int = 0  # at how many positions, of several hypotheses or sequences; 0: at as many as there are tokens
    gaps: tuple[tuple[int, int], ...] = ()  # layers in between that were not run
    kv_only: bool = False  # keys and values alone were made

    @property
    def earliest(self) -> int:
        """The position of the first token of a pass."""
        return self.position - (self.depth or self.width) + 1

    @property
    def layers_run(self) -> list[tuple[int, int]]:
        """The layers that were run, as half-open ranges: between `first` and `last` all but the gaps.

        >>> Span(0, 0.0, 1.0, "forward", 0, 17, 0, 6, "kept", gaps=((2, 4),)).layers_run
        [(0, 2), (4, 6)]
        """
        edges = [self.first, *(edge for gap in self.gaps for edge in gap), self.last]
        return [(low, high) for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start


KEPT = ("unit", "start", "end", "what", "process", "position", "first", "last", "fate", "role", "width", "depth")
"""What files hold of a span; the rest is of methods that do not run over processes."""


def plain(spans: Iterable[Span], begun: float) -> list[dict[str, Any]]:
    """Spans as files hold them: times from the beginning of the run on, to 0.1 us.

    >>> plain([Span(1, 7.0, 7.25, "forward", 3, 17, 0, 6, "kept")], 7.0)[0]["end"]
    0.25
    """
    found = []
    for span in spans:
        said = {name: getattr(span, name) for name in KEPT}
        found.append(said | {name: round(said[name] - begun, 7) for name in ("start", "end")})
    return found


def of_main(spans: Sequence[Span]) -> dict[str, float]:
    """What the main process did, and how long [s]: each moment counts once, for what was begun last.

    Between two layers of a pass of its own it may start processes, or look at what others have made.

    >>> whole, within = Span(0, 0.0, 1.0, "forward", 0, 17, 0, 6, "kept"), Span(1, 0.5, 0.75, "dispatch", 1, -1, 0, 0, "kept")
    >>> of_main([within, whole, Span(1, 0.0, 9.0, "forward", 1, 18, 0, 6, "kept")])
    {'forward': 0.75, 'dispatch': 0.25}
    """
    found: dict[str, float] = {}
    open_: list[Span] = []
    own = [span for span in spans if span.unit == 0 or span.what in OWN]
    for span in sorted(own, key=lambda each: (each.start, -each.end)):
        while open_ and open_[-1].end <= span.start:
            open_.pop()
        if open_:
            found[open_[-1].what] -= min(span.end, open_[-1].end) - span.start
        found[span.what] = found.get(span.what, 0.0) + span.seconds
        open_.append(span)
    return found


def beside(spans: Sequence[Span], span: Span) -> float:
    """For how long of a span another unit made a pass [s]: of several units any.

    >>> rows = [Span(unit, start, start + 1.0, "forward", unit, 0, 0, 6, "kept") for unit, start in ((0, 0.0), (1, 0.5), (2, 0.75))]
    >>> beside(rows, rows[0])
    0.5
    """
    others = [each for each in spans if each.what == "forward" and each.unit not in (-1, span.unit)]
    met, until = 0.0, span.start
    for each in sorted(others, key=lambda other: other.start):
        start, end = max(each.start, until), min(each.end, span.end)
        if end > start:
            met += end - start
            until = end
    return met
