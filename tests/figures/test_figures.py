"""Figures in general: tests inspect matplotlib artists (positions, labels, cues besides colour) and no pixels, but of files."""

import io
import subprocess
import sys
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure
from PIL import Image

from figures import save
from figures.common import style
from figures.of_runs import latency_distribution, timeline, tradeoff
from model.base.checks import ParameterError
from model.methods.ppd import theory as ppd
from tests.figures.test_figures_tradeoff import coordinates, lines, paper
from tests.support.figure_checks import boxes, shown

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
    """Kind, start, end and vertical middle of every bar."""
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
    assert len({bar[3] for bar in links if bar[0] == "link"}) == 2  # in separate lanes, as they are concurrent


def test_commits_are_vertical_lines_and_a_miss_is_dashed() -> None:
    drawn = timeline.draw(INTERVALS, COMMITS, title="Two commits").axes[0]
    assert [(float(np.asarray(line.get_xdata())[0]), line.get_linestyle()) for line in drawn.lines] == [(20.0, "-"), (41.0, "--")]
    texts = [text.get_text() for text in drawn.texts]
    assert "1: match" in texts
    assert "3: miss" in texts  # tokens generated so far
    assert "token 0\nlayers 20–40" in texts


def test_fates_differ_by_hatching() -> None:
    collections = timeline.draw(INTERVALS).axes[0].collections
    fates = [collection for collection in collections if collection.get_label() in ("kept", "discarded", "cancelled")]
    assert len({collection.get_hatch() for collection in fates}) == 3
    assert len({tuple(np.ravel(np.asarray(collection.get_facecolor())).tolist()) for collection in fates}) == 3


def test_unit_0_is_named_main_only_if_it_verifies_every_token() -> None:
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


def test_probabilities_are_drawn_at_their_latencies() -> None:
    axes = latency_distribution.draw(histogram()).axes[0]
    expected = {(value, share) for _, _, value, share in histogram().rows()}
    assert coordinates([lines(axes)["formula"]]) == coordinates([lines(axes)["simulated: events"]]) == expected
    heights = [(left + width / 2, height) for left, _, width, height in boxes(axes)]
    assert np.array(heights) == pytest.approx(np.array(sorted(expected)))


def test_every_point_has_its_panel() -> None:
    assert len(latency_distribution.draw(histogram(5)).axes) == 5
    with pytest.raises(ParameterError, match="at most 12 points, got 13"):
        latency_distribution.draw(histogram(13))


def spread(values: dict[str, dict[float, float]], **more: Any) -> pl.DataFrame:
    rows = [{"point": 0, "view": view, "latency_layers": at, "probability": share} | more
            for view, shares in values.items() for at, share in shares.items()]  # fmt: skip
    return pl.DataFrame(rows)


def test_a_distribution_by_hand() -> None:
    some = {"paths": {10.0: 0.25, 14.0: 0.75}, "formula": {10.0: 0.5, 12.0: 0.5, 90.0: 4e-5}, "events": {12.0: 1.0}}
    figure = latency_distribution.draw(spread(some).sample(fraction=1, shuffle=True, seed=4))
    drawn = shown(figure)
    assert drawn.texts == ["Distribution of the latency of a decoding"]
    assert drawn.legends == [("", ["formula", "simulated: events", "simulated: paths"])]
    [panel] = drawn.panels
    assert (panel.title, panel.x, panel.y, panel.grid) == ("point 0", "latency  [layer-times]", "probability", "y")
    assert panel.line("formula") == [(10, 0.5), (12, 0.5), (90, 4e-5)]
    assert panel.line("simulated: events") == [(12, 1)]
    # Bars are .8 of the smallest gap between two latencies; probabilities of at most 1e-4 of the greatest do not stretch the axis.
    axes = figure.axes[0]
    assert np.array(boxes(axes)) == pytest.approx(np.array([(10 - 0.8, 0, 1.6, 0.25), (14 - 0.8, 0, 1.6, 0.75)]))
    assert (*axes.get_xlim(), *axes.get_ylim()) == pytest.approx((10 - 3, 14 + 3, 0, 1.08))
    seen = latency_distribution.draw(spread({"formula": {10.0: 1.0, 12.0: 1e-4, 14.0: 1.01e-4}})).axes[0]
    assert seen.get_xlim() == pytest.approx((7, 17))
    assert latency_distribution.draw(spread({"formula": {10.0: 1.0, 14.0: 0.1, 16.0: 1e-4}})).axes[0].get_xlim() == pytest.approx(
        (7, 17)
    )
    # A single latency has a bar of .8; where all probabilities are 0 the axis ends at 1.
    lone = latency_distribution.draw(spread({"paths": {10.0: 1.0}}))
    assert np.array(boxes(lone.axes[0])) == pytest.approx(np.array([(9.6, 0, 0.8, 1)]))
    assert lone.axes[0].get_xlim() == pytest.approx((8.5, 11.5))
    assert shown(lone).legends == [("", ["simulated: paths"])]
    assert latency_distribution.draw(spread({"paths": {10.0: 0.0}})).axes[0].get_ylim() == (0, 1)
    timed = spread(some, name="mine").with_columns(latency_ms=2 * pl.col("latency_layers"))
    panel = shown(latency_distribution.draw(timed)).panels[0]
    assert (panel.title, panel.x) == ("mine", "latency  [ms]")
    assert panel.line("formula") == [(20, 0.5), (24, 0.5), (180, 4e-5)]
    with pytest.raises(ParameterError, match="unknown view 'a'"):  # of several wrong views always the same one is named
        latency_distribution.draw(spread({letter: {1.0: 1.0} for letter in "hgfedcba"}))
    # 80 latencies have a bar each, 81 are drawn in ranges, except for a formula's.
    for count, bars in ((80, 80), (81, 80)):
        many = spread({"paths": {float(at): 1 / count for at in range(count)}})
        assert len(boxes(latency_distribution.draw(many).axes[0])) == bars


def test_panels_of_distributions_by_hand() -> None:
    """Layout: one panel, up to four in two columns, more in three [inches]; only the lowest of each column has an axis label."""
    one = spread({"formula": {1.0: 0.5, 3.0: 0.5}})
    for count, across in ((4, 2), (5, 3), (12, 3)):
        figure = latency_distribution.draw(pl.concat([one.with_columns(point=pl.lit(each)) for each in range(count)]))
        down = -(-count // across)
        width, height = figure.get_size_inches()
        assert (width, height) == pytest.approx((max(7.0, 4.0 * across), max(4.4, 2.9 * down + 0.8)))
        panels = shown(figure).panels
        assert [panel.title for panel in panels] == [f"point {each}" for each in range(count)]
        assert [bool(panel.x) for panel in panels] == [index >= count - across for index in range(count)]
        assert {panel.y for panel in panels} == {"probability"}
        boxes = [axes.get_position() for axes in figure.axes]
        assert (boxes[0].x0 * width, (1 - boxes[0].y1) * height) == pytest.approx((0.8, 1.05))
        assert len({round(box.x0, 6) for box in boxes}) == across
        assert len({round(box.y0, 6) for box in boxes}) == down
        assert max(box.x1 for box in boxes) == pytest.approx(0.98)
        assert min(box.y0 for box in boxes) * height == pytest.approx(0.6)
        assert shown(figure).legends == [("", ["formula"])]
        assert figure.texts[0].get_position() == pytest.approx((boxes[0].x0, 1 - 0.28 / height))


def test_points_of_a_distribution_are_described() -> None:
    results = pl.DataFrame({
        "point": [0, 0, 1, 2], "method": "speculative", "draft_length": [2, 3, 4, 9], "sequences": [1, 1, 8, 8],
        "batching": "static",
        "acceptance_rate": 0.8, "cost.mine": [None, "a", "b", "c"], "cost_source": "x",
    })  # fmt: skip
    rows = pl.DataFrame({
        "point": [1, 0, 0], "view": "paths", "probability": 1.0, "latency_layers": [10.0, 20.0, 30.0],
        "latency_s": [5e-3, 0.04, 0.06],
    })  # fmt: skip
    found = latency_distribution.with_point_names(rows, results)
    assert found["name"].to_list() == [
        "speculative decoding, γ = 4, batch of 8, static, α = 0.8, mine = b",
        *["speculative decoding, γ = 3, α = 0.8, mine = a"] * 2,
    ]  # fmt: skip
    assert found["latency_ms"].to_list() == pytest.approx([5.0, 40.0, 60.0])
    some = rows.with_columns(latency_s=pl.when(point=0).then(None).otherwise("latency_s"))
    for unknown in (rows.drop("latency_s"), some):
        assert "latency_ms" not in latency_distribution.with_point_names(unknown, results).columns


# --- All of them --------------------------------------------------------------------------------------------------------


def every() -> dict[str, Figure]:
    return {"3": tradeoff.draw(paper()), "t": timeline.draw(INTERVALS, COMMITS), "d": latency_distribution.draw(histogram(2))}


def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    for name, figure in every().items():
        assert [path.name for path in save(figure, tmp_path / f"{name}.a")] == [f"{name}.a.png", f"{name}.a.svg"]
    with matplotlib.rc_context({"font.size": 20, "axes.grid": True}):  # the user's settings change nothing
        for name, figure in every().items():
            for again in save(figure, tmp_path / f"{name}.b"):
                assert again.read_bytes() == (tmp_path / again.name.replace(".b.", ".a.")).read_bytes()
    assert {path.suffix for path in tmp_path.iterdir()} == {".png", ".svg"}  # nothing half-written is left


def test_rows_that_cannot_be_drawn_are_refused() -> None:
    drawings = ((tradeoff.draw, paper()), (timeline.draw, INTERVALS), (latency_distribution.draw, histogram()))
    for draw, rows in drawings:
        with pytest.raises(ParameterError, match="needs at least one row"):
            draw(rows.clear())
        with pytest.raises(ParameterError, match="none called"):
            draw(rows.drop("view" if "view" in rows.columns else "fate"))
    nothing = paper().with_columns(mean_busy_units=pl.lit(None, dtype=pl.Float64))
    with pytest.raises(ParameterError, match="values of mean_busy_units"):
        tradeoff.draw(nothing)
    with pytest.raises(ParameterError, match="unknown x 'units'"):
        tradeoff.draw(paper(), "units")
    with pytest.raises(ParameterError, match="unknown view 'path'; did you mean paths"):
        tradeoff.draw(paper().with_columns(view=pl.lit("path")))


def test_save_refuses_unknown_formats_and_makes_folders(tmp_path: Path) -> None:
    figure = timeline.draw(INTERVALS)
    with pytest.raises(ParameterError, match="unknown figure format 'pdf'"):
        save(figure, tmp_path / "a", ("pdf",))
    (path,) = save(figure, tmp_path / "missing" / "a", ("svg",))
    with pytest.raises(ParameterError, match="cannot write"):
        save(figure, path / "a")


@pytest.mark.parametrize("beyond", [0.0, 1.3])
def test_a_png_file_has_the_pixels_that_matplotlib_writes(tmp_path: Path, beyond: float) -> None:
    """The pixels are compressed here, during the drawing of the SVG file; a page that grows, and one that does not."""
    figure = latency_distribution.draw(histogram())
    figure.text(0.5 + beyond, 0.5, "far", color="#ff0000")
    before = figure.dpi, *figure.get_size_inches()
    png, svg = save(figure, tmp_path / "a")
    assert (figure.dpi, *figure.get_size_inches()) == before
    own = io.BytesIO()
    with style.styled():
        page = style.page(figure)
        figure.savefig(own, format="png", dpi=style.DENSITY, bbox_inches=page)
    ours, theirs = (np.asarray(Image.open(each).convert("RGB")) for each in (png, own))
    assert ours.shape == (int(page.height * 150), int(page.width * 150), 3)
    assert (page.width > before[1]) == (beyond > 0)
    assert (ours == theirs).all()
    with Image.open(png) as image:
        assert image.info["dpi"] == pytest.approx((150, 150), abs=0.1)
    (alone,) = save(figure, tmp_path / "b", ("svg",))
    assert alone.read_bytes() == svg.read_bytes()


def test_figures_do_not_import_unneeded_libraries() -> None:
    """Import all figures in one process."""
    code = "import importlib, pkgutil, sys, figures\n"
    code += "for module in pkgutil.iter_modules(figures.__path__): importlib.import_module('figures.' + module.name)\n"
    code += "print(*{'matplotlib.pyplot', 'scipy', 'simpy', 'torch', 'transformers'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""


def test_concurrent_transfers_use_separate_lanes() -> None:
    """Concurrent transfers get separate lanes, and a transfer uses the first free one."""
    ends = [(0.0, 2.0), (0.5, 10.0), (2.0, 4.0), (3.0, 5.0)]
    links = pl.DataFrame([
        {**INTERVALS.filter(what="link").row(0, named=True), "start": start, "end": end} for start, end in ends
    ])  # fmt: skip
    drawn = bars(timeline.draw(pl.concat([INTERVALS.filter(pl.col("what") != "link"), links], how="vertical_relaxed")))
    heights = {(start, end): height for what, start, end, height in drawn if what == "link"}
    assert heights[0, 2] == heights[2, 4]
    assert len({heights[0, 2], heights[0.5, 10], heights[3, 5]}) == 3
