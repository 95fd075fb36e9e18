"""Latency against compute: Figures 3 and 4 of [Yang2024], with simulated points over the theory's curves.

Algorithm 2's points lie on the asymptotic curves for any number of tokens l: a match rate p acts like p (l - 1)/l, because a match
of the last token saves nothing.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from numpy.typing import NDArray

from figures.common.label_placement import drawn_lines, label_curve_ends, label_points
from figures.common.style import (
    GREY,
    INK,
    PALE,
    VIEWS,
    SeriesStyle,
    canvas,
    points,
    require_columns,
    series_styles,
    styled,
    view_handles,
)
from model.base import checks
from model.methods.ppd import theory as ppd
from model.published.ppd_tables import TOKENS

Floats = NDArray[np.float64]

AXES = {
    "mean_busy_units": "mean busy units",
    "compute_per_token": "GPU-time per token, relative to plain decoding",
}
_Y = "relative_latency"
_KEYS = {
    "method": "{}",
    "form": "{} form",
    "layers": "{} layers",
    "exit_layer": "exit layer {}",
    "candidates": "k = {}",
    "readers": "{}",
    "flat_tokens": "{} tokens",
}
_ENDS = ("low", "high", "input_low", "input_high")
_MOST_LABELS, _MOST_ENTRIES = 60, 8
_RATES = np.linspace(0.0, 1.0, 201)


@dataclass(frozen=True)
class _MethodCurve:
    """Points on one curve: one choice of the method, for any match rate."""

    name: str
    rows: pl.DataFrame
    curve: tuple[Floats, Floats] | None
    style: SeriesStyle


def draw(rows: pl.DataFrame, x: str = "mean_busy_units") -> Figure:
    """Draw the relative latency per token over `x`: mean busy units ("mean_busy_units") or compute per token ("compute_per_token").

    `rows` is a results table: one row per point and view. A curve is drawn for each choice of Predictive Pipelined Decoding, for
    match rates from 0 to 1 and without overheads; points with overheads, or with too few units, lie off their curves.
    """
    checks.one_of("x", x, AXES)
    intervals = [f"{metric}_{end}" for metric in (x, _Y) for end in _ENDS]
    optional = ("point", "tokens", "match_rate", "data_set", "head", "batched", *_KEYS, *intervals)
    table = require_columns(rows, "the trade-off figure", ("view", x, _Y), optional)
    table = table.filter(pl.col(x).is_not_null() & pl.col(_Y).is_not_null())
    table = require_columns(table, f"the trade-off figure (with values of {x} and {_Y})", ())
    for view in table["view"].unique().sort():
        checks.one_of("view", view, VIEWS)
    series = _series(table, x)
    with styled():
        figure, axes = canvas(9.6, 5.8, (0.075, 0.11, 0.62, 0.75))
        axes.grid(True)
        axes.set_xlabel(AXES[x])
        title = "Latency against busy units" if x == "mean_busy_units" else "Latency against GPU-time"
        figure.text(0.075, 0.935, title, fontsize=13, weight="bold")
        figure.text(0.075, 0.9, _constants(table), fontsize=9.5, color=GREY)
        axes.plot([1], [1], linestyle="none", marker="*", markersize=11, color=INK, label="plain decoding", zorder=4)
        for one in series:
            _draw(axes, one, x)
        _extend(axes)
        cut = "  (axis starts above 0)" if axes.get_ylim()[0] > 0 else ""
        axes.set_ylabel(f"latency per token, relative to plain decoding{cut}")
        lines = drawn_lines(axes)
        if len(series) <= _MOST_ENTRIES:
            lines += label_curve_ends(axes, [one.curve for one in series if one.curve is not None])
        left_out = label_points(axes, _labels(table, x, axes), lines)
        _legends(figure, series, table, x)
        notes = [_caption_note(table)] if x == "mean_busy_units" else []
        if left_out:
            notes.append(f"{left_out} labels omitted.")
        text = "\n\n".join(textwrap.fill(note, 42) for note in notes if note)
        figure.text(0.715, 0.11, text, fontsize=8, color=GREY, va="bottom", linespacing=1.25)
    return figure


def _series(table: pl.DataFrame, x: str) -> list[_MethodCurve]:
    # Only the flat form's curve below layers/2 depends on the number of tokens.
    below = (pl.col("form") == "flat") & (2 * pl.col("exit_layer") < pl.col("layers"))
    table = table.with_columns(flat_tokens=pl.when(below).then(pl.col("tokens")))
    if True in table["batched"]:
        named = pl.when(pl.col("batched")).then(pl.lit("batched")).otherwise(pl.lit("one unit each"))
        table = table.with_columns(readers=pl.when(pl.col("candidates") > 1).then(named))
    keys = list(_KEYS)
    groups = table.partition_by(keys, maintain_order=True)
    groups.sort(key=lambda group: [(value is None, value) for value in group.select(keys).row(0)])
    # A parameter that some method lacks does not vary for that reason.
    varying = [key for key in keys if table[key].drop_nulls().n_unique() > 1] or ["candidates"]
    result = []
    for group, style in zip(groups, series_styles(len(groups)), strict=True):
        first = group.row(0, named=True)
        words = [_KEYS[key].format(first[key]) for key in varying if first[key] is not None]
        name = textwrap.fill(", ".join(words) or first["method"] or "points", 34)
        tokens = group["tokens"].max()
        result.append(_MethodCurve(name, group, _curve(first, tokens, x), style))
    return result


def _curve(choice: Mapping[str, Any], tokens: Any, x: str) -> tuple[Floats, Floats] | None:
    """The closed form over match rates from 0 to 1, or None where this choice has none."""
    d, exit_at, k, form = (choice[key] for key in ("layers", "exit_layer", "candidates", "form"))
    if choice["method"] not in (None, "ppd") or None in (d, exit_at, k):
        return None
    k = 1 if choice["batched"] else k  # batched candidates use one unit
    if 2 * exit_at == d:
        units = ppd.mean_busy_units if x == "mean_busy_units" else ppd.compute_per_token
        return units(_RATES, k), ppd.relative_latency(_RATES)
    if tokens is None or (2 * exit_at < d and form not in ("nested", "flat")):
        return None
    latency = (ppd.flat_latency if form == "flat" else ppd.expected_latency)(d, exit_at, tokens, _RATES)
    compute = {"flat": ppd.flat_compute, "nested": ppd.nested_compute}.get(form, ppd.expected_compute)
    busy = compute(d, exit_at, tokens, _RATES, k)
    return (busy / latency if x == "mean_busy_units" else busy / (d * tokens)), latency / (d * tokens)


def _draw(axes: Axes, series: _MethodCurve, x: str) -> None:
    colour, marker, line = series.style
    if series.curve is not None:
        axes.plot(*series.curve, color=colour, linestyle=line, linewidth=1.4, label=f"curve {series.name}", zorder=2)
    names = [x, _Y, *(f"{metric}{kind}_{end}" for metric in (x, _Y) for kind in ("", "_input") for end in ("low", "high"))]
    values = series.rows.select(pl.col(names).cast(pl.Float64)).to_numpy()  # a missing bound becomes NaN
    of = dict(zip(names, values.T, strict=True))
    for kind, shade, width in (("", colour, 1.2), ("_input", PALE, 4.5)):
        across, up = ([of[f"{metric}{kind}_{end}"] for end in ("low", "high")] for metric in (x, _Y))
        for metric, ends in ((x, [(end, of[_Y]) for end in across]), (_Y, [(of[x], end) for end in up])):
            lines = np.array(ends).transpose(2, 0, 1)
            known = [*lines[np.isfinite(lines).all(axis=(1, 2))]]
            axes.add_collection(LineCollection(known, colors=shade, linewidths=width, zorder=1.5, label=f"{metric}{kind}"))
    alone = series.rows["view"].n_unique() == 1  # no other view's mark to nest in
    for view, (size, face, edge) in points(colour).items():
        part = series.rows.filter(pl.col("view") == view)
        if part.height:
            axes.plot(
                part[x], part[_Y], linestyle="none", marker=marker, markersize=max(size, 6.0 * alone), markerfacecolor=face,
                markeredgecolor=edge, markeredgewidth=1.3 if view == "formula" else 0.0, label=f"{view} {series.name}", zorder=3,
            )  # fmt: skip


def _extend(axes: Axes) -> None:
    axes.margins(x=0.09, y=0.05)
    axes.autoscale_view()
    axes.set_xlim(axes.get_xlim())
    axes.set_ylim(axes.get_ylim())


def _labels(table: pl.DataFrame, x: str, axes: Axes) -> list[tuple[float, float, str]]:
    """One label per point: its data set and head, or the columns in which points differ; coinciding points share one."""
    # The label stands at the last view of a point, which includes waiting.
    once = table.unique("point", keep="last", maintain_order=True) if table["point"].null_count() == 0 else table
    named = once["data_set"].null_count() < once.height
    words = {"units": "{} units", "tokens": "{} tokens", "match_rate": "p = {:.3g}"}
    sweeps = [key for key in words if key in once.columns and once[key].n_unique() > 1]
    # Units distinguish points only where there are fewer than the method uses.
    if "units" in sweeps and not ("contended" in once.columns and once["contended"].any()):
        sweeps.remove("units")
    devices = [name for name in ("cost.device", "cost.profile") if name in once.columns and once[name].n_unique() > 1]
    named = named and (once["data_set"].n_unique() > 1 or once["head"].n_unique() > 1 or not sweeps)
    labels = []
    for row in once.iter_rows(named=True):
        if named:
            text = f"{row['data_set'] or ''} {'trained' if row['head'] == 'trained' else ''}".strip()
        else:
            text = ", ".join(words[key].format(row[key]) for key in sweeps if row[key] is not None)
        labels.append((row[x], row[_Y], text, next((str(row[name]) for name in devices if row[name] is not None), "")))
    shared = _shared(axes, labels)
    return shared if len(shared) <= _MOST_LABELS else []


def _shared(axes: Axes, labels: Sequence[tuple[float, float, str, str]]) -> list[tuple[float, float, str]]:
    """Merge equal labels within a marker's width into one, with the names of their devices."""
    groups: list[tuple[float, float, str, list[str]]] = []
    for x, y, text, device in labels:
        at = axes.transData.transform((x, y))
        near = (group for group in groups if group[2] == text and np.hypot(*(axes.transData.transform(group[:2]) - at)) < 12)
        if (group := next(near, None)) is None:
            groups.append((x, y, text, [device]))
        else:
            group[3].append(device)
    found = []
    for x, y, text, names in groups:
        known = [name for name in dict.fromkeys(names) if name]
        device = ", ".join(known) if len(known) < 2 else f"{len(known)} devices"
        found.append((x, y, ", ".join(word for word in (text, device) if word)))
    return [each for each in found if each[2]]


def _legends(figure: Figure, series: list[_MethodCurve], table: pl.DataFrame, x: str) -> None:
    shown = series
    if len(series) > _MOST_ENTRIES:
        shown = [series[index] for index in np.linspace(0, len(series) - 1, _MOST_ENTRIES).round().astype(int)]
    handles = [
        Line2D([], [], color=one.style.colour, marker=one.style.marker, markersize=6, label=one.name,
               linestyle=one.style.line if one.curve is not None else "none")
        for one in shown
    ]  # fmt: skip
    title = "series"
    if any(one.curve is not None for one in series):
        title = "k candidates; closed form for match\nrates p from 0 to 1, no overheads"
    if len(shown) < len(series):
        title += f"\n({len(shown)} of {len(series)} curves named)"
    place: dict[str, Any] = {"loc": "upper left", "alignment": "left", "handlelength": 3.2, "borderaxespad": 0}
    upper = figure.legend(handles=handles, title=title, bbox_to_anchor=(0.71, 0.86), **place)
    handles = [Line2D([], [], linestyle="none", marker="*", markersize=11, color=INK, label="plain decoding")]
    handles += view_handles(set(table["view"]))
    if table[f"{x}_low"].count() or table[f"{_Y}_low"].count():
        handles.append(Line2D([], [], color=GREY, linewidth=1.2, label="95 % interval from sampling"))
    if table[f"{x}_input_low"].count() or table[f"{_Y}_input_low"].count():
        handles.append(Line2D([], [], color=PALE, linewidth=4.5, label="input uncertainty"))
    below = upper.get_window_extent().y0 / figure.bbox.height
    figure.legend(handles=handles, title="points", bbox_to_anchor=(0.71, below), **place)


def _constants(table: pl.DataFrame) -> str:
    words = {**_KEYS, "tokens": "{} tokens"}
    words.pop("flat_tokens")
    same = [words[key].format(table[key].drop_nulls()[0]) for key in words if table[key].drop_nulls().n_unique() == 1]
    return ", ".join(same).replace("ppd", "Predictive Pipelined Decoding")


def _caption_note(table: pl.DataFrame) -> str:
    """Note on the caption of the paper's Figure 3, which combines numbers of two settings; computed here."""
    kind = (pl.col("data_set") == "squad") & (pl.col("head") == "trained") & (pl.col("candidates") == 3)
    half = (pl.col("layers") == 2 * pl.col("exit_layer")) & pl.col("tokens").is_not_null() & pl.col("match_rate").is_not_null()
    # Only for the paper's figure: all its data sets, in layer-times.
    if table["data_set"].n_unique() < 2 or ("seconds_per_layer" in table.columns and table["seconds_per_layer"].count()):
        return ""
    found = table.filter(kind & half & (pl.col("method").fill_null("ppd") == "ppd"))
    if not found.height:
        return ""
    row = found.row(0, named=True)
    d, exit_at, p, k = (row[key] for key in ("layers", "exit_layer", "match_rate", "candidates"))
    n = TOKENS["squad"]
    latency, compute = float(ppd.expected_latency(d, exit_at, n, p)), float(ppd.expected_compute(d, exit_at, n, p, k))
    return (
        f"squad trained, k = {k}, p = {p:g}: for many tokens Eq. 3 gives {100 - 100 * float(ppd.relative_latency(p)):.1f} % less"
        f" latency and Eq. 5 gives {float(ppd.mean_busy_units(p, k)):.3f} busy units; for the {n} tokens that the rate was"
        f" measured on"
        f" Theorem 4.1 gives {100 - 100 * latency / (d * n):.1f} % and E[C]/E[T] = {compute / latency:.4f}. The paper's caption"
        " (34 %, 3.2 times) combines one number from each."
    )
