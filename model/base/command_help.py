"""What the commands `sim` and `calibrate` have in common: help with examples that can be copied, and `--version`."""

from __future__ import annotations

import inspect
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

WIDEST = 160
"""Columns of help at most, in a terminal that has as many."""
SETTINGS = {"help_option_names": ["-h", "--help"], "max_content_width": WIDEST}
PROGRAMS = ("sim ", "calibrate ")


class DocumentedCommand(TyperCommand):
    """A command whose help prints example commands as they are written; other paragraphs are wrapped."""

    def format_help_text(self, ctx: Any, formatter: Any) -> None:
        """Write the help text paragraph by paragraph."""
        for paragraph in inspect.cleandoc(self.help or "").split("\n\n"):
            formatter.write_paragraph()
            with formatter.indentation():
                if paragraph.startswith(PROGRAMS):
                    formatter.write("".join(f"{'':{formatter.current_indent}}{line}\n" for line in paragraph.splitlines()))
                else:
                    formatter.write_text(paragraph)


def _print_version(wanted: bool) -> None:
    if wanted:
        from importlib.metadata import version

        print(f"decodesim {version('decodesim')}")
        raise typer.Exit


def version_option(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of a program before its command."""
