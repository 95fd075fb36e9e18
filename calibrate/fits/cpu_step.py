"""Accuracy of pass times summed from parts on a CPU: parts timed at some points, compared with whole passes at others.

`python -m calibrate.fits.cpu_step` prints it for the rows in `calibrate/measurements` (CPUs, eager mode). The parts are layers,
head, embedding and overhead per step.

Times are smooth between contexts: parts timed at two contexts predict the passes at others to a few percent. They are not smooth
between widths: a CPU's matrix products change their algorithm with the width, so that 12 positions can take longer than 16.
Interpolation between widths is therefore unreliable on a CPU; `widths=POWERS` shows by how much. The overhead per step is
different: fitted at those widths and contexts, it holds at all others whose parts were timed.

The rows were timed on a shared machine with two cores, in rounds over the grid; the least disturbed round of each point is used.
Rows with `disturbed` exclude repeats in which the thread was interrupted; rows without it were timed before that check existed. Two
points (widths 1 and 2 after 256 positions, next to another process) were timed again in rounds 3 to 7 *after* their errors were
seen. Only rounds up to `LAST_ROUND` are free of that selection; `main` prints both results.

The shortest of several rounds is also the one with the least interference from the other process, so `slowdowns` is a lower bound.
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
"""Contexts of the parts; all other contexts are held out."""
LAST_ROUND = 2
"""Last round over the whole grid; later rounds repeat points that were selected by their results."""
POWERS = (1, 2, 4, 8, 16)
"""Widths of the parts if widths are held out, too."""

HOLD_OUTS = (
    ("contexts", None, False),
    ("contexts and widths, overhead fitted", POWERS, True),
    ("contexts and widths", POWERS, False),
)
"""Kinds of hold-out: a label, the fitted widths, and True if only the overhead per step is fitted at these widths."""


class HeldOutPass(NamedTuple):
    """A held-out pass: its point of the grid, and its predicted and measured time [s]."""

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
    """Path of NAME.jsonl in `calibrate/measurements`."""
    return Path(str(resources.files("calibrate") / "measurements" / f"{name}.jsonl"))


def rows_of(name: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Read the machine's header and the rows of such a file."""
    return timing_grid.read(path_of(name))


def profile_of(name: str) -> Profile:
    """Derive the bundled profile of this name from its file.

    To bundle another profile, put its rows into `calibrate/measurements`, and save this function's result into `model/profiles`
    with `model.hardware.profile_files.save`.
    """
    header, rows = rows_of(name)
    return layers_of(header, rows, "eager", name, path_of(name), "calibrate/measurements/")


def names() -> list[str]:
    """Names of the files."""
    folder = resources.files("calibrate") / "measurements"
    return sorted(each.name.removesuffix(".jsonl") for each in folder.iterdir() if each.name.endswith(".jsonl"))


def held_out(
    rows: Sequence[dict[str, Any]], layers: int, widths: Sequence[int] | None = None, mode: str = "eager", *,
    overhead_alone: bool = False,
) -> list[HeldOutPass]:
    """Whole passes at held-out contexts, with the prediction from the parts.

    With `widths`, parts are used at these widths only, and the passes have other widths. With `overhead_alone`, only the overhead
    per step is fitted at these widths, and layers, head and embedding are used at every width.
    """
    points = [row for row in rows if row["kind"] == "point"]
    at_contexts = [row for row in points if row["context"] in CONTEXTS]
    fitted = [row for row in at_contexts if widths is None or row["width"] in widths]
    table, _ = part_rows(fitted, mode, layers)
    if overhead_alone:
        timed, _ = part_rows(at_contexts, mode, layers)
        table = [row for row in timed if row["part"] != "step"] + [row for row in table if row["part"] == "step"]
    found = []
    for (busy, batch, context, width), rounds in timing_grid.shares(rows, mode):
        if context in CONTEXTS or (widths is not None and width in widths):
            continue
        equally_busy = [row for row in table if row["busy"] == busy]
        layer = _surface(equally_busy, "layer", ("width", "context", "batch"))(width, context, batch).repeated(layers)
        head = _surface(equally_busy, "head", ("positions",))(width * batch)
        embedding = _surface(equally_busy, "embedding", ("tokens",))(width * batch)
        step = _surface(equally_busy, "step", ("batch",))(batch)
        whole = quietest(rounds)["whole_us"][1] / 1e6
        found.append(HeldOutPass(width, context, batch, busy, float((layer + head + embedding + step).seconds), whole))
    return found


def unselected_rows(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows of rounds over the whole grid, without points that were timed again because of their errors."""
    return [row for row in rows if row.get("round", 0) <= LAST_ROUND]


def _surface(table: Sequence[dict[str, Any]], part: str, axes: Sequence[str]) -> Surface:
    chosen = [row for row in table if row["part"] == part]
    return Surface({axis: [row[axis] for row in chosen] for axis in axes}, [row["time_s"] for row in chosen])


def slowdowns(rows: Sequence[dict[str, Any]], mode: str = "eager", *, typical: bool = False) -> dict[tuple[int, int, int], float]:
    """Ratio of the time of a whole pass next to one equally loaded process to its time alone, by (width, context, batch) [-].

    A lower bound: the two were timed minutes apart, and the least disturbed round of each is used. With `typical` it is the median
    round, which includes other load on the machine.
    """
    wholes = {
        point: float(np.median([row["whole_us"][1] for row in rounds]) if typical else quietest(rounds)["whole_us"][1])
        for point, rounds in timing_grid.shares(rows, mode)
    }
    quiet = {point[1:]: whole for point, whole in wholes.items() if point[0] == 0}
    return {
        (width, context, batch): whole / quiet[batch, context, width]
        for (busy, batch, context, width), whole in wholes.items()
        if busy == 1 and (batch, context, width) in quiet
    }


def main() -> None:
    """Print the errors and ratios of every file."""
    for name in names():
        header, rows = rows_of(name)
        layers = header["shape"]["layers"]
        print(f"{name}: {header['name']}, {header['threads']} thread, {header['dtype']}, {header['date']}")
        for which, widths, alone in HOLD_OUTS:
            for busy in (0, 1):
                errors = [abs(each.error) for each in held_out(rows, layers, widths, overhead_alone=alone) if each.busy == busy]
                if errors:
                    median, worst = np.median(errors), max(errors)
                    print(f"  other {which}, busy {busy}: {len(errors)} passes, median error {median:.1%}, worst {worst:.1%}")
        whole_rounds = unselected_rows(rows)
        errors = [abs(each.error) for each in held_out(whole_rounds, layers) if each.busy]
        if errors and len(whole_rounds) < len(rows):
            print(f"  before points were timed again, busy 1: median error {np.median(errors):.1%}, worst {max(errors):.1%}")
        ratios = slowdowns(rows)
        if ratios:
            low, middle, high = np.percentile([*ratios.values()], (25, 50, 75))
            single = [ratio for (width, _, _), ratio in ratios.items() if width == 1]
            print(f"  next to one process: {middle:.2f} times as long ({low:.2f} to {high:.2f}); width 1: {np.median(single):.2f}")
            low, middle, high = np.percentile([*slowdowns(rows, typical=True).values()], (25, 50, 75))
            print(f"  in the median round instead of the shortest: {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
