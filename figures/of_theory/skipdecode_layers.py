"""Maps of the layers that each generated token uses in SkipDecode, by position, with warm-up and top layers distinguished."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator, PercentFormatter

from figures.common.style import COLOURS, GREY, canvas, styled
from figures.of_theory.skipdecode_schedule import SKIPPED, TOP, WARM_UP, Schedule, Whole, check, layers_of

_LOOKS = {
    SKIPPED: ("#ececec", "skipped"),
    WARM_UP: (COLOURS[1], "warm-up layers (first)"),
    TOP: (COLOURS[0], "top layers"),
}
_WIDE, _HIGH, _HEAD, _SIDE = 5.7, 3.0, 0.85, 0.25  # [inches] of a map with its margins; above and left of all


def draw(schedules: Sequence[Schedule], *, layers: int, prompt: int, sequence_length: int, warm_up: int = 1, source: str) -> Figure:
    """Draw a map per schedule, layers over generated tokens, and the share of these tokens that use each layer.

    Halves are rounded up, and the sequence has the greatest length. The prompt, which uses all layers, is not drawn. Two maps form
    a row. `source` is the provenance of the schedules (published or assumed), printed in the figure.
    """
    check(schedules, layers)
    bounds = {"layers": layers, "prompt": prompt, "sequence_length": sequence_length, "warm_up": warm_up}
    maps = [layers_of(each, **bounds) for each in schedules]
    columns = min(len(schedules), 2)
    lines = -(-len(schedules) // columns)
    width, height = _SIDE + _WIDE * max(columns, 1.3), _HEAD + _HIGH * lines
    with styled():
        figure, only = canvas(width, height, (0, 0, 1, 1))
        only.remove()
        for index, (schedule, found) in enumerate(zip(schedules, maps, strict=True)):
            row, column = divmod(index, columns)
            left, bottom = _SIDE + _WIDE * column + 0.45, _HIGH * (lines - 1 - row) + 0.55
            high = (_HIGH - 0.9) / height
            field = figure.add_axes((left / width, bottom / height, 4.0 / width, high))
            shares = figure.add_axes(((left + 4.1) / width, bottom / height, 0.8 / width, high))
            _map(field, schedule, found)
            _shares(shares, found)
        title = "Layers that each generated token uses"
        figure.text(_SIDE / width, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center")
        about = f"{layers} layers, prompt {prompt}, sequence of at most {sequence_length} tokens; halves rounded up"
        subtitle = f"SkipDecode, {source}; {about}"
        figure.text(_SIDE / width, 1 - 0.56 / height, subtitle, fontsize=9.5, color=GREY, va="center")
        shown = np.unique(np.concatenate([found.ravel() for found in maps]))
        handles = [Patch(color=colour, label=words) for kind, (colour, words) in _LOOKS.items() if kind in shown]
        figure.legend(
            handles=handles[::-1], loc="center left", bbox_to_anchor=(_SIDE / width, 1 - 0.82 / height), ncols=3, borderaxespad=0,
            borderpad=0,
        )  # fmt: skip
    return figure


def _map(axes: Axes, schedule: Schedule, found: Whole) -> None:
    layers, generated = found.shape
    axes.imshow(
        found, origin="lower", aspect="auto", interpolation="nearest", extent=(0.5, generated + 0.5, 0.5, layers + 0.5),
        vmin=-0.5, vmax=2.5, cmap=ListedColormap([colour for colour, _ in _LOOKS.values()]),
    )  # fmt: skip
    mean = float((found != SKIPPED).sum(axis=0).mean())
    idle = int((found == SKIPPED).all(axis=1).sum())
    never = f"; {idle} of {layers} never used" if idle else ""
    axes.set_title(f"{schedule.label}: {mean:.2f} layers on average{never}", fontsize=10)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("generated token")
    axes.set_ylabel("layer")


def _shares(axes: Axes, found: Whole) -> None:
    layers = np.arange(1, len(found) + 1)
    for kind in (WARM_UP, TOP):  # no layer is warm-up for some tokens and top for others
        axes.barh(layers, (found == kind).mean(axis=1), 1.0, color=_LOOKS[kind][0], label=_LOOKS[kind][1])
    axes.set_ylim(0.5, len(found) + 0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([0.5, 1])
    axes.xaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_yticks([])
    axes.set_xlabel("share of tokens")
