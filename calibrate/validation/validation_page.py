"""The page of errors: every claim as a table of Markdown, what is bad first."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from calibrate.validation.validated_claims import Claim, PredictionErrors, percent
from model.base import bounded_files, whole_files

HEADER = """# How far off

Every prediction of this project that can be held against a measured time, and how far off it was. `calibrate report DATA_DIR`
(`make validate`) computes all of it anew from the tables that `SOURCES.md` of the data folder names; nothing here is typed in.

An error is predicted over measured time, less 1, in size. *Median*: half of the errors are smaller; *nine of ten*: nine of ten are;
*worst*: the largest, and where it is. Within each table the worst case comes first.
"""


def text(found: Sequence[Claim]) -> str:
    """All claims as a page of Markdown: what is bad at first."""
    lines = [HEADER, "## Bad at", ""]
    for claim in found:
        worst = claim.ordered[0]
        where = f", its worst {percent(worst.largest)}"
        lines.append(f"* **{claim.title}**: {worst.name}, median {percent(worst.median)}{where}.")
        over = [case for case in claim.cases if not case.kept]
        lines += [f"  * asked, and missed: {_over(case)}" for case in over]
    for number, claim in enumerate(found, 1):
        lines += ["", f"## {number}. {claim.title}", "", f"**Bad at.** {claim.bad}", "", claim.says, ""]
        lines += ["| case | times | median | nine of ten | worst | asked of the median |", "|---|---:|---:|---:|---|---:|"]
        for case in claim.ordered:
            asked = "" if case.asked is None else percent(case.asked)
            worst_ = percent(case.largest) + (f" ({case.where})" if case.where else "")
            lines.append(
                f"| {case.name} | {case.errors.size} | {percent(case.median)} | {percent(case.ninety)} | {worst_} | {asked} |"
            )
        lines += ["", f"Times {claim.sources}."]
    return "\n".join(lines) + "\n"


def _over(case: PredictionErrors) -> str:
    said = []
    if case.asked is not None and case.median > case.asked:
        said.append(f"median {percent(case.median)} over {percent(case.asked)}")
    if case.asked_90 is not None and case.ninety > case.asked_90:
        said.append(f"nine of ten {percent(case.ninety)} over {percent(case.asked_90)}")
    return f"{case.name}, {', '.join(said)}"


# --- the file ---


def usual() -> Path:
    """Where the page lies: beside this file."""
    return Path(str(resources.files("calibrate") / "VALIDATION.md"))


OTHERS = "<!-- "
"""What somebody else has put behind the claims begins so, and stays."""


def _behind(path: Path) -> str:
    _, mark, rest = bounded_files.read_page(path).partition(f"\n{OTHERS}")
    return mark + rest


def write(found: Sequence[Claim], path: Path) -> Path:
    """Write the page, whole or not at all."""
    return whole_files.write_text(path, text(found) + _behind(path))


def stale(found: Sequence[Claim], path: Path) -> str:
    """How the page differs from what it should be: its first line that does; nothing where it does not."""
    wanted = text(found).splitlines()
    if not path.is_file():
        return f"{path.name} is not there"
    there = bounded_files.read_page(path).partition(f"\n{OTHERS}")[0].splitlines()
    for number, (line, other) in enumerate(zip(there, wanted, strict=False), 1):
        if line != other:
            return f"{path.name}, line {number}: {line!r} should be {other!r}"
    return "" if len(there) == len(wanted) else f"{path.name} should have {len(wanted)} lines, got {len(there)}"
