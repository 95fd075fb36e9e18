"""Figure of PPD's published times: marks, curves and labels against the table and the rows."""

from __future__ import annotations

import itertools
from pathlib import Path

import matplotlib
import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

import figures
import sim
from figures.of_papers import ppd_table_3_times
from model.base.checks import ParameterError
from model.costs.layer_times import UnitCost
from model.published import ppd_table_3_fit
from model.published.ppd_table_3_fit import LAYERS, PER_PROCESS, SEPARATING, TOKENS
from tests.support.figure_checks import laid_out


@pytest.fixture(scope="module")
def rows() -> pl.DataFrame:
    return sim.run("ppd-table-3", set={"scenario.replications": 512, "scenario.event_replications": 8})


def marks(figure: Figure, label: str) -> list[float]:
    """Positions of the marks with this label in the left panel, from the top down [ms]."""
    found = [line for line in figure.axes[0].lines if line.get_label() == label]
    found.sort(key=lambda line: float(np.mean(line.get_ydata())))  # type: ignore[arg-type]
    return [float(line.get_xdata()[0]) for line in found]  # type: ignore[index, arg-type]


def curve(figure: Figure, label: str) -> tuple[list[float], list[float]]:
    [line] = [line for line in figure.axes[1].lines if line.get_label() == label]
    return [float(x) for x in line.get_xdata()], [float(y) for y in line.get_ydata()]  # type: ignore[union-attr]


def words(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.findobj(matplotlib.text.Text)]


def test_marks_have_the_values_of_the_table_the_theorem_and_the_views(rows: pl.DataFrame) -> None:
    figure, runs = ppd_table_3_times.draw(rows), ppd_table_3_fit.runs()
    each = 1e3 / TOKENS
    assert marks(figure, "measured") == pytest.approx([each * run.latency_s for run in runs])
    assert marks(figure, "plain") == pytest.approx([each * run.plain_s for run in runs])
    assert marks(figure, "ideal") == pytest.approx([each * run.predicted_s(UnitCost(LAYERS)) for run in runs])
    for view in ("formula", "paths", "events"):
        own = rows.filter(view=view).sort("data_set", "candidates")
        assert marks(figure, view) == pytest.approx(own["tpot_ms"].to_list())


def test_curves_separate_at_seven_and_pass_the_published_points(rows: pl.DataFrame) -> None:
    figure = ppd_table_3_times.draw(rows)
    for law in PER_PROCESS:
        ks, costs = curve(figure, law)
        assert ks == list(range(1, SEPARATING + 1))
        assert costs == pytest.approx([1e3 * ppd_table_3_fit.per_token_s(int(k), law) for k in ks])
    line, tree = (curve(figure, law)[1] for law in PER_PROCESS)
    assert line[0] == pytest.approx(tree[0])
    assert line[2] == pytest.approx(tree[2])
    assert line[-1] > 1.3 * tree[-1]
    assert {0.0} == {*curve(figure, "ideal")[1]}
    for name in ppd_table_3_fit.data_sets():
        ks, missing = curve(figure, name)
        assert ks == [1, 3]
        expected = [1e3 * (run.latency_s - run.predicted_s(UnitCost(LAYERS))) / TOKENS for run in ppd_table_3_fit.runs(name)]
        assert missing == pytest.approx(expected)
    text = " ".join(words(figure))
    assert f"{line[-1]:.1f} ms" in text
    assert f"{tree[-1]:.1f} ms" in text


def test_printed_numbers_are_computed(rows: pl.DataFrame) -> None:
    text = " ".join(words(ppd_table_3_times.draw(rows)))
    assert "Theorem 4.1 is 7 to 16 % too fast; one cost fitted on the other data set leaves at most 1.0 %" in text
    assert "published times" in text
    assert "exit layer 20 assumed" in text
    for row in ppd_table_3_fit.rows():
        assert f"{100 * row['error']:+.1f} %".replace("-", "\N{MINUS SIGN}") in text
    # Rows that are slower by a fifth have other errors.
    slow = rows.with_columns(pl.col("latency_s") * 1.2)
    assert "leaves at most 21.2 %" in " ".join(words(ppd_table_3_times.draw(slow)))
    # A fit on all four rows is no test, and the theorem alone has no fit.
    own = " ".join(words(ppd_table_3_times.draw(rows.with_columns(fitted_on=pl.lit("both")))))
    assert "leaves at most" not in own
    assert "fitted on both" in own
    alone = " ".join(words(ppd_table_3_times.draw(rows.drop("fitted_on"))))
    assert "theorem alone" in alone


def test_nothing_is_cut_off_and_no_text_covers_another(rows: pl.DataFrame) -> None:
    few = rows.filter(pl.col("view") == "formula").head(1)
    many = pl.concat([rows.with_columns(pl.col("point") + 4 * copy) for copy in range(4)])
    for part in (rows, few, many):
        figure = laid_out(ppd_table_3_times.draw(part))
        left, right = figure.axes
        labels = [axis.get_tightbbox() for axes in figure.axes for axis in (axes.xaxis, axes.yaxis)]
        texts = [*left.texts, *right.texts, *figure.texts, left.title, right.title]
        boxes = [text.get_window_extent() for text in texts if text.get_text()] + [box for box in labels if box is not None]
        boxes += [legend.get_window_extent() for legend in figure.legends]
        assert not any(one.overlaps(other) for one, other in itertools.combinations(boxes, 2))
        whole = figure.bbox
        assert all(whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0 and box.y1 <= whole.y1 for box in boxes)


@pytest.mark.usefixtures("unrendered")
def test_a_run_that_replays_the_table_has_the_figure(rows: pl.DataFrame, tmp_path: Path) -> None:
    assert tmp_path / "figures" / "table_3.png" in figures.of_run(tmp_path, rows)
    other = rows.with_columns(tokens=pl.lit(64))
    assert not [path for path in figures.of_run(tmp_path, other) if path.stem == "table_3"]


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(rows: pl.DataFrame, tmp_path: Path) -> None:
    first, second = (figures.save(ppd_table_3_times.draw(rows), tmp_path / name) for name in ("one", "two"))
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


def test_rows_that_cannot_be_drawn_are_refused(rows: pl.DataFrame) -> None:
    with pytest.raises(ParameterError, match="needs at least one row"):
        ppd_table_3_times.draw(rows.clear())
    with pytest.raises(ParameterError, match="none called seconds_per_layer"):
        ppd_table_3_times.draw(rows.drop("seconds_per_layer"))
    with pytest.raises(ParameterError, match="points that replay it, got none"):
        ppd_table_3_times.draw(rows.with_columns(exit_layer=pl.lit(30)))
