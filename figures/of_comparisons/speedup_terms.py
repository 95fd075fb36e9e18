"""Waterfalls of a speed-up: from a plain step to a step with drafts, term by term; and from a claimed speed-up to the measured
one."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import fill
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from figures.common.style import COLOURS, GREY, INK, canvas, require_columns, styled
from model.base import checks

_NAMES = {
    "verify": "verification",
    "draft": "drafting",
    "overhead": "engine\noverhead",
    "stragglers": "stragglers",
    "rest": "the rest",
}
_MORE, _LESS, _WHOLE = COLOURS[1], COLOURS[0], GREY
_NOTHING = 5e-4
"""Height below which a term is not drawn [plain steps]."""
_TERMS = ("term", "extra", "extra_low", "extra_high")
_SHARES = ("setting", "claimed", "mine", "factor", "low", "high")


def draw(table: pl.DataFrame, acceptance_length: float, speedup: float) -> Figure:
    """Draw the time of a step with drafts [plain steps]: a plain step, and the extra time of each term with its 80 % interval.

    `table` is `Explanation.table` of `sim.explain`.
    """
    rows = require_columns(table, "the figure of a speed-up's terms", _TERMS).to_dicts()
    checks.number("acceptance_length", acceptance_length, 1)
    checks.number("speedup", speedup, 0)
    shown = [row for row in rows if max(abs(row[name]) for name in _TERMS[1:]) > _NOTHING]
    levels = [1.0, *(1.0 + np.cumsum([row["extra"] for row in shown])).tolist()]
    with styled():
        figure, axes = canvas(8.2, 4.6, (0.1, 0.13, 0.875, 0.66))
        _title(figure, "What a step with drafts takes", f"speed-up {speedup:.2f} = {acceptance_length:.2f} tokens per step / "
               f"{levels[-1]:.2f} plain steps; lines: 80 % intervals of the extra times")  # fmt: skip
        high = [level + row["extra_high"] for level, row in zip(levels, shown, strict=False)]
        low = [level + row["extra_low"] for level, row in zip(levels, shown, strict=False)]
        bottom = min(0.0, *levels, *low)
        axes.set_ylim(bottom, 1.16 * max(*levels, *high))
        _whole(axes, 0, levels[0], bottom, "plain\nstep", "1")
        for place, (row, before) in enumerate(zip(shown, levels, strict=False), 1):
            _change(axes, place, before, before + row["extra"], (before + row["extra_low"], before + row["extra_high"]),
                    f"{row['extra']:+.2f}".replace("-", "\N{MINUS SIGN}"), row["term"])  # fmt: skip
        _whole(axes, len(shown) + 1, levels[-1], bottom, "step with\ndrafts", f"{levels[-1]:.2f}")
        _carry(axes, levels)
        _label(axes, ["plain\nstep", *(_NAMES[row["term"]] for row in shown), "step with\ndrafts"])
        axes.set_ylabel("time [plain steps]")
    return figure


def draw_shares(table: pl.DataFrame, claimed: float, measured: float) -> Figure:
    """Draw the way from a claimed speed-up to the measured one, a factor for each difference between the two sides (log axis).

    `table` is `Explanation.shares_table` of `sim.explain`.
    """
    rows = require_columns(table, "the figure of a claim's differences", _SHARES).to_dicts()
    for name, value in (("claimed", claimed), ("measured", measured)):
        checks.number(name, value, 1e-9)
    levels = [claimed]
    for row in rows:
        levels.append(levels[-1] * row["factor"])
    ends = [
        (before * float(np.exp(row["low"])), before * float(np.exp(row["high"]))) for row, before in zip(rows, levels, strict=False)
    ]
    with styled():
        figure, axes = canvas(max(8.2, 1.15 * (len(rows) + 2)), 4.8, (0.1, 0.2, 0.875, 0.6))
        _title(figure, "From the claimed to the measured speed-up", "a factor for each difference, averaged over all orders of"
               " changing them; lines: 80 % intervals; the rest is not explained by these settings")  # fmt: skip
        axes.set_yscale("log")
        everything = [*levels, measured, *(end for pair in ends for end in pair)]
        bottom = min(everything) / 1.3
        axes.set_ylim(bottom, max(everything) * 1.35)
        _whole(axes, 0, claimed, bottom, "claimed", f"{claimed:.2f}x")
        for place, (row, before, after, end) in enumerate(zip(rows, levels, levels[1:], ends, strict=False), 1):
            _change(
                axes, place, before, after, end, f"\N{MULTIPLICATION SIGN}{row['factor']:.2f}", row["setting"], grows_better=True
            )
        _whole(axes, len(rows) + 1, measured, bottom, "measured", f"{measured:.2f}x")
        _carry(axes, levels)
        words = [
            row["setting"] + (f"\n{row['claimed']}\n\N{RIGHTWARDS ARROW} {row['mine']}" if row["claimed"] else "") for row in rows
        ]
        _label(axes, ["claimed", *(fill_each(word) for word in words), "measured"])
        axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
        axes.yaxis.set_minor_formatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "235" else "")
        axes.set_ylabel("speed-up [-]")
    return figure


def fill_each(text: str) -> str:
    """Wrap each line of a label."""
    return "\n".join(fill(line, 16) for line in text.splitlines())


def _title(figure: Figure, title: str, subtitle: str) -> None:
    figure.text(0.1, 0.94, title, fontsize=13, weight="bold", va="center")
    figure.text(0.1, 0.89, fill(subtitle, 105), fontsize=9.5, color=GREY, va="top", linespacing=1.3)


def _whole(axes: Axes, place: int, value: float, bottom: float, label: str, word: str) -> None:
    axes.bar(place, value - bottom, 0.62, bottom=bottom, color=_WHOLE, zorder=2, label=label.replace("\n", " "))
    _word(axes, place, value, word, weight="bold")


def _change(
    axes: Axes,
    place: int,
    before: float,
    after: float,
    ends: tuple[float, float],
    word: str,
    label: str,
    *,
    grows_better: bool = False,
) -> None:
    """A step of the waterfall; changes for the worse are plain, those for the better hatched."""
    worse = (after < before) if grows_better else (after > before)
    axes.bar(place, abs(after - before), 0.62, bottom=min(before, after), color=_MORE if worse else _LESS, zorder=2,
             hatch="" if worse else "///", edgecolor="white", linewidth=0, label=label)  # fmt: skip
    axes.plot([place] * 2, ends, color=INK, linewidth=1.1, zorder=4, label="80 % interval", marker="_", markersize=7)
    _word(axes, place, max(before, after, *ends), word)


def _carry(axes: Axes, levels: Sequence[float]) -> None:
    for place, level in enumerate(levels):
        axes.plot([place - 0.31, place + 0.69], [level, level], color=INK, linewidth=0.8, zorder=3, label="carried over")


def _label(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), [*names], fontsize=9)
    axes.tick_params(axis="x", length=0)
    axes.grid(True, axis="y")


def _word(axes: Axes, x: float, y: float, text: str, **style: Any) -> None:
    axes.annotate(text, (x, y), (0, 4), textcoords="offset points", ha="center", va="bottom", fontsize=9, **style)
