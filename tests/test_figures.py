"""Figures are checked by their artists: what stands where, and that nothing is told by colour alone. No pixels are compared."""

import subprocess
import sys
from pathlib import Path

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from figures import distribution, save, timeline, tradeoff
from model import ppd
from model.checks import ParameterError
from tests.test_figures_tradeoff import coordinates, lines, paper

# --- Timeline -----------------------------------------------------------------------------------------------------------

SCHEMA = ["unit", "start", "end", "what", "process", "position", "first", "last", "fate"]
INTERVALS = pl.DataFrame(
    [
        (0, 0.0, 20.0, "forward", 0, 0, 0, 20, "kept"),
        (0, 20.0, 21.0, "dispatch", 0, -1, -1, -1, "kept"),
        (-1, 21.0, 23.0, "link", 1, -1, 0, 0, "kept"),
        (-1, 21.0, 23.0, "link", 2, -1, 0, 0, "kept"),
        (0, 21.0, 41.0, "forward", 0, 0, 20, 40, "kept"),
        (1, 23.0, 43.0, "forward", 1, 1, 0, 20, "discarded"),
        (2, 23.0, 41.0, "forward", 2, 1, 0, 20, "cancelled"),
        (-1, 43.0, 43.5, "promotion", 1, -1, 0, 0, "kept"),
    ],
    schema=SCHEMA,
    orient="row",
)
COMMITS = pl.DataFrame({"time": [20.0, 41.0], "kind": ["match", "miss"], "tokens": [1, 2]})


def bars(figure: Figure) -> list[tuple[str, float, float, float]]:
    """Kind, start, end, and middle of the height of every bar."""
    found = []
    for collection in figure.axes[0].collections:
        assert isinstance(collection, PolyCollection)
        for path in collection.get_paths():
            box = path.get_extents()
            found.append((str(collection.get_label()), box.x0, box.x1, (box.y0 + box.y1) / 2))
    return found


def test_every_interval_is_a_bar_in_the_row_of_its_unit() -> None:
    drawn = bars(timeline.draw(INTERVALS))
    kind = pl.when(pl.col("what") == "forward").then("fate").otherwise("what")
    on_units = INTERVALS.filter(pl.col("unit") >= 0).select(kind, "start", "end", pl.col("unit").cast(float))
    assert sorted(bar for bar in drawn if bar[3] <= 2) == sorted(on_units.rows())
    links = [bar for bar in drawn if bar[3] > 2.5]
    assert sorted(bar[:3] for bar in links) == [("link", 21, 23), ("link", 21, 23), ("promotion", 43, 43.5)]
    assert len({bar[3] for bar in links if bar[0] == "link"}) == 2  # side by side, as both are under way


def test_commits_are_vertical_lines_and_a_miss_is_dashed() -> None:
    drawn = timeline.draw(INTERVALS, COMMITS, title="Two commits").axes[0]
    assert [(float(np.asarray(line.get_xdata())[0]), line.get_linestyle()) for line in drawn.lines] == [(20.0, "-"), (41.0, "--")]
    texts = [text.get_text() for text in drawn.texts]
    assert "1 out, match" in texts
    assert "3 out, miss" in texts  # tokens put out so far
    assert "token 0\nlayers 20–40" in texts


def test_fates_are_told_apart_by_hatching() -> None:
    collections = timeline.draw(INTERVALS).axes[0].collections
    fates = [collection for collection in collections if collection.get_label() in ("kept", "discarded", "cancelled")]
    assert len({collection.get_hatch() for collection in fates}) == 3
    assert len({tuple(np.ravel(np.asarray(collection.get_facecolor())).tolist()) for collection in fates}) == 3


def test_unit_0_is_called_main_only_where_every_token_is_verified_on_it() -> None:
    def name(rows: pl.DataFrame) -> str:
        return timeline.draw(rows).axes[0].get_yticklabels()[0].get_text()

    assert name(INTERVALS) == "unit 0 (main)"
    elsewhere = pl.DataFrame([(1, 43.0, 63.0, "forward", 1, 1, 20, 40, "kept")], schema=SCHEMA, orient="row")
    assert name(pl.concat([INTERVALS, elsewhere])) == "unit 0"


# --- Distribution -------------------------------------------------------------------------------------------------------


def histogram(points: int = 1) -> pl.DataFrame:
    values, mass = ppd.latency_pmf(40, 20, 16, 0.6)
    rows = [
        (number, view, value, share)
        for number in range(points)
        for view in ("formula", "paths", "events")
        for value, share in zip(values, mass, strict=True)
    ]
    return pl.DataFrame(rows, schema=["point", "view", "latency_layers", "probability"], orient="row")


def test_probabilities_stand_at_their_latencies() -> None:
    axes = distribution.draw(histogram()).axes[0]
    expected = {(value, share) for _, _, value, share in histogram().rows()}
    assert coordinates([lines(axes)["formula"]]) == coordinates([lines(axes)["simulated: events"]]) == expected
    heights = sorted((bar.get_x() + bar.get_width() / 2, bar.get_height()) for bar in axes.patches)  # type: ignore[attr-defined]
    assert np.array(heights) == pytest.approx(np.array(sorted(expected)))


def test_every_point_has_its_panel() -> None:
    assert len(distribution.draw(histogram(5)).axes) == 5
    with pytest.raises(ParameterError, match="at most 12 points, got 13"):
        distribution.draw(histogram(13))


# --- All of them --------------------------------------------------------------------------------------------------------


def every() -> dict[str, Figure]:
    return {"3": tradeoff.draw(paper()), "t": timeline.draw(INTERVALS, COMMITS), "d": distribution.draw(histogram(2))}


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name, figure in every().items():
        assert [path.name for path in save(figure, tmp_path / f"{name}.a")] == [f"{name}.a.png", f"{name}.a.svg"]
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True}):  # a reader's own settings change nothing
        for name, figure in every().items():
            for again in save(figure, tmp_path / f"{name}.b"):
                assert again.read_bytes() == (tmp_path / again.name.replace(".b.", ".a.")).read_bytes()
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}  # nothing half-written is left


def test_rows_that_cannot_be_drawn_are_refused() -> None:
    drawings = ((tradeoff.draw, paper()), (timeline.draw, INTERVALS), (distribution.draw, histogram()))
    for draw, rows in drawings:
        with pytest.raises(ParameterError, match="needs at least one row"):
            draw(rows.clear())
        with pytest.raises(ParameterError, match="none called"):
            draw(rows.drop("view" if "view" in rows.columns else "fate"))
    nothing = paper().with_columns(mean_units=pl.lit(None, dtype=pl.Float64))
    with pytest.raises(ParameterError, match="values of mean_units"):
        tradeoff.draw(nothing)
    with pytest.raises(ParameterError, match="unknown x 'units'"):
        tradeoff.draw(paper(), "units")
    with pytest.raises(ParameterError, match="unknown view 'path'; did you mean paths"):
        tradeoff.draw(paper().with_columns(view=pl.lit("path")))


def test_saving_says_what_it_cannot_do(tmp_path: Path) -> None:
    figure = timeline.draw(INTERVALS)
    with pytest.raises(ParameterError, match="unknown figure format 'pdf'"):
        save(figure, tmp_path / "a", ("pdf",))
    with pytest.raises(ParameterError, match="cannot write"):
        save(figure, tmp_path / "missing" / "a")


def test_no_figure_loads_what_it_does_not_need() -> None:
    """All of them in one process."""
    code = "import importlib, pkgutil, sys, figures\n"
    code += "for module in pkgutil.iter_modules(figures.__path__): importlib.import_module('figures.' + module.name)\n"
    code += "print(*{'matplotlib.pyplot', 'scipy', 'simpy', 'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_transfers_fill_the_lanes_from_the_first() -> None:
    """As many lanes as transfers are under way at once, and none is used where an earlier one is free."""
    ends = [(0.0, 2.0), (0.5, 10.0), (2.0, 4.0), (3.0, 5.0)]
    links = pl.DataFrame([
        {**INTERVALS.filter(what="link").row(0, named=True), "start": start, "end": end} for start, end in ends
    ])  # fmt: skip
    drawn = bars(timeline.draw(pl.concat([INTERVALS.filter(pl.col("what") != "link"), links], how="vertical_relaxed")))
    heights = {(start, end): height for what, start, end, height in drawn if what == "link"}
    assert heights[0, 2] == heights[2, 4]
    assert len({heights[0, 2], heights[0.5, 10], heights[3, 5]}) == 3
