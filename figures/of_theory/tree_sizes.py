"""Tokens per pass and speed-up of tree drafts by the nodes of the tree, for batches of several sizes; the best tree is marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, canvas, series_styles, styled
from model.base import checks
from model.costs.layer_times import UnitCost
from model.costs.step_costs import StepCosts
from model.methods.tree import theory
from model.methods.tree.draft_trees import OptimalTrees, require_rates

_MOST_CURVES = 6
Rates = Sequence[Sequence[float]]


def example() -> tuple[Rates, dict[int, StepCosts], str]:
    """Assumed rates of four candidates at five depths, costs by batch, and a description of the assumptions; nothing is measured.

    A pass over up to 64 tokens takes as long as one over a token, and longer ones in proportion to their tokens; a draft pass takes
    a twentieth.

    >>> rates, costs, _ = example()
    >>> len(rates), [float(cost.plain_times(0)) for cost in costs.values()]
    (5, [1.0, 1.0, 1.0])
    """
    costs: dict[int, StepCosts] = {}
    for batch in (1, 8, 32):
        widths = [1, *range(2, 66)]
        curve = tuple((width, max(1.0, batch * width / 64)) for width in widths)
        costs[batch] = UnitCost(1, cost_ratio=0.05, verify_cost=curve)
    source = "rates assumed; times assumed: a pass over up to 64 tokens takes as long as a plain step, a draft pass 1/20 of it"
    return [[0.62, 0.13, 0.06, 0.035]] * 5, costs, source


def draw(
    rates: Rates, costs: Mapping[int, StepCosts], *, layers: int, nodes: int, source: str, at: int = 0, parallel: bool = False
) -> Figure:
    """Draw, at the left, expected tokens per pass over the nodes of the best tree and of a chain; at the right, the speed-up.

    Parameters
    ----------
    rates
        Rank rates, as deep as the trees may be: `rates[i][r]` that the target's token at depth i + 1 is candidate r + 1.
    costs
        Costs of a batch, by its number of sequences.
    layers, nodes
        Layers of the target, and the largest number of nodes.
    source
        Provenance of rates and times (measured, published or assumed), printed in the figure.
    at
        Position at which a round starts.
    parallel
        True if one pass of the draft gives the candidates of all depths.
    """
    checks.whole("nodes", nodes, 1, 4096)
    require_rates("rates", tuple(tuple(row) for row in rates))
    if not 1 <= len(costs) <= _MOST_CURVES:
        raise checks.ParameterError(f"costs must be those of 1 to {_MOST_CURVES} batches, got {len(costs)}")
    with styled():
        figure, left = canvas(11.6, 4.9, (0.065, 0.12, 0.34, 0.66))
        right = figure.add_axes((0.47, 0.12, 0.34, 0.66))
        _tokens(left, rates, nodes)
        _speeds(right, rates, costs, layers, nodes, at, parallel)
        for axes in (left, right):
            axes.grid(True)
            axes.set_xlim(0, nodes)
            axes.set_ylim(bottom=0)
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
            axes.set_xlabel("nodes of the tree")
        figure.text(0.065, 0.945, "How large a draft tree pays?", fontsize=13, weight="bold", va="center")
        figure.text(0.065, 0.89, source, fontsize=9.5, color=GREY, va="center")
    return figure


def _tokens(axes: Axes, rates: Rates, nodes: int) -> None:
    depth = len(rates)
    trees, (best, chain) = OptimalTrees(rates, nodes, depth), series_styles(2)
    sizes = np.arange(nodes + 1)
    tokens = 1 + np.asarray(trees.accepted[: nodes + 1])
    axes.plot(sizes, tokens, color=best.colour, linestyle=best.line, linewidth=1.5, label="best tree")
    firsts = np.concatenate([[1.0], 1 + np.cumsum(np.cumprod([row[0] for row in rates]))])[: nodes + 1]
    axes.plot(sizes[: firsts.size], firsts, color=chain.colour, linestyle=chain.line, marker=".", linewidth=1.5, label="chain")
    axes.set_ylabel("expected tokens per pass of the target")
    axes.set_title(f"best trees of depth {depth} at most, and chains", fontsize=10.5)
    offset: dict[str, Any] = {"textcoords": "offset points", "fontsize": 8.5}
    axes.annotate("chain", (firsts.size - 1, firsts[-1]), (6, -3), color=chain.colour, **offset)
    axes.annotate("best tree", (nodes, tokens[-1]), (-4, -13), ha="right", color=best.colour, **offset)


def _speeds(
    axes: Axes, rates: Rates, costs: Mapping[int, StepCosts], layers: int, nodes: int, at: int, parallel: bool
) -> None:
    ends = []
    for (batch, cost), style in zip(costs.items(), series_styles(len(costs)), strict=True):
        found = theory.tree_speeds(rates, layers, cost, nodes=nodes, depth=len(rates), at=at, parallel=parallel)
        speeds = np.array([each.speedup or np.nan for each in found])
        best = int(np.nanargmax(speeds))
        axes.plot(speeds, color=style.colour, linestyle=style.line, linewidth=1.5, label=f"batch {batch}")
        axes.plot(
            [best], [speeds[best]], linestyle="none", marker="*", markersize=13, color=style.colour, markeredgecolor="white",
            zorder=3, clip_on=False, label=f"best {batch}",
        )  # fmt: skip
        tree = found[best].tree
        text = "no draft" if tree is None else f"{best} nodes, depth {tree.depth}"
        ends.append((float(speeds[~np.isnan(speeds)][-1]), f"batch {batch}: {text}", style.colour))
    axes.axhline(1, color=INK, linewidth=1.0, zorder=1.8, label="plain")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_ylabel("speed-up over plain decoding")
    axes.set_title("star: best tree of the batch", fontsize=10.5)
    label_at_right(axes, ends)
