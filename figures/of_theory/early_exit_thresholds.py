"""Decaying confidence threshold of CALM over the position, by the paper and by its code.

[Schuster2022] T. Schuster et al. Confident Adaptive Language Modeling. NeurIPS 2022, arXiv:2207.07061.
[t5x] google-research/t5x, t5x/contrib/calm.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from figures.common.style import COLOURS, GREY, INK, canvas, styled
from model.base import checks
from model.methods.early_exit.theory import FORMS, decayed_threshold

MOST_THRESHOLDS, MOST_TEMPERATURES = 4, 5  # a sixth colour is too close to the first, paler
_LOOKS = {
    "paper": ((0, ()), 2.6, "paper:  0.9 λ + 0.1 exp(−τ t / N), at most 1"),
    "code": ((0, (4, 1.6)), 1.5, "code:  λ (0.9 + 0.1 exp(−τ t / N))"),
}
"""Line, its width and legend label: dashes over a broader line, so both are visible where they coincide."""
_SIDE, _LEAST, _HIGH, _HEAD, _FOOT = 0.3, 7.6, 2.9, 1.5, 0.6  # [inches]


def draw(thresholds: Sequence[float], temperatures: Sequence[float], *, longest: int, source: str) -> Figure:
    """Draw a panel per threshold λ, with both forms of the decay for each temperature τ.

    `longest` is N, the longest sequence. `source` is the provenance of the parameters (published or assumed).
    """
    for name, values, most in (("thresholds", thresholds, MOST_THRESHOLDS), ("temperatures", temperatures, MOST_TEMPERATURES)):
        if not 1 <= len(values) <= most:
            raise checks.ParameterError(f"{name} must be 1 to {most}, got {len(values)}")
    checks.whole("longest", longest, 1, checks.MAX_TOKENS)
    each = max(3.1, _LEAST / len(thresholds))
    width, height = _SIDE + each * len(thresholds), _FOOT + _HIGH + _HEAD
    with styled():
        figure, only = canvas(width, height, (0, 0, 1, 1))
        only.remove()
        for index, threshold in enumerate(thresholds):
            left = _SIDE + each * index + 0.45
            axes = figure.add_axes((left / width, _FOOT / height, (each - 0.65) / width, _HIGH / height))
            _panel(axes, threshold, temperatures, longest)
            if not index:
                axes.set_ylabel("confidence required to exit")
        title = "Confidence that a token needs for early exit"
        figure.text(0.25 / width, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="center")
        subtitle = f"CALM's decaying threshold; λ and τ {source}; sequences of at most N = {longest} tokens"
        figure.text(0.25 / width, 1 - 0.55 / height, subtitle, fontsize=9.5, color=GREY, va="center")
        _legends(figure, temperatures, width, height)
    return figure


def _panel(axes: Axes, threshold: float, temperatures: Sequence[float], longest: int) -> None:
    positions = np.linspace(0, longest, 201)
    for form in FORMS:  # narrower lines on top
        line, width, _ = _LOOKS[form]
        for temperature, colour in zip(temperatures, COLOURS, strict=False):
            values = decayed_threshold(threshold, positions, longest, temperature, form=form)
            axes.plot(
                positions, values, color=colour if form == "code" else _pale(colour), linewidth=width, linestyle=line,
                label=f"{form} {temperature:g}",
            )  # fmt: skip
    axes.axhline(threshold, color=INK, linewidth=0.8, linestyle=(0, (1.2, 1.2)), label="threshold", zorder=1.8)
    axes.set_xlim(0, longest)
    axes.grid(True)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("position t  [tokens]")
    axes.set_title(f"λ = {threshold:g}", fontsize=10.5)


def _pale(colour: str) -> str:
    """Mix a colour with white, half and half."""
    return "#" + "".join(f"{(int(colour[at : at + 2], 16) + 255) // 2:02x}" for at in (1, 3, 5))


def _legends(figure: Figure, temperatures: Sequence[float], width: float, height: float) -> None:
    forms = [Line2D([], [], color=GREY if form == "code" else _pale(GREY), linestyle=line, linewidth=thick, label=words)
             for form, (line, thick, words) in _LOOKS.items()]  # fmt: skip
    forms.append(Line2D([], [], color=INK, linewidth=0.8, linestyle=(0, (1.2, 1.2)), label="λ"))
    decays = [Line2D([], [], color=colour, linewidth=2, label=f"τ = {temperature:g}")
              for temperature, colour in zip(temperatures, COLOURS, strict=False)]  # fmt: skip
    for handles, down in ((forms, 0.8), (decays, 1.04)):
        figure.legend(
            handles=handles, loc="center left", bbox_to_anchor=(0.25 / width, 1 - down / height), ncols=len(handles),
            borderaxespad=0, borderpad=0,
        )  # fmt: skip
