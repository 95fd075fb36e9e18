"""Quality against cost of lossy methods: agreement with the target over the cost, measured on real models.

Similar to Figures 2 and 9 of [Kim2023], with early exit [Schuster2022] and SkipDecode [DelCorro2023] on the same axes. Their
quality is the score of a task; here it is the share of tokens equal to the target's choice, or their log-likelihood.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
[Schuster2022] T. Schuster et al. Confident Adaptive Language Modeling. NeurIPS 2022, arXiv:2207.07061.
[DelCorro2023] L. Del Corro et al. SkipDecode. arXiv:2307.02628.
"""

from __future__ import annotations

from typing import NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter

from figures.common.style import GREY, INK, LINES, SeriesStyle, panels_in_row, require_columns, series_styles, styled
from model.base import checks
from model.methods import registry

COSTS = {
    "weight_bytes_over_plain": "weights read per token, relative to plain decoding",
    "flops_over_plain": "operations per token, relative to plain decoding",
    "layer_passes_over_plain": "layer passes per token, relative to plain decoding",
    "seconds_over_plain": "time per token, relative to plain decoding (measured)",
}
"""Columns that can be the cost, with their axis labels."""
QUALITIES = {
    "agreement": "tokens that agree with the target",
    "log_likelihood": "log-likelihood of the output under the target [nats per token]",
    "bleu": "BLEU against the references [percent]",
    "rouge_l": "ROUGE-L against the references [percent]",
}
MOST_SERIES = 8
_ALONG = {"bild": ("fallback_threshold",), "early_exit": ("threshold", "exit_layer"), "skipdecode": ("min_layers", "max_layers")}
"""The column along which a line of points runs, by method: the first of these that takes several values."""
_KEYS = {
    "variant": "{}", "exit_layer": "exit {:g}", "max_draft_length": "drafts to {:g}", "measure": "{}", "fill": "{}",
    "first_check": "from layer {:g}", "rollback_threshold": "rollback {:g}", "fallback_threshold": "fallback {:g}",
    "threshold": "threshold {:g}", "decay": "decay {}", "temperature": "τ = {:g}", "max_layers": "at most {:g} layers",
    "min_layers": "at least {:g} layers", "warm_up": "{:g} first layers", "power": "power {:g}", "heads": "heads {}",
}  # fmt: skip
"""Columns that distinguish the series of a method, with their wording."""
_NEEDED = ("method", "agreement", "log_likelihood", "plain_log_likelihood", "sequences", "tokens")


class Series(NamedTuple):
    """Points of one line, the column along which they run, and the name of the line."""

    name: str
    along: str
    rows: pl.DataFrame


def series(rows: pl.DataFrame) -> list[Series]:
    """Group the rows of `calibrate quality` into lines, in order of appearance.

    >>> rows = pl.DataFrame({"method": "bild", "fallback_threshold": [0.1, 0.5, 0.1], "rollback_threshold": [1.0, 1.0, 2.0]})
    >>> [(each.name, each.rows.height) for each in series(rows)]
    [('BiLD, rollback 1', 2), ('BiLD, rollback 2', 1)]
    """
    found = []
    for (method,), own in rows.group_by("method", maintain_order=True):
        known = [name for name in _ALONG.get(str(method), ()) if name in own.columns and own[name].drop_nulls().n_unique()]
        along = next((name for name in known if own[name].n_unique() > 1), known[0] if known else "")
        telling = [name for name in _KEYS if name in own.columns and name != along and own[name].n_unique() > 1]
        parts = own.group_by(telling, maintain_order=True) if telling else [((), own)]
        for values, part in parts:
            words = [_word(name, value) for name, value in zip(telling, values, strict=True) if value is not None]
            name = ", ".join([registry.label(str(method), short=True), *words])
            found.append(Series(name, along, part.sort(along) if along else part))
    return found


def _word(name: str, value: object) -> str:
    return "no rollback" if name == "rollback_threshold" and value == float("inf") else _KEYS[name].format(value)


def fits(rows: pl.DataFrame) -> bool:
    """Return whether there are rows, and room for all their lines."""
    return bool(rows.height) and len(series(rows)) <= MOST_SERIES


def draw(rows: pl.DataFrame, cost: str | None = None, quality: str = "agreement") -> Figure:
    """Draw, at the left, agreement (or another quality) over the threshold where one was swept; at the right, over the cost.

    `rows` are those of `calibrate quality`, of one or several methods. `cost` is one of `COSTS`; the default is the weights read,
    which bound the decoding of one sequence, or, where unknown, the layer passes.
    """
    checks.one_of("quality", quality, QUALITIES)
    scores = [name for name in (quality, f"plain_{quality}") if name in rows.columns]
    optional = (*COSTS, *_KEYS, "agreement_low", "agreement_high", "target_name", *scores)
    table = require_columns(rows, "the figure of agreement", _NEEDED, optional)
    wanted = cost or next((name for name in COSTS if table[name].null_count() == 0), "layer_passes_over_plain")
    checks.one_of("cost", wanted, COSTS)
    if table[wanted].null_count():
        raise checks.ParameterError(f"the figure of agreement needs values of {wanted} in all rows; choose another cost")
    lines = series(table)
    if len(lines) > MOST_SERIES:
        raise checks.ParameterError(f"there is room for at most {MOST_SERIES} lines, got {len(lines)}; draw fewer")
    swept = [each for each in lines if each.along and each.rows[each.along].n_unique() > 1]
    scales = list(dict.fromkeys(each.along for each in swept))[:2]
    styles = dict(zip((each.name for each in lines), series_styles(len(lines)), strict=True))
    with styled():
        down = 0.32 + 0.22 * -(-(len(lines) + 1) // 2)  # of the legend [inches]
        height = 4.35 + down
        figure, panels = panels_in_row(len(scales) + 1, height, (0.55 + down) / height, 1 - 0.85 / height, 0.5)
        for axes, along in zip(panels, scales, strict=False):
            for each in swept:
                if each.along == along:
                    _curve(axes, each, along, quality, styles[each.name])
            axes.set_xlabel(along.replace("_", " "))
        for each in lines:
            _curve(panels[-1], each, wanted, quality, styles[each.name])
        panels[-1].set_xlabel(COSTS[wanted], fontsize=9 if scales else 10)
        _frames(panels, table, quality)
        panels[0].set_ylabel(QUALITIES[quality])
        left = panels[0].get_position().x0
        figure.text(left, 1 - 0.28 / height, "How much quality does the saving cost?", fontsize=13, weight="bold", va="center")
        figure.text(left, 1 - 0.57 / height, _subtitle(table, quality), fontsize=9, color=GREY, va="center")
        handles = [
            Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=5.5, linewidth=1.5, label=name)
            for name, style in styles.items()
        ]
        handles.append(Line2D([], [], linestyle="none", marker="X", markersize=9, color=INK, label="the target alone"))
        figure.legend(handles=handles, loc="lower left", bbox_to_anchor=(left, 0.08 / height), ncols=2 if len(handles) > 2 else 1,
                      borderaxespad=0, columnspacing=2, handlelength=2.6)  # fmt: skip
    return figure


def _subtitle(table: pl.DataFrame, quality: str) -> str:
    first = table.row(0, named=True)
    name = f"target: {first['target_name']}; " if first["target_name"] else ""
    known = quality == "agreement" and table["agreement_low"].cast(pl.Float64).drop_nulls().drop_nans().len()
    bars = "; bars: 95 % intervals" if known else ""
    return f"{name}{first['sequences']} sequences per point, measured; dotted: the target alone{bars}"


def _curve(axes: Axes, each: Series, x: str, quality: str, style: SeriesStyle) -> None:
    rows = each.rows
    axes.plot(rows[x], rows[quality], color=style.colour, linestyle=style.line, linewidth=1.4, marker=style.marker, markersize=5.5,
              label=each.name)  # fmt: skip
    if quality == "agreement":
        ends = pl.col("agreement_low", "agreement_high").cast(pl.Float64)
        known = rows.with_columns(ends).drop_nulls(["agreement_low", "agreement_high"])
        known = known.drop_nans(["agreement_low", "agreement_high"])
        axes.vlines(known[x], known["agreement_low"], known["agreement_high"], colors=style.colour, linewidth=0.9, alpha=0.6,
                    label=f"{each.name} interval")  # fmt: skip


def _frames(panels: list[Axes], table: pl.DataFrame, quality: str) -> None:
    best = 1.0 if quality == "agreement" else float(table[f"plain_{quality}"].mean())  # type: ignore[arg-type]
    for axes in panels:
        axes.grid(True)
        axes.axhline(best, color=GREY, linewidth=0.8, linestyle=LINES[3], zorder=1.5, label="plain quality")
        if quality == "agreement":
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    panels[-1].plot([1.0], [best], linestyle="none", marker="X", markersize=9, color=INK, markeredgecolor="white", zorder=3,
                    clip_on=False, label="target alone")  # fmt: skip
    panels[-1].axvline(1.0, color=GREY, linewidth=0.8, linestyle=LINES[3], zorder=1.5, label="same cost")
    low = min(axes.get_ylim()[0] for axes in panels)
    high = max(axes.get_ylim()[1] for axes in panels)
    for axes in panels:
        axes.set_ylim(low, min(high, 1.03) if quality == "agreement" else high)
    for axes in panels[1:]:
        axes.set_yticklabels([])
