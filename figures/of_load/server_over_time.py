"""What a server did over time: running and waiting requests, the draft length that each policy chose, and the cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from figures.common.style import GREY, category_styles, styled
from figures.of_load.throughput_frontier import MOST_CURVES
from model.base import checks

Floats = NDArray[np.float64]
PANELS = {
    "running": "running\nrequests", "waiting": "waiting\nrequests", "draft_length": "draft\nlength",
    "blocks": "blocks of\nthe cache",
}  # fmt: skip
"""Columns of a series, and the labels of their panels."""
MOST_SLICES = 100_000


@dataclass(frozen=True, eq=False)
class ServerSeries:
    """Time series of a policy; arrays of shape (slices,) with means over the steps of the slice that ends at `time_s`."""

    policy: str
    time_s: Floats
    columns: dict[str, Floats]


def series_of(rows: Sequence[Mapping[str, Any]], rate: float | None, concurrency: int | None) -> list[ServerSeries]:
    """Series of the policies at one load, from the key `series` of a document of `sim serve`."""
    found = []
    for row in rows:
        if (row["rate"], row["concurrency"]) != (rate, concurrency) or not row["time_s"]:
            continue
        checks.whole("slices of a series", len(row["time_s"]), 1, MOST_SLICES)
        columns = {name: np.array(row[name], dtype=float) for name in ("time_s", *PANELS)}
        for name, values in columns.items():
            checks.whole(f"values of series.{name}", values.size, len(row["time_s"]), len(row["time_s"]))
        found.append(ServerSeries(str(row["policy"]), columns.pop("time_s"), columns))
    return found


def draw(series: Sequence[ServerSeries], *, title: str) -> Figure:
    """Draw a panel for each quantity, with a line for each policy; panels without any value but 0 are left out."""
    checks.whole("policies", len(series), 1, MOST_CURVES)
    shown = [name for name in PANELS if any(each.columns[name].any() for each in series)] or ["running"]
    with styled():
        width, panel, top, bottom = 8.6, 1.35, 0.85, 0.55
        height = top + bottom + panel * len(shown)
        figure = Figure(figsize=(width, height))
        FigureCanvasAgg(figure)
        styles = category_styles(len(series))
        axes: list[Axes] = []
        for index, name in enumerate(shown):
            low = (bottom + panel * (len(shown) - 1 - index) + 0.12) / height
            each = figure.add_axes((0.11, low, 0.62, (panel - 0.24) / height), sharex=axes[0] if axes else None)
            for one, style in zip(series, styles, strict=True):
                values = one.columns[name]
                each.plot(np.concatenate([[0.0], one.time_s]), np.concatenate([values[:1], values]), drawstyle="steps-pre",
                          color=style.colour, linewidth=1.2, linestyle=style.line)  # fmt: skip
            each.set_ylim(bottom=0)
            each.set_xlim(left=0)
            each.yaxis.set_major_locator(MaxNLocator(4, integer=name != "draft_length"))
            each.set_ylabel(PANELS[name], fontsize=9)
            each.grid(True)
            each.tick_params(labelbottom=name == shown[-1])
            axes.append(each)
        axes[-1].set_xlabel("simulated time [s]")
        handles = [Line2D([], [], color=style.colour, linestyle=style.line, linewidth=1.2, label=one.policy[:30])
                   for one, style in zip(series, styles, strict=True)]  # fmt: skip
        axes[0].legend(handles=handles, title="policy", loc="upper left", bbox_to_anchor=(1.03, 1.0), borderaxespad=0)
        figure.text(0.11, 1 - 0.27 / height, f"A server over time: {title}", fontsize=13, weight="bold", va="center")
        figure.text(0.11, 1 - 0.54 / height, "means over the steps of a slice; draft length: per decoding sequence", fontsize=9,
                    color=GREY, va="center")  # fmt: skip
    return figure
