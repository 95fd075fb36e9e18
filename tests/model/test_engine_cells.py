"""Tables of measured cells: conversions of units, files read back, and what is refused."""

from __future__ import annotations

import gzip
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
    (GOOD.replace("8,3", "8,1.5"), "row 2: draft_length must be a whole number, got 1.5"),
    (GOOD.replace("8,3", "8,-1"), "row 2: draft_length must be between 0 and 1024, got -1"),
    (GOOD.replace("8,3", "8,"), "row 2: draft_length must be a number"),
    (GOOD.replace("2.5", "4.5"), "row 2: mean_acceptance_length must be at most draft_length + 1 = 4 (the bonus token counted)"),
    (GOOD.replace("tpot_ms", "TPOT (ms)"), "unknown column 'TPOT (ms)'; did you mean tpot_ms?"),
    (GOOD.replace("10", "1_0"), "row 1: tpot_ms must be a number, or empty where unknown, got '1_0'"),
    (GOOD.replace("10", "\u0663"), "row 1: tpot_ms must be a number"),
    (GOOD.replace("8,3", "x,3"), "sequences must be a number, got 'x'"),
    (GOOD.replace("2.5", "0.5"), "row 2: mean_acceptance_length must be between 1 and"),
    (GOOD.replace("sequences", "Sequences"), "column sequences is missing; for 'Sequences' did you mean sequences? the"),
    (GOOD.replace("tpot_ms", "TPOT_ms"), "unknown column 'TPOT_ms'; did you mean tpot_ms?"),
    (GOOD.replace("7\n", "7,9\n"), "row 2 must have 4 fields, as the header has, got 5"),
    (GOOD.replace(",2.5,7", ",2.5"), "row 2 must have 4 fields, as the header has, got 3"),
    (f"# measured\n\n{GOOD}\n  # more\n8,3\n", "row 3 must have 4 fields, as the header has, got 2"),
    (GOOD.replace(",", ";"), "columns must be separated by commas, got ';'"),
    (GOOD.replace(",tpot_ms", ",tpot_ms,").replace("10", "10,").replace("7", "7,"), "column 5 has no name in the header"),
    ("[2025-10-22 10:27:57 TP0] Decode batch. #running-req: 1, #token: 186,\nmore\n", "column sequences is missing; the columns"),
    ('{"kind": "acceptance-record",\n"a": 1}', "it begins as JSON, and must be CSV with a header"),
    (GOOD + "1,0,,9\n" * cells.MOST_CELLS, "at most 2,000 rows are allowed, got more"),
    (GOOD.replace("7\n", f'"{"7" * 200_000}"\n'), "row 2 cannot be read as CSV: field larger than field limit"),
    ("# only a comment\n\n", "the file is empty"), (gzip.compress(GOOD.encode()), "it is compressed; unpack it first"),
    (GOOD.encode("utf-16"), "it is not text in UTF-8; save it as UTF-8"), (GOOD.encode("utf-16-le"), "it has zero bytes"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "message"), BAD, ids=[message[:40] for _, message in BAD])
def test_bad_file_is_refused_with_its_name_and_row(text: str | bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "measured.csv"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(ParameterError) as caught:
        cells.read_csv(path)
    assert str(caught.value).startswith("measured.csv: ")
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("text", [
    f"\ufeff{GOOD}", GOOD.replace("\n", "\r\n"), "# of my server, {}\n" + GOOD.replace("8,3", "# later, not counted\n8,3"),
    GOOD.replace("\n", "\n\n"), f"{GOOD},,,\n", GOOD.replace(",", " , "), GOOD.replace("10", '"10"'), GOOD.rstrip(),
])  # fmt: skip
def test_comments_blank_lines_and_line_ends_do_not_matter(text: str, tmp_path: Path) -> None:
    path = tmp_path / "cells.csv"
    path.write_bytes(text.encode())
    found = cells.read_csv(path).cells
    assert (found.sequences.tolist(), found.draft_length.tolist(), found.values.tolist()) == ([1, 8], [0, 3], [10, 7])
    assert np.isnan(found.mean_acceptance_length[0])
    assert found.mean_acceptance_length[1] == 2.5


@pytest.mark.parametrize("name", ["folder.csv", "missing.csv"])
def test_a_folder_or_a_missing_file_is_named(name: str, tmp_path: Path) -> None:
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(ParameterError, match="cannot be read: ") as caught:
        cells.read_csv(tmp_path / name)
    assert repr(str(tmp_path / name)) in str(caught.value)
    assert ("a folder" in str(caught.value)) == (name == "folder.csv")


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


@pytest.mark.parametrize(("sequences", "draft_length", "message"), [
    ([1, float("nan")], [0, 0], "row 2: sequences must be between 0.001 and 1e+06, got nan"),
    ([1, 1], [0, float("nan")], "row 2: draft_length must be between 0 and 1024, got nan"),
    ([1, 1], [0.5, 0], "row 1: draft_length must be a whole number, got 0.5"),
    (["x", 1], [0, 0], "sequences must be numbers, got"),
])  # fmt: skip
def test_arrays_that_are_refused(sequences: list[float], draft_length: list[float], message: str) -> None:
    with pytest.raises(ParameterError) as caught:
        Cells.of("step_ms", sequences, draft_length)
    assert message in str(caught.value)
