"""Report of a run: its question, verdict, table of results, figures, sources of its inputs, and the scenario that reproduces it."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import polars as pl

from model.base import bounded_files
from model.base.checks import ParameterError
from model.methods import registry
from model.outcomes.outcome_kinds import KINDS as OUTCOME_KINDS
from sim.reporting import scenario_toml
from sim.reporting.report_document import (
    DASH,
    KINDS,
    MOST_ROWS,
    Bullets,
    CodeLines,
    DataTable,
    Paragraph,
    ProvenanceRow,
    ReportDocument,
    Section,
    SvgFigure,
    TableCell,
    Value,
)
from sim.runs import run_report
from sim.runs.sweep import Report
from sim.runs.verdict import CONDITIONS, COSTS, DEVICES, Answer, Verdict
from sim.runs.verdict import of as verdict_of
from sim.scenarios import cases, scenario_file
from sim.scenarios.grid import Grid
from sim.views import agreement

METADATA = "metadata.json"
"""File by which the directory of a run is known."""
WIDTH = 100
"""Characters of a table's row that fit on A4 paper; wider results are shown in several tables."""
LONGEST_LINE = 22
"""Characters of a line in a column of words; longer content wraps."""
MOST_LISTED = 6
"""Values of an axis, failed points or disagreements that are named one by one."""
MOST_SOURCES = 40
"""Sources of rates that are listed."""
UNITS = {
    **dict.fromkeys(("tokens", "draft_length", "max_draft_length", "prompt", "context", "sequence_length"), "tokens"),
    **dict.fromkeys(("layers", "draft_layers", "medium_layers", "exit_layer", "max_layers", "min_layers"), "layers"),
    **dict.fromkeys(("sequences", "batch"), "sequences"),
}
"""Units of columns that describe points."""
_BROKEN = (pl.exceptions.PolarsError, ArithmeticError, LookupError, TypeError, AttributeError, ValueError)
"""Errors of a directory whose files were changed by hand."""


def finished_run(folder: Path) -> tuple[Report, dict[str, Any]]:
    """Read the directory of a finished run: its report and metadata. Refuse an unfinished run, and one of another version."""
    about = _metadata(folder)
    version = about.get("results_version")
    if about.get("complete") is not True:
        raise ParameterError(f"the run in {folder} is not finished; resume it with the same `sim run` command and --resume")
    if version != scenario_file.RESULTS_VERSION:
        got = f"version {version}" if isinstance(version, int) else "an earlier version"
        wanted = f"version {scenario_file.RESULTS_VERSION}"
        raise ParameterError(f"the results in {folder} must be of {wanted} of the program, got {got}; run the scenario again")
    tables = _with_infinities(about.get("scenario"))
    if not isinstance(tables, dict):
        raise ParameterError(f"{folder / METADATA} has no scenario; run the scenario again")
    _require_methods(tables, about)
    try:
        bounded_files.check_regular(folder / "results.parquet")
        rows = int(pl.scan_parquet(folder / "results.parquet", glob=False).select(pl.len()).collect().item())
    except (OSError, pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        why = getattr(error, "strerror", None) or (str(error).splitlines() or ["damaged"])[0]
        raise ParameterError(f"{folder / 'results.parquet'} cannot be read: {why}; run the scenario again") from None
    if not rows:
        raise ParameterError(f"{folder / 'results.parquet'} has no rows; run the scenario again")
    failed, disagreements = (_stored_list(folder / name) for name in ("failed.json", "disagreements.json"))
    return Report(folder, tables, rows, failed, 0, 0, disagreements), about


def _metadata(folder: Path) -> dict[str, Any]:
    path = folder / METADATA
    try:
        about = bounded_files.json_of(bounded_files.read_text(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ParameterError(f"{path} cannot be read: {why}; name the directory of a run") from None
    if not isinstance(about, dict):
        raise ParameterError(f"{path} is not the metadata of a run; name the directory of a run")
    return about


def _stored_list(path: Path) -> list[dict[str, Any]]:
    """Rows of failed points or disagreements; none if the file is missing."""
    try:
        found = bounded_files.json_of(bounded_files.read_text(path))
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise ParameterError(
            f"{path} cannot be read: {getattr(error, 'strerror', None) or error}; run the scenario again"
        ) from None
    return [row for row in found if isinstance(row, dict)] if isinstance(found, list) else []


def _with_infinities(value: Any) -> Any:
    """Tables with infinite floats, which JSON holds as strings."""
    if isinstance(value, dict):
        return {key: _with_infinities(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_with_infinities(each) for each in value]
    return float(value) if value in ("inf", "-inf") else value


def _require_methods(tables: Mapping[str, Any], about: Mapping[str, Any]) -> None:
    """Refuse a run of methods outside the project whose modules were not named."""
    modules = about.get("methods")
    for table in scenario_file.method_tables(tables):
        try:
            registry.parameters(table.get("name"))
        except ParameterError as error:
            named = [str(each) for each in modules] if isinstance(modules, list) else []
            if not named:
                raise
            remedy = " ".join(f"{registry.OPTION} {name}" for name in named)
            raise ParameterError(f"{error}; add {remedy}, with which it was run") from None


def of_run(folder: Path, figures: Sequence[SvgFigure] = ()) -> ReportDocument:
    """Return the report of a finished run from its directory.

    Raises
    ------
    ParameterError
        If the run is unfinished, of another version, or its files were changed.
    """
    report, about = finished_run(folder)
    try:
        return _document(report, about, figures)
    except _BROKEN as error:
        if isinstance(error, ParameterError):
            raise
        why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:200]}"
        raise ParameterError(f"{folder} does not hold a run as the program writes it ({why}); run the scenario again") from None


def _document(report: Report, about: Mapping[str, Any], figures: Sequence[SvgFigure]) -> ReportDocument:
    tables, table = report.tables, report.table()
    settings = tables["scenario"]
    found = verdict_of(table, tables)
    sections = [*_answers(found)]
    sections += [Section("Figures", figures)] if figures else []
    sections += [Section("Results", [*_results(report, found)])]
    sections += [Section("Scenario", [*_scenario_parts(tables)])]
    return ReportDocument(
        title=f"{settings['name']}: {settings['description']}" if settings.get("description") else str(settings["name"]),
        question=question(tables),
        verdict=_sentence(found.text),
        sections=sections,
        warnings=[*_warnings(report)],
        notes=[_sentence(note) for note in run_report.notes(table, tables)],
        provenance=[*provenance(report)],
        reproduce=[*_reproduce(report, about)],
        versions={str(name): str(version) for name, version in dict(about.get("versions", {})).items()},
        facts=dict(_facts(report, about)),
    )


def _sentence(text: str) -> str:
    text = text[:1].upper() + text[1:]
    return text if text.endswith((".", "?", "!")) else f"{text}."


# --- question -----------------------------------------------------------------------------------------------------------


def question(tables: Mapping[str, Any]) -> str:
    """Return the question of a scenario in a sentence or two: what is compared, and over which conditions.

    >>> question(scenario_file.load("ppd-figures-3-and-4")).partition(" Varied: ")[0]
    'Is Predictive Pipelined Decoding faster than plain decoding, and by how much?'
    >>> question(scenario_file.load("ppd-figures-3-and-4")).partition(" Varied: ")[2]
    'data set (squad, wmt, cnn_dm), head (final, trained), candidates (1, 3, 5).'
    """
    names = dict.fromkeys(table["name"] for table in scenario_file.method_tables(tables))
    labels = [registry.label(str(name)) for name in names if name != registry.PLAIN]
    if not labels:
        asked = "How long does plain decoding take?"
    elif len(labels) == 1:
        asked = f"Is {labels[0]} faster than plain decoding, and by how much?"
    else:
        asked = f"Which is fastest: {', '.join(labels)} or plain decoding, and by how much?"
    varied = [f"{_words(axis.path)} ({_axis_values(axis.values)})" for axis in Grid(dict(tables), check=False).axes]
    return f"{asked} Varied: {', '.join(varied)}." if varied else asked


def _axis_values(values: Sequence[Any]) -> str:
    """Values of an axis; of many, the ends and the number."""
    if len(values) <= MOST_LISTED:
        return ", ".join(_plain(value) for value in values)
    return f"{_plain(values[0])} to {_plain(values[len(values) - 1])}, {len(values):,} values"


def _plain(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:g}"
    return ", ".join(map(_plain, value)) if isinstance(value, list | tuple) else str(value)


# --- results ------------------------------------------------------------------------------------------------------------


def _answers(found: Verdict) -> Iterator[Section]:
    """Table of the fastest choice under each condition; none for a single condition, which the verdict covers."""
    answers = found.answers
    if len(answers) < 2:
        return
    keys = [*dict.fromkeys(key for answer in answers for key in answer.at)]
    rows = ([*(_plain(answer.at.get(key, "")) for key in keys), *_answer_cells(answer)] for answer in answers)
    columns = [*map(_words, keys), "fastest", "speed-up", "from", "to", "also within the uncertainty"]
    units = [*(_unit(key) for key in keys), "", "plain decoding = 1", "", "", ""]
    yield Section("Answer by condition", [DataTable(
        "Fastest choice under each condition", columns, rows, units, count=len(answers),
        notes=[
            f"Speed-up over {found.document()['over']}. From and to: bounds by the 95 % sampling interval and the uncertainty of"
            " the inputs. Tie: the bounds contain 1, so plain decoding may be as fast."
        ],
    )])  # fmt: skip


def _answer_cells(answer: Answer) -> list[Value]:
    best = answer.best
    if best is None or best.high < 1:
        other = "" if best is None else f"{best.label} ({best.speedup:.2f}x)"
        return [answer.plain, TableCell("1.00"), None, None, f"best other choice: {other}" if other else ""]
    bounds: list[Value] = [f"{best.low:.2f}", f"{best.high:.2f}"] if best.interval else [None, None]
    label = best.label if best.exact else f"{best.label} (not exact)"
    near = [each.label for each in answer.ties] + ([answer.plain] if best.low <= 1 else [])
    more = f", {len(near) - 3} more" if len(near) > 3 else ""
    return [label, TableCell(f"{best.speedup:.2f}", "tie" if best.low <= 1 else "best"), *bounds, ", ".join(near[:3]) + more]


def _words(name: str) -> str:
    return name.rpartition(".")[2].replace("_", " ")


def _unit(name: str) -> str:
    return UNITS.get(name.rpartition(".")[2], "")


def _results(report: Report, found: Verdict) -> Iterator[Paragraph | DataTable]:
    """Table of results with one row per point, split by column if it is wide; and the speed-ups of all views."""
    frame = report.frame(run_report.MOST_LISTED)
    shown = run_report.with_method_labels(frame.filter(pl.col("point").rank("dense") <= MOST_ROWS), report.tables)
    estimates, keys = run_report.columns(None, shown), run_report.describing_columns(shown)
    views = [view for view in run_report.VIEWS if view in shown["view"].unique().to_list()]
    points = _points(report)
    marks = _marks(found.answers)
    by_point = [{row["view"]: row for row in part.to_dicts()} for part in shown.partition_by("point", maintain_order=True)]
    described = [[_key_cell(next(iter(rows.values()))[key]) for key in keys] for rows in by_point]
    wide = sum(_width(_words(key), [row[index] for row in described]) for index, key in enumerate(keys))
    units = [_unit(key) for key in keys]
    meaning = "Best: the shortest time under its condition. Tie: within the uncertainty of the best, or of plain decoding."

    def table(caption: str, headings: Sequence[str], columns: Sequence[tuple[str, str]], digits: int) -> DataTable:
        """Rows with an estimate and view per column; an empty view is that of the verdict."""
        rows: list[list[Value]] = []
        for by_view, own in zip(by_point, described, strict=True):
            chosen = _view_of_verdict(by_view)
            mark = marks.get(next(iter(by_view.values()))["point"], "")
            texts = [_estimate(by_view, view, name, digits) for name, view in columns]
            own_marks = [mark if name == "speedup" and (view or chosen) == chosen and text != DASH else "" for (name, view), text
                         in zip(columns, texts, strict=True)]  # fmt: skip
            rows.append([*own, *map(TableCell, texts, own_marks)])
        names = [*map(_words, keys), *headings]
        marked = [meaning] if any(cell.mark for row in rows for cell in row if isinstance(cell, TableCell)) else []
        whole = f"{report.out}/results.parquet"
        return DataTable(caption, names, rows, [*units, *[""] * len(headings)], whole=whole, count=points, notes=marked)

    used = " or ".join(view for view in views if view in {_view_of_verdict(rows) for rows in by_point})
    texts = {name: [_estimate(rows, "", name, 3) for rows in by_point] for name in estimates}
    for group in _groups({name: _width(_heading(name), own) for name, own in texts.items()}, WIDTH - wide):
        caption = f"{_listed([_title(name) for name in group])} ({used})" if used else _listed([_title(name) for name in group])
        yield table(caption[:1].upper() + caption[1:], [_heading(name) for name in group], [(name, "") for name in group], 3)
    if not estimates:
        yield Paragraph(f"No values: {run_report.NO_CLOSED_FORM}.")
    elif len(views) > 1 and "speedup" in estimates:
        yield table("Speed-up in each view (plain decoding = 1)", views, [("speedup", view) for view in views], 4)


def _points(report: Report) -> int:
    """Number of points of a run. Rows are in the order of points, so a point begins where the number changes.

    Counting distinct numbers would hold all of them in memory.
    """
    begins = pl.col("point") != pl.col("point").shift()
    return 1 + int(report.table().select(begins.sum()).collect(engine="streaming").item())


def _listed(words: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _key_cell(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else run_report.plain_text(value)


def _title(name: str) -> str:
    """Heading of an estimate without its unit."""
    return _heading(name).partition(" (")[0].partition(" [")[0]


def _heading(name: str) -> str:
    return (run_report.TITLES | run_report.FURTHER_TITLES).get(name, name.replace("_", " ")).replace("\n", " ")


def _estimate(rows: Mapping[str, Mapping[str, Any]], view: str, name: str, digits: int) -> str:
    """Text of an estimate in a view, by default that of the verdict; a dash where it has no value."""
    row = rows.get(view or _view_of_verdict(rows))
    return DASH if row is None or row.get(name) is None else run_report.estimate_text(row, name, digits)


def _width(heading: str, texts: Sequence[str]) -> int:
    """Characters that a column needs: a heading wraps at spaces, and long content wraps too."""
    return max(*map(len, heading.split()), *(min(len(text), LONGEST_LINE) for text in texts)) + 2


def _groups(widths: Mapping[str, int], room: int) -> Iterator[list[str]]:
    """Split columns into groups that fit into `room` characters; a group has at least one.

    >>> [*_groups({"a": 10, "b": 10, "c": 15, "d": 40}, 24)]
    [['a', 'b'], ['c'], ['d']]
    """
    group: list[str] = []
    for name, width in widths.items():
        if group and sum(widths[other] for other in group) + width > room:
            yield group
            group = []
        group.append(name)
    if group:
        yield group


def _marks(answers: Sequence[Answer]) -> dict[int | None, str]:
    """Marks of points: fastest under a condition, or tied with the fastest."""
    marks: dict[int | None, str] = {}
    for answer in answers:
        if answer.best is None or answer.best.high < 1:
            continue
        marks |= {each.point: "tie" for each in answer.ties}
        marks[answer.best.point] = "tie" if answer.best.low <= 1 else "best"
    return marks


def _view_of_verdict(rows: Mapping[str, Mapping[str, Any]]) -> str:
    """View whose speed-up the verdict uses: the first that has a value and models waiting where there is any."""
    for view in run_report.VIEWS:
        row = rows.get(view)
        if row is not None and row.get("speedup") is not None and not (row.get("contended") and view != "events"):
            return view
    return ""


def _warnings(report: Report) -> Iterator[str]:
    """Failed points, and views that disagree."""
    if report.failed:
        first = "; ".join(f"point {row.get('point')}: {row.get('error')}" for row in report.failed[:3])
        said = "1 point failed and is" if len(report.failed) == 1 else f"{len(report.failed)} points failed and are"
        yield f"{said} not in the tables: {first}{'; ...' if len(report.failed) > 3 else ''}."
    if report.disagreements:
        first = agreement.describe(report.disagreements[0])
        more = f"; and {len(report.disagreements) - 1} more" if len(report.disagreements) > 1 else ""
        yield f"Views disagree, which is a bug in the program: {first}{more}."


# --- scenario and provenance --------------------------------------------------------------------------------------------


def _scenario_parts(tables: Mapping[str, Any]) -> Iterator[Paragraph | Bullets]:
    yield Paragraph("Each method with its parameters; conditions that vary are in the tables.")
    items = []
    for table in scenario_file.method_tables(tables):
        own = [f"{key} = {_plain(value)}" for key, value in table.items() if key not in ("name", *scenario_file.OVERRIDABLE)]
        items.append(": ".join([registry.label(str(table["name"])), *([", ".join(own)] if own else [])]))
    yield Bullets(tuple(items))


def provenance(report: Report) -> Iterator[ProvenanceRow]:
    """Every input of a run with its value, kind and source: rates, times, costs and choices."""
    tables, table = report.tables, report.table()
    names = table.collect_schema().names()
    yield from _rates(table, names)
    for name, source in scenario_file.cost_sources(tables):
        yield ProvenanceRow(f"times: {name}" if name else "times", "", *_kind_and_source(source))
    if "cost_missing" in names:
        lacking = run_report.distinct(table.drop_nulls("cost_missing"), "cost_missing")["cost_missing"].to_list()
        for part in sorted({part for each in lacking for part in str(each).split(", ")}):
            yield ProvenanceRow(f"time of {part}", "0", "assumed", "not measured")
    if "agreement_source" in names:
        lossy = run_report.distinct(table.drop_nulls("agreement_source"), "method", "agreement", "agreement_source")
        for row in lossy.head(MOST_SOURCES).to_dicts():
            source, agreed = str(row["agreement_source"]), row["agreement"]
            text = "" if agreed is None else f"{agreed:.3f}"
            kind = ("assumed", "not measured") if source == "unknown" else _kind_and_source(source)
            yield ProvenanceRow(f"token agreement of {registry.label(str(row['method']))}", text or "unknown", *kind)
    yield from _given(tables)


def _rates(table: pl.LazyFrame, names: Sequence[str]) -> Iterator[ProvenanceRow]:
    """Rates by their source, each with the range of its values."""
    columns = {rate.column: rate.label for kind in OUTCOME_KINDS.values() for rate in kind.rates if rate.column in names}
    if "outcomes_source" not in names or not columns:
        return
    ends = [end for name in columns for end in (pl.col(name).min().alias(f"{name}<"), pl.col(name).max().alias(f"{name}>"))]
    rows = table.drop_nulls("outcomes_source").group_by("outcomes_source").agg(ends).sort("outcomes_source")
    found = rows.collect(engine="streaming").to_dicts()
    for row in found[:MOST_SOURCES]:
        source = row["outcomes_source"]
        for name, label in columns.items():
            low, high = row[f"{name}<"], row[f"{name}>"]
            if low is not None:
                value = f"{low:.4g}" if low == high else f"{low:.4g} to {high:.4g}"
                yield ProvenanceRow(f"{label} rate" if label else _words(name), value, *_kind_and_source(str(source)))
    if len(found) > MOST_SOURCES:
        more = f"{len(found) - MOST_SOURCES} more sources, in the column outcomes_source"
        yield ProvenanceRow("further rates", "", _kind_and_source(str(found[-1]["outcomes_source"]))[0], more)


def _kind_and_source(text: str) -> tuple[str, str]:
    """Split words such as 'published: PPD Table 2' into kind and source; of several kinds, the least certain one.

    >>> _kind_and_source("published: PPD Table 2"), _kind_and_source("assumed")
    (('published', 'PPD Table 2'), ('assumed', 'set in the scenario'))
    >>> _kind_and_source("assumed efficiencies of the published peaks of h100")
    ('assumed', 'assumed efficiencies of the published peaks of h100')
    """
    heads = [part.partition(":")[0].strip() for part in text.split("; ")]
    named = [kind for kind in KINDS if kind in heads] or [kind for kind in KINDS if kind in re.findall(r"\w+", text)]
    alone = heads[0] in KINDS and len(named) == 1
    source = text.removeprefix(heads[0]).removeprefix(":").removeprefix(";").strip() if alone else text
    return (named[-1] if named else "assumed"), source or "set in the scenario"


def _given(tables: Mapping[str, Any]) -> Iterator[ProvenanceRow]:
    """Values set in the scenario: choices of the question, and numbers of costs without a source."""
    swept = {path: _axis_values(axis.values) for axis in Grid(dict(tables), check=False).axes for path in [axis.path]}
    listed = "scenario", "cost", "cluster"
    methods = scenario_file.method_tables(tables)
    for number, table in enumerate(methods, 1):
        own = {key: value for key, value in table.items() if key != "name"}
        if len(methods) == 1:
            yield from _rows_of("method", "method", own, swept)
            continue
        plain = {key: value for key, value in own.items() if not isinstance(value, Mapping) and f"method.{key}" not in swept}
        said = ", ".join(f"{key} = {_plain(value)}" for key, value in plain.items())
        yield ProvenanceRow(f"method {number}: {table['name']}", said, "chosen", "set in the scenario")
        yield from _rows_of(f"method {number}", "method", {key: own[key] for key in own if isinstance(own[key], Mapping)}, swept)
    for section in listed:
        if isinstance(tables.get(section), Mapping):
            yield from _rows_of(section, section, tables[section], swept)
    for path, values in swept.items():
        section = path.partition(".")[0]
        if section != "outcomes":
            yield ProvenanceRow(path, values, _kind_of(section, path.rpartition(".")[2], None), "swept in the scenario")


_NO_INPUTS = ("name", "description", "notes", "views", "seed", "replications", "event_replications")
"""Keys of [scenario] that are no inputs of the model, or are among the settings."""
_COST_NAMES = ("kind", "batch", "context", "placement", "unit_kind", "mode", "draft_mode")


def _rows_of(section: str, kind: str, table: Mapping[str, Any], swept: Mapping[str, str]) -> Iterator[ProvenanceRow]:
    for key, value in table.items():
        if isinstance(value, Mapping):
            if key == "cost":
                yield from _rows_of(f"{section}.{key}", "cost", value, swept)
            continue
        if (kind == "scenario" and key in _NO_INPUTS) or f"{kind}.{key}" in swept:
            continue
        yield ProvenanceRow(f"{section}.{key}", _plain(value), _kind_of(kind, key, value), "set in the scenario")


def _kind_of(section: str, key: str, value: Any) -> str:
    """Kind of a value that a scenario sets: numbers of [cost] are assumed, unless they say what is asked."""
    asked = key in (*COSTS, *DEVICES, *CONDITIONS, *_COST_NAMES) or isinstance(value, str | bool)
    return "assumed" if section == "cost" and not asked else "chosen"


# --- reproduction -------------------------------------------------------------------------------------------------------


def _facts(report: Report, about: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    settings = report.tables["scenario"]
    defaults = {field.name: field.default for field in fields(cases.Settings)}
    yield "seed", _plain(settings.get("seed", defaults["seed"]))
    for view, count in dict(about.get("replications", {})).items():
        yield f"replications, {view}", f"{count:,}" if isinstance(count, int) else str(count)
    yield "points", _plain(about.get("points", ""))
    yield "rows", f"{report.rows:,}"
    yield "platform", str(about.get("platform", ""))
    yield "fingerprint of the scenario and its files", str(about.get("fingerprint", ""))


def _reproduce(report: Report, about: Mapping[str, Any]) -> Iterator[CodeLines]:
    """Command and files that give the same results."""
    tables = report.tables
    version = dict(about.get("versions", {})).get("decodesim")
    by = f"with decodesim {version}" if version else "with the same version of the program"
    modules = about.get("methods")
    more = "".join(f" {registry.OPTION} {shlex.quote(str(name))}" for name in modules) if isinstance(modules, list) else ""
    name, files = _bundled_name(tables), about.get("files")
    if name is None:
        where = " in the folder in which the run was started" if files else ""
        yield CodeLines(scenario_toml.text_of(tables), f"The scenario with all overrides. Save it as scenario.toml{where}:", "toml")
    yield CodeLines(f"sim run {shlex.quote(name) if name else 'scenario.toml'}{more}", f"Run it {by}:", "sh")
    if isinstance(files, Mapping) and files:
        lines = [f"{digest or 'missing':64}  {path}" for path, digest in itertools.islice(files.items(), MOST_ROWS)]
        yield CodeLines("\n".join(lines), "It reads these files; the first column is their SHA-256:", "text")


def _bundled_name(tables: Mapping[str, Any]) -> str | None:
    """Name of the bundled scenario with exactly these tables."""
    name = tables["scenario"].get("name")
    return str(name) if name in scenario_file.names() and scenario_file.load(str(name)) == tables else None
