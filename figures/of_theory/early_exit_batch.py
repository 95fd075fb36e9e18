"""Early exit in a batch, which waits for its last token to exit: layers and time per token over the batch size.

[t5x] google-research/t5x, t5x/contrib/calm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import ArrayLike, NDArray

from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, SeriesStyle, canvas, series_styles, styled
from model.base import checks
from model.methods.early_exit.theory import MEASURES, exit_pmf, expected_layers, expected_time

Floats = NDArray[np.float64]

MOST_PROFILES = 4
_MOST_TICKS = 9
_LINES = {"softmax": (0, ()), "state": (0, (4, 1.6))}
_WORDS = {"softmax": "a projection onto the vocabulary per check", "state": "a comparison of two hidden states per check"}


class EarlyExitCosts(NamedTuple):
    """Prices that `model.methods.early_exit.theory.expected_time` takes."""

    head: float
    check: float
    propagation: float
    first: int


def deepest(hazards: ArrayLike, batch: int) -> Floats:
    """Hazards h_1, ..., h_L of the exit of a whole batch: probability that its deepest token exits after a layer that it reached.

    Tokens are independent. A batch that requires all its tokens to be confident at the same layer, like [t5x], goes deeper still: a
    token that was confident may not be so at the next layer.

    >>> deepest([0.5, 0.5, 1.0], 1).tolist(), deepest([0.5, 0.5, 1.0], 2).round(3).tolist()
    ([0.5, 0.5, 1.0], [0.25, 0.417, 1.0])
    """
    checks.whole("batch", batch, 1)
    gone = np.clip(np.cumsum(exit_pmf(hazards)), 0.0, 1.0)
    arriving = 1 - np.concatenate([[0.0], gone[:-1]]) ** batch
    staying = np.concatenate([arriving[1:], [0.0]])
    return np.asarray(1 - np.divide(staying, arriving, out=np.zeros_like(staying), where=arriving > 0))


def draw(
    profiles: Mapping[str, Sequence[float]],
    *,
    batches: Sequence[int],
    head: float,
    check: float = 0.0,
    propagation: float = 0.0,
    first: int = 1,
    source: str,
) -> Figure:
    """Draw, at the left, the layers per token of a batch; at the right, the time per token, for both measures of confidence.

    `profiles` are hazards by name, h_1 to h_L, all with the same number of layers; the other parameters are those of
    `model.methods.early_exit.theory.expected_time`. A pass takes equally long for a batch and for one token. `source` is the
    provenance of the hazards (measured, published or assumed), printed in the figure.
    """
    layers = _check(profiles, batches)
    sizes = np.array(sorted(set(batches)))
    prices = EarlyExitCosts(head, check, propagation, first)
    with styled():
        figure, left = canvas(12.2, 5.1, (0.06, 0.11, 0.29, 0.66))
        right = figure.add_axes((0.54, 0.11, 0.29, 0.66))
        depths, times = [], []
        for (name, hazards), style in zip(profiles.items(), series_styles(len(profiles)), strict=True):
            means = [float(expected_layers(hazards, int(size))) for size in sizes]
            left.plot(sizes, means, color=style.colour, marker=style.marker, markersize=4.5, linewidth=1.5, label=name)
            depths.append((means[-1], f"{name}: {means[-1]:.1f}", style.colour))
            times += _times(right, name, hazards, sizes, prices, style)
        for axes, whole, words in ((left, float(layers), "all layers"), (right, layers + head, "whole model")):
            axes.axhline(whole, color=INK, linewidth=1.2, linestyle=(0, (1.2, 1.2)), label=words)
            _frame(axes, sizes)
        label_at_right(left, [*depths, (float(layers), f"all {layers} layers", INK)])
        label_at_right(right, [*times, (layers + head, f"whole model: {layers + head:.1f}", INK)])
        left.set_ylabel("mean layers per token")
        right.set_ylabel("time per token  [layer-times]")
        left.set_title("The batch continues until its last token exits", fontsize=10.5)
        right.set_title("With checks and projection", fontsize=10.5)
        title = "How much of early exit's gain remains in a batch?"
        figure.text(0.02, 0.945, title, fontsize=13, weight="bold", va="center")
        parts = [f"head {head:g}", f"state check {check:g}", f"KV cache of a skipped layer {propagation:g} layer-times"]
        subtitle = f"{layers} layers, tokens independent; exit probabilities {source}; {', '.join(parts)}"
        figure.text(0.02, 0.895, subtitle, fontsize=9.5, color=GREY, va="center")
        handles = [Line2D([], [], color=GREY, linestyle=line, linewidth=1.5, label=f"{name}: {_WORDS[name]}")
                   for name, line in _LINES.items()]  # fmt: skip
        figure.legend(handles=handles, loc="center left", bbox_to_anchor=(0.017, 0.85), ncols=2, borderaxespad=0, borderpad=0)
    return figure


def _check(profiles: Mapping[str, Sequence[float]], batches: Sequence[int]) -> int:
    """Return the number of layers of all profiles."""
    if not 1 <= len(profiles) <= MOST_PROFILES:
        raise checks.ParameterError(f"profiles must be 1 to {MOST_PROFILES}, got {len(profiles)}")
    if not batches:
        raise checks.ParameterError("batches must have at least one size, got none")
    depths = {name: len(exit_pmf(hazards)) for name, hazards in profiles.items()}
    if len(set(depths.values())) > 1:
        listed = ", ".join(f"{name} {depth}" for name, depth in depths.items())
        raise checks.ParameterError(f"profiles must have the same number of layers, got {listed}")
    for size in batches:
        checks.whole("batch", size, 1)
    return next(iter(depths.values()))


def _times(
    axes: Axes, name: str, hazards: Sequence[float], sizes: NDArray[np.int64], prices: EarlyExitCosts, style: SeriesStyle
) -> list[tuple[float, str, str]]:
    """Draw the time for both measures, and return the end, the name and the colour of each curve."""
    ends = []
    for measure in MEASURES:
        values = [float(expected_time(deepest(hazards, int(size)), measure=measure, **prices._asdict())) for size in sizes]
        axes.plot(
            sizes, values, color=style.colour, linestyle=_LINES[measure], marker=style.marker, markersize=4.5, linewidth=1.5,
            label=f"{measure} {name}",
        )  # fmt: skip
        ends.append((values[-1], f"{name}, {measure}: {values[-1]:.1f}", style.colour))
    return ends


def _frame(axes: Axes, sizes: NDArray[np.int64]) -> None:
    axes.set_xscale("log", base=2)
    axes.set_xlim(sizes[0] / 1.15, sizes[-1] * 1.15)
    if len(sizes) <= _MOST_TICKS:
        axes.xaxis.set_major_locator(FixedLocator(sizes.tolist()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_ylim(bottom=0)
    axes.grid(True)
    axes.set_xlabel("batch size [tokens]")
