"""Timeline of the units, like Figure 2 of [Yang2024], drawn from the intervals of a simulated decoding."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from figures.common.style import INK, canvas, require_columns, styled
from model.base import checks
from model.base.checks import ParameterError

_COLUMNS = ("unit", "start", "end", "what", "process", "position", "first", "last", "fate")

# Face, hatch, and legend label. Light to dark in grey, and hatched in addition.
_KINDS: dict[str, tuple[str, str, str]] = {
    "kept": ("#0072b2", "", "pass, kept"),
    "draft": ("#56b4e9", "", "pass of a draft model"),
    "unsure": ("#cfe8f7", "..", "pass of a draft model,\nunsure: falls back"),
    "rolled back": ("#f0b48a", "\\\\", "pass of a draft model,\nits token rolled back"),
    "again": ("#cc79a7", "||", "one more pass\nafter a rollback"),
    "rows": ("#009e73", "--", "KV cache rows of\nskipped layers"),
    "discarded": ("#f3d9a4", "//", "pass, finished but not used"),
    "cancelled": ("#ffffff", "xx", "pass, stopped"),
    "dispatch": ("#3a3a3a", "", "dispatch of sub-processes"),
    "link": ("#8f8f8f", "", "on a link: transfer"),
    "promotion": ("#d8d8d8", "..", "on a link: transfer of state"),
    "head": ("#e69f00", "", "LM head and read"),
    "wait": ("#ffffff", "", "waiting for another process"),
}
_FATES = ("kept", "discarded", "cancelled")
_LINKS = ("dispatch", "link", "promotion")
_LOOKS = ("head", "read", "wait")
"""Other timed actions of a process."""
_DASHED = ("miss", "rollback")
_SEGMENTS = ("rollback", "fallback", "cap")
"""Commits of Big Little Decoder: the large model keeps or rolls back what the small model wrote."""
_MOST_UNITS = 200
_BAR = 0.39  # half the height of a unit's bar; rows are 1 apart
_INCHES = (10.0, 1.15, 0.65, 0.75)  # width, left, bottom, top around the axes


def draw(
    intervals: pl.DataFrame, commits: pl.DataFrame | None = None, title: str = "Timeline of units", time_unit: str = "layer-times"
) -> Figure:
    """Draw a bar per interval in its unit's row, coloured by fate, labelled with the token's position and the layers if they fit.

    `intervals` has the columns of `model.logs.spans.Span`: unit (-1 is a link), start, end, what, process, position,
    first, last, fate. `commits`, if given, has time, kind and tokens; each is a vertical line, dashed after a miss or a rollback. A
    unit that runs several models has a row for each. The commits tell which passes of a small model were rolled back.
    """
    rows, names = prepared(intervals, commits)
    links = bool((rows["unit"] < 0).any())
    with styled():
        width, left, bottom, top = _INCHES
        inner = min(max(inches(names, links=links), legend_height(rows["kind"]) - bottom), 14.0)
        height = bottom + inner + top
        figure, axes = canvas(width, height, (left / width, bottom / height, (width - left - 2.75) / width, inner / height))
        ends = [rows["end"].max(), 1e-9, *(commits["time"] if commits is not None else ())]
        axes.set_xlim(min(0.0, rows["start"].min()), max(ends))  # type: ignore[type-var, arg-type]
        present = panel(axes, rows, names)
        if commits is not None:
            _commits(axes, commits)
        axes.xaxis.set_major_locator(MaxNLocator(nbins=10, integer=time_unit == "layer-times"))
        axes.set_xlabel(f"time  [{time_unit}]")
        figure.text(left / width, 1 - 0.3 / height, title, fontsize=13, weight="bold", va="center")
        legend(figure, present, commits is not None, 1 - top / height, several=bool((rows["depth"] > 0).any()))
    return figure


def prepared(intervals: pl.DataFrame, commits: pl.DataFrame | None = None) -> tuple[pl.DataFrame, list[str]]:
    """Return intervals for `panel`, with the kind and the row of each, and the names of the rows."""
    rows = require_columns(intervals, "the timeline", _COLUMNS)
    for fate in rows["fate"].unique().sort():
        checks.one_of("fate", fate, _FATES)
    for what in rows["what"].unique().sort():
        checks.one_of("interval", what, ("forward", *_LINKS, *_LOOKS))
    more = {"role": "target", "width": 1, "depth": 0, "kv_only": False}
    missing = [pl.lit(value).alias(name) for name, value in more.items() if name not in rows.columns]
    rows = rows.with_columns(*missing, lane=pl.lit(0), lanes=pl.lit(1))
    kinds = [_kind(row) for row in rows.iter_rows(named=True)]
    if commits is not None:
        kinds = _with_rollbacks(rows, kinds, commits)
    rows = rows.with_columns(kind=pl.Series(kinds, dtype=pl.String))
    count = int(rows["unit"].max()) + 1  # type: ignore[arg-type]
    if count > _MOST_UNITS:
        raise ParameterError(f"the timeline has room for at most {_MOST_UNITS} units, got {count}; draw fewer, or export a trace")
    return _rows(rows, count)


def inches(names: Sequence[str], *, links: bool) -> float:
    """Least height of a panel of these rows [inches]."""
    return max(0.46 * (len(names) + links), 1.6)


def legend_height(kinds: Iterable[str]) -> float:
    """Height of the legend [inches]."""
    return 0.19 * (5 + sum(1 + _KINDS[kind][2].count("\n") for kind in set(kinds)))


def panel(axes: Axes, rows: pl.DataFrame, names: Sequence[str]) -> list[str]:
    """Draw the bars of prepared intervals and name their rows; set the axes' time limits first. Return the kinds drawn."""
    units = len(names)
    on_units, on_links = rows.filter(pl.col("unit") >= 0), _lanes(rows.filter(pl.col("unit") < 0))
    links = on_links.height > 0
    boxes = [_box(row, units) for part in (on_units, on_links) for row in part.iter_rows(named=True)]
    axes.set_ylim(units - 0.5 + links, -0.5)
    kinds = [*on_units["kind"], *on_links["kind"]]
    present = [kind for kind in _KINDS if kind in kinds]
    for kind in present:
        _bars(axes, kind, [box for box, other in zip(boxes, kinds, strict=True) if other == kind])
    _texts(axes, on_units, units)
    step = -(-units // 40)
    axes.set_yticks([*range(units)][::step], names[::step])
    if links:
        axes.set_yticks([*axes.get_yticks(), units + 0.1], [*(label.get_text() for label in axes.get_yticklabels()), "links"])
    return present


def _kind(row: dict[str, Any]) -> str:
    """Kind of an interval, as far as the interval alone determines it."""
    if row["what"] != "forward":
        return "head" if row["what"] == "read" else str(row["what"])
    if row["fate"] != "kept":
        return str(row["fate"])
    return "draft" if row["role"] != "target" else "rows" if row["kv_only"] else "kept"


def _with_rollbacks(rows: pl.DataFrame, kinds: list[str], commits: pl.DataFrame) -> list[str]:
    """Return the kinds, with the small model's rejected passes and the passes repeated after a rollback marked.

    A segment ends with a pass of the large model over all drafted tokens, and a commit whose last token is the large model's. A
    small model's pass that has read the sequence up to a position wrote the token after it. Where the small model is the first
    layers of the large one, its passes are those through these layers only.
    """
    commits = require_columns(commits, "the timeline's commits", ("time", "kind", "tokens"))
    if not commits["kind"].is_in(_SEGMENTS).any():
        return kinds
    deepest = rows["last"].max()
    found = ["draft" if kind == "kept" and row["first"] == 0 and row["last"] < deepest and row["role"] == "target" else kind
             for kind, row in zip(kinds, rows.iter_rows(named=True), strict=True)]  # fmt: skip
    out, since = 0, -np.inf
    start: int | None = None  # end of the prompt
    for time, commit, tokens in commits.select("time", "kind", "tokens").iter_rows():
        own = rows.with_row_index().filter(pl.col("start") >= since, pl.col("end") <= time, pl.col("what") == "forward")
        drafts = [(index, at) for index, at in own.select("index", "position").iter_rows() if found[index] == "draft"]
        [*_, (last, end)] = [pair for pair in own.select("index", "position").iter_rows() if pair not in drafts] or [(-1, 0)]
        if start is None:
            start = drafts[0][1] if drafts else end
        for index, at in drafts:
            if commit == "rollback" and at + 1 > start + out + tokens - 1:
                found[index] = "unsure" if at >= end and rows["role"][index] != "target" else "rolled back"
            elif commit == "fallback" and at >= end:
                found[index] = "unsure"
        if commit == "again" and last >= 0:
            found[last] = "again"
        out, since = out + tokens, time
    return found


def _rows(rows: pl.DataFrame, units: int) -> tuple[pl.DataFrame, list[str]]:
    """Assign each interval a row within its unit, and return the names of the rows."""
    used = rows.filter(pl.col("unit") >= 0, pl.col("what") == "forward")
    rows_of: dict[tuple[int, str], int] = {}
    names: list[str] = []
    for unit in range(units):
        roles = used.filter(unit=unit)["role"].unique(maintain_order=True).to_list()
        roles.sort(key=lambda role: role != "target")
        for role in roles or ["target"]:
            rows_of[unit, role] = len(names)
            model = "large" if role == "target" else role
            names.append(_name(used, unit) if role == "target" and len(roles) < 2 else f"unit {unit}\n{model} model")
    at = [rows_of.get((unit, role), next((row for (each, _), row in rows_of.items() if each == unit), unit))
          for unit, role in rows.select("unit", "role").iter_rows()]  # fmt: skip
    return rows.with_columns(unit=pl.Series(at, dtype=pl.Int64)), names


def _name(on_units: pl.DataFrame, unit: int) -> str:
    """Unit 0 is the main process's where it verifies every token; in nested runs promoted processes stay on their units."""
    passes = on_units.filter(pl.col("kind").is_in(["kept", "again"]))
    home = set(passes.filter(pl.col("last") == pl.col("last").max())["unit"]) == {0}
    return f"unit {unit} (main)" if unit == 0 and home else f"unit {unit}"


def _lanes(links: pl.DataFrame) -> pl.DataFrame:
    """Assign concurrent transfers to parallel lanes."""
    free: list[float] = []
    lanes = []
    links = links.sort("start", "end", maintain_order=True)
    for start, end in links.select("start", "end").iter_rows():
        lane = next((index for index, time in enumerate(free) if time <= start), len(free))
        free[lane : lane + 1] = [end]
        lanes.append(lane)
    return links.with_columns(lane=pl.Series(lanes, dtype=pl.Int32), lanes=pl.lit(max(len(free), 1), dtype=pl.Int32))


def _box(row: dict[str, Any], units: int) -> NDArray[np.float64]:
    """Corners of a bar."""
    if row["unit"] >= 0:
        low, high = row["unit"] - _BAR, row["unit"] + _BAR
    else:
        thick = 0.6 / row["lanes"]
        low = units - 0.2 + row["lane"] * thick
        high = low + 0.85 * thick
    return np.array([(row["start"], low), (row["end"], low), (row["end"], high), (row["start"], high)])


def _bars(axes: Axes, kind: str, boxes: list[NDArray[np.float64]]) -> None:
    face, hatch, _ = _KINDS[kind]
    bars = PolyCollection(boxes, facecolor=face, edgecolor=INK, linewidth=0.6, hatch=hatch or None, label=kind, zorder=2)
    axes.add_collection(bars, autolim=False)


def _texts(axes: Axes, rows: pl.DataFrame, units: int) -> None:
    """Label bars that are wide enough: the position of the token, and under it the layers run."""
    figure = axes.figure
    pixels = axes.get_window_extent().width / (axes.get_xlim()[1] - axes.get_xlim()[0])
    tall = axes.get_window_extent().height / abs(np.subtract(*axes.get_ylim())) * 2 * _BAR > 26 * figure.dpi / 100
    size = 7.5
    letter = 0.62 * size * figure.dpi / 72
    for row in rows.filter((pl.col("what") == "forward") & (pl.col("end") > pl.col("start"))).iter_rows(named=True):
        layers, number = _layers(row), f"{row['position']}"
        count = row["depth"] or row["width"]  # several hypotheses or sequences have more tokens than positions
        if count > 1:
            number = f"{row['position'] - count + 1}–{number}"
        choices = [f"token{'s' if count > 1 else ''} {number}", number]
        if row["depth"]:  # with the number of tokens of all of them
            choices = [f"{choices[0]}, {row['width']} in all", f"{number} ×{row['width']}", number]
        if tall:
            whole = f"layers {layers}" if layers != _HEAD else layers
            folded = layers.replace(", ", ",\n")
            both = [f"{each}\n{shown}" for shown in (layers, folded) for each in choices[1:]]
            choices = [f"{choices[0]}\n{whole}", *both, *choices]
        room = (row["end"] - row["start"]) * pixels - 6
        text = next((text for text in choices if max(map(len, text.split("\n"))) * letter <= room), "")
        if text:
            kept = row["kind"] == "kept"
            ground = {"facecolor": _KINDS[row["kind"]][0] if row["fate"] == "kept" else "#ffffff", "edgecolor": "none", "pad": 1.0}
            middle = (row["start"] + row["end"]) / 2
            axes.text(
                middle, row["unit"], text, ha="center", va="center", fontsize=size, linespacing=1.1,
                color="#ffffff" if kept else INK, bbox=ground, zorder=4, clip_on=True,
            )  # fmt: skip


_HEAD = "head"


def _layers(row: dict[str, Any]) -> str:
    """Layers that a pass ran, without skipped ones."""
    edges = [row["first"], *(edge for gap in row.get("gaps") or () for edge in gap), row["last"]]
    spans = [f"{low}–{high}" for low, high in zip(edges[::2], edges[1::2], strict=True) if low < high]
    return ", ".join(spans) or _HEAD


def _commits(axes: Axes, commits: pl.DataFrame) -> None:
    last = -np.inf
    total = 0
    start, end = axes.get_xlim()
    pixels = axes.get_window_extent().width / (end - start)
    above = 1 + 0.04 * axes.figure.dpi / axes.get_window_extent().height  # at the same distance from axes of any height
    rows = commits.select("time", "kind", "tokens").rows()
    for (time, kind, tokens), later in zip(rows, [*[row[0] for row in rows[1:]], None], strict=True):
        total += tokens
        axes.axvline(time, color=INK, linewidth=1.3, linestyle="--" if kind in _DASHED else "-", zorder=3, label=f"commit {kind}")
        if time == later:
            continue  # simultaneous commits of a batch: only the last is labelled with the total
        for text in (f"{total}: {kind}", f"{total}"):
            half = 0.31 * 8 * axes.figure.dpi / 72 * len(text)
            if time * pixels - half > last:
                axes.text(time, above, text, transform=axes.get_xaxis_transform(), ha="center", va="bottom", fontsize=8)
                last = time * pixels + half + 6
                break


def legend(figure: Figure, present: Sequence[str], commits: bool, top: float, *, several: bool) -> None:
    """Explain the kinds of bars at the right of a figure, from `top` (a share of its height) down."""
    handles: list[Any] = []
    for kind in present:
        face, hatch, words = _KINDS[kind]
        handles.append(Patch(facecolor=face, edgecolor=INK, linewidth=0.6, hatch=2 * hatch, label=words))
    title = "in a bar: position of its token,\nlayers run"
    title += "\n×: number of tokens, of\nsequences or hypotheses" if several else ""
    if commits:
        title += "\nlines: tokens generated so far\n(dashed: after a miss" + (" or rollback)" if "rolled back" in present else ")")
    place: dict[str, Any] = {"loc": "upper left", "alignment": "left", "borderaxespad": 0}
    figure.legend(handles=handles, title=title, bbox_to_anchor=(0.735, top + 0.01), **place)
