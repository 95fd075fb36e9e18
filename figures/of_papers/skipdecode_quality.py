"""ROUGE-L over speed-up of SkipDecode, Figure 4 of [DelCorro2023], redrawn from Table 4: labels, and ratios of layers that ran.

[DelCorro2023] L. Del Corro et al. SkipDecode. arXiv:2307.02628.
"""

from __future__ import annotations

from matplotlib.figure import Figure

from figures.common.style import COLOURS, GREY, LINES, panels_in_row, styled
from model import published

TABLE = "skipdecode-table-4"
_TITLES = {"e2e": "E2E", "reddit": "Reddit", "cnn_dm": "CNN/DailyMail"}


def points(data_set: str, model: str) -> list[tuple[float, float, float]]:
    """Return the rows of a model as (speed-up that labels the row, ratio of layers that ran, ROUGE-L).

    The second is all layers over the printed mean of layers.

    >>> [round(ratio, 2) for _, ratio, _ in points("e2e", "opt-1.3b")]
    [1.0, 1.63, 2.55, 3.53, 4.14]
    """
    rows = [row for row in published.table(TABLE).rows if (row["data_set"], row["model"]) == (data_set, model)]
    whole = next(row["mean_layers"] for row in rows if row["target_speedup"] == 1)
    return [(float(row["target_speedup"]), whole / row["mean_layers"], row["rouge_l"]) for row in rows]


def draw() -> Figure:
    """Draw a panel per data set: ROUGE-L over the labels, as printed, and paler over the ratios of layers that ran."""
    with styled():
        figure, panels = panels_in_row(3, 4.0, 0.24, 0.8, 0.45)
        for axes, (data_set, title) in zip(panels, _TITLES.items(), strict=True):
            axes.grid(True)
            for number, model in enumerate(("opt-1.3b", "opt-6.7b")):
                labels, ratios, scores = zip(*points(data_set, model), strict=True)
                name = model.replace("opt", "OPT").replace("b", "B")
                axes.plot(labels, scores, color=COLOURS[number], marker="o", markersize=5, label=f"{name}, label of the row")
                axes.plot(ratios, scores, color=COLOURS[number], marker="D", markersize=4, linestyle=LINES[1], alpha=0.6,
                          label=f"{name}, layers that ran")  # fmt: skip
            axes.set_title(title, fontsize=10)
            axes.set_xlabel("speed-up in layers (no times are published)")
        panels[0].set_ylabel("ROUGE-L [percent]")
        left = panels[0].get_position().x0
        figure.text(left, 0.93, "SkipDecode: quality over speed-up, published", fontsize=13, weight="bold", va="center")
        figure.text(left, 0.865, "Figure 4 of Del Corro et al. from Table 4", fontsize=9, color=GREY, va="center")
        figure.legend(*panels[0].get_legend_handles_labels(), loc="lower left", bbox_to_anchor=(left, 0.0), ncols=4,
                      borderaxespad=0)  # fmt: skip
    return figure
