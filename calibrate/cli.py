"""The `calibrate` command: each group of commands in a module of its own. What one needs is imported when it runs."""

from __future__ import annotations

import typer

from calibrate import import_cli

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="Profiles of hardware: what passes of a model take on a device, imported or measured.",
    epilog="Start with: calibrate import llmservingsim PROFILES/tp1 --model llama-3.1-8b --gpu rtx-4090 -o profiles",
)  # fmt: skip
import_cli.register(app)


def main() -> None:
    """Entry point of the `calibrate` command."""
    app()
