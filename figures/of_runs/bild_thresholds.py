"""Effect of the thresholds of Big Little Decoder: time against agreement with the large model, from a decision record.

Like Figures 4, 5 and 9 of [Kim2023], with another measure of quality: the share of tokens equal to the large model's choice, where
the paper has BLEU and ROUGE-L. Tokens are independent, and thresholds do not change the recorded sequence.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import PercentFormatter
from numpy.typing import NDArray

from figures.common.style import (
    COLOURS,
    GREY,
    INK,
    LINES,
    MARKERS,
    NAMES,
    VIEWS,
    SeriesStyle,
    canvas,
    require_columns,
    series_styles,
    styled,
)
from model.base import checks

Floats = NDArray[np.float64]

BOTH, NO_ROLLBACK, NO_FALLBACK, LARGE, SMALL = "both policies", "no rollback", "no fallback", "large model", "small model"
MOST_RECORDS, MOST_CURVES = 3, 8
_LOOKS = {
    BOTH: SeriesStyle(COLOURS[0], MARKERS[0], LINES[0]), NO_ROLLBACK: SeriesStyle(COLOURS[1], MARKERS[1], LINES[1]),
    NO_FALLBACK: SeriesStyle(COLOURS[2], MARKERS[2], LINES[3]),
}  # fmt: skip
_NEEDED = (
    "name", "source", "cost_source", "variant", "policy", "fallback_threshold", "rollback_threshold", "max_draft_length",
    "cost_ratio",
    "latency", "agreement",
)  # fmt: skip
_RECORDS = {
    "outcomes_source": "record", "variant": "variant", "exit_layer": "exit layer", "max_draft_length": "drafts to",
    "placement": "placed", "draft_layers": "draft layers", "cost_ratio": "c", "tokens": "tokens",
}  # fmt: skip
"""Columns whose values separate records: all but the thresholds."""
_ORDER = {view: index for index, view in enumerate(VIEWS)}
_ALONE = {LARGE: ("X", 10.0), SMALL: ("P", 9.0)}


# --- Points -----------------------------------------------------------------------------------------------------------


def of_run(rows: pl.DataFrame, cost_source: str = "see [cost]") -> pl.DataFrame:
    """Return the points of a run whose outcomes come from thresholds on a record; `rows` is its table of results.

    Times are those of a sequence of `tokens` tokens, in the most exact view. A fallback threshold of 0 means no fallback, an
    infinite rollback threshold no rollback. The small model alone has no row. Empty where no row has both thresholds.
    """
    needed = ("method", "fallback_threshold", "rollback_threshold", "agreement", "relative_latency", "view")
    if any(name not in rows.columns for name in needed):
        return pl.DataFrame()
    own = rows.filter(method="bild").drop_nulls(needed)
    own = own.sort(pl.col("view").replace_strict(_ORDER, return_dtype=pl.Int8), maintain_order=True)
    own = own.unique("point", keep="first").sort("point")
    if not own.height:
        return pl.DataFrame()
    never = pl.col("rollback_threshold").is_infinite()
    policy = pl.when(never).then(pl.lit(NO_ROLLBACK)).when(pl.col("fallback_threshold") == 0).then(pl.lit(NO_FALLBACK))
    distinct = [name for name in _RECORDS if name in own.columns and own[name].n_unique() > 1]
    words = [pl.lit(f"{_RECORDS[name]} ") + pl.col(name).cast(pl.String).fill_null("-") for name in distinct]
    alone = {"policy": LARGE, "latency": 1.0, "agreement": 1.0}
    own = own.select(
        "fallback_threshold", "rollback_threshold", "max_draft_length", "fallback_rate", "rollback_rate", "variant", "agreement",
        "view", "tokens", "cost_ratio", name=pl.concat_str(words, separator=", ") if distinct else pl.lit("record"),
        source="outcomes_source", cost_source=pl.lit(cost_source),
        policy=policy.otherwise(pl.lit(BOTH)), latency="relative_latency",
    )  # fmt: skip
    kept = ("name", "source", "cost_source", "variant", "view", "tokens", "cost_ratio")
    whole = [part.head(1).select(kept).with_columns(**{key: pl.lit(value) for key, value in alone.items()})
             for part in own.partition_by("name", maintain_order=True)]  # fmt: skip
    return pl.concat([own, *whole], how="diagonal")


def fits(rows: pl.DataFrame) -> bool:
    """Return whether these rows (of `of_run`) have at least two points, and fit into the figure."""
    if not rows.height or rows.filter(pl.col("policy") != LARGE).height < 2:
        return False
    return rows["name"].n_unique() <= MOST_RECORDS and _pairs(rows)["rollback_threshold"].n_unique() <= MOST_CURVES


def frontier(rows: pl.DataFrame) -> pl.DataFrame:
    """Return the Pareto-optimal rows, by latency: no other row is as fast and agrees more, or is faster and agrees as much.

    >>> rows = pl.DataFrame({"latency": [0.5, 0.6, 0.7, 0.5], "agreement": [0.8, 0.7, 0.9, 0.6]})
    >>> frontier(rows).rows()
    [(0.5, 0.8), (0.7, 0.9)]
    """
    ordered = rows.sort("latency", -pl.col("agreement"), maintain_order=True)
    before = pl.col("agreement").cum_max().shift(1)
    return ordered.filter(before.is_null() | (pl.col("agreement") > before))


# --- Drawing ----------------------------------------------------------------------------------------------------------


def draw(rows: pl.DataFrame) -> Figure:
    """Draw two panels per record, from rows of `of_run`.

    Left, a curve per rollback threshold along the fallback thresholds (Figure 9 of the paper); right, the Pareto fronts of both
    policies together and of each alone (Figure 5), and, in grey, the fronts of the other records with both policies (Figure 4).
    """
    table = require_columns(rows, "the figure of thresholds", _NEEDED, ("view", "tokens"))
    records = table.partition_by("name", maintain_order=True)
    if len(records) > MOST_RECORDS:
        raise checks.ParameterError(f"rows must be of at most {MOST_RECORDS} records, got {len(records)}")
    count = _pairs(table)["rollback_threshold"].n_unique()
    if not 1 <= count <= MOST_CURVES:
        raise checks.ParameterError(f"rows must have 1 to {MOST_CURVES} rollback thresholds, got {count}")
    with styled():
        height = 1.05 + 4.3 * len(records)
        figure, only = canvas(12.0, height, (0, 0, 1, 1))
        only.remove()
        for index, record in enumerate(records):
            bottom = 0.6 + 4.3 * (len(records) - 1 - index)
            left, right = (figure.add_axes((x, bottom / height, wide, 3.2 / height)) for x, wide in ((0.07, 0.36), (0.565, 0.415)))
            others = [other for other in records if other is not record]
            _thresholds(left, record)
            _ablations(right, record, others)
            for axes in (left, right):
                _frame(axes, table)
            figure.text(0.07, (bottom + 3.56) / height, _record_name(record), fontsize=9.5, color=GREY, va="center")
        title = "Big Little Decoder: time saved against agreement with the large model"
        figure.text(0.02, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center")
        note = "assumed: tokens are independent, and thresholds do not change the tokens that follow"
        figure.text(0.02, 1 - 0.57 / height, note, fontsize=9.5, color=GREY, va="center")
        _legend(figure, table, height)
    return figure


def _pairs(record: pl.DataFrame) -> pl.DataFrame:
    """Rows with both thresholds."""
    return record.drop_nulls(["fallback_threshold", "rollback_threshold"])


def _record_name(record: pl.DataFrame) -> str:
    name, source, cost, variant, ratio = record.select("name", "source", "cost_source", "variant", "cost_ratio").row(0)
    view, tokens = record.select("view", "tokens").row(0)
    drafts = _pairs(record)["max_draft_length"][0]
    said = f"{name} ({source}); " + (f"c = {ratio:.3g} ({cost}); " if ratio is not None else "")
    played = f"; {NAMES[view]}, {tokens} tokens" if view is not None else ""
    return f"{said}drafts of at most {drafts}, variant {variant}{played}"


def _ends(values: pl.Series) -> tuple[float, float]:
    ordered = values.drop_nulls().sort()
    return float(ordered[0]), float(ordered[-1])


def _thresholds(axes: Axes, record: pl.DataFrame) -> None:
    own = _pairs(record)
    values = own["rollback_threshold"].unique().sort()
    handles = []
    for value, style in zip(values, series_styles(len(values)), strict=True):
        curve = own.filter(rollback_threshold=value).sort("fallback_threshold")
        name, label = f"{value:g}", "never" if np.isinf(value) else f"{value:g}"
        at, shares = curve["latency"], curve["agreement"]
        axes.plot(at, shares, color=style.colour, linestyle=style.line, linewidth=1.3, label=f"rollback {name}")
        axes.scatter(
            at, shares, s=_sizes(curve["fallback_threshold"].to_numpy(), own), color=style.colour, marker=style.marker,
            edgecolor="white", linewidth=0.5, zorder=2.5, label=f"fallback {name}",
        )  # fmt: skip
        handles.append(
            Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=5, linewidth=1.3, label=label)
        )
    _alone(axes, record)
    low, high = _ends(own["fallback_threshold"])
    axes.set_title(f"Mark size: fallback threshold, {low:g} to {high:g}", fontsize=10)
    axes.set_ylabel("tokens that agree with the large model")
    title = "rollback\nthreshold\n[nats]"
    axes.legend(handles=handles, title=title, loc="upper left", bbox_to_anchor=(1.01, 1.02), borderaxespad=0, alignment="left")


def _sizes(thresholds: Floats, own: pl.DataFrame) -> Floats:
    """Areas of marks, growing with the threshold [square points]."""
    ordered = np.sort(own["fallback_threshold"].unique().to_numpy())
    return 12 + 60 * np.searchsorted(ordered, thresholds) / max(len(ordered) - 1, 1)


def _ablations(axes: Axes, record: pl.DataFrame, others: Sequence[pl.DataFrame]) -> None:
    for policy, style in _LOOKS.items():
        own = record.filter(policy=policy)
        axes.plot(
            own["latency"], own["agreement"], linestyle="none", marker=style.marker, markersize=3.2, color=style.colour, alpha=0.3,
            markeredgewidth=0, label=f"all {policy}",
        )  # fmt: skip
        best = frontier(own)
        axes.plot(
            best["latency"], best["agreement"], color=style.colour, linestyle=style.line, linewidth=1.6, marker=style.marker,
            markersize=4.5, label=policy,
        )  # fmt: skip
    for other in others:
        best = frontier(other.filter(policy=BOTH))
        name, first = other["name"][0], (best["latency"][0], best["agreement"][0])
        axes.plot(best["latency"], best["agreement"], color=GREY, linewidth=1.2, linestyle=LINES[2], label=f"other {name}")
        axes.annotate(name, first, (4, -4), textcoords="offset points", fontsize=8.5, va="top", color=GREY)
    _alone(axes, record)
    axes.set_title("Pareto front of each choice of policies", fontsize=10)


def _alone(axes: Axes, record: pl.DataFrame) -> None:
    for policy, (marker, size) in _ALONE.items():
        at = record.filter(policy=policy)
        axes.plot(
            at["latency"], at["agreement"], linestyle="none", marker=marker, markersize=size, color=INK, markeredgecolor="white",
            zorder=3, clip_on=False, label=policy,
        )  # fmt: skip


def _frame(axes: Axes, table: pl.DataFrame) -> None:
    axes.grid(True)
    (fast, slow), (least, most) = _ends(table["latency"]), _ends(table["agreement"])
    across, up = 0.04 * (slow - fast) or 0.05, 0.04 * (most - least) or 0.05
    axes.set_xlim(fast - across, slow + across)
    axes.set_ylim(least - up, most + up)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0 if most - least > 0.05 else 1))
    axes.axvline(1.0, color=GREY, linewidth=0.8, linestyle=(0, (1.2, 1.2)), zorder=1.5, label="same speed")
    axes.set_xlabel("time per token, relative to the large model alone")


def _legend(figure: Figure, table: pl.DataFrame, height: float) -> None:
    present = set(table["policy"])
    words = {BOTH: BOTH, NO_ROLLBACK: NO_ROLLBACK}
    if NO_FALLBACK in present:
        short, long = _ends(table.filter(policy=NO_FALLBACK)["max_draft_length"])
        words[NO_FALLBACK] = f"{NO_FALLBACK}: windows of {short:g}" + (f" to {long:g}" if long > short else "")
    handles = [
        Line2D([], [], linestyle="none", marker=marker, markersize=size, color=INK, markeredgecolor="white", label=f"{name} alone")
        for name, (marker, size) in _ALONE.items()
        if name in present
    ]
    handles += [
        Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=4.5, label=words[policy])
        for policy, style in _LOOKS.items()
        if policy in present
    ]
    if table["name"].n_unique() > 1:
        handles.append(Line2D([], [], color=GREY, linewidth=1.2, linestyle=LINES[2], label="both policies, other record"))
    figure.legend(
        handles=handles, loc="center left", bbox_to_anchor=(0.017, 1 - 0.84 / height), ncols=len(handles), borderaxespad=0,
        borderpad=0, columnspacing=1.5,
    )  # fmt: skip
