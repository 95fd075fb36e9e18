"""Profiles as files: they are loaded as saved; damaged files and impossible rows are refused with the row."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from model.base.checks import ParameterError
from model.hardware import profile, profile_files
from model.hardware.profile import AXES, UNITS, Profile, Source, table_of
from model.hardware.profile_files import SCHEMA_VERSION

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


def test_saved_profiles_are_loaded_unchanged(tmp_path):
    one = made()
    path = profile_files.save(one, tmp_path / "new")
    other = profile_files.load(path)
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
def test_times_are_loaded_exactly(tmp_path_factory, data):
    part = data.draw(st.sampled_from(["dense", "layer"]))
    axes = AXES[part]
    points = data.draw(st.lists(st.tuples(*[st.integers(1, 10**6)] * len(axes)), min_size=1, max_size=8, unique=True))
    times = [data.draw(st.floats(1e-9, 1e3)) for _ in points]
    where = [dict(zip(axes, point, strict=True)) for point in points]
    rows = [{"part": part, "time_s": time, **each} for each, time in zip(where, times, strict=True)]
    folder = tmp_path_factory.mktemp("p")
    found = profile_files.load(profile_files.save(made(rows), folder)).rows(part)
    assert found["time_s"].to_list() == times
    assert found.select(axes).rows() == points


def test_coverage_and_rows():
    one = made([*ROWS, {"part": "dense", "tensor_parallel": 2, "tokens": 3, "time_s": 1e-4}])
    assert one.parts == ("layer", "dense", "head")
    assert one.tensor_parallel == (1, 2)
    assert one.coverage() == (
        "layer (width 1 to 8, context 0 to 512, batch 1); dense (tokens 3); head (positions 1 to 8)"
    )
    assert one.rows("dense").height == 0
    assert one.rows("dense", tensor_parallel=2).columns == ["tokens", "time_s", "low_s", "high_s"]


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
        (spoiled(3, tensor_parallel=0), "row 4, column tensor_parallel: must be a number of at least 1, got 0.0"),
        (spoiled(3, width=1), "row 4: part layer has this point more than once; keep the median of its repeats"),
        (spoiled(3, low_s=1.0), "row 4, column time_s: must be between low_s=1 and high_s=0.0001"),
        (spoiled(3, part="leyer"), "row 4: unknown part 'leyer'; did you mean layer?"),
        (ROWS[6:], "a profile of kind model must have rows of layer or dense, got head"),
        ([], "the table is empty; a profile has at least one row"),
        ([{"part": "layer", "width": 1, "context": 1, "time_s": 1}], "column batch is missing; part layer has the axes width"),
    ],
)
def test_impossible_rows_are_refused_with_their_row(rows, message):
    with pytest.raises(ParameterError) as caught:
        made(rows)
    assert str(caught.value).startswith(message)


def test_single_operations_may_take_zero_time():
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
def test_unknown_columns_are_refused(table, message):
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
        ({"device": 3}, "device must be a string, got 3"),
    ],
)
def test_bad_fields_of_a_profile_are_refused(more, message):
    with pytest.raises(ParameterError) as caught:
        made(**more)
    assert str(caught.value).startswith(message)


@pytest.fixture
def written(tmp_path):
    """A profile's file, and a function that changes keys of its JSON."""
    path = profile_files.save(made(), tmp_path)

    def change(**more):
        said = json.loads(path.read_text()) | more
        path.write_text(json.dumps({key: value for key, value in said.items() if value is not ...}))
        return path

    return change


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"schema_version": 99}, f"tiny.json: schema_version must be {SCHEMA_VERSION}, got 99; import or measure it again"),
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
        ({"shape": [1]}, "tiny.json: shape must be a table of keys, got [1]"),
        ({"errors": 0.1}, "tiny.json: errors must be a table of keys, got 0.1"),
        ({"facts": None}, "tiny.json: facts must be a table of keys, got None"),
        ({"columns": ["part"]}, "tiny.json: columns must be a table of keys, got ['part']"),
        ({"notes": 5}, "tiny.json: notes must be a list, got 5"),
        ({"notes": "a note"}, "tiny.json: notes must be a list, got 'a note'"),
        ({"notes": [5]}, "tiny.json: notes must be strings, got 5"),
        ({"sources": "x"}, "tiny.json: sources must be a list, got 'x'"),
        ({"errors": {"layer": "much"}}, "tiny.json: errors[layer] must be a number, got 'much'"),
        ({"errors": {"layer": -0.1}}, "tiny.json: errors[layer] must be at least 0, got -0.1"),
        ({"errors": {"leyer": 0.1}}, "tiny.json: unknown part in errors 'leyer'; did you mean layer?"),
    ],
)
def test_edited_files_are_refused(written, more, message):
    with pytest.raises(ParameterError) as caught:
        profile_files.load(written(**more))
    assert str(caught.value).startswith(message)


def test_damaged_files_are_refused(tmp_path):
    path = profile_files.save(made(), tmp_path)
    data = path.with_suffix(".parquet")
    content, text = data.read_bytes(), path.read_text()
    for damaged in (content[:-20], content[: len(content) // 2], b"", content[:50] + b"x" + content[51:]):
        data.write_bytes(damaged)
        with pytest.raises(ParameterError, match="is not the one that it was written with"):
            profile_files.load(path)
    data.unlink()
    with pytest.raises(ParameterError, match=r"its table tiny\.parquet is missing from the same folder"):
        profile_files.load(path)
    for damaged in ("", text[:100], "[1, 2]", "\x00\x01"):
        path.write_text(damaged)
        with pytest.raises(ParameterError, match=r"tiny\.json: (it cannot be read as JSON|it is not a profile)"):
            profile_files.load(path)


def test_unknown_profiles_are_refused(tmp_path):
    with pytest.raises(ParameterError, match=r"unknown profile 'h100-missing'.*or give the path of a profile's \.json"):
        profile_files.load("h100-missing")
    with pytest.raises(ParameterError, match=r"missing\.json: there is no such file"):
        profile_files.load(tmp_path / "missing.json")
    with pytest.raises(ParameterError, match=r"a profile is given by its \.json file, got tiny\.parquet"):
        profile_files.load(tmp_path / "tiny.parquet")


def test_a_failed_write_leaves_no_files(tmp_path):
    one = replace(made(), facts={"clock": object()})
    with pytest.raises(TypeError, match="not JSON serializable"):
        profile_files.save(one, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_rows_with_an_unknown_column_are_refused():
    with pytest.raises(ParameterError, match="unknown column 'speed'"):
        table_of([{"part": "layer", "time_s": 1.0, "speed": 3}])


# --- Complete messages, and defaults ---


def refusal(make, *args, **more):
    """Return the error message of a call."""
    with pytest.raises(ParameterError) as caught:
        make(*args, **more)
    return str(caught.value)


def test_units_and_axes_agree_with_the_documented_table():
    """The table has a row per part; units are seconds, bytes, and none for counts."""
    rows = [line for line in (profile.__doc__ or "").split("=\n")[2].splitlines() if not line.startswith("=")]
    said: dict[str, list[str]] = {}
    for line in rows:
        part, axes = line[:15].strip(), line[15:43].strip(" ,")
        part = part or [*said][-1]
        said.setdefault(part, []).extend(axes.split(", ") if axes else [])
    assert {part: tuple(axes) for part, axes in said.items()} == AXES
    axes = {axis for each in AXES.values() for axis in each}
    counted = dict.fromkeys(axes | {"tensor_parallel", "busy", "repeats"}, "1")
    assert counted | {"size": "bytes", "gap": "us", "part": "name"} | dict.fromkeys(("time_s", "low_s", "high_s"), "s") == UNITS
    assert profile.KINDS == {"model": ("layer", "dense"), "operations": ("gemm",), "links": ("send", "all_reduce")}


def row_of(part, **more):
    return {"part": part, "time_s": 1e-3} | dict.fromkeys(AXES[part], 2) | more


@pytest.mark.parametrize(("kind", "part"), [(kind, part) for kind, parts in profile.KINDS.items() for part in parts])
def test_each_kind_needs_one_of_its_parts(kind, part):
    made_ = made([row_of(part), row_of("step")], kind=kind)
    assert made_.parts == tuple(each for each in AXES if each in (part, "step"))
    needed = " or ".join(profile.KINDS[kind])
    assert refusal(made, [row_of("step"), row_of("head")], kind=kind) == (
        f"a profile of kind {kind} must have rows of {needed}, got head, step"
    )


@pytest.mark.parametrize("part", AXES)
def test_axes_of_each_part_are_checked_and_long_parts_take_time(part):
    rows = [row_of("layer", width=9), row_of("gemm", m=9), row_of("send", size=9)]
    made([*rows, row_of(part)])
    for axis in ("tensor_parallel", "busy", *AXES[part]):
        least = -(10**9) if axis == "gap" else 0 if axis in ("busy", "context") else 1
        made([*rows, row_of(part, **{axis: least})])
        assert refusal(made, [*rows, row_of(part, **{axis: least - 1})]) == (
            f"row 4, column {axis}: must be a number of at least {least}, got {least - 1:.1f}"
        )
        assert refusal(made, [*rows, row_of(part), row_of(part, **{axis: 3}), row_of(part)]) == (
            f"row 6: part {part} has this point more than once; keep the median of its repeats"
        )
        if axis in AXES[part]:
            table = table_of([*rows, row_of(part)]).drop(axis)
            users = [each for each in ("layer", "gemm", "send", part) if axis in AXES[each]]
            assert refusal(made, table=table) == (
                f"column {axis} is missing; part {users[0]} has the axes {', '.join(AXES[users[0]])}"
            )
    nothing = [*rows, row_of(part, time_s=0.0)]
    if part in ("layer", "dense", "gemm"):
        assert refusal(made, nothing) == "row 4, column time_s: must be above 0, got 0.0"
    else:
        assert made(nothing).rows(part)["time_s"].to_list()[-1] == 0
    for name, time in (("low_s", 2e-3), ("high_s", 0.5e-3)):
        bounds = {"low_s": 0.001, "high_s": 0.001} | {name: time}
        assert refusal(made, [*rows, row_of(part, **{name: time})]) == (
            f"row 4, column time_s: must be between low_s={bounds['low_s']:g} and high_s={bounds['high_s']:g}, got 0.001"
        )
        assert refusal(made, [*rows, row_of(part, **{name: -1.0})]) == (
            f"row 4, column {name}: must be a number of at least 0, got -1.0"
        )
    made([*rows, row_of(part, low_s=0.0, high_s=1.0)])


def test_tensor_parallel_and_busy_belong_to_the_point():
    rows = [row_of("dense", tensor_parallel=tensor_parallel, busy=busy) for tensor_parallel in (1, 2) for busy in (0, 1)]
    one = made([*rows, row_of("dense", tokens=3)])
    assert one.tensor_parallel == (1, 2)
    assert one.coverage() == "dense (tokens 2 to 3, tensor_parallel 1/2, busy 0/1)"
    assert one.rows("dense").height == 2
    assert one.rows("dense", 2).height == one.rows("dense", 1, 1).height == one.rows("dense", tensor_parallel=2, busy=1).height == 1
    assert made([*rows, row_of("head", tensor_parallel=4), row_of("step", tensor_parallel=8)]).tensor_parallel == (1, 2)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=9))
def test_the_first_row_that_repeats_a_point_is_named(tokens):
    again = [index for index, each in enumerate(tokens) if each in tokens[:index]]
    rows = [row_of("head"), *(row_of("dense", tokens=each) for each in tokens)]
    if again:
        assert refusal(made, rows) == (
            f"row {again[0] + 2}: part dense has this point more than once; keep the median of its repeats"
        )
    else:
        made(rows)


@pytest.mark.parametrize("far", [2, 2**10, 2**30], ids=["near", "far apart", "too far apart for one whole number"])
def test_repeats_are_found_among_distant_points_of_many_axes(far):
    places = [(m, n, k) for m in (1, far) for n in (1, far) for k in (1, far)]
    rows = [row_of("gemm", m=m, n=n, k=k) for m, n, k in places]
    assert made(rows, kind="operations").rows("gemm").height == 8
    for m, n, k in places:
        assert refusal(made, [*rows, row_of("gemm", m=m, n=n, k=k)], kind="operations") == (
            "row 9: part gemm has this point more than once; keep the median of its repeats"
        )


def test_fractional_points_are_distinct():
    table = table_of([row_of("dense", tokens=each) for each in (1, 2, 3)]).with_columns(tokens=pl.Series([1.25, 1.5, 1.5]))
    assert refusal(made, table=table) == "row 3: part dense has this point more than once; keep the median of its repeats"
    assert made(table=table.head(2)).rows("dense").height == 2


def test_a_row_without_a_part_is_named():
    table = table_of(ROWS).with_columns(part=pl.Series([None if row == 3 else each["part"] for row, each in enumerate(ROWS)]))
    assert refusal(made, table=table).startswith("row 4: unknown part None")


def test_rows_of_a_part_have_its_axes_and_times():
    one = made([row_of("dense"), row_of("head", positions=5, low_s=0.0, high_s=1.0)])
    assert one.rows("head").rows(named=True) == [{"positions": 5, "time_s": 1e-3, "low_s": 0.0, "high_s": 1.0}]
    for part in ("layer", "gemm", "decode"):  # the table lacks its axes
        assert one.rows(part).height == 0
        assert one.rows(part).schema == dict.fromkeys(AXES[part], pl.Int64) | dict.fromkeys(profile.TIMES, pl.Float64)
    assert one.rows("embedding").schema == {"tokens": pl.Int64} | dict.fromkeys(profile.TIMES, pl.Float64)


def test_defaults_of_a_table_of_rows():
    """Quartiles equal the time; one repeat, one device, no busy unit."""
    table = table_of([{"part": "head", "time_s": 2.0, "positions": 3}, {"part": "step", "time_s": 1.0, "batch": 7, "repeats": 9}])
    alone = {"tensor_parallel": 1, "busy": 0}
    assert table.rows(named=True) == [
        alone | {"part": "head", "positions": 3, "batch": None, "time_s": 2.0, "low_s": 2.0, "high_s": 2.0, "repeats": 1},
        alone | {"part": "step", "positions": None, "batch": 7, "time_s": 1.0, "low_s": 1.0, "high_s": 1.0, "repeats": 9},
    ]
    whole, real, text = pl.Int64, pl.Float64, pl.String
    assert dict(table.schema) == {
        "part": text, "tensor_parallel": whole, "busy": whole, "batch": whole, "positions": whole,
        "time_s": real, "low_s": real, "high_s": real, "repeats": whole,
    }  # fmt: skip
    assert table_of([]).columns == ["part", "tensor_parallel", "busy", "time_s", "low_s", "high_s", "repeats"]
    assert refusal(table_of, [{"part": "head", "time_s": 2.0, "zeal": 1, "kind": 3}]) == (
        "unknown column 'kind'; known: busy, high_s, low_s, part, repeats, tensor_parallel, time_s"
    )


@pytest.mark.parametrize("name", ["part", "tensor_parallel", "busy", "time_s", "low_s", "high_s", "repeats"])
def test_missing_columns_and_wrong_types_are_refused(name):
    assert refusal(made, table=table_of(ROWS).drop(name)) == (
        f"column {name} is missing; a profile has part, tensor_parallel, busy, axes and time_s, low_s, high_s"
    )
    held, other = ("names", pl.lit(1)) if name == "part" else ("numbers", pl.lit("x"))
    got = "Int32" if name == "part" else "String"
    assert refusal(made, table=table_of(ROWS).with_columns(other.alias(name))) == f"column {name} must hold {held}, got {got}"


def test_messages_about_fields_of_a_profile():
    for name in ("name", "device", "model", "dtype", "engine", "date"):
        assert refusal(made, **{name: 3}) == f"{name} must be a string, got 3"
    for name in ("bandwidth", "rate"):
        assert refusal(made, **{name: 0.5}) == f"{name} must be at least 1, got 0.5"
        made(**{name: 1.0})
    assert refusal(made, cache_bytes=-0.5) == "cache_bytes must be at least 0, got -0.5"
    made(cache_bytes=0)
    for name, words in (("mode", ("cuda-graph", "eager", "kernel-only")), ("provenance", ("composed", "measured"))):
        for word in words:
            made(**{name: word})
        assert refusal(made, **{name: "zzzz"}) == f"unknown {name} 'zzzz'; known: {', '.join(words)}"
    assert refusal(made, kind="zzzz") == "unknown kind 'zzzz'; known: links, model, operations"
    assert refusal(made, sources=()) == "sources must name where the rows come from, got none"
    assert refusal(made, []) == "the table is empty; a profile has at least one row"
    assert refusal(made, [*ROWS, {"part": "zzzz", "time_s": 1.0}]) == (
        f"row 9: unknown part 'zzzz'; known: {', '.join(sorted(AXES))}"
    )


def test_defaults_of_sources_and_profiles_are_empty():
    said = Source("by hand", "rows.csv")
    assert vars(said) == {"repository": "by hand", "file": "rows.csv", "commit": "", "licence": "", "sha256": "", "parts": ()}
    full = {name: value for name, value in vars(made()).items() if name not in ("shape", "errors", "notes", "facts")}
    bare = Profile(**full)
    assert (bare.shape, bare.errors, bare.notes, bare.facts) == ({}, {}, (), {})


def test_saving_twice_overwrites_and_json_is_readable(tmp_path):
    folder = tmp_path / "a" / "b"
    sources = (Source("by hand", "rows.csv", "c0ffee", "MIT", "0" * 64, ("layer",)), Source("elsewhere", "naïve.csv"))
    one = made(sources=sources, shape=SHAPE | {"biases": ["qkv"]}, notes=("naïve", "b"))
    for _ in range(2):
        path = profile_files.save(one, str(folder))
    assert path == folder / "tiny.json"
    assert sorted(each.name for each in folder.iterdir()) == ["tiny.json", "tiny.parquet"]
    text = path.read_text(encoding="utf-8")
    said = json.loads(text)
    assert text == json.dumps(said, indent=1) + "\n"
    assert said["sources"][0] == vars(sources[0]) | {"parts": ["layer"]}
    assert (said["bandwidth_bytes_per_s"], said["rate_flop_per_s"], said["cache_bytes"], said["rows"]) == (1e10, 1e11, 1e6, 8)
    # Lists of a shape are loaded as tuples.
    back = profile_files.load(str(path))
    assert back.shape["biases"] == ("qkv",)
    assert (back.sources, back.notes) == (sources, ("naïve", "b"))


def test_a_failed_write_keeps_existing_files(tmp_path, monkeypatch):
    profile_files.save(made(), tmp_path)
    before = {each.name: each.read_bytes() for each in tmp_path.iterdir()}
    with pytest.raises(TypeError, match="not JSON serializable"):
        profile_files.save(made(ROWS[:7], facts={"clock": object()}), tmp_path)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before
    seen = []

    def refuse(source, target):
        seen.append({each.name for each in tmp_path.iterdir()} - {*before})
        raise OSError("full")

    monkeypatch.setattr(Path, "replace", refuse)
    with pytest.raises(OSError, match="full"):
        profile_files.save(made(ROWS[:7]), tmp_path)
    # Both temporary files were complete before either was renamed.
    ((data, said),) = (sorted(each, key=lambda name: "parquet" not in name) for each in seen)
    assert data.startswith(".tiny.parquet.")
    assert said.startswith(".tiny.json.")
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == before


def test_messages_about_files(written, tmp_path):
    path = tmp_path / "tiny.json"
    good = json.loads(path.read_text())
    known = ", ".join(sorted(good))
    for more, message in (
        ({"schema_version": "2"}, f"schema_version must be {SCHEMA_VERSION}, got '2'; import or measure it again"),
        ({"zzzz": 1}, f"unknown key zzzz; known: {known}"),
        ({"sha256": "0" * 64}, "its table tiny.parquet is not the one that it was written with (sha256); restore both"),
        ({"columns": {"zzzz": "s"}}, "column zzzz is unknown, got 's'"),
        ({"columns": good["columns"] | {"time_s": "ms"}}, "column time_s must be in s, got 'ms'"),
        ({"columns": {}}, "column part has no unit; columns must name all of the table's"),
        ({"rows": 9}, "rows must be the table's 8, got 9"),
        (
            {"sources": [{"repository": "x"}]},
            "sources must each have repository, file, commit, licence, sha256 and parts: sources[0].commit is missing",
        ),
    ):
        assert refusal(profile_files.load, written(**more)) == f"tiny.json: {message}"
        path.write_text(json.dumps(good))
    for key in good:
        said = "it is not a profile: schema_version is missing" if key == "schema_version" else f"{key} is missing"
        assert refusal(profile_files.load, written(**{key: ...})) == f"tiny.json: {said}"
        path.write_text(json.dumps(good))
    for text, message in (
        ("[1, 2]", "it is not a profile: schema_version is missing"),
        ('["schema_version"]', "it is not a profile: schema_version is missing"),
        ("{", "it cannot be read as JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ):
        path.write_text(text)
        assert refusal(profile_files.load, path) == f"tiny.json: {message}"
    path.write_text(json.dumps(good))
    (tmp_path / "tiny.parquet").unlink()
    assert refusal(profile_files.load, path) == "tiny.json: its table tiny.parquet is missing from the same folder"
    assert refusal(profile_files.load, tmp_path / "no.json") == "no.json: there is no such file"
    (tmp_path / "folder.json").mkdir()
    assert (
        refusal(profile_files.load, tmp_path / "folder.json")
        == "folder.json: it cannot be read: it is a folder, and must be a file"
    )
    for other in (tmp_path / "tiny.parquet", tmp_path / "tiny"):
        assert refusal(profile_files.load, other) == (
            f"a profile is given by its .json file, got {other.name}; its table is found automatically"
        )


def test_bundled_profiles_are_loaded_by_name(monkeypatch, tmp_path):
    known = profile_files.names()
    assert known == sorted(known)
    assert "h100-llama-2-13b" in known
    made_ = profile_files.load("h100-llama-2-13b")
    assert made_.name == "h100-llama-2-13b"
    listed = ", ".join(known)
    assert refusal(profile_files.load, "zzzz") == f"unknown profile 'zzzz'; known: {listed}; or give the path of a profile's .json"
    # A file in the working folder, by its name only.
    profile_files.save(made(), tmp_path)
    monkeypatch.chdir(tmp_path)
    assert profile_files.load("tiny.json").name == "tiny"
    monkeypatch.setattr(profile_files, "_bundled", lambda: tmp_path)
    (tmp_path / "notes.txt").write_text("")
    assert profile_files.names() == ["tiny"]
    assert profile_files.load("tiny").name == "tiny"
    monkeypatch.setattr(profile_files, "_bundled", lambda: tmp_path / "nowhere")
    assert profile_files.names() == []
