"""The figure of batches that draft: what it draws is what the rows say, and other figures tell batches apart."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from figures import of_run, save, speedup, speedup_by_batch
from figures.style import NAMES
from model.checks import ParameterError
from tests.test_figures_speculative import xy

KEYS = ("sequences", "draft_length", "acceptance_rate", "view")


def rows(views: tuple[str, ...] = ("formula", "paths")) -> pl.DataFrame:
    """Speed-ups that say which row they are of."""
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


@pytest.mark.slow
def test_the_same_rows_give_the_same_bytes(tmp_path: Path) -> None:
    one, other = (save(speedup_by_batch.draw(rows()), tmp_path / name) for name in ("one", "other"))
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in other]


def test_it_fits_where_nothing_else_tells_rows_apart() -> None:
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
def test_other_figures_of_a_run_tell_batches_apart(tmp_path: Path) -> None:
    table = rows().with_columns(point=pl.struct(KEYS[:3]).rank("dense"), method=pl.lit("speculative"), cost_ratio=0.1, tokens=64)
    paths = of_run(tmp_path, table)
    assert {path.stem for path in paths} >= {"speedup_by_batch", "speedup_acceptance_rate", "speedup_draft_length"}
    axes = speedup.draw(table, "draft_length").axes[0]
    for (batch, rate), own in table.filter(view="formula").group_by("sequences", "acceptance_rate"):
        name = f"formula α = {rate:.3g}" + (f", batch of {batch}" if batch > 1 else "")
        [drawn] = [line for line in axes.lines if line.get_label() == name]
        assert {*zip(*xy(drawn), strict=True)} == {*own.select("draft_length", "speedup").rows()}
