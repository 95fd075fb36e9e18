"""The `calibrate` command. It imports what a command needs when that command runs: `calibrate --help` is quick."""

from __future__ import annotations

import typer

from calibrate import layers_command, links_command

app = typer.Typer(
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="What do real models and real hardware do? Measures them, and writes what it finds as files that `sim` reads.",
    epilog="Start with: calibrate layers --model llama-68m --quick -o profiles",
)  # fmt: skip
app.command("layers")(layers_command.layers)
app.command("links")(links_command.links)


def main() -> None:
    """Entry point of the `calibrate` command."""
    app()
