"""Tables of measured cells: conversions of units, files read back, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.engines import cells
from model.engines.cells import Cells

UNITS = st.sampled_from([*cells.UNITS])
POSITIVE = st.floats(1e-3, 1e6)


@given(UNITS, POSITIVE, st.floats(1, 1e4), st.floats(1, 9))
def test_conversion_to_a_unit_and_back_is_the_identity(unit: str, seconds: float, sequences: float, length: float) -> None:
    assert cells.from_unit(unit, cells.to_unit(unit, seconds, sequences, length), sequences, length) == pytest.approx(seconds)


@given(POSITIVE, st.floats(1, 1e4), st.floats(1, 9))
def test_throughput_is_sequences_over_time_per_token(seconds: float, sequences: float, length: float) -> None:
    tpot, rate = (float(cells.to_unit(unit, seconds, sequences, length)) for unit in ("tpot_ms", "output_tokens_per_s"))
    assert rate * tpot / 1e3 == pytest.approx(sequences)


@st.composite
def tables(draw: st.DrawFn) -> Cells:
    """Tables with unknown values in every optional column."""
    count = draw(st.integers(1, 6))
    drafted = draw(st.lists(st.integers(0, 8), min_size=count, max_size=count))

    def column(low: float, high: float) -> list[float]:
        return draw(st.lists(st.one_of(st.just(float("nan")), st.floats(low, high)), min_size=count, max_size=count))

    lengths = [min(each, length + 1.0) for each, length in zip(column(1, 9), drafted, strict=True)]
    return Cells.of(
        draw(UNITS), draw(st.lists(st.floats(1, 512), min_size=count, max_size=count)), drafted, column(1e-3, 1e6),
        mean_acceptance_length=lengths, draft_passes=column(0, 8), context=column(0, 1e5), weight=column(0.5, 9),
    )  # fmt: skip


@given(table=tables())
def test_written_cells_are_read_back(table: Cells, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = cells.write_csv(tmp_path_factory.mktemp("cells") / "cells.csv", table)
    found = cells.read_csv(path, unit=table.unit).cells
    for name, column in vars(table).items():
        if name != "unit":
            np.testing.assert_allclose(getattr(found, name), column, rtol=1e-12, err_msg=name)
    again = cells.of_rows(table.unit, cells.rows(table))
    assert cells.rows(again) == cells.rows(found)


GOOD = "sequences,draft_length,mean_acceptance_length,tpot_ms\n1,0,,10\n8,3,2.5,7\n"
BAD = [
    ("", "the file is empty"), ("sequences,draft_length,tpot_ms\n", "at least one cell is needed"),
    (GOOD.replace("sequences,", "sequence,"), "column sequences is missing"),
    (GOOD.replace("mean_acceptance_length", "mean_acceptance_lenght"), "did you mean mean_acceptance_length"),
    (GOOD.replace("tpot_ms", "tpot"), "a column of measured values is needed: one of step_ms, tpot_ms, output_tokens_per_s"),
    (GOOD.replace("mean_acceptance_length", "step_ms"), "one column of measured values is needed, got step_ms and tpot_ms"),
    (GOOD.replace("draft_length", "tpot_ms", 1), "column tpot_ms is there twice; keep one of them"),
    (GOOD.replace("10", "ten"), "row 1: tpot_ms must be a number, or empty where unknown, got 'ten'"),
    (GOOD.replace("10", "nan"), "row 1: tpot_ms must be a number"), (GOOD.replace("10", "inf"), "row 1: tpot_ms must be a number"),
    (GOOD.replace("10", "-10"), "row 1: tpot_ms must be between 1e-09 and 1e+12, got -10"),
    (GOOD.replace("10", "0"), "row 1: tpot_ms must be between"), (GOOD.replace("8,3", "0,3"), "row 2: sequences must be between"),
    (GOOD.replace("8,3", "8,1.5"), "draft_length[1] must be a whole number, got 1.5"),
    (GOOD.replace("8,3", "8,-1"), "draft_length[1] must be at least 0"),
    (GOOD.replace("8,3", "8,"), "row 2: draft_length must be a number"),
    (GOOD.replace("2.5", "4.5"), "row 2: mean_acceptance_length must be at most draft_length + 1 = 4 (the bonus token counted)"),
    (GOOD.replace("2.5", "0.5"), "row 2: mean_acceptance_length must be between 1 and"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_file_is_refused_with_its_name_and_row(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_text(text)
    with pytest.raises(ParameterError) as caught:
        cells.read_csv(path)
    assert str(caught.value).startswith("measured.csv: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_other_columns_are_named_and_not_used(tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_text("gpu, sequences ,draft_length,tpot_ms\nh100,1,0, 10 \n")
    found = cells.read_csv(path)
    assert found.unused == ("gpu",)
    assert found.cells.values.tolist() == [10.0]


def test_parallel_drafts_count_as_many_passes_as_they_make() -> None:
    found = Cells.of("step_ms", [1, 1], [0, 7], draft_passes=[float("nan"), 1])
    assert found.draft_passes.tolist() == [0, 1]
    assert Cells.of("step_ms", [1, 1], [0, 7]).draft_passes.tolist() == [0, 7]
