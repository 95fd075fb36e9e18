"""Figure of speculative decoding in batches: drawn values are those of the rows, and other figures distinguish batches."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from figures import of_run, save
from figures.common.style import NAMES
from figures.of_runs import speedup, speedup_by_batch
from model.base.checks import ParameterError
from model.methods.method_parameters import BATCHING_DESCRIPTIONS
from tests.figures.test_figures_speculative import xy
from tests.support.figure_checks import odd_dashes, shown

KEYS = ("sequences", "draft_length", "acceptance_rate", "view")


def rows(views: tuple[str, ...] = ("formula", "paths")) -> pl.DataFrame:
    """Speed-ups that are unique to each row."""
    found = [
        {
            "sequences": batch, "batching": "continuous", "draft_length": length, "acceptance_rate": rate, "view": view,
            "speedup": 1 + batch / 100 + length / 10 + rate, "speedup_low": None if view == "formula" else 1.0,
            "speedup_high": None if view == "formula" else 1.5 + length / 10 + rate,
        }
        for rate in (0.8, 0.6) for length in (3, 1) for batch in (64, 1, 8) for view in views
    ]  # fmt: skip
    return pl.DataFrame(found, schema_overrides={"speedup_low": pl.Float64, "speedup_high": pl.Float64})


@pytest.mark.parametrize("views", [("formula", "paths"), ("paths", "events"), ("formula",)])
def test_lines_go_through_the_speed_ups_of_the_first_view(views: tuple[str, ...]) -> None:
    figure = speedup_by_batch.draw(rows(views))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["acceptance rate α = 0.6", "acceptance rate α = 0.8"]
    for axes, rate in zip(figure.axes, (0.6, 0.8), strict=True):
        drawn = [line for line in axes.lines if line.get_linestyle() != "None" and len(line.get_xdata()) == 3]
        assert len(drawn) == 2
        for line, length in zip(drawn, (1, 3), strict=True):
            assert [*line.get_xdata()] == [1, 8, 64]
            assert line.get_ydata() == pytest.approx([1 + batch / 100 + length / 10 + rate for batch in (1, 8, 64)])
        marks = [line for line in axes.lines if line.get_linestyle() == "None" and len(line.get_xdata()) == 3]
        assert len(marks) == 2 * len(views)
        assert {*axes.get_xticks()} == {1, 8, 64}
        assert [text.get_text() for text in axes.texts] == ["γ = 1", "γ = 3"]
        low, high = axes.get_ylim()
        assert low < 1.0 < 1 + 0.64 + 0.3 + 0.8 < high
    assert figure.axes[0].get_ylim() == figure.axes[1].get_ylim()
    assert [text.get_text() for text in figure.legends[0].texts] == [NAMES[view] for view in views]


def test_rates_have_three_digits() -> None:
    figure = speedup_by_batch.draw(rows().with_columns(acceptance_rate=0.844692).unique(["sequences", "draft_length", "view"]))
    assert [axes.get_title(loc="left") for axes in figure.axes] == ["acceptance rate α = 0.845"]


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = (save(speedup_by_batch.draw(rows()), tmp_path / name) for name in ("one", "other"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_fits_only_if_nothing_else_distinguishes_rows() -> None:
    assert speedup_by_batch.fits(rows())
    assert not speedup_by_batch.fits(rows().filter(pl.col("sequences") == 8))
    assert not speedup_by_batch.fits(rows().drop("sequences"))
    assert not speedup_by_batch.fits(pl.concat([rows(), rows()]))
    many = pl.concat([rows().with_columns(acceptance_rate=pl.col("acceptance_rate") / each) for each in (1, 2, 3)])
    assert not speedup_by_batch.fits(many)
    with pytest.raises(ParameterError, match="values of acceptance_rate must be between 1 and 4, got 6"):
        speedup_by_batch.draw(many)
    with pytest.raises(ParameterError, match=r"the figure of batches needs the columns .*, got none called sequences"):
        speedup_by_batch.draw(rows().drop("sequences"))


@pytest.mark.usefixtures("unrendered")
def test_other_figures_of_a_run_distinguish_batches(tmp_path: Path) -> None:
    table = rows().with_columns(point=pl.struct(KEYS[:3]).rank("dense"), method=pl.lit("speculative"), cost_ratio=0.1, tokens=64)
    paths = of_run(tmp_path, table)
    assert {path.stem for path in paths} >= {"speedup_by_batch", "speedup_acceptance_rate", "speedup_draft_length"}
    axes = speedup.draw(table, "draft_length").axes[0]
    for (batch, rate), own in table.filter(view="formula").group_by("sequences", "acceptance_rate"):
        name = f"formula α = {rate:.3g}" + (f", batch of {batch}" if batch > 1 else "")
        [drawn] = [line for line in axes.lines if line.get_label() == name]
        assert {*zip(*xy(drawn), strict=True)} == {*own.select("draft_length", "speedup").rows()}


def test_batches_by_hand() -> None:
    made = pl.DataFrame({
        "sequences": [2, 8, 2, 8, 2, 8], "batching": "static", "draft_length": [3] * 6, "acceptance_rate": [0.75] * 6,
        "view": ["formula"] * 2 + ["paths"] * 2 + ["events"] * 2, "speedup": [1.5, 1.25, 1.6, 1.2, 1.7, 1.1],
        "speedup_low": [None, None, 1.4, 0.75, None, 1.0], "speedup_high": [None, None, 1.8, 1.3, None, 1.2],
    })  # fmt: skip
    more = made.with_columns(draft_length=pl.lit(1, dtype=pl.Int64), speedup=pl.col("speedup") - 0.25)
    both = pl.concat([made, more.filter(pl.col("view") == "paths")])
    figure = speedup_by_batch.draw(both.sample(fraction=1, shuffle=True, seed=1))
    drawn = shown(figure)
    assert drawn.texts == ["Does drafting still pay in a batch?", BATCHING_DESCRIPTIONS["static"]]
    assert drawn.legends == [("", [NAMES[view] for view in ("formula", "paths", "events")])]
    [panel] = drawn.panels
    assert (panel.title, panel.x) == ("acceptance rate α = 0.75", "batch size [sequences]")
    assert panel.y == "speed-up over plain decoding of the same batch"
    assert panel.scales == ("log", "linear")
    assert panel.grid == "xy"
    # The shorter draft has only paths, and its line goes through them.
    lines = [points for _, points in panel.lines[1:]]
    short, long = [(2, pytest.approx(1.35)), (8, pytest.approx(0.95))], [[(2, one), (8, other)] for one, other in (
        (1.5, 1.25), (1.5, 1.25), (1.6, 1.2), (1.7, 1.1))]  # fmt: skip
    assert [each for each in lines if each] == [short, short, *long]
    ends = [pair for _, pairs in panel.segments for pair in pairs]
    assert ends == [((2, 1.4), (2, 1.8)), ((8, 0.75), (8, 1.3)), ((2, 1.4), (2, 1.8)), ((8, 0.75), (8, 1.3)), ((8, 1.0), (8, 1.2))]
    assert panel.texts == ["γ = 1", "γ = 3"]
    axes = figure.axes[0]
    room = 0.06 * (1.8 - 0.75)
    assert (*axes.get_xlim(), *axes.get_ylim()) == pytest.approx((2 / 1.2, 8 * 1.2, 0.75 - room, 1.8 + room))
    assert panel.ticks[0] == ["2", "8"]
    assert axes.yaxis.get_major_formatter()(1.5, 0) == "1.5×"
    assert not axes.xaxis.get_minorticklocs().size
    assert not odd_dashes(figure)
    level = made.filter(view="formula").with_columns(speedup=1.0)
    assert speedup_by_batch.draw(level).axes[0].get_ylim() == pytest.approx((0.9, 1.1))  # margin where all values are equal
    assert speedup_by_batch.draw(level.with_columns(speedup=2.0)).axes[0].get_ylim() == pytest.approx((0.94, 2.06))


def test_batches_fit_up_to_their_bounds() -> None:
    one = rows(("formula",)).filter(acceptance_rate=0.8, draft_length=1)
    for name, most in (("acceptance_rate", 4), ("draft_length", 6)):
        for count in (most, most + 1):
            many = pl.concat([one.with_columns(pl.lit(0.1 * each if name == "acceptance_rate" else each).alias(name))
                              for each in range(1, count + 1)])  # fmt: skip
            assert speedup_by_batch.fits(many) == (count == most)
            if count > most:
                with pytest.raises(ParameterError, match=f"values of {name} must be between 1 and {most}, got {count}"):
                    speedup_by_batch.draw(many)
    both = pl.concat([one, one.with_columns(batching=pl.lit("static"), sequences=pl.col("sequences") + 1)])
    assert not speedup_by_batch.fits(both)
    with pytest.raises(ParameterError, match="values of batching must be"):
        speedup_by_batch.draw(both)
    with pytest.raises(ParameterError, match="unknown batching 'statik'; did you mean static"):
        speedup_by_batch.draw(one.with_columns(batching=pl.lit("statik")))
    for name in ("batching", "view"):  # of several wrong values always the same one is named
        wrong = pl.concat([one.with_columns(pl.lit(letter).alias(name)) for letter in "hgfedcba"])
        with pytest.raises(ParameterError, match=f"unknown {name} 'a'"):
            speedup_by_batch.draw(wrong)
    some = one.with_columns(draft_length=pl.when(sequences=8).then(None).otherwise("draft_length"))
    assert speedup_by_batch.of_run(some)["sequences"].to_list() == [64, 1]
    assert speedup_by_batch.fits(some)
    assert not speedup_by_batch.fits(one.with_columns(speedup=None))
    for name in ("batching", "draft_length", "acceptance_rate", "view", "speedup"):
        assert not speedup_by_batch.fits(one.drop(name))
