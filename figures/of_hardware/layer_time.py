"""Time of one layer on a device, and attention's part of it, over the context at several batch sizes."""

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

from figures.common.label_placement import label_at_right
from figures.common.provenance import extrapolated_parts, is_measured, parts_provenance, under_title
from figures.common.style import GREY, panels_in_row, series_styles, styled
from model.base import checks
from model.base.checks import ParameterError
from model.hardware.profile import Profile
from model.hardware.profile_costs import ProfileCosts

Floats = NDArray[np.float64]

MOST_PROFILES, MOST_BATCHES = 3, 4
BATCHES = (1, 8, 32)
LONGEST = 8192


class LayerTimes(NamedTuple):
    """Times of a layer by context, each of shape (contexts,) [s]: whole, and GEMMs alone if attention was timed separately."""

    context: Floats
    whole: Floats
    gemms: Floats | None


class Stored(NamedTuple):
    """Contexts for which the profile stores all parts of a layer's time, and that time [s]; shape (rows,)."""

    context: Floats
    whole: Floats


def times(hardware: ProfileCosts, contexts: Sequence[int] | Floats, batch: int) -> LayerTimes:
    """Times of one layer over one new token of each of `batch` sequences; GEMMs include the reductions of a split layer."""
    at = np.asarray(contexts, dtype=np.float64)
    whole = np.broadcast_to(hardware.layer(1, at, batch).seconds, at.shape)
    if "layer" in hardware.profile.parts:
        return LayerTimes(at, whole, None)
    return LayerTimes(at, whole, np.asarray(whole - hardware.attention(1, at, batch).seconds))


def stored(hardware: ProfileCosts, batch: int) -> Stored:
    """Return the profile's rows of a layer at this batch, which need no interpolation."""
    part = "attention" if "layer" not in hardware.profile.parts else "layer"
    rows = hardware.profile.rows(part, hardware.tensor_parallel)
    rows = rows.filter((rows["width"] == 1) & (rows["batch"] == batch))
    contexts = np.sort(rows["context"].to_numpy().astype(np.float64))
    if part == "attention" and batch not in hardware.profile.rows("dense", hardware.tensor_parallel)["tokens"]:
        contexts = contexts[:0]
    return Stored(contexts, np.broadcast_to(hardware.layer(1, contexts, batch).seconds, contexts.shape))


def draw(
    profiles: Sequence[Profile], *, batches: Sequence[int] = BATCHES, longest: int = LONGEST, tensor_parallel: int = 1
) -> Figure:
    """Draw a panel per profile and a curve per batch: solid the whole layer, dashed its GEMMs, shaded its attention.

    Points are rows of the table: filled where both parts were measured, hollow where one was composed of operations.
    """
    if not 1 <= len(profiles) <= MOST_PROFILES:
        raise ParameterError(f"profiles must be 1 to {MOST_PROFILES}, got {len(profiles)}")
    if not 1 <= len(batches) <= MOST_BATCHES:
        raise ParameterError(f"batches must be 1 to {MOST_BATCHES}, got {len(batches)}")
    for batch in batches:
        checks.whole("batch", batch, 1)
    checks.whole("longest", longest, 256, checks.MAX_TOKENS)
    models = [ProfileCosts(each, tensor_parallel=tensor_parallel) for each in profiles]
    with styled():
        figure, panels = panels_in_row(len(profiles), 5.3, 0.105, 0.655, 1.75)
        width = figure.get_figwidth()
        for axes, hardware in zip(panels, models, strict=True):
            _panel(axes, hardware, batches, longest)
        panels[0].set_ylabel("time of one layer [µs]")
        title = "Time of one decoder layer, and attention's part of it"
        figure.text(0.1 / width, 0.95, title, fontsize=13, weight="bold", va="center")
        split = "" if tensor_parallel == 1 else f", TP {tensor_parallel} (GEMMs include their reductions)"
        figure.text(0.1 / width, 0.9, f"one new token of each sequence{split}", fontsize=9.5, color=GREY, va="center")
        _legend(figure, width)
    return figure


def _panel(axes: Axes, hardware: ProfileCosts, batches: Sequence[int], longest: int) -> None:
    profile = hardware.profile
    parts = ("layer",) if "layer" in profile.parts else ("dense", "attention")
    measured = all(is_measured(profile, part, hardware.tensor_parallel) for part in parts)
    contexts = np.unique(np.geomspace(128, longest, 120).round())
    ends = []
    for batch, style in zip(batches, series_styles(len(batches)), strict=True):
        layer, rows = times(hardware, contexts, batch), stored(hardware, batch)
        axes.plot(contexts, 1e6 * layer.whole, color=style.colour, linewidth=1.6, label=f"whole {batch}")
        if layer.gemms is not None:
            axes.plot(
                contexts, 1e6 * layer.gemms, color=style.colour, linewidth=1.2, linestyle=(0, (4, 1.6)), label=f"products {batch}"
            )
            axes.fill_between(contexts, 1e6 * layer.gemms, 1e6 * layer.whole, color=style.colour, alpha=0.12, linewidth=0)
        shown = _apart(rows.context, contexts[0], contexts[-1])
        axes.plot(
            rows.context[shown], 1e6 * rows.whole[shown], linestyle="none", marker=style.marker, markersize=5.5, zorder=3,
            markerfacecolor=style.colour if measured else "white", markeredgecolor=style.colour, markeredgewidth=1.2,
            label=f"rows {batch}",
        )  # fmt: skip
        ends.append((1e6 * float(layer.whole[-1]), f"batch {batch}: {1e6 * layer.whole[-1]:,.0f}", style.colour))
    axes.set_xscale("log", base=2)
    axes.set_xlim(contexts[0] / 1.08, contexts[-1] * 1.08)
    axes.set_ylim(bottom=0)
    axes.grid(True)
    ticks = [float(2**power) for power in range(7, int(np.log2(longest)) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(ticks[::2] if len(ticks) > 5 else ticks))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("context [cached positions per sequence]")
    past = extrapolated_parts(profile, hardware.tensor_parallel, width=1, context=longest, batch=max(batches))
    under_title(axes, profile.name, parts_provenance(profile, hardware.tensor_parallel), past)
    label_at_right(axes, ends)


def _apart(contexts: Floats, low: float, high: float) -> list[int]:
    """Indices of rows between two contexts, each at least 1.5 times the one before: some tables have hundreds."""
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
        Line2D([], [], markerfacecolor=GREY, label="table row: measured", **dot),  # type: ignore[arg-type]
        Line2D([], [], markerfacecolor="white", label="table row: composed of operations", **dot),  # type: ignore[arg-type]
    ]
    figure.legend(handles=handles, loc="center left", bbox_to_anchor=(0.1 / width, 0.845), ncols=5, borderaxespad=0, borderpad=0,
                  handlelength=1.6, columnspacing=1.3)  # fmt: skip
