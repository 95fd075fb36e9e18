"""Speed-up of each method on each device, for runs that sweep devices, profiles or step laws, with the input uncertainty."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from textwrap import fill
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.common import point_names
from figures.common.speedup_baseline import ONE, over_one_device
from figures.common.style import GREY, INK, VIEWS, canvas, require_columns, series_styles, styled
from model.base.checks import ParameterError
from model.methods import registry

MOST_DEVICES, MOST_CHOICES = 12, 8
_WORDS = {
    name: point_names.WORDS[name] for name in (
        "candidates", "draft_length", "acceptance_rate", "exit_layer", "max_layers", "min_layers", "sequences", "batching",
    )
}  # fmt: skip
_LAW = "cost.law"
_BOUNDS = ("speedup_input_low", "speedup_input_high")
_NEEDED = ("point", "view", "method", "speedup", "reserved_units", "tensor_parallel")


def device_column(rows: pl.DataFrame) -> str | None:
    """Return the column of a table of results that names the swept device, profile or step law, or None."""
    for name in rows.columns:
        if name.endswith(("cost.profile", "cost.device", _LAW)) and rows[name].n_unique() > 1:
            return name
    return None


def most_exact(rows: pl.DataFrame) -> pl.DataFrame:
    """Return one row per point: of the formula if there is one, else of the paths, else of the events."""
    order = pl.col("view").replace_strict({view: index for index, view in enumerate(VIEWS)}, return_dtype=pl.Int8)
    return rows.drop_nulls(["speedup"]).sort("point", order).unique("point", keep="first", maintain_order=True)


def choice(row: Mapping[str, Any], varied: set[str], unit: str = "device") -> str:
    """Name of a method, with the parameters that vary, and the number of its devices (of its engines, where those are units)."""
    held = int(row["reserved_units"])
    devices = f"{held} {unit}{'s' if held > 1 else ''}"
    if row["method"] == registry.PLAIN and row["tensor_parallel"] > 1:
        return f"tensor parallelism, {devices}"
    words = [said.format(row[key]) for key, said in _WORDS.items() if key in varied and row.get(key) is not None]
    split = [f"TP {row['tensor_parallel']}"] if row["tensor_parallel"] > 1 else []
    return ", ".join([registry.label(row["method"]), *words, *split, devices])


def chosen(rows: pl.DataFrame) -> tuple[str, pl.DataFrame, str] | None:
    """Return the column of devices, a row per choice and device, and the baseline; None where the table has more than that."""
    column = device_column(rows) if all(name in rows.columns for name in _NEEDED) else None
    if column is None or rows[column].n_unique() > MOST_DEVICES:
        return None
    missing = [pl.lit(None, dtype=pl.Float64).alias(name) for name in _BOUNDS if name not in rows.columns]
    table, baseline = over_one_device(most_exact(rows.with_columns(missing)).filter(pl.col(column).is_not_null()))
    varied = {"candidates", "draft_length"} | {key for key in _WORDS if key in table.columns and _varies(table, key)}
    unit = "engine" if column.endswith(_LAW) else "device"  # a law's engine may have several devices
    names = [choice(row, varied, unit) for row in table.iter_rows(named=True)]
    table = table.with_columns(pl.Series("choice", names, dtype=pl.String))
    itself = (pl.col("tensor_parallel") == 1) if baseline == ONE else pl.lit(True)  # plain decoding compared with itself
    whole = table.filter(~((pl.col("method") == registry.PLAIN) & itself))
    alike = whole.select("choice", column).is_duplicated().any()
    few = 0 < whole["choice"].n_unique() <= MOST_CHOICES
    return (column, whole, baseline) if few and not alike and whole[column].n_unique() > 1 else None


def _varies(table: pl.DataFrame, key: str) -> bool:
    """Return whether some method has several values of this parameter."""
    return any(part[key].drop_nulls().n_unique() > 1 for part in table.partition_by("method"))


def fits(rows: pl.DataFrame) -> bool:
    """Return whether a run swept its devices, profiles or step laws, and little else."""
    return chosen(rows) is not None


def draw(rows: pl.DataFrame) -> Figure:
    """Draw a group of marks per device, one per choice of a method; bars show the uncertainty of rates and costs.

    `rows` is a results table with a column `cost.device`, `cost.profile` or `cost.law`. The most exact view of a point is drawn.
    """
    found = chosen(require_columns(rows, "the figure of devices", _NEEDED))
    if found is None:
        raise ParameterError(
            "the figure of devices needs rows of several devices or profiles, or of several step laws, and one of each method and"
            ' choice for each of them; sweep "cost.device", "cost.profile" or "cost.law" alone'
        )
    column, table, baseline = found
    by_law = column.endswith(_LAW)
    devices = table[column].unique(maintain_order=True).to_list()
    choices = table["choice"].unique(maintain_order=True).to_list()
    with styled():
        width = max(9.4, 1.6 + 1.25 * len(devices))
        low, head, tall = 0.55, 1.08 + 0.21 * -(-len(choices) // 2), 3.4
        height = low + tall + head
        figure, axes = canvas(width, height, (0.75 / width, low / height, 1 - 0.9 / width, tall / height))
        handles = _marks(axes, table, column, devices, choices)
        axes.axhline(1, color=INK, linewidth=1.0, zorder=1.5, label="plain")
        for index in range(1, len(devices)):
            axes.axvline(index - 0.5, color="#e4e4e4", linewidth=0.6, zorder=0.5)
        axes.set_xlim(-0.5, len(devices) - 0.5)
        axes.set_xticks(range(len(devices)), [_tick(each, by_law=by_law) for each in devices])
        axes.tick_params(axis="x", length=0)
        axes.set_ylim(bottom=0)
        axes.grid(True, axis="y")
        axes.set_ylabel(f"speed-up over {'plain decoding on the same engine' if by_law else baseline}")
        title = f"Speed-up of each method {'by each step law' if by_law else 'on each device'}"
        figure.text(0.1 / width, 1 - 0.28 / height, title, fontsize=13, weight="bold", va="center")
        for line, text in enumerate(_notes(table, by_law=by_law)):
            figure.text(0.1 / width, 1 - (0.56 + 0.21 * line) / height, text, fontsize=9, color=GREY, va="center")
        figure.legend(
            handles=handles, loc="upper left", bbox_to_anchor=(0.1 / width, 1 - 0.92 / height), ncols=2, borderaxespad=0,
            borderpad=0, handlelength=1.4, columnspacing=1.5,
        )  # fmt: skip
    return figure


def _tick(name: str, *, by_law: bool) -> str:
    """Break a profile's name between device and model, and a law's after hyphens."""
    if by_law:
        return fill(Path(name).name.removesuffix(".json"), 18)
    return name.replace("-", "\n", 1) if "llama" in name else name


def _marks(axes: Axes, table: pl.DataFrame, column: str, devices: list[str], choices: list[str]) -> list[Line2D]:
    handles = []
    spread = np.linspace(-0.32, 0.32, len(choices)) if len(choices) > 1 else [0.0]
    for name, style, aside in zip(choices, series_styles(len(choices)), spread, strict=True):
        own = table.filter(pl.col("choice") == name)
        at = np.array([devices.index(each) for each in own[column]]) + aside
        known = own.select(pl.all_horizontal(pl.col(_BOUNDS).is_not_null()).alias("known"))["known"].to_numpy()
        low, high = (own[bound].to_numpy()[known] for bound in _BOUNDS)
        axes.vlines(at[known], low, high, colors=style.colour, linewidth=1.4, zorder=2, label=f"inputs {name}")
        marks: dict[str, Any] = {"linestyle": "none", "marker": style.marker, "color": style.colour, "markersize": 7}
        axes.plot(at, own["speedup"], markeredgecolor="white", markeredgewidth=0.6, zorder=3, label=name, **marks)
        handles.append(Line2D([], [], label=name, **marks))
    return handles


def _notes(table: pl.DataFrame, *, by_law: bool) -> list[str]:
    """Meaning of the bars, and provenance of rates and times."""
    times = _times_by_law(table) if by_law else times_from(table)
    return [f"bars: input uncertainty (rates and costs); {rates_from(table)}", f"times: {times}"]


def _times_by_law(table: pl.DataFrame) -> str:
    """Provenance of the times of step laws, which are on the axis: fitted to measured cells, or assumed."""
    said = table["cost_source"].drop_nulls().to_list() if "cost_source" in table.columns else []
    kinds = " and ".join(dict.fromkeys(str(each).partition(":")[0] for each in said))
    return f"{kinds}, of the step law of each column" if kinds else "of unknown source"


def times_from(table: pl.DataFrame) -> str:
    """Provenance of the times; their devices are on the axis."""
    if "cost_source" not in table.columns:
        return "of unknown source"
    said = table["cost_source"].drop_nulls().unique(maintain_order=True)
    short = dict.fromkeys(each.partition(" of the published peaks")[0] if "published peaks" in each else each for each in said)
    return "; ".join(f"{each} of published peaks" if each == "assumed efficiencies" else each for each in short)


def rates_from(table: pl.DataFrame) -> str:
    """Provenance of the rates by method: measured, published or assumed."""
    if "outcomes_source" not in table.columns:
        return "no rates"
    sources: dict[str, dict[str, None]] = {}
    for row in table.drop_nulls(["outcomes_source"]).iter_rows(named=True):
        sources.setdefault(row["outcomes_source"].partition(":")[0], {})[registry.label(row["method"])] = None
    return "; ".join(f"rates of {', '.join(methods)} {kind}" for kind, methods in sources.items()) or "no rates"
