"""A real and a simulated run side by side: busy intervals of each processor, measured above, simulated below, on one time axis."""

from __future__ import annotations

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from figures.common.style import GREY, INK, LINES, canvas, require_columns, styled
from figures.of_runs import timeline
from model.base.checks import ParameterError

NAMES = ("measured", "simulated")
_NEEDED = ("unit", "start", "end", "what", "process", "position", "first", "last", "fate")
_INCHES = (10.0, 1.15, 0.65, 1.15, 0.5)  # width, left, bottom, top around the axes, and between them
_AT_RIGHT = 2.75


def draw(
    measured: pl.DataFrame, predicted: pl.DataFrame, title: str = "Does the simulated run look like the real one?",
    between: tuple[float, float] | None = None,
) -> Figure:
    """Draw the same run twice, with one bar per interval in its unit's row, like the timeline.

    Both frames have the columns of `model.logs.spans.Span`, with times in seconds; each run begins at its first interval.
    With `between` (start, end) [ms] only that stretch is shown, with intervals cut at its ends. The dashed line is the run's end.
    """
    frames = [aligned(frame, name) for frame, name in zip((measured, predicted), NAMES, strict=True)]
    ends = [float(frame["end"].max()) for frame in frames]  # type: ignore[arg-type]
    start, end = (0.0, 1.02 * max(ends)) if between is None else between
    if not 0 <= start < end:
        raise ParameterError(f"between must be a start and a later end in ms, got {between}")
    with styled():
        parts = [timeline.prepared(_within(frame, start, end, name)) for frame, name in zip(frames, NAMES, strict=True)]
        width, left, bottom, top, gap = _INCHES
        heights = [timeline.inches(names, links=bool((rows["unit"] < 0).any())) for rows, names in parts]
        kinds = [kind for rows, _ in parts for kind in rows["kind"]]
        spare = max(timeline.legend_height(kinds) - sum(heights) - gap, 0.0) / 2
        heights = [each + spare for each in heights]
        height = bottom + sum(heights) + gap + top
        across = left / width, (width - left - _AT_RIGHT) / width
        figure, upper = canvas(width, height, (across[0], 1 - (top + heights[0]) / height, across[1], heights[0] / height))
        lower = figure.add_axes((across[0], bottom / height, across[1], heights[1] / height))
        present: list[str] = []
        for axes, (rows, names), name, last in zip((upper, lower), parts, NAMES, ends, strict=True):
            axes.set_xlim(start, end)
            present += [kind for kind in timeline.panel(axes, rows, names) if kind not in present]
            _frame(axes, name, last)
        upper.tick_params(labelbottom=False)
        lower.set_xlabel("time [ms]")
        figure.text(left / width, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center")
        off = f"{100 * (ends[1] / ends[0] - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
        said = f"measured {ends[0]:.1f} ms, simulated {ends[1]:.1f} ms with times from profiles ({off}); dashed: end of each run"
        figure.text(left / width, 1 - 0.58 / height, said, fontsize=9.5, color=GREY, va="center")
        several = any(bool((rows["depth"] > 0).any()) for rows, _ in parts)
        timeline.legend(figure, present, False, 1 - top / height, several=several)
    return figure


def aligned(intervals: pl.DataFrame, name: str) -> pl.DataFrame:
    """Shift intervals to begin at 0 and convert to ms; a simulated pass of no layers becomes a `head`.

    >>> step = {"unit": 0, "what": "forward", "process": 0, "position": 3, "first": 12, "last": 12, "fate": "kept"}
    >>> aligned(pl.DataFrame([step | {"start": 2.0, "end": 2.5}]), "one").select("start", "end", "what").row(0)
    (0.0, 500.0, 'head')
    """
    rows = require_columns(intervals, f"the Gantt chart, {name},", _NEEDED)
    first = pl.col("start").min()
    head = (pl.col("what") == "forward") & (pl.col("first") == pl.col("last"))
    start, end = (1e3 * (pl.col(name) - first) for name in ("start", "end"))
    return rows.with_columns(start=start, end=end, what=pl.when(head).then(pl.lit("head")).otherwise("what"))


def rounds(measured: pl.DataFrame, predicted: pl.DataFrame, tokens: int = 6) -> tuple[float, float]:
    """Start and end [ms] of a stretch of about `tokens` tokens; it begins after the first, whose prompt takes long."""
    starts: list[float] = []
    stops: list[float] = []
    for frame, name in zip((measured, predicted), NAMES, strict=True):
        rows = aligned(frame, name)
        own = rows.filter(unit=0, what="forward").sort("start")
        began = own.group_by("position", maintain_order=True).agg(pl.col("start").first())["start"].to_list()
        began.append(float(rows["end"].max()))  # type: ignore[arg-type]
        starts.append(began[min(1, len(began) - 2)])
        stops.append(began[min(1 + tokens, len(began) - 1)])
    return min(starts), max(stops)


def _within(rows: pl.DataFrame, start: float, end: float, name: str) -> pl.DataFrame:
    """Intervals between start and end, cut there; refuse a stretch without any."""
    found = rows.filter(pl.col("end") > start, pl.col("start") < end)
    if not found.height:
        raise ParameterError(f"between must hold a part of both runs, got {start:g} to {end:g} ms, where the {name} one has none")
    return found.with_columns(pl.col("start").clip(start, end), pl.col("end").clip(start, end))


def _frame(axes: Axes, name: str, last: float) -> None:
    axes.set_title(name, fontsize=10.5)
    axes.axvline(last, color=INK, linewidth=1.2, linestyle=LINES[1], zorder=3, label=f"end {name}")
    axes.xaxis.set_major_locator(MaxNLocator(nbins=10))
    axes.grid(True, axis="x")
