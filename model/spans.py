"""What really happened when, in a run on real processes: the fields of the simulator's intervals, in measured seconds."""

from __future__ import annotations

from typing import NamedTuple


class Span(NamedTuple):
    """A stretch of time of a run [s, on one monotonic clock for all processes], under the names of `sim.events.Interval`.

    * `forward`: a unit makes a pass; for a sub-process from when its rows are there.
    * `head`: the main process projects onto the vocabulary and looks for a token.
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
    role: str = "target"
    width: int = 1
    depth: int = 0
    gaps: tuple[tuple[int, int], ...] = ()
    rows_only: bool = False

    @property
    def seconds(self) -> float:
        """How long it took."""
        return self.end - self.start
