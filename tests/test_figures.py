"""Figures are checked by their artists: what stands where, and that nothing is told by colour alone. No pixels are compared."""

import itertools
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection, PolyCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures import distribution, save, timeline, tradeoff
from figures.style import COLOURS, looks
from model import ppd, published
from model.acceptance import Iid
from model.algorithms.ppd import Parameters
from model.checks import ParameterError
from model.latency import UnitCost

TOKENS = {"squad": 16, "wmt": 128, "cnn_dm": 128}
AXES = ("mean_units", "compute_per_token")


def point(number: int, parameters: Parameters, tokens: int, rate: float, **more: Any) -> dict[str, Any]:
    theory = ppd.predict(parameters, tokens, Iid(rate), UnitCost(parameters.layers))
    return {
        "point": number, "view": "formula", "method": "ppd", "form": parameters.form, "layers": parameters.layers,
        "exit_layer": parameters.exit_layer, "candidates": parameters.candidates, "tokens": tokens, "match_rate": rate,
        "normalized_latency": float(theory.latency / theory.plain_latency),
        "compute_per_token": float(theory.busy / theory.plain_latency), "mean_units": float(theory.busy / theory.latency), **more,
    }  # fmt: skip


def paper(views: Sequence[str] = ("formula", "paths", "events")) -> pl.DataFrame:
    """The paper's 18 points; what stands for the simulation is the theory, a little off and with intervals."""
    rows = []
    for number, (k, data_set, head) in enumerate(itertools.product((1, 3, 5), TOKENS, ("final", "trained"))):
        rate = published.match_rate("ppd-table-2", data_set=data_set, layer=20, candidates=k, head=head).rate
        row = point(number, Parameters(40, 20, k), TOKENS[data_set], rate, data_set=data_set, head=head)
        for view in views:
            moved = {metric: row[metric] * (1.0 if view == "formula" else 1.004) for metric in ("normalized_latency", *AXES)}
            if view != "formula":
                moved |= {f"{metric}_low": 0.99 * value for metric, value in moved.items()} | {
                    f"{metric}_high": 1.01 * value for metric, value in moved.items()
                }
            rows.append({**row, **moved, "view": view})
    return pl.DataFrame(rows, infer_schema_length=None)


def lines(axes: Axes) -> dict[str, Line2D]:
    return {str(line.get_label()): line for line in axes.lines}


def coordinates(artists: Iterable[Line2D]) -> set[tuple[float, float]]:
    return {(float(x), float(y)) for line in artists for x, y in np.column_stack([np.asarray(part) for part in line.get_data()])}


def words(figure: Figure) -> str:
    return " ".join(" ".join(text.get_text().split()) for text in figure.findobj(matplotlib.text.Text))


# --- Trade-off ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", AXES)
@pytest.mark.parametrize("view", ["formula", "paths", "events"])
def test_every_row_stands_at_its_coordinates(x: str, view: str) -> None:
    rows = paper()
    drawn = coordinates(line for label, line in lines(tradeoff.draw(rows, x).axes[0]).items() if label.startswith(view))
    assert drawn == set(rows.filter(view=view).select(x, "normalized_latency").rows())


@pytest.mark.parametrize("x", AXES)
@pytest.mark.parametrize(
    ("form", "exit_layer"), [("literal", 20), ("literal", 30), ("eager", 37), ("nested", 10), ("flat", 10), ("nested", 20)]
)
def test_the_curve_passes_through_the_points_of_the_formula(form: str, exit_layer: int, x: str) -> None:
    """With l tokens a rate p acts as p (l - 1) / l, so one curve holds points of all lengths; the flat form has one a length."""
    choices = itertools.product((1, 4), (2, 16, 128), (0.0, 0.3, 1.0))
    rows = [point(i, Parameters(40, exit_layer, k, form), n, p) for i, (k, n, p) in enumerate(choices)]
    drawn = lines(tradeoff.draw(pl.DataFrame(rows), x).axes[0])
    curves = {label.removeprefix("curve "): line for label, line in drawn.items() if label.startswith("curve ")}
    assert len(curves) == (6 if form == "flat" and exit_layer < 20 else 2)
    for name, curve in curves.items():
        xs, ys = (np.asarray(part) for part in curve.get_data())
        points = np.array(sorted(coordinates([drawn[f"formula {name}"]])))
        assert np.interp(points[:, 1], ys[::-1], xs[::-1]) == pytest.approx(points[:, 0], rel=1e-4)


@pytest.mark.parametrize("x", AXES)
def test_intervals_reach_from_low_to_high(x: str) -> None:
    rows = paper().filter(view="paths")
    figure = tradeoff.draw(rows, x)
    for metric, column in ((x, 0), ("normalized_latency", 1)):
        bars = [bar for bar in figure.axes[0].collections if isinstance(bar, LineCollection) and bar.get_label() == metric]
        drawn = {tuple(np.asarray(segment)[:, column].tolist()) for bar in bars for segment in bar.get_segments()}
        assert drawn == set(rows.select(f"{metric}_low", f"{metric}_high").rows())


def test_points_are_named_by_data_set_and_head() -> None:
    texts = [text.get_text() for text in tradeoff.draw(paper()).axes[0].texts]
    for data_set in TOKENS:
        assert texts.count(data_set) == texts.count(f"{data_set} tr") == 3


@pytest.mark.parametrize("x", AXES)
def test_labels_overlap_neither_each_other_nor_the_frame(x: str) -> None:
    figure = tradeoff.draw(paper(), x)
    axes = figure.axes[0]
    boxes = [text.get_window_extent() for text in axes.texts]
    assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
    frame = axes.get_window_extent()
    assert all(frame.x0 <= box.x0 and box.x1 <= frame.x1 and box.y1 <= frame.y1 for box in boxes)


def test_nothing_is_cut_off_at_the_edge_of_the_figure() -> None:
    for x in AXES:
        figure = tradeoff.draw(paper(), x)
        assert all(legend.get_window_extent().x1 <= figure.bbox.x1 for legend in figure.legends)
        assert all(text.get_window_extent().x1 <= figure.bbox.x1 for text in figure.texts)


def test_the_note_has_the_numbers_of_the_theory() -> None:
    rate = published.match_rate("ppd-table-2", data_set="squad", layer=20, candidates=3, head="trained").rate
    latency, compute = ppd.expected_latency(40, 20, 16, rate), ppd.expected_compute(40, 20, 16, rate, 3)
    text = words(tradeoff.draw(paper()))
    assert f"{100 * (1 - ppd.normalized_latency(rate)):.1f} % less latency" in text
    assert f"{ppd.mean_units(rate, 3):.3f} busy units" in text
    assert f"{100 * (1 - latency / 640):.1f} % less latency and E[C]/E[T] = {compute / latency:.4f}" in text


def test_the_note_stands_only_where_its_point_does() -> None:
    assert "caption" in words(tradeoff.draw(paper()))
    assert "caption" not in words(tradeoff.draw(paper(), "compute_per_token"))
    assert "caption" not in words(tradeoff.draw(paper().filter(pl.col("candidates") != 3)))


@pytest.mark.parametrize("count", [1, 3, 6, 7, 20])
def test_series_are_told_apart_without_colour(count: int) -> None:
    signs = [(look.marker, look.line) for look in looks(count)]
    shades = [float(np.dot(to_rgb(look.colour), (0.3, 0.59, 0.11))) for look in looks(count)]
    # Few series differ in their signs; many lie on a ramp that a grey copy keeps in order.
    assert len(set(signs)) == count if count <= len(COLOURS) else shades == sorted(shades)


def test_views_are_told_apart_without_colour() -> None:
    drawn = lines(tradeoff.draw(paper()).axes[0])
    assert len({drawn[f"{view} k = 3"].get_markersize() for view in ("formula", "paths", "events")}) == 3
    assert drawn["formula k = 3"].get_markerfacecolor() == "none"


@pytest.mark.parametrize("x", AXES)
def test_any_sweep_can_be_drawn(x: str) -> None:
    choices = itertools.product(range(1, 13), np.linspace(0, 1, 7))
    grid = [point(i, Parameters(40, 20, k), 64, p) for i, (k, p) in enumerate(choices)]
    plain = dict.fromkeys(("normalized_latency", *AXES), 1.0) | {"view": "formula", "method": "autoregressive", "layers": 40}
    tables = [
        pl.DataFrame(grid),
        pl.DataFrame(grid[:1]).drop("point", "form", "match_rate"),
        pl.DataFrame(grid[:1]).select("view", "normalized_latency", *AXES),
        pl.DataFrame([*grid[:14], plain], infer_schema_length=None).with_columns(data_set=pl.lit(None), head=pl.lit(None)),
        pl.DataFrame([point(i, Parameters(40, e, 2), 8, 0.5, view="events") for i, e in enumerate(range(20, 41))]),
    ]
    for table in tables:
        axes = tradeoff.draw(table, x).axes[0]
        drawn = coordinates(line for label, line in lines(axes).items() if label.split()[0] in ("formula", "events"))
        assert drawn == set(table.select(x, "normalized_latency").rows())


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
    code = "import sys, figures, figures.tradeoff, figures.timeline, figures.distribution;"
    code += "print(*{'matplotlib.pyplot', 'scipy', 'simpy', 'torch'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == ""
