"""What does one layer take on a device, and which part of that is attention? By the context, at several batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from figures.common.label_placement import at_right
from figures.common.provenance import beyond, is_measured, parts_said, under_title
from figures.common.style import GREY, house, looks, side_by_side
from model.base import checks
from model.base.checks import ParameterError
from model.hardware.profile import Profile
from model.hardware.profile_costs import ProfileCosts

Floats = NDArray[np.float64]

MOST_PROFILES, MOST_BATCHES = 3, 4
BATCHES = (1, 8, 32)
LONGEST = 8192


class LayerTimes(NamedTuple):
    """A layer by context, each of shape (contexts,) [s]: as a whole, and without its attention where that is known apart."""

    context: Floats
    whole: Floats
    products: Floats | None


class Stored(NamedTuple):
    """Contexts at which every part of a layer's time is a row of the table as it stands, and that time [s]; shape (rows,)."""

    context: Floats
    whole: Floats


def times(hardware: ProfileCosts, contexts: Sequence[int] | Floats, batch: int) -> LayerTimes:
    """One layer over one new token of each of `batch` texts. What reductions take, of a split layer, is in the products' part."""
    at = np.asarray(contexts, dtype=np.float64)
    whole = np.broadcast_to(hardware.layer(1, at, batch).seconds, at.shape)
    if "layer" in hardware.profile.parts:
        return LayerTimes(at, whole, None)
    return LayerTimes(at, whole, np.asarray(whole - hardware.attention(1, at, batch).seconds))


def stored(hardware: ProfileCosts, batch: int) -> Stored:
    """The rows of the profile that a layer at this batch is read from without interpolating."""
    part = "attention" if "layer" not in hardware.profile.parts else "layer"
    rows = hardware.profile.rows(part, hardware.ways)
    rows = rows.filter((rows["width"] == 1) & (rows["batch"] == batch))
    contexts = np.sort(rows["context"].to_numpy().astype(np.float64))
    if part == "attention" and batch not in hardware.profile.rows("dense", hardware.ways)["tokens"]:
        contexts = contexts[:0]
    return Stored(contexts, np.broadcast_to(hardware.layer(1, contexts, batch).seconds, contexts.shape))


def draw(profiles: Sequence[Profile], *, batches: Sequence[int] = BATCHES, longest: int = LONGEST, ways: int = 1) -> Figure:
    """A panel for each profile, a curve for each batch: the whole layer, dashed its products, and between them its attention.

    Points are rows of the table: filled where both parts were measured, hollow where one was composed.
    """
    if not 1 <= len(profiles) <= MOST_PROFILES:
        raise ParameterError(f"profiles must be 1 to {MOST_PROFILES}, got {len(profiles)}")
    if not 1 <= len(batches) <= MOST_BATCHES:
        raise ParameterError(f"batches must be 1 to {MOST_BATCHES}, got {len(batches)}")
    for batch in batches:
        checks.whole("batch", batch, 1)
    checks.whole("longest", longest, 256, checks.MAX_TOKENS)
    models = [ProfileCosts(each, ways=ways) for each in profiles]
    with house():
        figure, panels = side_by_side(len(profiles), 5.3, 0.105, 0.655, 1.75)
        width = figure.get_figwidth()
        for axes, hardware in zip(panels, models, strict=True):
            _panel(axes, hardware, batches, longest)
        panels[0].set_ylabel("time of one layer [µs]")
        title = "What one layer takes, and its attention's part of that"
        figure.text(0.1 / width, 0.95, title, fontsize=13, weight="bold", va="center")
        split = "" if ways == 1 else f", layers split {ways} ways (GEMMs include their reductions)"
        figure.text(0.1 / width, 0.9, f"one new token of each sequence{split}", fontsize=9.5, color=GREY, va="center")
        _legend(figure, width)
    return figure


def _panel(axes: Axes, hardware: ProfileCosts, batches: Sequence[int], longest: int) -> None:
    profile = hardware.profile
    parts = ("layer",) if "layer" in profile.parts else ("dense", "attention")
    measured = all(is_measured(profile, part, hardware.ways) for part in parts)
    contexts = np.unique(np.geomspace(128, longest, 120).round())
    ends = []
    for batch, look in zip(batches, looks(len(batches)), strict=True):
        found, rows = times(hardware, contexts, batch), stored(hardware, batch)
        axes.plot(contexts, 1e6 * found.whole, color=look.colour, linewidth=1.6, label=f"whole {batch}")
        if found.products is not None:
            axes.plot(
                contexts, 1e6 * found.products, color=look.colour, linewidth=1.2, linestyle=(0, (4, 1.6)), label=f"products {batch}"
            )
            axes.fill_between(contexts, 1e6 * found.products, 1e6 * found.whole, color=look.colour, alpha=0.12, linewidth=0)
        shown = _apart(rows.context, contexts[0], contexts[-1])
        axes.plot(
            rows.context[shown], 1e6 * rows.whole[shown], linestyle="none", marker=look.marker, markersize=5.5, zorder=3,
            markerfacecolor=look.colour if measured else "white", markeredgecolor=look.colour, markeredgewidth=1.2,
            label=f"rows {batch}",
        )  # fmt: skip
        ends.append((1e6 * float(found.whole[-1]), f"batch {batch}: {1e6 * found.whole[-1]:,.0f}", look.colour))
    axes.set_xscale("log", base=2)
    axes.set_xlim(contexts[0] / 1.08, contexts[-1] * 1.08)
    axes.set_ylim(bottom=0)
    axes.grid(True)
    ticks = [float(2**power) for power in range(7, int(np.log2(longest)) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(ticks[::2] if len(ticks) > 5 else ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("context [cached positions per sequence]")
    past = beyond(profile, hardware.ways, width=1, context=longest, batch=max(batches))
    under_title(axes, profile.name, parts_said(profile, hardware.ways), past)
    at_right(axes, ends)


def _apart(contexts: Floats, low: float, high: float) -> list[int]:
    """Rows between two contexts, each at least half as long again as the one before: some tables have hundreds."""
    chosen: list[int] = []
    for index, each in enumerate(contexts):
        if low <= each <= high and (not chosen or each >= 1.5 * contexts[chosen[-1]]):
            chosen.append(index)
    return chosen


def _legend(figure: Figure, width: float) -> None:
    dot = {"linestyle": "none", "marker": "o", "markersize": 5.5, "markeredgecolor": GREY, "markeredgewidth": 1.2}
    handles = [
        Line2D([], [], color=GREY, linewidth=1.6, label="whole layer"),
        Line2D([], [], color=GREY, linewidth=1.2, linestyle=(0, (4, 1.6)), label="GEMMs"),
        Patch(facecolor=GREY, alpha=0.2, label="attention"),
        Line2D([], [], markerfacecolor=GREY, label="row of the table: measured", **dot),  # type: ignore[arg-type]
        Line2D([], [], markerfacecolor="white", label="row of the table: composed", **dot),  # type: ignore[arg-type]
    ]
    figure.legend(handles=handles, loc="center left", bbox_to_anchor=(0.1 / width, 0.845), ncols=5, borderaxespad=0, borderpad=0,
                  handlelength=1.6, columnspacing=1.3)  # fmt: skip
