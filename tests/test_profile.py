"""Profiles as files: they come back as they were written, and what is damaged or impossible is refused with its row."""

import json
from dataclasses import replace
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model import profile
from model.checks import ParameterError
from model.profile import AXES, SCHEMA_VERSION, UNITS, Profile, Source, table_of

ROWS = [
    {"part": "layer", "width": width, "context": context, "batch": 1, "time_s": 1e-4 * (1 + width / 100 + context / 1e4)}
    for width in (1, 2, 8)
    for context in (0, 512)
] + [{"part": "head", "positions": count, "time_s": 2e-4} for count in (1, 8)]
SHAPE = {"layers": 4, "hidden": 64, "heads": 4, "head_dim": 16, "kv_heads": 2, "ffn": 128, "gated": True, "vocabulary": 500}


def made(rows=ROWS, **more):
    """A small profile."""
    said: dict[str, Any] = {
        "name": "tiny", "device": "cpu", "model": "tiny", "dtype": "float32", "engine": "torch", "mode": "eager", "kind": "model",
        "provenance": "measured", "date": "2026-11-21", "bandwidth": 1e10, "rate": 1e11, "cache_bytes": 1e6,
        "table": table_of(rows), "shape": SHAPE, "sources": (Source("by hand", "rows.csv", parts=("layer", "head")),),
        "errors": {"layer": 0.02}, "notes": ("a note",), "facts": {"threads": 2},
    }  # fmt: skip
    return Profile(**said | more)


def test_what_is_written_comes_back(tmp_path):
    one = made()
    path = profile.save(one, tmp_path / "new")
    other = profile.load(path)
    assert {name: value for name, value in vars(other).items() if name != "table"} == {
        name: value for name, value in vars(one).items() if name != "table"
    }
    assert other.table.equals(one.table)
    assert sorted(each.name for each in path.parent.iterdir()) == ["tiny.json", "tiny.parquet"]
    said = json.loads(path.read_text())
    assert said["schema_version"] == SCHEMA_VERSION
    assert said["columns"] == {name: UNITS[name] for name in one.table.columns}


@settings(max_examples=25)
@given(st.data())
def test_any_times_come_back_to_the_last_bit(tmp_path_factory, data):
    part = data.draw(st.sampled_from(["dense", "layer"]))
    axes = AXES[part]
    points = data.draw(st.lists(st.tuples(*[st.integers(1, 10**6)] * len(axes)), min_size=1, max_size=8, unique=True))
    times = [data.draw(st.floats(1e-9, 1e3)) for _ in points]
    where = [dict(zip(axes, point, strict=True)) for point in points]
    rows = [{"part": part, "time_s": time, **each} for each, time in zip(where, times, strict=True)]
    folder = tmp_path_factory.mktemp("p")
    found = profile.load(profile.save(made(rows), folder)).rows(part)
    assert found["time_s"].to_list() == times
    assert found.select(axes).rows() == points


def test_coverage_and_rows():
    one = made([*ROWS, {"part": "dense", "ways": 2, "tokens": 3, "time_s": 1e-4}])
    assert one.parts == ("layer", "dense", "head")
    assert one.ways == (1, 2)
    assert one.coverage() == (
        "layer (width 1 to 8, context 0 to 512, batch 1); dense (tokens 3); head (positions 1 to 8)"
    )
    assert one.rows("dense").height == 0
    assert one.rows("dense", ways=2).columns == ["tokens", "time_s", "low_s", "high_s"]


def spoiled(row, **more):
    rows = [dict(each) for each in ROWS]
    rows[row] |= more
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (spoiled(3, time_s=-1.0), "row 4, column time_s: must be a number of at least 0, got -1.0"),
        (spoiled(3, time_s=float("nan")), "row 4, column time_s: must be a number of at least 0, got nan"),
        (spoiled(3, time_s=float("inf")), "row 4, column time_s: must be a number of at least 0, got inf"),
        (spoiled(3, time_s=0.0), "row 4, column time_s: must be above 0, got 0.0"),
        (spoiled(3, time_s=None), "row 4, column time_s: must be a number of at least 0, got nan"),
        (spoiled(3, width=0), "row 4, column width: must be a number of at least 1, got 0.0"),
        (spoiled(3, width=None), "row 4, column width: must be a number of at least 1, got nan"),
        (spoiled(3, busy=-1), "row 4, column busy: must be a number of at least 0, got -1.0"),
        (spoiled(3, ways=0), "row 4, column ways: must be a number of at least 1, got 0.0"),
        (spoiled(3, width=1), "row 4: part layer has its point more than once; keep the median of its repeats"),
        (spoiled(3, low_s=1.0), "row 4, column time_s: must be between low_s=1 and high_s=0.0001"),
        (spoiled(3, part="leyer"), "row 4: unknown part 'leyer'; did you mean layer?"),
        (ROWS[6:], "a profile of kind model must have rows of layer or dense, got head"),
        ([], "the table is empty; a profile has at least one row"),
        ([{"part": "layer", "width": 1, "context": 1, "time_s": 1}], "column batch is missing; part layer goes by width, cont"),
    ],
)
def test_impossible_rows_are_refused_with_their_row(rows, message):
    with pytest.raises(ParameterError) as caught:
        made(rows)
    assert str(caught.value).startswith(message)


def test_single_operations_may_take_no_time():
    assert made(spoiled(7, time_s=0.0)).rows("head")["time_s"].to_list() == [2e-4, 0.0]


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (table_of(ROWS).drop("busy"), "column busy is missing"),
        (table_of(ROWS).with_columns(speed=pl.lit(1.0)), "unknown column 'speed'"),
        (table_of(ROWS).with_columns(pl.col("time_s").cast(pl.String)), "column time_s must hold numbers, got String"),
        (table_of(ROWS).with_columns(part=pl.lit(1)), "column part must hold names, got Int32"),
    ],
)
def test_columns_are_those_that_are_known(table, message):
    with pytest.raises(ParameterError) as caught:
        made(table=table)
    assert str(caught.value).startswith(message)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kind": "modell"}, "unknown kind 'modell'; did you mean model?"),
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"provenance": "guessed"}, "unknown provenance 'guessed'"),
        ({"bandwidth": 0}, "bandwidth must be at least 1, got 0"),
        ({"rate": float("nan")}, "rate must be finite and at least 1, got nan"),
        ({"cache_bytes": -1}, "cache_bytes must be at least 0, got -1"),
        ({"sources": ()}, "sources must name where the rows come from, got none"),
        ({"device": 3}, "device must be a text, got 3"),
    ],
)
def test_a_profile_says_what_it_is(more, message):
    with pytest.raises(ParameterError) as caught:
        made(**more)
    assert str(caught.value).startswith(message)


@pytest.fixture
def written(tmp_path):
    """A profile's file, and how to change what its JSON says."""
    path = profile.save(made(), tmp_path)

    def change(**more):
        said = json.loads(path.read_text()) | more
        path.write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))
        return path

    return change


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"schema_version": 2}, f"tiny.json: schema_version must be {SCHEMA_VERSION}, got 2; import or measure it again"),
        ({"schema_version": ...}, "tiny.json: it is not a profile: schema_version is missing"),
        ({"device": ...}, "tiny.json: device is missing"),
        ({"colour": 1}, "tiny.json: unknown key colour; did you mean columns?"),
        ({"rows": 3}, "tiny.json: rows must be the table's 8, got 3"),
        ({"sha256": "0" * 64}, "tiny.json: its table tiny.parquet is not the one that it was written with (sha256)"),
        ({"columns": {"time_s": "ms"}}, "tiny.json: column time_s must be in s, got 'ms'"),
        ({"columns": {"time_s": None}}, "tiny.json: column time_s must be in s, got None"),
        ({"columns": {"speed": "s"}}, "tiny.json: column speed is unknown, got 's'"),
        ({"columns": {}}, "tiny.json: column part has no unit; columns must name all of the table's"),
        ({"sources": [{"repository": "x"}]}, "tiny.json: sources must each have repository"),
        ({"mode": "fast"}, "tiny.json: unknown mode 'fast'"),
    ],
)
def test_files_that_are_not_as_written_are_refused(written, more, message):
    with pytest.raises(ParameterError) as caught:
        profile.load(written(**more))
    assert str(caught.value).startswith(message)


def test_damaged_files_are_refused(tmp_path):
    path = profile.save(made(), tmp_path)
    data = path.with_suffix(".parquet")
    content, text = data.read_bytes(), path.read_text()
    for damaged in (content[:-20], content[: len(content) // 2], b"", content[:50] + b"x" + content[51:]):
        data.write_bytes(damaged)
        with pytest.raises(ParameterError, match="is not the one that it was written with"):
            profile.load(path)
    data.unlink()
    with pytest.raises(ParameterError, match=r"its table tiny\.parquet is not beside it"):
        profile.load(path)
    for damaged in ("", text[:100], "[1, 2]", "\x00\x01"):
        path.write_text(damaged)
        with pytest.raises(ParameterError, match=r"tiny\.json: (it cannot be read as JSON|it is not a profile)"):
            profile.load(path)


def test_what_is_no_profile_is_said_to_be_none(tmp_path):
    with pytest.raises(ParameterError, match=r"unknown profile 'h100-nobody'.*or give the path of a profile's \.json"):
        profile.load("h100-nobody")
    with pytest.raises(ParameterError, match=r"nobody\.json: there is no such file"):
        profile.load(tmp_path / "nobody.json")
    with pytest.raises(ParameterError, match=r"a profile is named by its \.json file, got tiny\.parquet"):
        profile.load(tmp_path / "tiny.parquet")


def test_a_write_that_fails_leaves_nothing(tmp_path):
    one = replace(made(), facts={"clock": object()})
    with pytest.raises(TypeError):
        profile.save(one, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_have_no_column_that_nobody_knows():
    with pytest.raises(ParameterError, match="unknown column 'speed'"):
        table_of([{"part": "layer", "time_s": 1.0, "speed": 3}])
