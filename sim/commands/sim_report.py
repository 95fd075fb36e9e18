"""`sim report`: one file that answers a question, to hand on: of a run, a comparison, or the JSON document of another command.

Commands write JSON documents whose key `kind` says what they are. A builder makes a `ReportDocument` of each kind; `BUILDERS` lists
them. A new kind of report is one function with the signature of `Builder`, and one line there.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Protocol

import typer

if TYPE_CHECKING:
    from sim.reporting.report_document import ReportDocument, SvgFigure


class Builder(Protocol):
    """Function that makes the report of a JSON document.

    Parameters
    ----------
    content
        The document, parsed; its key `kind` is the builder's.
    path
        The file that it was read from: figures and tables may be next to it. Messages to the user name it.

    Raises
    ------
    model.base.checks.ParameterError
        In one line, if the document is not as its command writes it.
    """

    def __call__(self, content: Mapping[str, Any], path: Path) -> ReportDocument: ...


BUILDERS: dict[str, str] = {
    "run": "sim.commands.sim_report:run_document",
    "comparison": "sim.commands.sim_report:comparison_document",
    "advice": "sim.commands.sim_report:advice_document",
    "audit": "sim.reporting.audit_document:of_audit",
    "serving": "sim.commands.sim_report:serving_document",
    "serving-run": "sim.commands.sim_report:serving_run_document",
    "explanation": "sim.reporting.explanation_document:of_explanation",
}
"""Builder of each kind of document, as MODULE:FUNCTION, which is imported when it is used."""
FOLDERS: dict[str, str] = {"serving.json": "serving-run", "metadata.json": "run", "comparison.json": "comparison"}
"""Files by which a directory of results is known, the first before others, and the kind of each."""
FORMATS = {"html": (".html", ".htm"), "md": (".md", ".markdown")}
"""Formats, and the endings of their files; the first is the default."""


def report(
    source: Annotated[
        Path,
        typer.Argument(
            help="Directory of a run or of `sim compare --figures`, or a JSON document that a command printed by --json."
        ),
    ],
    out: Annotated[
        Path | None, typer.Option("-o", "--out", help="File to write, ending in .html or .md. Default: report.html.")
    ] = None,
    format_: Annotated[
        str | None, typer.Option("--format", help="html or md. Default: by the ending of the file, else html.")
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--methods", metavar="MODULE", help="Dotted path of a module with a method of your own; it is imported."),
    ] = None,
) -> None:
    """Write a report to hand on: question, verdict, figures, tables, provenance of every input, versions, how to reproduce it.

    sim report runs/ppd-figures-3-and-4-0123abcd -o report.html

    sim report pictures --format md

    An HTML report is one file without scripts or outside references; it prints on A4. A Markdown report keeps its figures as SVG
    files in a folder next to it, because GitHub and GitLab show no embedded ones. An existing report is overwritten.
    """
    path, kind = target(out, format_)
    print(write(document(source), path, kind))


def target(out: Path | None, given: str | None) -> tuple[Path, str]:
    """File of a report and its format, by `--format` or the ending of the file."""
    from model.base import checks
    from model.base.checks import ParameterError

    if given is not None:
        checks.one_of("--format", given, FORMATS)
    if out is None:
        return Path(f"report{FORMATS[given or 'html'][0]}"), given or "html"
    if out.is_dir():
        raise ParameterError(f"the report must be a file, and {out} is a directory; name a file in it with -o")
    ended = next((name for name, ends in FORMATS.items() if out.suffix.lower() in ends), None)
    if ended is None and given is None:
        raise ParameterError(f"the report must be a file ending in .html or .md, got {out}; name one, or give --format")
    if ended is not None and given is not None and ended != given:
        raise ParameterError(f"--format must agree with the ending of the file, got {given} and {out}; leave one out")
    return out, given or str(ended)


def write(found: ReportDocument, out: Path, kind: str) -> Path:
    """Write a report as a page, and return its path."""
    from model.base import whole_files
    from sim.reporting import html_page, markdown_page

    if kind == "html":
        return whole_files.write_text(out, html_page.render(found))
    folder = f"{out.stem}_figures"
    page = markdown_page.render(found, folder)
    for name, svg in page.figures.items():
        whole_files.write_text(out.parent / name, svg)
    for path in sorted((out.parent / folder).glob("figure-*.svg")):  # of an earlier report with more figures
        if f"{folder}/{path.name}" not in page.figures:
            path.unlink(missing_ok=True)
    return whole_files.write_text(out, page.text)


def document(source: str | Path) -> ReportDocument:
    """Return the report of a directory or a JSON document, before it is rendered."""
    from model.base import bounded_files, checks
    from model.base.checks import ParameterError

    path = Path(source)
    if not path.exists():
        raise ParameterError(f"there is no {path}; name the directory of a run, or a JSON document of a command")
    if path.is_dir():
        named = next((path / name for name in FOLDERS if (path / name).is_file()), None)
        if named is None:
            raise ParameterError(
                f"{path} must be the directory of a run, or of `sim compare --figures`, and has no {' or '.join(FOLDERS)}"
            )
        path = named
    try:
        content = bounded_files.json_of(bounded_files.read_bytes(path))
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or str(error)
        raise ParameterError(f"{path} cannot be read as JSON: {why}; name a document that a command printed by --json") from None
    kind = content.get("kind", FOLDERS.get(path.name)) if isinstance(content, dict) else None
    if not isinstance(kind, str):
        raise ParameterError(f"{path} must be a JSON document with a key kind ({', '.join(BUILDERS)}); name another file")
    checks.one_of(f"kind of {path.name}", kind, BUILDERS)
    if content.get("complete") is False:
        raise ParameterError(f"the run in {path.parent} is not finished; resume it with the same `sim run` command and --resume")
    module, _, function = BUILDERS[kind].partition(":")
    build: Builder = getattr(importlib.import_module(module), function)
    return build(content, path)


# --- builders of the kinds that have figures in files -------------------------------------------------------------------


def run_document(content: Mapping[str, Any], path: Path) -> ReportDocument:
    """Report of a run: of its directory, or of a summary.json in it."""
    from model.base.checks import ParameterError
    from sim.reporting import run_document as runs

    folder = path.parent
    if path.name != runs.METADATA:
        where = content.get("out")
        folder = next((each for each in (folder, Path(str(where))) if (each / runs.METADATA).is_file()), folder)
        if not (folder / runs.METADATA).is_file():
            raise ParameterError(f"{path} is the summary of a run in {where}, which is not there; name the directory of the run")
    runs.finished_run(folder)  # refused before figures are read or drawn
    return runs.of_run(folder, _figures_of_run(folder))


def _figures_of_run(folder: Path) -> list[SvgFigure]:
    """Figures in the directory of a run, in the order of its summary; drawn anew where it has none."""
    import figures as drawing
    from sim.reporting import embedded_svg

    stored = {path.name: path for path in sorted((folder / "figures").glob("*.svg"))}
    if stored:
        order = [Path(str(path)).name for path in _listed(folder / "summary.json", "figures")]
        paths = [stored[name] for name in order if name in stored]
        return [embedded_svg.load(path) for path in paths or stored.values()]
    with tempfile.TemporaryDirectory() as drawn:
        return [embedded_svg.load(path) for path in drawing.of_run(folder, target=drawn) if path.suffix == ".svg"]


def _listed(path: Path, key: str) -> list[Any]:
    """List under a key of a JSON document; empty where there is none."""
    from model.base import bounded_files

    try:
        content = bounded_files.json_of(bounded_files.read_bytes(path))
    except (OSError, ValueError):
        return []
    found = content.get(key) if isinstance(content, dict) else None
    return found if isinstance(found, list) else []


def comparison_document(content: Mapping[str, Any], path: Path) -> ReportDocument:
    """Report of a comparison of predicted and measured runs, with the figures next to its document."""
    from sim.reporting import comparison_document as comparisons
    from sim.reporting import embedded_svg

    found = sorted(path.parent.glob("*.svg"), key=comparisons.figure_order) if path.name in FOLDERS else []
    comparisons.of_comparison(content, str(path))  # refused before figures are read or drawn
    stored = [embedded_svg.load(each) for each in found]
    return comparisons.of_comparison(content, str(path), stored or _drawn_comparison(content, path))


def _drawn_comparison(content: Mapping[str, Any], path: Path) -> list[SvgFigure]:
    import figures as drawing
    from sim.reporting import comparison_document as comparisons
    from sim.reporting import embedded_svg

    table = comparisons.all_runs(content, str(path))
    with tempfile.TemporaryDirectory() as drawn:
        try:
            paths = drawing.of_comparison(table, drawn)
        except comparisons.BROKEN as error:
            raise comparisons.refusal(error, str(path)) from None
        return [embedded_svg.load(each) for each in paths if each.suffix == ".svg"]


def advice_document(content: Mapping[str, Any], path: Path) -> ReportDocument:
    """Report of advice, with the figure next to its document, of the same name; drawn from its table where there is none."""
    from sim.reporting import advice_document as advices
    from sim.reporting import embedded_svg

    advices.of_advice(content, path)  # refused before the figure is read or drawn
    stored = path.with_suffix(".svg")
    return advices.of_advice(content, path, embedded_svg.load(stored) if stored.is_file() else _drawn_advice(content, path))


def _drawn_advice(content: Mapping[str, Any], path: Path) -> SvgFigure:
    import figures
    from figures.of_runs import advised_drafts
    from sim.reporting import advice_document as advices
    from sim.reporting import embedded_svg
    from sim.reporting.report_document import written_by

    with written_by("sim advise", "advice", path):
        rows, off = content["table"], content["switch_off_batch"]
        figure = advised_drafts.of_table(rows, title=advices.subject_of(content), switch_off=off)
        return embedded_svg.of_text(figures.svg(figure), path.stem)


def serving_document(content: Mapping[str, Any], path: Path) -> ReportDocument:
    """Report of a study of a server, with figures drawn from its document."""
    from sim.reporting import serving_document as servers

    servers.of_study(content, path)  # refused before figures are drawn
    return servers.of_study(content, path, _drawn_servers(content, path))


def serving_run_document(content: Mapping[str, Any], path: Path) -> ReportDocument:
    """Report of a run of a server, with figures drawn from its results."""
    from sim.reporting import serving_document as servers

    servers.of_run(content, path)
    drawn = [_drawn_servers(each, path) for each in content["points"][: servers.MOST_POINTS]]
    return servers.of_run(content, path, drawn)


def _drawn_servers(content: Mapping[str, Any], path: Path) -> list[SvgFigure]:
    import figures
    from sim.reporting import embedded_svg
    from sim.reporting.report_document import written_by

    with written_by("sim serve", "a study of a server", path):
        return [embedded_svg.of_text(figures.svg(figure), name) for name, figure in figures.served_figures(content)]
