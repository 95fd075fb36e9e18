"""Printed report of a run after its verdict: columns that differ between points, hidden rows, and notes."""

from __future__ import annotations

import io
import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from rich.console import Console
from typer.testing import CliRunner

import sim
from model.published import deck_analysis, ppd_figure_3
from sim.commands.sim_app import app
from sim.runs import run_report, sweep, verdict

PPD = {"name": "ppd", "layers": 4, "exit_layer": 2, "candidates": 1}
SKIP = {"name": "skipdecode", "layers": 8, "min_layers": 4, "max_layers": 8, "prompt": 0, "sequence_length": 8, "warm_up": 1,
        "sequences": 2, "batching": "static"}  # fmt: skip


def tables(*methods: dict[str, Any], views: tuple[str, ...] = ("formula",), outcomes: Any = None, **more: Any) -> dict[str, Any]:
    law = {"kind": "iid", "match_rate": 0.5} if outcomes is None else outcomes
    settings = {"name": "shown", "tokens": 8, "replications": 16, "views": [*views]}
    return {"scenario": settings, "method": [*methods], **({"outcomes": law} if law else {}), **more}


def printed(given: dict[str, Any], out: Path, capsys: pytest.CaptureFixture[str]) -> str:
    made = sweep.run(given, out=out, jobs=1)
    run_report.show(made, made.frame(run_report.MOST_LISTED), [])
    return capsys.readouterr().out


def test_hidden_rows_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rates = [number / 100 for number in range(75)]
    given = tables(PPD, views=("formula", "paths"), sweep={"outcomes.match_rate": rates})
    shown = printed(given, tmp_path, capsys)
    assert "... and 30 more rows in the table of results" in shown  # 75 points, 60 of them shown, with two views each
    assert "0.5900" in shown
    assert "0.6000" not in shown
    few = printed(tables(PPD, sweep={"outcomes.match_rate": rates[:60]}), tmp_path / "few", capsys)
    assert "more in the table" not in few


def test_occupancy_is_shown_where_slots_are_idle() -> None:
    def columns(*lengths: list[int]) -> list[str]:
        methods = [SKIP | {"lengths": each} for each in lengths]
        return run_report.describing_columns(sim.run(tables(PPD | {"layers": 8, "exit_layer": 4}, *methods)))

    assert "occupancy" not in columns([8, 8])
    assert "occupancy" in columns([8, 8], [8, 2])


def test_empty_columns_are_hidden() -> None:
    frame = sim.run(tables(SKIP | {"lengths": [8, 2]}, outcomes={}))
    assert frame["agreement"].null_count() == frame.height
    assert "agreement" not in run_report.describing_columns(frame)
    assert "agreement" in run_report.describing_columns(frame.with_columns(agreement=pl.lit(0.9)))


def test_times_in_seconds_are_not_what_tells_points_apart() -> None:
    cost = {"kind": "roofline", "device": "a100", "shape": "opt-1.3b"}
    frame = sim.run(tables(PPD | {"layers": 24, "exit_layer": 12}, cost=cost, sweep={"method.candidates": [1, 2]}))
    assert {"latency_s_input_low", "busy_s_input_high", "reserved_s"} <= {*frame.columns}
    assert run_report.describing_columns(frame) == ["candidates", "match_rate"]


def test_input_uncertainty_is_half_of_the_interval(tmp_path: Path) -> None:
    given = tables(PPD, outcomes={"kind": "iid", "match_rate": 0.5, "trials": 40}, sweep={"scenario.tokens": [4, 8]})
    made = sweep.run(given, out=tmp_path, jobs=1)
    frame = made.frame()
    half = max((row["speedup_input_high"] - row["speedup_input_low"]) / 2 for row in frame.to_dicts())
    (note,) = (each for each in run_report.notes(made.table(), made.tables) if "input uncertainty" in each)
    told = f"the rates (95 % intervals) change a speed-up by at most ±{half:.4f}"
    assert note == f"input uncertainty: {told} (columns *_input_low, _high)"


def test_interval_is_printed_as_plus_or_minus_half(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shown = printed(tables(PPD, views=("formula", "paths")), tmp_path, capsys)
    formula, paths = sweep.run(tables(PPD, views=("formula", "paths")), out=tmp_path / "again", jobs=1).frame().to_dicts()
    for name in ("speedup", "mean_busy_units"):
        half = (paths[f"{name}_high"] - paths[f"{name}_low"]) / 2
        assert f"{formula[name]:.4f}" in shown
        assert f"{paths[name]:.4f} ±{half:.4f}" in shown


def test_notes_on_single_points_are_limited_and_counted() -> None:
    rows = [{"view": "formula", "point": at, "outcomes_note": f"note {at % 7}", "speedup": 1.0} for at in range(14)]
    lines = run_report.notes(pl.LazyFrame(rows), {"cost": {}})
    assert [line for line in lines if line.startswith("note ")] == [f"note {at}" for at in range(run_report.MOST_NOTES)]
    assert "... and 2 more such notes (column outcomes_note)" in lines
    assert not any("more such notes" in line for line in run_report.notes(pl.LazyFrame(rows[:5]), {"cost": {}}))


def test_error_of_plain_decoding_is_printed_once() -> None:
    row = {"view": "formula", "speedup": 1.0, "cost_missing": None, "memory_share": 0.5}
    rows = [row | {"seconds_error": error} for error in (0.07, 0.125)]
    lines = run_report.notes(pl.DataFrame(rows, schema_overrides={"cost_missing": pl.String}).lazy(), {"cost": {}})
    (line,) = (each for each in lines if each.startswith("the time of plain decoding"))
    assert line == (
        "the time of plain decoding has a median error of up to about ±12.5% (80 % interval: ±23.8%); the time of each pass depends"
        " on its own context length"
    )
    assert not any("memory of some devices is not known" in each for each in lines)


def test_unmeasured_parts_and_unknown_memory_are_printed_once() -> None:
    rows = [
        {"view": "formula", "seconds_error": 0.1, "cost_missing": missing, "memory_share": share}
        for missing, share in (("step, draft_step", 0.5), ("step", None), (None, 0.25))
    ]
    lines = run_report.notes(pl.LazyFrame(rows), {"cost": {}})
    (line,) = (each for each in lines if each.startswith("not measured"))
    assert re.fullmatch(r"not measured, .*\(column cost_missing\): draft_step, step; set step_s .* in \[cost\] .*", line)
    assert sum("memory of some devices is not known" in each for each in lines) == 1
    sends = run_report.notes(pl.LazyFrame([{**rows[2], "cost_missing": "send"}]), {"cost": {}})
    assert "not measured, assumed 0 (column cost_missing): send" in sends


def test_note_on_slides_needs_all_points_of_their_table() -> None:
    rows = deck_analysis.rows()
    printed = sorted({row["speedup"] for row in rows if row["draft_length"] is not None})
    sentences = deck_analysis.sentences(rows)

    def said(speedups: list[float | None]) -> list[str]:
        frame = pl.DataFrame({"view": "formula", "published_speedup": speedups}, schema_overrides={"published_speedup": pl.Float64})
        told = run_report.notes(frame.lazy(), {"cost": {}, "scenario": {"notes": ["deck-table-2"]}})
        assert not {*run_report.notes(frame.lazy(), {"cost": {}})} & {*sentences}  # no notes that the scenario does not name
        return [line for line in told if line in sentences]

    assert said([*printed, None, 1.0]) == sentences
    assert said([None]) == said(printed[1:]) == []


@pytest.mark.parametrize(("differences", "said"), [
    ([0.0, 0.0], "events and paths are equal to the last bit on all 30 decodings that both simulated"),
    ([0.0, 1.5e-12], "events and paths differ by at most 1.5e-12 layer-times on all 30 decodings that both simulated"),
])  # fmt: skip
def test_difference_of_paths_and_events_is_printed(differences: list[float], said: str) -> None:
    rows = [{"view": "events", "replications": count, "paths_difference": each}
            for count, each in zip((10, 20), differences, strict=True)]  # fmt: skip
    rows.append({"view": "paths", "replications": 500, "paths_difference": None})
    lines = run_report.notes(pl.DataFrame(rows, infer_schema_length=None).lazy(), {"cost": {}})
    assert said in lines


def test_failed_points_and_disagreements_beyond_ten_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = sweep.run(tables(PPD), out=tmp_path, jobs=1)
    failed = [{"point": at, "view": "events", "error": f"no [{at}]"} for at in range(11)]
    apart = [{"point": at, "quantity": "latency_layers", "views": ["paths", "events"], "values": [1.0, 2.0 + at],
              "difference": 1.0 + at, "bound": 1e-9} for at in range(11)]  # fmt: skip
    run_report.show(replace(made, failed=failed, disagreements=apart), made.frame(), [])
    shown = capsys.readouterr().out
    assert "failed: point 9, events: no [9]" in shown
    assert "no [10]" not in shown
    assert "... and 1 more in failed.json" in shown
    assert "point 9: latency_layers is 1 by paths and 11 by events; they differ by 10, more than 1e-09" in shown
    assert "point 10: latency_layers" not in shown
    assert "; 1 more are in disagreements.json" in shown
    run_report.show(replace(made, failed=failed[:10], disagreements=apart[:10]), made.frame(), [])
    shown = capsys.readouterr().out
    assert "failed.json" not in shown
    assert "all results are kept\n" in shown


def test_json_document_equals_the_printed_report(tmp_path: Path) -> None:
    given = tables(PPD, views=("formula", "paths", "events"))
    made = sweep.run(given, out=tmp_path, jobs=1)
    found = json.loads(run_report.document(made, made.frame(), [Path("a.png")]))
    assert (found["rows"], len(found["results"]), found["truncated"]) == (3, 3, False)
    assert found["figures"] == ["a.png"]
    assert found["shards"] == {"computed": made.computed, "resumed": 0}
    assert found["notes"] == run_report.notes(made.table(), made.tables)
    assert json.loads(run_report.document(made, made.frame().head(2), []))["truncated"]
    assert made.frame(2).equals(made.frame().head(2))
    assert made.frame(2).height == 2 < made.frame().height
    run_report.summarise(made, made.frame(), [])
    assert json.loads((tmp_path / "summary.json").read_text()) == found | {"figures": []}
    assert "speed-up" in (tmp_path / "summary.txt").read_text()


def test_quiet_run_prints_the_same_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = ["run", "--view", "formula", "--no-figures", "-o"]
    texts = [CliRunner().invoke(app, [*words, "out", *more]).stdout for more in ([], ["--resume", "-q"])]
    assert texts[0] == texts[1] != ""


def test_what_is_printed_is_what_is_written_unless_another_form_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Composed for stdout it would be the same text; another width, a terminal and other letters have their own."""
    monkeypatch.delenv("COLUMNS", raising=False)
    made = sweep.run(tables(PPD, views=("formula", "events"), sweep={"method.candidates": [1, 2]}), out=tmp_path, jobs=1)
    summary = run_report.summarise(made, made.frame(), [])
    assert summary == ((tmp_path / "summary.txt").read_text(), (tmp_path / "summary.json").read_text().rstrip("\n"))
    assert run_report.prints_like_a_file()
    run_report.show(made, made.frame(), [])
    assert capsys.readouterr().out == summary.text
    for name, value in (("COLUMNS", "60"), ("FORCE_COLOR", "1")):
        with monkeypatch.context() as patch:
            patch.setenv(name, value)
            assert not run_report.prints_like_a_file()
            run_report.show(made, made.frame(), [])
        assert capsys.readouterr().out != summary.text
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    assert not run_report.prints_like_a_file()


@pytest.mark.parametrize("more", [{}, {"COLUMNS": "70"}])
@pytest.mark.parametrize("columns", [[], ["--columns", "speedup"]])
def test_a_run_prints_what_was_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, columns: list[str], more: dict[str, str]
) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.chdir(tmp_path)
    printed = CliRunner(env=more).invoke(app, ["run", "--view", "formula", "--no-figures", "-q", "-o", "out", *columns]).stdout
    assert (printed == (tmp_path / "out" / "summary.txt").read_text()) == (not columns and not more)
    assert ("GPU-time" in printed) == (not columns)


@pytest.mark.parametrize("count", [1, 4, 5])
def test_at_most_four_reasons_for_no_value_are_printed(count: int) -> None:
    rows = [{"view": view, "no_value_because": f"reason {at}"} for at in range(count) for view in ("formula", "paths")]
    rows.append({"view": "events", "no_value_because": "only the events have one"})
    (line,) = (each for each in run_report.notes(pl.LazyFrame(rows), {"cost": {}}) if each.startswith("no value"))
    told = "; ".join(f"reason {at}" for at in range(min(count, 4))) + "; ..." * (count > 4)
    where = "passes may wait for a unit or link"
    assert line.startswith(f"no value in formula and paths where {where} (column no_value_because: {told}); only the view events")
    formula = [row for row in rows if row["view"] == "formula"]
    assert any("no value in formula where" in each for each in run_report.notes(pl.LazyFrame(formula), {"cost": {}}))


def test_long_words_wrap_and_numbers_are_not_cut(tmp_path: Path) -> None:
    """On a narrow console columns of words wrap, and no number of the table is cut."""
    text = io.StringIO()
    given = tables(PPD, sweep={"cost.layer_times": [[1, 1, 1, 1], [1.125, 1.25, 1.375, 1.5], [1, 1, 1, 2]]})
    made = sweep.run(given, out=tmp_path, jobs=1)
    frame = made.frame()
    words = frame.with_columns(pl.Series("form", [f"a very long form of words number {at}" for at in range(3)]))
    run_report.show(made, words, [], Console(file=text, width=70, highlight=False))
    lines = text.getvalue().splitlines()
    table = [line for line in lines if "a very long" in line]
    assert len(table) >= 3
    assert not any("a very long form of words number" in line for line in table)
    for row in frame.to_dicts():
        assert any(f"{row['speedup']:.3f}" in line for line in lines)


def test_brackets_and_colons_of_a_value_are_printed_as_they_are(tmp_path: Path) -> None:
    text = io.StringIO()
    made = sweep.run(tables(PPD, sweep={"outcomes.match_rate": [0.2, 0.8]}), out=tmp_path, jobs=1)
    named = made.frame().with_columns(pl.Series("form", ["[red]a[/red]", ":smile:"]))
    run_report.show(made, named, [], Console(file=text, width=100, highlight=False))
    assert all(any(word in line for line in text.getvalue().splitlines()) for word in ("[red]a[/red]", ":smile:"))


@pytest.mark.parametrize("words", [[], ["a very long form of words number "]])
def test_a_table_is_as_wide_as_its_cells_and_fits_its_own_width(tmp_path: Path, words: list[str]) -> None:
    """A console one character narrower than the table gets several; one narrower than any table cuts no number."""
    made = sweep.run(tables(PPD, views=("formula", "paths"), sweep={"method.candidates": [1, 2]}), out=tmp_path, jobs=1)
    frame = made.frame()
    frame = frame.with_columns(form=pl.lit(words[0]) + pl.col("candidates").cast(pl.String)) if words else frame

    def shown(width: int) -> list[list[str]]:
        """Lines of each table."""
        text = io.StringIO()
        run_report.show(made, frame, [], Console(file=text, width=width, highlight=False))
        lines = text.getvalue().splitlines()
        rules = [index for index, line in enumerate(lines) if {*line.strip()} == {"─"}]
        return [lines[index - 3 : index + 3] for index in rules]

    (whole,) = shown(400)
    width = max(map(len, whole))
    empty = "".join(" " if {*column} <= {" ", "─"} else "x" for column in zip(*(line.ljust(width) for line in whole), strict=True))
    assert max(map(len, empty.strip().split("x"))) == 2  # between columns, of which each is filled by one of its cells
    assert len(shown(width)) == 1 < len(shown(width - 1))
    numbers = [f"{value:.3f}" for value in made.frame()["speedup"]]
    assert all(any(number in line for line in shown(9)[0]) for number in numbers)


def test_report_has_name_files_and_figures(tmp_path: Path) -> None:
    out = tmp_path / "a folder whose name is longer than a line of the console [1]"
    made = sweep.run(tables(PPD), out=out, jobs=1)

    def lines(about: str = "") -> list[str]:
        text = io.StringIO()
        named = replace(made, tables=made.tables | {"scenario": made.tables["scenario"] | {"description": about}})
        run_report.show(named, made.frame(), [out / "a.png", out / "a.svg"], Console(file=text, width=70, highlight=False))
        return text.getvalue().splitlines()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run_report, "notes", lambda *_: ["a note [red]on[/red] a [b]"])
        assert "a note [red]on[/red] a [b]" in lines()
    shown = lines()
    assert shown[0] == verdict.of(made.table(), made.tables).text
    assert shown[1] == "shown"
    assert lines("of [x]")[1] == "shown: of [x]"
    assert shown[-2:] == [f"results: {out}/results.parquet, .csv", f"figure:  {out}/a.png"]
    (out / "results.csv").unlink()
    assert lines()[-2] == f"results: {out}/results.parquet"


def test_estimates_are_printed_once_in_as_few_tables_as_fit(tmp_path: Path) -> None:
    made = sweep.run(tables(PPD, views=("formula", "paths", "events")), out=tmp_path, jobs=1)
    titles = [title for name, title in run_report.TITLES.items() if name in made.frame().columns and made.frame()[name].count()]
    assert len(titles) == 3
    printed_tables = []
    for width in (80, 120, 200):
        text = io.StringIO()
        run_report.show(made, made.frame(), [], Console(file=text, width=width, highlight=False))
        lines = text.getvalue().splitlines()
        assert [text.getvalue().count(title.partition("\n")[0]) for title in titles] == [1, 1, 1]
        assert sum(line.rstrip().endswith("reserved") for line in lines) == 1
        assert text.getvalue().count("paths") == len(titles) + 1  # and a note on both views
        assert all(len(line) <= width for line in lines if "±" in line)
        printed_tables.append(sum({*line.strip()} == {"─"} for line in lines))
    assert printed_tables[0] == 3
    for view, count in (("formula", 0), ("paths", 1)):  # the mark is explained where it is printed
        notes = run_report.notes(made.table().filter(pl.col("view") == view), made.tables)
        assert sum(line.startswith("±: ") for line in notes) == count
    assert printed_tables == sorted(printed_tables, reverse=True)
    assert printed_tables[-1] == 1


def test_missing_values_are_explained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    made = sweep.run(tables(PPD, sweep={"outcomes.match_rate": [0.4, 0.5]}), out=tmp_path, jobs=1)
    silent = made.frame().with_columns(pl.lit(None, pl.Float64).alias(name) for name in run_report.TITLES)
    reasons = [["waits", "waits"], ["waits", None]]
    said = []
    for frame in (made.frame(), silent, *(silent.with_columns(pl.Series("no_value_because", each)) for each in reasons)):
        run_report.show(made, frame, [])
        said.append(run_report.NO_CLOSED_FORM in capsys.readouterr().out)
    assert said == [False, True, False, True]


def test_units_and_exactness_are_shown_where_they_differ() -> None:
    frame = sim.run(tables(PPD, sweep={"outcomes.match_rate": [0.4, 0.5]}))

    def shown(**columns: Any) -> set[str]:
        changed = frame.with_columns(**{name: pl.Series(values) for name, values in columns.items()})
        return {"units", "exact"} & {*run_report.describing_columns(changed)}

    assert shown() == shown(units=[2, 3], reserved_units=[2, 3]) == shown(contended=[True, True]) == set()
    assert (
        shown(units=[2, 3], reserved_units=[2, 2])
        == shown(units=[2, 3], reserved_units=[2, 3], contended=[False, True])
        == {"units"}
    )
    assert shown(exact=[True, False]) == {"exact"}


@pytest.mark.parametrize(("names", "of"), [
    (["match_rate"], "match"), (["rollback_rate", "fallback_rate"], "fallback and rollback"),
    (["mean_exit_layer", "acceptance_rate", "match_rate"], "match, acceptance and exit"),
])  # fmt: skip
def test_sources_of_rates_are_printed_by_kind(names: list[str], of: str) -> None:
    frame = pl.DataFrame({"outcomes_source": ["published: a: b", "assumed", "published: c", None]}).with_columns(
        pl.lit(0.5).alias(name) for name in names
    )
    lines = run_report.notes(frame.lazy(), {"cost": {}})
    assert lines[0] == f"{of} rates: assumed, published"


def test_notes_follow_the_order_of_points() -> None:
    """The first notes on outcomes, and lossy methods by agreement; many, so that a random order would be noticed."""
    count, most = 20_000, run_report.MOST_NOTES
    many = [f"note {at * 37 % count}" for at in range(count)]
    rows = pl.LazyFrame({"outcomes_note": [None, *many, *reversed(many)]})
    rows = rows.with_columns(match_rate=0.5, outcomes_source=pl.lit("assumed"))
    assert run_report.notes(rows, {"cost": {}})[: most + 3] == [
        "match rates: assumed", *many[:most], f"... and {count - most} more such notes (column outcomes_note)",
        "times: assumed: every layer of the target takes one layer-time; nothing else takes time",
    ]  # fmt: skip
    assert "more such notes" not in "".join(run_report.notes(rows.slice(1, most), {"cost": {}}))
    lossy = [(f"method {at * 37 % count}", f"measured: {at * 7 % 12}") for at in range(count)]
    told = pl.LazyFrame(lossy, schema=["method", "agreement_source"], orient="row").with_columns(exact=pl.lit(False))
    sources = [*dict.fromkeys(source for _, source in lossy)]
    assert [line for line in run_report.notes(told, {"cost": {}}) if line.startswith("not exact")] == [
        f"not exact, output differs from the target's: {', '.join(method for method, own in lossy if own == source)};"
        f" token agreement is {source}" for source in sources
    ]  # fmt: skip


def test_a_table_is_printed_cell_by_cell(tmp_path: Path) -> None:
    """One line per point: the columns that differ, rates, and each estimate in every view with half of its interval."""
    law = {"match": {"kind": "iid", "match_rate": 0.5}, "accept": {"kind": "iid", "acceptance_rate": 0.25}}
    draft, views = {"name": "speculative", "layers": 4, "draft_length": 2}, ("formula", "paths", "events")
    given = tables(PPD, draft, views=views, outcomes=law, cost={"cost_ratio": 0.25}, sweep={"cost.link": [0.0, 0.5]})
    made = sweep.run(given, out=tmp_path, jobs=1)
    frame = made.frame()
    named = {"ppd": "ppd, exit_layer 2, candidates 1", "speculative": "speculative, draft_length 2"}
    names = [name for name in run_report.TITLES if name in frame.columns and frame[name].count()]
    wanted = []
    for pair in (names,):  # a console of 400 characters has room for all
        for part in frame.partition_by("point", maintain_order=True):
            rows = {row["view"]: row for row in part.to_dicts()}
            first = rows["formula"]
            cells = [named[first["method"]], f"{first['cost.link']:.4f}"]
            cells += [f"{first[rate]:.4f}" for rate in ("match_rate", "acceptance_rate") if first[rate] is not None]
            for name in pair:
                for view in views:
                    value, low, high = (rows[view].get(f"{name}{end}") for end in ("", "_low", "_high"))
                    half = "" if low is None or high is None else f" ±{(high - low) / 2:.4f}"
                    cells.append("-" if value is None else f"{value:.4f}{half}")
            wanted.append([*cells, *([f"{first['reserved_units']:.0f}"] if "mean_busy_units" in pair else [])])
    text = io.StringIO()
    run_report.show(made, frame, [], Console(file=text, width=400, highlight=False))
    held = [line.rstrip() for line in text.getvalue().splitlines() if line.rstrip().endswith((" units", " reserved", " 1", " 2"))]
    assert len({len(line) for line in held}) == 1, "numbers are to the right"
    lines = [re.split(r" {2,}", line.strip()) for line in text.getvalue().splitlines()]
    assert [line for line in lines if line[0] in named.values()] == wanted
    assert len(wanted) == 4
    assert {line[0] for line in wanted} == {*named.values()}


def test_lossy_methods_are_printed_with_their_agreement() -> None:
    known = [("bild", "measured: a"), ("exit", "unknown"), ("skip", "measured: a"), ("bild", "measured: a"), ("plain", None)]
    rows = [{"method": method, "exact": False, "agreement_source": source} for method, source in [*known, ("z", "assumed: b")]]
    rows.append({"method": "exact", "exact": True, "agreement_source": "measured: a"})
    lines = run_report.notes(pl.LazyFrame(rows), {"cost": {}})
    unlike = "not exact, output differs from the target's"
    assert [line for line in lines if line.startswith("not exact")] == [
        f"{unlike}: bild, skip; token agreement is measured: a",
        f"{unlike}: exit; token agreement is not measured",
        f"{unlike}: z; token agreement is assumed: b",
    ]


def test_straggler_loss_is_the_largest_of_all_points() -> None:
    lines = run_report.notes(pl.LazyFrame([{"straggler_loss": loss} for loss in (0.05, 0.125, None)]), {"cost": {}})
    (line,) = (each for each in lines if each.startswith("a static batch"))
    assert "and loses up to 12.5% of its time (column straggler_loss)" in line
    without = run_report.notes(pl.LazyFrame({"straggler_loss": [None]}, schema={"straggler_loss": pl.Float64}), {"cost": {}})
    assert not any(each.startswith("a static batch") for each in without)


@pytest.mark.parametrize(("view", "rate", "said"), [("events", 0.5, True), ("events", None, False), ("paths", 0.5, False)])
def test_assumption_on_waiting_candidates_is_printed(view: str, rate: float | None, said: bool) -> None:
    rows = [{"view": view, "no_value_because": "waits", "match_rate": rate}, {"view": "events", "no_value_because": None,
             "match_rate": 0.5}]  # fmt: skip
    lines = run_report.notes(pl.LazyFrame(rows, schema_overrides={"match_rate": pl.Float64}), {"cost": {}})
    assert any("assumed equally likely to be the correct one" in line for line in lines) is said


def test_note_of_a_paper_ignores_rows_of_other_methods() -> None:
    own = sim.run(views=["formula"])
    other = pl.concat([own.with_columns(method=pl.lit("other"), tokens=pl.lit(at, pl.Int64)) for at in range(8)])
    (said,) = ppd_figure_3.sentences(ppd_figure_3.replayed(own.to_dicts()))
    for frame in (own, pl.concat([other, own])):
        assert said in run_report.notes(frame.lazy(), {"cost": {}, "scenario": {"notes": ["ppd-figure-3"]}})
        assert said not in run_report.notes(frame.lazy(), {"cost": {}, "scenario": {"notes": ["ppd-table-3"]}})
    assert said not in run_report.notes(other.lazy(), {"cost": {}, "scenario": {"notes": ["ppd-figure-3"]}})


# --- Columns that are asked for ---


def test_columns_that_are_asked_for_are_printed(tmp_path: Path) -> None:
    path = tmp_path / "s.toml"
    path.write_text(
        '[scenario]\nname = "s"\ntokens = 8\nviews = ["formula"]\n'
        '[[method]]\nname = "ppd"\nlayers = 8\nexit_layer = 4\ncandidates = 1\n'
        '[outcomes]\nkind = "iid"\nmatch_rate = 0.5\n'
    )

    def printed(*more: str) -> str:
        words = ["run", str(path), "-o", str(tmp_path / "out"), "--no-figures", "--resume", *more]
        return str(CliRunner().invoke(app, words).output)

    some = printed("--columns", "relative_latency,speedup_low, tpot_layers")
    usual, everything = printed(), printed("--columns", "all")
    assert "GPU-time per token" in usual
    assert "[layer-times]" not in usual
    assert "[layer-times]" in some
    assert "GPU-time per token" not in some
    assert all(word in everything for word in ("GPU-time per token", "[layer-times]", "operations per token"))
    wrong = CliRunner().invoke(app, ["run", str(path), "--columns", "speed-up"])
    assert wrong.exit_code == 2
    assert "--columns must name columns of results, got 'speed-up'; did you mean speedup? known: speedup, tpot_ms" in wrong.output


def test_width_is_that_of_columns(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    given = tables(PPD, views=("formula", "paths"), sweep={"method.candidates": [1, 2]})
    found = []
    for width in ("200", "60"):
        monkeypatch.setenv("COLUMNS", width)
        found.append(sum({*line.strip()} == {"─"} for line in printed(given, tmp_path / width, capsys).splitlines()))
    assert found[0] == 1 < found[1]
