"""Loss of the next token by its position in a text, after several layers: Figure 1 of [DelCorro2023], redrawn.

[DelCorro2023] L. Del Corro et al. SkipDecode: Autoregressive Skip Decoding with Batching and Caching for Efficient LLM Inference.
arXiv:2307.02628.
"""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure

from figures.common.style import GREY, canvas, require_columns, series_styles, styled
from model.base.checks import ParameterError

MOST_LAYERS = 8
_GROUPS = 64
"""Positions of the line, each the mean of neighbours: single positions are noisy."""
_NEEDED = ("layer", "position", "loss", "low", "high", "sequences")


def draw(rows: pl.DataFrame, about: str) -> Figure:
    """Draw the loss over the position, a line with the band of its 95 % intervals for each layer.

    `rows` are those of `calibrate.decode.loss_by_position.measure`, `about` names the model and its data. Of more than 64 positions
    neighbours are averaged; a band is then the mean of their intervals, which is wider than the interval of their mean.
    """
    table = require_columns(rows, "the figure of losses by position", _NEEDED)
    layers = table["layer"].unique().sort().to_list()
    if len(layers) > MOST_LAYERS:
        raise ParameterError(f"there is room for at most {MOST_LAYERS} layers, got {len(layers)}; draw fewer")
    size = -(-max(table["position"].to_list()) // _GROUPS)
    grouped = table.group_by("layer", group=(pl.col("position") - 1) // size).agg(
        pl.col("position", "loss", "low", "high").mean()
    ).sort("group")  # fmt: skip
    with styled():
        figure, axes = canvas(6.8, 4.4, (0.11, 0.13, 0.85, 0.7))
        axes.grid(True)
        for layer, style in zip(layers, series_styles(len(layers)), strict=True):
            own = grouped.filter(layer=layer)
            axes.plot(own["position"], own["loss"], color=style.colour, linestyle=style.line, linewidth=1.6, label=f"layer {layer}")
            if own["low"].count():
                axes.fill_between(own["position"], own["low"], own["high"], color=style.colour, alpha=0.18, linewidth=0)
        axes.set_xlabel("tokens before the predicted one")
        axes.set_ylabel("loss of the next token [nats]")
        axes.set_xlim(0, None)
        if len(layers) > 1:
            axes.legend(loc="upper right")
        figure.text(0.11, 0.94, "Loss by position in the text", fontsize=12.5, weight="bold", va="center")
        said = f"{about}; {max(table['sequences'].to_list())} sequences, measured; bands: 95 % intervals"
        figure.text(0.11, 0.875, said, fontsize=8.5, color=GREY, va="center")
    return figure
