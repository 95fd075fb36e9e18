"""Speed-up of speculative decoding over acceptance rate, cost ratio, draft length, or number of tokens.

Curves are the theory's; simulated points lie over them. With a number of tokens the curves are exact for it (the last round is cut
short), without one they are Theorem 3.8 of [Leviathan2023]. They assume i.i.d. acceptances, verification in one pass, and no other
costs: rows whose formula differs have no curve.

[Leviathan2023] Y. Leviathan, M. Kalman, Y. Matias. Fast Inference from Transformers via Speculative Decoding. ICML 2023,
arXiv:2211.17192.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter
from numpy.typing import NDArray

from figures.common import point_names
from figures.common.label_placement import label_at_right
from figures.common.style import GREY, INK, VIEWS, SeriesStyle, canvas, points, require_columns, series_styles, styled, view_handles
from model.base import checks
from model.methods.speculative import theory as speculative

Floats = NDArray[np.float64]

AXES = {
    "acceptance_rate": "acceptance rate α per tested token",
    "cost_ratio": "cost ratio c (draft pass / target pass)",
    "draft_length": "draft length γ  [tokens]",
    "tokens": "generated tokens",
}
_KEYS = (
    "method", "placement", "acceptance_rate", "cost_ratio", "draft_length", "tokens", "sequences", "batching", "fan_out", "backup",
)  # fmt: skip
_TITLES = {
    "acceptance_rate": "Speculative decoding: speed-up against acceptance rate",
    "cost_ratio": "Speculative decoding: speed-up against the cost of a draft",
    "draft_length": "Speculative decoding: speed-up against draft length",
    "tokens": "Speculative decoding: speed-up against the number of tokens",
}
_BOUNDS = ("speedup_low", "speedup_high")
_MOST_PANELS = 6
MOST_MARKS = 24
"""Most marks on a series; its line goes through all points."""


@dataclass(frozen=True)
class _Series:
    """Points that differ only in x, with the theory's curve where there is one."""

    name: str
    rows: pl.DataFrame
    curve: tuple[Floats, Floats] | None
    choice: Mapping[str, Any]
    style: SeriesStyle


def grid(**values: Sequence[float]) -> pl.DataFrame:
    """Return all combinations of these values as rows, to draw theory without a simulation.

    >>> grid(draft_length=[1, 3], cost_ratio=[0.1]).rows()
    [(1, 0.1), (3, 0.1)]
    """
    return pl.DataFrame(list(itertools.product(*values.values())), schema=list(values), orient="row")


def draw(rows: pl.DataFrame, x: str = "acceptance_rate") -> Figure:
    """Draw the speed-up over `x`, one of `AXES`, with a panel per cost ratio (per acceptance rate, if x is the cost ratio).

    Batch sizes are separate series, or separate panels where each has its own cost ratio.

    `rows` is a results table, or rows of parameters alone (`grid`): acceptance_rate, draft_length, cost_ratio and, for curves that
    are exact for a number of tokens, tokens. The column of x is optional where nothing was simulated.
    """
    checks.one_of("x", x, AXES)
    needed = [name for name in AXES if name not in (x, "tokens")]
    table = require_columns(rows, "the speed-up figure", needed, (*AXES, *_KEYS, "outcomes", "view", "speedup", *_BOUNDS))
    for view in table["view"].drop_nulls().unique().sort():
        checks.one_of("view", view, VIEWS)
    panel_key = "acceptance_rate" if x == "cost_ratio" else "cost_ratio"
    panels = table.partition_by(panel_key, maintain_order=True)
    panels.sort(key=lambda part: (part[panel_key][0] is None, part[panel_key][0]))
    shown = panels
    if len(panels) > _MOST_PANELS:
        shown = [panels[index] for index in np.linspace(0, len(panels) - 1, _MOST_PANELS).round().astype(int)]
    where = _range(table, x)
    parts = [_series(part, table, x, panel_key, where) for part in shown]
    with styled():
        simulated = table.drop_nulls([x, "speedup", "view"])
        subtitle = _subtitle(table, x, panel_key, parts)
        figure, axes = _panels(len(shown), 0.28 * (simulated.height > 0), max(len(each.name) for one in parts for each in one))
        low, high = _heights(parts)
        left_out = 0
        for index, (one, series) in enumerate(zip(axes, parts, strict=True)):
            _frame(one, x, where, (low, high))
            _limits(one, x, series, (low, high))
            for each in series:
                _draw(one, each, x)
            left_out += label_at_right(one, [(_end(each, x), each.name, each.style.colour) for each in series if each.name])
            if len(shown) > 1:
                one.set_title(_panel_name(shown[index], table, panel_key, x), fontsize=10)
            if index % 3 == 0:
                one.set_ylabel("speed-up over plain decoding")
            one.tick_params(labelleft=index % 3 == 0)
        subtitle += [f"{len(shown)} of {len(panels)} panels"] * (len(shown) < len(panels))
        subtitle += [f"{left_out} labels omitted"] * (left_out > 0)
        left, height = axes[0].get_position().x0, figure.get_figheight()
        figure.text(left, 1 - 0.3 / height, _TITLES[x], fontsize=13, weight="bold", va="center")
        figure.text(left, 1 - 0.57 / height, ";  ".join(subtitle), fontsize=9.5, color=GREY, va="center")
        _legend(figure, axes[0], simulated)
    return figure


# --- Series and curves ----------------------------------------------------------------------------------------------


def _series(part: pl.DataFrame, table: pl.DataFrame, x: str, panel_key: str, where: Floats) -> list[_Series]:
    keys = [key for key in _keys(table) if key not in (x, panel_key)]
    varying = [key for key in keys if part[key].drop_nulls().n_unique() > 1] or (["draft_length"] if x != "draft_length" else [])
    order = table.select(keys).unique(maintain_order=True).rows()
    order.sort(key=lambda row: [(value is None, value) for value in row])
    styles = dict(zip(order, series_styles(len(order)), strict=True))
    groups = part.partition_by(keys, maintain_order=True)
    groups.sort(key=lambda group: order.index(group.select(keys).row(0)))
    result = []
    for group in groups:
        choice = group.row(0, named=True)
        words = [point_names.method(choice)] * ("method" in varying and choice["method"] is not None)
        words += point_names.words(choice, [key for key in varying if key != "method"])
        if not words and any(key in varying for key in ("sequences", "batching")):
            words = ["batch of 1"]
        curve = (where, _theory(choice, x, where)) if _holds(group, x) else None
        result.append(_Series(", ".join(words), group, curve, choice, styles[group.select(keys).row(0)]))
    return result


def _keys(table: pl.DataFrame) -> list[str]:
    """Return the columns that distinguish rows; an axis (with a dot in its name) that the others determine is left out."""
    keys = list(_KEYS)
    for name in (name for name in table.columns if "." in name):
        if table.select(*keys, name).unique().height > table.select(keys).unique().height:
            keys.append(name)
    return keys


def swept(table: pl.DataFrame) -> list[str]:
    """Return the axes along which rows differ while all else is equal."""
    table = require_columns(table, "the speed-up figure", list(AXES), _KEYS)
    keys, found = _keys(table), []
    for x in AXES:
        counts = table.group_by([key for key in keys if key != x]).agg(pl.col(x).drop_nulls().n_unique())
        found += [x] if (counts[x] > 1).any() else []
    return found


def _holds(group: pl.DataFrame, x: str) -> bool:
    """Return whether the theory applies to these rows: where they have a formula, whether it agrees."""
    if group["method"][0] not in (None, "speculative"):
        return False
    own = group.filter(view="formula").drop_nulls([x, "speedup"])
    if not own.height:
        return group["outcomes"][0] in (None, "iid")
    theory = [float(_theory(row, x, np.asarray(float(row[x])))) for row in own.iter_rows(named=True)]
    return bool(np.allclose(theory, own["speedup"].to_numpy(), rtol=1e-6, atol=0))


def _theory(choice: Mapping[str, Any], x: str, where: Floats) -> Floats:
    at = {name: choice[name] for name in ("acceptance_rate", "draft_length", "cost_ratio")}
    if x != "tokens":
        at[x] = where
        if choice["tokens"] is None:
            return speculative.speedup(**at)
    return speculative.finite_speedup(where if x == "tokens" else choice["tokens"], **at)


def _range(table: pl.DataFrame, x: str) -> Floats:
    known = table[x].drop_nulls()
    most: Any = known.max() if known.len() else None  # a column without values has no maximum
    if x == "acceptance_rate":
        return np.linspace(0, 1, 401)
    if x == "cost_ratio":
        # Up to the break-even at c = alpha at least.
        even: Any = table["acceptance_rate"].max()
        return np.linspace(0, max(1.1 * (most or 0.0), 1.1 * even, 0.5), 401)
    if x == "draft_length":
        return np.arange(0.0, max(most or 12, 3) + 3)
    last = max(most or 0, 512)
    # All lengths while a cut round is visible, then fewer.
    return np.unique(np.concatenate([np.arange(1.0, 129), np.geomspace(128, last, 80).round()]))


def _heights(parts: Sequence[Sequence[_Series]]) -> tuple[float, float]:
    """Least and greatest speed-up of curves and points, including 1."""
    values = [np.ones(1)]
    for each in itertools.chain.from_iterable(parts):
        values += [] if each.curve is None else [each.curve[1]]
        values += [each.rows[name].drop_nulls().to_numpy() for name in ("speedup", *_BOUNDS)]
    every = np.concatenate(values)
    every = every[np.isfinite(every) & (every > 0)]
    return float(every.min()), float(every.max())


def _end(series: _Series, x: str) -> float:
    if series.curve is not None:
        return float(series.curve[1][-1])
    last = series.rows.drop_nulls([x, "speedup"]).sort(x)
    return float(last["speedup"][-1]) if last.height else 1.0


def _panel_name(part: pl.DataFrame, table: pl.DataFrame, panel_key: str, x: str) -> str:
    """Name a panel by the values that its rows share and other panels do not."""
    keys = [key for key in _keys(table) if key not in (x, panel_key, "method")]
    keys = [key for key in keys if part[key].n_unique() == 1 < table[key].n_unique()]
    return ", ".join(point_names.words(part.row(0, named=True), [panel_key, *keys]))


# --- The picture ----------------------------------------------------------------------------------------------------


def _panels(count: int, legend: float, letters: int) -> tuple[Figure, list[Axes]]:
    """Return panels, up to three in a row, with a legend of this height [inches] and room for names of `letters` letters."""
    across, down = min(count, 3), -(-count // 3)
    top = 0.85 + legend + 0.25 * (count > 1)
    inner, margin = 6.2 if count == 1 else 3.1, max(0.4 + 0.078 * letters, 0.85)
    width, height = 0.75 + (inner + margin) * across, 0.65 + 3.5 * down + 0.75 * (down - 1) + top
    figure, only = canvas(width, height, (0.75 / width, 0.65 / height, inner / width, 1 - (0.65 + top) / height))
    if count == 1:
        return figure, [only]
    only.remove()
    figure.subplots_adjust(
        left=0.75 / width, right=1 - margin / width, bottom=0.65 / height, top=1 - top / height, wspace=margin / inner,
        hspace=0.75 / 3.5,
    )  # fmt: skip
    axes = [figure.add_subplot(down, across, 1)]
    axes += [figure.add_subplot(down, across, index + 2, sharey=axes[0]) for index in range(count - 1)]
    return figure, axes


def _frame(axes: Axes, x: str, where: Floats, heights: tuple[float, float]) -> None:
    low, high = heights
    axes.grid(True)
    if x == "tokens":
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(where[0], where[-1])
    if high / low > 4:
        axes.set_yscale("log", base=2)
        ticks = [step * 2.0**power for power in range(-10, 10) for step in ((1, 1.5) if power >= -1 else (1,))]
        axes.yaxis.set_major_locator(FixedLocator([tick for tick in ticks if low / 1.1 <= tick <= high * 1.2]))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.set_ylim(low / 1.1, high * 1.2)
    else:
        room = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - room, high + 2 * room)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.axhline(1, color=INK, linewidth=1.0, zorder=1.8, label="plain")
    axes.set_xlabel(AXES[x])


def _limits(axes: Axes, x: str, series: Sequence[_Series], heights: tuple[float, float]) -> None:
    """Draw the oracle bound and the break-even alpha = c; over tokens, the limit for many tokens; over draft length, the best."""
    if x in ("acceptance_rate", "cost_ratio"):
        other = series[0].choice["cost_ratio" if x == "acceptance_rate" else "acceptance_rate"]
        where = np.linspace(*axes.get_xlim(), 801)
        bound = speculative.oracle_speedup(where, other) if x == "acceptance_rate" else speculative.oracle_speedup(other, where)
        axes.plot(where, bound, color=GREY, linewidth=2.2, linestyle=(0, (1.2, 1.2)), zorder=1.9, label="oracle bound")
        span = (0.0, other) if x == "acceptance_rate" else (other, axes.get_xlim()[1])
        if span[1] > span[0]:
            axes.axvspan(*span, facecolor="#ececec", zorder=0.5, label="plain decoding is fastest")
        axes.axvline(other, color=GREY, linewidth=0.9, linestyle=(0, (4, 2)), label="break-even")
        several = any(each.choice["method"] not in (None, "speculative") for each in series)
        _name_limits(axes, x, other, where, bound, "bound of drafting\nin turn" if several else "bound on any\ndraft length")
    for each in series:
        if each.curve is None:
            continue
        at = {name: each.choice[name] for name in ("acceptance_rate", "draft_length", "cost_ratio")}
        if x == "tokens":
            many = float(speculative.speedup(**at))
            axes.axhline(many, color=each.style.colour, linewidth=0.8, linestyle=(0, (1, 2)), label=f"many tokens {each.name}")
        if x == "draft_length":
            best = int(each.curve[1].argmax())
            axes.plot(
                [best], [each.curve[1][best]], linestyle="none", marker="*", markersize=17, color=each.style.colour,
                markeredgecolor="white", zorder=2.4, label=f"best {each.name}",
            )  # fmt: skip


def _name_limits(axes: Axes, x: str, other: float, where: Floats, bound: Floats, name: str) -> None:
    low, high = axes.get_ylim()
    left, right = axes.get_xlim()
    middle = np.sqrt(low * high) if axes.get_yscale() == "log" else (low + high) / 2
    level = (high * middle**2) ** (1 / 3) if axes.get_yscale() == "log" else (high + 2 * middle) / 3
    # The area above the bound is empty: its label goes at this level, or near the end of a lower bound.
    if x == "acceptance_rate":
        index = min(int(np.argmax(bound >= level)) or len(where), 6 * len(where) // 7)
    else:
        index = max(int(np.argmax(bound <= level)), len(where) // 12)
    shift, edge = (-11, "right") if x == "acceptance_rate" else (11, "left")
    text = axes.annotate(
        name, (where[index], min(bound[index], high)), (shift, 4), textcoords="offset points",
        fontsize=8.5, color=GREY, ha=edge, va="bottom", linespacing=1.05, zorder=4,
    )  # fmt: skip
    text.set_path_effects([withStroke(linewidth=3, foreground="#ffffff")])  # readable where a curve crosses it
    if not left <= other <= right:
        return
    side = axes.get_xaxis_transform()
    shift, edge = (4, "left") if x == "acceptance_rate" else (-4, "right")  # next to the shaded area, not in it
    axes.annotate(
        "α = c", (other, 0.02), (shift, 0), xycoords=side, textcoords="offset points", fontsize=8.5, color=GREY, ha=edge,
    )  # fmt: skip
    inside = other - left if x == "acceptance_rate" else right - other
    if inside > 0.28 * (right - left):
        centre = (left + other) / 2 if x == "acceptance_rate" else (other + right) / 2
        axes.text(centre, 0.94, "plain decoding\nis fastest", transform=side, fontsize=8.5, color=GREY, ha="center", va="center")


def _draw(axes: Axes, series: _Series, x: str) -> None:
    colour, marker, line = series.style
    if series.curve is not None:
        marks: dict[str, Any] = {"marker": ".", "markersize": 4} if x == "draft_length" else {}
        axes.plot(*series.curve, color=colour, linestyle=line, linewidth=1.5, zorder=2, label=f"curve {series.name}", **marks)
    rows = series.rows.drop_nulls([x, "speedup", "view"])
    whole = rows.drop_nulls(_BOUNDS)
    whole = whole.filter(pl.all_horizontal(pl.col(_BOUNDS).is_finite()))
    if whole.height:
        axes.vlines(whole[x], whole[_BOUNDS[0]], whole[_BOUNDS[1]], colors=colour, linewidth=1.3, zorder=2.5, label="interval")
    first = next((view for view in VIEWS if view in set(rows["view"])), None)
    if series.curve is None and first is not None and rows[x].n_unique() > 1:
        joined = rows.filter(pl.col("view") == first).sort(x)
        axes.plot(joined[x], joined["speedup"], color=colour, linestyle=line, linewidth=1.0, zorder=2, label=f"join {series.name}")
    for view, (size, face, edge) in points(colour).items():
        part = rows.filter(pl.col("view") == view).sort(x)
        if part.height:
            axes.plot(
                part[x], part["speedup"], linestyle="none", marker=marker, markersize=size, markerfacecolor=face,
                markeredgecolor=edge, markeredgewidth=1.3 if view == "formula" else 0.0, zorder=3, label=f"{view} {series.name}",
                markevery=-(-part.height // MOST_MARKS),
            )  # fmt: skip


def _subtitle(table: pl.DataFrame, x: str, panel_key: str, parts: Sequence[Sequence[_Series]]) -> list[str]:
    """Parts of the subtitle: the values that all points share, and the meaning of the curves."""
    same = [key for key in AXES if key != x and table[key].drop_nulls().n_unique() == 1]
    same += [key for key in ("sequences", "batching") if table[key].n_unique() == 1]
    words = point_names.words(table.row(0, named=True), [key for key in same if key != panel_key or len(parts) == 1])
    subtitle = [", ".join(words)] if words else []
    if any(each.curve is not None for each in itertools.chain.from_iterable(parts)):
        exact = x == "tokens" or table["tokens"].count()
        subtitle.append(f"curves: {'exact for these tokens' if exact else 'Theorem 3.8, many tokens'}, verification in one pass")
        subtitle += {"draft_length": ["star: best γ"], "tokens": ["dotted: many tokens"]}.get(x, [])
    return subtitle


def _legend(figure: Figure, first: Axes, simulated: pl.DataFrame) -> None:
    handles = view_handles(set(simulated["view"]))
    if simulated[_BOUNDS[0]].count():
        handles.append(Line2D([], [], color=GREY, linewidth=1.3, label="95 % interval from sampling"))
    if handles:
        corner = (first.get_position().x0, 1 - 0.75 / figure.get_figheight())
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=corner, ncols=4, borderaxespad=0, borderpad=0, handlelength=1.2,
            columnspacing=1.5,
        )  # fmt: skip
