"""Do the parts add up to the pass? Layers, head, embedding and overhead, timed at some points, against whole passes at others.

`python -m calibrate.fits.cpu_step` prints it for the rows that are kept in `calibrate/measurements`: processors, eager.

Between contexts times go smoothly, and parts timed behind two of them give the passes behind others to a few percent. Between
widths they do not: a processor's products change their algorithm with the width, so that 12 positions can take longer than 16. A
width that was not timed is therefore not to be trusted on a processor, and `widths=POWERS` shows by how much. What a step takes
beyond its parts is another matter: fitted at those widths and contexts it gives the passes at all others whose parts were timed.

How the rows came about: on a machine of two cores that others use, in rounds over the grid, of which the least disturbed counts
point by point. Rows that say `disturbed` left out repeats in which the thread did not run all the time; those that do not were
timed before that was looked at. Two points, widths 1 and 2 behind 256 beside another process, were timed again in rounds 3 to 7
*after* they were seen to be off: rounds up to `LAST_ROUND` alone are free of that choice, and `main` prints both.

The shortest of several rounds is also the one in which the other process was in the way least: `slowing` is a lower bound.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from calibrate.timing import timing_grid
from calibrate.timing.profile_from_timings import part_rows, quietest
from calibrate.timing.profile_from_timings import profile_of as layers_of
from model.hardware.interpolation import Surface
from model.hardware.profile import Profile

CONTEXTS = (64, 512)
"""Behind which the parts are taken; every other context is held out."""
LAST_ROUND = 2
"""Of those that go over the whole grid; later ones are of points that were chosen by what they showed."""
POWERS = (1, 2, 4, 8, 16)
"""Widths to take parts at, where widths too are held out."""

HELD = (
    ("contexts", None, False),
    ("contexts and widths, the overhead fitted", POWERS, True),
    ("contexts and widths", POWERS, False),
)
"""What is held out: in words, the widths that are fitted at, and whether of them only what a step takes beyond its parts is."""


class HeldOutPass(NamedTuple):
    """A pass that the parts were not taken from: its place, and what the parts say of it and what it took [s]."""

    width: int
    context: int
    batch: int
    busy: int
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        """Relative error of the prediction [-]."""
        return self.predicted / self.measured - 1


def path_of(name: str) -> Path:
    """A file in `calibrate/measurements`, by its name without the ending."""
    return Path(str(resources.files("calibrate") / "measurements" / f"{name}.jsonl"))


def rows_of(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """The machine and the rows of such a file."""
    return timing_grid.read(path_of(name))


def profile_of(name: str) -> Profile:
    """The profile that follows from such a file: the bundled one of its name.

    To bundle another: put its rows into `calibrate/measurements`, and `model.hardware.profile_files.save` this into
    `model/profiles`.
    """
    header, rows = rows_of(name)
    return layers_of(header, rows, "eager", name, path_of(name), "calibrate/measurements/")


def names() -> list[str]:
    """The files there are."""
    folder = resources.files("calibrate") / "measurements"
    return sorted(each.name.removesuffix(".jsonl") for each in folder.iterdir() if each.name.endswith(".jsonl"))


def held_out(
    rows: Sequence[dict[str, Any]], layers: int, widths: Sequence[int] | None = None, mode: str = "eager", *,
    overhead_alone: bool = False,
) -> list[HeldOutPass]:
    """Whole passes behind contexts that the parts were not taken from, beside what the parts say.

    With `widths` parts are taken at these alone, and the passes are those of other widths. With `overhead_alone` besides it is only
    what a step takes beyond its parts that is fitted at these widths; layers, head and embedding are timed at every width.
    """
    points = [row for row in rows if row["kind"] == "point"]
    behind = [row for row in points if row["context"] in CONTEXTS]
    fitted = [row for row in behind if widths is None or row["width"] in widths]
    table, _ = part_rows(fitted, mode, layers)
    if overhead_alone:
        timed, _ = part_rows(behind, mode, layers)
        table = [row for row in timed if row["part"] != "step"] + [row for row in table if row["part"] == "step"]
    found = []
    for (busy, batch, context, width), rounds in timing_grid.shares(rows, mode):
        if context in CONTEXTS or (widths is not None and width in widths):
            continue
        own = [row for row in table if row["busy"] == busy]
        layer = _surface(own, "layer", ("width", "context", "batch"))(width, context, batch).repeated(layers)
        head = _surface(own, "head", ("positions",))(width * batch)
        embedding = _surface(own, "embedding", ("tokens",))(width * batch)
        step = _surface(own, "step", ("batch",))(batch)
        whole = quietest(rounds)["whole_us"][1] / 1e6
        found.append(HeldOutPass(width, context, batch, busy, float((layer + head + embedding + step).seconds), whole))
    return found


def unchosen(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows of whole rounds, without points that were timed again because they had been off."""
    return [row for row in rows if row.get("round", 0) <= LAST_ROUND]


def _surface(table: Sequence[dict[str, Any]], part: str, axes: Sequence[str]) -> Surface:
    chosen = [row for row in table if row["part"] == part]
    return Surface({axis: [row[axis] for row in chosen] for axis in axes}, [row["time_s"] for row in chosen])


def slowing(rows: Sequence[dict[str, Any]], mode: str = "eager", *, typical: bool = False) -> dict[tuple[int, int, int], float]:
    """How much longer a whole pass takes with one other process at the same work, by (width, context, batch): at least [-].

    The two were timed minutes apart, so of either the least disturbed round counts; with `typical` the median of the rounds, which
    has whatever else the machine did in it.
    """
    wholes = {
        place: float(np.median([row["whole_us"][1] for row in rounds]) if typical else quietest(rounds)["whole_us"][1])
        for place, rounds in timing_grid.shares(rows, mode)
    }
    quiet = {place[1:]: whole for place, whole in wholes.items() if place[0] == 0}
    return {
        (width, context, batch): whole / quiet[batch, context, width]
        for (busy, batch, context, width), whole in wholes.items()
        if busy == 1 and (batch, context, width) in quiet
    }


def main() -> None:
    """Print errors and ratios of every file."""
    for name in names():
        header, rows = rows_of(name)
        layers = header["shape"]["layers"]
        print(f"{name}: {header['name']}, {header['threads']} thread, {header['dtype']}, {header['date']}")
        for which, widths, alone in HELD:
            for busy in (0, 1):
                errors = [abs(each.error) for each in held_out(rows, layers, widths, overhead_alone=alone) if each.busy == busy]
                if errors:
                    median, worst = np.median(errors), max(errors)
                    print(f"  other {which}, busy {busy}: {len(errors)} passes, median error {median:.1%}, worst {worst:.1%}")
        before = unchosen(rows)
        errors = [abs(each.error) for each in held_out(before, layers) if each.busy]
        if errors and len(before) < len(rows):
            print(f"  before points were timed again, busy 1: median error {np.median(errors):.1%}, worst {max(errors):.1%}")
        ratios = slowing(rows)
        if ratios:
            low, middle, high = np.percentile([*ratios.values()], (25, 50, 75))
            one = [ratio for (width, _, _), ratio in ratios.items() if width == 1]
            print(f"  with one other process: {middle:.2f} times as long ({low:.2f} to {high:.2f}); width 1: {np.median(one):.2f}")
            low, middle, high = np.percentile([*slowing(rows, typical=True).values()], (25, 50, 75))
            print(f"  by the median round instead of the shortest: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
