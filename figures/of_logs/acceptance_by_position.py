"""Is a draft's token as likely to be accepted at every place? Along the text, and along a draft, against independent coins.

Independent coins of one rate (Section 3.1 of [Leviathan2023]) would be accepted at that rate everywhere.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import PercentFormatter
from numpy.typing import ArrayLike

from figures.common.style import COLOURS, GREY, INK, LINES, house, side_by_side
from model.base import checks
from model.methods.speculative import rates_from_logs

BINS = 8
_POINTS, _THEORY = COLOURS[0], COLOURS[1]


def draw(lengths: Sequence[ArrayLike], draft_length: int, about: str, bins: int = BINS) -> Figure:
    """Accepted over tested tokens by output position and by place in a draft, with Wilson's bands of 95 %, and one rate for all.

    `lengths` has for each text, at each position, how many tokens a round gives that starts there, as in
    `model.methods.speculative.rates_from_logs`; of a decision log they are `log.column("accepted")` + 1. `about` says of what they
    are and whether they were measured.
    """
    checks.whole("bins", bins, 1)
    played = rates_from_logs.play(lengths, draft_length)
    longest = max(np.asarray(each).size for each in lengths)
    edges = np.unique(np.linspace(0, longest, bins + 1).astype(int)).tolist()
    whole = rates_from_logs.accepted_of_tested(played)
    if not int(whole.trials):
        raise checks.ParameterError("lengths must be of texts in which a draft is tested, got texts of one token; take longer ones")
    alpha, ends = float(whole.rate), rates_from_logs.ratio_interval(*played.of_requests())
    with house():
        figure, (left, right) = side_by_side(2, 4.8, 0.22, 0.78, 0.35)
        along = rates_from_logs.by_output_position(played, edges)
        middles = np.array([(low + 1 + high) / 2 for low, high in pairwise(edges)])
        _panel(left, middles, along, alpha, ends)
        left.set_xlabel("output position")
        left.set_ylabel("acceptance rate  [accepted of tested tokens]")
        left.set_xlim(0.5, longest + 0.5)
        left.set_title("Along the sequence", fontsize=10.5)
        _panel(right, np.arange(1, draft_length + 1), rates_from_logs.by_place(played), alpha, ends)
        right.set_xlabel("position in the draft")
        right.set_yticklabels([])
        right.set_xticks(range(1, draft_length + 1, 1 + draft_length // 16))
        right.set_xlim(0.5, draft_length + 0.5)
        right.set_title(f"Along drafts of {draft_length}", fontsize=10.5)
        start = left.get_position().x0
        figure.text(start, 0.945, "Is every drafted token as likely to be accepted?", fontsize=13, weight="bold", va="center")
        figure.text(start, 0.885, f"{about}; below each point, how many were tested", fontsize=9, color=GREY, va="center")
        handles = [
            Line2D([], [], color=_POINTS, marker="o", markersize=5.5, label="accepted of tested, band of 95 % (Wilson)"),
            Line2D([], [], color=_THEORY, linestyle=LINES[1], label=f"one rate: α = {alpha:.3f} everywhere"),
        ]
        if np.isfinite(ends[0]):
            handles.append(Patch(facecolor=_THEORY, alpha=0.18, label="its interval of 95 % between sequences"))  # type: ignore[arg-type]
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(start, 0.005), ncols=3, borderaxespad=0, columnspacing=1.5,
                      handlelength=1.8, fontsize=8.5)  # fmt: skip
    return figure


def _panel(axes: Axes, x: ArrayLike, found: rates_from_logs.EstimatedRates, alpha: float, ends: tuple[float, float]) -> None:
    axes.grid(True)
    places = np.asarray(x, dtype=np.float64)
    if np.isfinite(ends[0]):
        axes.axhspan(*ends, color=_THEORY, alpha=0.18, linewidth=0, label="alpha interval")
    axes.axhline(alpha, color=_THEORY, linestyle=LINES[1], linewidth=1.6, label="alpha")
    tried = found.trials > 0
    axes.fill_between(places[tried], found.low[tried], found.high[tried], color=_POINTS, alpha=0.2, linewidth=0, label="band")
    axes.plot(places[tried], found.rate[tried], color=_POINTS, linewidth=1.6, marker="o", markersize=5.5, label="accepted")
    for place, trials in zip(places[tried], found.trials[tried], strict=True):
        axes.annotate(f"{trials}", (place, 0), (0, 3), textcoords="offset points", ha="center", fontsize=7.5, color=INK)
    axes.set_ylim(0, 1.02)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
