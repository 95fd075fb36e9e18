"""`calibrate report`: errors of all predictions that can be compared with measured times, as a page of Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from calibrate.commands.common_options import guarded


@guarded
def report(
    folder: Annotated[
        Path,
        typer.Argument(
            metavar="DATA_DIR", envvar="DECODESIM_DATA", help="Folder of the public tables (gpu/, engine/, SOURCES.md)."
        ),
    ],
    check: Annotated[bool, typer.Option("--check", help="Write nothing; exit with 1 if the page is out of date.")] = False,
    out: Annotated[Path | None, typer.Option("-o", "--out", help="The page. Default: VALIDATION.md in the package.")] = None,
) -> None:
    """Recompute all prediction errors, and write them to the validation page, worst first.

    calibrate report data

    calibrate report data --check
    """
    from calibrate.validation import engine_tables, long_context_drafts, served_loads, validated_claims
    from calibrate.validation import validation_page as page

    path = page.default_path() if out is None else out
    claims = (
        *validated_claims.claims(folder), *engine_tables.claims(folder), *served_loads.claims(folder),
        *long_context_drafts.claims(),
    )  # fmt: skip
    if check:
        wrong = page.stale(claims, path)
        if wrong:
            print(f"out of date: {wrong}; update it: calibrate report DATA_DIR", file=sys.stderr)
            raise typer.Exit(1)
        print(f"{path.name} is up to date")
        return
    print(page.write(claims, path))
    for claim in claims:
        for case in claim.cases:
            if not case.met:
                print(f"bound missed: {claim.title}: {page.missed_targets(case)}")
