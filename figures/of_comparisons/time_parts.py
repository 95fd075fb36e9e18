"""Waterfall from the predicted to the measured time of one run, part by part."""

from __future__ import annotations

from collections.abc import Mapping
from textwrap import fill
from typing import Any, NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.common.style import COLOURS, GREY, INK, canvas, require_columns, styled
from model.base import checks
from model.logs.prediction_error import PARTS
from model.methods import registry

_NAMES = {
    "target": "target\npasses", "draft": "draft\npasses", "medium": "medium\npasses", "reads": "heads\nand reads",
    "transfers": "starting\nprocesses", "waiting": "waiting", "rest": "the\nrest",
}  # fmt: skip
_MORE, _LESS, _WHOLE = COLOURS[1], COLOURS[0], GREY
_WHOSE = ("predicted", "measured")
_NEEDED = ("method", "settings", "error", *(f"{whose}_{part}_s" for part in (*PARTS, "total") for whose in _WHOSE))
_NOTHING = 1e-9  # [s]: parts below are absent from the run
_CUT = 0.35  # share of the axis: steps that fill less make it start above 0


class Step(NamedTuple):
    """A part of the whole, as predicted and as measured [s]."""

    part: str
    predicted: float
    measured: float

    @property
    def more(self) -> float:
        """Measured minus predicted time [s]."""
        return self.measured - self.predicted


def steps(row: Mapping[str, Any]) -> list[Step]:
    """Return the parts of a run that take any time.

    >>> times = {f"{whose}_{part}_s": 0.0 for whose in ("predicted", "measured") for part in PARTS}
    >>> steps(times | {"predicted_target_s": 2.0, "measured_target_s": 1.5, "measured_rest_s": 0.25})
    [Step(part='target', predicted=2.0, measured=1.5), Step(part='rest', predicted=0.0, measured=0.25)]
    """
    found = [Step(part, row[f"predicted_{part}_s"], row[f"measured_{part}_s"]) for part in PARTS]
    return [each for each in found if max(abs(each.predicted), abs(each.measured)) > _NOTHING]


def draw(table: pl.DataFrame, row: int | None = None) -> Figure:
    """Draw a waterfall [ms]: the predicted total, the measured minus predicted time of each part, the measured total.

    `table` is written by `sim compare`; `row` is the number of its row, by default the one with the largest error. Totals include
    the prompt, in which all parts were timed; for several processes they are those of the main process.
    """
    rows = require_columns(table, "the figure of times by part", _NEEDED, ("prompt", "units"))
    if row is None:
        row = int(rows["error"].abs().arg_max() or 0)
        which = f"the largest error of {rows.height} decodings" if rows.height > 1 else "the only decoding"
    else:
        checks.whole("row", row, 0, rows.height - 1)
        which = f"row {row} of {rows.height} decodings"
    chosen = rows.row(row, named=True)
    with styled():
        figure, axes = canvas(8.6, 4.9, (0.1, 0.145, 0.875, 0.63))
        _bars(axes, chosen)
        predicted, measured = chosen["predicted_total_s"], chosen["measured_total_s"]
        settings = f" ({chosen['settings']})" if chosen["settings"] else ""
        off = _signed(100 * (predicted / measured - 1))
        figure.text(0.1, 0.945, "Where does the prediction go wrong?", fontsize=13, weight="bold", va="center")
        name = registry.label(chosen["method"], short=True)
        prompt = f", {chosen['prompt']}" if chosen["prompt"] else ""
        said = f"{fill(f'{name}{settings}{prompt}', 110)}\nthe prediction, prompt included, is off by {off} %; {which}"
        if (chosen["units"] or 1) > 1:
            said += f"\nthe main process of {chosen['units']} processes: its passes and what it reads from the others"
        figure.text(0.1, 0.91, said, fontsize=9.5, color=GREY, va="top", linespacing=1.4)
    return figure


def _bars(axes: Axes, row: Mapping[str, Any]) -> None:
    found = steps(row)
    predicted, measured = 1e3 * row["predicted_total_s"], 1e3 * row["measured_total_s"]
    levels = [predicted]
    for each in found:
        levels.append(levels[-1] + 1e3 * each.more)
    low, high = min(*levels, measured), max(*levels, measured)
    cut = high - low < _CUT * high
    bottom = max(low - 0.35 * (high - low), 0.0) if cut else min(0.0, low)
    if high - low < 1e-6 * high:  # all equal to the prediction
        bottom = 0.0
    axes.set_ylim(bottom, high + 0.16 * (high - bottom))
    positions = range(len(found) + 2)
    for position, value, label in ((0, predicted, "predicted"), (positions[-1], measured, "measured")):
        axes.bar(position, value - bottom, 0.62, bottom=bottom, color=_WHOLE, zorder=2, label=label)
        _word(axes, position, value, f"{value:.1f}", bold=True)
    for position, each, before, after in zip(positions[1:], found, levels, levels[1:], strict=False):
        grew = each.more > 0
        axes.bar(position, abs(after - before), 0.62, bottom=min(before, after), color=_MORE if grew else _LESS, zorder=2,
                 hatch="" if grew else "///", edgecolor="white", linewidth=0, label=each.part)  # fmt: skip
        label = f"{_signed(1e3 * each.more)}\n({_number(1e3 * each.predicted)} → {_number(1e3 * each.measured)})"
        _word(axes, position, max(before, after), label)
    for position, level in enumerate(levels):
        axes.plot([position - 0.31, position + 0.69], [level, level], color=INK, linewidth=0.8, zorder=3, label="carried over")
    axes.set_xticks(positions, ["predicted\ntotal", *(_NAMES[each.part] for each in found), "measured\ntotal"])
    axes.tick_params(axis="x", length=0)
    axes.grid(True, axis="y")
    axes.set_ylabel("time [ms]" + (f"  (axis starts at {bottom:.0f})" if bottom > 0 else ""))


def _word(axes: Axes, x: float, y: float, text: str, *, bold: bool = False) -> None:
    style: dict[str, Any] = {"fontsize": 9, "weight": "bold" if bold else "normal", "linespacing": 1.15}
    axes.annotate(text, (x, y), (0, 4), textcoords="offset points", ha="center", va="bottom", **style)


def _signed(value: float) -> str:
    return "+" * (value > 0) + _number(value)


def _number(value: float) -> str:
    return f"{round(value, 1) + 0.0:.1f}".replace("-", "\N{MINUS SIGN}")  # without a signed zero
