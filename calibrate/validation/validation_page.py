"""The validation page: every claim as a Markdown table, the largest errors first."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from calibrate.validation.validated_claims import Claim, PredictionErrors, percent
from model.base import bounded_files, whole_files

HEADER = """# Validation: errors of predictions

Errors of all predictions of this project that can be compared with measured times. `calibrate report DATA_DIR` (`make validate`)
recomputes them from the tables that `SOURCES.md` of the data folder names; nothing on this page is entered by hand.

The error is predicted over measured time, minus 1; tables show its absolute value: median, 90th percentile and worst case with its
coordinate. *Target* is the largest median allowed. Within each table the largest median comes first.
"""


def text(found: Sequence[Claim]) -> str:
    """Return all claims as a Markdown page that begins with the largest errors."""
    lines = [HEADER, "## Largest errors", ""]
    for claim in found:
        worst = claim.by_error[0]
        lines.append(f"* **{claim.title}**: {worst.name}, median {percent(worst.median)}, worst {percent(worst.largest)}.")
        over = [case for case in claim.cases if not case.met]
        lines += [f"  * target missed: {_over(case)}" for case in over]
    for number, claim in enumerate(found, 1):
        lines += ["", f"## {number}. {claim.title}", "", claim.description, "", f"**Known weaknesses.** {claim.weaknesses}", ""]
        lines += ["| case | count | median | 90th percentile | worst | target |", "|---|---:|---:|---:|---|---:|"]
        for case in claim.by_error:
            target = "" if case.target is None else percent(case.target)
            worst_ = percent(case.largest) + (f" ({case.where})" if case.where else "")
            lines.append(
                f"| {case.name} | {case.errors.size} | {percent(case.median)} | {percent(case.percentile_90)} | {worst_} "
                f"| {target} |"
            )
        lines += ["", f"Times {claim.sources}."]
    return "\n".join(lines) + "\n"


def _over(case: PredictionErrors) -> str:
    missed = []
    if case.target is not None and case.median > case.target:
        missed.append(f"median {percent(case.median)} over {percent(case.target)}")
    if case.target_90 is not None and case.percentile_90 > case.target_90:
        missed.append(f"90th percentile {percent(case.percentile_90)} over {percent(case.target_90)}")
    return f"{case.name}, {', '.join(missed)}"


# --- The file ---


def default_path() -> Path:
    """Path of the page in the package."""
    return Path(str(resources.files("calibrate") / "VALIDATION.md"))


LATER_SECTION = "<!-- "
"""Beginning of sections after the claims, which other commands write; they are kept."""


def _after_claims(path: Path) -> str:
    _, mark, rest = bounded_files.read_page(path).partition(f"\n{LATER_SECTION}")
    return mark + rest


def write(found: Sequence[Claim], path: Path) -> Path:
    """Write the page, completely or not at all."""
    return whole_files.write_text(path, text(found) + _after_claims(path))


def stale(found: Sequence[Claim], path: Path) -> str:
    """Return the first difference between the page and its claims; empty if there is none."""
    wanted = text(found).splitlines()
    if not path.is_file():
        return f"{path.name} does not exist"
    present = bounded_files.read_page(path).partition(f"\n{LATER_SECTION}")[0].splitlines()
    for number, (line, other) in enumerate(zip(present, wanted, strict=False), 1):
        if line != other:
            return f"{path.name}, line {number}: {line!r} should be {other!r}"
    return "" if len(present) == len(wanted) else f"{path.name} should have {len(wanted)} lines, got {len(present)}"
