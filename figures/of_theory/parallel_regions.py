"""Where one pass that drafts all tokens beats a pass for each: a map over the acceptance that is lost, and the draft's cost."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke
from numpy.typing import NDArray

from figures.common.style import COLOURS, GREY, INK, canvas, styled
from model.base import checks
from model.methods.speculative import parallel_drafts

Floats = NDArray[np.float64]

_CELLS = 160
_LEVELS = (0.6, 0.8, 1.0, 1.25, 1.5, 2.0)
MOST_RATES = 4
"""Most acceptance rates in one figure."""


def ratios(acceptance_rate: float, losses: Floats, cost_ratios: Floats, longest: int) -> Floats:
    """Speed-up of the best parallel draft over that of the best chain, shape (losses, cost ratios).

    The parallel draft has the acceptance rate less the loss (at least 0), and its pass takes as long as one of the chain.

    >>> ratios(0.8, np.array([0.0, 0.3]), np.array([0.0, 0.2]), 7).round(3).tolist()
    [[1.0, 1.857], [0.479, 0.889]]
    """
    chain = parallel_drafts.best_chain(acceptance_rate, cost_ratios, longest)[1]
    lower = np.maximum(acceptance_rate - losses, 0.0)[:, None]
    return np.asarray(parallel_drafts.best_parallel(lower, cost_ratios[None], longest)[1] / chain)


def draw(acceptance_rates: Sequence[float] = (0.6, 0.8, 0.9), *, longest: int = 7, most_cost: float = 0.4) -> Figure:
    """Draw a map per acceptance rate of the chain; the line at 1 is `parallel_drafts.break_even_acceptance`.

    Verifications of all widths take as long as a pass over one token; many tokens. Acceptance is an assumption of the map.
    """
    checks.whole("number of acceptance_rates", len(acceptance_rates), 1, MOST_RATES)
    checks.number("most_cost", most_cost, 1e-3, 10)
    with styled():
        count = len(acceptance_rates)
        width, height = max(1.2 + 3.5 * count, 10.4), 4.6  # the subtitle needs ten inches
        figure, only = canvas(width, height, (0, 0, 1, 1))
        only.remove()
        for index, rate in enumerate(acceptance_rates):
            axes = figure.add_axes(((0.85 + 3.5 * index) / width, 0.62 / height, 3.1 / width, 2.85 / height))
            _map(axes, rate, longest, most_cost)
            axes.set_title(f"chain accepts {rate:.2g}", fontsize=9.5)
            if not index:
                axes.set_ylabel("acceptance rate lost in parallel")
        left = 0.85 / width
        title = "One pass for all drafted tokens, or a pass for each?"
        figure.text(left, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="center")
        subtitle = (
            f"speed of the best parallel draft over the best chain, K up to {longest}; many tokens,"
            " a verification of any width takes one pass of the target"
        )
        figure.text(left, 1 - 0.58 / height, subtitle, fontsize=9.5, color=GREY, va="center")
    return figure


def _map(axes: Axes, rate: float, longest: int, most_cost: float) -> None:
    losses, costs = np.linspace(0, rate, _CELLS), np.linspace(0, most_cost, _CELLS)
    found = ratios(rate, losses, costs, longest)
    axes.contourf(costs, losses, found, levels=[0, 1, 1e9], colors=["#e3e3e3", "#b9d9ee"])
    lines = axes.contour(costs, losses, found, levels=_LEVELS, colors=[GREY], linewidths=0.8)
    axes.clabel(lines, fontsize=8, fmt="%g", colors=INK)
    root = rate - parallel_drafts.break_even_acceptance(rate, costs, longest)
    axes.plot(costs, root, color=COLOURS[0], linewidth=2, label="equally fast")
    axes.set_xlim(0, most_cost)
    axes.set_ylim(0, rate)
    axes.set_xlabel("time of a draft pass / pass of the target")
    for x, y, words, side in ((0.97, 0.03, "one pass is faster", "right"), (0.03, 0.93, "a pass for each is faster", "left")):
        axes.text(x, y, words, transform=axes.transAxes, ha=side, fontsize=9, color=INK).set_path_effects(
            [withStroke(linewidth=2.5, foreground="#ffffff")]
        )
