"""Several devices for one sequence: replicas that predict early against tensor parallelism. Speed-up over reserved devices.

A method that keeps k + 1 units busy competes with splitting each layer over the same devices.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter

from figures.common.speedup_baseline import ONE, over_one_device
from figures.common.style import GREY, INK, panels_in_row, require_columns, series_styles, styled
from figures.of_runs.speedup_by_device import device_column, most_exact, rates_from, times_from
from model.base.checks import ParameterError
from model.methods import registry

MOST_PANELS = 4
_BOUNDS = ("speedup_input_low", "speedup_input_high")
_NEEDED = ("point", "view", "method", "speedup", "reserved_units", "tensor_parallel")


class _Way(NamedTuple):
    """A use of devices: a method, and whether each of its units is split over several."""

    method: str
    split: bool

    @property
    def name(self) -> str:
        if self.method == registry.PLAIN:
            return "tensor parallelism (each layer split)"
        word = registry.label(self.method)
        return f"{word}, each layer split" if self.split else f"{word} (replicas)"


def _table(rows: pl.DataFrame) -> tuple[str | None, pl.DataFrame]:
    """Return the column of devices, and the rows except plain decoding on one device, their baseline; none if that is unknown."""
    column = device_column(rows)
    missing = [pl.lit(None, dtype=pl.Float64).alias(name) for name in _BOUNDS if name not in rows.columns]
    table = most_exact(rows.with_columns(missing)).filter(
        pl.col("reserved_units").is_not_null(), pl.col("tensor_parallel").is_not_null()
    )
    table, baseline = over_one_device(table)
    table = table if baseline == ONE else table.clear()
    return column, table.filter(~((pl.col("method") == registry.PLAIN) & (pl.col("tensor_parallel") == 1)))


def fits(rows: pl.DataFrame) -> bool:
    """Return whether a run has plain decoding on split layers and another method on as many devices, and few devices or profiles.

    The model must fit one device: speed-ups here are relative to plain decoding on one.
    """
    if not all(name in rows.columns for name in _NEEDED) or not rows["tensor_parallel"].count():
        return False
    column, table = _table(rows)
    panels = 1 if column is None else table[column].n_unique()
    split = table.filter(pl.col("method") == registry.PLAIN)
    rival = table.filter(pl.col("method") != registry.PLAIN, pl.col("tensor_parallel") == 1, pl.col("reserved_units") > 1)
    keys = ["method", "tensor_parallel", "reserved_units", *([column] if column else [])]
    return (
        0 < panels <= MOST_PANELS and bool({*split["reserved_units"]} & {*rival["reserved_units"]})
        and not table.select(keys).is_duplicated().any()
    )  # fmt: skip


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a panel per device or profile, with a line per use of devices; on the dashed line the speed-up equals the devices.

    `rows` is a results table. Bars show the uncertainty of rates and costs.
    """
    require_columns(rows, "the figure of reserved devices", _NEEDED)
    if not fits(rows):
        raise ParameterError(
            "the figure of reserved devices needs rows of autoregressive with tensor_parallel above 1, and of another method on as"
            " many devices,"
            f" each once for at most {MOST_PANELS} devices, of a model that fits one device; take those of `sim run"
            " ppd-against-tensor-parallel`"
        )
    column, table = _table(rows)
    names = ["" if column is None else each for each in ([""] if column is None else table[column].unique(maintain_order=True))]
    parts = [table if column is None else table.filter(pl.col(column) == name) for name in names]
    ways = [_Way(*key) for key in dict.fromkeys((row["method"], row["tensor_parallel"] > 1) for row in table.iter_rows(named=True))]
    with styled():
        figure, panels = panels_in_row(len(parts), 5.3, 0.1, 0.685, 0.35)
        width = figure.get_figwidth()
        most = max(2.0, float(table["reserved_units"].max()))  # type: ignore[arg-type]
        top = 1.08 * float(table.select(pl.max_horizontal("speedup", _BOUNDS[1]).max()).item())
        for axes, name, part in zip(panels, names, parts, strict=True):
            _panel(axes, part, ways, most, top)
            axes.set_title(name, fontsize=10.5)
            axes.tick_params(labelleft=axes is panels[0])
        panels[0].set_ylabel(f"speed-up over {ONE}")
        figure.text(0.1 / width, 0.95, _headline(table, column), fontsize=13, weight="bold", va="center")
        subtitle = f"bars: input uncertainty (rates and costs); {rates_from(table)}"
        figure.text(0.1 / width, 0.903, subtitle, fontsize=9, color=GREY, va="center")
        figure.text(0.1 / width, 0.866, f"times: {times_from(table)}", fontsize=9, color=GREY, va="center")
        _legend(figure, ways, width)
    return figure


def _headline(table: pl.DataFrame, column: str | None) -> str:
    """Headline: speed of tensor parallelism relative to replicas, at the most devices that have both; the range over devices."""
    split = table.filter(pl.col("method") == registry.PLAIN)
    rival = table.filter(pl.col("method") != registry.PLAIN, pl.col("tensor_parallel") == 1)
    held = max({*split["reserved_units"]} & {*rival["reserved_units"]})
    keys = ["reserved_units", *([column] if column else [])]
    best = rival.group_by(keys, maintain_order=True).agg(pl.col("speedup").max().alias("rival"))
    ratios = (
        split.join(best, on=keys).filter(pl.col("reserved_units") == held).select(pl.col("speedup") / pl.col("rival")).to_series()
    )
    low, high = (f"{float(each):.2f}" for each in (ratios.min(), ratios.max()))  # type: ignore[arg-type]
    said = low if low == high else f"{low} to {high}"
    return f"On {held:g} devices, tensor parallelism is {said} times as fast as replicas"


def _panel(axes: Axes, table: pl.DataFrame, ways: Sequence[_Way], most: float, top: float) -> None:
    axes.grid(True)
    axes.axhline(1, color=INK, linewidth=1.0, zorder=1.4, label="plain speed")
    even = min(most, top)
    axes.plot([1, even], [1, even], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), zorder=1.5, label="even")
    axes.plot([1], [1], linestyle="none", marker="*", markersize=13, color=INK, zorder=3, label="one device")
    for index, (way, style) in enumerate(zip(ways, series_styles(len(ways)), strict=True)):
        own = table.filter(pl.col("method") == way.method, (pl.col("tensor_parallel") > 1) == way.split).sort("reserved_units")
        aside = 0.05 * (index - (len(ways) - 1) / 2)  # shifted, so that bars do not hide each other
        at = (own["reserved_units"] + aside).to_list()
        known = own.with_columns(pl.Series("at", at)).drop_nulls(_BOUNDS)
        low, high = (known[bound] for bound in _BOUNDS)
        axes.vlines(known["at"], low, high, colors=style.colour, linewidth=1.4, label=f"inputs {way.name}")
        axes.plot([1, *at], [1, *own["speedup"]], color=style.colour, linestyle=style.line, linewidth=1.3, zorder=2, label="line")
        axes.plot(
            at, own["speedup"], linestyle="none", marker=style.marker, markersize=7.5, color=style.colour, markeredgecolor="white",
            markeredgewidth=0.6, zorder=3, label=way.name,
        )  # fmt: skip
    axes.set_xlim(0.8, most + 0.25)
    axes.set_ylim(0.8, top)
    axes.set_xticks(range(1, int(most) + 1))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    axes.set_xlabel("reserved devices")


def _legend(figure: Figure, ways: Sequence[_Way], width: float) -> None:
    handles: list[Any] = [
        Line2D([], [], color=style.colour, linestyle=style.line, marker=style.marker, markersize=7, linewidth=1.3, label=way.name)
        for way, style in zip(ways, series_styles(len(ways)), strict=True)
    ]
    handles.append(Line2D([], [], color=GREY, linewidth=1.0, linestyle=(0, (4, 2)), label="speed-up = devices"))
    figure.legend(
        handles=handles, loc="upper left", bbox_to_anchor=(0.1 / width, 0.835), ncols=2, borderaxespad=0, borderpad=0,
        handlelength=2.2, columnspacing=1.5,
    )  # fmt: skip
