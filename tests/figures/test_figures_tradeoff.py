"""Trade-off figure: points, curves, intervals, labels and the note, against the theory."""

import itertools
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.axes import Axes
from matplotlib.collections import LineCollection
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from figures.common.style import COLOURS, series_styles
from figures.of_runs import tradeoff
from model import published
from model.costs.layer_times import UnitCost
from model.methods.ppd import theory as ppd
from model.methods.ppd.algorithm import Parameters
from model.outcomes.outcome_laws import Iid
from tests.support.tiers import cross_rows

TOKENS = {"squad": 16, "wmt": 128, "cnn_dm": 128}
AXES = ("mean_busy_units", "compute_per_token")


def point(number: int, parameters: Parameters, tokens: int, rate: float, **more: Any) -> dict[str, Any]:
    theory = ppd.predict(parameters, tokens, Iid(rate), UnitCost(parameters.layers))
    return {
        "point": number, "view": "formula", "method": "ppd", "form": parameters.form, "layers": parameters.layers,
        "exit_layer": parameters.exit_layer, "candidates": parameters.candidates, "tokens": tokens, "match_rate": rate,
        "batched": parameters.batched,
        "relative_latency": float(theory.latency / theory.plain_latency),
        "compute_per_token": float(theory.busy / theory.plain_latency), "mean_busy_units": float(theory.busy / theory.latency),
        **more,
    }  # fmt: skip


def paper(views: Sequence[str] = ("formula", "paths", "events")) -> pl.DataFrame:
    """The paper's 18 points, with a synthetic simulation: the theory, slightly shifted, with intervals."""
    rows = []
    for number, (k, data_set, head) in enumerate(itertools.product((1, 3, 5), TOKENS, ("final", "trained"))):
        rate = published.match_rate("ppd-table-2", data_set=data_set, layer=20, candidates=k, head=head).rate
        row = point(number, Parameters(40, 20, k), TOKENS[data_set], rate, data_set=data_set, head=head)
        for view in views:
            moved = {metric: row[metric] * (1.0 if view == "formula" else 1.004) for metric in ("relative_latency", *AXES)}
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


@pytest.mark.parametrize("x", AXES)
@pytest.mark.parametrize("view", ["formula", "paths", "events"])
def test_rows_are_drawn_at_their_coordinates(x: str, view: str) -> None:
    rows = paper()
    drawn = coordinates(line for label, line in lines(tradeoff.draw(rows, x).axes[0]).items() if label.startswith(view))
    assert drawn == set(rows.filter(view=view).select(x, "relative_latency").rows())


FORMS = [
    ("literal", 20), ("literal", 30), ("eager", 37), ("nested", 10), ("flat", 10), ("nested", 20), ("literal batched", 20),
    ("eager batched", 30), ("flat batched", 10),
]  # fmt: skip


@pytest.mark.parametrize(("of", "x"), cross_rows(FORMS, AXES, few=[("literal", 20), ("flat", 10), ("eager batched", 30)]))
def test_curves_pass_the_points_of_the_formula(of: tuple[str, int], x: str) -> None:
    """With l tokens a rate p acts like p (l - 1) / l, so one curve fits all lengths; the flat form has one curve per length."""
    form, exit_layer = of
    choices = itertools.product((1, 4), (2, 16, 128), (0.0, 0.3, 1.0))
    form, _, batched = form.partition(" ")
    more = {"form": form, "batched": bool(batched)}
    rows = [point(i, Parameters(40, exit_layer, k, **more), n, p) for i, (k, n, p) in enumerate(choices)]
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
    for metric, column in ((x, 0), ("relative_latency", 1)):
        bars = [bar for bar in figure.axes[0].collections if isinstance(bar, LineCollection) and bar.get_label() == metric]
        drawn = {tuple(np.asarray(segment)[:, column].tolist()) for bar in bars for segment in bar.get_segments()}
        assert drawn == set(rows.select(f"{metric}_low", f"{metric}_high").rows())


def test_points_are_named_by_data_set_and_head() -> None:
    texts = [text.get_text() for text in tradeoff.draw(paper()).axes[0].texts]
    for data_set in TOKENS:
        assert texts.count(data_set) == texts.count(f"{data_set} trained") == 3


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
    assert f"{100 * (1 - ppd.relative_latency(rate)):.1f} % less latency" in text
    assert f"{ppd.mean_busy_units(rate, 3):.3f} busy units" in text
    assert f"{100 * (1 - latency / 640):.1f} % and E[C]/E[T] = {compute / latency:.4f}" in text


def test_note_is_drawn_only_with_its_point() -> None:
    assert "caption" in words(tradeoff.draw(paper()))
    assert "caption" not in words(tradeoff.draw(paper(), "compute_per_token"))
    assert "caption" not in words(tradeoff.draw(paper().filter(pl.col("candidates") != 3)))


def test_note_is_drawn_only_for_the_papers_figure() -> None:
    """The note is printed only for layer-times, several data sets, half of the layers, and the caption's point."""
    rate = published.match_rate("ppd-table-2", data_set="squad", layer=20, candidates=3, head="trained").rate
    latency, compute = ppd.expected_latency(40, 20, 16, rate), ppd.expected_compute(40, 20, 16, rate, 3)
    note = (
        f"squad trained, k = 3, p = {rate:g}: for many tokens Eq. 3 gives {50 * rate:.1f} % less latency and Eq. 5 gives"
        f" {ppd.mean_busy_units(rate, 3):.3f} busy units; for the 16 tokens that the rate was measured on Theorem 4.1 gives"
        f" {100 - 100 * latency / 640:.1f} % and E[C]/E[T] = {compute / latency:.4f}. The paper's caption (34 %, 3.2 times)"
        " combines one number from each."
    )
    rows, nothing = paper(("formula",)), pl.lit(None, pl.Float64)
    for table in (
        rows, rows.with_columns(seconds_per_layer=nothing), rows.with_columns(method=pl.lit(None, pl.String)),
        rows.filter(pl.col("data_set") != "wmt"),
    ):  # fmt: skip
        assert tradeoff._caption_note(table) == note
    for table in (
        rows.with_columns(seconds_per_layer=0.01), rows.filter(data_set="squad"), rows.with_columns(method=pl.lit("other")),
        rows.with_columns(tokens=nothing), rows.with_columns(match_rate=nothing), rows.with_columns(exit_layer=21),
        rows.filter(pl.col("data_set") != "squad"), rows.filter(head="final"), rows.filter(pl.col("candidates") != 3),
    ):  # fmt: skip
        assert not tradeoff._caption_note(table)


@pytest.mark.parametrize("count", [1, 3, 6, 7, 20])
def test_series_differ_without_colour(count: int) -> None:
    signs = [(style.marker, style.line) for style in series_styles(count)]
    shades = [float(np.dot(to_rgb(style.colour), (0.3, 0.59, 0.11))) for style in series_styles(count)]
    # Few series differ in marker and line; many have a ramp of colours that stays ordered in grey.
    assert len(set(signs)) == count if count <= len(COLOURS) else shades == sorted(shades)


def test_views_differ_without_colour() -> None:
    drawn = lines(tradeoff.draw(paper()).axes[0])
    assert len({drawn[f"{view} k = 3"].get_markersize() for view in ("formula", "paths", "events")}) == 3
    assert drawn["formula k = 3"].get_markerfacecolor() == "none"


@pytest.mark.parametrize("x", AXES)
def test_any_sweep_can_be_drawn(x: str) -> None:
    choices = itertools.product(range(1, 13), np.linspace(0, 1, 7))
    grid = [point(i, Parameters(40, 20, k), 64, p) for i, (k, p) in enumerate(choices)]
    plain = dict.fromkeys(("relative_latency", *AXES), 1.0) | {"view": "formula", "method": "autoregressive", "layers": 40}
    tables = [
        pl.DataFrame(grid),
        pl.DataFrame(grid[:1]).drop("point", "form", "match_rate"),
        pl.DataFrame(grid[:1]).select("view", "relative_latency", *AXES),
        pl.DataFrame([*grid[:14], plain], infer_schema_length=None).with_columns(data_set=pl.lit(None), head=pl.lit(None)),
        pl.DataFrame([point(i, Parameters(40, e, 2), 8, 0.5, view="events") for i, e in enumerate(range(20, 41))]),
    ]
    for table in tables:
        axes = tradeoff.draw(table, x).axes[0]
        drawn = coordinates(line for label, line in lines(axes).items() if label.split()[0] in ("formula", "events"))
        assert drawn == set(table.select(x, "relative_latency").rows())
