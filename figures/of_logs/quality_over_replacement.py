"""Quality of a small model's output over the share of its tokens that a large model replaces: Figure 2 of [Kim2023], redrawn.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

import polars as pl
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from figures.common.style import COLOURS, GREY, LINES, canvas, require_columns, styled
from figures.of_logs.agreement_over_cost import QUALITIES
from model.base import checks

PUBLISHED_SHARE = 0.2
"""Share of replaced tokens with which the paper's small models reach the quality of the large ones (Section 3.1, published)."""


def draw(rows: pl.DataFrame, quality: str, about: str) -> Figure:
    """Draw a quality over the share of replaced tokens, with the large model alone and the paper's share of about 20 %.

    `rows` are those of `calibrate.decode.replaced_tokens.measure`, `about` names the models.
    """
    checks.one_of("quality", quality, QUALITIES)
    level = () if quality == "agreement" else (f"plain_{quality}",)
    table = require_columns(rows, "the figure of replaced tokens", ("replaced_share", "sequences", quality, *level))
    table = table.sort("replaced_share")
    best = 1.0 if quality == "agreement" else float(table[f"plain_{quality}"][0])
    with styled():
        figure, axes = canvas(6.4, 4.4, (0.13, 0.13, 0.83, 0.7))
        axes.grid(True)
        axes.axhline(best, color=GREY, linewidth=0.9, linestyle=LINES[3], label="the large model alone")
        axes.axvline(PUBLISHED_SHARE, color=COLOURS[1], linewidth=0.9, linestyle=LINES[1], label="share in the paper, published")
        axes.plot(table["replaced_share"], table[quality], color=COLOURS[0], marker="o", markersize=5, linewidth=1.5,
                  label="measured")  # fmt: skip
        axes.set_xlim(0, max(0.25, 1.05 * float(table["replaced_share"][-1])))
        axes.xaxis.set_major_formatter(PercentFormatter(1.0))
        axes.set_xlabel("tokens of the small model that the large model replaces")
        axes.set_ylabel(QUALITIES[quality])
        axes.legend(loc="lower right")
        title = "Quality over the share of replaced tokens"
        figure.text(0.13, 0.94, title, fontsize=12.5, weight="bold", va="center")
        said = f"{about}; {table['sequences'][0]} sequences per point, measured"
        figure.text(0.13, 0.875, said, fontsize=8.5, color=GREY, va="center")
    return figure
