"""Published times of [Yang2024], Table 3, against its theorem, alone and with one cost fitted on the other data set.

A second panel shows the time per token that the theorem leaves out, over the candidates. It would separate a cost that grows with
the processes from one that grows with the depth of a tree of them.

[Yang2024] S. Yang, G. Lee, J. Cho, D. Papailiopoulos, K. Lee. Predictive Pipelined Decoding: A Compute-Latency Trade-off for
Exact LLM Decoding. TMLR 2024, arXiv:2307.05908.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.markers import CARETLEFT, CARETRIGHT

from figures.common.style import COLOURS, GREY, INK, LINES, VIEWS, canvas, points, require_columns, styled, view_handles
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.published import ppd_table_3_fit as measured

MOST_POINTS = 16
"""For more points of a run the figure is not drawn: each point takes a row."""
_NEEDED = ("point", "view", "method", "outcomes_source", "seconds_per_layer", "latency_s")
_FITTED, _IDEAL = COLOURS[0], COLOURS[1]
# The tip of each marker is at its point, from opposite sides: the two data sets nearly coincide.
_POINTERS: tuple[Any, ...] = (CARETRIGHT, CARETLEFT)


def fits(rows: pl.DataFrame) -> bool:
    """Return whether points of a run replay the table, and few enough to draw."""
    return all(name in rows.columns for name in _NEEDED) and 0 < len(measured.replayed(rows.to_dicts())) <= MOST_POINTS


def draw(rows: pl.DataFrame) -> Figure:
    """Draw the time per token as published, as simulated and by the theorem alone; and the part that the theorem leaves out.

    `rows` is a results table, one row per point and view. Points that do not replay the table are left out.
    """
    found = measured.replayed(require_columns(rows, "the figure of Table 3", _NEEDED).to_dicts())
    if not found:
        raise ParameterError("the figure of Table 3 needs points that replay it, got none; take rows of `sim run ppd-table-3`")
    with styled():
        height = 2.9 + 0.55 * max(len(found), 4)
        figure, left = canvas(11.6, height, (0.112, 1.45 / height, 0.37, 1 - 2.55 / height))
        right = figure.add_axes((0.61, 1.45 / height, 0.28, 1 - 2.55 / height))
        figure.text(0.02, 1 - 0.3 / height, _headline(found), fontsize=13, weight="bold", va="center")
        about = f"{measured.MODEL}, {measured.TOKENS} tokens, published times (Table 3 of PPD);"
        about += f" exit layer {measured.EXIT_LAYER} assumed"
        figure.text(0.02, 1 - 0.58 / height, about, fontsize=9.5, color=GREY, va="center")
        _times(left, found)
        _missing(right)
        _legends(figure, left, right, found)
    return figure


def _headline(found: Sequence[Mapping[str, Any]]) -> str:
    ideal = [abs(point["run"].error(UnitCost(measured.LAYERS))) for point in found]
    said = f"Theorem 4.1 is {100 * min(ideal):.0f} to {100 * max(ideal):.0f} % too fast"
    # The error of a point fitted on its own data set says little.
    unseen = [point for point in found if point["fitted_on"] not in (None, measured.BOTH, point["run"].data_set)]
    if not unseen:
        return said
    errors = [abs(_mean(point) / point["run"].latency_s - 1) for point in unseen]
    return f"{said}; one cost fitted on the other data set leaves at most {100 * max(errors):.1f} %"


def _mean(point: Mapping[str, Any]) -> float:
    """Mean latency in the most exact view [s]."""
    latency: Mapping[str, tuple[float, Any]] = point["latency_s"]
    return next(latency[view][0] for view in VIEWS if view in latency)


def _ms(latency_s: float) -> float:
    return 1e3 * latency_s / measured.TOKENS


def _times(axes: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    axes.grid(True, axis="x")
    side = axes.get_yaxis_transform()
    for level, point in enumerate(found):
        run = point["run"]
        ideal, real, plain = (_ms(value) for value in (run.predicted_s(UnitCost(measured.LAYERS)), run.latency_s, run.plain_s))
        axes.plot([ideal, plain], [level, level], color=GREY, linewidth=0.8, zorder=1, label="span")
        axes.plot([plain], [level], linestyle="none", marker="|", markersize=16, markeredgewidth=2, color=GREY, label="plain")
        axes.plot([ideal], [level], linestyle="none", marker="D", markersize=7, color=_IDEAL, label="ideal")
        axes.plot([real, real], [level - 0.3, level + 0.3], color=INK, linewidth=2.2, zorder=2, label="measured")
        for view, (size, face, edge) in points(_FITTED).items():
            if view in point["latency_s"]:
                mean, half = point["latency_s"][view]
                if half is not None:
                    axes.hlines(level, _ms(mean - half), _ms(mean + half), colors=edge, linewidth=1.2, zorder=2.5)
                axes.plot(
                    [_ms(mean)], [level], linestyle="none", marker="o", markersize=size, markerfacecolor=face, zorder=3,
                    markeredgecolor=edge, markeredgewidth=1.3 if view == "formula" else 0.0, label=view,
                )  # fmt: skip
        on = point["fitted_on"]
        off = f"{100 * (_mean(point) / run.latency_s - 1):+.1f} %".replace("-", "\N{MINUS SIGN}")
        axes.text(1.02, level, off, transform=side, va="center", fontsize=9.5, color=_FITTED, weight="bold")
        name = f"{run.data_set}, k = {run.candidates}\n" + ("theorem alone" if on is None else f"fitted on {on}")
        axes.text(-0.02, level, name, transform=side, ha="right", va="center", fontsize=9)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_yticks([])
    axes.margins(x=0.05)
    axes.set_xlabel("time per token [ms]")
    axes.set_title("Published and simulated; right: error of the simulation", fontsize=10.5)


def _missing(axes: Axes) -> None:
    axes.grid(True)
    for law, line, marker in zip(measured.PER_PROCESS, LINES[:2], "os", strict=True):
        ks = list(range(1, measured.SEPARATING + 1))
        costs = [1e3 * measured.per_token_s(k, law) for k in ks]
        axes.plot(ks, costs, color=_FITTED, linestyle=line, linewidth=1.6, label=law)
        axes.plot(ks[-1:], costs[-1:], linestyle="none", marker=marker, markersize=7, markerfacecolor="white",
                  markeredgecolor=_FITTED, markeredgewidth=1.4, label=f"{law} end")  # fmt: skip
        says = measured.PER_PROCESS[law].formula
        axes.annotate(f"{costs[-1]:.1f} ms:\n{says}", (ks[-1], costs[-1]), (10, 0), textcoords="offset points", va="center",
                      fontsize=9, color=_FITTED, annotation_clip=False)  # fmt: skip
    axes.axhline(0, color=_IDEAL, linewidth=1.6, label="ideal")
    for name, pointer in zip(measured.data_sets(), _POINTERS, strict=True):
        own = [row for row in measured.rows() if row["data_set"] == name]
        axes.plot([row["candidates"] for row in own], [1e3 * row["missing_s"] for row in own], linestyle="none", marker=pointer,
                  markersize=7.5, color=INK, zorder=4, label=name)  # fmt: skip
    axes.set_xlim(0.6, measured.SEPARATING + 0.2)
    axes.set_ylim(-1.5, axes.get_ylim()[1])
    axes.set_xticks(range(1, measured.SEPARATING + 1))
    axes.set_xlabel("candidates k")
    axes.set_ylabel("published − theorem [ms per token]")
    axes.set_title("Time that the theorem leaves out", fontsize=10.5)


def _legends(figure: Figure, left: Axes, right: Axes, found: Sequence[Mapping[str, Any]]) -> None:
    dots: dict[str, Any] = {"linestyle": "none"}
    handles: list[Any] = [
        Line2D([], [], marker="|", markersize=13, markeredgewidth=2, color=GREY, label="plain decoding, published", **dots),
        Line2D([], [], marker="|", markersize=13, markeredgewidth=2.2, color=INK, label="with early prediction, published", **dots),
        Line2D([], [], marker="D", markersize=7, color=_IDEAL, label="Theorem 4.1, no overheads", **dots),
    ]
    handles += view_handles({view for point in found for view in point["latency_s"]}, _FITTED)
    low = 0.86 / figure.get_figheight()
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.02, low), ncols=2, borderaxespad=0)
    handles = [
        Line2D([], [], marker=pointer, markersize=7.5, color=INK, label=f"published − theorem, {name}", **dots)
        for name, pointer in zip(measured.data_sets(), _POINTERS, strict=True)
    ]
    handles.append(Line2D([], [], color=_IDEAL, linewidth=1.6, label="Theorem 4.1, no overheads"))
    handles += [
        Line2D([], [], color=_FITTED, linestyle=line, linewidth=1.6, label=f"fitted on both: {each.formula}")
        for line, each in zip(LINES, measured.PER_PROCESS.values(), strict=False)
    ]
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(0.52, low), ncols=2, borderaxespad=0)
