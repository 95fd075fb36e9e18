"""Markdown page of a report, as GitHub and GitLab show it; figures are SVG files next to the page, which these sites show.

They show no figures embedded as data, and a page with embedded figures would be too long to paste. All text is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import jinja2

from sim.reporting import embedded_svg
from sim.reporting.report_document import (
    MARKS,
    Bullets,
    CodeLines,
    DataTable,
    Paragraph,
    Part,
    ReportDocument,
    SvgFigure,
    TableCell,
    printable,
)

_SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&!])|(?<=\w)(:)(?=//)")
_LINE_START = re.compile(r"^(\s*)([-+]|\d{1,9}(?=[.)](?:\s|$)))")


class MarkdownPage(NamedTuple):
    """Text of a page, and the figures that it shows: SVG text by path relative to the page."""

    text: str
    figures: Mapping[str, str]


class _Written(str):
    """Markdown that is not escaped again."""


def render(document: ReportDocument, folder: str = "report_figures") -> MarkdownPage:
    """Return the page of a report, and its figures in a folder next to the page.

    >>> print(render(ReportDocument("Batch * of 8", "Does it pay?", "Yes.")).text.splitlines()[0])
    # Batch \\* of 8
    """
    figures: dict[str, str] = {}

    def rendered(part: Part) -> _Written:
        if isinstance(part, SvgFigure):
            path = f"{folder}/figure-{len(figures) + 1}.svg"
            figures[path] = embedded_svg.standing_alone(part)
            caption = f"Figure {len(figures)}. {part.caption}"
            return _Written(f"![{escaped(part.alternative)}]({quote(path)})\n\n*{escaped(caption)}*")
        return _RENDERERS[type(part)](part)

    environment = jinja2.Environment(  # values are escaped for Markdown, not for HTML
        loader=jinja2.PackageLoader("sim.reporting"), autoescape=False, undefined=jinja2.StrictUndefined,
        finalize=lambda value: value if isinstance(value, _Written) else escaped(str(value)),
    )  # fmt: skip
    environment.globals |= {"rendered": rendered, "bullets": _bullets}
    text: str = environment.get_template("report.md").render(document=document)
    return MarkdownPage(text.rstrip() + "\n", figures)


def escaped(text: str) -> str:
    """Text in one line that Markdown shows as it is.

    >>> print(escaped("1. *batch* <b> | [x](http://y)"))
    1\\. \\*batch\\* \\<b\\> \\| \\[x\\](http\\://y)
    """
    line = _inline(text)
    return _LINE_START.sub(lambda found: f"{found[1]}{found[2]}\\" if found[2].isdigit() else f"{found[1]}\\{found[2]}", line)


def _inline(text: str) -> str:
    """Escaped text that does not begin a line."""
    return _SPECIAL.sub(lambda found: f"\\{found[0]}", " ".join(printable(text).split()))


def _bullets(items: Sequence[str]) -> _Written:
    return _Written("\n".join(f"* {escaped(item)}" for item in items))


def _table(table: DataTable) -> _Written:
    numeric = table.numeric
    lines = [f"**{escaped(table.caption)}**", ""]
    lines.append(_row([_inline(name) for name in table.headings]))
    lines.append("|" + "|".join("---:" if right else "---" for right in numeric) + "|")
    lines += [_row([_cell(each) for each in row]) for row in table.shown]
    for remark in table.remarks:
        lines += ["", escaped(remark)]
    return _Written("\n".join(lines))


def _row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: TableCell) -> str:
    mark = f" ({_inline(MARKS[cell.mark])})" if cell.mark else ""
    text = _inline(cell.text)
    return f"**{text}**{mark}" if cell.mark == "best" else f"{text}{mark}"


def _code(part: CodeLines) -> _Written:
    """Fenced lines; the fence is longer than any in the text."""
    text = "\n".join(printable(line) for line in part.text.rstrip().splitlines())
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    language = part.language if part.language.isalnum() else ""
    return _Written("\n".join([*([escaped(part.caption), ""] if part.caption else []), f"{fence}{language}", text, fence]))


_RENDERERS: dict[type, Callable[[Any], _Written]] = {
    Paragraph: lambda part: _Written(escaped(part.text)), Bullets: lambda part: _bullets(part.items), DataTable: _table,
    CodeLines: _code,
}  # fmt: skip
