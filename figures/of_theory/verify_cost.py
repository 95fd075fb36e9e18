"""Largest batch for which speculative decoding pays: speed-ups from measured or assumed times of a pass by batch and width."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, canvas, series_styles, styled
from model.base import checks
from model.costs.width_curve import PassTimes
from model.methods.speculative.batch_break_even import batched_speedup, largest_batch

_MOST_CURVES = 6


def example() -> tuple[PassTimes, PassTimes, str]:
    """Assumed times of a target and a draft model, and a description of the assumptions; nothing here was measured.

    A roofline: a pass reads the weights (10 ms) and each sequence's cache (0.05 ms); arithmetic (0.1 ms per token) overlaps with
    reading, and the longer of both counts. The draft takes a twelfth.

    >>> target, draft, _ = example()
    >>> float(target(1, 1, 1024)), float(target(256, 8, 1024)), round(float(draft(1, 1, 1024)), 3)
    (10.05, 204.8, 0.838)
    """
    batches, widths = np.array([1, 2, 4, 8, 16, 32, 64, 128, 256]), np.arange(1, 17)
    reading = 10 + 0.05 * batches[:, None]
    times = np.maximum(reading, 0.1 * batches[:, None] * widths)
    draft = times[:, :1] / 12
    source = "times assumed: max of reading (10 ms + 0.05 ms per sequence) and arithmetic (0.1 ms per token); draft 1/12 of it"
    return PassTimes(batches, widths, [1024], times[:, :, None]), PassTimes(batches, [1], [1024], draft[:, :, None]), source


def draw(target: PassTimes, draft: PassTimes, acceptance_rates: Sequence[float], *, context: float, source: str) -> Figure:
    """Draw, at the left, speed-up over draft length at the greatest rate, a curve per batch; at the right, the best over the batch.

    The right panel has a curve per rate. `source` is the provenance of the times (measured, published or assumed), printed in the
    figure. A star is the best draft length; a ring on a curve is the largest batch of the table up to which drafting pays.
    """
    rates = sorted(float(rate) for rate in checks.array("acceptance_rates", list(acceptance_rates), 0, 1))
    if not 1 <= len(rates) <= _MOST_CURVES:
        raise checks.ParameterError(f"acceptance_rates must be 1 to {_MOST_CURVES} rates, got {len(rates)}")
    with styled():
        figure, left = canvas(11.6, 4.9, (0.065, 0.12, 0.34, 0.66))
        right = figure.add_axes((0.56, 0.12, 0.34, 0.66))
        _lengths(left, rates[-1], target, draft, context)
        _batches(right, rates, target, draft, context)
        for axes in (left, right):
            axes.grid(True)
            axes.axhline(1, color=INK, linewidth=1.0, zorder=1.8, label="plain")
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        figure.text(0.065, 0.945, "Up to which batch size does drafting pay?", fontsize=13, weight="bold", va="center")
        figure.text(0.065, 0.89, f"{source}; context {context:g}", fontsize=9.5, color=GREY, va="center")
    return figure


def _lengths(axes: Axes, rate: float, target: PassTimes, draft: PassTimes, context: float) -> None:
    every = target.batches.astype(int)
    chosen = every[np.unique(np.linspace(0, len(every) - 1, min(len(every), _MOST_CURVES)).round().astype(int))]
    lengths = np.arange(int(target.widths[-1]))
    ends = []
    for batch, style in zip(chosen, series_styles(len(chosen)), strict=True):
        speeds = batched_speedup(rate, lengths, target, draft, int(batch), context)
        best = int(speeds.argmax())
        axes.plot(lengths, speeds, color=style.colour, linestyle=style.line, linewidth=1.5, label=f"batch {batch}")
        axes.plot(
            [best], [speeds[best]], linestyle="none", marker="*", markersize=12, color=style.colour, markeredgecolor="white",
            zorder=3, label=f"best {batch}",
        )  # fmt: skip
        ends.append((float(speeds[-1]), f"batch {batch}", style.colour))
    axes.set_xlim(0, max(lengths[-1], 1))
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("draft length γ  [tokens]")
    axes.set_ylabel("speed-up over plain decoding of the same batch")
    axes.set_title(f"α = {rate:g}   (star: best draft length)", fontsize=10.5)
    label_at_right(axes, ends)


def _batches(axes: Axes, rates: Sequence[float], target: PassTimes, draft: PassTimes, context: float) -> None:
    ends, found = [], [largest_batch(rate, target, draft, context) for rate in rates]
    for rate, gain, style in zip(rates, found, series_styles(len(rates)), strict=True):
        axes.plot(
            gain.batches, gain.speedups, color=style.colour, linestyle=style.line, linewidth=1.5, marker=style.marker, markersize=5,
            label=f"rate {rate:g}",
        )  # fmt: skip
        label = f"α = {rate:g}: never"
        if gain.largest:
            at = gain.batches.index(gain.largest)
            axes.plot(
                [gain.largest], [gain.speedups[at]], linestyle="none", marker="o", markersize=14, markeredgewidth=1.6,
                markerfacecolor="none", color=style.colour, label=f"largest {rate:g}",
            )  # fmt: skip
            label = f"α = {rate:g}: to {gain.largest}"
        ends.append((gain.speedups[-1], label, style.colour))
    # Best draft lengths at the greatest rate, as numbers above its points.
    for batch, speed, length in zip(found[-1].batches, found[-1].speedups, found[-1].draft_lengths, strict=True):
        axes.annotate(
            f"{length}", (batch, speed), (0, 9), textcoords="offset points", ha="center", fontsize=8,
            color=series_styles(len(rates))[-1].colour,
        )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.set_xticks(found[0].batches, [f"{batch}" for batch in found[0].batches])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlim(found[0].batches[0] / 1.3, found[0].batches[-1] * 1.3)
    axes.set_ylim(bottom=0)
    axes.set_ylim(top=1.1 * axes.get_ylim()[1])
    axes.set_xlabel("sequences per batch")
    axes.set_ylabel("speed-up at the best draft length")
    axes.set_title(f"ring: largest batch that pays;  numbers: best γ at α = {rates[-1]:g}", fontsize=10.5)
    label_at_right(axes, ends)
