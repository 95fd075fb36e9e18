"""Fastest of all methods over the number of running sequences and the context, and the one with the least GPU-time per token."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from figures.common.style import GREY, INK, PALE, panels_in_row, series_styles, styled
from model.base import checks

MOST_DRAWN = 400
"""More cells could not be read."""
HATCH = "////"
TINT = 0.55
"""Share of a method's colour in a cell; the rest is white, so that its numbers can be read."""


class Winner(NamedTuple):
    """A method in a cell: its name, speed-up over plain decoding, and GPU-time per token [ms]."""

    label: str
    speedup: float
    gpu_ms: float


class DrawnCell(NamedTuple):
    """A cell of the map; both methods are None where the memory does not hold the sequences."""

    batch: int
    context: int
    fastest: Winner | None
    cheapest: Winner | None
    tied: bool
    """True if another method is within the interval of the fastest."""


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[DrawnCell]:
    """Cells from the rows of the table of `sim advise --map`."""
    found: dict[tuple[int, int], list[Mapping[str, Any]]] = {}
    for row in rows:
        for name in ("batch", "context"):
            checks.whole(f"table.{name}", row[name], 1, 10**9)
        found.setdefault((row["context"], row["batch"]), []).append(row)
    return [
        DrawnCell(batch, context, _winner(own, "fastest"), _winner(own, "least_gpu_time"), any(row["tied"] for row in own))
        for (context, batch), own in found.items()
    ]


def _winner(rows: Sequence[Mapping[str, Any]], column: str) -> Winner | None:
    for row in rows:
        if row["fits"] and row[column]:
            for name in ("speedup", "gpu_ms_per_token"):
                checks.number(f"table.{name}", row[name], 0, 1e12)
            return Winner(str(row["label"]), float(row["speedup"]), float(row["gpu_ms_per_token"]))
    return None


def draw(cells: Sequence[DrawnCell], *, title: str) -> Figure:
    """Draw both maps, with a square for each cell in the colour of its method, hatched where others are within the interval."""
    checks.whole("cells", len(cells), 1, MOST_DRAWN)
    across, up = (sorted({getattr(each, name) for each in cells}) for name in ("batch", "context"))
    winners = [each for cell in cells for each in (cell.fastest, cell.cheapest) if each is not None]
    labels = list(dict.fromkeys(each.label for each in winners))
    colours = {label: style.colour for label, style in zip(labels, series_styles(len(labels)), strict=True)}
    with styled():
        height = 2.1 + 0.55 * len(up)
        figure, panels = panels_in_row(2, height, 0.6 / height, (0.6 + 0.55 * len(up)) / height, 0.9)
        for axes, name, about in zip(
            panels, ("fastest", "cheapest"), ("fastest method", "least GPU-time per token"), strict=True
        ):
            for cell in cells:
                at = across.index(cell.batch), up.index(cell.context)
                _square(axes, at, getattr(cell, name), colours, tied=cell.tied and name == "fastest", timed=name == "cheapest")
            axes.set_xlim(-0.5, len(across) - 0.5)
            axes.set_ylim(-0.5, len(up) - 0.5)
            axes.set_xticks(range(len(across)), [f"{each:,}" for each in across])
            axes.set_yticks(range(len(up)), [f"{each:,}" for each in up])
            axes.tick_params(length=0)
            axes.spines[["left", "bottom"]].set_visible(False)
            axes.set_xlabel("running sequences")
            axes.set_title(about, loc="left", fontsize=10)
        panels[0].set_ylabel("context [positions]")
        left = 0.8 / figure.get_size_inches()[0]
        figure.text(left, 1 - 0.28 / height, f"Which method is fastest? {title}", fontsize=13, weight="bold", va="center")
        about = "left: speed-up over plain decoding, below it GPU-ms per token; right: GPU-ms per token, below it the speed-up"
        figure.text(left, 1 - 0.55 / height, about, fontsize=9, color=GREY, va="center")
        figure.legend(
            handles=_handles(cells, colours), loc="center left", bbox_to_anchor=(left, 1 - 0.82 / height), ncols=6, borderaxespad=0,
            borderpad=0, fontsize=8.5,
        )  # fmt: skip
    return figure


def _handles(cells: Sequence[DrawnCell], colours: Mapping[str, str]) -> list[Patch]:
    found = [Patch(facecolor=_tint(colour), label=label) for label, colour in colours.items()]
    if any(each.tied for each in cells):
        found.append(Patch(facecolor="white", edgecolor=GREY, hatch=HATCH, linewidth=0, label="another is within its interval"))
    if any(each.fastest is None for each in cells):
        found.append(Patch(facecolor="white", edgecolor=PALE, label="the memory does not hold them"))
    return found


def _tint(colour: str) -> tuple[float, float, float]:
    red, green, blue = (TINT * each + 1 - TINT for each in to_rgb(colour))
    return red, green, blue


def _square(
    axes: Axes, at: tuple[int, int], winner: Winner | None, colours: Mapping[str, str], *, tied: bool, timed: bool
) -> None:
    x, y = at
    box = (x - 0.48, y - 0.46)
    if winner is None:
        axes.add_patch(Rectangle(box, 0.96, 0.92, facecolor="white", edgecolor=PALE, linewidth=0.8))
        return
    axes.add_patch(Rectangle(
        box, 0.96, 0.92, facecolor=_tint(colours[winner.label]), edgecolor="white", hatch=HATCH if tied else None, linewidth=0
    ))  # fmt: skip
    numbers = f"{winner.speedup:.2f}×", f"{winner.gpu_ms:.3g}"
    first, second = reversed(numbers) if timed else numbers
    axes.text(x, y + 0.12, first, ha="center", va="center", fontsize=9.5, color=INK)
    axes.text(x, y - 0.25, second, ha="center", va="center", fontsize=7, color=INK)
