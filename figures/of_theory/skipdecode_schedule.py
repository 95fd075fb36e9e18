"""SkipDecode's schedule: number of layers over the position, and the layers that are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from figures.common.label_placement import label_at_right
from figures.common.style import COLOURS, GREY, INK, canvas, series_styles, styled
from model import published
from model.base import checks
from model.methods.skipdecode.theory import exit_layers, mean_layers, spans

Whole = NDArray[np.int64]

MOST_SCHEDULES = 6
"""Most schedules in one figure."""


class Schedule(NamedTuple):
    """A schedule with its label."""

    label: str
    min_layers: int
    max_layers: int
    power: float = 1.0


SKIPPED, WARM_UP, TOP = range(3)
"""Kinds of use of a layer by a token."""


def layers_of(schedule: Schedule, *, layers: int, prompt: int, sequence_length: int, warm_up: int = 1) -> Whole:
    """Return the kind of use of each layer by each token of the longest sequence, halves rounded up; shape (layers, generated).

    >>> layers_of(Schedule("", 1, 3), layers=4, prompt=2, sequence_length=5)
    array([[1, 1, 1],
           [0, 0, 0],
           [2, 0, 0],
           [2, 2, 2]])
    """
    generated = sequence_length - prompt
    budgets = exit_layers(
        schedule.min_layers, schedule.max_layers, prompt, sequence_length, generated, rounding="half-up", power=schedule.power
    ).astype(int)
    found = np.full((layers, generated), SKIPPED)
    for token, budget in enumerate(budgets.tolist()):
        warm = min(warm_up, budget)
        for first, last in spans(budget, warm, layers):
            found[first:last, token] = TOP
        found[:warm, token] = WARM_UP
    return found


def of_run(rows: pl.DataFrame) -> tuple[list[Schedule], dict[str, Any]] | None:
    """Return the schedules of a run, from its table of results, and the other parameters of `draw`; None without such rows.

    Where models, prompts, lengths or warm-ups differ, the most frequent are chosen; halves rounded up, at most `MOST_SCHEDULES`.
    """
    bounds = ("layers", "prompt", "sequence_length", "warm_up")
    needed = ("method", "min_layers", "max_layers", "power", "rounding", *bounds)
    if any(name not in rows.columns for name in needed):
        return None
    own = rows.filter(method="skipdecode", rounding="half-up")
    own = own.unique(["min_layers", "max_layers", "power", *bounds], keep="first", maintain_order=True)
    if not own.height:
        return None
    most = max(own.partition_by(bounds, maintain_order=True), key=lambda part: part.height).head(MOST_SCHEDULES)
    found = [
        Schedule(f"{high} to {low} layers" + (f", power {power:g}" if power != 1 else ""), low, high, power)
        for low, high, power in most.select("min_layers", "max_layers", "power").iter_rows()
    ]
    return found, {**most.select(bounds).row(0, named=True), "source": _source(found, most["layers"][0], most["warm_up"][0])}


def _source(schedules: Sequence[Schedule], layers: int, warm_up: int) -> str:
    table = published.table("skipdecode-table-2").rows
    printed = {
        (row["min_layers"], row["max_layers"], 1.0) for row in table if (row["layers"], row["warm_up"]) == (layers, warm_up)
    }
    known = {each[1:] for each in schedules} <= printed
    return "settings published (Table 2)" if known else "settings assumed"


def check(schedules: Sequence[Schedule], layers: int) -> None:
    """Refuse an empty or too long list of schedules, and a schedule with more layers than the model."""
    if not 1 <= len(schedules) <= MOST_SCHEDULES:
        raise checks.ParameterError(f"schedules must be 1 to {MOST_SCHEDULES}, got {len(schedules)}")
    checks.whole("layers", layers, 1, checks.MAX_LAYERS)
    for each in schedules:
        checks.whole("max_layers", each.max_layers, 1, layers, "layers")


def draw(schedules: Sequence[Schedule], *, layers: int, prompt: int, sequence_length: int, warm_up: int = 1, source: str) -> Figure:
    """Draw, at the left, the layers over the position, a curve per schedule; at the right, the layers that the first one uses.

    Halves are rounded up; dashed lines are means over the generated tokens. `source` is the provenance of the schedules
    (published or assumed), printed in the figure.
    """
    check(schedules, layers)
    with styled():
        figure, left = canvas(11.6, 4.9, (0.065, 0.12, 0.34, 0.66))
        right = figure.add_axes((0.61, 0.12, 0.33, 0.66))
        _curves(left, schedules, layers, prompt, sequence_length)
        _used(right, schedules[0], layers, prompt, sequence_length, warm_up)
        figure.text(0.065, 0.945, "Layers that a token uses", fontsize=13, weight="bold", va="center")
        subtitle = f"SkipDecode, {source}; prompt {prompt}, sequence of at most {sequence_length} tokens, {layers} layers"
        figure.text(0.065, 0.89, subtitle, fontsize=9.5, color=GREY, va="center")
    return figure


def _curves(axes: Axes, schedules: Sequence[Schedule], layers: int, prompt: int, sequence_length: int) -> None:
    ends = []
    axes.plot([0, prompt], [layers, layers], color=INK, linewidth=1.5, label="prompt")
    generated = sequence_length - prompt
    for each, style in zip(schedules, series_styles(len(schedules)), strict=True):
        bounds = each.min_layers, each.max_layers, prompt, sequence_length, generated
        values = exit_layers(*bounds, rounding="half-up", power=each.power)
        mean = mean_layers(*bounds, "half-up", power=each.power)
        colour, positions = style.colour, np.arange(prompt, sequence_length)
        axes.step(positions, values, where="post", color=colour, linestyle=style.line, linewidth=1.5, label=each.label)
        axes.plot(
            [prompt, sequence_length], [mean, mean], color=colour, linewidth=0.9, linestyle=(0, (3, 3)), label=f"mean {each.label}"
        )
        ends.append((float(values[-1]), f"{each.label}: {layers / mean:.2f}× fewer", colour))
    axes.set_xlim(0, sequence_length)
    axes.set_ylim(0, layers + 0.5)
    axes.grid(True)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position  [tokens]")
    axes.set_ylabel("layers per token")
    axes.set_title("dashed: mean over generated tokens", fontsize=10.5)
    label_at_right(axes, ends)


def _used(axes: Axes, schedule: Schedule, layers: int, prompt: int, sequence_length: int, warm_up: int) -> None:
    used = np.ones((layers, sequence_length))
    used[:, prompt:] = (
        layers_of(schedule, layers=layers, prompt=prompt, sequence_length=sequence_length, warm_up=warm_up) != SKIPPED
    )
    axes.imshow(
        used, origin="lower", aspect="auto", interpolation="nearest", extent=(0, sequence_length, 0.5, layers + 0.5), vmin=0,
        vmax=1,
        cmap=ListedColormap(["#f0f0f0", COLOURS[0]]),
    )  # fmt: skip
    axes.axvline(prompt, color=INK, linewidth=1.0)
    axes.yaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("position  [tokens]")
    axes.set_ylabel("layer")
    axes.set_title(f"{schedule.label}: {warm_up} warm-up, then the top layers", fontsize=10.5)
    handles = [Patch(color=COLOURS[0], label="used"), Patch(color="#f0f0f0", label="skipped")]
    axes.legend(handles=handles, loc="lower right", bbox_to_anchor=(1.0, 1.07), ncols=2, borderaxespad=0)
