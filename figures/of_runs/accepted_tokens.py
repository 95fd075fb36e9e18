"""Accepted draft tokens per round: simulated rounds against the distribution of Eq. 1 of [Leviathan2023].

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from numpy.typing import NDArray

from figures.common import point_names
from figures.common.style import COLOURS, GREY, INK, NAMES, canvas, require_columns, styled
from model.base import checks
from model.base.checks import ParameterError
from model.methods.speculative import theory as speculative

Floats = NDArray[np.float64]

MOST_POINTS = 12
_TOP = 1.5  # [inches] height of heading and legend
_KEYS = ("acceptance_rate", "draft_length", "tokens", "name")
_EQ_1, _CUT = "distribution of Eq. 1: whole drafts", "exact distribution: last drafts cut short"


def draw(rows: pl.DataFrame, about: str = "") -> Figure:
    """Draw shares of rounds by number of accepted tokens (`paths` as bars, `events` as crosses) and the theoretical law (circles).

    `rows` has point, view, accepted and rounds: the number of rounds of a point and view that accepted `accepted` tokens. Each
    point has a panel, titled by `name` if there is one. The law is drawn for points with acceptance_rate and draft_length; with
    tokens, also the law for decodings of that length, whose last drafts are shorter. `about` states what all points share.
    """
    table = require_columns(rows, "the figure of accepted tokens", ("point", "view", "accepted", "rounds"), (*_KEYS,))
    for view in table["view"].unique().sort():
        checks.one_of("view", view, ("paths", "events"))
    shown = table["point"].unique(maintain_order=True).to_list()
    if len(shown) > MOST_POINTS:
        raise ParameterError(f"the figure of accepted tokens has room for at most {MOST_POINTS} points, got {len(shown)}")
    across = 1 if len(shown) == 1 else 2 if len(shown) <= 4 else 3
    down = -(-len(shown) // across)
    with styled():
        width, height = max(7.6, 3.6 * across), 0.6 + 3.0 * down + 0.65 * (down - 1) + _TOP
        figure, only = canvas(width, height, (0.1, 0.6 / height, 0.87, 1 - (0.6 + _TOP) / height))
        panels = [only]
        if len(shown) > 1:
            only.remove()
            figure.subplots_adjust(
                left=0.75 / width, right=0.98, bottom=0.6 / height, top=1 - _TOP / height, wspace=0.3, hspace=0.65 / 3.0
            )
            panels = [figure.add_subplot(down, across, index + 1) for index in range(len(shown))]
        for index, (axes, point) in enumerate(zip(panels, shown, strict=True)):
            part = table.filter(pl.col("point").eq_missing(point))
            _panel(axes, part)
            axes.set_title(_name(part), fontsize=10)
            axes.set_ylabel("share of rounds")
            if index >= len(shown) - across:
                axes.set_xlabel("accepted draft tokens per round")
        left = panels[0].get_position().x0
        figure.text(left, 1 - 0.28 / height, "Accepted draft tokens per round", fontsize=13, weight="bold", va="center")
        subtitle = [about] * bool(about) + ["each round generates one more token, from the target"]
        figure.text(left, 1 - 0.54 / height, "; ".join(subtitle), fontsize=9.5, color=GREY, va="center")
        found = {label: handle for axes in panels for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
        every = {label: found[label] for label in (NAMES["paths"], NAMES["events"], _EQ_1, _CUT) if label in found}
        corner = (left, 1 - 0.7 / height)
        figure.legend(
            every.values(), every.keys(), loc="upper left", bbox_to_anchor=corner, ncols=2, borderaxespad=0, borderpad=0,
            handlelength=1.4, columnspacing=2.5,
        )  # fmt: skip
    return figure


def law(acceptance_rate: float, draft_length: int, tokens: int | None = None) -> Floats:
    """Probabilities that a round accepts 0, ..., gamma tokens: `speculative.tokens_pmf`, or its mean over the rounds of a decoding.

    A round that starts after m of l tokens drafts min(gamma, l - m - 1); the probability of a round there is that of
    `speculative.renewal_density`.

    >>> law(0.5, 2).tolist(), law(0.5, 2, tokens=1).tolist()
    ([0.5, 0.25, 0.25], [1.0, 0.0, 0.0])
    """
    whole = speculative.tokens_pmf(acceptance_rate, draft_length)
    if tokens is None:
        return whole
    starts = speculative.renewal_density(tokens, acceptance_rate, draft_length)
    total = starts[: max(tokens - draft_length, 0)].sum() * whole
    for drafted in range(min(draft_length, tokens)):
        total[: drafted + 1] += starts[tokens - 1 - drafted] * speculative.tokens_pmf(acceptance_rate, drafted)
    return np.asarray(total / starts.sum())


def _panel(axes: Axes, rows: pl.DataFrame) -> None:
    axes.grid(True, axis="y")
    first = rows.row(0, named=True)
    known = first["acceptance_rate"] is not None and first["draft_length"] is not None
    shares = {view: _shares(rows.filter(pl.col("view") == view)) for view in ("paths", "events")}
    bars = "events" if shares["paths"] is None else "paths"
    if (found := shares[bars]) is not None:
        axes.bar(*found, 0.8, color=COLOURS[5], edgecolor=INK, linewidth=0.4, label=NAMES[bars])
    if known:
        eq_1 = law(first["acceptance_rate"], first["draft_length"])
        counts = np.arange(len(eq_1))
        if first["tokens"] is not None:
            exact = law(first["acceptance_rate"], first["draft_length"], first["tokens"])
            axes.plot(counts, exact, linestyle="none", marker="_", markersize=15, markeredgewidth=1.6, color=COLOURS[1], label=_CUT)
        axes.plot(
            counts, eq_1, linestyle="none", marker="o", markersize=7, color=COLOURS[0], markerfacecolor="none", markeredgewidth=1.5,
            label=_EQ_1,
        )  # fmt: skip
    if bars == "paths" and (events := shares["events"]) is not None:
        axes.plot(*events, linestyle="none", marker="x", markersize=5, color=INK, label=NAMES["events"])
    longest = max(int(rows["accepted"].max()), first["draft_length"] if known else 0)  # type: ignore[arg-type]
    axes.set_xticks(range(0, longest + 1, 1 + longest // 16))
    axes.set_xlim(-0.6, longest + 0.6)
    axes.set_ylim(bottom=0)


def _shares(rows: pl.DataFrame) -> tuple[Floats, Floats] | None:
    if not rows.height or not rows["rounds"].sum():
        return None
    each = rows.group_by("accepted").agg(pl.col("rounds").sum()).sort("accepted")
    rounds = each["rounds"].to_numpy().astype(np.float64)
    return each["accepted"].to_numpy().astype(np.float64), rounds / rounds.sum()


def _name(rows: pl.DataFrame) -> str:
    first = rows.row(0, named=True)
    if first["name"] is not None:
        return str(first["name"])
    return ", ".join(point_names.words(first, ("acceptance_rate", "draft_length", "tokens"))) or f"point {first['point']}"
