"""Where the times of a profile are from, in the words that stand in a figure: measured, composed or assumed, and by whom."""

from __future__ import annotations

import re

from matplotlib.axes import Axes

from figures.common.style import GREY
from model.hardware.cost_models import Hardware
from model.hardware.profile import AXES, Profile
from model.hardware.profile_costs import ProfileCosts

WORDS = {"layer": "layers", "dense": "products", "attention": "attention"}
_COMPOSED = re.compile(r"attention (?:split|at tensor_parallel) ([\d, ]+?)(?: ways)?: (composed [^(]*)")


def of_part(profile: Profile, part: str, tensor_parallel: int = 1) -> str:
    """How the times of one part came about: `measured`, or `composed` of what, and what is assumed of them.

    >>> from model.hardware import profile_files
    >>> vidur = profile_files.load("h100-llama-2-7b")
    >>> of_part(vidur, "dense"), of_part(vidur, "attention"), of_part(profile_files.load("h100-llama-2-13b"), "dense")
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
        if found and part == "attention" and str(tensor_parallel) in found[1].split(", "):
            return found[2].strip()
    return "measured" if part == "attention" else "composed of operations"


def is_measured(profile: Profile, part: str, tensor_parallel: int = 1) -> bool:
    """Whether the rows of a part were measured as they stand."""
    return of_part(profile, part, tensor_parallel) == "measured"


def parts_said(profile: Profile, tensor_parallel: int = 1) -> str:
    """The parts of a layer, each with how its times came about; one word where all came about alike.

    >>> from model.hardware import profile_files
    >>> parts_said(profile_files.load("h100-llama-2-7b")), parts_said(profile_files.load("rtx-4090-llama-3.1-8b"))
    ('products measured, attention composed of operations', 'measured')
    """
    found = {part: of_part(profile, part, tensor_parallel) for part in WORDS if part in profile.parts}
    if len({*found.values()}) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{WORDS[part]} {said}" for part, said in found.items())


def beyond(profile: Profile, tensor_parallel: int = 1, *, width: int, context: int, batch: int) -> str:
    """Which parts of a layer a figure takes farther than the table goes, where the reached share of the peaks is held; or nothing.

    >>> from model.hardware import profile_files
    >>> beyond(profile_files.load("h100-llama-2-13b"), width=16, context=1024, batch=128)
    'beyond the table: attention from width 1'
    >>> beyond(profile_files.load("rtx-4090-llama-3.1-8b"), width=16, context=1024, batch=128)
    ''
    """
    asked = {"width": width, "context": context, "batch": batch, "tokens": width * batch}
    found = []
    for part in WORDS:
        rows = profile.rows(part, tensor_parallel) if part in profile.parts else None
        if rows is None or not rows.height:
            continue
        # Contexts are counted with the token itself or without: one more or less is no step beyond.
        ends = {axis: int(rows[axis].max()) for axis in AXES[part]}  # type: ignore[arg-type]
        past = [f"{axis} {end}" for axis, end in ends.items() if asked[axis] > end + (axis == "context")]
        if past:
            found.append(f"{WORDS[part]} from {', '.join(past)}")
    return f"beyond the table: {'; '.join(found)}" if found else ""


def under_title(axes: Axes, title: str, said: str, also: str = "") -> None:
    """Name a panel, and say below that in small letters where its times are from."""
    text = "\n".join(filter(None, (said.replace(", ", ",\n", 1), also)))
    axes.set_title(title, fontsize=10.5, pad=20 + 11 * text.count("\n"))
    axes.text(0, 1.025, text, transform=axes.transAxes, fontsize=8, color=GREY, va="bottom", linespacing=1.1)


def of_hardware(hardware: Hardware) -> str:
    """What a cost model's seconds rest on."""
    if isinstance(hardware, ProfileCosts):
        return parts_said(hardware.profile, hardware.tensor_parallel)
    return hardware.provenance


def of_hardware_beyond(hardware: Hardware, *, width: int, context: int, batch: int) -> str:
    """`beyond` of a cost model, where it is one of a table."""
    if not isinstance(hardware, ProfileCosts):
        return ""
    return beyond(hardware.profile, hardware.tensor_parallel, width=width, context=context, batch=batch)
