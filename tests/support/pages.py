"""Pages of reports as tests read them: parsed strictly as XML, their outline, references and colours."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import pairwise
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

DOCTYPE = "<!DOCTYPE html>\n"
SVG = "{http://www.w3.org/2000/svg}"
SPACE = re.compile(r"\s+")


def parsed(page: str) -> Element:
    """Root of a page; an error if it is not well-formed XML after its document type."""
    assert page.startswith(DOCTYPE)
    return ElementTree.fromstring(page.removeprefix(DOCTYPE))


def words(element: Element) -> str:
    """Text of an element with single spaces."""
    return SPACE.sub(" ", "".join(element.itertext())).strip()


def check(page: str) -> Element:
    """Check what holds of every page, and return its root."""
    root = parsed(page)
    assert root.get("lang") == "en"
    check_outline(root)
    check_references(root, page)
    for image in root.iter(f"{SVG}svg"):
        if image.get("role"):
            named = [root.find(f".//*[@id='{name}']") for name in str(image.get("aria-labelledby")).split()]
            assert len(named) == 2, image.attrib
            assert all(each is not None and words(each) for each in named)
    for table in root.iter("table"):
        assert words(table.find("caption")), "a table without a caption"  # type: ignore[arg-type]
        assert all(cell.get("scope") in ("row", "col") for cell in table.iter("th"))
        widths = {len(row) for row in table.iter("tr")}
        assert len(widths) == 1, f"rows of different lengths in {words(table.find('caption'))}"  # type: ignore[arg-type]
    return root


def check_outline(root: Element) -> None:
    """One first heading, and no level is left out."""
    levels = [int(each.tag[1]) for each in root.iter() if re.fullmatch(r"h[1-6]", str(each.tag))]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after <= before + 1 for before, after in pairwise(levels)), levels


def check_references(root: Element, page: str) -> None:
    """No identifier twice; every reference points into the page; nothing is fetched or executed."""
    identifiers = [each.get("id") for each in root.iter() if each.get("id")]
    assert len(identifiers) == len({*identifiers})
    for each in root.iter():
        tag = str(each.tag).rpartition("}")[2].lower()
        assert tag not in ("script", "link", "iframe", "object", "embed", "base", "form", "foreignobject"), tag
        for key, value in each.attrib.items():
            assert not key.lower().startswith("on"), (tag, key)
            name = key.rpartition("}")[2]
            if name in ("href", "src", "action", "data", "poster", "srcset"):
                inside = value.startswith("#") and value[1:] in identifiers
                assert inside or value.startswith("data:image/png;base64,"), (tag, key, value)
            for target in re.findall(r"url\(([^)]*)\)", value):
                assert target.startswith("#"), value
                assert target[1:] in identifiers, value
        for name in str(each.get("aria-labelledby") or "").split():
            assert name in identifiers
    style = page.partition("<style>")[2].partition("</style>")[0]
    assert "url(" not in style
    assert "@import" not in style


# --- contrast -----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    """Relative luminance of a colour #rrggbb (WCAG 2.2)."""
    parts = [int(colour[index : index + 2], 16) / 255 for index in (1, 3, 5)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours (WCAG 2.2), from 1 to 21.

    >>> round(contrast("#000000", "#ffffff"), 1), round(contrast("#777777", "#ffffff"), 2)
    (21.0, 4.48)
    """
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def colour_pairs(style: str) -> Iterator[tuple[str, str, str, str]]:
    """Yield scheme, selector, text colour and background of every rule of a style sheet that sets one of them.

    A rule that sets one only is combined with the page's other colour, and, if it sets a text colour, with every background.
    """
    light = variables(style.partition("@media")[0])
    dark = light | variables(style[style.index("prefers-color-scheme: dark") :].partition("}\n}")[0])
    rules = re.findall(r"^\s*([^{}@\n]+)\{([^{}]*)\}", style, flags=re.MULTILINE)
    found = []
    for selector, body in rules:
        own = {}
        for key in ("color", "background"):
            said = re.search(rf"(?:^|[;\s]){key}:\s*(?:var\(--([a-z-]+)\)|(#[0-9a-f]{{6}}))", body)
            own[key] = (said[1] or said[2]) if said else None
        if any(own.values()) and "svg" not in selector:
            found.append((selector.strip(), own["color"], own["background"]))
    papers = {"paper", *(paper for _, _, paper in found if paper)}
    for scheme, known in (("light", light), ("dark", dark)):
        for selector, ink, paper in found:
            # A rule without a background may stand on the page or in the answer's panel.
            for below in [paper] if paper else sorted(papers & {"paper", "panel"}):
                yield scheme, selector, known.get(ink or "ink", ink or ""), known.get(below, below)


def variables(style: str) -> dict[str, str]:
    """Colours of a style sheet by the names of its variables."""
    return dict(re.findall(r"--([a-z-]+):\s*(#[0-9a-f]{6})", style))
