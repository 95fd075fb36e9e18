"""Provenance of the times of a profile, as figures print it: measured, composed of operations, or assumed."""

from __future__ import annotations

import re

from matplotlib.axes import Axes

from figures.common.style import GREY
from model.hardware.cost_models import Hardware
from model.hardware.profile import AXES, Profile
from model.hardware.profile_costs import ProfileCosts

WORDS = {"layer": "layers", "dense": "GEMMs", "attention": "attention"}
_COMPOSED = re.compile(r"attention (?:split|at tensor_parallel) ([\d, ]+?)(?: ways)?: (composed [^(]*)")


def of_part(profile: Profile, part: str, tensor_parallel: int = 1) -> str:
    """Return how the times of one part were obtained: `measured`, or `composed` of what under which assumption.

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
    """Return whether the rows of a part were measured directly."""
    return of_part(profile, part, tensor_parallel) == "measured"


def parts_provenance(profile: Profile, tensor_parallel: int = 1) -> str:
    """Provenance of each part of a layer; one word where it is the same for all.

    >>> from model.hardware import profile_files
    >>> parts_provenance(profile_files.load("h100-llama-2-7b")), parts_provenance(profile_files.load("rtx-4090-llama-3.1-8b"))
    ('GEMMs measured, attention composed of operations', 'measured')
    """
    found = {part: of_part(profile, part, tensor_parallel) for part in WORDS if part in profile.parts}
    if len({*found.values()}) == 1:
        return next(iter(found.values()))
    return ", ".join(f"{WORDS[part]} {said}" for part, said in found.items())


def extrapolated_parts(profile: Profile, tensor_parallel: int = 1, *, width: int, context: int, batch: int) -> str:
    """Name the parts of a layer for which a figure extrapolates beyond the table (constant share of the peaks), or return "".

    >>> from model.hardware import profile_files
    >>> extrapolated_parts(profile_files.load("h100-llama-2-13b"), width=16, context=1024, batch=128)
    'beyond the table: attention from width 1'
    >>> extrapolated_parts(profile_files.load("rtx-4090-llama-3.1-8b"), width=16, context=1024, batch=128)
    ''
    """
    asked = {"width": width, "context": context, "batch": batch, "tokens": width * batch}
    found = []
    for part in WORDS:
        rows = profile.rows(part, tensor_parallel) if part in profile.parts else None
        if rows is None or not rows.height:
            continue
        # Some contexts include the current token and some do not: a difference of one is not an extrapolation.
        ends = {axis: int(rows[axis].max()) for axis in AXES[part]}  # type: ignore[arg-type]
        past = [f"{axis} {end}" for axis, end in ends.items() if asked[axis] > end + (axis == "context")]
        if past:
            found.append(f"{WORDS[part]} from {', '.join(past)}")
    return f"beyond the table: {'; '.join(found)}" if found else ""


def under_title(axes: Axes, title: str, said: str, also: str = "") -> None:
    """Title a panel, with the provenance of its times in small letters below."""
    text = "\n".join(filter(None, (said.replace(", ", ",\n", 1), also)))
    axes.set_title(title, fontsize=10.5, pad=20 + 11 * text.count("\n"))
    axes.text(0, 1.025, text, transform=axes.transAxes, fontsize=8, color=GREY, va="bottom", linespacing=1.1)


def of_hardware(hardware: Hardware) -> str:
    """Provenance of a cost model's seconds."""
    if isinstance(hardware, ProfileCosts):
        return parts_provenance(hardware.profile, hardware.tensor_parallel)
    return hardware.provenance


def extrapolated_parts_of(hardware: Hardware, *, width: int, context: int, batch: int) -> str:
    """Return `extrapolated_parts` for a cost model that is based on a table, else ""."""
    if not isinstance(hardware, ProfileCosts):
        return ""
    return extrapolated_parts(hardware.profile, hardware.tensor_parallel, width=width, context=context, batch=batch)
