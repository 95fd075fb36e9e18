"""HTML page of a report: one file without scripts, fonts or references outside itself, for screens and A4 paper.

The page is HTML and well-formed XML alike. All text is escaped by the template engine.
"""

from __future__ import annotations

from itertools import count

import jinja2
from markupsafe import Markup

from sim.reporting import embedded_svg
from sim.reporting.report_document import MARKS, ReportDocument, SvgFigure, printable

FIXED_SECTIONS = (("Notes", "notes"), ("Provenance", "provenance"), ("Reproduce", "reproduce"), ("Versions", "versions"))
"""Headings of the sections after those of the document, and their anchors: names of fields of `ReportDocument`."""


def render(document: ReportDocument) -> str:
    """Return the page of a report.

    >>> page = render(ReportDocument("<b>", "Does it pay?", "K = 3 is fastest."))
    >>> "<h1>&lt;b&gt;</h1>" in page, "<script" in page
    (True, False)
    """
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sim.reporting"), autoescape=True, undefined=jinja2.StrictUndefined, finalize=_printable
    )
    environment.filters["kind"] = lambda part: type(part).__name__
    environment.globals |= {"next_figure": count(1).__next__, "embedded": _embedded, "marks": MARKS}
    page: str = environment.get_template("report.html").render(document=document, contents=_contents(document))
    return page


def _printable(value: object) -> object:
    """Replace characters that a page must not hold; markup is left as it is."""
    return printable(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _embedded(figure: SvgFigure, prefix: str) -> Markup:
    return Markup(embedded_svg.embedded(figure, prefix))  # written anew from a list of allowed elements


def _contents(document: ReportDocument) -> list[tuple[str, str]]:
    """Headings and their anchors."""
    own = [(section.title, f"part-{number}") for number, section in enumerate(document.sections, 1)]
    return own + [(title, anchor) for title, anchor in FIXED_SECTIONS if getattr(document, anchor)]
