"""Caption and text alternative of a figure, taken from its titles, axis labels and legends."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

SUBJECT = "subject"
"""Identifier of the small line that names the subject of a figure (`style.with_subject_line`)."""
_TITLE_SIZE = 12
"""Least size of letters of a figure's title [points]."""
_MOST_SERIES = 12
"""Series that a text alternative names."""
_MOST_PANELS = 8
"""Panels that a text alternative describes."""


class Caption(NamedTuple):
    """Title of a figure in one line, and a description of its panels for those who do not see it."""

    title: str
    description: str


def of_figure(figure: Figure) -> Caption:
    """Return the caption of a figure.

    >>> from figures.common.style import canvas
    >>> figure, axes = canvas(4, 3, (0.2, 0.2, 0.7, 0.7))
    >>> _ = axes.plot([1, 2], [1, 1.5], label="γ = 3"), axes.set(xlabel="batch", ylabel="speed-up", title="Speed-up by batch")
    >>> _ = axes.legend()
    >>> of_figure(figure)
    Caption(title='Speed-up by batch', description='speed-up against batch; series: γ = 3')
    """
    large = [text for text in figure.texts if text.get_gid() != SUBJECT and text.get_text().strip()]
    titled = [text for text in large if float(text.get_fontsize()) >= _TITLE_SIZE] or large[:1]
    named = [_line(text.get_text()) for text in titled]
    panels = [title for axes in figure.axes for title in _titles(axes)]
    title = named[0] if named else panels[0] if panels else ""
    parts = [part for axes in figure.axes if (part := _panel(axes, title))]
    legends = [label for legend in figure.legends for label in (_line(text.get_text()) for text in legend.get_texts()) if label]
    parts = [*parts[:_MOST_PANELS], *([f"legend: {_listed(legends)}"] if legends else [])]
    return Caption(title, ". ".join(dict.fromkeys(parts)))


def _line(text: str) -> str:
    return " ".join(text.split())


def _titles(axes: Axes) -> Iterator[str]:
    for place in ("left", "center", "right"):
        if title := _line(axes.get_title(loc=place)):
            yield title


def _panel(axes: Axes, figure_title: str) -> str:
    """Words on one pair of axes: its title, what is drawn over what, and its series."""
    across, up = _line(axes.get_xlabel()), _line(axes.get_ylabel())
    drawn = f"{up} against {across}" if across and up else across or up
    titles = [title for title in _titles(axes) if title != figure_title]
    legend = axes.get_legend()
    series = [label for text in (legend.get_texts() if legend else ()) if (label := _line(text.get_text()))]
    words = ": ".join([*titles, *([drawn] if drawn else [])])
    return "; ".join([*([words] if words else []), *([f"series: {_listed(series)}"] if series else [])])


def _listed(words: list[str]) -> str:
    more = [f"{len(words) - _MOST_SERIES} more"] if len(words) > _MOST_SERIES else []
    return "; ".join([*words[:_MOST_SERIES], *more])
