"""A step law in words: its coefficients with intervals, what its cells do not determine, its errors and its range."""

from __future__ import annotations

from typing import Any

import numpy as np

from model.engines import cells as cell_tables
from model.engines import engine_priors, kernel_times, next_cell
from model.engines.step_law import EXTRAPOLATION, SHARE, StepLaw
from model.engines.step_terms import PRIORS, Prior, in_coordinates_of_prior

CONTRADICTING = 0.15
"""Relative error of a fitted cell above which it is doubted [-]; repeated benchmarks differ by 1 to 3 %."""
PRIOR_ONLY = 0.8
"""A coefficient whose uncertainty is more than this share of its prior's is not determined by the cells [-]."""


def description(law: StepLaw) -> dict[str, Any]:
    """The law as a document of plain values."""
    rows = []
    priors, unknown = {**PRIORS, **engine_priors.used(law.engine, law.kernels)}, of_priors(law)
    for name in (*law.coefficients, "noise"):
        drawn, prior = law.draws[name], priors[name]
        low, high = np.quantile(drawn, [(1 - SHARE) / 2, (1 + SHARE) / 2])
        value = law.coefficients.get(name, float(np.median(drawn)))
        rows.append({
            "term": name, "value": value, "low": min(float(low), value), "high": max(float(high), value), "unit": prior.unit,
            "from": "prior" if name in unknown else "cells",
            "meaning": prior.meaning,
        })  # fmt: skip
    found: dict[str, Any] = {
        "name": law.name, "about": about(law), "unit": law.unit, "coefficients": rows,
        "not_told_apart": [list(pair) for pair in next_cell.confounded(law)],
        "left_out_errors": list(law.left_out), "range": None, "facts": dict(law.facts),
    }  # fmt: skip
    if law.cells is not None:
        found["cells"] = [
            row | {"left_out_error": error}
            for row, error in zip(cell_tables.rows(law.cells), law.left_out or [None] * law.cells.size, strict=True)
        ]
        found["range"] = {
            "sequences": [float(law.cells.sequences.min()), float(law.cells.sequences.max())],
            "draft_length": [int(law.cells.draft_length.min()), int(law.cells.draft_length.max())],
        }
    return found


def of_priors(law: StepLaw) -> frozenset[str]:
    """Names of the coefficients, and noise, that the law's cells do not determine: they are known from their priors alone."""
    names = (*law.coefficients, "noise")
    if law.cells is None:
        return frozenset(names)
    priors = {**PRIORS, **engine_priors.used(law.engine, law.kernels)}
    return frozenset(name for name in names if _share_of_prior(name, law.draws[name], priors[name]) > PRIOR_ONLY)


def _share_of_prior(name: str, drawn: Any, prior: Prior) -> float:
    return float(np.std(in_coordinates_of_prior(name, drawn)) / prior.sd)


def about(law: StepLaw) -> str:
    """One line: what the law was fitted to, and what gives its shape."""
    count = 0 if law.cells is None else law.cells.size
    shape = "no kernel model" if law.kernels is None else kernel_times.provenance(law.kernels)
    if law.experts is not None:
        shape = f"{law.experts.active} of {law.experts.number} experts"
    fitted = f"fitted to {count} cells" if count else "of priors, without cells"
    return f"step law {fitted} ({cell_tables.UNITS[law.unit]}); {shape}"


def extent(law: StepLaw) -> str:
    """One phrase: the number of cells, their unit and range, and the errors of each predicted from the others."""
    if law.cells is None:
        return f"no cells, in {law.unit}: priors only"
    number, length = law.cells.sequences, law.cells.draft_length
    batches = f"{number.min():g} to {number.max():g} sequences" if number.max() > number.min() else f"{number.max():g} at once"
    found = f"{law.cells.size} cell{'s' if law.cells.size > 1 else ''} of {law.unit}, {batches}, draft length {length.min():g}"
    found += f" to {length.max():g}" if length.max() > length.min() else ""
    if not law.left_out:
        return found
    errors = np.abs(law.left_out)
    return f"{found}; each predicted from the others: median error {np.median(errors):.1%}, worst {errors.max():.1%}"


def sentences(law: StepLaw) -> list[str]:
    """What the cells do not determine, the errors, and the range, as printed lines."""
    lines = []
    unknown = [row["term"] for row in description(law)["coefficients"] if row["from"] == "prior"]
    if unknown:
        lines.append(f"not determined by the cells (priors): {', '.join(unknown)}")
    for one, other in next_cell.confounded(law):
        lines.append(f"not told apart by the cells: {one} and {other}; their sum is known better than each")
    if law.engine is not None:
        used = engine_priors.used(law.engine, law.kernels)
        told = ", ".join(f"{name} ({prior.why})" for name, prior in used.items()) or "none, too few sources"
        lines.append(f"priors in seconds of {law.engine}: {told}; the others are shares of a plain step, as for all engines")
    if law.cells is None:
        return [*lines, "no cells: intervals are those of the priors; a few measured cells narrow them (`calibrate engine fit`)"]
    if law.left_out:
        errors = np.abs(law.left_out)
        worst = int(errors.argmax())
        where = f"{law.cells.sequences[worst]:g} sequences, draft length {law.cells.draft_length[worst]:g}"
        lines.append(
            f"each cell predicted from the others: median error {np.median(errors):.1%}, worst {errors[worst]:.1%} ({where})"
        )
    spare = law.cells.size - sum(row["from"] == "cells" for row in description(law)["coefficients"] if row["term"] != "noise")
    if spare <= 0:
        lines.append("no cell to spare: the width of the intervals comes from the prior of the cells' errors")
    low, high = law.cells.sequences.min(), law.cells.sequences.max()
    lines.append(
        f"cells: {low:g} to {high:g} sequences, draft length {law.cells.draft_length.min():g} to {law.cells.draft_length.max():g};"
        f" beyond them the intervals widen by {EXTRAPOLATION:.0%} per doubling"
    )
    return lines


def doubts(law: StepLaw) -> list[str]:
    """The fitted cell that the law misses most, as a printed line, if it misses it by more than `CONTRADICTING`."""
    if law.cells is None:
        return []
    away = law.predict(law.cells).values / law.cells.values - 1
    worst = int(np.abs(away).argmax())
    if abs(away[worst]) <= CONTRADICTING:
        return []
    where = f"{law.cells.sequences[worst]:g} sequences and draft length {law.cells.draft_length[worst]:g}"
    return [f"the law misses its own cell of {where} by {away[worst]:+.0%}: check its unit, and that one engine gave all cells"]
