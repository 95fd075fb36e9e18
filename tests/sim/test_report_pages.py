"""Pages of reports: well-formed, accessible, self-contained, and safe with any text."""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from markdown_it import MarkdownIt

import figures
import sim.reporting
from figures.common.style import canvas
from model.base.checks import ParameterError
from sim.reporting import embedded_svg, html_page, markdown_page
from sim.reporting.report_document import (
    KINDS,
    MARKS,
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
    printable,
)
from tests.support import pages

STYLE = (Path(str(sim.reporting.__file__)).parent / "templates" / "report.css").read_text(encoding="utf-8")
HOSTILE = '<script>alert(1)</script> "]]> --> &amp; {{ 7 * 7 }} {% raw %} `x` | a | [l](http://e.vil) ![i](http://e.vil/x.png) \x00'
TEXT = st.one_of(
    st.text(max_size=40), st.sampled_from([HOSTILE, "# x", "1. x", "- x", "> x", "a\nb", "\\", "```", "+1", "=", "~~~"])
)


def drawn(title: str = "Speed-up by batch") -> SvgFigure:
    figure, axes = canvas(4, 3, (0.2, 0.2, 0.7, 0.7))
    axes.plot([1, 2], [1, 1.5], label="a < b")
    axes.set(title=title, xlabel="batch", ylabel="speed-up")
    axes.legend()
    return embedded_svg.of_text(figures.svg(figure), "speedup")


def whole(text: str = "a text", figure: SvgFigure | None = None) -> ReportDocument:
    """A document with a part of every kind; `text` is everywhere that a user's words may be."""
    said = text if text.strip() else "blank"
    shown = figure or SvgFigure('<svg xmlns="http://www.w3.org/2000/svg"><path id="a" d="M 0 0"/></svg>', said, said)
    table = DataTable(
        said, [said, "speed-up"],
        [[text, TableCell("1.5", "best")], [TableCell(text, "tie"), None], ["x", TableCell("0.9", "warning")]],
        [text, "plain = 1"], whole=text, count=700, notes=[text],
    )  # fmt: skip
    parts = [Paragraph(text), Bullets((text, text)), table, shown, shown, CodeLines(text, text, text)]
    return ReportDocument(
        said, said, said, [Section(said, parts)], [text], [text], [ProvenanceRow(text, text, kind, text) for kind in KINDS],
        [CodeLines(text, text)], {text: text}, {"seed": text},
    )  # fmt: skip


def test_page_holds_every_part() -> None:
    root = pages.check(html_page.render(whole("what was said", drawn())))
    text = pages.words(root)
    for said in (
        "Question",
        "Verdict",
        "Provenance",
        "Reproduce",
        "Versions",
        "Figure 2. Speed-up by batch",
        "1.5 best",
        "tie",
        "0.9 warning",
        "The first 3 of 700 rows are shown; the whole table is in what was said.",
        *(f"{kind}: {KINDS[kind]}" for kind in KINDS),
    ):
        assert said in text, said
    assert [pages.words(each) for each in root.iter("th") if each.get("scope") == "col"][:2] == [
        "what was said [what was said]", "speed-up [plain = 1]",
    ]  # fmt: skip
    descriptions = [pages.words(each) for each in root.iter(f"{pages.SVG}desc")]
    assert descriptions == ["Speed-up by batch. speed-up against batch; series: a < b"] * 2


@given(text=TEXT)
@settings(max_examples=60, deadline=None)
def test_any_text_is_shown_as_it_is(text: str) -> None:
    """Pages are well-formed with any text, which appears as words and never as markup."""
    document = whole(text)
    root = pages.check(html_page.render(document))
    shown = pages.SPACE.sub(" ", printable(text)).strip() or "blank"
    [title] = root.iter("h1")
    assert pages.words(title) == shown
    [line] = root.findall(".//p[@class='verdict']")
    assert pages.words(line) == shown
    assert len([*root.iter("svg"), *root.iter(f"{pages.SVG}svg")]) == 2


@given(text=TEXT)
@settings(max_examples=60, deadline=None)
def test_any_text_is_shown_as_it_is_in_markdown(text: str) -> None:
    page, files = markdown_page.render(whole(text))
    tokens = MarkdownIt("commonmark", {"html": True}).enable(["table", "strikethrough"]).parse(page)
    inline = [inner for token in tokens for inner in token.children or ()]
    assert {token.type for token in tokens} <= {
        "heading_open", "heading_close", "paragraph_open", "paragraph_close", "inline", "bullet_list_open", "bullet_list_close",
        "list_item_open", "list_item_close", "fence", "blockquote_open", "blockquote_close",
        *(f"{name}_{end}" for name in ("table", "thead", "tbody", "tr", "th", "td") for end in ("open", "close")),
    }  # fmt: skip
    assert {token.type for token in inline} <= {
        "text",
        "text_special",
        "strong_open",
        "strong_close",
        "em_open",
        "em_close",
        "image",
    }
    assert [str(token.attrs["src"]) for token in inline if token.type == "image"] == [*files]
    shown = " ".join(printable(text).split()) or "blank"
    for heading, found in pairs_of_headings(tokens):
        if heading == "Question":
            assert found == shown
    fences = [token.content.rstrip("\n") for token in tokens if token.type == "fence"]
    assert fences == ["\n".join(printable(line) for line in text.rstrip().splitlines())] * 2


def pairs_of_headings(tokens: list[Any]) -> list[tuple[str, str]]:
    """Headings of a parsed page with the text of the paragraph that follows."""
    texts = [
        (token.type, "".join(each.content for each in after.children or ()))
        for token, after in pairwise(tokens) if token.type in ("heading_open", "paragraph_open")
    ]  # fmt: skip
    return [(said, found) for (one, said), (other, found) in pairwise(texts) if one == "heading_open" and other != one]


def test_colours_have_enough_contrast() -> None:
    found = [*pages.colour_pairs(STYLE)]
    assert {"html", "a", ".warning", ".best", ".tie", ".small, figcaption", "pre"} <= {
        selector.partition(" {")[0] for _, selector, *_ in found
    }
    assert {scheme for scheme, *_ in found} == {"light", "dark"}
    low = {(scheme, selector): round(pages.contrast(ink, paper), 2) for scheme, selector, ink, paper in found
           if pages.contrast(ink, paper) < 4.5}  # fmt: skip
    assert low == {}


def test_paper_is_a4_and_tables_repeat_their_headings() -> None:
    printed = STYLE[STYLE.index("@page") :]
    for rule in ("size: A4", "display: table-header-group", "break-inside: avoid", "nav { display: none; }", "overflow: visible"):
        assert rule in printed, rule


SVG_TEXT = (
    '<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" width="10pt" viewBox="0 0 9 9">{}</svg>'
)
ATTACKS = (
    "<script>alert(1)</script>", '<path onload="alert(1)" d="M 0 0"/>', '<image href="http://e.vil/x.png"/>',
    '<image xlink:href="http://e.vil/x.png"/>', '<use href="http://e.vil/x.svg#a"/>', '<path style="fill: url(http://e.vil/)"/>',
    '<path style="fill: URL( &quot;http://e.vil/&quot; )"/>', '<style>@import "http://e.vil/"; * {display: none}</style>',
    '<foreignObject><iframe xmlns="http://www.w3.org/1999/xhtml" src="http://e.vil/"/></foreignObject>', '<a href="http://e.vil/"/>',
    '<image href="data:image/svg+xml;base64,AAAA"/>', '<set attributeName="href" to="http://e.vil/"/>',
    '<path fill="url(#absent)"/>', '<path style="background: u\\72l(http://e.vil/)"/>', '<g xmlns="http://e.vil/"><path/></g>',
    '<path clip-path="url(http://e.vil/#a)"/>',
)  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS)
def test_figures_bring_nothing_from_outside(attack: str) -> None:
    figure = embedded_svg.of_text(SVG_TEXT.format(f"{attack}<path d='M 1 1'/>"), "figure")
    page = html_page.render(whole("x", figure))
    pages.check(page)
    shown = page[page.index("<figure>") :]
    assert "e.vil" not in shown
    assert "M 1 1" in shown
    assert "e.vil" not in next(iter(markdown_page.render(whole("x", figure)).figures.values()))


def test_identifiers_of_figures_do_not_clash() -> None:
    """The same figure twice, and figures whose references cross, keep their own definitions."""
    inner = '<defs><path id="a" d="M 1 1"/><clipPath id="c"><rect/></clipPath></defs><use xlink:href="#a" clip-path="url(#c)"/>'
    figure = embedded_svg.of_text(SVG_TEXT.format(inner), "figure")
    root = pages.check(html_page.render(whole("x", figure)))
    uses = [each.attrib for each in root.iter(f"{pages.SVG}use")]
    assert uses == [{"href": f"#f{n}-a", "clip-path": f"url(#f{n}-c)"} for n in (1, 2)]


@pytest.mark.parametrize("text", ["", "<html/>", "<svg", "<!DOCTYPE svg [<!ENTITY a 'b'>]>" + SVG_TEXT.format("&a;"), "\x00"])
def test_what_is_no_figure_is_refused(text: str) -> None:
    with pytest.raises(ParameterError, match=r"figure mine (is not SVG|must have no XML entities)"):
        embedded_svg.of_text(text, "mine")


@pytest.mark.parametrize("depth", [99, 100, 5000])
def test_deeply_nested_figures_are_refused(depth: int) -> None:
    deep = SVG_TEXT.format("<g>" * depth + "</g>" * depth)
    if depth < embedded_svg.DEEPEST:
        assert embedded_svg.embedded(embedded_svg.of_text(deep, "deep"), "f1").count("<g") == depth
        return
    with pytest.raises(ParameterError, match="figure deep must nest elements at most 100 deep"):
        embedded_svg.of_text(deep, "deep")


def test_long_tables_are_cut_and_say_where_they_are_whole() -> None:
    seen = []

    def rows() -> Any:
        for number in range(MOST_ROWS + 7):
            seen.append(number)
            yield [number, "x"]

    table = DataTable("long", ("a", "b"), rows(), whole="runs/x/results.csv")
    assert len(table.shown) == MOST_ROWS
    assert table.remarks == (f"The first {MOST_ROWS} of {MOST_ROWS + 7} rows are shown; the whole table is in runs/x/results.csv.",)
    assert DataTable("short", ("a",), [[1]]).remarks == ()


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: DataTable("t", (), ()), "at least one column"),
        (lambda: DataTable("t", ("a", "b"), [[1, 2], [1]]), "must have 2 values, got 1"),
        (lambda: DataTable("t", ("a", "b"), [], ("s",)), "must have 2 units, got 1"),
        (lambda: SvgFigure("<svg/>", "caption", " "), "text alternative of a figure"),
        (lambda: SvgFigure("<svg/>", "", "drawn"), "caption of a figure"),
        (lambda: ReportDocument("t", " ", "v"), "question of a report must be a text"),
        (lambda: TableCell("1", "bold"), "unknown mark of a cell 'bold'"),
        (lambda: ProvenanceRow("a", "1", "guessed"), "unknown kind of provenance 'guessed'"),
    ],
)
def test_records_check_themselves(make: Any, said: str) -> None:
    with pytest.raises(ParameterError, match=said):
        make()


def test_marks_are_words_too() -> None:
    """No meaning depends on colour alone."""
    for mark, word in MARKS.items():
        table = DataTable("t", ("a", "b"), [["x", TableCell("1", mark)]])
        document = ReportDocument("t", "q", "v", [Section("s", [table])])
        [cell] = [each for each in pages.check(html_page.render(document)).iter("td") if mark in (each.get("class") or "").split()]
        assert pages.words(cell) == f"1 {word}"
        assert f"({word})" in markdown_page.render(document).text.replace("\\", "")


def test_columns_of_numbers_are_aligned_at_the_right() -> None:
    table = DataTable("t", ("a", "b", "c", "d"), [["x", 1, "1.2 ±0.1", "-"], ["2", None, "−3", ""]])
    assert table.numeric == (False, True, True, False)


def test_empty_parts_are_left_out() -> None:
    bare = ReportDocument("t", "q", "v")
    page = html_page.render(bare)
    assert [pages.words(each) for each in pages.check(page).iter("h2")] == ["Question", "Verdict", "Contents"]
    assert re.findall("^## (.*)", markdown_page.render(bare).text, flags=re.MULTILINE) == ["Question", "Verdict"]
    noted = html_page.render(replace(bare, notes=["n"]))
    assert [pages.words(each) for each in pages.check(noted).iter("h2")][-1] == "Notes"
