"""The validation page: every claim as a Markdown table, the largest errors first."""

from __future__ import annotations

import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path

from calibrate.validation.validated_claims import Claim, PredictionErrors, percent
from model.base import bounded_files, whole_files

HEADER = """# Validation: errors of predictions

Errors of all predictions of this project that can be compared with measured times. `calibrate report DATA_DIR` (`make validate`)
recomputes them from the tables that `SOURCES.md` of the data folder names; nothing on this page is entered by hand, except errors
that other projects publish of their own simulators, which are quoted with their sources.

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
        lines += [f"  * target missed: {missed_targets(case)}" for case in over]
    for number, claim in enumerate(found, 1):
        lines += ["", *section(claim, number)]
    return "\n".join(lines) + "\n"


def section(claim: Claim, number: int) -> list[str]:
    """Lines of the section of one claim."""
    further = list(dict.fromkeys(name for case in claim.cases for name in case.columns))
    heads = ["case", "count", "median", "90th percentile", "worst", *further, "target"]
    lines = [f"## {number}. {claim.title}", "", claim.description, "", f"**Known weaknesses.** {claim.weaknesses}", ""]
    lines += [f"| {' | '.join(heads)} |", "|---|---:|---:|---:|---|" + "---|" * len(further) + "---:|"]
    for case in claim.by_error:
        worst = percent(case.largest) + (f" ({case.where})" if case.where else "")
        errors = [str(case.errors.size), percent(case.median), percent(case.percentile_90), worst]
        cells = [case.name, *errors, *(case.columns.get(name, "") for name in further), _targets(case)]
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, "", f"Times {claim.sources}."]


def _targets(case: PredictionErrors) -> str:
    """Targets of a case; a single one is that of the median."""
    said = [] if case.target is None else [percent(case.target)]
    said += [] if case.target_worst is None else [f"worst {percent(case.target_worst)}"]
    return ", ".join([*said, *(f"{each.name} {percent(each.most)}" for each in case.targets)])


def missed_targets(case: PredictionErrors) -> str:
    """The case and each of its targets that is missed, in words."""
    found = [
        ("median", case.median, case.target), ("90th percentile", case.percentile_90, case.target_90),
        ("worst", case.largest, case.target_worst), *((each.name, each.value, each.most) for each in case.targets),
    ]  # fmt: skip
    missed = [f"{name} {_over(value, most)}" for name, value, most in found if most is not None and value > most]
    return f"{case.name}, {', '.join(missed)}"


def _over(value: float, most: float) -> str:
    """A value over its target, with as many digits as distinguish them."""
    pairs = ((f"{100 * value:.{digits}f} %", f"{100 * most:.{digits}f} %") for digits in range(1, 16))
    return " over ".join(next((pair for pair in pairs if pair[0] != pair[1]), (percent(value), percent(most))))


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
    if not path.is_file():
        return f"{path.name} does not exist"
    present = bounded_files.read_page(path).partition(f"\n{LATER_SECTION}")[0].splitlines()
    return _difference(present, text(found).splitlines(), path.name, 1)


def stale_sections(found: Sequence[Claim], path: Path) -> str:
    """Return the first difference between these claims and their sections of the page, which may have others; empty if none."""
    lines = bounded_files.read_page(path).partition(f"\n{LATER_SECTION}")[0].splitlines()
    starts = [row for row, line in enumerate(lines) if line.startswith("## ")]
    for claim in found:
        at = next((row for row in starts if re.fullmatch(rf"## \d+\. {re.escape(claim.title)}", lines[row])), None)
        if at is None:
            return f"{path.name} has no section {claim.title}"
        end = min((row for row in starts if row > at), default=len(lines) + 1) - 1
        wanted = section(claim, int(lines[at].split()[1].rstrip(".")))
        if said := _difference(lines[at:end], wanted, path.name, at + 1):
            return said
    return ""


ESTIMATE = re.compile(r"≈ (-?\d+(?:\.\d+)?)( %)?")
"""A number from random draws: rounding of another processor gives other draws."""
_TOLERANCE = {"": (0.15, 3.0), " %": (0.5, 1.0)}
"""Relative and absolute difference of estimates that counts as none, of counts and of percentages."""


def _difference(present: Sequence[str], wanted: Sequence[str], name: str, first: int) -> str:
    for number, (line, other) in enumerate(zip(present, wanted, strict=False), first):
        if not _alike(line, other):
            return f"{name}, line {number}: {line!r} should be {other!r}"
    return "" if len(present) == len(wanted) else f"{name} should have {len(wanted)} lines, got {len(present)}"


def _alike(line: str, other: str) -> bool:
    """True if two lines are equal but for estimates, which may differ by their tolerance."""
    if line == other:
        return True
    if ESTIMATE.sub(r"≈\2", line) != ESTIMATE.sub(r"≈\2", other):
        return False
    return all(
        abs(float(one) - float(two)) <= _TOLERANCE[unit][1] + _TOLERANCE[unit][0] * abs(float(one))
        for (one, unit), (two, _) in zip(ESTIMATE.findall(line), ESTIMATE.findall(other), strict=True)
    )
