"""Accepted draft tokens per round in a log, against the geometric law of its own acceptance rate.

The law is that of independent acceptances, cut at the end of the draft (Section 3.1 of [Leviathan2023]); its rate is fitted to the
same rounds, accepted over tested tokens. `figures.of_runs.accepted_tokens` draws the same for simulated rounds.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from numpy.typing import ArrayLike

from figures.common.style import COLOURS, GREY, INK, panels_in_row, styled
from figures.of_runs import accepted_tokens
from model.base import checks
from model.methods.speculative import rates_from_logs

MOST_LENGTHS = 4
_LAW = COLOURS[1]


def draw(lengths: Sequence[ArrayLike], draft_lengths: Sequence[int], about: str) -> Figure:
    """Draw a panel per draft length: shares of rounds by accepted tokens with Wilson's intervals of 95 %, and the geometric law.

    `lengths` as in `model.methods.speculative.rates_from_logs`; `about` names the data and says whether they were measured.
    Rounds cut short by the end of a sequence are left out.
    """
    if not 1 <= len(draft_lengths) <= MOST_LENGTHS:
        raise checks.ParameterError(f"draft_lengths must be 1 to {MOST_LENGTHS}, got {len(draft_lengths)}")
    with styled():
        figure, panels = panels_in_row(len(draft_lengths), 4.7, 0.22, 0.7, 0.45)
        for axes, gamma in zip(panels, draft_lengths, strict=True):
            _panel(axes, lengths, gamma)
            axes.set_xlabel("accepted draft tokens per round")
        panels[0].set_ylabel("share of rounds")
        left = panels[0].get_position().x0
        figure.text(left, 0.945, "Accepted draft tokens per round", fontsize=13, weight="bold", va="center")
        said = f"{about};\neach round generates one more token, from the target"
        figure.text(left, 0.875, said, fontsize=9, color=GREY, va="center", linespacing=1.3)
        handles = [
            Patch(facecolor=COLOURS[5], edgecolor=INK, linewidth=0.4, label="measured, interval of 95 % (Wilson)"),
            Line2D([], [], linestyle="none", marker="D", markersize=6, color=_LAW, markerfacecolor="white", markeredgewidth=1.5,
                   label="geometric law of α (i.i.d. acceptances)"),
        ]  # fmt: skip
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(left, 0.01), ncols=2, borderaxespad=0, columnspacing=2)
    return figure


def _panel(axes: Axes, lengths: Sequence[ArrayLike], gamma: int) -> None:
    axes.grid(True, axis="y")
    played = rates_from_logs.replay(lengths, gamma)
    whole = played.accepted[played.drafted == gamma]
    if not whole.size:
        raise checks.ParameterError(f"draft_lengths must be short enough for a whole draft in some sequence, got {gamma}")
    tested = np.minimum(whole + 1, gamma).sum()
    alpha = float(whole.sum() / tested)
    counts = np.bincount(whole, minlength=gamma + 1)
    found, tokens = rates_from_logs.rates(counts, np.full(gamma + 1, whole.size)), np.arange(gamma + 1)
    axes.bar(tokens, found.rate, 0.8, color=COLOURS[5], edgecolor=INK, linewidth=0.4, label="measured")
    axes.errorbar(
        tokens - 0.15, found.rate, [found.rate - found.low, found.high - found.rate], fmt="none", ecolor=INK, elinewidth=1.0,
        capsize=2, label="interval",
    )  # fmt: skip
    law = accepted_tokens.law(alpha, gamma)
    axes.plot(tokens + 0.2, law, linestyle="none", marker="D", markersize=6, color=_LAW, markerfacecolor="white",
              markeredgewidth=1.5, label="law", zorder=3)  # fmt: skip
    mean, expected = float(whole.mean()) + 1, float((law * (tokens + 1)).sum())
    (error,) = rates_from_logs.dependence(lengths, [gamma], 0.0, 1, np.random.default_rng(0))
    said = f"γ = {gamma}, α = {alpha:.3f}: {whole.size} rounds\ntokens per round: {mean:.2f} measured, {expected:.2f} by law\n"
    said += f"error with the α of positions, {error.acceptance_rate:.3f}: {error.error:+.1%}"
    axes.set_title(said, fontsize=9.5)
    axes.set_xticks(range(0, gamma + 1, 1 + gamma // 10))
