"""Throughput of a server against the time per token of its requests: a curve for each policy of draft length, over the loads."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from figures.common.label_placement import drawn_lines, label_points
from figures.common.style import GREY, canvas, category_styles, styled
from model.base import checks

MOST_CURVES = 12
"""More policies could not be distinguished."""


@dataclass(frozen=True)
class LoadedPoint:
    """One policy at one load.

    Parameters
    ----------
    load
        The load, as printed text.
    tpot_ms, tokens_per_s
        Mean time per output token, and output tokens per second of all requests, each as (value, low, high) of its 80 % interval;
        None where there is none.
    stable
        False if the queue grows.
    """

    load: str
    tpot_ms: tuple[float, float | None, float | None]
    tokens_per_s: tuple[float, float | None, float | None]
    stable: bool


def curves_of(table: Sequence[Mapping[str, Any]]) -> dict[str, list[LoadedPoint]]:
    """Points of each policy from the table of `sim serve`, in the order of the loads, but those without a time per token."""
    found: dict[str, list[LoadedPoint]] = {}
    for row in table:
        load = f"{row['concurrency']}" if row["rate"] is None else f"{row['rate']:.4g}/s"
        if row["mean_tpot_ms"] is None or row["output_tokens_per_s"] is None:
            continue
        values = []
        for name in ("mean_tpot_ms", "output_tokens_per_s"):
            checks.number(f"table.{name}", row[name], 0, 1e15)
            values.append((float(row[name]), row[f"{name}_low"], row[f"{name}_high"]))
        found.setdefault(str(row["policy"]), []).append(LoadedPoint(load, values[0], values[1], bool(row["stable"])))
    return found


def draw(curves: Mapping[str, Sequence[LoadedPoint]], *, title: str) -> Figure:
    """Draw a curve for each policy through its loads, with 80 % intervals; an open mark is a queue that grows."""
    checks.whole("policies", len(curves), 1, MOST_CURVES)
    with styled():
        figure, axes = canvas(8.6, 5.2, (0.1, 0.12, 0.6, 0.7))
        _scales(axes, [point for points in curves.values() for point in points])
        for (policy, points), style in zip(curves.items(), category_styles(len(curves)), strict=True):
            x, y = [each.tpot_ms[0] for each in points], [each.tokens_per_s[0] for each in points]
            axes.plot(x, y, color=style.colour, linestyle=style.line, linewidth=1.4, label=_short(policy), marker=style.marker,
                      markersize=6)  # fmt: skip
            for each in points:
                _interval(axes, each, style.colour)
                if not each.stable:
                    axes.plot(each.tpot_ms[0], each.tokens_per_s[0], marker=style.marker, markersize=6, linestyle="none",
                              markerfacecolor="white", markeredgecolor=style.colour)  # fmt: skip
        _name_loads(axes, next(iter(curves.values())))
        axes.set_xlabel("mean time per output token of a request [ms]")
        axes.set_ylabel("output tokens per second, all requests")
        axes.grid(True)
        axes.legend(title="policy", loc="upper left", bbox_to_anchor=(1.03, 1.0), borderaxespad=0)
        figure.text(0.1, 0.945, f"Throughput against time per token: {title}", fontsize=13, weight="bold", va="center")
        about = "a mark for each load, named at the first policy; lines: 80 % intervals; open: the queue grows; best: up and left"
        figure.text(0.1, 0.885, about, fontsize=9, color=GREY, va="center")
    return figure


def _short(policy: str, most: int = 26) -> str:
    return policy if len(policy) <= most else f"{policy[: most - 1]}…"


def _interval(axes: Axes, point: LoadedPoint, colour: str) -> None:
    (x, left, right), (y, low, high) = point.tpot_ms, point.tokens_per_s
    if left is not None and right is not None:
        axes.plot([left, right], [y, y], color=colour, linewidth=0.9, alpha=0.6)
    if low is not None and high is not None:
        axes.plot([x, x], [low, high], color=colour, linewidth=0.9, alpha=0.6)


def _scales(axes: Axes, points: Sequence[LoadedPoint]) -> None:
    """Logarithmic axes where values span a factor of three or more."""
    for values, axis, scale in (
        ([each.tpot_ms[0] for each in points], axes.xaxis, axes.set_xscale),
        ([each.tokens_per_s[0] for each in points], axes.yaxis, axes.set_yscale),
    ):
        if min(values) > 0 and max(values) >= 3 * min(values):
            scale("log")
            axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axis.set_minor_formatter(NullFormatter())
        else:
            axis.set_major_locator(MaxNLocator(6))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.10g}"))


def _name_loads(axes: Axes, points: Sequence[LoadedPoint]) -> None:
    """Name the loads at the marks of a policy."""
    axes.autoscale_view()
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())
    label_points(axes, [(each.tpot_ms[0], each.tokens_per_s[0], each.load) for each in points], drawn_lines(axes))
