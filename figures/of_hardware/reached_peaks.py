"""Roofline: operations per byte against operations per second of a decoder layer on its device [Williams2009].

A pass over few tokens reads all weights for little arithmetic: it lies under the slope, where more tokens take no more time.
Verifying a draft is cheap there; the advantage ends where the points leave the slope.

[Williams2009] S. Williams, A. Waterman, D. Patterson. Roofline: an insightful visual performance model for multicore architectures.
CACM 52(4), 2009.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import ArrayLike, NDArray

from figures.common.label_placement import drawn_lines, label_points
from figures.common.provenance import is_measured, of_part
from figures.common.style import GREY, INK, LINES, SeriesStyle, canvas, series_styles, styled
from model.architectures.transformer import Shape
from model.base.checks import ParameterError
from model.hardware.profile import Profile
from model.hardware.profile_costs import shape_of
from model.hardware.roofline import Roofline

Floats = NDArray[np.float64]

MOST_PROFILES = 4
"""More could not be distinguished."""
_DOTTED: dict[str, Any] = {"linewidth": 1.1, "linestyle": (0, (1, 1.6))}
_NAMED = (1, 8, 64, 512, 4096)  # tokens in the pass, printed next to their points


class Points(NamedTuple):
    """Stored rows of a layer, each of shape (rows,): tokens in the pass, operations per byte, and operations per second."""

    width: Floats
    intensity: Floats
    rate: Floats


def gemm_work(part: Shape, tokens: ArrayLike) -> tuple[Floats, Floats]:
    """Operations of a layer's GEMMs over `tokens` tokens, and the least bytes that they move: weights once, states in and out.

    >>> from model.architectures.transformer import preset
    >>> work, size = gemm_work(preset("llama-2-7b"), 1)
    >>> round(float(work / size), 3)  # two operations per weight of two bytes
    1.0
    """
    width = np.asarray(tokens, dtype=np.float64)
    work = sum((2.0 * inputs * outputs * width for inputs, outputs in part.matrices), np.zeros(width.shape))
    size = sum((inputs * outputs + width * (inputs + outputs) for inputs, outputs in part.matrices), np.zeros(width.shape))
    return np.asarray(work), np.asarray(size * part.bytes_each)


def points(profile: Profile, tensor_parallel: int = 1) -> Points:
    """Return the stored times of a layer's GEMMs at powers of two; where layers were timed as wholes, those of one sequence at the
    shortest context."""
    part = shape_of(profile).shard(tensor_parallel)
    if "dense" in profile.parts:
        rows = profile.rows("dense", tensor_parallel)
        width, seconds = rows["tokens"].to_numpy().astype(np.float64), rows["time_s"].to_numpy()
        work, size = gemm_work(part, width)
    else:
        rows = profile.rows("layer", tensor_parallel)
        rows = rows.filter(rows["batch"] == rows["batch"].min())
        rows = rows.filter(rows["context"] == rows["context"].min())
        width, seconds = rows["width"].to_numpy().astype(np.float64), rows["time_s"].to_numpy()
        where = (rows["width"].to_numpy(), rows["context"].to_numpy(), rows["batch"].to_numpy())
        work = part.layer_flops(*where)
        size = part.layer_weight_bytes + part.layer_kv_bytes(*where)
    if not width.size:
        known = ", ".join(map(str, profile.tensor_parallel))
        raise ParameterError(f"tensor_parallel must be one of {known}, what profile {profile.name} has, got {tensor_parallel}")
    chosen = np.exp2(np.round(np.log2(width))) == width
    chosen = chosen if chosen.any() else np.ones(width.shape, dtype=bool)
    order = np.argsort(width[chosen])
    return Points(*(each[chosen][order] for each in (width, work / size, work / seconds)))


def draw(profiles: Sequence[Profile], *, tensor_parallel: int = 1) -> Figure:
    """Draw a roof per device and the stored points of each profile: filled where measured, hollow where composed of operations.

    Dotted lines show the cost model of kind `roofline` for the same layers, at its assumed efficiencies.
    """
    if not 1 <= len(profiles) <= MOST_PROFILES:
        raise ParameterError(f"profiles must be 1 to {MOST_PROFILES}, got {len(profiles)}")
    for each in profiles:
        if each.kind != "model":
            raise ParameterError(f"profile {each.name} is of kind {each.kind}; a roofline shows layers: choose a model's profile")
    found = [points(each, tensor_parallel) for each in profiles]
    with styled():
        figure, axes = canvas(11.2, 5.6, (0.075, 0.11, 0.585, 0.715))
        axes.set_xscale("log")
        axes.set_yscale("log")
        left = 0.6 * min(float(each.intensity.min()) for each in found)
        ridges = [each.rate / each.bandwidth for each in profiles]
        right = 2.5 * max(*(float(each.intensity.max()) for each in found), *ridges)
        handles: list[Line2D] = []
        peaks = dict.fromkeys((each.device, each.bandwidth, each.rate, peaks_from(each)) for each in profiles)
        for (device, bandwidth, rate, source), line in zip(peaks, LINES, strict=False):
            at = np.array([left, rate / bandwidth, right])
            label = f"{device}: {bandwidth / 1e9:,.0f} GB/s, {_rate_text(rate)};\npeaks {source}"
            roof = np.minimum(rate, bandwidth * at)
            axes.plot(at, roof, color=INK, linestyle=line, linewidth=1.4, zorder=1.6, label=f"roof {device}")
            handles.append(Line2D([], [], color=INK, linestyle=line, linewidth=1.4, label=label))
        labels: list[tuple[float, float, str]] = []
        for profile, stored, style in zip(profiles, found, series_styles(len(profiles)), strict=True):
            handles.append(_draw(axes, profile, stored, style, tensor_parallel))
            labels += [(x, y, f"{width:g}") for width, x, y in zip(*stored, strict=True) if width in _NAMED]
        if any("dense" in each.parts for each in profiles):
            handles.append(Line2D([], [], color=GREY, label="cost model of kind roofline:\nassumed efficiencies", **_DOTTED))
        axes.set_xlim(left, right)
        axes.set_ylim(0.5 * min(float(each.rate.min()) for each in found), 1.8 * max(each.rate for each in profiles))
        axes.grid(True, which="major")
        axes.set_xlabel("operations per byte [FLOP/byte]")
        axes.set_ylabel("operations per second of a device [FLOP/s]")
        label_points(axes, labels, drawn_lines(axes), size=8)
        figure.text(0.02, 0.945, "Throughput that a decoder layer reaches on its device", fontsize=13, weight="bold", va="center")
        apart = all("dense" in each.parts for each in profiles)
        without = "attention left out" if apart else "attention left out where timed separately"
        split = "" if tensor_parallel == 1 else f" at TP {tensor_parallel}"
        subtitle = f"a decoder layer{split} (numbers: tokens in the pass), {without}"
        figure.text(0.02, 0.89, subtitle, fontsize=9.5, color=GREY, va="center")
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.675, 0.835), borderaxespad=0, labelspacing=0.7)
    return figure


def peaks_from(profile: Profile) -> str:
    """Return the source of a profile's peaks: `published` by the vendor, or `measured` with it."""
    return "measured" if profile.facts.get("peaks") == "measured" else "published"


def _rate_text(rate: float) -> str:
    return f"{rate / 1e12:,.0f} TFLOP/s" if rate >= 1e12 else f"{rate / 1e9:,.0f} GFLOP/s"


def _draw(axes: Axes, profile: Profile, stored: Points, style: SeriesStyle, tensor_parallel: int) -> Line2D:
    part = "dense" if "dense" in profile.parts else "layer"
    measured = is_measured(profile, part, tensor_parallel)
    marks: dict[str, Any] = {"linestyle": "none", "marker": style.marker, "markersize": 6.5, "markeredgecolor": style.colour,
                             "markerfacecolor": style.colour if measured else "white", "markeredgewidth": 1.3}  # fmt: skip
    axes.plot(stored.intensity, stored.rate, zorder=3, label=f"points {profile.name}", **marks)
    if part == "dense":
        model = Roofline(shape_of(profile), profile.bandwidth, profile.rate, tensor_parallel=tensor_parallel)
        work, size = gemm_work(model.shard, stored.width)
        reached = work / model.gemms(stored.width)
        axes.plot(work / size, reached, color=style.colour, zorder=2, label=f"model {profile.name}", **_DOTTED)
    return Line2D([], [], label=f"{profile.name}:\n{of_part(profile, part, tensor_parallel)}", **marks)
