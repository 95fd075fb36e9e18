"""Cost of multi-token passes on a device: time of a pass by tokens per sequence, relative to one token, at several batch sizes.

Drafts are verified in one multi-token pass. Where the curve is flat, verification is free; where it follows the diagonal, verifying
tokens takes as long as decoding them one by one, and no draft can gain.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from figures.common.label_placement import label_at_right
from figures.common.provenance import extrapolated_parts_of, of_hardware, under_title
from figures.common.style import GREY, panels_in_row, series_styles, styled
from model.base import checks
from model.base.checks import ParameterError
from model.hardware.cost_models import Hardware, pass_time

Floats = NDArray[np.float64]

MOST_DEVICES, MOST_BATCHES = 4, 5
BATCHES = (1, 8, 32, 128)


class Curve(NamedTuple):
    """Time of a pass by its width relative to one token, with the error bounds of the estimate; each of shape (widths,) [-]."""

    width: Floats
    relative: Floats
    low: Floats
    high: Floats


def curve(hardware: Hardware, widths: Sequence[int], batch: int, context: int) -> Curve:
    """Time of a pass over `widths` tokens per sequence, relative to a pass over one; logits are computed for all positions."""
    many = np.asarray(widths)
    found = pass_time(hardware, many, context, batch)
    relative = np.asarray(found.seconds / pass_time(hardware, 1, context, batch).seconds)
    # As in `model.costs.pass_seconds`: an error common to both passes cancels; the multi-token pass's separate error is left.
    wrong = np.where(many > 1, found.error, 0.0)
    return Curve(many.astype(np.float64), relative, relative * (1 - wrong), relative * (1 + wrong))


def draw(
    costs: Mapping[str, Hardware], *, batches: Sequence[int] = BATCHES, widest: int = 16, context: int = 1024
) -> Figure:
    """Draw a panel per entry of `costs` (name: cost model), with a curve per batch; the error of the estimate is shaded."""
    if not 1 <= len(costs) <= MOST_DEVICES:
        raise ParameterError(f"costs must be 1 to {MOST_DEVICES}, got {len(costs)}")
    if not 1 <= len(batches) <= MOST_BATCHES:
        raise ParameterError(f"batches must be 1 to {MOST_BATCHES}, got {len(batches)}")
    for batch in batches:
        checks.whole("batch", batch, 1)
    checks.whole("widest", widest, 2, 4096)
    checks.whole("context", context, 0)
    widths = sorted({*range(1, min(widest, 64) + 1), *np.unique(np.geomspace(1, widest, 64).round().astype(int)).tolist()})
    with styled():
        figure, panels = panels_in_row(len(costs), 5.2, 0.11, 0.665, 1.35)
        width = figure.get_figwidth()
        curves = {name: [curve(each, widths, batch, context) for batch in batches] for name, each in costs.items()}
        top = max(2.2, 1.15 * max(float(each.high.max()) for found in curves.values() for each in found))
        for axes, (name, hardware) in zip(panels, costs.items(), strict=True):
            _panel(axes, curves[name], batches, widest, top)
            axes.tick_params(labelleft=axes is panels[0])
            past = extrapolated_parts_of(hardware, width=widest, context=context, batch=max(batches))
            under_title(axes, name, of_hardware(hardware), past)
        panels[0].set_ylabel("pass time, relative to a pass over one token")
        figure.text(0.1 / width, 0.945, "Cost of a forward pass over several tokens", fontsize=13, weight="bold", va="center")
        subtitle = f"context {context:,}; shaded: median error of the estimate"
        figure.text(0.1 / width, 0.89, subtitle, fontsize=9.5, color=GREY, va="center")
        handle = Line2D([], [], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), label="tokens one at a time, in as many passes")
        figure.legend(handles=[handle], loc="center left", bbox_to_anchor=(0.1 / width, 0.842), borderaxespad=0, borderpad=0)
    return figure


def _panel(axes: Axes, curves: Sequence[Curve], batches: Sequence[int], widest: int, top: float) -> None:
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.grid(True)
    most = min(widest, top)  # above the top the diagonal would cross the panel's title
    axes.plot([1, most], [1, most], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1.5, label="one after another")
    ends = []
    for batch, found, style in zip(batches, curves, series_styles(len(batches)), strict=True):
        axes.fill_between(found.width, found.low, found.high, color=style.colour, alpha=0.13, linewidth=0, label=f"off {batch}")
        axes.plot(found.width, found.relative, color=style.colour, linestyle=style.line, linewidth=1.6, label=f"batch {batch}")
        ends.append((float(found.relative[-1]), f"batch {batch}: {found.relative[-1]:.2f}×", style.colour))
    axes.set_xlim(1, widest)
    axes.set_ylim(0.85, top)
    ticks = [2**power for power in range(int(np.log2(widest)) + 1)]
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.yaxis.set_major_locator(FixedLocator([part * 2**power for power in range(int(np.log2(top)) + 1) for part in (1, 1.5)]))
    for axis, unit in ((axes.xaxis, ""), (axes.yaxis, "×")):
        axis.set_minor_locator(NullLocator())
        axis.set_major_formatter(FuncFormatter(lambda value, _, unit=unit: f"{value:g}{unit}"))
    axes.set_xlabel("tokens per sequence in the pass")
    label_at_right(axes, ends)
