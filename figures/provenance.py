"""Where the times of a profile are from, in the words that stand in a figure: measured, composed or assumed, and by whom."""

from __future__ import annotations

import re

from matplotlib.axes import Axes

from figures.style import GREY
from model.hardware import Hardware
from model.measured import Measured
from model.profile import Profile

WORDS = {"layer": "layers", "dense": "products", "attention": "attention"}
_COMPOSED = re.compile(r"attention split ([\d, ]+) ways: (composed [^(]*)")


def of_part(profile: Profile, part: str, ways: int = 1) -> str:
    """How the times of one part came about: `measured`, or `composed` of what, and what is assumed of them.

    >>> from model import profile
    >>> vidur = profile.load("h100-llama-2-7b")
    >>> of_part(vidur, "dense"), of_part(vidur, "attention"), of_part(profile.load("h100-llama-2-13b"), "dense")
    ('measured', 'composed of operations', 'composed of operations')
    """
    if profile.provenance == "measured":
        return "measured"
    if not any(part in source.parts for source in profile.sources):
        return "composed of operations"
    if part in ("layer", "dense"):
        return "measured"
    for note in profile.notes:
        found = _COMPOSED.match(note)
        if found and part == "attention" and str(ways) in found[1].split(", "):
            return found[2].strip()
    return "measured" if part == "attention" else "composed of operations"


def is_measured(profile: Profile, part: str, ways: int = 1) -> bool:
    """Whether the rows of a part were measured as they stand."""
    return of_part(profile, part, ways) == "measured"


def parts_said(profile: Profile, ways: int = 1) -> str:
    """The parts of a layer, each with how its times came about; one word where all came about alike.

    >>> from model import profile
    >>> parts_said(profile.load("h100-llama-2-7b")), parts_said(profile.load("rtx-4090-llama-3.1-8b"))
    ('products measured, attention composed of operations', 'measured')
    """
    found = {part: of_part(profile, part, ways) for part in WORDS if part in profile.parts}
    if len({*found.values()}) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{WORDS[part]} {said}" for part, said in found.items())


def under_title(axes: Axes, title: str, said: str) -> None:
    """Name a panel, and say below that in small letters where its times are from."""
    text = said.replace(", ", ",\n", 1)
    axes.set_title(title, fontsize=10.5, pad=20 if text == said else 31)
    axes.text(0, 1.025, text, transform=axes.transAxes, fontsize=8, color=GREY, va="bottom", linespacing=1.1)


def of_hardware(hardware: Hardware) -> str:
    """What a cost model's seconds rest on."""
    if isinstance(hardware, Measured):
        return parts_said(hardware.profile, hardware.ways)
    return hardware.provenance
