"""Best draft length of a server over the number of running sequences and the context: where to switch drafting off."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from figures.common.style import GREY, INK, PALE, canvas, styled
from model.base import checks

MOST_CELLS = 4000


class MapCell(NamedTuple):
    """A cell of the map; `draft_length` None: the cache does not hold so much, and `gain` over plain decoding is then None."""

    running: int
    context: int
    draft_length: int | None
    gain: float | None


def cells_of(rows: Sequence[Mapping[str, Any]]) -> list[MapCell]:
    """Cells from the rows `by_context` of a document of `sim serve`."""
    found = []
    for row in rows:
        for name in ("running", "context"):
            checks.whole(f"by_context.{name}", row[name], 1, 10**9)
        if row["draft_length"] is not None:
            checks.whole("by_context.draft_length", row["draft_length"], 0, 10**6)
            checks.number("by_context.gain_over_off", row["gain_over_off"], 0, 1e9)
        found.append(MapCell(row["running"], row["context"], row["draft_length"], row["gain_over_off"]))
    return found


def draw(cells: Sequence[MapCell], *, title: str) -> Figure:
    """Draw a square for each cell: its colour and number are the best draft length, and the small number its gain."""
    checks.whole("cells", len(cells), 1, MOST_CELLS)
    across, up = (sorted({getattr(each, name) for each in cells}) for name in ("running", "context"))
    longest = max((each.draft_length or 0 for each in cells), default=0)
    with styled():
        width, height = max(6.8, 1.6 + 0.52 * len(across)), 1.6 + 0.55 * len(up)
        figure, axes = canvas(width, height, (0.1, 0.6 / height, 0.88, 0.55 * len(up) / height))
        for each in cells:
            _square(axes, across.index(each.running), up.index(each.context), each, longest)
        axes.set_xlim(-0.5, len(across) - 0.5)
        axes.set_ylim(-0.5, len(up) - 0.5)
        axes.set_xticks(range(len(across)), [f"{each:,}" for each in across])
        axes.set_yticks(range(len(up)), [f"{each:,}" for each in up])
        axes.tick_params(length=0)
        axes.spines[["left", "bottom"]].set_visible(False)
        axes.set_xlabel("running sequences")
        axes.set_ylabel("context [positions]")
        figure.text(0.1, 1 - 0.28 / height, f"Where drafting pays: {title}", fontsize=13, weight="bold", va="center")
        about = "large: best draft length (off: none); small: its tokens per second over plain decoding"
        figure.text(0.1, 1 - 0.55 / height, about, fontsize=9, color=GREY, va="center")
        if any(each.draft_length is None for each in cells):
            mark = Patch(facecolor="white", edgecolor=PALE, hatch="////", label="the cache does not hold them")
            figure.legend(handles=[mark], loc="center left", bbox_to_anchor=(0.1, 1 - 0.8 / height), borderaxespad=0, borderpad=0)
    return figure


def _square(axes: Axes, x: int, y: int, cell: MapCell, longest: int) -> None:
    box = (x - 0.48, y - 0.46)
    if cell.draft_length is None:
        axes.add_patch(Rectangle(box, 0.96, 0.92, facecolor="white", edgecolor=PALE, hatch="////", linewidth=0))
        return
    share = cell.draft_length / longest if longest else 0.0
    pale, dark = np.array(to_rgb("#f2f2f2")), np.array(to_rgb("#0b4f8a"))
    # From a tint that stands out from "off" to the darkest, so that order shows in grey too.
    mixed = pale if not cell.draft_length else pale + (dark - pale) * (0.25 + 0.75 * share)
    axes.add_patch(Rectangle(box, 0.96, 0.92, facecolor=tuple(mixed), linewidth=0))
    ink = "white" if mixed.mean() < 0.55 else INK
    axes.text(x, y + 0.12, str(cell.draft_length or "off"), ha="center", va="center", fontsize=10.5, color=ink)
    if cell.gain is not None and cell.draft_length:
        axes.text(x, y - 0.25, f"{cell.gain:.2f}×", ha="center", va="center", fontsize=6.5, color=ink)
