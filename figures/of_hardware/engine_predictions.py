"""Measured cells of a serving engine against the predictions of a step law, by batch and draft length."""

from __future__ import annotations

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, SeriesStyle, panels_in_row, series_styles, styled
from model.base import checks
from model.base.checks import ParameterError
from model.engines.cells import Cells, Floats
from model.engines.step_law import SHARE, Predictions, StepLaw

MOST_LENGTHS = 6
"""More could not be distinguished."""
NAMES = {"step_ms": "step time", "tpot_ms": "time per token of a sequence", "output_tokens_per_s": "throughput"}
"""Names of the units of cells."""
_DODGE = 0.16
"""Distance of neighbouring draft lengths at one batch [doublings]."""


def fitted(law: StepLaw, cells: Cells) -> NDArray[np.bool_]:
    """Return which cells are among those that the law was fitted to: the same batch and draft length."""
    if law.cells is None:
        return np.zeros(cells.size, dtype=np.bool_)
    known = {*zip(law.cells.sequences, law.cells.draft_length, strict=True)}
    return np.array([pair in known for pair in zip(cells.sequences, cells.draft_length, strict=True)], dtype=np.bool_)


def draw(law: StepLaw, cells: Cells) -> Figure:
    """Draw two panels over the batch: what each draft length gains over the shortest, and measured over predicted values.

    The left panel has a line per draft length: predictions, their intervals and measured values, all relative to the prediction of
    the shortest draft length at the same batch. Filled points are cells that the law was fitted to, hollow ones were predicted.
    Cells without a measured value have a prediction only. The cells are in the unit of the law.
    """
    if cells.unit != law.unit:
        raise ParameterError(f"cells must be in the unit of law {law.name}, {law.unit}, got {cells.unit}")
    lengths = np.unique(cells.draft_length)
    checks.whole("values of draft_length", lengths.size, 1, MOST_LENGTHS)
    if not cells.measured.any():
        raise ParameterError("at least one cell must have a measured value, got none")
    found, own, base = law.predict(cells), fitted(law, cells), shortest(law, cells)
    with styled():
        height = 5.3
        figure, (left, right) = panels_in_row(2, height, 0.11, 1 - 1.35 / height, 1.35)
        for axes in (left, right):
            _frame(axes, np.unique(cells.sequences))
        ends = []
        for length, style in zip(lengths, series_styles(lengths.size), strict=True):
            rows = cells.draft_length == length
            ends.append((_line(left, cells[rows], _of(found, rows), base[rows], own[rows], style), f"K = {length:g}", style.colour))
        left.set_ylabel(f"{NAMES[law.unit]}, over the law at K = {lengths[0]:g}")
        right.axhline(1.0, color=INK, linewidth=1.0)
        for place, (length, style) in enumerate(zip(lengths, series_styles(lengths.size), strict=True)):
            rows = (cells.draft_length == length) & cells.measured
            shift = _DODGE * (place - (lengths.size - 1) / 2)
            _ratios(right, cells[rows], _of(found, rows), own[rows], style, shift)
        right.set_ylabel("measured over predicted")
        for axes in (left, right):
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        label_at_right(left, ends)
        _words(figure, law, cells, own, height)
    return figure


def shortest(law: StepLaw, cells: Cells) -> Floats:
    """Predictions for the shortest draft length of the cells at the batch of each; shape (cells,)."""
    length = cells.draft_length.min()
    first = cells[np.flatnonzero(cells.draft_length == length)[:1]]
    same = Cells.of(
        law.unit, cells.sequences, np.full(cells.size, length), mean_acceptance_length=first.mean_acceptance_length,
        draft_passes=first.draft_passes, context=cells.context,
    )  # fmt: skip
    return law.predict(same).values


def _of(found: Predictions, rows: NDArray[np.bool_]) -> Predictions:
    return Predictions(*(each[rows] for each in found))


def _line(axes: Axes, cells: Cells, found: Predictions, base: Floats, own: NDArray[np.bool_], style: SeriesStyle) -> float:
    """Draw one draft length, and return the last prediction of its line."""
    order = np.argsort(cells.sequences)
    number, length = cells.sequences[order], f"{cells.draft_length[0]:g}"
    low, value, high = ((each / base)[order] for each in (found.low, found.values, found.high))
    axes.fill_between(number, low, high, color=style.colour, alpha=0.1, linewidth=0, label=f"off {length}")
    axes.plot(number, value, color=style.colour, linestyle=style.line, linewidth=1.5, label=f"law {length}")
    _points(axes, cells.sequences, cells.values / base, own, style, length)
    return float(value[-1])


def _ratios(axes: Axes, cells: Cells, found: Predictions, own: NDArray[np.bool_], style: SeriesStyle, shift: float) -> None:
    if not cells.size:
        return
    number, length = cells.sequences * 2.0**shift, f"{cells.draft_length[0]:g}"
    low, high = found.low / found.values, found.high / found.values
    axes.vlines(number, low, high, color=style.colour, alpha=0.35, linewidth=3.0, label=f"off {length}")
    _points(axes, number, cells.values / found.values, own, style, length)


def _points(axes: Axes, number: Floats, values: Floats, own: NDArray[np.bool_], style: SeriesStyle, length: str) -> None:
    for rows, face, name in ((own, style.colour, "fitted"), (~own, "white", "predicted")):
        axes.plot(
            number[rows], values[rows], linestyle="none", marker=style.marker, markersize=6.0, zorder=3, markerfacecolor=face,
            markeredgecolor=style.colour, markeredgewidth=1.0, label=f"{name} {length}",
        )  # fmt: skip


def _frame(axes: Axes, batches: Floats) -> None:
    axes.grid(True)
    axes.set_xscale("log", base=2)
    axes.set_xlim(batches[0] / 1.5, batches[-1] * 1.5)
    axes.xaxis.set_major_locator(FixedLocator(batches.tolist()))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlabel("running sequences")


def _words(figure: Figure, law: StepLaw, cells: Cells, own: NDArray[np.bool_], height: float) -> None:
    left = 0.1 / figure.get_figwidth()
    title = "Cells of a serving engine: measured, and predicted by a step law"
    figure.text(left, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center")
    count = 0 if law.cells is None else law.cells.size
    other = cells.measured & ~own
    said = f"{law.name}: fitted to {count} cells"
    if other.any():
        errors = np.abs(law.predict(cells[other]).values / cells.values[other] - 1)
        said += f"; {other.sum()} others predicted, median error {100 * np.median(errors):.1f} %, worst {100 * errors.max():.1f} %"
    figure.text(left, 1 - 0.57 / height, said, fontsize=9.5, color=GREY, va="center")
    dot = {"linestyle": "none", "marker": "o", "markersize": 5.5, "markeredgecolor": GREY, "markeredgewidth": 1.2}
    handles = [
        Line2D([], [], markerfacecolor=GREY, label="measured, law fitted to it", **dot),  # type: ignore[arg-type]
        Line2D([], [], markerfacecolor="white", label="measured, not fitted", **dot),  # type: ignore[arg-type]
        Line2D([], [], color=GREY, linewidth=1.3, label="step law"),
        Patch(facecolor=GREY, alpha=0.25, label=f"{100 * SHARE:.0f} % interval"),
    ]
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(left, 1 - 0.86 / height), ncols=4, borderaxespad=0, borderpad=0
    )
