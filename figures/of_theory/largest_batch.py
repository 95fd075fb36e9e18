"""Largest batch up to which speculative decoding pays on a device, over the context, at an assumed acceptance rate.

A large batch uses the arithmetic units that a multi-token pass would use. A long context adds reads that do not grow with the
tokens per sequence, so it raises the limit; but it also fills the memory. The batch is kept full and sequences are long: this is
the limit of the speed-ups of `sim run` with batching = "continuous". Every pass, also the draft's, has the price of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from figures.common.provenance import extrapolated_parts_of, of_hardware
from figures.common.style import GREY, SeriesStyle, canvas, series_styles, styled
from model.base import checks
from model.base.checks import ParameterError
from model.costs.width_curve import PassTimes
from model.hardware.cost_models import Hardware, memory, pass_time
from model.methods.speculative.batch_break_even import batched_speedup

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

MOST_DEVICES = 6
CONTEXTS = (128, 256, 512, 1024, 2048, 4096, 8192)


class Limits(NamedTuple):
    """Limits by context, each of shape (contexts,): the largest batch that pays (0: none), and the largest that fits the memory."""

    pays: Ints
    fits: Ints | None


def speedups(
    hardware: Hardware, draft: Hardware, acceptance_rate: float, draft_length: int, contexts: Sequence[int], batches: Ints
) -> Floats:
    """Speed-up over plain decoding of the same batch, shape (batches, contexts).

    Theorem 3.8 of [Leviathan2023] with the times of this hardware at each batch R: R E[N] tokens in
    T(R (gamma + 1)) + gamma T_draft(R).
    """
    widths, positions = np.array([1, draft_length + 1]), np.asarray(contexts)[None, None, :]
    target = PassTimes(batches, widths, contexts, _times(hardware, widths[None, :, None], positions, batches))
    small = PassTimes(batches, [1], contexts, _times(draft, np.ones((1, 1, 1), dtype=np.int64), positions, batches))
    return batched_speedup(acceptance_rate, draft_length, target, small, batches[:, None], np.asarray(contexts)[None, :])


def _times(hardware: Hardware, widths: Ints, contexts: Ints, batches: Ints) -> Floats:
    shape = len(batches), widths.shape[1], contexts.shape[2]
    seconds = np.broadcast_to(pass_time(hardware, widths, contexts, batches[:, None, None]).seconds, shape)
    # A table holds no times of 0: a free draft gets a tiny one.
    return np.maximum(seconds, 1e-300)


def limits(
    hardware: Hardware,
    draft: Hardware,
    *,
    acceptance_rate: float,
    draft_length: int,
    contexts: Sequence[int] = CONTEXTS,
    most: int = 512,
    available: float | None = None,
) -> Limits:
    """Return, for each context, the largest batch up to which all batches pay.

    With `available` [bytes], also the number of sequences that fit next to the weights of both models.
    """
    batches = np.arange(1, most + 1)
    gains = speedups(hardware, draft, acceptance_rate, draft_length, contexts, batches) > 1
    pays = np.logical_and.accumulate(gains, axis=0).sum(axis=0)
    if available is None:
        return Limits(pays, None)
    also = (draft.shape,)
    rooms = [
        memory(hardware.shape, available, context=each, tensor_parallel=hardware.tensor_parallel, also=also) for each in contexts
    ]
    fits = [max(int((room.available - room.weights) // room.cache), 0) if room.cache else most for room in rooms]
    return Limits(pays, np.asarray(fits))


def draw(
    costs: Mapping[str, Hardware],
    drafts: Mapping[str, Hardware],
    *,
    acceptance_rate: float,
    draft_length: int,
    source: str,
    contexts: Sequence[int] = CONTEXTS,
    most: int = 512,
    memories: Mapping[str, float] | None = None,
) -> Figure:
    """Draw a curve per entry of `costs` (name: cost model); dotted, the sequences that fit the memory, where `memories` [bytes] has
    the name.

    `drafts` are the draft models on the same hardware, by the same names. `source` is the provenance of the acceptance rate and of
    the drafts' times (measured, published or assumed), printed in the figure.
    """
    _check(costs, drafts, acceptance_rate, draft_length, contexts, most)
    rates = {"acceptance_rate": acceptance_rate, "draft_length": draft_length}
    rooms = memories or {}
    with styled():
        figure, axes = canvas(10.4, 5.2, (0.105, 0.115, 0.55, 0.68))
        axes.set_xscale("log", base=2)
        axes.set_yscale("log", base=2)
        handles = []
        for (name, hardware), style in zip(costs.items(), series_styles(len(costs)), strict=True):
            found = limits(hardware, drafts[name], **rates, contexts=contexts, most=most, available=rooms.get(name))  # type: ignore[arg-type]
            _draw(axes, name, contexts, found, style, most)
            past = extrapolated_parts_of(hardware, width=draft_length + 1, context=contexts[-1], batch=most)
            said = "\n".join(filter(None, (of_hardware(hardware).replace(", ", ",\n"), past.replace(": ", ":\n"))))
            handles.append(Line2D([], [], color=style.colour, marker=style.marker, linestyle=style.line, markersize=5.5,
                                  linewidth=1.6, label=f"{name}:\n{said}"))  # fmt: skip
        if rooms:
            dot: dict[str, Any] = {"linestyle": "none", "marker": "o", "markersize": 6, "markeredgecolor": GREY}
            handles.append(Line2D([], [], color=GREY, linewidth=1.4, linestyle=(0, (1, 1.6)), label="sequences that fit memory"))
            handles.append(Line2D([], [], markerfacecolor="white", label="hollow: exceeds the memory", **dot))
        _frame(axes, contexts, most)
        figure.text(0.02, 0.945, "Up to which batch size does drafting pay?", fontsize=13, weight="bold", va="center")
        subtitle = f"batch kept full, acceptance rate α = {acceptance_rate:g}, draft length γ = {draft_length}"
        figure.text(0.02, 0.89, f"{subtitle}: {source}", fontsize=9.5, color=GREY, va="center")
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.675, 0.8), borderaxespad=0, labelspacing=0.9)
    return figure


def _check(
    costs: Mapping[str, Hardware], drafts: Mapping[str, Hardware], rate: float, length: int, contexts: Sequence[int], most: int
) -> None:
    if not 1 <= len(costs) <= MOST_DEVICES:
        raise ParameterError(f"costs must be 1 to {MOST_DEVICES}, got {len(costs)}")
    if {*drafts} != {*costs}:
        raise ParameterError(f"drafts must have the names of costs, {', '.join(costs)}, got {', '.join(drafts) or 'none'}")
    checks.number("acceptance_rate", rate, 0, 1)
    checks.whole("draft_length", length, 1, 1024)
    checks.whole("most", most, 2, 4096)
    if not contexts or np.any(np.diff(contexts) <= 0):
        raise ParameterError(f"contexts must be one or more, in increasing order, got {checks.shown(list(contexts))}")
    for each in contexts:
        checks.whole("context", each, 1)


def _draw(axes: Axes, name: str, contexts: Sequence[int], found: Limits, style: SeriesStyle, most: int) -> None:
    # A batch of 0 has no position on a logarithmic axis: it is drawn at a half and labelled "never".
    at = np.where(found.pays == 0, 0.5, found.pays)
    axes.plot(contexts, at, color=style.colour, linestyle=style.line, linewidth=1.6, label=f"pays {name}")
    held = np.ones(at.shape, dtype=bool) if found.fits is None else found.pays <= found.fits
    for face, kept, name_of in ((style.colour, held, "within"), ("white", ~held, "beyond")):
        axes.plot(
            np.asarray(contexts)[kept], at[kept], linestyle="none", marker=style.marker, markersize=6, markerfacecolor=face,
            markeredgecolor=style.colour, markeredgewidth=1.3, zorder=3, label=f"{name_of} {name}",
        )  # fmt: skip
    if found.fits is not None:
        axes.plot(
            contexts, np.clip(found.fits, 0.5, 2 * most), color=style.colour, linestyle=(0, (1, 1.6)), linewidth=1.4, zorder=1.8,
            label=f"fits {name}",
        )  # fmt: skip


def _frame(axes: Axes, contexts: Sequence[int], most: int) -> None:
    axes.grid(True)
    axes.set_ylim(0.4, 1.4 * most)
    axes.set_xlim(contexts[0] / 1.15, contexts[-1] * 1.15)
    axes.xaxis.set_major_locator(FixedLocator([float(each) for each in contexts]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    powers = [2.0**power for power in range(int(np.log2(most)) + 1)]
    axes.yaxis.set_major_locator(FixedLocator([0.5, *powers]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: "never" if value < 1 else f"{value:g}\nor more" if value >= most else f"{value:g}")
    )
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_xlabel("context [cached positions per sequence]")
    axes.set_ylabel("largest batch that pays [sequences]")
