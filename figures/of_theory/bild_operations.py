"""Operations and memory traffic of Big Little Decoder: Figure 8 of [Kim2023] from its rates, by the paper and by its code.

[Kim2023] S. Kim et al. Speculative Decoding with Big Little Decoder. NeurIPS 2023, arXiv:2302.07863.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from figures.common.style import COLOURS, GREY, INK, canvas, require_columns, styled
from model.base import checks
from model.methods.bild import theory as bild
from model.methods.bild.algorithm import VARIANTS

PANELS = {
    "operations_factor": "operations per token",
    "memory_factor": "weights read",
    "intensity_factor": "arithmetic intensity",
    "speedup": "speed",
}
"""Quantities drawn, relative to the large model alone, with their titles."""
_LOOKS = {
    "paper": (COLOURS[0], "", "variant paper"),
    "code": (COLOURS[1], "////", "variant code: one more pass of the large model after a rollback"),
}
_NEEDED = (
    "variant",
    "fallback_rate",
    "rollback_rate",
    "max_draft_length",
    "cost_ratio",
    "operations_ratio",
    "memory_ratio",
    *PANELS,
)
_HALVINGS = 60
MOST_RATES = 8


def fallback_of_intensity(intensity: float, max_draft_length: int, operations_ratio: float, memory_ratio: float) -> float:
    """Fallback rate at which the arithmetic intensity is `intensity` times that of the large model alone, in the variant `paper`.

    In this variant the intensity does not depend on the rollback rate, and falls with the fallback rate.

    >>> round(fallback_of_intensity(5.0, 10, 0.0625, 0.0625), 3)
    0.11
    """
    ends = [float(bild.intensity_factor(f, 0.0, max_draft_length, operations_ratio, memory_ratio)) for f in (1.0, 0.0)]
    checks.number("intensity", intensity, *ends)
    low, high = 0.0, 1.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        above = float(bild.intensity_factor(middle, 0.0, max_draft_length, operations_ratio, memory_ratio)) > intensity
        low, high = (middle, high) if above else (low, middle)
    return (low + high) / 2


def factors(
    fallback_rate: float,
    rollback_rates: Sequence[float],
    *,
    max_draft_length: int,
    cost_ratio: float,
    operations_ratio: float,
    memory_ratio: float,
) -> pl.DataFrame:
    """Return a row per rollback rate and variant with the quantities of `PANELS`, relative to the large model alone.

    >>> rows = factors(0.11, [0.01], max_draft_length=10, cost_ratio=0.25, operations_ratio=0.0625, memory_ratio=0.0625)
    >>> rows.select("variant", pl.col(*PANELS).round(3)).rows()
    [('paper', 1.101, 0.22, 5.003, 2.465), ('code', 1.138, 0.227, 5.021, 2.435)]
    """
    shared = {
        "fallback_rate": float(fallback_rate), "max_draft_length": max_draft_length, "cost_ratio": float(cost_ratio),
        "operations_ratio": float(operations_ratio), "memory_ratio": float(memory_ratio),
    }  # fmt: skip
    rows = []
    for rate in rollback_rates:
        for variant in VARIANTS:
            choice = fallback_rate, rate, max_draft_length
            found = {
                "operations_factor": bild.operations_factor(*choice, operations_ratio, variant=variant),
                "memory_factor": bild.memory_factor(*choice, memory_ratio, variant=variant),
                "intensity_factor": bild.intensity_factor(*choice, operations_ratio, memory_ratio, variant=variant),
                "speedup": bild.speedup(*choice, cost_ratio, variant=variant),
            }
            numbers = {name: float(value) for name, value in found.items()}
            rows.append({**shared, "variant": variant, "rollback_rate": float(rate), **numbers})
    return pl.DataFrame(rows)


def draw(rows: pl.DataFrame, *, source: str, stated: Mapping[str, float] | None = None) -> Figure:
    """Draw bars per rollback rate and variant, from rows of `factors`; 1 is the large model alone.

    `source` is the provenance of rates and ratios (measured, published or assumed). `stated` are published values of some of
    `PANELS`, as in `model.published.bild_tables.FIGURE_8`; each is a line across its panel.
    """
    table = require_columns(rows, "the figure of operations", _NEEDED)
    rates = table["rollback_rate"].unique().sort().to_list()
    if len(rates) > MOST_RATES:
        raise checks.ParameterError(f"rows must have at most {MOST_RATES} rollback rates, got {len(rates)}")
    for name in stated or {}:
        checks.one_of("stated factor", name, PANELS)
    settings = table.select("fallback_rate", "max_draft_length", "cost_ratio", "operations_ratio", "memory_ratio").unique()
    if settings.height > 1:
        raise checks.ParameterError(f"rows must be of one fallback rate, one draft and one choice of costs, got {settings.height}")
    with styled():
        figure, only = canvas(12.6, 4.6, (0, 0, 1, 1))
        only.remove()
        for index, (name, words) in enumerate(PANELS.items()):
            axes = figure.add_axes((0.06 + 0.241 * index, 0.12, 0.195, 0.58))
            _bars(axes, table, rates, name, (stated or {}).get(name))
            axes.set_title(words, fontsize=10.5)
            if not index:
                axes.set_ylabel("relative to the large model alone")
        title = "Does Big Little Decoder save operations or memory traffic?"
        figure.text(0.02, 0.94, title, fontsize=13, weight="bold", va="center")
        setting = settings.row(0, named=True)
        subtitle = (
            f"{source}; falls back after {100 * setting['fallback_rate']:.3g} % of its tokens, drafts of at most"
            f" {setting['max_draft_length']}; the small model takes {setting['operations_ratio']:.3g} of the operations,"
            f" {setting['memory_ratio']:.3g} of the weights, {setting['cost_ratio']:.3g} of the time"
        )
        figure.text(0.02, 0.88, subtitle, fontsize=9.5, color=GREY, va="center")
        handles: list[Patch | Line2D] = [
            Patch(facecolor=colour, hatch=hatch, edgecolor="white", linewidth=0, label=label)
            for colour, hatch, label in _LOOKS.values()
        ]
        handles.append(Line2D([], [], color=GREY, linewidth=1.0, linestyle=(0, (1.2, 1.2)), label="large model alone"))
        if stated:
            handles.append(Line2D([], [], color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label="published"))
        figure.legend(handles=handles, loc="center left", bbox_to_anchor=(0.017, 0.82), ncols=4, borderaxespad=0, borderpad=0)
    return figure


def _bars(axes: Axes, table: pl.DataFrame, rates: Sequence[float], name: str, stated: float | None) -> None:
    for variant, (colour, hatch, _) in _LOOKS.items():
        own = table.filter(variant=variant).sort("rollback_rate")
        side = -0.2 if variant == "paper" else 0.2
        positions = [rates.index(rate) + side for rate in own["rollback_rate"]]
        axes.bar(positions, own[name], 0.4, color=colour, hatch=hatch, edgecolor="white", linewidth=0, label=f"{variant} {name}")
        for at, value in zip(positions, own[name], strict=True):
            text = axes.annotate(
                f"{value:#.3g}", (at, value), (0, 2), textcoords="offset points", ha="center", va="bottom", fontsize=7, zorder=4,
                rotation=90 if len(rates) > 3 else 0,
            )  # fmt: skip
            text.set_path_effects([withStroke(linewidth=2.5, foreground="#ffffff")])
    axes.axhline(1.0, color=GREY, linewidth=1.0, linestyle=(0, (1.2, 1.2)), label="large model alone", zorder=2.5)
    if stated is not None:
        axes.axhline(stated, color=INK, linewidth=1.2, linestyle=(0, (4, 2)), label="stated", zorder=3)
    axes.set_ylim(0, 1.18 * max(*table[name], 1.0, stated or 0.0))
    axes.set_xticks(range(len(rates)))
    axes.xaxis.set_major_formatter(lambda position, _: f"{100 * rates[round(position)]:.3g}")
    axes.set_xlabel("rollback rate  [% of drafted tokens]")
    axes.grid(True, axis="y")
