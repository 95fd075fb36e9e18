"""`sim report` and `sim.report`: reports of runs, what they say, and what is refused."""

from __future__ import annotations

import json
import re
import shutil
import tomllib
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import polars as pl
import pytest
from markdown_it import MarkdownIt
from typer.testing import CliRunner

import sim
from model.base.checks import ParameterError
from model.base.strict_json import dumps
from model.hardware import profile_files
from model.logs import measured_runs
from sim.commands import sim_report
from sim.commands.sim_app import app
from sim.reporting import html_page, run_document, scenario_toml
from sim.reporting.report_document import KINDS, CodeLines, DataTable, ReportDocument, Section, SvgFigure
from sim.runs import run_report, sweep, verdict
from sim.scenarios import scenario_file
from tests.support import pages
from tests.support.comparisons import example_runs

SPECULATIVE: dict[str, Any] = {
    "scenario": {"name": "drafts", "description": "Drafts <of> 1 to 5 tokens", "tokens": 16, "replications": 32,
                 "views": ["formula", "paths"], "seed": 3},
    "method": [{"name": "speculative", "layers": 8, "draft_length": 3}],
    "outcomes": {"kind": "iid", "acceptance_rate": 0.7, "trials": 60, "source": "measured"},
    "cost": {"cost_ratio": 0.1},
    "sweep": {"method.draft_length": [1, 3, 4, 5], "outcomes.acceptance_rate": [0.02, 0.3, 0.9]},
}  # fmt: skip


def run_into(folder: Path, tables: Any = SPECULATIVE, *, drawn: bool = False) -> Path:
    """Run a scenario into a folder as the command does."""
    (folder.parent / "mine.toml").write_text(scenario_toml.text_of(tables), encoding="utf-8")
    options = [] if drawn else ["--no-figures"]
    done = CliRunner().invoke(app, ["run", str(folder.parent / "mine.toml"), "-o", str(folder), "-q", *options])
    assert done.exit_code == 0, done.output
    return folder


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run_into(tmp_path_factory.mktemp("runs") / "run", drawn=True)


@pytest.fixture
def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copied"))


def document(folder: Path) -> ReportDocument:
    return sim.report(folder)


def tables_of(found: ReportDocument) -> dict[str, DataTable]:
    return {part.caption: part for section in found.sections for part in section.parts if isinstance(part, DataTable)}


def figures_of(found: ReportDocument) -> list[SvgFigure]:
    return [part for section in found.sections for part in section.parts if isinstance(part, SvgFigure)]


def test_report_answers_the_question(finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "answer.html"
    done = CliRunner().invoke(app, ["report", str(finished), "-o", str(out)])
    assert (done.exit_code, done.output.strip()) == (0, str(out))
    root = pages.check(out.read_text(encoding="utf-8"))
    body, rows = root.find("body"), [[pages.words(cell) for cell in row] for row in root.iter("tr")]
    assert body is not None
    text = pages.words(body)
    table = pl.read_parquet(finished / "results.parquet")
    said = verdict.of(table, SPECULATIVE).text
    for words in ("drafts: Drafts <of> 1 to 5 tokens", "Is speculative decoding faster than plain decoding, and by how much?",
                  "draft length (1, 3, 4, 5), acceptance rate (0.02, 0.3, 0.9)", said, "measured",
                  "assumed", "sim run scenario.toml", "numpy"):  # fmt: skip
        assert words in text, words
    assert ["seed", "3"] in rows
    assert [pages.words(each) for each in root.iter("h2")] == [
        "Question", "Verdict", "Contents", "Answer by condition", "Figures", "Results", "Scenario", "Notes", "Provenance",
        "Reproduce", "Versions",
    ]  # fmt: skip


def test_tables_hold_the_results_of_the_run(finished: Path) -> None:
    """Every estimate of a point is in its row, and the fastest choice of each condition is marked."""
    found, table = tables_of(document(finished)), pl.read_parquet(finished / "results.parquet")
    [views] = [each for caption, each in found.items() if caption.startswith("Speed-up in each view")]
    assert views.headings[-2:] == ("formula", "paths")
    for row, (point, part) in zip(views.shown, table.group_by("point", maintain_order=True), strict=True):
        rates = {each["view"]: each for each in part.to_dicts()}
        first = rates["formula"]
        assert [cell.text for cell in row[:2]] == [str(first["draft_length"]), f"{first['acceptance_rate']:.4g}"], point
        assert row[-2].text == f"{first['speedup']:.4f}"
        assert row[-1].text == run_report.estimate_text(rates["paths"], "speedup", 4)
    marked = {row[0].text: row[-2].mark for row in views.shown if row[1].text == "0.9"}
    best = table.filter(pl.col("view") == "formula", pl.col("acceptance_rate") == 0.9).sort("speedup").row(-1, named=True)
    assert [length for length, mark in marked.items() if mark == "best"] == [str(best["draft_length"])]
    answers = found["Fastest choice under each condition"]
    assert [row[0].text for row in answers.shown] == ["0.02", "0.3", "0.9"]
    assert [cell.text for cell in answers.shown[0][1:5]] == ["plain decoding", "1.00", "–", "–"]
    assert answers.shown[2][1].text == f"speculative, draft_length {best['draft_length']}"
    assert answers.shown[2][2].text == f"{best['speedup']:.2f}"


def test_marks_are_those_of_the_verdict(finished: Path) -> None:
    """Where plain decoding is fastest nothing is marked; else the fastest choice, and those within its uncertainty."""
    found = tables_of(document(finished))
    [views] = [each for caption, each in found.items() if caption.startswith("Speed-up in each view")]
    answers = found["Fastest choice under each condition"].shown
    judged = verdict.of(pl.read_parquet(finished / "results.parquet"), SPECULATIVE).answers
    assert [answer.best is not None and answer.best.high < 1 for answer in judged] == [True, False, False]
    assert any(answer.ties for answer in judged[1:])
    for answer, shown in zip(judged, answers, strict=True):
        rows = [row for row in views.shown if row[1].text == shown[0].text]
        marks = {f"speculative, draft_length {row[0].text}": row[-2].mark for row in rows if row[-2].mark}
        assert answer.best is not None
        if answer.best.high < 1:
            assert marks == {}
            assert answer.best.label in shown[-1].text
            continue
        assert marks == {answer.best.label: "best", **{each.label: "tie" for each in answer.ties}}
        assert [cell.text for cell in shown[3:5]] == [f"{answer.best.low:.2f}", f"{answer.best.high:.2f}"]
        assert shown[5].text == ", ".join(each.label for each in answer.ties)


def test_figures_of_the_run_are_in_its_report(finished: Path, copied: Path) -> None:
    drawn = [part for section in document(finished).sections for part in section.parts if isinstance(part, SvgFigure)]
    stored = json.loads((finished / "summary.json").read_text())["figures"]
    assert [figure.name for figure in drawn] == [Path(path).stem for path in stored if path.endswith(".svg")]
    assert "Speculative decoding: speed-up against draft length" in [figure.caption for figure in drawn]
    assert all(figure.alternative.startswith(figure.caption) and len(figure.alternative) > len(figure.caption) for figure in drawn)
    # Without stored figures they are drawn, and nothing is written into the run.
    shutil.rmtree(copied / "figures")
    before = {path.name for path in copied.iterdir()}
    again = [part for section in document(copied).sections for part in section.parts if isinstance(part, SvgFigure)]
    assert sorted(figure.caption for figure in again) == sorted(figure.caption for figure in drawn)
    assert {path.name for path in copied.iterdir()} == before


def test_report_reproduces_the_run(finished: Path, tmp_path: Path) -> None:
    """The scenario in the report gives the same table to the byte."""
    scenario, command = document(finished).reproduce
    (tmp_path / "scenario.toml").write_text(scenario.text, encoding="utf-8")
    assert command.text == "sim run scenario.toml"
    sweep.run(tmp_path / "scenario.toml", out=tmp_path / "again", jobs=1)
    assert (tmp_path / "again" / "results.parquet").read_bytes() == (finished / "results.parquet").read_bytes()


def test_bundled_scenarios_are_named(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["run", "ppd-forms", "--view", "formula", "--no-figures", "-q", "-o", str(tmp_path / "changed")])
    assert done.exit_code == 0, done.output
    assert [part.language for part in document(tmp_path / "changed").reproduce] == ["toml", "sh"]
    tables = scenario_file.load("speculative-deck")
    assert run_document._bundled_name(tables) == "speculative-deck"
    assert run_document._bundled_name(tables | {"cluster": {"units": 9}}) is None


@pytest.mark.parametrize("name", scenario_file.names())
def test_scenarios_survive_as_toml(name: str) -> None:
    tables = scenario_file.load(name)
    assert tomllib.loads(scenario_toml.text_of(tables)) == tables
    stored = run_document._with_infinities(json.loads(dumps(tables)))  # as metadata.json holds them
    assert tomllib.loads(scenario_toml.text_of(stored)) == tables


def test_markdown_keeps_figures_next_to_it(finished: Path, tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["report", str(finished), "-o", str(tmp_path / "r.md")])
    assert done.exit_code == 0, done.output
    text = (tmp_path / "r.md").read_text(encoding="utf-8")
    named = re.findall(r"^!\[.+\]\((.*)\)$", text, flags=re.MULTILINE)
    assert named
    assert sorted(named) == sorted(str(path.relative_to(tmp_path)) for path in (tmp_path / "r_figures").iterdir())
    for path in named:
        image = (tmp_path / path).read_text(encoding="utf-8")
        assert image.startswith("<?xml")
        assert ' width="' in image
    # A report with fewer figures leaves none of the old ones.
    (tmp_path / "r_figures" / "figure-99.svg").write_text("<svg/>")
    (tmp_path / "r_figures" / "own.svg").write_text("<svg/>")
    assert CliRunner().invoke(app, ["report", str(finished), "-o", str(tmp_path / "r.md")]).exit_code == 0
    assert {path.name for path in (tmp_path / "r_figures").iterdir()} == {*(Path(path).name for path in named), "own.svg"}


def test_formats_and_files(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for options, name in (([], "report.html"), (["--format", "md"], "report.md"), (["-o", "x", "--format", "html"], "x"),
                          (["-o", "y.HTM"], "y.HTM")):  # fmt: skip
        done = CliRunner().invoke(app, ["report", str(finished), *options])
        assert (done.exit_code, done.output.strip()) == (0, name)
        assert (tmp_path / name).read_text(encoding="utf-8").startswith("# " if name.endswith("md") else pages.DOCTYPE)
    sim.report(finished, format="md", out="twin.md")
    assert (tmp_path / "twin.md").read_text(encoding="utf-8").partition("_figures")[0].startswith("# drafts")
    assert not [*tmp_path.glob("*.tmp"), *tmp_path.glob(".*")]


def test_writing_fails_whole(finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An existing report is overwritten at once or stays as it is."""
    (tmp_path / "r.html").write_text("old", encoding="utf-8")

    def fail(*_: Any) -> str:
        raise ParameterError("no page today")

    with monkeypatch.context() as patch:
        patch.setattr(html_page, "render", fail)
        done = CliRunner().invoke(app, ["report", str(finished), "-o", str(tmp_path / "r.html")])
    assert (done.exit_code, done.stderr) == (2, "error: no page today\n")
    assert (tmp_path / "r.html").read_text(encoding="utf-8") == "old"
    assert CliRunner().invoke(app, ["report", str(finished), "-o", str(tmp_path / "r.html")]).exit_code == 0
    pages.check((tmp_path / "r.html").read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def compared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that `sim compare --figures` has written, next to the measured runs."""
    folder = tmp_path_factory.mktemp("compared")
    runs, profiles = example_runs()
    measured_runs.save(runs, folder / "one.json")
    options = [f"--profile={role}={profile_files.save(each, folder)}" for role, each in profiles.items()]
    done = CliRunner().invoke(app, ["compare", str(folder / "one.json"), *options, "--figures", str(folder / "drawn")])
    assert done.exit_code == 0, done.output
    (folder / "printed.txt").write_text(done.output, encoding="utf-8")
    return folder / "drawn"


def test_comparisons_have_reports(compared: Path, tmp_path: Path) -> None:
    """The errors are those that the command printed, with its figures."""
    done = CliRunner().invoke(app, ["report", str(compared), "-o", str(tmp_path / "r.html")])
    assert done.exit_code == 0, done.output
    root = pages.check((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert len([*root.iter("figure")]) == len([*compared.glob("*.svg")])
    rows = [[pages.words(cell) for cell in row] for row in root.iter("tr")]
    printed = (compared.parent / "printed.txt").read_text(encoding="utf-8")
    shown = re.findall(r"^ *(\w+) +(\d+) +(\d+) +([\d.]+)% +([\d.]+)% +([\d.]+)% ", printed, flags=re.MULTILINE)
    assert len(shown) > 5
    assert [row for row in map(list, shown) if row not in [each[:6] for each in rows]] == []
    errors = [abs(each["error"]) for each in json.loads((compared / "comparison.json").read_text())["files"][0]["runs"]]
    worst = tables_of(sim.report(compared))["Largest errors"]
    assert [row[5].text.lstrip("-") for row in worst.shown] == [f"{100 * each:.1f}" for each in sorted(errors, reverse=True)[:5]]
    first = [part.name for section in sim.report(compared).sections for part in section.parts if isinstance(part, SvgFigure)][:2]
    assert first == ["predicted_measured", "error_by_method"]


def test_printed_comparisons_are_drawn_anew(compared: Path, tmp_path: Path) -> None:
    (tmp_path / "printed.json").write_bytes((compared / "comparison.json").read_bytes())
    again, stored = sim.report(tmp_path / "printed.json"), sim.report(compared)
    assert again.verdict == stored.verdict
    assert "Does the simulator predict real wall time?" in [
        part.caption for section in again.sections for part in section.parts if isinstance(part, SvgFigure)
    ]
    content = json.loads((compared / "comparison.json").read_text())
    runs = content["files"][0]["runs"]
    for changed, said in (({"tokens": 0}, "tokens[0] must be at least 1"), ({"measured_s": -1.0}, "measured_s[0] must be"),
                          ({"error": "x"}, "column error must hold numbers")):  # fmt: skip
        own = content["files"][0] | {"runs": [each | changed for each in runs]}
        (tmp_path / "wrong.json").write_text(json.dumps(content | {"files": [own]}))
        assert said in refused(tmp_path / "wrong.json")
    for wrong in (content | {"files": []}, content | {"files": 3}, content | {"files": [content["files"][0] | {"runs": [{}]}]}):
        (tmp_path / "wrong.json").write_text(json.dumps(wrong))
        assert "run `sim compare` again" in refused(tmp_path / "wrong.json")


@pytest.fixture(scope="module")
def advised(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The document that `sim advise -o` has written, with its figure."""
    base = tmp_path_factory.mktemp("advised") / "advice"
    options = [
        "--engine-law", "vllm-llama-3.1-8b-eagle3-h100", "--acceptance", "0.6,0.8",
        "--batch", "1,8,64", "--draft-length", "1,3,5", "-o",
    ]  # fmt: skip
    done = CliRunner().invoke(app, ["advise", *options, str(base)])
    assert done.exit_code == 0, done.output
    return base.with_suffix(".json")


def test_advice_has_a_report(advised: Path, tmp_path: Path) -> None:
    content = json.loads(advised.read_text(encoding="utf-8"))
    found = sim.report(advised, tmp_path / "r.html")
    root = pages.check((tmp_path / "r.html").read_text(encoding="utf-8"))
    assert found.verdict.rstrip(".") == content["verdict"].rstrip(".")
    assert len([*root.iter("figure")]) == 1
    for case in content["cases"]:
        table = tables_of(found)[f"Speed-up over plain decoding on the same devices, acceptance {case['acceptance']}"]
        for row in table.shown:
            lengths = dict(zip((1, 3, 5), row[1:4], strict=True))
            marked = [length for length, cell in lengths.items() if cell.mark == "best"]
            assert marked == [length for length in [case["best"][row[0].text]] if length]
            for length, cell in lengths.items():
                wanted = {"acceptance": case["acceptance"], "batch": int(row[0].text), "draft_length": length}
                own = [each for each in content["table"] if each["method"] == "speculative"]
                [point] = [each for each in own if wanted.items() <= each.items()]
                assert cell.text == f"{point['speedup']:.2f}"
                assert (cell.mark == "tie") == (point["tie"] and not point["best"])
    assert [(row.name, row.kind) for row in found.provenance] == [(row["input"], row["kind"]) for row in content["rests_on"]]
    pasted = pages.words(root)
    assert all(" ".join(line.split()) in pasted for lines in content["settings"].values() for line in lines)
    for key in ("table", "break_even", "tensor_parallel"):
        (tmp_path / "wrong.json").write_text(json.dumps({name: value for name, value in content.items() if name != key}))
        assert "is not advice as the program writes it" in refused(tmp_path / "wrong.json")


def test_advice_without_a_file_of_its_figure_has_the_same_figure(advised: Path, tmp_path: Path) -> None:
    """`sim advise --json > a.json` writes no figure: the report draws it from the table."""
    content = json.loads(advised.read_text(encoding="utf-8"))
    printed = tmp_path / advised.name
    printed.write_text(json.dumps(content))
    stored, drawn = (figures_of(sim.report(path)) for path in (advised, printed))
    assert len(stored) == len(drawn) == 1
    assert stored[0].svg == drawn[0].svg
    for case in content["cases"]:
        own = [row for row in content["table"] if row["acceptance"] == case["acceptance"] and row["advised"]]
        for length in {row["draft_length"] for row in own} - {0}:
            assert f"K = {length} is fastest" in case["verdict"]
            assert f"K = {length}, acceptance {case['acceptance']}" in drawn[0].svg
    old = [{name: value for name, value in row.items() if name != "advised"} for row in content["table"]]
    printed.write_text(json.dumps(content | {"table": old}))  # of a version without the mark
    assert len(figures_of(sim.report(printed))) == 1
    for changed in ({"speedup": -1.0}, {"speedup_low": "x"}, {"batch": 0}):
        printed.write_text(json.dumps(content | {"table": [{**row, **changed} for row in content["table"]]}))
        assert refused(printed)


# --- what is refused ----------------------------------------------------------------------------------------------------


def refused(*arguments: object) -> str:
    done = CliRunner().invoke(app, ["report", *map(str, arguments)])
    assert done.exit_code == 2, done.output
    [line] = done.stderr.splitlines()
    return line


def test_wrong_arguments_are_refused_in_a_line(finished: Path, tmp_path: Path) -> None:
    assert (
        refused(tmp_path / "no")
        == f"error: there is no {tmp_path / 'no'}; name the directory of a run, or a JSON document of a command"
    )
    assert "and has no serving.json or metadata.json or comparison.json" in refused(tmp_path)
    assert "ending in .html or .md, got r.pdf" in refused(finished, "-o", "r.pdf")
    assert "--format must agree with the ending of the file, got md and r.html" in refused(
        finished, "-o", "r.html", "--format", "md"
    )
    assert "unknown --format 'pdf'" in refused(finished, "--format", "pdf")
    assert "is a directory; name a file in it" in refused(finished, "-o", tmp_path)
    assert "with a key kind (run, comparison" in refused(finished / "failed.json")
    assert "cannot be read as JSON" in refused(finished / "results.csv")
    (tmp_path / "other.json").write_text('{"kind": "comparisons"}')
    assert "unknown kind of other.json 'comparisons'; did you mean comparison?" in refused(tmp_path / "other.json")


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"complete": False}, "is not finished; resume it with the same `sim run` command and --resume"),
        ({"results_version": None}, "got an earlier version; run the scenario again"),
        ({"results_version": 99}, f"must be of version {scenario_file.RESULTS_VERSION} of the program, got version 99"),
        ({"scenario": {"scenario": {"name": "x"}}}, "run the scenario again"),
        ({"scenario": 3}, "has no scenario"),
    ],
)
def test_runs_that_are_not_finished_or_of_this_version_are_refused(copied: Path, changed: dict[str, Any], said: str) -> None:
    path = copied / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changed))
    assert said in refused(copied)


def test_damaged_tables_are_refused(copied: Path) -> None:
    (copied / "results.parquet").write_bytes(b"PAR1" + bytes(20) + b"PAR1")
    assert "results.parquet cannot be read" in refused(copied)
    (copied / "results.parquet").unlink()
    assert "results.parquet cannot be read: No such file or directory; run the scenario again" in refused(copied)


def test_a_summary_reports_its_run(finished: Path, tmp_path: Path) -> None:
    assert document(finished / "summary.json") == document(finished)
    moved = tmp_path / "moved.json"
    shutil.copy(finished / "summary.json", moved)
    assert document(moved) == document(finished)
    moved.write_text(json.dumps(json.loads(moved.read_text()) | {"out": "gone"}))
    assert "is the summary of a run in gone, which is not there" in refused(moved)


# --- further contents ---------------------------------------------------------------------------------------------------


HOSTILE = '<script>alert("1")</script> & ``` | [x](http://e.vil) {{ 7 * 7 }}'


def test_hostile_names_are_words(tmp_path: Path) -> None:
    settings = SPECULATIVE["scenario"] | {"name": HOSTILE.replace("/", ""), "description": HOSTILE, "views": ["formula"]}
    folder = run_into(tmp_path / "run", SPECULATIVE | {"scenario": settings})
    sim.report(folder, tmp_path / "r.html")
    root = pages.check((tmp_path / "r.html").read_text(encoding="utf-8"))
    [title] = root.iter("title")
    assert HOSTILE in pages.words(title)
    [code] = [each for each in root.iter("code") if "[scenario]" in pages.words(each)]
    assert tomllib.loads("".join(code.itertext()))["scenario"]["description"] == HOSTILE
    sim.report(folder, tmp_path / "r.md")
    assert "<script" not in re.sub(
        r"```+.*?\n```+", "", (tmp_path / "r.md").read_text(encoding="utf-8").replace("\\<", ""), flags=re.DOTALL
    )


def test_failures_and_disagreements_are_warnings(copied: Path) -> None:
    (copied / "failed.json").write_text(json.dumps([{"point": 4, "view": "paths", "error": "no <value>"}]))
    [line] = document(copied).warnings
    assert line == "1 point failed and is not in the tables: point 4: no <value>."
    row = {"point": 2, "views": ["formula", "paths"], "values": [3, 2], "quantity": "rounds", "difference": 1, "bound": 0.1}
    (copied / "disagreements.json").write_text(json.dumps([row, row]))
    said = "point 2: rounds is 3 by formula and 2 by paths; they differ by 1, more than 0.1"
    assert document(copied).warnings[1] == f"Views disagree, which is a bug in the program: {said}; and 1 more."


def test_directories_may_have_any_name(finished: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(finished, tmp_path / "runs [1-3]*?" / "<b> ü %20"))
    assert document(folder).verdict == document(finished).verdict
    done = CliRunner().invoke(app, ["report", str(folder), "-o", str(folder / "my (own) [report].md")])
    assert done.exit_code == 0, done.output
    text = (folder / "my (own) [report].md").read_text(encoding="utf-8")
    images = [str(each.attrs["src"]) for token in MarkdownIt().parse(text) for each in token.children or () if each.type == "image"]
    assert images
    assert all((folder / unquote(image)).is_file() for image in images)


def test_many_points_are_cut(tmp_path: Path) -> None:
    rates = [number / 500 for number in range(1, 301)]
    changed = SPECULATIVE | {"sweep": {"outcomes.acceptance_rate": rates}}
    changed["scenario"] = SPECULATIVE["scenario"] | {"views": ["formula"]}
    folder = run_into(tmp_path / "many", changed)
    found = tables_of(document(folder))
    assert {len(table.shown) for table in found.values()} == {200}
    said = f"The first 200 of 300 rows are shown; the whole table is in {folder}/results.parquet."
    results = [table for caption, table in found.items() if caption != "Fastest choice under each condition"]
    assert results
    assert all(table.remarks[-1] == said for table in results)


def test_every_input_has_a_source(finished: Path) -> None:
    rows = {row.name: row for row in document(finished).provenance}
    assert rows["acceptance rate"].kind == "measured"
    assert rows["acceptance rate"].value == "0.02 to 0.9"
    assert rows["times"].kind == "assumed"
    assert rows["cost.cost_ratio"].kind == "assumed"
    assert rows["method.draft_length"].value == "1, 3, 4, 5"
    assert rows["scenario.tokens"].kind == "chosen"
    assert {row.kind for row in rows.values()} <= {*KINDS}


def test_methods_and_their_costs_have_rows(tmp_path: Path) -> None:
    """Of several methods each has a row, and numbers of its own costs are assumed."""
    methods = [SPECULATIVE["method"][0], {"name": "autoregressive", "layers": 8, "cost": {"final_head": 0.25}}]
    settings = SPECULATIVE["scenario"] | {"views": ["formula"]}
    folder = run_into(tmp_path / "run", SPECULATIVE | {"scenario": settings, "method": methods, "sweep": {}})
    rows = {row.name: row for row in document(folder).provenance}
    assert (rows["method 1: speculative"].value, rows["method 1: speculative"].kind) == ("layers = 8, draft_length = 3", "chosen")
    assert (rows["method 2.cost.final_head"].value, rows["method 2.cost.final_head"].kind) == ("0.25", "assumed")
    assert rows["times"].source.startswith("every layer of the target takes one layer-time; ")


@pytest.mark.parametrize(
    ("source", "kind"),
    [
        ("assumed efficiencies of the published peaks of h100", "assumed"),
        ("composed (ai-dynamo/aiconfigurator)", "composed"),
        ("measured", "measured"),
        ("published: PPD Table 2, squad", "published"),
        ("fitted to published times, PPD Table 3", "fitted"),
        ("nothing known", "assumed"),
        ("published: Table 1; measured", "published"),
        ("assumed; published: Table 1", "assumed"),
        ("measured: 200 of 200 sequences of family", "measured"),
    ],
)
def test_kinds_of_sources(source: str, kind: str) -> None:
    """Of several sources the least certain one decides."""
    assert run_document._kind_and_source(source)[0] == kind


def test_files_of_a_scenario_are_listed_with_their_hashes(finished: Path, copied: Path) -> None:
    path = copied / "metadata.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"files": {"a/log.json": "ab" * 32, "gone": None}}))
    listed = document(copied).reproduce[-1]
    assert listed.text.splitlines() == [f"{'ab' * 32}  a/log.json", f"{'missing':64}  gone"]
    assert json.loads((finished / "metadata.json").read_text())["files"] == {}


def test_other_commands_register_a_builder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One line makes reports of a new kind of document."""
    monkeypatch.setitem(sim_report.BUILDERS, "made", f"{__name__}:made_document")
    (tmp_path / "made.json").write_text('{"kind": "made", "answer": "K = 3"}')
    done = CliRunner().invoke(app, ["report", str(tmp_path / "made.json"), "-o", str(tmp_path / "made.html")])
    assert done.exit_code == 0, done.output
    root = pages.check((tmp_path / "made.html").read_text(encoding="utf-8"))
    assert "K = 3 is best." in pages.words(root)
    assert "vllm serve --speculative-config" in pages.words(root)


def made_document(content: Any, path: Path) -> ReportDocument:
    lines = CodeLines("vllm serve --speculative-config '{}'", "Paste this:", "sh")
    return ReportDocument(path.stem, "What is best?", f"{content['answer']} is best.", [Section("To paste", [lines])])


def test_every_builder_can_be_imported() -> None:
    import importlib

    for where in sim_report.BUILDERS.values():
        module, _, function = where.partition(":")
        assert callable(getattr(importlib.import_module(module), function))
    assert {*sim_report.FOLDERS.values()} <= {*sim_report.BUILDERS}
