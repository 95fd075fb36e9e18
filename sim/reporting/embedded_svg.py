"""SVG figures made safe to embed in a page: allowed elements only, nothing fetched or executed, and identifiers that do not clash.

A figure's file may have been edited since it was drawn, so it is parsed and written anew: what is not on the lists here is left
out.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

from model.base import bounded_files, checks
from model.base.checks import ParameterError
from sim.reporting.report_document import SvgFigure, printable

SVG = "http://www.w3.org/2000/svg"
XLINK_HREF = "{http://www.w3.org/1999/xlink}href"
DESCRIPTION = "{http://purl.org/dc/elements/1.1/}description"
MOST_BYTES = 2**23
"""Maximum size of a figure [bytes]; a larger one is named, not shown."""
DEEPEST = 100
"""Maximum nesting depth of elements: a deeper tree could not be written by recursion."""
ELEMENTS = frozenset({
    "svg", "g", "defs", "path", "use", "rect", "circle", "ellipse", "line", "polyline", "polygon", "text", "tspan", "clipPath",
    "linearGradient", "radialGradient", "stop", "pattern", "image", "symbol", "marker", "mask",
})  # fmt: skip
ATTRIBUTES = frozenset({
    "id", "style", "d", "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "rx", "ry", "fx", "fy", "dx", "dy", "width",
    "height", "viewBox", "points", "transform", "fill", "fill-opacity", "fill-rule", "stroke", "stroke-width", "stroke-opacity",
    "stroke-dasharray", "stroke-linecap", "stroke-linejoin", "stroke-miterlimit", "opacity", "clip-path", "clip-rule",
    "clipPathUnits", "mask", "gradientUnits", "gradientTransform", "offset", "stop-color", "stop-opacity", "patternUnits",
    "patternTransform", "patternContentUnits", "preserveAspectRatio", "font-family", "font-size", "font-style", "font-weight",
    "text-anchor", "dominant-baseline", "marker-start", "marker-mid", "marker-end", "markerWidth", "markerHeight", "refX", "refY",
    "orient", "href",
})  # fmt: skip
_LINE_ENDS = "stroke-linejoin: round; stroke-linecap: butt"
"""Style that matplotlib gives to all elements; in a page it would apply to all figures, so it goes to the root of each."""
_URL = re.compile(r"url\(\s*(['\"]?)([^)'\"]*)\1\s*\)", re.IGNORECASE)
_OUTSIDE = re.compile(r"url\(|@import|expression\(|javascript:|\\", re.IGNORECASE)
_SIZE = re.compile(r"[0-9.]+(px|pt|mm|cm|in)?")
_PNG = re.compile(r"data:image/png;base64,[A-Za-z0-9+/=\s]+")


def load(path: Path) -> SvgFigure:
    """Read a figure that `figures.save` has written, with its caption and text alternative."""
    try:
        text = bounded_files.read_text(path, MOST_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        raise ParameterError(f"figure {path} cannot be read: {getattr(error, 'strerror', None) or 'not text in UTF-8'}") from None
    return of_text(text, path.stem)


def of_text(text: str, name: str = "figure") -> SvgFigure:
    """Return the figure of an SVG text: caption from its title, text alternative from its description, else from its name.

    >>> figure = of_text('<svg xmlns="http://www.w3.org/2000/svg"><title>Speed-up</title></svg>', "speedup_by_batch")
    >>> figure.caption, figure.alternative
    ('Speed-up', 'Speed-up.')
    """
    root = _parsed(text, name)
    title = " ".join((root.findtext(f"{{{SVG}}}title") or "").split()) or name.replace("_", " ").capitalize()
    said = next((" ".join((each.text or "").split()) for each in root.iter(DESCRIPTION)), "")
    stop = "" if title.endswith((".", "?", "!")) else "."
    return SvgFigure(text, title, f"{title}{stop} {said}".strip(), name)


def _parsed(text: str, name: str) -> Element:
    """Root of an SVG text. Entities are refused: a few of them could expand to more than the memory."""
    if "<!ENTITY" in text:
        raise ParameterError(f"figure {name} must have no XML entities; draw it again")
    try:
        root = ElementTree.fromstring(text)
    except (ElementTree.ParseError, ValueError, RecursionError) as error:
        raise ParameterError(f"figure {name} is not SVG ({error}); draw it again") from None
    if root.tag != f"{{{SVG}}}svg":
        raise ParameterError(f"figure {name} is not SVG: its root is {root.tag[:80]}; draw it again")
    identifiers = [each.get("id") for each in root.iter() if each.get("id")]
    if len(identifiers) > len({*identifiers}):
        twice = next(each for each in identifiers if identifiers.count(each) > 1)
        raise ParameterError(f"figure {name} must use an identifier once, got {checks.shown(twice)} twice; draw it again")
    level = [root]
    for _ in range(DEEPEST):
        level = [child for each in level for child in each]
    if level:
        raise ParameterError(f"figure {name} must nest elements at most {DEEPEST} deep; draw it again")
    return root


def embedded(figure: SvgFigure, prefix: str) -> str:
    """SVG element of a figure for a page, as text: identifiers begin with `prefix`, and its title and description are named.

    >>> text = '<svg xmlns="http://www.w3.org/2000/svg"><script>alert(1)</script><path id="a" onclick="b()" d="M 0 0"/></svg>'
    >>> print(embedded(SvgFigure(text, "Speed-up", "Speed-up by batch."), "f1"))  # doctest: +NORMALIZE_WHITESPACE
    <svg xmlns="http://www.w3.org/2000/svg" style="stroke-linejoin: round; stroke-linecap: butt" role="img"
     aria-labelledby="f1-title f1-desc"><title id="f1-title">Speed-up</title><desc id="f1-desc">Speed-up by batch.</desc><path
     id="f1-a" d="M 0 0" /></svg>
    """
    source = _parsed(figure.svg, figure.name or "figure")
    names = {str(each.get("id")) for each in _allowed(source) if each.get("id")}
    root = _copied(source, prefix, names)
    for key in ("width", "height"):  # the page sets the width; the shape is that of the view box
        if root.get("viewBox"):
            root.attrib.pop(key, None)
    root.set("style", f"{_LINE_ENDS}{_widest(source)}")
    root.set("role", "img")
    root.set("aria-labelledby", f"{prefix}-title {prefix}-desc")
    for place, (tag, words) in enumerate((("title", figure.caption), ("desc", figure.alternative))):
        said = Element(tag, {"id": f"{prefix}-{tag}"})
        said.text = printable(words)
        root.insert(place, said)
    root.attrib = {"xmlns": SVG, **root.attrib}
    return ElementTree.tostring(root, encoding="unicode")


def _allowed(root: Element) -> Iterator[Element]:
    """Elements that are copied: the root, and allowed ones within allowed ones."""
    todo = [root]
    while todo:
        element = todo.pop()
        yield element
        todo += [child for child in element if str(child.tag).removeprefix(f"{{{SVG}}}") in ELEMENTS]


def _widest(source: Element) -> str:
    """Style that keeps a figure from being drawn larger than its own size."""
    size = _SIZE.fullmatch(source.get("width") or "")
    return f"; max-width: {size[0]}{'' if size[1] else 'px'}" if size and source.get("viewBox") else ""


def standing_alone(figure: SvgFigure) -> str:
    """SVG file of a figure, with the size of the original and the same elements as `embedded`."""
    source = _parsed(figure.svg, figure.name or "figure")
    text = embedded(figure, "figure")
    sizes = "".join(f' {key}="{source.get(key)}"' for key in ("width", "height") if _SIZE.fullmatch(source.get(key) or ""))
    opening = f'<svg xmlns="{SVG}"'
    sized = "" if not source.get("viewBox") else sizes  # else `embedded` has kept them
    return f'<?xml version="1.0" encoding="utf-8"?>\n{opening}{sized}{text.removeprefix(opening)}\n'


def _copied(element: Element, prefix: str, names: set[str]) -> Element:
    """Copy of an element with allowed attributes and children, without namespaces in its names."""
    root = Element("svg", dict(_attributes(element, prefix, names)))
    todo = [(element, root)]
    while todo:
        source, made = todo.pop()
        for child in source:
            tag = str(child.tag).removeprefix(f"{{{SVG}}}")
            if tag not in ELEMENTS:
                continue
            found = Element(tag, dict(_attributes(child, prefix, names)))
            if tag in ("text", "tspan"):
                found.text, found.tail = child.text, child.tail
            made.append(found)
            todo.append((child, found))
    return root


def _attributes(element: Element, prefix: str, names: set[str]) -> Iterator[tuple[str, str]]:
    """Allowed attributes of an element; references point into the figure itself or hold a PNG image."""
    for key, value in element.attrib.items():
        name = "href" if key == XLINK_HREF else key
        if name not in ATTRIBUTES:
            continue
        if name == "id":
            yield name, f"{prefix}-{value}"
        elif name == "href":
            if value.startswith("#") and value[1:] in names:
                yield name, f"#{prefix}-{value[1:]}"
            elif _PNG.fullmatch(value) and element.tag == f"{{{SVG}}}image":
                yield name, value
        else:
            own = _URL.sub(lambda found: _inside(found[2], prefix, names), value)
            if not _OUTSIDE.search(own.replace(f"url(#{prefix}-", "")):
                yield name, " ".join(own.split())


def _inside(target: str, prefix: str, names: set[str]) -> str:
    """Reference to an identifier of the same figure; another reference becomes `none`."""
    return f"url(#{prefix}-{target[1:]})" if target.startswith("#") and target[1:] in names else "none"
