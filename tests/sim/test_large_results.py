"""Results that are large: merged, reported and drawn in bounded memory, and reported without work per row."""

from __future__ import annotations

import json
import math
import sys
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from typer.testing import CliRunner

import figures
from figures.common import drawn_points
from model.base import strict_json
from sim.commands.sim_app import app
from sim.reporting import run_document
from sim.runs import json_rows, run_report, shard_merge, shard_plan, sweep, verdict
from sim.runs.atomic_files import parquet, write_hashed
from sim.runs.shard_plan import ShardPlan
from sim.scenarios import scenario_file
from sim.scenarios.grid import Grid
from sim.views import formula_view
from tests.sim.test_sweep import peak_mib

SCENARIO = """
scenario = { name = "large", tokens = 20, views = ["formula"] }
method = { name = "speculative", layers = 24, draft_length = 3 }
outcomes = { kind = "iid", acceptance_rate = 0.8 }
cost = { cost_ratio = 0.1 }
"""
AXIS = "outcomes.acceptance_rate"


def scenario(folder: Path) -> Path:
    path = folder / "large.toml"
    path.write_text(SCENARIO, encoding="utf-8")
    return path


def finished_shards(folder: Path, count: int) -> list[str]:
    """Write the shards of a run with repeated estimates, and return the command that finishes the run."""
    values, path = f"0.01:0.99:{count}", scenario(folder)
    tables = sweep.resolve(path, sweep=[f"{AXIS}={values}"])
    plan, out = ShardPlan(Grid(tables)), folder / f"run-{count}"
    sweep.make_folder(out)
    sweep._prepare(out, tables, resume=False)
    few = formula_view.frame(plan.grid, 0, 200)
    frame, fingerprint = pl.concat([few] * (shard_plan.VECTORISED_POINTS // 200)), scenario_file.fingerprint(tables)
    for shard in plan.shards():
        rows = frame.head(shard.last - shard.first).with_columns(point=pl.int_range(shard.first, shard.last))
        write_hashed(out / "shards" / plan.file(shard, fingerprint), parquet(rows))
    words = ["--sweep", f"{AXIS}={values}", "--resume", "--yes", "-j", "1", "-q", "-o", str(out)]
    return [sys.executable, "-m", "sim", "run", str(path), *words]


def test_memory_does_not_grow_with_the_table(tmp_path: Path) -> None:
    """Merge, report and figures of ten times the points: 1.8 million more rows of 45 columns are more than 0.5 GB in memory."""
    few, many = (peak_mib(finished_shards(tmp_path, count)) for count in (200_000, 2_000_000))
    assert many < few + 150
    out = tmp_path / "run-2000000"
    table = pl.scan_parquet(out / "results.parquet")
    ordered = table.select(pl.len() == 2_000_000, (pl.col("point") == pl.int_range(pl.len())).all().alias("order")).collect()
    assert ordered.row(0) == (True, True)
    assert "2,000 of 2,000,000 points" in (out / "figures" / "speedup_acceptance_rate.svg").read_text(encoding="utf-8")
    report, _ = run_document.finished_run(out)
    assert run_document._points(report) == 2_000_000


def test_shards_with_other_columns_are_merged_in_order(tmp_path: Path) -> None:
    """Neighbouring shards with the same columns are one scan; a column that some lack is null there."""
    parts = [pl.DataFrame({"point": [at]} | ({"rate": [0.5 * at]} if at in (2, 3, 5) else {})) for at in range(7)]
    paths = [tmp_path / f"shard[{at}].parquet" for at in range(7)]
    for part, path in zip(parts, paths, strict=True):
        part.write_parquet(path)
    assert shard_merge.scanned(paths).collect().equals(pl.concat(parts, how="diagonal_relaxed"))
    assert shard_merge.scanned(paths[:2]).collect().equals(pl.concat(parts[:2]))


# --- the report ---------------------------------------------------------------------------------------------------------

TEXTS = st.text(st.characters(codec="utf-8"), max_size=5) | st.sampled_from(["%s", "100 %", "a\nb", '"', "inf", "\\"])
COLUMNS: dict[pl.DataType | type[pl.DataType], st.SearchStrategy[Any]] = {
    pl.Float64: st.floats() | st.sampled_from([0.0, -0.0, 1e-5, 1e16, 1e22]),
    pl.Int64: st.integers(-(2**63), 2**63 - 1), pl.Boolean: st.booleans(), pl.String: TEXTS,
    pl.List(pl.Float64): st.lists(st.floats(), max_size=2),
}  # fmt: skip


@st.composite
def frames(draw: st.DrawFn) -> pl.DataFrame:
    height = draw(st.integers(0, 4))
    names = draw(st.lists(TEXTS, max_size=4, unique=True))
    kinds = [draw(st.sampled_from([*COLUMNS])) for _ in names]
    columns = []
    for name, kind in zip(names, kinds, strict=True):
        values = COLUMNS[kind] | st.none() if draw(st.booleans()) else COLUMNS[kind]
        one = draw(st.booleans())  # the same value in all rows
        content = [draw(values)] * height if one else draw(st.lists(values, min_size=height, max_size=height))
        columns.append(pl.Series(name, content, kind))
    return pl.DataFrame(columns)


@example(pl.DataFrame({"50 %s": ["%s", "%s"], "rate": [0.5, math.nan]}), "%s")
@example(pl.DataFrame({"zero": [0.0, -0.0], "gap": [None, 1.5], "whole": [1, 2], "end": [math.inf, 1.0]}), "results")
@given(frames(), st.sampled_from(["results", "%s"]))
def test_json_of_a_table_equals_that_of_its_rows(frame: pl.DataFrame, name: str) -> None:
    assert json_rows.of_table(frame) == strict_json.dumps(frame.to_dicts(), indent=2)
    content = {"kind": "run", name: frame, "notes": ["a", {"b": math.nan}], "none": []}
    assert json_rows.document(content) == strict_json.dumps(content | {name: frame.to_dicts()}, indent=2)
    assert json_rows.document({}) == "{}"


def test_verdict_and_notes_are_computed_once_for_all_outputs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    counts: list[str] = []

    def counted(old: Any, *arguments: Any) -> Any:
        counts.append(old.__name__)
        return old(*arguments)

    for module, name in ((verdict, "of"), (run_report, "notes")):
        monkeypatch.setattr(module, name, partial(counted, getattr(module, name)))
    words = ["run", str(scenario(tmp_path)), "--sweep", f"{AXIS}=0.1,0.9", "--no-figures", "-o", str(tmp_path / "run")]
    printed = CliRunner().invoke(app, words).stdout
    assert sorted(counts) == ["notes", "of"]
    assert (tmp_path / "run" / "summary.txt").read_text() == printed
    shown = CliRunner().invoke(app, [*words, "--json"]).stdout
    assert len(counts) == 4
    assert (tmp_path / "run" / "summary.json").read_text() == shown
    assert json.loads(shown)["verdict"]["text"] == printed.splitlines()[0]


CELLS = st.lists(
    st.tuples(st.sampled_from([0.8, 0.95, 1.0, 1.0 + 1e-12, 1.1, 1.3]), st.sampled_from([0.0, 0.05, 0.2]), st.sampled_from([1, 4]),
              st.booleans()), min_size=12, max_size=12,
)  # fmt: skip


@given(CELLS, st.floats(1.0, 8.0))
def test_verdict_by_columns_equals_the_definition_row_by_row(cells: list[tuple[float, float, int, bool]], faster: float) -> None:
    """Two conditions with six choices each, on one device or four: the shortest time, its ties, and the fastest exact choice."""
    said = {
        "scenario": {"name": "made", "tokens": 8}, "method": [{"name": "speculative", "layers": 40}],
        "sweep": {"cost.prompt": [10, 20], "method.draft_length": [1, 2, 3, 4, 5, 6]},
    }  # fmt: skip
    plain = {1: 8.0, 4: 8.0 / faster}
    rows: list[dict[str, Any]] = [
        {"point": at, "view": "formula", "method": "speculative", "speedup": speed, "exact": exact, "tensor_parallel": devices,
         "reserved_units": float(devices), "tpot_ms": plain[devices] / speed, "cost_source": "measured", "cost_missing": None,
         "speedup_input_low": speed * (1 - error), "speedup_input_high": speed * (1 + error)}
        for at, (speed, error, devices, exact) in enumerate(cells)
    ]  # fmt: skip
    found = verdict.of(pl.DataFrame(rows, infer_schema_length=None), said)
    assert len(found.answers) == 2
    assert [*found.answers] == [found.answers[0], found.answers[1]] == [*found.answers[:]]
    assert found.answers.wins == [answer.wins for answer in found.answers]
    for answer, own in zip(found.answers, (rows[:6], rows[6:]), strict=True):
        least = min(plain[row["tensor_parallel"]] for row in own)
        best = answer.best
        assert best is not None
        speeds = {row["point"]: least / row["tpot_ms"] for row in own}
        assert best.speedup == pytest.approx(max(speeds.values()))
        assert speeds[best.point] == pytest.approx(best.speedup)
        spread = {row["point"]: row["speedup_input_high"] / row["speedup"] - 1 for row in own}
        near = 1e-7  # neither clearly apart nor clearly equal
        for point, speed in speeds.items():
            high = speed * (1 + spread[point])
            if point == best.point or abs(speed / best.low - 1) < near or abs(high / best.speedup - 1) < near:
                continue
            tied = speed > best.low and high > best.speedup
            assert (point in {each.point for each in answer.ties}) == tied
        exact = [speeds[row["point"]] for row in own if row["exact"]]
        if best.exact or not exact:
            assert answer.exact is None
        else:
            assert answer.exact is not None
            assert answer.exact.speedup == pytest.approx(max(exact))


def test_of_points_that_are_one_choice_the_fastest_counts() -> None:
    """A parameter of another method: points that differ only in it are one choice, and no ties of each other."""
    said = {
        "scenario": {"name": "made"}, "method": [{"name": "speculative", "layers": 4}, {"name": "ppd", "layers": 4}],
        "sweep": {"method.speculative.draft_length": [1, 2]},
    }  # fmt: skip
    methods = "speculative", "speculative", "ppd", "ppd"
    for speeds, fastest in (((1.0, 1.0, 1.2, 1.5), 3), ((1.0, 1.0, 1.5, 1.2), 2), ((1.0, 1.0, 1.5, 1.5), 2)):
        rows = [{"point": at, "view": "formula", "method": methods[at], "speedup": speed} for at, speed in enumerate(speeds)]
        (answer,) = verdict.of(pl.DataFrame(rows), said).answers
        assert answer.best is not None
        assert (answer.best.label, answer.best.point, answer.ties) == ("ppd", fastest, ())


def test_too_many_points_have_no_verdict(monkeypatch: pytest.MonkeyPatch) -> None:
    said = {"scenario": {"name": "made"}, "method": [{"name": "speculative", "layers": 4}], "sweep": {AXIS: [0.1, 0.2, 0.3]}}
    views = "formula", "paths"
    rows = [{"point": at, "view": view, "method": "speculative", "speedup": 1.5} for at in range(3) for view in views]
    monkeypatch.setattr(verdict, "MOST_POINTS", 3)
    assert len(verdict.of(pl.DataFrame(rows), said).answers) == 3
    for most in (2, 1):
        monkeypatch.setattr(verdict, "MOST_POINTS", most)
        assert verdict.of(pl.DataFrame(rows), said).text == f"No verdict: there are more than {most} points; sweep fewer"


@example([("a", 997 * at % 1000) for at in range(1000)])
@given(st.lists(st.tuples(st.sampled_from(["a", "b", "c"]), st.integers(0, 2)), max_size=30))
def test_distinct_rows_are_in_order_of_appearance(rows: list[tuple[str, int]]) -> None:
    table = pl.DataFrame(rows, schema={"source": pl.String, "number": pl.Int64}, orient="row").lazy()
    assert run_report.distinct(table, "source", "number").rows() == [*dict.fromkeys(rows)]


# --- figures ------------------------------------------------------------------------------------------------------------


@given(st.integers(1, 3), st.lists(st.integers(1, 10**5), max_size=4), st.integers(1, 3000))
def test_drawn_points_are_spread_over_the_grid(methods: int, axes: list[int], most: int) -> None:
    """All methods, and equally many values of each long axis with both ends; as many as fit."""
    shape = (methods, *axes)
    points = drawn_points.evenly_spaced(shape, most)
    assert (np.diff(points) > 0).all()
    where = np.unravel_index(points, shape)
    kept = [np.unique(each) for each in where]
    assert len(points) == math.prod(map(len, kept))
    assert len(kept[0]) == methods
    for size, own in zip(axes, kept[1:], strict=True):
        assert (own[0], own[-1]) == (0, size - 1)
        gaps = np.diff(own)
        assert not gaps.size or gaps.max() - gaps.min() <= 1
    longest = max((len(own) for own in kept[1:]), default=1)
    if longest > 2:
        assert len(points) <= most
    if any(size > max(longest, 2) for size in axes):  # one more value would not fit
        assert methods * math.prod(min(size, max(longest, 2) + 1) for size in axes) > most


def test_figures_of_many_points_show_a_part_and_say_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, words = tmp_path / "run", ["--sweep", f"{AXIS}=0.1:0.9:9", "--sweep", "method.draft_length=1,2,3"]
    CliRunner().invoke(app, ["run", str(scenario(tmp_path)), *words, "--no-figures", "-o", str(out)])
    drawn: list[pl.DataFrame] = []
    old = figures._of_run

    def kept(folder: Path, rows: pl.DataFrame) -> figures.Drawn:
        drawn.append(rows)
        return old(folder, rows)

    monkeypatch.setattr(figures, "_of_run", kept)

    def svg(table: pl.DataFrame | None = None) -> str:
        paths = figures.of_run(out, table)
        return next(path for path in paths if path.name == "speedup_acceptance_rate.svg").read_text(encoding="utf-8")

    assert "27 points" not in svg()
    assert drawn[-1].height == 27
    monkeypatch.setattr(figures, "MOST_POINTS", 11)
    whole = pl.read_parquet(out / "results.parquet")
    for text in (svg(), svg(whole)):
        assert "9 of 27 points" in text
        assert drawn[-1]["acceptance_rate"].unique().sort().to_list() == pytest.approx([0.1, 0.5, 0.9])
        assert drawn[-1]["draft_length"].unique().sort().to_list() == [1, 2, 3]
    (out / "metadata.json").unlink()  # an unknown grid: of more points nothing is drawn
    assert not [path for path in figures.of_run(out) if "speedup" in path.name]


@pytest.mark.parametrize("axis", [[], {}, {"count": math.inf}, {"count": -3}, {"count": 10**13}, 3, None])
def test_grid_that_no_program_wrote_is_not_known(axis: Any, tmp_path: Path) -> None:
    assert drawn_points.grid_shape(tmp_path) == (0,)
    (tmp_path / "metadata.json").write_text(json.dumps({"scenario": {"method": [{}, {}], "sweep": {"a": axis, "b": [1, 2, 3]}}}))
    assert drawn_points.grid_shape(tmp_path) == (0,)


@pytest.mark.parametrize("name", ["bild", "hardware-compare"])
def test_columns_that_are_not_read_are_not_drawn(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = sweep.run(name, out=tmp_path / "run", jobs=1, views=["formula"])
    assert set(made.frame().columns) - {*drawn_points.read(made.table(), tmp_path / "run", 10, 10).columns}
    found = {path.name: path.read_bytes() for path in figures.of_run(tmp_path / "run")}
    monkeypatch.setattr(drawn_points, "UNDRAWN", ("no such column",))
    assert found == {path.name: path.read_bytes() for path in figures.of_run(tmp_path / "run")} != {}
