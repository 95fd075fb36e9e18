"""Generated sequence with the source of each token: the draft, the target, an early prediction, and so on.

Colour and the style of the line under each token show its source.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from textwrap import wrap
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle

from figures.common.style import GREY, INK, SeriesStyle, canvas, series_styles, styled
from model.base import checks
from model.logs.recorded_decoding import Decoding

MOST_LINES, TAB = 60, 4
WORDS = {
    "draft": "the draft, accepted", "target": "the target, after a draft", "match": "early candidates: a match",
    "miss": "early candidates: a miss", "fallback": "the target, after a fallback", "again": "the target, in one more pass",
    "rollback": "the target, after a rollback", "cap": "the target, after a full draft", "token": "the target",
    "column": "the target",
}  # fmt: skip
"""Wording of the sources of tokens (`model.logs.recorded_decoding.Decoding.producers`)."""
_SIZE = 9.5  # points
_WIDE, _HIGH = 0.602 * _SIZE / 72, 1.75 * _SIZE / 72  # width of a character of DejaVu Sans Mono, height of a line [inches]
_SIDE, _HEAD, _SETTINGS, _ROW, _FOOT = 0.3, 0.47, 0.17, 0.215, 0.2  # [inches]


class TokenPart(NamedTuple):
    """Part of a token on one line of the picture."""

    token: int
    """Number of the token; negative in the prompt."""
    line: int
    column: int
    text: str


def pieces(words: Sequence[str], columns: int, first: int = 0) -> list[TokenPart]:
    """Lay out tokens in lines: they follow each other, and break at newlines (shown as a sign) and at full lines.

    >>> pieces(["ab", "\\n", "cde"], 2)
    [TokenPart(token=0, line=0, column=0, text='ab'), TokenPart(token=1, line=1, column=0, text='↵'),
     TokenPart(token=2, line=2, column=0, text='cd'), TokenPart(token=2, line=3, column=0, text='e')]
    """
    found: list[TokenPart] = []
    line = column = 0
    for number, word in enumerate(words, start=first):
        shown = word.expandtabs(TAB).replace("\r", "")
        part = ""
        begun = column
        for letter in shown or "␀":
            if column == columns:
                if part:
                    found.append(TokenPart(number, line, begun, part))
                line, column, begun, part = line + 1, 0, 0, ""
            part += "↵" if letter == "\n" else letter if letter.isprintable() else "·"
            column += 1
            if letter == "\n":
                found.append(TokenPart(number, line, begun, part))
                line, column, begun, part = line + 1, 0, 0, ""
        if part:
            found.append(TokenPart(number, line, begun, part))
    return found


def draw(decoding: Decoding, words: Sequence[str], *, prompt: Sequence[str] = (), title: str = "", columns: int = 88) -> Figure:
    """Draw the text of a decoding, with each token in the colour of its source, over a line whose style also shows the source.

    Parameters
    ----------
    words
        The generated tokens as strings.
    prompt
        The tokens of the prompt as strings; if given, they precede the text in grey.
    columns
        Characters per line.
    """
    checks.whole("columns", columns, 20, 400)
    if len(words) != len(decoding.tokens):
        raise checks.ParameterError(f"words must be one string per token, {len(decoding.tokens)}, got {len(words)}; decode each")
    whole = pieces([*prompt, *words], columns, -len(prompt))
    lines = whole[-1].line + 1 if whole else 1
    if lines > MOST_LINES:
        raise checks.ParameterError(f"a text must have at most {MOST_LINES} lines here, got {lines}; decode fewer tokens")
    producers = decoding.producers
    counts = Counter(producers)
    order = [*[who for who in WORDS if who in counts], *[who for who in counts if who not in WORDS]]
    styles = dict(zip(order, series_styles(len(order)), strict=True))
    about = _settings(decoding, columns)
    with styled():
        width, head = 2 * _SIDE + columns * _WIDE, _HEAD + _SETTINGS * len(about)
        height = head + _ROW * len(counts) + 0.25 + lines * _HIGH + _FOOT
        figure, axes = canvas(width, height, (_SIDE / width, _FOOT / height, columns * _WIDE / width, lines * _HIGH / height))
        axes.set_xlim(0, columns)
        axes.set_ylim(lines, 0)
        axes.axis("off")
        for piece in whole:
            _piece(axes, piece, styles[producers[piece.token]] if piece.token >= 0 else None)
        said = title or f"Source of each token: {decoding.method}"
        figure.text(_SIDE / width, 1 - 0.28 / height, said, fontsize=13, weight="bold", va="center")
        for number, line in enumerate(about):
            level = 1 - (_HEAD + _SETTINGS * (number + 0.5)) / height
            figure.text(_SIDE / width, level, line, fontsize=9, color=GREY, va="center")
        handles = [
            Line2D([], [], color=style.colour, linestyle=style.line, linewidth=2.4,
                   label=f"{WORDS.get(who, who)}: {counts[who]} of {len(producers)} tokens")
            for who, style in styles.items()
        ]  # fmt: skip
        figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(_SIDE / width, 1 - (head + 0.08) / height),
                      borderaxespad=0, borderpad=0, handlelength=3, labelspacing=0.45)  # fmt: skip
    return figure


def _settings(decoding: Decoding, columns: int) -> list[str]:
    """The settings and the passes, wrapped to the width of the text."""
    shown = {key: value for key, value in decoding.settings.items() if value is not None}
    passes = ", ".join(f"{count} of the {role}" for role, count in decoding.account.passes_of.items())
    settings = ", ".join(f"{key} {value}" for key, value in shown.items())
    return [*wrap(f"{settings};", columns), *wrap(f"{len(decoding.tokens)} tokens, passes: {passes}", columns)]


def _piece(axes: Axes, piece: TokenPart, style: SeriesStyle | None) -> None:
    size = len(piece.text)
    if style is None:
        axes.text(piece.column, piece.line + 0.5, piece.text, family="DejaVu Sans Mono", fontsize=_SIZE, color=GREY, va="center",
                  parse_math=False)  # fmt: skip
        return
    pale = tuple(1 - 0.22 * (1 - part) for part in to_rgb(style.colour))
    corner, name = (piece.column + 0.06, piece.line + 0.1), f"token {piece.token}"
    axes.add_patch(Rectangle(corner, size - 0.12, 0.72, facecolor=pale, linewidth=0, label=name))
    level = piece.line + 0.88
    axes.plot([piece.column + 0.12, piece.column + size - 0.12], [level, level], color=style.colour, linestyle=style.line,
              linewidth=2.0, dash_capstyle="butt", solid_capstyle="butt", clip_on=False)  # fmt: skip
    axes.text(piece.column, piece.line + 0.5, piece.text, family="DejaVu Sans Mono", fontsize=_SIZE, color=INK, va="center",
              parse_math=False)  # fmt: skip
